"""The rows of metrics.jsonl: which keys, when evaluations stand where, and notebooks."""

import json

import numpy as np
import pytest
from helpers import ONE_DEVICE, read_rows, tiny_config, trainer_of

import hjax

EVERY_ROW = {
    "step", "reward/mean", "reward/std", "reward/unscored", "actor/loss", "actor/grad_norm",
    "actor/entropy", "actor/skipped", "response/length_mean", "response/truncated",
    "rollout/token_prob_error", "compile/count", "time/step", "time/generate", "time/transition",
    "time/prepare", "time/update", "throughput/tokens_per_second", "memory/peak_bytes",
}  # fmt: skip
KL = {"kl/reference"}
CLIPPED = {"actor/clip_fraction"}
CRITIC = {"critic/loss", "critic/explained_variance"}
CONTRACT = EVERY_ROW | KL | CLIPPED | CRITIC


@pytest.fixture(scope="module")
def notebooks(tmp_path_factory):
    """A PPO trainer without a workdir, its first row, the others, and the folder it ran in."""
    folder = tmp_path_factory.mktemp("notebook")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        trainer = hjax.Trainer(tiny_config("PPO", {"steps": 2}))
        assert trainer.batch == {}
        first = trainer.step()
        assert first["step"] == 1 and len(trainer.batch["response_text"]) == 16
        trainer.batch["response_text"].clear()  # looking and changing does no harm
        more = trainer.run(3)  # so many more, beyond config.steps
        trainer.save()
        trainer.close()
    return trainer, first, more, folder


@pytest.fixture(scope="module")
def critic_free():
    """A GRPO trainer that has done four steps, the rows of these and its last batch."""
    with trainer_of("GRPO", {"steps": 4}) as trainer:
        yield trainer, trainer.run(), trainer.batch


@pytest.mark.parametrize(
    "algorithm, present",
    [
        ("PPO", CONTRACT),
        ("GRPO", EVERY_ROW | KL | CLIPPED),
        pytest.param("ReMax", EVERY_ROW | KL, marks=pytest.mark.extended),
        pytest.param("SafeRLHF", CONTRACT, marks=pytest.mark.extended),
    ],
)
def test_keys_and_values_of_a_row(algorithm, present, request):
    if algorithm == "PPO":
        trainer = request.getfixturevalue("notebooks")[0]
        rows, batch = trainer.history, trainer.batch
    elif algorithm == "GRPO":
        _, rows, batch = request.getfixturevalue("critic_free")
    else:
        with trainer_of(algorithm, {"steps": 4}) as trainer:
            rows, batch = trainer.run(), trainer.batch
    if "critic/loss" in present:
        check_values(rows[-1], batch)
    for row in rows:
        assert present <= row.keys()
        absent = CONTRACT - present
        assert not absent & row.keys()  # a key that does not apply is absent
        assert "throughput/mfu" not in row  # of CPUs, whose peak is unknown
        assert not any(key.startswith("eval/") for key in row)  # eval.every = 0
        json.dumps(row)  # plain numbers
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert rows[0]["rollout/token_prob_error"] == pytest.approx(1, abs=1e-4)


def check_values(row, batch):
    """They follow from the batch."""
    mask = batch["response_mask"]
    assert row["reward/mean"] == pytest.approx(batch["rewards"].mean())
    assert row["reward/std"] == pytest.approx(batch["rewards"].std())
    assert row["response/length_mean"] == pytest.approx(mask.sum() / len(mask))
    assert row["response/truncated"] == pytest.approx(batch["truncated"].mean())
    difference = (batch["logprobs"] - batch["ref_logprobs"])[mask]
    assert row["kl/reference"] == pytest.approx(difference.mean(), abs=1e-6)
    tokens = mask.sum() + batch["prompt_mask"].sum()
    assert row["throughput/tokens_per_second"] == pytest.approx(tokens / row["time/step"])
    parts = ("time/generate", "time/prepare", "time/update")
    assert 0 < sum(row[key] for key in parts) <= row["time/step"] * 1.001
    assert batch["responses"].shape == (16, 4) and batch["prompts"].shape == (16, 5)
    assert not batch["responses"][~mask].any()  # padding is 0


@pytest.mark.extended
def test_evaluations_before_the_first_update_and_after_the_last():
    changes = {"steps": 5, "eval.every": 2, "actor.learning_rate": 0.05}
    with trainer_of("GRPO", changes | ONE_DEVICE) as trainer:
        before = trainer.evaluate()
        rows = trainer.run()
        after = trainer.evaluate()
    assert set(before) == {"eval/reward", "eval/accuracy"}
    with_eval = [row["step"] for row in rows if "eval/reward" in row]
    assert with_eval == [1, 2, 4, 5]
    assert {k: rows[0][k] for k in before} == before
    assert {k: rows[-1][k] for k in after} == after
    assert rows[-1]["eval/reward"] != rows[0]["eval/reward"]


