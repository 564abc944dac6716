"""A connection with timeouts: closed if its client sends no request or reads no answer."""

import asyncio
import sys
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from hjax.errors import truncate
from hjax.serving.http_parser import HttpParser
from hjax.serving.limits import ServerLimits
from hjax.serving.request_errors import RequestRefused


class Connection(H11Protocol):
    """uvicorn's protocol for HTTP/1.1, with limits.

    uvicorn waits for ever for a request's headers and for a client to read. It counts connections
    only once they request something, and reports errors as plain text.

    Args:
      limits: of connections.
      given: arguments of uvicorn's protocol.
    """

    def __init__(self, limits: ServerLimits, **given: Any):
        super().__init__(**given)
        self._limits = limits
        self.conn = HttpParser(limits)
        self._header_timer: asyncio.TimerHandle | None = None
        self._read_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """Refuse a connection beyond the limit."""
        super().connection_made(transport)
        if len(self.connections) > self._limits.connections:
            said = f"{self._limits.connections} connections are open"
            self._refuse(RequestRefused(said, 503, retry_after=1))
        else:
            self._start_header_timer()

    def data_received(self, data: bytes) -> None:
        """Limit the time for headers, and for the rest of a body that is not read."""
        if self.transport.is_closing():
            return
        super().data_received(data)
        if self.cycle is None or self.cycle.response_complete:
            self._start_header_timer()
        else:
            self._stop_header_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timers."""
        self._stop_header_timer()
        self.resume_writing()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """Start the timer within which the client must read."""
        super().pause_writing()
        self._read_timer = self.loop.call_later(self._limits.idle_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        """Stop that timer: the client has read."""
        super().resume_writing()
        if self._read_timer is not None:
            self._read_timer.cancel()
            self._read_timer = None

    def timeout_keep_alive_handler(self) -> None:
        """Close an idle connection, whether its client reads or not."""
        if self.transport.get_write_buffer_size():  # closing would wait until it is read
            self.transport.abort()
        super().timeout_keep_alive_handler()

    def send_400_response(self, msg: str) -> None:
        """Answer what is not HTTP; called while its error is handled."""
        error = sys.exception()
        status = getattr(error, "error_status_hint", 400)
        self._refuse(RequestRefused(f"HTTP: {truncate(str(error), 200)}", status))

    def _refuse(self, refused: RequestRefused) -> None:
        cycle = self.cycle
        answering = cycle and cycle.response_started and not cycle.response_complete
        if answering or self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.abort()  # an answer has begun: no other can be sent
            return
        said = refused.response()
        headers = [*said.raw_headers, (b"connection", b"close")]
        head = h11.Response(status_code=refused.status, headers=headers)
        for event in (head, h11.Data(data=bytes(said.body)), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _start_header_timer(self) -> None:
        if self._header_timer is None:
            self._header_timer = self.loop.call_later(
                self._limits.header_seconds, self.transport.abort
            )

    def _stop_header_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None
