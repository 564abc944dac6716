"""``--dry_run``: batch arithmetic, placement, parameters and memory of a run before it starts."""

import shlex
from collections.abc import Sequence
from typing import Any

from ml_collections import ConfigDict

from hjax.config import data_path
from hjax.dryrun.first_examples import first_examples
from hjax.dryrun.programs import (
    abstract_workers,
    add_held,
    memory_of,
    resident_bytes,
    settings_records,
    step_programs,
)
from hjax.machine import device_memory
from hjax.models import parameter_counts
from hjax.run.backends import local_devices
from hjax.run.episode_rollout import episode_return, player_of
from hjax.run.health_checks import setup_warnings
from hjax.run.reward_check import trial_calls
from hjax.workers import NetworkWorker


def describe(trainer: Any) -> dict[str, Any]:
    """Batch arithmetic, placement, parameters and memory per device of a trainer's programs.

    Nothing is allocated: programs are compiled for abstract arguments, and ``memory_analysis``
    gives their memory.

    Returns:
      ``algorithm``, ``remark`` (if the step's calls cannot be traced), ``forms`` (of kernels that
      are not taken, on accelerators), ``data`` (how it was processed), ``first_examples`` (decoded,
      by kind), ``warnings`` (about the set-up, a line each), ``batch``, ``reward`` and ``cost``
      (what their functions return for a few rows), ``episodes`` (the agent or environment of the
      user's, and what tries it), ``placement``, ``parameters`` (by role), ``memory`` (of each
      program what ``programs.add_held`` says, bytes per device), ``resident_bytes`` (by role, kept
      between calls), ``device_memory_bytes``, with ``model.remat=auto`` ``remat`` (by role, of
      ``RematChoice.record``), with ``model.unroll_layers=auto`` ``unroll_layers`` (by role, whether
      they are), ``cache`` (by role that generates, ``dtype`` and ``bytes_per_token`` of its keys
      and values, over all devices that share the heads), with ``rollout.slots=-1`` ``slots`` (of
      ``SlotBudget.record``) and where something is offloaded ``offload`` (of
      ``programs.offload_savings``).
    """
    config, roles = trainer.config, trainer.roles
    judged = _first_calls(trainer)
    records = []
    length = trainer.inputs.prompt_length
    devices = local_devices(config)
    rehearsal = abstract_workers(roles, devices)
    programs, remark = step_programs(config, trainer.algorithm_class, rehearsal, length)
    for program in programs:
        named = {"role": program.role, "program": program.name, "runs": program.runs}
        memory = memory_of(program.program.trace().lower().compile())
        records.append(add_held({**named, **memory}, program, rehearsal))
    return {
        "algorithm": config.algorithm.name,
        **({"remark": remark} if remark else {}),
        **({"forms": trainer.forms.remark} if trainer.forms.remark else {}),
        **({"data": list(trainer.inputs.remarks)} if trainer.inputs.remarks else {}),
        **_first_examples(trainer),
        **({"warnings": warnings} if (warnings := _warnings(trainer)) else {}),
        "batch": _batch(trainer),
        **judged,
        "placement": [_members(roles, members) for members in roles.plan.placement],
        "host_roles": [r for r in roles.builds if r not in roles.layouts],
        "parameters": {role: _parameters(x) for role, x in rehearsal.workers.items()},
        "learned": {role: _learned(x) for role, x in rehearsal.workers.items()},
        "resident_bytes": {r: sum(x.values()) for r, x in resident_bytes(rehearsal).items()},
        "device_memory_bytes": min(filter(None, map(device_memory, devices)), default=None),
        **settings_records(roles, rehearsal, records),
        "memory": records,
    }


def _warnings(trainer: Any) -> list[str]:
    """What the run would warn of before its first step."""
    devices = len(trainer.backend.devices)
    return setup_warnings(trainer.config, devices, trainer.roles, trainer.inputs.held_out)


