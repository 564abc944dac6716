"""Does it learn? Runs every shipped config from several seeds, as the command line does.

    python benchmarks/learning.py --seeds=3 [--configs=ppo,grpo] [--workdir=runs/learning]
        [--pages=docs/algorithms]
    python benchmarks/learning.py --seeds=100-104 ...

A run that has ended is kept and not run again as long as it would have the same settings and run
the same code (`code_hash`); one that was interrupted goes on from its last checkpoint. Configs are
those in hjax/launch/configs that have something to learn by (`LEARNS`), `VARIANTS` of them, and the
runs with tools of tool_tasks.py and with agents of agent_tasks.py (`STAGED`).
After every run,
RESULTS.md and the curves in `--pages` are written of all runs that the workdir has; without
`--pages` nothing is. `--pages` keeps what its tables need of each run in runs.jsonl, so that one
machine goes on where another was left: a run that stands there counts as one of the workdir's.
Runs of other code stand in a table of their own, unless

    python benchmarks/learning.py --repeat [--configs=...] --pages=docs/algorithms

has found that today's code takes the same first three steps (all metrics that they have but times,
of each config's first seed, on as many cores as the kept run had; bit for bit, on another processor
to 1e-3); then they count as today's, and RESULTS.md says so.

Prints one JSON line: for every config and seed where its measures start and end, and the seconds of
the whole command (start and compilation included) and of the processor. Exit status 1: some run
does not show that it learns.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import dataclasses
import functools
import hashlib
import json
import math
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any

import agent_tasks
import machine
import tool_tasks

import hjax
from hjax.config import Config, flatten
from hjax.errors import ConfigError
from hjax.files import read_json, read_rows, replace_file, to_json
from hjax.launch.jax_setup import prepare_jax
from hjax.launch.stages import WORKDIR, Stages, read_stages
from hjax.settings.config_checks import complete_config, resolve_sizes
from hjax.settings.config_loading import config_names, load_config
from hjax.show.charts import ChartSeries, svg_file
from hjax.show.curves import points_of

DONE, KEPT = "learning.json", "runs.jsonl"
# Steps that `--repeat` takes again.
FIRST_STEPS = 3
# Sections of metrics that no two runs have alike.
OF_MACHINE = ("time", "throughput", "memory", "compile")


@dataclasses.dataclass(frozen=True)
class Run:
    """A run that has ended.

    Attributes:
      rows: of its metrics.jsonl; of a kept run the metrics alone by which it is measured.
      facts: on what it ran for how long.
      first: of a kept run the first steps with all metrics, of one seed of each config.
    """

    rows: Sequence[Mapping[str, Any]]
    facts: Mapping[str, Any]
    first: Sequence[Mapping[str, Any]] = ()


Runs = dict[str, dict[int, Run]]


@dataclasses.dataclass(frozen=True)
class Measure:
    """A metric by which a run shows that it learns.

    Args:
      metric: of the rows of metrics.jsonl. One of an evaluation counts at the start (before the
        first update) and at the end; another counts in the first step, whose rollouts and losses
        are those of the start, and by its mean over the last ten.
      rise: least difference of end and start; below 0: it is to fall. None: any, of a run that
        others are compared with.
      below: what the end is to stay below; None: anything.
      start: what counts as the start; None: what was measured.
    """

    metric: str
    rise: float | None = 0.2
    below: float | None = None
    start: float | None = None

    def change(self, rows: Sequence[Mapping[str, float]]) -> tuple[float, float]:
        """Start and end of a run, of its rows of metrics.jsonl."""
        values = [row[self.metric] for row in rows if row.get(self.metric) is not None]
        last = values[-1:] if self.metric.startswith("eval/") else values[-10:]
        first = values[0] if self.start is None else self.start
        return first, sum(last) / len(last)

    def met(self, start: float, end: float) -> bool:
        """Whether a run that went from start to end shows it."""
        if self.rise is None:
            return True
        far = end - start >= self.rise if self.rise >= 0 else end - start <= self.rise
        return far and (self.below is None or end < self.below)


HELD_OUT = (Measure("eval/accuracy"),)
# Of pairs: which of the two the policy has made more likely than its reference has. At first it is
# the reference: chance. Its answers are to get better too.
PREFERS = (Measure("actor/accuracy", start=0.5), Measure("eval/accuracy", rise=0.05))
# Of judged prompts: accuracy, and beside it the share of groups without a gradient.
JUDGED = (Measure("eval/accuracy", rise=0.1), Measure("judge/zero_variance", rise=None))
COMPARED = (Measure("eval/accuracy", rise=None),)
# By what each config's runs show that they learn; those that are not here: by held-out accuracy.
LEARNS: dict[str, tuple[Measure, ...]] = {
    "base": (),  # nobody's task
    "ppo_llama_7b": (),  # needs weights from outside and a pod
    "stories": (),  # needs weights and a task of files from outside
    **dict.fromkeys(("dpo", "ipo", "cdpo", "hinge_dpo", "robust_dpo"), PREFERS),
    # Without a reference the chosen ones are preferred from the start: by more, in the end.
    "sim_po": (Measure("actor/margin", rise=0.5), Measure("eval/accuracy", rise=0.05)),
    "safe_rlhf": (Measure("eval/reward", rise=0.05), Measure("cost/mean", rise=-0.3, below=0.1)),
    # Of episodes the mean return, of which no other right and wrong is told.
    "maze": (Measure("eval/reward", rise=0.1),),
    "gigpo": (Measure("eval/reward", rise=0.1), Measure("episode/turns", rise=None)),
    # What others are compared with, and what they are compared by.
    "gigpo_episodes": (Measure("eval/reward", rise=None), Measure("episode/turns", rise=None)),
    "metis": JUDGED,
    **dict.fromkeys(("metis_frozen", "metis_uniform", "metis_oracle"), COMPARED),
    # The likeliest program is right after the warm start; what is drawn becomes so.
    "fee_schedule": (Measure("reward/mean", rise=0.1), Measure("eval/accuracy", rise=None)),
    "fee_schedule_direct": (Measure("eval/accuracy", rise=None),),
    "calculator": (Measure("eval/reward"),),
    "calculator_alone": (Measure("eval/reward", rise=None),),
    # Of episodes the mean return: 475 of 500 counts as solved.
    "ppo_cartpole": (Measure("eval/reward", rise=400),),
    "dqn_cartpole": (Measure("eval/reward", rise=100),),
    "spell_backward": (Measure("eval/accuracy", rise=0.1),),
    # Conversations with tools, and the same questions without. What is most likely changes at once,
    # what is drawn little by little.
    **dict.fromkeys(
        ("interpreter", "lookup", "recovery"),
        (Measure("eval/reward"), Measure("reward/mean", rise=0.1)),
    ),
    # Agents, and the same as an environment.
    **dict.fromkeys(agent_tasks.TASKS, (Measure("eval/reward"), Measure("reward/mean", rise=0.1))),
    **dict.fromkeys(("interpreter_alone", "lookup_alone"), (Measure("eval/reward", rise=None),)),
}
# Runs of shipped configs with other keys, by name: what a config is compared with, and tasks that
# need packages from outside (the extra `environments`).
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "calculator_alone": ("calculator", {"data.task_options.tool": False}),
    # GRPO on the same episodes.
    "gigpo_episodes": ("gigpo", {"algorithm.step_weight": 0.0}),
    "metis_frozen": ("metis", {"algorithm.judge_weight": 0.0}),
    "metis_uniform": ("metis", {"algorithm.judge": "none"}),
    "metis_oracle": ("metis", {"algorithm.judge": "rollouts"}),
    "fee_schedule_direct": ("fee_schedule", {"data.task_options.mode": "direct"}),
    "spell_backward": (
        "grpo",
        {
            "data.task": "reasoning_gym:spell_backward",
            "data.task_options.min_word_len": 3,
            "data.task_options.max_word_len": 4,
            "data.task_options.size": 4000,
            "algorithm.entropy_coef": 0.0,
            "warm_start.steps": 100,
            "steps": 250,
        },
    ),
}
# Runs of several stages, of which the last is measured: names that are arguments of these modules.
STAGED: dict[str, Any] = {
    **dict.fromkeys(
        ("interpreter", "interpreter_alone", "lookup", "lookup_alone", "recovery"), tool_tasks
    ),
    **dict.fromkeys(agent_tasks.TASKS, agent_tasks),
}


def config_of(name: str) -> tuple[str, dict[str, Any]]:
    """The shipped config of a run's name, and the keys that are set beside the seed."""
    return VARIANTS.get(name, (name, {}))


