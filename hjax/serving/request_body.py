"""Request bodies: read within limits on size and time, a few large ones at a time."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from starlette.requests import Request

from hjax.serving.limits import ServerLimits
from hjax.serving.request_errors import RequestRefused

# A body that is larger needs one of a few places.
LARGE_BODY_BYTES = 2**16
# Large bodies that are received at a time, and that are parsed: parsing takes several times their
# size, and more than two at once would only wait for each other.
_RECEIVED_AT_A_TIME, _PARSED_AT_A_TIME = 16, 2


class BodyReader:
    """Reads the bodies of a server's requests.

    Args:
      limits: on size and time.
    """

    def __init__(self, limits: ServerLimits):
        self._limits = limits
        self._receiving = asyncio.Semaphore(_RECEIVED_AT_A_TIME)
        self._parsing = asyncio.Semaphore(_PARSED_AT_A_TIME)

    @contextlib.asynccontextmanager
    async def read(self, request: Request) -> AsyncIterator[bytes]:
        """The body of a request. Parse it before the context ends: large ones have their place so
        long.

        Raises:
          RequestRefused: too large, or too late.
          ClientDisconnect: the client did not finish it.
        """
        async with contextlib.AsyncExitStack() as places:
            body = await self._receive(request, places)
            if len(body) > LARGE_BODY_BYTES:
                await places.enter_async_context(self._parsing)
            yield body

    async def _receive(self, request: Request, places: contextlib.AsyncExitStack) -> bytes:
        limits = self._limits
        large = RequestRefused(
            f"the body is larger than {limits.body_bytes} bytes, the server's limit", 413
        )
        declared = request.headers.get("content-length", "0")
        if not declared.isdecimal() or int(declared) > limits.body_bytes:
            raise large
        body, waiting = bytearray(), False
        try:
            async with asyncio.timeout(limits.body_seconds):
                async for part in request.stream():
                    has_place = len(body) > LARGE_BODY_BYTES
                    body += part
                    if len(body) > limits.body_bytes:
                        raise large
                    if len(body) > LARGE_BODY_BYTES and not has_place:
                        waiting = True
                        await places.enter_async_context(self._receiving)
                        waiting = False
        except TimeoutError:
            late = f"after {limits.body_seconds:g} s"
            if waiting:
                said = f"{_RECEIVED_AT_A_TIME} large bodies are being received, {late} too"
                raise RequestRefused(said, 503, retry_after=1) from None
            raise RequestRefused(f"the body was not there {late}", 408) from None
        return bytes(body)
