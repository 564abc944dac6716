"""Auto-mapping: how near its predictions are to what runs and to what the TPU compiler says.

    python benchmarks/plan_truth.py --time        # steps of a dozen runs on 8 simulated devices
    python benchmarks/plan_truth.py --memory      # their peak memory
    python benchmarks/plan_truth.py --compilers   # programs of 3 runs on 3 TPU slices
    python benchmarks/plan_truth.py --placements  # placement=auto beside those set by hand

Each prints one JSON line. Times need an otherwise idle machine; the TPU compiler is in jax[tpu].
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
from typing import Any

import machine

FILE = pathlib.Path(__file__).resolve()
DEVICES = 8
QUIET = {
    "warm_start.steps": 0, "eval.every": 0, "checkpoint.every": 0, "display.enabled": False,
    "display.tensorboard": False, "display.report": False, "algorithm.name": "PPO",
    "data.task": "sorting", "model.dtype": "float32",
}  # fmt: skip
# The runs whose step time is predicted: changes of a small PPO run.
BASE = {
    **QUIET,
    "model.hidden_size": 128, "model.layers": 4, "model.heads": 8, "model.kv_heads": 8,
    "model.mlp_size": 512, "rollout.prompts": 32, "rollout.samples": 2,
    "rollout.max_response_length": 32, "rollout.max_prompt_length": 32,
}  # fmt: skip
TIMES: dict[str, dict[str, Any]] = {
    "colocate, data 8": {},
    "fsdp 8": {"layout.actor.train.data": 1, "layout.actor.train.fsdp": 8,
               "layout.critic.train.data": 1, "layout.critic.train.fsdp": 8},
    "tensor 4": {"layout.actor.train.tensor": 4, "layout.actor.generate.tensor": 4,
                 "layout.critic.train.tensor": 4},
    "tensor 8 to 2": {"layout.actor.train.tensor": 8, "layout.actor.generate.tensor": 2},
    "split": {"placement": "split"},
    "standalone": {"placement": "standalone"},
    "hidden 256": {"model.hidden_size": 256, "model.mlp_size": 1024},
    "hidden 32, 1 layer": {"model.hidden_size": 32, "model.mlp_size": 64, "model.layers": 1},
    "8 layers": {"model.layers": 8},
    "hidden 64": {"model.hidden_size": 64, "model.mlp_size": 128, "model.layers": 2},
    "responses of 64": {"rollout.max_response_length": 64},
    "96 prompts": {"rollout.prompts": 96},
}  # fmt: skip
# Those whose memory is: models large enough to stand out from the process's own memory.
LARGE = {
    **BASE,
    "model.hidden_size": 512, "model.mlp_size": 2048, "rollout.prompts": 8,
    "rollout.max_response_length": 8, "rollout.max_prompt_length": 16,
}  # fmt: skip
_ALL = ("actor", "critic", "reference")
MEMORY: dict[str, dict[str, Any]] = {
    "data 8": {},
    "fsdp 8": {f"layout.{r}.train.{a}": n for r in _ALL for a, n in (("data", 1), ("fsdp", 8))},
    "fsdp 2": {f"layout.{r}.train.fsdp": 2 for r in _ALL},
    "tensor 8": {f"layout.{r}.train.tensor": 8 for r in _ALL}
    | {"layout.actor.generate.tensor": 8},
    "tensor 4 to 1": {f"layout.{r}.train.tensor": 4 for r in _ALL}
    | {"layout.actor.generate.tensor": 1},
    "split": {"placement": "split"},
    "standalone": {"placement": "standalone"},
    "hidden 256": {"model.hidden_size": 256, "model.mlp_size": 1024},
    "8 layers": {"model.layers": 8},
    "GRPO": {"algorithm.name": "GRPO", "algorithm.kl_coef": 0.01},
    "responses of 128": {"rollout.max_response_length": 128},
    "responses of 256, in passes": {"rollout.max_response_length": 256, "actor.micro_batch": 8,
                                    "critic.micro_batch": 8},
}  # fmt: skip
# What is compiled: `ppo_llama_7b.py` with other models, on small slices.
SHORT = {
    "rollout.prompts": 128, "algorithm.minibatch": 64, "rollout.max_prompt_length": 512,
    "rollout.max_response_length": 512, "actor.micro_batch": 16, "critic.micro_batch": 16,
}  # fmt: skip
COMPILED: dict[str, tuple[str, int, int]] = {  # topology -> model, t, t_g
    "v5e:2x4": ("qwen2.5-0.5b", 2, 1),
    "v6e:2x4": ("qwen2.5-1.5b", 2, 2),
    "v5p:2x2x2": ("llama-7b", 4, 2),
}
# Runs for which the planner's placement is compared with those set by hand.
PLACED: dict[str, dict[str, Any]] = {
    "hidden 128": {},
    "longer responses": {"rollout.max_response_length": 64, "model.hidden_size": 64,
                         "model.mlp_size": 256},
}  # fmt: skip


def simulate() -> Any:
    """8 simulated CPU devices, set up as the command sets them up."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax

    from hjax.machine import compile_quickly

    compile_quickly()
    jax.config.update("jax_num_cpu_devices", DEVICES)
    return jax.devices()


