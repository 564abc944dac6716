"""Environments that a server of OpenEnv plays: JSON messages over a WebSocket, one per episode."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
import urllib.parse
import urllib.request
from collections.abc import Mapping
from typing import Any

from hjax.environments.adapted_environment import AdaptedEnvironment, adapter_package
from hjax.environments.environment import Observation, Step
from hjax.errors import ConfigError, DataError, RunError, one_line, short_repr

# Bytes of the largest message that is read.
LARGEST_MESSAGE = 1 << 24
# Seconds for which a server without a free session is asked again: one is free a little after its
# episode has ended.
BUSY_SECONDS = 2.0
# Schemes of addresses, and those of their WebSockets and of their pages.
_SCHEMES = {
    "http": ("ws", "http"),
    "https": ("wss", "https"),
    "ws": ("ws", "http"),
    "wss": ("wss", "https"),
}


class OpenEnvEnvironment(AdaptedEnvironment):
    """Plays an environment of an OpenEnv server, whose address is ``http://HOST:PORT``.

    An episode is a connection to its ``/ws``. The row's ``prompt`` is shown above the first
    observation. All its other columns are keys of the reset, except those that are null; without a
    column ``seed`` the episode's seed is.

    A turn that is a JSON object is the action. Where an action has one field, or one that is
    required, and this is text or a number (by the server's ``/schema``), a turn may also be its
    value. A turn that is neither, and one that the server calls invalid, is not valid: the policy
    reads why. An observation of one text field is that text, another is JSON, without its
    ``metadata``. A null reward is 0.

    A server that cannot be reached, has no session free, is late, fails or answers something else
    raises RunError: that episode has no reward.
    """

    _socket: Any = None

    @classmethod
    def check_target(cls) -> None:
        adapter_package("websockets.sync.client", "websockets")
        parts = urllib.parse.urlsplit(cls.target)
        if parts.scheme not in _SCHEMES or not parts.hostname or parts.query or parts.fragment:
            raise ConfigError(
                f"the address {cls.target!r} must be http://HOST:PORT, or begin with https://, "
                "ws:// or wss://"
            )

    def reset(self, task: Mapping[str, Any], seed: int) -> Observation:
        self.close()
        self._begin_call()
        self._actions = self._read_schema()
        columns = {name: _json_value(name, value) for name, value in task.items()}
        keys = {name: value for name, value in columns.items() if value is not None}
        keys = {"seed": seed} | keys
        keys.pop("prompt", None)
        answer = self._first_answer({"type": "reset", "data": keys})
        if answer["type"] == "error":
            raise self._failure(f"refuses a reset with {short_repr(keys, 200)}: {_error(answer)}")
        seen, self._first_reward, done = self._observed(answer)
        if done:
            raise self._failure(f"has ended the episode at its reset: {short_repr(seen, 200)}")
        return Observation(self.first_text(task, self.observation_text(seen)))

    def step(self, action: str) -> Step:
        self._begin_call()
        read = self._actions.read(action)
        if read is None:
            return Step(Observation(f"This is no action. {self._actions}"), valid=False)
        answer = self._ask({"type": "step", "data": read})
        if answer["type"] == "error":
            if answer["data"].get("code") == "VALIDATION_ERROR":
                return Step(Observation(_error(answer)), valid=False)
            raise self._failure(f"fails at {short_repr(read, 200)}: {_error(answer)}")
        seen, reward, done = self._observed(answer)
        reward, self._first_reward = reward + self._first_reward, 0.0
        return Step(Observation(self.observation_text(seen)), reward=reward, done=done)

    def close(self) -> None:
        socket, self._socket = self._socket, None
        if socket is None:
            return
        try:
            socket.send(json.dumps({"type": "close"}))
        except (OSError, self._lost):  # it is gone already
            pass
        self._connection.close()

    def observation_text(self, observation: Mapping[str, Any]) -> str:
        """An observation as the policy reads it: of one text field that text, else JSON. Its
        ``metadata`` is for programs."""
        shown = {name: value for name, value in observation.items() if name != "metadata"}
        values = list(shown.values())
        if len(values) == 1 and isinstance(values[0], str):
            return values[0]
        return json.dumps(shown, ensure_ascii=False)

    def _failure(self, what: str) -> RunError:
        return RunError(f"the OpenEnv server {self.target} {what}")

    def _url(self, page: bool, path: str) -> str:
        parts = urllib.parse.urlsplit(self.target)
        return f"{_SCHEMES[parts.scheme][page]}://{parts.netloc}{parts.path.rstrip('/')}/{path}"

    def _read_schema(self) -> ActionSchema:
        """The form of actions; a server is asked once in a process."""
        url = self._url(True, "schema")
        if url not in _SCHEMAS:
            try:
                with urllib.request.urlopen(url, timeout=self._left()) as answer:
                    _SCHEMAS[url] = ActionSchema.of(json.loads(answer.read(LARGEST_MESSAGE)))
            except (OSError, ValueError, RecursionError, TypeError, AttributeError) as error:
                said = f"{type(error).__name__}: {one_line(error)}"
                raise self._failure(f"has no actions at {url}: {said}") from error
        return _SCHEMAS[url]

    def _first_answer(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to a connection's first message, once the server has a session free."""
        give_up = min(time.monotonic() + BUSY_SECONDS, self._deadline)
        wait = 0.05
        while True:
            self._connect()
            answer = self._ask(message)
            if answer["type"] != "error" or answer["data"].get("code") != "CAPACITY_REACHED":
                return answer
            self.close()
            if time.monotonic() + wait > give_up:
                raise self._failure(
                    f"has no session free ({_error(answer)}); each open episode needs one: start "
                    "it with a larger max_concurrent_envs, or play fewer episodes at a time"
                )
            time.sleep(wait)
            wait *= 2

    def _connect(self) -> None:
        from websockets.exceptions import WebSocketException
        from websockets.sync.client import connect

        self._lost, self._connection = WebSocketException, contextlib.ExitStack()
        try:
            opened = connect(
                self._url(False, "ws"),
                open_timeout=self._left(),
                ping_timeout=None,  # a server that is busy with a step answers no ping
                close_timeout=1.0,
                max_size=LARGEST_MESSAGE,
            )
            self._socket = self._connection.enter_context(opened)
        except (OSError, WebSocketException) as error:
            said = f"{type(error).__name__}: {one_line(error)}"
            raise self._failure(f"cannot be reached: {said}") from error

    def _ask(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Send a message and return its answer, an observation or an error."""
        try:
            with contextlib.suppress(self._lost):  # it may have said why it has ended
                self._socket.send(json.dumps(message))
            text = self._socket.recv(timeout=self._left())
        except TimeoutError:
            raise self._failure(f"has not answered in {self._seconds:g} s") from None
        except (OSError, self._lost) as error:
            said = f"{type(error).__name__}: {one_line(error)}"
            raise self._failure(f"has left the episode: {said}") from error
        answer = _json(text)
        known = isinstance(answer, dict) and answer.get("type") in ("observation", "error")
        if not known or not isinstance(answer.get("data"), dict):
            raise self._failure(f"has answered something else: {short_repr(text, 200)}")
        return dict(answer)

    def _observed(self, answer: Mapping[str, Any]) -> tuple[dict[str, Any], float, bool]:
        """The observation, the reward and whether the episode is over."""
        data = answer["data"]
        seen, reward, done = data.get("observation"), data.get("reward"), data.get("done")
        known = reward is None or isinstance(reward, int | float)
        if answer["type"] != "observation" or not isinstance(seen, dict) or not known:
            raise self._failure(f"has answered something else: {short_repr(data, 200)}")
        return seen, reward or 0.0, done


# What is known of servers, by the address of the page.
_SCHEMAS: dict[str, ActionSchema] = {}


@dataclasses.dataclass(frozen=True)
class ActionSchema:
    """Which turns are actions.

    Attributes:
      types: JSON types of an action's fields by name; empty where one has none of its own.
      required: the fields that an action must have.
    """

    types: Mapping[str, str]
    required: tuple[str, ...]

    @classmethod
    def of(cls, schema: Mapping[str, Any]) -> ActionSchema:
        """That of a server's ``/schema``."""
        action = schema["action"]
        fields = {n: f for n, f in action.get("properties", {}).items() if n != "metadata"}
        types = {name: str(field.get("type", "")) for name, field in fields.items()}
        return cls(types, tuple(name for name in action.get("required", ()) if name in types))

    @property
    def single(self) -> str:
        """The field whose value alone may be a turn; empty: none."""
        names = self.required if len(self.required) == 1 else tuple(self.types)
        plain = len(names) == 1 and self.types[names[0]] in ("string", "integer", "number")
        return names[0] if plain else ""

    def read(self, turn: str) -> dict[str, Any] | None:
        """The action that a turn says; None: it says none."""
        found, single = _json(turn), self.single
        if isinstance(found, dict) and (not single or single in found):
            return found
        kind = self.types.get(single)
        if kind == "string":
            return {single: turn}
        number = type(found) is int or (kind == "number" and type(found) is float)
        return {single: found} if kind and number else None

    def __str__(self) -> str:
        about = [
            f"{name} ({kind or 'any'}{', required' if name in self.required else ''})"
            for name, kind in self.types.items()
        ]
        fields = f" with {', '.join(about)}" if about else ""
        value = f", or the value of {self.single} alone" if self.single else ""
        return f"An action is a JSON object{fields}{value}."


def _json(text: str | bytes) -> Any:
    """The JSON value that a text is; None if it is none."""
    try:
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


def _json_value(name: str, value: Any) -> Any:
    """A row's value as JSON has it."""
    try:
        return json.loads(json.dumps(value, default=lambda array: array.tolist(), allow_nan=False))
    except (TypeError, ValueError, AttributeError, RecursionError) as error:
        raise DataError(
            f"{name} is {short_repr(value)}, and a reset takes JSON values; leave the column out"
        ) from error


def _error(answer: Mapping[str, Any]) -> str:
    """What an error says, with pydantic's errors of the fields."""
    data = answer["data"]
    fields = [each for each in data.get("errors") or () if isinstance(each, dict)]
    parts = [f"{'.'.join(map(str, each.get('loc') or ()))}: {each.get('msg')}" for each in fields]
    return "; ".join([f"{data.get('message') or 'no message'} ({data.get('code')})", *parts])
