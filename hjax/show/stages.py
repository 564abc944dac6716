"""report.html of a run in stages: each stage's figures and curves, and reward against KL."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hjax.files import METRICS, read_rows, replace_file
from hjax.show.charts import Series, line_chart
from hjax.show.curves import Card
from hjax.show.pages import from_files, render
from hjax.show.report import run_content

# Of a stage's curves the first ones; all are in its own report.
CURVES = 6


def write_stages(workdir: str | os.PathLike[str], stages: Sequence[str]) -> Path:
    """Write report.html from the files of runs in folders of a workdir.

    Args:
      workdir: their folder.
      stages: names of the runs' folders, in their order; what is not there yet is said to be so.

    Returns:
      the path of the report.

    Raises:
      DataError: a damaged file.
    """
    path = Path(workdir)
    with from_files(path):
        page = _page(path, stages)
    report = path / "report.html"
    replace_file(report, page)
    return report


def _page(path: Path, stages: Sequence[str]) -> str:
    found: list[dict[str, Any]] = []
    curves: list[Series] = []
    for stage in stages:
        folder = path / stage
        run = run_content(folder) if (folder / "config.json").is_file() else None
        if run is not None:
            drawn = run["cards"]
            said = [card for card in drawn[CURVES:] if card.title.startswith("Calibration")]
            run["cards"] = drawn[:CURVES] + said
        link = f"{stage}/report.html" if (folder / "report.html").is_file() else ""
        found.append({"stage": stage, "run": run, "report": link})
        if points := reward_and_kl(folder):
            curves.append(Series(stage, points, len(curves) % 8, dots=True))
    frontier = None
    if curves:
        legend = [(series.name, series.color, "") for series in curves]
        what = "reward/mean by kl/reference, nats per token"
        frontier = Card("Reward", what, "", line_chart(curves, along="KL"), legend)
    begun = sum(stage["run"] is not None for stage in found)
    return render(
        "stages.jinja",
        name=path.resolve().name,
        details=f"{begun} of {len(found)} stages begun: {', '.join(stages)}",
        frontier=frontier,
        stages=found,
        written=time.strftime("%Y-%m-%d %H:%M"),
    )


def reward_and_kl(folder: Path) -> list[tuple[float, float]]:
    """(KL to the reference, mean reward) of a run's steps, in their order."""
    rows = read_rows(folder / METRICS)
    both = ((row.get("kl/reference"), row.get("reward/mean")) for row in rows)
    return [(kl, reward) for kl, reward in both if kl is not None and reward is not None]
