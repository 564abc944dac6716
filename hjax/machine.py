"""The machine: cores, memory, child processes, and JAX's settings before it starts (platform,
threads, simulated devices)."""

import contextlib
import glob
import math
import os
import re
import signal
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hjax.errors import ConfigError


def available_cores() -> int:
    """CPU cores that this process may use, by its affinity and its cgroup's quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        if quota != "max":
            cores = min(cores or 1, math.ceil(int(quota) / int(period)))
    except (OSError, ValueError):
        pass  # no cgroup, or version 1: affinity alone
    return cores or 1


def children(pid: int) -> list[int]:
    """A process's children; none if the system does not tell."""
    found: list[int] = []
    # pathlib's glob raises if the process ends meanwhile.
    for of_thread in glob.glob(f"/proc/{pid}/task/*/children"):
        with contextlib.suppress(OSError):
            found += map(int, Path(of_thread).read_text().split())
    return found


def descendants(pid: int) -> list[int]:
    """A process's children, their children, and so on."""
    found = children(pid)
    for child in found:  # grows
        found += children(child)
    return found


def process_name(pid: int) -> str:
    """A process's name; empty: there is none."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def process_state(pid: int) -> str:
    """A process's state in one letter, as ``ps`` shows it; empty: there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def kill_all(pids: Iterable[int]) -> None:
    """Kill processes, stopped ones too."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


# Folders that this process removes at its end, with the descriptors of their locks.
TEMPORARY_FOLDERS: dict[Path, int] = {}

# Most devices of a process; simulated ones take threads and memory.
MAX_DEVICES = 4096

# JAX's plugins for NVIDIA GPUs and TPUs, the device files of such hardware (WSL and NVIDIA's small
# boards included), and Google's vendor number on the PCI bus.
_PLUGINS = frozenset({"xla_cuda12", "xla_cuda13", "libtpu"})
_DEVICE_FILES = ("nvidia*", "nvhost*", "dxg", "accel*", "vfio/[0-9]*")
_DEVICES = r"--xla_force_host_platform_device_count=(\d+)"
_GOOGLE = "0x1ae0"


def only_cpus() -> bool:
    """Whether JAX will run on CPUs: it is told to, or has no plugin for this machine's hardware.

    A plugin may be installed for its compiler alone (docs/compile.md). Unknown plugins may find
    hardware anywhere.
    """
    named = os.environ.get("JAX_PLATFORMS")
    if named:
        return named.split(",")[0] == "cpu"
    plugins = _installed_plugins()
    return not plugins or (plugins <= _PLUGINS and not _accelerator_visible())


def _installed_plugins() -> set[str]:
    import importlib.metadata
    import importlib.util
    import pkgutil

    found = {point.name for point in importlib.metadata.entry_points(group="jax_plugins")}
    if package := importlib.util.find_spec("jax_plugins"):
        found |= {m.name for m in pkgutil.iter_modules(package.submodule_search_locations)}
    if importlib.util.find_spec("libtpu") or os.environ.get("TPU_LIBRARY_PATH"):
        found.add("libtpu")
    return found


def _accelerator_visible() -> bool:
    if any(any(Path("/dev").glob(pattern)) for pattern in _DEVICE_FILES):
        return True
    vendors = Path("/sys/bus/pci/devices").glob("*/vendor")
    return any(file.read_text().strip() == _GOOGLE for file in vendors)


def compile_quickly() -> None:
    """Lower XLA's optimisation level for CPU programs; before JAX starts a backend.

    At LLVM's first level they compile in four fifths of the time (drawing parameters in a third)
    and run no slower: products are a library's, the rest waits for memory. A level that the user
    has set in XLA_FLAGS stays, and nothing changes if JAX may find an accelerator.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    if only_cpus() and "xla_backend_optimization_level" not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} --xla_backend_optimization_level=1".strip()


def pin_platform() -> None:
    """Set JAX's platform to CPU if there is no accelerator; before it starts a backend.

    A plugin installed for its compiler would search for hardware, complain at length or query the
    network. A platform that the user has set stays.
    """
    import jax

    options: Any = jax.config
    if not options.jax_platforms and only_cpus():
        options.update("jax_platforms", "cpu")
    elif os.environ.get("TPU_SKIP_MDS_QUERY") == "1":  # set by JAX where it has found no TPU
        os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
        os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5p-16")


def ensure_threads(devices: int) -> None:
    """Give XLA enough threads for ``devices`` simulated ones; before JAX starts a backend.

    XLA's CPU client has one thread per device, and each collective that waits for others holds one.
    A device that waits in several at once (only their start is ordered) leaves none to those it
    waits for, and the process ends after 40 seconds ("Termination timeout"). With a device per core
    that was never seen, and more threads would cost a third of the speed. A number that the user
    has set (PJRT_NPROC) stays.
    """
    if devices > available_cores():
        os.environ.setdefault("PJRT_NPROC", str(4 * devices))


