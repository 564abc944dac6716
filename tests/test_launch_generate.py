"""`python -m hjax.launch.generate`: prompts in, responses out; a chat in a terminal."""

import contextlib
import io
import json
import os
import re
import subprocess
import sys
import types

import pytest
from helpers import models_loaded_once, save_model

import hjax
from hjax.data.tokenizer import Tokenizer
from hjax.launch import generate
from hjax.launch.generate import Chat
from hjax.rollout.language_model import Completion

TOKENIZER = Tokenizer.characters("0123456789+=>")
TEMPLATE = (
    "{% for m in messages %}{{ m.content }}{{ '>' if m.role == 'user' else '=' }}{% endfor %}"
)


@pytest.fixture(scope="module", autouse=True)
def loaded_once():
    with models_loaded_once():
        yield


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """The same weights with a tokenizer, with a chat template too, and with neither."""
    folder = tmp_path_factory.mktemp("models")
    for name in ("text", "chat", "ids"):
        save_model(folder / name, tokenizer=None if name == "ids" else TOKENIZER)
    (folder / "chat" / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def said(capsys, *flags):
    """The JSON that the command says last."""
    assert generate.main([*flags, "--json"]) == 0
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def fields(completion):
    return {name: getattr(completion, name) for name in generate.FIELDS}


@pytest.mark.extended
def test_a_prompt_is_answered_as_the_model_answers_it(models, capsys):
    flags = ["--max_new_tokens=6", "--temperature=0.7", "--top_k=5", "--top_p=0.9", "--seed=3",
             "--min_p=0.05", "--repetition_penalty=1.2", "--frequency_penalty=-0.5",
             "--presence_penalty=0.5", "--logit_bias=4:-100,6:1.5", "--min_tokens=2"]
    options = {"top_k": 5, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.2,
               "frequency_penalty": -0.5, "presence_penalty": 0.5,
               "logit_bias": {4: -100, 6: 1.5}, "min_tokens": 2}  # fmt: skip
    found = said(capsys, f"--model={models}/text", "--prompt=1+2=", *flags, "--stop=7")
    model = hjax.load_model(models / "text")
    stop = TOKENIZER.encode("7", add_special=False)
    [expected] = model.generate(["1+2="], 6, 0.7, 3, stop=stop, **options)
    assert found["completions"] == [{"prompt": "1+2="} | fields(expected)]
    assert found["temperature"] == 0.7 and found["seed"] == 3 and found["max_new_tokens"] == 6


@pytest.mark.extended
def test_responses_are_held_to_a_format(models, capsys, tmp_path, monkeypatch):
    model = hjax.load_model(models / "text")  # whose programs are compiled once for all formats
    monkeypatch.setattr(generate.ModelInfo, "load", lambda *_: model)
    schema = {"type": "integer", "minimum": 20, "maximum": 29}
    (tmp_path / "s.json").write_text(json.dumps(schema))
    (tmp_path / "g.lark").write_text('start: "1" start | "1" "2"? end\nend: "3" end | "3"')
    (tmp_path / "p.txt").write_text("1+\n" * 5)
    flags = f"--model={models}/text", f"--prompts={tmp_path}/p.txt", "--max_new_tokens=9"
    for asked, pattern in [
        ("--regex=[1-5]{3}(=[6-9]{2})?", "[1-5]{3}(=[6-9]{2})?"),
        (f"--json_schema={tmp_path}/s.json", "2[0-9]"),
        (f"--grammar={tmp_path}/g.lark", "1+2?3+"),
        ("--choice=12 --choice=3+4=7", "12|3[+]4=7"),
    ]:
        found = said(capsys, *flags, *asked.split(), "--batch=3")["completions"]
        assert all(re.fullmatch(pattern, row["text"]) for row in found)
        assert [row["finish_reason"] for row in found] == ["stop"] * 5


def test_rows_of_a_file_come_back_with_their_other_keys(models, capsys, tmp_path):
    rows = [{"prompt": "1+2=", "id": "a"}, {"prompt": [1, 5, 6]}, {"prompt_tokens": [4], "id": 7}]
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, rows)))
    flags = f"--model={models}/text", f"--prompts={tmp_path}/p.jsonl", "--max_new_tokens=4"
    found = said(capsys, *flags)["completions"]
    model = hjax.load_model(models / "text")
    expected = model.generate(["1+2=", [1, 5, 6], [4]], max_new_tokens=4)
    assert [{k: row[k] for k in generate.FIELDS} for row in found] == list(map(fields, expected))
    assert [row["prompt"] for row in found] == ["1+2=", [1, 5, 6], None]
    assert [row["id"] for row in found] == ["a", None, 7] and found[2]["prompt_tokens"] == [4]


