"""Reward functions from users' files: found by `path.py:name`, called under a deadline, judged.

The contract is `reward(prompts, responses, **columns) -> list of float or None`, sync or async; an
entry may be a list of float, one per response token, and several lists come as a dict by name.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hjax.errors import ConfigError, RunError
from hjax.rewards.judging import RewardResult, judged, whole
from hjax.user_files import load_object, own_traceback

_TRACEBACK = "Traceback (most recent call last):"
_thread_numbers = itertools.count(1)

# Files that one may look for here, and why they are not there.
_NOT_BUILT = {
    "code_tests.py": "rewards for code by its tests need a sandbox, which hjax does not have yet: "
    "run the tests in one of yours, from a function in a file of yours (docs/rewards.md)",
}


def load_function(spec: str, key: str = "reward.function") -> Callable[..., Any]:
    """The function `name` of the file `path.py`, given as "path.py:name".

    A path that doesn't exist as given is looked up beside this file, where the examples are.
    `key` names the setting in messages. Raises ConfigError, one line, when there is no such file
    or name, the name can't be called, or the file fails on import (with the line that failed).
    """
    where = spec.rpartition(":")[0]
    if where in _NOT_BUILT and not Path(where).is_file():
        raise ConfigError(f"{key}={spec!r}: {_NOT_BUILT[where]}")
    function = load_object(spec, key, beside=Path(__file__).parent)
    if not callable(function):
        name = spec.rpartition(":")[2]
        raise ConfigError(
            f"{key}={spec!r}: {name} is {function!r} ({type(function).__name__}), not a function"
        )
    return function


class RewardFunction:
    """Calls a reward function on a batch, and turns whatever happens into a RewardResult.

    Nothing that the function does raises: a whole call that fails (it raises, takes too long,
    returns no list or one of the wrong length) leaves every sequence unscored, a single odd entry
    that sequence alone. `check_unscored` decides when that is too much.
    """

    def __init__(self, function: Callable[..., Any], timeout_seconds: float = 60.0):
        """Raises ConfigError if `function` can't take (prompts, responses, **columns)."""
        self.function = function
        self.timeout_seconds = timeout_seconds
        self.name = getattr(function, "__name__", type(function).__name__)
        if timeout_seconds <= 0:
            raise ConfigError(f"reward.timeout_seconds={timeout_seconds}: it must be positive")
        _check_signature(function, self.name)

    def __call__(
        self,
        prompts: Sequence[Any],
        responses: Sequence[Any],
        columns: Mapping[str, Sequence[Any]],
        prompt_tokens: Sequence[Sequence[int]],
        response_tokens: Sequence[Sequence[int]],
    ) -> RewardResult:
        """Judges N sequences.

        Args:
          prompts, responses: N strings each, or without a tokenizer N lists of token ids.
          columns: dataset columns, N entries each.
          prompt_tokens, response_tokens: N lists of ids, without padding; the function gets them
            as further columns.

        The function runs in a thread of its own (so async ones work in a notebook, too). One that
        misses the deadline can't be stopped: its thread is left behind, named in the message.
        """
        count = len(responses)
        arguments = {
            **columns,
            "prompt_tokens": list(prompt_tokens),
            "response_tokens": list(response_tokens),
        }
        if count == 0:
            return whole("ok", 0, None)
        outcome, value = self._run(list(prompts), list(responses), arguments)
        if outcome != "ok":
            return whole(outcome, count, value)
        return judged(value, [len(tokens) for tokens in response_tokens], self.name)

    def _run(self, prompts: list, responses: list, arguments: dict) -> tuple[str, Any]:
        done: list[tuple[str, Any]] = []

        def work() -> None:
            try:
                returned = self.function(prompts, responses, **arguments)
                if inspect.isawaitable(returned):
                    returned = asyncio.run(_within(returned, self.timeout_seconds))
                done.append(("ok", returned))
            except _DeadlineMissed:
                done.append(("timeout", late + "; it was cancelled"))
            # A sys.exit in user code must end neither the run nor this thread unheard.
            except BaseException as error:
                done.append(("exception", own_traceback(error, __file__, asyncio.__path__[0])))

        label = f"hjax-reward-{next(_thread_numbers)}"
        late = f"reward function {self.name} took longer than {self.timeout_seconds:g} s"
        thread = threading.Thread(target=work, name=label, daemon=True)
        thread.start()
        thread.join(self.timeout_seconds)
        if done:
            return done[0]
        return "timeout", f"{late}; its thread {label} was left behind"


def check_unscored(result: RewardResult, max_share: float) -> None:
    """Raises RunError, with the outcomes and first traceback, above a share of unscored ones."""
    if result.unscored <= max_share:
        return
    total = sum(result.outcomes.values())
    missing = total - result.outcomes["ok"]
    causes = ", ".join(f"{k} {v}" for k, v in result.outcomes.items() if v and k != "ok")
    said, details = failure(result)
    raise RunError(
        f"{missing} of {total} sequences have no reward ({causes}); the share "
        f"{result.unscored:.3g} is above reward.max_unscored={max_share:g}: mend the reward "
        f"function, or raise that key{said}",
        details=details,
    )


def failure(result: RewardResult) -> tuple[str, str]:
    """What went wrong first, as the end of a message, and its traceback; both may be empty."""
    found = result.first_traceback or ""
    if not found:
        return "", ""
    if not found.startswith(_TRACEBACK):
        return f". The first failure: {found}", ""
    return f". The first failure: {found.splitlines()[-1]}", found


class _DeadlineMissed(Exception):
    pass


async def _within(awaitable: Any, seconds: float) -> Any:
    """Awaits at most so long, then cancels; the function's own TimeoutError stays its own."""
    task = asyncio.ensure_future(awaitable)
    await asyncio.wait({task}, timeout=seconds)
    if not task.done():
        task.cancel()
        raise _DeadlineMissed
    return task.result()


def _check_signature(function: Callable[..., Any], name: str) -> None:
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # builtins have none
        return
    kinds = [p.kind for p in parameters]
    by_position = [k for k in kinds if k in (k.POSITIONAL_ONLY, k.POSITIONAL_OR_KEYWORD)]
    takes_two = len(by_position) >= 2 or inspect.Parameter.VAR_POSITIONAL in kinds
    if not takes_two or inspect.Parameter.VAR_KEYWORD not in kinds:
        shown = ", ".join(map(str, parameters))
        raise ConfigError(
            f"reward function {name}({shown}) cannot be called: it must take "
            "(prompts, responses, **columns)"
        )
