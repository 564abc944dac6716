"""Sequences that enter and leave slots draw what each draws alone, and nothing is compiled late."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import generated

from hjax.kernels import cache_axis, decode
from hjax.kernels.attention import ScoreOptions
from hjax.kernels.decode import SlotMask
from hjax.models.compute import Compute
from hjax.models.model_config import LayerKind, ModelConfig
from hjax.models.parameters import decoder_network
from hjax.rollout import bucketing, prefix_sharing
from hjax.rollout.engine import STEPS
from hjax.rollout.generator import Generator
from hjax.rollout.rollout_job import GenerationConfig
from hjax.rollout.sampling_params import SamplingParams
from hjax.sharding.layout import make_layouts, replicate_axes, shard_bytes

PLAIN = ModelConfig(
    vocab_size=64,
    hidden_size=16,
    mlp_size=24,
    layers=2,
    heads=8,
    kv_heads=2,
    head_dim=8,
    max_length=256,
)
# Windows in every other layer, and capped scores.
ODD = dataclasses.replace(
    PLAIN,
    layer_kinds=(LayerKind(window=5, rope=0), LayerKind(window=None, rope=0)),
    attention_softcap=20.0,
)
FOUR = dataclasses.replace(PLAIN, layers=4)
FOUR_ODD = dataclasses.replace(ODD, layers=4, layer_kinds=2 * ODD.layer_kinds)
LENGTH, NEW = 7, 90


def layout_of(sizes):
    """The generate layout of so many devices, the key-value heads whole where they are fewer."""
    count = int(np.prod(list(sizes.values())))
    layout = make_layouts(jax.devices()[:count], sizes, {"tensor": -1, "pipe": -1}).generate
    return replicate_axes(layout, ["kv_heads"] if sizes.get("tensor", 1) > PLAIN.kv_heads else [])


@dataclasses.dataclass(frozen=True)
class Case:
    """A rollout.

    Attributes:
      slots: rows at a time; 0: all.
      ends: tokens that end a response: about one draw in 64 / ends is one.
      lookup: tokens that are guessed at a time.
      cache: what keys and values are kept in.
      cuts: tokens after which it is left off, and resumed.
    """

    samples: int = 4
    prompts: int = 16
    slots: int = 0
    sizes: tuple[tuple[str, int], ...] = (("data", 1),)
    form: str = decode.TILES
    unroll: bool = False
    config: ModelConfig = PLAIN
    sampling: SamplingParams = SamplingParams()
    ends: int = 2
    seed: int = 0
    lookup: int = 0
    cache: str = "auto"
    cuts: tuple[int, ...] = ()

    @property
    def near(self):
        """Of log-probs: a sum in another order may round an element to the next step of int8."""
        return 1e-5 if self.cache == "auto" else 5e-3


def made_by(case):
    """A generator, its parameters and the arguments of a call."""
    layout = layout_of(dict(case.sizes))
    network = decoder_network(case.config)
    compute = Compute(unroll_layers=case.unroll)
    generator = Generator(network, layout, compute, case.form, case.cache)
    draw = np.random.default_rng(case.seed)
    mask = np.arange(LENGTH) >= draw.integers(0, LENGTH, (case.prompts, 1))
    prompts = np.where(mask, draw.integers(1, 64, mask.shape), 0).astype(np.int32)
    sequence = np.arange(case.prompts * case.samples, dtype=np.int32)
    options = {
        "seed": case.seed,
        "step": 2,
        "samples": case.samples,
        "max_new_tokens": NEW,
        "sampling": dataclasses.replace(case.sampling, stop=tuple(range(case.ends))),
    }
    return generator, network.create(1, layout), (prompts, mask, sequence), options


def drawn_by(generator, params, arguments, case, options, **more):
    """A rollout, in the case's parts, and how many tokens were drawn in them."""
    ways = {"slots": case.slots, "lookup": case.lookup} | options | more
    first, *others = [*case.cuts, None]
    rollout = generated(generator, params, *arguments, pause_after=first, **ways)
    tokens, limit = generator.counts.tokens, ways["max_new_tokens"]
    for start, end in zip(case.cuts, others, strict=True):
        assert rollout["responses"].shape[1] == limit
        rollout = generated(
            generator, params, rollout, arguments[2], call="resume", start=start,
            pause_after=end, **ways,
        )
        tokens += generator.counts.tokens
    return on_host(rollout), tokens


