"""JetStream's orchestrator behind gRPC: its driver's threads, its service, and a door before it.

JetStream's own server class listens on every address of the machine and asks for no key, so the
listening is done here, with gRPC's own server; what it serves is JetStream's ``Orchestrator``.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import hmac
import os
import queue
import signal
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np

from hjax.data.response_text import ResponseText
from hjax.data.tokenizer import Tokenizer
from hjax.errors import ConfigError, RunError
from hjax.serving.jetstream_engine import Engine, Length
from hjax.serving.leaving import GONE, leave_after
from hjax.serving.limits import Limits

import grpc  # isort: skip  (after what keeps TensorFlow quiet)
from jetstream.core import orchestrator  # isort: skip
from jetstream.core.proto import jetstream_pb2, jetstream_pb2_grpc  # isort: skip
from jetstream.engine import token_utils  # isort: skip


class Slots(queue.Queue):
    """Free slots, which the generate thread learns of between its steps alone.

    JetStream's generate thread asserts that some slot is taken; one that is freed while it decides
    would end the process.
    """

    def __init__(self, count: int):
        super().__init__(count)
        self._freed: collections.deque[int] = collections.deque()
        for slot in range(count):
            self.put(slot)

    def put(self, item: int, block: bool = True, timeout: float | None = None) -> None:
        """Of the detokenize thread it is kept until ``settle``."""
        if threading.current_thread().name.startswith("detokenize"):
            self._freed.append(item)
        else:
            super().put(item, block, timeout)

    def settle(self) -> None:
        """What was freed is free."""
        while self._freed:
            super().put(self._freed.popleft())


class Driver(orchestrator.Driver):
    """JetStream's, for one engine that prefills and decodes.

    Args:
      engine: warmed up.
      max_queue: requests that may wait to be prefilled.
      failed: called, from any thread, when one of its threads cannot go on. JetStream would kill
        the process.
    """

    def __init__(self, engine: Engine, max_queue: int, failed: Callable[[BaseException], None]):
        self._max_queue, self._failed, self._own = max_queue, failed, engine
        self._settling = threading.Lock()
        params = [engine.load_params()]
        super().__init__([engine], [engine], params, params, interleaved_mode=True)

    def place_request_on_prefill_queue(self, request: Any) -> None:
        """Raises queue.Full, which JetStream answers with RESOURCE_EXHAUSTED."""
        if self._prefill_backlog.qsize() >= self._max_queue:
            raise queue.Full
        super().place_request_on_prefill_queue(request)

    def _process_prefill_content(
        self, request: Any, tokenizer: Any, is_bos: bool, max_prefill_length: int
    ) -> tuple[Any, int]:
        """Token ids as they are, with what the engine should know."""
        padded, length = token_utils.pad_tokens(
            np.array(request.prefill_content, np.int32),
            tokenizer.bos_id,
            tokenizer.pad_id,
            is_bos=False,
            max_prefill_length=max_prefill_length,
            jax_padding=False,
        )
        return padded, Length(length, request.max_tokens, request.return_channel.cancelled)

    def _settled(self, idx: int) -> None:
        with self._settling:
            if not isinstance(self._generate_slots[idx], Slots):
                self._generate_slots[idx] = Slots(self._own.max_concurrent_decodes)
                self._own.stepped = self._generate_slots[idx].settle

    def _watched(self, run: Callable[[int], None], idx: int) -> None:
        self._settled(idx)
        try:
            run(idx)
        except Exception as error:
            self._failed(error)

    def _prefill_thread(self, idx: int) -> None:
        self._watched(super()._prefill_thread, idx)

    def _transfer_thread(self, idx: int) -> None:
        self._watched(super()._transfer_thread, idx)

    def _generate_thread(self, idx: int) -> None:
        self._watched(super()._generate_thread, idx)

    def _detokenize_thread(self, idx: int) -> None:
        self._watched(super()._detokenize_thread, idx)


@dataclasses.dataclass(frozen=True)
class Asked:
    """A request that was checked, in the place of gRPC's.

    Attributes:
      tokens: of the prompt.
      max_tokens: of the response.
      session_cache: JetStream's; empty.
    """

    tokens: list[int]
    max_tokens: int
    session_cache: str = ""


class Orchestrator(orchestrator.LLMOrchestrator):
    """JetStream's, for requests that the model can answer, and with text in whole characters.

    Args:
      driver: behind it.
      engine: of the driver.
    """

    def __init__(self, driver: Driver, engine: Engine):
        super().__init__(driver)
        self._context, self._vocab = engine.context, engine.model.config.vocab_size
        self._tokenizer: Tokenizer | None = engine.model.tokenizer
        self.draining = False

    def _get_prefill_content(self, request: Any) -> tuple[list[int], bool]:
        return request.tokens, True

    async def Decode(self, request: Any, context: Any = None) -> AsyncIterator[Any]:  # noqa: N802
        """A response, streamed in pieces with its tokens and, for a prompt that is text, text."""
        if self.draining:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the server is being stopped")
        text = None
        try:
            # Encoding a long text takes long, and the loop has other clients.
            asked = await asyncio.to_thread(self._checked, request)
        except ConfigError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        if request.WhichOneof("content") == "text_content" and self._tokenizer is not None:
            text = ResponseText(self._tokenizer, asked.tokens)
        async for response in super().Decode(asked, context):
            for sample in response.stream_content.samples:
                if text is not None:
                    sample.text = "".join(map(text.feed, sample.token_ids))
            yield response
        if text is not None and (rest := text.close()):
            content = jetstream_pb2.DecodeResponse.StreamContent
            yield jetstream_pb2.DecodeResponse(
                stream_content=content(samples=[content.Sample(text=rest)])
            )

    def _checked(self, request: Any) -> Asked:
        """Raises ConfigError: what cannot be answered; a thread that met it would end."""
        kind = request.WhichOneof("content")
        if kind is None:
            raise ConfigError("text_content or token_content is missing")
        if request.session_cache:
            raise ConfigError("session_cache: nothing is kept between requests; leave it out")
        if kind == "token_content":
            tokens = list(request.token_content.token_ids)
        elif self._tokenizer is None:
            raise ConfigError("text_content: this model has no tokenizer; give token_content")
        else:
            tokens = self._tokenizer.encode(request.text_content.text)
        if not tokens:
            raise ConfigError("the prompt is empty; give at least one token")
        wrong = [token for token in tokens if not 0 <= token < self._vocab]
        if wrong:
            raise ConfigError(f"token {wrong[0]} is outside the vocabulary, 0 to {self._vocab - 1}")
        if request.max_tokens < 1:
            raise ConfigError(f"max_tokens={request.max_tokens}: 1 or more")
        if len(tokens) + request.max_tokens > self._context:
            raise ConfigError(
                f"a prompt of {len(tokens)} and max_tokens={request.max_tokens} exceed the "
                f"{self._context} tokens that the server has room for"
            )
        return Asked(tokens, request.max_tokens)


class Door(grpc.aio.ServerInterceptor):
    """Asks for a key, but of HealthCheck.

    Args:
      key: that ``authorization: Bearer KEY`` must bring; "": none.
    """

    def __init__(self, key: str):
        self._key = key.encode()

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        """The handler, or one that refuses."""
        handler = await continuation(handler_call_details)
        if not self._key or handler is None or not handler.response_streaming:
            return handler
        given = dict(handler_call_details.invocation_metadata or ()).get("authorization", "")
        scheme, _, given = given.partition(" ")
        right = hmac.compare_digest(given.strip().encode(), self._key)
        if scheme.lower() == "bearer" and right:
            return handler

        async def refuse(request: Any, context: Any) -> None:
            await context.abort(
                grpc.StatusCode.UNAUTHENTICATED,
                "the API key is missing or wrong: authorization: Bearer KEY",
            )

        return grpc.unary_stream_rpc_method_handler(refuse)


def run(
    engine: Engine,
    address: str,
    limits: Limits,
    max_queue: int,
    key: str,
    started: Callable[[], None],
) -> int:
    """Serve until SIGTERM or SIGINT; the exit status.

    Args:
      engine: warmed up.
      address: HOST:PORT.
      limits: of which ``body_bytes`` and ``drain_seconds`` count.
      max_queue: requests that wait.
      key: that requests must bring; "": none.
      started: called once it answers.

    Raises:
      ConfigError: the address is taken.
      RunError: the engine gave up.
    """
    return asyncio.run(_run(engine, address, limits, max_queue, key, started))


async def _run(
    engine: Engine,
    address: str,
    limits: Limits,
    max_queue: int,
    key: str,
    started: Callable[[], None],
) -> int:
    loop, ended, came = asyncio.get_running_loop(), asyncio.Event(), list[int]()
    errors: list[BaseException] = []
    server = grpc.aio.server(
        interceptors=[Door(key)],
        # Two servers on one port would answer by turns.
        options=[
            ("grpc.so_reuseport", 0),
            ("grpc.max_receive_message_length", limits.body_bytes),
        ],
    )
    try:
        server.add_insecure_port(address)
    except RuntimeError as error:
        raise ConfigError(f"{address}: {error}; another port, or 0 for a free one") from None

    def failed(error: BaseException) -> None:
        errors.append(error)
        loop.call_soon_threadsafe(ended.set)

    driver = Driver(engine, max_queue, failed)
    service = Orchestrator(driver, engine)
    jetstream_pb2_grpc.add_OrchestratorServicer_to_server(service, server)

    def stop(number: int) -> None:
        if signal.SIGINT in came and number == signal.SIGINT:
            os._exit(130)  # a second Ctrl-C does not wait
        came.append(number)
        leave_after(limits.drain_seconds + GONE)
        ended.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop, number)
    await server.start()
    started()
    await ended.wait()
    service.draining = True
    if errors:
        leave_after(GONE)
    await server.stop(0 if errors else limits.drain_seconds)
    await asyncio.to_thread(driver.stop)
    if errors:
        raise RunError(f"the engine failed: {errors[0]}")
    return 130 if signal.SIGINT in came else 0
