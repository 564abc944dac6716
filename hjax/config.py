"""The tree of a run's settings, and one-line errors for wrong keys and values.

`Config` is ml_collections' ConfigDict, which config files and flags use, but an unknown key is
answered with the nearest one, where ConfigDict prints all there are.
"""

import difflib
import os
import sys
from collections.abc import Collection, Mapping
from types import FrameType
from typing import Any

import numpy as np
from ml_collections import ConfigDict, FieldReference, FrozenConfigDict

from hjax.config_aliases import wish
from hjax.errors import USER_MODULE, ConfigError, safe_repr

AUTO = "auto"
# Values of a switch that hjax sets unless the user does.
SWITCH = (AUTO, "true", "false")


def data_path(data: Mapping[str, Any]) -> str:
    """The files that a run's section ``data`` names; empty: it has a built-in task's prompts."""
    return str(data.get("mixture") or data["path"])


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted key to value of a nested (or flat) mapping; an empty section has no entry."""
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        if _is_weights(prefix + name, value):
            flat[prefix + name] = _by_name(value)
        elif isinstance(value, (Mapping, ConfigDict)):
            flat.update(flatten(value, f"{prefix}{name}."))
        else:
            flat[prefix + name] = value
    return flat


def _is_weights(key: str, value: Any) -> bool:
    """Whether a dict is the value of a key, ``algorithm.weights`` by name, and no section."""
    return key.endswith(".weights") and isinstance(value, (Mapping, ConfigDict))


def _by_name(weights: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(f"{name}={number}" for name, number in weights.items())


def convert(key: str, value: Any, default: Any) -> Any:
    """``value`` as the type of ``default``.

    An int is accepted for a float, and as text for a key that holds ``auto`` or digits; lists and
    tuples for each other; a dict of ``weights`` for its ``name=number``; NumPy's numbers for
    Python's; True and False for the words of a ``SWITCH``.

    Args:
      key: dotted, without `config.`; for the message.
      value: any.
      default: the key's current value; None: any type is accepted.

    Raises:
      ConfigError: a value of another type.
    """
    if isinstance(value, np.generic):
        value = value.item()
    expected = type(default)
    if default in SWITCH and (type(value) is bool or value in ("True", "False")):
        return str(value).lower()
    if default is None or type(value) is expected:
        return value
    if type(value) is int and expected is str and (default == AUTO or default.isdecimal()):
        return str(value)
    if expected is float and type(value) is int and abs(value) <= sys.float_info.max:
        return float(value)
    if expected in (tuple, list) and isinstance(value, tuple | list):
        return expected(value)
    if expected is tuple and _is_weights(key, value):
        return _by_name(value)
    raise wrong_type_error(key, value, default)


def count_or_zero(value: str) -> int:
    """The number that a key holds; 0 if it is ``auto``."""
    return 0 if value == AUTO else int(value)


def wrong_type_error(key: str, value: Any, default: Any) -> ConfigError:
    """The error for a value of another type than its key's."""
    expected = type(default)
    words = {int: "a whole number (int)", float: "a number (float)", bool: "true or false (bool)",
             str: "a string (str)", tuple: "a tuple, such as ('a', 'b')"}  # fmt: skip
    wanted = words.get(expected, expected.__name__)
    return ConfigError(f"config.{key}={safe_repr(value)}: expected {wanted}")


def section_error(key: str, known: Collection[str]) -> ConfigError:
    """The error for a value given to a section; ``known``: the dotted keys in it."""
    return ConfigError(
        f"config.{key} is a section; set one of its keys: "
        + ", ".join(f"config.{k}" for k in list(known)[:8])
        + (", ..." if len(known) > 8 else "")
    )


def nearest_keys(key: str, known: Collection[str]) -> list[str]:
    """The keys that a mistyped one may have meant, at most three; none only if ``known`` is empty.

    Args:
      key: dotted.
      known: all dotted keys.
    """
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.75)
    if not near:
        # The right last name in the wrong section, or a slip in the last name alone.
        last = key.rsplit(".", 1)[-1]
        names = {k.rsplit(".", 1)[-1] for k in known}
        ends = difflib.get_close_matches(last, sorted(names), n=1, cutoff=0.6)
        near = [k for k in known if k.rsplit(".", 1)[-1] in ends][:3]
    return near or difflib.get_close_matches(key, known, n=1, cutoff=0)


class UnknownKey(ConfigError, AttributeError, KeyError):
    """A key that does not exist was read or set, as an attribute or in brackets.

    The message begins with the file and line if a user's file, or what it called, did so.
    """

    def __str__(self) -> str:
        return str(self.args[0])  # KeyError would quote it


