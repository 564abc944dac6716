"""The answer to an agent's request: drawn once, recorded before it is sent, and sent to retries."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from hjax.agents.call_tree import Placement
from hjax.agents.responses import response_events, response_object
from hjax.agents.session import CallService, Session
from hjax.data.chat_messages import read_messages
from hjax.serving.detokenizer import Delta
from hjax.serving.request_errors import RequestRefused
from hjax.serving.request_models import ParsedRequest
from hjax.serving.response_models import ChatForm
from hjax.serving.streaming import RunningRequest

# The name under which the policy answers; requests may use any.
MODEL = "policy"
# How often a stream without news gets a comment, and how long an answer waits for the retry of a
# client that has gone.
KEEPALIVE_SECONDS, RETRY_SECONDS = 3.0, 10.0


class PolicyAnswer:
    """The answer to a request, which several of its retries may wait for.

    Made on the event loop.

    Args:
      session: whose call it is.
      parsed: the request.
      service: that its responses were submitted to; None: nobody draws it.
      running: its responses; None: ``text`` is the answer.
      asked: of sampling, and not used.

    Attributes:
      text: of an answer that nobody draws.
      listeners: clients that wait for it.
    """

    def __init__(
        self,
        session: Session,
        parsed: ParsedRequest,
        service: CallService | None,
        running: RunningRequest | None,
        asked: Mapping[str, Any],
        text: str = "",
    ):
        self.session, self.parsed = session, parsed
        self.listeners = 0
        self.form = ChatForm(MODEL, parsed)
        self.text = text
        self._service, self._running, self._asked = service, running, asked
        self._recorded: asyncio.Task[None] | None = None
        self._left: asyncio.TimerHandle | None = None
        self.usage = _NO_USAGE
        self._drawn = asyncio.ensure_future(self._collect())
        self._drawn.add_done_callback(lambda task: task.cancelled() or task.exception())

    @property
    def failed(self) -> bool:
        """Whether it cannot be sent."""
        done = self._drawn
        return done.done() and (done.cancelled() or done.exception() is not None)

    def when_drawn(self, call: Callable[[bool], None]) -> None:
        """Call this once it is drawn, with whether it failed."""
        self._drawn.add_done_callback(lambda task: call(self.failed))

    async def deltas(self) -> list[Delta]:
        """What was drawn, once it is recorded; then it may be sent."""
        await asyncio.wait([self._drawn])
        if self._drawn.cancelled():
            raise RequestRefused("the session has ended", code="session_ended")
        deltas = self._drawn.result()
        if self._recorded is None:
            self._recorded = asyncio.ensure_future(asyncio.to_thread(self._record, deltas))
        await asyncio.shield(self._recorded)
        return deltas

    async def delivered(self) -> dict[str, Any]:
        """The whole answer."""
        return self.form.whole(await self.deltas(), self.usage)

    async def wait(self, seconds: float) -> bool:
        """Wait until it is drawn, or so long; whether it is."""
        await asyncio.wait([self._drawn], timeout=seconds)
        return self._drawn.done()

    def leave(self) -> None:
        """A client has got it, or gone; the last one that goes before may come back some seconds
        long, then it is cancelled."""
        self.listeners -= 1
        if not self.listeners and self._recorded is None:
            self._left = asyncio.get_running_loop().call_later(RETRY_SECONDS, self._abandon)

    def cancel(self) -> None:
        """Stop drawing it."""
        if self._running is not None:
            self._running.cancel()
        self._drawn.cancel()

    def _abandon(self) -> None:
        if self._recorded is None and not self.listeners:
            self.session.counts["abandoned"] += 1
            self.cancel()
            if self._service is not None:
                self.session.abandon(self._service.turns)

    async def _collect(self) -> list[Delta]:
        if self._running is None:
            return [Delta(self.text, finish="stop")]
        found: list[list[Delta]] = [[] for _ in self._running.choices]
        try:
            async for index, delta in self._running.deltas():
                found[index].append(delta)
            self.usage = self._running.usage()
            return [Delta.merged(each) for each in found]
        finally:
            self._running.cancel()

    def _record(self, deltas: Sequence[Delta]) -> None:
        service, running = self._service, self._running
        if service is None or running is None:
            return
        assert service.place is not None
        place: Placement = service.place
        choices = self.form.whole(deltas, self.usage)["choices"]
        for index, choice in enumerate(running.choices):
            message = choices[index]["message"]
            [answer] = read_messages([message], request=True)
            drawn = service.drawn(index, choice.count, choice.finish != "length")
            turn = service.turns[index] if service.turns else None
            self.session.record(turn, place, drawn, answer, self._asked)


_NO_USAGE: dict[str, Any] = dict.fromkeys(
    ("prompt_tokens", "completion_tokens", "total_tokens"), 0
) | {"prompt_tokens_details": {}, "completion_tokens_details": {}}


class AnswerStream(StreamingResponse):
    """An answer as events, once it is whole and recorded; comments keep the connection until
    then."""

    def __init__(self, answer: PolicyAnswer, events: Callable[[PolicyAnswer], AsyncIterator[str]]):
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(
            _kept_alive(answer, events), headers=headers, media_type="text/event-stream"
        )
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._answer.leave()


async def _kept_alive(
    answer: PolicyAnswer, events: Callable[[PolicyAnswer], AsyncIterator[str]]
) -> AsyncIterator[str]:
    while not await answer.wait(KEEPALIVE_SECONDS):
        yield ": keepalive\n\n"
    async for event in events(answer):
        yield event


async def chat_events(answer: PolicyAnswer) -> AsyncIterator[str]:
    """The events of a chat completion's stream."""
    try:
        for chunk in _chunks(answer, await answer.deltas()):
            yield f"data: {json.dumps(chunk, ensure_ascii=False)}\n\n"
    except RequestRefused as refused:  # the status was sent already
        yield f"data: {json.dumps(refused.body(), ensure_ascii=False)}\n\n"
    yield "data: [DONE]\n\n"


async def response_stream(answer: PolicyAnswer) -> AsyncIterator[str]:
    """The events of a response's stream."""
    try:
        events = list(response_events(response_object(await answer.delivered())))
    except RequestRefused as refused:  # the status was sent already
        events = [{"type": "error", **refused.body()["error"]}]
    for event in events:
        yield f"event: {event['type']}\ndata: {json.dumps(event, ensure_ascii=False)}\n\n"


def _chunks(answer: PolicyAnswer, deltas: Sequence[Delta]) -> list[dict[str, Any]]:
    found = []
    for index, delta in enumerate(deltas):
        found.append(answer.form.chunk(index, dataclasses.replace(delta, finish=""), True))
        found.append(answer.form.chunk(index, Delta(finish=delta.finish), False))
    if answer.parsed.include_usage:
        found.append(answer.form.usage_chunk(answer.usage))
    return found
