"""Algorithms as dataflows, run on the real controller with workers that only note what they get."""

import ast
import inspect
import json
import math
import pathlib
import textwrap

import numpy as np
import pytest

import hjax
from hjax.algorithms import ALGORITHMS, GRPO, PPO, ReMax, SafeRLHF, get_algorithm
from hjax.controller import ResourcePool, WorkerGroup
from hjax.errors import ConfigError, RunError
from hjax.run.dataflow import absent_roles
from hjax.run.metrics import StepRecorder, batch_metrics

PROMPTS, SAMPLES, LENGTH = 4, 2, 3
ROWS = PROMPTS * SAMPLES


def step_lines(algorithm):
    """The lines of a class's collect and learn, without their signatures and docstrings."""
    return lines_of(algorithm.collect) + lines_of(algorithm.learn)


def lines_of(method):
    text = textwrap.dedent(inspect.getsource(method))
    statements = ast.parse(text).body[0].body[1:]  # behind the docstring
    lines = text.splitlines()[statements[0].lineno - 1 : statements[-1].end_lineno]
    return [line.strip() for line in lines if line.strip()]


def test_ppo_fits_in_twelve_lines():
    assert len(step_lines(PPO)) <= 12


def test_remax_is_ppo_without_the_critics_lines_and_with_a_greedy_answer_beside():
    ppo, remax = step_lines(PPO), step_lines(ReMax)
    critic = [line for line in ppo if "self.critic." in line]
    assert len(critic) == 2
    assert len(remax) == len(ppo) - 2 + 3
    # The answer, its score, that they come as two; the join has a baseline instead of values.
    new = [line for line in remax if line not in ppo]
    marks = ("greedy=True", "(greedy)", "baseline=")
    assert [mark for line in new for mark in marks if mark in line] == list(marks)


def test_safe_rlhf_takes_at_most_six_more_lines():
    assert len(step_lines(PPO)) < len(step_lines(SafeRLHF)) <= len(step_lines(PPO)) + 6


@pytest.mark.parametrize("algorithm", ALGORITHMS.values())
def test_no_step_names_a_machine_and_each_fits_on_a_screen(algorithm):
    assert len(step_lines(algorithm)) <= len(step_lines(SafeRLHF))
    text = (inspect.getsource(algorithm.collect) + inspect.getsource(algorithm.learn)).lower()
    for word in ("mesh", "device", "shard", "layout", "pool", "ray"):
        assert word not in text.replace("array", "")


def test_the_algorithms_room_imports_no_machine():
    for file in pathlib.Path(inspect.getfile(hjax.algorithms)).parent.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            for name in names:
                assert not name.startswith(("ray", "jax.sharding", "hjax.workers", "hjax.sharding"))
                assert name.rpartition(".")[2] not in ("Mesh", "NamedSharding", "PartitionSpec")


# Workers on no device


class Actor(hjax.workers.Worker):
    """Answers with fixed tokens; notes the mini-batches it is given."""

    updates: list

    def __init__(self, context, skip=()):
        super().__init__(context)
        self.updates, self.skip = [], skip

    @hjax.protocol("3D_PROTO")
    def generate_sequences(self, prompts, greedy=False):
        rows = PROMPTS if greedy else ROWS
        mask = np.ones((rows, LENGTH), bool)
        mask[0, -1] = False
        return {
            "responses": np.arange(rows * LENGTH).reshape(rows, LENGTH),
            "response_mask": mask,
            "logprobs": np.where(mask, np.float32(-1), np.float32(0)),
            "truncated": np.zeros(rows, bool),
            "greedy": greedy,
        }

    @hjax.protocol("3D_PROTO")
    def update_actor(self, batch, pretrain=None):
        self.updates.append(batch)
        return self._metrics()

    @hjax.protocol("3D_PROTO")
    def update_critic(self, batch):
        self.updates.append(batch)
        return self._metrics()

    @hjax.protocol("3D_PROTO")
    def compute_values(self, batch):
        return {"values": np.zeros((ROWS, LENGTH), np.float32)}

    @hjax.protocol("3D_PROTO")
    def compute_ref_log_prob(self, batch):
        # 0.3 nats above the policy's -1 at every token.
        return {"ref_logprobs": np.where(batch["response_mask"], np.float32(-1.3), np.float32(0))}

    def _metrics(self):
        number = len(self.updates)
        skipped = number in self.skip
        return {
            "loss": np.float32(math.nan if skipped else number),
            "grad_norm": np.float32(1),
            "skipped": np.int32(skipped),
        }


