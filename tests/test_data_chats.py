"""Rows of chats: nothing that a row says of its messages is lost without a word."""

import csv
import gzip
import io
import json
import string

import pytest

from hjax.data.dataset import Dataset
from hjax.data.read_options import ReadOptions
from hjax.data.tokenizer import Tokenizer
from hjax.errors import DataError
from hjax.run.inputs import load_inputs
from hjax.settings.config_checks import check_config

USER, ASKED = {"role": "user", "content": "w?"}, {"role": "user", "content": "and?"}
ANSWER = {"role": "assistant", "content": "21"}
CALL = {"type": "function", "function": {"name": "get", "arguments": {"city": "Paris"}}}
CALLED = {"role": "assistant", "content": "", "tool_calls": [CALL]}
RESULT = {"role": "tool", "content": "20 C"}
TOOLS = [{"type": "function", "function": {"name": "get", "description": "d", "parameters": {
    "type": "object", "properties": {"city": {"type": "string"}}}}}]  # fmt: skip


@pytest.fixture
def template(test_data):
    """A tokenizer of characters with a published template, by its name."""

    def made(name):
        tokenizer = Tokenizer.characters(string.printable)
        tokenizer.name = name
        tokenizer.chat_template = (test_data / f"chat_templates/{name}.jinja").read_text()
        return tokenizer

    return made


@pytest.fixture
def read(tmp_path, template):
    def read(*rows, tokenizer="qwen3", learns=True, **options):
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        named = template(tokenizer) if isinstance(tokenizer, str) else tokenizer
        return Dataset.from_file(
            path, named, options=ReadOptions(**options), learns_demonstrations=learns
        )

    return read


