"""Metadata and exports of a run: placement, base checkpoints, model files, provenance (command,
versions, commits, hardware)."""

import dataclasses
import json
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from ml_collections import ConfigDict

import hjax
from hjax.errors import ConfigError
from hjax.files import KERNELS, StrPath, read_json, replace_file, replacing, saved_steps
from hjax.kernels.verdict import installed_versions
from hjax.machine import available_cores
from hjax.models.base_checkpoints import RECORD, BaseCheckpoint, read_bases
from hjax.models.export import GENERATION_CONFIG, export_adapters, export_weights
from hjax.models.huggingface import write_config
from hjax.models.parameters import decoder_network
from hjax.models.weights import MODEL_DIRECTORY, adapter_base, base_model_path, model_directory
from hjax.run.inputs import Inputs
from hjax.run.placement import train_sizes
from hjax.run.role_groups import RoleGroups
from hjax.run.workdir import Workdir
from hjax.user_input import read_object

_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")


def recorded_forms(workdir: Workdir, config: Mapping[str, Any]) -> Any:
    """The content of kernels.json, which a resume keeps (``hjax.kernels.verdict``); None for a new
    run or one without a step. Raises ConfigError as ``Workdir.check`` does."""
    return workdir.read_json(KERNELS) if workdir.check(config) and workdir.has_steps() else None


def plan_record(roles: RoleGroups) -> dict[str, Any]:
    """The content of plan.json: ``placement``, ``allocation``, ``parallelism`` and, where present,
    ``settings`` and ``predicted`` of the plan; on a cluster ``hosts`` (by set, the host of each
    process) and ``where`` (labels that hosts must have)."""
    plan = roles.plan
    executors: list[Any] = [roles.pools[names[0]].executor for names in plan.placement]
    hosts = [executor.hosts for executor in executors if hasattr(executor, "hosts")]
    parallelism: dict[str, Any] = {}
    for role, layouts in roles.layouts.items():
        parallelism[role] = {"train": train_sizes(layouts.train.mesh.shape)}
        if roles.table[role].generates and not roles.table[role].apart:
            parallelism[role]["generate"] = {
                "data": layouts.generate.shard_count("batch"),
                "tensor": layouts.generate.shard_count("heads"),
            }
            if (stages := layouts.generate.shard_count("layers")) > 1:
                parallelism[role]["generate"]["pipe"] = stages
    return {
        "placement": [list(names) for names in plan.placement],
        "allocation": list(plan.allocation),
        "parallelism": parallelism,
        **({"where": [dict(labels) for labels in plan.where]} if any(plan.where) else {}),
        **({"settings": {r: dict(s) for r, s in plan.settings.items()}} if plan.settings else {}),
        **({"hosts": hosts} if hosts else {}),
        **({"predicted": dict(plan.predicted)} if plan.predicted else {}),
    }


def offloaded_bytes(roles: RoleGroups) -> int:
    """Bytes per device that are offloaded to host memory during generation, of the largest set."""
    sets: dict[int, int] = {}
    for role in roles.layouts:
        group = roles.groups[role]
        if group.has("offloaded_bytes"):
            size = group.offloaded_bytes("generate", roles.table[role].generates).result()
            number = roles.set_index(role)
            sets[number] = sets.get(number, 0) + size
    return max(sets.values(), default=0)


def export_actor(
    directory: StrPath, config: ConfigDict, inputs: Inputs, roles: RoleGroups, adapter: bool
) -> Path:
    """Write the actor, see ``Trainer.export``."""
    actor, path = roles.groups["actor"], config.actor.path
    source = model_directory(path) if path else None
    if not adapter:
        params = actor.weights().result()
        return export_weights(directory, inputs.model, params, source, inputs.tokenizer)
    if roles.table["actor"].scalar:
        raise ConfigError(
            "export(adapter=True): adapters of a model with a scalar head are exported with its "
            "weights; leave adapter out"
        )
    if path:
        began = roles.base_checkpoints.get(path)
        step = None if began is None else began.check(path)
        base, own = adapter_base(base_model_path(path), step)
    else:
        base, own = "", actor.base_weights().result()
    return export_adapters(
        directory,
        decoder_network(roles.models["actor"]),
        actor.learned_weights().result(),
        base,
        own,
        source,
        inputs.tokenizer,
    )


