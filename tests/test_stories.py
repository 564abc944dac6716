"""Real input: pretrained weights, and a dataset in verl's columns with a chat tokenizer."""

import json
import math
import os
import pathlib
import subprocess
import sys

import pytest
from knights_reward import reward as knights_reward

import hjax

HERE = pathlib.Path(__file__).parent


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_stories_become_happier_and_stay_close_to_the_reference(test_data, tmp_path):
    workdir = tmp_path / "run"
    command = [sys.executable, "-m", "hjax.launch", "--config=stories.py", f"--workdir={workdir}"]
    environment = {**os.environ, "HJAX_TEST_DATA": str(test_data)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["eval/reward"] >= rows[0]["eval/reward"] + 0.2
    assert max(row["kl/reference"] for row in rows) < 0.3  # nats per token; the target is 0.1
    samples = [json.loads(line) for line in (workdir / "samples.jsonl").read_text().splitlines()]
    report = (workdir / "report.html").read_text()
    held_out = [s for s in samples if s["kind"] == "eval"]
    for sample in (held_out[0], held_out[-1]):
        assert sample["response"].strip()[:20].split("'")[0].split('"')[0] in report


@pytest.mark.timeout(300)
@pytest.mark.extended
def test_a_dataset_in_verls_columns_goes_through_end_to_end(test_data, tmp_path):
    config = hjax.get_config("grpo.py")
    with config.unlocked():
        config.update_from_flattened_dict(
            {
                "steps": 2,
                "data.path": str(test_data / "knights" / "3ppl_train.parquet"),
                "data.eval_path": str(test_data / "knights" / "3ppl_test.parquet"),
                "data.eval_size": 8,
                "tokenizer.path": str(test_data / "tokenizers" / "minimind"),
                "reward.function": f"{HERE / 'knights_reward.py'}:reward",
                "model.hidden_size": 32,
                "model.layers": 1,
                "model.mlp_size": 64,
                "warm_start.steps": 0,
                "rollout.prompts": 8,
                "rollout.samples": 2,
                "rollout.max_prompt_length": 448,
                "rollout.max_response_length": 16,
                "algorithm.minibatch": 16,
                "eval.every": 2,
                "eval.prompts": 8,
                "display.tensorboard": False,
            }
        )
    trainer = hjax.Trainer(config, tmp_path / "run")
    rows = trainer.run()
    trainer.close()
    assert len(rows) == 2
    assert all(math.isfinite(row["actor/loss"]) for row in rows)
    assert "eval/reward" in rows[0] and rows[0]["reward/unscored"] == 0
    prompt = trainer.batch["prompt_text"][0]
    assert prompt.startswith("<|im_start|>") and "knights and knaves" in prompt
    # The columns reach the reward as the file has them: the right answer earns all of it.
    columns = trainer.batch["columns"]
    solution = columns["reward_model"][0]["ground_truth"]["solution_text_format"]
    right = f"<answer>{solution}</answer>"
    assert knights_reward([prompt], [right], reward_model=columns["reward_model"][:1]) == [1.0]
