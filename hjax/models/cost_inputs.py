"""Inputs of the memory and time estimates: records of a model, a mesh, a workload and dtypes.

Sizes are elements or bytes as named. A run's own memory estimates (``hjax.workers.memory``) and the
auto-mapping (``hjax.planning``), whose search tries thousands of meshes without devices or
parameters, share these records.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal

from hjax.kernels import cudnn
from hjax.kernels.attention import DENSE_LENGTH
from hjax.models import parameter_counts, remat
from hjax.models.architecture import decoder_parameters
from hjax.models.model_config import ModelConfig

# Which state of a role is offloaded to host memory between its calls.
Offload = Literal["none", "optimizer", "all"]


@dataclasses.dataclass(frozen=True)
class ModelCounts:
    """Counts of parameters and activations that follow from a model's shape (``model_counts``).

    A field ``<name>_whole`` counts the elements of ``<name>`` that no tensor axis splits.

    Attributes:
      parameters: of the whole model, without a scalar head's bias.
      layer_parameters: of one layer; ``layer_active``: used by one token (fewer with experts);
        ``layer_expert``: in experts.
      head_parameters: of the output head: hidden x vocab, or hidden for a scalar head.
      attention_width: heads x head_dim; attention costs 4 x width FLOPs per pair of a token and a
        context token.
      cache_elements: keys and values per token and layer.
      layer_activations: elements per token and layer that a backward pass reads without remat.
      frozen: parameters that no update changes because adapters are trained;
        ``one_byte_parameters``: frozen ones that are quantized to one byte.
      layer_recomputed: layer activations that a backward pass recomputes even without remat.
      layer_gates: layer activations that are outputs of an MLP's gate and up projections.
      layer_products: layer activations that are outputs of other matrix products.
      cudnn_supported: whether cuDNN's attention supports its layers, in 16 bits.
      layer_gradients: elements per token, beside the activations, while the backward pass is in a
        layer.
      dora, dropout: whether its adapters use DoRA, and dropout.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    mlp: int
    vocab: int
    experts: int
    experts_per_token: int
    parameters: int
    layer_parameters: int
    layer_active: int
    layer_expert: int
    head_parameters: int
    attention_width: int
    cache_elements: int
    layer_activations: int
    layer_activations_whole: int
    frozen: int = 0
    one_byte_parameters: int = 0
    layer_recomputed: int = 0
    layer_gates: int = 0
    layer_products: int = 0
    layer_products_whole: int = 0
    layer_gradients: int = 0
    layer_gradients_whole: int = 0
    cudnn_supported: bool = False
    dora: bool = False
    dropout: bool = False

    @property
    def scalar(self) -> bool:
        """Whether it has a scalar head."""
        return self.head_parameters == self.hidden

    @property
    def learned_share(self) -> float:
        """Share of the parameters that are trained."""
        return 1 - self.frozen / self.parameters

    @property
    def active_parameters(self) -> int:
        """Parameters that multiply a token in a forward pass, head included."""
        return self.layers * self.layer_active + self.head_parameters

    def parameters_per_device(self, mesh: MeshSizes, staged: bool) -> float:
        """A device's parameters without FSDP: split over pipe * tensor, experts also over the
        expert axis. ``staged``: embeddings and head are split over pipeline stages too; hjax has
        them in every stage."""
        experts = self.layers * self.layer_expert
        layers = self.layers * self.layer_parameters - experts
        outside = self.parameters - layers - experts
        stages = mesh.pipe if staged else 1
        return ((layers + experts / mesh.expert) / mesh.pipe + outside / stages) / mesh.tensor

    def cache_splits(self, tensor: int) -> int:
        """Parts that the KV cache is split into; 1 if KV heads do not divide over ``tensor``."""
        return tensor if self.kv_heads % tensor == 0 else 1

    def cudnn_extra(self, tokens: float, places: float) -> tuple[float, float]:
        """Extra elements per layer if attention needs each sequence in its own row (cuDNN): those
        kept beside ``layer_activations``, and those alive during its backward pass.

        cuDNN keeps padded queries, keys, values and outputs; the outputs exist once more as tokens.

        Args:
          tokens: with one copy of a prompt that several responses share.
          places: with a copy of the prompt for each response.
        """
        each = 2 * self.attention_width + self.cache_elements
        return (places - tokens) * each + tokens * self.attention_width, 2 * places * each

    def kept_activations(self, policy: str) -> tuple[int, int]:
        """Elements per token and layer that a remat policy (``hjax.models.remat``) keeps: (all,
        those that no tensor axis splits).

        ``none``: all but the product in a gated SiLU MLP, which its custom backward pass
        recomputes; ``attention``: the layer's input and the outputs of long sequences' attention;
        ``products``: these and the outputs of products with weights; ``full``: the input;
        ``offload``: nothing on the device.
        """
        if policy == remat.NONE:
            return self.layer_activations - self.layer_recomputed, self.layer_activations_whole
        if policy == remat.OFFLOAD:
            return 0, 0
        named = policy in (remat.ATTENTION, remat.PRODUCTS)
        every = self.hidden + (self.attention_width if named else 0)
        if policy != remat.PRODUCTS:
            return every, self.hidden
        every += self.layer_gates + self.layer_products
        return every, self.hidden + self.layer_products_whole


