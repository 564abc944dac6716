"""An algorithm's step as the auto-mapping sees it, read off the algorithm itself.

``step`` is run once with stand-ins for the worker groups, which note what is called with how many
rows and answer with arrays of ones. So an algorithm declares nothing for it, a user's own included.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from hjax.algorithms import ALGORITHMS, Algorithm, get_algorithm
from hjax.controller import join
from hjax.errors import ConfigError
from hjax.planning.records import Call, Dataflow
from hjax.run.methods import absent_roles, worker_methods

_KINDS = {"generate": "generate", "prepare": "forward", "update": "update"}
_PER_TOKEN = ("logprobs", "policy_logprobs", "untempered_logprobs", "ref_logprobs", "values")
_LEARNED = ("advantages", "returns", "old_logprobs", "cost_values", "cost_returns")
_PER_ROW = ("rewards", "costs", "baseline")


def trace(
    algorithm: type[Algorithm],
    config: ConfigDict,
    updates: int,
    samples: int,
    roles: Collection[str],
    absent: Collection[str] = (),
) -> Dataflow:
    """The calls of one step on the roles that have devices.

    Args:
      config: the section ``algorithm``.
      updates: mini-batches that the step's sequences are cut into, for each epoch.
      samples: responses per prompt.
      roles: those with a model; calls on others (reward functions) take no devices.
      absent: roles left out of the step altogether.

    Raises:
      ConfigError: the step needs something that the stand-ins cannot give, named.
    """
    prompts = updates
    rows = prompts * samples
    settings = ConfigDict(config.to_dict())
    settings.minibatch = rows // updates
    calls: list[Call] = []
    groups = {
        role: _StandIn(role, worker_methods(algorithm, role), samples, rows, calls)
        for role in algorithm.needed_roles(config)
        if role not in absent
    }
    every = {**groups, **absent_roles(algorithm, groups)}
    step = algorithm(settings, every, 0, samples, lambda: _batch(rows // updates))  # type: ignore[arg-type]
    # The numerics are the controller's, not a call; their results are ones as well.
    step.compute_advantages = lambda batch: {**join(batch), **_learned(join(batch))}  # type: ignore[method-assign]
    step.step_number = 1
    try:
        step.step({**_batch(prompts), "step": 1})
    except Exception as error:
        raise ConfigError(
            f"the calls of {algorithm.__name__}.step could not be read off for planning: "
            f"{type(error).__name__}: {error}"
        ) from error
    placed = tuple(r for r in groups if r in roles and any(c.role == r for c in calls))
    return Dataflow(algorithm.__name__, placed, tuple(c for c in calls if c.role in placed))


def find_algorithm(name: str) -> type[Algorithm]:
    """An algorithm by its class's name, its config's (``safe_rlhf``), or ``path.py:Class``."""
    plain = name.replace("_", "").lower()
    known = {key.lower(): key for key in ALGORITHMS}
    found = get_algorithm(known.get(plain, name))
    if not found.generates:
        raise ConfigError(f"--algorithm={name}: supervised training has no dataflow to place")
    return found


class _StandIn:
    """Notes calls instead of making them."""

    def __init__(
        self, role: str, methods: dict[str, str], samples: int, rows: int, calls: list[Call]
    ):
        self._role, self._methods = role, methods
        self._samples, self._rows, self._calls = samples, rows, calls

    def __getattr__(self, name: str) -> Callable[..., dict[str, Any]]:
        if name not in self._methods:
            raise AttributeError(f"{self._role} has no method {name!r} bound to a protocol")
        kind: Any = _KINDS[self._methods[name]]

        def call(*batches: Any, **options: Any) -> dict[str, Any]:
            given = [_rows(b) for b in (*batches, *options.values()) if isinstance(b, dict)]
            rows = sum(given)
            if kind == "generate" and not options.get("greedy"):
                rows *= self._samples
            self._calls.append(Call(self._role, name, kind, rows / self._rows))
            return {"loss": 0.0} if kind == "update" else _batch(rows)

        return call


def _rows(batch: dict[str, Any]) -> int:
    for key in ("responses", "prompts"):
        if key in batch:
            return int(np.shape(batch[key])[0])
    return 0


def _batch(rows: int) -> dict[str, Any]:
    """A batch as docs/design.md describes it, of ones."""
    tokens, mask = np.ones((rows, 2), np.int32), np.ones((rows, 2), bool)
    batch: dict[str, Any] = {"prompts": tokens, "prompt_mask": mask, "columns": {}}
    batch |= {"responses": tokens, "response_mask": mask, "truncated": ~mask[:, 0]}
    batch |= {key: np.ones((rows, 2), np.float32) for key in _PER_TOKEN}
    batch |= {key: np.ones(rows, np.float32) for key in _PER_ROW}
    return batch | {"reward_outcomes": {}, "coefficient": np.float32(1)}


def _learned(batch: dict[str, Any]) -> dict[str, Any]:
    rows = _rows(batch)
    learned: dict[str, Any] = {key: np.ones((rows, 2), np.float32) for key in _LEARNED}
    return learned | {"row_mask": np.ones(rows, bool)}
