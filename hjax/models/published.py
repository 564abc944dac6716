"""Published decoders by name: their shapes, without weights.

For counting, planning and compiling.
"""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

from hjax.errors import ConfigError
from hjax.models.config import ModelConfig
from hjax.models.huggingface import read_config
from hjax.models.rotary import Rope


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
    **more: Any,
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
        ropes=(Rope(theta),),
        tie_embeddings=tied,
        **more,
    )


def _qwen2(
    layers: int, hidden: int, mlp: int, heads: int, kv_heads: int, tied: bool, head_dim: int = 128
) -> ModelConfig:
    sizes = layers, hidden, mlp, heads, kv_heads, 151936 if tied else 152064, 32768, head_dim
    return _shape(*sizes, tied, 1e6, family="qwen2", qkv_bias=True)


def _qwen3(layers: int, hidden: int, mlp: int, heads: int, tied: bool) -> ModelConfig:
    sizes = layers, hidden, mlp, heads, 8, 151936, 40960
    return _shape(*sizes, tied=tied, theta=1e6, family="qwen3", query_key_norm="head")


def _qwen3_moe(layers: int, hidden: int, mlp: int, heads: int) -> ModelConfig:
    return _shape(
        layers, hidden, mlp, heads, 4, 151936, 40960, theta=1e6,
        family="qwen3_moe", query_key_norm="head", experts=128, experts_per_token=8,
    )  # fmt: skip


_MIXTRAL = _shape(
    32, 4096, 14336, 32, 8, 32000, 32768, theta=1e6,
    family="mixtral", experts=8, experts_per_token=2,
)  # fmt: skip

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
    "mixtral-8x7b": _MIXTRAL,
    "qwen3-30b-a3b": _qwen3_moe(48, 2048, 768, 32),
    "qwen3-235b-a22b": _qwen3_moe(94, 4096, 1536, 64),
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

    Raises:
      ConfigError: no such name or file, or another kind of model.
    """
    path = Path(name).expanduser()
    if not path.exists():
        return published(name)
    return read_config(path if path.is_dir() else path.parent)
