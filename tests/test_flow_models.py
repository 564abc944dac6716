"""Flow models: marginals of their steps, ratios, the variance law, Flow-GRPO and OP-GRPO."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hjax
from hjax.algorithms.flow_matching import PathLoss
from hjax.controller import join
from hjax.environments.flow_problems import GaussianRing, GaussianRingPairs, Glyphs
from hjax.errors import ConfigError, RunError
from hjax.models.flow_steps import check_sigmas, deviations, flow_steps, sigma_grid
from hjax.settings.keys import default_config

CENTERS = GaussianRing().centers().astype(np.float32)


def exact_velocity(x, sigma, deviation=0.15):
    """E[noise - x0 | x_sigma] of a mixture of Gaussians around ``CENTERS``, in closed form."""
    kept = (1 - sigma) ** 2 * deviation**2
    variance = kept + sigma**2
    apart = x[:, None] - (1 - sigma) * CENTERS
    share = jax.nn.softmax(-0.5 * (apart**2).sum(-1) / variance, axis=1)
    data = CENTERS + ((1 - sigma) * deviation**2 / variance) * apart
    noise = sigma / variance * apart
    return (share[..., None] * (noise - data)).sum(axis=1)


def sampled(steps, noise, rows=20000, drift=1.0, root=True):
    """Samples by the exact velocity; ``drift`` and ``root`` break the formula."""
    grid = flow_steps(sigma_grid(steps), noise)
    x = jax.random.normal(jax.random.key(0), (rows, 2))
    for number in range(steps):
        step = jax.tree.map(lambda v, n=number: v[n], grid)
        x = _advance(x, step, jax.random.key(number + 1), drift, root)
    return np.asarray(x)


@jax.jit
def _advance(x, step, key, drift, root):
    broken = step._replace(deviation=step.deviation * jnp.sqrt(drift))
    mean = broken.mean(x, exact_velocity(x, step.sigma))
    spread = jnp.where(root, step.spread, step.deviation * -step.change)
    return mean + spread * jax.random.normal(key, x.shape)


def variance_around_modes(samples):
    """Sum over dimensions of the mean squared distance to the nearest mode."""
    far = ((samples[:, None] - np.asarray(CENTERS)) ** 2).sum(axis=2)
    return far.min(axis=1).mean()


def test_steps_with_and_without_noise_share_their_marginals():
    truth = 2 * 0.15**2
    for noise, error in ((0.0, 0.05), (0.7, 0.02)):  # Euler's steps of the ODE narrow the modes
        found = sampled(40, noise)
        assert variance_around_modes(found) == pytest.approx(truth, rel=error)
        mode = ((found[:, None] - np.asarray(CENTERS)) ** 2).sum(axis=2).argmin(axis=1)
        assert np.abs(np.bincount(mode, minlength=16) / len(mode) - 1 / 16).max() < 0.01
    # What the test is there to find: the drift that belongs to the noise, and the root of the time.
    assert variance_around_modes(sampled(40, 0.7, drift=0.0)) > 1.5 * truth
    assert variance_around_modes(sampled(40, 0.7, root=False)) < 0.97 * truth


def test_step_means_by_hand():
    grid = flow_steps(np.array([1.0, 0.75, 0.25, 0.0], np.float32), 0.7)
    # s at sigma = 1 has the second level in its denominator: .7 sqrt(1 / .25).
    np.testing.assert_allclose(grid.deviation, [1.4, 0.7 * 3**0.5, 0.7 * 3**-0.5], rtol=1e-6)
    step = jax.tree.map(lambda x: x[1], grid)
    s2, dt = 0.49 * 3, -0.5
    expected = 2.0 * (1 + s2 / 1.5 * dt) + 3.0 * (1 + s2 * 0.25 / 1.5) * dt
    assert float(step.mean(jnp.float32(2), jnp.float32(3))) == pytest.approx(expected, rel=1e-5)
    spread = (s2 * 0.5) ** 0.5
    density = -0.5 * (0.4 / spread) ** 2 - np.log(spread) - 0.5 * np.log(2 * np.pi)
    after, mean = jnp.full((1, 3), 0.4), jnp.zeros((1, 3))
    assert float(step.log_density(after, mean)[0]) == pytest.approx(density, rel=1e-5)


@pytest.mark.parametrize("sigma", [0.9, 0.5, 0.1])
def test_the_variance_of_log_ratios_follows_the_law(sigma):
    """A change dv of the velocity gives each dimension's log-ratio the variance
    (1 + a^2 / 2)^2 |dt| dv^2 (1 - sigma) / (a^2 sigma)."""
    a, dt, dv, rows = 0.7, -0.05, 1e-2, 400000
    sigmas = np.array([sigma, sigma + dt], np.float32)
    step = jax.tree.map(lambda x: x[0], flow_steps(np.append(sigmas, 0.0)[:3], a))
    x, v = jax.random.normal(jax.random.key(0), (2, rows, 1))
    before = step.mean(x, v)
    after = before + step.spread * jax.random.normal(jax.random.key(1), x.shape)
    ratio = step.log_density(after, step.mean(x, v + dv)) - step.log_density(after, before)
    law = (1 + a**2 / 2) ** 2 * -dt * dv**2 * (1 - sigma) / (a**2 * sigma)
    assert float(jnp.var(ratio)) == pytest.approx(law, rel=0.01)


@pytest.mark.parametrize("sigmas", [[1.2, 0.5, 0], [1, 0.5, 0.5, 0], [0.5, 0, -0.5], [0, 1]])
def test_noise_levels_fall_from_one_to_zero(sigmas):
    with pytest.raises(ConfigError, match="they fall from at most 1 to 0"):
        check_sigmas(np.array(sigmas))


def test_steps_without_noise_have_no_ratios():
    with pytest.raises(ConfigError, match="noise=0: steps without noise have no log-probability"):
        deviations(sigma_grid(10), 0.0)


def config(algorithm, **values):
    small = {"algorithm.hidden_size": 16, "algorithm.hidden_layers": 2, "steps": 3}
    small |= {"algorithm.eval_samples": 16, "eval.every": 0, "checkpoint.every": 0}
    if algorithm != "FlowMatching":
        small |= {"algorithm.groups": 8, "algorithm.group": 4, "algorithm.minibatch": 16}
        small |= {"algorithm.clip": 0.1, "actor.learning_rate": 3e-3}
    made = default_config()
    made.unlock()
    from hjax.settings.config_checks import set_key

    for key, value in ({"algorithm.name": algorithm} | small | values).items():
        set_key(made, key, value)
    return made


def trained(made, workdir=None):
    trainer = hjax.Trainer(made, workdir)
    try:
        return trainer, trainer.run()
    finally:
        trainer.close()


def rows_of(workdir):
    machine = ("time/", "throughput/", "memory/", "compile/")
    rows = map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())
    return [{k: v for k, v in row.items() if not k.startswith(machine)} for row in rows]


def test_ratios_are_one_before_the_first_update():
    trainer = hjax.Trainer(config("FlowGRPO"))
    try:
        trainer.prepare()
        algorithm = trainer.algorithm
        batch = algorithm.compute_advantages(algorithm.collect({"step": 1}))
        actor = trainer.roles.groups["actor"].worker
        own = trainer.config.algorithm
        again = join(
            x=algorithm.actor.score_paths("path_logprobs", batch, own.sample_steps, own.noise)
        )
        # The sampler and the update compute the same density, with other shapes of products.
        np.testing.assert_allclose(np.exp(again["x"] - batch["logprobs"]), 1.0, atol=2e-5)
        loss = PathLoss(own.sample_steps, own.noise, own.clip, 0.0)
        exact = batch | {"logprobs": np.asarray(again["x"])}
        arrays = {key: jnp.asarray(exact[key]) for key in loss.needs}
        losses, stats = loss(actor, actor.model, arrays, None)
        assert float(jnp.max(stats["ratio_error"])) < 2e-5
        np.testing.assert_allclose(losses, -batch["advantages"], atol=1e-4)
    finally:
        trainer.close()


def test_the_last_step_is_not_trained_and_kl_begins_at_zero():
    trainer, rows = trained(config("FlowGRPO", steps=1, **{"algorithm.minibatch": 0}))
    assert trainer.batch["step_mask"].sum(axis=1).tolist() == [9] * 32
    assert rows[0]["actor/kl"] == pytest.approx(0, abs=1e-8)
    assert rows[0]["flow/evaluations"] == 320


def test_advantages_by_hand():
    made = {"algorithm.groups": 2, "algorithm.group": 2, "algorithm.minibatch": 0}
    trainer = hjax.Trainer(config("FlowGRPO", **made, **{"algorithm.normalise": "batch"}))
    trainer.close()
    rewards = np.array([1.0, 0.0, np.nan, 1.0], np.float32)
    found = trainer.algorithm.compute_advantages({"rewards": rewards})
    scale = np.std([1.0, 0.0, 1.0]) + 1e-4
    np.testing.assert_allclose(found["advantages"], np.array([0.5, -0.5, 0, 0]) / scale, rtol=1e-6)
    assert found["row_mask"].tolist() == [True, True, False, True]


@pytest.mark.parametrize("placement", ["split", "standalone"])
def test_placements_sample_and_learn_alike(placement):
    rows = [trained(config("FlowGRPO", placement=p, steps=2))[1] for p in ("colocate", placement)]
    for one, other in zip(*rows, strict=True):
        for key in ("actor/loss", "actor/kl", "reward/mean", "actor/grad_norm"):
            assert one[key] == pytest.approx(other[key], rel=1e-3, abs=1e-5)


def op(**values):
    return config("OPGRPO", **{"algorithm.problem": f"{__file__}:Half", "steps": 4} | values)


class Half(GaussianRing):
    """Its reward is above a group's mean for some samples even of an untrained model."""

    def reward(self, samples, conditions):
        return (samples[:, 0] > 0).astype(np.float32) + 0.25 * (samples[:, 1] > 0)


