"""Bytes per device: what stays for the whole run, and what comes and goes while a role computes.

The models of a set take turns, so a set needs the sum of what is resident and the largest
transient. `hjax.launch.compile` gives the compiler's own figures for a plan's programs.
"""

from __future__ import annotations

import dataclasses
import math

from hjax.models.remat import ATTENTION, NONE
from hjax.planning import cost
from hjax.planning.cost import Place
from hjax.planning.records import Mesh, ModelCounts, Offload, Workload

# As in hjax.models.weight_ring and hjax.rollout, held to them by a test: the longest tensor axis
# along which weights travel; tokens of prompts that are read at a time, of prompts longer than
# SHORT, of which SHARED beginnings are kept; columns that a state has more where others follow.
LONGEST, READING, SHORT, SHARED, MORE_COLUMNS = 8, 4096, 256, 4, 64


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
    return cost.weight_bytes(place, model, mesh, element) / mesh.fsdp


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
    return cost.weight_bytes(place, model, mesh, element) / mesh.fsdp


def kept_share(model: ModelCounts, tensor: int) -> int:
    """Over how many parts keys and values are split: few KV heads stand whole on every device."""
    return tensor if model.kv_heads % tensor == 0 else 1


def rows_length(work: Workload, share: int) -> int:
    """Places of a row of ``share`` responses beside one copy of their prompt."""
    return work.prompt_length + share * work.response_length


def score_bytes(
    place: Place, model: ModelCounts, mesh: Mesh, tokens: float, length: float
) -> float:
    """float32 attention scores of one layer and their softmax, where no kernel keeps them from
    memory: 8 * tokens * length * heads / tensor, of rows of at most ``whole_scores`` places."""
    if length > place.numerics.whole_scores:
        return 0.0
    return 8.0 * tokens * length * model.heads / mesh.tensor


def logit_bytes(place: Place, model: ModelCounts, mesh: Mesh, tokens: float) -> float:
    """float32 logits, at most ``logits`` at a time; none of a scalar head."""
    if model.scalar:
        return 0.0
    return min(place.constants.logits, 4.0 * tokens * model.vocab / mesh.tensor)


def layer_activations(
    place: Place, model: ModelCounts, mesh: Mesh, tokens: float, elements: tuple[float, float]
) -> float:
    """tokens * (split / tensor + whole) elements, of (all, whole) per token. Where weights travel
    along the tensor axis nothing is whole."""
    every, whole = elements
    split = 1 if not travels(place, model, mesh, tokens) else mesh.tensor
    return tokens * ((every - whole) / mesh.tensor + whole / split) * place.numerics.compute


def travels(place: Place, model: ModelCounts, mesh: Mesh, tokens: float) -> bool:
    """Whether a TPU's passes send weights along the tensor axis instead of sums of activations.

    As hjax.models.weight_ring: layer + 2 (heads + KV heads) head_dim tokens / tensor < 4 hidden
    tokens.
    """
    asked = place.pool.shape and place.numerics.own and 1 < mesh.tensor <= LONGEST
    if not asked or mesh.pipe * mesh.context > 1 or model.experts or model.kv_heads % mesh.tensor:
        return False
    exchanged = (2 * model.attention_width + model.cache_elements) * tokens / mesh.tensor
    return model.layer_parameters + exchanged < 4 * model.hidden * tokens


def gathered_layer(place: Place, model: ModelCounts, mesh: Mesh, tokens: float) -> float:
    """Two layers gathered whole by FSDP, the one in use and the next; of weights that travel the
    one in use and its gradients."""
    travel = travels(place, model, mesh, tokens)
    if mesh.fsdp == 1 and not travel:
        return 0.0
    layer = model.layer_parameters * place.numerics.compute
    return 2 * layer / (1 if travel else mesh.tensor)


