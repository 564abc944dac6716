"""Expert dispatch under expert parallelism: route tokens of all devices to a device's experts.

Each device sorts its own tokens by expert, once; order and counts go with the tokens, so receivers
need not sort. Rows pass through the local experts in chunks of the size that an even load gives,
times a capacity factor: usually one chunk, more if the load is uneven, so no token is dropped. The
first chunk is outside the loop over the others, so that its gate and up projections can be kept for
the backward pass; those of the others are recomputed.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from hjax.kernels.reference import GroupFill, padded_fill

CAPACITY_FACTOR = 1.25
# Row tiles of a TPU's grouped products; a chunk that they do not divide would be padded.
_TILE_ROWS = (512, 256, 128)

# (rows, weights, sizes, fill, weight_sums) -> gate and up
GateUpProjection = Callable[..., jax.Array]
# (gate and up, routing_weights, weights, sizes, fill, weight_sums) -> rows
DownProjection = Callable[..., jax.Array]
Arrays = Sequence[jax.Array]


class SortedTokens(NamedTuple):
    """Equal sets of tokens, one after another, each with its order by expert.

    An entry is a (token, expert) pair; a set has tokens * per_token entries.

    Attributes:
      rows: [tokens, embed].
      routing_weights: float32 [tokens * per_token], of the tokens' experts.
      order: int32 [sets, entries], a set's entries sorted by expert.
      counts: int32 [sets, experts], entries of each expert.
    """

    rows: jax.Array
    routing_weights: jax.Array
    order: jax.Array
    counts: jax.Array


def sort_tokens(
    rows: jax.Array, routing_weights: jax.Array, chosen: jax.Array, experts: int
) -> SortedTokens:
    """One set of tokens, sorted by expert.

    Args:
      rows: [tokens, embed].
      routing_weights, chosen: float32 and int [tokens, per_token].
      experts: number of experts on all devices.
    """
    order, counts = sort_by_expert(chosen, experts)
    return SortedTokens(rows, routing_weights.reshape(-1), order[None], counts[None])


def sort_by_expert(chosen: jax.Array, experts: int) -> tuple[jax.Array, jax.Array]:
    """int32: the entries of ``chosen`` sorted by expert, and [experts], how many each has."""
    chosen = chosen.reshape(-1)
    counts = jnp.sum(chosen[:, None] == jnp.arange(experts), axis=0, dtype=jnp.int32)
    return jnp.argsort(chosen, stable=True).astype(jnp.int32), counts


@dataclasses.dataclass(frozen=True)
class ExpertDispatch:
    """How rows are computed by the experts on this device; hashable.

    Attributes:
      gate_up, down: the experts' projections of sorted rows, see ``hjax.models.experts``.
      row_multiple: (rows, gate-up weights, share of real rows) -> multiple to which each expert's
        rows are padded.
      axes: mesh axes that split the experts; (): the local experts are the first ones.
      parts: number of parts that the experts are split into.
      keep_gates: keep the gate and up projections for the backward pass instead of recomputing.
      frozen: fields of the weights without gradients.
      down_fields: fields of the weights that ``down`` reads; ``gate_up`` reads the others.
    """

    gate_up: GateUpProjection
    down: DownProjection
    row_multiple: Callable[[int, jax.Array, float], int]
    axes: tuple[str, ...]
    parts: int
    keep_gates: bool
    frozen: tuple[str, ...]
    down_fields: tuple[str, ...]

    def forward(
        self, tokens: SortedTokens, weights: Any, sums: Arrays
    ) -> tuple[Arrays, jax.Array | None]:
        """``sums`` plus the local experts' outputs, and the activations kept for ``backward``.

        Args:
          tokens: sorted tokens.
          weights: of the local experts, joined.
          sums: [part of the tokens, embed], of equal parts one after another.
        """
        chunks = self._chunks(tokens, weights)

        def add(number: Any, sums: Arrays) -> tuple[jax.Array, Arrays]:
            chunk = chunks.chunk(number)
            gates = self.gate_up(tokens.rows[chunk.token], weights, chunk.sizes, chunks.fill)
            routing_weights = chunk.routing_weights(tokens.routing_weights)
            out = self.down(gates, routing_weights, weights, chunk.sizes, chunks.fill)
            return gates, chunk.added(sums, out)

        gates, sums = add(0, tuple(sums))
        sums = chunks.remaining(lambda number, sums: add(number, sums)[1], sums)
        return sums, gates if self.keep_gates else None

    def backward(
        self,
        kept: jax.Array | None,
        tokens: SortedTokens,
        weights: Any,
        weight_sums: Any,
        d_out: jax.Array,
        sums: Arrays,
    ) -> tuple[Arrays, jax.Array, Any]:
        """Gradients: ``sums`` plus those of rows, those of routing weights [tokens * per_token],
        and those of weights, added to ``weight_sums`` if that is not None.

        Args:
          kept: of ``forward``, which had the same ``tokens``, ``weights`` and shape of ``sums``.
          d_out: [tokens, embed], the gradient of its outputs.
        """
        chunks = self._chunks(tokens, weights)
        fixed = {name: getattr(weights, name) for name in self.frozen}
        none = dict.fromkeys(self.frozen)
        learning = dataclasses.replace(weights, **none)

        def add(number: Any, state: Any, kept: jax.Array | None = None) -> Any:
            of_rows, of_routing, of_weights = state
            chunk = chunks.chunk(number)

            def gate_up(rows: jax.Array, weights: Any) -> jax.Array:
                whole = dataclasses.replace(weights, **fixed)
                return self.gate_up(rows, whole, chunk.sizes, chunks.fill, of_weights)

            def down(gates: jax.Array, routing_weights: jax.Array, weights: Any) -> jax.Array:
                whole = dataclasses.replace(weights, **fixed)
                return self.down(
                    gates, routing_weights, whole, chunk.sizes, chunks.fill, of_weights
                )

            gates, gate_up_vjp = jax.vjp(gate_up, tokens.rows[chunk.token], learning)
            gates = gates if kept is None else kept
            routing_weights = chunk.routing_weights(tokens.routing_weights)
            _, down_vjp = jax.vjp(down, gates, routing_weights, learning)
            d_gates, d_routing, d_down = down_vjp(d_out[chunk.token])
            d_rows, d_weights = gate_up_vjp(d_gates)
            d_weights = dataclasses.replace(
                d_weights, **{name: getattr(d_down, name) for name in self.down_fields}
            )
            of_routing = of_routing.at[chunk.entry].add(jnp.where(chunk.inside, d_routing, 0))
            return chunk.added(of_rows, d_rows), of_routing, d_weights

        weight_sums = None if weight_sums is None else dataclasses.replace(weight_sums, **none)
        state = tuple(sums), jnp.zeros_like(tokens.routing_weights), weight_sums
        return chunks.remaining(add, add(0, state, kept))

    def _chunks(self, tokens: SortedTokens, weights: Any) -> _ExpertChunks:
        local, (sets, entries) = weights.down.shape[0], tokens.order.shape
        first = jax.lax.axis_index(self.axes) * local if self.axes else 0
        ends = jnp.cumsum(tokens.counts, axis=1)
        sizes, ends = (
            jax.lax.dynamic_slice_in_dim(x, first, local, 1) for x in (tokens.counts, ends)
        )
        starts = ends - sizes + entries * jnp.arange(sets)[:, None]
        size = math.ceil(CAPACITY_FACTOR * sets * entries / self.parts)
        tile = next((t for t in _TILE_ROWS if size >= 8 * t), _TILE_ROWS[-1])
        whole = -(-size // tile) * tile
        share = sets * entries / self.parts / whole
        row_multiple = self.row_multiple(whole, weights.gate_up, share)
        most = sets * entries + local * (row_multiple - 1)
        size = min(-(-rows // row_multiple) * row_multiple for rows in (whole, most))
        fill = padded_fill(size, local, share * whole / size, row_multiple)
        return _ExpertChunks(tokens, sizes, starts, size, fill)


class _ExpertChunks(NamedTuple):
    """The rows of the local experts, in chunks of equal size.

    Attributes:
      tokens: whose rows.
      sizes, starts: int32 [sets, experts], rows of each local expert, and where they begin among
        the entries of all sets.
      size: rows per chunk.
      fill: how many rows an even load fills.
    """

    tokens: SortedTokens
    sizes: jax.Array
    starts: jax.Array
    size: int
    fill: GroupFill

    def chunk(self, number: Any) -> _Chunk:
        """The chunk of a number."""
        sets, entries = self.tokens.order.shape
        # An expert's rows are those of every set, then padding.
        filling = self.totals() - jnp.sum(self.sizes, axis=0)
        sizes, starts = (
            jnp.concatenate([x, y[None]]).T.reshape(-1)
            for x, y in ((self.sizes, filling), (self.starts, jnp.zeros_like(filling)))
        )
        ends = jnp.cumsum(sizes)
        shifts = starts - (ends - sizes)
        real = jnp.tile(jnp.arange(sets + 1) < sets, filling.shape[0]).astype(jnp.int32)
        begin = number * self.size
        at = begin + jnp.arange(self.size)
        passed = at[:, None] >= ends[:-1]
        place = at + shifts[0] + jnp.sum(jnp.where(passed, jnp.diff(shifts), 0), axis=1)
        inside = real[0] + jnp.sum(jnp.where(passed, jnp.diff(real), 0), axis=1) > 0
        place = jnp.clip(place, 0, sets * entries - 1)
        entry = self.tokens.order.reshape(-1)[place] + place // entries * entries
        per_token = sets * entries // self.tokens.rows.shape[0]
        in_chunk = jnp.diff(jnp.clip(jnp.cumsum(self.totals()) - begin, 0, self.size), prepend=0)
        return _Chunk(entry, entry // per_token, inside, in_chunk.astype(jnp.int32))

    def totals(self) -> jax.Array:
        """int32 [experts], rows of each, padding included."""
        row_multiple = self.fill.multiple
        return -(-jnp.sum(self.sizes, axis=0) // row_multiple) * row_multiple

    def remaining(self, add: Callable[[jax.Array, Any], Any], state: Any) -> Any:
        """The state after all chunks but the first."""
        most = self.tokens.order.size + self.sizes.shape[1] * (self.fill.multiple - 1)
        if self.size >= most:
            return state
        every = jnp.sum(self.totals())

        def run(state: Any) -> Any:
            with jax.named_scope("trips:0"):  # tells ``hjax.xla`` the iterations of an even load
                return jax.lax.while_loop(
                    lambda s: s[0] * self.size < every,
                    lambda s: (s[0] + 1, add(*s)),
                    (jnp.int32(1), state),
                )[1]

        # XLA's scheduler takes any loop for long, and would overlap transfers with this one.
        return jax.lax.cond(every > self.size, run, lambda state: state, state)


class _Chunk(NamedTuple):
    """A chunk of rows, sorted by expert.

    Attributes:
      entry, token: int32 [rows], indices into ``SortedTokens.routing_weights`` and
        ``SortedTokens.rows``; arbitrary at padding.
      inside: bool [rows], False at padding.
      sizes: int32 [experts], rows of each, padding included.
    """

    entry: jax.Array
    token: jax.Array
    inside: jax.Array
    sizes: jax.Array

    def routing_weights(self, routing_weights: jax.Array) -> jax.Array:
        """Routing weights of the rows; 0 at padding."""
        return jnp.where(self.inside, routing_weights[self.entry], 0)

    def added(self, sums: Arrays, out: jax.Array) -> Arrays:
        """Outputs of these rows added to the sums of equal parts of the tokens, in their dtype, as
        transformers does."""
        part = sums[0].shape[0]
        found = []
        for number, x in enumerate(sums):
            at = self.token - number * part
            at = jnp.where(self.inside & (at >= 0), at, part)
            found.append(x.at[at].add(out, mode="drop"))
        return tuple(found)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def dispatch_to_experts(dispatch: ExpertDispatch, tokens: SortedTokens, weights: Any) -> jax.Array:
    """[tokens, embed], each token's sum over its experts on this device; inside shard_map."""
    return _forward(dispatch, tokens, weights)[0]


def _forward(dispatch: ExpertDispatch, tokens: SortedTokens, weights: Any) -> tuple[jax.Array, Any]:
    (out,), kept = dispatch.forward(tokens, weights, [jnp.zeros_like(tokens.rows)])
    return out, (kept, tokens, weights)


def _backward(dispatch: ExpertDispatch, left: Any, d_out: jax.Array) -> tuple[Any, ...]:
    kept, tokens, weights = left
    sums = [jnp.zeros_like(tokens.rows)]
    (d_rows,), d_routing, d_weights = dispatch.backward(kept, tokens, weights, None, d_out, sums)
    none: Any = None
    return SortedTokens(d_rows, d_routing, none, none), d_weights


dispatch_to_experts.defvjp(_forward, _backward)
