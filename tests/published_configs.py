"""config.json files, written by hand after the published ones of models and of their mirrors.

They are no copies: what a file says in each place is from memory of it, in the keys and spellings
of its makers and tools. ``shrunk`` makes the sizes small and leaves every other key as it is.
"""

from typing import Any

Config = dict[str, Any]

COMMON = {"initializer_range": 0.02, "use_cache": True, "torch_dtype": "bfloat16"}
UNSLOTH = {"unsloth_fixed": True, "unsloth_version": "2025.3.19"}


def sizes(hidden: int, mlp: int, layers: int, heads: int, kv: int, vocab: int, length: int):
    return {
        "hidden_size": hidden, "intermediate_size": mlp, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv, "vocab_size": vocab,
        "max_position_embeddings": length,
    }  # fmt: skip


LLAMA = COMMON | {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
    "rms_norm_eps": 1e-05, "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False,
    "pretraining_tp": 1, "rope_scaling": None, "transformers_version": "4.31.0.dev0",
}  # fmt: skip
LLAMA3 = LLAMA | {
    "attention_bias": False, "attention_dropout": 0.0, "mlp_bias": False, "rope_theta": 500000.0,
    "bos_token_id": 128000, "eos_token_id": [128001, 128008, 128009],
    "transformers_version": "4.42.3",
    "rope_scaling": {
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192, "rope_type": "llama3",
    },
}  # fmt: skip
LLAMA32 = LLAMA3 | sizes(2048, 8192, 16, 32, 8, 128256, 131072) | {
    "head_dim": 64, "tie_word_embeddings": True,
    "rope_scaling": LLAMA3["rope_scaling"] | {"factor": 32.0},
}  # fmt: skip
SMOLLM2 = LLAMA | sizes(576, 1536, 30, 9, 3, 49152, 8192) | {
    "attention_bias": False, "attention_dropout": 0.0, "mlp_bias": False, "is_llama_config": True,
    "rope_interleaved": False, "rope_theta": 100000, "tie_word_embeddings": True,
    "initializer_range": 0.041666666666666664, "pad_token_id": 2,
    "transformers.js_config": {
        "dtype": "q4", "kv_cache_dtype": {"q4f16": "float16", "fp16": "float16"},
    },
}  # fmt: skip
QWEN = COMMON | {
    "attention_dropout": 0.0, "bos_token_id": 151643, "eos_token_id": 151645, "hidden_act": "silu",
    "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "use_sliding_window": False,
    "transformers_version": "4.43.1",
}  # fmt: skip
QWEN2 = QWEN | {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "sliding_window": 32768,
    "max_window_layers": 24, "tie_word_embeddings": True,
}  # fmt: skip
QWEN3 = QWEN | {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "attention_bias": False,
    "head_dim": 128, "max_window_layers": 28, "rope_scaling": None, "sliding_window": None,
    "tie_word_embeddings": True, "transformers_version": "4.51.0",
}  # fmt: skip
QWEN3_MOE = QWEN3 | sizes(2048, 6144, 48, 32, 4, 151936, 40960) | {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "decoder_sparse_step": 1,
    "mlp_only_layers": [], "moe_intermediate_size": 768, "norm_topk_prob": True,
    "num_experts": 128, "num_experts_per_tok": 8, "output_router_logits": False,
    "router_aux_loss_coef": 0.001, "tie_word_embeddings": False,
}  # fmt: skip
MISTRAL = COMMON | sizes(4096, 14336, 32, 32, 8, 32768, 32768) | {
    "architectures": ["MistralForCausalLM"], "model_type": "mistral", "attention_dropout": 0.0,
    "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu", "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0, "sliding_window": None, "tie_word_embeddings": False,
}  # fmt: skip
MIXTRAL = MISTRAL | sizes(4096, 14336, 32, 32, 8, 32000, 32768) | {
    "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_experts_per_tok": 2,
    "num_local_experts": 8, "output_router_logits": False, "router_aux_loss_coef": 0.02,
}  # fmt: skip
GEMMA2 = COMMON | sizes(2304, 9216, 26, 8, 4, 256000, 8192) | {
    "architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "attention_bias": False,
    "attention_dropout": 0.0, "attn_logit_softcapping": 50.0, "bos_token_id": 2,
    "cache_implementation": "hybrid", "eos_token_id": 1, "final_logit_softcapping": 30.0,
    "head_dim": 256, "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh",
    "pad_token_id": 0, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06, "rope_theta": 10000.0,
    "sliding_window": 4096, "transformers_version": "4.42.4",
}  # fmt: skip
GEMMA3 = COMMON | sizes(1152, 6912, 26, 4, 1, 262144, 32768) | {
    "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "attention_bias": False,
    "attention_dropout": 0.0, "attn_logit_softcapping": None, "bos_token_id": 2,
    "cache_implementation": "hybrid", "eos_token_id": [1, 106], "final_logit_softcapping": None,
    "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "pad_token_id": 0,
    "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06, "rope_local_base_freq": 10000,
    "rope_scaling": None, "rope_theta": 1000000, "sliding_window": 512,
    "sliding_window_pattern": 6, "transformers_version": "4.50.0.dev0",
}  # fmt: skip
PHI3 = COMMON | sizes(3072, 8192, 32, 32, 32, 32064, 4096) | {
    "_name_or_path": "Phi-3-mini-4k-instruct", "architectures": ["Phi3ForCausalLM"],
    "model_type": "phi3", "attention_dropout": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0,
    "auto_map": {
        "AutoConfig": "configuration_phi3.Phi3Config",
        "AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM",
    },
    "bos_token_id": 1, "eos_token_id": 32000, "pad_token_id": 32000, "hidden_act": "silu",
    "original_max_position_embeddings": 4096, "rms_norm_eps": 1e-05, "rope_scaling": None,
    "rope_theta": 10000.0, "sliding_window": 2047, "tie_word_embeddings": False,
    "attention_bias": False,
}  # fmt: skip
PHI4_MINI = PHI3 | sizes(3072, 8192, 32, 24, 8, 200064, 131072) | {
    "_name_or_path": "Phi-4-mini-instruct", "bos_token_id": 199999, "eos_token_id": 199999,
    "full_attn_mod": 1, "interpolate_factor": 1, "lm_head_bias": False, "mlp_bias": False,
    "pad_token_id": 199999, "partial_rotary_factor": 0.75, "sliding_window": 262144,
    "tie_word_embeddings": True,
    "rope_scaling": {
        "long_factor": [1 + i / 9 for i in range(48)], "short_factor": [1.0] * 48,
        "type": "longrope",
    },
}  # fmt: skip
GPT2 = {
    "activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"], "attn_pdrop": 0.1,
    "bos_token_id": 50256, "embd_pdrop": 0.1, "eos_token_id": 50256, "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-05, "model_type": "gpt2", "n_ctx": 1024, "n_embd": 768, "n_head": 12,
    "n_layer": 12, "n_positions": 1024, "resid_pdrop": 0.1, "summary_activation": None,
    "summary_first_dropout": 0.1, "summary_proj_to_labels": True, "summary_type": "cls_index",
    "summary_use_proj": True, "vocab_size": 50257,
    "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
}  # fmt: skip
OLMO2 = COMMON | sizes(4096, 11008, 32, 32, 32, 100352, 4096) | {
    "architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2", "attention_bias": False,
    "attention_dropout": 0.0, "eos_token_id": 100257, "hidden_act": "silu",
    "pad_token_id": 100277, "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 500000,
    "tie_word_embeddings": False, "torch_dtype": "float32", "transformers_version": "4.47.0",
}  # fmt: skip
SMOLLM3 = COMMON | sizes(2048, 11008, 36, 16, 4, 128256, 65536) | {
    "architectures": ["SmolLM3ForCausalLM"], "model_type": "smollm3", "attention_bias": False,
    "attention_dropout": 0.0, "bos_token_id": None, "eos_token_id": 128012, "hidden_act": "silu",
    "layer_types": ["full_attention"] * 36, "max_window_layers": 28, "mlp_bias": False,
    "no_rope_layer_interval": 4, "no_rope_layers": [1, 1, 1, 0] * 9, "pad_token_id": 128004,
    "pretraining_tp": 2, "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 5000000.0,
    "sliding_window": None, "use_sliding_window": False,
}  # fmt: skip
GPT_OSS = {
    "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "attention_bias": True,
    "attention_dropout": 0.0, "eos_token_id": 200002, "experts_per_token": 4, "head_dim": 64,
    "hidden_act": "silu", "initial_context_length": 4096, "initializer_range": 0.02,
    **sizes(2880, 2880, 24, 64, 8, 201088, 131072), "num_experts_per_tok": 4,
    "num_local_experts": 32, "output_router_logits": False, "pad_token_id": 199999,
    "layer_types": ["sliding_attention", "full_attention"] * 12, "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "rope_type": "yarn",
        "original_max_position_embeddings": 4096, "truncate": False,
    },
    "rope_theta": 150000, "router_aux_loss_coef": 0.9, "sliding_window": 128,
    "swiglu_limit": 7.0, "tie_word_embeddings": False, "use_cache": True,
    "torch_dtype": "bfloat16",
}  # fmt: skip


