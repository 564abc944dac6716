"""Networks of a user's own in a run without a language model."""

import json
import pathlib
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import own_networks
import pytest

import hjax
from hjax.errors import ConfigError, RunError
from hjax.settings.config_checks import set_key
from hjax.sharding.layout import make_layouts
from hjax.workers import OptimizerConfig, WorkerContext

HERE = pathlib.Path(__file__).parent
OWN = f"{HERE / 'own_networks.py'}"


def config(name, **values):
    made = hjax.default_config()
    made.unlock()
    made.algorithm.name = f"{OWN}:{name}"
    made.eval.every = made.checkpoint.every = 0
    made.display.tensorboard = made.display.report = False
    made.steps = 4
    for key, value in values.items():
        set_key(made, key.replace("__", "."), value)
    return made


def worker(cls, devices=1, sizes=None, trained=True, **context):
    optimizer = OptimizerConfig(0.1, max_grad_norm=0.0, **context.pop("optimizer", {}))
    layouts = make_layouts(jax.devices()[:devices], sizes or {"data": -1})
    made = cls(
        WorkerContext(
            role="policy",
            layouts=layouts,
            seed=5,
            optimizer=optimizer if trained else None,
            **context,
        )
    )
    made.initialize()
    return made


def placed(made, batch):
    """As the controller distributes a batch."""
    return type(made).update.protocol.distribute(batch, made.layouts)


