"""Charts of the report as SVG text: curves, stacked bars, the timeline. No library, no network.

Colours are CSS classes (`c0` ... `c7`), so that one drawing serves the light and the dark page;
`data-` attributes carry the values that the page's script shows on hovering.
"""

from __future__ import annotations

import dataclasses
import html
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

WIDTH, HEIGHT = 380, 200
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 12, 10, 26
# Curves with more points are averaged down to about this many.
_POINTS = 400


@dataclasses.dataclass(frozen=True)
class Series:
    """One curve: points of (step, value), drawn in the colour of its class."""

    name: str
    points: Sequence[tuple[float, float]]
    color: int = 0
    dots: bool = False
    spread: Sequence[float] | None = None  # half the width of a band around each point


def escape(text: Any) -> str:
    """Text for HTML, attributes included; control characters but line breaks become dots."""
    shown = "".join(c if c.isprintable() or c in "\n\t" else "·" for c in str(text))
    return html.escape(shown, quote=True)


def label(value: float) -> str:
    """A value of a curve: four significant digits."""
    if value == 0 or 1e-3 <= abs(value) < 1e5:
        return f"{value:.4g}"
    return f"{value:.2e}"


def line_chart(series: Sequence[Series], limit: tuple[str, float] | None = None) -> str:
    """Curves over steps, with axes, and a dashed line at ``limit`` (name, value)."""
    series = [_thinned(s) for s in series if s.points]
    xs = [x for s in series for x, _ in s.points]
    low, high = _range(series, limit)
    x_low, x_high = min(xs), max(xs)
    if x_low == x_high:
        x_low, x_high = x_low - 0.5, x_high + 0.5

    def at(x: float, y: float) -> tuple[float, float]:
        across = (x - x_low) / (x_high - x_low)
        up = (y - low) / (high - low)
        return (
            round(_LEFT + across * (WIDTH - _LEFT - _RIGHT), 1),
            round(HEIGHT - _BOTTOM - up * (HEIGHT - _TOP - _BOTTOM), 1),
        )

    parts = [_axes(at, (x_low, x_high), (low, high))]
    if limit is not None:
        (x1, y1), (x2, _) = at(x_low, limit[1]), at(x_high, limit[1])
        parts.append(f'<line class="limit" x1="{x1}" x2="{x2}" y1="{y1}" y2="{y1}"/>')
        parts.append(f'<text class="limit" x="{x2}" y="{y1 - 4}">{escape(limit[0])}</text>')
    for s in series:
        parts.append(_curve(s, at))
    hover = {
        "x": [round(at(x, low)[0], 1) for x in sorted(set(xs))],
        "step": sorted(set(xs)),
        "series": [
            {
                "name": s.name,
                "color": s.color,
                "at": {f"{x:g}": [label(y), at(x, y)[1]] for x, y in s.points},
            }
            for s in series
        ],
    }
    return (
        f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'data-hover="{escape(json.dumps(hover))}">{"".join(parts)}'
        f'<line class="cursor" y1="{_TOP}" y2="{HEIGHT - _BOTTOM}"/></svg>'
    )


def _thinned(series: Series) -> Series:
    """Runs of neighbouring points replaced by their mean, at the last one's step."""
    run = math.ceil(len(series.points) / _POINTS)
    if run <= 1:
        return series
    chunks = [series.points[i : i + run] for i in range(0, len(series.points), run)]
    points = [(chunk[-1][0], sum(y for _, y in chunk) / len(chunk)) for chunk in chunks]
    spread = None
    if series.spread is not None:
        wide = [series.spread[i : i + run] for i in range(0, len(series.spread), run)]
        spread = [sum(chunk) / len(chunk) for chunk in wide]
    return dataclasses.replace(series, points=points, spread=spread)


def _range(series: Sequence[Series], limit: tuple[str, float] | None) -> tuple[float, float]:
    values = [y for s in series for _, y in s.points]
    for s in series:
        for (_, y), half in zip(s.points, s.spread or ()):
            values += [y - half, y + half]
    if limit is not None:
        values.append(limit[1])
    low, high = min(values), max(values)
    if high - low < 1e-12 * max(1.0, abs(high)):
        room = abs(high) * 0.1 or 1.0
        return low - room, high + room
    room = 0.06 * (high - low)
    # A quantity that is never negative keeps 0 in view when it comes near it.
    bottom = 0.0 if 0 <= low < 0.35 * high else low - room
    return bottom, high + room


def _curve(series: Series, at: Any) -> str:
    parts = []
    if series.spread is not None:
        pairs = list(zip(series.points, series.spread))
        upper = [at(x, y + half) for (x, y), half in pairs]
        lower = [at(x, y - half) for (x, y), half in reversed(pairs)]
        parts.append(f'<polygon class="band c{series.color}" points="{_path(upper + lower)}"/>')
    places = [at(x, y) for x, y in series.points]
    parts.append(f'<polyline class="line c{series.color}" points="{_path(places)}"/>')
    if series.dots or len(places) == 1:
        parts += [f'<circle class="dot c{series.color}" cx="{x}" cy="{y}" r="3"/>'
                  for x, y in places]  # fmt: skip
    return "".join(parts)


