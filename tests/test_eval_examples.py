"""Evaluation on held-out examples: loss of demonstrations, predictions of pairs and verdicts."""

import json

import numpy as np
import pytest
from helpers import ONE_DEVICE, trainer_of
from references import AutoModelForCausalLM, torch

import hjax
from hjax.data.tasks import get_task
from hjax.errors import DataError

# Names whose order of rows is not the alphabet's; lengths differ.
ROWS = [
    {"prompt": f"{'7' * (i % 4 + 1)}{i}>", "response": f"{i * 37}"[: i % 3 + 1], "level": level}
    for i, level in enumerate(["zeta", "alpha", "zeta", "mid", "alpha", "zeta", "mid"] * 2)
]


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def file_keys(folder, train, held_out, **keys):
    get_task("sorting").tokenizer().save(folder / "tokenizer")
    return {
        **ONE_DEVICE,
        "data.task": "",
        "data.path": write(folder / "train.jsonl", train),
        "data.eval_path": write(folder / "held_out.jsonl", held_out),
        "tokenizer.path": f"{folder}/tokenizer",
        "rollout.max_response_length": 8,
        "eval.every": 1,
        "warm_start.batch": 4,
        "warm_start.steps": 0,
    } | keys


def losses_by_torch(directory, tokenizer, rows):
    """Sum of the response tokens' negative log-likelihood, with its end, and their number."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    found = []
    for row in rows:
        prompt = tokenizer.encode(row["prompt"])
        response = [*tokenizer.encode(row["response"], add_special=False), tokenizer.eos_ids[0]]
        with torch.no_grad():
            logits = model(torch.tensor([prompt + response])).logits[0]
        each = torch.log_softmax(logits.double(), -1)[len(prompt) - 1 : -1]
        found.append((-sum(float(each[i, t]) for i, t in enumerate(response)), len(response)))
    return np.array(found)


@pytest.mark.parametrize("algorithm", ["SFT", "SPIN"])
def test_the_loss_of_demonstrations_is_torchs(algorithm, tmp_path):
    keys = file_keys(tmp_path, ROWS, ROWS[:11], **{"rollout.temperature": 0.7})
    if algorithm == "SPIN":
        keys |= {"rollout.samples": 1, "rollout.prompts": 4}
    with trainer_of(algorithm, {**keys, "eval.by": "level"}) as trainer:
        metrics = trainer.evaluate()
        tokenizer = trainer.inputs.tokenizer
        exported = trainer.export(tmp_path / "exported")
    sums = losses_by_torch(exported, tokenizer, ROWS[:11])
    assert metrics["eval/loss"] == pytest.approx(sums[:, 0].sum() / sums[:, 1].sum(), rel=1e-5)
    for level in ("zeta", "alpha", "mid"):
        chosen = sums[[row["level"] == level for row in ROWS[:11]]].sum(axis=0)
        assert metrics[f"eval/{level}/loss"] == pytest.approx(chosen[0] / chosen[1], rel=1e-5)
    assert {name for name in metrics if name.endswith("loss")} == {
        "eval/loss", "eval/zeta/loss", "eval/alpha/loss", "eval/mid/loss",
    }  # fmt: skip


def test_it_falls_as_the_run_learns_and_chooses_the_best_checkpoint(tmp_path):
    keys = file_keys(tmp_path, ROWS, ROWS[:5], **{"actor.learning_rate": 3e-3, "steps": 6})
    keys |= {"checkpoint.best": "eval/loss", "checkpoint.best_mode": "min", "checkpoint.every": 1}
    with trainer_of("SFT", keys, tmp_path / "run") as trainer:
        rows = trainer.run()
    losses = [row["eval/loss"] for row in rows]
    assert losses == sorted(losses, reverse=True) and losses[-1] < 0.9 * losses[0]
    best, last = (hjax.load_model(tmp_path / "run" / "checkpoints" / x) for x in ("best", "6"))
    np.testing.assert_array_equal(best.logits([[3, 4, 5]]), last.logits([[3, 4, 5]]))


def test_predictions_of_verdicts_are_by_hand_those_of_the_policy(tmp_path):
    rows = [row | {"label": i % 3 != 1} for i, row in enumerate(ROWS)]
    keys = file_keys(tmp_path, rows, rows[:7], **{"actor.learning_rate": 1e-2, "steps": 3})
    with trainer_of("KTO", keys | {"algorithm.beta": 0.3}) as trainer:
        first = trainer.evaluate()
        reference = trainer.export(tmp_path / "reference")
        # Without a difference to the reference each answer is as likely right as wrong.
        assert first["eval/answer_accuracy"] == 0.5
        assert first["eval/answer_loss"] == pytest.approx(np.log(2), rel=1e-5)
        trainer.run()
        last = trainer.evaluate()
        policy, tokenizer = trainer.export(tmp_path / "policy"), trainer.inputs.tokenizer
    logits, labels = [], []
    for start, count in ((0, 4), (4, 3)):  # batches of four: the last row stands twice
        batch = [*rows[start : start + count], rows[start + count - 1]][:4]
        others = [batch[i] | {"response": batch[i - 1]["response"]} for i in range(4)]
        ratio, baseline = (
            losses_by_torch(reference, tokenizer, some)[:, 0]
            - losses_by_torch(policy, tokenizer, some)[:, 0]
            for some in (batch, others)
        )
        logits += list(0.3 * (ratio - max(baseline.mean(), 0.0))[:count])
        labels += [row["label"] for row in batch[:count]]
    signed = np.where(labels, logits, np.negative(logits))
    assert last["eval/answer_loss"] == pytest.approx(np.log1p(np.exp(-signed)).mean(), rel=1e-4)
    assert last["eval/answer_accuracy"] == pytest.approx((signed > 0).mean())


@pytest.mark.parametrize(("algorithm", "prefix"), [("RewardModel", ""), ("DPO", "pair_")])
def test_predictions_of_pairs_by_group(algorithm, prefix, tmp_path):
    pairs = [
        {"prompt": row["prompt"], "chosen": row["response"], "rejected": "8", "level": row["level"]}
        for row in ROWS
    ]
    keys = file_keys(tmp_path, pairs, pairs[:9], **{"actor.learning_rate": 1e-2, "steps": 2})
    with trainer_of(algorithm, keys | {"eval.by": "level"}) as trainer:
        trainer.run()
        together = trainer.evaluate()
    counts = {"zeta": 4, "alpha": 3, "mid": 2}
    for figure in ("accuracy", "loss"):
        parts = [n * together[f"eval/{level}/{prefix}{figure}"] for level, n in counts.items()]
        assert sum(parts) / 9 == pytest.approx(together[f"eval/{prefix}{figure}"], rel=1e-6)
    one = [pair for pair in pairs[:9] if pair["level"] == "alpha"]
    keys |= {"data.eval_path": write(tmp_path / "alpha.jsonl", one)}
    with trainer_of(algorithm, keys) as trainer:
        trainer.run()
        alone = trainer.evaluate()
    for figure in ("accuracy", "loss", "calibration_error"):
        name = f"{prefix}{figure}"
        assert together[f"eval/alpha/{name}"] == pytest.approx(alone[f"eval/{name}"], rel=1e-4)


@pytest.mark.parametrize("algorithm", ["SFT", "RewardModel", "KTO"])
def test_held_out_data_that_measures_nothing_is_refused(algorithm, tmp_path):
    train = [
        row | {"chosen": "1", "rejected": "2", "label": i % 2 == 0} for i, row in enumerate(ROWS)
    ]
    keys = file_keys(tmp_path, train, [{"prompt": "12>"}])
    with pytest.raises(DataError, match=r"held_out\.jsonl: nothing to evaluate by"):
        trainer_of(algorithm, keys).__enter__()


def test_a_held_out_answer_that_cannot_be_used_is_named(tmp_path):
    held_out = [*ROWS[:2], ROWS[2] | {"response": "123456789"}]
    keys = file_keys(tmp_path, ROWS, held_out)
    with pytest.raises(DataError, match=r"held_out\.jsonl:3: an answer has 10 tokens"):
        trainer_of("SFT", keys).__enter__()
