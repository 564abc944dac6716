"""The cost model of a step in seconds: one function per term, with its formula in the docstring.

Everything is per device unless stated otherwise. Bandwidths and FLOP/s are the catalogue's figures
times the constants' efficiencies.
"""

import dataclasses
import functools
import math

from hjax.kernels.verdict import CUDNN_ATTENTION, known_or_assumed
from hjax.models.cost_inputs import MeshSizes, ModelCounts, Numerics
from hjax.models.remat import ATTENTION, NONE, PRODUCTS
from hjax.planning.constants import Constants
from hjax.planning.hardware import link_contention
from hjax.planning.plan_types import DevicePool
from hjax.workers.memory import MemoryEstimate, ProgramOptions


@dataclasses.dataclass(frozen=True, eq=False)
class DeviceSet:
    """Devices of one pool that one set of models uses alone.

    Attributes:
      pool, devices: the pool, and how many of its devices.
      constants: efficiencies.
      numerics: bytes per element.
    """

    pool: DevicePool
    devices: int
    constants: Constants = Constants()
    numerics: Numerics = Numerics()

    @functools.cached_property
    def speedup(self) -> float:
        """How many times faster a device is than with all of the pool's devices busy."""
        return self.pool.speedup(self.devices)

    @functools.cached_property
    def domain(self) -> int:
        """Number of devices that fast links join."""
        return min(self.devices, self.pool.domain)

    @functools.cached_property
    def flops(self) -> float:
        """FLOP/s of matrix products in the compute dtype."""
        return self.pool.device.flops[self.numerics.dtype] * self.constants.matmul * self.speedup

    @functools.cached_property
    def bandwidth(self) -> float:
        """Bytes/s of memory."""
        return self.pool.device.bandwidth * self.constants.memory * self.speedup

    @functools.cached_property
    def capacity(self) -> float:
        """Bytes of a device that a plan may use: memory * usable - workspace."""
        return self.pool.device.memory * self.constants.usable - self.constants.workspace

    @functools.cached_property
    def _programs(self) -> ProgramOptions:
        pool, own = self.pool, self.numerics.hjax_programs
        cudnn = own and not pool.shape and not pool.shares_cores and self.numerics.compute == 2
        forms = known_or_assumed("tpu" if pool.shape else "gpu", pool.device.name).forms
        cudnn = cudnn and CUDNN_ATTENTION in forms
        return ProgramOptions(
            self.numerics, own and bool(pool.shape), cudnn, self.constants.logits, forms
        )

    def memory(self, model: ModelCounts, mesh: MeshSizes) -> MemoryEstimate:
        """Bytes that a role keeps and needs on a device."""
        return MemoryEstimate.from_counts(self._programs, model, mesh)


# Collectives


def rings_within_domains(place: DeviceSet, size: int, stride: int) -> bool:
    """Whether each ring of ``size`` devices, ``stride`` ranks apart, lies within one domain.

    It does if there is one domain, or if rings fill domains evenly."""
    return place.devices <= place.domain or place.domain % (size * stride) == 0


