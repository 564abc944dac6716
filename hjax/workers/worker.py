"""Workers: the model class of a role; it owns the role's compiled programs and parameters."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from hjax.batches import LENGTHS
from hjax.errors import DataError
from hjax.kernels.int8_cache import AUTO
from hjax.kernels.verdict import SPARSECORE
from hjax.models.base_checkpoints import BaseCheckpoint
from hjax.models.checkpoint import read_state, saved_items, write_state
from hjax.models.compute import Compute
from hjax.models.model_config import ModelConfig
from hjax.rewards.function import RewardFunction
from hjax.rollout.sampling_params import SamplingParams
from hjax.sharding.global_arrays import is_array
from hjax.sharding.layout import RoleLayouts, make_layouts
from hjax.sharding.protocols import PROMPT_ID, control, control_in_background, protocol
from hjax.sharding.transition import BUCKET_BYTES
from hjax.workers.optimizer import OptimizerConfig

# The arrays that a forward over prompts and responses reads.
TOKEN_KEYS = ("prompts", "prompt_mask", "responses", "response_mask")
# Those, the ids by which rows of one prompt are found, and lengths where rows have them.
SCORED_KEYS = (*TOKEN_KEYS, PROMPT_ID, LENGTHS)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchingContext:
    """How a worker cuts batches into micro-batches or packs.

    Attributes:
      samples: rows per prompt.
      unit: consecutive rows that no micro-batch may split (2 for preference pairs).
      micro_batch: rows (or packs) per forward or backward pass over all devices; 0: all.
      packing: tokens per pack (sequence packing); 0: padded rows.
      choose_packing: each batch is padded or packed, whichever is cheaper, see
        ``hjax.workers.packer``.
    """

    samples: int = 1
    unit: int = 1
    micro_batch: int = 0
    packing: int = 0
    choose_packing: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerationContext:
    """How a worker generates.

    Attributes:
      sampling: sampling parameters and stop tokens; the temperature applies to all log-probs.
      stop_strings: texts that end a response and may span several tokens.
      max_response_length: tokens.
      slots: sequences that are generated at a time; 0: all.
      speculative_tokens: draft tokens at a time, see ``hjax.rollout.prompt_lookup``.
      cache_dtype: dtype of the KV cache, see ``hjax.rollout.generator``.
      extra_samples: further responses per prompt (oversampling); the last ones to finish are
        dropped.
      partial_rollouts: responses may be interrupted and continued.
      reward_functions: by role, functions that score a prompt's responses while others are
        generated.
      transition_bucket_bytes: bytes of parameters that one program moves to the generate layout.
    """

    sampling: SamplingParams = SamplingParams()
    stop_strings: tuple[str, ...] = ()
    max_response_length: int = 0
    slots: int = 0
    speculative_tokens: int = 0
    cache_dtype: str = AUTO
    extra_samples: int = 0
    partial_rollouts: bool = False
    reward_functions: Mapping[str, RewardFunction] = dataclasses.field(default_factory=dict)
    transition_bucket_bytes: int = BUCKET_BYTES

    @property
    def temperature(self) -> float:
        """Divisor of logits wherever rollouts are scored; 1 for greedy sampling."""
        return self.sampling.temperature or 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class LearningContext:
    """How a worker is trained.

    Attributes:
      loss: the algorithm's loss for this role, or None.
      optimizer: settings of its updates, or None.
      supervised_loss: loss on demonstrations, for the warm start and PPO-ptx; or None.
      pretraining_loss: loss on what the algorithm adds to an update in PPO-ptx's place, if it is
        not the supervised one; or None.
      warm_start: settings of the warm start's updates, or None.
      router_loss: weight of the load-balancing loss of experts; 0: none.
      reference_sync: an actor with adapters keeps those of an earlier step, which its reference
        has (``reference.sync_every``).
    """

    loss: Any = None
    optimizer: OptimizerConfig | None = None
    supervised_loss: Any = None
    pretraining_loss: Any = None
    warm_start: OptimizerConfig | None = None
    router_loss: float = 0.0
    reference_sync: bool = False


@dataclasses.dataclass(frozen=True)
class WorkerContext(BatchingContext, GenerationContext, LearningContext):
    """Everything a worker is built from: a plain description without devices, which can be pickled.

    Attributes:
      role: name in the dataflow.
      sizes: of the mesh axes under ``train`` and ``generate``; None for a worker without devices.
      layouts: train and generate layouts on the pool's devices, made from ``sizes`` where the
        worker is built (``on``); None for a worker without devices.
      seed: of the run.
      tokenizer: of the role's model, or None.
      model: shapes of the role's model.
      path: of its weights; empty: from scratch, or taken from the role it starts from.
      base: the checkpoint that ``path`` means if it is a workdir; else None.
      compute: dtype and loop form.
      step_separator: text that ends a step of a response for a process reward model, ``token`` or
        empty, see the key ``reward.step_separator``.
      offload: what is kept in pinned host memory while idle: ``none``, ``optimizer`` (its state,
        except in updates) or ``all`` (parameters too, except in the role's own calls).
      retokenize: the role's tokenizer differs from the actor's, so text is tokenised again.
      options: the run's whole config, for a user's own worker.
      process: (rank of this process in the pool, number of processes).
    """

    role: str
    sizes: Mapping[str, Mapping[str, int]] | None = None
    layouts: RoleLayouts | None = None
    seed: int = 0
    tokenizer: Any = None
    model: ModelConfig | None = None
    path: str = ""
    base: BaseCheckpoint | None = None
    compute: Compute = Compute()
    step_separator: str = ""
    offload: str = "none"
    retokenize: bool = False
    options: Any = None
    process: tuple[int, int] = (0, 1)

    def on(self, devices: Sequence[jax.Device], process: tuple[int, int] = (0, 1)) -> WorkerContext:
        """This context with its layouts on these devices; whoever builds the worker calls it.

        Args:
          devices: of its pool.
          process: (rank of this process in the pool, number of processes).

        Raises:
          ConfigError: sizes that do not give the number of devices.
        """
        if process != self.process:
            self = dataclasses.replace(self, process=process)
        if self.sizes is None or self.layouts is not None:
            return self
        train, generate = self.sizes["train"], self.sizes.get("generate")
        offloads = SPARSECORE in self.compute.forms
        layouts = make_layouts(
            devices, train, generate, what=f"layout.{self.role}", sparsecore=offloads
        )
        return dataclasses.replace(self, layouts=layouts)


class Worker:
    """Base class of every role's worker. Subclass it and bind methods with ``@hjax.protocol``.

    Override ``state`` and ``restore`` for state that must survive a resume.
    """

    def __init__(self, context: WorkerContext):
        self.context = context
        self.role = context.role
        self.layouts = context.layouts
        self._applied: dict[Any, Any] = {}

    @control
    def initialize(self) -> None:
        """Prepare for the first step of a new run."""

    def state(self) -> dict[str, Any]:
        """Everything that determines what this worker does next: trees of arrays, by kind."""
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a ``state()``."""

    def abstract_state(self) -> dict[str, Any]:
        """``state()`` as jax.ShapeDtypeStruct with shardings, or a state of the same form."""
        return self.state()

    def checkpointed(self, state: dict[str, Any]) -> dict[str, Any]:
        """The part of a ``state()`` that a checkpoint keeps and ``restore`` gets back."""
        return state

    @control_in_background
    def save_state(self, folder: str) -> Callable[[], None]:
        """Write the ``checkpointed`` state as ``<role>.<kind>``; done once it is on disk."""
        return write_state(Path(folder), self._named(self.checkpointed(self.state())))

    @control
    def load_state(self, folder: str) -> None:
        """Continue from what ``save_state`` wrote.

        Raises:
          DataError: it is damaged, or has other shapes.
        """
        promised = self.checkpointed(self.abstract_state())
        unknown = set(saved_items(Path(folder), self.role)) - set(self._named(promised))
        if unknown:
            raise DataError(
                f"{folder}: {', '.join(sorted(unknown))} was saved, but the new worker of "
                f"{self.role} has no such state; state() must have every kind from the start"
            )
        read = read_state(Path(folder), self._named(promised))
        if promised:
            self.restore({kind: read[f"{self.role}.{kind}"] for kind in promised})

    def _named(self, state: dict[str, Any]) -> dict[str, Any]:
        return {f"{self.role}.{kind}": tree for kind, tree in state.items()}

    @protocol("3D_PROTO")
    def apply(self, function: Callable[..., Any], *values: Any) -> Any:
        """Call a pure function on this role's devices, so that no data passes the controller.

        Args:
          function: of a module or a user's file, or a ``functools.partial`` of one. It is traced
            and compiled once; without devices it is called with numpy arrays.
          values: batches and arrays, split by rows, or futures of them. The function gets a batch's
            arrays only; other entries (texts) stay behind.

        Returns:
          the function's result; a batch of the same rows can be passed on like any other.
        """
        arrays = tuple(_arrays_of(value) for value in values)
        if self.layouts is None:
            return function(*arrays)
        part = function if isinstance(function, functools.partial) else functools.partial(function)
        key = part.func, part.args, tuple(sorted(part.keywords.items()))
        if key not in self._applied:
            self._applied[key] = jax.jit(part)
        return self._applied[key](*arrays)

    @protocol("3D_PROTO", phase="")
    def hold_batch(self, batch: Any) -> Any:
        """Keep a batch on the worker for calls on its mini-batches, as long as this call's future
        exists."""
        return batch

    @control
    def take_seconds(self) -> dict[str, float]:
        """Seconds spent inside calls since the last time this was called, by activity."""
        return {}

    @control
    def offloaded_bytes(self, phase: str, called: bool) -> int:
        """Bytes per device that a phase offloads to host memory, see ``offloaded_state``."""
        return 0


def _arrays_of(value: Any) -> Any:
    """A batch's arrays; any other value unchanged."""
    if not isinstance(value, Mapping):
        return value
    return {key: x for key, x in value.items() if is_array(x)}