def on_host(rollout):
    return {key: np.asarray(value) for key, value in rollout.items()}


@pytest.fixture(scope="module")
def alone():
    """Rollouts of one program, by case, on one device."""
    known = {}

    def rollout(case):
        whole = {"slots": 0, "sizes": (("data", 1),), "lookup": 0, "cuts": ()}
        case = dataclasses.replace(case, form=decode.TILES, unroll=False, **whole)
        if case not in known:
            generator, params, arguments, options = made_by(case)
            generator._needs_slots = lambda *_: False
            known[case] = on_host(generated(generator, params, *arguments, **options))
            lengths = known[case]["response_mask"].sum(axis=1)
            assert lengths.min() < 20 and lengths.max() > 64  # into the second size of a cache
        return known[case]

    return rollout


PENALISED = SamplingParams(
    0.9, min_p=0.01, repetition_penalty=1.2, presence_penalty=0.3, frequency_penalty=0.1,
    logit_bias={5: 2.0, 9: -100}, min_tokens=8,
)  # fmt: skip
CASES = {
    "in parts, penalties": Case(sampling=PENALISED, samples=2, slots=8, cuts=(40,)),
    "a long tail": Case(prompts=4),
    "the kernel": Case(prompts=4, slots=8, form=decode.TPU_INTERPRETED),
    "stages": Case(samples=2, prompts=8, slots=8, sizes=(("pipe", 2), ("tensor", 2))),
    "int8, slots are filled again, devices": Case(
        samples=2, slots=8, sizes=(("data", 2), ("tensor", 4)), cache="int8"),
}  # fmt: skip
SLOW = {
    "slots are filled again, devices": Case(
        samples=2, slots=8, sizes=(("data", 2), ("tensor", 4))),
    "in parts": Case(samples=2, slots=8, cuts=(5, 40, 80)),
    "int8, many": Case(cache="int8"),
    "int8, a sample each, windows": Case(
        samples=1, slots=8, form=decode.ROWS, config=ODD, cache="int8"),
    "int8, few rows at a time, unrolled": Case(slots=4, unroll=True, cache="int8"),
    "int8, fsdp": Case(sizes=(("fsdp", 8),), slots=32, cache="int8"),
    "int8, kernel": Case(prompts=4, slots=8, form=decode.TPU_INTERPRETED, cache="int8"),
    "int8, windows, kernel, devices": Case(
        sizes=(("data", 2), ("tensor", 4)), form=decode.TPU_INTERPRETED, slots=16, prompts=8,
        config=ODD, cache="int8"),
    "int8, kernel of filled columns, devices": Case(
        sizes=(("data", 2), ("tensor", 4)), form=decode.GPU_INTERPRETED, slots=16, unroll=True,
        cache="int8"),
    "int8, guesses": Case(prompts=4, lookup=2, cache="int8"),
    "int8, guesses, devices": Case(
        sizes=(("data", 2), ("tensor", 4)), lookup=2, slots=16, cache="int8"),
    "int8, kernel of filled columns, guesses": Case(
        form=decode.GPU_INTERPRETED, lookup=3, samples=1, unroll=True, cache="int8"),
    "int8, in parts": Case(samples=2, slots=8, cuts=(5, 40, 80), cache="int8"),
    "int8, in parts, rows": Case(
        samples=1, slots=8, form=decode.ROWS, unroll=True, cuts=(20, 66), cache="int8"),
    "int8, in parts, kernel, devices": Case(
        sizes=(("data", 2), ("tensor", 4)), form=decode.TPU_INTERPRETED, prompts=8, cuts=(50,),
        cache="int8"),
    "int8, in parts, kernel of filled columns": Case(
        form=decode.GPU_INTERPRETED, slots=16, unroll=True, cuts=(20, 66), cache="int8"),
    "int8, stages, guesses": Case(
        slots=16, sizes=(("pipe", 2),), lookup=2, config=FOUR, cache="int8"),
    "int8, stages, three axes, in parts": Case(
        slots=16, sizes=(("data", 2), ("pipe", 2), ("tensor", 2)), config=FOUR, cuts=(20, 66),
        cache="int8"),
    "stages, rows that are left behind": Case(
        samples=2, slots=16, sizes=(("pipe", 2), ("tensor", 2)), config=FOUR),
    "stages, all at once": Case(sizes=(("pipe", 2),), prompts=8),
    "stages, four": Case(slots=16, sizes=(("pipe", 4),), config=FOUR),
    "stages, four, a sample each": Case(samples=1, slots=8, sizes=(("pipe", 4),), config=FOUR),
    "stages, three axes, windows": Case(
        slots=16, sizes=(("data", 2), ("pipe", 2), ("tensor", 2)), config=FOUR_ODD),
    "stages, in parts": Case(slots=16, sizes=(("pipe", 2),), cuts=(20, 66)),
    "stages, rows": Case(slots=16, sizes=(("pipe", 2),), form=decode.ROWS),
    "stages, guesses": Case(slots=16, sizes=(("pipe", 2),), lookup=2, config=FOUR),
    "stages, guesses, in parts": Case(
        samples=1, slots=8, sizes=(("data", 2), ("pipe", 2)), lookup=3, cuts=(30,)),
    "in parts, all at once": Case(prompts=4, cuts=(40,)),
    "in parts, devices": Case(
        samples=2, slots=8, sizes=(("data", 2), ("tensor", 4)), cuts=(1, 70)),
    "in parts, guesses": Case(prompts=4, slots=8, lookup=2, cuts=(30, 50)),
    "in parts, a sample each, guesses": Case(samples=1, slots=8, lookup=2, cuts=(30, 50)),
    "in parts, windows, unrolled": Case(
        samples=1, slots=8, form=decode.ROWS, config=ODD, unroll=True, cuts=(20, 66)),
    "in parts, windows": Case(config=ODD, slots=24, cuts=(20, 66)),
    "in parts, the kernel": Case(prompts=4, slots=8, form=decode.TPU_INTERPRETED, cuts=(20, 66)),
    "in parts, kernel, devices": Case(
        sizes=(("data", 2), ("tensor", 4)), form=decode.TPU_INTERPRETED, prompts=8, cuts=(50,)),
    "in parts, kernel of filled columns": Case(
        form=decode.GPU_INTERPRETED, slots=16, unroll=True, cuts=(20, 66)),
    "in parts, truncated": Case(sampling=SamplingParams(0.8, 20, 0.9), slots=16, cuts=(33,)),
    "devices, penalties": Case(sizes=(("data", 2), ("tensor", 4)), sampling=PENALISED, slots=16),
    "stages, penalties": Case(sizes=(("pipe", 2),), sampling=PENALISED, slots=16),
    "guesses, penalties": Case(sampling=PENALISED, lookup=3),
    "a sample each, windows": Case(
        samples=1, prompts=16, slots=8, form=decode.ROWS, config=ODD),
    "guesses, windows, slots": Case(prompts=6, slots=8, config=ODD, lookup=3),
    "many": Case(),
    "slots are filled again": Case(slots=16),
    "unrolled": Case(unroll=True, form=decode.ROWS),
    "few rows at a time": Case(slots=4),
    "an odd number of prompts": Case(prompts=13, slots=20),
    "fsdp": Case(sizes=(("fsdp", 8),), slots=32),
    "fsdp, all at once": Case(sizes=(("fsdp", 4), ("tensor", 2)), unroll=True),
    "kernel, devices": Case(
        sizes=(("data", 2), ("tensor", 4)), form=decode.TPU_INTERPRETED, slots=16, prompts=8),
    "truncated": Case(sampling=SamplingParams(0.8, 20, 0.9), slots=16),
    "windows": Case(config=ODD, slots=24),
    "windows, all at once": Case(config=ODD, samples=1, prompts=32),
    "windows, kernel": Case(config=ODD, form=decode.TPU_INTERPRETED, slots=8, prompts=8),
    "windows, kernel of filled columns": Case(
        config=ODD, form=decode.GPU_INTERPRETED, slots=8, prompts=8, unroll=True),
    "kernel of filled columns, devices": Case(
        sizes=(("data", 2), ("tensor", 4)), form=decode.GPU_INTERPRETED, slots=16, unroll=True),
    "kernel of filled columns, guesses": Case(
        form=decode.GPU_INTERPRETED, lookup=3, samples=1, unroll=True),
    "other draws": Case(seed=5, ends=1),
    "guesses": Case(prompts=4, lookup=1),
    "guesses, unrolled": Case(unroll=True, form=decode.ROWS, lookup=4, samples=1),
    "guesses, devices": Case(sizes=(("data", 2), ("tensor", 4)), lookup=2, slots=16),
    "guesses where the kernel was": Case(
        prompts=4, slots=8, form=decode.TPU_INTERPRETED, lookup=2),
    "guesses, truncated": Case(sampling=SamplingParams(0.8, 20, 0.9), lookup=3),
}  # fmt: skip


