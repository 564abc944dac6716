"""Generation ahead of learning: which weights drew what, what is dropped, that it overlaps."""

import functools
import json
import pathlib
import threading
import time

import numpy as np
import pytest
from helpers import computed, read_rows, tiny_config, trainer_of
from pickling import ObjectStore, PicklingExecutor, StoredFuture

import hjax
from hjax.errors import ConfigError, RunError
from hjax.run.async_rollout import BatchQueue, PendingBatch, StalenessSchedule, _VersionSelector
from hjax.run.rollout_policy import RolloutPolicy

EVENS = pathlib.Path(__file__).parent / "evens_reward.py"
AHEAD = {
    "reward.function": f"{EVENS}:evens",
    "placement": "disaggregate",
    "steps": 6,
    "rollout.max_staleness": 1,
    "rollout.deterministic": True,
    "actor.learning_rate": 1e-3,
}


def run(algorithm, changes, executor=None, workdir=None, steps=None):
    """Metrics, the batches' versions by step, and the timeline."""
    config = tiny_config(algorithm, AHEAD | changes)
    options = {} if executor is None else {"executor": executor}
    trainer = hjax.Trainer(config, workdir, **options)
    rows, versions = [], []
    try:
        trainer.prepare()
        while trainer.step_number < (steps or config.steps):
            rows.append(computed(trainer.step()))
            mask = trainer.batch["response_mask"]
            versions.append(sorted(set(trainer.batch["versions"][mask].tolist())))
        if workdir is not None:
            trainer.run()
        return rows, versions, trainer.timeline.spans()
    finally:
        trainer.close()


@pytest.fixture(scope="module")
def one_step_off():
    return run("GRPO", {"eval.every": 2})


@pytest.mark.extended
def test_a_batch_is_generated_with_exactly_the_version_that_is_its_turn(one_step_off):
    rows, versions, _ = one_step_off
    assert versions == [[0], [0], [1], [2], [3], [4]]
    assert [row["rollout/staleness"] for row in rows] == [0, 1, 1, 1, 1, 1]
    assert {row["rollout/dropped"] for row in rows} == {0}
    assert [row["step"] for row in rows if "eval/reward" in row] == [1, 2, 4, 6]


@pytest.mark.extended
def test_two_runs_are_equal_also_on_workers_that_share_nothing(one_step_off):
    executor = functools.partial(PicklingExecutor, ObjectStore())
    assert run("GRPO", {"eval.every": 2}, executor)[0] == one_step_off[0]


@pytest.mark.extended
def test_the_first_steps_are_those_of_a_synchronous_run(one_step_off):
    config = AHEAD | {"rollout.max_staleness": 0, "rollout.deterministic": False}
    with trainer_of("GRPO", config | {"steps": 2, "eval.every": 2}) as trainer:
        first, second = (computed(row) for row in trainer.run())
    ahead = {k: v for k, v in one_step_off[0][0].items() if not k.startswith("rollout/")}
    assert ahead == {k: v for k, v in first.items() if not k.startswith("rollout/")}
    assert one_step_off[0][1]["actor/loss"] != second["actor/loss"]


@pytest.mark.parametrize(
    "algorithm", ["PPO", *(pytest.param(n, marks=pytest.mark.slow) for n in ("ReMax", "SafeRLHF"))]
)
@pytest.mark.extended
def test_every_algorithm_runs_ahead(algorithm):
    changes = {"rollout.max_staleness": 4, "algorithm.correction": "truncated"}
    rows, versions, _ = run(algorithm, changes)
    assert versions == [[0], [0], [0], [0], [0], [1]]
    assert all(np.isfinite(row["actor/loss"]) for row in rows)
    assert rows[-1]["actor/correction"] != 1.0


