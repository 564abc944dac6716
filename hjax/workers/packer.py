"""How a batch's rows are computed: padded, in packs, or as each batch has it the cheaper of both.

Every process of a world chooses alike, by the lengths alone. Packs that are chosen have one shape,
and passes of it that a batch does not fill are left off: two programs, however lengths vary.
"""

import functools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from hjax.models.sequence_packing import KEY, Packing
from hjax.sharding.global_arrays import place, to_numpy
from hjax.sharding.layout import Layout
from hjax.workers.packs import PackShape, fill, first_cells, make_packing

# What packs have to save where a batch chooses: as many padded places as each of theirs. At full
# lengths a packed place costs 1.15 to 1.4 times a padded one (gathers, masks of attention).
WORTH = 1.5
# Parts of a padded batch of which a pass of chosen packs holds one.
PIECES = 16
# Places that a pass of chosen packs has at least on a device, where a padded pass has as many:
# products over fewer are slower, and every pass reads all weights and adds up all gradients.
# Elsewhere than on CPUs memory is the slower beside the products' speed.
LEAST, LEAST_ELSEWHERE = 512, 4096
# Rows that a pass of chosen packs has slots for, of those that as many padded places hold.
ROOM = 8


class PaddedBatch(NamedTuple):
    """A padded batch, as its program computes it.

    Attributes:
      rows: of all devices.
      widths: places of a row's prompt, and of its response.
      share: rows that stand behind one prompt.
      passes: in which it is computed.
    """

    rows: int
    widths: tuple[int, int]
    share: int
    passes: int

    @property
    def places(self) -> float:
        """That are computed, of all devices."""
        prompt, response = self.widths
        return self.rows * (prompt / self.share + response)


class BatchLayout(NamedTuple):
    """How a batch's rows go through a program.

    Attributes:
      packing: in packs; None: padded.
      padding: share of the computed places that hold no token; None: nobody asks.
    """

    packing: Packing | None = None
    padding: np.floating | None = None

    def beside(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """The batch with its packing, where it has one."""
        return dict(batch) if self.packing is None else {**batch, KEY: self.packing}


class Packer:
    """Makes the packs of a role's batches.

    Args:
      capacity: places of a pack; 0: each batch chooses between padded rows and packs.
      layout: the train layout.
      micro_batch: most packs per pass over all devices (at least one per data-parallel part); 0:
        all at once.
      longest: places that a chosen pack may have; 0: any number.
    """

    def __init__(self, capacity: int, layout: Layout, micro_batch: int = 0, longest: int = 0):
        self.capacity = capacity
        self._layout, self._longest = layout, longest
        self._sharding = layout.sharding("batch")
        self._parts = layout.shard_count("batch")
        self._per_pass = max(micro_batch // self._parts, 1) if micro_batch else 0

    def __call__(
        self,
        batch: Mapping[str, Any],
        share: int,
        padded: PaddedBatch,
        unit: int = 1,
        capacity: int = 0,
    ) -> BatchLayout:
        """A batch's rows, in packs on the devices that compute them or, by choice, padded.

        Args:
          batch: ``prompt_mask``, ``response_mask``: NumPy's, or JAX's, which are waited for. Over
            several processes all of them ask.
          share: consecutive rows whose prompt stands in a pack once.
          padded: what is computed of the batch without packs.
          unit: consecutive rows that stay in one pack, and in slots that follow each other.
          capacity: places of a pack that nobody chooses; 0: the packer's.
        """
        masks = [to_numpy(batch[key]) for key in ("prompt_mask", "response_mask")]
        prompts, responses = (mask.sum(axis=1) for mask in masks)
        if self.capacity:
            made = self._make(prompts, responses, padded.widths, share, capacity, unit)
            return BatchLayout(self._placed(made), (made.segments == 0).mean(dtype="float32"))
        least = LEAST if self._layout.platform == "cpu" else LEAST_ELSEWHERE
        shape = shape_beside(padded, self._parts, unit, least)
        packing = None
        if not 0 < self._longest < shape.capacity:
            packing = fill(prompts, responses, padded.widths, share, shape, self._parts, unit)
        if packing is None:
            tokens = prompts.sum() / padded.share + responses.sum()
            return BatchLayout(padding=np.float32(1 - tokens / padded.places))
        computed = packing.segments[first_cells(packing.passes, self._parts, shape.passes)]
        return BatchLayout(self._placed(packing), (computed == 0).mean(dtype="float32"))

    def abstract(self, rows: int, widths: tuple[int, int], share: int, unit: int = 1) -> Packing:
        """Shapes of the packs of rows that have no padding: the most there can be."""
        prompts, responses = (np.full(rows, width) for width in widths)
        capacity = max(unit * (sum(widths) - 1), self.capacity)
        packing = self._make(prompts, responses, widths, share, capacity, unit)
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self._sharding), packing
        )

    def _placed(self, packing: Packing) -> Packing:
        def on(x: Any) -> jax.Array:
            return place(x, self._sharding if x.ndim else self._layout.replicated)

        return jax.tree.map(on, packing)

    def _make(
        self,
        prompts: np.ndarray,
        responses: np.ndarray,
        widths: tuple[int, int],
        share: int,
        capacity: int,
        unit: int,
    ) -> Packing:
        return make_packing(
            prompts,
            responses,
            widths,
            share=share,
            capacity=capacity or self.capacity,
            parts=self._parts,
            per_pass=self._per_pass,
            unit=unit,
        )


@functools.lru_cache(maxsize=256)
def shape_beside(padded: PaddedBatch, parts: int, unit: int = 1, least: int = LEAST) -> PackShape:
    """The one shape of packs that may take a padded batch's place.

    A pass holds a part of the padded batch, in places, response tokens and rows alike, so that as
    many passes as there are in the shape are worth it whichever of them fills one.

    Args:
      padded: the batch.
      parts: data-parallel parts.
      unit: consecutive rows that stay together.
      least: places of a pass on a device, but for a padded pass of fewer.
    """
    prompt, response = padded.widths
    places, rows = padded.places / parts, padded.rows // parts
    capacity = pack_places(padded, unit)
    wanted = min(max(places / PIECES, least), places / padded.passes)
    height = max(int(wanted // capacity), 1)
    held = height * capacity / places  # of a part's padded batch
    most = math.ceil(ROOM * held * rows / height)
    most = min(max(most, unit), rows)
    most += -most % unit
    answers = max(unit * response, math.ceil(held * rows * response / height), most)
    passes = int(places / (height * capacity * WORTH))
    return PackShape(passes, height, capacity, height * most, answers)


def pack_places(padded: PaddedBatch, unit: int) -> int:
    """Places of a chosen pack: the longest rows' that stay together."""
    longest = unit * (sum(padded.widths) - 1)
    return -(-longest // 32) * 32
