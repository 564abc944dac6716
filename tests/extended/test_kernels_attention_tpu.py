"""A TPU's own attention kernels: what they compute, that it is the plain form's, and that they
compile. Interpreted here."""

import functools
import importlib.util
import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hjax.kernels import attention, attention_tpu
from hjax.kernels.attention import Scoring, Sight
from hjax.kernels.attention_block_tpu import How
from hjax.kernels.attention_tpu import has_room
from hjax.kernels.attention_visits import (
    FIRST,
    FIRST_KEYS,
    LAST,
    LAST_KEYS,
    STEP,
    WHOLE,
    strip_of,
    visits,
)
from hjax.models.remat import recomputed

# sight, length, block
LISTED = {
    "causal": (Sight(), 1024, 256),
    "window shorter than a block": (Sight(window=70), 1280, 640),
    "long window": (Sight(window=700), 1536, 512),
    "shared prompt": (Sight(300, 241), 1536, 512),
    "shared, window": (Sight(130, 300, 150), 1024, 256),
    "short responses": (Sight(40, 7), 512, 128),
}


@pytest.mark.parametrize("sight,length,block", LISTED.values(), ids=LISTED)
def test_all_that_is_seen_is_computed_once(sight, length, block):
    found, computed = visits(sight, length, block), np.zeros((length, length), int)
    table = sight.table(length)
    for pair in range(len(found.queries)):
        q, k = found.queries[pair] * block, found.keys[pair] * block
        if found.kind[pair] & WHOLE:
            assert table[q : q + block, k : k + block].all()
            computed[q : q + block, k : k + block] += 1
            continue
        assert not table[q : q + block, k : k + block].all()
        begin = found.first[pair]
        entries = found.strips[begin : begin + found.count[pair]].tolist()
        runs = found.patterns[begin]
        assert [strip_of(entry) for entry in entries] == [run[:3] for run in runs]
        for run in runs:
            assert run.steps in found.lengths
            rows = slice(q + run.strip * STEP, q + (run.strip + 1) * STEP)
            first, end = k + run.begin * STEP, k + (run.begin + run.steps) * STEP
            computed[rows, first:end] += 1
            # Between its ends nothing is hidden; at them something is, or here and there between.
            assert table[rows, first + run.head * STEP : end - run.tail * STEP].all()
            hidden = ~table[rows, first:end].reshape(STEP, run.steps, STEP).all((0, 2))
            outer = [*range(run.head), *range(run.steps - run.tail, run.steps)]
            assert hidden[outer].all() or (run.head == run.steps and hidden.any())
    assert computed.max() == 1 and (computed >= table).all()
    assert computed.sum() == found.computed
    # Of each strip of queries no more than from its first seen key to its last one, in prompt and
    # response each.
    tiles = table.reshape(length // STEP, STEP, length // STEP, STEP).any((1, 3))
    assert found.computed <= (tiles.sum() + 2 * len(tiles)) * STEP**2


@pytest.mark.parametrize("sight,length,block", LISTED.values(), ids=LISTED)
def test_visits_say_when_a_block_begins_and_ends(sight, length, block):
    found = visits(sight, length, block)
    count = len(found.queries)
    for numbers, first, last in (
        (found.queries, FIRST, LAST), (found.keys, FIRST_KEYS, LAST_KEYS),
    ):  # fmt: skip
        for number in range(length // block):
            at = np.flatnonzero(numbers == number)
            assert [i for i in at if found.kind[i] & first] == [at[0]]
            assert [i for i in at if found.kind[i] & last] == [at[-1]]
    assert (np.diff(found.queries) >= 0).all()
    # Blocks of keys leave the chip one after another, each at its last visit.
    ends = [i for i in range(count) if found.kind[i] & LAST_KEYS]
    assert found.done.tolist() == [found.keys[min(e for e in ends if e >= i)] for i in range(count)]
    # By hand: each step whose keys are another block's than the last one's reads them.
    read = 1 + sum(found.keys[i] != found.keys[i - 1] for i in range(1, count))
    assert found.reads == read


def test_a_diagonal_costs_what_is_seen_of_it():
    # 512 + 4 x 1536 places: blocks of 512 compute 37, 30.5 are seen.
    sight, length = Sight(512, 1536), 6656
    by_blocks = 37 * 512**2 / sight.seen(length)
    assert by_blocks == pytest.approx(37 / 30.5, rel=2e-3)
    assert visits(sight, length, 512).computed / sight.seen(length) < 1.06
    # A window of 128: two steps of each strip instead of 1024 keys.
    assert visits(Sight(window=128), 12800, 512).computed == (2 * 100 - 1) * STEP**2


# sight, scoring, length, heads, kv_heads, head_dim, sinks, segments of a row
LEFT = lambda length: np.arange(length) >= 70  # noqa: E731
CASES = {
    "one KV head, 64": (Sight(), Scoring(), 640, 3, 1, 64, False, None),
    "narrow window, 96, to be padded": (
        Sight(), Scoring(window=50), 500, 2, 2, 96, False, LEFT,
    ),
    "shared prompt, capped, sinks": (
        Sight(200, 137), Scoring(0.3, 3.0, 150), 748, 4, 2, 64, True, LEFT,
    ),
    "a pack, 256": (
        Sight(packed=True), Scoring(softcap=2.0), 600, 2, 1, 256, True,
        lambda length: np.searchsorted([90, 91, 300, 520], np.arange(length), side="right") + 1,
    ),
    "whole blocks, heads of 128": (Sight(128, 640), Scoring(), 1408, 4, 2, 128, False, LEFT),
}  # fmt: skip
EVERYDAY = "shared prompt, capped, sinks"


def values_and_gradients(attend, arrays, weight, sinks):
    def loss(q, k, v, sink):
        out = attend(q, k, v, sink if sinks else None)
        return jnp.sum(out.astype(jnp.float32) * weight), jnp.where(weight != 0, out, 0)

    (_, out), gradients = jax.jit(jax.value_and_grad(loss, (0, 1, 2, 3), has_aux=True))(*arrays)
    return [out, *gradients][: 5 if sinks else 4]


def inputs(case, dtype):
    sight, scoring, length, heads, kv_heads, dim, sinks, segments = CASES[case]
    rng = np.random.default_rng(len(case))
    shapes = (2, length, heads, dim), *[(2, length, kv_heads, dim)] * 2
    arrays = [jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes]
    arrays.append(jnp.asarray(rng.standard_normal(heads), jnp.float32))
    weight, marks = rng.standard_normal(arrays[0].shape), None
    if segments is not None:  # of the second row other ones
        marks = np.stack([segments(length), segments(length + 30)[30:]]).astype(np.int32)
        weight, marks = weight * (marks > 0)[..., None, None], jnp.asarray(marks)
    return sight, scoring, sinks, arrays, jnp.asarray(weight, jnp.float32), marks


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=[] if c == EVERYDAY else [pytest.mark.slow]) for c in CASES]
)
def test_values_and_gradients_are_the_plain_forms(case, dtype):
    sight, scoring, sinks, arrays, weight, marks = inputs(case, dtype)

    def of(kernel, arrays):
        def run(q, k, v, sink):
            return kernel(q, k, v, marks, sink, scoring, sight)

        return values_and_gradients(run, arrays, weight, sinks)

    fast = functools.partial(attention_tpu.attend, interpret=True)
    found = of(functools.partial(attention.attend, fast), arrays)
    assert [x.dtype for x in found[:4]] == [dtype] * 4
    expected = of(attention.reference, [x.astype(jnp.float32) for x in arrays])
    aim = 3e-5 if dtype == jnp.float32 else 2e-2  # of the largest value
    for one, other in zip(expected, found, strict=True):
        error = float(jnp.abs(one - other.astype(jnp.float32)).max())
        assert error <= aim * float(jnp.abs(one).max())


