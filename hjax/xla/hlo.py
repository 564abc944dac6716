"""Compiled programs as text: computations, instructions, sizes and trip counts.

Reads what ``compiled.as_text()`` prints on CPU, GPU and TPU (XLA's HLO text), as far as counting
needs it.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Iterator, Mapping

# Bits of the types whose name does not end in their number of bits.
_BITS = {"pred": 8, "token": 0, "opaque": 0, "c64": 64, "c128": 128}
_HEADER = re.compile(r"^(ENTRY )?%?([\w.~-]+) \(.*\) -> .*\{$")
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.~-]+) = ")
_OPCODE = re.compile(r"\s*([\w-]+)\(")
_NAME = re.compile(r"%([\w.~-]+)")
# An operand may be an entry of a tuple, or an entry of that: %name#1, %name#1#0.
_OPERAND = re.compile(r"%([\w.~-]+(?:#\d+)*)")
# Instructions that hand on the number they are given.
_SAME = ("copy", "bitcast", "convert", "reshape")


def closing(text: str, start: int) -> int:
    """Index after the bracket that closes the one at ``start``."""
    depth = 0
    for index in range(start, len(text)):
        if text[index] in "([{":
            depth += 1
        elif text[index] in ")]}":
            depth -= 1
            if not depth:
                return index + 1
    raise ValueError(f"unbalanced brackets in HLO text: {text[start : start + 80]}")


@dataclasses.dataclass(frozen=True)
class ArrayShape:
    """An array as a compiler lays it out.

    Attributes:
      kind: of its elements, e.g. ``bf16``.
      bits: of one.
      sizes: of its dimensions, in the program's order.
      order: its dimensions from minor to major; empty where the text has no layout.
      tile: sizes of the tiles that the most minor dimensions are cut into, major first; empty:
        none.
      space: number of the memory it is in; 0 is the device's main memory, on a TPU 1 the vector
        unit's own, 5 the host's.
    """

    kind: str
    bits: int
    sizes: tuple[int, ...]
    order: tuple[int, ...] = ()
    tile: tuple[int, ...] = ()
    space: int = 0

    @property
    def elements(self) -> int:
        """Their number, without what fills tiles up."""
        return math.prod(self.sizes)

    @property
    def bytes(self) -> int:
        """That it takes in memory, its last tiles filled up."""
        sizes = list(self.sizes)
        for i, side in enumerate(reversed(self.tile)):
            if i < len(self.order):
                at = self.order[i]
                sizes[at] = -(-sizes[at] // side) * side
        return -(-self.bits * math.prod(sizes) // 8)


_LAID_OUT = re.compile(r"\b([a-z]\w*)\[([\d,<= ]*)\](?:\{([^{}]*)\})?")


@functools.lru_cache(maxsize=1 << 14)
def arrays_of(shape: str) -> tuple[ArrayShape, ...]:
    """The arrays of a shape, those of a tuple in its order.

    Raises:
      ValueError: a type that is not known.
    """
    found = []
    for kind, dims, layout in _LAID_OUT.findall(re.sub(r"/\*.*?\*/", "", shape)):
        sizes = tuple(int(n.lstrip("<= ")) for n in dims.split(",") if n.strip())
        order, _, rest = layout.partition(":")
        tile = re.match(r"T\(([\d,]+)\)", rest)
        space = re.search(r"S\((\d+)\)", rest)
        found.append(
            ArrayShape(
                kind,
                _bits(kind, shape),
                sizes,
                tuple(int(n) for n in order.split(",") if n.isdigit()),
                tuple(int(n) for n in tile[1].split(",")) if tile else (),
                int(space[1]) if space else 0,
            )
        )
    return tuple(found)


def shape_bytes(shape: str) -> int:
    """Bytes of a shape, e.g. ``f32[2,3]{1,0}``; of a tuple, the sum over its entries."""
    return sum(-(-array.bits * array.elements // 8) for array in arrays_of(shape))


def _bits(kind: str, shape: str) -> int:
    if kind in _BITS:
        return _BITS[kind]
    digits = re.match(r"[a-z]+(\d+)", kind)
    if digits is None:
        raise ValueError(f"unknown type in HLO text: {shape}")
    return int(digits[1])


def entry_shape(shape: str, index: int) -> str:
    """The shape of a tuple's entry: ``f32[2,3]{1,0}`` of ``(s32[], f32[2,3]{1,0})`` is its 1.

    Raises:
      ValueError: no tuple, or it has no such entry.
    """
    entries, start, depth = [], 1, 0
    text = re.sub(r"/\*.*?\*/", "", shape)
    for position, character in enumerate(text):
        depth += (character in "([{") - (character in ")]}")
        if (character == "," and depth == 1) or (character == ")" and depth == 0):
            entries.append(text[start:position].strip())
            start = position + 1
    if not text.startswith("(") or index >= len(entries):
        raise ValueError(f"no entry {index} in the shape of HLO text: {shape[:80]}")
    return entries[index]


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation.

    Attributes:
      name: without its percent sign.
      shape: as printed, layout included.
      opcode: e.g. ``all-gather-start``.
      operands: names of its arguments, ``name#1`` for entry 1 of the tuple ``name``.
      literal: what stands between the brackets, for constants.
      attributes: the rest of the line.
    """

    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    literal: str
    attributes: str

    def called(self, attribute: str) -> list[str]:
        """Names of the computations that an attribute names."""
        found = re.search(rf"\b{attribute}=(\{{[^}}]*\}}|%[\w.~-]+)", self.attributes)
        return _NAME.findall(found[1]) if found else []

    def number(self, attribute: str) -> int | None:
        """The value of an integer attribute, if there."""
        found = re.search(rf"\b{attribute}=(-?\d+)", self.attributes)
        return int(found[1]) if found else None


