"""The actor's parameters change their layout around generation, and come back whatever happens."""

import gc

import jax
import numpy as np
import pytest

from hjax.sharding.live_memory import live_bytes
from tests.helpers import computed, trainer_of

LAYOUT = {
    "layout.actor.train.tensor": 4,
    "layout.actor.generate.tensor": 2,
    "rollout.transition_bucket_bytes": 4096,
}


def actor_of(trainer):
    return trainer.roles.groups["actor"].worker


def host(params):
    return jax.tree.map(np.array, params)


def same(one, other):
    return all(jax.tree.leaves(jax.tree.map(np.array_equal, one, other)))


@pytest.fixture(
    scope="module", params=[pytest.param("float32", marks=pytest.mark.slow), "bfloat16"]
)
def trainer(request):
    with trainer_of("GRPO", LAYOUT | {"model.dtype": request.param}) as trainer:
        trainer.step()
        yield trainer


@pytest.mark.extended
def test_parameters_are_elsewhere_while_generating(trainer):
    actor = actor_of(trainer)
    narrow = trainer.config.model.dtype == "bfloat16"
    before, arrays = host(actor.params), actor.params
    with actor.generation_weights() as params:
        assert actor.params == {}
        q = params["layers"]["q"]
        assert q.sharding.is_equivalent_to(
            actor.network.shardings(actor.layouts.generate)["layers"]["q"], q.ndim
        )
        # The masters of a narrower copy stay; otherwise there is one model, not two.
        assert arrays["layers"]["q"].is_deleted() != narrow
        assert q.dtype == trainer.config.model.dtype
    assert q.is_deleted()
    assert same(host(actor.params), before)


@pytest.mark.extended
def test_parameters_come_back_when_generation_fails(trainer, monkeypatch):
    actor = actor_of(trainer)
    before = host(actor.params)

    def fail(*arguments, **options):
        raise RuntimeError("out of luck")

    monkeypatch.setattr(actor.generator, "generate", fail)
    length = trainer.inputs.prompt_length
    prompts = {
        "prompts": np.ones((8, length), np.int32),
        "prompt_mask": np.ones((8, length), bool),
    }
    with pytest.raises(RuntimeError, match="out of luck"):
        actor.generate_sequences(prompts)
    assert same(host(actor.state()["params"]), before)


@pytest.mark.extended
def test_rounds_of_generation_keep_memory(trainer):
    devices = jax.devices()
    trainer.step()
    gc.collect()
    before = live_bytes(devices)
    for _ in range(2):
        trainer.step()
    gc.collect()
    assert live_bytes(devices) == before


@pytest.mark.extended
def test_seconds_and_programs_count_the_transition(trainer):
    actor = actor_of(trainer)
    actor.take_seconds()
    with actor.generation_weights():
        there = actor._seconds["transition"]
    assert 0 < there < actor.take_seconds()["transition"]
    names = [each.name for each in actor.programs(16, trainer.inputs.prompt_length)]
    buckets = len(actor.transition.buckets)
    assert names[:buckets] == [f"transition_{i + 1}" for i in range(buckets)] and buckets > 1
    assert names[buckets] == "generate"


@pytest.mark.extended
def test_a_run_is_the_same_whatever_the_buckets():
    rows = []
    for size in (1, 2**24):
        with trainer_of("GRPO", LAYOUT | {"rollout.transition_bucket_bytes": size}) as trainer:
            rows.append([computed(row) for row in trainer.run(2)])
    assert rows[0] == rows[1]
