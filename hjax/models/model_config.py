"""``ModelConfig``: the shapes and architecture options of a decoder."""

from __future__ import annotations

import dataclasses

from hjax.errors import ConfigError
from hjax.models.lora import Lora
from hjax.models.rotary import Rope

ACTIVATIONS = ("silu", "gelu_tanh", "clamped_swiglu")


@dataclasses.dataclass(frozen=True)
class LayerKind:
    """Options that may differ between layers: sliding window and rope.

    Attributes:
      window: sliding window, tokens that a token sees, itself included; None: all before it.
      rope: index into the model's ``ropes``; None: no rotary positions (NoPE).
    """

    window: int | None = None
    rope: int | None = 0


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The architecture of a decoder; the defaults are Llama's.

    Sizes are in elements, lengths in tokens.

    Attributes:
      experts: MLPs per layer, of which a token uses ``experts_per_token``; 0: a dense MLP.
      normalize_router: whether the routing weights of a token's experts add up to 1.
      router_bias: a bias of the router.
      router_loss: weight of the load-balancing loss in config.json.
      family: of ``hjax.models.families``, for names in config.json and tensors; a user's family is
        ``path.py:Class``.
      dtype: of the files it came from, used again in exports; not compared.
      token_ids: special token ids of config.json, those that it has; not compared.
      ropes: rotary positions, of which a layer uses one; empty: ``learned_positions``.
      norms: ``before`` attention and MLP (pre-norm), ``after`` them (post-norm), or ``both``.
      layer_norm: LayerNorm with a bias instead of RMSNorm.
      norm_offset: added to the weight of a norm.
      query_key_norm: QK-norm, RMSNorm over each ``head`` or over ``all`` heads; ``""``: none.
      qkv_bias, output_bias, mlp_bias: a bias after these products.
      gated_mlp: whether the MLP is gated; else ``down(activation(up(x)))``.
      activation: of the MLP, of ``ACTIVATIONS``; ``clamped_swiglu`` has ``activation_alpha`` and
        ``activation_limit``.
      sinks: attention sinks, a score per head that joins the softmax and has no value.
      embedding_scale: factor of the embeddings.
      attention_scale: of scores; None: ``head_dim ** -0.5``.
      attention_softcap, final_softcap: ``cap * tanh(x / cap)`` of scores and logits; 0: none.
      layer_kinds: one per layer; empty: all equal.
      lora: adapters, the only trainable parameters besides a scalar head; None: none.
      quantized: format of the frozen matrices beside adapters, of
        ``hjax.models.quantized.FORMATS``; empty: floats.
    """

    vocab_size: int
    hidden_size: int
    mlp_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    max_length: int
    ropes: tuple[Rope, ...] = (Rope(),)
    norm_epsilon: float = 1e-5
    tie_embeddings: bool = True
    experts: int = 0
    experts_per_token: int = 0
    normalize_router: bool = True
    router_loss: float = 0.0
    family: str = "llama"
    dtype: str = dataclasses.field(default="float32", compare=False)
    token_ids: tuple[tuple[str, int | tuple[int, ...]], ...] = dataclasses.field(
        default=(), compare=False
    )
    norms: str = "before"
    layer_norm: bool = False
    norm_offset: float = 0.0
    query_key_norm: str = ""
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    gated_mlp: bool = True
    activation: str = "silu"
    activation_alpha: float = 0.0
    activation_limit: float = 0.0
    sinks: bool = False
    router_bias: bool = False
    embedding_scale: float = 1.0
    attention_scale: float | None = None
    attention_softcap: float = 0.0
    final_softcap: float = 0.0
    layer_kinds: tuple[LayerKind, ...] = ()
    lora: Lora | None = None
    quantized: str = ""

    def __post_init__(self) -> None:
        for field in ("vocab_size", "hidden_size", "mlp_size", "layers", "heads", "kv_heads"):
            if getattr(self, field) < 1:
                raise ConfigError(f"model.{field}={getattr(self, field)}: 1 or more")
        if not 0 <= self.norm_epsilon <= 1:
            raise ConfigError(f"model.norm_epsilon={self.norm_epsilon}: from 0 to 1")
        if self.heads % self.kv_heads:
            divisors = [str(k) for k in range(1, min(self.heads, 1024) + 1) if self.heads % k == 0]
            raise ConfigError(
                f"model.kv_heads={self.kv_heads} does not divide heads={self.heads}; "
                f"it may be {', '.join(divisors)}"
            )
        for rope in self.ropes:
            if rope.rotary_dim(self.head_dim) % 2:
                part = "" if rope.rotary_fraction == 1 else f" times {rope.rotary_fraction}"
                raise ConfigError(
                    f"model.head_dim={self.head_dim}{part} is odd; rotary positions need an even "
                    "size"
                )
        if self.layer_kinds and len(self.layer_kinds) != self.layers:
            raise ConfigError(
                f"layer_kinds has {len(self.layer_kinds)} entries for {self.layers} layers"
            )
        if not 0 <= self.experts_per_token <= self.experts or (
            self.experts and not self.experts_per_token
        ):
            raise ConfigError(
                f"model.experts_per_token={self.experts_per_token}: from 1 to experts="
                f"{self.experts}, or both 0"
            )

    @property
    def dimensions(self) -> dict[str, int]:
        """Size by logical axis, of the axes that a layout may split."""
        return {
            "layers": self.layers,
            "embed": self.hidden_size,
            "heads": self.heads,
            "kv_heads": self.kv_heads,
            "mlp": self.mlp_size,
            "vocab": self.vocab_size,
            **({"experts": self.experts} if self.experts else {}),
        }

    @property
    def base(self) -> ModelConfig:
        """The same without adapters and quantization."""
        return dataclasses.replace(self, lora=None, quantized="")

    @property
    def learned_positions(self) -> bool:
        """Whether the model has learned position embeddings."""
        return not self.ropes

    @property
    def rope_depends_on_length(self) -> bool:
        """Whether rotary positions depend on the final length (dynamic NTK, LongRoPE)."""
        scalings = (rope.scaling for rope in self.ropes)
        return any(scaling is not None and scaling.depends_on_length for scaling in scalings)

    @property
    def period(self) -> tuple[LayerKind, ...]:
        """The shortest repeating sequence of layer kinds; its last repetition may be incomplete.

        A window of at least ``max_length`` counts as none.
        """
        if not self.layer_kinds:
            return (LayerKind(rope=0 if self.ropes else None),)
        kinds = [
            dataclasses.replace(kind, window=None)
            if kind.window is not None and kind.window >= self.max_length
            else kind
            for kind in self.layer_kinds
        ]
        count = next(
            n for n in range(1, self.layers + 1)
            if all(kind == kinds[i % n] for i, kind in enumerate(kinds))
        )  # fmt: skip
        return tuple(kinds[:count])