def requested_devices() -> int:
    """Number of simulated devices that the user requested of JAX, -1 if none.

    XLA_FLAGS counts if JAX_NUM_CPU_DEVICES is not set, as in JAX.
    """
    import jax

    options: Any = jax.config
    in_flags = re.search(_DEVICES, os.environ.get("XLA_FLAGS", ""))
    number = options.jax_num_cpu_devices
    return int(in_flags[1]) if in_flags and number == -1 else number


_EXTRAS = {"cuda": "hjax[cuda]", "gpu": "hjax[cuda]", "tpu": "hjax[tpu]"}
# What JAX and its plugins say where a platform does not start, and the remedy; the first match.
_START_REMEDIES = (
    (r"not in the list of known backends", "JAX has no plugin for it here; {install}"),
    (
        r"already in use|lockfile|resource busy",
        "another process holds the devices; end it (`lsof /dev/accel* /dev/vfio/*` names it)",
    ),
    (
        r"driver version is insufficient|driver.*too old|INSUFFICIENT_DRIVER|COMPAT_NOT_SUPPORTED",
        "the NVIDIA driver is too old for this CUDA; update it (nvidia-smi says which it is), or "
        "install a JAX of an older CUDA",
    ),
    (
        r"OUT_OF_MEMORY|out of memory",
        "another process has the GPU's memory; nvidia-smi names it",
    ),
    (
        r"NO_DEVICE|no CUDA-capable|[Nn]o supported devices|device found|global TPU topology",
        "no device is visible; nvidia-smi or `ls /dev/accel* /dev/vfio` must list one, and "
        "CUDA_VISIBLE_DEVICES must not hide it",
    ),
    (
        r"cuDNN|CUDA|^$",
        "the plugin is installed, but its libraries or the driver are missing or do not load; "
        "{install}, and see that nvidia-smi works",
    ),
)


def start_error(error: BaseException, platforms: str) -> ConfigError:
    """The one-line error, with the remedy, for a platform that JAX does not start.

    Args:
      error: that JAX raised.
      platforms: of JAX_PLATFORMS; empty: not set.
    """
    said = " ".join(str(error).split())
    extra = _EXTRAS.get(platforms.split(",")[0])
    install = f"pip install '{extra}'" if extra else "JAX_PLATFORMS may be cpu, cuda or tpu"
    found = (text for pattern, text in _START_REMEDIES if re.search(pattern, said))
    remedy = next(found, "JAX_PLATFORMS=cpu computes without it").format(install=install)
    said = re.sub(r"\s*\(set JAX_PLATFORMS=.*", "", said)
    quoted = f" ({said})" if said else ""
    return ConfigError(f"JAX_PLATFORMS={platforms} does not start: {remedy}{quoted}")


def find_devices() -> list[Any]:
    """``jax.devices()``.

    Raises:
      ConfigError: JAX does not start on the platform, in one line with the remedy.
    """
    import jax

    options: Any = jax.config
    try:
        return list(jax.devices())
    except (AssertionError, RuntimeError) as error:
        raise start_error(error, options.jax_platforms or "") from error


def simulated_devices(count: int) -> list[Any]:
    """``count`` devices: the machine's, or simulated ones if it has too few."""
    import jax

    # Before JAX starts: override a smaller number from the environment.
    options: Any = jax.config
    if requested_devices() < count:
        os.environ["XLA_FLAGS"] = re.sub(_DEVICES, "", os.environ.get("XLA_FLAGS", "")).strip()
        options.update("jax_num_cpu_devices", count)
    ensure_threads(requested_devices())
    pin_platform()
    devices = find_devices()
    if len(devices) < count:
        devices = jax.devices("cpu")
    if len(devices) < count:
        raise ConfigError(f"{count} devices are needed, there are {len(devices)}")
    return devices[:count]


def device_memory(device: Any) -> int:
    """Bytes of a device's memory that programs may use; 0 if unknown (CPUs)."""
    stats = device.memory_stats() if device.platform != "cpu" else None
    return int(stats.get("bytes_limit", 0)) if stats else 0


def free_bytes(device: Any) -> int:
    """Free memory of a jax.Device, of a CPU the machine's; 0 if unknown."""
    if device.platform == "cpu":
        try:  # reclaimable memory included
            text = Path("/proc/meminfo").read_text()
        except OSError:
            return 0
        found = re.search(r"^MemAvailable: *(\d+) kB$", text, re.MULTILINE)
        free = int(found[1]) * 1024 if found else 0
        return min(free, _cgroup_bytes_left(free))
    stats = device.memory_stats() or {}
    return max(int(stats.get("bytes_limit", 0)) - int(stats.get("bytes_in_use", 0)), 0)


def _cgroup_bytes_left(otherwise: int) -> int:
    """Bytes that this process's cgroup may still allocate; ``otherwise`` without a limit."""
    group = Path("/sys/fs/cgroup")
    try:
        limit = (group / "memory.max").read_text().strip()
        if limit == "max":
            return otherwise
        used = int((group / "memory.current").read_text())
        stat = (group / "memory.stat").read_text()
    except (OSError, ValueError):
        return otherwise
    files = re.search(r"^inactive_file (\d+)$", stat, re.MULTILINE)  # reclaimable
    return max(int(limit) - used + (int(files[1]) if files else 0), 0)
