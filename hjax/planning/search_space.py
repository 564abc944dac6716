"""The search space: sizes of a role's mesh axes, and its other options."""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Literal

from hjax.models.cost_inputs import MeshSizes, ModelCounts, Offload, Workload
from hjax.models.remat import ATTENTION, FULL, NONE
from hjax.planning.cost import DeviceSet

Sharding = Literal["data", "fsdp", "hybrid"]


# State that a role may offload to host memory, by whether it is trained.
OFFLOADS: dict[bool, tuple[Offload, ...]] = {
    True: ("none", "optimizer", "all"),
    False: ("none", "all"),
}


@dataclasses.dataclass(frozen=True)
class SearchSpace:
    """The layouts to try, and how a system generates.

    Attributes:
      pipes, tensors, contexts, experts: sizes of mesh axes; sizes that do not divide a model's
        shape are left out. Empty ``pipes``: all divisors of the layers; empty ``tensors``: all
        divisors of a host's or torus' devices; empty ``contexts``: the powers of two among these.
      shardings: use of the remaining devices: ``data`` replicates weights, ``fsdp`` shards them,
        ``hybrid`` shards them inside a domain and replicates across.
      fsdp: the only size of the fsdp axis; 0: as ``shardings`` say.
      generate: ``any`` divisor of the training sizes; ``same`` as in training; ``inside``: tensor
        sizes from ``tensors``, independent of training (weights are gathered whole first).
      zero: no tensor axis in training; ``tensors`` then apply to generation alone.
      gather: source of a transition's weights: ``shards`` (HybridFlow), ``all`` devices (ZeRO-3),
        or ``sent`` from another copy of the model.
      kv_cache: whether generation has a KV cache.
      native_decode: decoding by the training framework, not by an inference engine.
      micro_rows: micro-batch rows per replica.
      micro_batches: by role, micro-batch rows over all replicas (0: the whole batch), instead of
        ``micro_rows``.
      remat: rematerialisation policies.
      waves: numbers of parts in which a replica decodes its sequences, one after another. hjax's
        engine refills slots as sequences end (continuous batching); for sequences of equal length
        that is the same.
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
    """All divisors of a number, rising."""
    return tuple(n for n in range(1, number + 1) if number % n == 0)


def axis_sizes(
    place: DeviceSet, model: ModelCounts, work: Workload, space: SearchSpace
) -> Iterator[tuple[int, int, int]]:
    """Sizes (pipe, tensor, context) of mesh axes to try on ``place.devices``.

    Tensor and context axes lie inside a domain. The sequence is split only where attention is
    computed in blocks, and never in a pipeline, whose stages need whole sequences.
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
    """Whether prompts and responses, and their attention, divide over a context axis."""
    lengths = work.prompt_length % context == 0 and work.response_length % context == 0
    return lengths and work.length > place.numerics.score_matrix_length


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
    """The training mesh with each legal generation size p_g and t_g."""
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
