"""Reward functions of users: loaded by `path.py:name`, called with a timeout, results validated.

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
from hjax.rewards.reward_results import RewardResult, uniform_result
from hjax.rewards.reward_serialization import (
    call_reward_function,
    deadline_message,
    set_sandbox,
)
from hjax.sandbox.sandbox_settings import SandboxSettings
from hjax.user_code import load_object

# In an isolated process, or in a thread of this one.
PROCESS, THREAD = RUN_MODES = ("process", "thread")
# The run occupies the accelerators, so JAX in a reward function's process uses the CPU.
_ENVIRONMENT = {"JAX_PLATFORMS": "cpu"}
_LOG = logging.getLogger(__name__)
_TRACEBACK = "Traceback (most recent call last):"
_thread_numbers = itertools.count(1)


def load_function(spec: str, key: str = "reward.function") -> Callable[..., Any]:
    """Load the function `name` from the file `path.py`, specified as "path.py:name".

    A path that does not exist is looked up in this directory, where the examples are. `key` is the
    setting that messages name. Raises ConfigError, one line, when there is no such file or name,
    the object is not callable, or the import fails (with the line that failed).
    """
    function = load_object(spec, key, beside=Path(__file__).parent)
    if not callable(function):
        name = spec.rpartition(":")[2]
        raise ConfigError(
            f"{key}={spec!r}: {name} is {function!r} ({type(function).__name__}), not a function"
        )
    return function


class RewardFunction:
    """Calls a reward function with a timeout and turns every outcome into a RewardResult.

    Errors of the function do not propagate. A call that fails (exception, timeout, no list or one
    of the wrong length) leaves all its sequences unscored; an invalid entry leaves its sequence
    unscored. `check_unscored` decides when that is too much.

    Calls run one after another in an isolated process, which is killed with its children when a
    call exceeds the timeout. hjax's own functions run in a thread. So do functions that another
    process cannot import (lambdas, closures, those of a notebook), with a warning in the log.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        timeout_seconds: float = 60.0,
        runs_in: str = PROCESS,
        sandbox: SandboxSettings | None = None,
    ):
        """Raises ConfigError if `function` can't take (prompts, responses, **columns).

        Args:
          function: the reward function; another may take its place at any time.
          timeout_seconds: for one call, including the validation of its values.
          runs_in: `process` (isolated) or `thread`. A thread cannot be killed: after a timeout it
            is abandoned.
          sandbox: passed to the function's method `use_sandbox`, if it has one; None: the default.
        """
        self.function = function
        self.timeout_seconds = timeout_seconds
        self.runs_in = runs_in
        self.sandbox = sandbox or SandboxSettings()
        self.name = getattr(function, "__name__", type(function).__name__)
        if timeout_seconds <= 0:
            raise ConfigError(f"reward.timeout_seconds={timeout_seconds}: it must be positive")
        if runs_in not in RUN_MODES:
            raise ConfigError(f"reward.runs_in={runs_in!r}: it must be {' or '.join(RUN_MODES)}")
        _check_signature(function, self.name)
        self._isolated: IsolatedProcess | None = None
        self._isolated_for: Any = None  # the function that `_isolated` belongs to
        self._lock = threading.Lock()

    def start(self) -> None:
        """Start the isolated process, so that it is ready by the first call."""
        if (isolated := self._process()) is not None:
            isolated.start()

    def close(self) -> None:
        """End the isolated process; a later call starts a new one."""
        with self._lock:
            if self._isolated is not None:
                self._isolated.close()

    def __call__(
        self,
        prompts: Sequence[Any],
        responses: Sequence[Any],
        columns: Mapping[str, Sequence[Any]],
        prompt_tokens: Sequence[Sequence[int]],
        response_tokens: Sequence[Sequence[int]],
    ) -> RewardResult:
        """Score N sequences.

        Args:
          prompts, responses: N strings each, or without a tokenizer N lists of token ids.
          columns: dataset columns, N entries each.
          prompt_tokens, response_tokens: N lists of ids without padding, passed to the function as
            further columns.
        """
        count = len(responses)
        if count == 0:
            return uniform_result("ok", 0, None)
        tokens = {"prompt_tokens": list(prompt_tokens), "response_tokens": list(response_tokens)}
        arguments = list(prompts), list(responses), {**columns, **tokens}
        isolated = self._process()
        if isolated is not None:
            try:
                return self._in_process(isolated, reward_serialization.serialize(arguments), count)
            except reward_serialization.NotSerializable as error:
                self._fall_back_to_thread(f"a call of it cannot be serialized ({error})")
        return self._in_thread(arguments)

    def _in_process(self, isolated: IsolatedProcess, request: bytes, count: int) -> RewardResult:
        try:
            return reward_serialization.from_bytes(isolated.call(request, self.timeout_seconds))
        except DeadlineExceeded:
            problem = f"{deadline_message(self.name, self.timeout_seconds)}; its process was ended"
            outcome = "timeout"
        except ProcessDied as error:
            outcome, problem = "killed", f"reward function {self.name}: {error}"
        except TaskFailed as error:
            if error.at_start:
                raise reward_serialization.NotSerializable(str(error)) from error
            outcome, problem = "exception", f"reward function {self.name}: {error}"
        isolated.start()  # for the next call
        return uniform_result(outcome, count, problem)

    def _in_thread(self, arguments: tuple[list, list, dict]) -> RewardResult:
        done: list[RewardResult] = []
        prompts, responses, columns = arguments
        seconds, function = self.timeout_seconds, self.function
        set_sandbox(function, self.sandbox)

        def work() -> None:
            done.append(
                call_reward_function(function, prompts, responses, columns, self.name, seconds)
            )

        label = f"hjax-reward-{next(_thread_numbers)}"
        thread = threading.Thread(target=work, name=label, daemon=True)
        thread.start()
        thread.join(seconds)
        if done:
            return done[0]
        problem = f"{deadline_message(self.name, seconds)}; its thread {label} was left behind"
        return uniform_result("timeout", len(responses), problem)

    def _process(self) -> IsolatedProcess | None:
        """The isolated process of the function; None: it runs in a thread."""
        if self.runs_in == THREAD:
            return None
        with self._lock:
            if self._isolated_for is not self.function:
                if self._isolated is not None:
                    self._isolated.close()
                self._isolated, self._isolated_for = None, self.function
                if not _is_builtin(self.function):
                    try:
                        payload = reward_serialization.worker_payload(
                            self.function, self.name, self.timeout_seconds, self.sandbox
                        )
                        self._isolated = IsolatedProcess(
                            "hjax.rewards.reward_serialization:make_handler", payload, _ENVIRONMENT
                        )
                    except reward_serialization.NotSerializable as error:
                        self._warn_runs_in_thread(str(error))
            return self._isolated

    def _fall_back_to_thread(self, reason: str) -> None:
        """Run later calls in a thread."""
        with self._lock:
            if self._isolated is not None:
                self._isolated.close()
                self._isolated = None
                self._warn_runs_in_thread(reason)

    def _warn_runs_in_thread(self, reason: str) -> None:
        _LOG.warning(
            "reward function %s runs in a thread, where it cannot be killed, not in an isolated "
            "process: %s; a function in a file, as path.py:name, can",
            self.name,
            reason,
        )

    def __getstate__(self) -> dict[str, Any]:
        kept = ("function", "timeout_seconds", "runs_in", "sandbox", "name")
        return {name: vars(self)[name] for name in kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _isolated=None, _isolated_for=None, _lock=threading.Lock())


