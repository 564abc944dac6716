"""Rewards while others are still generated: ``reward.while_generating``."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from hjax.errors import RunError
from hjax.rewards.function import RewardFunction
from hjax.rewards.reward_results import RewardResult
from hjax.sharded_values import PendingValue


@dataclasses.dataclass(frozen=True)
class PromptResponses:
    """One prompt's, as ``RewardFunction`` takes them."""

    prompts: Sequence[Any]
    responses: Sequence[Any]
    columns: Mapping[str, Sequence[Any]]
    prompt_tokens: Sequence[Sequence[int]]
    response_tokens: Sequence[Sequence[int]]

    @classmethod
    def joined(cls, some: Sequence[PromptResponses]) -> PromptResponses:
        """Of several prompts, with the same columns."""
        names = some[0].columns
        columns = {name: [x for each in some for x in each.columns[name]] for name in names}
        others = [field.name for field in dataclasses.fields(cls) if field.name != "columns"]
        lists = {name: [x for each in some for x in getattr(each, name)] for name in others}
        return cls(columns=columns, **lists)


class PendingReward(PendingValue):
    """What a function will have said of one response.

    Written down it is what the function has said: that waits. Of several processes one judges a
    response, the others have an empty verdict of it.

    Args:
      call: gives the result of a call, and where in it the first of a prompt's answers is; None:
        another process judges it.
      number: which of the prompt's answers it is.
    """

    def __init__(self, call: concurrent.futures.Future | None = None, number: int = 0):
        self.future, self._number = call, number

    def result(self) -> RewardResult:
        """Of this response; waits until it is judged."""
        if self.future is None:
            raise RunError("nobody has judged a response that another process was to judge")
        result, first = self.future.result()
        return result.row(first + self._number)

    def merged(self, others: Sequence[PendingReward]) -> PendingReward:
        """The one that is not empty."""
        return next((x for x in (self, *others) if x.future is not None), self)

    def whole(self) -> PendingReward:
        """Itself."""
        return self

    def __reduce__(self) -> Any:
        if self.future is None:
            return PendingReward, ()
        error = self.future.exception()
        return _said, ((None, error) if error is not None else (self.result(), None))

    @staticmethod
    def gathered(verdicts: Sequence[PendingReward]) -> RewardResult:
        """The result for these responses; waits until all are judged."""
        return RewardResult.joined([verdict.result() for verdict in verdicts])


def _said(result: RewardResult | None, error: BaseException | None) -> PendingReward:
    """A verdict that was written down."""
    call: concurrent.futures.Future = concurrent.futures.Future()
    if error is not None:
        call.set_exception(error)
    else:
        call.set_result((result, 0))
    return PendingReward(call)


class ConcurrentScorer:
    """Calls a reward function in a thread of its own, with all that wait at once.

    Calls do not overlap, as they do not elsewhere.
    """

    def __init__(self, function: RewardFunction):
        self._function = function
        self._waiting: list[tuple[PromptResponses, concurrent.futures.Future]] = []
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def submit(self, answers: PromptResponses) -> list[PendingReward]:
        """Returns at once, with a verdict for each response."""
        call: concurrent.futures.Future = concurrent.futures.Future()
        with self._lock:
            self._waiting.append((answers, call))
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="judge", daemon=True)
                self._thread.start()
        return [PendingReward(call, number) for number in range(len(answers.responses))]

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._thread = None
                    return
                # Those of another data set have other columns, and wait for the next call.
                names = set(self._waiting[0][0].columns)
                some = [x for x in self._waiting if set(x[0].columns) == names]
                self._waiting = [x for x in self._waiting if set(x[0].columns) != names]
            try:
                whole = PromptResponses.joined([answers for answers, _ in some])
                result = self._function(**vars(whole))
            except BaseException as error:  # whoever waits is told
                for _, call in some:
                    call.set_exception(error)
                continue
            first = 0
            for answers, call in some:
                call.set_result((result, first))
                first += len(answers.responses)
