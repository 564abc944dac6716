"""Decode attention: a new token per row over a prompt that samples share and the row's own cache.

Here are the reference, the write to the KV cache, and the choice of a platform's cache layout and
kernel (its form); ``decode_tpu`` and ``decode_gpu`` have the kernels. Shapes of a layer: queries
[groups, kv_heads, samples, per_kv, head_dim]; the prompt's keys and values [groups, kv_heads,
prompt, head_dim]; each row's own values [groups, kv_heads, samples, length, head_dim] and its keys
alike, or with tokens along another axis (``cache_axis.to_layout``). An int8 KV cache has a
``QuantizedCache`` in place of an array.
"""

import dataclasses
import importlib.util
import math
import re
from typing import Any

import jax
import jax.numpy as jnp

from hjax.kernels import cache_axis, int8_cache
from hjax.kernels.attention import MASKED, ScoreOptions
from hjax.kernels.cache_axis import COLUMNS, TILE
from hjax.kernels.int8_cache import CacheArray
from hjax.kernels.verdict import ALL_FORMS, GPU_DECODING, TPU_DECODING

# Keys [tiles, head_dim, TILE], or [head_dim, length] up to one tile: a product with few queries
# reads contiguous memory; faster on a CPU.
TILES = "tiles"
# Keys [length, head_dim]: a token is contiguous.
ROWS = "rows"
# As ROWS, with all layers in one array, for the kernel of decode_tpu.
TPU_KERNEL = "kernel"
# The same, interpreted: for tests.
TPU_INTERPRETED = "interpreted"
TPU_KERNELS = (TPU_KERNEL, TPU_INTERPRETED)
# As ROWS, for the kernel of decode_gpu; and interpreted.
GPU_KERNEL = "filled"
GPU_INTERPRETED = "filled, interpreted"
GPU_KERNELS = (GPU_KERNEL, GPU_INTERPRETED)
GPU_FORMS = (ROWS, *GPU_KERNELS)
# Tokens in a block of the TPU kernel: of a row's own cache, and of a prompt.
OWN_BLOCK, PROMPT_BLOCK = 128, 512
SUBLANES = 8  # rows of a register
UNSUPPORTED_TPUS = ("TPU v2", "TPU v3")  # their compiler refuses the kernel's products


def choose_form(device: Any, head_dim: int, forms: frozenset[str] = ALL_FORMS) -> str:
    """The cache layout and kernel with which a jax.Device decodes heads of this size.

    Args:
      forms: that may be taken, see ``hjax.kernels.verdict``.
    """
    if device.platform == "cpu":
        return TILES
    if device.platform == "tpu":
        taken = TPU_DECODING in forms and device.device_kind not in UNSUPPORTED_TPUS
        return TPU_KERNEL if taken else TILES
    if GPU_DECODING not in forms:
        return ROWS
    # NVIDIA's GPUs have a number; those before 8.0 have no bfloat16 products.
    capability = str(getattr(device, "compute_capability", ""))
    known = re.fullmatch(r"\d+\.\d+", capability) and float(capability) >= 8
    # JAX 0.12 deprecates Pallas for Triton; without it XLA reads all columns.
    has_triton = importlib.util.find_spec("jax.experimental.pallas.triton") is not None
    return GPU_KERNEL if known and has_triton and gpu_kernel_takes(head_dim) else ROWS


def key_axis(form: str, length: int) -> int:
    """The axis (``hjax.kernels.cache_axis``) of ``length`` tokens in arrays of rows' keys."""
    if form != TILES:
        return cache_axis.ROWS
    # For a single tile the compiler would copy the array to drop its dimension.
    return COLUMNS if length % TILE or length == TILE else cache_axis.TILES


def cache_capacity(form: str, length: int, block: int, dtype: Any) -> int:
    """Cache length for ``length`` tokens: the TPU kernel needs whole tiles, or whole blocks of
    ``block`` tokens."""
    if form not in TPU_KERNELS:
        return length
    whole = tile_tokens(dtype) if length <= block else block
    return math.ceil(length / whole) * whole


