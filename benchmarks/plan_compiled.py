"""Auto-mapping: do printed plans compile, fit, and need as much memory as they say?

    python benchmarks/plan_compiled.py --problems=0:10,12,20:40 [--candidates=5]
                                       [--results=FILE.jsonl] [--only_kept]
                                       [--sample=FILE.json]

Random problems (models, devices that are not there, work; hjax's own numerics) are planned; every
candidate, turned into a run's config, is compiled by the devices' own compiler: the fastest of all
problems first, then the second of all. A plan whose bytes are in the results file is not compiled
again; what it promises is always today's. Programs that were compiled before are read back
(~/.cache/hjax/compile, by their text). Prints a line per set of roles, and one JSON line. Needs
jax[tpu] and jax[cuda13-local]. ``--sample`` writes what the repository keeps
(plans_compiled.json): counts by cluster, and of every problem one plan with its compiled bytes.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import random
import statistics
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import machine

CLUSTERS = ("v5e:2x2", "v5e:2x4", "v6e:2x2", "v5p:2x2x1", "1x4:h100", "1x8:a100-80g", "2x2:h100")
ALGORITHMS = ("ppo", "ppo", "grpo", "remax", "safe_rlhf")


def shape(rng: random.Random) -> dict[str, int]:
    """A decoder of 10 to 700 million parameters."""
    heads = rng.choice([4, 8, 16])
    return {
        "layers": rng.choice([2, 4, 8, 16]),
        "hidden": heads * 128,
        "mlp": rng.choice([2, 3, 4]) * heads * 128,
        "heads": heads,
        "kv_heads": rng.choice([k for k in (2, 4, heads) if heads % k == 0]),
        "vocab": rng.choice([4096, 32768]),
    }


def problem(seed: int) -> dict[str, Any]:
    """What ``plan`` is asked: models by role, cluster and work."""
    rng = random.Random(seed)
    algorithm = rng.choice(ALGORITHMS)
    actor, judge = shape(rng), shape(rng)
    judge["vocab"] = actor["vocab"]  # critics answer for the actor's tokens
    samples = rng.choice([1, 1, 4]) if algorithm == "ppo" else rng.choice([2, 4])
    updates = rng.choice([1, 2, 4])
    return {
        "algorithm": algorithm,
        "actor": actor,
        "judge": rng.choice([actor, judge]),
        "cluster": rng.choice(CLUSTERS),
        "prompt_length": rng.choice([64, 128, 512]),
        "response_length": rng.choice([64, 128, 512, 1024]),
        "batch": 8 * samples * updates * rng.choice([1, 2, 8]),
        "samples": samples,
        "updates": updates,
    }


def judged(algorithm: str) -> tuple[str, ...]:
    """Roles whose model is another than the actor's."""
    return {"ppo": ("critic", "reward"), "safe_rlhf": ("critic", "reward", "cost")}.get(
        algorithm, ("reward",)
    )


def flags_of(asked: dict[str, Any]) -> list[str]:
    """As the command takes it; the shapes are published under names of their own."""
    from hjax.models import presets

    for name in ("actor", "judge"):
        made = presets.shape_of("llama", **asked[name], length=4096)
        presets.PRESETS[f"random-{name}"] = made
    roles = {role: "random-judge" for role in judged(asked["algorithm"])}
    if asked["algorithm"] == "safe_rlhf":
        roles["cost_critic"] = "random-judge"
    roles |= {"actor": "random-actor", "reference": "random-actor"}
    keys = (
        "algorithm",
        "cluster",
        "prompt_length",
        "response_length",
        "batch",
        "samples",
        "updates",
    )
    models = ",".join(f"{role}={name}" for role, name in roles.items())
    return [f"--models={models}", *(f"--{k}={asked[k]}" for k in keys)]


