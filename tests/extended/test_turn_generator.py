"""Turns drawn by the engine: with and without the prefix cache, in batches, up to their ends."""

import sys

import jax
import pytest
from serving_double import byte_tokenizer

from hjax.data.tasks import get_task
from hjax.environments.episode import TurnRequest
from hjax.models.compute import Compute
from hjax.models.model_config import LayerKind, ModelConfig
from hjax.models.parameters import decoder_network
from hjax.rollout.constraint import Constraint
from hjax.rollout.generator import Generator
from hjax.rollout.sampling_params import SamplingParams
from hjax.rollout.turn_generator import TurnGenerator
from hjax.run.backends import ProcessProbe
from hjax.sharding.layout import make_layouts

TOKENIZER = get_task("maze").tokenizer()
OBSERVATION = TOKENIZER.encode("!00", add_special=False)
EPISODES, TURNS, LIMIT = 11, 4, 5


@pytest.fixture(scope="module")
def model():
    layout = make_layouts(jax.devices()[:1]).generate
    network = decoder_network(ModelConfig(TOKENIZER.vocab_size, 32, 64, 2, 4, 2, 8, 256))
    generator = Generator(network, layout, Compute(unroll_layers=True))
    return generator.engine, generator.decoding_params(network.create(0, layout))


def prompt(number):
    """Of different lengths; the last three begin alike."""
    return TOKENIZER.encode("@.#\n" * min(number + 1, 9) + "NESW"[number % 4])


def play(model, rows, stop=()):
    """The turns of each episode; the ``stop`` strings are those of every second episode."""
    engine, params = model
    turns = TurnGenerator(engine, params, TOKENIZER, slots=8, row_tokens=100, rows=rows)
    responses, drawn = [[] for _ in range(EPISODES)], [[] for _ in range(EPISODES)]
    for turn in range(TURNS):
        # Not all play in every turn.
        playing = [n for n in range(EPISODES) if turn < 2 or n % 3]
        requests = [
            TurnRequest(n, turn, prompt(n), responses[n], len(responses[n]), LIMIT,
                        stop if n % 2 else ())
            for n in playing
        ]  # fmt: skip
        made = turns.draw(requests, seed=3, step=2, sampling=SamplingParams())
        for n, one in zip(playing, made, strict=True):
            drawn[n].append(one)
            responses[n] += [*one.tokens, *OBSERVATION]
    return drawn, turns.totals


def test_the_prefix_cache_changes_nothing_that_is_drawn(model):
    with_cache, totals = play(model, rows=EPISODES)
    without, full = play(model, rows=0)
    assert full["cached_tokens"] == 0 < totals["cached_tokens"]
    for one, other in zip(with_cache, without, strict=True):
        assert [turn.tokens for turn in one] == [turn.tokens for turn in other]
        for mine, theirs in zip(one, other, strict=True):
            assert len(mine.tokens) == LIMIT and not mine.ended
            assert mine.logprobs["logprobs"] == pytest.approx(theirs.logprobs["logprobs"], abs=1e-4)


def test_a_stop_string_ends_a_turn_of_those_that_have_it(model):
    plain, _ = play(model, rows=EPISODES)
    stops = "N", "1", "!", ".G"
    cut, _ = play(model, rows=EPISODES, stop=stops)
    ended = 0
    for n, (one, other) in enumerate(zip(plain, cut, strict=True)):
        text, short = (TOKENIZER.decode_response([], each[0].tokens) for each in (one, other))
        ends = [text.index(stop) + len(stop) for stop in stops if stop in text and n % 2]
        assert short == text[: min(ends, default=len(text))]
        assert other[0].ended == bool(ends)
        ended += bool(ends)
    assert ended  # else nothing was tested


# Rows that stay in their slots, against full prefill of every turn.


def observation(number, turn):
    """Very different lengths: none long in most turns, one too long to be appended."""
    size = {(2, 1): 70, (5, 1): 20, (5, 2): 9}.get((number, turn), (number + turn) % 4)
    return TOKENIZER.encode(("!0." * size)[:size], add_special=False)


def fresh(number, turn):
    """Whether the history of this episode is replaced in this turn."""
    return number in (4, 7) and turn == 2


def episodes_of(model, rows, sampling=None, stop=(), limit=4, slots=8):
    """Tokens and log-probs of the turns of each episode, and the totals: cohorts of unequal sizes,
    fresh histories, episodes that end at different turns."""
    engine, params = model
    turns = TurnGenerator(engine, params, TOKENIZER, slots=slots, row_tokens=150, rows=rows)
    prompts = [prompt(n) for n in range(EPISODES)]
    responses, drawn, draws = [[] for _ in prompts], [[] for _ in prompts], [0] * EPISODES
    for turn in range(5):
        for cohort in (0, 1):
            playing = [n for n in range(EPISODES) if (n >= 7) == bool(cohort) and turn <= 2 + n % 3]
            requests = [
                TurnRequest(n, turn, prompts[n], responses[n], draws[n], limit + n % 3,
                            stop if n % 2 else (), cohort)
                for n in playing
            ]  # fmt: skip
            made = turns.draw(requests, seed=3, step=2, sampling=sampling or SamplingParams())
            for n, one in zip(playing, made, strict=True):
                drawn[n].append((one.tokens, one.logprobs["logprobs"], one.ended))
                following = observation(n, turn)
                draws[n] += len(one.tokens) + len(following)
                if fresh(n, turn):
                    prompts[n], responses[n] = prompt(n)[:3] + following, []
                else:
                    responses[n] = [*responses[n], *one.tokens, *following]
    return drawn, turns.totals


