"""Rollouts in an environment: the actor plays an episode for each sample of a step's prompts.

The environments' processes belong to the controller, so each has one owner however many processes
the roles have.
"""

from __future__ import annotations

import collections
import functools
import logging
import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from ml_collections import ConfigDict

from hjax.agents.agent_settings import agent_of, record_of, settings_of
from hjax.batches import NO_EPISODE, repeat_columns
from hjax.controller.timeline import Timeline
from hjax.data.read_options import ReadOptions
from hjax.data.tasks import Task
from hjax.data.tokenizer import Tokenizer
from hjax.environments.episode import (
    DrawnTurn,
    Episode,
    EpisodeLimits,
    EpisodePlayer,
    TurnRequest,
    episode_seed,
    episode_tasks,
)
from hjax.environments.episode_batch import episode_batch
from hjax.environments.episode_pool import EpisodePool
from hjax.environments.episode_text import ObservationEncoder
from hjax.environments.tool_environment import TOOL_ENVIRONMENT, tool_options
from hjax.errors import ConfigError, RunError
from hjax.rollout.generator import bucket_length
from hjax.sandbox.sandbox_settings import SandboxSettings

_LOG = logging.getLogger(__name__)
# Column of the batch with an episode's return, None where the environment failed.
RETURN_COLUMN = "episode_return"
# Where episodes have several rows: room for so many times the rows that there are, since a batch of
# more rows than any before compiles all programs that read it again.
ROW_MARGIN = 1.5


def environment_of(config: ConfigDict, task: Task | None) -> str:
    """What plays a run's episodes: its agent, its environment, or its task's; empty: nothing."""
    if agent := agent_of(config.agent):
        return agent
    if config.environment.tools:
        return TOOL_ENVIRONMENT
    return config.environment.function or (task.environment if task is not None else "")


def episode_return(
    prompts: Sequence[Any], responses: Sequence[Any], **columns: Sequence[Any]
) -> Sequence[float | None]:
    """The reward function of runs with an environment: what that has given in all turns."""
    return columns[RETURN_COLUMN]


