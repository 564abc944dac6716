"""Progress of a job with several parts: a bar in a terminal, plain lines elsewhere."""

import contextlib
import os
import sys
import time
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn
from rich.text import Text

from hjax.show.format import job_times

_PLAIN_INTERVAL_SECONDS = 5.0
_WIDE = 80  # columns needed for a bar and the remaining time


class PartsDisplay(contextlib.AbstractContextManager):
    """Shows a job's parts as they start; nothing before the first. Use it in a ``with``.

    Args:
      title: of the job.
      enabled: whether to show anything.
      stream: where to write; None: standard output. A terminal gets a bar.
    """

    def __init__(self, title: str, enabled: bool = True, stream: TextIO | None = None):
        self._title = title
        self._enabled = enabled
        self._stream = stream or sys.stdout
        self._live = self._stream.isatty() and os.environ.get("TERM", "dumb") != "dumb"
        self._bar: Any = None
        self._started = self._last_line = 0.0

    def __exit__(self, *raised: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, done: int, total: int, what: str) -> None:
        """``done`` of ``total`` parts are done; ``what`` starts, or is empty when all are done."""
        if not self._enabled:
            return
        if not self._started:
            self._started = time.monotonic()
        (self._draw if self._live else self._write)(done, total, what or "done")

    def _draw(self, done: int, total: int, what: str) -> None:
        if self._bar is None:
            self._bar = _bar(self._stream)
            self._bar.add_task(self._title, what=what)
            self._bar.start()
        self._bar.update(self._bar.task_ids[0], completed=done, total=total, what=what)

    def _write(self, done: int, total: int, what: str) -> None:
        now = time.monotonic()
        if 0 < done < total and now - self._last_line < _PLAIN_INTERVAL_SECONDS:
            return
        self._last_line = now
        # A closed pipe (`| head`) must not end the job.
        with contextlib.suppress(BrokenPipeError):
            count = f"{done:>{len(str(total))}}/{total}"
            times = job_times(now - self._started, done, total)
            print(f"{self._title} {count}   {what}   {times}", file=self._stream, flush=True)


def _bar(stream: TextIO) -> Any:
    """A rich progress bar; below 80 columns it has its texts without the bar."""

    class Elapsed(ProgressColumn):
        def render(self, task: Any) -> Text:
            done = task.completed if wide else 0
            return Text(job_times(task.elapsed or 0.0, done, task.total or 0), no_wrap=True)

    console = Console(file=stream, highlight=False)
    wide = console.width >= _WIDE
    return Progress(
        TextColumn("[bold]{task.description}"),
        *([BarColumn(bar_width=min(40, console.width - 68))] if wide else []),
        MofNCompleteColumn(),
        TextColumn("{task.fields[what]}", markup=False),
        Elapsed(),
        console=console,
        refresh_per_second=4,
    )
