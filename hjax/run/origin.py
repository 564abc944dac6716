"""Where a run's figures come from: command, versions, commit and hardware at each start."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import hjax
from hjax.machine import available_cores

_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")


def start_record(devices: Sequence[Any], step: int) -> dict[str, Any]:
    """A row of starts.jsonl.

    Args:
      devices: of the run (``jax.Device``s, or what stands for those of a cluster).
      step: the last that was taken before this start; 0: the run begins.
    """
    kinds = [str(getattr(device, "device_kind", device)) for device in devices]
    return {
        "step": step,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "command": _command(),
        "versions": {"hjax": hjax.__version__, "python": platform.python_version(), **_versions()},
        "commit": _commit(Path.cwd()),
        "hjax_commit": _commit(Path(hjax.__file__).resolve().parent),
        "devices": {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)},
        "processor": processor(),
        "cores": available_cores(),
        "system": f"{platform.system()} {platform.release()}",
    }


def _command() -> str:
    """The command line as one would type it; in a notebook that of its kernel."""
    words = sys.orig_argv
    return shlex.join([Path(words[0]).name, *words[1:]]) if words else ""


def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _commit(folder: Path) -> str:
    """The commit that a folder stands at, with ``+`` where files differ; empty outside git."""
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
    try:
        commit, changes = (
            subprocess.run(
                ["git", "-C", str(folder), *words],
                capture_output=True,
                text=True,
                timeout=5,
                check=True,
                env=environment,
            ).stdout.strip()
            for words in (
                ("rev-parse", "--short=10", "HEAD"),
                ("status", "--porcelain", "--untracked-files=no"),
            )
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return commit + "+" * bool(changes)


def processor() -> str:
    """The processor's name as the system tells it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.lower().startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
