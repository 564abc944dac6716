"""Runs that train adapters: what learns, what is saved, what goes out; `test_combinations` has the
rows of a table with all else."""

import json

import jax
import numpy as np
import pytest
from helpers import computed, tiny_config, trainer_of
from safetensors.numpy import load_file

import hjax
from hjax.dryrun.description import describe
from hjax.dryrun.programs import abstract_workers, step_programs
from hjax.errors import ConfigError, DataError
from hjax.launch.export import main as export
from hjax.models import parameter_counts
from hjax.models.peft_files import WEIGHTS

LORA = {"actor.lora.rank": 4, "actor.lora.alpha": 8.0, "actor.learning_rate": 0.01}
CRITIC = {"critic.lora.rank": 2, "critic.lora.targets": ("q", "v", "down")}


def rows_of(algorithm, base, changes, workdir=None):
    with trainer_of(algorithm, {"actor.path": base, **LORA, **changes}, workdir) as trainer:
        return [computed(row) for row in trainer.run()]


def close(found, expected, left_out=()):
    """Equal to rounding; what only some layouts have is left out."""
    for a, b in zip(found, expected, strict=True):
        for key in b:
            if key not in ("compile/count", *left_out) and b[key] is not None:
                assert a[key] == pytest.approx(b[key], rel=2e-4, abs=2e-5), key


def slow(*case):
    return pytest.param(*case, marks=pytest.mark.slow)


AHEAD = {
    "placement": "disaggregate",
    "rollout.max_staleness": 1,
    "rollout.deterministic": True,
}


def axes(role="actor", **sizes):
    train = {f"layout.{role}.train.{axis}": n for axis, n in ({"data": 1} | sizes).items()}
    return {"placement": "colocate", **train}


BOTH = {**axes(fsdp=2, tensor=4), **axes("critic", fsdp=4, pipe=2)}


def test_a_config_of_other_adapters_than_the_checkpoints_is_refused(base, tmp_path):
    rows_of("GRPO", base, {"steps": 1}, tmp_path)
    hjax.load_model(tmp_path)
    file = tmp_path / "config.json"
    written = json.loads(file.read_text())
    for change, message in (
        ({"rank": 2}, r"'\w+_a'\] is \(.*, 2\) by the config, and \(.*, 4\) here"),
        ({"targets": ["q"]}, r"is not there by the config, and \(.*\) here; give config.json the"),
    ):
        lora = written["actor"]["lora"] | change
        file.write_text(json.dumps(written | {"actor": written["actor"] | {"lora": lora}}))
        with pytest.raises(DataError, match=message):
            hjax.load_model(tmp_path)


def test_the_reference_is_the_actor_without_its_adapters(base):
    """A run whose reference is a copy of the base of its own has the same rows."""
    changes = {"steps": 3, "algorithm.kl_coef": 0.1}
    with trainer_of("GRPO", {"actor.path": base, **LORA, **changes}) as trainer:
        served = [computed(row) for row in trainer.run()]
        assert "reference" not in trainer.roles.groups and "reference" not in trainer.roles.layouts
    apart = rows_of("GRPO", base, {**changes, "reference.path": base})
    close(served, apart)
    assert served[-1]["kl/reference"] != 0


def test_only_adapters_change_and_a_checkpoint_has_them_alone(base, tmp_path):
    changes = {"actor.path": base, **LORA, **CRITIC, "checkpoint.every": 1, "steps": 2}
    with trainer_of("PPO", changes, tmp_path) as trainer:
        trainer.run()
        actor, critic = (trainer.roles.groups[role].worker for role in ("actor", "critic"))
        _, before = hjax.models.weights.load_decoder(base)
        after = actor.network.without_adapters_of(actor.params)
        jax.tree.map(np.testing.assert_array_equal, after, before)
        inner = critic.network.without_adapters_of(critic.params)["decoder"]
        jax.tree.map(np.testing.assert_array_equal, inner, before)
        assert float(np.abs(critic.params["head"]).max()) > 0
        learned = parameter_counts.learned_parameters(actor.network.config)
        state = jax.tree.leaves(actor.optimizer_state)
        assert sum(x.size for x in state if x.ndim) == 2 * learned
    folder = tmp_path / "checkpoints" / "2"
    assert {p.name for p in folder.iterdir()} == {
        "actor.params", "actor.optimizer", "critic.params", "critic.optimizer", "controller.json",
        "checksums.json",
    }  # fmt: skip


def test_what_a_run_learned_goes_out_and_in_again(base, tmp_path, capsys):
    changes = {"actor.path": base, **LORA, "checkpoint.every": 1, "steps": 2}
    with trainer_of("GRPO", changes, tmp_path / "run") as trainer:
        trainer.run()
        trainer.export(tmp_path / "merged")
        trainer.export(tmp_path / "adapter", adapter=True)
    flags = [f"--model={tmp_path}/run", f"--output={tmp_path}/again", "--adapter", "--json"]
    assert export(flags) == 0
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    ours, again = (load_file(tmp_path / x / WEIGHTS) for x in ("adapter", "again"))
    assert said["parameters"] == sum(x.size for x in ours.values())
    for name, tensor in ours.items():
        np.testing.assert_array_equal(again[name], tensor)
    tokens = np.arange(3, 12)[None]
    found = {
        name: np.asarray(hjax.load_model(tmp_path / name).logits(tokens))
        for name in ("run", "merged", "adapter", "again")
    }
    for logits in found.values():
        np.testing.assert_allclose(logits, found["run"], atol=1e-5)
    changed = np.abs(found["run"] - hjax.load_model(base).logits(tokens)).max()
    assert changed > 1e-3
    # Training goes on from PEFT's directory: its adapters learn, its base is frozen, and the
    # reference is the policy as it starts, adapters included.
    with trainer_of("GRPO", changes | {"actor.path": f"{tmp_path}/adapter"}) as trainer:
        trainer.prepare()
        actor = trainer.roles.groups["actor"].worker
        jax.tree.map(
            np.testing.assert_array_equal, actor.network.without_adapters_of(actor.params),
            hjax.models.weights.load_decoder(base)[1],
        )  # fmt: skip
        np.testing.assert_array_equal(
            np.asarray(actor.params["layers"]["q_a"])[0].T,
            ours["base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"],
        )
        row = trainer.step()
        assert np.isfinite(row["actor/loss"]) and abs(row["kl/reference"]) < 1e-5


