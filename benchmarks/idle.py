"""A worker for benchmarks/controller.py, in a file that other processes import."""

from __future__ import annotations

from typing import Any

import numpy as np

import hjax


class Idle:
    """A worker that does nothing, or makes and takes bytes."""

    @hjax.protocol("ALL_TO_ALL")
    def nothing(self) -> None:
        """Empty work."""

    @hjax.protocol("ALL_TO_ALL")
    def make(self, size: int) -> dict[str, Any]:
        """So many bytes."""
        return {"tokens": np.ones(size, np.uint8)}

    @hjax.protocol("ALL_TO_ALL")
    def take(self, batch: dict[str, Any]) -> int:
        """Their sum."""
        return int(batch["tokens"].sum())
