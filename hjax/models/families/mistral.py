"""Mistral (Jiang et al. 2023, arXiv 2310.06825) and Mixtral (Jiang et al. 2024, 2401.04088)."""

from typing import Any

from hjax.models.families.checked_config import CheckedConfig
from hjax.models.families.family import (
    LAYER,
    ROUTER_LOSS,
    ConfigField,
    Family,
    Tensors,
    expert_tensors,
    one,
)
from hjax.models.model_config import LayerKind, ModelConfig


class Mistral(Family):
    """Llama with the same sliding window in all layers, or none."""

    model_type = "mistral"
    architecture = "MistralForCausalLM"
    defaults = {"max_position_embeddings": 131072, "num_key_value_heads": 8}

    def fields(self, hf_config: CheckedConfig) -> dict[str, Any]:
        """``sliding_window`` null is no window; missing is transformers' default, 4096."""
        fields = super().fields(hf_config)
        if "sliding_window" not in hf_config.content:
            return fields | {"layer_kinds": (LayerKind(4096),) * fields["layers"]}
        return fields | {"layer_kinds": read_one_window(hf_config, fields["layers"])}

    def write(self, config: ModelConfig) -> dict[str, Any]:
        """Always with ``sliding_window``, because transformers' default is a window."""
        window = config.layer_kinds[0].window if config.layer_kinds else None
        return super().write(config) | {"sliding_window": window}


def read_one_window(hf_config: CheckedConfig, layers: int) -> tuple[LayerKind, ...]:
    """Layer kinds with the same ``sliding_window`` in all layers."""
    if hf_config.get("sliding_window") is None:
        return ()
    return (LayerKind(hf_config.size("sliding_window")),) * layers


class Mixtral(Mistral):
    """Mistral with experts in every layer and normalized routing weights."""

    model_type = "mixtral"
    architecture = "MixtralForCausalLM"
    defaults = {
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000.0,
    }
    fixed = {"router_jitter_noise": (0.0,)}
    own = {
        "num_local_experts": ConfigField("size", ("experts",), 8),
        "num_experts_per_tok": ConfigField("size", ("experts_per_token",), 2),
        **ROUTER_LOSS,
    }

    def tensors(self, config: ModelConfig) -> Tensors:
        """Mixtral's names: w1 is gate, w3 up, w2 down."""
        at = f"{LAYER}block_sparse_moe."
        stored = {"gate": "w1", "up": "w3", "down": "w2"}
        names = {name: f"{at}experts.{{expert}}.{w}" for name, w in stored.items()}
        router = {"layers.router": one(f"{at}gate.weight", "experts embed")}
        return super().tensors(config) | router | expert_tensors(names)
