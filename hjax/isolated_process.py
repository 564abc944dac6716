"""Work done apart: in a process of its own, which is ended, with all it has started, when late.

For code that may hang, crash, leave threads behind or change the process it runs in: a user's
reward function, a chat template, a comparison of expressions. ``hjax/process_supervisor.py`` is
what runs there.
"""

from __future__ import annotations

import codecs
import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping
from typing import Any

from hjax.process_supervisor import BEGUN, DONE, FAILED, GIVEN, HEADING, READY, REQUEST, STATUS, put

# How long the process may take to start and import what it needs, and to read a request.
_START_SECONDS, _READ_SECONDS = 300.0, 10.0
# After its time is over an answer may still say so itself; then the process is ended.
_GRACE_SECONDS = 1.0
# Until its keeper has ended all it has started.
_END_SECONDS = 5.0


class DeadlineExceeded(Exception):
    """No answer in time; the process was ended."""


class ProcessDied(Exception):
    """The process ended by itself; the message says how."""


class TaskFailed(Exception):
    """What was asked raised an error there; the message is its text.

    Attributes:
      at_start: it raised before the first request, and the process is gone.
    """

    def __init__(self, text: str, at_start: bool = False):
        super().__init__(text)
        self.at_start = at_start


class IsolatedProcess:
    """A process that answers requests, one at a time. It starts with the first, or by ``start``.

    One that is late or dies is gone with all it has started, and the next request starts another.
    What it prints is printed here. It ends with this object, and with this process, however that
    ends.

    Args:
      entry: ``module:name`` of what makes the answers there: called with ``given`` it returns a
        function of a request. Both are bytes.
      given: for ``entry``.
      environment: variables that differ there.
      start_seconds: until it must have started.
    """

    def __init__(
        self,
        entry: str,
        given: bytes,
        environment: Mapping[str, str] | None = None,
        start_seconds: float = _START_SECONDS,
    ):
        self._entry, self._given = entry, given
        self._environment = dict(environment or {})
        self._start_seconds = start_seconds
        self._lock = threading.Lock()
        self._process: _Process | None = None

    def start(self) -> None:
        """Start the process, without waiting until it is ready."""
        with self._lock:
            self._started()

    def call(self, request: bytes, seconds: float) -> bytes:
        """The answer to a request.

        Args:
          request: of any size.
          seconds: for the answer, from when the process has read the request.

        Raises:
          Late: none in time.
          Died: the process ended.
          Failed: it raised an error.
        """
        with self._lock:
            process = self._started()
            try:
                if not process.ready:
                    process.expect(READY, self._start_seconds)
                    process.ready = True
                process.send(request, _READ_SECONDS + seconds)
                process.expect(BEGUN, _READ_SECONDS + seconds)
                return process.expect(DONE, seconds + _GRACE_SECONDS)
            except BaseException as error:
                # After Ctrl-C, too: its answer would be taken for the next one's.
                if not isinstance(error, TaskFailed) or error.at_start:
                    self._drop()
                if isinstance(error, TimeoutError):
                    raise DeadlineExceeded from None
                if isinstance(error, ProcessDied | OSError):
                    raise ProcessDied(str(error)) from None
                raise

    def close(self) -> None:
        """End the process, if there is one."""
        with self._lock:
            self._drop()

    def pid(self) -> int | None:
        """Of the keeper, above all that was started; None: there is no process."""
        return None if self._process is None else self._process.pid

    def _started(self) -> _Process:
        if self._process is None:
            self._process = _Process(self._entry, self._given, self._environment)
            self._finalizer = weakref.finalize(self, self._process.end)
        return self._process

    def _drop(self) -> None:
        if self._process is not None:
            self._finalizer()
            self._process = None


