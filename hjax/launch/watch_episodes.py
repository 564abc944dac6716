"""Episodes one by one as conversations: what ``generate`` does where there is an environment."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hjax.environments.episode import DrawnTurn, DrawTurns, Episode, EpisodePlayer, TurnRequest
from hjax.errors import ConfigError, DataError
from hjax.launch.episodes import (
    check_tool_flags,
    environment_pool,
    episode_limits,
    model_policy,
    observation_encoder,
)
from hjax.launch.questions import find_task, read_questions
from hjax.launch.sampling_flags import ModelInfo, existing_file, generate_options
from hjax.show.answers import print_piece
from hjax.show.tables import wide_console

if TYPE_CHECKING:
    from hjax.data.dataset import Dataset
    from hjax.environments.episode_pool import EpisodePool
    from hjax.environments.episode_text import ObservationEncoder

# Lines that are commands.
NEXT, EXIT = "/next", "/exit"


class _EpisodeLeft(Exception):
    """The person wants another episode."""


def check_episode_flags(args: Any) -> None:
    """Refuse flags that would have no effect where episodes are watched.

    Raises:
      ConfigError: the first of them.
    """
    if bool(args.data) == bool(args.task):
        raise ConfigError("give --data=FILE with --environment=PATH.py:NAME, or --task=NAME")
    unused = ("prompt", "prompts", "json", "regex", "json_schema", "grammar", "choice")
    for flag in unused:
        if getattr(args, flag):
            raise ConfigError(f"--{flag} is for answers, and here episodes are played")


def watch_episodes(args: Any) -> int:
    """Play a task's episodes, or those of a file's rows, and print each turn; returns the exit
    status.

    Raises:
      ConfigError: a task without an environment, no tokenizer, a template that cannot continue a
        chat, or an environment that cannot be loaded.
    """
    if args.data:
        existing_file("data", args.data)
    task = find_task(args.task, args.model) if args.task else None
    check_tool_flags(args)
    plays = args.environment or args.tools
    if not plays and (task is None or not task.environment):
        raise ConfigError(
            f"--task={args.task} has no environment: one response answers a prompt; give --prompt"
        )
    info = ModelInfo.read(args.model)
    options = generate_options(args, info, temperature=1.0)
    encoder = observation_encoder(info, chat=args.chat or bool(args.tools))
    limits = episode_limits(args, info, task)
    questions = read_questions(args, task, info)
    with environment_pool(args, task, encoder, processes=1) as pool:
        policy = None if args.human else model_policy(args, info, options, slots=1)
        watcher = EpisodeWatcher(pool, encoder, limits, policy)
        return watcher.run(questions, args.seed)


class EpisodeWatcher:
    """Plays episodes one by one, and prints each turn and what the environment answers to it.

    Args:
      pool, encoder, limits: as ``EpisodePlayer`` has them.
      policy: draws turns; None: a person types them.
    """

    def __init__(
        self,
        pool: EpisodePool,
        encoder: ObservationEncoder,
        limits: Any,
        policy: DrawTurns | None,
    ):
        self._encoder, self._policy = encoder, policy
        self._player = EpisodePlayer(pool, encoder, limits, self._draw, cohorts=1)
        self._console = wide_console(sys.stdout)
        self._episode: Episode | None = None
        self._shown = (0, 0)  # rows and turns of the episode that were printed

    def run(self, questions: Dataset, seed: int) -> int:
        """Play an episode of each row, until the input ends; returns the command's exit status."""
        from hjax.run.episode_evaluation import question_episodes

        with contextlib.suppress(ImportError):  # line editing for `input`
            import readline  # noqa: F401
        skip = f"{NEXT} leaves an episode, " if self._policy is None else ""
        self._print(f"{skip}{EXIT} or Ctrl-D ends\n", "dim")
        try:
            for number in range(len(questions)):
                if number and self._read(f"Enter plays task {number + 1}: ") == EXIT:
                    return 0
                [episode] = question_episodes(questions, [number], samples=1, seed=seed)
                self._print(f"task {number + 1} of {len(questions)}, seed {episode.seed}\n", "bold")
                self._play(episode)
        except EOFError:
            self._print("\n")
        return 0

    def _play(self, episode: Episode) -> None:
        self._episode, self._shown = episode, (0, 0)
        try:
            self._player.play([episode])
        except _EpisodeLeft:
            return
        self._print_news(episode)
        if episode.fault:
            self._print(f"{episode.fault}\n", "red")
        reward = "no return" if episode.fault else f"return {episode.total_reward:g}"
        turns = len(episode.turns)
        count = f"{turns} turn{'s' if turns != 1 else ''}"
        self._print(f"[{episode.stop_reason}, {reward}, {count}]\n", "bold")

    def _draw(self, requests: Sequence[TurnRequest]) -> Sequence[DrawnTurn]:
        assert self._episode is not None
        self._print_news(self._episode)
        if self._policy is not None:
            return self._policy(requests)
        return [self._typed(request) for request in requests]

    def _typed(self, request: TurnRequest) -> DrawnTurn:
        """A person's turn, within the limits that the model's has."""
        while True:
            line = self._read("> ")
            if line.strip() == EXIT:
                raise EOFError
            if line.strip() == NEXT:
                raise _EpisodeLeft
            try:
                tokens = self._encoder.tokenizer.encode(line, add_special=False)
            except DataError as error:  # the model could not say it
                self._print(f"{error}\n", "red")
                continue
            if len(tokens) <= request.max_tokens:
                return DrawnTurn(tokens, {}, ended=True)
            self._print(f"{len(tokens)} tokens, and a turn has {request.max_tokens}\n", "red")

    def _print_news(self, episode: Episode) -> None:
        """Print what the episode has that was not printed: its prompt, its last turn."""
        rows, turns = self._shown
        self._shown = len(episode.rows), len(episode.turns)
        if turns < len(episode.turns):
            turn = episode.turns[-1]
            if self._policy is not None:
                self._print(f"> {turn.text}\n", "cyan")
            if episode.fault:  # the environment has not answered it
                return
            if turn.observed:
                self._print(f"{turn.observed}\n", "dim")
            validity = "" if turn.valid else ", not valid"
            self._print(f"[reward {turn.reward:g}{validity}{_metrics(turn.metrics)}]\n", "dim")
        if rows < len(episode.rows):
            if rows:
                self._print("[the observation replaces what was said and seen before]\n", "dim")
            else:
                self._print(f"{episode.rows[0].text}\n", "dim")

    def _read(self, question: str) -> str:
        line = input(question)
        if not sys.stdin.isatty():  # no terminal has shown it
            self._print(f"{line}\n")
        return line

    def _print(self, text: str, style: str = "") -> None:
        print_piece(self._console, text, style)


def _metrics(values: Mapping[str, float]) -> str:
    return "".join(f", {name} {value:g}" for name, value in values.items())
