"""What the commands share: the config among the arguments, errors as exit statuses, JSON."""

from __future__ import annotations

import json
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from absl import flags

from hjax.errors import ConfigError, RunError
from hjax.launch.config import config_names
from hjax.launch.workdir import to_json


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


def exit_status(run: Callable[[], int]) -> int:
    """What ``run`` returns; 2 for wrong input, 1 for other errors, each said in one line."""
    try:
        return run()
    except ConfigError as error:
        return _fail(error, 2)
    except RunError as error:
        return _fail(error, 1)
    except Exception as error:
        # Not a known kind of failure: where it happened matters more than brevity.
        traceback.print_exc()
        return _fail(error, 1)


def _fail(error: Exception, status: int) -> int:
    text = " ".join(str(error).split()) or type(error).__name__
    if not isinstance(error, (ConfigError, RunError)):
        text = f"{type(error).__name__}: {text}"
    print(f"hjax: error: {text}", file=sys.stderr)
    return status


def json_line(value: Any) -> str:
    """One line of JSON; non-finite numbers become null."""
    return json.dumps(to_json(value), ensure_ascii=False)
