"""Request fields that change nothing: some at every value, others only at the values listed here.

They are those of OpenAI's API and of vLLM's server. At any other value they are refused by name.
"""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import AfterValidator, create_model

from hjax.serving.fields import RequestFields, as_json

# Who asks, how it is billed or kept, and what could make an answer faster.
_IGNORED = (
    "user", "metadata", "service_tier", "safety_identifier", "prompt_cache_key",
    "prompt_cache_options", "prompt_cache_retention", "prediction", "request_id",
)  # fmt: skip
# What this server does not do, and the values that do not ask for it.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "store": (False,),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "early_stopping": (False,),
    "typical_p": (1,),
    "include_stop_str_in_output": (False,),
    "spaces_between_special_tokens": (True, False),
    "bad_words": ([],),
    "logits_processors": ([],),
    "return_tokens_as_token_ids": (False,),
    "guided_decoding_backend": ("auto", "guidance"),
    "priority": (0,),
    "kv_transfer_params": ({},),
    "vllm_xargs": ({},),
    "mm_processor_kwargs": ({},),
    "extra_body": ({},),
}
_NEUTRAL_OF_COMPLETIONS = {"suffix": ("",), "add_special_tokens": (True,)}
_NEUTRAL_OF_CHATS: Mapping[str, tuple[Any, ...]] = {
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "verbosity": ("medium",),
    "include_reasoning": (True,),
    "echo": (False,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "add_special_tokens": (False,),
    "documents": ([],),
}


def only(*values: Any) -> AfterValidator:
    """A validator of a field that must have one of these values."""

    def check(value: Any) -> Any:
        for each in values:
            if value == each and isinstance(value, bool) == isinstance(each, bool):
                return value
        said = " or ".join(map(as_json, values))
        raise ValueError(f"only {said} is supported here; leave it out")

    return AfterValidator(check)


def _model(name: str, neutral: Mapping[str, tuple[Any, ...]], *ignored: str) -> Any:
    fields: dict[str, Any] = dict.fromkeys(ignored, (Any, None))
    fields |= {field: (Annotated[Any, only(*values)], None) for field, values in neutral.items()}
    return create_model(name, __base__=RequestFields, **fields)


NeutralFields: Any = _model("NeutralFields", _NEUTRAL, *_IGNORED)
NeutralCompletionFields: Any = _model("NeutralCompletionFields", _NEUTRAL_OF_COMPLETIONS)
NeutralChatFields: Any = _model("NeutralChatFields", _NEUTRAL_OF_CHATS)
