"""Whatever a user hands over is taken, or answered in one line: no traceback, no hang.

Several hundred cases every day, thousands in slow tests, the same ones each time (``derandomize``).
A case that was found here and mended stands as an example beside its test.
"""

import functools
import json
import os
import subprocess
import sys

import jax.numpy as jnp
import pytest
from fuzzing import (
    JSON,
    RUDE,
    TEXTS,
    VALUES,
    answered,
    as_json,
    changed,
    examples,
    folder,
    rude,
    tensor_file,
    torn,
)
from helpers import TINY, save_model
from hypothesis import example, given
from hypothesis import strategies as st
from written_run import written_run

import hjax
from hjax.config import flatten
from hjax.data.dataset import Dataset, PromptSampler
from hjax.data.tokenizer import Tokenizer
from hjax.launch import transition
from hjax.launch.__main__ import parse
from hjax.launch.plan_flags import parse as parse_plan
from hjax.models.checkpoint import Checkpoints, read_state, write_state
from hjax.models.checksums import write_checksums
from hjax.models.huggingface import read_config
from hjax.models.peft_files import Adapter
from hjax.models.safetensors_files import TensorFile
from hjax.models.weights import check_weights
from hjax.planning.hardware import parse_cluster
from hjax.planning.profile import read_profile
from hjax.run.inputs import load_inputs
from hjax.run.placement import make_plan, plan_from_config
from hjax.run.role_groups import describe_roles
from hjax.run.workdir import Workdir
from hjax.settings.config_loading import load_config
from hjax.show.compare import write_comparison
from hjax.show.report import write_report

CONFIGS = ("ppo.py", "grpo.py", "dpo.py", "reward_model.py", "safe_rlhf.py")
KEYS = sorted(flatten(load_config("ppo.py")))
LETTERS = Tokenizer.characters("abcdefghijklmnopqrstuvwxyz0123456789+=> .")


# HJAX_FUZZ=20: so many times the cases.
TIMES = int(os.environ.get("HJAX_FUZZ", "1"))


def often(number):
    """Run a test with so many cases, and more where that is asked for."""
    return examples(number * TIMES)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_thousands_of_cases():
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n", "0", "-m", "not slow", __file__],
        env={**os.environ, "HJAX_FUZZ": "20"},
    )
    assert done.returncode == 0


# Configs


@often(80)
@given(st.sampled_from(CONFIGS), st.dictionaries(st.sampled_from(KEYS) | TEXTS, VALUES, max_size=3))
@example("ppo.py", {"actor.beta1": RUDE})
@example("ppo.py", {"actor.learning_rate": 10**400})
def test_values_of_a_config(name, values):
    with answered():
        hjax.get_config(name, rude(values))


@often(100)
@given(st.lists(st.tuples(st.sampled_from(KEYS) | TEXTS, TEXTS), min_size=1, max_size=3))
def test_config_options_of_a_command(options):
    with answered():
        parse(["--config=ppo.py", *(f"--config.{key}={value}" for key, value in options)])


@often(60)
@given(
    st.lists(TEXTS | st.sampled_from(["--config=", "--workdir=", "--dry_run"]), max_size=3), TEXTS
)
def test_arguments_of_a_command(arguments, config):
    with answered():
        parse([f"--config={config}", *arguments])


SIZES = [key for key in KEYS if isinstance(flatten(load_config("ppo.py"))[key], (int, float, str))]


@often(60)
@given(st.dictionaries(st.sampled_from(SIZES), st.integers(-2, 2**40) | st.floats() | TEXTS,
                       min_size=1, max_size=2))  # fmt: skip
def test_what_a_dry_run_checks(values):
    """Sizes that a config may have and a machine has not, paths, and what does not go together."""
    with answered():
        config = hjax.get_config("ppo.py", TINY | {"algorithm.minibatch": 8} | values)
        algorithm = hjax.algorithms.get_algorithm(config.algorithm.name)
        inputs = load_inputs(config, algorithm.source)
        plan = plan_from_config(config, algorithm, 2)
        describe_roles(config, algorithm, inputs, plan, "cpu")


