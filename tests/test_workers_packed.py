"""Training in packs: the same losses, gradients and scores as of padded rows.

Gradients as in test_workers_layouts: before - after = 1000 g. The padded rows are held to torch
there and in test_workers_roles.
"""

import dataclasses

import jax
import numpy as np
import pytest

from hjax.algorithms.losses import PolicyLoss, SupervisedLoss, ValueLoss
from hjax.algorithms.pair_loss import PairLoss
from hjax.algorithms.reward_model import ScoreLoss, append_end_position
from hjax.models.compute import Compute
from hjax.models.model_config import ModelConfig
from hjax.models.parameters import to_host
from hjax.sharding.layout import make_layouts
from hjax.workers import Actor, Critic, ModelReward, OptimizerConfig, Reference, WorkerContext
from hjax.workers.packer import Packer, PaddedBatch
from hjax.workers.scalar import RewardTrainer

DESCENT = OptimizerConfig(learning_rate=1e9, epsilon=1e6, max_grad_norm=0.0)
SCALE = 1e3
ROWS, SAMPLES, PROMPT, LENGTH, VOCAB = 16, 4, 6, 20, 32
MODEL = ModelConfig(VOCAB, 16, 24, 1, 4, 2, 4, 32, tie_embeddings=False)

POLICY = {
    "clipped": PolicyLoss(clip_high=0.3, dual_clip=3.0),
    "everything": PolicyLoss(
        aggregation="sequence", kl_coef=0.1, entropy_coef=0.01, correction="truncated"
    ),
    "sequence ratio": PolicyLoss(ratio="sequence", aggregation="constant", max_length=LENGTH),
    "REINFORCE": PolicyLoss(ratio="none", kl_coef=0.1, kl_adaptive=True, kl_estimator="k2"),
}
# name -> (worker class, loss, stage)
LOSSES = {name: (Actor, loss, "main") for name, loss in POLICY.items()} | {
    "supervised": (Actor, POLICY["clipped"], "warm_start"),
    "value": (Critic, ValueLoss(), "main"),
}
EVERYDAY_LOSSES = ("clipped", "everything", "value")


def context(role, loss=None, devices=1, train=None, **changes):
    options = {
        "layouts": make_layouts(jax.devices()[:devices], train or {"data": devices}),
        "model": MODEL,
        "samples": SAMPLES,
        "max_response_length": LENGTH,
        "loss": loss,
        "supervised_loss": SupervisedLoss(),
        "optimizer": DESCENT,
        "warm_start": DESCENT,
        "compute": Compute(unroll_layers=True),
    }
    return WorkerContext(role=role, **(options | changes))


def start(kind, loss=None, stage="main", **changes):
    worker = kind(context(kind.__name__.lower(), loss, **changes))
    worker.initialize()
    # As a trained model's: a value head is not zero, norms are not one.
    rng = np.random.default_rng(0)
    noise = lambda x: x + 0.3 * rng.normal(size=x.shape).astype(np.float32)  # noqa: E731
    params = jax.tree.map(noise, to_host(worker.params))
    worker.params = worker.network.place(params, worker.layouts.train)
    if stage != "main":
        worker.begin_stage(stage)
    return worker


@pytest.fixture(scope="module")
def batch():
    """Long-tailed lengths, one row unscored, two rows without a response."""
    rng = np.random.default_rng(1)
    groups = ROWS // SAMPLES
    prompts = rng.integers(1, VOCAB, (groups, PROMPT), dtype=np.int32)
    prompt_mask = np.arange(PROMPT) >= PROMPT - rng.integers(1, PROMPT + 1, (groups, 1))
    lengths = np.minimum(rng.geometric(0.2, ROWS), LENGTH)
    lengths[[3, 12]], lengths[7] = 0, LENGTH
    mask = np.arange(LENGTH) < lengths[:, None]
    shape = ROWS, LENGTH
    batch = {
        "prompts": np.repeat(prompts * prompt_mask, SAMPLES, axis=0),
        "prompt_mask": np.repeat(prompt_mask, SAMPLES, axis=0),
        "responses": rng.integers(1, VOCAB, shape, dtype=np.int32) * mask,
        "response_mask": mask,
        "row_mask": np.arange(ROWS) != 5,
        "prompt_id": np.arange(ROWS) // SAMPLES,
        "kl_coef": np.asarray(0.2, np.float32),
    }
    for name in ("advantages", "returns"):
        batch[name] = rng.normal(size=shape).astype(np.float32)
    for name in ("old_logprobs", "logprobs", "ref_logprobs", "values"):
        batch[name] = rng.normal(-3.0 if "log" in name else 0.0, 0.3, shape).astype(np.float32)
    return batch


