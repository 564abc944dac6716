"""A server that speaks OpenEnv's messages, written by their description, not by the adapter."""

from __future__ import annotations

import contextlib
import http
import json
import threading
import time
from collections.abc import Iterator
from typing import Any

from websockets.datastructures import Headers
from websockets.http11 import Response
from websockets.sync.server import serve

GUESS = {
    "type": "object",
    "properties": {
        "metadata": {"type": "object"},
        "n": {"type": "integer"},
    },
    "required": ["n"],
}


class OpenEnvDouble:
    """Guess a number, the seed's last digit. The reset's key ``fault`` names what goes wrong at the
    second step.

    Attributes:
      resets: the data of each reset; ``actions``: of each step.
      sessions: that may be open at a time; ``open``: that are.
      hits: how often a number was guessed.
      action: the JSON schema of actions.
    """

    def __init__(self) -> None:
        self.resets: list[dict[str, Any]] = []
        self.actions: list[Any] = []
        self.sessions, self.open, self.hits, self.action = 8, 0, 0, GUESS
        self.lock = threading.Lock()
        self.address = ""

    def page(self, connection: Any, request: Any) -> Response | None:
        if request.path == "/ws":
            return None
        if request.path != "/schema":
            return connection.respond(http.HTTPStatus.NOT_FOUND, "no such page\n")
        schema = {"action": self.action, "observation": {}, "state": {}}
        return Response(200, "OK", Headers({"Connection": "close"}), json.dumps(schema).encode())

    def answer(self, socket: Any) -> None:
        with self.lock:
            self.open += 1
            full = self.open > self.sessions
        try:
            if full:
                return send(socket, "error", message="no room", code="CAPACITY_REACHED")
            self.play(socket)
        finally:
            with self.lock:
                self.open -= 1

    def play(self, socket: Any) -> None:
        secret, fault, steps = 0, "", 0
        for text in socket:
            message = json.loads(text)
            if message["type"] == "close":
                return
            if message["type"] == "reset":
                self.resets.append(message["data"])
                secret, fault = message["data"]["seed"] % 10, message["data"].get("fault", "")
                if fault == "reset":
                    send(socket, "error", message="no such level", code="EXECUTION_ERROR")
                    continue
                over = fault == "over"
                send(socket, "observation", observation={"text": "0-9"}, reward=None, done=over)
                continue
            steps += 1
            self.actions.append(message["data"])
            number = message["data"].get("n")
            if fault and steps == 2:
                if self.fail(socket, fault):
                    return
            elif type(number) is not int:
                about = [{"loc": ["n"], "msg": "Input should be a valid integer", "type": "int"}]
                code = "VALIDATION_ERROR"
                send(socket, "error", message="Invalid message", code=code, errors=about)
            else:
                hit = number == secret
                with self.lock:
                    self.hits += hit
                seen = "yes" if hit else "higher" if number < secret else "lower"
                reward = 1.0 if hit else None
                shown = {"text": seen, "metadata": {"secret": secret}}
                send(socket, "observation", observation=shown, reward=reward, done=hit)

    def fail(self, socket: Any, fault: str) -> bool:
        """Do what the fault says; True: the connection ends."""
        if fault == "vanish":
            return True
        if fault == "late":
            time.sleep(2.5)
        garbage = {
            "text": "<html>502</html>",
            "binary": b"\xff\xfe",
            "list": "[1]",
            "no data": '{"type": "observation"}',
            "no observation": '{"type": "observation", "data": {"reward": 1, "done": true}}',
            "no done": '{"type": "observation", "data": {"observation": {}, "reward": 1}}',
            "reward": '{"type": "observation", "data": {"observation": {}, "reward": "1", '
            '"done": true}}',
            "infinite": '{"type": "observation", "data": {"observation": {}, "reward": Infinity, '
            '"done": true}}',
            "large": '{"type": "observation", "data": {"observation": {"text": "'
            + "x" * (1 << 24)
            + '"}, "reward": 1, "done": true}}',
            "deep": "[" * 100_000,
            "state": '{"type": "state", "data": {}}',
        }
        if fault in garbage:
            socket.send(garbage[fault])
        if fault == "fails":
            send(socket, "error", message="division by zero", code="EXECUTION_ERROR")
        return False


def send(socket: Any, kind: str, **data: Any) -> None:
    socket.send(json.dumps({"type": kind, "data": data}))


@contextlib.contextmanager
def openenv_double() -> Iterator[OpenEnvDouble]:
    """A running server."""
    double = OpenEnvDouble()
    with serve(double.answer, "127.0.0.1", 0, process_request=double.page) as server:
        double.address = f"http://127.0.0.1:{server.socket.getsockname()[1]}"
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield double
