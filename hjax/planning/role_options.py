"""Options of one role on some devices: every legal layout and setting, and their Pareto front."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal, TypeVar

import numpy as np

from hjax.models.cost_inputs import MeshSizes, ModelCounts, Offload, Workload
from hjax.models.remat import NONE
from hjax.planning import cost, generation_cost
from hjax.planning.cost import DeviceSet
from hjax.planning.generation_cost import decoding_cost, prefill_seconds, uncached_seconds
from hjax.planning.plan_types import Dataflow, PlannedCall, RoleOption
from hjax.planning.search_space import OFFLOADS, SearchSpace, generation_meshes, training_meshes
from hjax.workers.memory import DecodeBatch
from hjax.workers.micro_batching import MICRO_BATCHES_PER_STAGE


def role_options(
    place: DeviceSet,
    model: ModelCounts,
    dataflow: Dataflow,
    role: str,
    work: Workload,
    space: SearchSpace,
    offload: Offload | Literal["any"] = "none",
    every: bool = False,
) -> list[RoleOption]:
    """The options of a role that fit into its devices' memory when it runs alone.

    Args:
      offload: its state in host memory; ``any``: every choice is tried.
      every: also options that another of the same mesh dominates.
    """
    calls = {kind: dataflow.calls_of(role, kind) for kind in ("generate", "forward", "update")}
    here = _RoleOnDevices(place, model, role, calls, work, space)
    limit = place.capacity
    trained = bool(calls["update"])
    offloads = OFFLOADS[trained] if offload == "any" else (offload,)
    found: list[RoleOption] = []
    for mesh in training_meshes(place, model, work, space):
        rows_of = (*calls["forward"], *calls["update"])
        if space.even and not batches_divide(rows_of, mesh, work, space.batches):
            continue
        memory = place.memory(model, mesh)
        kept = {what: memory.resident(trained, what) for what in offloads}
        if min(kept.values()) > limit:
            continue
        passes, rollouts = here.passes(mesh), here.rollouts(mesh)
        if not every:
            passes = _non_dominated(passes, lambda p: (*p.seconds, *p.bytes))
            rollouts = _non_dominated(rollouts, lambda r: (r.seconds, r.bytes))
        for what in offloads:
            back = [
                memory.fetched_from_host(kind == "update", what) if called else 0.0
                for kind, called in calls.items()
            ]
            waits = [cost.offload_seconds(place, n) for n in back]
            for taken, rollout in itertools.product(passes, rollouts):
                option = RoleOption(
                    rollout.mesh,
                    (
                        rollout.seconds + waits[0],
                        taken.seconds[0] + waits[1],
                        taken.seconds[1] + waits[2],
                    ),
                    rollout.moved,
                    kept[what],
                    (rollout.bytes + back[0], taken.bytes[0] + back[1], taken.bytes[1]),
                    taken.rows,
                    taken.remat,
                    rollout.waves,
                    what,
                    back[2],
                )
                if option.resident + option.transient <= limit:
                    found.append(option)
    return found


@dataclasses.dataclass(frozen=True)
class _Passes:
    """Micro-batching of a role's forwards and updates, and its cost.

    Attributes:
      rows: micro-batch rows per replica.
      seconds: of its forwards, of its updates.
      bytes: transient bytes of each.
    """

    rows: int
    remat: str
    seconds: tuple[float, float]
    bytes: tuple[float, float]


@dataclasses.dataclass(frozen=True)
class _Rollouts:
    """Generation of a role in one layout, and its cost; ``moved``: seconds of its transitions."""

    mesh: MeshSizes
    seconds: float = 0.0
    moved: float = 0.0
    bytes: float = 0.0
    waves: int = 0


_Way = TypeVar("_Way")


def _non_dominated(ways: list[_Way], costs: Callable[[_Way], tuple[float, ...]]) -> list[_Way]:
    """The Pareto front of some options: those that no other dominates."""
    if len(ways) < 2:
        return ways
    return [ways[i] for i in pareto_front(np.array([costs(way) for way in ways]))]


def batches_divide(
    calls: Sequence[PlannedCall], mesh: MeshSizes, work: Workload, batches: Sequence[int] = ()
) -> bool:
    """Whether the rows of these calls, and ``batches``, divide over the replicas."""
    rows = [round(c.rows * work.sequences) for c in calls]
    return all(n % mesh.replicas == 0 for n in (*rows, *batches))


def prompts_divide(mesh: MeshSizes, work: Workload) -> bool:
    """Whether the prompts of a step divide over the generating replicas, and in a pipeline over
    the micro-batches of each."""
    parts = mesh.generation_replicas * mesh.generate_pipe
    return round(work.sequences / work.samples) % parts == 0


@dataclasses.dataclass(frozen=True)
class _RoleOnDevices:
    """A role on some devices, and its calls by kind (``generate``, ``forward``, ``update``)."""

    place: DeviceSet
    model: ModelCounts
    role: str
    calls: Mapping[str, Sequence[PlannedCall]]
    work: Workload
    space: SearchSpace

    def passes(self, mesh: MeshSizes) -> list[_Passes]:
        """Every micro-batching of its forwards and updates."""
        learns = self.calls["update"]
        if not learns and (not self.calls["forward"] or self.place.numerics.forward_tokens):
            seconds, needed = self._forward(mesh, 0)
            return [_Passes(0, NONE, (seconds, 0.0), (needed, 0.0))]
        found = []
        at_once = self.space.micro_batches.get(self.role) == 0 and mesh.pipe == 1  # forwards too
        for rows in self._rows_tried(mesh, learns or self.calls["forward"]):
            scoring = self._forward(mesh, 0 if at_once else rows)
            for remat in self.space.remat if learns else (NONE,):
                learned = self._updates(mesh, rows, remat)
                taken, most = (scoring[0], learned[0]), (scoring[1], learned[1])
                found.append(_Passes(rows, remat, taken, most))
        return found

    def _rows_tried(self, mesh: MeshSizes, calls: Sequence[PlannedCall]) -> list[int]:
        """Micro-batch rows per replica to try; with ``space.even`` those dividing all batches."""
        space = self.space
        counted = [n for n, _ in _row_counts(calls, self.work)]
        local = max(math.ceil(rows / mesh.replicas) for rows in counted)
        if self.role in space.micro_batches:
            fixed = space.micro_batches[self.role]
            least = math.ceil(local * mesh.replicas / fixed) if fixed else 1
            if not fixed and mesh.pipe > 1:
                least = MICRO_BATCHES_PER_STAGE * mesh.pipe
            return [local // next((n for n in range(least, local) if local % n == 0), local)]
        tried = [n for n in space.micro_rows if n <= local] or [space.micro_rows[0]]
        if not space.even:
            return tried
        shares = [rows // mesh.replicas for rows in counted]
        whole = [n for n in tried if all(share % n == 0 for share in shares)]
        return sorted({*whole, math.gcd(*shares)} if max(tried) < local else {*whole}) or [1]

    def _forward(self, mesh: MeshSizes, micro_rows: int) -> tuple[float, float]:
        """(seconds, transient bytes) of its forwards."""
        place, model, work = self.place, self.model, self.work
        seconds = transient = 0.0
        memory = place.memory(model, mesh)
        length = work.row_tokens(place.numerics.shared_prompt, micro_rows)
        for rows, count in _row_counts(self.calls["forward"], work):
            once = cost.forward_seconds(place, model, mesh, rows, length, micro_rows)
            seconds += count * (once + place.constants.dispatch)
            micro = cost.forward_rows(place, rows, mesh, length, micro_rows)
            transient = max(transient, memory.forward(memory.rows(micro, work)))
        return seconds, transient

    def _updates(self, mesh: MeshSizes, rows: int, remat: str) -> tuple[float, float]:
        """(seconds, transient bytes) of its updates in micro-batches of ``rows`` per replica."""
        place, model, work, calls = self.place, self.model, self.work, self.calls["update"]
        seconds, transient = len(calls) * place.constants.dispatch, 0.0
        memory = place.memory(model, mesh)
        length = work.row_tokens(place.numerics.shared_prompt, rows)
        for batch, count in _row_counts(calls, work):
            seconds += count * cost.update_seconds(place, model, mesh, batch, length, rows, remat)
            one = memory.rows(rows, work, cost.micro_batches(batch, mesh, rows))
            transient = max(transient, memory.update(one, remat))
        return seconds, transient

    def rollouts(self, training: MeshSizes) -> list[_Rollouts]:
        """Every way to generate. hjax gathers the weights in every call, other systems once."""
        calls, place, model = self.calls["generate"], self.place, self.model
        work, space = self.work, self.space
        if not calls:
            return [_Rollouts(training)]
        found = []
        counted = _row_counts(calls, work)
        slowness = place.constants.native_decode if space.native_decode else 1.0
        for mesh in generation_meshes(place, model, training, space):
            if space.even and not prompts_divide(mesh, work):
                continue
            memory = place.memory(model, mesh)
            moved = self._transition(mesh) * (len(calls) if space.gather == "shards" else 1)
            started = len(calls) * (place.constants.dispatch + place.constants.rollout)
            if not space.kv_cache:
                seconds = sum(k * uncached_seconds(place, model, mesh, n, work) for n, k in counted)
                needed = memory.generation(DecodeBatch(0, 1), work)
                found.append(_Rollouts(mesh, seconds + moved + started, moved, needed, 1))
                continue
            prefill = sum(k * prefill_seconds(place, model, mesh, n, work) for n, k in counted)
            decoders = [(decoding_cost(place, model, mesh, n, work), k) for n, k in counted]
            for waves, parts in self._parts(mesh, [rows for rows, _ in counted]):
                seconds = prefill + slowness * sum(k * d.seconds(waves) for d, k in decoders)
                needed = max(memory.generation(part, work) for part in parts)
                found.append(_Rollouts(mesh, seconds + moved + started, moved, needed, waves))
        return found

    def _parts(
        self, mesh: MeshSizes, counted: Sequence[int]
    ) -> Iterator[tuple[int, list[DecodeBatch]]]:
        """(waves, for calls of each number of rows the batch that a replica decodes at a time)."""
        place, work = self.place, self.work
        replicas = mesh.generation_replicas
        local = {rows: math.ceil(rows / replicas) for rows in counted}
        prompts = round(work.sequences / work.samples)
        done = set()
        for waves in self.space.waves:
            if waves > max(local.values()):
                return
            if not place.numerics.hjax_programs:
                samples = [work.samples if n % work.samples == 0 else 1 for n in local.values()]
                pairs = zip(local.values(), samples, strict=True)
                yield waves, [DecodeBatch(math.ceil(n / waves / s), s) for n, s in pairs]
                continue
            groups = slot_groups(mesh, math.ceil(prompts / replicas), waves)
            if groups in done:
                continue
            done.add(groups)
            continuous = groups < math.ceil(prompts / replicas)
            found = []
            for rows, here in local.items():
                each = 1 if rows == prompts else work.samples
                whole = math.ceil(here / each)
                at_a_time = min(whole, groups * work.samples // each)
                by_slots = continuous or not place.pool.shape
                found.append(DecodeBatch(at_a_time, each, by_slots, at_a_time < whole))
            yield math.ceil(prompts / replicas / groups), found

    def _transition(self, mesh: MeshSizes) -> float:
        """Seconds of one transition of the weights to the generation layout."""
        place, model = self.place, self.model
        if self.space.gather == "all":
            return cost.all_gather(place, model.parameters * place.numerics.compute, place.devices)
        if self.space.gather == "sent":
            return cost.weight_sync_seconds(place, model)
        same = self.space.generate == "same"
        return 0.0 if same else generation_cost.transition_seconds(place, model, mesh)


def slot_groups(mesh: MeshSizes, prompts: int, waves: int) -> int:
    """How many of a replica's ``prompts`` have slots at a time with so many waves; a multiple of a
    pipeline's micro-batches unless all have."""
    each = mesh.generate_pipe
    return min(prompts, math.ceil(math.ceil(prompts / waves) / each) * each)


