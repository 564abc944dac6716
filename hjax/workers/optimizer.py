"""Optimizers from optax, and one training step (update) as a compiled program.

A step's loss is a weighted sum over the tokens of the whole optimizer step. The weights are
computed once, before the batch is cut into micro-batches, so accumulated gradients equal those of
the full batch whatever the micro-batches or the mesh.
"""

import dataclasses
import math
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax

from hjax.errors import ConfigError
from hjax.models.parameter_spec import ParameterKind, ParameterSpec
from hjax.models.parameters import Network, Params
from hjax.roles import OPTIMIZERS
from hjax.sharding.layout import Layout
from hjax.user_code import error_line, load_object
from hjax.workers.micro_batching import Batch, MicroBatches, Objective

# Batch entry for what draws noise in updates: number of updates made before.
UPDATE_COUNT = "update"

# Root mean square of Muon's updates: AdamW's, whose rates and weight decay fit then
# (Liu et al. 2025, arXiv 2502.16982, section 2.2).
MUON_RMS = 0.2

Metrics = dict[str, jax.Array]
Prepare = Callable[[Batch], Batch]
OptimizerFactory = Callable[[optax.Schedule], optax.GradientTransformation]


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """An optax optimizer with warm-up, schedule and gradient clipping.

    Attributes:
      learning_rate: peak, per optimizer update; Adafactor's is relative to each parameter's root
        mean square.
      schedule: ``constant``, ``linear`` or ``cosine``; both fall until ``total_updates``.
      min_lr_ratio: the rate at their end, over ``learning_rate``.
      frozen_updates: first updates that change nothing: the rate is 0.
      warmup_updates: updates over which the rate then rises linearly from 0.
      total_updates: length of the schedule in updates.
      weight_decay: decoupled, on matrices and embeddings; vectors (norm weights, biases, scalar
        heads) have none.
      beta1, beta2, epsilon: of AdamW, Adam and of Muon's Adam; Lion takes the first two.
      max_grad_norm: gradients are clipped to this global norm; 0: not.
      optimizer: one of ``OPTIMIZERS``, or a function from a rate schedule (by number of updates) to
        an optax.GradientTransformation, with its own weight decay if any. SGD has no momentum. Muon
        updates matrices, each layer's and expert's by itself, with momentum 0.95 and a root mean
        square of 0.2; Adam updates everything else.
      ema_decay: share of the weights' moving average that stays at an update; 0: none is kept.
    """

    learning_rate: float
    schedule: str = "constant"
    min_lr_ratio: float = 0.0
    frozen_updates: int = 0
    warmup_updates: int = 0
    total_updates: int = 0
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    max_grad_norm: float = 1.0
    optimizer: str | OptimizerFactory = "adamw"
    ema_decay: float = 0.0

    def rate(self) -> optax.Schedule:
        """The learning rate schedule, by number of updates made."""
        frozen = self.frozen_updates
        rest = max(self.total_updates - frozen - self.warmup_updates, 1)
        after: optax.Schedule
        if self.schedule == "constant":
            after = optax.constant_schedule(self.learning_rate)
        elif self.schedule == "linear":
            last = self.min_lr_ratio * self.learning_rate
            after = optax.linear_schedule(self.learning_rate, last, rest)
        elif self.schedule == "cosine":
            after = optax.cosine_decay_schedule(self.learning_rate, rest, self.min_lr_ratio)
        else:
            raise ConfigError(
                f"schedule={self.schedule!r} is unknown; allowed: constant, linear, cosine"
            )
        if self.warmup_updates:
            rise = optax.linear_schedule(0.0, self.learning_rate, self.warmup_updates)
            # The first update already has a rate: rate(0) is one step of the rise, not 0.
            after = optax.join_schedules([lambda n: rise(n + 1), after], [self.warmup_updates])
        if not frozen:
            return after
        return optax.join_schedules([optax.constant_schedule(0.0), after], [frozen])

    def build(self, declared: Params) -> optax.GradientTransformation:
        """The optax transformation for parameters (nested dict of ``ParameterSpec``)."""
        if callable(self.optimizer):
            # The second one counts updates, whatever state the first one has.
            made = optax.chain(self.optimizer(self.rate()), optax.scale_by_schedule(lambda _: 1.0))
        else:
            made = optax.chain(
                self._update_rule(declared),
                optax.add_decayed_weights(
                    self.weight_decay, jax.tree.map(lambda p: p.kind.decayed, declared)
                ),
                optax.scale_by_learning_rate(self.rate()),
            )
        if not self.max_grad_norm:
            return made
        return optax.chain(optax.clip_by_global_norm(self.max_grad_norm), made)

    def _update_rule(self, declared: Params) -> optax.GradientTransformation:
        """Turns gradients into updates at a rate of 1, without weight decay."""
        match self.optimizer:
            case "adamw" | "adam":
                return optax.scale_by_adam(b1=self.beta1, b2=self.beta2, eps=self.epsilon)
            case "sgd":
                return optax.identity()
            case "lion":
                return optax.scale_by_lion(b1=self.beta1, b2=self.beta2)
            case "adafactor":
                return optax.chain(optax.adafactor(), optax.scale(-1.0))  # its updates are negated
            case "muon":
                return optax.contrib.muon(
                    -1.0,  # as above
                    eps=self.epsilon,
                    adam_b1=self.beta1,
                    adam_b2=self.beta2,
                    muon_weight_dimension_numbers=jax.tree.map(_matrix_dimensions, declared),
                    consistent_rms=MUON_RMS,
                )
        raise ConfigError(
            f"optimizer={self.optimizer!r} is unknown; allowed: {', '.join(OPTIMIZERS)}"
        )

    def state_bytes(self, network: Network, layout: Layout | None = None, copies: int = 0) -> int:
        """Bytes of optimizer state of the trainable parameters, on each device, with copies of them
        that are kept beside it.

        Args:
          network: whose parameters.
          layout: their sharding; None: unsharded.
          copies: of the parameters, besides their moving average.
        """
        declared, _ = network.partition.split(network.declared)
        learned, _ = network.partition.split(network.shapes)
        optimizer = self.build(declared)
        if layout is None:
            state = jax.eval_shape(optimizer.init, learned)
            kept = learned
        else:
            shardings, _ = network.partition.split(network.shardings(layout))
            state = abstract_state(optimizer, learned, shardings, layout.replicated)
            kept = jax.tree.map(
                lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), learned, shardings
            )
        state = (state, [kept] * (copies + bool(self.ema_decay)))
        owners = {path for path, _ in jax.tree.leaves_with_path(learned)}
        return sum(
            x.dtype.itemsize * math.prod(x.sharding.shard_shape(x.shape) if layout else x.shape)
            for path, x in jax.tree.leaves_with_path(state)
            if _parameter_path(path, owners) is not None
        )


