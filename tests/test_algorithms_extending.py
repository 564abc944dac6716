"""docs/extending.md: its examples run as they stand, subclasses and a worker of one's own."""

import pathlib
import re

import numpy as np
import pytest
from helpers import ONE_DEVICE, tiny_config, trainer_of

import hjax
from hjax.algorithms import get_algorithm
from hjax.algorithms.ppo import policy_loss
from hjax.errors import ConfigError
from hjax.run.dataflow import step_calls, updates_per_step

PAGE = pathlib.Path(__file__).parent.parent / "docs" / "extending.md"
STEPS = 2


@pytest.fixture(scope="module")
def examples(tmp_path_factory):
    """The page's Python blocks as the files that their first lines name."""
    return write_examples(tmp_path_factory.mktemp("extending"))


def write_examples(folder):
    for block in re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.M | re.S):
        name = re.match(r"# (\w+\.py)\n", block)
        assert name, f"an example without a file name: {block[:40]}"
        (folder / name[1]).write_text(block)
    return folder


def run(examples, name, **keys):
    with trainer_of(f"{examples}/{name}", {"steps": STEPS} | keys) as trainer:
        rows = trainer.run()
        assert all(np.isfinite(row["actor/loss"]) for row in rows)
        return trainer.batch, rows, trainer


def test_another_advantage_with_a_key_of_its_own(examples):
    config = tiny_config(f"{examples}/mine.py:Mine")
    assert config.algorithm.threshold == 0.1
    assert config.algorithm.gamma == 1.0  # PPO's keys are there too
    batch, _, _ = run(examples, "mine.py:Mine", **ONE_DEVICE, **{"algorithm.threshold": 0.8})
    kept = batch["advantages"][batch["advantages"] != 0]
    assert kept.size and (abs(kept) > 0.8).all()
    with pytest.raises(ConfigError, match="unknown key config.algorithm.treshold.*threshold"):
        tiny_config(f"{examples}/mine.py:Mine", {"algorithm.treshold": 1.0})
    with pytest.raises(ConfigError, match="config.algorithm.threshold='high': expected a number"):
        tiny_config(f"{examples}/mine.py:Mine", {"algorithm.threshold": "high"})


@pytest.mark.extended
def test_a_loss_with_a_term_more(examples):
    _, _, trainer = run(examples, "penalised.py:Penalised", **ONE_DEVICE)
    loss = trainer.roles.groups["actor"].worker.context.loss
    plain = policy_loss(trainer.config.algorithm, 8)
    logprobs = np.float32([[-0.1, -2.3, -0.7]])
    batch = {
        "response_mask": np.array([[True, True, False]]),
        "old_logprobs": np.float32([[-0.2, -2.0, 0.0]]),
        "advantages": np.float32([[0.7, -0.3, 0.0]]),
        "ref_logprobs": np.float32([[-0.1, -2.0, 0.0]]),
    }
    with_it, without = (each(logprobs, None, batch)[0] for each in (loss, plain))
    np.testing.assert_allclose(with_it - without, [[0.0001, 0.0529, 0.0049]], atol=1e-6)


@pytest.mark.extended
def test_another_loss_and_a_metric_more(examples):
    batch, rows, trainer = run(examples, "wide.py:Wide")
    assert trainer.roles.groups["actor"].worker.context.loss.clip_high == 0.28
    best = batch["rewards"].reshape(-1, 2).max(axis=1).mean()
    assert rows[-1]["reward/best_of_group"] == pytest.approx(best)


@pytest.mark.extended
def test_advantages_where_the_batch_is(examples):
    keys = {"algorithm.minibatch": 8, "algorithm.epochs": 2}
    _, rows, trainer = run(examples, "near.py:Near", **keys)
    with trainer_of("GRPO", {"steps": STEPS} | keys) as other:
        for row, expected in zip(rows, other.run(), strict=True):
            told = {key for key in expected if key.startswith(("actor/", "reward/"))}
            assert told <= row.keys()
            for key in told:
                np.testing.assert_allclose(row[key], expected[key], rtol=1e-5, atol=1e-6)
    assert len(trainer.roles.groups["actor"].worker._applied) == 3  # programs, whatever the steps


@pytest.mark.extended
def test_rloo_by_one_method(examples):
    batch, _, _ = run(examples, "leave_one_out.py:LeaveOneOut", **{"rollout.samples": 4})
    rewards = batch["rewards"].reshape(-1, 4)
    for i, group in enumerate(rewards):
        for j, reward in enumerate(group):
            others = [other for k, other in enumerate(group) if k != j]
            mask = batch["response_mask"][4 * i + j]
            expected = np.where(mask, reward - np.mean(others), 0.0)
            np.testing.assert_allclose(batch["advantages"][4 * i + j], expected, atol=1e-6)


