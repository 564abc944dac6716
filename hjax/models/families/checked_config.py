"""Reading a config.json: keys that the family does not read are refused by name."""

import json
from collections.abc import Mapping
from typing import Any

from hjax.errors import ConfigError, truncate
from hjax.models.rotary import is_number

# Keys that no forward reads, whatever their value.
IGNORED_KEYS = frozenset(
    """
    _commit_hash _name_or_path _num_labels model_type name_or_path transformers_version
    chunk_size_feed_forward decoder_start_token_id finetuning_task id2label is_decoder
    keys_to_ignore_at_inference label2id num_labels output_attentions output_hidden_states
    output_router_logits prefix problem_type return_dict sep_token_id task_specific_params
    tf_legacy_loss tie_encoder_decoder tokenizer_class torchscript unk_token_id use_bfloat16
    use_cache use_return_dict

    assistant_confidence_threshold assistant_lookbehind bad_words_ids begin_suppress_tokens
    cache_implementation diversity_penalty do_sample early_stopping encoder_no_repeat_ngram_size
    encoder_repetition_penalty epsilon_cutoff eta_cutoff exponential_decay_length_penalty
    forced_bos_token_id forced_eos_token_id length_penalty max_length min_length
    no_repeat_ngram_size num_assistant_tokens num_assistant_tokens_schedule num_beam_groups
    num_beams num_return_sequences output_scores remove_invalid_values repetition_penalty
    return_dict_in_generate suppress_tokens target_lookbehind temperature top_k top_p typical_p

    attention_dropout attention_probs_dropout_prob attn_pdrop classifier_dropout dropout embd_pdrop
    embedding_dropout hidden_dropout hidden_dropout_prob initializer_range pretraining_tp
    resid_pdrop summary_first_dropout

    _attn_implementation _attn_implementation_autoset _attn_implementation_internal
    _experts_implementation _flash_attn_2_enabled attn_implementation experts_implementation
    gradient_checkpointing is_llama_config max_sequence_length model_max_length
    transformers.js_config unsloth_fixed unsloth_version use_flash_attention
    use_flash_attention_2 use_flash_attn
    """.split()  # PretrainedConfig's own; generation's; training's; stamps of tools
)
# Values of other keys at which a network is as without them, beside false, null and what is empty.
NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "activation": ("swiglu",),  # beside hidden_act
    **dict.fromkeys(
        (
            *("attn_logit_softcapping", "final_logit_softcapping", "first_k_dense_replace"),
            *("kv_lora_rank", "moe_shared_expert_intermediate_size", "n_shared_experts"),
            *("num_experts", "num_local_experts", "num_mtp_layers", "num_nextn_predict_layers"),
            *("num_shared_experts", "q_lora_rank", "router_jitter_noise"),
            "shared_expert_intermediate_size",
        ),
        (0,),
    ),
    **dict.fromkeys(
        (
            *("embedding_multiplier", "embedding_scale", "logit_scale", "logits_scaling"),
            *("partial_rotary_factor", "residual_multiplier", "rope_ratio", "rotary_pct"),
            *("routed_scaling_factor", "n_group", "topk_group"),
        ),
        (1,),
    ),
}
# Flags of which true is neutral, and false changes the network.
_NEUTRAL_IF_TRUE = ("is_causal", "causal", "use_causal_mask", "use_rope")
_QUANTIZED = ("quantization_config", "compression_config", "quantization")

_MAX_SIZE = 2**31 - 1  # of a size


class CheckedConfig:
    """The content of a config.json, with typed access that records which keys are read.

    Args:
      content: of the file.
      what: names the file in errors.
      defaults: of keys that may be missing, as in transformers' config class of the family.
    """

    def __init__(self, content: Mapping[str, Any], what: str, defaults: Mapping[str, Any] = {}):
        self.content, self.what = content, what
        self._defaults = defaults
        self._read_keys: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        """A key's value, or the default if it is missing or null."""
        self._read_keys.add(key)
        value = self.content.get(key)
        return self._defaults.get(key, default) if value is None else value

    def null(self, key: str) -> bool:
        """Whether a key is present and null, which some classes distinguish from a missing key."""
        return key in self.content and self.content[key] is None

    def size(self, key: str, default: int | None = None) -> int:
        """A positive integer.

        Raises:
          ConfigError: another value, one of more than 31 bits, or no value and no default.
        """
        value = self.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= _MAX_SIZE:
            problem = "is missing" if value is None else f"is {value!r}"
            raise self.error(f"{key} {problem}; a whole number of 1 to {_MAX_SIZE}")
        return value

    def number(self, key: str, default: float) -> float:
        """A number that is not negative.

        Raises:
          ConfigError: something else.
        """
        value = self.get(key, default)
        if not is_number(value) or value < 0:
            allowed = "a finite number, 0 or from 1e-30 to 1e30"
            raise self.error(f"{key} is {value!r}; {allowed}")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        """True or false.

        Raises:
          ConfigError: something else.
        """
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise self.error(f"{key} is {value!r}; true or false")
        return value

    def only(self, key: str, *allowed: Any) -> Any:
        """One of the allowed values; the first if the key is missing.

        Raises:
          ConfigError: another value.
        """
        value = self.get(key, allowed[0])
        if value not in allowed:
            supported = ", ".join(json.dumps(one) for one in allowed)
            raise self.error(f"{key} {value!r} is not supported; supported: {supported}")
        return value

    def error(self, line: str) -> ConfigError:
        """The error to raise, naming the file."""
        return ConfigError(f"{self.what}: {line}")

    def refuse_quantized(self) -> None:
        """Refuse a model whose weights are quantized.

        Raises:
          ConfigError: it says how they are, by the key.
        """
        for key in _QUANTIZED:
            if how := self.get(key):
                method = how.get("quant_method", "") if isinstance(how, Mapping) else how
                named = f"{key} {method}".rstrip()
                raise self.error(
                    f"{named}: quantized weights are not supported; give the float32, float16 or "
                    "bfloat16 ones (for adapters: ADAPTER,base=MODEL)"
                )

    def finish(self) -> None:
        """Refuse keys that were not read, unless they change nothing.

        Raises:
          ConfigError: keys that this family does not know, by name.
        """
        left = {
            key: value
            for key, value in self.content.items()
            if key not in self._read_keys | IGNORED_KEYS and not _is_neutral(key, value)
        }
        if left:
            shown = ", ".join(f"{key}={value!r}" for key, value in sorted(left.items()))
            raise self.error(
                f"a {self.content.get('model_type')} model with {truncate(shown, 200)} is not "
                "supported; remove from config.json what transformers' class does not read, or "
                "add a family (docs/families.md)"
            )


def _is_neutral(key: str, value: Any) -> bool:
    """Whether a network with this value is the one without the key."""
    if isinstance(value, bool):
        return value == (key in _NEUTRAL_IF_TRUE)
    if value is None or (isinstance(value, str | list | dict) and not value):
        return True
    if key == "layer_types":
        return isinstance(value, list) and set(map(str, value)) == {"full_attention"}
    return value in NEUTRAL_VALUES.get(key, ())
