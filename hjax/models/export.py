"""Export of a model to a Hugging Face directory: weights, config, tokenizer, chat template."""

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from hjax.data.tokenizer import Tokenizer
from hjax.data.tokenizer_files import CONVERTED, MORE_TEMPLATES, TEMPLATE, holds_tokenizer
from hjax.errors import ConfigError, RunError
from hjax.files import StrPath, enclosing_run, mount_points, read_json, special_file, sync_file
from hjax.models.base_checkpoints import recorded_step
from hjax.models.families.family import TOKEN_IDS
from hjax.models.huggingface import read_config, save_weights, stored_dtypes
from hjax.models.model_config import ModelConfig
from hjax.models.parameters import Network, Params
from hjax.models.peft_files import save_adapter
from hjax.models.weights import (
    actor_path,
    adapter_base,
    has_score_head,
    is_workdir,
    load_actor_checkpoint,
    load_trained,
    model_directory,
    read_eos_ids,
)
from hjax.sharded_values import ArrayRegions
from hjax.temporary_folders import TemporaryFolder
from hjax.user_input import read_file, user_path

GENERATION_CONFIG = "generation_config.json"
# In the name of a folder that is being written.
_UNFINISHED = ".hjax-export-"
# Patterns of files beside weights and config that are copied unchanged; additional chat templates
# are too.
COPIED_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "merges.txt",
    *CONVERTED,
    TEMPLATE,
    GENERATION_CONFIG,
)


def check_output(output: StrPath) -> Path:
    """The directory to write, which must be new or empty.

    Raises:
      ConfigError: it is not empty, a mount point, which cannot be replaced, or no directory; or
        it is within folders of a run, which may be removed, and whose names are checkpoints.
    """
    path = user_path(output, "output ")
    if within := enclosing_run(path):
        raise ConfigError(
            f"{path} is within {within[0]}/ of the run {within[1]}; give a directory elsewhere"
        )
    mounted = path.is_dir() and mount_points(path)
    if path.exists() and (not path.is_dir() or any(path.iterdir()) or mounted):
        kind = f"is {special_file(path) or 'a file'}"
        if path.is_dir():
            kind = "is a mount point" if mounted else "is not empty"
        raise ConfigError(f"{path} {kind}; give a directory that is new or empty")
    return path


def export_weights(
    output: StrPath,
    config: ModelConfig,
    params: Params,
    beside: Path | None = None,
    tokenizer: Any = None,
    dtypes: Mapping[str, str] | None = None,
) -> Path:
    """Write a directory that transformers loads; it is renamed into place once complete.

    Args:
      output: the directory, new or empty.
      config: shapes; its dtype is the default where ``dtypes`` has none.
      params: of the decoder: jax.Array, numpy arrays or ``ArrayRegions``.
      beside: directory of the tokenizer's files; None: they are written from ``tokenizer``, if any.
      tokenizer: of the model.
      dtypes: by tensor, as of ``hjax.models.huggingface.save_weights``.

    Raises:
      ConfigError: the directory is not empty.
    """
    with _atomic_directory(output) as made:
        _write_model(made, config, params, beside, tokenizer, dtypes)
    return Path(output).expanduser()


def export_adapters(
    output: StrPath,
    network: Network,
    learned: Params,
    base: str,
    own: Params | None = None,
    beside: Path | None = None,
    tokenizer: Any = None,
) -> Path:
    """Write adapters as a directory that PEFT loads; it is renamed into place once complete.

    Args:
      output: the directory, new or empty.
      network: with adapters.
      learned: trainable parameters, nested dict of jax.Array, numpy arrays or ``ArrayRegions``.
      base: directory or name of the base model; empty: ``own``, which is written to the
        subdirectory ``base``.
      own: the decoder's parameters without adapters.
      beside, tokenizer: as of ``export_weights``.

    Raises:
      ConfigError: the directory is not empty.
    """
    path = Path(output).expanduser()
    assert network.config.lora is not None
    with _atomic_directory(output) as made:
        base = base or str((path / "base").resolve())
        values = jax.tree.map(
            lambda x: x.whole() if isinstance(x, ArrayRegions) else np.asarray(x), learned
        )
        save_adapter(made, network.declared, values, network.config.lora, base)
        if own is not None:
            _write_model(made / "base", network.config.base, own, beside, tokenizer)
    return path