def update(worker, batch, **more):
    """Metrics of one public update, and its gradient."""
    before = to_host(worker.params)
    calls = {Actor: "update_actor", Critic: "update_critic", RewardTrainer: "update_scores"}
    call = getattr(worker, calls[type(worker)])
    metrics = {key: float(x) for key, x in call(batch, **more).items()}
    return metrics, jax.tree.map(lambda a, b: (a - b) / SCALE, before, to_host(worker.params))


def same(found, expected):
    (metrics, gradient), (other_metrics, other) = found, expected
    assert metrics.pop("padding") < 1
    assert metrics.keys() == other_metrics.keys()
    for key, value in metrics.items():
        assert value == pytest.approx(other_metrics[key], rel=1e-5, abs=1e-6), key
    for (path, a), b in zip(
        jax.tree.leaves_with_path(gradient), jax.tree.leaves(other), strict=True
    ):
        error = np.linalg.norm(a - b)
        assert error <= 1e-5 * np.linalg.norm(b) + 1e-9, jax.tree_util.keystr(path)


@pytest.fixture(scope="module")
def padded(batch):
    """By loss, metrics and gradient of rows that are padded, each with its own prompt."""
    made = {}

    def of(name):
        if name not in made:
            kind, loss, stage = LOSSES[name]
            alone = {key: x for key, x in batch.items() if key != "prompt_id"}
            made[name] = update(start(kind, loss, stage, samples=SAMPLES), alone)
        return made[name]

    return of


CHOSEN_PACKS = {"packing": 0, "choose_packing": True}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            n,
            marks=[
                *[pytest.mark.slow] * (n not in EVERYDAY_LOSSES),
                *[pytest.mark.extended] * (n in ("clipped", "value")),
            ],
        )
        for n in LOSSES
    ],
)
def test_every_loss_has_the_same_value_and_gradient(name, batch, padded):
    """Prompts shared inside packs; a group longer than a pack is split."""
    kind, loss, stage = LOSSES[name]
    same(update(start(kind, loss, stage, packing=26), batch), padded(name))


def with_observations(batch):
    """The batch with tokens between the policy's that it did not draw: at the beginning of a row,
    at its end, in the middle, and all of a row."""
    rng = np.random.default_rng(2)
    mask = batch["response_mask"].copy()
    lengths = mask.sum(axis=1).astype(np.int32)
    mask &= rng.random(mask.shape) < 0.6
    mask[0, 0], mask[1, lengths[1] - 1], mask[7], mask[8] = False, False, True, False
    return batch | {"response_mask": mask, "response_lengths": lengths}


OBSERVED = {
    "everything": {"packing": 26}, "sequence ratio": CHOSEN_PACKS, "value": {"packing": 40},
    "clipped": {"packing": 64, "blocks": True}, "supervised": {"packing": 26},
}  # fmt: skip


@pytest.mark.parametrize("name", [
    pytest.param(n, marks=[pytest.mark.extended] * (n != "everything")) for n in OBSERVED
])  # fmt: skip
def test_observations_are_read_and_not_learned(name, batch, monkeypatch):
    """Packed and padded alike; and other tokens in their place change what the policy predicts."""
    kind, loss, stage = LOSSES[name]
    options = dict(OBSERVED[name])
    if options.pop("blocks", False):
        monkeypatch.setattr("hjax.models.attention_strategies.DENSE_LENGTH", 0)
    seen = with_observations(batch)
    alone = {key: x for key, x in seen.items() if key != "prompt_id"}
    plain = update(start(kind, loss, stage, samples=SAMPLES), alone)
    same(update(start(kind, loss, stage, **options), seen), plain)
    other = alone | {"responses": np.where(seen["response_mask"], seen["responses"], 1)}
    changed = update(start(kind, loss, stage, samples=SAMPLES), other)[0]
    assert changed["loss"] != pytest.approx(plain[0]["loss"], rel=1e-4)


