"""Published decoders by name: their shapes, without weights.

For counting, planning and compiling. Biases (Qwen2.5's queries, keys and values) and the norms on
queries and keys (Qwen3) are left out: they are below a thousandth of the parameters.
"""

from __future__ import annotations

import difflib

from hjax.errors import ConfigError
from hjax.models.config import ModelConfig


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


# Llama 1 and 2 (Touvron et al. 2023), Code Llama's 34B, Llama 3 (Dubey et al. 2024), Qwen2.5 and
# Qwen3 (their config.json files).
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
