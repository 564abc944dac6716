"""``model.remat=auto``: which policy a role gets, by the memory that is left."""

import dataclasses

import jax
import pytest

import hjax
from hjax.algorithms import get_algorithm
from hjax.algorithms.losses import PolicyLoss
from hjax.dryrun.programs import memory_of
from hjax.dryrun.shape_inputs import read_shape, shape_inputs
from hjax.models.compute import Compute
from hjax.models.cost_inputs import model_counts
from hjax.models.model_config import ModelConfig
from hjax.run.memory_check import choose_remat
from hjax.run.placement import plan_from_config
from hjax.run.role_groups import describe_roles
from hjax.sharding.layout import make_layouts
from hjax.workers import Actor, OptimizerConfig, WorkerContext
from hjax.workers.memory import RoleMemory

GIB = 2**30
PODS = {
    "actor.path": "llama-7b",
    "layout.actor.train.data": 1,
    "layout.actor.train.fsdp": 8,
    "layout.critic.train.data": 1,
    "layout.critic.train.fsdp": 8,
    "actor.micro_batch": 8,
    "critic.micro_batch": 8,
    "model.remat": "auto",
    "model.dtype": "bfloat16",
    "rollout.max_response_length": 3072,
    "rollout.max_prompt_length": 512,
}


def chosen(platform="tpu", memory=0, **more):
    config = hjax.get_config("ppo.py", {**PODS, **more})
    algorithm = get_algorithm(config.algorithm.name)
    inputs = shape_inputs(config)
    plan = plan_from_config(config, algorithm, 8)
    return describe_roles(config, algorithm, inputs, plan, platform, read_shape, memory)


def test_the_first_that_fits_or_else_the_last():
    needed = {"none": 30.0, "attention": 20.0, "full": 10.0}
    assert choose_remat(needed, 40).policy == "none"
    assert choose_remat(needed, 25).policy == "attention"
    assert choose_remat(needed, 10).policy == "full"
    least = choose_remat(needed, 5)
    assert least.policy == "full" and "none fits" in least.why
    assert choose_remat(needed, 20).estimated_bytes == {"none": 30, "attention": 20}