def test_evaluation_is_greedy_over_the_held_out_prompts():
    # 11 prompts, in chunks of 8 that are filled up: the filling must not count.
    changes = {"eval.prompts": 11, "rollout.samples": 1, "steps": 1,
               "algorithm.baseline": "none", "algorithm.normalise": "none"}  # fmt: skip
    with trainer_of("GRPO", changes) as trainer:
        metrics = trainer.evaluate()
        held_out = trainer.inputs.held_out
        prompts = held_out.prompt_tokens[:11]
        actor = trainer.roles.groups["actor"].worker
        answers = []
        for prompt in prompts:  # one prompt at a time, by the model's own forward
            tokens = list(prompt)
            for _ in range(4):
                padding = 9 - len(tokens)
                row, mask = [0] * padding + tokens, [False] * padding + [True] * len(tokens)
                batch = {
                    "prompts": np.array([row] * 8, np.int32),
                    "prompt_mask": np.array([mask] * 8),
                    "step": 0,
                }
                drawn = np.asarray(actor.generate_sequences(batch, greedy=True)["responses"])
                tokens.append(int(drawn[0, 0]))
                if tokens[-1] == trainer.inputs.tokenizer.eos_id:
                    break
            answers.append(trainer.inputs.tokenizer.decode(tokens[len(prompt) :]))
        task = trainer.inputs.task
        columns = held_out.select(range(11)).columns
        rewards = task.reward(held_out.prompt_text[:11], answers, **columns)
    assert metrics["eval/reward"] == pytest.approx(np.mean(rewards))


@pytest.mark.extended
def test_an_evaluation_changes_nothing_in_training():
    with trainer_of("PPO", {"steps": 3}) as trainer:
        plain = trainer.run()
    with trainer_of("PPO", {"steps": 3, "eval.every": 1}) as trainer:
        evaluated = trainer.run()
    for a, b in zip(plain, evaluated, strict=True):
        assert a["actor/loss"] == b["actor/loss"] and a["reward/mean"] == b["reward/mean"]


@pytest.mark.extended
def test_the_same_seed_gives_the_same_run_and_another_one_another():
    def rewards(seed):
        with trainer_of("PPO", {"steps": 3, "seed": seed}) as trainer:
            trainer.run()
            return trainer.batch["responses"]

    np.testing.assert_array_equal(rewards(0), rewards(0))
    assert (rewards(0) != rewards(1)).any()


def test_a_notebooks_trainer_writes_nothing(notebooks):
    trainer, first, more, folder = notebooks
    assert [row["step"] for row in more] == [2, 3, 4]
    assert trainer.history == [first, *more]
    assert list(folder.iterdir()) == []


def test_the_reward_function_can_be_changed_between_steps(critic_free):
    trainer, rows, _ = critic_free
    assert rows[-1]["reward/mean"] != 7.0
    worker = trainer.roles.groups["reward"].worker
    worker.function.function = lambda prompts, responses, **columns: [7.0] * len(responses)
    assert trainer.step()["reward/mean"] == 7.0


@pytest.mark.extended
def test_files_of_a_workdir(tmp_path):
    changes = {
        "steps": 4, "eval.every": 2, "checkpoint.every": 2, "warm_start.steps": 2,
        "display.tensorboard": True, "display.report": True,
    }  # fmt: skip
    with trainer_of("PPO", changes | ONE_DEVICE, workdir=tmp_path / "run") as trainer:
        trainer.run()
        config = trainer.config
    folder = tmp_path / "run"
    names = {path.name for path in folder.iterdir()}
    assert {"config.json", "plan.json", "metrics.jsonl", "warm_start.jsonl", "samples.jsonl",
            "checkpoints", "timeline.json", "report.html", "tensorboard"} <= names  # fmt: skip
    assert json.loads((folder / "config.json").read_text())["steps"] == config.steps
    rows = read_rows(folder)
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    warm = read_rows(folder, "warm_start.jsonl")
    assert [row["step"] for row in warm] == [1, 2] and warm[1]["loss"] > 0
    samples = read_rows(folder, "samples.jsonl")
    assert {s["kind"] for s in samples} == {"train", "eval"}
    train = next(s for s in samples if s["kind"] == "train")
    assert {"step", "prompt", "response", "reward", "advantage", "truncated"} <= train.keys()
    steps = sorted(int(p.name) for p in (folder / "checkpoints").iterdir() if p.name.isdigit())
    assert steps == [2, 4]  # keep=2 of 0, 2, 4
    trace = json.loads((folder / "timeline.json").read_text())
    calls = {(e["args"]["role"], e["name"]) for e in trace["traceEvents"] if e["ph"] == "X"}
    assert {("actor", "generate_sequences"), ("critic", "compute_values"),
            ("reference", "compute_ref_log_prob"), ("reward", "compute_reward"),
            ("critic", "update_critic"), ("actor", "update_actor")} <= calls  # fmt: skip
