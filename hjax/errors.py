"""The kinds of failure a user meets; each message is one line that says what to do next."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable


class ConfigError(ValueError):
    """Bad input: a key, flag, file or shape. Commands print the message and exit with status 2."""


class DataError(ConfigError):
    """A dataset or file that cannot be used; the message names the file and the row."""


class RunError(RuntimeError):
    """A failure while running (reward outage, non-finite updates). Commands exit with status 1."""


class ProcessLost(RunError):
    """A process of a resource pool died, hangs or lost its network; the message names it."""


# Before the end of its log, in the message of a ``ProcessLost``.
LOG_FOLLOWS = "; the last lines of"


def exit_status(run: Callable[[], int]) -> int:
    """What ``run`` returns; 2 for wrong input, 1 for other errors, each said in one line."""
    try:
        return run()
    except ConfigError as error:
        return _fail(error, 2)
    except RunError as error:
        return _fail(error, 1)
    except Exception as error:
        # Not a known kind of failure: where it happened matters more than brevity.
        traceback.print_exc()
        return _fail(error, 1)


def _fail(error: Exception, status: int) -> int:
    text = " ".join(str(error).split()) or type(error).__name__
    if not isinstance(error, (ConfigError, RunError)):
        text = f"{type(error).__name__}: {text}"
    print(f"hjax: error: {text}", file=sys.stderr)
    return status
