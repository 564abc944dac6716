"""Mixtures of experts: each token through a few of a layer's MLPs (Shazeer et al. 2017, arXiv
1701.06538; Jiang et al. 2024, 2401.04088).

No token is dropped and none is padded: tokens are sorted by expert, and one grouped product
multiplies each group with its own expert's weights.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from hjax.kernels import quantized, reference
from hjax.models.balance import tallied
from hjax.models.expert_ring import Ring, around, goes_round
from hjax.models.remat import first_products
from hjax.models.weight_ring import LONGEST, whole
from hjax.sharding.layout import Layout

Grouped = Callable[..., jax.Array]


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
class Weights:
    """Of one layer's experts, whose logical axes are ``AXES``; None: there is no such bias, no such
    adapter (its two parts are multiplied to what is added to a matrix), or no scale: the matrix is
    no one of one byte per element."""

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

    def computed(self, dtype: Any) -> Weights:
        """In the dtype of a forward; what is quantized and its scales as they are."""
        kept = self.frozen()
        return dataclasses.replace(jax.tree.map(lambda w: w.astype(dtype), self), **kept)

    def joined(self) -> Weights:
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


jax.tree_util.register_dataclass(Weights)

AXES = {
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


def mixture(
    x: jax.Array,
    weights: Weights,
    routing: Routing,
    layout: Layout | None = None,
    grouped: Grouped = reference.grouped,
    counted: jax.Array | None = None,
    travel: bool = False,
) -> tuple[jax.Array, jax.Array | None]:
    """The experts' outputs, weighted and summed, and how tokens spread over experts.

    Args:
      x: [batch, length, embed].
      weights: of any float dtype, matrices perhaps of one byte with their scales.
      routing: how tokens choose.
      layout: over whose devices rows, length, experts and MLP are split. A device computes its
        experts for the tokens of all devices that differ from it in the ``expert`` axis alone:
        they are gathered before, and sums are scattered after; or they travel.
      grouped: the grouped product, ``hjax.kernels.reference.grouped`` or a platform's.
      counted: float32 [batch, length], see ``hjax.models.balance.tallied``; None: nobody asks.
      travel: tokens go round the ``expert`` axis, see ``hjax.models.expert_ring``; not a long one.

    Returns:
      [batch, length, embed] in the dtype of x, and what ``tallied`` says of all devices' tokens, or
      None.
    """
    weights = weights.computed(x.dtype)
    if layout is None or layout.mesh.size == 1:
        return _of_all(x, weights, counted, routing, grouped)
    inside = jax.sharding.get_abstract_mesh()
    # In a stage of a pipeline its axes are taken.
    taken = () if inside.empty else inside.manual_axes
    free = set(layout.mesh.axis_names) - set(taken)
    tokens = layout.spec(("batch", "length"))
    there = {name: axes for name, axes in AXES.items() if getattr(weights, name) is not None}
    if x.shape[-1] % layout.ways("embed"):  # then the compiler gathers them
        there = {n: tuple(None if a == "embed" else a for a in axes) for n, axes in there.items()}
    split = Weights(**{name: layout.spec(axes) for name, axes in there.items()})
    return jax.shard_map(
        functools.partial(_part, routing=routing, layout=layout, grouped=grouped, travel=travel),
        mesh=layout.mesh if inside.empty else inside,
        axis_names=free,
        in_specs=(tokens, split, tokens),
        out_specs=(tokens, layout.spec(())),
        check_vma=False,
    )(x, weights, counted)


def _of_all(
    x: jax.Array,
    weights: Weights,
    counted: jax.Array | None,
    routing: Routing,
    grouped: Grouped,
) -> tuple[jax.Array, jax.Array | None]:
    shares, chosen, sums = _routed(x, weights, counted, routing)
    rows = x.reshape(-1, x.shape[-1])
    out = _summed(rows, shares, chosen, weights.joined(), routing, grouped)
    return out.reshape(x.shape), sums


def _routed(
    x: jax.Array, weights: Weights, counted: jax.Array | None, routing: Routing
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """What ``Routing.choose`` gives [batch, length, per_token], and what ``tallied`` says."""
    logits = jnp.einsum("btd,de->bte", x, weights.router, preferred_element_type=jnp.float32)
    if weights.router_bias is not None:
        logits += weights.router_bias.astype(jnp.float32)
    probabilities = jax.nn.softmax(logits, axis=-1)
    shares, chosen = routing.choose(probabilities)
    return shares, chosen, None if counted is None else tallied(probabilities, chosen, counted)


def _part(
    x: jax.Array,
    weights: Weights,
    counted: jax.Array | None,
    *,
    routing: Routing,
    layout: Layout,
    grouped: Grouped,
    travel: bool,
) -> tuple[jax.Array, jax.Array | None]:
    """On one device: its tokens and its experts."""
    weights = _gathered(weights, x.shape[-1], layout, travel).joined()
    shares, chosen, sums = _routed(x, weights, counted, routing)
    if sums is not None and (split := layout.axes("batch") + layout.axes("length")):
        sums = jax.lax.psum(sums, split)
    rows = x.reshape(-1, x.shape[-1])
    shares, chosen = (part.reshape(rows.shape[0], -1) for part in (shares, chosen))
    experts, mlp, parts = layout.axes("experts"), layout.axes("mlp"), layout.ways("experts")
    if mlp and weights.down_bias is not None:  # of one of those whose sums are added
        bias = jnp.where(jax.lax.axis_index(mlp) == 0, weights.down_bias, 0)
        weights = dataclasses.replace(weights, down_bias=bias)

    def made(
        rows: jax.Array,
        shares: jax.Array,
        chosen: jax.Array,
        weights: Weights,
        before: Weights | None = None,
    ) -> jax.Array:
        first = jax.lax.axis_index(experts) * weights.down.shape[0] if experts else 0
        if before is not None:
            before = dataclasses.replace(before, **dict.fromkeys(weights.frozen()))
        how = routing, grouped, parts, before
        return _summed(rows, shares, chosen - first, weights, *how)

    travel = travel and goes_round(parts)
    if travel:
        out = around(Ring(experts, parts, made), rows, shares, chosen, weights)
    else:
        if experts:
            rows, shares, chosen = (
                jax.lax.all_gather(part, experts, axis=0, tiled=True)
                for part in (rows, shares, chosen)
            )
        out = made(rows, shares, chosen, weights)
    if mlp:
        out = jax.lax.psum(out, mlp)
    if experts and not travel:
        out = jax.lax.psum_scatter(out, experts, scatter_dimension=0, tiled=True)
    return out.reshape(x.shape), sums


def _summed(
    rows: jax.Array,
    shares: jax.Array,
    chosen: jax.Array,
    weights: Weights,
    routing: Routing,
    grouped: Grouped,
    parts: int = 1,
    before: Weights | None = None,
) -> jax.Array:
    """[tokens, embed]: the sum over those of each token's experts that are here.

    Args:
      rows: [tokens, embed].
      shares: float32 [tokens, per_token].
      chosen: int [tokens, per_token], counted from the first expert here; others are elsewhere.
      weights: of the experts here, joined.
      routing: their activation.
      grouped: the grouped product.
      parts: of all experts one in so many is here.
      before: what gradients of the weights are added to; None: to nothing.
    """
    experts = weights.down.shape[0]
    per_token = chosen.size // rows.shape[0]
    chosen, shares = chosen.reshape(-1), shares.reshape(-1)
    here = (chosen >= 0) & (chosen < experts)
    group = jnp.where(here, chosen, experts)
    order = jnp.argsort(group, stable=True)  # those elsewhere stand at the end, beyond all groups
    sizes = jnp.sum(group[:, None] == jnp.arange(experts), axis=0, dtype=jnp.int32)
    piece = -(-math.ceil(ROOM * order.size / parts) // _TILE) * _TILE
    if parts > 1 and piece < order.size:
        every = functools.partial(_of_experts, routing=routing, grouped=grouped, share=1 / ROOM)
        return _in_pieces((every, piece, per_token), rows, shares, weights, order, sizes, before)
    back = jnp.argsort(order)
    # Rows of no group here: what a grouped product leaves there may be anything.
    inside = (jnp.arange(order.size) < jnp.sum(sizes))[:, None] if parts > 1 else None
    out = _of_experts(
        _within(_sorted(rows, order, back), inside), shares[order], weights, sizes,
        routing=routing, grouped=grouped, share=1 / parts, before=before,
    )  # fmt: skip
    out = _unsorted(_within(out, inside), order, back).reshape(-1, per_token, rows.shape[-1])
    return jnp.sum(out.astype(jnp.float32), axis=1).astype(rows.dtype)


def _of_experts(
    rows: jax.Array,
    shares: jax.Array,
    weights: Weights,
    sizes: jax.Array,
    *,
    routing: Routing,
    grouped: Grouped,
    share: float,
    before: Weights | None = None,
) -> jax.Array:
    """[rows, embed]: each row, sorted by expert, through its own, times its share.

    After the groups anything stands, also in the gradient of those rows: a grouped product leaves
    there what is. Gradients of weights, added to ``before``, and of shares know nothing of them.
    """
    if before is None:
        before = Weights(*[None] * 3)
    experts = weights.down.shape[0]
    ends = jnp.cumsum(sizes)
    at = jnp.arange(rows.shape[0])
    inside = (at < ends[-1])[:, None] if share < 1 else None
    shares = _within(shares[:, None], inside)
    own = jnp.minimum(jnp.searchsorted(ends, at, side="right"), experts - 1)  # a row's expert

    def through(x: jax.Array, name: str) -> jax.Array:
        def product(x: jax.Array, end: str) -> jax.Array:
            both = (getattr(w, f"{name}{end}") for w in (weights, before))
            weight, sums = both
            return grouped(x, weight, sizes, share, sums)

        out = product(x, "")
        scale, adapted = (getattr(weights, f"{name}{end}") for end in ("_scale", "_a"))
        if scale is not None:
            out = quantized.scaled_rows(out, scale, own)
        return out if adapted is None else out + product(product(x, "_a"), "_b")

    def bias(name: str) -> jax.Array:
        one, sums = (getattr(w, f"{name}_bias") for w in (weights, before))
        return _within((one if sums is None else reference.sum_after(one, sums))[own], inside)

    both = through(rows, "gate_up")
    if weights.gate_up_bias is not None:
        both += bias("gate_up")
    gate, up = jnp.split(first_products(both), 2, axis=-1)
    # A share of what goes down is one of what comes: there are fewer elements of it.
    active = routing.activation(gate, up)
    out = through((active.astype(jnp.float32) * shares).astype(active.dtype), "down")
    if weights.down_bias is not None:
        out += (bias("down").astype(jnp.float32) * shares).astype(out.dtype)
    return out


def _gathered(weights: Weights, width: int, layout: Layout, travel: bool) -> Weights:
    """Whole matrices of the experts here, of parts over the axes of ``embed``; backwards a
    reduce-scatter, where the compiler would sum all and cut then. ``travel``: part by part."""
    axes, ways = layout.axes("embed"), layout.ways("embed")

    def gather(name: str, dimension: int) -> Any:
        weight = getattr(weights, name)
        if weight is None or weight.shape[dimension] == width:
            return weight
        if travel and ways <= LONGEST:
            return whole(weight, dimension, axes, ways)
        return jax.lax.all_gather(weight, axes, axis=dimension, tiled=True)

    split = {"gate_up": 1, "down": 2, "gate_up_a": 1, "down_b": 2, "down_scale": 1}
    return dataclasses.replace(weights, **{name: gather(name, at) for name, at in split.items()})


# Where others have most experts, most rows are none of ours. Those that are go through them in
# pieces of what an even load gives, with some room: mostly one, and as many as it takes.
ROOM, _TILE = 1.25, 128


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _in_pieces(
    how: tuple[Callable[..., jax.Array], int, int],
    rows: jax.Array,
    shares: jax.Array,
    weights: Weights,
    order: jax.Array,
    sizes: jax.Array,
    before: Weights | None,
) -> jax.Array:
    """``_summed`` of rows [tokens, embed], shares [tokens * per_token], in ``order``.

    ``how``: the experts, rows of a piece, per_token. The backward pass computes a piece again. A
    token's few rows are summed in their dtype, as transformers sums them.
    """
    every, piece, per_token = how
    at_piece = _pieces_of(order, sizes, piece, per_token, rows.shape[0])

    def add(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        turn, out = state
        place, token, read, held = at_piece(turn)
        made = every(rows[read], shares[place], weights, held)
        return turn + 1, out.at[token].add(made, mode="drop")

    with _one_expected():
        start = (jnp.int32(0), jnp.zeros_like(rows))
        return jax.lax.while_loop(_unfinished(sizes, piece), add, start)[1]


def _in_pieces_forward(how: Any, *given: Any) -> tuple[jax.Array, Any]:
    return _in_pieces(how, *given), given


def _in_pieces_backward(how: Any, kept: Any, given: jax.Array) -> Any:
    every, piece, per_token = how
    rows, shares, weights, order, sizes, before = kept
    at_piece = _pieces_of(order, sizes, piece, per_token, rows.shape[0])
    frozen = weights.frozen()
    none = dict.fromkeys(frozen)
    weights = dataclasses.replace(weights, **none)
    before = jax.tree.map(jnp.zeros_like, weights) if before is None else before
    before = dataclasses.replace(before, **none)

    def add(state: Any) -> Any:
        turn, of_rows, of_shares, of_weights = state
        place, token, read, held = at_piece(turn)

        def run(rows: jax.Array, shares: jax.Array, weights: Weights) -> jax.Array:
            whole = dataclasses.replace(weights, **frozen)
            return every(rows, shares[place], whole, held, before=of_weights)

        _, backwards = jax.vjp(run, rows[read], shares, weights)
        found = backwards(given[read])
        of_rows = of_rows.at[token].add(found[0], mode="drop")
        return turn + 1, of_rows, of_shares + found[1], found[2]

    start = (
        jnp.int32(0),
        jnp.zeros_like(rows),
        jnp.zeros_like(shares),
        before,
    )
    with _one_expected():
        found = jax.lax.while_loop(_unfinished(sizes, piece), add, start)
    return *found[1:], None, None, None


_in_pieces.defvjp(_in_pieces_forward, _in_pieces_backward)


def _one_expected() -> Any:
    """A scope that tells ``hjax.xla`` how many pieces an even load takes."""
    return jax.named_scope("trips:1")


def _unfinished(sizes: jax.Array, piece: int) -> Callable[[Any], jax.Array]:
    """Whether there are rows after so many pieces."""
    return lambda state: state[0] * piece < jnp.sum(sizes)


def _pieces_of(
    order: jax.Array, sizes: jax.Array, piece: int, per_token: int, tokens: int
) -> Callable[[jax.Array], tuple[jax.Array, ...]]:
    """Of a piece, by number: int32 [piece], entries of ``shares``, tokens that get something
    (``tokens`` where a row is none of ours), tokens to read; and [groups], its rows of each."""
    ends = jnp.cumsum(sizes)
    order = jnp.pad(order, (0, -order.size % piece))

    def part(turn: jax.Array) -> tuple[jax.Array, ...]:
        first = turn * piece
        place = jax.lax.dynamic_slice_in_dim(order, first, piece)
        inside = first + jnp.arange(piece) < ends[-1]
        read = place // per_token
        cut = jnp.clip(ends - first, 0, piece)
        held = jnp.diff(cut, prepend=0).astype(jnp.int32)
        return place, jnp.where(inside, read, tokens), read, held

    return part


def _within(x: jax.Array, inside: jax.Array | None) -> jax.Array:
    """0 in rows of no group, here and in the gradient."""
    return x if inside is None else jnp.where(inside, x, 0)


# Each way a gather, backwards too: no sums of rows wherever they come from.


@jax.custom_vjp
def _sorted(rows: jax.Array, order: jax.Array, back: jax.Array) -> jax.Array:
    """[tokens * per_token, embed]: each token's row for each of its experts, in their order."""
    return rows[order // (order.size // rows.shape[0])]


def _sorted_forward(rows: jax.Array, order: jax.Array, back: jax.Array) -> Any:
    return _sorted(rows, order, back), (back, rows.shape[0])


def _sorted_backward(kept: Any, given: jax.Array) -> Any:
    back, tokens = kept
    each = given[back].reshape(tokens, -1, given.shape[-1])
    return jnp.sum(each.astype(jnp.float32), axis=1).astype(given.dtype), None, None


_sorted.defvjp(_sorted_forward, _sorted_backward)


@jax.custom_vjp
def _unsorted(rows: jax.Array, order: jax.Array, back: jax.Array) -> jax.Array:
    """Rows in the order of their tokens again."""
    return rows[back]


def _unsorted_forward(rows: jax.Array, order: jax.Array, back: jax.Array) -> Any:
    return rows[back], order


def _unsorted_backward(order: jax.Array, given: jax.Array) -> Any:
    return given[order], None, None


_unsorted.defvjp(_unsorted_forward, _unsorted_backward)
