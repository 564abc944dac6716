"""Qwen2 and 2.5 (arXiv 2407.10671, 2412.15115), Qwen3 and Qwen3-MoE (arXiv 2505.09388)."""

from collections.abc import Mapping
from typing import Any

from hjax.models.families.checked_config import CheckedConfig
from hjax.models.families.family import (
    ATTENTION_BIAS,
    FULL,
    LAYER,
    ROUTER_LOSS,
    SLIDING,
    ConfigField,
    Family,
    Tensors,
    expert_tensors,
    one,
    read_switched_windows,
    write_windows,
)
from hjax.models.families.mistral import read_one_window
from hjax.models.model_config import LayerKind, ModelConfig


class Qwen2(Family):
    """Llama with biases of queries, keys and values."""

    model_type = "qwen2"
    architecture = "Qwen2ForCausalLM"
    defaults = {"max_position_embeddings": 32768}
    always: Mapping[str, Any] = {"qkv_bias": True}
    fixed = {"use_mrope": (False,)}

    def fields(self, hf_config: CheckedConfig) -> dict[str, Any]:
        """With ``use_sliding_window``, layers from ``max_window_layers`` on have a window."""
        fields = super().fields(hf_config)
        return fields | {"layer_kinds": self.windows(hf_config, fields["layers"])}

    def windows(self, hf_config: CheckedConfig, layers: int) -> tuple[LayerKind, ...]:
        """Layer kinds; empty if all have full attention."""
        first = int(hf_config.number("max_window_layers", 28))
        types = [FULL if i < first else SLIDING for i in range(layers)]
        return read_switched_windows(hf_config, layers, types)

    def write(self, config: ModelConfig) -> dict[str, Any]:
        """With the windows, if there are any."""
        content = super().write(config)
        if config.head_dim == config.hidden_size // config.heads:
            del content["head_dim"]  # transformers' class has no such field
        if config.layer_kinds:
            content |= write_windows(config) | {"use_sliding_window": True}
        return content


class Qwen3(Qwen2):
    """QK-norm, an explicit head size, no biases."""

    model_type = "qwen3"
    architecture = "Qwen3ForCausalLM"
    defaults = {"max_position_embeddings": 32768, "head_dim": 128}
    own = ATTENTION_BIAS
    always = {"query_key_norm": "head"}

    def write(self, config: ModelConfig) -> dict[str, Any]:
        """With its head size."""
        return super().write(config) | {"head_dim": config.head_dim}


class Qwen3Moe(Qwen3):
    """Qwen3 with experts in every layer."""

    model_type = "qwen3_moe"
    architecture = "Qwen3MoeForCausalLM"
    keys = {**Qwen3.keys, "mlp_size": "moe_intermediate_size"}
    defaults = {"max_position_embeddings": 32768, "num_key_value_heads": 4}
    fixed = {**Qwen3.fixed, "decoder_sparse_step": (1,), "mlp_only_layers": ([],)}
    unread = ("intermediate_size", "max_window_layers")  # the first is for layers without experts
    own = {
        **Qwen3.own,
        "num_experts_per_tok": ConfigField("size", ("experts_per_token",), 8),
        "norm_topk_prob": ConfigField("flag", ("normalize_router",), False),
        **ROUTER_LOSS,
    }

    def fields(self, hf_config: CheckedConfig) -> dict[str, Any]:
        """The number of experts has two names."""
        name = "num_experts" if hf_config.get("num_local_experts") is None else "num_local_experts"
        return super().fields(hf_config) | {"experts": hf_config.size(name)}

    def windows(self, hf_config: CheckedConfig, layers: int) -> tuple[LayerKind, ...]:
        """All layers have the window, or none has."""
        if hf_config.flag("use_sliding_window"):
            return read_one_window(hf_config, layers)
        hf_config.get("sliding_window")
        return ()

    def write(self, config: ModelConfig) -> dict[str, Any]:
        """With its experts."""
        return super().write(config) | {"num_experts": config.experts}

    def tensors(self, config: ModelConfig) -> Tensors:
        """Three tensors for each expert."""
        names = {name: f"{LAYER}mlp.experts.{{expert}}.{name}_proj" for name in MLP}
        router = {"layers.router": one(f"{LAYER}mlp.gate.weight", "experts embed")}
        return super().tensors(config) | router | expert_tensors(names)


MLP = ("gate", "up", "down")
