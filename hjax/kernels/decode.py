"""Attention of one new token per row, against a prompt that samples share and what each row has.

The plain reference, and which form of cache and kernel a platform takes; ``decode_tpu`` and
``decode_gpu`` have the kernels. Shapes of a layer: queries [groups, kv_heads, samples, per_kv,
head_dim], the heads of a key-value head together; the prompt's keys and values [groups, kv_heads,
prompt, head_dim]; each row's own values [groups, kv_heads, samples, length, head_dim] and its keys
like them, or with tokens along another axis (``cache_axis.laid``). Where they are kept in int8 a
``QuantizedCache`` stands for an array of them.
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
from hjax.kernels.int8_cache import Held

# Keys [tiles, head_dim, TILE], of a tile at most [head_dim, length]: a product with a few queries
# runs along what lies together in memory; faster on a CPU.
TILES = "tiles"
# Keys [length, head_dim]: a token is written in one piece.
ROWS = "rows"
# As ROWS, of all layers in one array, by the kernel of decode_tpu.
KERNEL = "kernel"
# The same, interpreted: for tests.
INTERPRETED = "interpreted"
KERNELS = (KERNEL, INTERPRETED)
# As ROWS, read by the kernel of decode_gpu; and interpreted.
FILLED = "filled"
FILLED_INTERPRETED = "filled, interpreted"
BY_PARTS = (FILLED, FILLED_INTERPRETED)
ON_GPUS = (ROWS, *BY_PARTS)
# Of the TPU's kernel: tokens of a row's own, and of a prompt, that are read together.
OWN_BLOCK, PROMPT_BLOCK = 128, 512
SUBLANES = 8  # rows of a register
NO_KERNEL = ("TPU v2", "TPU v3")  # their compiler refuses its products


def choose(device: Any, head_dim: int) -> str:
    """The form that a jax.Device decodes heads of a size in."""
    if device.platform == "cpu" or device.device_kind in NO_KERNEL:
        return TILES
    if device.platform == "tpu":
        return KERNEL
    # Of NVIDIA's GPUs a number; those before 8.0 multiply no bfloat16.
    capability = str(getattr(device, "compute_capability", ""))
    known = re.fullmatch(r"\d+\.\d+", capability) and float(capability) >= 8
    # JAX 0.12 says that it will give its Triton up; then XLA reads all columns again.
    there = importlib.util.find_spec("jax.experimental.pallas.triton") is not None
    return FILLED if known and there and filled_takes(head_dim) else ROWS


def key_axis(form: str, length: int) -> int:
    """Along which axis (``hjax.kernels.cache_axis``) so many tokens lie in arrays of rows' keys."""
    if form != TILES:
        return cache_axis.ROWS
    # The compiler would copy an array to drop the dimension of a single tile.
    return COLUMNS if length % TILE or length == TILE else cache_axis.TILES


def room(form: str, length: int, block: int, dtype: Any) -> int:
    """Tokens for which a form's cache has room: the TPU's kernel needs whole tiles, or whole
    blocks of so many."""
    if form not in KERNELS:
        return length
    whole = tile_of(dtype) if length <= block else block
    return math.ceil(length / whole) * whole


def tile_of(dtype: Any) -> int:
    """Tokens that the TPU's kernel writes together: the rows of a tile."""
    return SUBLANES * 4 // jnp.dtype(dtype).itemsize


def filled_takes(head_dim: int) -> bool:
    """Whether ``decode_gpu`` knows heads of this size: Triton's blocks are powers of two, and what
    a processor shares is small."""
    return head_dim in (16, 32, 64, 128, 256)


def bounds(mask: jax.Array) -> tuple[jax.Array, jax.Array]:
    """int32 [groups] twice, from where and up to where a row of bool [groups, length] is True."""
    begin = jnp.argmax(mask, axis=-1).astype(jnp.int32)
    return begin, begin + jnp.sum(mask, axis=-1, dtype=jnp.int32)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CacheMask:
    """Where each row stands.

    Attributes:
      begin, end: int32 [groups], of the prompt's tokens in their array: padding stands before,
        after, or on both sides.
      position: int32 [] or [groups, samples], index among the row's own tokens that the new one
        takes; it sees the prompt and its own tokens up to there. -1: a row without a sequence,
        which writes nothing and whose output is 0.
    """

    begin: jax.Array
    end: jax.Array
    position: jax.Array

    def prompt(self, size: int, window: int) -> jax.Array:
        """bool [groups, 1 or samples, size]: which of the prompt's keys a row sees; the window is
        that of ``ScoreOptions``."""
        at = jnp.arange(size)
        seen = (at >= self.begin[:, None]) & (at < self.end[:, None])
        if not window:
            return seen[:, None]
        before = self.end[:, None, None] - at + _by_row(self.position)
        return seen[:, None] & (before < window)

    def own(self, size: int, window: int) -> jax.Array:
        """bool [1 or groups, 1 or samples, size]: which of its own keys a row sees."""
        at, position = jnp.arange(size), _by_row(self.position)
        seen = at <= position
        return seen & (position - at < window) if window else seen


