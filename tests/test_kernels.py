"""Every set of kernels against the plain reference, and the reference against transformers."""

import copy
import dataclasses
import pickle

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads
from references import LlamaConfig, modeling_llama, torch

from hjax.errors import ConfigError
from hjax.kernels import (
    backward,
    blockwise,
    cpu,
    grouped_blocks,
    grouped_tpu,
    reference,
    splash,
)
from hjax.kernels.registry import KernelSet, choose_kernel_set, make_kernel_set
from hjax.models.compute import Compute
from hjax.sharding.layout import make_layouts

BATCH, LENGTH, HEADS, HEAD_DIM, EMBED, MLP = 2, 5, 3, 4, 6, 7
SPECS = {
    "btd,dhe->bthe": ((EMBED,), (HEADS, HEAD_DIM)),
    "btd,dcke->btcke": ((EMBED,), (2, HEADS, HEAD_DIM)),
    "bthe,hed->btd": ((HEADS, HEAD_DIM), (EMBED,)),
}
# Every function that stands behind the reference is in one of these.
SETS = {
    "backward": make_kernel_set("backward"),
    "cpu, unrolled": make_kernel_set("cpu", unrolled=True),
    "cpu, whole": make_kernel_set("cpu", whole=True),
    "tpu": make_kernel_set("tpu"),
}
# Sums of up to ten products in another order; a bfloat16 has 8 bits.
TOLERANCE = {jnp.float32: 2e-6, jnp.bfloat16: 2e-2}


def random(*shape, seed=0, dtype=np.float32):
    return np.random.default_rng((seed, *shape)).normal(size=shape).astype(dtype)


def rotation():
    """Tables as rotary positions have them, of other positions in each row."""
    positions = np.arange(BATCH * LENGTH).reshape(BATCH, LENGTH)
    return reference.rotary_tables(jnp.array([1.0, 0.3], jnp.float32), positions)


def arguments(name, dtype=jnp.float32):
    """(function of a set and differentiable arrays, the arrays) of a kernel; weights float32."""
    x = jnp.asarray(random(BATCH, LENGTH, EMBED), dtype)
    if name in SPECS:
        summed, made = SPECS[name]
        x = jnp.asarray(random(BATCH, LENGTH, *summed), dtype)
        return lambda k, x, w: k.product(name, x, w), (x, random(*summed, *made))
    if name == "gated_mlp":
        return lambda k, *a: k.gated_mlp(*a), (x, random(EMBED, 2, MLP), random(MLP, EMBED))
    if name == "rms_norm":
        return lambda k, x, w: k.rms_norm(x, w, 1e-5), (x, 1 + random(EMBED))
    x = jnp.asarray(random(BATCH, LENGTH, HEADS, HEAD_DIM), dtype)
    return lambda k, *a: k.rotate(*a), (x, *rotation())


KERNELS = [*SPECS, "gated_mlp", "rms_norm", "rotate"]


# The reference


def test_products_are_torchs_einsum():
    for spec in SPECS:
        run, (x, weight) = arguments(spec)
        expected = torch.einsum(spec, torch.tensor(np.asarray(x)), torch.tensor(weight))
        np.testing.assert_allclose(run(KernelSet(), x, weight), expected, atol=1e-5)


@pytest.mark.extended
def test_gated_mlp_and_its_gradients_are_transformers():
    sizes = {"hidden_size": EMBED, "intermediate_size": MLP, "num_attention_heads": 1}
    theirs = modeling_llama.LlamaMLP(LlamaConfig(**sizes))
    run, (x, gate_up, down) = arguments("gated_mlp")
    with torch.no_grad():
        theirs.gate_proj.weight.copy_(torch.tensor(gate_up[:, 0].T))
        theirs.up_proj.weight.copy_(torch.tensor(gate_up[:, 1].T))
        theirs.down_proj.weight.copy_(torch.tensor(down.T))
    given = torch.tensor(np.asarray(x), requires_grad=True)
    g = random(BATCH, LENGTH, EMBED, seed=1)
    out = theirs(given)
    out.backward(torch.tensor(g))
    ours, pull = jax.vjp(lambda *a: run(KernelSet(), *a), x, gate_up, down)
    np.testing.assert_allclose(ours, out.detach(), atol=1e-5)
    d_x, d_gate_up, d_down = pull(g)
    np.testing.assert_allclose(d_x, given.grad, atol=2e-5)
    np.testing.assert_allclose(d_gate_up[:, 0], theirs.gate_proj.weight.grad.T, atol=2e-5)
    np.testing.assert_allclose(d_gate_up[:, 1], theirs.up_proj.weight.grad.T, atol=2e-5)
    np.testing.assert_allclose(d_down, theirs.down_proj.weight.grad.T, atol=2e-5)


