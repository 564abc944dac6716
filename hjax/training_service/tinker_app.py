"""The ASGI application of the Tinker API: routes, keys, refusals, long polls."""

import asyncio
import contextlib
import functools
import hmac
import re
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from hjax.errors import ConfigError, RunError, one_line
from hjax.serving.app import cancel_on_disconnect, server_failed
from hjax.serving.cross_site import CrossSiteCheck
from hjax.serving.fields import RequestFields, parse_object, validate_fields
from hjax.serving.limits import ServerLimits
from hjax.serving.request_body import LARGE_BODY_BYTES, BodyReader
from hjax.serving.request_errors import RequestRefused
from hjax.training_service import tinker_listing as listing
from hjax.training_service.request_futures import FutureResult
from hjax.training_service.state_store import StateName
from hjax.training_service.tinker_messages import read_forward_backward
from hjax.training_service.tinker_requests import (
    ID_LENGTH,
    ConfigFields,
    CreateModelFields,
    HeartbeatFields,
    LoadFields,
    ModelFields,
    OptimFields,
    PathFields,
    RetrieveFields,
    SampleFields,
    SamplingSessionFields,
    SaveFields,
    SaveForSamplerFields,
    SessionFields,
    TtlFields,
)
from hjax.training_service.tinker_samplers import check_samples
from hjax.training_service.tinker_service import TinkerService

# The SDK whose requests are understood; it changes its wire with every version.
SDK_VERSION = "0.38."
PREFIX = "/api/v1"
# Seconds of a long poll; the SDK gives up after 45.
POLL_SECONDS = 30.0
# Requests of one page of a list.
_PAGE = 1000
_HEALTH = f"{PREFIX}/healthz"
_CLOSED = 499
Of = TypeVar("Of", bound=RequestFields)


def make_tinker_app(
    service: TinkerService, limits: ServerLimits, key: str, address: str = "127.0.0.1"
) -> Starlette:
    """The ASGI application.

    Args:
      service: answers.
      limits: of requests.
      key: that requests must bring as ``X-API-Key``; "": none.
      address: the IP address that the server listens on.
    """
    paths = _TinkerPaths(service, limits)
    check: Callable[[Scope], None] = CrossSiteCheck(address, limits).check
    if key:
        check = functools.partial(check_api_key, key.encode())
    app = Starlette(
        routes=_routes(paths, _TinkerLists(service, paths.fields)),
        middleware=[Middleware(_Refusals, check=check)],
        exception_handlers={
            HTTPException: _unrouted,
            ClientDisconnect: _client_closed,
            Exception: server_failed,
        },
    )
    app.state.draining = False
    app.state.running = paths.polls
    return app


def _routes(paths: "_TinkerPaths", lists: "_TinkerLists") -> list[Route]:
    posts = {
        "client/config": paths.config,
        "client/dynamic_config": paths.dynamic_config,
        "telemetry": paths.telemetry,
        "create_session": paths.create_session,
        "session_heartbeat": paths.heartbeat,
        "sessions/{session_id}/finish": paths.finish,
        "create_model": paths.create_model,
        "load_weights": paths.load_weights,
        "get_info": paths.get_info,
        "forward_backward": paths.forward_backward,
        "optim_step": paths.optim_step,
        "save_weights": paths.save_weights,
        "save_weights_for_sampler": paths.save_for_sampler,
        "create_sampling_session": paths.create_sampling_session,
        "asample": paths.sample,
        "retrieve_future": paths.retrieve_future,
        "weights_info": paths.weights_info,
    }
    gets = {
        "healthz": lists.health,
        "get_server_capabilities": lists.capabilities,
        "samplers/{sampler_id:path}": lists.sampler,
        "sessions": lists.sessions,
        "sessions/{session_id}": lists.session,
        "training_runs": lists.training_runs,
        "training_runs/{model_id}": lists.training_run,
        "training_runs/{model_id}/checkpoints": lists.checkpoints,
        "checkpoints": lists.checkpoints,
    }
    one = f"{PREFIX}/training_runs/{{model_id}}/checkpoints/{{kind}}/{{name}}"
    routes = [Route(f"{PREFIX}/{path}", call, methods=["POST"]) for path, call in posts.items()]
    routes += [Route(f"{PREFIX}/{path}", call, methods=["GET"]) for path, call in gets.items()]
    routes += [
        Route(one, lists.delete_checkpoint, methods=["DELETE"]),
        Route(f"{one}/ttl", lists.set_ttl, methods=["PUT"]),
    ]
    return routes


