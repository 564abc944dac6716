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

    def choose(self, logits: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Weights, float32, and experts, int32, each [..., per_token], of [..., experts]."""
        shares = jax.nn.softmax(logits.astype(jnp.float32), axis=-1)
        weights, chosen = jax.lax.top_k(shares, self.per_token)
        if self.normalize:
            weights /= jnp.sum(weights, axis=-1, keepdims=True)
        return weights, chosen


@dataclasses.dataclass(frozen=True)
class Weights:
    """Of one layer's experts, whose logical axes are ``AXES``; None: there is no such bias."""

    router: Any  # [embed, experts]
    gate_up: Any  # [experts, embed, 2, mlp]
    down: Any  # [experts, mlp, embed]
    router_bias: Any = None  # [experts]
    gate_up_bias: Any = None  # [experts, 2, mlp]
    down_bias: Any = None  # [experts, embed]


jax.tree_util.register_dataclass(Weights)

AXES = {
    "router": (None, None),
    "gate_up": ("experts", None, None, "mlp"),
    "down": ("experts", "mlp", None),
    "router_bias": (None,),
    "gate_up_bias": ("experts", None, "mlp"),
    "down_bias": ("experts", None),
}


def mixture(
    x: jax.Array,
    weights: Weights,
    routing: Routing,
    layout: Layout | None = None,
    grouped: Grouped = reference.grouped,
) -> jax.Array:
    """The experts' outputs, weighted and summed, [batch, length, embed] in the dtype of x.

    Args:
      x: [batch, length, embed].
      weights: of any float dtype.
      routing: how tokens choose.
      layout: over whose devices rows, length, experts and MLP are split. A device computes its
        experts for the tokens of all devices that differ from it in the ``expert`` axis alone:
        they are gathered before, and sums are scattered after.
      grouped: the grouped product, ``hjax.kernels.reference.grouped`` or a platform's.
    """
    weights = jax.tree.map(lambda w: w.astype(x.dtype), weights)
    if layout is None or layout.mesh.size == 1:
        return _of_all(x, weights, routing, grouped)
    inside = jax.sharding.get_abstract_mesh()
    # In a stage of a pipeline its axes are taken.
    taken = () if inside.empty else inside.manual_axes
    free = set(layout.mesh.axis_names) - set(taken)
    tokens = layout.spec(("batch", "length"))
    there = {name: axes for name, axes in AXES.items() if getattr(weights, name) is not None}
    split = Weights(**{name: layout.spec(axes) for name, axes in there.items()})
    return jax.shard_map(
        functools.partial(_part, routing=routing, layout=layout, grouped=grouped),
        mesh=layout.mesh if inside.empty else inside,
        axis_names=free,
        in_specs=(tokens, split),
        out_specs=tokens,
        check_vma=False,
    )(x, weights)


def _of_all(x: jax.Array, weights: Weights, routing: Routing, grouped: Grouped) -> jax.Array:
    shares, chosen = routing.choose(_logits(x, weights))
    rows = x.reshape(-1, x.shape[-1])
    out = _summed(rows, shares, chosen, weights, routing, grouped)
    return out.astype(x.dtype).reshape(x.shape)


def _logits(x: jax.Array, weights: Weights) -> jax.Array:
    """float32 [batch, length, experts]."""
    logits = jnp.einsum("btd,de->bte", x, weights.router, preferred_element_type=jnp.float32)
    bias = weights.router_bias
    return logits if bias is None else logits + bias.astype(jnp.float32)


def _part(
    x: jax.Array, weights: Weights, *, routing: Routing, layout: Layout, grouped: Grouped
) -> jax.Array:
    """On one device: its tokens and its experts."""
    shares, chosen = routing.choose(_logits(x, weights))
    rows = x.reshape(-1, x.shape[-1])
    shares, chosen = (part.reshape(rows.shape[0], -1) for part in (shares, chosen))
    experts, mlp = layout.axes("experts"), layout.axes("mlp")
    first = 0
    if experts:
        rows, shares, chosen = (
            jax.lax.all_gather(part, experts, axis=0, tiled=True) for part in (rows, shares, chosen)
        )
        first = jax.lax.axis_index(experts) * weights.down.shape[0]
    if mlp and weights.down_bias is not None:  # of one of those whose sums are added
        bias = jnp.where(jax.lax.axis_index(mlp) == 0, weights.down_bias, 0)
        weights = dataclasses.replace(weights, down_bias=bias)
    share = 1 / layout.ways("experts")
    out = _summed(rows, shares, chosen - first, weights, routing, grouped, share)
    if mlp:
        out = jax.lax.psum(out, mlp)
    if experts:
        out = jax.lax.psum_scatter(out, experts, scatter_dimension=0, tiled=True)
    return out.astype(x.dtype).reshape(x.shape)


def _summed(
    rows: jax.Array,
    shares: jax.Array,
    chosen: jax.Array,
    weights: Weights,
    routing: Routing,
    grouped: Grouped,
    share: float = 1.0,
) -> jax.Array:
    """float32 [tokens, embed]: of each token's experts those that are here.

    Args:
      rows: [tokens, embed].
      shares: float32 [tokens, per_token].
      chosen: int [tokens, per_token], counted from the first expert here; others are elsewhere.
      weights: of the experts here.
      routing: their activation.
      grouped: the grouped product.
      share: of all experts, how many are here.
    """
    experts, width = weights.down.shape[0], rows.shape[-1]
    per_token = chosen.size // rows.shape[0]
    chosen = chosen.reshape(-1)
    here = (chosen >= 0) & (chosen < experts)
    group = jnp.where(here, chosen, experts)
    order = jnp.argsort(group, stable=True)  # those elsewhere stand at the end, beyond all groups
    back = jnp.argsort(order)
    sizes = jnp.sum(group[:, None] == jnp.arange(experts), axis=0, dtype=jnp.int32)
    inside = (jnp.arange(order.size) < jnp.sum(sizes))[:, None] if share < 1 else None

    def product(x: jax.Array, weight: jax.Array) -> jax.Array:
        return _within(grouped(_within(x, inside), weight, sizes, share), inside)

    own = jnp.minimum(group[order], experts - 1)  # whose bias a row takes
    both = product(_sorted(rows, order, back), weights.gate_up.reshape(experts, width, -1))
    if weights.gate_up_bias is not None:
        both += weights.gate_up_bias.reshape(experts, -1)[own]
    gate, up = jnp.split(both, 2, axis=-1)
    out = product(routing.activation(gate, up), weights.down)
    if weights.down_bias is not None:
        out += weights.down_bias[own]
    out = _unsorted(out, order, back).reshape(-1, per_token, width).astype(jnp.float32)
    kept = jnp.where(here.reshape(-1, per_token), shares.reshape(-1, per_token), 0.0)
    return jnp.sum(out * kept[..., None], axis=1)


def _within(x: jax.Array, inside: jax.Array | None) -> jax.Array:
    """0 in rows of no group, here and in the gradient: a grouped product leaves there what is."""
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
