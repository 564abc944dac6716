"""Decode attention kernel for NVIDIA GPUs (flash-decoding): reads only a row's visible columns.

Written in Pallas for Triton, after flash-decoding (Dao et al. 2023). A row's visible columns are
split into equal parts. Each program takes one part of one key-value head and returns a maximum, a
sum and an output, so that few rows keep many processors busy. Shared prompts and sinks are added
afterwards (``hjax.kernels.decode``). Per device: ``hjax.models.decoding`` wraps it in
``shard_map``.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from hjax.kernels import int8_cache
from hjax.kernels.attention import MASKED, ScoreOptions, cost_label
from hjax.kernels.decode import gpu_kernel_takes
from hjax.kernels.int8_cache import CacheArray, QuantizedCache

BLOCK_BYTES = 2**14  # of keys, or of values, in a block
MIN_PART = 128  # columns of a part, if a row sees that many
TARGET_PROGRAMS = 512  # keep a GPU busy: several for each of its 108 to 148 processors
MIN_QUERIES = 16  # the fewest rows of a product


def attend_own(
    q: jax.Array,
    own_k: CacheArray,
    own_v: CacheArray,
    first: jax.Array,
    last: jax.Array,
    scoring: ScoreOptions = ScoreOptions(),
    expected: float | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Partial attention of each row's new tokens over its own columns, which are already written.

    Args:
      q: [groups, kv_heads, samples, per_kv, new, head_dim], scaled. A row's new tokens have
        consecutive columns.
      own_k, own_v: [groups, kv_heads, samples, length, head_dim]; may be ``QuantizedCache``.
      first: int32 [groups, samples], the row's own first column.
      last: int32 like ``first``, the column of its first new token, which is always seen. Columns
        out of range, of unused rows, are clipped.
      scoring: of the layer.
      expected: average filled columns of a row, for the cost estimate; None: half of the length.
      interpret: run on any device, for tests.

    Returns:
      per query the largest score and the sum of exponentials relative to it, float32
      [groups, kv_heads, samples, per_kv, new], and the weighted sum of values, with head_dim.

    Raises:
      AssertionError: a head size that ``decode.gpu_kernel_takes`` refuses, when traced.
    """
    groups, kv_heads, samples, per_kv, new, dim = q.shape
    length, int8 = int8_cache.shape(own_k)[3], isinstance(own_k, QuantizedCache)
    if not interpret and not gpu_kernel_takes(dim):
        raise AssertionError(f"heads of {dim} are not a power of two, 16 to 256")
    queries, element = per_kv * new, jax.tree.leaves(own_k)[0].dtype.itemsize
    block = max(MIN_QUERIES, min(MIN_PART // 2, BLOCK_BYTES // (dim * element)))
    rows = groups * samples * kv_heads
    parts = max(1, min(math.ceil(TARGET_PROGRAMS / rows), math.ceil(length / MIN_PART)))
    last = jnp.clip(last, 0, length - 1)
    spans = jnp.stack([jnp.clip(first, 0, last), last], axis=-1).astype(jnp.int32)
    q = q.reshape(groups, kv_heads, samples, queries, dim)
    of_row, of_part = (functools.partial(_spec, samples, part) for part in (False, True))
    own: Any = of_row(length, dim)
    own = QuantizedCache(own, of_row(1, length)) if int8 else own
    span = pl.BlockSpec((None, None, 2), lambda i, h, j: (i // samples, i % samples, 0))
    shape = groups, kv_heads, samples, parts, queries
    with jax.named_scope(_cost(q, own_k, parts, expected)):
        top, total, out = pl.pallas_call(
            functools.partial(_kernel, scoring, new, queries, block),
            grid=(groups * samples, kv_heads, parts),
            in_specs=[span, of_row(queries, dim), own, own],
            out_specs=[of_part(queries), of_part(queries), of_part(queries, dim)],
            out_shape=[jax.ShapeDtypeStruct(x, jnp.float32) for x in (shape, shape, (*shape, dim))],
            compiler_params=triton.CompilerParams(num_warps=4, num_stages=2),
            interpret=interpret,
            name="decode_filled",
        )(spans, q, own_k, own_v)
    found = _merge_parts(top, total, out)
    top, total, out = (x.reshape(*x.shape[:3], per_kv, new, *x.shape[4:]) for x in found)
    return top, total, out


def _cost(q: jax.Array, own_k: CacheArray, parts: int, expected: float | None) -> str:
    """The label of the kernel's cost, with ``expected`` filled columns in a row."""
    rows, (queries, dim) = math.prod(q.shape[:3]), q.shape[3:]
    length, element = int8_cache.shape(own_k)[3], jax.tree.leaves(own_k)[0].dtype.itemsize
    seen = length / 2 if expected is None else min(expected, length)
    token = dim * element + (int8_cache.SCALE_BYTES if isinstance(own_k, QuantizedCache) else 0)
    small = q.size * q.dtype.itemsize + 4 * rows * parts * queries * (dim + 2)
    moved = 2 * rows * seen * token + small
    return cost_label((("pallas_call", 4.0 * rows * queries * seen * dim, moved),), part=True)


def _merge_parts(top: jax.Array, total: jax.Array, out: jax.Array) -> tuple[jax.Array, ...]:
    """The partial softmax of all parts, which are axis 3."""
    together = top.max(3)
    factor = jnp.exp(top - together[:, :, :, None])
    return together, (total * factor).sum(3), (out * factor[..., None]).sum(3)


def _spec(samples: int, part: bool, *sizes: int) -> pl.BlockSpec:
    """A row's block, or that of one of its parts: [groups, kv_heads, samples, parts, *sizes]."""

    def at(i: Any, h: Any, j: Any) -> tuple[Any, ...]:
        place = i // samples, h, i % samples
        return (*place, *([j] if part else []), *[0] * len(sizes))

    return pl.BlockSpec((*[None] * (4 if part else 3), *sizes), at)


def _kernel(
    scoring: ScoreOptions,
    new: int,
    queries: int,
    block: int,
    span_ref: Any,
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    top_ref: Any,
    total_ref: Any,
    out_ref: Any,
) -> None:
    """One part of a row's columns, with all queries of a key-value head."""
    int8 = isinstance(k_ref, QuantizedCache)
    dim, length = q_ref.shape[-1], (k_ref.numbers if int8 else k_ref).shape[0]
    padded = max(MIN_QUERIES, pl.next_power_of_2(queries))
    query, across = jnp.arange(padded), jnp.arange(dim)[None]
    there = query < queries
    # Products in the dtype of keys, as XLA does; float32 exactly, not in TF32.
    dtype = q_ref.dtype if int8 else k_ref.dtype
    precision = jax.lax.Precision.HIGHEST if dtype == jnp.float32 else None
    product = functools.partial(jnp.dot, precision=precision, preferred_element_type=jnp.float32)
    q = triton.load(q_ref.at[query[:, None], across], mask=there[:, None], other=0.0).astype(dtype)
    first, last = span_ref[0], span_ref[1]
    low = jnp.maximum(first, last + 1 - scoring.window) if scoring.window else first
    high = jnp.minimum(last + new, length)
    # Queries are ordered by head, then by token; each token sees up to its own column.
    own = last + query % new
    blocks = pl.cdiv(high - low, block)
    each = pl.cdiv(blocks, pl.num_programs(2))
    begin = pl.program_id(2) * each
    end = jnp.minimum(begin + each, blocks)

    def add(i: Any, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        top, total, out = carry
        column = low + i * block + jnp.arange(block)
        held = (column < high)[:, None]
        k, k_scale = _read(k_ref, column, across, held=held, dtype=dtype)
        v, v_scale = _read(v_ref, column, across, held=held, dtype=dtype)
        scores = product(q, k.T)
        scores = scoring.apply_softcap(scores * k_scale if int8 else scores)
        seen = (column[None] <= own[:, None]) & held.T
        if scoring.window:
            seen &= own[:, None] - column[None] < scoring.window
        scores = jnp.where(seen, scores, MASKED)
        higher = jnp.maximum(top, scores.max(1))
        factor, weights = jnp.exp(top - higher), jnp.exp(scores - higher[:, None])
        weights = jnp.where(seen, weights, 0.0)
        total = total * factor + weights.sum(1)
        weights = weights * v_scale if int8 else weights
        values = product(weights.astype(v.dtype), v)
        return higher, total, out * factor[:, None] + values

    zeros = jnp.zeros((padded,), jnp.float32)
    start = zeros + MASKED, zeros, jnp.zeros((padded, dim), jnp.float32)
    top, total, out = jax.lax.fori_loop(begin, end, add, start)
    triton.store(top_ref.at[query], top, mask=there)
    triton.store(total_ref.at[query], total, mask=there)
    triton.store(out_ref.at[query[:, None], across], out, mask=there[:, None])


def _read(
    ref: Any, column: jax.Array, across: jax.Array, held: jax.Array, dtype: Any
) -> tuple[jax.Array, Any]:
    """Load keys or values of these columns, int8 as ``dtype`` with their scales [1, columns]; 0
    where ``held``, bool [columns, 1], is False. ``across``: 0 to head_dim."""
    int8 = isinstance(ref, QuantizedCache)
    numbers = ref.numbers if int8 else ref
    x = triton.load(numbers.at[column[:, None], across], mask=held, other=0)
    if not int8:
        return x, None
    scale = triton.load(ref.scale.at[0, column], mask=held[:, 0], other=0.0)[None]
    return x.astype(jnp.float32).astype(dtype), scale
