"""What a decoder's shape says about parameters, FLOPs and bytes.

One place for dry runs, MFU and the cost model of the auto-mapping (hjax.planning).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from hjax.models.architecture import decoder_parameters, scalar_parameters
from hjax.models.config import ModelConfig
from hjax.models.declaration import Kind, Parameter


def _all(declared: Mapping[str, Any]) -> Iterator[Parameter]:
    for parameter in declared.values():
        if isinstance(parameter, Parameter):
            yield parameter
        else:
            yield from _all(parameter)


def expert_parameters(config: ModelConfig) -> int:
    """Of all experts of a layer; 0 without any."""
    layers = _all(decoder_parameters(config)["layers"])
    return sum(p.size for p in layers if "experts" in p.names[:-1]) // config.layers


def layer_parameters(config: ModelConfig) -> int:
    """One layer: attention, its MLP or all its experts with their router, norms, biases."""
    return sum(p.size for p in _all(decoder_parameters(config)["layers"])) // config.layers


def active_layer_parameters(config: ModelConfig) -> int:
    """Those of a layer that multiply one token."""
    matrices = [p for p in _all(decoder_parameters(config)["layers"]) if p.kind is Kind.MATRIX]
    experts = sum(p.size for p in matrices if "experts" in p.names[:-1])
    used = experts * config.experts_per_token // max(config.experts, 1)
    return (sum(p.size for p in matrices) - experts + used) // config.layers


def parameters(config: ModelConfig, scalar: bool = False) -> int:
    """Of the whole model; ``scalar``: with a value head and its bias instead of the vocabulary's.

    The one count that everyone takes.
    """
    declared = (scalar_parameters if scalar else decoder_parameters)(config)
    return sum(parameter.size for parameter in _all(declared))


def learned_parameters(config: ModelConfig, scalar: bool = False) -> int:
    """Those that an update changes: all, or adapters and a scalar head."""
    declared = (scalar_parameters if scalar else decoder_parameters)(config)
    everything = config.lora is None
    return sum(p.size for p in _all(declared) if everything or p.kind.beside_adapters)


def byte_parameters(config: ModelConfig) -> int:
    """Those that are kept in one byte each."""
    return sum(p.size for p in _all(decoder_parameters(config)) if p.quantized)


def update_passes(config: ModelConfig, scalar: bool = False) -> float:
    """Forward passes whose FLOPs an update takes: 3, and 2 of what is frozen beside adapters, of
    which there are no gradients."""
    return 2 + learned_parameters(config, scalar) / parameters(config, scalar)


def forward_flops(
    config: ModelConfig, length: int, scalar: bool = False, context: float | None = None
) -> float:
    """FLOPs of a forward over one sequence of ``length`` tokens.

    2 per parameter and token, and 4 * heads * head_dim per layer and pair of a token and one it
    attends to; ``context``: how many that is on average (causal: half the length, or what a
    layer's window leaves of it).
    """
    head = config.hidden_size * (1 if scalar else config.vocab_size)
    products = 2.0 * (config.layers * active_layer_parameters(config) + head) * length
    if context is not None:
        pairs = config.layers * length * context
    else:
        pairs = attended(config, length)
    return products + 4.0 * config.heads * config.head_dim * pairs


def attended(config: ModelConfig, length: int) -> float:
    """Pairs of a token and one it attends to in a sequence of ``length``, in all layers: causal,
    half of all, or what a layer's window leaves of it."""
    windows = [kind.window for kind in config.layer_kinds] or [None] * config.layers
    return math.fsum(_pairs(length, window) for window in windows)


def _pairs(length: int, window: int | None) -> float:
    if window is None or window >= length:
        return length * (length / 2)
    return window * (window + 1) / 2 + (length - window) * window


def cache_elements(config: ModelConfig) -> int:
    """Keys and values of one token in one layer: 2 * kv_heads * head_dim."""
    return 2 * config.kv_heads * config.head_dim


def cache_bytes(config: ModelConfig, element_bytes: float = 2) -> float:
    """Keys and values of one token in all layers."""
    return config.layers * cache_elements(config) * element_bytes


def activation_elements(config: ModelConfig) -> tuple[int, int]:
    """(all, those that a tensor axis does not split): elements per token of one layer that its
    backward pass reads, attention scores never kept whole.

    Whole: both norms' inputs and outputs. Split: queries, keys, values, attention's output, queries
    and keys before a norm of their own; gate, up and their product, of each expert in use.
    """
    whole = (8 if config.norms == "both" else 4) * config.hidden_size
    attention = config.head_dim * (2 * config.heads + 2 * config.kv_heads)
    if config.query_key_norm:
        attention += config.head_dim * (config.heads + config.kv_heads)
    inner = (3 if config.gated_mlp else 2) * config.mlp_size
    mlp = inner * (config.experts_per_token if config.experts else 1)
    return whole + attention + mlp, whole


def gradient_elements(config: ModelConfig) -> tuple[int, int]:
    """As ``activation_elements``, what stands beside the activations of one layer while its
    backward pass is at the MLP, where it needs most.

    Whole: the gradients of the layer's output and of the MLP's input. Split: the gradients of the
    MLP's parts, and the product of gate and up where that is made again.
    """
    whole = 2 * config.hidden_size
    inner = (3 if config.gated_mlp else 2) * config.mlp_size
    parts = inner * (config.experts_per_token if config.experts else 1)
    return whole + parts + remade_elements(config), whole


def apart_elements(
    tokens: float, places: float, attention_width: float, cache_elements: float
) -> tuple[float, float]:
    """Elements of a layer's attention where the kernel wants each sequence in a row of its own, as
    cuDNN's does: what it keeps beside ``activation_elements``, and what stands while its backward
    pass runs.

    It keeps its own queries, keys, values and outputs; these go on as tokens once more.

    Args:
      tokens: with prompts that several responses share once.
      places: with a prompt for each response.
      attention_width, cache_elements: of queries, and of keys and values, per token.
    """
    each = 2 * attention_width + cache_elements
    return (places - tokens) * each + tokens * attention_width, 2 * places * each


def remade_elements(config: ModelConfig) -> int:
    """Of ``activation_elements`` the product of a gated SiLU MLP, whose written-out backward pass
    makes it again; else 0."""
    written_out = config.gated_mlp and config.activation == "silu" and not config.mlp_bias
    return config.mlp_size if written_out and not config.experts else 0


def product_elements(config: ModelConfig) -> tuple[int, int]:
    """As ``activation_elements``, what a layer's products but the MLP's first give for a token:
    queries, keys and values, what attention adds, and what the MLP does where that is normed."""
    whole = config.hidden_size * (1 if config.norms == "before" else 2)
    return config.heads * config.head_dim + cache_elements(config) + whole, whole


def gate_elements(config: ModelConfig) -> int:
    """What a layer's MLP gives for a token by its first products, of all experts in use."""
    each = (2 if config.gated_mlp else 1) * config.mlp_size
    return each * (config.experts_per_token if config.experts else 1)