@contextlib.contextmanager
def _atomic_directory(output: StrPath) -> Iterator[Path]:
    """A temporary directory that is renamed to ``output``, or to where that links, at the end.

    Raises:
      ConfigError: as of ``check_output``.
      RunError: it could not be written; nothing is left behind.
    """
    path = check_output(output).resolve()
    new = [folder for folder in path.parents if not folder.exists()]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryFolder(f".{path.name[:50]}{_UNFINISHED}", path.parent) as folder:
            made = folder / "model"
            yield made
            for file in made.rglob("*"):
                if file.is_file():
                    sync_file(file)
            if path.exists():
                path.rmdir()
            made.rename(path)
    except BaseException as error:
        for folder in new:
            with contextlib.suppress(OSError):
                folder.rmdir()
        if isinstance(error, OSError):
            reason = error.strerror or error
            raise RunError(f"{path} could not be written: {reason}") from error
        raise


def _write_model(
    made: Path,
    config: ModelConfig,
    params: Params,
    beside: Path | None,
    tokenizer: Any,
    dtypes: Mapping[str, str] | None = None,
) -> None:
    save_weights(made, config, params, tokenizer, dtypes=dtypes)
    if beside is None and tokenizer is not None:
        tokenizer.save(made)
    if beside is not None:
        for file in (each for pattern in COPIED_FILES for each in beside.glob(pattern)):
            (made / file.name).write_bytes(read_file(file))
        for file in sorted((beside / MORE_TEMPLATES).glob("*.jinja")):
            (made / MORE_TEMPLATES).mkdir(exist_ok=True)
            (made / MORE_TEMPLATES / file.name).write_bytes(read_file(file))
    if not (made / GENERATION_CONFIG).is_file():
        written = read_json(made / "config.json")
        ids = {key: written[key] for key in TOKEN_IDS if written[key] is not None}
        (made / GENERATION_CONFIG).write_text(json.dumps(ids, indent=1) + "\n")


def export_model(
    source: StrPath, output: StrPath, adapter: bool = False
) -> tuple[ModelConfig, set[str]]:
    """Export the model at a path: a workdir's newest checkpoint, or a model directory, whose
    tensors keep their dtypes.

    Args:
      source: path of the model.
      output: the directory, new or empty.
      adapter: write a workdir's adapters as a PEFT directory; else they are merged.

    Returns:
      the model's config, and the dtypes of the tensors written.

    Raises:
      ConfigError: no model at the path, or the output is not empty.
      DataError: no complete checkpoint, or a damaged one.
    """
    check_output(output)
    if not adapter:
        directory = model_directory(source)
        if not is_workdir(source) and has_score_head(source):
            raise ConfigError(
                f"{source}: its weights have a sequence classifier's head (score.weight), which a "
                "language model's export would leave out"
            )
        if holds_tokenizer(directory):
            Tokenizer.load(directory).check_fits(read_config(directory).vocab_size, directory)
        read_eos_ids(directory)
        config, params = load_trained(source)
        dtypes = {} if is_workdir(source) else stored_dtypes(directory, config)
        export_weights(output, config, params, directory, dtypes=dtypes)
        return config, set(dtypes.values()) or {config.dtype}
    if not is_workdir(source):
        raise ConfigError(f"{source}: not a workdir; adapters are exported from a workdir only")
    network, learned, own = load_actor_checkpoint(source)
    if "decoder" in learned:
        raise ConfigError(
            f"{source}: adapters of a model with a scalar head are exported with its weights; "
            "leave --adapter out"
        )
    if network.config.lora is None:
        raise ConfigError(f"{source}: its run trains all weights (actor.lora.rank=0), no adapters")
    base = ""
    if own is None:
        start = actor_path(source)
        base, own = adapter_base(start, recorded_step(source, start))
    export_adapters(output, network, learned, base, own, model_directory(source))
    return network.config, {"float32"}
