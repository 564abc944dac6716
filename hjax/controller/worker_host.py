"""The workers of one pool, where their devices are: built, called and told whose turn it is."""

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import jax

from hjax.controller.messages import BuildWorker, Call, select
from hjax.errors import RunError
from hjax.roles import binding
from hjax.sharding.global_arrays import cache_shards


@dataclasses.dataclass(frozen=True)
class CallResult:
    """What came of a call.

    Attributes:
      value: the result; of a method that goes on in the background a function that gives it.
      background: whether ``value`` is such a function.
      phase: of the method; empty outside of steps.
      start, end: seconds of ``time.perf_counter``.
    """

    value: Any
    background: bool = False
    phase: str = ""
    start: float = 0.0
    end: float = 0.0


class WorkerHost:
    """Runs messages for a pool's workers, one at a time, in the order they come.

    Args:
      devices: of the pool, in rank order; none for workers that compute on the host.
      process: which of how many that run the same messages this one is.
    """

    def __init__(self, devices: Sequence[jax.Device] = (), process: tuple[int, int] = (0, 1)):
        self.devices = tuple(devices)
        self.process = process
        self.workers: dict[str, Any] = {}
        self._failed: dict[str, BaseException] = {}
        self._turn: tuple[Any, str] | None = None

    def build(self, message: BuildWorker) -> None:
        """Make a role's worker. Its later calls fail as this did, if it failed."""

        def here(value: Any) -> Any:
            return value.on(self.devices, self.process) if hasattr(value, "on") else value

        try:
            arguments = [here(value) for value in message.arguments]
            options = {key: here(value) for key, value in message.options.items()}
            self.workers[message.role] = message.worker(*arguments, **options)
        except BaseException as error:
            self._failed[message.role] = error
            raise

    def call(self, message: Call) -> CallResult:
        """Run a method of a role's worker; its arguments are values by now."""
        if message.role in self._failed:
            raise self._failed[message.role]
        if message.role not in self.workers:
            raise RunError(f"{message.role} has no worker here")
        worker = self.workers[message.role]
        method = getattr(worker, message.method)
        bound = binding(type(worker), message.method)
        if bound is None:
            raise RunError(f"{message.label} is bound to no protocol")
        protocol, phase = bound.protocol, bound.phase
        layouts = getattr(worker, "layouts", None)
        start = time.perf_counter()
        if phase:
            self._take_turn(worker, phase)
        arguments, options = (
            protocol.distribute(values, layouts)
            for values in (
                tuple(select(value, message.reads) for value in message.arguments),
                {key: select(value, message.reads) for key, value in message.options.items()},
            )
        )
        # Whoever runs this waits, not the controller: spans are true, errors surface here.
        result = jax.block_until_ready(method(*arguments, **options))
        end = time.perf_counter()
        background = getattr(bound, "background", False)
        value = result if background else cache_shards(protocol.gather(result))
        return CallResult(value, background, phase, start, end)

    def _take_turn(self, worker: Any, phase: str) -> None:
        """Tell the workers whose call comes next, where that changes.

        A worker with a method ``turn(phase, called)`` can put away what it does not need.
        """
        if self._turn is not None and self._turn[0] is worker and self._turn[1] == phase:
            return
        self._turn = None  # until all of it has been done
        # First those that make room.
        for other in sorted(self.workers.values(), key=lambda other: other is worker):
            if hasattr(other, "turn"):
                other.turn(phase, other is worker)
        self._turn = worker, phase
