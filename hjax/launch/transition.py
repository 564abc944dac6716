"""usage: python -m hjax.launch.transition --train=P,T,D --generate=PG,TG [--method=METHOD]
                                        [--model=NAME|DIR] [--dtype=DTYPE]
                                        [--topology=KIND:SIZES] [--json]

Move a model from its training to its generation layout and back, and say what that costs each
device, beside the formulas of HybridFlow's Table 2: bytes received, read off the compiled programs;
the most parameters held at a time; training weights held beside generation's. Devices are
simulated where the machine has too few.

  --train=P,T,D         pipeline, tensor and data parallel sizes of training
  --generate=PG,TG      pipeline and tensor parallel sizes of generation; they divide training's
  --method=METHOD       hybridflow (the default), vanilla or gather_all
  --model=NAME|DIR      a published shape such as llama-7b, or a Hugging Face directory (its
                        config.json alone is read); without it a small model that divides
  --dtype=float32       of the generation copy: float32, bfloat16 or float16; cast before it moves
  --topology=KIND:SIZES say as well how far apart the devices of each group stand there: v5e:8x8
                        (chips), h100:2x8 (hosts x GPUs); no compiler is needed for it
  --json                print one line of JSON as the last line of the output
  --help                print this

A model too large for the machine is compiled and not run. Above {compiled} devices nothing is
compiled: bytes are counted on the planned moves. More than {most} are refused.

exit status: 0 done; 1 failed; 2 wrong input
"""

import dataclasses
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

from hjax.errors import ConfigError
from hjax.launch.command import (
    check_listed,
    define_flags,
    parse_flags,
    print_json,
    run_or_help,
)
from hjax.launch.process_exit import run_and_exit
from hjax.machine import simulated_devices
from hjax.rules import whole_number
from hjax.show.format import size
from hjax.show.tables import rows_table, wide_console

METHOD_NAMES = {
    "hybridflow": "HybridFlow: zero-redundancy grouping",
    "vanilla": "HybridFlow-V: consecutive ranks, gathered in the training group",
    "gather_all": "DeepSpeed-Chat: ZeRO-3 over all devices, gathered over all",
}
# Limits on devices: for simulation and compilation, and for counting the planned moves.
MAX_COMPILED_DEVICES, MAX_DEVICES = 128, 1 << 18
DTYPES = ("float32", "bfloat16", "float16")


@dataclasses.dataclass
class TransitionCommand:
    """The parsed command line."""

    train: tuple[int, ...]
    generate: tuple[int, ...]
    method: str
    model: str
    json: bool
    dtype: str
    topology: str


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    text = str(__doc__).format(compiled=MAX_COMPILED_DEVICES, most=MAX_DEVICES)
    return run_or_help(arguments, lambda: text, lambda given: _run(parse(given)))


def parse(arguments: Sequence[str]) -> TransitionCommand:
    """Read the command line.

    Raises:
      ConfigError: a wrong flag or value.
    """
    args = define_flags(train="", generate="", method="hybridflow", model="", json=False)
    define_flags(args, dtype="float32", topology="")
    parse_flags(args, arguments)
    check_listed(args, "dtype", DTYPES)
    if args.dtype != "float32" and args.method != "hybridflow":
        raise ConfigError(
            f"--dtype={args.dtype} is of --method=hybridflow, the others keep float32"
        )
    check_listed(args, "method", METHOD_NAMES)
    train = _sizes("train", args.train, "P,T,D", "1,4,2")
    generate = _sizes("generate", args.generate, "PG,TG", "1,2")
    if math.prod(train) > MAX_DEVICES:
        raise ConfigError(
            f"--train={args.train}: {math.prod(train)} devices; at most {MAX_DEVICES}, more than "
            "any cluster has"
        )
    return TransitionCommand(
        train,
        generate,
        method=args.method,
        model=args.model,
        json=args.json,
        dtype=args.dtype,
        topology=args.topology,
    )


def _sizes(flag: str, text: str, form: str, example: str) -> tuple[int, ...]:
    parts = text.split(",")
    if len(parts) != len(form.split(",")) or None in map(whole_number, parts):
        problem = f"--{flag}={text}" if text else f"--{flag} is missing"
        raise ConfigError(f"{problem}: give --{flag}={form}, such as {example}")
    return tuple(map(int, parts))


