"""What memory and time are counted from: plain records of a model, a mesh, a step and numerics.

Sizes are elements or bytes as named. One set of records for a run's own estimates
(``hjax.workers.memory``) and for the auto-mapping (``hjax.planning``), whose search makes thousands
of meshes and needs neither devices nor parameters.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal

from hjax.kernels import cudnn
from hjax.kernels.attention import WHOLE
from hjax.models import parameter_counts, remat
from hjax.models.architecture import decoder_parameters
from hjax.models.model_config import ModelConfig

# What of a role waits in the host's memory between its calls.
Offload = Literal["none", "optimizer", "all"]


@dataclasses.dataclass(frozen=True)
class ModelCounts:
    """What a model's shape says about its costs (``model_counts`` makes it).

    Attributes:
      parameters: of the whole model, a scalar head's bias left out.
      layer_parameters: of one layer; ``layer_active``: those that one token uses (fewer with
        experts); ``layer_expert``: those in experts.
      head_parameters: those that the head multiplies a token with: hidden x vocab, or hidden for a
        scalar head.
      attention_width: heads x head_dim: scores and their values cost 4 x width FLOPs per pair of
        token and context token.
      cache_elements: keys and values per token and layer.
      layer_activations: elements per token and layer that a backward pass reads if nothing is
        rematerialised; ``layer_activations_whole``: of them those that no tensor axis splits.
      frozen: of ``parameters`` those that no update changes, because adapters learn beside them;
        ``bytes_each``: those of them that are kept in one byte.
      remade: of ``layer_activations`` those that a backward pass makes again although nothing is
        rematerialised.
      layer_gates: of them those that an MLP's first products give.
      layer_products, layer_products_whole: those of a layer's other products, of them those that
        are not split over tensor.
      by_cudnn: whether cuDNN's attention takes its layers, in 16 bits.
      layer_gradients: elements per token beside the activations of the layer that a backward pass
        is at; ``layer_gradients_whole``: of them those that no tensor axis splits.
      dora, dropout: whether its adapters are DoRA's, and drop some of what they are given.
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
    bytes_each: int = 0
    remade: int = 0
    layer_gates: int = 0
    layer_products: int = 0
    layer_products_whole: int = 0
    layer_gradients: int = 0
    layer_gradients_whole: int = 0
    by_cudnn: bool = False
    dora: bool = False
    dropout: bool = False

    @property
    def scalar(self) -> bool:
        """Whether its head gives one number."""
        return self.head_parameters == self.hidden

    @property
    def learning(self) -> float:
        """Share of the parameters that updates change."""
        return 1 - self.frozen / self.parameters

    @property
    def active(self) -> int:
        """Those that multiply a token in a forward pass, its head included."""
        return self.layers * self.layer_active + self.head_parameters

    def on_device(self, mesh: MeshSizes, staged: bool) -> float:
        """A device's parameters without FSDP: over pipe * tensor, experts also over the expert
        axis. ``staged``: what is outside of layers is split over a pipeline's stages too, which in
        hjax have it whole each."""
        experts = self.layers * self.layer_expert
        layers = self.layers * self.layer_parameters - experts
        outside = self.parameters - layers - experts
        stages = mesh.pipe if staged else 1
        return ((layers + experts / mesh.expert) / mesh.pipe + outside / stages) / mesh.tensor

    def cache_share(self, tensor: int) -> int:
        """Over how many parts keys and values are split: few KV heads stand whole on every
        device."""
        return tensor if self.kv_heads % tensor == 0 else 1

    def apart(self, tokens: float, places: float) -> tuple[float, float]:
        """Elements of a layer's attention where the kernel wants each sequence in a row of its own,
        as cuDNN's does: what it keeps beside ``layer_activations``, and what stands while its
        backward pass runs.

        It keeps its own queries, keys, values and outputs; these go on as tokens once more.

        Args:
          tokens: with prompts that several responses share once.
          places: with a prompt for each response.
        """
        each = 2 * self.attention_width + self.cache_elements
        return (places - tokens) * each + tokens * self.attention_width, 2 * places * each

    def kept(self, policy: str) -> tuple[int, int]:
        """(all, those that a tensor axis does not split): elements per token that a policy of
        ``hjax.models.remat`` keeps of a layer.

        ``none``: all but the product of a gated SiLU MLP, whose written-out backward pass makes it
        again; ``attention``: the layer's input and the outputs of long sequences' attention;
        ``products``: these and what products with weights give; ``full``: the input; ``offload``:
        nothing on the device.
        """
        if policy == remat.NONE:
            return self.layer_activations - self.remade, self.layer_activations_whole
        if policy == remat.OFFLOAD:
            return 0, 0
        named = policy in (remat.ATTENTION, remat.PRODUCTS)
        every = self.hidden + (self.attention_width if named else 0)
        if policy != remat.PRODUCTS:
            return every, self.hidden
        every += self.layer_gates + self.layer_products
        return every, self.hidden + self.layer_products_whole


