"""Playing environments from the command line: what ``evaluate`` does where there is one."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hjax.errors import ConfigError, DataError
from hjax.files import append_rows, json_line
from hjax.launch.sampling_flags import ModelInfo, all_options, question_source
from hjax.rules import Rule, at_least, deadline

if TYPE_CHECKING:
    from hjax.data.dataset import Dataset
    from hjax.data.tasks import Task
    from hjax.environments.episode import DrawTurns, Episode, EpisodeLimits
    from hjax.environments.episode_pool import EpisodePool
    from hjax.environments.episode_text import ObservationEncoder
    from hjax.rewards.graders import Grader
    from hjax.run.episode_evaluation import Player
    from hjax.run.grading import GradedResponse

# Turns of an episode where neither the task nor a flag says how many.
MAX_TURNS = 20
# Flags of the commands that play episodes, for ``read_flags``.
ENVIRONMENT_FLAGS: Mapping[str, Any] = {
    "data": "",
    "task": "",
    "environment": "",
    "tools": "",
    "max_turns": 0,
    "turn_tokens": 0,
    "step_seconds": 60.0,
}
ENVIRONMENT_RULES: Mapping[str, Rule] = {
    "max_turns": at_least(0),
    "turn_tokens": at_least(0),
    "step_seconds": deadline(),
}
ENVIRONMENT_HELP = f"""\
  --tools=PATH.py:NAME,...  functions that the model may call in chats of --data; python is an
                        interpreter (docs/agents.md); the last turn is the answer
  --max_turns=N         turns of an episode ({MAX_TURNS}; of a task what it needs)
  --turn_tokens=N       length limit of a turn, in tokens (what the model's positions leave; of a
                        task what it needs); --max_new_tokens is that of all that follows the first
                        observation
  --step_seconds=60     deadline of each call of the environment
