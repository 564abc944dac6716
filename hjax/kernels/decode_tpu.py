"""Decode attention kernel for TPUs: reads only the filled blocks of one layer's KV cache.

Written in Pallas, after flash-decoding's online softmax (Dao et al. 2023) and the scalar prefetch
of paged attention. A grid step has one block of the prompt or of the rows' own tokens, for several
rows and key-value heads. Prefetched scalars select the blocks, so unfilled ones are never read. The
new token's key and value are written in place, one tile per row. Heads narrower than 128 are padded
to 128. All samples of a prompt are in one grid step: some hundreds fit. int8 blocks are dequantized
where they are used. Per device: ``hjax.models.decoding`` wraps it in ``shard_map``.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from hjax.kernels import int8_cache
from hjax.kernels.attention import ScoreOptions
from hjax.kernels.decode import SUBLANES, CacheMask, tile_tokens
from hjax.kernels.decode_block_tpu import LANES, DecodeBlockShape, step
from hjax.kernels.int8_cache import CacheArray, QuantizedCache

VMEM_BYTES = 32 * 2**20
NO_WINDOW = 2**30  # a window that masks nothing


def decode(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    prompt_k: CacheArray,
    prompt_v: CacheArray,
    own_k: CacheArray,
    own_v: CacheArray,
    layer: int | jax.Array,
    seen: CacheMask,
    scoring: ScoreOptions = ScoreOptions(),
    sinks: jax.Array | None = None,
    expected: float | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, CacheArray, CacheArray]:
    """Write one token per row into the KV cache and attend.

    Args:
      q: [groups, kv_heads, samples, per_kv, head_dim].
      k, v: [groups, kv_heads, samples, head_dim], of the new token.
      prompt_k, prompt_v: [layers, groups, kv_heads, prompt, head_dim], with the length of
        ``cache_capacity`` for ``PROMPT_BLOCK``; finite also where unfilled.
      own_k, own_v: [layers, groups, kv_heads, samples, length, head_dim], with the length of
        ``cache_capacity`` for ``OWN_BLOCK``; finite also where unfilled. Donate them: they are
        written in place. All four may be ``QuantizedCache``.
      layer: its index.
      seen: the mask.
      scoring, sinks: of the layer, as ``hjax.models.attention_strategies.Attention`` says.
      expected: average own tokens of a row, for the cost estimate; None: half of the length.
        Prompts are taken to be full.
      interpret: run on any device, for tests.

    Returns:
      like q, in its dtype; own_k, own_v with the new token.

    Raises:
      AssertionError: a length that is not padded, when traced.
    """
    shape = DecodeBlockShape.of(q, prompt_k, own_k)
    groups, samples = shape.groups, shape.samples
    position = jnp.broadcast_to(seen.position, (groups, samples)).astype(jnp.int32)
    spans = _visible_spans(seen, position, scoring.window or NO_WINDOW)
    block_ranges = _block_ranges(spans, shape)
    lanes = jnp.pad(spans, ((0, 0), (0, 0), (0, LANES - 4)))[:, :, None]

    q = (q * scoring.query_scale(shape.dim)).astype(jnp.float32)
    q = jnp.pad(q, ((0, 0),) * 3 + ((0, shape.heads - shape.per_kv), (0, 0)))
    dtype, scales = k.dtype, None
    if isinstance(own_k, QuantizedCache):
        (k, k_scale), (v, v_scale) = int8_cache.quantize(k), int8_cache.quantize(v)
        both = jnp.concatenate([k_scale, v_scale], axis=-1)
        scales = jnp.pad(both, ((0, 0),) * 3 + ((0, LANES - 2),))[:, :, :, None]
    k, v = (x[:, :, :, None].astype(jnp.float32) for x in (k, v))
    number = jnp.asarray(layer, jnp.int32).reshape(1)
    out, own_k, own_v = _call(shape, dtype, scoring, expected, interpret)(
        number, position.reshape(-1), block_ranges.reshape(-1), q, k, v, lanes,
        _padded_sinks(sinks, shape), prompt_k, prompt_v, own_k, own_v, scales,
    )  # fmt: skip
    return out[..., : shape.per_kv, :].astype(dtype), own_k, own_v


def _visible_spans(seen: CacheMask, position: jax.Array, window: int) -> jax.Array:
    """int32 [groups, samples, 4]: per row the visible ranges [start, end) of the prompt and of own
    tokens, without the new one."""
    begin, end = (x.astype(jnp.int32)[:, None] for x in (seen.begin, seen.end))
    return jnp.stack(
        [
            jnp.maximum(begin, end + position + 1 - window),
            jnp.where(position >= 0, end, 0),
            jnp.maximum(0, position + 1 - window),
            position,
        ],
        axis=-1,
    )


def _padded_sinks(sinks: jax.Array | None, shape: DecodeBlockShape) -> jax.Array:
    """float32 [kv_heads, heads, lanes]: a score per head; minus infinity: none."""
    if sinks is None:
        sinks = jnp.full((shape.kv_heads * shape.per_kv,), -jnp.inf, jnp.float32)
    sinks = sinks.astype(jnp.float32).reshape(shape.kv_heads, shape.per_kv, 1)
    sinks = jnp.pad(sinks, ((0, 0), (0, shape.heads - shape.per_kv), (0, 0)))
    return jnp.broadcast_to(sinks, (*sinks.shape[:2], LANES))


def _block_ranges(spans: jax.Array, shape: DecodeBlockShape) -> jax.Array:
    """int32 [groups / rows, 4]: first and last block of the prompt, and of own tokens, that any row
    of a grid step reads or writes; none if the last is before the first."""
    spans = spans.reshape(shape.groups // shape.rows, -1, 4)
    low, high = spans[..., 0].min(1), spans[..., 1].max(1)
    first = [low // shape.prompt_block, (high - 1) // shape.prompt_block]
    first[1] = jnp.where(high > low, first[1], first[0] - 1)
    position = spans[..., 3]
    # Empty rows do not widen the range.
    begins = jnp.where(position >= 0, jnp.minimum(spans[..., 2], position), shape.length)
    low, high = begins.min(1), position.max(1)
    last = [low // shape.own_block, high // shape.own_block]
    last[1] = jnp.where(high >= 0, last[1], last[0] - 1)
    return jnp.stack([*first, *last], axis=-1).astype(jnp.int32)


@functools.lru_cache(maxsize=64)
def _call(
    shape: DecodeBlockShape,
    compute: Any,
    scoring: ScoreOptions,
    expected: float | None,
    interpret: bool,
) -> Any:
    s, dtype = shape, jnp.int8 if shape.int8 else compute
    steps = s.prompt_blocks + s.own_blocks
    prompt, own = _cache_block_specs(s)

    def of_token(*sizes: int) -> pl.BlockSpec:
        block = s.rows, s.together, s.samples, *sizes
        return pl.BlockSpec(block, lambda i, h, *_: (i, h, 0, 0, 0))

    query, new = of_token(s.heads, s.dim), of_token(1, s.dim)
    spans = pl.BlockSpec((s.rows, s.samples, 1, LANES), lambda i, *_: (i, 0, 0, 0))
    sinks = pl.BlockSpec((s.together, s.heads, LANES), lambda i, h, *_: (h, 0, 0))
    tile = tile_tokens(dtype)
    whole: Any = pl.BlockSpec(memory_space=pl.ANY)
    rows = s.layers, s.groups, s.kv_heads, s.samples
    cache: Any = jax.ShapeDtypeStruct((*rows, s.length, s.dim), dtype)
    written: Any = pltpu.VMEM((s.rows * s.samples, s.together, tile, s.dim), dtype)
    scales, aliases = None, {10: 1, 11: 2}
    if s.int8:
        whole = QuantizedCache(whole, whole)
        cache = QuantizedCache(cache, jax.ShapeDtypeStruct((*rows, 1, s.length), jnp.float32))
        of_row = s.rows * s.samples, s.together, 1, s.own_block
        written = QuantizedCache(written, pltpu.VMEM(of_row, jnp.float32))
        scales, aliases = of_token(1, LANES), {12 + i: 1 + i for i in range(4)}
    queries = (s.groups, s.kv_heads, s.samples, s.heads, s.dim)
    reduced = pltpu.VMEM((s.batch, s.heads, LANES), jnp.float32)
    return pl.pallas_call(
        functools.partial(step, s, scoring, tile, compute),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(s.groups // s.rows, s.kv_heads // s.together, steps),
            in_specs=[query, new, new, spans, sinks, prompt, prompt, own, own, scales],
            out_specs=[query, whole, whole],
            scratch_shapes=[
                reduced,
                reduced,
                pltpu.VMEM((s.batch, s.heads, s.dim), jnp.float32),
                written,
                written,
                pltpu.SemaphoreType.DMA,
            ],
        ),
        out_shape=[jax.ShapeDtypeStruct(queries, jnp.float32), cache, cache],
        # Indices count the scalars too: own keys and values alias the results after the output.
        input_output_aliases=aliases,
        # On a chip with two cores these split rows and heads.
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=VMEM_BYTES
        ),
        cost_estimate=_estimate(s, jnp.dtype(dtype).itemsize, expected),
        interpret=interpret,
        name="decode_attention",
    )


def _cache_block_specs(s: DecodeBlockShape) -> tuple[Any, Any]:
    """Block specs of a prompt's and of own keys or values: the blocks of ``_block_ranges``."""
    last_prompt, last_own = s.prompt_blocks - 1, s.own_blocks - 1

    def prompt_at(i: Any, h: Any, j: Any, layer: Any, _: Any, block_ranges: Any) -> Any:
        first, last = block_ranges[4 * i], block_ranges[4 * i + 1]
        block = jnp.clip(j, first, jnp.maximum(last, first))
        return layer[0], i, h, jnp.clip(block, 0, last_prompt), 0

    def own_at(i: Any, h: Any, j: Any, layer: Any, _: Any, block_ranges: Any) -> Any:
        first, last = block_ranges[4 * i + 2], block_ranges[4 * i + 3]
        block = jnp.clip(j - s.prompt_blocks, first, jnp.maximum(last, first))
        return layer[0], i, h, 0, jnp.clip(block, 0, last_own), 0

    def swap_last_two(place: Any) -> Any:
        return lambda *at: (*(found := place(*at))[:-2], found[-1], found[-2])

    prompt: Any = pl.BlockSpec((1, s.rows, s.together, s.prompt_block, s.dim), prompt_at)
    own: Any = pl.BlockSpec((1, s.rows, s.together, s.samples, s.own_block, s.dim), own_at)
    if s.int8:
        of_prompt, of_own = (1, s.rows, s.together), (1, s.rows, s.together, s.samples)
        prompt = QuantizedCache(
            prompt, pl.BlockSpec((*of_prompt, 1, s.prompt_block), swap_last_two(prompt_at))
        )
        own = QuantizedCache(own, pl.BlockSpec((*of_own, 1, s.own_block), swap_last_two(own_at)))
    return prompt, own


def _estimate(s: DecodeBlockShape, element: int, expected: float | None) -> pl.CostEstimate:
    """Cost of a token when rows have ``expected`` own tokens, in whole blocks and whole tiles."""
    filled = s.length / 2 if expected is None else min(expected, s.length)
    # On average half of the last block is unfilled but read.
    own = min(filled + s.own_block / 2, s.length)
    rows = s.groups * s.samples
    tokens = s.groups * s.prompt + rows * own
    written = rows * (SUBLANES * 4 // element)
    lanes = math.ceil(s.dim / LANES) * LANES
    moved = 2 * s.kv_heads * lanes * element * (tokens + written)
    if s.int8:
        moved += 2 * s.kv_heads * int8_cache.SCALE_BYTES * (tokens + rows * s.own_block)
    small = 2 * rows * s.kv_heads * s.heads * lanes * 4
    pairs = rows * s.kv_heads * s.per_kv * (s.prompt + own)
    return pl.CostEstimate(
        flops=int(4 * s.dim * pairs), bytes_accessed=int(moved + small), transcendentals=int(pairs)
    )
