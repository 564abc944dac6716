"""A reward function, its calls and its results, written down for another process.

Functions travel by name, those of a user's file with its text. Calls are pickled here. Results are
numbers and JSON: nothing that a reward function's process says is unpickled. Where a function is
called, whatever happens becomes a RewardResult.
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

from hjax.rewards.reward_results import RewardResult, judged, whole
from hjax.user_code import (
    find_object,
    imported,
    load_object,
    provide_files,
    reduce_by_name,
    user_traceback,
)

# Of a failure's text at most so much is kept, its beginning and its end.
_MOST_CHARACTERS = 20_000
_HERE = str(Path(__file__).parent)


def called(
    function: Callable[..., Any],
    prompts: Sequence[Any],
    responses: Sequence[Any],
    columns: Mapping[str, Any],
    name: str,
    seconds: float,
) -> RewardResult:
    """Call a reward function here and now, and read its values.

    Nothing that it does raises, not even ``sys.exit``. An async one that is late is cancelled; of
    any other that was late, reading its values included, nothing counts.

    Args:
      function, prompts, responses: see ``hjax.rewards.function``.
      columns: those of the data set, ``prompt_tokens`` and ``response_tokens``.
      name: of the function, for messages.
      seconds: that it has.
    """
    count, begun = len(responses), time.monotonic()
    lengths = [len(tokens) for tokens in columns["response_tokens"]]
    try:
        returned = function(prompts, responses, **columns)
        if inspect.isawaitable(returned):
            returned = asyncio.run(_within(returned, seconds))
        result = judged(returned, lengths, name)
    except _DeadlineMissed:
        return whole("timeout", count, f"{late(name, seconds)}; it was cancelled")
    except BaseException as error:
        result = whole("exception", count, _failure(error))
    if time.monotonic() - begun > seconds:
        return whole("timeout", count, late(name, seconds))
    return result


def late(name: str, seconds: float) -> str:
    """Of a call that missed its deadline."""
    return f"reward function {name} took longer than {seconds:g} s"


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


def _failure(error: BaseException) -> str:
    """The traceback, from the user's first line on."""
    try:
        text = user_traceback(error, _HERE, asyncio.__path__[0])
    except Exception:  # its text cannot be had either
        text = type(error).__name__
    if len(text) > _MOST_CHARACTERS:
        text = f"{text[: _MOST_CHARACTERS // 2]} ... {text[-_MOST_CHARACTERS // 2 :]}"
    return text


_SIZE = struct.Struct("<Q")


class NotSerializable(Exception):
    """It has no name that another process could find it by; the message says why."""


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if getattr(value, "__module__", None) == "__main__" and hasattr(value, "__qualname__"):
            raise NotSerializable(f"{value.__qualname__} is defined in a notebook or a script")
        return reduce_by_name(value)


def written(value: Any) -> bytes:
    """A function, or what it is called with.

    Raises:
      NotShippable: it cannot be written down.
    """
    out = io.BytesIO()
    try:
        _Pickler(out, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    except NotSerializable:
        raise
    except Exception as error:  # pickle lets through whatever an object's methods raise
        raise NotSerializable(" ".join(f"{type(error).__name__}: {error}".split())[:200]) from error
    return out.getvalue()


def given(function: Callable[..., Any], name: str, seconds: float) -> bytes:
    """What ``answers`` needs; raises NotShippable."""
    held = find_object(function)
    if held is not None:  # an object that a file makes is made there too
        spec = "{}:{}".format(*held)
        how = pickle.dumps((load_object, (spec, name)))
    else:
        how = pickle.dumps((pickle.loads, (written(function),)))
    return pickle.dumps((imported(), how, name, seconds))


def answers(data: bytes) -> Callable[[bytes], bytes]:
    """What answers calls of a function, in its process."""
    files, how, name, seconds = pickle.loads(data)
    provide_files(files)
    find, arguments = pickle.loads(how)
    function = find(*arguments)

    def answer(request: bytes) -> bytes:
        prompts, responses, columns = pickle.loads(request)
        return to_bytes(called(function, prompts, responses, columns, name, seconds))

    return answer


def to_bytes(result: RewardResult) -> bytes:
    """A result, written down."""
    lengths = [-1 if values is None else len(values) for values in result.tokens]
    about = {
        "each": result.each,
        "problem": result.first_traceback,
        "names": list(result.named),
        "lengths": lengths,
    }
    head = json.dumps(about).encode()
    rows = [result.rewards, *result.named.values()]
    rows += [values for values in result.tokens if values is not None]
    numbers = b"".join(np.asarray(row, np.float32).tobytes() for row in rows)
    return _SIZE.pack(len(head)) + head + numbers


def from_bytes(data: bytes) -> RewardResult:
    """What ``to_bytes`` wrote down."""
    start = _SIZE.size + _SIZE.unpack_from(data)[0]
    about = json.loads(data[_SIZE.size : start])
    # A copy, for these bytes cannot be written to.
    numbers = np.frombuffer(data, np.float32, offset=start).copy()
    count = len(about["each"])
    sizes = [count, *(count for _ in about["names"]), *(n for n in about["lengths"] if n >= 0)]
    rows: Sequence[np.ndarray] = np.split(numbers, np.cumsum(sizes)[:-1])
    named = dict(zip(about["names"], rows[1:]))
    dense = iter(rows[1 + len(named) :])
    tokens = tuple(None if n < 0 else next(dense) for n in about["lengths"])
    return RewardResult(rows[0], tuple(about["each"]), about["problem"], named, tokens)
