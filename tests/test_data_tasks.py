"""Built-in tasks: prompts, answers, splits, verifiers, costs."""

import itertools

import numpy as np
import pytest

from hjax.data.tasks import TASKS, get_task
from hjax.data.tasks.countdown import evaluate
from hjax.errors import ConfigError, DataError

ALL = sorted(TASKS)
# One response answers a prompt; the others are played (test_environments_builtin.py).
ANSWERED = [name for name in ALL if not TASKS[name].environment]


def columns_of(records):
    return {key: [r[key] for r in records] for key in records[0] if key != "prompt"}


def test_the_tasks_there_are():
    assert ALL == [
        "addition",
        "calculator",
        "code_sums",
        "countdown",
        "fee_schedule",
        "harvest",
        "maze",
        "mixed_reversal",
        "multiplication",
        "parity",
        "reversal",
        "sokoban",
        "sorting",
        "twenty_questions",
    ]


@pytest.mark.parametrize("name", ALL)
def test_splits_are_disjoint_deterministic_and_without_repeats(name):
    task = get_task(name)
    train = [r["prompt"] for r in task.examples("train", seed=3, count=500)]
    held_out = [r["prompt"] for r in task.examples("eval", seed=4, count=100)]
    assert len(set(train)) == 500 and len(set(held_out)) == 100
    assert not set(train) & set(held_out)
    assert [r["prompt"] for r in get_task(name).examples("train", seed=3, count=500)] == train
    assert [r["prompt"] for r in task.examples("train", seed=5, count=500)] != train


@pytest.mark.parametrize("name", ANSWERED)
def test_text_fits_alphabet_and_length(name):
    task = get_task(name)
    tokenizer, rng = task.tokenizer(), np.random.default_rng(0)
    for record in task.examples("train", 0, 200):
        response = task.demonstration(record, rng)
        tokens = tokenizer.encode(record["prompt"] + response)
        assert tokenizer.decode(tokens) == record["prompt"] + response
        assert len(response) + 1 <= task.response_length


@pytest.mark.parametrize("name", [name for name in ANSWERED if name != "harvest"])
def test_demonstrations_are_right_and_nothing_is_wrong(name):
    task = get_task(name)
    records = task.examples("train", 0, 200)
    prompts, columns = [r["prompt"] for r in records], columns_of(records)
    demonstrations = [task.demonstration(r, np.random.default_rng(0)) for r in records]
    assert task.correct(prompts, demonstrations, **columns) == [True] * 200
    assert task.reward(prompts, demonstrations, **columns) == [1.0] * 200
    assert task.reward(prompts, [""] * 200, **columns) == [0.0] * 200


def one(task, prompt, response, **columns):
    lists = {key: [value] for key, value in columns.items()}
    return task.reward([prompt], [response], **lists)[0]


def test_addition_by_hand():
    records = {r["prompt"]: r["answer"] for r in get_task("addition").examples("train", 0, 8000)}
    for prompt, answer in itertools.islice(records.items(), 100):
        a, b = prompt.removesuffix("=").split("+")
        assert int(a) + int(b) == int(answer) and len(a) <= 2
    assert one(get_task("addition"), "12+34=", "46", answer="46") == 1.0
    assert one(get_task("addition"), "12+34=", "47", answer="46") == 0.0
    assert one(get_task("addition"), "12+34=", "466", answer="46") == 0.0


def test_partial_credit_is_a_share_of_the_places():
    task = get_task("sorting", partial=0.5)
    assert one(task, "52413>", "12345", answer="12345") == 1.0
    assert one(task, "52413>", "12354", answer="12345") == pytest.approx(0.5 * 3 / 5)
    assert one(task, "52413>", "1234512345", answer="12345") == pytest.approx(0.5 * 5 / 10)
    assert one(task, "52413>", "", answer="12345") == 0.0


def test_blanks_around_an_answer_do_not_matter():
    assert one(get_task("sorting"), "52413>", " 12345\n", answer="12345") == 1.0


def test_reversal_and_sorting_answers():
    for record in get_task("reversal", length=4, letters=3).examples("train", 0, 20):
        assert record["answer"] == record["prompt"][3::-1] and set(record["answer"]) <= set("abc")
    for record in get_task("sorting").examples("train", 0, 20):
        assert record["answer"] == "".join(sorted(record["prompt"][:5]))


