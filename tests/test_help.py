"""What --help prints fits the terminal, and says the same at every width."""

import importlib
import re
import sys

import pytest

from hjax.launch.command import MAX_HELP_WIDTH, wrap_help
from hjax.planning.strategies import STRATEGIES

COMMANDS = (
    "__main__", "compare", "compile", "evaluate", "export", "generate", "plan", "serve",
    "transition",
)  # fmt: skip
BY_HAND = """\
usage: python -m hjax.launch --config=NAME.py [--workdir=DIR]
                             [--json]

Train a model. It goes on from the last checkpoint that it finds in the
workdir.

  --config=NAME.py   a file, or
                     --config=ppo.py, which is shipped with hjax; set:
                       --config.steps=100
  --offload=reference=all   what waits in memory
  --help             print this
"""
AT_50 = """\
usage: python -m hjax.launch --config=NAME.py
           [--workdir=DIR] [--json]

Train a model. It goes on from the last checkpoint
that it finds in the workdir.

  --config=NAME.py   a file, or --config=ppo.py,
                     which is shipped with hjax;
                     set:
                       --config.steps=100
  --offload=reference=all   what waits in memory
  --help             print this
"""


def test_a_text_by_hand():
    assert wrap_help(BY_HAND, 50) == AT_50
    assert wrap_help(BY_HAND, MAX_HELP_WIDTH) == BY_HAND


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_at_every_width(command, monkeypatch, capsys):
    module = importlib.import_module(f"hjax.launch.{command}")
    monkeypatch.setattr(sys, "argv", ["command", "--help"])
    shown = {}
    for width in (60, 80, 200):
        monkeypatch.setenv("COLUMNS", str(width))
        assert module.main(["--help"]) == 0
        shown[width] = capsys.readouterr().out
    assert max(map(len, shown[80].splitlines())) <= 80
    # Alone what is one word may be longer.
    assert all(len(line) <= 60 or " " not in line.strip() for line in shown[60].splitlines())
    assert max(map(len, shown[200].splitlines())) <= MAX_HELP_WIDTH
    assert shown[60].split() == shown[80].split() == shown[200].split()


def test_help_of_plan_names_every_strategy():
    text = importlib.import_module("hjax.launch.plan").__doc__
    said = text.partition("  --strategy=auto")[2].partition("--candidates")[0]
    named = re.sub(r"\(.*?\)|or as other systems\s+place", "", said)
    assert set(re.findall(r"[a-z_]+", named)) == set(STRATEGIES)
