"""Tools in conversations: definitions, calls, errors, and the environment that runs them."""

import dataclasses
import json

import pytest
from serving_double import byte_tokenizer
from test_template_continuation import with_template

from hjax.data.dataset import Dataset
from hjax.data.read_options import ReadOptions
from hjax.data.tokenizer import Tokenizer
from hjax.data.tool_call_forms import BARE, IN_TAGS, TAGGED, split_calls
from hjax.environments.episode import DrawnTurn, Episode, EpisodeLimits, EpisodePlayer
from hjax.environments.episode_pool import EpisodePool
from hjax.environments.episode_text import ObservationEncoder
from hjax.environments.tool_environment import (
    TOOL_ENVIRONMENT,
    ToolEnvironment,
    settings_of_row,
    tool_definitions,
    tool_options,
    tools_of_row,
)
from hjax.environments.tools import RESULT_LIMIT, EpisodeTools, load_tools
from hjax.errors import ConfigError, DataError, RunError
from hjax.serving.tool_calls import AllowedCalls

FILE = '''
from __future__ import annotations
from typing import Literal
from hjax.errors import RunError

def zip_code(street: str, title: float = 1.5, kinds: list[str] | None = None):
    """Finds a zip code.

    By hand.

    Args:
      street: where it is,
        with the number: such as 1.
      kinds (list): of codes.

    Returns:
      the code: a number.
    """
    return {"street": street, "é": title, "kinds": kinds}

def add(a: int, b: Literal[1, 2] = 2) -> int:
    """Adds."""
    if a < 0:
        raise ValueError("a is below 0")
    if a > 99:
        raise RunError("the adder is gone")
    return a + b

class Counter:
    """Counts."""

    name = "count"
    closed = []

    def __init__(self, seed):
        self.value = seed

    def __call__(self, by: int) -> str:
        self.value += by
        return str(self.value)

    def close(self):
        Counter.closed.append(self.value)

class Plain:
    """Says a."""
    def __call__(self) -> str:
        return "a" * 9000

class Meets:
    """Waits for another call."""
    name = "meet"
    closed = []
    def __init__(self):
        import asyncio
        self.barrier, self.begun = asyncio.Barrier(2), 0

    async def __call__(self, who: str) -> dict:
        self.begun += 1
        if who == "nobody":
            raise RunError("the door is shut")
        assert who != "alone", "alone"
        await self.barrier.wait()
        return {who: self.begun}

    async def close(self):
        Meets.closed.append(self.begun)

def no_type(a) -> int:
    """A."""

def no_docstring(a: int) -> int:
    return a

def many(*args: int) -> int:
    """A."""

class NotCalled:
    """A."""

def unknown(a: "Nothing") -> int:
    """A."""
number = 3
'''


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "my_tools.py"
    path.write_text(FILE)
    return path


def test_definitions_are_those_of_signature_and_docstring(file):
    found = load_tools(f"{file}:zip_code,add,Counter,Plain")
    assert [tool.definition["type"] for tool in found] == ["function"] * 4
    assert found[0].definition["function"] == {
        "name": "zip_code",
        "description": "Finds a zip code. By hand.",
        "parameters": {
            "type": "object",
            "properties": {
                "street": {
                    "type": "string",
                    "description": "where it is, with the number: such as 1.",
                },
                "title": {"type": "number", "default": 1.5},
                "kinds": {
                    "anyOf": [{"type": "array", "items": {"type": "string"}}, {"type": "null"}],
                    "default": None,
                    "description": "of codes.",
                },
            },
            "required": ["street"],
            "additionalProperties": False,
        },
    }
    assert [tool.name for tool in found[1:]] == ["add", "count", "Plain"]
    assert found[2].parameters["properties"] == {"by": {"type": "integer"}}
    assert found[3].parameters["properties"] == {}


def test_calls_results_and_errors(file):
    tools = EpisodeTools(load_tools(f"{file}:zip_code,add,Counter,Plain"), seed=7)
    street = {"street": "a", "é": 1.5, "kinds": ["b"]}
    result, valid = tools.call("zip_code", {"street": "a", "kinds": ["b"]})
    assert (json.loads(result), valid) == (street, True) and '"é"' in result
    assert tools.call("add", {"a": 1}) == ("3", True)
    assert tools.call("add", {"a": -1}) == ("error: ValueError: a is below 0", True)
    for arguments, says in (
        ({"a": "x"}, "error: add: a: Input should be a valid integer"),
        ({"a": 1, "b": 3}, "error: add: b: Input should be 1 or 2"),
        ({"b": 1}, "error: add: a: Missing"),
        ({"a": 1, "c": 1}, "error: add: c: Unexpected keyword argument"),
    ):
        text, valid = tools.call("add", arguments)
        assert text.startswith(says) and not valid
    text, valid = tools.call("ad", {})
    assert not valid and text.startswith("error: there is no tool ad; there are zip_code, add, c")
    assert tools.call("count", {"by": 2}) == ("9", True)
    assert tools.call("count", {"by": "3"}) == ("12", True)
    assert not tools.call("count", {"of": 3})[1]
    text, valid = tools.call("Plain", {})
    assert valid and text == "a" * RESULT_LIMIT + f"... ({9000 - RESULT_LIMIT} more characters)"
    with pytest.raises(RunError, match="the adder is gone"):
        tools.call("add", {"a": 100})
    tools.close()
    tools.close()
    assert tools._tools["count"].make(seed=0, sandbox=None).closed == [12]


