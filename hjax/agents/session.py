"""A session: one run of an agent, whose calls the policy answers."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from hjax.agents.call_tree import AgentCall, CallTree, Placement
from hjax.environments.episode import DrawnTurn, TurnRequest
from hjax.rollout.constrained_decoding import ConstraintCompiler
from hjax.rollout.requests import Request, RequestHandle, ResponseChunk

# The numbers by which draws are told apart: those of a session's further branches lie so far apart.
BRANCHES = 2**20


@dataclasses.dataclass
class PendingTurn:
    """A response that waits for the policy.

    Attributes:
      session: whose call it is.
      place: of the call.
      handle: of the response.
      stop: strings that end it.
      branch, first_draw: from which its draws follow, once it is taken.
      forced: of ``DrawnTurn``, once it is delivered.
      since: when it was asked for (``time.perf_counter``).
    """

    session: Session
    place: Placement
    handle: RequestHandle
    stop: tuple[str, ...]
    branch: int = 0
    first_draw: int = 0
    forced: Sequence[bool] = ()
    since: float = dataclasses.field(default_factory=time.perf_counter)

    @property
    def order(self) -> tuple[bytes, int]:
        """By which the turns of a session that wait together are sorted: its messages."""
        return self.place.keys.digests[-1], self.handle.request.choice

    def request(self, cohort: int) -> TurnRequest:
        """What the policy is to continue."""
        head = self.place.head
        return TurnRequest(
            episode=self.session.number + BRANCHES * self.branch,
            turn=len(self.session.tree.calls),
            prompt=self.place.prompt[:head],
            response=self.place.prompt[head:],
            first_draw=self.first_draw,
            max_tokens=self.handle.request.max_tokens,
            stop=self.stop,
            cohort=cohort,
            constraint=self.handle.request.constraint,
        )

    def deliver(self, drawn: DrawnTurn) -> None:
        """Hand the response over."""
        self.forced = drawn.forced
        self.session.waited += time.perf_counter() - self.since
        self.handle.deliver(
            ResponseChunk(
                tuple(drawn.tokens),
                tuple(drawn.logprobs["logprobs"]),
                tuple(drawn.logprobs["policy_logprobs"]),
                drawn.failed or ("stop" if drawn.ended else "length"),
            )
        )


class TurnQueue:
    """The turns that wait for the policy: the server's threads put them, the player takes them."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._turns: list[PendingTurn] = []

    def put(self, turn: PendingTurn) -> None:
        """Add a turn."""
        with self._changed:
            self._turns.append(turn)
            self._changed.notify_all()

    def notify(self, *_: object) -> None:
        """Have ``wait`` look again."""
        with self._changed:
            self._changed.notify_all()

    def wait(self, ready: Callable[[set[Session]], bool], seconds: float | None = None) -> bool:
        """Wait until ``ready``, which is given the sessions that have a turn here.

        Args:
          seconds: without a new turn or end after which it does not wait for more; None: no limit.

        Returns:
          whether it was ready.
        """
        with self._changed:
            while not ready(self._asking()):
                if not self._changed.wait(seconds):
                    return False
            return True

    def take(self, sessions: Iterable[Session]) -> list[PendingTurn]:
        """Remove and return the turns of sessions, in the order of the sessions."""
        with self._changed:
            found = []
            for session in sessions:
                own = [each for each in self._turns if each.session is session]
                found += session.take(sorted(own, key=lambda each: each.order))
            taken = set(map(id, found))
            self._turns = [each for each in self._turns if id(each) not in taken]
            return [each for each in found if not each.handle.cancelled]

    def _asking(self) -> set[Session]:
        self._turns = [each for each in self._turns if not each.handle.cancelled]
        return {each.session for each in self._turns}


