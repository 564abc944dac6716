"""A reference that follows the policy: every so many steps, or as a moving average."""

import pathlib

import jax
import numpy as np
import pytest
from helpers import ONE_DEVICE, computed, read_rows, tiny_config, trainer_of

from hjax.errors import ConfigError
from hjax.models.checkpoint import restore_params

EVENS = f"{pathlib.Path(__file__).with_name('evens_reward.py')}:evens"
KEYS = {
    **ONE_DEVICE,
    "algorithm.kl_coef": 0.1,
    "actor.learning_rate": 0.02,
    "reward.function": EVENS,
}
ADAPTERS = {"actor.lora.rank": 2, "actor.lora.targets": ("q", "down")}


def host(tree):
    return jax.tree.map(np.array, tree)


def parameters(trainer, role):
    return host(trainer.roles.groups[role].weights().result())


def followed(keys, steps):
    """Before the first step and after each: the actor's and the reference's parameters."""
    with trainer_of("GRPO", {**KEYS, **keys}) as trainer:
        trainer.prepare()
        seen = [(parameters(trainer, "actor"), parameters(trainer, "reference"))]
        for _ in range(steps):
            trainer.step()
            seen.append((parameters(trainer, "actor"), parameters(trainer, "reference")))
    return seen


def assert_close(found, expected, tolerance=1e-6):
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=0, atol=tolerance), found, expected
    )


def test_every_second_step_it_takes_the_actors_weights():
    seen = followed({"reference.sync_every": 2}, 5)
    actors, references = zip(*seen)
    for step, of in enumerate((0, 0, 2, 2, 4, 4)):
        assert_close(references[step], actors[of], 0)
    assert not np.array_equal(actors[2]["embedding"], actors[0]["embedding"])


def test_a_share_is_a_moving_average():
    seen = followed({"reference.sync_every": 1, "reference.sync_share": 0.25}, 3)
    expected = seen[0][0]
    for actor, reference in seen[1:]:
        expected = jax.tree.map(lambda x, y: 0.75 * x + 0.25 * y, expected, actor)
        assert_close(reference, expected)


@pytest.mark.parametrize("adapters", [{}, ADAPTERS], ids=["all weights", "adapters"])
def test_after_each_sync_the_policy_has_no_distance_to_it(adapters):
    """One update a step, so the KL that a step's loss sees is that of the step's start."""
    kl = {}
    for every in (0, 2):
        keys = {**KEYS, **adapters, "reference.sync_every": every}
        with trainer_of("GRPO", keys) as trainer:
            kl[every] = [row["kl/reference"] for row in trainer.run(4)]
    zero = pytest.approx(0.0, abs=1e-6)
    assert kl[0][0] == zero and kl[2][0] == zero and kl[2][2] == zero
    assert kl[0][1] == kl[2][1]  # until the first sync they are one run
    assert all(abs(x) > 1e-4 for x in (kl[0][1], kl[0][2], kl[2][3]))  # estimates have signs


def test_of_adapters_the_matrices_move(tmp_path):
    keys = {**KEYS, **ADAPTERS, "reference.sync_every": 1, "reference.sync_share": 0.5}
    with trainer_of("GRPO", {**keys, "checkpoint.every": 1, "checkpoint.keep": 9}, tmp_path) as run:
        run.prepare()
        expected = host(run.roles.groups["actor"].learned_weights().result())
        run.run(3)
    for step in (1, 2, 3):
        folder = tmp_path / "checkpoints" / str(step)
        learned = restore_params(folder, "actor")
        expected = jax.tree.map(lambda x, y: 0.5 * x + 0.5 * y, expected, learned)
        assert_close(restore_params(folder, "actor", "reference"), expected)


@pytest.mark.extended
@pytest.mark.parametrize("adapters", [{}, ADAPTERS], ids=["all weights", "adapters"])
def test_a_resumed_run_is_the_same(adapters, tmp_path):
    keys = {**KEYS, **adapters, "checkpoint.every": 1}
    keys |= {"reference.sync_every": 2, "reference.sync_share": 0.5}
    for name, parts in (("whole", (5,)), ("parts", (3, 2))):
        for steps in parts:
            with trainer_of("GRPO", keys, tmp_path / name) as trainer:
                trainer.run(steps)
    whole, parts = ([computed(r) for r in read_rows(tmp_path / n)] for n in ("whole", "parts"))
    assert len(whole) == 5 and whole == parts


def test_what_does_not_follow_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="begins as the actor; leave reference.path empty"):
        tiny_config("GRPO", {**KEYS, "reference.sync_every": 1, "reference.path": "x"})
    with pytest.raises(ConfigError, match="sync_share=0.0: must be above 0, at most 1"):
        tiny_config("GRPO", {**KEYS, "reference.sync_every": 1, "reference.sync_share": 0.0})
