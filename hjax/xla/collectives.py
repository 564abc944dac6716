"""Collectives of a compiled program and their bytes, read off its HLO text.

XLA's cost analysis counts a loop's body once and has no collectives. Here each collective counts
times the trips of the loops around it.
"""

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from hjax.xla.hlo import Computation, HloModule, Instruction, array_shapes, closing_bracket, parse

KINDS = (
    "all-gather",
    "all-reduce",
    "all-to-all",
    "collective-broadcast",
    "collective-permute",
    "ragged-all-to-all",
    "reduce-scatter",
)
Groups = tuple[tuple[int, ...], ...]
_SEMAPHORE = "S(2)"  # in the shape of a value in a TPU's semaphore memory

# Between TPU slices a collective is a host transfer: its kind there -> ours, and the ratio of a
# device's output to its input for n devices.
_BETWEEN_SLICES: Mapping[str, tuple[str, Callable[[int], float]]] = {
    "ALL_GATHER": ("all-gather", lambda n: n),
    "ALL_REDUCE": ("all-reduce", lambda n: 1),
    "REDUCE_SCATTER": ("reduce-scatter", lambda n: 1 / n),
    "ALL_TO_ALL": ("all-to-all", lambda n: 1),
    "ONE_TO_ONE": ("collective-permute", lambda n: 1),
}


@dataclasses.dataclass(frozen=True)
class Collective:
    """One communication between devices.

    Attributes:
      kind: one of ``KINDS``; asynchronous forms have their plain name.
      input_bytes: operand bytes of each device, in one run.
      groups: replica groups, with the program's device numbers (over several slices the first
        slice's devices come first); for a collective-permute its (source, target) pairs, without
        those to the device itself.
      times: how often the program runs it.
    """

    kind: str
    input_bytes: int
    groups: Groups
    times: int = 1

    @property
    def group_size(self) -> int:
        """Size of the largest group; for a collective-permute 2, or 1 if nothing moves."""
        return max(map(len, self.groups), default=1)

    @property
    def received_bytes(self) -> int:
        """Bytes that a device receives in one run (the most that any does).

        With n devices in a group: all-gather n - 1 times the input; all-to-all and reduce-scatter
        (n - 1) / n of it; all-reduce twice that (reduce-scatter, then all-gather);
        collective-permute and broadcast all of it.
        """
        n = self.group_size
        if n == 1:
            return 0
        if self.kind == "all-gather":
            return self.input_bytes * (n - 1)
        if self.kind == "all-reduce":
            return 2 * self.input_bytes * (n - 1) // n
        if self.kind in ("collective-permute", "collective-broadcast"):
            return self.input_bytes
        return self.input_bytes * (n - 1) // n

    @property
    def total_bytes(self) -> int:
        """``received_bytes`` over all its runs."""
        return self.times * self.received_bytes


def collectives(text: str, loop_trips: int | None = None) -> list[Collective]:
    """The collectives of a compiled program, in the order of its text.

    Args:
      text: what ``compiled.as_text()`` returns.
      loop_trips: trips of loops whose count is not in the text (generation ends with its last
        sequence).

    Returns:
      collectives; in loops ``times`` is multiplied by the trips, of a conditional only the branch
      that receives most counts.

    Raises:
      ValueError: collectives in a loop whose trips are unknown, and no ``loop_trips``.
    """
    module = parse(text)
    return _inside(module, module.entry, loop_trips, chain_owners(module))


def received_bytes(text: str, loop_trips: int | None = None) -> int:
    """Bytes that each device receives while a compiled program runs; see ``collectives``."""
    return sum(found.total_bytes for found in collectives(text, loop_trips))


def fused_collectives(
    module: HloModule, fusion: Instruction
) -> Iterator[tuple[Computation, Instruction]]:
    """The collectives inside a fusion, each with the computation that contains it.

    On TPUs an asynchronous collective is a chain of fusions: its start, its end and what is fused
    with it all name it, by one channel. Another chain may have the same channel.
    """
    for name in fusion.called("calls"):
        inner = module.computations[name]
        for inside in inner.instructions.values():
            if inside.opcode.removesuffix("-start").removesuffix("-done") in KINDS:
                yield inner, inside
            elif inside.opcode == "fusion":
                yield from fused_collectives(module, inside)


def fused_kind(fusion: Computation, inside: Instruction) -> str:
    """The kind of a collective that starts in a fusion, else "".

    A TPU's reduce-scatter is written as an all-reduce followed by a slice.
    """
    kind = inside.opcode.removesuffix("-start")
    if kind not in KINDS:
        return ""
    if kind == "all-reduce":
        users = [i for i in fusion.instructions.values() if inside.name in i.operands]
        if users and all(user.opcode == "dynamic-slice" for user in users):
            return "reduce-scatter"
    return kind


