"""What the commands share: the config among the arguments, and their own flags."""

from __future__ import annotations

import re
from collections.abc import Sequence

from absl import flags

from hjax.errors import ConfigError
from hjax.settings.reading import config_names


def take_config(arguments: Sequence[str]) -> tuple[str, list[str]]:
    """The value of --config, and the other arguments.

    Raises:
      ConfigError: there is none.
    """
    name, rest, waiting = "", [], False
    for argument in arguments:
        if waiting:
            name, waiting = argument, False
        elif argument in ("--config", "-config"):
            waiting = True
        elif match := re.match(r"--?config=(.*)", argument, re.DOTALL):
            name = match[1]
        else:
            rest.append(argument)
    if not name:
        raise ConfigError(
            "--config=NAME.py is missing; give a config file, or one of "
            + ", ".join(config_names())
        )
    return name, rest


def parse_flags(own: flags.FlagValues, arguments: Sequence[str]) -> None:
    """Give a command's flags their values.

    Raises:
      ConfigError: an unknown flag, a wrong value, or what is no flag.
    """
    try:
        rest = own(["hjax", *arguments])[1:]
    except flags.Error as error:
        raise ConfigError(f"{error}; see --help") from error
    if rest:
        raise ConfigError(f"unexpected argument {rest[0]!r}; flags are --name=value, see --help")
