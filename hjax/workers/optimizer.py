"""Optimizers from optax, and one training step as a compiled program.

A step's loss is a weighted sum over the tokens of the whole optimizer step, with weights computed
once before the batch is cut into micro-batches. So gradients add up to those of the full batch,
whatever the micro-batches or the mesh.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from hjax.errors import ConfigError
from hjax.models.parameters import Network, Params
from hjax.workers.passes import Batch, Objective, Passes

# In a batch whose update drops something: updates made before.
UPDATE = "update"

Metrics = dict[str, jax.Array]
Prepare = Callable[[Batch], Batch]


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """AdamW with warm-up, a schedule and clipping.

    Attributes:
      learning_rate: peak, per optimizer update.
      schedule: ``constant``, ``linear`` or ``cosine`` (both fall to 0 at ``total_updates``).
      frozen_updates: updates at the beginning that change nothing: the rate is 0.
      warmup_updates: updates over which the rate then rises linearly from 0.
      total_updates: length of the schedule in updates.
      weight_decay: decoupled, on matrices and embeddings; vectors (norm weights, biases, scalar
        heads) are left alone.
      max_grad_norm: gradients are scaled down to this global norm; 0 leaves them.
    """

    learning_rate: float
    schedule: str = "constant"
    frozen_updates: int = 0
    warmup_updates: int = 0
    total_updates: int = 0
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    max_grad_norm: float = 1.0

    def rate(self) -> optax.Schedule:
        """Learning rate by number of updates made."""
        frozen = self.frozen_updates
        rest = max(self.total_updates - frozen - self.warmup_updates, 1)
        after: optax.Schedule
        if self.schedule == "constant":
            after = optax.constant_schedule(self.learning_rate)
        elif self.schedule == "linear":
            after = optax.linear_schedule(self.learning_rate, 0.0, rest)
        elif self.schedule == "cosine":
            after = optax.cosine_decay_schedule(self.learning_rate, rest)
        else:
            raise ConfigError(
                f"schedule={self.schedule!r} is unknown; allowed: constant, linear, cosine"
            )
        if self.warmup_updates:
            rise = optax.linear_schedule(0.0, self.learning_rate, self.warmup_updates)
            # From the first update on a step is taken: rate(0) is one part of the rise, not 0.
            after = optax.join_schedules([lambda n: rise(n + 1), after], [self.warmup_updates])
        if not frozen:
            return after
        return optax.join_schedules([optax.constant_schedule(0.0), after], [frozen])

    def build(self, kinds: Params) -> optax.GradientTransformation:
        """The optax transformation of parameters of these kinds (nested dict of ``Kind``)."""
        adamw = optax.adamw(
            self.rate(),
            b1=self.beta1,
            b2=self.beta2,
            eps=self.epsilon,
            weight_decay=self.weight_decay,
            mask=jax.tree.map(lambda kind: kind.decayed, kinds),
        )
        if not self.max_grad_norm:
            return adamw
        return optax.chain(optax.clip_by_global_norm(self.max_grad_norm), adamw)


class Updater:
    """One optimizer step of a model, compiled once per batch shape.

    Args:
      objective: maps (params, micro-batch, stack) to a weighted loss sum and sums of statistics;
        both add up over micro-batches. The batch carries its weights.
      prepare: adds the weights to the whole step's batch, before it is cut.
      optimizer: settings of the update.
      passes: how batches are cut and run under the train layout.
      network: the model whose parameters are updated, those that learn: their kinds, shapes and
        axes.
      pretraining: a second objective and its ``prepare``, for the batch's entry ``pretrain``
        where it has one; its loss is added (PPO-ptx).
      name: of the compiled program.
      finish: makes metrics of the summed statistics; None: they are metrics.
    """

    def __init__(
        self,
        objective: Objective,
        prepare: Prepare,
        optimizer: OptimizerConfig,
        passes: Passes,
        network: Network,
        pretraining: tuple[Objective, Prepare] | None = None,
        name: str = "update",
        finish: Callable[[dict[str, Any]], Metrics] | None = None,
    ):
        self._objective = objective
        self._pretraining = pretraining
        self._prepare = prepare
        self._finish = finish
        self._passes = passes
        self._partition = network.partition
        self._shardings, _ = self._partition.split(network.shardings(passes.layout))
        kinds, _ = self._partition.split(network.kinds)
        self._optimizer = optimizer.build(kinds)
        self._rate = optimizer.rate()
        self._drops = network.config.lora is not None and network.config.lora.dropout > 0

        def step(learned: Params, frozen: Params, state: Any, batch: dict[str, Any]) -> Any:
            return self._step(learned, frozen, state, batch)

        step.__name__ = name  # by which a compilation is logged
        state = jax.tree.map(lambda x: x.sharding, self.abstract_state(network.shapes))
        placed = self._shardings, state, passes.layout.replicated
        self._program = jax.jit(
            step,
            donate_argnums=(0, 2),
            out_shardings=placed,
            compiler_options=passes.layout.compiler_options,
        )

    def init(self, params: Params) -> Any:
        """Optimizer state of what learns, its moments sharded like the parameters."""
        placed = jax.tree.map(lambda x: x.sharding, self.abstract_state(params))
        learned, _ = self._partition.split(params)
        return jax.jit(self._optimizer.init, out_shardings=placed)(learned)

    def abstract_state(self, params: Params) -> Any:
        """The optimizer state as jax.ShapeDtypeStruct with shardings; ``params`` may be so too."""
        learned, _ = self._partition.split(params)
        state = jax.eval_shape(self._optimizer.init, learned)
        placed = optax.tree.map_params(
            self._optimizer,
            lambda _, sharding: sharding,
            state,
            self._shardings,
            transform_non_params=lambda _: self._passes.layout.replicated,
        )
        return jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), state, placed
        )

    def __call__(
        self, params: Params, state: Any, batch: dict[str, jax.Array]
    ) -> tuple[Params, Any, Metrics]:
        """Take a step; ``state`` and those of ``params`` that learn are donated.

        Returns:
          the new parameters and state (the old ones where loss or gradient is not finite:
          ``skipped`` is then 1), laid out as they were, and metrics, on every device: ``loss``,
          ``grad_norm``, ``learning_rate``, ``skipped`` and the objective's statistics.
        """
        learned, frozen = self._partition.split(params)
        learned, state, metrics = self._program(learned, frozen, state, batch)
        return self._partition.join(learned, frozen), state, metrics

    def trace(self, params: Any, state: Any, batch: Any) -> Any:
        """The program traced for abstract arguments, to count what it costs without running it."""
        return self._program.trace(*self._partition.split(params), state, batch)

    def _step(
        self, learned: Params, frozen: Params, state: Any, batch: dict[str, Any]
    ) -> tuple[Params, Any, Metrics]:
        batch, params = dict(batch), self._partition.join(learned, frozen)
        pretrain: Batch | None = batch.pop("pretrain", None)
        # Adam and the schedule count alike.
        (_, count), *_ = optax.tree.get_all_with_path(state, "count")
        if self._drops:
            batch[UPDATE] = count
            pretrain = None if pretrain is None else pretrain | {UPDATE: count}
        gradients = self._passes.gradients
        (loss, stats), grads = gradients(self._objective, params, self._prepare(batch))
        if pretrain is not None and self._pretraining is not None:
            objective, prepare = self._pretraining
            (added, more_stats), more_grads = gradients(objective, params, prepare(pretrain))
            loss, stats = loss + added, more_stats | stats
            grads = jax.tree.map(jnp.add, grads, more_grads)
        if self._finish is not None:
            stats = self._finish(stats)
        grads = jax.lax.with_sharding_constraint(grads, self._shardings)
        norm = optax.tree.norm(grads)
        finite = jnp.isfinite(loss) & jnp.isfinite(norm)

        rate = self._rate(count)
        updates, new = self._optimizer.update(grads, state, learned)
        taken = optax.apply_updates(learned, updates), new
        # Element by element, in the arguments' place: of a conditional's two branches the GPU
        # compiler keeps results of their own, a second copy of parameters and state.
        learned, state = jax.tree.map(
            lambda after, before: jnp.where(finite, after, before), taken, (learned, state)
        )
        metrics = {
            "loss": loss,
            "grad_norm": norm,
            "learning_rate": jnp.asarray(rate, jnp.float32),
            "skipped": (~finite).astype(jnp.int32),
            **stats,
        }
        return learned, state, metrics
