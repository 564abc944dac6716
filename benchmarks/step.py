"""Seconds of one GRPO step on workload W1 (see step_hjax.py), by hjax and by its peers.

Every contestant runs in a process of its own, once per round, in an order that rotates: what else
the machine does then hits all alike. Each run tells how many cores others used meanwhile; rounds
with more than 0.1 are left out of a contestant's medians, unless it has no others: `clean_rounds`
is 0 then, and nothing is compared with it. hjax runs twice per round, on an empty compilation
cache for the cold first step, then on the filled one.

Prints one JSON line: medians of seconds, tokens per second, peak memory, compile count, and how
many times as fast hjax is (`times_as_fast`).

    HJAX_PEERS=../peers python benchmarks/step.py --trl_python=... --tunix_python=... [--kl]

`--kl` is the workload's second row: KL 0.04 and a reference. Absent peers are null.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics
import sys
import tempfile
from typing import Any

import machine
import peers

# Cores that others may use while a figure is taken.
CLEAN = 0.1
# Figure here -> figure in a W1JSON line.
FIGURES = {
    "step_seconds": "step_s",
    "generate_seconds": "generate_s",
    "reference_seconds": "ref_logprob_s",
    "update_seconds": "update_s",
    "first_step_seconds": "first_step_s",
    "tokens_per_second": "resp_tokens_per_s_step",
    "peak_memory_mb": "peak_rss_mb",
    "setup_seconds": "setup_s",
    "compile_count": "compile_count",
    "compile_count_after_2_steps": "compile_count_after_2",
}


def run_hjax(args: argparse.Namespace, cache: str, steps: int, warmup: int) -> dict[str, Any]:
    """One run of step_hjax.py with this compilation cache."""
    command = [sys.executable, str(pathlib.Path(__file__).with_name("step_hjax.py"))]
    command += [f"--steps={steps}", f"--warmup={warmup}", f"--cache_dir={cache}"]
    command += [f"--beta={peers.KL_COEFFICIENT if args.kl else 0}", f"--devices={args.devices}"]
    command += [f"--override={change}" for change in args.override]
    return peers.run_script(command, "hjax")


def run_rounds(args: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    """What each contestant printed, round by round; `hjax_cold` are first steps alone."""
    found = peers.find(args)
    rows: dict[str, list[dict[str, Any]]] = {name: [] for name in ("hjax", "hjax_cold", *found)}
    # The first round begins with TRL, which writes the weights that Tunix reads.
    order = ["trl", "tunix", "hjax"]
    for turn in range(args.rounds):
        for name in order[turn % 3 :] + order[: turn % 3]:
            print(f"round {turn + 1} of {args.rounds}: {name}", file=sys.stderr)
            peer = found.get(name)
            if name == "hjax":
                with tempfile.TemporaryDirectory() as cache:
                    rows["hjax_cold"].append(run_hjax(args, cache, steps=2, warmup=1))
                    rows["hjax"].append(run_hjax(args, cache, args.steps, args.warmup))
            elif peer:
                extra = peers.extra_flags(name, found)
                try:
                    row = peer.run(steps=args.steps, warmup=args.warmup, kl=args.kl, extra=extra)
                except RuntimeError as error:
                    print(error, file=sys.stderr)
                    found[name] = None
                else:
                    rows[name].append(row)
    return rows


def clean(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The runs during which others left the machine alone."""
    return [row for row in rows if (row.get("other_cores") or 0.0) <= CLEAN]


def summary(rows: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Medians over a contestant's rounds; None without any."""
    if not rows:
        return None
    result: dict[str, Any] = {}
    for name, key in FIGURES.items():
        values = [row[key] for row in clean(rows) or rows if row.get(key) is not None]
        result[name] = round(statistics.median(values), 4) if values else None
    result["step_seconds_per_round"] = [row["step_s"] for row in rows]
    result["other_cores_per_round"] = [row.get("other_cores") for row in rows]
    result["clean_rounds"] = len(clean(rows))
    result["response_length"] = rows[-1]["resp_len_min_max"]
    result["versions"] = rows[-1]["versions"]
    return result


def times_as_fast(ours: dict[str, Any], theirs: dict[str, Any] | None) -> dict[str, float] | None:
    """A peer's seconds over hjax's, phase by phase; above 1 hjax is faster.

    None for an absent peer, and where either was never measured on an otherwise idle machine:
    a spinning thread pool turns a little contention into a tenfold step.
    """
    if theirs is None or not (ours["clean_rounds"] and theirs["clean_rounds"]):
        return None
    ratios = {}
    for phase in ("step", "generate", "reference", "update"):
        mine, other = ours[f"{phase}_seconds"], theirs[f"{phase}_seconds"]
        if mine and other:
            ratios[phase] = round(other / mine, 3)
    return ratios


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    peers.add_flags(parser)
    parser.add_argument("--rounds", type=int, default=3, help="runs of each contestant")
    parser.add_argument("--devices", type=int, default=0, help="hjax's CPU devices; 0: per core")
    parser.add_argument(
        "--override",
        action="append",
        default=[],
        metavar="--config.a.b=VALUE",
        help="change to hjax's config, may be repeated: --override=--config.a.b=VALUE",
    )
    args = parser.parse_args()
    rows = run_rounds(args)
    for name in rows:
        if rows[name] and not clean(rows[name]):
            print(f"{name}: others used over {CLEAN} cores in every round", file=sys.stderr)
    ours, cold = summary(rows["hjax"]), summary(rows["hjax_cold"])
    assert ours and cold
    theirs = {name: summary(rows[name]) for name in ("trl", "tunix")}
    ours["first_step_seconds"] = {
        "cold": cold["first_step_seconds"],
        "warm": ours["first_step_seconds"],
    }
    result = {
        "benchmark": "step",
        "workload": "W1, KL 0.04" if args.kl else "W1",
        **machine.describe(),
        "rounds": args.rounds,
        "steps": args.steps,
        "warmup": args.warmup,
        "hjax": ours,
        **theirs,
        "times_as_fast": {name: times_as_fast(ours, row) for name, row in theirs.items()},
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
