"""A rollout's shared beginnings are read once and long prompts in chunks: the same tokens, less
work, and nothing compiled late. Sizes are made small here; what is counted is counted by hand."""

import dataclasses
import itertools
import json

import jax
import numpy as np
import pytest
from helpers import computed, generated, trainer_of
from test_rollout_engine import ODD, PLAIN, Case, drawn_by, on_host

from hjax.kernels import decode
from hjax.models.append_attention import BLOCK
from hjax.models.compute import Compute
from hjax.models.parameters import decoder_network
from hjax.rollout import prefix_sharing
from hjax.rollout.generator import Generator
from hjax.rollout.prefix_sharing import PrefixSharing, find_shared_prefixes
from hjax.rollout.rollout_job import GenerationConfig, ResumedResponses, RolloutJob
from hjax.rollout.sampling_params import SamplingParams
from hjax.sharding.layout import make_layouts, replicate_axes, shard_bytes

CHUNK, NEW = 64, 40


@pytest.fixture(autouse=True)
def small(monkeypatch):
    sizes = {"SHORT_PROMPT": 32, "PREFILL_CHUNK": CHUNK, "PROMPT_COLUMNS": (32, CHUNK),
             "MAX_PREFILL_TOKENS": 400, "MIN_SAVED_TOKENS": 64}  # fmt: skip
    for name, value in sizes.items():
        monkeypatch.setattr(prefix_sharing, name, value)
    monkeypatch.setattr("hjax.rollout.scheduler.PREFILL_CHUNK", CHUNK)


def prompts_of(count, length, head, seed=0):
    """int32 [count, length] padded on the left, with a mask: most begin with the same ``head``
    tokens, every fourth with others; they end in 1 to 20 of their own, one in as many as go."""
    draw = np.random.default_rng(seed)
    common = draw.integers(1, 64, head)
    tokens, mask = np.zeros((count, length), np.int32), np.zeros((count, length), bool)
    for i in range(count):
        begun = draw.integers(1, 64, head) if i % 4 == 3 else common
        own = length - head if i == 1 else int(draw.integers(1, min(20, length - head) + 1))
        text = np.concatenate([begun, draw.integers(1, 64, own)])
        tokens[i, -len(text) :], mask[i, -len(text) :] = text, True
    return tokens, mask


def made_by(case):
    sizes = dict(case.sizes)
    count = int(np.prod(list(sizes.values())))
    layout = make_layouts(jax.devices()[:count], sizes, {"tensor": -1, "pipe": -1}).generate
    layout = replicate_axes(layout, ["kv_heads"] if sizes.get("tensor", 1) > PLAIN.kv_heads else [])
    network = decoder_network(dataclasses.replace(case.config, max_length=512))
    compute = Compute(unroll_layers=case.unroll)
    generator = Generator(network, layout, compute, case.form, case.cache)
    options = {
        "seed": 3, "step": 1, "samples": case.samples, "max_new_tokens": NEW,
        "sampling": dataclasses.replace(case.sampling, stop=(0, 1)),
    }  # fmt: skip
    return generator, network.create(1, layout), options


def rollout(case, length, head, whole=False):
    generator, params, options = made_by(case)
    prompts = prompts_of(case.prompts, length, head)
    sequence = np.arange(case.prompts * case.samples, dtype=np.int32)
    generator._needs_slots = lambda *_: not whole
    more = {} if whole else {"slots": case.slots, "lookup": case.lookup}
    made = on_host(generated(generator, params, *prompts, sequence, **more, **options))
    return made, prompts[1]


