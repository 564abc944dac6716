"""Playing episodes: turns of the policy, answers of the environment, and the rows they make.

A policy draws the turns of many episodes at once while the environments of others answer. With
``as_ready`` off, which episodes draw together follows from the episodes alone, so that a run whose
environments are slower one day than another draws the same.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from hjax.data.conversation import Conversation
from hjax.data.tokenizer import Tokenizer
from hjax.environments.environment import Environment, anchor_digest, check_reward
from hjax.environments.episode_pool import AnswerFuture, EpisodeAnswer, EpisodePool
from hjax.environments.episode_text import ObservationEncoder
from hjax.errors import DataError

# Into how many parts episodes are divided by default, of which one draws turns at a time.
COHORTS = 2
# How an episode may end beside the environment's faults.
DONE, MAX_TURNS, CONTEXT = FAULTLESS = ("done", "max_turns", "context")
_NO_PROMPT = "an observation that begins a row has no tokens; let it say something"


@dataclasses.dataclass(frozen=True)
class EpisodeLimits:
    """How long episodes may be.

    Attributes:
      turns: of the policy in an episode.
      turn_tokens: of one turn; 0: as many as the row has room for.
      prompt_tokens: of a row's first observation.
      response_tokens: of all that follows it in the row, observations included.
      row_tokens: of both together; 0: no further limit.
    """

    turns: int
    turn_tokens: int
    prompt_tokens: int
    response_tokens: int
    row_tokens: int = 0

    def room(self, row: EpisodeRow) -> int:
        """Tokens that a row may still have."""
        length = row.response_length
        room = self.response_tokens - length
        if self.row_tokens:
            room = min(room, self.row_tokens - len(row.prompt) - length)
        return room


@dataclasses.dataclass
class Turn:
    """A turn of the policy, and what followed.

    Attributes:
      tokens: ids that the policy drew.
      logprobs: by name, of each of them: entries of a rollout such as ``logprobs``.
      text: of the tokens, as the environment got it.
      observation: ids that follow them in the row, drawn by nobody; empty after the last turn.
      observed: text of the observation.
      reward, valid, metrics: of the environment's answer.
      anchor: of the state in which the turn was taken; None: no state to compare.
      seconds: that the environment took; ``waited``: that an agent's calls waited for the policy,
        added up, in a session that ends with this turn.
      forced: of each token, whether a constraint allowed no other, so that it is not learned from;
        empty: of none.
    """

    tokens: list[int]
    logprobs: Mapping[str, Sequence[float]]
    text: str
    observation: list[int] = dataclasses.field(default_factory=list)
    observed: str = ""
    reward: float = 0.0
    valid: bool = True
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)
    anchor: bytes | None = None
    seconds: float = 0.0
    forced: Sequence[bool] = ()
    waited: float = 0.0

    def record(self) -> dict[str, Any]:
        """What was done, seen and rewarded, as JSON values."""
        return {
            "action": self.text,
            "observation": self.observed,
            "reward": self.reward,
            "valid": self.valid,
            "tokens": len(self.tokens),
            **({"metrics": dict(self.metrics)} if self.metrics else {}),
        }


@dataclasses.dataclass
class EpisodeRow:
    """A row of the batch: an observation as the prompt, then turns and observations.

    Attributes:
      prompt: ids of the first observation; ``text``: its text.
      conversation: the chat that it begins with; None: the text alone.
      context: ids between the prompt and the first turn, seen and not learned: what does not fit
        into the prompt's part of a row, and turns that another row has.
    """

    prompt: list[int]
    text: str
    turns: list[Turn] = dataclasses.field(default_factory=list)
    conversation: Conversation | None = None
    context: list[int] = dataclasses.field(default_factory=list)

    @property
    def response(self) -> list[int]:
        """Ids after the prompt: of turns and observations."""
        return self.context + [i for turn in self.turns for i in (*turn.tokens, *turn.observation)]

    @property
    def response_length(self) -> int:
        """Ids of ``response``."""
        turns = sum(len(turn.tokens) + len(turn.observation) for turn in self.turns)
        return len(self.context) + turns


@dataclasses.dataclass
class Episode:
    """An episode.

    Attributes:
      number: of the sequence in its batch, which seeds what the policy draws.
      group: number of the task and seed that it shares with others it is compared with.
      task, seed: what it is reset with.
      rows: one, or several where observations replaced the history.
      stop_reason: ``done``, ``max_turns``, ``context`` (the next turn has no room), or a fault of
        the environment's: ``timeout``, ``exception``, ``killed``; empty while it is played.
      fault: of a fault, what happened.
      calls: of an agent's session, ``hjax.agents.call_tree.CallTree.call_records``.
    """

    number: int
    group: int
    task: Mapping[str, Any]
    seed: int
    rows: list[EpisodeRow] = dataclasses.field(default_factory=list)
    stop_reason: str = ""
    fault: str = ""
    calls: list[dict[str, Any]] = dataclasses.field(default_factory=list)

    @property
    def turns(self) -> list[Turn]:
        """All turns, in order."""
        return [turn for row in self.rows for turn in row.turns]

    def turn_records(self) -> list[dict[str, Any]]:
        """``Turn.record`` of all turns; ``fresh`` where the observation replaced the history."""
        records = [[turn.record() for turn in row.turns] for row in self.rows if row.turns]
        for before in records[:-1]:
            before[-1]["fresh"] = True
        return [record for row in records for record in row]

    @property
    def total_reward(self) -> float:
        """The sum of its turns' rewards; NaN after a fault, which nobody scores."""
        return float("nan") if self.fault else float(sum(turn.reward for turn in self.turns))


