"""The cost model of generation: the transition to its layout, prefill and decoding."""

import dataclasses
import math

from hjax.models.cost_inputs import MeshSizes, ModelCounts, Workload
from hjax.planning import cost
from hjax.planning.cost import DeviceSet


def transition_seconds(place: DeviceSet, model: ModelCounts, mesh: MeshSizes) -> float:
    """Reshard from the training to the generation layout: M (1 / (p_g t_g) - 1 / (p t f)) received.

    M is the model's bytes in the compute dtype. FSDP shards are gathered first, then those of the
    micro groups (``tensor / t_g`` consecutive ranks and ``pipe / p_g`` stages), each over the links
    or network between its ranks (HybridFlow, arXiv 2409.19256, Table 2).
    """
    element = place.numerics.compute

    def held(**sizes: int) -> float:
        return cost.weight_bytes(place, model, dataclasses.replace(mesh, **sizes), element)

    seconds = cost.all_gather(place, held(), mesh.fsdp, mesh.stride("fsdp"))
    seconds += cost.all_gather(place, held(expert=1), mesh.expert, mesh.stride("expert"))
    tensor, tensor_micro = mesh.generate_tensor, mesh.tensor // mesh.generate_tensor
    stage = held(expert=1, tensor=tensor)
    seconds += cost.all_gather(place, stage, tensor_micro)
    pipe_micro = mesh.pipe // mesh.generate_pipe
    if pipe_micro > 1:  # weights outside of layers may be on every stage already
        received = held(expert=1, tensor=tensor, pipe=mesh.generate_pipe) - stage
        whole = received * pipe_micro / (pipe_micro - 1)
        seconds += cost.all_gather(place, whole, pipe_micro, mesh.stride("pipe"))
    return seconds


@dataclasses.dataclass(frozen=True)
class DecodingCost:
    """Decoding cost of a replica under one layout: coefficients of its step time.

    Attributes:
      rows: sequences per replica.
      steps: tokens per sequence.
      weights: seconds to read the weights once.
      per_row: seconds per step and sequence: KV cache read, collectives' bytes, the host's work.
      products: seconds of matrix products per sequence; they overlap with reading.
      fixed: seconds per step, independent of the batch.
      slowdown: times the longer of reading and products takes.
      expert_share, expert_use: share of the weights that belongs to experts, which are read only
        if used; probability that one sequence uses a given expert.
    """

    rows: int
    steps: int
    weights: float
    per_row: float
    products: float
    fixed: float
    slowdown: float = 1.0
    expert_share: float = 0.0
    expert_use: float = 0.0

    def seconds(self, waves: int) -> float:
        """waves * steps * (slowdown * max(weights, products) + fixed + rows / waves * per_row)."""
        rows = math.ceil(self.rows / waves)
        read = self.weights
        if self.expert_share:
            used = 1 - (1 - self.expert_use) ** rows
            read *= 1 - self.expert_share * (1 - used)
        step = self.slowdown * max(read, rows * self.products) + self.fixed + rows * self.per_row
        return waves * self.steps * step


def decoding_cost(
    place: DeviceSet, model: ModelCounts, mesh: MeshSizes, rows: float, work: Workload
) -> DecodingCost:
    """Decoding cost of ``rows`` sequences over all replicas of p_g * t_g devices.

    Weights read per step: parameters / t_g. (The p_g stages work on p_g micro-batches in turn, so a
    step reads each stage once per micro-batch: p_g * parameters / (p_g t_g).) KV cache read per
    sequence and step: cache bytes * mean context / t_g / p_g, a shared prompt once per group; fewer
    KV heads than devices are replicated. Collectives: 2 all-reduces of rows * hidden per layer.
    """
    numerics, constants = place.numerics, place.constants
    pipe, tensor = mesh.generate_pipe, mesh.generate_tensor
    replicas = place.devices // (pipe * tensor)
    local = math.ceil(rows / replicas)
    element = numerics.compute
    weights = model.layers * model.layer_parameters + model.head_parameters
    read = weights * element / tensor / place.bandwidth
    own = work.response_length / 2
    prompt = work.prompt_length / (work.samples if numerics.shared_prompt else 1)
    cache = (prompt + own) * model.cache_elements * model.layers * numerics.cache
    per_row = cache / model.cache_splits(tensor) / pipe / place.bandwidth + constants.decode_row
    width = work.prompt_length + own
    flops = 2.0 * model.active_parameters + 4.0 * model.attention_width * model.layers * width
    fixed = constants.decode_step + model.layers * constants.decode_layer
    if tensor > 1:
        stride = max(1, mesh.tensor // tensor)
        wire = 2 * model.layers * 2 * (tensor - 1) / tensor * model.hidden * element
        per_row += wire / cost.ring_bandwidth(place, tensor, stride)
        fixed += 2 * model.layers * cost.latency(place, tensor, stride)
    if pipe > 1:
        fixed += pipe * cost.latency(place, 2, mesh.tensor * max(1, mesh.pipe // pipe))
    experts = model.layers * model.layer_expert
    return DecodingCost(
        local,
        work.response_length,
        read,
        per_row,
        flops / tensor / pipe / place.flops,
        fixed,
        constants.decode,
        experts / model.parameters,
        model.experts_per_token / model.experts if model.experts else 0.0,
    )


def prefill_seconds(
    place: DeviceSet, model: ModelCounts, mesh: MeshSizes, rows: float, work: Workload
) -> float:
    """Prefill: a forward over the prompts in the generation layout, shared ones once per group."""
    pipe, tensor = mesh.generate_pipe, mesh.generate_tensor
    layout = MeshSizes(data=place.devices // (pipe * tensor), pipe=pipe, tensor=tensor)
    share = work.samples if place.numerics.shared_prompt else 1
    return cost.forward_seconds(place, model, layout, rows / share, work.prompt_length)


def uncached_seconds(
    place: DeviceSet, model: ModelCounts, mesh: MeshSizes, rows: float, work: Workload
) -> float:
    """Generation without a KV cache: a forward over the whole sequence for every token.

    Sum over i < response of forward(prompt + i) = response forwards at the mean length.
    """
    pipe, tensor = mesh.generate_pipe, mesh.generate_tensor
    layout = MeshSizes(data=place.devices // (pipe * tensor), pipe=pipe, tensor=tensor)
    length = work.prompt_length + work.response_length // 2
    return work.response_length * cost.forward_seconds(place, model, layout, rows, length)
