"""Serialization of reward functions, their calls and results for an isolated process.

Functions are sent by name, with the source text of users' files. Calls are pickled. Results are
numbers and JSON: output of a reward function's process is never unpickled. Every outcome of a call
becomes a RewardResult.
"""

import asyncio
import inspect
import io
import json
import pickle
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hjax.rewards.reward_results import RewardResult, parse_rewards, uniform_result
from hjax.sandbox.sandbox_settings import SandboxSettings
from hjax.user_code import (
    find_object,
    imported,
    load_object,
    provide_files,
    reduce_by_name,
    user_traceback,
)

# Characters kept at each end of a long traceback.
_HALF_TRACEBACK = 10_000
_HERE = str(Path(__file__).parent)


def call_reward_function(
    function: Callable[..., Any],
    prompts: Sequence[Any],
    responses: Sequence[Any],
    columns: Mapping[str, Any],
    name: str,
    seconds: float,
) -> RewardResult:
    """Call a reward function in this process and validate its values.

    No error propagates, not even ``sys.exit``. An async function that exceeds the timeout is
    cancelled; the values of any other function that exceeds it are discarded.

    Args:
      function, prompts, responses: see ``hjax.rewards.function``.
      columns: those of the dataset, ``prompt_tokens`` and ``response_tokens``.
      name: of the function, for messages.
      seconds: the timeout, including validation.
    """
    count, start = len(responses), time.monotonic()
    lengths = [len(tokens) for tokens in columns["response_tokens"]]
    try:
        returned = function(prompts, responses, **columns)
        if inspect.isawaitable(returned):
            returned = asyncio.run(_await_with_timeout(returned, seconds))
        result = parse_rewards(returned, lengths, name)
    except _DeadlineMissed:
        return uniform_result(
            "timeout", count, f"{deadline_message(name, seconds)}; it was cancelled"
        )
    except BaseException as error:
        result = uniform_result("exception", count, _traceback_text(error))
    if time.monotonic() - start > seconds:
        return uniform_result("timeout", count, deadline_message(name, seconds))
    return result


def deadline_message(name: str, seconds: float) -> str:
    """Message for a call that exceeded its timeout."""
    return f"reward function {name} took longer than {seconds:g} s"


class _DeadlineMissed(Exception):
    pass


async def _await_with_timeout(awaitable: Any, seconds: float) -> Any:
    """Await with a timeout, then cancel; a TimeoutError of the function itself propagates."""
    task = asyncio.ensure_future(awaitable)
    await asyncio.wait({task}, timeout=seconds)
    if not task.done():
        task.cancel()
        raise _DeadlineMissed
    return task.result()


def _traceback_text(error: BaseException) -> str:
    """The traceback, from the first line of the user's code."""
    try:
        text = user_traceback(error, _HERE, asyncio.__path__[0])
    except Exception:  # formatting the error may fail too
        text = type(error).__name__
    if len(text) > 2 * _HALF_TRACEBACK:
        text = f"{text[:_HALF_TRACEBACK]} ... {text[-_HALF_TRACEBACK:]}"
    return text


_SIZE = struct.Struct("<Q")


class NotSerializable(Exception):
    """The object cannot be sent to another process; the message says why."""


class _RewardPickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if getattr(value, "__module__", None) == "__main__" and hasattr(value, "__qualname__"):
            raise NotSerializable(f"{value.__qualname__} is defined in a notebook or a script")
        return reduce_by_name(value)


def serialize(value: Any) -> bytes:
    """Pickle a function or the arguments of a call; raises NotSerializable."""
    out = io.BytesIO()
    try:
        _RewardPickler(out, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    except NotSerializable:
        raise
    except Exception as error:  # pickle propagates any error of an object's methods
        raise NotSerializable(" ".join(f"{type(error).__name__}: {error}".split())[:200]) from error
    return out.getvalue()


def set_sandbox(function: Callable[..., Any], settings: SandboxSettings) -> None:
    """Tell a reward function that runs programs of a model where to run them."""
    if hasattr(function, "use_sandbox"):
        function.use_sandbox(settings)


def worker_payload(
    function: Callable[..., Any], name: str, seconds: float, sandbox: SandboxSettings
) -> bytes:
    """The argument of ``make_handler`` for a function; raises NotSerializable."""
    found = find_object(function)
    if found is not None:  # an object created by a user's file: the file is loaded there again
        loader = pickle.dumps((load_object, ("{}:{}".format(*found), name)))
    else:
        loader = pickle.dumps((pickle.loads, (serialize(function),)))
    return pickle.dumps((imported(), loader, name, seconds, sandbox))


def make_handler(data: bytes) -> Callable[[bytes], bytes]:
    """Handler of a reward function's calls, made in its isolated process."""
    files, loader, name, seconds, sandbox = pickle.loads(data)
    provide_files(files)
    load, arguments = pickle.loads(loader)
    function = load(*arguments)
    set_sandbox(function, sandbox)

    def answer(request: bytes) -> bytes:
        prompts, responses, columns = pickle.loads(request)
        return to_bytes(call_reward_function(function, prompts, responses, columns, name, seconds))

    return answer


def to_bytes(result: RewardResult) -> bytes:
    """Serialize a result: length of a JSON header, the header, float32 arrays."""
    header = {
        "each": result.row_outcomes,
        "problem": result.first_traceback,
        "names": list(result.named),
        "metrics": list(result.metrics),
        "lengths": [-1 if values is None else len(values) for values in result.tokens],
    }
    head = json.dumps(header).encode()
    rows = [result.rewards, *result.named.values(), *result.metrics.values()]
    rows += [values for values in result.tokens if values is not None]
    numbers = b"".join(np.asarray(row, np.float32).tobytes() for row in rows)
    return _SIZE.pack(len(head)) + head + numbers


def from_bytes(data: bytes) -> RewardResult:
    """The inverse of ``to_bytes``."""
    start = _SIZE.size + _SIZE.unpack_from(data)[0]
    header = json.loads(data[_SIZE.size : start])
    # A copy, because arrays over bytes are read-only.
    numbers = np.frombuffer(data, np.float32, offset=start).copy()
    count = len(header["each"])
    names = [*header["names"], *header["metrics"]]
    sizes = [count, *(count for _ in names), *(n for n in header["lengths"] if n >= 0)]
    rows: Sequence[np.ndarray] = np.split(numbers, np.cumsum(sizes)[:-1])
    named = dict(zip(header["names"], rows[1:]))
    metrics = dict(zip(header["metrics"], rows[1 + len(named) :]))
    dense = iter(rows[1 + len(names) :])
    tokens = tuple(None if n < 0 else next(dense) for n in header["lengths"])
    return RewardResult(rows[0], tuple(header["each"]), header["problem"], named, tokens, metrics)
