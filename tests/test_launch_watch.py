"""Episodes that a person watches or plays: ``generate`` with an environment, its input scripted."""

import io
import json
import re
import sys

import pytest
from helpers import models_loaded_once, save_model

from hjax.data.tokenizer import Tokenizer
from hjax.launch import evaluate, generate

TOKENIZER = Tokenizer.characters("0123456789?:. \nabcdefghijklmnopqrstuvwxyz")
ENVIRONMENT = '''
import hjax

class Sum(hjax.Environment):
    """Adds what is said up to the row's goal; `fresh` of a 9; no words; 0 breaks it."""
    def reset(self, task, seed):
        self.sum, self.goal = 0, task["goal"]
        return hjax.Observation(task["prompt"])

    def step(self, action):
        if not action.isdigit():
            return hjax.Step(hjax.Observation("a digit?"), valid=False)
        if action == "0": raise ValueError("no zero here")
        self.sum += int(action)
        done = self.sum >= self.goal
        text = "" if done else f"{self.sum}: more?"
        return hjax.Step(hjax.Observation(text), reward=0.5, done=done, fresh=action == "9",
                         metrics={"sum": self.sum})
'''
ROWS = [{"prompt": f"add up to {goal}:", "goal": goal} for goal in (3, 12, 40)]


@pytest.fixture(scope="module", autouse=True)
def loaded_once():
    with models_loaded_once():
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("watch")
    save_model(folder / "model", tokenizer=TOKENIZER, vocab_size=TOKENIZER.vocab_size)
    save_model(folder / "ids")
    (folder / "sum.py").write_text(ENVIRONMENT)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return folder


@pytest.fixture
def watched(folder, monkeypatch, capsys):
    """Runs the command in the folder with lines as its input; returns what it printed."""
    monkeypatch.chdir(folder)

    def run(lines, *flags, status=0):
        monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
        played = ["--environment=sum.py:Sum", "--data=rows.jsonl"]
        assert generate.main(["--model=model", *played, *flags]) == status
        shown = capsys.readouterr()
        return shown.err if status else shown.out

    return run


def test_a_person_acts(watched):
    shown = watched(
        "1\nwhat?\n2\n"  # the first episode: done
        "\n9\nÄ\n/next\n"  # the second: a fresh observation, an unknown character, left
        "\n0\n",  # the third: the environment breaks
        "--human",
    )
    shown = re.sub(r"seed \d+", "seed S", shown)
    shown = re.sub(r"Traceback .*\n(  .*\n)*", "", shown)
    assert shown.splitlines() == [
        "/next leaves an episode, /exit or Ctrl-D ends",
        "task 1 of 3, seed S",
        "add up to 3:",
        "> 1",
        "1: more?",
        "[reward 0.5, sum 1]",
        "> what?",
        "a digit?",
        "[reward 0, not valid]",
        "> 2",
        "[reward 0.5, sum 3]",
        "[done, return 1, 3 turns]",
        "Enter plays task 2: ",
        "task 2 of 3, seed S",
        "add up to 12:",
        "> 9",
        "9: more?",
        "[reward 0.5, sum 9]",
        "[the observation replaces what was said and seen before]",
        "> Ä",
        "tokenizer model: the character 'Ä' of 'Ä' is not in its vocabulary of "
        f"{TOKENIZER.vocab_size} tokens; change the text or tokenizer",
        "> /next",
        "Enter plays task 3: ",
        "task 3 of 3, seed S",
        "add up to 40:",
        "> 0",
        "ValueError: no zero here",
        "[exception, no return, 1 turn]",
    ]


def test_a_persons_turns_have_the_models_limits(watched):
    shown = watched("12345\n1\nab\n", "--human", "--turn_tokens=3", "--max_turns=2")
    assert "> 12345\n5 tokens, and a turn has 3\n> 1\n1: more?" in shown
    assert "[max_turns, return 0.5, 2 turns]\nEnter plays task 2: \n" in shown
    assert watched("/exit\n5\n", "--human").endswith("\n> /exit\n\n")


@pytest.mark.extended
def test_the_model_plays_the_episodes_of_an_evaluation(watched, tmp_path):
    limits = ["--temperature=0", "--turn_tokens=2", "--max_turns=3", "--seed=5"]
    shown = watched("\n\n", *limits)
    flags = ["--model=model", "--environment=sum.py:Sum", "--data=rows.jsonl", *limits]
    assert evaluate.main([*flags, f"--output={tmp_path}/o.jsonl"]) == 0
    rows = [json.loads(line) for line in (tmp_path / "o.jsonl").read_text().splitlines()]
    assert len(rows) == 3 and sum(len(row["turns"]) for row in rows) > 3
    expected = "/exit or Ctrl-D ends\n"
    for number, row in enumerate(rows, 1):
        expected += f"task {number} of 3, seed {row['seed']}\n{row['prompt']}\n"
        for turn in row["turns"]:
            observed = turn["observation"] and turn["observation"] + "\n"
            invalid = "" if turn["valid"] else ", not valid"
            total = "".join(f", sum {value:g}" for value in turn.get("metrics", {}).values())
            expected += f"> {turn['action']}\n{observed}"
            expected += f"[reward {turn['reward']:g}{invalid}{total}]\n"
        count = len(row["turns"])
        expected += f"[{row['stop_reason']}, return {row['reward']:g}, {count} turn"
        expected += "s]\n" if count != 1 else "]\n"
        expected += f"Enter plays task {number + 1}: \n" if number < 3 else ""
    assert shown == expected


@pytest.mark.parametrize("flags, line", [
    (["--task=sorting"], "PATH.py:NAME, or --task=NAME"),
    (["--environment=", "--data=", "--task=sorting"], "--task=sorting has no environment"),
    (["--data="], "give --data=FILE with --environment"),
    (["--data=none.jsonl"], "--data=none.jsonl: there is no such file"),
    (["--environment="], "--data is for episodes; give --task=NAME or --environment=PATH.py:NAME"),
    (["--environment=", "--data=", "--human"], "--human is for episodes"),
    (["--environment=sum.py:Some"], "sum.py has no Some; it has Sum"),
    (["--prompt=1"], "--prompt is for answers"),
    (["--choice=1"], "--choice is for answers"),
    (["--json"], "--json is for answers"),
    (["--max_turns=-1"], "--max_turns=-1: must be 0 or more"),
    (["--model=ids", "--human"], "an environment speaks text, and ids has no tokenizer"),
    (["--chat", "--human"], "--chat: model has no chat template"),
])  # fmt: skip
def test_what_cannot_be_watched_is_one_line(flags, line, watched):
    shown = watched("", *flags, status=2)
    assert line in shown and shown.count("\n") == 1
