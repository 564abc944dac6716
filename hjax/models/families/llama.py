"""Llama 1, 2 and 3.x (Touvron et al. 2023, arXiv 2302.13971; Dubey et al. 2024, 2407.21783)."""

from hjax.models.families.family import ATTENTION_BIAS, MLP_BIAS, Family


class Llama(Family):
    """RMSNorm, RoPE, grouped-query attention, a gated SiLU MLP; optional biases."""

    model_type = "llama"
    architecture = "LlamaForCausalLM"
    own = {**ATTENTION_BIAS, **MLP_BIAS}
