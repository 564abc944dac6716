"""Ctrl-C, SIGTERM and a terminal that goes away: a run is saved, and before there is one all ends.

Imports nothing that takes long: with its first line the command holds signals back.
"""

import contextlib
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any

# Those that are asked for together are one request: a wrapper that passes a Ctrl-C on, which the
# terminal has sent to both.
TOGETHER_SECONDS = 1.0
STOPPING = "stopping after this step, and saving; once more to stop at once"


def started_as(module: str) -> bool:
    """Whether this process was started as ``python -m MODULE ...``, to run that and nothing else.

    What runs under the name ``__main__`` may be a guest: ``%run -m MODULE`` is one of a notebook's
    kernel.
    """
    before = sys.orig_argv[: len(sys.orig_argv) - len(sys.argv) + 1]
    return before[-2:] == ["-m", module] or before[-1] == f"-m{module}"


def _watched() -> list[int]:
    """Signals that stop a run; one that was ignored from the start (``nohup``) stays ignored."""
    found: list[int] = [signal.SIGINT, signal.SIGTERM]
    hangup = getattr(signal, "SIGHUP", None)
    if hangup is not None and signal.getsignal(hangup) != signal.SIG_IGN:
        found.append(hangup)
    return found


def begin(module: str) -> None:
    """The first thing that a command does, where it has the process for itself.

    From here on no signal is lost. The command may be started anew (``use_huge_pages``); what comes
    in between waits.
    """
    if not started_as(module):
        return
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_BLOCK, _watched())
    from hjax.launch.huge_pages import use_huge_pages

    use_huge_pages()
    SIGNALS.install()


class Signals:
    """What becomes of a command that is signalled.

    The first signal asks a trainer to save and return; another one later than ``TOGETHER_SECONDS``
    ends everything at once. Before there is a trainer the first one does, since nothing is lost
    then. Signals are waited for in a thread of their own, which neither interrupts the main one
    where it stands nor waits until it is done with a call of a library.

    Attributes:
      received: the first signal's number; 0: none came.
      own: whether the process is the command's own; a notebook's is not.
    """

    def __init__(self) -> None:
        self.received = 0
        self._since = 0.0
        self.own = False
        self._watched: list[int] = []
        self._trainer: Any = None
        self._display: Any = None
        self._ran = False
        self._lock = threading.Lock()

    def install(self) -> None:
        """From here on signals are handled; only in a process that is the command's own."""
        self.own = True
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        watched = self._watched = _watched()
        threading.Thread(target=self._listen, args=(reader, watched), daemon=True).start()
        for number in watched:
            signal.signal(number, lambda number, frame: None)  # the thread that listens has it
        os.register_at_fork(after_in_child=lambda: _forget(watched))
        if hasattr(signal, "pthread_sigmask"):
            signal.pthread_sigmask(signal.SIG_UNBLOCK, watched)

    @contextlib.contextmanager
    def watching(self, trainer: Any, display: Any) -> Iterator[None]:
        """There is something to save in this block.

        In a process that is somebody else's (a notebook's) Ctrl-C is handled in it alone, and once
        more means there what it did before.
        """
        with self._lock:
            self._trainer, self._display, self._ran = trainer, display, True
        main = threading.current_thread() is threading.main_thread()
        try:
            with contextlib.nullcontext() if self.own or not main else self._as_guest():
                yield
        finally:
            with self._lock:
                self._trainer = self._display = None

    @contextlib.contextmanager
    def _as_guest(self) -> Iterator[None]:
        before = signal.getsignal(signal.SIGINT)
        said: queue.SimpleQueue[str] = queue.SimpleQueue()  # a handler may put at any moment

        def handle(number: int, frame: FrameType | None) -> None:
            if self._is_first(number):
                said.put(STOPPING)
            elif not self._is_same() and callable(before):
                before(number, frame)

        threading.Thread(target=lambda: self._tell(said.get()), daemon=True).start()
        signal.signal(signal.SIGINT, handle)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)
            said.put("")

    def done(self) -> None:
        """The command is over: a signal changes nothing any more, its exit status neither.

        Python gives up its handlers before its process ends; who is ignored by then stays so.
        """
        for number in self._watched:
            signal.signal(number, signal.SIG_IGN)

    def _listen(self, reader: int, watched: list[int]) -> None:
        while numbers := os.read(reader, 1):
            if numbers[0] in watched:
                self.came(numbers[0])

    def came(self, number: int) -> None:
        """A signal has come, in a process of the command's own."""
        with self._lock:
            if self._trainer is None:
                name = signal.Signals(number).name
                when = "between two runs" if self._ran else "before the run began"
                _end(128 + number, f"hjax: stopped by {name} {when}\n")
            first = self._is_first(number)
        if first:
            self._tell(STOPPING)
        elif not self._is_same():
            _end(128 + number)

    def _is_first(self, number: int) -> bool:
        """Whether it is; then the trainer is asked to stop."""
        if self.received:
            return False
        self.received, self._since = number, time.monotonic()
        self._trainer.stop_requested = number
        return True

    def _is_same(self) -> bool:
        """Whether a further signal means no more than the first."""
        return time.monotonic() - self._since < TOGETHER_SECONDS

    def _tell(self, text: str) -> None:
        display = self._display
        with contextlib.suppress(Exception):  # a terminal that is no more
            if text and display is not None:
                display.message(text)


SIGNALS = Signals()  # of a process that is the command's own


def _forget(watched: list[int]) -> None:
    """In a fork, whose signals are its own: they mean what they do in any process."""
    signal.set_wakeup_fd(-1)
    for number in watched:
        usual = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        signal.signal(number, usual)


def _end(status: int, line: str = "") -> None:
    """End this process and its children, now."""
    with contextlib.suppress(Exception):
        if sys.stdout.isatty():
            os.write(sys.stdout.fileno(), b"\x1b[?25h\n")  # the live view hid the cursor
    with contextlib.suppress(OSError):
        os.write(2, line.encode())
    from hjax.machine import descendants, kill_all

    for _ in range(3):  # they may have children while they are ended
        kill_all(descendants(os.getpid()))
    os._exit(status)
