"""TPU and GPU topologies for ahead-of-time compilation, without the devices.

With libtpu installed the real TPU compiler works on any machine; with JAX's CUDA plugin the real
GPU compiler does. Programs can be compiled for such devices but not run. The GPU figures are from
NVIDIA's data sheets and the CUDA programming guide's table of compute capabilities (the SXM
modules). XLA's cost models read them. What a kernel library would choose on the real GPU (cuBLAS,
cuDNN, autotuning) is not modelled.

``list_devices`` needs no compiler or plugin. It gives the devices' coordinates alone, which is
enough to see where a mesh would place them.
"""

import dataclasses
import importlib.metadata
import importlib.util
import itertools
import math
import os
import re
from typing import Any

from hjax.devices import DEVICES, MAX_CLUSTER_DEVICES, Device, device, full_hardware_name
from hjax.errors import ConfigError
from hjax.rules import DIGITS


@dataclasses.dataclass(frozen=True)
class Gpu:
    """A kind of GPU.

    Attributes:
      capability: compute capability, major and minor.
      processors: streaming multiprocessors.
      cores: float32 units in each.
      clock: GHz, boosted.
      memory: bytes.
      bandwidth: of the memory, bytes per second.
      cache: L2, bytes.
      shared: KiB of shared memory per multiprocessor; a block can have 1 KiB less.
    """

    capability: tuple[int, int]
    processors: int
    cores: int
    clock: float
    memory: int
    bandwidth: int
    cache: int
    shared: int


CUDNN = (9, 8)  # major and minor version

GPUS = {
    "a100-40g": Gpu((8, 0), 108, 64, 1.41, 40 * 10**9, 1555 * 10**9, 40 * 2**20, 164),
    "a100-80g": Gpu((8, 0), 108, 64, 1.41, 80 * 10**9, 2039 * 10**9, 40 * 2**20, 164),
    "h100": Gpu((9, 0), 132, 128, 1.98, 80 * 10**9, 3350 * 10**9, 50 * 2**20, 228),
    "h200": Gpu((9, 0), 132, 128, 1.98, 141 * 10**9, 4800 * 10**9, 50 * 2**20, 228),
    "b200": Gpu((10, 0), 148, 128, 1.965, 180 * 10**9, 8000 * 10**9, 126 * 2**20, 228),
}


def gpu_devices(name: str, kind: str, sizes: tuple[int, ...]) -> tuple[Any, ...]:
    """Abstract devices of ``sizes`` = hosts x GPUs per host.

    Raises:
      ConfigError: the CUDA plugin is not installed.
    """
    if not plugin_installed():
        raise ConfigError(
            f"--topology={name}: the GPU compiler is not installed; pip install 'jax[cuda13-local]'"
        )
    from jax.experimental import topologies

    _patch_cudnn_checks(kind)
    hosts, count = sizes
    described = topologies.get_topology_desc(
        device_kind(kind),
        platform="cuda",
        target_config=target_config(kind),
        topology=f"1x{hosts}x{count}",
    )
    return tuple(described.devices)


def _patch_cudnn_checks(kind: str) -> None:
    """Patch JAX so that cuDNN attention can be traced without the GPU.

    While tracing, JAX asks this process's first GPU for its compute capability and the installed
    cuDNN for its version. From here on JAX gets the values of ``kind`` instead. Call it only in a
    process that compiles and runs nothing.
    """
    from jax._src.cudnn import fused_attention_stablehlo as asking

    def of(capability: str) -> tuple[int, ...]:
        return tuple(int(part) for part in capability.split("."))

    own = GPUS[kind].capability
    answers: dict[str, Any] = {
        "check_cudnn_version": lambda: CUDNN[0] * 10000 + CUDNN[1] * 100,
        "check_compute_capability": lambda least: own >= of(least),
        "is_cuda_compute_capability_equal": lambda one: own == of(one),
    }
    for name, answer in answers.items():
        setattr(asking, name, answer)


def device_kind(kind: str) -> str:
    """JAX's name of a kind of GPU, by which the kernel compiler recognises it."""
    return f"NVIDIA {kind.upper()}"