def label_of(name: str) -> str:
    """What a run's name stands for: the config, and other keys."""
    if name in STAGED:
        return f"benchmarks/{staged_file(name).name}:{name}"
    config, keys = config_of(name)
    return " ".join([f"{config}.py", *(f"{key}={value}" for key, value in keys.items())])


def runs_here() -> list[str]:
    """Names of all runs."""
    return [name.removesuffix(".py") for name in config_names()] + [*VARIANTS, *STAGED]


def staged_file(name: str) -> pathlib.Path:
    """The file of a run of several stages."""
    return pathlib.Path(STAGED[name].__file__)


def stages_of(name: str, seed: int) -> Stages:
    """The stages of a run that has some."""
    stages, _ = read_stages(f"{staged_file(name)}:{name}", [f"--config.seed={seed}"])
    assert stages is not None
    return stages


def measures(config: str) -> tuple[Measure, ...]:
    """By what a config's runs show that they learn; () where they need what hjax does not have."""
    return LEARNS.get(config, HELD_OUT)


def settings(config: str, seed: int) -> dict[str, Any]:
    """What a run is told: the keys that have other values than their defaults."""
    if config in STAGED:
        stages = stages_of(config, seed).configs(pathlib.Path(WORKDIR))
        each = {f"{stage}.": _told(told) for stage, told in stages.items()}
        every = {stage + k: v for stage, keys in each.items() for k, v in keys.items()}
        return every | {"data": STAGED[config].data_digest(config)}
    name, keys = config_of(config)
    return _told(load_config(name, {**keys, "seed": seed}))