def without(config: Config, *keys: str) -> Config:
    return {key: value for key, value in config.items() if key not in keys}


def newer(config: Config) -> Config:
    """As transformers 5 saves it: `dtype`, and one dict of what rotary positions need."""
    rope = {"rope_type": "default", **(config.get("rope_scaling") or {})}
    kept = without(config, "torch_dtype", "rope_scaling", "rope_theta")
    parameters = rope | {"rope_theta": config["rope_theta"]}
    return kept | {"dtype": config["torch_dtype"], "rope_parameters": parameters}


TAKEN: dict[str, Config] = {
    # Llama and what is published in its form.
    "huggyllama/llama-7b": without(LLAMA, "rope_scaling") | without(
        sizes(4096, 11008, 32, 32, 32, 32000, 2048), "num_key_value_heads"
    ) | {"max_sequence_length": 2048, "pad_token_id": 0, "rms_norm_eps": 1e-06,
         "torch_dtype": "float16"},
    "meta-llama/Llama-2-7b-hf": LLAMA | sizes(4096, 11008, 32, 32, 32, 32000, 4096)
    | {"torch_dtype": "float16"},
    "NousResearch/Yarn-Llama-2-7b-64k": LLAMA | sizes(4096, 11008, 32, 32, 32, 32000, 65536) | {
        "auto_map": {"AutoConfig": "configuration_llama.LlamaConfig",
                     "AutoModelForCausalLM": "modeling_llama_together_yarn.LlamaForCausalLM"},
        "rope_scaling": {"factor": 16.0, "original_max_position_embeddings": 4096, "type": "yarn",
                         "finetuned": True},
        "rope_theta": 10000.0,
    },
    "codellama/CodeLlama-7b-hf": LLAMA | sizes(4096, 11008, 32, 32, 32, 32016, 16384)
    | {"rope_theta": 1000000},
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0": LLAMA | sizes(2048, 5632, 22, 32, 4, 32000, 2048)
    | {"attention_bias": False, "rope_theta": 10000.0},
    "togethercomputer/LLaMA-2-7B-32K": LLAMA | sizes(4096, 11008, 32, 32, 32, 32000, 32768)
    | {"rope_scaling": {"factor": 8.0, "type": "linear"}},
    "meta-llama/Meta-Llama-3-8B": without(LLAMA3, "mlp_bias")
    | sizes(4096, 14336, 32, 32, 8, 128256, 8192) | {"rope_scaling": None, "eos_token_id": 128001},
    "meta-llama/Llama-3.1-8B-Instruct": LLAMA3 | sizes(4096, 14336, 32, 32, 8, 128256, 131072),
    "meta-llama/Llama-3.2-1B-Instruct": LLAMA32,
    "unsloth/Llama-3.2-1B-Instruct": LLAMA32 | UNSLOTH
    | {"pad_token_id": 128004, "_attn_implementation_autoset": True},
    "unsloth/Llama-3.2-3B saved by transformers 5": newer(LLAMA32) | UNSLOTH
    | {"model_name": None, "transformers_version": "5.0.0"},
    "HuggingFaceTB/SmolLM2-135M": without(SMOLLM2, "transformers.js_config"),
    "HuggingFaceTB/SmolLM2-135M-Instruct": SMOLLM2,
    "unsloth/SmolLM2-360M-Instruct": SMOLLM2 | UNSLOTH
    | {"_attn_implementation_autoset": True, "hidden_size": 960, "num_attention_heads": 15,
       "num_key_value_heads": 5},
    "deepseek-ai/DeepSeek-R1-Distill-Llama-8B": LLAMA3
    | sizes(4096, 14336, 32, 32, 8, 128256, 131072) | {"eos_token_id": 128001},
    "01-ai/Yi-6B": LLAMA | sizes(4096, 11008, 32, 32, 4, 64000, 4096)
    | {"rms_norm_eps": 1e-05, "rope_theta": 5000000.0, "pad_token_id": 0},
    "tiiuae/Falcon3-1B-Instruct": LLAMA3 | sizes(2048, 8192, 18, 8, 4, 131072, 8192)
    | {"activation": "swiglu", "head_dim": 256, "rope_scaling": None, "rope_theta": 1000042},
    "cognitivecomputations/dolphin-llama3": without(LLAMA3, "mlp_bias")
    | sizes(4096, 14336, 32, 32, 8, 128256, 8192)
    | {"rope_scaling": None, "_name_or_path": "/workspace/dolphin", "torch_dtype": "auto",
       "_flash_attn_2_enabled": True, "use_cache": False, "gradient_checkpointing": False},
    # Qwen2, 2.5 and what is made of them.
    "Qwen/Qwen2-0.5B": QWEN2 | sizes(896, 4864, 24, 14, 2, 151936, 131072)
    | {"eos_token_id": 151643, "sliding_window": 131072},
    "Qwen/Qwen2.5-0.5B": QWEN2 | sizes(896, 4864, 24, 14, 2, 151936, 32768) | {"use_mrope": False},
    "Qwen/Qwen2.5-7B-Instruct": QWEN2 | sizes(3584, 18944, 28, 28, 4, 152064, 32768)
    | {"max_window_layers": 28, "sliding_window": 131072, "tie_word_embeddings": False},
    "Qwen/Qwen2.5-7B-Instruct, long": QWEN2 | sizes(3584, 18944, 28, 28, 4, 152064, 131072)
    | {"tie_word_embeddings": False,
       "rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"}},
    "Qwen/Qwen2.5-Math-1.5B": QWEN2 | sizes(1536, 8960, 28, 12, 2, 151936, 4096)
    | {"rope_theta": 10000, "max_window_layers": 21, "sliding_window": 4096, "use_mrope": False},
    "unsloth/Qwen2.5-1.5B-Instruct": QWEN2 | sizes(1536, 8960, 28, 12, 2, 151936, 32768)
    | {"sliding_window": None, "pad_token_id": 151654, "rope_scaling": None, "unsloth_fixed": True},
    "unsloth/Qwen2.5-0.5B saved by transformers 4.56": without(QWEN2, "torch_dtype") | UNSLOTH
    | sizes(896, 4864, 24, 14, 2, 151936, 32768)
    | {"dtype": "bfloat16", "layer_types": ["full_attention"] * 24, "sliding_window": None},
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": QWEN2
    | sizes(1536, 8960, 28, 12, 2, 151936, 131072)
    | {"rope_theta": 10000, "tie_word_embeddings": False, "sliding_window": 4096,
       "use_mrope": False, "max_window_layers": 21, "bos_token_id": 151646},
    "open-thoughts/OpenThinker-7B": QWEN2 | sizes(3584, 18944, 28, 28, 4, 152064, 32768)
    | {"tie_word_embeddings": False, "sliding_window": None, "use_cache": False},
    # Qwen3 and its experts.
    "Qwen/Qwen3-0.6B": QWEN3 | sizes(1024, 3072, 28, 16, 8, 151936, 40960),
    "Qwen/Qwen3-4B-Instruct-2507": QWEN3 | sizes(2560, 9728, 36, 32, 8, 151936, 262144)
    | {"max_window_layers": 36, "rope_theta": 5000000},
    "Qwen/Qwen3-8B": QWEN3 | sizes(4096, 12288, 36, 32, 8, 151936, 40960)
    | {"tie_word_embeddings": False, "max_window_layers": 36},
    "unsloth/Qwen3-1.7B": QWEN3 | sizes(2048, 6144, 28, 16, 8, 151936, 40960) | UNSLOTH
    | {"pad_token_id": 151654, "layer_types": ["full_attention"] * 28},
    "Qwen/Qwen3-0.6B saved by transformers 5": newer(
        QWEN3 | sizes(1024, 3072, 28, 16, 8, 151936, 40960)
    ) | {"layer_types": ["full_attention"] * 28, "pad_token_id": None, "is_causal": True},
    "Qwen/Qwen3-30B-A3B": QWEN3_MOE | {"max_window_layers": 48},
    "unsloth/Qwen3-30B-A3B": QWEN3_MOE | UNSLOTH | {"pad_token_id": 151654},
    "Qwen/Qwen3-Coder-30B-A3B-Instruct": QWEN3_MOE | {
        "rope_theta": 10000000, "qkv_bias": False, "use_qk_norm": False,
        "shared_expert_intermediate_size": 0, "num_attention_heads": 32,
    },
    # Mistral and Mixtral.
    "mistralai/Mistral-7B-v0.1": MISTRAL | {"sliding_window": 4096, "rope_theta": 10000.0,
                                            "vocab_size": 32000},
    "mistralai/Mistral-7B-Instruct-v0.3": MISTRAL,
    "mistralai/Mistral-Nemo-Instruct-2407": MISTRAL
    | sizes(5120, 14336, 40, 32, 8, 131072, 1024000) | {"head_dim": 128},
    "unsloth/mistral-7b-instruct-v0.3": MISTRAL | UNSLOTH
    | {"pad_token_id": 770, "_attn_implementation_autoset": True},
    "HuggingFaceH4/zephyr-7b-beta": MISTRAL | {
        "_name_or_path": "mistralai/Mistral-7B-v0.1", "sliding_window": 4096, "pad_token_id": 2,
        "rope_theta": 10000.0, "vocab_size": 32000,
    },
    "mistralai/Mixtral-8x7B-Instruct-v0.1": MIXTRAL,
    "mistralai/Mixtral-8x22B-v0.1": MIXTRAL | sizes(6144, 16384, 56, 48, 8, 32768, 65536)
    | {"router_aux_loss_coef": 0.001, "router_jitter_noise": 0.0},
    # Gemma 2 and 3.
    "google/gemma-2-2b-it": GEMMA2,
    "google/gemma-2-27b": GEMMA2 | sizes(4608, 36864, 46, 32, 16, 256000, 8192)
    | {"head_dim": 128, "query_pre_attn_scalar": 144, "_name_or_path": "/raid/gemma",
       "sliding_window_size": 4096},
    "unsloth/gemma-2-2b-it": GEMMA2 | UNSLOTH | {"tie_word_embeddings": True},
    "google/gemma-3-270m-it": without(GEMMA3, "sliding_window_pattern")
    | sizes(640, 2048, 18, 4, 1, 262144, 32768) | {
        "_sliding_window_pattern": 6, "use_bidirectional_attention": False,
        "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 3,
    },
    "google/gemma-3-1b-it": GEMMA3,
    "unsloth/gemma-3-1b-it": GEMMA3 | UNSLOTH,
    # Phi, OLMo 2, SmolLM3, GPT-2, gpt-oss.
    "microsoft/Phi-3-mini-4k-instruct": PHI3,
    "microsoft/Phi-3.5-mini-instruct": PHI3 | {
        "max_position_embeddings": 131072, "sliding_window": 262144,
        "rope_scaling": {"long_factor": [1 + i / 5 for i in range(48)],
                         "short_factor": [1.0 + i / 50 for i in range(48)], "type": "longrope"},
    },
    "microsoft/phi-4": without(PHI3, "auto_map", "_name_or_path")
    | sizes(5120, 17920, 40, 40, 10, 100352, 16384) | {
        "original_max_position_embeddings": 16384, "rope_theta": 250000, "sliding_window": None,
        "bos_token_id": 100257, "eos_token_id": 100265, "pad_token_id": 100349,
    },
    "microsoft/Phi-4-mini-instruct": PHI4_MINI,
    "unsloth/phi-4, as Llama": LLAMA | sizes(5120, 17920, 40, 40, 10, 100352, 16384) | UNSLOTH | {
        "attention_bias": False, "attention_dropout": 0.0, "head_dim": 128, "mlp_bias": False,
        "original_max_position_embeddings": None, "rope_theta": 250000,
    },
    "allenai/OLMo-2-1124-7B": OLMO2,
    "allenai/OLMo-2-0425-1B-Instruct": OLMO2 | sizes(2048, 8192, 16, 16, 16, 100352, 4096)
    | {"torch_dtype": "bfloat16", "bos_token_id": 100257, "_attn_implementation_autoset": True},
    "HuggingFaceTB/SmolLM3-3B": SMOLLM3,
    "unsloth/SmolLM3-3B": SMOLLM3 | UNSLOTH | {"bos_token_id": 128000},
    "openai-community/gpt2": GPT2,
    "distilbert/distilgpt2": GPT2 | {
        "_num_labels": 1, "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}, "n_layer": 6,
    },
    "openai-community/gpt2 of 2019": without(GPT2, "activation_function", "n_ctx") | {
        "finetuning_task": None, "num_labels": 1, "output_attentions": False, "pruned_heads": {},
        "output_hidden_states": False, "torchscript": False, "use_bfloat16": False,
    },
    "unsloth/gpt-oss-20b-BF16": GPT_OSS | UNSLOTH
    | {"layer_types": ["sliding_attention", "full_attention"] * 12},
}  # fmt: skip

