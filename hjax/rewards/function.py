"""Reward functions from users' files: found by `path.py:name`, called under a deadline, judged.

The contract is `reward(prompts, responses, **columns) -> list of float or None`, sync or async; an
entry may be a list of float, one per response token, and several lists come as a dict by name.
"""

import inspect
import itertools
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hjax.errors import ConfigError, RunError
from hjax.isolated_process import DeadlineExceeded, IsolatedProcess, ProcessDied, TaskFailed
from hjax.rewards import reward_serialization
from hjax.rewards.reward_results import RewardResult, whole
from hjax.rewards.reward_serialization import called, late
from hjax.user_code import load_object

# Where a function may run.
PROCESS, THREAD = PLACES = ("process", "thread")
# The accelerators are taken by the run: JAX in a reward function's process has the CPU.
_ENVIRONMENT = {"JAX_PLATFORMS": "cpu"}
_LOG = logging.getLogger(__name__)
_TRACEBACK = "Traceback (most recent call last):"
_thread_numbers = itertools.count(1)

# Files that one may look for here, and why they are not there.
_NOT_BUILT = {
    "code_tests.py": "rewards for code by its tests need a sandbox, which hjax does not have yet: "
    "run the tests in one of yours, from a function in a file of yours (docs/rewards.md)"
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

    It runs in a process of its own, one call after another, which ends with all it has started when
    a call is late. What no other process could find by its name (a lambda, a closure, what a
    notebook defines) runs in a thread, and the log says so; so do hjax's own functions.
    """

    def __init__(
        self, function: Callable[..., Any], timeout_seconds: float = 60.0, runs_in: str = PROCESS
    ):
        """Raises ConfigError if `function` can't take (prompts, responses, **columns).

        Args:
          function: the reward function; another may take its place at any time.
          timeout_seconds: for a call, what is read of its values included.
          runs_in: a `process` of its own, or a `thread` here. Nothing can end a thread: one that is
            late is left behind.
        """
        self.function = function
        self.timeout_seconds = timeout_seconds
        self.runs_in = runs_in
        self.name = getattr(function, "__name__", type(function).__name__)
        if timeout_seconds <= 0:
            raise ConfigError(f"reward.timeout_seconds={timeout_seconds}: it must be positive")
        if runs_in not in PLACES:
            raise ConfigError(f"reward.runs_in={runs_in!r}: it must be {' or '.join(PLACES)}")
        _check_signature(function, self.name)
        self._apart: IsolatedProcess | None = None
        self._of: Any = None  # the function for which that is, or was found to be none
        self._lock = threading.Lock()

    def start(self) -> None:
        """Start its process, so that it is ready by the first call."""
        if (apart := self._process()) is not None:
            apart.start()

    def close(self) -> None:
        """End its process; another call would start one."""
        with self._lock:
            if self._apart is not None:
                self._apart.close()

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
        """
        count = len(responses)
        if count == 0:
            return whole("ok", 0, None)
        beside = {"prompt_tokens": list(prompt_tokens), "response_tokens": list(response_tokens)}
        arguments = list(prompts), list(responses), {**columns, **beside}
        apart = self._process()
        if apart is not None:
            try:
                return self._in_process(apart, reward_serialization.written(arguments), count)
            except reward_serialization.NotSerializable as error:
                self._stay_here(f"a call of it cannot be written down ({error})")
        return self._in_thread(arguments, count)

    def _in_process(self, apart: IsolatedProcess, request: bytes, count: int) -> RewardResult:
        try:
            return reward_serialization.from_bytes(apart.call(request, self.timeout_seconds))
        except DeadlineExceeded:
            problem = f"{late(self.name, self.timeout_seconds)}; its process was ended"
            outcome = "timeout"
        except ProcessDied as error:
            outcome, problem = "killed", f"reward function {self.name}: {error}"
        except TaskFailed as error:
            if error.at_start:
                raise reward_serialization.NotSerializable(str(error)) from error
            outcome, problem = "exception", f"reward function {self.name}: {error}"
        apart.start()  # for the next call
        return whole(outcome, count, problem)

    def _in_thread(self, arguments: tuple[list, list, dict], count: int) -> RewardResult:
        done: list[RewardResult] = []
        seconds, function = self.timeout_seconds, self.function

        def work() -> None:
            done.append(called(function, *arguments, self.name, seconds))

        label = f"hjax-reward-{next(_thread_numbers)}"
        thread = threading.Thread(target=work, name=label, daemon=True)
        thread.start()
        thread.join(seconds)
        if done:
            return done[0]
        problem = f"{late(self.name, seconds)}; its thread {label} was left behind"
        return whole("timeout", count, problem)

    def _process(self) -> IsolatedProcess | None:
        """Where the function runs; None: in a thread here."""
        if self.runs_in == THREAD:
            return None
        with self._lock:
            if self._of is not self.function:
                if self._apart is not None:
                    self._apart.close()
                self._apart, self._of = None, self.function
                if not _is_ours(self.function):
                    try:
                        given = reward_serialization.given(
                            self.function, self.name, self.timeout_seconds
                        )
                        self._apart = IsolatedProcess(
                            "hjax.rewards.reward_serialization:answers", given, _ENVIRONMENT
                        )
                    except reward_serialization.NotSerializable as error:
                        self._say_thread(str(error))
            return self._apart

    def _stay_here(self, why: str) -> None:
        """From now on in a thread."""
        with self._lock:
            if self._apart is not None:
                self._apart.close()
                self._apart = None
                self._say_thread(why)

    def _say_thread(self, why: str) -> None:
        _LOG.warning(
            "reward function %s runs in a thread, where it cannot be ended, and not in a process "
            "of its own: %s; a function of a file of its own, as path.py:name, can",
            self.name,
            why,
        )

    def __getstate__(self) -> dict[str, Any]:
        kept = ("function", "timeout_seconds", "runs_in", "name")
        return {name: vars(self)[name] for name in kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _apart=None, _of=None, _lock=threading.Lock())


def _is_ours(function: Any) -> bool:
    """Whether a function, or the object whose method it is, is hjax's own: the verifier of a
    built-in task."""
    inner = getattr(function, "func", function)  # of a functools.partial
    of = getattr(inner, "__self__", inner)
    module = getattr(of, "__module__", None) or type(of).__module__
    return module.partition(".")[0] == __name__.partition(".")[0]


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
