"""A server in this process over a service that draws what a test says, as fast as it says."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import httpx
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from hjax.data.tokenizer import Tokenizer
from hjax.errors import ConfigError, RunError
from hjax.rollout.constrained_decoding import ConstraintCompiler
from hjax.rollout.requests import QueueFull, Request, ResponseChunk
from hjax.serving.address import address_of, bind
from hjax.serving.limits import ServerLimits
from hjax.serving.reload import WeightReload
from hjax.serving.served_model import ServedModel
from hjax.serving.server import Server

END = "<|im_end|>"
TEMPLATE = (
    "{% if tools %}<tools>{{ tools | tojson }}</tools>\n"
    '<tool_call>{"name": ..., "arguments": ...}</tool_call>\n{% endif %}'
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>"
    "{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_tokenizer(template: str | None = TEMPLATE) -> Tokenizer:
    """A token per byte of UTF-8, the byte's value, and two special ones: 256 and 257, the end."""
    # GPT-2's names of the bytes: printable ones their own, the others from U+0100 on.
    own = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in own]
    names = {byte: chr(byte) for byte in own} | {b: chr(256 + i) for i, b in enumerate(others)}
    backend = tokenizers.Tokenizer(
        models.BPE({names[byte]: byte for byte in range(256)}, merges=[])
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|im_start|>", END])
    config = {"eos_token": END, "add_bos_token": False}
    templates = {} if template is None else {"default": template}
    return Tokenizer(backend, config, name="bytes", chat_templates=templates)


# One client for all tests, as each takes long to make; no connection outlives its request.
HTTP = httpx.Client(verify=False, timeout=60, limits=httpx.Limits(max_keepalive_connections=0))


def wait_until(true: Callable[[], bool], seconds: float = 20.0) -> None:
    """Wait for something to become true in another thread."""
    late = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < late, "it never became true"
        time.sleep(0.005)


def answers(url: str) -> bool:
    """Whether a server is there and well."""
    try:
        return HTTP.get(f"{url}/health").status_code == 200
    except httpx.TransportError:
        return False


def connected(url: str) -> socket.socket:
    address = urllib.parse.urlsplit(url)
    found = socket.create_connection((address.hostname, address.port), timeout=20)
    return found


def heard(connection: socket.socket, end: bytes) -> bytes:
    """What the server says, up to a text."""
    said = b""
    while end not in said:
        part = connection.recv(65536)
        assert part, said
        said += part
    return said


def closed(connection: socket.socket) -> bool:
    """Whether the other side ends the connection; what it still says is read."""
    try:
        while connection.recv(65536):
            pass
    except ConnectionResetError:
        return True
    return True


EOS = 257
Script = Callable[[Request], Sequence[int]]


class Ticket:
    cached_tokens = 3  # tokens of any prompt that are known

    def __init__(self) -> None:
        self.cancelled = threading.Event()

    def cancel(self) -> None:
        self.cancelled.set()


class Scripted:
    """A service that draws what a script says; a thread for each response.

    Args:
      script: the tokens after a request's prompt.
      piece: tokens of a piece.
      slots: responses at a time; more wait, `max_queue` of them at most.
      pause: between two pieces, in seconds.

    Attributes:
      requests: all that came.
      cancelled: the requests that were cancelled before their end.
      gate: nothing is drawn while it is not set.
    """

    def __init__(
        self,
        script: Script,
        piece: int = 3,
        slots: int = 64,
        max_queue: int = 64,
        pause: float = 0.0,
        max_tokens: int = 4096,
    ):
        self.max_tokens = max_tokens
        self.requests: list[Request] = []
        self.cancelled: list[Request] = []
        self.gate = threading.Event()
        self.gate.set()
        self.drawn = 0
        self._script, self._piece, self._pause = script, piece, pause
        self._slots, self._max_queue = slots, max_queue
        self._running = 0
        self._changed = threading.Condition()
        self._closed = False
        self._tickets: list[Ticket] = []

    def reopen(self) -> None:
        """Take requests again."""
        self._closed = False

    def prepare(self, request: Request) -> Any:
        matchers = ConstraintCompiler(byte_tokenizer(), 260)
        return matchers.matcher(request.constraint, request.options, request.prompt)

    def submit(
        self, request: Request, on_piece: Callable[[ResponseChunk], None], matcher: Any = None
    ) -> Any:
        if self._closed:
            raise RunError("the service is closed")
        if 13 in request.options.stop:
            raise ConfigError("stop token 13: no stop_token_ids has it here")
        with self._changed:
            if self._running >= self._slots + self._max_queue:
                raise QueueFull(f"{self._max_queue} responses wait already; come again")
            self._running += 1
        self.requests.append(request)
        ticket = Ticket()
        self._tickets.append(ticket)
        arguments = request, on_piece, ticket
        threading.Thread(target=self._draw, args=arguments, daemon=True).start()
        return ticket

    def _draw(
        self, request: Request, on_piece: Callable[[ResponseChunk], None], ticket: Ticket
    ) -> None:
        tokens = list(self._script(request))[: request.max_tokens]
        ended = bool(tokens) and tokens[-1] in request.options.stop
        for at in range(0, len(tokens), self._piece):
            while not self.gate.wait(0.005) and not ticket.cancelled.is_set():
                pass
            if ticket.cancelled.wait(self._pause) if self._pause else ticket.cancelled.is_set():
                self.cancelled.append(request)
                on_piece(ResponseChunk(finish="cancelled"))
                break
            part = tuple(tokens[at : at + self._piece])
            self.drawn += len(part)
            last = at + self._piece >= len(tokens)
            finish = ("stop" if ended else "length") if last else ""
            on_piece(ResponseChunk(part, tuple(-token / 256 for token in part), finish=finish))
        else:
            if not tokens:
                on_piece(ResponseChunk(finish="error: the script is empty"))
        with self._changed:
            self._running -= 1
            self._changed.notify_all()

    def stats(self) -> dict[str, float]:
        prompts = float(sum(len(request.prompt) for request in self.requests))
        waiting = max(self._running - self._slots, 0)
        return {
            "running": float(self._running - waiting),
            "waiting": float(waiting),
            "slots": float(self._slots),
            "generated_tokens": float(self.drawn),
            "prompt_tokens": prompts,
            "cached_tokens": 0.0,
            "kept_tokens": 0.0,
            "kept_room": 0.0,
            "guessed_tokens": 0.0,
            "right_tokens": 0.0,
        }

    def close(self, seconds: float = 10.0) -> None:
        self._closed = True
        with self._changed:
            if self._changed.wait_for(lambda: not self._running, seconds):
                return
        for ticket in self._tickets:
            ticket.cancel()


@contextlib.contextmanager
def served(
    service: Any,
    limits: ServerLimits = ServerLimits(),
    key: str = "",
    tokenizer: Tokenizer | None = None,
    reload: WeightReload | None = None,
    model: ServedModel | None = None,
    send_buffer: int = 0,
) -> Iterator[tuple[str, Server, asyncio.AbstractEventLoop]]:
    """A server on a free port, its URL and its loop; stopped at the end.

    With ``send_buffer`` the kernel keeps so many bytes that a client has not read, else megabytes.
    """
    bound = bind("127.0.0.1", 0)
    if send_buffer:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
    url = f"http://{address_of(bound)}"
    up, loops, servers = threading.Event(), [], []

    async def serve() -> None:
        loops.append(asyncio.get_running_loop())
        about = model or ServedModel("bytes", service, tokenizer, 260, (EOS,))
        servers.append(Server(about, bound, limits, key, up.set, reload))
        await servers[0].serve()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    try:
        assert up.wait(20)
        yield url, servers[0], loops[0]
    finally:
        if thread.is_alive():
            loops[0].call_soon_threadsafe(servers[0].stop)
        thread.join(30)
        assert not thread.is_alive()
