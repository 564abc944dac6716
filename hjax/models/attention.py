"""Attention strategies: what each token may see, and where keys and values are kept.

The decoder hands every layer's queries, keys and values to a strategy. Three cover training,
prefill and decoding; all compute scores and softmax in float32. Sequences of up to ``WHOLE`` places
are computed in one piece, with scores [length, length]: the quickest way where these are small.
Longer ones go to the platform's kernel (``hjax.kernels.attention``), which never holds them.

Shapes: queries ``[batch, length, heads, head_dim]``, keys and values
``[batch, length, kv_heads, head_dim]``; ``heads = kv_heads * q_per_kv``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from hjax.kernels.attention import MASKED, WHOLE, Kernel, Scoring, Sight, Split, attend
from hjax.sharding.layout import Layout

KeyValue = tuple[jax.Array, jax.Array]


class Attention(Protocol):
    """One way to attend; called once per layer inside the decoder."""

    def __call__(
        self,
        layer: int | jax.Array,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        cache: Any,
        scoring: Scoring = Scoring(),
        sinks: jax.Array | None = None,
    ) -> tuple[jax.Array, Any, KeyValue | None]:
        """Returns the output ``[batch, length, heads, head_dim]``, the cache, and what to keep.

        Args:
          scoring: how this layer's scores are made.
          sinks: [heads], a score per head that takes part in the softmax and has no value.
        """


@dataclasses.dataclass(frozen=True)
class Form:
    """How a platform attends.

    Attributes:
      kernel: of sequences longer than ``WHOLE``; None: all in one piece (the reference).
      layout: over whose devices rows, length and heads are split.
    """

    kernel: Kernel | None = None
    layout: Layout | None = None

    def pieces(self, length: int) -> bool:
        """Whether sequences of this length go to the kernel."""
        return self.kernel is not None and length > WHOLE

    def attend(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        mask: jax.Array,
        sinks: jax.Array | None,
        scoring: Scoring,
        sight: Sight = Sight(),
    ) -> jax.Array:
        """By the kernel; ``mask``: bool [batch, length], False at padding."""
        assert self.kernel is not None
        marks, split = mask.astype(jnp.int32), Split()
        if (layout := self.layout) is not None:
            names = ("batch", "length", "heads", "kv_heads")
            split = Split(layout.mesh, *(layout.axes(name) for name in names))
        return attend(self.kernel, q, k, v, marks, sinks, scoring, sight, split)

    def hold(self, x: jax.Array, *logical_axes: str | None) -> jax.Array:
        """``x`` split as the layout says, where it splits the length."""
        if self.layout is None or self.layout.ways("length") == 1:
            return x
        return self.layout.constrain(x, *logical_axes)


def _with_sink(
    scores: jax.Array, sinks: jax.Array | None, weigh: Callable[[jax.Array], jax.Array]
) -> jax.Array:
    """``weigh`` (a softmax) of scores [b, k, g, t, s] and a sink beside them."""
    if sinks is None:
        return weigh(scores)
    sink = sinks.astype(jnp.float32).reshape(scores.shape[1:3])[None, :, :, None, None]
    sink = jnp.broadcast_to(sink, (*scores.shape[:-1], 1))
    return weigh(jnp.concatenate([scores, sink], axis=-1))[..., :-1]


def _split_heads(q: jax.Array, kv_heads: int) -> jax.Array:
    """[batch, length, heads, dim] -> [batch, kv_heads, q_per_kv, length, dim]."""
    batch, length, heads, dim = q.shape
    return q.reshape(batch, length, kv_heads, heads // kv_heads, dim).transpose(0, 2, 3, 1, 4)


def _merge_heads(out: jax.Array) -> jax.Array:
    """[batch, kv_heads, q_per_kv, length, dim] -> [batch, length, heads, dim]."""
    batch, kv_heads, groups, length, dim = out.shape
    return out.transpose(0, 3, 1, 2, 4).reshape(batch, length, kv_heads * groups, dim)


def _scores(q: jax.Array, k: jax.Array, scoring: Scoring) -> jax.Array:
    """q [b, k, g, t, d], k [b, k, s, d] -> float32 [b, k, g, t, s], scaled and capped."""
    q = q * scoring.factor(q.shape[-1])
    scores = jnp.einsum("bkgtd,bksd->bkgts", q, k, preferred_element_type=jnp.float32)
    return scoring.bend(scores)


def _values(weights: jax.Array, v: jax.Array) -> jax.Array:
    return jnp.einsum("bkgts,bksd->bkgtd", weights.astype(v.dtype), v)


@dataclasses.dataclass(frozen=True)
class Causal:
    """Every token sees itself and the real tokens before it.

    Attributes:
      mask: bool [batch, length], False at padding.
      keep: return each layer's keys and values, [batch, kv_heads, length, head_dim] (prefill).
      form: how; in one piece, queries stay split over a length and keys and values are gathered.
    """

    mask: jax.Array
    keep: bool = False
    form: Form = Form()

    def __call__(
        self,
        layer: int | jax.Array,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        cache: Any,
        scoring: Scoring = Scoring(),
        sinks: jax.Array | None = None,
    ) -> tuple[jax.Array, Any, KeyValue | None]:
        form, pieces = self.form, self.form.pieces(q.shape[1])
        if pieces:
            out = form.attend(q, k, v, self.mask, sinks, scoring)
            if not self.keep:
                return out, cache, None
        else:
            q = form.hold(q, "batch", "length", "heads", None)
            k, v = (form.hold(x, "batch", None, "kv_heads", None) for x in (k, v))
        k, v = k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)
        if not pieces:
            whole = _causal(_split_heads(q, k.shape[1]), k, v, self.mask, scoring, sinks)
            out = _merge_heads(whole)
        return out, cache, (k, v) if self.keep else None


def _causal(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: jax.Array,
    scoring: Scoring,
    sinks: jax.Array | None,
) -> jax.Array:
    length = q.shape[3]
    visible = jnp.tril(jnp.ones((length, length), bool)) & mask[:, None, :]
    if scoring.window:
        visible &= jnp.triu(jnp.ones((length, length), bool), 1 - scoring.window)
    scores = jnp.where(visible[:, None, None], _scores(q, k, scoring), MASKED)
    return _values(_with_sink(scores, sinks, lambda x: jax.nn.softmax(x, axis=-1)), v)


@dataclasses.dataclass(frozen=True)
class SharedPrompt:
    """Rows of one prompt followed by its samples: ``[prompt | response 0 | response 1 | ...]``.

    Each response sees the prompt and its own past, so the prompt's forward and backward run once
    per group instead of once per sample.

    Attributes:
      prompt_mask: bool [groups, prompt_length].
      samples: responses per row, all of one (padded) length. Padding stands on the right of a
        response, so causality alone hides it.
      form: how.
    """

    prompt_mask: jax.Array
    samples: int
    form: Form = Form()

    def __call__(
        self,
        layer: int | jax.Array,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        cache: Any,
        scoring: Scoring = Scoring(),
        sinks: jax.Array | None = None,
    ) -> tuple[jax.Array, Any, KeyValue | None]:
        prompt = self.prompt_mask.shape[1]
        groups, total, heads, dim = q.shape
        kv_heads = k.shape[2]
        length = (total - prompt) // self.samples
        if self.form.pieces(prompt + length):
            answers = jnp.ones((groups, total - prompt), bool)
            mask = jnp.concatenate([self.prompt_mask, answers], axis=1)
            sight = Sight(prompt, length)
            out = self.form.attend(q, k, v, mask, sinks, scoring, sight)
            return out, cache, None

        def cut(x: jax.Array) -> tuple[jax.Array, ...]:
            # A split's backward pass is one concatenation; that of two slices pads and adds.
            return tuple(jax.lax.split(x, [prompt, total - prompt], axis=1))

        (qp, qr), (kp, kr), (vp, vr) = cut(q), cut(k), cut(v)
        kp, vp = kp.transpose(0, 2, 1, 3), vp.transpose(0, 2, 1, 3)
        out_prompt = _causal(
            _split_heads(qp, kv_heads), kp, vp, self.prompt_mask, scoring, sinks
        )

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
        out = _shared(
            by_sample(qr), kp, vp, own_k, own_v, past, visible, scoring=scoring, sinks=sinks
        )
        out = out.transpose(0, 2, 4, 1, 3, 5).reshape(groups, self.samples * length, heads, dim)
        return jnp.concatenate([_merge_heads(out_prompt), out], axis=1), cache, None


def _shared(
    q: jax.Array,
    prompt_k: jax.Array,
    prompt_v: jax.Array,
    k: jax.Array,
    v: jax.Array,
    past_visible: jax.Array,
    visible: jax.Array,
    keys: str = "xksud",
    scoring: Scoring = Scoring(),
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Attend to one copy of the prompt per group and to each sample's own tokens.

    q [groups, kv, samples, g, t, d]; prompt k, v [groups, kv, p, d]; k, v
    [groups, kv, samples, s, d]; past_visible [groups, t or 1, p]; visible [t, s]; ``keys``: k's
    dimensions, u being s; sinks [kv * g]. One softmax over both parts, divided out after the
    products with the values: scores are never concatenated, and no operand but the queries is
    transposed.
    """
    groups, kv_heads, samples, per_kv, length, dim = q.shape
    prompt = prompt_k.shape[2]
    q = q * scoring.factor(dim)
    # All samples' queries of a group meet the prompt's keys in one product.
    together = q.reshape(groups, kv_heads, samples * per_kv * length, dim)
    past = jnp.einsum(
        "xkqd,xkpd->xkqp", together, prompt_k, preferred_element_type=jnp.float32
    )
    past = past.reshape(groups, kv_heads, samples, per_kv, length, prompt)
    past = jnp.where(past_visible[:, None, None, None], scoring.bend(past), MASKED)
    own = jnp.einsum(f"xksgtd,{keys}->xksgtu", q, k, preferred_element_type=jnp.float32)
    own = jnp.where(visible, scoring.bend(own), MASKED)
    top = jax.lax.stop_gradient(jnp.maximum(past.max(-1), own.max(-1)))[..., None]
    if sinks is not None:
        sink = sinks.astype(jnp.float32).reshape(kv_heads, 1, per_kv, 1, 1)
        top = jax.lax.stop_gradient(jnp.maximum(top, sink))
    past, own = jnp.exp(past - top), jnp.exp(own - top)
    total = past.sum(-1, keepdims=True) + own.sum(-1, keepdims=True)
    if sinks is not None:
        total = total + jnp.exp(sink - top)
    past = past.astype(v.dtype).reshape(groups, kv_heads, samples * per_kv * length, prompt)
    wide = jnp.float32
    out = jnp.einsum("xkqp,xkpd->xkqd", past, prompt_v, preferred_element_type=wide)
    out = out.reshape(q.shape) + jnp.einsum(
        "xksgtu,xksud->xksgtd", own.astype(v.dtype), v, preferred_element_type=wide
    )
    return (out / total).astype(q.dtype)


