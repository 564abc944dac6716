"""`python -m hjax.launch.evaluate`: questions asked, answers judged, measures with their errors."""

import itertools
import json
import math
import pathlib
import statistics

import pytest
from helpers import ONE_DEVICE, models_loaded_once, read_rows, save_model, trainer_of

import hjax
from hjax.data.dataset import Dataset
from hjax.data.tasks import get_task
from hjax.data.tokenizer import Tokenizer
from hjax.errors import RunError
from hjax.launch import evaluate
from hjax.rewards.graders import load_grader, task_grader
from hjax.rollout.language_model import Completion
from hjax.run.grading import estimate_metrics, sample_and_grade

TOKENIZER = Tokenizer.characters("0123456789+=>")
REWARDS = """
def last_is_even(prompts, responses, **columns):
    return [float(r[-1:] in list("02468")) for r in responses]

last_is_even.answers = lambda responses: [r[-1:] or None for r in responses]

def length(prompts, responses, **columns):
    assert len(prompts) == len(columns["id"]) == len(columns["response_tokens"])
    return [len(r) / 10 for r in responses]

def partly(prompts, responses, **columns):
    return [None if i == 1 else 1.0 for i in columns["id"]]

def silent(prompts, responses, **columns):
    return [None for _ in responses]

def broken(prompts, responses, **columns):
    return [1 / 0 for _ in responses]

def odd_answers(prompts, responses, **columns):
    return [1.0 for _ in responses]

odd_answers.answers = lambda responses: responses[1:]

def no_answers(prompts, responses, **columns):
    return [1.0 for _ in responses]

no_answers.answers = 3

def half(prompts, responses, **columns):
    return [0.5 for _ in responses]

def three(prompts, responses, columns):
    return []
"""
QUESTIONS = [{"prompt": f"{i}+{i}=", "id": i, "answer": str(2 * i)} for i in range(4)]


@pytest.fixture(scope="module", autouse=True)
def loaded_once():
    with models_loaded_once():
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("evaluate")
    save_model(folder / "model", tokenizer=TOKENIZER)
    save_model(folder / "ids")
    save_model(folder / "chat", tokenizer=Tokenizer.characters("01234567+=>\n"))
    (folder / "chat" / "chat_template.jinja").write_text("{{ messages[0].content }}>")
    (folder / "rewards.py").write_text(REWARDS)
    (folder / "q.jsonl").write_text("\n".join(map(json.dumps, QUESTIONS)))
    ids = [{"prompt_tokens": [1, 4 + i], "id": i} for i in range(3)]
    (folder / "ids.jsonl").write_text("\n".join(map(json.dumps, ids)))
    return folder


@pytest.fixture
def said(folder, monkeypatch, capsys):
    """Runs the command in the folder; the JSON that it says last."""
    monkeypatch.chdir(folder)

    def run(*flags):
        assert evaluate.main([*flags, "--json"]) == 0
        return json.loads(capsys.readouterr().out.splitlines()[-1])

    return run


def over(values):
    """Mean and standard error, by the standard library."""
    return {
        "mean": pytest.approx(statistics.fmean(values), abs=1e-6),
        "stderr": pytest.approx(statistics.stdev(values) / len(values) ** 0.5, abs=1e-6),
    }


def test_greedy_rewards_are_those_of_the_answers(said, folder):
    data = ["--model=model", "--data=q.jsonl", "--reward=rewards.py:length"]
    found = said(*data, "--max_new_tokens=6", "--batch=3")
    prompts = [row["prompt"] for row in QUESTIONS]
    answers = hjax.load_model(folder / "model").generate(prompts, 6, 0.0)
    assert found["reward"] == over([len(answer.text) / 10 for answer in answers])
    assert (found["questions"], found["samples"], found["temperature"]) == (4, 1, 0.0)
    assert found["tokens"] == sum(len(answer.tokens) for answer in answers)
    cut = sum(answer.finish_reason == "length" for answer in answers)
    assert found["truncated"] == cut / 4 and found["unscored"] == 0
    assert not {"accuracy", "pass@1", "maj@1"} & found.keys()  # there is no right and wrong