def update_transient(
    place: Place,
    model: ModelCounts,
    mesh: Mesh,
    rows: float,
    work: Workload,
    micro_rows: int,
    remat: str,
) -> float:
    """Gradients (and their sum so far, of several micro-batches), a cast copy of the weights where
    they are wider, activations, the head's states and logits (thrice).

    Kept per layer and token: all that a backward pass reads (``none``), the layer's input and
    attention's output (``attention``) or the input (``full``), and with these one layer whole. A
    stage of a pipeline holds those of min(pipe, m) micro-batches.
    """
    numerics = place.numerics
    micro_batches = math.ceil(math.ceil(rows / mesh.replicas) / micro_rows)
    copies = 2 if micro_batches > 1 and numerics.adds_gradients else 1
    element = numerics.gradients * model.learning
    gradients = copies * cost.weight_bytes(place, model, mesh, element) / mesh.fsdp
    layers = model.layers / mesh.pipe * min(mesh.pipe, micro_batches)
    share = work.share(numerics.shared_prompt, micro_rows)
    tokens = micro_rows * work.row_tokens(numerics.shared_prompt, micro_rows) / mesh.context
    every, whole = model.layer_activations, model.layer_activations_whole
    one = layer_activations(place, model, mesh, tokens, (every, whole))
    scores = score_bytes(place, model, mesh, tokens, rows_length(work, share))
    if remat == NONE:
        made_again = model.remade if numerics.own else 0
        kept = layer_activations(place, model, mesh, tokens, (every - made_again, whole)) + scores
        activations = layers * kept
    else:
        outputs = model.attention_width if remat == ATTENTION else 0
        inputs = (model.hidden + outputs, model.hidden)
        kept = layer_activations(place, model, mesh, tokens, inputs)
        activations = layers * kept + one + scores
    answered = micro_rows * work.response_length / mesh.context
    head = 4.0 * answered * model.hidden + 3 * logit_bytes(place, model, mesh, answered)
    cast, gathered = _cast_copy(place, model, mesh), gathered_layer(place, model, mesh, tokens)
    return gradients + cast + activations + head + gathered


def forward_transient(
    place: Place, model: ModelCounts, mesh: Mesh, rows: float, work: Workload, micro_rows: int = 0
) -> float:
    """The hidden states twice, a cast copy of the weights (on a TPU, whose compiler makes it before
    the loop over layers), and the most of one layer's attention (scores where they are kept), its
    MLP, and the logits."""
    numerics = place.numerics
    length = work.row_tokens(numerics.shared_prompt, micro_rows)
    micro = cost.forward_rows(place, rows, mesh, length, micro_rows)
    tokens = micro * work.row_tokens(numerics.shared_prompt, micro) / mesh.context
    hidden = 2 * tokens * model.hidden * numerics.compute
    mlp = 3 * model.mlp * max(1, model.experts_per_token)
    split = model.layer_activations - model.layer_activations_whole
    attention = tokens * (split - mlp) / mesh.tensor * numerics.compute
    places = rows_length(work, work.share(numerics.shared_prompt, micro))
    most = max(
        attention + score_bytes(place, model, mesh, tokens, places),
        tokens * mlp / mesh.tensor * numerics.compute,
        2 * logit_bytes(place, model, mesh, micro * work.response_length),
    )
    cast = _cast_copy(place, model, mesh) if place.pool.shape else 0.0
    return hidden + cast + most + gathered_layer(place, model, mesh, tokens)


def _cast_copy(place: Place, model: ModelCounts, mesh: Mesh) -> float:
    """The weights in the compute dtype, where they are kept in a wider one."""
    numerics = place.numerics
    if numerics.compute >= numerics.weights:
        return 0.0
    return cost.weight_bytes(place, model, mesh, numerics.compute * model.learning) / mesh.fsdp


def generation_copy(place: Place, model: ModelCounts, mesh: Mesh) -> float:
    """Weights in the generation layout beside what is resident: M / (p_g t_g), less the training
    shard where it takes the shard's place, as it cannot where adapters are added to a copy."""
    numerics = place.numerics
    layout = Mesh(pipe=mesh.generate_pipe, tensor=mesh.generate_tensor)
    whole = cost.weight_bytes(place, model, layout, numerics.compute)
    if not numerics.in_place or model.frozen:
        return whole
    return whole - cost.weight_bytes(place, model, mesh, numerics.compute) / mesh.fsdp


