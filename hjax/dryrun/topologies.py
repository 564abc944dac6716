"""Devices that are not there: what a TPU or GPU topology's compiler needs to be asked.

With libtpu installed the real TPU compiler answers on any machine, with JAX's CUDA plugin the real
GPU one. Nothing can be run on such devices, only compiled for them.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import math
import os
import re
from typing import Any

from hjax.devices import DEVICES
from hjax.dryrun.gpus import GPUS, gpu_devices
from hjax.errors import ConfigError

GIB = 2**30
TPU_KINDS = ("v2", "v3", "v4", "v5e", "v5p", "v6e", "tpu7x")
# Memory that a program may use, in bytes: all but what driver and context take (JAX's own default
# leaves a quarter; runs that fill a GPU set XLA_PYTHON_CLIENT_MEM_FRACTION).
GPU_MEMORY = {kind: int(DEVICES[kind].memory) - GIB for kind in GPUS}
# A chip's two cores are one device, as JAX has it on a real v4 (the newer kinds need no word).
TPU_OPTIONS = {"v4": {"chip_config_name": "megacore"}}
_ENVIRONMENT = {
    # No metadata server is asked which TPU this machine has, and several compilers may run at once.
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5p-16",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    # Errors are reported by hjax; the compilers' own logs say less.
    "TPU_STDERR_LOG_LEVEL": "3",
    "TPU_MIN_LOG_LEVEL": "3",
    "TF_CPP_MIN_LOG_LEVEL": "3",
}


@dataclasses.dataclass(frozen=True)
class Topology:
    """Devices to compile for.

    Attributes:
      name: as it was asked for, e.g. ``v5p:4x4x4``, ``2xv5p:4x4x4`` (slices) or ``h100:2x8``.
      platform: ``tpu`` or ``cuda``.
      devices: abstract devices, for meshes.
      memory_bytes: what a program may use of a device's memory.
      versions: of what decides a compiled program.
    """

    name: str
    platform: str
    devices: tuple[Any, ...]
    memory_bytes: int
    versions: dict[str, str]

    @property
    def device_kind(self) -> str:
        """The compiler's name of a device."""
        return self.devices[0].device_kind


def parse_topology(name: str) -> tuple[str, tuple[int, ...], int]:
    """The kind of device, the sizes and the number of slices of ``[SLICESx]KIND:AxB...``.

    Raises:
      ConfigError: an unknown kind or another form.
    """
    found = re.fullmatch(r"(?:(\d+)x)?([a-z][a-z0-9-]*):(\d+(?:x\d+)*)", name.lower())
    if found is None:
        raise ConfigError(
            f"--topology={name}: a kind and sizes, such as v5p:4x4x4 or v5e:2x2 (chips), "
            "2xv5e:4x4 (slices) or h100:2x8 (hosts x GPUs)"
        )
    kind, sizes = found[2], tuple(int(n) for n in found[3].split("x"))
    slices = int(found[1] or 1)
    if kind not in TPU_KINDS and kind not in GPU_MEMORY:
        known = ", ".join((*TPU_KINDS, *GPU_MEMORY))
        raise ConfigError(f"--topology={name}: unknown kind {kind!r}; known: {known}")
    if 0 in (*sizes, slices) or (kind in GPU_MEMORY and len(sizes) != 2):
        raise ConfigError(f"--topology={name}: sizes of 1 or more; of GPUs hosts x GPUs per host")
    if kind in GPU_MEMORY and slices > 1:
        raise ConfigError(f"--topology={name}: GPUs have no slices; {kind}:HOSTSxGPUS takes hosts")
    return kind, sizes, slices


def prepare_environment() -> None:
    """Set what compilers read when they are loaded; call it before JAX is imported."""
    os.environ.update(_ENVIRONMENT)
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"


def find_topology(name: str) -> Topology:
    """The devices that a ``--topology`` names.

    Raises:
      ConfigError: an unknown one, or its compiler is not installed.
    """
    kind, sizes, slices = parse_topology(name)
    if kind in GPU_MEMORY:
        devices = gpu_devices(name, kind, sizes)
        platform, memory, compiler = "cuda", GPU_MEMORY[kind], "jax-cuda"
    else:
        devices = _tpu_devices(name, kind, slices)
        platform, memory, compiler = "tpu", compiler_memory(devices[0]), "libtpu"
    return Topology(name, platform, devices, memory, _versions(compiler))


def _versions(compiler: str) -> dict[str, str]:
    """Versions of JAX and of the distributions whose names begin with ``compiler``."""
    names = {"jax", "jaxlib"}
    names |= {d.name for d in importlib.metadata.distributions() if d.name.startswith(compiler)}
    return {name: importlib.metadata.version(name) for name in sorted(names)}


def _tpu_devices(name: str, kind: str, slices: int) -> tuple[Any, ...]:
    if not importlib.util.find_spec("libtpu") and not os.environ.get("TPU_LIBRARY_PATH"):
        raise ConfigError(
            f"--topology={name}: the TPU compiler is not installed; pip install 'jax[tpu]'"
        )
    from jax.experimental import topologies

    try:
        options = TPU_OPTIONS.get(kind, {}) | ({"num_slices": slices} if slices > 1 else {})
        one = name.lower().removeprefix(f"{slices}x")
        return tuple(topologies.get_topology_desc(one, "tpu", **options).devices)
    except Exception as error:  # libtpu's complaint about the sizes
        reason = " ".join(str(error).split()).removeprefix("INVALID_ARGUMENT: ")
        raise ConfigError(f"--topology={name}: {reason[:300]}") from error


def compiler_memory(device: Any) -> int:
    """Bytes of a TPU's memory that its compiler lets a program use.

    The compiler is asked for a program that cannot fit; its refusal names the limit.
    """
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    mesh = Mesh(np.array([device]), ("x",))
    huge = jax.ShapeDtypeStruct(
        (2**31, 128), np.float32, sharding=NamedSharding(mesh, PartitionSpec())
    )
    try:
        jax.jit(lambda x: x * 2).lower(huge).compile()
    except jax.errors.JaxRuntimeError as error:
        limit = parse_memory_error(str(error))
        if limit is not None:
            return limit[1]
        raise
    raise AssertionError("a compiler let a program of 2 TiB pass")


def parse_memory_error(text: str) -> tuple[int, int] | None:
    """(needed, available) bytes of a compiler's RESOURCE_EXHAUSTED; None for other errors."""
    found = re.search(r"\(([\d.]+)([KMGT]?)\) exceeds available \w+ \(([\d.]+)([KMGT]?)\)", text)
    if "RESOURCE_EXHAUSTED" not in text or found is None:
        return None
    needed, available = (
        math.ceil(float(n) * 1024 ** " KMGT".index(unit or " "))
        for n, unit in ((found[1], found[2]), (found[3], found[4]))
    )
    return needed, available