def begins_chain(computation: Computation, fusion: Instruction) -> bool:
    """Whether a fusion makes the semaphores of a chain (they have a memory space of their own) and
    takes none."""
    taken = (computation.instructions[name].shape for name in fusion.operands)
    return _SEMAPHORE in fusion.shape and not any(_SEMAPHORE in shape for shape in taken)


def chain_owners(module: HloModule) -> dict[int, set[str]]:
    """By channel of a collective inside fusions, the computations that start chains of it.

    A chain may be fused with a loop whose trips are not further collectives. So the owners are the
    outermost computations that name the channel: several where the compiler uses it again.
    """
    named: dict[int, list[str]] = {}
    below: dict[str, set[str]] = {}
    for computation in module.computations.values():
        below[computation.name] = calls = set()
        for instruction in computation.instructions.values():
            if instruction.opcode == "fusion":
                for _, inside in fused_collectives(module, instruction):
                    channel = inside.number("channel_id")
                    if channel is not None and computation.name not in named.get(channel, ()):
                        named.setdefault(channel, []).append(computation.name)
            elif instruction.opcode in ("while", "conditional", "call"):
                for attribute in ("body", "to_apply", "branch_computations", "true_computation",
                                  "false_computation"):  # fmt: skip
                    calls |= set(instruction.called(attribute))

    def reaches(start: str, end: str) -> bool:
        return any(name == end or reaches(name, end) for name in below.get(start, ()))

    return {
        channel: {name for name in names if not any(reaches(o, name) for o in names if o != name)}
        for channel, names in named.items()
    }


def _inside(
    module: HloModule,
    computation: Computation,
    loop_trips: int | None,
    owners: Mapping[int, set[str]],
) -> list[Collective]:
    found: list[Collective] = []
    chains: set[int | None] = set()  # channels of those met inside fusions
    for instruction in computation.instructions.values():
        opcode = instruction.opcode
        kind = opcode.removesuffix("-start")
        if kind in KINDS:
            groups = instruction_groups(instruction, kind, module.devices)
            found.append(Collective(kind, computation.operand_bytes(instruction), groups))
        elif opcode == "recv":
            found += [c for c in (between_slices(instruction, module.devices),) if c is not None]
        elif opcode == "while":
            found += _loop(module, computation, instruction, loop_trips, owners)
        elif opcode == "conditional":
            branches = [
                _inside(module, module.computations[name], loop_trips, owners)
                for attribute in ("branch_computations", "true_computation", "false_computation")
                for name in instruction.called(attribute)
            ]
            found += max(branches, key=lambda b: sum(c.total_bytes for c in b), default=[])
        elif opcode == "fusion":
            for inner, inside in fused_collectives(module, instruction):
                channel, kind = inside.number("channel_id"), fused_kind(inner, inside)
                if channel is not None and computation.name not in owners[channel]:
                    continue
                if kind and (channel not in chains or begins_chain(computation, instruction)):
                    chains |= {channel} - {None}
                    size = inner.operand_bytes(inside)
                    groups = instruction_groups(inside, kind, module.devices)
                    found.append(Collective(kind, size, groups))
        elif opcode in ("call", "async-start", "custom-call"):
            # to_apply of a reduction has no collectives and needs no visit.
            for attribute in ("calls", "to_apply", "called_computations"):
                for name in instruction.called(attribute):
                    found += _inside(module, module.computations[name], loop_trips, owners)
    return found


def _loop(
    module: HloModule,
    computation: Computation,
    loop: Instruction,
    loop_trips: int | None,
    owners: Mapping[int, set[str]],
) -> list[Collective]:
    (condition,), (body,) = loop.called("condition"), loop.called("body")
    tested = _inside(module, module.computations[condition], loop_trips, owners)
    repeated = _inside(module, module.computations[body], loop_trips, owners)
    if not tested and not repeated:
        return []
    trips = module.trips(computation, loop)
    trips = loop_trips if trips is None else trips
    if trips is None:
        raise ValueError(
            f"the trips of loop {loop.name}, which has collectives, are not in the program's "
            "text; give loop_trips"
        )
    return _times(tested, trips + 1) + _times(repeated, trips)


def _times(found: Sequence[Collective], trips: int) -> list[Collective]:
    return [dataclasses.replace(c, times=c.times * trips) for c in found if trips]


def instruction_groups(instruction: Instruction, kind: str, devices: int) -> Groups:
    attribute = "source_target_pairs" if kind == "collective-permute" else "replica_groups"
    found = re.search(rf"\b{attribute}=", instruction.attributes)
    text = instruction.attributes[found.end() :] if found else "{}"
    if kind == "collective-permute":
        return tuple(pair for pair in _listed(text) if pair[0] != pair[1])
    return device_groups(text) or (tuple(range(devices)),)


