"""Resource pools and worker groups: the single controller's view of the devices.

Models given the same pool run one after another in call order; pools never share a device, and
calls on different pools run as soon as their inputs exist, since every call returns a future at
once (HybridFlow, arXiv 2409.19256, section 4). The controller knows no tokens: it moves nested
dicts of arrays.
"""

from __future__ import annotations

import concurrent.futures
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax

from hjax.controller.futures import Future, resolve
from hjax.controller.timeline import Timeline
from hjax.errors import ConfigError, RunError

_NOTE = "in the call"


class Executor(Protocol):
    """Where a pool's calls run, in call order. One process here; a Ray actor is another."""

    def submit(self, function: Callable[[], Any], label: str) -> Future:
        """Queue ``function``; returns at once."""

    def close(self) -> None:
        """Let queued calls finish, then stop."""


def _named(function: Callable[[], Any], label: str) -> Any:
    """Run a call; an error says in a note which call it arose in, not who passed it on."""
    try:
        return function()
    except Exception as error:
        if not any(note.startswith(_NOTE) for note in getattr(error, "__notes__", ())):
            error.add_note(f"{_NOTE} {label}")
        raise


class ThreadExecutor:
    """Runs a pool's calls in one thread of this process."""

    def __init__(self, name: str):
        self._threads = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix=name)

    def submit(self, function: Callable[[], Any], label: str) -> Future:
        """Queue ``function`` on the pool's thread."""
        return Future(self._threads.submit(_named, function, label), label)

    def close(self) -> None:
        """Let queued calls finish, then stop."""
        self._threads.shutdown(wait=True, cancel_futures=True)


class ResourcePool:
    """A set of devices whose models take turns.

    Args:
      name: shown in timelines and errors.
      devices: the devices, in rank order; may be empty for workers that compute on the host.
      timeline: where calls are recorded.
    """

    def __init__(
        self,
        name: str,
        devices: Sequence[jax.Device] = (),
        timeline: Timeline | None = None,
    ):
        self.name = name
        self.devices = tuple(devices)
        self.timeline = timeline or Timeline()
        self.executor: Executor = ThreadExecutor(name)
        self.workers: list[Any] = []
        self._turn: tuple[Any, str] | None = None

    def take_turn(self, worker: Any, phase: str) -> None:
        """Tell the pool's workers whose call comes next, where that changes; on its thread.

        A worker with a method ``turn(phase, called)`` can put away what it does not need.
        """
        if self._turn is not None and self._turn[0] is worker and self._turn[1] == phase:
            return
        # First those that make room.
        for other in sorted(self.workers, key=lambda other: other is worker):
            if hasattr(other, "turn"):
                other.turn(phase, other is worker)
        self._turn = worker, phase

    def close(self) -> None:
        """Let queued calls finish and stop the pool's thread."""
        self.executor.close()

    def __repr__(self) -> str:
        return f"ResourcePool({self.name!r}, {len(self.devices)} devices)"


def check_disjoint(pools: Sequence[ResourcePool]) -> None:
    """Raise ConfigError if two pools share a device."""
    owner: dict[Any, str] = {}
    for pool in pools:
        for device in pool.devices:
            if device in owner:
                raise ConfigError(
                    f"pools {owner[device]!r} and {pool.name!r} share {device}; "
                    "give them the same pool, or different devices"
                )
            owner[device] = pool.name


class WorkerGroup:
    """The controller's handle on one role's worker in its pool.

    The worker is built on the pool's thread. Its methods bound to a transfer protocol
    (``@hjax.protocol``) are attributes of the group; calling one returns a Future at once.
    """

    def __init__(self, pool: ResourcePool, worker: Callable[..., Any], *args: Any, **kwargs: Any):
        self.role = str(kwargs.pop("role", getattr(worker, "__name__", "worker")))
        self.pool = pool
        self._methods = {
            name: (method.protocol, method.phase)
            for name in dir(worker)
            if not name.startswith("__") and hasattr(method := getattr(worker, name), "protocol")
        }

        def build() -> Any:
            made = worker(*resolve(args), **resolve(kwargs))
            pool.workers.append(made)
            return made

        self._built = pool.executor.submit(build, f"{self.role} (construction)")

    @property
    def worker(self) -> Any:
        """The worker itself (one process only); waits until it is built."""
        try:
            return self._built.result()
        except AttributeError as error:
            # As an AttributeError of this property it would be taken for a missing method.
            raise RunError(f"{self.role}: its worker could not be built: {error}") from error

    def call(self, function: Callable[[Any], Any], label: str = "call") -> Future:
        """Run ``function(worker)`` on the pool's thread, after all earlier calls."""
        return self.pool.executor.submit(
            lambda: function(self._built.result()), f"{self.role}.{label}"
        )

    def __getattr__(self, name: str) -> Callable[..., Future]:
        methods = self.__dict__.get("_methods", {})
        if name not in methods:
            raise AttributeError(
                f"{self.__dict__.get('role')} has no method {name!r} bound to a protocol; "
                f"it has {', '.join(sorted(methods)) or 'none'}"
            )
        protocol, phase = methods[name]

        def remote(*args: Any, **kwargs: Any) -> Future:
            def run() -> Any:
                worker = self._built.result()
                layouts = getattr(worker, "layouts", None)
                inputs, options = resolve(args), resolve(kwargs)
                start = time.perf_counter()
                self.pool.take_turn(worker, phase)
                inputs = protocol.distribute(inputs, layouts)
                options = protocol.distribute(options, layouts)
                # The pool's thread waits, not the controller: spans are true, errors surface here.
                result = jax.block_until_ready(getattr(worker, name)(*inputs, **options))
                self.pool.timeline.add(
                    self.pool.name, self.role, name, phase, start, time.perf_counter()
                )
                return protocol.gather(result)

            return self.pool.executor.submit(run, f"{self.role}.{name}")

        return remote
