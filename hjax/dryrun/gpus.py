"""NVIDIA GPUs that are not there: their properties, for the compiler in JAX's CUDA plugin.

The figures are those of NVIDIA's data sheets and of the CUDA programming guide's table of compute
capabilities (the SXM modules). XLA's cost models read them; what a kernel library would choose on
the real GPU (cuBLAS, cuDNN, autotuning) is not seen.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from typing import Any

from hjax.errors import ConfigError


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

    _answer_for(kind)
    hosts, count = sizes
    described = topologies.get_topology_desc(
        device_kind(kind),
        platform="cuda",
        target_config=target_config(kind),
        topology=f"1x{hosts}x{count}",
    )
    return tuple(described.devices)


def _answer_for(kind: str) -> None:
    """Let cuDNN's attention be traced for a GPU that is not there.

    JAX asks this process's first GPU for its compute capability while it traces, and the cuDNN
    that is installed for its version. From here on it is answered with those of ``kind``, in
    a process that compiles and runs nothing.
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
    """As JAX calls such a GPU, by which its kernels' compiler knows it."""
    return f"NVIDIA {kind.upper()}"


def plugin_installed() -> bool:
    """Whether JAX's CUDA plugin, which has the compiler, is there."""
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