def tile_tokens(dtype: Any) -> int:
    """Tokens that the TPU kernel writes at once: the rows of a tile."""
    return SUBLANES * 4 // jnp.dtype(dtype).itemsize


def gpu_kernel_takes(head_dim: int) -> bool:
    """Whether ``decode_gpu`` supports this head size: Triton's blocks are powers of two that fit in
    shared memory."""
    return head_dim in (16, 32, 64, 128, 256)


def mask_bounds(mask: jax.Array) -> tuple[jax.Array, jax.Array]:
    """int32 [groups] twice: start and end of the True range in a row of bool [groups, length]."""
    begin = jnp.argmax(mask, axis=-1).astype(jnp.int32)
    return begin, begin + jnp.sum(mask, axis=-1, dtype=jnp.int32)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CacheMask:
    """Attention mask over the KV cache, for rows that share prompts in groups of samples.

    Attributes:
      begin, end: int32 [groups], range of the prompt's tokens in their array; the rest is padding.
      position: int32 [] or [groups, samples], index of the new token among the row's own; it sees
        the prompt and own tokens up to there. -1: an empty row, which writes nothing and whose
        output is 0.
    """

    begin: jax.Array
    end: jax.Array
    position: jax.Array

    def prompt(self, size: int, window: int) -> jax.Array:
        """bool [groups, 1 or samples, size]: the prompt's keys that a row sees; ``window`` is that
        of ``ScoreOptions``."""
        at = jnp.arange(size)
        seen = (at >= self.begin[:, None]) & (at < self.end[:, None])
        if not window:
            return seen[:, None]
        before = self.end[:, None, None] - at + _by_row(self.position)
        return seen[:, None] & (before < window)

    def own(self, size: int, window: int) -> jax.Array:
        """bool [1 or groups, 1 or samples, size]: its own keys that a row sees."""
        at, position = jnp.arange(size), _by_row(self.position)
        seen = at <= position
        return seen & (position - at < window) if window else seen


def _by_row(position: jax.Array) -> jax.Array:
    """[1 or groups, 1 or samples, 1]"""
    return jnp.reshape(position, (1, 1, 1)) if position.ndim == 0 else position[..., None]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SlotMask:
    """Attention mask over the KV cache for slots (continuous batching), whose rows start at
    different times and share prompts in any order.

    All rows write their token into the same column, in one piece, or each into its own. A row sees
    the columns from its own first one on. Several new tokens take consecutive columns.

    Attributes:
      begin, end: int32 [groups], as of ``CacheMask``.
      start: int32 [rows], the column of each row's first token.
      column: int32 [] or [rows], of the new token, or of the first new one.
      members: int32 [groups, samples], the rows that share a prompt; a number beyond the rows
        means none. None: row i has prompt i.
      place: int32 [rows], each row's index in ``members``, flattened.
      parts: the data-parallel parts, each with rows and groups numbered from 0.
    """

    begin: jax.Array
    end: jax.Array
    start: jax.Array
    column: jax.Array
    members: jax.Array | None = None
    place: jax.Array | None = None
    parts: int = dataclasses.field(default=1, metadata={"static": True})

    def by_prompt(self, x: jax.Array) -> jax.Array:
        """Gather [rows, ...] to [groups, samples, ...]; 0 where there is no row."""
        return x[:, None] if self.members is None else gather_rows(x, self.members, self.parts)

    def by_row(self, x: jax.Array) -> jax.Array:
        """Gather [groups, samples, ...] to [rows, ...]."""
        if self.place is None:
            return x[:, 0]
        return gather_rows(x.reshape(-1, *x.shape[2:]), self.place, self.parts)

    def own(self, size: int, window: int, new: int = 1) -> jax.Array:
        """bool [rows, new, size]: its own columns that each new token of a row sees."""
        at = jnp.arange(size)
        column = jnp.reshape(self.column, (-1, 1, 1)) + jnp.arange(new)[:, None]
        seen = (at >= self.start[:, None, None]) & (at <= column)
        return seen & (column - at < window) if window else seen

    def prompt(self, size: int, window: int, new: int = 1) -> jax.Array:
        """bool [groups, 1 or samples, 1 or new, size]: the prompt's keys that they see."""
        at = jnp.arange(size)
        seen = ((at >= self.begin[:, None]) & (at < self.end[:, None]))[:, None, None]
        if not window:
            return seen
        before = self.by_prompt(self.column - self.start)[..., None, None]
        before = before + jnp.arange(new)[:, None] + self.end[:, None, None, None] - at
        return seen & (before < window)


