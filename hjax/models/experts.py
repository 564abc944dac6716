"""Mixture of experts (MoE): a router sends each token to a few of a layer's MLPs (Shazeer et al.
2017, arXiv 1701.06538; Jiang et al. 2024, 2401.04088).

No token is dropped or padded: tokens are sorted by expert, and one grouped matmul multiplies each
group with its expert's weights.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from hjax.kernels import reference
from hjax.kernels.backward import scale_grouped_rows
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
    """The router's top-k choice of experts, and the experts' activation.

    Attributes:
      per_token: experts per token.
      normalize: rescale the chosen experts' softmax weights to a sum of 1.
      activation: (gate, up) -> the input of the down projection.
    """

    per_token: int
    normalize: bool
    activation: Callable[[jax.Array, jax.Array], jax.Array]

    def choose(self, probabilities: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Top-k of [..., experts]: float32 routing weights and int32 experts, [..., per_token]."""
        weights, chosen = jax.lax.top_k(probabilities, self.per_token)
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

    def cast(self, dtype: Any) -> ExpertWeights:
        """Cast to the compute dtype; quantized matrices and their scales stay as they are."""
        kept = self.frozen()
        return dataclasses.replace(jax.tree.map(lambda w: w.astype(dtype), self), **kept)

    def joined(self) -> ExpertWeights:
        """With gate and up concatenated in one dimension, as products read them."""

        def joined(name: str) -> Any:
            weight = getattr(self, name)
            return None if weight is None else weight.reshape(*weight.shape[:-2], -1)

        names = ("gate_up", "gate_up_b", "gate_up_bias", "gate_up_scale")
        return dataclasses.replace(self, **{name: joined(name) for name in names})

    def frozen(self) -> dict[str, Any]:
        """Fields without gradients: quantized matrices and their scales."""
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
_DOWN_FIELDS = tuple(name for name in LOGICAL_AXES if name.startswith("down"))