def model_counts(config: ModelConfig, name: str = "", scalar: bool = False) -> ModelCounts:
    """The counts of a model; ``scalar``: with a scalar head instead of the output table."""
    head = config.hidden_size * (1 if scalar else config.vocab_size)
    total = parameter_counts.parameter_count(config, scalar)
    hidden, width = config.hidden_size, config.heads * config.head_dim
    cache, lora = parameter_counts.cache_elements(config), config.lora
    used = config.mlp_size * (config.experts_per_token if config.experts else 1)
    gates = (2 if config.gated_mlp else 1) * used
    mlp = gates + used  # with the product of gate and up
    # Inputs and outputs of the norms; queries and keys before QK-norm.
    whole = (8 if config.norms == "both" else 4) * hidden
    normed = config.head_dim * (config.heads + config.kv_heads) if config.query_key_norm else 0
    # The custom backward pass of a gated SiLU MLP recomputes the product of gate and up.
    written_out = config.gated_mlp and config.activation == "silu" and not config.mlp_bias
    layer_recomputed = config.mlp_size if written_out and not config.experts else 0
    # The peak of a layer's backward pass is in the MLP: gradients of the layer's output, of the
    # MLP's input and of its parts, and the recomputed product.
    whole_gradients = 2 * hidden
    # The output of attention, and that of the MLP if a norm follows it.
    whole_products = hidden * (1 if config.norms == "before" else 2)
    return ModelCounts(
        name=name,
        layers=config.layers,
        hidden=hidden,
        heads=config.heads,
        kv_heads=config.kv_heads,
        mlp=config.mlp_size,
        vocab=config.vocab_size,
        experts=config.experts,
        experts_per_token=config.experts_per_token,
        # A scalar head's bias, one number, is not split over devices.
        parameters=total - int(scalar),
        layer_parameters=parameter_counts.layer_parameters(config),
        layer_active=parameter_counts.active_layer_parameters(config),
        layer_expert=parameter_counts.expert_parameters(config),
        head_parameters=head,
        attention_width=width,
        cache_elements=cache,
        layer_activations=whole + 2 * width + cache + normed + mlp,
        layer_activations_whole=whole,
        frozen=total - parameter_counts.learned_parameters(config, scalar),
        one_byte_parameters=sum(
            p.size for p in parameter_counts.all_specs(decoder_parameters(config)) if p.quantized
        ),
        layer_recomputed=layer_recomputed,
        layer_gates=gates,
        layer_products=width + cache + whole_products,
        layer_products_whole=whole_products,
        layer_gradients=whole_gradients + mlp + layer_recomputed,
        layer_gradients_whole=whole_gradients,
        cudnn_supported=not cudnn.unsupported_reason(
            "bfloat16", config.head_dim, config.attention_softcap, config.sinks
        ),
        dora=lora is not None and lora.dora,
        dropout=lora is not None and lora.dropout > 0,
    )


@dataclasses.dataclass(frozen=True)
class Workload:
    """The tokens that a step processes.

    Attributes:
      prompt_length, response_length: tokens; every response has the full length.
      sequences: per step, prompts x samples.
      samples: responses per prompt.
    """

    prompt_length: int
    response_length: int
    sequences: int
    samples: int = 1

    @property
    def length(self) -> int:
        """Tokens of a sequence."""
        return self.prompt_length + self.response_length

    @property
    def tokens(self) -> int:
        """Prompt and response tokens of a step."""
        return self.sequences * self.length

    def row_tokens(self, shared_prompt: bool, rows: int = 0) -> float:
        """Tokens per sequence that a pass computes; with ``shared_prompt`` the prompt's count once
        per group, or per part of a group in passes of ``rows`` (0: groups are whole)."""
        return self.prompt_length / self.rows_per_prompt(shared_prompt, rows) + self.response_length

    def rows_per_prompt(self, shared_prompt: bool, rows: int = 0) -> int:
        """Rows that share one copy of a prompt in passes of ``rows`` (0: groups are whole)."""
        return math.gcd(rows, self.samples) if shared_prompt else 1


