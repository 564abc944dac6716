"""report.html of a run: one self-contained file, made from the files of the workdir."""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median_high
from typing import Any

from hjax.config import flatten
from hjax.config_aliases import with_current_names
from hjax.errors import ConfigError
from hjax.files import (
    CALIBRATION,
    HISTOGRAMS,
    LEFT_OUT,
    METRICS,
    PROFILE,
    SAMPLES,
    STARTS,
    WARM_START,
    StrPath,
    read_json,
    read_rows,
    replace_file,
)
from hjax.settings.config_checks import owned_defaults
from hjax.settings.keys import OWNED_SECTIONS, default_config
from hjax.show.charts import ChartSeries, line_chart, stacked_bar, timeline, value_text
from hjax.show.curves import (
    OTHER,
    PHASE_COLORS,
    ROLE_COLORS,
    ChartCard,
    Row,
    calibration_cards,
    compiling_steps,
    curve_cards,
    points_of,
)
from hjax.show.format import clock, count, duration, start_row
from hjax.show.pages import from_files, render
from hjax.show.samples import browsable_samples, held_out_table, histogram_bars, training_samples

_TIMELINE_STEPS = 3


def write_report(workdir_path: StrPath) -> Path:
    """Write report.html from the files of a workdir; parts whose files are missing are left out.

    Args:
      workdir_path: the directory of a run, finished or not.

    Returns:
      the path of the report.

    Raises:
      DataError: a damaged file.
    """
    path = Path(workdir_path)
    return _written(path, "report.jinja", lambda: run_content(path))


def _written(path: Path, template: str, content: Callable[[], Mapping[str, Any]]) -> Path:
    with from_files(path):
        page = render(template, **content(), written=time.strftime("%Y-%m-%d %H:%M"))
    report = path / "report.html"
    replace_file(report, page)
    return report


def run_content(path: Path) -> dict[str, Any]:
    """The content of a run's report, by the names of the template's variables."""
    config = flatten(with_current_names(read_json(path / "config.json") or {}))
    metrics = read_rows(path / METRICS)
    samples = read_rows(path / SAMPLES)
    histograms = read_rows(path / HISTOGRAMS)
    plan = read_json(path / "plan.json") or {}
    algorithm, run = config.get("algorithm.name", "hjax"), path.resolve().name
    data = config.get("data.mixture") or config.get("data.path") or config.get("data.task", "")
    on = f"{algorithm} on {Path(str(data)).name}" if data else str(algorithm)
    model = config.get("actor.path") or ("a model from scratch" if data else "")
    limit = config.get("algorithm.cost_limit")
    cards, more_cards = curve_cards(
        metrics, read_rows(path / WARM_START), None if limit is None else float(limit)
    )
    cards += calibration_cards(read_rows(path / CALIBRATION))
    changed, unchanged = _config_rows(config)
    return dict(
        name=f"{algorithm} · {run}",
        title=on,
        details=" · ".join(filter(None, (run, Path(str(model)).name, _state(config, metrics)))),
        tiles=_tiles(metrics),
        cards=cards,
        more_cards=more_cards,
        held_out=held_out_table(samples),
        training=training_samples(samples),
        browsable_samples=browsable_samples(samples, histograms),
        has_episodes=any("turns" in sample for sample in samples),
        histogram=histogram_bars(histograms[-1] if histograms else None),
        starts=[(None, start_row(start)) for start in read_rows(path / STARTS)],
        mean_step=_mean_step(metrics),
        timeline=_timeline(read_json(path / "timeline.json") or {}),
        placement=_placement_rows(plan),
        planned=_planned_rows(plan, metrics),
        profile=_profile_rows(read_json(path / PROFILE)),
        left_out=read_json(path / LEFT_OUT) or {},
        changed=changed,
        unchanged=unchanged,
    )


def _state(config: Row, metrics: Sequence[Row]) -> str:
    total, done = config.get("steps", 0), metrics[-1]["step"] if metrics else 0
    return f"{done} steps" if done >= total else f"step {done} of {total}, not finished"


@dataclasses.dataclass(frozen=True)
class Tile:
    """A headline number, with a note and its change since the first step.

    Attributes:
      trend: ``up`` for better, ``down`` for worse; else empty.
    """

    name: str
    value: str
    note: str = ""
    change: str = ""
    trend: str = ""