def fsdp_axes(
    names: tuple[str | None, ...], experts: int, width: int, layout: Layout
) -> tuple[str | None, ...]:
    """Logical axes of a parameter under FSDP. FSDP splits the width of matrices. It splits experts
    instead if the width would not be split into whole TPU tiles and the experts divide evenly, so
    that gathered weights already have the memory layout in which they are read.

    Args:
      names: as declared, or of ``LOGICAL_AXES``.
      experts: per layer; 0: none.
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
    tally_weights: jax.Array | None = None,
    move_tokens: bool = False,
    keep_gates: bool = False,
) -> tuple[jax.Array, jax.Array | None]:
    """The experts' outputs, weighted and summed, and the routing statistics.

    Args:
      x: [batch, length, embed].
      weights: of any float dtype; matrices may be quantized, with scales.
      routing: the router's choice.
      layout: over whose devices rows, length, experts and MLP are split. A device computes its
        experts for the tokens of all devices along the ``expert`` axis, by all-gather of tokens and
        reduce-scatter of outputs, or by a ring.
      kernels: whose grouped matmuls are used.
      tally_weights: float32 [batch, length], see ``hjax.models.load_balancing.routing_sums``; None:
        no routing statistics are returned.
      move_tokens: allow a ring over ``expert`` where cheaper, see ``hjax.models.expert_ring``.
      keep_gates: keep gate and up projections for the backward pass also where experts are split,
        see ``hjax.models.expert_dispatch``.

    Returns:
      [batch, length, embed] in the dtype of x, and ``routing_sums`` of all devices' tokens or None.
    """
    weights = weights.cast(x.dtype)
    if layout is None or layout.mesh.size == 1:
        return _on_one_device(x, weights, tally_weights, routing, kernels)
    inside = jax.sharding.get_abstract_mesh()
    # Inside a pipeline stage some axes are manual already.
    taken = () if inside.empty else inside.manual_axes
    free = set(layout.mesh.axis_names) - set(taken)
    tokens = layout.spec(("batch", "length"))
    present = {n: axes for n, axes in LOGICAL_AXES.items() if getattr(weights, n) is not None}
    experts = weights.router.shape[-1]
    present = {n: fsdp_axes(axes, experts, x.shape[-1], layout) for n, axes in present.items()}
    if x.shape[-1] % layout.shard_count("embed"):  # then the compiler gathers the weights
        present = {n: tuple(None if a == "embed" else a for a in x) for n, x in present.items()}
    split = ExpertWeights(**{name: layout.spec(axes) for name, axes in present.items()})
    return jax.shard_map(
        functools.partial(
            _on_each_device,
            routing=routing,
            layout=layout,
            kernels=kernels,
            move_tokens=move_tokens,
            keep_gates=keep_gates,
        ),
        mesh=layout.mesh if inside.empty else inside,
        axis_names=free,
        in_specs=(tokens, split, tokens),
        out_specs=(tokens, layout.spec(())),
        check_vma=False,
    )(x, weights, tally_weights)


def _on_one_device(
    x: jax.Array,
    weights: ExpertWeights,
    tally_weights: jax.Array | None,
    routing: Routing,
    kernels: KernelSet,
) -> tuple[jax.Array, jax.Array | None]:
    routing_weights, chosen, routing_stats = _route(x, weights, tally_weights, routing)
    rows = x.reshape(-1, x.shape[-1])
    both = _projections(routing, kernels)
    out = _all_experts(rows, routing_weights, chosen, weights.joined(), *both)
    return out.reshape(x.shape), routing_stats


def _route(
    x: jax.Array, weights: ExpertWeights, tally_weights: jax.Array | None, routing: Routing
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """What ``Routing.choose`` gives [batch, length, per_token], and what ``routing_sums`` says."""
    logits = jnp.einsum("btd,de->bte", x, weights.router, preferred_element_type=jnp.float32)
    if weights.router_bias is not None:
        logits += weights.router_bias.astype(jnp.float32)
    probabilities = jax.nn.softmax(logits, axis=-1)
    routing_weights, chosen = routing.choose(probabilities)
    if tally_weights is None:
        return routing_weights, chosen, None
    return routing_weights, chosen, routing_sums(probabilities, chosen, tally_weights)


def _projections(routing: Routing, kernels: KernelSet) -> tuple[GateUpProjection, DownProjection]:
    """The gate-up and down projections of sorted rows."""
    second = functools.partial(_down_projection, kernels=kernels, activation=routing.activation)
    return functools.partial(_gate_up_projection, kernels=kernels), second


def _on_each_device(
    x: jax.Array,
    weights: ExpertWeights,
    tally_weights: jax.Array | None,
    *,
    routing: Routing,
    layout: Layout,
    kernels: KernelSet,
    move_tokens: bool,
    keep_gates: bool,
) -> tuple[jax.Array, jax.Array | None]:
    """On each device, inside shard_map: its tokens and its experts."""
    weights = _gather_fsdp(weights.joined(), x.shape[-1], layout)
    routing_weights, chosen, routing_stats = _route(x, weights, tally_weights, routing)
    if routing_stats is not None and (split := layout.axes("batch") + layout.axes("length")):
        routing_stats = jax.lax.psum(routing_stats, split)
    rows = x.reshape(-1, x.shape[-1])
    routing_weights, chosen = (x.reshape(rows.shape[0], -1) for x in (routing_weights, chosen))
    experts, mlp, parts = layout.axes("experts"), layout.axes("mlp"), layout.shard_count("experts")
    if mlp and weights.down_bias is not None:  # added on one of the devices that are summed
        bias = jnp.where(jax.lax.axis_index(mlp) == 0, weights.down_bias, 0)
        weights = dataclasses.replace(weights, down_bias=bias)

    first, second = _projections(routing, kernels)
    if not experts:
        out = _all_experts(rows, routing_weights, chosen, weights, first=first, second=second)
    else:
        dispatch = ExpertDispatch(
            gate_up=first,
            down=second,
            row_multiple=kernels.row_multiple,
            axes=experts,
            parts=parts,
            keep_gates=keep_gates,
            frozen=tuple(weights.frozen()),
            down_fields=_DOWN_FIELDS,
        )
        move_tokens = move_tokens and ring_is_supported(parts) and ring_is_cheaper(rows, weights)
        if move_tokens:
            ring = ExpertRing(experts, parts, dispatch)
            out = experts_on_ring(ring, rows, routing_weights, chosen, weights)
        else:
            tokens = sort_tokens(rows, routing_weights, chosen, parts * weights.down.shape[0])
            tokens = jax.tree.map(
                lambda part: jax.lax.all_gather(part, experts, axis=0, tiled=True), tokens
            )
            out = dispatch_to_experts(dispatch, tokens, weights)
    if mlp:
        out = jax.lax.psum(out, mlp)
    if experts and not move_tokens:
        out = jax.lax.psum_scatter(out, experts, scatter_dimension=0, tiled=True)
    return out.reshape(x.shape), routing_stats


def _all_experts(
    rows: jax.Array,
    routing_weights: jax.Array,
    chosen: jax.Array,
    weights: ExpertWeights,
    first: GateUpProjection,
    second: DownProjection,
) -> jax.Array:
    """[tokens, embed]: each token's sum over its experts, all of which are local.

    Args:
      rows: [tokens, embed].
      routing_weights: float32 [tokens, per_token].
      chosen: int [tokens, per_token].
      weights: joined.
      first, second: the gate-up and down projections.
    """
    per_token = chosen.size // rows.shape[0]
    order, sizes = sort_by_expert(chosen, weights.down.shape[0])
    back = jnp.argsort(order)
    gates = first(_sort_rows(rows, order, back), weights, sizes)
    out = second(gates, routing_weights.reshape(-1)[order], weights, sizes)
    out = _restore_order(out, order, back).reshape(-1, per_token, rows.shape[-1])
    return jnp.sum(out.astype(jnp.float32), axis=1).astype(rows.dtype)


def _gate_up_projection(
    rows: jax.Array,
    weights: ExpertWeights,
    sizes: jax.Array,
    fill: GroupFill = GroupFill(),
    weight_sums: ExpertWeights | None = None,
    *,
    kernels: KernelSet,
) -> jax.Array:
    """[rows, 2 * mlp]: gate and up projections of rows sorted by expert.

    Args:
      rows: [rows, embed].
      weights: joined.
      sizes: int32 [experts], rows of each. Rows after these, and their gradients, are arbitrary,
        because grouped matmuls do not write them. They do not affect gradients of weights.
      fill: how many rows an even load fills.
      weight_sums: gradients of weights are added to these; None: they start at 0.
      kernels: whose grouped matmuls are used.
    """
    sorted_rows = _ExpertRows(weights, weight_sums, sizes, fill, rows.shape[0], kernels)
    gates = sorted_rows.product(rows, "gate_up")
    if weights.gate_up_bias is not None:
        gates += sorted_rows.bias("gate_up")
    return first_products(gates)


def _down_projection(
    gates: jax.Array,
    routing_weights: jax.Array,
    weights: ExpertWeights,
    sizes: jax.Array,
    fill: GroupFill = GroupFill(),
    weight_sums: ExpertWeights | None = None,
    *,
    kernels: KernelSet,
    activation: Callable[[jax.Array, jax.Array], jax.Array],
) -> jax.Array:
    """[rows, embed]: the down projection of ``_gate_up_projection``'s result, times each row's
    routing weight, float32 [rows], whose gradient is 0 in rows of no expert."""
    sorted_rows = _ExpertRows(weights, weight_sums, sizes, fill, gates.shape[0], kernels)
    routing_weights = _mask_rows(routing_weights[:, None], sorted_rows.inside)
    active = activation(*jnp.split(gates, 2, axis=-1))
    # Weighting the input of the down projection equals weighting its output, which is larger.
    weighted = (active.astype(jnp.float32) * routing_weights).astype(active.dtype)
    out = sorted_rows.product(weighted, "down")
    if weights.down_bias is not None:
        out += (sorted_rows.bias("down").astype(jnp.float32) * routing_weights).astype(out.dtype)
    return out


class _ExpertRows:
    """Rows sorted by expert, and their products; arguments as of ``_gate_up_projection``."""

    def __init__(
        self,
        weights: ExpertWeights,
        weight_sums: ExpertWeights | None,
        sizes: jax.Array,
        fill: GroupFill,
        count: int,
        kernels: KernelSet,
    ) -> None:
        ends, at = jnp.cumsum(sizes), jnp.arange(count)
        self.weights, self.sizes, self.fill, self.kernels = weights, sizes, fill, kernels
        self.weight_sums = weight_sums or ExpertWeights(router=None, gate_up=None, down=None)
        self.inside = (at < ends[-1])[:, None] if fill.fraction < 1 else None
        last = weights.down.shape[0] - 1
        self.expert_of_row = jnp.minimum(jnp.sum(at[:, None] >= ends, axis=1), last)

    def product(self, x: jax.Array, name: str) -> jax.Array:
        """The rows times their experts' matrix ``name``, with its scale and adapters."""

        def product(x: jax.Array, end: str) -> jax.Array:
            weight, sums = (getattr(w, f"{name}{end}") for w in (self.weights, self.weight_sums))
            return self.kernels.grouped(x, weight, self.sizes, self.fill, sums)

        out = product(x, "")
        scale, adapted = (getattr(self.weights, f"{name}{end}") for end in ("_scale", "_a"))
        if scale is not None:
            out = scale_grouped_rows(out, scale, self.expert_of_row)
        return out if adapted is None else out + product(product(x, "_a"), "_b")

    def bias(self, name: str) -> jax.Array:
        """Each row's bias, as a one-hot product, which the compiler fuses with the one before."""
        one, sums = (getattr(w, f"{name}_bias") for w in (self.weights, self.weight_sums))
        one = one if sums is None else reference.add_gradient_to(one, sums)
        own = jax.nn.one_hot(self.expert_of_row, one.shape[0], dtype=one.dtype)
        return _mask_rows(jnp.einsum("re,eo->ro", own, one, precision="highest"), self.inside)