def test_without_a_schedule_the_newest_weights_generate_and_none_is_too_old():
    rows, versions, _ = run("GRPO", {"rollout.deterministic": False, "rollout.max_staleness": 2})
    for step, found in enumerate(versions):
        assert step - 2 <= found[0] <= found[-1] <= step
    assert not [t for t in threading.enumerate() if t.name == "async rollout"]  # once it is closed
    assert all(0 <= row["rollout/staleness"] <= 2 for row in rows)


@pytest.mark.extended
def test_generation_and_learning_run_at_the_same_time(tmp_path):
    (tmp_path / "slow.py").write_text(
        "import hjax, time\n"
        "class Slow(hjax.workers.Actor):\n"
        "    @hjax.protocol('3D_PROTO', phase='update', reads=None)\n"
        "    def update_actor(self, batch, pretrain=None):\n"
        "        time.sleep(0.4)\n"
        "        return super().update_actor(batch, pretrain)\n"
        "class Slowly(hjax.algorithms.GRPO):\n"
        "    workers = {'actor': Slow}\n"
    )
    with trainer_of(f"{tmp_path}/slow.py:Slowly", AHEAD) as trainer:
        generator = trainer.roles.groups["rollout"].worker.generator
        quick = generator.generate

        def slow(*arguments, **options):
            time.sleep(0.4)
            return quick(*arguments, **options)

        generator.generate = slow
        trainer.run()
        spans = trainer.timeline.spans()
    updates = [s for s in spans if s.method == "update_actor"]
    generations = [s for s in spans if s.method == "generate_sequences"]
    assert len(updates) == len(generations) == 6  # none for a seventh step
    for generated, learned in zip(generations[2:], updates[1:-1], strict=True):
        # While the batch before it is learned from.
        both = min(generated.end, learned.end) - max(generated.start, learned.start)
        assert both > 0.1


@pytest.mark.parametrize("staleness, expected", [
    (1, [[0], [0, 1], [1, 2], [2, 3], [3, 4]]),
    pytest.param(2, [[0], [0], [0, 1], [1, 2], [2, 3]], marks=pytest.mark.slow),
])  # fmt: skip
@pytest.mark.extended
def test_a_response_goes_on_under_newer_weights(staleness, expected):
    changes = {"rollout.max_staleness": staleness, "rollout.partial_tokens": 2, "steps": 5}
    rows, versions, _ = run("GRPO", changes)
    assert versions == expected
    if staleness == 2:
        executor = functools.partial(PicklingExecutor, ObjectStore())
        assert run("GRPO", changes, executor)[0] == rows


@pytest.mark.extended
def test_versions_stand_beside_the_tokens_that_they_drew():
    changes = {"rollout.partial_tokens": 1, "rollout.deterministic": False, "steps": 4}
    with trainer_of("ReMax", AHEAD | changes) as trainer:
        for step in range(4):
            trainer.step()
            batch = trainer.batch
            versions, mask = batch["versions"], batch["response_mask"]
            assert versions.dtype == np.int32 and versions.shape == mask.shape
            assert (versions[~mask] == 0).all()
            assert ((np.diff(versions, axis=1) >= 0) | ~mask[:, 1:]).all()  # they rise
            assert versions[mask].min() >= step - 1
            assert len(batch["response_text"]) == len(mask)


@pytest.mark.extended
def test_neither_weights_nor_unfinished_responses_pass_through_the_controller(monkeypatch):
    asked, result = set(), StoredFuture.result

    def noted(self, *arguments):
        asked.add(self.label)
        return result(self, *arguments)

    monkeypatch.setattr(StoredFuture, "result", noted)
    executor = functools.partial(PicklingExecutor, ObjectStore())
    changes = {"rollout.partial_tokens": 1, "rollout.deterministic": False, "steps": 3}
    run("GRPO", changes, executor)
    assert "rollout.continue_sequences" in asked  # a batch, which learning joins
    assert not asked & {"actor.publish", "rollout.receive_weights", "rollout.commit"}
    assert "rollout.generate_sequences" not in asked  # nor what is left off


# Resuming


def content(workdir):
    return [computed(row) for row in read_rows(workdir)]