@pytest.mark.parametrize("packing", [0, pytest.param(26, marks=pytest.mark.extended)])
def test_observations_are_what_they_are_in_a_prompt(packing):
    """A row [prompt | turn, observation, turn] has the loss and the gradient of two rows, of which
    the second has all before its turn as its prompt."""
    rng = np.random.default_rng(3)
    rows = []  # (prompt, turn, observation, turn)
    for _ in range(4):
        sizes = rng.integers(1, 4, 3)
        sizes = (int(rng.integers(1, 5)), *map(int, sizes))
        rows.append([rng.integers(1, VOCAB, n).tolist() for n in sizes])

    def batch_of(pairs, width):
        """Rows of (prompt, [(token, drawn, number)])."""
        made = {
            name: np.zeros((len(pairs), width), kind)
            for name, kind in (("responses", np.int32), ("response_mask", bool))
        }
        made |= {
            name: np.zeros((len(pairs), width), np.float32)
            for name in ("advantages", "old_logprobs", "logprobs", "ref_logprobs")
        }
        longest = max(len(prompt) for prompt, _ in pairs)
        prompts = np.zeros((len(pairs), longest), np.int32)
        mask = np.zeros(prompts.shape, bool)
        for i, (prompt, response) in enumerate(pairs):
            prompts[i, -len(prompt) :], mask[i, -len(prompt) :] = prompt, True
            for t, (token, drawn, number) in enumerate(response):
                made["responses"][i, t], made["response_mask"][i, t] = token, drawn
                values = np.random.default_rng([9, *number]).normal(size=4)
                made["advantages"][i, t] = values[0]
                for name, value in zip(("old_logprobs", "logprobs", "ref_logprobs"), values[1:]):
                    made[name][i, t] = -3 + 0.3 * value
        lengths = np.array([len(response) for _, response in pairs], np.int32)
        return made | {"prompts": prompts, "prompt_mask": mask, "response_lengths": lengths}

    whole, cut = [], []
    for i, (prompt, first, seen, second) in enumerate(rows):
        a = [(token, True, (i, 0, t)) for t, token in enumerate(first)]
        o = [(token, False, (i, 1, t)) for t, token in enumerate(seen)]
        b = [(token, True, (i, 2, t)) for t, token in enumerate(second)]
        whole.append((prompt, [*a, *o, *b]))
        cut += [(prompt, a), ([*prompt, *first, *seen], b)]
    loss, options = PolicyLoss(kl_coef=0.1, entropy_coef=0.01), {"packing": packing}
    metrics, gradient = update(start(Actor, loss, samples=1, **options), batch_of(whole, 10))
    other_metrics, other = update(start(Actor, loss, samples=1, **options), batch_of(cut, 4))
    for name in ("loss", "entropy", "grad_norm", "token_prob_error"):
        assert metrics[name] == pytest.approx(other_metrics[name], rel=1e-5), name
    flat = [np.concatenate([x.ravel() for x in jax.tree.leaves(g)]) for g in (gradient, other)]
    # Within 1e-6 with JAX 0.10; JAX 0.12 sums in another order, 1.35e-6.
    assert np.linalg.norm(flat[0] - flat[1]) <= 2e-6 * np.linalg.norm(flat[1])
    for a, b in zip(jax.tree.leaves(gradient), jax.tree.leaves(other), strict=True):
        assert np.linalg.norm(a - b) <= 1e-5 * np.linalg.norm(b) + 1e-8


# Packs where a batch is worth them, of which a pass may be as small as it likes.
CHOSEN = CHOSEN_PACKS


@pytest.fixture(autouse=True)
def small_passes(monkeypatch):
    monkeypatch.setattr("hjax.workers.packer.MIN_PASS_PLACES", 1)


