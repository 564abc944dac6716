"""Config loading: a Python file with `get_config()`, then defaults, then overrides.

config = load_config("ppo.py", {"rollout.prompts": 32})
config = load_config("ppo.py", ["--config.rollout.prompts=32"])
"""

import copy
import difflib
import inspect
import os
import re
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from absl import flags
from ml_collections import ConfigDict, config_flags

from hjax.config import (
    Config,
    UnknownKey,
    WrongType,
    convert,
    flatten,
    nearest_keys,
    wrong_type_error,
)
from hjax.config_aliases import wish
from hjax.errors import ConfigError, safe_repr
from hjax.roles import ROLES
from hjax.settings.config_checks import (
    check_config,
    complete_config,
    owned_defaults,
    resolve_sizes,
    set_key,
    unknown_key,
    validate,
)
from hjax.settings.keys import OWNED_SECTIONS, default_config
from hjax.user_code import error_line, import_file
from hjax.user_input import user_path

__all__ = [
    "apply_overrides",
    "check_config",
    "config_names",
    "default_config",
    "find_config",
    "get_stages",
    "load_config",
    "setting_origins",
    "settings_without_effect",
]

# The shipped configs, and those of several stages.
CONFIGS = Path(__file__).parents[1] / "launch" / "configs"
STAGES = CONFIGS / "stages"

# Keys of a config that suit its built-in task only. A data file drops all of them; another task
# keeps the first two, under its own meaning, but not the length.
_TASK_KEYS = ("data.task_options.", "warm_start.steps")
_DATA_KEYS = ("data.path", "data.mixture")
_LENGTH_KEY = "rollout.max_response_length"

_OVERRIDE = re.compile(r"^--?(no)?config\.([^=]+)(?:=(.*))?$", re.DOTALL)


def load_config(
    name_or_path: str | os.PathLike[str],
    overrides: Sequence[str] | Mapping[str, Any] = (),
    flag_values: flags.FlagValues | None = None,
    **unknown: object,
) -> Config:
    """Load the complete, validated config of a run.

    Args:
      name_or_path: a Python file with `get_config()`, or the name of one in hjax/launch/configs/
        (`ppo.py` or `ppo`). Text after a colon is passed to `get_config` as its argument.
      overrides: a dict of keys, dotted (`{"rollout.prompts": 32}`) or nested; or command-line
        arguments `--config.a.b=VALUE`, parsed by ml_collections.config_flags. Selecting another
        algorithm or task drops the file's settings of keys that the other one lacks. Selecting a
        data file drops the file's settings for a built-in task: its options, response length and
        warm start.
      flag_values: a command's own flags, parsed along with the overrides; None: overrides only.
      unknown: catches wrong argument names, to suggest the right key.

    Returns:
      a locked Config with all common keys and the algorithm's own. `rollout.max_response_length=0`
      is not resolved, because the data may be chosen later.

    Raises:
      ConfigError: an invalid file, key or value, in one line.
    """
    for name in unknown:
        known = wish(name)
        raise ConfigError(
            f"get_config has no argument {name!r}: keys stand in a dict, as "
            f'get_config("ppo.py", {{"steps": 100}})' + (f"; {known}" if known else "")
        )
    if not isinstance(name_or_path, str | os.PathLike):
        raise ConfigError(
            f"get_config was given {safe_repr(name_or_path)}; it takes a config's name or file, "
            'such as "ppo.py"'
        )
    if not isinstance(overrides, Mapping | Sequence) or isinstance(overrides, str):
        raise ConfigError(
            f"get_config was given {safe_repr(overrides)} for keys with their values; they stand "
            'in a dict, as get_config("ppo.py", {"steps": 100})'
        )
    path, colon, argument = str(name_or_path).partition(":")
    found = _call(find_config(path), "get_config", argument if colon else None)
    return apply_overrides(_check_type(str(find_config(path)), found), overrides, flag_values)


