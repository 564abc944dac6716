"""`actor.ema_decay`: a moving average of the weights, for evaluation and export."""

import jax
import numpy as np
import pytest
from helpers import ONE_DEVICE, computed, trainer_of

import hjax
from hjax.errors import ConfigError
from hjax.models.checkpoint import restore_params
from hjax.sharding.layout import shard_bytes
from hjax.workers.memory import RoleMemory
from hjax.workers.trainable_worker import TrainableWorker

DECAY = 0.7
KEYS = {
    **ONE_DEVICE,
    "actor.learning_rate": 0.02,
    "algorithm.epochs": 2,
    "algorithm.minibatch": 8,
    "eval.every": 1,
    "actor.ema_decay": DECAY,
}
ADAPTERS = {"actor.lora.rank": 2, "actor.lora.targets": ("q", "down")}
# A step has two epochs of two mini-batches.
UPDATES = 4


def host(tree):
    return jax.tree.map(np.array, tree)


def watch_updates(monkeypatch, seen):
    """Records the trained parameters after each update."""
    update = TrainableWorker.update

    def watched(self, batch, **more):
        if not seen:
            seen.append(host(self.network.partition.split(self.params)[0]))
        found = update(self, batch, **more)
        seen.append(host(self.network.partition.split(self.params)[0]))
        return found

    monkeypatch.setattr(TrainableWorker, "update", watched)


def averaged(seen):
    average = seen[0]
    for params in seen[1:]:
        average = jax.tree.map(lambda x, y: DECAY * x + (1 - DECAY) * y, average, params)
    return average


def assert_close(found, expected):
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6), found, expected
    )


@pytest.mark.parametrize("more", [{}, ADAPTERS], ids=["all weights", "adapters"])
def test_it_is_the_average_of_every_updates_weights(more, monkeypatch, tmp_path):
    seen = []
    watch_updates(monkeypatch, seen)
    keys = {**KEYS, **more, "warm_start.steps": 0, "checkpoint.every": 2}
    with trainer_of("GRPO", keys, tmp_path / "run") as trainer:
        rows = trainer.run(2)
        assert len(seen) == 1 + 2 * UPDATES
        learned = host(trainer.roles.groups["actor"].learned_weights().result())
        trainer.export(tmp_path / "exported")
    assert_close(learned, seen[-1])  # training went on with the weights themselves
    folder = tmp_path / "run" / "checkpoints" / "2"
    assert_close(restore_params(folder, "actor"), seen[-1])
    assert_close(restore_params(folder, "actor", "average"), averaged(seen))
    # What it exports is what a path to the run names, and what was evaluated.
    tokens = [[3, 4, 5, 6, 7]]
    exported, named = (hjax.load_model(tmp_path / of) for of in ("exported", "run"))
    np.testing.assert_allclose(exported.logits(tokens), named.logits(tokens), atol=1e-5)
    keys = {**ONE_DEVICE, "steps": 0, "actor.path": f"{tmp_path}/exported"}
    with trainer_of("GRPO", keys | {"warm_start.steps": 0}) as trainer:
        assert trainer.evaluate()["eval/reward"] == pytest.approx(rows[-1]["eval/reward"], abs=1e-6)
    first, last = (jax.tree.leaves(tree)[0] for tree in (averaged(seen), seen[-1]))
    assert not np.allclose(first, last, atol=1e-4)


@pytest.mark.extended
def test_training_is_the_same_and_resumes_bit_for_bit(tmp_path):
    rows = {}
    for decay in (0.0, DECAY):
        with trainer_of("PPO", {**KEYS, "actor.ema_decay": decay}) as trainer:
            rows[decay] = trainer.run(4)
    for plain, with_average in zip(rows[0.0], rows[DECAY], strict=True):
        for name, value in computed(plain).items():
            assert name.startswith("eval/") or with_average[name] == value, name
    assert any(a["eval/reward"] != b["eval/reward"] for a, b in zip(rows[0.0], rows[DECAY]))
    with trainer_of("PPO", KEYS, tmp_path) as trainer:
        trainer.run(2)
        trainer.save()
    with trainer_of("PPO", KEYS, tmp_path) as trainer:
        assert [computed(row) for row in trainer.run(2)] == [computed(r) for r in rows[DECAY][2:]]


