"""Mini-batches of a step: what is sent to each role, and what the roles make of it."""

import numpy as np
import pytest
from helpers import computed, trainer_of
from ml_collections import ConfigDict

from hjax.algorithms import GRPO, PPO
from hjax.algorithms.algorithm import take_rows
from hjax.algorithms.policy_loss import PolicyLoss
from hjax.controller.messages import MiniBatch
from hjax.run.dataflow import absent_roles
from hjax.sharding import protocols

TWO = {"steps": 1, "algorithm.minibatch": 8, "algorithm.epochs": 2, "algorithm.kl_in": "loss"}
TOKENS = ("prompts", "prompt_mask", "responses", "response_mask")
# What the updates read, by hand.
READS = {
    "actor": (*TOKENS, "advantages", "old_logprobs", "ref_logprobs", "logprobs", "row_mask"),
    "critic": (*TOKENS, "returns", "values", "row_mask"),
}


class ByDicts(PPO):
    """PPO whose mini-batches are made by hand."""

    def minibatches(self, batch):
        return map(dict, super().minibatches(batch))


class Weighed(GRPO):
    """GRPO with a weight for each response in its loss."""

    def compute_advantages(self, batch):
        made = super().compute_advantages(batch)
        return made | {"weight": np.full(len(batch["rewards"]), 2, np.float32)}

    @classmethod
    def losses(cls, config, max_response_length):
        return {"actor": WeighedLoss(entropy_coef=0.0)}


class WeighedLoss(PolicyLoss):
    """PPO's clipped loss times a weight for each response."""

    per_row = ("weight",)

    @property
    def needs(self):
        return (*super().needs, "weight")

    def __call__(self, logprobs, entropy, batch):
        loss, stats = super().__call__(logprobs, entropy, batch)
        assert batch["weight"].ndim == 1
        return loss * batch["weight"][:, None], stats


class Unweighed(GRPO):
    """The same without weights."""

    @classmethod
    def losses(cls, config, max_response_length):
        return {"actor": PolicyLoss(entropy_coef=0.0)}


def run(algorithm, changes):
    with trainer_of(f"{__file__}:{algorithm}", changes) as trainer:
        rows = [computed(row) for row in trainer.run()]
    return rows, trainer.batch


@pytest.mark.extended
def test_each_role_is_sent_what_its_updates_read_once_a_step(monkeypatch):
    sent = []

    def counted(x, sharding, place=protocols.place):
        if isinstance(x, np.ndarray):
            sent.append(x)
        return place(x, sharding)

    with trainer_of("PPO", TWO) as trainer:
        learn = trainer.algorithm.learn

        def learning(batch):
            batch.result()  # generated
            monkeypatch.setattr(protocols, "place", counted)
            return learn(batch)

        monkeypatch.setattr(trainer.algorithm, "learn", learning)
        trainer.step()
        batch = trainer.batch
    rows = [x for x in sent if x.shape == (8,) and x.dtype == np.int32]
    assert len(rows) == 2 * 2 * 2  # epochs, mini-batches and roles: which rows
    columns = [x for x in sent if not any(x is y for y in rows)]
    expected = [batch[key] for keys in READS.values() for key in keys]
    assert sorted(x.nbytes for x in columns) == sorted(x.nbytes for x in expected)


@pytest.mark.parametrize(
    "changes",
    [
        {"actor.micro_batch": 8, "rollout.prompts": 16, "algorithm.minibatch": 16},
        {"data.packing": 16, "placement": "split"},
        {"data.packing": 0},
        {"layout.actor.train.pipe": 2, "layout.critic.train.context": 2, "model.layers": 2},
    ],
    ids=["rows", "packs", "padded", "axes"],
)
@pytest.mark.extended
def test_rows_cut_on_the_devices_are_those_cut_by_hand(changes):
    assert run("PPO", TWO | changes)[0] == run("ByDicts", TWO | changes)[0]


def test_a_minibatch_is_a_mapping_of_its_rows():
    whole = {"x": np.arange(8).reshape(4, 2), "coefficient": np.asarray(3.0)}
    held, asked = {}, []

    def hold(batch):
        asked.append(batch)
        return "future"

    parts = [MiniBatch(whole, np.array(rows), held) for rows in ([3, 1], [0, 2])]
    np.testing.assert_array_equal(parts[0]["x"], [[6, 7], [2, 3]])
    assert dict(parts[1]).keys() == whole.keys() and parts[1]["coefficient"] == 3
    with pytest.raises(ValueError, match="read-only"):
        parts[0]["x"][0] = 0
    reads = frozenset({"x"})
    for part in parts:
        assert part.to_message("actor", reads, hold).held == "future"
    assert [batch.keys() for batch in asked] == [{"x"}]
    parts[0].to_message("critic", reads, hold)
    assert len(asked) == 2
    assert (parts[0] | {"y": 1})["y"] == 1 and "y" not in parts[0]
    parts[0]["x"] = parts[0]["x"] + 1  # changed, it travels as it is
    np.testing.assert_array_equal(parts[0].to_message("actor", reads, hold)["x"], [[7, 8], [3, 4]])
    del parts[1]["coefficient"]
    assert parts[1].to_message("actor", None, hold).keys() == {"x"}


def test_what_is_not_per_row_is_neither_cut_nor_sent():
    batch = {
        "response_mask": np.ones((8, 2), bool),
        "rewards": np.arange(8.0),
        "coefficient": np.asarray(3.0),
        "by_prompt": np.arange(4.0),
    }
    taken = take_rows(batch, np.array([6, 1, 0]))
    assert taken["rewards"].tolist() == [6, 1, 0] and taken["response_mask"].shape == (3, 2)
    assert taken["coefficient"] == 3 and taken["by_prompt"].tolist() == [0, 1, 2, 3]
    config = GRPO.default_config()
    config.minibatch = 4
    algorithm = GRPO(ConfigDict(config), absent_roles(GRPO, ()), samples=2)
    parts = list(algorithm.minibatches(batch))
    assert sorted(np.concatenate([part["rewards"] for part in parts])) == list(range(8))
    assert all(set(part) == set(batch) - {"by_prompt"} for part in parts)


@pytest.mark.parametrize("changes", [{"data.packing": 16}, {"actor.micro_batch": 8}])
@pytest.mark.extended
def test_a_loss_reads_one_number_for_each_row(changes):
    # In the first step all responses are wrong: nothing is learned.
    changes = {"steps": 2, "algorithm.kl_coef": 0.0, "actor.max_grad_norm": 0.0} | changes
    weighed, plain = (run(name, changes)[0][1] for name in ("Weighed", "Unweighed"))
    assert weighed["actor/grad_norm"] > 0
    np.testing.assert_allclose(weighed["actor/grad_norm"], 2 * plain["actor/grad_norm"], rtol=1e-5)


def test_an_entry_of_another_shape_is_named():
    tokens = np.zeros((2, 3), np.float32)
    batch = {"response_mask": tokens > -1, "advantages": tokens, "old_logprobs": tokens[:, 0]}
    with pytest.raises(AssertionError, match="old_logprobs"):
        PolicyLoss()(tokens, None, batch)
