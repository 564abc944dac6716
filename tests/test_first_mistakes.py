"""What a new user mistypes or forgets: each ends in one line that says what to do instead.

Those of single settings are in test_errors.py.
"""

import importlib
import json
import re

import pytest
from helpers import save_model, write_config

from hjax.data.tasks import get_task

REWARD = """
def reward(prompts, responses, **columns):
    return [float(x) for x in columns["answr"]]


def words(prompts, responses, **columns):
    return ["good"] * len(prompts)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What lies in the working directory: data, a reward function, a run, a `base.py` of another
    kind."""
    here = tmp_path_factory.mktemp("first")
    (here / "brief.py").write_text(REWARD)
    (here / "base.py").write_text("class Base:\n    pass\n")
    write_config(here / "grpo.py", {"algorithm.name": "GRPO", "data.task": "sorting", "steps": 3})
    rows = [json.dumps({"text": "12>", "answer": "1"}) for _ in range(4)]
    (here / "text.jsonl").write_text("\n".join(rows))
    rows = [json.dumps({"prompt": "12>", "answer": "1"}) for _ in range(40)]
    (here / "rows.jsonl").write_text("\n".join(rows))
    tokenizer = get_task("sorting").tokenizer()
    tokenizer.save(here / "tokenizer")
    run = here / "runs" / "first"
    save_model(run / "model", tokenizer=tokenizer)
    (run / "checkpoints" / "3").mkdir(parents=True)
    config = {"actor": {"path": ""}, "data": {"task": "sorting", "path": ""}}
    (run / "config.json").write_text(json.dumps(config))
    (here / "full").mkdir()
    (here / "full" / "notes.txt").write_text("mine")
    return here


PPO, BASE = ("", "--config=ppo.py"), ("", "--config=base.py")
DATA = "--config.data.path=rows.jsonl"
MISTAKES = {
    # the command line
    "a file in place of a flag": (("", "ppo.py"), r"is missing; did you mean --config=ppo.py\?"),
    "no config": (("",), "--config=NAME.py is missing; give a config file, or one of base.py"),
    "a slip": (("", "--config=pp.py"), r"--config=pp.py: no such file; did you mean ppo.py\?"),
    "YAML": (("", "--config=grpo.yaml"), r"no such file; did you mean grpo.py\?"),
    "a key without config": ((*PPO, "--rollout.prompts=8"), "mean --config.rollout.prompts"),
    "a key as Hydra has it": ((*PPO, "rollout.prompts=8"), "mean --config.rollout.prompts=VALUE"),
    "another library's key": ((*PPO, "--config.num_generations=8"), "config.rollout.samples, resp"),
    "a comma": ((*PPO, "--config.actor.learning_rate=1e-4,"), "'1e-4,': expected a number"),
    "an algorithm": ((*PPO, "--config.algorithm.name=GRPPO"), r"did you mean GRPO or PPO"),
    "a role's other key": ((*PPO, "--config.actor.gamma=1"), "mean config.algorithm.gamma"),
    # models
    "a run that is not there": (
        (*PPO, "--config.actor.path=runs/frst"),
        "no directory 'runs/frst'; in runs there are first",
    ),
    "of a command": (("generate", "--model=runs/frst", "--prompt=1"), "in runs there are first"),
    "a checkpoint that is not there": (
        ("generate", "--model=runs/first/checkpoints/9", "--prompt=1"),
        "runs/first/checkpoints/9: no such checkpoint; saved: 3",
    ),
    "the best of none": (
        ("export", "--model=runs/first/checkpoints/best", "--output=out"),
        "this run has no best checkpoint .*; set checkpoint.best",
    ),
    "an output that is in use": (("export", "--model=runs/first", "--output=full"), "is not empty"),
    # data and rewards
    "no data": (BASE, "there is no data: set config.data.path=FILE"),
    "no such file": ((*BASE, "--config.data.path=rows.json"), "rows.json: there is no such file"),
    "no tokenizer": ((*BASE, DATA), "rows.jsonl:1: the prompt is text, and there is no tokenizer"),
    "a column of another name": (
        (*BASE, "--config.data.path=text.jsonl", "--config.tokenizer.path=tokenizer"),
        "there is no prompt; .* this one has text, answer; in a run data.columns=NAME=prompt",
    ),
    "a reward's column": (
        (*BASE, DATA, "--config.tokenizer.path=tokenizer", "--workdir=new",
         "--config.reward.function=brief.py:reward", "--config.model.hidden_size=16",
         "--config.model.heads=2", "--config.model.kv_heads=2", "--config.rollout.prompts=8",
         "--config.display.enabled=False"),
        "KeyError: 'answr'; the data's columns are prompt, answer",
    ),
    # The columns say nothing of a reward of a wrong type.
    "a reward that is text": (
        (*BASE, DATA, "--config.tokenizer.path=tokenizer", "--workdir=new",
         "--config.reward.function=brief.py:words", "--config.model.hidden_size=16",
         "--config.model.heads=2", "--config.model.kv_heads=2", "--config.rollout.prompts=8",
         "--config.display.enabled=False"),
        "function words fails on .* before training((?!columns).)*$",
    ),
    "a reward's name": ((*PPO, "--config.reward.function=brief.py:rewrd"), "did you mean reward"),
    "no name": ((*PPO, "--config.reward.function=brief.py"), "it must look like path.py:name"),
    "no grader": (("evaluate", "--model=runs/first"), "give --data=FILE with --reward=GRADER"),
    "a protocol's name": (("serve", "--model=runs/first", "--protocol=opnai"), "--protocol"),
    "one run alone": (("compare", "runs/first"), "a comparison is of two or more workdirs"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_ends_in_one_line(mistake, folder, monkeypatch, capsys):
    (command, *arguments), said = MISTAKES[mistake]
    monkeypatch.chdir(folder)
    before = sorted(folder.rglob("*"))
    module = importlib.import_module(f"hjax.launch.{command or '__main__'}")
    status = module.main(arguments)
    line = capsys.readouterr().err.splitlines()[-1]
    assert status == (1 if " fails on " in line else 2)
    assert line.startswith("hjax: error: ") and re.search(said, line), line
    new = [p for p in sorted(folder.rglob("*")) if p not in before and "__pycache__" not in str(p)]
    assert new == []


def test_a_file_here_with_a_shipped_name_is_taken_if_it_is_a_config(folder, monkeypatch):
    from hjax.launch.plan_flags import usual_samples
    from hjax.settings.config_loading import CONFIGS, find_config

    monkeypatch.chdir(folder)
    assert find_config("grpo.py").resolve() == folder / "grpo.py"  # a copy that was edited
    assert find_config("base.py") == CONFIGS / "base.py"  # not ./base.py, which is none
    from hjax.algorithms import GRPO

    assert usual_samples(GRPO) == 8  # of the shipped config, not of ./grpo.py
