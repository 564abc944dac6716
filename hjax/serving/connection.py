"""A connection: closed when its client sends no request, or does not read what was answered."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from hjax.serving.limits import Limits
from hjax.serving.refusal import Refused


def connection_class(limits: Limits) -> type[H11Protocol]:
    """uvicorn's protocol for HTTP/1.1, with limits.

    uvicorn itself waits for a request's headers for ever, for a client to read what was written
    too, and says errors in plain text.
    """

    class Connection(H11Protocol):
        _late: asyncio.TimerHandle | None = None
        _unread: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            if len(self.connections) > limits.connections:
                self._refuse(
                    Refused(f"{limits.connections} connections are open", 503, retry_after=1)
                )
            else:
                self._arm()

        def data_received(self, data: bytes) -> None:
            if self.transport.is_closing():
                return
            super().data_received(data)
            if self.cycle is None or self.cycle.response_complete:
                self._arm()
            else:
                self._disarm()

        def connection_lost(self, exc: Exception | None) -> None:
            self._disarm()
            self.resume_writing()
            super().connection_lost(exc)

        def pause_writing(self) -> None:
            super().pause_writing()
            self._unread = self.loop.call_later(limits.idle_seconds, self.transport.abort)

        def resume_writing(self) -> None:
            super().resume_writing()
            if self._unread is not None:
                self._unread.cancel()
                self._unread = None

        def timeout_keep_alive_handler(self) -> None:
            if self.transport.get_write_buffer_size():  # closing would wait for a reader
                self.transport.abort()
            super().timeout_keep_alive_handler()

        def send_400_response(self, msg: str) -> None:
            self._refuse(Refused(msg))

        def _refuse(self, refused: Refused) -> None:
            cycle = self.cycle
            answering = cycle and cycle.response_started and not cycle.response_complete
            if answering or self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
                self.transport.abort()  # in the midst of an answer nothing else can be said
                return
            body = json.dumps(refused.body()).encode()
            headers = [
                (b"content-type", b"application/json"),
                (b"content-length", str(len(body)).encode()),
                (b"connection", b"close"),
            ]
            if refused.retry_after is not None:
                headers.append((b"retry-after", str(refused.retry_after).encode()))
            for event in (
                h11.Response(status_code=refused.status, headers=headers),
                h11.Data(data=body),
                h11.EndOfMessage(),
            ):
                self.transport.write(self.conn.send(event) or b"")
            self.transport.close()

        def _arm(self) -> None:
            """Headers, or the rest of a body that nobody wants, are to end in time."""
            if self._late is None:
                self._late = self.loop.call_later(limits.header_seconds, self.transport.abort)

        def _disarm(self) -> None:
            if self._late is not None:
                self._late.cancel()
                self._late = None

    return Connection