def assert_equal_episodes(some, others):
    for one, other in zip(some, others, strict=True):
        assert [(tokens, ended) for tokens, _, ended in one] == [
            (tokens, ended) for tokens, _, ended in other
        ]
        for (_, mine, _), (_, theirs, _) in zip(one, other, strict=True):
            assert mine == pytest.approx(theirs, abs=1e-4)


def model_of(devices=1, unroll=True, dtype="auto", **config):
    layout = make_layouts(jax.devices()[:devices]).generate
    network = decoder_network(ModelConfig(TOKENIZER.vocab_size, 32, 64, 2, 4, 2, 8, 256, **config))
    generator = Generator(network, layout, Compute(unroll_layers=unroll), cache_dtype=dtype)
    return generator.engine, generator.decoding_params(network.create(0, layout))


@pytest.mark.parametrize("options", [
    {"devices": 2, "unroll": False},
    {"dtype": "int8", "layer_kinds": (LayerKind(window=6), LayerKind())},
], ids=str)  # fmt: skip
def test_rows_that_stay_draw_what_full_prefill_does(options):
    model = model_of(**options)
    with_rows, totals = episodes_of(model, rows=EPISODES)
    without, full = episodes_of(model, rows=0)
    assert totals["cached_tokens"] > full["prompt_tokens"] / 2 > full["cached_tokens"] == 0
    assert_equal_episodes(with_rows, without)


def test_rows_that_stay_count_tokens_for_penalties_and_end_at_stop_strings(model):
    for sampling, stop in (
        (SamplingParams(repetition_penalty=1.7, presence_penalty=0.5), ()),
        (SamplingParams(frequency_penalty=0.9, min_tokens=2, temperature=0.7), ("N", "1", "!")),
    ):
        with_rows, _ = episodes_of(model, EPISODES, sampling, stop, limit=6)
        without, _ = episodes_of(model, 0, sampling, stop, limit=6)
        assert_equal_episodes(with_rows, without)


def test_a_turn_appends_the_last_token_and_the_observation_alone(model):
    engine, params = model
    turns = TurnGenerator(engine, params, TOKENIZER, slots=4, row_tokens=60, rows=4)
    rows, drawn = [prompt(n) for n in range(3)], [[]] * 3
    for turn in range(3):
        before = dict(turns.totals)
        requests = [
            TurnRequest(n, turn, rows[n], drawn[n], len(drawn[n]), 4) for n in range(3)
        ]  # fmt: skip
        made = turns.draw(requests, seed=1, sampling=SamplingParams())
        new = {name: count - before[name] for name, count in turns.totals.items()}
        if turn:
            # Of each row the last token drawn and three of the observation are new.
            assert new["prompt_tokens"] - new["cached_tokens"] == 3 * (1 + len(OBSERVATION))
        drawn = [[*old, *one.tokens, *OBSERVATION] for old, one in zip(drawn, made, strict=True)]


@pytest.mark.parametrize("rows", [EPISODES, 0], ids=["rows stay", "prefilled"])
def test_constraints_hold_in_every_turn_and_say_which_tokens_had_no_choice(rows):
    """Log-probs of the policy stay those of the whole vocabulary: of its own distribution."""
    pytest.importorskip("llguidance")
    tokenizer = byte_tokenizer()
    layout = make_layouts(jax.devices()[:1]).generate
    network = decoder_network(ModelConfig(258, 32, 64, 2, 4, 2, 8, 256))
    engine = (generator := Generator(network, layout, Compute())).engine
    params = generator.decoding_params(network.create(0, layout))
    turns = TurnGenerator(engine, params, tokenizer, slots=8, row_tokens=100, rows=rows)
    regex, bad = Constraint(regex="ab(c|d)e"), Constraint(regex="(")
    responses = [[] for _ in range(6)]
    for turn in range(3):
        made = turns.draw(
            [
                TurnRequest(
                    n, turn, [10 + n] * (n + 1), responses[n], len(responses[n]), 8,
                    constraint=(regex, None, bad)[n % 3],
                )
                for n in range(6)
            ],
            seed=1, sampling=SamplingParams(stop=(257,)),
        )  # fmt: skip
        for n, one in enumerate(made):
            responses[n] += [*one.tokens, 9, 8]
            assert bool(one.failed) == (n % 3 == 2) == (not one.tokens)
            if n % 3:
                assert not any(one.forced)
                continue
            assert bytes(one.tokens[:-1]) in (b"abce", b"abde") and one.tokens[-1] == 257
            assert list(one.forced) == [True, True, False, True, True] and one.ended
            sampled, own = one.logprobs["logprobs"], one.logprobs["policy_logprobs"]
            assert [x == 0 for x in sampled] == list(one.forced)
            assert all(x < -1 for x in own)  # one of 258 by a model that has not learned


def test_nothing_is_compiled_after_precompile(model, monkeypatch):
    engine, params = model
    turns = TurnGenerator(engine, params, TOKENIZER, slots=8, row_tokens=150, rows=EPISODES)
    turns.precompile()
    probe = ProcessProbe()
    monkeypatch.setattr(sys.modules[__name__], "TurnGenerator", lambda *_, **options: turns)
    episodes_of(model, EPISODES)
    turns.replace_params(params)
    episodes_of(model, EPISODES)
    assert probe.count == 0
