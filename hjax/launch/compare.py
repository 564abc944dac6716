"""`python -m hjax.launch.compare`: one page on several runs."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from absl import flags

from hjax.errors import exit_status
from hjax.launch.command import parse_flags
from hjax.launch.leaving import run_and_leave
from hjax.show.help_text import print_help

HELP = """\
usage: python -m hjax.launch.compare WORKDIR WORKDIR ... [--output=PAGE.html]

Write one page on several runs, finished or not: results in a table, curves drawn over each other,
the keys in which their configs differ, answers to the same held-out prompts side by side, and by
which command, versions, commit and hardware each was made. The page needs no network.

  --output=PAGE.html   the page (compare.html); what is there is replaced
  --help               print this

Exit status: 0 written; 1 failed; 2 wrong input, nothing written.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if any(a in ("--help", "-help", "-h") for a in arguments):
        print_help(HELP)
        return 0
    return exit_status(lambda: _run(arguments))


def _run(arguments: Sequence[str]) -> int:
    own = flags.FlagValues()
    flags.DEFINE_string("output", "compare.html", "the page", flag_values=own)
    workdirs = [a for a in arguments if not a.startswith("-")]
    parse_flags(own, [a for a in arguments if a.startswith("-")])

    from hjax.show.compare import write_comparison

    print(f"{write_comparison(workdirs, own.output)}: {len(workdirs)} runs")
    return 0


if __name__ == "__main__":
    run_and_leave(main)
