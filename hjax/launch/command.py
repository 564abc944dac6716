"""What the commands share: the config among the arguments, errors as exit statuses, JSON."""

from __future__ import annotations

import json
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any

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