class Reward(hjax.workers.Worker):
    def __init__(self, context, rewards, greedy=()):
        super().__init__(context)
        self.rewards, self.greedy = np.float32(rewards), np.float32(greedy)

    @hjax.protocol("3D_PROTO")
    def compute_reward(self, batch):
        return {"rewards": self.greedy if batch["greedy"] else self.rewards}

    @hjax.protocol("3D_PROTO")
    def compute_cost(self, batch):
        return {"costs": self.rewards}


class Dataflow:
    """An algorithm over such workers."""

    def __init__(self, algorithm, rewards, greedy=(), skip=None, **keys):
        self.pool = ResourcePool("host")
        config = algorithm.default_config()
        config.update(keys)
        self.groups = {}
        for role in algorithm.needed_roles(config):
            judge = role in ("reward", "cost")
            options = {"rewards": rewards, "greedy": greedy} if judge else {}
            if not judge:
                options["skip"] = (skip or {}).get(role, ())
            context = hjax.workers.WorkerContext(role)
            worker = Reward if judge else Actor
            self.groups[role] = WorkerGroup(self.pool, worker, context, role=role, **options)
        every = {**self.groups, **absent_roles(algorithm, self.groups)}
        self.algorithm = algorithm(config, every, seed=3, samples=SAMPLES)
        self.recorder = StepRecorder(self.algorithm, config.max_skipped)
        self.number = 0

    def step(self):
        self.number += 1
        return self.recorder.run({"prompts": np.zeros((PROMPTS, 2), int)}, self.number)

    def updates(self, role="actor"):
        return self.groups[role].worker.updates

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.pool.close()


REWARDS = [1.0, 0.0, 0.5, 0.5, 0.0, 1.0, 1.0, 1.0]


