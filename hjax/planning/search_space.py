"""What a search tries: the sizes of a role's mesh axes, and what else it may choose."""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Literal

from hjax.models.cost_inputs import MeshSizes, ModelCounts, Offload, Workload
from hjax.models.remat import ATTENTION, FULL, NONE
from hjax.planning.cost import DeviceSet

Sharding = Literal["data", "fsdp", "hybrid"]


# What of a role may wait in the host's memory, trained or not.
OFFLOADS: dict[bool, tuple[Offload, ...]] = {
    True: ("none", "optimizer", "all"),
    False: ("none", "all"),
}


@dataclasses.dataclass(frozen=True)
class SearchSpace:
    """Which layouts are tried, and how a system generates.

    Attributes:
      pipes, tensors, contexts, experts: sizes of mesh axes; those that a model's shape does not
        divide by are left out. No ``pipes``: all divisors of the layers; no ``tensors``: all that
        divide a host's devices or a torus; no ``contexts``: powers of two within these.
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
      micro_rows: rows per replica and pass.
      micro_batches: by role, rows of a pass over all replicas (0: all of the update's) instead of
        ``micro_rows``.
      remat: policies of rematerialisation.
      waves: in how many parts, one after another, a replica decodes its sequences. hjax's engine
        has slots for a part of them instead, others following as these end; equally long ones come
        to the same.
      even: batches must divide over the replicas, as hjax's programs need.
      batches: further numbers of rows that must then divide.
    """

    pipes: tuple[int, ...] = ()
    tensors: tuple[int, ...] = ()
    contexts: tuple[int, ...] = ()
    experts: tuple[int, ...] = (1, 2, 4, 8)
    shardings: tuple[Sharding, ...] = ("data", "fsdp", "hybrid")
    fsdp: int = 0
    generate: Literal["any", "same", "inside"] = "any"
    zero: bool = False
    gather: Literal["shards", "all", "sent"] = "shards"
    kv_cache: bool = True
    native_decode: bool = False
    micro_rows: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    micro_batches: Mapping[str, int] = dataclasses.field(default_factory=dict)
    remat: tuple[str, ...] = (NONE, ATTENTION, FULL)
    waves: tuple[int, ...] = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
    even: bool = False
    batches: tuple[int, ...] = ()


def divisors(number: int) -> tuple[int, ...]:
    """All of a number, rising."""
    return tuple(n for n in range(1, number + 1) if number % n == 0)


def axis_sizes(
    place: DeviceSet, model: ModelCounts, work: Workload, space: SearchSpace
) -> Iterator[tuple[int, int, int]]:
    """(pipe, tensor, context) that are tried on ``place.devices``.

    Tensor and context axes lie inside a domain. A length is split only where it goes to a kernel
    by blocks, and not in a pipeline, which puts it together again.
    """
    inside = divisors(place.domain)
    pipes = space.pipes or divisors(math.gcd(place.devices, model.layers))
    tensors = (1,) if space.zero else space.tensors or inside
    contexts = space.contexts or tuple(n for n in inside if n & (n - 1) == 0)
    for pipe, tensor, context in itertools.product(pipes, tensors, contexts):
        fits = place.devices % (pipe * tensor * context) == 0
        fits = fits and tensor * context <= place.domain and model_divides(model, pipe, tensor)
        if fits and (context == 1 or (pipe == 1 and sequences_divide(place, work, context))):
            yield pipe, tensor, context


def sequences_divide(place: DeviceSet, work: Workload, context: int) -> bool:
    """Whether sequences divide over a context axis, and their attention does."""
    lengths = work.prompt_length % context == 0 and work.response_length % context == 0
    return lengths and work.length > place.numerics.whole_scores


def model_divides(model: ModelCounts, pipe: int, tensor: int) -> bool:
    """Whether layers, heads, MLP and vocabulary split evenly; few KV heads are replicated."""
    whole = model.layers % pipe == 0 and model.heads % tensor == 0
    whole = whole and model.mlp % tensor == 0 and model.vocab % tensor == 0
    return whole and (model.kv_heads % tensor == 0 or tensor % model.kv_heads == 0)


def training_meshes(
    place: DeviceSet, model: ModelCounts, work: Workload, space: SearchSpace
) -> Iterator[MeshSizes]:
    """Training meshes of a model on ``place.devices``: pipe * tensor * context * replicas."""
    for pipe, tensor, context in axis_sizes(place, model, work, space):
        rest = MeshSizes(context=context, pipe=pipe, tensor=tensor)
        replicas = place.devices // (pipe * tensor * context)
        yield from _replicated(place, model, space, rest, replicas)


def _replicated(
    place: DeviceSet, model: ModelCounts, space: SearchSpace, rest: MeshSizes, replicas: int
) -> Iterator[MeshSizes]:
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
    place: DeviceSet, model: ModelCounts, mesh: MeshSizes, space: SearchSpace
) -> Iterator[MeshSizes]:
    """The mesh with each legal p_g and t_g."""
    if space.generate == "same":
        sizes = [(mesh.pipe, mesh.tensor)]
    elif space.generate == "inside":
        tensors = space.tensors or divisors(place.domain)
        sizes = [(1, t) for t in tensors if place.domain % t == 0 and model_divides(model, 1, t)]
    else:
        sizes = [(p, t) for p in divisors(mesh.pipe) for t in divisors(mesh.tensor)]
    for pipe, tensor in sizes:
        if place.devices % (pipe * tensor) == 0:
            yield dataclasses.replace(mesh, generate_pipe=pipe, generate_tensor=tensor)