@dataclasses.dataclass(frozen=True)
class Computation:
    """Instructions by name; the last one is the result's.

    Newer printers leave out the lines that pick entries of tuples and write ``%name#1`` where an
    entry is used; those lines are put back, under this name.
    """

    name: str
    instructions: Mapping[str, Instruction]

    @functools.cached_property
    def root(self) -> Instruction:
        """The instruction whose value is the computation's."""
        return list(self.instructions.values())[-1]

    @functools.cached_property
    def parameters(self) -> list[Instruction]:
        """Its arguments, by their numbers."""
        found = [i for i in self.instructions.values() if i.opcode == "parameter"]
        return sorted(found, key=lambda i: int(i.literal))

    def operand_bytes(self, instruction: Instruction) -> int:
        """Bytes of an instruction's arguments together."""
        return sum(shape_bytes(self.instructions[name].shape) for name in instruction.operands)

    def constant(self, name: str) -> int | None:
        """The integer that an instruction is, if it is a constant or a copy of one."""
        found = self._origin(name)
        if found.opcode == "constant" and re.fullmatch(r"-?\d+", found.literal):
            return int(found.literal)
        return None

    def element(self, name: str) -> int | None:
        """Which entry of the computation's tuple argument an instruction is, if it is one."""
        found = self._origin(name)
        if found.opcode != "get-tuple-element":
            return None
        source = self.instructions[found.operands[0]]
        return found.number("index") if source.opcode == "parameter" else None

    def _origin(self, name: str) -> Instruction:
        found = self.instructions[name]
        while found.opcode in _SAME:
            found = self.instructions[found.operands[0]]
        return found