def _tiles(metrics: Sequence[Row]) -> list[Tile]:
    def values(key: str) -> list[float]:
        return [y for _, y in points_of(metrics, key)]

    found = [
        _change(values("eval/accuracy"), "Held-out accuracy", "{:.1f} %", "{:.1f} points", 100),
        _change(values("eval/reward"), "Held-out reward"),
        _change(values("reward/mean"), "Reward"),
        _change(values("cost/mean"), "Cost", upwards=False),
    ]
    if not values("reward/mean"):
        losses = {"Held-out loss": values("eval/loss"), "Loss": values("actor/loss")}
        found += [_change(x, name, "{:.4f}", upwards=False) for name, x in losses.items()]
    tiles = [tile for tile in found if tile is not None]
    if kl := values("kl/reference"):
        note = f"at most {value_text(max(kl))}"
        tiles.append(Tile("KL to the reference", value_text(kl[-1]), note))
    if seconds := values("time/step"):
        note = f"median {duration(median_high(seconds))}"
        tiles.append(Tile("Time in steps", clock(sum(seconds)), note))
    if speed := values("throughput/tokens_per_second"):
        tiles.append(Tile("Tokens per second", count(median_high(speed)), "median"))
    if peak := values("memory/peak_bytes"):
        tiles.append(Tile("Peak memory", f"{peak[-1] / 2**30:.2f} GiB"))
    return tiles


def _change(
    values: Sequence[float],
    name: str,
    text: str = "{:.3f}",
    difference_text: str = "",
    scale: float = 1,
    upwards: bool = True,
) -> Tile | None:
    """A tile of a metric's last value and its change from the first; None without values."""
    if not values:
        return None
    first, last = scale * values[0], scale * values[-1]
    if len(values) == 1:
        return Tile(name, text.format(last))
    difference = last - first
    trend = "" if abs(difference) < 1e-12 else "up" if (difference > 0) == upwards else "down"
    sign = "+" if difference >= 0 else "−"
    change = (difference_text or text).format(abs(difference))
    return Tile(name, text.format(last), f"from {text.format(first)}", sign + change, trend)