@pytest.mark.extended
def test_the_longest_prompts_are_chosen(examples):
    keys = {"data.task": "mixed_reversal", "data.task_options.length": 9}
    _, rows, trainer = run(examples, "longest.py:Longest", **keys)
    batch = trainer.batch
    lengths = batch["prompt_mask"].sum(axis=1).tolist()
    assert batch["choice"]["length"] == lengths == sorted(lengths, reverse=True)
    assert rows[-1]["choice/length"] == pytest.approx(np.mean(lengths))
    assert trainer.prompts.position == 4 * 8 * STEPS


@pytest.mark.extended
def test_dynamic_sampling_by_hand(examples):
    keys = {"data.task_options.partial": 0.0, "warm_start.steps": 40}
    batch, _, trainer = run(examples, "dynamic.py:Dynamic", **keys)
    differ = np.ptp(batch["rewards"].reshape(-1, 2), axis=1) > 0
    assert len(differ) == 8 and list(differ) == sorted(differ, reverse=True)
    spans = [s for s in trainer.timeline.spans() if s.method == "generate_sequences"]
    drawn = [sum(s.step == step for s in spans) for step in range(1, STEPS + 1)]
    assert max(drawn) > 1 and (differ.all() or drawn[-1] == 4)
    assert trainer.prompts.position == 8 * sum(drawn)


@pytest.mark.parametrize("name", ["leave_one_out.py", "dynamic.py"])
def test_published_algorithms_take_at_most_fifteen_lines(examples, name):
    text = (examples / name).read_text()
    lines = text[text.index("class ") :].splitlines()
    assert len([line for line in lines if line.strip() and '"""' not in line]) <= 15


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", ["leave_one_out.py:LeaveOneOut", "dynamic.py:Dynamic"])
def test_they_learn_to_sort(examples, name):
    config = hjax.get_config(
        "grpo.py",
        {
            "algorithm.name": f"{examples}/{name}", "steps": 150, "data.task_options.length": 4,
            "data.task_options.partial": 0.0 if "dynamic" in name else 0.5,
            "algorithm.kl_coef": 0.0, "checkpoint.every": 0, "display.enabled": False,
        },
    )  # fmt: skip
    trainer = hjax.Trainer(config)
    try:
        rows = trainer.run()
    finally:
        trainer.close()
    assert rows[-1]["eval/accuracy"] > rows[0]["eval/accuracy"] + 0.25


def test_the_calls_of_a_worker_of_ones_own_are_read_off(examples):
    config = tiny_config(f"{examples}/varied.py:Varied", {"actor.schedule": "cosine"})
    algorithm = get_algorithm(config.algorithm.name)
    calls = step_calls(algorithm, config.algorithm, updates=2, samples=2)
    assert [call.method for call in calls] == [
        "generate_sequences", "compute_repetition", "compute_ref_log_prob", "compute_reward",
        "update_actor", "update_actor",
    ]  # fmt: skip
    assert updates_per_step(algorithm, config)["actor"] == 1


def test_a_step_that_lacks_a_column_of_its_settings_is_refused(examples, tmp_path):
    (tmp_path / "broken.py").write_text(
        "import hjax\n\nclass Broken(hjax.algorithms.GRPO):\n"
        "    def learn(self, batch):\n        return {}['absent']\n"
    )
    config = tiny_config(f"{tmp_path}/broken.py:Broken")
    algorithm = get_algorithm(config.algorithm.name)
    with pytest.raises(ConfigError, match="Broken.step could not be read off: KeyError"):
        step_calls(algorithm, config.algorithm, updates=1, samples=2)


@pytest.mark.extended
def test_a_worker_of_ones_own(examples):
    batch, _, trainer = run(examples, "varied.py:Varied")
    tokens, mask = batch["responses"], batch["response_mask"]
    for row in range(len(tokens)):
        answer = tokens[row][mask[row]]
        expected = np.mean([*(answer[1:] == answer[:-1]), 0.0])
        assert batch["repetition"][row] == pytest.approx(expected, abs=1e-6)
    spans = [s for s in trainer.timeline.spans() if s.role == "repetition"]
    assert [s.method for s in spans] == ["compute_repetition"] * STEPS
    assert {s.pool for s in spans} == {"all"}
    with trainer_of(f"{examples}/varied.py:Varied", {"placement": "standalone"}) as trainer:
        assert trainer.roles.pools["repetition"].name == "repetition"
        assert len(trainer.roles.groups["repetition"].worker.layouts.train.mesh.devices.flat) == 2


