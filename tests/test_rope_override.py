"""`model.rope_scaling`: a run makes room for longer sequences than its model was trained with."""

import json

import numpy as np
import pytest
from families import logits, model
from helpers import ONE_DEVICE, trainer_of
from references import AutoConfig, AutoModelForCausalLM, torch

import hjax
from hjax.data.tasks import get_task
from hjax.errors import ConfigError
from hjax.models.weights import read_config

YARN = {"rope_type": "yarn", "factor": 2.5, "beta_fast": 3.0}
# 150 tokens, where the models have 64 positions.
TOKENS = np.random.default_rng(3).integers(3, 16, (1, 150))


def keys_of(folder, name, scaling, **keys):
    made = model(name)
    made.save_pretrained(folder / "theirs")
    get_task("sorting").tokenizer().save(folder / "theirs")
    return {
        **ONE_DEVICE,
        "actor.path": f"{folder}/theirs",
        "model.rope_scaling": json.dumps(scaling),
        "warm_start.steps": 0,
        "rollout.max_response_length": 120,
        "rollout.min_tokens": 80,
        "rollout.prompts": 2,
        "algorithm.kl_coef": 0.1,
        "data.task_options.length": 20,
        "eval.every": 0,
    } | keys


def by_transformers(directory, scaling, tokens=TOKENS):
    config = AutoConfig.from_pretrained(directory)
    config.rope_parameters = {**config.rope_parameters, **scaling}
    found = AutoModelForCausalLM.from_pretrained(directory, config=config, dtype=torch.float32)
    return logits(found, tokens)


@pytest.mark.extended
@pytest.mark.parametrize(
    ("name", "scaling", "known"),
    [
        ("qwen2", YARN, {"original_max_position_embeddings": 64}),
        ("qwen2 tied", {**YARN, "original_max_position_embeddings": 70}, {}),
        ("llama biases", {"rope_type": "linear", "factor": 3.0}, {}),
    ],
)
def test_a_run_trains_and_exports_what_transformers_computes(name, scaling, known, tmp_path):
    keys = keys_of(tmp_path, name, scaling)
    with trainer_of("GRPO", keys, tmp_path / "run") as trainer:
        expected = by_transformers(tmp_path / "theirs", scaling | known)
        trainer.prepare()
        before = trainer.export(tmp_path / "before")
        np.testing.assert_allclose(hjax.load_model(before).logits(TOKENS), expected, atol=2e-4)
        row = trainer.step()
        assert row["kl/reference"] == pytest.approx(0.0, abs=1e-6)  # it reads as the policy does
        assert row["response/length_mean"] >= 80
        trainer.save()
        after = trainer.export(tmp_path / "after")
    found = AutoModelForCausalLM.from_pretrained(after, dtype=torch.float32)
    positions = int(scaling["factor"] * scaling.get("original_max_position_embeddings", 64))
    assert found.config.max_position_embeddings == positions
    np.testing.assert_allclose(
        hjax.load_model(tmp_path / "run").logits(TOKENS), logits(found, TOKENS), atol=2e-4
    )
    assert np.abs(logits(found, TOKENS) - expected).max() > 1e-3  # it has learned


@pytest.mark.extended
def test_it_resumes_and_starts_another_run(tmp_path):
    keys = keys_of(tmp_path, "qwen2", YARN, **{"actor.lora.rank": 2})
    rows = []
    for steps in (1, 2):
        with trainer_of("GRPO", keys | {"steps": steps}, tmp_path / "run") as trainer:
            rows += trainer.run()
    assert [row["step"] for row in rows] == [1, 2]
    # A run that it starts has the scaling, whether it is given again or not.
    for again in ({}, {"model.rope_scaling": ""}):
        more = {**keys, "actor.path": f"{tmp_path}/run", **again}
        with trainer_of("GRPO", {k: v for k, v in more.items() if "lora" not in k}) as trainer:
            assert trainer.roles.models["reference"] == trainer.roles.models["actor"]
            assert trainer.roles.models["actor"].max_length == 160
            trainer.step()
    assert read_config(tmp_path / "run").max_length == 160


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("qwen2", "yarn", "no JSON"),
        ("qwen2", "[4]", "a JSON object with rope_type and factor"),
        ("qwen2", '{"rope_type": "yarn"}', "'yarn' needs factor too"),
        ("qwen2", '{"rope_type": "yarn", "factor": 4, "beta": 1}', "knows no beta"),
        ("qwen2", '{"rope_type": "linear", "factor": 1}', "a factor above 1"),
        ("qwen2", '{"rope_type": "llama3", "factor": 2, "low_freq_factor": 1, '
                  '"high_freq_factor": 4}', "may be linear, dynamic or yarn"),
        ("llama linear rope", '{"rope_type": "yarn", "factor": 4}',
         r"scaled already \(linear\)"),
        ("gpt2", '{"rope_type": "linear", "factor": 2}', "no rotary positions"),
    ],
)  # fmt: skip
def test_what_cannot_be_scaled_is_refused(name, text, message, tmp_path):
    keys = keys_of(tmp_path, name, {}) | {"model.rope_scaling": text}
    with pytest.raises(ConfigError, match=message):
        trainer_of("GRPO", keys).__enter__()
