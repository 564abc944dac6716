"""Whether templates only append, and what follows a turn that calls tools."""

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from hjax.data.template_continuation import template_continuation
from hjax.data.tokenizer import Tokenizer
from hjax.environments.episode_pool import EpisodeAnswer
from hjax.environments.episode_text import ObservationEncoder
from hjax.errors import DataError

S, T, P, R = "same", "sampled", "prompt", "refused"
# Tokens of their own, and the first of them ends texts.
ADDED = {
    "cohere2": ("<|END_OF_TURN_TOKEN|>", "<|START_OF_TURN_TOKEN|>"),
    "deepseekv3": ("<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"),
    "gemma3": ("<eos>", "<end_of_turn>", "<start_of_turn>"),
    "glm4moe": ("<|endoftext|>", "<|user|>", "<|assistant|>", "<|observation|>", "<|system|>"),
    "gptoss": ("<|return|>", "<|call|>", "<|end|>", "<|start|>", "<|channel|>", "<|message|>",
               "<|constrain|>"),
    "llama3": ("<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"),
    "llama3_1": ("<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>"),
    "llama3_2": ("<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>"),
    "mistral_small": ("</s>", "[INST]", "[/INST]", "[TOOL_CALLS]"),
    "phi3": ("<|endoftext|>", "<|end|>", "<|user|>", "<|assistant|>"),
}  # fmt: skip
# How real templates continue, of each prompt after the first: two questions; a call and its result;
# both; first without thoughts, then with thoughts given back; a call whose thoughts were dropped.
# Worked out by rendering them apart from hjax, with turns as the models write them.
CONTINUATIONS = {
    "qwen2_5": (S, S, S + S, S, S, S + S, S),
    "qwen3_instruct_2507": (S, S, S + S, S, S, S + S, S),
    "qwen3": (T, T, T + T, T, S, S + P, T),
    "qwen3_training": (S, S, S + S, S, S, S + S, T),
    "qwen3_5_think": (P, S, S + P, P, S, S + P, T),
    "qwen3_5_think_training": (S, S, S + S, S, S, S + S, T),
    "qwen3_6": (P, S, S + P, P, S, S + P, T),
    "llama3": (S, T, T + S, S, T, T + S, T),
    "llama3_1": (S, S, S + S, S, S, S + S, S),
    "llama3_2": (S, S, S + S, S, S, S + S, S),
    "gemma3": (S, R, R, S, R, R, R),
    "gptoss": (T, T, T + T, T, T, T + P, T),
    "deepseekv3": (P, P, P + S, P, P, P + S, P),
    "glm4moe": (S, S, S + S, T, S, S + P, T),
    # With one newline after the thoughts, as its template writes them; with two the call is T.
    "nemotron_3_nano": (P, P, P + P, P, S, S + P, P),
    "smollm3": (S, T, T + S, T, T, T + T, T),
    "lfm2": (S, T, T + S, S, T, T + S, T),
    "mistral_small": (P, P, P + P, P, P, P + P, P),
}
KINDS = {
    "append-only": ("qwen2_5", "qwen3_instruct_2507", "qwen3_training", "qwen3_5_think_training",
                    "llama3_1", "llama3_2"),
    "strips thoughts": ("glm4moe",),
    "rewrites turns": ("qwen3", "qwen3_5_think", "qwen3_6", "gptoss", "deepseekv3",
                       "nemotron_3_nano", "mistral_small"),
    "loses calls": ("llama3", "smollm3", "lfm2"),
    "refuses tools": ("gemma3",),
}  # fmt: skip
COLUMNS = [(talk, how) for how in ("plain", "thoughts") for talk in ("UAUA", "UCTA", "UCTAUA")]
COLUMNS.append(("UCTA", "thoughts dropped"))


def with_template(name, test_data):
    """A byte-level tokenizer with a published chat template and the tokens that it writes."""
    added = ADDED.get(name, ("<|im_end|>", "<|im_start|>"))
    letters = {each: i for i, each in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    library = tokenizers.Tokenizer(models.BPE(letters, []))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens(["<s>", *added])
    config = {"bos_token": "<s>", "eos_token": added[0]}
    template = (test_data / f"chat_templates/{name}.jinja").read_text()
    return Tokenizer(library, config, name=name, chat_templates={"default": template})


@pytest.mark.parametrize("name", sorted(CONTINUATIONS))
def test_how_published_templates_continue(name, test_data):
    found = template_continuation(with_template(name, test_data))
    assert tuple("".join(found.marks[column]) for column in COLUMNS) == CONTINUATIONS[name]
    assert name in KINDS[found.kind]


def test_without_a_template():
    with pytest.raises(DataError, match="has no chat template"):
        template_continuation(Tokenizer.characters("ab"))


def call(number, name, **arguments):
    function = {"name": name, "arguments": arguments}
    return {"id": f"call{number:05}", "type": "function", "function": function}


def result(number, name, text):
    return {"role": "tool", "content": text, "name": name, "tool_call_id": f"call{number:05}"}


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "Does it.",
            "parameters": {"type": "object", "properties": {"x": {"type": "string"}}},
        },
    }
    for name in ("search", "add")
]
# Templates that keep prompt and sample through calls and their results.
APPENDING = (*KINDS["append-only"], "qwen3_5_think", "qwen3_6", "glm4moe")
ONE_CALL = ("llama3_1", "llama3_2")  # a turn


