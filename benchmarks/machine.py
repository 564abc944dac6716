"""On what a figure was measured: machine, versions, commit, and who else was using the cores."""

from __future__ import annotations

import importlib.metadata
import os
import pathlib
import platform
import subprocess
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent


def cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def use_cores(count: int) -> None:
    """Have this process, and those that it starts, use no more than so many cores."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:count])


def describe() -> dict[str, str | int | None]:
    """The processor's name, usable cores, Python, and the commit of this checkout.

    The commit ends in `+` where tracked files differ from it, and is None outside git.
    """
    return {
        "cpu": _cpu_name(),
        "cores": cores(),
        "python": platform.python_version(),
        "commit": _commit(),
    }


def versions(*distributions: str) -> dict[str, str | None]:
    """Installed version of each distribution, None where absent."""
    found: dict[str, str | None] = {}
    for name in distributions:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


class CoreUse:
    """How many cores this process and all others have used since it was made.

    A step measured while others compute says nothing, so every figure carries this.
    """

    def __init__(self) -> None:
        self._start = self._now()

    @staticmethod
    def _now() -> tuple[float, float, float]:
        """(busy core-seconds of the machine, of this process and its children, wall seconds)."""
        own = os.times()
        mine = own.user + own.system + own.children_user + own.children_system
        return _busy_seconds(), mine, time.perf_counter()

    def read(self) -> dict[str, float | None]:
        """`own_cores` and `other_cores`, on average; None where the system does not tell."""
        busy, mine, wall = (new - old for old, new in zip(self._start, self._now()))
        other = None if busy != busy else round(max(0.0, busy - mine) / wall, 2)
        return {"own_cores": round(mine / wall, 2), "other_cores": other}


def _busy_seconds() -> float:
    """Core-seconds the whole machine has spent computing since it started; NaN if unknown."""
    try:
        with open("/proc/stat") as file:
            user, nice, system, _idle, _iowait, irq, softirq, steal = (
                int(x) for x in file.readline().split()[1:9]
            )
    except OSError:
        return float("nan")
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _commit() -> str | None:
    def git(*args: str) -> str:
        done = subprocess.run(
            ["git", *args], cwd=ROOT, capture_output=True, text=True, check=True, timeout=30
        )
        return done.stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "--short=10", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.SubprocessError):
        return None
