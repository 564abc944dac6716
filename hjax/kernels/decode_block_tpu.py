"""Body of the TPU decode kernel (``decode_tpu``): block sizes of a call, and one grid step."""

from __future__ import annotations

import collections
import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from hjax.kernels import decode, int8_cache
from hjax.kernels.attention import MASKED, ScoreOptions
from hjax.kernels.int8_cache import CacheArray, QuantizedCache

LANES = 128
BLOCK_BYTES = 2**20  # of a block of keys, or of values


def _halve_to_fit(tokens: int, tile: int, bytes_each: int) -> int:
    """Tokens of a block, halved until they fit in ``BLOCK_BYTES``."""
    while tokens * bytes_each > BLOCK_BYTES and tokens % (2 * tile) == 0:
        tokens //= 2
    return tokens


def _largest_divisor(count: int, bytes_each: int) -> int:
    """The largest divisor of ``count`` that fits in ``BLOCK_BYTES``, at least 1."""
    fits = [n for n in range(1, count + 1) if count % n == 0 and n * bytes_each <= BLOCK_BYTES]
    return max(fits, default=1)


@dataclasses.dataclass(frozen=True)
class DecodeBlockShape:
    """Sizes of a call.

    Attributes:
      heads: ``per_kv`` padded to whole tiles.
      rows, together: groups and key-value heads of a grid step.
      prompt_block, own_block: tokens of a grid step.
      int8: whether keys and values are ``QuantizedCache``.
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
    def of(cls, q: jax.Array, prompt_k: CacheArray, own_k: CacheArray) -> DecodeBlockShape:
        groups, kv_heads, samples, per_kv, dim = q.shape
        layers, _, _, prompt, _ = int8_cache.shape(prompt_k)
        length, dtype = int8_cache.shape(own_k)[4], jax.tree.leaves(own_k)[0].dtype
        int8 = isinstance(own_k, QuantizedCache)
        for size, block in ((prompt, decode.PROMPT_BLOCK), (length, decode.OWN_BLOCK)):
            if size != (whole := decode.cache_capacity(decode.TPU_KERNEL, size or 1, block, dtype)):
                raise AssertionError(f"a length of {size} is not {whole}")
        heads = math.ceil(per_kv / decode.SUBLANES) * decode.SUBLANES
        # Scales lie along the lanes, so a partial block has whole lanes of them.
        tile = LANES if int8 else decode.tile_tokens(dtype)
        token = math.ceil(dim / LANES) * LANES * dtype.itemsize
        # First fit one group and key-value head: fewer tokens if there are many samples. Scores may
        # take four times as much as keys.
        prompt_block, own_block = min(prompt, decode.PROMPT_BLOCK), min(length, decode.OWN_BLOCK)
        prompt_block = _halve_to_fit(prompt_block, tile, max(token, samples * heads))
        own_block = _halve_to_fit(own_block, tile, samples * token)
        least = max(samples * own_block * token, prompt_block * max(token, samples * heads))
        together = _largest_divisor(kv_heads, least)
        rows = _largest_divisor(groups, least * together) if together == kv_heads else 1
        return cls(
            layers=layers, groups=groups, kv_heads=kv_heads, samples=samples, per_kv=per_kv,
            dim=dim, prompt=prompt, length=length, heads=heads, rows=rows, together=together,
            prompt_block=prompt_block, own_block=own_block, int8=int8,
        )  # fmt: skip

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


# References of the kernel: scalars, inputs, outputs, and scratch kept between grid steps. The
# running softmax is [rows * together * samples, heads, ...], with a head's value in all lanes.
_Refs = collections.namedtuple(
    "_Refs",
    "layer positions block_ranges q k v spans sinks prompt_k prompt_v own_k own_v scales "
    "out cache_k cache_v top total sum tile_k tile_v write_done",
)


def step(s: DecodeBlockShape, scoring: ScoreOptions, tile: int, dtype: Any, *refs: Any) -> None:
    """One block of the prompt or of own tokens."""
    i, h, j = (pl.program_id(axis) for axis in range(3))
    at = _Refs(*refs)
    softmax, block = _OnlineSoftmax(s, scoring, dtype, at), j - s.prompt_blocks
    writes = _TokenWrites(s, tile, at, i=i, h=h, block=block)
    pl.when(j == 0)(softmax.begin)

    @pl.when((j >= at.block_ranges[4 * i]) & (j <= at.block_ranges[4 * i + 1]))
    def prompt() -> None:
        k, v = (softmax.block_of(ref, s.prompt_block) for ref in (at.prompt_k, at.prompt_v))
        softmax.add(s.samples, k, v, j * s.prompt_block, low=softmax.span(0), high=softmax.span(1))

    @pl.when((block >= at.block_ranges[4 * i + 2]) & (block <= at.block_ranges[4 * i + 3]))
    def own() -> None:
        jax.lax.fori_loop(0, s.rows * s.samples, writes.write, None)
        k, v = (softmax.block_of(ref, s.own_block) for ref in (at.own_k, at.own_v))
        softmax.add(1, k, v, first=block * s.own_block, low=softmax.span(2), high=softmax.span(3))
        jax.lax.fori_loop(0, s.rows * s.samples, writes.wait, None)

    pl.when(j == s.prompt_blocks + s.own_blocks - 1)(softmax.finish)


@dataclasses.dataclass(frozen=True)
class _OnlineSoftmax:
    """The online softmax of a grid step's rows and heads."""

    s: DecodeBlockShape
    scoring: ScoreOptions
    dtype: Any
    at: _Refs

    def span(self, which: int) -> jax.Array:
        """[rows * together * samples, 1, 1] of [rows, samples, 1, lanes]."""
        s, number = self.s, self.at.spans[:, :, :, which : which + 1][:, None]
        return jnp.broadcast_to(number, (s.rows, s.together, s.samples, 1, 1)).reshape(-1, 1, 1)

    def store_running(self, top: jax.Array, total: jax.Array) -> None:
        lanes = (self.s.batch, self.s.heads, LANES)
        self.at.top[...] = jnp.broadcast_to(top, lanes)
        self.at.total[...] = jnp.broadcast_to(total, lanes)

    def begin(self) -> None:
        """Start with the new token, which every row sees."""
        s, at = self.s, self.at
        k, v = at.k[...], at.v[...]
        if s.int8:
            k, v = k * at.scales[..., :1], v * at.scales[..., 1:2]
        scores = jnp.sum(at.q[...] * k, axis=-1, keepdims=True)
        one = (s.batch, s.heads, 1)
        top = self.scoring.apply_softcap(scores.reshape(one))
        self.store_running(top, jnp.ones(one, jnp.float32))
        value = jnp.broadcast_to(v, at.q.shape)
        at.sum[...] = value.reshape(s.batch, s.heads, s.dim)

    def block_of(self, ref: Any, tokens: int) -> tuple[jax.Array, Any]:
        """Keys or values [products, tokens, head_dim], and their scales [products, 1, tokens]."""
        if not self.s.int8:
            return ref[...].reshape(-1, tokens, self.s.dim), None
        wide = ref.numbers[...].astype(jnp.float32).astype(self.dtype)
        return wide.reshape(-1, tokens, self.s.dim), ref.scale[...].reshape(-1, 1, tokens)

    def add(self, together: int, keys: Any, values: Any, first: Any, low: Any, high: Any) -> None:
        """Add keys and values (``block_of``) whose first token has number ``first``; ``together``
        rows' heads share them."""
        s, at, dtype = self.s, self.at, self.dtype
        (k, k_scale), (v, v_scale) = keys, values
        q = at.q[...].reshape(s.batch // together, together * s.heads, s.dim).astype(dtype)
        scores = jnp.einsum("bqd,btd->bqt", q, k, preferred_element_type=jnp.float32)
        tokens = k.shape[1]
        scores = scores if k_scale is None else scores * k_scale
        scores = self.scoring.apply_softcap(scores.reshape(s.batch, s.heads, tokens))
        token = first + jax.lax.broadcasted_iota(jnp.int32, scores.shape, 2)
        scores = jnp.where((token >= low) & (token < high), scores, MASKED)
        before = at.top[...][:, :, :1]
        top = jnp.maximum(before, jnp.max(scores, axis=-1, keepdims=True))
        weights = jnp.exp(scores - top)
        factor = jnp.exp(before - top)
        total = at.total[...][:, :, :1] * factor + jnp.sum(weights, axis=-1, keepdims=True)
        weights = weights.reshape(s.batch // together, together * s.heads, tokens)
        weights = (weights if v_scale is None else weights * v_scale).astype(dtype)
        new = jnp.einsum("bqt,btd->bqd", weights, v, preferred_element_type=jnp.float32)
        at.sum[...] = at.sum[...] * factor + new.reshape(s.batch, s.heads, s.dim)
        self.store_running(top, total)

    def finish(self) -> None:
        """Add the sinks and write the output."""
        s, at = self.s, self.at
        sinks = at.sinks[...][:, :, :1][None, :, None]
        sinks = jnp.broadcast_to(sinks, (s.rows, s.together, s.samples, s.heads, 1))
        sinks = sinks.reshape(s.batch, s.heads, 1)
        before = at.top[...][:, :, :1]
        top = jnp.maximum(before, sinks)
        factor = jnp.exp(before - top)
        total = at.total[...][:, :, :1] * factor + jnp.exp(sinks - top)
        out = jnp.where(self.span(3) >= 0, at.sum[...] * factor / total, 0.0)
        at.out[...] = out.reshape(at.out.shape)


@dataclasses.dataclass(frozen=True)
class _TokenWrites:
    """Asynchronous writes of new tokens into the KV cache, one tile per row.

    Attributes:
      tile: tokens of a tile.
      i, h: of the grid step.
      block: of own tokens; a row writes when its token is in this block.
    """

    s: DecodeBlockShape
    tile: int
    at: _Refs
    i: Any
    h: Any
    block: Any

    def position(self, row: Any) -> Any:
        return self.at.positions[self.i * self.s.rows * self.s.samples + row]

    def copies(self, row: Any) -> list[Any]:
        """Copies of a row's tiles, with the new token, into the cache."""
        s, at = self.s, self.at
        group, sample = row // s.samples, row % s.samples
        first = self.position(row) // self.tile * self.tile
        tokens = pl.ds(pl.multiple_of(first, self.tile), self.tile)
        heads = pl.ds(self.h * s.together, s.together)
        place = at.layer[0], self.i * s.rows + group, heads, sample
        pairs = [(at.tile_k, at.cache_k), (at.tile_v, at.cache_v)]
        if not s.int8:
            copies = [(new, held.at[(*place, tokens)]) for new, held in pairs]
        else:
            lanes = pl.ds(pl.multiple_of(self.block * s.own_block, s.own_block), s.own_block)
            copies = [(new.numbers, held.numbers.at[(*place, tokens)]) for new, held in pairs]
            copies += [
                (new.scale, held.scale.at[(*place, slice(None), lanes)]) for new, held in pairs
            ]
        return [pltpu.make_async_copy(new.at[row], held, at.write_done) for new, held in copies]

    def is_in_block(self, row: Any) -> Any:
        """Whether a row's token is in this block."""
        position = self.position(row)
        return (position >= 0) & (position // self.s.own_block == self.block)

    def write(self, row: Any, _: Any) -> None:
        @pl.when(self.is_in_block(row))
        def start() -> None:
            s, at, tile = self.s, self.at, self.tile
            group, sample = row // s.samples, row % s.samples
            position = self.position(row)
            within = pl.multiple_of(position % s.own_block // tile * tile, tile)
            new = jax.lax.broadcasted_iota(jnp.int32, (s.together, tile, s.dim), 1)
            lane = jax.lax.broadcasted_iota(jnp.int32, (s.together, 1, s.own_block), 2)
            ours = (at.tile_k, at.own_k, at.k), (at.tile_v, at.own_v, at.v)
            for which, (scratch, ref, token_ref) in enumerate(ours):
                if s.int8:
                    scale = at.scales[group, :, sample][:, :, which : which + 1]
                    own = lane == position % s.own_block
                    scratch.scale[row] = jnp.where(own, scale, ref.scale[0, group, :, sample])
                    scratch, ref = scratch.numbers, ref.numbers
                held = ref[0, group, :, sample, pl.ds(within, tile)].astype(jnp.float32)
                token = token_ref[group, :, sample]
                held = jnp.where(new == position % tile, token, held)
                scratch[row] = held.astype(scratch.dtype)
            for copy in self.copies(row):
                copy.start()

    def wait(self, row: Any, _: Any) -> None:
        @pl.when(self.is_in_block(row))
        def done() -> None:
            for copy in self.copies(row):
                copy.wait()