def real_tokenizer(which, name, test_data):
    """A published tokenizer with a published template and the tokens that it writes."""
    tokenizer = Tokenizer.load(test_data / which)
    made = with_template(name, test_data)
    library = tokenizer._library
    library.add_special_tokens(["<s>", *ADDED.get(name, ("<|im_end|>", "<|im_start|>"))])
    # Turns of GLM end in the token of who speaks next, as its generation_config says.
    ends = [library.token_to_id("<|observation|>")] if name == "glm4moe" else []
    return Tokenizer(library, made._config, name=which, extra_eos_ids=ends,
                     chat_templates={"default": made.chat_template})  # fmt: skip


@pytest.mark.parametrize("which", [
    "tokenizers/minimind",
    *(pytest.param(name, marks=pytest.mark.extended)
      for name in ("tokenizers/gpt2", "weights/stories260K-hf")),
])  # fmt: skip
@pytest.mark.parametrize("name", APPENDING)
def test_ids_between_turns_are_the_templates_own(name, which, test_data):
    tokenizer = real_tokenizer(which, name, test_data)
    system = {"role": "system", "content": "Be terse."}
    talk = [system, {"role": "user", "content": "Où?"}]
    first = EpisodeAnswer("Où?", messages=talk, tools=TOOLS)
    encoder = ObservationEncoder(tokenizer, chat=True)
    chat = encoder.conversation(first)
    several = [call(1, "search", x='a "b" é\n'), call(2, "add", y=[1, {"z": "}"}], x="")]
    calls = several[:1] if name in ONE_CALL else several
    turns = [
        (
            [{"role": "assistant", "content": "", "tool_calls": calls}],
            [result(1, "search", '{"found": "Zoë"}'), result(2, "add", "error: no")][: len(calls)],
        ),
        ([{"role": "assistant", "content": "", "tool_calls": [call(3, "add", x="2")]}],
         [result(3, "add", "12\n\n7")]),
        ([{"role": "assistant", "content": "It is 7."}], [{"role": "user", "content": "And é?"}]),
    ]  # fmt: skip
    if name in ("qwen3_5_think", "qwen3_6", "glm4moe"):  # which rewrite at a new question
        turns = turns[:2]
    seen = encoder.begin(chat)
    for turn, following in turns:
        asked = tokenizer.chat(talk, True, tools=TOOLS)
        whole = tokenizer.chat([*talk, *turn], False, tools=TOOLS)
        said, _ = tokenizer.turn_ends.cut(whole[len(asked) :])
        drawn = tokenizer.encode(said, add_special=False)
        ended = drawn[-1] in tokenizer.eos_ids
        if name == "glm4moe":
            drawn, ended = [*drawn, tokenizer.eos_ids[-1]], True
        assert ended
        between = encoder.continuation(
            chat, drawn, ended, EpisodeAnswer(messages=[*turn, *following])
        )
        seen += drawn + between
        talk += [*turn, *following]
        expected = tokenizer.chat(talk, True, tools=TOOLS)
        ids = tokenizer.encode(expected, add_special=False)
        assert ids[-len(between) :] == between
        if which != "weights/stories260K-hf":  # which decodes a blank after each added token
            assert tokenizer.decode(seen, skip_special=False) == expected


@pytest.mark.parametrize("name", ["llama3", "smollm3", "lfm2", "gemma3", "mistral_small"])
def test_templates_that_cannot_continue_after_a_call_are_refused(name, test_data):
    tokenizer = with_template(name, test_data)
    system = [] if name == "gemma3" else [{"role": "system", "content": "Be terse."}]
    talk = [*system, {"role": "user", "content": "a"}]
    with pytest.raises(DataError, match="tokenizer"):
        encoder = ObservationEncoder(tokenizer, chat=True)
        chat = encoder.conversation(EpisodeAnswer("a", messages=talk, tools=TOOLS))
        turn = {"role": "assistant", "content": "", "tool_calls": [call(1, "add", x="1")]}
        following = EpisodeAnswer(messages=[turn, result(1, "add", "2")])
        encoder.continuation(chat, [], False, following)
