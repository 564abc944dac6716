r"""Recipes of the Tinker cookbook, unmodified, against the training service (slow).

    pip install tinker==0.38.0 && pip install --no-deps tinker-cookbook==0.6.1 tml-renderers==0.2.1
    pip install aiohttp blobfile chz cloudpickle datasets pillow pylatexenc pyrage sympy tiktoken \
        torch
    HJAX_TEST_DATA=DIR python -m pytest -m slow tests/extended/test_tinker_cookbook.py

docs/training_service.md has the outcome as a table.
"""

import contextlib
import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

COOKBOOK = importlib.util.find_spec("tinker_cookbook")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(COOKBOOK is None, reason="needs tinker-cookbook, see the module's text"),
]


@pytest.fixture(scope="module")
def model(test_data):
    return test_data / "weights" / "stories260K-hf"


@pytest.fixture(scope="module")
def url(model, tmp_path_factory):
    process = subprocess.Popen(
        [
            sys.executable, "-m", "hjax.launch.serve", "--protocol=tinker", f"--model={model}",
            f"--store={tmp_path_factory.mktemp('store')}", "--name=any", "--port=0",
        ],
        stdout=subprocess.PIPE, text=True, env=os.environ,
    )  # fmt: skip
    with contextlib.ExitStack() as stack:
        stack.callback(process.stdout.close)
        stack.callback(process.wait)
        stack.callback(process.kill)
        yield process.stdout.readline().rstrip("\n").rpartition(" on ")[2]


@pytest.fixture
def recipe(url, model, tmp_path):
    """Runs a recipe; returns the rows of its metrics."""

    def run(name, log="log", **options):
        folder = tmp_path / log
        options = {
            "model_name": model, "renderer_name": "role_colon", "lora_rank": 32,
            "log_path": folder, "behavior_if_log_dir_exists": "resume",
        } | options  # fmt: skip
        done = subprocess.run(
            [
                sys.executable, "-m", f"tinker_cookbook.recipes.{name}",
                *(f"{key}={value}" for key, value in options.items()),
            ],
            capture_output=True, text=True, cwd=tmp_path, timeout=1200,
            env=os.environ | {
                "TINKER_BASE_URL": url, "TINKER_API_KEY": "tml-test", "TINKER_TELEMETRY": "0",
                "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1",
            },
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]
        return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]

    return run


def column(rows, name):
    return np.array([row[name] for row in rows if name in row])


def test_supervised_and_resumed(recipe):
    data = pathlib.Path(COOKBOOK.origin).parent / "example_data" / "conversations.jsonl"
    options = {"dataset": data, "max_length": 256, "batch_size": 4, "learning_rate": 0.002}
    rows = recipe("chat_sl.train", **options)
    losses = column(rows, "train_mean_nll")
    assert losses[-3:].mean() < losses[:3].mean() - 0.3
    more = recipe("chat_sl.train", **options, num_epochs=2)
    assert len(more) > len(rows)


@pytest.mark.parametrize(
    "options", [{"loss_fn": "importance_sampling"}, {"loss_fn": "ppo", "max_steps_off_policy": 1}]
)
def test_the_wire_of_reinforcement(recipe, options):
    """Groups of an untrained model are constant, so this shows the wire alone."""
    rows = recipe(
        "math_rl.train", env="arithmetic", group_size=4, groups_per_batch=4, max_tokens=6,
        max_steps=3, **options,
    )  # fmt: skip
    assert len(column(rows, "env/all/reward/total")) == 3
    # Trainer and sampler are one forward.
    assert column(rows, "optim/kl_sample_train_v2").max() < 1e-6
