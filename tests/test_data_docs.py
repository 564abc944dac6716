"""The Python examples in the documentation of data, rewards and evaluation run as they stand."""

import pathlib
import re

import pytest

from hjax.data.tasks import TASKS

DOCS = pathlib.Path(__file__).parent.parent / "docs"


@pytest.mark.parametrize("page", ["data.md", "rewards.md", "evaluate.md"])
def test_examples_run(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    before = dict(TASKS)
    blocks = re.findall(r"^```python\n(.*?)^```", (DOCS / page).read_text(), re.M | re.S)
    assert len(blocks) >= 2
    try:
        for number, block in enumerate(blocks):
            exec(compile(block, f"{page} example {number}", "exec"), {"__name__": f"ex{number}"})
    finally:
        for added in set(TASKS) - set(before):  # the example that registers a task of its own
            del TASKS[added]
    expected = {"rewards.md": "[ 1. nan] 1 0.5", "evaluate.md": "[1.0, 1.0, 0.0]"}
    assert expected.get(page, "") in capsys.readouterr().out


def test_every_task_is_in_the_table():
    table = (DOCS / "data.md").read_text()
    for name, cls in TASKS.items():
        row = next(line for line in table.splitlines() if line.startswith(f"| `{name}`"))
        for option, default in cls.default_options().items():
            if option != "partial":
                assert f"`{option}`" in row and str(default) in row