def _profile_rows(record: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The summary of a trace (profile.json) as a ``note`` and ``rows`` of a table."""
    if not record or not record["programs"]:
        return None
    first, last = record["steps"]
    steps = f"steps {first} to {last}" if last > first else f"step {first}"
    busy = record["busy_seconds"]
    return {
        "note": f"{steps}: devices were busy {100 * busy / record['seconds']:.0f} % of "
        f"{duration(record['seconds'])}",
        "rows": [
            (
                program["name"],
                program["runs"],
                duration(program["seconds"]),
                f"{100 * program['seconds'] / busy:.1f} %",
                ", ".join(f"{name} {duration(s)}" for name, s in program["operations"]),
            )
            for program in record["programs"]
        ],
    }


def _timed_rows(metrics: Sequence[Row]) -> list[Row]:
    """Rows of steps with a representative time: those that compile have none."""
    compiling = set(compiling_steps(metrics))
    return [r for r in metrics if r.get("time/step") is not None and r["step"] not in compiling]


def _mean_step(metrics: Sequence[Row]) -> dict[str, Any] | None:
    """Mean seconds of a step's phases as a ``bar``, and a ``note`` on the steps counted."""
    rows = _timed_rows(metrics) or [r for r in metrics if r.get("time/step") is not None]
    if not rows:
        return None
    mean = {
        phase: sum(r.get(f"time/{phase}") or 0.0 for r in rows) / len(rows)
        for phase in PHASE_COLORS
    }
    total = sum(mean.values())
    bars = [(name, s, PHASE_COLORS[name]) for name, s in mean.items() if s > 1e-3 * total]
    other = sum(r["time/step"] for r in rows) / len(rows) - total
    if other > 0:
        bars.append(("other", other, OTHER))
    note = f"mean of {len(rows)} steps"
    if other < 0:
        note += "; phases of different pools overlap"
    return {"bar": stacked_bar(bars), "note": note}


def _timeline(trace: Mapping[str, Any]) -> dict[str, Any] | None:
    """The calls of the last steps as a ``chart``, and the roles' colours as its ``legend``.

    Args:
      trace: a Chrome trace as in timeline.json.
    """
    events = trace.get("traceEvents", [])
    names = {
        e["pid"]: e["args"]["name"]
        for e in events
        if e.get("ph") == "M" and e.get("name") == "process_name"
    }
    calls = [e for e in events if e.get("ph") == "X" and "step" in e.get("args", {})]
    steps = sorted({e["args"]["step"] for e in calls})[-_TIMELINE_STEPS:]
    calls = [e for e in calls if e["args"]["step"] in steps]
    if not calls:
        return None
    pools = sorted({e["pid"] for e in calls})
    start = min(e["ts"] for e in calls)
    roles = dict.fromkeys(e["args"].get("role", e["name"]) for e in calls)
    colors = {role: ROLE_COLORS.get(role, OTHER) for role in roles}
    spans = [
        {
            "row": pools.index(e["pid"]),
            "start": (e["ts"] - start) / 1e6,
            "length": e["dur"] / 1e6,
            "color": colors[e["args"].get("role", e["name"])],
            "names": [e["name"], e.get("cat", "")],
            "title": f"{e['args'].get('role', '')}.{e['name']}\n{e['dur'] / 1e3:.2f} ms\n"
            f"step {e['args']['step']}",
        }
        for e in calls
    ]
    marks = [
        ((min(e["ts"] for e in calls if e["args"]["step"] == step) - start) / 1e6, f"step {step}")
        for step in steps
    ]
    rows = [str(names.get(pool, pool)).removeprefix("pool ") for pool in pools]
    return {"chart": timeline(rows, spans, marks), "legend": list(colors.items())}


def _placement_rows(plan: Row) -> list[dict[str, Any]]:
    """A row per role: ``role``, ``layout``; the first of a set has its ``devices`` and ``span``."""
    rows = []
    for roles, devices in zip(plan.get("placement", []), plan.get("allocation", [])):
        for i, role in enumerate(roles):
            stages = plan.get("parallelism", {}).get(role, {})
            layout = "; ".join(f"{stage}: {_sizes(sizes)}" for stage, sizes in stages.items())
            first = {"devices": devices, "span": len(roles)} if i == 0 else {}
            rows.append({"role": role, "layout": layout, **first})
    return rows


def _sizes(sizes: Any) -> str:
    if not isinstance(sizes, Mapping):
        return str(sizes)
    named = {axis: "the rest" if n == -1 else str(n) for axis, n in sizes.items() if n != 1}
    return ", ".join(f"{axis} {n}" for axis, n in named.items()) or "one device"


def _planned_rows(plan: Row, metrics: Sequence[Row]) -> list[tuple[str, str, str]]:
    """(stage, predicted seconds, measured seconds), if the run was planned."""
    expected = (plan.get("predicted") or {}).get("seconds")
    rows = _timed_rows(metrics)
    if not expected or not rows:
        return []
    stages = (
        ("generation", expected["generation"] + expected["transition"], "time/generate"),
        ("preparation", expected["preparation"], "time/prepare"),
        ("learning", expected["learning"], "time/update"),
        ("step", expected["total"], "time/step"),
    )
    found = []
    for name, seconds, key in stages:
        values = [r[key] for r in rows if r.get(key) is not None]
        measured = f"{value_text(median_high(values))} s" if values else "–"
        found.append((name, f"{value_text(seconds)} s", measured))
    return found


def _config_rows(config: Row) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """(key, value) of the config keys that were changed, and of those at their defaults."""
    defaults = _defaults(config) if config else {}
    changed: list[tuple[str, str]] = []
    unchanged: list[tuple[str, str]] = []
    for key, value in config.items():
        default = defaults.get(key)
        default = list(default) if isinstance(default, tuple) else default
        kept = key in defaults and value == default
        (unchanged if kept else changed).append((key, '""' if value == "" else str(value)))
    return changed, unchanged


def _defaults(config: Row) -> dict[str, Any]:
    """Defaults of the common keys, and of the algorithm's and task's if those can be loaded."""
    defaults = flatten(default_config())
    for section, selector in OWNED_SECTIONS.items():
        with contextlib.suppress(ConfigError):
            owned = owned_defaults(section, config.get(selector, defaults[selector]))
            defaults |= {f"{section}.{key}": value for key, value in owned.items()}
    return defaults


# Number of curves shown per stage; its own report has all.
CURVES = 6


def write_stages(workdir: StrPath, stages: Sequence[str]) -> Path:
    """Write one report.html of several stages, which are runs in folders of a workdir.

    Args:
      workdir: their folder.
      stages: names of the runs' folders, in their order; stages not started are marked as such.

    Returns:
      the path of the report.

    Raises:
      DataError: a damaged file.
    """
    path = Path(workdir)
    return _written(path, "stages.jinja", lambda: _stages_content(path, stages))


def _stages_content(path: Path, stages: Sequence[str]) -> dict[str, Any]:
    found: list[dict[str, Any]] = []
    curves: list[ChartSeries] = []
    for stage in stages:
        folder = path / stage
        run = run_content(folder) if (folder / "config.json").is_file() else None
        if run is not None:
            drawn = run["cards"]
            calibration = [card for card in drawn[CURVES:] if card.title.startswith("Calibration")]
            run["cards"] = drawn[:CURVES] + calibration
        link = f"{stage}/report.html" if (folder / "report.html").is_file() else ""
        found.append({"stage": stage, "run": run, "report": link})
        if points := reward_and_kl(folder):
            curves.append(ChartSeries(stage, points, len(curves) % 8, dots=True))
    frontier = None
    if curves:
        legend = [(series.name, series.color, "") for series in curves]
        what = "reward/mean by kl/reference, nats per token"
        frontier = ChartCard("Reward", what, "", line_chart(curves, along="KL"), legend)
    started = sum(stage["run"] is not None for stage in found)
    return dict(
        name=path.resolve().name,
        details=f"{started} of {len(found)} stages begun: {', '.join(stages)}",
        frontier=frontier,
        stages=found,
    )


def reward_and_kl(folder: Path) -> list[tuple[float, float]]:
    """(KL to the reference, mean reward) of a run's steps, in their order."""
    rows = read_rows(folder / METRICS)
    both = ((row.get("kl/reference"), row.get("reward/mean")) for row in rows)
    return [(kl, reward) for kl, reward in both if kl is not None and reward is not None]
