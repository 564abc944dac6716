"""Throughput of a step: seconds, tokens per second, FLOPs and model FLOPs utilisation (MFU)."""

import contextlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from hjax.algorithms import Algorithm
from hjax.batches import response_lengths, sample_rows
from hjax.devices import device_of_kind
from hjax.errors import ConfigError
from hjax.models import parameter_counts
from hjax.run.backends import Backend
from hjax.run.dataflow import StepCall, step_calls
from hjax.run.role_groups import RoleGroups, is_float32
from hjax.run.run_metadata import offloaded_bytes


class StepCosts:
    """Costs of a step: seconds, memory, compilations, and the model FLOPs of its tokens.

    A forward pass counts 2 FLOPs per parameter and token plus attention; a backward pass twice
    that, or once with frozen weights. Padding and recomputation (remat) do not count. Every row
    counts its prompt, even if a prompt is computed once for all its samples.

    Args:
      config: of the run.
      algorithm: its class.
      roles: of the run, started.
      backend: the run's devices and processes.

    Attributes:
      token_seconds: see ``token_seconds``; 0 where nothing is generated.
      compiled: names of the programs compiled by the last step.
    """

    def __init__(
        self, config: ConfigDict, algorithm: type[Algorithm], roles: RoleGroups, backend: Backend
    ):
        devices, float32 = backend.devices, is_float32(config, backend.platform)
        self._roles, self._backend, self._generates = roles, backend, algorithm.generates
        self._offloaded: int | None = None
        self.compiled: list[str] = []
        self.token_seconds = token_seconds(roles, devices, float32) if algorithm.generates else 0.0
        self._calls: tuple[StepCall, ...] = ()
        if algorithm.generates:
            samples = config.rollout.samples
            rows = config.rollout.prompts * samples
            updates = rows // (config.algorithm.get("minibatch", 0) or rows)
            with contextlib.suppress(ConfigError):  # a step that cannot be traced has no FLOPs
                self._calls = step_calls(
                    algorithm, config.algorithm, updates, samples, (), roles.shared_workers
                )
        self._models = {r: (m, roles.table[r].scalar) for r, m in roles.models.items()}
        self._peak = peak_flops(devices, float32)

    def measure_offload(self) -> None:
        """Ask the workers, once, for their offloaded bytes."""
        if self._offloaded is None:
            self._offloaded = offloaded_bytes(self._roles)

    def metrics(
        self, step: int, seconds: float, batch: Mapping[str, Any], synchronous: bool
    ) -> dict[str, float]:
        """A step's metrics under ``time``, ``throughput``, ``memory`` and ``compile``.

        Args:
          step: its number.
          seconds: its duration.
          batch: it trained on.
          synchronous: whether the rollout is synchronous; asking an asynchronous one would block.
        """
        machine = self._backend.read()
        self.compiled = sorted(set(machine["names"]))
        metrics = {"time/step": seconds}
        if synchronous and self._roles.models:
            spent = self._roles.groups["actor"].take_seconds().result()
            metrics["time/transition"] = spent.get("transition", 0.0)
        phases = self._roles.timeline.phase_seconds(step)
        metrics |= {f"time/{phase}": taken for phase, taken in phases.items()}
        if self._generates and "response_mask" in batch:
            tokens = int(response_lengths(batch).sum() + batch["prompt_mask"].sum())
            metrics["throughput/tokens_per_second"] = tokens / seconds
            metrics |= self.flops(batch, seconds)
            metrics |= session_times(batch, metrics.get("time/generate", seconds))
        metrics["memory/peak_bytes"] = machine["peak_bytes"]
        if self._offloaded:
            metrics["memory/offloaded_bytes"] = self._offloaded
        metrics["compile/count"] = machine["compiles"]
        return metrics

    def flops(self, batch: Mapping[str, Any], seconds: float) -> dict[str, float]:
        """``throughput/tflops`` (per second, over all devices) and, if the devices' peak is known,
        ``throughput/mfu``; empty if the step's calls could not be traced."""
        if not self._calls:
            return {}
        lengths = np.sum(batch["prompt_mask"], axis=1) + response_lengths(batch)
        sizes, counts = np.unique(lengths, return_counts=True)
        total = 0.0
        for call in self._calls:
            if call.role in self._models:
                model, scalar = self._models[call.role]
                update = call.phase == "update"
                passes = parameter_counts.update_passes(model, scalar) if update else 1.0
                each = [parameter_counts.forward_flops(model, int(n), scalar) for n in sizes]
                total += call.rows * passes * float(np.dot(each, counts))
        found = {"throughput/tflops": total / seconds / 1e12}
        if self._peak:
            found["throughput/mfu"] = total / seconds / self._peak
        return found


def session_times(batch: Mapping[str, Any], seconds: float) -> dict[str, float]:
    """Metrics of agents' sessions by the clock: ``throughput/calls_per_second`` over ``seconds`` of
    generation, ``time/calls_wait``, the mean over sessions of what their calls waited for the
    policy, and ``time/agents``, of what they took beside; empty where no agent plays."""
    told = batch.get("episode_metrics", {})
    if "waited" not in told:
        return {}
    first = sample_rows(batch)
    waited, spent = (np.nan_to_num(told[name][first]) for name in ("waited", "seconds"))
    calls = float(np.nansum(told["calls"][first])) if "calls" in told else 0.0
    return {
        "throughput/calls_per_second": calls / seconds if seconds else math.nan,
        "time/calls_wait": float(waited.mean()),
        "time/agents": float(np.maximum(spent - waited, 0).mean()),
    }


def peak_flops(devices: Sequence[Any], float32: bool) -> float:
    """Peak FLOP/s of dense matrix products over all devices; 0 if one is not in the catalogue."""
    total = 0.0
    for device in devices:
        known = device_of_kind(getattr(device, "device_kind", ""))
        if known is None:
            return 0.0
        total += known.flops["float32" if float32 else "bfloat16"]
    return total


def token_seconds(roles: RoleGroups, devices: Sequence[Any], float32: bool) -> float:
    """Seconds to read a device's share of the generating weights once, by data-sheet bandwidth.

    Returns:
      0 if there are no such weights, or the device is not in the catalogue.
    """
    role = next((r for r in ("rollout", "actor") if r in roles.layouts and r in roles.models), "")
    known = device_of_kind(getattr(devices[0], "device_kind", ""))
    if not role or known is None:
        return 0.0
    sizes = roles.layouts[role].generate.describe()
    split = sizes.get("tensor", 1) * sizes.get("pipe", 1)
    weights = parameter_counts.parameter_count(roles.models[role]) * (4 if float32 else 2)
    return weights / split / known.bandwidth