def test_of_a_run_from_scratch_the_base_goes_out_as_well(tmp_path):
    changes = {**LORA, "warm_start.steps": 2, "checkpoint.every": 1, "steps": 1}
    with trainer_of("GRPO", changes, tmp_path / "run") as trainer:
        trainer.run()
        trainer.export(tmp_path / "adapter", adapter=True)
    assert (tmp_path / "run" / "checkpoints" / "1" / "actor.base").is_dir()
    assert (tmp_path / "adapter" / "base" / "tokenizer.json").is_file()
    tokens = np.arange(3, 12)[None]
    expected = hjax.load_model(tmp_path / "run").logits(tokens)
    np.testing.assert_allclose(
        hjax.load_model(tmp_path / "adapter").logits(tokens), expected, atol=1e-5
    )


def test_a_dry_run_counts_what_learns(base):
    with trainer_of("PPO", {"actor.path": base, **LORA}) as trainer:
        found = describe(trainer)
    programs = {(row["role"], row["program"]) for row in found["memory"]}
    assert ("actor", "compute_ref_log_prob") in programs and (
        "actor",
        "transition_merge",
    ) in programs
    assert not any(role == "reference" for role, _ in programs)
    model = hjax.models.weights.read_config(base)
    assert (
        found["parameters"]["actor"] - parameter_counts.parameter_count(model)
        == found["learned"]["actor"]
    )
    assert found["learned"]["critic"] == found["parameters"]["critic"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"actor.lora.targets": ("query",)}, "lora.targets=query: all, or some of q, k, v"),
        ({"actor.lora.rank": -1}, "actor.lora.rank=-1"),
        ({"actor.lora.alpha": 0.0}, "actor.lora.alpha=0.0"),
    ],
)
def test_what_cannot_be_is_said_before_anything_runs(changes, said):
    with pytest.raises(ConfigError) as error:
        hjax.Trainer(tiny_config("GRPO", {**LORA, **changes}))
    assert said in str(error.value)


def test_without_adapters_none_are_exported(tmp_path, capsys):
    with trainer_of("GRPO", {"steps": 1}, tmp_path / "run") as trainer:
        with pytest.raises(ConfigError, match="this run trains all weights; set actor.lora.rank"):
            trainer.export(tmp_path / "out", adapter=True)
        trainer.run()
    assert export([f"--model={tmp_path}/run", f"--output={tmp_path}/out", "--adapter"]) == 2
    assert "trains all weights (actor.lora.rank=0)" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_with_full_ranks_they_learn_what_all_weights_do(tmp_path):
    """Supervised, on another length than the base knows: 4.08 nats a token before."""
    sizes = {"data.task_options.length": 5, "rollout.max_response_length": 6, "model.layers": 2}
    schooled = {"warm_start.steps": 400, "warm_start.batch": 64, "warm_start.learning_rate": 3e-3}
    with trainer_of("GRPO", {**sizes, **schooled, "model.max_length": 32}) as trainer:
        trainer.export(tmp_path / "base")
    other = {"data.task_options.length": 4, "rollout.max_response_length": 5}

    def losses(**changes):
        keys = {**other, "actor.path": f"{tmp_path}/base", "steps": 200, "warm_start.batch": 32}
        keys |= {"actor.learning_rate": 3e-3, "actor.schedule": "cosine"}
        with trainer_of("SFT", {**keys, **changes}) as trainer:
            rows = [row["actor/loss"] for row in trainer.run()]
        return rows[0], np.mean(rows[-20:])

    before, whole = losses()
    same, full = losses(**{"actor.lora.rank": 32, "actor.lora.alpha": 32.0})
    narrow = {"actor.lora.rank": 1, "actor.lora.alpha": 1.0, "actor.lora.targets": ("q",)}
    _, little = losses(**narrow)
    assert before == pytest.approx(same) and before > 3
    assert whole < 0.01 and full < whole + 0.005
    assert little > 1


def test_an_update_makes_no_gradient_of_what_is_frozen():
    """By the compiler: two thirds of the products of an update of all weights, and a bit."""

    def flops(**changes):
        # Enough rows that what Adam takes of every weight does not count.
        wide = {"model.hidden_size": 128, "model.mlp_size": 512, "rollout.prompts": 256}
        with trainer_of("GRPO", {**wide, "model.unroll_layers": True, **changes}) as trainer:
            rehearsal = abstract_workers(trainer.roles, trainer.backend.devices)
            of = trainer.config, trainer.algorithm_class, rehearsal, trainer.inputs.prompt_length
            [update] = [p for p in step_programs(*of)[0] if p.name == "update"]
            return update.program.trace().lower().cost_analysis()["flops"]

    assert 0.62 < flops(**{"actor.lora.rank": 1}) / flops() < 0.72
