"""The catalogue of hardware, and clusters by name.

Figures are the vendors' data sheets, dense, without sparsity. To add a device: one entry here, and
`python -m hjax.launch.plan --calibrate` on it if it is at hand (docs/auto_mapping.md).
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
import re

from hjax.errors import ConfigError
from hjax.planning.records import Cluster, Device, Pool

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


def cluster(text: str) -> Cluster:
    """A cluster by name: ``16x8:a100-80g`` (hosts x devices), ``v5p:4x4x4``, joined by ``+``.

    Raises:
      ConfigError: another form, or an unknown device.
    """
    return Cluster(tuple(_pool(part.strip()) for part in text.split("+")))


def _pool(text: str) -> Pool:
    sizes = r"\d+(?:x\d+)*"
    match = re.fullmatch(rf"({sizes}):([\w.-]+)", text)
    if match:
        numbers, name = match.groups()
    elif match := re.fullmatch(rf"([\w.-]+):({sizes})", text):
        name, numbers = match.groups()
    else:
        raise ConfigError(
            f"--cluster={text}: it should be HOSTSxDEVICES:DEVICE, such as 16x8:a100-80g, or "
            "TPU:SIDExSIDE, such as v5p:4x4x4; several are joined by +"
        )
    kind, shape = device(name), tuple(int(n) for n in numbers.split("x"))
    if min(shape) < 1:
        raise ConfigError(f"--cluster={text}: sizes of 1 or more")
    if kind.torus:
        return _slice(kind, shape, text)
    if len(shape) > 2:
        raise ConfigError(f"--cluster={text}: {kind.name} takes HOSTSxDEVICES, two numbers")
    hosts, per_host = (1, *shape) if len(shape) == 1 else shape
    return Pool(kind, hosts, per_host)


def _slice(kind: Device, shape: tuple[int, ...], text: str) -> Pool:
    if len(shape) != kind.torus or any(n & (n - 1) for n in shape):
        example = "x".join(["4"] * kind.torus)
        raise ConfigError(
            f"--cluster={text}: a {kind.name} slice has {kind.torus} sides, each a power of two, "
            f"such as {kind.name}:{example}"
        )
    per_host = min(kind.per_host, math.prod(shape))
    return Pool(kind, math.prod(shape) // per_host, per_host, shape)


@functools.cache
def legal_counts(pool: Pool) -> tuple[int, ...]:
    """Numbers of devices that a set may take: those the pool names, else below a host a divisor of
    its size, above it whole hosts; of a torus the boxes that come of halving its longest side again
    and again."""
    if pool.counts:
        return pool.counts
    if pool.shape:
        return tuple(2**i for i in range(int(math.log2(pool.size)) + 1))
    below = [n for n in range(1, pool.per_host) if pool.per_host % n == 0]
    return (*below, *(pool.per_host * hosts for hosts in range(1, pool.hosts + 1)))


def box(pool: Pool, devices: int) -> tuple[int, ...]:
    """Sides of the part of a torus that a set of ``devices`` gets."""
    sides = list(pool.shape)
    while math.prod(sides) > devices:
        sides[sides.index(max(sides))] //= 2
    return tuple(sides)


@functools.lru_cache(maxsize=1 << 16)
def fit_together(pool: Pool, counts: tuple[int, ...]) -> bool:
    """Whether sets of these legal sizes find room in the pool at once, none across hosts
    unless it takes them whole."""
    if sum(counts) > pool.size:
        return False
    if pool.shape or is_chain(pool):
        return True  # each size divides the next: packing from the largest leaves no gap
    whole = sum(n // pool.per_host for n in counts if n >= pool.per_host)
    parts = tuple(sorted((n for n in counts if n < pool.per_host), reverse=True))
    return _pack(parts, (pool.per_host,) * min(pool.hosts - whole, len(parts)))


def is_chain(pool: Pool) -> bool:
    """Whether each legal size below a host divides the next one."""
    below = [n for n in legal_counts(pool) if n <= pool.per_host]
    return all(b % a == 0 for a, b in zip(below, below[1:]))


def _pack(parts: tuple[int, ...], room: tuple[int, ...]) -> bool:
    if not parts:
        return True
    for left in set(room):
        if left >= parts[0]:
            rest = list(room)
            rest[rest.index(left)] -= parts[0]
            if _pack(parts[1:], tuple(sorted(rest))):
                return True
    return False
