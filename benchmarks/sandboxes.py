"""Milliseconds of a program in the sandbox, warm, by its layers: one line of JSON.

    python benchmarks/sandboxes.py

`true` is the least program, `python` an interpreter that does nothing, `tests` a reward for a right
program with two tests, and `plain` the interpreter outside the sandbox.
"""

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

from hjax.errors import ConfigError
from hjax.rewards.code_tests import CodeTests
from hjax.sandbox.local_sandbox import LAYERS, LocalSandbox, sandbox_layers

ROUNDS = 15
EMPTY = [sys.executable, "-I", "-c", ""]
TESTS = {"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7\n"]}
RIGHT = "```python\nprint(sum(map(int, input().split())))\n```"


def median_ms(call: Callable[[], object]) -> float:
    """The median of ROUNDS calls after a first one."""
    call()
    taken = []
    for _ in range(ROUNDS):
        begun = time.perf_counter()
        call()
        taken.append(time.perf_counter() - begun)
    return round(statistics.median(taken) * 1e3, 1)


def measure(without: tuple[str, ...]) -> dict[str, float] | str:
    """Milliseconds by program; the error where the layers left are too few."""
    try:
        sandbox = LocalSandbox(without=without)
    except ConfigError as error:
        return str(error)
    name = sandbox.create()
    judge = CodeTests(sandbox=sandbox)
    try:
        return {
            "true": median_ms(lambda: sandbox.exec(name, ["true"])),
            "python": median_ms(lambda: sandbox.exec(name, EMPTY)),
            "plain": median_ms(lambda: subprocess.run(EMPTY, check=True)),
            "tests": median_ms(lambda: judge([""], [RIGHT], tests=[TESTS])),
        }
    finally:
        sandbox.kill(name)


def main() -> None:
    found: dict[str, object] = {"layers": sandbox_layers(), "all": measure(())}
    found |= {f"without {layer}": measure((layer,)) for layer in LAYERS}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
