"""A host process as a Ray actor: ``hjax.controller.process`` behind Ray's calls."""

import asyncio
import concurrent.futures
import contextlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from hjax.controller.messages import deserialize
from hjax.controller.process import (
    Heartbeat,
    HostProcess,
    MessageOutcome,
    ProcessInfo,
    QueuedMessage,
    SerializedValue,
)
from hjax.controller.ray_calls import RayStore, host_address, host_id
from hjax.machine import children, kill_all


class RayProcess:
    """A host process as an actor; messages run in a thread of their own."""

    def __init__(self) -> None:
        threading.Thread(target=exit_with_parent, args=(os.getppid(),), daemon=True).start()
        self._process = HostProcess(RayStore(), host_address())
        self._threads = concurrent.futures.ThreadPoolExecutor(4)

    async def prepare(self, setup: SerializedValue) -> tuple[ProcessInfo, str]:
        """See ``HostProcess``; returns its ``ProcessInfo``, and Ray's id of its host."""
        info = await self._background(lambda: self._process.prepare(deserialize(setup.data)))
        return info, host_id()

    async def join(self, coordinator: str) -> dict[str, Any]:
        """See ``HostProcess``."""
        return await self._background(lambda: self._process.join(coordinator))

    async def run(self, sequence: int, parcel: Sequence[QueuedMessage]) -> list[MessageOutcome]:
        """Run messages; returns their outcomes."""
        outcomes = self._process.submit(sequence, parcel)
        return [await asyncio.wrap_future(outcome) for outcome in outcomes]

    async def export(self, number: int, reads: frozenset[str] | None) -> dict[Any, SerializedValue]:
        """Serialize a result once it is ready; see ``HostProcess``."""
        # An error is exported like any result.
        with contextlib.suppress(BaseException):
            await asyncio.shield(asyncio.wrap_future(self._process.result(number)))
            # Waited for here, not in a thread.
            for future in dict.fromkeys(self._process.pending(number, reads)):
                await asyncio.shield(asyncio.wrap_future(future))
        return await self._background(lambda: self._process.export(number, reads))

    async def heartbeat(self) -> Heartbeat:
        """See ``HostProcess``."""
        return self._process.heartbeat()

    async def machine(self) -> dict[str, Any]:
        """The probe's figures."""
        return await self._background(self._process.machine)

    async def stop(self) -> None:
        """Wait for the running message, and leave the world."""
        await self._background(self._process.stop)

    async def _background(self, function: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._threads, function)


def exit_with_parent(parent: int) -> None:
    """End this process soon after its parent, and the parent's other children.

    If the parent, a raylet, is killed, not all of Ray's own processes end.
    """
    siblings: list[int] = []
    while os.getppid() == parent:
        siblings = children(parent)
        time.sleep(1)
    kill_all(siblings)
    os._exit(1)
