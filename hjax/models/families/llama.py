"""Llama 1, 2 and 3.x (Touvron et al. 2023, arXiv 2302.13971; Dubey et al. 2024, 2407.21783)."""

from __future__ import annotations

from typing import Any

from hjax.models.config import ModelConfig
from hjax.models.families.base import Family
from hjax.models.families.given import Given


class Llama(Family):
    """RMSNorm, rotary positions, grouped queries, a gated SiLU MLP; biases where it says so."""

    model_type = "llama"
    architecture = "LlamaForCausalLM"

    def fields(self, given: Given) -> dict[str, Any]:
        """``attention_bias`` is of all four products of attention."""
        bias = given.flag("attention_bias")
        more = {"qkv_bias": bias, "output_bias": bias, "mlp_bias": given.flag("mlp_bias")}
        return super().fields(given) | more

    def write(self, config: ModelConfig) -> dict[str, Any]:
        """With the biases."""
        more = {"attention_bias": config.qkv_bias, "mlp_bias": config.mlp_bias}
        return super().write(config) | more
