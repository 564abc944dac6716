"""Charts as coordinates of curves, bars and spans. `templates/charts.jinja` draws them.

Colours are CSS classes (`c0` ... `c13`), so that one drawing serves the light and the dark page.
`data-chart` has the values. With them `templates/curves.js` redraws the chart over time, on a
logarithmic scale or smoothed, and shows values on hovering. `svg_file` makes a chart a separate
file, for pages that show images.
"""

import dataclasses
import json
import math
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from hjax.show.format import Tick, ticks
from hjax.show.pages import render

WIDTH, HEIGHT = 380, 200
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 12, 10, 26
_LETTER = 6.5  # width of a tick's letter
# Names of a timeline's rows: margin, width of a letter, most letters.
_NAMES, _NAME_LETTER, _NAME_LENGTH = 22, 7, 36
# Curves with more points are averaged down to about this many.
_POINTS = 400
# Values that differ by a smaller share of the largest count as equal.
_SAME = 1e-12


@dataclasses.dataclass(frozen=True)
class ChartSeries:
    """One curve: points of (step, value), drawn in the colour of its class.

    Attributes:
      dots: draw the points themselves too.
      spread: half the width of a band around each point.
      seconds: when each point was; None: unknown, so that it has no curve over time.
    """

    name: str
    points: Sequence[tuple[float, float]]
    color: int = 0
    dots: bool = False
    spread: Sequence[float] | None = None
    seconds: Sequence[float] | None = None


@dataclasses.dataclass(frozen=True)
class LineChart:
    """Curves over steps, or along something else, with axes.

    Attributes:
      left, right, top, bottom: edges of the plotting area.
      heights, steps: (coordinate, text) of the ticks.
      limit: (height, name) of a dashed line, if there is one.
      curves: each with ``color``, ``line`` and ``band`` (SVG `points`) and ``dots`` (coordinates).
      names: of the series, as alternative text.
      data: JSON of the values for the page's script; empty if the script does not redraw it.
    """

    left: float
    heights: Sequence[tuple[float, str]]
    steps: Sequence[tuple[float, str]]
    limit: tuple[float, str] | None
    curves: Sequence[Mapping[str, Any]]
    names: str
    data: str
    width: int = WIDTH
    height: int = HEIGHT
    right: float = WIDTH - _RIGHT
    top: float = _TOP
    bottom: float = HEIGHT - _BOTTOM


def value_text(value: float, among: Sequence[float] = ()) -> str:
    """A value as text: four significant digits, or more if needed to tell it apart ``among`` the
    other values of its curve."""
    if value == 0 or 1e-3 <= abs(value) < 1e5:
        return f"{value:.{max(4, _digits(value, among))}g}"
    return f"{value:.2e}"


def _digits(value: float, among: Sequence[float]) -> int:
    """Significant digits needed to show a hundredth of the range of ``among``."""
    width = max(among) - min(among) if among else 0.0
    if not value or not 0 < width < math.inf:
        return 0
    return min(15, math.floor(math.log10(abs(value))) - math.floor(math.log10(width)) + 3)


def line_chart(
    series: Sequence[ChartSeries],
    limit: tuple[str, float] | None = None,
    clipped: Collection[float] = (),
    along: str = "step",
) -> LineChart:
    """Curves over steps, and a dashed line at ``limit`` (name, value).

    Args:
      series: their points are (step, value).
      limit: see above.
      clipped: steps that do not count for the value range; values beyond it are drawn at its edge.
      along: name of the x axis; other than ``step`` it has no whole-number ticks and no script.
    """
    series = [_thinned(s) for s in series if s.points]
    steps = sorted({step for s in series for step, _ in s.points})
    low, high = _range(series, limit, clipped)
    first, last = steps[0], steps[-1]
    if first == last:
        first, last = first - 0.5, last + 0.5
    heights = ticks(low, high, 5)
    left = max(_LEFT, 10 + _LETTER * max(len(tick.text) for tick in heights))

    def x_of(step: float) -> float:
        return round(left + (step - first) / (last - first) * (WIDTH - _RIGHT - left), 1)

    def y_of(value: float) -> float:
        up = (value / 2 - low / 2) / (high / 2 - low / 2)  # halves: the range may be infinite
        up = min(max(up, 0.0), 1.0) if clipped else up
        return round(HEIGHT - _BOTTOM - up * (HEIGHT - _TOP - _BOTTOM), 1)

    return LineChart(
        left=left,
        heights=_places(heights, y_of),
        steps=_places(ticks(first, last, 5, whole=along == "step"), x_of),
        limit=None if limit is None else (y_of(limit[1]), limit[0]),
        curves=[_curve(s, x_of, y_of) for s in series],
        names=", ".join(s.name for s in series),
        data=_data(series, limit, clipped) if along == "step" else "",
    )


