"""The ASGI application: OpenAI's endpoints over a served model; authentication and disconnects."""

import asyncio
import functools
import hmac
import json
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from typing import Any, TypeVar

from pydantic import Field
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import hjax
from hjax.serving.constraint_trial import ConstraintTrial
from hjax.serving.cross_site import CrossSiteCheck
from hjax.serving.detokenizer import Delta
from hjax.serving.fields import RequestFields, parse_object, validate_fields
from hjax.serving.limits import ServerLimits
from hjax.serving.prometheus import CONTENT_TYPE, PrometheusMetrics
from hjax.serving.reload import WeightReload
from hjax.serving.request_body import BodyReader
from hjax.serving.request_errors import RequestRefused
from hjax.serving.request_models import ParsedRequest, parse_chat, parse_completion, with_matchers
from hjax.serving.response_models import ChatForm, CompletionForm, ResponseForm
from hjax.serving.served_model import ServedModel
from hjax.serving.streaming import RequestWatch, RunningRequest

Read = Callable[[Mapping[str, Any], ServedModel, ServerLimits], ParsedRequest]
DAY = 24 * 60 * 60
T = TypeVar("T")
CLIENT_CLOSED = 499  # nginx's status for a client that disconnected
# Load balancers call these without an API key, and by names of their own.
UNAUTHENTICATED_PATHS = ("/health",)


def make_app(
    served: ServedModel,
    limits: ServerLimits,
    key: str,
    on_failure: Callable[[str], None],
    reload: WeightReload | None = None,
    address: str = "127.0.0.1",
) -> Starlette:
    """The ASGI application.

    Args:
      served: the model.
      limits: of requests.
      key: the API key that requests must bring; "": none.
      on_failure: called with the reason when the engine fails.
      reload: reads the weights again on request; None: there is no such endpoint.
      address: the IP address that the server listens on.

    Its ``state.draining`` set to true refuses new requests; ``state.running`` has the running ones.
    """
    metrics = PrometheusMetrics(served.service.stats)
    paths = _Endpoints(served, limits, metrics, on_failure, reload)
    routes = [
        Route("/v1/models", paths.models),
        Route("/v1/models/{name:path}", paths.model),
        Route("/v1/completions", paths.completions, methods=["POST"]),
        Route("/v1/chat/completions", paths.chat, methods=["POST"]),
        Route("/health", paths.health),
        Route("/version", paths.version),
        Route("/metrics", paths.metrics),
    ]
    if reload is not None:
        routes.append(Route("/admin/reload", paths.reload, methods=["POST"]))
    counted = frozenset(route.path for route in routes)
    check: Callable[[Scope], None] = CrossSiteCheck(address, limits).check
    if key:  # no other site's page knows it
        check = functools.partial(check_key, key.encode())
    middleware = [Middleware(RequestMiddleware, metrics=metrics, paths=counted, check=check)]
    if limits.origins:  # outside, as a browser asks without the key first, and reads refusals too
        origins, methods = limits.origins, ("GET", "POST")
        cors = Middleware(
            CORSMiddleware, allow_origins=origins, allow_methods=methods, allow_headers=["*"]
        )
        middleware.insert(0, cors)
    app = Starlette(
        routes=routes,
        middleware=middleware,
        exception_handlers={
            HTTPException: _unrouted,
            ClientDisconnect: _client_closed,
            Exception: server_failed,
        },
    )
    app.state.draining = False
    app.state.running = paths.watch.running
    return app


class _Reload(RequestFields):
    seconds: int | None = Field(None, ge=0, le=DAY)


class _Endpoints:
    """The endpoints' handlers."""

    def __init__(
        self,
        served: ServedModel,
        limits: ServerLimits,
        metrics: PrometheusMetrics,
        on_failure: Callable[[str], None],
        reload: WeightReload | None,
    ):
        self._served = served
        self._limits = limits
        self._metrics = metrics
        self._reload = reload
        self._bodies = BodyReader(limits)
        self._trial = None
        if served.tokenizer is not None:
            self._trial = ConstraintTrial(served.tokenizer, served.vocab_size, limits)
        self.watch = RequestWatch(metrics.first_token.observe, on_failure)
        self._began = int(time.time())

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        self._served.check_name(request.path_params["name"])
        return JSONResponse(self._model())

    def _model(self) -> dict[str, Any]:
        return {
            "id": self._served.name,
            "object": "model",
            "created": self._began,
            "owned_by": "hjax",
            "max_model_len": self._served.service.max_tokens,
        }

    async def health(self, request: Request) -> Response:
        if request.app.state.draining:
            return JSONResponse({"status": "stopping"}, 503)
        return JSONResponse({"status": "ok"})

    async def version(self, request: Request) -> Response:
        return JSONResponse({"version": hjax.__version__})

    async def metrics(self, request: Request) -> Response:
        return Response(self._metrics.text(), headers={"Content-Type": CONTENT_TYPE})

    async def completions(self, request: Request) -> Response:
        return await self._answer(request, parse_completion, CompletionForm)

    async def chat(self, request: Request) -> Response:
        return await self._answer(request, parse_chat, ChatForm)

    async def reload(self, request: Request) -> Response:
        assert self._reload is not None
        self._check_draining(request)
        async with self._bodies.read(request) as body:
            given = parse_object(body, self._limits) if body else {}
        parsed = validate_fields(_Reload, given)
        result = await asyncio.to_thread(self._reload, parsed.seconds)
        self._metrics.reloads.inc()
        return JSONResponse(result)

    def _check_draining(self, request: Request) -> None:
        if request.app.state.draining:
            raise RequestRefused("the server is being stopped", 503, retry_after=10)

    async def _answer(self, request: Request, read: Read, form: type[ResponseForm]) -> Response:
        parsed = await self._parsed(request, read)
        if parsed.format is not None:
            if self._trial is not None:
                await self._trial.check(parsed.format, len(parsed.prompts) * parsed.n)
            parsed = await asyncio.to_thread(with_matchers, parsed, self._served)
        running = RunningRequest(self._served, parsed, self.watch)
        answer = form(self._served.name, parsed)
        if parsed.stream:
            return _EventStream(running, answer)
        try:
            return await cancel_on_disconnect(request.receive, _full_response(running, answer))
        finally:
            running.cancel()

    async def _parsed(self, request: Request, read: Read) -> ParsedRequest:
        def ask() -> ParsedRequest:
            try:
                return read(parse_object(body, self._limits), self._served, self._limits)
            except RecursionError:
                raise RequestRefused("the body is nested too deeply") from None

        self._check_draining(request)
        async with self._bodies.read(request) as body:
            # Encoding a long text takes long; the event loop has other clients.
            return await asyncio.to_thread(ask)


