"""Traces the worker calls of an algorithm's step (for dry runs, the planner and FLOP counts).

``step`` runs once on recording worker groups, which record each call with its number of rows and
return arrays of ones. So no algorithm, a user's included, has to declare its calls. A column that
a step misses is taken for one that a worker of a user's own returns: one number per row.
"""

import collections
import dataclasses
import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from hjax.algorithms import Algorithm
from hjax.algorithms.algorithm import AbsentRole
from hjax.controller import join
from hjax.errors import ConfigError
from hjax.roles import calls_of, role_table, worker_class

_PER_TOKEN = (
    "logprobs",
    "policy_logprobs",
    "untempered_logprobs",
    "old_logprobs",
    "ref_logprobs",
    "values",
    "process_logprobs",
    "positive",
)
_LEARNED = ("advantages", "returns", "cost_values", "cost_returns")
_PER_TOKENS = ("teacher_tokens", "teacher_logprobs")
_PER_ROW = ("rewards", "costs", "baseline")


@dataclasses.dataclass(frozen=True)
class StepCall:
    """One call of a step.

    Attributes:
      role, method: the worker group and the method that is called.
      phase: ``generate``, ``prepare`` or ``update``.
      rows: sequences, as a fraction of the step's.
      greedy: whether it is greedy generation.
    """

    role: str
    method: str
    phase: str
    rows: float
    greedy: bool = False


