"""The outermost of a command: its output never ends it, and it ends when it is done."""

import codecs
import contextlib
import errno
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn

from hjax.launch.signals import started_as

# How long threads and exit handlers may hold up the end of a command that is done.
_LEAVE_SECONDS = 5.0
# What a terminal or locale that knows ASCII alone is shown instead.
_PLAIN = {"→": "->", "±": "+-", "…": "...", "–": "-", "×": "x", "▶": ">", "≤": "<=", "·": "."}
_ERRORS = "hjax.plain"


def run_and_leave(main: Callable[[], int]) -> NoReturn:
    """Run a command's main function, and end the process with its exit status.

    Output that cannot be written is dropped, and the command goes on: a closed stream or pipe
    (`| head -1`) without a word, a full disk with one on the other stream. Threads that somebody's
    code has left behind, which Python would wait for without end, have a few seconds. Where the
    command is a guest (``%run -m`` in a notebook) the process is not ended, and keeps its streams.
    """
    if _is_guest(main):
        sys.exit(main())
    settle_streams()
    status: Any = 1
    try:
        status = main()
    except SystemExit as error:
        status = error.code
        raise
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        code = status if isinstance(status, int) else 0 if status is None else 1
        watch = threading.Thread(target=_leave, args=(code,), name="hjax-leave", daemon=True)
        watch.start()
    sys.exit(status)


def _is_guest(main: Callable[[], int]) -> bool:
    """Whether the process was started for something else than the module that has ``main``."""
    spec = main.__globals__.get("__spec__")  # None of a script, which is what was started
    return spec is not None and not started_as(spec.name.removesuffix(".__main__"))


def _leave(status: int) -> None:
    """End the process, if it has not ended by itself meanwhile."""
    time.sleep(_LEAVE_SECONDS)
    # Of the main thread's kind none runs any more; those that are no daemons are waited for.
    main = threading.main_thread()
    waited = [t.name for t in threading.enumerate() if not t.daemon and t is not main]
    if waited:
        names = ", ".join(waited[:3]) + (", ..." if len(waited) > 3 else "")
        print(f"hjax: left behind threads that do not end: {names}", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def settle_streams() -> None:
    """Make standard output and error take whatever is printed."""
    codecs.register_error(_ERRORS, _plain)
    for descriptor in (0, 1, 2):  # or the next file to be opened would be one of these
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        stream = getattr(sys, name)
        if stream is None:  # it was closed as the command started
            stream = open(os.devnull, "w", encoding="utf-8")
        with contextlib.suppress(Exception):  # a notebook's cannot, and need not
            if stream.errors == "strict":
                stream.reconfigure(errors=_ERRORS)
        setattr(sys, name, _Unfailing(stream, descriptor))


def _plain(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    letters = error.object[error.start : error.end]
    return "".join(_PLAIN.get(letter, "?") for letter in letters), error.end


class _Unfailing:
    """A text stream; what cannot be written to it is dropped from the first failure on."""

    def __init__(self, stream: Any, descriptor: int):
        self._stream, self._descriptor = stream, descriptor

    def write(self, text: str) -> int:
        """Write, or drop."""
        try:
            self._stream.write(text)
        except (OSError, ValueError) as error:
            self._give_up(error)
        return len(text)

    def writelines(self, lines: Any) -> None:
        """Write each."""
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Flush, or drop."""
        try:
            self._stream.flush()
        except (OSError, ValueError) as error:
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        """From here on to nowhere, what is in its buffer too."""
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, self._descriptor)
        os.close(nothing)
        # The reader of a pipe, or a terminal, that has gone knows so.
        gone = getattr(error, "errno", None) in (errno.EPIPE, errno.EIO, errno.EBADF)
        if self._descriptor == 1 and isinstance(error, OSError) and not gone:
            print(f"hjax: standard output cannot be written: {error.strerror}", file=sys.stderr)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def __iter__(self) -> Any:
        return iter(self._stream)
