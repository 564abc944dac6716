"""Load weights from a Hugging Face directory or name, a PEFT directory, or an hjax workdir."""

import dataclasses
import difflib
import functools
import re
from pathlib import Path
from typing import Any

import jax
import numpy as np

from hjax.data import tokenizer_files
from hjax.errors import ConfigError, DataError
from hjax.files import StrPath
from hjax.models import huggingface
from hjax.models.base_checkpoints import (
    MODEL_DIRECTORY,
    checkpoint_step,
    recorded_step,
    split_checkpoint,
)
from hjax.models.lora import Lora, layers_of, with_layers
from hjax.models.lora_compute import initial_magnitudes, merge_adapters
from hjax.models.model_config import ModelConfig
from hjax.models.parameters import Network, Params, decoder_network, scalar_network
from hjax.models.peft_files import Adapter, is_adapter
from hjax.models.presets import PRESETS
from hjax.models.quantized import FLOAT, quantize_params
from hjax.sharding.global_arrays import place
from hjax.sharding.layout import Layout
from hjax.user_input import read_object, user_path

_SCALAR = ("head", "bias")  # parameters of a scalar model besides its decoder


def is_workdir(path: StrPath) -> bool:
    """Whether ``path`` is a workdir with an actor's checkpoints, or one of these checkpoints."""
    path, _ = split_checkpoint(path)
    return (path / MODEL_DIRECTORY / "config.json").is_file() and (path / "checkpoints").is_dir()


def model_directory(path: StrPath) -> Path:
    """The directory with config.json and tokenizer of a model path or name; for a PEFT directory
    that of its base.

    Raises:
      ConfigError: no model there, or a name that can be neither found nor downloaded.
    """
    if is_adapter(path):
        return model_directory(Adapter(path).base)
    directory = user_path(split_checkpoint(path)[0], "model ")
    if not directory.is_dir():
        if str(path).lower() in PRESETS:
            raise ConfigError(
                f"{str(path)!r} names a published shape, without weights: "
                "`python -m hjax.launch.compile` compiles it; to run it, give its weights as a "
                "Hugging Face directory or a name as owner/name"
            )
        if runs := [p.name for p in directory.parent.glob("*") if is_workdir(p)]:
            near = difflib.get_close_matches(directory.name, runs, n=3, cutoff=0) or runs
            raise ConfigError(
                f"no directory {str(path)!r}; in {directory.parent} there are {', '.join(near)}"
            )
        if not re.fullmatch(r"[\w.-]+/[\w.-]+", str(path)) or str(path).startswith("runs/"):
            raise ConfigError(
                f"no model directory {str(path)!r}; give a Hugging Face directory with "
                "config.json and *.safetensors, a name as owner/name, or an hjax workdir"
            )
        return _download(str(path))
    return directory / MODEL_DIRECTORY if is_workdir(directory) else directory


def _adapter(path: StrPath) -> Adapter | None:
    """The adapters at a path, if it is a PEFT directory."""
    return Adapter(path) if is_adapter(path) else None


