"""Reward, cost and process reward models: losses, data, calibration, runs, and where they go."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from families import MODELS, model
from helpers import COSTLY, computed, read_rows, trainer_of
from references import AutoModelForSequenceClassification, torch

import hjax
from hjax.algorithms import ALGORITHMS
from hjax.algorithms.prediction_calibration import calibration_bins, prediction_metrics
from hjax.algorithms.reward_model import StepLoss, append_end_position, end_scores
from hjax.controller import join
from hjax.data.dataset import Dataset
from hjax.data.tasks import TASKS, get_task
from hjax.errors import ConfigError, DataError
from hjax.launch.export import main as export
from hjax.models.compute import Compute
from hjax.models.forward import sequence_states
from hjax.models.huggingface import save_weights
from hjax.models.parameters import scalar_network, to_host
from hjax.models.weights import read_config
from hjax.rollout.sampling_params import SamplingParams
from hjax.sharding.layout import make_layouts
from hjax.show.report import write_report

PAIRS, LENGTH = 3, 5


def batch_of(seed=0):
    """Three pairs of ragged responses, labels and margins at their ends, garbage in the padding."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, LENGTH, 2 * PAIRS)
    batch = append_end_position(
        {
            "responses": rng.integers(1, 9, (2 * PAIRS, LENGTH - 1)),
            "response_mask": np.arange(LENGTH - 1) < lengths[:, None],
        }
    )
    labels, margins = np.full((2 * PAIRS, LENGTH), np.nan), np.zeros((2 * PAIRS, LENGTH))
    labels[range(2 * PAIRS), lengths] = [1, 0, 1, 1, 0, 0]
    margins[[0, 2, 4], lengths[::2]] = [0.5, 2.0, 1.0]
    scores = np.where(batch["response_mask"], rng.normal(size=labels.shape), np.nan)
    return scores, batch | {"labels": labels, "margins": margins}, lengths


def nll(x):
    return np.log1p(np.exp(-x))


CASES = {
    "plain": ("RewardModel", {}),
    "margin": ("RewardModel", {"margin": 0.7}),
    "centring": ("RewardModel", {"centring": 0.3}),
    "labels": ("RewardModel", {"label_coef": 0.5, "margin": 0.1}),
    "cost": ("CostModel", {}),
}


@pytest.mark.parametrize("case", CASES)
def test_a_loss_is_its_formula_with_the_gradient_of_finite_differences(case):
    name, changes = CASES[case]
    config = ALGORITHMS[name].default_config()
    config.update(changes)
    loss = ALGORITHMS[name].losses(config, LENGTH)["actor"]
    scores, batch, lengths = batch_of()
    sign = -1 if name == "CostModel" else 1

    def expected(scores):
        losses = []
        for pair, margin in enumerate((0.5, 2.0, 1.0)):
            rows = 2 * pair, 2 * pair + 1
            w, l = (sign * scores[row, lengths[row]] for row in rows)  # noqa: E741
            value = nll(w - l - config.margin * margin) + config.centring * (w + l) ** 2
            for row, z in zip(rows, (w, l), strict=True):
                y = 2 * batch["labels"][row, lengths[row]] - 1
                value += config.label_coef * nll(y * z)
            losses.append(value)
        return np.mean(losses)

    def total(x):
        return jnp.sum(loss.weights(batch) * loss(x, batch)[0])

    value, gradient = jax.jit(jax.value_and_grad(total))(scores.astype(np.float32))
    np.testing.assert_allclose(value, expected(scores), rtol=1e-5)
    move = np.where(batch["response_mask"], np.random.default_rng(1).normal(size=scores.shape), 0)
    ahead, behind = (expected(scores + step * move) for step in (1e-5, -1e-5))
    slope = np.sum(np.nan_to_num(gradient) * move)
    np.testing.assert_allclose(slope, (ahead - behind) / 2e-5, rtol=1e-3)
    assert not np.asarray(gradient)[~batch["response_mask"]].any()
    _, stats = loss(scores.astype(np.float32), batch)
    end = sign * scores[range(2 * PAIRS), lengths]
    accuracy = np.sum(loss.stat_weights(batch) * stats["accuracy"])
    np.testing.assert_allclose(accuracy, np.mean(end[::2] > end[1::2]), rtol=1e-6)


