"""GPT-2 (Radford et al. 2019)."""

from typing import Any

from hjax.models.families.checked_config import CheckedConfig
from hjax.models.families.family import ConfigField, Family, Tensors, one, read_dtype, tied_to
from hjax.models.model_config import ModelConfig
from hjax.models.parameter_spec import StoredTensor

LAYER = "transformer.h.{layer}."


class GPT2(Family):
    """LayerNorm, learned positions, an ungated GELU MLP, biases everywhere.

    Matrices are stored as ``Conv1D`` [inputs, outputs]; queries, keys and values are one tensor.
    """

    model_type = "gpt2"
    architecture = "GPT2LMHeadModel"
    classifier = "GPT2ForSequenceClassification"
    keys = {
        "vocab_size": "vocab_size",
        "hidden_size": "n_embd",
        "layers": "n_layer",
        "heads": "n_head",
        "max_length": "n_positions",
    }
    own = {
        "layer_norm_epsilon": ConfigField("number", ("norm_epsilon",), 1e-5),
        "tie_word_embeddings": ConfigField("flag", ("tie_embeddings",), True),
    }
    always = {
        "family": "gpt2",
        "ropes": (),
        "layer_norm": True,
        "qkv_bias": True,
        "output_bias": True,
        "mlp_bias": True,
        "gated_mlp": False,
        "activation": "gelu_tanh",
    }
    activation = {"activation_function": ("gelu_new", "gelu_pytorch_tanh")}
    fixed = {
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "add_cross_attention": (False,),
    }
    # For half precision, duplicates, or for other heads.
    unread = (
        *("reorder_and_upcast_attn", "n_ctx", "summary_activation"),
        *("summary_proj_to_labels", "summary_type", "summary_use_proj"),
    )

    def fields(self, hf_config: CheckedConfig) -> dict[str, Any]:
        """Fewer keys than Llama's."""
        fields: dict[str, Any] = {name: hf_config.size(key) for name, key in self.keys.items()}
        heads, width = fields["heads"], fields["hidden_size"]
        if width % heads:
            raise hf_config.error(f"n_embd is {width}; a multiple of n_head, which is {heads}")
        return fields | {
            "kv_heads": heads,
            "head_dim": width // heads,
            "mlp_size": hf_config.size("n_inner", 4 * width),
            "dtype": read_dtype(hf_config),
        }

    def write(self, config: ModelConfig) -> dict[str, Any]:
        """With GPT-2's keys."""
        return {
            "architectures": [self.architecture],
            "model_type": self.model_type,
            **self.written(config),
            "n_inner": config.mlp_size,
            "torch_dtype": config.dtype,
        }

    def tensors(self, config: ModelConfig) -> Tensors:
        """GPT-2's tensor names."""
        width = config.hidden_size
        layers = {
            "q": ("attn.c_attn.weight", "embed (heads head_dim)", (1, 0, 3 * width)),
            "kv": ("attn.c_attn.weight", "embed (pair kv_heads head_dim)", (1, width, 3 * width)),
            "q_bias": ("attn.c_attn.bias", "(heads head_dim)", (0, 0, 3 * width)),
            "kv_bias": ("attn.c_attn.bias", "(pair kv_heads head_dim)", (0, width, 3 * width)),
            "o": ("attn.c_proj.weight", "(heads head_dim) embed", None),
            "o_bias": ("attn.c_proj.bias", "embed", None),
            "up": ("mlp.c_fc.weight", "embed mlp", None),
            "up_bias": ("mlp.c_fc.bias", "mlp", None),
            "down": ("mlp.c_proj.weight", "mlp embed", None),
            "down_bias": ("mlp.c_proj.bias", "embed", None),
        }
        for ours, theirs in (("attention_norm", "ln_1"), ("mlp_norm", "ln_2")):
            layers[ours] = (f"{theirs}.weight", "embed", None)
            layers[f"{ours}_bias"] = (f"{theirs}.bias", "embed", None)
        return {
            "embedding": one("transformer.wte.weight", "vocab embed", other=tied_to(config)),
            "unembedding": one("lm_head.weight", "vocab embed"),
            "positions": one("transformer.wpe.weight", "positions embed"),
            "final_norm": one("transformer.ln_f.weight", "embed"),
            "final_norm_bias": one("transformer.ln_f.bias", "embed"),
        } | {
            f"layers.{name}": (StoredTensor(LAYER + stored, form, part=part),)
            for name, (stored, form, part) in layers.items()
        }
