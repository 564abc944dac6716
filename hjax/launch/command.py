"""What the commands share: the config among the arguments, and their own flags."""

import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

from absl import flags
from ml_collections import ConfigDict

from hjax.errors import ConfigError, exit_status
from hjax.rules import Rule
from hjax.settings.config_loading import check_config, config_names, load_config
from hjax.user_input import user_path


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


# What a flag of `compile` and of `plan --compile` was.
ROOFLINE = (
    "--roofline: how long compiled programs take by data sheet says, in a clone of hjax, "
    "python benchmarks/roofline.py --config=NAME.py --topology=KIND:SIZES"
)

_DEFINE: dict[type, Callable[..., object]] = {
    bool: flags.DEFINE_bool,
    float: flags.DEFINE_float,
    int: flags.DEFINE_integer,
    list: flags.DEFINE_multi_string,
    str: flags.DEFINE_string,
}


def define(own: flags.FlagValues | None = None, **defaults: object) -> flags.FlagValues:
    """A command's flags, with those of ``own``.

    Args:
      defaults: by name; a type is one of that type that is None where it is not given, a list one
        that may be given several times, a tuple the words that it may be, the first the default.
    """
    own = flags.FlagValues() if own is None else own
    for name, default in defaults.items():
        if isinstance(default, tuple):
            flags.DEFINE_enum(name, default[0], default, "see --help", flag_values=own)
            continue
        kind, value = (default, None) if isinstance(default, type) else (type(default), default)
        _DEFINE[kind](name, value, "see --help", flag_values=own)
    return own


def settle(own: flags.FlagValues, rules: Mapping[str, Rule]) -> None:
    """Check the values of a command that reads a model: --model must be given, and a ~ in it is
    read as a shell does; --family's class is taken.

    Args:
      rules: by flag.

    Raises:
      ConfigError: the first that is not as it must be.
    """
    if not own["model"].value:
        raise ConfigError("--model is missing; see --help")
    own["model"].value = str(user_path(own["model"].value, "--model="))
    for name, rule in rules.items():
        if own[name].value is not None and not rule.holds(own[name].value):
            raise ConfigError(f"--{name}={own[name].value}: must be {rule.text}")
    if own["family"].value:
        from hjax.models.families import load_family

        load_family(own["family"].value, "--family")


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


# As wide as such texts are written, and as narrow as they are made; characters.
WRITTEN, NARROWEST = 100, 50
# Descriptions beside a flag are no narrower; else they stand below it.
_DESCRIPTION = 24
_USAGE = "usage:     "


def print_help(text: str) -> None:
    """Print a text of flags and sentences, its lines folded where the terminal is narrower."""
    columns = shutil.get_terminal_size((WRITTEN, 24)).columns
    print(folded(text, min(max(columns, NARROWEST), WRITTEN)), end="")


def folded(text: str, width: int) -> str:
    """A text in lines of so many characters or fewer; what is beside a flag stays in its column.

    A line goes on in those below it that are indented further and name no flag; a sentence in those
    that begin where it does. Words are not cut.
    """
    made: list[str] = []
    lines = text.splitlines()
    while lines:
        taken = [lines.pop(0)]
        while lines and _goes_on(taken[0], lines[0]):
            taken.append(lines.pop(0))
        made += taken if max(map(len, taken)) <= width else _fold(taken, width)
    return "\n".join(made) + "\n"


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def _head(line: str) -> str:
    """A flag and the space behind it, where a description stands beside it; else the indent."""
    flag = re.match(r"\s+-\S.*?\s{2,}(?=\S)|\s*", line)
    return flag[0] if flag else ""


def _is_usage(line: str) -> bool:
    return line.startswith(("usage:", " " * len("usage: ") + "python"))


def _goes_on(first: str, line: str) -> bool:
    if not first.strip() or not line.strip():
        return False
    if line.lstrip().startswith("-"):  # a flag, unless a description names one
        return bool(_head(first).strip()) and _indent(line) == len(_head(first))
    if _is_usage(first):
        return _indent(line) > len("usage: ")
    if _head(first).strip() or first.lstrip().startswith("-"):
        return _indent(line) > _indent(first)
    return _indent(line) == _indent(first)


def _fold(lines: list[str], width: int) -> list[str]:
    head = _head(lines[0])
    hang = len(_USAGE) if _is_usage(lines[0]) else _indent(lines[1]) if lines[1:] else len(head)
    words = " ".join([lines[0][len(head) :], *(line.strip() for line in lines[1:])])
    above: list[str] = []
    if hang > width - _DESCRIPTION or len(head) > width - _DESCRIPTION:
        hang = min(hang, _indent(lines[0]) + 4)
        if head.strip():
            above, head = [head.rstrip()], " " * hang
    return above + textwrap.wrap(
        words,
        width,
        initial_indent=head,
        subsequent_indent=" " * hang,
        break_long_words=False,
        break_on_hyphens=False,
    )