def test_calls_of_async_tools_run_at_once_and_others_in_order(file):
    """Each of two waits for the other; what stands between them is run between them."""
    tools = EpisodeTools(load_tools(f"{file}:Meets,Counter"), seed=7)
    meet, count = ("meet", {"who": "a"}), ("count", {"by": 1})
    assert tools.call_all([count, meet, ("meet", {"who": "b"}), count]) == [
        ("8", True), ('{"a": 2}', True), ('{"b": 2}', True), ("9", True),
    ]  # fmt: skip
    wrong = [("meet", {"who": 1}), ("meet", {"who": "alone"}), ("met", {})]
    (first, is_first), second, (third, is_third) = tools.call_all(wrong)
    assert first.startswith("error: meet: who: Input should be a valid string") and not is_first
    assert second == ("error: AssertionError: alone", True)
    assert third.startswith("error: there is no tool met") and not is_third
    with pytest.raises(RunError, match="the door is shut"):
        tools.call("meet", {"who": "nobody"})
    made = tools._made["meet"]
    tools.close()
    assert made.closed == [4] and "_loop" not in vars(tools)


@pytest.mark.parametrize("names, says", [
    ("no_type", "no_type: the argument a has no type; annotate it"),
    ("no_docstring", "no_docstring has no docstring, which tells the model what it does"),
    ("many", r"many: \*args: .*has no name of its own"),
    ("NotCalled", "NotCalled is a class without __call__"),
    ("unknown", "unknown: no JSON schema of its arguments"),
    ("number", "number is 3, no function or class"),
    ("ad", "did you mean add"),
    ("add,add", "two tools are called add"),
    ("add,", "'' must look like path.py:name, or be one of hjax's: python"),
])  # fmt: skip
def test_what_is_no_tool(names, says, file):
    with pytest.raises(ConfigError, match=says) as caught:
        load_tools(f"{file}:{names}")
    assert "environment.tools=" in str(caught.value) and "\n" not in str(caught.value)


def test_a_name_without_a_file():
    assert [tool.name for tool in load_tools("python")] == ["python"]
    with pytest.raises(ConfigError, match="'add' must look like path.py:name"):
        load_tools("add")


CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


@pytest.mark.parametrize("form, text", [
    (TAGGED, "hello"), (TAGGED, CALL), (TAGGED, f"<think>I</think>\n{CALL}\n{CALL}\n"),
    (TAGGED, f"{CALL} and more"), (TAGGED, '<tool_call>{"name": 3}</tool_call>'),
    (TAGGED, "<tool_call>"), (TAGGED, "a < b <tool"), (TAGGED, ""), (TAGGED, CALL[:-3]),
    (BARE, '{"name": "add", "parameters": {"a": 1}}'), (BARE, ' {"name": "add"}'), (BARE, '{"a'),
    (BARE, "7"), (BARE, '[{"name": "add", "parameters": {}}]'),
])  # fmt: skip
def test_calls_are_those_that_the_server_reads(form, text):
    shown, calls, is_malformed = split_calls(text, form, {})
    reader = AllowedCalls(form, ("add",)).reader()
    streamed = "".join(reader.feed(c)[0] for c in text)
    rest, expected = reader.close()
    assert [(c.name, c.arguments) for c in calls] == [(c.name, c.arguments) for c in expected]
    assert shown == streamed + rest
    assert is_malformed == (form is TAGGED and "<tool_call>" in text and not expected)