def _run(command: TransitionCommand) -> int:
    # Silences the compiler's warnings about inefficient resharding; the table has its bytes.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    from hjax.dryrun.shape_inputs import read_shape
    from hjax.dryrun.transition_cost import built_in, describe, describe_counted
    from hjax.dryrun.transition_groups import Table2Case

    pipe, tensor, data = command.train
    generate_pipe, generate_tensor = command.generate
    case = Table2Case(
        pipe=pipe,
        tensor=tensor,
        data=data,
        generate_pipe=generate_pipe,
        generate_tensor=generate_tensor,
    )
    rings = _rings(case, command.topology) if command.topology else {}
    model = read_shape(command.model)[0] if command.model else built_in(case)
    name = command.model or "built-in"
    console = wide_console()
    if case.devices > MAX_COMPILED_DEVICES:
        found = describe_counted(case, command.method, model, name, command.dtype)
        show_counted(found, str(case), console)
    else:
        devices = simulated_devices(case.devices)
        with console.status(f"compiling for {case.devices} devices"):
            found = describe(case, command.method, devices, model, name, command.dtype)
        show(found, str(case), devices[0].platform, console)
    if rings:
        from hjax.show.memory_table import ring_table

        found["rings"] = rings
        console.print(ring_table({command.topology: rings}))
    print_json(command.json, {key: value for key, value in found.items() if key != "holdings"})
    return 0


def _rings(case: Any, topology: str) -> dict[str, dict[str, float]]:
    """Distances between the devices of each mesh axis in a topology, without the hardware."""
    from hjax.dryrun.topologies import list_devices
    from hjax.sharding.device_mesh import place_devices, ring_table

    devices = list_devices(topology)
    if len(devices) != case.devices:
        raise ConfigError(
            f"--topology={topology} has {len(devices)} devices, --train needs {case.devices}"
        )
    shape = dict(case.layouts(case.devices).train.mesh.shape)
    table = ring_table(shape, place_devices(devices, shape))
    return {axis: dataclasses.asdict(found) for axis, found in table.items()}


def show_counted(found: Mapping[str, Any], case: str, console: Any) -> None:
    """Print the counted bytes, for more devices than can be simulated."""
    from rich.text import Text

    console.print(Text(f"{case}   {METHOD_NAMES[found['method']]}", style="bold"))
    console.print(
        f"{found['devices']} devices, model {found['model']}: {size(found['model_bytes'])} float32 "
        "split over all training shards; all figures per device. Above "
        f"{MAX_COMPILED_DEVICES} devices nothing is compiled: "
        "bytes are counted on the planned moves"
    )
    if found["measured"] is None:
        console.print(f"--method={found['method']}: the paper's formulas alone")
    for key, formula in found["analytic"].items():
        counted = "" if found["measured"] is None else f"  counted {found['measured'][key]:.6f}"
        console.print(f"{key:<14} formula {formula:.6f}{counted}")


def show(found: Mapping[str, Any], case: str, platform: str, console: Any) -> None:
    """Print the description as tables and a picture."""
    from rich.text import Text

    from hjax.dryrun.transition_groups import describe_groups, picture

    total = found["model_bytes"]
    console.print(Text(f"{case}   {METHOD_NAMES[found['method']]}", style="bold"))
    console.print(
        f"{found['devices']} devices ({platform}), model {found['model']}: {size(total)} float32 "
        f"split over all training shards; all figures per device"
    )
    rows = []
    notes = {
        "communication": "received, read off the compiled programs",
        "peak": f"parameters; the largest bucket has {size(found['bucket_bytes'])}, and programs "
        f"need up to {size(found['temporary_bytes'])} of temporaries",
        "redundancy": "training weights beside generation's",
    }
    for key, note in notes.items():
        formula, measured = found["analytic"][key], found["measured"][key]
        rows.append((key, f"{formula:.4f}", f"{measured:.4f}", size(measured * total), note))
    if found["masters_bytes"]:
        note = f"float32 masters beside the {found['dtype']} copy: optimizer state, never moved"
        share = found["masters_bytes"] / total
        rows.append(("masters", "", f"{share:.4f}", size(found["masters_bytes"]), note))
    for key, value in found.get("resharded", {}).items():
        note = "by a plain program: the compiler's own way between the same shards"
        rows.append((f"  {key}", "", f"{value:.4f}", size(value * total), note))
    rows.append(("way back", "0.0000", f"{found['back_bytes'] / total:.4f}", "", "received"))
    figures = ("formula", "measured", "bytes")
    console.print(rows_table(("share of the model", *figures, ""), rows, right=figures))
    if not found["executed"]:
        console.print("compiled, not run: too large for this machine; peak follows from shapes")
    if found["unsharded"]:
        others = ", ".join(f"{name} {size(n)}" for name, n in found["unsharded"].items())
        received = size(found["unsharded_received_bytes"])
        console.print(f"not split over all training shards: {others}; {received} received")
    console.print()
    for stage, key in (("train", "train_groups"), ("generate", "groups")):
        for kind, text in describe_groups(found[key]).items():
            console.print(Text(f"{stage:>8} {kind.replace('_', ' '):<10} {_short(text)}"))
    console.print()
    console.print(Text(picture(found)))


def _short(text: str, limit: int = 120) -> str:
    return text if len(text) <= limit else text[: text.rindex("[", 0, limit)] + "…"


if __name__ == "__main__":
    run_and_exit(main)
