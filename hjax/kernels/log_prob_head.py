"""Chunked log-prob head (fused linear cross-entropy): token log-probs without all logits at once.

The vocabulary is processed in chunks with an online softmax (Milakov and Gimelshein 2018, arXiv
1805.02867); the backward pass recomputes each chunk's logits. For distillation a position may have
several tokens to score (a teacher's most probable, under the student), and the top k can be found
in the same pass. Over a mesh each device has its rows, its part of the length and of the
vocabulary. If the table's width is split (FSDP), each chunk is all-gathered once and its gradient
reduce-scattered once, overlapped with the next chunk.
"""

import dataclasses
import functools
import math
from typing import Any

import chex
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from hjax.kernels.kernel_sharding import KernelSharding


@dataclasses.dataclass(frozen=True)
class LogProbHead:
    """Options of the head; static when traced.

    Attributes:
      temperature: logits are divided by it.
      softcap: logits become ``softcap * tanh(logits / softcap)`` before; 0: no cap.
      chunk_bytes: of float32 logits in a chunk on a device.
      sharding: of the arrays; a length that its axes do not divide is not split.
    """

    temperature: float = 1.0
    softcap: float = 0.0
    chunk_bytes: int = 256 * 2**20
    sharding: KernelSharding = KernelSharding()


def check_head(hidden: jax.Array, table: jax.Array, tokens: jax.Array) -> None:
    """hidden [rows, length, embed], table [vocab, embed], int tokens [rows, length] or, with k for
    each position, [rows, length, k]."""
    chex.assert_rank((hidden, table, tokens), (3, 2, {2, 3}))
    chex.assert_equal(hidden.shape[:2], tokens.shape[:2])
    chex.assert_equal(hidden.shape[2], table.shape[1])
    chex.assert_type(tokens, int)


def token_scores(
    hidden: jax.Array, table: jax.Array, tokens: jax.Array, head: LogProbHead
) -> tuple[jax.Array, jax.Array]:
    """Log-probs of tokens, and the entropy of the distribution each was drawn from.

    Differentiable once, in reverse mode, with respect to the hidden states and the table.

    Args:
      hidden: [rows, length, embed], of any float dtype; products are made in it.
      table: [vocab, embed].
      tokens: int [rows, length] or [rows, length, k], below the vocabulary's size.
      head: options.

    Returns:
      float32 natural logs, in the shape of the tokens, and float32 [rows, length] nats.

    Raises:
      AssertionError: other shapes or dtypes, when traced.
    """
    check_head(hidden, table, tokens)
    return _token_scores(head, hidden, table, tokens)


