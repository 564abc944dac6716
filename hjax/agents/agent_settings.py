"""What an agent is, and how its sessions are recorded: the config section ``agent``."""

from __future__ import annotations

import dataclasses
import importlib.util
import shlex
from collections.abc import Callable, Mapping
from typing import Any

from hjax.agents.agent_process import load_agent
from hjax.agents.call_tree import AGENT
from hjax.agents.command_agent import (
    VERIFY_SECONDS,
    CommandAgent,
    ProgramSettings,
    command_words,
)
from hjax.errors import ConfigError
from hjax.sandbox.sandbox_settings import THIS_MACHINE, SandboxSettings
from hjax.settings.agent_keys import AGENT_KEYS, NO_REWARD
from hjax.user_code import load_object
from hjax.user_input import user_path

# Columns that a program is not given, by default.
HIDDEN = tuple(AGENT_KEYS["hidden"].default.split(","))
# Whether a call is learned from, by its record.
TrainCall = Callable[[Mapping[str, Any]], bool]


@dataclasses.dataclass(frozen=True)
class AgentSettings:
    """What runs in each session.

    Attributes:
      function: ``path.py:name``, see ``load_agent``; empty: ``command``.
      command, verifier, sandbox, confined, readable, hidden: of ``ProgramSettings``.
      seconds: deadline of a session.
      processes: over which sessions are shared out.
      memory_bytes: limit of each process's data; 0: none.
    """

    function: str = ""
    command: str = ""
    verifier: str = ""
    sandbox: SandboxSettings = THIS_MACHINE
    confined: bool = True
    readable: tuple[str, ...] = ()
    hidden: tuple[str, ...] = HIDDEN
    seconds: float = 1800.0
    processes: int = 1
    memory_bytes: int = 0

    def check(self) -> None:
        """Raise ConfigError for an agent that cannot be loaded."""
        if self.function:
            load_agent(self.function)
        else:
            CommandAgent(self.program())

    def program(self) -> ProgramSettings:
        """The program, with paths that hold in any folder."""
        return ProgramSettings(
            command=shlex.join(command_words(self.command)),
            verifier=self.verifier,
            sandbox=self.sandbox,
            confined=self.confined,
            readable=tuple(map(_whole_path, self.readable)),
            hidden=self.hidden,
            seconds=self.seconds,
            memory_bytes=self.memory_bytes,
        )

    @property
    def deadline(self) -> float:
        """Seconds of a session with its verifier."""
        return self.seconds + (0.0 if self.function else VERIFY_SECONDS)


@dataclasses.dataclass(frozen=True)
class RecordSettings:
    """How sessions are recorded.

    Attributes:
      history, echo: see ``CallTree``.
      train_call: which calls are learned from: ``agent``, ``all``, or ``path.py:name`` of a
        function of a call's record.
      constrained: whether what a call asks of its answer's form holds where the run draws.
      timeout_reward: of a session that is late; None: it is not learned from.
      concurrent: sessions that are open at a time; 0: all.
      wait_seconds: that calls wait for those of other sessions, after the last that came.
    """

    history: str = "sampled"
    echo: str = "exact"
    train_call: str = "agent"
    constrained: bool = False
    timeout_reward: float | None = None
    concurrent: int = 0
    wait_seconds: float = 10.0

    def check(self) -> None:
        """Raise ConfigError for a function that cannot be loaded, or constraints without what
        compiles them."""
        self.trains()
        if self.constrained and importlib.util.find_spec("llguidance") is None:
            raise ConfigError(
                "agent.constrained=True: llguidance is not installed, which constraints need; the "
                "extra `constraints` has it: pip install 'hjax[constraints]'"
            )

    def trains(self) -> TrainCall:
        """Whether a call is learned from."""
        if self.train_call == "all":
            return lambda call: True
        if self.train_call == "agent":
            return lambda call: bool(call["label"] == AGENT)
        function = load_object(self.train_call, "agent.train_call")
        return lambda call: bool(function(call))


def _whole_path(text: str) -> str:
    path = user_path(text, "agent.readable=")
    if not path.exists():
        raise ConfigError(f"agent.readable={text}: there is no such file or folder")
    return str(path.absolute())


def comma_separated(text: str) -> tuple[str, ...]:
    """The parts of a text between commas."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def agent_of(section: Mapping[str, Any]) -> str:
    """The agent of the config section ``agent``; empty: none."""
    return str(section["function"] or section["command"])


def settings_of(section: Mapping[str, Any], sandbox: SandboxSettings) -> AgentSettings:
    """What runs, of the config section ``agent``."""
    return AgentSettings(
        function=section["function"],
        command=section["command"],
        verifier=section["verifier"],
        sandbox=sandbox,
        confined=section["confined"],
        readable=comma_separated(section["readable"]),
        hidden=comma_separated(section["hidden"]),
        seconds=section["seconds"],
        processes=section["processes"],
        memory_bytes=int(section["memory_gib"] * 2**30),
    )


def record_of(section: Mapping[str, Any]) -> RecordSettings:
    """How sessions are recorded, of the config section ``agent``."""
    late = section["timeout_reward"]
    return RecordSettings(
        history=section["history"],
        echo=section["echo"],
        train_call=section["train_call"],
        constrained=section["constrained"],
        timeout_reward=None if late == NO_REWARD else float(late),
        concurrent=section["concurrent"],
        wait_seconds=section["wait_seconds"],
    )
