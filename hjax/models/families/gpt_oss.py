"""gpt-oss (OpenAI 2025, arXiv 2508.10925), its weights in bfloat16."""

from typing import Any

from hjax.models.families.checked_config import CheckedConfig
from hjax.models.families.family import (
    ATTENTION_BIAS,
    EXPERTS,
    FULL,
    LAYER,
    ROUTER_LOSS,
    SLIDING,
    ConfigField,
    Family,
    Tensors,
    check_theta,
    one,
    read_windows,
    write_windows,
)
from hjax.models.model_config import ModelConfig
from hjax.models.rotary import Rope, YarnScaling, write_scaling

YARN = YarnScaling(factor=32.0, original_max_length=4096, truncate=False)


class GptOss(Family):
    """Experts with biases and clamped SwiGLU, sinks, sliding windows in every other layer."""

    model_type = "gpt_oss"
    architecture = "GptOssForCausalLM"
    defaults = {
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150000.0,
        "sliding_window": 128,
        "attention_bias": True,
    }
    own = {
        **ATTENTION_BIAS,
        "swiglu_alpha": ConfigField("number", ("activation_alpha",), 1.702),
        "swiglu_limit": ConfigField("number", ("activation_limit",), 7.0),
        "num_local_experts": ConfigField("size", ("experts",), 32),
        "num_experts_per_tok": ConfigField("size", ("experts_per_token",), 4),
        **ROUTER_LOSS,
    }
    always = {"mlp_bias": True, "sinks": True, "activation": "clamped_swiglu", "router_bias": True}
    unread = ("initial_context_length", "experts_per_token")  # duplicates

    def fields(self, hf_config: CheckedConfig) -> dict[str, Any]:
        """Windows in every other layer by default; routing weights are always normalized."""
        fields = super().fields(hf_config)
        types = [SLIDING if i % 2 == 0 else FULL for i in range(fields["layers"])]
        return fields | {"layer_kinds": read_windows(hf_config, fields["layers"], types)}

    def ropes(self, hf_config: CheckedConfig, max_length: int) -> tuple[Rope, ...]:
        """YaRN by default."""
        if hf_config.get("rope_parameters") is None and hf_config.get("rope_scaling") is None:
            theta = hf_config.number("rope_theta", 150000.0)
            return (Rope(check_theta(hf_config, theta), YARN),)
        return super().ropes(hf_config, max_length)

    def write(self, config: ModelConfig) -> dict[str, Any]:
        """With windows and YaRN."""
        scaling = {"rope_scaling": write_scaling(config.ropes[0].scaling)}
        return super().write(config) | write_windows(config) | scaling

    def tensors(self, config: ModelConfig) -> Tensors:
        """All experts of a layer in one tensor, gate and up interleaved."""
        gate_up, down = f"{EXPERTS}gate_up_proj", f"{EXPERTS}down_proj"
        both = "experts embed (mlp pair)"
        return super().tensors(config) | {
            "layers.sinks": one(f"{LAYER}self_attn.sinks", "heads"),
            "layers.router": one(f"{LAYER}mlp.router.weight", "experts embed"),
            "layers.router_bias": one(f"{LAYER}mlp.router.bias", "experts"),
            "layers.gate_up": one(gate_up, both, stacked=gate_up),
            "layers.gate_up_bias": one(f"{gate_up}_bias", "experts (mlp pair)"),
            "layers.down": one(down, "experts mlp embed", stacked=down),
            "layers.down_bias": one(f"{down}_bias", "experts embed"),
        }