def check_api_key(key: bytes, scope: Scope) -> None:
    """Raise RequestRefused (401) unless a request brings the key as ``X-API-Key``."""
    given = Headers(scope=scope).get("x-api-key", "")
    if not hmac.compare_digest(given.encode("latin-1"), key):
        raise RequestRefused("the API key is missing or wrong: X-API-Key", 401)


class _Refusals:
    """ASGI middleware: checks who asks, and answers refusals."""

    def __init__(self, app: ASGIApp, check: Callable[[Scope], None]):
        self._app, self._check = app, check

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            if scope["type"] == "http" and scope["path"] != _HEALTH:
                self._check(scope)
            await self._app(scope, receive, send)
        except RequestRefused as refused:
            await refused.response()(scope, receive, send)
        except ConfigError as error:
            await RequestRefused(one_line(error)).response()(scope, receive, send)
        except RunError as error:
            await RequestRefused(one_line(error), 500).response()(scope, receive, send)


class _Poll:
    """A long poll, which a server that stops cuts off."""

    def __init__(self, task: "asyncio.Task[Any]"):
        self._task = task

    def cut_off(self) -> None:
        """End it; the client asks again, and finds no server."""
        self._task.cancel()


class _TinkerPaths:
    """Handlers of what the SDK posts."""

    def __init__(self, service: TinkerService, limits: ServerLimits):
        self._service, self._limits = service, limits
        self._bodies = BodyReader(limits)
        self.polls: set[_Poll] = set()

    @contextlib.asynccontextmanager
    async def _body(self, request: Request) -> AsyncIterator[bytes]:
        if request.app.state.draining:
            raise RequestRefused("the server is being stopped", 503, retry_after=10)
        coding = request.headers.get("content-encoding", "identity")
        if coding != "identity":
            raise RequestRefused(f"Content-Encoding: {coding[:50]} is not supported", 415)
        async with self._bodies.read(request) as body:
            yield body

    async def _object(self, request: Request) -> dict[str, Any]:
        async with self._body(request) as body:
            try:
                if len(body) <= LARGE_BODY_BYTES:
                    return parse_object(body or b"{}", self._limits)
                # A long prompt takes long; the event loop has other clients.
                return await asyncio.to_thread(parse_object, body, self._limits)
            except RecursionError:
                raise RequestRefused("the body is nested too deeply") from None

    async def fields(self, request: Request, kind: type[Of]) -> Of:
        """The JSON of a request; RequestRefused if it is wrong."""
        return validate_fields(kind, await self._object(request))

    async def _future(
        self,
        request: Request,
        kind: type[Of],
        submit: Callable[[Of], str],
        id_of: Callable[[Mapping[str, Any]], str],
    ) -> Response:
        """Answer with a future; of a request that is wrong it has failed already."""
        given = await self._object(request)
        try:
            request_id = submit(validate_fields(kind, given))
        except RequestRefused as refused:
            if refused.status != 400 or not (request_id := id_of(given)):
                raise
            self._service.refuse(request_id, ConfigError(refused.message))
        return JSONResponse({"request_id": request_id})

    async def config(self, request: Request) -> Response:
        """Flags for the client; another SDK is refused."""
        check_version((await self.fields(request, ConfigFields)).sdk_version)
        return JSONResponse({"proto_compress_fwdbwd": False, "sample_use_retrieve_futures": False})

    async def dynamic_config(self, request: Request) -> Response:
        """Flags that a client asks for now and then."""
        await self.fields(request, ConfigFields)
        return JSONResponse({"refresh_interval_sec": 300, "sample_cancel_enabled": False})

    async def telemetry(self, request: Request) -> Response:
        """Nothing is kept of it."""
        async with self._body(request):
            return JSONResponse({"status": "accepted"})

    async def create_session(self, request: Request) -> Response:
        fields = await self.fields(request, SessionFields)
        check_version(fields.sdk_version)
        warnings = ["adapters are on layers alone: train_unembed is not supported"]
        if not self._service.kept:
            warnings.append("saved states last as long as this server (it has no --store)")
        if fields.project_id:
            warnings.append("there are no projects here: project_id is not used")
        return JSONResponse(
            {
                "type": "create_session",
                "session_id": self._service.create_session(
                    fields.user_metadata, fields.display_name
                ),
                "warning_message": "; ".join(warnings),
            }
        )

    async def heartbeat(self, request: Request) -> Response:
        self._service.session((await self.fields(request, HeartbeatFields)).session_id)
        return JSONResponse({"type": "session_heartbeat"})

    async def finish(self, request: Request) -> Response:
        """End a session; its results are dropped."""
        async with self._body(request):
            self._service.end_session(request.path_params["session_id"], "its session was finished")
        return JSONResponse({})

    async def create_model(self, request: Request) -> Response:
        return await self._future(
            request, CreateModelFields, self._service.create_model, _model_id_of
        )

    async def load_weights(self, request: Request) -> Response:
        def load(fields: LoadFields) -> str:
            if fields.session_id and fields.model_seq_id is not None:
                return self._service.load_model(fields)
            if not fields.model_id or fields.seq_id is None:
                raise RequestRefused("load_weights needs session_id and model_seq_id")
            return self._service.load_into(fields)

        def id_of(given: Mapping[str, Any]) -> str:
            return _model_id_of(given) or _request_id_of(given)

        return await self._future(request, LoadFields, load, id_of)

    async def get_info(self, request: Request) -> Response:
        fields = await self.fields(request, ModelFields)
        return JSONResponse(self._service.info(fields.model_id))

    async def forward_backward(self, request: Request) -> Response:
        async with self._body(request) as body:
            asked = await asyncio.to_thread(read_forward_backward, body)
        return JSONResponse({"request_id": self._service.forward_backward(asked)})

    async def optim_step(self, request: Request) -> Response:
        return await self._future(request, OptimFields, self._service.optim_step, _request_id_of)

    async def save_weights(self, request: Request) -> Response:
        return await self._future(request, SaveFields, self._service.save_weights, _request_id_of)

    async def save_for_sampler(self, request: Request) -> Response:
        return await self._future(
            request, SaveForSamplerFields, self._service.save_for_sampler, _request_id_of
        )

    async def create_sampling_session(self, request: Request) -> Response:
        fields = await self.fields(request, SamplingSessionFields)
        made = await self._service.create_sampler(fields)
        return JSONResponse({"type": "create_sampling_session", "sampling_session_id": made})

    async def sample(self, request: Request) -> Response:
        given = await self._object(request)
        try:
            fields = validate_fields(SampleFields, given)
            made = check_samples(fields, self._service.limits.samples)
            if made["request_id"] not in self._service.futures:
                self._service.check_room()
                await self._service.samplers.sample(made["request_id"], fields)
        except (RequestRefused, ConfigError) as error:
            refused = error if isinstance(error, RequestRefused) else RequestRefused(str(error))
            request_id = _id_of(given, "sampling_session_id", "seq_id")
            if refused.status != 400 or not request_id:
                raise
            self._service.refuse(request_id, ConfigError(refused.message))
            count = given.get("num_samples", 1)
            most = self._service.limits.samples
            numbers = range(count if type(count) is int and 0 < count <= most else 1)
            made = {
                "request_id": request_id,
                "sample_sequence_ids": [f"{request_id}:{i}" for i in numbers],
            }
        return JSONResponse(made)

    async def retrieve_future(self, request: Request) -> Response:
        """A long poll: the result, or status 408, at which the SDK asks again."""
        request_id = (await self.fields(request, RetrieveFields)).request_id
        if request_id not in self._service.futures:
            return _result(FutureResult.of_error(self._service.lost_result(request_id)))
        waiting = self._service.futures.wait(request_id, POLL_SECONDS)
        task = asyncio.ensure_future(waiting)
        poll = _Poll(task)
        self.polls.add(poll)
        try:
            result = await cancel_on_disconnect(request.receive, _joined(task))
        finally:
            self.polls.discard(poll)
        if result is None:
            content = {"type": "try_again", "request_id": request_id, "queue_state": "active"}
            return JSONResponse(content, 408)
        return _result(result)

    async def weights_info(self, request: Request) -> Response:
        fields = await self.fields(request, PathFields)
        return JSONResponse(listing.weights_info(self._service.store, fields.tinker_path))


