"""Adapters on what another run trained: a workdir, a model with a scalar head, a directory."""

import json
import os

import numpy as np
import peft
import pytest
from helpers import trainer_of
from references import torch
from transformers import AutoModelForSequenceClassification

import hjax
from hjax.launch.export import main as export
from hjax.models.weights import load_trained

LORA = {"actor.lora.rank": 2, "actor.learning_rate": 0.01}
TOKENS = np.array([[1, 3, 5, 4, 2]])


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """A language model's workdir, and its export."""
    folder = tmp_path_factory.mktemp("start")
    with trainer_of("GRPO", {}, folder / "run") as trainer:
        trainer.run()
        trainer.export(folder / "model")
    return folder


@pytest.mark.parametrize("form", ["float", "int8"])
@pytest.mark.parametrize("base", ["run", "model"])
def test_a_reward_model_with_adapters_is_used_exported_and_a_base_again(
    start, base, form, tmp_path
):
    batch = {"warm_start.batch": 16}
    changes = {"actor.path": str(start / base), **LORA, "actor.lora.base": form, **batch}
    with trainer_of("RewardModel", changes, tmp_path / "judge") as trainer:
        trainer.run()
    with trainer_of("GRPO", {"reward.path": str(tmp_path / "judge")}) as trainer:
        trainer.run()
    assert export([f"--model={tmp_path / 'judge'}", f"--output={tmp_path / 'exported'}"]) == 0
    theirs = AutoModelForSequenceClassification.from_pretrained(tmp_path / "exported")
    params = load_trained(tmp_path / "judge")[1]
    np.testing.assert_allclose(theirs.score.weight.detach()[0], params["head"], atol=1e-6)
    embedding = theirs.model.embed_tokens.weight.detach()
    np.testing.assert_allclose(embedding, params["decoder"]["embedding"], atol=1e-6)
    again = {"actor.path": str(tmp_path / "judge"), **LORA, **batch}
    with trainer_of("RewardModel", again, tmp_path / "again") as trainer:
        trainer.run()
    assert "decoder" in load_trained(tmp_path / "again")[1]


@pytest.mark.parametrize("by", ["command", "trainer"])
def test_adapters_on_a_workdir_are_exported_with_their_base(start, by, tmp_path):
    """Only hjax reads a workdir."""
    changes = {"actor.path": str(start / "run"), **LORA, "actor.lora.targets": ("q,v",)}
    with trainer_of("GRPO", changes, tmp_path / "run") as trainer:
        trainer.run()
        if by == "trainer":
            trainer.export(tmp_path / "adapters", adapter=True)
    if by == "command":
        given = [f"--model={tmp_path / 'run'}", f"--output={tmp_path / 'adapters'}", "--adapter"]
        assert export(given) == 0
    theirs = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapters").eval()
    with torch.no_grad():
        expected = theirs(torch.tensor(TOKENS)).logits
    found = hjax.load_model(tmp_path / "run").logits(TOKENS)
    np.testing.assert_allclose(found, expected, atol=2e-5)


def test_the_base_of_exported_adapters_is_found_from_anywhere(start, tmp_path, monkeypatch):
    monkeypatch.chdir(start)
    changes = {"actor.path": "model", **LORA}
    with trainer_of("GRPO", changes) as trainer:
        trainer.export(tmp_path / "adapters", adapter=True)
    content = json.loads((tmp_path / "adapters" / "adapter_config.json").read_text())
    assert os.path.isabs(content["base_model_name_or_path"])