@pytest.mark.extended
def test_batches_draw_each_their_own(models, capsys, tmp_path):
    (tmp_path / "p.txt").write_text("1+\n" * 5)
    flags = f"--model={models}/text", f"--prompts={tmp_path}/p.txt", "--max_new_tokens=8"
    found = [row["tokens"] for row in said(capsys, *flags, "--batch=2")["completions"]]
    assert found == [row["tokens"] for row in said(capsys, *flags, "--batch=2")["completions"]]
    assert len(set(map(tuple, found))) == 5  # not the first call's draws again
    first = hjax.load_model(models / "text").generate(["1+", "1+"], max_new_tokens=8)
    assert found[:2] == [completion.tokens for completion in first]
    whole = [row["tokens"] for row in said(capsys, *flags)["completions"]]
    assert whole[:2] == found[:2]
    greedy = said(capsys, *flags, "--batch=2", "--temperature=0")["completions"]
    assert len({tuple(row["tokens"]) for row in greedy}) == 1


@pytest.mark.extended
def test_a_model_without_tokenizer_takes_ids_alone(models, capsys):
    flags = f"--model={models}/ids", "--max_new_tokens=4", "--temperature=0"
    [found] = said(capsys, *flags, "--prompt=1, 4,5", "--stop=2")["completions"]
    [expected] = hjax.load_model(models / "ids").generate([[1, 4, 5]], 4, 0.0, stop=[2])
    assert found["tokens"] == expected.tokens and found["text"] is None
    assert generate.main([*flags, "--prompt=1 4 5"]) == 0
    shown = capsys.readouterr().out
    assert f"1 4 5 → {' '.join(map(str, found['tokens']))}\n[4 tokens, cut" in shown