def between_slices(receive: Instruction, devices: int) -> Collective | None:
    """The collective between slices that a ``recv`` ends; None for another ``recv``.

    Args:
      receive: its attributes name kind and members: slices from 1 ``x`` devices in each
        (``{1,2}x{0:3}``), or devices, slice s's from 100000 s on.
      devices: of a slice, which runs one program.

    Raises:
      ValueError: a kind that is not known.
    """
    named = re.search(r'_xla_megascale_transfer_type="(\w+)"', receive.attributes)
    if named is None:
        return None
    if named[1] not in _BETWEEN_SLICES:
        raise ValueError(f"unknown kind of transfer between slices in HLO text: {named[1]}")
    kind, gets = _BETWEEN_SLICES[named[1]]
    target = receive.attributes.partition("_xla_megascale_target=")[2]
    groups: Groups
    if target.startswith('"'):
        each = re.findall(r"\{([\d,]+)\}x\{(\d+):(\d+)\}", target.split('"')[1])
        groups = tuple(
            tuple((s - 1) * devices + place for s in _ints(slices))
            for slices, first, last in each
            for place in range(int(first), int(last) + 1)
        )
    else:
        listed = re.findall(r"\{(\d[\d,>-]*)\}", target[: closing_bracket(target, 0)])
        ids = [_ints(group.replace("->", ",")) for group in listed]
        groups = tuple(
            tuple((i // _SLICE_IDS - 1) * devices + i % _SLICE_IDS for i in group) for group in ids
        )
    size = sum(array.bytes for array in array_shapes(receive.shape)[:1])
    return Collective(kind, round(size / gets(max(map(len, groups)))), groups)


_SLICE_IDS = 100_000


def device_groups(text: str) -> Groups:
    """The groups of a ``replica_groups`` value; text after it is ignored.

    Three forms: ``{{0,1},{2,3}}``; ``[2,2]<=[4]T(0)``, rows of a transposed iota; and
    ``mesh['a'=2,'b'=2] {'b'}``, a mesh of all devices and the axes that groups span. Empty braces
    give no groups, which means that all devices are one.

    Raises:
      ValueError: another form.
    """
    if text.startswith("{"):
        return _listed(text)
    if iota := re.match(r"\[([\d,]+)\]<=", text):
        rows = _iota(text[iota.end() :]).reshape(_ints(iota[1]))
        return tuple(tuple(row) for row in rows.tolist())
    if text.startswith("mesh["):
        return _mesh_groups(text)
    raise ValueError(f"unknown replica_groups in HLO text: {text[:80]}")


def _listed(text: str) -> Groups:
    listed = text[: closing_bracket(text, 0)]
    return tuple(tuple(_ints(group)) for group in re.findall(r"\{([\d,]+)\}", listed))


def _ints(text: str) -> list[int]:
    return [int(n) for n in text.split(",") if n]


def _iota(text: str) -> np.ndarray:
    """Device numbers of ``[4,2]T(1,0)``: an iota in these dimensions, transposed."""
    found = re.match(r"\[([\d,]+)\](?:T\(([\d,]+)\))?", text)
    if found is None:
        raise ValueError(f"unknown order of devices in HLO text: {text[:80]}")
    sizes = _ints(found[1])
    numbers = np.arange(np.prod(sizes)).reshape(sizes)
    return numbers.transpose(_ints(found[2])) if found[2] else numbers


def _mesh_groups(text: str) -> Groups:
    """Groups over some axes of a mesh, or over parts of axes (``'a':(2)4``: factor 4 after 2)."""
    # The devices' order follows, in brackets or not, if it is not 0, 1, 2, ...
    named = re.match(r"(mesh[^{]*)\{([^}]*)\}", text)
    if named is None:
        raise ValueError(f"unknown replica_groups in HLO text: {text[:80]}")
    axes = {name: int(n) for name, n in re.findall(r"'([^']*)'=(\d+)", named[1])}
    numbers = np.arange(np.prod(list(axes.values())))
    if order := re.search(r"device_ids=(\(.*)", named[1]):
        inside = order[1][1 : closing_bracket(order[1], 0) - 1]
        numbers = _iota(inside) if inside.startswith("[") else np.array(_ints(inside))
    refs = {
        name: (int(before or 1), int(size) if size else axes[name])
        for name, before, size in re.findall(r"'([^']*)'(?::\((\d+)\)(\d+))?", named[2])
    }
    sizes, grouped = [], []
    for name, n in axes.items():
        before, size = refs.get(name, (1, 1))
        sizes += [before, size, n // (before * size)]
        grouped.append(len(sizes) - 2)
    others = [i for i in range(len(sizes)) if i not in grouped]
    cells = numbers.reshape(sizes).transpose(others + grouped)
    width = int(np.prod([sizes[i] for i in grouped]))
    return tuple(tuple(row) for row in cells.reshape(-1, width).tolist())
