"""Auto-mapping: do printed plans compile, fit, and need as much memory as they say?

    python benchmarks/plan_compiled.py --problems=0:40 [--candidates=5] [--results=FILE.jsonl]

Random problems (models, devices that are not there, work; hjax's own numerics) are planned; every
candidate, turned into a run's config, is compiled by the devices' own compiler. Programs that were
compiled before are read back (~/.cache/hjax/compile, by their text). Prints a line per candidate,
and one JSON line. Needs jax[tpu] and jax[cuda13-local].
"""

from __future__ import annotations

import argparse
import json
import pathlib
import random
import statistics
import tempfile
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


def flags_of(asked: dict[str, Any], folder: str) -> list[str]:
    """As the command takes it; the shapes are published under names of their own."""
    from hjax.models import published

    for name in ("actor", "judge"):
        made = published._shape(**asked[name], length=4096)  # noqa: SLF001
        published.SHAPES[f"random-{name}"] = made
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
    return [f"--models={models}", *(f"--{k}={asked[k]}" for k in keys), f"--output={folder}"]


def rows_of(seed: int, candidates: int, console: Any) -> list[dict[str, Any]]:
    """Each candidate of a problem, compiled: a row for each of its sets."""
    from hjax.dryrun.plan_programs import topology_name
    from hjax.dryrun.step import CompileRequest, compile_step
    from hjax.files import cache_folder
    from hjax.launch import plan
    from hjax.planning.hardware import cluster
    from hjax.settings.reading import load_config

    asked, rows = problem(seed), []
    topology = topology_name(cluster(asked["cluster"]))
    with tempfile.TemporaryDirectory() as folder:
        status = plan.main([*flags_of(asked, folder), f"--candidates={candidates}"])
        if status:
            return [{"problem": seed, "status": status}]
        for file in sorted(pathlib.Path(folder).glob("plan*.json")):
            planned = json.loads(file.read_text())
            config = load_config(f"{folder}/config.py", {"placement": str(file)})
            request = CompileRequest(file.stem, config, topology, "", cache_folder("compile"))
            found = compile_step(request, console)
            for number, roles in enumerate(planned["placement"]):
                mine = [p for p in found["programs"] if p["role"] in roles]
                largest = max(mine, key=lambda p: p["sum_bytes"])
                predicted = planned["set_memory_bytes"][number]
                rows.append(
                    {
                        "problem": seed,
                        "cluster": asked["cluster"],
                        "algorithm": asked["algorithm"],
                        "plan": file.stem,
                        "set": "+".join(roles),
                        "fits": largest["sum_bytes"] <= found["topology"]["memory_bytes"],
                        "predicted_bytes": round(predicted),
                        "compiled_bytes": largest["sum_bytes"],
                        "ratio": round(predicted / largest["sum_bytes"], 3),
                        "largest": f"{largest['role']}.{largest['program']}",
                        "programs": {f"{p['role']}.{p['program']}": p["sum_bytes"] for p in mine},
                        "layouts": {r: planned["layouts"][r] for r in roles},
                        "settings": {r: planned["settings"][r] for r in roles},
                    }
                )
                print(json.dumps(rows[-1]), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--problems", default="0:40", help="first:last of the random problems")
    parser.add_argument("--candidates", type=int, default=5)
    parser.add_argument("--results", type=pathlib.Path, help="rows are added to this file")
    args = parser.parse_args()
    from hjax.dryrun.topologies import prepare_environment

    prepare_environment()
    from hjax.show.tables import wide_console

    first, last = (int(n) for n in args.problems.split(":"))
    rows = []
    for seed in range(first, last):
        found = rows_of(seed, args.candidates, wide_console())
        rows += found
        if args.results:
            with args.results.open("a") as file:
                file.writelines(json.dumps(row) + "\n" for row in found)
    ratios = [row["ratio"] for row in rows if "ratio" in row]
    result: dict[str, Any] = {"benchmark": "plan_compiled", **machine.describe()}
    result |= {"versions": machine.versions("jax", "libtpu", "jax-cuda13-plugin")}
    result |= {
        "problems": last - first,
        "no_plan": sum("status" in row for row in rows),
        "plans": len({(r["problem"], r["plan"]) for r in rows if "plan" in r}),
        "sets": len(ratios),
        "fit": sum(row.get("fits", False) for row in rows),
        "within_15_percent": sum(0.85 <= ratio <= 1.15 for ratio in ratios),
        "ratio_median": statistics.median(ratios) if ratios else None,
        "ratio_least": min(ratios, default=None),
        "ratio_most": max(ratios, default=None),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
