"""Every legal way to run one role on some devices, and the few worth keeping."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Literal

import numpy as np

from hjax.planning import cost, generation, memory
from hjax.planning.cost import Place
from hjax.planning.records import (
    Dataflow,
    Mesh,
    ModelCounts,
    Offload,
    Option,
    PlannedCall,
    Workload,
)

Sharding = Literal["data", "fsdp", "hybrid"]


@dataclasses.dataclass(frozen=True)
class SearchSpace:
    """Which layouts are tried, and how a system generates.

    Attributes:
      pipes, tensors, contexts, experts: sizes of mesh axes; those that a model's shape does not
        divide by are left out.
      shardings: what the rest of the devices do: ``data`` replicates weights, ``fsdp`` splits
        them, ``hybrid`` splits them inside a domain and replicates across.
      fsdp: this size of the fsdp axis alone; 0: what ``shardings`` say.
      generate: ``any`` divisor of the training sizes; ``same`` as in training; ``inside``: tensor
        sizes of ``tensors``, whatever the training sizes (weights are gathered whole first).
      zero: no tensor axis in training; ``tensors`` are then generation's alone.
      gather: weights of a transition: ``shards`` (HybridFlow), ``all`` devices' (ZeRO-3), or
        ``sent`` from another copy of the model.
      kv_cache: generation keeps keys and values.
      native_decode: decoding by the training framework, not by an engine made for it.
      micro_rows: rows per device and micro-batch of an update.
      rematerialise: whether activations are computed again.
      waves: in how many parts, one after another, a replica decodes its sequences; more than one
        is what hjax's generator does not do.
      even: batches must divide over the replicas, as hjax's programs need.
      batches: further numbers of rows that must then divide.
      micro_batch: rows of a micro-batch over all replicas (0: all of the update's), instead of
        ``micro_rows``; -1: free.
    """

    pipes: tuple[int, ...] = (1, 2, 4, 8, 16)
    tensors: tuple[int, ...] = (1, 2, 4, 8)
    contexts: tuple[int, ...] = (1,)
    experts: tuple[int, ...] = (1, 2, 4, 8)
    shardings: tuple[Sharding, ...] = ("data", "fsdp", "hybrid")
    fsdp: int = 0
    generate: Literal["any", "same", "inside"] = "any"
    zero: bool = False
    gather: Literal["shards", "all", "sent"] = "shards"
    kv_cache: bool = True
    native_decode: bool = False
    micro_rows: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    rematerialise: tuple[bool, ...] = (False, True)
    waves: tuple[int, ...] = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
    even: bool = False
    batches: tuple[int, ...] = ()
    micro_batch: int = -1


def divides(model: ModelCounts, pipe: int, tensor: int) -> bool:
    """Whether layers, heads, MLP and vocabulary split evenly; few KV heads are replicated."""
    whole = model.layers % pipe == 0 and model.heads % tensor == 0
    whole = whole and model.mlp % tensor == 0 and model.vocab % tensor == 0
    return whole and (model.kv_heads % tensor == 0 or tensor % model.kv_heads == 0)


def training_meshes(place: Place, model: ModelCounts, space: SearchSpace) -> Iterator[Mesh]:
    """Training meshes of a model on ``place.devices``: pipe * tensor * context * replicas, with
    tensor (and context) inside a domain."""
    for pipe in space.pipes:
        for tensor in (1,) if space.zero else space.tensors:
            for context in space.contexts:
                ways = pipe * tensor * context
                fits = place.devices % ways == 0 and tensor * context <= place.domain
                if fits and divides(model, pipe, tensor):
                    rest = Mesh(context=context, pipe=pipe, tensor=tensor)
                    yield from _replicated(place, model, space, rest, place.devices // ways)


def _replicated(
    place: Place, model: ModelCounts, space: SearchSpace, rest: Mesh, replicas: int
) -> Iterator[Mesh]:
    inside = max(1, place.domain // rest.devices)
    for expert in space.experts if model.experts else (1,):
        if replicas % expert or (model.experts and model.experts % expert):
            continue
        left = replicas // expert
        shards = {"data": 1, "fsdp": left, "hybrid": math.gcd(left, inside)}
        sizes = {space.fsdp} if space.fsdp else {shards[kind] for kind in space.shardings}
        for fsdp in sorted(sizes):
            if model.hidden % fsdp == 0 and left % fsdp == 0:
                yield dataclasses.replace(rest, data=left // fsdp, fsdp=fsdp, expert=expert)


def generation_meshes(
    place: Place, model: ModelCounts, mesh: Mesh, space: SearchSpace
) -> Iterator[Mesh]:
    """The mesh with each legal p_g and t_g."""
    if space.generate == "same":
        sizes = [(mesh.pipe, mesh.tensor)]
    elif space.generate == "inside":
        sizes = [(1, t) for t in space.tensors if place.domain % t == 0 and divides(model, 1, t)]
    else:
        pipes = [p for p in space.pipes if mesh.pipe % p == 0]
        tensors = [t for t in space.tensors if mesh.tensor % t == 0]
        sizes = [(p, t) for p in pipes for t in tensors]
    for pipe, tensor in sizes:
        if place.devices % (pipe * tensor) == 0:
            yield dataclasses.replace(mesh, generate_pipe=pipe, generate_tensor=tensor)


def role_options(
    place: Place,
    model: ModelCounts,
    dataflow: Dataflow,
    role: str,
    work: Workload,
    space: SearchSpace,
    offload: Offload = "none",
) -> list[Option]:
    """Every option of a role, those that do not fit its devices alone left out."""
    calls = {kind: dataflow.of(role, kind) for kind in ("generate", "forward", "update")}
    limit = memory.capacity(place)
    found: list[Option] = []
    for mesh in training_meshes(place, model, space):
        rows_of = (*calls["forward"], *calls["update"])
        if space.even and not batches_divide(rows_of, mesh, work, space.batches):
            continue
        held = memory.resident(place, model, mesh, bool(calls["update"]), offload)
        if held > limit:
            continue
        back = [
            memory.fetched(place, model, mesh, kind == "update", offload) if calls[kind] else 0.0
            for kind in ("generate", "forward", "update")
        ]
        waits = [cost.offload_seconds(place, n) for n in back]
        scoring = _forward(place, model, mesh, calls["forward"], work)
        updates = _updates(place, model, mesh, calls["update"], work, space)
        rollouts = _rollouts(place, model, mesh, calls["generate"], work, space)
        found += [
            Option(
                laid_out,
                (generated + waits[0], scoring[0] + waits[1], learned + waits[2]),
                moved,
                held,
                (generate_bytes + back[0], scoring[1] + back[1], update_bytes + back[2]),
                micro_rows,
                rematerialise,
                waves,
            )
            for learned, update_bytes, micro_rows, rematerialise in updates
            for laid_out, generated, moved, generate_bytes, waves in rollouts
            if held + max(scoring[1] + back[1], update_bytes + back[2], generate_bytes + back[0])
            <= limit
        ]
    return found


def batches_divide(
    calls: Sequence[PlannedCall], mesh: Mesh, work: Workload, batches: Sequence[int] = ()
) -> bool:
    """Whether the rows of these calls, and ``batches``, divide over the replicas."""
    rows = [round(c.rows * work.sequences) for c in calls]
    return all(n % mesh.replicas == 0 for n in (*rows, *batches))


def prompts_divide(mesh: Mesh, work: Workload) -> bool:
    """Whether the prompts of a step divide over the replicas that generate."""
    replicas = mesh.devices // (mesh.generate_pipe * mesh.generate_tensor)
    return round(work.sequences / work.samples) % replicas == 0


def _forward(
    place: Place, model: ModelCounts, mesh: Mesh, calls: Sequence[PlannedCall], work: Workload
) -> tuple[float, float]:
    """(seconds, transient bytes) of a role's forwards."""
    seconds = transient = 0.0
    for rows, count in _counted(calls, work):
        length = work.row_tokens(place.numerics.shared_prompt)
        once = cost.forward_seconds(place, model, mesh, rows, length)
        seconds += count * (once + place.constants.dispatch)
        needed = memory.forward_transient(place, model, mesh, rows, work)
        transient = max(transient, needed)
    return seconds, transient


def _updates(
    place: Place,
    model: ModelCounts,
    mesh: Mesh,
    calls: Sequence[PlannedCall],
    work: Workload,
    space: SearchSpace,
) -> list[tuple[float, float, int, bool]]:
    """(seconds, transient bytes, ``micro_rows``, ``rematerialise``) of each way to update."""
    if not calls:
        return [(0.0, 0.0, 0, False)]
    counted = _counted(calls, work)
    local = max(math.ceil(rows / mesh.replicas) for rows, _ in counted)
    found = []
    tried: tuple[int, ...] = space.micro_rows
    if space.micro_batch >= 0:
        tried = (math.ceil(space.micro_batch / mesh.replicas) or local,)
    for micro_rows in tried:
        if micro_rows > local and micro_rows != tried[0]:
            continue
        for rematerialise in space.rematerialise:
            length = work.row_tokens(place.numerics.shared_prompt)
            seconds, needed = len(calls) * place.constants.dispatch, 0.0
            for n, k in counted:
                how = micro_rows, rematerialise
                seconds += k * cost.update_seconds(place, model, mesh, n, length, *how)
                held = memory.update_transient(place, model, mesh, n, work, *how)
                needed = max(needed, held)
            found.append((seconds, needed, micro_rows, rematerialise))
    return found


def _rollouts(
    place: Place,
    model: ModelCounts,
    mesh: Mesh,
    calls: Sequence[PlannedCall],
    work: Workload,
    space: SearchSpace,
) -> list[tuple[Mesh, float, float, float, int]]:
    """(mesh, seconds, those of the transition, transient bytes, waves) of each way."""
    if not calls:
        return [(mesh, 0.0, 0.0, 0.0, 0)]
    found = []
    counted = _counted(calls, work)
    slowness = place.constants.native_decode if space.native_decode else 1.0
    for laid_out in generation_meshes(place, model, mesh, space):
        if space.even and not prompts_divide(laid_out, work):
            continue
        moved = _transition(place, model, laid_out, space)
        started = len(calls) * (place.constants.dispatch + place.constants.rollout)
        if not space.kv_cache:
            seconds = sum(
                k * generation.uncached_seconds(place, model, laid_out, n, work) for n, k in counted
            )
            needed = memory.generation_transient(place, model, laid_out, 0, work)
            found.append((laid_out, seconds + moved + started, moved, needed, 1))
            continue
        prefill = sum(
            k * generation.prefill_seconds(place, model, laid_out, n, work) for n, k in counted
        )
        decoders = [(generation.decoding(place, model, laid_out, n, work), k) for n, k in counted]
        most = max(d.rows for d, _ in decoders)
        for waves in space.waves:
            if waves > most:
                break
            seconds = prefill + slowness * sum(k * d.seconds(waves) for d, k in decoders)
            rows = math.ceil(most / waves)
            needed = memory.generation_transient(place, model, laid_out, rows, work)
            found.append((laid_out, seconds + moved + started, moved, needed, waves))
    return found


def _transition(place: Place, model: ModelCounts, mesh: Mesh, space: SearchSpace) -> float:
    if space.gather == "all":
        whole = model.parameters * place.numerics.compute
        return cost.all_gather(place, whole, place.devices)
    if space.gather == "sent":
        return cost.transfer(place, model)
    if space.generate == "same":
        return 0.0
    return generation.transition_seconds(place, model, mesh)


def _counted(calls: Sequence[PlannedCall], work: Workload) -> list[tuple[int, int]]:
    """(rows, how many calls have so many)."""
    rows = [max(1, round(c.rows * work.sequences)) for c in calls]
    return [(n, rows.count(n)) for n in dict.fromkeys(rows)]


def vectors(options: Sequence[Option]) -> np.ndarray:
    """float64 [options, 5]: seconds per stage, resident, transient."""
    rows = [(*o.seconds, o.resident, o.transient) for o in options]
    return np.array(rows, np.float64).reshape(-1, 5)


def front(points: np.ndarray) -> np.ndarray:
    """Indices of the rows that no other row dominates (is at most as large everywhere); of equal
    rows one. ``points`` float64 [n, k]."""
    order = np.argsort(points.sum(axis=1), kind="stable")
    # Columns are contiguous, and what is left is compacted: the loop's cost is these comparisons.
    rest = np.ascontiguousarray(points[order].T)
    kept: list[int] = []
    while order.size:
        kept.append(int(order[0]))  # the smallest sum cannot be dominated by what is left
        better = (rest < rest[:, :1]).any(axis=0)
        order, rest = order[better], rest[:, better]
    return np.array(sorted(kept), int)
