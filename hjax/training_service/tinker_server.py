"""The training service's process: its HTTP server, and what it does now and then."""

import asyncio
import contextlib
import socket
import sys
from collections.abc import Callable

from hjax.serving.limits import ServerLimits
from hjax.serving.server import HttpServer, run_until_signal
from hjax.training_service.shared_base import SharedBase
from hjax.training_service.state_store import StateStore
from hjax.training_service.tinker_app import make_tinker_app
from hjax.training_service.tinker_service import TinkerLimits, TinkerService

# Seconds between two looks for silent sessions and old results, and for expired states.
_SWEEP_SECONDS, _EXPIRY_SECONDS = 10.0, 600.0


def run_tinker(
    base: SharedBase,
    names: tuple[str, ...],
    store: StateStore,
    bound: socket.socket,
    *,
    limits: ServerLimits,
    service_limits: TinkerLimits,
    key: str = "",
    kept: bool = True,
    started: Callable[[], None] = lambda: None,
) -> int:
    """Serve until SIGTERM or SIGINT; the exit status. Arguments as of ``TinkerService``.

    Args:
      bound: the socket.
      limits: of requests and connections.
      key: that requests must bring; "": none.
      started: called once the server answers.
    """

    async def serve() -> int:
        service = TinkerService(base, names, store, service_limits, kept)
        app = make_tinker_app(service, limits, key, bound.getsockname()[0])
        server = HttpServer(app, service.close, bound, limits, started)
        sweeping = asyncio.create_task(sweep_often(service))
        try:
            return await run_until_signal(server, limits)
        finally:
            sweeping.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await sweeping

    return asyncio.run(serve())


async def sweep_often(service: TinkerService) -> None:
    """Drop what has ended or expired, again and again."""
    for number in range(2**62):
        await asyncio.sleep(_SWEEP_SECONDS)
        service.sweep()
        if number % int(_EXPIRY_SECONDS / _SWEEP_SECONDS) == 0:
            try:
                await asyncio.to_thread(service.store.remove_expired)
            except OSError as error:  # sessions must end all the same
                print(f"hjax: expired states stay: {error}", file=sys.stderr)
