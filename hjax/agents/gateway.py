"""The gateway: the server that agents' calls come to, each session at an address of its own."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hmac
import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Scope

from hjax.agents.agent_requests import any_client, drawn_by_the_run, no_request
from hjax.agents.answer import MODEL, AnswerStream, PolicyAnswer, chat_events, response_stream
from hjax.agents.responses import chat_body, response_object
from hjax.agents.session import CallService, Session, TurnQueue, body_digest
from hjax.data.conversation import Conversation
from hjax.errors import ConfigError, DataError, RunError
from hjax.rollout.constrained_decoding import ConstraintCompiler
from hjax.rules import whole_number
from hjax.serving.address import address_of, bind
from hjax.serving.app import RequestMiddleware, cancel_on_disconnect, error_answers
from hjax.serving.constraint_trial import ConstraintTrial
from hjax.serving.fields import parse_object
from hjax.serving.limits import ServerLimits, allow_connections
from hjax.serving.request_body import BodyReader
from hjax.serving.request_errors import RequestRefused
from hjax.serving.request_models import (
    Encoded,
    check_length,
    parse_chat,
    with_matchers,
)
from hjax.serving.served_model import ServedModel
from hjax.serving.server import HttpServer
from hjax.serving.streaming import RequestWatch, RunningRequest

_LOG = logging.getLogger(__name__)
_START_SECONDS = 60.0
# At a time, as far as this process may have files open: a flood must not keep others from calling.
CONNECTIONS = 4096
# Bytes of a body that is parsed in less time than a thread takes to begin.
_SMALL_BODY = 1 << 14
# How often a session that a limit has ended is told so before its requests are refused.
_TOLD = 3
_CONTEXT = "context_length_exceeded"
_ENDED = {
    "max_turns": "The limit of {calls} calls is reached; this session has ended.",
    "context": "The conversation has no room left; this session has ended.",
}


class Gateway:
    """Answers the calls of agents.

    Args:
      served: the model. Its service draws the answers as they are asked for; with None they wait in
        ``queue`` for the policy, drawn as the run says.
      limits: of requests.
      call_tokens: of an answer at most; 0: what there is room for.
      drawing: sampling options of requests that do not say them, where a service draws.
      seed: from which theirs follow.
      constrained: whether what requests ask of an answer's form holds where the policy draws.
      host: the address to listen on.

    Attributes:
      queue: of what waits for the policy.
      requests: that were answered or refused, of all sessions.
      told_late: whether it was logged that sessions wait for each other.
    """

    def __init__(
        self,
        served: ServedModel,
        limits: ServerLimits = ServerLimits(connections=CONNECTIONS),
        call_tokens: int = 0,
        *,
        drawing: Mapping[str, Any] | None = None,
        seed: int = 0,
        constrained: bool = False,
        host: str = "127.0.0.1",
    ):
        self.queue = TurnQueue()
        self._served, self._limits = dataclasses.replace(served, name=MODEL), limits
        self._drawing, self._seed = dict(drawing or {}), seed
        self._trains, self._call_tokens = served.service is None, call_tokens
        self._constrained = constrained
        self._constraints = ConstraintCompiler(served.tokenizer, served.vocab_size)
        assert served.tokenizer is not None
        self._trial = ConstraintTrial(served.tokenizer, served.vocab_size, limits)
        self._sessions: dict[str, Session] = {}
        self._answers: dict[tuple[str, bytes], PolicyAnswer] = {}
        self._bodies = BodyReader(limits)
        self._watch = RequestWatch(lambda seconds: None, self._failed)
        self._told: set[str] = set()
        self.requests, self.told_late = 0, False
        with contextlib.suppress(ConfigError):  # then connections wait until others end
            allow_connections(limits.connections)
        self._bound = bind(host, 0)
        self._address = address_of(self._bound)
        listens = threading.Event()
        self._server = HttpServer(
            self._app(), lambda seconds: None, self._bound, limits, listens.set
        )
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="agents' gateway", daemon=True)
        self._thread.start()
        if not listens.wait(_START_SECONDS):
            raise RunError(f"the agents' gateway at {self._address} does not start")

    def open(self, session: Session) -> str:
        """Answer a session's calls; returns the base URL for its agent."""
        self._sessions[session.key] = session
        return f"http://{self._address}/s/{session.key}/v1"

    def close(self, session: Session) -> None:
        """Answer no more calls of a session; those that run are cancelled."""
        session.sealed = True
        self._sessions.pop(session.key, None)
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._cancel, session)

    def shut_down(self) -> None:
        """End the server."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._server.stop)
        self._thread.join(self._limits.drain_seconds + 5)
        self._bound.close()

    def answered(self, path: str, status: int, seconds: float) -> None:
        """Count an answer, as ``AnswerCounts``."""
        self.requests += 1

    # On the event loop

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._server.serve())
        finally:
            self._loop.close()

    def _app(self) -> Starlette:
        base = "/s/{key}/v1"
        routes = [
            Route(f"{base}/models", self._models),
            Route(f"{base}/models/{{name:path}}", self._model),
            Route(f"{base}/chat/completions", self._chat, methods=["POST"]),
            Route(f"{base}/responses", self._respond, methods=["POST"]),
        ]
        check = Middleware(
            RequestMiddleware, metrics=self, paths=frozenset[str](), check=self._check
        )
        app = Starlette(routes=routes, middleware=[check], exception_handlers=error_answers())
        app.state.draining = False
        app.state.running = self._watch.running
        return app

    def _check(self, scope: Scope) -> None:
        """Who asks must know the session's key twice: in the path, and as the API key."""
        start, key = [*scope["path"].split("/"), "", ""][1:3]
        scheme, _, given = Headers(scope=scope).get("authorization", "").partition(" ")
        same = hmac.compare_digest(given.strip().encode(), key.encode())
        if start != "s" or key not in self._sessions or scheme.lower() != "bearer" or not same:
            raise RequestRefused(
                "no session of this key; the base URL and the API key are those of a session that "
                "is open",
                401,
                code="invalid_api_key",
            )

    def _session(self, request: Request) -> Session:
        session = self._sessions.get(request.path_params["key"])
        if session is None or session.sealed:
            raise RequestRefused("the session has ended", code="session_ended")
        return session

    async def _models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._described()]})

    async def _model(self, request: Request) -> Response:
        return JSONResponse(self._described())

    def _described(self) -> dict[str, Any]:
        return {"id": MODEL, "object": "model", "created": 0, "owned_by": "hjax"}

    async def _chat(self, request: Request) -> Response:
        answer = await self._answer(request, dict)
        if answer.parsed.stream:
            return AnswerStream(answer, chat_events)
        return JSONResponse(await self._delivered(request, answer))

    async def _respond(self, request: Request) -> Response:
        answer = await self._answer(request, chat_body)
        if answer.parsed.stream:
            return AnswerStream(answer, response_stream)
        return JSONResponse(response_object(await self._delivered(request, answer)))

    async def _answer(
        self, request: Request, chat: Callable[[Any], dict[str, Any]]
    ) -> PolicyAnswer:
        """The answer to a request, as a chat completion; ``chat`` makes its body one's."""
        session = self._session(request)
        async with self._bodies.read(request) as content:
            if len(content) > _SMALL_BODY:
                body = chat(await asyncio.to_thread(parse_object, content, self._limits))
            else:
                body = chat(parse_object(content, self._limits))
            answer = self._retried(request, session, body)
            if answer is None:
                answer = await self._begin(session, body)
        answer.listeners += 1
        return answer

    async def _delivered(self, request: Request, answer: PolicyAnswer) -> dict[str, Any]:
        try:
            return await cancel_on_disconnect(request.receive, answer.delivered())
        finally:
            answer.leave()

    def _retried(
        self, request: Request, session: Session, body: Mapping[str, Any]
    ) -> PolicyAnswer | None:
        """The answer to the same request that the client sends again; None: it is a new one."""
        count = request.headers.get("x-stainless-retry-count", "0")
        if not whole_number(count):
            return None
        answer = self._answers.get((session.key, body_digest(body)))
        if answer is not None and answer.failed:
            return None
        if answer is not None:
            session.counts["retries"] += 1
        return answer

    async def _begin(self, session: Session, body: Mapping[str, Any]) -> PolicyAnswer:
        count = body.get("n")
        count = max(count, 1) if isinstance(count, int) else 1
        if session.running >= session.concurrent:
            said = f"{session.running} calls of this session run, as many as may"
            raise RequestRefused(said, 429, retry_after=1)
        if session.most_calls and session.begun + count > session.most_calls:
            return self._limit(session, body, "max_turns")
        session.begin(count)
        answer = None
        try:
            answer = await self._asked(session, body)
        finally:
            if answer is None or answer.text:
                session.end(count, abandoned=True)
        if not answer.text:
            answer.when_drawn(lambda failed: session.end(count, abandoned=failed))
        return answer

    async def _asked(self, session: Session, body: Mapping[str, Any]) -> PolicyAnswer:
        """The answer to a request within the session's limits, which is asked for."""
        used, asked = any_client(body), dict[str, Any]()
        if self._trains:
            used, asked = drawn_by_the_run(used, self._constrained)
            self._warn(asked)
        else:
            own = np.random.SeedSequence([self._seed, session.number, session.begun])
            used = {**self._drawing, "seed": int(own.generate_state(1)[0]), **used}
        service = CallService(
            session, self.queue if self._trains else None,
            session.tree.most_tokens, self._served.service, self._constraints,
        )  # fmt: skip
        served = dataclasses.replace(self._served, service=service)

        def encode(chat: Conversation) -> Encoded:
            return self._placed(session, service, chat)

        try:
            parsed = await asyncio.to_thread(parse_chat, used, served, self._limits, encode)
        except RequestRefused as refused:
            if refused.code != _CONTEXT:
                raise
            return self._limit(session, body, "context")
        service.stop = parsed.stop
        if parsed.format is not None:
            await self._trial.check(parsed.format, len(parsed.prompts) * parsed.n)
            parsed = await asyncio.to_thread(with_matchers, parsed, served)
        if session.sealed:
            raise RequestRefused("the session has ended", code="session_ended")
        running_request = RunningRequest(served, parsed, self._watch)
        answer = PolicyAnswer(session, parsed, service, running_request, asked)
        self._answers[session.key, body_digest(body)] = answer
        return answer

    def _placed(self, session: Session, service: CallService, chat: Conversation) -> Encoded:
        with session.lock:
            try:
                text = "".join(message["content"] for message in chat.messages)
                tokenizer = self._served.text_tokenizer("messages")
                check_length(text, tokenizer, service.max_tokens, "messages")
                place = session.tree.place(chat)
            except (DataError, ValueError, ArithmeticError) as error:
                raise RequestRefused.of_field("messages", error) from None
            service.place = place
            room, most = session.tree.room(place), self._call_tokens
            return list(place.prompt), min(room, len(place.prompt) + most) if most else room

    def _limit(self, session: Session, body: Mapping[str, Any], which: str) -> PolicyAnswer:
        """The answer of a session that a limit has ended: plain words that nobody drew."""
        session.ended_by = session.ended_by or which
        session.refusals += 1
        text = _ENDED[which].format(calls=session.most_calls)
        if session.refusals > _TOLD:
            raise RequestRefused(text, code=_CONTEXT)
        return PolicyAnswer(session, no_request(body), None, None, {}, text)

    def _warn(self, asked: Mapping[str, Any]) -> None:
        if new := sorted(asked.keys() - self._told):
            self._told.update(new)
            _LOG.warning(
                "agents ask for %s; the policy is drawn as the run says, and the session's record "
                "has what was asked",
                ", ".join(f"{name}={asked[name]!r}"[:60] for name in new),
            )

    def _cancel(self, session: Session) -> None:
        for key in [key for key in self._answers if key[0] == session.key]:
            self._answers.pop(key).cancel()

    def _failed(self, why: str) -> None:
        _LOG.error("the engine failed: %s", why)
