"""Tokens that travel past the experts of an expert axis.

Each device has a part of the experts, and tokens of its own. To gather all tokens before and to
scatter sums after is to wait for both. Here half of a device's tokens goes round the devices one
way, half the other, and the sums of what experts make of them go along, a step behind: while a
device computes its experts of the tokens that it has, the next ones arrive and the last sums leave.

Everything is sent by permutations, which a TPU's compiler runs beside other work; what has to be
done before is said by barriers.
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
    """Devices that have a part of the experts each; hashable.

    Attributes:
      axes: of the mesh, along which experts are split.
      ways: how many devices.
      pieces: how tokens go through the experts of one.
    """

    axes: tuple[str, ...]
    ways: int
    pieces: ExpertDispatch


def ring_is_supported(ways: int) -> bool:
    """Whether tokens may travel over so many devices."""
    return 1 < ways <= MAX_RING_DEVICES


def ring_is_cheaper(rows: jax.Array, weights: Any) -> bool:
    """Whether tokens had better travel than be gathered. A device reads its experts' weights again
    for each device's tokens; gathered ones, and their sums, it waits for. Of a few tokens, such as
    a decoding loop has, weights are much more.

    Args:
      rows: [tokens, embed], of this device.
      weights: of the experts here, joined.
    """
    read = sum(w.size * w.dtype.itemsize for w in (weights.gate_up, weights.down))
    return read <= _BYTES_READ_PER_RECEIVED * 2 * rows.size * rows.dtype.itemsize


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def experts_on_ring(
    ring: ExpertRing, rows: jax.Array, shares: jax.Array, chosen: jax.Array, weights: Any
) -> jax.Array:
    """[tokens, embed], each token's sum over the experts of all devices; inside shard_map.

    Args:
      ring: the devices.
      rows: [tokens, embed], of this device.
      shares, chosen: float32 and int [tokens, per_token], of their experts.
      weights: of the experts here, joined.
    """
    return _forward(ring, rows, shares, chosen, weights)[0]


def _forward(
    ring: ExpertRing, rows: jax.Array, shares: jax.Array, chosen: jax.Array, weights: Any
) -> tuple[jax.Array, Any]:
    rows = _row_major(rows)
    experts = ring.ways * weights.down.shape[0]
    halves = _split_directions(ring, (rows, shares, chosen))
    sets = [sort_tokens(r, s, c, experts) for r, s, c in halves]
    sums: Any = [jnp.zeros_like(half.rows) for half in sets]
    kept: list[jax.Array | None] = []  # by whose tokens are here
    here: Any = sets
    for step in range(ring.ways):
        here, coming, sums = _advance(ring, step, here, sums)
        tokens = _concatenate(here) if step else _concatenate(here)._replace(rows=rows)
        sums, left = ring.pieces.forward(tokens, weights, sums)
        kept.append(left)
        here = coming
    none: Any = None
    left_by = [half._replace(rows=none) for half in sets]
    return _concatenate(_shift(ring, sums)), (kept, rows, left_by, weights)


def _backward(ring: ExpertRing, left: Any, d_out: jax.Array) -> tuple[Any, ...]:
    kept, rows, sets, weights = left
    d_out = _row_major(d_out)
    halves = zip(sets, _split_directions(ring, (rows, d_out)), strict=True)
    here: Any = [(half._replace(rows=own), given) for half, (own, given) in halves]
    sums: Any = [(jnp.zeros_like(given), jnp.zeros_like(half.shares)) for half, given in here]
    of_weights: Any = None  # grows, from device to device's tokens
    for step in range(ring.ways):
        here, coming, sums = _advance(ring, step, here, sums)
        before, of_shares = zip(*sums, strict=True)
        tokens, given = _concatenate(here)
        if not step:
            tokens, given = tokens._replace(rows=rows), d_out
        of_rows, made, of_weights = ring.pieces.backward(
            kept[step], tokens, weights, of_weights, given, before
        )
        added = [x + y for x, y in zip(of_shares, _split_directions(ring, made), strict=True)]
        sums, here = list(zip(of_rows, added, strict=True)), coming
    d_rows, d_shares = _concatenate(_shift(ring, sums))
    return d_rows, d_shares.reshape(d_rows.shape[0], -1), None, of_weights


experts_on_ring.defvjp(_forward, _backward)


def _row_major(tree: Any) -> Any:
    """Arrays whose rows lie one after another, as they are gathered and added to. The compiler
    would have columns so where the width is no multiple of its tiles, and turn them each time that
    they are sent."""
    return jax.tree.map(lambda x: with_layout_constraint(x, Layout(tuple(range(x.ndim)))), tree)


def _split_directions(ring: ExpertRing, tree: Any) -> list[Any]:
    """Tokens by the way that they go."""
    leaves, structure = jax.tree.flatten(tree)
    ways = len(_directions(ring, leaves[0].shape[0]))
    cut = [jnp.split(x, ways) for x in leaves]
    return [jax.tree.unflatten(structure, part) for part in zip(*cut, strict=True)]


def _directions(ring: ExpertRing, tokens: int) -> tuple[int, ...]:
    """Which way parts of so many tokens go."""
    return (1, -1) if ring.ways > 2 and tokens % 2 == 0 else (1,)


def _concatenate(parts: Sequence[Any]) -> Any:
    if len(parts) == 1:
        return parts[0]
    return jax.tree.map(lambda *x: jnp.concatenate(x), *parts)


def _shift(ring: ExpertRing, parts: Sequence[Any]) -> list[Any]:
    """Each part to the next device of its way."""
    ways = zip(parts, (1, -1))
    return [_row_major(ring_shift(_row_major(x), way, ring.axes, ring.ways)) for x, way in ways]


def _advance(ring: ExpertRing, step: int, here: Any, sums: Any) -> tuple[Any, Any, Any]:
    """By parts the tokens that are here, those that come next, and the sums that came along.

    What comes next is sent before anything is made of what is here, and when the step before has
    made its sums: else the compiler would send all tokens round before it multiplies any.
    """
    if step:
        here, sums = jax.lax.optimization_barrier((here, sums))
        sums = _shift(ring, sums)
    coming = here if step + 1 == ring.ways else _shift(ring, here)
    return here, coming, sums
