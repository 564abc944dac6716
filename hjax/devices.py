"""The catalogue of accelerators.

Figures are the vendors' data sheets, dense, without sparsity. To add a device: one entry here, and
`python -m hjax.launch.plan --calibrate` on it if it is at hand (docs/auto_mapping.md).
"""

import dataclasses
import difflib
import math
import re
from collections.abc import Mapping

from hjax.errors import ConfigError
from hjax.rules import DIGITS


@dataclasses.dataclass(frozen=True)
class Device:
    """An accelerator of the catalogue.

    Attributes:
      name: its name for ``--cluster``.
      memory: bytes that a program may use, by the compiler's own limit if one is known.
      flops: peak FLOP/s of dense matrix products by dtype.
      bandwidth: memory, bytes/s.
      link: bytes/s one device sends to its neighbours inside a domain, in one direction: NVLink,
        PCIe, or one torus axis both ways round.
      network: bytes/s between domains, per host of ``per_host`` devices.
      per_host: devices of a host.
      torus: number of torus dimensions; 0: every device of a host reaches every other.
      source: of the figures.
      cores: devices of a chip; the torus is of chips.
      own_network: each device of a host has its own network card, so a host with fewer devices has
        less of ``network``.
      alone: (devices, speed-up of each while only these are busy, share of the cores' time they
        then take), for simulated devices, which share a machine's cores; real ones have no entries.
        Devices increase, shares do not decrease.
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
        """Bytes/s between domains for a host with so many of these devices."""
        share = min(1.0, devices / self.per_host) if self.own_network else 1.0
        return self.network * share


_GB, _GIB, _TERA = 1e9, 2.0**30, 1e12
MAX_CLUSTER_DEVICES = 1 << 16  # of a cluster that is planned or compiled for

_NVIDIA = "NVIDIA data sheet; network: one NIC per "
_EACH = "GPU, 400 Gb/s"
_CARDS = "host of 8, 400 Gb/s; PCIe"
_TPU = "cloud.google.com/tpu; memory: the TPU compiler's limit; links: How to Scale Your Model"

# Memory GiB; bf16, tf32 and fp8 (0: none) TFLOP/s; memory GB/s, link GB/s one way, network GB/s per
# host, GPUs of a host, network cards.
_GPUS = {
    "a100-40g": (40, 312, 156, 0, 1555, 300, 25, 8, "host of 8, 200 Gb/s"),
    "a100-80g": (80, 312, 156, 0, 2039, 300, 25, 8, "host of 8, 200 Gb/s"),
    # Cards without NVSwitch: bridges join a few, the rest is PCIe 4.0, of Hopper 5.0.
    "a100-40g-pcie": (40, 312, 156, 0, 1555, 32, 25, 8, "host of 8, 200 Gb/s; PCIe"),
    "a100-80g-pcie": (80, 312, 156, 0, 1935, 32, 25, 8, "host of 8, 200 Gb/s; PCIe"),
    "h100": (80, 989, 495, 1979, 3350, 450, 400, 8, _EACH),
    "h100-pcie": (80, 756, 378, 1513, 2000, 64, 50, 8, _CARDS),
    "h100-nvl": (93, 835, 418, 1671, 3900, 64, 50, 8, _CARDS),
    "h200": (139, 989, 495, 1979, 4800, 450, 400, 8, _EACH),
    "h200-nvl": (139, 835, 418, 1671, 4800, 64, 50, 8, _CARDS),
    # A superchip with one GPU is a host; its NVLink joins none of them to others.
    "gh200": (95, 989, 495, 1979, 4000, 450, 50, 1, "superchip, 400 Gb/s"),
    "b200": (179, 2250, 1125, 4500, 8000, 900, 400, 8, _EACH),
    # A rack that NVLink joins (NVL72) is one domain of 72.
    "gb200": (185, 2500, 1250, 5000, 8000, 900, 3600, 72, f"{_EACH}; NVL72"),
    "l40s": (45, 362, 183, 733, 864, 26, 25, 8, "host of 8, 200 Gb/s; PCIe"),
}
# Memory GiB, bf16 TFLOP/s, memory GB/s, one torus axis both ways GB/s, its dimensions, devices of a
# host and of a chip.
_TPUS = {
    "v4": (31.25, 275, 1228, 90, 3, 4, 1),
    "v5e": (15.75, 197, 819, 90, 2, 4, 1),
    "v5p": (95.74, 459, 2765, 180, 3, 4, 1),
    "v6e": (31.25, 918, 1640, 180, 2, 4, 1),
    # Two devices a chip: half of its compute, memory and links each.
    "tpu7x": (95.75, 1153.5, 3690, 90, 3, 8, 2),
}
DEVICES: dict[str, Device] = {
    name: Device(
        name=name,
        memory=memory * _GIB,
        flops={"bfloat16": bf16 * _TERA, "float32": fp32 * _TERA}
        | ({"float8": fp8 * _TERA} if fp8 else {}),
        bandwidth=bandwidth * _GB,
        link=link * _GB,
        network=network * _GB,
        per_host=per_host,
        torus=0,
        source=_NVIDIA + cards,
        own_network=cards.startswith(_EACH),
    )
    for name, (memory, bf16, fp32, fp8, bandwidth, link, network, per_host, cards) in _GPUS.items()
} | {
    name: Device(
        name=name,
        memory=memory * _GIB,
        # float32 products take six bfloat16 passes.
        flops={"bfloat16": bf16 * _TERA, "float32": bf16 * _TERA / 6},
        bandwidth=bandwidth * _GB,
        link=link * _GB,
        network=25 * _GB,  # DCN, per host and direction
        per_host=per_host,
        torus=torus,
        source=_TPU,
        cores=cores,
    )
    for name, (memory, bf16, bandwidth, link, torus, per_host, cores) in _TPUS.items()
}
_SYNONYMS = {
    "a100": "a100-80g", "a100-80": "a100-80g", "a100-40": "a100-40g", "a100-pcie": "a100-80g-pcie",
    "h100-80g": "h100",
}  # fmt: skip


# Of clouds' names of slices, v5p-16: what the number counts per chip, and dimensions of the torus.
_SLICES = {"v2": (2, 2), "v3": (2, 2), "v4": (2, 3), "v5p": (2, 3), "v5e": (1, 2), "v6e": (1, 2)}
_SLICE_SYNONYMS = {"v5litepod": "v5e"}


def full_hardware_name(text: str) -> str:
    """A topology's full name for a usual one: ``v5e:2x4`` for ``v5e-8``, ``v5p:2x2x2`` for
    ``v5p-16``, ``h100:1x8`` for ``8xh100``; any other text as it is.

    The number of a ``v5e`` or ``v6e`` counts chips, that of older TPUs and of a ``v5p`` cores, two
    a chip. GPUs beyond a host's are whole hosts.

    Raises:
      ConfigError: no slice or no hosts of that size.
    """
    if found := re.fullmatch(rf"({DIGITS}x)?(\w+)-({DIGITS})", text.lower()):
        kind = _SLICE_SYNONYMS.get(found[2], found[2])
        if kind in _SLICES:
            return f"{found[1] or ''}{kind}:{_sides(text, int(found[3]), *_SLICES[kind])}"
    if found := re.fullmatch(rf"(?:({DIGITS})x)?([a-z][\w-]*)", text.lower()):
        kind, count = _SYNONYMS.get(found[2], found[2]), int(found[1] or 1)
        if kind in _GPUS:
            per_host = DEVICES[kind].per_host
            hosts, left = divmod(count, per_host)
            if count < 1 or (count > per_host and left):
                raise ConfigError(
                    f"{text}: hosts have {per_host} of {kind}; 1 to {per_host}, or whole hosts, "
                    f"such as {2 * per_host}x{kind}"
                )
            return f"{kind}:1x{count}" if count <= per_host else f"{kind}:{hosts}x{per_host}"
    return text


def _sides(text: str, number: int, per_chip: int, dimensions: int) -> str:
    """The sides of a slice: as near to each other as powers of two can be, the last one longest."""
    chips = number // per_chip
    if chips == 1 and per_chip == 1:
        return "1x1"
    if number % per_chip or chips < 4 or chips & (chips - 1):
        least = "1, 4, 8, 16, ... chips" if per_chip == 1 else "8, 16, 32, ... cores"
        raise ConfigError(f"{text}: there are slices of {least}, each a power of two")
    sides = [2, 2, 1][:dimensions]
    while math.prod(sides) < chips:
        sides[sides.index(min(sides))] *= 2
        sides.sort()
    return "x".join(map(str, sides))


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


# Part of a TPU's kind (JAX's or Ray's, letters and digits only) -> name in the catalogue; the first
# match counts.
_TPU_KINDS = {"v7x": "tpu7x", "tpu7x": "tpu7x", "tpu7": "tpu7x", "v6lite": "v6e", "v6e": "v6e",
              "v5lite": "v5e", "v5e": "v5e", "v5p": "v5p", "tpuv5": "v5p", "v4": "v4"}  # fmt: skip
# All words that a GPU's kind may have; with others it is another device: a MIG part, another card.
_GPU_WORDS = {
    "a100": "sxm sxm4 pcie 40g 40gb 80g 80gb", "h100": "sxm sxm5 pcie nvl 80g 80gb hbm3",
    "h200": "sxm sxm5 nvl 141gb hbm3e", "gh200": "120gb 480gb", "b200": "sxm sxm6", "l40s": "",
    "gb200": "nvl72",
}  # fmt: skip
_FORMS = ("pcie", "nvl")


def device_of_kind(kind: str, memory: float = 0) -> Device | None:
    """The catalogue's device for JAX's or Ray's name of one; None: unknown, such as a part of a GPU
    (MIG, vGPU).

    Args:
      kind: ``NVIDIA H100 80GB HBM3``, ``NVIDIA A100-SXM4-40GB``, ``TPU v5 lite``, ``TPU7x``,
        ``A100``, ``TPU-V5P``.
      memory: bytes that programs may use, if known. It tells an A100 of 40 from one of 80 GB if the
        kind does not.
    """
    plain = re.sub(r"[^a-z0-9]", "", kind.lower())
    if "tpu" in plain or re.fullmatch(r"v\d\w*", plain):
        exact = {"tpuv5", "tpu7"}  # prefixes of other kinds
        keys = (key for key in _TPU_KINDS if (plain == key if key in exact else key in plain))
        found = _TPU_KINDS.get(next(keys, ""))
    else:
        found = _gpu_of_kind(kind, memory)
    if found is None or "v4lite" in plain or "v4i" in plain:
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