def test_rms_norm_and_its_gradients_are_transformers():
    theirs = modeling_llama.LlamaRMSNorm(EMBED, eps=1e-5)
    run, (x, weight) = arguments("rms_norm")
    with torch.no_grad():
        theirs.weight.copy_(torch.tensor(weight))
    given = torch.tensor(np.asarray(x), requires_grad=True)
    g = random(BATCH, LENGTH, EMBED, seed=1)
    out = theirs(given)
    out.backward(torch.tensor(g))
    ours, pull = jax.vjp(lambda *a: run(KernelSet(), *a), x, weight)
    np.testing.assert_allclose(ours, out.detach(), atol=1e-6)
    for mine, other in zip(pull(g), (given.grad, theirs.weight.grad), strict=True):
        np.testing.assert_allclose(mine, other, atol=1e-5)


def test_rotation_is_transformers():
    run, (x, cos, sin) = arguments("rotate")
    # transformers has heads before the length, and tables of both halves.
    whole = [torch.tensor(np.tile(np.asarray(t)[:, :, 0], 2)) for t in (cos, sin)]
    heads_first = torch.tensor(np.asarray(x)).transpose(1, 2)
    expected, _ = modeling_llama.apply_rotary_pos_emb(heads_first, heads_first, *whole)
    np.testing.assert_allclose(run(KernelSet(), x, cos, sin), expected.transpose(1, 2), atol=1e-6)


def test_rotary_tables_by_numpy():
    positions = np.array([[0, 1, 7], [3, 2, 900]], np.int32)
    frequencies = np.array([1.0, 0.1, 1e-4], np.float32)
    angles = positions[..., None, None] * frequencies
    for name, k in {"reference": KernelSet(), **SETS}.items():
        cos, sin = jax.jit(k.rotary_tables)(frequencies, positions)
        assert cos.shape == (2, 3, 1, 3) and cos.dtype == jnp.float32, name
        np.testing.assert_allclose(cos, np.cos(angles), atol=1e-5, err_msg=name)
        np.testing.assert_allclose(sin, np.sin(angles), atol=1e-5, err_msg=name)


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.extended
def test_the_reference_has_derivatives_in_both_modes_and_of_second_order(name):
    run, arrays = arguments(name)
    kernel = jax.jit(lambda *a: run(KernelSet(), *a))
    check_grads(kernel, arrays, 2, ["fwd", "rev"], atol=0.05, rtol=0.05)


# The other sets


@pytest.mark.parametrize("kernel_set", SETS)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", KERNELS)
def test_forward_and_gradients_are_the_references(name, dtype, kernel_set):
    run, arrays = arguments(name, dtype)

    @jax.jit
    def both(g, *arrays):
        pairs = []
        for k in (KernelSet(), SETS[kernel_set]):
            out, pull = jax.vjp(lambda *a, k=k: run(k, *a), *arrays)
            # The tables' gradients are no one's business: they come from positions.
            pairs.append((out, pull(g.astype(out.dtype))[: 1 if name == "rotate" else None]))
        return pairs

    shape = jax.eval_shape(lambda *a: run(KernelSet(), *a), *arrays).shape
    expected, ours = both(random(*shape, seed=1), *arrays)
    chex.assert_trees_all_equal_dtypes(ours, expected)
    # Relative to the size of each array: single entries may cancel to nearly 0.
    for mine, theirs in zip(jax.tree.leaves(ours), jax.tree.leaves(expected), strict=True):
        error = np.linalg.norm(np.float32(mine) - np.float32(theirs))
        assert error <= TOLERANCE[dtype] * np.linalg.norm(np.float32(theirs))


@pytest.mark.parametrize("name", ["reference", "backward", "cpu"])
def test_largest_is_numpys_argmax(name):
    largest = make_kernel_set(name).argmax
    rows = np.random.default_rng(0).integers(-3, 4, size=(200, 7)).astype(np.float32)  # many ties
    rows[:50, 2:5] = -np.inf
    rows[50] = -np.inf
    found = jax.jit(largest)(rows)
    assert found.dtype == jnp.int32
    np.testing.assert_array_equal(found, rows.argmax(-1))
    # With a NaN an index of the table all the same.
    assert 0 <= largest(jnp.array([1.0, jnp.nan, 2.0])) < 3