@dataclasses.dataclass(frozen=True)
class TurnRequest:
    """What the policy is to continue.

    Attributes:
      episode: its number; ``turn``: how many it has had.
      prompt: ids of the row's prompt.
      response: ids after it, so far.
      first_draw: tokens that the episode has had after its rows' prompts.
      max_tokens: of the turn.
      stop: strings that end it.
      cohort: which part of the episodes draws together.
      constraint: a ``hjax.rollout.constraint.Constraint`` of its text; None: any text.
    """

    episode: int
    turn: int
    prompt: Sequence[int]
    response: Sequence[int]
    first_draw: int
    max_tokens: int
    stop: Sequence[str] = ()
    cohort: int = 0
    constraint: Any = None


@dataclasses.dataclass(frozen=True)
class DrawnTurn:
    """A turn that was drawn.

    Attributes:
      tokens, logprobs, forced: as of ``Turn``.
      ended: by a stop token or string, or by its constraint, not by its length.
      failed: why its text does not match its constraint, and no token may follow; empty: it does.
    """

    tokens: list[int]
    logprobs: Mapping[str, Sequence[float]]
    ended: bool
    forced: Sequence[bool] = ()
    failed: str = ""


# Draws a turn for each request.
DrawTurns = Callable[[Sequence[TurnRequest]], Sequence[DrawnTurn]]


