"""Workers: the model class of a role, which owns its compiled programs and its parameters."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hjax.errors import ConfigError
from hjax.models.config import ModelConfig
from hjax.models.parameters import Network, Params, decoder_network, scalar_network
from hjax.models.transformer import Compute
from hjax.models.weights import load_decoder, load_scalar
from hjax.rollout.sampling import Sampling
from hjax.sharding.layout import RoleLayouts, check_shapes, without
from hjax.sharding.offload import to_device, to_host
from hjax.sharding.pipeline import Stack
from hjax.sharding.transition import BUCKET_BYTES
from hjax.workers.optimizer import OptimizerConfig, Prepare, Updater
from hjax.workers.passes import Batch, Objective, Passes

# The arrays that a forward over prompts and responses reads.
TOKEN_KEYS = ("prompts", "prompt_mask", "responses", "response_mask")


@dataclasses.dataclass(frozen=True)
class WorkerContext:
    """What a worker is built from; plain and picklable but for the layouts.

    Attributes:
      role: name in the dataflow.
      layouts: train and generate layouts on its pool's devices; None for a worker without any.
      seed: of the run.
      tokenizer: of the role's model, or None.
      model: shapes of the role's model.
      path: where its weights are read; empty: from scratch, or copied from the actor.
      compute: dtype and loop form.
      samples: rows of a batch that share a prompt.
      sampling: how responses are drawn; its temperature applies to all log-probs.
      stop: token ids that end a response.
      max_response_length: tokens.
      loss: the algorithm's loss for this role, picklable, or None.
      warm_start_loss, warm_start: loss and settings of supervised updates, or None.
      optimizer: settings of its updates, or None.
      micro_batch: rows per pass over all devices; 0: all.
      offload: what waits in pinned host memory while it is idle: ``none``, ``optimizer`` (its
        state, but in updates) or ``all`` (the parameters too, but in the role's own calls).
      retokenize: the role's tokenizer differs from the actor's, so text is tokenised again.
      transition_bucket_bytes: of parameters that go to the generate layout in one program.
      options: whatever a user's own worker wants: the run's whole config.
    """

    role: str
    layouts: RoleLayouts | None = None
    seed: int = 0
    tokenizer: Any = None
    model: ModelConfig | None = None
    path: str = ""
    compute: Compute = Compute()
    samples: int = 1
    sampling: Sampling = Sampling()
    stop: tuple[int, ...] = ()
    max_response_length: int = 0
    loss: Any = None
    warm_start_loss: Any = None
    warm_start: OptimizerConfig | None = None
    optimizer: OptimizerConfig | None = None
    micro_batch: int = 0
    offload: str = "none"
    retokenize: bool = False
    transition_bucket_bytes: int = BUCKET_BYTES
    options: Any = None

    @property
    def temperature(self) -> float:
        """What logits are divided by wherever rollouts are scored; 1 for greedy sampling."""
        return self.sampling.temperature or 1.0


class Worker:
    """Base of every role. Subclass it and bind methods with ``@hjax.protocol``."""

    def __init__(self, context: WorkerContext):
        self.context = context
        self.role = context.role
        self.layouts = context.layouts


class ModelWorker(Worker):
    """A worker with a model: knows its shapes at once, gets its numbers by ``initialize``."""

    scalar = False
    layouts: RoleLayouts
    # Kinds of state, and the attributes that hold them.
    kept: Mapping[str, str] = {"params": "params"}

    def __init__(self, context: WorkerContext):
        super().__init__(context)
        if context.layouts is None or context.model is None:
            raise ConfigError(f"{context.role}: a model needs devices and shapes")
        self.network: Network = (scalar_network if self.scalar else decoder_network)(context.model)
        train, generate = context.layouts.train, context.layouts.generate
        self.kept_whole = check_shapes(train, context.model.dimensions, f"layout.{self.role}.train")
        narrow = check_shapes(
            generate, context.model.dimensions, f"layout.{self.role}.generate"
        )
        self.layouts = RoleLayouts(without(train, self.kept_whole), without(generate, narrow))
        self.shardings = self.network.shardings(self.layouts.train)
        train = self.layouts.train
        # Stages of a pipeline take branches of their own, in which only a split length is held.
        held = train if train.ways("layers") == 1 or train.ways("length") > 1 else None
        self.compute = dataclasses.replace(context.compute, layout=held)
        self.passes = Passes(train, self.network.axes, context.micro_batch, context.samples)
        self.params: Params = {}  # until initialize, copy_from or restore
        self._phase = ""
        self._forwards: dict[tuple, Any] = {}

    def initialize(self) -> None:
        """Read the weights from the role's path, or draw them from the seed."""
        path, layout = self.context.path, self.layouts.train
        if not path:
            self.params = self.network.create(self.context.seed, layout)
            return
        config, params = (load_scalar if self.scalar else load_decoder)(path)
        if config != self.context.model:
            raise ConfigError(f"{path}: its shapes changed since the run was set up")
        self.params = self.network.place(params, layout)

    def copy_from(self, params: Params) -> None:
        """Take another worker's parameters of the same shapes, in copy, whatever their layout."""
        # Copied first: device_put between shuffled shards shares buffers whatever may_alias says.
        params = jax.jit(lambda tree: jax.tree.map(jnp.copy, tree))(params)
        self.params = jax.tree.map(jax.device_put, params, self.shardings)

    def away(self, phase: str, called: bool) -> set[str]:
        """Kinds of state that wait on the host in a phase, where it is or isn't this role's call.

        While updating, what was once needed stays until the phase ends.
        """
        return set() if called or self.context.offload != "all" else {"params"}

    def turn(self, phase: str, called: bool) -> None:
        """Put away what a call does not need, or fetch what it does; asked by the pool."""
        self._place("params", self.away(phase, called), phase, called)
        self._phase = phase

    def _place(self, kind: str, away: set[str], phase: str, called: bool) -> None:
        name = self.kept[kind]
        if kind not in away:
            setattr(self, name, to_device(getattr(self, name)))
        elif called or phase != "update" or self._phase != "update":
            setattr(self, name, to_host(getattr(self, name)))

    def state(self) -> dict[str, Any]:
        """Everything that decides what this worker does next, as trees of arrays."""
        return {"params": self.params}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a ``state()``."""
        self.params = state["params"]

    def abstract_state(self) -> dict[str, Any]:
        """``state()`` as jax.ShapeDtypeStruct with shardings, without the numbers."""
        return {"params": abstract(self.network.shapes, self.shardings)}

    def programs(self, rows: int, prompt_length: int) -> Iterator[tuple[str, Callable[[], Any]]]:
        """(name, function that traces it) of each program that calls on ``rows`` sequences run.

        A name is that of the protocol method, or ``generate``, ``transition``, ``update``; the
        function returns a jax.stages.Traced of abstract arguments. Nothing is allocated.
        """
        return iter(())

    def beside(self, program: str) -> dict[str, Any]:
        """The part of ``abstract_state()`` that stays while a program runs but is no argument."""
        return {}

    def trace_forward(self, compute: Callable[..., Any], rows: int, prompt_length: int) -> Any:
        """What ``forward`` compiles of ``compute`` for the tokens of ``rows`` sequences."""
        params = abstract(self.network.shapes, self.shardings)
        batch = self.token_shapes(rows, prompt_length)
        return self._forward(compute, True).trace(params, batch)

    def forward(self, compute: Callable[..., Any], params: Any, batch: Any) -> Any:
        """Run ``compute(model, batch, share)`` compiled; ``share``: rows per copy of a prompt.

        Its arrays have a row per row of the batch, which a pipeline cuts into micro-batches.
        Programs are kept by the function's code: whatever varies between calls goes in ``batch``.
        """
        return self._forward(compute, self.grouped(batch))(params, batch)

    def _forward(self, compute: Callable[..., Any], grouped: bool) -> Any:
        key = (getattr(compute, "__code__", compute), grouped)
        if key not in self._forwards:

            def part(params: Params, batch: Any, stack: Stack) -> Any:
                share = self.share(next(iter(batch.values())).shape[0]) if grouped else 1
                return compute(self.network.bind(params, stack), batch, share)

            def run(params: Params, batch: Any) -> Any:
                return self.passes.forward(part, params, batch)

            run.__name__ = f"{self.role}_{compute.__name__.strip('_')}"
            self._forwards[key] = jax.jit(run)
        return self._forwards[key]

    def share(self, rows: int) -> int:
        """Rows per copy of a prompt, such that no copy straddles two devices' parts."""
        return math.gcd(self.context.samples, rows // self.layouts.train.ways("batch"))

    def grouped(self, batch: Any) -> bool:
        """Whether the rows come in groups of ``samples`` that hold one prompt each.

        A greedy batch has one row per prompt, demonstrations and filtered batches any order;
        their prompts must not be taken for copies of one another.
        """
        samples = self.context.samples
        if samples == 1:
            return True
        for key in ("prompts", "prompt_mask"):
            if key not in batch or batch[key].shape[0] % samples:
                return False
            groups = np.asarray(batch[key]).reshape(-1, samples, batch[key].shape[1])
            if not np.array_equal(groups, np.broadcast_to(groups[:, :1], groups.shape)):
                return False
        return True

    def token_shapes(self, rows: int, prompt_length: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Abstract prompts and responses of a step, placed for training."""
        length = self.context.max_response_length
        split = self.layouts.train.sharding("batch")
        sizes = {"prompts": prompt_length, "prompt_mask": prompt_length}
        return {
            key: jax.ShapeDtypeStruct(
                (rows, sizes.get(key, length)),
                jnp.bool_ if key.endswith("mask") else jnp.int32,
                sharding=split,
            )
            for key in TOKEN_KEYS
        }


class TrainedWorker(ModelWorker):
    """A model worker with an optimizer."""

    kept = {"params": "params", "optimizer": "optimizer_state"}

    def __init__(self, context: WorkerContext):
        super().__init__(context)
        if context.optimizer is None or context.loss is None:
            raise ConfigError(f"{self.role}: a trained role needs a loss and an optimizer")
        self.updater = self.make_updater(context.loss, context.optimizer)
        self._ungrouped: Updater | None = None
        self.optimizer_state: Any = None

    def make_updater(self, loss: Any, optimizer: OptimizerConfig, grouped: bool = True) -> Updater:
        """An update program for one loss; ``grouped``: samples of a prompt are consecutive."""

        def objective(params: Params, batch: Batch, stack: Stack) -> Any:
            share = self.share(batch["responses"].shape[0]) if grouped else 1
            model = self.network.bind(params, stack)
            token_loss, stats = self.token_loss(model, batch, share, loss)
            total = jnp.sum(batch["weights"] * token_loss)
            return total, {k: jnp.sum(batch["stat_weights"] * v) for k, v in stats.items()}

        def prepare(batch: Batch) -> Batch:
            return batch | {
                "weights": loss.weights(batch),
                "stat_weights": loss.stat_weights(batch),
            }

        return Updater(
            objective,
            prepare,
            optimizer,
            self.passes,
            self.shardings,
            self.pretraining(),
            name=f"{self.role}_update",
        )

    def pretraining(self) -> tuple[Objective, Prepare] | None:
        """Objective and preparation of the batch's ``pretrain`` entry; None: no such loss."""
        return None

    def token_loss(
        self, model: Any, batch: dict[str, jax.Array], share: int, loss: Any
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Per-token loss and statistics [rows, length] of a micro-batch."""
        raise NotImplementedError(f"{type(self).__name__} must define token_loss")

    def initialize(self) -> None:
        """Read or draw the weights, and start the optimizer."""
        super().initialize()
        self.start_optimizer()

    def copy_from(self, params: Params) -> None:
        """Take another worker's parameters, in copy, and start the optimizer."""
        super().copy_from(params)
        self.start_optimizer()

    def away(self, phase: str, called: bool) -> set[str]:
        """The optimizer's state waits outside of updates, the parameters outside of own calls."""
        offload, update = self.context.offload, phase == "update"
        optimizer = offload != "none" and not (update and called)
        return super().away(phase, called) | ({"optimizer"} if optimizer else set())

    def turn(self, phase: str, called: bool) -> None:
        """Parameters and optimizer state, each where this phase needs it."""
        self._place("optimizer", self.away(phase, called), phase, called)
        super().turn(phase, called)

    def start_optimizer(self) -> None:
        """Fresh optimizer state for the parameters as they are."""
        self.optimizer_state = self.updater.init(self.params)

    def update(self, batch: dict[str, Any]) -> dict[str, jax.Array]:
        """One optimizer step on a batch; returns metrics as scalars on the device."""
        needs = (*TOKEN_KEYS, *self.context.loss.needs, "row_mask", *self.extra_keys)
        arrays = {key: batch[key] for key in dict.fromkeys(needs) if batch.get(key) is not None}
        updater = self.updater if self.grouped(arrays) else self._ungrouped_updater()
        self.params, self.optimizer_state, metrics = updater(
            self.params, self.optimizer_state, arrays
        )
        return metrics

    def _ungrouped_updater(self) -> Updater:
        if self._ungrouped is None:
            assert self.context.optimizer is not None
            self._ungrouped = self.make_updater(
                self.context.loss, self.context.optimizer, grouped=False
            )
        return self._ungrouped

    extra_keys: tuple[str, ...] = ()

    def state(self) -> dict[str, Any]:
        """Parameters and optimizer state."""
        return super().state() | {"optimizer": self.optimizer_state}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a ``state()``."""
        super().restore(state)
        self.optimizer_state = state["optimizer"]

    def abstract_state(self) -> dict[str, Any]:
        """Shapes and shardings of ``state()``."""
        state = super().abstract_state()
        optimizer = self.updater.abstract_state(state["params"])
        return state | {"optimizer": optimizer}

    def beside(self, program: str) -> dict[str, Any]:
        """Whatever a program does not read; an update reads all."""
        state = self.abstract_state()
        return {} if program == "update" else {"optimizer": state["optimizer"]}

    def programs(self, rows: int, prompt_length: int) -> Iterator[tuple[str, Callable[[], Any]]]:
        """The update of a mini-batch of ``rows`` sequences."""
        batch = self.token_shapes(rows, prompt_length)
        floats = jax.ShapeDtypeStruct(
            batch["responses"].shape, jnp.float32, sharding=batch["responses"].sharding
        )
        number = jax.ShapeDtypeStruct((), jnp.float32, sharding=self.layouts.train.replicated)
        scalars = getattr(self.context.loss, "scalars", ())
        for key in (*self.context.loss.needs, *self.extra_keys):
            if key != "pretrain":  # demonstrations come in a shape of their own
                batch.setdefault(key, number if key in scalars else floats)
        state = self.abstract_state()
        yield "update", lambda: self.updater.trace(state["params"], state["optimizer"], batch)


def abstract(shapes: Any, shardings: Any) -> Any:
    """Shapes with shardings attached."""
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings
    )
