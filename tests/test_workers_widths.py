"""Length buckets: losses, gradients and scores are those of whole rows, and less is computed.

Batches, losses and how gradients are read are those of test_workers_packed.
"""

import jax.extend
import numpy as np
import pytest
from test_workers_packed import (
    LENGTH,
    LOSSES,
    PAIRED,
    POLICY,
    PROMPT,
    ROWS,
    VOCAB,
    batch,
    padded,
    same,
    start,
    update,
)

import hjax
from hjax.algorithms.distillation import DistillationLoss
from hjax.algorithms.losses import ValueLoss
from hjax.algorithms.reward_model import with_end
from hjax.errors import ConfigError
from hjax.models.compute import Compute
from hjax.workers import Actor, Critic, ModelReward, Reference
from hjax.workers.scorer import Scorer
from hjax.workers.widths import make_widths, sizes_of
from hjax.xla.flops import count_flops

__all__ = ["batch", "padded"]  # fixtures

slow = pytest.mark.slow
PASSES = {"length_buckets": 2, "micro_batch": 4}
EVERYDAY = ("everything", "value")


@pytest.mark.parametrize(
    "name", [n if n in EVERYDAY else pytest.param(n, marks=slow) for n in LOSSES]
)
def test_every_loss_has_the_same_value_and_gradient(name, batch, padded):
    """Rows in order of length, four to a pass, each with its own prompt."""
    kind, loss, stage = LOSSES[name]
    alone = {key: x for key, x in batch.items() if key != "prompt_id"}
    same(update(start(kind, loss, stage, **PASSES), alone), padded(name))


# What widths go with: (loss, shared prompts, changes).
TOGETHER = {
    "shared prompts, more widths": ("clipped", True, {"length_buckets": 4}),
    "half a group a pass": ("everything", True, {"micro_batch": 2}),
    "one pass": ("clipped", True, {"micro_batch": 0}),
    "four parts": ("sequence ratio", False, {"devices": 4, "micro_batch": 8}),
    "fsdp and tensor, shared prompts": (
        "everything", True,
        {"devices": 8, "train": {"data": 2, "fsdp": 2, "tensor": 2}, "micro_batch": 8},
    ),
    "critic, parts": ("value", True, {"devices": 4}),
    "demonstrations, parts": ("supervised", False, {"devices": 2}),
    "scanned, recomputed": ("clipped", True, {"compute": Compute(remat="full")}),
}  # fmt: skip


@pytest.mark.parametrize(
    "name",
    [
        n if n in ("one pass", "four parts") else pytest.param(n, marks=slow)
        for n in TOGETHER
    ],
)
def test_widths_go_together_with(name, batch, padded):
    loss_name, shared, changes = TOGETHER[name]
    kind, loss, stage = LOSSES[loss_name]
    given = batch if shared else {key: x for key, x in batch.items() if key != "prompt_id"}
    same(update(start(kind, loss, stage, **(PASSES | changes)), given), padded(loss_name))


@pytest.mark.parametrize("name", ["sigmoid", "scores", pytest.param("odds", marks=slow)])
def test_pairs_stay_together(name, batch):
    kind, loss = PAIRED[name]
    given = {key: x for key, x in batch.items() if key != "prompt_id"}
    if kind is Scorer:
        given = with_end(given)
        shape = given["response_mask"].shape
        labels = np.random.default_rng(3).integers(0, 2, shape).astype(np.float32)
        given |= {"labels": labels, "margins": np.ones(shape, np.float32)}
    expected = update(start(kind, loss, samples=1, unit=2), given)
    same(update(start(kind, loss, samples=1, unit=2, **PASSES), given), expected)


def test_what_a_place_has_several_numbers_for_is_cut_too(batch):
    """A teacher's likeliest tokens, [rows, length, k]."""
    rng = np.random.default_rng(5)
    tokens = np.argsort(rng.random((ROWS, LENGTH, VOCAB)))[..., :3].astype(np.int32)
    of = {"teacher_tokens": tokens, "teacher_logprobs": np.full(tokens.shape, -2.0, np.float32)}
    loss = DistillationLoss(top_k=3)
    expected = update(start(Actor, loss), batch | of)
    same(update(start(Actor, loss, **PASSES), batch | of), expected)


def test_pretraining_has_widths_of_its_own(batch):
    rng = np.random.default_rng(7)
    mask = np.arange(LENGTH) < rng.integers(1, LENGTH, (8, 1))
    pretrain = {
        "prompts": rng.integers(1, VOCAB, (8, PROMPT), dtype=np.int32),
        "prompt_mask": np.ones((8, PROMPT), bool),
        "responses": rng.integers(1, VOCAB, (8, LENGTH), dtype=np.int32) * mask,
        "response_mask": mask,
        "coefficient": np.asarray(0.7, np.float32),
    }
    expected = update(start(Actor, POLICY["clipped"]), batch, pretrain=pretrain)
    found = update(start(Actor, POLICY["clipped"], **PASSES), batch, pretrain=pretrain)
    assert "pretrain_loss" in found[0]
    same(found, expected)


