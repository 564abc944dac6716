"""Attention strategies: which tokens each token attends to (causal, packed, shared prompt).

The decoder passes every layer's queries, keys and values to a strategy. The three here are for
training and prefill; ``hjax.models.decoding`` and ``append_attention`` have those that read a KV
cache. All compute scores and softmax in float32. Sequences of up to ``DENSE_LENGTH`` tokens build
the score matrix [length, length], which is fastest while it is small. Longer ones use the
platform's kernel (``hjax.kernels.attention``), which never builds it.

Shapes: queries ``[batch, length, heads, head_dim]``, keys and values
``[batch, length, kv_heads, head_dim]``; ``heads = kv_heads * q_per_kv``.
"""

import dataclasses
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from hjax.kernels import int8_cache
from hjax.kernels.attention import (
    DENSE_LENGTH,
    Kernel,
    MaskSpec,
    PackedPrompts,
    ScoreOptions,
    attend,
    dense_attention,
    merge_heads,
    reference,
    split_heads,
)
from hjax.kernels.decode import attend_shared_prompt
from hjax.kernels.int8_cache import CacheArray, QuantizedCache
from hjax.kernels.kernel_sharding import KernelSharding
from hjax.sharding.layout import Layout

KeyValue = tuple[CacheArray, CacheArray]
# The attended values, the cache, and the keys and values to return to the caller, if any.
AttentionOutput = tuple[jax.Array, Any, KeyValue | None]


class AttentionInputs(NamedTuple):
    """Queries, keys and values of one layer, and how it scores them.

    Attributes:
      layer: its number.
      q: [batch, length, heads, head_dim].
      k, v: [batch, length, kv_heads, head_dim].
      scoring: scale, softcap and window of this layer's scores.
      sinks: [heads], attention sinks: a score per head that joins the softmax and has no value;
        or None.
    """

    layer: int | jax.Array
    q: jax.Array
    k: jax.Array
    v: jax.Array
    scoring: ScoreOptions = ScoreOptions()
    sinks: jax.Array | None = None


class Attention(Protocol):
    """An attention strategy; called once per layer inside the decoder."""

    def __call__(self, heads: AttentionInputs, cache: Any) -> AttentionOutput:
        """Returns the output [batch, length, heads, head_dim], the cache, and the keys and values
        to return to the caller, if any."""


@dataclasses.dataclass(frozen=True)
class AttentionBackend:
    """The attention backend of a platform: its kernel for long sequences, and its layout.

    Attributes:
      kernel: for sequences longer than ``DENSE_LENGTH``; None: all are dense (the reference).
      layout: over whose devices rows, length and heads are split.
      packs_share: whether the kernel supports packs where responses share one copy of a prompt.
    """

    kernel: Kernel | None = None
    layout: Layout | None = None
    packs_share: bool = True

    def uses_kernel(self, length: int) -> bool:
        """Whether sequences of this length go to the kernel."""
        return self.kernel is not None and length > DENSE_LENGTH

    def supports_shared_prompts(self, length: int) -> bool:
        """Whether several responses in a pack of this length can share one copy of a prompt."""
        return self.packs_share or not self.uses_kernel(length)

    def attend(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        mask: jax.Array,
        sinks: jax.Array | None,
        scoring: ScoreOptions,
        mask_spec: MaskSpec = MaskSpec(),
        shared: PackedPrompts | None = None,
    ) -> jax.Array:
        """Run the kernel; ``mask`` [batch, length]: bool, False at padding, or segment numbers."""
        assert self.kernel is not None
        marks = mask.astype(jnp.int32)
        sharding = KernelSharding() if self.layout is None else self.layout.kernel_sharding
        return attend(self.kernel, q, k, v, marks, sinks, scoring, mask_spec, sharding, shared)

    def constrain(self, x: jax.Array, *logical_axes: str | None) -> jax.Array:
        """``x`` with a sharding constraint where the layout splits the length; else unchanged."""
        if self.layout is None or self.layout.shard_count("length") == 1:
            return x
        return self.layout.constrain(x, *logical_axes)


@dataclasses.dataclass(frozen=True)
class Causal:
    """Causal attention: every token sees itself and the real tokens before it.

    Attributes:
      mask: bool [batch, length], False at padding.
      keep: return each layer's keys and values, [batch, kv_heads, length, head_dim] (prefill).
      int8: return them as ``QuantizedCache`` and attend to the quantized values, so that prefill in
        one pass, in chunks and token by token give the same results.
      form: the backend. Without its kernel, context parallelism keeps queries split over the length
        and gathers keys and values.
    """

    mask: jax.Array
    keep: bool = False
    form: AttentionBackend = AttentionBackend()
    int8: bool = False

    def __call__(self, heads: AttentionInputs, cache: Any) -> AttentionOutput:
        _, q, k, v, scoring, sinks = heads
        form, uses_kernel = self.form, self.form.uses_kernel(q.shape[1])
        kept: KeyValue | None = None
        if self.int8:
            k, v, kept = _int8_rounded(k, v)
        if uses_kernel:
            out = form.attend(q, k, v, self.mask, sinks, scoring)
            if not self.keep or kept:
                return out, cache, kept
        else:
            q = form.constrain(q, "batch", "length", "heads", None)
            k, v = (form.constrain(x, "batch", None, "kv_heads", None) for x in (k, v))
        k, v = k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)
        if not uses_kernel:
            out = merge_heads(_causal(split_heads(q, k.shape[1]), k, v, self.mask, scoring, sinks))
        return out, cache, kept or ((k, v) if self.keep else None)


