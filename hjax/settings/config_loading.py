"""Reading a config: a Python file with `get_config()`, the algorithm's keys, then overrides.

config = load_config("ppo.py", {"rollout.prompts": 32})
config = load_config("ppo.py", ["--config.rollout.prompts=32"])
"""

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
    checked,
    complete_config,
    owned_defaults,
    unknown_key,
)
from hjax.settings.keys import OWNED_SECTIONS, default_config
from hjax.user_code import error_line, import_file
from hjax.user_input import user_path

__all__ = [
    "check_config",
    "config_names",
    "default_config",
    "find_config",
    "get_stages",
    "load_config",
    "load_given",
    "origins",
    "without_effect",
]

# The shipped ones, and those of several stages.
CONFIGS = Path(__file__).parents[1] / "launch" / "configs"
STAGES = CONFIGS / "stages"

# What a config says of its built-in task, which prompts of a file have not; another task has the
# first two, of its own, but not the length.
_OF_A_TASK = ("data.task_options.", "warm_start.steps")
_LENGTH = "rollout.max_response_length"

_OVERRIDE = re.compile(r"^--?(no)?config\.([^=]+)(?:=(.*))?$", re.DOTALL)


def load_config(
    name_or_path: str | os.PathLike[str],
    overrides: Sequence[str] | Mapping[str, Any] = (),
    flag_values: flags.FlagValues | None = None,
    **unknown: object,
) -> Config:
    """The complete, checked config of a run.

    Args:
      name_or_path: a Python file with `get_config()`, or the name of one in hjax/launch/configs/
        (`ppo.py` or `ppo`). What follows a colon is handed to `get_config` as its argument.
      overrides: keys with their values, dotted (`{"rollout.prompts": 32}`) or nested; or
        command-line arguments `--config.a.b=VALUE`, with the meaning that
        ml_collections.config_flags gives them. Naming another algorithm or task leaves out what
        the file set for its own and the other one does not have; naming a file of prompts what it
        set for a built-in task: its options, its length of a response, the warm start on its
        demonstrations.
      flag_values: flags that may stand between the arguments (a command's own); they are parsed
        along. None: overrides only.
      unknown: there is no other argument; what people try is answered.

    Returns:
      a locked Config with all common keys and the algorithm's own. A
      `rollout.max_response_length` of 0 stands as it is, for data that is named later.

    Raises:
      ConfigError: whatever is wrong with the file, a key or a value, in one line.
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
    return load_given(_as_config(str(find_config(path)), found), overrides, flag_values)


def load_given(
    found: ConfigDict | Mapping[str, Any],
    overrides: Sequence[str] | Mapping[str, Any] = (),
    flag_values: flags.FlagValues | None = None,
) -> Config:
    """``load_config`` of what a file's ``get_config`` gave."""
    given = flatten(found)
    if isinstance(overrides, Mapping):
        wanted = flatten(overrides)
        _choose_owners(given, wanted)
        return checked(given | wanted)
    _choose_owners(given, _owners_named(overrides))
    config = complete_config(given)
    _apply(config, overrides, flag_values if flag_values is not None else flags.FlagValues())
    return checked(config)


def get_stages(name_or_path: str) -> tuple[types.ModuleType, dict[str, Any]] | None:
    """The stages of a file with `get_stages()` instead of `get_config()`; None of another file.

    Args:
      name_or_path: as of ``load_config``; what follows a colon is handed to `get_stages`.

    Returns:
      the file's module, and by name, in their order, what its stages' `get_config` would give.

    Raises:
      ConfigError: the file cannot be read, or what it returns are no stages.
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
        _as_config(f"{path}: stage {stage}", config)
    return module, dict(found)


def config_names(stages: bool = False) -> list[str]:
    """The files in hjax/launch/configs/, e.g. `ppo.py`; with ``stages`` those of several too."""
    folders = (CONFIGS, STAGES) if stages else (CONFIGS,)
    return sorted(p.name for f in folders for p in f.glob("*.py") if p.name != "__init__.py")


def find_config(name_or_path: str) -> Path:
    """The file that a `--config` names: a path, else one of hjax/launch/configs/.

    Raises:
      ConfigError: there is none.
    """
    path = user_path(name_or_path, "--config=")
    if path.is_file():
        return path
    if os.path.basename(name_or_path) == name_or_path:
        for folder in (CONFIGS, STAGES):
            shipped = folder / f"{name_or_path.removesuffix('.py')}.py"
            if shipped.is_file() and shipped.name != "__init__.py":
                return shipped
    raise ConfigError(
        f"--config={name_or_path}: no such file; give a path, or one of "
        f"{', '.join(config_names(stages=True))}"
    )


def _owners_named(arguments: Sequence[str]) -> dict[str, str]:
    """The algorithm and the task that command-line arguments name, by their keys."""
    named = {}
    for argument, following in zip(arguments, [*arguments[1:], ""]):
        match = _OVERRIDE.match(argument)
        if match and match[2] in (*OWNED_SECTIONS.values(), "data.path"):
            named[match[2]] = following if match[3] is None else match[3]
    return named


def _choose_owners(given: dict[str, Any], named: Mapping[str, Any]) -> None:
    """Let the algorithm and the task that overrides name decide which keys there are.

    What the file set for its own algorithm or task and the other one does not have is left out of
    ``given`` (dotted key to value): it has no meaning there.
    """
    task = given.get("data.task")
    for section, selector in OWNED_SECTIONS.items():
        if selector not in named:
            continue
        default = flatten(default_config())[selector]
        before = convert(selector, given.get(selector, default), default)
        given[selector] = convert(selector, named[selector], default)
        gone = owned_defaults(section, before).keys() - owned_defaults(section, given[selector])
        for key in gone:
            given.pop(f"{section}.{key}", None)
    own_file = bool(named.get("data.path")) and not given.get("data.path")
    if own_file:
        for key in [k for k in given if k.startswith(_OF_A_TASK)]:
            del given[key]
    if own_file or named.get("data.task", task) != task:
        given.pop(_LENGTH, None)


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
    if argument is not None and not _takes_one(function):
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


def _takes_one(function: Callable[..., Any]) -> bool:
    """Whether it can be called with what stands after the colon."""
    try:
        inspect.signature(function).bind("")
    except TypeError:
        return False
    return True


def _as_config(what: str, config: Any) -> ConfigDict | dict[str, Any]:
    """What a file's function returned, if that is a config."""
    if not isinstance(config, (ConfigDict, dict)):
        raise ConfigError(
            f"--config={what}: get_config() returned {type(config).__name__}, not a ConfigDict"
        )
    return config


