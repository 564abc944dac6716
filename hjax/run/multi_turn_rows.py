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

# verl's columns, of a row or of its ``extra_info``, that only an environment answers, and those that
# tools answer too.
_OF_ENVIRONMENTS = ("interaction_kwargs",)
_OF_TOOLS = ("tools_kwargs", "need_tools_kwargs")
# verl's loop of a row without turns.
_SINGLE = "single_turn_agent"
_COLUMNS = (*_OF_ENVIRONMENTS, *_OF_TOOLS, "agent_name", "extra_info", "tools")


def check_multi_turn_rows(
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
        for number, row in _rows(dataset):
            try:
                _check_row(row, bool(tools))
                if tools:
                    settings_of_row(tools_of_row(tools, row)[0], row)
            except DataError as error:
                raise DataError(f"{dataset.location(number)}: {error}") from error
    if not tools or tokenizer is None:
        return []
    kind = template_continuation(tokenizer).kind
    return [f"tools: the chat template of tokenizer {tokenizer.name} is {kind}"]


def _rows(dataset: Dataset) -> Iterator[tuple[int, dict[str, Any]]]:
    names = [name for name in _COLUMNS if name in dataset.columns]
    rows = zip(*(dataset.columns[name] for name in names), strict=True)
    return ((number, dict(zip(names, row, strict=True))) for number, row in enumerate(rows))


def _check_row(row: Mapping[str, Any], has_tools: bool) -> None:
    """Check what a row asks for that nothing but an environment, or tools, can give."""
    extra = row.get("extra_info")
    groups = {"": row, "extra_info.": extra if isinstance(extra, Mapping) else {}}
    environment = "an environment, config.environment.function=FILE.py:CLASS, is handed the row"
    for prefix, group in groups.items():
        for name in _OF_ENVIRONMENTS:
            if _asks(group.get(name)):
                raise DataError(
                    f"{prefix}{name} is {short_repr(group[name])}: somebody is to answer each "
                    f"turn, and nobody does in this run; {environment} "
                    "(docs/agents.md), or leave the column out"
                )
        for name in _OF_TOOLS:
            if not has_tools and _asks(group.get(name)):
                raise DataError(
                    f"{prefix}{name} is {short_repr(group[name])}, and this run has no tools: set "
                    "config.environment.tools=FILE.py:NAME,... (docs/agents.md), or leave the "
                    "column out"
                )
    agent = row.get("agent_name")
    if not has_tools and agent not in (None, "", _SINGLE):
        raise DataError(
            f"agent_name is {short_repr(agent)}, and this run draws a single response: set "
            f"config.environment.tools=FILE.py:NAME,...; {environment}; or leave the column out"
        )


def _asks(value: Any) -> bool:
    """Whether a value says something; in parquet files absent fields are null."""
    if isinstance(value, Mapping):
        return any(_asks(each) for each in value.values())
    return value is not None and value is not False and value != ""
