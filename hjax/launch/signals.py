"""Signal handling of commands: Ctrl-C, SIGTERM and SIGHUP save a run, or end the command.

Has no slow imports, because commands block signals with their first line.
"""

import contextlib
import os
import queue
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any

# Signals within this time are one request: the terminal sends a Ctrl-C to a command and to its
# wrapper, which forwards it.
SAME_REQUEST_SECONDS = 1.0
STOPPING_MESSAGE = (
    "stopping after this step, and saving; press again after a second to stop at once"
)


def is_main_module(module: str) -> bool:
    """Whether this process was started as ``python -m MODULE ...``.

    A module named ``__main__`` may also run inside another process: ``%run -m MODULE`` runs it in a
    notebook's kernel.
    """
    before = sys.orig_argv[: len(sys.orig_argv) - len(sys.argv) + 1]
    return before[-2:] == ["-m", module] or before[-1] == f"-m{module}"


def _watched_signals() -> list[int]:
    """Signals that stop a run; one that was ignored from the start (``nohup``) stays ignored."""
    found: list[int] = [signal.SIGINT, signal.SIGTERM]
    hangup = getattr(signal, "SIGHUP", None)
    if hangup is not None and signal.getsignal(hangup) != signal.SIG_IGN:
        found.append(hangup)
    return found


def prepare_process(module: str) -> None:
    """Block signals, re-execute with huge pages if that helps, and install signal handlers.

    A command calls it first; it does nothing in a process that belongs to another program. Signals
    that arrive during the re-execution (``use_huge_pages``) stay pending.
    """
    if not is_main_module(module):
        return
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_BLOCK, _watched_signals())
    from hjax.launch.huge_pages import use_huge_pages

    use_huge_pages()
    SIGNALS.install()


class Signals:
    """Signal handlers of a command.

    The first signal asks the trainer to save and return. A second one, more than
    ``SAME_REQUEST_SECONDS`` later, ends the process at once. Before there is a trainer the first
    signal ends it, since nothing is lost then. A thread of its own waits for signals: it neither
    interrupts the main thread nor waits for a library call there to return.

    With a time of grace, SIGTERM ends a step that would not end in time (``_leave_in_time``).

    Attributes:
      received: the first signal's number; 0: none.
      own: whether the process belongs to the command; a notebook's does not.
    """

    def __init__(self) -> None:
        self.received = 0
        self._since = 0.0
        self.own = False
        self._watched: list[int] = []
        self._trainer: Any = None
        self._display: Any = None
        self._ran = False
        self._grace_seconds: float | None = None
        self._workdir: Any = None
        self._lock = threading.Lock()

    def install(self) -> None:
        """Install the handlers; only in a process that belongs to the command."""
        self.own = True
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        watched = self._watched = _watched_signals()
        threading.Thread(target=self._listen, args=(reader, watched), daemon=True).start()
        for number in watched:
            signal.signal(number, lambda number, frame: None)  # `_listen` handles it
        os.register_at_fork(after_in_child=lambda: _restore_default_handlers(watched))
        if hasattr(signal, "pthread_sigmask"):
            signal.pthread_sigmask(signal.SIG_UNBLOCK, watched)

    @contextlib.contextmanager
    def watching(
        self,
        trainer: Any,
        display: Any,
        grace_seconds: float | None = None,
        workdir: Any = None,
    ) -> Iterator[None]:
        """Within this block signals save the trainer's run.

        Args:
          trainer, display: of the run.
          grace_seconds: how long the process lives after SIGTERM; None: as long as it needs.
          workdir: of the command, that of all stages; None: there is none.

        In a notebook only Ctrl-C is handled, and a second one has its previous meaning there.
        """
        with self._lock:
            self._trainer, self._display, self._ran = trainer, display, True
            self._grace_seconds, self._workdir = grace_seconds, workdir
        main = threading.current_thread() is threading.main_thread()
        try:
            with contextlib.nullcontext() if self.own or not main else self._in_notebook():
                yield
        finally:
            with self._lock:
                self._trainer = self._display = None

    @contextlib.contextmanager
    def _in_notebook(self) -> Iterator[None]:
        before = signal.getsignal(signal.SIGINT)
        messages: queue.SimpleQueue[str] = queue.SimpleQueue()  # reentrant, for use in a handler

        def handle(number: int, frame: FrameType | None) -> None:
            if self._is_first(number):
                messages.put(STOPPING_MESSAGE)
            elif not self._is_repeat() and callable(before):
                before(number, frame)

        threading.Thread(target=lambda: self._show(messages.get()), daemon=True).start()
        signal.signal(signal.SIGINT, handle)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)
            messages.put("")

    def ignore_further(self) -> None:
        """Ignore signals at the end of the command, so that they do not change its exit status.

        Python removes its handlers before the process ends, but an ignored signal stays ignored.
        """
        for number in self._watched:
            signal.signal(number, signal.SIG_IGN)

    def _listen(self, reader: int, watched: list[int]) -> None:
        while numbers := os.read(reader, 1):
            if numbers[0] in watched:
                self.handle(numbers[0])

    def handle(self, number: int) -> None:
        """Handle a signal, in a process that belongs to the command."""
        with self._lock:
            if self._trainer is None:
                name = signal.Signals(number).name
                when = "between two runs" if self._ran else "before the run began"
                _exit_now(128 + number, f"hjax: stopped by {name} {when}\n")
            first = self._is_first(number)
            trainer, grace = self._trainer, self._grace_seconds
            where = "" if self._workdir is None else f" and --workdir={self._workdir}"
            go_on = f"go on with the same command{where}"
        if first:
            self._show(STOPPING_MESSAGE)
            if number == signal.SIGTERM and grace is not None:
                until = time.monotonic() + grace
                arguments = trainer, until, go_on
                threading.Thread(target=_leave_in_time, args=arguments, daemon=True).start()
        elif not self._is_repeat():
            _exit_now(128 + number, f"hjax: stopped at once; {_saved_so_far(trainer)}; {go_on}\n")

    def _is_first(self, number: int) -> bool:
        """Whether it is the first signal; if so, ask the trainer to stop."""
        if self.received:
            return False
        self.received, self._since = number, time.monotonic()
        self._trainer.stop_requested = number
        return True

    def _is_repeat(self) -> bool:
        """Whether a further signal is part of the same request as the first."""
        return time.monotonic() - self._since < SAME_REQUEST_SECONDS

    def _show(self, text: str) -> None:
        display = self._display
        with contextlib.suppress(Exception):  # the terminal may be closed
            if text and display is not None:
                display.message(text)


