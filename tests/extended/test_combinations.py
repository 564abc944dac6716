"""Features together, as a user combines them: each row a run and its resume, in one table.

Each pair of features that may stand together (adapters, magnitudes, dropout, quantized bases,
experts, packs, slots, guesses, placements, generation ahead, processes, pipelines ...) stands in a
row at least. A row whose layout, placement and ways change no number has the metrics of a run
without them.
"""

import dataclasses
import shutil
from typing import Any

import numpy as np
import pytest
from families import logits, model
from helpers import DIGITS, computed, tiny_config, trainer_of
from references import AutoModelForCausalLM, peft
from test_agent_runs import agent_keys
from test_lora_runs import AHEAD, BOTH, CRITIC, LORA, axes, close
from test_tool_runs import tool_keys

import hjax
from hjax.data.tasks import get_task
from hjax.dryrun.description import describe
from hjax.errors import ConfigError

PARTS = {**AHEAD, "rollout.partial_tokens": 2}  # ahead of learning, in parts
SLOTS = {"rollout.slots": 8, "rollout.speculative_tokens": 3}
JUDGED = {"reward.while_generating": True, "reward.runs_in": "thread"}
BFLOAT16 = {"model.dtype": "bfloat16"}
PAIRS = {"warm_start.batch": 16, "data.packing": 32}
AWAY = {"actor.offload": "all", "model.remat": "full"}
LESS = {**AWAY, "rollout.transition_bucket_bytes": 100}
MICRO = {"actor.micro_batch": 8, "model.unroll_layers": True}
WIDE = {"layout.actor.generate.tensor": 2, **axes(fsdp=2, tensor=4)}
# Fewer KV heads than the tensor axis has devices, which are whole on each.
FEW_HEADS = {"model.kv_heads": 2, **axes(data=2, tensor=4), "layout.actor.generate.tensor": 2}
STAGES = {"model.layers": 2, **axes(data=4, pipe=2)}
APART = {"placement": "disaggregate"}
FOLLOWS = {"reference.sync_every": 1, "reference.sync_share": 0.5, "algorithm.kl_coef": 0.1}
AVERAGES = {"actor.ema_decay": 0.7, "eval.every": 1}
TWO = {"cluster.processes": 2, "cluster.devices_per_process": 2}
DROPS = {**LORA, "actor.lora.dropout": 0.3}
DORA = {**LORA, "actor.lora.dora": True}
INT8 = {**LORA, "actor.lora.base": "int8"}
FP8 = {**LORA, "actor.lora.base": "fp8"}
# Episodes of several turns.
MAZE = {
    "data.task": "maze", "data.task_options.side": 3, "data.task_options.distance": 1,
    "environment.max_turns": 6, "rollout.max_response_length": 30, "environment.processes": 2,
    "warm_start.steps": 4,
}  # fmt: skip
# Before a second update, where rounding decides between turns.
ONCE = {"compared": 1}
# Prompts that the policy judges, from the first step on.
JUDGES = {
    "data.task": "mixed_reversal", "data.task_options.length": 3, "data.task_options.partial": 0.5,
    "algorithm.judge_example": "{prompt}?{bin};", "algorithm.judge_context": 24,
    "rollout.max_response_length": 4, "warm_start.steps": 4,
}  # fmt: skip
# Of a model with experts.
BALANCED = {"actor.router_loss": 0.1}
EACH = {**BALANCED, **LORA, "actor.lora.targets": ("q", "v", "gate", "up", "down")}
OVER = {**axes(expert=2, fsdp=2, tensor=2), "layout.actor.generate.tensor": 2, **AWAY}
# The passes of a pipeline balance each its own rows: another loss than that of all. Before a second
# update: Adam takes whole steps along gradients of routers that are rounding.
PIPED = {**axes(pipe=2, expert=2, context=2), "actor.router_loss": 0.0, "compared": 1}
EXPERTS_APART = {**axes(expert=2, data=2), **APART, "data.packing": 24}
EXPERTS_TWO = {**axes(expert=2, fsdp=2), **TWO}


