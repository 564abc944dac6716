"""Decoding: the KV cache, and attention of one new token per row against it.

``Decode`` is the attention strategy of a decode loop, ``KVCache`` what it writes and reads. The
cache's memory layout and the kernels depend on the platform (``hjax.kernels.decode``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from hjax.kernels import cache_axis, int8_cache
from hjax.kernels import decode as kernels
from hjax.kernels.attention import ScoreOptions
from hjax.kernels.decode import (
    GPU_INTERPRETED,
    GPU_KERNELS,
    TILES,
    TPU_INTERPRETED,
    TPU_KERNELS,
    CacheMask,
    SlotMask,
)
from hjax.kernels.int8_cache import CacheArray
from hjax.models.attention_strategies import AttentionInputs, AttentionOutput
from hjax.sharding.layout import Layout


@dataclasses.dataclass(frozen=True)
class Decode:
    """Decode attention: one new token per row sees the shared prompt's cache and the row's own.

    Attributes:
      seen: each row's position; the cache is written there and read up to there.
      layout: the generate layout, over whose devices the kernel is split.
      expected: average response length so far, for the kernel's estimate of what it reads; None:
        half of the cache's length.
    """

    seen: CacheMask
    layout: Layout | None = None
    expected: float | None = None

    def __call__(self, heads: AttentionInputs, cache: KVCache) -> AttentionOutput:
        layer, q, k, v, scoring, sinks = heads
        rows, _, _, dim = q.shape
        groups = self.seen.begin.shape[0]
        if rows == groups and cache.form not in TPU_KERNELS:
            start = jnp.zeros(rows, jnp.int32)
            slots = SlotMask(self.seen.begin, self.seen.end, start, self.seen.position)
            return DecodeSlots(slots, self.layout, self.expected)(heads, cache)
        kv_heads = k.shape[2] * cache.copies

        def group_by_prompt(x: jax.Array) -> jax.Array:
            """[rows, 1, heads, dim] -> [groups, kv_heads, samples, heads / kv_heads, dim]"""
            x = x.reshape(groups, rows // groups, kv_heads, -1, dim)
            return x.transpose(0, 2, 1, 3, 4)

        k, v = (_repeat_heads(x, cache.copies, 2) for x in (k, v))
        q, k, v = group_by_prompt(q), group_by_prompt(k)[:, :, :, 0], group_by_prompt(v)[:, :, :, 0]
        if cache.form in TPU_KERNELS:
            out, cache = self._run_kernel(layer, q, k, v, cache, scoring, sinks)
        else:
            cache = cache.write(layer, k, v, self.seen.position)
            prompt_k, prompt_v, own_k, own_v = cache.read(layer)
            own_attention = None
            if cache.form in GPU_KERNELS:
                position = jnp.broadcast_to(self.seen.position, q.shape[:3:2])
                own_attention = _attend_filled(
                    (q[..., None, :], own_k, own_v),
                    (jnp.zeros_like(position), position),
                    layout=self.layout,
                    scoring=scoring,
                    expected=self.expected,
                    form=cache.form,
                )
            out = kernels.attend(
                q, prompt_k, prompt_v, own_k, own_v, seen=self.seen, scoring=scoring,
                sinks=sinks, own_partial=own_attention, axis=cache.key_axis,
            )  # fmt: skip
        return out.transpose(0, 2, 1, 3, 4).reshape(rows, 1, -1, dim), cache, None

    def _run_kernel(
        self,
        layer: int | jax.Array,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        cache: KVCache,
        scoring: ScoreOptions,
        sinks: jax.Array | None,
    ) -> tuple[jax.Array, KVCache]:
        """Run the TPU kernel; each device has its rows and heads."""
        from hjax.kernels import decode_tpu  # here because importing Pallas is slow

        def attend(arrays: dict[str, Any]) -> Any:
            return decode_tpu.decode(
                **arrays, scoring=scoring, expected=self.expected,
                interpret=cache.form == TPU_INTERPRETED,
            )  # fmt: skip

        held = {"prompt_k": cache.prompt_k, "prompt_v": cache.prompt_v}
        held |= {"own_k": cache.k, "own_v": cache.v}
        given: dict[str, Any] = {"q": q, "k": k, "v": v, "seen": self.seen, "sinks": sinks, **held}
        given["layer"] = jnp.asarray(layer, jnp.int32)
        if self.layout is not None:
            spec = self.layout.spec
            whole, rows = PartitionSpec(), spec(["batch"])
            of_token, of_cache = spec(["batch", "heads"]), spec([None, "batch", "heads"])
            specs: dict[str, Any] = dict.fromkeys(("q", "k", "v"), of_token)
            specs |= dict.fromkeys(held, of_cache) | {"layer": whole, "sinks": spec(["heads"])}
            specs["seen"] = jax.tree.map(lambda x: rows if x.ndim else whole, self.seen)
            attend = jax.shard_map(
                attend,
                mesh=self.layout.mesh,
                in_specs=(specs,),
                out_specs=(of_token, of_cache, of_cache),
                check_vma=False,
            )
        out, own_k, own_v = attend(given)
        return out, dataclasses.replace(cache, k=own_k, v=own_v)


@dataclasses.dataclass(frozen=True)
class DecodeSlots:
    """Decode attention for continuous batching: rows started at different times.

    All rows have one new token, or equally many (speculative decoding). The cache has one sample
    per prompt, but there may be fewer prompts than rows.

    Attributes:
      slots: each row's position; several new tokens need a column per row.
      layout, expected: as of ``Decode``.
    """

    slots: SlotMask
    layout: Layout | None = None
    expected: float | None = None

    def __call__(self, heads: AttentionInputs, cache: KVCache) -> AttentionOutput:
        layer, q, k, v, scoring, sinks = heads
        rows, new, _, dim = q.shape
        kv_heads, column = k.shape[2] * cache.copies, self.slots.column
        k, v = (_repeat_heads(x, cache.copies, 2) for x in (k, v))
        if column.ndim:
            cache = cache.write_rows(layer, k, v, column)
        else:
            cache = cache.write(layer, k[:, 0], v[:, 0], column)
        prompt_k, prompt_v, own_k, own_v = cache.read(layer)
        q = q.reshape(rows, new, kv_heads, -1, dim).transpose(0, 2, 3, 1, 4)
        own_attention = None
        if cache.form in GPU_KERNELS:
            one = jnp.broadcast_to(column, rows)
            found = _attend_filled(
                jax.tree.map(lambda x: x[:, :, None], (q, own_k, own_v)),
                (self.slots.start[:, None], one[:, None]),
                layout=self.layout,
                scoring=scoring,
                expected=self.expected,
                form=cache.form,
            )
            own_attention = tuple(x[:, :, 0] for x in found)
        out = kernels.attend_slots(
            q, prompt_k, prompt_v, own_k, own_v, slots=self.slots, scoring=scoring,
            sinks=sinks, own_partial=own_attention, axis=cache.key_axis,
        )  # fmt: skip
        return out.transpose(0, 3, 1, 2, 4).reshape(rows, new, -1, dim), cache, None


def _attend_filled(
    held: tuple[jax.Array, CacheArray, CacheArray],
    spans: tuple[jax.Array, jax.Array],
    layout: Layout | None,
    scoring: ScoreOptions,
    expected: float | None,
    form: str,
) -> tuple[jax.Array, ...]:
    """``decode_gpu.attend_own`` on every device, of unscaled queries and the rows' own keys and
    values; ``spans``: first and last columns."""
    from hjax.kernels import decode_gpu  # what it imports is not on every platform

    def attend(q: jax.Array, k: CacheArray, v: CacheArray, first: Any, last: Any) -> Any:
        interpret = form == GPU_INTERPRETED
        return decode_gpu.attend_own(q, k, v, first, last, scoring, expected, interpret)

    q, own_k, own_v = held
    q = q * scoring.query_scale(q.shape[-1])
    if layout is not None:
        of_row, of_heads = layout.spec(["batch"]), layout.spec(["batch", "heads"])
        attend = jax.shard_map(
            attend,
            mesh=layout.mesh,
            in_specs=(of_heads,) * 3 + (of_row,) * 2,
            out_specs=of_heads,
            check_vma=False,
        )
    first, last = spans
    return cast(tuple[jax.Array, ...], attend(q, own_k, own_v, first, last))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """The KV cache of all layers: the prompt's keys and values per group, the responses' per row.

    Each field is one array with a leading layer axis (scanned layers, and always for the kernel),
    or a tuple with one array per layer (unrolled layers). Prompts: [groups, kv_heads, length,
    head_dim]. Responses: values [groups, kv_heads, samples, length, head_dim], keys the same but
    with tokens along ``key_axis``. With one sample per prompt the samples axis is missing, except
    for the kernel: XLA would copy the cache to drop it. In int8 each array is a ``QuantizedCache``
    with scales [..., 1, length].

    Attributes:
      form: memory layout, of ``hjax.kernels.decode``. Kernels pad lengths to whole blocks.
      copies: of each KV head, above 1 if there are fewer KV heads than devices that split the
        heads, so that each device has one.
      prompts_in_rows: whether rows hold their prompts among their own tokens; the prompt arrays are
        empty then.
    """

    prompt_k: Any
    prompt_v: Any
    k: Any
    v: Any
    form: str = dataclasses.field(default=TILES, metadata={"static": True})
    copies: int = dataclasses.field(default=1, metadata={"static": True})
    prompts_in_rows: bool = dataclasses.field(default=False, metadata={"static": True})

    @property
    def key_axis(self) -> int:
        """The axis of ``k`` along which tokens lie, see ``hjax.kernels.cache_axis``."""
        length: int = jax.tree.leaves(self.v)[0].shape[-2]
        return kernels.key_axis(self.form, length)

    def read(self, layer: int | jax.Array) -> tuple[CacheArray, ...]:
        """Prompt keys, prompt values, response keys and response values of one layer."""
        parts = (self.prompt_k, self.prompt_v, self.k, self.v)
        if isinstance(self.k, tuple):
            return tuple(part[layer] for part in parts)
        return tuple(
            jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, layer, keepdims=False), part)
            for part in parts
        )

    def write(
        self, layer: int | jax.Array, k: jax.Array, v: jax.Array, position: jax.Array
    ) -> KVCache:
        """The cache with k and v of one token per row written at ``position``.

        Args:
          layer: its index.
          k, v: [groups, kv_heads, samples, head_dim], without samples if the cache has none.
          position: as of ``CacheMask``; int32 [] without samples.
        """

        def put(lead: tuple[Any, ...], axis: int, held: jax.Array, new: jax.Array) -> jax.Array:
            if not lead:
                return kernels.write_token(held, new, position, axis)
            if position.ndim == 0:
                new, at = cache_axis.token_update(new, position, axis)
                at = (*lead, *at)
                return jax.lax.dynamic_update_slice(held, new[None].astype(held.dtype), at)
            one = jax.lax.dynamic_index_in_dim(held, layer, keepdims=False)
            written = kernels.write_token(one, new, position, axis)
            return jax.lax.dynamic_update_index_in_dim(held, written, layer, 0)

        return self._with_written(layer, k, v, put)

    def write_rows(
        self, layer: int | jax.Array, k: jax.Array, v: jax.Array, position: jax.Array
    ) -> KVCache:
        """The cache with new tokens of each row written from its own column on.

        Args:
          layer: its index.
          k, v: [rows, new, kv_heads, head_dim].
          position: int32 [rows], column of the first new token; columns past the last are dropped.
        """
        rows, new = k.shape[:2]
        row, at = jnp.arange(rows)[:, None], position[:, None] + jnp.arange(new)

        def put(lead: tuple[Any, ...], axis: int, held: jax.Array, x: jax.Array) -> jax.Array:
            # Index the layer as well, so that only the new tokens are written.
            where = *lead, row, slice(None), *cache_axis.token_index(axis, at)
            return held.at[where].set(x.astype(held.dtype), mode="drop")

        return self._with_written(layer, k, v, put)

    def _with_written(
        self, layer: int | jax.Array, k: jax.Array, v: jax.Array, put: Callable[..., jax.Array]
    ) -> KVCache:
        """The cache with each array replaced by ``put(lead, axis, array, new)``; ``lead``: the
        index of the layer if the array has all layers, else empty."""

        def written(part: Any, new: jax.Array, axis: int) -> Any:
            own = isinstance(part, tuple)
            held = part[layer] if own else part
            lead = () if own else (layer,)

            def of(axis: int, _: bool, held: jax.Array, new: jax.Array) -> jax.Array:
                return put(lead, axis, held, new)

            made = int8_cache.map_arrays(of, held, int8_cache.quantize_like(held, new), axis=axis)
            return tuple(made if i == layer else x for i, x in enumerate(part)) if own else made

        k, v = written(self.k, k, self.key_axis), written(self.v, v, -2)
        return dataclasses.replace(self, k=k, v=v)

    @classmethod
    def create(
        cls, prompt: Any, samples: int, length: int, form: str = TILES, copies: int = 1
    ) -> KVCache:
        """An empty response cache of ``length`` tokens, with the prompts' keys and values.

        Args:
          prompt: (k, v) with a leading layer axis, or a tuple of (k, v) per layer.
          samples: rows per prompt.
          form, copies: as of the class.
        """

        sample_axis = (samples,) if samples > 1 or form in TPU_KERNELS else ()

        def empty(part: Any, keys: bool) -> Any:
            dtype = jax.tree.leaves(part)[0].dtype
            room = kernels.cache_capacity(form, length, kernels.OWN_BLOCK, dtype)

            def of(axis: int, scaled: bool, x: jax.Array) -> jax.Array:
                dim = 1 if scaled else x.shape[-1]
                made = jnp.zeros((*x.shape[:-2], *sample_axis, room, dim), x.dtype)
                return cache_axis.to_layout(made, axis)

            axis = kernels.key_axis(form, room) if keys else cache_axis.ROWS
            return int8_cache.map_arrays(of, part, axis=axis)

        pair = keys_and_values(prompt, form in TPU_KERNELS)
        prompt_k, prompt_v = (_prompt_cache(x, form, copies) for x in pair)
        return cls(prompt_k, prompt_v, empty(prompt_k, True), empty(prompt_v, False), form, copies)


def keys_and_values(kept: Any, stacked: bool) -> tuple[Any, Any]:
    """Keys and values that a prefill returned; ``stacked``: all layers in one array each."""
    if not (len(kept) and isinstance(kept[0], tuple)):
        k, v = kept
        return k, v
    k, v = (tuple(pair[i] for pair in kept) for i in (0, 1))
    if not stacked:
        return k, v
    return jax.tree.map(lambda *x: jnp.stack(x), *k), jax.tree.map(lambda *x: jnp.stack(x), *v)


def _prompt_cache(x: Any, form: str, copies: int) -> Any:
    """A prompt's keys or values, [..., kv_heads, length, head_dim], padded for the cache."""

    first = jax.tree.leaves(x)[0]
    there = first.shape[-2]
    missing = kernels.cache_capacity(form, there, kernels.PROMPT_BLOCK, first.dtype) - there

    def lay(axis: int, _: bool, x: jax.Array) -> jax.Array:
        if missing:
            sides = [(0, 0)] * x.ndim
            sides[axis] = 0, missing
            x = jnp.pad(x, sides)
        return _repeat_heads(x, copies, -3)

    return int8_cache.map_arrays(lay, x)


def _repeat_heads(x: jax.Array, copies: int, axis: int) -> jax.Array:
    return x if copies == 1 else jnp.repeat(x, copies, axis=axis)
