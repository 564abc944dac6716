"""OLMo 2 (arXiv 2501.00656)."""

from hjax.models.families.family import ATTENTION_BIAS, Family


class Olmo2(Family):
    """Norms after attention and MLP; QK-norm over all heads."""

    model_type = "olmo2"
    architecture = "Olmo2ForCausalLM"
    defaults = {"rms_norm_eps": 1e-5}
    own = ATTENTION_BIAS
    always = {"norms": "after", "query_key_norm": "all"}

    def norm_names(self) -> dict[str, str]:
        """``post_attention_layernorm``, which in Llama is before the MLP, is after attention."""
        return {
            "attention_out_norm": "post_attention_layernorm",
            "mlp_out_norm": "post_feedforward_layernorm",
        }
