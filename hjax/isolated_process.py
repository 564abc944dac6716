"""Isolated worker process for code that may hang, crash, leave threads or change its process.

Examples are a user's reward function, a chat template, a comparison of expressions. A process that
exceeds its timeout is killed with all its descendants. ``hjax/process_supervisor.py`` runs there.
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

from hjax import process_supervisor as frames
from hjax.process_supervisor import send_frame

# Timeouts: to start and import, and to read a request.
_START_SECONDS, _READ_SECONDS = 300.0, 10.0
# After a request's timeout a process may still report it itself; then it is killed.
_GRACE_SECONDS = 1.0
# Timeout for the supervisor to kill all descendants.
_END_SECONDS = 5.0
# Bytes of an answer at most, and of output that is printed: at once, and then per second.
_ANSWER_BYTES = 2**30
_OUTPUT_BYTES, _OUTPUT_RATE = 2**26, 2**16
_FLOOD = "\nhjax: this process prints too much; the rest is left out until it prints less\n"


class DeadlineExceeded(Exception):
    """No answer within the timeout; the process was killed."""


class ProcessDied(Exception):
    """The process ended by itself; the message says how."""


class TaskFailed(Exception):
    """The request raised an error there; the message is its text.

    Attributes:
      at_start: it was raised before the first request, and the process has ended.
    """

    def __init__(self, text: str, at_start: bool = False):
        super().__init__(text)
        self.at_start = at_start


class IsolatedProcess:
    """A subprocess that answers requests one at a time; started by the first, or by ``start``.

    If it exceeds a timeout or dies it is killed with all its descendants, and the next request
    starts another. Its output is printed here. It ends with this object, and with this process,
    however that ends.

    Args:
      entry: ``module:name`` of a function that is called there with ``setup`` and returns a
        function of a request. Both arguments are bytes.
      setup: for ``entry``.
      environment: variables to set there.
      start_seconds: timeout for its start.
    """

    def __init__(
        self,
        entry: str,
        setup: bytes,
        environment: Mapping[str, str] | None = None,
        start_seconds: float = _START_SECONDS,
    ):
        self._entry, self._setup = entry, setup
        self._environment = dict(environment or {})
        self._start_seconds = start_seconds
        self._lock = threading.Lock()
        self._process: _Process | None = None

    def start(self) -> None:
        """Start the process without waiting until it is ready."""
        with self._lock:
            self._ensure_started()

    def call(self, request: bytes, seconds: float, grace: float = _GRACE_SECONDS) -> bytes:
        """The answer to a request.

        Args:
          request: of any size.
          seconds: timeout of the answer, from when the process has read the request.
          grace: further seconds for a process that reports a timeout itself.

        Raises:
          DeadlineExceeded: no answer in time.
          ProcessDied: the process ended.
          TaskFailed: the request raised an error.
        """
        with self._lock:
            process = self._ensure_started()
            try:
                if not process.ready:
                    process.expect(frames.READY, self._start_seconds)
                    process.ready = True
                process.send(request, _READ_SECONDS + seconds)
                process.expect(frames.STARTED, _READ_SECONDS + seconds)
                return process.expect(frames.DONE, seconds + grace)
            except BaseException as error:
                # After Ctrl-C too: a late answer would be taken for the next request's.
                if not isinstance(error, TaskFailed) or error.at_start:
                    self._discard()
                if isinstance(error, TimeoutError):
                    raise DeadlineExceeded from None
                if isinstance(error, ProcessDied | OSError):
                    raise ProcessDied(str(error)) from None
                raise

    def interrupt(self) -> None:
        """Kill the process of a call in progress, which then raises ProcessDied; does not wait."""
        if (process := self._process) is not None:
            process.interrupt()

    def close(self) -> None:
        """Kill the process, if there is one, after the call in progress."""
        with self._lock:
            self._discard()

    def pid(self) -> int | None:
        """Process id of the supervisor, the parent of all that was started; None: no process."""
        return None if self._process is None else self._process.pid

    def _ensure_started(self) -> _Process:
        if self._process is None:
            self._process = _Process(self._entry, self._setup, self._environment)
            self._finalizer = weakref.finalize(self, self._process.end)
        return self._process

    def _discard(self) -> None:
        if self._process is not None:
            self._finalizer()
            self._process = None


class _Process:
    """A started process with its two sockets: for requests, and to its supervisor."""

    def __init__(self, entry: str, setup: bytes, environment: Mapping[str, str]):
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
            target=_forward_output,
            args=(self._popen.stdout, self._popen.stderr),
            name="hjax-isolated-output",
            daemon=True,
        )
        self._printer.start()
        # Sent now, so that it imports in the background.
        self._requests.settimeout(_READ_SECONDS)
        with contextlib.suppress(OSError):  # then it will not be ready either
            send_frame(self._requests, frames.SETUP, setup)

    def send(self, request: bytes, seconds: float) -> None:
        self._requests.settimeout(seconds)
        send_frame(self._requests, frames.REQUEST, request)

    def expect(self, kind: bytes, seconds: float) -> bytes:
        """The content of the next frame, which must be of this kind."""
        deadline = time.monotonic() + seconds
        found, size = frames.FRAME_HEADER.unpack(self._read(frames.FRAME_HEADER.size, deadline))
        if found not in (kind, frames.FAILED):  # what the task wrote to the socket has any size
            raise ProcessDied("its process answered out of turn")
        if size > _ANSWER_BYTES:
            raise ProcessDied(f"its process answered with {size} bytes; at most {_ANSWER_BYTES}")
        content = self._read(size, deadline)
        if found == frames.FAILED:
            raise TaskFailed(content.decode(errors="replace"), at_start=not self.ready)
        return content

    def _read(self, size: int, deadline: float) -> bytes:
        parts = bytearray()
        while len(parts) < size:
            left = deadline - time.monotonic()
            sockets = [self._requests, self._control]
            ready = select.select(sockets, [], [], max(left, 0.0))[0] if left > 0 else []
            if self._requests in ready:
                part = self._requests.recv(min(size - len(parts), 1 << 20))
                if not part:
                    raise ProcessDied(self._exit_description())
                parts += part
            elif ready:
                raise ProcessDied(self._exit_description())
            else:
                raise TimeoutError
        return bytes(parts)

    def _exit_description(self) -> str:
        """How the worker ended, in words."""
        self._control.settimeout(_END_SECONDS)
        with contextlib.suppress(OSError):
            status_bytes = self._control.recv(frames.STATUS.size)
            if len(status_bytes) == frames.STATUS.size:
                status = os.waitstatus_to_exitcode(frames.STATUS.unpack(status_bytes)[0])
                if status >= 0:
                    return f"its process ended with exit status {status}"
                with contextlib.suppress(ValueError):
                    return f"its process was ended by {signal.Signals(-status).name}"
                return f"its process was ended by signal {-status}"
        return "its process ended"

    def interrupt(self) -> None:
        """Tell the supervisor to kill it and all its descendants."""
        with contextlib.suppress(OSError):  # it has ended
            self._control.shutdown(socket.SHUT_RDWR)

    def end(self) -> None:
        """Kill it and all its descendants."""
        self._requests.close()
        self._control.close()  # tells the supervisor to kill the others, then itself
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.wait(_END_SECONDS)
        # If the supervisor itself was killed or stopped: its process group.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self._popen.wait()
        self._printer.join(_GRACE_SECONDS)  # its last output


def _forward_output(*pipes: Any) -> None:
    """Print the output of these pipes here, until they end, but no flood that would fill a disk."""
    room, last, left_out = float(_OUTPUT_BYTES), time.monotonic(), False
    streams = dict(zip(pipes, ("stdout", "stderr")))
    texts = {pipe: codecs.getincrementaldecoder("utf-8")("replace") for pipe in pipes}
    while streams:
        for pipe in select.select(list(streams), [], [])[0]:
            part = os.read(pipe.fileno(), 1 << 16)
            stream = getattr(sys, streams[pipe], None)
            text = texts[pipe].decode(part)
            now = time.monotonic()
            room, last = min(room + _OUTPUT_RATE * (now - last), _OUTPUT_BYTES), now
            left_out = left_out and room < _OUTPUT_BYTES / 2
            if left_out:
                text = ""
            elif room < len(part):
                text, left_out, room = _FLOOD, True, 0.0
            else:
                room -= len(part)
            # Errors of the terminal must not fail the request.
            with contextlib.suppress(Exception):
                stream.write(text)  # type: ignore[union-attr]
                stream.flush()  # type: ignore[union-attr]
            if not part:
                del streams[pipe]
                pipe.close()
