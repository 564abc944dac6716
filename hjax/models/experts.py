"""Mixtures of experts: each token through a few of a layer's MLPs (Shazeer et al. 2017, arXiv
1701.06538; Jiang et al. 2024, 2401.04088).

No token is dropped and none is padded: tokens are sorted by expert, and one grouped product
multiplies each group with its own expert's weights.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from hjax.kernels import reference
from hjax.kernels.backward import scaled_rows
from hjax.kernels.reference import GroupFill
from hjax.kernels.registry import KernelSet
from hjax.models.expert_dispatch import (
    DownProjection,
    ExpertDispatch,
    GateUpProjection,
    dispatch_to_experts,
    sort_by_expert,
    sort_tokens,
)
from hjax.models.expert_ring import ExpertRing, experts_on_ring, ring_is_cheaper, ring_is_supported
from hjax.models.load_balancing import routing_sums
from hjax.models.remat import first_products
from hjax.sharding.layout import Layout

_PLAIN = KernelSet()


@dataclasses.dataclass(frozen=True)
class Routing:
    """How tokens choose their experts.

    Attributes:
      per_token: experts that a token uses.
      normalize: their weights, softmax over all experts, are made to add up to 1.
      activation: (gate, up) to what goes down.
    """

    per_token: int
    normalize: bool
    activation: Callable[[jax.Array, jax.Array], jax.Array]

    def choose(self, shares: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Weights, float32, and experts, int32, each [..., per_token], of probabilities
        [..., experts]."""
        weights, chosen = jax.lax.top_k(shares, self.per_token)
        if self.normalize:
            weights /= jnp.sum(weights, axis=-1, keepdims=True)
        return weights, chosen


@dataclasses.dataclass(frozen=True)
class ExpertWeights:
    """The weights of one layer's experts; ``LOGICAL_AXES`` has their axes.

    None: the layer has no such bias or adapter, or no scale because the matrix is not quantized."""

    router: Any  # [embed, experts]
    gate_up: Any  # [experts, embed, 2, mlp]
    down: Any  # [experts, mlp, embed]
    router_bias: Any = None  # [experts]
    gate_up_bias: Any = None  # [experts, 2, mlp]
    down_bias: Any = None  # [experts, embed]
    gate_up_a: Any = None  # [experts, embed, rank]
    gate_up_b: Any = None  # [experts, rank, 2, mlp]
    down_a: Any = None  # [experts, mlp, rank]
    down_b: Any = None  # [experts, rank, embed]
    gate_up_scale: Any = None  # float32 [experts, 2, mlp]
    down_scale: Any = None  # float32 [experts, embed]

    def computed(self, dtype: Any) -> ExpertWeights:
        """In the dtype of a forward; what is quantized and its scales as they are."""
        kept = self.frozen()
        return dataclasses.replace(jax.tree.map(lambda w: w.astype(dtype), self), **kept)

    def joined(self) -> ExpertWeights:
        """With gate and up one after another in one dimension, as products read them."""

        def joined(name: str) -> Any:
            weight = getattr(self, name)
            return None if weight is None else weight.reshape(*weight.shape[:-2], -1)

        names = ("gate_up", "gate_up_b", "gate_up_bias", "gate_up_scale")
        return dataclasses.replace(self, **{name: joined(name) for name in names})

    def frozen(self) -> dict[str, Any]:
        """Of which there are no gradients: quantized matrices and their scales."""
        if self.gate_up_scale is None:
            return {}
        return {
            f"{name}{end}": getattr(self, f"{name}{end}")
            for name in ("gate_up", "down")
            for end in ("", "_scale")
        }


jax.tree_util.register_dataclass(ExpertWeights)

