"""Published decoders by name: their shapes, without weights.

For counting, planning and compiling. Biases (Qwen2.5's queries, keys and values) and the norms on
queries and keys (Qwen3) are left out: they are below a thousandth of the parameters.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
from pathlib import Path

from hjax.errors import ConfigError
from hjax.models.config import ModelConfig

# Families whose config.json can be read for planning, beside those that can be run.
_PLANNED = ("llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe")
# What of a config.json decides sizes; its MLP's is read apart.
_SIZES = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "tie_word_embeddings",
)


def _shape(
    layers: int,
    hidden: int,
    mlp: int,
    heads: int,
    kv_heads: int,
    vocab: int,
    length: int,
    head_dim: int = 128,
    tied: bool = False,
    theta: float = 1e4,
) -> ModelConfig:
    return ModelConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        mlp_size=mlp,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        max_length=length,
        rope_theta=theta,
        tie_embeddings=tied,
    )


def _qwen2(
    layers: int, hidden: int, mlp: int, heads: int, kv_heads: int, tied: bool, head_dim: int = 128
) -> ModelConfig:
    vocab = 151936 if tied else 152064
    return _shape(layers, hidden, mlp, heads, kv_heads, vocab, 32768, head_dim, tied, 1e6)


def _qwen3(layers: int, hidden: int, mlp: int, heads: int, tied: bool) -> ModelConfig:
    return _shape(layers, hidden, mlp, heads, 8, 151936, 40960, tied=tied, theta=1e6)


def _moe(dense: ModelConfig, experts: int, per_token: int) -> ModelConfig:
    return dataclasses.replace(dense, experts=experts, experts_per_token=per_token)


# Llama 1 and 2 (Touvron et al. 2023), Code Llama's 34B, Llama 3 (Dubey et al. 2024), Qwen2.5,
# Qwen3 and Mixtral (their config.json files).
SHAPES: dict[str, ModelConfig] = {
    "llama-7b": _shape(32, 4096, 11008, 32, 32, 32000, 4096),
    "llama-13b": _shape(40, 5120, 13824, 40, 40, 32000, 4096),
    "llama-34b": _shape(48, 8192, 22016, 64, 8, 32000, 16384),
    "llama-70b": _shape(80, 8192, 28672, 64, 8, 32000, 4096),
    "llama-3-8b": _shape(32, 4096, 14336, 32, 8, 128256, 8192, theta=5e5),
    "llama-3-70b": _shape(80, 8192, 28672, 64, 8, 128256, 8192, theta=5e5),
    "llama-3.2-1b": _shape(16, 2048, 8192, 32, 8, 128256, 131072, 64, True, 5e5),
    "llama-3.2-3b": _shape(28, 3072, 8192, 24, 8, 128256, 131072, 128, True, 5e5),
    "qwen2.5-0.5b": _qwen2(24, 896, 4864, 14, 2, True, 64),
    "qwen2.5-1.5b": _qwen2(28, 1536, 8960, 12, 2, True),
    "qwen2.5-3b": _qwen2(36, 2048, 11008, 16, 2, True),
    "qwen2.5-7b": _qwen2(28, 3584, 18944, 28, 4, False),
    "qwen2.5-14b": _qwen2(48, 5120, 13824, 40, 8, False),
    "qwen2.5-32b": _qwen2(64, 5120, 27648, 40, 8, False),
    "qwen2.5-72b": _qwen2(80, 8192, 29568, 64, 8, False),
    "qwen3-0.6b": _qwen3(28, 1024, 3072, 16, True),
    "qwen3-1.7b": _qwen3(28, 2048, 6144, 16, True),
    "qwen3-4b": _qwen3(36, 2560, 9728, 32, True),
    "qwen3-8b": _qwen3(36, 4096, 12288, 32, False),
    "qwen3-14b": _qwen3(40, 5120, 17408, 40, False),
    "qwen3-32b": _qwen3(64, 5120, 25600, 64, False),
    "mixtral-8x7b": _moe(_shape(32, 4096, 14336, 32, 8, 32000, 32768, theta=1e6), 8, 2),
    "qwen3-30b-a3b": _moe(_shape(48, 2048, 768, 32, 4, 151936, 40960, theta=1e6), 128, 8),
    "qwen3-235b-a22b": _moe(_shape(94, 4096, 1536, 64, 4, 151936, 40960, theta=1e6), 128, 8),
}


def published(name: str) -> ModelConfig:
    """The shape of a published model.

    Raises:
      ConfigError: an unknown name, with the nearest known ones.
    """
    shape = SHAPES.get(name.lower())
    if shape is None:
        near = difflib.get_close_matches(name.lower(), SHAPES, n=3, cutoff=0.4) or list(SHAPES)
        raise ConfigError(f"no published model is named {name!r}; known: {', '.join(near)}")
    return shape


def planning_shape(name: str) -> ModelConfig:
    """A shape to count with: a published name, or a directory or file of a ``config.json``.

    Families that hjax cannot run yet are read too, as long as they are decoders of this kind.

    Raises:
      ConfigError: no such name or file, or another kind of model.
    """
    path = Path(name).expanduser()
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        return published(name)
    try:
        config = json.loads(file.read_text())
    except ValueError as error:
        raise ConfigError(f"{file}: not JSON ({error})") from error
    family = config.get("model_type")
    if family not in _PLANNED:
        raise ConfigError(f"{file}: model_type {family!r}; planned for: {', '.join(_PLANNED)}")
    experts = config.get("num_local_experts") or config.get("num_experts") or 0
    mlp = config.get("moe_intermediate_size") or config.get("intermediate_size")
    plain = {
        "model_type": "llama",
        "intermediate_size": mlp,
        **{k: config[k] for k in _SIZES if k in config},
    }
    dense = ModelConfig.from_hf(plain, str(file))
    return _moe(dense, experts, config.get("num_experts_per_tok", 0)) if experts else dense