# Prompts of 150 tokens are read whole by two while nobody is decoded, then in chunks of 64; those
# of 500 in chunks always.
CASES = {
    "chunks while others are decoded, devices": (
        Case(samples=2, prompts=12, slots=8, sizes=(("data", 2), ("tensor", 2))), 150, 50),
}  # fmt: skip
SLOW = {
    "shared, all at once": (Case(samples=2, prompts=8), 60, 40),
    "chunks": (Case(samples=2, prompts=9, slots=6), 150, 50),
    "chunks alone, nothing shared": (Case(samples=1, prompts=6, slots=2), 500, 0),
    "chunks always": (Case(samples=2, prompts=8, slots=6, unroll=True, form=decode.ROWS), 490, 300),
    "windows, unrolled": (
        Case(samples=2, prompts=8, slots=8, config=ODD, unroll=True, form=decode.ROWS), 150, 50),
    "a sample each, parts": (Case(samples=1, prompts=16, slots=8, sizes=(("fsdp", 4),)), 150, 99),
    "the kernel": (Case(samples=2, prompts=8, slots=8, form=decode.TPU_INTERPRETED), 150, 50),
    "the kernel, devices": (
        Case(samples=2, prompts=8, slots=8, form=decode.TPU_INTERPRETED,
             sizes=(("data", 2), ("tensor", 4))), 150, 50),
    "filled columns": (
        Case(samples=2, prompts=8, slots=8, form=decode.GPU_INTERPRETED, unroll=True), 150, 50),
    "guesses": (Case(samples=2, prompts=8, slots=8, lookup=2), 150, 50),
    "int8": (Case(samples=2, prompts=9, slots=6, cache="int8"), 150, 50),
    "int8, devices": (
        Case(samples=2, prompts=12, slots=8, sizes=(("data", 2), ("tensor", 2)), cache="int8"),
        150, 50),
}  # fmt: skip


@pytest.mark.parametrize(
    "name", [*CASES, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]
)
def test_responses_are_those_of_prompts_read_whole(name):
    case, length, head = (CASES | SLOW)[name]
    found, mask = rollout(case, length, head)
    expected, _ = rollout(dataclasses.replace(case, form=decode.ROWS, lookup=0), length, head, True)
    known = found.pop("prompt_known")[:: case.samples]
    for key, value in expected.items():
        if value.dtype == np.float32:
            np.testing.assert_allclose(found[key], value, atol=case.near)
        else:
            np.testing.assert_array_equal(found[key], value)
    # By hand: all but every fourth share whole blocks of the head, which leave a token; of those
    # that enter a data-parallel part the first one reads them.
    parts = dict(case.sizes).get("data", 1) * dict(case.sizes).get("fsdp", 1)
    block = head // BLOCK * BLOCK
    shares = [i % 4 != 3 for i in range(case.prompts)]
    in_chunks = length > CHUNK
    shares = [s and (in_chunks or mask[i].sum() - block <= 32) for i, s in enumerate(shares)]
    assert set(known) <= {0, block}
    assert all(shares[i] for i in np.flatnonzero(known))
    if block and parts == 1:
        assert (known > 0).sum() == sum(shares) - 1 > 2
    elif block:
        assert sum(shares) - parts <= (known > 0).sum() < sum(shares)


STAGES = (("pipe", 2),)


def test_stages_and_responses_in_parts_read_prompts_whole():
    count = 4
    work = RolloutJob(
        *prompts_of(count, 150, 50), np.zeros((count, 2), np.uint32), GenerationConfig(NEW)
    )
    first = dataclasses.replace(work, config=GenerationConfig(NEW, pause_after=20))
    ended = np.zeros(count, bool)
    last = dataclasses.replace(work, resumed=ResumedResponses(20, ended, {}))
    engine, staged = (made_by(Case(samples=1, sizes=sizes))[0].engine for sizes in ((), STAGES))
    found = [PrefixSharing(*given).active for given in itertools.product(
        (engine, staged), (work, first, last))]  # fmt: skip
    assert found == [True, False, False, False, False, False]


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        Case(samples=2, prompts=8, slots=8, sizes=STAGES),
        Case(samples=2, prompts=8, slots=8, cuts=(20,)),
        Case(samples=2, prompts=8, slots=8, cuts=(20,), sizes=STAGES, lookup=2),
    ],
    ids=["stages", "in parts", "both, guesses"],
)
def test_long_prompts_with_stages_and_in_parts(case):
    plain = Case(samples=2, prompts=8, form=decode.ROWS)
    expected, _ = rollout(plain, 150, 50, True)
    generator, params, options = made_by(case)
    sequence = np.arange(case.prompts * case.samples, dtype=np.int32)
    given = *prompts_of(case.prompts, 150, 50), sequence
    found, _ = drawn_by(generator, params, given, case, options)
    assert "prompt_known" not in found
    for key, value in expected.items():
        if value.dtype == np.float32:
            np.testing.assert_allclose(found[key], value, atol=case.near)
        else:
            np.testing.assert_array_equal(found[key], value)


