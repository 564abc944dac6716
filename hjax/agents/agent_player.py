"""Playing episodes by agents: sessions begin, their calls are drawn together, and become rows."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from hjax.agents.agent_pool import AgentOutcome, AgentPool, OutcomeFuture
from hjax.agents.agent_settings import RecordSettings
from hjax.agents.call_tree import AGENT, LABELS, CallTree
from hjax.agents.gateway import Gateway
from hjax.agents.session import Session
from hjax.environments.episode import COHORTS, DONE, DrawTurns, Episode, EpisodeLimits
from hjax.environments.episode_text import ObservationEncoder

_LOG = logging.getLogger(__name__)
UNSCORED = "unscored"


@dataclasses.dataclass(frozen=True)
class SessionCounts:
    """How far the sessions of a step are.

    Attributes:
      open, ended, all: sessions.
      calls: that were drawn so far.
      seconds: since the first session began.
    """

    open: int
    ended: int
    all: int
    calls: int
    seconds: float


class AgentPlayer:
    """Plays episodes with agents.

    Args:
      pool: of the agents.
      gateway: that answers them.
      encoder: of chats.
      limits: of each episode; ``turns``: calls, 0: any number.
      draw: the policy; None: the gateway's own service draws.
      record: how sessions are recorded.
      cohorts: into how many parts the sessions are divided, which take turns.
      as_ready: whether what waits is drawn at once. Else a cohort's calls are drawn when each of
        its sessions has one or has ended, so that which are drawn together follows from the agents
        alone; but not much later than the last of them came (``RecordSettings.wait_seconds``).
      progress, waited: as of ``EpisodePlayer``.
      watch: called with the counts after each draw.
    """

    def __init__(
        self,
        pool: AgentPool,
        gateway: Gateway,
        encoder: ObservationEncoder,
        limits: EpisodeLimits,
        draw: DrawTurns | None,
        record: RecordSettings,
        *,
        cohorts: int = COHORTS,
        as_ready: bool = False,
        progress: Callable[[int, int], None] = lambda ended, all: None,
        waited: Callable[[float, float], None] = lambda begin, end: None,
        watch: Callable[[SessionCounts], None] = lambda counts: None,
    ):
        self._watch, self._calls = watch, 0
        self._pool, self._gateway, self._encoder, self.limits = pool, gateway, encoder, limits
        self._draw, self._record, self._trains = draw, record, record.trains()
        self._cohorts, self._as_ready = cohorts, as_ready
        self._progress, self._waited = progress, waited
        self._sessions: dict[int, Session] = {}  # that are open, by episode
        self._outcomes: dict[int, OutcomeFuture] = {}

    def play(self, episodes: Sequence[Episode]) -> None:
        """Play new episodes to their ends; they are changed in place.

        Raises:
          ConfigError: the agent cannot be loaded.
        """
        waiting = list(reversed(episodes))
        size = max(-(-len(episodes) // max(self._cohorts, 1)), 1)
        cohort_of = {each.number: i // size for i, each in enumerate(episodes)}
        open_episodes: list[Episode] = []
        at, done = 0, 0
        self._calls, began = 0, time.perf_counter()
        try:
            while waiting or open_episodes:
                room = (self._record.concurrent or len(episodes)) - len(open_episodes)
                for _ in range(min(room, len(waiting))):
                    open_episodes.append(self._begin(waiting.pop()))
                cohorts = sorted({cohort_of[each.number] for each in open_episodes})
                cohort = cohorts[at % len(cohorts)]
                some = [each for each in open_episodes if cohort_of[each.number] == cohort]
                self._play_turn(open_episodes if self._as_ready else some, cohort)
                at += 1
                for episode in [e for e in open_episodes if self._outcomes[e.number].done()]:
                    if self._as_ready or episode in some:
                        open_episodes.remove(episode)
                        self._finish(episode)
                        done += 1
                self._progress(done, len(episodes))
                seconds = time.perf_counter() - began
                open_count = len(open_episodes)
                self._watch(SessionCounts(open_count, done, len(episodes), self._calls, seconds))
        finally:
            for number in list(self._sessions):
                self._pool.end(number)
                self._gateway.close(self._sessions.pop(number))
            self._outcomes.clear()

    def _begin(self, episode: Episode) -> Episode:
        limits, record = self.limits, self._record
        tree = CallTree(self._encoder, limits, history=record.history, echo=record.echo)
        session = Session(episode.number, tree, most_calls=limits.turns)
        self._sessions[episode.number] = session
        outcome = self._pool.begin(
            episode.number, episode.task, self._gateway.open(session), session.key, episode.seed
        )
        outcome.add_done_callback(self._gateway.queue.notify)
        self._outcomes[episode.number] = outcome
        return episode

    def _play_turn(self, episodes: Sequence[Episode], cohort: int) -> None:
        """Draw the calls of some episodes, once they have them."""
        sessions = [self._sessions[each.number] for each in episodes]

        def ready(asking: set[Session]) -> bool:
            there = [
                session in asking or self._outcomes[session.number].done() for session in sessions
            ]
            return any(there) if self._as_ready or self._draw is None else all(there)

        begin = time.perf_counter()
        queue, seconds = self._gateway.queue, self._record.wait_seconds
        while not queue.wait(ready, seconds):
            if queue.wait(lambda asking: bool(asking & set(sessions)), 0.0):
                self._warn()
                break
        self._waited(begin, time.perf_counter())
        if self._draw is None:
            return
        live = [each for each in sessions if not self._outcomes[each.number].done()]
        turns = self._gateway.queue.take(live)
        if turns:
            drawn = self._draw([turn.request(cohort) for turn in turns])
            self._calls += len(turns)
            for turn, one in zip(turns, drawn, strict=True):
                turn.deliver(one)

    def _warn(self) -> None:
        if not self._gateway.told_late:
            self._gateway.told_late = True
            _LOG.warning(
                "some sessions have asked nothing for %g s (agent.wait_seconds); the calls of the "
                "others are drawn without them, so that the run may differ from its repetition in "
                "last bits",
                self._record.wait_seconds,
            )

    def _finish(self, episode: Episode) -> None:
        """Make the rows of an episode whose agent has ended."""
        session = self._sessions.pop(episode.number)
        self._gateway.close(session)
        outcome = self._outcomes.pop(episode.number).result()
        with session.lock:
            tree = session.tree
            labels = tree.labels()
            records = call_records(tree, labels)
            trained = [self._trains(record) for record in records]
            episode.rows, episode.calls = tree.rows(trained), tree.call_records(trained)
        reward, fault = self._reward(outcome)
        if not fault and not episode.turns:
            fault, outcome = "exception", dataclasses.replace(
                outcome, text="the agent has made no call that is learned from"
            )  # fmt: skip
        if fault:
            episode.stop_reason, episode.fault = fault, outcome.text or fault
        else:
            episode.stop_reason = session.ended_by or DONE
        if episode.turns:
            last = episode.turns[-1]
            last.reward, last.seconds, last.waited = reward, outcome.seconds, session.waited
            last.metrics = session_metrics(session, labels, self._record.constrained)

    def _reward(self, outcome: AgentOutcome) -> tuple[float, str]:
        """The reward, and the fault; empty: none."""
        if outcome.fault == "timeout" and self._record.timeout_reward is not None:
            return self._record.timeout_reward, ""
        if outcome.fault:
            return 0.0, outcome.fault
        return (0.0, UNSCORED) if outcome.reward is None else (outcome.reward, "")


def session_metrics(
    session: Session, labels: Sequence[str], constrained: bool = False
) -> dict[str, float]:
    """Numbers of a session: its calls, those of each label, roots, retries and abandoned ones;
    with ``constrained`` the calls whose form was enforced, and the tokens that had no choice."""
    calls = session.tree.calls
    numbers = {"calls": len(calls), "roots": sum(call.place.parent is None for call in calls)}
    numbers |= {f"{name}_calls": labels.count(name) for name in LABELS if name != AGENT}
    if constrained:
        numbers["constrained_calls"] = sum(bool(call.drawn.forced) for call in calls)
        numbers["forced_tokens"] = sum(sum(call.drawn.forced) for call in calls)
    return {name: float(value) for name, value in (numbers | session.counts).items()}


def call_records(tree: CallTree, labels: Sequence[str]) -> list[dict[str, Any]]:
    """What ``train_call`` is told of each call: ``number``, ``parent``, ``label``, ``messages``,
    ``tools``, the ``answer``, and how many ``tokens`` it has."""
    return [
        {
            "number": call.number,
            "parent": call.place.parent,
            "label": label,
            "messages": call.place.chat.messages,
            "tools": call.place.chat.tools or [],
            "answer": dict(call.answer),
            "tokens": len(call.drawn.tokens),
        }
        for call, label in zip(tree.calls, labels, strict=True)
    ]