class Session:
    """One run of an agent.

    Args:
      number: of its episode.
      tree: of its calls, empty.
      most_calls: that are answered; 0: any number.
      concurrent: calls that may run at a time.

    Attributes:
      key: 128 bits by which its agent is known.
      begun: calls that were begun, and have not failed; ``running``: requests of these.
      ended_by: the limit that has ended it, ``max_turns`` or ``context``; empty: none.
      refusals: how often it was told so.
      counts: of what happened, by name: ``retries``, ``abandoned``.
      waited: seconds that its calls waited for the policy, added up.
      sealed: whether its agent has ended.
    """

    def __init__(self, number: int, tree: CallTree, *, most_calls: int = 0, concurrent: int = 64):
        self.number, self.tree = number, tree
        self.key = secrets.token_urlsafe(16)
        self.most_calls, self.concurrent = most_calls, concurrent
        self.lock = threading.Lock()
        self.begun = self.running = 0
        self.ended_by, self.refusals, self.sealed = "", 0, False
        self.counts = {"retries": 0, "abandoned": 0}
        self.waited = 0.0
        self._branches = 0
        self._tails: dict[int, tuple[int, int]] = {}  # by branch, its last call and where it began
        self._drawing: set[int] = set()  # branches whose turn is not recorded yet

    def begin(self, count: int) -> None:
        """Begin a request of so many calls; on the server's event loop, as ``end``."""
        self.begun += count
        self.running += 1

    def end(self, count: int, *, abandoned: bool) -> None:
        """End a request; ``abandoned``: without its calls."""
        self.begun -= count * abandoned
        self.running -= 1

    def take(self, turns: Sequence[PendingTurn]) -> list[PendingTurn]:
        """Give turns their branches: a call that goes on from the last one of a branch stays in it,
        and its row in the cache; any other begins one."""
        with self.lock:
            for turn in turns:
                found = [
                    (branch, start)
                    for branch, (call, start) in self._tails.items()
                    if call == turn.place.parent and branch not in self._drawing
                ]
                branch, start = found[0] if found else (self._branches, len(turn.place.prompt))
                self._branches += not found
                self._drawing.add(branch)
                turn.branch, turn.first_draw = branch, len(turn.place.prompt) - start
        return list(turns)

    def abandon(self, turns: Iterable[PendingTurn]) -> None:
        """Turns whose answers are not sent: their branches are free again."""
        with self.lock:
            self._drawing -= {turn.branch for turn in turns}

    def record(
        self,
        turn: PendingTurn | None,
        place: Placement,
        drawn: DrawnTurn,
        answer: Mapping[str, Any],
        asked: Mapping[str, Any],
    ) -> AgentCall:
        """Record a call whose answer is sent.

        Args:
          turn: that it was; None: drawn by a service.
        """
        with self.lock:
            call = self.tree.add(place, drawn, answer, asked)
            if turn is not None:
                start = len(place.prompt) - turn.first_draw
                self._tails[turn.branch] = call.number, start
                self._drawing.discard(turn.branch)
        return call


class CallService:
    """What a server submits the responses of one call to: they wait for the policy, or another
    service draws them; and they are recorded.

    Args:
      session: whose call it is.
      queue: where they wait; None: ``service`` draws them.
      max_tokens: of a prompt and its response.
      service: a ``GenerationService``.
      constraints: compile what those that wait must match, to refuse what is invalid at once.
    """

    def __init__(
        self,
        session: Session,
        queue: TurnQueue | None,
        max_tokens: int,
        service: Any = None,
        constraints: ConstraintCompiler | None = None,
    ):
        self.max_tokens = max_tokens
        self.place: Placement | None = None
        self.stop: tuple[str, ...] = ()
        self.turns: list[PendingTurn] = []
        self._chunks: list[list[ResponseChunk]] = []
        self._session, self._queue, self._service = session, queue, service
        self._constraints = constraints

    def submit(
        self,
        request: Request,
        on_chunk: Callable[[ResponseChunk], None],
        matcher: Any = None,
    ) -> RequestHandle:
        """As of ``GenerationService``."""
        chunks: list[ResponseChunk] = []
        self._chunks.append(chunks)

        def take(chunk: ResponseChunk) -> None:
            chunks.append(chunk)
            on_chunk(chunk)

        if self._queue is None:
            handle: RequestHandle = self._service.submit(request, take, matcher)
            return handle
        assert self.place is not None
        handle = RequestHandle(request, None, take)
        turn = PendingTurn(self._session, self.place, handle, self.stop)
        self.turns.append(turn)
        self._queue.put(turn)
        return handle

    def prepare(self, request: Request) -> Any:
        """As of ``GenerationService``; a policy makes its matchers itself."""
        if self._service is not None:
            return self._service.prepare(request)
        if request.constraint is not None and self._constraints is not None:
            self._constraints.matcher(request.constraint, request.options, request.prompt)
        return None

    def drawn(self, index: int, count: int, ended: bool) -> DrawnTurn:
        """The first ``count`` tokens of a response."""
        chunks = self._chunks[index]
        tokens = [token for chunk in chunks for token in chunk.tokens][:count]
        logprobs = {
            name: [value for chunk in chunks for value in getattr(chunk, name)][:count]
            for name in ("logprobs", "policy_logprobs")
        }
        forced = self.turns[index].forced[:count] if self.turns else ()
        return DrawnTurn(tokens, logprobs, ended, forced)


def body_digest(body: Mapping[str, Any]) -> bytes:
    """By which a retry of a request is recognised."""
    text = json.dumps(body, sort_keys=True)
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=16).digest()
