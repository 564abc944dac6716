"""What the commands share: the config among the arguments, and their own flags."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from absl import flags
from ml_collections import ConfigDict

from hjax.errors import ConfigError, exit_status
from hjax.settings.reading import check_config, config_names, load_config
from hjax.show.help_text import print_help


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


_DEFINE: dict[type, Callable[..., object]] = {
    bool: flags.DEFINE_bool,
    float: flags.DEFINE_float,
    int: flags.DEFINE_integer,
    str: flags.DEFINE_string,
}


def define(own: flags.FlagValues | None = None, **defaults: object) -> flags.FlagValues:
    """A command's flags, with those of ``own``.

    Args:
      defaults: by name; a type is one of that type that is None where it is not given.
    """
    own = flags.FlagValues() if own is None else own
    for name, default in defaults.items():
        kind, value = (default, None) if isinstance(default, type) else (type(default), default)
        _DEFINE[kind](name, value, "see --help", flag_values=own)
    return own


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


def stopped_by_ctrl_c(run: Callable[[], int]) -> int:
    """What ``run`` returns; 130 if Ctrl-C ended it, said in one line."""
    try:
        return run()
    except KeyboardInterrupt:
        print("\nhjax: stopped by SIGINT", file=sys.stderr)
        return 130


def answered(
    arguments: Sequence[str] | None, text: Callable[[], str], run: Callable[[list[str]], int]
) -> int:
    """The exit status of a command: it prints ``text`` for ``--help``, else it runs.

    Args:
      arguments: None: those of this process.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if any(a in ("--help", "-help", "-h") for a in arguments):
        print_help(text())
        return 0
    return exit_status(lambda: run(arguments))


def run_with_config(run: Callable[[ConfigDict], None], text: str) -> NoReturn:
    """The whole of a command that only takes a config: reads it, runs, exits with the status.

    Args:
      run: what it does with the config.
      text: what ``--help`` prints.
    """

    def whole(arguments: list[str]) -> int:
        run(check_config(load_config(*take_config(arguments))))
        return 0

    sys.exit(answered(None, lambda: text, whole))