@often(40)
@given(st.sampled_from(["models", "cluster", "algorithm", "batch", "offload", "numerics"]), TEXTS)
def test_arguments_of_the_planner(flag, text):
    with answered():
        parse_plan(["--models=llama-7b", "--cluster=1x8:a100", f"--{flag}={text}"])
    with answered():
        parse_cluster(text)


@often(40)
@given(st.sampled_from(["--train", "--generate", "--model", "--dtype", "--topology"]), TEXTS)
def test_arguments_of_the_transition(flag, text):
    with answered():
        transition.parse(["--train=1,8,1", "--generate=1,2", f"{flag}={text}"])


# Data


ROWS = [{"prompt": "a+b=", "answer": "c"}, {"prompt": [{"role": "user", "content": "ab"}]},
        {"prompt": "a", "chosen": "b", "rejected": "c", "weight": 1.5}]  # fmt: skip
LINES = b"".join(as_json(row) + b"\n" for row in ROWS)


@functools.cache
def parquet():
    import io

    import pyarrow
    import pyarrow.parquet

    out = io.BytesIO()
    table = pyarrow.table({"prompt": ["a", "b"], "answer": [1, 2], "more": [[1.0], []]})
    pyarrow.parquet.write_table(table, out)
    return out.getvalue()


@st.composite
def data_file(draw):
    kind = draw(st.sampled_from([".jsonl", ".jsonl", ".json", ".parquet", ".txt", ".csv", ""]))
    if kind == ".parquet":
        return kind, draw(torn(parquet()))
    rows = draw(st.lists(st.sampled_from(ROWS).flatmap(changed) | JSON, max_size=3))
    written = b"".join(as_json(row) + b"\n" for row in rows)
    return kind, draw(st.just(written) | torn(LINES) | st.binary(max_size=200))


@often(150)
@given(data_file())
def test_files_of_data(file):
    kind, content = file
    with folder() as home:
        path = home / f"data{kind}"
        path.write_bytes(content)
        with answered():
            Dataset.from_file(path, LETTERS, max_prompt_length=16)
        assert [p.name for p in home.iterdir()] == [path.name]


@often(60)
@given(changed({"size": 4, "seed": 0, "position": 2}))
@example(None)
def test_where_a_run_was_in_its_data(state):
    with answered():
        PromptSampler(4, 2, seed=0).restore(state)


# Models and tokenizers


@functools.cache
def model_files():
    """A model's directory by name: small enough to be read hundreds of times."""
    with folder() as home:
        save_model(home, tokenizer=LETTERS, vocab_size=LETTERS.vocab_size, hidden_size=16,
                   mlp_size=16)  # fmt: skip
        return {path.name: path.read_bytes() for path in home.iterdir()}


def rewritten(name):
    """Other content of one of the model's files."""
    content = model_files()[name]
    if name.endswith(".safetensors"):
        return tensor_file(content)
    return torn(content) | changed(json.loads(content)).map(as_json)


@often(150)
@given(st.data())
def test_models_and_tokenizers(data):
    name = data.draw(st.sampled_from(sorted(n for n in model_files() if "." in n)))
    with folder() as home:
        for file, content in model_files().items():
            (home / file).write_bytes(content)
        (home / name).write_bytes(data.draw(rewritten(name)))
        held = sorted(path.name for path in home.iterdir())
        with answered():
            read_config(home)
        with answered():
            check_weights(home)
        with answered():
            Tokenizer.load(home).encode("a+b")
        if name.endswith(".safetensors"):
            with answered():
                TensorFile(home / name)
        assert sorted(path.name for path in home.iterdir()) == held


@often(40)
@given(st.data())
def test_adapters(data):
    """`adapter_config.json` and what stands beside it."""
    said = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"],
            "base_model_name_or_path": "x", "use_rslora": False}  # fmt: skip
    with folder() as home:
        content = data.draw(changed(said).map(as_json) | torn(as_json(said)))
        (home / "adapter_config.json").write_bytes(content)
        weights = data.draw(tensor_file(model_files()["model.safetensors"]))
        (home / "adapter_model.safetensors").write_bytes(weights)
        with answered():
            Adapter(home)