@pytest.mark.extended
def test_op_grpo_replays_the_best_and_goes_on_bit_for_bit(tmp_path):
    trainer, rows = trained(op(), tmp_path / "whole")
    assert "flow/weight_mean" not in rows[0]
    assert [row["flow/replayed"] for row in rows] == [0.0, 0.25, 0.25, 0.25]
    batch = trainer.batch
    replayed = batch["replayed"]
    # Levels 1, .9, ... .3 are replayed: 7 of 10 steps; fresh rows train all but the last.
    assert set(batch["step_mask"][replayed].sum(axis=1)) == {7}
    assert set(batch["step_mask"][~replayed].sum(axis=1)) == {9}
    assert (batch["weights"][~replayed] == 1).all()
    assert ((batch["weights"] >= 0.2) & (batch["weights"] <= 5)).all()
    for steps in (2, 4):
        trained(op(steps=steps), tmp_path / "parts")
    assert rows_of(tmp_path / "whole") == rows_of(tmp_path / "parts")


def test_a_replayed_path_is_that_of_the_buffer_down_to_the_cut():
    trainer = hjax.Trainer(op())
    try:
        trainer.run(2)
        algorithm = trainer.algorithm
        stored = join(algorithm.buffer.look_up(algorithm.group_conditions(3), 3))
        assert stored["there"].all() and set(stored["rewards"]) == {1.25}
        batch = algorithm.collect({"step": 3})
        again = batch["latents"][batch["replayed"]]
        np.testing.assert_array_equal(again[:, :8], stored["latents"][:, :8])
        assert np.abs(again[:, 8:] - stored["latents"][:, 8:]).max() > 1e-3
        np.testing.assert_allclose(again[:, -1], batch["samples"][batch["replayed"]])
        early = {"latents": again[:, :8], "conditions": batch["conditions"][batch["replayed"]]}
        now = join(x=algorithm.actor.score_paths("path_logprobs", early, 10, 0.7))["x"]
        apart = (now - stored["logprobs"][:, :7]).sum(axis=1)
        found = batch["weights"][batch["replayed"]]
        np.testing.assert_allclose(found, np.clip(np.exp(apart), 0.2, 5), rtol=1e-4)
        assert np.ptp(found) > 0
        gone = join(algorithm.buffer.look_up(np.arange(4), 99))
        assert not gone["there"].any()
    finally:
        trainer.close()


