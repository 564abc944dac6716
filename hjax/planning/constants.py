"""Every uncertain number of the cost model, in one place, each with its unit and where it is from.

``plan --calibrate`` replaces those that can be measured on the devices at hand.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from hjax.errors import ConfigError


def _value(default: float, unit: str, source: str) -> Any:
    return dataclasses.field(default=default, metadata={"unit": unit, "source": source})


_RATES = ("matmul", "memory", "link", "network", "host")


@dataclasses.dataclass(frozen=True)
class Constants:
    """Efficiencies, latencies and overheads. Shares are of the catalogue's figures.

    Attributes:
      measured: names of those that a calibration measured; the others are assumed.
    """

    matmul: float = _value(
        0.5, "share of peak FLOP/s", "Megatron-LM on A100, 47 to 57 % (Narayanan et al. 2021)"
    )
    memory: float = _value(0.75, "share of memory bandwidth", "decode kernels on A100, 70 to 80 %")
    link: float = _value(0.75, "share of link bandwidth", "nccl-tests on 8 A100, 230 of 300 GB/s")
    network: float = _value(0.4, "share of network bandwidth", "8 GPUs on one NIC: assumed")
    host: float = _value(2e10, "bytes/s per device to the host", "PCIe 4.0 x16, 32 GB/s: assumed")
    link_latency: float = _value(
        15e-6, "s per collective and doubling", "nccl-tests, small messages: 20 to 40 us on 8 A100"
    )
    network_latency: float = _value(30e-6, "s per collective and doubling", "as above, RDMA")
    overlap: float = _value(
        0.0,
        "share of compute that hides collectives of weights and gradients",
        "Megatron-LM's default of 2024 (no --overlap-grad-reduce)",
    )
    usable: float = _value(0.9, "share of device memory", "context, fragmentation: assumed")
    workspace: float = _value(1 << 30, "bytes per device while computing", "assumed")
    logits: float = _value(1 << 29, "bytes of logits at a time", "pieces of 256 MiB, twice")
    decode_step: float = _value(
        4e-3, "s per decode step", "launching and scheduling in 2024's engines, assumed"
    )
    decode_layer: float = _value(0.0, "s per layer and decode step", "compiled or captured graphs")
    decode_row: float = _value(
        60e-6,
        "s per sequence and decode step of a replica",
        "scheduler and sampler on the host; vLLM's 0.6 release notes find 38 % of an earlier "
        "version's time on the GPU (8B, H100)",
    )
    backward: float = _value(
        1.0, "times two forwards, a backward pass", "its FLOPs, at the rate of `matmul`: assumed"
    )
    score: float = _value(
        0.0, "s per attention score and forward", "kept on chip, in the share of `matmul`: assumed"
    )
    unsplit: float = _value(
        0.0, "share of products that a tensor axis does not split", "all are split evenly: assumed"
    )
    gather: float = _value(
        0.0, "s per layer whose weights are gathered or scattered", "hidden by prefetching: assumed"
    )
    layer_pass: float = _value(0.0, "s per layer and pass", "kernels queued ahead: assumed")
    dispatch: float = _value(0.0, "s per call on a model", "small beside seconds: assumed")
    rollout: float = _value(0.0, "s per rollout on the host", "small beside seconds: assumed")
    eager_matmul: float = _value(
        0.33, "share of peak FLOP/s", "Hugging Face models in eager PyTorch, unfused: assumed"
    )
    eager_layer: float = _value(
        4e-4, "s per layer and decode step", "a dozen kernels launched from Python, assumed"
    )
    native_decode: float = _value(
        20.6,
        "times an engine's decode time",
        "NeMo-Aligner on itself without TensorRT-LLM: a step 6.96 times slower, 90 % of it "
        "generation; 0.9 / (1 / 6.96 - 0.1)",
    )
    measured: frozenset[str] = frozenset()

    def with_values(self, values: Mapping[str, float], measured: bool = False) -> Constants:
        """These constants with some replaced.

        Raises:
          ConfigError: an unknown name, or a value that is not positive.
        """
        known = [f.name for f in dataclasses.fields(self) if f.name != "measured"]
        for name, value in values.items():
            if name not in known:
                raise ConfigError(f"no constant is named {name!r}; known: {', '.join(known)}")
            if not value >= 0 or (value == 0 and name in _RATES):
                raise ConfigError(f"constant {name}={value}: a number above 0")
        names = self.measured | set(values) if measured else self.measured - set(values)
        return dataclasses.replace(self, **values, measured=frozenset(names))

    def origin(self, name: str) -> str:
        """``measured`` or ``assumed``."""
        return "measured" if name in self.measured else "assumed"


def describe(constants: Constants) -> list[dict[str, Any]]:
    """One row per constant: name, value, unit, origin and source."""
    return [
        {
            "constant": f.name,
            "value": getattr(constants, f.name),
            "unit": f.metadata["unit"],
            "origin": constants.origin(f.name),
            "source": "this machine" if f.name in constants.measured else f.metadata["source"],
        }
        for f in dataclasses.fields(constants)
        if f.name != "measured"
    ]
