"""Concurrent rewards: score responses during generation (``reward.while_generating``)."""

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
    """The responses to one prompt, as the arguments of ``RewardFunction``."""

    prompts: Sequence[Any]
    responses: Sequence[Any]
    columns: Mapping[str, Sequence[Any]]
    prompt_tokens: Sequence[Sequence[int]]
    response_tokens: Sequence[Sequence[int]]

    @classmethod
    def concatenated(cls, parts: Sequence[PromptResponses]) -> PromptResponses:
        """The responses to several prompts with the same columns."""
        names = parts[0].columns
        columns = {name: [x for each in parts for x in each.columns[name]] for name in names}
        others = [field.name for field in dataclasses.fields(cls) if field.name != "columns"]
        lists = {name: [x for each in parts for x in getattr(each, name)] for name in others}
        return cls(columns=columns, **lists)


class PendingReward(PendingValue):
    """The future reward of one response.

    Pickling waits for the reward. Each response is scored by one process; the other processes hold
    an empty ``PendingReward`` for it.

    Args:
      call: future of a call's result and of the row in it of the prompt's first response; None:
        another process scores this response.
      number: index of the response among those to its prompt.
    """

    def __init__(self, call: concurrent.futures.Future | None = None, number: int = 0):
        self.future, self._number = call, number

    def result(self) -> RewardResult:
        """The reward of this response; waits until it is scored."""
        if self.future is None:
            raise RunError("no process has scored this response")
        result, first = self.future.result()
        return result.row(first + self._number)

    def merged(self, others: Sequence[PendingReward]) -> PendingReward:
        """The one that is not empty, of the same response in several processes."""
        return next((x for x in (self, *others) if x.future is not None), self)

    def whole(self) -> PendingReward:
        """Itself."""
        return self

    def __reduce__(self) -> Any:
        if self.future is None:
            return PendingReward, ()
        error = self.future.exception()
        return _completed, ((None, error) if error is not None else (self.result(), None))

    @staticmethod
    def gathered(rewards: Sequence[PendingReward]) -> RewardResult:
        """The rewards of these responses; waits until all are scored."""
        return RewardResult.concatenated([reward.result() for reward in rewards])


def _completed(result: RewardResult | None, error: BaseException | None) -> PendingReward:
    """Unpickle a reward."""
    call: concurrent.futures.Future = concurrent.futures.Future()
    if error is not None:
        call.set_exception(error)
    else:
        call.set_result((result, 0))
    return PendingReward(call)


class ConcurrentScorer:
    """Calls a reward function in a background thread, on all queued responses at once.

    Calls do not overlap: reward functions need not be thread-safe.
    """

    def __init__(self, function: RewardFunction):
        self._function = function
        self._waiting: list[tuple[PromptResponses, concurrent.futures.Future]] = []
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def submit(self, answers: PromptResponses) -> list[PendingReward]:
        """Queue responses; returns a future reward for each, without waiting."""
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
                # Prompts of another dataset have other columns and wait for the next call.
                names = set(self._waiting[0][0].columns)
                batch = [x for x in self._waiting if set(x[0].columns) == names]
                self._waiting = [x for x in self._waiting if set(x[0].columns) != names]
            try:
                arguments = PromptResponses.concatenated([answers for answers, _ in batch])
                result = self._function(**vars(arguments))
            except BaseException as error:  # raised again by `result`
                for _, call in batch:
                    call.set_exception(error)
                continue
            first = 0
            for answers, call in batch:
                call.set_result((result, first))
                first += len(answers.responses)
