"""What a step leaves behind: rows of samples.jsonl."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np


def take_rows(batch: Mapping[str, Any], count: int) -> dict[str, Any]:
    """The first rows of a batch, of arrays and lists alike."""
    return {
        key: take_rows(value, count) if isinstance(value, Mapping) else value[:count]
        for key, value in batch.items()
    }


def spread_rows(rows: int, samples: int, count: int) -> list[int]:
    """Which rows of a batch are shown: of as many prompts as can be, those of one side by side.

    Args:
      rows: of the batch, the ``samples`` of a prompt one after the other.
      count: rows wanted; fewer where there are not so many.

    Returns:
      indices of rows, rising. With more than one sample a prompt shows at least two.
    """
    prompts = max(rows // max(samples, 1), 1)
    each = min(max(2, -(-count // prompts)), samples) if samples > 1 else 1
    return [i for i in range(rows) if i % samples < each][:count]


def sample_row(batch: Mapping[str, Any], row: int, step: int, kind: str) -> dict[str, Any]:
    """A row of samples.jsonl; advantage is the mean over the response."""
    mask = np.asarray(batch["response_mask"][row], bool)
    sample: dict[str, Any] = {"step": step, "index": row, "kind": kind}
    if "response_text" in batch:
        sample |= {"prompt": batch["prompt_text"][row], "response": batch["response_text"][row]}
    else:
        prompt = np.asarray(batch["prompts"][row])[np.asarray(batch["prompt_mask"][row], bool)]
        response = np.asarray(batch["responses"][row])[mask]
        sample |= {"prompt": str(prompt.tolist()), "response": str(response.tolist())}
    if "rewards" in batch:
        sample["reward"] = float(batch["rewards"][row])
    if "costs" in batch:
        sample["cost"] = float(batch["costs"][row])
    if "advantages" in batch and mask.any():
        sample["advantage"] = float(np.asarray(batch["advantages"][row])[mask].mean())
    sample["truncated"] = bool(batch["truncated"][row])
    return sample
