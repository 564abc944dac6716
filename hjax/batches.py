"""What every reader of a batch must agree on: how many tokens its rows have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

LENGTHS = "response_lengths"


def response_lengths(batch: Mapping[str, Any]) -> Any:
    """int32 [rows]: the tokens after each row's prompt.

    ``response_mask`` says which of them the policy drew. Those of an environment lie between them,
    and ``response_lengths`` counts them too; a batch without that entry has none of these, and the
    mask's sums are the lengths.

    Args:
      batch: of NumPy arrays or JAX's; so is the result.
    """
    if batch.get(LENGTHS) is not None:
        return batch[LENGTHS]
    return batch["response_mask"].sum(axis=1, dtype=np.int32)


def response_places(batch: Mapping[str, Any]) -> Any:
    """bool [rows, length]: where responses have a token, whoever wrote it."""
    mask = batch["response_mask"]
    if batch.get(LENGTHS) is None:
        return mask
    return np.arange(mask.shape[1]) < response_lengths(batch)[:, None]
