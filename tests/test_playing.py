"""Networks that play JAX environments: PPO and DQN, and the environments themselves."""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hjax
from hjax.controller import join
from hjax.environments.jax_environments import CartPole, Pendulum
from hjax.errors import ConfigError


@pytest.mark.parametrize("name, game", [("CartPole-v1", CartPole()), ("Pendulum-v1", Pendulum())])
def test_steps_are_those_of_gymnasium(name, game):
    gymnasium = pytest.importorskip("gymnasium")
    peer = gymnasium.make(name).unwrapped
    rng = np.random.default_rng(3)
    ended = 0
    for _ in range(20):
        peer.reset(seed=int(rng.integers(1 << 30)))
        motion = rng.uniform(-1, 1, 4) * [2.4, 4, 0.21, 4] if game.actions else peer.state
        peer.state = np.array(motion, np.float64)
        state = {"motion": jnp.asarray(motion, jnp.float32), "time": jnp.int32(0)}
        action = int(rng.integers(2)) if game.actions else rng.uniform(-1.3, 1.3, 1)
        given = action if game.actions else 2 * np.asarray(action)
        seen, reward, terminated, *_ = peer.step(given)
        after = game.step(state, jnp.asarray(action))
        np.testing.assert_allclose(game.observe(after.state), seen, rtol=1e-4, atol=1e-5)
        assert float(after.reward) == pytest.approx(float(reward), rel=1e-4, abs=1e-5)
        assert bool(after.terminated) == terminated and not bool(after.truncated)
        ended += terminated
    assert not game.actions or 0 < ended < 20


def test_a_limit_cuts_an_episode():
    game = CartPole(limit=3)
    state = game.reset(jax.random.key(0))
    cut = []
    for action in (0, 1, 0):
        after = game.step(state, jnp.int32(action))
        state = after.state
        cut.append((bool(after.terminated), bool(after.truncated)))
    assert cut == [(False, False), (False, False), (False, True)]


def ppo(**values):
    small = {"algorithm.environments": 8, "algorithm.play_steps": 16, "algorithm.minibatch": 64}
    small |= {"steps": 4, "eval.every": 0, "checkpoint.every": 0, "algorithm.eval_steps": 50}
    return hjax.get_config("ppo_cartpole.py", small | values)


def trained(config, workdir=None, steps=None):
    trainer = hjax.Trainer(config, workdir)
    try:
        rows = trainer.run(steps)
        return trainer, rows
    finally:
        trainer.close()


def compared(row):
    machine = ("time/", "throughput/", "memory/", "compile/")
    return {key: value for key, value in row.items() if not key.startswith(machine)}


def test_advantages_are_those_of_the_formula():
    trainer, _ = trained(ppo(steps=1), steps=0)
    algorithm = trainer.algorithm
    algorithm.config = algorithm.config.copy_and_resolve_references()
    algorithm.config.gamma, algorithm.config.gae_lambda = 0.5, 0.5
    batch = {
        "rewards": np.array([[1.0, 2.0, 4.0]]),
        "values": np.array([[2.0, 4.0, 8.0]]),
        "next_values": np.array([[4.0, 6.0, 10.0]]),
        "terminated": np.array([[False, False, True]]),
        "truncated": np.array([[False, True, False]]),
    }
    # errors: 1+2-2 = 1; 2+3-4 = 1 (cut: its value counts on, its advantage does not); 4-8 = -4
    made = algorithm.compute_advantages(batch)
    np.testing.assert_allclose(made["value_targets"], [3.25, 5.0, 4.0])
    raw = np.array([1.25, 1.0, -4.0])
    np.testing.assert_allclose(made["advantages"], (raw - raw.mean()) / raw.std(), rtol=1e-6)


def test_play_goes_on_where_it_was_and_counts_returns():
    trainer = hjax.Trainer(ppo())
    try:
        trainer.prepare()
        parts = [join(trainer.algorithm.actor.play(n, 16)) for n in (1, 2, 3)]
    finally:
        trainer.close()
    batch = {key: np.concatenate([p[key] for p in parts], axis=1) for key in parts[0]}
    for env in range(8):
        total = 0.0
        for t in range(48):
            total += batch["rewards"][env, t]
            done = batch["terminated"][env, t] or batch["truncated"][env, t]
            assert np.isnan(batch["returns"][env, t]) != done
            if done:
                assert batch["returns"][env, t] == total
                total = 0.0
            elif t < 47:
                seen = batch["next_observations"][env, t]
                np.testing.assert_array_equal(seen, batch["observations"][env, t + 1])
    assert (~np.isnan(batch["returns"])).sum() > 5


@pytest.mark.extended
def test_ppo_goes_on_bit_for_bit(tmp_path):
    trained(ppo(steps=3), tmp_path / "whole")
    trained(ppo(steps=2, **{"actor.schedule": "constant", "critic.schedule": "constant"}))
    for steps in (2, 3):
        constant = {f"{role}.schedule": "constant" for role in ("actor", "critic")}
        trained(ppo(steps=steps, **constant), tmp_path / "parts")
    trained(ppo(steps=3, **constant), tmp_path / "again")
    rows = [
        [
            compared(json.loads(x))
            for x in (tmp_path / run / "metrics.jsonl").read_text().splitlines()
        ]
        for run in ("parts", "again")
    ]
    assert rows[0] == rows[1] and len(rows[0]) == 3


