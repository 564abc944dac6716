"""Validation of the keys of episodes: environments, tools and agents beside other keys."""

from collections.abc import Mapping

from ml_collections import ConfigDict

from hjax.agents.agent_settings import agent_of
from hjax.algorithms import ALGORITHMS, Algorithm
from hjax.data.tasks import Task
from hjax.errors import ConfigError
from hjax.roles import ROLLOUT
from hjax.run.episode_rollout import environment_of
from hjax.sharding.layout import RoleLayouts


def check_episodes(
    config: ConfigDict,
    algorithm: type[Algorithm],
    task: Task | None,
    layouts: Mapping[str, RoleLayouts],
) -> None:
    """Raise ConfigError for what plays episodes, of an algorithm that does not, or beside keys that
    it excludes."""
    if config.agent.verifier and not agent_of(config.agent):
        raise ConfigError(
            f"config.agent.verifier={config.agent.verifier}: it scores what the program of "
            "agent.command leaves, and there is none; set that, or leave it out"
        )
    if not algorithm.generates:
        check_nothing_plays(config, algorithm)
    elif name := environment_of(config, task):
        if agent_of(config.agent):
            check_agent(config)
        elif config.environment.tools:
            name = check_tools(config, task)
        check_environment(config, algorithm, layouts, name)


def check_agent(config: ConfigDict) -> None:
    """Raise ConfigError for an agent beside another, or beside what plays episodes already."""
    section, environment = config.agent, config.environment
    if section.function and section.command:
        raise ConfigError(
            f"config.agent.command={section.command}: config.agent.function={section.function} is "
            "the agent already; keep one"
        )
    if section.function and section.verifier:
        raise ConfigError(
            f"config.agent.verifier={section.verifier}: it is of agent.command; a function returns "
            "its reward itself"
        )
    if section.function and (section.readable or not section.confined):
        key = "readable" if section.readable else "confined"
        raise ConfigError(
            f"config.agent.{key}={section[key]}: it is of agent.command; a function is your code, "
            "with your rights"
        )
    for key in ("function", "tools"):
        if environment[key]:
            raise ConfigError(
                f"config.environment.{key}={environment[key]}: episodes are played by the agent "
                f"{agent_of(section)} already; keep one"
            )


def check_tools(config: ConfigDict, task: Task | None) -> str:
    """What a run with tools is called in messages.

    Raises:
      ConfigError: something else plays the episodes, or the prompts are no chats.
    """
    name = f"environment.tools={config.environment.tools}"
    if config.environment.function:
        raise ConfigError(
            f"config.{name}: episodes are played by {config.environment.function} already; keep one"
        )
    if task is not None:
        raise ConfigError(
            f"config.{name}: prompts of the built-in task {config.data.task} are no chats; give "
            "data.path=FILE"
        )
    return name


def check_environment(
    config: ConfigDict,
    algorithm: type[Algorithm],
    layouts: Mapping[str, RoleLayouts],
    environment: str,
) -> None:
    """Raise ConfigError for what does not go together with playing an environment."""
    if not algorithm.plays_environments:
        raise ConfigError(
            f"{algorithm.__name__} learns from single responses, and the environment {environment} "
            f"is played over several turns; use one of {_players()}, or set plays_environments = "
            "True in a class of yours whose learn takes the rows of episodes (docs/agents.md)"
        )
    for key in ("extra_samples", "speculative_tokens", "partial_tokens"):
        if config.rollout[key]:
            raise ConfigError(
                f"config.rollout.{key}={config.rollout[key]} is of single responses, and the "
                f"environment {environment} is played over several turns; use 0"
            )
    if config.reward.while_generating:
        raise ConfigError(
            "config.reward.while_generating=True is of single responses, and the environment "
            f"{environment} is played over several turns; leave it out"
        )
    if config.environment.tools and config.reward.path:
        raise ConfigError(
            f"config.reward.path={config.reward.path}: a reward model reads single responses, and "
            "with environment.tools a function scores the last turn; set reward.function"
        )
    for key in () if config.environment.tools else ("function", "path"):
        if config.reward[key]:
            raise ConfigError(
                f"config.reward.{key}={config.reward[key]}: the environment {environment} rewards "
                "its episodes, and nothing is added to that; reward turns in its Step(reward=...)"
            )
    for role, layout in layouts.items():
        if role in ("actor", ROLLOUT) and layout.generate.shard_count("layers") > 1:
            raise ConfigError(
                f"layout.{role}.generate.pipe={layout.generate.shard_count('layers')}: turns of "
                "episodes are not generated in pipeline stages; use tensor or data instead"
            )


def check_nothing_plays(config: ConfigDict, algorithm: type[Algorithm]) -> None:
    """Raise ConfigError for what would play episodes where the algorithm answers no prompts. Tools
    are of its conversations too."""
    named = {"environment.function": config.environment.function}
    named |= {f"agent.{key}": config.agent[key] for key in ("function", "command")}
    for key, value in named.items():
        if value:
            raise ConfigError(
                f"config.{key}={value}: {algorithm.__name__} learns from examples and plays no "
                f"episodes; leave it out, or use one of {_players()}"
            )


def _players() -> str:
    return ", ".join(name for name, cls in ALGORITHMS.items() if cls.plays_environments)
