"""Whatever is wrong with the input gets one line that names it, and nothing is written."""

import json
import re
import signal
import sys

import pytest
from helpers import TINY, command, launch, save_model, trainer_of, write_config

from hjax.data.tasks import get_task
from hjax.launch.__main__ import main

REWARDS = """
def good(prompts, responses, **columns):
    return [1.0] * len(responses)

def raises(prompts, responses, **columns):
    return [1 / 0 for _ in responses]

def short(prompts, responses, **columns):
    return [1.0]

def nan(prompts, responses, **columns):
    return [float("nan")] * len(responses)

def text(prompts, responses, **columns):
    return ["good"] * len(responses)

def no_list(prompts, responses, **columns):
    return "good"

def narrow(prompts):
    return []

number = 3
"""


@pytest.fixture(autouse=True)
def keep_signal_handlers():
    kept = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in kept.items():
        signal.signal(number, handler)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Configs, data and models, good and bad."""
    folder = tmp_path_factory.mktemp("errors")
    write_config(folder / "tiny.py", TINY | {"algorithm.name": "GRPO"})
    (folder / "broken.py").write_text("def get_config():\n    return 1 / 0\n")
    (folder / "empty.py").write_text("")
    (folder / "rewards.py").write_text(REWARDS)
    (folder / "syntax.py").write_text("def reward(:\n")
    rows = [{"prompt": f"{i}>", "answer": "1"} for i in range(20)]
    lines = [json.dumps(row) for row in rows]
    (folder / "good.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "malformed.jsonl").write_text("\n".join([*lines[:3], '{"prompt": "4>",', ""]))
    (folder / "foreign.jsonl").write_text('{"prompt": "1>"}\n{"prompt": "abc>"}\n')
    (folder / "missing.jsonl").write_text('{"prompt": "1>"}\n{"text": "2>"}\n')
    (folder / "nothing.jsonl").write_text("")
    (folder / "table.xlsx").write_text("prompt\n1\n")
    (folder / "plan.json").write_text('{"placement": [["actor"]], "allocation": [8]}')
    tokenizer = get_task("sorting").tokenizer()
    tokenizer.save(folder / "tokenizer")
    save_model(folder / "model", tokenizer=tokenizer)
    (folder / "model_torn").mkdir()
    whole = (folder / "model" / "model.safetensors").read_bytes()
    (folder / "model_torn" / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    config = (folder / "model" / "config.json").read_text()
    (folder / "model_torn" / "config.json").write_text(config)
    (folder / "model_mamba").mkdir()
    (folder / "model_mamba" / "config.json").write_text('{"model_type": "mamba"}')
    return folder


DATA = {"tokenizer.path": "tokenizer", "reward.function": "rewards.py:good"}

CASES = {
    # the command line and the config
    "unknown key": (
        {"rollout.promts": 8},
        "unknown key config.rollout.promts; did you mean config",
    ),
    "unknown algorithm key": ({"algorithm.clip": 1}, "config.algorithm.clip .*not a key of GRPO"),
    "wrong type": ({"steps": "many"}, "config.steps='many': expected a whole number"),
    "out of range": ({"rollout.temperature": 0}, "config.rollout.temperature=0.*from 0.01 to 100"),
    "too small a temperature": (
        {"rollout.temperature": 1e-6},
        "config.rollout.temperature=1e-06.*from 0.01 to 100",
    ),
    "a number that means nothing": (
        {"algorithm.kl_coef": 1e38},
        r"config.algorithm.kl_coef=1e\+38: must be 0, or from 1e-20 to 1e\+12 in magnitude",
    ),
    "a number so small that it is 0": (
        {"actor.learning_rate": 1e-42},
        "config.actor.learning_rate=1e-42: must be 0, or from 1e-20",
    ),
    "a decay that is 1 as float32": (
        {"actor.beta1": 0.999999999},
        "config.actor.beta1=0.999999999: must be from 0 to below 1, at most 0.9999999",
    ),
    "minibatch": (
        {"algorithm.minibatch": 6},
        "minibatch=6 .* must divide .* it may be 2, 4, 8, 16",
    ),
    "unknown algorithm": ({"algorithm.name": "PPOO"}, "algorithm.name='PPOO'"),
    "unknown task": ({"data.task": "sortin"}, "no task 'sortin': did you mean sorting"),
    "unknown task option": ({"data.task_options.size": 3}, "unknown key config.data.task_options"),
    # devices
    "rows over devices": (
        {"rollout.prompts": 12},
        "rollout.prompts=12 .*8 data-parallel.* such as 16",
    ),
    "mesh": (
        {"layout.actor.train.tensor": 3},
        "layout.actor.train: .*tensor=3 does not divide 8 dev",
    ),
    "heads": (
        {"model.heads": 2, "model.kv_heads": 2, "layout.actor.train.tensor": 8},
        "layout.actor.train: heads of size 2 does not divide over .* = 8.* may be 1, 2",
    ),
    "generate": (
        {"layout.actor.train.tensor": 2, "layout.actor.generate.tensor": 4},
        "layout.actor.generate.tensor=4 does not divide the training size 2; it may be 1, 2",
    ),
    "pipe": (
        {"layout.actor.train.pipe": 4},
        "layout.actor.train: layers of size 1 .* over pipe = 4; pipe may be 1",
    ),
    "too many devices": ({"cluster.devices_per_process": 9}, "devices_per_process=9, but .* 8 dev"),
    "placement": ({"placement": "everywhere"}, "placement='everywhere': must be one of colocate"),
    "no plan": ({"placement": "plans.json"}, "placement='plans.json': no such file"),
    "bad plan": (
        {"placement": "plan.json"},
        "plan.json: it places actor, this run has actor, refer",
    ),
    # data
    "no file": (DATA | {"data.path": "none.jsonl"}, "none.jsonl"),
    "malformed": (DATA | {"data.path": "malformed.jsonl"}, "malformed.jsonl:4: "),
    "no prompt": (DATA | {"data.path": "missing.jsonl"}, "missing.jsonl:2: there is no prompt"),
    "foreign text": (
        DATA | {"data.path": "foreign.jsonl"},
        "foreign.jsonl:2: .*the character 'a' of 'abc>'",
    ),
    "empty": (DATA | {"data.path": "nothing.jsonl"}, "nothing.jsonl: the dataset is empty"),
    "xlsx": (
        DATA | {"data.path": "table.xlsx"},
        "table.xlsx: its name must end in .jsonl, .json, .csv, .parquet or .txt",
    ),
    "no held-out file": (
        DATA | {"data.path": "good.jsonl", "data.eval_path": "none.jsonl"},
        "none.jsonl",
    ),
    "long prompt": (
        DATA | {"data.path": "good.jsonl", "rollout.max_prompt_length": 3},
        "good.jsonl:11: the prompt has 4 tokens, above rollout.max_prompt_length=3; raise that key",
    ),
    "long task prompt": (
        {"rollout.max_prompt_length": 3},
        "prompts have up to 5 tokens, above rollout.max_prompt_length=3; raise that key",
    ),
    "no reward": (
        {"data.path": "good.jsonl", "tokenizer.path": "tokenizer"},
        "nothing gives a reward: set reward.function=path.py:name or reward.path",
    ),
    "no tokenizer": (
        {"data.path": "good.jsonl", "reward.function": "rewards.py:good"},
        "good.jsonl:1: the prompt is text, and there is no tokenizer; set tokenizer.path",
    ),
    # functions and models
    "no reward file": (
        {"reward.function": "none.py:good"},
        "reward.function='none.py:good': there is no",
    ),
    "no reward name": ({"reward.function": "rewards.py:goood"}, "has no goood; did you mean good"),
    "not a function": (
        {"reward.function": "rewards.py:number"},
        "number is 3 .int., not a function",
    ),
    "narrow": (
        {"reward.function": "rewards.py:narrow"},
        "narrow.prompts. cannot be called: it must",
    ),
    "syntax": (
        {"reward.function": "syntax.py:reward"},
        "syntax.py:1: SyntaxError",
    ),
    "no cost": (
        {"algorithm.name": "SafeRLHF"},
        "nothing gives a cost: set cost.function=path.py:name",
    ),
    "no model": ({"actor.path": "nowhere"}, "no model directory 'nowhere'"),
    "torn model": (
        {"actor.path": "model_torn", "tokenizer.path": "tokenizer"},
        "model.safetensors: not a readable safetensors file",
    ),
    "another family": (
        {"actor.path": "model_mamba", "tokenizer.path": "tokenizer"},
        "model_type 'mamba' is not supported",
    ),
    "positions": (
        {"actor.path": "model", "rollout.max_response_length": 60},
        "prompts of 5 and responses of 60 tokens exceed the model's 64 positions; lower",
    ),
    "stop": ({"rollout.stop": "('12z',)"}, "the character 'z' of '12z' is not in its vocabulary"),
    "steps": ({"reward.step_separator": "token"}, "config.reward.step_separator='token': what"),
}


@pytest.mark.parametrize("case", CASES)
def test_bad_input_ends_in_one_line_and_status_2(case, files, monkeypatch, capsys):
    changes, message = CASES[case]
    monkeypatch.chdir(files)
    before = sorted(files.rglob("*"))
    status = main(["--config=tiny.py", "--workdir=run", *command(changes)])
    printed = capsys.readouterr()
    assert status == 2, printed
    assert printed.out == ""
    assert printed.err.startswith("hjax: error: ") and printed.err.count("\n") == 1
    assert re.search(message, printed.err), printed.err
    new = [p for p in sorted(files.rglob("*")) if p not in before and "__pycache__" not in str(p)]
    assert new == []


@pytest.mark.parametrize(
    "name, message",
    [
        (
            "none.py",
            "--config=none.py: no such file; give a path, or one of base.py, calculator.py",
        ),
        ("broken.py", "broken.py:2: ZeroDivisionError: division by zero"),
        ("empty.py", "the file defines no get_config()"),
        ("ppo.py:addition", "after the colon; say --config=ppo.py --config.data.task=addition\n"),
        ("ppo.py:8", "ppo.py takes nothing after the colon; say --config=ppo.py --config.KEY="),
    ],
)
def test_a_config_file_that_cannot_be_used(name, message, files, monkeypatch, capsys):
    monkeypatch.chdir(files)
    assert main([f"--config={name}"]) == 2
    printed = capsys.readouterr().err
    assert printed.count("\n") == 1 and message in printed


TRACEBACK = """\
Traceback (most recent call last):
  File "{file}", line 6, in raises
    return [1 / 0 for _ in responses]
           ^^^^^^^^^^^^^^^^^^^^^^^^^^
  File "{file}", line 6, in <listcomp>
    return [1 / 0 for _ in responses]
            ~~^~~