def gather_rows(x: jax.Array, index: jax.Array, parts: int = 1) -> jax.Array:
    """Rows of ``x`` [rows, ...] by number, int32 [...]; 0 for numbers beyond the rows.

    Args:
      parts: data-parallel parts of both; numbers count within a part.
    """
    split = [a.reshape(parts, a.shape[0] // parts, *a.shape[1:]) for a in (x, index)]
    rows = jax.vmap(lambda x, index: x.at[index].get(mode="fill", fill_value=0))(*split)
    return rows.reshape(index.shape + x.shape[1:])


def attend_shared_prompt(
    q: jax.Array,
    prompt_k: CacheArray,
    prompt_v: CacheArray,
    own_k: CacheArray,
    own_v: CacheArray,
    prompt_seen: jax.Array,
    own_seen: jax.Array | None,
    scoring: ScoreOptions = ScoreOptions(),
    sinks: jax.Array | None = None,
    axis: int = cache_axis.ROWS,
    own_partial: tuple[jax.Array, ...] | None = None,
) -> jax.Array:
    """Attention of samples' tokens over one copy of their prompt and each sample's own cache.

    One softmax covers both parts and divides after the products with the values, so scores are
    never concatenated and only the queries are transposed.

    Args:
      q: [groups, kv_heads, samples, per_kv, tokens, head_dim].
      prompt_k, prompt_v: [groups, kv_heads, prompt, head_dim].
      own_k, own_v: [groups, kv_heads, samples, length, head_dim]; ``QuantizedCache`` as it may be.
      prompt_seen: bool [groups, samples, tokens, prompt], the prompt's keys that a token sees.
      own_seen: bool [groups, samples, tokens, length], its own. All sizes but the last may be 1.
      scoring, sinks: as of ``attend``.
      axis: along which tokens lie in ``own_k``, see ``hjax.kernels.cache_axis``.
      own_partial: partial softmax of the own tokens from ``decode_gpu.attend_own``, used instead of
        them: largest score and sum of exponentials, [groups, kv_heads, samples, per_kv, tokens],
        and the sum of values.

    Returns:
      like q, in its dtype.
    """
    groups, kv_heads, samples, per_kv, tokens, dim = q.shape
    prompt = int8_cache.shape(prompt_v)[2]
    q = q * scoring.query_scale(dim)
    # One product of all samples' queries of a group with the prompt's keys.
    together = q.reshape(groups, kv_heads, samples * per_kv * tokens, dim)
    past = int8_cache.scores("xkqd,xkpd->xkqp", together, prompt_k)
    past = past.reshape(groups, kv_heads, samples, per_kv, tokens, prompt)
    past = _hide(past, prompt_seen[:, None, :, None], scoring)
    if own_partial is None:
        assert own_seen is not None
        own = _hide(int8_cache.own_scores(q, own_k, axis), own_seen[:, None, :, None], scoring)
        highest = own.max(-1)
    else:
        own, highest = None, own_partial[0]
    top = jnp.maximum(past.max(-1, initial=MASKED), highest)[..., None]
    top = jax.lax.stop_gradient(top)
    if sinks is not None:
        sink = sinks.astype(jnp.float32).reshape(kv_heads, 1, per_kv, 1, 1)
        top = jax.lax.stop_gradient(jnp.maximum(top, sink))
    past = jnp.exp(past - top)
    own_total, own_out = _own_sums(own, own_partial, top, "xksgtu,xksud->xksgtd", own_v, q.dtype)
    total = past.sum(-1, keepdims=True) + own_total
    if sinks is not None:
        total = total + jnp.exp(sink - top)
    past = past.reshape(groups, kv_heads, together.shape[2], prompt)
    out = int8_cache.values("xkqp,xkpd->xkqd", past, prompt_v, q.dtype)
    return ((out.reshape(q.shape) + own_out) / total).astype(q.dtype)


def _hide(scores: jax.Array, seen: jax.Array, scoring: ScoreOptions) -> jax.Array:
    """Scores with their soft cap, ``MASKED`` where a key is not seen."""
    return jnp.where(seen, scoring.apply_softcap(scores), MASKED)


def _own_sums(
    own: jax.Array | None,
    own_partial: Any,
    top: jax.Array,
    spec: str,
    own_v: CacheArray,
    dtype: Any,
) -> tuple[jax.Array, jax.Array]:
    """Sums over the own tokens, relative to ``top`` [..., 1]: of exponentials, and of values.

    Args:
      own: scores of the own tokens; None: ``own_partial`` is their partial softmax.
      spec: of the product of exponentials and values.
    """
    if own is None:
        factor = jnp.exp(own_partial[0][..., None] - top)
        return own_partial[1][..., None] * factor, own_partial[2] * factor
    own = jnp.exp(own - top)
    return own.sum(-1, keepdims=True), int8_cache.values(spec, own, own_v, dtype)


@dataclasses.dataclass(frozen=True)
class _PromptGroups:
    """Rows that share a prompt, for products with it.

    Queries, which are few, are rearranged; scores are not.

    Attributes:
      slots: which rows share which prompt.
      shape: kv_heads, per_kv and new tokens of a row.
    """

    slots: SlotMask
    shape: tuple[int, int, int]

    def by_group(self, x: jax.Array) -> jax.Array:
        """[rows, kv_heads, per_kv, new, ...] -> [groups, kv_heads, samples * per_kv * new, ...]"""
        x = self.slots.by_prompt(x).swapaxes(1, 2)
        return x.reshape(x.shape[0], self.shape[0], -1, *x.shape[5:])

    def by_row(self, x: jax.Array) -> jax.Array:
        """The inverse of ``by_group``."""
        kv_heads, per_kv, new = self.shape
        x = x.reshape(x.shape[0], kv_heads, -1, per_kv, new, *x.shape[3:])
        return self.slots.by_row(x.swapaxes(1, 2))

    def scores(self, q: jax.Array, prompt_k: CacheArray, prompt: int, scoring: Any) -> jax.Array:
        """Masked scores of queries of rows with ``prompt`` keys, by group."""
        past = int8_cache.scores("xkqd,xkpd->xkqp", self.by_group(q), prompt_k)
        seen = self.slots.prompt(prompt, scoring.window, self.shape[2])
        if scoring.window:
            shape = (past.shape[0], seen.shape[1], *self.shape[1:], prompt)
            seen = jnp.broadcast_to(seen[:, :, None], shape)
        return _hide(past, seen.reshape(past.shape[0], 1, -1, prompt), scoring)


def attend_slots(
    q: jax.Array,
    prompt_k: CacheArray,
    prompt_v: CacheArray,
    own_k: CacheArray,
    own_v: CacheArray,
    slots: SlotMask,
    scoring: ScoreOptions = ScoreOptions(),
    sinks: jax.Array | None = None,
    own_partial: tuple[jax.Array, ...] | None = None,
    axis: int = cache_axis.ROWS,
) -> jax.Array:
    """Decode attention for slots: new tokens of each row, which are already in the cache.

    Queries that share a prompt are multiplied with it together. Per row a maximum, a sum and an
    output are gathered back, never scores.

    Args:
      q: [rows, kv_heads, per_kv, new, head_dim].
      prompt_k, prompt_v: [groups, kv_heads, prompt, head_dim]; a prompt of 0: rows have their
        prompts in their own cache.
      own_k, own_v: [rows, kv_heads, length, head_dim], keys as ``axis`` says.
      slots: the mask.
      scoring, sinks: as of ``attend``.
      own_partial: as of ``attend_shared_prompt``, [rows, kv_heads, per_kv, new].
      axis: along which tokens lie in own_k, see ``hjax.kernels.cache_axis``.

    Returns:
      like q, in its dtype.
    """
    q = q * scoring.query_scale(q.shape[-1])
    kv_heads, per_kv, new = q.shape[1:4]
    past = None
    if own_partial is None:
        own = int8_cache.own_scores(q, own_k, axis)
        seen = slots.own(own.shape[-1], scoring.window, new)[:, None, None]
        own = _hide(own, seen, scoring)
        top = own.max(-1)
    else:
        own, top = None, own_partial[0]
    sink = None if sinks is None else sinks.astype(jnp.float32).reshape(kv_heads, per_kv, 1)
    together = _PromptGroups(slots, (kv_heads, per_kv, new))
    if prompt := int8_cache.shape(prompt_v)[2]:
        past = together.scores(q, prompt_k, prompt, scoring)
        top = jnp.maximum(top, together.by_row(past.max(-1)))
    if sink is not None:
        top = jnp.maximum(top, sink)
    spec = "rkgtu,rkud->rkgtd"
    total, out = _own_sums(own, own_partial, top[..., None], spec, own_v, q.dtype)
    total = total[..., 0]
    if past is not None:
        past = jnp.exp(past - together.by_group(top)[..., None])
        total = total + together.by_row(past.sum(-1))
        past_out = int8_cache.values("xkqp,xkpd->xkqd", past, prompt_v, q.dtype)
        out = out + together.by_row(past_out)
    if sink is not None:
        total = total + jnp.exp(sink - top)
    return (out / total[..., None]).astype(q.dtype)


def attend(
    q: jax.Array,
    prompt_k: CacheArray,
    prompt_v: CacheArray,
    own_k: CacheArray,
    own_v: CacheArray,
    seen: CacheMask,
    scoring: ScoreOptions = ScoreOptions(),
    sinks: jax.Array | None = None,
    own_partial: tuple[jax.Array, ...] | None = None,
    axis: int = cache_axis.ROWS,
) -> jax.Array:
    """Decode attention (reference): one token per row, which is already in the cache.

    Args:
      q, prompt_k, prompt_v, own_k, own_v: of a layer.
      seen: the mask.
      scoring, sinks: of the layer, as ``hjax.models.attention_strategies.Attention`` says.
      own_partial: as of ``attend_shared_prompt``, of one token.
      axis: as of ``attend_slots``.

    Returns:
      like q, in its dtype.
    """
    past = seen.prompt(int8_cache.shape(prompt_v)[-2], scoring.window)[:, :, None]
    own = None
    if own_partial is None:
        own = seen.own(int8_cache.shape(own_v)[-2], scoring.window)[:, :, None]
    out = attend_shared_prompt(
        q[..., None, :], prompt_k, prompt_v, own_k, own_v, prompt_seen=past, own_seen=own,
        scoring=scoring, sinks=sinks, axis=axis, own_partial=own_partial,
    )[..., 0, :]  # fmt: skip
    if seen.position.ndim:
        out = jnp.where(seen.position[:, None, :, None, None] >= 0, out, 0.0)
    return out


def write_token(
    part: jax.Array, new: jax.Array, position: jax.Array, axis: int = cache_axis.ROWS
) -> jax.Array:
    """Write one token per row into a layer's own keys or values (the KV cache).

    Args:
      part: [groups, kv_heads, samples, length, head_dim], or as ``axis`` says. With a position for
        all it may be without samples.
      new: [groups, kv_heads, samples, head_dim].
      position: as of ``CacheMask``; a row of -1 is unchanged.
      axis: along which tokens lie, see ``hjax.kernels.cache_axis``.
    """
    if position.ndim == 0:
        new, at = cache_axis.token_update(new, position, axis)
        return jax.lax.dynamic_update_slice(part, new.astype(part.dtype), at)
    groups, _, samples, _ = new.shape
    group, sample = jnp.arange(groups)[:, None], jnp.arange(samples)[None]
    new = new.swapaxes(1, 2).astype(part.dtype)
    place = jnp.where(position < 0, cache_axis.token_capacity(axis, part.shape), position)
    where = group, slice(None), sample, *cache_axis.token_index(axis, place)
    return part.at[where].set(new, mode="drop")
