"""Expert parallelism by a ring: tokens move past the experts of all devices of an expert axis.

An all-gather of tokens before the experts and a reduce-scatter of outputs after them would both
block. Here half of a device's tokens move round the ring one way, half the other. Their sums of
expert outputs follow one step behind: while a device computes its experts on the tokens it has, the
next tokens arrive and the last sums leave.

All transfers are collective permutes, which the TPU compiler overlaps with compute; optimization
barriers fix the order.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint

from hjax.models.collective_matmul import MAX_RING_DEVICES, ring_shift
from hjax.models.expert_dispatch import ExpertDispatch, sort_tokens

_BYTES_READ_PER_RECEIVED = (
    12.0  # bytes that a TPU reads while it receives one: v5e and v6e 9, v5p 15
)


class ExpertRing(NamedTuple):
    """The ring of devices that experts are split over; hashable.

    Attributes:
      axes: mesh axes that split the experts.
      devices: number of devices in the ring.
      dispatch: how tokens are computed by the experts of one device.
    """

    axes: tuple[str, ...]
    devices: int
    dispatch: ExpertDispatch


def ring_is_supported(devices: int) -> bool:
    """Whether a ring may have so many devices."""
    return 1 < devices <= MAX_RING_DEVICES


def ring_is_cheaper(rows: jax.Array, weights: Any) -> bool:
    """Whether a ring is faster than all-gather and reduce-scatter. In a ring a device reads its
    experts' weights again for each device's tokens, which costs more than it saves for few tokens,
    as in decoding.

    Args:
      rows: [tokens, embed], of this device.
      weights: of the local experts, joined.
    """
    read = sum(w.size * w.dtype.itemsize for w in (weights.gate_up, weights.down))
    return read <= _BYTES_READ_PER_RECEIVED * 2 * rows.size * rows.dtype.itemsize


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def experts_on_ring(
    ring: ExpertRing, rows: jax.Array, routing_weights: jax.Array, chosen: jax.Array, weights: Any
) -> jax.Array:
    """[tokens, embed], each token's sum over the experts of all devices; inside shard_map.

    Args:
      ring: the devices.
      rows: [tokens, embed], of this device.
      routing_weights, chosen: float32 and int [tokens, per_token], of the tokens' experts.
      weights: of the local experts, joined.
    """
    return _forward(ring, rows, routing_weights, chosen, weights)[0]


def _forward(
    ring: ExpertRing, rows: jax.Array, routing_weights: jax.Array, chosen: jax.Array, weights: Any
) -> tuple[jax.Array, Any]:
    rows = _row_major(rows)
    experts = ring.devices * weights.down.shape[0]
    halves = _split_directions(ring, (rows, routing_weights, chosen))
    sets = [sort_tokens(r, s, c, experts) for r, s, c in halves]
    sums: Any = [jnp.zeros_like(half.rows) for half in sets]
    kept: list[jax.Array | None] = []  # one for each device's tokens
    local: Any = sets
    for step in range(ring.devices):
        local, arriving, sums = _advance(ring, step, local, sums)
        tokens = _concatenate(local) if step else _concatenate(local)._replace(rows=rows)
        sums, saved = ring.dispatch.forward(tokens, weights, sums)
        kept.append(saved)
        local = arriving
    none: Any = None
    saved_sets = [half._replace(rows=none) for half in sets]
    return _concatenate(_shift(ring, sums)), (kept, rows, saved_sets, weights)


def _backward(ring: ExpertRing, saved: Any, d_out: jax.Array) -> tuple[Any, ...]:
    kept, rows, sets, weights = saved
    d_out = _row_major(d_out)
    halves = zip(sets, _split_directions(ring, (rows, d_out)), strict=True)
    local: Any = [(half._replace(rows=own), d_local) for half, (own, d_local) in halves]
    sums: Any = [
        (jnp.zeros_like(d_local), jnp.zeros_like(half.routing_weights)) for half, d_local in local
    ]
    weight_sums: Any = None  # accumulated over the devices' tokens
    for step in range(ring.devices):
        local, arriving, sums = _advance(ring, step, local, sums)
        before, of_routing = zip(*sums, strict=True)
        tokens, d_local = _concatenate(local)
        if not step:
            tokens, d_local = tokens._replace(rows=rows), d_out
        of_rows, made, weight_sums = ring.dispatch.backward(
            kept[step], tokens, weights, weight_sums, d_local, before
        )
        added = [x + y for x, y in zip(of_routing, _split_directions(ring, made), strict=True)]
        sums, local = list(zip(of_rows, added, strict=True)), arriving
    d_rows, d_routing = _concatenate(_shift(ring, sums))
    return d_rows, d_routing.reshape(d_rows.shape[0], -1), None, weight_sums


experts_on_ring.defvjp(_forward, _backward)


def _row_major(tree: Any) -> Any:
    """Arrays in row-major memory layout, as gathers and scatters want it. The compiler would make
    them column-major if the width is no multiple of its tiles, and transpose at every transfer."""
    return jax.tree.map(lambda x: with_layout_constraint(x, Layout(tuple(range(x.ndim)))), tree)


def _split_directions(ring: ExpertRing, tree: Any) -> list[Any]:
    """Split tokens by the direction in which they move round the ring."""
    leaves, structure = jax.tree.flatten(tree)
    count = 2 if ring.devices > 2 and leaves[0].shape[0] % 2 == 0 else 1
    cut = [jnp.split(x, count) for x in leaves]
    return [jax.tree.unflatten(structure, part) for part in zip(*cut, strict=True)]


def _concatenate(parts: Sequence[Any]) -> Any:
    return parts[0] if len(parts) == 1 else jax.tree.map(lambda *x: jnp.concatenate(x), *parts)


def _shift(ring: ExpertRing, parts: Sequence[Any]) -> list[Any]:
    """Send each part to the next device in its direction."""
    moves = zip(parts, (1, -1))
    return [_row_major(ring_shift(_row_major(x), by, ring.axes, ring.devices)) for x, by in moves]


def _advance(ring: ExpertRing, step: int, local: Any, sums: Any) -> tuple[Any, Any, Any]:
    """The local tokens, those that arrive next, and the arriving sums, each in parts.

    The next tokens are sent before the local ones are computed, but after the previous step's sums:
    else the compiler would move all tokens round the ring before any product.
    """
    if step:
        local, sums = jax.lax.optimization_barrier((local, sums))
        sums = _shift(ring, sums)
    arriving = local if step + 1 == ring.devices else _shift(ring, local)
    return local, arriving, sums
