"""`python -m hjax.launch.transition`: a layout transition, counted and measured."""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from absl import flags

from hjax.errors import ConfigError, exit_status
from hjax.files import json_line
from hjax.launch.command import parse_flags
from hjax.machine import simulated_devices
from hjax.show.format import size
from hjax.show.tables import wide_console

METHOD_NAMES = {
    "hybridflow": "HybridFlow: zero-redundancy grouping",
    "vanilla": "HybridFlow-V: consecutive ranks, gathered in the training group",
    "gather_all": "DeepSpeed-Chat: ZeRO-3 over all devices, gathered over all",
}
HELP = """\
usage: python -m hjax.launch.transition --train=P,T,D --generate=PG,TG [--method=METHOD]
                                        [--model=NAME|DIR] [--json]

Move a model from its training to its generation layout and back, and say what that costs each
device, beside the formulas of HybridFlow's Table 2: bytes received, read off the compiled programs;
the most parameters held at a time; training weights held beside generation's. Devices are
simulated where the machine has too few.

  --train=P,T,D         pipeline, tensor and data parallel sizes of training
  --generate=PG,TG      pipeline and tensor parallel sizes of generation; they divide training's
  --method=METHOD       hybridflow (the default), vanilla or gather_all
  --model=NAME|DIR      a published shape such as llama-7b, or a Hugging Face directory (its
                        config.json alone is read); without it a small model that always divides
  --json                print one line of JSON as the last line of the output
  --help                print this

A model too large for the machine is compiled and not run. Exit status: 0 done; 1 failed; 2 wrong
input.
"""


@dataclasses.dataclass
class TransitionCommand:
    """The parsed command line."""

    train: tuple[int, ...]
    generate: tuple[int, ...]
    method: str
    model: str
    json: bool


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if any(a in ("--help", "-help", "-h") for a in arguments):
        print(HELP, end="")
        return 0
    return exit_status(lambda: _run(parse(arguments)))


def parse(arguments: Sequence[str]) -> TransitionCommand:
    """Read the command line.

    Raises:
      ConfigError: a wrong flag or value.
    """
    own = flags.FlagValues()
    flags.DEFINE_string("train", "", "sizes", flag_values=own)
    flags.DEFINE_string("generate", "", "sizes", flag_values=own)
    flags.DEFINE_string("method", "hybridflow", "how", flag_values=own)
    flags.DEFINE_string("model", "", "what", flag_values=own)
    flags.DEFINE_bool("json", False, "one line of JSON", flag_values=own)
    parse_flags(own, arguments)
    if own.method not in METHOD_NAMES:
        raise ConfigError(f"--method={own.method}: one of {', '.join(METHOD_NAMES)}")
    train = _sizes("train", own.train, "P,T,D", "1,4,2")
    generate = _sizes("generate", own.generate, "PG,TG", "1,2")
    return TransitionCommand(train, generate, own.method, own.model, own.json)


def _sizes(flag: str, text: str, form: str, example: str) -> tuple[int, ...]:
    parts = text.split(",")
    if len(parts) != len(form.split(",")) or not all(re.fullmatch(r"\d+", p) for p in parts):
        given = f"--{flag}={text}" if text else f"--{flag} is missing"
        raise ConfigError(f"{given}: give --{flag}={form}, such as {example}")
    return tuple(map(int, parts))


def _run(command: TransitionCommand) -> int:
    from hjax.dryrun.shape_inputs import read_shape
    from hjax.studies.transition_cost import BUILT_IN, describe
    from hjax.studies.transition_groups import Table2Case

    case = Table2Case(*command.train, *command.generate)
    model = read_shape(command.model)[0] if command.model else BUILT_IN
    devices = simulated_devices(case.devices)
    name = command.model or "built-in"
    console = wide_console()
    with console.status(f"compiling for {case.devices} devices"):
        found = describe(case, command.method, devices, model, name)
    show(found, str(case), devices[0].platform, console)
    if command.json:
        sys.stdout.flush()
        print(json_line({key: value for key, value in found.items() if key != "holdings"}))
    return 0


def show(found: Mapping[str, Any], case: str, platform: str, console: Any) -> None:
    """Print the description as tables and a picture."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    from hjax.show.transition_table import picture
    from hjax.studies.transition_groups import describe_groups

    total = found["model_bytes"]
    console.print(Text(f"{case}   {METHOD_NAMES[found['method']]}", style="bold"))
    console.print(
        f"{found['devices']} devices ({platform}), model {found['model']}: {size(total)} float32 "
        f"split over all training shards; all figures per device"
    )
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1))
    table.add_column("share of the model")
    for column in ("formula", "measured", "bytes"):
        table.add_column(column, justify="right")
    table.add_column("")
    notes = {
        "communication": "received, read off the compiled programs",
        "peak": f"parameters; the largest bucket has {size(found['bucket_bytes'])}, and programs "
        f"need up to {size(found['temporary_bytes'])} of temporaries",
        "redundancy": "training weights beside generation's",
    }
    for key, note in notes.items():
        formula, measured = found["analytic"][key], found["measured"][key]
        table.add_row(key, f"{formula:.4f}", f"{measured:.4f}", size(measured * total), note)
    table.add_row("way back", "0.0000", f"{found['back_bytes'] / total:.4f}", "", "received")
    console.print(table)
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
    if len(text) <= limit:
        return text
    return text[: text.rindex("[", 0, limit)] + "…"


if __name__ == "__main__":
    sys.exit(main())
