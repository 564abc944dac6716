"""The workers of one pool, next to their devices: builds them, calls them, switches phases."""

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import jax

from hjax.controller.messages import BuildWorker, Call, Message, select
from hjax.errors import RunError
from hjax.roles import binding
from hjax.sharding.global_arrays import cache_shards


@dataclasses.dataclass(frozen=True)
class CallResult:
    """The outcome of a call.

    Attributes:
      value: the result; if ``background``, a function that finishes the call and returns it.
      background: the method continues in the background.
      phase: of the method; empty outside of steps.
      start, end: seconds of ``time.perf_counter``.
    """

    value: Any
    background: bool = False
    phase: str = ""
    start: float = 0.0
    end: float = 0.0


class WorkerHost:
    """Runs messages for a pool's workers, one at a time, in order.

    Args:
      devices: of the pool, in rank order; none for workers that compute on the host.
      process: (rank of this process in the pool, number of processes).
    """

    def __init__(self, devices: Sequence[jax.Device] = (), process: tuple[int, int] = (0, 1)):
        self.devices = tuple(devices)
        self.process = process
        self.workers: dict[str, Any] = {}
        self._failed: dict[str, BaseException] = {}
        self._current: tuple[Any, str] | None = None

    def build(self, message: BuildWorker) -> None:
        """Build a role's worker. If that fails, its later calls raise the same error."""

        def here(value: Any) -> Any:
            return value.on(self.devices, self.process) if hasattr(value, "on") else value

        try:
            arguments = [here(value) for value in message.arguments]
            options = {key: here(value) for key, value in message.options.items()}
            self.workers[message.role] = message.worker(*arguments, **options)
        except BaseException as error:
            self._failed[message.role] = error
            raise

    def run(self, message: Message) -> CallResult:
        """Build the worker, or call its method."""
        if isinstance(message, Call):
            return self.call(message)
        self.build(message)
        return CallResult(None)

    def call(self, message: Call) -> CallResult:
        """Run a method of a role's worker; futures among its arguments are already resolved."""
        if message.role in self._failed:
            raise self._failed[message.role]
        if message.role not in self.workers:
            raise RunError(f"{message.role} has no worker in this pool")
        worker = self.workers[message.role]
        method = getattr(worker, message.method)
        bound = binding(type(worker), message.method)
        if bound is None:
            raise RunError(f"{message.label} is bound to no protocol")
        protocol, phase = bound.protocol, bound.phase
        layouts = getattr(worker, "layouts", None)
        start = time.perf_counter()
        if phase:
            self._switch_phase(worker, phase)
        arguments, options = (
            protocol.distribute(values, layouts)
            for values in (
                tuple(select(value, message.reads) for value in message.arguments),
                {key: select(value, message.reads) for key, value in message.options.items()},
            )
        )
        # This thread waits, not the controller: so spans are true and errors surface here.
        result = jax.block_until_ready(method(*arguments, **options))
        end = time.perf_counter()
        background = getattr(bound, "background", False)
        value = result if background else cache_shards(protocol.gather(result))
        return CallResult(value, background, phase, start, end)

    def _switch_phase(self, worker: Any, phase: str) -> None:
        """Tell all workers when the calling worker or the phase changes.

        A worker with ``apply_offload(phase, called)`` can then offload what it does not need.
        """
        if self._current is not None and self._current[0] is worker and self._current[1] == phase:
            return
        self._current = None  # until all workers are done
        # Other workers first: they free memory.
        for other in sorted(self.workers.values(), key=lambda other: other is worker):
            if hasattr(other, "apply_offload"):
                other.apply_offload(phase, other is worker)
        self._current = worker, phase