@dataclasses.dataclass(frozen=True)
class Planned:
    """A candidate of a random problem.

    Attributes:
      problem, number: which, and its place among the candidates (0: the fastest).
      candidate: as the search returns it.
      plan: as it is written into plan.json.
      keys: of the run's config, dotted.
    """

    problem: int
    number: int
    candidate: Any
    plan: dict[str, Any]
    keys: dict[str, Any]

    @property
    def identity(self) -> str:
        """The problem and all that a run takes of the plan."""
        taken = ("placement", "allocation", "layouts", "settings")
        parts = [problem(self.problem), {key: self.plan[key] for key in taken}]
        return json.dumps(parts, sort_keys=True)


def candidates_of(seed: int, count: int) -> list[Planned]:
    """The printed candidates of a random problem; none where nothing fits."""
    from hjax.launch.plan_flags import parse
    from hjax.planning.result import describe_candidate
    from hjax.planning.strategies import search_strategy

    request = parse([*flags_of(problem(seed)), f"--candidates={count}"])
    assert request is not None
    found = search_strategy(request.problem, request.strategy, request.candidates)
    return [
        Planned(seed, number, c, describe_candidate(c, found.problem), request.keys)
        for number, c in enumerate(found.candidates)
    ]


def compiled(planned: Planned, console: Any) -> dict[str, Any]:
    """The row of a plan, compiled: ``identity``, ``memory_bytes`` of a device and by program
    ``compiled`` bytes of all that a device holds meanwhile."""
    from hjax.dryrun.plan_programs import topology_name
    from hjax.dryrun.step import CompileRequest, compile_step
    from hjax.files import cache_folder
    from hjax.planning.hardware import parse_cluster
    from hjax.planning.result import config_text
    from hjax.settings.config_loading import load_config

    flags_of(problem(planned.problem))  # publishes this problem's shapes
    topology = topology_name(parse_cluster(problem(planned.problem)["cluster"]))
    with tempfile.TemporaryDirectory() as folder:
        place = pathlib.Path(folder)
        (place / "plan.json").write_text(json.dumps(planned.plan))
        (place / "config.py").write_text(config_text(planned.keys, "A random problem."))
        config = load_config(str(place / "config.py"), {})
        request = CompileRequest("random", config, topology, "", cache_folder("compile"))
        found = compile_step(request, console)
    return {
        "identity": planned.identity,
        "platform": found["topology"]["platform"],
        "memory_bytes": found["topology"]["memory_bytes"],
        "versions": found["versions"],
        "programs": [
            {"role": p["role"], "program": p["program"], "compiled": p["sum_bytes"]}
            for p in found["programs"]
        ],
    }