def _is_builtin(function: Any) -> bool:
    """Whether a function, or the object it is a method of, is hjax's own, such as the verifier of
    a built-in task."""
    inner = getattr(function, "func", function)  # of a functools.partial
    owner = getattr(inner, "__self__", inner)
    module = getattr(owner, "__module__", None) or type(owner).__module__
    return module.partition(".")[0] == __name__.partition(".")[0]


def check_unscored(result: RewardResult, max_share: float) -> None:
    """Raise RunError, with outcomes and first traceback, above a share of unscored sequences."""
    if result.unscored <= max_share:
        return
    total = sum(result.outcomes.values())
    missing = total - result.outcomes["ok"]
    causes = ", ".join(f"{k} {v}" for k, v in result.outcomes.items() if v and k != "ok")
    cause, details = first_failure(result)
    raise RunError(
        f"{missing} of {total} sequences have no reward ({causes}); the share "
        f"{result.unscored:.3g} is above reward.max_unscored={max_share:g}: fix the reward "
        f"function, or raise that key{cause}",
        details=details,
    )


def first_failure(result: RewardResult) -> tuple[str, str]:
    """The first failure as the end of a message, and its traceback; both may be empty."""
    text = result.first_traceback or ""
    if not text:
        return "", ""
    if not text.startswith(_TRACEBACK):
        return f". The first failure: {text}", ""
    return f". The first failure: {text.splitlines()[-1]}", text


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
