"""What rows of conversations ask for: tools, an environment, somebody who answers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ml_collections import ConfigDict

from hjax.data.dataset import Dataset
from hjax.data.tasks import Task
from hjax.data.template_continuation import template_continuation
from hjax.data.tokenizer import Tokenizer
from hjax.environments.tool_environment import settings_of_row, tools_of_row
from hjax.environments.tools import load_tools
from hjax.errors import DataError, short_repr
from hjax.run.episode_rollout import environment_of

# verl's columns, of a row or its ``extra_info``: what only an environment answers, and what tools
# answer too.
_OF_ENVIRONMENTS = ("interaction_kwargs",)
_OF_TOOLS = ("tools_kwargs", "need_tools_kwargs")
# verl's loop of a row without turns.
_SINGLE = "single_turn_agent"
_COLUMNS = (*_OF_ENVIRONMENTS, *_OF_TOOLS, "agent_name", "extra_info", "tools")


def check_turns(
    config: ConfigDict, task: Task | None, tokenizer: Tokenizer | None, *datasets: Dataset | None
) -> list[str]:
    """Check that a run that draws responses has what its rows ask for.

    Of an environment, all columns are handed to ``reset``. Else what a row asks for beside a prompt
    must be there: its tools, what they are made with, and nobody who answers.

    Returns:
      with tools, how the chat template continues conversations, in a sentence.

    Raises:
      DataError: a row that asks for what the run does not have.
    """
    if environment_of(config, task) and not config.environment.tools:
        return []
    tools = load_tools(config.environment.tools) if config.environment.tools else []
    for dataset in filter(None, datasets):
        check_asked(dataset, bool(tools))
        for number, row in _rows(dataset) if tools else ():
            try:
                settings_of_row(tools_of_row(tools, row)[0], row)
            except DataError as error:
                raise DataError(f"{dataset.location(number)}: {error}") from error
    if not tools or tokenizer is None:
        return []
    kind = template_continuation(tokenizer).kind
    return [f"tools: the chat template of tokenizer {tokenizer.name} is {kind}"]


def check_asked(
    dataset: Dataset,
    has_tools: bool,
    *,
    environment_key: str = "config.environment.function",
    tools_key: str = "config.environment.tools",
) -> None:
    """Check that no row asks for an environment, nor for tools where there are none.

    Args:
      dataset: the rows, which no environment plays.
      has_tools: whether there are tools.
      environment_key, tools_key: what to set for an environment and for tools, for messages.

    Raises:
      DataError: a row does.
    """
    for number, row in _rows(dataset):
        extra = row.get("extra_info")
        groups = {"": row, "extra_info.": extra if isinstance(extra, Mapping) else {}}
        asked = {prefix + name: group.get(name) for prefix, group in groups.items()
                 for name in (*_OF_ENVIRONMENTS, *_OF_TOOLS)}  # fmt: skip
        agent = row.get("agent_name")
        asked["agent_name"] = None if agent == _SINGLE else agent
        for name, value in asked.items():
            of_environments = name.endswith(_OF_ENVIRONMENTS)
            if not _asks(value) or (has_tools and not of_environments):
                continue
            what = "somebody is to answer each turn" if of_environments else "tools are to be there"
            tools = "" if of_environments else f"{tools_key}=FILE.py:NAME,..., or "
            raise DataError(
                f"{dataset.location(number)}: {name} is {short_repr(value)}: {what}; set {tools}"
                f"{environment_key}=FILE.py:CLASS, which is handed the row (docs/agents.md), or "
                "leave the column out"
            )


def _rows(dataset: Dataset) -> Iterator[tuple[int, dict[str, Any]]]:
    names = [name for name in _COLUMNS if name in dataset.columns]
    rows = zip(*(dataset.columns[name] for name in names), strict=True)
    return ((number, dict(zip(names, row, strict=True))) for number, row in enumerate(rows))


def _asks(value: Any) -> bool:
    """Whether a value says something; in parquet files absent fields are null."""
    if isinstance(value, Mapping):
        return any(_asks(each) for each in value.values())
    return value is not None and value is not False and value != ""