def _by_row(position: jax.Array) -> jax.Array:
    """[1 or groups, 1 or samples, 1]"""
    return jnp.reshape(position, (1, 1, 1)) if position.ndim == 0 else position[..., None]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SlotMask:
    """Where each row stands, of rows that began at different times and share prompts in any order.

    All rows write their token into one column of their caches, so that it is written in one piece,
    or each into one of its own; a row sees the columns since its own first. Of several new tokens
    each has a column after the one before.

    Attributes:
      begin, end: int32 [groups], as of ``CacheMask``.
      start: int32 [rows], the column of each row's first token.
      column: int32 [] or [rows], the new token's, or the first new one's.
      members: int32 [groups, samples], the rows that share a prompt; a number beyond the rows:
        none. None: row i has prompt i.
      place: int32 [rows], each row's number among ``members``, counted along both dimensions.
      parts: into which rows and groups are cut, each with its own numbers from 0: the data-parallel
        parts of a layout.
    """

    begin: jax.Array
    end: jax.Array
    start: jax.Array
    column: jax.Array
    members: jax.Array | None = None
    place: jax.Array | None = None
    parts: int = dataclasses.field(default=1, metadata={"static": True})

    def by_prompt(self, x: jax.Array) -> jax.Array:
        """[rows, ...] as [groups, samples, ...]; 0 where there is no row."""
        if self.members is None:
            return x[:, None]
        return taken(x, self.members, self.parts)

    def by_row(self, x: jax.Array) -> jax.Array:
        """[groups, samples, ...] as [rows, ...]."""
        if self.place is None:
            return x[:, 0]
        return taken(x.reshape(-1, *x.shape[2:]), self.place, self.parts)

    def own(self, size: int, window: int, new: int = 1) -> jax.Array:
        """bool [rows, new, size]: which of its own columns each new token of a row sees."""
        at = jnp.arange(size)
        column = jnp.reshape(self.column, (-1, 1, 1)) + jnp.arange(new)[:, None]
        seen = (at >= self.start[:, None, None]) & (at <= column)
        return seen & (column - at < window) if window else seen

    def prompt(self, size: int, window: int, new: int = 1) -> jax.Array:
        """bool [groups, 1 or samples, 1 or new, size]: which of the prompt's keys they see."""
        at = jnp.arange(size)
        seen = ((at >= self.begin[:, None]) & (at < self.end[:, None]))[:, None, None]
        if not window:
            return seen
        before = self.by_prompt(self.column - self.start)[..., None, None]
        before = before + jnp.arange(new)[:, None] + self.end[:, None, None, None] - at
        return seen & (before < window)