def apply_overrides(
    found: ConfigDict | Mapping[str, Any],
    overrides: Sequence[str] | Mapping[str, Any] = (),
    flag_values: flags.FlagValues | None = None,
) -> Config:
    """``load_config`` for what a file's ``get_config`` returned."""
    given = flatten(found)
    if isinstance(overrides, Mapping):
        wanted = flatten(overrides)
        _drop_inapplicable(given, wanted)
        return validate(given | wanted)
    _check_common_keys(overrides)
    _drop_inapplicable(given, _selected_owners(overrides))
    config = complete_config(given)
    _parse_flags(config, overrides, flag_values if flag_values is not None else flags.FlagValues())
    return validate(config)


def get_stages(name_or_path: str) -> tuple[types.ModuleType, dict[str, Any]] | None:
    """The stages of a file that defines `get_stages()`; None for a file that does not.

    Args:
      name_or_path: as in ``load_config``; text after a colon is passed to `get_stages`.

    Returns:
      the file's module, and its stages' configs by name, in order.

    Raises:
      ConfigError: the file cannot be read, or `get_stages()` returns no valid stages.
    """
    name, colon, argument = name_or_path.partition(":")
    path = find_config(name)
    module = import_file(path, f"--config={path}")
    if not hasattr(module, "get_stages"):
        return None
    found = _call(path, "get_stages", argument if colon else None)
    if not isinstance(found, Mapping) or not found:
        raise ConfigError(f"--config={path}: get_stages() returned no stages, as a dict by name")
    sections = default_config()
    for stage, config in found.items():
        if not re.fullmatch(r"[A-Za-z]\w*", str(stage)) or stage in sections:
            raise ConfigError(
                f"--config={path}: a stage is called {stage!r}; it must be a word, and none of "
                f"{', '.join(sections)}"
            )
        _check_type(f"{path}: stage {stage}", config)
    return module, dict(found)


def config_names(stages: bool = False) -> list[str]:
    """Names of the shipped configs, e.g. `ppo.py`; with ``stages`` multi-stage ones too."""
    folders = (CONFIGS, STAGES) if stages else (CONFIGS,)
    return sorted(p.name for f in folders for p in f.glob("*.py") if p.name != "__init__.py")


def find_config(name_or_path: str) -> Path:
    """The file that `--config` names: a path, else one of hjax/launch/configs/.

    Raises:
      ConfigError: there is no such file.
    """
    path, shipped = user_path(name_or_path, "--config="), None
    if os.path.basename(name_or_path) == name_or_path:
        files = [folder / f"{name_or_path.removesuffix('.py')}.py" for folder in (CONFIGS, STAGES)]
        shipped = next((f for f in files if f.is_file() and f.name != "__init__.py"), None)
    # A file of the same name here that is no config does not stand in a shipped one's way.
    if path.is_file() and shipped is not None:
        return path if re.search(rb"get_(config|stages)", path.read_bytes()) else shipped
    if path.is_file() or shipped is not None:
        return shipped or path
    names = config_names(stages=True)
    near = difflib.get_close_matches(name_or_path, names, n=1, cutoff=0.7)
    meant = f"did you mean {near[0]}? Give" if near else "give"
    raise ConfigError(
        f"--config={name_or_path}: no such file; {meant} a path, or one of {', '.join(names)}"
    )


def _check_common_keys(arguments: Sequence[str]) -> None:
    """Refuse unknown keys of sections that all runs have, before an algorithm imports JAX."""
    common = flatten(default_config())
    for argument in arguments:
        match = _OVERRIDE.match(argument)
        if match is None or match[2] in common or match[2].startswith(tuple(OWNED_SECTIONS)):
            continue
        # What is like none of these may be like a key of the algorithm's.
        section = any(key.startswith(f"{match[2]}.") for key in common)
        if section or wish(match[2]) or difflib.get_close_matches(match[2], common, cutoff=0.75):
            raise unknown_key(match[2], common, common)


def _selected_owners(arguments: Sequence[str]) -> dict[str, str]:
    """The algorithm, task and data path that command-line arguments select, by key."""
    named = {}
    for argument, following in zip(arguments, [*arguments[1:], ""]):
        match = _OVERRIDE.match(argument)
        if match and match[2] in (*OWNED_SECTIONS.values(), *_DATA_KEYS):
            named[match[2]] = following if match[3] is None else match[3]
    return named


