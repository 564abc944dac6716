"""Mixtures of experts beside a loop over tokens and experts, where a device has a part of them."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hjax.kernels import reference
from hjax.kernels.reference import GroupFill
from hjax.kernels.registry import KernelSet
from hjax.models import expert_dispatch, experts
from hjax.models.expert_dispatch import ExpertDispatch, dispatch_to_experts, sort_tokens
from hjax.models.quantized import quantize as in_bytes
from hjax.sharding.layout import make_layouts

TOKENS, WIDTH, MLP, EXPERTS, PER_TOKEN = 512, 8, 6, 8, 2
PARTS = 4  # a device has two of the experts


def given(load):
    keys = jax.random.split(jax.random.key(1), 8)
    here = EXPERTS // PARTS
    weights = experts.ExpertWeights(
        router=None,
        gate_up=jax.random.normal(keys[0], (here, WIDTH, 2, MLP)),
        down=jax.random.normal(keys[1], (here, MLP, WIDTH)),
        gate_up_bias=jax.random.normal(keys[2], (here, 2, MLP)),
        down_bias=jax.random.normal(keys[3], (here, WIDTH)),
    )
    chosen = np.array(jax.random.randint(keys[4], (TOKENS, PER_TOKEN), 0, EXPERTS - 1))
    chosen[:, 1] = (chosen[:, 0] + 1 + chosen[:, 1]) % EXPERTS  # two of them, mostly
    if load == "all on one":
        chosen[:] = (1, 5)
    elif load == "none here":
        chosen[:] = (4, 5)
    rows = jax.random.normal(keys[5], (TOKENS, WIDTH))
    shares = jax.random.uniform(keys[6], (TOKENS, PER_TOKEN))
    return rows, shares, jnp.asarray(chosen, jnp.int32), weights


def plain(rows, shares, weights, *, chosen, frozen):
    """Every expert of every token, those elsewhere with a weight of 0."""
    weights = whole(dataclasses.replace(weights, **frozen))
    out = jnp.zeros(rows.shape)
    for expert in range(EXPERTS // PARTS):
        both = jnp.einsum("td,dcm->tcm", rows, weights.gate_up[expert])
        both += weights.gate_up_bias[expert]
        made = (jax.nn.silu(both[:, 0]) * both[:, 1]) @ weights.down[expert]
        share = jnp.sum(jnp.where(chosen == expert, shares, 0.0), axis=1)
        out += share[:, None] * (made + weights.down_bias[expert])
    return out


def added_to(weights):
    """With adapters, and the same with what these add up to."""
    keys, rank = jax.random.split(jax.random.key(2), 4), 3
    here = weights.down.shape[0]
    parts = {
        "gate_up_a": (here, WIDTH, rank),
        "gate_up_b": (here, rank, 2, MLP),
        "down_a": (here, MLP, rank),
        "down_b": (here, rank, WIDTH),
    }
    drawn = {
        n: 0.3 * jax.random.normal(k, s) for k, (n, s) in zip(keys, parts.items(), strict=True)
    }
    return dataclasses.replace(weights, **drawn)


def whole(weights):
    """Without adapters and quantized matrices: what these stand for."""
    gate_up, down = weights.gate_up.astype(jnp.float32), weights.down.astype(jnp.float32)
    if weights.down_scale is not None:
        gate_up *= weights.gate_up_scale[:, None]
        down *= weights.down_scale[:, None]
    if weights.down_a is not None:
        gate_up += jnp.einsum("edr,ercm->edcm", weights.gate_up_a, weights.gate_up_b)
        down += jnp.einsum("emr,erd->emd", weights.down_a, weights.down_b)
    return dataclasses.replace(weights, gate_up=gate_up, down=down)


def quantized(weights, form):
    made = {}
    for name in ("gate_up", "down"):
        dtype = {"int8": "int8", "fp8": "float8_e4m3fn"}[form]
        small, scale = in_bytes(np.asarray(getattr(weights, name)), (1,), dtype)
        made |= {name: jnp.asarray(small), f"{name}_scale": jnp.asarray(scale)}
    return dataclasses.replace(weights, **made)


@jax.custom_vjp
def careless(rows, weights, sizes, fill, before):
    """A grouped product that leaves in rows after the groups what may be there, as a TPU's does."""
    return nothing_known(reference.grouped_product(rows, weights, sizes, fill, before), sizes)


def nothing_known(rows, sizes):
    return jnp.where((jnp.arange(rows.shape[0]) < jnp.sum(sizes))[:, None], rows, jnp.nan)


