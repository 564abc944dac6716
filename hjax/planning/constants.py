"""Constants of the cost model: every uncertain number with its unit and source.

``plan --calibrate`` replaces those that can be measured on the devices at hand.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from hjax.errors import ConfigError
from hjax.models.forward import LOGIT_CHUNK_BYTES
from hjax.workers.memory import USABLE_FRACTION


def _const(default: float, unit: str, source: str, low: float = 0, high: float = 0) -> Any:
    """A constant; ``low`` to ``high`` is its plausible range, both 0: it is a definition."""
    about = {"unit": unit, "source": source, "range": (low, high) if high else None}
    return dataclasses.field(default=default, metadata=about)


_RATES = ("matmul", "memory", "link", "network", "host", "usable")
_MAX_VALUE = 1e15  # of any unit; far above it seconds are no numbers
# Constants that a calibration sets to 0, because another measured constant includes their cost.
_PART_OF = {"decode_step": "rollout", "decode_row": "decode"}


@dataclasses.dataclass(frozen=True)
class Constants:
    """Efficiencies, latencies and overheads. Shares are relative to the catalogue's figures.

    A test pins each value and its source, so that none changes unnoticed.

    Attributes:
      measured: names of the constants that a calibration measured. The others are assumed, or 0
        because they are part of a measured one.
    """

    matmul: float = _const(
        0.5,
        "share of peak FLOP/s",
        "Megatron-LM on A100: 135 to 163 of 312 TFLOP/s (Narayanan et al. 2021, table 1), 57 % "
        "with selective rematerialisation (Korthikanti et al. 2022, table 5)",
        0.43,
        0.57,
    )
    memory: float = _const(
        0.75, "share of memory bandwidth", "between whole decoding in 2024's engines and STREAM "
        "on A100: assumed", 0.55, 0.9,
    )  # fmt: skip
    link: float = _const(
        0.75,
        "share of link bandwidth",
        "nccl-tests on 8 A100: 230 to 250 of 300 GB/s (NVIDIA/nccl-tests#175: 232.5)",
        0.75,
        0.83,
    )
    network: float = _const(
        0.85,
        "share of network bandwidth",
        "nccl-tests between hosts of 8 A100 or A800: .61 on one shared 200 Gb/s NIC "
        "(NVIDIA/nccl#412), .85 on four (NVIDIA/nccl-tests#119), .86 (NVIDIA/nccl#1048), .96 as "
        "NCCL's authors expect (NVIDIA/nccl#412); the middle",
        0.61,
        0.96,
    )
    host: float = _const(
        2e10, "bytes/s per device to the host", "PCIe 4.0 x16, 32 GB/s: assumed", 1e10, 2.6e10
    )
    link_latency: float = _const(
        15e-6,
        "s per collective and doubling",
        "nccl-tests, small messages: 20 to 40 us on 8 A100; an all-reduce of NCCL's own model: 10, "
        "37 or 56 us by protocol (NVIDIA/nccl, src/graph/tuning.cc at 01afd20)",
        7e-6,
        15e-6,
    )
    network_latency: float = _const(
        30e-6, "s per collective and doubling", "as above, RDMA: assumed", 10e-6, 60e-6
    )
    overlap: float = _const(
        0.0,
        "share of compute that hides collectives of weights and gradients",
        "nothing hidden, as Megatron-LM's default of 2024 (no --overlap-grad-reduce); a range, for "
        "others hide some",
        0.0,
        0.5,
    )
    usable: float = _const(
        USABLE_FRACTION, "share of device memory", "context, fragmentation: assumed", 0.85, 0.95
    )
    workspace: float = _const(
        1 << 30, "bytes per device while computing", "assumed", 1 << 28, 1 << 31
    )
    logits: float = _const(
        LOGIT_CHUNK_BYTES, "bytes of float32 logits at a time", "hjax's log-prob head"
    )
    decode_step: float = _const(
        4e-3,
        "s per decode step",
        "launching and scheduling in 2024's engines: assumed",
        1e-3,
        10e-3,
    )
    decode: float = _const(
        1.0,
        "times reading or products of a decode step, the longer",
        "as fast as bandwidth and rate allow: assumed",
    )
    decode_layer: float = _const(0.0, "s per layer and decode step", "compiled or captured graphs")
    decode_row: float = _const(
        60e-6,
        "s per sequence and decode step of a replica",
        "scheduler and sampler on the host; vLLM's 0.6 release notes find 38 % of an earlier "
        "version's time on the GPU (8B, H100)",
        0.0,
        120e-6,
    )
    backward: float = _const(
        1.0, "times two forwards, a backward pass", "its FLOPs, at the rate of `matmul`: assumed"
    )
    score: float = _const(
        0.0, "s per attention score and forward", "kept on chip, in the share of `matmul`: assumed"
    )
    unsplit: float = _const(
        0.0, "share of products that a tensor axis does not split", "all are split evenly: assumed"
    )
    gather: float = _const(
        0.0, "s per layer whose weights are gathered or scattered", "hidden by prefetching: assumed"
    )
    layer_pass: float = _const(0.0, "s per layer and pass", "kernels queued ahead: assumed")
    layer_update: float = _const(
        0.0, "s per layer and update beside its passes", "kernels queued ahead: assumed"
    )
    dispatch: float = _const(0.0, "s per call on a model", "small beside seconds: assumed")
    rollout: float = _const(0.0, "s per rollout on the host", "small beside seconds: assumed")
    eager_matmul: float = _const(
        0.33,
        "share of peak FLOP/s",
        "Hugging Face models in eager PyTorch, unfused: assumed",
        0.25,
        0.45,
    )
    eager_layer: float = _const(
        4e-4,
        "s per layer and decode step",
        "a dozen kernels launched from Python: assumed",
        1e-4,
        8e-4,
    )
    native_decode: float = _const(
        20.6,
        "times an engine's decode time",
        "NeMo-Aligner on itself without TensorRT-LLM: a step 6.96 times slower, 90 % of it "
        "generation; 0.9 / (1 / 6.96 - 0.1)",
        10,
        20.6,
    )
    measured: frozenset[str] = frozenset()

    def with_values(self, values: Mapping[str, float], measured: bool = False) -> Constants:
        """These constants with some replaced.

        Raises:
          ConfigError: an unknown name, or a value that is negative or not finite.
        """
        known = [f.name for f in dataclasses.fields(self) if f.name != "measured"]
        for name, value in values.items():
            if name not in known:
                raise ConfigError(f"no constant is named {name!r}; known: {', '.join(known)}")
            least = "above 0" if name in _RATES else "from 0"
            if not 0 <= value <= _MAX_VALUE or (value == 0 and name in _RATES):
                raise ConfigError(f"constant {name}={value:g}: a number {least} to {_MAX_VALUE:g}")
        names = self.measured - set(values)
        if measured:
            names |= {name for name, value in values.items() if value or name not in _PART_OF}
        return dataclasses.replace(self, **values, measured=frozenset(names))

    def with_user_values(self, values: Mapping[str, float]) -> Constants:
        """These constants with values from a user, whose shares are at most 1. (Measured shares may
        exceed 1: the rate they refer to was measured too.)

        Raises:
          ConfigError: an unknown name, or a value that its unit cannot have.
        """
        found = self.with_values(values)
        for name, value in values.items():
            unit = self.__dataclass_fields__[name].metadata["unit"]
            if unit.startswith("share") and value > 1:
                least = "above 0" if name in _RATES else "from 0"
                raise ConfigError(f"constant {name}={value:g}: a {unit}, {least} to 1")
        return found

    def part_of(self, name: str) -> str:
        """The measured constant that includes this one, which is then 0; empty: none."""
        whole = _PART_OF.get(name, "")
        return whole if whole in self.measured and getattr(self, name) == 0 else ""

    def calibrated(self) -> dict[str, float]:
        """Values by name of the measured constants, and of those that are part of them."""
        names = sorted({*self.measured, *filter(self.part_of, _PART_OF)})
        return {name: getattr(self, name) for name in names}

    def origin(self, name: str) -> str:
        """``measured``, ``part of`` a measured constant, or ``assumed``."""
        if whole := self.part_of(name):
            return f"part of {whole}"
        return "measured" if name in self.measured else "assumed"
