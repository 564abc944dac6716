"""JetStream's protocol over gRPC, on the same generation service as OpenAI's.

Of google-jetstream only the messages are used. Its orchestrator and server are not: they listen on
every address of the machine and check no key.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hmac
import itertools
import os
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import grpc
from jetstream.core.proto import jetstream_pb2, jetstream_pb2_grpc

from hjax.data.limited_process import ComputationFailed
from hjax.data.response_text import ResponseText
from hjax.errors import ConfigError, RunError
from hjax.rollout.language_model import LanguageModel
from hjax.rollout.requests import QueueFull, Request, ResponseChunk
from hjax.rollout.sampling_params import SamplingParams
from hjax.rollout.service import GenerationService
from hjax.serving.limits import ServerLimits
from hjax.serving.shutdown import EXIT_SECONDS, exit_after, handle_signals

_RECEIVE_LIMIT = "grpc.max_receive_message_length"

_Content = jetstream_pb2.DecodeResponse.StreamContent


class Orchestrator(jetstream_pb2_grpc.OrchestratorServicer):
    """JetStream's calls.

    Args:
      model: that answers.
      service: of the model.
      sampling: of every request, as requests carry no options.
      seed: the n-th prompt's draws follow from it and n; None: a random one.
      on_failure: called when the engine fails.

    Attributes:
      draining: whether new requests are refused.
    """

    def __init__(
        self,
        model: LanguageModel,
        service: GenerationService,
        sampling: SamplingParams,
        seed: int | None,
        on_failure: Callable[[str], None],
    ):
        self._tokenizer, self._service, self._failed = model.tokenizer, service, on_failure
        self._sampling = dataclasses.replace(sampling, stop=model.eos_ids)
        self._seed = int.from_bytes(os.urandom(4), "little") if seed is None else seed
        self._numbers = itertools.count()
        self.draining = False

    async def HealthCheck(self, request: Any, context: Any) -> Any:  # noqa: N802
        """Whether the server answers."""
        return jetstream_pb2.HealthCheckResponse(is_live=True)

    async def Decode(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        """A response, streamed in chunks with its tokens and, if the prompt is text, its text."""
        if self.draining:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the server is being stopped")
        arrived: asyncio.Queue[ResponseChunk] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def hand_over(piece: ResponseChunk) -> None:
            loop.call_soon_threadsafe(arrived.put_nowait, piece)

        try:
            # Encoding a long text takes long; the event loop has other clients.
            tokens = await asyncio.to_thread(self._tokens, request)
            asked = Request(
                tuple(tokens), request.max_tokens, self._sampling, self._seed, next(self._numbers)
            )
            ticket = self._service.submit(asked, hand_over)
        except ComputationFailed as error:
            await context.abort(grpc.StatusCode.INTERNAL, str(error))
        except ConfigError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except QueueFull as error:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))
        except RunError as error:
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
        text = None
        if request.WhichOneof("content") == "text_content" and self._tokenizer is not None:
            text = ResponseText(self._tokenizer, tokens)
        finish = ""
        try:
            while not finish:
                piece = await arrived.get()
                finish = piece.finish
                if finish not in ("", "stop", "length"):
                    if finish != "cancelled":
                        self._failed(finish)
                    await context.abort(grpc.StatusCode.UNAVAILABLE, finish)
                ids = [token for token in piece.tokens if token not in self._sampling.stop]
                # In a thread, as a tokenizer's decoder may take long.
                said = "" if text is None else await asyncio.to_thread(_feed, text, ids, finish)
                yield jetstream_pb2.DecodeResponse(
                    stream_content=_Content(samples=[_Content.Sample(text=said, token_ids=ids)])
                )
        except ComputationFailed as error:
            await context.abort(grpc.StatusCode.INTERNAL, str(error))
        finally:
            ticket.cancel()

    def _tokens(self, request: Any) -> list[int]:
        """The prompt's token ids; ConfigError if there are none."""
        kind = request.WhichOneof("content")
        if kind is None:
            raise ConfigError("text_content or token_content is missing")
        if request.session_cache:
            raise ConfigError("session_cache: sessions are not built; leave it out")
        if kind == "token_content":
            return list(request.token_content.token_ids)
        if self._tokenizer is None:
            raise ConfigError("text_content: this model has no tokenizer; give token_content")
        return self._tokenizer.encode(request.text_content.text)


def _feed(text: ResponseText, tokens: Sequence[int], finish: str) -> str:
    """The text that tokens add."""
    return "".join(map(text.feed, tokens)) + (text.close() if finish else "")


class KeyInterceptor(grpc.aio.ServerInterceptor):
    """Checks the API key of all calls but HealthCheck.

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
    model: LanguageModel,
    service: GenerationService,
    sampling: SamplingParams,
    seed: int | None,
    address: str,
    limits: ServerLimits,
    key: str,
    started: Callable[[], None],
) -> int:
    """Serve until SIGTERM or SIGINT; the exit status.

    Args:
      model, service, sampling, seed: as in ``Orchestrator``.
      address: HOST:PORT.
      limits: ``body_bytes`` and ``drain_seconds`` are used.
      key: the API key that requests must bring; "": none.
      started: called once the server answers.

    Raises:
      ConfigError: the address is taken.
      RunError: the engine failed.
    """

    async def serve() -> int:
        ended, errors = asyncio.Event(), list[str]()
        server = grpc.aio.server(
            interceptors=[KeyInterceptor(key)],
            # Without SO_REUSEPORT: two servers on one port would take turns.
            options=[("grpc.so_reuseport", 0), (_RECEIVE_LIMIT, limits.body_bytes)],
        )
        try:
            server.add_insecure_port(address)
        except RuntimeError as error:
            raise ConfigError(f"{address}: {error}; another port, or 0 for a free one") from None

        def on_failure(error: str) -> None:
            errors.append(error)
            ended.set()

        orchestrator = Orchestrator(model, service, sampling, seed, on_failure)
        jetstream_pb2_grpc.add_OrchestratorServicer_to_server(orchestrator, server)

        status = handle_signals(ended.set, limits.drain_seconds)
        await server.start()
        started()
        await ended.wait()
        orchestrator.draining = True
        if errors:
            exit_after(EXIT_SECONDS)
        await server.stop(0 if errors else limits.drain_seconds)
        if errors:
            raise RunError(f"the engine failed: {errors[0].removeprefix('error: ')}")
        return status()

    try:
        return asyncio.run(serve())
    finally:
        service.close(0)