def _apply(config: ConfigDict, overrides: Sequence[str], values: flags.FlagValues) -> None:
    """Parse the overrides into ``config``, with one-line errors."""
    known = flatten(config)
    for given in overrides:
        match = _OVERRIDE.match(given)
        if match and match[2] not in known:
            raise unknown_key(match[2], known, known)
    arguments = list(overrides)
    config.unlock()
    try:
        config_flags.DEFINE_config_dict(
            "config",
            config,
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
    if rest:
        name = rest[0].partition("=")[0]
        if wished := wish(name):
            raise ConfigError(f"unexpected argument {rest[0]!r}: {wished}")
        if name != rest[0]:
            near = " or ".join(f"--config.{key}" for key in nearest_keys(name, known))
            raise ConfigError(f"unexpected argument {rest[0]!r}; did you mean {near}=VALUE?")
        raise ConfigError(
            f"unexpected argument {rest[0]!r}; options begin with -- and take =VALUE, see --help"
        )


def _flag_error(
    error: flags.Error, known: dict[str, Any], values: flags.FlagValues
) -> ConfigError:
    """absl's complaint as a line that says what type the key has, or which flag is nearest."""
    text = " ".join(str(error).split())
    match = re.match(r"flag --config\.([^=\s]+)=(.*?): ", text)
    if match and match[1] in known:
        return wrong_type_error(match[1], match[2], known[match[1]])
    if isinstance(error, flags.UnrecognizedFlagError):
        if wished := wish(error.flagname):
            return ConfigError(f"unknown flag --{error.flagname}: {wished}")
        names = [*values, *(f"config.{key}" for key in known)]
        near = difflib.get_close_matches(error.flagname, names, n=1)
        text = text.partition(" Did you mean")[0].rstrip(".?")
        text += f"; did you mean --{near[0]}?" if near else "; --help lists what there is"
    return ConfigError(text[:1].lower() + text[1:])


def origins(name_or_path: str, config: ConfigDict) -> list[dict[str, Any]]:
    """The settings that are not at their defaults, and what won over what.

    Args:
      name_or_path: of the config file, as `load_config` takes it.
      config: the run's: complete and checked.

    Returns:
      by key: ``key``, ``value``, ``set by`` (the command, the file's name, or the data, which
      decides sizes that are 0), and ``instead of``: the default of the algorithm's class, of the
      task or of all runs, with the file's value where the command won over one, or that the
      algorithm has no such role.
    """
    unused = _unused(config)
    named = {key: flatten(config)[key] for key in OWNED_SECTIONS.values()}
    defaults = flatten(complete_config(named))
    file = name_or_path.partition(":")[0].rpartition("/")[2]
    # With the command's algorithm and task, which decide what of the file counts.
    own = flatten(load_config(name_or_path, named | {"data.path": config.data.path}))
    given = flatten(load_config(name_or_path))
    rows = []
    for key, value in flatten(config).items():
        default, in_file = defaults[key], own.get(key, defaults[key])
        if key in named or key == "data.path":
            in_file = given[key]
        if value == default and value == in_file:
            continue
        by = file if value == in_file else "the command"
        if key == "rollout.max_response_length" and not in_file and by == "the command":
            by = "the data"
        whose = _whose(key, config)
        instead = f"{default!r} ({whose})" if value != default else ""
        if value != in_file and in_file != default:
            instead += f"{', ' if instead else ''}{in_file!r} ({file})"
        instead = unused.get(key.partition(".")[0], instead)
        rows.append({"key": key, "value": repr(value), "set by": by, "instead of": instead})
    return rows


def without_effect(name_or_path: str, config: ConfigDict) -> list[str]:
    """A line for each setting of the command's that is of a role which the algorithm has not."""
    unused = _unused(config)
    return [
        f"--config.{row['key']}={row['value']} has {row['instead of']}"
        for row in origins(name_or_path, config)
        if row["set by"] == "the command" and row["key"].partition(".")[0] in unused
    ]


def _unused(config: ConfigDict) -> dict[str, str]:
    """Sections of roles that the algorithm has not, and what to say of their settings."""
    from hjax.algorithms import get_algorithm

    algorithm = get_algorithm(config.algorithm.name)
    sections = {role.config_section for role in ROLES.values()} - {"actor"}
    sections -= {role.config_section for role in algorithm.role_table(config.algorithm).values()}
    return {name: f"no effect: {algorithm.__name__} has no {name} here" for name in sections}


def _whose(key: str, config: ConfigDict) -> str:
    for section, selector in OWNED_SECTIONS.items():
        if key.startswith(f"{section}.") and key != selector:
            return f"{flatten(config)[selector]}'s default"
    return "default"