# Which set


def test_a_platform_chooses_its_set():
    assert [choose_kernel_set(platform) for platform in ("cpu", "tpu", "gpu", "cuda")] == [
        "cpu", "tpu", "backward", "backward",
    ]  # fmt: skip
    layout = make_layouts(jax.devices()[:2]).train
    assert layout.platform == "cpu"
    assert Compute().kernels == KernelSet()
    assert Compute().for_layout(layout).kernels.rotate is cpu.rotate


def test_accelerators_get_no_detours_of_cpus():
    found = make_kernel_set("backward", whole=True, unrolled=True)
    assert found == KernelSet(
        product=backward.product,
        gated_mlp=backward.gated_mlp,
        rms_norm=backward.rms_norm,
        grouped=grouped_blocks.product,
        attention=blockwise.attend,
    )
    # Of its packs each response has a prompt of its own: its attention knows only equal segments.
    assert make_kernel_set("tpu") == dataclasses.replace(
        found,
        rotate=backward.rotate,
        grouped=grouped_tpu.product,
        row_multiple=grouped_tpu.row_multiple,
        attention=splash.attend,
        few_passes=True,
        packs_share=False,
    )


def test_joined_dimensions_are_for_devices_that_hold_them_whole():
    one, split = (make_layouts(jax.devices()[:n], {"tensor": n}).train for n in (1, 2))
    assert Compute(layout=one).for_layout(one).kernels.product is cpu.product
    assert Compute(layout=split).for_layout(split).kernels.product is backward.product
    unrolled = Compute(layout=split, unroll_layers=True).for_layout(split).kernels
    assert unrolled.product is cpu.product_flat
    assert unrolled.rotary_tables is cpu.rotary_tables


@pytest.mark.parametrize("kernel_set", SETS)
def test_a_set_is_plain_and_can_be_sent(kernel_set):
    sent = pickle.loads(pickle.dumps(SETS[kernel_set]))
    assert sent == SETS[kernel_set] == copy.deepcopy(sent) and hash(sent) is not None


def test_an_unknown_set_is_refused():
    with pytest.raises(ConfigError, match="kernels 'fast': reference, backward, tpu, cudnn or cpu"):
        make_kernel_set("fast")


# Shapes and dtypes

X = (BATCH, LENGTH, EMBED)
WRONG = {
    "a product that keeps a dimension of x": (
        "product", "btd,me->btdm", (X, (MLP, EMBED))
    ),
    "a product of other sizes": ("product", "btd,dm->btm", (X, (EMBED + 1, MLP))),
    "an MLP of one half": ("gated_mlp", None, (X, (EMBED, 1, MLP), (MLP, EMBED))),
    "an MLP whose down differs": ("gated_mlp", None, (X, (EMBED, 2, MLP), (MLP + 1, EMBED))),
    "a norm's weight that would be broadcast": ("rms_norm", None, (X, (1,))),
    "tables of whole heads": (
        "rotate", None, ((2, 5, 3, 4), (2, 5, 1, 4), (2, 5, 1, 4))
    ),
    "tables of one row": ("rotate", None, ((2, 5, 3, 4), (1, 5, 1, 2), (1, 5, 1, 2))),
}  # fmt: skip


@pytest.mark.parametrize("kernel_set", ["reference", *SETS])
@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_shape_is_refused_when_traced(case, kernel_set):
    name, spec, shapes = WRONG[case]
    kernel = getattr({"reference": KernelSet(), **SETS}[kernel_set], name)
    given = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]

    def run(*arrays):
        first = (spec,) if spec else ()
        return kernel(*first, *arrays, *((1e-5,) if name == "rms_norm" else ()))

    with pytest.raises(AssertionError):
        jax.eval_shape(run, *given)


@pytest.mark.parametrize("kernel_set", ["reference", *SETS])
def test_a_wrong_dtype_is_refused_when_traced(kernel_set):
    k = {"reference": KernelSet(), **SETS}[kernel_set]
    tables = [jax.ShapeDtypeStruct((2, 5, 1, 2), jnp.bfloat16)] * 2
    with pytest.raises(AssertionError, match="bfloat16"):
        jax.eval_shape(k.rotate, jax.ShapeDtypeStruct((2, 5, 3, 4), jnp.bfloat16), *tables)
    with pytest.raises(AssertionError, match="float32"):
        jax.eval_shape(
            k.rotary_tables,
            jax.ShapeDtypeStruct((2,), jnp.float32),
            jax.ShapeDtypeStruct((5,), jnp.float32),
        )
