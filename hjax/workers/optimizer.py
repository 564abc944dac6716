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
from hjax.models.parameters import Params
from hjax.sharding.layout import Layout

Metrics = dict[str, jax.Array]
# (params, micro-batch) -> (weighted loss sum, weighted sums of statistics)
Objective = Callable[[Params, dict[str, jax.Array]], tuple[jax.Array, Metrics]]


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """AdamW with warm-up, a schedule and clipping.

    Attributes:
      learning_rate: peak, per optimizer update.
      schedule: ``constant``, ``linear`` or ``cosine`` (both fall to 0 at ``total_updates``).
      warmup_updates: updates over which the rate rises linearly from 0.
      total_updates: length of the schedule in updates.
      weight_decay: decoupled, on matrices only (norm weights and biases are left alone).
      max_grad_norm: gradients are scaled down to this global norm; 0 leaves them.
    """

    learning_rate: float
    schedule: str = "constant"
    warmup_updates: int = 0
    total_updates: int = 0
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    max_grad_norm: float = 1.0

    def rate(self) -> optax.Schedule:
        """Learning rate by number of updates made."""
        rest = max(self.total_updates - self.warmup_updates, 1)
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
        if not self.warmup_updates:
            return after
        rise = optax.linear_schedule(0.0, self.learning_rate, self.warmup_updates)
        # From the first update on a step is taken: rate(0) is one part of the rise, not 0.
        return optax.join_schedules([lambda n: rise(n + 1), after], [self.warmup_updates])

    def build(self) -> optax.GradientTransformation:
        """The optax transformation."""

        def matrices(params: Params) -> Any:
            return jax.tree.map_with_path(
                lambda path, x: x.ndim > 1 and "norm" not in jax.tree_util.keystr(path), params
            )

        adamw = optax.adamw(
            self.rate(),
            b1=self.beta1,
            b2=self.beta2,
            eps=self.epsilon,
            weight_decay=self.weight_decay,
            mask=matrices,
        )
        if not self.max_grad_norm:
            return adamw
        return optax.chain(optax.clip_by_global_norm(self.max_grad_norm), adamw)