@dataclasses.dataclass(frozen=True)
class Numerics:
    """Bytes per element of a run's state, and how its programs use memory.

    Attributes:
      weights: of every model, resident.
      optimizer: per parameter of a trained model, beside the weights (moments, master weights).
      gradients: during an update.
      compute: in forward, generation and their collectives.
      cache: in the KV cache.
      shared_prompt: the prompt is computed and cached once per group of samples.
      score_matrix_length: up to this row length attention scores, float32, are in device memory
        while a layer computes; longer rows use a kernel that keeps them on chip. 0: always on chip.
      adds_gradients: a micro-batch's gradients exist beside their accumulated sum.
      forward_tokens: maximal tokens per device and forward pass; 0: as many rows as an update's.
      prompt_copies: of the prompts' KV cache: that of prefill, and the decode loop's own.
      bucket: bytes received at a time in a transition.
      in_place: the generation copy replaces the weights (same dtype); else both exist.
      hjax_programs: as in hjax: sequences beyond the rollout engine's slots queue, pipeline stages
        rematerialise their forward, and TPUs may use collective matmul.
    """

    weights: float = 2
    optimizer: float = 12
    gradients: float = 4
    compute: float = 2
    cache: float = 2
    dtype: str = "bfloat16"
    shared_prompt: bool = False
    score_matrix_length: int = 0
    adds_gradients: bool = False
    forward_tokens: int = 16384
    prompt_copies: int = 1
    bucket: float = 2**24
    in_place: bool = True
    hjax_programs: bool = False


# The paper's: BF16 weights, FP32 gradients, Adam's moments and master weights (section 8.1).
MIXED = Numerics()
# hjax's on accelerators: FP32 weights and moments, a BF16 generation copy.
MASTERS = Numerics(
    weights=4,
    optimizer=8,
    shared_prompt=True,
    score_matrix_length=DENSE_LENGTH,
    adds_gradients=True,
    prompt_copies=2,
    forward_tokens=0,
    in_place=False,
    hjax_programs=True,
)
# hjax's on CPUs.
FLOAT32 = dataclasses.replace(MASTERS, compute=4, cache=4, dtype="float32", in_place=True)


@dataclasses.dataclass(frozen=True)
class MeshSizes:
    """Sizes of a role's mesh axes; ``data`` follows from the devices.

    ``generate_pipe`` and ``generate_tensor`` are the paper's p_g and t_g; 0 for roles that do not
    generate.
    """

    data: int = 1
    fsdp: int = 1
    expert: int = 1
    context: int = 1
    pipe: int = 1
    tensor: int = 1
    generate_pipe: int = 0
    generate_tensor: int = 0

    @classmethod
    def of(cls, layout: Any, generates: bool = False) -> MeshSizes:
        """From a ``hjax.sharding.layout.Layout``; ``generates``: with p_g and t_g."""
        shape = layout.mesh.shape
        sizes = {a: shape[a] for a in ("data", "fsdp", "expert", "context")}
        sizes |= {a: shape[a] * shape[f"{a}_micro"] for a in ("pipe", "tensor")}
        if generates:
            sizes |= {f"generate_{a}": shape[a] for a in ("pipe", "tensor")}
        return cls(**sizes)

    @property
    def devices(self) -> int:
        """Number of devices, the product of the axes."""
        return self.replicas * self.context * self.pipe * self.tensor

    @property
    def generation_replicas(self) -> int:
        """Copies of the weights under the generate layout."""
        return self.devices // (self.generate_pipe * self.generate_tensor)

    @property
    def replicas(self) -> int:
        """Into how many parts a training batch is split."""
        return self.data * self.fsdp * self.expert

    def stride(self, axis: str) -> int:
        """Distance in ranks between neighbours along an axis (hjax.sharding.layout.MESH_AXES)."""
        order = ("data", "fsdp", "expert", "context", "pipe", "tensor")
        return math.prod(getattr(self, a) for a in order[order.index(axis) + 1 :])

    def train_axes(self) -> dict[str, int]:
        """Mesh axes above 1 as ``layout.<role>.train`` takes them."""
        axes = ("data", "fsdp", "expert", "context", "pipe", "tensor")
        return {a: getattr(self, a) for a in axes if getattr(self, a) > 1} or {"data": 1}

    def generate_axes(self) -> dict[str, int]:
        """As ``layout.<role>.generate`` takes them."""
        return {"pipe": self.generate_pipe, "tensor": self.generate_tensor}