ZeroDivisionError: division by zero
"""
FAILS = "function .* fails on 4 demonstrations, before training. The first failure: "


@pytest.mark.parametrize(
    "function, cause",
    [
        ("raises", FAILS + "ZeroDivisionError: division by zero"),
        ("short", FAILS + ".* 1 rewards for 4 sequences"),
        ("nan", "16 of 16 sequences have no reward .nan 16.; the share 1 is above reward.max_uns"),
        ("text", FAILS + ".*'good' .str. for sequence 0; allowed: a number"),
        ("no_list", FAILS + ".*must return a list of float or None"),
    ],
)
def test_a_reward_function_that_fails_ends_the_run_with_status_1(
    function, cause, files, tmp_path, monkeypatch, capsys
):
    """Before anything is trained; of what it raises its own frames, as Python prints them."""
    monkeypatch.chdir(files)
    keys = {"reward.function": f"rewards.py:{function}", "algorithm.kl_coef": 0.04}
    keys |= {"warm_start.steps": 2}
    status = main(["--config=tiny.py", f"--workdir={tmp_path}/run", *command(keys)])
    printed = capsys.readouterr()
    assert status == 1, printed
    *frames, line = printed.err.splitlines(keepends=True)
    assert re.search(cause, line), printed.err
    assert "columns" not in line  # none is missing
    if function != "nan":
        assert not (tmp_path / "run").exists()
    if function != "raises":
        assert not frames
    elif sys.version_info < (3, 12):  # later ones have no frame of a list's own
        assert "".join(frames) == TRACEBACK.format(file=files / "rewards.py")
    assert (tmp_path / "run" / "metrics.jsonl").exists() is False
    assert (tmp_path / "run" / "warm_start.jsonl").exists() is (function == "nan")


@pytest.mark.extended
def test_the_same_from_a_shell(files):
    """In a process of its own: nothing else is printed, by hjax or by what it imports."""
    wrong = launch("tiny.py", "--config.rollout.promts=8", cwd=files)
    assert wrong.returncode == 2 and wrong.stdout == "" and wrong.stderr.count("\n") == 1
    failing = launch(
        "tiny.py",
        "--config.reward.function=rewards.py:raises",
        "--config.cluster.devices_per_process=1",
        "--workdir=shell",
        cwd=files,
    )
    assert failing.returncode == 1, failing.stderr
    frames = failing.stderr.splitlines()
    assert frames[0].startswith("Traceback") and "hjax/" not in "".join(frames[:-1])
    assert "rewards.py" in frames[1] and frames[-1].startswith("hjax: error: the reward function")


@pytest.mark.extended
def test_two_runs_in_one_workdir(files, monkeypatch, capsys):
    monkeypatch.chdir(files)
    with trainer_of("GRPO", {"algorithm.name": "GRPO"}, workdir=files / "busy"):
        second = launch("tiny.py", "--workdir=busy", cwd=files)
    assert second.returncode == 2
    assert "--workdir=busy: another process is training here" in second.stderr