def _place_in_user_code() -> str:
    """`file:line: ` that uses a config now; empty: hjax's own code, or none that a user's file
    called."""
    frame: FrameType | None = sys._getframe(1)
    own = (__name__, "ml_collections.")
    while frame is not None and _module_of(frame).startswith(own):
        frame = frame.f_back
    if frame is None or _module_of(frame).startswith("hjax."):
        return ""
    place = f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}: "
    while frame is not None and not _module_of(frame).startswith(USER_MODULE):
        frame = frame.f_back
    return place if frame is not None else ""


def _module_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


class WrongType(ConfigError, TypeError):
    """A value of another type than its key's."""


class Config(ConfigDict):
    """A ConfigDict whose errors are one line with the nearest key.

    Nested dicts become Configs that know their dotted path, so that an error in `config.algorithm`
    names its section. Arguments are ConfigDict's.

    Raises:
      UnknownKey: `config.key` or `config["key"]` that does not exist: read, or set while locked.
      WrongType: a value of another type than the one it replaces.
    """

    def __init__(
        self,
        initial_dictionary: Mapping[str, Any] | ConfigDict | None = None,
        type_safe: bool = True,
        convert_dict: bool = True,
        **options: bool,
    ):
        object.__setattr__(self, "_path", "")
        super().__init__(None, type_safe, convert_dict, **options)
        initial = {} if initial_dictionary is None else initial_dictionary
        references = {"preserve_field_references": True} if isinstance(initial, ConfigDict) else {}
        for key, value in initial.items(**references):
            self[key] = value
        if isinstance(initial, ConfigDict):
            object.__setattr__(self, "_type_safe", initial.is_type_safe)
            object.__setattr__(self, "_locked", initial.is_locked)

    def __getattr__(self, name: str) -> Any:
        # copy, pickle and notebooks ask every object for such names; they are no keys.
        if name.startswith("_"):
            raise AttributeError(name)
        return self[name]

    def __setattr__(self, name: str, value: Any) -> None:
        try:
            super().__setattr__(name, value)
        except AttributeError as error:
            # ConfigDict wraps the error of __setitem__, whose message is the one line.
            cause = error.args[0]
            raise (cause if isinstance(cause, UnknownKey) else error) from None

    def __getitem__(self, key: str) -> Any:
        if key in self._fields or "." in str(key):
            return super().__getitem__(key)
        raise UnknownKey(_place_in_user_code() + self._unknown(key))

    def __setitem__(self, key: str, value: Any) -> None:
        if key in self._fields:
            value = self._converted(key, value)
        elif self.is_locked:
            raise UnknownKey(_place_in_user_code() + self._unknown(key))
        if isinstance(value, dict) and self.convert_dict:
            value = Config(value, self.is_type_safe)
        super().__setitem__(key, value)
        if isinstance(value, Config):
            value._set_path(self._name_of(key))

    def __eq__(self, other: object) -> bool:
        # ConfigDict's own is asymmetric if the classes differ.
        if not isinstance(other, ConfigDict) or isinstance(other, FrozenConfigDict):
            return False
        return (
            self._fields == other._fields
            and self.is_locked == other.is_locked
            and self.is_type_safe == other.is_type_safe
        )

    __hash__ = None  # type: ignore[assignment]

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._set_path(state["_path"])

    def _converted(self, key: str, value: Any) -> Any:
        held = self._fields[key]
        loose = isinstance(held, FieldReference) or isinstance(value, FieldReference)
        if loose or value is None or not self.is_type_safe:
            return value
        name = self._name_of(key)
        try:
            if not isinstance(held, ConfigDict):
                return convert(name, value, held)
            if not isinstance(value, dict | ConfigDict):
                raise section_error(name, list(flatten(held, f"{name}.")))
        except ConfigError as error:
            raise WrongType(str(error)) from None
        return value

    def _name_of(self, key: str) -> str:
        return f"{self._path}.{key}" if self._path else str(key)

    def _set_path(self, path: str) -> None:
        """Set the dotted path of this section and of those below, for messages."""
        object.__setattr__(self, "_path", path)
        for key, value in self._fields.items():
            if isinstance(value, Config):
                value._set_path(self._name_of(key))

    def _unknown(self, key: str) -> str:
        message = f"unknown key config.{self._name_of(key)}"
        if wished := wish(self._name_of(key)):
            return f"{message}: {wished}"
        if not self._fields:
            return f"{message}; this section has no keys yet"
        if self._path and str(key) == self._path.rpartition(".")[2]:
            return f"{message}: this is config.{self._path} already, so leave out `.{key}`"
        near = difflib.get_close_matches(str(key), map(str, self._fields), n=1)
        near = near or nearest_keys(str(key), list(flatten(self)))
        if not near:
            near = [str(k) for k in self._fields][:3]
        message += f"; did you mean {' or '.join(f'config.{self._name_of(k)}' for k in near)}?"
        if self._path == "algorithm" and self.is_locked and "name" in self._fields:
            message += (
                " Another algorithm's keys come with its name: hjax.get_config('base.py', "
                f"{{'algorithm.name': '{self.name}'}})"
            )
        return message