def careless_backward(kept, given):
    rows, weights, sizes, fill, before = kept
    cleared = (jnp.where(jnp.isnan(nothing_known(x, sizes)), 0, x) for x in (rows, given))
    rows, given = cleared
    product = functools.partial(reference.grouped_product, sizes=sizes, fill=fill, before=before)
    _, back = jax.vjp(product, rows, weights)
    of_rows, of_weights = back(given)
    return nothing_known(of_rows, sizes), of_weights, None, None, None


careless.defvjp(lambda *given: (careless(*given), given), careless_backward)


def careless_product(rows, weights, sizes, fill=GroupFill(), before=None):
    return careless(rows, weights, sizes, fill, before)


CARELESS = KernelSet(grouped=careless_product)
MULTIPLE = 16


def product_of_filled(rows, weights, sizes, fill=GroupFill(), before=None):
    """One that takes no groups but those that were promised."""
    out = careless_product(rows, weights, sizes, fill, before)
    kept = jnp.all(sizes % MULTIPLE == 0) & (fill.multiple == MULTIPLE)
    return jnp.where(kept, out, jnp.nan)


FILLED = dataclasses.replace(
    CARELESS, grouped=product_of_filled, row_multiple=lambda count, weights, share: MULTIPLE
)


SETS = {"plain": KernelSet(), "careless": CARELESS, "filled": FILLED}
LOADS = [
    ("even", ""),
    ("all on one", ""),
    ("none here", ""),
    ("even", "adapters"),
    ("all on one", "int8"),
    ("even", "fp8"),
]
# Each load and each set in one case at least; the others are slow.
TOGETHER = [
    ("none here", "", "plain"),
    ("even", "fp8", "plain"),
    ("all on one", "", "careless"),
    ("even", "adapters", "careless"),
    ("even", "", "filled"),
    ("all on one", "int8", "filled"),
]


def extended(case, kept):
    return case if case in kept else pytest.param(*case, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("load", "form", "kernels"),
    [extended((*load, kernels), TOGETHER) for load in LOADS for kernels in SETS],
)
@pytest.mark.extended
def test_in_pieces_and_at_once_are_a_plain_sum(load, form, kernels, monkeypatch):
    kernels = SETS[kernels]
    rows, shares, chosen, weights = given(load)
    if form:
        weights = added_to(weights)
    if form in ("int8", "fp8"):
        weights = quantized(weights, form)
    frozen = weights.frozen()
    assert len(frozen) == (4 if form in ("int8", "fp8") else 0)
    weights = dataclasses.replace(weights, **dict.fromkeys(frozen))
    routing = experts.Routing(PER_TOKEN, True, lambda gate, up: jax.nn.silu(gate) * up)
    made = experts._projections(routing, kernels)

    def summed(rows, shares, weights, keep=False):
        weights = dataclasses.replace(weights, **frozen).joined()
        pieces = ExpertDispatch(
            *made, kernels.row_multiple, (), PARTS, keep, tuple(frozen), experts._DOWN_FIELDS
        )
        halves = zip(*(jnp.split(x, 2) for x in (rows, shares, chosen)), strict=True)
        sets = [sort_tokens(*half, EXPERTS) for half in halves]
        tokens = jax.tree.map(lambda *x: jnp.concatenate(x), *sets)
        assert pieces._chunks(tokens, weights).size == size
        return dispatch_to_experts(pieces, tokens, weights)

    def gradients(run):
        def value(*arguments):
            out = run(*arguments)
            return jnp.sum(out * jnp.sin(jnp.arange(out.size)).reshape(out.shape)), out

        found, out = jax.jit(jax.grad(value, (0, 1, 2), has_aux=True))(rows, shares, weights)
        return jax.tree.leaves((found, out))

    expected = gradients(functools.partial(plain, chosen=chosen, frozen=frozen))
    size = 384  # of 1024 rows: all on one expert take two
    found = [gradients(summed), gradients(functools.partial(summed, keep=True))]
    size = 1024  # at once
    monkeypatch.setattr(expert_dispatch, "CAPACITY_FACTOR", float(PARTS))
    found += [gradients(summed), gradients(functools.partial(summed, keep=True))]
    for several in zip(*found, expected, strict=True):
        for one in several[:-1]:
            np.testing.assert_allclose(one, several[-1], rtol=2e-5, atol=2e-5)


