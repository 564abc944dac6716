"""Slot layout: how sequences are inserted into a state's arrays, and how slots are compacted.

These are the parts of ``hjax.rollout.engine``'s programs ``insert`` and ``move`` that work on the
KV cache's arrays and the tables beside it. Groups and rows are numbered from 0 in each of ``parts``
equal parts, so that no array leaves its devices.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from hjax.kernels import cache_axis, decode
from hjax.kernels.decode import SlotMask
from hjax.rollout.slot_state import RunningSequences


@dataclasses.dataclass(frozen=True)
class SlotLayout:
    """How the arrays of an engine's states lie.

    Attributes:
      engine: an ``Engine``. Each of its parts numbers its own groups and rows. Its arrays are of
        all layers (``stacked``), or one per layer. With the kernel each row's tokens begin in its
        own column 0 and a group's rows lie together; with ``row_columns`` they begin there;
        else all rows write into one column.
    """

    engine: Any

    def insert_rows(
        self,
        columns: tuple[int, int] | None,
        slots: SlotMask,
        running: RunningSequences,
        tokens: jax.Array,
        new: RunningSequences,
        groups: jax.Array,
        rows: jax.Array,
    ) -> tuple[SlotMask, RunningSequences, jax.Array]:
        """What ``insert`` changes except the cache, and ``edges`` for ``entered``.

        ``columns``: of the state's prompts and of those that were prefilled; None: rows have their
        prompts among their own tokens. ``tokens``: int32 [groups], of each prompt.
        """
        at_group, at_row = (functools.partial(self.scatter, where) for where in (groups, rows))
        there = new.drawn - 1  # tokens of a response that are in the cache
        row_columns = self.engine.row_columns
        start = jnp.zeros(rows.shape, jnp.int32) if row_columns else slots.column - there
        edges = start
        if columns is None:
            begin = end = jnp.zeros(groups.shape, jnp.int32)
            edges = tokens if row_columns else jnp.broadcast_to(slots.column, tokens.shape)
            start = edges - tokens
        else:
            # Without the kernel, prompts end where the state's prompts end.
            held, read = columns
            end = jnp.full(groups.shape, read if self.engine.uses_kernel else held, jnp.int32)
            begin = end - tokens
        slots = dataclasses.replace(
            slots,
            begin=at_group(slots.begin, begin),
            end=at_group(slots.end, end),
            start=at_row(slots.start, start),
        )
        return slots, jax.tree.map(at_row, running, new), edges

    def insert_kv(
        self,
        forward: tuple[bool, int, bool, bool],
        old: jax.Array,
        x: jax.Array,
        at: jax.Array,
        edges: jax.Array,
    ) -> jax.Array:
        """An array of the cache with ``x`` inserted at numbers ``at`` of its groups or rows.

        ``kind``: whether these are rows; the axis of the array that has columns; whether it holds
        scales; and whether ``x`` is of resumed responses, from ``edges`` on; prompts end before.
        """
        rows, axis, scaled, resumed = forward
        x = x.swapaxes(-1, -2) if scaled else x
        one = functools.partial(self._tokens_in_rows, axis, resumed, at, edges)
        if not rows:
            one = functools.partial(self._prompts_in_groups, scaled, at)
        return jax.vmap(one)(old, x) if self.engine.stacked else one(old, x)

    def _prompts_in_groups(
        self, scaled: bool, at: jax.Array, old: jax.Array, x: jax.Array
    ) -> jax.Array:
        more = old.shape[-1 if scaled else -2] - x.shape[-2]
        sides = (0, more) if self.engine.uses_kernel else (more, 0)
        x = jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [sides, (0, 0)])
        return self.scatter(at, old, x.swapaxes(-1, -2) if scaled else x)

    def _tokens_in_rows(
        self,
        axis: int,
        resumed: bool,
        at: jax.Array,
        edges: jax.Array,
        old: jax.Array,
        x: jax.Array,
    ) -> jax.Array:
        """Insert prompts, which end in the last column of ``x``, or responses, which begin in its
        first; the rows' old tokens are overwritten."""
        read, size = x.shape[2], cache_axis.token_capacity(axis, old.shape)
        width = cache_axis.TILE if axis == cache_axis.TILES else 1
        if self.engine.row_columns:  # nothing follows them yet
            size = min(size, -(-read // width) * width)
        if resumed and self.engine.uses_kernel:  # by group, from column 0 on
            x = x.reshape(at.shape[0], -1, *x.shape[1:]).swapaxes(1, 2)[..., :size, :]
        else:
            column = jnp.arange(size) - edges[:, None] + (0 if resumed else read)
            x = jnp.take_along_axis(x, jnp.clip(column, 0, read - 1)[:, None, :, None], axis=2)
            if self.engine.uses_kernel:  # with a dimension for samples
                x = x[:, :, None]
        here = axis % old.ndim
        held = jax.lax.slice_in_dim(old, 0, size // width, axis=here)
        held = self.scatter(at, held, cache_axis.to_layout(x, axis))
        return jax.lax.dynamic_update_slice_in_dim(old, held, 0, here)

    def scatter(self, index: jax.Array, old: jax.Array, new: jax.Array) -> jax.Array:
        """``old`` [many, ...] with ``new`` [some, ...] at numbers of its parts."""
        parts = self.engine.parts
        held, at, entering = (
            x.reshape(parts, x.shape[0] // parts, *x.shape[1:]) for x in (old, index, new)
        )
        put = jax.vmap(lambda old, at, new: old.at[at].set(new.astype(old.dtype), mode="drop"))
        return put(held, at, entering).reshape(old.shape)

    def select_rows(
        self,
        slots: SlotMask,
        running: RunningSequences,
        rows: jax.Array | None,
        groups: jax.Array | None,
        first: jax.Array | None,
    ) -> tuple[SlotMask, RunningSequences]:
        """What ``move`` changes except the cache."""

        def of(x: jax.Array, index: jax.Array | None) -> jax.Array:
            return x if index is None else decode.gather_rows(x, index, self.engine.parts)

        column, start = slots.column, of(slots.start, rows)
        if first is not None:
            column, start = column - first, start - first
        begin, end = of(slots.begin, groups), of(slots.end, groups)
        slots = dataclasses.replace(slots, begin=begin, end=end, start=start, column=column)
        # A slot that is not one of the old ones is free.
        done = ~of(~running.done, rows)
        running = jax.tree.map(lambda x: of(x, rows), running)
        return slots, dataclasses.replace(running, done=done)

    def select_kv(
        self,
        x: jax.Array,
        columns: tuple[int, int, int],
        index: jax.Array | None,
        first: jax.Array | None,
    ) -> jax.Array:
        """Rows of an array of the cache, with other columns. ``columns``: the axis they are along,
        the axis they will be along, and their number; 0: unchanged."""
        axis, after, length = columns
        if index is not None:
            some = functools.partial(decode.gather_rows, index=index, parts=self.engine.parts)
            x = jax.vmap(some)(x) if self.engine.stacked else some(x)
        if not length and first is None:
            return x
        if axis == after and axis != cache_axis.TILES:
            return _columns(x, axis, length or x.shape[axis], first)
        length = length or cache_axis.token_capacity(axis, x.shape)
        if axis == after and first is None:
            return _columns(x, axis, length // cache_axis.TILE, None)
        x = _columns(cache_axis.to_rows(x, axis), cache_axis.ROWS, length, first)
        return cache_axis.to_layout(x, after)


def _columns(x: jax.Array, axis: int, length: int, first: jax.Array | None) -> jax.Array:
    """``length`` columns along an axis, from ``first`` on."""
    if length > x.shape[axis]:
        more = [(0, 0)] * x.ndim
        more[axis] = (0, length - x.shape[axis])
        x = jnp.pad(x, more)
    if first is not None:
        x = jnp.roll(x, -first, axis)
    return jax.lax.slice_in_dim(x, 0, length, axis=axis)


def split_resumed(
    prompt: int, samples: int, which: int, _: int, scaled: bool, x: jax.Array
) -> jax.Array:
    """Split keys or values [..., groups, heads, prompt + samples * width, dim]: ``which`` 0 gives
    those of prompts [..., groups, heads, prompt, dim], 1 those of resumed responses [..., rows,
    heads, width, dim]; scales have tokens last."""
    x = x.swapaxes(-1, -2) if scaled else x
    *lead, groups, heads, _, dim = x.shape
    if which == 0:
        x = x[..., :prompt, :]
    else:
        x = x[..., prompt:, :].reshape(*lead, groups, heads, samples, -1, dim)
        x = jnp.moveaxis(x, -3, -4).reshape(*lead, groups * samples, heads, -1, dim)
    return x.swapaxes(-1, -2) if scaled else x