# What hjax writes itself


PLAN = {"placement": [["actor", "critic"], ["reference"]], "allocation": [1, 1], "layout": {}}


@often(60)
@given(st.sampled_from(["plan", "profile"]), changed(PLAN).map(as_json) | torn(as_json(PLAN)))
@example("plan", as_json(PLAN | {"placement": [[[], "critic"], ["reference"]]}))
def test_plans_and_profiles(kind, content):
    with folder() as home:
        (home / "file.json").write_bytes(content)
        with answered():
            if kind == "plan":
                make_plan(str(home / "file.json"), ["actor", "critic", "reference"], 2)
            else:
                read_profile(home / "file.json")


@functools.cache
def checkpoint_files():
    """A checkpoint's files by their path in it."""
    with folder() as home:
        made = home / "3"
        made.mkdir()
        arrays = {"kernel": jnp.arange(12.0).reshape(3, 4), "bias": jnp.ones(4, jnp.bfloat16)}
        write_state(made, {"actor.params": arrays})()
        (made / "controller.json").write_text('{"step": 3, "seed": 1}')
        write_checksums(made, 3)
        return {str(p.relative_to(made)): p.read_bytes() for p in made.rglob("*") if p.is_file()}


@often(15)
@given(st.data())
def test_damaged_checkpoints_are_found(data):
    files = checkpoint_files()
    name = data.draw(st.sampled_from(sorted(files)))
    kind = data.draw(st.sampled_from(["torn", "torn", "gone", "step", "folder"]))
    with folder() as home:
        at = home / ("4" if kind == "step" else "3")
        for file, content in files.items():
            (at / file).parent.mkdir(parents=True, exist_ok=True)
            (at / file).write_bytes(content)
        whole = kind == "torn"
        if whole:
            content = data.draw(torn(files[name]))
            (at / name).write_bytes(content)
            whole = content == files[name] or not name.startswith(("actor", "controller"))
        elif kind == "gone":
            (at / name).unlink()
        elif kind == "folder":
            (at / name).unlink()
            (at / name).mkdir()
        kept = Checkpoints(home)
        step = int(at.name)
        with answered():
            summed = kept.verify(step)
            # Without its list of sums a checkpoint is one of an earlier version.
            assert whole or not summed, f"{name} ({kind}) is not what was written"
        with answered():
            kept.controller(step)
        with answered():
            kept.repair()
        with answered():
            arrays = {"kernel": jnp.zeros((3, 4)), "bias": jnp.zeros(4, jnp.bfloat16)}
            read_state(at, {"actor.params": arrays})
        kept.close()


@functools.cache
def run_files():
    """What a run leaves behind, by name."""
    with folder() as home:
        written_run(home)
        return {path.name: path.read_bytes() for path in home.iterdir() if path.is_file()}


def rows_of(name):
    """Other content of a run's file: torn, or with a changed value in a row."""
    content = run_files()[name]
    if name.endswith(".jsonl"):
        lines = content.splitlines()
        some = st.integers(0, len(lines) - 1).flatmap(
            lambda at: changed(json.loads(lines[at])).map(
                lambda row: b"\n".join([*lines[:at], as_json(row), *lines[at + 1 :]]) + b"\n"
            )
        )
        return torn(content) | some
    return torn(content) | changed(json.loads(content)).map(as_json)


@often(40)
@given(st.data())
def test_a_run_s_own_files(data):
    """Going on with a run, its report, and a page that compares it: files that were touched."""
    name = data.draw(st.sampled_from(sorted(run_files())))
    with folder() as home:
        for file, content in run_files().items():
            (home / file).write_bytes(content)
        (home / name).write_bytes(data.draw(rows_of(name)))
        held = {path.name for path in home.iterdir()}
        with answered():
            write_report(home)
        with answered():
            write_comparison([home, home], home / "page.html")
        with answered():
            run = Workdir(home)
            run.check(load_config("ppo.py"))
            run.finished()
            run.missing_steps(3)
        left = {path.name for path in home.iterdir()}
        assert left - held <= {"report.html", "page.html"}, left
