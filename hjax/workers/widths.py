"""Length buckets: rows of alike lengths share a pass, which is only as wide as they need.

The rows of a padded batch are put in order of length on the host, and each pass gets the smallest
of a few widths that holds its rows. A pass has one width on all devices. All widths are branches
of one program, so that lengths that vary compile nothing anew.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hjax.models.dropout import KEY as DROPOUT
from hjax.sharding.arrays import place
from hjax.sharding.layout import Layout

KEY = "widths"  # a batch's entry

Size = tuple[int, int]  # places of a row's prompt, and of its response

# What has a prompt's width, of the rest of [rows, length, ...] a response's.
_OF_PROMPTS = ("prompts", "prompt_mask", "counted_prompts")
# Responses this long are cut at multiples of it: what a tile of a TPU holds.
_TILE = 128


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Widths:
    """Which rows of a batch share a pass, and how wide each pass is.

    Attributes:
      order: int32 [rows], the batch's row in each place; places of a data-parallel part follow each
        other, and in it those of a pass.
      chosen: int32 [passes], the number in ``sizes`` of each pass's width.
      padding: float32 scalar, share of the computed places that hold no token.
      sizes: what a pass may be cut to, rising; the last one cuts nothing.
    """

    order: Any
    chosen: Any
    padding: Any
    sizes: tuple[Size, ...] = dataclasses.field(metadata={"static": True})

    def ordered(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """The batch without its widths, its rows in their places; inside jit."""

        def rows(x: jax.Array) -> jax.Array:
            return x[self.order] if x.ndim else x

        return {key: jax.tree.map(rows, x) for key, x in batch.items() if key != KEY}

    def cutting(
        self, compute: Callable[[Any], Any], widen: bool = False
    ) -> Callable[[tuple[Any, jax.Array]], Any]:
        """``compute`` of a pass cut to its width, given as (pass, its number in ``chosen``).

        Args:
          compute: the function of a pass.
          widen: it makes arrays [rows, length, ...], which get the uncut length, zeros behind.
        """

        def branch(size: Size) -> Callable[[Any], Any]:
            def run(part: Any) -> Any:
                made = compute(_cut(part, size))
                return _widened(made, size[1], _length(part)) if widen else made

            return run

        branches = [branch(size) for size in self.sizes]
        return lambda given: jax.lax.switch(given[1], branches, given[0])


def _widened(made: Any, narrow: int, wide: int) -> Any:
    """Arrays [rows, narrow, ...] as [rows, wide, ...]; others as they are."""

    def pad(x: jax.Array) -> jax.Array:
        if x.ndim < 2 or x.shape[1] != narrow:
            return x
        return jnp.pad(x, ((0, 0), (0, wide - narrow), *[(0, 0)] * (x.ndim - 2)))

    return jax.tree.map(pad, made)


def _length(batch: Mapping[str, Any]) -> int:
    """Places of responses, or of whole sequences where a batch has these."""
    return batch["responses" if "responses" in batch else "tokens"].shape[1]


def _cut(part: Mapping[str, Any], size: Size) -> dict[str, Any]:
    """The last places of a pass's prompts and the first of its responses."""
    prompt, response = size
    length = _length(part)

    def cut(key: str, x: jax.Array) -> jax.Array:
        if key in _OF_PROMPTS:
            return x[:, x.shape[1] - prompt :]
        along = x.ndim > 1 and x.shape[1] == length and key != DROPOUT
        return x[:, :response] if along else x

    return {key: jax.tree.map(functools.partial(cut, key), x) for key, x in part.items()}


class Sorter:
    """Makes the widths of a role's batches.

    Args:
      buckets: widths that a pass may be cut to.
      layout: the train layout.
    """

    def __init__(self, buckets: int, layout: Layout):
        self._buckets = buckets
        self._placed = layout.replicated
        self._parts = layout.ways("batch")

    def __call__(
        self, prompts: np.ndarray, responses: np.ndarray, widths: Size, passes: int, *how: int
    ) -> Widths:
        """The widths of a batch's rows, on the devices that compute them.

        Args:
          prompts, responses: int [rows], tokens of each.
          widths: of the batch, padding included.
          passes: into which it goes.
          how: as ``chunk`` and ``share`` of ``make_widths``.
        """
        given = prompts, responses, widths, self._buckets, self._parts, passes
        return jax.tree.map(lambda x: place(x, self._placed), make_widths(*given, *how))

    def abstract(self, rows: int, widths: Size, passes: int) -> Widths:
        """Shapes of the widths of so many rows."""

        def array(dtype: Any, *shape: int) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape, dtype, sharding=self._placed)

        arrays = array(jnp.int32, rows), array(jnp.int32, passes), array(jnp.float32)
        return Widths(*arrays, sizes=sizes_of(widths, self._buckets, False))


def sizes_of(widths: Size, buckets: int, both: bool) -> tuple[Size, ...]:
    """Equal steps up to whole rows.

    Args:
      widths: of a batch's prompts and responses.
      buckets: most steps.
      both: prompts are cut too, as far as responses; else they stay whole.
    """
    prompt, response = widths
    tile = _TILE if response >= buckets * _TILE else 1
    found = []
    for step in range(1, buckets + 1):
        cut = min(-(-response * step // (buckets * tile)) * tile, response)
        found.append((-(-prompt * step // buckets) if both else prompt, cut))
    return tuple(dict.fromkeys(found))


def make_widths(
    prompts: np.ndarray,
    responses: np.ndarray,
    widths: Size,
    buckets: int,
    parts: int,
    passes: int,
    chunk: int = 1,
    share: int = 1,
) -> Widths:
    """Rows in order of length, and of each pass the smallest width that holds its rows.

    Prompts are cut along with responses where that leaves fewer places than whole prompts do.

    Args:
      prompts, responses: int [rows], tokens.
      widths: of the batch's prompts and responses, padding included.
      buckets: most widths.
      parts: data-parallel parts.
      passes: into which the batch goes; the rows divide by parts times passes.
      chunk: consecutive rows that stay together; divides a part's rows of a pass.
      share: rows of a chunk that stand behind one prompt.
    """
    together = [x.reshape(-1, chunk).max(axis=1) for x in (prompts, responses)]
    rows = len(prompts)
    best, least = None, 0
    for both in (False, True):
        sizes = sizes_of(widths, buckets, both)
        ends = [np.array(side) for side in zip(*sizes)]
        needed = np.max([np.searchsorted(e, t) for e, t in zip(ends, together)], axis=0)
        # By width, and in it by length: which rows share a pass does not hang on their places.
        order = np.lexsort((together[0], together[1], needed))
        chosen = needed[order].reshape(passes, -1).max(axis=1)
        places = sum(sizes[n][0] / share + sizes[n][1] for n in chosen) * (rows // passes)
        if best is None or places < least:
            best, least = (order, chosen, sizes), places
    assert best is not None
    order, chosen, sizes = best
    # [passes, parts, chunks] -> [parts, passes, chunks]
    order = order.reshape(passes, parts, -1).swapaxes(0, 1).reshape(-1, 1)
    order = (order * chunk + np.arange(chunk)).reshape(-1)
    tokens = prompts.sum() / share + responses.sum()
    return Widths(
        order.astype(np.int32),
        chosen.astype(np.int32),
        np.float32(1 - tokens / least),
        sizes=sizes,
    )
