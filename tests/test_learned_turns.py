"""Learned turns of chats, against transformers' renderings: real templates by conversations.

Of each conversation the last turn is learned. The expected tokens are those that transformers'
rendering of the whole has after its rendering of the prompt, up to the token that ends the turn.
"""

import copy
import json
import re

import pytest
import tokenizers
from serving_double import byte_tokenizer
from tokenizers import models, pre_tokenizers

from hjax.data.chat_messages import read_messages
from hjax.data.conversation import Conversation, encode_example
from hjax.data.tokenizer import Tokenizer
from hjax.dryrun.first_examples import first_examples
from hjax.errors import DataError
from hjax.run.inputs import load_inputs
from hjax.settings.config_checks import check_config

BOS, EOS = "<|startoftext|>", "<|endoftext|>"
# The token that ends a turn, by template; None: the next turn's header does. From the models' own
# generation_config.json.
ENDS = {
    "cohere2": "<|END_OF_TURN_TOKEN|>", "deepseekv3": "<｜end▁of▁sentence｜>",
    "gemma3": "<end_of_turn>", "glm4moe": None, "gptoss": "<|return|>", "lfm2": "<|im_end|>",
    "llama3": "<|eot_id|>", "llama3_1": "<|eot_id|>", "llama3_2": "<|eot_id|>",
    "mistral_small": EOS, "nemotron_3_nano": "<|im_end|>", "phi3": "<|end|>",
    "qwen2_5": "<|im_end|>", "qwen3": "<|im_end|>", "qwen3_5_think": "<|im_end|>",
    "qwen3_5_think_training": "<|im_end|>", "qwen3_6": "<|im_end|>",
    "qwen3_instruct_2507": "<|im_end|>", "qwen3_training": "<|im_end|>", "smollm3": "<|im_end|>",
}  # fmt: skip
CALL_ENDS = {"gptoss": "<|call|>"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather of a town.",
            "parameters": {
                "type": "object",
                "properties": {"town": {"type": "string", "description": "Its name."}},
                "required": ["town"],
            },
        },
    }
]


def turn(role, content, **more):
    return {"role": role, "content": content, **more}


def call(town="Genève", number=1, **more):
    function = {"name": "weather", "arguments": {"town": town}}
    return {"type": "function", "function": function, "id": f"call0000{number}"} | more


def result(text='{"sky": "blue"}', number=1):
    return turn("tool", text, tool_call_id=f"call0000{number}", name="weather")


def thought(text):
    """The reasoning under both names that templates read."""
    return {"reasoning_content": text, "thinking": text}


