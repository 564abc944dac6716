"""Features together, as a user combines them: a run, its dry run, what comes out, a resume."""

import shutil

import numpy as np
import pytest
from helpers import computed, tiny_config, trainer_of
from test_lora_runs import LORA, axes, slow

import hjax
from hjax.dryrun.description import describe
from hjax.errors import ConfigError

# Generation ahead of learning, in parts.
AHEAD = {
    "placement": "disaggregate",
    "rollout.max_staleness": 1,
    "rollout.deterministic": True,
    "rollout.partial_tokens": 2,
}
SLOTS = {"rollout.slots": 8, "rollout.lookup": 3}
JUDGED = {"reward.while_generating": True, "reward.runs_in": "thread"}
DEEP = {"model.layers": 2}
LESS = {"actor.offload": "all", "model.remat": "full", "rollout.transition_bucket_bytes": 100}
BFLOAT16 = {"model.dtype": "bfloat16"}
PAIRS = {"warm_start.batch": 16, "data.packing": 32}
# Fewer KV heads than the tensor axis has devices, which are whole on each.
FEW_HEADS = {"model.kv_heads": 2, **axes(data=2, tensor=4), "layout.actor.generate.tensor": 2}
STAGES = {**DEEP, **axes(data=4, pipe=2)}

TOGETHER = [
    ("GRPO", {**STAGES, **BFLOAT16}),
    ("GRPO", {**FEW_HEADS, "rollout.slots": -1, **JUDGED}),
    ("GRPO", {**LORA, "rollout.slots": 3, "algorithm.minibatch": 8}),
    ("DPO", {**LORA, **PAIRS, **LESS}),
    slow("PPO", {**STAGES, **axes("critic", data=4, pipe=2), **BFLOAT16, **SLOTS, **JUDGED}),
    slow("PRIME", {"placement": "split", "rollout.slots": 3, "algorithm.minibatch": 8, **LORA}),
    slow("DAPO", {**LORA, **axes(fsdp=2, tensor=4), "rollout.cache_dtype": "int8", **SLOTS}),
    slow("GRPO", {**STAGES, "layout.actor.generate.pipe": 2, **BFLOAT16, **SLOTS}),
    slow("RLOO", {**LORA, "actor.lora.dropout": 0.2, **AHEAD, "rollout.slots": 4}),
    slow("GSPO", {**axes(context=2, fsdp=4), **SLOTS, "rollout.surplus": 1, **BFLOAT16}),
    slow("ReMax", {"placement": "disaggregate", **SLOTS, **LESS, "data.packing": 16}),
    slow("SafeRLHF", {**LORA, "critic.lora.rank": 2, "placement": "standalone", **SLOTS}),
    slow("VAPO", {**FEW_HEADS, **axes("critic", fsdp=2, tensor=4), **SLOTS}),
    slow("KTO", {**LORA, "actor.lora.rslora": True, **axes(fsdp=8), "data.packing": 16}),
    slow("OnlineDPO", {**PAIRS, **JUDGED, "rollout.slots": -1, "rollout.top_p": 0.9}),
    slow("SPIN", {"rollout.samples": 1, "rollout.prompts": 16, **LORA, **SLOTS}),
    slow("Distillation", {"algorithm.teacher_updates": 1, **SLOTS, **LESS, "placement": "split"}),
    slow("RewardModel", {**PAIRS, **LORA, **LESS}),
    slow("CISPO", {"algorithm.correction": "truncated", **AHEAD, **BFLOAT16, "rollout.top_k": 5}),
]


@pytest.mark.parametrize(("algorithm", "changes"), TOGETHER)
def test_what_is_combined_runs_and_resumes_bit_for_bit(tmp_path, algorithm, changes):
    changes = {"steps": 2, "checkpoint.every": 1, **changes}
    whole, again = tmp_path / "whole", tmp_path / "again"
    with trainer_of(algorithm, changes, whole) as trainer:
        memory = describe(trainer)["memory"]
        assert {row["role"] for row in memory} >= {"actor"}
        rows = [computed(row) for row in trainer.run()]
        assert all(np.isfinite(value) for row in rows for value in row.values())
    shutil.copytree(whole, again)
    shutil.rmtree(again / "checkpoints" / "2")
    with trainer_of(algorithm, changes, again) as trainer:
        assert [computed(row) for row in trainer.run()] == rows[1:]
        trainer.export(tmp_path / "model")
    if algorithm != "RewardModel":
        tokens = np.arange(3, 9)[None]
        found, exported = (hjax.load_model(f).logits(tokens) for f in (again, tmp_path / "model"))
        np.testing.assert_allclose(found, exported, atol=1e-5)


@pytest.mark.parametrize(
    ("algorithm", "changes", "said"),
    [
        ("GDPO", {}, "GDPO adds several rewards, and here is one: set config.reward.function to"),
        (
            "GDPO",
            {"reward.function": "sorted_digits.py:reward", "algorithm.weights": (1.0, 1.0, 2.0)},
            "config.algorithm.weights has 3 numbers for the rewards",
        ),
        ("GRPO", {"rollout.slots": -1, **axes(tensor=8)}, "heads of size 4 does not divide over"),
    ],
)
def test_what_does_not_go_together_is_said_before_anything_runs(algorithm, changes, said, tmp_path):
    with pytest.raises(ConfigError, match=said):
        trainer = hjax.Trainer(tiny_config(algorithm, changes), workdir=tmp_path / "run")
        try:
            trainer.prepare()
        finally:
            trainer.close()
    assert not (tmp_path / "run" / "checkpoints").exists()