@pytest.mark.extended
def test_several_devices_find_what_one_finds(said):
    """A last batch and a question's samples that do not divide over the copies, too."""
    asked = ["--model=model", "--data=q.jsonl", "--reward=rewards.py:last_is_even", "--samples=3",
             "--max_new_tokens=6", "--batch=9"]  # fmt: skip
    one, *others = (said(*asked, *more) for more in ([], ["--copies=4"], ["--tensor=2"]))
    assert one.pop("tokens") > 0 and one.pop("seconds") > 0
    for other in others:
        assert one.items() <= other.items()


def test_samples_are_counted_by_listing_all_subsets(said, tmp_path):
    flags = ["--model=model", "--data=q.jsonl", "--reward=rewards.py:last_is_even"]
    output = tmp_path / "rows.jsonl"
    drawn = ["--samples=5", "--max_new_tokens=3", "--seed=4", "--batch=12", "--limit=3"]
    found = said(*flags, *drawn, f"--output={output}")
    rows = read_rows(tmp_path, "rows.jsonl")
    assert [(r["question"], r["sample"]) for r in rows] == list(
        itertools.product(range(3), range(5))
    )
    questions = [rows[i : i + 5] for i in range(0, 15, 5)]
    assert len({row["response"] for row in questions[0]}) > 1
    for row in rows:
        assert row["reward"] == float(row["response"][-1:] in list("02468"))
        assert row["answer"] == (row["response"][-1:] or None)
    assert found["temperature"] == 1.0
    assert (
        found["accuracy"]
        == found["reward"]
        == over([statistics.fmean(r["reward"] for r in rows) for rows in questions])
    )

    def mean_over_subsets(value, rows, k):
        return statistics.fmean(map(value, itertools.combinations(rows, k)))

    def vote(rows):
        votes = [row["answer"] for row in rows if row["answer"] is not None]
        if not votes:
            return 0.0
        most = max(map(votes.count, votes))
        tied = {vote for vote in votes if votes.count(vote) == most}
        return statistics.fmean(vote in list("02468") for vote in tied)

    for k in (1, 2, 4):
        passed = [mean_over_subsets(lambda s: any(r["reward"] for r in s), q, k) for q in questions]
        assert found[f"pass@{k}"] == over(passed)
        assert found[f"maj@{k}"] == over([mean_over_subsets(vote, q, k) for q in questions])
    assert not {"pass@5", "pass@8", "maj@5"} & found.keys()
    again = tmp_path / "again.jsonl"
    assert said(*flags, *drawn, f"--output={again}") | {"seconds": 0} == found | {"seconds": 0}
    assert again.read_text() == output.read_text()


class Scripted:
    """Stands for a model: what it answers to which prompt, sample after sample."""

    def __init__(self, answers):
        self.answers = {prompt: itertools.cycle(texts) for prompt, texts in answers.items()}
        self.rows = []

    def generate(self, prompts, seed, **options):
        self.rows.append(len(prompts))
        texts = [next(self.answers[prompt[0]]) for prompt in prompts]
        return [Completion([5], text, [0.0], "stop") for text in texts]


def test_measures_by_hand(tmp_path):
    """Two questions of four samples: 3 of 4 right with one wrong vote, and 1 of 4 right."""
    model = Scripted({1: ["#### 7", "#### 7", "#### 8", "#### 7.0"], 2: ["", "#### 2", "3", "no"]})
    questions = Dataset([[1], [2]], ["a", "b"], {"answer": ["#### 7", "2"]})
    grader, written = load_grader("math", 60, "--reward"), []
    judged = sample_and_grade(model, questions, grader, 4, 4, 0, lambda *_: None, written.extend)
    assert model.rows == [4, 4] and written == judged
    found = estimate_metrics(judged, 4, grader)
    expected = {
        "reward": (3 / 4, 1 / 4),
        "accuracy": (3 / 4, 1 / 4),
        "pass@1": (3 / 4, 1 / 4),
        "pass@2": (1, 3 / 6),
        "pass@4": (1, 1),
        "maj@1": (3 / 4, 1 / 4),
        # Of the 6 pairs 3 have both sevens, 3 tie with 8; of the others the 3 with "2" decide.
        "maj@2": ((3 + 3 / 2) / 6, 3 / 6),
        "maj@4": (1, 1),
    }
    assert list(found) == list(expected)
    for name, (a, b) in expected.items():
        assert found[name].mean == pytest.approx((a + b) / 2), name
        # With two values their deviation from the mean is |a - b| / 2 each.
        assert found[name].stderr == pytest.approx(abs(a - b) / 2), name


