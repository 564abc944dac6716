"""What a decoder's shape says about parameters, FLOPs and bytes.

One place for dry runs, MFU and the cost model of the auto-mapping (hjax.planning).
"""

from __future__ import annotations

from hjax.models.config import ModelConfig


def attention_parameters(config: ModelConfig) -> int:
    """Query, key, value and output projections of a layer: hidden * head_dim * (2 heads + 2
    kv_heads)."""
    return config.hidden_size * config.head_dim * 2 * (config.heads + config.kv_heads)


def mlp_parameters(config: ModelConfig) -> int:
    """Gate, up and down of one MLP or expert: 3 * hidden * mlp."""
    return 3 * config.hidden_size * config.mlp_size


def layer_parameters(config: ModelConfig) -> int:
    """One layer: attention, its MLP or all its experts with their router, two norms."""
    mlp = mlp_parameters(config) * max(config.experts, 1)
    router = config.hidden_size * config.experts
    return attention_parameters(config) + mlp + router + 2 * config.hidden_size


def active_layer_parameters(config: ModelConfig) -> int:
    """Those of a layer that multiply one token."""
    mlp = mlp_parameters(config) * (config.experts_per_token if config.experts else 1)
    return attention_parameters(config) + mlp + config.hidden_size * config.experts


def parameters(config: ModelConfig, scalar: bool = False) -> int:
    """Of the whole model; ``scalar``: with a value head and its bias instead of the vocabulary's.

    The one count that everyone takes.
    """
    embedding = config.vocab_size * config.hidden_size
    head = 0 if config.tie_embeddings else embedding
    if scalar:
        head = config.hidden_size + 1
    return config.layers * layer_parameters(config) + embedding + head + config.hidden_size


def forward_flops(
    config: ModelConfig, length: int, scalar: bool = False, context: float | None = None
) -> float:
    """FLOPs of a forward over one sequence of ``length`` tokens.

    2 per parameter and token, and 4 * heads * head_dim per layer and pair of a token and one it
    attends to; ``context``: how many that is on average (causal: half the length).
    """
    head = config.hidden_size * (1 if scalar else config.vocab_size)
    products = 2.0 * (config.layers * active_layer_parameters(config) + head) * length
    pairs = length * (length / 2 if context is None else context)
    return products + 4.0 * config.heads * config.head_dim * config.layers * pairs


def cache_elements(config: ModelConfig) -> int:
    """Keys and values of one token in one layer: 2 * kv_heads * head_dim."""
    return 2 * config.kv_heads * config.head_dim


def cache_bytes(config: ModelConfig, element_bytes: float = 2) -> float:
    """Keys and values of one token in all layers."""
    return config.layers * cache_elements(config) * element_bytes


def activation_elements(config: ModelConfig) -> tuple[int, int]:
    """(all, those that a tensor axis does not split): elements per token of one layer that its
    backward pass reads, attention scores never kept whole.

    Whole: both norms' inputs and outputs. Split: queries, keys, values, attention's output; gate,
    up and their product, of each expert in use.
    """
    whole = 4 * config.hidden_size
    attention = config.head_dim * (2 * config.heads + 2 * config.kv_heads)
    mlp = 3 * config.mlp_size * (config.experts_per_token if config.experts else 1)
    return whole + attention + mlp, whole