def step_calls(
    algorithm: type[Algorithm],
    config: ConfigDict,
    updates: int,
    samples: int,
    absent: Collection[str] = (),
    shared_workers: Mapping[str, str] = {},
) -> tuple[StepCall, ...]:
    """The calls of one step, in order.

    Args:
      config: the section ``algorithm``.
      updates: mini-batches per epoch.
      samples: responses per prompt.
      absent: roles that the step has to do without.
      shared_workers: by role without a worker of its own, the one whose worker computes it.

    Raises:
      ConfigError: the step fails on the recording groups; names the error.
    """
    prompts = updates
    rows = prompts * samples
    settings = ConfigDict(config.to_dict())
    # A whole batch may have more rows than those of the prompts, such as pairs made of them.
    settings.minibatch = rows // updates if updates > 1 or config.get("minibatch", 0) else 0
    workers = {
        name: (shared_workers.get(name, name), worker_class(role.worker))
        for name, role in algorithm.role_table(config).items()
        if name not in absent
    }
    columns: list[str] = []
    while True:
        calls: list[StepCall] = []
        groups = {
            name: _RecordingGroup(owner, worker, samples, rows, calls, columns)
            for name, (owner, worker) in workers.items()
        }
        step = algorithm(
            settings,
            {**groups, **absent_roles(algorithm, groups)},  # type: ignore[arg-type]
            samples=samples,
            demonstrations=lambda: _batch(rows // updates),
            max_response_length=2,
            more_prompts=lambda first: _batch(prompts),
            tokenizer=_RecordingTokenizer(),
        )
        # `compute_advantages` runs on the controller and is no call; its results are ones too.
        step.compute_advantages = lambda batch: {**join(batch), **_learned_arrays(join(batch))}  # type: ignore[method-assign]
        step.step_number = 1
        try:
            step.step(step.choose(_RecordingOrder(), prompts) | {"step": 1})
            return tuple(calls)
        except Exception as error:
            missing = error.args[0] if isinstance(error, KeyError) else None
            if not isinstance(missing, str) or missing in columns:
                raise ConfigError(
                    f"the calls of {algorithm.__name__}.step could not be read off: "
                    f"{type(error).__name__}: {error}"
                ) from error
            columns.append(missing)


def updates_per_step(algorithm: type[Algorithm], config: ConfigDict) -> collections.Counter[str]:
    """By role, the updates that the algorithm's own ``step`` calls; without sequences those that
    its class says."""
    if not algorithm.sequences:
        return collections.Counter(dict(algorithm.updates_per_step(config.algorithm)))
    rows = config.rollout.prompts * config.rollout.samples
    minibatches = rows // (config.algorithm.get("minibatch", 0) or rows)
    calls = step_calls(algorithm, config.algorithm, minibatches, config.rollout.samples)
    return collections.Counter(call.role for call in calls if call.phase == "update")


def absent_roles(algorithm: type[Algorithm], present: Collection[str]) -> dict[str, AbsentRole]:
    """By role, an ``AbsentRole`` for each of the algorithm's roles that is not ``present``."""
    table = role_table(algorithm.all_roles(), algorithm.workers, algorithm.__name__)
    return {
        name: AbsentRole(name, calls_of(role.worker))
        for name, role in table.items()
        if name not in present
    }


class _RecordingGroup:
    """A worker group that records calls instead of making them."""

    def __init__(
        self,
        role: str,
        worker: Any,
        samples: int,
        rows: int,
        calls: list[StepCall],
        columns: Collection[str],
    ):
        self._role, self._worker, self._methods = role, worker, calls_of(worker)
        self._samples, self._rows, self._calls, self._columns = samples, rows, calls, columns

    def __getattr__(self, name: str) -> Callable[..., dict[str, Any]]:
        if name not in self._methods:
            raise AttributeError(f"{self._role} has no method {name!r} bound to a protocol")
        phase = self._methods[name]

        signature = inspect.signature(getattr(self._worker, name))

        def call(*arguments: Any, **options: Any) -> _InstantResult:
            given = signature.bind(None, *arguments, **options).arguments
            rows = sum(_rows(value) for value in given.values() if isinstance(value, Mapping))
            greedy = bool(given.get("greedy"))
            if phase == "generate" and not greedy:
                rows *= given.get("samples") or self._samples
            self._calls.append(StepCall(self._role, name, phase, rows / self._rows, greedy))
            return _InstantResult(
                {"loss": 0.0} if phase == "update" else _batch(rows, self._columns)
            )

        return call


class _RecordingOrder:
    """A prompt order for ``Algorithm.choose`` whose prompts are ones."""

    number, version = 1, 0

    def next(self, count: int) -> dict[str, Any]:
        """So many prompts."""
        rows = list(range(count))
        return _batch(count) | {"choice": {"row": rows}, "prompt_text": [""] * count}


class _RecordingTokenizer:
    """A tokenizer of one token."""

    eos_id = 1

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        """The token."""
        return [1]

    def decode(self, tokens: Any) -> str:
        """A digit."""
        return "1"


class _InstantResult(dict):
    """A result that is also its own future, for a step that waits for it."""

    def result(self, timeout_seconds: float = 0.0) -> dict[str, Any]:
        """The result itself."""
        return self

    def done(self) -> bool:
        """Always True."""
        return True


def _rows(batch: Mapping[str, Any]) -> int:
    for key in ("responses", "prompts"):
        if key in batch:
            return int(np.shape(batch[key])[0])
    return 0


def _batch(rows: int, columns: Collection[str] = ()) -> dict[str, Any]:
    """A batch as docs/design.md describes it, and ``columns``, of ones but for the rewards."""
    tokens, mask = np.ones((rows, 2), np.int32), np.ones((rows, 2), bool)
    batch: dict[str, Any] = {"prompts": tokens, "prompt_mask": mask, "columns": {}}
    batch |= {"responses": tokens, "response_mask": mask, "truncated": ~mask[:, 0]}
    batch |= {key: np.ones((rows, 2), np.float32) for key in _PER_TOKEN}
    batch |= {key: np.ones(rows, np.float32) for key in (*_PER_ROW, *columns)}
    batch |= {key: np.ones((rows, 2, 1), np.float32) for key in _PER_TOKENS}
    # All rewards differ, so that no group is resampled; from 0 to 1, as some algorithms want them.
    batch["rewards"] = np.arange(rows, dtype=np.float32) / max(rows, 1)
    batch["named_rewards"] = {"reward": batch["rewards"]}
    return batch | {"reward_outcomes": {}, "coefficient": np.float32(1)}


def _learned_arrays(batch: dict[str, Any]) -> dict[str, Any]:
    rows = _rows(batch)
    learned: dict[str, Any] = {key: np.ones((rows, 2), np.float32) for key in _LEARNED}
    return learned | {"row_mask": np.ones(rows, bool)}
