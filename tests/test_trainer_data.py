"""Runs on data of one's own: token ids without a tokenizer, verl's parquet, demonstrations."""

import json
import pathlib

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from helpers import ONE_DEVICE, read_rows, trainer_of

from hjax.data.tasks import get_task
from hjax.data.tokenizer import Tokenizer
from hjax.errors import ConfigError

REWARDS = """
def evens(prompts, responses, **columns):
    assert prompts == columns["prompt_tokens"] and responses == columns["response_tokens"]
    assert set(columns["difficulty"]) <= {1, 2}
    return [sum(t % 2 == 0 for t in tokens) / len(tokens) for tokens in responses]

def ground_truth(prompts, responses, data_source, reward_model, extra_info, **columns):
    assert set(data_source) == {"digits"} and all("index" in info for info in extra_info)
    return [len(r) / int(model["ground_truth"]) for model, r in zip(reward_model, responses)]

def length(prompts, responses, **columns):
    return [float(len(response)) for response in responses]
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "rewards.py").write_text(REWARDS)
    return tmp_path


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.extended
def test_prompts_as_token_ids_need_no_tokenizer(folder):
    rng = np.random.default_rng(0)
    rows = [
        {"prompt_tokens": rng.integers(0, 16, 2 + i % 4).tolist(), "difficulty": 1 + i % 2}
        for i in range(40)
    ]
    changes = {
        "data.path": write_jsonl(folder / "ids.jsonl", rows),
        "model.vocab_size": 16,
        "reward.function": f"{folder}/rewards.py:evens",
        "eval.every": 2,
        "steps": 2,
    }
    with trainer_of("GRPO", changes, workdir=folder / "run") as trainer:
        metrics = trainer.run()
        batch = trainer.batch
    assert "response_text" not in batch
    tokens = [r[m].tolist() for r, m in zip(batch["responses"], batch["response_mask"])]
    assert all(len(t) == 4 for t in tokens) and batch["truncated"].all()  # nothing ends them
    expected = [sum(t % 2 == 0 for t in row) / 4 for row in tokens]
    np.testing.assert_allclose(batch["rewards"], expected)
    assert "eval/reward" in metrics[-1] and "eval/accuracy" not in metrics[-1]
    assert len(trainer.inputs.held_out) == 4  # a tenth of 40
    sample = read_rows(folder / "run", "samples.jsonl")[-1]
    assert json.loads(sample["response"]) in tokens


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"model.vocab_size": 0}, "model.vocab_size=0 takes the tokenizer's size, but there is no"),
        ({"model.vocab_size": 8}, r"ids.jsonl:1: token id 15 is outside .*from 0 to 7\)"),
        ({"reward.function": ""}, "nothing gives a reward: set reward.function=path.py:name"),
        ({"warm_start.steps": 1}, "warm_start.steps=1 needs demonstrations; this data has none"),
        (
            {"algorithm.name": "SFT"},
            "ids.jsonl: SFT needs demonstrations; this file has prompt_tokens, difficulty: give",
        ),
    ],
)
def test_what_token_ids_alone_cannot_do(changes, message, folder):
    rows = [{"prompt_tokens": [1, 2, 15], "difficulty": 1}] * 20
    base = {
        "data.path": write_jsonl(folder / "ids.jsonl", rows),
        "model.vocab_size": 16,
        "reward.function": f"{folder}/rewards.py:evens",
    }
    changes = base | changes
    with pytest.raises(ConfigError, match=message) as caught:
        with trainer_of(changes.pop("algorithm.name", "GRPO"), changes, folder / "run"):
            pass
    assert "\n" not in str(caught.value)
    assert not (folder / "run").exists()


@pytest.mark.extended
def test_verls_parquet_columns_reach_the_reward_function(folder):
    Tokenizer.characters("0123456789>").save(folder / "chat")
    (folder / "chat" / "chat_template.jinja").write_text(
        "{{ bos_token }}{% for m in messages %}{{ m.content }}>{% endfor %}"
    )
    rows = [
        {
            "data_source": "digits",
            "prompt": [{"role": "user", "content": f"{i}"}],
            "reward_model": {"style": "rule", "ground_truth": str(i)},
            "extra_info": {"index": i, "split": "train"},
        }
        for i in range(10, 50)
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "train.parquet")
    changes = {
        "data.path": f"{folder}/train.parquet",
        "tokenizer.path": f"{folder}/chat",
        "reward.function": f"{folder}/rewards.py:ground_truth",
        "rollout.max_prompt_length": 5,
        "eval.every": 2,
        "steps": 2,
    }
    with trainer_of("GRPO", changes | ONE_DEVICE) as trainer:
        metrics = trainer.run()
        batch = trainer.batch
    indices = [info["index"] for info in batch["columns"]["extra_info"]]
    assert batch["prompt_text"] == [f"<bos>{index}>" for index in indices]
    expected = [len(r) / index for index, r in zip(indices, batch["response_text"])]
    np.testing.assert_allclose(batch["rewards"], expected, rtol=1e-6)
    assert "eval/reward" in metrics[-1] and "eval/accuracy" not in metrics[-1]


@pytest.mark.extended
def test_sft_learns_its_demonstrations_by_heart(folder):
    rows = [{"prompt": f"{a}{b}>", "response": f"{b}{a}"} for a in range(5) for b in range(5)]
    tokenizer = get_task("sorting").tokenizer()
    tokenizer.save(folder / "tokenizer")
    changes = {
        "data.path": write_jsonl(folder / "pairs.jsonl", rows),
        "tokenizer.path": f"{folder}/tokenizer",
        "reward.function": f"{folder}/rewards.py:length",
        "steps": 60,
        "warm_start.batch": 24,
        "actor.learning_rate": 0.02,
        "eval.every": 60,
    }
    with trainer_of("SFT", changes) as trainer:
        metrics = trainer.run()
        held_out = trainer.inputs.held_out
        assert len(held_out) == 2 and len(trainer.inputs.demonstrations) == 23
        task = trainer.algorithm.demonstrations()
    assert metrics[0]["actor/loss"] == pytest.approx(np.log(16), abs=0.2)  # 16 tokens, a guess
    assert metrics[-1]["actor/loss"] < 0.3
    assert "reward/mean" not in metrics[0] and "time/generate" not in metrics[0]
    assert task["responses"].shape == (24, 4)
    # Each response is two digits and the end-of-sequence token.
    assert (task["response_mask"].sum(axis=1) == 3).all()
    assert (task["responses"][:, 2] == tokenizer.eos_id).all()


def test_a_demonstration_too_long_is_refused_with_its_length(folder):
    get_task("sorting").tokenizer().save(folder / "tokenizer")
    rows = [{"prompt": "1>", "response": "12345"}] * 10
    changes = {
        "data.path": write_jsonl(folder / "pairs.jsonl", rows),
        "tokenizer.path": f"{folder}/tokenizer",
        "reward.function": f"{folder}/rewards.py:length",
    }
    says = r"pairs.jsonl:1: an answer has 6 tokens, above rollout.max_response_length=4; raise"
    with pytest.raises(ConfigError, match=says):
        with trainer_of("SFT", changes):
            pass


def test_demonstrations_that_are_missing_in_a_row_are_named(folder):
    get_task("sorting").tokenizer().save(folder / "tokenizer")
    rows = [{"prompt": "1>", "response": "1"}] * 10 + [{"prompt": "2>"}]
    changes = {
        "data.path": write_jsonl(folder / "pairs.jsonl", rows),
        "tokenizer.path": f"{folder}/tokenizer",
        "reward.function": f"{folder}/rewards.py:length",
    }
    with pytest.raises(ConfigError, match="pairs.jsonl:11: response is None; it must be text"):
        with trainer_of("SFT", changes):
            pass
    # Where nothing learns from them, a row without one is no error.
    with trainer_of("GRPO", changes | {"data.eval_fraction": 0.0}) as trainer:
        assert len(trainer.inputs.demonstrations) == 10 and len(trainer.inputs.train) == 11


@pytest.mark.parametrize(
    "name", ["GRPO", *(pytest.param(n, marks=pytest.mark.slow) for n in ("PPO", "ReMax", "RLOO"))]
)
@pytest.mark.extended
def test_demonstrations_are_a_term_of_every_policys_loss(name):
    """PPO-ptx: the loss of a step is the policy's, as it is without, and coef times theirs."""
    changes = {"steps": 1, "warm_start.steps": 1}
    rows = []
    for coef in (0.0, 0.5):
        with trainer_of(name, changes | {"algorithm.pretraining_coef": coef}) as trainer:
            rows += trainer.run()
    alone, both = rows
    assert "actor/pretrain_loss" not in alone and both["actor/pretrain_loss"] > 0.5
    expected = alone["actor/loss"] + 0.5 * both["actor/pretrain_loss"]
    assert both["actor/loss"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.extended
def test_a_term_of_demonstrations_needs_some(tmp_path):
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "12>"}\n' * 8)
    get_task("sorting").tokenizer().save(tmp_path / "tokenizer")
    changes = {
        "data.path": str(tmp_path / "prompts.jsonl"),
        "tokenizer.path": str(tmp_path / "tokenizer"),
        "reward.function": f"{pathlib.Path(__file__).with_name('evens_reward.py')}:evens",
        "warm_start.steps": 0,
        "algorithm.pretraining_coef": 0.1,
    }
    with pytest.raises(ConfigError, match="pretraining_coef needs demonstrations; this data has"):
        with trainer_of("PPO", changes):
            pass
