"""hh-rlhf from its dialogues to a policy: a chat template, a reward model on its pairs, PPO."""

import gzip
import json
import re

import numpy as np
from helpers import TINY

import hjax
from hjax.settings.config_loading import check_config

# Characters of the dialogues that are taken, and how many of these.
LONGEST, PAIRS = 240, 40


def messages(dialogue):
    """A dialogue as chat messages."""
    parts = re.split(r"\n\n(Human|Assistant): ", dialogue)[1:]
    roles = {"Human": "user", "Assistant": "assistant"}
    turns = zip(parts[::2], parts[1::2], strict=True)
    return [{"role": roles[who], "content": text.strip()} for who, text in turns]


def dialogues(test_data):
    rows = []
    with gzip.open(test_data / "hh-rlhf" / "harmless-base-test.jsonl.gz", "rt") as lines:
        for line in lines:
            row = {side: messages(text) for side, text in json.loads(line).items()}
            same = row["chosen"][:-1] == row["rejected"][:-1]
            texts = [m["content"] for side in row.values() for m in side]
            if same and all(texts) and sum(map(len, texts)) < LONGEST:
                if row["chosen"] != row["rejected"]:
                    rows.append(row)
    return rows[:PAIRS]


def trained(keys, workdir):
    trainer = hjax.Trainer(check_config(keys), workdir)
    try:
        return trainer.run(), trainer.batch
    finally:
        trainer.close()


def test_a_reward_model_and_ppo_on_its_dialogues(test_data, tmp_path):
    rows = dialogues(test_data)
    assert len(rows) == PAIRS
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    prompts = [{"prompt": row["chosen"][:-1]} for row in rows]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    common = {k: v for k, v in TINY.items() if not k.startswith("data.task")} | {
        "tokenizer.path": str(test_data / "tokenizers" / "minimind"),
        "data.eval_fraction": 0.2,
        "eval.every": 2,
        "steps": 2,
    }
    judge = common | {
        "algorithm.name": "RewardModel",
        "data.path": str(tmp_path / "pairs.jsonl"),
        "rollout.max_response_length": 96,
        "warm_start.batch": 16,
        "algorithm.centring": 0.01,
    }
    made, batch = trained(judge, tmp_path / "judge")
    assert made[0]["eval/accuracy"] == 0.5 and np.isfinite(made[1]["eval/loss"])
    policy = common | {
        "algorithm.name": "PPO",
        "data.path": str(tmp_path / "prompts.jsonl"),
        "reward.path": str(tmp_path / "judge"),
        "rollout.max_response_length": 8,
    }
    rows, batch = trained(policy, tmp_path / "policy")
    assert all(np.isfinite(row["actor/loss"]) for row in rows)
    assert rows[0]["reward/std"] > 0 and "eval/reward" in rows[1]
    # The prompt is the dialogue in the model's own chat format, up to the assistant's turn.
    shown = batch["prompt_text"][0]
    assert shown.startswith("<|im_start|>user\n")
    assert "<|im_end|>\n<|im_start|>assistant\n" in shown
