"""Learning rates: every role's schedule ends with the last update that its worker is called for."""

import collections
import math

import pytest
from helpers import ONE_DEVICE, TINY, trainer_of

import hjax
from hjax.algorithms import get_algorithm
from hjax.errors import ConfigError
from hjax.launch.stages import read_stages
from hjax.run.dataflow import updates_per_step
from hjax.settings.config_loading import check_config, config_names

# Updates of a step, by hand: epochs x (prompts x samples / mini-batch), as the config has them.
# A step of an algorithm that learns from given examples is one update.
EXAMPLES = {"actor": 1}
ACTOR = {"actor": 4}  # 2 x 256 / 128
WITH_CRITIC = {"actor": 4, "critic": 4}
UPDATES = {
    "base": {"actor": 1},
    "calculator": ACTOR,  # 2 x 128 / 64, as maze
    "cdpo": EXAMPLES,
    "cispo": ACTOR,
    "cost_model": EXAMPLES,
    "dapo": ACTOR,
    "distillation": {"actor": 2, "teacher": 2},  # 1 x 256 / 128, and algorithm.teacher_updates
    "dpo": EXAMPLES,
    "dqn_cartpole": {"actor": 200},  # 50 x 4
    "dr_grpo": ACTOR,
    "fee_schedule": ACTOR,  # 2 x 160 / 80
    "gdpo": ACTOR,
    "gigpo": ACTOR,
    "gpg": {"actor": 1},
    "grpo": ACTOR,
    "gspo": ACTOR,
    "gspo_token": ACTOR,
    "hinge_dpo": EXAMPLES,
    "ipo": EXAMPLES,
    "kto": EXAMPLES,
    "max_rl": ACTOR,
    "maze": ACTOR,
    "metis": {"actor": 2},  # 1 x 128 / 64
    "online_dpo": ACTOR,
    "opo": {"actor": 1},
    "orpo": EXAMPLES,
    "ppo": WITH_CRITIC,
    "ppo_cartpole": {"actor": 32, "critic": 32},  # 4 x 8 x 128 / 128
    "ppo_llama_7b": WITH_CRITIC,  # 1 x 512 / 128
    "prime": {"actor": 4, "process_reward": 4},
    "process_reward_model": EXAMPLES,
    "reinforce": {"actor": 1},
    "reinforce_plus_plus": ACTOR,
    "reinforce_plus_plus_baseline": ACTOR,
    "remax": {"actor": 1},
    "reward_model": EXAMPLES,
    "rloo": {"actor": 1},
    "robust_dpo": EXAMPLES,
    "safe_rlhf": WITH_CRITIC | {"cost_critic": 4},
    "sapo": ACTOR,
    "sft": EXAMPLES,
    "sim_po": EXAMPLES,
    "spin": {"actor": 2},  # an epoch is one update on all pairs
    "stories": WITH_CRITIC,  # 2 x 128 / 64
    "vapo": WITH_CRITIC,
    "rlhf:sorting sft": EXAMPLES,
    "rlhf:sorting reward_model": EXAMPLES,
    "rlhf:sorting ppo": WITH_CRITIC,
    "rlhf:reviews sft": EXAMPLES,
    "rlhf:reviews reward_model": EXAMPLES,
    "rlhf:reviews ppo": WITH_CRITIC,  # 2 x 64 / 32
}
# Runs of these need weights and prompts that do not come with hjax, or have no sequences.
READS_OTHER_FILES = (
    "base", "ppo_cartpole", "dqn_cartpole", "ppo_llama_7b", "stories", "rlhf:reviews",
)  # fmt: skip
STEPS = 2
# 16 responses a step, in mini-batches of 4 where the config has any.
SIZES = {k: v for k, v in TINY.items() if not k.startswith("data.task")} | ONE_DEVICE | {
    "steps": STEPS,
    "rollout.max_response_length": 12,
    "rollout.prompts": 8,
    "rollout.samples": 2,
    "algorithm.minibatch": 4,
    "warm_start.steps": 1,
    "actor.schedule": "cosine",
    "critic.schedule": "linear",
    "teacher.schedule": "cosine",
    "actor.warmup_updates": 1,
}  # fmt: skip


def shipped(name):
    """A shipped config, or with `FILE:ARGUMENT STAGE` that of a stage."""
    file, _, stage = name.partition(" ")
    if not stage:
        return hjax.get_config(file)
    stages, _ = read_stages(file.replace(":", ".py:"), [])
    return stages.declared[stage]


def test_updates_of_a_step_of_every_shipped_config():
    names = {name.removesuffix(".py") for name in config_names()}
    stages = {
        f"rlhf:{kind} {stage}"
        for kind in ("sorting", "reviews")
        for stage in read_stages(f"rlhf.py:{kind}", [])[0].declared
    }
    assert names - {"rlhf"} | stages == UPDATES.keys()
    for name, expected in UPDATES.items():
        config = shipped(name)
        algorithm = get_algorithm(config.algorithm.name)
        assert updates_per_step(algorithm, config) == expected, name
        trained = {k for k, r in algorithm.role_table(config.algorithm).items() if r.trained}
        assert trained == expected.keys(), name


