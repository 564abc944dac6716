"""The HTTP server: a socket, an event loop, and a shutdown within seconds of a signal."""

import asyncio
import contextlib
import functools
import socket
import threading
from collections.abc import Callable, Iterator

import uvicorn

from hjax.errors import RunError
from hjax.serving.app import make_app
from hjax.serving.connection import Connection
from hjax.serving.limits import BACKLOG, ServerLimits
from hjax.serving.reload import WeightReload
from hjax.serving.served_model import ServedModel
from hjax.serving.shutdown import handle_signals

# Seconds after limits.drain_seconds: pending requests get an error; connections are closed.
ERROR_SECONDS, CLOSE_SECONDS = 1, 2


class Server:
    """An HTTP server for a model.

    Args:
      served: the model.
      bound: the socket.
      limits: of requests and connections.
      key: the API key that requests must bring; "": none.
      started: called once the server answers.
      reload: reads the weights again on request; None: there is no such endpoint.

    Attributes:
      failure: why the engine failed, and the server with it; "": it did not.
    """

    def __init__(
        self,
        served: ServedModel,
        bound: socket.socket,
        limits: ServerLimits = ServerLimits(),
        key: str = "",
        started: Callable[[], None] = lambda: None,
        reload: WeightReload | None = None,
    ):
        self._served = served
        self._bound = bound
        self._limits = limits
        self._app = make_app(
            served, limits, key, self._failed, reload, address=bound.getsockname()[0]
        )
        self.failure = ""
        config = uvicorn.Config(
            self._app,
            http=functools.partial(Connection, limits),  # type: ignore[arg-type]
            ws="none",
            lifespan="off",
            loop="asyncio",
            log_config=None,
            log_level="error",  # no line for each request that is no HTTP
            access_log=False,
            backlog=BACKLOG,
            timeout_keep_alive=int(limits.idle_seconds),
            timeout_graceful_shutdown=int(limits.drain_seconds) + CLOSE_SECONDS,
            server_header=False,
        )
        self._uvicorn = _Uvicorn(config, started)
        self._closing: threading.Thread | None = None

    async def serve(self) -> None:
        """Serve until ``stop`` was called and every request is answered or cut off."""
        await self._uvicorn.serve(sockets=[self._bound])
        if self._closing is not None:
            await asyncio.to_thread(self._closing.join)

    def stop(self) -> None:
        """Refuse new requests; running ones have ``drain_seconds``. Call it on the event loop."""
        if self._closing is None:
            self._app.state.draining = True
            self._uvicorn.should_exit = True
            self._closing = threading.Thread(
                target=self._served.service.close,
                args=(self._limits.drain_seconds,),
                name="closing",
                daemon=True,
            )
            self._closing.start()
            loop = asyncio.get_running_loop()
            loop.call_later(self._limits.drain_seconds + ERROR_SECONDS, self._cut_off)

    def _cut_off(self) -> None:
        for running in list(self._app.state.running):
            running.cut_off()

    def _failed(self, why: str) -> None:
        self.failure = why
        self.stop()


class _Uvicorn(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, started: Callable[[], None]):
        super().__init__(config)
        self._when_started = started

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._when_started()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """The caller handles signals: uvicorn would raise them again at the end."""
        yield


def run(server: Server, limits: ServerLimits) -> int:
    """Serve until SIGTERM or SIGINT; the exit status.

    Raises:
      RunError: the engine failed.
    """
    return asyncio.run(_run(server, limits))


async def _run(server: Server, limits: ServerLimits) -> int:
    status = handle_signals(server.stop, limits.drain_seconds)
    await server.serve()
    if server.failure:
        raise RunError(f"the engine failed: {server.failure}")
    return status()
