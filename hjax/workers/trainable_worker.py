"""A worker that is trained: a model with an optimizer, updated on a loss over batches."""

import functools
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from hjax.batches import LENGTHS
from hjax.errors import ConfigError
from hjax.models.dropout import KEY as DROPOUT
from hjax.models.dropout import row_keys
from hjax.models.load_balancing import (
    RoutingTally,
    balance_loss,
    balance_metrics,
    router_token_weights,
)
from hjax.models.parameters import Network, Params
from hjax.sharding.global_arrays import place
from hjax.sharding.offload import to_device
from hjax.sharding.parameter_manifest import ParameterManifest
from hjax.sharding.pipeline import Stack
from hjax.sharding.protocols import PROMPT_ID, control
from hjax.workers.micro_batching import Batch, Objective
from hjax.workers.model import ModelWorker
from hjax.workers.optimizer import UPDATE_COUNT, Prepare, Updater
from hjax.workers.parameter_worker import interpolate
from hjax.workers.worker import TOKEN_KEYS, LearningContext, WorkerContext
from hjax.xla.abstract_program import AbstractProgram

# Stages of training: on the algorithm's loss, or on demonstrations before it.
STAGES = ("main", "warm_start")
# Entry of an objective's sums for the routers' statistics.
ROUTED = "routed"


def routing_metrics(sums: dict[str, Any]) -> dict[str, jax.Array]:
    """An update's metrics, from the sums of an objective with the load-balancing loss."""
    metrics = dict(sums)
    return metrics | balance_metrics(metrics.pop(ROUTED))