class _TinkerLists:
    """Handlers of what the SDK's RestClient asks for."""

    def __init__(self, service: TinkerService, fields: Callable[..., Any]):
        self._service, self._fields = service, fields

    async def health(self, request: Request) -> Response:
        status = ("stopping", 503) if request.app.state.draining else ("ok", 200)
        return JSONResponse({"status": status[0]}, status[1])

    async def capabilities(self, request: Request) -> Response:
        longest = self._service.base.config.max_length
        return JSONResponse(
            {
                "supported_models": [
                    {
                        "model_name": name,
                        "max_context_length": longest,
                        "trainable": True,
                        "sampleable": True,
                    }
                    for name in self._service.names
                ]
            }
        )

    async def sampler(self, request: Request) -> Response:
        return JSONResponse(self._service.samplers.about(request.path_params["sampler_id"]))

    async def sessions(self, request: Request) -> Response:
        return JSONResponse({"sessions": _page(request, self._service.sessions())[0]})

    async def session(self, request: Request) -> Response:
        return JSONResponse(self._service.about_session(request.path_params["session_id"]))

    async def training_runs(self, request: Request) -> Response:
        runs, cursor = _page(request, listing.training_runs(self._service))
        return JSONResponse({"training_runs": runs, "cursor": cursor})

    async def training_run(self, request: Request) -> Response:
        return JSONResponse(listing.training_run(self._service, request.path_params["model_id"]))

    async def checkpoints(self, request: Request) -> Response:
        model_id = request.path_params.get("model_id", "")
        found, cursor = _page(request, listing.checkpoints(self._service.store, model_id))
        return JSONResponse({"checkpoints": found, "cursor": cursor})

    async def delete_checkpoint(self, request: Request) -> Response:
        self._service.store.remove(_state_name(request))
        return JSONResponse({})

    async def set_ttl(self, request: Request) -> Response:
        fields = await self._fields(request, TtlFields)
        self._service.store.set_ttl(_state_name(request), fields.ttl_seconds)
        return JSONResponse({})