ASK, ANSWER = turn("user", "How is Zürich?"), turn("assistant", "It is dry.")
SYSTEM = turn("system", "Be brief.")
# Of a file's row: the messages, whether there are tools, and the messages as templates take them
# where these differ.
CONVERSATIONS = {
    "one turn": ([ASK, ANSWER], False, None),
    "a system message": ([SYSTEM, ASK, ANSWER], False, None),
    "several turns": ([ASK, ANSWER, turn("user", "And now?"), turn("assistant", "Wet.")], 0, None),
    "several turns after a system message": (
        [SYSTEM, ASK, ANSWER, turn("user", "Sure?"), turn("assistant", "Yes.")], False, None
    ),
    "blanks and an end in the text": (
        [turn("user", " a "), turn("assistant", "b  c\n\n<|im_end|> é\U0001f600.")], False, None
    ),
    "an empty answer": ([ASK, turn("assistant", "")], False, None),
    "tools and no call": ([SYSTEM, ASK, ANSWER], True, None),
    "a call": ([ASK, turn("assistant", "", tool_calls=[call()])], True, None),
    "a call with null content": (
        [ASK, turn("assistant", None, tool_calls=[call()])], True,
        [ASK, turn("assistant", "", tool_calls=[call()])],
    ),
    "a call after text": ([ASK, turn("assistant", "I look.", tool_calls=[call()])], True, None),
    "two calls": (
        [ASK, turn("assistant", "", tool_calls=[call(), call("Bern", 2)])], True, None
    ),
    "arguments as JSON text": (
        [ASK, turn("assistant", "", tool_calls=[
            call(function={"name": "weather", "arguments": '{"town": "Genève"}'})])], True,
        [ASK, turn("assistant", "", tool_calls=[call()])],
    ),
    "an answer to a result": (
        [ASK, turn("assistant", "", tool_calls=[call()]), result(), ANSWER], True, None
    ),
    "a call after a result": (
        [ASK, turn("assistant", "", tool_calls=[call()]), result(),
         turn("assistant", "", tool_calls=[call("Bern", 2)])], True, None
    ),
    "reasoning": ([ASK, ANSWER | thought("I look outside.")], False, None),
    "reasoning by another name": (
        [ASK, ANSWER | {"reasoning": "I look outside."}], False,
        [ASK, ANSWER | thought("I look outside.")],
    ),
    "reasoning in the text": (
        [ASK, turn("assistant", "<think>\nI look outside.\n</think>\n\nIt is dry.")], False, None
    ),
    "reasoning before a call": (
        [ASK, turn("assistant", "", tool_calls=[call()], **thought("I look."))], True, None
    ),
    "reasoning of an earlier call": (
        [ASK, turn("assistant", "", tool_calls=[call()], **thought("I look.")), result(),
         ANSWER | thought("It is blue.")], True, None
    ),
    "reasoning of an earlier turn": (
        [ASK, ANSWER | thought("Hm."), turn("user", "Sure?"), turn("assistant", "Yes.")], 0, None
    ),
    "parts of text": (
        [turn("user", [{"type": "text", "text": "How is"}, {"type": "text", "text": " it?"}]),
         turn("assistant", [{"type": "text", "text": "Dry."}])], False,
        [turn("user", "How is it?"), turn("assistant", "Dry.")],
    ),
    "null fields": (
        [ASK | {"tool_calls": None, "name": None}, ANSWER | {"tool_calls": None}], False,
        [ASK, ANSWER],
    ),
}  # fmt: skip


def save_tokenizer(folder, template):
    """A tokenizer of bytes and of the special tokens in the template, for both libraries."""
    pattern = r"<[|｜][^<>|｜ ]*[|｜]>|<(?:start|end)_of_turn>|\[/?[A-Z_]{3,}\]"
    made = byte_tokenizer(template)
    made._backend.library.add_special_tokens(
        [BOS, EOS, *sorted(set(re.findall(pattern, template)))]
    )
    made._config |= {"bos_token": BOS, "eos_token": EOS}
    if "<｜end▁of▁sentence｜>" in template:
        made._config["eos_token"] = "<｜end▁of▁sentence｜>"
    made._config["tokenizer_class"] = "PreTrainedTokenizerFast"
    made.save(folder)
    return Tokenizer.load(folder)


def rendered(theirs, messages, tools, asks):
    return theirs.apply_chat_template(
        copy.deepcopy(messages), tools=tools, tokenize=False, add_generation_prompt=asks
    )


def expected_text(name, prompt, whole, answer):
    """The learned text and the prompt's, by hand; None: the library must refuse."""
    end = CALL_ENDS.get(name, ENDS[name]) if answer.get("tool_calls") else ENDS[name]
    whole = whole if end is None else whole[: whole.rindex(end) + len(end)]
    if whole.startswith(prompt):
        return prompt, whole[len(prompt) :]
    for asked, written in (
        # The header opens a thought that no rendered answer has: R1 drops all thoughts.
        ("<｜Assistant｜><think>\n", "<｜Assistant｜>"),
        # Nemotron closes an empty thought in the line that opens it.
        ("<|im_start|>assistant\n<think>\n", "<|im_start|>assistant\n<think>"),
        ("<｜tool▁outputs▁end｜>", "<｜tool▁outputs▁end｜>"),
    ):
        before = prompt.removesuffix(asked) + written
        if prompt.endswith(asked) and whole.startswith(before):
            return before, whole[len(before) :]
    if name == "mistral_small":  # writes the last question in another way
        return prompt, whole[whole.rindex("[/INST]") + len("[/INST]") :]
    # An earlier thought is written while the tool's result is the last message, and no longer.
    header = {"gptoss": "<|start|>assistant"}[name]
    tail = whole[whole.index("to=assistant") :]
    return prompt, tail[tail.index(header) + len(header) :]


