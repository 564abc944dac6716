"""Futures of requests: results that wait in memory until a client asks for them."""

import asyncio
import dataclasses
import json
import time
from collections.abc import Callable, Mapping
from typing import Any

from hjax.errors import ConfigError, one_line

# Seconds that a result stays after it was first fetched (a client whose connection broke asks
# again), and that one stays which nobody fetches.
FETCHED_SECONDS, UNFETCHED_SECONDS = 600.0, 3600.0
# What a future takes beside its request or its result, in bytes.
_FUTURE_BYTES = 4096


@dataclasses.dataclass(frozen=True)
class FutureResult:
    """What a request gives.

    Attributes:
      body: of the answer.
      protobuf: whether it is a protobuf message; else it is JSON.
    """

    body: bytes
    protobuf: bool = False

    @classmethod
    def of_json(cls, content: Mapping[str, Any]) -> "FutureResult":
        """A result of JSON values."""
        return cls(json.dumps(content).encode())

    @classmethod
    def of_error(cls, error: BaseException) -> "FutureResult":
        """The result of a request that failed; a ConfigError is the client's own fault."""
        category = "user" if isinstance(error, ConfigError) else "server"
        return cls.of_json({"error": one_line(error), "category": category})


class _Future:
    def __init__(self, session: str, size: int):
        self.session, self.size = session, size
        self.result: FutureResult | None = None
        self.ready = asyncio.Event()
        self.at = time.monotonic()
        self.fetched = False


class RequestFutures:
    """The futures of all requests, by id. All calls are made on the event loop but ``resolve``
    and ``call``.

    Args:
      loop: the event loop.
      most: futures that wait for their results at a time.
      most_bytes: of requests that wait, and of results that are kept; of more the oldest results
        are dropped.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, most: int, most_bytes: int):
        self._loop, self._most, self._most_bytes = loop, most, most_bytes
        self._futures: dict[str, _Future] = {}
        # Those with a result, in the order in which they got it.
        self._resolved: dict[str, None] = {}
        self._pending = self._pending_bytes = self._kept_bytes = 0

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._futures

    def __len__(self) -> int:
        return len(self._futures)

    @property
    def full(self) -> bool:
        """Whether as many wait for their results as may."""
        return self._pending >= self._most or self._pending_bytes >= self._most_bytes

    def add(self, request_id: str, session: str, size: int = 0) -> None:
        """Open a future; one with this id must not exist.

        Args:
          request_id: its id.
          session: that it goes with.
          size: bytes of the request, which is kept until it has a result.
        """
        self._futures[request_id] = _Future(session, size)
        self._pending += 1
        self._pending_bytes += size

    def resolve(self, request_id: str, result: FutureResult) -> None:
        """Give a future its result, once; from any thread. One that was dropped stays away."""
        self.call(lambda: self._resolve(request_id, result))

    def _resolve(self, request_id: str, result: FutureResult) -> None:
        future = self._futures.get(request_id)
        if future is not None and future.result is None:
            self._settle(future, result)
            self._resolved[request_id] = None
            future.size = len(result.body) + _FUTURE_BYTES
            self._kept_bytes += future.size
            while self._kept_bytes > self._most_bytes and len(self._resolved) > 1:
                self._drop(next(iter(self._resolved)))

    def _settle(self, future: _Future, result: FutureResult) -> None:
        self._pending -= 1
        self._pending_bytes -= future.size
        future.result, future.at = result, time.monotonic()
        future.ready.set()

    def call(self, function: Callable[[], object]) -> None:
        """Call a function on the event loop, before later results; from any thread."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function)

    async def wait(self, request_id: str, seconds: float) -> FutureResult | None:
        """A future's result; None: it is not there after so many seconds.

        Raises:
          KeyError: there is no such future.
        """
        future = self._futures[request_id]
        try:
            async with asyncio.timeout(seconds):
                await future.ready.wait()
        except TimeoutError:
            return None
        if not future.fetched:
            future.fetched, future.at = True, time.monotonic()
        return future.result

    def drop_session(self, session: str) -> None:
        """Drop the futures of a session that has ended."""
        for request_id in [i for i, future in self._futures.items() if future.session == session]:
            self._drop(request_id)

    def drop_old(self) -> None:
        """Drop results that were fetched some time ago, and those that nobody fetches."""
        now = time.monotonic()
        for request_id, future in list(self._futures.items()):
            keep = FETCHED_SECONDS if future.fetched else UNFETCHED_SECONDS
            if future.result is not None and now - future.at > keep:
                self._drop(request_id)

    def _drop(self, request_id: str) -> None:
        future = self._futures.pop(request_id)
        if future.result is None:  # whoever waits for it gets this
            self._settle(future, FutureResult.of_error(RuntimeError("its session has ended")))
        else:
            del self._resolved[request_id]
            self._kept_bytes -= future.size