def test_a_kernel_tells_what_it_reads_and_writes():
    how = How(Sight(), 1024, 512, 0.0, False)
    q, k = (jax.ShapeDtypeStruct((3, n, 1024, 128), jnp.bfloat16) for n in (4, 2))
    row, rows, kv_rows = 128 * 2, 3 * 4 * 1024, 3 * 2 * 1024
    # Blocks of keys in turn: 0, 0, 1; the second is there already.
    keys = 3 * 4 * 2 * 512
    forward, back = attention_tpu._estimate(how, q), attention_tpu._backward_estimate(how, q, k)
    assert forward.bytes_accessed == (2 * rows + 2 * keys) * row + 4 * rows
    assert back.bytes_accessed == (3 * rows + 2 * keys + 2 * kv_rows) * row + 2 * 4 * rows
    # A whole block of 16 steps, two diagonals of 10.
    assert back.flops == 5 * 2 * 3 * 4 * 36 * 128**3


def test_rows_without_room_are_splashs():
    # 2 x 4 bytes of each of 128 elements: 48 MiB are 49152 places, and a step's blocks need some.
    assert has_room(40960, 512, 128, 2) and not has_room(49152, 512, 128, 2)
    assert has_room(40960, 512, 64, 2) and not has_room(49152, 512, 64, 2)  # filled up to 128
    assert has_room(20480, 512, 256, 2) and not has_room(24576, 512, 256, 2)

    def names(length, dim):
        q, k = (jax.ShapeDtypeStruct((1, length, n, dim), jnp.bfloat16) for n in (2, 1))
        run = functools.partial(
            attention_tpu.attend, segments=None, sinks=None, scoring=Scoring(), sight=Sight()
        )
        return str(jax.make_jaxpr(lambda q, k: run(q, k, k))(q, k))

    assert "attention_forward" in names(1024, 128) and "splash" not in names(1024, 128)
    assert "splash" in names(8192, 1024) and "attention_forward" not in names(8192, 1024)


