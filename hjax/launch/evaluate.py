"""usage: python -m hjax.launch.evaluate --model=DIR|WORKDIR --data=FILE --reward=GRADER [--json]
       python -m hjax.launch.evaluate --model=DIR|WORKDIR --task=NAME[:OPTION=VALUE,...] [--json]

Answer questions and have the answers judged: mean reward; where there is right and wrong accuracy
and pass@k; where answers can be compared majority votes, maj@k. Each with its standard error over
questions.

  --model=DIR|WORKDIR   a workdir (its actor's newest checkpoint), a Hugging Face directory or name
  --family=PATH.py:NAME a class of yours that reads the model's family (docs/families.md)
  --data=FILE           questions, jsonl or parquet: `prompt` (text, chat messages or token ids) or
                        `question`, and the columns that the grader reads; .txt: a prompt per line
  --reward=GRADER       path.py:name, a reward function; or math: the number in \\boxed{{}} or
                        after ####, beside the column answer (docs/evaluate.md)
  --task=NAME           held-out prompts and verifier of a built-in task, with its options as
                        --task=sorting:length=4, or else those of the workdir's run:
                        {tasks}
  --samples=1           answers per question; k = 1, 2, 4, ... up to it
  --limit=N             only the first N questions (of a task {task_prompts} where it is not given)
  --instruction=TEXT    a line added to every question
  --output=FILE.jsonl   write a row per answer: question, sample, prompt, response, reward, right,
                        answer, tokens, truncated
  --max_new_tokens=N    length limit of an answer, in tokens ({length}, or what the model's
                        positions leave; of a task what it needs)
{sampling}\
  --timeout_seconds=60  for one call of the grader: --batch answers, or one question's if these
                        are more
  --json                print one line of JSON as the last line of the output
  --help                print this

exit status: 0 done; 1 failed (the grader too); 2 wrong input, nothing written; 130 stopped by
Ctrl-C
"""

from __future__ import annotations

import ast
import dataclasses
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hjax.errors import ConfigError, RunError
from hjax.files import json_line, read_json
from hjax.launch.command import answered, stopped_by_ctrl_c
from hjax.launch.process_exit import run_and_leave
from hjax.launch.sampling_flags import (
    ModelInfo,
    described,
    existing_file,
    options_of,
    read_flags,
    sampling_help,
)
from hjax.rules import above, at_least
from hjax.user_input import user_path

if TYPE_CHECKING:
    from hjax.data.dataset import Dataset
    from hjax.data.tasks import Task
    from hjax.rewards.graders import Grader
    from hjax.run.grading import GradedResponse

LENGTH = 256
# Held-out prompts of a task where --limit is not given: as many as a run evaluates with.
TASK_PROMPTS = 128


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""

    def text() -> str:
        from hjax.data.tasks import TASKS

        sampling = sampling_help(
            "logits are divided by it; 0 is greedy (0; 1 with several samples)"
        )
        sizes = {"task_prompts": TASK_PROMPTS, "length": LENGTH}
        return str(__doc__).format(sampling=sampling, tasks=", ".join(TASKS), **sizes)

    return stopped_by_ctrl_c(lambda: answered(arguments, text, _run))


def parse(arguments: Sequence[str]) -> Any:
    """Read the command line.

    Raises:
      ConfigError: a wrong flag or value.
    """
    rules = {"samples": at_least(1), "limit": at_least(0), "timeout_seconds": above(0)}
    texts = dict(data="", reward="", task="", instruction="", output="")
    own = read_flags(arguments, rules, samples=1, limit=0, timeout_seconds=60.0, **texts)
    if bool(own.data) == bool(own.task):
        raise ConfigError("give --data=FILE with --reward=GRADER, or --task=NAME; see --help")
    if own.data and not own.reward:
        raise ConfigError("--reward is missing: path.py:name, or math; see --help")
    if own.samples > 1 and own.temperature == 0:
        raise ConfigError(
            f"--temperature=0 gives the same answer {own.samples} times; set it above 0, or leave "
            "--samples out"
        )
    return own


def _run(arguments: Sequence[str]) -> int:
    own = parse(arguments)
    output = _new_file(own.output) if own.output else None
    data = existing_file("data", own.data) if own.data else None
    task = _task(own.task, own.model) if own.task else None
    grader = _grader(own, task)
    front = ModelInfo.read(own.model)
    options = options_of(own, front, temperature=0.0 if own.samples == 1 else 1.0)
    questions = _questions(own, data, task, front)
    if grader.check is not None:
        grader.check(questions.columns)
    from hjax.run.batched_generation import length_limit

    usual = (task.response_length if task is not None else None) or LENGTH
    limit = length_limit(questions, front.config, own.max_new_tokens, usual)
    options["max_new_tokens"] = limit
    began = time.monotonic()
    judged = _ask(own, front, questions, grader, options, output)
    seconds = time.monotonic() - began
    _report(own, task, grader, judged, options, seconds)
    return 0


def _new_file(name: str) -> Path:
    path = user_path(name, "--output=")
    if path.suffix != ".jsonl":
        raise ConfigError(f"--output={name}: its name must end in .jsonl")
    if path.exists():
        raise ConfigError(f"--output={name} is there already; name a new file")
    if not path.parent.is_dir():
        raise ConfigError(f"--output={name}: there is no directory {path.parent}")
    return path