def lacks(text, answer):
    """Whether the rendered text lacks a part of the answer."""
    thoughts = re.split("</?think>", answer["content"]) + [answer.get("thinking", "")]
    towns = [each["function"]["arguments"]["town"] for each in answer.get("tool_calls", ())]
    return any("".join(part.split()) not in "".join(text.split()) for part in thoughts + towns)


@pytest.mark.parametrize("name", ENDS)
def test_learned_turns_are_the_templates(name, tmp_path, test_data):
    transformers = pytest.importorskip("transformers")
    template = (test_data / "chat_templates" / f"{name}.jinja").read_text()
    ours = save_tokenizer(tmp_path, template)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    told = {}
    for title, (row, with_tools, canonical) in CONVERSATIONS.items():
        messages, tools = canonical or row, TOOLS if with_tools else None
        read = read_messages(copy.deepcopy(row))
        chat = Conversation(read[:-1], tools)
        try:
            prompt = rendered(theirs, messages[:-1], tools, True)
            whole = rendered(theirs, messages, tools, False)
        except Exception:  # the template's own refusal
            with pytest.raises(DataError, match="^tokenizer .* refuses this: [^\n]*$"):
                encode_example(ours, chat, [1], [read[-1:]])
            told[title] = "refused by the template"
            continue
        asked = theirs(prompt, add_special_tokens=False).input_ids
        if lacks(whole, messages[-1]):
            with pytest.raises(DataError, match="^tokenizer .* leaves out [^\n]*$"):
                encode_example(ours, chat, asked, [read[-1:]])
            told[title] = "not in the template"
            continue
        before, learned = expected_text(name, prompt, whole, messages[-1])
        head = theirs(before, add_special_tokens=False).input_ids
        ids = theirs(before + learned, add_special_tokens=False).input_ids
        end = [theirs.eos_token_id] if ENDS[name] is None else []
        remarks = []
        assert encode_example(ours, chat, asked, [read[-1:]], remarks.append) == (
            head, ids[len(head) :] + end,
        ), title  # fmt: skip
        differs = not whole.startswith(prompt)
        assert len(remarks) == differs + (ENDS[name] is None) and "\n" not in "".join(remarks)
        told[title] = "said" if differs else "equal"
    assert not {"one turn", "several turns", "an empty answer"} - {
        title for title, said in told.items() if said in ("said", "equal")
    }


def saved_rows(folder, *rows):
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def inputs_of(folder, path, algorithm, source):
    keys = {
        "algorithm.name": algorithm, "data.path": str(path), "data.task": "", "eval.every": 0,
        "tokenizer.path": str(folder), "rollout.max_response_length": 64, "reward.function": "",
        "rollout.max_prompt_length": 0,
    }  # fmt: skip
    config = check_config(keys)
    return config, load_inputs(config, source)


ASKED = "<|startoftext|><start_of_turn>user\nHow?<end_of_turn>\n<start_of_turn>model\n"
CHAT = [{"role": "user", "content": "How?"}]
KINDS = {
    "SFT": ("demonstrations", {"prompt": CHAT, "response": " So. "}, {"demonstration": "So."}),
    "DPO": (
        "pairs",
        {"prompt": CHAT, "chosen": "So.", "rejected": "No."},
        {"chosen": "So.", "rejected": "No."},
    ),
    "KTO": (
        "verdicts",
        {"prompt": CHAT, "completion": "So.", "label": True},
        {"right answer": "So."},
    ),
}


