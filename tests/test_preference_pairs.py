"""Preference pairs: their losses against the papers' formulas, the data, and runs on them."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import computed, read_rows, tiny_config, trainer_of

from hjax.algorithms import ALGORITHMS
from hjax.algorithms.pair_loss import PairLoss
from hjax.data.dataset import Dataset
from hjax.data.tasks import TASKS, get_task
from hjax.errors import ConfigError, DataError

PAIRS, LENGTH = 3, 4
PREFERENCE = ("DPO", "IPO", "CDPO", "RobustDPO", "HingeDPO", "ORPO", "SimPO")


def batch_of(seed=0):
    """Three pairs of ragged responses, garbage in the padding."""
    rng = np.random.default_rng(seed)
    mask = np.arange(LENGTH) < rng.integers(1, LENGTH + 1, 2 * PAIRS)[:, None]
    policy, reference = (-rng.uniform(0.1, 2.0, mask.shape) for _ in range(2))
    batch = {"response_mask": mask, "ref_logprobs": np.where(mask, reference, np.nan)}
    return np.where(mask, policy, 7.0), batch


def softplus(x):
    return np.log1p(np.exp(x))


def expected(name, config, policy, batch):
    """The loss of a step in plain Python, as each paper writes it."""
    losses = []
    chosen_tokens = batch["response_mask"][::2].sum() / PAIRS
    for pair in range(PAIRS):
        rows = []
        for row in (2 * pair, 2 * pair + 1):
            kept = batch["response_mask"][row]
            rows.append((policy[row][kept], batch["ref_logprobs"][row][kept]))
        (w, ref_w), (l, ref_l) = rows  # noqa: E741
        beta, e = config.beta, config.smoothing
        delta = (w.sum() - ref_w.sum()) - (l.sum() - ref_l.sum())
        if name in ("DPO", "CDPO"):
            loss = (1 - e) * softplus(-beta * delta) + e * softplus(beta * delta)
        elif name == "RobustDPO":
            loss = (1 - e) * softplus(-beta * delta) - e * softplus(beta * delta)
            loss /= 1 - 2 * e
        elif name == "IPO" and config.kind == "ipo_sum":
            loss = (delta - 1 / (2 * beta)) ** 2
        elif name == "IPO":
            loss = ((w - ref_w).mean() - (l - ref_l).mean() - 1 / (2 * beta)) ** 2
        elif name == "HingeDPO":
            loss = max(0.0, 1 - beta * delta)
        elif name == "SimPO":
            loss = softplus(-(beta * (w.mean() - l.mean()) - config.margin))
        else:
            odds = [np.exp(x.mean()) / (1 - np.exp(x.mean())) for x in (w, l)]
            shown = w.mean() if config.nll_over == "response" else w.sum() / chosen_tokens
            loss = -shown + beta * softplus(-np.log(odds[0] / odds[1]))
        losses.append(loss)
    return np.mean(losses)


@pytest.mark.parametrize(
    "name, keys",
    [*((name, {}) for name in PREFERENCE), ("IPO", {"kind": "ipo_sum"}),
     ("ORPO", {"nll_over": "batch"})],
)  # fmt: skip
def test_a_loss_is_its_papers_with_the_gradient_of_finite_differences(name, keys):
    config = ALGORITHMS[name].default_config()
    config.update(keys)
    loss = ALGORITHMS[name].losses(config, LENGTH)["actor"]
    policy, batch = batch_of()
    batch |= loss.prepared(batch)

    def total(x):
        return jnp.sum(loss.weights(batch) * loss(x, None, batch)[0])

    value, gradient = jax.jit(jax.value_and_grad(total))(policy.astype(np.float32))
    np.testing.assert_allclose(value, expected(name, config, policy, batch), rtol=1e-5)
    assert not np.asarray(gradient)[~batch["response_mask"]].any()
    rng = np.random.default_rng(1)
    for _ in range(3):
        move = np.where(batch["response_mask"], rng.normal(size=policy.shape), 0.0)
        ahead, behind = (expected(name, config, policy + s * move, batch) for s in (1e-5, -1e-5))
        np.testing.assert_allclose(
            np.sum(np.asarray(gradient) * move), (ahead - behind) / 2e-5, rtol=2e-3, atol=1e-5
        )


def test_statistics_are_means_over_pairs():
    policy, batch = batch_of(4)
    loss = PairLoss(beta=0.5)
    _, stats = loss(policy.astype(np.float32), None, batch)
    weights = loss.stat_weights(batch)
    kept = batch["response_mask"]
    ratio = np.where(kept, policy - np.where(kept, batch["ref_logprobs"], 0), 0).sum(1)
    for name, values in (
        ("accuracy", ratio[::2] > ratio[1::2]),
        ("margin", 0.5 * (ratio[::2] - ratio[1::2])),
        ("chosen_reward", 0.5 * ratio[::2]),
        ("rejected_reward", 0.5 * ratio[1::2]),
    ):
        np.testing.assert_allclose(np.sum(weights * stats[name]), np.mean(values), rtol=1e-5)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"kind": "dpo"}, "kind='dpo' is not built: use sigmoid, ipo"),
        ({"beta": 0.0}, "beta=0.0 must be above 0"),
        ({"smoothing": 0.5}, "smoothing=0.5 must be 0 to below 0.5"),
        ({"kind": "ipo", "smoothing": 0.1}, "smoothing=0.1 has no effect with kind='ipo'"),
        ({"kind": "robust"}, "kind='robust' needs smoothing above 0"),
        ({"margin": 1.0}, "margin=1.0 has no effect with kind='sigmoid'"),
        ({"nll_over": "batch"}, "nll_over='batch' has no effect without the likelihood"),
        ({"nll_over": "row"}, "nll_over='row': use response or batch"),
    ],
)
def test_switches_that_mean_nothing_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        PairLoss(**options)


# Data


CHAT = [{"role": "user", "content": "1+1"}]
ROWS = {
    "prompt apart": ({"prompt": "a>", "chosen": "bc", "rejected": "cb"}, "a>", "bc", "cb"),
    "a dialogue": (
        {
            "chosen": "\n\nHuman: hi\n\nAssistant: yes, sir",
            "rejected": "\n\nHuman: hi\n\nAssistant: yes, no",
        },
        "\n\nHuman: hi\n\nAssistant:", " yes, sir", " yes, no",
    ),
    "a common beginning": ({"chosen": "to be or", "rejected": "to be off"}, "to be ", "or", "off"),
}  # fmt: skip


@pytest.mark.parametrize("case", ROWS)
def test_where_a_pairs_prompt_ends(case, tmp_path):
    row, prompt, chosen, rejected = ROWS[case]
    (tmp_path / "pairs.jsonl").write_text(json.dumps(row) + "\n")

    class Letters:
        vocab_size = 1000

        def encode(self, text):
            return [ord(letter) for letter in text]

        def decode(self, tokens):
            return "".join(map(chr, tokens))

    made = Dataset.from_file(tmp_path / "pairs.jsonl", Letters())
    assert made.prompt_text == [prompt]
    assert (made.columns["chosen"], made.columns["rejected"]) == ([chosen], [rejected])


BROKEN = [
    ({"chosen": "1", "rejected": "1"}, {}, "every row is left out: 1 × equal pair"),
    ({"chosen": "1", "rejected": "2"}, {}, "begin with nothing in common"),
    ({"prompt": "12>", "chosen": "1", "rejected": "1"}, {}, "every row is left out: 1 × equal"),
    ({"prompt": "12>", "chosen": "1", "rejected": 3}, {}, "pairs.jsonl:1: rejected is 3"),
    ({"prompt": "12>", "chosen": CHAT, "rejected": "1"}, {}, "are text and chat messages"),
    ({"prompt": "12>", "chosen": "1" * 9, "rejected": "2"}, {}, "jsonl:1: an answer has 10 tokens"),
    (
        {"prompt": "12>", "answer": "1"},
        {},
        "DPO needs preference pairs; this file has prompt, answer",
    ),
    # With held-out data that nobody named, and a prompt that cannot be told from one answer.
    (
        {"question": "12>", "chosen": "1"},
        {"eval.every": 1, "data.eval_fraction": 0.5},
        "pairs.jsonl: DPO needs .*; this file has question, chosen: give it the columns `chosen` "
        "and `rejected`$",
    ),
    ({"chosen": "12>1"}, {}, "pairs.jsonl: DPO needs preference pairs; this file has chosen: give"),
    (None, {"warm_start.batch": 7}, "warm_start.batch=7: sequences of pairs; use an even"),
    (None, {"actor.micro_batch": 1}, "actor.micro_batch=1: sequences of pairs; use an even"),
    (None, {"warm_start.batch": 8}, "8 data-parallel parts, 2 rows of a pair together, of actor"),
    (None, {"data.packing": 12}, "a pack holds whole pairs, and of both sides prompts of 5 with"),
]


@pytest.mark.parametrize("row, changes, message", BROKEN)
def test_wrong_pairs_get_one_line(row, changes, message, tmp_path):
    if row is not None:
        (tmp_path / "pairs.jsonl").write_text(json.dumps(row) + "\n")
        task = get_task("sorting")
        task.tokenizer().save(tmp_path / "tokenizer")
        changes = {
            "data.path": str(tmp_path / "pairs.jsonl"),
            "tokenizer.path": str(tmp_path / "tokenizer"),
            "warm_start.steps": 0,
            "eval.every": 0,
        } | changes
    with pytest.raises((ConfigError, DataError), match=message) as caught:
        with trainer_of("DPO", SMALL | changes):
            pass
    assert "\n" not in str(caught.value)


def test_built_in_tasks_make_wrong_answers():
    rng = np.random.default_rng(0)
    for name in TASKS:
        task = get_task(name)
        records = task.examples("train", seed=0, count=30)
        if "answer" not in records[0]:
            with pytest.raises(ConfigError, match="has no right and wrong, so no preference pairs"):
                task.mistake(records[0], rng)
            continue
        for record in records:
            wrong = task.mistake(record, rng)
            assert not task.is_correct(wrong, record)
            assert len(wrong) <= task.response_length


# Runs

SMALL = {"steps": 4, "warm_start.batch": 16, "warm_start.steps": 2, "checkpoint.every": 2}


@pytest.mark.extended
def test_a_run_is_the_same_in_micro_batches_on_devices_and_after_a_stop(tmp_path):
    with trainer_of("DPO", SMALL, tmp_path / "whole") as trainer:
        rows = [computed(row) for row in trainer.run()]
    assert {"actor/loss", "actor/accuracy", "actor/margin"} <= rows[0].keys()
    # On the reference's own weights nothing is preferred yet: log 2.
    np.testing.assert_allclose(rows[0]["actor/loss"], np.log(2), rtol=1e-5)
    with trainer_of("DPO", SMALL, tmp_path / "parts") as trainer:
        for _ in range(3):
            trainer.step()
    with trainer_of("DPO", SMALL, tmp_path / "parts") as trainer:
        trainer.run()
    assert [computed(row) for row in read_rows(tmp_path / "parts")] == rows
    rows[0].pop("actor/accuracy")  # of margins that are 0 but for rounding
    changes = {"actor.micro_batch": 4, "layout.actor.train.tensor": 4}
    with trainer_of("DPO", SMALL | changes) as trainer:
        made = [computed(row) for row in trainer.run()]
    for mine, row in zip(made, rows, strict=True):
        for key, value in row.items():
            np.testing.assert_allclose(mine[key], value, rtol=2e-4, atol=1e-5)


@pytest.mark.parametrize("name", [n for n in PREFERENCE if n != "DPO"])
@pytest.mark.slow
def test_each_of_them_takes_steps(name):
    with trainer_of(name, SMALL) as trainer:
        rows = trainer.run()
    assert len(rows) == 4 and all(np.isfinite(row["actor/loss"]) for row in rows)
    assert tiny_config(name, SMALL).algorithm.name == name
