"""Attention of one new token per row, against a prompt that samples share and what each row has.

The plain reference, and which form of cache and kernel a platform takes; ``decode_tpu`` has the
kernel. Shapes of a layer: queries [groups, kv_heads, samples, per_kv, head_dim], the heads of a
key-value head together; the prompt's keys and values [groups, kv_heads, prompt, head_dim]; each
row's own values [groups, kv_heads, samples, length, head_dim] and its keys like them, or with the
last two dimensions exchanged.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from hjax.kernels.attention import Scoring, shared_prompt

# Keys [head_dim, length]: a product with a few queries runs along what lies together in memory,
# faster on a CPU.
COLUMNS = "columns"
# Keys [length, head_dim]: a token is written in one piece.
ROWS = "rows"
# As ROWS, of all layers in one array, by the kernel of decode_tpu.
KERNEL = "kernel"
# The same, interpreted: for tests.
INTERPRETED = "interpreted"
NO_KERNEL = ("TPU v2", "TPU v3")  # their compiler refuses its products


def choose(device: Any) -> str:
    """The form that a jax.Device decodes in."""
    if device.platform == "cpu" or device.device_kind in NO_KERNEL:
        return COLUMNS
    return KERNEL if device.platform == "tpu" else ROWS


def bounds(mask: jax.Array) -> tuple[jax.Array, jax.Array]:
    """int32 [groups] twice, from where and up to where a row of bool [groups, length] is True."""
    begin = jnp.argmax(mask, axis=-1).astype(jnp.int32)
    return begin, begin + jnp.sum(mask, axis=-1, dtype=jnp.int32)


@dataclasses.dataclass(frozen=True)
class Seen:
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
        that of ``Scoring``."""
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


def attend(
    q: jax.Array,
    prompt_k: jax.Array,
    prompt_v: jax.Array,
    own_k: jax.Array,
    own_v: jax.Array,
    seen: Seen,
    scoring: Scoring = Scoring(),
    sinks: jax.Array | None = None,
    keys: str = "xksud",
) -> jax.Array:
    """One token per row, which is written already.

    Args:
      q, prompt_k, prompt_v, own_k, own_v: of a layer.
      seen: where each row stands.
      scoring, sinks: of the layer, as ``hjax.models.attention.Attention`` says.
      keys: as of ``hjax.kernels.attention.shared_prompt``.

    Returns:
      like q, in its dtype.
    """
    past = seen.prompt(prompt_k.shape[2], scoring.window)[:, :, None]
    own = seen.own(own_v.shape[3], scoring.window)[:, :, None]
    parts = prompt_k, prompt_v, own_k, own_v, past, own
    out = shared_prompt(q[..., None, :], *parts, scoring, sinks, keys)[..., 0, :]
    if seen.position.ndim:
        out = jnp.where(seen.position[:, None, :, None, None] >= 0, out, 0.0)
    return out


def write(
    part: jax.Array, new: jax.Array, position: jax.Array, columns: bool = False
) -> jax.Array:
    """A layer's own keys or values with one token more per row.

    Args:
      part: [groups, kv_heads, samples, length, head_dim]; with ``columns`` the last two exchanged.
      new: [groups, kv_heads, samples, head_dim].
      position: as of ``Seen``; a row of -1 stays.
    """
    if position.ndim == 0:
        at = (0, 0, 0, 0, position) if columns else (0, 0, 0, position, 0)
        new = jnp.expand_dims(new, 4 if columns else 3)
        return jax.lax.dynamic_update_slice(part, new.astype(part.dtype), at)
    groups, _, samples, _ = new.shape
    group, sample = jnp.arange(groups)[:, None], jnp.arange(samples)[None]
    new = new.swapaxes(1, 2).astype(part.dtype)
    place = jnp.where(position < 0, part.shape[4 if columns else 3], position)
    if columns:
        return part.at[group, :, sample, :, place].set(new, mode="drop")
    return part.at[group, :, sample, place].set(new, mode="drop")