# What packs go with: (loss, shared prompts, changes)
TOGETHER = {
    "prompts of their own": ("clipped", False, {}),
    "by blocks": ("clipped", True, {"packing": 64, "blocks": True}),
    "by blocks, prompts of their own": ("clipped", False, {"packing": 64, "blocks": True}),
    "passes of a pack": ("everything", True, {"micro_batch": 1}),
    "four parts, passes": ("sequence ratio", True, {"devices": 4, "micro_batch": 4}),
    "fsdp and tensor": (
        "everything", True, {"devices": 8, "train": {"data": 2, "fsdp": 2, "tensor": 2}},
    ),
    "tensor, by blocks": (
        "clipped", True,
        {"devices": 8, "train": {"data": 2, "tensor": 4}, "packing": 64, "blocks": True},
    ),
    "critic, parts, passes": ("value", True, {"devices": 4, "micro_batch": 4}),
    "demonstrations, parts": ("supervised", False, {"devices": 2}),
    "scanned, recomputed": ("clipped", True, {"compute": Compute(remat="full")}),
    "chosen": ("everything", True, CHOSEN),
    "chosen, prompts of their own": ("sequence ratio", False, CHOSEN),
    "chosen, by blocks": ("REINFORCE", True, CHOSEN | {"blocks": True}),
    "chosen, parts, passes": ("clipped", True, CHOSEN | {"devices": 2, "micro_batch": 8}),
    "chosen, fsdp and tensor": (
        "value", True, CHOSEN | {"devices": 8, "train": {"data": 2, "fsdp": 2, "tensor": 2}},
    ),
    "chosen, demonstrations": ("supervised", False, CHOSEN),
}  # fmt: skip


EVERYDAY = ("by blocks", "four parts, passes", "fsdp and tensor", "chosen, parts, passes")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in EVERYDAY else [pytest.mark.slow]) for name in TOGETHER],
)
@pytest.mark.extended
def test_packs_go_together_with(name, batch, padded, monkeypatch):
    loss_name, shared, changes = TOGETHER[name]
    changes = {"packing": 40} | changes
    if changes.pop("blocks", False):
        monkeypatch.setattr("hjax.models.attention_strategies.DENSE_LENGTH", 0)
    kind, loss, stage = LOSSES[loss_name]
    given = batch if shared else {key: x for key, x in batch.items() if key != "prompt_id"}
    worker = start(kind, loss, stage, **changes)
    assert worker.batch_layout(given, worker.grouped(given)).packing is not None
    same(update(worker, given), padded(loss_name))


# Losses of pairs: (worker class, loss).
PAIRED = {
    "sigmoid": (Actor, PairLoss(nll_coef=0.1)),
    "odds": (Actor, PairLoss(kind="odds")),
    "scores": (RewardTrainer, ScoreLoss(margin=0.5, centring=0.01, label_coef=0.2)),
}
# A pack of 52 holds the longest pair; 4 rows with a prompt that they share are two pairs.
PAIRS = {
    "one pack after another": {"packing": 52},
    "four parts, passes": {"packing": 60, "devices": 4, "micro_batch": 4},
    "shared prompts": {"packing": 52, "samples": SAMPLES},
    "chosen": CHOSEN,
    "chosen, shared prompts": CHOSEN | {"samples": SAMPLES, "devices": 2},
}


@pytest.mark.parametrize("how", PAIRS)
@pytest.mark.parametrize("name", PAIRED)
@pytest.mark.extended
def test_pairs_are_never_cut_apart(name, how, batch):
    """Loss, statistics and gradient of pairs are those of padded rows; one pair is left out, of
    two one side is empty."""
    kind, loss = PAIRED[name]
    changes = {"samples": 1, "unit": 2} | PAIRS[how]
    shared = changes["samples"] > 1
    given = {key: x for key, x in batch.items() if shared or key != "prompt_id"}
    if kind is RewardTrainer:
        given = append_end_position(given)
        rng = np.random.default_rng(3)
        labels = rng.integers(0, 2, given["response_mask"].shape).astype(np.float32)
        labels[rng.random(labels.shape) < 0.5] = np.nan
        margins = np.zeros_like(labels)
        margins[::2, 0] = 1.0
        given |= {"labels": labels, "margins": margins}
    alone = {key: x for key, x in given.items() if key != "prompt_id"}
    expected = update(start(kind, loss, samples=1, unit=2), alone)
    same(update(start(kind, loss, **changes), given), expected)