def test_updates_are_those_of_a_loop_by_hand():
    made = worker(own_networks.Line)
    params = jax.tree.map(jnp.copy, made.params)
    optimizer = optax.adam(0.1, b1=0.9, b2=0.999)
    state = optimizer.init(params)

    def loss(params, batch):
        wrong = batch["x"] @ params["w"] + params["b"] - batch["y"]
        return jnp.mean(jnp.sum(wrong**2, axis=1))

    for number in range(3):
        batch = own_networks.data(1, number)
        metrics = made.update(placed(made, batch))
        value, gradient = jax.value_and_grad(loss)(params, batch)
        updates, state = optimizer.update(gradient, state)
        params = optax.apply_updates(params, updates)
        assert float(metrics["loss"]) == pytest.approx(float(value), rel=1e-5)
        assert float(metrics["size"]) == pytest.approx(np.abs(batch["y"]).sum(axis=1).mean())
    for name in params:
        np.testing.assert_allclose(made.params[name], params[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "devices, sizes, micro_batch",
    [(8, {"data": 8}, 0), (4, {"data": 2, "fsdp": 2}, 0), (1, None, 4), (2, {"data": 2}, 4)],
)
@pytest.mark.parametrize("cls", [own_networks.Line, own_networks.Module, own_networks.Noisy])
def test_layouts_and_micro_batches_change_nothing(cls, devices, sizes, micro_batch):
    alone, split = worker(cls), worker(cls, devices, sizes, micro_batch=micro_batch)
    for number in range(2):
        batch = own_networks.data(2, number)
        batch["row_mask"] = np.arange(16) % 5 > 0  # some rows do not count
        if cls is own_networks.Line:
            batch["poison"] = np.where(batch["row_mask"], 0, np.nan).astype(np.float32)
        losses = [float(w.update(placed(w, batch))["loss"]) for w in (alone, split)]
        assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    for one, other in zip(
        jax.tree.leaves(alone.params), jax.tree.leaves(split.params), strict=True
    ):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def test_axes_split_parameters_and_their_moments():
    made = worker(own_networks.Line, 4, {"fsdp": 4})
    assert made.params["w"].addressable_shards[0].data.shape == (1, 2)
    assert made.params["b"].addressable_shards[0].data.shape == (2,)
    moments = [x for x in jax.tree.leaves(made.optimizer_state) if x.shape == (4, 2)]
    assert [x.addressable_shards[0].data.shape for x in moments] == [(1, 2)] * 2


def test_an_update_that_is_not_finite_changes_nothing():
    made = worker(own_networks.Line)
    before = jax.tree.map(np.array, made.params)
    poison = np.zeros(16, np.float32)
    poison[3] = np.inf
    metrics = made.update(placed(made, own_networks.data(0, 0) | {"poison": poison}))
    assert int(metrics["skipped"]) == 1
    jax.tree.map(np.testing.assert_array_equal, before, jax.tree.map(np.array, made.params))
    assert int(made.update(placed(made, own_networks.data(0, 0)))["skipped"]) == 0


def test_vectors_have_no_weight_decay():
    made = worker(own_networks.Line, optimizer={"weight_decay": 0.5})
    assert made.network.declared["w"].kind.decayed and not made.network.declared["b"].kind.decayed


def test_a_module_is_bound_with_the_parameters_of_now():
    made = worker(own_networks.Module)
    x = own_networks.data(0, 0)["x"]
    kernel, bias = (made.params["layers"]["0"][name] for name in ("kernel", "bias"))
    hidden = x @ kernel + bias
    last = made.params["layers"]["1"]
    np.testing.assert_allclose(made.model(x), hidden @ last["kernel"] + last["bias"], rtol=1e-5)


@pytest.mark.parametrize(
    "init, message",
    [
        (lambda self, key: [jnp.zeros(2)], "returned list"),
        (lambda self, key: {}, "returned dict"),
    ],
)
def test_what_init_may_return(init, message):
    with pytest.raises(ConfigError, match=message):
        worker(type("Wrong", (own_networks.Line,), {"init": init, "axes": lambda self: {}}))


@pytest.mark.parametrize(
    "axes, message",
    [
        ({"v": ("mlp",)}, r"no parameter \['v'\]"),
        ({"w": ("mlp",)}, "has 2 dimensions"),
        ({"w": ("width", None)}, "unknown logical axis 'width'"),
    ],
)
def test_what_axes_may_name(axes, message):
    with pytest.raises(ConfigError, match=message):
        worker(type("Wrong", (own_networks.Line,), {"axes": lambda self: axes}))


def test_what_a_network_cannot_be_laid_out_by():
    with pytest.raises(
        ConfigError, match="embed of .'w'. has size 4, which does not divide over 8"
    ):
        worker(own_networks.Line, 8, {"fsdp": 8})
    with pytest.raises(ConfigError, match="pipe=2: a network of your own has no layers to split"):
        worker(own_networks.Line, 2, {"pipe": 2})


def test_a_loss_gives_a_number_per_row():
    def loss(self, model, batch, keys):
        return jnp.mean(self.predict(model, batch["x"]))

    made = worker(type("Mean", (own_networks.Line,), {"loss": loss}))
    with pytest.raises(ConfigError, match=r"Mean.loss: loss has shape \(\); a number per row"):
        made.update(placed(made, own_networks.data(0, 0)))


def test_only_trained_roles_are_updated():
    made = worker(own_networks.Line, trained=False)
    assert list(made.state()) == ["params"]
    with pytest.raises(ConfigError, match="say trained=True in its Role"):
        made.update(placed(made, own_networks.data(0, 0)))
    with pytest.raises(ConfigError, match="no method 'predicts'"):
        made.run("predicts", np.ones((2, 4)))


def test_a_run_has_no_language_model(tmp_path):
    with hjax_trainer(config("Fit", eval__every=2), tmp_path / "run") as trainer:
        rows = trainer.run()
        assert trainer.inputs.tokenizer is trainer.inputs.model is None
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert rows[0]["eval/moved"] == 0.0 < rows[1]["eval/moved"] < rows[3]["eval/moved"]
    assert {"policy/loss", "policy/grad_norm", "policy/size"} <= rows[0].keys()
    files = {path.name for path in (tmp_path / "run").iterdir()}
    assert "model" not in files and {"config.json", "metrics.jsonl", "checkpoints"} <= files
    loaded = hjax.load_worker(tmp_path / "run", "policy")
    batch = own_networks.data(0, 9)["x"]
    np.testing.assert_allclose(
        loaded.run("predict", batch), batch @ loaded.model["w"] + loaded.model["b"], rtol=1e-5
    )
    with pytest.raises(ConfigError, match="no network of this run; it has policy, copy"):
        hjax.load_worker(tmp_path / "run", "actor")


def test_the_network_of_the_page_takes_forty_lines(tmp_path, monkeypatch):
    page = HERE.parent / "docs" / "any_network.md"
    for block in re.findall(r"^```python\n(.*?)^```", page.read_text(), re.M | re.S):
        (tmp_path / re.match(r"# (\w+\.py)\n", block)[1]).write_text(block)
    lines = (tmp_path / "circle.py").read_text().splitlines()[1:]
    assert len([line for line in lines if line.strip()]) < 40
    monkeypatch.chdir(tmp_path)
    with hjax_trainer(hjax.get_config("circle_config.py")) as trainer:
        rows = trainer.run(140)
    assert rows[0]["actor/accuracy"] < 0.7 < 0.85 < rows[-1]["actor/accuracy"]


class hjax_trainer:
    """A trainer that is closed at the end."""

    def __init__(self, *arguments, **options):
        self.trainer = hjax.Trainer(*arguments, **options)

    def __enter__(self):
        return self.trainer

    def __exit__(self, *_):
        self.trainer.close()


def compared(row):
    machine = ("time/", "throughput/", "memory/", "compile/")
    return {key: value for key, value in row.items() if not key.startswith(machine)}


@pytest.mark.parametrize("placement", ["standalone", "split"])
def test_placements_have_equal_metrics(placement):
    rows = {}
    for name in ("colocate", placement):
        with hjax_trainer(config("Fit", placement=name, eval__every=1)) as trainer:
            rows[name] = [compared(row) for row in trainer.run(2)]
    for one, other in zip(rows["colocate"], rows[placement], strict=True):
        assert one == pytest.approx(other, rel=1e-5)


def test_a_module_is_trained_under_a_standing_name():
    with hjax_trainer(config("FitModule")) as trainer:
        rows = trainer.run()
    assert rows[-1]["actor/loss"] < rows[0]["actor/loss"]


def test_two_actors_draw_noise_of_their_own():
    with hjax_trainer(config("Duel")) as trainer:
        seen = []
        for _ in range(3):
            row = trainer.step()
            seen.append((trainer.batch["left"], trainer.batch["right"]))
    assert {"left/loss", "right/loss", "reward/mean"} <= row.keys()
    draws = [tuple(x) for pair in seen for x in pair]
    assert len(set(draws)) == 6  # by role and by step


def test_turns_of_a_step_draw_noise_of_their_own():
    made = worker(own_networks.Coin)
    seen = {"observations": np.ones((64, 1), np.float32)}
    draws = [
        tuple(np.asarray(made.generate_actions(seen | turn)["actions"]))
        for turn in ({"step": 1}, {"step": 1, "turn": 1}, {"step": 2}, {"step": 1, "turn": 0})
    ]
    assert draws[0] == draws[3] and len(set(draws)) == 3
    found = made.generate_actions(seen | {"step": 1})
    np.testing.assert_allclose(found["logprobs"], np.log(0.5), rtol=1e-6)


@pytest.mark.parametrize(
    "key, value", [("data.path", "prompts.jsonl"), ("rollout.prompts", 7), ("actor.lora.rank", 4)]
)
def test_settings_of_sequences_are_refused(key, value):
    made = config("Fit")
    set_key(made, key, value)
    with pytest.raises(ConfigError, match=f"{key}=.*not from sequences of tokens"):
        hjax.Trainer(made)


def test_schedules_need_to_know_the_updates():
    with pytest.raises(ConfigError, match="Fit does not say how many"):
        hjax.Trainer(config("Fit", actor__schedule="cosine"))


def test_prompts_without_an_actor_are_refused():
    made = hjax.default_config()
    made.algorithm.name = f"{OWN}:NoActor"
    with pytest.raises(ConfigError, match="the roles policy, and no actor"):
        hjax.Trainer(made)


def test_minibatches_of_arrays_without_a_length():
    with hjax_trainer(config("Fit")) as trainer:
        (batch,) = trainer.algorithm.minibatches({"x": np.ones((6, 2)), "scalar": np.float32(1)})
        assert batch["x"].shape == (6, 2)
        with pytest.raises(RunError, match="no array with rows"):
            list(trainer.algorithm.minibatches({"scalar": np.float32(1)}))


def test_a_run_goes_on_bit_for_bit(tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    with hjax_trainer(config("Fit", steps=6), whole) as trainer:
        trainer.run()
    for steps in (3, 6):
        with hjax_trainer(config("Fit", steps=steps), parts) as trainer:
            trainer.run()
    rows = [
        [compared(json.loads(line)) for line in (run / "metrics.jsonl").read_text().splitlines()]
        for run in (whole, parts)
    ]
    assert rows[0] == rows[1] and len(rows[0]) == 6


def test_another_run_starts_from_a_path(tmp_path):
    with hjax_trainer(config("FitModule"), tmp_path / "first") as trainer:
        trainer.run()
        learned = jax.tree.map(np.array, trainer.roles.groups["actor"].worker.params)
    again = config("FitModule", actor__path=str(tmp_path / "first"))
    with hjax_trainer(again) as trainer:
        trainer.prepare()
        found = jax.tree.map(np.array, trainer.roles.groups["actor"].worker.params)
    jax.tree.map(np.testing.assert_array_equal, learned, found)
    with pytest.raises(ConfigError, match="no policy was saved; there is actor"):
        hjax.Trainer(config("Fit", actor__path=str(tmp_path / "first"))).prepare()


def test_a_dry_run_counts_networks():
    from hjax.dryrun.description import describe

    with hjax_trainer(config("Fit")) as trainer:
        found = describe(trainer)
    assert found["parameters"] == {"policy": 10, "copy": 10}
    assert found["learned"] == {"policy": 10, "copy": 0}
    assert found["memory"] == [] and "first_examples" not in found
    assert found["resident_bytes"]["copy"] == 40


def test_nothing_of_tokens_is_imported(tmp_path):
    code = (
        "import hjax, sys\n"
        "config = hjax.default_config()\n"
        f"config.algorithm.name = {OWN + ':FitModule'!r}\n"
        "trainer = hjax.Trainer(config); trainer.step(); trainer.close()\n"
        "assert 'tokenizers' not in sys.modules and 'transformers' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path, timeout=120)