def _parameter_path(
    path: tuple[Any, ...], owners: Collection[tuple[Any, ...]]
) -> tuple[Any, ...] | None:
    """The path of the parameter that an array of the state belongs to; None: to none."""
    return next((path[i:] for i in range(len(path)) if path[i:] in owners), None)


def _matrix_dimensions(parameter: ParameterSpec) -> optax.contrib.MuonDimensionNumbers | None:
    """Which dimensions of a parameter are a matrix's inputs and outputs; further ones count
    matrices. None: it is no matrix."""
    names = parameter.names
    low_rank = parameter.kind is ParameterKind.ADAPTER and "rank" in names
    if parameter.kind is not ParameterKind.MATRIX and not low_rank:
        return None
    inputs = ("rank",) if low_rank else parameter.inputs
    last = len(names) - 1
    counted = {"layers", "pair", "experts"} - {names[last]}  # a router's outputs are the experts
    outputs = [i for i, name in enumerate(names) if name not in counted and name not in inputs]
    return optax.contrib.MuonDimensionNumbers(tuple(names.index(n) for n in inputs), tuple(outputs))


def load_optimizer(name: str, key: str) -> str | OptimizerFactory:
    """The ``optimizer`` of an ``OptimizerConfig``, from a config value.

    Args:
      name: one of ``OPTIMIZERS``, or ``path.py:function``.
      key: the config key, for messages.

    Raises:
      ConfigError: no such file or function, or it makes no optax.GradientTransformation of a rate.
    """
    if name in OPTIMIZERS:
        return name
    function: OptimizerFactory = load_object(name, key)
    try:
        made = function(optax.constant_schedule(0.0))
    except Exception as error:
        path = Path(name.rpartition(":")[0])
        raise ConfigError(f"{key}={name!r}: {error_line(path, error)}") from error
    if not isinstance(made, optax.GradientTransformation):
        raise ConfigError(
            f"{key}={name!r}: it returned {type(made).__name__}; it must make an "
            "optax.GradientTransformation of the learning rate (an optax.Schedule)"
        )
    return function


def abstract_state(
    optimizer: optax.GradientTransformation, learned: Params, shardings: Params, replicated: Any
) -> Any:
    """The optimizer state as jax.ShapeDtypeStruct with shardings.

    State of a parameter is sharded like the parameter, or like those of its dimensions that the
    state has (Adafactor's means). Everything else is replicated.

    Args:
      optimizer: whose.
      learned: nested dict of the parameters, jax.Array or jax.ShapeDtypeStruct.
      shardings: nested dict like it.
      replicated: the sharding of everything else.
    """
    owners = {
        path: (x.shape, sharding)
        for (path, x), sharding in zip(
            jax.tree.leaves_with_path(learned), jax.tree.leaves(shardings), strict=True
        )
    }

    def placed(path: tuple[Any, ...], x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        owner, sharding = _parameter_path(path, owners), None
        if owner is not None:
            whole, of_owner = owners[owner]
            sharding = _reduced_sharding(x.shape, whole, of_owner)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding or replicated)

    return jax.tree.map_with_path(placed, jax.eval_shape(optimizer.init, learned))


