"""Which prompts a step takes: the hook, running averages of rewards, generation ahead, resumes."""

import shutil

import numpy as np
import pytest
from helpers import ONE_DEVICE, computed, tiny_config, trainer_of
from test_ahead import AHEAD, EVENS

from hjax.algorithms.algorithm import choice_metrics
from hjax.algorithms.difficulty import LOOKED_AT, DifficultyFilter, rewards_by_prompt
from hjax.data.tasks import get_task
from hjax.errors import ConfigError, RunError

FEW = {
    "reward.function": f"{EVENS}:evens",
    "data.task": "",
    "rollout.max_prompt_length": 4,
    "rollout.prompts": 4,
    "steps": 8,
    "algorithm.difficulty": (0.2, 0.6),
    "algorithm.difficulty_again": 3,
}


@pytest.fixture(scope="module")
def few(tmp_path_factory):
    """Four prompts a step of eleven: the same ones come back soon."""
    folder = tmp_path_factory.mktemp("few")
    get_task("sorting").tokenizer().save(folder / "tokenizer")
    (folder / "data.jsonl").write_text("".join(f'{{"prompt": "{i}>"}}\n' for i in range(11)))
    return FEW | {"data.path": f"{folder}/data.jsonl", "tokenizer.path": f"{folder}/tokenizer"}


class Order:
    """Prompts 0 to 9 in their order, over and over."""

    def __init__(self, version):
        self.version, self.at = version, 0

    def next(self, count):
        rows = [(self.at + i) % 10 for i in range(count)]
        self.at += count
        return {"prompts": np.array(rows)[:, None], "choice": {"row": rows}, "step": 3}


def learned(rows, rewards):
    """A step's batch with two responses to each of these rows."""
    mask = np.ones((2 * len(rows), 1), bool)
    row = [each for each in rows for _ in range(2)]
    return {"response_mask": mask, "rewards": np.array(rewards), "choice": {"row": row}}


def test_averages_by_hand():
    """Row 1 is always right, 2 always wrong, 3 in between; an unscored response counts nothing."""
    kept = DifficultyFilter(0.0, 1.0, decay=0.5, again=4)
    kept.add(1, learned([1, 2, 3], [1.0, 1.0, 0.0, np.nan, 0.0, 1.0]))
    found = kept.choose(Order(1), 4)
    assert found["prompts"][:, 0].tolist() == [0, 3, 4, 5] == found["choice"]["row"]
    assert found["choice"]["easy"] == [1] * 4 == found["choice"]["hard"]
    assert found["choice"]["version"] == [1] * 4 and found["step"] == 3
    # .5 * 1 + .5 * .5 = .75: no longer always right.
    kept.add(2, learned([1], [1.0, 0.0]))
    assert kept.choose(Order(1), 2)["choice"]["row"] == [0, 3]  # of weights that do not know it
    assert kept.choose(Order(2), 2)["choice"]["row"] == [0, 1]
    assert kept.choose(Order(4), 3)["choice"]["row"] == [0, 1, 3]
    assert kept.choose(Order(5), 3)["choice"]["row"] == [0, 1, 2]  # four steps later, once again


def test_there_is_always_a_batch():
    kept = DifficultyFilter(0.0, 1.0, decay=0.0, again=0)
    kept.add(1, learned(range(10), [1.0] * 18 + [0.5, 0.5]))
    order = Order(1)
    found = kept.choose(order, 3)
    assert found["choice"]["row"][0] == 9 and len(found["prompts"]) == 3
    assert order.at <= (LOOKED_AT + 1) * 3
    assert found["choice"]["filled"] == [3 - found["choice"]["row"].count(9)] * 3


def test_state_is_json_and_goes_on():
    first = DifficultyFilter(0.0, 1.0, decay=0.3, again=0)
    first.add(1, learned([1, 2], [1.0, 1.0, 0.5, 0.5]))
    first.choose(Order(1), 1)
    first.add(2, learned([2, 7], [1.0, 1.0, 0.0, 0.0]))
    import json

    again = DifficultyFilter(0.0, 1.0, decay=0.3, again=0)
    again.restore(json.loads(json.dumps(first.state())))
    assert again.choose(Order(2), 6)["choice"] == first.choose(Order(2), 6)["choice"]


