"""Process exit of commands: output errors do not end them, leftover threads do not keep them."""

import codecs
import contextlib
import errno
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn

from hjax.launch.signals import is_main_module

# How long threads and exit handlers may delay the exit of a command.
_EXIT_GRACE_SECONDS = 5.0
# Replacements for terminals and locales with ASCII only.
_ASCII = {"→": "->", "±": "+-", "…": "...", "–": "-", "×": "x", "▶": ">", "≤": "<=", "·": "."}
_ERRORS = "hjax.plain"


def run_and_exit(main: Callable[[], int]) -> NoReturn:
    """Run a command's main function, and end the process with its exit status.

    Output that cannot be written is dropped and the command goes on: silently for a closed stream
    or pipe (`| head -1`), with a message on stderr for a full disk. Non-daemon threads of users'
    code, which Python would wait for forever, get a few seconds. In a notebook (``%run -m``) the
    process is not ended and keeps its streams.
    """
    if _is_guest(main):
        sys.exit(main())
    protect_streams()
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
        threading.Thread(target=_force_exit, args=(code,), name="hjax-leave", daemon=True).start()
    sys.exit(status)


def _is_guest(main: Callable[[], int]) -> bool:
    """Whether the process was started for another module than that of ``main`` (a notebook)."""
    spec = main.__globals__.get("__spec__")  # None for a script, which is what was started
    return spec is not None and not is_main_module(spec.name.removesuffix(".__main__"))


def _force_exit(status: int) -> None:
    """Kill the process if it has not exited within the grace period."""
    time.sleep(_EXIT_GRACE_SECONDS)
    main = threading.main_thread()
    running = [t.name for t in threading.enumerate() if not t.daemon and t is not main]
    if running:
        names = ", ".join(running[:3]) + (", ..." if len(running) > 3 else "")
        print(f"hjax: left behind threads that do not end: {names}", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def protect_streams() -> None:
    """Make standard output and error accept any text and survive write errors."""
    codecs.register_error(_ERRORS, _to_ascii)
    for descriptor in (0, 1, 2):  # a closed one would be reused by the next opened file
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        stream = getattr(sys, name)
        if stream is None:  # it was closed when the command started
            stream = open(os.devnull, "w", encoding="utf-8")
        with contextlib.suppress(Exception):  # a notebook's stream cannot be reconfigured
            if stream.errors == "strict":
                stream.reconfigure(errors=_ERRORS)
        setattr(sys, name, _Unfailing(stream, descriptor))


def _to_ascii(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    letters = error.object[error.start : error.end]
    return "".join(_ASCII.get(letter, "?") for letter in letters), error.end


class _Unfailing:
    """A text stream that drops all output after the first write error."""

    def __init__(self, stream: Any, descriptor: int):
        self._stream, self._descriptor = stream, descriptor

    def write(self, text: str) -> int:
        """Write, or drop."""
        try:
            self._stream.write(text)
        except (OSError, ValueError) as error:
            self._discard_output(error)
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
            self._discard_output(error)

    def _discard_output(self, error: Exception) -> None:
        """Redirect the stream, with its buffer, to /dev/null."""
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, self._descriptor)
        os.close(null)
        # No message if the reader of the pipe, or the terminal, has closed it.
        closed = getattr(error, "errno", None) in (errno.EPIPE, errno.EIO, errno.EBADF)
        if self._descriptor == 1 and isinstance(error, OSError) and not closed:
            print(f"hjax: standard output cannot be written: {error.strerror}", file=sys.stderr)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def __iter__(self) -> Any:
        return iter(self._stream)