@pytest.mark.extended
def test_pretraining_is_packed_too(batch):
    """PPO-ptx's demonstrations beside the policy's rows."""
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
    found = update(start(Actor, POLICY["clipped"], packing=40), batch, pretrain=pretrain)
    assert "pretrain_loss" in found[0]
    same(found, expected)


@pytest.mark.parametrize(
    "changes",
    [{"packing": 32}, {"packing": 32, "devices": 4, "micro_batch": 4}, CHOSEN | {"devices": 2}],
)
@pytest.mark.parametrize(
    "kind, call, key",
    [
        (Actor, "compute_log_prob", "old_logprobs"),
        (Reference, "compute_ref_log_prob", "ref_logprobs"),
        (Critic, "compute_values", "values"),
    ],
)
@pytest.mark.extended
def test_scores_are_the_same(kind, call, key, changes, batch):
    loss = {Actor: POLICY["clipped"], Critic: ValueLoss()}.get(kind)
    expected = getattr(start(kind, loss), call)(batch)[key]
    worker = start(kind, loss, **changes)
    assert worker.batch_layout(batch, True).packing is not None
    found = getattr(worker, call)(batch)[key]
    np.testing.assert_allclose(found, expected, atol=2e-5)
    if kind is Actor:
        one, other = (w.compute_loss(batch)["loss"] for w in (worker, start(kind, loss)))
        assert float(one) == pytest.approx(float(other), rel=1e-5)


@pytest.mark.parametrize(
    "changes", [{"packing": 26}, {"packing": 26, "devices": 4}, CHOSEN | {"devices": 2}]
)
@pytest.mark.extended
def test_rewards_of_whole_sequences_are_the_same(changes, batch, monkeypatch):
    """One row of 26 tokens, others of a few: padded to a power of two, they are worth packs."""
    expected = start(ModelReward).compute_reward(batch)["rewards"]
    worker, read = start(ModelReward, **changes), []
    monkeypatch.setattr(worker, "_packing", lambda *of: read.append(packs(*of)) or read[-1])
    packs = type(worker)._packing.__get__(worker)
    found = worker.compute_reward(batch)["rewards"]
    assert read[0] is not None
    np.testing.assert_allclose(found, expected, atol=2e-5)


