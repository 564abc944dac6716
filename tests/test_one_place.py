"""A new role, key or command is one change: docs/extending.md shows it, here it is applied."""

import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

import hjax

PACKAGE = pathlib.Path(hjax.__file__).parent
PAGE = PACKAGE.parent / "docs" / "extending.md"


def changes():
    """(file, line before, added lines) of each diff on the page."""
    found = {}
    for block in re.findall(r"^```diff\n(.*?)^```", PAGE.read_text(), re.M | re.S):
        lines = block.splitlines()
        file = next(line for line in lines if line.startswith("+++ b/")).removeprefix("+++ b/")
        body = lines[lines.index("@@") + 1 :]
        before = [line[1:] for line in body if line.startswith(" ")]
        added = [line[1:] for line in body if line.startswith("+")]
        found[pathlib.Path(file).stem] = (file, before, added)
    return found


@pytest.fixture(scope="module")
def changed(tmp_path_factory):
    """A folder with a copy of the package, every change applied."""
    folder = tmp_path_factory.mktemp("changed")
    shutil.copytree(PACKAGE, folder / "hjax", ignore=shutil.ignore_patterns("__pycache__"))
    for file, before, added in changes().values():
        path = folder / file
        if not before:
            path.write_text("\n".join([*added, ""]))
            continue
        text, [line] = path.read_text(), before
        assert text.count(line + "\n") == 1, f"{line!r} is not one line of {file}"
        path.write_text(text.replace(line + "\n", "\n".join([line, *added, ""])))
    return folder


def run(folder, *arguments):
    done = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=240,
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(folder)},
    )
    return done.returncode, done.stdout, done.stderr


def test_each_takes_under_ten_lines():
    lengths = {
        name: len([line for line in added if line.strip()])
        for name, (_, _, added) in changes().items()
    }
    assert lengths["roles"] == lengths["keys"] == 1
    assert set(lengths) == {"roles", "keys", "count"} and lengths["count"] < 10


USE = """
import hjax

class Taught(hjax.algorithms.GRPO):
    roles = ("actor", "mentor", "reference", "reward")

    def step(self, prompts):
        batch = self.actor.generate_sequences(prompts)
        said = hjax.controller.join(self.mentor.compute_ref_log_prob(batch))
        known = hjax.controller.join(self.reference.compute_ref_log_prob(batch))
        assert abs(said["ref_logprobs"] - known["ref_logprobs"]).max() < 1e-5
        return super().step(prompts)
"""


@pytest.mark.extended
def test_a_new_role_is_placed_run_and_planned(changed):
    (changed / "taught.py").write_text(USE)
    keys = {
        "algorithm.name": "taught.py:Taught", "steps": 1, "placement": "standalone",
        "layout.mentor.train.tensor": 2, "rollout.prompts": 8, "rollout.samples": 2,
        "algorithm.minibatch": 0, "eval.every": 0, "checkpoint.every": 0,
        "cluster.devices_per_process": 6, "warm_start.steps": 0, "model.layers": 1,
        "model.hidden_size": 32, "model.mlp_size": 32,
    }  # fmt: skip
    flags = [f"--config.{key}={value}" for key, value in keys.items()]
    status, out, err = run(changed, "-m", "hjax.launch", "--config=grpo.py", "--workdir=w", *flags)
    assert status == 0, err
    plan = (changed / "w" / "plan.json").read_text()
    assert re.search(r'"mentor": \{\s*"train": \{[^}]*"tensor": 2', plan)
    models = ",".join(f"{r}=llama-7b" for r in ("actor", "mentor", "reference", "reward"))
    status, out, err = run(
        changed, "-m", "hjax.launch.plan", "--algorithm=taught.py:Taught", f"--models={models}",
        "--cluster=2x8:a100-80g", "--json",
    )  # fmt: skip
    assert status == 0 and '"mentor"' in out.splitlines()[-1], err


@pytest.mark.extended
def test_a_new_key_has_its_default_its_check_and_its_docs(changed):
    code = "import hjax; print(hjax.default_config().pause_seconds)"
    assert run(changed, "-c", code)[1] == "0.0\n"
    docs = run(changed, PACKAGE.parent / "docs" / "generate" / "config_page.py")[1]
    assert "| `pause_seconds` | float | `0.0` | wait before each step | from 0 to 60 |" in docs
    status, _, err = run(
        changed, "-m", "hjax.launch", "--config=ppo.py", "--config.pause_seconds=61", "--dry_run"
    )
    assert status == 2 and "config.pause_seconds=61.0: must be from 0 to 60" in err


@pytest.mark.extended
def test_a_new_command_takes_configs_and_answers_as_the_others(changed):
    command = ("-m", "hjax.launch.count", "--config=ppo.py")
    assert run(changed, *command, "--config.steps=10")[:2] == (0, f"{10 * 64 * 4}\n")
    status, out, err = run(changed, *command, "--config.stepss=10")
    assert (status, out) == (2, "") and "did you mean config.steps" in err
    assert run(changed, *command, "--help")[:2] == (0, changes()["count"][2][0].strip('"') + "\n")
