"""Resource pools and worker groups: the single controller's view of the devices.

Models in one pool run one after another, in call order. Pools share no devices, and calls on
different pools run as soon as their inputs exist, since every call returns a future at once
(HybridFlow, arXiv 2409.19256, section 4). The controller sees no tokens: it sends messages with
nested dicts of arrays, or with futures of them.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from hjax.controller.executors import Executor, ExecutorFactory, ThreadExecutor
from hjax.controller.futures import Future
from hjax.controller.messages import BuildWorker, Call, MiniBatch, select
from hjax.controller.timeline import Timeline
from hjax.errors import ConfigError, RunError
from hjax.roles import bound_methods


class ResourcePool:
    """A set of devices whose models take turns.

    Args:
      name: shown in timelines and errors.
      devices: in rank order; empty for workers that compute on the host.
      timeline: where calls are recorded.
      executor: makes the executor of the pool's messages.
    """

    def __init__(
        self,
        name: str,
        devices: Sequence[jax.Device] = (),
        timeline: Timeline | None = None,
        executor: ExecutorFactory = ThreadExecutor,
    ):
        self.name = name
        self.devices = tuple(devices)
        self.timeline = timeline or Timeline()
        self.executor: Executor = executor(name, self.devices, self.timeline)

    def close(self) -> None:
        """Wait for the running call and stop; queued calls are refused."""
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

    The worker is built where its devices are. Its methods with a transfer protocol
    (``@hjax.protocol``) are attributes of the group; calling one returns a Future at once.

    Args:
      pool: the worker's pool.
      worker: its class.
      arguments, options: of the class, see ``BuildWorker``.
      role: its name; by default that of the class.
    """

    def __init__(self, pool: ResourcePool, worker: Callable[..., Any], *arguments: Any,
                 role: str = "", **options: Any):  # fmt: skip
        self.role = role or str(getattr(worker, "__name__", "worker"))
        self.pool = pool
        # By method the batch entries that it reads; None: all.
        self._methods: dict[str, frozenset[str] | None] = {}
        bound = bound_methods(worker)
        # Methods that split batches like hold_batch: they get rows of the held batch.
        held = bound.get("hold_batch")
        self._by_rows = {name for name, x in bound.items() if held and x.protocol == held.protocol}
        for name, method in bound.items():
            reads = getattr(method, "reads", None)
            reads = reads(worker, *arguments) if callable(reads) else reads
            self._methods[name] = None if reads is None else frozenset(reads)
        self._build = BuildWorker(self.role, worker, arguments, options)
        self.built: Future = pool.executor.submit(self._build)

    def rebuild(self) -> None:
        """Build the worker again after its pool lost it; its state is gone."""
        self.built = self.pool.executor.submit(self._build)

    @property
    def worker(self) -> Any:
        """The worker itself, for tests and notebooks; only if it is in this process."""
        self.built.result()
        host = getattr(self.pool.executor, "host", None)
        if host is None:
            raise RunError(f"{self.role}: its worker is in another process; call its methods")
        return host.workers[self.role]

    def has(self, method: str) -> bool:
        """Whether the worker has a method that the controller can call."""
        return method in self._methods

    def __getattr__(self, name: str) -> Callable[..., Future]:
        methods = self.__dict__.get("_methods", {})
        if name not in methods:
            raise AttributeError(
                f"{self.__dict__.get('role')} has no method {name!r} bound to a protocol; "
                f"it has {', '.join(sorted(methods)) or 'none'}"
            )
        reads, submit = methods[name], self.pool.executor.submit
        holds = name in self._by_rows

        def argument(value: Any) -> Any:
            # Entries nobody reads are dropped here; a future's, where its result is.
            if isinstance(value, MiniBatch) and holds:
                return value.to_message(self.role, reads, hold)
            return select(dict(value) if isinstance(value, MiniBatch) else value, reads)

        def hold(batch: Any) -> Future:
            return submit(Call(self.role, "hold_batch", (batch,), {}, reads))

        def remote(*arguments: Any, **options: Any) -> Future:
            arguments = tuple(argument(value) for value in arguments)
            options = {key: argument(value) for key, value in options.items()}
            return submit(Call(self.role, name, arguments, options, reads))

        return remote
