"""Comparison page of several runs: overlaid curves, differing config keys, samples side by side."""

import dataclasses
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median_high
from typing import Any

from hjax.config import flatten
from hjax.config_aliases import with_current_names
from hjax.errors import ConfigError, output_error
from hjax.files import METRICS, SAMPLES, STARTS, StrPath, read_json, read_rows, replace_file
from hjax.show.charts import value_text
from hjax.show.curves import (
    CURVES,
    OTHER,
    TIMED,
    ChartCard,
    Row,
    chart_card,
    compiling_steps,
    points_of,
    seconds_of,
    series_of,
)
from hjax.show.format import clock, start_row
from hjax.show.pages import COLORS, from_files, render
from hjax.show.samples import sample_record

# Colours of runs; grey is left out, since it marks a run that is hidden.
_COLORS = [color for color in range(COLORS) if color != OTHER]
MAX_RUNS = len(_COLORS)
_PROMPTS = 8
# Columns of the results table: title, metric, which of its values.
_RESULTS = (
    ("reward", "reward/mean", "last"),
    ("held-out reward", "eval/reward", "last"),
    ("held-out accuracy", "eval/accuracy", "last"),
    ("held-out loss", "eval/loss", "last"),
    ("cost", "cost/mean", "last"),
    ("KL", "kl/reference", "last"),
    ("step", "time/step", "median"),
    ("tokens/s", "throughput/tokens_per_second", "median"),
)


@dataclasses.dataclass(frozen=True)
class RunSummary:
    """A run's data for the comparison page.

    Attributes:
      name: the shortest one that is unique among the runs.
      config: by dotted key.
    """

    name: str
    path: Path
    color: int
    config: Row
    metrics: Sequence[Row]
    samples: Sequence[Row]
    starts: Sequence[Row]


def write_comparison(workdirs: Sequence[StrPath], output: StrPath) -> Path:
    """Write a self-contained HTML page that compares runs.

    Args:
      workdirs: of two runs or more, finished or not.
      output: the page's path; what is there is replaced.

    Returns:
      the path of the page.

    Raises:
      ConfigError: fewer than two, more than there are colours, one twice, or no run in one; the
        page's name does not end in .html, so that it may be another file's.
      DataError: a damaged file.
      RunError: the disk is full.
    """
    path = Path(output)
    if path.suffix != ".html":
        raise ConfigError(f"--output={path}: its name must end in .html")
    with from_files(", ".join(map(str, workdirs))):
        runs = read_runs(workdirs)
        page = render(
            "compare.jinja",
            runs=runs,
            results=_results(runs),
            cards=_cards(runs),
            more_cards=_cards(runs, others=True),
            config=_differences(runs),
            samples=_samples(runs),
            starts=[(run, start_row(run.starts[-1])) for run in runs if run.starts],
            written=time.strftime("%Y-%m-%d %H:%M"),
        )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, page)
    except OSError as error:
        raise output_error(f"--output={path}", error) from error
    return path


def read_runs(workdirs: Sequence[StrPath]) -> list[RunSummary]:
    """The runs of some workdirs, in their order; see ``write_comparison``."""
    paths = [Path(workdir) for workdir in workdirs]
    if len(paths) < 2:
        raise ConfigError(f"{len(paths)} runs are given; a comparison is of two or more workdirs")
    if len(paths) > MAX_RUNS:
        raise ConfigError(f"{len(paths)} runs are given; a page compares at most {MAX_RUNS}")
    resolved = [path.resolve() for path in paths]
    for place, path in enumerate(resolved):
        if path in resolved[:place]:
            raise ConfigError(f"{paths[place]} is given twice")
        if not (path / "config.json").is_file():
            raise ConfigError(f"{paths[place]}: no run is here (no config.json)")
    return [
        RunSummary(
            name,
            path,
            _COLORS[number],
            flatten(with_current_names(read_json(path / "config.json"))),
            read_rows(path / METRICS),
            read_rows(path / SAMPLES),
            read_rows(path / STARTS),
        )
        for number, (name, path) in enumerate(zip(_names(resolved), resolved))
    ]