@pytest.mark.parametrize("algorithm", KINDS)
def test_every_kind_of_answer_ends_as_its_template_ends_it(algorithm, tmp_path, test_data):
    """And the dry run shows the first of each kind."""
    source, row, answers = KINDS[algorithm]
    save_tokenizer(tmp_path, (test_data / "chat_templates/gemma3.jinja").read_text())
    config, inputs = inputs_of(tmp_path, saved_rows(tmp_path, row), algorithm, source)
    assert first_examples(config, inputs, source) == {
        kind: {"prompt": ASKED, "learned": f"{answer}<end_of_turn>"}
        for kind, answer in answers.items()
    }
    prompt, *responses = inputs.demonstrations[0]
    assert prompt == inputs.train.prompt_tokens[0]
    [end] = inputs.tokenizer.encode("<end_of_turn>", add_special=False)
    assert [response[-1] for response in responses] == [end] * len(answers)
    assert end in inputs.eos_ids


def test_prompts_and_labelled_steps_in_the_dry_run(tmp_path, test_data):
    save_tokenizer(tmp_path, (test_data / "chat_templates/gemma3.jinja").read_text())
    config, inputs = inputs_of(tmp_path, saved_rows(tmp_path, {"prompt": CHAT}), "GRPO", "prompts")
    assert first_examples(config, inputs, "prompts") == {"prompt": {"prompt": ASKED, "learned": ""}}
    row = {"prompt": CHAT, "completions": ["1+1", "=3"], "labels": [True, False]}
    config, inputs = inputs_of(tmp_path, saved_rows(tmp_path, row), "ProcessRewardModel", "steps")
    learned = "1+1[1]=3[0]<end_of_turn>"
    assert first_examples(config, inputs, "steps") == {
        "steps": {"prompt": ASKED, "learned": learned}
    }


def test_a_template_is_told_of_once_by_a_run(tmp_path, test_data):
    """And its prompts end where answers begin: R1's header opens a thought that no answer has."""
    save_tokenizer(tmp_path, (test_data / "chat_templates/deepseekv3.jinja").read_text())
    rows = [{"prompt": CHAT, "response": answer} for answer in ("So.", "<thus")]
    _, inputs = inputs_of(tmp_path, saved_rows(tmp_path, *rows), "SFT", "demonstrations")
    decode = inputs.tokenizer.decode
    assert [tuple(decode(x, skip_special=False) for x in row) for row in inputs.demonstrations] == [
        (f"{BOS}<｜User｜>How?<｜Assistant｜>", f"{answer}<｜end▁of▁sentence｜>")
        for answer in ("So.", "<thus")
    ]
    [remark] = inputs.remarks
    assert f"tokenizer {tmp_path.name}: its chat template asks with" in remark


@pytest.mark.parametrize("name", ["nemotron_3_nano", "deepseekv3", "gptoss", "qwen3"])
def test_both_answers_of_a_pair_have_one_prompt(name, tmp_path, test_data):
    """One with a thought, one without, and one of two turns, each as in the whole conversation."""
    transformers = pytest.importorskip("transformers")
    template = (test_data / "chat_templates" / f"{name}.jinja").read_text()
    tokenizer = save_tokenizer(tmp_path, template)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    answers = [
        [turn("assistant", "So.", **({} if name == "deepseekv3" else thought("I look.")))],
        [turn("assistant", "No.")],
        [turn("assistant", "No."), turn("user", "Why?"), turn("assistant", "So it is.")],
    ]
    asked = tokenizer.encode(rendered(theirs, CHAT, None, True), add_special=False)
    prompt, *learned = encode_example(tokenizer, Conversation(CHAT), asked, answers)
    for answer, ids in zip(answers, learned, strict=True):
        whole = rendered(theirs, [*CHAT, *answer], None, False)
        cut = whole[: whole.rindex(ENDS[name]) + len(ENDS[name])]
        assert tokenizer.decode([*prompt, *ids], skip_special=False) == cut


