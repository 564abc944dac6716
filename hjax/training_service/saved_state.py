"""Saved states of trained models on disk: written whole or not at all, and checked when read.

A folder has the trained parameters (orbax), with an optimizer its moments, ``state.json``, and of
adapters the files that PEFT reads.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hjax.errors import ConfigError, RunError
from hjax.files import replace_file
from hjax.models.checkpoint import read_state, write_failure, write_state
from hjax.models.checksums import verify_checksums, write_checksums
from hjax.models.lora import Lora
from hjax.models.parameters import Network, Params, to_host
from hjax.models.peft_files import save_adapter
from hjax.training_service.adamw import AdamState
from hjax.user_input import read_object

STATE = "state.json"
PARAMS, FIRST, SECOND = "params", "first_moments", "second_moments"
# Beginnings of folders' names: what is being written or removed, and what stood under the rest of
# the name until a state that is being written replaces it.
PARTIAL, REPLACED = ".partial", ".replaced."


def write_saved(
    folder: Path,
    network: Network,
    learned: Params,
    *,
    optimizer: AdamState | None,
    about: Mapping[str, Any],
    base: str,
) -> None:
    """Write a saved state; one that is there is replaced.

    Args:
      folder: of the state; its parents are created.
      network: of the model.
      learned: its trained parameters.
      optimizer: its moments; None: they are not saved.
      about: JSON values to keep in ``state.json`` beside the adapters' settings.
      base: path of the model that adapters are for.

    Raises:
      RunError: it cannot be written.
    """
    folder = folder.absolute()
    partial = folder.with_name(f"{PARTIAL}{secrets.token_hex(4)}.{folder.name}")
    lora = network.config.lora
    items: dict[str, Any] = {PARAMS: learned}
    if optimizer is not None:
        items |= {FIRST: optimizer.first, SECOND: optimizer.second}
    settings = None
    if lora is not None:
        settings = {"rank": lora.rank, "alpha": lora.alpha, "targets": list(lora.targets)}
    described = {**about, "lora": settings, "optimizer": optimizer is not None}
    try:
        partial.mkdir(parents=True)
        write_state(partial, items)()
        if lora is not None:
            save_adapter(partial, network.declared, to_host(learned), lora, base)
        write_checksums(partial, folder.name)
        # It may be changed later (when the state expires), so it has no checksum.
        replace_file(partial / STATE, json.dumps(described, indent=1) + "\n")
        _replace(folder, partial)
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        # The libraries raise ValueError for a full disk.
        if isinstance(error, OSError | ValueError):
            said = getattr(error, "strerror", "") or write_failure(error)
            raise RunError(f"{folder}: it could not be saved: {said}") from error
        raise


def _replace(folder: Path, written: Path) -> None:
    """Give a written state its name; a state under that name stays on disk until then."""
    old = folder.with_name(f"{REPLACED}{folder.name}")
    restore_replaced(old)
    with contextlib.suppress(FileNotFoundError):
        folder.rename(old)
    try:
        written.rename(folder)
    finally:
        restore_replaced(old)


def restore_replaced(old: Path) -> None:
    """Give a replaced state its name again if nothing replaced it, else remove it."""
    if not old.is_dir():
        return
    folder = old.with_name(old.name.removeprefix(REPLACED))
    if folder.is_dir():
        remove_saved(old)
    else:
        old.rename(folder)


def remove_saved(folder: Path) -> None:
    """Delete a saved state, if there is one; a part of it never stays under its name."""
    removed = folder.with_name(f"{PARTIAL}{secrets.token_hex(4)}.{folder.name}")
    with contextlib.suppress(FileNotFoundError):
        folder.rename(removed)
        shutil.rmtree(removed, ignore_errors=True)


def read_about(folder: Path) -> dict[str, Any]:
    """The content of ``state.json``.

    Raises:
      ConfigError: there is no saved state, or it is damaged.
    """
    if not (folder / STATE).is_file():
        raise ConfigError(f"{folder}: there is no saved state")
    return read_object(folder / STATE)


def saved_lora(about: Mapping[str, Any]) -> Lora | None:
    """The adapters' settings in a ``state.json``; None: the model has none."""
    settings = about["lora"]
    if settings is None:
        return None
    return Lora(settings["rank"], settings["alpha"], tuple(settings["targets"]))


def read_saved(
    folder: Path, network: Network, abstract: Params, optimizer: bool
) -> tuple[Params, AdamState | None]:
    """The trained parameters and, if they are wanted and were saved, the moments.

    Args:
      folder: of the state.
      network: of the model.
      abstract: its trained parameters as jax.ShapeDtypeStruct with shardings.
      optimizer: whether the moments are wanted.

    Raises:
      ConfigError: no saved state, one of other adapters or shapes, or a damaged one.
    """
    folder = folder.absolute()
    about = read_about(folder)
    lora = saved_lora(about)
    if lora != network.config.lora:
        own, other = (
            "no adapters" if x is None else f"adapters of rank {x.rank} on {','.join(x.targets)}"
            for x in (network.config.lora, lora)
        )
        raise ConfigError(f"{folder}: it was saved with {other}; this model has {own}")
    names = [PARAMS, FIRST, SECOND] if optimizer and about["optimizer"] else [PARAMS]
    try:
        verify_checksums(folder)
        found = read_state(folder, dict.fromkeys(names, abstract))
    except (OSError, ConfigError) as error:
        raise ConfigError(f"{folder}: it cannot be read: {error}") from error
    state = AdamState(found[FIRST], found[SECOND]) if len(names) > 1 else None
    return found[PARAMS], state