def taken(x: jax.Array, index: jax.Array, parts: int = 1) -> jax.Array:
    """Rows of ``x`` [rows, ...] by their numbers, int32 [...], 0 for a number beyond them.

    Args:
      parts: into which both are cut; the numbers count within a part.
    """
    cut = [a.reshape(parts, a.shape[0] // parts, *a.shape[1:]) for a in (x, index)]
    of = jax.vmap(lambda x, index: x.at[index].get(mode="fill", fill_value=0))(*cut)
    return of.reshape(index.shape + x.shape[1:])


def shared_prompt(
    q: jax.Array,
    prompt_k: Held,
    prompt_v: Held,
    own_k: Held,
    own_v: Held,
    prompt_seen: jax.Array,
    own_seen: jax.Array | None,
    scoring: ScoreOptions = ScoreOptions(),
    sinks: jax.Array | None = None,
    axis: int = cache_axis.ROWS,
    met: tuple[jax.Array, ...] | None = None,
) -> jax.Array:
    """Tokens of several samples against one copy of their prompt and each one's own, in one piece.

    One softmax over both parts, divided out after the products with the values: scores are never
    concatenated, and no operand but the queries is transposed.

    Args:
      q: [groups, kv_heads, samples, per_kv, tokens, head_dim].
      prompt_k, prompt_v: [groups, kv_heads, prompt, head_dim].
      own_k, own_v: [groups, kv_heads, samples, length, head_dim]; ``QuantizedCache`` as it may be.
      prompt_seen: bool [groups, samples, tokens, prompt], which of the prompt's keys a token sees.
      own_seen: bool [groups, samples, tokens, length], which of its own. Sizes of both but the
        last may be 1.
      scoring, sinks: as of ``attend``.
      axis: along which tokens lie in ``own_k``, see ``hjax.kernels.cache_axis``.
      met: what ``decode_gpu.filled`` gave of the own tokens, which are not looked at then: the
        largest score and the sum of exponentials below it, [groups, kv_heads, samples, per_kv,
        tokens], and the sum of values.

    Returns:
      like q, in its dtype.
    """
    groups, kv_heads, samples, per_kv, tokens, dim = q.shape
    prompt, wide = int8_cache.shape(prompt_v)[2], jnp.float32
    q = q * scoring.factor(dim)

    def hide(scores: jax.Array, seen: jax.Array) -> jax.Array:
        return jnp.where(seen[:, None, :, None], scoring.bend(scores), MASKED)

    # All samples' queries of a group meet the prompt's keys in one product.
    together = q.reshape(groups, kv_heads, samples * per_kv * tokens, dim)
    past = int8_cache.scores("xkqd,xkpd->xkqp", together, prompt_k)
    past = hide(past.reshape(groups, kv_heads, samples, per_kv, tokens, prompt), prompt_seen)
    if met is None:
        assert own_seen is not None
        own = hide(int8_cache.own_scores(q, own_k, axis), own_seen)
    highest = own.max(-1) if met is None else met[0]
    top = jnp.maximum(past.max(-1, initial=MASKED), highest)[..., None]
    top = jax.lax.stop_gradient(top)
    if sinks is not None:
        sink = sinks.astype(wide).reshape(kv_heads, 1, per_kv, 1, 1)
        top = jax.lax.stop_gradient(jnp.maximum(top, sink))
    past = jnp.exp(past - top)
    if met is None:
        own = jnp.exp(own - top)
        own_total = own.sum(-1, keepdims=True)
        own_out = int8_cache.values("xksgtu,xksud->xksgtd", own, own_v, q.dtype)
    else:
        factor = jnp.exp(met[0][..., None] - top)
        own_total, own_out = met[1][..., None] * factor, met[2] * factor
    total = past.sum(-1, keepdims=True) + own_total
    if sinks is not None:
        total = total + jnp.exp(sink - top)
    past = past.reshape(groups, kv_heads, together.shape[2], prompt)
    out = int8_cache.values("xkqp,xkpd->xkqd", past, prompt_v, q.dtype)
    out = out.reshape(q.shape) + own_out
    return (out / total).astype(q.dtype)


def attend_slots(
    q: jax.Array,
    prompt_k: Held,
    prompt_v: Held,
    own_k: Held,
    own_v: Held,
    slots: SlotMask,
    scoring: ScoreOptions = ScoreOptions(),
    sinks: jax.Array | None = None,
    met: tuple[jax.Array, ...] | None = None,
    axis: int = cache_axis.ROWS,
) -> jax.Array:
    """New tokens of each row, which are written already, as ``attend`` for ``SlotMask``.

    The queries that share a prompt meet it together; of each row a maximum, a sum and an output
    come back, never scores.

    Args:
      q: [rows, kv_heads, per_kv, new, head_dim].
      prompt_k, prompt_v: [groups, kv_heads, prompt, head_dim]; a prompt of 0: rows have their
        prompts among their own.
      own_k, own_v: [rows, kv_heads, length, head_dim], keys as ``axis`` says.
      slots: where each row stands.
      scoring, sinks: as of ``attend``.
      met: what ``decode_gpu.filled`` gave of the own tokens, which are not looked at then: the
        largest score and the sum of exponentials below it, [rows, kv_heads, per_kv, new], and the
        sum of values.
      axis: along which tokens lie in own_k, see ``hjax.kernels.cache_axis``.

    Returns:
      like q, in its dtype.
    """
    wide, window = jnp.float32, scoring.window
    q = q * scoring.factor(q.shape[-1])
    per_kv, new = q.shape[2:4]
    if met is None:
        own = int8_cache.own_scores(q, own_k, axis)
        seen = slots.own(own.shape[-1], window, new)[:, None, None]
        own = jnp.where(seen, scoring.bend(own), MASKED)
    sink = None if sinks is None else sinks.astype(wide).reshape(*q.shape[1:3], 1)
    groups, kv_heads, prompt, _ = int8_cache.shape(prompt_v)
    top, past = own.max(-1) if met is None else met[0], None

    # Queries are laid out anew, which are few; scores are not.
    def meet(x: jax.Array) -> jax.Array:
        """[rows, kv_heads, per_kv, new, ...] -> [groups, kv_heads, samples * per_kv * new, ...]"""
        x = slots.by_prompt(x).swapaxes(1, 2)
        return x.reshape(groups, kv_heads, -1, *x.shape[5:])

    def part(x: jax.Array) -> jax.Array:  # back again
        x = x.reshape(groups, kv_heads, -1, per_kv, new, *x.shape[3:])
        return slots.by_row(x.swapaxes(1, 2))

    if prompt:
        past = int8_cache.scores("xkqd,xkpd->xkqp", meet(q), prompt_k)
        seen = slots.prompt(prompt, window, new)
        if window:
            shape = (groups, seen.shape[1], per_kv, new, prompt)
            seen = jnp.broadcast_to(seen[:, :, None], shape)
        seen = seen.reshape(groups, 1, -1, prompt)
        past = jnp.where(seen, scoring.bend(past), MASKED)
        top = jnp.maximum(top, part(past.max(-1)))
    if sink is not None:
        top = jnp.maximum(top, sink)
    if met is None:
        own = jnp.exp(own - top[..., None])
        total = own.sum(-1)
        out = int8_cache.values("rkgtu,rkud->rkgtd", own, own_v, q.dtype)
    else:
        factor = jnp.exp(met[0] - top)
        total, out = met[1] * factor, met[2] * factor[..., None]
    if past is not None:
        past = jnp.exp(past - meet(top)[..., None])
        total = total + part(past.sum(-1))
    if sink is not None:
        total = total + jnp.exp(sink - top)
    if past is not None:
        answer = int8_cache.values("xkqp,xkpd->xkqd", past, prompt_v, q.dtype)
        out = out + part(answer)
    return (out / total[..., None]).astype(q.dtype)


def attend(
    q: jax.Array,
    prompt_k: Held,
    prompt_v: Held,
    own_k: Held,
    own_v: Held,
    seen: CacheMask,
    scoring: ScoreOptions = ScoreOptions(),
    sinks: jax.Array | None = None,
    met: tuple[jax.Array, ...] | None = None,
    axis: int = cache_axis.ROWS,
) -> jax.Array:
    """One token per row, which is written already.

    Args:
      q, prompt_k, prompt_v, own_k, own_v: of a layer.
      seen: where each row stands.
      scoring, sinks: of the layer, as ``hjax.models.attention_strategies.Attention`` says.
      met: as of ``shared_prompt``, of one token.
      axis: as of ``attend_slots``.

    Returns:
      like q, in its dtype.
    """
    past = seen.prompt(int8_cache.shape(prompt_v)[-2], scoring.window)[:, :, None]
    own = None
    if met is None:
        own = seen.own(int8_cache.shape(own_v)[-2], scoring.window)[:, :, None]
    out = shared_prompt(
        q[..., None, :], prompt_k, prompt_v, own_k, own_v, prompt_seen=past, own_seen=own,
        scoring=scoring, sinks=sinks, axis=axis, met=met,
    )[..., 0, :]  # fmt: skip
    if seen.position.ndim:
        out = jnp.where(seen.position[:, None, :, None, None] >= 0, out, 0.0)
    return out


def write(
    part: jax.Array, new: jax.Array, position: jax.Array, axis: int = cache_axis.ROWS
) -> jax.Array:
    """A layer's own keys or values with one token more per row.

    Args:
      part: [groups, kv_heads, samples, length, head_dim], or as ``axis`` says. With a position for
        all it may be without samples.
      new: [groups, kv_heads, samples, head_dim].
      position: as of ``CacheMask``; a row of -1 stays.
      axis: along which tokens lie, see ``hjax.kernels.cache_axis``.
    """
    if position.ndim == 0:
        new, at = cache_axis.token_at(new, position, axis)
        return jax.lax.dynamic_update_slice(part, new.astype(part.dtype), at)
    groups, _, samples, _ = new.shape
    group, sample = jnp.arange(groups)[:, None], jnp.arange(samples)[None]
    new = new.swapaxes(1, 2).astype(part.dtype)
    place = jnp.where(position < 0, cache_axis.tokens_of(axis, part.shape), position)
    where = group, slice(None), sample, *cache_axis.token_index(axis, place)
    return part.at[where].set(new, mode="drop")
