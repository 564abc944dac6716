"""What decoding moves for a token on accelerators, by their compilers' own text: no device.

    python benchmarks/decoding.py [--topology=v5e:2x4] [--table]

Rollouts of 256 rows, 512 tokens of prompt and 1024 of response, in bfloat16. Prints one JSON line
per program: bytes per token (of the loop over tokens, per device, averaged over the response), the
least that it must read, their ratio, and how many arrays of the size of a weight or cache a turn
of the loop copies. With ``--table`` the same as Markdown.
"""

from __future__ import annotations

import argparse
import json

from hjax.dryrun.topologies import prepare_environment


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--topology", default="", help="only the programs for this one")
    parser.add_argument("--table", action="store_true", help="Markdown")
    options = parser.parse_args()
    prepare_environment()  # before JAX is imported
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_enable_compilation_cache", False)  # see hjax/dryrun/compilation.py
    from hjax.dryrun.decoding import CASES, decoding, table
    from hjax.files import cache_folder

    chosen = [case for case in CASES if options.topology in ("", case.topology)]
    records = [decoding(case, cache_folder("compile")) for case in chosen]
    if options.table:
        print(table(records))
        return
    for record in records:
        print(json.dumps({"benchmark": "decoding", **record}))


if __name__ == "__main__":
    main()
