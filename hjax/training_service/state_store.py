"""Saved states by their ``tinker://`` names, in a folder."""

import contextlib
import dataclasses
import json
import re
import time
import urllib.parse
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hjax.errors import ConfigError, RunError, short_repr
from hjax.files import StrPath, replace_file
from hjax.training_service.saved_state import (
    PARTIAL,
    REPLACED,
    STATE,
    read_about,
    remove_saved,
    restore_replaced,
)

WEIGHTS, SAMPLER_WEIGHTS = "weights", "sampler_weights"
# What the API calls the two kinds.
TYPES: Mapping[str, str] = {WEIGHTS: "training", SAMPLER_WEIGHTS: "sampler"}
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
# With each : quoted, a folder's name.
_MODEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:-]{0,79}")
_SCHEME = "tinker://"
# What ``state.json`` has of every state.
_KEYS = {"base_model", "train_mlp", "train_attn", "saved_at", "optimizer", "lora"}
# Seconds that a saved state may be given to live: an hour to ten years.
_TTL = 3600, 10 * 366 * 24 * 3600


@dataclasses.dataclass(frozen=True)
class StateName:
    """The name of a saved state, ``tinker://MODEL/KIND/NAME``.

    Attributes:
      model_id: of the model.
      kind: ``weights`` (to train on) or ``sampler_weights``.
      name: that the client gave.

    Raises:
      ConfigError: a part that is no such name.
    """

    model_id: str
    kind: str
    name: str

    def __post_init__(self) -> None:
        if not _MODEL.fullmatch(self.model_id):
            raise ConfigError(f"model id {short_repr(self.model_id)}: no id of this server")
        if self.kind not in TYPES:
            raise ConfigError(f"{short_repr(self.kind)}: {WEIGHTS} or {SAMPLER_WEIGHTS} is wanted")
        if not _NAME.fullmatch(self.name):
            raise ConfigError(
                f"name {short_repr(self.name)}: letters, digits, _ - and . are allowed, at most "
                "128, and no . or - first"
            )

    @classmethod
    def parse(cls, path: str) -> "StateName":
        """The name in a ``tinker://`` path; ConfigError if it is none."""
        parts = path.removeprefix(_SCHEME).split("/")
        if not path.startswith(_SCHEME) or len(parts) != 3:
            raise ConfigError(f"path {short_repr(path)}: tinker://MODEL/{WEIGHTS}/NAME is wanted")
        return cls(*parts)

    def __str__(self) -> str:
        return f"{_SCHEME}{self.model_id}/{self.kind}/{self.name}"


class StateStore:
    """Saved states in a folder, ``MODEL/KIND/NAME`` below it.

    Args:
      directory: created if it is missing.

    Raises:
      RunError: it cannot be created.
    """

    def __init__(self, directory: StrPath):
        self._directory = Path(directory).absolute()
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunError(f"--store={directory}: {error.strerror}") from error
        # Of a server that was killed.
        for left in self._directory.glob(f"*/*/{PARTIAL}*"):
            remove_saved(left)
        for left in self._directory.glob(f"*/*/{REPLACED}*"):
            restore_replaced(left)

    def folder(self, name: StateName) -> Path:
        """The folder of a saved state."""
        model = urllib.parse.quote(name.model_id, safe="")
        return self._directory / model / name.kind / name.name

    def about(self, name: StateName) -> dict[str, Any]:
        """What is known of a saved state.

        Raises:
          ConfigError: there is none, or it has expired.
        """
        folder = self.folder(name)
        if not (folder / STATE).is_file():
            raise ConfigError(f"{name}: there is no such saved state in this server's store")
        about = _read(folder)
        if _expired(about):
            raise ConfigError(f"{name}: this saved state has expired")
        return about

    def saved(self, model_id: str = "") -> list[tuple[StateName, dict[str, Any]]]:
        """The saved states of a model, or of all (no id), oldest first, with what is known of
        them; damaged ones are left out."""
        found = [(name, about) for name, about in self._known(model_id) if not _expired(about)]
        return sorted(found, key=lambda each: (each[1]["saved_at"], str(each[0])))

    def last_saved(self, model_id: str) -> str:
        """Path of the newest state of a model to train on; empty: none."""
        try:
            paths = [str(name) for name, _ in self.saved(model_id) if name.kind == WEIGHTS]
        except OSError:  # the message that wants to name it says what else is wrong
            return ""
        return paths[-1] if paths and model_id else ""

    def models(self) -> list[str]:
        """Ids of all models with saved states."""
        return sorted({name.model_id for name, _ in self.saved()})

    def remove(self, name: StateName) -> None:
        """Delete a saved state; ConfigError if there is none."""
        self.about(name)
        remove_saved(self.folder(name))

    def set_ttl(self, name: StateName, seconds: int | None) -> None:
        """Let a saved state expire so many seconds from now; None: never.

        Raises:
          ConfigError: there is none, or less than an hour or more than ten years.
        """
        about = self.about(name) | {"expires_at": expiry(seconds)}
        # Checksums are of what is restored; they leave this file out.
        try:
            replace_file(self.folder(name) / STATE, json.dumps(about, indent=1) + "\n")
        except OSError as error:
            raise RunError(f"{name}: its state.json cannot be written: {error.strerror}") from error

    def remove_expired(self) -> None:
        """Delete the states that have expired."""
        for name, about in self._known():
            if _expired(about):
                remove_saved(self.folder(name))

    def _known(self, model_id: str = "") -> Iterator[tuple[StateName, dict[str, Any]]]:
        if model_id and not _MODEL.fullmatch(model_id):
            return
        model = urllib.parse.quote(model_id, safe="") or "*"
        for file in self._directory.glob(f"{model}/*/*/{STATE}"):
            *_, model, kind, name, _ = file.parts
            # What is of no state of this server's, or damaged, hides no other.
            with contextlib.suppress(ConfigError):
                yield StateName(urllib.parse.unquote(model), kind, name), _read(file.parent)


def _read(folder: Path) -> dict[str, Any]:
    about = read_about(folder)
    if missing := _KEYS - about.keys():
        raise ConfigError(f"{folder / STATE}: no {', '.join(sorted(missing))}: not of this server")
    return about


def _expired(about: Mapping[str, Any]) -> bool:
    expires = about.get("expires_at")
    return expires is not None and expires < time.time()


def expiry(seconds: int | None) -> float | None:
    """When what is saved now expires, in seconds since 1970; None: never.

    Raises:
      ConfigError: less than an hour or more than ten years.
    """
    if seconds is None:
        return None
    low, high = _TTL
    if not low <= seconds <= high:
        raise ConfigError(f"ttl_seconds={seconds}: {low} to {high}, or none")
    return time.time() + seconds
