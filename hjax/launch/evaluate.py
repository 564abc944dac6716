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
  --environment=PATH.py:NAME  an environment of yours, which plays with each row of --data, or one
                        of another package (docs/agents.md); some tasks have one: then there is an
                        episode of many turns for each question
  --agent=PATH.py:NAME  an agent of yours, which the model answers, a session for each row; its
                        calls are drawn as they ask, or else as the flags say (docs/agents.md)
  --verifier=PATH.py:NAME  scores what is left by --agent=COMMAND, a program, which runs in the
                        sandbox; --readable=PATH,... are files and folders that it can read
  --confined=true       false: the program has your rights, files and network (docs/security.md)
  --agent_seconds=1800  deadline of a session
{environment}\
  --processes=N         processes of environments (one per core, at most 8), or of agents (1)
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

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hjax.errors import ConfigError
from hjax.files import append_rows, json_line
from hjax.launch.command import run_or_help, status_on_ctrl_c
from hjax.launch.episodes import (
    ENVIRONMENT_FLAGS,
    ENVIRONMENT_HELP,
    ENVIRONMENT_RULES,
    check_agent_flags,
    check_tool_flags,
    play_and_report,
)
from hjax.launch.process_exit import run_and_exit
from hjax.launch.questions import TASK_PROMPTS, find_task, read_questions, task_names
from hjax.launch.sampling_flags import (
    ModelInfo,
    all_options,
    existing_file,
    generate_options,
    question_source,
    read_flags,
    sampling_help,
)
from hjax.rules import at_least, deadline
from hjax.user_input import user_path

if TYPE_CHECKING:
    from hjax.data.dataset import Dataset
    from hjax.data.tasks import Task
    from hjax.rewards.graders import Grader
    from hjax.run.grading import GradedResponse

LENGTH = 256


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""

    def text() -> str:
        sampling = sampling_help(
            "logits are divided by it; 0 is greedy (0; 1 with several samples)"
        )
        sizes = {"task_prompts": TASK_PROMPTS, "length": LENGTH}
        texts = {"environment": ENVIRONMENT_HELP, "tasks": task_names()}
        return str(__doc__).format(sampling=sampling, **texts, **sizes)

    return status_on_ctrl_c(lambda: run_or_help(arguments, text, _run))


def parse(arguments: Sequence[str]) -> Any:
    """Read the command line.

    Raises:
      ConfigError: a wrong flag or value.
    """
    rules = {"samples": at_least(1), "limit": at_least(0), "timeout_seconds": deadline()}
    rules |= {"processes": at_least(0), "agent_seconds": deadline(), **ENVIRONMENT_RULES}
    own = dict(reward="", instruction="", output="", samples=1, limit=0, processes=0)
    own |= dict(agent="", verifier="", readable="", confined=True, agent_seconds=1800.0)
    args = read_flags(arguments, rules, timeout_seconds=60.0, **own, **ENVIRONMENT_FLAGS)
    if bool(args.data) == bool(args.task):
        raise ConfigError(
            "give --data=FILE with --reward=GRADER or --environment=PATH.py:NAME, or --task=NAME; "
            "see --help"
        )
    played_by = "environment" if args.environment else "agent"
    if args.data and not args.reward and not args[played_by].value:
        raise ConfigError("--reward is missing: path.py:name, or math; see --help")
    if (args.environment or args.agent) and args.reward:
        raise ConfigError(f"--{played_by} rewards its episodes itself; leave --reward out")
    check_agent_flags(args)
    check_tool_flags(args)
    if args.samples > 1 and args.temperature == 0:
        raise ConfigError(
            f"--temperature=0 gives the same answer {args.samples} times; set it above 0, or leave "
            "--samples out"
        )
    return args


def _run(arguments: Sequence[str]) -> int:
    args = parse(arguments)
    output = _new_file(args.output) if args.output else None
    if args.data:
        existing_file("data", args.data)
    task = find_task(args.task, args.model) if args.task else None
    rewards_itself = bool(args.agent or args.environment or (task is not None and task.environment))
    plays = rewards_itself or bool(args.tools)
    _check_flags_of_environments(args, rewards_itself, plays)
    grader = None if rewards_itself else _grader(args, task)
    info = ModelInfo.read(args.model)
    options = generate_options(args, info, temperature=0.0 if args.samples == 1 else 1.0)
    questions = read_questions(args, task, info, limit=args.limit, instruction=args.instruction)
    if grader is not None:
        from hjax.run.multi_turn_rows import check_asked

        check_asked(
            questions, bool(args.tools), environment_key="--environment", tools_key="--tools"
        )
    if grader is not None and grader.check is not None:
        grader.check(questions.columns)
    if grader is None or plays:
        play_and_report(args, info, task, questions, options, output, grader)
        return 0
    from hjax.run.batched_generation import length_limit

    usual = (task.response_length if task is not None else None) or LENGTH
    options["max_new_tokens"] = length_limit(questions, info.config, args.max_new_tokens, usual)
    start = time.monotonic()
    graded = _generate_and_grade(args, info, questions, grader, options, output)
    _report(args, task, grader, graded, options, time.monotonic() - start)
    return 0