@dataclasses.dataclass(frozen=True)
class Row:
    """A run and its resume.

    Attributes:
      algorithm: its name.
      changes: its keys, beside those of `helpers.TINY`; `compared`: of so many steps the metrics
        are compared, the others differ by rounding that Adam makes whole steps of.
      start: the model that it begins with: "base", "experts" or "" (from scratch); "tools": one
        that calls tools, whose conversations the run has; "agents": from scratch, behind an agent.
      same: whether its metrics are those of a run without what changes no number.
      slow: whether it is not among the extended tests.
    """

    algorithm: str
    changes: dict[str, Any]
    start: str = ""
    same: bool = True
    slow: bool = True


TABLE = {
    # Adapters, by how their base is held and what their inputs are.
    "dropout, tensor, slots, guesses": Row(
        "GRPO", {**DROPS, **WIDE, **SLOTS, "algorithm.minibatch": 8}, "base", slow=False),
    "critic's, int8, split, packs": Row(
        "PPO", {**INT8, **CRITIC, "critic.lora.base": "int8", "placement": "split",
                "data.packing": 16, "actor.micro_batch": 8}, "base"),
    "critic's dropout, layouts": Row(
        "PPO", {**DROPS, **CRITIC, "critic.lora.dropout": 0.5, **BOTH, "actor.micro_batch": 8},
        "base"),
    "dropout, pipe, unrolled, recomputed": Row(
        "GRPO", {**DROPS, **axes(pipe=2, data=4), **MICRO, "model.remat": "full"}, "base"),
    "dropout, magnitudes, context": Row(
        "GRPO", {**DROPS, "actor.lora.dora": True, **axes(tensor=2, fsdp=2, context=2)}, "base"),
    "dropout, packs, processes": Row(
        "GRPO", {**DROPS, "data.packing": 16, **TWO, "actor.micro_batch": 8}, "base"),
    "dropout, int8, offload": Row(
        "GRPO", {**DROPS, **INT8, **AWAY, **axes(tensor=2, fsdp=4)}, "base"),
    "dropout, magnitudes, int8, packs": Row(
        "GRPO", {**DROPS, **DORA, **INT8, "data.packing": 16, **axes(tensor=2, fsdp=4)}, "base"),
    "magnitudes, tensor": Row("GRPO", {**DORA, **WIDE}, "base"),
    "critic's magnitudes, offload, layouts": Row(
        "PPO", {**DORA, **CRITIC, "critic.lora.dora": True, **BOTH, "actor.offload": "all"},
        "base"),
    "magnitudes, apart, recomputed": Row(
        "GRPO", {**DORA, **APART, "model.remat": "full", "actor.micro_batch": 8}, "base"),
    "critic's fp8, offload, layouts": Row(
        "PPO", {**INT8, **CRITIC, "critic.lora.base": "fp8", **BOTH, "actor.offload": "all",
                "critic.offload": "all", "layout.actor.generate.tensor": 2}, "base"),
    "fp8, tensor": Row("GRPO", {**FP8, **WIDE}, "base"),
    "int8, apart, recomputed": Row(
        "GRPO", {**INT8, **APART, "model.remat": "full", "actor.micro_batch": 8}, "base"),
    "int8, context, unrolled": Row(
        "GRPO", {**INT8, **axes(context=2, fsdp=4), "model.unroll_layers": True}, "base"),
    "int8, processes": Row("GRPO", {**INT8, **TWO}, "base"),
    "critic's, pipe": Row(
        "PPO", {**LORA, **CRITIC, **axes(pipe=2, data=4), **axes("critic", pipe=2, data=4)},
        "base"),
    "adapters, the optimizer offloaded": Row(
        "GRPO", {**LORA, "actor.offload": "optimizer"}, "base"),
    "adapters, standalone": Row("PPO", {**LORA, "placement": "standalone"}, "base"),
    "adapters, apart, fsdp": Row("ReMax", {**LORA, **axes(fsdp=4), **APART}, "base"),
    "critic's, split, processes": Row(
        "PPO", {**LORA, **CRITIC, "placement": "split", "cluster.processes": 2,
                "cluster.devices_per_process": 1}, "base"),
    "adapters from scratch, layouts": Row(
        "SafeRLHF", {**LORA, **CRITIC, **axes(tensor=4, fsdp=2), "warm_start.steps": 5,
                     "compared": 1}),
    "critic's from scratch, offload": Row(
        "PPO", {**LORA, **CRITIC, "warm_start.steps": 2, "actor.offload": "all"}),
    # All weights.
    "offload of all": Row(
        "PPO", {f"{role}.offload": "all" for role in ("actor", "critic", "reference")}),
    # A reference that follows.
    "reference follows: adapters, layouts, packs": Row(
        "GRPO", {**LORA, **FOLLOWS, **WIDE, "data.packing": 16}, "base", slow=False),
    "reference follows: split, fsdp, offload": Row(
        "PPO", {**FOLLOWS, **axes(fsdp=4), "placement": "split", "reference.offload": "all"},
        "base"),
    "reference follows: processes": Row(
        "GRPO", {**FOLLOWS, "placement": "standalone", **TWO}, "base"),
    "an average of adapters, layouts, packs": Row(
        "GRPO", {**LORA, **AVERAGES, **WIDE, "data.packing": 16}, "base", slow=False),
    "an average, offload all, a following reference": Row(
        "PPO", {**AVERAGES, **FOLLOWS, **axes(fsdp=4), "placement": "split",
                "actor.offload": "all"}, "base"),
    "an average, a rollout of its own": Row(
        "GRPO", {**AVERAGES, **axes(fsdp=4), **APART}, "base", slow=False),
    "an average, a rollout of its own: processes, episodes": Row(
        "GRPO", {**AVERAGES, **APART, **TWO, **MAZE}),
    "an average, stages, a reward model": Row("RewardModel", {**AVERAGES, **STAGES}, same=False),
    "an average over processes, held-out loss": Row("SFT", {**AVERAGES, **LORA, **TWO}, "base"),
    "held-out loss, stages, an average": Row("SFT", {**AVERAGES, **STAGES}, same=False),
    "held-out verdicts, packs, layouts": Row(
        "KTO", {"eval.every": 1, **axes(fsdp=2, tensor=4), "data.packing": 16}, same=False),
    "positions stretched, packs, layouts": Row(
        "GRPO", {**LORA, **WIDE, "data.packing": 16,
                 "model.rope_scaling": '{"rope_type": "yarn", "factor": 2}'}, "base"),
    # A model with experts.
    "experts: each an adapter, layouts, offload": Row(
        "GRPO", {**EACH, **OVER}, "experts", slow=False),
    "experts: layouts, offload": Row("GRPO", {**BALANCED, **OVER}, "experts"),
    "experts: dropout, layouts, offload": Row("GRPO", {**BALANCED, **DROPS, **OVER}, "experts"),
    "experts: magnitudes, layouts, offload": Row("GRPO", {**BALANCED, **DORA, **OVER}, "experts"),
    "experts: int8, layouts, offload": Row("GRPO", {**INT8, **EACH, **OVER}, "experts"),
    "experts: pipe, context": Row("GRPO", {**BALANCED, **PIPED}, "experts"),
    "experts: dropout, pipe, context": Row("GRPO", {**DROPS, **PIPED}, "experts"),
    "experts: magnitudes, pipe, context": Row("GRPO", {**DORA, **PIPED}, "experts"),
    "experts: each an adapter, pipe, context": Row("GRPO", {**EACH, **PIPED}, "experts"),
    "experts: int8, pipe, context": Row("GRPO", {**INT8, **EACH, **PIPED}, "experts"),
    "experts: apart, packs": Row("GRPO", {**BALANCED, **EXPERTS_APART}, "experts"),
    "experts: dropout, apart, packs": Row(
        "GRPO", {**BALANCED, **DROPS, **EXPERTS_APART}, "experts"),
    "experts: magnitudes, apart, packs": Row(
        "GRPO", {**BALANCED, **DORA, **EXPERTS_APART}, "experts"),
    "experts: each an adapter, apart, packs": Row("GRPO", {**EACH, **EXPERTS_APART}, "experts"),
    "experts: int8, apart, packs": Row("GRPO", {**INT8, **EACH, **EXPERTS_APART}, "experts"),
    "experts: processes": Row("GRPO", {**BALANCED, **EXPERTS_TWO}, "experts"),
    "experts: dropout, processes": Row("GRPO", {**BALANCED, **DROPS, **EXPERTS_TWO}, "experts"),
    "experts: magnitudes, processes": Row("GRPO", {**BALANCED, **DORA, **EXPERTS_TWO}, "experts"),
    "experts: each an adapter, processes": Row("GRPO", {**EACH, **EXPERTS_TWO}, "experts"),
    "experts: int8, processes": Row("GRPO", {**INT8, **EACH, **EXPERTS_TWO}, "experts"),
    # Episodes.
    "episodes: adapters, tensor, slots": Row(
        "GRPO", {**MAZE, **LORA, **WIDE, "rollout.slots": 3}),
    "episodes: critic's, packs, micro-batches": Row(
        "PPO", {**MAZE, **LORA, **CRITIC, "data.packing": 48, "actor.micro_batch": 8}),
    "episodes: split, slots, offload": Row(
        "PPO", {**MAZE, "placement": "split", "rollout.slots": 5, "actor.offload": "all"}),
    "episodes: two devices, fsdp, packs": Row(
        "GRPO", {**MAZE, **axes(fsdp=2), "cluster.devices_per_process": 2, "data.packing": 48}),
    "episodes: greedy ones as the baseline, processes": Row("ReMax", {**MAZE, **TWO}),
    "episodes: turns in the same state, processes": Row("GiGPO", {**MAZE, **TWO}),
    "episodes: turns in the same state, fsdp, packs": Row(
        "GiGPO", {**MAZE, **axes(fsdp=2), "cluster.devices_per_process": 2, "data.packing": 48}),
    "episodes: ahead, packs": Row(
        "GRPO", {**MAZE, **AHEAD, "data.packing": 48}, same=False, slow=False),
    # Conversations with tools.
    "tools: adapters, packs, tensor": Row(
        "GRPO", {**LORA, **ONCE, "data.packing": 224, **WIDE}, "tools", slow=False),
    "tools: critic's, fsdp, micro-batches": Row(
        "PPO", {**LORA, **CRITIC, **ONCE, **axes(fsdp=4), "actor.micro_batch": 8}, "tools"),
    "tools: packs, processes": Row("GRPO", {**ONCE, "data.packing": 224, **TWO}, "tools"),
    "tools: ahead, adapters, packs": Row(
        "GRPO", {**LORA, **AHEAD, "data.packing": 224}, "tools", same=False, slow=False),
    # Sessions of agents, whose conversations are rows.
    "agents: adapters, packs, fsdp, tensor": Row(
        "GRPO", {**LORA, **ONCE, "data.packing": 64, **WIDE}, "agents", slow=False),
    "agents: packs, processes": Row("GRPO", {**ONCE, "data.packing": 64, **TWO}, "agents"),
    "agents: ahead, adapters, packs": Row(
        "GRPO", {**LORA, **AHEAD, "data.packing": 64}, "agents", same=False),
    # Prompts that are chosen.
    "judged prompts: processes, packs": Row("METIS", {**JUDGES, **TWO, "data.packing": 48}),
    "judged prompts: ahead, packs": Row(
        "METIS", {**JUDGES, **AHEAD, "data.packing": 48}, same=False),
    "prompts passed over: split, offload": Row(
        "PPO", {"algorithm.difficulty": (0.2, 0.8), "placement": "split", "actor.offload": "all"}),
    # What draws or rounds otherwise: a resume alone, and what the dry run says.
    "pipe, bfloat16": Row("GRPO", {**STAGES, **BFLOAT16}, same=False),
    "few heads, slots, judged": Row(
        "GRPO", {**FEW_HEADS, **JUDGED, "rollout.slots": -1}, same=False, slow=False),
    "pairs, adapters, offload": Row("DPO", {**LORA, **PAIRS, **LESS}, same=False, slow=False),
    "pipe, critic's, bfloat16, guesses, judged": Row(
        "PPO", {**STAGES, **axes("critic", data=4, pipe=2), **BFLOAT16, **SLOTS, **JUDGED},
                same=False),
    "split, slots, adapters": Row(
        "PRIME", {**LORA, "placement": "split", "rollout.slots": 3, "algorithm.minibatch": 8},
                same=False),
    "int8 cache, adapters, tensor, guesses": Row(
        "DAPO", {**LORA, **axes(fsdp=2, tensor=4), **SLOTS, "rollout.cache_dtype": "int8"},
                same=False),
    "pipe in generation, bfloat16, guesses": Row(
        "GRPO", {**STAGES, **BFLOAT16, **SLOTS, "layout.actor.generate.pipe": 2}, same=False),
    "dropout, ahead, slots": Row("RLOO", {**DROPS, **PARTS, "rollout.slots": 4}, same=False),
    "dropout, packs, ahead": Row("GRPO", {**DROPS, **AHEAD, "data.packing": 16}, same=False),
    "fp8, ahead": Row("GRPO", {**FP8, **AHEAD}, "base", same=False),
    "context, surplus, bfloat16, guesses": Row(
        "GSPO", {**axes(context=2, fsdp=4), **SLOTS, **BFLOAT16, "rollout.extra_samples": 1},
        same=False),
    "apart, guesses, offload, packs": Row(
        "ReMax", {**APART, **SLOTS, **LESS, "data.packing": 16}, same=False),
    "critic's, standalone, guesses": Row(
        "SafeRLHF", {**LORA, **SLOTS, "critic.lora.rank": 2, "placement": "standalone"},
                same=False),
    "few heads, critic's layout, guesses": Row(
        "VAPO", {**FEW_HEADS, **axes("critic", fsdp=2, tensor=4), **SLOTS}, same=False),
    "adapters of another scale, packs": Row(
        "KTO", {**LORA, **axes(fsdp=8), "actor.lora.rslora": True, "data.packing": 16}, same=False),
    "pairs, judged, slots, top-p": Row(
        "OnlineDPO", {**PAIRS, **JUDGED, "rollout.slots": -1, "rollout.top_p": 0.9}, same=False),
    "a sample each, adapters, guesses": Row(
        "SPIN", {**LORA, **SLOTS, "rollout.samples": 1, "rollout.prompts": 16}, same=False),
    "a teacher that learns, split, offload": Row(
        "Distillation", {**SLOTS, **LESS, "algorithm.teacher_updates": 1, "placement": "split"},
                same=False),
    "a reward model's adapters, pairs": Row("RewardModel", {**PAIRS, **LORA, **LESS}, same=False),
    "corrected, ahead, bfloat16, top-k": Row(
        "CISPO", {**PARTS, **BFLOAT16, "algorithm.correction": "truncated", "rollout.top_k": 5},
                same=False),
}  # fmt: skip
# What numbers depend on, beside the algorithm.
NUMBERS = ("actor.lora.", "critic.lora.", "actor.learning_rate", "actor.path", "actor.router_loss",
           "algorithm.", "warm_start.", "steps", "data.task", "data.path", "data.eval_",
           "tokenizer.", "environment.", "agent.", "reward.function", "rollout.max_prompt_length",
           "rollout.max_response_length", "model.max_length", "reference.sync", "eval.",
           "actor.ema_decay", "model.rope_scaling")  # fmt: skip