class EpisodeRollout:
    """Plays the episodes of a run.

    Args:
      config: of the run.
      task: the built-in task, or None.
      tokenizer: of the actor.
      prompt_length: tokens of the longest prompt.
      as_ready: whether turns are drawn in the order in which environments answer.
      timeline: receives the times during which all of the policy waits for environments.
      watch: called with the ``SessionCounts`` of an agent's sessions as they go on.

    Attributes:
      batch_rows: fewest rows of the next batch that is learned from, those of the last; 0: episodes
        have had one row each.

    Raises:
      ConfigError: no tokenizer, a template that cannot continue a chat, or an environment that
        cannot be imported.
    """

    def __init__(
        self,
        config: ConfigDict,
        task: Task | None,
        tokenizer: Tokenizer | None,
        prompt_length: int,
        *,
        as_ready: bool = False,
        timeline: Timeline,
        watch: Callable[[Any], None] = lambda counts: None,
    ):
        rollout, options = config.rollout, ReadOptions.from_config(config.data)
        name, agent = environment_of(config, task), agent_of(config.agent)
        if tokenizer is None:
            raise ConfigError(f"environment {name}: it speaks text, and there is no tokenizer")
        self._plays_tools = bool(config.environment.tools) and not agent
        self._encoder = ObservationEncoder(
            tokenizer,
            chat=bool(agent) or config.data.chat or self._plays_tools,
            system="" if agent else config.data.system,
            variables=dict(options.template),
        )
        self.limits = _limits(config, task, prompt_length)
        self._as_ready = as_ready
        self._waited = functools.partial(
            timeline.add, "environment", "environment", "wait", "environment"
        )
        self._watch = watch
        self._players = self._agents(config) if agent else self._environments(config, name)
        self._seed, self._samples = config.seed, rollout.samples
        # The same for evaluations, so that these share programs with training.
        self._rows = rollout.prompts * rollout.samples
        self._filler = tokenizer.eos_id or 0
        self._max_unscored = config.reward.max_unscored
        self.batch_rows = 0
        self._told: set[str] = set()  # faults of which the first was logged

    def play(
        self,
        actor: Any,
        prompts: Mapping[str, Any],
        greedy: bool = False,
        samples: int | None = None,
    ) -> dict[str, Any]:
        """Play an episode for each sample of each prompt; returns their batch.

        Args:
          actor: its worker group.
          prompts: as ``generate_sequences`` has them; the rows' columns are the tasks.
          greedy: one episode per prompt, of the most likely tokens.
          samples: episodes per prompt, if not the configured number.
        """
        count = 1 if greedy else samples or self._samples
        step, first = int(prompts.get("step", 0)), int(prompts.get("first", 0))
        columns = {name: list(values) for name, values in prompts.get("columns", {}).items()}
        texts = prompts.get("prompt_text") or [""] * len(prompts["prompts"])
        episodes = [
            Episode(
                number=first + i * count + sample,
                group=first // count + i,
                task=task,
                seed=episode_seed(self._seed, step, first // count + i),
            )
            for i, task in enumerate(episode_tasks(columns, texts))
            for sample in range(count)
        ]
        row_tokens = self.limits.prompt_tokens + self.limits.response_tokens
        try:
            begun = actor.begin_turns(max(self._rows, len(episodes)), row_tokens).result()
            draw = functools.partial(_draw, actor, step, greedy)
            player = self._players.make(draw, as_ready=self._as_ready, waited=self._waited)
            player.play(episodes)
        finally:
            actor.end_turns().result()
        self._check_faults(episodes)
        log_first_faults(episodes, self._told)
        learned = not greedy and samples is None
        batch = self._batch(episodes, prompts, count, first, learned)
        if begun["version"] is not None:
            batch["versions"] = batch["response_mask"] * np.int32(begun["version"])
        return batch

    def _batch(
        self,
        episodes: Sequence[Episode],
        prompts: Mapping[str, Any],
        count: int,
        first: int,
        learned: bool,
    ) -> dict[str, Any]:
        limit = self.limits.response_tokens
        longest = max((len(row.response) for each in episodes for row in each.rows), default=1)
        made = episode_batch(
            episodes,
            self.limits.prompt_tokens,
            bucket_length(longest, limit),
            filler=self._filler,
            least=self._fewest_rows(episodes) if learned else 0,
        )
        if learned and len(made["episode"]) > len(episodes):
            self.batch_rows = len(made["episode"])
        of_row = np.maximum(made["episode"] - first, 0) // count  # its prompt
        returns = {each.number: each.total_reward for each in episodes} | {NO_EPISODE: 0.0}
        given = [returns[number] for number in made["episode"].tolist()]
        made |= repeat_columns(prompts, of_row.tolist())
        if self._plays_tools:  # the run's reward function scores the last turn
            del made["token_rewards"]
            answers = {each.number: each.turns[-1].text if each.turns else "" for each in episodes}
            made["response_text"] = [answers.get(i, "") for i in made["episode"].tolist()]
            return made
        values = [None if np.isnan(value) else value for value in given]
        made["columns"][RETURN_COLUMN] = values
        return made

    def _check_faults(self, episodes: Sequence[Episode]) -> None:
        """Raise RunError if the environment has failed in too large a share of the episodes."""
        failed = [each for each in episodes if each.fault]
        share = len(failed) / len(episodes)
        if share <= self._max_unscored:
            return
        counts = collections.Counter(each.stop_reason for each in failed)
        causes = ", ".join(f"{reason} {count}" for reason, count in sorted(counts.items()))
        text = failed[0].fault.strip()
        raise RunError(
            f"the environment failed in {len(failed)} of {len(episodes)} episodes ({causes}); the "
            f"share {share:.3g} is above reward.max_unscored={self._max_unscored:g}: correct the "
            f"environment, or raise that key. The first failure: {text.splitlines()[-1]}",
            details=text if "\n" in text else "",
        )

    def _fewest_rows(self, episodes: Sequence[Episode]) -> int:
        """Rows of a batch of these episodes: as many as the last had, or more with a margin."""
        rows = sum(max(sum(bool(row.turns) for row in each.rows), 1) for each in episodes)
        if rows == len(episodes) or rows < self.batch_rows:
            return self.batch_rows
        return min(math.ceil(ROW_MARGIN * rows), self.limits.turns * len(episodes))

    def close(self) -> None:
        """End the environments' or the agent's processes."""
        self._players.close()

    def _environments(self, config: ConfigDict, name: str) -> _Players:
        section = config.environment
        settings = SandboxSettings.of_config(config.sandbox)
        tools = self._plays_tools
        pool = EpisodePool(
            name,
            tool_options(section.tools, self._encoder, sandbox=settings) if tools else {},
            processes=section.processes or min(os.cpu_count() or 1, 8),
            step_seconds=section.step_seconds,
            memory_bytes=int(section.memory_gib * 2**30),
            sandbox=settings,
        )
        player = functools.partial(EpisodePlayer, pool, self._encoder, self.limits)
        return _Players(player, pool.close)

    def _agents(self, config: ConfigDict) -> _Players:
        try:
            from hjax.agents.agent_runner import AgentRunner
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"config.agent: {agent_of(config.agent)}: {error.name} is not installed; the extra "
                "`serve` has what answers agents: pip install 'hjax[serve]'"
            ) from error
        settings = settings_of(config.agent, SandboxSettings.of_config(config.sandbox))
        runner = AgentRunner(settings, record_of(config.agent), self._encoder, self.limits)
        return _Players(functools.partial(runner.player, watch=self._watch), runner.close)


class _Players(NamedTuple):
    """What makes a player of a policy's, and ends what players share."""

    make: Callable[..., Any]
    close: Callable[[], None]


def _limits(config: ConfigDict, task: Task | None, prompt_length: int) -> EpisodeLimits:
    section, agent = config.environment, config.agent
    turns, turn_tokens = section.max_turns or 20, section.turn_tokens
    if agent_of(agent):
        turns, turn_tokens = agent.max_calls, agent.call_tokens
    elif task is not None and task.environment:
        turns = section.max_turns or task.max_turns
        turn_tokens = section.turn_tokens or task.turn_length
    return EpisodeLimits(
        turns=turns,
        turn_tokens=turn_tokens,
        prompt_tokens=prompt_length,
        response_tokens=config.rollout.max_response_length,
    )


def log_first_faults(episodes: Sequence[Episode], told: set[str]) -> None:
    """Say what the first fault of each kind was; metrics count them all.

    Args:
      told: kinds that were said before; those of the episodes are added.
    """
    for episode in episodes:
        if episode.fault and episode.stop_reason not in told:
            told.add(episode.stop_reason)
            _LOG.warning(
                "the environment failed (episode/stop_%s), and the episode is not learned from: "
                "%s; further ones are counted",
                episode.stop_reason,
                episode.fault.strip().splitlines()[-1],
            )


def _draw(
    actor: Any, step: int, greedy: bool, requests: Sequence[TurnRequest]
) -> Sequence[DrawnTurn]:
    drawn: Sequence[DrawnTurn] = actor.draw_turns(list(requests), step=step, greedy=greedy).result()
    return drawn