def _data(
    series: Sequence[ChartSeries], limit: tuple[str, float] | None, clipped: Collection[float]
) -> str:
    """The values of a chart as JSON for the page's script."""
    drawn = [
        {
            "name": s.name,
            "color": s.color,
            "dots": s.dots,
            "steps": [step for step, _ in s.points],
            "values": [value for _, value in s.points],
            "spread": s.spread,
            "seconds": None if s.seconds is None else [round(t, 3) for t in s.seconds],
        }
        for s in series
    ]
    return json.dumps({"series": drawn, "limit": limit, "clipped": sorted(clipped)})


def _places(found: Sequence[Tick], place: Callable[[float], float]) -> list[tuple[float, str]]:
    return [(place(tick.value), tick.text) for tick in found]


def _thinned(series: ChartSeries) -> ChartSeries:
    """Downsample a curve: each run of points becomes its mean at the step of the last one."""
    run = math.ceil(len(series.points) / _POINTS)
    if run <= 1:
        return series

    def chunks(values: Sequence[Any] | None) -> list[Sequence[Any]]:
        return [values[i : i + run] for i in range(0, len(values), run)] if values else []

    return dataclasses.replace(
        series,
        points=[(c[-1][0], sum(y for _, y in c) / len(c)) for c in chunks(series.points)],
        spread=[sum(c) / len(c) for c in chunks(series.spread)] or None,
        seconds=[c[-1] for c in chunks(series.seconds)] or None,
    )


def _range(
    series: Sequence[ChartSeries], limit: tuple[str, float] | None, clipped: Collection[float]
) -> tuple[float, float]:
    """The value axis' range (low, high): the drawn values and a margin; low < high."""
    values = [y for s in series for step, y in s.points if step not in clipped]
    values = values or [y for s in series for _, y in s.points]
    for s in series:
        for (_, y), half in zip(s.points, s.spread or ()):
            values += [y - half, y + half]
    if limit is not None:
        values.append(limit[1])
    low, high = min(values), max(values)
    if high - low <= _SAME * max(abs(low), abs(high)):
        room = abs(high) * 0.1 or 1.0
        return _finite(low - room), _finite(high + room)
    room = 0.06 * high - 0.06 * low
    # The axis of a non-negative quantity includes 0 if the values come near it.
    return _finite(0.0 if 0 <= low < 0.35 * high else low - room), _finite(high + room)


def _finite(value: float) -> float:
    most = sys.float_info.max
    return min(max(value, -most), most)


def _curve(
    series: ChartSeries, x_of: Callable[[float], float], y_of: Callable[[float], float]
) -> dict[str, Any]:
    places = [(x_of(step), y_of(value)) for step, value in series.points]
    around = list(zip(series.points, series.spread or ()))
    band = [(x_of(step), y_of(value + half)) for (step, value), half in around]
    band += [(x_of(step), y_of(value - half)) for (step, value), half in reversed(around)]
    dots = places if series.dots or len(places) == 1 else []
    return {"color": series.color, "line": _path(places), "band": _path(band), "dots": dots}