def test_what_is_shared_is_found_and_pays():
    """By hand: a beginning of all, one that half of them go on with, and what is too little."""
    draw = np.random.default_rng(0)

    def text(blocks):
        return draw.integers(0, 9, blocks * BLOCK).tolist()

    all_of_them, half, pair = text(3), text(2), text(1)
    prompts = [all_of_them + (half if i < 4 else []) + text(1) + [i] for i in range(8)]
    prompts += [pair + [5], pair + [6]]  # a block of two: 16 tokens, less than pay
    prompts += [all_of_them]  # of itself the last block is read, so that there is a last token
    pieces, of = find_shared_prefixes(prompts, 100)
    assert [(len(p.tokens) // BLOCK, p.new // BLOCK) for p in pieces] in (
        [(2, 2), (5, 3), (3, 1)], [(2, 2), (3, 1), (5, 2)]
    )  # fmt: skip
    for number, own in enumerate(of):
        if own:
            last = pieces[own[-1]]
            assert list(last.tokens) == prompts[number][: len(last.tokens)]
            assert len(last.tokens) < len(prompts[number])
    assert [len(own) > 1 for own in of[:4]] == [True] * 4 and of[8:10] == [(), ()]
    assert of[10] == (0,)
    # No more than there is room for, and each part reads its own.
    few, _ = find_shared_prefixes(prompts, 2)
    assert [len(p.tokens) for p in few] == [2 * BLOCK]
    none, _ = find_shared_prefixes(prompts[:8], 100, parts=8)
    assert none == []


def test_decoding_waits_for_few_chunks():
    case, length = Case(samples=1, prompts=8, slots=4), 500
    generator, params, options = made_by(case)
    options["sampling"] = SamplingParams(stop=(0,))
    engine, said = generator.engine, []

    def watch(owner, name):
        method = getattr(owner, name)

        def told(*given):
            made = method(*given)
            alone = name == "decode" and made[1].done.all()
            said.append("nobody is left" if alone else name)
            return made

        setattr(owner, name, told)

    watch(engine, "decode"), watch(engine, "admit"), watch(engine.chunked_prefill, "prefill")
    tokens = np.random.default_rng(0).integers(1, 64, (case.prompts, length), np.int32)
    prompts = tokens, tokens > 0  # all of them long
    arguments = *prompts, np.arange(case.prompts, dtype=np.int32)
    generated(generator, params, *arguments, slots=case.slots, **options)
    said.clear()  # what was compiled first
    generated(generator, params, *arguments, slots=case.slots, **options)
    # 500 tokens: 7 chunks of 64 and a rest of 52; with nobody decoded as many as there are.
    assert said.count("prefill") == 7 * 8 and said.count("admit") == 8
    # Of what follows a dispatch after which some go on, up to the next one.
    entering = lambda x: x in ("prefill", "admit")  # noqa: E731
    runs = [list(run) for _, run in itertools.groupby(said, key=entering)]
    counts = [run.count("prefill") for before, run in itertools.pairwise(runs)
              if before[-1] == "decode"]  # fmt: skip
    assert max(counts) <= prefix_sharing.MAX_CHUNKS and min(counts) > 0 and sum(counts) > 7


def test_the_memory_of_reading_is_a_chunk_s():
    """With wide MLPs: what grows with the prompt is its keys and values, no activation."""
    wide = dataclasses.replace(PLAIN, mlp_size=4096)
    generator, params, options = made_by(Case(samples=1, config=wide))
    given = {k: v for k, v in options.items() if k not in ("seed", "step")}
    abstract = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), params
    )

    def needed(length):
        """Bytes of what reads prompts of up to so many tokens, and of blocks and cache; runs."""
        config = GenerationConfig(slots=2, **given)
        chunk, rest, decoding = generator.programs("generate", abstract, 8, length, config)
        assert [p.name.partition(".")[2] for p in (chunk, rest, decoding)] == [
            "prefill_chunk", "prefill", "decode"
        ]  # fmt: skip
        used = [p.trace().lower().compile().memory_analysis() for p in (chunk, rest)]
        held = shard_bytes(decoding.resident["blocks"])
        return max(x.temp_size_in_bytes for x in used), held, (chunk.runs, rest.runs)

    (short, held, few), (long, more, many) = needed(1280), needed(2560)
    token = 2 * PLAIN.layers * PLAIN.kv_heads * PLAIN.head_dim * 4
    assert long - short < 10 * 1280 * token < 1280 * wide.mlp_size * 4 / 5
    assert (held, more) == (5 * 1280 * token, 5 * 2560 * token)
    assert (few, many) == ((8 * 19, 8), (8 * 39, 8))