# What changes the network: config, and the key or value that its refusal names.
REFUSED: dict[str, tuple[Config, str]] = {
    "unsloth/Llama-3.2-1B-Instruct-bnb-4bit": (
        LLAMA32 | UNSLOTH
        | {"quantization_config": {"load_in_4bit": True, "quant_method": "bitsandbytes"}},
        "quantization_config bitsandbytes: quantized weights",
    ),
    "Qwen/Qwen2.5-7B-Instruct-AWQ": (
        TAKEN["Qwen/Qwen2.5-7B-Instruct"]
        | {"quantization_config": {"bits": 4, "quant_method": "awq", "version": "gemm"}},
        "quantization_config awq: quantized weights",
    ),
    "openai/gpt-oss-20b": (
        GPT_OSS | {"quantization_config": {"quant_method": "mxfp4"}},
        "quantization_config mxfp4: quantized weights",
    ),
    "mlx-community/Llama-3.2-1B-Instruct-4bit": (
        LLAMA32 | {"quantization": {"group_size": 64, "bits": 4}},
        "config.json: quantization: quantized weights",
    ),
    "a block drafter for Qwen3": (
        TAKEN["Qwen/Qwen3-4B-Instruct-2507"]
        | {"v_head_dim": 128, "block_size": 16, "num_target_layers": 36},
        "block_size=16, num_target_layers=36, v_head_dim=128",
    ),
    "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B": (
        TAKEN["meta-llama/Llama-3.1-8B-Instruct"]
        | {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 32000},
        "draft_vocab_size=32000",
    ),
    "Granite's multipliers under Llama's name": (
        LLAMA32 | {"residual_multiplier": 0.22, "embedding_multiplier": 12.0,
                   "logits_scaling": 8.0, "attention_multiplier": 0.015625},
        "attention_multiplier=0.015625, embedding_multiplier=12.0, logits_scaling=8.0, residual",
    ),
    "google/embeddinggemma-300m": (
        GEMMA3 | {"architectures": ["Gemma3TextModel"], "use_bidirectional_attention": True},
        "use_bidirectional_attention True",
    ),
    "a Qwen2 that looks both ways": (
        TAKEN["Qwen/Qwen2.5-0.5B"] | {"is_causal": False}, "is_causal=False",
    ),
    "Qwen/Qwen2.5-VL's text": (
        TAKEN["Qwen/Qwen2.5-7B-Instruct"]
        | {"rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}},
        "rope_type 'mrope' is not supported",
    ),
    "google/gemma-3-4b-it": (
        {"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"],
         "text_config": GEMMA3, "mm_tokens_per_image": 256},
        "model_type 'gemma3' is not supported",
    ),
    "experts in some layers": (
        QWEN3_MOE | {"mlp_only_layers": [0, 1]}, r"mlp_only_layers \[0, 1\]",
    ),
    "a shared expert": (
        QWEN3_MOE | {"shared_expert_intermediate_size": 512},
        "shared_expert_intermediate_size=512",
    ),
    "query and key norms under Llama's name": (LLAMA32 | {"use_qk_norm": True}, "use_qk_norm=True"),
    "layers that differ": (
        LLAMA32 | {"per_layer_config": {"3": {"num_attention_heads": 16}}}, "per_layer_config=",
    ),
    "heads taken out": (GPT2 | {"pruned_heads": {"0": [1]}}, "pruned_heads="),
    "another file of weights": (
        QWEN3 | sizes(1024, 3072, 28, 16, 8, 151936, 40960)
        | {"transformers_weights": "other.safetensors"}, "transformers_weights=",
    ),
    "windows under Llama's name": (LLAMA32 | {"sliding_window": 4096}, "sliding_window=4096"),
    "code of its own": (
        LLAMA32 | {"auto_map": {"AutoModelForCausalLM": "modeling_x.XForCausalLM"}},
        "auto_map.AutoModelForCausalLM has 'modeling_x.XForCausalLM'",
    ),
}  # fmt: skip