SIGNALS = Signals()  # of a process that belongs to the command


def _restore_default_handlers(watched: list[int]) -> None:
    """Restore Python's default signal handling, in a forked child."""
    signal.set_wakeup_fd(-1)
    for number in watched:
        default = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        signal.signal(number, default)


# How long ending this process, with its children, may take.
_EXIT_SECONDS = 1.0


def _saved_so_far(trainer: Any) -> str:
    """The newest complete checkpoint of a run, in words."""
    from hjax.files import saved_steps

    saved = None
    with contextlib.suppress(Exception):  # there may be no workdir yet
        saved = max(saved_steps(trainer.workdir.checkpoints), default=None)
    return "nothing saved since the start" if saved is None else f"saved up to step {saved}"


def _leave_in_time(trainer: Any, until: float, go_on: str) -> None:
    """End the process before a moment, unless the step in progress can end and be saved by then.

    A step that updates weights is not abandoned: it ends soon, and all of its work would be lost.

    Args:
      trainer: of the run that is to stop after its step.
      until: of ``time.monotonic``.
      go_on: what resumes it, for the last line.
    """
    while (left := trainer.seconds_left()) is not None:
        saving = 0.0 if trainer.checkpoints is None else trainer.checkpoints.save_seconds
        if time.monotonic() + left + saving + _EXIT_SECONDS > until:
            break
        time.sleep(0.1)
    else:
        return
    step = trainer.step_number + 1
    saved = None
    if trainer.checkpoints is not None:
        saved = trainer.checkpoints.join(max(until - _EXIT_SECONDS - time.monotonic(), 0.0))
    stands = "nothing is saved yet" if saved is None else f"checkpoint {saved} stands"
    _exit_now(
        128 + signal.SIGTERM,
        f"hjax: stopped by SIGTERM: step {step} would not have ended in time and is left; "
        f"{stands}, {go_on}\n",
    )


def _exit_now(status: int, line: str = "") -> None:
    """Kill this process and its children at once, and remove its temporary folders."""
    with contextlib.suppress(Exception):
        if sys.stdout.isatty():
            os.write(sys.stdout.fileno(), b"\x1b[?25h\n")  # the live view hid the cursor
    with contextlib.suppress(OSError):
        os.write(2, line.encode())
    from hjax.machine import TEMPORARY_FOLDERS, descendants, kill_all

    for _ in range(3):  # children may fork while they are killed
        kill_all(descendants(os.getpid()))
    for folder in list(TEMPORARY_FOLDERS):
        shutil.rmtree(folder, ignore_errors=True)
    os._exit(status)
