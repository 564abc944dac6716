"""Presets: configs of published models by name, without weights, for planning and compiling."""

import difflib
from typing import Any

from hjax.errors import ConfigError
from hjax.models.families import from_hf
from hjax.models.huggingface import read_config
from hjax.models.model_config import ModelConfig
from hjax.user_input import user_path


def shape_of(
    family: str,
    layers: int,
    hidden: int,
    mlp: int,
    heads: int,
    kv_heads: int,
    vocab: int,
    length: int,
    **keys: Any,
) -> ModelConfig:
    """A ``ModelConfig`` from sizes and further keys of a config.json."""
    sizes = {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "max_position_embeddings": length,
    }
    return from_hf({"model_type": family, **sizes, **keys})


def _qwen3_moe(layers: int, hidden: int, mlp: int, heads: int) -> ModelConfig:
    return shape_of(
        "qwen3_moe", layers, hidden, mlp, heads, 4, 151936, 40960, head_dim=128, num_experts=128,
        moe_intermediate_size=mlp, norm_topk_prob=True, rope_theta=1e6,
    )  # fmt: skip


def _gpt2(layers: int, hidden: int, heads: int) -> ModelConfig:
    sizes = {"n_layer": layers, "n_embd": hidden, "n_head": heads, "n_positions": 1024}
    return from_hf({"model_type": "gpt2", "vocab_size": 50257, **sizes})


def _gemma3(
    layers: int, hidden: int, heads: int, kv_heads: int, head_dim: int = 256, scalar: int = 256
) -> ModelConfig:
    """Gemma 3 text models with 131072 tokens of context."""
    return shape_of(
        "gemma3_text", layers, hidden, 4 * hidden, heads, kv_heads, 262208, 131072,
        head_dim=head_dim, query_pre_attn_scalar=scalar, sliding_window=1024,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
    )  # fmt: skip


