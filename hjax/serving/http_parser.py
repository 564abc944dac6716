"""HTTP/1.1 as h11 parses it, without what proxies and servers are known to read differently."""

import re

import h11

from hjax.serving.limits import ServerLimits

# Where a head ends, as h11 sees it.
_HEAD_END = re.compile(rb"\n\r?\n")
_BARE_LINE_FEED, _FOLDED_HEADER = re.compile(rb"(?<!\r)\n"), re.compile(rb"\n[ \t]")


class HttpParser(h11.Connection):
    """A server's parser of requests.

    Beyond what h11 refuses it refuses other versions than 1.1 and 1.0, heads with folded headers,
    bare line feeds or both Content-Length and Transfer-Encoding (RFC 9112, 2.2, 5.2 and 6.1), heads
    larger than the limit even if they arrive in one piece, and bodies in too many chunks.
    ``next_event`` raises h11.RemoteProtocolError for them, with the status in
    ``error_status_hint``.

    Args:
      limits: of heads and chunks.
    """

    def __init__(self, limits: ServerLimits):
        super().__init__(h11.SERVER, limits.head_bytes)
        self._limits = limits
        self._chunks = 0

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        """The next event of what was received."""
        if self.their_state is h11.IDLE:
            self._check_head(self.trailing_data[0])
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._chunks = 0
            if not event.http_version.startswith(b"1."):
                raise h11.RemoteProtocolError("another version than HTTP/1.1", 505)
            names = {name for name, _ in event.headers}
            if {b"content-length", b"transfer-encoding"} <= names:
                raise h11.RemoteProtocolError("Content-Length beside Transfer-Encoding")
        elif isinstance(event, h11.Data):
            self._chunks += event.chunk_start
            if self._chunks > self._limits.chunks:
                said = f"the body comes in more than {self._limits.chunks} chunks, the server's"
                raise h11.RemoteProtocolError(f"{said} limit; send larger ones", 413)
        return event

    def _check_head(self, received: bytes) -> None:
        end = _HEAD_END.search(received)
        head = received if end is None else received[: end.end()]
        if len(head) > self._limits.head_bytes:
            said = f"the headers are larger than {self._limits.head_bytes} bytes"
            raise h11.RemoteProtocolError(said, 431)
        if _BARE_LINE_FEED.search(head):
            raise h11.RemoteProtocolError("a line of the headers does not end in CR LF")
        if _FOLDED_HEADER.search(head):
            raise h11.RemoteProtocolError("a header goes on in the next line (obs-fold)")
