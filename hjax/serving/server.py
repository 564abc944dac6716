"""The HTTP server: a socket, an event loop, and a shutdown within seconds of a signal."""

import asyncio
import contextlib
import functools
import socket
import threading
from collections.abc import Callable, Iterator

import uvicorn
from starlette.applications import Starlette

from hjax.errors import RunError
from hjax.serving.app import make_app
from hjax.serving.connection import Connection
from hjax.serving.limits import BACKLOG, ServerLimits
from hjax.serving.reload import WeightReload
from hjax.serving.served_model import ServedModel
from hjax.serving.shutdown import handle_signals

# Seconds after limits.drain_seconds: pending requests get an error; connections are closed.
ERROR_SECONDS, CLOSE_SECONDS = 1, 2


class HttpServer:
    """An HTTP server for an application.

    Args:
      app: its ``state.draining`` set to true refuses new requests; ``state.running`` has the
        running ones, each with a method ``cut_off``.
      close: called once with the seconds that pending requests have; may wait so long.
      bound: the socket.
      limits: of requests and connections.
      started: called once the server answers.

    Attributes:
      failure: why the engine failed, and the server with it; "": it did not.
    """

    def __init__(
        self,
        app: Starlette,
        close: Callable[[float], None],
        bound: socket.socket,
        limits: ServerLimits,
        started: Callable[[], None],
    ):
        self._app, self._close = app, close
        self._bound = bound
        self._limits = limits
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
                target=self._close, args=(self._limits.drain_seconds,), name="closing", daemon=True
            )
            self._closing.start()
            loop = asyncio.get_running_loop()
            loop.call_later(self._limits.drain_seconds + ERROR_SECONDS, self._cut_off)

    def _cut_off(self) -> None:
        for running in list(self._app.state.running):
            running.cut_off()


class Server(HttpServer):
    """An HTTP server for a model.

    Args:
      served: the model.
      bound: the socket.
      limits: of requests and connections.
      key: the API key that requests must bring; "": none.
      started: called once the server answers.
      reload: reads the weights again on request; None: there is no such endpoint.
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
        address = bound.getsockname()[0]
        app = make_app(served, limits, key, self._failed, reload, address=address)
        super().__init__(app, served.service.close, bound, limits, started)

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


def run(server: HttpServer, limits: ServerLimits) -> int:
    """Serve until SIGTERM or SIGINT; the exit status.

    Raises:
      RunError: the engine failed.
    """
    return asyncio.run(run_until_signal(server, limits))


async def run_until_signal(server: HttpServer, limits: ServerLimits) -> int:
    """``run`` on an event loop that runs."""
    status = handle_signals(server.stop, limits.drain_seconds)
    await server.serve()
    if server.failure:
        raise RunError(f"the engine failed: {server.failure}")
    return status()