@pytest.mark.parametrize("length, head", [(60, 40), pytest.param(150, 50, marks=pytest.mark.slow)])
def test_nothing_is_compiled_for_other_beginnings(length, head):
    case = Case(samples=2, prompts=8, slots=8)
    generator, params, options = made_by(case)
    compiled, event = [], "/jax/core/compile/backend_compile_duration"
    sequence = np.arange(16, dtype=np.int32)
    generated(generator, params, *prompts_of(8, length, 0), sequence, slots=8, **options)
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, *_, **__: compiled.append(name) if name == event else None
    )
    try:
        for seed, some in enumerate((head, 0, 16, length - 20, 0)):
            given = *prompts_of(8, length, some, seed), sequence + 16 * seed
            generated(generator, params, *given, slots=8, **options)
    finally:
        jax.monitoring.clear_event_listeners()
    assert not compiled


RUNS = {
    "colocate": ("GRPO", {}),
    "apart, ahead": ("GRPO", {"placement": "disaggregate", "rollout.max_staleness": 1,
                              "rollout.deterministic": True}),
    "greedy too, tensor": ("ReMax", {"layout.actor.generate.tensor": 2,
                                     "layout.actor.train.tensor": 2}),
    "critic, packs": ("PPO", {"data.packing": 192}),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_training_has_the_same_metrics_and_says_what_was_saved(name, tmp_path, monkeypatch):
    algorithm, changes = RUNS[name]
    (tmp_path / "mine.py").write_text(
        "def reward(prompts, responses, **columns):\n"
        "    return [sum(t % 2 for t in tokens) / len(tokens) for tokens in responses]\n"
    )
    tokens, mask = prompts_of(40, 150, 64)
    lines = [json.dumps({"prompt_tokens": t[m].tolist()}) for t, m in zip(tokens, mask)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines))
    keys = changes | {
        "data.path": f"{tmp_path}/prompts.jsonl", "reward.function": f"{tmp_path}/mine.py:reward",
        "model.vocab_size": 64, "rollout.prompts": 16, "rollout.slots": 16, "steps": 2,
        "rollout.max_response_length": 24, "eval.every": 2, "warm_start.steps": 0,
        "cluster.devices_per_process": 2,
    }  # fmt: skip
    rows = {}
    for way in ("with", "without"):
        if way == "without":
            monkeypatch.setattr(prefix_sharing, "SHORT_PROMPT", 1000)
        with trainer_of(algorithm, keys, workdir=tmp_path / way) as trainer:
            rows[way] = trainer.run()
    for one, other in zip(*rows.values(), strict=True):
        found = computed(one)
        # About three quarters of the prompts are 64 tokens that are shared and some of their own.
        assert 0.1 < found.pop("rollout/prefix_tokens") < 0.75
        assert found == pytest.approx(computed(other), rel=1e-4, abs=1e-5)
        if "ahead" not in name:
            assert found["rollout/token_prob_error"] == pytest.approx(1, abs=1e-4)
