"""Progress display in a notebook during `trainer.run()`: the last steps, curves, messages."""

import math
import threading
import time
from collections.abc import Sequence
from typing import Any

from hjax.show.charts import value_text
from hjax.show.format import sample_texts, score_texts
from hjax.show.pages import render
from hjax.show.step_table import row_cells

# Title and metric of the curves; those of metrics that a run lacks are left out.
CURVES = (
    ("reward", "reward/mean"),
    ("held-out accuracy", "eval/accuracy"),
    ("held-out reward", "eval/reward"),
    ("KL", "kl/reference"),
    ("entropy", "actor/entropy"),
    ("loss", "actor/loss"),
    ("held-out loss", "eval/loss"),
)
ROWS, MESSAGES = 8, 6
_SECONDS = 0.5  # between two drawings
_WIDTH, _HEIGHT, _EDGE = 200, 70, 4
_SAMPLE = 400  # characters


def in_notebook() -> bool:
    """Whether this process is a notebook's kernel, so that it can show HTML."""
    try:
        from IPython import get_ipython
    except ImportError:
        return False
    shell = get_ipython()
    return shell is not None and hasattr(shell, "kernel")


class NotebookView:
    """An HTML view that is redrawn in place.

    Args:
      state: to draw (``hjax.show.live.DisplayState``).
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

    samples = loading = sessions = warm_start

    def message(self, text: str) -> None:
        """Show a line until later ones replace it."""
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
        """The current view, without scripts and in the notebook's colours."""
        state = self._state
        curves = [small_curve(title, self._points.get(key, ())) for title, key in CURVES]
        return render(
            "notebook.jinja",
            title=state.title,
            progress=state.progress(),
            doing="" if state.loading else ", ".join(name for name, _ in state.phases()[1]),
            sessions=state.sessions_text(),
            columns=state.columns,
            rows=[row_cells(row, state.columns, state.total) for row in list(state.rows)[-ROWS:]],
            curves=[curve for curve in curves if curve],
            messages=self._messages,
            samples=[
                ("  ".join(score_texts(sample)), " → ".join(sample_texts(sample, _SAMPLE)))
                for sample in state.samples
            ],
        )


def small_curve(title: str, points: Sequence[tuple[float, float]]) -> dict[str, Any] | None:
    """A small chart of (step, value) points: ``title``, ``head`` (title and last value), ``span``
    (lowest and highest value), ``width``, ``height``, SVG ``points``; None below two points."""
    points = [(x, y) for x, y in points if y is not None and math.isfinite(y)]
    if len(points) < 2:
        return None
    steps, values = [x for x, _ in points], [y for _, y in points]
    low, high = min(values), max(values)

    def place(x: float, y: float) -> str:
        right = _EDGE + (x - steps[0]) / (steps[-1] - steps[0] or 1) * (_WIDTH - 2 * _EDGE)
        down = _HEIGHT - _EDGE - (y - low) / (high - low or 1) * (_HEIGHT - 2 * _EDGE)
        return f"{right:.1f},{down:.1f}"

    return {
        "title": title,
        "head": f"{title} {value_text(values[-1], values)}",
        "span": f"{value_text(low, values)} to {value_text(high, values)}",
        "width": _WIDTH,
        "height": _HEIGHT,
        "points": " ".join(place(x, y) for x, y in points),
    }
