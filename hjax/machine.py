"""The machine before JAX starts on it: its cores, its compilers' settings, simulated devices."""

import contextlib
import math
import os
import re
import signal
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hjax.errors import ConfigError


def available_cores() -> int:
    """CPU cores this process may use: its affinity, and its control group's quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        if quota != "max":
            cores = min(cores or 1, math.ceil(int(quota) / int(period)))
    except (OSError, ValueError):
        pass  # no control group, or an older kind: affinity alone
    return cores or 1


def children(pid: int) -> list[int]:
    """A process's children; none where the system does not tell."""
    found: list[int] = []
    for of_thread in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += map(int, of_thread.read_text().split())
    return found


def descendants(pid: int) -> list[int]:
    """A process's children, theirs, and so on."""
    found = children(pid)
    for child in found:  # grows
        found += children(child)
    return found


def name_of(pid: int) -> str:
    """A process's name; empty: there is none."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def state(pid: int) -> str:
    """A process's state in one letter, as ``ps`` shows it; empty: there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def end_all(pids: Iterable[int]) -> None:
    """End processes at once, those that are stopped too."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


# That a process has or simulates; each takes threads and memory.
MOST_DEVICES = 4096

# JAX's plugins for NVIDIA's GPUs and Google's TPUs, and where Linux shows such hardware: its device
# files (those of WSL and of NVIDIA's small boards too), and the vendor's number on the PCI bus.
_PLUGINS = frozenset({"xla_cuda12", "xla_cuda13", "libtpu"})
_DEVICE_FILES = ("nvidia*", "nvhost*", "dxg", "accel*", "vfio/[0-9]*")
_DEVICES = r"--xla_force_host_platform_device_count=(\d+)"
_GOOGLE = "0x1ae0"


def only_cpus() -> bool:
    """Whether JAX will run on CPUs: it is told so, or has no plugin for hardware that is here.

    A plugin may be installed for its compiler alone (docs/compile.md). One that is not known here
    may find hardware anywhere.
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
    """Let XLA spend less on optimising CPU programs; before JAX starts a backend.

    At LLVM's first level they compile in four fifths of the time (drawing parameters in a third)
    and run no slower: products are a library's, the rest waits for memory. A level that the user
    has set in XLA_FLAGS stays, and so does everything where JAX may find an accelerator.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    if only_cpus() and "xla_backend_optimization_level" not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} --xla_backend_optimization_level=1".strip()


def settle_platform() -> None:
    """Keep JAX from looking for hardware that is not here; before it starts a backend.

    With a plugin that is there for its compiler it would, and complain at length, or ask the
    network, before it takes the CPU. A platform that the user has named stays.
    """
    import jax

    options: Any = jax.config
    if not options.jax_platforms and only_cpus():
        options.update("jax_platforms", "cpu")
    elif os.environ.get("TPU_SKIP_MDS_QUERY") == "1":  # set by JAX where it has found no TPU
        os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
        os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5p-16")


def enough_threads(devices: int) -> None:
    """Threads for ``devices`` simulated ones, several to a core; before JAX starts a backend.

    XLA's CPU client has one thread per device, and each collective that waits for others holds
    one. A device that waits in several at once (they are ordered only in their start) leaves none
    to those it waits for: the process ends after 40 seconds ("Termination timeout"). With a device
    per core that was never seen, and more threads would cost a third of the speed. A number that
    the user has set (PJRT_NPROC) stays.
    """
    if devices > available_cores():
        os.environ.setdefault("PJRT_NPROC", str(4 * devices))


def devices_asked_for() -> int:
    """Simulated devices that the user has asked JAX for, -1 if none.

    XLA_FLAGS counts where JAX_NUM_CPU_DEVICES is not set, as in JAX.
    """
    import jax

    options: Any = jax.config
    in_flags = re.search(_DEVICES, os.environ.get("XLA_FLAGS", ""))
    number = options.jax_num_cpu_devices
    return int(in_flags[1]) if in_flags and number == -1 else number


def simulated_devices(count: int) -> list[Any]:
    """``count`` devices: the machine's, or simulated ones where it has too few."""
    import jax

    # Before JAX starts: a smaller number that the environment asks for would not do.
    options: Any = jax.config
    if devices_asked_for() < count:
        os.environ["XLA_FLAGS"] = re.sub(_DEVICES, "", os.environ.get("XLA_FLAGS", "")).strip()
        options.update("jax_num_cpu_devices", count)
    enough_threads(devices_asked_for())
    settle_platform()
    devices = jax.devices()
    if len(devices) < count:
        devices = jax.devices("cpu")
    if len(devices) < count:
        raise ConfigError(f"{count} devices are needed, there are {len(devices)}")
    return devices[:count]


def device_memory(device: Any) -> int:
    """Bytes of a device's memory that programs may use; 0 where it does not say (CPUs)."""
    stats = device.memory_stats() if device.platform != "cpu" else None
    return int(stats.get("bytes_limit", 0)) if stats else 0


def free_bytes(device: Any) -> int:
    """Memory that a jax.Device has left, of a CPU the machine's; 0: it does not say."""
    if device.platform == "cpu":
        try:  # with what the system would give back
            text = Path("/proc/meminfo").read_text()
        except OSError:
            return 0
        found = re.search(r"^MemAvailable: *(\d+) kB$", text, re.MULTILINE)
        free = int(found[1]) * 1024 if found else 0
        return min(free, _control_group_left(free))
    stats = device.memory_stats() or {}
    return max(int(stats.get("bytes_limit", 0)) - int(stats.get("bytes_in_use", 0)), 0)


def _control_group_left(otherwise: int) -> int:
    """Bytes that this process's control group may still take; ``otherwise`` without a limit."""
    group = Path("/sys/fs/cgroup")
    try:
        limit = (group / "memory.max").read_text().strip()
        if limit == "max":
            return otherwise
        used = int((group / "memory.current").read_text())
        stat = (group / "memory.stat").read_text()
    except (OSError, ValueError):
        return otherwise
    files = re.search(r"^inactive_file (\d+)$", stat, re.MULTILINE)  # given back when asked for
    return max(int(limit) - used + (int(files[1]) if files else 0), 0)
