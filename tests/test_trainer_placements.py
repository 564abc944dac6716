"""The same run under every placement gives the same numbers, and pools work at the same time."""

import json
import math

import pytest
from helpers import ONE_DEVICE, save_model, tiny_config, trainer_of

from hjax.data.tasks import get_task
from hjax.errors import ConfigError
from hjax.run.placement import make_plan

STEPS = 3
WATCHED = ("reward/mean", "actor/loss", "critic/loss", "cost_critic/loss", "kl/reference")

# The share of sequences with an even digit: dense enough that a new model learns from it.
REWARD = """
def evens(prompts, responses, **columns):
    return [sum(c in "02468" for c in response) / 4 for response in responses]
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("placements")
    (folder / "reward.py").write_text(REWARD)
    tokenizer = get_task("harvest").tokenizer()
    for seed, name in enumerate(("reward", "cost")):
        save_model(folder / name, seed=seed + 5, tokenizer=tokenizer, head=True)
    plan = {
        "placement": [["critic"], ["reference", "actor", "reward"]],
        "allocation": [2, 4],
        "parallelism": {
            "actor": {"train": [1, 2, 2], "generate": [1, 1]},
            "reference": {"train": {"fsdp": 4}},
        },
    }
    (folder / "plan.json").write_text(json.dumps(plan))
    return folder


def run(algorithm, files, changes):
    """The watched metrics of some steps, and the trainer's timeline and plan."""
    base = {"steps": STEPS, "actor.learning_rate": 1e-3}
    if algorithm == "PPO":
        base["reward.function"] = f"{files}/reward.py:evens"
    with trainer_of(algorithm, base | changes) as trainer:
        rows = trainer.run()
        watched = [{k: row[k] for k in WATCHED if k in row} for row in rows]
        return watched, trainer.timeline.chrome_trace(), trainer.plan_record()