@pytest.mark.parametrize(
    "switch, value",
    [("weighted", False), ("cut", 0.0), ("replayed", 2), ("tail", "kept")],
)
def test_ablations_run(switch, value):
    trainer, rows = trained(op(steps=2, **{f"algorithm.{switch}": value}))
    batch = trainer.batch
    assert np.isfinite(rows[-1]["actor/loss"])
    share = rows[-1]["flow/replayed"]
    assert share == 0.25 or switch == "replayed" and 0.25 < share <= 0.5
    if switch == "weighted":
        assert (batch["weights"] == 1).all()
    if switch == "cut":
        assert set(batch["step_mask"].sum(axis=1)) == {9}
    if switch == "tail":
        kept = batch["replayed"]
        np.testing.assert_array_equal(batch["samples"][kept], batch["latents"][kept][:, -1])
        assert (batch["rewards"][kept] > 0).all()


def test_a_buffer_keeps_the_best_of_each_condition():
    trainer = hjax.Trainer(op(**{"algorithm.replayed": 2, "algorithm.decay": 0.5}))
    trainer.close()
    from hjax.workers import BestPaths

    buffer = BestPaths(trainer.roles.builds["buffer"].arguments[0])

    def offer(rewards, now, condition=1):
        size = len(rewards)
        return buffer.offer(
            {"conditions": np.full(size, condition, np.int32), "latents": np.arange(size),
             "rewards": np.array(rewards), "versions": np.full(size, now, np.int32)},
            now, kind="grid",
        )  # fmt: skip

    assert offer([3.0, 1.0, 2.0], now=1) == 3  # two places; 2 takes that of 1
    assert sorted(buffer.look_up(np.array([1]), 1)["rewards"]) == [2, 3]
    assert offer([1.1], now=1) == 0 and offer([1.1], now=2) == 1  # 2 counts 1 by now
    assert sorted(buffer.look_up(np.array([1]), 2)["rewards"]) == [1.1, 3]
    assert not buffer.look_up(np.array([0]), 2)["there"].any()
    with pytest.raises(RunError, match="of grid, and these are of other"):
        buffer.offer({"conditions": np.zeros(1, np.int32)}, 3, kind="other")


