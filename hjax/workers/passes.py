"""Passes over a batch: whole, in micro-batches, or through a pipeline of stages.

A batch with a packing goes through them in its packs' slots, one with widths in order of length,
and what is made of its rows comes back in their order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from hjax.models.packed import KEY, arranged, restored
from hjax.models.parameters import Params
from hjax.partition import Partition
from hjax.sharding.layout import Layout
from hjax.sharding.pipeline import Pipeline, Stack, plain
from hjax.workers.widths import KEY as WIDTHS
from hjax.workers.widths import Widths

Batch = dict[str, Any]  # of arrays, and the packing or the widths
# (params, micro-batch, stack) -> (weighted loss sum, weighted sums of statistics)
Objective = Callable[[Params, Batch, Stack], tuple[jax.Array, dict[str, jax.Array]]]

# Micro-batches per stage where the config names no size: an idle share of about a fifth.
PER_STAGE = 4


class Passes:
    """Runs a role's functions over batches under its train layout.

    Args:
      layout: the train layout.
      axes: nested dict like the parameters, of logical axis names.
      micro_batch: most rows per pass over all devices (at least one per data-parallel part);
        0: all at once, in a pipeline a few micro-batches per stage.
      samples: rows of a prompt, kept together where they can be.
      partition: of the parameters into what learns and what is frozen.
      unit: consecutive rows that must be kept together.
    """

    def __init__(
        self,
        layout: Layout,
        axes: Any,
        micro_batch: int = 0,
        samples: int = 1,
        partition: Partition | None = None,
        unit: int = 1,
    ):
        self.layout = layout
        self._unit = unit
        self.partition = partition or Partition()
        staged = layout.ways("layers") > 1
        self.pipeline = Pipeline(layout, axes, self.partition) if staged else None
        self._micro_batch = micro_batch
        self._samples = samples

    def gradients(self, objective: Objective, params: Params, batch: Batch) -> Any:
        """((loss, statistics), gradients of what learns), summed over micro-batches; inside jit."""
        pieces = self.pieces(batch)
        widths: Widths | None = batch.get(WIDTHS)
        batch = arranged(batch) if widths is None else widths.ordered(batch)
        learned, frozen = self.partition.split(params)

        def loss(learned: Params, batch: Batch) -> tuple[jax.Array, dict[str, jax.Array]]:
            return objective(self.partition.join(learned, frozen), batch, plain)

        value_and_grad = jax.value_and_grad(loss, has_aux=True)

        def of_part(part: Batch) -> Any:
            return value_and_grad(learned, part)

        run: Callable[[Any], Any] = of_part if widths is None else widths.cutting(of_part)
        if self.pipeline is None and pieces == 1:
            return run(batch if widths is None else (batch, widths.chosen[0]))
        parts = jax.tree.map(lambda x: self.layout.cut(x, pieces), batch)
        if self.pipeline is not None:
            return self.pipeline.gradients(objective, params, parts)
        parts = parts if widths is None else (parts, widths.chosen)

        def add(total: Any, part: Any) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, total, run(part)), None

        shapes = jax.eval_shape(run, jax.tree.map(lambda x: x[0], parts))
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        return jax.lax.scan(add, zeros, parts)[0]

    def forward(
        self, compute: Callable[[Params, Batch, Stack], Any], params: Params, batch: Batch
    ) -> Any:
        """``compute``'s arrays, one row of each per row of the batch; inside jit."""
        pieces, widths = self.pieces(batch), batch.get(WIDTHS)
        if widths is not None:
            made, order = self._forward(compute, params, batch, pieces), widths.order
        elif KEY in batch:
            made = self._forward(compute, params, arranged(batch), pieces)
            order = batch[KEY].order
        else:
            return self._forward(compute, params, batch, pieces)
        made = restored(made, order, rows_of(batch))
        return jax.tree.map(lambda x: self.layout.constrain(x, "batch"), made)

    def _forward(
        self,
        compute: Callable[[Params, Batch, Stack], Any],
        params: Params,
        batch: Batch,
        pieces: int,
    ) -> Any:
        widths: Widths | None = batch.get(WIDTHS)

        def of_part(part: Batch) -> Any:
            return compute(params, part, plain)

        run: Callable[[Any], Any] = of_part
        if widths is not None:
            run, batch = widths.cutting(of_part, widen=True), widths.ordered(batch)
        if self.pipeline is None and pieces == 1:
            return run(batch if widths is None else (batch, widths.chosen[0]))
        parts = jax.tree.map(lambda x: self.layout.cut(x, pieces), batch)
        if self.pipeline is not None:
            made = self.pipeline.forward(compute, params, parts)
        else:
            made = jax.lax.map(run, parts if widths is None else (parts, widths.chosen))
        return jax.tree.map(self.layout.join, made)

    def pieces(self, batch: Batch) -> int:
        """Into how many equal micro-batches a batch is cut: the fewest that are small enough.

        Of a batch with a packing those that this has made.
        """
        if KEY in batch:
            return batch[KEY].order.shape[0] // self.layout.ways("batch")
        return self.pieces_of(rows_of(batch))

    def pieces_of(self, rows: int) -> int:
        """``pieces`` of a batch of so many rows."""
        local = rows // self.layout.ways("batch")
        if self._micro_batch:
            fewest = -(-rows // self._micro_batch)
        else:
            fewest = PER_STAGE * self.pipeline.stages if self.pipeline is not None else 1
        units = (self._unit,) if self._micro_batch else (self._samples, self._unit)
        for unit in units:
            if local % unit == 0 and unit % self._unit == 0:
                whole = local // unit
                for count in range(fewest, whole + 1):
                    if whole % count == 0:
                        return count
        return max(local // self._unit, 1)


def rows_of(batch: Batch) -> int:
    """Rows of a batch of arrays."""
    return next(x.shape[0] for key, x in batch.items() if key not in (KEY, WIDTHS) and x.ndim)
