"""What is too large, or does not fit its config.json, is refused before anything is written."""

import json
import time

import numpy as np
import pytest
from helpers import save_model, tiny_config
from safetensors.numpy import load_file, save_file

import hjax
from hjax.data.tasks import get_task
from hjax.errors import ConfigError
from hjax.launch.__main__ import main
from hjax.launch.jax_setup import prepare_jax
from hjax.run import memory_check
from hjax.settings.config_checks import divisors


@pytest.mark.parametrize("n", [1, 2, 12, 97, 144, 360])
def test_divisors_are_all_that_divide(n):
    assert divisors(n) == ", ".join(str(i) for i in range(1, n + 1) if n % i == 0)
    assert divisors(n, 3) == ", ".join(str(3 * i) for i in range(1, n + 1) if n % i == 0)


def test_divisors_of_a_large_number_are_found_at_once():
    begun = time.monotonic()
    assert divisors(2**40 - 1).startswith("1, 3, 5, 11, ") and len(divisors(2**40 - 1)) < 300
    assert divisors(2147483647) == "1, 2147483647"
    assert time.monotonic() - begun < 5


@pytest.mark.parametrize(
    "key, value, allowed",
    [
        ("model.hidden_size", 2147483647, "from 1 to 1048576"),
        ("model.layers", 10**12, "from 1 to 1048576"),
        ("rollout.prompts", 10**18, "from 1 to 1048576"),
        ("rollout.max_response_length", 10**9, "from 0 to 16777216"),
        ("cluster.devices_per_process", 100000000, "from 0 to 4096"),
    ],
)
def test_absurd_sizes_are_refused_at_once(key, value, allowed, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    begun = time.monotonic()
    assert main(["--config=ppo.py", f"--config.{key}={value}", "--workdir=run"]) == 2
    said = capsys.readouterr().err
    assert said == f"hjax: error: config.{key}={value}: must be {allowed}\n"
    assert time.monotonic() - begun < 10 and not (tmp_path / "run").exists()


def test_a_cluster_of_too_many_devices_is_not_simulated():
    keys = {"cluster.processes": 100, "cluster.devices_per_process": 100}
    with pytest.raises(ConfigError, match="are 10000 devices; at most 4096 can be simulated"):
        prepare_jax(tiny_config("PPO", keys), simulates=True)


def test_sizes_are_held_against_memory_before_anything_is_allocated(tmp_path, monkeypatch):
    config = tiny_config("PPO")
    # By hand: hidden 32, mlp 64, 1 layer, 4 heads of 8, tied tables; 14 tokens rounded up to 16.
    layer = 4 * 32 * 32 + 3 * 32 * 64 + 2 * 32
    with_vocabulary = 16 * 32 + layer + 32
    scalar = with_vocabulary + 32 + 1
    # Parameters and two moments of actor and critic, parameters of the reference, by 8 devices.
    weights = 8 * (12 * (with_vocabulary + scalar) + 4 * with_vocabulary)
    # 16 sequences of 5 prompt and 4 response tokens, two to a prompt, whose keys and values stand
    # once; and 17 bytes of each token of a batch.
    sequences = (8 * 5 + 16 * 4) * 2 * 4 * 8 * 4 + 16 * 9 * 17
    needed = weights + sequences
    monkeypatch.setattr(memory_check, "free_bytes", lambda device: needed - 1)
    with pytest.raises(ConfigError, match="16 sequences of 9 tokens .*this machine has") as caught:
        hjax.Trainer(config, tmp_path / "run")
    assert "\n" not in str(caught.value) and "model.hidden_size" in str(caught.value)
    assert not (tmp_path / "run").exists()
    monkeypatch.setattr(memory_check, "free_bytes", lambda device: needed)
    hjax.Trainer(config, tmp_path / "run").close()
    # What is only described needs none of it.
    monkeypatch.setattr(memory_check, "free_bytes", lambda device: 1)
    trainer = hjax.Trainer(config)
    with pytest.raises(ConfigError, match="this machine has 1 B left"):
        trainer.step()
    trainer.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A directory whose weights fit, to be copied and spoilt."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = get_task("sorting").tokenizer()
    save_model(folder, vocab_size=tokenizer.vocab_size)
    tokenizer.save(folder)
    return folder


def first(name, change):
    """A change of one tensor."""
    return lambda tensors: tensors | {name: change(tensors[name])}


Q = "model.layers.0.self_attn.q_proj.weight"
NORM = "model.norm.weight"
SPOILT = {
    "integers": (first(Q, lambda x: x.astype(np.int32)), f"{Q} is of dtype I32"),
    "another shape": (first(Q, lambda x: x[:-1]), rf"{Q} has shape \(31, 32\), .* \(32, 32\)"),
    "missing": (lambda t: {n: x for n, x in t.items() if n != NORM}, f"'{NORM}' is missing"),
    "too many": (lambda t: t | {"model.extra": t[NORM]}, "'model.extra' is not one of a llama"),
    "another vocabulary": (
        first("model.embed_tokens.weight", lambda x: x[:9]), r"\(9, 32\), config.json implies"),
}  # fmt: skip


def spoilt(model, path, change):
    path.mkdir()
    (path / "config.json").write_bytes((model / "config.json").read_bytes())
    tensors = change(load_file(model / "model.safetensors"))
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return {"actor.path": str(path), "tokenizer.path": str(model)}


@pytest.mark.parametrize("what", SPOILT)
def test_weights_are_held_against_their_config_before_a_run(what, model, tmp_path):
    change, says = SPOILT[what]
    config = tiny_config("GRPO", spoilt(model, tmp_path / "model", change))
    for workdir in (None, tmp_path / "run"):  # of a dry run there is none
        with pytest.raises(ConfigError, match=says) as caught:
            hjax.Trainer(config, workdir)
        assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_weights_that_are_no_numbers_leave_no_run(model, tmp_path):
    keys = spoilt(model, tmp_path / "model", first(NORM, lambda x: np.full_like(x, np.nan)))
    trainer = hjax.Trainer(tiny_config("GRPO", keys), tmp_path / "run")
    with pytest.raises(ConfigError, match=f"{NORM} has values that are not finite"):
        trainer.run()
    trainer.close()
    assert not (tmp_path / "run").exists()
    # With the weights mended the same directory is as good as new.
    sound = hjax.Trainer(
        tiny_config("GRPO", {"actor.path": str(model), "tokenizer.path": str(model)}),
        tmp_path / "run",
    )
    sound.close()
    assert json.loads((tmp_path / "run" / "config.json").read_text())["actor"]["path"]