@pytest.mark.parametrize(
    "batch, calls", [(1, [1] * 9), (4, [3, 3, 3]), (7, [6, 6]), (9, [9]), (100, [9])]
)
def test_a_batch_has_whole_questions_where_they_fit(batch, calls):
    model = Scripted({n: ["1"] for n in (1, 2, 3)})
    questions = Dataset([[1], [2], [3]], ["a", "b", "c"], {"answer": ["1"] * 3})
    sizes = []
    sample_and_grade(
        model, questions, load_grader("math", 60, "--reward"), 3, batch, 0,
        lambda *_: None, lambda rows: sizes.append(len(rows)),
    )  # fmt: skip
    assert model.rows == calls and sum(sizes) == 9 and all(size % 3 == 0 for size in sizes)


def test_what_is_unscored_is_left_out(said):
    flags = ["--model=model", "--data=q.jsonl", "--max_new_tokens=2"]
    found = said(*flags, "--reward=rewards.py:partly")
    assert found["unscored"] == 0.25 and found["reward"] == {"mean": 1.0, "stderr": 0.0}
    assert found["accuracy"]["mean"] == 1.0
    [one] = [said(*flags, "--limit=1", "--reward=rewards.py:partly")["reward"]]
    assert one == {"mean": 1.0, "stderr": None}


