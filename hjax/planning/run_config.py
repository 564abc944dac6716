"""A plan as a run: the config beside its plan.json, so that ``hjax.launch`` runs it as planned."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict

from hjax.config import flatten
from hjax.errors import ConfigError
from hjax.planning.records import Numerics, Workload
from hjax.roles import Role
from hjax.settings.checking import complete_config
from hjax.settings.keys import OWNED_SECTIONS

# Keys that a planned config says anew.
PLACEMENT = "placement"


def keys_of_models(
    algorithm: str,
    table: Mapping[str, Role],
    models: Mapping[str, str],
    work: Workload,
    updates: int,
    numerics: Numerics,
) -> dict[str, Any]:
    """The config's keys, dotted, of a plan that was asked for by models.

    Args:
      algorithm: as ``algorithm.name`` takes it.
      table: its roles.
      models: published name or directory by role.
      work: of a step.
      updates: that its sequences are cut into.

    Raises:
      ConfigError: roles of one section with different models.
    """
    found: dict[str, Any] = {
        "algorithm.name": algorithm,
        "data.path": "prompts.jsonl",
        "model.dtype": numerics.dtype,
        "rollout.prompts": work.sequences // work.samples,
        "rollout.samples": work.samples,
        "rollout.max_prompt_length": work.prompt_length,
        "rollout.max_response_length": work.response_length,
        "algorithm.minibatch": work.sequences // updates,
    }
    for role, name in models.items():
        key = f"{table[role].config_section}.path"
        source = table[role].starts_from
        if found.get(key, name) != name:
            raise ConfigError(
                f"{role}={name}: its config is that of {key}={found[key]}; plan them alike"
            )
        if role == "actor" or not source or models.get(source) != name:
            found[key] = name
    return found


def keys_of_config(config: ConfigDict) -> dict[str, Any]:
    """The keys of a config, dotted, that are not at their defaults."""
    owners = {key: flatten(config)[key] for key in OWNED_SECTIONS.values()}
    usual = flatten(complete_config(owners))
    found = {key: value for key, value in flatten(config).items() if usual.get(key) != value}
    found.pop(PLACEMENT, None)
    return owners | found


def config_text(keys: Mapping[str, Any], title: str, plan: str = "plan.json") -> str:
    """A config file that stands beside a plan.

    Args:
      keys: dotted.
      title: what it is, in a line.
      plan: name of the plan's file.
    """
    lines = "\n".join(f"        {key!r}: {value!r}," for key, value in sorted(keys.items()))
    return f'''"""{title}

What each role gets of devices, its layout, rows per pass, rematerialisation, offload and slots
stand in {plan} beside this file. Paths that name a published shape are enough to
compile; to train, give directories with weights, and prompts (data.path).
"""

import pathlib


def get_config():
    """The run's config."""
    return {{
{lines}
        "{PLACEMENT}": str(pathlib.Path(__file__).resolve().parent / "{plan}"),
    }}
'''