def small(name):
    """A shipped config as a run of seconds: its algorithm, epochs and task."""
    config = shipped(name)
    unused = ["rollout.samples"] if config.rollout.samples == 1 else []
    unused += [] if config.algorithm.get("minibatch") else ["algorithm.minibatch"]
    unused += [] if config.warm_start.steps else ["warm_start.steps"]
    changes = {key: value for key, value in SIZES.items() if key not in unused}
    if name in ("calculator", "fee_schedule", "gigpo", "maze", "metis"):  # room for a whole one
        changes["rollout.max_response_length"] = 0
    if config.actor.frozen_updates:
        changes["actor.frozen_updates"] = 5
    if " " in name:
        changes |= {"actor.path": "", "reward.path": ""}
    with config.unlocked():
        config.update_from_flattened_dict(changes)
    return check_config(config)


def learning_rate(section, total, update):
    """By the formulas: 0 while frozen, a linear rise, then a decay to 0 at the update `total`."""
    peak, start = section.learning_rate, section.frozen_updates
    if update < start:
        return 0.0
    if update < start + section.warmup_updates:
        return peak * (update - start + 1) / section.warmup_updates
    start += section.warmup_updates
    done = (update - start) / (total - start)
    return peak * ((1 + math.cos(math.pi * done)) / 2 if section.schedule == "cosine" else 1 - done)


@pytest.mark.extended
@pytest.mark.parametrize("name", [x for x in UPDATES if not x.startswith(READS_OTHER_FILES)])
def test_the_last_learning_rate_of_every_role_is_its_schedules_end(name):
    trainer = hjax.Trainer(small(name))
    try:
        last = trainer.run()[-1]
        spans = [span for span in trainer.timeline.spans() if span.phase == "update" and span.step]
        table = trainer.roles.table
    finally:
        trainer.close()
    calls = collections.Counter(span.role for span in spans)
    assert calls.keys() == UPDATES[name].keys()
    for role, total in calls.items():
        # The row of a step has the mean over its updates.
        section, step = trainer.config[table[role].config_section], range(total // STEPS)
        rates = [learning_rate(section, total, total - 1 - update) for update in step]
        expected = sum(rates) / len(rates)
        assert last[f"{role}/learning_rate"] == pytest.approx(expected, rel=1e-4), role


@pytest.mark.extended
def test_a_schedule_that_goes_on_longer_says_the_jump_of_its_rate(tmp_path):
    """By hand: linear from 0.01 over 4 updates ends at .0025; over 16, the 4th has .008125."""
    keys = {
        "steps": 4,
        "actor.learning_rate": 0.01,
        "actor.schedule": "linear",
        "warm_start.steps": 0,
        "checkpoint.every": 2,
    }
    with trainer_of("GRPO", keys | ONE_DEVICE, tmp_path) as trainer:
        assert trainer.run()[-1]["actor/learning_rate"] == pytest.approx(0.0025)
    said = []
    with trainer_of("GRPO", keys | ONE_DEVICE | {"steps": 16}, tmp_path) as trainer:
        trainer.reporter.message = said.append
        row = trainer.step()
    assert row["actor/learning_rate"] == pytest.approx(0.0075)
    [told] = [line for line in said if "other schedule" in line]
    assert "steps=16 after 4" in told and "from 0.0025 to 0.00812" in told
    said.clear()
    with trainer_of("GRPO", keys | ONE_DEVICE | {"steps": 16}, tmp_path) as trainer:
        trainer.reporter.message = said.append
        trainer.step()
    assert not [line for line in said if "other schedule" in line]


def test_batches_of_passes_divide_what_the_algorithm_trains_on():
    """DPO's update has `warm_start.batch` sequences; SPIN's has two for each of its prompts."""
    dpo = {"warm_start.batch": 48, "rollout.prompts": 8, "rollout.samples": 2}
    hjax.get_config("dpo.py", dpo | {"actor.micro_batch": 24})
    with pytest.raises(ConfigError, match=r"does not divide the warm_start\.batch of 48"):
        hjax.get_config("dpo.py", dpo | {"actor.micro_batch": 32})
    hjax.get_config("spin.py", {"rollout.prompts": 8, "actor.micro_batch": 16})
    with pytest.raises(ConfigError, match="does not divide the mini-batch of 16"):
        hjax.get_config("spin.py", {"rollout.prompts": 8, "actor.micro_batch": 32})


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
def test_a_schedule_ends_at_its_ratio_after_a_share_of_warm_up(schedule):
    """6 steps of 2 updates; a warm-up of .2 of 12 updates is 3, rounded up."""
    keys = {
        **ONE_DEVICE, "steps": 6, "algorithm.minibatch": 8, "actor.learning_rate": 0.01,
        "actor.schedule": schedule, "actor.min_lr_ratio": 0.25, "actor.warmup_ratio": 0.2,
    }  # fmt: skip
    with trainer_of("GRPO", keys) as trainer:
        found = [row["actor/learning_rate"] for row in trainer.run()]
    shares = []
    for update in range(12):
        done = (update - 3) / 9
        fall = (1 + math.cos(math.pi * done)) / 2 if schedule == "cosine" else 1 - done
        shares.append((update + 1) / 3 if update < 3 else 0.25 + 0.75 * fall)
    means = [0.01 * (a + b) / 2 for a, b in zip(shares[::2], shares[1::2])]
    assert found == pytest.approx(means, rel=1e-5)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"actor.min_lr_ratio": 0.1}, "min_lr_ratio=0.1: a constant schedule has no end"),
        ({"critic.warmup_ratio": 0.1, "critic.warmup_updates": 3}, "beside warmup_updates=3"),
        ({"actor.min_lr_ratio": 1.5}, "must be from 0 to 1"),
    ],
)
def test_schedules_that_are_no_schedules(keys, said):
    with pytest.raises(ConfigError, match=said):
        check_config({**TINY, "algorithm.name": "PPO", **keys})
