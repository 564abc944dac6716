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
      network: bytes/s between domains, per host of ``per_host`` devices.
      per_host: devices of a host.
      torus: number of torus dimensions; 0: every device of a host reaches every other.
      source: where the figures come from.
      cores: devices of a chip; the torus is of chips.
      own_network: each device of a host has a network card of its own, so that a host of fewer has
        less of ``network``.
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
    cores: int = 1
    own_network: bool = False

    def network_of(self, devices: int) -> float:
        """Bytes/s between domains of a host with so many of these devices."""
        share = min(1.0, devices / self.per_host) if self.own_network else 1.0
        return self.network * share


_GB, _GIB = 1e9, 2.0**30
_NVIDIA = "NVIDIA data sheet; network: one NIC per "
_EACH = _NVIDIA + "GPU, 400 Gb/s"
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
    per_host: int = 8,
) -> Device:
    flops = {"bfloat16": bf16 * 1e12, "float32": fp32 * 1e12}
    if fp8:
        flops["float8"] = fp8 * 1e12
    return Device(
        name=name,
        memory=memory * _GIB,
        flops=flops,
        bandwidth=bandwidth * _GB,
        link=link * _GB,
        network=network * _GB,
        per_host=per_host,
        torus=0,
        source=source,
        own_network=source.startswith(_EACH),
    )


def _tpu(
    name: str,
    memory: float,
    bf16: float,
    bandwidth: float,
    link: float,
    torus: int,
    host: int,
    cores: int = 1,
) -> Device:
    # float32 products take six bfloat16 passes; DCN: 25 GB/s per host and direction.
    flops = {"bfloat16": bf16 * 1e12, "float32": bf16 * 1e12 / 6}
    return Device(
        name=name,
        memory=memory * _GIB,
        flops=flops,
        bandwidth=bandwidth * _GB,
        link=link * _GB,
        network=25 * _GB,
        per_host=host,
        torus=torus,
        source=_TPU,
        cores=cores,
    )


DEVICES: dict[str, Device] = {
    d.name: d
    for d in (
        # memory GiB, bf16 and tf32 TFLOP/s, memory GB/s, link GB/s one way, network GB/s per host
        _gpu("a100-40g", 40, 312, 156, 1555, 300, 25, _NVIDIA + "host of 8, 200 Gb/s"),
        _gpu("a100-80g", 80, 312, 156, 2039, 300, 25, _NVIDIA + "host of 8, 200 Gb/s"),
        # Cards without NVSwitch: bridges join a few, the rest is PCIe 4.0, of Hopper 5.0.
        _gpu("a100-40g-pcie", 40, 312, 156, 1555, 32, 25, _NVIDIA + "host of 8, 200 Gb/s; PCIe"),
        _gpu("a100-80g-pcie", 80, 312, 156, 1935, 32, 25, _NVIDIA + "host of 8, 200 Gb/s; PCIe"),
        _gpu("h100", 80, 989, 495, 3350, 450, 400, _EACH, 1979),
        _gpu("h100-pcie", 80, 756, 378, 2000, 64, 50, _NVIDIA + "host of 8, 400 Gb/s; PCIe", 1513),
        _gpu("h100-nvl", 93, 835, 418, 3900, 64, 50, _NVIDIA + "host of 8, 400 Gb/s; PCIe", 1671),
        _gpu("h200", 139, 989, 495, 4800, 450, 400, _EACH, 1979),
        _gpu("h200-nvl", 139, 835, 418, 4800, 64, 50, _NVIDIA + "host of 8, 400 Gb/s; PCIe", 1671),
        # A superchip with one GPU is a host; its NVLink joins none of them to others.
        _gpu("gh200", 95, 989, 495, 4000, 450, 50, _NVIDIA + "superchip, 400 Gb/s", 1979, 1),
        _gpu("b200", 179, 2250, 1125, 8000, 900, 400, _EACH, 4500),
        # A rack that NVLink joins (NVL72) is one domain of 72.
        _gpu("gb200", 185, 2500, 1250, 8000, 900, 3600, _EACH + "; NVL72", 5000, 72),
        _gpu("l40s", 45, 362, 183, 864, 26, 25, _NVIDIA + "host of 8, 200 Gb/s; PCIe", 733),
        # memory GiB, bf16 TFLOP/s, memory GB/s, one torus axis both ways GB/s, dimensions, host
        _tpu("v4", 31.25, 275, 1228, 90, 3, 4),
        _tpu("v5e", 15.75, 197, 819, 90, 2, 4),
        _tpu("v5p", 95.74, 459, 2765, 180, 3, 4),
        _tpu("v6e", 31.25, 918, 1640, 180, 2, 4),
        # Two devices a chip: half of its compute, memory and links each.
        _tpu("tpu7x", 95.75, 1153.5, 3690, 90, 3, 8, 2),
    )
}
_SYNONYMS = {
    "a100": "a100-80g", "a100-80": "a100-80g", "a100-40": "a100-40g", "a100-pcie": "a100-80g-pcie",
    "h100-80g": "h100",
}  # fmt: skip


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