class Screen(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.extended
def test_a_bar_on_a_terminal_where_there_are_several_batches(models, monkeypatch, tmp_path):
    monkeypatch.setenv("TERM", "xterm")
    (tmp_path / "p.txt").write_text("1+\n" * 5)
    flags = [f"--model={models}/text", f"--prompts={tmp_path}/p.txt", "--max_new_tokens=2"]
    shown = {}
    for batch in ("2", "5"):
        monkeypatch.setattr(sys, "stderr", Screen())
        assert generate.main([*flags, f"--batch={batch}"]) == 0
        shown[batch] = sys.stderr.getvalue()
    assert "generating" in shown["2"] and "5/5" in shown["2"] and "generating" not in shown["5"]


def test_the_chat_template_makes_the_prompt(models, capsys):
    flags = ["--prompt=12", "--max_new_tokens=4", "--temperature=0"]
    [found] = said(capsys, f"--model={models}/chat", *flags, "--chat")["completions"]
    ids = TOKENIZER.encode("12>", add_special=False)  # no BOS beside the template's own tokens
    [expected] = hjax.load_model(models / "chat").generate([ids], 4, 0.0)
    assert found == {"prompt": "12"} | fields(expected)


def test_a_response_may_have_what_the_positions_leave(models, capsys):
    found = said(capsys, f"--model={models}/text", "--prompt=12345", "--temperature=0")
    assert found["max_new_tokens"] == 64 - 6  # BOS and five digits


def test_blocks_for_a_person(models, capsys, tmp_path):
    (tmp_path / "p.txt").write_text("1+2=\n3+4=\n")
    flags = f"--model={models}/text", f"--prompts={tmp_path}/p.txt", "--max_new_tokens=3"
    assert generate.main([*flags, "--temperature=0"]) == 0
    shown = capsys.readouterr().out
    first, second = hjax.load_model(models / "text").generate(["1+2=", "3+4="], 3, 0.0)
    assert f"1 of 2\n1+2={first.text}\n[{len(first.tokens)} tokens" in shown
    assert f"\n\n2 of 2\n3+4={second.text}\n" in shown


class Echo:
    """Stands for a model: remembers its prompts, and answers 1, 2, 3, ..."""

    def __init__(self, template=None):
        self.tokenizer = Tokenizer.characters("0123456789+=>")
        self.tokenizer.chat_template = template
        self.config = types.SimpleNamespace(max_length=12)
        self.asked, self.seeds, self.limits = [], [], []

    def stream(self, prompt, seed, max_new_tokens):
        text = self.tokenizer.decode(prompt)
        if text == "99":
            raise hjax.errors.ConfigError("not this")
        self.asked.append(text)
        self.seeds.append(seed)
        self.limits.append(max_new_tokens)
        text = str(len(self.asked))
        return iter([Completion([5], text, [0.0], ""), Completion([], "", [], "stop")])


def type_lines(monkeypatch, *lines):
    left = iter(lines)

    def typed(prompt):
        line = next(left, None)
        if line is None:
            raise EOFError
        if isinstance(line, BaseException):
            raise line
        return line

    monkeypatch.setattr("builtins.input", typed)


def test_a_chat_goes_on_until_it_begins_anew(monkeypatch, capsys):
    type_lines(monkeypatch, "10", "", "20", "/new", "30")
    model = Echo(TEMPLATE)
    assert Chat(model, 5, 6, {}).run() == 0
    assert model.asked == ["10>", "10>1=20>", "30>"]
    assert model.limits == [6, 4, 6]  # of 12 positions, after 3, 8 and 3 tokens
    assert model.seeds[0] == 5 and len(set(model.seeds)) == 3
    assert "\n2\n[1 token]\n" in capsys.readouterr().out


def test_without_a_template_every_line_stands_alone(monkeypatch, capsys):
    type_lines(monkeypatch, "10", "99", "20", "/exit", "30")
    model = Echo()
    assert Chat(model, 0, 6, {}).run() == 0
    assert model.asked == ["10", "20"] and "not this\n" in capsys.readouterr().out


class Terminal:
    def isatty(self):
        return True


@pytest.mark.extended
def test_without_prompts_a_terminal_is_a_chat(models, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", Terminal())
    type_lines(monkeypatch, "12", "34")
    flags = [f"--model={models}/chat", "--max_new_tokens=2", "--temperature=0"]
    assert generate.main(flags) == 0
    [expected] = hjax.load_model(models / "chat").generate(
        [TOKENIZER.encode("12>", add_special=False)], 2, 0.0
    )
    assert f"{expected.text}\n[2 tokens, cut at the length limit]" in capsys.readouterr().out
    type_lines(monkeypatch, KeyboardInterrupt())
    assert generate.main(flags) == 130
    assert capsys.readouterr().err == "\nhjax: stopped by SIGINT\n"


@pytest.mark.extended
def test_token_ids_in_a_chat(models, monkeypatch, capsys):
    type_lines(monkeypatch, "1,4,5", "what?", "1 99")
    model = hjax.load_model(models / "ids")
    assert Chat(model, 0, 2, {"temperature": 0.0}).run() == 0
    shown = capsys.readouterr().out
    [expected] = model.generate([[1, 4, 5]], 2, 0.0)
    assert " ".join(map(str, expected.tokens)) in shown
    assert "'what?': this model has no tokenizer; give token ids" in shown
    assert "'1 99': this model has no tokenizer; give token ids, as 3,4,5, each 0 to 15" in shown


def test_what_steers_a_terminal_is_left_out(capsys):
    from hjax.show.answers import print_piece
    from hjax.show.tables import wide_console

    print_piece(wide_console(), "a\x1b[2J\nb\tc\r[red]" + "d" * 200)
    assert capsys.readouterr().out == "a·[2J\nb       c·[red]" + "d" * 200


FILES = {
    "none.txt": "\n",
    "broken.jsonl": '{"prompt": "1"}\n{"prompt": ',
    "text.jsonl": '{"prompt": "1"}\n{"n": 1}\n',
    "hidden.jsonl": '{"prompt": "1", "tokens": [1]}\n',
    "long.txt": "1\n" + "1" * 64 + "\n",
    "letters.txt": "1\nabc\n",
    "table.csv": "1\n",
}
TEXT = "--model=text"
WRONG = {
    "no model": (["--prompt=1"], "--model is missing"),
    "another model": (["--model=nowhere", "--prompt=1"], "no model directory 'nowhere'"),
    "a flag": ([TEXT, "--promt=1"], "Unknown command line flag 'promt'"),
    "an argument": ([TEXT, "1+2="], "unexpected argument '1+2='"),
    "both": ([TEXT, "--prompt=1", "--prompts=none.txt"], "--prompt and --prompts: give one"),
    "nothing": ([TEXT], "--prompt=TEXT or --prompts=FILE is missing, and a chat needs a terminal"),
    "json of a chat": ([TEXT, "--json"], "--json needs --prompt=TEXT or --prompts=FILE"),
    "no file": ([TEXT, "--prompts=no.txt"], "--prompts=no.txt: there is no such file"),
    "a table": ([TEXT, "--prompts=table.csv"], "table.csv: its name must end in .txt or .jsonl"),
    "empty": ([TEXT, "--prompts=none.txt"], "none.txt: the dataset is empty"),
    "broken": ([TEXT, "--prompts=broken.jsonl"], "broken.jsonl:2: not valid JSON"),
    "no prompt": ([TEXT, "--prompts=text.jsonl"], "text.jsonl:2: there is no prompt"),
    "hidden": ([TEXT, "--prompts=hidden.jsonl"], "response's 'tokens' would hide a key"),
    "letters": ([TEXT, "--prompts=letters.txt"], "letters.txt:2: tokenizer text: the character"),
    "long": (
        [TEXT, "--prompts=long.txt", "--max_new_tokens=8"],
        "has 65 tokens, and of the model's 64 positions that leaves 0 for --max_new_tokens=8; sho",
    ),
    "positions": ([TEXT, "--prompt=1", "--max_new_tokens=64"], "leaves 62 for --max_new_tokens=64"),
    "length": ([TEXT, "--prompt=1", "--max_new_tokens=0"], "--max_new_tokens=0: must be 1 or more"),
    "temperature": ([TEXT, "--prompt=1", "--temperature=-1"], "--temperature=-1.0: 0 (greedy)"),
    "top_p": ([TEXT, "--prompt=1", "--top_p=0"], "--top_p=0.0: above 0 and at most 1"),
    "seed": ([TEXT, "--prompt=1", "--seed=-1"], "--seed=-1: must be from 0 to 4294967295"),
    "batch": ([TEXT, "--prompt=1", "--batch=0"], "--batch=0: must be 1 or more"),
    "stop": ([TEXT, "--prompt=1", "--stop="], "--stop= is empty; give the text"),
    "dtype": ([TEXT, "--prompt=1", "--dtype=int8"], "--dtype=int8: value should be one of"),
    "chat": ([TEXT, "--prompt=1", "--chat"], "--chat: text has no chat template"),
    "chat of ids": (["--model=ids", "--prompt=1", "--chat"], "--chat: ids has no tokenizer"),
    "text": (["--model=ids", "--prompt=1+2"], "'1+2': this model has no tokenizer; give token ids"),
    "ids": (["--model=ids", "--prompt=3,16"], "each 0 to 15"),
    "texts": (["--model=ids", "--prompts=letters.txt"], "letters.txt:1: the prompt is text, and"),
    "regex": ([TEXT, "--prompt=1", "--regex=("], "--regex: regex=(: unclosed group"),
    "no match": ([TEXT, "--prompt=1", "--regex=x"], "--regex: constraint: no token may begin"),
    "regex of ids": (["--model=ids", "--prompt=1", "--regex=1"], "this model has no tokenizer"),
    "formats": ([TEXT, "--prompt=1", "--regex=1", "--json_schema=s"], "--json_schema: give one of"),
    "no schema": ([TEXT, "--prompt=1", "--json_schema=s"], "--json_schema=s: there is no such"),
    "schema": ([TEXT, "--prompt=1", "--json_schema=none.txt"], "--json_schema: json_schema: not"),
    "stop id": (["--model=ids", "--prompt=1", "--stop=16"], "--stop=16: ids has no tokenizer"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_input_is_one_line(case, models, monkeypatch, capsys):
    flags, line = WRONG[case]
    monkeypatch.chdir(models)
    for name, content in FILES.items():
        (models / name).write_text(content)
    assert generate.main(flags) == 2
    shown = capsys.readouterr()
    assert line in shown.err and shown.err.count("\n") == 1 and shown.out == ""


def test_the_command_itself(models, tmp_path):
    command = [sys.executable, "-m", "hjax.launch.generate", f"--model={models}/text"]
    # Python's own variables: readline, of a chat in this process, sets COLUMNS beside them.
    run = {"capture_output": True, "text": True, "timeout": 120, "cwd": tmp_path}
    run |= {"env": dict(os.environ)}
    done = subprocess.run([*command, "--prompt=1+2=", "--max_new_tokens=2", "--json"], **run)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["completions"][0]["prompt"] == "1+2="
    assert not list(tmp_path.iterdir())


def test_help():
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        assert generate.main(["--help"]) == 0
    lines = shown.getvalue().splitlines()
    assert lines and all(len(line) <= 100 for line in lines) and "{" not in shown.getvalue()