def test_steps_are_judged_where_they_end():
    scores, batch, _ = batch_of()
    labels = np.full_like(scores, np.nan)
    labels[0, 0], labels[1, 1], labels[3, 1] = 1, 0, 1
    batch["labels"] = labels
    known = ~np.isnan(labels)
    loss = StepLoss()
    value = np.sum(loss.weights(batch) * loss(scores.astype(np.float32), batch)[0])
    theirs = optax.sigmoid_binary_cross_entropy(scores[known], labels[known]).mean()
    np.testing.assert_allclose(value, theirs, rtol=1e-5)


def test_statistics_of_steps_have_no_gradient():
    scores, batch, _ = batch_of()

    def total(x):
        return sum(jnp.sum(value) for value in StepLoss()(x, batch)[1].values())

    assert not jax.jit(jax.grad(total))(scores.astype(np.float32)).any()


def test_the_end_is_the_place_after_the_last_token():
    batch = append_end_position(
        {"responses": np.array([[7, 8], [9, 0]]), "response_mask": np.array([[1, 1], [1, 0]], bool)}
    )
    assert batch["response_mask"].tolist() == [[True, True, True], [True, True, False]]
    assert batch["responses"].tolist() == [[7, 8, 0], [9, 0, 0]]
    scores = jnp.array([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    assert end_scores(scores, batch["response_mask"]).tolist() == [3.0, 5.0]


def test_calibration_by_hand():
    # Sure to 3/4 three times, right twice; sure to 9/10 twice, right once; a tie.
    logits = np.array([np.log(3)] * 2 + [-np.log(3)] + [np.log(9)] * 2 + [0.0])
    outcomes = np.array([1, 0, 0, 1, 0, 1])
    bins = calibration_bins(logits, outcomes, bins=2)
    assert [(b["count"], round(b["predicted"], 6)) for b in bins] == [(1, 0.5), (5, 0.81)]
    assert [b["observed"] for b in bins] == [0.5, 0.6]
    made = prediction_metrics(logits, outcomes)
    np.testing.assert_allclose(made["accuracy"], 3.5 / 6)
    expected = -(2 * np.log(0.75) + np.log(0.25) + np.log(0.9) + np.log(0.1) + np.log(0.5)) / 6
    np.testing.assert_allclose(made["loss"], expected)
    np.testing.assert_allclose(made["calibration_error"], (3 * (0.75 - 2 / 3) + 2 * 0.4) / 6)


# Data


class Letters:
    vocab_size = 1000

    def encode(self, text, add_special=True):
        return [1] * add_special + [ord(letter) for letter in text]

    def decode(self, tokens):
        return "".join(map(chr, tokens))


def lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_labelled_texts_become_pairs(tmp_path):
    rows = [{"text": t, "label": y} for t, y in (("a", 1), ("b", 0), ("c", 1), ("d", 0), ("e", 1))]
    made = Dataset.from_file(lines(tmp_path / "x.jsonl", rows), Letters(), learns_pairs=True)
    assert made.prompt_tokens == [[1], [1]]
    assert made.columns["chosen"] == ["a", "c"] and made.columns["rejected"] == ["b", "d"]
    assert made.columns["chosen_label"] == [1, 1] and made.columns["rejected_label"] == [0, 0]


def test_tasks_label_steps_and_what_costs():
    rng = np.random.default_rng(0)
    task = get_task("harvest")
    for record in task.examples("train", seed=0, count=40):
        safe, unsafe = task.pair(record, rng)
        assert task.cost([""] * 2, [safe, unsafe]) == [0.0, 1.0]
        assert max(map(len, (safe, unsafe))) < task.response_length
    for name in TASKS:
        if name == "harvest" or TASKS[name].environment:
            continue
        task = get_task(name)
        kinds = set()
        for record in task.examples("train", seed=0, count=30):
            steps, labels = task.steps(record, rng)
            assert len(steps) == len(labels)
            assert labels == sorted(labels, reverse=True)  # once wrong, wrong to the end
            assert all(labels) == task.is_correct("".join(steps), record)
            kinds.add(all(labels))
        assert kinds == {True, False}


GOOD = {"text": "a", "label": 1}
STEPS = {"prompt": "12>", "completions": ["1", "2"], "labels": [True, False]}
PAIR = {"prompt": "12>", "chosen": "1", "rejected": "2"}
BROKEN = [
    ("RewardModel", [GOOD], {}, "no text is labelled 0"),
    ("RewardModel", [GOOD, {"text": "b", "label": 2}], {}, "the label is 2; a label is 1 or 0"),
    ("RewardModel", [GOOD, {"label": 0}], {}, "needs its text in the column `text`"),
    ("RewardModel", [GOOD | {"prompt": "1"}], {}, "this one has a prompt"),
    ("RewardModel", [{"prompt": "12>"}], {}, "RewardModel needs preference pairs"),
    ("RewardModel", [PAIR | {"margin": -1}], {}, "data.jsonl:1: the margin is -1; it must be"),
    ("CostModel", [PAIR], {}, "label_coef=1.0: .* has no columns `chosen_label`"),
    ("CostModel", [PAIR | {"chosen_label": "x", "rejected_label": 0}], {}, "chosen_label is 'x'"),
    ("ProcessRewardModel", [PAIR], {}, "needs steps with labels"),
    ("ProcessRewardModel", [STEPS | {"labels": [1]}], {}, "there are 2 completions and the labels"),
    ("ProcessRewardModel", [STEPS | {"completions": "12"}], {}, "must be a list of texts"),
    ("ProcessRewardModel", [STEPS | {"completions": ["1" * 9, "2"]}], {}, "an answer has 11"),
    ("RewardModel", None, {"warm_start.steps": 3}, "imitates no demonstrations"),
    ("RewardModel", None, {"data.packing": 12}, "a pack holds whole pairs, and of both sides"),
    ("ProcessRewardModel", None, {"data.packing": 8}, "4 and a place behind them are 10 tokens"),
    ("RewardModel", None, {"algorithm.margin": -1.0}, "margin=-1.0: must be 0 or more"),
]


@pytest.mark.parametrize("name, rows, changes, message", BROKEN)
def test_wrong_data_gets_one_line(name, rows, changes, message, tmp_path):
    if rows is not None:
        get_task("sorting").tokenizer().save(tmp_path / "tokenizer")
        changes = changes | {
            "data.path": str(lines(tmp_path / "data.jsonl", rows)),
            "tokenizer.path": str(tmp_path / "tokenizer"),
        }
    with pytest.raises((ConfigError, DataError), match=message) as caught:
        with trainer_of(name, SMALL | changes):
            pass
    assert "\n" not in str(caught.value)


# Runs

SMALL = {"steps": 4, "warm_start.batch": 16, "checkpoint.every": 2}


def classifier_scores(path, sequences):
    theirs = AutoModelForSequenceClassification.from_pretrained(path).eval()
    with torch.no_grad():
        return [theirs(torch.tensor([tokens])).logits.item() for tokens in sequences]


@pytest.mark.extended
def test_a_reward_model_is_trained_resumed_exported_and_used(tmp_path):
    changes = SMALL | {"eval.every": 4, "algorithm.centring": 0.01, "actor.learning_rate": 1e-2}
    changes |= {"model.tie_embeddings": False}
    with trainer_of("RewardModel", changes, tmp_path / "whole") as trainer:
        rows = [computed(row) for row in trainer.run()]
        trainer.export(tmp_path / "by trainer")
        batch = trainer.algorithm.collect({})
        scores = join(trainer.roles.groups["actor"].compute_scores(batch))["scores"]
        metrics = trainer.evaluate()
    mask = np.asarray(batch["response_mask"])
    scores = np.asarray(end_scores(np.asarray(scores), mask))
    # From a head of zeros nothing is preferred: log 2, and half of the ties are right.
    np.testing.assert_allclose(rows[0]["actor/loss"], np.log(2), rtol=1e-5)
    assert rows[0]["eval/accuracy"] == 0.5 and rows[0]["eval/calibration_error"] == 0
    assert metrics["eval/loss"] == rows[-1]["eval/loss"]
    assert [row["step"] for row in read_rows(tmp_path / "whole", "calibration.jsonl")] == [1, 4, 4]
    assert "Calibration" in write_report(tmp_path / "whole").read_text()
    with trainer_of("RewardModel", changes, tmp_path / "parts") as trainer:
        for _ in range(3):
            trainer.step()
    again = changes | {"layout.actor.train.tensor": 1}
    with trainer_of("RewardModel", again, tmp_path / "parts") as trainer:
        trainer.run()
    assert [computed(row) for row in read_rows(tmp_path / "parts")] == rows
    # Whoever reads it gives the same scores: transformers of both exports, and the reward role.
    flags = [f"--model={tmp_path / 'whole'}", f"--output={tmp_path / 'by command'}"]
    assert export(flags) == 0
    prompts, responses = batch["prompts"], batch["responses"]
    sequences = [
        [*prompts[i][batch["prompt_mask"][i]], *responses[i][: mask[i].sum() - 1]]
        for i in range(len(mask))
    ]
    sequences = [[int(token) for token in tokens] for tokens in sequences]
    for name in ("by trainer", "by command"):
        theirs = classifier_scores(tmp_path / name, sequences)
        np.testing.assert_allclose(scores, theirs, atol=1e-5)
    answered = {
        "prompts": prompts,
        "prompt_mask": batch["prompt_mask"],
        "responses": responses[:, :-1],
        "response_mask": mask[:, 1:],
    }
    for source in ("whole", "by command"):
        with trainer_of("GRPO", {"reward.path": str(tmp_path / source), "steps": 1}) as trainer:
            rewards = trainer.roles.groups["reward"]
            trainer.prepare()
            judged = join(rewards.compute_reward(answered))["rewards"]
            np.testing.assert_allclose(np.asarray(judged), scores, atol=1e-5)
    with pytest.raises(ConfigError, match="which gives scores and no text"):
        hjax.load_model(tmp_path / "whole")


@pytest.mark.parametrize(
    "name, changes, keys",
    [
        pytest.param(
            "CostModel",
            COSTLY,
            {"eval/accuracy", "eval/label_accuracy"},
            marks=pytest.mark.extended,
        ),
        pytest.param(
            "ProcessRewardModel",
            {"data.packing": 16},
            {"eval/accuracy", "eval/loss"},
            marks=pytest.mark.extended,
        ),
        pytest.param(
            "DPO",
            {},
            {"eval/pair_accuracy", "eval/pair_loss", "eval/accuracy"},
            marks=pytest.mark.extended,
        ),
    ],
)
def test_cost_and_process_models_and_pairs_of_dpo_are_evaluated(name, changes, keys):
    once = {"steps": 1, "warm_start.batch": 16, "eval.every": 1}
    with trainer_of(name, once | changes) as trainer:
        [row] = trainer.run()
    assert keys <= row.keys()
    if name == "DPO":
        # The policy is the reference yet.
        np.testing.assert_allclose(row["eval/pair_loss"], np.log(2), atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", {kind: name for name, (kind, _) in MODELS.items()}.values())
def test_every_family_is_exported_as_its_classifier(name, tmp_path):
    model(name).save_pretrained(tmp_path / "base")
    config = read_config(tmp_path / "base")
    network = scalar_network(config)
    params = to_host(network.create(0, make_layouts(jax.devices()[:1]).train))
    params["head"] = np.random.default_rng(0).normal(size=params["head"].shape).astype(np.float32)
    save_weights(tmp_path / "made", config, params)
    tokens = np.array([[3, 4, 5, 6, 7, 8, 9]])

    @jax.jit
    def score(params):
        made = network.bind(params)
        return made.score(sequence_states(made.decoder, tokens, tokens > 0, Compute()))[0, -1]

    [theirs] = classifier_scores(tmp_path / "made", tokens.tolist())
    np.testing.assert_allclose(score(params), theirs, atol=5e-5)


@pytest.mark.extended
def test_a_process_reward_model_scores_each_step_of_an_answer(tmp_path):
    """By its training's scores of the same places; their sum is the answer's."""
    changes = SMALL | {"steps": 2, "eval.every": 0, "actor.learning_rate": 1e-2}
    with trainer_of("ProcessRewardModel", changes, tmp_path / "judge") as trainer:
        trainer.run()
        batch = trainer.algorithm.collect({})
        places = join(trainer.roles.groups["actor"].compute_scores(batch))["scores"]
    tokenizer = get_task("sorting").tokenizer()
    places, mask = np.asarray(places), np.asarray(batch["response_mask"])
    answered = {
        "prompts": batch["prompts"],
        "prompt_mask": batch["prompt_mask"],
        "responses": batch["responses"][:, :-1],
        "response_mask": mask[:, 1:],
    }
    judge = {"reward.path": str(tmp_path / "judge"), "steps": 1}
    for steps, how in (("token", {}), ("1", {}), ("token", {"data.packing": 24})):
        keys = judge | how | {"reward.step_separator": steps}
        with trainer_of("PPO", keys) as trainer:
            rewards = trainer.roles.groups["reward"]
            trainer.prepare()
            made = join(rewards.compute_reward(answered))
            if how:
                [row] = trainer.run()
                assert np.isfinite(row["actor/loss"]) and "token_rewards" in trainer.batch
        expected = np.zeros_like(answered["responses"], np.float32)
        for i, response in enumerate(answered["responses"]):
            own = [int(t) for t in response[answered["response_mask"][i]]]
            own = own[:-1] if own[-1] == tokenizer.eos_id else own
            letters = [tokenizer.decode([t]) for t in own]
            ends = {t for t, letter in enumerate(letters) if steps in ("token", letter)}
            for t in ends | {len(own) - 1}:
                expected[i, t] = places[i, t + 1]
        assert np.abs(expected).sum() > 0
        np.testing.assert_allclose(made["token_rewards"], expected, atol=1e-5)
        np.testing.assert_allclose(made["rewards"], expected.sum(axis=1), atol=1e-5)


def test_where_the_steps_of_a_text_end():
    """By hand; the end token, which is no step, and an unfinished last step."""
    from hjax.data.tokenizer import Tokenizer
    from hjax.workers import WorkerContext
    from hjax.workers.reward import step_ends

    tokenizer = Tokenizer.characters("ab;")
    end = tokenizer.eos_id

    def ends(text, steps, tail=()):
        ended = {"sampling": SamplingParams(stop=(end,))}
        context = WorkerContext("reward", tokenizer=tokenizer, step_separator=steps, **ended)
        prompt = tokenizer.encode("a;")
        return step_ends(prompt, [*tokenizer.encode(text, add_special=False), *tail], context)

    assert ends("ab;b;", ";") == [2, 4]
    assert ends("ab;b;a", ";", [end]) == [2, 4, 5]
    assert ends("ab", "token", [end]) == [0, 1]
    assert ends("a;;b;;", ";;", [end]) == [2, 5]
    assert ends("", ";", [end]) == []
