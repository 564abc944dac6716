"""Tokens that travel past the experts of an expert axis.

Each device has a part of the experts, and tokens of its own. To gather all tokens before and to
scatter sums after is to wait for both. Here half of a device's tokens goes round the devices one
way, half the other, and the sums of what experts make of them go along, a step behind: while a
device computes its experts of the tokens that it has, the next ones arrive and the last sums leave.

Everything is sent by permutations, which a TPU's compiler always starts early and awaits late.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from hjax.models.weight_ring import LONGEST, sent


class Ring(NamedTuple):
    """Devices that have a part of the experts each; hashable.

    Attributes:
      axes: of the mesh, along which experts are split.
      ways: how many devices.
      made: (tokens' rows [tokens, embed], shares and experts [tokens, per_token], weights, and
        what gradients of weights are added to, or None) to [tokens, embed], the sum over the
        experts here.
    """

    axes: tuple[str, ...]
    ways: int
    made: Callable[..., jax.Array]


def goes_round(ways: int) -> bool:
    """Whether tokens may travel over so many devices."""
    return 1 < ways <= LONGEST


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def around(
    ring: Ring, rows: jax.Array, shares: jax.Array, chosen: jax.Array, weights: Any
) -> jax.Array:
    """[tokens, embed], each token's sum over the experts of all devices; inside shard_map.

    Args:
      ring: the devices.
      rows: [tokens, embed], of this device.
      shares, chosen: float32 and int [tokens, per_token], of their experts.
      weights: of the experts here.
    """
    out: list[Any] = []
    for tokens in _travelling(ring, (rows, shares, chosen)):
        made = ring.made(*tokens.here, weights, None)
        out = tokens.summed(out, made)
    return _home(ring, out)


def _forward(ring: Ring, *given: Any) -> tuple[jax.Array, Any]:
    return around(ring, *given), given


def _backward(ring: Ring, kept: Any, d_out: jax.Array) -> tuple[Any, ...]:
    rows, shares, chosen, weights = kept
    d_tokens: list[Any] = []
    d_weights: Any = None  # grows, from device to device's tokens
    for tokens in _travelling(ring, (rows, shares, chosen, d_out)):
        rows, shares, chosen, given = tokens.here

        def made(
            rows: jax.Array,
            shares: jax.Array,
            weights: Any,
            chosen: jax.Array = chosen,
            before: Any = d_weights,
        ) -> jax.Array:
            return ring.made(rows, shares, chosen, weights, before)

        _, back = jax.vjp(made, rows, shares, weights)
        d_rows, d_shares, d_weights = back(given)
        d_tokens = tokens.summed(d_tokens, (d_rows, d_shares))
    return *_home(ring, d_tokens), None, d_weights


around.defvjp(_forward, _backward)


class _Tokens(NamedTuple):
    """Those that are on this device in a step: ``here``, and how to add to what goes along."""

    ring: Ring
    here: tuple[jax.Array, ...]

    def summed(self, before: list[Any], made: Any) -> list[Any]:
        """What was summed of them before they came here, with what is made of them here."""
        halves = _halves(self.ring, made)
        if not before:
            return halves
        sums = [sent(x, way, *self.ring[:2]) for x, way in zip(before, _ways(self.ring))]
        return [jax.tree.map(jnp.add, *pair) for pair in zip(sums, halves, strict=True)]


def _ways(ring: Ring) -> tuple[int, ...]:
    """Which way parts of the tokens go."""
    return (1, -1) if ring.ways > 2 else (1,)


def _halves(ring: Ring, tree: Any) -> list[Any]:
    """Tokens by the way that they go."""
    ways = len(_ways(ring))
    cut = [jnp.array_split(x, ways) for x in jax.tree.leaves(tree)]
    return [jax.tree.unflatten(jax.tree.structure(tree), part) for part in zip(*cut, strict=True)]


def _joined(parts: list[Any]) -> Any:
    if len(parts) == 1:
        return parts[0]
    return jax.tree.map(lambda *x: jnp.concatenate(x), *parts)


def _travelling(ring: Ring, tokens: tuple[jax.Array, ...]) -> Any:
    """The tokens of this device, then those of its neighbours, and so on."""
    here = _halves(ring, tokens)
    for step in range(ring.ways):
        # What comes next is sent before anything is made of what is here.
        last = step + 1 == ring.ways
        ways = zip(here, _ways(ring), strict=True)
        coming = here if last else [sent(x, way, *ring[:2]) for x, way in ways]
        yield _Tokens(ring, _joined(here))
        here = coming


def _home(ring: Ring, sums: list[Any]) -> Any:
    """Sums that have been everywhere, at the device whose tokens they are of."""
    return _joined([sent(x, way, *ring[:2]) for x, way in zip(sums, _ways(ring), strict=True)])
