"""JAX's splash attention as TPUs run it: what it computes is the plain form's, and it compiles.
Interpreted here."""

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

from hjax.kernels import attention, splash
from hjax.kernels.attention import MaskSpec, ScoreOptions

# mask_spec, scoring, length, heads, kv_heads, head_dim, sinks, segments of a row
LEFT = lambda length: np.arange(length) >= 70  # noqa: E731
CASES = {
    "one KV head, 64": (MaskSpec(), ScoreOptions(), 640, 3, 1, 64, False, None),
    "narrow window, 96, to be padded": (
        MaskSpec(), ScoreOptions(window=50), 500, 2, 2, 96, False, LEFT,
    ),
    "shared prompt, capped, sinks": (
        MaskSpec(200, 137), ScoreOptions(0.3, 3.0, 150), 748, 4, 2, 64, True, LEFT,
    ),
    "a pack, 256": (
        MaskSpec(packed=True), ScoreOptions(softcap=2.0), 600, 2, 1, 256, True,
        lambda length: np.searchsorted([90, 91, 300, 520], np.arange(length), side="right") + 1,
    ),
    "blocks, heads of 128": (MaskSpec(128, 640), ScoreOptions(), 1408, 4, 2, 128, False, LEFT),
}  # fmt: skip
EVERYDAY = "shared prompt, capped, sinks"


def values_and_gradients(attend, arrays, weight, sinks):
    def loss(q, k, v, sink):
        out = attend(q, k, v, sink if sinks else None)
        return jnp.sum(out.astype(jnp.float32) * weight), jnp.where(weight != 0, out, 0)

    (_, out), gradients = jax.jit(jax.value_and_grad(loss, (0, 1, 2, 3), has_aux=True))(*arrays)
    return [out, *gradients][: 5 if sinks else 4]


def inputs(case, dtype):
    mask_spec, scoring, length, heads, kv_heads, dim, sinks, segments = CASES[case]
    rng = np.random.default_rng(len(case))
    shapes = (2, length, heads, dim), *[(2, length, kv_heads, dim)] * 2
    arrays = [jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes]
    arrays.append(jnp.asarray(rng.standard_normal(heads), jnp.float32))
    weight, marks = rng.standard_normal(arrays[0].shape), None
    if segments is not None:  # of the second row other ones
        marks = np.stack([segments(length), segments(length + 30)[30:]]).astype(np.int32)
        weight, marks = weight * (marks > 0)[..., None, None], jnp.asarray(marks)
    return mask_spec, scoring, sinks, arrays, jnp.asarray(weight, jnp.float32), marks


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=[] if c == EVERYDAY else [pytest.mark.slow]) for c in CASES]
)
def test_values_and_gradients_are_the_plain_forms(case, dtype):
    mask_spec, scoring, sinks, arrays, weight, marks = inputs(case, dtype)

    def of(kernel, arrays):
        def run(q, k, v, sink):
            return kernel(q, k, v, marks, sink, scoring, mask_spec)

        return values_and_gradients(run, arrays, weight, sinks)

    fast = functools.partial(splash.attend, interpret=True)
    found = of(functools.partial(attention.attend, fast), arrays)
    assert [x.dtype for x in found[:4]] == [dtype] * 4
    expected = of(attention.reference, [x.astype(jnp.float32) for x in arrays])
    aim = 3e-5 if dtype == jnp.float32 else 2e-2  # of the largest value
    for one, other in zip(expected, found, strict=True):
        error = float(jnp.abs(one - other.astype(jnp.float32)).max())
        assert error <= aim * float(jnp.abs(one).max())


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
from hjax.kernels import splash
from hjax.kernels.attention import ScoreOptions, MaskSpec, attend
place = SingleDeviceSharding(find_topology(sys.argv[1]).devices[0])
def given(dtype, *sizes):
    return jax.ShapeDtypeStruct(sizes, dtype, sharding=place)
for heads, kv_heads, dim, length, mask_spec, window, softcap, sinks in json.loads(sys.argv[2]):
    scoring = ScoreOptions(softcap=softcap, window=window)
    def loss(q, k, v, sink, marks):
        out = attend(splash.attend, q, k, v, marks, sink, scoring, MaskSpec(*mask_spec))
        return jnp.sum(out.astype(jnp.float32) ** 2)
    q = given(jnp.bfloat16, 2, length, heads, dim)
    k = given(jnp.bfloat16, 2, length, kv_heads, dim)
    sink = given(jnp.float32, heads) if sinks else None
    numbers = (0, 1, 2, 3) if sinks else (0, 1, 2)
    lowered = jax.jit(jax.grad(loss, numbers)).lower(q, k, k, sink, given(jnp.int32, 2, length))
    text = lowered.compile().as_text()
    print(json.dumps([f"splash_mha_{part}" in text for part in ("fwd", "dq", "dkv")]))
"""
# Qwen3-30B-A3B, gpt-oss-20b, Qwen2.5-1.5B in packs, Gemma 2, heads of an odd size, a long row
SHAPES = [
    (32, 4, 128, 6656, (512, 1536), 0, 0.0, False),
    (64, 8, 64, 12800, (), 128, 0.0, True),
    (12, 2, 128, 8192, (0, 0, 0, True), 0, 0.0, False),
    (8, 4, 256, 8192, (), 4096, 50.0, False),
    (4, 2, 80, 2000, (512, 372), 0, 0.0, False),
    (2, 1, 128, 65536, (), 0, 0.0, False),
]


@needs_libtpu
@pytest.mark.slow
@pytest.mark.parametrize("topology", ["v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1"])
def test_it_compiles_for_tpus(topology):
    command = [sys.executable, "-c", PROGRAM, topology, json.dumps(SHAPES)]
    done = subprocess.run(command, capture_output=True, text=True, env=dict(os.environ))
    assert done.returncode == 0, done.stderr[-3000:]
    assert [json.loads(x) for x in done.stdout.splitlines()] == [[True] * 3] * len(SHAPES)


KEPT = """
from hjax.dryrun.topologies import find_topology, prepare_environment
prepare_environment()
import functools, json, sys
import jax, jax.numpy as jnp
jax.config.update("jax_enable_compilation_cache", False)
from jax.sharding import SingleDeviceSharding
from hjax.kernels import attention, splash
from hjax.models.remat import with_remat
place = SingleDeviceSharding(find_topology("v5e:2x2").devices[0])
x = jax.ShapeDtypeStruct((1, 1024, 2, 128), jnp.bfloat16, sharding=place)
weights = jax.ShapeDtypeStruct((3, 128), jnp.bfloat16, sharding=place)
def layer(_, weight, x):
    q = x * weight
    return attention.attend(splash.attend, q, q, q)
def kernels(policy):
    run = functools.partial(with_remat(layer, policy, False), 0)
    def loss(weights, x):
        x, _ = jax.lax.scan(lambda x, weight: (run(weight, x), None), x, weights)
        return jnp.sum(x.astype(jnp.float32))
    text = jax.jit(jax.grad(loss)).lower(weights, x).compile().as_text()
    lines = [line for line in text.splitlines() if "tpu_custom_call" in line]
    return sum("splash_mha_fwd" in line for line in lines)
print(json.dumps([kernels(policy) for policy in sys.argv[1:]]))
"""


@needs_libtpu
@pytest.mark.extended
def test_what_is_kept_is_not_computed_again():
    """Of scanned layers: the forward kernel is in the loop back only where nothing is kept."""
    command = [sys.executable, "-c", KEPT, "none", "products", "attention", "full"]
    done = subprocess.run(command, capture_output=True, text=True, env=dict(os.environ))
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1]) == [1, 1, 1, 2]
