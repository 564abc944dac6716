"""What a compiled program takes at the least on a device, by the compiler's own text.

Each operation takes as long as the slower of what it moves to and from main memory and what it
multiplies; transfers that the program starts early are hidden behind what runs meanwhile, as far as
that leaves their wires (``program_costs.limits``) or the memory free. So it is a bound by
bandwidths and peaks (a roofline, Williams et al. 2009): what kernels lose within themselves,
launches and contention are not in it.

Counted are loops by their trips, tiles that are filled up, slices (of what is cut out of an array,
not all of it), updates in place (what is written), and memory on the chip (nothing).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from hjax.xla.collectives import (
    KINDS,
    Collective,
    begins_chain,
    between_slices,
    chain_owners,
    fused_collectives,
    fused_kind,
    instruction_groups,
)
from hjax.xla.flops import scope_cost
from hjax.xla.hlo import ArrayShape, Computation, HloModule, Instruction, array_shapes, parse
from program_costs.limits import NO_WAY, Limits, Way, Wire
from program_costs.loops import Copy, copies, written_over
from program_costs.products import (
    convolution_flops,
    dot_flops,
    kernel_bytes,
    kernel_flops,
)
from program_costs.sources import source_of

# They name, pick, or mark: nothing moves.
_FREE = frozenset(
    """parameter constant tuple get-tuple-element bitcast after-all partition-id replica-id
    opt-barrier add-dependency domain async-update get-dimension-size infeed outfeed""".split()
)
# An array with nothing in it yet (``jax.lax.empty``; what a loop writes layer by layer).
_NEW_ARRAY = 'custom_call_target="AllocateBuffer"'
# Elements of the result need as many of the operand.
_SAME_ELEMENTS = frozenset("bitcast reshape copy transpose convert bitcast-convert reverse".split())


@dataclasses.dataclass(frozen=True)
class Operation:
    """An instruction and what all its runs take together.

    Attributes:
      name, opcode: as printed.
      source: ``FILE:LINE`` that it comes from.
      times: how often it runs.
      bytes: to and from main memory.
      flops: of matrix products.
      received: bytes from other devices.
      seconds: that it adds to the program.
    """

    name: str
    opcode: str
    source: str
    times: float
    bytes: float
    flops: float
    received: float
    seconds: float


@dataclasses.dataclass(frozen=True)
class Turn:
    """One turn of a loop; of a decode loop, a token of every row.

    Attributes:
      seconds, bytes, received: of all its operations.
      copies: of ``program_costs.loops``.
    """

    seconds: float
    bytes: float
    received: float
    copies: tuple[Copy, ...]


@dataclasses.dataclass(frozen=True)
class Roofline:
    """A program's account, per device and run.

    Attributes:
      seconds: all of it.
      bytes: to and from main memory.
      flops: of matrix products.
      received: bytes from other devices.
      synchronous: of these, those that nothing runs beside.
      memory_seconds, product_seconds, exposed_seconds: of ``seconds``, what memory and products
        bound, and what is waited for other devices or early copies.
      operations: the costliest first.
      opaque: names of kernels that do not say what they multiply.
      turn: of its longest loop; None: it has none.
    """

    seconds: float
    bytes: float
    flops: float
    received: float
    synchronous: float
    memory_seconds: float
    product_seconds: float
    exposed_seconds: float
    operations: tuple[Operation, ...]
    opaque: tuple[str, ...]
    turn: Turn | None = None

    @property
    def bound(self) -> str:
        """What most of the time goes to: ``memory``, ``compute`` or ``network``."""
        parts = {
            "memory": self.memory_seconds,
            "compute": self.product_seconds,
            "network": self.exposed_seconds,
        }
        return max(parts, key=lambda name: parts[name])

    def by_source(self) -> list[Operation]:
        """Operations of one source line as one, the costliest first."""
        found: dict[str, list[Operation]] = {}
        for operation in self.operations:
            found.setdefault(operation.source or operation.name, []).append(operation)
        merged = [
            Operation(
                max(items, key=lambda o: o.seconds).name,
                max(items, key=lambda o: o.seconds).opcode,
                source,
                sum(o.times for o in items),
                sum(o.bytes for o in items),
                sum(o.flops for o in items),
                sum(o.received for o in items),
                sum(o.seconds for o in items),
            )
            for source, items in found.items()
        ]
        return sorted(merged, key=lambda o: -o.seconds)


def roofline(text: str, limits: Limits, loop_trips: int | None = None) -> Roofline:
    """The account of a compiled program.

    Args:
      text: what ``compiled.as_text()`` returns, or a TPU's compiler printed.
      limits: of the devices.
      loop_trips: taken for loops whose number of trips the text does not tell.

    Raises:
      ValueError: text that is not a compiled module's; a loop of unknown trips, and no
        ``loop_trips``.
    """
    module = parse(text)
    account = _Account(module, limits, loop_trips)
    total = account.of(module.entry)
    operations = sorted(total.operations, key=lambda o: -o.seconds)
    return Roofline(
        total.seconds,
        sum(o.bytes for o in operations),
        sum(o.flops for o in operations),
        sum(o.received for o in operations),
        total.synchronous,
        total.memory,
        total.product,
        total.exposed,
        tuple(operations),
        tuple(dict.fromkeys(account.opaque)),
        account.longest_turn(),
    )


@dataclasses.dataclass
class _Step:
    """What runs in a computation, in its order.

    Attributes:
      seconds: it takes.
      used: of these, in which each wire to other devices is used, by it or by a transfer beside it.
      memory: of these, in which main memory is idle, and not yet used by a transfer beside it.
    """

    seconds: float
    used: dict[Wire, float]
    memory: float

    def beside(self, wires: frozenset[Wire], most: float) -> float:
        """So many seconds, at most, of a transfer over these wires, or within the device, which are
        then used."""
        idle = min((self.seconds - self.used.get(w, 0.0) for w in wires), default=self.memory)
        found = min(most, max(idle, 0.0))
        for wire in wires:
            self.used[wire] = self.used.get(wire, 0.0) + found
        if not wires:
            self.memory -= found
        return found


@dataclasses.dataclass
class _Total:
    """Of a computation's one run."""

    seconds: float = 0.0
    memory: float = 0.0
    product: float = 0.0
    exposed: float = 0.0
    synchronous: float = 0.0
    memory_idle: float = 0.0
    used: dict[Wire, float] = dataclasses.field(default_factory=dict)
    operations: list[Operation] = dataclasses.field(default_factory=list)

    def times(self, n: float) -> _Total:
        numbers = {
            f.name: getattr(self, f.name) * n
            for f in dataclasses.fields(self)
            if f.name not in ("operations", "used")
        }
        scaled = ("times", "bytes", "flops", "received", "seconds")
        operations = [
            dataclasses.replace(o, **{name: getattr(o, name) * n for name in scaled})
            for o in self.operations
        ]
        used = {wire: seconds * n for wire, seconds in self.used.items()}
        return _Total(**numbers, used=used, operations=operations)


