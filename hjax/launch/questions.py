"""What the commands that ask questions or play episodes take them from: --task and --data."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, Any

from hjax.config import data_path
from hjax.errors import ConfigError
from hjax.files import read_json
from hjax.launch.sampling_flags import ModelInfo, existing_file

if TYPE_CHECKING:
    from hjax.data.dataset import Dataset
    from hjax.data.tasks import Task

# Held-out prompts of a task without --limit: as many as a run evaluates on.
TASK_PROMPTS = 128


def task_names() -> str:
    """The names that --task may have."""
    from hjax.data.tasks.task import PACKAGES, TASKS

    return ", ".join([*TASKS, *(f"{package}:NAME" for package in PACKAGES)])


def find_task(text: str, model: str) -> Task:
    """The task of --task, with its options or those of the run that trained on it.

    Args:
      text: NAME, or NAME:OPTION=VALUE,...
      model: of --model, perhaps a workdir.

    Raises:
      ConfigError: no such task or option.
    """
    from hjax.data.tasks import get_task
    from hjax.data.tasks.task import split_options
    from hjax.models.base_checkpoints import split_checkpoint
    from hjax.models.weights import is_workdir

    name, settings = split_options(text)
    options: dict[str, Any] = {}
    if is_workdir(model):
        data = read_json(split_checkpoint(model)[0] / "config.json")["data"]
        if data["task"] == name and not data_path(data):
            options |= data["task_options"]
    for part in filter(None, settings.split(",")):
        key, equals, value = part.partition("=")
        if not equals:
            raise ConfigError(f"--task={text}: {part!r}; options are NAME:OPTION=VALUE,...")
        try:
            options[key] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            options[key] = value  # a string; the task validates it
    return get_task(name, **options)


def read_questions(
    args: Any, task: Task | None, info: ModelInfo, *, limit: int = 0, instruction: str = ""
) -> Dataset:
    """The rows of ``args.data``, or a task's held-out prompts.

    Args:
      limit: only so many; 0: all of a file, ``TASK_PROMPTS`` of a task.
      instruction: a line that is added to every prompt.

    Raises:
      ConfigError: no such file, or a task of a model that has no tokenizer.
    """
    from hjax.data.dataset import Dataset

    wording = info.wording(args.chat, instruction)
    if task is None:
        path = existing_file("data", args.data)
        options: dict[str, Any] = {"vocab_size": info.vocab_size, "format_prompt": wording}
        if getattr(args, "tools", ""):
            from hjax.data.read_options import ReadOptions
            from hjax.environments.tool_environment import tool_definitions

            tools = tool_definitions(args.tools, info.tokenizer, "--tools")
            options["options"] = ReadOptions(chat=True, tools=tools)
        found = Dataset.from_file(path, info.tokenizer, **options)
        return found.select(range(min(limit or len(found), len(found))))
    if info.tokenizer is None:
        raise ConfigError(
            f"--task={args.task} is text, and {info.path} has no tokenizer; give ids by --data"
        )
    largest = task.largest_count("eval")
    count = limit or TASK_PROMPTS
    count = count if largest is None else min(count, largest)
    if wording is None:
        return Dataset.from_task(task, "eval", args.seed, count, info.tokenizer)
    raise ConfigError("--chat and --instruction are for --data; a task has its own form")