def _reduced_sharding(shape: tuple[int, ...], whole: tuple[int, ...], sharding: Any) -> Any:
    """The sharding of an array that has some of a parameter's dimensions; None: it has others."""
    if shape == whole:
        return sharding
    spec = (*sharding.spec, *(None,) * (len(whole) - len(sharding.spec)))
    dimensions, left = zip(whole, spec, strict=True), []
    for size in shape:
        axes = next(([axes] for n, axes in dimensions if n == size), None)
        if axes is None:
            return None
        left += axes
    return jax.NamedSharding(sharding.mesh, jax.P(*left))


class Updater:
    """One optimizer step of a model, compiled once per batch shape.

    Args:
      objective: maps (params, micro-batch, stack) to a weighted loss sum and sums of statistics;
        both add up over micro-batches. The batch has its weights.
      prepare: adds the weights to the whole step's batch, before it is cut.
      optimizer: settings of the update.
      passes: cuts batches into micro-batches under the train layout.
      network: the model whose trainable parameters are updated.
      pretraining: a second objective and its ``prepare``, for the batch entry ``pretrain`` if there
        is one; its loss is added (PPO-ptx).
      name: of the compiled program.
      finish: turns summed statistics into metrics; None: they are metrics.
    """

    def __init__(
        self,
        objective: Objective,
        prepare: Prepare,
        optimizer: OptimizerConfig,
        passes: MicroBatches,
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
        declared, _ = self._partition.split(network.declared)
        self._optimizer = optimizer.build(declared)
        self._rate = optimizer.rate()
        self._draws_noise = network.draws_noise

        def step(learned: Params, frozen: Params, state: Any, batch: dict[str, Any]) -> Any:
            return self._step(learned, frozen, state, batch)

        step.__name__ = name  # by which a compilation is logged
        state = jax.tree.map(lambda x: x.sharding, self.abstract_state(network.shapes))
        self._program = jax.jit(
            step,
            donate_argnums=(0, 2),
            out_shardings=(self._shardings, state, passes.layout.replicated),
            compiler_options=passes.layout.compiler_options,
        )

    def init(self, params: Params) -> Any:
        """Optimizer state of the trainable parameters, sharded like them."""
        placed = jax.tree.map(lambda x: x.sharding, self.abstract_state(params))
        learned, _ = self._partition.split(params)
        return jax.jit(self._optimizer.init, out_shardings=placed)(learned)

    def abstract_state(self, params: Params) -> Any:
        """The optimizer state as jax.ShapeDtypeStruct with shardings; ``params`` may be so too."""
        learned, _ = self._partition.split(params)
        replicated = self._passes.layout.replicated
        return abstract_state(self._optimizer, learned, self._shardings, replicated)

    def __call__(
        self, params: Params, state: Any, batch: dict[str, jax.Array]
    ) -> tuple[Params, Any, Metrics]:
        """Take a step; ``state`` and the trainable part of ``params`` are donated.

        Returns:
          the new parameters and state, laid out as before (the old ones if loss or gradient is not
          finite: ``skipped`` is then 1), and metrics, on every device: ``loss``, ``grad_norm``,
          ``learning_rate``, ``skipped`` and the objective's statistics.
        """
        learned, frozen = self._partition.split(params)
        learned, state, metrics = self._program(learned, frozen, state, batch)
        return self._partition.join(learned, frozen), state, metrics

    def trace(self, params: Any, state: Any, batch: Any) -> Any:
        """The program traced for abstract arguments, to count its costs without running it."""
        learned, frozen = self._partition.split(params)
        return self._program.trace(learned, frozen, state, batch)

    def _step(
        self, learned: Params, frozen: Params, state: Any, batch: dict[str, Any]
    ) -> tuple[Params, Any, Metrics]:
        batch, params = dict(batch), self._partition.join(learned, frozen)
        pretrain: Batch | None = batch.pop("pretrain", None)
        # The last count in the state is that of updates (see ``build``).
        *_, (_, count) = optax.tree.get_all_with_path(state, "count")
        if self._draws_noise:
            batch[UPDATE_COUNT] = count
            pretrain = None if pretrain is None else pretrain | {UPDATE_COUNT: count}
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
        # jnp.where updates in place; for lax.cond the GPU compiler would keep a second copy of
        # parameters and state.
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