def rollout_slots(option: RoleOption, work: Workload) -> int:
    """``rollout.slots`` of an option: sequences of all replicas at a time; 0: all of a step's."""
    if option.waves < 2:
        return 0
    mesh = option.mesh
    replicas = mesh.generation_replicas
    prompts = math.ceil(work.sequences / work.samples / replicas)
    return slot_groups(mesh, prompts, option.waves) * work.samples * replicas


def _row_counts(calls: Sequence[PlannedCall], work: Workload) -> list[tuple[int, int]]:
    """(rows, number of calls with so many rows)."""
    rows = [max(1, round(c.rows * work.sequences)) for c in calls]
    return [(n, rows.count(n)) for n in dict.fromkeys(rows)]


# Columns of ``cost_vectors``: how many add up over the models of a set (of the others the largest
# counts), and how many there are.
SUMMED, COLUMNS = 5, 7


def cost_vectors(options: Sequence[RoleOption], offloads: bool = True) -> np.ndarray:
    """float64 [options, 7]: seconds per stage (3), bytes: resident, ``RoleOption.learning``,
    transient before learning, transient in learning.

    Without any offload there are no learning bytes, and transients share the first column.
    """
    rows = [
        (*o.seconds, o.resident, o.learning, max(o.transients[:2]), o.transients[2])
        if offloads
        else (*o.seconds, o.resident, 0.0, max(o.transients), 0.0)
        for o in options
    ]
    return np.array(rows, np.float64).reshape(-1, COLUMNS)


def peak_of(points: np.ndarray) -> np.ndarray:
    """float64 [...] of cost vectors [..., 7]: peak bytes per device."""
    return points[..., 3] + np.maximum(points[..., 5], points[..., 4] + points[..., 6])


def pareto_front(points: np.ndarray) -> np.ndarray:
    """Indices of the Pareto front of ``points``, float64 [n, k]: the rows that no other row
    dominates (is at most as large everywhere); one of equal rows."""
    order = np.argsort(points.sum(axis=1), kind="stable")
    # The loop's cost is its comparisons, so columns are contiguous and the rest is compacted.
    rest = np.ascontiguousarray(points[order].T)
    kept: list[int] = []
    while order.size:
        kept.append(int(order[0]))  # no remaining row dominates the one with the smallest sum
        better = (rest < rest[:, :1]).any(axis=0)
        order, rest = order[better], rest[:, better]
    return np.array(sorted(kept), int)