def rendered(name, test_data, messages, **variables):
    """The prompt as transformers renders it."""
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    text = (test_data / f"chat_templates/{name}.jinja").read_text()
    variables |= {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"}
    [found], _ = utils.render_jinja_template(
        [messages], chat_template=text, add_generation_prompt=True, **variables
    )
    return found


@pytest.mark.parametrize("name", ["qwen3", "qwen2_5", "llama3_2", "gptoss", "glm4moe"])
def test_tools_and_calls_are_in_the_prompt(name, read, test_data):
    talk = [USER, CALLED | {"content": None}, RESULT, ANSWER]
    dataset = read({"messages": talk, "tools": json.dumps(TOOLS), "level": 3}, tokenizer=name)
    chats = [talk[:1], [USER, CALLED, RESULT]]
    assert dataset.prompt_text == [rendered(name, test_data, x, tools=TOOLS) for x in chats]
    assert dataset.columns["response"] == [[CALLED], "21"] and dataset.columns["level"] == [3, 3]
    assert [chat.tools for chat in dataset.conversations] == [TOOLS, TOOLS]


def test_arguments_as_text_and_the_old_form_of_calls(read):
    text = {"type": "function", "function": {"name": "get", "arguments": '{"city": "Paris"}'}}
    old = {"role": "assistant", "content": None, "function_call": text["function"]}
    rows = [
        {"messages": [USER, CALLED | {"tool_calls": [text]}, RESULT, ANSWER], "tools": TOOLS},
        {"messages": [USER, old, {"role": "function", "name": "get", "content": "20 C"}, ANSWER],
         "functions": [tool["function"] for tool in TOOLS]},
    ]  # fmt: skip
    dataset = read(*rows)
    assert dataset.prompt_text[2:] == dataset.prompt_text[:2]
    assert dataset.columns["response"] == [[CALLED], "21"] * 2


def test_a_rows_template_arguments_win_over_the_configs(read, test_data):
    rows = [{"prompt": [USER]}, {"prompt": [USER], "chat_template_kwargs":
            {"enable_thinking": False}}]  # fmt: skip
    thinking, silent = read(*rows, learns=False).prompt_text
    assert thinking == rendered("qwen3", test_data, [USER], enable_thinking=True)
    assert silent == rendered("qwen3", test_data, [USER], enable_thinking=False) != thinking
    other = rows[1] | {"chat_template_kwargs": '{"enable_thinking": true}'}
    found = read(*rows, other, learns=False, template={"enable_thinking": False})
    assert found.prompt_text == [silent, silent, thinking]


def test_reasoning_is_learned_by_each_of_its_names(read, test_data):
    row = json.loads((test_data / "field/reasoning.jsonl").read_text().splitlines()[0])
    for name in ("qwen3", "gptoss"):
        first, second = read(row, tokenizer=name).columns["response"]
        assert first[0]["reasoning_content"] == first[0]["thinking"] == "because"
        assert second[0]["reasoning_content"] == second[0]["thinking"] == "t"


def test_a_turn_of_weight_0_is_only_context(read):
    bad, good = ANSWER | {"weight": 0, "content": "no"}, ANSWER | {"train": True}
    dataset = read({"messages": [USER, bad, ASKED, good]})
    assert dataset.columns["response"] == ["21"] and "no" in dataset.prompt_text[0]
    with pytest.raises(DataError, match="every turn of the assistant's has the weight 0"):
        read({"messages": [USER, bad]})
    with pytest.raises(DataError, match=r"messages\[1\].weight=0.5: must be 1"):
        read({"messages": [USER, ANSWER | {"weight": 0.5}]})


def test_completions_of_messages(read, test_data, tmp_path):
    lines = (test_data / "field/trl_prompt_completion_msgs.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    dataset = read(*rows)
    asked = [{"role": "user", "content": "q"}]
    assert dataset.prompt_text == [rendered("qwen3", test_data, asked)] * len(rows)
    assert dataset.columns["response"] == ["a"] * len(rows)
    # Of several turns the assistant's are learned, and nobody else's.
    several = {"prompt": [USER], "completion": [CALLED, RESULT, ANSWER], "tools": TOOLS}
    dataset = read(several)
    assert dataset.columns["response"] == [[CALLED], "21"]
    assert dataset.prompt_text[1] == rendered(
        "qwen3", test_data, [USER, CALLED, RESULT], tools=TOOLS
    )
    chat = read({"prompt": "w?", "completion": [ANSWER]}, chat=True, system="be kind")
    assert chat.conversations[0].messages == [{"role": "system", "content": "be kind"}, USER]


def test_a_text_before_an_answer_of_messages_is_the_users(read, test_data):
    """As with pairs and labelled answers: the answer says that the row is a chat."""
    for completion in ([ANSWER], [USER, ANSWER], [ASKED, CALLED, RESULT, USER, ANSWER]):
        dataset = read({"prompt": "w?", "completion": completion})
        asked = [USER] if len(completion) == 1 else completion[:-1]
        assert dataset.prompt_text[-1] == rendered("qwen3", test_data, asked)
        assert dataset.columns["response"][-1] == "21"
    with pytest.raises(DataError, match="'what\\?' is neither the first nor the last message"):
        read({"prompt": "what?", "completion": [USER, ANSWER]})
    with pytest.raises(DataError, match=r"completion holds chat messages, and the prompt is \[1"):
        read({"prompt": [1, 2], "completion": [ANSWER]})


def test_the_system_message_of_the_config_is_for_chats_without_one(read, test_data):
    own = [{"role": "system", "content": "be terse"}, USER]
    found = read({"prompt": [USER]}, {"prompt": own}, learns=False, system="be kind")
    kind = [{"role": "system", "content": "be kind"}, USER]
    assert found.prompt_text == [rendered("qwen3", test_data, x) for x in (kind, own)]


def test_the_nulls_that_arrow_adds_are_not_arguments(read, template, test_data):
    found = Dataset.from_file(test_data / "field/tool_args_union.parquet", template("qwen3"))
    calls = [chat.messages[1]["tool_calls"][0]["function"] for chat in found.conversations]
    assert calls == [{"name": "f", "arguments": {"city": "Paris"}},
                     {"name": "g", "arguments": {"unit": "C"}}]  # fmt: skip
    null = {"role": "assistant", "tool_calls": [{"name": "f", "arguments": {"city": None}}]}
    [prompt] = read({"prompt": [USER, null, RESULT]}, learns=False).prompt_text
    assert '{"name": "f", "arguments": {"city": null}}' in prompt


@pytest.mark.parametrize(
    ("row", "tokenizer", "says"),
    [
        ({"tools": TOOLS}, "phi3", "tools: the chat template of tokenizer phi3 leaves it out"),
        ({"prompt": [USER, CALLED, ASKED]}, "gemma3",
         r"prompt\[1\].tool_calls\[0\].function.name: the chat template"),
        ({"prompt": [USER, CALLED | {"tool_calls": [CALL, CALL]}, RESULT]}, "gptoss",
         r"prompt\[1\].tool_calls\[1\].function.name: the chat template"),
        ({"prompt": [USER, CALLED | {"content": "so"}, RESULT]}, "llama3_1",
         r"prompt\[1\].content: the chat template"),
        ({"prompt": [USER, ANSWER | {"reasoning": "so"}, ASKED]}, "qwen2_5",
         r"prompt\[1\].reasoning_content: the chat template"),
        ({"prompt": [USER | {"name": "Eve"}]}, "qwen3", r"prompt\[0\].name: the chat template"),
        ({"prompt": [USER, RESULT]}, "phi3", r"prompt\[1\].content: the chat template"),
        ({"prompt": [USER, ANSWER]}, "qwen3", r"prompt\[1\] is the assistant's: a prompt ends"),
        ({"prompt": [USER, ANSWER | {"weight": 1}, ASKED]}, "qwen3", "prompt is not learned from"),
        ({"prompt": [USER | {"content": [{"type": "image"}]}]}, "qwen3", "only parts of text"),
        ({"prompt": "w?", "tools": TOOLS}, "qwen3", "the column tools is a chat's"),
        ({"prompt": "w?", "chat_template_kwargs": {"a": 1}}, "qwen3", "data.chat=True makes chats"),
        ({"functions": [{"name": "f"}], "tools": TOOLS}, "qwen3", "functions stands beside tools"),
        ({"tools": ["get"]}, "qwen3", r'tools\[0\]="get": must be .* data.columns=tools=NAME'),
        ({"chat_template_kwargs": {"messages": [1]}}, "qwen3", "chat_template_kwargs.messages"),
        ({"prompt": None, "conversations": [{"from": "human", "value": "a"}]}, "qwen3",
         "data.format=sharegpt"),
        ({"prompt": None, "instruction": "a", "input": "b", "output": "c"}, "qwen3",
         "data.format=alpaca"),
    ],
)  # fmt: skip
def test_what_cannot_be_rendered_is_refused_by_name(row, tokenizer, says, read):
    with pytest.raises(DataError, match=rf"rows.jsonl:1: .*{says}") as caught:
        read({"prompt": [USER]} | row, tokenizer=tokenizer, learns=False)
    assert "\n" not in str(caught.value)


# Alpaca's and ShareGPT's columns


def test_alpacas_input_is_part_of_the_prompt(read, test_data, template):
    path = test_data / "field/alpaca.jsonl"
    found = Dataset.from_file(path, template("qwen3"), options=ReadOptions(format="alpaca"))
    assert found.prompt_text[:2] == ["Add\n0 1", "Add\n1 1"]
    assert found.columns["response"][:2] == ["1", "2"] and found.columns["input"][0] == "0 1"
    found = read({"instruction": "Hi", "input": "", "output": "a"}, format="alpaca")
    assert found.prompt_text == ["Hi"]
    row = {"instruction": "b", "system": "s", "history": [["a", "1"]], "output": "2"}
    [chat] = read(row, format="alpaca").conversations
    assert [m["content"] for m in chat.messages] == ["s", "a", "1", "b"]
    with pytest.raises(DataError, match="an instruction has an input beside it.*format=alpaca"):
        names = {"instruction": "prompt", "output": "response"}
        Dataset.from_file(path, template("qwen3"), options=ReadOptions(columns=names))


def test_sharegpts_turns_are_messages(read, test_data):
    turns = [("system", "s"), ("human", "w?"), ("function_call", json.dumps(CALL["function"])),
             ("observation", "20 C"), ("gpt", "21")]  # fmt: skip
    row = {"conversations": [{"from": x, "value": y} for x, y in turns], "tools": TOOLS}
    dataset = read(row, format="sharegpt")
    system = {"role": "system", "content": "s"}
    assert dataset.columns["response"] == [[CALLED], "21"]
    assert dataset.prompt_text[1] == rendered(
        "qwen3", test_data, [system, USER, CALLED, RESULT], tools=TOOLS
    )
    apart = {"conversations": row["conversations"][1:], "system": "s", "tools": json.dumps(TOOLS)}
    assert read(apart, format="sharegpt").prompt_text == dataset.prompt_text
    pair = {
        "conversations": [{"from": "human", "value": "w?"}],
        "chosen": {"from": "gpt", "value": "a"},
        "rejected": {"from": "gpt", "value": "b"},
    }
    found = read(pair, format="sharegpt")
    assert found.columns["chosen"] == [[{"role": "assistant", "content": "a"}]]
    assert found.prompt_text == [rendered("qwen3", test_data, [USER])]


@pytest.mark.parametrize(
    ("form", "row", "says"),
    [
        ("alpaca", {"prompt": "a"}, "a row needs 'instruction', and this one has prompt"),
        ("alpaca", {"instruction": "a", "prompt": "b"}, "makes a column 'prompt', and this row"),
        ("alpaca", {"instruction": 3}, "instruction=3: must be text"),
        ("alpaca", {"instruction": "a", "history": ["b"]}, r"history\[0\]='b': must be a question"),
        ("sharegpt", {"conversations": "a"}, "conversations='a': must be a list of turns"),
        ("sharegpt", {"conversations": [{"from": "dog", "value": "a"}]}, r"\[0\].from='dog': must"),
        ("sharegpt", {"conversations": [{"from": "gpt", "value": 1}]}, r"\[0\].value=1: must be"),
        ("sharegpt", {"conversations": [{"from": "human", "value": "a", "mood": 1}]}, "mood"),
        ("sharegpt", {"conversations": [{"from": "function_call", "value": "f("}]}, "JSON text"),
        ("sharegpt", {"conversations": [{"from": "system", "value": "a"}], "system": "b"},
         "system='b': the conversation begins with another"),
    ],
)  # fmt: skip
def test_columns_of_another_format_are_checked(form, row, says, read):
    with pytest.raises(DataError, match=rf"rows.jsonl:1: .*{says}"):
        read(row, format=form)


# Files

ROWS = [{"prompt": "a", "answer": "x"}, {"prompt": 'b, "c"\nd', "answer": None}]


def as_csv():
    text = io.StringIO()
    table = csv.writer(text)
    table.writerows([["prompt", "answer"], *([row["prompt"], row["answer"]] for row in ROWS)])
    return text.getvalue().encode()


LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
CONTENT = {".jsonl": LINES, ".json": json.dumps(ROWS, indent=1).encode(), ".csv": as_csv()}


@pytest.mark.parametrize("kind", CONTENT)
@pytest.mark.parametrize("packed", ["", ".gz", ".zst"])
def test_kinds_of_files(kind, packed, tmp_path, monkeypatch):
    path, content = tmp_path / f"rows{kind}{packed}", CONTENT[kind]
    if packed == ".gz":
        content = gzip.compress(content)
    elif packed:
        path.write_bytes(b"")
        with monkeypatch.context() as patched:
            patched.setitem(__import__("sys").modules, "zstandard", None)
            with pytest.raises(DataError, match=r"zst is read with .*pip install zstandard"):
                Dataset.from_file(path)
        content = pytest.importorskip("zstandard").compress(content)
    path.write_bytes(content)
    tokenizer = Tokenizer.characters(string.printable)
    for source in (path, tmp_path):
        found = Dataset.from_file(source, tokenizer)
        assert found.columns == {"prompt": ["a", 'b, "c"\nd'], "answer": ["x", None]}
    if packed:
        path.write_bytes(content[:-9])
        with pytest.raises(DataError, match=f"rows{kind}{packed}: not readable as {packed}"):
            Dataset.from_file(path, tokenizer)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.json", b'[{"prompt": "a"}, 3]', "a.json: row 2: a JSON object is needed, found 3"),
        ("a.json", b'[{"prompt": "a"}', "a.json: not valid JSON"),
        ("a.json", b'{"prompt": "a"}\n{"prompt": "b\\ud83d"}', "a.json:2: .* half of a surrogate"),
        ("a.json", b'[{"prompt": "b\\ud83d"}]', "a.json: row 1: .* half of a surrogate"),
        ("a.csv", b"prompt,answer\na,b\nc\n", "a.csv: row 2: 1 cells under 2 column names"),
        ("a.csv", b"prompt,prompt\na,b\n", r"a.csv: the first row names .*\['prompt', 'prompt'\]"),
        ("a.csv", b"prompt,\na,b\n", "a.csv: the first row names"),
        ("a.csv", b'prompt\n"a" b\n', "a.csv:2: not readable as .csv"),
        ("a.csv", b"prompt\n\xff\n", "a.csv: not UTF-8"),
        ("a.csv", b"prompt,answer\n,b\n", "a.csv: row 1: there is no prompt"),
        ("a.csv", b"", "a.csv: the dataset is empty"),
        ("a.csv.gz", b"prompt\na\n", "a.csv.gz: not readable as .gz"),
        ("a.parquet.gz", b"", "a.parquet.gz: its name must end in"),
    ],
)
def test_what_is_wrong_with_a_file_is_one_line(name, content, says, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=says) as caught:
        Dataset.from_file(tmp_path / name, Tokenizer.characters("abc"))
    assert "\n" not in str(caught.value)


def test_the_reasoning_and_the_calls_of_turns_are_learned(tmp_path, template):
    """By the tokens that a run's demonstrations hold."""
    template("qwen3").save(tmp_path / "tokenizer")
    row = {"messages": [USER, CALLED | {"reasoning": "so"}, RESULT, ANSWER], "tools": TOOLS}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    keys = {
        "algorithm.name": "SFT", "data.path": str(tmp_path / "rows.jsonl"), "data.task": "",
        "eval.every": 0, "tokenizer.path": str(tmp_path / "tokenizer"), "reward.function": "",
        "rollout.max_response_length": 200,
    }  # fmt: skip
    inputs = load_inputs(check_config(keys), "demonstrations")
    tokenizer = Tokenizer.load(tmp_path / "tokenizer")
    called, answered = (tokenizer.decode(x) for _, x in inputs.demonstrations)
    call = '<tool_call>\n{"name": "get", "arguments": {"city": "Paris"}}\n</tool_call>'
    assert called.startswith(f"<think>\nso\n</think>\n\n{call}") and "21" in answered
