"""The kinds of failure a user meets; each message is one line that says what to do next."""

import difflib
import sys
import traceback
from collections.abc import Callable, Iterable
from types import TracebackType

# What modules of users' files are called (``hjax.user_code``).
USER_MODULE = "hjax_user_"


class _Told:
    """An error whose message is all there is to say: a notebook shows it, and no frames."""

    details: str = ""

    def _render_traceback_(self) -> list[str]:
        """What IPython prints of it (the name is IPython's)."""
        lines = self.details.splitlines()
        return [*lines, f"hjax: error: {one_line(self)}"]  # type: ignore[arg-type]


class ConfigError(_Told, ValueError):
    """Bad input: a key, flag, file or shape. Commands print the message and exit with status 2."""


class DataError(ConfigError):
    """A dataset or file that cannot be used; the message names the file and the row."""


class RunError(_Told, RuntimeError):
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


# Characters of a message that is shown.
LONGEST = 1500
# Before the end of its log, in the message of a ``ProcessLost``.
LOG_FOLLOWS = "; the last lines of"


def exit_status(run: Callable[[], int]) -> int:
    """What ``run`` returns; 2 for wrong input, 1 for other errors, each said in one line."""
    try:
        return run()
    except (ConfigError, RunError) as error:
        return _fail(error, 2 if isinstance(error, ConfigError) else 1)
    except OSError as error:
        # Of the machine; one that names its file says where, too.
        if not error.filename:
            traceback.print_exc()
        return _fail(error, 1)
    except Exception as error:
        # Not a known kind of failure: where it happened matters more than brevity.
        traceback.print_exception(type(error), error, _of_the_user(error))
        return _fail(error, 1)


def _of_the_user(error: BaseException) -> TracebackType | None:
    """The frames from the first one in a file of the user's on; all where there is none."""
    frames = error.__traceback__
    while frames is not None:
        if frames.tb_frame.f_globals.get("__name__", "").startswith(USER_MODULE):
            return frames
        frames = frames.tb_next
    return error.__traceback__


def written(value: object) -> str:
    """A value as Python writes it; of one that refuses, its type."""
    try:
        return repr(value)
    except Exception:
        return f"something that repr cannot show ({type(value).__name__})"


def cut(text: str, limit: int) -> str:
    """A text of at most so many characters."""
    return text if len(text) <= limit else text[: limit - 3] + "..."


def short(value: object, limit: int = 60) -> str:
    """A value as messages show it."""
    return cut(written(value), limit)


def meant(name: str, known: Iterable[str]) -> str:
    """`did you mean NEAREST? `, empty where none of ``known`` is near."""
    near = difflib.get_close_matches(name, known, 1)
    return f"did you mean {near[0]}? " if near else ""


def one_line(error: BaseException) -> str:
    """Its message in a line; of a long one, in which a value stands, the beginning and the end."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= LONGEST else f"{text[: LONGEST // 2]} … {text[-LONGEST // 2 :]}"


def _fail(error: Exception, status: int) -> int:
    text = one_line(error)
    if details := getattr(error, "details", ""):
        print(details, file=sys.stderr)
    if not isinstance(error, (ConfigError, RunError)):
        text = f"{type(error).__name__}: {text}"
    print(f"hjax: error: {text}", file=sys.stderr)
    return status
