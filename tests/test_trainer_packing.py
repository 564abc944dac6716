"""Whole runs in packs: the metrics of padded rows, resumed bit for bit, what is refused."""

import json
import pathlib

import pytest
from helpers import computed, tiny_config, trainer_of

import hjax
from hjax.errors import ConfigError

# Demonstrations first, so that responses end; a reward that few responses lack: of equal ones Adam
# makes its own rounding large.
CHANGES = {
    "reward.function": f"{pathlib.Path(__file__).with_name('evens_reward.py')}:evens",
    "steps": 3,
    "warm_start.steps": 4,
    "rollout.samples": 4,
    "rollout.max_response_length": 8,
    "eval.every": 3,
}
# (algorithm, changes); 24 tokens hold a prompt and two of its responses.
RUNS = {
    "PPO": ("PPO", {"algorithm.minibatch": 16}),
    "PPO in passes": ("PPO", {"actor.micro_batch": 8, "critic.micro_batch": 8}),
    "GRPO": ("GRPO", {"algorithm.kl_in": "loss", "algorithm.kl_coef": 0.05}),
    "ReMax": ("ReMax", {"rollout.samples": 1, "rollout.prompts": 16}),
    "SafeRLHF": ("SafeRLHF", {"algorithm.pretraining_coef": 0.1}),
    "SFT": ("SFT", {"warm_start.steps": 0, "eval.every": 0}),
    "split": ("PPO", {"placement": "split", "layout.actor.train.tensor": 2}),
    "fsdp, offload": ("PPO", {"layout.actor.train.fsdp": 4, "actor.offload": "all"}),
}
EVERYDAY = ("SFT",)


def run(algorithm, changes):
    with trainer_of(algorithm, CHANGES | changes) as trainer:
        return [computed(row) for row in trainer.run()]


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[] if n in EVERYDAY else [pytest.mark.slow]) for n in RUNS],
)
def test_metrics_are_those_of_padded_rows(name):
    algorithm, changes = RUNS[name]
    expected = run(algorithm, changes)
    found = run(algorithm, changes | {"data.packing": 24})
    trained = {key.split("/")[0] for key in found[0] if key.endswith("/loss")}
    for row, other in zip(found, expected, strict=True):
        for role in trained:
            assert 0 <= row.pop(f"{role}/padding") < 1
        assert row == pytest.approx(other, rel=1e-4, abs=1e-5)


# Long answers, most of which end early, and passes as small as the packs.
CHOICES = {
    "data.packing": "auto", "rollout.max_response_length": 24, "warm_start.steps": 20,
    "warm_start.batch": 32,
}  # fmt: skip


@pytest.fixture
def small_passes(monkeypatch):
    monkeypatch.setattr("hjax.workers.packer.MIN_PASS_PLACES", 1)