# What of a TPU's kind, as JAX or Ray have it in letters and digits alone, is which of the
# catalogue's; looked for in this order.
_TPU_KINDS = {"v7x": "tpu7x", "tpu7x": "tpu7x", "tpu7": "tpu7x", "v6lite": "v6e", "v6e": "v6e",
              "v5lite": "v5e", "v5e": "v5e", "v5p": "v5p", "tpuv5": "v5p", "v4": "v4"}  # fmt: skip
# Of a GPU's kind every word is known, or it is another device: a part of one, another card.
_GPU_WORDS = {
    "a100": "sxm sxm4 pcie 40g 40gb 80g 80gb", "h100": "sxm sxm5 pcie nvl 80g 80gb hbm3",
    "h200": "sxm sxm5 nvl 141gb hbm3e", "gh200": "120gb 480gb", "b200": "sxm sxm6", "l40s": "",
    "gb200": "nvl72",
}  # fmt: skip
_FORMS = ("pcie", "nvl")


def device_of_kind(kind: str, memory: float = 0) -> Device | None:
    """The catalogue's device for what JAX or Ray call one; None: it has none, as of a part of a GPU
    (MIG, vGPU).

    Args:
      kind: ``NVIDIA H100 80GB HBM3``, ``NVIDIA A100-SXM4-40GB``, ``TPU v5 lite``, ``TPU7x``,
        ``A100``, ``TPU-V5P``.
      memory: bytes that its programs may use, where that is known. It tells an A100 of 40 from one
        of 80 GB where the kind does not.
    """
    plain = re.sub(r"[^a-z0-9]", "", kind.lower())
    found = None
    if "tpu" in plain or re.fullmatch(r"v\d\w*", plain):
        exact = {"tpuv5", "tpu7"}  # of others these are only the beginning
        found = next(
            (name for key, name in _TPU_KINDS.items()
             if (plain == key if key in exact else key in plain)), None,
        )  # fmt: skip
        if "v4lite" in plain or "v4i" in plain:
            return None
    else:
        found = _gpu_of_kind(kind, memory)
    if found is None:
        return None
    return dataclasses.replace(DEVICES[found], memory=memory or DEVICES[found].memory)


def _gpu_of_kind(kind: str, memory: float) -> str | None:
    words = set(re.findall(r"[a-z0-9]+", kind.lower())) - {"nvidia", "tesla"}
    found = next((name for name in _GPU_WORDS if name in words), None)
    if found is None or words - {found, *_GPU_WORDS[found].split()}:
        return None
    form = next((f"-{form}" for form in _FORMS if form in words), "")
    if found == "a100":
        named = words & {"40g", "40gb", "80g", "80gb"}
        small = bool(named & {"40g", "40gb"}) if named else 0 < memory < 48 * _GIB
        found = "a100-40g" if small else "a100-80g"
    return found + form
