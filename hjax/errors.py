"""The kinds of errors a user meets; each message is one line that says what to do next."""

import difflib
import errno
import os
import sys
import traceback
from collections.abc import Callable, Iterable
from types import TracebackType

# Prefix of the modules of users' files (``hjax.user_code``).
USER_MODULE = "hjax_user_"


class _OneLineError:
    """An error that a notebook shows as its one-line message, without frames."""

    details: str = ""

    def _render_traceback_(self) -> list[str]:
        """What IPython prints of it (the name is IPython's)."""
        return [*self.details.splitlines(), f"hjax: error: {one_line(self)}"]  # type: ignore[arg-type]


class ConfigError(_OneLineError, ValueError):
    """Bad input: a key, flag, file or shape. Commands print the message and exit with status 2."""


class DataError(ConfigError):
    """A dataset or file that cannot be used; the message names the file and the row.

    Args:
      *args: the message.
      kind: what is wrong with a row, without values: rows are counted by it.
    """

    def __init__(self, *args: object, kind: str = ""):
        super().__init__(*args)
        self.kind = kind


class RunError(_OneLineError, RuntimeError):
    """A failure while running (reward outage, non-finite updates). Commands exit with status 1.

    Args:
      *args: the message.
      details: the traceback of a function of the user's, as Python prints it; shown before the
        message.
    """

    def __init__(self, *args: object, details: str = ""):
        super().__init__(*args)
        self.details = details


class ProcessLost(RunError):
    """A process of a resource pool died, hangs or lost its network; the message names it."""


# Longest message that is shown.
MAX_MESSAGE_CHARS = 1500
# Precedes a process's log in the message of a ``ProcessLost``.
LOG_FOLLOWS = "; the last lines of"


def exit_status(run: Callable[[], int]) -> int:
    """The result of ``run``; 2 for wrong input, 1 for other errors, each printed in one line."""
    try:
        return run()
    except (ConfigError, RunError) as error:
        return _print_error(error, 2 if isinstance(error, ConfigError) else 1)
    except OSError as error:
        if isinstance(error, FileNotFoundError) and not _has_directory():
            said = "the current directory is not there any more; change to another (cd)"
            return _print_error(ConfigError(said), 2)
        # An error of the machine; without a file name its traceback says where.
        if not error.filename:
            traceback.print_exc()
        return _print_error(error, 1)
    except Exception as error:
        # An unknown kind of failure: print where it happened.
        traceback.print_exception(type(error), error, _user_frames(error))
        return _print_error(error, 1)


def _has_directory() -> bool:
    """Whether the current directory exists."""
    try:
        return bool(os.getcwd())
    except FileNotFoundError:
        return False


def _user_frames(error: BaseException) -> TracebackType | None:
    """The frames from the first one in a user's file on; all if there is none."""
    frames = error.__traceback__
    while frames is not None:
        if frames.tb_frame.f_globals.get("__name__", "").startswith(USER_MODULE):
            return frames
        frames = frames.tb_next
    return error.__traceback__


def output_error(setting: str, error: OSError) -> ConfigError | RunError:
    """The error for a path that cannot be written: wrong input, unless the disk is full.

    Args:
      setting: names the path.
    """
    kind = RunError if error.errno in (errno.ENOSPC, errno.EDQUOT) else ConfigError
    return kind(f"{setting}: {error.strerror}")


def safe_repr(value: object) -> str:
    """``repr`` of a value; its type if ``repr`` fails."""
    try:
        return repr(value)
    except Exception:
        return f"something that repr cannot show ({type(value).__name__})"


def truncate(text: str, limit: int) -> str:
    """A text cut to at most so many characters."""
    return text if len(text) <= limit else text[: limit - 3] + "..."


def short_repr(value: object, limit: int = 60) -> str:
    """A value's repr, cut to the length for messages."""
    return truncate(safe_repr(value), limit)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`did you mean NEAREST? `; empty if none of ``known`` is near."""
    near = difflib.get_close_matches(name, known, 1)
    return f"did you mean {near[0]}? " if near else ""


def one_line(error: BaseException) -> str:
    """An error's message in one line; of a long one the beginning and the end."""
    text = " ".join(str(error).split()) or type(error).__name__
    half = MAX_MESSAGE_CHARS // 2
    return text if len(text) <= 2 * half else f"{text[:half]} … {text[-half:]}"


def _print_error(error: Exception, status: int) -> int:
    text = one_line(error)
    if details := getattr(error, "details", ""):
        print(details, file=sys.stderr)
    if isinstance(error, OSError) and error.filename and error.strerror:
        text = f"{truncate(str(error.filename), MAX_MESSAGE_CHARS)}: {error.strerror}"
    elif not isinstance(error, (ConfigError, RunError)):
        text = f"{type(error).__name__}: {text}"
    print(f"hjax: error: {text}", file=sys.stderr)
    return status
