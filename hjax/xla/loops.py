"""What a compiled program's loop copies of the arrays that it carries: weights and caches.

A decode loop carries them all, and should read what it needs of them and write what is new. Where
the compiler cuts a layer out, or lays it out anew, it does so for every token.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from hjax.xla.collectives import KINDS
from hjax.xla.hlo import Computation, Instruction, Module, arrays_of

LARGE = 2**20  # bytes from which on an array counts
# They hand on, or what they hand out is new.
_PASSING = frozenset(
    """parameter constant tuple get-tuple-element bitcast after-all opt-barrier add-dependency while
    conditional call custom-call async-start async-update dot convolution iota broadcast""".split()
)


@dataclasses.dataclass(frozen=True)
class Copy:
    """An array made in a loop, of the size of one that it carries or of an entry of that.

    Attributes:
      name: of the instruction.
      source: ``FILE:LINE`` that it comes from.
      bytes: of the array.
    """

    name: str
    source: str
    bytes: int


def copies(module: Module, loop: Instruction, at_least: int = LARGE) -> list[Copy]:
    """Arrays of ``at_least`` bytes that a turn of a ``while`` makes in main memory and that have as
    many elements as one that it carries, or as an entry of its first dimension (a layer), without
    multiplying.

    Arrays that are written over in place are no copies, nor is what goes to memory on the chip.
    """
    carried = set()
    for array in arrays_of(loop.shape):
        if array.bytes >= at_least and array.sizes:
            carried |= {array.elements, array.elements // array.sizes[0]}
    found = []
    for computation, instruction in _inside(module, loop):
        if _makes_new(module, computation, instruction):
            continue
        written = arrays_of(instruction.shape)
        if instruction.opcode.endswith("-start"):
            written = written[:1]  # the rest is what it is copied from
        for number, array in enumerate(written):
            large = not array.space and array.bytes >= at_least and array.elements in carried
            if large and not _in_place(module, computation, instruction, number):
                source = module.source(instruction)
                found.append(Copy(instruction.name, source, array.bytes))
    return found


def written_over(module: Module, inner: Computation, result: Instruction) -> str | None:
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


def _inside(module: Module, loop: Instruction) -> Iterator[tuple[Computation, Instruction]]:
    """Every instruction that a turn runs, those of loops and branches in it too."""
    waiting = loop.called("body")
    while waiting:
        computation = module.computations[waiting.pop()]
        for instruction in computation.instructions.values():
            yield computation, instruction
            if instruction.opcode in ("while", "conditional", "call"):
                for attribute in (
                    "body",
                    "to_apply",
                    "branch_computations",
                    "true_computation",
                    "false_computation",
                ):
                    waiting += instruction.called(attribute)


def _makes_new(module: Module, computation: Computation, instruction: Instruction) -> bool:
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


def _multiplies(module: Module, instruction: Instruction) -> bool:
    if instruction.opcode in ("dot", "convolution"):
        return True
    return instruction.opcode == "fusion" and any(
        _multiplies(module, inside)
        for name in instruction.called("calls")
        for inside in module.computations[name].instructions.values()
    )


def _in_place(
    module: Module, computation: Computation, instruction: Instruction, number: int
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
