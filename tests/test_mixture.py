"""Several files with names and weights: shares, resume, metrics by name, evaluation sets."""

import json
import pathlib
from collections import Counter
from typing import Any

import numpy as np
import pytest
from helpers import ONE_DEVICE, computed, read_rows, trainer_of

from hjax.data.dataset import interleave, split_held_out
from hjax.data.read_options import parse_mixture
from hjax.data.tasks import get_task
from hjax.errors import ConfigError
from hjax.run.examples import make_example_sources
from hjax.run.inputs import load_inputs
from hjax.settings.config_loading import load_config

REWARD = """
def reward(prompts, responses, value, **columns):
    return value
"""


@pytest.mark.parametrize(
    ("text", "path", "weights"),
    [
        ("math=a.jsonl*2, code=b.parquet", "math=a.jsonl,code=b.parquet", {"math": 2, "code": 1}),
        ("z=z.jsonl*.5,a=data/*.jsonl", "z=z.jsonl,a=data/*.jsonl", {"z": 0.5, "a": 1}),
        ("x=owner/name:train * 3", "x=owner/name:train", {"x": 3}),
    ],
)
def test_what_is_read_of_a_mixture(text, path, weights):
    assert parse_mixture(text) == (path, weights)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a.jsonl, b=b.jsonl", "'a.jsonl' is not so; files are NAME=FILE or NAME=FILE*WEIGHT"),
        ("a=a.jsonl*0", "'a=a.jsonl*0' is not so"),
        ("a=a.jsonl*-1", "is not so"),
        ("a=a.jsonl, a=b.jsonl", "a is there twice"),
    ],
)
def test_what_is_no_mixture(text, said):
    with pytest.raises(ConfigError) as caught:
        parse_mixture(text)
    assert said in str(caught.value)


def test_rows_of_several_sets_take_turns():
    assert interleave(["b", "b", "b", "a", "c", "a"]) == [0, 3, 4, 1, 5, 2]


def write(path: pathlib.Path, rows: list[dict[str, Any]]) -> pathlib.Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def keys(tmp_path_factory) -> dict[str, Any]:
    """A mixture whose names are not in the order of the alphabet, of 9 and 31 rows."""
    folder = tmp_path_factory.mktemp("mixture")
    get_task("sorting").tokenizer().save(folder / "tokenizer")
    (folder / "reward.py").write_text(REWARD)
    files = {
        name: write(
            folder / f"{name}.jsonl",
            [
                {"prompt": f"{i % 10}{i // 10}>", "response": answer, "value": base + i / 100,
                 "data_source": "openai/gsm8k"}
                for i in range(count)
            ],
        )
        for name, count, base, answer in (("zeta", 9, 0.7, "1"), ("alpha", 31, 0.1, "2"))
    }  # fmt: skip
    return {
        **ONE_DEVICE,
        "data.task": "",
        "data.mixture": f"zeta={files['zeta']}*3, alpha={files['alpha']}",
        "data.eval_fraction": 0.3,
        "data.eval_size": 6,
        "eval.every": 2,
        "eval.prompts": 4,
        "tokenizer.path": str(folder / "tokenizer"),
        "reward.function": f"{folder}/reward.py:reward",
    }


def test_shares_rewards_and_evaluations_by_name(keys, tmp_path):
    with trainer_of("GRPO", keys, tmp_path / "whole") as trainer:
        held_out = trainer.inputs.held_out
        assert Counter(trainer.inputs.train.columns["mixture"]) == {"zeta": 6, "alpha": 22}
        assert held_out.columns["mixture"] == ["zeta", "alpha"] * 3
        assert set(held_out.columns["data_source"]) == {"openai/gsm8k"}  # as the file has it
        values = np.array(held_out.columns["value"][:4])
        trainer.run(1)
        batch = trainer.batch
        trainer.run(3)
    rows = read_rows(tmp_path / "whole")
    for row in rows:
        assert (row["mixture/zeta/share"], row["mixture/alpha/share"]) == (0.75, 0.25)
    names, rewards = np.array(batch["columns"]["mixture"]), np.array(batch["columns"]["value"])
    for name in ("zeta", "alpha"):
        expected = rewards[names == name].mean()
        assert rows[0][f"mixture/{name}/reward"] == pytest.approx(expected, abs=1e-6)
    for row in (rows[0], rows[1]):
        assert row["eval/reward"] == pytest.approx(values.mean(), abs=1e-6)
        assert row["eval/zeta/reward"] == pytest.approx(values[::2].mean(), abs=1e-6)
        assert row["eval/alpha/reward"] == pytest.approx(values[1::2].mean(), abs=1e-6)
    # Stopped after an odd number of steps, it goes on with the same prompts.
    for steps in (1, 3):
        with trainer_of("GRPO", keys, tmp_path / "resumed") as trainer:
            trainer.run(steps)
    resumed = read_rows(tmp_path / "resumed")
    assert [computed(row) for row in resumed] == [computed(row) for row in rows]