@pytest.mark.extended
@pytest.mark.parametrize(
    "case",
    [
        *CASES.values(),
        *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW.values()),
    ],
    ids=[*CASES, *SLOW],
)
def test_slots_change_nothing(case, alone):
    generator, params, arguments, options = made_by(case)
    rollout, tokens = drawn_by(generator, params, arguments, case, options)
    guessed, right = (rollout.pop(name, None) for name in ("guessed", "guessed_right"))
    if case.lookup:
        assert (guessed >= right).all() and guessed.sum() > right.sum() > 0
        # Each pass over the weights draws a token and those of its guesses that were right.
        passes = rollout["response_mask"].sum(axis=1) - 1 - right
        np.testing.assert_array_equal(guessed <= case.lookup * passes, True)
    assert (guessed is not None) == bool(case.lookup)
    assert tokens == rollout["response_mask"].sum()
    expected = alone(case)
    by_kernel = generator.engine_for(case.lookup).uses_kernel
    if not case.cuts and not by_kernel:  # rows that have ended are left behind
        longest = expected["response_mask"].sum(axis=1).max()
        assert generator.counts.computed < 0.9 * longest * case.prompts * case.samples
    assert rollout.keys() == expected.keys()
    for key, value in expected.items():
        if value.dtype == np.float32:
            np.testing.assert_allclose(rollout[key], value, atol=case.near)
        else:
            np.testing.assert_array_equal(rollout[key], value)