_LLAMA, _LLAMA3 = {"rms_norm_eps": 1e-5}, {"rms_norm_eps": 1e-5, "rope_theta": 5e5}
_QWEN, _TIED = {"rope_theta": 1e6}, {"tie_word_embeddings": True}
# Llama 1 and 2 (Touvron et al. 2023), Code Llama's 34B, Llama 3 (Dubey et al. 2024), Qwen2.5,
# Qwen3, Mixtral and those after it (their config.json files).
PRESETS: dict[str, ModelConfig] = {
    "llama-7b": shape_of("llama", 32, 4096, 11008, 32, 32, 32000, 4096, **_LLAMA),
    "llama-13b": shape_of("llama", 40, 5120, 13824, 40, 40, 32000, 4096, **_LLAMA),
    "llama-34b": shape_of("llama", 48, 8192, 22016, 64, 8, 32000, 16384, **_LLAMA),
    "llama-70b": shape_of("llama", 80, 8192, 28672, 64, 8, 32000, 4096, **_LLAMA),
    "llama-3-8b": shape_of("llama", 32, 4096, 14336, 32, 8, 128256, 8192, **_LLAMA3),
    "llama-3-70b": shape_of("llama", 80, 8192, 28672, 64, 8, 128256, 8192, **_LLAMA3),
    "llama-3.2-1b": shape_of("llama", 16, 2048, 8192, 32, 8, 128256, 131072, **_LLAMA3, **_TIED),
    "llama-3.2-3b": shape_of("llama", 28, 3072, 8192, 24, 8, 128256, 131072, **_LLAMA3, **_TIED),
    "qwen2.5-0.5b": shape_of("qwen2", 24, 896, 4864, 14, 2, 151936, 32768, **_QWEN, **_TIED),
    "qwen2.5-1.5b": shape_of("qwen2", 28, 1536, 8960, 12, 2, 151936, 32768, **_QWEN, **_TIED),
    "qwen2.5-3b": shape_of("qwen2", 36, 2048, 11008, 16, 2, 151936, 32768, **_QWEN, **_TIED),
    "qwen2.5-7b": shape_of("qwen2", 28, 3584, 18944, 28, 4, 152064, 32768, **_QWEN),
    "qwen2.5-14b": shape_of("qwen2", 48, 5120, 13824, 40, 8, 152064, 32768, **_QWEN),
    "qwen2.5-32b": shape_of("qwen2", 64, 5120, 27648, 40, 8, 152064, 32768, **_QWEN),
    "qwen2.5-72b": shape_of("qwen2", 80, 8192, 29568, 64, 8, 152064, 32768, **_QWEN),
    "qwen3-0.6b": shape_of("qwen3", 28, 1024, 3072, 16, 8, 151936, 40960, **_QWEN, **_TIED),
    "qwen3-1.7b": shape_of("qwen3", 28, 2048, 6144, 16, 8, 151936, 40960, **_QWEN, **_TIED),
    "qwen3-4b": shape_of("qwen3", 36, 2560, 9728, 32, 8, 151936, 40960, **_QWEN, **_TIED),
    "qwen3-8b": shape_of("qwen3", 36, 4096, 12288, 32, 8, 151936, 40960, **_QWEN),
    "qwen3-14b": shape_of("qwen3", 40, 5120, 17408, 40, 8, 151936, 40960, **_QWEN),
    "qwen3-32b": shape_of("qwen3", 64, 5120, 25600, 64, 8, 151936, 40960, **_QWEN),
    "mixtral-8x7b": shape_of(
        "mixtral", 32, 4096, 14336, 32, 8, 32000, 32768, num_local_experts=8, num_experts_per_tok=2
    ),
    "mistral-7b": shape_of("mistral", 32, 4096, 14336, 32, 8, 32768, 32768, rope_theta=1e6),
    "smollm3-3b": shape_of("smollm3", 36, 2048, 11008, 16, 4, 128256, 65536, rope_theta=5e6),
    "olmo-2-7b": shape_of("olmo2", 32, 4096, 11008, 32, 32, 100352, 4096, rope_theta=5e5),
    "phi-3-mini-4k": shape_of("phi3", 32, 3072, 8192, 32, 32, 32064, 4096, sliding_window=2047),
    "gemma-2-2b": shape_of("gemma2", 26, 2304, 9216, 8, 4, 256000, 8192),
    "gemma-2-9b": shape_of("gemma2", 42, 3584, 14336, 16, 8, 256000, 8192),
    "gemma-2-27b": shape_of(
        "gemma2", 46, 4608, 36864, 32, 16, 256000, 8192, head_dim=128, query_pre_attn_scalar=144
    ),
    "gemma-3-1b": shape_of("gemma3_text", 26, 1152, 6912, 4, 1, 262144, 32768, sliding_window=512),
    "gemma-3-4b": _gemma3(34, 2560, 8, 4),
    "gemma-3-12b": _gemma3(48, 3840, 16, 8),
    "gemma-3-27b": _gemma3(62, 5376, 32, 16, 128, 168),
    "gpt-oss-20b": shape_of("gpt_oss", 24, 2880, 2880, 64, 8, 201088, 131072, num_local_experts=32),
    "gpt-oss-120b": shape_of(
        "gpt_oss", 36, 2880, 2880, 64, 8, 201088, 131072, num_local_experts=128
    ),
    "gpt2": _gpt2(12, 768, 12),
    "gpt2-large": _gpt2(36, 1280, 20),
    "qwen3-30b-a3b": _qwen3_moe(48, 2048, 768, 32),
    "qwen3-235b-a22b": _qwen3_moe(94, 4096, 1536, 64),
}


def preset(name: str) -> ModelConfig:
    """The config of a published model.

    Raises:
      ConfigError: an unknown name; the error lists similar ones.
    """
    shape = PRESETS.get(name.lower())
    if shape is None:
        near = difflib.get_close_matches(name.lower(), PRESETS, n=3, cutoff=0.4) or list(PRESETS)
        raise ConfigError(f"no published model is named {name!r}; known: {', '.join(near)}")
    return shape


def planning_shape(name: str) -> ModelConfig:
    """A config for planning: a preset's name, or the path of a ``config.json`` or its directory.

    Raises:
      ConfigError: no such name or file, or an unsupported model.
    """
    path = user_path(name, "model ")
    if not path.exists():
        return preset(name)
    return read_config(path if path.is_dir() else path.parent)