def top_scores(
    hidden: jax.Array, table: jax.Array, tokens: jax.Array, count: int, head: LogProbHead
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """As ``token_scores``, and the most probable tokens, in one pass; not differentiable.

    Args:
      hidden, table, tokens, head: as of ``token_scores``.
      count: of the most probable tokens; at most the vocabulary's size.

    Returns:
      what ``token_scores`` returns; float32 [rows, length, count] log-probs, descending, and their
      tokens, int32 [rows, length, count]; on ties the lower token first.

    Raises:
      AssertionError: other shapes or dtypes, or a count out of range, when traced.
    """
    check_head(hidden, table, tokens)
    if not 0 < count <= table.shape[0]:
        raise AssertionError(f"{count} most probable of {table.shape[0]} tokens")
    kind = "r" if tokens.ndim == 2 else "w"
    scores = functools.partial(_scores, count)
    run = _shard_mapped(head, scores, hidden, f"wt{kind}", f"{kind}rrrww")
    logprobs, entropy, _, _, *top = run(*map(jax.lax.stop_gradient, (hidden, table)), tokens)
    return logprobs, entropy, *top


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _token_scores(
    head: LogProbHead, hidden: jax.Array, table: jax.Array, tokens: jax.Array
) -> tuple[jax.Array, jax.Array]:
    return _forward(head, hidden, table, tokens)[0]


def _forward(head: LogProbHead, hidden: jax.Array, table: jax.Array, tokens: jax.Array) -> Any:
    kind = "r" if tokens.ndim == 2 else "w"
    run = _shard_mapped(head, functools.partial(_scores, 0), hidden, f"wt{kind}", f"{kind}rrr")
    logprobs, entropy, total, mean = run(hidden, table, tokens)
    return (logprobs, entropy), (hidden, table, tokens, total, mean)


def _backward(head: LogProbHead, kept: Any, d_results: Any) -> Any:
    kind = "r" if kept[2].ndim == 2 else "w"
    run = _shard_mapped(head, _gradients, kept[0], f"wt{kind}rr{kind}r", "wt")
    d_hidden, d_table = run(*kept, *d_results)
    return d_hidden, d_table, None


_token_scores.defvjp(_forward, _backward)


def _shard_mapped(
    head: LogProbHead, function: Any, hidden: jax.Array, arguments: str, results: str
) -> Any:
    """``function(head, split, *arrays)`` in ``shard_map``.

    Args:
      arguments, results: kinds of arrays: ``r`` [rows, length], ``w`` with a third dimension, which
        is not split, ``t`` the table.
    """
    split = _for_length(head.sharding, hidden.shape[1])
    run = functools.partial(function, head, split)
    if split.mesh is None:
        return run
    rows, length = split.rows or None, split.length or None
    specs = {
        "r": PartitionSpec(rows, length),
        "w": PartitionSpec(rows, length, None),
        "t": PartitionSpec(split.vocab or None, split.embed or None),
    }
    inputs, outputs = (tuple(specs[kind] for kind in kinds) for kinds in (arguments, results))
    return jax.shard_map(run, mesh=split.mesh, in_specs=inputs, out_specs=outputs, check_vma=False)


def _for_length(sharding: KernelSharding, length: int) -> KernelSharding:
    """The sharding for sequences of this length."""
    if sharding.mesh is None or sharding.mesh.size == 1:
        return KernelSharding()
    whole = length % sharding.shard_count(sharding.length) != 0
    sharding = dataclasses.replace(sharding, length=() if whole else sharding.length)
    if not set(sharding.embed) <= set(sharding.tokens):
        raise AssertionError(f"{sharding.embed} splits the table's width, but no rows")
    return sharding


# On a device


def _first(split: KernelSharding, columns: int) -> Any:
    """The first token of this device's part of the vocabulary."""
    return jax.lax.axis_index(split.vocab) * columns if split.vocab else 0


class _Chunks:
    """The vocabulary in chunks of equal size; the last starts earlier if it would run over.

    If the table's width is split, each chunk is all-gathered while the one before is computed.
    """

    def __init__(
        self, head: LogProbHead, split: KernelSharding, table: jax.Array, hidden: jax.Array
    ):
        self.columns = table.shape[0]
        most = max(head.chunk_bytes // (4 * max(hidden.shape[0], 1)), 1)
        self.count = math.ceil(self.columns / min(most, self.columns))
        self.width = math.ceil(self.columns / self.count)
        self.head, self.split, self.table, self.hidden = head, split, table, hidden

    def start(self, number: Any) -> jax.Array:
        return jnp.minimum(number * self.width, self.columns - self.width)

    def part(self, number: Any) -> jax.Array:
        """A chunk [width, embed] of the table, in the dtype of the products."""
        part = jax.lax.dynamic_slice_in_dim(self.table, self.start(number), self.width)
        part = part.astype(self.hidden.dtype)
        axes = self.split.embed
        return jax.lax.all_gather(part, axes, axis=1, tiled=True) if axes else part

    def scan(self, step: Any, begin: Any) -> Any:
        """``step(state, number, part)`` over all chunks; the next one is gathered meanwhile."""

        def run(carry: Any, number: Any) -> Any:
            state, part = carry
            next_part = self.part(number + 1)
            return (step(state, number, part), next_part), None

        carry = begin, self.part(0)
        if self.count > 1:
            carry = run(carry, 0)[0]  # its state may have fewer arrays than later ones
        if self.count > 2:
            carry = jax.lax.scan(run, carry, jnp.arange(1, self.count - 1))[0]
        return step(carry[0], self.count - 1, carry[1])

    def logits(self, part: jax.Array, number: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Logits float32 [tokens, width], which columns are new, and the logits' slope."""
        logits = jnp.einsum("td,vd->tv", self.hidden, part, preferred_element_type=jnp.float32)
        slope = jnp.ones((), jnp.float32)
        if cap := self.head.softcap:
            squashed = jnp.tanh(logits / cap)
            logits, slope = cap * squashed, 1.0 - squashed * squashed
        new = self.start(number) + jnp.arange(self.width) >= number * self.width
        return logits / self.head.temperature, new, slope / self.head.temperature

    def places(self, ids: jax.Array, number: Any) -> tuple[jax.Array, jax.Array]:
        """Columns in this chunk of ids [tokens, k], and whether they are in it and new."""
        at = ids - self.start(number)
        there = (at >= 0) & (at < self.width) & (ids >= number * self.width)
        return jnp.clip(at, 0, self.width - 1), there


def _flat(tokens: jax.Array) -> jax.Array:
    """[rows, length, ...] as [rows * length, ...]."""
    return tokens.reshape(-1, *tokens.shape[2:])


def _scores(
    count: int,
    head: LogProbHead,
    split: KernelSharding,
    hidden: jax.Array,
    table: jax.Array,
    tokens: jax.Array,
) -> tuple[jax.Array, ...]:
    """Log-probs, in the shape of the tokens; entropy, log-sum-exp and mean of the logits, [rows,
    length] each; with ``count`` the log-probs and ids of the most probable tokens."""
    shape = tokens.shape[:2]
    states, ids = hidden.reshape(-1, hidden.shape[-1]), _flat(tokens)
    chunks, first = _Chunks(head, split, table, states), _first(split, table.shape[0])

    def step(state: Any, number: jax.Array, part: jax.Array) -> Any:
        top, total, weighted, picked, top_k = state
        logits, new, _ = chunks.logits(part, number)
        logits = jnp.where(new, logits, -jnp.inf)
        higher = jnp.maximum(top, logits.max(-1))
        below = logits - higher[:, None]
        old, now = jnp.exp(top - higher), jnp.exp(below)
        # Of differences to the largest logit: those of large logits would cancel in the entropy.
        moved = weighted + jnp.where(total > 0, top - higher, 0.0) * total
        weighted = moved * old + jnp.where(new, now * below, 0.0).sum(-1)
        total = total * old + now.sum(-1)
        columns = first + chunks.start(number) + jnp.arange(chunks.width)
        if ids.ndim == 1:
            own = columns == ids[:, None]
            picked = picked + jnp.where(own & new, logits, 0.0).sum(-1)
        else:
            at, there = chunks.places(ids - first, number)
            picked = picked + jnp.where(there, jnp.take_along_axis(logits, at, axis=-1), 0.0)
        if count:
            top_k = _merge_top_k(top_k, logits, jnp.broadcast_to(columns, logits.shape))
        return higher, total, weighted, picked, top_k

    begin = _before_any_logit(ids, count)
    top, total, weighted, picked, top_k = chunks.scan(step, begin)
    if split.vocab:
        highest = jax.lax.pmax(top, split.vocab)
        factor = jnp.exp(top - highest)
        moved = weighted + (top - highest) * total
        parts = total * factor, moved * factor, picked
        total, weighted, picked = (jax.lax.psum(x, split.vocab) for x in parts)
        top = highest
        if count:
            every = (jax.lax.all_gather(x, split.vocab, axis=1, tiled=True) for x in top_k)
            top_k = _merge_top_k(begin[-1], *every)
    log_total, mean = jnp.log(total), weighted / total

    def log_probs(logits: jax.Array) -> jax.Array:
        """Differences to the largest logit come first: large logits would lose the rest."""
        return logits - top[:, None] - log_total[:, None]

    picked = log_probs(picked[:, None])[:, 0] if ids.ndim == 1 else log_probs(picked)
    results = [picked, log_total - mean, top + log_total, top + mean]
    if count:
        results += [log_probs(top_k[0]), top_k[1]]
    return tuple(x.reshape(*shape, *x.shape[1:]) for x in results)


def _before_any_logit(ids: jax.Array, count: int) -> tuple[Any, ...]:
    """The largest logit, sums, log-probs of ``ids`` and ``count`` most probable tokens of none."""
    zero = jnp.zeros(ids.shape[:1], jnp.float32)
    lowest = jnp.full(ids.shape[:1], -jnp.inf, jnp.float32)
    nothing: Any = None
    if count:
        shape_most = ids.shape[0], count
        nothing = jnp.full(shape_most, -jnp.inf), jnp.zeros(shape_most, jnp.int32)
    return lowest, zero, zero, jnp.zeros(ids.shape, jnp.float32), nothing


def _merge_top_k(before: Any, logits: jax.Array, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Merge the largest logits so far, [tokens, k] and ids, with [tokens, n] of higher ids."""
    values, numbers = (
        jnp.concatenate([a, b.astype(a.dtype)], axis=-1)
        for a, b in zip(before, (logits, ids), strict=True)
    )
    values, at = jax.lax.top_k(values, before[0].shape[-1])
    return values, jnp.take_along_axis(numbers, at, axis=-1)


def _gradients(
    head: LogProbHead,
    split: KernelSharding,
    hidden: jax.Array,
    table: jax.Array,
    tokens: jax.Array,
    total: jax.Array,
    mean: jax.Array,
    d_logprobs: jax.Array,
    d_entropy: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Gradients of hidden states and table: with p the probabilities and l the logits,
    dl = d_logprob (1[token] - p) - d_entropy p (l - mean), summed over a position's tokens."""
    states = hidden.reshape(-1, hidden.shape[-1])
    ids, total, mean, d_logprobs, d_entropy = (
        _flat(x) for x in (tokens, total, mean, d_logprobs, d_entropy)
    )
    numbers = jnp.arange(ids.shape[0])[:, None]
    chunks, first = _Chunks(head, split, table, states), _first(split, table.shape[0])
    wide = jnp.float32

    add = functools.partial(_add_chunk, chunks, split)

    def step(state: Any, number: jax.Array, part: jax.Array) -> Any:
        d_states, d_table, pending = state
        logits, new, slope = chunks.logits(part, number)
        p = jnp.where(new, jnp.exp(logits - total[:, None]), 0.0)
        start = chunks.start(number)
        if ids.ndim == 1:
            own = (first + start + jnp.arange(chunks.width) == ids[:, None]) & new
            d_logits = d_logprobs[:, None] * (own - p)
        else:
            at, there = chunks.places(ids - first, number)
            d_logits = -d_logprobs.sum(-1, keepdims=True) * p
            d_logits = d_logits.at[numbers, at].add(jnp.where(there, d_logprobs, 0.0))
        d_logits -= d_entropy[:, None] * p * (logits - mean[:, None])
        d_logits = (d_logits * slope).astype(hidden.dtype)
        d_states += jnp.einsum("tv,vd->td", d_logits, part, preferred_element_type=wide)
        d_part = jnp.einsum("tv,td->vd", d_logits, states, preferred_element_type=wide)
        if pending is not None:
            # The previous chunk's reduction overlaps with this chunk's products.
            d_table = add(d_table, pending, number - 1)
        return d_states, d_table, d_part

    begin = jnp.zeros(states.shape, wide), jnp.zeros(table.shape, wide), None
    d_states, d_table, last = chunks.scan(step, begin)
    d_table = add(d_table, last, chunks.count - 1)
    if split.vocab:
        d_states = jax.lax.psum(d_states, split.vocab)
    if rest := tuple(axis for axis in split.tokens if axis not in split.embed):
        d_table = jax.lax.psum(d_table, rest)
    return d_states.reshape(hidden.shape).astype(hidden.dtype), d_table.astype(table.dtype)


def _add_chunk(
    chunks: _Chunks, split: KernelSharding, d_table: jax.Array, d_part: jax.Array, number: Any
) -> jax.Array:
    """Add a chunk's gradient, of full width, summed over the devices that share the table."""
    if split.embed:
        # The split dimension is first: over a minor one the TPU compiler has no reduce-scatter.
        d_part = d_part.reshape(chunks.width, split.shard_count(split.embed), -1).swapaxes(0, 1)
        d_part = jax.lax.psum_scatter(d_part, split.embed, scatter_dimension=0)
    # Columns that overlap with the chunk before have a gradient of 0.
    start = chunks.start(number)
    before = jax.lax.dynamic_slice_in_dim(d_table, start, chunks.width)
    return jax.lax.dynamic_update_slice_in_dim(d_table, before + d_part, start, 0)