@functools.lru_cache(maxsize=1 << 16)
def ring_bandwidth(place: DeviceSet, size: int, stride: int) -> float:
    """Bytes/s that each member of a ring of ``size`` devices, ``stride`` ranks apart, sends.

    Inside a domain of D devices it is the link bandwidth. Across domains, D / h rings share the
    network of a domain's hosts, where h = max(1, D // stride) members of a ring are in one domain:
    ``network_of`` a host * hosts * h / D. On a torus it is the link bandwidth divided by the steps
    that share the busiest link (``hardware.link_contention``).
    """
    device, constants = place.pool.device, place.constants
    link = device.link * constants.link
    if rings_within_domains(place, size, stride):
        return link / link_contention(place.pool, place.devices, size, stride)
    inside = max(1, place.domain // stride)
    hosts = max(1, place.domain // place.pool.per_host)
    network = device.network_of(place.pool.per_host) * constants.network
    return min(link, network * hosts * inside / place.domain)


@functools.lru_cache(maxsize=1 << 16)
def latency(place: DeviceSet, size: int, stride: int) -> float:
    """Seconds of a small collective: latency * log2(size), the network's if it leaves a domain."""
    constants, inside = place.constants, rings_within_domains(place, size, stride)
    once = constants.link_latency if inside else constants.network_latency
    return once * math.ceil(math.log2(size))


def all_gather(place: DeviceSet, whole_bytes: float, size: int, stride: int = 1) -> float:
    """(size - 1) / size * bytes / ring bandwidth + latency. A reduce-scatter costs the same."""
    if size == 1 or not whole_bytes:
        return 0.0
    moved = whole_bytes * (size - 1) / size
    return moved / ring_bandwidth(place, size, stride) + latency(place, size, stride)


def all_reduce(place: DeviceSet, array_bytes: float, size: int, stride: int = 1) -> float:
    """A reduce-scatter and an all-gather: 2 * all_gather."""
    return 2 * all_gather(place, array_bytes, size, stride)


def all_to_all(place: DeviceSet, local_bytes: float, size: int, stride: int = 1) -> float:
    """(size - 1) / size * local bytes / ring bandwidth + latency."""
    return all_gather(place, local_bytes, size, stride)


def point_to_point(place: DeviceSet, array_bytes: float, stride: int) -> float:
    """Bytes / bandwidth to a device ``stride`` ranks away + latency."""
    return array_bytes / ring_bandwidth(place, 2, stride) + latency(place, 2, stride)


def weight_sync_seconds(place: DeviceSet, model: ModelCounts) -> float:
    """Weight sync from another set's devices: weight bytes / network bandwidth of a host.

    Receiving hosts pass on what they have, so the whole model crosses each host's network once.
    Inside one domain the link bandwidth counts instead.
    """
    array = model.parameters * place.numerics.compute
    device, constants = place.pool.device, place.constants
    outside = place.devices >= place.pool.domain
    network = device.network_of(place.pool.per_host) * constants.network
    wire = network if outside else device.link * constants.link
    return array / wire + constants.network_latency


def offload_seconds(place: DeviceSet, fetched_bytes: float) -> float:
    """Offload: to the device and back over the host's bus, 2 * bytes / ``host``."""
    return 2 * fetched_bytes / place.constants.host


# Counting


def forward_flops(model: ModelCounts, rows: float, length: float) -> float:
    """2 * active parameters * tokens + 4 * width * layers * tokens * length / 2 (causal)."""
    return 2.0 * model.active_parameters * rows * length + attention_flops(model, rows, length)


def attention_flops(model: ModelCounts, rows: float, length: float) -> float:
    """FLOPs of attention scores and values, forward: 4 * width * layers * tokens * length / 2."""
    return 2.0 * model.attention_width * model.layers * rows * length * length


def weight_bytes(place: DeviceSet, model: ModelCounts, mesh: MeshSizes, element: float) -> float:
    """Bytes of a device's weight shard without FSDP, of ``element`` bytes per weight."""
    return element * model.parameters_per_device(mesh, not place.numerics.hjax_programs)


# Training and inference


@dataclasses.dataclass(frozen=True)
class StageSeconds:
    """Seconds of one micro-batch on one pipeline stage.

    Attributes:
      compute: matrix products and attention.
      exchange: collectives of activations, never overlapped.
      weights: FSDP's all-gathers and, in a backward pass, reduce-scatters.
    """

    compute: float
    exchange: float
    weights: float

    def total(self, overlap: float) -> float:
        """compute + exchange + the weights' collectives that do not overlap with compute."""
        return self.compute + self.exchange + max(0.0, self.weights - overlap * self.compute)


def tensor_exchange(
    place: DeviceSet, model: ModelCounts, mesh: MeshSizes, tokens: float, times: int
) -> float:
    """``times`` all-reduces of tokens * hidden per layer of the stage over the tensor axis."""
    if mesh.tensor == 1:
        return 0.0
    array = tokens * model.hidden * place.numerics.compute
    return times * model.layers / mesh.pipe * all_reduce(place, array, mesh.tensor)


def context_exchange(
    place: DeviceSet, model: ModelCounts, mesh: MeshSizes, tokens: float, times: int
) -> float:
    """``times`` all-gathers of the keys and values of a layer over the context axis.

    ``tokens`` are a device's; KV heads are split over the tensor axis.
    """
    if mesh.context == 1:
        return 0.0
    cache = model.cache_elements / min(mesh.tensor, model.kv_heads) * place.numerics.compute
    whole = tokens * mesh.context * cache
    layers = model.layers / mesh.pipe
    return times * layers * all_gather(place, whole, mesh.context, mesh.stride("context"))


def expert_exchange(
    place: DeviceSet, model: ModelCounts, mesh: MeshSizes, tokens: float, times: int
) -> float:
    """``times`` all-to-alls of tokens * experts_per_token * hidden per layer."""
    if mesh.expert == 1:
        return 0.0
    array = tokens * model.experts_per_token * model.hidden * place.numerics.compute / mesh.tensor
    layers = model.layers / mesh.pipe
    return times * layers * all_to_all(place, array, mesh.expert, mesh.stride("expert"))


def stage_seconds(
    place: DeviceSet,
    model: ModelCounts,
    mesh: MeshSizes,
    rows: float,
    length: float,
    backward: bool,
    remat: str = NONE,
) -> StageSeconds:
    """One micro-batch of ``rows`` sequences on one pipeline stage.

    FLOPs are multiples of ``forward_flops`` / (tensor * pipe * context): forward 1; backward 2 (1
    for frozen weights, which have no gradients) times ``backward``; rematerialisation 1 more, also
    in hjax's pipelines. Policy ``attention`` keeps attention outputs, so it does not repeat them in
    rows longer than ``score_matrix_length``; ``products`` repeats at most attention. The share
    ``unsplit`` is not divided by tensor. Each layer and forward also takes ``layer_pass`` and
    ``score`` * rows * heads * length^2 / (tensor * context). Exchanges per layer: 2 forward, 2
    backward, 2 remat.
    FSDP: one all-gather of the weights forward; one more and a reduce-scatter of gradients
    backward; each layer by layer, with ``gather`` seconds beside the ring's.
    """
    constants, layers = place.constants, model.layers / mesh.pipe
    again = backward and (remat != NONE or (place.numerics.hjax_programs and mesh.pipe > 1))
    forwards = 1 + (1 + model.learned_share) * constants.backward * backward + again
    share = constants.unsplit + (1 - constants.unsplit) / mesh.tensor
    flops = forward_flops(model, rows, length)
    if again and remat in (ATTENTION, PRODUCTS) and mesh.pipe == 1:
        scores = attention_flops(model, rows, length)
        if remat == PRODUCTS:
            flops -= (flops - scores) / forwards
        if length > place.numerics.score_matrix_length:
            flops -= scores / forwards
    products = share * flops / (mesh.pipe * mesh.context) / place.flops
    scores = rows * model.heads * length**2 / mesh.tensor / mesh.context
    scores *= constants.score / place.speedup
    compute = forwards * (products + layers * (scores + constants.layer_pass))
    tokens = rows * length / mesh.context
    times = 2 * (1 + backward + again)
    exchange = tensor_exchange(place, model, mesh, tokens, times)
    exchange += context_exchange(place, model, mesh, tokens, times // 2)
    exchange += expert_exchange(place, model, mesh, tokens, times)
    if mesh.pipe > 1:
        boundary = tokens * model.hidden * place.numerics.compute
        exchange += (1 + backward) * point_to_point(place, boundary, mesh.stride("pipe"))
    weights = 0.0
    if mesh.fsdp > 1:
        gather = weight_bytes(place, model, mesh, place.numerics.compute)
        stride = mesh.stride("fsdp")
        weights = (1 + backward) * all_gather(place, gather, mesh.fsdp, stride)
        starts = 1 + 2 * backward  # collectives per layer; the other terms count one layer's
        weights += starts * (layers - 1) * latency(place, mesh.fsdp, stride)
        weights += starts * layers * constants.gather
        if backward:
            element = place.numerics.gradients * model.learned_share
            gradients = weight_bytes(place, model, mesh, element)
            weights += all_gather(place, gradients, mesh.fsdp, stride)
    return StageSeconds(compute, exchange, weights)


def micro_batches(rows: float, mesh: MeshSizes, micro_rows: int) -> int:
    """Micro-batches per replica (gradient accumulation steps of an update)."""
    return math.ceil(math.ceil(rows / mesh.replicas) / micro_rows)


def pipeline_stage_times(pipe: int, micro_batches: int) -> float:
    """Stage times of a pipeline including its bubble: micro-batches + pipe - 1."""
    return micro_batches + pipe - 1


def gradient_exchange(place: DeviceSet, model: ModelCounts, mesh: MeshSizes) -> float:
    """All-reduce of gradients over the data and context axes, once per update; gradients of weights
    outside experts are also reduced over the expert axis."""
    element = place.numerics.gradients * model.learned_share / mesh.fsdp
    experts = model.layers * model.layer_expert * element / (mesh.expert * mesh.pipe * mesh.tensor)
    others = weight_bytes(place, model, mesh, element) - experts
    seconds = all_reduce(place, others, mesh.data * mesh.expert, mesh.stride("expert"))
    seconds += all_reduce(place, experts, mesh.data, mesh.stride("data"))
    return seconds + all_reduce(place, others + experts, mesh.context, mesh.stride("context"))


def optimizer_seconds(place: DeviceSet, model: ModelCounts, mesh: MeshSizes) -> float:
    """Optimizer: read gradients, read and write weights and state; bytes / memory bandwidth."""
    numerics = place.numerics
    touched = numerics.gradients + 2 * (numerics.weights + numerics.optimizer)
    touched *= model.learned_share
    return weight_bytes(place, model, mesh, touched) / mesh.fsdp / place.bandwidth


def update_seconds(
    place: DeviceSet,
    model: ModelCounts,
    mesh: MeshSizes,
    rows: float,
    length: float,
    micro_rows: int,
    remat: str,
) -> float:
    """One optimizer step on ``rows`` sequences.

    (m + pipe - 1) stage times for m = ceil(rows / replicas / micro_rows) micro-batches; then the
    gradients' all-reduce, less what overlaps with the last backward pass; then the optimizer; and
    ``layer_update`` for each layer.
    """
    one = stage_seconds(place, model, mesh, micro_rows, length, True, remat)
    overlap = place.constants.overlap
    exchange = gradient_exchange(place, model, mesh)
    hidden = overlap * one.compute * 2 / 3
    return (
        pipeline_stage_times(mesh.pipe, micro_batches(rows, mesh, micro_rows)) * one.total(overlap)
        + max(0.0, exchange - hidden)
        + optimizer_seconds(place, model, mesh)
        + model.layers / mesh.pipe * place.constants.layer_update
    )


def forward_rows(
    place: DeviceSet, rows: float, mesh: MeshSizes, length: float, micro_rows: int = 0
) -> int:
    """Rows of a forward micro-batch: ``micro_rows``, or as many as ``forward_tokens`` allow; at
    most those of a replica."""
    local = math.ceil(rows / mesh.replicas)
    most = place.numerics.forward_tokens
    if most:
        return max(1, min(local, int(most // length)))
    return max(1, min(local, micro_rows or local))


def forward_seconds(
    place: DeviceSet,
    model: ModelCounts,
    mesh: MeshSizes,
    rows: float,
    length: float,
    micro_rows: int = 0,
) -> float:
    """One forward over ``rows`` sequences: (m + pipe - 1) stage times for m micro-batches."""
    micro = forward_rows(place, rows, mesh, length, micro_rows)
    one = stage_seconds(place, model, mesh, micro, length, backward=False)
    times = pipeline_stage_times(mesh.pipe, micro_batches(rows, mesh, micro))
    return times * one.total(place.constants.overlap)