class EpisodePlayer:
    """Plays episodes with a pool of environments.

    Args:
      pool: of the environments.
      encoder: of their observations.
      limits: of each episode.
      draw: the policy.
      cohorts: into how many parts the episodes are divided, which take turns: while one draws, the
        environments of the others answer.
      as_ready: whether those draw next whose environments have answered, instead of whole cohorts.
      progress: called with (episodes that have ended, all of them) after each draw.
      waited: called with the begin and end (``time.perf_counter``) of each wait for environments,
        during which nothing was drawn.
    """

    def __init__(
        self,
        pool: EpisodePool,
        encoder: ObservationEncoder,
        limits: EpisodeLimits,
        draw: DrawTurns,
        *,
        cohorts: int = COHORTS,
        as_ready: bool = False,
        progress: Callable[[int, int], None] = lambda ended, all: None,
        waited: Callable[[float, float], None] = lambda begin, end: None,
    ):
        self._pool, self._encoder, self.limits, self._draw = pool, encoder, limits, draw
        self._cohorts, self._as_ready = cohorts, as_ready
        self._progress, self._waited = progress, waited
        self._answers: dict[int, AnswerFuture] = {}  # by episode, that are awaited
        self._before: dict[int, EpisodeAnswer] = {}  # the answer that an episode acts on
        self._ended: dict[int, bool] = {}  # whether an episode's last turn has ended

    def play(self, episodes: Sequence[Episode]) -> None:
        """Play new episodes to their ends; they are changed in place.

        Raises:
          ConfigError: the environment cannot be loaded.
        """
        try:
            for episode in episodes:
                self._answers[episode.number] = self._pool.reset(
                    episode.number, episode.task, episode.seed
                )
            size = max(-(-len(episodes) // max(self._cohorts, 1)), 1)
            cohorts = [list(episodes[i : i + size]) for i in range(0, len(episodes), size)]
            while any(cohorts):
                for i, cohort in enumerate(cohorts):
                    self._play_turn(self._ready(cohort), i)
                    cohorts[i] = [each for each in cohort if not each.stop_reason]
                    self._progress(len(episodes) - sum(map(len, cohorts)), len(episodes))
        finally:
            for episode in episodes:
                self._pool.end(episode.number)
            self._answers.clear()
            self._before.clear()

    def _ready(self, cohort: list[Episode]) -> list[Episode]:
        """The live episodes of a cohort whose environments have answered; waits for all of them, or
        where ``as_ready`` for one."""
        waits = [self._answers[each.number] for each in cohort]
        when = concurrent.futures.FIRST_COMPLETED if self._as_ready else "ALL_COMPLETED"
        begin = time.perf_counter()
        concurrent.futures.wait(waits, return_when=when)
        self._waited(begin, time.perf_counter())
        ready = [each for each in cohort if self._answers[each.number].done()]
        for each in ready:
            self._take_answer(each, self._answers.pop(each.number).result())
        return [each for each in ready if not each.stop_reason]

    def _take_answer(self, episode: Episode, answer: EpisodeAnswer) -> None:
        """Record an environment's answer; ends the episode where it is over."""
        if answer.fault:
            episode.stop_reason, episode.fault = answer.fault, answer.text
            return
        turn = episode.turns[-1] if episode.rows else None
        if turn is not None:
            turn.reward, turn.valid = answer.reward, answer.valid
            turn.metrics, turn.seconds = answer.metrics, answer.seconds
            turn.observed = answer.observation
            try:
                check_reward("the sum of the episode's rewards", episode.total_reward)
            except DataError as error:
                episode.stop_reason, episode.fault = "exception", str(error)
                return
        if answer.done or (turn is not None and len(episode.turns) >= self.limits.turns):
            episode.stop_reason = DONE if answer.done else MAX_TURNS
        elif not self._observe(episode, answer, turn):
            episode.stop_reason = CONTEXT
        self._before[episode.number] = answer

    def _observe(self, episode: Episode, answer: EpisodeAnswer, turn: Turn | None) -> bool:
        """Add an observation to the episode's row, or begin a row with it; False: it has no room
        for another turn. One that cannot begin a row is the environment's fault."""
        limits, encoder = self.limits, self._encoder
        if turn is None or answer.fresh:
            chat = encoder.conversation(answer)
            new = EpisodeRow(encoder.begin(chat), answer.observation, conversation=chat)
            if not new.prompt:  # of a tokenizer without BOS
                episode.stop_reason, episode.fault = "exception", _NO_PROMPT
                return True
            fits = len(new.prompt) <= limits.prompt_tokens and limits.room(new) > 0
            if turn is None and not fits:
                raise DataError(
                    f"the first observation of an episode has {len(new.prompt)} tokens, and "
                    f"{limits.prompt_tokens} are allowed (rollout.max_prompt_length, or the "
                    "model's positions): allow more, or let the environment say less"
                )
            episode.rows += [new] if fits else []
            return fits
        row = episode.rows[-1]
        ended = self._ended[episode.number]
        ids = encoder.continuation(row.conversation or row.text, turn.tokens, ended, answer)
        if len(ids) >= limits.room(row):
            return False
        turn.observation = ids
        return True

    def _play_turn(self, episodes: list[Episode], cohort: int) -> None:
        """Draw a turn for each, and give it to its environment."""
        if not episodes:
            return
        requests = [self._request(each, cohort) for each in episodes]
        turns = self._draw(requests)
        for episode, request, drawn in zip(episodes, requests, turns, strict=True):
            row, before = episode.rows[-1], self._before[episode.number]
            seen = [*request.prompt, *request.response]
            text = self._encoder.tokenizer.decode_response(seen, drawn.tokens)
            row.turns.append(Turn(drawn.tokens, drawn.logprobs, text, anchor=before.anchor))
            self._ended[episode.number] = drawn.ended
            self._answers[episode.number] = self._pool.step(episode.number, text)

    def _request(self, episode: Episode, cohort: int) -> TurnRequest:
        row, limits = episode.rows[-1], self.limits
        room = limits.room(row)
        return TurnRequest(
            episode=episode.number,
            turn=len(episode.turns),
            prompt=row.prompt,
            response=row.response,
            first_draw=sum(each.response_length for each in episode.rows),
            max_tokens=min(limits.turn_tokens or room, room),
            stop=self._before[episode.number].stop,
            cohort=cohort,
        )


def demonstrated_row(
    environment: Environment,
    task: Mapping[str, Any],
    seed: int,
    actions: Sequence[str],
    tokenizer: Tokenizer,
) -> EpisodeRow:
    """The row of an episode whose actions are known; each turn ends in the tokenizer's EOS.

    Args:
      environment: one of hjax's own, as it runs in this process.
    """
    encoder = ObservationEncoder(tokenizer)
    first = environment.reset(task, seed)
    row = EpisodeRow(encoder.begin(first.text), first.text)
    end = [] if tokenizer.eos_id is None else [tokenizer.eos_id]
    for number, action in enumerate(actions):
        turn = Turn([*tokenizer.encode(action, add_special=False), *end], {}, action)
        row.turns.append(turn)
        turn.observed = environment.step(action).observation.text
        if number + 1 < len(actions):
            turn.observation = encoder.continuation(row.text, turn.tokens, True, turn.observed)
    environment.close()
    return row


def episode_tasks(
    columns: Mapping[str, Sequence[Any]], texts: Sequence[str]
) -> list[dict[str, Any]]:
    """What episodes of a dataset's rows are reset with: each row's columns, with a ``prompt``.

    Args:
      columns: of the rows.
      texts: their prompts as they were tokenised, for rows that have neither ``prompt`` nor
        ``question``; of a chat that is the rendered template, which no observation should repeat.
    """
    tasks = []
    for i, text in enumerate(texts):
        row = {name: values[i] for name, values in columns.items()}
        given = (row.get(name) for name in ("prompt", "question"))
        tasks.append(row | {"prompt": next((each for each in given if each is not None), text)})
    return tasks


def episode_seed(seed: int, step: int, group: int) -> int:
    """The seed of a group's environments in a step of a run, 0 to 2**32 - 1."""
    digest = anchor_digest([seed, step, group])
    return int(np.frombuffer(digest, "<u4")[0])
