"""Bytes per device: what stays for the whole run, and what comes and goes while a role computes.

The models of a set take turns, so a set needs the sum of what is resident and the largest
transient. `hjax.launch.compile` gives the compiler's own figures for a plan's programs.
"""

from __future__ import annotations

import math

from hjax.sharding.mapping import cost
from hjax.sharding.mapping.cost import Place
from hjax.sharding.mapping.records import Mesh, ModelCounts, Workload


def capacity(place: Place) -> float:
    """What a plan may use: memory * usable - workspace."""
    return place.pool.device.memory * place.constants.usable - place.constants.workspace


def resident(place: Place, model: ModelCounts, mesh: Mesh, trained: bool) -> float:
    """Weights, and of a trained model the optimizer's state, over pipe * tensor * fsdp."""
    numerics = place.numerics
    element = numerics.weights + (numerics.optimizer if trained else 0)
    return cost.weight_bytes(model, mesh, element) / mesh.fsdp


def layer_activations(
    place: Place, model: ModelCounts, mesh: Mesh, rows: float, length: int
) -> float:
    """What one layer's backward reads: tokens * (split / tensor + whole) elements."""
    split = model.layer_activations - model.layer_activations_whole
    elements = split / mesh.tensor + model.layer_activations_whole
    return rows * length / mesh.context * elements * place.numerics.compute


def gathered_layer(place: Place, model: ModelCounts, mesh: Mesh) -> float:
    """Two layers gathered whole by FSDP: the one in use and the next."""
    if mesh.fsdp == 1:
        return 0.0
    layer = model.layer_parameters * place.numerics.compute / mesh.tensor
    return 2 * max(layer, model.vocab * model.hidden * place.numerics.compute / mesh.tensor)


def update_transient(
    place: Place,
    model: ModelCounts,
    mesh: Mesh,
    rows: float,
    length: int,
    micro_rows: int,
    rematerialise: bool,
) -> float:
    """Gradients, a cast copy of the weights where they are wider, activations, logits.

    Rematerialised: tokens * hidden per layer kept, and one layer whole. A stage of a pipeline
    holds those of min(pipe, m) micro-batches.
    """
    numerics = place.numerics
    gradients = cost.weight_bytes(model, mesh, numerics.gradients) / mesh.fsdp
    cast = 0.0
    if numerics.compute < numerics.weights and mesh.fsdp == 1:
        cast = cost.weight_bytes(model, mesh, numerics.compute)
    micro_batches = math.ceil(math.ceil(rows / mesh.replicas) / micro_rows)
    layers = model.layers / mesh.pipe * min(mesh.pipe, micro_batches)
    whole = layer_activations(place, model, mesh, micro_rows, length)
    kept = micro_rows * length / mesh.context * model.hidden * numerics.compute
    activations = layers * kept + whole if rematerialise else layers * whole
    return (
        gradients + cast + activations + place.constants.logits + gathered_layer(place, model, mesh)
    )


def forward_transient(
    place: Place, model: ModelCounts, mesh: Mesh, rows: float, length: int
) -> float:
    """One layer's activations, the hidden states twice, logits, a cast copy of the weights."""
    numerics = place.numerics
    micro = cost.forward_rows(rows, mesh, length)
    hidden = 2 * micro * length / mesh.context * model.hidden * numerics.compute
    cast = 0.0
    if numerics.compute < numerics.weights and mesh.fsdp == 1:
        cast = cost.weight_bytes(model, mesh, numerics.compute)
    return (
        layer_activations(place, model, mesh, micro, length)
        + hidden
        + cast
        + place.constants.logits
        + gathered_layer(place, model, mesh)
    )


def generation_copy(place: Place, model: ModelCounts, mesh: Mesh) -> float:
    """Weights in the generation layout beside what is resident: M / (p_g t_g), less the training
    shard where it takes the shard's place."""
    numerics = place.numerics
    layout = Mesh(pipe=mesh.generate_pipe, tensor=mesh.generate_tensor)
    whole = cost.weight_bytes(model, layout, numerics.compute)
    if not numerics.in_place:
        return whole
    return whole - cost.weight_bytes(model, mesh, numerics.compute) / mesh.fsdp


def cache_row(place: Place, model: ModelCounts, mesh: Mesh, work: Workload) -> float:
    """Bytes of keys and values of one sequence at its full length; a shared prompt counts once
    per group."""
    prompt = work.prompt_length / (work.samples if place.numerics.shared_prompt else 1)
    tokens = prompt + work.response_length
    element = model.cache_elements * place.numerics.cache
    ways = min(mesh.generate_tensor, model.kv_heads) * mesh.generate_pipe
    return tokens * element * model.layers / ways


def generation_transient(
    place: Place, model: ModelCounts, mesh: Mesh, rows: int, work: Workload
) -> float:
    """The generation copy, the cache of ``rows`` sequences, and prefill's activations."""
    layout = Mesh(pipe=mesh.generate_pipe, tensor=mesh.generate_tensor)
    micro = max(1, min(rows, 16384 // work.prompt_length))
    activations = layer_activations(place, model, layout, micro, work.prompt_length)
    return (
        generation_copy(place, model, mesh)
        + rows * cache_row(place, model, mesh, work)
        + activations
        + place.constants.logits
    )