class _Process:
    """One that was started, and the two ways to it: of requests, and of its keeper."""

    def __init__(self, entry: str, given: bytes, environment: Mapping[str, str]):
        self.ready = False
        self._requests, theirs = socket.socketpair()
        self._control, kept = socket.socketpair()
        code = f"import sys; sys.path[:] = {sys.path!r}; from hjax.process_supervisor import main; "
        code += f"main({kept.fileno()}, {theirs.fileno()}, {entry!r})"
        try:
            self._popen = subprocess.Popen(
                [sys.executable, "-P", "-c", code],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env={**os.environ, **environment},
                pass_fds=(kept.fileno(), theirs.fileno()),
                start_new_session=True,  # Ctrl-C in a terminal is for this process to answer
            )
        finally:
            theirs.close()
            kept.close()
        self.pid = self._popen.pid
        self._printer = threading.Thread(
            target=_print_all,
            args=(self._popen.stdout, self._popen.stderr),
            name="hjax-apart-output",
            daemon=True,
        )
        self._printer.start()
        # Now, so that it imports what it needs while others work here.
        self._requests.settimeout(_READ_SECONDS)
        with contextlib.suppress(OSError):  # then it will not be ready either
            put(self._requests, GIVEN, given)

    def send(self, request: bytes, seconds: float) -> None:
        self._requests.settimeout(seconds)
        put(self._requests, REQUEST, request)

    def expect(self, kind: bytes, seconds: float) -> bytes:
        """What comes next, which must be of this kind."""
        deadline = time.monotonic() + seconds
        found, size = HEADING.unpack(self._read(HEADING.size, deadline))
        content = self._read(size, deadline)
        if found == FAILED:
            raise TaskFailed(content.decode(errors="replace"), at_start=not self.ready)
        if found != kind:
            raise ProcessDied("its process answered out of turn")
        return content

    def _read(self, size: int, deadline: float) -> bytes:
        parts = bytearray()
        while len(parts) < size:
            left = deadline - time.monotonic()
            ways = [self._requests, self._control]
            ready = select.select(ways, [], [], max(left, 0.0))[0] if left > 0 else []
            if self._requests in ready:
                part = self._requests.recv(min(size - len(parts), 1 << 20))
                if not part:
                    raise ProcessDied(self._how())
                parts += part
            elif ready:
                raise ProcessDied(self._how())
            else:
                raise TimeoutError
        return bytes(parts)

    def _how(self) -> str:
        """In words how the worker ended."""
        self._control.settimeout(_END_SECONDS)
        with contextlib.suppress(OSError):
            told = self._control.recv(STATUS.size)
            if len(told) == STATUS.size:
                status = os.waitstatus_to_exitcode(STATUS.unpack(told)[0])
                if status >= 0:
                    return f"its process ended with exit status {status}"
                with contextlib.suppress(ValueError):
                    return f"its process was ended by {signal.Signals(-status).name}"
                return f"its process was ended by signal {-status}"
        return "its process ended"

    def end(self) -> None:
        """End it and all it has started."""
        self._requests.close()
        self._control.close()  # on which the keeper ends the others, then itself
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.wait(_END_SECONDS)
        # Where somebody has ended or stopped the keeper: whoever is in its group.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self._popen.wait()
        self._printer.join(_GRACE_SECONDS)  # the last that it has printed


def _print_all(*pipes: Any) -> None:
    """Print here what comes, until it ends."""
    streams = dict(zip(pipes, ("stdout", "stderr")))
    texts = {pipe: codecs.getincrementaldecoder("utf-8")("replace") for pipe in pipes}
    while streams:
        for pipe in select.select(list(streams), [], [])[0]:
            part = os.read(pipe.fileno(), 1 << 16)
            stream = getattr(sys, streams[pipe], None)
            # Whatever ails the terminal is no affair of who waits for an answer.
            with contextlib.suppress(Exception):
                stream.write(texts[pipe].decode(part))  # type: ignore[union-attr]
                stream.flush()  # type: ignore[union-attr]
            if not part:
                del streams[pipe]
                pipe.close()
