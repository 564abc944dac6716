"""Tasks with tools that small models learn: what their demonstrations and runs are."""

import json

import pytest
import tool_tasks
from tool_tasks import EVAL_SEED, TASKS, get_stages, people, prepare, rows

from hjax.errors import ConfigError


def share_right(task, plain=False):
    made = list(rows(task, 400, 3, plain))
    return sum(row["turns"][-1]["content"] == row["answer"] for row in made) / 400


def test_what_is_right_is_not_what_is_most_likely():
    for task in ("calculator", "interpreter", "lookup"):
        assert 0.3 < share_right(task) < 0.5 and 0.3 < share_right(task, plain=True) < 0.5
    # Half of the calls fail, of which most are given up.
    assert 0.6 < share_right("recovery") < 0.8
    ends = [len(row["turns"]) for row in rows("recovery", 400, 3, False)]
    assert ends.count(5) < 0.5 * 200 < ends.count(3)


def test_answers_by_hand():
    for row in rows("interpreter", 50, 1, False):
        number, _, power = row["prompt"].partition("^")
        assert row["answer"] == str(sum(int(digit) for digit in str(int(number) ** int(power))))
    known = people()
    for row in rows("lookup", 50, 1, False):
        friend = known[int(row["prompt"].partition("'")[0])]["friend"]
        assert row["answer"] == str(known[friend]["age"])


def test_nobody_that_is_asked_about_in_evaluation_is_in_the_demonstrations():
    for task in ("lookup", "recovery"):
        shown, asked = (
            {row["prompt"] for row in rows(task, 500, seed, False)} for seed in (3, EVAL_SEED)
        )
        assert not shown & asked
    for task in TASKS:
        plain = [row["prompt"] for row in rows(task, 50, EVAL_SEED, True)]
        assert plain == [row["prompt"] for row in rows(task, 50, EVAL_SEED, False)]


def test_a_runs_files_and_stages(tmp_path):
    for name in ("lookup", "lookup_alone"):
        prepare(tmp_path / name, name)
        stages = get_stages(name)
        assert list(stages) == ["sft", "grpo"]
        for config in stages.values():
            path = config.data.path.replace("{workdir}", str(tmp_path / name))
            with open(path) as file:
                row = json.loads(file.readline())
            assert ("tools" in row) == (name == "lookup" and config.algorithm.name == "SFT")
        assert bool(stages["grpo"].environment.tools) == (name == "lookup")
    with pytest.raises(ConfigError, match="tool_tasks.py:find: there are calculator, .*_alone"):
        get_stages("find")


def test_a_tool_that_is_busy_once():
    space = {"__file__": "tools.py"}
    source = tool_tasks.TOOLS.replace(
        'PEOPLE = json.loads((pathlib.Path(__file__).parent / "people.json").read_text())', ""
    )
    exec(source, space)
    space["PEOPLE"] = [{"age": 34}, {"age": 35}]
    busy = 0
    for seed in range(100):
        tool = space["BusyAge"](seed)
        try:
            assert tool(1) == 35
        except RuntimeError:
            busy += 1
        assert tool(1) == 35
    assert 30 < busy < 70