async def _joined(task: "asyncio.Task[FutureResult | None]") -> FutureResult | None:
    try:
        return await task
    except asyncio.CancelledError:
        if task.cancelled():  # the server stops
            return None
        task.cancel()
        raise


def check_version(version: str) -> None:
    """Raise RequestRefused for another SDK than the one that is understood."""
    if not version.startswith(SDK_VERSION):
        raise RequestRefused(
            f"tinker {version[:50]} speaks another protocol; this server understands tinker "
            f"{SDK_VERSION}x: pip install 'tinker=={SDK_VERSION}*'"
        )


def _result(result: FutureResult) -> Response:
    kind = "application/x-protobuf" if result.protobuf else "application/json"
    return Response(result.body, media_type=kind)


def _request_id_of(given: Mapping[str, Any]) -> str:
    """The future's id of a request whose fields are wrong; empty: it has no number."""
    return _id_of(given, "model_id", "seq_id")


def _model_id_of(given: Mapping[str, Any]) -> str:
    found = _id_of(given, "session_id", "model_seq_id", ":train:")
    return f"{found}:create" if found else ""


def _id_of(given: Mapping[str, Any], owner: str, number: str, between: str = ":") -> str:
    name, count = given.get(owner), given.get(number)
    named = isinstance(name, str) and 0 < len(name) <= ID_LENGTH
    numbered = isinstance(count, int) and not isinstance(count, bool) and 0 <= count < 2**63
    return f"{name}{between}{count}" if named and numbered else ""


def _page(request: Request, rows: list[Any]) -> tuple[list[Any], dict[str, int]]:
    """The part of a list that ``offset`` and ``limit`` of the query name, and where it stands."""
    query = request.query_params
    limit, offset = query.get("limit", str(_PAGE)), query.get("offset", "0")
    if not all(re.fullmatch("[0-9]{1,18}", text) for text in (limit, offset)):
        raise RequestRefused("limit and offset: whole numbers of 0 or more")
    start, count = int(offset), min(int(limit), _PAGE)
    cursor = {"offset": start, "limit": count, "total_count": len(rows)}
    return rows[start : start + count], cursor


def _state_name(request: Request) -> StateName:
    parts = request.path_params
    return StateName(parts["model_id"], parts["kind"], parts["name"])


async def _unrouted(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    text = {404: "there is no such path here", 405: "not by this method"}
    reason = text.get(error.status_code, error.detail)
    refused = RequestRefused(f"{request.method} {request.url.path}: {reason}", error.status_code)
    return refused.response()


async def _client_closed(request: Request, error: Exception) -> Response:
    return Response(status_code=_CLOSED)
