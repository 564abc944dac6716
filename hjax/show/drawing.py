"""A chart as an SVG file of its own, for pages that show images."""

from __future__ import annotations

from collections.abc import Sequence

from hjax.show.charts import Series, line_chart
from hjax.show.pages import render

_LETTER, _SWATCH = 6.2, 30  # of the legend: a letter's width, and what else a name takes


def svg_file(title: str, series: Sequence[Series], limit: tuple[str, float] | None = None) -> str:
    """The text of an SVG file: curves over steps, their names below.

    Args:
      title: stands above.
      series: the curves; those of one colour are named once.
      limit: name and value of a dashed line.
    """
    chart = line_chart(series, limit)
    legend, x = [], chart.left
    for color, name in {s.color: s.name for s in series}.items():
        legend.append((name, color, round(x, 1)))
        x += _SWATCH + _LETTER * len(name)
    return render("drawing.jinja", title=title, chart=chart, legend=legend)