@dataclasses.dataclass
class _Transfer:
    """On its way while other things run.

    Attributes:
      instruction: that began it.
      way: how it goes; of a copy within the device over no wire.
      begun: number of the steps before it.
      bytes: to and from main memory.
    """

    instruction: Instruction
    way: Way
    begun: int
    bytes: float


class _Account:
    def __init__(self, module: HloModule, limits: Limits, loop_trips: int | None):
        self.module, self.limits, self.loop_trips = module, limits, loop_trips
        self.opaque: list[str] = []
        self._owners = chain_owners(module)
        self._known: dict[str, _Total] = {}

    def of(self, computation: Computation) -> _Total:
        """The account of one run of a computation."""
        if computation.name not in self._known:
            self._known[computation.name] = self._schedule(computation)
        return self._known[computation.name]

    def longest_turn(self) -> Turn | None:
        """Of the loop, of those that stand in no other, whose turns together move most."""
        turns = []
        for instruction in self.module.entry.instructions.values():
            if instruction.opcode == "while":
                all_of_them = self._inner(self.module.entry, instruction)
                moved = sum(o.bytes for o in all_of_them.operations) if all_of_them else 0.0
                turns.append((moved, instruction))
        if not turns:
            return None
        _, loop = max(turns, key=lambda found: found[0])
        [body] = loop.called("body")
        once = self.of(self.module.computations[body])
        return Turn(
            once.seconds,
            sum(o.bytes for o in once.operations),
            sum(o.received for o in once.operations),
            tuple(copies(self.module, loop)),
        )

    def _schedule(self, computation: Computation) -> _Total:
        total = _Total()
        steps: list[_Step] = []
        under_way: dict[str, _Transfer] = {}
        chains = self._chains(computation)
        for instruction in computation.instructions.values():
            opcode = instruction.opcode
            if opcode.endswith("-done"):
                begun = under_way.pop(_first(computation, instruction), None)
                if begun is not None:
                    self._arrive(begun, steps, total)
                continue
            if opcode in _FREE:
                continue
            inner = self._inner(computation, instruction)
            if inner is not None:
                for name in ("seconds", "memory", "product", "exposed", "synchronous"):
                    setattr(total, name, getattr(total, name) + getattr(inner, name))
                total.operations += inner.operations
                steps.append(_Step(inner.seconds, dict(inner.used), inner.memory_idle))
                continue
            transfer = self._transfer(computation, instruction, len(steps))
            if transfer is not None:
                under_way[instruction.name] = transfer
                continue
            kind = opcode if opcode in KINDS else ""
            if kind:
                self._collective(computation, instruction, kind, steps, total)
                continue
            for channel in chains.begins.get(instruction.name, ()):
                found = chains.collectives[channel]
                way = self.limits.way(found)
                under_way[channel] = _Transfer(instruction, way, len(steps), 0.0)
            self._compute(computation, instruction, steps, total)
            for channel in chains.ends.get(instruction.name, ()):
                self._arrive(under_way.pop(channel), steps, total)
        for left in under_way.values():
            self._arrive(left, steps, total)
        for step in steps:
            for wire, seconds in step.used.items():
                total.used[wire] = total.used.get(wire, 0.0) + seconds
        total.memory_idle = sum(step.memory for step in steps)
        return total

    # What an instruction is

    def _inner(self, computation: Computation, instruction: Instruction) -> _Total | None:
        """Of loops, branches and calls."""
        module, opcode = self.module, instruction.opcode
        if opcode == "while":
            [body] = instruction.called("body")  # the condition compares counters
            once = self.of(module.computations[body])
            trips = module.trips(computation, instruction)
            trips = self.loop_trips if trips is None else trips
            if trips is None:
                if not once.operations:
                    return _Total()
                raise ValueError(
                    f"the trips of loop {instruction.name} are not in the program's text; give "
                    "loop_trips"
                )
            return once.times(trips)
        if opcode == "conditional":
            names = [
                name
                for attribute in ("branch_computations", "true_computation", "false_computation")
                for name in instruction.called(attribute)
            ]
            branches = [self.of(module.computations[name]) for name in names]
            return max(branches, key=lambda total: total.seconds, default=_Total())
        if opcode == "call":
            [name] = instruction.called("to_apply")
            return self.of(module.computations[name])
        return None

    def _transfer(
        self, computation: Computation, instruction: Instruction, steps: int
    ) -> _Transfer | None:
        """What goes on beside what follows, until its -done."""
        opcode, limits = instruction.opcode, self.limits
        kind = opcode.removesuffix("-start")
        if opcode.endswith("-start") and kind in KINDS:
            found = self._collective_of(computation, instruction, kind)
            return _Transfer(instruction, limits.way(found), steps, 0.0)
        if opcode == "copy-start":
            read = array_shapes(computation.instructions[instruction.operands[0]].shape)
            written = array_shapes(instruction.shape)[:1]
            moved = _main(read) + _main(written)
            within = Way(0.0, frozenset(), moved / limits.bandwidth)
            return _Transfer(instruction, within, steps, moved)
        if opcode == "async-start":
            [name] = instruction.called("calls")
            inner = self.of(self.module.computations[name])
            moved = sum(o.bytes for o in inner.operations)
            seconds = max(moved / limits.bandwidth, *inner.used.values(), 0.0)
            received = sum(o.received for o in inner.operations)
            way = Way(received, frozenset(inner.used), seconds)
            return _Transfer(instruction, way, steps, moved)
        if opcode == "recv":
            between = between_slices(instruction, self.module.devices)
            if between is not None:
                return _Transfer(instruction, limits.way(between), steps, 0.0)
        if opcode == "send" and "_xla_megascale" in instruction.attributes:
            return _Transfer(instruction, NO_WAY, steps, 0.0)  # its recv has all of it
        if opcode in ("send", "recv"):
            sent = sum(a.bytes for a in array_shapes(instruction.shape)[:1])
            return _Transfer(instruction, limits.somewhere(sent), steps, 0.0)
        return None

    def _chains(self, computation: Computation) -> _Chains:
        """Collectives that run inside several fusions, from the first to the last of a channel."""
        chains = _Chains()
        begun: dict[int | None, int] = {}  # chains of each channel, which may be used again
        for instruction in computation.instructions.values():
            if instruction.opcode != "fusion":
                continue
            for found_in, inside in fused_collectives(self.module, instruction):
                kind = fused_kind(found_in, inside)
                number = inside.number("channel_id")
                if number is not None and computation.name not in self._owners[number]:
                    continue  # a turn of a loop that it is fused with
                if kind and begins_chain(computation, instruction):
                    begun[number] = begun.get(number, 0) + 1
                channel = f"channel {number}, chain {begun.get(number, 0)}"
                first = channel not in chains.collectives
                if first and kind:
                    size = found_in.operand_bytes(inside)
                    groups = instruction_groups(inside, kind, self.module.devices)
                    chains.collectives[channel] = Collective(kind, size, groups)
                    chains.begins.setdefault(instruction.name, []).append(channel)
                if channel in chains.collectives:
                    chains.last[channel] = instruction.name
        for channel, name in chains.last.items():
            chains.ends.setdefault(name, []).append(channel)
        return chains

    # What it takes

    def _collective_of(
        self, computation: Computation, instruction: Instruction, kind: str
    ) -> Collective:
        size = computation.operand_bytes(instruction)
        return Collective(kind, size, instruction_groups(instruction, kind, self.module.devices))

    def _collective(
        self,
        computation: Computation,
        instruction: Instruction,
        kind: str,
        steps: list[_Step],
        total: _Total,
    ) -> None:
        found = self._collective_of(computation, instruction, kind)
        received, wires, seconds = self.limits.way(found)
        total.seconds += seconds
        total.exposed += seconds
        total.synchronous += received
        steps.append(_Step(seconds, dict.fromkeys(wires, seconds), seconds))
        self._note(instruction, 0.0, 0.0, received, seconds, total)

    def _compute(
        self,
        computation: Computation,
        instruction: Instruction,
        steps: list[_Step],
        total: _Total,
    ) -> None:
        moved, products = self._moved(computation, instruction), 0.0
        reading = moved / self.limits.bandwidth
        flops = 0.0
        for kind, count in self._products(computation, instruction).items():
            flops += count
            products += count / self.limits.flops.get(kind, self.limits.flops["bfloat16"])
        seconds = max(reading, products)
        total.seconds += seconds
        if products > reading:
            total.product += seconds
        else:
            total.memory += seconds
        steps.append(_Step(seconds, {}, seconds - reading))
        self._note(instruction, moved, flops, 0.0, seconds, total)

    def _arrive(self, transfer: _Transfer, steps: list[_Step], total: _Total) -> None:
        """What of a transfer nothing ran beside adds to the time."""
        received, wires, seconds = transfer.way
        left = seconds
        for step in steps[transfer.begun :]:
            left -= step.beside(wires, left)
        if left > 0:
            total.seconds += left
            total.exposed += left if received else 0.0
            total.memory += 0.0 if received else left
            steps.append(_Step(left, dict.fromkeys(wires, left), 0.0))
        if received and seconds:
            total.synchronous += received * left / seconds
        self._note(transfer.instruction, transfer.bytes, 0.0, received, max(left, 0.0), total)

    def _note(
        self,
        instruction: Instruction,
        moved: float,
        flops: float,
        received: float,
        seconds: float,
        total: _Total,
    ) -> None:
        if moved or flops or received:
            source = source_of(self.module, instruction)
            if not source and instruction.opcode == "copy-start":
                source = "(copies between memories)"
            total.operations.append(
                Operation(
                    instruction.name, instruction.opcode, source, 1, moved, flops, received, seconds
                )
            )

    # Bytes

    def _moved(self, computation: Computation, instruction: Instruction) -> float:
        """To and from main memory."""
        opcode = instruction.opcode
        if opcode == "fusion":
            [name] = instruction.called("calls")
            inner = self.module.computations[name]
            return self._fusion(computation, instruction, inner)
        operands = [computation.instructions[name] for name in instruction.operands]
        written = _main(array_shapes(instruction.shape))
        if opcode in ("dynamic-slice", "slice", "gather"):
            return 2 * written + sum(_main(array_shapes(o.shape)) for o in operands[1:])
        if opcode == "dynamic-update-slice":
            return 2 * _main(array_shapes(operands[1].shape))
        if opcode == "scatter":
            updates = operands[len(operands) // 2 + 1 :] or operands[-1:]
            return 3 * sum(_main(array_shapes(o.shape)) for o in updates)
        if opcode in ("iota", "rng", "rng-bit-generator"):
            return written
        moved = written + sum(_main(array_shapes(o.shape)) for o in operands)
        if opcode != "custom-call":
            return moved
        if _NEW_ARRAY in instruction.attributes:
            return 0.0
        says = kernel_bytes(instruction)
        if says is not None:
            return says
        told = scope_cost(instruction.attributes)
        return moved if told is None else max(moved, told[1])

    def _fusion(self, computation: Computation, fusion: Instruction, inner: Computation) -> float:
        """Of its arguments what is used, and of its results what is new."""
        demand, written = self._demand(inner)
        moved = 0.0
        for parameter, name in zip(inner.parameters, fusion.operands, strict=False):
            held = array_shapes(computation.instructions[name].shape)
            if len(held) == 1 and not held[0].space:
                elements = max(held[0].elements, 1)
                moved += held[0].bytes * min(demand.get(parameter.name, 0.0) / elements, 1.0)
        results = array_shapes(fusion.shape)
        for array, share in zip(results, written, strict=False):
            if not array.space:
                moved += array.bytes * share
        return moved

    def _demand(self, inner: Computation) -> tuple[dict[str, float], list[float]]:
        """Elements of each value that a fusion needs, and of each result the share that is new."""
        needed: dict[str, float] = {}
        root = inner.root
        results = (
            [inner.instructions[name] for name in root.operands]
            if root.opcode == "tuple"
            else [root]
        )
        shares = []
        for result in results:
            arrays = array_shapes(result.shape)
            size = float(sum(a.elements for a in arrays)) or 1.0
            update = written_over(self.module, inner, result)
            new = size if update is None else float(_elements(inner.instructions[update].shape))
            shares += [new / size] * len(arrays)
            needed[result.name] = needed.get(result.name, 0.0) + new
        for instruction in reversed(list(inner.instructions.values())):
            wanted = needed.get(instruction.name, 0.0)
            if wanted and not (instruction is root and root.opcode == "tuple"):
                self._pass_on(inner, instruction, wanted, needed)
        return needed, shares

    def _pass_on(
        self, inner: Computation, instruction: Instruction, wanted: float, needed: dict[str, float]
    ) -> None:
        """Tell an instruction's operands how many of their elements it takes."""
        opcode = instruction.opcode
        operands = [inner.instructions[name] for name in instruction.operands]
        sizes = [float(_elements(o.shape)) for o in operands]
        own = float(_elements(instruction.shape)) or 1.0

        def take(i: int, elements: float) -> None:
            name = operands[i].name
            needed[name] = min(needed.get(name, 0.0) + elements, sizes[i])

        if opcode in ("slice", "dynamic-slice", "gather"):
            take(0, wanted)
            for i in range(1, len(operands)):
                take(i, sizes[i])
        elif opcode == "dynamic-update-slice":
            take(0, max(wanted - sizes[1], 0.0))
            take(1, min(wanted, sizes[1]))
            for i in range(2, len(operands)):
                take(i, sizes[i])
        elif opcode in ("fusion", "call"):
            [name] = instruction.called("calls") or instruction.called("to_apply")
            below = self.module.computations[name]
            deeper, _ = self._demand(below)
            for i, parameter in enumerate(below.parameters[: len(operands)]):
                take(i, deeper.get(parameter.name, 0.0))
        elif opcode == "get-tuple-element" or opcode in _SAME_ELEMENTS:
            for i in range(len(operands)):
                take(i, min(wanted, sizes[i]))
        elif opcode in ("broadcast", "dot", "convolution", "reduce", "reduce-window", "sort"):
            for i in range(len(operands)):
                take(i, sizes[i])
        else:  # elementwise, or nearly
            for i in range(len(operands)):
                take(i, sizes[i] * min(wanted / own, 1.0))

    # Products

    def _products(self, computation: Computation, instruction: Instruction) -> dict[str, float]:
        """Operations of matrix products in an instruction, by the type that sets their speed."""
        opcode = instruction.opcode
        found: dict[str, float] = {}
        if opcode == "fusion":
            for name in instruction.called("calls"):
                inner = self.module.computations[name]
                for inside in inner.instructions.values():
                    for kind, count in self._products(inner, inside).items():
                        found[kind] = found.get(kind, 0.0) + count
        elif opcode in ("dot", "convolution"):
            count = (dot_flops if opcode == "dot" else convolution_flops)(computation, instruction)
            found[self._speed(computation, instruction)] = count
        elif opcode == "custom-call":
            count, known = kernel_flops(computation, instruction)
            if not known:
                self.opaque.append(instruction.name)
            if count:
                found[self._speed(computation, instruction)] = count
        return found

    def _speed(self, computation: Computation, instruction: Instruction) -> str:
        kinds = {
            a.kind
            for name in instruction.operands[:2]
            for a in array_shapes(computation.instructions[name].shape)
        }
        if any(kind.startswith("f8") for kind in kinds) and "float8" in self.limits.flops:
            return "float8"
        if kinds & {"f32", "f64"}:
            full = "highest" in instruction.attributes
            return "float32" if full or self.limits.default_float32 else "bfloat16"
        return "bfloat16"


@dataclasses.dataclass
class _Chains:
    collectives: dict[str, Collective] = dataclasses.field(default_factory=dict)
    begins: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    ends: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    last: dict[str, str] = dataclasses.field(default_factory=dict)


def _first(computation: Computation, instruction: Instruction) -> str:
    """The -start that a -done belongs to, through updates."""
    name = instruction.operands[0] if instruction.operands else ""
    while name in computation.instructions:
        found = computation.instructions[name]
        if found.opcode not in ("async-update", "get-tuple-element", "bitcast"):
            break
        name = found.operands[0]
    return name


def _main(arrays: Iterable[ArrayShape]) -> float:
    """Bytes of those in main memory."""
    return float(sum(a.bytes for a in arrays if not a.space))


def _elements(shape: str) -> int:
    return sum(a.elements for a in array_shapes(shape))
