"""Gradient accumulation over micro-batches, and forward passes in micro-batches or a pipeline.

A packed batch runs in its packs' slots; results come back in the order of its rows.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from hjax.models.parameters import Params
from hjax.models.sequence_packing import KEY, from_slots, to_slots
from hjax.sharding.layout import Layout
from hjax.sharding.pipeline import Pipeline, Stack, run_all_layers
from hjax.trainable_split import TrainableSplit

Batch = dict[str, Any]  # of arrays, and the packing
Forward = Callable[[Params, Batch, Stack], Any]
# (params, micro-batch, stack) -> (weighted loss sum, weighted sums of statistics)
Objective = Callable[[Params, Batch, Stack], tuple[jax.Array, dict[str, jax.Array]]]

# Micro-batches per pipeline stage without a configured size: stages idle about a fifth of the time.
MICRO_BATCHES_PER_STAGE = 4


class MicroBatches:
    """Runs a role's functions over batches in micro-batches, under its train layout.

    Args:
      layout: the train layout.
      axes: nested dict like the parameters, of logical axis names.
      micro_batch: most rows per pass over all devices (at least one per data-parallel part); 0: all
        at once, in a pipeline a few micro-batches per stage.
      samples: rows per prompt, kept together if possible.
      partition: of the parameters into trainable and frozen ones.
      unit: consecutive rows that must stay together.
    """

    def __init__(
        self,
        layout: Layout,
        axes: Any,
        micro_batch: int = 0,
        samples: int = 1,
        partition: TrainableSplit | None = None,
        unit: int = 1,
    ):
        self.layout = layout
        self._unit = unit
        self.partition = partition or TrainableSplit()
        staged = layout.shard_count("layers") > 1
        self.pipeline = Pipeline(layout, axes, self.partition) if staged else None
        self._micro_batch = micro_batch
        self._samples = samples

    def gradients(self, objective: Objective, params: Params, batch: Batch) -> Any:
        """((loss, statistics), gradients of trainable parameters), accumulated over micro-batches;
        inside jit."""
        count, filled = self.count(batch), filled_count(batch)
        batch = to_slots(batch)
        learned, frozen = self.partition.split(params)

        def loss(learned: Params, batch: Batch) -> tuple[jax.Array, dict[str, jax.Array]]:
            return objective(self.partition.join(learned, frozen), batch, run_all_layers)

        value_and_grad = jax.value_and_grad(loss, has_aux=True)
        if self.pipeline is None and count == 1:
            return value_and_grad(learned, batch)
        parts = jax.tree.map(lambda x: self.layout.split_micro_batches(x, count), batch)
        if self.pipeline is not None:
            return self.pipeline.gradients(objective, params, parts)

        def add(total: Any, part: Any) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, total, value_and_grad(learned, part)), None

        shapes = jax.eval_shape(value_and_grad, learned, jax.tree.map(lambda x: x[0], parts))
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        if filled is None:
            return jax.lax.scan(add, zeros, parts)[0]
        return jax.lax.fori_loop(0, filled, lambda i, sums: add(sums, _part(parts, i))[0], zeros)

    def forward(self, compute: Forward, params: Params, batch: Batch) -> Any:
        """``compute``'s arrays, one row of each per row of the batch; inside jit."""
        if KEY not in batch:
            return self._forward(compute, params, batch)
        made = self._forward(compute, params, to_slots(batch))
        made = from_slots(made, batch[KEY].order, rows_of(batch))
        return jax.tree.map(lambda x: self.layout.constrain(x, "batch"), made)

    def _forward(self, compute: Forward, params: Params, batch: Batch) -> Any:
        count, filled = self.count(batch), filled_count(batch)

        def run(part: Batch) -> Any:
            return compute(params, part, run_all_layers)

        if self.pipeline is None and count == 1:
            return run(batch)
        parts = jax.tree.map(lambda x: self.layout.split_micro_batches(x, count), batch)
        if self.pipeline is not None:
            made = self.pipeline.forward(compute, params, parts)
        elif filled is None:
            made = jax.lax.map(run, parts)
        else:
            shapes = jax.eval_shape(run, jax.tree.map(lambda x: x[0], parts))
            empty = jax.tree.map(lambda x: jnp.zeros((count, *x.shape), x.dtype), shapes)

            def write(i: jax.Array, made: Any) -> Any:
                return jax.tree.map(lambda all, x: all.at[i].set(x), made, run(_part(parts, i)))

            made = jax.lax.fori_loop(0, filled, write, empty)
        return jax.tree.map(self.layout.merge_micro_batches, made)

    def count(self, batch: Batch) -> int:
        """Number of equal micro-batches of a batch: the fewest that are small enough; of packs as
        made."""
        if KEY in batch:
            return batch[KEY].order.shape[0] // self.layout.shard_count("batch")
        return self.count_for(rows_of(batch))

    def count_for(self, rows: int) -> int:
        """``count`` of a batch of so many rows."""
        local = rows // self.layout.shard_count("batch")
        if self._micro_batch:
            fewest = -(-rows // self._micro_batch)
        else:
            fewest = MICRO_BATCHES_PER_STAGE * self.pipeline.stages if self.pipeline else 1
        for unit in (self._unit,) if self._micro_batch else (self._samples, self._unit):
            if local % unit == 0 and unit % self._unit == 0:
                whole = local // unit
                for count in range(fewest, whole + 1):
                    if whole % count == 0:
                        return count
        return max(local // self._unit, 1)


def rows_of(batch: Batch) -> int:
    """Rows of a batch of arrays."""
    return next(x.shape[0] for key, x in batch.items() if key != KEY and x.ndim)


def filled_count(batch: Batch) -> jax.Array | None:
    """Number of micro-batches that hold any rows, the first ones; None: all do."""
    return batch[KEY].passes if KEY in batch else None


def _part(parts: Any, number: jax.Array) -> Any:
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, number, keepdims=False), parts)
