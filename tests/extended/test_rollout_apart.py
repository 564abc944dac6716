"""A rollout on devices of its own: the same run, weights published in versions."""

import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import computed, read_rows, tiny_config, trainer_of
from pickling import ObjectStore, PicklingExecutor

import hjax
from hjax.controller import join
from hjax.errors import ConfigError, RunError

EVENS = pathlib.Path(__file__).parents[1] / "evens_reward.py"
APART = {"placement": "disaggregate"}
LEARNING = {"steps": 4, "warm_start.steps": 4, "actor.learning_rate": 1e-3, "eval.every": 2}
MINIBATCHES = {"algorithm.minibatch": 8, "algorithm.epochs": 2}


def run(algorithm, changes, executor=None, workdir=None):
    config = tiny_config(algorithm, LEARNING | changes)
    options = {} if executor is None else {"executor": executor}
    trainer = hjax.Trainer(config, workdir, **options)
    try:
        rows = [computed(row) for row in trainer.run()]
        return rows, trainer.batch, trainer.timeline.spans()
    finally:
        trainer.close()


@pytest.fixture(scope="module")
def colocated():
    """Together on as many devices as either half has."""
    return run("PPO", MINIBATCHES | {"cluster.devices_per_process": 4})


def test_a_run_with_a_rollout_apart_is_the_colocated_run_bit_for_bit(colocated):
    rows, batch, spans = run("PPO", APART | MINIBATCHES)
    assert rows == colocated[0]
    np.testing.assert_array_equal(batch["responses"], colocated[1]["responses"])
    generating = {s.pool for s in spans if s.phase == "generate"}
    assert generating == {"rollout"}
    assert {s.pool for s in spans if s.phase == "update"} == {"actor+critic+reference"}
    # The last of four steps: three have been learned from before.
    mask = batch["response_mask"]
    assert batch["versions"].dtype == np.int32
    np.testing.assert_array_equal(batch["versions"], np.where(mask, 3, 0))


def test_workers_that_share_nothing_give_the_same(colocated):
    executor = functools.partial(PicklingExecutor, ObjectStore())
    rows, batch, _ = run("PPO", APART | MINIBATCHES, executor)
    assert rows == colocated[0]


@pytest.mark.slow
def test_in_another_layout_it_is_the_same_up_to_the_order_of_sums():
    # A reward that some always get: whitened advantages of none would be rounding errors, and
    # Adam makes a whole step of those.
    base = {"reward.function": f"{EVENS}:evens", "warm_start.steps": 0}
    rows, batch, _ = run("PPO", base | APART | {"layout.rollout.train.tensor": 2})
    expected, other, _ = run("PPO", base)  # on all eight
    np.testing.assert_array_equal(batch["responses"], other["responses"])
    assert not np.array_equal(batch["logprobs"], other["logprobs"])
    for row, together in zip(rows, expected, strict=True):
        assert row == pytest.approx(together, rel=1e-5, abs=1e-5)


def test_offloaded_weights_are_published_too(colocated):
    away = {"actor.offload": "all", "critic.offload": "all", "reference.offload": "all"}
    assert run("PPO", APART | MINIBATCHES | away | {"steps": 2})[0] == colocated[0][:2]


def test_a_plan_names_the_rollout_and_is_written_so(tmp_path):
    plan = {
        "placement": [["actor", "reference"], ["rollout"]],
        "allocation": [4, 2],
        "parallelism": {"rollout": {"train": [1, 2, 1]}},
    }
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    with trainer_of("GRPO", {"steps": 1, "placement": f"{tmp_path}/plan.json"}) as trainer:
        trainer.run()
        assert trainer.roles.layouts["rollout"].generate.ways("heads") == 2
        record = trainer.plan_record()
    assert record["placement"] == plan["placement"] and record["allocation"] == [4, 2]
    assert record["parallelism"]["rollout"] == {"train": {"data": 1, "fsdp": 1, "tensor": 2}}
    (tmp_path / "again.json").write_text(json.dumps(record))
    with trainer_of("GRPO", {"steps": 1, "placement": f"{tmp_path}/again.json"}) as trainer:
        assert trainer.plan_record() == record


def test_a_resumed_run_publishes_anew_and_is_the_undisturbed_one(tmp_path):
    changes = APART | {"checkpoint.every": 2, "steps": 4, "eval.every": 2}
    with trainer_of("GRPO", changes, tmp_path / "whole") as trainer:
        trainer.run()
    with trainer_of("GRPO", changes, tmp_path / "parts") as trainer:
        trainer.run(3)  # saves the third step's, at the end of the run
    items = [p.name for p in (tmp_path / "parts" / "checkpoints" / "3").iterdir()]
    assert not any(name.startswith("rollout") for name in items)
    with trainer_of("GRPO", changes, tmp_path / "parts") as trainer:
        trainer.run()
        assert trainer.batch["versions"].max() == 3
    whole, parts = (
        [computed(row) for row in read_rows(tmp_path / name)] for name in ("whole", "parts")
    )
    assert parts == whole