@pytest.mark.extended
def test_prompts_that_do_not_fit_together_are_read_in_parts(alone, monkeypatch):
    monkeypatch.setattr(prefix_sharing, "MAX_PREFILL_TOKENS", 3 * LENGTH)
    case = Case(samples=2, slots=8)
    generator, params, arguments, options = made_by(case)
    options |= {"slots": case.slots}
    sizes = []
    admit = generator.engine.admit
    generator.engine.admit = lambda *given: sizes.append(given[3].groups.size) or admit(*given)
    rollout = on_host(generated(generator, params, *arguments, **options))
    assert max(sizes) == 3
    for key, value in alone(case).items():
        np.testing.assert_allclose(rollout[key], value, atol=1e-5)


SURPLUS = {
    "all at once": Case(prompts=4),
    "slots, devices": Case(samples=4, slots=16, sizes=(("data", 2), ("tensor", 2)), prompts=8),
    "the kernel": Case(prompts=4, slots=8, form=decode.TPU_INTERPRETED),
    "guesses": Case(prompts=4, lookup=2),
    "int8, guesses, slots": Case(prompts=4, lookup=2, slots=8, cache="int8"),
}


@pytest.mark.parametrize(
    "name", [n if n == "all at once" else pytest.param(n, marks=pytest.mark.slow) for n in SURPLUS]
)
@pytest.mark.extended
def test_surplus_samples_are_given_up_and_the_shortest_kept(name, alone):
    """Beside all of them drawn to their end, and three of four taken by hand."""
    case = SURPLUS[name]
    everything = alone(case)
    lengths = everything["response_mask"].sum(axis=1).reshape(-1, 4)
    rows = [
        4 * prompt + number
        for prompt, each in enumerate(lengths.tolist())
        for number in sorted(sorted(range(4), key=lambda i: (each[i], i))[:3])
    ]
    generator, params, arguments, options = made_by(case)
    options |= {"samples": 3, "extra_samples": 1, "slots": case.slots, "lookup": case.lookup}
    ended = []
    options |= {"on_prompt_done": lambda *x: ended.append(x)}
    rollout = on_host(generated(generator, params, *arguments, **options))
    for key, value in everything.items():
        np.testing.assert_allclose(rollout[key], value[rows], atol=case.near)
    if not case.lookup:  # less was drawn than there would have been
        assert generator.counts.tokens < lengths.sum()
    found = {prompt: responses for prompt, responses in ended}
    assert len(found) == len(ended) == case.prompts
    for at, row in enumerate(rows):
        mask = everything["response_mask"][row]
        assert found[row // 4][at % 3] == everything["responses"][row][mask].tolist()


@pytest.mark.parametrize("name", ["all at once", pytest.param("guesses", marks=pytest.mark.slow)])
@pytest.mark.extended
def test_groups_are_told_once_in_the_part_in_which_they_end(name, alone):
    case = dataclasses.replace(SURPLUS[name], cuts=(10, 40, 66))
    generator, params, arguments, options = made_by(case)
    expected, told = alone(case), []
    drawn_by(generator, params, arguments, case, options, on_prompt_done=lambda *x: told.append(x))
    lengths = expected["response_mask"].sum(axis=1)
    assert sorted(prompt for prompt, _ in told) == list(range(case.prompts))
    part = np.searchsorted(case.cuts, lengths.reshape(-1, 4).max(axis=1))
    found = [part[prompt] for prompt, _ in told]
    assert found == sorted(found) and len(set(found)) > 1
    for prompt, responses in told:
        own = slice(4 * prompt, 4 * prompt + 4)
        rows = zip(expected["responses"][own], lengths[own], strict=True)
        assert responses == [row[:length].tolist() for row, length in rows]


@pytest.mark.extended
def test_stages_in_one_program_tell_who_was_cut_off():
    generator, params, arguments, options = made_by(Case(samples=2, sizes=(("pipe", 2),)))
    ends = (5, 9)
    options |= {"max_new_tokens": 30, "sampling": SamplingParams(stop=ends)}
    rollout = on_host(generated(generator, params, *arguments[:2], arguments[2][:32], **options))
    drawn = [row[mask] for row, mask in zip(rollout["responses"], rollout["response_mask"])]
    cut = [len(row) == 30 and row[-1] not in ends for row in drawn]
    assert rollout["truncated"].tolist() == cut and 0 < sum(cut) < 32


@pytest.mark.extended
def test_a_stage_has_its_own_layers_and_caches_are_written_in_place():
    """Of the loop's program: nothing but hidden states, and numbers of rows, goes between devices.

    By the compiler's account, in bytes of a device.
    """
    case = Case(samples=2, slots=16, sizes=(("pipe", 2), ("tensor", 2)), config=FOUR)
    generator, params, _, options = made_by(case)
    abstract = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), params
    )
    given = {k: v for k, v in options.items() if k not in ("seed", "step")}
    config = GenerationConfig(slots=16, **given)
    prefill, decoding = generator.programs("generate", abstract, 16, LENGTH, config)
    held = shard_bytes(prefill.resident)
    rows, length, layers = 16, NEW + 4 * STEPS, FOUR.layers // 2
    cache = (rows // 2 * LENGTH + rows * length) * 2 * layers * 8 * 4  # a head of two
    assert cache < held < 1.01 * cache + 100 * rows
    used = decoding.trace().lower().compile()
    memory, text = used.memory_analysis(), used.as_text()
    assert memory.argument_size_in_bytes == pytest.approx(shard_bytes(params) + held, rel=0.01)
    assert memory.alias_size_in_bytes == pytest.approx(held, rel=0.01)
    assert memory.temp_size_in_bytes < held / 2
    assert "all-gather" not in text and "all-to-all" not in text and "permute" in text
    assert decoding.loop_trips == 2 * STEPS + 1


@pytest.mark.parametrize(
    "form, unroll, samples, slots, kept",
    [
        (decode.TILES, False, 4, 0, "auto"),
        pytest.param(decode.ROWS, True, 1, 0, "auto", marks=pytest.mark.slow),
        (decode.ROWS, True, 4, 8, "int8"),
        pytest.param(decode.TPU_INTERPRETED, False, 4, 8, "auto", marks=pytest.mark.slow),
        (decode.TPU_INTERPRETED, False, 4, 8, "int8"),
    ],
)
@pytest.mark.extended
def test_programs_take_the_cache_that_is_said(form, unroll, samples, slots, kept):
    """By hand: keys and values of every prompt and of every row, and some numbers of each row."""
    generator, params, _, options = made_by(Case(form=form, unroll=unroll, cache=kept))
    asked = options | {"samples": samples, "slots": slots}
    given = {k: v for k, v in asked.items() if k not in ("seed", "step")}
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding),
                            params)  # fmt: skip
    config = GenerationConfig(**given)
    prefill, decoding = generator.programs("generate", abstract, 16, LENGTH, config)
    rows = slots or 16 * samples
    refills = slots and not generator.engine.uses_kernel
    length, prompt = NEW + 4 * STEPS if refills else NEW, LENGTH
    if generator.engine.uses_kernel:  # in tiles
        tile = 8 if kept == "auto" else 32
        length, prompt = (-(-x // tile) * tile for x in (length, prompt))
    token = 8 * 4 if kept == "auto" else 8 + 4  # with a scale
    cache = (rows // samples * prompt + rows * length) * 2 * PLAIN.layers * 2 * token
    held = shard_bytes(prefill.resident)
    assert cache < held < 1.01 * cache + 100 * rows
    assert prefill.runs == 16 * samples // rows and prefill.tokens == 0
    dispatches = -(-(NEW - 1) // STEPS)
    assert decoding.runs == prefill.runs * dispatches and decoding.tokens == rows * STEPS
    used = decoding.trace().lower().compile().memory_analysis()
    weights = shard_bytes(params)
    assert used.argument_size_in_bytes == pytest.approx(weights + held, rel=0.01)
    assert used.alias_size_in_bytes == pytest.approx(held, rel=0.01)  # written in place


@pytest.mark.parametrize("sizes", [
    (("data", 1),),
    pytest.param((("pipe", 2), ("tensor", 2)), marks=pytest.mark.slow),
])  # fmt: skip
@pytest.mark.extended
def test_nothing_is_compiled_for_other_lengths(sizes):
    case = Case(samples=2, prompts=6, slots=8, cuts=(20, 70), sizes=sizes)
    generator, params, (prompts, mask, sequence), options = made_by(case)
    compiled = []
    event = "/jax/core/compile/backend_compile_duration"
    drawn_by(generator, params, (prompts, mask, sequence), case, options)
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, *_, **__: compiled.append(name) if name == event else None
    )
    try:
        for seed in range(3):
            arguments = prompts, mask, sequence + 12 * seed
            assert drawn_by(generator, params, arguments, case, options)[1]
    finally:
        jax.monitoring.clear_event_listeners()
    assert not compiled


def by_hand(q, prompt_k, prompt_v, own_k, own_v, begin, end, start, column, prompt_of, scoring,
            sinks):  # fmt: skip
    """Row for row and head for head, in float64, its keys in a list."""
    out = np.zeros(q.shape)
    for r, h, i, t in itertools.product(*map(range, q.shape[:4])):
        g, after = prompt_of[r], column[r] + t + 1
        keys = [*prompt_k[g, h, begin[g] : end[g]], *own_k[r, h, start[r] : after]]
        values = [*prompt_v[g, h, begin[g] : end[g]], *own_v[r, h, start[r] : after]]
        seen = slice(-scoring.window, None) if scoring.window else slice(None)
        scores = np.array(keys[seen]) @ q[r, h, i, t] * q.shape[-1] ** -0.5
        if scoring.softcap:
            scores = scoring.softcap * np.tanh(scores / scoring.softcap)
        sink = -np.inf if sinks is None else sinks[h * q.shape[2] + i]
        weights = np.exp(scores - max(scores.max(), sink))
        total = weights.sum() + np.exp(sink - max(scores.max(), sink))
        out[r, h, i, t] = weights @ np.array(values[seen]) / total
    return out


def half_of(cases):
    """Cases of two values each, half of them extended; any three stand in every way in both."""
    for number, case in enumerate(cases):
        odd = number.bit_count() % 2
        yield pytest.param(*case, marks=[pytest.mark.extended] * odd)


SCORES = [(0, 0.0, False), (4, 5.0, True)]  # window, softcap, sinks


@pytest.mark.parametrize(
    "scores, shared, parts, new",
    list(half_of(itertools.product(SCORES, (True, False), (1, 2), (1, 3)))),
)
def test_rows_see_their_prompt_and_their_own_columns(scores, shared, parts, new):
    window, softcap, sinks = scores
    rows, groups, samples, kv_heads, per_kv, dim, prompt, length = 8, 4, 3, 2, 3, 8, 6, 128
    groups = groups if shared else rows
    draw = np.random.default_rng(window)
    q = draw.normal(size=(rows, kv_heads, per_kv, new, dim))
    prompt_k, prompt_v = draw.normal(size=(2, groups, kv_heads, prompt, dim))
    own_k, own_v = draw.normal(size=(2, rows, kv_heads, length, dim))
    begin = draw.integers(0, 3, groups)
    end = begin + draw.integers(1, 4, groups)
    column = 7 if new == 1 else draw.integers(0, length - new + 1, rows)
    start = draw.integers(0, np.broadcast_to(column, rows) + 1)
    members = place = None
    prompt_of = np.arange(rows)
    if shared:  # in each part its rows in any order; some groups are not full
        each, local = groups // parts, rows // parts
        members = np.full((groups, samples), local)
        place = np.zeros(rows, int)
        for part in range(parts):
            seats = draw.permutation(each * samples)[:local]
            for row, seat in enumerate(seats):
                members[part * each + seat // samples, seat % samples] = row
                place[part * local + row] = seat
                prompt_of[part * local + row] = part * each + seat // samples
    slots = SlotMask(
        *(None if x is None else jnp.asarray(x, jnp.int32)
          for x in (begin, end, start, column, members, place)),
        parts=parts,
    )  # fmt: skip
    scoring = ScoreOptions(None, softcap, window)
    sink = draw.normal(size=kv_heads * per_kv) if sinks else None
    columns = np.broadcast_to(column, rows)
    expected = by_hand(q, prompt_k, prompt_v, own_k, own_v, begin, end, start, columns, prompt_of,
                       scoring, sink)  # fmt: skip
    single = [jnp.asarray(x, jnp.float32) for x in (q, prompt_k, prompt_v, own_k, own_v)]
    sink = None if sink is None else jnp.asarray(sink, jnp.float32)

    @functools.partial(jax.jit, static_argnames="axis")
    def attended(*arrays, **axis):
        return decode.attend_slots(*arrays, slots, scoring, sink, **axis)

    np.testing.assert_allclose(attended(*single), expected, atol=2e-6)
    for axis in (cache_axis.COLUMNS, cache_axis.TILES):
        single[3] = cache_axis.to_layout(jnp.asarray(own_k, jnp.float32), axis)
        np.testing.assert_allclose(attended(*single, axis=axis), expected, atol=2e-6)


def test_columns_and_rows_of_states():
    assert bucketing.lengths(64, False) == [64]
    assert bucketing.lengths(300, False) == [64, 128, 256, 300]
    assert bucketing.lengths(100, True) == [64, 128, 100 + 4 * STEPS]
    assert bucketing.halved_rows(64, 1) == [64, 32, 16, 8]
    assert bucketing.halved_rows(24, 1) == [24, 12]
    assert bucketing.halved_rows(4, 8) == [4, 2, 1]
    assert bucketing.halved_rows(5, 1) == [5]
