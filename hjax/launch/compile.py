"""`python -m hjax.launch.compile`: compile a step for a TPU or GPU topology without having it."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from absl import flags
from ml_collections import ConfigDict

from hjax.errors import ConfigError
from hjax.launch.command import exit_status, json_line, take_config
from hjax.launch.config import config_names, load_config
from hjax.launch.format import seconds, size
from hjax.launch.tables import wide_console
from hjax.launch.topologies import GPU_MEMORY, TPU_KINDS, find_topology, prepare_environment

LEVELS = ("O0", "O1", "O2", "O3")
HELP = """\
usage: python -m hjax.launch.compile --config=NAME.py --topology=KIND:SIZES [--json]
                                     [--optimization=O0] [--nocache] [--config.a.b=VALUE ...]

Compile every program of a training step with the compiler of hardware that this machine does not
have, and say what each needs: memory, collectives, FLOPs. Nothing is run. A step that does not fit
into the devices' memory is refused with the bytes missing.

  --config=NAME.py      a Python file with get_config(), or one of the shipped ones:
                        {configs}
  --topology=KIND:SIZES chips of a TPU torus: v5p:4x4x4, v5e:2x2 ({tpus};
                        pip install 'jax[tpu]'), or hosts x GPUs: h100:2x8 ({gpus};
                        pip install 'jax[cuda13]')
  --config.a.b=VALUE    set a key of the config (docs/config.md lists all). A role's path may name
                        a published shape, such as llama-7b: no weights and no data are needed
  --optimization=O0     compile quickly to see whether it compiles (O0 to O3); memory is
                        overstated. Without it: as in a run
  --nocache             compile what was compiled before too
  --json                print one line of JSON as the last line of the output
  --help                print this

exit status: 0 it compiles and fits; 1 failed while compiling; 2 wrong input, or it does not fit
"""


@dataclasses.dataclass
class Command:
    """The parsed command line."""

    name: str
    config: ConfigDict
    topology: str
    level: str
    cache: Path | None
    json: bool


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if any(a in ("--help", "-help", "-h") for a in arguments):
        kinds = {"tpus": ", ".join(TPU_KINDS), "gpus": ", ".join(GPU_MEMORY)}
        print(HELP.format(configs=", ".join(config_names()), **kinds), end="")
        return 0
    prepare_environment()  # before JAX is imported
    return exit_status(lambda: _run(parse(arguments)))


def parse(arguments: Sequence[str]) -> Command:
    """Read the command line and the config it names.

    Raises:
      ConfigError: a wrong flag, file, key or value.
    """
    name, rest = take_config(arguments)
    own = flags.FlagValues()
    flags.DEFINE_string("topology", "", "devices to compile for", flag_values=own)
    flags.DEFINE_string("optimization", "", "level", flag_values=own)
    flags.DEFINE_bool("cache", True, "keep results", flag_values=own)
    flags.DEFINE_bool("json", False, "one line of JSON", flag_values=own)
    config = load_config(name, rest, own)
    if not own.topology:
        raise ConfigError("--topology= is missing; such as v5p:4x4x4, v5e:2x2 or h100:2x8")
    if own.optimization and own.optimization not in LEVELS:
        raise ConfigError(f"--optimization={own.optimization}: one of {', '.join(LEVELS)}")
    cache = cache_directory() if own.cache else None
    return Command(name, config, own.topology, own.optimization, cache, own.json)


def cache_directory() -> Path:
    """Where results of compilations are kept."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return root / "hjax" / "compile"


def _run(command: Command) -> int:
    console = wide_console()
    description = compile_step(command, console)
    show(description, console)
    if command.json:
        sys.stdout.flush()
        print(json_line(description))
    if description["fits"]:
        return 0
    raise ConfigError(
        f"{command.name} does not fit on {command.topology}: {description['step']['verdict']}; "
        "take more devices, split more (layout.*), or lower rollout.prompts or micro_batch"
    )


