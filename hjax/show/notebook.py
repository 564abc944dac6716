"""What a notebook shows while `trainer.run()` goes on: the last steps, curves, messages."""

from __future__ import annotations

import html
import threading
import time
from collections.abc import Sequence
from typing import Any

from hjax.show.charts import value_text
from hjax.show.format import gone_and_left, one_line, score_texts
from hjax.show.step_table import row_cells

# Curves, where a run has the metric: title and key.
CURVES = (
    ("reward", "reward/mean"),
    ("held-out accuracy", "eval/accuracy"),
    ("held-out reward", "eval/reward"),
    ("KL", "kl/reference"),
    ("entropy", "actor/entropy"),
    ("loss", "actor/loss"),
)
ROWS, MESSAGES = 8, 6
_SECONDS = 0.5  # between two drawings
_WIDTH, _HEIGHT, _EDGE = 200, 70, 4
_SAMPLE = 400  # characters


def in_notebook() -> bool:
    """Whether this process is a notebook's kernel, which can show HTML."""
    try:
        from IPython import get_ipython
    except ImportError:
        return False
    shell = get_ipython()
    return shell is not None and hasattr(shell, "kernel")


class NotebookView:
    """A view of HTML that is drawn anew in its place.

    Args:
      state: what to draw (``hjax.show.live.State``).
    """

    def __init__(self, state: Any):
        self._state = state
        self._points: dict[str, list[tuple[float, float]]] = {}
        self._messages: list[str] = []
        self._handle: Any = None
        self._drawn = 0.0
        self._lock = threading.Lock()

    def start(self) -> None:
        """Show the first view."""
        from IPython.display import HTML, display

        self._handle = display(HTML(self.html()), display_id=True)

    def step(self) -> None:
        """A step is done."""
        row = self._state.rows[-1]
        for _, key in CURVES:
            if row.get(key) is not None:
                self._points.setdefault(key, []).append((row["step"], row[key]))
        self._draw()

    def warm_start(self) -> None:
        """An update of the warm start is done."""
        self._draw()

    samples = loading = warm_start

    def message(self, text: str) -> None:
        """A line that stays, until later ones push it out."""
        self._messages = [*self._messages, text][-MESSAGES:]
        self._draw()

    def close(self) -> None:
        """Leave the last view."""
        self._draw(last=True)

    def _draw(self, last: bool = False) -> None:
        with self._lock:
            now = time.monotonic()
            if self._handle is None or (now - self._drawn < _SECONDS and not last):
                return
            self._drawn = now
            from IPython.display import HTML

            self._handle.update(HTML(self.html()))

    def html(self) -> str:
        """The view as it is now; it brings no script and takes the notebook's colours."""
        state = self._state
        parts = [f"<div><b>{html.escape(state.title)}</b></div>", self._progress(), self._table()]
        curves = [svg_curve(title, self._points.get(key, ())) for title, key in CURVES]
        parts.append(f'<div style="display:flex;flex-wrap:wrap;gap:8px">{"".join(curves)}</div>')
        parts += [f"<div>{html.escape(text)}</div>" for text in self._messages]
        for sample in state.samples:
            score = html.escape("  ".join(score_texts(sample)))
            texts = f"{one_line(sample['prompt'])} → {one_line(sample['response'])}"
            parts.append(f"<div><code>{score}</code> {html.escape(texts[:_SAMPLE])}</div>")
        return f'<div style="font-size:13px">{"".join(parts)}</div>'

    def _progress(self) -> str:
        state = self._state
        step, total, label = state.done, state.total, "step"
        left = state.seconds_left()
        if state.warm_start:
            step, total, loss = state.warm_start
            label, left = f"warm start, loss {loss:.3f}", None
        spent = time.monotonic() - state.started
        _, active = state.phases()
        doing = ", ".join(name for name, _ in active)
        if state.loading is not None:
            step, total = state.loading[1:3]
            label, doing = state.loading[0], ""
        text = f"{label} {step}/{total}  {gone_and_left(spent, left)}  {doing}"
        bar = f'<progress max="{max(total, 1)}" value="{step}" style="width:160px"></progress>'
        return f"<div>{bar} {html.escape(text)}</div>"

    def _table(self) -> str:
        state = self._state
        if not state.rows:
            return ""

        def line(kind: str, texts: Sequence[str]) -> str:
            style = ' style="text-align:right;padding:0 8px"'
            cells = "".join(f"<{kind}{style}>{html.escape(text)}</{kind}>" for text in texts)
            return f"<tr>{cells}</tr>"

        columns = state.columns
        rows = [row_cells(row, columns, state.total) for row in list(state.rows)[-ROWS:]]
        body = "".join(line("td", row) for row in rows)
        return f"<table>{line('th', columns)}{body}</table>"


def svg_curve(title: str, points: Sequence[tuple[float, float]]) -> str:
    """A small chart of (step, value), its last value beside the title; empty below two points."""
    points = [(x, y) for x, y in points if y is not None and y == y and abs(y) < float("inf")]
    if len(points) < 2:
        return ""
    low, high = min(y for _, y in points), max(y for _, y in points)
    first, last = points[0][0], points[-1][0]

    def place(x: float, y: float) -> str:
        right = _EDGE + (x - first) / (last - first or 1) * (_WIDTH - 2 * _EDGE)
        down = _HEIGHT - _EDGE - (y - low) / (high - low or 1) * (_HEIGHT - 2 * _EDGE)
        return f"{right:.1f},{down:.1f}"

    line = " ".join(place(x, y) for x, y in points)
    values = [y for _, y in points]
    head = f"{title} {value_text(values[-1], values)}"
    span = f"{value_text(low, values)} to {value_text(high, values)}"
    return (
        f'<figure style="margin:4px"><figcaption>{html.escape(head)}</figcaption>'
        f'<svg width="{_WIDTH}" height="{_HEIGHT}" role="img" aria-label="{html.escape(title)}">'
        f"<title>{html.escape(title)}: {html.escape(span)}</title>"
        f'<polyline points="{line}" fill="none" stroke="#1f77b4" stroke-width="1.5"/></svg>'
        "</figure>"
    )