"""


def play_and_report(
    args: Any,
    info: ModelInfo,
    task: Task | None,
    questions: Dataset,
    options: dict[str, Any],
    output: Path | None,
    grader: Grader | None,
) -> None:
    """Play ``args.samples`` episodes of each question's environment, and print the results.

    Args:
      args: the flags of ``hjax.launch.evaluate``.
      task: the built-in task, or None for the rows of a file.
      options: of sampling, with the stops.
      output: a file for a row per episode.
      grader: of the last turns of conversations with tools; None: the environment rewards them.

    Raises:
      ConfigError: no tokenizer, a template that cannot continue a chat, or an environment that
        cannot be loaded.
    """
    from hjax.environments.episode import EpisodePlayer
    from hjax.run.episode_evaluation import play_questions
    from hjax.show.progress_bar import PartsDisplay

    chat = args.chat or bool(args.tools or args.agent)
    encoder = observation_encoder(info, chat=chat)
    limits = episode_limits(args, info, None if args.agent else task)
    start = time.monotonic()
    processes = args.processes or min(os.cpu_count() or 1, 8)
    with contextlib.ExitStack() as stack:
        player: Callable[..., Player]
        if args.agent:
            player = agent_player(args, info, encoder, limits, options, stack)
        else:
            pool = stack.enter_context(environment_pool(args, task, encoder, processes))
            policy = model_policy(args, info, options, slots=args.batch)
            player = functools.partial(EpisodePlayer, pool, encoder, limits, policy)
        with PartsDisplay("playing", sys.stderr.isatty(), sys.stderr) as progress:
            played, graded = play_questions(
                player,
                questions,
                samples=args.samples,
                seed=args.seed,
                at_a_time=2 * args.batch,
                progress=progress,
                write=lambda some: _write(output, some, args.samples),
                grader=grader,
            )
    _report(args, task, played, graded, grader, options, limits, time.monotonic() - start)


def check_agent_flags(args: Any) -> None:
    """Refuse --agent beside what plays the episodes already, and --verifier without it."""
    if args.agent and (args.environment or args.tools):
        other = args.environment or args.tools
        raise ConfigError(f"--agent={args.agent}: episodes are played by {other} already; keep one")
    if args.verifier and not args.agent:
        raise ConfigError(f"--verifier={args.verifier}: it scores what a program of --agent leaves")
    if not args.verifier and (args.readable or not args.confined):
        flag = f"readable={args.readable}" if args.readable else "confined=false"
        raise ConfigError(f"--{flag} is for a program of --agent, which has a --verifier")


def check_tool_flags(args: Any) -> None:
    """Refuse --tools beside what plays the episodes already."""
    other = args.environment or args.task
    if args.tools and other:
        raise ConfigError(
            f"--tools={args.tools}: tools are of chats of --data, and {other} is not; keep one"
        )


def observation_encoder(info: ModelInfo, *, chat: bool) -> ObservationEncoder:
    """The encoder of an environment's observations.

    Raises:
      ConfigError: no tokenizer, or a template that cannot continue a chat.
    """
    from hjax.environments.episode_text import ObservationEncoder

    if info.tokenizer is None:
        raise ConfigError(f"an environment speaks text, and {info.path} has no tokenizer")
    if chat:
        info.check_chat()
    try:
        return ObservationEncoder(info.tokenizer, chat=chat)
    except DataError as error:
        raise ConfigError(str(error)) from error


def environment_pool(
    args: Any, task: Task | None, encoder: ObservationEncoder, processes: int
) -> EpisodePool:
    """The processes of the environment of --environment or --tools, or of the task."""
    from hjax.environments.episode_pool import EpisodePool
    from hjax.environments.tool_environment import TOOL_ENVIRONMENT, tool_options

    own = TOOL_ENVIRONMENT if args.tools else args.environment
    return EpisodePool(
        own or (task.environment if task is not None else ""),
        tool_options(args.tools, encoder, "--tools") if args.tools else {},
        processes=processes,
        step_seconds=args.step_seconds,
        setting="--environment",
    )


def agent_player(
    args: Any,
    info: ModelInfo,
    encoder: ObservationEncoder,
    limits: EpisodeLimits,
    options: Mapping[str, Any],
    stack: contextlib.ExitStack,
) -> Callable[..., Player]:
    """Load the model; returns what plays episodes with --agent, whose calls get what they ask for.

    Args:
      options: of sampling, for calls that do not say them.
      stack: ends it.
    """
    try:
        from hjax.agents.agent_runner import AgentRunner
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"--agent={args.agent}: {error.name} is not installed; the extra `serve` has what "
            "answers agents: pip install 'hjax[serve]'"
        ) from error
    from hjax.agents.agent_settings import AgentSettings, RecordSettings, comma_separated
    from hjax.rollout.sampling_params import SamplingParams
    from hjax.rollout.service import GenerationService
    from hjax.serving.served_model import ServedModel

    settings = AgentSettings(
        function="" if args.verifier else args.agent,
        command=args.agent if args.verifier else "",
        verifier=args.verifier,
        confined=args.confined,
        readable=comma_separated(args.readable),
        seconds=args.agent_seconds,
        processes=args.processes or 1,
    )
    settings.check()
    model = info.load(args, args.copies)
    service = GenerationService(model, args.batch, max_queue=1 << 20)
    stack.callback(service.close, 0.0)
    size = model.config.vocab_size
    served = ServedModel(args.model, service, model.tokenizer, size, model.eos_ids)
    # ``stop`` has strings here, as in requests.
    names = {field.name for field in dataclasses.fields(SamplingParams)}
    drawing = {name: value for name, value in options.items() if name in names and value != ()}
    drawing["stop"] = list(options["stop"])
    runner = AgentRunner(
        settings, RecordSettings(train_call="all"), encoder, limits, served,
        drawing=drawing, seed=args.seed,
    )  # fmt: skip
    stack.callback(runner.close)
    return functools.partial(runner.player, None)


def episode_limits(args: Any, info: ModelInfo, task: Task | None) -> EpisodeLimits:
    """How long episodes may be, by the flags, the task and the model's positions."""
    from hjax.environments.episode import EpisodeLimits

    known = task is not None and bool(task.environment)
    positions = info.config.max_length
    return EpisodeLimits(
        turns=args.max_turns or (task.max_turns if known and task is not None else MAX_TURNS),
        turn_tokens=args.turn_tokens or (task.turn_length if known and task is not None else 0),
        prompt_tokens=positions - 1,
        response_tokens=args.max_new_tokens or positions,
        row_tokens=positions,
    )


