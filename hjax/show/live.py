"""Progress display of a run: a live view in a terminal, plain lines elsewhere."""

import contextlib
import os
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TextIO

from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from hjax.rules import whole_number
from hjax.show.format import (
    duration,
    elapsed_and_left,
    job_times,
    number,
    sample_texts,
    score_texts,
    spread_samples,
)
from hjax.show.notebook import NotebookView, in_notebook
from hjax.show.step_table import COLUMNS, GAP, IMPORTANCE, fitting_columns, row_cells, used_columns

# Plain lines repeat the header after so many rows, and show a long start at most this often.
_ROWS_PER_HEADER = 20
_PLAIN_INTERVAL_SECONDS = 5.0
# Compilations that take this long also print a message.
_LONG_COMPILE_SECONDS = 5.0
# Importance of the live table's columns: `left` comes last, as the progress bar shows it already.
_LIVE_IMPORTANCE = (*(title for title in IMPORTANCE if title != "left"), "left")
# Characters of prompt and response together, where the line width is unlimited.
_SAMPLE_WIDTH = 120


class Display:
    """Shows a run's progress. All methods may be called from any thread.

    Args:
      config: the run's config; its `display` keys are read.
      total_steps: steps of the whole run.
      stream: where to write; None: standard output, or the notebook that this process serves. A
        terminal gets the live view.
    """

    def __init__(self, config: Any, total_steps: int, stream: TextIO | None = None):
        self.state = DisplayState(total_steps, config.display.samples)
        self._view: _Plain | _Live | NotebookView | None = None
        if config.display.enabled and stream is None and in_notebook():
            self._view = NotebookView(self.state)
        elif config.display.enabled:
            stream = stream or sys.stdout
            live = stream.isatty() and os.environ.get("TERM", "dumb") != "dumb"
            self._view = (_Live if live else _Plain)(self.state, stream)

    def start(self, title: str = "") -> None:
        """Begin showing; ``title`` says what runs."""
        self.state.title = title
        self.state.started = time.monotonic()
        if self._view:
            self._view.start()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """A phase of a step (generate, update, evaluate, ...), for a ``with``; phases may nest."""
        begin = time.monotonic()
        self.state.enter(name, begin)
        try:
            yield
        finally:
            self.state.leave(name, time.monotonic() - begin)

    def compiling(self, name: str, seconds: float | None) -> None:
        """A program's compilation starts (``seconds`` None), or has ended after ``seconds``."""
        self.state.compile(name, seconds is None)
        if seconds is not None and seconds >= _LONG_COMPILE_SECONDS:
            self.message(f"compiled {name}, {duration(seconds)}")

    def loading(self, what: str, done: int, total: int) -> None:
        """Progress of loading weights: ``done`` of ``total``."""
        self.state.load(what, done, total)
        if self._view:
            self._view.loading()

    def sessions(self, counts: Any) -> None:
        """How far the sessions of an agent are (``hjax.agents.agent_player.SessionCounts``)."""
        self.state.sessions = counts
        if self._view:
            self._view.sessions()

    def warm_start(self, step: int, total: int, loss: float) -> None:
        """One supervised update done, of ``total``; ``loss`` in nats per token."""
        self.state.warm_start = (step, total, float(loss))
        if self._view:
            self._view.warm_start()

    def step(self, metrics: Mapping[str, Any]) -> None:
        """One training step done; ``metrics`` as in metrics.jsonl."""
        self.state.add_step(metrics)
        if self._view:
            self._view.step()

    def samples(self, samples: Sequence[Mapping[str, Any]]) -> None:
        """Responses of the last step: `prompt`, `response`, `reward`, `advantage` each.

        `display.samples` of them are shown, from the lowest to the highest reward.
        """
        if not self.state.sample_count or not samples:
            return
        self.state.samples = spread_samples(samples, self.state.sample_count)
        self.state.samples_step = self.state.done
        if self._view:
            self._view.samples()

    def message(self, text: str) -> None:
        """Print a permanent line."""
        if self._view:
            self._view.message(text)

    def close(self) -> None:
        """Stop drawing; the last view stays on the screen. May be called twice."""
        if self._view:
            self._view.close()


class Progress(NamedTuple):
    """Progress of the current job: its name, how much of the total is done, and a text of both."""

    label: str
    done: int
    total: int
    text: str


