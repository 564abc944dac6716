"""report.html of a run: one file that needs nothing else, from what stands in the workdir."""

from __future__ import annotations

import contextlib
import os
import string
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hjax.config import flatten
from hjax.errors import ConfigError
from hjax.files import METRICS, SAMPLES, WARM_START, read_json, read_rows, replace_file
from hjax.settings.checking import owned_defaults
from hjax.settings.keys import OWNED_SECTIONS, default_config
from hjax.show.charts import Series, escape, label, line_chart, stacked_bar, timeline
from hjax.show.format import clock, count
from hjax.show.format import seconds as duration
from hjax.show.samples import sample_section

Row = Mapping[str, Any]

# Title, what it says, metrics drawn together; shown where the run has the first of them.
CURVES: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("Reward", "mean of the step's responses, band: one standard deviation; dots: held-out, greedy",
     ("reward/mean", "eval/reward")),
    ("Accuracy", "held-out prompts, greedy", ("eval/accuracy",)),
    ("Cost", "mean of the step's responses", ("cost/mean",)),
    ("Multiplier", "weight of the cost", ("cost/multiplier",)),
    ("KL to the reference", "nats per token, k1", ("kl/reference",)),
    ("KL coefficient", "", ("kl/coefficient",)),
    ("Actor loss", "", ("actor/loss",)),
    ("Critic loss", "", ("critic/loss", "cost_critic/loss")),
    ("Entropy", "nats per token", ("actor/entropy",)),
    ("Response length", "tokens", ("response/length_mean",)),
    ("Explained variance", "of the returns, by the critic", ("critic/explained_variance",)),
    ("Clip fraction", "share of tokens", ("actor/clip_fraction", "critic/clip_fraction")),
    ("Gradient norm", "before clipping", ("actor/grad_norm", "critic/grad_norm")),
    ("Truncated", "share of responses cut at the length limit", ("response/truncated",)),
)  # fmt: skip
PHASES = ("generate", "transition", "prepare", "update")
ROLE_COLORS = {"actor": 0, "critic": 1, "reference": 2, "reward": 3, "cost": 4, "cost_critic": 5}
_TIMELINE_STEPS = 3


def write_report(workdir_path: str | os.PathLike[str]) -> Path:
    """Write report.html from the files of a workdir; what is missing is left out.

    Args:
      workdir_path: the directory of a run, finished or not.

    Returns:
      the path of the report.

    Raises:
      DataError: a damaged file.
    """
    path = Path(workdir_path)
    config = read_json(path / "config.json") or {}
    metrics = read_rows(path / METRICS)
    warm_start = read_rows(path / WARM_START)
    samples = read_rows(path / SAMPLES)
    sections = [
        _header(path, config, metrics),
        _tiles(metrics),
        _curves(config, metrics, warm_start),
        sample_section(samples),
        _time_section(metrics, read_json(path / "timeline.json")),
        _placement(read_json(path / "plan.json")),
        _predicted(read_json(path / "plan.json"), metrics),
        _config_table(config),
        f"<footer>Written by hjax, {time.strftime('%Y-%m-%d %H:%M')}.</footer>",
    ]
    template = Path(__file__).with_name("report.html").read_text(encoding="utf-8")
    colors = "".join(
        f"svg .line.c{i} {{ stroke: var(--c{i}); }} "
        f"svg .band.c{i}, svg .dot.c{i}, svg .fill.c{i} {{ fill: var(--c{i}); }} "
        f".swatch.c{i} {{ background: var(--c{i}); }}\n"
        for i in range(8)
    )
    name = f"{_get(config, 'algorithm.name', 'hjax')} · {path.resolve().name}"
    page = string.Template(template).substitute(
        title=escape(name), colors=colors, body="\n".join(s for s in sections if s)
    )
    report = path / "report.html"
    replace_file(report, page)
    return report


def _get(config: Row, key: str, default: Any) -> Any:
    return flatten(config).get(key, default)