def shrunk(config: Config) -> Config:
    """The config with small sizes; every other key as it is."""
    small = dict(config)
    heads, kv = (config.get(f"num_{x}_heads") for x in ("attention", "key_value"))
    layers = 7 if config["model_type"] == "gemma3_text" else 4
    replaced = {
        "vocab_size": 47, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": layers,
        "num_attention_heads": 4, "num_key_value_heads": max(1, 4 * (kv or 1) // (heads or 1)),
        "max_position_embeddings": 64, "head_dim": 8 if config["model_type"] == "phi3" else 12,
        "moe_intermediate_size": 24, "num_experts": 4, "num_local_experts": 4,
        "num_experts_per_tok": 2, "experts_per_token": 2, "max_window_layers": 3,
        "original_max_position_embeddings": 16, "n_embd": 32, "n_head": 4, "n_layer": 3,
        "n_positions": 64, "n_ctx": 64, "initial_context_length": 16, "max_sequence_length": 64,
        "sliding_window": 5, "sliding_window_size": 5,
    }  # fmt: skip
    small |= {key: x for key, x in replaced.items() if config.get(key) is not None}
    for key in ("layer_types", "no_rope_layers"):
        if key in config:
            small[key] = config[key][:layers]
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        ids = config.get(key)
        if ids is not None:
            small[key] = [i % 47 for i in ids] if isinstance(ids, list) else ids % 47
    for key in ("rope_scaling", "rope_parameters"):
        rope = dict(config.get(key) or {})
        if "original_max_position_embeddings" in rope:
            rope["original_max_position_embeddings"] = 16
        pairs = int(8 * config.get("partial_rotary_factor", 1)) // 2
        rope |= {k: rope[k][::10][:pairs] for k in ("long_factor", "short_factor") if k in rope}
        if rope:
            small[key] = rope
    return small
