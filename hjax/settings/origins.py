"""Where the values of a run's settings come from: the command, its config file, or a default."""

from __future__ import annotations

from typing import Any

from ml_collections import ConfigDict

from hjax.config import flatten
from hjax.roles import ROLES
from hjax.settings.checking import complete_config
from hjax.settings.keys import OWNED_SECTIONS
from hjax.settings.reading import load_config


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
