"""Calls of tools that a request forces or holds to a schema: OpenAI's client, jsonschema."""

import json
import pathlib
import re

import jax
import jsonschema
import openai
import pytest
from serving_double import EOS, byte_tokenizer, served

from hjax.data.tool_call_forms import BARE, TAGGED
from hjax.models.model_config import ModelConfig
from hjax.models.parameters import decoder_network
from hjax.rollout.constrained_decoding import ConstraintCompiler
from hjax.rollout.constraint import Constraint
from hjax.rollout.language_model import LanguageModel
from hjax.rollout.sampling_params import SamplingParams
from hjax.rollout.service import GenerationService
from hjax.serving.response_format import TextFormat
from hjax.serving.tool_choice import ToolFields
from hjax.sharding.layout import make_layouts

CONFIG = ModelConfig(
    vocab_size=260, hidden_size=16, mlp_size=24, layers=1, heads=4, kv_heads=2, head_dim=8,
    max_length=1024,
)  # fmt: skip
ADD = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99},
                   "how": {"enum": ["now", "spä}ter\\"]}},
    "required": ["a", "how"],
    "additionalProperties": False,
}  # fmt: skip
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
SCHEMAS = {"add": ADD, "wait": {"$ref": "#/$defs/wait", "$defs": {"wait": {
    "type": "object", "properties": {"s": {"type": "boolean"}}, "required": ["s"],
    "additionalProperties": False}}}, "stop": NOTHING}  # fmt: skip
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": schema}}
    for name, schema in SCHEMAS.items()
]
del TOOLS[2]["function"]["parameters"]  # as OpenAI has it: none
# As the test data's template of Llama 3.2 writes them.
BARE_TEMPLATE = (
    "{{ tools }}{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}"
    "{{ '{\"name\": \"' + c.function.name + '\", ' }}{{ '\"parameters\": ' }}"
    "{% endfor %}{% endfor %}"
)


@pytest.fixture(scope="module", params=["tagged", pytest.param("bare", marks=pytest.mark.extended)])
def client(request):
    layout = make_layouts(jax.devices()[:1]).generate
    tokenizer = byte_tokenizer(*[BARE_TEMPLATE][: request.param == "bare"])
    params = decoder_network(CONFIG).create(1, layout)
    model = LanguageModel(CONFIG, params, tokenizer, eos_ids=(EOS,))
    with served(GenerationService(model, slots=4), tokenizer=tokenizer) as (url, _, _):
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as made:
            made.several = request.param == "tagged"
            yield made


def chat(client, **fields):
    messages = [{"role": "user", "content": "Hi"}]
    return client.chat.completions.create(model="bytes", messages=messages, tools=TOOLS, **fields)


def check(call):
    jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])


def read_tools(given):
    return ToolFields(**given).requested_tools(given)