def test_what_is_missing_is_named():
    with pytest.raises(RunError, match="algorithm.difficulty.*lacks 'choice'"):
        rewards_by_prompt({"rewards": np.ones(2)}, "algorithm.difficulty")
    with pytest.raises(RunError, match="lacks 'rewards'"):
        rewards_by_prompt({"choice": {"row": [1]}}, "algorithm.difficulty")


def test_metrics_are_of_numbers():
    said = {"row": [5, 6], "guess": [0.5, float("nan")], "why": ["a", "b"], "none": [np.nan] * 2}
    batch = {"response_mask": np.ones((2, 1)), "choice": said}
    assert choice_metrics(batch) == {"choice/guess": 0.5}


@pytest.mark.parametrize("value", [(0.5,), (1.0, 0.0), ("a", "b")])
def test_bounds_are_checked(value):
    with pytest.raises(ConfigError, match="algorithm.difficulty"):
        tiny_config("GRPO", {"algorithm.difficulty": value})


@pytest.mark.extended
def test_prompts_are_passed_over_and_a_resume_chooses_the_same(few, tmp_path):
    changes = few | ONE_DEVICE | {"checkpoint.every": 4}
    with trainer_of("PPO", changes, tmp_path / "whole") as trainer:
        rows = [computed(row) for row in trainer.run()]
        known = trainer.algorithm.difficulty.state()["averages"]
    passed = sum(row["choice/easy"] + row["choice/hard"] for row in rows)
    assert passed > 0 and [row["choice/version"] for row in rows] == list(range(8))
    assert len(known) <= 11
    shutil.copytree(tmp_path / "whole", tmp_path / "again")
    shutil.rmtree(tmp_path / "again/checkpoints/8")
    with trainer_of("PPO", changes, tmp_path / "again") as trainer:
        assert [computed(row) for row in trainer.run()] == rows[4:]


@pytest.mark.extended
def test_ahead_of_learning_it_chooses_by_what_the_generating_weights_have_learned(few, tmp_path):
    changes = AHEAD | few | {"checkpoint.every": 4}
    with trainer_of("GRPO", changes, tmp_path / "whole") as trainer:
        rows = [computed(row) for row in trainer.run()]
    # A batch lags one step behind, but for the first of each checkpoint.
    assert [row["choice/version"] for row in rows] == [0, 0, 1, 2, 4, 4, 5, 6]
    assert sum(row["choice/easy"] + row["choice/hard"] for row in rows) > 0
    shutil.copytree(tmp_path / "whole", tmp_path / "again")
    shutil.rmtree(tmp_path / "again/checkpoints/8")
    with trainer_of("GRPO", changes, tmp_path / "again") as trainer:
        assert [computed(row) for row in trainer.run()] == rows[4:]


def test_dynamic_sampling_tells_what_it_drew(few):
    changes = few | ONE_DEVICE | {"algorithm.resample": 2, "algorithm.filter": True, "steps": 3}
    with trainer_of("DAPO", changes) as trainer:
        rows = trainer.run()
        known = trainer.algorithm.difficulty.state()["later"]
    drawn = sum(row["rollout/groups_drawn"] for row in rows)
    kept = sum(row["rollout/groups_kept"] for row in rows)
    assert drawn > kept and len(known) > 0


def test_an_algorithm_of_a_users_chooses(tmp_path):
    (tmp_path / "even.py").write_text(
        "import numpy as np\n"
        "import hjax\n"
        "from hjax.batches import select_rows\n"
        "class Even(hjax.algorithms.GRPO):\n"
        "    def choose(self, order, count):\n"
        "        pool = order.next(4 * count)\n"
        "        odd = [row % 2 for row in pool['choice']['row']]\n"
        "        made = select_rows(pool, np.argsort(odd, kind='stable')[:count])\n"
        "        return made | {'choice': made['choice'] | {'odd': [0.0] * count}}\n"
    )
    with trainer_of(f"{tmp_path}/even.py:Even", {"steps": 2}) as trainer:
        for row in trainer.run():
            assert row["choice/odd"] == 0
            assert all(index % 2 == 0 for index in trainer.batch["choice"]["row"])
            assert trainer.batch["choice"]["row"][::2] == trainer.batch["choice"]["row"][1::2]
