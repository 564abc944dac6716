"""Sequence packing per batch: padded rows, packs, or whichever is cheaper for each batch.

Every process decides alike, from the lengths alone. Chosen packs have one shape, of which passes
that a batch does not fill are skipped, so two programs suffice however lengths vary.
"""

import functools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from hjax.batches import LENGTHS, response_lengths
from hjax.models.sequence_packing import KEY, Packing
from hjax.sharding.global_arrays import place, to_numpy
from hjax.sharding.layout import Layout
from hjax.workers.packs import PackShape, fill_shape, filled_cells, make_packing

# Padded places that packs must save per place of theirs. At full length a packed place costs 1.15
# to 1.4 times a padded one (gathers, attention masks).
MIN_SAVING = 1.5
# A pass of chosen packs holds one in so many of a padded batch's places.
PASSES_PER_BATCH = 16
# Least places of a pass of chosen packs on a device (CPUs, accelerators), unless a padded pass
# has fewer: every pass reads all weights and adds up all gradients.
MIN_PASS_PLACES, MIN_PASS_PLACES_ACCELERATOR = 512, 4096
# A pass of chosen packs has slots for so many times the rows that its places hold if padded.
SLOT_FACTOR = 8


class PaddedBatch(NamedTuple):
    """Sizes of a padded batch.

    Attributes:
      rows: over all devices.
      widths: padded lengths of prompts and of responses.
      share: rows per copy of a prompt.
      passes: micro-batches.
    """

    rows: int
    widths: tuple[int, int]
    share: int
    passes: int

    @property
    def places(self) -> float:
        """Places (tokens and padding) that are computed, over all devices."""
        prompt, response = self.widths
        return self.rows * (prompt / self.share + response)


class BatchLayout(NamedTuple):
    """How a batch's rows are computed.

    Attributes:
      packing: the packs; None: padded.
      padding: share of the computed places that hold no token; None: not reported.
    """

    packing: Packing | None = None
    padding: np.floating | None = None

    def with_packing(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """The batch with its packing, if it has one."""
        return dict(batch) if self.packing is None else {**batch, KEY: self.packing}


class Packer:
    """Packs a role's batches.

    Args:
      capacity: places of a pack; 0: each batch chooses between padded rows and packs.
      layout: the train layout.
      micro_batch: most packs per pass over all devices (at least one per data-parallel part); 0:
        all at once.
      longest: most places of a chosen pack; 0: any number.
    """

    def __init__(self, capacity: int, layout: Layout, micro_batch: int = 0, longest: int = 0):
        self.capacity = capacity
        self._layout, self._longest = layout, longest
        self._sharding = layout.sharding("batch")
        self._parts = layout.shard_count("batch")
        per_pass = max(micro_batch // self._parts, 1) if micro_batch else 0
        self._make = functools.partial(make_packing, parts=self._parts, per_pass=per_pass)

    def __call__(
        self,
        batch: Mapping[str, Any],
        share: int,
        padded: PaddedBatch,
        unit: int = 1,
        capacity: int = 0,
    ) -> BatchLayout:
        """A batch's packs, on the devices that compute them; or a padded layout if that is cheaper.

        Args:
          batch: ``prompt_mask``, ``response_mask`` and maybe ``response_lengths``: NumPy's, or
            JAX's, which are waited for. In a pool of several processes all must call this.
          share: consecutive rows that share their prompt in a pack.
          padded: sizes of the batch without packs.
          unit: consecutive rows that stay in one pack, in consecutive slots.
          capacity: places of a pack if batches do not choose; 0: the packer's.
        """
        keys = ("prompt_mask", "response_mask", LENGTHS)
        host = {key: to_numpy(batch[key]) for key in keys if batch.get(key) is not None}
        prompts, responses = host["prompt_mask"].sum(axis=1), response_lengths(host)
        if self.capacity:
            capacity = capacity or self.capacity
            made = self._make(prompts, responses, padded.widths, share, capacity, unit=unit)
            return BatchLayout(self._placed(made), (made.segments == 0).mean(dtype="float32"))
        least = MIN_PASS_PLACES if self._layout.platform == "cpu" else MIN_PASS_PLACES_ACCELERATOR
        shape = choose_shape(padded, self._parts, unit, least)
        packing = None
        if not 0 < self._longest < shape.capacity:
            packing = fill_shape(prompts, responses, padded.widths, share, shape, self._parts, unit)
        if packing is None:
            tokens = prompts.sum() / padded.share + responses.sum()
            return BatchLayout(padding=np.float32(1 - tokens / padded.places))
        computed = packing.segments[filled_cells(packing.passes, self._parts, shape.passes)]
        return BatchLayout(self._placed(packing), (computed == 0).mean(dtype="float32"))

    def abstract(self, rows: int, widths: tuple[int, int], share: int, unit: int = 1) -> Packing:
        """Abstract packs of rows without padding: the most there can be."""
        prompts, responses = (np.full(rows, width) for width in widths)
        capacity = max(unit * (sum(widths) - 1), self.capacity)
        packing = self._make(prompts, responses, widths, share, capacity, unit=unit)
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self._sharding), packing
        )

    def _placed(self, packing: Packing) -> Packing:
        def on(x: Any) -> jax.Array:
            return place(x, self._sharding if x.ndim else self._layout.replicated)

        return jax.tree.map(on, packing)


@functools.lru_cache(maxsize=256)
def choose_shape(
    padded: PaddedBatch, parts: int, unit: int = 1, least: int = MIN_PASS_PLACES
) -> PackShape:
    """The one shape of packs that a batch of this padded size may use.

    A pass holds an equal part of the padded batch's places, response tokens and rows, so the
    shape's passes are worth it whichever of the three runs out first.

    Args:
      padded: the batch.
      parts: data-parallel parts.
      unit: consecutive rows that stay together.
      least: least places of a pass on a device, unless a padded pass has fewer.
    """
    prompt, response = padded.widths
    places, rows = padded.places / parts, padded.rows // parts
    capacity = chosen_capacity(padded, unit)
    wanted = min(max(places / PASSES_PER_BATCH, least), places / padded.passes)
    height = max(int(wanted // capacity), 1)
    held = height * capacity / places  # of a part's padded batch
    most = math.ceil(SLOT_FACTOR * held * rows / height)
    most = min(max(most, unit), rows)
    most += -most % unit
    answers = max(unit * response, math.ceil(held * rows * response / height), most)
    passes = int(places / (height * capacity * MIN_SAVING))
    return PackShape(passes, height, capacity, height * most, answers)


def chosen_capacity(padded: PaddedBatch, unit: int) -> int:
    """Places of a chosen pack: those of the longest possible unit of rows, rounded up to 32."""
    longest = unit * (sum(padded.widths) - 1)
    return -(-longest // 32) * 32