def _int8_rounded(k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array, KeyValue]:
    """Keys and values [batch, length, kv_heads, head_dim] rounded to int8, and their caches."""
    made = [int8_cache.quantize(x) for x in (k, v)]
    wide = [(numbers * scale).astype(k.dtype) for numbers, scale in made]
    kept = [QuantizedCache(n.transpose(0, 2, 1, 3), s.transpose(0, 2, 3, 1)) for n, s in made]
    return wide[0], wide[1], (kept[0], kept[1])


def _causal(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: jax.Array,
    scoring: ScoreOptions,
    sinks: jax.Array | None,
) -> jax.Array:
    length = q.shape[3]
    visible = jnp.tril(jnp.ones((length, length), bool)) & mask[:, None, :]
    if scoring.window:
        visible &= jnp.triu(jnp.ones((length, length), bool), 1 - scoring.window)
    return dense_attention(q, k, v, visible, scoring, sinks)


@dataclasses.dataclass(frozen=True)
class Packed:
    """Attention within packs (sequence packing): each token sees its own sequence up to itself.

    Attributes:
      segments: int32 [batch, length], numbers of the sequences in a row; 0: padding.
      positions: int32 [batch, length], of each token in its own sequence.
      prompts: int32 [batch, length], the segment of each token's prompt where responses, with
        segments of their own, share one copy of a prompt; None: each sequence has its own.
      form: the backend.
    """

    segments: jax.Array
    positions: jax.Array
    prompts: jax.Array | None = None
    form: AttentionBackend = AttentionBackend()

    def __call__(self, heads: AttentionInputs, cache: Any) -> AttentionOutput:
        _, q, k, v, scoring, sinks = heads
        length = q.shape[1]
        shared = None if self.prompts is None else PackedPrompts(self.prompts, self.positions)
        if self.form.uses_kernel(length):
            mask_spec = MaskSpec(packed=True)
            out = self.form.attend(q, k, v, self.segments, sinks, scoring, mask_spec, shared)
        else:
            out = reference(q, k, v, self.segments, sinks, scoring, shared=shared)
        return out, cache, None


@dataclasses.dataclass(frozen=True)
class SharedPrompt:
    """Attention of rows that share a prompt: ``[prompt | response 0 | response 1 | ...]``.

    Each response sees the prompt and its own past, so the prompt's forward and backward run once
    per group instead of once per sample.

    Attributes:
      prompt_mask: bool [groups, prompt_length].
      samples: responses per row, all padded on the right to one length, where causality hides it.
      form: the backend.
      keep, int8: as of ``Causal``; keys and values are in the order of a row.
    """

    prompt_mask: jax.Array
    samples: int
    form: AttentionBackend = AttentionBackend()
    keep: bool = False
    int8: bool = False

    def positions(self, length: int) -> jax.Array:
        """int32 [groups, prompt + samples * length], each token's position in its sequence."""
        after = jnp.sum(self.prompt_mask, axis=-1, dtype=jnp.int32)[:, None]
        response_mask = jnp.tile(after + jnp.arange(length, dtype=jnp.int32), (1, self.samples))
        prompts = jnp.cumsum(self.prompt_mask, axis=-1, dtype=jnp.int32) - 1
        return jnp.concatenate([jnp.maximum(prompts, 0), response_mask], axis=1)

    def __call__(self, heads: AttentionInputs, cache: Any) -> AttentionOutput:
        _, q, k, v, scoring, sinks = heads
        prompt = self.prompt_mask.shape[1]
        groups, total, _, dim = q.shape
        kv_heads = k.shape[2]
        length = (total - prompt) // self.samples
        kept: KeyValue | None = None
        if self.int8:
            k, v, kept = _int8_rounded(k, v)
        elif self.keep:
            kept = k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)
        if self.form.uses_kernel(prompt + length):
            response_mask = jnp.ones((groups, total - prompt), bool)
            mask = self.form.constrain(
                jnp.concatenate([self.prompt_mask, response_mask], axis=1), "batch", None
            )
            mask_spec = MaskSpec(prompt, length)
            out = self.form.attend(q, k, v, mask, sinks, scoring, mask_spec)
            return out, cache, kept

        def cut(x: jax.Array) -> tuple[jax.Array, ...]:
            # The gradient of a split is one concatenation; that of two slices pads and adds.
            return tuple(jax.lax.split(x, [prompt, total - prompt], axis=1))

        (qp, qr), (kp, kr), (vp, vr) = cut(q), cut(k), cut(v)
        kp, vp = kp.transpose(0, 2, 1, 3), vp.transpose(0, 2, 1, 3)
        out_prompt = _causal(split_heads(qp, kv_heads), kp, vp, self.prompt_mask, scoring, sinks)

        def by_sample(x: jax.Array) -> jax.Array:
            x = x.reshape(groups, self.samples, length, kv_heads, -1, dim)
            return x.transpose(0, 3, 1, 4, 2, 5)

        visible = jnp.tril(jnp.ones((length, length), bool))
        past = self.prompt_mask[:, None]
        if scoring.window:
            visible &= jnp.triu(visible, 1 - scoring.window)
            distance = prompt + jnp.arange(length)[:, None] - jnp.arange(prompt)
            past = past & (distance < scoring.window)
        own_k, own_v = by_sample(kr)[:, :, :, 0], by_sample(vr)[:, :, :, 0]
        out = attend_shared_prompt(
            by_sample(qr), kp, vp, own_k, own_v, past[:, None], visible[None, None], scoring, sinks
        )
        out = out.transpose(0, 2, 4, 1, 3, 5).reshape(groups, self.samples * length, -1, dim)
        return jnp.concatenate([merge_heads(out_prompt), out], axis=1), cache, kept