@functools.lru_cache
def _download(name: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        wanted = ["*.json", "*.safetensors", "*.jinja", "merges.txt", *tokenizer_files.CONVERTED]
        return Path(snapshot_download(name, allow_patterns=wanted))
    except Exception as error:  # the hub's client raises many kinds when it cannot be reached
        reason = (str(error).strip().splitlines() or [""])[0][:160]
        raise ConfigError(
            f"{name!r} is no directory, and as a Hugging Face name it could not be had "
            f"({type(error).__name__}: {reason}); give a local directory"
        ) from error


def read_eos_ids(directory: Path) -> list[int]:
    """EOS token ids in generation_config.json or config.json; empty if there are none."""
    files = (directory / name for name in ("generation_config.json", "config.json"))
    return next(filter(None, map(tokenizer_files.read_eos_ids, files)), [])


def read_config(path: StrPath) -> ModelConfig:
    """The config of the model at a path."""
    return huggingface.read_config(model_directory(path))


def check_weights(path: StrPath) -> None:
    """Check that there are weights at a path; reads headers only.

    Raises:
      ConfigError: no files, damaged ones, or tensors that do not fit config.json, by name.
    """
    directory = model_directory(path)
    if not is_workdir(path):
        huggingface.check_headers(directory)
        _adapter(path)
    else:
        checkpoint_step(path)


def has_score_head(path: StrPath) -> bool:
    """Whether the weights at a path have a scalar head; reads headers only.

    Raises:
      ConfigError: missing or damaged files.
      DataError: no complete checkpoint in the workdir, or a damaged one.
    """
    from hjax.models.checkpoint import saved_parameter_names

    if is_workdir(path):
        folder = split_checkpoint(path)[0] / "checkpoints" / str(checkpoint_step(path))
        return "decoder" in saved_parameter_names(folder, "actor")
    adapter = _adapter(path)
    learned = adapter is not None and huggingface.SCORE_HEAD in adapter.names
    return learned or huggingface.has_score_head(model_directory(path))


def newest_checkpoint(path: StrPath) -> int | None:
    """Step of the checkpoint that a workdir's path means; None if the path is no workdir.

    Raises:
      DataError: the checkpoint is not there.
    """
    return checkpoint_step(path) if is_workdir(path) else None


def load_params(
    path: StrPath, network: Network, layout: Layout, seed: int = 0, checkpoint: int | None = None
) -> Params:
    """Load the parameters of the model at a path, sharded for ``layout``.

    Tensors of a directory are read one at a time, each process its devices' shards. A scalar head
    is ``score.weight`` of transformers' sequence classifiers, or 0 if missing, as in a new critic.

    Args:
      path: a Hugging Face directory or name, a PEFT directory, or an hjax workdir.
      network: a language model or scalar model of the shapes at the path.
      layout: for the parameters.
      seed: of new adapters, which the network has and the path lacks.
      checkpoint: step in a workdir; None: the one that the path means.

    Raises:
      ConfigError: missing or unfit files, by name.
      DataError: no complete checkpoint in the workdir, or a damaged one.
    """
    directory, base, adapter = model_directory(path), network.without_adapters, _adapter(path)
    if not is_workdir(path):
        if "decoder" not in base.declared:
            _check_generates(has_score_head(path), path)
        params = huggingface.load_params(
            directory,
            base.config,
            base.declared,
            shardings=base.shardings(layout),
            shapes=base.shapes,
            # Adapters that are trained are not merged.
            adapter=adapter if base is network else None,
        )
    else:
        params = _checkpoint_params(path, checkpoint)
        if "decoder" not in base.declared:
            _check_generates("decoder" in params, path)
        elif "decoder" not in params:
            params.pop("unembedding", None)
            fill = {name: np.zeros(base.declared[name].shape, np.float32) for name in _SCALAR}
            params = {"decoder": params, **fill}
        params = base.place(quantize_params(params, base.declared), layout)
    if base is not network:
        _, frozen = network.partition.split(params)
        heads = {name: params[name] for name in _SCALAR if name in params}
        learned = network.create_learned(seed, layout) | heads
        if network.config.lora is not None and network.config.lora.dora:
            learned = with_layers(learned, _magnitudes(frozen, network, layout))
        if adapter is not None:
            learned = _read_adapters(adapter, network, layout, learned)
        params = network.partition.join(learned, frozen)
    return params


def _magnitudes(frozen: Params, network: Network, layout: Layout) -> Params:
    """DoRA's initial magnitudes of a base, sharded."""
    placed = layers_of(network.shardings(layout))

    def make(layers: Params) -> Params:
        return initial_magnitudes(layers, network)

    layers = layers_of(frozen)
    out = {name: placed[name] for name in jax.eval_shape(make, layers)}
    made: Params = jax.jit(make, out_shardings=out)(layers)
    return made


def _read_adapters(adapter: Adapter, network: Network, layout: Layout, learned: Params) -> Params:
    """The trainable parameters with adapters from a PEFT directory."""
    lora = network.config.lora
    assert lora is not None
    adapter.check(network.declared, adapter.base)
    adapter.check_matches(network.declared, lora)
    declared, shardings = layers_of(network.declared), layers_of(network.shardings(layout))
    read = {
        name: place(adapter.parameter(declared[name], lora), shardings[name])
        for name in layers_of(learned)
    }
    made = with_layers(learned, read)
    if "decoder" in learned and "score.weight" in adapter.names:
        head = adapter.tensor("score.weight").reshape(-1).astype(np.float32)
        made["head"] = place(head, network.shardings(layout)["head"])
    return made


def load_decoder(path: StrPath, checkpoint: int | None = None) -> tuple[ModelConfig, Params]:
    """Config and float32 numpy parameters of the language model at a path.

    Args:
      path: a Hugging Face directory or name, or an hjax workdir.
      checkpoint: step in a workdir; None: the one that the path means.

    Raises:
      ConfigError: missing or unfit files, by name, or a scalar model.
      DataError: no complete checkpoint in the workdir, or a damaged one.
    """
    scores = not is_workdir(path) and has_score_head(path)
    config, params = load_trained(path, checkpoint)
    _check_generates(scores or "decoder" in params, path)
    return config, params


def load_trained(path: StrPath, checkpoint: int | None = None) -> tuple[ModelConfig, Params]:
    """``load_decoder``, but also for a workdir whose actor has a scalar head."""
    directory = model_directory(path)
    if not is_workdir(path):
        return huggingface.load_weights(directory, _adapter(path))
    return huggingface.read_config(directory), _checkpoint_params(path, checkpoint)


def _check_generates(scores: bool, path: StrPath) -> None:
    """Raise ConfigError if the model at a path has a scalar head."""
    if scores:
        raise ConfigError(
            f"{path}: a model with a scalar head, which gives scores and no text; name it as "
            "reward.path, cost.path or critic.path, or give a language model"
        )


def _checkpoint_params(path: StrPath, checkpoint: int | None = None) -> Params:
    """The actor's parameters in a workdir, adapters merged."""
    network, learned, base = load_actor_checkpoint(path, checkpoint)
    if network.config.lora is None:
        return learned
    if base is None:
        start, declared = actor_path(path), network.without_adapters.declared
        _, found = load_trained(start, recorded_step(path, start))
        if "decoder" not in learned:
            _check_generates("decoder" in found, start)
            base = quantize_params(found, declared)
        else:  # the base may have had another head
            found = found.get("decoder", found)
            found.pop("unembedding", None)
            base = {"decoder": quantize_params(found, declared["decoder"])}
    return merge_adapters(network.partition.join(learned, base), network)


def load_actor_checkpoint(
    path: StrPath, checkpoint: int | None = None
) -> tuple[Network, Params, Params | None]:
    """The actor in a workdir's checkpoint.

    Args:
      path: the workdir, or a checkpoint of it.
      checkpoint: its step; None: the one that the path means.

    Returns:
      the network, with scalar head and adapters as in the run; trainable parameters, or their
      moving average if the run keeps one, as numpy arrays; and frozen ones, None if they are in
      another directory.
    """
    from hjax.models.checkpoint import restore_params

    config = read_config(path)
    settings = _settings(path).get("lora")
    lora = Lora.from_settings(settings, bool(config.experts)) if settings else None
    step = checkpoint_step(path) if checkpoint is None else checkpoint
    folder = split_checkpoint(path)[0] / "checkpoints" / str(step)
    base = restore_params(folder, "actor", "base") if lora is not None else None
    form = (settings or {}).get("base", FLOAT)
    quantized = "" if lora is None or form == FLOAT else form
    learned = restore_params(folder, "actor", "average") or restore_params(folder, "actor")
    made = scalar_network if "decoder" in learned else decoder_network
    config = dataclasses.replace(config, lora=lora, quantized=quantized)
    # Networks are kept by their shapes: token ids and dtype may be another model's.
    network = dataclasses.replace(made(config), config=config)
    if lora is not None:
        _check_adapters(folder, network, learned)
    return network, learned, base


def _check_adapters(folder: Path, network: Network, learned: Params) -> None:
    """Raise DataError unless a checkpoint's adapters are those that its run's config says."""
    declared, _ = network.partition.split(network.shapes)
    expected, found = (
        {jax.tree_util.keystr(key): x.shape for key, x in jax.tree_util.tree_leaves_with_path(tree)}
        for tree in (declared, learned)
    )
    for name in sorted(expected.keys() | found.keys()):
        if expected.get(name) != found.get(name):
            says = [tree.get(name, "not there") for tree in (expected, found)]
            raise DataError(
                f"{folder}: the run's config.json says other adapters (config.actor.lora) than "
                f"this checkpoint has: {name} is {says[0]} by the config, and {says[1]} here; give "
                "config.json the rank and targets with which the run was started"
            )


def actor_path(path: StrPath) -> str:
    """Path of the base that a workdir's actor started from; empty: from scratch."""
    start = _settings(path)["path"]
    return base_model_path(start) if start else ""


def adapter_base(path: StrPath, checkpoint: int | None = None) -> tuple[str, Params | None]:
    """The base of exported adapters: its absolute path; or, if it is a workdir, which only hjax
    reads, "" and the parameters of its decoder in a checkpoint."""
    if is_workdir(path):
        return "", load_decoder(path, checkpoint)[1]
    return str(Path(path).resolve() if Path(path).is_dir() else path), None


def base_model_path(path: StrPath) -> str:
    """A model's path; for a PEFT directory that of its base."""
    adapter = _adapter(path)
    return str(path) if adapter is None else adapter.base


def _settings(path: StrPath) -> dict[str, Any]:
    """The section ``actor`` of a workdir's config; DataError if there is none."""
    file = split_checkpoint(path)[0] / "config.json"
    found = read_object(file).get("actor")
    if not isinstance(found, dict) or not isinstance(found.get("path"), str):
        raise DataError(f"{file}: not the config of a run: it has no actor with a path")
    return found