def sets_of(planned: Planned, row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Of each set of a plan its bytes, planned beside compiled, in all and by program."""
    from hjax.dryrun.plan_programs import STAGE, stage_bytes
    from hjax.dryrun.programs import phase_of

    found, asked = [], problem(planned.problem)
    for group in planned.candidate.sets:
        mine = [p for p in row["programs"] if p["role"] in group.roles]
        largest = max(mine, key=lambda p: p["compiled"])
        programs = {}
        for p in mine:
            promised = stage_bytes(group, p["role"], STAGE[phase_of(p["program"])])
            programs[f"{p['role']}.{p['program']}"] = [round(promised), p["compiled"]]
        found.append(
            {
                "problem": planned.problem,
                "candidate": planned.number,
                "platform": row["platform"],
                "cluster": asked["cluster"],
                "algorithm": asked["algorithm"],
                "set": "+".join(group.roles),
                "devices": group.devices,
                "fits": largest["compiled"] <= row["memory_bytes"],
                "predicted_bytes": round(group.peak_bytes),
                "compiled_bytes": largest["compiled"],
                "ratio": round(group.peak_bytes / largest["compiled"], 3),
                "largest": f"{largest['role']}.{largest['program']}",
                "programs": programs,
                "layouts": {r: planned.plan["layouts"][r] for r in group.roles},
                "settings": {r: planned.plan["settings"][r] for r in group.roles},
            }
        )
    return found


def summary(sets: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Counts of plans and sets, and the spread of predicted over compiled bytes."""
    plans: dict[tuple[int, int], list[Mapping[str, Any]]] = {}
    for row in sets:
        plans.setdefault((row["problem"], row["candidate"]), []).append(row)
    ratios = [row["ratio"] for row in sets]
    return {
        "problems": len({row["problem"] for row in sets}),
        "plans": len(plans),
        "plans_fit": sum(all(row["fits"] for row in rows) for rows in plans.values()),
        "plans_within_15_percent": sum(
            all(within(row["ratio"]) for row in rows) for rows in plans.values()
        ),
        "sets": len(sets),
        "sets_within_15_percent": sum(within(ratio) for ratio in ratios),
        "ratio_least": min(ratios, default=None),
        "ratio_median": statistics.median(ratios) if ratios else None,
        "ratio_most": max(ratios, default=None),
    }


def sample_text(sets: Sequence[Mapping[str, Any]], versions: Mapping[str, str]) -> str:
    """JSON: ``versions``, ``clusters`` (``summary`` of each) and ``sample``, the sets of one plan
    of each problem, a line each."""
    clusters = {
        name: summary([row for row in sets if row["cluster"] == name])
        for name in sorted({row["cluster"] for row in sets})
    }
    keys = ("problem", "candidate", "set", "devices", "predicted_bytes", "compiled_bytes",
            "layouts", "settings")  # fmt: skip
    sample = [
        json.dumps({key: row[key] for key in keys})
        for row in sorted(sets, key=lambda row: row["problem"])
        if row["candidate"] == row["problem"] % 5
    ]
    by_cluster = [f"{json.dumps(name)}: {json.dumps(found)}" for name, found in clusters.items()]
    return (
        f'{{"versions": {json.dumps(versions)},\n"clusters": {{\n'
        + ",\n".join(by_cluster)
        + '\n},\n"sample": [\n'
        + ",\n".join(sample)
        + "\n]}\n"
    )


def within(ratio: float) -> bool:
    """Whether a prediction is as near as is asked."""
    return 0.85 <= ratio <= 1.15


def read_rows(file: pathlib.Path | None) -> dict[str, dict[str, Any]]:
    """The rows of a results file by plan."""
    if file is None or not file.exists():
        return {}
    rows: Iterable[dict[str, Any]] = map(json.loads, file.read_text().splitlines())
    return {row["identity"]: row for row in rows}


def seeds_of(text: str) -> list[int]:
    """``3``, ``0:3`` (the last left out), or several of them with commas."""
    found: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition(":")
        found += range(int(first), int(last or int(first) + 1))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--problems", default="0:40", help="numbers of random problems, first:last")
    parser.add_argument("--candidates", type=int, default=5)
    parser.add_argument("--results", type=pathlib.Path, help="rows are kept in this file")
    parser.add_argument("--only_kept", action="store_true", help="compile nothing")
    parser.add_argument("--sample", type=pathlib.Path, help="counts and some plans, to this file")
    args = parser.parse_args()
    from hjax.dryrun.topologies import prepare_environment

    prepare_environment()
    from hjax.show.tables import wide_console

    console, kept = wide_console(), read_rows(args.results)
    planned = [candidates_of(seed, args.candidates) for seed in seeds_of(args.problems)]
    every = [c for found in planned for c in found]
    sets: list[dict[str, Any]] = []
    for one in sorted(every, key=lambda c: (c.number, c.problem)):
        row = kept.get(one.identity)
        if row is None:
            if args.only_kept:
                continue
            row = compiled(one, console)
            if args.results:
                with args.results.open("a") as file:
                    file.write(json.dumps(row) + "\n")
        found = sets_of(one, row)
        sets += found
        for line in found:
            print(json.dumps(line), flush=True)
    result: dict[str, Any] = {"benchmark": "plan_compiled", **machine.describe()}
    result |= {"versions": machine.versions("jax", "libtpu", "jax-cuda13-plugin")}
    result |= {"no_plan": planned.count([]), "printed_plans": len(every), **summary(sets)}
    for platform in sorted({row["platform"] for row in sets}):
        result[platform] = summary([row for row in sets if row["platform"] == platform])
    print(json.dumps(result))
    if args.sample:
        args.sample.write_text(sample_text(sets, result["versions"]))


if __name__ == "__main__":
    main()