def compile_step(command: Command, console: Any) -> dict[str, Any]:
    """Compile every program of a step, a line of progress each; returns what ``--json`` prints."""
    import jax

    from hjax.algorithms import get_algorithm
    from hjax.launch.compilation import compile_program
    from hjax.launch.memory_table import verdict
    from hjax.launch.programs import (
        add_held,
        any_offloaded,
        largest,
        offload_savings,
        resident_bytes,
        step_programs,
    )
    from hjax.launch.roles import build_roles
    from hjax.launch.shapes import read_shape, shape_inputs

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_enable_compilation_cache", False)  # see hjax/launch/compilation.py
    if command.level:
        jax.config.update("jax_optimization_level", command.level)
    config = command.config
    algorithm = get_algorithm(config.algorithm.name)
    inputs = shape_inputs(config, supervised=not algorithm.generates)
    topology = find_topology(command.topology)
    roles = build_roles(config, algorithm, inputs, topology.devices, read_shape)
    records = []
    try:
        programs = step_programs(config, algorithm, roles, inputs.prompt_length)
        for number, program in enumerate(programs, 1):
            name = f"{program.role}.{program.name}"
            with console.status(f"compiling {name} ({number} of {len(programs)})"):
                devices = len(roles.pools[program.role].devices)
                record = compile_program(program, topology, devices, command.level, command.cache)
            records.append(add_held(record, program, roles))
            console.print(f"{number:>3}/{len(programs)} {name:<28} {_how(record)}")
        resident = resident_bytes(roles)
        moved = _transition(records, roles)
    finally:
        roles.close()
    most, memory = largest(records), topology.memory_bytes
    return {
        "config": command.name,
        "topology": {
            "name": topology.name,
            "platform": topology.platform,
            "device_kind": topology.device_kind,
            "devices": len(topology.devices),
            "memory_bytes": memory,
        },
        "versions": topology.versions,
        "optimization": command.level or "default",
        "placement": [list(members) for members in roles.plan.placement],
        "resident_bytes": resident,
        "programs": records,
        **moved,
        **({"offload": offload_savings(records)} if any_offloaded(records) else {}),
        "step": {
            "flops": sum(record["flops"] * record["runs"] for record in records),
            "received_bytes": sum(r.get("received_bytes", 0) * r["runs"] for r in records),
            "largest": f"{most['role']}.{most['program']}",
            "sum_bytes": most["sum_bytes"],
            "missing_bytes": max(0, most["sum_bytes"] - memory),
            "verdict": verdict(records, memory),
        },
        "fits": most["sum_bytes"] <= memory,
    }


def _transition(records: list[dict[str, Any]], roles: Any) -> dict[str, Any]:
    """What the actor's parameters receive on their way to the generate layout, and the formula."""
    from hjax.launch.programs import transition_formula

    ways = [r for r in records if r["role"] == "actor" and r["program"].startswith("transition")]
    if not ways or any("refused_bytes" in record for record in ways):
        return {}
    received = sum(record["received_bytes"] for record in ways)
    formula = transition_formula(roles.groups["actor"].worker)
    return {"transition": {"received_bytes": received, "formula_bytes": formula}}


def _how(record: dict[str, Any]) -> str:
    taken = seconds(record["seconds"])
    done = f"kept from before ({taken} then)" if record["kept"] else taken
    if "refused_bytes" in record:
        return f"{done}, refused: it needs {size(record['refused_bytes'])} per device"
    return done


def show(description: dict[str, Any], console: Any) -> None:
    """Print the tables."""
    from hjax.launch.memory_table import flops, memory_table, work_table

    topology, step = description["topology"], description["step"]
    versions = ", ".join(f"{name} {version}" for name, version in description["versions"].items())
    console.print(
        f"\n[bold]{description['config']} on {topology['name']}[/bold]: {topology['devices']} "
        f"{topology['device_kind']} of {size(topology['memory_bytes'])} ({versions}; "
        f"optimisation {description['optimization']})"
    )
    console.print(memory_table(description["programs"], topology["memory_bytes"]))
    console.print(work_table(description["programs"]))
    if moved := description.get("transition"):
        console.print(
            f"the transition receives {size(moved['received_bytes'])} per device; HybridFlow's "
            f"formula says {size(moved['formula_bytes'])} "
            f"(ratio {moved['received_bytes'] / moved['formula_bytes']:.4f})"
        )
    console.print(
        f"a step: {flops(step['flops'])} and {size(step['received_bytes'])} received per device; "
        f"{step['verdict']}"
    )


if __name__ == "__main__":
    sys.exit(main())