def test_an_end_that_is_no_token_is_followed_by_eos(tmp_path):
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }} ###\n{% endfor %}"
    tokenizer = save_tokenizer(
        tmp_path, template + "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    remarks = []
    chat = Conversation(CHAT)
    prompt, learned = encode_example(tokenizer, chat, [1], ["So."], remarks.append)
    assert tokenizer.decode(learned, skip_special=False) == f"So. ###{EOS}"
    assert len(remarks) == 1 and "ends an answer with ' ###\\n', in which is no token" in remarks[0]


def test_text_prompts_keep_their_answers_ids(tmp_path, test_data):
    save_tokenizer(tmp_path, (test_data / "chat_templates/gemma3.jinja").read_text())
    path = saved_rows(tmp_path, {"prompt": "a", "response": " b\n"})
    _, inputs = inputs_of(tmp_path, path, "SFT", "demonstrations")
    assert inputs.demonstrations == [([97], [32, 98, 10, inputs.tokenizer.eos_id])]
    with pytest.raises(DataError, match="^the prompt is no chat, and an answer is .*both as text"):
        encode_example(inputs.tokenizer, None, [97], [[ANSWER]])


def test_an_answer_is_no_new_beginning(tmp_path):
    """Of a tokenizer that writes a blank before each text, as SentencePiece's do."""
    pieces = {p: i for i, p in enumerate(["<unk>", "<s>", "</s>", "▁", *"abc:\n", "▁b", "▁a"])}
    backend = tokenizers.Tokenizer(models.BPE(pieces, [("▁", "b"), ("▁", "a")], unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.add_special_tokens(["<s>", "</s>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "<s>", "eos_token": "</s>"}')
    (tmp_path / "chat_template.jinja").write_text(
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ m.content + ':' }}"
        "{% else %}{{ m.content + eos_token }}{% endif %}{% endfor %}"
    )
    tokenizer = Tokenizer.load(tmp_path)
    chat = Conversation([{"role": "user", "content": "a"}])
    asked = tokenizer.encode("<s>a:", add_special=False)
    prompt, learned = encode_example(tokenizer, chat, asked, ["b"])
    assert prompt + learned == tokenizer.encode("<s>a:b</s>", add_special=False)
    assert learned == [pieces["b"], 2] != tokenizer.encode("b</s>", add_special=False)


@pytest.mark.parametrize(
    ("name", "ends"),
    [("gptoss", ["<|return|>", "<|call|>"]), ("qwen2_5", ["<|im_end|>"]), ("glm4moe", [])],
)
def test_rollouts_stop_where_turns_end(name, ends, tmp_path, test_data):
    """And at the ids of generation_config.json, in every copy."""
    transformers = pytest.importorskip("transformers")
    first = tmp_path / "first"
    made = save_tokenizer(first, (test_data / "chat_templates" / f"{name}.jinja").read_text())
    (first / "generation_config.json").write_text('{"eos_token_id": [3, 5]}')
    expected = (made.eos_id, *(i for end in ends for i in made.encode(end, False)), 3, 5)
    tokenizer = Tokenizer.load(first)
    assert tokenizer.eos_ids == expected
    tokenizer.save(tmp_path / "copy")
    assert Tokenizer.load(tmp_path / "copy").eos_ids == expected
    found = transformers.GenerationConfig.from_pretrained(tmp_path / "copy")
    assert tuple(found.eos_token_id) == expected
    # Of a model that has none of its own tokenizer.
    assert Tokenizer.load(tmp_path / "copy" / "tokenizer.json", first).eos_ids == expected
