"""What a run will cost, counted before it starts: ``--dry_run``."""

from __future__ import annotations

from typing import Any

import jax

from hjax.models.parameters import decoder_network, scalar_network


def describe(trainer: Any) -> dict[str, Any]:
    """Batch arithmetic, placement, parameters and memory per device of a trainer's programs.

    Nothing is allocated: the programs are compiled for abstract arguments and asked for their
    memory (``memory_analysis``).

    Returns:
      ``algorithm``, ``batch``, ``placement``, ``parameters`` (by role), ``memory`` (one row per
      program, bytes per device) and ``resident_bytes`` (per pool: the states of its roles).
    """
    config, roles = trainer.config, trainer.roles
    rollout, algorithm = config.rollout, config.algorithm
    rows = rollout.prompts * rollout.samples
    minibatch = algorithm.get("minibatch", 0) or rows
    epochs = algorithm.get("epochs", 1)
    batch: dict[str, Any] = {
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
    }
    if not trainer.algorithm_class.generates:
        minibatch = config.warm_start.batch
        batch = {
            "sequences_per_update": minibatch,
            "train_examples": len(trainer.inputs.demonstrations),
            "steps": config.steps,
        }
    memory, resident = [], {}
    for role, group in roles.groups.items():
        worker = group.worker
        if not hasattr(worker, "programs"):
            continue
        state = worker.abstract_state()
        resident[role] = per_device_bytes(state)
        prompt_length = trainer.inputs.prompt_length
        programs = dict(worker.programs(minibatch, prompt_length))
        # Mini-batches are cut after the whole step's sequences were generated at once.
        whole = dict(worker.programs(rows, prompt_length))
        programs |= {name: whole[name] for name in programs if name != "update"}
        if not trainer.algorithm_class.generates:
            programs = {"update": programs["update"]}
        for name, trace in programs.items():
            analysis = trace().lower().compile().memory_analysis()
            memory.append(
                {
                    "role": role,
                    "program": name,
                    "argument_bytes": analysis.argument_size_in_bytes,
                    "output_bytes": analysis.output_size_in_bytes,
                    "temporary_bytes": analysis.temp_size_in_bytes,
                    "total_bytes": analysis.argument_size_in_bytes
                    + analysis.output_size_in_bytes
                    - analysis.alias_size_in_bytes
                    + analysis.temp_size_in_bytes,
                }
            )
    placement = [
        {
            "roles": list(members),
            "devices": [str(d) for d in roles.pools[members[0]].devices],
            "layouts": {
                role: {
                    "train": roles.layouts[role].train.describe(),
                    "generate": roles.layouts[role].generate.describe(),
                }
                for role in members
            },
        }
        for members in roles.plan.placement
    ]
    return {
        "algorithm": algorithm.name,
        "batch": batch,
        "placement": placement,
        "host_roles": [r for r in roles.groups if r not in roles.layouts],
        "parameters": {role: _parameters(trainer, role) for role in roles.models},
        "resident_bytes": resident,
        "memory": memory,
    }


def _parameters(trainer: Any, role: str) -> int:
    config = trainer.roles.models[role]
    scalar = getattr(trainer.roles.groups[role].worker, "scalar", False)
    return (scalar_network if scalar else decoder_network)(config).parameters


def per_device_bytes(tree: Any) -> int:
    """Bytes that each device holds of a tree of jax.ShapeDtypeStruct with shardings."""
    total = 0
    for leaf in jax.tree.leaves(tree):
        shape = leaf.sharding.shard_shape(leaf.shape)
        size = leaf.dtype.itemsize
        for n in shape:
            size *= n
        total += size
    return total