def test_the_worker_and_its_algorithm_take_under_twenty_lines(examples):
    lines = [line for line in (examples / "varied.py").read_text().splitlines()[1:] if line.strip()]
    assert len(lines) < 20


def test_every_example_is_one_of_those_above(examples):
    files = [file.name for file in sorted(examples.glob("*.py"))]
    assert files == [
        "again.py", "duel.py", "dynamic.py", "leave_one_out.py", "longest.py", "mine.py",
        "near.py", "nesterov.py", "penalised.py", "varied.py", "wide.py",
    ]  # fmt: skip


def test_an_optimizer_of_ones_own(examples):
    changes = {"actor.optimizer": f"{examples}/nesterov.py:nesterov"} | ONE_DEVICE
    with trainer_of("GRPO", changes) as trainer:
        rows = trainer.run()
        state = trainer.roles.groups["actor"].worker.optimizer_state
    assert all(np.isfinite(row["actor/loss"]) for row in rows) and "trace" in str(state)


@pytest.mark.extended
def test_earlier_rows_are_learned_from_again(examples):
    _, rows, trainer = run(examples, "again.py:Again", **{"steps": 3, "algorithm.minibatch": 8})
    spans = [s for s in trainer.timeline.spans() if s.method == "update_actor"]
    # Two mini-batches of each step's batch; from the second step on one of earlier rows beside.
    assert [sum(s.step == step for s in spans) for step in (1, 2, 3)] == [2, 3, 3]
    assert "replay/loss" not in rows[0]
    for row in rows[1:]:
        assert np.isfinite(row["replay/loss"])
        # Fresh rows are of the weights that learn; replayed ones are not.
        assert row["rollout/token_prob_error"] < 1.0001 < row["replay/token_prob_error"]


def test_self_play_takes_two_actors_and_forty_lines(examples):
    lines = [line for line in (examples / "duel.py").read_text().splitlines()[1:] if line.strip()]
    assert len(lines) < 40
    config = hjax.default_config()
    config.algorithm.name = f"{examples}/duel.py:Duel"
    config.actor.learning_rate = config.critic.learning_rate = 0.05
    trainer = hjax.Trainer(config)
    try:
        rows = trainer.run(3)
    finally:
        trainer.close()
    assert {"first/loss", "second/loss", "reward/mean"} <= rows[-1].keys()
    assert rows[0]["first/learning_rate"] == pytest.approx(0.05)


@pytest.mark.parametrize("name", ["again.py:Again", "varied.py:Varied"])
@pytest.mark.extended
def test_a_dataflow_of_ones_own_runs_ahead(examples, name):
    keys = {"placement": "disaggregate", "rollout.max_staleness": 1, "steps": 3}
    batch, rows, _ = run(examples, name, **keys)
    assert {"rollout/staleness", "rollout/dropped"} <= rows[-1].keys()
    assert batch["versions"].max() >= 1


@pytest.mark.extended
def test_ones_own_class_for_a_standing_role(tmp_path):
    (tmp_path / "judge.py").write_text(
        "import hjax, numpy as np\n"
        "class Judge(hjax.workers.Worker):\n"
        "    calls = 0\n"
        "    @hjax.protocol('ALL_TO_ALL')\n"
        "    def compute_reward(self, batch):\n"
        "        self.calls += 1\n"
        "        return {'rewards': np.float32([len(t) for t in batch['response_text']])}\n"
        "    def state(self):\n"
        "        return {'calls': {'number': np.int32([self.calls])}}\n"
        "    def restore(self, state):\n"
        "        self.calls = int(state['calls']['number'][0])\n"
        "class Mild(hjax.algorithms.GRPO):\n"
        "    workers = {'reward': Judge}\n"
    )
    name = f"{tmp_path}/judge.py:Mild"
    with trainer_of(name, {"steps": 2}, workdir=tmp_path / "run") as trainer:
        trainer.run()
        texts = trainer.batch["response_text"]
        np.testing.assert_array_equal(trainer.batch["rewards"], [len(text) for text in texts])
    # Its state goes through the checkpoint.
    with trainer_of(name, {"steps": 3}, workdir=tmp_path / "run") as trainer:
        trainer.run()
        assert trainer.roles.groups["reward"].worker.calls == 3


def test_a_role_without_a_worker_class_is_refused(tmp_path):
    (tmp_path / "lost.py").write_text(
        "import hjax\nclass Lost(hjax.algorithms.GRPO):\n    roles = ('actor', 'reward', 'judge')\n"
    )
    with pytest.raises(ConfigError, match="role 'judge' has no worker class.*Lost.workers"):
        hjax.Trainer(tiny_config(f"{tmp_path}/lost.py:Lost"))
