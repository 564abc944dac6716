"""Command-line helpers: the --config flag, a command's flags, help text, exit statuses."""

import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NoReturn

from absl import flags
from ml_collections import ConfigDict

from hjax.errors import ConfigError, exit_status
from hjax.files import json_line
from hjax.rules import Rule
from hjax.settings.config_loading import check_config, config_names, load_config
from hjax.user_input import user_path


def split_config_flag(arguments: Sequence[str]) -> tuple[str, list[str]]:
    """The value of --config, and the other arguments.

    Raises:
      ConfigError: --config is missing.
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
        named = next((x for x in rest if x.endswith(".py") and not x.startswith("-")), "")
        raise ConfigError(
            f"--config=NAME.py is missing; did you mean --config={named}?"
            if named
            else "--config=NAME.py is missing; give a config file, or one of "
            + ", ".join(config_names())
        )
    return name, rest


# Error message for a flag that `compile` and `plan --compile` used to have.
ROOFLINE_MESSAGE = (
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


def define_flags(args: flags.FlagValues | None = None, **defaults: object) -> flags.FlagValues:
    """Define flags, in ``args`` where that is given; returns the flag values.

    Args:
      defaults: by flag name. A type defines a flag of that type with the default None, a list a
        repeatable flag, a tuple an enumeration whose first word is the default.
    """
    args = flags.FlagValues() if args is None else args
    for name, default in defaults.items():
        if isinstance(default, tuple):
            flags.DEFINE_enum(name, default[0], default, "see --help", flag_values=args)
            continue
        kind, value = (default, None) if isinstance(default, type) else (type(default), default)
        _DEFINE[kind](name, value, "see --help", flag_values=args)
    return args


def check_model_flags(args: flags.FlagValues, rules: Mapping[str, Rule]) -> None:
    """Validate the flags of a command that reads a model.

    --model is required, with ~ expanded; the class of --family is registered.

    Args:
      rules: by flag.

    Raises:
      ConfigError: the first invalid flag.
    """
    if not args["model"].value:
        raise ConfigError("--model is missing; see --help")
    args["model"].value = str(user_path(args["model"].value, "--model="))
    for name, rule in rules.items():
        if args[name].value is not None and not rule.holds(args[name].value):
            raise ConfigError(f"--{name}={args[name].value}: must be {rule.text}")
    if args["family"].value:
        from hjax.models.families import load_family

        load_family(args["family"].value, "--family")


def parse_flags(args: flags.FlagValues, arguments: Sequence[str]) -> None:
    """Parse the arguments into ``args``.

    Raises:
      ConfigError: an unknown flag, a wrong value, or a positional argument.
    """
    for argument in arguments:
        # absl's own: a file of flags, and flags that are passed over.
        if re.match("--?(flagfile|undefok)(=|$)", argument):
            raise ConfigError(f"Unknown command line flag '{argument.lstrip('-')}'; see --help")
    try:
        rest = args(["hjax", *arguments])[1:]
    except flags.Error as error:
        raise ConfigError(f"{error}; see --help") from error
    if rest:
        raise ConfigError(f"unexpected argument {rest[0]!r}; flags are --name=value, see --help")


def print_json(wanted: bool, value: Any) -> None:
    """With ``--json`` one line of JSON as the last of the output."""
    if wanted:
        sys.stdout.flush()
        print(json_line(value))


def check_listed(args: flags.FlagValues, name: str, allowed: Collection[str]) -> None:
    """Raise ConfigError unless a flag has one of the ``allowed`` values."""
    if args[name].value not in allowed:
        raise ConfigError(f"--{name}={args[name].value}: one of {', '.join(allowed)}")


def status_on_ctrl_c(run: Callable[[], int]) -> int:
    """The result of ``run``; or 130 and one line of output if Ctrl-C ended it."""
    try:
        return run()
    except KeyboardInterrupt:
        print("\nhjax: stopped by SIGINT", file=sys.stderr)
        return 130


def run_or_help(
    arguments: Sequence[str] | None, text: Callable[[], str], run: Callable[[list[str]], int]
) -> int:
    """Print ``text`` for ``--help``, else call ``run``; returns the exit status.

    Args:
      arguments: None: those of this process.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if any(a in ("--help", "-help", "-h") for a in arguments):
        print_help(text())
        return 0
    return exit_status(lambda: run(arguments))


def run_with_config(run: Callable[[ConfigDict], None], text: str) -> NoReturn:
    """Main function of a command that only takes a config; exits with the status.

    Args:
      run: called with the config.
      text: printed for ``--help``.
    """

    def read_and_run(arguments: list[str]) -> int:
        run(check_config(load_config(*split_config_flag(arguments))))
        return 0

    sys.exit(run_or_help(None, lambda: text, read_and_run))


# Width of help texts, in characters: as in the source, and the narrowest they are wrapped to.
MAX_HELP_WIDTH, MIN_HELP_WIDTH = 100, 50
# A description narrower than this is put below its flag.
_MIN_DESCRIPTION_WIDTH = 24
_USAGE = "usage:     "


def print_help(text: str) -> None:
    """Print a help text, wrapped to the width of the terminal."""
    columns = shutil.get_terminal_size((MAX_HELP_WIDTH, 24)).columns
    print(wrap_help(text, min(max(columns, MIN_HELP_WIDTH), MAX_HELP_WIDTH)), end="")


def wrap_help(text: str, width: int) -> str:
    """Wrap a help text to a width; descriptions stay in their column beside the flags.

    A flag's line is continued by lines that are indented further and start with no flag, a sentence
    by lines of the same indent. Words are not broken.
    """
    wrapped: list[str] = []
    lines = text.splitlines()
    while lines:
        paragraph = [lines.pop(0)]
        while lines and _is_continuation(paragraph[0], lines[0]):
            paragraph.append(lines.pop(0))
        wrapped += paragraph if max(map(len, paragraph)) <= width else _fold(paragraph, width)
    return "\n".join(wrapped) + "\n"


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def _flag_prefix(line: str) -> str:
    """A flag and the space before its description; the indent of a line without a flag."""
    flag = re.match(r"\s+-\S.*?\s{2,}(?=\S)|\s*", line)
    return flag[0] if flag else ""


def _is_usage(line: str) -> bool:
    return line.startswith(("usage:", " " * len("usage: ") + "python"))


def _is_continuation(first: str, line: str) -> bool:
    if not first.strip() or not line.strip():
        return False
    if line.lstrip().startswith("-"):  # a flag, or a description that begins with one
        return bool(_flag_prefix(first).strip()) and _indent(line) == len(_flag_prefix(first))
    if _is_usage(first):
        return _indent(line) > len("usage: ")
    if _flag_prefix(first).strip() or first.lstrip().startswith("-"):
        return _indent(line) > _indent(first)
    return _indent(line) == _indent(first)


def _fold(lines: list[str], width: int) -> list[str]:
    head = _flag_prefix(lines[0])
    hang = len(_USAGE) if _is_usage(lines[0]) else _indent(lines[1]) if lines[1:] else len(head)
    words = " ".join([lines[0][len(head) :], *(line.strip() for line in lines[1:])])
    flag_line: list[str] = []
    if hang > width - _MIN_DESCRIPTION_WIDTH or len(head) > width - _MIN_DESCRIPTION_WIDTH:
        hang = min(hang, _indent(lines[0]) + 4)
        if head.strip():
            flag_line, head = [head.rstrip()], " " * hang
    return flag_line + textwrap.wrap(
        words,
        width,
        initial_indent=head,
        subsequent_indent=" " * hang,
        break_long_words=False,
        break_on_hyphens=False,
    )
