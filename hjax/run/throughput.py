"""How much a step computed, and how fast: model FLOPs and their share of the devices' peak."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from hjax.algorithms import Algorithm
from hjax.devices import device_of_kind
from hjax.errors import ConfigError
from hjax.models import arithmetic
from hjax.run.dataflow import StepCall, step_calls
from hjax.run.roles import Roles


class Throughput:
    """Counts the model FLOPs of steps: 2 per parameter and token of a forward pass and what
    attention takes, twice as much again of a backward pass, once where weights are frozen.

    Tokens are those of prompts and responses, padding left out; every row has its prompt, though a
    forward pass may run once for all rows of one. Nothing that is computed again counts.

    Args:
      config: of the run.
      algorithm: its class.
      roles: of the run.
      devices: all of them.
      float32: whether the run computes in float32.
    """

    def __init__(
        self,
        config: ConfigDict,
        algorithm: type[Algorithm],
        roles: Roles,
        devices: Sequence[Any],
        float32: bool,
    ):
        self._calls: tuple[StepCall, ...] = ()
        if algorithm.generates:
            rows = config.rollout.prompts * config.rollout.samples
            updates = rows // (config.algorithm.get("minibatch", 0) or rows)
            try:
                self._calls = step_calls(
                    algorithm, config.algorithm, updates, config.rollout.samples, (), roles.served
                )
            except ConfigError:
                pass  # of a step that cannot be read off nothing is told
        self._models = {r: (m, roles.table[r].scalar) for r, m in roles.models.items()}
        self._peak = peak_flops(devices, float32)

    def metrics(self, batch: Mapping[str, Any], seconds: float) -> dict[str, float]:
        """``throughput/tflops``, per second over all devices, and ``throughput/mfu`` where their
        peak is known; empty where the step's calls are not."""
        if not self._calls or "response_mask" not in batch:
            return {}
        lengths = np.sum(batch["prompt_mask"], axis=1) + np.sum(batch["response_mask"], axis=1)
        sizes, counts = np.unique(lengths, return_counts=True)
        total = 0.0
        for call in self._calls:
            if call.role in self._models:
                model, scalar = self._models[call.role]
                update = call.phase == "update"
                passes = arithmetic.update_passes(model, scalar) if update else 1.0
                each = [arithmetic.forward_flops(model, int(n), scalar) for n in sizes]
                total += call.rows * passes * float(np.dot(each, counts))
        found = {"throughput/tflops": total / seconds / 1e12}
        if self._peak:
            found["throughput/mfu"] = total / seconds / self._peak
        return found


def peak_flops(devices: Sequence[Any], float32: bool) -> float:
    """FLOP/s of dense products over all devices; 0 where one is not in the catalogue."""
    total = 0.0
    for device in devices:
        known = device_of_kind(getattr(device, "device_kind", ""))
        if known is None:
            return 0.0
        total += known.flops["float32" if float32 else "bfloat16"]
    return total


def token_seconds(roles: Roles, devices: Sequence[Any], float32: bool) -> float:
    """Seconds that a device takes by data sheet to read its share of the weights that generate.

    Returns:
      0 where there are none, or a device is not in the catalogue.
    """
    role = next((r for r in ("rollout", "actor") if r in roles.layouts and r in roles.models), "")
    known = device_of_kind(getattr(devices[0], "device_kind", ""))
    if not role or known is None:
        return 0.0
    sizes = roles.layouts[role].generate.describe()
    split = sizes.get("tensor", 1) * sizes.get("pipe", 1)
    weights = arithmetic.parameters(roles.models[role]) * (4 if float32 else 2)
    return weights / split / known.bandwidth
