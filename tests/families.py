"""Tiny models of every family with odd settings, made by transformers."""

from references import CONFIG_MAPPING, AutoModelForCausalLM, torch

SIZES = {
    "vocab_size": 47,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
GPT2 = {"vocab_size": 47, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64}


def scaled(kind, theta=10000.0, **keys):
    return {"rope_parameters": {"rope_type": kind, "rope_theta": theta, **keys}}


# Per family one row of every day; the others are odd settings.
MODELS = {
    "llama biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama linear rope": ("llama", scaled("linear", factor=3.0)),
    "llama yarn": ("llama", scaled("yarn", factor=4.0, original_max_position_embeddings=16)),
    "llama dynamic": ("llama", {"max_position_embeddings": 16} | scaled("dynamic", factor=2.0)),
    "qwen2": ("qwen2", {"num_key_value_heads": 1}),
    "qwen2 tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2 yarn": (
        "qwen2",
        scaled("yarn", factor=4.0, original_max_position_embeddings=8, beta_fast=2.0)
        | {"num_key_value_heads": 4},
    ),
    "qwen3": ("qwen3", {"head_dim": 12}),
    "qwen3 tied": ("qwen3", {"head_dim": 6, "tie_word_embeddings": True}),
    "qwen3 biases": ("qwen3", {"head_dim": 8, "attention_bias": True, "num_key_value_heads": 1}),
    "mistral": ("mistral", {"sliding_window": None, "head_dim": 12}),
    "mistral wide window": ("mistral", {"sliding_window": 64, "num_key_value_heads": 1}),
    "mistral tied": ("mistral", {"sliding_window": None, "tie_word_embeddings": True}),
    "smollm3": ("smollm3", {"no_rope_layer_interval": 2}),
    "smollm3 tied": ("smollm3", {"num_hidden_layers": 5, "tie_word_embeddings": True}),
    "smollm3 any layers": ("smollm3", {"no_rope_layers": [0, 0, 1], "attention_bias": True}),
    "olmo2": ("olmo2", {"num_key_value_heads": 1}),
    "olmo2 tied": ("olmo2", {"tie_word_embeddings": True, "attention_bias": True}),
    "olmo2 heads": ("olmo2", {"num_key_value_heads": 4} | scaled("linear", 5e5, factor=2.0)),
    "phi3 longrope": (
        "phi3",
        {"max_position_embeddings": 64, "original_max_position_embeddings": 16}
        | scaled("longrope", short_factor=[1.0, 1.2, 1.5, 2.0], long_factor=[1.5, 2.5, 4.0, 6.0]),
    ),
    "phi3": ("phi3", {"sliding_window": 64, "num_key_value_heads": 1}),
    "phi3 part of a head turns": (
        "phi3",
        scaled("default", partial_rotary_factor=0.5)
        | {"tie_word_embeddings": True, "num_key_value_heads": 4},
    ),
    "mixtral": ("mixtral", {"num_local_experts": 5, "sliding_window": None}),
    "mixtral tied": (
        "mixtral",
        {"num_local_experts": 3, "num_key_value_heads": 1, "tie_word_embeddings": True},
    ),
    "mixtral one of many": (
        "mixtral",
        {"num_local_experts": 12, "num_experts_per_tok": 1, "head_dim": 12},
    ),
    "qwen3 experts": (
        "qwen3_moe",
        {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "head_dim": 12},
    ),
    "qwen3 experts normalized": (
        "qwen3_moe",
        {"num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True, "head_dim": 8},
    ),
    "qwen3 experts all": (
        "qwen3_moe",
        {"num_experts": 3, "num_experts_per_tok": 3, "num_key_value_heads": 1, "head_dim": 8},
    ),
    "mistral window": ("mistral", {"sliding_window": 5, "num_key_value_heads": 1}),
    "qwen2 windows": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
    ),
    "gemma2": ("gemma2", {"head_dim": 12, "sliding_window": 5, "query_pre_attn_scalar": 10}),
    "gemma2 untied": (
        "gemma2",
        {"head_dim": 8, "num_key_value_heads": 1, "sliding_window": 64}
        | {"attn_logit_softcapping": None, "final_logit_softcapping": 5.0},
    ),
    "gemma2 capped": (
        "gemma2",
        {"head_dim": 8, "sliding_window": 3, "num_hidden_layers": 5}
        | {"attn_logit_softcapping": 2.0, "tie_word_embeddings": True, "attention_bias": True},
    ),
    "gemma3": (
        "gemma3_text",
        {"head_dim": 12, "sliding_window": 5, "num_hidden_layers": 7, "query_pre_attn_scalar": 9},
    ),
    "gemma3 scaled": (
        "gemma3_text",
        {"head_dim": 8, "sliding_window": 4, "tie_word_embeddings": True, "num_hidden_layers": 4}
        | {"layer_types": ["sliding_attention", "full_attention"] * 2}
        | {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e4},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
            }
        },
    ),
    "gemma3 all full": (
        "gemma3_text",
        {"head_dim": 8, "num_key_value_heads": 1, "layer_types": ["full_attention"] * 3},
    ),
    "gpt-oss": (
        "gpt_oss",
        {"head_dim": 12, "num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 5}
        | {"swiglu_limit": 0.5},
    ),
    "gpt-oss one expert": (
        "gpt_oss",
        {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 1, "sliding_window": 64}
        | {"num_key_value_heads": 1, "tie_word_embeddings": True},
    ),
    "gpt-oss plain rope": (
        "gpt_oss",
        {"head_dim": 8, "num_local_experts": 12, "num_experts_per_tok": 4, "sliding_window": 3}
        | scaled("default", 5e4),
    ),
    "gpt2": ("gpt2", {}),
    "gpt2 narrow": ("gpt2", {"n_inner": 24, "layer_norm_epsilon": 1e-3}),
    "gpt2 one head": ("gpt2", {"n_head": 1, "tie_word_embeddings": False}),
}


def config(name, **more):
    """transformers' configuration of a tiny model, as an instance of it has it."""
    family, changes = MODELS[name]
    sizes = GPT2 if family == "gpt2" else SIZES
    return CONFIG_MAPPING[family](**(sizes | changes | more))


def model(name, **more):
    """A tiny model of transformers, all of whose parameters are random."""
    asked = config(name, **more)
    torch.manual_seed(0)
    return randomise(AutoModelForCausalLM.from_config(asked, attn_implementation="eager").eval())


def randomise(made):
    """A model of transformers with random parameters, norms around 1."""
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            noise = torch.randn(parameter.shape)
            norm = name.endswith("weight") and ("norm" in name or "ln_" in name)
            parameter.copy_(1 + 0.3 * noise if norm else 0.2 * noise)
    return made


def logits(theirs, tokens):
    with torch.no_grad():
        return theirs(torch.tensor(tokens).long()).logits.double().numpy()
