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
    """Norms around attention and MLP, capped scores and logits, windows in every other layer."""

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
    unread = ("hidden_act",)  # of older files, where the other one is meant
    every = 2  # layers, of which the last is full
    softcaps = (50.0, 30.0)  # of attention and logits, where config.json says nothing

    def fields(self, given: CheckedConfig) -> dict[str, Any]:
        """Embeddings are scaled by the root of their width."""
        fields = super().fields(given)
        attention, final = self.softcaps
        return fields | {
            "embedding_scale": math.sqrt(fields["hidden_size"]),
            "attention_scale": given.number("query_pre_attn_scalar", 256) ** -0.5,
            "attention_softcap": self.softcap(given, "attn_logit_softcapping", attention),
            "final_softcap": self.softcap(given, "final_logit_softcapping", final),
            "layer_kinds": self.windows(given, fields["layers"]),
        }

    def softcap(self, given: CheckedConfig, key: str, default: float) -> float:
        """A cap; 0 where config.json has null."""
        if key in given.content and given.get(key) is None:
            return 0.0
        return given.number(key, default)

    def windows(self, given: CheckedConfig, layers: int) -> tuple[LayerKind, ...]:
        """By ``layer_types``, or every so many layers a full one."""
        older = given.get("_sliding_window_pattern", self.every)
        every = given.size("sliding_window_pattern", older)
        width = given.get("sliding_window")
        given.only("sliding_window_size", width)  # said twice by some
        types = [FULL if (i + 1) % every == 0 else SLIDING for i in range(layers)]
        return read_windows(given, layers, types)

    def write(self, config: ModelConfig) -> dict[str, Any]:
        """What it has of its own."""
        assert config.attention_scale is not None
        windows = write_windows(config)
        if windows["sliding_window"] is None:
            del windows["sliding_window"]  # transformers wants one, whether or not it is used
        return super().write(config) | windows | {
            "query_pre_attn_scalar": round(config.attention_scale**-2),
            "attn_logit_softcapping": config.attention_softcap or None,
            "final_logit_softcapping": config.final_softcap or None,
        }

    def norm_names(self) -> dict[str, str]:
        """Before and after each."""
        return {
            "attention_norm": "input_layernorm",
            "attention_out_norm": "post_attention_layernorm",
            "mlp_norm": "pre_feedforward_layernorm",
            "mlp_out_norm": "post_feedforward_layernorm",
        }


class Gemma3(Gemma2):
    """Queries and keys normed, a full layer in six, which turns by another base; nothing capped."""

    model_type = "gemma3_text"
    architecture = "Gemma3ForCausalLM"
    classifier = "Gemma3TextForSequenceClassification"
    defaults = {**Gemma2.defaults, "max_position_embeddings": 131072}
    always = {**Gemma2.always, "query_key_norm": "head"}
    every = 6
    softcaps = (0.0, 0.0)

    def softcap(self, given: CheckedConfig, key: str, default: float) -> float:
        """Attention's scores are never capped: transformers keeps the key and reads it nowhere."""
        if key == "attn_logit_softcapping":
            given.only(key, None)
            return 0.0
        return super().softcap(given, key, default)

    def windows(self, given: CheckedConfig, layers: int) -> tuple[LayerKind, ...]:
        """As Gemma 2's, each with its rotary positions."""
        kinds = super().windows(given, layers)
        return tuple(dataclasses.replace(k, rope=0 if k.window is None else 1) for k in kinds)

    def ropes(self, given: CheckedConfig, max_length: int) -> tuple[Rope, ...]:
        """Of full layers and of those with a window: a dict each, or keys of their own."""
        parameters = given.get("rope_parameters") or {}
        scaling = dict(given.get("rope_scaling") or {})
        unknown = sorted(set(parameters) - {FULL, SLIDING})
        if unknown:
            raise given.error(f"rope_parameters {unknown[0]!r}; by layer type: {FULL}, {SLIDING}")
        full, sliding = (dict(parameters.get(kind) or {}) for kind in (FULL, SLIDING))
        bases = given.number("rope_theta", 1e6), given.number("rope_local_base_freq", 1e4)
        return (
            rope_of(full | scaling, given, max_length, bases[0]),
            rope_of(sliding, given, max_length, bases[1]),
        )

    def write(self, config: ModelConfig) -> dict[str, Any]:
        """In the older spelling, where windows have a plain base."""
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
