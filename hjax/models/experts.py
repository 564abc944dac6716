"""Mixtures of experts: each token through a few of a layer's MLPs (Shazeer et al. 2017, arXiv
1701.06538; Jiang et al. 2024, 2401.04088).

No token is dropped and none is padded: tokens are sorted by expert, and one grouped product
(``jax.lax.ragged_dot``) multiplies each group with its own expert's weights.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from hjax.sharding.layout import Layout


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
    x: jax.Array, weights: Weights, routing: Routing, layout: Layout | None = None
) -> jax.Array:
    """The experts' outputs, weighted and summed, [batch, length, embed] in the dtype of x.

    Args:
      x: [batch, length, embed].
      weights: of any float dtype.
      routing: how tokens choose.
      layout: over whose devices rows, length, experts and MLP are split. A device computes its
        experts for the tokens of all devices that differ from it in the ``expert`` axis alone:
        they are gathered before, and sums are scattered after.
    """
    weights = jax.tree.map(lambda w: w.astype(x.dtype), weights)
    if layout is None or layout.mesh.size == 1:
        return _of_all(x, weights, routing)
    inside = jax.sharding.get_abstract_mesh()
    # In a stage of a pipeline its axes are taken.
    taken = () if inside.empty else inside.manual_axes
    free = set(layout.mesh.axis_names) - set(taken)
    tokens = layout.spec(("batch", "length"))
    there = {name: axes for name, axes in AXES.items() if getattr(weights, name) is not None}
    split = Weights(**{name: layout.spec(axes) for name, axes in there.items()})
    return jax.shard_map(
        functools.partial(_part, routing=routing, layout=layout),
        mesh=layout.mesh if inside.empty else inside,
        axis_names=free,
        in_specs=(tokens, split),
        out_specs=tokens,
        check_vma=False,
    )(x, weights)


def _of_all(x: jax.Array, weights: Weights, routing: Routing) -> jax.Array:
    shares, chosen = routing.choose(_logits(x, weights))
    rows = x.reshape(-1, x.shape[-1])
    out = _grouped(rows, shares, chosen, weights, routing)
    return out.astype(x.dtype).reshape(x.shape)


def _logits(x: jax.Array, weights: Weights) -> jax.Array:
    """float32 [batch, length, experts]."""
    logits = jnp.einsum("btd,de->bte", x, weights.router, preferred_element_type=jnp.float32)
    bias = weights.router_bias
    return logits if bias is None else logits + bias.astype(jnp.float32)


def _part(x: jax.Array, weights: Weights, *, routing: Routing, layout: Layout) -> jax.Array:
    """On one device: its tokens and its experts."""
    shares, chosen = routing.choose(_logits(x, weights))
    rows = x.reshape(-1, x.shape[-1])
    shares, chosen = (part.reshape(rows.shape[0], -1) for part in (shares, chosen))
    experts, mlp = layout.axes("experts"), layout.axes("mlp")
    first = 0
    if experts:
        rows, shares, chosen = (
            jax.lax.all_gather(part, experts, axis=0, tiled=True)
            for part in (rows, shares, chosen)
        )
        first = jax.lax.axis_index(experts) * weights.down.shape[0]
    if mlp and weights.down_bias is not None:  # of one of those whose sums are added
        bias = jnp.where(jax.lax.axis_index(mlp) == 0, weights.down_bias, 0)
        weights = dataclasses.replace(weights, down_bias=bias)
    out = _grouped(rows, shares, chosen - first, weights, routing)
    if mlp:
        out = jax.lax.psum(out, mlp)
    if experts:
        out = jax.lax.psum_scatter(out, experts, scatter_dimension=0, tiled=True)
    return out.astype(x.dtype).reshape(x.shape)


def _grouped(
    rows: jax.Array, shares: jax.Array, chosen: jax.Array, weights: Weights, routing: Routing
) -> jax.Array:
    """float32 [tokens, embed]: of each token's experts those that are here.

    Args:
      rows: [tokens, embed].
      shares: float32 [tokens, per_token].
      chosen: int [tokens, per_token], counted from the first expert here; others are elsewhere.
      weights: of the experts here.
      routing: their activation.
    """
    experts, width = weights.down.shape[0], rows.shape[-1]
    per_token = chosen.size // rows.shape[0]
    chosen, shares = chosen.reshape(-1), shares.reshape(-1)
    here = (chosen >= 0) & (chosen < experts)
    group = jnp.where(here, chosen, experts)
    # Those elsewhere stand at the end, beyond all groups, where a grouped product gives 0.
    order = jnp.argsort(group, stable=True)
    sizes = jnp.sum(group[:, None] == jnp.arange(experts), axis=0, dtype=jnp.int32)
    gate_up = weights.gate_up.reshape(experts, width, -1)
    own = jnp.minimum(group[order], experts - 1)  # whose bias a row takes
    both = jax.lax.ragged_dot(rows[order // per_token], gate_up, sizes)
    if weights.gate_up_bias is not None:
        both += weights.gate_up_bias.reshape(experts, -1)[own]
    gate, up = jnp.split(both, 2, axis=-1)
    out = jax.lax.ragged_dot(routing.activation(gate, up), weights.down, sizes)
    if weights.down_bias is not None:
        out += weights.down_bias[own]
    back = jnp.argsort(order)  # a gather each way: sums in the order of a token's experts
    out = out[back].astype(jnp.float32) * jnp.where(here, shares, 0.0)[:, None]
    return jnp.sum(out.reshape(-1, per_token, width), axis=1)