def test_environments_divide_over_devices():
    with pytest.raises(
        ConfigError, match="environments=3 do not divide over 8 data-parallel parts"
    ):
        hjax.Trainer(ppo(**{"algorithm.environments": 3, "algorithm.minibatch": 0}))


def test_unknown_environments_are_refused():
    with pytest.raises(ConfigError, match="environment='cartpol': there are cartpole, pendulum"):
        hjax.Trainer(ppo(**{"algorithm.environment": "cartpol"}))


def test_ppo_moves_a_pendulum_too():
    _, rows = trained(ppo(steps=2, **{"algorithm.environment": "pendulum"}))
    assert all(np.isfinite(row["actor/loss"]) for row in rows)
    assert rows[0]["actor/entropy"] == pytest.approx(0.5 * np.log(2 * np.pi * np.e), rel=1e-2)


def dqn(**values):
    small = {"algorithm.environments": 8, "algorithm.rounds": 4, "algorithm.replay_batch": 16}
    small |= {"algorithm.warm_up_rounds": 2, "algorithm.target_every": 3, "steps": 3}
    small |= {"algorithm.hidden_size": 16, "algorithm.replay_capacity": 100}
    small |= {"eval.every": 0, "checkpoint.every": 0, "actor.schedule": "constant"}
    return hjax.get_config("dqn_cartpole.py", small | values)


def params_of(trainer, role="actor"):
    return jax.tree.map(np.array, trainer.roles.groups[role].worker.params)


def test_dqn_by_operators_is_dqn_by_a_loop():
    trainer = hjax.Trainer(dqn())
    try:
        trainer.run()
        by_operators = params_of(trainer)
    finally:
        trainer.close()

    config = dqn()
    own = config.algorithm
    trainer = hjax.Trainer(config)
    try:
        trainer.prepare()
        actor, target = (trainer.roles.groups[role] for role in ("actor", "target"))
        places: list[dict] = []  # the buffer as a list of rows, written in a circle
        stored = draws = trains = 0
        for number in range(own.rounds * config.steps):
            fallen = min(max(number - own.warm_up_rounds, 0) / own.epsilon_rounds, 1.0)
            epsilon = 1.0 - (1.0 - own.epsilon) * fallen
            played = join(actor.play(number, own.play_steps, epsilon=epsilon))
            for env in range(own.environments):
                for t in range(own.play_steps):
                    row = {key: x[env, t] for key, x in played.items()}
                    if stored < own.replay_capacity:
                        places.append(row)
                    else:
                        places[stored % own.replay_capacity] = row
                    stored += 1
            if number < own.warm_up_rounds:
                continue
            for _ in range(own.updates):
                rng = np.random.default_rng([config.seed, 0, draws])
                chosen = [places[i] for i in rng.integers(len(places), size=own.replay_batch)]
                draws += 1
                batch = {key: np.stack([row[key] for row in chosen]) for key in chosen[0]}
                after = join(x=target.run("action_values", batch["next_observations"]))["x"]
                live = np.float32(1) - batch["terminated"]
                batch["targets"] = batch["rewards"] + np.float32(own.gamma) * live * after.max(
                    axis=1
                )
                actor.update(batch).result()
            trains += 1
            if trains % own.target_every == 0:
                target.interpolate_weights(actor.weights(), own.target_share).result()
        by_hand = params_of(trainer)
    finally:
        trainer.close()
    assert stored > own.replay_capacity
    jax.tree.map(np.testing.assert_array_equal, by_operators, by_hand)


@pytest.mark.extended
def test_dqn_goes_on_bit_for_bit_with_its_buffer(tmp_path):
    trained(dqn(), tmp_path / "whole")
    for steps in (1, 3):
        trained(dqn(steps=steps), tmp_path / "parts")
    rows = [
        [
            compared(json.loads(x))
            for x in (tmp_path / run / "metrics.jsonl").read_text().splitlines()
        ]
        for run in ("whole", "parts")
    ]
    assert rows[0] == rows[1] and len(rows[0]) == 3
    assert pathlib.Path(tmp_path / "parts/checkpoints/3/buffer.buffer").is_dir()


def test_dqn_acts_at_random_at_first():
    trainer, _ = trained(dqn(), steps=1)
    actor = trainer.roles.groups["actor"].worker
    observation = jnp.zeros(4)
    keys = jax.random.split(jax.random.key(0), 400)
    drawn = [
        jax.vmap(lambda key, e=e: actor.act(actor.model, observation, key, e))(keys)
        for e in (1.0, 0.0)
    ]
    assert abs(float(drawn[0].mean()) - 0.5) < 0.1
    assert set(np.asarray(drawn[1])) == {int(actor.act_greedily(actor.model, observation))}


@pytest.mark.slow
@pytest.mark.parametrize("seed", [7])
def test_ppo_learns_cartpole(seed):
    trainer, rows = trained(hjax.get_config("ppo_cartpole.py", {"seed": seed}))
    assert (
        292 * trainer.algorithm.describe_step(trainer.config.algorithm)["environment_steps"] < 3e5
    )
    assert rows[-1]["eval/reward"] >= 475
