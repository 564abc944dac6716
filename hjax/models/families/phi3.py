"""Phi-3 (arXiv 2404.14219) and Phi-4-mini (arXiv 2503.01743)."""

from typing import Any

from hjax.models.families.checked_config import CheckedConfig
from hjax.models.families.family import LAYER, Tensors, one, rope_of
from hjax.models.families.mistral import Mistral
from hjax.models.model_config import ModelConfig
from hjax.models.rotary import LongRopeScaling, Rope


class Phi3(Mistral):
    """Llama with fused tensors for queries, keys and values, and for gate and up.

    RoPE is partial, unscaled or LongRoPE.
    """

    model_type = "phi3"
    architecture = "Phi3ForCausalLM"
    defaults = {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5}
    fixed = {
        **dict.fromkeys(("attention_bias", "mlp_bias", "lm_head_bias"), (False,)),
        **dict.fromkeys(("full_attn_mod", "interpolate_factor"), (1,)),
    }

    def ropes(self, hf_config: CheckedConfig, max_length: int) -> tuple[Rope, ...]:
        """The original length is not in ``rope_scaling``; LongRoPE has older names too."""
        both = dict(hf_config.get("rope_parameters") or hf_config.get("rope_scaling") or {})
        kind = both.pop("rope_type", both.pop("type", "default"))
        original = hf_config.size("original_max_position_embeddings", max_length)
        if kind in ("su", "yarn", "longrope"):
            kind = "longrope"
            both["original_max_position_embeddings"] = original
        elif kind != "default":
            supported = "supported: default, longrope"
            raise hf_config.error(f"rope_type {kind!r} is not supported; {supported}")
        both["rope_type"] = kind
        share = hf_config.number("partial_rotary_factor", 1.0)
        theta = hf_config.number("rope_theta", 10000.0)
        return (rope_of(both, hf_config, max_length, theta, share, True),)

    def write(self, config: ModelConfig) -> dict[str, Any]:
        """With the original length."""
        content, scaling = super().write(config), config.ropes[0].scaling
        if config.head_dim == config.hidden_size // config.heads:
            del content["head_dim"]  # transformers' class has no such field
        original = config.max_length
        if isinstance(scaling, LongRopeScaling):
            original = scaling.original_max_length
            del content["rope_scaling"]["original_max_position_embeddings"]
        return content | {"original_max_position_embeddings": original}

    def tensors(self, config: ModelConfig) -> Tensors:
        """Queries first, then keys, then values."""
        q, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
        name = f"{LAYER}self_attn.qkv_proj.weight"
        whole = q + 2 * kv
        return super().tensors(config) | {
            "layers.q": one(name, "(heads head_dim) embed", part=(0, 0, whole)),
            "layers.kv": one(name, "(pair kv_heads head_dim) embed", part=(0, q, whole)),
            "layers.gate_up": one(f"{LAYER}mlp.gate_up_proj.weight", "(pair mlp) embed"),
        }
