"""The other end of ``hjax.isolated_process``: a supervisor process and its worker.

The supervisor runs nothing but this file. When the worker or the process that started them ends, it
kills all descendants of the worker, also those that left its session or its parent, and exits. The
worker answers requests.
"""

import contextlib
import importlib
import os
import select
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Callable

from hjax.machine import descendants, kill_all

# Kinds of frames: the worker's setup, that it is ready, a request, that the request was read, the
# answer, and an error's text in place of READY or DONE.
SETUP, READY, REQUEST, STARTED, DONE, FAILED = (bytes([i]) for i in b"grqbdf")
# The supervisor's message when the worker has ended: waitpid's status.
STATUS = struct.Struct("<i")
# Header of a frame: its kind, and the number of bytes that follow.
FRAME_HEADER = struct.Struct("<cQ")


def send_frame(connection: socket.socket, kind: bytes, content: bytes = b"") -> None:
    """Send a frame."""
    connection.sendall(FRAME_HEADER.pack(kind, len(content)))
    if content:
        connection.sendall(content)


def main(control: int, requests: int, entry: str) -> None:
    """Become the supervisor, and fork the worker.

    Args:
      control: file descriptor of a socket; the supervisor ends when the other end is closed.
      requests: file descriptor of the socket for frames.
      entry: ``module:name``, see ``hjax.isolated_process.IsolatedProcess``.
    """
    worker = os.fork()
    if worker:
        os.close(requests)
        _supervise(socket.socket(fileno=control), worker)
    os.close(control)
    try:
        _run_worker(socket.socket(fileno=requests), entry)
    finally:
        os._exit(0)


def _supervise(control: socket.socket, worker: int) -> None:
    with contextlib.suppress(Exception):
        import ctypes

        # Orphans of the worker become children of this process (Linux).
        ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (1, 2):  # else the output pipes would never close
        os.dup2(nothing, stream)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    woken, wake = os.pipe()
    for end in (woken, wake):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    status, sockets = None, [control.fileno(), woken]
    while status is None:
        status = _reap(worker)
        if status is None and control.fileno() in select.select(sockets, [], [])[0]:
            break  # its other end is closed
        with contextlib.suppress(BlockingIOError):
            os.read(woken, 512)
    if status is not None:
        with contextlib.suppress(OSError):
            control.sendall(STATUS.pack(status))
    kill_descendants()
    os._exit(0)


def _reap(worker: int) -> int | None:
    """The worker's status, None while it runs; also reaps orphaned children."""
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == worker:
                return status
            if pid == 0:
                return None
    return 0


def kill_descendants() -> None:
    """Kill all descendants. They are stopped first, so that none starts another."""
    found: list[int] = []
    while fresh := [pid for pid in descendants(os.getpid()) if pid not in found]:
        for pid in fresh:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGSTOP)
        found += fresh
    kill_all(found)


def _run_worker(requests: socket.socket, entry: str) -> None:
    with contextlib.suppress(OSError):  # the first to be killed if memory runs out
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("800")
    with contextlib.suppress(Exception):
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    me = os.getpid()
    got = _read_frame(requests)
    if got is None:
        return
    try:
        module, _, name = entry.partition(":")
        answer: Callable[[bytes], bytes] = getattr(importlib.import_module(module), name)(got)
    except BaseException as error:
        send_frame(requests, FAILED, _error_text(error))
        return
    send_frame(requests, READY)
    while (request := _read_frame(requests)) is not None:
        send_frame(requests, STARTED)
        try:
            kind, content = DONE, answer(request)
        except BaseException as error:
            kind, content = FAILED, _error_text(error)
        if os.getpid() != me:  # a copy that the request forked
            os._exit(0)
        send_frame(requests, kind, content)


def _read_frame(requests: socket.socket) -> bytes | None:
    """The next frame's content; None: the connection was closed."""
    start = _read_exactly(requests, FRAME_HEADER.size)
    return None if start is None else _read_exactly(requests, FRAME_HEADER.unpack(start)[1])


def _read_exactly(requests: socket.socket, size: int) -> bytes | None:
    parts = bytearray()
    while len(parts) < size:
        part = requests.recv(min(size - len(parts), 1 << 20))
        if not part:
            return None
        parts += part
    return bytes(parts)


def _error_text(error: BaseException) -> bytes:
    said = "".join(traceback.format_exception_only(error)).strip()
    return said[-20_000:].encode(errors="replace")
