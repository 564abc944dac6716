"""SmolLM3 (huggingface.co/blog/smollm3)."""

from typing import Any

from hjax.models.families.checked_config import CheckedConfig
from hjax.models.families.family import (
    ATTENTION_BIAS,
    FULL,
    MLP_BIAS,
    SLIDING,
    Family,
    read_switched_windows,
    write_windows,
)
from hjax.models.model_config import LayerKind, ModelConfig


class SmolLM3(Family):
    """Llama without rotary positions (NoPE) in every fourth layer."""

    model_type = "smollm3"
    architecture = "SmolLM3ForCausalLM"
    defaults = {
        "max_position_embeddings": 32768,
        "num_key_value_heads": 4,
        "rope_theta": 2000000.0,
        "tie_word_embeddings": True,
    }
    own = {**ATTENTION_BIAS, **MLP_BIAS}
    unread = ("max_window_layers",)

    def fields(self, hf_config: CheckedConfig) -> dict[str, Any]:
        """``no_rope_layers`` has a 1 for each layer with RoPE; by default every
        ``no_rope_layer_interval``-th has none."""
        fields = super().fields(hf_config)
        layers, every = fields["layers"], hf_config.size("no_rope_layer_interval", 4)
        turns = hf_config.get("no_rope_layers", [int((i + 1) % every != 0) for i in range(layers)])
        if len(turns) != layers:
            raise hf_config.error(f"no_rope_layers has {len(turns)} entries for {layers} layers")
        types = [FULL if turn else SLIDING for turn in turns]
        windows = read_switched_windows(hf_config, layers, types)
        windows = windows or (LayerKind(),) * layers
        fields["layer_kinds"] = tuple(
            LayerKind(kind.window, 0 if turn else None) for kind, turn in zip(windows, turns)
        )
        return fields

    def write(self, config: ModelConfig) -> dict[str, Any]:
        """With its layer kinds."""
        turns = [int(kind.rope is not None) for kind in config.layer_kinds]
        content = super().write(config) | write_windows(config)
        return content | {
            "no_rope_layers": turns or [1] * config.layers,
            "use_sliding_window": any(kind.window for kind in config.layer_kinds),
        }
