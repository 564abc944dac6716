"""Seconds that `import hjax` takes, in a fresh interpreter each time.

Also those of `import hjax; hjax.Trainer`, which is when the parts are loaded. Prints one JSON
line: medians, seconds, without the interpreter's own start.

    python benchmarks/import_time.py [--repeats=10]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile

import machine

CASES = {"import_seconds": "import hjax", "trainer_seconds": "import hjax; hjax.Trainer"}


def seconds(statement: str) -> float:
    """Wall seconds of a statement in a new process."""
    code = (
        f"import time; start = time.perf_counter()\n{statement}\nprint(time.perf_counter() - start)"
    )
    # From another folder, so that the installed package is what is imported.
    with tempfile.TemporaryDirectory() as elsewhere:
        done = subprocess.run(
            [sys.executable, "-c", code],
            cwd=elsewhere,
            capture_output=True,
            text=True,
            timeout=120,
        )
    if done.returncode:
        sys.exit(f"{statement!r} failed: {done.stderr.strip().splitlines()[-1]}")
    return float(done.stdout.split()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=10, help="new processes per case")
    args = parser.parse_args()
    # The first of each fills the file cache and writes the bytecode, and is left out.
    times = {
        name: [seconds(statement) for _ in range(args.repeats + 1)][1:]
        for name, statement in CASES.items()
    }
    result = {"benchmark": "import_time", **machine.describe(), "repeats": args.repeats}
    result |= {name: round(statistics.median(values), 4) for name, values in times.items()}
    result |= {f"{name}_max": round(max(values), 4) for name, values in times.items()}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