def test_calls_in_tags_are_the_templates_own(test_data):
    """Values of every kind, as a published template writes them, are what they were."""
    tokenizer = with_template("qwen3_6", test_data)
    arguments = {"text": 'a "b"\n<c> é', "number": "12", "count": 3, "share": 0.5, "on": True,
                 "list": [1, "x"], "object": {"a": None}, "either": "7", "kind": "1"}  # fmt: skip
    kinds = {"count": "integer", "share": "number", "on": "boolean", "list": "array",
             "object": "object"}  # fmt: skip
    properties = {name: {"type": kinds.get(name, "string")} for name in arguments}
    properties["either"] = {"anyOf": [{"type": "string"}, {"type": "null"}]}
    properties["kind"] = {"enum": ["1", "2"]}
    function = {"name": "f", "arguments": arguments}
    other = {"name": "g", "arguments": {}}
    turn = {"role": "assistant", "content": "", "tool_calls": [
        {"type": "function", "function": each} for each in (function, other)]}  # fmt: skip
    question = {"role": "user", "content": "q"}
    asked = tokenizer.chat([question], True)
    said, _ = tokenizer.turn_ends.cut(tokenizer.chat([question, turn], False)[len(asked) :])
    said = said.removesuffix("<|im_end|>")
    text, calls, malformed = split_calls(said, IN_TAGS, {"f": {"properties": properties}})
    assert [(c.name, json.loads(c.arguments)) for c in calls] == [("f", arguments), ("g", {})]
    assert not malformed and text.strip() == "</think>"
    for cut in ("</parameter>", "</function>", "</tool_call>", "<function=f>"):
        assert split_calls(said.replace(cut, "", 1), IN_TAGS, {})[1:] == ((), True)


def environment(file, names="zip_code,add,Counter"):
    return ToolEnvironment(f"{file}:{names}", dataclasses.asdict(TAGGED))


def said(name, **arguments):
    call = {"name": name, "arguments": arguments}
    return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"