def test_padding_is_what_it_says(batch):
    """16 rows in packs of 26: places that hold no token, counted from the lengths."""
    prompts, responses = batch["prompt_mask"].sum(1), batch["response_mask"].sum(1)
    alone = {key: x for key, x in batch.items() if key != "prompt_id"}
    worker = start(Actor, POLICY["clipped"], packing=26)
    metrics, _ = update(worker, alone)
    tokens = (prompts + responses - 1)[responses > 0].sum()
    packs = tokens / (1 - metrics["padding"]) / 26
    assert packs == pytest.approx(round(packs), abs=1e-3)
    assert -(-tokens // 26) <= round(packs) <= 1.5 * tokens / 26


@pytest.mark.extended
def test_a_batch_chooses_packs_where_they_are_worth_it(batch):
    """Full rows are computed as padded ones, bit for bit; of many lengths two programs compile."""
    full = batch | {"response_mask": np.ones((ROWS, LENGTH), bool)}
    full |= {"prompt_mask": np.ones((ROWS, PROMPT), bool)}
    worker, plain = (start(Actor, POLICY["clipped"], **how) for how in (CHOSEN, {}))
    found, expected = update(worker, full), update(plain, full)
    assert found[0].pop("padding") == 0
    assert found[0] == expected[0]
    jax.tree.map(np.testing.assert_array_equal, found[1], expected[1])
    rng, choices, places_of_a_pack = np.random.default_rng(0), [], 32
    for turn in range(8):
        lengths = np.minimum(rng.geometric((0.03, 0.3)[turn % 2], ROWS), LENGTH)
        mask = np.arange(LENGTH) < lengths[:, None]
        given = batch | {"response_mask": mask}
        packing = worker.batch_layout(given, True).packing
        choices.append(packing is not None)
        # A third of the places is spared, those of the passes' ends among the packs'.
        rows = ROWS * (PROMPT / SAMPLES + LENGTH)
        tokens = batch["prompt_mask"][::SAMPLES].sum() + (lengths - 1).sum()
        if packing is None:
            assert tokens + 2 * places_of_a_pack > rows / 1.5
        else:
            places = int(packing.passes) * packing.source[0].size
            assert tokens <= places <= rows / 1.5
        metrics, _ = update(worker, given)
        own = batch["prompt_mask"][::SAMPLES].sum() + lengths.sum()
        if packing is None:
            assert metrics["padding"] == pytest.approx(1 - own / rows, abs=1e-6)
    assert 2 <= sum(choices) <= 6
    assert worker.updater._program._cache_size() == 2


def test_dry_runs_count_full_packs():
    """A program of the longest sequences: what `programs` traces runs as it says."""
    worker = start(Actor, POLICY["clipped"], packing=32, samples=1)
    shapes = worker.token_shapes(ROWS, PROMPT)["packing"]
    full = {"prompt_mask": np.ones((ROWS, PROMPT), bool)}
    full["response_mask"] = np.ones((ROWS, LENGTH), bool)
    made = worker.batch_layout(full, True).packing
    assert [x.shape for x in jax.tree.leaves(shapes)] == [x.shape for x in jax.tree.leaves(made)]
    assert shapes.source.shape == (1, 16, 32)  # 25 places each: a pack a row
    [update] = [p for p in worker.programs(ROWS, PROMPT) if p.name == "update"]
    traced = update.trace()
    assert traced.out_info[2]["loss"].shape == ()


def test_a_pack_never_shares_prompts_where_the_kernel_cannot(batch):
    """The TPU's kernel knows equal segments alone; short packs are attended to in one piece."""
    worker = start(Actor, POLICY["clipped"], packing=1024)
    padded = worker._padded(ROWS, (PROMPT, LENGTH), True)
    assert (
        worker._rows_per_prompt(padded, True) == SAMPLES
        and worker._rows_per_prompt(padded, False) == 1
    )
    worker.compute = dataclasses.replace(worker.compute, kernel_set="tpu")
    assert worker._rows_per_prompt(padded, True) == 1
    worker.context = dataclasses.replace(worker.context, packing=512)
    assert worker._rows_per_prompt(padded, True) == SAMPLES


@pytest.mark.parametrize("axis", ["pipe", "context", "tensor"])
def test_a_split_row_has_no_choice(axis):
    model = dataclasses.replace(MODEL, layers=2)
    worker = Actor(context("actor", POLICY["clipped"], 2, {axis: 2}, model=model, **CHOSEN))
    assert (worker.packer is not None) == (axis == "tensor")


def test_experts_that_are_balanced_by_pass_have_no_choice():
    """By what their context says; the loss itself is in test_router_loss."""
    for weight in (0.0, 0.1):
        given = context("actor", POLICY["clipped"], router_loss=weight, **CHOSEN)
        experts = dataclasses.replace(MODEL, family="mixtral", experts=2, experts_per_token=1)
        worker = Actor(dataclasses.replace(given, model=experts))
        assert (worker.packer is None) == (weight > 0)


def test_cudnn_s_attention_has_no_long_packs(batch):
    """It has no mask of several sequences, but those of up to 512 places go in one piece."""
    layout = make_layouts(jax.devices()[:1]).train
    padded = PaddedBatch(ROWS, (PROMPT, LENGTH), SAMPLES, 1)
    short = {key: batch[key] for key in ("prompt_mask", "response_mask")}
    long = {**short, "response_mask": np.pad(short["response_mask"], ((0, 0), (0, 600)))}
    for longest, there in ((0, True), (512, False)):
        packer = Packer(0, layout, longest=longest)
        assert packer(short, SAMPLES, padded).packing is not None
        wide = padded._replace(widths=(PROMPT, LENGTH + 600))
        assert (packer(long, SAMPLES, wide).packing is not None) == there