def plugin_installed() -> bool:
    """Whether JAX's CUDA plugin, which contains the GPU compiler, is installed."""
    if importlib.util.find_spec("jax_plugins") is None:
        return False
    names = ("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12")
    return any(importlib.util.find_spec(name) for name in names)


def target_config(kind: str) -> str:
    """XLA's description of a kind of GPU (stream_executor.GpuTargetConfigProto), as text."""
    gpu = GPUS[kind]
    major, minor = gpu.capability
    return f"""
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: {48 * 1024}
  shared_memory_per_core: {gpu.shared * 1024}
  threads_per_core_limit: 2048
  core_count: {gpu.processors}
  fpus_per_core: {gpu.cores}
  block_dim_limit_x: {2**31 - 1}
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {gpu.bandwidth}
  l2_cache_size: {gpu.cache}
  clock_rate_ghz: {gpu.clock}
  device_memory_size: {gpu.memory}
  shared_memory_per_block_optin: {(gpu.shared - 1) * 1024}
  cuda_compute_capability {{ major: {major} minor: {minor} }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: {CUDNN[0]} minor: {CUDNN[1]} }}
device_description_str: "{device_kind(kind)}"
"""


GIB = 2**30
TPU_KINDS = ("v2", "v3", "v4", "v5e", "v5p", "v6e", "tpu7x")
# Bytes of memory that a program may use: all but those of driver and context. (JAX's own default
# leaves a quarter free; runs that fill a GPU set XLA_PYTHON_CLIENT_MEM_FRACTION.)
GPU_MEMORY = {kind: int(DEVICES[kind].memory) - GIB for kind in GPUS}
# On a v4 the two cores of a chip are one device, as in JAX; newer kinds need no option for that.
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
    """Abstract devices to compile for.

    Attributes:
      name: as requested, e.g. ``v5p:4x4x4``, ``2xv5p:4x4x4`` (slices) or ``h100:2x8``.
      platform: ``tpu`` or ``cuda``.
      devices: abstract devices, for meshes.
      memory_bytes: memory per device that a program may use.
      versions: of JAX and the compiler, which determine a compiled program.
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
    """The kind of device, the sizes and the number of slices of ``[SLICESx]KIND:AxB...``, or of a
    usual name (``hjax.devices.full_hardware_name``).

    Raises:
      ConfigError: an unknown kind or another form.
    """
    form = rf"(?:({DIGITS})x)?([a-z][a-z0-9-]*):({DIGITS}(?:x{DIGITS})*)"
    found = re.fullmatch(form, full_hardware_name(name).lower())
    if found is None:
        raise ConfigError(
            f"--topology={name}: a kind and sizes, such as v5p:4x4x4 or v5e:2x2 (chips), "
            "2xv5e:4x4 (slices) or h100:2x8 (hosts x GPUs), or a usual name: v5e-8, v5p-16, 8xh100"
        )
    kind, sizes = found[2], tuple(int(n) for n in found[3].split("x"))
    slices = int(found[1] or 1)
    if kind not in TPU_KINDS and kind not in GPU_MEMORY:
        known = ", ".join((*TPU_KINDS, *GPU_MEMORY))
        raise ConfigError(f"--topology={name}: unknown kind {kind!r}; known: {known}")
    if math.prod((*sizes, slices)) > MAX_CLUSTER_DEVICES:
        raise ConfigError(f"--topology={name[:80]}: at most {MAX_CLUSTER_DEVICES} devices")
    if 0 in (*sizes, slices) or (kind in GPU_MEMORY and len(sizes) != 2):
        raise ConfigError(f"--topology={name}: sizes of 1 or more; of GPUs hosts x GPUs per host")
    if kind in GPU_MEMORY and slices > 1:
        raise ConfigError(f"--topology={name}: GPUs have no slices; {kind}:HOSTSxGPUS takes hosts")
    return kind, sizes, slices


def prepare_environment() -> None:
    """Set the environment variables that compilers read; call it before JAX is imported."""
    os.environ.update(_ENVIRONMENT)
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"


def find_topology(name: str) -> Topology:
    """The topology that a ``--topology`` flag names.

    Raises:
      ConfigError: an unknown topology, or its compiler is not installed.
    """
    kind, sizes, slices = parse_topology(name)
    name = full_hardware_name(name)
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
        options: dict[str, Any] = TPU_OPTIONS.get(kind, {}) | (
            {"num_slices": slices} if slices > 1 else {}
        )
        one = name.lower().removeprefix(f"{slices}x")
        if one.endswith(":1x1"):  # a host of a single chip
            options |= {"chips_per_host_bounds": (1, 1, 1)}
        return tuple(topologies.get_topology_desc(one, "tpu", **options).devices)
    except Exception as error:  # libtpu's complaint about the sizes
        reason = " ".join(str(error).split()).removeprefix("INVALID_ARGUMENT: ")
        raise ConfigError(f"--topology={name}: {reason[:300]}") from error


def compiler_memory(device: Any) -> int:
    """Bytes of a TPU's memory that its compiler lets a program use.

    The limit is read from the compiler's error for a program that cannot fit.
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


