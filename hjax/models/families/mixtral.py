"""Mixtral (Jiang et al. 2024, arXiv 2401.04088)."""

from __future__ import annotations

from typing import Any

from hjax.models.config import ModelConfig
from hjax.models.families.base import LAYER, Tensors, expert_tensors, one
from hjax.models.families.given import Given
from hjax.models.families.mistral import Mistral


class Mixtral(Mistral):
    """Mistral with experts in every layer."""

    model_type = "mixtral"
    architecture = "MixtralForCausalLM"
    defaults = {
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000.0,
    }

    def fields(self, given: Given) -> dict[str, Any]:
        """The weights of the experts in use always add up to 1."""
        given.only("router_jitter_noise", 0.0)
        return super().fields(given) | {
            "experts": given.size("num_local_experts", 8),
            "experts_per_token": given.size("num_experts_per_tok", 2),
            "router_loss": given.number("router_aux_loss_coef", 0.001),
        }

    def write(self, config: ModelConfig) -> dict[str, Any]:
        """With its experts."""
        return super().write(config) | {
            "num_local_experts": config.experts,
            "num_experts_per_tok": config.experts_per_token,
            "router_aux_loss_coef": config.router_loss,
        }

    def tensors(self, config: ModelConfig) -> Tensors:
        """Its own names: w1 is the gate, w3 up, w2 down."""
        at = f"{LAYER}block_sparse_moe."
        stored = {"gate": "w1", "up": "w3", "down": "w2"}
        names = {name: f"{at}experts.{{expert}}.{w}" for name, w in stored.items()}
        router = {"layers.router": one(f"{at}gate.weight", "experts embed")}
        return super().tensors(config) | router | expert_tensors(names)