@pytest.mark.parametrize("key", ["data.mixture", "data.weights"])
def test_demonstrations_are_drawn_in_the_shares_too(key, keys, tmp_path):
    changes = {k: v for k, v in keys.items() if k != "cluster.devices_per_process"}
    if key == "data.weights":
        both = [
            {"prompt": f"{i % 10}{i // 10}>", "response": "1" if i < 9 else "2",
             "data_source": "zeta" if i < 9 else "alpha"}
            for i in range(40)
        ]  # fmt: skip
        changes["data.mixture"], changes[key] = "", "zeta=3, alpha=1"
        changes["data.path"] = str(write(tmp_path / "both.jsonl", both))
    changes |= {"warm_start.batch": 8, "eval.every": 0, "reward.function": ""}
    config = load_config("sft.py", changes)
    config.rollout.max_response_length = 4
    inputs = load_inputs(config, "demonstrations")
    from hjax.algorithms import get_algorithm

    learned = make_example_sources(config, get_algorithm("SFT"), inputs).learned
    one = inputs.tokenizer.encode("1", add_special=False)[0]
    for _ in range(5):
        assert (learned()["responses"][:, 0] == one).sum() == 6


def test_named_evaluation_sets_beside_a_path(keys, tmp_path):
    sets = {
        "hard": write(tmp_path / "h.jsonl", [{"prompt": "1>", "value": 0.9}] * 2),
        "easy": write(tmp_path / "e.jsonl", [{"prompt": "2>", "value": 0.2}] * 11),
    }
    first = keys["data.mixture"].partition("*")[0].partition("=")[2]
    changes = {
        **keys, "data.mixture": "", "data.path": first, "data.eval_size": 8, "eval.prompts": 6,
        "data.eval_path": ", ".join(f"{name}={path}" for name, path in sets.items()),
    }  # fmt: skip
    with trainer_of("GRPO", changes) as trainer:
        metrics = trainer.evaluate()
        assert trainer.inputs.held_out.columns["mixture"] == ["hard", "easy"] * 2 + ["easy"] * 4
    assert metrics["eval/hard/reward"] == pytest.approx(0.9, abs=1e-6)
    assert metrics["eval/easy/reward"] == pytest.approx(0.2, abs=1e-6)
    assert metrics["eval/reward"] == pytest.approx((2 * 0.9 + 4 * 0.2) / 6, abs=1e-6)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"eval.by": "level"}, "config.eval.by=level: no column of the held-out data, which has"),
        ({"data.weights": "a=1"}, "config.data.weights=a=1 beside config.data.mixture"),
        ({"data.path": "x.jsonl"}, "config.data.path=x.jsonl beside config.data.mixture"),
    ],
)
def test_settings_that_do_not_go_together(changes, said, keys):
    with pytest.raises(ConfigError) as caught:
        config = load_config("base.py", {**keys, "algorithm.name": "GRPO", **changes})
        load_inputs(config)
    assert said in str(caught.value)


def test_a_column_of_many_values_names_no_groups(keys, tmp_path):
    rows = [{"prompt": "1>", "value": 0.5, "id": i} for i in range(60)]
    path = write(tmp_path / "rows.jsonl", rows)
    changes = {"data.mixture": "", "data.path": str(path), "data.eval_path": str(path)}
    config = load_config(
        "base.py",
        {**keys, "algorithm.name": "GRPO", **changes, "data.eval_size": 0, "eval.by": "id"},
    )
    with pytest.raises(ConfigError, match="eval.by=id: 60 values, of at most 50"):
        load_inputs(config)


def test_a_file_that_has_the_column_is_refused(keys, tmp_path):
    path = write(tmp_path / "rows.jsonl", [{"prompt": "1>", "value": 1, "mixture": "own"}] * 4)
    config = load_config("base.py", {**keys, "data.mixture": f"a={path}", "algorithm.name": "GRPO"})
    with pytest.raises(ConfigError, match="rows.jsonl:1: it has a column 'mixture'"):
        load_inputs(config)


def test_of_each_source_a_share_is_held_out():
    from hjax.data.dataset import Dataset

    names = ["b"] * 4 + ["a"] * 30 + ["b"] * 2
    dataset = Dataset(
        prompt_tokens=[[i] for i in range(36)], prompt_text=None, columns={"n": names}
    )
    train, held_out = split_held_out(dataset, 0.2, seed=5, sources=names)
    assert Counter(held_out.columns["n"]) == {"a": 6, "b": 1}
    rows = sorted(t[0] for t in train.prompt_tokens + held_out.prompt_tokens)
    assert rows == list(range(36))
    assert train.prompt_tokens == sorted(train.prompt_tokens)
