"""Accuracy, loss and expected calibration error (ECE) of binary predictions.

A prediction is a logit x: yes with probability σ(x). It predicts the likelier outcome, with the
confidence max(σ(x), 1 - σ(x)).
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

# Number of confidence bins between one half and 1.
BINS = 10


def prediction_metrics(logits: np.ndarray, outcomes: np.ndarray) -> dict[str, float]:
    """Metrics of predictions.

    Args:
      logits: float [n].
      outcomes: [n], 1 yes and 0 no.

    Returns:
      ``accuracy`` (a logit of 0 counts one half), ``loss`` (mean negative log-likelihood, nats) and
      ``calibration_error``: the expected calibration error, the mean over predictions of the
      difference between accuracy and mean confidence of their bin (arXiv 1706.04599).
    """
    logits = np.asarray(logits, np.float64)
    signed = np.where(np.asarray(outcomes) > 0.5, logits, -logits)
    bins = calibration_bins(logits, outcomes)
    error = sum(b["count"] * abs(b["observed"] - b["predicted"]) for b in bins) / len(logits)
    return {
        # 1 where the predicted outcome is the actual one, 0 where not.
        "accuracy": float(np.heaviside(signed, 0.5).mean()),
        "loss": float(np.logaddexp(0.0, -signed).mean()),
        "calibration_error": float(error),
    }


def calibration_bins(
    logits: np.ndarray, outcomes: np.ndarray, bins: int = BINS
) -> list[dict[str, Any]]:
    """Reliability diagram: predictions in equal bins of confidence; empty bins are left out.

    Args:
      logits, outcomes: see ``prediction_metrics``.
      bins: number of bins between one half and 1.

    Returns:
      for each bin ``predicted`` (mean confidence), ``observed`` (accuracy) and ``count``.
    """
    logits = np.asarray(logits, np.float64)
    signed = np.where(np.asarray(outcomes) > 0.5, logits, -logits)
    confidence = 1.0 / (1.0 + np.exp(-np.abs(logits)))
    bin_index = np.minimum(((confidence - 0.5) * 2 * bins).astype(int), bins - 1)
    found = []
    for i in range(bins):
        if (chosen := bin_index == i).any():
            found.append(
                {
                    "predicted": float(confidence[chosen].mean()),
                    "observed": float(np.heaviside(signed[chosen], 0.5).mean()),
                    "count": int(chosen.sum()),
                }
            )
    return found


# Metric prefix -> (logits, outcomes) of the same shape, examples first; NaN: unknown outcome.
Predictions = Mapping[str, tuple[np.ndarray, np.ndarray]]