def _parameters(worker: Any) -> int:
    """Number of a worker's parameters."""
    if isinstance(worker, NetworkWorker):
        return worker.network.size
    return parameter_counts.parameter_count(worker.network.config, worker.scalar)


def _learned(worker: Any) -> int:
    """Number of a worker's parameters that are trained."""
    if isinstance(worker, NetworkWorker):
        return worker.network.size if worker.updater is not None else 0
    if not hasattr(worker, "optimizer_state"):
        return 0
    return parameter_counts.learned_parameters(worker.network.config, worker.scalar)


def _first_examples(trainer: Any) -> dict[str, Any]:
    """The first example of each kind, of a run that reads any."""
    if not trainer.algorithm_class.sequences:
        return {}
    source = trainer.algorithm_class.source
    return {"first_examples": first_examples(trainer.config, trainer.inputs, source)}


def _members(roles: Any, members: Sequence[str]) -> dict[str, Any]:
    """The roles of a set, its devices and its layouts."""
    layouts = {role: roles.layouts[role] for role in members}
    return {
        "roles": list(members),
        "devices": [str(d) for d in roles.pools[members[0]].devices],
        "layouts": {
            role: {"train": x.train.describe(), "generate": x.generate.describe()}
            for role, x in layouts.items()
        },
    }


def _batch(trainer: Any) -> dict[str, Any]:
    """Batch arithmetic of a step."""
    config = trainer.config
    if not trainer.algorithm_class.sequences:
        return {"steps": config.steps, **trainer.algorithm_class.describe_step(config.algorithm)}
    if not trainer.algorithm_class.generates:
        return {
            "sequences_per_update": config.warm_start.batch,
            "train_examples": len(trainer.inputs.demonstrations),
            "steps": config.steps,
        }
    rollout, algorithm = config.rollout, config.algorithm
    rows = rollout.prompts * rollout.samples
    minibatch = algorithm.get("minibatch", 0) or rows
    epochs = algorithm.get("epochs", 1)
    return {
        "prompts_per_step": rollout.prompts,
        "samples_per_prompt": rollout.samples,
        "sequences_per_step": rows,
        "minibatch_sequences": minibatch,
        "epochs": epochs,
        "updates_per_step": epochs * (rows // minibatch),
        "prompt_tokens": trainer.inputs.prompt_length,
        "response_tokens": rollout.max_response_length,
        "train_prompts": len(trainer.inputs.train),
        "held_out_prompts": len(trainer.inputs.held_out or ()),
        "steps": config.steps,
        "epochs_of_the_data": config.steps * rollout.prompts / len(trainer.inputs.train),
    }


def _first_calls(trainer: Any) -> dict[str, Any]:
    """By role the results of its reward or cost function on demonstrations or empty answers; an
    agent or environment is named and not called.

    Raises:
      RunError: the function fails, with its traceback.
      ConfigError: the algorithm does not take rewards of these names.
    """
    if not trainer.algorithm_class.generates:
        return {}
    functions = trainer.roles.reward_functions
    called = {role: each for role, each in functions.items() if each.function is not episode_return}
    calls = trial_calls(trainer.config, trainer.inputs, called) if called else []
    for call in calls:
        call.check(trainer.algorithm_class, trainer.config)
    return {call.role: call.record() for call in calls} | _episodes(trainer.config)


def _episodes(config: ConfigDict) -> dict[str, Any]:
    """The user's agent or environment, and the command that tries it; empty: there is none."""
    kind, name = player_of(config)
    if not kind:
        return {}
    path = config.data.eval_path or data_path(config.data)
    flags = {
        "model": config.actor.path or "WORKDIR",
        **({"data": path} if path else {"task": config.data.task}),
        kind: name,
        **({"verifier": config.agent.verifier} if config.agent.verifier else {}),
        "limit": 2,
    }
    tried = " ".join(shlex.quote(f"--{flag}={value}") for flag, value in flags.items())
    said = f"{name}: not called; try it with python -m hjax.launch.evaluate {tried}"
    return {"episodes": {kind: said}}