def write_model_files(workdir: Path, inputs: Inputs, scalar: bool = False, start: str = "") -> None:
    """Write the model's config.json and tokenizer, so that ``load_model`` can read the workdir, and
    what the generation_config.json of the path that it starts from says.

    Args:
      workdir: of the run.
      inputs: the run's model config and tokenizer.
      scalar: whether the model has a scalar head.
      start: path that the actor starts from; empty: from scratch.
    """
    directory = workdir / MODEL_DIRECTORY
    write_config(directory, inputs.model, inputs.tokenizer, scalar)
    if inputs.tokenizer is not None:
        inputs.tokenizer.save(directory)
    source = model_directory(start) / GENERATION_CONFIG if start else None
    if source is not None and source.is_file():
        written = directory / GENERATION_CONFIG  # ids that end a response, where there are several
        content = read_object(source) | (read_json(written) or {})
        replace_file(written, json.dumps(content, indent=1) + "\n")


def record_bases(workdir: Workdir, bases: Mapping[str, BaseCheckpoint]) -> list[str]:
    """Record the checkpoints of other runs that a run's models were read from.

    Args:
      workdir: of the run, opened.
      bases: the checkpoints by path.

    Returns:
      on resume, a message for each checkpoint that was not recorded before.
    """
    if not bases:
        return []
    unknown = bases.keys() - read_bases(workdir.path) if saved_steps(workdir.checkpoints) else set()
    workdir.write_json(RECORD, {path: dataclasses.asdict(base) for path, base in bases.items()})
    return [
        f"{path}: checkpoint {bases[path].step}, its newest, is what this run's adapters stand on "
        "from now on (an earlier hjax did not record which one they began on)"
        for path in sorted(unknown)
    ]


def save_skipped_batch(workdir: Path, step: int, batch: Mapping[str, Any]) -> None:
    """Save the arrays of a step that failed or skipped an update, as skipped/step-N.npz."""
    directory = workdir / "skipped"
    directory.mkdir(exist_ok=True)
    arrays: dict[str, Any] = {k: v for k, v in batch.items() if isinstance(v, np.ndarray)}
    with replacing(directory / f"step-{step}.npz") as part, open(part, "wb") as file:
        np.savez(file, **arrays)


def start_record(devices: Sequence[Any], step: int) -> dict[str, Any]:
    """A row of starts.jsonl: the provenance of a start or resume.

    Args:
      devices: of the run (``jax.Device``s, or a cluster's abstract ones).
      step: the last step before this start; 0: a new run.
    """
    kinds = [str(getattr(device, "device_kind", device)) for device in devices]
    return {
        "step": step,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "command": _command(),
        "versions": {
            "hjax": hjax.__version__,
            "python": platform.python_version(),
            **installed_versions(_PACKAGES),
        },
        "commit": _commit(Path.cwd()),
        "hjax_commit": _commit(Path(hjax.__file__).resolve().parent),
        "devices": {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)},
        "processor": processor(),
        "cores": available_cores(),
        "system": f"{platform.system()} {platform.release()}",
    }


def _command() -> str:
    """The command line, quoted for a shell; in a notebook that of its kernel."""
    words = sys.orig_argv
    return shlex.join([Path(words[0]).name, *words[1:]]) if words else ""


def _commit(folder: Path) -> str:
    """The git commit of a folder, with ``+`` for changed files; empty outside git."""
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
    """The processor's name, as the operating system reports it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.lower().startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