# JAX's names of the catalogue's TPUs.
JAX_TPU_KINDS = {"v4": "TPU v4", "v5e": "TPU v5 lite", "v5p": "TPU v5", "v6e": "TPU v6 lite",
         "tpu7x": "TPU7x"}  # fmt: skip
HOST_CHIPS = (2, 2, 1)  # chips of a TPU host, x, y, z


@dataclasses.dataclass(frozen=True)
class AbstractDevice:
    """The attributes of a jax.Device that describe it and its place."""

    platform: str
    device_kind: str
    id: int
    process_index: int
    coords: tuple[int, ...] | None = None
    core_on_chip: int = 0
    slice_index: int | None = None


def list_devices(name: str) -> list[AbstractDevice]:
    """The devices of ``v5p:4x4x8`` (chips) or ``h100:2x8`` (hosts x GPUs), in JAX's order.

    Raises:
      ConfigError: another form, an unknown device, or too many.
    """
    found = re.fullmatch(rf"([\w.-]+):({DIGITS}(?:x{DIGITS})*)", full_hardware_name(name))
    if found is None:
        raise ConfigError(
            f"--topology={name}: a kind and sizes, such as v5e:8x8 or h100:2x8, or v5e-64, 16xh100"
        )
    kind, sizes = device(found[1]), tuple(int(n) for n in found[2].split("x"))
    if min(sizes) < 1 or math.prod(sizes) > MAX_CLUSTER_DEVICES:
        raise ConfigError(
            f"--topology={name[:80]}: sizes of 1 or more, at most {MAX_CLUSTER_DEVICES} devices"
        )
    if kind.torus:
        return _slice(name, kind, sizes)
    if len(sizes) != 2:
        raise ConfigError(f"--topology={name}: of GPUs hosts x GPUs per host, such as h100:2x8")
    hosts, each = sizes
    return [
        AbstractDevice("gpu", kind.name, host * each + i, host)
        for host in range(hosts)
        for i in range(each)
    ]


def _slice(name: str, kind: Device, sides: tuple[int, ...]) -> list[AbstractDevice]:
    if len(sides) != kind.torus:
        raise ConfigError(f"--topology={name}: a {kind.name} slice has {kind.torus} sides")
    x, y, z = (*sides, *(1,) * (3 - len(sides)))
    # Host after host, x fastest; in each its chips, x fastest.
    dx_host, dy_host, dz_host = HOST_CHIPS
    hosts = itertools.product(range(0, z, dz_host), range(0, y, dy_host), range(0, x, dx_host))
    found: list[AbstractDevice] = []
    for process, (z0, y0, x0) in enumerate(hosts):
        for dz, dy, dx in itertools.product(range(dz_host), range(dy_host), range(dx_host)):
            at = (x0 + dx, y0 + dy, z0 + dz)
            if at[0] < x and at[1] < y and at[2] < z:
                for core in range(kind.cores):
                    name = JAX_TPU_KINDS[kind.name]
                    found.append(AbstractDevice("tpu", name, len(found), process, at, core))
    return found