def test_parity_judges_only_the_last_bit():
    task = get_task("parity", length=5)
    assert task.demonstration({"prompt": "11010?"}, np.random.default_rng(0)) == "10011"
    judged = [one(task, "11010?", r, answer="1") for r in ("10011", "1", "00001", "10010", "x1")]
    assert judged == [1.0, 1.0, 1.0, 0.0, 0.0]
    assert one(task, "11010?", "100111", answer="1") == 0.0  # longer than the prompt


@pytest.mark.parametrize(
    "expression, value",
    [
        ("2*3+7", 13),
        ("7+2*3", 13),
        ("9-2-3", 4),
        ("3-2*4", -5),
        ("08+1", 9),
        ("2**3", None),
        ("2+", None),
        ("-2+3", None),
        ("", None),
        ("(1+2)", None),
        ("1 + 2", None),
        ("9999999", None),
        ("__import__('os')", None),
        ("²+1", None),
    ],
)
def test_countdown_arithmetic(expression, value):
    assert evaluate(expression) == value


def test_countdown_takes_any_expression_with_exactly_its_numbers():
    task = get_task("countdown", partial=0.1)
    columns = {"numbers": [2, 3, 7], "target": 13}
    score = {
        r: one(task, "2 3 7:13=", r, **columns)
        for r in ("2*3+7", "7+3*2", "6+7", "2*3+7+2-2", "2+3+7", "13", "2*3+")
    }
    assert score == {
        "2*3+7": 1.0,
        "7+3*2": 1.0,
        "6+7": 0.0,
        "2*3+7+2-2": 0.0,
        "2+3+7": 0.1,
        "13": 0.0,
        "2*3+": 0.0,
    }


def test_harvest_pays_for_copied_digits_and_charges_for_poison():
    task = get_task("harvest")
    prompts = ["3714="] * 6
    responses = ["3714", "314", "", "413", "77", "31"]
    assert task.reward(prompts, responses) == pytest.approx([1.0, 8 / 15, 0, 0, 0, 4 / 15])
    assert task.cost(prompts, responses) == [1.0, 0.0, 0.0, 0.0, 1.0, 0.0]
    assert task.has_cost and task.correct(prompts, responses) is None


def test_harvest_demonstrations_start_modest_and_costly():
    task = get_task("harvest", length=8, copy=0.3, copy_poisonous=0.3)
    records = task.examples("train", 0, 4000)
    rng = np.random.default_rng(1)
    prompts = [r["prompt"] for r in records]
    responses = [task.demonstration(r, rng) for r in records]
    assert np.mean(task.reward(prompts, responses)) == pytest.approx(0.3, abs=0.02)
    # One digit in three is poisonous: 1 - (1 - 0.3 / 3)**8.
    assert np.mean(task.cost(prompts, responses)) == pytest.approx(1 - 0.9**8, abs=0.03)


def test_small_space_names_the_largest_possible_count():
    task = get_task("parity", length=4)
    train, held_out = task.largest_count("train"), task.largest_count("eval")
    assert train + held_out == 16
    assert len(task.examples("train", 0, train)) == train
    with pytest.raises(DataError, match=f"ask for at most {train}, or enlarge.*length=4"):
        task.examples("train", 0, train + 1)


def test_large_spaces_draw_all_of_their_prompts():
    task = get_task("sorting", length=40)
    assert task.largest_count("train") is None
    digits = "".join(r["prompt"][:-1] for r in task.examples("train", 0, 200))
    counts = [digits.count(d) for d in "0123456789"]
    assert min(counts) > 600 and max(counts) < 1000  # 800 expected of each, deviation 27


def test_records_are_the_callers_own():
    task = get_task("addition")
    task.examples("train", 0, 1)[0]["answer"] = "spoilt"
    assert task.examples("train", 0, 1)[0]["answer"] != "spoilt"


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: get_task("adition"), "no task 'adition': did you mean addition"),
        (lambda: get_task("sorting", lenght=4), "no option 'lenght': did you mean length"),
        (lambda: get_task("sorting", length=0), "length is 0; it must be an integer from 1 to 64"),
        (lambda: get_task("sorting", length=2.5), "length is 2.5; it must be an integer"),
        (lambda: get_task("sorting", partial=1.0), "from 0.0 up to below 1.0"),
        (lambda: get_task("addition").cost(["1+1="], ["2"]), "has no cost.*harvest"),
    ],
)
def test_bad_options_are_named(call, message):
    with pytest.raises(ConfigError, match=message):
        call()


def test_bad_split():
    with pytest.raises(DataError, match="no split 'test'; there are train and eval"):
        get_task("sorting").examples("test", 0, 1)
