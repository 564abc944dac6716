"""What runs in a process started by ``hjax.isolated_process``: a keeper, and a worker that it looks
after.

The keeper runs nothing but this file. It waits until the worker has ended, or whoever started them
has: then it ends all that the worker has started, also what has left its session or its parent,
and itself. The worker answers requests.
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

from hjax.machine import descendants, end_all

# Kinds of frames on the way of requests: what the worker is given first, that it is ready, a
# request, that it has been read, the answer to it, and the text of an error in place of READY or
# DONE.
GIVEN, READY, REQUEST, BEGUN, DONE, FAILED = (bytes([i]) for i in b"grqbdf")
# What the keeper says of a worker that has ended: the status as waitpid gives it.
STATUS = struct.Struct("<i")
# Before each frame: its kind, and how many bytes follow.
HEADING = struct.Struct("<cQ")


def put(way: socket.socket, kind: bytes, content: bytes = b"") -> None:
    """Send a frame."""
    way.sendall(HEADING.pack(kind, len(content)))
    if content:
        way.sendall(content)


def main(control: int, requests: int, entry: str) -> None:
    """Become the keeper, its worker a process of its own.

    Args:
      control: file descriptor of a socket whose other end says, by its end, that all is over.
      requests: that of one with frames.
      entry: ``module:name``, see ``hjax.isolated_process.IsolatedProcess``.
    """
    worker = os.fork()
    if worker:
        os.close(requests)
        _keep(socket.socket(fileno=control), worker)
    os.close(control)
    try:
        _work(socket.socket(fileno=requests), entry)
    finally:
        os._exit(0)


def _keep(control: socket.socket, worker: int) -> None:
    with contextlib.suppress(Exception):
        import ctypes

        # From here on orphans of the worker's are children of this process (Linux).
        ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (1, 2):  # else what is printed would never end
        os.dup2(nothing, stream)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    woken, wake = os.pipe()
    for end in (woken, wake):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    status, ways = None, [control.fileno(), woken]
    while status is None:
        status = _ended(worker)
        if status is None and control.fileno() in select.select(ways, [], [])[0]:
            break  # its other end is closed
        with contextlib.suppress(BlockingIOError):
            os.read(woken, 512)
    if status is not None:
        with contextlib.suppress(OSError):
            control.sendall(STATUS.pack(status))
    _end_everything()
    os._exit(0)


def _ended(worker: int) -> int | None:
    """The worker's status, None as long as it runs; children that it left behind are buried."""
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == worker:
                return status
            if pid == 0:
                return None
    return 0


def _end_everything() -> None:
    """All that is below this process. They are stopped first, so that nobody starts another."""
    found: list[int] = []
    while fresh := [pid for pid in descendants(os.getpid()) if pid not in found]:
        for pid in fresh:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGSTOP)
        found += fresh
    end_all(found)


def _work(requests: socket.socket, entry: str) -> None:
    with contextlib.suppress(OSError):  # short of memory, this one goes first
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("800")
    with contextlib.suppress(Exception):
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    me = os.getpid()
    got = _next(requests)
    if got is None:
        return
    try:
        module, _, name = entry.partition(":")
        answer: Callable[[bytes], bytes] = getattr(importlib.import_module(module), name)(got)
    except BaseException as error:
        put(requests, FAILED, _text(error))
        return
    put(requests, READY)
    while (request := _next(requests)) is not None:
        put(requests, BEGUN)
        try:
            kind, content = DONE, answer(request)
        except BaseException as error:
            kind, content = FAILED, _text(error)
        if os.getpid() != me:  # it has forked, and its copy has come here too
            os._exit(0)
        put(requests, kind, content)


def _next(requests: socket.socket) -> bytes | None:
    """The next frame's content; None: there will be none."""
    start = _exactly(requests, HEADING.size)
    return None if start is None else _exactly(requests, HEADING.unpack(start)[1])


def _exactly(requests: socket.socket, size: int) -> bytes | None:
    parts = bytearray()
    while len(parts) < size:
        part = requests.recv(min(size - len(parts), 1 << 20))
        if not part:
            return None
        parts += part
    return bytes(parts)


def _text(error: BaseException) -> bytes:
    said = "".join(traceback.format_exception_only(error)).strip()
    return said[-20_000:].encode(errors="replace")