def predicted(trainer: Any, profile: Any) -> Any:
    """The planner's plan of a run as it is set up."""
    from hjax.planning.auto import predict, run_problem
    from hjax.planning.records import Cluster, Pool

    shapes = {r: m for r, m in trainer.roles.models.items() if r in trainer.roles.layouts}
    cluster = Cluster((Pool(profile.device, 1, DEVICES),))
    length = trainer.inputs.prompt_length
    posed = run_problem(
        trainer.config, trainer.algorithm_class, shapes, length, cluster, profile.constants, True
    )
    return predict(posed, trainer.roles)


def times(steps: int = 6) -> dict[str, Any]:
    """Predicted and measured seconds of a step."""
    devices = simulate()
    import hjax
    from hjax.planning.calibration import calibrate
    from hjax.settings.reading import check_config

    profile = calibrate(devices)
    rows: list[dict[str, Any]] = []
    print("predicted / measured", flush=True)
    for name, changes in TIMES.items():
        trainer = hjax.Trainer(check_config({**BASE, "steps": steps, **changes}))
        try:
            trainer.run()
            taken = {
                key: statistics.median(row[f"time/{key}"] for row in trainer.history[2:])
                for key in ("step", "generate", "prepare", "update")
            }
            plan = predicted(trainer, profile)
        finally:
            trainer.close()
        rows.append({"case": name, "predicted": plan.total, "measured": taken["step"]})
        parts = zip(("generate", "prepare", "update"), plan.stages)
        stages = ", ".join(f"{k} {s:.3f} / {taken[k]:.3f}" for k, s in parts)
        print(f"{name:<20} {plan.total:.3f} / {taken['step']:.3f} s ({stages})", flush=True)
    return summary(rows)


def memory() -> dict[str, Any]:
    """Predicted and measured peak memory, of all devices together; a process for each run."""
    rows = []
    for name in MEMORY:
        command = [sys.executable, str(FILE), f"--one={name}"]
        # Freed memory goes back to the system at once, so that its own account can be believed.
        environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
        environment.pop("GLIBC_TUNABLES", None)  # huge pages would round it up
        done = subprocess.run(
            command, stdout=subprocess.PIPE, text=True, check=True, env=environment
        )
        row = json.loads(done.stdout.strip().splitlines()[-1])
        rows.append(row)
        megabytes = [row[key] / 1e6 for key in ("predicted", "measured")]
        print(f"{name:<28} {megabytes[0]:,.0f} / {megabytes[1]:,.0f} MB", flush=True)
    return summary(rows)


def one_memory(name: str) -> dict[str, Any]:
    """One run: what its third step adds to the process's memory from before the parameters.

    The first two compile. What compiling leaves behind is measured by freeing everything after.
    """
    simulate()
    import jax

    import hjax
    from hjax.devices import DEVICES as CATALOGUE
    from hjax.planning.constants import Constants
    from hjax.planning.profile import Profile
    from hjax.settings.reading import check_config

    trainer = hjax.Trainer(check_config({**LARGE, "steps": 3, **MEMORY[name]}))
    try:
        trainer.run(2)
        pathlib.Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew
        trainer.run(1)
        peak = _status("VmHWM")
        device, constants = CATALOGUE["b200"], Constants(workspace=0)
        plan = predicted(trainer, Profile(device, constants, {}))
    finally:
        trainer.close()
    del trainer
    gc.collect()
    left = sum(s.data.nbytes for x in jax.live_arrays() for s in x.addressable_shards)
    measured = peak - (_status("VmRSS") - left)
    expected = sum(s.devices * s.peak_bytes for s in plan.sets)
    return {"case": name, "predicted": expected, "measured": measured}


def _status(key: str) -> int:
    """Bytes of a line of /proc/self/status."""
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1]) * 1024
    raise SystemExit(f"/proc/self/status has no {key}")


