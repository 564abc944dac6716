"""The command `hjax`: each name runs its module, and what needs no JAX imports none."""

import pathlib
import subprocess
import sys

import pytest

import hjax
from hjax.__main__ import COMMANDS

# Fails on the first import of JAX, whoever imports it.
WITHOUT_JAX = """
import importlib.abc, importlib, sys
class Refuse(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        assert name != "jax", "JAX is imported"
sys.meta_path.insert(0, Refuse())
sys.exit(importlib.import_module(sys.argv[1]).main(sys.argv[2:]))
"""


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_every_module_that_is_a_command_has_a_name():
    folder = pathlib.Path(hjax.__file__).parent / "launch"
    files = {f.stem for f in folder.glob("*.py") if "run_and_exit(main)" in f.read_text()}
    modules = {module.removeprefix("hjax.launch").lstrip(".") for module, _ in COMMANDS.values()}
    assert {name or "__main__" for name in modules} == files


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        ((), 2, "name a command first, as in hjax train --config=ppo.py"),
        (("--config=dpo.py",), 2, "name a command first, as in hjax train --config=dpo.py"),
        (("evalute",), 2, "no command 'evalute'; did you mean evaluate?"),
        (("xyz",), 2, "no command 'xyz'; one of train, check, compare, "),
        (("export", "--help"), 0, "usage: python -m hjax.launch.export"),
        (("help", "export"), 0, "usage: python -m hjax.launch.export"),
        (("--version",), 0, f"hjax {hjax.__version__} (jax "),
        (("--help",), 0, "usage: hjax COMMAND"),
        (("train", "--config=ppo.py", "--config.num_generations=8"), 2, "config.rollout.samples"),
    ],
)
def test_what_it_runs(arguments, status, said):
    done = run("-m", "hjax", *arguments)
    assert (done.returncode, said in done.stdout + done.stderr) == (status, True), done


@pytest.mark.parametrize("module", [module for module, _ in COMMANDS.values()])
def test_help_imports_no_jax(module):
    main = f"{module}.__main__" if module == "hjax.launch" else module
    done = run("-c", WITHOUT_JAX, main, "--help")
    assert done.returncode == 0 and "--help" in done.stdout, done.stderr


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("rollout.sampels", "did you mean config.rollout.samples?"),
        ("num_generations", "config.rollout.samples, responses per prompt"),
        ("actor", "config.actor is a section"),
    ],
)
def test_a_wrong_key_imports_no_jax(key, said):
    done = run("-c", WITHOUT_JAX, "hjax.launch.__main__", "--config=ppo.py", f"--config.{key}=3")
    assert done.returncode == 2 and said in done.stderr, done.stderr


def test_a_key_of_the_algorithm_is_suggested_for_another_section():
    done = run("-m", "hjax", "train", "--config=ppo.py", "--config.actor.gamma=1")
    assert "did you mean config.algorithm.gamma" in done.stderr
