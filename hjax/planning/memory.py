"""Bytes per device: what stays for the whole run, and what comes and goes while a role computes.

The models of a set take turns, so a set needs the sum of what is resident and the largest
transient. `hjax.launch.compile` gives the compiler's own figures for a plan's programs.
"""

from __future__ import annotations

import dataclasses
import math

from hjax.kernels.attention import tpu_places
from hjax.models import arithmetic
from hjax.models.expert_pieces import ROOM
from hjax.models.remat import ATTENTION, NONE, PRODUCTS
from hjax.planning import cost
from hjax.planning.cost import Place
from hjax.planning.records import Mesh, ModelCounts, Offload, Workload

# As in hjax.models.weight_ring and hjax.rollout, held to them by a test: the longest tensor axis
# along which weights travel; tokens of prompts that are read at a time, of prompts longer than
# SHORT, of which SHARED beginnings are kept; columns that a state has more where others follow.
LONGEST, READING, SHORT, SHARED, MORE_COLUMNS = 8, 4096, 256, 4, 64
# Bytes, while a TPU casts weights, of those on their way to the chip and of code, both of which its
# compiler's peak counts: 2 to 22 MiB in eleven programs of 75 to 260.
ON_THE_WAY = 10 << 20


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


def seen_pairs(place: Place, work: Workload, rows: float, share: int) -> float:
    """Pairs of tokens whose attention scores stand in memory, of rows of which ``share`` have one
    copy of their prompt: a prompt's with one another, a response's with its prompt and its own.
    None of sequences longer than ``whole_scores``, whose scores a kernel keeps from memory."""
    if work.length > place.numerics.whole_scores:
        return 0.0
    prompt, response = work.prompt_length, work.response_length
    return rows / share * prompt**2 + rows * response * (prompt + response)


def score_bytes(model: ModelCounts, mesh: Mesh, pairs: float) -> float:
    """float32 attention scores of one layer and their softmax, or gradients: 8 * pairs * heads /
    tensor."""
    return 8.0 * pairs * model.heads / mesh.tensor


def kept_score_bytes(
    place: Place, model: ModelCounts, mesh: Mesh, pairs: float, answered: float
) -> float:
    """What a backward pass reads of them: exponentials in float32 and as they were multiplied with
    the values, and what that gave of responses before it was divided by their sums, float32."""
    if not pairs:
        return 0.0
    compute = place.numerics.compute
    each = 4.0 + (compute if compute < 4 else 0.0)
    return (each * pairs * model.heads + 4.0 * answered * model.attention_width) / mesh.tensor


def logit_bytes(place: Place, model: ModelCounts, mesh: Mesh, tokens: float) -> float:
    """float32 logits, at most ``logits`` at a time; none of a scalar head."""
    if model.scalar:
        return 0.0
    return min(place.constants.logits, 4.0 * tokens * model.vocab / mesh.tensor)


def _forward_logits(place: Place, model: ModelCounts, mesh: Mesh, tokens: float) -> float:
    """``logit_bytes`` of a forward. A TPU's compiler writes out a loop of two turns, and has both
    pieces at once."""
    once = logit_bytes(place, model, mesh, tokens)
    whole = 4.0 * tokens * model.vocab / mesh.tensor
    written_out = place.pool.shape and place.numerics.own and once < whole <= 2 * once
    return whole if written_out else once


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