class DisplayState:
    """The state that views draw; written by the training thread, read by the drawing thread."""

    def __init__(self, total_steps: int, sample_count: int):
        self.title = ""
        self.total = total_steps
        self.done = 0
        self.started = time.monotonic()
        self.rows: deque[dict[str, Any]] = deque(maxlen=200)
        self.columns: list[str] = []
        # Width by column: that of its title or longest text so far; of steps that of the last one.
        self.widths = {"step": len(f"{total_steps}/{total_steps}")}
        self.warm_start: tuple[int, int, float] | None = None
        self.samples: list[Mapping[str, Any]] = []
        self.samples_step = 0
        self.sample_count = sample_count
        self.sessions: Any = None
        self._lock = threading.Lock()
        self._active: list[tuple[str, float]] = []
        self._phases: dict[str, float] = {}
        self._last_phases: dict[str, float] = {}
        self._compiling: dict[str, float] = {}  # since when
        # Name, done, total, start time.
        self.loading: tuple[str, int, int, float] | None = None

    def sessions_text(self) -> str:
        """How far the sessions of an agent are; empty: none are open."""
        counts = self.sessions
        if counts is None or not counts.open:
            return ""
        speed = f", {number(counts.calls / counts.seconds)} calls/s" if counts.seconds else ""
        return f"{counts.open} sessions open, {counts.ended} of {counts.all} ended{speed}"

    def enter(self, name: str, begin: float) -> None:
        with self._lock:
            self._active.append((name, begin))

    def leave(self, name: str, taken: float) -> None:
        with self._lock:
            last = max(i for i, (active, _) in enumerate(self._active) if active == name)
            del self._active[last]
            self._phases[name] = self._phases.get(name, 0.0) + taken

    def compile(self, name: str, begins: bool) -> None:
        with self._lock:
            if begins:
                self._compiling[name] = time.monotonic()
            else:
                self._compiling.pop(name, None)

    def load(self, what: str, done: int, total: int) -> None:
        with self._lock:
            now = time.monotonic()
            since = self.loading[3] if self.loading and self.loading[0] == what else now
            self.loading = (what, done, total, since) if done < total else None

    def progress(self) -> Progress:
        """Progress of loading weights, of the warm start, or of the steps."""
        now = time.monotonic()
        spent = now - self.started
        if loading := self.loading:
            what, done, total, since = loading
            times = job_times(now - since, done, total)
            return Progress(what, done, total, f"{100 * done // max(total, 1)}%   {times}")
        if self.warm_start:
            done, total, loss = self.warm_start
            text = f"{done}/{total}  loss {loss:.3f}  {job_times(spent, done, total)}"
            return Progress("warm start", done, total, text)
        left = self.seconds_left() if self.done < self.total else None
        text = f"{self.done}/{self.total}  {elapsed_and_left(spent, left)}"
        return Progress("step", self.done, self.total, text)

    def add_step(self, metrics: Mapping[str, Any]) -> None:
        with self._lock:
            self._compiling.clear()  # also programs that were only lowered
            self.done = int(metrics["step"])
            self.warm_start = None
            self.rows.append({**metrics, "left_seconds": self.seconds_left(metrics)})
            columns = used_columns(self.columns, self.rows[-1])
            texts = row_cells(self.rows[-1], columns, self.total)
            for title, text in zip(columns, texts, strict=True):
                self.widths[title] = max(self.widths.get(title, len(title)), len(text))
            self.columns = columns  # set last, so that the drawing thread finds all widths
            self._last_phases, self._phases = self._phases, {}

    def seconds_left(self, metrics: Mapping[str, Any] | None = None) -> float | None:
        """Remaining steps times the median of the last ones; None before the second step.

        The first step is left out, because it compiles.
        """
        rows = [*self.rows, *([metrics] if metrics else [])][1:][-9:]
        times = [r["time/step"] for r in rows if r.get("time/step") is not None]
        return statistics.median_low(times) * (self.total - self.done) if times else None

    def phases(self) -> tuple[list[tuple[str, float]], list[tuple[str, float]]]:
        """Finished phases of this step (of the last one if there are none), and active phases."""
        with self._lock:
            now = time.monotonic()
            over = list((self._phases or self._last_phases).items())
            active = [*self._active, *((f"compiling {n}", t) for n, t in self._compiling.items())]
            return over, [(name, now - begin) for name, begin in active]


class _Plain:
    """A view of plain aligned lines, for logs."""

    def __init__(self, state: DisplayState, stream: TextIO):
        self._state = state
        self._stream = stream
        self._header = ""
        self._since_header = 0
        self._last_warm_start = self._last_loading = 0.0
        self._lock = threading.Lock()

    def start(self) -> None:
        if self._state.title:
            self.message(self._state.title)

    def sessions(self) -> None:
        """Lines of steps say it."""

    def loading(self) -> None:
        now, loading = time.monotonic(), self._state.loading
        if loading and now - max(loading[3], self._last_loading) >= _PLAIN_INTERVAL_SECONDS:
            self._last_loading = now
            progress = self._state.progress()
            self.message(f"{progress.label} {progress.text}")

    def warm_start(self) -> None:
        now = time.monotonic()
        assert self._state.warm_start is not None
        step, total, loss = self._state.warm_start
        if step < total and now - self._last_warm_start < _PLAIN_INTERVAL_SECONDS:
            return
        self._last_warm_start = now
        times = job_times(now - self._state.started, step, total)
        self.message(f"warm start {step:>5}/{total}   loss {loss:.4f}   {times}")

    def step(self) -> None:
        state = self._state
        widths = {c: max(COLUMNS[c].width, state.widths[c]) for c in state.columns}
        columns = fitting_columns(state.columns, widths, _line_width(self._stream))

        def line(texts: Sequence[str]) -> str:
            return (" " * GAP).join(t.rjust(widths[c]) for c, t in zip(columns, texts))

        header = line(columns)
        if self._header != header or self._since_header >= _ROWS_PER_HEADER:
            self._header, self._since_header = header, 0
            self.message(header)
        self._since_header += 1
        self.message(line(row_cells(state.rows[-1], columns, state.total)))

    def samples(self) -> None:
        width = _line_width(self._stream)
        for sample in self._state.samples:
            score = "    " + "  ".join(score_texts(sample)) + "   "
            arrow = " → "
            room = _SAMPLE_WIDTH if width is None else width - len(score) - len(arrow)
            texts = sample_texts(sample, min(max(room, 20), _SAMPLE_WIDTH))
            self.message(score + arrow.join(texts))

    def message(self, text: str) -> None:
        with self._lock:
            # A closed pipe (`| head`) must not end the training.
            with contextlib.suppress(BrokenPipeError):
                print(text.rstrip(), file=self._stream, flush=True)

    def close(self) -> None:
        """Nothing is left open."""