def _check_flags_of_environments(args: Any, rewards_itself: bool, plays: bool) -> None:
    """Refuse flags that would have no effect."""
    if args.tools and args.instruction:
        raise ConfigError("--instruction: with --tools the prompts stay as --data has them")
    if rewards_itself and (args.reward or args.instruction):
        flag = "reward" if args.reward else "instruction"
        raise ConfigError(f"--{flag} is for answers, and --task={args.task} is an environment's")
    for flag in ("max_turns", "turn_tokens", "processes"):
        if not plays and (value := getattr(args, flag)):
            raise ConfigError(f"--{flag}={value} is for an environment, and here is none")


def _new_file(name: str) -> Path:
    path = user_path(name, "--output=")
    if path.suffix != ".jsonl":
        raise ConfigError(f"--output={name}: its name must end in .jsonl")
    if path.exists():
        raise ConfigError(f"--output={name} is there already; name a new file")
    if not path.parent.is_dir():
        raise ConfigError(f"--output={name}: there is no directory {path.parent}")
    return path


def _grader(args: Any, task: Task | None) -> Grader:
    from hjax.rewards.graders import load_grader, task_grader

    grader = load_grader(args.reward, args.timeout_seconds, "--reward") if args.reward else None
    if task is not None:
        return task_grader(task, args.timeout_seconds, grader)
    assert grader is not None
    return grader


def _generate_and_grade(
    args: Any,
    info: ModelInfo,
    questions: Dataset,
    grader: Grader,
    options: dict[str, Any],
    output: Path | None,
) -> list[GradedResponse]:
    from hjax.run.grading import sample_and_grade
    from hjax.show.progress_bar import PartsDisplay

    model = info.load(args, args.copies)
    several = len(questions) * args.samples > args.batch and sys.stderr.isatty()
    with PartsDisplay("answering", several, sys.stderr) as progress:
        write = _writer(output, grader)
        samples, batch, seed = args.samples, args.batch, args.seed
        return sample_and_grade(
            model, questions, grader, samples, batch, seed, progress, write, **options
        )


def _writer(output: Path | None, grader: Grader) -> Callable[[Sequence[GradedResponse]], None]:
    """A function that appends rows to the output file, if there is one."""

    def write(rows: Sequence[GradedResponse]) -> None:
        if output is not None:
            append_rows(output, [_row(row, grader) for row in rows])

    return write


def _row(row: GradedResponse, grader: Grader) -> dict[str, Any]:
    fields = dict(vars(row))
    if row.right is None:
        del fields["right"]
    if grader.answers is None:
        del fields["answer"]
    return fields


def _report(
    args: Any,
    task: Task | None,
    grader: Grader,
    graded: Sequence[GradedResponse],
    options: dict[str, Any],
    seconds: float,
) -> None:
    """Print the results as a table or as JSON."""
    from hjax.run.grading import estimate_metrics, estimates_json
    from hjax.show.answers import print_measures
    from hjax.show.format import duration
    from hjax.show.tables import wide_console

    found = estimate_metrics(graded, args.samples, grader)
    questions = len(graded) // args.samples
    tokens = sum(row.tokens for row in graded)
    truncated = sum(row.truncated for row in graded) / len(graded)
    unscored = sum(row.reward is None for row in graded) / len(graded)
    if args.json:
        result = {
            "model": args.model,
            **question_source(args.data, task),
            "questions": questions,
            "samples": args.samples,
            **all_options(options),
            "max_new_tokens": options["max_new_tokens"],
            "seed": args.seed,
            **estimates_json(found),
            "unscored": unscored,
            "truncated": truncated,
            "tokens": tokens,
            "seconds": seconds,
        }
        print(json_line(result))
        return
    console = wide_console()
    method = "greedy" if options["temperature"] == 0 else f"temperature {options['temperature']:g}"
    each = "one answer each" if args.samples == 1 else f"{args.samples} answers each"
    print(f"{args.data or args.task}: {questions} questions, {each}, {method}")
    print_measures(console, found, (row.reward for row in graded))
    left_out = f"; {unscored:.1%} unscored, left out" if unscored else ""
    print(
        f"{tokens:,} tokens in {duration(seconds)}; {truncated:.1%} of the answers cut at "
        f"{options['max_new_tokens']} tokens{left_out}"
    )


if __name__ == "__main__":
    run_and_exit(main)
