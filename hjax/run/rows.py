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