@pytest.fixture(scope="module")
def groups():
    """The actor's and the rollout's groups of a run, after its first step."""
    with trainer_of("GRPO", APART) as trainer:
        trainer.step()
        policy = trainer.roles.groups["actor"]
        yield policy.actor, policy.rollout


def test_a_version_is_taken_beside_and_then_committed(groups):
    actor, rollout = groups
    before = rollout.worker.params
    assert rollout.receive_weights(actor.publish(), 7).result() == 7
    assert rollout.worker.params is before and rollout.worker.version < 7
    assert rollout.commit(7).result() == 7
    for new, own in zip(
        jax.tree.leaves(rollout.worker.params), jax.tree.leaves(actor.worker.params), strict=True
    ):
        np.testing.assert_array_equal(new, own)
        assert new.sharding.device_set.isdisjoint(own.sharding.device_set)


@pytest.mark.parametrize(
    "damage, message",
    [
        (lambda p: p | {"more": jnp.zeros(3)}, r"more \(float32\[3\]\) is.*no such parameter"),
        (
            lambda p: jax.tree.map(lambda x: x.astype(jnp.bfloat16), p),
            r"comes as bfloat16, but must be float32",
        ),
        (lambda p: jax.tree.map(lambda x: x[..., :1], p), r"comes in the shape .*, but must be"),
    ],
    ids=["names", "dtypes", "shapes"],
)
def test_weights_that_do_not_fit_are_refused(damage, message, groups):
    actor, rollout = groups
    weights = damage(dict(actor.publish().result()))
    with pytest.raises(RunError, match=message):
        # What generates with a version fails as its publication did.
        taken = rollout.receive_weights(weights, 9)
        rollout.generate_sequences({}, version=rollout.commit(taken)).result()


def test_versions_rise_and_are_taken_before_they_generate(groups):
    actor, rollout = groups
    now = rollout.worker.version
    with pytest.raises(RunError, match=f"version {now} came while version {now} is in use"):
        rollout.receive_weights(actor.publish(), now).result()
    with pytest.raises(RunError, match="version 99 was not received"):
        rollout.commit(99).result()
    said = f"version 99 of the weights must generate, but {now} is loaded"
    with pytest.raises(RunError, match=said):
        rollout.generate_sequences({}, version=99).result()


def test_a_copy_that_is_on_its_way_outlives_an_update(groups):
    actor, _ = groups
    published = actor.publish().result()
    before = [np.array(x) for x in jax.tree.leaves(published)]
    mask = np.ones((16, 4), bool)
    batch = {"prompts": np.ones((16, 4), np.int32), "prompt_mask": mask}
    batch |= {"responses": np.ones((16, 4), np.int32), "response_mask": mask}
    batch |= {k: np.ones((16, 4), np.float32) for k in ("advantages", "old_logprobs")}
    batch |= {"ref_logprobs": batch["advantages"], "logprobs": batch["advantages"]}
    join(actor.update_actor(batch))
    for kept, x in zip(before, jax.tree.leaves(published), strict=True):
        np.testing.assert_array_equal(kept, x)


@pytest.mark.parametrize(
    "plan, message",
    [
        ({"placement": [["actor", "reference", "rollout"]], "allocation": [8]}, "own, or leave"),
        (
            {
                "placement": [["actor", "reference"], ["rollout"]],
                "allocation": [4, 4],
                "parallelism": {"rollout": {"train": [1, 1, 4], "generate": [1, 1]}},
            },
            "leave `generate` out",
        ),
    ],
)
def test_a_plan_in_which_the_rollout_makes_no_sense_is_refused(plan, message, tmp_path):
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    with pytest.raises(ConfigError, match=message) as caught:
        hjax.Trainer(tiny_config("GRPO", {"placement": f"{tmp_path}/plan.json"}))
    assert "\n" not in str(caught.value)


def test_what_cannot_be_apart_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="SFT generates nothing"):
        hjax.Trainer(tiny_config("SFT", APART))
    (tmp_path / "own.py").write_text(
        "import hjax\n"
        "class Mine(hjax.workers.Actor):\n"
        "    def generate_sequences(self, prompts, greedy=False, samples=None):\n"
        "        return super().generate_sequences(prompts, greedy, samples)\n"
        "class Own(hjax.algorithms.GRPO):\n"
        "    workers = {'actor': Mine}\n"
        "class Named(hjax.algorithms.GRPO):\n"
        "    roles = ('actor', 'rollout', 'reward')\n"
    )
    with pytest.raises(ConfigError, match="the actor generates in its own way"):
        hjax.Trainer(tiny_config(f"{tmp_path}/own.py:Own", APART))
    with pytest.raises(ConfigError, match="Named has a role 'rollout'.*choose another name"):
        hjax.Trainer(tiny_config(f"{tmp_path}/own.py:Named"))
    with pytest.raises(ConfigError, match="rollout.prompts=6 does not divide over the 4 .*rollout"):
        hjax.Trainer(tiny_config("GRPO", APART | {"rollout.prompts": 6, "rollout.samples": 4}))