@dataclasses.dataclass(frozen=True)
class Decode:
    """One new token per row against the shared prompt cache and each row's own cache.

    Attributes:
      prompt_mask: bool [groups, prompt_length].
      position: int32 [], the index in the response that this token takes; the cache
        (``KVCache``) is written there and read up to there.
    """

    prompt_mask: jax.Array
    position: jax.Array

    def __call__(
        self, layer: int | jax.Array, q: jax.Array, k: jax.Array, v: jax.Array, cache: KVCache
    ) -> tuple[jax.Array, KVCache, KeyValue | None]:
        rows, _, heads, dim = q.shape
        groups, kv_heads = self.prompt_mask.shape[0], k.shape[2]

        def by_sample(x: jax.Array) -> jax.Array:
            """[rows, 1, heads, dim] -> [groups, kv_heads, samples, heads / kv_heads, 1, dim]"""
            x = x.reshape(groups, rows // groups, kv_heads, -1, 1, dim)
            return x.transpose(0, 2, 1, 3, 4, 5)

        k, v = by_sample(k)[:, :, :, 0], by_sample(v)[:, :, :, 0]
        cache = cache.write(layer, k, v, self.position)
        prompt_k, prompt_v, own_k, own_v = cache.read(layer)
        visible = jnp.arange(own_v.shape[3]) <= self.position
        prompt = prompt_k, prompt_v
        out = _shared(
            by_sample(q), *prompt, own_k, own_v, self.prompt_mask[:, None], visible[None],
            keys="xksdu",
        )
        return out.transpose(0, 2, 4, 1, 3, 5).reshape(rows, 1, heads, dim), cache, None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """Keys and values of every layer: the prompt's once per group, the responses' per row.

    Each field is one array with a leading layer dimension (scanned layers), or a tuple with one
    array per layer (unrolled layers): the prompt's of shape [groups, kv_heads, length, head_dim],
    the responses' values [groups, kv_heads, samples, length, head_dim] and their keys
    [groups, kv_heads, samples, head_dim, length]: so the product with a few queries runs along
    what lies together in memory.
    """

    prompt_k: Any
    prompt_v: Any
    k: Any
    v: Any

    def read(self, layer: int | jax.Array) -> tuple[jax.Array, ...]:
        """Prompt keys and values and own keys and values of one layer."""
        parts = (self.prompt_k, self.prompt_v, self.k, self.v)
        if isinstance(self.k, tuple):
            return tuple(part[layer] for part in parts)
        return tuple(
            jax.lax.dynamic_index_in_dim(part, layer, keepdims=False) for part in parts
        )

    def write(
        self, layer: int | jax.Array, k: jax.Array, v: jax.Array, position: jax.Array
    ) -> KVCache:
        """The cache with k and v, [groups, kv_heads, samples, 1, head_dim], at ``position``."""
        k = k.swapaxes(3, 4)
        at_k, at_v = (0, 0, 0, 0, position), (0, 0, 0, position, 0)
        if isinstance(self.k, tuple):
            return dataclasses.replace(
                self,
                k=_replace(self.k, layer, jax.lax.dynamic_update_slice(self.k[layer], k, at_k)),
                v=_replace(self.v, layer, jax.lax.dynamic_update_slice(self.v[layer], v, at_v)),
            )
        return dataclasses.replace(
            self,
            k=jax.lax.dynamic_update_slice(self.k, k[None], (layer, *at_k)),
            v=jax.lax.dynamic_update_slice(self.v, v[None], (layer, *at_v)),
        )

    @classmethod
    def create(cls, prompt: Any, samples: int, length: int) -> KVCache:
        """An empty response cache of ``length`` beside the prompt's kept keys and values.

        Args:
          prompt: (k, v) with a leading layer dimension, or a tuple of (k, v) per layer.
        """

        def empty(x: jax.Array, *last: int) -> jax.Array:
            *lead, groups, kv_heads, _, _ = x.shape
            return jnp.zeros((*lead, groups, kv_heads, samples, *last), x.dtype)

        if len(prompt) and isinstance(prompt[0], tuple):
            prompt_k = tuple(k for k, _ in prompt)
            prompt_v = tuple(v for _, v in prompt)
        else:
            prompt_k, prompt_v = prompt
        return cls(
            prompt_k,
            prompt_v,
            jax.tree.map(lambda x: empty(x, x.shape[-1], length), prompt_k),
            jax.tree.map(lambda x: empty(x, length, x.shape[-1]), prompt_v),
        )


    @classmethod
    def filled(cls, kept: Any, samples: int, length: int, prompt: int) -> KVCache:
        """A cache of rows that have begun to answer.

        Args:
          kept: (k, v) of prompts and responses so far, a row per response, with a leading layer
            dimension, or a tuple of (k, v) per layer; samples of a prompt are consecutive.
          samples: rows per prompt.
          length: of a response in the end.
          prompt: tokens of a padded prompt; what follows is the response's.
        """

        def by_group(x: jax.Array) -> jax.Array:
            *lead, rows, kv_heads, total, dim = x.shape
            return x.reshape(*lead, rows // samples, samples, kv_heads, total, dim)

        def shared(x: jax.Array) -> jax.Array:
            return by_group(x)[..., 0, :, :prompt, :]

        def own(x: jax.Array) -> jax.Array:
            x = by_group(x)[..., prompt:, :].swapaxes(-4, -3)
            return jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [(0, length - x.shape[-2]), (0, 0)])

        def own_keys(x: jax.Array) -> jax.Array:
            return own(x).swapaxes(-1, -2)

        if len(kept) and isinstance(kept[0], tuple):
            k, v = (tuple(pair[i] for pair in kept) for i in (0, 1))
        else:
            k, v = kept
        prompt_k, prompt_v = jax.tree.map(shared, k), jax.tree.map(shared, v)
        return cls(prompt_k, prompt_v, jax.tree.map(own_keys, k), jax.tree.map(own, v))


def _replace(items: tuple, index: int | jax.Array, value: jax.Array) -> tuple:
    assert isinstance(index, int)
    return (*items[:index], value, *items[index + 1 :])