@pytest.mark.parametrize(
    "values, message",
    [
        ({"noise": 0.0}, "noise=0.0: must be larger than 0"),
        ({"group": 2, "replayed": 2, "minibatch": 0}, "replayed=2 of a group of 2"),
        ({"cut": 0.99}, "no step of 10 ends at or above"),
        ({"minibatch": 7}, "minibatch=7 does not divide groups . group"),
        ({"problem": "rings"}, "problem='rings': there are ring, ring_pairs, glyphs"),
    ],
)
def test_bad_settings_are_refused(values, message):
    with pytest.raises(ConfigError, match=message):
        hjax.Trainer(config("OPGRPO", **{f"algorithm.{k}": v for k, v in values.items()}))


def test_problems_reward_what_they_say():
    ring, pairs, glyphs = GaussianRing(), GaussianRingPairs(), Glyphs()
    points = np.array([[2, 0], [0, 2], [-2, 0], [2.5, 0], [np.nan, 0]], np.float32)
    np.testing.assert_array_equal(
        ring.reward(points, np.array([0, 1, 0, 0, 0])), [1, 1, 0, 0, np.nan]
    )
    np.testing.assert_array_equal(pairs.reward(points[:3], np.array([0, 1, 0])), [1, 1, 1])
    assert pairs.measures(points[[0, 2]], np.array([0, 0]))["balance"] == pytest.approx(1)
    keys = jax.random.split(jax.random.key(0), 64)
    drawn = np.asarray(jax.vmap(glyphs.draw)(keys))
    kinds, errors = glyphs.nearest(drawn)
    assert set(kinds) == {0, 1, 2, 3} and errors.max() < 0.05
    assert glyphs.reward(drawn, kinds).all() and not glyphs.reward(drawn, (kinds + 1) % 4).any()
    drawn = np.asarray(jax.vmap(ring.draw)(keys))
    assert np.linalg.norm(drawn, axis=1).mean() == pytest.approx(2, rel=0.05)


def test_flow_matching_learns_the_mean_of_the_data():
    made = config("FlowMatching", steps=3, **{"actor.learning_rate": 3e-3, "eval.every": 3})
    _, rows = trained(made)
    # Of the ring: the velocity 0 has the loss of noise and data, 1 + 2 + .0144.
    assert rows[0]["actor/loss"] > rows[-1]["actor/loss"] and rows[-1]["actor/loss"] < 3.01
    assert 0 <= rows[-1]["eval/reward"] <= 1
