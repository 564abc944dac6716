"""Streaming: a running request, whose chunks cross from the engine's thread to the event loop."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

from hjax.data.limited_process import ComputationFailed
from hjax.errors import ConfigError, RunError
from hjax.rollout.requests import QueueFull, RequestHandle, ResponseChunk
from hjax.serving.detokenizer import ENGINE_FAILED, Choice, Delta
from hjax.serving.request_errors import RequestRefused
from hjax.serving.request_models import ParsedRequest
from hjax.serving.served_model import ServedModel


@dataclasses.dataclass(frozen=True)
class RequestWatch:
    """The running requests, and callbacks on what happens to them, on the event loop.

    Attributes:
      first_token: called with the seconds until a request's first token.
      on_failure: called with the reason when the engine fails; it then answers no request.
      running: requests that have not ended.
    """

    first_token: Callable[[float], None]
    on_failure: Callable[[str], None]
    running: set[RunningRequest] = dataclasses.field(default_factory=set)


class RunningRequest:
    """The responses to a request, all of them in the engine at once.

    Made on the event loop. Unread chunks are buffered here, at most as many as were requested.

    Args:
      served: the model.
      parsed: the request.
      watch: gets the callbacks.

    Raises:
      RequestRefused: the engine's queue is full, the server is stopping, or it cannot run this.

    Attributes:
      choices: the responses.
    """

    def __init__(self, served: ServedModel, parsed: ParsedRequest, watch: RequestWatch):
        self.parsed = parsed
        tokenizer = served.tokenizer
        # Decoding that may take long waits in a thread: the event loop has other clients.
        self._decodes_here = tokenizer is None or tokenizer.decodes_here
        self._began = time.monotonic()
        self._watch = watch
        self._loop = asyncio.get_running_loop()
        self._arrived: asyncio.Queue[tuple[int, ResponseChunk]] = asyncio.Queue()
        self._handles: list[RequestHandle] = []
        requests = parsed.requests()
        self.choices = [Choice(parsed, index, served) for index in range(len(requests))]
        try:
            matchers = parsed.matchers or (None,) * len(requests)
            for index, (request, matcher) in enumerate(zip(requests, matchers, strict=True)):
                hand_over = functools.partial(self._hand_over, index)
                self._handles.append(served.service.submit(request, hand_over, matcher))
        except (ConfigError, RunError) as error:
            self.cancel()
            if isinstance(error, ConfigError):
                raise RequestRefused.from_config_error(error) from None
            status, after = (429, 1) if isinstance(error, QueueFull) else (503, 10)
            raise RequestRefused(str(error), status, retry_after=after) from None
        watch.running.add(self)

    def _hand_over(self, index: int, piece: ResponseChunk) -> None:
        """Called from the engine's thread."""
        try:
            self._loop.call_soon_threadsafe(self._arrived.put_nowait, (index, piece))
        except RuntimeError:  # the loop is closed: nobody waits any more
            if not self._loop.is_closed():
                raise

    async def deltas(self) -> AsyncIterator[tuple[int, Delta]]:
        """What is new, with the response's index, until all have ended.

        Raises:
          RequestRefused: the engine or the tokenizer failed.
        """
        for index, choice in enumerate(self.choices):
            yield index, await self._decoded(choice.begin)
        going, waiting = len(self.choices), True
        while going:
            index, piece = await self._arrived.get()
            # Nothing above waits if the engine is faster than this; others must have their turn.
            await asyncio.sleep(0)
            choice = self.choices[index]
            if choice.finish:  # by a stop string; this was drawn before it was cancelled
                continue
            if waiting and piece.tokens:
                waiting = False
                self._watch.first_token(time.monotonic() - self._began)
            if piece.finish.startswith(ENGINE_FAILED):
                self._watch.on_failure(piece.finish.removeprefix(ENGINE_FAILED))
            delta = await self._decoded(choice.add, piece)
            if choice.finish:
                going -= 1
                if not piece.finish:
                    self._handles[index].cancel()
            yield index, delta

    async def _decoded(self, decode: Callable[..., Delta], *piece: ResponseChunk) -> Delta:
        try:
            if self._decodes_here:
                return decode(*piece)
            return await asyncio.to_thread(decode, *piece)
        except ComputationFailed as error:
            raise RequestRefused(str(error), 500) from None

    def cancel(self) -> None:
        """Cancel in the engine what has not ended; the request is over."""
        self._watch.running.discard(self)
        for handle, choice in zip(self._handles, self.choices):
            if not choice.finish:
                handle.cancel()

    def cut_off(self) -> None:
        """End now, though the engine has not: the client gets the error that the server stops."""
        going = (index for index, choice in enumerate(self.choices) if not choice.finish)
        self._arrived.put_nowait((next(going, 0), ResponseChunk(finish="cancelled")))

    def usage(self) -> dict[str, Any]:
        """Tokens so far, in OpenAI's format."""
        prompt = sum(len(prompt.tokens) for prompt in self.parsed.prompts)
        drawn = sum(choice.count for choice in self.choices)
        first_answers = self._handles[:: len(self._handles) // len(self.parsed.prompts)]
        cached = sum(handle.cached_tokens or 0 for handle in first_answers)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": drawn,
            "total_tokens": prompt + drawn,
            "prompt_tokens_details": {"cached_tokens": cached},
            "completion_tokens_details": {},  # some clients fail without it
        }
