"""Tiny runs for the tests: models of a few thousand parameters, steps of milliseconds."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from ml_collections import ConfigDict

import hjax
from hjax.settings.config_loading import check_config

# 8 prompts x 2 samples = 16 sequences a step, of 4 prompt and at most 4 response tokens.
TINY = {
    "steps": 3,
    "model.hidden_size": 32,
    "model.layers": 1,
    "model.heads": 4,
    "model.kv_heads": 4,
    "model.mlp_size": 64,
    "model.dtype": "float32",
    "data.task": "sorting",
    "data.task_options.length": 3,
    "data.task_options.partial": 0.5,
    "data.eval_size": 16,
    "data.packing": 0,
    "rollout.prompts": 8,
    "rollout.samples": 2,
    "rollout.max_response_length": 4,
    "warm_start.batch": 8,
    "eval.every": 0,
    "checkpoint.every": 0,
    "display.enabled": False,
    "display.tensorboard": False,
    "display.report": False,
}
# For runs whose subject has nothing to do with devices; programs of eight take a third longer.
ONE_DEVICE = {"cluster.devices_per_process": 1}
# Safe-RLHF needs a task with a cost.
COSTLY = {"data.task": "harvest", "data.task_options.length": 3, "data.task_options.partial": 0.0}

# A file of environments.
DIGITS = pathlib.Path(__file__).with_name("digits_environment.py")

# Metrics that say how the machine did, not what was computed.
MACHINE = ("time/", "throughput/", "memory/", "compile/")


def tiny_config(algorithm: str = "PPO", changes: Mapping[str, Any] | None = None) -> ConfigDict:
    """The tiny run of an algorithm, with some dotted keys changed."""
    keys = {**TINY, **(COSTLY if algorithm == "SafeRLHF" else {}), "algorithm.name": algorithm}
    keys |= changes or {}
    if keys["data.task"] != TINY["data.task"] and algorithm != "SafeRLHF":
        keys = {k: v for k, v in keys.items() if not k.startswith("data.task_options.")} | {
            k: v for k, v in (changes or {}).items() if k.startswith("data.task_options.")
        }
    return check_config(keys)


def episode_keys(folder: pathlib.Path, name: str = "Digits") -> dict[str, Any]:
    """Keys of a run on episodes of an environment in `DIGITS`, with what it reads in the folder."""
    from hjax.data.tasks import get_task

    get_task("sorting").tokenizer().save(folder / "tokenizer")
    rows = [json.dumps({"prompt": "1" * (i % 5) + f"{i}>"}) + "\n" for i in range(48)]
    (folder / "data.jsonl").write_text("".join(rows))
    return {
        "data.task": "",
        "data.path": f"{folder}/data.jsonl",
        "data.eval_size": 8,
        "tokenizer.path": f"{folder}/tokenizer",
        "rollout.max_prompt_length": 8,
        "rollout.max_response_length": 60,
        "environment.function": f"{DIGITS}:{name}",
        "environment.max_turns": 5,
        "environment.turn_tokens": 4,
        "environment.processes": 2,
    }


@contextlib.contextmanager
def trainer_of(
    algorithm: str = "PPO",
    changes: Mapping[str, Any] | None = None,
    workdir: pathlib.Path | None = None,
) -> Iterator[hjax.Trainer]:
    """A trainer of a tiny run, closed at the end; `placement=auto` is planned first."""
    config = tiny_config(algorithm, changes)
    plan = hjax.plan(config, workdir) if config.placement == "auto" else None
    trainer = hjax.Trainer(config, workdir=workdir, plan=plan)
    try:
        yield trainer
    finally:
        trainer.close()


@contextlib.contextmanager
def models_loaded_once() -> Iterator[None]:
    """Commands load a directory's model once, so that its programs are compiled once."""
    import pytest

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hjax, "load_model", functools.cache(hjax.load_model))
        yield


def generated(
    generator: Any, params: Any, *arguments: Any, call: str = "generate", **options: Any
) -> Any:
    """What a ``Generator`` gives, the fields of its config among the options."""
    from hjax.rollout.rollout_job import GenerationConfig

    names = [f.name for f in dataclasses.fields(GenerationConfig) if f.name in options]
    config = GenerationConfig(**{name: options.pop(name) for name in names})
    return getattr(generator, call)(params, *arguments, config, **options)


def computed(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """A row without the figures of the machine."""
    return {k: v for k, v in metrics.items() if not k.startswith(MACHINE)}


def read_rows(workdir: pathlib.Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    """The rows of a workdir's file."""
    return [json.loads(line) for line in (workdir / name).read_text().splitlines()]


def command(keys: Mapping[str, Any]) -> list[str]:
    """`--config.a.b=VALUE` for each key."""
    return [f"--config.{key}={value}" for key, value in keys.items()]


def launch(
    config: pathlib.Path | str, *arguments: str, cwd: pathlib.Path, **environment: str
) -> subprocess.CompletedProcess[str]:
    """`python -m hjax.launch --config=... ...`, waited for."""
    return subprocess.run(
        [sys.executable, "-m", "hjax.launch", f"--config={config}", *arguments],
        capture_output=True,
        text=True,
        timeout=240,
        cwd=cwd,
        env=os.environ | environment,
    )


def write_config(path: pathlib.Path, keys: Mapping[str, Any]) -> pathlib.Path:
    """A config file, as a user writes one, with these dotted keys."""
    lines = ["import hjax", "", "", "def get_config():"]
    lines += ["    config = hjax.default_config()"]
    lines += [f"    config.{key} = {value!r}" for key, value in keys.items()]
    path.write_text("\n".join([*lines, "    return config", ""]))
    return path


def save_model(
    path: pathlib.Path, seed: int = 1, tokenizer: Any = None, head: bool = False, **shape: Any
) -> Any:
    """A random Llama directory as `transformers` would hold it; returns its ModelConfig.

    With ``head`` it is a sequence classifier with one class: a reward model.
    """
    import jax
    import numpy as np
    from safetensors.numpy import load_file, save_file

    from hjax.models.huggingface import save_weights
    from hjax.models.model_config import ModelConfig
    from hjax.models.parameters import decoder_network, to_host
    from hjax.sharding.layout import make_layouts

    sizes = {"hidden_size": 32, "mlp_size": 64, "layers": 1, "heads": 4, "kv_heads": 4}
    sizes |= {"vocab_size": 16, "max_length": 64} | shape
    config = ModelConfig(head_dim=sizes["hidden_size"] // sizes["heads"], **sizes)
    layout = make_layouts(jax.devices()[:1]).train
    save_weights(path, config, to_host(decoder_network(config).create(seed, layout)), tokenizer)
    if head:
        tensors = load_file(path / "model.safetensors")
        weight = np.random.default_rng(seed).normal(size=(1, config.hidden_size))
        tensors["score.weight"] = weight.astype(np.float32)
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    if tokenizer is not None:
        tokenizer.save(path)
    return config


def kept_screens() -> pathlib.Path | None:
    """The folder of HJAX_SCREENS, in which tests leave what they saw; None where none is named."""
    named = os.environ.get("HJAX_SCREENS")
    if not named:
        return None
    folder = pathlib.Path(named)
    folder.mkdir(parents=True, exist_ok=True)
    return folder
