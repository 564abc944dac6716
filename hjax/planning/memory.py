"""Bytes per device: what stays for the whole run, and what comes and goes while a role computes.

The models of a set take turns, so a set needs the sum of what is resident and the largest
transient. `hjax.launch.compile` gives the compiler's own figures for a plan's programs.
"""

from __future__ import annotations

import math

from hjax.planning import cost
from hjax.planning.cost import Place
from hjax.planning.records import Mesh, ModelCounts, Offload, Workload


def capacity(place: Place) -> float:
    """What a plan may use: memory * usable - workspace."""
    return place.pool.device.memory * place.constants.usable - place.constants.workspace


def resident(
    place: Place, model: ModelCounts, mesh: Mesh, trained: bool, offload: Offload = "none"
) -> float:
    """Weights, and of a trained model the optimizer's state, over pipe * tensor * fsdp, less what
    waits in the host's memory."""
    numerics = place.numerics
    element = 0.0 if offload == "all" else _weights(place, model)
    if trained and offload == "none":
        element += numerics.optimizer * model.learning
    return cost.weight_bytes(model, mesh, element) / mesh.fsdp


def _weights(place: Place, model: ModelCounts) -> float:
    """Bytes per parameter: what is frozen beside adapters is kept as it is computed with, or in
    one byte."""
    numerics = place.numerics
    frozen = min(numerics.weights, numerics.compute)
    small = model.bytes_each / model.parameters
    return numerics.weights * model.learning + frozen * (1 - model.learning - small) + small


def fetched(place: Place, model: ModelCounts, mesh: Mesh, update: bool, offload: Offload) -> float:
    """Bytes per device that come back from the host for a role's calls of a stage: with ``all``
    the weights, in updates also the optimizer's state."""
    numerics = place.numerics
    element = _weights(place, model) if offload == "all" else 0.0
    if update and offload != "none":
        element += numerics.optimizer * model.learning
    return cost.weight_bytes(model, mesh, element) / mesh.fsdp


def score_bytes(
    place: Place, model: ModelCounts, mesh: Mesh, rows: float, work: Workload, shared: bool = True
) -> float:
    """float32 attention scores of one layer, where no kernel keeps them from memory.

    rows * heads / tensor * pairs / context * 4 bytes; pairs: prompt^2 / samples + response *
    (prompt + response) where samples share a prompt, else length^2, twice (scores and softmax).
    """
    if not place.numerics.whole_scores:
        return 0.0
    prompt, response = work.prompt_length, work.response_length
    pairs = 2.0 * work.length**2
    if shared and place.numerics.shared_prompt:
        pairs = prompt**2 / work.samples + response * work.length
    return 4.0 * rows * pairs * model.heads / mesh.tensor / mesh.context


def logit_bytes(place: Place, model: ModelCounts, mesh: Mesh, tokens: float) -> float:
    """float32 logits and what is made of them, at most ``logits``; none of a scalar head."""
    if model.head_parameters == model.hidden:
        return 0.0
    return min(place.constants.logits, 8.0 * tokens * model.vocab / mesh.tensor)


def layer_activations(
    place: Place, model: ModelCounts, mesh: Mesh, rows: float, length: float
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
    work: Workload,
    micro_rows: int,
    rematerialise: bool,
) -> float:
    """Gradients (and their sum so far, of several micro-batches), a cast copy of the weights where
    they are wider, activations, logits.

    Rematerialised: tokens * hidden per layer kept, and one layer whole. A stage of a pipeline
    holds those of min(pipe, m) micro-batches.
    """
    numerics = place.numerics
    micro_batches = math.ceil(math.ceil(rows / mesh.replicas) / micro_rows)
    copies = 2 if micro_batches > 1 and numerics.adds_gradients else 1
    element = numerics.gradients * model.learning
    gradients = copies * cost.weight_bytes(model, mesh, element) / mesh.fsdp
    cast = _cast_copy(place, model, mesh)
    layers = model.layers / mesh.pipe * min(mesh.pipe, micro_batches)
    length = work.row_tokens(numerics.shared_prompt)
    whole = layer_activations(place, model, mesh, micro_rows, length)
    whole += score_bytes(place, model, mesh, micro_rows, work)
    kept = micro_rows * length / mesh.context * model.hidden * numerics.compute
    activations = layers * kept + whole if rematerialise else layers * whole
    logits = logit_bytes(place, model, mesh, micro_rows * work.response_length)
    return gradients + cast + activations + logits + gathered_layer(place, model, mesh)


