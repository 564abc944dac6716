"""Mistral (Jiang et al. 2023, arXiv 2310.06825)."""

from __future__ import annotations

from typing import Any

from hjax.models.config import LayerKind, ModelConfig
from hjax.models.families.base import Family
from hjax.models.families.given import Given


class Mistral(Family):
    """Llama's layers, all of them with one window, or with none."""

    model_type = "mistral"
    architecture = "MistralForCausalLM"
    defaults = {"max_position_embeddings": 131072, "num_key_value_heads": 8}

    def fields(self, given: Given) -> dict[str, Any]:
        """A window of null is none; where nothing is said there is transformers' default."""
        fields = super().fields(given)
        if "sliding_window" not in given.content:
            return fields | {"layer_kinds": (LayerKind(4096),) * fields["layers"]}
        return fields | {"layer_kinds": read_one_window(given, fields["layers"])}

    def write(self, config: ModelConfig) -> dict[str, Any]:
        """The window stands there even where it is none: transformers' default has one."""
        return super().write(config) | write_one_window(config)


def read_one_window(given: Given, layers: int) -> tuple[LayerKind, ...]:
    """``sliding_window`` of all layers."""
    if given.get("sliding_window") is None:
        return ()
    return (LayerKind(given.size("sliding_window")),) * layers


def write_one_window(config: ModelConfig) -> dict[str, Any]:
    """What ``read_one_window`` reads."""
    return {"sliding_window": config.layer_kinds[0].window if config.layer_kinds else None}
