"""What every request passes first: whether the server takes it, the key, and the count of it."""

from __future__ import annotations

import hmac
import time

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hjax.serving.metrics import Metrics
from hjax.serving.refusal import Refused

GONE = 499  # nginx's word for a client that did not wait
# A balancer asks this one without a key.
OPEN = ("/health",)


class Door:
    """ASGI middleware in front of the application.

    Args:
      app: behind it.
      metrics: count the answers.
      paths: that are counted under their names.
      key: that requests must bring; "": none.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics, paths: frozenset[str], key: str):
        self._app = app
        self._metrics = metrics
        self._paths = paths
        self._key = key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        began, status = time.monotonic(), GONE

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            self._check(scope)
            await self._app(scope, receive, noted)
        except Refused as refused:
            await refused.response()(scope, receive, noted)
        except Exception:
            status = 500  # said further out
            raise
        finally:
            path = scope["path"] if scope["path"] in self._paths else "other"
            self._metrics.answered(path, status, time.monotonic() - began)

    def _check(self, scope: Scope) -> None:
        if not self._key or scope["path"] in OPEN:
            return
        scheme, _, given = Headers(scope=scope).get("authorization", "").partition(" ")
        # Starlette reads headers as Latin-1, so that these are the bytes that came.
        right = hmac.compare_digest(given.strip().encode("latin-1"), self._key)
        if scheme.lower() != "bearer" or not right:
            raise Refused(
                "the API key is missing or wrong: Authorization: Bearer KEY",
                401,
                code="invalid_api_key",
            )