LOGICAL_AXES = {
    "router": (None, None),
    "gate_up": ("experts", "embed", None, "mlp"),
    "down": ("experts", "mlp", "embed"),
    "router_bias": (None,),
    "gate_up_bias": ("experts", None, "mlp"),
    "down_bias": ("experts", None),
    "gate_up_a": ("experts", "embed", None),
    "gate_up_b": ("experts", None, None, "mlp"),
    "down_a": ("experts", "mlp", None),
    "down_b": ("experts", None, "embed"),
    "gate_up_scale": ("experts", None, "mlp"),
    "down_scale": ("experts", "embed"),
}
_TILE, _MAX_TILES = 128, 32  # columns of a TPU's tile; tiles
_DOWN_FIELDS = tuple(
    name for name in LOGICAL_AXES if name.startswith("down")
)  # of the second product


def fsdp_axes(
    names: tuple[str | None, ...], experts: int, width: int, layout: Layout
) -> tuple[str | None, ...]:
    """Logical axes of a parameter as a layout splits it. FSDP splits matrices' width; that of
    experts' only into whole tiles of a TPU, and the experts themselves where its parts would be
    none and all devices can have as many: what is gathered then lies as it is read.

    Args:
      names: as declared, or of ``LOGICAL_AXES``.
      experts: how many a layer has; 0: none.
      width: of ``embed``.
    """
    each = "experts" in names[:-1] and "embed" in names  # not a router
    if not each or width % (_TILE * layout.shard_count("embed")) == 0:
        return names
    if experts % layout.shard_count("whole_experts"):
        return names
    return tuple({"experts": "whole_experts", "embed": None}.get(a or "", a) for a in names)


def mixture_of_experts(
    x: jax.Array,
    weights: ExpertWeights,
    routing: Routing,
    layout: Layout | None = None,
    kernels: KernelSet = _PLAIN,
    counted: jax.Array | None = None,
    travel: bool = False,
    keep: bool = False,
) -> tuple[jax.Array, jax.Array | None]:
    """The experts' outputs, weighted and summed, and how tokens spread over experts.

    Args:
      x: [batch, length, embed].
      weights: of any float dtype, matrices perhaps of one byte with their scales.
      routing: how tokens choose.
      layout: over whose devices rows, length, experts and MLP are split. A device computes its
        experts for the tokens of all devices that differ from it in the ``expert`` axis alone:
        they are gathered before, and sums are scattered after; or they travel.
      kernels: of which the grouped products are taken.
      counted: float32 [batch, length], see ``hjax.models.load_balancing.routing_sums``; None: no
        routing statistics are returned.
      travel: tokens go round the ``expert`` axis where that pays, see ``hjax.models.expert_ring``;
        not a long one.
      keep: what the experts' first products give is kept for the backward pass also where experts
        are split, see ``hjax.models.expert_dispatch``.

    Returns:
      [batch, length, embed] in the dtype of x, and ``routing_sums`` of all devices' tokens or None.
    """
    weights = weights.computed(x.dtype)
    if layout is None or layout.mesh.size == 1:
        return _on_one_device(x, weights, counted, routing, kernels)
    inside = jax.sharding.get_abstract_mesh()
    # In a stage of a pipeline its axes are taken.
    taken = () if inside.empty else inside.manual_axes
    free = set(layout.mesh.axis_names) - set(taken)
    tokens = layout.spec(("batch", "length"))
    there = {
        name: axes for name, axes in LOGICAL_AXES.items() if getattr(weights, name) is not None
    }
    experts = weights.router.shape[-1]
    there = {n: fsdp_axes(axes, experts, x.shape[-1], layout) for n, axes in there.items()}
    if x.shape[-1] % layout.shard_count("embed"):  # then the compiler gathers them
        there = {n: tuple(None if a == "embed" else a for a in axes) for n, axes in there.items()}
    split = ExpertWeights(**{name: layout.spec(axes) for name, axes in there.items()})
    return jax.shard_map(
        functools.partial(
            _on_each_device,
            routing=routing,
            layout=layout,
            kernels=kernels,
            travel=travel,
            keep=keep,
        ),
        mesh=layout.mesh if inside.empty else inside,
        axis_names=free,
        in_specs=(tokens, split, tokens),
        out_specs=(tokens, layout.spec(())),
        check_vma=False,
    )(x, weights, counted)


