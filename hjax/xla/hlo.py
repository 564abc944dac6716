"""Parser of HLO text: computations, instructions, array sizes and loop trip counts.

Reads what ``compiled.as_text()`` prints on CPU, GPU and TPU, as far as counting needs it.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Iterator, Mapping

# Bits of types whose name does not end in their number of bits.
_BITS = {"pred": 8, "token": 0, "opaque": 0, "c64": 64, "c128": 128}
_HEADER = re.compile(r"^(ENTRY )?%?([\w.~-]+) \(.*\) -> .*\{$")
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.~-]+) = ")
_OPCODE = re.compile(r"\s*([\w-]+)\(")
_NAME = re.compile(r"%([\w.~-]+)")
# An operand may be a tuple's entry, possibly nested: %name#1, %name#1#0.
_OPERAND = re.compile(r"%([\w.~-]+(?:#\d+)*)")
# Instructions that pass their operand's value on.
_SAME = ("copy", "bitcast", "convert", "reshape")


def closing_bracket(text: str, start: int) -> int:
    """Index just after the bracket that closes the one at ``start``."""
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
    """An array with the compiler's memory layout.

    Attributes:
      kind: of its elements, e.g. ``bf16``.
      bits: of an element.
      sizes: of its dimensions, in the program's order.
      order: its dimensions from minor to major; empty if the text has no layout.
      tile: tile sizes of the most minor dimensions, major first; empty: no tiling.
      space: number of its memory space; 0 is the device's main memory; on a TPU 1 is the vector
        memory, 5 the host's.
    """

    kind: str
    bits: int
    sizes: tuple[int, ...]
    order: tuple[int, ...] = ()
    tile: tuple[int, ...] = ()
    space: int = 0

    @property
    def elements(self) -> int:
        """Number of elements, without padding of tiles."""
        return math.prod(self.sizes)

    @property
    def bytes(self) -> int:
        """Bytes in memory, with the padding of tiles."""
        sizes = list(self.sizes)
        for i, side in enumerate(reversed(self.tile)):
            if i < len(self.order):
                at = self.order[i]
                sizes[at] = -(-sizes[at] // side) * side
        return -(-self.bits * math.prod(sizes) // 8)


_LAID_OUT = re.compile(r"\b([a-z]\w*)\[([\d,<= ]*)\](?:\{([^{}]*)\})?")


@functools.lru_cache(maxsize=1 << 14)
def array_shapes(shape: str) -> tuple[ArrayShape, ...]:
    """The arrays of a shape, those of a tuple in its order.

    Raises:
      ValueError: an unknown type.
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
    return sum(-(-array.bits * array.elements // 8) for array in array_shapes(shape))


def _bits(kind: str, shape: str) -> int:
    if kind in _BITS:
        return _BITS[kind]
    digits = re.match(r"[a-z]+(\d+)", kind)
    if digits is None:
        raise ValueError(f"unknown type in HLO text: {shape}")
    return int(digits[1])


def entry_shape(shape: str, index: int) -> str:
    """The shape of a tuple's entry: entry 1 of ``(s32[], f32[2,3]{1,0})`` is ``f32[2,3]{1,0}``.

    Raises:
      ValueError: not a tuple, or no such entry.
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
      literal: the text in brackets, for constants.
      attributes: the rest of the line.
    """

    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    literal: str
    attributes: str

    def called(self, attribute: str) -> list[str]:
        """Names of the computations in an attribute."""
        found = re.search(rf"\b{attribute}=(\{{[^}}]*\}}|%[\w.~-]+)", self.attributes)
        return _NAME.findall(found[1]) if found else []

    def number(self, attribute: str) -> int | None:
        """The value of an integer attribute; None if absent."""
        found = re.search(rf"\b{attribute}=(-?\d+)", self.attributes)
        return int(found[1]) if found else None


@dataclasses.dataclass(frozen=True)
class Computation:
    """Instructions by name; the last one is the result.

    Newer printers omit get-tuple-element lines and write ``%name#1`` where an entry is used. The
    parser adds these instructions, under that name.
    """

    name: str
    instructions: Mapping[str, Instruction]

    @functools.cached_property
    def root(self) -> Instruction:
        """The instruction that is the computation's result."""
        return list(self.instructions.values())[-1]

    @functools.cached_property
    def parameters(self) -> list[Instruction]:
        """Its arguments, by their numbers."""
        found = [i for i in self.instructions.values() if i.opcode == "parameter"]
        return sorted(found, key=lambda i: int(i.literal))

    def operand_bytes(self, instruction: Instruction) -> int:
        """Total bytes of an instruction's operands."""
        return sum(shape_bytes(self.instructions[name].shape) for name in instruction.operands)

    def constant(self, name: str) -> int | None:
        """The value of an instruction that is an integer constant, or a copy of one."""
        found = self._origin(name)
        if found.opcode == "constant" and re.fullmatch(r"-?\d+", found.literal):
            return int(found.literal)
        return None

    def element(self, name: str) -> int | None:
        """The index of the entry of the computation's tuple argument that an instruction is."""
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
      entry: the computation that runs.
      devices: number of devices that run it.
      head: the text before the first computation, with the tables of source lines.
    """

    computations: Mapping[str, Computation]
    entry: Computation
    devices: int
    head: str = ""

    def trips(self, computation: Computation, loop: Instruction) -> int | None:
        """Trip count of a ``while`` in ``computation``; None if it is not known.

        XLA's CPU and GPU compilers write it down. For the TPU's it is derived from a counter with
        constant start, step and limit. For a data-dependent loop its scope may give the expected
        trips (``expected_trips``).
        """
        known = re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.attributes)
        if known:
            return int(known[1])
        path = re.search(r'op_name="([^"]*)"', loop.attributes)
        expected = expected_trips(path[1].removesuffix("/while")) if path else None
        if expected is not None:
            return expected
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
    """Expected trips of a loop, from the innermost scope ``trips:NUMBER`` of a path; None: none."""
    found = re.search(r"trips:(\d+)\)*$", path)
    return int(found[1]) if found else None


def _step(body: Computation, counter: int) -> int | None:
    """By how much a loop's body increments an entry of its tuple; None if not by a constant."""
    update = body._origin(body.root.operands[counter])
    if update.opcode != "add":
        return None
    for one, other in (update.operands, update.operands[::-1]):
        if body.element(one) == counter:
            return body.constant(other)
    return None


def parse(text: str) -> HloModule:
    """Parse a module.

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
    """Add the get-tuple-element instruction for an operand like ``name#1``."""
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
    """(is entry, name, instruction lines) of each computation.

    A custom kernel's description may span several lines, which are joined to its instruction.
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
    end = closing_bracket(line, start) if line[start] == "(" else line.index(" ", start)
    opcode = _OPCODE.match(line, end)
    if opcode is None:
        raise ValueError(f"not an HLO instruction: {line.strip()[:80]}")
    after = closing_bracket(line, opcode.end() - 1)
    inside = line[opcode.end() : after - 1]
    return Instruction(
        name=head[1],
        shape=line[start:end],
        opcode=opcode[1],
        operands=tuple(_OPERAND.findall(inside)) if opcode[1] != "constant" else (),
        literal=inside,
        attributes=line[after:],
    )
