"""What an agent is, and how its sessions are recorded: the config section ``agent``."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from hjax.agents.call_tree import AGENT
from hjax.settings.agent_keys import NO_REWARD
from hjax.user_code import load_object

# Whether a call is learned from, by its record.
TrainCall = Callable[[Mapping[str, Any]], bool]


@dataclasses.dataclass(frozen=True)
class AgentSettings:
    """What runs in each session.

    Attributes:
      function: ``path.py:name``, see ``load_agent``.
      seconds: deadline of a session.
      processes: over which sessions are shared out.
      memory_bytes: limit of each process's data; 0: none.
    """

    function: str = ""
    seconds: float = 1800.0
    processes: int = 1
    memory_bytes: int = 0


@dataclasses.dataclass(frozen=True)
class RecordSettings:
    """How sessions are recorded.

    Attributes:
      history, echo: see ``CallTree``.
      train_call: which calls are learned from: ``agent``, ``all``, or ``path.py:name`` of a
        function of a call's record.
      timeout_reward: of a session that is late; None: it is not learned from.
      concurrent: sessions that are open at a time; 0: all.
    """

    history: str = "sampled"
    echo: str = "exact"
    train_call: str = "agent"
    timeout_reward: float | None = None
    concurrent: int = 0

    def trains(self) -> TrainCall:
        """Whether a call is learned from."""
        if self.train_call == "all":
            return lambda call: True
        if self.train_call == "agent":
            return lambda call: bool(call["label"] == AGENT)
        function = load_object(self.train_call, "agent.train_call")
        return lambda call: bool(function(call))


def agent_of(section: Mapping[str, Any]) -> str:
    """The agent of the config section ``agent``; empty: none."""
    return str(section["function"])


def settings_of(section: Mapping[str, Any]) -> tuple[AgentSettings, RecordSettings]:
    """What runs, and how it is recorded, of the config section ``agent``."""
    late = section["timeout_reward"]
    settings = AgentSettings(
        function=section["function"],
        seconds=section["seconds"],
        processes=section["processes"],
        memory_bytes=int(section["memory_gib"] * 2**30),
    )
    record = RecordSettings(
        history=section["history"],
        echo=section["echo"],
        train_call=section["train_call"],
        timeout_reward=None if late == NO_REWARD else float(late),
        concurrent=section["concurrent"],
    )
    return settings, record
