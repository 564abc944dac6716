"""What updates and decoding take on accelerators, by their compilers' own text: no device.

    python benchmarks/performance.py [--only=updates|families|decoding] [--topology=v5e:2x4]
                                     [--table]

Published shapes are compiled for devices that are not there and their programs accounted for
(updating.py, decoding.py), which takes minutes each; results are kept.
Prints a JSON line for each; with ``--table`` the tables of RESULTS.md.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from hjax.dryrun.topologies import prepare_environment


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=("updates", "families", "decoding"), default=None)
    parser.add_argument("--topology", default="", help="only the programs for this one")
    parser.add_argument("--table", action="store_true", help="Markdown")
    options = parser.parse_args()
    prepare_environment()  # before JAX is imported
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_enable_compilation_cache", False)  # see hjax/dryrun/compilation.py
    import decoding
    import updating

    from hjax.files import cache_folder

    kinds: dict[str, tuple[Any, Any, Any]] = {
        "updates": (updating.CASES, updating.updating, updating.table),
        "families": (updating.FAMILIES, updating.updating, updating.family_table),
        "decoding": (decoding.CASES, decoding.decoding, decoding.table),
    }
    for kind, (cases, count, table) in kinds.items():
        if options.only not in (None, kind):
            continue
        records = []
        for case in cases:
            if options.topology in ("", case.topology):
                records.append(count(case, cache_folder("compile")))
                if not options.table:
                    print(json.dumps({"benchmark": kind, **records[-1]}), flush=True)
        if options.table:
            print(table(records), end="\n\n")


if __name__ == "__main__":
    main()
