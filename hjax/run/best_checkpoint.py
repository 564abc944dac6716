"""The best checkpoint by a metric: ``checkpoint.best``, kept beside the newest ones."""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from hjax.config import nearest_keys
from hjax.errors import ConfigError, safe_repr
from hjax.files import BEST, METRICS, json_line, read_json, read_rows, replace_file


def check_has_metric(metric: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Check that the steps taken have the metric of ``checkpoint.best``.

    Raises:
      ConfigError: none has.
    """
    names = {name for row in rows for name in row}
    if metric and rows and metric not in names:
        near = " or ".join(nearest_keys(metric, sorted(names - {"step"})))
        raise ConfigError(
            f"config.checkpoint.best={safe_repr(metric)}: no metric of this run; did you mean "
            f"{near}?"
        )


def best_step(
    rows: Sequence[Mapping[str, Any]], saved: Sequence[int], metric: str, mode: str
) -> tuple[int, float] | None:
    """The saved step with the best value of a metric, the first of equals, and the value.

    Args:
      rows: of metrics.jsonl. The first one's evaluation is of the model before its update, so it
        does not count.
      saved: steps with a checkpoint.
      metric: the metric's name.
      mode: ``max`` or ``min``.

    Returns:
      None if no saved step has a finite value.
    """
    sign = 1.0 if mode == "max" else -1.0
    found = [
        (sign * row[metric], -row["step"])
        for row in rows
        if row["step"] in saved
        and row.get(metric) is not None
        and math.isfinite(row[metric])
        and not (row["step"] == 1 and metric.startswith("eval/"))
    ]
    if not found:
        return None
    value, step = max(found)
    return -step, sign * value


def best_checkpoint_selector(
    config: ConfigDict, workdir: Path
) -> Callable[[Sequence[int]], int | None]:
    """What chooses the checkpoint to keep, and records it in best.json, for ``Checkpoints``."""
    metric, mode = config.checkpoint.best, config.checkpoint.best_mode

    def choose(saved: Sequence[int]) -> int | None:
        if not metric:
            return None
        found = best_step(read_rows(workdir / METRICS), saved, metric, mode)
        if found is None:
            return None
        step, value = found
        record = {"step": step, "metric": metric, "mode": mode, "value": value}
        replace_file(workdir / BEST, json_line(record) + "\n")
        return step

    return choose


def describe_best(workdir: Path) -> str:
    """The best checkpoint in a line; empty if the run has none."""
    record = read_json(workdir / BEST)
    if record is None:
        return ""
    return (
        f"best checkpoint: step {record['step']}, {record['metric']} {record['value']:.4g}, as "
        f"--model={workdir}/checkpoints/best"
    )