class Updater:
    """One optimizer step of a model, compiled once per batch shape.

    Args:
      objective: maps (params, micro-batch) to a weighted loss sum and sums of statistics; both
        add up over micro-batches. The batch carries its weights.
      prepare: adds the weights to the whole step's batch, before it is cut.
      optimizer: settings of the update.
      layout: the train layout.
      micro_batch: most rows per forward and backward pass over all devices (at least one per
        data-parallel part); 0 takes all at once.
      pretraining: a second objective, on the batch's entry ``pretrain`` where it has one; its
        loss is added (PPO-ptx).
      name: of the compiled program.
    """

    def __init__(
        self,
        objective: Objective,
        prepare: Callable[[dict[str, jax.Array]], dict[str, jax.Array]],
        optimizer: OptimizerConfig,
        layout: Layout,
        micro_batch: int = 0,
        pretraining: Objective | None = None,
        name: str = "update",
    ):
        self._objective = objective
        self._pretraining = pretraining
        self._prepare = prepare
        self._layout = layout
        self._micro_batch = micro_batch
        self._optimizer = optimizer.build()
        self._rate = optimizer.rate()

        def step(params: Params, state: Any, batch: dict[str, jax.Array]) -> Any:
            return self._step(params, state, batch)

        step.__name__ = name  # by which a compilation is logged
        self._program = jax.jit(step, donate_argnums=(0, 1))

    def init(self, params: Params, shardings: Params) -> Any:
        """Optimizer state, its moments sharded like the parameters."""
        placed = jax.tree.map(lambda x: x.sharding, self.abstract_state(params, shardings))
        return jax.jit(self._optimizer.init, out_shardings=placed)(params)

    def abstract_state(self, params: Params, shardings: Params) -> Any:
        """The optimizer state as jax.ShapeDtypeStruct with shardings; ``params`` may be so too."""
        state = jax.eval_shape(self._optimizer.init, params)
        placed = optax.tree.map_params(
            self._optimizer,
            lambda _, sharding: sharding,
            state,
            shardings,
            transform_non_params=lambda _: self._layout.replicated,
        )
        return jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), state, placed
        )

    def __call__(
        self, params: Params, state: Any, batch: dict[str, jax.Array]
    ) -> tuple[Params, Any, Metrics]:
        """Take a step; ``params`` and ``state`` are donated.

        Returns:
          the new parameters and state (the old ones where loss or gradient is not finite:
          ``skipped`` is then 1), and metrics: ``loss``, ``grad_norm``, ``learning_rate``,
          ``skipped`` and the objective's statistics.
        """
        return self._program(params, state, batch)

    def trace(self, params: Any, state: Any, batch: Any) -> Any:
        """The program traced for abstract arguments, to count what it costs without running it."""
        return self._program.trace(params, state, batch)

    def _step(
        self, params: Params, state: Any, batch: dict[str, jax.Array]
    ) -> tuple[Params, Any, Metrics]:
        batch = dict(batch)
        pretrain = batch.pop("pretrain", None)
        (loss, stats), grads = self._gradients(params, self._prepare(batch))
        if pretrain is not None and self._pretraining is not None:
            more = jax.value_and_grad(self._pretraining, has_aux=True)(params, pretrain)
            (added, more_stats), more_grads = more
            loss, stats = loss + added, stats | more_stats
            grads = jax.tree.map(jnp.add, grads, more_grads)
        norm = optax.tree.norm(grads)
        finite = jnp.isfinite(loss) & jnp.isfinite(norm)

        def take(params: Params, state: Any) -> tuple[Params, Any]:
            updates, new = self._optimizer.update(grads, state, params)
            return optax.apply_updates(params, updates), new

        # Adam and the schedule count alike.
        (_, count), *_ = optax.tree.get_all_with_path(state, "count")
        rate = self._rate(count)
        params, state = jax.lax.cond(finite, take, lambda p, s: (p, s), params, state)
        metrics = {
            "loss": loss,
            "grad_norm": norm,
            "learning_rate": jnp.asarray(rate, jnp.float32),
            "skipped": (~finite).astype(jnp.int32),
            **stats,
        }
        return params, state, metrics

    def _gradients(self, params: Params, batch: dict[str, jax.Array]) -> Any:
        value_and_grad = jax.value_and_grad(self._objective, has_aux=True)
        rows = next(x.shape[0] for x in batch.values() if x.ndim)
        pieces = self._pieces(rows)
        if pieces == 1:
            return value_and_grad(params, batch)
        parts = jax.tree.map(lambda x: self._cut(x, pieces), batch)

        def add(total: Any, part: dict[str, jax.Array]) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, total, value_and_grad(params, part)), None

        shapes = jax.eval_shape(value_and_grad, params, jax.tree.map(lambda x: x[0], parts))
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        return jax.lax.scan(add, zeros, parts)[0]

    def _pieces(self, rows: int) -> int:
        """The fewest equal micro-batches of at most ``micro_batch`` rows."""
        if not self._micro_batch:
            return 1
        local = rows // self._layout.ways("batch")
        fewest = -(-rows // self._micro_batch)
        return next((n for n in range(fewest, local + 1) if local % n == 0), local)

    def _cut(self, x: jax.Array, pieces: int) -> jax.Array:
        """[rows, ...] -> [pieces, rows / pieces, ...], every device cutting its own rows."""
        if x.ndim == 0:  # a number that holds for all rows
            return jnp.broadcast_to(x, (pieces,))
        ways = self._layout.ways("batch")
        local = x.shape[0] // (ways * pieces)
        x = x.reshape(ways, pieces, local, *x.shape[1:]).swapaxes(0, 1)
        x = x.reshape(pieces, ways * local, *x.shape[3:])
        return self._layout.constrain(x, None, "batch")
