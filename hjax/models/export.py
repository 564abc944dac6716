"""A Hugging Face directory of a model as it is: weights, config, tokenizer, chat template."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from hjax.errors import ConfigError
from hjax.models.config import ModelConfig
from hjax.models.huggingface import save_weights
from hjax.models.parameters import Params
from hjax.models.weights import load_decoder, model_directory

# What may stand beside weights and config, copied as it is.
FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "generation_config.json",
)


def check_output(output: str | os.PathLike) -> Path:
    """The directory to write, which must not hold anything yet.

    Raises:
      ConfigError: it does, or it is a file.
    """
    path = Path(output).expanduser()
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        kind = "is not empty" if path.is_dir() else "is a file"
        raise ConfigError(f"{path} {kind}; give a directory that is new or empty")
    return path


def export_weights(
    output: str | os.PathLike,
    config: ModelConfig,
    params: Params,
    beside: Path | None = None,
    tokenizer: Any = None,
) -> Path:
    """Write a directory that transformers loads; it appears once all of it is there.

    Args:
      output: the directory, new or empty.
      config: shapes; its dtype is the files'.
      params: of the decoder: jax.Array, numpy arrays or ``Pieces``.
      beside: where the tokenizer's files are; None: they are made of ``tokenizer``, if any.
      tokenizer: of the model.

    Raises:
      ConfigError: the directory is not empty.
    """
    path = check_output(output)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as folder:
        made = Path(folder) / "model"
        save_weights(made, config, params, tokenizer)
        if beside is None and tokenizer is not None:
            tokenizer.save(made)
        for name in FILES:
            if beside is not None and (beside / name).is_file():
                shutil.copyfile(beside / name, made / name)
        if path.exists():
            path.rmdir()
        made.rename(path)
    return path


def export_model(source: str | os.PathLike, output: str | os.PathLike) -> ModelConfig:
    """Write the language model at a path: a workdir's newest checkpoint, or another directory's.

    Raises:
      ConfigError: nothing to read there, or the output is not empty.
      DataError: no complete checkpoint, or a damaged one.
    """
    check_output(output)
    config, params = load_decoder(source)
    export_weights(output, config, params, model_directory(source))
    return config
