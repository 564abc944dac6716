"""Compile a 7B model's PPO step for pods that are not there; write the figures into RESULTS.md.

    python benchmarks/pods.py                   # all of TOPOLOGIES, into RESULTS.md
    python benchmarks/pods.py v5e:2x2 --print   # one, to the terminal

Needs the TPU compiler: pip install 'jax[tpu]'. Nothing is run on a device. What was compiled before
is taken from the cache, with the seconds it took then.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from hjax.dryrun.programs import largest
from hjax.show.format import duration, flop_count, size
from hjax.show.memory_table import grouped, name_of

CONFIG = "ppo_llama_7b.py"
TOPOLOGIES = ("v5p:4x4x4", "v6e:8x8", "v5e:2x2")
PAGE = pathlib.Path(__file__).parent / "RESULTS.md"
BEGIN, END = "<!-- written by benchmarks/pods.py: do not edit -->", "<!-- end -->"
HEAD = (
    "| program, × runs a step | compiled in | arguments | outputs | temporary | beside it | sum "
    "| FLOPs | received |\n|---|---|---|---|---|---|---|---|---|"
)


def compile_for(topology: str) -> dict[str, Any]:
    """What `python -m hjax.launch.compile --json` says, also of a step that does not fit."""
    command = [sys.executable, "-m", "hjax.launch.compile"]
    done = subprocess.run(
        [*command, f"--config={CONFIG}", f"--topology={topology}", "--json"],
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    last = done.stdout.splitlines()[-1:]
    if not last or not last[0].startswith("{"):  # the error is on the terminal already
        raise SystemExit(done.returncode)
    return json.loads(last[0])


def section(found: dict[str, Any]) -> str:
    """Markdown of one topology."""
    topology, step = found["topology"], found["step"]
    verdict = "fits" if found["fits"] else f"is refused, {size(step['missing_bytes'])} missing"
    lines = [
        f"### {topology['name']}: {verdict}",
        "",
        f"{topology['devices']} {topology['device_kind']} of {size(topology['memory_bytes'])}.",
        "",
        HEAD,
        *map(_row, grouped(found["programs"])),
        "",
        f"A step: {flop_count(step['flops'])} and {size(step['received_bytes'])} received per "
        f"device. {step['verdict'][0].upper()}{step['verdict'][1:]}.",
    ]
    if moved := found.get("transition"):
        ratio = moved["received_bytes"] / moved["formula_bytes"]
        lines += [
            "",
            f"The transition receives {moved['received_bytes']:,} bytes per device; the formula "
            f"M (1/(p_g t_g) − 1/(p t f)) says {moved['formula_bytes']:,.0f}: ratio {ratio:.4f}. "
            f"Collectives: {_kinds(found)}.",
        ]
    return "\n".join(lines) + "\n"


def _row(group: list[Mapping[str, Any]]) -> str:
    """A program, or a transition's buckets: memory of the one that leaves least, sums else."""
    program = largest(group)
    received = sum(p.get("received_bytes", 0) for p in group)

    def bytes_of(key: str) -> str:
        return size(program[key]) if key in program else "–"

    cells = [
        name_of(group),
        duration(sum(p["seconds"] for p in group)),
        bytes_of("argument_bytes"),
        bytes_of("output_bytes"),
        bytes_of("temporary_bytes")
        if "refused_bytes" not in program
        else f"refused: needs {size(program['refused_bytes'])}",
        size(sum(program["held_bytes"].values())),
        size(program["sum_bytes"]),
        flop_count(sum(p["flops"] for p in group)),
        size(received) if "received_bytes" in program else "–",
    ]
    return "| " + " | ".join(cells) + " |"


def _kinds(found: dict[str, Any]) -> str:
    kinds: dict[str, int] = {}
    for program in found["programs"]:
        if program["program"].startswith("transition"):
            for kind, figures in program.get("collectives", {}).items():
                kinds[kind] = kinds.get(kind, 0) + figures["count"]
    return ", ".join(f"{count} {kind}" for kind, count in kinds.items()) or "none"


def write(text: str) -> None:
    """Put the text between the markers of the page."""
    page = PAGE.read_text()
    start, end = page.index(BEGIN) + len(BEGIN), page.index(END, page.index(BEGIN))
    PAGE.write_text(f"{page[:start]}\n{text}\n{page[end:]}")


def main() -> None:
    """Compile, then print or write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("topologies", nargs="*", default=TOPOLOGIES)
    parser.add_argument("--print", action="store_true", help="instead of writing RESULTS.md")
    options = parser.parse_args()
    found = [compile_for(topology) for topology in options.topologies]
    versions = ", ".join(f"{name} {version}" for name, version in found[0]["versions"].items())
    text = (
        f"Compiled with {versions} on {os.cpu_count()} cores, which others used too (so the "
        "seconds are an upper bound). Bytes and FLOPs are per device; GiB = 2³⁰ bytes.\n\n"
    ) + "\n".join(map(section, found))
    if options.print:
        print(text)
    else:
        write(text)
    summary = {f["topology"]["name"]: {"fits": f["fits"], **f["step"]} for f in found}
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
