"""Gemma 2 (arXiv 2408.00118) and the text models of Gemma 3 (arXiv 2503.19786)."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from hjax.models.families.checked_config import CheckedConfig
from hjax.models.families.family import (
    ATTENTION_BIAS,
    FULL,
    SLIDING,
    Family,
    read_windows,
    rope_of,
    write_rope,
    write_windows,
)
from hjax.models.model_config import LayerKind, ModelConfig
from hjax.models.rotary import Rope, write_scaling


class Gemma2(Family):
    """Norms before and after attention and MLP, softcaps, sliding windows in every other layer."""

    model_type = "gemma2"
    architecture = "Gemma2ForCausalLM"
    defaults = {
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "sliding_window": 4096,
    }
    own = ATTENTION_BIAS
    always: Mapping[str, Any] = {"norms": "both", "norm_offset": 1.0, "activation": "gelu_tanh"}
    fixed = {"use_bidirectional_attention": (False,)}
    activation = {"hidden_activation": ("gelu_pytorch_tanh",)}
    unread = ("hidden_act",)  # in older files, which mean hidden_activation
    every = 2  # one in so many layers has full attention
    softcaps = (50.0, 30.0)  # defaults for attention and logits

    def fields(self, hf_config: CheckedConfig) -> dict[str, Any]:
        """Embeddings are scaled by the square root of their width."""
        fields = super().fields(hf_config)
        attention, final = self.softcaps
        return fields | {
            "embedding_scale": math.sqrt(fields["hidden_size"]),
            "attention_scale": hf_config.number("query_pre_attn_scalar", 256) ** -0.5,
            "attention_softcap": self.softcap(hf_config, "attn_logit_softcapping", attention),
            "final_softcap": self.softcap(hf_config, "final_logit_softcapping", final),
            "layer_kinds": self.windows(hf_config, fields["layers"]),
        }

    def softcap(self, hf_config: CheckedConfig, key: str, default: float) -> float:
        """A softcap; 0 if config.json has null."""
        if key in hf_config.content and hf_config.get(key) is None:
            return 0.0
        return hf_config.number(key, default)

    def windows(self, hf_config: CheckedConfig, layers: int) -> tuple[LayerKind, ...]:
        """From ``layer_types``, or full attention in every so many layers."""
        older = hf_config.get("_sliding_window_pattern", self.every)
        every = hf_config.size("sliding_window_pattern", older)
        width = hf_config.get("sliding_window")
        hf_config.only("sliding_window_size", width)  # duplicated in some files
        types = [FULL if (i + 1) % every == 0 else SLIDING for i in range(layers)]
        return read_windows(hf_config, layers, types)

    def write(self, config: ModelConfig) -> dict[str, Any]:
        """With Gemma's keys."""
        assert config.attention_scale is not None
        windows = write_windows(config)
        if windows["sliding_window"] is None:
            del windows["sliding_window"]  # transformers needs its default even if unused
        return super().write(config) | windows | {
            "query_pre_attn_scalar": round(config.attention_scale**-2),
            "attn_logit_softcapping": config.attention_softcap or None,
            "final_logit_softcapping": config.final_softcap or None,
        }

    def norm_names(self) -> dict[str, str]:
        """Norms before and after attention and MLP."""
        return {
            "attention_norm": "input_layernorm",
            "attention_out_norm": "post_attention_layernorm",
            "mlp_norm": "pre_feedforward_layernorm",
            "mlp_out_norm": "post_feedforward_layernorm",
        }


class Gemma3(Gemma2):
    """QK-norm, full attention in one of six layers with a rope of its own, no softcaps."""

    model_type = "gemma3_text"
    architecture = "Gemma3ForCausalLM"
    classifier = "Gemma3TextForSequenceClassification"
    defaults = {**Gemma2.defaults, "max_position_embeddings": 131072}
    always = {**Gemma2.always, "query_key_norm": "head"}
    every = 6
    softcaps = (0.0, 0.0)

    def softcap(self, hf_config: CheckedConfig, key: str, default: float) -> float:
        """No softcap of attention scores: transformers has the key and never reads it."""
        if key == "attn_logit_softcapping":
            hf_config.only(key, None)
            return 0.0
        return super().softcap(hf_config, key, default)

    def windows(self, hf_config: CheckedConfig, layers: int) -> tuple[LayerKind, ...]:
        """As in Gemma 2, with a rope each for full attention and windows."""
        kinds = super().windows(hf_config, layers)
        return tuple(dataclasses.replace(k, rope=0 if k.window is None else 1) for k in kinds)

    def ropes(self, hf_config: CheckedConfig, max_length: int) -> tuple[Rope, ...]:
        """The ropes of full attention and of windows, from a dict or keys for each."""
        parameters = hf_config.get("rope_parameters") or {}
        scaling = dict(hf_config.get("rope_scaling") or {})
        unknown = sorted(set(parameters) - {FULL, SLIDING})
        if unknown:
            raise hf_config.error(f"rope_parameters {unknown[0]!r}; supported: {FULL}, {SLIDING}")
        full, sliding = (dict(parameters.get(kind) or {}) for kind in (FULL, SLIDING))
        bases = hf_config.number("rope_theta", 1e6), hf_config.number("rope_local_base_freq", 1e4)
        return (
            rope_of(full | scaling, hf_config, max_length, bases[0]),
            rope_of(sliding, hf_config, max_length, bases[1]),
        )

    def write(self, config: ModelConfig) -> dict[str, Any]:
        """In the older spelling if the rope of windows has no scaling."""
        full, sliding = config.ropes
        content = super().write(config)
        if sliding.scaling is None:
            return content | {"rope_local_base_freq": sliding.theta}
        for key in write_rope(full):
            content.pop(key)
        return content | {
            "rope_parameters": {
                kind: {"rope_theta": rope.theta, **write_scaling(rope.scaling)}
                for kind, rope in ((FULL, full), (SLIDING, sliding))
            }
        }