def test_a_conversation_by_hand(file):
    playing = environment(file)
    row = {"prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]}
    first = playing.reset(row, 3)
    assert list(first.messages) == row["prompt"] and first.text == "system: s\nuser: q"
    assert [tool["function"]["name"] for tool in first.tools] == ["zip_code", "add", "count"]
    step = playing.step("I <b>\n" + said("count", by=1) + "\n" + said("sub", a=1))
    turn, one, two = step.observation.messages
    assert (step.reward, step.done, step.valid) == (0.0, False, False)
    assert step.metrics == {"tool_calls": 2.0, "tool_errors": 1.0}
    assert turn["content"] == "I <b>\n"
    assert [c["function"] for c in turn["tool_calls"]] == [
        {"name": "count", "arguments": {"by": 1}}, {"name": "sub", "arguments": {"a": 1}},
    ]  # fmt: skip
    assert one == {"role": "tool", "content": "4", "name": "count", "tool_call_id": "call00100"}
    assert two["content"].startswith("error: there is no tool sub") and two["name"] == "sub"
    assert step.observation.text == one["content"] + "\n" + two["content"]
    step = playing.step('<tool_call>{"name": </tool_call>')
    assert not step.valid and step.observation.messages[0]["role"] == "user"
    step = playing.step(said("count", by=1))
    assert step.observation.messages[1]["content"] == "5" and step.valid
    step = playing.step("It is 5.")
    assert step.done and step.valid and step.metrics["tool_calls"] == 0
    playing.close()


def test_a_row_has_its_own_tools(file):
    tools = load_tools(f"{file}:zip_code,add")
    own = {"type": "function", "function": {"name": "add", "description": "Of the row."}}
    for given in ([own], json.dumps([own])):
        found, definitions = tools_of_row(tools, {"tools": given})
        assert [tool.name for tool in found] == ["add"] and definitions == [own]
    assert [tool.name for tool in tools_of_row(tools, {"tools": None})[0]] == ["zip_code", "add"]
    for change, says in (
        ({"name": "sub"}, "the row has 'sub', and environment.tools has zip_code, add"),
        ({"parameters": {"properties": {"a": {}, "x": {}}}}, "the argument 'x', which the func"),
    ):
        function = own["function"] | change
        with pytest.raises(DataError, match=says):
            tools_of_row(tools, {"tools": [own | {"function": function}]})


def test_classes_are_made_with_what_rows_give_them(tmp_path):
    path = tmp_path / "board.py"
    path.write_text(
        'class Board:\n    """Shows."""\n    name = "board"\n'
        "    def __init__(self, cells, size=3, seed=0):\n        self.all = cells, size, seed\n"
        "    def __call__(self) -> str:\n        return repr(self.all)\n"
        'def plain() -> str:\n    """Plain."""\n    return "p"\n'
    )
    # As verl writes them into parquet files, where every tool has the keys of all.
    groups = {"create_kwargs": {"cells": "ab", "size": None}, "execute_kwargs": None}
    row = {"prompt": "q", "extra_info": {"tools_kwargs": {"board": groups, "plain": None}}}
    playing = ToolEnvironment(f"{path}:Board,plain", dataclasses.asdict(TAGGED))
    playing.reset(row, 5)
    step = playing.step(said("board") + said("plain"))
    assert [m["content"] for m in step.observation.messages[1:]] == ["('ab', 3, 5)", "p"]
    playing.reset({"prompt": "q", "tools_kwargs": {"board": {"create_kwargs": {"cells": 1}}}}, 6)
    assert "(1, 3, 6)" in playing.step(said("board")).observation.text
    tools = load_tools(f"{path}:Board,plain")
    for given, says in (
        ({"bord": {"create_kwargs": {"cells": 1}}}, "'bord' is no tool of the row: board, plain"),
        ({"board": {"release_kwargs": {"a": 1}}}, "board.release_kwargs is not read here"),
        ({"board": {"create_kwargs": {"seed": 1}}}, "has 'seed'; .* takes cells, size"),
        ({"plain": {"create_kwargs": {"x": 1}}}, "has 'x'; .*it takes nothing"),
    ):
        with pytest.raises(DataError, match=says):
            settings_of_row(tools, {"tools_kwargs": given})


@pytest.mark.parametrize("name, says", [
    ("gemma3", "refuses tools"), ("lfm2", "loses calls"), ("llama3", "loses calls"),
    ("gptoss", "does not say how"),
    ("mistral_small", "does not say how"),
])  # fmt: skip
def test_templates_without_usable_calls(name, says, file, test_data):
    with pytest.raises(ConfigError, match=f"--tools: the chat template of tokenizer .*{says}"):
        tool_definitions(f"{file}:add", with_template(name, test_data), "--tools")


def test_tags_that_decoding_leaves_out_are_refused(file, test_data):
    tokenizer = with_template("qwen2_5", test_data)
    tokenizer._library.add_special_tokens(["<tool_call>", "</tool_call>"])
    again = Tokenizer(tokenizer._library, tokenizer._config, name="tags",
                      chat_templates={"default": tokenizer.chat_template})  # fmt: skip
    with pytest.raises(ConfigError, match="<tool_call> is a special token of tokenizer tags"):
        tool_definitions(f"{file}:add", again)


def test_without_a_template(file):
    with pytest.raises(ConfigError, match="tools are of chats: .*has no chat template"):
        tool_definitions(f"{file}:add", byte_tokenizer(None))
    with pytest.raises(ConfigError, match="there is no tokenizer"):
        tool_definitions(f"{file}:add", None)


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3", "llama3_1"])
def test_played_by_a_script(name, file, test_data, tmp_path):
    """Rows of a file, the prompts that they are tokenised to, and the ids of a whole episode."""
    tokenizer = with_template(name, test_data)
    encoder = ObservationEncoder(tokenizer, chat=True)
    options = tool_options(f"{file}:add,Counter", encoder)
    definitions = tool_definitions(f"{file}:add,Counter", tokenizer)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+2?", "answer": 3}\n')
    read = ReadOptions(chat=True, tools=definitions)
    data = Dataset.from_file(tmp_path / "rows.jsonl", tokenizer, options=read)
    key = "parameters" if name == "llama3_1" else "arguments"
    call = json.dumps({"name": "add", key: {"a": 1}})
    call = call if name == "llama3_1" else f"<tool_call>\n{call}\n</tool_call>"
    end = tokenizer.eos_ids[0]
    turns = [tokenizer.encode(text, add_special=False) + [end] for text in (call, "3")]
    seen = []

    def script(requests):
        seen.extend([*request.prompt, *request.response] for request in requests)
        drawn = turns[len(seen) - 1]
        return [DrawnTurn(drawn, {"logprobs": [0.0] * len(drawn)}, True)]

    episode = Episode(0, 0, {"prompt": "1+2?", "answer": 3}, 0)
    limits = EpisodeLimits(4, 0, 4096, 4096)
    with EpisodePool(TOOL_ENVIRONMENT, options) as pool:
        EpisodePlayer(pool, encoder, limits, script).play([episode])
    assert episode.stop_reason == "done", episode.fault
    assert [turn.text for turn in episode.turns] == [call, "3"]
    assert episode.turns[0].observed == "3" and episode.turns[0].metrics["tool_calls"] == 1
    assert seen[0] == data.prompt_tokens[0]
    between = tokenizer.decode(seen[1][len(seen[0]) + len(turns[0]) :], skip_special=False)
    function = {"name": "add", "arguments": {"a": 1}}
    talk = [
        {"role": "user", "content": "1+2?"},
        {"role": "assistant", "content": "", "tool_calls": [
            {"id": "call00100", "type": "function", "function": function}]},
        {"role": "tool", "name": "add", "tool_call_id": "call00100", "content": "3"},
    ]  # fmt: skip
    assert tokenizer.chat(talk, True, tools=definitions).endswith(between) and "3" in between
