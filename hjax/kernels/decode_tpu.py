"""The decoding kernel for TPUs: of the cache of all layers it reads the filled blocks of one.

Written in Pallas, after flash-decoding's online softmax (Dao et al. 2023) and the scalar prefetch
of paged attention. A grid step has one block of the prompt or of the rows' own tokens, of several
rows and key-value heads; which block it is follows from numbers that are there before the kernel
starts, so what no row of it has filled is never read. The new token's key and value are written in
place, a tile for each row. Heads narrower than 128 take the room of 128, and all samples of a
prompt are in one grid step: some hundreds fit. In int8 blocks are widened where they are used, and
each has its scales beside it. Per device: ``hjax.models.decoding`` puts it into a
``shard_map``.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from hjax.kernels import int8_cache
from hjax.kernels.attention import MASKED, Scoring
from hjax.kernels.decode import Seen
from hjax.kernels.int8_cache import Held, Quantized

LANES = 128
SUBLANES = 8
OWN_BLOCK = 128  # tokens of a row that are read together
PROMPT_BLOCK = 512
BLOCK_BYTES = 2**20  # of a block of keys, or of values
VMEM_BYTES = 32 * 2**20
ENDLESS = 2**30  # a window that hides nothing


def padded(length: int, block: int, dtype: Any) -> int:
    """Tokens for which the kernel needs room: ``length`` in whole tiles, or whole blocks."""
    tile = tile_of(dtype)
    return math.ceil(length / tile) * tile if length <= block else math.ceil(length / block) * block


def tile_of(dtype: Any) -> int:
    """Tokens that are written together: the rows of a tile."""
    return SUBLANES * 4 // jnp.dtype(dtype).itemsize


def _fewer(tokens: int, tile: int, bytes_each: int) -> int:
    """Tokens of a block, halved while they take more than ``BLOCK_BYTES``."""
    while tokens * bytes_each > BLOCK_BYTES and tokens % (2 * tile) == 0:
        tokens //= 2
    return tokens


def _most(count: int, bytes_each: int) -> int:
    """The largest divisor of ``count`` that makes no more than ``BLOCK_BYTES``, at least 1."""
    fits = [n for n in range(1, count + 1) if count % n == 0 and n * bytes_each <= BLOCK_BYTES]
    return max(fits, default=1)


def decode(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    prompt_k: Held,
    prompt_v: Held,
    own_k: Held,
    own_v: Held,
    layer: int | jax.Array,
    seen: Seen,
    scoring: Scoring = Scoring(),
    sinks: jax.Array | None = None,
    expected: float | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, Held, Held]:
    """Write one token per row and attend.

    Args:
      q: [groups, kv_heads, samples, per_kv, head_dim].
      k, v: [groups, kv_heads, samples, head_dim], of the new token.
      prompt_k, prompt_v: [layers, groups, kv_heads, prompt, head_dim], the length as ``padded``
        says of ``PROMPT_BLOCK``; finite also where nothing is.
      own_k, own_v: [layers, groups, kv_heads, samples, length, head_dim], the length as ``padded``
        says of ``OWN_BLOCK``; finite also where nothing is. Donate them: they are written in place.
        All four may be ``Quantized``.
      layer: which.
      seen: where each row stands.
      scoring, sinks: of the layer, as ``hjax.models.attention.Attention`` says.
      expected: of a row's own tokens how many are there, for the estimate of what the kernel
        reads; None: half of the length. Prompts are taken to be full.
      interpret: run on any device, to be tested.

    Returns:
      like q, in its dtype; own_k, own_v with the new token.

    Raises:
      AssertionError: a length that is not padded, when traced.
    """
    shape = _Shape.of(q, prompt_k, own_k)
    groups, samples = shape.groups, shape.samples
    position = jnp.broadcast_to(seen.position, (groups, samples)).astype(jnp.int32)
    window = scoring.window or ENDLESS
    begin, end = (x.astype(jnp.int32)[:, None] for x in (seen.begin, seen.end))
    # Of each row the prompt's and its own tokens [from, to) that it sees, the new one not counted.
    there = position >= 0
    spans = jnp.stack(
        [
            jnp.maximum(begin, end + position + 1 - window),
            jnp.where(there, end, 0),
            jnp.maximum(0, position + 1 - window),
            position,
        ],
        axis=-1,
    )
    reach = _reach(spans, shape)
    lanes = jnp.pad(spans, ((0, 0), (0, 0), (0, LANES - 4)))[:, :, None]

    q = (q * scoring.factor(shape.dim)).astype(jnp.float32)
    q = jnp.pad(q, ((0, 0),) * 3 + ((0, shape.heads - shape.per_kv), (0, 0)))
    dtype, new, scales = k.dtype, [k, v], None
    if isinstance(own_k, Quantized):
        made = [int8_cache.quantized(x) for x in new]
        new = [numbers for numbers, _ in made]
        both = jnp.concatenate([scale for _, scale in made], axis=-1)
        scales = jnp.pad(both, ((0, 0),) * 3 + ((0, LANES - 2),))[:, :, :, None]
    new = [x[:, :, :, None].astype(jnp.float32) for x in new]
    if sinks is None:
        sinks = jnp.full((shape.kv_heads * shape.per_kv,), -jnp.inf, jnp.float32)
    sinks = sinks.astype(jnp.float32).reshape(shape.kv_heads, shape.per_kv, 1)
    sinks = jnp.pad(sinks, ((0, 0), (0, shape.heads - shape.per_kv), (0, 0)))
    sinks = jnp.broadcast_to(sinks, (*sinks.shape[:2], LANES))

    scalars = jnp.asarray(layer, jnp.int32).reshape(1), position.reshape(-1), reach.reshape(-1)
    call = _call(shape, dtype, scoring, expected, interpret)
    held = prompt_k, prompt_v, own_k, own_v
    out, own_k, own_v = call(*scalars, q, *new, lanes, sinks, *held, scales)
    return out[..., : shape.per_kv, :].astype(dtype), own_k, own_v


@dataclasses.dataclass(frozen=True)
class _Shape:
    """Sizes of a call.

    Attributes:
      heads: ``per_kv`` in whole tiles.
      rows, together: groups and key-value heads of a grid step.
      prompt_block, own_block: tokens of a grid step.
      int8: whether keys and values are ``Quantized``.
    """

    layers: int
    groups: int
    kv_heads: int
    samples: int
    per_kv: int
    dim: int
    prompt: int
    length: int
    heads: int
    rows: int
    together: int
    prompt_block: int
    own_block: int
    int8: bool

    @classmethod
    def of(cls, q: jax.Array, prompt_k: Held, own_k: Held) -> _Shape:
        groups, kv_heads, samples, per_kv, dim = q.shape
        layers, _, _, prompt, _ = int8_cache.shape(prompt_k)
        length, dtype = int8_cache.shape(own_k)[4], jax.tree.leaves(own_k)[0].dtype
        int8 = isinstance(own_k, Quantized)
        for size, block in ((prompt, PROMPT_BLOCK), (length, OWN_BLOCK)):
            if size != padded(size, block, dtype) or not size:
                raise AssertionError(f"a length of {size} is not {padded(size or 1, block, dtype)}")
        heads = math.ceil(per_kv / SUBLANES) * SUBLANES
        # Scales lie along the lanes: a block that is not the whole length has whole ones.
        tile = LANES if int8 else tile_of(dtype)
        token = math.ceil(dim / LANES) * LANES * dtype.itemsize
        # First of one group and key-value head: fewer tokens where there are many samples. Scores
        # may take four times as much as keys.
        prompt_block = _fewer(min(prompt, PROMPT_BLOCK), tile, max(token, samples * heads))
        own_block = _fewer(min(length, OWN_BLOCK), tile, samples * token)
        least = max(samples * own_block * token, prompt_block * max(token, samples * heads))
        together = _most(kv_heads, least)
        rows = _most(groups, least * together) if together == kv_heads else 1
        return cls(layers, groups, kv_heads, samples, per_kv, dim, prompt, length, heads, rows,
                   together, prompt_block, own_block, int8)  # fmt: skip

    @property
    def prompt_blocks(self) -> int:
        """Grid steps that the prompt takes."""
        return self.prompt // self.prompt_block

    @property
    def own_blocks(self) -> int:
        """Grid steps that own tokens take."""
        return self.length // self.own_block

    @property
    def batch(self) -> int:
        """Products of a grid step with own tokens."""
        return self.rows * self.together * self.samples


def _reach(spans: jax.Array, shape: _Shape) -> jax.Array:
    """int32 [groups / rows, 4]: the first and last block of the prompt, and of own tokens, that
    any row of a grid step needs; the new token's own block is needed to be written.

    A last one before the first: none.
    """
    spans = spans.reshape(shape.groups // shape.rows, -1, 4)
    low, high = spans[..., 0].min(1), spans[..., 1].max(1)
    first = [low // shape.prompt_block, (high - 1) // shape.prompt_block]
    first[1] = jnp.where(high > low, first[1], first[0] - 1)
    position = spans[..., 3]
    # A row without a sequence has no say in where the others begin.
    begins = jnp.where(position >= 0, jnp.minimum(spans[..., 2], position), shape.length)
    low, high = begins.min(1), position.max(1)
    last = [low // shape.own_block, high // shape.own_block]
    last[1] = jnp.where(high >= 0, last[1], last[0] - 1)
    return jnp.stack([*first, *last], axis=-1).astype(jnp.int32)


@functools.lru_cache(maxsize=64)
def _call(
    shape: _Shape, compute: Any, scoring: Scoring, expected: float | None, interpret: bool
) -> Any:
    s, dtype = shape, jnp.int8 if shape.int8 else compute
    steps = s.prompt_blocks + s.own_blocks
    last_prompt, last_own = s.prompt_blocks - 1, s.own_blocks - 1

    def prompt_at(i: Any, h: Any, j: Any, layer: Any, _: Any, reach: Any) -> Any:
        block = jnp.clip(j, reach[4 * i], jnp.maximum(reach[4 * i + 1], reach[4 * i]))
        return layer[0], i, h, jnp.clip(block, 0, last_prompt), 0

    def own_at(i: Any, h: Any, j: Any, layer: Any, _: Any, reach: Any) -> Any:
        first, last = reach[4 * i + 2], reach[4 * i + 3]
        block = jnp.clip(j - s.prompt_blocks, first, jnp.maximum(last, first))
        return layer[0], i, h, 0, jnp.clip(block, 0, last_own), 0

    def last_first(place: Any) -> Any:
        return lambda *at: (*(found := place(*at))[:-2], found[-1], found[-2])

    prompt: Any = pl.BlockSpec((1, s.rows, s.together, s.prompt_block, s.dim), prompt_at)
    own: Any = pl.BlockSpec((1, s.rows, s.together, s.samples, s.own_block, s.dim), own_at)
    if s.int8:
        of_prompt, of_own = (1, s.rows, s.together), (1, s.rows, s.together, s.samples)
        prompt = Quantized(
            prompt, pl.BlockSpec((*of_prompt, 1, s.prompt_block), last_first(prompt_at))
        )
        own = Quantized(own, pl.BlockSpec((*of_own, 1, s.own_block), last_first(own_at)))

    def of_token(*sizes: int) -> pl.BlockSpec:
        block = s.rows, s.together, s.samples, *sizes
        return pl.BlockSpec(block, lambda i, h, *_: (i, h, 0, 0, 0))

    query, new = of_token(s.heads, s.dim), of_token(1, s.dim)
    spans = pl.BlockSpec((s.rows, s.samples, 1, LANES), lambda i, *_: (i, 0, 0, 0))
    sinks = pl.BlockSpec((s.together, s.heads, LANES), lambda i, h, *_: (h, 0, 0))
    tile = tile_of(dtype)
    whole: Any = pl.BlockSpec(memory_space=pl.ANY)
    rows = s.layers, s.groups, s.kv_heads, s.samples
    cache: Any = jax.ShapeDtypeStruct((*rows, s.length, s.dim), dtype)
    written: Any = pltpu.VMEM((s.rows * s.samples, s.together, tile, s.dim), dtype)
    scales, aliases = None, {10: 1, 11: 2}
    if s.int8:
        whole = Quantized(whole, whole)
        cache = Quantized(cache, jax.ShapeDtypeStruct((*rows, 1, s.length), jnp.float32))
        of_row = s.rows * s.samples, s.together, 1, s.own_block
        written = Quantized(written, pltpu.VMEM(of_row, jnp.float32))
        scales, aliases = of_token(1, LANES), {12 + i: 1 + i for i in range(4)}
    queries = (s.groups, s.kv_heads, s.samples, s.heads, s.dim)
    reduced = pltpu.VMEM((s.batch, s.heads, LANES), jnp.float32)
    return pl.pallas_call(
        functools.partial(_kernel, s, scoring, tile, compute),
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
        # Numbered with the scalars: own keys and values are the results' after the output.
        input_output_aliases=aliases,
        # A chip's two cores, where it has them, take rows and heads in turns.
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"),
            vmem_limit_bytes=VMEM_BYTES,
        ),
        cost_estimate=_estimate(s, jnp.dtype(dtype).itemsize, expected),
        interpret=interpret,
        name="decode_attention",
    )


def _estimate(s: _Shape, element: int, expected: float | None) -> pl.CostEstimate:
    """Of a token when rows have ``expected`` own tokens: whole blocks count, and whole tiles."""
    filled = s.length / 2 if expected is None else min(expected, s.length)
    # Lengths between two blocks are equally likely, so half a block more is read than there is.
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


def _kernel(
    s: _Shape,
    scoring: Scoring,
    tile: int,
    dtype: Any,
    layer: Any,
    positions: Any,
    reach: Any,
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    spans_ref: Any,
    sinks_ref: Any,
    prompt_k_ref: Any,
    prompt_v_ref: Any,
    own_k_ref: Any,
    own_v_ref: Any,
    scales_ref: Any,
    out_ref: Any,
    cache_k: Any,
    cache_v: Any,
    top_ref: Any,
    total_ref: Any,
    sum_ref: Any,
    tile_k: Any,
    tile_v: Any,
    arrived: Any,
) -> None:
    """One block of the prompt or of own tokens. What is summed so far is of
    [rows * together * samples, heads, ...], a number of each head in all lanes."""
    i, h, j = (pl.program_id(axis) for axis in range(3))
    of_batch = (s.batch, s.heads)

    def span(which: int) -> jax.Array:
        """[rows * together * samples, 1, 1] of [rows, samples, 1, lanes]."""
        number = spans_ref[:, :, :, which : which + 1][:, None]
        return jnp.broadcast_to(number, (s.rows, s.together, s.samples, 1, 1)).reshape(-1, 1, 1)

    def keep(top: jax.Array, total: jax.Array) -> None:
        top_ref[...] = jnp.broadcast_to(top, (*of_batch, LANES))
        total_ref[...] = jnp.broadcast_to(total, (*of_batch, LANES))

    @pl.when(j == 0)
    def begin() -> None:
        """With the new token, which every row sees."""
        k, v = k_ref[...], v_ref[...]
        if s.int8:
            k, v = k * scales_ref[..., :1], v * scales_ref[..., 1:2]
        scores = jnp.sum(q_ref[...] * k, axis=-1, keepdims=True)
        keep(scoring.bend(scores.reshape(*of_batch, 1)), jnp.ones((*of_batch, 1), jnp.float32))
        value = jnp.broadcast_to(v, q_ref.shape)
        sum_ref[...] = value.reshape(*of_batch, s.dim)

    def block_of(ref: Any, tokens: int) -> tuple[jax.Array, Any]:
        """Keys or values [products, tokens, head_dim], and their scales [products, 1, tokens]."""
        if not s.int8:
            return ref[...].reshape(-1, tokens, s.dim), None
        wide = ref.numbers[...].astype(jnp.float32).astype(dtype)
        return wide.reshape(-1, tokens, s.dim), ref.scale[...].reshape(-1, 1, tokens)

    def add(together: int, keys: Any, values: Any, first: Any, low: Any, high: Any) -> None:
        """Keys and values, of ``block_of``, from number ``first`` on, which ``together`` rows'
        heads see."""
        (k, k_scale), (v, v_scale) = keys, values
        q = q_ref[...].reshape(s.batch // together, together * s.heads, s.dim).astype(dtype)
        scores = jnp.einsum("bqd,btd->bqt", q, k, preferred_element_type=jnp.float32)
        tokens = k.shape[1]
        scores = scores if k_scale is None else scores * k_scale
        scores = scoring.bend(scores.reshape(*of_batch, tokens))
        at = first + jax.lax.broadcasted_iota(jnp.int32, scores.shape, 2)
        scores = jnp.where((at >= low) & (at < high), scores, MASKED)
        before = top_ref[...][:, :, :1]
        top = jnp.maximum(before, jnp.max(scores, axis=-1, keepdims=True))
        weights = jnp.exp(scores - top)
        factor = jnp.exp(before - top)
        total = total_ref[...][:, :, :1] * factor + jnp.sum(weights, axis=-1, keepdims=True)
        weights = weights.reshape(s.batch // together, together * s.heads, tokens)
        weights = (weights if v_scale is None else weights * v_scale).astype(dtype)
        new = jnp.einsum("bqt,btd->bqd", weights, v, preferred_element_type=jnp.float32)
        sum_ref[...] = sum_ref[...] * factor + new.reshape(*of_batch, s.dim)
        keep(top, total)

    @pl.when((j >= reach[4 * i]) & (j <= reach[4 * i + 1]))
    def prompt() -> None:
        k, v = (block_of(ref, s.prompt_block) for ref in (prompt_k_ref, prompt_v_ref))
        add(s.samples, k, v, j * s.prompt_block, span(0), span(1))

    block = j - s.prompt_blocks

    def tiles(row: Any) -> list[Any]:
        """Copies of a row's tiles with the new token into the cache."""
        group, sample = row // s.samples, row % s.samples
        at = positions[i * s.rows * s.samples + row] // tile * tile
        tokens = pl.ds(pl.multiple_of(at, tile), tile)
        heads = pl.ds(h * s.together, s.together)
        place = layer[0], i * s.rows + group, heads, sample
        pairs = [(tile_k, cache_k), (tile_v, cache_v)]
        if not s.int8:
            given = [(new, held.at[(*place, tokens)]) for new, held in pairs]
        else:
            lanes = pl.ds(pl.multiple_of(block * s.own_block, s.own_block), s.own_block)
            given = [(new.numbers, held.numbers.at[(*place, tokens)]) for new, held in pairs]
            given += [
                (new.scale, held.scale.at[(*place, slice(None), lanes)]) for new, held in pairs
            ]
        return [pltpu.make_async_copy(new.at[row], held, arrived) for new, held in given]

    def writes(row: Any) -> Any:
        position = positions[i * s.rows * s.samples + row]
        return (position >= 0) & (position // s.own_block == block)

    def write(row: Any, _: Any) -> None:
        @pl.when(writes(row))
        def start() -> None:
            group, sample = row // s.samples, row % s.samples
            position = positions[i * s.rows * s.samples + row]
            within = pl.multiple_of(position % s.own_block // tile * tile, tile)
            new = jax.lax.broadcasted_iota(jnp.int32, (s.together, tile, s.dim), 1)
            lane = jax.lax.broadcasted_iota(jnp.int32, (s.together, 1, s.own_block), 2)
            ours = (tile_k, own_k_ref, k_ref), (tile_v, own_v_ref, v_ref)
            for which, (scratch, ref, given) in enumerate(ours):
                if s.int8:
                    scale = scales_ref[group, :, sample][:, :, which : which + 1]
                    here = lane == position % s.own_block
                    scratch.scale[row] = jnp.where(here, scale, ref.scale[0, group, :, sample])
                    scratch, ref = scratch.numbers, ref.numbers
                held = ref[0, group, :, sample, pl.ds(within, tile)].astype(jnp.float32)
                token = given[group, :, sample]
                held = jnp.where(new == position % tile, token, held)
                scratch[row] = held.astype(scratch.dtype)
            for copy in tiles(row):
                copy.start()

    def wait(row: Any, _: Any) -> None:
        @pl.when(writes(row))
        def done() -> None:
            for copy in tiles(row):
                copy.wait()

    @pl.when((block >= reach[4 * i + 2]) & (block <= reach[4 * i + 3]))
    def own() -> None:
        jax.lax.fori_loop(0, s.rows * s.samples, write, None)
        k, v = (block_of(ref, s.own_block) for ref in (own_k_ref, own_v_ref))
        add(1, k, v, block * s.own_block, span(2), span(3))
        jax.lax.fori_loop(0, s.rows * s.samples, wait, None)

    @pl.when(j == s.prompt_blocks + s.own_blocks - 1)
    def finish() -> None:
        sinks = sinks_ref[...][:, :, :1][None, :, None]
        sinks = jnp.broadcast_to(sinks, (s.rows, s.together, s.samples, s.heads, 1))
        sinks = sinks.reshape(*of_batch, 1)
        before = top_ref[...][:, :, :1]
        top = jnp.maximum(before, sinks)
        factor = jnp.exp(before - top)
        total = total_ref[...][:, :, :1] * factor + jnp.exp(sinks - top)
        out = jnp.where(span(3) >= 0, sum_ref[...] * factor / total, 0.0)
        out_ref[...] = out.reshape(out_ref.shape)
