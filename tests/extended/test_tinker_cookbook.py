r"""Recipes of the Tinker cookbook, unmodified and offline, against the training service (slow).

    pip install tinker==0.38.0 && pip install --no-deps tinker-cookbook==0.6.1 tml-renderers==0.2.1
    pip install aiohttp blobfile chz cloudpickle datasets pillow pylatexenc pyrage sympy tabulate \
        termcolor tiktoken torch
    HJAX_TEST_DATA=DIR python -m pytest -m slow tests/extended/test_tinker_cookbook.py

Its two judges of a server are in the source distribution alone: HJAX_COOKBOOK_SOURCE names where
that is unpacked, or they are skipped. The model is trained once, and kept in pytest's cache.
docs/training_service.md has the outcome as a table.
"""

import importlib.util
import os
import pathlib
import re

import cookbook_tasks
import numpy as np
import pytest
from cookbook_tasks import KNOWN, run_program, run_recipe, warm_model

COOKBOOK = importlib.util.find_spec("tinker_cookbook")
SOURCE = os.environ.get("HJAX_COOKBOOK_SOURCE", "")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(COOKBOOK is None, reason="needs tinker-cookbook, see the module's text"),
]
needs_source = pytest.mark.skipif(
    not SOURCE, reason="HJAX_COOKBOOK_SOURCE=DIR: the cookbook's source distribution, unpacked"
)
# Gives compare_sampling_training_logprobs the document that it would download, from torch.
LOCAL_DOCUMENT = """
import pathlib, types
import httpx, torch
file = pathlib.Path(torch.__file__).parent / "autograd" / "forward_ad.py"
httpx.get = lambda url: types.SimpleNamespace(
    text=file.read_text(), raise_for_status=lambda: None
)
"""


@pytest.fixture(scope="module")
def model(test_data, request):
    """A model that knows a little of the recipes' tasks."""
    folder = pathlib.Path(request.config.cache.mkdir("cookbook"))
    if not (folder / "model" / "config.json").exists():
        return warm_model(test_data / "weights" / "stories260K-hf", folder)
    return folder / "model"


@pytest.fixture(scope="module")
def url(model, tmp_path_factory):
    with cookbook_tasks.served(model, tmp_path_factory.mktemp("store")) as found:
        yield found


@pytest.fixture
def folder(model, test_data, tmp_path):
    """A working directory with the data sets, and the model under a name that is known."""
    (tmp_path / KNOWN).parent.mkdir()
    (tmp_path / KNOWN).symlink_to(model)
    dialogues = test_data / "hh-rlhf" / "harmless-base-test.jsonl.gz"
    cookbook_tasks.write_data_sets(tmp_path, dialogues)
    return tmp_path


@pytest.fixture
def recipe(url, folder):
    def run(name, **options):
        return run_recipe(url, folder, name, **options)

    return run


def column(rows, name):
    return np.array([row[name] for row in rows if name in row])


COMMON = {
    "model_name": KNOWN, "renderer_name": "role_colon", "behavior_if_log_dir_exists": "resume"
}  # fmt: skip


def test_supervised_and_resumed(recipe):
    data = pathlib.Path(COOKBOOK.origin).parent / "example_data" / "conversations.jsonl"
    options = {**COMMON, "dataset": data, "max_length": 256, "batch_size": 4}
    options["learning_rate"] = 0.002
    rows = recipe("chat_sl.train", **options)
    losses = column(rows, "train_mean_nll")
    assert losses[-3:].mean() < losses[:3].mean() - 0.3
    more = recipe("chat_sl.train", **options, num_epochs=2)
    assert len(more) > len(rows)


@pytest.mark.parametrize(
    "options",
    [{"loss_fn": "importance_sampling"}, {"loss_fn": "ppo", "max_steps_off_policy": 1}],
    ids=["importance_sampling", "asynchronous_ppo"],
)
def test_sums(recipe, options):
    rows = recipe(
        "math_rl.train", **COMMON, env="arithmetic", group_size=16, groups_per_batch=16,
        max_tokens=12, max_steps=3, learning_rate=1e-3, **options,
    )  # fmt: skip
    assert len(column(rows, "env/all/reward/total")) == 3
    norms = column(rows, "grad_norm")
    assert len(norms) == 3 and norms.max() > 0
    # Trainer and sampler are one forward.
    assert column(rows, "optim/kl_sample_train_v2")[0] < 1e-6


def test_guessing_a_number(recipe):
    rows = recipe(
        "multiplayer_rl.guess_number.train", **COMMON, group_size=4, batch_size=4, max_tokens=16,
        max_steps=2, eval_every=0, learning_rate=1e-3,
    )  # fmt: skip
    norms = column(rows, "grad_norm")
    assert len(norms) == 2 and norms.min() > 0


def test_supervised_loop(recipe):
    rows = recipe(
        "sl_loop", model_name=KNOWN, batch_size=8, max_length=256, learning_rate=0.002, max_steps=12
    )
    losses = column(rows, "train_mean_nll")
    assert losses[-3:].mean() < losses[:3].mean() - 0.1


@pytest.mark.parametrize("loss", ["importance_sampling", "cispo", "gspo"])
def test_reinforcement_loop(recipe, loss):
    rows = recipe(
        "rl_loop", model_name=KNOWN, loss_fn=loss, batch_size=8, group_size=8, max_tokens=20,
        max_steps=2, learning_rate=1e-3,
    )  # fmt: skip
    norms = column(rows, "grad_norm")  # of steps in which a reward was earned
    assert len(norms) and norms.min() > 0


def test_preferences(recipe):
    rows = recipe(
        "preference.dpo.train", **COMMON, dataset="hhh", batch_size=8, max_length=256, max_steps=6,
        learning_rate=1e-3, dpo_beta=0.1,
    )  # fmt: skip
    losses = column(rows, "dpo_loss")
    assert losses[0] == pytest.approx(np.log(2), abs=1e-3)
    assert len(losses) == 6 and (np.abs(np.diff(losses)) > 0).all()


@needs_source
def test_its_judge_of_tempered_log_probs(url, folder):
    said = run_program(
        url, folder, f"{SOURCE}/tests/validate_temperature_logprobs.py", f"base_model={KNOWN}",
        "prompt=Once upon a time", "temperatures=0.5,1.0,1.5",
    )  # fmt: skip
    # Temperature, tokens, pairs, mean and largest difference.
    found = re.findall(r"^ +(\S+) +\d+ +\d+ +(\S+) +(\S+)$", said, re.M)
    assert len(found) == 4 and max(float(largest) for _, _, largest in found) < 1e-3


@needs_source
def test_its_judge_of_trainer_and_sampler(url, folder):
    said = run_program(
        url, folder, f"{SOURCE}/tests/compare_sampling_training_logprobs.py",
        f"model_names={KNOWN}", before=LOCAL_DOCUMENT,
    )  # fmt: skip
    assert float(re.findall(r"'mse\[sample, train\]': ([^,]+)", said)[0]) < 1e-8
