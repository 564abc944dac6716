"""Runs in stages: what a command line changes, what is resumed, and the page of them all."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from helpers import TINY, computed, launch, read_rows

import hjax
from hjax.errors import ConfigError
from hjax.launch.stages import dry_run_stages, read_stages, run_stages
from hjax.settings.config_loading import get_stages, load_config

FILE = """
def get_stages(steps="2"):
    own = {own!r}
    keys = {{**{tiny!r}, "steps": int(steps), "checkpoint.every": 1}}
    return {{stage: {{**keys, **more}} for stage, more in own.items()}}


def prepare(workdir, steps="2"):
    (workdir / "seen").write_text("x")
"""
OWN = {
    "sft": {"algorithm.name": "SFT"},
    "judge": {"algorithm.name": "RewardModel", "warm_start.batch": 16},
    "ppo": {
        "algorithm.name": "PPO",
        "actor.path": "{workdir}/sft",
        "reward.path": "{workdir}/judge",
    },
}


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "three.py"
    path.write_text(FILE.format(own=OWN, tiny=TINY))
    return str(path)


def test_a_key_is_changed_for_one_stage_or_for_all(file, tmp_path):
    arguments = ["--config.judge.steps=5", "--workdir=x", "--config.seed", "3", "--json"]
    stages, rest = read_stages(f"{file}:7", arguments)
    assert rest == ["--workdir=x", "--json"]
    configs = stages.configs(tmp_path)
    assert [config.steps for config in configs.values()] == [7, 5, 7]
    assert [config.seed for config in configs.values()] == [3, 3, 3]
    assert configs["ppo"].reward.path == f"{tmp_path}/judge"
    assert read_stages("ppo.py", arguments) == (None, arguments)
    with pytest.raises(ConfigError, match="stage sft: .*unknown key config.stepps"):
        read_stages(file, ["--config.stepps=5"])[0].configs(tmp_path)
    with pytest.raises(ConfigError, match="its stages are run by `python -m hjax.launch`"):
        load_config(file)


@pytest.mark.parametrize(
    "returned, message",
    [
        ("{}", "returned no stages"),
        ("{'actor': {}}", "a stage is called 'actor'; it must be a word, and none of"),
        ("{'a': 3}", "stage a: get_config.. returned int"),
    ],
)
def test_wrong_stages_get_one_line(returned, message, tmp_path):
    (tmp_path / "wrong.py").write_text(f"def get_stages():\n    return {returned}\n")
    with pytest.raises(ConfigError, match=message):
        get_stages(str(tmp_path / "wrong.py"))


def test_stages_follow_each_other_and_go_on_where_they_were_stopped(file, tmp_path, capsys):
    ran = []

    def run(title, config, workdir, stop=False):
        trainer = hjax.Trainer(config, workdir)
        try:
            if stop:
                trainer.step()
                trainer.save()
                return 130
            ran.append((workdir.name, trainer.checkpoints, len(trainer.run())))
            return 0
        finally:
            trainer.close()

    def stopped(title, config, workdir):
        return run(title, config, workdir, stop=workdir.name == "judge")

    stages, _ = read_stages(file, [])
    folder = tmp_path / "run"
    described = []
    dry_run_stages(stages, None, lambda title, config: described.append(title))
    assert [title.split()[-1] for title in described] == ["sft", "judge"]
    assert "ppo: starts from" in capsys.readouterr().out
    assert run_stages(stages, folder, stopped) == 130
    assert (folder / "seen").exists() and not (folder / "ppo").exists()
    assert "Not begun yet" in (folder / "report.html").read_text()
    assert run_stages(stages, folder, run, as_json=True) == 0
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert said["stages"]["ppo"]["step"] == 2 and not said["stopped"]
    # Steps that were left: none, one and two.
    assert [(name, steps) for name, _, steps in ran] == [
        ("sft", 2), ("sft", 0), ("judge", 1), ("ppo", 2),
    ]  # fmt: skip
    page = (folder / "report.html").read_text()
    assert "Reward against KL" in page and 'href="ppo/report.html"' not in page
    with pytest.raises(ConfigError, match="holds a run with config.seed=0, now 1"):
        run_stages(read_stages(file, ["--config.sft.seed=1"])[0], folder, run)


SHORT = ["--config.steps=4", "--config.eval.every=0", "--config.checkpoint.every=2"]


@pytest.mark.slow
def test_the_command_resumes_a_stage_that_was_killed(tmp_path):
    flags = [*SHORT, "--config.display.enabled=true"]
    done = launch("rlhf.py:sorting", *flags, "--workdir=whole", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "done: 3 stages in whole" in done.stdout
    command = [sys.executable, "-m", "hjax.launch", "--config=rlhf.py:sorting", "--workdir=cut"]
    process = subprocess.Popen([*command, *flags], cwd=tmp_path, env=os.environ)
    while not (tmp_path / "cut/reward_model/checkpoints/2").is_dir() and process.poll() is None:
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    again = launch("rlhf.py:sorting", *flags, "--workdir=cut", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert "cut/sft is finished" in again.stdout
    for stage in ("sft", "reward_model", "ppo"):
        rows = [
            [computed(row) for row in read_rows(tmp_path / name / stage)]
            for name in ("whole", "cut")
        ]
        assert rows[0] == rows[1] and len(rows[0]) == 4


@pytest.mark.slow
def test_reviews_go_through_all_stages(test_data, tmp_path):
    small = ["--config.steps=2", "--config.eval.prompts=32", "--config.data.eval_size=32"]
    done = launch("rlhf.py", *small, "--workdir=run", cwd=tmp_path, HJAX_TEST_DATA=str(test_data))
    assert done.returncode == 0, done.stdout + done.stderr
    row = read_rows(tmp_path / "run" / "ppo")[-1]
    assert {"reward/mean", "kl/reference", "eval/reward"} <= row.keys()
    page = (tmp_path / "run" / "report.html").read_text()
    assert "Calibration" in page and "Reward against KL" in page


def test_reviews_that_are_not_there_are_one_line_and_leave_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HJAX_TEST_DATA", raising=False)
    stages, _ = read_stages("rlhf.py", [])
    with pytest.raises(ConfigError, match="set HJAX_TEST_DATA .*=rlhf.py:sorting") as caught:
        stages.prepare(tmp_path / "runs" / "new")
    assert "\n" not in str(caught.value) and list(tmp_path.iterdir()) == []