def _drop_inapplicable(given: dict[str, Any], named: Mapping[str, Any]) -> None:
    """Drop a file's settings that do not apply to the algorithm, task or data of the overrides.

    They are removed from ``given`` (dotted key to value).
    """
    task = given.get("data.task")
    for section, selector in OWNED_SECTIONS.items():
        if selector not in named:
            continue
        default = flatten(default_config())[selector]
        before = convert(selector, given.get(selector, default), default)
        given[selector] = convert(selector, named[selector], default)
        dropped = owned_defaults(section, before).keys() - owned_defaults(section, given[selector])
        for key in dropped:
            given.pop(f"{section}.{key}", None)
    own_file = any(map(named.get, _DATA_KEYS)) and not any(map(given.get, _DATA_KEYS))
    if any(map(named.get, _DATA_KEYS)):  # one of them takes the other's place
        for key in _DATA_KEYS:
            given.pop(key, None)
    if own_file:
        for key in [k for k in given if k.startswith(_TASK_KEYS)]:
            del given[key]
    if own_file or named.get("data.task", task) != task:
        given.pop(_LENGTH_KEY, None)


def _call(path: Path, name: str, argument: str | None) -> Any:
    """Import the file and call its `get_config` or `get_stages`."""
    module = import_file(path, f"--config={path}")
    if not hasattr(module, name):
        stages = hasattr(module, "get_stages")
        raise ConfigError(
            f"--config={path}: the file defines no {name}()"
            + ("; its stages are run by `python -m hjax.launch`" if stages else "")
        )
    function = getattr(module, name)
    if argument is not None and not _takes_argument(function):
        from hjax.data.tasks import TASKS

        say = f"--config.data.task={argument}" if argument in TASKS else "--config.KEY=VALUE"
        raise ConfigError(
            f"--config={path.name}:{argument}: {name}() of {path.name} takes nothing after the "
            f"colon; say --config={path.name} {say}"
        )
    try:
        return function() if argument is None else function(argument)
    except (UnknownKey, WrongType) as error:
        raise ConfigError(f"--config={path}: {error_line(path, error)}") from error
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"--config={path}: {error_line(path, error)}") from error


def _takes_argument(function: Callable[..., Any]) -> bool:
    """Whether the function accepts the text after the colon."""
    try:
        inspect.signature(function).bind("")
    except TypeError:
        return False
    return True


def _check_type(what: str, config: Any) -> ConfigDict | dict[str, Any]:
    """Check that a file's function returned a config."""
    if not isinstance(config, (ConfigDict, dict)):
        raise ConfigError(
            f"--config={what}: get_config() returned {type(config).__name__}, not a ConfigDict"
        )
    return config


def _parse_flags(config: ConfigDict, overrides: Sequence[str], values: flags.FlagValues) -> None:
    """Parse command-line overrides into ``config``, with one-line errors."""
    known, named = flatten(config), Config()
    for given in overrides:
        match = _OVERRIDE.match(given)
        if match and match[2] not in known:
            raise unknown_key(match[2], known, known)
        if match:  # absl prints all that it is given, which takes longer than the rest
            set_key(named, match[2], known[match[2]])
    arguments = list(overrides)
    config.unlock()
    try:
        config_flags.DEFINE_config_dict(
            "config",
            named,
            flag_values=values,
            lock_config=False,
            sys_argv=["hjax.launch", *arguments],
        )
        rest = values(["hjax.launch", *arguments])[1:]
    except flags.Error as error:
        raise _flag_error(error, known, values) from error
    except (ValueError, TypeError, KeyError) as error:
        text = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise ConfigError(f"an option cannot be read: {text}") from error
    for key, value in flatten(named).items():
        set_key(config, key, value)
    if rest:
        name = rest[0].partition("=")[0]
        if alias := wish(name):
            raise ConfigError(f"unexpected argument {rest[0]!r}: {alias}")
        if name != rest[0]:
            near = " or ".join(f"--config.{key}" for key in nearest_keys(name, known))
            raise ConfigError(f"unexpected argument {rest[0]!r}; did you mean {near}=VALUE?")
        raise ConfigError(
            f"unexpected argument {rest[0]!r}; options begin with -- and take =VALUE, see --help"
        )