@pytest.mark.extended
def test_the_documentations_examples_run_against_a_server(client, capsys):
    page = (pathlib.Path(__file__).parent.parent / "docs" / "serving.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.M | re.S)
    first, second = (block for block in blocks if "client" in block)
    variables = {}
    address = "http://127.0.0.1:8000/v1"
    assert address in first
    exec(first.replace(address, str(client.base_url)), variables)
    assert capsys.readouterr().out and variables["model"] == "bytes"
    lines = second.rstrip().splitlines()
    exec("\n".join([*lines[:-1], f"arguments = {lines[-1]}"]), variables)
    arguments = json.loads(variables["arguments"])
    assert arguments.keys() == {"a", "b"} and all(type(n) is int for n in arguments.values())


@pytest.mark.extended
def test_a_required_call_validates_whatever_the_model_would_say(client):
    found = chat(client, tool_choice="required", n=8, seed=1, logit_bias={str(EOS): 5}).choices
    names = set()
    for choice in found:
        assert choice.finish_reason == "tool_calls" and choice.message.content is None
        for call in choice.message.tool_calls:
            check(call)
            names.add(call.function.name)
        ids = [call.id for call in choice.message.tool_calls]
        assert len(set(ids)) == len(ids) and (client.several or len(ids) == 1)
    assert len(names) > 1


@pytest.mark.extended
@pytest.mark.parametrize("name", SCHEMAS)
def test_the_named_function_is_called_once(client, name):
    choice = {"type": "function", "function": {"name": name}}
    for each in chat(client, tool_choice=choice, n=3, seed=2).choices:
        [call] = each.message.tool_calls
        check(call)
        assert call.function.name == name and each.finish_reason == "stop"


@pytest.mark.extended
def test_one_call_at_most_where_they_may_not_be_parallel(client):
    fields = {"tool_choice": "required", "n": 6, "logit_bias": {str(EOS): -20}}
    one = chat(client, **fields, parallel_tool_calls=False, seed=3).choices
    assert [len(each.message.tool_calls) for each in one] == [1] * 6
    if client.several:
        more = chat(client, **fields, max_tokens=300, seed=3).choices
        assert max(len(each.message.tool_calls) for each in more) > 1


@pytest.mark.parametrize("count", [1, pytest.param(3, marks=pytest.mark.extended)])
def test_a_stream_has_the_name_first_and_the_arguments_as_they_come(client, count):
    fields = {"tool_choice": "required", "n": count, "seed": 5, "logit_bias": {str(EOS): 8}}
    whole = chat(client, **fields).choices
    parts = [[] for _ in whole]
    for chunk in chat(client, **fields, stream=True):
        [choice] = chunk.choices
        parts[choice.index].append(choice)
    for expected, some in zip(whole, parts, strict=True):
        calls = {}
        assert not "".join(part.delta.content or "" for part in some)
        for call in [call for part in some for call in part.delta.tool_calls or []]:
            if call.index not in calls:
                assert call.id and call.type == "function" and call.function.name
                calls[call.index] = [call.function.name, ""]
            else:
                assert call.id is None and call.function.name is None
            calls[call.index][1] += call.function.arguments
        made = expected.message.tool_calls
        assert list(calls) == [*range(len(made))]
        for call in made:
            check(call)
        assert [*calls.values()] == [[c.function.name, c.function.arguments] for c in made]
        assert some[-1].finish_reason == expected.finish_reason == "tool_calls"
        assert [part.finish_reason for part in some[:-1]] == [None] * (len(some) - 1)
        assert sum(bool(part.delta.tool_calls) for part in some) > 2


def test_a_call_that_is_cut_is_no_whole_one(client):
    for count in (3, 30, 50):
        [found] = chat(client, tool_choice="required", max_tokens=count, seed=1).choices
        assert found.finish_reason == "length"
        assert len(found.message.tool_calls or []) <= 1


# Of calls that nobody forces: what may be said, by the matcher alone.

STRICT = [
    {"type": "function", "function": {"name": "add", "strict": True, "parameters": ADD}},
    {"type": "function", "function": {"name": "any", "parameters": ADD}},
]
RIGHT = '{"name": "add", "arguments": {"a": 7, "how": "now"}}'
WRONG = '{"name": "add", "arguments": {"a": 700, "how": "now"}}'
OTHER = '{"name":"any","arguments":{"x":[]}}'


def tagged(*calls):
    return "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls)


@pytest.mark.parametrize(
    "text, several, whole",
    [
        ("So. <b>", True, True), ("", True, True), ("I <tool_cal", True, True),
        (tagged(RIGHT), True, True), ("So: " + tagged(RIGHT, OTHER), True, True),
        (tagged(RIGHT), False, True), (tagged(RIGHT, OTHER), False, False),
        (tagged(WRONG), True, False), (tagged(OTHER.replace("any", "all")), True, False),
        (tagged(RIGHT) + " and so", True, False), (tagged("{}"), True, False),
    ],
)  # fmt: skip
def test_strict_functions_hold_calls_and_leave_text(text, several, whole):
    given = {"tools": STRICT, "parallel_tool_calls": several}
    for form in (TAGGED, BARE):
        said = text
        if form is BARE:
            said = text.replace("arguments", "parameters").replace("<tool_call>\n", "")
            said = said.replace("\n</tool_call>", "")
            if text.startswith("So: ") or "\n" in said:
                continue  # where there is but one call, and nothing before it
        constraint = read_tools(given).format(form).constraint
        options = SamplingParams(stop=(EOS,))
        matcher = ConstraintCompiler(byte_tokenizer(), 260).matcher(constraint, options, (65,))

        def may(token, matcher=matcher):
            return bool(matcher.bitmask[token // 32] >> (token % 32) & 1)

        taken = all(may(token) and not matcher.advance([token]) for token in said.encode())
        assert (taken and may(EOS)) == whole


@pytest.mark.parametrize(
    "text, whole",
    [
        ('{"how": "now"}', True), ('{"how": "later"}', False), ("So.", False), ("", False),
        ('{"how": "<tool_call>"}', True), (tagged(RIGHT), True), (tagged(RIGHT, OTHER), True),
        (tagged(WRONG), False), ("{}" + tagged(RIGHT), False), ('{"how": "now"} ', False),
    ],
)  # fmt: skip
def test_a_format_is_of_answers_without_calls(text, whole):
    schema = {"type": "object", "properties": {"how": {"enum": ["now", "<tool_call>"]}},
              "additionalProperties": False}  # fmt: skip
    format = TextFormat(Constraint.of_json(schema), "response_format")
    tools = read_tools({"tools": STRICT})
    for form in (TAGGED, BARE):
        said = text
        if form is BARE:
            said = text.replace("arguments", "parameters").replace("<tool_call>\n", "")
            said = said.replace("\n</tool_call>", "")
            if "\n" in said:
                continue  # several calls
        made = tools.format(form, format)
        assert [name for name, _ in made.parts][-1] == "response_format"
        matcher = ConstraintCompiler(byte_tokenizer(), 260).matcher(
            made.constraint, SamplingParams(stop=(EOS,)), (65,)
        )

        def may(token, matcher=matcher):
            return bool(matcher.bitmask[token // 32] >> (token % 32) & 1)

        taken = all(may(token) and not matcher.advance([token]) for token in said.encode()[:-1])
        last = said.encode()[-1:]
        taken = taken and bool(last) and may(last[0]) and matcher.advance(last) in ("", "stop")
        assert (taken and may(EOS)) == whole
        # The whole answer is read: JSON that is no call is text.
        shown, found, _ = read_answer(tools.calls(form, "m", format), said)
        assert (shown == said) == (not found)
        assert not whole or bool(found) == ("name" in said)


def read_answer(calls, said):
    reader = calls.reader()
    shown, _ = reader.feed(said)
    rest, found = reader.close()
    return shown + rest, found, reader.whole


def test_tools_of_the_models_own_choice_are_held_to_nothing():
    plain = read_tools({"tools": STRICT[1:]})
    assert plain.format(TAGGED) is None and not plain.calls(TAGGED, "m").constrained
    assert read_tools({"tools": STRICT, "tool_choice": "none"}).functions == {}
    one = read_tools({"tools": STRICT[1:], "parallel_tool_calls": False})
    assert one.format(BARE) is None and one.format(TAGGED) is not None
