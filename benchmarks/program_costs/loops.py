"""What a compiled program's loop copies of the arrays that it carries: weights and caches.

A decode loop carries them all, and should read what it needs of them and write what is new. Where
the compiler cuts a layer out, or lays it out anew, it does so for every token.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from hjax.xla.collectives import KINDS
from hjax.xla.hlo import ArrayShape, Computation, HloModule, Instruction, array_shapes, entry_shape
from program_costs.sources import source_of

LARGE = 2**20  # bytes from which on an array counts
# They hand on, or what they hand out is new.
_PASSING = frozenset(
    """parameter constant tuple get-tuple-element bitcast after-all opt-barrier add-dependency while
    conditional call custom-call async-start async-update dot convolution iota broadcast""".split()
)


@dataclasses.dataclass(frozen=True)
class Copy:
    """An array made in a loop of one that it carries, or of an entry of that.

    Attributes:
      name: of the instruction.
      source: ``FILE:LINE`` that it comes from.
      bytes: of the array.
    """

    name: str
    source: str
    bytes: int


def copies(module: HloModule, loop: Instruction, at_least: int = LARGE) -> list[Copy]:
    """Arrays of ``at_least`` bytes that a turn of a ``while`` makes in main memory of one that it
    carries, with as many elements as that, or as an entry of its first dimension (a layer), without
    multiplying.

    Arrays that are written over in place are no copies, nor is what goes to memory on the chip.
    """
    carried = {
        number: array
        for number, shape in enumerate(_entries(loop.shape))
        for array in array_shapes(shape)[:1]
        if array.bytes >= at_least and array.sizes
    }
    found: list[Copy] = []
    for name in loop.called("body"):
        _follow(module, module.computations[name], {0: carried}, at_least, found)
    return found


# What the arguments of a computation are of the carried arrays: by number one, or those of a tuple.
_Given = Mapping[int, "ArrayShape | Mapping[int, ArrayShape] | None"]


def _follow(
    module: HloModule,
    computation: Computation,
    given: _Given,
    at_least: int,
    found: list[Copy],
) -> None:
    """Add a computation's copies, and those of the loops, branches and calls in it."""
    known: dict[str, Any] = {}
    for instruction in computation.instructions.values():
        origins = [known.get(name) for name in instruction.operands]
        known[instruction.name] = _origin(computation, instruction, origins, known, given)
        for name in _inner(instruction):
            # A branch's argument follows the number that chooses it.
            handed = origins[1:] if instruction.opcode == "conditional" else origins
            below = dict(enumerate(handed))
            _follow(module, module.computations[name], below, at_least, found)
        if _makes_new(module, computation, instruction):
            continue
        written = array_shapes(instruction.shape)
        if instruction.opcode.endswith("-start"):
            written = written[:1]  # the rest is what it is copied from
        for number, array in enumerate(written):
            large = not array.space and array.bytes >= at_least
            if large and any(_part(array, origin) for origin in origins):
                if not _in_place(module, computation, instruction, number):
                    source = source_of(module, instruction)
                    found.append(Copy(instruction.name, source, array.bytes))


def _origin(
    computation: Computation,
    instruction: Instruction,
    origins: list[Any],
    known: Mapping[str, Any],
    given: _Given,
) -> Any:
    """Which carried array an instruction hands on, whole or a layer of it; of a tuple, by entry."""
    opcode = instruction.opcode
    if opcode == "parameter":
        return given.get(int(instruction.literal))
    if opcode == "tuple":
        return {i: o for i, o in enumerate(origins) if isinstance(o, ArrayShape)}
    if opcode == "while":
        return origins[0]
    if opcode == "get-tuple-element":
        if isinstance(origins[0], Mapping):
            return origins[0].get(instruction.number("index"))
        # Of a fusion or a kernel with several results.
        source = computation.instructions[instruction.operands[0]]
        origins = [known.get(name) for name in source.operands]
    for array in array_shapes(instruction.shape)[:1]:
        for origin in origins:
            if _part(array, origin):
                return origin
    return None


def _part(array: ArrayShape, origin: Any) -> bool:
    """Whether an array has as many elements as a carried one or an entry of it."""
    if not isinstance(origin, ArrayShape):
        return False
    return array.elements in (origin.elements, origin.elements // origin.sizes[0])


def _entries(shape: str) -> list[str]:
    """The shapes of a tuple's entries, or the one shape."""
    if not shape.startswith("("):
        return [shape]
    entries: list[str] = []
    while True:
        try:
            entries.append(entry_shape(shape, len(entries)))
        except ValueError:
            return entries


def _inner(instruction: Instruction) -> list[str]:
    """The computations that an instruction runs, fusions' apart."""
    if instruction.opcode not in ("while", "conditional", "call"):
        return []
    attributes = (
        "body",
        "to_apply",
        "branch_computations",
        "true_computation",
        "false_computation",
    )
    return [name for attribute in attributes for name in instruction.called(attribute)]


def written_over(module: HloModule, inner: Computation, result: Instruction) -> str | None:
    """Of a result that is an array with a part written over, that part."""
    while result.opcode in ("bitcast", "reshape") and result.operands:
        result = inner.instructions[result.operands[0]]
    if result.opcode == "dynamic-update-slice":
        return result.operands[1]
    if result.opcode == "scatter":
        return result.operands[-1]
    if result.opcode == "fusion":
        [name] = result.called("calls")
        below = module.computations[name]
        update = written_over(module, below, below.root)
        if update is not None and below.instructions[update].opcode == "parameter":
            return result.operands[int(below.instructions[update].literal)]
    return None


def _makes_new(module: HloModule, computation: Computation, instruction: Instruction) -> bool:
    """Whether an instruction copies nothing, whatever it has written."""
    opcode = instruction.opcode
    if opcode in _PASSING or opcode.endswith("-done"):
        return True
    if opcode.removesuffix("-start") in KINDS:
        return True
    if opcode != "fusion":
        return False
    inner = [module.computations[name] for name in instruction.called("calls")]
    return any(
        _multiplies(module, inside) for body in inner for inside in body.instructions.values()
    )


def _multiplies(module: HloModule, instruction: Instruction) -> bool:
    if instruction.opcode in ("dot", "convolution"):
        return True
    return instruction.opcode == "fusion" and any(
        _multiplies(module, inside)
        for name in instruction.called("calls")
        for inside in module.computations[name].instructions.values()
    )


def _in_place(
    module: HloModule, computation: Computation, instruction: Instruction, number: int
) -> bool:
    """Whether result ``number`` is an array of which only a part is written."""
    if instruction.opcode in ("dynamic-update-slice", "scatter"):
        return True
    if instruction.opcode != "fusion":
        return False
    [name] = instruction.called("calls")
    inner = module.computations[name]
    root = inner.root
    result = inner.instructions[root.operands[number]] if root.opcode == "tuple" else root
    return written_over(module, inner, result) is not None
