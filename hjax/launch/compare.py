"""usage: python -m hjax.launch.compare WORKDIR WORKDIR ... [--output=PAGE.html]

Write one page on several runs, finished or not: results in a table, curves drawn over each other,
the keys in which their configs differ, answers to the same held-out prompts side by side, and by
which command, versions, commit and hardware each was made. The page needs no network.

  --output=PAGE.html   the page (compare.html); what is there is replaced
  --help               print this

Exit status: 0 written; 1 failed; 2 wrong input, nothing written.
"""

from collections.abc import Sequence

from hjax.launch.command import define_flags, parse_flags, run_or_help
from hjax.launch.process_exit import run_and_exit


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    return run_or_help(arguments, lambda: str(__doc__), _run)


def _run(arguments: Sequence[str]) -> int:
    args = define_flags(output="compare.html")
    workdirs = [a for a in arguments if not a.startswith("-")]
    parse_flags(args, [a for a in arguments if a.startswith("-")])

    from hjax.show.compare import write_comparison

    print(f"{write_comparison(workdirs, args.output)}: {len(workdirs)} runs")
    return 0


if __name__ == "__main__":
    run_and_exit(main)