@pytest.fixture(scope="module")
def colocated(files):
    """On one device: every placement gives its numbers."""
    return run("PPO", files, {"placement": "colocate"} | ONE_DEVICE)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"placement": "split"}, marks=pytest.mark.slow),
        pytest.param({"placement": "standalone"}, marks=pytest.mark.extended),
        pytest.param({"placement": "plan.json"}, marks=pytest.mark.extended),
        pytest.param(
            {"layout.actor.train.tensor": 2, "layout.actor.generate.tensor": 1},
            marks=pytest.mark.slow,
        ),
    ],
    ids=lambda changes: " ".join(map(str, changes.values())),
)
def test_ppo_is_the_same_under_every_placement(changes, colocated, files, monkeypatch):
    monkeypatch.chdir(files)
    watched, trace, _ = run("PPO", files, changes)
    for row, expected in zip(watched, colocated[0], strict=True):
        assert row == pytest.approx(expected, abs=1e-5)
    assert expected["reward/mean"] > 0.1 and abs(expected["critic/loss"]) > 1e-4
    pools = {e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"}
    assert pools == {
        "split": {"pool actor+reference", "pool critic", "pool host"},
        "standalone": {"pool actor", "pool critic", "pool reference", "pool host"},
        "plan.json": {"pool critic", "pool reference+actor", "pool host"},
    }.get(changes.get("placement"), {"pool all", "pool host"})


@pytest.mark.slow
def test_safe_rlhf_with_six_models_is_the_same_colocated_and_standalone(files):
    models = {"reward.path": f"{files}/reward", "cost.path": f"{files}/cost"}
    together, _, _ = run("SafeRLHF", files, models)
    apart, trace, plan = run("SafeRLHF", files, models | {"placement": "standalone"})
    for row, expected in zip(apart, together, strict=True):
        assert row == pytest.approx(expected, abs=1e-5)
    assert len(expected) == len(WATCHED) and expected["reward/mean"] != 0
    assert sorted(plan["placement"]) == [
        ["actor"], ["cost"], ["cost_critic"], ["critic"], ["reference"], ["reward"]
    ]  # fmt: skip
    assert sum(plan["allocation"]) <= 8 and min(plan["allocation"]) >= 1


def test_a_plan_that_was_written_can_be_read_back(tmp_path):
    with trainer_of("PPO", {"placement": "colocate"}) as trainer:
        plan = trainer.plan_record()
    assert plan["placement"] == [["actor", "critic", "reference"]]
    assert plan["allocation"] == [8]
    assert plan["parallelism"]["actor"]["train"] == {"data": 8, "fsdp": 1, "tensor": 1}
    path = tmp_path / "again.json"
    path.write_text(json.dumps(plan))
    again = make_plan(str(path), ("actor", "critic", "reference"), 8)
    assert again.placement == (("actor", "critic", "reference"),) and again.allocation == (8,)
    with trainer_of("PPO", {"placement": str(path)}) as trainer:
        assert trainer.plan_record() == plan


@pytest.mark.parametrize("devices", [1, 2, 3, 4, 6, 8])
@pytest.mark.parametrize("placement", ["colocate", "split", "standalone"])
def test_shares_use_no_more_devices_than_there_are(placement, devices):
    roles = ("actor", "critic", "reference")
    needed = {"colocate": 1, "split": 2, "standalone": 3}[placement]
    if devices < needed:
        with pytest.raises(ConfigError, match=f"{needed} sets of roles .* there are {devices}"):
            make_plan(placement, roles, devices)
        return
    plan = make_plan(placement, roles, devices)
    assert sorted(r for s in plan.placement for r in s) == sorted(roles)
    assert len(plan.placement) == needed
    assert sum(plan.allocation) <= devices and min(plan.allocation) >= 1
    assert math.prod(plan.allocation) > 0
    actor = next(i for i, s in enumerate(plan.placement) if "actor" in s)
    assert plan.allocation[actor] == max(plan.allocation)


def test_a_plan_gives_pipeline_stages_and_other_axes(tmp_path):
    path = tmp_path / "plan.json"
    plan = {"placement": [["actor", "critic"]], "allocation": [8]}
    plan["parallelism"] = {"actor": {"train": [2, 1, 4], "generate": [1, 1]}}
    path.write_text(json.dumps(plan))
    layouts = make_plan(str(path), ("actor", "critic"), 8).layouts["actor"]
    assert layouts["train"] == {"data": 4, "pipe": 2, "tensor": 1}
    assert layouts["generate"] == {"pipe": 1, "tensor": 1}
    # Axes by name say more than the three numbers, and come first.
    path.write_text(json.dumps(plan | {"layouts": {"actor": {"train": {"fsdp": 8}}}}))
    assert make_plan(str(path), ("actor", "critic"), 8).layouts == {"actor": {"train": {"fsdp": 8}}}


@pytest.mark.parametrize(
    "content, message",
    [
        ("{", "not valid JSON"),
        ('{"placement": [["actor"]]}', "not a plan: it needs `placement`.*`allocation`"),
        ('{"placement": [["actor", "critic"]], "allocation": [8]}', "this run has .*reference"),
        (
            '{"placement": [["actor", "critic", "reference"]], "allocation": [9]}',
            "it needs 9 devices .* there are 8",
        ),
        (
            '{"placement": [["actor", "critic", "reference"]], "allocation": [8],'
            ' "parallelism": {"actor": 3}}',
            "not a plan",
        ),
        (
            '{"placement": [["actor", "critic", "reference"]], "allocation": [8],'
            ' "parallelism": {"actor": {"train": [1]}}}',
            "not a plan",
        ),
        ("[]", "object|plan"),
        ('{"placement": "actor", "allocation": [8]}', "this run has"),
    ],
)
def test_a_plan_that_does_not_fit_is_refused_in_one_line(content, message, tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=message) as caught:
        make_plan(str(path), ("actor", "critic", "reference"), 8)
    assert "\n" not in str(caught.value) and str(path) in str(caught.value)


def test_a_placement_that_does_not_fit_the_machine_is_refused():
    import hjax

    config = tiny_config("PPO", {"placement": "standalone", "cluster.devices_per_process": 2})
    with pytest.raises(ConfigError, match="3 sets of roles need a device each, there are 2"):
        hjax.Trainer(config)