def cache_bytes(place: Place, model: ModelCounts, mesh: Mesh, rows: float, tokens: float) -> float:
    """Keys and values of so many tokens of each row."""
    element = model.cache_elements * place.numerics.cache
    ways = kept_share(model, mesh.generate_tensor) * mesh.generate_pipe
    return rows * tokens * element * model.layers / ways


@dataclasses.dataclass(frozen=True)
class Decoded:
    """What a replica decodes at a time.

    Attributes:
      prompts: whose responses.
      samples: of each.
      slots: whether they enter and leave slots of hjax's engine, not all of them one program.
      refills: whether others follow.
    """

    prompts: int
    samples: int
    slots: bool = False
    refills: bool = False


def generation_transient(
    place: Place, model: ModelCounts, mesh: Mesh, at_a_time: Decoded, work: Workload
) -> float:
    """The generation copy, and the larger of prefill (activations, scores, the prompts' keys and
    values) and decoding (all keys and values, logits); of a shared prompt there is one per group.
    Before it a bucket of the transition."""
    numerics = place.numerics
    copy = generation_copy(place, model, mesh)
    bucket = min(numerics.bucket, copy) if copy else 0.0
    held = _slot_bytes if at_a_time.slots else _wave_bytes
    return copy + max(bucket, held(place, model, mesh, at_a_time, work))


def _wave_bytes(
    place: Place, model: ModelCounts, mesh: Mesh, at_a_time: Decoded, work: Workload
) -> float:
    """Of one program that reads all prompts, then draws all tokens."""
    numerics = place.numerics
    layout = Mesh(pipe=mesh.generate_pipe, tensor=mesh.generate_tensor)
    rows = at_a_time.prompts * at_a_time.samples
    prompts = at_a_time.prompts if numerics.shared_prompt else rows
    cached = cache_bytes(place, model, mesh, prompts, work.prompt_length)
    cached *= numerics.prompt_copies
    most = numerics.forward_tokens // work.prompt_length if numerics.forward_tokens else prompts
    prefill = _reading(place, model, layout, max(1, min(prompts, most)) * work.prompt_length, work)
    own = cache_bytes(place, model, mesh, rows, work.response_length)
    drawn = 2 * logit_bytes(place, model, layout, rows)
    return cached + max(prefill, own + drawn)


def _slot_bytes(
    place: Place, model: ModelCounts, mesh: Mesh, at_a_time: Decoded, work: Workload
) -> float:
    """Of hjax's engine: the slots' keys and values, with some columns more where others follow
    (a TPU's kernel needs none); blocks of prompts' beginnings that are shared; and the larger of
    reading so many tokens of prompts at a time, and drawing a token of every slot."""
    layout = Mesh(pipe=mesh.generate_pipe, tensor=mesh.generate_tensor)
    room = MORE_COLUMNS if at_a_time.refills and not place.pool.shape else 0
    own = at_a_time.samples * (work.response_length + room)
    held = cache_bytes(place, model, mesh, at_a_time.prompts, work.prompt_length + own)
    if work.prompt_length > SHORT and mesh.generate_pipe == 1:
        held += cache_bytes(place, model, mesh, SHARED + 1, work.prompt_length)
    tokens = min(max(READING, work.prompt_length), at_a_time.prompts * work.prompt_length)
    rows = at_a_time.prompts * at_a_time.samples
    drawn = 4 * 4.0 * rows * model.vocab / layout.tensor
    return held + max(_reading(place, model, layout, tokens, work), drawn)


def _reading(
    place: Place, model: ModelCounts, layout: Mesh, tokens: float, work: Workload
) -> float:
    """Of a forward over so many tokens of prompts."""
    elements = model.layer_activations, model.layer_activations_whole
    scores = score_bytes(place, model, layout, tokens, work.prompt_length)
    return layer_activations(place, model, layout, tokens, elements) + scores