@pytest.mark.extended
def test_less_memory_less_is_kept():
    order = ["none", "products", "attention", "full", "offload"]
    halves = range(110, 160)
    found = [order.index(chosen(memory=n * GIB // 2).remat["actor"].policy) for n in halves]
    assert found == sorted(found, reverse=True) and set(found) == {0, 1, 2, 3, 4}


def test_it_is_what_the_worker_gets_and_says_why():
    roles = chosen(memory=48 * GIB)
    for role, found in roles.remat.items():
        assert roles.builds[role].arguments[0].compute.remat == found.policy
        assert found.policy in found.why and "of 43.2 GiB" in found.why
    assert set(roles.remat) == {"actor", "critic"}  # the reference is not trained
    assert chosen(memory=48 * GIB).remat == roles.remat


@pytest.mark.extended
def test_shallow_models_are_unrolled_on_cpus():
    def unrolled(platform="cpu", **more):
        roles = chosen(platform, **{"actor.path": "", "model.layers": 8, **more})
        got = {role: b.arguments[0].compute.unroll_layers for role, b in roles.builds.items()}
        assert roles.unrolled == ({} if "model.unroll_layers" in more else roles.unrolled)
        assert {role: got[role] for role in roles.unrolled} == roles.unrolled
        return got["actor"], got["critic"], got["reference"]

    assert unrolled() == (True, True, True)
    assert unrolled("tpu") == unrolled("gpu") == (False, False, False)
    assert unrolled(**{"model.layers": 9}) == (False, False, False)
    # Of 32 layers, whatever the config says of models from scratch.
    deep = {"actor.path": "llama-7b", "model.layers": 2}
    assert unrolled(**deep) == (False, False, False)
    assert unrolled(**deep, **{"model.unroll_layers": True}) == (True, True, True)
    assert unrolled(**{"model.unroll_layers": "false"}) == (False, False, False)
    # Each role by its own.
    assert unrolled(**{"critic.path": "llama-7b"}) == (True, False, True)


@pytest.mark.parametrize("more", [{}, {"model.unroll_layers": True}])
def test_nothing_is_computed_again_on_a_cpu(more):
    roles = chosen("cpu", **more)
    assert {found.policy for found in roles.remat.values()} == {"none"}
    assert "do not say" in roles.remat["actor"].why or "unrolled" in roles.remat["actor"].why


def test_what_is_frozen_trained_with_adapters_takes_less():
    every = chosen(memory=48 * GIB).remat["actor"].estimated_bytes["none"]
    few = chosen(memory=48 * GIB, **{"actor.lora.rank": 8}).remat["actor"].estimated_bytes["none"]
    # Of 6.7e9 parameters over 8 devices: no gradients (twice, of micro-batches), no moments, no
    # cast copy beside a bfloat16 that stands, of the actor; and no reference, whole on each device.
    freed = 6.74e9 * ((4 + 4 + 8 + 2 + 2) / 8 + 4)
    assert every - few == pytest.approx(freed, rel=0.02)


def test_another_policy_stands_as_it_is():
    roles = chosen(memory=GIB, **{"model.remat": "attention"})
    assert not roles.remat
    assert roles.builds["actor"].arguments[0].compute.remat == "attention"


@pytest.mark.parametrize(
    ("policy", "packing"), [("none", 0), ("products", 0), ("full", 0), ("none", 1024)]
)
@pytest.mark.extended
def test_an_updates_memory_is_near_its_estimate(policy, packing):
    model = ModelConfig(512, 128, 512, 12, 4, 2, 32, 2048)
    worker = Actor(
        WorkerContext(
            role="actor",
            layouts=make_layouts(jax.devices()[:1]),
            model=model,
            compute=Compute(remat=policy),
            max_response_length=896,
            samples=2,
            packing=packing,
            loss=PolicyLoss(),
            optimizer=OptimizerConfig(1e-3),
        )
    )
    [update] = [p for p in worker.programs(8, 128) if p.name == "update"]
    compiled = memory_of(update.trace().lower().compile())["total_bytes"]
    assert 0.75 <= RoleMemory.from_worker(worker).update_bytes(8, 128, policy) / compiled <= 1.25


def test_what_is_kept_of_a_layer_by_hand():
    # hidden 8, MLP 24, 4 heads of 2, 2 of keys: norms 4 x 8; q and output 8 each, k and v 4 each;
    # gate and up 24 each, their product made again.
    model = ModelConfig(32, 8, 24, 3, 4, 2, 2, 64)
    assert model_counts(model).kept_activations("none") == (32 + 24 + 48, 32)
    assert model_counts(model).kept_activations("products") == (8 + 8 + 48 + 8 + 8 + 8, 8 + 8)
    assert model_counts(model).kept_activations("attention") == (8 + 8, 8)
    assert model_counts(model).kept_activations("full") == (8, 8)
    assert model_counts(model).kept_activations("offload") == (0, 0)
    biased = dataclasses.replace(model, mlp_bias=True)
    assert model_counts(biased).kept_activations("none") == (32 + 24 + 72, 32)


def test_the_gradients_of_a_layer_by_hand():
    # Of output and MLP's input 2 x 8; of gate, up and product 24 each, and the product again.
    def gradients(config):
        return model_counts(config).layer_gradients, model_counts(config).layer_gradients_whole

    model = ModelConfig(32, 8, 24, 3, 4, 2, 2, 64)
    assert gradients(model) == (16 + 72 + 24, 16)
    biased = dataclasses.replace(model, mlp_bias=True)  # its product is kept
    assert gradients(biased) == (16 + 72, 16)
    plain = dataclasses.replace(model, gated_mlp=False, family="gpt2")
    assert gradients(plain) == (16 + 48, 16)


def test_what_updates_of_experts_keep_under_each_policy():
    """What the compiler of v5p:4x4x4 takes for an update of Qwen3-30B-A3B, 256 rows of 2048 tokens,
    4 of each prompt of 512, under each policy (updating, libtpu 0.0.42.1)."""
    axes = {"train.fsdp": 8, "train.expert": 8, "train.data": 1}
    config = hjax.get_config(
        "grpo.py",
        {
            "actor.path": "qwen3-30b-a3b",
            **{f"layout.actor.{axis}": n for axis, n in axes.items()},
            "warm_start.steps": 0,
            "rollout.prompts": 64,
            "rollout.samples": 4,
            "rollout.max_prompt_length": 512,
            "rollout.max_response_length": 1536,
            "algorithm.minibatch": 256,
            "algorithm.kl_coef": 0.0,
            "model.dtype": "bfloat16",
        },
    )
    algorithm = get_algorithm(config.algorithm.name)
    inputs, plan = shape_inputs(config), plan_from_config(config, algorithm, 64)
    said = {"none": 44.2, "products": 29.2, "attention": 16.5, "full": 14.3}
    for memory, policy in ((95.7, "none"), (36, "products"), (19, "full")):
        given = config, algorithm, inputs, plan, "tpu", read_shape, int(memory * GIB)
        found = describe_roles(*given).remat["actor"]
        assert found.policy == policy
        for name, estimated in found.estimated_bytes.items():
            assert 0.9 < estimated / (said[name] * GIB) < 1.25, name