def _path(places: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{x},{y}" for x, y in places)


def ticks(low: float, high: float, wanted: int) -> list[float]:
    """Round numbers from ``low`` to ``high``, about ``wanted`` of them."""
    rough = (high - low) / max(wanted, 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]


def _tick_label(value: float, neighbours: Sequence[float]) -> str:
    step = neighbours[1] - neighbours[0] if len(neighbours) > 1 else abs(value) or 1.0
    if abs(value) >= 1e4:
        return f"{value / 1e3:g}k" if abs(value) < 1e6 else f"{value / 1e6:g}M"
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    if decimals > 4:
        return f"{value:.0e}"
    text = f"{value:.{decimals}f}"
    # 2.5 steps need one decimal more than their power of ten.
    return (
        text if math.isclose(float(text), value, abs_tol=step / 50) else f"{value:.{decimals + 1}f}"
    )


def _axes(at: Any, across: tuple[float, float], up: tuple[float, float]) -> str:
    parts = []
    heights = ticks(*up, 4)
    for y in heights:
        _, py = at(across[0], y)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{py}" y2="{py}"/>')
        text = _tick_label(y, heights)
        parts.append(f'<text class="tick y" x="{_LEFT - 6}" y="{py + 3.5}">{text}</text>')
    steps = [x for x in ticks(*across, 5) if float(x).is_integer()]
    for x in steps:
        px, _ = at(x, up[0])
        parts.append(
            f'<text class="tick x" x="{px}" y="{HEIGHT - 9}">{_tick_label(x, steps)}</text>'
        )
    return "".join(parts)


def stacked_bar(parts: Sequence[tuple[str, float, int]]) -> str:
    """One horizontal bar of (name, seconds, colour) with a legend below."""
    total = sum(value for _, value, _ in parts) or 1.0
    bar, legend, x = [], [], 0.0
    for name, value, color in parts:
        share = value / total
        width = round(1000 * share, 2)
        title = f"{escape(name)}: {label(value)} s, {100 * share:.0f} %"
        bar.append(
            f'<rect class="fill c{color}" x="{x:.2f}" y="0" width="{width}" height="26">'
            f"<title>{title}</title></rect>"
        )
        legend.append(
            f'<li><i class="swatch c{color}"></i>{escape(name)} <b>{label(value)} s</b> '
            f"<span>{100 * share:.0f} %</span></li>"
        )
        x += width
    return (
        f'<svg class="bar" viewBox="0 0 1000 26" preserveAspectRatio="none">{"".join(bar)}</svg>'
        f'<ul class="legend">{"".join(legend)}</ul>'
    )


def timeline(
    rows: Sequence[str], spans: Sequence[Mapping[str, Any]], marks: Sequence[tuple[float, str]]
) -> str:
    """Spans on rows over time.

    Args:
      rows: names of the rows, from the top.
      spans: each with `row` (index), `start` and `length` (seconds), `color`,
        `names` (from long to short; the first that fits is written) and `title` (on hovering).
      marks: (seconds, name) of vertical lines.
    """
    width, left, high, gap, top = 1000, 108, 26, 10, 18
    end = max(s["start"] + s["length"] for s in spans) or 1e-9
    scale = (width - left - 8) / end
    height = top + len(rows) * (high + gap) + 22
    parts = []
    for seconds, name in marks:
        x = round(left + seconds * scale, 1)
        parts.append(f'<line class="mark" x1="{x}" x2="{x}" y1="{top - 6}" y2="{height - 20}"/>')
        parts.append(f'<text class="tick" x="{x + 4}" y="{top - 6}">{escape(name)}</text>')
    for i, name in enumerate(rows):
        y = top + i * (high + gap)
        parts.append(
            f'<rect class="lane" x="{left}" y="{y}" width="{width - left - 8}" height="{high}" '
            f'rx="4"/>'
            f'<text class="row" x="{left - 10}" y="{y + 17}">{escape(_short(name, 15))}'
            f"<title>{escape(name)}</title></text>"
        )
    for span in spans:
        x, w = left + span["start"] * scale, max(span["length"] * scale, 1.2)
        y = top + span["row"] * (high + gap)
        parts.append(
            f'<rect class="fill span c{span["color"]}" x="{x:.1f}" y="{y + 2}" width="{w:.1f}" '
            f'height="{high - 4}" rx="2" data-tip="{escape(span["title"])}"/>'
        )
        # The longest of its names that fits.
        for text in span["names"]:
            if len(text) * 6.2 + 6 < w:
                parts.append(f'<text class="in" x="{x + 4:.1f}" y="{y + 17}">{escape(text)}</text>')
                break
    stops = ticks(0, end, 8)
    for seconds in stops:
        x = round(left + seconds * scale, 1)
        parts.append(f'<text class="tick x" x="{x}" y="{height - 6}">{label(seconds)} s</text>')
    return f'<svg class="timeline" viewBox="0 0 {width} {height}">{"".join(parts)}</svg>'


def _short(text: str, room: int) -> str:
    return text if len(text) <= room else text[: max(room - 1, 1)] + "…"