def test_epochs_and_minibatches_hold_whole_groups_and_every_row_once():
    with Dataflow(PPO, REWARDS, minibatch=4, epochs=3) as flow:
        flow.step()
        flow.step()
        rows = [batch["responses"][:, 0] // LENGTH for batch in flow.updates()]
    assert len(rows) == 2 * 3 * 2  # steps x epochs x mini-batches
    for epoch in range(6):
        both = np.concatenate(rows[2 * epoch : 2 * epoch + 2])
        assert sorted(both) == list(range(ROWS))
    for part in rows:
        assert len(part) == 4
        np.testing.assert_array_equal(part[1::2], part[::2] + 1)  # the samples of a prompt
    orders = {tuple(np.concatenate(rows[2 * i : 2 * i + 2])) for i in range(6)}
    assert len(orders) > 3  # drawn anew in every epoch and step
    with Dataflow(PPO, REWARDS, minibatch=4, epochs=3) as again:
        again.step()
        first = [batch["responses"][:, 0] // LENGTH for batch in again.updates()]
    for a, b in zip(first, rows):
        np.testing.assert_array_equal(a, b)  # and the same from the same seed


def test_advantages_over_the_biased_deviation_are_larger_by_what_n_is_to_n_less_one():
    made = []
    for biased in (False, True):
        with Dataflow(PPO, REWARDS, whiten_biased=biased) as flow:
            batch, _ = flow.step()
            made.append(batch["advantages"][batch["response_mask"]])
    count = made[0].size
    np.testing.assert_allclose(made[1], made[0] * np.sqrt(count / (count - 1)), rtol=1e-5)


def test_critic_and_actor_take_the_same_minibatches():
    with Dataflow(PPO, REWARDS, minibatch=4) as flow:
        flow.step()
        for actor, critic in zip(flow.updates("actor"), flow.updates("critic"), strict=True):
            np.testing.assert_array_equal(actor["responses"], critic["responses"])


# The KL is 0.3 per token and 8 of the horizon's 100 sequences pass in each step. Three times the
# target: the error is cut at 0.2, a factor of 1 + 0.2 * 8 / 100. Half of it: cut at -0.2. A tenth
# above it: 1 + 0.1 * 8 / 100.
@pytest.mark.parametrize("target, factor", [(0.1, 1.016), (0.6, 0.984), (0.3 / 1.1, 1.008)])
@pytest.mark.parametrize(
    "algorithm, where",
    [
        (PPO, "reward"),
        (PPO, "loss"),
        (GRPO, "loss"),
        (ReMax, "reward"),
        (ReMax, "loss"),
        (SafeRLHF, "reward"),
        (SafeRLHF, "loss"),
    ],
)
def test_an_adaptive_coefficient_follows_the_kl(algorithm, where, target, factor):
    keys = {"kl_coef": 0.05, "kl_in": where, "kl_target": target, "kl_horizon": 100}
    keys["minibatch"] = 4
    with Dataflow(algorithm, REWARDS, greedy=[0.0] * PROMPTS, **keys) as flow:
        rows = [flow.step()[1] for _ in range(2)]
        state = json.loads(json.dumps(flow.algorithm.state()))
        loss = algorithm.losses(flow.algorithm.config, LENGTH)["actor"]
    assert rows[0]["kl/reference"] == pytest.approx(0.3)
    expected = [0.05 * factor, 0.05 * factor**2]
    assert [row["kl/coefficient"] for row in rows] == pytest.approx(expected)
    # Two updates a step; those of the first step still take the first coefficient.
    given = [batch.get("kl_coef") for batch in flow.updates()]
    if where == "loss":
        assert loss.kl_coef and loss.kl_adaptive
        np.testing.assert_allclose(given, [0.05, 0.05, *[0.05 * factor] * 2], rtol=1e-6)
        assert all(x.dtype == np.float32 and x.shape == () for x in given)
    else:
        assert given == [None] * 4 and not loss.kl_coef and not loss.kl_adaptive
    with Dataflow(algorithm, REWARDS, greedy=[0.0] * PROMPTS, **keys) as other:
        other.algorithm.restore(state)
        assert other.algorithm.kl.coef == flow.algorithm.kl.coef


def test_the_kl_by_token_is_taken_once_and_passed_on():
    # Without a discount the first token answers for the whole response: r - beta * sum of the KL.
    keys = {"kl_coef": 0.5, "whiten": False, "lam": 1.0}
    with Dataflow(PPO, REWARDS, **keys) as flow:
        batch, row = flow.step()
        expected = np.where(batch["response_mask"], 0.3, 0.0)
        np.testing.assert_allclose(batch["ref_kl"], expected, rtol=1e-6)
        # Another one is taken for what the log-probs say, wherever the KL is read.
        other = flow.algorithm.compute_advantages(batch | {"ref_kl": 2 * batch["ref_kl"]})
    tokens = batch["response_mask"].sum(axis=1)
    for made, kl in ((batch, 0.3), (other, 0.6)):
        first = np.float32(REWARDS) - 0.5 * kl * tokens
        np.testing.assert_allclose(made["advantages"][:, 0], first, atol=1e-5)
        assert batch_metrics(made, 0.5)["kl/reference"] == pytest.approx(kl)
    assert row["kl/reference"] == pytest.approx(0.3)


def test_an_adaptive_coefficient_weighs_the_kl_in_remaxs_reward():
    # Advantages are r - b - beta * 0.3; beta grows from 0.5 to 0.5 * 1.016 = 0.508.
    keys = {"kl_coef": 0.5, "kl_target": 0.1, "kl_horizon": 100}
    with Dataflow(ReMax, REWARDS, greedy=[0.0] * PROMPTS, **keys) as flow:
        first, second = (flow.step()[0]["advantages"][:, 0] for _ in range(2))
    np.testing.assert_allclose(first, np.float32(REWARDS) - 0.15, atol=1e-6)
    np.testing.assert_allclose(second, np.float32(REWARDS) - 0.1524, atol=1e-6)


@pytest.mark.parametrize("algorithm", [PPO, GRPO, ReMax, SafeRLHF])
@pytest.mark.parametrize("where", ["reward", "loss"])
def test_without_a_target_the_coefficient_stays_and_does_not_travel(algorithm, where):
    if algorithm is GRPO and where == "reward":
        return  # refused, see below
    with Dataflow(algorithm, REWARDS, greedy=[0.0] * PROMPTS, kl_coef=0.05, kl_in=where) as flow:
        rows = [flow.step()[1]["kl/coefficient"] for _ in range(2)]
        loss = algorithm.losses(flow.algorithm.config, LENGTH)["actor"]
    assert rows == [0.05, 0.05] and not loss.kl_adaptive
    assert not any("kl_coef" in batch for batch in flow.updates())


@pytest.mark.parametrize(
    "algorithm, keys, message",
    [
        (PPO, {"kl_coef": 0.0, "kl_target": 0.1}, "kl_target=0.1 moves config.algorithm.kl_coef"),
        (GRPO, {"kl_coef": 0.0, "kl_target": 0.1}, "give it a first value above 0"),
        (GRPO, {"resample": 1}, "fills the batch with groups of equal rewards; set config"),
    ],
)
def test_keys_that_do_not_go_together_are_refused(algorithm, keys, message):
    config = algorithm.default_config()
    config.update(keys)
    with pytest.raises(ConfigError, match=message) as error:
        algorithm.check(config)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("algorithm", [PPO, GRPO, ReMax, SafeRLHF])
def test_an_absent_role_answers_only_what_its_worker_could(algorithm):
    with Dataflow(algorithm, REWARDS, greedy=[0.0] * PROMPTS, kl_coef=0.0) as flow:
        reference = flow.algorithm.reference
        assert reference.compute_ref_log_prob({}) == {}
        with pytest.raises(AttributeError, match="reference has no method 'compute_ref_logprob'.*"
                           "it has apply, compute_ref_log_prob"):  # fmt: skip
            reference.compute_ref_logprob({})


def test_a_role_that_nobody_gave_is_named():
    config = PPO.default_config()
    with pytest.raises(ConfigError, match="PPO needs a worker group for the role actor"):
        PPO(config, {})


def test_unscored_samples_leave_grpos_baseline_and_loss():
    nan = math.nan
    rewards = [1.0, nan, 0.5, 0.1, 0.0, 1.0, nan, nan]
    with Dataflow(GRPO, rewards, normalise="none") as flow:
        batch, metrics = flow.step()
        (update,) = flow.updates()
    expected = [0.0, 0.0, 0.2, -0.2, -0.5, 0.5, 0.0, 0.0]  # of the group's scored samples
    np.testing.assert_allclose(batch["advantages"][:, 0], expected, atol=1e-6)
    scored = [True, False, True, True, True, True, False, False]
    np.testing.assert_array_equal(update["row_mask"], scored)
    assert metrics["reward/unscored"] == pytest.approx(3 / 8)
    assert metrics["reward/mean"] == pytest.approx(2.6 / 5)


def test_unscored_samples_leave_ppos_advantages_whole():
    with Dataflow(PPO, [1.0, math.nan, *REWARDS[2:]]) as flow:
        batch, metrics = flow.step()
    assert np.isfinite(batch["advantages"]).all()
    assert not batch["advantages"][1].any()
    assert not batch["row_mask"][1] and batch["row_mask"].sum() == ROWS - 1
    scored = np.delete(batch["advantages"], 1, axis=0)[np.delete(batch["response_mask"], 1, axis=0)]
    assert scored.mean() == pytest.approx(0, abs=1e-6)  # whitened over the scored alone
    assert math.isfinite(metrics["critic/explained_variance"])


def test_remax_leaves_out_prompts_whose_greedy_answer_is_unscored():
    with Dataflow(ReMax, REWARDS, greedy=[0.5, math.nan, 0.0, 1.0], kl_coef=0.0) as flow:
        batch, _ = flow.step()
    np.testing.assert_array_equal(batch["row_mask"], [1, 1, 0, 0, 1, 1, 1, 1])
    np.testing.assert_allclose(batch["advantages"][:, 0], [0.5, -0.5, 0, 0, 0, 1, 0, 0], atol=1e-6)


def test_safe_rlhf_weighs_cost_by_its_multiplier():
    keys = {"cost_limit": 0.125, "multiplier_learning_rate": 0.1, "cost_window": 1}
    with Dataflow(SafeRLHF, REWARDS, **keys) as flow:
        metrics = [flow.step()[1] for _ in range(2)]
    # The mean cost is 5/8, 0.5 above the limit: eta rises by 0.1 * 0.5 * lambda.
    first = math.exp(0.05)
    second = math.exp(0.05 + 0.05 * first)
    assert [m["cost/multiplier"] for m in metrics] == pytest.approx([first, second])
    assert metrics[0]["cost/mean"] == pytest.approx(5 / 8)


@pytest.mark.parametrize("algorithm", [PPO, GRPO, ReMax, SafeRLHF])
def test_without_a_kl_there_is_no_reference(algorithm):
    config = algorithm.default_config()
    assert "reference" in algorithm.needed_roles(config)
    config.kl_coef = 0.0
    assert "reference" not in algorithm.needed_roles(config)
    with Dataflow(algorithm, REWARDS, greedy=[0, 0, 0, 0], kl_coef=0.0) as flow:
        batch, metrics = flow.step()
    assert "ref_logprobs" not in batch and "kl/reference" not in metrics


def test_metrics_are_means_over_a_steps_updates():
    with Dataflow(PPO, REWARDS, minibatch=4, epochs=2, skip={"actor": (2,)}) as flow:
        _, metrics = flow.step()
    assert metrics["critic/loss"] == (1 + 2 + 3 + 4) / 4
    assert metrics["actor/loss"] == (1 + 3 + 4) / 3  # the skipped one is not among them
    assert metrics["actor/skipped"] == 1 and metrics["critic/skipped"] == 0


def test_updates_skipped_in_a_row_stop_the_run_with_the_cause():
    with Dataflow(PPO, REWARDS, max_skipped=3, skip={"actor": (2, 4, 5, 6)}) as flow:
        for step in range(1, 6):  # one sound update lies between the first skip and the others
            flow.step()
            assert flow.recorder.skipped_this_step == int(step in (2, 4, 5))
        with pytest.raises(
            RunError, match="3 updates of the actor in a row .*loss is nan"
        ) as error:
            flow.step()  # though the critic's updates in between are sound
    assert "lower actor.learning_rate" in str(error.value)
    assert "advantages" in flow.recorder.batch  # to be looked at


def test_counts_of_skipped_updates_survive_a_resume():
    with Dataflow(PPO, REWARDS, max_skipped=3, skip={"actor": (1, 2)}) as flow:
        flow.step()
        flow.step()
    with Dataflow(PPO, REWARDS, max_skipped=3, skip={"actor": (1,)}) as again:
        again.recorder.restore(json.loads(json.dumps(flow.recorder.state())))
        with pytest.raises(RunError, match="3 updates"):
            again.step()


def test_a_users_advantages_may_be_jax_arrays():
    import jax.numpy as jnp

    class Own(PPO):
        def compute_advantages(self, batch):
            batch = super().compute_advantages(batch)
            return batch | {"advantages": jnp.ones_like(batch["advantages"])}

    with Dataflow(Own, REWARDS, minibatch=4) as flow:
        flow.step()
        assert (flow.updates()[0]["advantages"] == 1).all()


@pytest.mark.parametrize(
    "name, message",
    [
        ("PPOO", "algorithm.name='PPOO' is unknown; did you mean PPO or .*There are PPO, GRPO"),
        ("simpro", "did you mean SimPO"),
        ("zzzz", "algorithm.name='zzzz' is unknown; There are PPO, .*path.py:Class"),
        ("missing.py:Mine", "missing.py"),
        ("{folder}/mine.py:Other", "has no Other; .*it has .*Mine"),
        ("{folder}/mine.py:number", "number"),
        ("{folder}/mine.py:function", "no subclass of hjax.algorithms.Algorithm"),
        ("{folder}/broken.py:Mine", "broken.py:2: ZeroDivisionError"),
    ],
)
def test_an_algorithm_that_cannot_be_found_is_named(name, message, tmp_path):
    (tmp_path / "mine.py").write_text(
        "import hjax\nclass Mine(hjax.algorithms.PPO): ...\nnumber = 1\ndef function(): ...\n"
    )
    (tmp_path / "broken.py").write_text("\n1 / 0\n")
    with pytest.raises(ConfigError, match=message) as caught:
        get_algorithm(name.format(folder=tmp_path))
    assert "\n" not in str(caught.value)
    assert "algorithm.name" in str(caught.value)