def _task(text: str, model: str) -> Task:
    """The task that --task names, with its options or those of the run that trained on it."""
    from hjax.data.tasks import get_task
    from hjax.models.weights import is_workdir

    name, _, given = text.partition(":")
    options: dict[str, Any] = {}
    if is_workdir(model):
        data = read_json(Path(model) / "config.json")["data"]
        if data["task"] == name and not data["path"]:
            options |= data["task_options"]
    for part in filter(None, given.split(",")):
        key, equals, value = part.partition("=")
        if not equals:
            raise ConfigError(f"--task={text}: {part!r}; options are NAME:OPTION=VALUE,...")
        try:
            options[key] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            options[key] = value  # the task says what it may be
    return get_task(name, **options)


def _grader(own: Any, task: Task | None) -> Grader:
    from hjax.rewards.graders import load_grader, task_grader

    given = load_grader(own.reward, own.timeout_seconds, "--reward") if own.reward else None
    if task is not None:
        return task_grader(task, own.timeout_seconds, given)
    assert given is not None
    return given


def _questions(own: Any, data: Path | None, task: Task | None, front: ModelInfo) -> Dataset:
    from hjax.data.dataset import Dataset

    wording = front.wording(own.chat, own.instruction)
    if data is not None:
        options: dict[str, Any] = {"vocab_size": front.vocab_size, "format_prompt": wording}
        found = Dataset.from_file(data, front.tokenizer, **options)
        return found.select(range(min(own.limit or len(found), len(found))))
    assert task is not None
    if front.tokenizer is None:
        raise ConfigError(
            f"--task={own.task} is text, and {front.path} has no tokenizer; give ids by --data"
        )
    largest = task.largest_count("eval")
    count = own.limit or TASK_PROMPTS
    count = count if largest is None else min(count, largest)
    if wording is None:
        return Dataset.from_task(task, "eval", own.seed, count, front.tokenizer)
    raise ConfigError("--chat and --instruction are for --data; a task has its own form")


def _ask(
    own: Any,
    front: ModelInfo,
    questions: Dataset,
    grader: Grader,
    options: dict[str, Any],
    output: Path | None,
) -> list[GradedResponse]:
    from hjax.run.grading import ask
    from hjax.show.progress_bar import PartsDisplay

    model = front.load(own, own.copies)
    several = len(questions) * own.samples > own.batch and sys.stderr.isatty()
    with PartsDisplay("answering", several, sys.stderr) as progress:
        write = _writer(output, grader)
        samples, batch, seed = own.samples, own.batch, own.seed
        return ask(model, questions, grader, samples, batch, seed, progress, write, **options)


def _writer(output: Path | None, grader: Grader) -> Callable[[Sequence[GradedResponse]], None]:
    """Adds rows to a file; to none where there is none."""

    def write(rows: Sequence[GradedResponse]) -> None:
        if output is None:
            return
        try:
            with output.open("a", encoding="utf-8", errors="replace") as file:
                file.writelines(json_line(_row(row, grader)) + "\n" for row in rows)
        except OSError as error:
            raise RunError(f"{output} could not be written: {error.strerror}") from error

    return write


def _row(row: GradedResponse, grader: Grader) -> dict[str, Any]:
    fields = dict(vars(row))
    if row.right is None:
        del fields["right"]
    if grader.answers is None:
        del fields["answer"]
    return fields


def _report(
    own: Any,
    task: Task | None,
    grader: Grader,
    judged: Sequence[GradedResponse],
    options: dict[str, Any],
    seconds: float,
) -> None:
    """Print what was found, as a table or as JSON."""
    from hjax.run.grading import describe, measures
    from hjax.show.answers import print_measures
    from hjax.show.format import duration
    from hjax.show.tables import wide_console

    found = measures(judged, own.samples, grader)
    questions = len(judged) // own.samples
    tokens = sum(row.tokens for row in judged)
    truncated = sum(row.truncated for row in judged) / len(judged)
    unscored = sum(row.reward is None for row in judged) / len(judged)
    if own.json:
        asked: dict[str, Any] = {"data": own.data}
        if task is not None:
            asked = {"task": task.name, "task_options": dataclasses.asdict(task)}
        said = {
            "model": own.model,
            **asked,
            "questions": questions,
            "samples": own.samples,
            **described(options),
            "max_new_tokens": options["max_new_tokens"],
            "seed": own.seed,
            **describe(found),
            "unscored": unscored,
            "truncated": truncated,
            "tokens": tokens,
            "seconds": seconds,
        }
        print(json_line(said))
        return
    console = wide_console()
    how = "greedy" if options["temperature"] == 0 else f"temperature {options['temperature']:g}"
    each = "one answer each" if own.samples == 1 else f"{own.samples} answers each"
    print(f"{own.data or own.task}: {questions} questions, {each}, {how}")
    print_measures(console, found)
    left_out = f"; {unscored:.1%} unscored, left out" if unscored else ""
    print(
        f"{tokens:,} tokens in {duration(seconds)}; {truncated:.1%} of the answers cut at "
        f"{options['max_new_tokens']} tokens{left_out}"
    )


if __name__ == "__main__":
    run_and_leave(main)
