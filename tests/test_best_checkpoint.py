"""`checkpoint.best`: which checkpoint is the best by a metric, kept and named."""

import json
import shutil

import jax
import numpy as np
import pytest
from helpers import ONE_DEVICE, read_rows, trainer_of

import hjax
from hjax.errors import ConfigError, DataError
from hjax.models.checkpoint import Checkpoints
from hjax.models.weights import load_trained
from hjax.run.best_checkpoint import best_step, check_has_metric

# An evaluation before the first update, a missing value, a NaN, two that are equal.
ROWS = [
    {"step": 1, "eval/loss": 9.0, "reward/mean": 0.1},
    {"step": 2, "eval/loss": 3.0, "reward/mean": None},
    {"step": 3, "reward/mean": 0.5},
    {"step": 4, "eval/loss": 7.0, "reward/mean": float("nan")},
    {"step": 5, "eval/loss": 7.0, "reward/mean": 0.5},
]


@pytest.mark.parametrize(
    ("metric", "mode", "saved", "found"),
    [
        ("eval/loss", "max", [1, 2, 3, 4, 5], (4, 7.0)),  # not 9: of before the first update
        ("eval/loss", "min", [1, 2, 3, 4, 5], (2, 3.0)),
        ("eval/loss", "min", [4, 5], (4, 7.0)),
        ("eval/loss", "max", [1, 3], None),
        ("reward/mean", "max", [1, 2, 3, 4, 5], (3, 0.5)),
        ("reward/mean", "min", [1, 2, 4, 5], (1, 0.1)),
        ("reward/mean", "max", [2, 4], None),
    ],
)
def test_the_best_of_rows_by_hand(metric, mode, saved, found):
    assert best_step(ROWS, saved, metric, mode) == found


def test_it_stays_beside_the_newest_until_a_better_one_is_saved(tmp_path):
    rows = [{"step": step, "x": x} for step, x in enumerate([0.2, 0.9, 0.3, 0.4, 0.95, 0.1], 1)]
    kept, best = [], []

    def choose(saved):
        best.append(best_step(rows, saved, "x", "max")[0])
        return best[-1]

    checkpoints = Checkpoints(tmp_path, keep=2, best=choose)
    for row in rows:
        checkpoints.save(row["step"], lambda folder: [], {"step": row["step"]})
        checkpoints.wait()
        kept.append(sorted(int(path.name) for path in tmp_path.iterdir()))
    assert kept == [[1], [1, 2], [2, 3], [2, 3, 4], [4, 5], [5, 6]]
    assert best == [1, 2, 2, 2, 5, 5]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run whose best checkpoint, by the entropy, is not its last; the same one stopped there."""
    folder = tmp_path_factory.mktemp("best")
    keys = {
        **ONE_DEVICE, "checkpoint.every": 1, "checkpoint.keep": 1, "actor.learning_rate": 0.05,
        "checkpoint.best": "actor/entropy", "checkpoint.best_mode": "max",
    }  # fmt: skip
    with trainer_of("GRPO", keys, folder / "run") as trainer:
        trainer.run(4)
    entropies = [row["actor/entropy"] for row in read_rows(folder / "run")]
    best = 1 + entropies.index(max(entropies))
    assert best < 4
    with trainer_of("GRPO", keys, folder / "stopped") as trainer:
        trainer.run(best)
    return folder / "run", best, max(entropies), folder / "stopped"


def test_a_run_keeps_its_best_and_says_which(run):
    workdir, best, value, _ = run
    assert sorted(path.name for path in (workdir / "checkpoints").iterdir()) == [str(best), "4"]
    assert json.loads((workdir / "best.json").read_text()) == {
        "step": best, "metric": "actor/entropy", "mode": "max", "value": value,
    }  # fmt: skip


def test_its_paths_name_its_weights(run):
    workdir, best, _, stopped = run
    expected = load_trained(stopped)[1]
    for path in (f"{workdir}/checkpoints/best", f"{workdir}/checkpoints/{best}"):
        jax.tree.map(np.testing.assert_array_equal, load_trained(path)[1], expected)
    newest = load_trained(workdir)[1]
    assert not np.array_equal(newest["embedding"], expected["embedding"])
    prompts = ["312>"]
    texts = [
        hjax.load_model(path).generate(prompts, 4, 0.0)[0].tokens
        for path in (stopped, f"{workdir}/checkpoints/best")
    ]
    assert list(texts[0]) == list(texts[1])


def test_a_run_starts_from_the_best_of_another(run):
    workdir, _, _, stopped = run
    rewards = []
    for path in (f"{workdir}/checkpoints/best", str(stopped)):
        with trainer_of("GRPO", {**ONE_DEVICE, "actor.path": path}) as trainer:
            rewards.append(trainer.step()["actor/entropy"])
    assert rewards[0] == rewards[1]


def test_what_is_not_there_is_said(run, tmp_path):
    workdir, best, _, _ = run
    with pytest.raises(DataError, match=rf"checkpoints/77: no such .*; saved: {best}, 4"):
        hjax.load_model(workdir / "checkpoints" / "77")
    shutil.copytree(workdir, tmp_path / "copy")
    (tmp_path / "copy" / "best.json").unlink()
    with pytest.raises(DataError, match="no best checkpoint .*; set checkpoint.best"):
        hjax.load_model(tmp_path / "copy" / "checkpoints" / "best")


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"checkpoint.best": "eval/reward"}, "nothing is evaluated; set config.eval.every above 0"),
        (
            {"checkpoint.best": "eval/reward", "eval.every": 3, "checkpoint.every": 4},
            "every 3 steps rarely meet checkpoints every 4",
        ),
        ({"checkpoint.best": "x", "checkpoint.best_mode": "avg"}, "must be one of max, min"),
    ],
)
def test_settings_that_find_no_best(keys, said):
    with pytest.raises(ConfigError, match=said):
        hjax.get_config("ppo.py", {"eval.every": 0, **keys})


def test_a_metric_that_a_run_lacks_ends_it_at_its_first_step():
    check_has_metric("", [{"step": 1}])
    check_has_metric("eval/reward", [])
    with pytest.raises(ConfigError, match="'eval/rewrad': no metric .* mean eval/reward?"):
        check_has_metric("eval/rewrad", [{"step": 1, "eval/reward": 1.0, "loss": 2.0}])
    with trainer_of("GRPO", {**ONE_DEVICE, "checkpoint.best": "actor/entrpy"}) as trainer:
        with pytest.raises(ConfigError, match="did you mean actor/entropy?"):
            trainer.step()
