"""Shapes of a decoder."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from hjax.errors import ConfigError

# What every config.json must say; the rest has defaults.
_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
)


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """Llama 3's frequency scaling (transformers ``rope_type: llama3``)."""

    factor: float
    low_frequency_factor: float
    high_frequency_factor: float
    original_max_length: int


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A decoder: RMSNorm, rotary positions, grouped-query attention, gated MLP (Llama).

    Sizes are in elements, lengths in tokens. ``experts`` above 0: that many MLPs per layer, of
    which a token uses ``experts_per_token``; such shapes can be counted and planned for, not run.
    """

    vocab_size: int
    hidden_size: int
    mlp_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    max_length: int
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    norm_epsilon: float = 1e-5
    tie_embeddings: bool = True
    experts: int = 0
    experts_per_token: int = 0

    def __post_init__(self) -> None:
        for field in ("vocab_size", "hidden_size", "mlp_size", "layers", "heads", "kv_heads"):
            if getattr(self, field) < 1:
                raise ConfigError(f"model.{field}={getattr(self, field)}: 1 or more")
        if self.heads % self.kv_heads:
            divisors = [str(k) for k in range(1, self.heads + 1) if self.heads % k == 0]
            raise ConfigError(
                f"model.kv_heads={self.kv_heads} does not divide heads={self.heads}; "
                f"it may be {', '.join(divisors)}"
            )
        if self.head_dim % 2:
            raise ConfigError(
                f"model.head_dim={self.head_dim} is odd; rotary positions need an even size"
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
        }

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], what: str = "config.json") -> ModelConfig:
        """Read a Hugging Face ``config.json`` of the Llama family.

        Raises:
          ConfigError: another family, or a feature this decoder does not have, by name.
        """
        family = config.get("model_type")
        if family != "llama":
            raise ConfigError(f"{what}: model_type {family!r} is not supported; supported: llama")
        for key in ("attention_bias", "mlp_bias"):
            if config.get(key):
                raise ConfigError(f"{what}: {key}=true is not supported; only models without bias")
        if config.get("hidden_act", "silu") != "silu":
            raise ConfigError(f"{what}: hidden_act {config['hidden_act']!r}; supported: silu")
        if config.get("quantization_config"):
            raise ConfigError(
                f"{what}: quantized weights are not supported; give the float32, float16 or "
                "bfloat16 ones"
            )
        for key in _SIZES:
            size = config.get(key)
            if not isinstance(size, int) or size < 1:
                problem = "is missing" if size is None else f"is {size!r}"
                raise ConfigError(f"{what}: {key} {problem}; a whole number of 1 or more")
        rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
        theta = config.get("rope_theta", rope.get("rope_theta", 10000.0))
        heads = config["num_attention_heads"]
        return cls(
            vocab_size=config["vocab_size"],
            hidden_size=config["hidden_size"],
            mlp_size=config["intermediate_size"],
            layers=config["num_hidden_layers"],
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            max_length=config.get("max_position_embeddings", 2048),
            rope_theta=float(theta),
            rope_scaling=_rope_scaling(rope, what),
            norm_epsilon=config.get("rms_norm_eps", 1e-6),
            tie_embeddings=bool(config.get("tie_word_embeddings", False)),
        )

    def to_hf(self) -> dict[str, Any]:
        """The ``config.json`` that transformers' LlamaForCausalLM reads."""
        config: dict[str, Any] = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "attention_bias": False,
            "mlp_bias": False,
            "hidden_act": "silu",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.mlp_size,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "max_position_embeddings": self.max_length,
            "rms_norm_eps": self.norm_epsilon,
            "rope_theta": self.rope_theta,
            "tie_word_embeddings": self.tie_embeddings,
            "torch_dtype": "float32",
        }
        if self.rope_scaling is not None:
            config["rope_scaling"] = {
                "rope_type": "llama3",
                "factor": self.rope_scaling.factor,
                "low_freq_factor": self.rope_scaling.low_frequency_factor,
                "high_freq_factor": self.rope_scaling.high_frequency_factor,
                "original_max_position_embeddings": self.rope_scaling.original_max_length,
            }
        return config


def _rope_scaling(rope: Mapping[str, Any], what: str) -> RopeScaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind != "llama3":
        raise ConfigError(
            f"{what}: rope_type {kind!r} is not supported; supported: default, llama3"
        )
    needed = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    missing = [key for key in needed if key not in rope]
    if missing:
        raise ConfigError(f"{what}: rope_type 'llama3' needs {', '.join(missing)} too")
    return RopeScaling(
        factor=float(rope["factor"]),
        low_frequency_factor=float(rope["low_freq_factor"]),
        high_frequency_factor=float(rope["high_freq_factor"]),
        original_max_length=int(rope["original_max_position_embeddings"]),
    )