async def _full_response(running: RunningRequest, answer: ResponseForm) -> Response:
    found: list[list[Delta]] = [[] for _ in running.choices]
    async for index, delta in running.deltas():
        found[index].append(delta)
    joined = [Delta.merged(each) for each in found]
    return JSONResponse(answer.whole(joined, running.usage()))


async def cancel_on_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """What ``work`` returns; it is cancelled if the client disconnects.

    Args:
      receive: of ASGI; the request's body has been read.

    Raises:
      ClientDisconnect: the client disconnected first.
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


class _EventStream(StreamingResponse):
    """A streamed answer (server-sent events); it ends when the client disconnects."""

    def __init__(self, running: RunningRequest, answer: ResponseForm):
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        events = _events(running, answer)
        super().__init__(events, headers=headers, media_type="text/event-stream")
        self._running = running

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._running.cancel()


async def _events(running: RunningRequest, answer: ResponseForm) -> AsyncIterator[str]:
    try:
        async for chunk in _chunks(running, answer):
            yield f"data: {json.dumps(chunk, ensure_ascii=False)}\n\n"
    except RequestRefused as refused:  # the status was sent already; an event reports it
        yield f"data: {json.dumps(refused.body(), ensure_ascii=False)}\n\n"
    yield "data: [DONE]\n\n"


async def _chunks(running: RunningRequest, answer: ResponseForm) -> AsyncIterator[dict[str, Any]]:
    begun = set[int]()
    async for index, delta in running.deltas():
        first = index not in begun
        if delta != Delta() or (first and answer.opens):
            begun.add(index)
            yield answer.chunk(index, delta, first)
    if running.parsed.include_usage:
        yield answer.usage_chunk(running.usage())


async def _unrouted(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    text = {404: "there is no such path", 405: "not by this method"}
    reason = text.get(error.status_code, error.detail)
    refused = RequestRefused(f"{request.method} {request.url.path}: {reason}", error.status_code)
    return refused.response()


async def _client_closed(request: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED)  # only the metrics see it


async def server_failed(request: Request, error: Exception) -> Response:
    """For an error of the server's own; its traceback goes to stderr."""
    return RequestRefused("the server failed; its log says why", 500).response()


def check_key(key: bytes, scope: Scope) -> None:
    """Raise RequestRefused unless a request brings the API key."""
    scheme, _, given = Headers(scope=scope).get("authorization", "").partition(" ")
    # Starlette decodes headers as Latin-1, so this gives the original bytes.
    right = hmac.compare_digest(given.strip().encode("latin-1"), key)
    if scheme.lower() != "bearer" or not right:
        raise RequestRefused(
            "the API key is missing or wrong: Authorization: Bearer KEY",
            401,
            code="invalid_api_key",
        )


class RequestMiddleware:
    """ASGI middleware: checks who asks, and counts answers.

    Args:
      app: the application behind it.
      metrics: counts the answers.
      paths: that are counted under their names.
      check: raises RequestRefused for a request of somebody who may not ask.
    """

    def __init__(
        self,
        app: ASGIApp,
        metrics: PrometheusMetrics,
        paths: frozenset[str],
        check: Callable[[Scope], None],
    ):
        self._app = app
        self._metrics = metrics
        self._paths = paths
        self._check = check

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        start, status = time.monotonic(), CLIENT_CLOSED

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            if scope["path"] not in UNAUTHENTICATED_PATHS:
                self._check(scope)
            await self._app(scope, receive, noted)
        except RequestRefused as refused:
            await refused.response()(scope, receive, noted)
        except Exception:
            status = 500  # logged by the caller
            raise
        finally:
            path = scope["path"] if scope["path"] in self._paths else "other"
            self._metrics.answered(path, status, time.monotonic() - start)
