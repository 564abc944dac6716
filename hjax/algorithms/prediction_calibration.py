"""How good predictions of yes and no are: right or wrong, their loss, and whether sure means right.

A prediction is a logit x: yes with the probability σ(x). It says the likelier of the two, with a
confidence of max(σ(x), 1 - σ(x)).
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

# Of confidences from one half to 1.
BINS = 10


def prediction_metrics(logits: np.ndarray, outcomes: np.ndarray) -> dict[str, float]:
    """Figures of predictions.

    Args:
      logits: float [n].
      outcomes: [n], 1 yes and 0 no.

    Returns:
      ``accuracy`` (a logit of 0 is half right), ``loss`` (mean negative log-likelihood, nats) and
      ``calibration_error``: the mean over predictions of what the accuracy of their bin differs
      from its mean confidence (expected calibration error, https://arxiv.org/abs/1706.04599).
    """
    logits = np.asarray(logits, np.float64)
    signed = np.where(np.asarray(outcomes) > 0.5, logits, -logits)
    bins = calibration_bins(logits, outcomes)
    error = sum(b["count"] * abs(b["observed"] - b["predicted"]) for b in bins) / len(logits)
    return {
        "accuracy": float(_right(signed).mean()),
        "loss": float(np.logaddexp(0.0, -signed).mean()),
        "calibration_error": float(error),
    }


def calibration_bins(
    logits: np.ndarray, outcomes: np.ndarray, bins: int = BINS
) -> list[dict[str, Any]]:
    """Predictions by their confidence, in equal parts of one half to 1; empty parts left out.

    Args:
      logits, outcomes: as of ``prediction_metrics``.
      bins: parts.

    Returns:
      of each its ``predicted`` (mean confidence), ``observed`` (share that came out so) and
      ``count``.
    """
    logits = np.asarray(logits, np.float64)
    signed = np.where(np.asarray(outcomes) > 0.5, logits, -logits)
    confidence = 1.0 / (1.0 + np.exp(-np.abs(logits)))
    part = np.minimum(((confidence - 0.5) * 2 * bins).astype(int), bins - 1)
    found = []
    for i in range(bins):
        if (chosen := part == i).any():
            found.append(
                {
                    "predicted": float(confidence[chosen].mean()),
                    "observed": float(_right(signed[chosen]).mean()),
                    "count": int(chosen.sum()),
                }
            )
    return found


def _right(signed: np.ndarray) -> np.ndarray:
    """1 where the likelier of the two came, 0 where not, 0.5 where neither was likelier."""
    return (np.sign(signed) + 1.0) / 2.0


# By the start of its metrics' names: logits and outcomes of the same shape, examples first; an
# outcome of NaN stands where nothing is known.
Predictions = Mapping[str, tuple[np.ndarray, np.ndarray]]