@pytest.fixture(scope="module")
def experts(tmp_path_factory):
    """The folder of a model with experts."""
    folder = tmp_path_factory.mktemp("experts") / "model"
    sizes = {"num_experts": 4, "num_key_value_heads": 2, "num_attention_heads": 4, "head_dim": 8}
    sizes |= {"hidden_size": 16, "moe_intermediate_size": 8, "num_hidden_layers": 2}
    model("qwen3 experts", vocab_size=16, num_experts_per_tok=2, **sizes).save_pretrained(folder)
    get_task("sorting").tokenizer().save(folder)
    return str(folder)


@pytest.fixture(scope="module")
def tools(tmp_path_factory):
    """Keys of runs with tools."""
    return tool_keys(tmp_path_factory.mktemp("tools"))


@pytest.fixture(scope="module")
def agents(tmp_path_factory):
    """Keys of runs with an agent."""
    return agent_keys(tmp_path_factory.mktemp("agents"))


def rows_of(algorithm, changes, workdir=None):
    with trainer_of(algorithm, changes, workdir) as trainer:
        return [computed(row) for row in trainer.run()]


@pytest.fixture(scope="module")
def plain():
    """Metrics of a run without what changes no number."""
    known = {}

    def run(algorithm, changes):
        keys = {key: value for key, value in changes.items() if key.startswith(NUMBERS)}
        name = algorithm, repr(sorted(keys.items()))
        if name not in known:
            known[name] = rows_of(algorithm, keys)
        return known[name]

    return run


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.slow] * row.slow) for n, row in TABLE.items()],
)
def test_what_is_combined_runs_and_resumes_bit_for_bit(name, tmp_path, request, plain):
    row = TABLE[name]
    changes = {"steps": 2, "checkpoint.every": 1, **row.changes}
    compared = changes.pop("compared", 2)
    if row.start in ("tools", "agents"):
        changes = {**request.getfixturevalue(row.start), **changes}
    elif row.start:
        changes["actor.path"] = request.getfixturevalue(row.start)
    whole, again = tmp_path / "whole", tmp_path / "again"
    with trainer_of(row.algorithm, changes, whole) as trainer:
        if not row.same:
            assert {"actor"} <= {each["role"] for each in describe(trainer)["memory"]}
        rows = [computed(each) for each in trainer.run()]
        assert all(np.isfinite(x) for each in rows for x in each.values() if x is not None)
    if row.same:
        expected = plain(row.algorithm, changes)[:compared]
        assert all(each["actor/grad_norm"] > 0 for each in expected)
        balanced = changes.get("actor.router_loss", 0) > 0
        assert all(each.get("actor/router_loss", 0) >= balanced for each in expected)
        # Rounding decides between tokens of which a policy that has hardly learned thinks alike.
        close(rows[:compared], expected, left_out=("eval/reward", "eval/accuracy"))
    shutil.copytree(whole, again)
    shutil.rmtree(again / "checkpoints" / "2")
    with trainer_of(row.algorithm, changes, again) as trainer:
        assert [computed(each) for each in trainer.run()] == rows[1:]
        trainer.export(tmp_path / "model")
    if row.algorithm != "RewardModel":
        tokens = np.arange(3, 9)[None]
        found, exported = (hjax.load_model(f).logits(tokens) for f in (again, tmp_path / "model"))
        np.testing.assert_allclose(found, exported, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("changes", [EACH, {**INT8, **EACH}], ids=["float", "int8"])
def test_what_a_run_with_experts_learned_goes_out(experts, tmp_path, changes):
    """As it is in the workdir, merged and as adapters, which PEFT loads."""
    changes = {"actor.path": experts, **changes, "checkpoint.every": 1, "steps": 2}
    with trainer_of("GRPO", changes, tmp_path / "run") as trainer:
        trainer.run()
        trainer.export(tmp_path / "merged")
        trainer.export(tmp_path / "adapter", adapter=True)
    tokens = np.arange(3, 12)[None]
    expected = np.asarray(hjax.load_model(tmp_path / "run").logits(tokens))
    assert np.abs(expected - hjax.load_model(experts).logits(tokens)).max() > 1e-3
    found = hjax.load_model(tmp_path / "merged").logits(tokens)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    plain = AutoModelForCausalLM.from_pretrained(experts, attn_implementation="eager")
    theirs = logits(peft.PeftModel.from_pretrained(plain, tmp_path / "adapter").eval(), tokens)
    # Beside the base as it was: of a quantized one, near.
    np.testing.assert_allclose(theirs, expected, atol=0.1 if "actor.lora.base" in changes else 1e-4)
    adapter = hjax.load_model(tmp_path / "adapter").logits(tokens)
    np.testing.assert_allclose(adapter, theirs, atol=1e-4)


@pytest.mark.parametrize(
    ("algorithm", "changes", "said"),
    [
        ("GDPO", {}, "GDPO sums several named rewards, and the reward function returns only one"),
        (
            "GDPO",
            {"reward.function": "sorted_digits.py:reward", "algorithm.weights": (1.0, 1.0, 2.0)},
            r"config.algorithm.weights=\(1.0, 1.0, 2.0\) for the rewards",
        ),
        ("GRPO", {"rollout.slots": -1, **axes(tensor=8)}, "heads of size 4 does not divide over"),
        ("PRIME", MAZE, "PRIME learns from single responses, .* environment .* use one of PPO"),
        ("SFT", {"environment.function": f"{DIGITS}:Digits"},
         "Digits: SFT learns from examples and plays no episodes; leave it out, or use one of PPO"),
        ("GRPO", {**MAZE, "rollout.speculative_tokens": 2},
         "config.rollout.speculative_tokens=2 is of single responses, .*; use 0"),
        ("GRPO", {**MAZE, "rollout.extra_samples": 1}, "rollout.extra_samples=1 is of single"),
        ("GRPO", {**MAZE, **PARTS}, "rollout.partial_tokens=2 is of single responses, .*; use 0"),
        ("GRPO", {**MAZE, **JUDGED},
         "reward.while_generating=True is of single responses, .* leave it out"),
        ("GRPO", {**MAZE, "reward.function": "sorted_digits.py:reward"},
         "reward.function=sorted_digits.py:reward: the environment .* rewards its episodes"),
        ("GRPO", {**MAZE, **STAGES, "layout.actor.generate.pipe": 2},
         "layout.actor.generate.pipe=2: turns .* use tensor or data instead"),
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