LAYOUTS = [
    ({"data": 1, "expert": 8}, 16),
    ({"data": 1, "fsdp": 2, "expert": 4}, 16),
    ({"data": 1, "fsdp": 2, "expert": 4}, 12),  # FSDP splits their width
    ({"data": 2, "fsdp": 2, "expert": 2}, 16),
    ({"data": 1, "expert": 4, "tensor": 2}, 16),
]


@pytest.mark.parametrize(
    ("experts_", "width", "split"),
    [
        (16, 512, ("experts", "embed", "mlp")),  # two tiles a device
        (16, 320, ("whole_experts", None, "mlp")),
        (12, 320, ("experts", "embed", "mlp")),  # 12 experts are none over 8 devices
    ],
)
def test_fsdp_splits_experts_where_their_width_is_no_whole_tiles(experts_, width, split):
    layout = make_layouts(jax.devices(), {"data": 1, "fsdp": 2, "expert": 4}).train
    names = "experts", "embed", "mlp"
    assert experts.fsdp_axes(names, experts_, width, layout) == split
    for router in (("embed", "experts"), ("embed", "mlp")):
        assert experts.fsdp_axes(router, experts_, width, layout) == router


TRAVELLING = [(*LAYOUTS[2], "int8"), (*LAYOUTS[3], ""), (*LAYOUTS[4], "adapters")]


@pytest.mark.parametrize(
    ("train", "count", "form"),
    [extended((*x, form), TRAVELLING) for x in LAYOUTS for form in ("", "adapters", "int8")],
    ids=str,
)
@pytest.mark.extended
def test_tokens_that_travel_get_what_gathered_ones_get(train, count, form, monkeypatch):
    """Values and gradients, beside all experts on one device."""
    monkeypatch.setattr(experts, "ring_is_cheaper", lambda rows, weights: True)
    layout = make_layouts(jax.devices(), train).train
    width, mlp = 32, 16
    keys = iter(jax.random.split(jax.random.key(0), 9))
    shapes = {
        "router": (width, count),
        "gate_up": (count, width, 2, mlp),
        "down": (count, mlp, width),
        "gate_up_bias": (count, 2, mlp),
        "down_bias": (count, width),
    }
    drawn = {n: jax.random.normal(next(keys), s) / 4 for n, s in shapes.items()}
    weights = experts.ExpertWeights(**drawn)
    if form == "adapters":
        parts = {"gate_up_a": (count, width, 2), "gate_up_b": (count, 2, 2, mlp)}
        drawn = {n: jax.random.normal(next(keys), s) / 4 for n, s in parts.items()}
        weights = dataclasses.replace(weights, **drawn)
    if form == "int8":
        weights = quantized(weights, form)
    frozen = weights.frozen()
    weights = dataclasses.replace(weights, **dict.fromkeys(frozen))
    x, given = (jax.random.normal(next(keys), (8, 6, width)) for _ in range(2))
    routing = experts.Routing(3, True, lambda gate, up: jax.nn.silu(gate) * up)

    def found(*more, **options):
        def run(x, weights, frozen):
            whole = dataclasses.replace(weights, **frozen)
            return experts.mixture_of_experts(x, whole, routing, *more, **options)[0]

        @jax.jit
        def both(x, weights, frozen, given):
            out, back = jax.vjp(lambda *learned: run(*learned, frozen), x, weights)
            return out, back(given)

        return jax.tree.leaves(both(x, weights, frozen, given))

    alone = found()
    ways = [
        {"move_tokens": moved, "keep_gates": kept}
        for moved in (False, True)
        for kept in (False, True)
    ]
    others = [found(layout, CARELESS, **way) for way in ways]
    for expected, *every in zip(alone, *others, strict=True):
        for one in every:
            np.testing.assert_allclose(one, expected, atol=2e-5)


@pytest.mark.parametrize(("length", "travels"), [(24, True), (1, False)])
def test_a_few_tokens_are_gathered(length, travels):
    """A device reads its experts once for all tokens of a decoding loop's step, not once for each
    device's."""
    layout = make_layouts(jax.devices(), {"data": 1, "expert": 8}).train
    width, mlp, count = 32, 16, 16
    weights = experts.ExpertWeights(
        router=jnp.ones((width, count)),
        gate_up=jnp.ones((count, width, 2, mlp)),
        down=jnp.ones((count, mlp, width)),
    )
    routing = experts.Routing(3, True, lambda gate, up: gate * up)

    def run(x):
        return experts.mixture_of_experts(x, weights, routing, layout, move_tokens=True)[0]

    text = str(jax.make_jaxpr(run)(jnp.ones((8, length, width))))
    assert ("ppermute" in text, "all_gather" in text) == (travels, not travels)