def forward_transient(
    place: Place, model: ModelCounts, mesh: Mesh, rows: float, work: Workload
) -> float:
    """The hidden states twice, a cast copy of the weights, and the most of one layer's attention
    (scores where they are kept), its MLP, and the logits."""
    numerics = place.numerics
    length = work.row_tokens(numerics.shared_prompt)
    micro = cost.forward_rows(place, rows, mesh, length)
    tokens = micro * length / mesh.context
    hidden = 2 * tokens * model.hidden * numerics.compute
    mlp = 3 * model.mlp * max(1, model.experts_per_token)
    split = model.layer_activations - model.layer_activations_whole
    attention = tokens * (split - mlp) / mesh.tensor * numerics.compute
    most = max(
        attention + score_bytes(place, model, mesh, micro, work),
        tokens * mlp / mesh.tensor * numerics.compute,
        logit_bytes(place, model, mesh, micro * work.response_length),
    )
    cast = _cast_copy(place, model, mesh)
    return hidden + cast + most + gathered_layer(place, model, mesh)


def _cast_copy(place: Place, model: ModelCounts, mesh: Mesh) -> float:
    """The weights in the compute dtype, where they are kept in a wider one."""
    numerics = place.numerics
    if numerics.compute >= numerics.weights:
        return 0.0
    return cost.weight_bytes(model, mesh, numerics.compute * model.learning) / mesh.fsdp


def generation_copy(place: Place, model: ModelCounts, mesh: Mesh) -> float:
    """Weights in the generation layout beside what is resident: M / (p_g t_g), less the training
    shard where it takes the shard's place, as it cannot where adapters are added to a copy."""
    numerics = place.numerics
    layout = Mesh(pipe=mesh.generate_pipe, tensor=mesh.generate_tensor)
    whole = cost.weight_bytes(model, layout, numerics.compute)
    if not numerics.in_place or model.frozen:
        return whole
    return whole - cost.weight_bytes(model, mesh, numerics.compute) / mesh.fsdp


def cache_bytes(place: Place, model: ModelCounts, mesh: Mesh, rows: float, tokens: float) -> float:
    """Keys and values of so many tokens of each row."""
    element = model.cache_elements * place.numerics.cache
    ways = min(mesh.generate_tensor, model.kv_heads) * mesh.generate_pipe
    return rows * tokens * element * model.layers / ways


def generation_transient(
    place: Place, model: ModelCounts, mesh: Mesh, rows: int, work: Workload
) -> float:
    """The generation copy, and the larger of prefill (activations, scores, the prompts' keys and
    values) and decoding (all keys and values of ``rows`` sequences, logits); of a shared prompt
    there is one per group. Before it a bucket of the transition."""
    numerics = place.numerics
    layout = Mesh(pipe=mesh.generate_pipe, tensor=mesh.generate_tensor)
    prompts = rows / (work.samples if numerics.shared_prompt else 1)
    cached = cache_bytes(place, model, mesh, prompts, work.prompt_length)
    cached *= numerics.prompt_copies
    most = numerics.forward_tokens // work.prompt_length if numerics.forward_tokens else prompts
    micro = max(1.0, min(prompts, most))
    prefill = layer_activations(place, model, layout, micro, work.prompt_length)
    if numerics.whole_scores:  # and their softmax
        prefill += 8.0 * micro * work.prompt_length**2 * model.heads / layout.tensor
    own = cache_bytes(place, model, mesh, rows, work.response_length)
    decoding = own + logit_bytes(place, model, layout, rows)
    copy = generation_copy(place, model, mesh)
    bucket = min(numerics.bucket, copy) if copy else 0.0
    return copy + max(bucket, cached + max(prefill, decoding))
