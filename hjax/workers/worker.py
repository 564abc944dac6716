"""Workers: the model class of a role, which owns its compiled programs and its parameters."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from hjax.errors import DataError
from hjax.kernels.int8_cache import AUTO
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
# Those, and what says which rows answer the same prompt.
SCORED_KEYS = (*TOKEN_KEYS, PROMPT_ID)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchingContext:
    """How a worker cuts its batches.

    Attributes:
      samples: rows of a batch that share a prompt.
      unit: rows that no micro-batch may cut apart.
      micro_batch: rows (or packs) per pass over all devices, of updates and scores; 0: all.
      packing: places of the packs in which rows are computed; 0: they are padded.
      chooses: rows are padded or in packs as each batch has it, see ``hjax.workers.packer``.
    """

    samples: int = 1
    unit: int = 1
    micro_batch: int = 0
    packing: int = 0
    chooses: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerationContext:
    """How a worker generates.

    Attributes:
      sampling: how responses are drawn, and which tokens end one; its temperature applies to all
        log-probs.
      stop_strings: texts of several tokens that end one.
      max_response_length: tokens.
      slots: rows that are generated at a time; 0: all.
      speculative_tokens: tokens that are guessed at a time, see ``hjax.rollout.prompt_lookup``.
      cache_dtype: what keys and values are kept in, see ``hjax.rollout.generator``.
      extra_samples: further responses to a prompt, of which the last ones to end are given up.
      in_parts: whether responses are left off and continued.
      judges: reward functions, by role, that are called with a prompt's answers while others are
        generated.
      transition_bucket_bytes: of parameters that go to the generate layout in one program.
    """

    sampling: SamplingParams = SamplingParams()
    stop_strings: tuple[str, ...] = ()
    max_response_length: int = 0
    slots: int = 0
    speculative_tokens: int = 0
    cache_dtype: str = AUTO
    extra_samples: int = 0
    in_parts: bool = False
    judges: Mapping[str, RewardFunction] = dataclasses.field(default_factory=dict)
    transition_bucket_bytes: int = BUCKET_BYTES

    @property
    def temperature(self) -> float:
        """What logits are divided by wherever rollouts are scored; 1 for greedy sampling."""
        return self.sampling.temperature or 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class LearningContext:
    """What a worker learns.

    Attributes:
      loss: the algorithm's loss for this role, or None.
      optimizer: settings of its updates, or None.
      supervised_loss: of demonstrations: the warm start's, and PPO-ptx's second term; or None.
      warm_start: settings of the warm start's updates, or None.
      router_loss: weight in its updates of the loss that balances experts; 0: there is none.
    """

    loss: Any = None
    optimizer: OptimizerConfig | None = None
    supervised_loss: Any = None
    warm_start: OptimizerConfig | None = None
    router_loss: float = 0.0


@dataclasses.dataclass(frozen=True)
class WorkerContext(BatchingContext, GenerationContext, LearningContext):
    """What a worker is built from: a plain description that can be pickled, without devices.

    Attributes:
      role: name in the dataflow.
      sizes: of the mesh axes under ``train`` and ``generate``; None for a worker without devices.
      layouts: train and generate layouts on its pool's devices, made of ``sizes`` where the worker
        is built (``on``); None for a worker without any.
      seed: of the run.
      tokenizer: of the role's model, or None.
      model: shapes of the role's model.
      path: where its weights are read; empty: from scratch, or taken from the role it starts from.
      base: the checkpoint that ``path`` means where that is a workdir; else None.
      compute: dtype and loop form.
      steps: text behind which a step of a response ends that a reward model scores, ``token`` or
        empty, see the key ``reward.step_separator``.
      offload: what waits in pinned host memory while it is idle: ``none``, ``optimizer`` (its
        state, but in updates) or ``all`` (the parameters too, but in the role's own calls).
      retokenize: the role's tokenizer differs from the actor's, so text is tokenised again.
      options: whatever a user's own worker wants: the run's whole config.
      process: which of its pool's processes this worker is in, and how many there are.
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
    steps: str = ""
    offload: str = "none"
    retokenize: bool = False
    options: Any = None
    process: tuple[int, int] = (0, 1)

    def on(self, devices: Sequence[jax.Device], process: tuple[int, int] = (0, 1)) -> WorkerContext:
        """The same with its layouts on these devices; whoever builds the worker calls it.

        Args:
          devices: of its pool.
          process: which of the pool's processes this is, and how many there are.

        Raises:
          ConfigError: sizes that do not give the number of devices.
        """
        if process != self.process:
            self = dataclasses.replace(self, process=process)
        if self.sizes is None or self.layouts is not None:
            return self
        train, generate = self.sizes["train"], self.sizes.get("generate")
        layouts = make_layouts(devices, train, generate, f"layout.{self.role}")
        return dataclasses.replace(self, layouts=layouts)


class Worker:
    """Base of every role. Subclass it and bind methods with ``@hjax.protocol``.

    State that must survive a resume: override ``state`` and ``restore``.
    """

    def __init__(self, context: WorkerContext):
        self.context = context
        self.role = context.role
        self.layouts = context.layouts
        self._applied: dict[Any, Any] = {}

    @control
    def initialize(self) -> None:
        """Get ready for the first step of a new run."""

    def state(self) -> dict[str, Any]:
        """Everything that decides what this worker does next: trees of arrays by kind."""
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a ``state()``."""

    def abstract_state(self) -> dict[str, Any]:
        """``state()`` as jax.ShapeDtypeStruct with shardings, or a state of the same form."""
        return self.state()

    def stored(self, state: dict[str, Any]) -> dict[str, Any]:
        """Of a ``state()`` what a checkpoint has; ``restore`` gets that back."""
        return state

    @control_in_background
    def save_state(self, folder: str) -> Callable[[], None]:
        """Write what is ``stored`` as ``<role>.<kind>`` into a folder; done when it is there."""
        return write_state(Path(folder), self._named(self.stored(self.state())))

    @control
    def load_state(self, folder: str) -> None:
        """Continue from what ``save_state`` wrote into a folder.

        Raises:
          DataError: it is damaged, or of other shapes.
        """
        promised = self.stored(self.abstract_state())
        unknown = set(saved_items(Path(folder), self.role)) - set(self._named(promised))
        if unknown:
            raise DataError(
                f"{folder}: {', '.join(sorted(unknown))} was saved, but the new worker of "
                f"{self.role} has no such state; its state() must show every kind from the start"
            )
        read = read_state(Path(folder), self._named(promised))
        if promised:
            self.restore({kind: read[f"{self.role}.{kind}"] for kind in promised})

    def _named(self, state: dict[str, Any]) -> dict[str, Any]:
        return {f"{self.role}.{kind}": tree for kind, tree in state.items()}

    @protocol("3D_PROTO")
    def apply(self, function: Callable[..., Any], *values: Any) -> Any:
        """Call a pure function where this role's data is, so that nothing passes the controller.

        Args:
          function: of a module or a user's file, or a ``functools.partial`` of one; traced and
            compiled once where the role has devices. Else it gets numpy arrays.
          values: batches and arrays, split by rows, or futures of them. Of a batch it gets the
            arrays; what else is in it (texts) stays where it was.

        Returns:
          what the function does; a batch of the same rows can be handed on as any other.
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
        """Hold a batch for calls on mini-batches of it, while there is a future of this call's."""
        return batch

    @control
    def take_seconds(self) -> dict[str, float]:
        """Seconds spent inside calls since last asked, by what for."""
        return {}

    @control
    def offloaded_bytes(self, phase: str, called: bool) -> int:
        """Bytes per device that wait in the host's memory in a phase, see ``away``."""
        return 0


def _arrays_of(value: Any) -> Any:
    """Of a batch the arrays; another value as it is."""
    if not isinstance(value, Mapping):
        return value
    return {key: x for key, x in value.items() if is_array(x)}