def test_a_home_directory_and_an_output_that_cannot_be_written(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HOME", str(folder))
    flags = ["--model=~/model", "--data=~/q.jsonl", "--reward=math", "--max_new_tokens=2"]
    assert evaluate.main(flags) == 0
    monkeypatch.setattr(evaluate, "_new_file", lambda name: pathlib.Path("/dev/full"))
    assert evaluate.main([*flags, "--output=full.jsonl"]) == 1
    assert "/dev/full could not be written: a device, not a file" in capsys.readouterr().err
    assert pathlib.Path("/dev/full").exists()


def test_token_ids_alone(said, tmp_path):
    (tmp_path / "ends.py").write_text(
        "def reward(prompts, responses, **columns):\n"
        "    assert prompts == columns['prompt_tokens'] and responses[0][0] >= 0\n"
        "    return [r[0] / 16 for r in responses]\n"
    )
    flags = ["--model=ids", "--data=ids.jsonl", f"--reward={tmp_path}/ends.py:reward"]
    found = said(*flags, "--max_new_tokens=2", "--stop=9")
    answers = hjax.load_model("ids").generate([[1, 4 + i] for i in range(3)], 2, 0.0, stop=[9])
    assert found["reward"] == over([answer.tokens[0] / 16 for answer in answers])


def test_a_chat_with_an_instruction(said, tmp_path):
    flags = ["--model=chat", "--data=q.jsonl", "--reward=math", "--limit=1", "--max_new_tokens=1"]
    said(*flags, "--chat", "--instruction=1=", f"--output={tmp_path}/a.jsonl")
    [row] = read_rows(tmp_path, "a.jsonl")
    assert row["prompt"] == "0+0=\n1=>"


@pytest.mark.extended
def test_a_run_is_evaluated_as_it_evaluates_itself(said, tmp_path):
    workdir = tmp_path / "run"
    changes = {"steps": 1, "checkpoint.every": 1, "eval.every": 1}
    changes |= {"warm_start.steps": 30, "warm_start.learning_rate": 2e-2}
    with trainer_of("GRPO", changes | ONE_DEVICE, workdir=workdir) as trainer:
        trainer.run()
        trained = trainer.evaluate()
    assert 0 < trained["eval/accuracy"] < 1
    found = said(f"--model={workdir}", "--task=sorting", "--limit=16")
    assert found["task_options"]["length"] == 3 and found["max_new_tokens"] == 4
    assert found["questions"] == 16
    assert found["reward"]["mean"] == pytest.approx(trained["eval/reward"], abs=1e-6)
    assert found["accuracy"]["mean"] == pytest.approx(trained["eval/accuracy"], abs=1e-6)
    shorter = said(f"--model={workdir}", "--task=sorting:length=2,partial=0.0", "--limit=5")
    assert shorter["task_options"] == {"partial": 0.0, "length": 2} and shorter["questions"] == 5


def test_a_task_without_right_and_wrong_has_rewards_alone():
    task = get_task("harvest", length=2)
    records = task.examples("eval", 0, 2)
    questions = Dataset(
        [[1], [2]], [r["prompt"] for r in records], {"prompt": [r["prompt"] for r in records]}
    )
    grader = task_grader(task, 60)
    model = Scripted({1: [records[0]["prompt"][:2]], 2: ["x"]})  # all of it, nothing of it
    judged = sample_and_grade(model, questions, grader, 1, 2, 0, lambda *_: None, lambda rows: None)
    assert [row.reward for row in judged] == [1.0, 0.0]
    assert list(estimate_metrics(judged, 1, grader)) == ["reward"]


def test_a_task_with_a_reward_of_ones_own_keeps_its_right_and_wrong(said):
    flags = ["--model=model", "--task=addition", "--limit=3", "--reward=rewards.py:half"]
    found = said(*flags)
    assert found["reward"]["mean"] == 0.5 and found["accuracy"]["mean"] in (0, 1 / 3, 2 / 3, 1)


@pytest.mark.extended
def test_gsm8k_end_to_end(said, test_data, tmp_path):
    """Trained weights and real questions: it scores nothing, and all of the way is there."""
    output = tmp_path / "rows.jsonl"
    found = said(
        f"--model={test_data}/weights/stories260K-hf", f"--data={test_data}/gsm8k/test.jsonl",
        "--limit=6", "--reward=math", "--max_new_tokens=8", "--samples=2", f"--output={output}",
    )  # fmt: skip
    assert found["questions"] == 6 and found["accuracy"]["mean"] == 0.0
    assert found["pass@2"] == {"mean": 0.0, "stderr": 0.0} == found["maj@2"]
    rows = read_rows(tmp_path, "rows.jsonl")
    assert rows[0]["prompt"].startswith("Janet’s ducks lay 16 eggs") and rows[0]["answer"] is None


@pytest.mark.slow
def test_two_hundred_held_out_questions_of_gsm8k(said, test_data):
    """All that is drawn, read and graded of 200 questions, greedily."""
    found = said(
        f"--model={test_data}/weights/stories260K-hf", f"--data={test_data}/gsm8k/test.jsonl",
        "--limit=200", "--reward=math", "--max_new_tokens=64",
    )  # fmt: skip
    assert found["questions"] == 200 and 0 <= found["accuracy"]["mean"] < 0.1
    assert found["accuracy"]["stderr"] is not None and found["unscored"] == 0


def test_a_table_for_a_person(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    flags = ["--model=model", "--data=q.jsonl", "--reward=rewards.py:last_is_even"]
    assert evaluate.main([*flags, "--samples=2", "--max_new_tokens=2"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert " ".join(lines[0]) == "q.jsonl: 4 questions, 2 answers each, temperature 1"
    table = {line[0]: line[1:] for line in lines if len(line) == 3}
    assert list(table) == ["reward", "accuracy", "pass@1", "pass@2", "maj@1", "maj@2"]
    assert all(0 <= float(mean) <= 1 and float(error) >= 0 for mean, error in table.values())
    assert "tokens in" in " ".join(lines[-1]) and "cut at 2 tokens" in " ".join(lines[-1])
    (folder / "part.py").write_text(
        "def part(prompts, responses, **_): return [0.1, 1.0] * (len(responses) // 2)"
    )
    assert evaluate.main([*flags[:2], "--reward=part.py:part", "--max_new_tokens=2"]) == 0
    told = capsys.readouterr().out
    assert "\nno accuracy and pass@k: a reward is 0.1, neither 0 nor 1\n" in told


def test_help(capsys):
    assert evaluate.main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(len(line) <= 100 for line in shown.splitlines())
    assert "\\boxed{} or" in shown and "countdown" in shown and "{s" not in shown


@pytest.mark.parametrize(
    "name, line",
    [
        ("broken", "reward function broken failed for 2 of 2 responses (exception 2)"),
        ("silent", "reward function silent scored none of 4 responses"),
        ("odd_answers", "answers of the reward function odd_answers returned 1 for 2 responses"),
    ],
)
def test_a_grader_that_fails_is_told(name, line, folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    flags = ["--model=model", "--data=q.jsonl", f"--reward=rewards.py:{name}", "--batch=2"]
    assert evaluate.main([*flags, "--max_new_tokens=2"]) == 1
    shown = capsys.readouterr()
    assert line in shown.err and shown.err.count("\n") == 1 and shown.out == ""


def test_rows_before_a_failure_stay(folder, tmp_path):
    model = Scripted({1: ["1"], 2: ["1"]})
    grader = load_grader(f"{folder}/rewards.py:length", 60, "--reward")
    questions = Dataset([[1], [2]], ["a", "b"], {"id": [0, 1]})
    written = []

    def write(rows):
        if written:
            raise RunError("disk full")
        written.extend(rows)

    with pytest.raises(RunError, match="disk full"):
        sample_and_grade(model, questions, grader, 1, 1, 0, lambda *_: None, write)
    assert len(written) == 1 and math.isclose(written[0].reward, 0.1, rel_tol=1e-6)


DATA = ["--model=model", "--data=q.jsonl"]
MATH = [*DATA, "--reward=math"]
WRONG = {
    "no model": (["--data=q.jsonl", "--reward=math"], "--model is missing"),
    "another model": (["--model=no", *MATH[1:]], "no model directory 'no'"),
    "no data": (["--model=model"], "--reward=GRADER or --environment=PATH.py:NAME, or --task"),
    "both": ([*MATH, "--task=sorting"], "--reward=GRADER or --environment=PATH.py:NAME, or --task"),
    "no file": ([MATH[0], "--data=x.jsonl", MATH[2]], "--data=x.jsonl: there is no such file"),
    "no reward": (DATA, "--reward is missing: path.py:name, or math"),
    "another reward": ([*DATA, "--reward=maths"], "--reward=maths: it must be path.py:name, or"),
    "no function": ([*DATA, "--reward=rewards.py:len"], "--reward='rewards.py:len': rewards.py h"),
    "a signature": ([*DATA, "--reward=rewards.py:three"], "three(prompts, responses, columns) ca"),
    "answers": ([*DATA, "--reward=rewards.py:no_answers"], "answers is 3, not a function"),
    "no column": (["--model=ids", "--data=ids.jsonl", "--reward=math"], "no column with right"),
    "samples": ([*MATH, "--samples=0"], "--samples=0: must be 1 or more"),
    "greedy": ([*MATH, "--samples=4", "--temperature=0"], "gives the same answer 4 times"),
    "length": ([*MATH, "--max_new_tokens=60"], "set it to 59 at most"),
    "limit": ([*MATH, "--limit=-1"], "--limit=-1: must be 0 or more"),
    "seconds": ([*MATH, "--timeout_seconds=0"], "seconds=0.0: must be above 0 to 1e8 seconds"),
    "output": ([*MATH, "--output=rewards.py"], "--output=rewards.py: its name must end in .jsonl"),
    "old output": ([*MATH, "--output=q.jsonl"], "--output=q.jsonl is there already"),
    "output folder": ([*MATH, "--output=x/a.jsonl"], "--output=x/a.jsonl: there is no directory x"),
    "chat": ([*MATH, "--chat"], "--chat: model has no chat template"),
    "task": (["--model=model", "--task=sort"], "no task 'sort': did you mean sorting?"),
    "option": (["--model=model", "--task=sorting:lenth=3"], "did you mean length?"),
    "option value": (["--model=model", "--task=sorting:length=x"], "option length is 'x'; it must"),
    "option form": (["--model=model", "--task=sorting:3"], "options are NAME:OPTION=VALUE,..."),
    "task of ids": (["--model=ids", "--task=sorting"], "is text, and ids has no tokenizer"),
    "task letters": (["--model=model", "--task=reversal"], "the character"),
    "task chat": (["--model=chat", "--task=sorting", "--chat"], "are for --data"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_input_is_one_line_and_nothing_is_written(case, folder, monkeypatch, capsys):
    flags, line = WRONG[case]
    monkeypatch.chdir(folder)
    before = sorted(folder.rglob("*"))
    assert evaluate.main([*flags, *([] if "--output" in str(flags) else ["--output=o.jsonl"])]) == 2
    shown = capsys.readouterr()
    assert line in shown.err and shown.err.count("\n") == 1 and shown.out == ""
    assert sorted(folder.rglob("*")) == before


PLAYS = '''
import hjax

class Add(hjax.Environment):
    """Asks for a sum, again and again; counts what was said in its last metrics."""
    def reset(self, task, seed):
        self.turns, self.turn = task["id"] + 1, 0
        if task["id"] == 3: raise ValueError("no such task")
        return hjax.Observation(task["prompt"])

    def step(self, action):
        self.turn += 1
        done = self.turn == self.turns
        return hjax.Step(hjax.Observation("1+1="), reward=0.5 if done else 0.25, done=done,
                         valid=False, metrics={"letters": len(action)})
'''


def test_an_environment_is_played(said, folder, tmp_path):
    (folder / "plays.py").write_text(PLAYS)
    output = tmp_path / "episodes.jsonl"
    flags = ["--model=model", "--data=q.jsonl", "--environment=plays.py:Add", "--samples=2"]
    flags += ["--turn_tokens=3", "--batch=1", f"--output={output}", "--seed=3", "--processes=1"]
    found = said(*flags, "--max_turns=2")
    rows = read_rows(tmp_path, "episodes.jsonl")
    # One turn, two, three of which the last is not played, and one that cannot begin.
    assert [row["reward"] for row in rows] == [0.5, 0.5, 0.75, 0.75, 0.5, 0.5, None, None]
    assert [row["stop_reason"] for row in rows][::2] == ["done", "done", "max_turns", "exception"]
    assert "no such task" in rows[-1]["fault"] and rows[0]["seed"] == rows[1]["seed"]
    assert found["reward"]["mean"] == pytest.approx((0.5 + 0.75 + 0.5) / 3)
    assert "accuracy" not in found and found["questions"] == 4
    means, turns = found["episodes"], [turn for row in rows for turn in row["turns"]]
    assert means["turns"] == len(turns) / 8 == 10 / 8 == means["invalid_actions"]
    assert {name: x for name, x in means.items() if name.startswith("stop_")} == {
        "stop_done": 0.5, "stop_exception": 0.25, "stop_max_turns": 0.25
    }  # fmt: skip
    assert means["letters"] == sum(len(turn["action"]) for turn in turns) / 8
    assert found["tokens"] == sum(turn["tokens"] for turn in turns)
    assert all(1 <= turn["tokens"] <= 3 for turn in turns)
    assert {row["prompt"] for row in rows} == {"0+0=", "1+1=", "2+2=", ""}


@pytest.mark.extended
def test_episodes_do_not_depend_on_who_plays_beside(said, folder):
    (folder / "plays.py").write_text(PLAYS)
    flags = ["--model=model", "--data=q.jsonl", "--environment=plays.py:Add", "--samples=2"]
    flags += ["--turn_tokens=3", "--seed=3", "--max_turns=2"]
    first, *others = (said(*flags, *more) for more in (["--batch=3"], ["--batch=5"], ["--batch=1"]))
    for other in others:
        assert other["episodes"] == first["episodes"] and other["tokens"] == first["tokens"]


@pytest.mark.parametrize("flags, line", [
    (["--environment=plays.py:Ad"], "did you mean Add?"),
    (["--environment=plays.py"], "--environment='plays.py': it must look like path.py:name"),
    (["--environment=rewards.py:length"], "it is no class; subclass hjax.Environment"),
    (["--environment=plays.py:Add", "--reward=math"], "leave --reward out"),
    (["--environment=plays.py:Add", "--instruction=x"], "--instruction is for answers"),
    (["--reward=math", "--max_turns=3"], "--max_turns=3 is for an environment"),
    (["--environment=plays.py:Add", "--step_seconds=0"], "--step_seconds=0"),
    (["--environment=plays.py:Add", "--chat"], "--chat"),
])  # fmt: skip
def test_what_cannot_be_played_is_one_line(flags, line, folder, monkeypatch, capsys):
    (folder / "plays.py").write_text(PLAYS)
    monkeypatch.chdir(folder)
    assert evaluate.main(["--model=model", "--data=q.jsonl", *flags]) == 2
    said = capsys.readouterr().err
    assert line in said and said.count("\n") == 1, said