@pytest.mark.parametrize("partial", [0, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.extended
def test_a_scheduled_run_resumes_to_the_same_numbers(partial, tmp_path):
    changes = AHEAD | {"checkpoint.every": 2, "rollout.max_staleness": 2, "eval.every": 3}
    changes |= {"rollout.partial_tokens": partial}
    with trainer_of("GRPO", changes, tmp_path / "whole") as trainer:
        trainer.run()
    with trainer_of("GRPO", changes, tmp_path / "parts") as trainer:
        for _ in range(3):  # the third is in no checkpoint
            trainer.step()
    with trainer_of("GRPO", changes, tmp_path / "parts") as trainer:
        assert [row["step"] for row in trainer.run()] == [3, 4, 5, 6]
    assert content(tmp_path / "parts") == content(tmp_path / "whole")


@pytest.mark.slow
def test_what_was_on_its_way_is_drawn_again(tmp_path):
    changes = AHEAD | {"rollout.deterministic": False, "rollout.max_staleness": 3, "steps": 5}
    seen = []
    for steps in (2, 5):
        with trainer_of("GRPO", changes, tmp_path / "run") as trainer:
            trainer.prepare()
            while trainer.step_number < steps:
                trainer.step()
                seen += trainer.batch["prompt_text"][::2]
            trainer.save()
    checkpoints = tmp_path / "run" / "checkpoints"
    state = json.loads((checkpoints / "2" / "controller.json").read_text())
    assert state["prompts"]["position"] == 2 * 8 and state["ahead"] == {"number": 2, "dropped": 0}
    with trainer_of("GRPO", {"steps": 5, "placement": "disaggregate"}) as trainer:
        expected = []
        for _ in range(5):
            trainer.step()
            expected += trainer.batch["prompt_text"][::2]
    assert seen == expected  # none left out, none twice


# The queue and the schedule


def batches(*oldest):
    return [PendingBatch(number, {}, version, ready=True) for number, version in enumerate(oldest)]


def test_a_batch_is_as_old_as_its_first_tokens():
    pending = PendingBatch(0, {})
    for version in (0, 1):
        _VersionSelector(None, pending).record_version(version)
    assert pending.oldest_version == 0


@pytest.mark.extended
def test_what_is_too_old_is_dropped_and_counted():
    queue = BatchQueue(staleness=1)
    queue.batches.extend([*batches(0, 2, 3), PendingBatch(3, {})])
    assert queue.take(1).oldest_version == 0  # one behind
    assert queue.take(4).oldest_version == 3 and queue.dropped == 1  # two behind: dropped
    assert queue.take(4) is None and len(queue.batches) == 1  # not generated yet


@pytest.mark.extended
def test_a_run_goes_on_with_the_next_where_a_batch_was_dropped():
    with trainer_of("GRPO", AHEAD | {"steps": 4}) as trainer:
        trainer.step()
        # As if the weights had moved on by more than the batch on its way may lag behind.
        trainer.async_rollout.queue.staleness = 0
        trainer.async_rollout.schedule = StalenessSchedule(0, deterministic=False, steps=9)
        rows = [trainer.step() for _ in range(2)]
    assert [row["rollout/dropped"] for row in rows] == [1, 1]
    assert [row["rollout/staleness"] for row in rows] == [0, 0]


def test_a_schedule_never_goes_back_and_never_passes_its_bound():
    for staleness, parts, every in [(1, 1, 0), (1, 4, 0), (4, 3, 0), (2, 2, 3), (3, 1, 5)]:
        schedule = StalenessSchedule(staleness, True, every, parts)
        found = [schedule.version(n, p) for n in range(20) for p in range(parts)]
        assert found == sorted(found)
        for n in range(20):
            first, last = schedule.version(n, 0), schedule.version(n, parts - 1)
            assert n - staleness <= first <= last <= n
            if every:
                assert first >= n // every * every  # nothing reaches over a checkpoint


@pytest.mark.extended
def test_more_steps_than_were_planned_go_on_as_scheduled():
    with trainer_of("GRPO", AHEAD | {"steps": 2, "eval.every": 1}) as trainer:
        found = []
        for _ in range(5):
            trainer.step()
            found.append(trainer.batch["versions"].max())
            trainer.evaluate()
    assert found == [0, 0, 1, 2, 3]


# What goes wrong


def test_an_error_while_collecting_is_the_steps(tmp_path):
    (tmp_path / "wrong.py").write_text(
        "import hjax\n"
        "class Wrong(hjax.algorithms.GRPO):\n"
        "    def collect(self, prompts):\n"
        "        if prompts['step'] == 3:\n"
        "            raise hjax.errors.RunError('no third batch')\n"
        "        return super().collect(prompts)\n"
    )
    with trainer_of(f"{tmp_path}/wrong.py:Wrong", AHEAD) as trainer:
        with pytest.raises(RunError, match="no third batch"):
            trainer.run()


@pytest.mark.extended
def test_an_error_while_generating_is_the_steps_that_learns_from_it(tmp_path, monkeypatch):
    with trainer_of("GRPO", AHEAD) as trainer:
        trainer.step()
        rollout = trainer.roles.groups["rollout"].worker
        monkeypatch.setattr(rollout.generator, "generate", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError) as caught:
            trainer.run()
    assert "in the call rollout.generate_sequences" in caught.value.__notes__


@pytest.mark.parametrize(
    "algorithm, changes, message",
    [
        ("GRPO", {"placement": "colocate"}, "max_staleness=1 needs a rollout with devices of its"),
        ("GRPO", {"rollout.max_staleness": 0}, "deterministic=True is for generation ahead"),
        (
            "GRPO",
            {"rollout.max_staleness": 0, "rollout.deterministic": False,
             "rollout.partial_tokens": 2},
            "rollout.partial_tokens=2 is for generation ahead",
        ),
    ],
)  # fmt: skip
def test_what_does_not_go_together_is_refused(algorithm, changes, message):
    with pytest.raises(ConfigError, match=message) as caught:
        hjax.Trainer(tiny_config(algorithm, AHEAD | changes))
    assert "\n" not in str(caught.value)


@pytest.mark.extended
def test_a_step_of_ones_own_is_run_one_after_another_or_refused(tmp_path):
    (tmp_path / "old.py").write_text(
        "import hjax\n"
        "class Old(hjax.algorithms.GRPO):\n"
        "    def step(self, prompts):\n"
        "        return super().step(prompts)\n"
    )
    with pytest.raises(ConfigError, match="Old defines step as a whole.*collect and learn"):
        hjax.Trainer(tiny_config(f"{tmp_path}/old.py:Old", AHEAD))
    with trainer_of(f"{tmp_path}/old.py:Old", {"steps": 1}) as trainer:
        assert np.isfinite(trainer.step()["actor/loss"])


class Turns:
    """Groups that keep what they are asked."""

    def __init__(self):
        self.said = []

    def __getattr__(self, name):
        def call(*arguments, **options):
            self.said.append(name)
            return name

        return call


def test_one_thread_at_a_time_draws_turns():
    """An evaluation beside generation ahead: nobody takes the weights of turns in progress."""
    policy = RolloutPolicy(Turns(), Turns(), ())
    done = []

    def other():
        policy.begin_turns(1, 8)
        done.append(list(policy.rollout.said))
        policy.end_turns()

    policy.end_turns()  # of nobody
    policy.begin_turns(1, 8)
    thread = threading.Thread(target=other)
    thread.start()
    policy.draw_turns([])
    thread.join(0.2)
    assert thread.is_alive() and not done
    policy.end_turns()
    thread.join(60)
    asked = [name for name in done[0] if name.endswith("turns")]
    assert asked == ["end_turns", "begin_turns", "draw_turns", "end_turns", "begin_turns"]
    policy.begin_turns(1, 8)  # it has let go of them
