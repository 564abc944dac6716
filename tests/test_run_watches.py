"""Warnings that save a day: what sets each off, once, and what does not."""

import dataclasses

import numpy as np
import pytest
from helpers import tiny_config

import hjax
from hjax.models.model_config import ModelConfig
from hjax.run.health_checks import (
    HealthChecks,
    adapters_warning,
    equal_groups,
    held_out_warning,
    idle_devices_warning,
    pretrained_rate_warning,
)


def told(rows, changes=None, algorithm="GRPO", token_seconds=0.0):
    """The names of what is told, with the steps, of (metrics, batch) pairs from step 1 on."""
    watches = HealthChecks(tiny_config(algorithm, changes), token_seconds)
    found = []
    for step, (metrics, batch) in enumerate(rows, 1):
        for line in watches.messages({"step": step, **metrics}, batch):
            start, _, rest = line.partition(": warning (")
            assert "\n" not in line and start == f"step {step}"
            found.append((step, rest.partition(")")[0]))
    return found


def rewards(*groups):
    return {"reward/mean": 0.0}, {"rewards": np.array(groups, np.float32).ravel()}


NAN = float("nan")


@pytest.mark.parametrize(
    ("groups", "share"),
    [
        ([[1, 1], [0, 1]], 0.5),
        ([[1, 1], [0, 0], [0, 1]], 2 / 3),
        ([[NAN, NAN], [0, 1]], 0.0),
        ([[NAN, 1], [0, 1]], 0.5),
        ([[NAN, NAN]], 0.0),
        ([[1e6, 1e6 - 1], [1e6, 1e6 - 2]], 0.5),  # advantages of the first are 0
        ([[1e-7, 3e-7], [1e-5, 3e-5]], 0.5),
    ],
)
def test_share_of_equal_groups(groups, share):
    assert equal_groups(np.ravel(groups), 2) == pytest.approx(share)


def test_equal_groups_are_told_after_three_steps_in_a_row():
    equal, mixed = rewards([1, 1], [0, 0], [0, 1]), rewards([0, 1], [0, 1], [1, 1])
    assert told([equal, equal, mixed, equal, equal]) == []
    assert told([mixed, equal, equal, equal, equal, equal, equal]) == [(4, "equal rewards")]
    # PPO has a critic, DAPO draws them anew.
    assert told([equal] * 5, algorithm="PPO") == []
    assert told([equal] * 5, {"algorithm.resample": 2, "algorithm.filter": True}) == []


def of(metric, values):
    return [({metric: value}, {}) for value in values]


@pytest.mark.parametrize(
    ("metric", "values", "steps"),
    [
        # A KL that grows evenly to one nat, as of a small model from scratch, is no matter.
        ("kl/reference", np.linspace(0, 0.95, 300), []),
        ("kl/reference", [0.1] * 30 + [0.7] * 30, []),
        ("kl/reference", [0.1] * 20 + [3.0] * 20, [22]),  # (2*3 + 3*.1) / 5 is above 5 * .25
        ("kl/reference", [0.1] * 20 + [NAN, float("inf")] + [3.0] * 9, [24]),
        ("reward/mean", [0.1] * 30 + [1.0] * 30, []),
        ("reward/mean", [-5.0] * 30 + [9.0] * 30, []),
        ("reward/mean", [1.0] * 20 + [1000.0] * 9, [21]),
    ],
)
def test_what_runs_away(metric, values, steps):
    names = {"kl/reference": "KL running away", "reward/mean": "reward running away"}
    assert told(of(metric, values)) == [(step, names[metric]) for step in steps]


def test_entropy_that_is_gone():
    falls = [2.1] * 5 + [0.5, 0.076, 0.03, 0.019]
    assert told(of("actor/entropy", falls + [0.019] * 3)) == []
    assert told(of("actor/entropy", falls + [0.019] * 9)) == [(13, "entropy collapsed")]
    # Where nothing is scored no token counts.
    rows = of("actor/entropy", falls + [0.0] * 9)
    silent = [(metrics | {"reward/unscored": 1.0}, batch) for metrics, batch in rows]
    assert told(silent) == []
    assert told(of("actor/entropy", [0.1] * 5 + [0.01] * 20)) == []  # it never was large


def test_generation_that_is_far_from_its_bound():
    batch = {"response_mask": np.ones((4, 100), bool)}
    slow, fast = [({"time/generate": t, "time/transition": 0.5}, batch) for t in (11.6, 9.0)]
    # A hundred tokens at 10 ms are 1 s; the first two steps compile.
    assert told([slow, slow, fast, slow, slow], token_seconds=0.01) == [(4, "slow generation")]
    assert told([slow] * 5, {"rollout.slots": 2}, token_seconds=0.01) == []  # two waves
    assert told([slow] * 5) == []  # of a device that is not known


def test_adapters_at_a_rate_for_all_weights():
    def warned(rank, rate):
        keys = {"actor.lora.rank": rank, "actor.learning_rate": rate}
        return adapters_warning("actor", hjax.get_config("base.py", keys).actor)

    assert warned(16, 1e-6) == (
        "warning (slow adapters): actor.learning_rate=1e-06 is a rate for all weights; adapters "
        "(lora.rank=16) hardly move at it: 1e-5 to 1e-4 is usual"
    )
    assert [warned(0, 1e-6), warned(16, 1e-5), warned(16, 0.0)] == [None] * 3


def test_a_pretrained_model_at_a_rate_for_models_from_scratch():
    large = ModelConfig(50_000, 768, 3072, 12, 12, 12, 64, 1024)
    small = dataclasses.replace(large, layers=2, vocab_size=1000)

    def warned(rate, model=large, path="gpt", rank=0):
        keys = {"actor.path": path, "actor.learning_rate": rate, "actor.lora.rank": rank}
        return pretrained_rate_warning("actor", hjax.get_config("base.py", keys).actor, model)

    count = 50_000 * 768 + 12 * (4 * 768**2 + 3 * 768 * 3072 + 2 * 768) + 768
    assert warned(3e-4) == (
        f"warning (fast weights): actor.learning_rate=0.0003 is a rate for training from scratch; "
        f"all {count / 1e6:.0f} million weights of gpt learn at it: about 1e-6 is usual in "
        "reinforcement learning, 1e-5 in supervised learning"
    )
    assert warned(1e-4) and not warned(9e-5)
    assert [warned(3e-4, small), warned(3e-4, path=""), warned(3e-4, rank=8)] == [None] * 3


def test_before_the_first_step():
    assert held_out_warning(None) is None and held_out_warning(16) is None
    assert held_out_warning(5) == (
        "warning (few held-out prompts): 5, so that one answer is 20 points of accuracy; raise "
        "data.eval_fraction or data.eval_size, or give data.eval_path"
    )
    assert held_out_warning(5, "e.jsonl").endswith("; give data.eval_path=e.jsonl more rows")
    assert idle_devices_warning(8, 8, "split", (4, 4)) is None
    assert "2 of 6 do nothing: split gives its sets powers of two" in idle_devices_warning(
        6, 4, "split", (2, 2)
    )
    warning = idle_devices_warning(8, 6, "plan.json", (4, 2))
    assert "plan.json allocates 4 + 2; allocate the rest" in warning
    assert "found no faster plan than sets of 4" in idle_devices_warning(8, 4, "auto", (4,))
