"""What is awaited of a client: its body within the limits, and that it is still there."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive

from hjax.serving.limits import Limits
from hjax.serving.refusal import Refused

T = TypeVar("T")


async def read_body(request: Request, limits: Limits) -> bytes:
    """The body of a request.

    Raises:
      Refused: too large, or too late.
      ClientDisconnect: the client did not finish it.
    """
    large = Refused(f"the body is larger than {limits.body_bytes} bytes, the server's limit", 413)
    said = request.headers.get("content-length", "0")
    if not said.isdecimal() or int(said) > limits.body_bytes:
        raise large
    body = bytearray()
    try:
        async with asyncio.timeout(limits.body_seconds):
            async for part in request.stream():
                body += part
                if len(body) > limits.body_bytes:
                    raise large
    except TimeoutError:
        raise Refused(f"the body was not there after {limits.body_seconds:g} s", 408) from None
    return bytes(body)


async def while_there(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """What ``work`` returns; it is cancelled when the client goes away.

    Args:
      receive: of ASGI; the request's body has been read.

    Raises:
      ClientDisconnect: it went away first.
    """
    doing = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({doing, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not doing.done():
            raise ClientDisconnect
        return doing.result()
    finally:
        doing.cancel()
        watching.cancel()
        await asyncio.gather(doing, watching, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
