"""A device's part of the experts, and tokens of which most rows are none of its own.

Each device sorts its own tokens' rows by expert, once; what tokens bring along then says where the
rows of any expert are, and nobody sorts again. Rows go through the experts here in pieces of what
an even load gives, with some room: mostly one, and as many as it takes. The first piece stands
outside the loop over the others, so that what its first products give can be kept for the backward
pass; of the others it is made again.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from hjax.kernels.reference import GroupFill, filled

CAPACITY_FACTOR = 1.25
# Rows of a tile of a TPU's grouped products, which would fill up a piece that they do not divide.
_TILE_ROWS = (512, 256, 128)

GateUpProjection = Callable[..., jax.Array]  # (rows, weights, sizes, fill, before) to gate and up
DownProjection = Callable[..., jax.Array]  # (these, shares, weights, sizes, fill, before) to rows
Arrays = Sequence[jax.Array]


class SortedTokens(NamedTuple):
    """Sets of tokens, one after another, as many of each; of one set after ``sort_by_expert``.

    Attributes:
      rows: [tokens, embed].
      shares: float32 [tokens * per_token], of their experts.
      order: int32 [sets, entries], of a set's shares by expert.
      counts: int32 [sets, experts], how many entries each of all experts has.
    """

    rows: jax.Array
    shares: jax.Array
    order: jax.Array
    counts: jax.Array


def sort_tokens(
    rows: jax.Array, shares: jax.Array, chosen: jax.Array, experts: int
) -> SortedTokens:
    """Tokens as a set.

    Args:
      rows: [tokens, embed].
      shares, chosen: float32 and int [tokens, per_token].
      experts: how many there are on all devices.
    """
    order, counts = sort_by_expert(chosen, experts)
    return SortedTokens(rows, shares.reshape(-1), order[None], counts[None])


def sort_by_expert(chosen: jax.Array, experts: int) -> tuple[jax.Array, jax.Array]:
    """int32: the order of entries of ``chosen`` by expert, and [experts], how many each has."""
    chosen = chosen.reshape(-1)
    counts = jnp.sum(chosen[:, None] == jnp.arange(experts), axis=0, dtype=jnp.int32)
    return jnp.argsort(chosen, stable=True).astype(jnp.int32), counts


@dataclasses.dataclass(frozen=True)
class ExpertDispatch:
    """How rows go through the experts here; hashable.

    Attributes:
      first, second: what experts make of sorted rows, see ``hjax.models.experts``.
      multiple: rows that an expert's had better be filled up to a multiple of, of how many there
        are, the weights of first products and the share of the rows that are the experts'.
      axes: of the mesh, along which experts are split; (): the first ones are here.
      parts: of all experts one in so many is here.
      keep: what the first products give is kept for the backward pass, which makes it again
        otherwise.
      frozen: fields of the weights of which there are no gradients.
      of_second: fields that ``second`` reads; ``first`` the others.
    """

    first: GateUpProjection
    second: DownProjection
    multiple: Callable[[int, jax.Array, float], int]
    axes: tuple[str, ...]
    parts: int
    keep: bool
    frozen: tuple[str, ...]
    of_second: tuple[str, ...]

    def forward(
        self, tokens: SortedTokens, weights: Any, sums: Arrays
    ) -> tuple[Arrays, jax.Array | None]:
        """``sums`` with what the experts here make of the tokens, and what ``backward`` is given.

        Args:
          tokens: [tokens, embed].
          weights: of the experts here, joined.
          sums: [part of the tokens, embed], of equal parts one after another.
        """
        cut = self._cut(tokens, weights)

        def add(turn: Any, sums: Arrays) -> tuple[jax.Array, Arrays]:
            piece = cut.piece(turn)
            both = self.first(tokens.rows[piece.token], weights, piece.sizes, cut.fill)
            shares = piece.shares(tokens.shares)
            made = self.second(both, shares, weights, piece.sizes, cut.fill)
            return both, piece.added(sums, made)

        both, sums = add(0, tuple(sums))
        sums = cut.others(lambda turn, sums: add(turn, sums)[1], sums)
        return sums, both if self.keep else None

    def backward(
        self,
        kept: jax.Array | None,
        tokens: SortedTokens,
        weights: Any,
        before: Any,
        given: jax.Array,
        sums: Arrays,
    ) -> tuple[Arrays, jax.Array, Any]:
        """Gradients: ``sums`` with those of rows, those of shares [tokens * per_token], and those
        of weights, added to ``before`` where that is not None.

        Args:
          kept: of ``forward``, whose ``tokens``, ``weights`` and ``sums`` these are.
          given: [tokens, embed], the gradient of what it gives.
        """
        cut = self._cut(tokens, weights)
        fixed = {name: getattr(weights, name) for name in self.frozen}
        none = dict.fromkeys(self.frozen)
        learning = dataclasses.replace(weights, **none)

        def add(turn: Any, state: Any, kept: jax.Array | None = None) -> Any:
            of_rows, of_shares, of_weights = state
            piece = cut.piece(turn)

            def first(rows: jax.Array, weights: Any) -> jax.Array:
                whole = dataclasses.replace(weights, **fixed)
                return self.first(rows, whole, piece.sizes, cut.fill, of_weights)

            def second(both: jax.Array, shares: jax.Array, weights: Any) -> jax.Array:
                whole = dataclasses.replace(weights, **fixed)
                return self.second(both, shares, whole, piece.sizes, cut.fill, of_weights)

            both, back_first = jax.vjp(first, tokens.rows[piece.token], learning)
            both = both if kept is None else kept
            _, back_second = jax.vjp(second, both, piece.shares(tokens.shares), learning)
            d_both, d_shares, d_second = back_second(given[piece.token])
            d_rows, d_weights = back_first(d_both)
            d_weights = dataclasses.replace(
                d_weights, **{name: getattr(d_second, name) for name in self.of_second}
            )
            of_shares = of_shares.at[piece.entry].add(jnp.where(piece.inside, d_shares, 0))
            return piece.added(of_rows, d_rows), of_shares, d_weights

        before = None if before is None else dataclasses.replace(before, **none)
        return cut.others(add, add(0, (tuple(sums), jnp.zeros_like(tokens.shares), before), kept))

    def _cut(self, tokens: SortedTokens, weights: Any) -> _Chunks:
        here, (sets, entries) = weights.down.shape[0], tokens.order.shape
        first = jax.lax.axis_index(self.axes) * here if self.axes else 0
        ends = jnp.cumsum(tokens.counts, axis=1)
        sizes, ends = (
            jax.lax.dynamic_slice_in_dim(x, first, here, 1) for x in (tokens.counts, ends)
        )
        starts = ends - sizes + entries * jnp.arange(sets)[:, None]
        size = math.ceil(CAPACITY_FACTOR * sets * entries / self.parts)
        tile = next((t for t in _TILE_ROWS if size >= 8 * t), _TILE_ROWS[-1])
        whole = -(-size // tile) * tile
        share = sets * entries / self.parts / whole
        multiple = self.multiple(whole, weights.gate_up, share)
        most = sets * entries + here * (multiple - 1)
        size = min(-(-rows // multiple) * multiple for rows in (whole, most))
        fill = filled(size, here, share * whole / size, multiple)
        return _Chunks(tokens, sizes, starts, size, fill)


class _Chunks(NamedTuple):
    """The rows of the experts here in pieces.

    Attributes:
      tokens: whose rows.
      sizes, starts: int32 [sets, experts], of each expert here its rows, and where they begin among
        the entries of all sets.
      size: rows of a piece.
      fill: what is known of them: how many an even load fills.
    """

    tokens: SortedTokens
    sizes: jax.Array
    starts: jax.Array
    size: int
    fill: GroupFill

    def piece(self, turn: Any) -> _Chunk:
        """By number."""
        sets, entries = self.tokens.order.shape
        # An expert's rows are those of every set, and after them what fills it up.
        filling = self.totals() - jnp.sum(self.sizes, axis=0)
        sizes, starts = (
            jnp.concatenate([x, y[None]]).T.reshape(-1)
            for x, y in ((self.sizes, filling), (self.starts, jnp.zeros_like(filling)))
        )
        ends = jnp.cumsum(sizes)
        shifts = starts - (ends - sizes)
        real = jnp.tile(jnp.arange(sets + 1) < sets, filling.shape[0]).astype(jnp.int32)
        begin = turn * self.size
        at = begin + jnp.arange(self.size)
        passed = at[:, None] >= ends[:-1]
        place = at + shifts[0] + jnp.sum(jnp.where(passed, jnp.diff(shifts), 0), axis=1)
        inside = real[0] + jnp.sum(jnp.where(passed, jnp.diff(real), 0), axis=1) > 0
        place = jnp.clip(place, 0, sets * entries - 1)
        entry = self.tokens.order.reshape(-1)[place] + place // entries * entries
        per_token = sets * entries // self.tokens.rows.shape[0]
        of_experts = jnp.cumsum(self.totals())
        held = jnp.diff(jnp.clip(of_experts - begin, 0, self.size), prepend=0).astype(jnp.int32)
        return _Chunk(entry, entry // per_token, inside, held)

    def totals(self) -> jax.Array:
        """int32 [experts], rows of each, filled up."""
        multiple = self.fill.multiple
        return -(-jnp.sum(self.sizes, axis=0) // multiple) * multiple

    def others(self, add: Callable[[jax.Array, Any], Any], state: Any) -> Any:
        """The state after all pieces but the first."""
        most = self.tokens.order.size + self.sizes.shape[1] * (self.fill.multiple - 1)
        if self.size >= most:
            return state
        every = jnp.sum(self.totals())

        def run(state: Any) -> Any:
            with jax.named_scope("trips:0"):  # tells ``hjax.xla`` how many an even load takes
                return jax.lax.while_loop(
                    lambda s: s[0] * self.size < every,
                    lambda s: (s[0] + 1, add(*s)),
                    (jnp.int32(1), state),
                )[1]

        # A scheduler takes a loop for long, and would hide what is sent behind this one.
        return jax.lax.cond(every > self.size, run, lambda state: state, state)


class _Chunk(NamedTuple):
    """Rows, sorted by expert.

    Attributes:
      entry, token: int32 [rows], of ``SortedTokens.shares`` and ``SortedTokens.rows``; anything
        where an expert's are filled up, and after all of them.
      inside: bool [rows], not so.
      sizes: int32 [experts], rows of each, filled up.
    """

    entry: jax.Array
    token: jax.Array
    inside: jax.Array
    sizes: jax.Array

    def shares(self, shares: jax.Array) -> jax.Array:
        """Of the rows; 0 where there is none."""
        return jnp.where(self.inside, shares[self.entry], 0)

    def added(self, sums: Arrays, made: jax.Array) -> Arrays:
        """Sums of equal parts of the tokens with what is made of these rows; a token's few are
        summed in their dtype, as transformers sums them."""
        part = sums[0].shape[0]
        found = []
        for number, x in enumerate(sums):
            at = self.token - number * part
            at = jnp.where(self.inside & (at >= 0), at, part)
            found.append(x.at[at].add(made, mode="drop"))
        return tuple(found)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def dispatch_to_experts(pieces: ExpertDispatch, tokens: SortedTokens, weights: Any) -> jax.Array:
    """[tokens, embed], the sum over those of each token's experts that are here; inside
    shard_map."""
    return _forward(pieces, tokens, weights)[0]


def _forward(pieces: ExpertDispatch, tokens: SortedTokens, weights: Any) -> tuple[jax.Array, Any]:
    (out,), kept = pieces.forward(tokens, weights, [jnp.zeros_like(tokens.rows)])
    return out, (kept, tokens, weights)


def _backward(pieces: ExpertDispatch, left: Any, d_out: jax.Array) -> tuple[Any, ...]:
    kept, tokens, weights = left
    sums = [jnp.zeros_like(tokens.rows)]
    (d_rows,), d_shares, d_weights = pieces.backward(kept, tokens, weights, None, d_out, sums)
    none: Any = None
    return SortedTokens(d_rows, d_shares, none, none), d_weights


dispatch_to_experts.defvjp(_forward, _backward)