def _names(paths: Sequence[Path]) -> list[str]:
    """The last parts of each path, as many as make the names unique."""
    for count in range(1, max(len(path.parts) for path in paths)):
        names = ["/".join(path.parts[-count:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    return [str(path) for path in paths]


def _results(runs: Sequence[RunSummary]) -> dict[str, Any]:
    """``heads``, and ``rows`` of a run and its texts: steps taken, and the metrics that some run
    has."""
    shown = [r for r in _RESULTS if any(points_of(run.metrics, r[1]) for run in runs)]
    rows = []
    for run in runs:
        cells = [str(run.metrics[-1]["step"] if run.metrics else 0)]
        for _, key, which in shown:
            skipped = set(compiling_steps(run.metrics)) if which == "median" else ()
            values = [y for step, y in points_of(run.metrics, key) if step not in skipped]
            if not values:
                cells.append("–")
                continue
            value = median_high(values) if which == "median" else values[-1]
            cells.append(value_text(value) + " s" * (key == "time/step"))
        times = seconds_of(run.metrics)
        cells.append(clock(max(times.values())) if times else "–")
        rows.append((run, cells))
    heads = [title if which == "last" else f"{title}, median" for title, _, which in shown]
    return {"heads": ["steps", *heads, "time in steps"], "rows": rows}


def _cards(runs: Sequence[RunSummary], others: bool = False) -> list[ChartCard]:
    """A chart per metric with a curve per run: the report's metrics, or all ``others``."""
    titles = {key: title for title, _, keys in CURVES for key in keys}
    logged = dict.fromkeys(key for run in runs for row in run.metrics for key in row)
    first = [key for key in titles if key in logged and _moves(runs, key)]
    keys = sorted(logged.keys() - set(first) - {"step"}) if others else first
    cards = []
    for key in keys:
        series = [
            series_of(run.metrics, key, run.name, run.color, seconds_of(run.metrics))
            for run in runs
            if points_of(run.metrics, key)
        ]
        if not series:
            continue
        # Metrics that share a chart in the report have a chart each here.
        title, what = (titles[key], key) if key in titles else (key, "")
        clipped: set[float] = set()
        if key.startswith(TIMED):
            clipped = {step for run in runs for step in compiling_steps(run.metrics)}
        cards.append(chart_card(title, what, series, None, clipped, named=True))
    return cards


def _moves(runs: Sequence[RunSummary], key: str) -> bool:
    """Whether a metric's values differ."""
    return len({y for run in runs for _, y in points_of(run.metrics, key)}) > 1


def _differences(runs: Sequence[RunSummary]) -> list[tuple[str, list[str]]]:
    """(key, each run's value) of the config keys that differ."""
    keys = dict.fromkeys(key for run in runs for key in run.config)
    absent = object()
    rows = []
    for key in keys:
        values = [run.config.get(key, absent) for run in runs]
        if any(value != values[0] for value in values):
            rows.append((key, ["–" if v is absent else str(v) or '""' for v in values]))
    return rows


def _samples(runs: Sequence[RunSummary]) -> list[dict[str, Any]]:
    """The held-out prompts that all runs share: ``prompt``, and ``answers`` of their last
    evaluations (``sample_record``)."""
    last: list[Mapping[str, Row]] = []
    for run in runs:
        rows = [row for row in run.samples if row.get("kind") == "eval"]
        step = rows[-1]["step"] if rows else None
        last.append({str(row["prompt"]): row for row in rows if row["step"] == step})
    prompts = [prompt for prompt in last[0] if all(prompt in of_run for of_run in last)]
    return [
        {"prompt": prompt, "answers": [sample_record(of_run[prompt]) for of_run in last]}
        for prompt in prompts[:_PROMPTS]
    ]
