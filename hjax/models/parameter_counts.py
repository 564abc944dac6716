"""Parameter counts, FLOPs and KV-cache bytes of a decoder, from its ``ModelConfig``.

Used by dry runs, MFU and the cost model of the auto-mapping (hjax.planning).
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from hjax.models.architecture import decoder_parameters, scalar_parameters
from hjax.models.model_config import ModelConfig
from hjax.models.parameter_spec import ParameterKind, ParameterSpec


def all_specs(declared: Mapping[str, Any]) -> Iterator[ParameterSpec]:
    """All ``ParameterSpec`` in a nested dict."""
    for parameter in declared.values():
        if isinstance(parameter, ParameterSpec):
            yield parameter
        else:
            yield from all_specs(parameter)


def expert_parameters(config: ModelConfig) -> int:
    """Parameters in all experts of a layer; 0 without experts."""
    layers = all_specs(decoder_parameters(config)["layers"])
    return sum(p.size for p in layers if "experts" in p.names[:-1]) // config.layers


def layer_parameters(config: ModelConfig) -> int:
    """Parameters of one layer: attention, MLP or all experts and router, norms, biases."""
    return sum(p.size for p in all_specs(decoder_parameters(config)["layers"])) // config.layers


def active_layer_parameters(config: ModelConfig) -> int:
    """Parameters of a layer that multiply one token."""
    matrices = [
        p for p in all_specs(decoder_parameters(config)["layers"]) if p.kind is ParameterKind.MATRIX
    ]
    experts = sum(p.size for p in matrices if "experts" in p.names[:-1])
    used = experts * config.experts_per_token // max(config.experts, 1)
    return (sum(p.size for p in matrices) - experts + used) // config.layers


def parameter_count(config: ModelConfig, scalar: bool = False) -> int:
    """Parameters of the model; ``scalar``: with a scalar head and its bias, not an output table."""
    declared = (scalar_parameters if scalar else decoder_parameters)(config)
    return sum(parameter.size for parameter in all_specs(declared))


def learned_parameters(config: ModelConfig, scalar: bool = False) -> int:
    """Trainable parameters: all, or adapters and a scalar head."""
    declared = (scalar_parameters if scalar else decoder_parameters)(config)
    everything = config.lora is None
    return sum(p.size for p in all_specs(declared) if everything or p.kind.trained_with_adapters)


def update_passes(config: ModelConfig, scalar: bool = False) -> float:
    """FLOPs of an update in forward passes: 3 for trainable parameters, 2 for frozen ones, which
    have no gradients."""
    return 2 + learned_parameters(config, scalar) / parameter_count(config, scalar)


def forward_flops(
    config: ModelConfig, length: int, scalar: bool = False, context: float | None = None
) -> float:
    """FLOPs of a forward over one sequence of ``length`` tokens.

    2 per parameter and token, and 4 * heads * head_dim per layer and pair of a token and one it
    attends to. ``context``: average number of attended tokens; None: half the length, less with a
    sliding window.
    """
    head = config.hidden_size * (1 if scalar else config.vocab_size)
    products = 2.0 * (config.layers * active_layer_parameters(config) + head) * length
    if context is not None:
        pairs = config.layers * length * context
    else:
        pairs = attention_pairs(config, length)
    return products + 4.0 * config.heads * config.head_dim * pairs


def attention_pairs(config: ModelConfig, length: int) -> float:
    """Pairs of a token and one it attends to in a sequence of ``length``, over all layers: half of
    all pairs (causal), fewer with a sliding window."""
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