@pytest.mark.parametrize(
    "algorithm, changes",
    [
        ("PPO", {"algorithm.minibatch": 16}),
        pytest.param("SafeRLHF", {"algorithm.pretraining_coef": 0.1}, marks=pytest.mark.slow),
        pytest.param("DPO", {}, marks=pytest.mark.slow),
    ],
)
@pytest.mark.extended
def test_metrics_of_what_batches_choose_are_those_of_padded_rows(algorithm, changes, small_passes):
    expected = run(algorithm, CHOICES | changes | {"data.packing": 0})
    found = run(algorithm, CHOICES | changes)
    for row, other in zip(found, expected, strict=True):
        roles = {key.split("/")[0] for key in row if key.endswith("/loss")} - {"eval"}
        for role in roles:
            # Padded rows would be emptier: an answer has some 4 of the 24 tokens.
            assert 0 <= row.pop(f"{role}/padding") < 0.6
        assert row == pytest.approx(other, rel=1e-4, abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("packs", [{"data.packing": 24}, CHOICES])
def test_a_stopped_run_continues_bit_for_bit(packs, tmp_path, small_passes):
    changes = CHANGES | packs | {"checkpoint.every": 1, "algorithm.minibatch": 16}
    with trainer_of("PPO", changes, tmp_path / "whole") as trainer:
        expected = [computed(row) for row in trainer.run()]
    with trainer_of("PPO", changes, tmp_path / "parts") as trainer:
        first = [computed(row) for row in trainer.run(1)]
    with trainer_of("PPO", changes, tmp_path / "parts") as trainer:
        assert first + [computed(row) for row in trainer.run()] == expected


@pytest.mark.parametrize(
    "changes, says",
    [
        ({"data.packing": 12}, "prompts of 5 with responses of 8 are 13 tokens; use 13 or more"),
        (
            {"data.packing": 32, "layout.actor.train.pipe": 2, "model.layers": 2},
            "layout.actor.train.pipe=2; use pipe=1 there, or data.packing=0",
        ),
        (
            {"data.packing": 32, "layout.critic.train.context": 2},
            "layout.critic.train.context=2; use context=1 there",
        ),
        ({"data.packing": -1}, "config.data.packing='-1': must be auto, or 0 or more"),
        ({"data.length_buckets": 4}, "data.length_buckets: packs do that now, config.data.packing"),
    ],
)
def test_what_cannot_be_packed_is_named(changes, says):
    with pytest.raises(ConfigError) as refused:
        hjax.Trainer(tiny_config("PPO", CHANGES | changes))
    assert says in str(refused.value) and "\n" not in str(refused.value)


def test_what_cannot_be_packed_is_padded_by_choice():
    """Of a critic whose rows' length is split; the actor's may still be packed."""
    changes = CHANGES | {"data.packing": "auto", "layout.critic.train.context": 2}
    with trainer_of("PPO", changes) as trainer:
        packers = {role: trainer.roles.groups[role].worker.packer for role in ("actor", "critic")}
        assert packers["critic"] is None and packers["actor"] is not None


@pytest.mark.extended
def test_an_older_run_keeps_its_rows(tmp_path):
    """It recorded no packs as a number, and `length_buckets`: the same command goes on with it."""
    changes = CHANGES | {"checkpoint.every": 1, "rollout.max_response_length": 4}
    with trainer_of("SFT", changes | {"warm_start.steps": 0}, tmp_path) as trainer:
        trainer.run(1)
    record = tmp_path / "config.json"
    old = json.loads(record.read_text())
    old["data"] |= {"packing": 0, "length_buckets": 0}
    record.write_text(json.dumps(old))
    changes |= {"warm_start.steps": 0, "data.packing": "auto"}
    with trainer_of("SFT", changes, tmp_path) as trainer:
        assert trainer.config.data.packing == "0"
        assert not any(key.endswith("/padding") for key in trainer.run(1)[0])
    assert json.loads(record.read_text())["data"]["packing"] == "0"
    assert "length_buckets" not in json.loads(record.read_text())["data"]


def test_rotary_positions_that_depend_on_the_length_are_named(tmp_path):
    """Their frequencies would be those of a pack's longest sequence."""
    from references import LlamaConfig, LlamaForCausalLM, torch

    from hjax.data.tasks import get_task

    assert torch.nn
    tokenizer = get_task("sorting").tokenizer()
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 10}
    rope |= {"short_factor": [1.0, 1.0], "long_factor": [2.0, 3.0]}
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=tokenizer.vocab_size, num_attention_heads=4, max_position_embeddings=64,
            rope_parameters=rope, **sizes,
        )
    )  # fmt: skip
    model.save_pretrained(tmp_path)
    tokenizer.save(tmp_path)
    changes = CHANGES | {"data.packing": 24, "actor.path": str(tmp_path)}
    with pytest.raises(ConfigError, match="packing=24: .*longrope.*'s model .*10 .*up to 13"):
        hjax.Trainer(tiny_config("PPO", changes))
    with trainer_of("PPO", changes | {"data.packing": "auto"}) as trainer:
        assert trainer.roles.groups["actor"].worker.packer is None
    hjax.Trainer(tiny_config("PPO", changes | {"rollout.max_response_length": 5})).close()