def _path(places: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{x},{y}" for x, y in places)


def stacked_bar(parts: Sequence[tuple[str, float, int]]) -> list[dict[str, Any]]:
    """One horizontal bar of (name, seconds, colour) parts. Each part gets ``name``, ``seconds`` and
    ``percent`` as texts, ``color``, and ``x`` and ``width`` in thousandths of the bar's length."""
    total = sum(seconds for _, seconds, _ in parts) or 1.0
    drawn, x = [], 0.0
    for name, seconds, color in parts:
        width = 1000 * seconds / total
        texts = {"seconds": f"{value_text(seconds)} s", "percent": f"{width / 10:.0f} %"}
        drawn.append(dict(name=name, color=color, x=round(x, 2), width=round(width, 2), **texts))
        x += width
    return drawn


@dataclasses.dataclass(frozen=True)
class TimelineChart:
    """A timeline of spans on rows (Gantt chart), in the chart's coordinates.

    Attributes:
      rows: each with ``y``, ``name`` and ``short`` (the name cut to fit).
      spans: each with ``x``, ``y``, ``width``, ``color``, ``title`` (on hovering) and ``text``
        (inside; may be empty).
      marks: (coordinate, name) of vertical lines.
      seconds: (coordinate, text) of the ticks.
    """

    rows: Sequence[Mapping[str, Any]]
    spans: Sequence[Mapping[str, Any]]
    marks: Sequence[tuple[float, str]]
    seconds: Sequence[tuple[float, str]]
    left: int
    lane_width: int
    height: int
    width: int = 1000
    lane_height: int = 26
    top: int = 18


def timeline(
    rows: Sequence[str], spans: Sequence[Mapping[str, Any]], marks: Sequence[tuple[float, str]]
) -> TimelineChart:
    """Lay out a timeline of spans on rows.

    Args:
      rows: names of the rows, from the top.
      spans: each with `row` (index), `start` and `length` (seconds), `color`,
        `names` (from long to short; the first that fits is written) and `title` (on hovering).
      marks: (seconds, name) of vertical lines.
    """
    lane = TimelineChart.lane_height + 10
    end = max(s["start"] + s["length"] for s in spans) or 1e-9
    left = max(108, _NAMES + _NAME_LETTER * min(max(map(len, rows)), _NAME_LENGTH))
    lane_width = TimelineChart.width - left - 8
    scale = lane_width / end

    def x_of(seconds: float) -> float:
        return round(left + seconds * scale, 1)

    drawn = []
    for span in spans:
        width = max(round(span["length"] * scale, 1), 1.2)
        fitting = (name for name in span["names"] if len(name) * 6.2 + 6 < width)
        drawn.append(
            {
                "x": x_of(span["start"]),
                "y": TimelineChart.top + span["row"] * lane,
                "width": width,
                "color": span["color"],
                "title": span["title"],
                "text": next(fitting, ""),
            }
        )
    return TimelineChart(
        rows=[
            {"y": TimelineChart.top + i * lane, "name": name, "short": _short(name, _NAME_LENGTH)}
            for i, name in enumerate(rows)
        ],
        spans=drawn,
        marks=[(x_of(seconds), name) for seconds, name in marks],
        seconds=_places(ticks(0, end, 8), x_of),
        left=left,
        lane_width=lane_width,
        height=TimelineChart.top + len(rows) * lane + 22,
    )


def _short(text: str, room: int) -> str:
    return text if len(text) <= room else text[: max(room - 1, 1)] + "…"


_LEGEND_LETTER, _SWATCH = 6.2, 30  # widths in the legend: a letter; swatch and gaps of a name


def svg_file(
    title: str, series: Sequence[ChartSeries], limit: tuple[str, float] | None = None
) -> str:
    """The text of an SVG file: curves over steps, their names below.

    Args:
      title: stands above.
      series: the curves, named by colour; where names share a colour, as a range.
      limit: name and value of a dashed line.
    """
    chart = line_chart(series, limit)
    names: dict[int | None, str] = {s.color: s.name for s in series}
    if len({s.name for s in series}) > len(names):
        names = {None: f"{series[0].name} to {series[-1].name}"}
    legend, x, row = [], chart.left, 0
    for color, name in names.items():
        width = _SWATCH + _LEGEND_LETTER * len(name)
        if x > chart.left and x + width > chart.width:
            x, row = chart.left, row + 1
        legend.append((name, color, round(x, 1), 16 * row))
        x += width
    return render("drawing.jinja", title=title, chart=chart, legend=legend, rows=row)