def _told(told: Config) -> dict[str, Any]:
    names = {"algorithm.name": told.algorithm.name, "data.task": told.data.task}
    # Without the checks: an algorithm may refuse the defaults of others.
    defaults = flatten(resolve_sizes(complete_config(names)))
    return to_json({k: v for k, v in flatten(told).items() if v != defaults[k]})


@functools.cache
def code_hash() -> str:
    """Of what decides how a run learns: algorithms with their losses, workers and rollout.

    Over the syntax trees without docstrings, so that comments and layout do not count. The config
    counts by its settings.
    """
    package, digest = pathlib.Path(hjax.__file__).parent, hashlib.sha256()
    for folder in ("algorithms", "rollout", "workers"):
        for file in sorted((package / folder).rglob("*.py")):
            tree = ast.parse(file.read_text())
            for node in ast.walk(tree):
                body = getattr(node, "body", None)
                if isinstance(body, list) and body and isinstance(body[0], ast.Expr):
                    if isinstance(body[0].value, ast.Constant):
                        del body[0]
            digest.update(f"{file.relative_to(package)} {ast.dump(tree)}".encode())
    return digest.hexdigest()[:16]


def is_current(facts: Mapping[str, Any] | None, config: str, seed: int) -> bool:
    """Whether a run of these facts would be the same run now."""
    found = facts or {}
    try:
        now = settings(config, seed)
    except ConfigError:  # it needs a package that is not here
        return False
    return found.get("code") == code_hash() and found.get("settings") == now


def finished(config: str, seed: int, folder: pathlib.Path) -> Run | None:
    """The run in a folder, if it has ended and would be the same run now."""
    facts = read_json(folder / DONE)
    if facts is None or not is_current(facts, config, seed):
        return None
    return Run(rows_in(config, folder), facts)


