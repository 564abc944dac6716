"""Evaluation on held-out examples whose outcome is known: pairs, labels, steps."""

from __future__ import annotations

from typing import Any

import numpy as np
from ml_collections import ConfigDict

from hjax.algorithms import Algorithm
from hjax.algorithms.calibration import calibration_bins, prediction_metrics
from hjax.run.inputs import Demonstrations


def evaluate_predictions(
    config: ConfigDict, algorithm: Algorithm, examples: Demonstrations, step: int
) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Ask an algorithm's models about as many held-out examples as ``eval.prompts`` wants.

    Args:
      config: of the run; as many sequences go through at a time as in an update.
      algorithm: whose ``predictions`` are judged.
      examples: held-out ones.
      step: of the run, for the rows.

    Returns:
      ``eval/accuracy``, ``eval/loss`` and ``eval/calibration_error`` (with the start of their names
      that the algorithm gives); and a row of calibration.jsonl for each start.
    """
    count = min(config.eval.prompts or len(examples), len(examples))
    size = config.warm_start.batch // algorithm.unit
    found: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {}
    for start in range(0, count, size):
        some = range(start, min(start + size, count))
        filled = [*some, *[some[-1]] * (size - len(some))]
        for name, both in algorithm.predictions(examples.batch_of(filled)).items():
            logits, outcomes = (np.asarray(x, np.float64)[: len(some)].ravel() for x in both)
            known = ~np.isnan(outcomes)
            found.setdefault(name, []).append((logits[known], outcomes[known]))
    metrics: dict[str, float] = {}
    rows = []
    for name, parts in found.items():
        logits, outcomes = (np.concatenate(part) for part in zip(*parts, strict=True))
        if not len(logits):
            continue
        figures = prediction_metrics(logits, outcomes)
        metrics |= {f"eval/{name}{key}": value for key, value in figures.items()}
        of = name.rstrip("_")
        rows.append({"step": step, "of": of, "bins": calibration_bins(logits, outcomes)})
    return metrics, rows
