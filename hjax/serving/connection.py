"""A connection: closed when its client sends no request, or does not read what was answered."""

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from hjax.serving.limits import ServerLimits
from hjax.serving.request_errors import RequestRefused


class Connection(H11Protocol):
    """uvicorn's protocol for HTTP/1.1, with limits.

    uvicorn itself waits for a request's headers for ever, for a client to read what was written
    too, counts connections when they ask for something, and says errors in plain text.

    Args:
      limits: of connections.
      given: of uvicorn.
    """

    def __init__(self, limits: ServerLimits, **given: Any):
        super().__init__(**given)
        self._limits = limits
        self._late: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """Refuse one too many."""
        super().connection_made(transport)
        if len(self.connections) > self._limits.connections:
            said = f"{self._limits.connections} connections are open"
            self._refuse(RequestRefused(said, 503, retry_after=1))
        else:
            self._arm()

    def data_received(self, data: bytes) -> None:
        """Headers, or the rest of a body that nobody wants, are to end in time."""
        if self.transport.is_closing():
            return
        super().data_received(data)
        if self.cycle is None or self.cycle.response_complete:
            self._arm()
        else:
            self._disarm()

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing is waited for any more."""
        self._disarm()
        self.resume_writing()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """The client is to read in time."""
        super().pause_writing()
        self._unread = self.loop.call_later(self._limits.idle_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        """It has read."""
        super().resume_writing()
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def timeout_keep_alive_handler(self) -> None:
        """End it, where somebody reads or not."""
        if self.transport.get_write_buffer_size():  # closing would wait for a reader
            self.transport.abort()
        super().timeout_keep_alive_handler()

    def send_400_response(self, msg: str) -> None:
        """Say what is no HTTP."""
        self._refuse(RequestRefused(msg))

    def _refuse(self, refused: RequestRefused) -> None:
        cycle = self.cycle
        answering = cycle and cycle.response_started and not cycle.response_complete
        if answering or self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.abort()  # in the midst of an answer nothing else can be said
            return
        said = refused.response()
        headers = [*said.raw_headers, (b"connection", b"close")]
        head = h11.Response(status_code=refused.status, headers=headers)
        for event in (head, h11.Data(data=bytes(said.body)), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _arm(self) -> None:
        if self._late is None:
            self._late = self.loop.call_later(self._limits.header_seconds, self.transport.abort)

    def _disarm(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None
