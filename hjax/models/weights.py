"""Where weights come from: a Hugging Face directory, or an hjax workdir."""

from __future__ import annotations

import functools
import json
import os
import re
from pathlib import Path

import numpy as np

from hjax.errors import ConfigError
from hjax.models import huggingface
from hjax.models.config import ModelConfig
from hjax.models.parameters import Network, Params
from hjax.models.published import SHAPES
from hjax.sharding.layout import Layout

_SCALAR = ("head", "bias")  # of a scalar model, beside its decoder
MODEL_DIRECTORY = "model"  # in a workdir: config.json and tokenizer of its actor


def is_workdir(path: str | os.PathLike) -> bool:
    """Whether ``path`` is a workdir with an actor's checkpoint to read."""
    path = Path(path)
    return (path / MODEL_DIRECTORY / "config.json").is_file() and (path / "checkpoints").is_dir()


def model_directory(path: str | os.PathLike) -> Path:
    """The directory that holds config.json and the tokenizer of a model path or name.

    Raises:
      ConfigError: nothing there, or a name that can be neither found nor downloaded.
    """
    directory = Path(path).expanduser()
    if not directory.is_dir():
        if str(path).lower() in SHAPES:
            raise ConfigError(
                f"{str(path)!r} names a published shape, without weights: "
                "`python -m hjax.launch.compile` compiles it; to run it, give its weights as a "
                "Hugging Face directory or a name as owner/name"
            )
        if not re.fullmatch(r"[\w.-]+/[\w.-]+", str(path)):
            raise ConfigError(
                f"no model directory {str(path)!r}; give a Hugging Face directory with "
                "config.json and *.safetensors, a name as owner/name, or an hjax workdir"
            )
        return _download(str(path))
    return directory / MODEL_DIRECTORY if is_workdir(directory) else directory


@functools.lru_cache
def _download(name: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        wanted = ["*.json", "*.safetensors", "*.jinja"]
        return Path(snapshot_download(name, allow_patterns=wanted))
    except Exception as error:  # the hub's client raises many kinds when it cannot be reached
        reason = (str(error).strip().splitlines() or [""])[0][:160]
        raise ConfigError(
            f"{name!r} is no directory, and as a Hugging Face name it could not be had "
            f"({type(error).__name__}: {reason}); give a local directory"
        ) from error


def read_eos_ids(directory: Path) -> list[int]:
    """End-of-sequence ids in generation_config.json or config.json; empty without any."""
    for name in ("generation_config.json", "config.json"):
        if (directory / name).is_file():
            ids = json.loads((directory / name).read_text()).get("eos_token_id")
            if ids is not None:
                return list(ids) if isinstance(ids, list) else [ids]
    return []


def read_config(path: str | os.PathLike) -> ModelConfig:
    """Shapes of the model at a path."""
    return huggingface.read_config(model_directory(path))


def check_weights(path: str | os.PathLike) -> None:
    """Whether there are weights to load at a path; reads none of them.

    Raises:
      ConfigError: no files, or damaged ones, by name.
    """
    directory = model_directory(path)
    if not is_workdir(path):
        huggingface.check_files(directory)
    elif not any(p.name.isdigit() for p in (Path(path) / "checkpoints").iterdir()):
        raise ConfigError(f"{path}: no complete checkpoint there; train a step first")


def load_params(path: str | os.PathLike, network: Network, layout: Layout, seed: int = 0) -> Params:
    """Parameters of the model at a path, laid out for ``layout``.

    Those of a directory are read one at a time, each device's part of it alone; a scalar head is
    ``score.weight`` of transformers' classes for sequence classification. A directory without one
    (a language model) gets a head of zeros, as a new critic wants it.

    Args:
      path: a Hugging Face directory or name, or an hjax workdir.
      network: the language model of the shapes that are there, or that decoder with a scalar head.
      layout: of its devices.
      seed: of which adapters are drawn that the network has and the path has not.

    Raises:
      ConfigError: missing or unfit files, by name.
      DataError: no complete checkpoint in the workdir, or a damaged one.
    """
    directory, base = model_directory(path), network.base
    if not is_workdir(path):
        of = base.config, base.declared, base.shardings(layout), base.shapes
        params = huggingface.load_params(directory, *of)
    else:
        params = _restored(path)
        if "decoder" in base.declared:
            params.pop("unembedding", None)
            fill = {name: np.zeros(base.declared[name].shape, np.float32) for name in _SCALAR}
            params = {"decoder": params, **fill}
        params = base.place(params, layout)
    if base is not network:
        _, frozen = network.partition.split(params)
        heads = {name: params[name] for name in _SCALAR if name in params}
        params = network.partition.join(network.create_learned(seed, layout), frozen) | heads
    return params


def load_decoder(path: str | os.PathLike) -> tuple[ModelConfig, Params]:
    """Shapes and float32 numpy parameters of the language model at a path.

    Args:
      path: a Hugging Face directory or name, or an hjax workdir.

    Raises:
      ConfigError: missing or unfit files, by name.
      DataError: no complete checkpoint in the workdir, or a damaged one.
    """
    directory = model_directory(path)
    if not is_workdir(path):
        return huggingface.load_weights(directory)
    return huggingface.read_config(directory), _restored(path)


def _restored(path: str | os.PathLike) -> Params:
    from hjax.models.checkpoint import restore_params

    return restore_params(Path(path) / "checkpoints", "actor")
