"""Rewards while others are still generated: ``reward.while_generating``."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from hjax.rewards.function import RewardFunction
from hjax.rewards.judging import RewardResult


@dataclasses.dataclass(frozen=True)
class Answers:
    """One prompt's, as ``RewardFunction`` takes them."""

    prompts: Sequence[Any]
    responses: Sequence[Any]
    columns: Mapping[str, Sequence[Any]]
    prompt_tokens: Sequence[Sequence[int]]
    response_tokens: Sequence[Sequence[int]]

    @classmethod
    def joined(cls, some: Sequence[Answers]) -> Answers:
        """Of several prompts, with the same columns."""
        names = some[0].columns

        def of(field: str) -> list[Any]:
            return [x for each in some for x in getattr(each, field)]

        columns = {name: [x for each in some for x in each.columns[name]] for name in names}
        texts = of("prompts"), of("responses")
        return cls(*texts, columns, of("prompt_tokens"), of("response_tokens"))


class Verdict:
    """What a function will have said of one response.

    Args:
      call: gives the result of a call, and where in it the first of a prompt's answers is.
      number: which of the prompt's answers it is.
    """

    def __init__(self, call: concurrent.futures.Future, number: int):
        self._call, self._number = call, number

    @staticmethod
    def gathered(verdicts: Sequence[Verdict]) -> RewardResult:
        """The result for these responses; waits until all are judged."""
        rows: list[RewardResult] = []
        for verdict in verdicts:
            result, first = verdict._call.result()
            rows.append(result.row(first + verdict._number))
        return RewardResult.joined(rows)


class Judge:
    """Calls a reward function in a thread of its own, with all that wait at once.

    Calls do not overlap, as they do not elsewhere.
    """

    def __init__(self, function: RewardFunction):
        self._function = function
        self._waiting: list[tuple[Answers, concurrent.futures.Future]] = []
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def submit(self, answers: Answers) -> list[Verdict]:
        """Returns at once, with a verdict for each response."""
        call: concurrent.futures.Future = concurrent.futures.Future()
        with self._lock:
            self._waiting.append((answers, call))
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="judge", daemon=True)
                self._thread.start()
        return [Verdict(call, number) for number in range(len(answers.responses))]

    def _work(self) -> None:
        while True:
            with self._lock:
                some, self._waiting = self._waiting, []
                if not some:
                    self._thread = None
                    return
            whole = Answers.joined([answers for answers, _ in some])
            try:
                result = self._function(
                    whole.prompts,
                    whole.responses,
                    whole.columns,
                    whole.prompt_tokens,
                    whole.response_tokens,
                )
            except BaseException as error:  # whoever waits is told
                for _, call in some:
                    call.set_exception(error)
                continue
            first = 0
            for answers, call in some:
                call.set_result((result, first))
                first += len(answers.responses)
