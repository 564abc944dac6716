"""Random rows of chats: each leaf is rendered or learned, stays in a column, or is named in the
error that refuses it."""

import copy
import itertools
import json
import re
import string

import pytest
from fuzzing import examples
from hypothesis import given
from hypothesis import strategies as st

from hjax.data.conversation import encode_example
from hjax.data.dataset import Dataset
from hjax.data.tokenizer import Tokenizer
from hjax.errors import DataError

TEMPLATES = ("qwen3", "qwen2_5", "llama3_1", "gptoss", "glm4moe", "phi3", "gemma3", "smollm3")
REASONING = ("reasoning_content", "reasoning", "thinking")
# What an error says of a row as a whole.
WHOLE = ("the chat template refuses this", "template writes the prompt differently",
         "has the weight 0", "which answers nothing")
NAMED = re.compile(r"rows.jsonl:1: ([a-z_]+(?:\[\d+\]|\.[a-z_]+)*)")


def maybe(draw, chance=3):
    return draw(st.integers(1, chance)) == 1


def call(draw, leaf, number):
    arguments = {"city": leaf(), "more": draw(st.sampled_from([None, True, 3, {"in": [leaf()]}]))}
    function = {"name": leaf(), "arguments": arguments}
    if maybe(draw):
        function["arguments"] = json.dumps(arguments)
    made = {"function": function} if maybe(draw, 2) else dict(function)
    optional = {"id": f"id{number}", "type": "function", "index": number, "extra": leaf()}
    return made | {key: x for key, x in optional.items() if maybe(draw, 5 if key == "extra" else 2)}


def message(draw, leaf, role):
    content = draw(st.sampled_from(["text", "text", "text", "parts", "null", "image"]))
    parts = [{"type": "text", "text": leaf()}, {"type": "text", "text": leaf()}]
    if content == "image":
        parts.append({"type": "image_url", "image_url": {"url": leaf()}})
    made = {"role": role, "content": leaf() if content == "text" else parts}
    if content == "null":
        made["content"] = None if maybe(draw) else ""
    if role == "assistant":
        if maybe(draw):
            made["tool_calls"] = [call(draw, leaf, i) for i in range(draw(st.integers(0, 2)))]
        elif maybe(draw, 6):
            made["function_call"] = {"name": leaf(), "arguments": json.dumps({"a": leaf()})}
        for key in REASONING:
            if maybe(draw, 5):
                made[key] = leaf()
        if maybe(draw, 4):
            made["weight"] = draw(st.sampled_from([0, 1]))
    if role == "tool" and maybe(draw):
        made["tool_call_id"] = draw(st.sampled_from(["id0", "id1"]))
    for key in ("name", "refusal", "images"):
        if maybe(draw, 12):
            made[key] = leaf()
    return made


@st.composite
def rows(draw):
    """A template, and a row whose leaves of text are all different."""
    numbers = itertools.count()
    leaf = lambda: f"leaf{next(numbers)}end"  # noqa: E731
    roles = [*["system"][: maybe(draw, 2)], "user", *draw(st.lists(
        st.sampled_from(["assistant", "user", "tool"]), max_size=4)), "assistant"]  # fmt: skip
    row = {"messages": [message(draw, leaf, role) for role in roles], "level": leaf()}
    if maybe(draw):
        parameters = {"type": "object", "properties": {"city": {"type": "string"}}}
        function = {"name": leaf(), "description": leaf(), "parameters": parameters}
        tools = [{"type": "function", "function": function}]
        row["tools"] = json.dumps(tools) if maybe(draw) else tools
    if maybe(draw):
        row["chat_template_kwargs"] = {"enable_thinking": maybe(draw, 2), "mood": leaf()}
    return draw(st.sampled_from(TEMPLATES)), row


def without(row, path):
    """The row without what an error names, which must be there; of a call's function the call."""
    row, path = copy.deepcopy(row), re.sub(r"(tool_calls\[\d+\])\.function.*", r"\1", path)
    *keys, last = (int(key) if key.isdigit() else key for key in re.findall(r"[a-z_]+|\d+", path))
    place = row
    for key in keys:
        place = json.loads(place) if isinstance(place, str) else place
        place = place if key == "tool_calls" and key not in place else place[key]
    if isinstance(last, int) and isinstance(place, dict):  # the call was an old function_call
        last = "function_call"
    if last == "name" and "name" not in place:
        last = "function_call"
    if last == "content":
        place["content"] = "" if place.get("content") else "said"
    elif last == "reasoning_content":
        assert [place.pop(key) for key in REASONING if key in place]
    else:
        del place[last]
    return row


def leaves(value):
    return set(re.findall(r"leaf\d+end", json.dumps(value)))


def dropped_context(row):
    """Leaves of turns that are not learned and that templates drop from what stands before."""
    learned = [x["role"] == "assistant" and x.get("weight") != 0 for x in row["messages"]]
    after = len(learned) - learned[::-1].index(True)
    found = leaves(row["messages"][after:])  # context of no learned turn
    for each in row["messages"]:
        if each.get("weight") == 0:
            found |= leaves([each.get(key) for key in REASONING])
            found |= leaves(each["content"]) if each.get("tool_calls") else set()
    return found


@pytest.fixture(scope="module")
def tokenizers(test_data):
    made = {}
    for name in TEMPLATES:
        made[name] = Tokenizer.characters(string.printable)
        made[name].name = name
        made[name].chat_template = (test_data / f"chat_templates/{name}.jinja").read_text()
    return made


@pytest.fixture(scope="module")
def outcomes():
    """How many rows came to what: a test that refuses all shows nothing."""
    found = {"whole": 0, "read": 0, "refused": 0}
    yield found
    assert all(count > 4 for count in found.values()), found


@examples(80)
@given(given_row=rows())
def test_no_leaf_vanishes(given_row, tokenizers, outcomes, tmp_path_factory):
    name, row = given_row
    tokenizer, path = tokenizers[name], tmp_path_factory.getbasetemp() / "rows.jsonl"
    for _ in range(30):
        path.write_text(json.dumps(row) + "\n")
        try:
            dataset = Dataset.from_file(path, tokenizer, learns_demonstrations=True)
            break
        except DataError as error:
            said = str(error)
            assert "\n" not in said
            if any(text in said for text in WHOLE):
                outcomes["whole"] += 1
                return
            assert (named := NAMED.search(said)), said
            outcomes["refused"] += 1
            # The template refused the whole conversation, so its turns' prompts are judged alone.
            row = without(row, re.sub("^prompt", "messages", named[1]))
    outcomes["read"] += 1
    learned = []
    for i, response in enumerate(dataset.columns["response"]):
        chat, prompt = dataset.conversations[i], dataset.prompt_tokens[i]
        try:
            _, ids = encode_example(tokenizer, chat, prompt, [response])
        except DataError as error:
            assert any(text in str(error) for text in ("template leaves out", *WHOLE)), error
            return
        learned.append(tokenizer.decode(ids))
    kept = [dataset.columns.get(key) for key in ("level", "chat_template_kwargs")]
    found = leaves([dataset.prompt_text, learned, kept]) | dropped_context(row)
    assert leaves(row) <= found, sorted(leaves(row) - found)
