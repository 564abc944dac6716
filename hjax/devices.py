"""The catalogue of accelerators.

Figures are the vendors' data sheets, dense, without sparsity. To add a device: one entry here, and
`python -m hjax.launch.plan --calibrate` on it if it is at hand (docs/auto_mapping.md).
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Mapping

from hjax.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Device:
    """One accelerator of the catalogue.

    Attributes:
      name: how ``--cluster`` calls it.
      memory: bytes that a program may use, of the compiler's own limit where one is known.
      flops: peak FLOP/s of dense matrix products by dtype.
      bandwidth: memory, bytes/s.
      link: bytes/s one device sends to its neighbours inside a domain, in one direction: NVLink,
        PCIe, or one torus axis both ways round.
      network: bytes/s between domains, per host.
      per_host: devices of a host.
      torus: number of torus dimensions; 0: every device of a host reaches every other.
      source: where the figures come from.
      alone: (devices, how many times faster each is while only these are busy, share of the
        cores' time they then take); simulated devices share a machine's cores, real ones have no
        such entries. Numbers of devices rise, shares do not fall.
    """

    name: str
    memory: float
    flops: Mapping[str, float] = dataclasses.field(hash=False)
    bandwidth: float
    link: float
    network: float
    per_host: int
    torus: int
    source: str
    alone: tuple[tuple[int, float, float], ...] = ()


_GB, _GIB = 1e9, 2.0**30
_NVIDIA = "NVIDIA data sheet; network: one NIC per "
_TPU = "cloud.google.com/tpu; memory: the TPU compiler's limit; links: How to Scale Your Model"


def _gpu(
    name: str,
    memory: float,
    bf16: float,
    fp32: float,
    bandwidth: float,
    link: float,
    network: float,
    source: str,
    fp8: float = 0,
) -> Device:
    flops = {"bfloat16": bf16 * 1e12, "float32": fp32 * 1e12}
    if fp8:
        flops["float8"] = fp8 * 1e12
    return Device(
        name, memory * _GIB, flops, bandwidth * _GB, link * _GB, network * _GB, 8, 0, source
    )


def _tpu(
    name: str, memory: float, bf16: float, bandwidth: float, link: float, torus: int, host: int
) -> Device:
    # float32 products take six bfloat16 passes; DCN: 25 GB/s per host and direction.
    flops = {"bfloat16": bf16 * 1e12, "float32": bf16 * 1e12 / 6}
    return Device(
        name, memory * _GIB, flops, bandwidth * _GB, link * _GB, 25 * _GB, host, torus, _TPU
    )


DEVICES: dict[str, Device] = {
    d.name: d
    for d in (
        # memory GiB, bf16 and tf32 TFLOP/s, memory GB/s, link GB/s one way, network GB/s per host
        _gpu("a100-40g", 40, 312, 156, 1555, 300, 25, _NVIDIA + "host of 8, 200 Gb/s"),
        _gpu("a100-80g", 80, 312, 156, 2039, 300, 25, _NVIDIA + "host of 8, 200 Gb/s"),
        _gpu("h100", 80, 989, 495, 3350, 450, 400, _NVIDIA + "GPU, 400 Gb/s", 1979),
        _gpu("h200", 139, 989, 495, 4800, 450, 400, _NVIDIA + "GPU, 400 Gb/s", 1979),
        _gpu("b200", 179, 2250, 1125, 8000, 900, 400, _NVIDIA + "GPU, 400 Gb/s", 4500),
        _gpu("l40s", 45, 362, 183, 864, 26, 25, _NVIDIA + "host of 8, 200 Gb/s; PCIe", 733),
        # memory GiB, bf16 TFLOP/s, memory GB/s, one torus axis both ways GB/s, dimensions, host
        _tpu("v4", 31.25, 275, 1228, 90, 3, 4),
        _tpu("v5e", 15.75, 197, 819, 90, 2, 4),
        _tpu("v5p", 95.74, 459, 2765, 180, 3, 4),
        _tpu("v6e", 31.25, 918, 1640, 180, 2, 4),
    )
}
_SYNONYMS = {"a100": "a100-80g", "a100-80": "a100-80g", "a100-40": "a100-40g", "h100-80g": "h100"}


def device(name: str) -> Device:
    """A device of the catalogue.

    Raises:
      ConfigError: an unknown name, with the nearest known ones.
    """
    key = name.lower()
    key = _SYNONYMS.get(key, key)
    if key not in DEVICES:
        near = difflib.get_close_matches(key, DEVICES, n=3, cutoff=0.5) or list(DEVICES)
        raise ConfigError(
            f"no device is named {name!r}; known: {', '.join(near)} (docs/auto_mapping.md says "
            "how to add one)"
        )
    return DEVICES[key]


# As JAX and Ray call devices that the catalogue has under another name.
_ALIASES = {"v5lite": "v5e", "v6lite": "v6e", "tpuv5": "v5p"}


def device_of_kind(kind: str, memory: float = 0) -> Device | None:
    """The catalogue's device for what JAX or Ray call one; None: it has none.

    Args:
      kind: ``NVIDIA H100 80GB HBM3``, ``TPU v5 lite``, ``A100``, ``TPU-V5P``.
      memory: bytes that its programs may use, where that is known.
    """
    plain = re.sub(r"[^a-z0-9]", "", kind.lower())
    for alias, name in _ALIASES.items():
        if plain == alias or (alias != "tpuv5" and alias in plain):
            plain = name
    names = sorted(DEVICES, key=lambda name: -DEVICES[name].memory)  # of an A100 the larger
    for name in names:
        if name.replace("-", "").removesuffix("80g").removesuffix("40g") in plain:
            found = DEVICES[name]
            return dataclasses.replace(found, memory=memory or found.memory)
    return None
