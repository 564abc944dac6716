"""OLMo 2 (arXiv 2501.00656)."""

from __future__ import annotations

from typing import Any

from hjax.models.config import ModelConfig
from hjax.models.families.base import Family
from hjax.models.families.given import Given


class Olmo2(Family):
    """Norms after attention and MLP; queries and keys normed over all heads."""

    model_type = "olmo2"
    architecture = "Olmo2ForCausalLM"
    defaults = {"rms_norm_eps": 1e-5}

    def fields(self, given: Given) -> dict[str, Any]:
        """``attention_bias`` is of all four products of attention."""
        bias = given.flag("attention_bias")
        fields = super().fields(given) | {"norms": "after", "query_key_norm": "all"}
        return fields | {"qkv_bias": bias, "output_bias": bias}

    def write(self, config: ModelConfig) -> dict[str, Any]:
        """With the biases."""
        return super().write(config) | {"attention_bias": config.qkv_bias}

    def norm_names(self) -> dict[str, str]:
        """What Llama has before the MLP stands after attention here."""
        return {
            "attention_out_norm": "post_attention_layernorm",
            "mlp_out_norm": "post_feedforward_layernorm",
        }
