"""Which line of source an instruction of a compiled program comes from."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping

from hjax.xla.hlo import HloModule, Instruction


def source_of(module: HloModule, instruction: Instruction) -> str:
    """``FILE:LINE`` that an instruction comes from: the innermost that is no library's.

    Empty where the program says none.
    """
    here = re.search(r'source_file="([^"]*)" source_line=(\d+)', instruction.attributes)
    if here:
        return f"{here[1]}:{here[2]}"
    frame = instruction.number("stack_frame_id")
    places = _frames(module.head).get(frame or 0, ())
    own = [place for place in places if "site-packages" not in place]
    return (own or list(places) or [""])[0]


_TABLES = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")


@functools.lru_cache(maxsize=8)
def _frames(text: str) -> Mapping[int, tuple[str, ...]]:
    """Where each stack frame that a module's head lists stands, and what called it."""
    tables: dict[str, dict[int, str]] = {name: {} for name in _TABLES}
    table = None
    for line in text.splitlines()[1:]:
        if line in tables:
            table = tables[line]
        elif table is not None and (entry := re.match(r"(\d+) (.*)", line)):
            table[int(entry[1])] = entry[2]
        elif line and not line.isspace():
            break
    files = {number: name.strip('"') for number, name in tables["FileNames"].items()}
    places = {}
    for number, value in tables["FileLocations"].items():
        fields = {key: int(n) for key, n in re.findall(r"(\w+)=(\d+)", value)}
        places[number] = f"{files.get(fields.get('file_name_id', 0), '')}:{fields.get('line', 0)}"
    frames = {}
    for number, value in tables["StackFrames"].items():
        fields = {key: int(n) for key, n in re.findall(r"(\w+)=(\d+)", value)}
        frames[number] = fields.get("file_location_id", 0), fields.get("parent_frame_id", 0)
    # Some printers count parents from 1, where 1 is none.
    shift = int(any(parent == number for number, (_, parent) in frames.items()))
    found: dict[int, tuple[str, ...]] = {}
    for number in frames:
        chain: list[str] = []
        at = number
        while at in frames and len(chain) <= len(frames):
            place, parent = frames[at]
            chain.append(places.get(place, ""))
            at = parent - shift
        found[number] = tuple(chain)
    return found
