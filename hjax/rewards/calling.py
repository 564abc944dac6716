"""A reward function called, and what it returned read: whatever happens becomes a RewardResult."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hjax.rewards.judging import RewardResult, judged, whole
from hjax.user_files import own_traceback

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
        text = own_traceback(error, _HERE, asyncio.__path__[0])
    except Exception:  # its text cannot be had either
        text = type(error).__name__
    if len(text) > _MOST_CHARACTERS:
        text = f"{text[: _MOST_CHARACTERS // 2]} ... {text[-_MOST_CHARACTERS // 2 :]}"
    return text