def _points(rows: Sequence[Row], key: str) -> list[tuple[float, float]]:
    return [(row["step"], row[key]) for row in rows if row.get(key) is not None]


def _header(path: Path, config: Row, metrics: Sequence[Row]) -> str:
    total, done = _get(config, "steps", 0), metrics[-1]["step"] if metrics else 0
    state = f"{done} steps" if done >= total else f"step {done} of {total}, not finished"
    data = _get(config, "data.path", "") or _get(config, "data.task", "")
    model = _get(config, "actor.path", "") or "a model from scratch"
    title = f"{_get(config, 'algorithm.name', 'hjax')} on {Path(str(data)).name}"
    details = f"{path.resolve().name} · {Path(str(model)).name} · {state}"
    return f"<header><h1>{escape(title)}</h1><p>{escape(details)}</p></header>"


def _tiles(metrics: Sequence[Row]) -> str:
    """The headline numbers."""
    tiles = []

    def change(name: str, key: str, text: Callable[[float], str], upwards: bool = True) -> None:
        points = _points(metrics, key)
        if not points:
            return
        first, last = points[0][1], points[-1][1]
        difference = last - first
        good = "" if abs(difference) < 1e-12 else "up" if (difference > 0) == upwards else "down"
        sign = "+" if difference >= 0 else "−"
        more = f"from {text(first)} <span class='{good}'>{sign}{text(abs(difference))}</span>"
        tiles.append(_tile(name, text(last), more if len(points) > 1 else ""))

    change("Held-out accuracy", "eval/accuracy", lambda x: f"{100 * x:.1f} %")
    change("Held-out reward", "eval/reward", lambda x: f"{x:.3f}")
    change("Reward", "reward/mean", lambda x: f"{x:.3f}")
    change("Cost", "cost/mean", lambda x: f"{x:.3f}", upwards=False)
    if not _points(metrics, "reward/mean"):
        change("Loss", "actor/loss", lambda x: f"{x:.4f}", upwards=False)
    kl = _points(metrics, "kl/reference")
    if kl:
        most = max(y for _, y in kl)
        tiles.append(_tile("KL to the reference", label(kl[-1][1]), f"at most {label(most)}"))
    seconds = [y for _, y in _points(metrics, "time/step")]
    if seconds:
        middle = sorted(seconds)[len(seconds) // 2]
        tiles.append(_tile("Time in steps", clock(sum(seconds)), f"median step {duration(middle)}"))
    speed = [y for _, y in _points(metrics, "throughput/tokens_per_second")]
    if speed:
        tiles.append(_tile("Tokens per second", count(sorted(speed)[len(speed) // 2]), "median"))
    peak = _points(metrics, "memory/peak_bytes")
    if peak:
        tiles.append(_tile("Peak memory", f"{peak[-1][1] / 2**30:.2f} GiB", ""))
    return f'<div class="tiles">{"".join(tiles)}</div>' if tiles else ""


def _tile(name: str, value: str, more: str) -> str:
    return (
        f'<div class="tile"><div class="name">{name}</div><div class="value">{value}</div>'
        f'<div class="more">{more}</div></div>'
    )


def _curves(config: Row, metrics: Sequence[Row], warm_start: Sequence[Row]) -> str:
    cards: list[str] = []
    drawn: set[str] = set()
    for title, what, keys in CURVES:
        values = [y for key in keys for _, y in _points(metrics, key)]
        # What never moves has no curve to show: it stands among the others below.
        if _points(metrics, keys[0]) and (len(values) < 2 or min(values) < max(values)):
            drawn.update(keys)
            limit = None
            if keys[0] == "cost/mean" and "algorithm.cost_limit" in flatten(config):
                limit = ("limit", float(_get(config, "algorithm.cost_limit", 0.0)))
            cards.append(_card(title, what, _series(metrics, keys), limit))
    if warm_start:
        points = _points(warm_start, "loss")
        if points:
            what = "supervised, before the first step; nats per token"
            cards.append(_card("Warm start loss", what, [Series("loss", points, 5)]))
    drawn |= {"step", "reward/std"}
    others = sorted({key for row in metrics for key in row} - drawn)
    rest = [
        _card(key, "", [Series(key, _points(metrics, key), 7)])
        for key in others
        if _points(metrics, key)
    ]
    if not cards and not rest:
        return "<h2>Learning curves</h2><p class='note'>No step has been taken yet.</p>"
    page = (
        '<h2>Learning curves</h2><p class="note">Over steps; point at a curve for its '
        f'values.</p><div class="charts">{"".join(cards)}</div>'
    )
    if rest:
        page += (
            f"<details><summary>{len(rest)} more: learning rates, times, memory, …</summary>"
            f'<div class="charts">{"".join(rest)}</div></details>'
        )
    return page


def _series(metrics: Sequence[Row], keys: Sequence[str]) -> list[Series]:
    series = []
    for color, key in enumerate(keys):
        points = _points(metrics, key)
        if not points:
            continue
        spread = None
        if key == "reward/mean":
            rows = [row for row in metrics if row.get(key) is not None]
            spread = [row.get("reward/std") or 0.0 for row in rows]
        series.append(Series(key, points, color, dots=key.startswith("eval/"), spread=spread))
    return series


def _card(
    title: str, what: str, series: Sequence[Series], limit: tuple[str, float] | None = None
) -> str:
    last = " · ".join(label(s.points[-1][1]) for s in series)
    legend = ""
    if len(series) > 1:
        items = (f'<li><i class="swatch c{s.color}"></i>{escape(s.name)}</li>' for s in series)
        legend = f'<ul class="legend">{"".join(items)}</ul>'
    note = f'<p class="what">{escape(what)}</p>' if what else ""
    return (
        f'<section class="card"><header><h3>{escape(title)}</h3><span class="last">{last}</span>'
        f"</header>{note}{line_chart(series, limit)}{legend}</section>"
    )


def _time_section(metrics: Sequence[Row], trace: Any) -> str:
    parts = []
    # The first two steps compile.
    rows = [r for r in metrics if r.get("time/step") is not None]
    rows = [r for r in rows if r["step"] > 2] or rows
    if rows:
        mean = {
            phase: sum(r.get(f"time/{phase}") or 0.0 for r in rows) / len(rows) for phase in PHASES
        }
        total = sum(mean.values())
        bar = [
            (name, value, i) for i, (name, value) in enumerate(mean.items()) if value > 1e-3 * total
        ]
        other = sum(r["time/step"] for r in rows) / len(rows) - total
        if other > 0:
            bar.append(("other", other, 7))
        note = f"mean of {len(rows)} steps" + (
            "" if other >= 0 else "; phases of different pools overlap"
        )
        parts.append(f'<div class="card"><header><h3>A step</h3><span class="last">{note}</span>'
                     f"</header>{stacked_bar(bar)}</div>")  # fmt: skip
    drawn = _timeline(trace)
    if drawn:
        parts.append(drawn)
    return "<h2>Where the time goes</h2>" + "<br>".join(parts) if parts else ""


def _timeline(trace: Any) -> str:
    events = (trace or {}).get("traceEvents", [])
    names = {
        e["pid"]: e["args"]["name"]
        for e in events
        if e.get("ph") == "M" and e.get("name") == "process_name"
    }
    calls = [e for e in events if e.get("ph") == "X" and "step" in e.get("args", {})]
    steps = sorted({e["args"]["step"] for e in calls})[-_TIMELINE_STEPS:]
    calls = [e for e in calls if e["args"]["step"] in steps]
    if not calls:
        return ""
    pools = sorted({e["pid"] for e in calls})
    start = min(e["ts"] for e in calls)
    roles = list(dict.fromkeys(e["args"].get("role", e["name"]) for e in calls))
    colors = {role: ROLE_COLORS.get(role, 6) for role in roles}
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
    legend = "".join(
        f'<li><i class="swatch c{colors[role]}"></i>{escape(role)}</li>' for role in roles
    )
    rows = [str(names.get(pool, pool)).removeprefix("pool ") for pool in pools]
    return (
        '<div class="card"><header><h3>Timeline of the last steps</h3>'
        '<span class="last">one row per resource pool</span></header>'
        f'{timeline(rows, spans, marks)}<ul class="legend">{legend}</ul></div>'
    )


def _placement(plan: Any) -> str:
    if not plan:
        return ""
    rows = []
    for roles, devices in zip(plan.get("placement", []), plan.get("allocation", [])):
        for i, role in enumerate(roles):
            stages = plan.get("parallelism", {}).get(role, {})
            texts = [f"{stage}: {_sizes(sizes)}" for stage, sizes in stages.items()]
            number = f'<td class="number" rowspan="{len(roles)}">{devices}</td>' if i == 0 else ""
            rows.append(
                f"<tr>{number}<td>{escape(role)}</td><td>{escape('; '.join(texts))}</td></tr>"
            )
    return (
        '<h2>Placement</h2><div class="card scroll"><table><thead><tr><th class="number">devices'
        f"</th><th>role</th><th>layout</th></tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
    )


def _predicted(plan: Any, metrics: Sequence[Row]) -> str:
    """A planner's seconds beside the measured ones, the first two steps (they compile) left out."""
    expected = ((plan or {}).get("predicted") or {}).get("seconds")
    rows = [r for r in metrics if r.get("time/step") is not None and r["step"] > 2]
    if not expected or not rows:
        return ""
    pairs = (
        ("generation", expected["generation"] + expected["transition"], "time/generate"),
        ("preparation", expected["preparation"], "time/prepare"),
        ("learning", expected["learning"], "time/update"),
        ("step", expected["total"], "time/step"),
    )
    cells = []
    for name, seconds, key in pairs:
        values = sorted(r[key] for r in rows if r.get(key) is not None)
        measured = f"{label(values[len(values) // 2])} s" if values else "–"
        cells.append(
            f'<tr><td>{name}</td><td class="number">{label(seconds)} s</td>'
            f'<td class="number">{measured}</td></tr>'
        )
    return (
        '<h2>Planned and measured</h2><div class="card scroll"><table><thead><tr><th>stage</th>'
        '<th class="number">predicted</th><th class="number">median measured</th></tr></thead>'
        f"<tbody>{''.join(cells)}</tbody></table></div>"
    )


def _sizes(sizes: Any) -> str:
    if not isinstance(sizes, Mapping):
        return str(sizes)
    named = {axis: "the rest" if n == -1 else str(n) for axis, n in sizes.items() if n != 1}
    return ", ".join(f"{axis} {n}" for axis, n in named.items()) or "one device"


def _config_table(config: Row) -> str:
    if not config:
        return ""
    defaults = _defaults(config)
    changed: list[str] = []
    others: list[str] = []
    for key, value in flatten(config).items():
        default = defaults.get(key)
        own = key not in defaults or value != (
            list(default) if isinstance(default, tuple) else default
        )
        cells = f"<td><code>{escape(key)}</code></td><td><code>{escape(_value(value))}</code></td>"
        (changed if own else others).append(f"<tr>{cells}</tr>")
    table = '<div class="card scroll"><table class="config"><tbody>{}</tbody></table></div>'
    page = "<h2>Config</h2>" + table.format("".join(changed))
    if others:
        page += (
            f"<details><summary>{len(others)} keys at their defaults</summary>"
            f"{table.format(''.join(others))}</details>"
        )
    return page


def _defaults(config: Row) -> dict[str, Any]:
    """The common keys' defaults, and those of the algorithm and task where they are at hand."""
    defaults = flatten(default_config())
    for section, selector in OWNED_SECTIONS.items():
        with contextlib.suppress(ConfigError):
            owned = owned_defaults(section, _get(config, selector, defaults[selector]))
            defaults |= {f"{section}.{key}": value for key, value in owned.items()}
    return defaults


def _value(value: Any) -> str:
    return '""' if value == "" else str(value)
