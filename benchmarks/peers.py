"""Runs other frameworks' scripts on workload W1 and reads what they report.

HJAX_PEERS names the folder of their scripts (`trl_grpo.py`, `tunix_grpo.py`), each of which prints
a line `W1JSON {...}` last; `--trl_python` and `--tunix_python` name the interpreters of the
environments they are installed in. A peer whose script or interpreter is absent is null.

    HJAX_PEERS=../peers python benchmarks/peers.py --trl_python=... --tunix_python=... [--kl]
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
import shutil
import subprocess
import sys
from typing import Any

MARK = "W1JSON "
# Coefficient of the KL to the reference in the workload's second row.
KL_COEFFICIENT = 0.04


@dataclasses.dataclass(frozen=True)
class Peer:
    """A script of another framework's and the interpreter that can run it."""

    name: str
    script: pathlib.Path
    python: str

    def run(self, *, steps: int, warmup: int, kl: bool, extra: tuple[str, ...] = ()) -> Any:
        """The script's own figures as a dict, seconds of each phase among them."""
        beta = str(KL_COEFFICIENT if kl else 0)
        sizes = ["--steps", str(steps), "--warmup", str(warmup), "--beta", beta]
        return run_script([self.python, str(self.script), *sizes, *extra], self.name)


def run_script(command: list[str], name: str, timeout_seconds: float = 1800) -> dict[str, Any]:
    """Runs a command to its end and returns the dict of its last `W1JSON {...}` line.

    Raises:
      RuntimeError: it failed, took too long or printed no such line; with its last words.
    """
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_seconds)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"{name}: not done after {timeout_seconds:g} s: {command}") from None
    lines = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    if done.returncode or not lines:
        last = "\n".join((done.stdout + done.stderr).strip().splitlines()[-12:])
        raise RuntimeError(f"{name}: exit status {done.returncode}, no {MARK.strip()} line\n{last}")
    return json.loads(lines[-1][len(MARK) :])


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags that say where the peers are."""
    for name in ("trl", "tunix"):
        parser.add_argument(
            f"--{name}_python",
            default="",
            help=f"interpreter of {name}'s environment; empty: the peer is absent",
        )
    parser.add_argument("--kl", action="store_true", help=f"KL {KL_COEFFICIENT} and a reference")
    parser.add_argument("--steps", type=int, default=8, help="per run, warm-up included")
    parser.add_argument("--warmup", type=int, default=3, help="steps left out of the figures")


def find(args: argparse.Namespace) -> dict[str, Peer | None]:
    """The peers, None for an absent one, which is also said on stderr."""
    folder = os.environ.get("HJAX_PEERS", "")
    found: dict[str, Peer | None] = {}
    for name in ("trl", "tunix"):
        script = pathlib.Path(folder or ".").resolve() / f"{name}_grpo.py"
        python = shutil.which(os.path.expanduser(getattr(args, f"{name}_python")))
        if not folder:
            missing = "HJAX_PEERS is not set"
        elif not script.is_file():
            missing = f"HJAX_PEERS={folder} has no {script.name}"
        elif not python:
            missing = f"--{name}_python={getattr(args, f'{name}_python')} is no interpreter"
        else:
            found[name] = Peer(name, script, python)
            continue
        print(f"{name}: absent, {missing}", file=sys.stderr)
        found[name] = None
    return found


def extra_flags(name: str, peers: dict[str, Peer | None]) -> tuple[str, ...]:
    """Tunix starts from weights that TRL's script writes; without TRL, from its own."""
    return ("--random-init",) if name == "tunix" and not peers["trl"] else ()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_flags(parser)
    args = parser.parse_args()
    peers = find(args)
    result: dict[str, Any] = {}
    for name, peer in peers.items():
        extra = extra_flags(name, peers)
        result[name] = peer and peer.run(
            steps=args.steps, warmup=args.warmup, kl=args.kl, extra=extra
        )
    print(json.dumps({"benchmark": "peers", **result}))


if __name__ == "__main__":
    main()
