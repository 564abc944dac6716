"""Runs of a model with experts: what a user combines gives one device's numbers, and resumes."""

import numpy as np
import pytest
from families import logits, model
from helpers import computed, trainer_of
from references import AutoModelForCausalLM, peft
from test_lora_runs import LORA, axes, close, slow

import hjax
from hjax.data.tasks import get_task

BALANCED = {"actor.router_loss": 0.1}
WHAT = {
    "all weights": BALANCED,
    "adapters that drop": {**BALANCED, **LORA, "actor.lora.dropout": 0.2},
    "adapters with magnitudes": {**BALANCED, **LORA, "actor.lora.dora": True},
    "experts' adapters": {
        **BALANCED,
        **LORA,
        "actor.lora.targets": ("q", "v", "gate", "up", "down"),
    },
}
WHAT["experts' adapters, int8"] = {**WHAT["experts' adapters"], "actor.lora.base": "int8"}
OVER = axes(expert=2, fsdp=2, tensor=2)
HOW = {
    "expert, fsdp, tensor": {**OVER, "layout.actor.generate.tensor": 2},
    # The passes of a pipeline balance each its own rows: another loss than that of all. Before a
    # second update: Adam takes whole steps along gradients of routers that are rounding.
    "pipe, expert, context": {
        **axes(pipe=2, expert=2, context=2),
        "actor.router_loss": 0.0,
        "steps": 1,
    },
    "packs": {"data.packing": 24, **axes(expert=4, data=2)},
    "offload, remat": {"actor.offload": "all", "model.remat": "full", **OVER},
    "rollout apart": {**axes(expert=2, data=2), "placement": "disaggregate"},
    "two processes": {
        **axes(expert=2, fsdp=2),
        "cluster.processes": 2,
        "cluster.devices_per_process": 2,
    },
}
FAST = (
    ("adapters that drop", "expert, fsdp, tensor"),
    ("experts' adapters", "expert, fsdp, tensor"),
)
COMBINATIONS = [
    (what, how) if (what, how) in FAST else slow(what, how) for what in WHAT for how in HOW
]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("experts") / "model"
    sizes = {"num_experts": 4, "num_key_value_heads": 2, "num_attention_heads": 4, "head_dim": 8}
    sizes |= {"hidden_size": 16, "moe_intermediate_size": 8, "num_hidden_layers": 2}
    model("qwen3 experts", vocab_size=16, num_experts_per_tok=2, **sizes).save_pretrained(folder)
    get_task("sorting").tokenizer().save(folder)
    return str(folder)


def rows_of(base, changes, workdir=None):
    with trainer_of("GRPO", {"actor.path": base, "steps": 2, **changes}, workdir) as trainer:
        return [computed(row) for row in trainer.run()]


@pytest.mark.parametrize(("what", "how"), COMBINATIONS)
def test_every_combination_gives_the_same_metrics(base, what, how):
    changes = {**WHAT[what], **HOW[how]}
    alone = {key: changes[key] for key in (*WHAT[what], "steps") if key in changes}
    expected = rows_of(base, alone)
    balanced = changes["actor.router_loss"] > 0
    assert all(row["actor/grad_norm"] > 0 for row in expected)
    assert all(row.get("actor/router_loss", 0) >= balanced for row in expected)
    close(rows_of(base, changes), expected)


@pytest.mark.parametrize(
    ("what", "how"),
    [
        slow("all weights", "expert, fsdp, tensor"),
        slow("adapters that drop", "packs"),
        slow("adapters with magnitudes", "expert, fsdp, tensor"),
        slow("experts' adapters", "expert, fsdp, tensor"),
        slow("experts' adapters", "rollout apart"),
        slow("experts' adapters, int8", "offload, remat"),
    ],
)
def test_a_run_resumes_bit_for_bit(base, tmp_path, what, how):
    changes = {**WHAT[what], **HOW[how], "checkpoint.every": 1}
    whole = rows_of(base, {**changes, "steps": 4}, tmp_path / "whole")
    rows_of(base, changes, tmp_path / "two")
    assert rows_of(base, {**changes, "steps": 4}, tmp_path / "two") == whole[2:]


@pytest.mark.slow
@pytest.mark.parametrize("what", ["experts' adapters", "experts' adapters, int8"])
def test_what_a_run_learned_goes_out(base, tmp_path, what):
    """As it is in the workdir, merged and as adapters, which PEFT loads."""
    changes = {"actor.path": base, **WHAT[what], "checkpoint.every": 1, "steps": 2}
    with trainer_of("GRPO", changes, tmp_path / "run") as trainer:
        trainer.run()
        trainer.export(tmp_path / "merged")
        trainer.export(tmp_path / "adapter", adapter=True)
    tokens = np.arange(3, 12)[None]
    expected = np.asarray(hjax.load_model(tmp_path / "run").logits(tokens))
    assert np.abs(expected - hjax.load_model(base).logits(tokens)).max() > 1e-3
    found = hjax.load_model(tmp_path / "merged").logits(tokens)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    plain = AutoModelForCausalLM.from_pretrained(base, attn_implementation="eager")
    theirs = logits(peft.PeftModel.from_pretrained(plain, tmp_path / "adapter").eval(), tokens)
    # Beside the base as it was: of a quantized one, near.
    np.testing.assert_allclose(theirs, expected, atol=0.1 if "int8" in what else 1e-4)
    adapter = hjax.load_model(tmp_path / "adapter").logits(tokens)
    np.testing.assert_allclose(adapter, theirs, atol=1e-4)
