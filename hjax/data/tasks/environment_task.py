"""Base class of the built-in tasks that are played over several turns."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from hjax.data.tasks.task import Task, option
from hjax.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class EnvironmentTask(Task):
    """A family of episodes: an environment, the rows that it is reset with, and demonstrations.

    A subclass says `environment`, `settings`, `max_turns`, `turn_length`,
    `observation_length`, `expert_actions` and `random_action`; its alphabet covers prompts, actions
    and observations. The environment gives the rewards.

    Attributes:
      noise: share of the demonstrations' actions that are drawn at random.
      partial: not used.
    """

    noise: float = option(0.0, 0.0, 1.0)

    # Defined by subclasses.

    @property
    def settings(self) -> dict[str, Any]:
        """Columns that tell the environment the task's options; each record has them."""
        return {}

    @property
    def observation_length(self) -> int:
        """Characters of the longest observation after a turn."""
        raise NotImplementedError

    def expert_actions(self, environment: Any, rng: np.random.Generator) -> Sequence[str]:
        """The next good actions where an episode stands, one or more; empty: no action helps."""
        raise NotImplementedError

    def random_action(self, environment: Any, rng: np.random.Generator) -> str:
        """An action of a demonstration's noise."""
        raise NotImplementedError

    # Common to all of them.

    @property
    def response_length(self) -> int:
        """Characters of all turns and observations of an episode, with an EOS for each turn."""
        return self.max_turns * (self.turn_length + self.observation_length)

    def make_environment(self) -> Any:
        """A new environment, a `hjax.Environment`."""
        module, _, name = self.environment.partition(":")
        return getattr(importlib.import_module(module), name)()

    def demonstration_actions(
        self, record: dict[str, Any], rng: np.random.Generator, seed: int
    ) -> list[str]:
        """The turns of a good episode, of which a share `noise` is drawn at random.

        With noise an episode may end without success: after `max_turns`, or where no action helps.

        Args:
          record: of `examples`.
          rng: for the noise, and the choice among equally good actions.
          seed: that the environment is reset with.
        """
        environment, actions, ahead = self.make_environment(), list[str](), list[str]()
        environment.reset(record, seed)
        while len(actions) < self.max_turns:
            if self.noise > 0 and rng.random() < self.noise:
                ahead = [self.random_action(environment, rng)]
            elif not ahead:
                ahead = list(self.expert_actions(environment, rng))
            if not ahead:
                break
            actions.append(ahead.pop(0))
            if environment.step(actions[-1]).done:
                break
        environment.close()
        return actions

    def demonstration(self, record: dict[str, Any], rng: np.random.Generator) -> str:
        raise ConfigError(self._played())

    def reward(
        self, prompts: Sequence[str], responses: Sequence[str], **columns: Sequence[Any]
    ) -> list[float]:
        raise ConfigError(self._played())

    def correct(
        self, prompts: Sequence[str], responses: Sequence[str], **columns: Sequence[Any]
    ) -> None:
        return None

    def _played(self) -> str:
        return (
            f"task {self.name} is played over several turns: {self.environment} gives its rewards, "
            "and no single response is right; docs/agents.md says where episodes are played"
        )