def model_policy(args: Any, info: ModelInfo, options: Mapping[str, Any], slots: int) -> DrawTurns:
    """Load the model; returns what draws its turns.

    Args:
      options: of sampling, with the stops.
      slots: turns that are drawn at a time.
    """
    from hjax.rollout.prompt_encoding import StopConditions
    from hjax.rollout.sampling_params import SamplingParams
    from hjax.rollout.turn_generator import TurnGenerator

    assert info.tokenizer is not None
    model = info.load(args, args.copies)
    turns = TurnGenerator(
        model.engine, model.params, info.tokenizer,
        slots=slots, row_tokens=info.config.max_length,
    )  # fmt: skip
    stop = StopConditions(options["stop"], info.tokenizer, options.get("min_tokens", 0))
    rest = {name: value for name, value in options.items() if name != "stop"}
    sampling = SamplingParams(**rest, stop=(*model.eos_ids, *stop.ids))
    return functools.partial(turns.draw, seed=args.seed, sampling=sampling, stop=stop)


def episode_record(episode: Episode, samples: int) -> dict[str, Any]:
    """An episode for a file of rows: what was seen, done and rewarded in each turn."""
    return {
        "question": episode.number // samples,
        "sample": episode.number % samples,
        "seed": episode.seed,
        "prompt": episode.rows[0].text if episode.rows else "",
        "turns": episode.turn_records(),
        **({"calls": episode.calls} if episode.calls else {}),
        "reward": None if episode.fault else episode.total_reward,
        "stop_reason": episode.stop_reason,
        **({"fault": episode.fault} if episode.fault else {}),
    }


def _write(output: Path | None, episodes: Sequence[Episode], samples: int) -> None:
    if output is not None:
        append_rows(output, [episode_record(each, samples) for each in episodes])


def episode_means(episodes: Sequence[Episode]) -> dict[str, float]:
    """Means over episodes: turns, the share of each stop reason, actions that were not valid, and
    the environment's own metrics (their sums over an episode's turns)."""
    count = len(episodes)
    means = {"turns": sum(len(each.turns) for each in episodes) / count}
    reasons = collections.Counter(each.stop_reason for each in episodes)
    means |= {f"stop_{name}": number / count for name, number in sorted(reasons.items())}
    turns = [turn for each in episodes for turn in each.turns]
    means["invalid_actions"] = sum(not turn.valid for turn in turns) / count
    sums = collections.Counter[str]()
    for turn in turns:
        sums.update(turn.metrics)
    return means | {name: value / count for name, value in sorted(sums.items())}


def _report(
    args: Any,
    task: Task | None,
    played: Sequence[Episode],
    graded: Sequence[GradedResponse],
    grader: Grader | None,
    options: dict[str, Any],
    limits: EpisodeLimits,
    seconds: float,
) -> None:
    from hjax.run.grading import estimate_metrics, estimates_json
    from hjax.show.answers import print_measures
    from hjax.show.format import duration
    from hjax.show.tables import wide_console

    found, means = estimate_metrics(graded, args.samples, grader), episode_means(played)
    tokens, questions = sum(row.tokens for row in graded), len(graded) // args.samples
    if args.json:
        result = {
            "model": args.model,
            **question_source(args.data, task),
            **({"agent": args.agent} if args.agent else {}),
            "environment": args.environment or (task.environment if task is not None else ""),
            **({"tools": args.tools} if args.tools else {}),
            "questions": questions,
            "samples": args.samples,
            **all_options(options),
            "max_turns": limits.turns,
            "turn_tokens": limits.turn_tokens,
            "seed": args.seed,
            **estimates_json(found),
            "episodes": means,
            "tokens": tokens,
            "seconds": seconds,
        }
        print(json_line(result))
        return
    each = "one episode each" if args.samples == 1 else f"{args.samples} episodes each"
    print(f"{args.data or args.task}: {questions} tasks, {each}, at most {limits.turns} turns")
    print_measures(wide_console(), found, (row.reward for row in graded))
    print(", ".join(f"{name} {value:.3g}" for name, value in means.items()))
    print(f"{tokens:,} tokens drawn in {duration(seconds)}")
