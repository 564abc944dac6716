"""A host process as a Ray actor: ``hjax.controller.process`` behind Ray's calls."""

import asyncio
import concurrent.futures
import contextlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from hjax.controller.messages import from_bytes
from hjax.controller.process import (
    Heartbeat,
    HostProcess,
    MessageOutcome,
    ProcessInfo,
    QueuedMessage,
    SerializedValue,
)
from hjax.controller.ray_calls import RayStore, host_address, host_id
from hjax.machine import children, end_all


class RayProcess:
    """A host process as an actor; its own thread runs the messages."""

    def __init__(self) -> None:
        threading.Thread(target=end_with, args=(os.getppid(),), daemon=True).start()
        self._process = HostProcess(RayStore(), host_address())
        self._threads = concurrent.futures.ThreadPoolExecutor(4)

    async def prepare(self, setup: SerializedValue) -> tuple[ProcessInfo, str]:
        """See ``HostProcess``; what it says of itself, and Ray's id of its host."""
        facts = await self._beside(lambda: self._process.prepare(from_bytes(setup.data)))
        return facts, host_id()

    async def join(self, coordinator: str) -> dict[str, Any]:
        """See ``HostProcess``."""
        return await self._beside(lambda: self._process.join(coordinator))

    async def run(self, sequence: int, parcel: Sequence[QueuedMessage]) -> list[MessageOutcome]:
        """Run messages; how each of them went."""
        outcomes = self._process.submit(sequence, parcel)
        return [await asyncio.wrap_future(outcome) for outcome in outcomes]

    async def export(self, number: int, reads: frozenset[str] | None) -> dict[Any, SerializedValue]:
        """Write a result down once it is there; see ``HostProcess``."""
        # An error is written down like any result.
        with contextlib.suppress(BaseException):
            await asyncio.shield(asyncio.wrap_future(self._process.result(number)))
            # Here, so that no thread does nothing but wait.
            for coming in dict.fromkeys(self._process.coming(number, reads)):
                await asyncio.shield(asyncio.wrap_future(coming))
        return await self._beside(lambda: self._process.export(number, reads))

    async def pulse(self) -> Heartbeat:
        """A sign of life."""
        return self._process.pulse()

    async def machine(self) -> dict[str, Any]:
        """What the probe reads."""
        return await self._beside(self._process.machine)

    async def stop(self) -> None:
        """Let the message under way finish, and leave the world."""
        await self._beside(self._process.stop)

    async def _beside(self, function: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._threads, function)


def end_with(parent: int) -> None:
    """End this process soon after its parent, and the parent's other children.

    Ray's own do not all end where their raylet, the parent, was killed.
    """
    kin: list[int] = []
    while os.getppid() == parent:
        kin = children(parent)
        time.sleep(1)
    end_all(kin)
    os._exit(1)
