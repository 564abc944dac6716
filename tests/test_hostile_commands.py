"""Values on command lines that no machine has or waits for: one line, soon, in little memory."""

import gzip
import importlib
import json
import os
import time

import pytest
from helpers import save_model

import hjax
from hjax.data import sources
from hjax.data.dataset import Dataset
from hjax.data.tasks import get_task
from hjax.data.tasks.sokoban_rules import read_levels
from hjax.data.tokenizer import Tokenizer
from hjax.environments.mcp_tools import connect_tools
from hjax.errors import ConfigError, DataError
from hjax.files import METRICS
from hjax.launch.sampling_flags import token_ids
from hjax.rewards.deontic import read_rows as read_deontic_rows
from hjax.run.device_trace import parse_step_range
from hjax.run.workdir import Workdir
from hjax.show.live import _line_width

DIGITS, ARABIC = "9" * 5000, "٣"
SERVE = ["--model=model", "--port=1"]
PLAN = ["--algorithm=ppo", "--models=llama-7b"]
GIVEN = {
    "flags in a file": ("generate", ["--flagfile=fifo"], "Unknown command line flag 'flagfile"),
    "a file without end": ("plan", ["--flagfile", "/dev/zero"], "Unknown command line flag"),
    "flags to be passed over": ("serve", ["-undefok=x", "--x=1"], "Unknown command line flag"),
    "a long name": ("serve", [*SERVE, f"--host={'a' * 300}"], "--port=1: "),
    "a zero byte": ("serve", [*SERVE, "--host=a\0b"], "--port=1: "),
    "a time to the end": ("serve", [*SERVE, "--header_seconds=1e308"], "above 0 to 1e8 seconds"),
    "sizes": ("transition", [f"--train=1,{DIGITS},1", "--generate=1,1"], "give --train=P,T,D"),
    "other digits": ("transition", [f"--train=1,{ARABIC},1", "--generate=1,1"], "give --train"),
    "ten thousand million": ("plan", [*PLAN, "--cluster=99999x99999:h100"], "at most 65536 devi"),
    "many of few": ("plan", [*PLAN, "--cluster=8192x8:h100+1x8:h100"], "at most 65536 devices"),
    "cores": ("plan", [*PLAN, f"--cluster=v5p-{DIGITS}"], "--cluster=v5p-9"),
    "hosts": ("plan", [*PLAN, f"--cluster={DIGITS}xh100"], "--cluster=9"),
    "large slices": ("plan", [*PLAN, f"--cluster=v5e-{2**50}"], "at most 65536 devices"),
    "many slices": ("plan", [*PLAN, "--cluster=99999xv5p:4x4x4"], "at most 65536 devices"),
    "chips": ("compile", ["--config=ppo.py", "--topology=h100:99999x99999"], "at most 65536"),
    "digits": ("compile", ["--config=ppo.py", f"--topology=v5p:{DIGITS}x1x1"], "a kind and sizes"),
    "a deadline": ("check", ["--deadline=1e308"], "--deadline=1e+308: must be above 0 to 1e8"),
    "a grace": ("__main__", ["--config=ppo.py", "--grace_seconds=1e12"], "above 0 to 1e8 seconds"),
    "a profile": ("__main__", ["--config=ppo.py", f"--profile={DIGITS}"], "a step, or the first"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    here = tmp_path_factory.mktemp("hostile")
    save_model(here / "model", tokenizer=get_task("sorting").tokenizer())
    os.mkfifo(here / "fifo")
    return here


@pytest.mark.parametrize("name", GIVEN)
def test_values_that_mean_nothing(name, folder, monkeypatch, capsys):
    command, arguments, says = GIVEN[name]
    monkeypatch.chdir(folder)
    begun = time.monotonic()
    status = importlib.import_module(f"hjax.launch.{command}").main(arguments)
    error = capsys.readouterr().err
    assert status == 2 and error.count("\n") == 1 and says in error, error
    assert len(error) < 7000 and time.monotonic() - begun < 60


@pytest.mark.parametrize("key, value, says", [
    ("reward.timeout_seconds", 1e12, "above 0 to 1e8 seconds"),
    ("environment.step_seconds", 1e308, "above 0 to 1e8 seconds"),
    ("cluster.call_seconds", 1e10, "above 0 to 1e8 seconds"),
    ("environment.memory_gib", 1e308, "from 0 to 1048576"),
    ("agent.memory_gib", 1e300, "from 0 to 1048576"),
    ("agent.timeout_reward", "1e38", r"a number from -1e\+06 to 1e\+06, or unscored"),
    ("data.packing", DIGITS, "auto, or 0 or more"),
    ("data.packing", ARABIC, "auto, or 0 or more"),
])  # fmt: skip
def test_keys_have_ends(key, value, says):
    with pytest.raises(ConfigError, match=says):
        hjax.get_config("base.py", {key: value})


@pytest.mark.parametrize("text", [DIGITS, ARABIC, "²", "1_0", "+1", " 1"])
def test_numbers_are_digits(text, monkeypatch, tmp_path):
    with pytest.raises(ConfigError, match="a step, or the first and the last"):
        parse_step_range(text)
    if text.strip() == text:  # a list of them is divided at spaces
        with pytest.raises(ConfigError, match="give token ids"):
            token_ids(text, 10)
    monkeypatch.setenv("COLUMNS", text)
    with open(os.devnull, "w") as stream:
        assert _line_width(stream) is None
    if len(text) < 255:
        (tmp_path / "checkpoints" / text).mkdir(parents=True)
        (tmp_path / METRICS).write_text("")
        assert not Workdir(tmp_path).has_steps()


LETTERS = Tokenizer.characters("ab+= ")


def packed(kind, content):
    if kind == ".gz":
        return gzip.compress(content)
    return pytest.importorskip("zstandard").compress(content)


@pytest.mark.parametrize("kind", [".gz", ".zst"])
def test_what_comes_out_of_a_compressed_file_is_limited(kind, tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "_FREE_BYTES", 1 << 20)
    line = b'{"prompt": "a+b="}\n'
    path = tmp_path / f"data.jsonl{kind}"
    # Two parts, one behind the other, are one file.
    path.write_bytes(packed(kind, line * 9) + packed(kind, line))
    assert len(Dataset.from_file(path, LETTERS).prompt_tokens) == 10
    for content in (b" " * (1 << 23), b"\n" * (1 << 21), b"\0" * (1 << 22)):
        path.write_bytes(packed(kind, content))
        with pytest.raises(DataError, match=r"more than \d+ bytes come out of its") as caught:
            Dataset.from_file(path, LETTERS)
        assert "\n" not in str(caught.value)
    path.write_bytes(packed(kind, line * 9)[:-3])
    with pytest.raises(DataError, match=f"not readable as {kind}"):
        Dataset.from_file(path, LETTERS)


def test_a_row_with_a_key_twice(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt": "a", "prompt": "b"}\n')
    with pytest.raises(DataError, match=r"rows.jsonl:2: .*a key comes twice in an object: 'prom"):
        Dataset.from_file(path, LETTERS)


@pytest.mark.parametrize("read", [
    lambda path: connect_tools(str(path), [("a", "b")]),
    read_levels,
    lambda path: read_deontic_rows(path, domain="housing"),
])  # fmt: skip
def test_files_of_tasks_and_tools_are_plain_ones(read, tmp_path):
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "nowhere").symlink_to(tmp_path / "gone")
    (tmp_path / "endless").symlink_to("/dev/zero")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    for name in ("fifo", "nowhere", "endless", "bytes"):
        with pytest.raises(ConfigError, match=name):
            read(tmp_path / name)


def test_rows_of_a_task_that_are_too_deep(tmp_path):
    path = tmp_path / "rows.json"
    path.write_text("[" * 100_000 + "]" * 100_000)
    with pytest.raises(DataError, match="too deeply nested"):
        read_deontic_rows(path, domain="housing")
    path.write_text(json.dumps([1]))
    with pytest.raises(DataError, match="row 0: there is no 'question'"):
        read_deontic_rows(path, domain="housing")