class TrainableWorker(ModelWorker):
    """A model worker with an optimizer."""

    state_attributes = {"params": "params", "optimizer": "optimizer_state", "average": "average"}

    def __init__(self, context: WorkerContext):
        super().__init__(context)
        self.check_trainable()
        self.stage = "main"
        self._updaters: dict[tuple[str, bool], Updater] = {}
        self.updater: Any = None  # of a network that is not trained
        if context.optimizer is not None:
            self.updater = self._updater("main", grouped=True)
        self.optimizer_state: Any = None
        # The moving average of the trainable parameters; {}: none is kept.
        self.average: Params = {}
        self._uses_average = False

    def check_trainable(self) -> None:
        """Raise ConfigError where the context lacks what training needs."""
        context = self.context
        if context.optimizer is None or context.loss is None:
            raise ConfigError(f"{self.role}: a trained role needs a loss and an optimizer")
        if context.router_loss and not self.network.config.experts:
            raise ConfigError(
                f"{self.role}: router_loss={context.router_loss} is for models with experts, and "
                "this model has none; use 0"
            )

    def _updater(self, stage: str, grouped: bool) -> Updater:
        """The update program of a stage; ``grouped``: samples of a prompt are consecutive."""
        if (stage, grouped) not in self._updaters:
            context = self.context
            loss, optimizer = context.loss, context.optimizer
            if stage == "warm_start":
                loss, optimizer = context.supervised_loss, context.warm_start
            if loss is None or optimizer is None:
                raise ConfigError(f"{self.role}: this run was set up without a {stage} stage")
            network = self.trained_network(stage)
            objective, prepare = self.objective(loss, grouped, network, context.router_loss)
            self._updaters[stage, grouped] = Updater(
                objective,
                prepare,
                optimizer,
                self.micro_batches if network is self.network else self._batching(network),
                network,
                self.pretraining_objective(network),
                name=f"{self.role}_update",
                finish=routing_metrics if context.router_loss else None,
            )
        return self._updaters[stage, grouped]

    def trained_network(self, stage: str) -> Network:
        """The network trained in a stage; a warm start trains the base of later adapters."""
        return self.network.base if stage == "warm_start" else self.network

    def objective(
        self, loss: Any, grouped: bool, network: Network, router_loss: float = 0.0
    ) -> tuple[Objective, Prepare]:
        """A loss as a weighted sum over a micro-batch, and a function for the whole step's weights.

        Args:
          loss: the algorithm's.
          grouped: samples of a prompt are consecutive.
          network: what is trained.
          router_loss: weight of the load-balancing loss of experts. It is no sum over tokens: each
            micro-batch has its own, weighted by its share of the step's tokens.
        """

        def objective(params: Params, batch: Batch, stack: Stack) -> Any:
            samples = self.share(batch["responses"].shape[0]) if grouped else 1
            tally = RoutingTally() if router_loss else None
            model = network.bind(params, stack, tally)
            token_loss, stats = self.token_loss(model, batch, samples, loss)
            total = jnp.sum(batch["weights"] * token_loss)
            sums: dict[str, Any] = {k: jnp.sum(batch["stat_weights"] * v) for k, v in stats.items()}
            if tally is not None:
                if tally.routed is None:
                    raise ConfigError(
                        f"{self.role}: its token_loss does not use map_response_states, so "
                        f"router_loss={router_loss} has no tokens; use 0"
                    )
                share = tally.routed.tokens / batch["counted"]
                balance = share * balance_loss(tally.routed)
                total += router_loss * balance
                sums |= {"router_loss": balance, ROUTED: jax.lax.stop_gradient(tally.routed)}
            return total, sums

        def prepare(batch: Batch) -> Batch:
            made = {"weights": loss.weights(batch), "stat_weights": loss.stat_weights(batch)}
            if hasattr(loss, "prepared"):
                made |= loss.prepared(batch)
            if UPDATE_COUNT in batch:
                samples = self.context.samples if grouped else 1
                rows = batch["responses"].shape[0]
                made[DROPOUT] = row_keys(self.context.seed, batch[UPDATE_COUNT], rows, samples)
            if router_loss:
                made |= router_token_weights(batch)
            return batch | made

        return objective, prepare

    def pretraining_objective(self, network: Network) -> tuple[Objective, Prepare] | None:
        """Objective and preparation of the batch's ``pretrain`` entry (PPO-ptx); None: none."""
        return None

    def token_loss(
        self, model: Any, batch: dict[str, jax.Array], share: int, loss: Any
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Per-token loss and statistics [rows, length] of a micro-batch."""
        raise NotImplementedError(f"{type(self).__name__} must define token_loss")

    @control
    def initialize(self) -> None:
        """Load or draw the weights, and start the optimizer."""
        super().initialize()
        self.begin_stage(self.stage)

    @control
    def take_weights(self, params: Params, manifest: ParameterManifest | None = None) -> None:
        """Copy another worker's parameters, and start the optimizer."""
        super().take_weights(params, manifest)
        self.begin_stage(self.stage)

    @control
    def begin_stage(self, stage: str) -> None:
        """Start a stage of training with a fresh optimizer; later updates use its loss.

        Args:
          stage: ``main``, the algorithm's loss; ``warm_start``, that on demonstrations.

        Raises:
          ConfigError: another stage, or one that the run was set up without.
        """
        if stage not in STAGES:
            raise ConfigError(f"stage {stage!r}; allowed: {', '.join(STAGES)}")
        updater = self._updater(stage, True)
        self.stage = stage
        self.optimizer_state = updater.init(self._trained_params())
        if self._decay and stage == "main":
            self.average = jax.jit(functools.partial(jax.tree.map, jnp.copy))(
                self.network.partition.split(self.params)[0]
            )

    @property
    def _decay(self) -> float:
        optimizer = self.context.optimizer
        return 0.0 if optimizer is None else optimizer.ema_decay

    @control
    def use_average(self, use: bool) -> None:
        """Exchange the trained weights with their moving average, for evaluation and export, or
        back. Between the two calls nothing may be updated or saved.

        Args:
          use: whether the average is the model from now on; nothing happens if it is already.
        """
        if self.average and use != self._uses_average:
            learned, frozen = self.network.partition.split(self.params)
            self.params = self.network.partition.join(to_device(self.average), frozen)
            self.average, self._uses_average = learned, use

    def _trained_params(self) -> Params:
        """The parameters of the network that this stage trains."""
        if self.trained_network(self.stage) is self.network:
            return self.params
        return self.network.without_adapters_of(self.params)

    def offloaded_state(self, phase: str, called: bool) -> set[str]:
        """Optimizer state is offloaded outside of updates, parameters outside of own calls."""
        offload, update = self.context.offload, phase == "update"
        away: set[str] = set()
        if offload != "none" and not (update and called):
            away = {"optimizer", "average"} if self._decay else {"optimizer"}
        return super().offloaded_state(phase, called) | away

    def apply_offload(self, phase: str, called: bool) -> None:
        """Move parameters and optimizer state to where this phase needs them."""
        for kind in ("optimizer", "average"):
            self._place(kind, self.offloaded_state(phase, called), phase, called)
        super().apply_offload(phase, called)

    def update(self, batch: Mapping[str, Any], **more: Any) -> dict[str, jax.Array]:
        """One optimizer step on a batch; returns metrics as scalars on the device.

        Args:
          batch: has the entries that the losses need.
          more: further entries for the update program.
        """
        needs = update_keys(self.context, *self.extra_keys)
        arrays = {key: batch[key] for key in needs if batch.get(key) is not None} | more
        grouped = self.grouped(batch)
        layout = self.batch_layout(arrays, grouped, self.context.unit)
        if not self.context.router_loss:  # which counts tokens; else only packs read lengths
            arrays.pop(LENGTHS, None)
        metrics = self.take_update(layout.with_packing(arrays), grouped)
        if layout.padding is None:
            return metrics
        return metrics | {"padding": place(layout.padding, self.layouts.train.replicated)}

    def take_update(self, arrays: dict[str, Any], grouped: bool) -> dict[str, jax.Array]:
        """Run the update program on a batch's arrays; returns its metrics."""
        params, self.optimizer_state, metrics = self._updater(self.stage, grouped)(
            self._trained_params(), self.optimizer_state, arrays
        )
        if self.trained_network(self.stage) is not self.network:
            learned, _ = self.network.partition.split(self.params)
            params = self.network.partition.join(learned, params)
        self.params = params
        if self._decay and self.stage == "main":
            learned, _ = self.network.partition.split(params)
            self.average = self._move_average(self.average, learned)
        return metrics

    @functools.cached_property
    def _move_average(self) -> Any:
        move = functools.partial(interpolate, share=1 - self._decay)
        return jax.jit(move, donate_argnums=0)

    # Entries that an update reads beside tokens and what the losses need.
    extra_keys: tuple[str, ...] = ()

    def state(self) -> dict[str, Any]:
        """Parameters, optimizer state and the parameters' moving average, if one is kept."""
        kept = {"average": self.average} if self._decay else {}
        return super().state() | {"optimizer": self.optimizer_state} | kept

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a ``checkpointed`` state."""
        super().restore(state)
        self.optimizer_state = state["optimizer"]
        self.average, self._uses_average = state.get("average", {}), False

    def abstract_state(self) -> dict[str, Any]:
        """Shapes and shardings of ``state()``."""
        state = super().abstract_state()
        learned, _ = self.network.partition.split(state["params"])
        kept = {"average": learned} if self._decay else {}
        return state | {"optimizer": self.updater.abstract_state(state["params"])} | kept

    def resident_state(self, program: str) -> dict[str, Any]:
        """State that a program does not read; an update reads all of it."""
        kinds = {"average"} if program == "update" else {"optimizer", "average"}
        return {kind: tree for kind, tree in self.abstract_state().items() if kind in kinds}

    def programs(self, rows: int, prompt_length: int) -> Iterator[AbstractProgram]:
        """Programs of ``score_methods``, and the update of a mini-batch of ``rows`` sequences."""
        yield from ModelWorker.programs(self, rows, prompt_length)
        batch = self.token_shapes(rows, prompt_length)
        floats = jax.ShapeDtypeStruct(
            batch["responses"].shape, jnp.float32, sharding=batch["responses"].sharding
        )
        number = jax.ShapeDtypeStruct((), jnp.float32, sharding=self.layouts.train.replicated)
        per_row = jax.ShapeDtypeStruct(floats.shape[:1], jnp.float32, sharding=floats.sharding)
        loss: Any = self.context.loss
        kinds = dict.fromkeys(getattr(loss, "scalars", ()), number)
        kinds |= dict.fromkeys(getattr(loss, "per_row", ()), per_row)
        if hasattr(loss, "shapes"):
            for key, (rest, dtype) in loss.shapes(self.network.config.vocab_size).items():
                shape = (*floats.shape, *rest)
                batch[key] = jax.ShapeDtypeStruct(shape, dtype, sharding=floats.sharding)
        for key in (*loss.needs, *self.extra_keys):
            batch.setdefault(key, kinds.get(key, floats))
        state = self.abstract_state()
        trace = self.updater.trace
        yield AbstractProgram("update", lambda: trace(state["params"], state["optimizer"], batch))


def update_reads(worker: type[TrainableWorker], context: WorkerContext, *_: Any) -> tuple[str, ...]:
    """Entries of a batch that are sent to a role's updates, with pretraining's coefficient."""
    loss = context.pretraining_loss
    more = () if loss is None else ("row_mask", *loss.needs)
    keys = (*update_keys(context, *worker.extra_keys), PROMPT_ID, "coefficient", *more)
    return tuple(dict.fromkeys(keys))


def update_keys(context: LearningContext, *extra: str) -> tuple[str, ...]:
    """Entries of a batch that the update program of a role reads."""
    losses = (context.loss, context.supervised_loss)
    needs = [key for loss in losses if loss is not None for key in loss.needs]
    optional = LENGTHS, "row_mask", "episode"
    return tuple(dict.fromkeys((*TOKEN_KEYS, *optional, *needs, *extra)))
