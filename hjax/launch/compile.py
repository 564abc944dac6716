"""usage: python -m hjax.launch.compile --config=NAME.py --topology=KIND:SIZES [--json]
                                     [--optimization=O0] [--nocache] [--config.a.b=VALUE ...]

Compile every program of a training step with the compiler of hardware that this machine does not
have, and say what each needs: memory, collectives, FLOPs. Nothing is run. A step that does not fit
into the devices' memory is refused with the bytes missing.

  --config=NAME.py      a Python file with get_config(), or one of the shipped ones:
                        {configs}
  --topology=KIND:SIZES chips of a TPU torus: v5p:4x4x4, v5e:2x2, of two such slices 2xv5e:2x2
                        ({tpus}; pip install 'jax[tpu]'), or hosts x GPUs: h100:2x8 ({gpus};
                        pip install 'jax[cuda13-local]'); or a usual name: v5e-8, v5p-16, 8xh100
  --config.a.b=VALUE    set a key of the config (docs/config.md lists all). A role's path may name
                        a published shape, such as llama-7b: no weights and no data are needed
  --optimization=O0     compile quickly to see whether it compiles (O0 to O3); memory is
                        overstated. Without it: as in a run
  --nocache             compile what was compiled before too
  --json                print one line of JSON as the last line of the output
  --help                print this

exit status: 0 it compiles and fits; 1 failed while compiling; 2 wrong input, or it does not fit
"""

from collections.abc import Sequence
from typing import Any

from hjax.dryrun.topologies import GPU_MEMORY, TPU_KINDS, prepare_environment
from hjax.errors import ConfigError
from hjax.files import cache_folder
from hjax.launch.command import (
    ROOFLINE_MESSAGE,
    check_listed,
    define_flags,
    print_json,
    run_or_help,
    split_config_flag,
)
from hjax.launch.process_exit import run_and_exit
from hjax.settings.config_loading import check_config, config_names, load_config
from hjax.show.format import flop_count, size
from hjax.show.tables import wide_console

LEVELS = ("O0", "O1", "O2", "O3")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""

    def run(flags: list[str]) -> int:
        prepare_environment()  # before JAX is imported
        request, as_json = parse(flags)
        from hjax.dryrun.step import compile_step

        console = wide_console()
        return report(request, compile_step(request, console), as_json, console)

    names = {"configs": config_names(), "tpus": TPU_KINDS, "gpus": GPU_MEMORY}
    listed = {name: ", ".join(each) for name, each in names.items()}
    return run_or_help(arguments, lambda: str(__doc__).format(**listed), run)


def parse(arguments: Sequence[str]) -> tuple[Any, bool]:
    """Read the command line and its config; returns the request, and whether to print JSON.

    Raises:
      ConfigError: a wrong flag, file, key or value.
    """
    name, rest = split_config_flag(arguments)
    args = define_flags(topology="", optimization="", cache=True, roofline=False, json=False)
    config = check_config(load_config(name, rest, args))
    if args.roofline:
        raise ConfigError(ROOFLINE_MESSAGE)
    if not args.topology:
        raise ConfigError("--topology= is missing; such as v5e-8, v5p:4x4x4, 8xh100 or h100:2x8")
    if args.optimization:
        check_listed(args, "optimization", LEVELS)
    cache = cache_folder("compile") if args.cache else None
    from hjax.dryrun.step import CompileRequest

    return CompileRequest(name, config, args.topology, args.optimization, cache), args.json


def report(request: Any, description: dict[str, Any], as_json: bool, console: Any) -> int:
    """Show a compiled step; returns 0.

    Raises:
      ConfigError: it does not fit, with the bytes missing.
    """
    show(description, console)
    print_json(as_json, description)
    if description["fits"]:
        return 0
    raise ConfigError(
        f"{request.name} does not fit on {request.topology}: {description['step']['verdict']}; "
        "take more devices, split more (layout.*), or lower rollout.prompts or micro_batch"
    )


def show(description: dict[str, Any], console: Any) -> None:
    """Print the tables."""
    from hjax.show.memory_table import memory_table, work_table

    topology, step = description["topology"], description["step"]
    versions = ", ".join(f"{name} {version}" for name, version in description["versions"].items())
    fits = "fits" if description["fits"] else "does not fit"
    console.print(f"\n[bold]{fits}[/bold]: {step['verdict']}")
    console.print(
        f"\n[bold]{description['config']} on {topology['name']}[/bold]: {topology['devices']} "
        f"{topology['device_kind']} of {size(topology['memory_bytes'])} ({versions}; "
        f"optimisation {description['optimization']})"
    )
    console.print(memory_table(description["programs"], topology["memory_bytes"], console.width))
    console.print(work_table(description["programs"]))
    if rings := description.get("rings"):
        from hjax.show.memory_table import ring_table

        console.print(ring_table(rings))
    if moved := description.get("transition"):
        received, formula = moved["received_bytes"], moved["formula_bytes"]
        # Both are 0 where the two layouts shard the weights alike.
        ratio = f" (ratio {received / formula:.4f})" if formula else ""
        console.print(
            f"the transition receives {size(received)} per device; HybridFlow's formula says "
            f"{size(formula)}{ratio}"
        )
    if step.get("hop_bytes"):
        console.print(
            f"a step's received bytes times the links they come over: {size(step['hop_bytes'])} "
            f"per device ({size(step['listed_hop_bytes'])} if meshes took devices as JAX lists "
            "them)"
        )
    console.print(
        f"a step: {flop_count(step['flops'])} and {size(step['received_bytes'])} received per "
        "device"
    )


if __name__ == "__main__":
    run_and_exit(main)