@pytest.mark.extended
def test_a_rollout_of_its_own_answers_with_the_average_and_draws_with_the_weights():
    """As where the actor generates, step for step; without an average evaluations are others."""
    apart = {"placement": "disaggregate", "cluster.devices_per_process": 2}
    rows, versions = {}, {}
    for name, keys in {"": {}, "apart": apart, "plain": {**apart, "actor.ema_decay": 0.0}}.items():
        with trainer_of("PPO", {**KEYS, **keys}) as trainer:
            rows[name] = [computed(row) for row in trainer.run(4)]
            versions[name] = np.max(trainer.batch.get("versions", 0))
    assert versions["apart"] == versions["plain"] > 0
    for here, there, plain in zip(*rows.values(), strict=True):
        assert here == pytest.approx(there, rel=1e-4, abs=1e-6)
        shared = [x for x in plain if not x.startswith("eval/")]
        assert {x: plain[x] for x in shared} == {x: there[x] for x in shared}
    evaluated = [[row["eval/reward"] for row in rows[name]] for name in ("apart", "plain")]
    assert evaluated[0] != evaluated[1]


@pytest.mark.extended
@pytest.mark.parametrize("algorithm", ["SFT", "RewardModel"])
def test_held_out_examples_are_of_the_average(algorithm, tmp_path):
    keys = {**KEYS, "warm_start.steps": 0, "checkpoint.every": 1}
    keys = {k: v for k, v in keys.items() if not k.startswith("algorithm.")}
    with trainer_of(algorithm, keys, tmp_path / "run") as trainer:
        loss = trainer.run(3)[-1]["eval/loss"]
    keys = {k: v for k, v in keys.items() if k != "actor.ema_decay"}
    with trainer_of(algorithm, {**keys, "actor.path": f"{tmp_path}/run"}) as trainer:
        assert trainer.evaluate()["eval/loss"] == pytest.approx(loss, rel=1e-5)
    assert restore_params(tmp_path / "run" / "checkpoints" / "3", "actor", "average")


def test_after_a_failed_evaluation_the_weights_are_back():
    with trainer_of("PPO", KEYS) as trainer:
        trainer.run(3)
        actor = trainer.roles.groups["actor"]
        before = host(actor.weights().result())
        with pytest.raises(KeyboardInterrupt), trainer.roles.averaged_weights():
            assert not np.allclose(actor.weights().result()["embedding"], before["embedding"])
            raise KeyboardInterrupt  # between the exchanges
        jax.tree.map(np.testing.assert_array_equal, host(actor.weights().result()), before)
        jax.block_until_ready(trainer.step()["actor/loss"])


@pytest.mark.parametrize("more", [{}, {**ADAPTERS, "reference.sync_every": 2}], ids=["", "lora"])
@pytest.mark.parametrize("offload", ["none", "optimizer"])
def test_memory_estimates_count_it(more, offload):
    resident = {}
    for decay in (0.0, DECAY):
        keys = {**KEYS, **more, "actor.ema_decay": decay, "actor.offload": offload}
        with trainer_of("GRPO", keys | {"algorithm.kl_coef": 0.1}) as trainer:
            trainer.prepare()
            worker = trainer.roles.groups["actor"].worker
            memory = RoleMemory.from_worker(worker).memory
            resident[decay] = memory.resident(True, offload), memory.resident(True, "none")
            state = worker.abstract_state()
            kept = [state[kind] for kind in ("average", "reference") if kind in state]
            weights = shard_bytes(worker.network.partition.split(state["params"])[0])
            assert sum(map(shard_bytes, kept)) == weights * (bool(decay) + bool(more))
    added = resident[DECAY][1] - resident[0.0][1]
    assert added == pytest.approx(weights)
    assert resident[DECAY][0] - resident[0.0][0] == (added if offload == "none" else 0)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"actor.ema_decay": 1.0}, r"actor\.ema_decay=1\.0.*at least 0, below 1"),
        (
            {"placement": "disaggregate", "rollout.max_staleness": 1},
            r"ema_decay=0\.7 with .*max_staleness=1: the rollout would have to answer",
        ),
    ],
)
def test_what_it_cannot_do_is_refused(keys, message):
    with pytest.raises(ConfigError, match=message):
        trainer_of("GRPO", {**KEYS, "cluster.devices_per_process": 0, **keys}).__enter__()