def test_what_is_kept_is_not_computed_again():
    q, k = (jax.ShapeDtypeStruct((1, 1024, n, 128), jnp.bfloat16) for n in (2, 1))

    def forwards(policy):
        def layer(_, q, k):
            out = attention.attend(attention_tpu.attend, q * 2, k, k)
            return jnp.sum(out.astype(jnp.float32) ** 2)

        run = functools.partial(recomputed(layer, policy, True), 0)
        program = str(jax.make_jaxpr(jax.grad(run))(q, k))
        assert program.count("name=attention_backward") == 1
        return program.count("name=attention_forward")

    assert [forwards(p) for p in ("none", "products", "attention", "full")] == [1, 1, 1, 2]


needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="libtpu, the TPU compiler, is not installed: pip install 'jax[tpu]'",
)

PROGRAM = """
import sys
from hjax.dryrun.topologies import find_topology, prepare_environment
prepare_environment()
import json, jax, jax.numpy as jnp
jax.config.update("jax_enable_compilation_cache", False)
from jax.sharding import SingleDeviceSharding
from hjax.kernels import attention_tpu
from hjax.kernels.attention import Scoring, Sight, attend
place = SingleDeviceSharding(find_topology(sys.argv[1]).devices[0])
def given(dtype, *sizes):
    return jax.ShapeDtypeStruct(sizes, dtype, sharding=place)
for heads, kv_heads, dim, length, sight, window, softcap, sinks in json.loads(sys.argv[2]):
    scoring = Scoring(softcap=softcap, window=window)
    def loss(q, k, v, sink, marks):
        out = attend(attention_tpu.attend, q, k, v, marks, sink, scoring, Sight(*sight))
        return jnp.sum(out.astype(jnp.float32) ** 2)
    q = given(jnp.bfloat16, 2, length, heads, dim)
    k = given(jnp.bfloat16, 2, length, kv_heads, dim)
    sink = given(jnp.float32, heads) if sinks else None
    numbers = (0, 1, 2, 3) if sinks else (0, 1, 2)
    lowered = jax.jit(jax.grad(loss, numbers)).lower(q, k, k, sink, given(jnp.int32, 2, length))
    text = lowered.compile().as_text()
    print(json.dumps(["attention_forward" in text, "attention_backward" in text, "splash" in text]))
"""
# Qwen3-30B-A3B, gpt-oss-20b, Qwen2.5-1.5B, Gemma 2, and the longest rows there is room for
SHAPES = [
    (32, 4, 128, 6656, (512, 1536), 0, 0.0, False),
    (64, 8, 64, 12800, (), 128, 0.0, True),
    (12, 2, 128, 8192, (512, 960), 0, 0.0, False),
    (8, 4, 256, 8192, (), 4096, 50.0, False),
    (2, 1, 128, 47104, (), 0, 0.0, False),
    (2, 1, 256, 22528, (), 0, 50.0, False),
]


@needs_libtpu
@pytest.mark.slow
@pytest.mark.parametrize("topology", ["v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1"])
def test_it_compiles_for_tpus(topology):
    command = [sys.executable, "-c", PROGRAM, topology, json.dumps(SHAPES)]
    done = subprocess.run(command, capture_output=True, text=True, env=dict(os.environ))
    assert done.returncode == 0, done.stderr[-3000:]
    assert [json.loads(x) for x in done.stdout.splitlines()] == [[True, True, False]] * len(SHAPES)
