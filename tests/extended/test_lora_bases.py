"""Adapters on what another run trained: a workdir, a model with a scalar head, a directory."""

import json
import os
import re
import shutil

import numpy as np
import pytest
from helpers import computed, trainer_of
from references import AutoModelForCausalLM, AutoModelForSequenceClassification, peft, torch
from test_lora_runs import slow

import hjax
from hjax.errors import DataError
from hjax.launch.export import main as export
from hjax.models.weights import load_trained
from hjax.run.reporter import Reporter

LORA = {"actor.lora.rank": 2, "actor.learning_rate": 0.01}
TOKENS = np.array([[1, 3, 5, 4, 2]])


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """A language model's workdir, and its export."""
    folder = tmp_path_factory.mktemp("start")
    with trainer_of("SFT", {}, folder / "run") as trainer:
        trainer.run()
        trainer.export(folder / "model")
    return folder


@pytest.mark.parametrize(
    ("base", "form"),
    [("run", "float"), slow("run", "int8"), slow("model", "float"), ("model", "int8")],
)
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


@pytest.mark.parametrize("by", ["command", slow("trainer")])
def test_adapters_on_a_workdir_are_exported_with_their_base(start, by, tmp_path):
    """Only hjax reads a workdir."""
    changes = {"actor.path": str(start / "run"), **LORA, "actor.lora.targets": ("q,v",)}
    with trainer_of("SFT", changes, tmp_path / "run") as trainer:
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
    with trainer_of("SFT", changes) as trainer:
        trainer.export(tmp_path / "adapters", adapter=True)
    content = json.loads((tmp_path / "adapters" / "adapter_config.json").read_text())
    assert os.path.isabs(content["base_model_name_or_path"])


def taught(path, steps, start="", seed=0, algorithm="SFT", **changes):
    """Rows of a run's steps, of which each is kept; it starts, or goes on."""
    keys = {"checkpoint.every": 1, "checkpoint.keep": 9, "actor.learning_rate": 0.01, "seed": seed}
    keys |= {"steps": steps, "actor.path": str(start)} | changes
    with trainer_of(algorithm, keys, path) as trainer:
        return [computed(row) for row in trainer.run()]


def test_adapters_stand_on_the_checkpoint_that_they_began_on(tmp_path):
    base, run, twin = (tmp_path / name for name in ("base", "run", "twin"))
    taught(base, 1)
    whole = {"actor.lora.rank": 2}
    undisturbed = taught(twin, 2, base, **whole)[1:]
    taught(run, 1, base, **whole)
    said = json.loads((run / "bases.json").read_text())
    assert said.keys() == {str(base)} and said[str(base)]["step"] == 1
    summed = json.loads((base / "checkpoints" / "1" / "checksums.json").read_text())["items"]
    assert said[str(base)]["sums"] == {"actor.params": summed["actor.params"]}
    before = hjax.load_model(run).logits(TOKENS)
    began = hjax.load_model(base).logits(TOKENS)

    taught(base, 3)
    assert np.abs(hjax.load_model(base).logits(TOKENS) - began).max() > 1e-3
    np.testing.assert_array_equal(hjax.load_model(run).logits(TOKENS), before)
    for flags in ([], ["--adapter"]):
        out = tmp_path / f"exported{len(flags)}"
        assert export([f"--model={run}", f"--output={out}", *flags]) == 0
        kind = peft.AutoPeftModelForCausalLM if flags else AutoModelForCausalLM
        with torch.no_grad():
            found = kind.from_pretrained(out).eval()(torch.tensor(TOKENS)).logits
        np.testing.assert_allclose(found, before, atol=2e-5)
    assert taught(run, 2, base, **whole) == undisturbed


def test_a_base_that_is_not_there_any_more_is_refused(tmp_path, capsys):
    base, run = tmp_path / "base", tmp_path / "run"
    taught(base, 1)
    taught(run, 1, base, **{"actor.lora.rank": 2})
    taught(base, 2)
    begun = f"{base}: checkpoint 1, the base of this run's adapters,"

    def refused(line):
        with pytest.raises(DataError, match=re.escape(line)):
            hjax.load_model(run)
        with pytest.raises(DataError, match=re.escape(line)):
            taught(run, 2, base, **{"actor.lora.rank": 2})
        for flags in ([], ["--adapter"]):
            assert export([f"--model={run}", f"--output={tmp_path / 'out'}", *flags]) == 2
            said = capsys.readouterr().err
            assert line in said and said.count("\n") == 1 and not (tmp_path / "out").exists()

    shutil.rmtree(base / "checkpoints" / "1")
    refused(f"{begun} is gone (saved: 2)")
    taught(tmp_path / "other", 1, seed=1)
    shutil.copytree(tmp_path / "other/checkpoints/1", base / "checkpoints/1")
    refused(f"{begun} is another one now: its checksum differs")
    (base / "checkpoints/1/checksums.json").write_text("[]")
    refused(f"{base}/checkpoints/1: this checkpoint cannot be read (checksums.json is damaged)")


@pytest.mark.slow
def test_a_critics_base_is_recorded_and_a_run_without_a_checkpoint_begins_anew(tmp_path):
    base, run = tmp_path / "base", tmp_path / "run"
    batch = {"warm_start.batch": 16}
    taught(base, 1, algorithm="RewardModel", **batch)
    critic = {"critic.path": str(base), "critic.lora.rank": 2}
    undisturbed = taught(tmp_path / "twin", 2, algorithm="PPO", **critic)[1:]
    taught(run, 1, algorithm="PPO", **critic)
    taught(base, 2, algorithm="RewardModel", **batch)
    assert taught(run, 2, algorithm="PPO", **critic) == undisturbed
    shutil.rmtree(run / "checkpoints")
    taught(run, 2, algorithm="PPO", **critic)
    assert json.loads((run / "bases.json").read_text())[str(base)]["step"] == 2


def test_a_run_of_an_earlier_hjax_has_its_base_recorded_as_it_goes_on(tmp_path, monkeypatch):
    base, run = tmp_path / "base", tmp_path / "run"
    taught(base, 1)
    taught(run, 1, base, **{"actor.lora.rank": 2})
    (run / "bases.json").unlink()
    said = []
    monkeypatch.setattr(Reporter, "message", lambda self, text: said.append(text))
    taught(run, 2, base, **{"actor.lora.rank": 2})
    assert any(f"{base}: checkpoint 1, its newest" in line for line in said)
    assert (run / "bases.json").exists()