def _line_width(stream: TextIO) -> int | None:
    """Characters per line, from COLUMNS or the terminal; None for a file or a pipe."""
    if columns := whole_number(os.environ.get("COLUMNS", "")):
        return columns
    with contextlib.suppress(OSError, ValueError):
        if stream.isatty():
            return os.get_terminal_size(stream.fileno()).columns
    return None


class _Live:
    """A terminal view redrawn in place: phases, speed, the last rows, samples."""

    def __init__(self, state: DisplayState, stream: TextIO):
        self._state = state
        self._console = Console(file=stream, highlight=False)
        self._live = Live(
            console=self._console,
            get_renderable=self._draw,
            refresh_per_second=4,
            vertical_overflow="crop",
        )

    def start(self) -> None:
        self._live.start()

    def warm_start(self) -> None:
        """Drawn at the next refresh."""

    step = samples = loading = sessions = warm_start

    def message(self, text: str) -> None:
        self._console.print(Text(text))

    def close(self) -> None:
        self._live.stop()

    def _draw(self) -> Any:
        parts: list[Callable[[], Any]] = [self._head, self._phases, self._table, self._samples]
        return Group(*(part for part in [part() for part in parts] if part is not None))

    def _head(self) -> Any:
        state = self._state
        progress = state.progress()
        grid = Table.grid(padding=(0, 1), expand=True)
        grid.add_column()
        grid.add_column(ratio=1)
        grid.add_column(justify="right")
        bar = ProgressBar(total=max(progress.total, 1), completed=progress.done)
        grid.add_row(Text(progress.label, style="bold"), bar, Text(progress.text))
        if not state.title:
            return grid
        outer = Table.grid(expand=True)
        outer.add_row(Text(state.title, style="dim", overflow="fold"))
        outer.add_row(grid)
        return outer

    def _phases(self) -> Any:
        over, active = self._state.phases()
        running = {name for name, _ in active}
        over = [(name, taken) for name, taken in over if name not in running]

        def line() -> Text:
            text = Text()
            for name, taken in over:
                text.append(f"{name} {duration(taken)}   ", style="dim")
            for name, taken in active:
                text.append("▶ ", style="cyan").append(f"{name} ", style="bold cyan")
                text.append(f"{duration(taken)}   ", style="cyan")
            if said := self._state.sessions_text():
                text.append(said, style="cyan")
            text.rstrip()
            return text

        while over and line().cell_len > self._console.width:
            over.remove(min(over, key=lambda phase: phase[1]))  # drop the shortest phase
        return line()

    def _table(self) -> Any:
        state = self._state
        if not state.rows:
            return None
        # Title, bar, phases, the table's head, the sample panel and free lines.
        others = 7 + (len(state.samples) * 2 + 3 if state.samples else 0)
        room = max(3, self._console.height - others)
        shown = fitting_columns(state.columns, state.widths, self._console.width, _LIVE_IMPORTANCE)
        # The box adds one blank of the gap.
        table = Table(
            box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 0, 0, GAP - 1)
        )
        for name in shown:
            table.add_column(name, justify="right", no_wrap=True, min_width=state.widths[name])
        rows = list(state.rows)[-room:]
        for i, row in enumerate(rows):
            style = "bold" if i == len(rows) - 1 else None
            table.add_row(*row_cells(row, shown, state.total), style=style)
        return table

    def _samples(self) -> Any:
        state = self._state
        if not state.samples:
            return None
        grid = Table.grid(padding=(0, 2))
        grid.add_column(no_wrap=True)
        grid.add_column(overflow="fold")
        width = max(20, self._console.width - 26)
        for sample in state.samples:
            reward, advantage = score_texts(sample)
            score = Text(reward, style="bold").append("\n" + advantage, style="not bold dim")
            prompt, response = sample_texts(sample, 2 * width - 4)
            grid.add_row(score, Text(f"{prompt} → ", style="dim").append(response, style="not dim"))
        title = f"samples of step {state.samples_step}"
        return Panel(grid, title=Text(title), title_align="left", border_style="dim")