def rows_in(config: str, folder: pathlib.Path) -> list[dict[str, Any]]:
    """The metrics of a run that has ended."""
    last = list(stages_of(config, 0).declared)[-1] if config in STAGED else ""
    return read_rows(folder / last / "metrics.jsonl")


def kept_in(pages: pathlib.Path | None) -> tuple[Runs, Runs]:
    """The runs of shipped configs that a folder of pages has: of today's code, and of earlier."""
    current: Runs = {}
    earlier: Runs = {}
    if pages is not None and (pages / KEPT).exists():
        shipped = set(runs_here())
        for line in map(json.loads, (pages / KEPT).read_text().splitlines()):
            config, seed, facts = line["config"], line["seed"], line["facts"]
            if config in shipped:
                runs = current if is_current(facts, config, seed) else earlier
                runs.setdefault(config, {})[seed] = Run(line["rows"], facts, line.get("first", ()))
    return current, earlier


def without(earlier: Runs, runs: Runs) -> Runs:
    """The earlier runs whose config and seed have not been run again."""
    left = {
        config: {seed: run for seed, run in seeds.items() if seed not in runs.get(config, {})}
        for config, seeds in earlier.items()
    }
    return {config: seeds for config, seeds in sorted(left.items()) if seeds}


def seeds_of(text: str) -> range:
    """`5` is 0 to 4, `100-104` is 100 to 104."""
    first, dash, last = text.partition("-")
    return range(int(first), int(last) + 1) if dash else range(int(first))


def ranges(seeds: Sequence[int]) -> str:
    """`0-2, 7`, of 0, 1, 2 and 7."""
    parts: list[list[int]] = []
    for seed in sorted(seeds):
        if parts and seed == parts[-1][-1] + 1:
            parts[-1].append(seed)
        else:
            parts.append([seed])
    return ", ".join(str(p[0]) if len(p) == 1 else f"{p[0]}-{p[-1]}" for p in parts)


def keep(runs: Runs, pages: pathlib.Path) -> None:
    """Writes of each run, a line each, its facts and the metrics by which it is measured."""
    lines = []
    for config, seeds in runs.items():
        metrics = [measure.metric for measure in measures(config)]
        told: list[dict[str, Any]] = []  # other settings than these have first steps of their own
        for seed, run in sorted(seeds.items()):
            settings_here = {k: v for k, v in run.facts["settings"].items() if k != "seed"}
            rows = [
                {m: _short(row[m]) for m in ("step", *metrics) if row.get(m) is not None}
                for row in run.rows
            ]
            rows = [row for row in rows if len(row) > 1]
            line = {"config": config, "seed": seed, "facts": dict(run.facts), "rows": rows}
            if settings_here not in told:
                told.append(settings_here)
                line["first"] = run.first or [computed(row) for row in run.rows[:FIRST_STEPS]]
            lines.append(json.dumps(line) + "\n")
    replace_file(pages / KEPT, "".join(lines))


def computed(row: Mapping[str, Any]) -> dict[str, Any]:
    """A step's metrics without those of the machine."""
    return {k: v for k, v in row.items() if k.partition("/")[0] not in OF_MACHINE}


def _short(value: float) -> float:
    return value if isinstance(value, int) else float(f"{value:.6g}")


def arguments(config: str, seed: int) -> list[str]:
    """Of the command that trains."""
    if config in STAGED:
        return [f"--config={staged_file(config)}:{config}", f"--config.seed={seed}"]
    name, keys = config_of(config)
    told = [f"--config.{key}={value}" for key, value in {**keys, "seed": seed}.items()]
    return [f"--config={name}.py", *told]


