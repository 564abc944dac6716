"""A worker with a network of the user's own, on batches of any arrays with a row per example."""

import dataclasses
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from hjax.errors import ConfigError
from hjax.files import StrPath, saved_steps
from hjax.models.array_network import array_network
from hjax.models.checkpoint import restore_params
from hjax.models.dropout import row_keys
from hjax.sharding.global_arrays import is_array, place
from hjax.sharding.protocols import control, protocol
from hjax.workers.micro_batching import Batch, Objective, rows_of
from hjax.workers.optimizer import UPDATE_COUNT, Prepare
from hjax.workers.parameter_worker import ParameterWorker
from hjax.workers.trainable_worker import TrainableWorker
from hjax.workers.worker import WorkerContext
from hjax.xla.abstract_program import AbstractProgram

# Entries of an update's batch beside the user's: each row's weight and PRNG key.
_WEIGHTS, _KEYS = "row weights", "row keys"
_IMPL = "threefry2x32"  # of the keys


def network_reads(worker: Any, context: WorkerContext, *_: Any) -> Any:
    """Entries of a batch that an update reads: those that the algorithm's loss names; else all."""
    needs = getattr(context.loss, "needs", None)
    return None if needs is None else (*needs, "row_mask")


class NetworkWorker(TrainableWorker):
    """A worker whose network, loss and policy a subclass defines.

    ``model`` is what ``init`` returned with the current parameters: the dict, or the flax.nnx
    module. Parameters keep the dtypes that ``init`` gives them. A role with ``trained=True`` has an
    optimizer, of its config section; any other only holds its parameters, such as a reference.

    A subclass defines ``init``, and what it needs of ``loss``, ``act`` and ``log_prob``. Further
    methods ``name(self, model, *values)`` are called by ``run``.
    """

    network: Any  # ArrayNetwork

    def __init__(self, context: WorkerContext):
        self.algorithm_loss = context.loss
        if context.optimizer is not None and context.loss is None:
            context = dataclasses.replace(context, loss=self.loss)
        super().__init__(dataclasses.replace(context, packing=0, choose_packing=False))
        # Roles of one seed draw their own weights and noise.
        self.noise_seed = context.seed ^ zlib.crc32(self.role.encode())
        self._programs: dict[Any, Any] = {}
        train = self.layouts.train
        for name, axis in (("layers", "pipe"), ("length", "context")):
            if train.shard_count(name) > 1:
                raise ConfigError(
                    f"layout.{self.role}.train.{axis}={train.shard_count(name)}: a network of your "
                    f"own has no {name} to split; use data, fsdp or tensor"
                )

    def init(self, key: jax.Array) -> Any:
        """The initial parameters: a nested dict of arrays, or a flax.nnx module.

        Args:
          key: PRNG key, of the run's seed and the role.
        """
        raise NotImplementedError(f"{type(self).__name__} must define init(key)")

    def axes(self) -> Mapping[str, Any]:
        """Logical axis names of parameters, by which layouts split them: nested dict of tuples.

        What it lacks is not split. The names are those of ``hjax.sharding.layout.TRAIN_RULES``:
        ``embed`` is split by fsdp, ``mlp`` by tensor parallelism.
        """
        return {}

    def loss(self, model: Any, batch: Batch, keys: jax.Array) -> Any:
        """The loss of each row of a mini-batch, or of a part of it; by default the algorithm's.

        Args:
          model: with the parameters that are trained.
          batch: arrays with a row per example, and scalars.
          keys: PRNG keys [rows], of the seed, the role, the update and the row: the same whatever
            the micro-batches and devices.

        Returns:
          float [rows], or that and a dict of statistics [rows]. The update minimises the mean over
          all rows of the mini-batch whose ``row_mask`` (if there is one) is true.
        """
        if self.algorithm_loss is None:
            raise ConfigError(
                f"{self.role}: {type(self).__name__} is trained and has no loss; define "
                "loss(self, model, batch, keys), or give the role one in the algorithm's losses"
            )
        return self.algorithm_loss(self, model, batch, keys)

    def act(self, model: Any, observation: jax.Array, key: jax.Array) -> jax.Array:
        """Draw an action for one observation (without a row axis)."""
        raise NotImplementedError(f"{type(self).__name__} must define act")

    def log_prob(self, model: Any, observation: jax.Array, action: jax.Array) -> jax.Array:
        """Log-probability of one action under one observation, a float scalar."""
        raise NotImplementedError(f"{type(self).__name__} must define log_prob")

    def make_network(self) -> Any:
        """The network without values, an ``ArrayNetwork``."""
        return array_network(self.init, self.axes(), type(self).__name__)

    def check_trainable(self) -> None:
        """Nothing: a network without an optimizer stays as it is."""

    @control
    def initialize(self) -> None:
        """Read the parameters of the role from the workdir at its path, or draw them; start the
        optimizer."""
        train = self.layouts.train
        if self.context.path:
            self.params = self.network.place(read_params(self.context.path, self.role), train)
        else:
            self.params = self.network.create(self.noise_seed, train)
        self.begin_stage(self.stage)

    @control
    def begin_stage(self, stage: str) -> None:
        """Start the optimizer, if the role has one."""
        if self.updater is not None:
            super().begin_stage(stage)

    def objective(
        self, loss: Any, grouped: bool, network: Any, router_loss: float = 0.0
    ) -> tuple[Objective, Prepare]:
        """The loss as a weighted sum over a micro-batch, and what prepares a whole mini-batch."""

        def objective(params: Any, batch: Batch, stack: Any) -> Any:
            weights, keys = batch[_WEIGHTS], _row_keys(batch[_KEYS])
            given = {key: x for key, x in batch.items() if key not in (_WEIGHTS, _KEYS)}
            losses = self.loss(network.bind(params), given, keys)
            losses, stats = losses if isinstance(losses, tuple) else (losses, {})
            for name, values in {"loss": losses, **stats}.items():
                if jnp.shape(values) != weights.shape:
                    raise ConfigError(
                        f"{type(self).__name__}.loss: {name} has shape {jnp.shape(values)}; a "
                        f"number per row is needed, {weights.shape}"
                    )
            counted = {
                name: jnp.sum(weights * jnp.where(weights > 0, values, 0))
                for name, values in stats.items()
            }
            return jnp.sum(weights * jnp.where(weights > 0, losses, 0)), counted

        def prepare(batch: Batch) -> Batch:
            batch = dict(batch)
            update, rows = batch.pop(UPDATE_COUNT), rows_of(batch)
            mask = jnp.asarray(batch.get("row_mask", jnp.ones(rows)), jnp.float32)
            batch[_WEIGHTS] = mask / jnp.maximum(jnp.sum(mask), 1)
            batch[_KEYS] = row_keys(self.noise_seed, update, rows, 1)
            return batch

        return objective, prepare

    @protocol("3D_PROTO", phase="update", reads=network_reads)
    def update(self, batch: Mapping[str, Any], **more: Any) -> dict[str, jax.Array]:
        """One optimizer step on the mean loss of a mini-batch.

        Args:
          batch: its arrays reach ``loss``; other entries stay behind.
          more: further entries.

        Returns:
          ``loss``, ``grad_norm``, ``learning_rate``, ``skipped`` (1 where loss or gradient is not
          finite: nothing changed) and the means of the loss's statistics.
        """
        if self.updater is None:
            raise ConfigError(f"{self.role}: say trained=True in its Role to update it")
        arrays = {key: x for key, x in batch.items() if is_array(x)} | more
        return self.take_update(arrays, True)

    @protocol("3D_PROTO")
    def run(self, name: str, *values: Any) -> Any:
        """Call a method of the class, compiled, on rows that are split over the devices.

        Args:
          name: of a method ``name(self, model, *values)``.
          values: arrays or batches; of a batch only its arrays, and keys as arrays of
            ``jax.random.key_data``.

        Returns:
          what the method returns.
        """
        given = tuple(
            {key: x for key, x in value.items() if is_array(x)}
            if isinstance(value, Mapping)
            else value
            for value in values
        )
        return self.compiled(name)(self.params, *given)

    @protocol("3D_PROTO", phase="generate")
    def generate_actions(self, batch: Mapping[str, Any]) -> dict[str, jax.Array]:
        """Draw an action for each observation.

        Args:
          batch: ``observations`` [rows, ...], and ``step`` and ``turn`` (int; 0 without): calls of
            one step need another turn each, as equal numbers draw equal noise.

        Returns:
          ``actions`` [rows, ...] and ``logprobs`` float [rows].
        """
        number = [int(batch.get(key, 0)) for key in ("step", "turn")]
        whole = self.layouts.train.replicated
        numbers = [place(jnp.asarray(x, jnp.uint32), whole) for x in number]
        return self.compiled("_draw_actions")(self.params, batch["observations"], *numbers)

    def _draw_actions(
        self, model: Any, observations: jax.Array, step: jax.Array, turn: jax.Array
    ) -> dict[str, jax.Array]:
        """``act`` and ``log_prob`` of rows, with the noise of a step and turn."""
        keys = self.noise(step, turn, observations.shape[0])
        actions = jax.vmap(lambda x, key: self.act(model, x, key))(observations, keys)
        logprobs = jax.vmap(lambda x, a: self.log_prob(model, x, a))(observations, actions)
        return {"actions": actions, "logprobs": logprobs}

    def noise(self, step: jax.Array, turn: jax.Array | int, rows: int) -> jax.Array:
        """PRNG keys [rows] of a step and turn, of this role alone."""
        start = jax.random.key(self.noise_seed, impl=_IMPL)
        start = jax.random.fold_in(jax.random.fold_in(start, step), turn)
        return jax.vmap(lambda row: jax.random.fold_in(start, row))(jnp.arange(rows))

    def compiled(self, name: str, **static: Any) -> Any:
        """The compiled ``method(model, *values)`` of the class, called with parameters."""
        method = getattr(self, name, None)
        if method is None:
            raise ConfigError(f"{self.role}: {type(self).__name__} has no method {name!r}")
        key = name, tuple(sorted(static.items()))
        if key not in self._programs:

            def program(params: Any, *values: Any) -> Any:
                return method(self.network.bind(params), *values, **static)

            program.__name__ = f"{self.role}_{name}"
            options = self.layouts.train.compiler_options
            self._programs[key] = jax.jit(program, compiler_options=options)
        return self._programs[key]

    @property
    def model(self) -> Any:
        """The network with its current parameters, to look at: the dict or the module."""
        return self.network.bind(self.params)

    def state(self) -> dict[str, Any]:
        """Parameters and, of a trained role, optimizer state and moving average."""
        return super().state() if self.updater is not None else ParameterWorker.state(self)

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a ``checkpointed`` state."""
        if self.updater is not None:
            super().restore(state)
        else:
            ParameterWorker.restore(self, state)

    def abstract_state(self) -> dict[str, Any]:
        """Shapes and shardings of ``state()``."""
        if self.updater is not None:
            return super().abstract_state()
        return ParameterWorker.abstract_state(self)

    def programs(self, rows: int, prompt_length: int) -> Iterator[AbstractProgram]:
        """None: the shapes of a batch are known at the first call."""
        yield from ()


def read_params(workdir: StrPath, role: str) -> Any:
    """A role's parameters in the newest checkpoint of a run, with ``ema_decay`` their average.

    Raises:
      ConfigError: no checkpoint of a run, or none of this role.
    """
    folder = Path(workdir) / "checkpoints"
    if not (steps := saved_steps(folder)):
        raise ConfigError(f"{workdir}: no checkpoint of a run of hjax; name its workdir")
    saved = folder / str(max(steps))
    if not (saved / f"{role}.params").is_dir():
        kept = sorted(path.name.partition(".")[0] for path in saved.glob("*.params"))
        raise ConfigError(f"{saved}: no {role} was saved; there is {', '.join(kept) or 'nothing'}")
    return restore_params(saved, role, "average") or restore_params(saved, role)


def _row_keys(words: jax.Array) -> jax.Array:
    """PRNG keys [rows] of ``row_keys``."""
    return jax.random.wrap_key_data(words[:, 2:], impl=_IMPL)