@dataclasses.dataclass(frozen=True)
class HloModule:
    """A program.

    Attributes:
      computations: by name.
      entry: that which runs.
      devices: that run it.
      head: its text before the first computation, with the tables of source lines.
    """

    computations: Mapping[str, Computation]
    entry: Computation
    devices: int
    head: str = ""

    def trips(self, computation: Computation, loop: Instruction) -> int | None:
        """How often a ``while`` of ``computation`` runs its body; None if the text doesn't tell.

        XLA's CPU and GPU compilers write it down; the TPU's does not, so it is worked out from a
        counter that starts and steps by constants and is compared with one. Of a loop whose turns
        are a matter of data its scope may tell those to expect (``expected_trips``).
        """
        known = re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.attributes)
        if known:
            return int(known[1])
        path = re.search(r'op_name="([^"]*)"', loop.attributes)
        told = expected_trips(path[1].removesuffix("/while")) if path else None
        if told is not None:
            return told
        (condition,) = (self.computations[name] for name in loop.called("condition"))
        (body,) = (self.computations[name] for name in loop.called("body"))
        test = condition.root
        if test.opcode != "compare" or "direction=LT" not in test.attributes:
            return None
        start = computation._origin(loop.operands[0])
        counter = condition.element(test.operands[0])
        if counter is None or start.opcode != "tuple" or body.root.opcode != "tuple":
            return None
        limit = condition.constant(test.operands[1])
        carried = condition.element(test.operands[1])
        if limit is None and carried is not None:
            if body.element(body.root.operands[carried]) == carried:
                limit = computation.constant(start.operands[carried])
        first = computation.constant(start.operands[counter])
        step = _step(body, counter)
        if limit is None or first is None or not step:
            return None
        return max(0, -(-(limit - first) // step))


def expected_trips(path: str) -> int | None:
    """What the innermost scope of a path, ``trips:NUMBER``, says of a loop in it; None: nothing."""
    told = re.search(r"trips:(\d+)\)*$", path)
    return int(told[1]) if told else None


def _step(body: Computation, counter: int) -> int | None:
    """By how much a loop's body raises an entry of its tuple."""
    update = body._origin(body.root.operands[counter])
    if update.opcode != "add":
        return None
    for one, other in (update.operands, update.operands[::-1]):
        if body.element(one) == counter:
            return body.constant(other)
    return None


def parse(text: str) -> HloModule:
    """Read a module.

    Raises:
      ValueError: text that is not a compiled module's.
    """
    computations: dict[str, Computation] = {}
    entry: Computation | None = None
    for is_entry, name, lines in _blocks(text):
        found: dict[str, Instruction] = {}
        for line in lines:
            instruction = _instruction(line)
            for operand in instruction.operands:
                _pick_entry(found, operand)
            found[instruction.name] = instruction
        computations[name] = Computation(name, found)
        if is_entry:
            entry = computations[name]
    if entry is None:
        raise ValueError("no ENTRY computation; give what compiled.as_text() returns")
    header = text[: text.index("\n")]
    sizes = (re.search(rf"{what}=(\d+)", header) for what in ("num_partitions", "replica_count"))
    devices = math.prod(int(n[1]) for n in sizes if n)
    first = re.search(r"^(ENTRY )?%", text, re.M)
    return HloModule(computations, entry, devices, text[: first.start() if first else 0])


def _pick_entry(found: dict[str, Instruction], operand: str) -> None:
    """Add the instruction that picks the entry which an operand names, if it names one."""
    source, _, index = operand.rpartition("#")
    if not source or operand in found:
        return
    _pick_entry(found, source)
    if source not in found:
        raise ValueError(f"%{operand} in HLO text is used before %{source} is there")
    shape = entry_shape(found[source].shape, int(index))
    picked = Instruction(operand, shape, "get-tuple-element", (source,), "", f", index={index}")
    found[operand] = picked


def _blocks(text: str) -> Iterator[tuple[bool, str, list[str]]]:
    """Whether it is the entry, name and instruction lines of each computation.

    What a written kernel says of itself may go over several lines, which then begin anyhow.
    """
    header = None
    for line in text.splitlines():
        if header is None:
            header = _HEADER.match(line)
            lines: list[str] = []
        elif line == "}" or line.startswith("}, execution_thread="):
            yield bool(header[1]), header[2], lines
            header = None
        elif _INSTRUCTION.match(line):
            lines.append(line)
        elif lines:
            lines[-1] += line


def _instruction(line: str) -> Instruction:
    head = _INSTRUCTION.match(line)
    assert head is not None
    start = head.end()
    end = closing(line, start) if line[start] == "(" else line.index(" ", start)
    opcode = _OPCODE.match(line, end)
    if opcode is None:
        raise ValueError(f"not an HLO instruction: {line.strip()[:80]}")
    after = closing(line, opcode.end() - 1)
    inside = line[opcode.end() : after - 1]
    return Instruction(
        name=head[1],
        shape=line[start:end],
        opcode=opcode[1],
        operands=tuple(_OPERAND.findall(inside)) if opcode[1] != "constant" else (),
        literal=inside,
        attributes=line[after:],
    )