def model_counts(config: ModelConfig, name: str = "", scalar: bool = False) -> ModelCounts:
    """The record of a shape; ``scalar``: with a value head instead of the vocabulary's."""
    head = config.hidden_size * (1 if scalar else config.vocab_size)
    total = parameter_counts.parameter_count(config, scalar)
    hidden, width = config.hidden_size, config.heads * config.head_dim
    cache, lora = parameter_counts.cache_elements(config), config.lora
    used = config.mlp_size * (config.experts_per_token if config.experts else 1)
    gates = (2 if config.gated_mlp else 1) * used
    mlp = gates + used  # with the product of gate and up
    # Both norms' inputs and outputs. Queries, keys, values, attention's output, queries and keys
    # before a norm of their own.
    whole = (8 if config.norms == "both" else 4) * hidden
    normed = config.head_dim * (config.heads + config.kv_heads) if config.query_key_norm else 0
    # The product of a gated SiLU MLP is made again by its written-out backward pass.
    written_out = config.gated_mlp and config.activation == "silu" and not config.mlp_bias
    remade = config.mlp_size if written_out and not config.experts else 0
    # While a backward pass is at the MLP, where it needs most: the gradients of the layer's output
    # and of the MLP's input; those of its parts, and the product where that is made again.
    whole_gradients = 2 * hidden
    # What attention adds, and what the MLP does where that is normed; queries, keys and values.
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
        # What is counted is split over devices; a scalar head's bias, one number, is not.
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
        bytes_each=sum(
            p.size for p in parameter_counts.all_specs(decoder_parameters(config)) if p.quantized
        ),
        remade=remade,
        layer_gates=gates,
        layer_products=width + cache + whole_products,
        layer_products_whole=whole_products,
        layer_gradients=whole_gradients + mlp + remade,
        layer_gradients_whole=whole_gradients,
        by_cudnn=not cudnn.refusal(
            "bfloat16", config.head_dim, config.attention_softcap, config.sinks
        ),
        dora=lora is not None and lora.dora,
        dropout=lora is not None and lora.dropout > 0,
    )


@dataclasses.dataclass(frozen=True)
class Workload:
    """What a step processes.

    Attributes:
      prompt_length, response_length: tokens; every response has the full length.
      sequences: prompts x samples of a step.
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
        """Tokens per sequence that a pass computes: a shared prompt's once per group, of which
        ``rows`` of a pass may hold a part (0: groups are whole)."""
        return self.prompt_length / self.share(shared_prompt, rows) + self.response_length

    def share(self, shared_prompt: bool, rows: int = 0) -> int:
        """Rows per copy of a prompt in passes of so many rows (0: groups are whole)."""
        return math.gcd(rows, self.samples) if shared_prompt else 1


@dataclasses.dataclass(frozen=True)
class Numerics:
    """Bytes per element of what a run keeps.

    Attributes:
      weights: resident, of every model.
      optimizer: per parameter of a trained model, beside the weights (moments, masters).
      gradients: while an update runs.
      compute: what forward, generation and their collectives use.
      cache: of the KV cache.
      shared_prompt: the prompt is computed and cached once per group of samples.
      whole_scores: places of a row up to which attention scores stand in memory, float32, while a
        layer computes; longer rows' stay on the chip. 0: they always do.
      adds_gradients: those of a micro-batch stand beside their sum.
      forward_tokens: most tokens per device and forward pass; 0: a forward's passes have as many
        rows as an update's.
      prompt_copies: of the prompts' KV cache, prefill's and the decode loop's own.
      bucket: of a transition, bytes received at a time.
      in_place: the generation copy takes the weights' place (same dtype), else it stands beside.
      own: as hjax's own programs do: sequences that have no room wait for a slot of the rollout
        engine, a pipeline's stages run forward again in a backward pass, a TPU's weights may travel
        along the tensor axis.
    """

    weights: float = 2
    optimizer: float = 12
    gradients: float = 4
    compute: float = 2
    cache: float = 2
    dtype: str = "bfloat16"
    shared_prompt: bool = False
    whole_scores: int = 0
    adds_gradients: bool = False
    forward_tokens: int = 16384
    prompt_copies: int = 1
    bucket: float = 2**24
    in_place: bool = True
    own: bool = False


# The paper's: BF16 weights, FP32 gradients, Adam's moments and masters (section 8.1).
MIXED = Numerics()
# hjax's on accelerators: FP32 weights and moments, a BF16 generation copy.
MASTERS = Numerics(
    weights=4,
    optimizer=8,
    shared_prompt=True,
    whole_scores=WHOLE,
    adds_gradients=True,
    prompt_copies=2,
    forward_tokens=0,
    in_place=False,
    own=True,
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
        """That of a layout (``hjax.sharding.layout.Layout``); ``generates``: with p_g and t_g."""
        shape = layout.mesh.shape
        sizes = {a: shape[a] for a in ("data", "fsdp", "expert", "context")}
        sizes |= {a: shape[a] * shape[f"{a}_micro"] for a in ("pipe", "tensor")}
        if generates:
            sizes |= {f"generate_{a}": shape[a] for a in ("pipe", "tensor")}
        return cls(**sizes)

    @property
    def devices(self) -> int:
        """Their product."""
        return self.replicas * self.context * self.pipe * self.tensor

    @property
    def replicas(self) -> int:
        """Over how many parts a training batch is split."""
        return self.data * self.fsdp * self.expert

    def stride(self, axis: str) -> int:
        """Distance in ranks of neighbours along an axis (hjax.sharding.layout.MESH_AXES)."""
        order = ("data", "fsdp", "expert", "context", "pipe", "tensor")
        return math.prod(getattr(self, a) for a in order[order.index(axis) + 1 :])

    def train_axes(self) -> dict[str, int]:
        """Mesh axes above 1 as ``layout.<role>.train`` takes them."""
        axes = ("data", "fsdp", "expert", "context", "pipe", "tensor")
        sizes = {a: getattr(self, a) for a in axes if getattr(self, a) > 1}
        return sizes or {"data": 1}

    def generate_axes(self) -> dict[str, int]:
        """As ``layout.<role>.generate`` takes them."""
        return {"pipe": self.generate_pipe, "tensor": self.generate_tensor}