def stands_apart(place: Place, model: ModelCounts, mesh: Mesh, work: Workload) -> bool:
    """Whether attention is cuDNN's, to which each sequence is a row of its own: on NVIDIA GPUs in
    16 bits, of sequences longer than ``whole_scores``."""
    numerics, pool = place.numerics, place.pool
    on_gpus = numerics.own and not pool.shape and not pool.shares_cores and numerics.compute == 2
    longer = work.length > numerics.whole_scores and mesh.context == 1
    return on_gpus and longer and model.by_cudnn


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
    they are wider (where none are gathered and it is no TPU, of the layer in use and the head),
    activations, and the larger of the head (states and logits, twice) and the
    layer that the backward pass is at, with the layers' gradients, for the one is done when the
    other begins.

    Kept per layer and token: all that a backward pass reads (``none``), the layer's input and
    attention's output (``attention``), besides gate and up (``mlp``), or the input (``full``). The
    layer that the backward pass is at has its gradients besides, and all that was not kept of it. A
    stage of a pipeline holds the activations of min(pipe, m) micro-batches.
    """
    numerics = place.numerics
    micro_batches = math.ceil(math.ceil(rows / mesh.replicas) / micro_rows)
    copies = 2 if micro_batches > 1 and numerics.adds_gradients else 1
    element = numerics.gradients * model.learning
    gradients = cost.weight_bytes(place, model, mesh, element) / mesh.fsdp
    of_layers = gradients * model.layers * model.layer_parameters / model.parameters
    layers = model.layers / mesh.pipe * min(mesh.pipe, micro_batches)
    share = work.share(numerics.shared_prompt, micro_rows)
    tokens = micro_rows * work.row_tokens(numerics.shared_prompt, micro_rows) / mesh.context
    answered = micro_rows * work.response_length / mesh.context
    pairs = seen_pairs(place, work, micro_rows, share)
    made_again = model.remade if numerics.own else 0
    read = (model.layer_activations - made_again, model.layer_activations_whole)
    whole_layer = layer_activations(place, model, mesh, tokens, read)
    whole_layer += kept_score_bytes(place, model, mesh, pairs, answered)
    if place.pool.shape and numerics.own and work.length > numerics.whole_scores:
        heads = 2 * model.attention_width + model.cache_elements
        row = work.prompt_length + share * work.response_length
        filled = tokens * (tpu_places(row) / row - 1)  # its kernel fills blocks up
        whole_layer += layer_activations(place, model, mesh, filled, (heads, 0))
    gradients_of = (model.layer_gradients, model.layer_gradients_whole)
    at_work = layer_activations(place, model, mesh, tokens, gradients_of)
    at_work += score_bytes(model, mesh, pairs)
    if stands_apart(place, model, mesh, work):
        places = micro_rows * work.length
        given = tokens, places, model.attention_width, model.cache_elements
        more, meanwhile = (
            n * numerics.compute / mesh.tensor for n in arithmetic.apart_elements(*given)
        )
        whole_layer += more
        at_work = max(at_work, meanwhile)
    if remat == NONE:
        kept = whole_layer
    else:
        outputs: float = model.attention_width if remat in (ATTENTION, PRODUCTS) else 0
        whole = model.hidden
        if remat == PRODUCTS:
            room = ROOM if mesh.expert > 1 else 1.0
            outputs += room * model.layer_gates + model.layer_products
            whole += model.layer_products_whole
        inputs = (model.hidden + outputs, whole)
        kept = layer_activations(place, model, mesh, tokens, inputs)
        at_work += whole_layer
    head = 4.0 * answered * model.hidden + 2 * logit_bytes(place, model, mesh, answered)
    cast, gathered = _cast_copy(place, model, mesh), gathered_layer(place, model, mesh, tokens)
    if not place.pool.shape and numerics.own and mesh.fsdp * mesh.pipe == 1:
        in_use = model.layer_parameters + model.head_parameters
        cast = min(cast, in_use * numerics.compute / mesh.tensor)
    summed = of_layers if model.scalar and numerics.own else gradients
    beside = gradients + (copies - 1) * summed - of_layers + cast + layers * kept + gathered
    return beside + max(head, of_layers + at_work)


def forward_transient(
    place: Place, model: ModelCounts, mesh: Mesh, rows: float, work: Workload, micro_rows: int = 0
) -> float:
    """The hidden states twice, a cast copy of the weights (on a TPU, whose compiler makes it before
    the loop over layers, of all; else of the layer in use), and the most of one layer's attention
    (scores where they are kept), its MLP, and the logits; or the copy while it is made."""
    numerics = place.numerics
    length = work.row_tokens(numerics.shared_prompt, micro_rows)
    micro = cost.forward_rows(place, rows, mesh, length, micro_rows)
    tokens = micro * work.row_tokens(numerics.shared_prompt, micro) / mesh.context
    pairs = seen_pairs(place, work, micro, work.share(numerics.shared_prompt, micro))
    apart = stands_apart(place, model, mesh, work)
    most = max(
        _layer_forward(place, model, mesh, tokens, pairs, micro * work.length if apart else 0.0),
        _forward_logits(place, model, mesh, micro * work.response_length),
    )
    hidden = 2 * tokens * model.hidden * numerics.compute
    cast = _cast_copy(place, model, mesh)
    if not place.pool.shape:  # of layers that are gathered two are counted already
        whole = mesh.fsdp == 1
        cast *= model.layer_parameters / model.parameters * mesh.pipe if whole else 0.0
    within = hidden + most + gathered_layer(place, model, mesh, tokens)
    made = ON_THE_WAY if cast and place.pool.shape and place.numerics.own else 0.0
    return cast + max(within, made)


def _layer_forward(
    place: Place,
    model: ModelCounts,
    mesh: Mesh,
    tokens: float,
    pairs: float,
    places: float = 0.0,
) -> float:
    """The larger of a layer's attention and its MLP, of which only one is there at a time.
    ``places``: of rows of which attention has each for itself; 0: it does not."""
    mlp = 3 * model.mlp * max(1, model.experts_per_token)
    attention = tokens * (model.layer_activations - model.layer_activations_whole - mlp)
    if places:
        widths = model.attention_width, model.cache_elements
        attention += arithmetic.apart_elements(tokens, places, *widths)[0]
    each = place.numerics.compute / mesh.tensor
    return max(attention * each + score_bytes(model, mesh, pairs), mlp * tokens * each)


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
    most = numerics.forward_tokens // work.prompt_length if numerics.forward_tokens else prompts
    prefill = _reading(place, model, layout, max(1, min(prompts, most)) * work.prompt_length, work)
    own = cache_bytes(place, model, mesh, rows, work.response_length)
    drawn = 2 * logit_bytes(place, model, layout, rows)
    return max(cached + prefill, numerics.prompt_copies * cached + own + drawn)


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
    """Of a forward over so many tokens of prompts: the hidden states twice and a layer's part."""
    alone = work.prompt_length <= place.numerics.whole_scores
    pairs = tokens * work.prompt_length if alone else 0.0
    hidden = 2 * tokens * model.hidden * place.numerics.compute
    return hidden + _layer_forward(place, model, layout, tokens, pairs)