def train(config: str, seed: int, folder: pathlib.Path) -> Run:
    """Runs the command to its end, or goes on with it where it was left."""
    told = {"settings": settings(config, seed), "code": code_hash()}
    began = folder.with_suffix(".json")
    if folder.exists() and ((folder / DONE).exists() or read_json(began) != told):
        shutil.rmtree(folder)
    began.parent.mkdir(parents=True, exist_ok=True)
    began.write_text(json.dumps(told, indent=1))
    resumed = folder.exists()
    command = [sys.executable, "-m", "hjax.launch", *arguments(config, seed), f"--workdir={folder}"]
    use, start = machine.CoreUse(), time.perf_counter()
    output = folder.with_suffix(".txt")
    with open(output, "w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
        _, status, resources = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        last = "\n".join(output.read_text().strip().splitlines()[-12:])
        sys.exit(f"{label_of(config)}, seed {seed}: exit status {process.returncode}\n{last}")
    output.unlink()
    began.unlink()
    facts = {
        **told,
        # Of a run that was interrupted nobody knows.
        "seconds": None if resumed else round(time.perf_counter() - start, 1),
        "processor_seconds": None if resumed else round(resources.ru_utime + resources.ru_stime, 1),
        **machine.describe(),
        **use.read(),
        **machine.versions("jax"),
    }
    (folder / DONE).write_text(json.dumps(facts, indent=1))
    for checkpoints in list(folder.rglob("checkpoints")):
        shutil.rmtree(checkpoints)
    return Run(rows_in(config, folder), facts)


def repeat(config: str, pages: pathlib.Path) -> str:
    """Have a config's kept runs of other code count as today's if today's code begins as they did.

    Sets JAX's options as the command does, so one config in a process.

    Returns:
      what was found, a line.
    """
    current, earlier = kept_in(pages)
    old = earlier.get(config, {})
    seeds = [
        seed for seed in sorted(old) if old[seed].facts.get("settings") == settings(config, seed)
    ]
    if not seeds or not old[seeds[0]].first:
        return f"{label_of(config)}: no runs of other code, or without their first steps"
    kept = old[seeds[0]]
    # On others it has other devices, whose sums differ in last bits: hundreds of demonstrations
    # later, where stages begin, in more.
    machine.use_cores(kept.facts["cores"])
    with tempfile.TemporaryDirectory() as folder:
        rows = first_rows(config, seeds[0], len(kept.first), pathlib.Path(folder))
    same_machine = all(kept.facts[name] == machine.describe()[name] for name in ("cpu", "cores"))
    tolerance = 0.0 if same_machine else 1e-3
    for mine, theirs in zip(rows, kept.first, strict=True):
        # Metrics that came later are not compared.
        other = [k for k in theirs if not _alike(mine.get(k), theirs[k], tolerance)]
        if other:
            return (
                f"{label_of(config)}: step {theirs['step']} differs in {', '.join(sorted(other))}"
            )
    for seed in seeds:
        facts = {**old[seed].facts, "code": code_hash(), "repeated_steps": len(rows)}
        current.setdefault(config, {})[seed] = dataclasses.replace(old[seed], facts=facts)
    both = {c: {**earlier.get(c, {}), **current.get(c, {})} for c in sorted({**earlier, **current})}
    keep(both, pages)
    return f"{label_of(config)}: the same first {len(rows)} steps, so {len(seeds)} runs are today's"


def first_rows(config: str, seed: int, count: int, folder: pathlib.Path) -> list[dict[str, Any]]:
    """The metrics of a run's first steps, those of its last stage."""
    if config in STAGED:
        last = list(stages_of(config, seed).declared)[-1]
        told = [*arguments(config, seed), f"--config.{last}.steps={count}", f"--workdir={folder}"]
        subprocess.run([sys.executable, "-m", "hjax.launch", *told], check=True)
        return [computed(row) for row in rows_in(config, folder)]
    name, keys = config_of(config)
    settled = load_config(name, {**keys, "seed": seed})
    prepare_jax(settled)
    with contextlib.closing(hjax.Trainer(settled)) as trainer:
        return [computed(to_json(trainer.step())) for _ in range(count)]


def _alike(mine: Any, theirs: Any, tolerance: float) -> bool:
    if mine is None or theirs is None or not tolerance:
        return mine == theirs
    return math.isclose(mine, theirs, rel_tol=tolerance, abs_tol=tolerance)


def table(runs: Runs) -> list[str]:
    """A row per config and measure, in Markdown."""
    lines = [
        "| config | task | measure | start | end | difference | spread | seeds | seconds | "
        "learns |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for config, seeds in runs.items():
        for number, measure in enumerate(measures(config)):
            changes = [measure.change(run.rows) for run in seeds.values()]
            differences = [end - start for start, end in changes]
            spread = f"{statistics.stdev(differences):.3f}" if len(changes) > 1 else "–"
            start, end = (statistics.mean(side) for side in zip(*changes, strict=True))
            met = sum(measure.met(*change) for change in changes)
            aim = "no aim" if measure.rise is None else f"{measure.rise:+g}"
            if measure.below is not None:
                aim += f", ends below {measure.below:g}"
            cells = [
                f"`{label_of(config)}`" if number == 0 else "",
                _task(config) if number == 0 else "",
                f"`{measure.metric}`",
                f"{start:.3f}",
                f"{end:.3f}",
                f"{statistics.mean(differences):+.3f}",
                spread,
                ranges(list(seeds)),
                _seconds(seeds.values()) if number == 0 else "",
                f"{met} of {len(changes)} ({aim})",
            ]
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def _task(name: str) -> str:
    if name in STAGED:
        return name.removesuffix("_alone")
    config, keys = config_of(name)
    return str(keys.get("data.task") or load_config(config).data.task)


def _seconds(runs: Any) -> str:
    """Mean seconds of the command, and of the processor."""
    known = [run.facts for run in runs if run.facts["seconds"] is not None]
    if not known:
        return "–"
    wall, own = (
        statistics.mean(facts[name] for facts in known) for name in ("seconds", "processor_seconds")
    )
    return f"{wall:.0f} ({own:.0f})"


def curve(config: str, seeds: Mapping[int, Run]) -> str:
    """The SVG of a config's first measure by step, a line per seed."""
    measure = measures(config)[0]
    series = []
    for seed, run in seeds.items():
        points = points_of(run.rows, measure.metric)
        if measure.metric.startswith("eval/"):
            points[0] = (0, points[0][1])  # before the first update
        dots = measure.metric.startswith("eval/")
        series.append(ChartSeries(f"seed {seed}", points, seed % 8, dots=dots))
    start = statistics.mean(measure.change(run.rows)[0] for run in seeds.values())
    level = ("start", start) if measure.rise is None else ("aim", start + measure.rise)
    title = label_of(config).rpartition("/")[2]
    return svg_file(f"{title}: {measure.metric}", series, level)


def page(runs: Runs, earlier: Runs, command: str) -> str:
    """The text of RESULTS.md."""
    facts = [run.facts for seeds in runs.values() for run in seeds.values()]

    def said(name: str) -> str:
        return ", ".join(sorted({str(f[name]) for f in facts if f[name] is not None}))

    repeated = [f["repeated_steps"] for f in facts if f.get("repeated_steps")]
    busy = [f["other_cores"] for f in facts if f["other_cores"] is not None]
    lines = [
        "# Everything learns",
        "",
        f"<!-- written by `{command}`: do not edit -->",
        "",
        f"`{command}`"
        + (
            f", at {said('commit')}, on {said('cpu')} ({said('cores')} cores), Python "
            f"{said('python')}, jax {said('jax')}"
            if runs
            else ""
        )
        + f"; code of algorithms, workers and rollout: {code_hash()}. A run "
        "that has ended is kept: the command goes on where it was left, and the column of seeds "
        "says how far that is."
        + (
            f" Of {len(repeated)} runs of earlier code today's took the same first "
            f"{min(repeated)} steps (bit for bit, or on another processor to 1e-3), one seed of "
            "each config."
            if repeated
            else ""
        ),
        "",
        "Every run is `python -m hjax.launch --config=<config>`, its seed set. Start is the model "
        "as its warm start leaves it, for one task, model and number of warm-up steps the same in "
        "every config of one seed; `eval/` is of greedy answers to held-out prompts. Of preference "
        "pairs `actor/accuracy` starts at chance: the policy is its reference then. Figures are "
        "means over the seeds, spread is the standard deviation of the differences. Seconds are "
        "of the whole command, start and compilation included, and in brackets of the processor "
        "(all cores together)"
        + (
            f"; other processes used {min(busy):.1f} to {max(busy):.1f} cores meanwhile."
            if busy
            else "."
        ),
        "",
        "The last column: in how many runs the measure moved as far as it is to (in brackets).",
        "",
        *table(runs),
        *(["", "## Runs of earlier code", "", *table(earlier)] if earlier else []),
        "",
        "## Curves",
        "",
        "The first measure by step, a line per seed; dashed: the aim, or the start.",
        "",
        *(f"![{label_of(config)}](curves/{config}.svg)" for config in sorted({**earlier, **runs})),
    ]
    return "\n".join(lines) + "\n"


def write(runs: Runs, earlier: Runs, pages: pathlib.Path, command: str) -> None:
    """RESULTS.md, the curves and what is kept of the runs."""
    earlier = without(earlier, runs)
    both = {c: {**earlier.get(c, {}), **runs.get(c, {})} for c in sorted({**earlier, **runs})}
    (pages / "curves").mkdir(parents=True, exist_ok=True)
    for config, seeds in both.items():
        (pages / "curves" / f"{config}.svg").write_text(curve(config, runs.get(config, seeds)))
    keep(both, pages)
    (pages / "RESULTS.md").write_text(page(runs, earlier, command))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--configs", default="", help="comma-separated; default: all that learn")
    parser.add_argument("--seeds", default="3", help="a count (3: seeds 0 to 2) or 100-104")
    parser.add_argument("--workdir", type=pathlib.Path, default=pathlib.Path("runs/learning"))
    parser.add_argument("--pages", type=pathlib.Path, help="where RESULTS.md and curves go")
    parser.add_argument("--kept", action="store_true", help="run nothing, write what is there")
    parser.add_argument("--repeat", action="store_true", help="see above; runs nothing else")
    args = parser.parse_args()
    shipped = runs_here()
    configs = args.configs.split(",") if args.configs else [c for c in shipped if measures(c)]
    if args.repeat and args.pages is None:
        parser.error("--repeat takes the runs that --pages has")
    if args.repeat and len(configs) == 1:
        print(repeat(configs[0], args.pages))
        return
    if args.repeat:
        for config in configs:
            subprocess.run([sys.executable, *sys.argv, f"--configs={config}"], check=True)
        return
    command = f"python benchmarks/learning.py --seeds={args.seeds}"
    runs, earlier = kept_in(args.pages)
    for seed in seeds_of(args.seeds):  # all configs once before any twice
        for config in configs:
            folder = args.workdir / f"{config}-{seed}"
            run = finished(config, seed, folder) or runs.get(config, {}).get(seed)
            if run is None and args.kept:
                continue
            if run is None:
                run = train(config, seed, folder)
                changes = {m.metric: m.change(run.rows) for m in measures(config)}
                print(
                    f"{label_of(config)}, seed {seed}: {changes}",
                    run.facts,
                    file=sys.stderr,
                    flush=True,
                )
            runs.setdefault(config, {})[seed] = run
            if args.pages and not args.kept:
                write(dict(sorted(runs.items())), earlier, args.pages, command)
    runs = dict(sorted(runs.items()))
    if args.pages:
        write(runs, earlier, args.pages, command)
    shown = {
        config: {
            seed: {m.metric: m.change(run.rows) for m in measures(config)} | dict(run.facts)
            for seed, run in seeds.items()
        }
        for config, seeds in runs.items()
    }
    print(json.dumps({"benchmark": "learning", **machine.describe(), "runs": shown}))
    failed = [
        f"{label_of(config)}, seed {seed}: {m.metric}"
        for config, seeds in runs.items()
        for seed, run in seeds.items()
        for m in measures(config)
        if not m.met(*m.change(run.rows))
    ]
    if failed:
        sys.exit("does not show that it learns: " + "; ".join(failed))


if __name__ == "__main__":
    main()