def _on_one_device(
    x: jax.Array,
    weights: ExpertWeights,
    counted: jax.Array | None,
    routing: Routing,
    kernels: KernelSet,
) -> tuple[jax.Array, jax.Array | None]:
    shares, chosen, sums = _route(x, weights, counted, routing)
    rows = x.reshape(-1, x.shape[-1])
    out = _all_experts(rows, shares, chosen, weights.joined(), *_projections(routing, kernels))
    return out.reshape(x.shape), sums


def _route(
    x: jax.Array, weights: ExpertWeights, counted: jax.Array | None, routing: Routing
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """What ``Routing.choose`` gives [batch, length, per_token], and what ``routing_sums`` says."""
    logits = jnp.einsum("btd,de->bte", x, weights.router, preferred_element_type=jnp.float32)
    if weights.router_bias is not None:
        logits += weights.router_bias.astype(jnp.float32)
    probabilities = jax.nn.softmax(logits, axis=-1)
    shares, chosen = routing.choose(probabilities)
    return shares, chosen, None if counted is None else routing_sums(probabilities, chosen, counted)


def _projections(routing: Routing, kernels: KernelSet) -> tuple[GateUpProjection, DownProjection]:
    """What experts make of sorted rows."""
    second = functools.partial(_down_projection, kernels=kernels, activation=routing.activation)
    return functools.partial(_gate_up_projection, kernels=kernels), second


def _on_each_device(
    x: jax.Array,
    weights: ExpertWeights,
    counted: jax.Array | None,
    *,
    routing: Routing,
    layout: Layout,
    kernels: KernelSet,
    travel: bool,
    keep: bool,
) -> tuple[jax.Array, jax.Array | None]:
    """On one device: its tokens and its experts."""
    weights = _gather_fsdp(weights.joined(), x.shape[-1], layout)
    shares, chosen, sums = _route(x, weights, counted, routing)
    if sums is not None and (split := layout.axes("batch") + layout.axes("length")):
        sums = jax.lax.psum(sums, split)
    rows = x.reshape(-1, x.shape[-1])
    shares, chosen = (part.reshape(rows.shape[0], -1) for part in (shares, chosen))
    experts, mlp, parts = layout.axes("experts"), layout.axes("mlp"), layout.shard_count("experts")
    if mlp and weights.down_bias is not None:  # of one of those whose sums are added
        bias = jnp.where(jax.lax.axis_index(mlp) == 0, weights.down_bias, 0)
        weights = dataclasses.replace(weights, down_bias=bias)

    first, second = _projections(routing, kernels)
    if not experts:
        out = _all_experts(rows, shares, chosen, weights, first=first, second=second)
    else:
        pieces = ExpertDispatch(
            first=first,
            second=second,
            multiple=kernels.multiple,
            axes=experts,
            parts=parts,
            keep=keep,
            frozen=tuple(weights.frozen()),
            of_second=_DOWN_FIELDS,
        )
        travel = travel and ring_is_supported(parts) and ring_is_cheaper(rows, weights)
        if travel:
            out = experts_on_ring(ExpertRing(experts, parts, pieces), rows, shares, chosen, weights)
        else:
            tokens = sort_tokens(rows, shares, chosen, parts * weights.down.shape[0])
            tokens = jax.tree.map(
                lambda part: jax.lax.all_gather(part, experts, axis=0, tiled=True), tokens
            )
            out = dispatch_to_experts(pieces, tokens, weights)
    if mlp:
        out = jax.lax.psum(out, mlp)
    if experts and not travel:
        out = jax.lax.psum_scatter(out, experts, scatter_dimension=0, tiled=True)
    return out.reshape(x.shape), sums


def _all_experts(
    rows: jax.Array,
    shares: jax.Array,
    chosen: jax.Array,
    weights: ExpertWeights,
    first: GateUpProjection,
    second: DownProjection,
) -> jax.Array:
    """[tokens, embed]: the sum over each token's experts, which are all here.

    Args:
      rows: [tokens, embed].
      shares: float32 [tokens, per_token].
      chosen: int [tokens, per_token].
      weights: joined.
      first, second: what experts make of rows.
    """
    per_token = chosen.size // rows.shape[0]
    order, sizes = sort_by_expert(chosen, weights.down.shape[0])
    back = jnp.argsort(order)
    both = first(_sort_rows(rows, order, back), weights, sizes)
    out = second(both, shares.reshape(-1)[order], weights, sizes)
    out = _restore_order(out, order, back).reshape(-1, per_token, rows.shape[-1])
    return jnp.sum(out.astype(jnp.float32), axis=1).astype(rows.dtype)


def _gate_up_projection(
    rows: jax.Array,
    weights: ExpertWeights,
    sizes: jax.Array,
    fill: GroupFill = GroupFill(),
    before: ExpertWeights | None = None,
    *,
    kernels: KernelSet,
) -> jax.Array:
    """[rows, 2 * mlp]: gate and up of each row, sorted by expert, from its own.

    Args:
      rows: [rows, embed].
      weights: joined.
      sizes: int32 [experts], rows of each. After them anything stands, also in the gradient of
        those rows: a grouped product leaves there what is. Gradients of weights know nothing of it.
      fill: what is known of the rows before they are counted.
      before: what gradients of weights are added to; None: to nothing.
      kernels: of which the grouped products are taken.
    """
    how = _ExpertRows(weights, before, sizes, fill, rows.shape[0], kernels)
    both = how.through(rows, "gate_up")
    if weights.gate_up_bias is not None:
        both += how.bias("gate_up")
    return first_products(both)


def _down_projection(
    both: jax.Array,
    shares: jax.Array,
    weights: ExpertWeights,
    sizes: jax.Array,
    fill: GroupFill = GroupFill(),
    before: ExpertWeights | None = None,
    *,
    kernels: KernelSet,
    activation: Callable[[jax.Array, jax.Array], jax.Array],
) -> jax.Array:
    """[rows, embed]: the down projection of ``_gate_up_projection``'s result, times each row's
    routing weight, float32 [rows], whose gradient is 0 in rows of no expert."""
    how = _ExpertRows(weights, before, sizes, fill, both.shape[0], kernels)
    shares = _mask_rows(shares[:, None], how.inside)
    active = activation(*jnp.split(both, 2, axis=-1))
    # A share of what goes down is one of what comes: there are fewer elements of it.
    out = how.through((active.astype(jnp.float32) * shares).astype(active.dtype), "down")
    if weights.down_bias is not None:
        out += (how.bias("down").astype(jnp.float32) * shares).astype(out.dtype)
    return out


class _ExpertRows:
    """Rows that stand sorted by their expert; arguments as of ``_gate_up_projection``."""

    def __init__(
        self,
        weights: ExpertWeights,
        before: ExpertWeights | None,
        sizes: jax.Array,
        fill: GroupFill,
        count: int,
        kernels: KernelSet,
    ) -> None:
        ends, at = jnp.cumsum(sizes), jnp.arange(count)
        self.weights, self.sizes, self.fill, self.kernels = weights, sizes, fill, kernels
        self.before = ExpertWeights(*[None] * 3) if before is None else before
        self.inside = (at < ends[-1])[:, None] if fill.share < 1 else None
        last = weights.down.shape[0] - 1
        self.own = jnp.minimum(jnp.sum(at[:, None] >= ends, axis=1), last)  # a row's expert

    def through(self, x: jax.Array, name: str) -> jax.Array:
        """The rows times their experts' matrix, with its scale and adapters."""

        def product(x: jax.Array, end: str) -> jax.Array:
            weight, sums = (getattr(w, f"{name}{end}") for w in (self.weights, self.before))
            return self.kernels.grouped(x, weight, self.sizes, self.fill, sums)

        out = product(x, "")
        scale, adapted = (getattr(self.weights, f"{name}{end}") for end in ("_scale", "_a"))
        if scale is not None:
            out = scaled_rows(out, scale, self.own)
        return out if adapted is None else out + product(product(x, "_a"), "_b")

    def bias(self, name: str) -> jax.Array:
        """Each row's; a product, which the compiler adds where the one before ends."""
        one, sums = (getattr(w, f"{name}_bias") for w in (self.weights, self.before))
        one = one if sums is None else reference.sum_after(one, sums)
        own = jax.nn.one_hot(self.own, one.shape[0], dtype=one.dtype)
        return _mask_rows(jnp.einsum("re,eo->ro", own, one, precision="highest"), self.inside)


def _gather_fsdp(weights: ExpertWeights, width: int, layout: Layout) -> ExpertWeights:
    """Whole matrices of the experts here, of parts over FSDP's axes; backwards a reduce-scatter,
    where the compiler would sum all and cut then."""
    axes, here = layout.axes("embed"), weights.router.shape[-1] // layout.shard_count("experts")
    by_width = {"gate_up": 1, "down": 2, "gate_up_a": 1, "down_b": 2, "down_scale": 1}

    def gather(name: str) -> Any:
        weight = getattr(weights, name)
        if weight is None:
            return None
        if weight.shape[0] != here:
            return _gather_experts(axes, weight)
        if weight.shape[by_width[name]] != width:
            return jax.lax.all_gather(weight, axes, axis=by_width[name], tiled=True)
        return weight

    return dataclasses.replace(weights, **{name: gather(name) for name in by_width})


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gather_experts(axes: tuple[str, ...], weight: jax.Array) -> jax.Array:
    """[experts of all these devices, ...] of each device's own."""
    return jax.lax.all_gather(weight, axes, axis=0, tiled=True)


def _gather_experts_backward(axes: tuple[str, ...], own: tuple[int, ...], given: jax.Array) -> Any:
    # As rows: of more dimensions a TPU's compiler sums some sizes whole. Nor does it send sums of
    # gpt-oss's 5760 columns, an odd number of tiles, to SparseCores; both parts of them it does.
    rows = given.reshape(-1, given.shape[-1])
    tiles = rows.shape[1] // _TILE
    cut = [tiles // 2 * _TILE] if tiles > _MAX_TILES and tiles % 2 else []
    parts = [
        jax.lax.psum_scatter(part, axes, scatter_dimension=0, tiled=True)
        for part in jnp.split(rows, cut, axis=1)
    ]
    return (jnp.concatenate(parts, axis=1).reshape(own),)


_gather_experts.defvjp(
    lambda axes, weight: (_gather_experts(axes, weight), weight.shape), _gather_experts_backward
)


def _mask_rows(x: jax.Array, inside: jax.Array | None) -> jax.Array:
    """0 in rows of no group, here and in the gradient."""
    return x if inside is None else jnp.where(inside, x, 0)


# Each way a gather, backwards too: no sums of rows wherever they come from.


@jax.custom_vjp
def _sort_rows(rows: jax.Array, order: jax.Array, back: jax.Array) -> jax.Array:
    """[tokens * per_token, embed]: each token's row for each of its experts, in their order."""
    return rows[order // (order.size // rows.shape[0])]


def _sort_rows_backward(kept: Any, given: jax.Array) -> Any:
    back, tokens = kept
    each = given[back].reshape(tokens, -1, given.shape[-1])
    return jnp.sum(each.astype(jnp.float32), axis=1).astype(given.dtype), None, None


_sort_rows.defvjp(
    lambda rows, order, back: (_sort_rows(rows, order, back), (back, rows.shape[0])),
    _sort_rows_backward,
)


@jax.custom_vjp
def _restore_order(rows: jax.Array, order: jax.Array, back: jax.Array) -> jax.Array:
    """Rows in the order of their tokens again."""
    return rows[back]


_restore_order.defvjp(
    lambda rows, order, back: (rows[back], order), lambda order, given: (given[order], None, None)
)