def _gather_fsdp(weights: ExpertWeights, width: int, layout: Layout) -> ExpertWeights:
    """All-gather the local experts' weights over FSDP's axes. The gradient is a reduce-scatter; the
    compiler alone would all-reduce and slice."""
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
    """All-gather along the experts' axis."""
    return jax.lax.all_gather(weight, axes, axis=0, tiled=True)


def _gather_experts_backward(axes: tuple[str, ...], shape: tuple[int, ...], g: jax.Array) -> Any:
    # In 2 dimensions, as with more the TPU compiler all-reduces some sizes. It does not offload
    # gpt-oss's 5760 columns, an odd number of tiles, to SparseCores, but does so in two parts.
    rows = g.reshape(-1, g.shape[-1])
    tiles = rows.shape[1] // _TILE
    cut = [tiles // 2 * _TILE] if tiles > _MAX_TILES and tiles % 2 else []
    parts = [
        jax.lax.psum_scatter(part, axes, scatter_dimension=0, tiled=True)
        for part in jnp.split(rows, cut, axis=1)
    ]
    return (jnp.concatenate(parts, axis=1).reshape(shape),)


_gather_experts.defvjp(
    lambda axes, weight: (_gather_experts(axes, weight), weight.shape), _gather_experts_backward
)


def _mask_rows(x: jax.Array, inside: jax.Array | None) -> jax.Array:
    """x with 0 in rows of no expert, here and in the gradient."""
    return x if inside is None else jnp.where(inside, x, 0)


# Forward and backward are gathers; automatic gradients would be slower scatter-adds.


@jax.custom_vjp
def _sort_rows(rows: jax.Array, order: jax.Array, back: jax.Array) -> jax.Array:
    """[tokens * per_token, embed]: each token's row once per expert, sorted by expert."""
    return rows[order // (order.size // rows.shape[0])]


def _sort_rows_backward(kept: Any, d_out: jax.Array) -> Any:
    back, tokens = kept
    each = d_out[back].reshape(tokens, -1, d_out.shape[-1])
    return jnp.sum(each.astype(jnp.float32), axis=1).astype(d_out.dtype), None, None


_sort_rows.defvjp(
    lambda rows, order, back: (_sort_rows(rows, order, back), (back, rows.shape[0])),
    _sort_rows_backward,
)


@jax.custom_vjp
def _restore_order(rows: jax.Array, order: jax.Array, back: jax.Array) -> jax.Array:
    """Rows in the order of tokens again, the inverse of ``_sort_rows``."""
    return rows[back]


_restore_order.defvjp(
    lambda rows, order, back: (rows[back], order), lambda order, d_out: (d_out[order], None, None)
)
