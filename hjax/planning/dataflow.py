"""An algorithm's step as the auto-mapping sees it: its calls on the roles that have devices."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from ml_collections import ConfigDict

from hjax.algorithms import Algorithm, get_algorithm
from hjax.errors import ConfigError
from hjax.planning.records import Dataflow, PlannedCall
from hjax.run.dataflow import step_calls

_KINDS: dict[str, Any] = {"generate": "generate", "prepare": "forward", "update": "update"}


def trace(
    algorithm: type[Algorithm],
    config: ConfigDict,
    updates: int,
    samples: int,
    roles: Collection[str],
    absent: Collection[str] = (),
    served: Mapping[str, str] = {},
) -> Dataflow:
    """The calls of one step on the roles that have devices.

    Args:
      config: the section ``algorithm``.
      updates: mini-batches that the step's sequences are cut into, for each epoch.
      samples: responses per prompt.
      roles: those with a model; calls on others (reward functions) take no devices.
      absent: roles left out of the step altogether.
      served: as of ``step_calls``.

    Raises:
      ConfigError: the calls cannot be read off, or one belongs to no phase that can be planned.
    """
    calls = step_calls(algorithm, config, updates, samples, absent, served)
    table = algorithm.role_table(config)
    called = {call.role for call in calls}
    placed = tuple(name for name in table if name in roles and name in called)
    found = []
    for call in calls:
        if call.phase not in _KINDS:
            raise ConfigError(
                f"{call.role}.{call.method} is of the phase {call.phase!r}; a plan knows "
                f"{', '.join(_KINDS)}"
            )
        if call.role in placed:
            found.append(PlannedCall(call.role, call.method, _KINDS[call.phase], call.rows))
    return Dataflow(algorithm.__name__, placed, tuple(found))


def find_algorithm(name: str) -> type[Algorithm]:
    """An algorithm with a dataflow to place, as ``get_algorithm`` finds it."""
    found = get_algorithm(name)
    if not found.generates:
        raise ConfigError(f"--algorithm={name}: supervised training has no dataflow to place")
    return found
