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
    """Llama's layers, all of them with one window, or with none."""

    model_type = "mistral"
    architecture = "MistralForCausalLM"
    defaults = {"max_position_embeddings": 131072, "num_key_value_heads": 8}

    def fields(self, given: CheckedConfig) -> dict[str, Any]:
        """A window of null is none; where nothing is said there is transformers' default."""
        fields = super().fields(given)
        if "sliding_window" not in given.content:
            return fields | {"layer_kinds": (LayerKind(4096),) * fields["layers"]}
        return fields | {"layer_kinds": read_one_window(given, fields["layers"])}

    def write(self, config: ModelConfig) -> dict[str, Any]:
        """The window stands there even where it is none: transformers' default has one."""
        window = config.layer_kinds[0].window if config.layer_kinds else None
        return super().write(config) | {"sliding_window": window}


def read_one_window(given: CheckedConfig, layers: int) -> tuple[LayerKind, ...]:
    """``sliding_window`` of all layers."""
    if given.get("sliding_window") is None:
        return ()
    return (LayerKind(given.size("sliding_window")),) * layers


class Mixtral(Mistral):
    """Mistral with experts in every layer; the weights of those in use always add up to 1."""

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
        """Its own names: w1 is the gate, w3 up, w2 down."""
        at = f"{LAYER}block_sparse_moe."
        stored = {"gate": "w1", "up": "w3", "down": "w2"}
        names = {name: f"{at}experts.{{expert}}.{w}" for name, w in stored.items()}
        router = {"layers.router": one(f"{at}gate.weight", "experts embed")}
        return super().tensors(config) | router | expert_tensors(names)
