"""How the values of a step are spread: rows of histograms.jsonl."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

BINS = 20


def histogram(values: Any) -> dict[str, Any] | None:
    """Counts of values in ``BINS`` bins of one width from the least to the greatest.

    Args:
      values: any shape; NaN counts nowhere.

    Returns:
      ``low``, ``high``, ``counts``, and ``sum`` and ``squares`` of the values; None without any.
    """
    found = np.asarray(values, np.float64).ravel()
    found = found[np.isfinite(found)]
    if not found.size:
        return None
    counts, edges = np.histogram(found, BINS)
    return {
        "low": float(edges[0]),
        "high": float(edges[-1]),
        "counts": counts.tolist(),
        "sum": float(found.sum()),
        "squares": float(np.square(found).sum()),
    }


def histogram_row(batch: Mapping[str, Any], step: int) -> dict[str, Any]:
    """A row of histograms.jsonl: ``reward``, ``cost`` and ``length`` of the step's responses,
    each as of ``histogram``, where the batch has them."""
    found: dict[str, Any] = {}
    for name, key in (("reward", "rewards"), ("cost", "costs")):
        if key in batch:
            found[name] = histogram(batch[key])
    if "response_mask" in batch:
        found["length"] = histogram(np.asarray(batch["response_mask"]).sum(axis=1))
    return {"step": step} | {name: said for name, said in found.items() if said is not None}