def _flag_error(error: flags.Error, known: dict[str, Any], values: flags.FlagValues) -> ConfigError:
    """absl's flag error in one line, with the key's type or the nearest flag."""
    text = " ".join(str(error).split())
    match = re.match(r"flag --config\.([^=\s]+)=(.*?): ", text)
    if match and match[1] in known:
        return wrong_type_error(match[1], match[2], known[match[1]])
    if isinstance(error, flags.UnrecognizedFlagError):
        if alias := wish(error.flagname):
            return ConfigError(f"unknown flag --{error.flagname}: {alias}")
        names = [*values, *(f"config.{key}" for key in known)]
        near = difflib.get_close_matches(error.flagname, names, n=1)
        text = text.partition(" Did you mean")[0].rstrip(".?")
        text += f"; did you mean --{near[0]}?" if near else "; --help lists what there is"
    return ConfigError(text[:1].lower() + text[1:])


def setting_origins(name_or_path: str, config: ConfigDict) -> list[dict[str, Any]]:
    """Which settings differ from their defaults, and where each came from.

    Args:
      name_or_path: of the config file, as for `load_config`.
      config: of the run, complete and validated.

    Returns:
      a row per key: ``key``, ``value``, ``set by`` (the command, the file's name, or the data,
      which resolves sizes of 0), and ``instead of``: the overridden default (of the algorithm, the
      task or all runs) and file value, or that the key has no effect.
    """
    unused = _unused_sections(config)
    named = {key: flatten(config)[key] for key in OWNED_SECTIONS.values()}
    defaults = flatten(complete_config(named))
    file = name_or_path.partition(":")[0].rpartition("/")[2]
    chosen = {key: flatten(config)[key] for key in _DATA_KEYS}
    # With the command's algorithm, task and data, which decide what the file's settings mean.
    own = flatten(load_config(name_or_path, named | chosen))
    given = flatten(load_config(name_or_path))
    rows = []
    for key, value in flatten(config).items():
        default, in_file = defaults[key], own.get(key, defaults[key])
        if key in named or key in _DATA_KEYS:
            in_file = given[key]
        if value == default and value == in_file:
            continue
        by = file if value == in_file else "the command"
        if key == _LENGTH_KEY and not in_file and value == _length_of_data(config):
            by = "the data"
        whose = _default_owner(key, config)
        instead = f"{default!r} ({whose})" if value != default else ""
        if value != in_file and in_file != default:
            instead += f"{', ' if instead else ''}{in_file!r} ({file})"
        instead = unused.get(key.partition(".")[0], instead)
        rows.append({"key": key, "value": repr(value), "set by": by, "instead of": instead})
    return rows


def _length_of_data(config: ConfigDict) -> int:
    """What `rollout.max_response_length=0` is resolved to."""
    open_length = copy.deepcopy(config)
    open_length.rollout.max_response_length = 0
    return int(resolve_sizes(open_length).rollout.max_response_length)


def settings_without_effect(name_or_path: str, config: ConfigDict) -> list[str]:
    """A line for each command-line setting of a role that the algorithm does not have."""
    unused = _unused_sections(config)
    return [
        f"--config.{row['key']}={row['value']} has {row['instead of']}"
        for row in setting_origins(name_or_path, config)
        if row["set by"] == "the command" and row["key"].partition(".")[0] in unused
    ]


def _unused_sections(config: ConfigDict) -> dict[str, str]:
    """Config sections of roles that the algorithm does not have, with an explanation."""
    from hjax.algorithms import get_algorithm

    algorithm = get_algorithm(config.algorithm.name)
    sections = {role.config_section for role in ROLES.values()} - {"actor"}
    sections -= {role.config_section for role in algorithm.role_table(config.algorithm).values()}
    return {name: f"no effect: {algorithm.__name__} has no {name} here" for name in sections}


def _default_owner(key: str, config: ConfigDict) -> str:
    for section, selector in OWNED_SECTIONS.items():
        if key.startswith(f"{section}.") and key != selector:
            return f"{flatten(config)[selector]}'s default"
    return "default"
