"""Workers for benchmarks of the controller, in a file that other processes import."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

import hjax
from hjax.sharding.global_arrays import to_numpy
from hjax.sharding.protocols import control
from hjax.workers import Reference


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


class Weights(Reference):
    """A model whose parameters are published, for benchmarks/publish.py."""

    @control
    def whole(self) -> Any:
        """The parameters gathered in every process, as numpy arrays."""
        return jax.tree.map(to_numpy, self.params)

    @control
    def fetched(self) -> int:
        """Bytes that this process read of the parameters it took last."""
        return self.fetched_bytes

    @control
    def checksum(self) -> float:
        """The sum of all parameters' absolute values, the same in every layout but for rounding."""
        arrays = map(to_numpy, jax.tree.leaves(self.params))
        total = sum(np.abs(x, dtype=np.float64).sum() for x in arrays)
        return round(float(total), 3)
