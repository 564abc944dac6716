"""What a run says of itself beside its metrics: where its roles stand, what it is made from."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from hjax.files import replacing, saved_steps
from hjax.models.bases import RECORD, Base, read_bases
from hjax.models.huggingface import write_config
from hjax.models.weights import MODEL_DIRECTORY
from hjax.run.inputs import Inputs
from hjax.run.placement import train_sizes
from hjax.run.roles import Roles
from hjax.run.workdir import Workdir


def plan_record(roles: Roles) -> dict[str, Any]:
    """Where the roles stand: ``placement``, ``allocation``, ``parallelism``, what the plan fixes of
    roles beside (``settings``), on a cluster ``hosts``, by set the host of each process, and
    ``where``, the labels that they must have."""
    plan = roles.plan
    executors: list[Any] = [roles.pools[names[0]].executor for names in plan.placement]
    hosts = [executor.hosts for executor in executors if hasattr(executor, "hosts")]
    parallelism: dict[str, Any] = {}
    for role, layouts in roles.layouts.items():
        parallelism[role] = {"train": train_sizes(layouts.train.mesh.shape)}
        if roles.table[role].generates and not roles.table[role].apart:
            parallelism[role]["generate"] = {
                "data": layouts.generate.ways("batch"),
                "tensor": layouts.generate.ways("heads"),
            }
            if (stages := layouts.generate.ways("layers")) > 1:
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


def offloaded_bytes(roles: Roles) -> int:
    """Bytes per device that wait in the host's memory while a pool generates, at most."""
    sets: dict[int, int] = {}
    for role in roles.layouts:
        group = roles.groups[role]
        if group.has("offloaded_bytes"):
            size = group.offloaded_bytes("generate", roles.table[role].generates).result()
            number = roles.set_of(role)
            sets[number] = sets.get(number, 0) + size
    return max(sets.values(), default=0)


def write_model_files(workdir: Path, inputs: Inputs, scalar: bool = False) -> None:
    """config.json and tokenizer, so that ``load_model`` reads a workdir.

    Args:
      workdir: of the run.
      inputs: its model and tokenizer.
      scalar: whether the model has a scalar head.
    """
    directory = workdir / MODEL_DIRECTORY
    write_config(directory, inputs.model, inputs.tokenizer, scalar)
    if inputs.tokenizer is not None:
        inputs.tokenizer.save(directory)


def record_bases(workdir: Workdir, bases: Mapping[str, Base]) -> list[str]:
    """Keep which checkpoints of other runs a run's models were read from.

    Args:
      workdir: of the run, opened.
      bases: the checkpoints by path.

    Returns:
      a line on each that a run which goes on did not have in its record.
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


def keep_for_inspection(workdir: Path, step: int, batch: Mapping[str, Any]) -> None:
    """The arrays of a step with a skipped update, as skipped/step-N.npz."""
    directory = workdir / "skipped"
    directory.mkdir(exist_ok=True)
    arrays: dict[str, Any] = {k: v for k, v in batch.items() if isinstance(v, np.ndarray)}
    with replacing(directory / f"step-{step}.npz") as part, open(part, "wb") as file:
        np.savez(file, **arrays)
