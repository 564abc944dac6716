"""Turns drawn by the engine: with and without the prefix cache, in batches, up to their ends."""

import jax
import pytest

from hjax.data.tasks import get_task
from hjax.environments.episode import TurnRequest
from hjax.models.compute import Compute
from hjax.models.model_config import ModelConfig
from hjax.models.parameters import decoder_network
from hjax.rollout.generator import Generator
from hjax.rollout.sampling_params import SamplingParams
from hjax.rollout.turn_generator import TurnGenerator
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