def compilers() -> dict[str, Any]:
    """The planner's bytes and the TPU compiler's, of every program; all that a device holds."""
    from hjax.dryrun.topologies import prepare_environment

    prepare_environment()
    from hjax.algorithms import get_algorithm
    from hjax.dryrun.plan_programs import program_rows
    from hjax.dryrun.shape_inputs import read_shape, shape_inputs
    from hjax.dryrun.step import CompileRequest, compile_step
    from hjax.dryrun.topologies import find_topology
    from hjax.files import cache_folder
    from hjax.planning.auto import predict, run_problem
    from hjax.planning.constants import Constants
    from hjax.planning.hardware import cluster
    from hjax.run.roles import describe_roles, placed, planned_models
    from hjax.settings.reading import load_config
    from hjax.show.tables import wide_console

    rows: list[dict[str, Any]] = []
    for topology, (model, tensor, generate) in COMPILED.items():
        changes = {**SHORT, "actor.path": model, "reward.path": model}
        changes |= {f"layout.{r}.train.tensor": tensor for r in (*_ALL, "reward")}
        changes["layout.actor.generate.tensor"] = generate
        overrides = [f"--config.{key}={value}" for key, value in changes.items()]
        config = load_config("ppo_llama_7b.py", overrides)
        command = CompileRequest("ppo_llama_7b.py", config, topology, "", cache_folder("compile"))
        compiled = compile_step(command, wide_console())
        algorithm, inputs = get_algorithm(config.algorithm.name), shape_inputs(config)
        plan = placed(config, algorithm, len(find_topology(topology).devices))
        roles = describe_roles(config, algorithm, inputs, plan, "tpu", read_shape)
        models, length = planned_models(config, algorithm, inputs, read_shape), inputs.prompt_length
        posed = run_problem(
            config, algorithm, models, length, cluster(topology), Constants(), False
        )
        for row in program_rows(predict(posed, roles), compiled["programs"]):
            if row["predicted_bytes"] is not None:
                name = f"{topology} {model} {row['role']}.{row['program']}"
                found = {"predicted": row["predicted_bytes"], "measured": row["compiled_bytes"]}
                rows.append({"case": name, **found})
                ratio = found["predicted"] / found["measured"]
                gib = ", ".join(f"{key} {value / 2**30:.2f} GiB" for key, value in found.items())
                print(f"{name}: {gib}, ratio {ratio:.2f}", flush=True)
    return summary(rows)


def placements(rounds: int = 9) -> dict[str, Any]:
    """Median seconds of a step under each placement, whose trainers take turns step by step."""
    simulate()
    import hjax
    from hjax.settings.reading import check_config

    found: dict[str, Any] = {}
    for case, changes in PLACED.items():
        names = ("auto", "colocate", "split", "standalone")
        trainers = {
            name: hjax.Trainer(
                check_config({**BASE, **changes, "steps": rounds + 2, "placement": name})
            )
            for name in names
        }
        try:
            for _ in range(rounds + 2):
                for trainer in trainers.values():
                    trainer.step()
            taken = {
                name: statistics.median(row["time/step"] for row in trainer.history[2:])
                for name, trainer in trainers.items()
            }
            plan = trainers["auto"].plan_record()
        finally:
            for trainer in trainers.values():
                trainer.close()
        best = min(taken[name] for name in names[1:])
        found[case] = {
            "seconds": taken,
            "auto_over_best": taken["auto"] / best,
            "plan": {k: plan[k] for k in ("placement", "allocation", "parallelism")},
            "planned_seconds": plan["predicted"]["seconds"]["total"],
        }
        shown = ", ".join(f"{name} {seconds:.3f} s" for name, seconds in taken.items())
        sets = " | ".join("+".join(s) for s in plan["placement"])
        print(f"{case}: {shown}; auto is {sets} {plan['allocation']}", flush=True)
    return found


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Rank correlation, and the ratios of predicted to measured: median and range."""
    ranks = [
        [sorted(r[key] for r in rows).index(row[key]) for row in rows]
        for key in ("predicted", "measured")
    ]
    ratios = [row["predicted"] / row["measured"] for row in rows]
    return {
        "rank_correlation": round(statistics.correlation(*ranks), 3),
        "ratio_median": round(statistics.median(ratios), 3),
        "ratio_range": [round(min(ratios), 3), round(max(ratios), 3)],
        "within_15_percent": sum(abs(math.log(r)) <= math.log(1.15) for r in ratios),
        "cases": rows,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = {
        "time": times, "memory": memory, "compilers": compilers, "placements": placements,
    }  # fmt: skip
    for name in parts:
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--one", help="of --memory, in a process of its own")
    args = parser.parse_args()
    os.environ["JAX_PLATFORMS"] = "cpu"
    from hjax.launch.huge_pages import use_huge_pages

    use_huge_pages()  # as the command does
    if args.one:
        print(json.dumps(one_memory(args.one)))
        return
    use = machine.CoreUse()
    result: dict[str, Any] = {"benchmark": "plan_truth", **machine.describe()}
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        for name, part in parts.items():
            if getattr(args, name):
                result[name] = part()
    if not any(getattr(args, name) for name in parts):
        parser.error("name at least one of " + ", ".join(f"--{name}" for name in parts))
    print(json.dumps(result | use.read()))


if __name__ == "__main__":
    main()