@pytest.mark.parametrize("devices", [1, 4])
@pytest.mark.parametrize(
    "kind, call, key",
    [
        (Actor, "compute_log_prob", "old_logprobs"),
        pytest.param(Reference, "compute_ref_log_prob", "ref_logprobs", marks=slow),
        (Critic, "compute_values", "values"),
        (ModelReward, "compute_reward", "rewards"),
    ],
)
def test_scores_are_the_same_in_the_batch_s_order(kind, call, key, devices, batch):
    loss = {Actor: POLICY["clipped"], Critic: ValueLoss()}.get(kind)
    expected = getattr(start(kind, loss), call)(batch)[key]
    worker = start(kind, loss, devices=devices, **PASSES)
    found = getattr(worker, call)(batch)[key]
    assert found.shape == expected.shape
    np.testing.assert_allclose(found, expected, atol=2e-5)


def test_which_rows_share_a_pass_by_hand():
    """Eight rows on two devices, two passes of two rows each, steps of 10 places."""
    prompts = np.array([3, 3, 3, 3, 3, 3, 3, 3])
    responses = np.array([40, 5, 31, 6, 7, 20, 9, 8])
    made = make_widths(prompts, responses, (4, 40), buckets=4, parts=2, passes=2)
    # The four shortest need 10 places, the others, up to 40, all 40; prompts stay whole.
    assert made.sizes == ((4, 10), (4, 20), (4, 30), (4, 40))
    assert made.chosen.tolist() == [0, 3]
    # A device's rows follow each other, in it those of the first pass come first.
    assert made.order.tolist() == [1, 3, 6, 5, 4, 7, 2, 0]
    assert made.padding == pytest.approx(1 - (24 + 126) / (4 * 14 + 4 * 44))


def test_rows_of_a_prompt_stay_together_and_prompts_are_cut_by_hand():
    """Two groups of two; a long prompt goes with a long answer, so both are cut."""
    prompts, responses = np.array([2, 2, 8, 8]), np.array([3, 1, 9, 12])
    made = make_widths(prompts, responses, (8, 12), 4, parts=1, passes=2, chunk=2, share=2)
    assert made.sizes == ((2, 3), (4, 6), (6, 9), (8, 12))
    assert made.order.tolist() == [0, 1, 2, 3] and made.chosen.tolist() == [0, 3]
    # Prompts stand once for two rows.
    assert made.padding == pytest.approx(1 - (2 + 8 + 25) / (2 + 2 * 3 + 8 + 2 * 12))


def test_steps_of_long_rows_are_whole_tiles():
    assert sizes_of((100, 1000), 4, False) == ((100, 256), (100, 512), (100, 768), (100, 1000))
    assert sizes_of((0, 3), 8, True) == ((0, 1), (0, 2), (0, 3))


def test_a_narrow_pass_computes_less():
    """By the traced program: products of each branch, of which the last has whole rows."""
    changes = PASSES | {"length_buckets": 4}
    worker = start(Actor, POLICY["clipped"], samples=1, **changes)
    [program] = [p for p in worker.programs(ROWS, PROMPT) if p.name == "update"]

    def branches(jaxpr):
        for equation in jaxpr.eqns:
            if equation.primitive.name == "cond" and len(equation.params["branches"]) == 4:
                yield [count_flops(b).total for b in equation.params["branches"]]
            for inner in jax.extend.core.jaxprs_in_params(equation.params):
                yield from branches(inner)

    [flops] = branches(program.trace().jaxpr.jaxpr)
    places = [PROMPT + n for n in (5, 10, 15, LENGTH)]
    for found, expected in zip(flops, places, strict=True):
        # Attention's share grows with the square of the places.
        assert (expected / places[-1]) ** 2 <= found / flops[-1] <= expected / places[-1]
    plain = start(Actor, POLICY["clipped"], samples=1, micro_batch=4)
    [whole] = [p for p in plain.programs(ROWS, PROMPT) if p.name == "update"]
    assert count_flops(program.trace().jaxpr).total == count_flops(whole.trace().jaxpr).total


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"data.packing": 64}, "config.data.length_buckets=4: packs (data.packing=64) have no pad"),
        ({"layout.actor.train.pipe": 2}, "not go with layout.actor.train.pipe=2; use pipe=1"),
        ({"layout.critic.train.context": 2}, "not go with layout.critic.train.context=2"),
    ],
)
def test_what_has_one_width_is_refused(changes, says):
    config = hjax.get_config("ppo.py", {"data.length_buckets": 4, "display.enabled": False})
    config.update_from_flattened_dict(changes)
    with pytest.raises(ConfigError) as caught:
        hjax.Trainer(config)
    assert says in str(caught.value)
