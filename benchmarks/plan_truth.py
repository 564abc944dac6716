"""Auto-mapping: how near its predictions are to what runs and to what the TPU compiler says.

    python benchmarks/plan_truth.py --time        # steps of a dozen runs on 8 simulated devices, by
                                                  # two calibrations, before and after one run
    python benchmarks/plan_truth.py --memory      # their peak memory
    python benchmarks/plan_truth.py --compilers   # programs of 3 runs on 3 TPU slices
    python benchmarks/plan_truth.py --placements  # placement=auto beside those set by hand, on 2, 4
                                                  # and 8 devices, five calibrations each

Each prints one JSON line. Times need an otherwise idle machine; the TPU compiler is in jax[tpu].
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import math
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
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
# The run that profiles learn from before they predict the others.
LESSON = {"model.hidden_size": 96, "model.mlp_size": 384, "model.layers": 3}
PLACED_DEVICES = (2, 4, 8)
# Runs for which the planner's placement is compared with those set by hand.
PLACED: dict[str, dict[str, Any]] = {
    "hidden 128": {},
    "longer responses": {"rollout.max_response_length": 64, "model.hidden_size": 64,
                         "model.mlp_size": 256},
}  # fmt: skip


def simulate(devices: int = DEVICES) -> Any:
    """Simulated CPU devices, set up as the command sets them up."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax

    from hjax.machine import compile_quickly

    compile_quickly()
    jax.config.update("jax_num_cpu_devices", devices)
    return jax.devices()


def times(steps: int = 6, calibrations: int = 2) -> dict[str, Any]:
    """Predicted and measured seconds of a step, by each of several calibrations: as they are, and
    after they have learned from one run that is none of the cases."""
    devices = simulate()
    from hjax.planning.calibration import calibrate
    from hjax.planning.profile_correction import corrected_profile, predict_trainer, run_correction
    from hjax.settings.config_loading import check_config

    profiles: dict[str, Any] = {}
    for number in range(1, calibrations + 1):
        start = time.perf_counter()
        profiles[f"calibration {number}"] = calibrate(devices)
        print(f"calibration {number}: {time.perf_counter() - start:.0f} s", flush=True)
    with run_of(check_config({**BASE, "steps": steps, **LESSON})) as trainer:
        for name, profile in list(profiles.items()):
            learned = corrected_profile(profile, run_correction(trainer, profile))
            profiles[f"{name}, one run learned"] = learned
    rows: dict[str, list[dict[str, Any]]] = {name: [] for name in profiles}
    print(f"measured; predicted by {', '.join(profiles)}", flush=True)
    for case, changes in TIMES.items():
        with run_of(check_config({**BASE, "steps": steps, **changes})) as trainer:
            taken = statistics.median(row["time/step"] for row in trainer.history[2:])
            plans = {
                name: predict_trainer(trainer, profile, profile.constants)
                for name, profile in profiles.items()
            }
        for name, plan in plans.items():
            rows[name].append({"case": case, "predicted": plan.total, "measured": taken})
        said = ", ".join(f"{plan.total:.3f}" for plan in plans.values())
        print(f"{case:<20} {taken:.3f} s; {said}", flush=True)
    return {name: summary(found) for name, found in rows.items()}


@contextlib.contextmanager
def run_of(config: Any) -> Any:
    """A trainer that has taken its steps, closed at the end."""
    import hjax

    trainer = hjax.Trainer(config)
    try:
        trainer.run()
        yield trainer
    finally:
        trainer.close()


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
    from hjax.planning.profile_correction import predict_trainer
    from hjax.settings.config_loading import check_config

    trainer = hjax.Trainer(check_config({**LARGE, "steps": 3, **MEMORY[name]}))
    try:
        trainer.run(2)
        pathlib.Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew
        trainer.run(1)
        peak = _status("VmHWM")
        device, constants = CATALOGUE["b200"], Constants(workspace=0)
        plan = predict_trainer(trainer, Profile(device, constants, {}), constants)
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
    from hjax.planning.auto import predict_run, run_problem
    from hjax.planning.constants import Constants
    from hjax.planning.hardware import parse_cluster
    from hjax.run.placement import plan_from_config
    from hjax.run.role_groups import describe_roles, planned_models
    from hjax.settings.config_loading import load_config
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
        plan = plan_from_config(config, algorithm, len(find_topology(topology).devices))
        roles = describe_roles(config, algorithm, inputs, plan, "tpu", read_shape)
        models, length = planned_models(config, algorithm, inputs, read_shape), inputs.prompt_length
        posed = run_problem(
            config, algorithm, models, length, parse_cluster(topology), Constants(), False
        )
        for row in program_rows(predict_run(posed, roles), compiled["programs"]):
            if row["predicted_bytes"] is not None:
                name = f"{topology} {model} {row['role']}.{row['program']}"
                found = {"predicted": row["predicted_bytes"], "measured": row["compiled_bytes"]}
                rows.append({"case": name, **found})
                ratio = found["predicted"] / found["measured"]
                gib = ", ".join(f"{key} {value / 2**30:.2f} GiB" for key, value in found.items())
                print(f"{name}: {gib}, ratio {ratio:.2f}", flush=True)
    return summary(rows)


def placements(rounds: int = 9, calibrations: int = 5) -> dict[str, Any]:
    """``placement=auto`` beside the best placement set by hand, a process for each number of
    devices."""
    found = {}
    for devices in PLACED_DEVICES:
        command = [sys.executable, str(FILE), f"--placed={devices}", f"--rounds={rounds}",
                   f"--calibrations={calibrations}", f"--cases={len(PLACED)}"]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{devices} devices: {done.stderr[-2000:]}")
        found[str(devices)] = json.loads(done.stdout.splitlines()[-1])
        for case, row in found[str(devices)].items():
            ratio, (low, high) = row["auto_over_best"], row["interval_95"]
            print(
                f"{devices} devices, {case}: auto over {row['best']} {ratio:.3f} ({low:.3f} to "
                f"{high:.3f}), {len(row['plans'])} plans of {calibrations} calibrations",
                flush=True,
            )
    return found


def placed(devices: int, rounds: int, calibrations: int) -> dict[str, Any]:
    """Of each case: the plans of several calibrations and the placements set by hand, whose
    trainers take turns step by step; each plan's step over that of the best by hand, in pairs."""
    simulate(devices)
    import jax

    import hjax
    from hjax.errors import ConfigError
    from hjax.planning.calibration import calibrate
    from hjax.planning.profile import profile_path, write_profile
    from hjax.settings.config_loading import check_config

    os.environ["XDG_CACHE_HOME"] = str(pathlib.Path.cwd())  # the plans' profiles
    profiles = [calibrate(jax.devices()) for _ in range(calibrations)]
    found: dict[str, Any] = {}
    for case, changes in PLACED.items():
        changes = {**BASE, **changes, "steps": rounds + 2}
        trainers: dict[str, Any] = {}
        for name in ("colocate", "split", "standalone"):
            with contextlib.suppress(ConfigError):  # more sets than devices
                trainers[name] = hjax.Trainer(check_config({**changes, "placement": name}))
        by_hand, chosen, planned = list(trainers), [], []
        for profile in profiles:
            write_profile(profile, profile_path(jax.devices()))
            config = check_config({**changes, "placement": "auto"})
            plan = hjax.plan(config)
            assert plan is not None  # the devices are this process's
            key = json.dumps([plan.placement, plan.allocation, plan.layouts], sort_keys=True)
            if key not in trainers:
                trainers[key] = hjax.Trainer(config, plan=plan)
            chosen.append(key)
            planned.append(plan.predicted["seconds"]["total"])
        try:
            for _ in range(rounds + 2):
                for trainer in trainers.values():
                    trainer.step()
            taken = {
                name: [row["time/step"] for row in trainer.history[2:]]
                for name, trainer in trainers.items()
            }
        finally:
            for trainer in trainers.values():
                trainer.close()
        best = min(by_hand, key=lambda name: statistics.median(taken[name]))
        pairs = [
            [mine / its for mine, its in zip(taken[key], taken[best], strict=True)]
            for key in chosen
        ]
        ratio, interval = mean_ratio([x for row in pairs for x in row])
        found[case] = {
            "best": best,
            "seconds": {name: statistics.median(taken[name]) for name in by_hand},
            "auto_seconds": [statistics.median(taken[key]) for key in chosen],
            "auto_over_best": ratio,
            "interval_95": interval,
            "by_calibration": [mean_ratio(row)[0] for row in pairs],
            "plans": {key: chosen.count(key) for key in dict.fromkeys(chosen)},
            "planned_seconds": planned,
        }
    return found


def mean_ratio(ratios: list[float]) -> tuple[float, list[float]]:
    """Geometric mean of paired ratios and its 95 % confidence interval, by normal approximation."""
    logs = [math.log(x) for x in ratios]
    mean = statistics.fmean(logs)
    half = 1.96 * statistics.stdev(logs) / math.sqrt(len(logs)) if len(logs) > 1 else math.inf
    return math.exp(mean), [math.exp(mean - half), math.exp(mean + half)]


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Rank correlation, and the ratios of predicted to measured: median and range."""
    ranks = [
        [sorted(r[key] for r in rows).index(row[key]) for row in rows]
        for key in ("predicted", "measured")
    ]
    ratios = [row["predicted"] / row["measured"] for row in rows]
    return {
        "rank_correlation": round(statistics.correlation(*ranks), 3) if len(rows) > 1 else None,
        "ratio_median": round(statistics.median(ratios), 3),
        "ratio_range": [round(min(ratios), 3), round(max(ratios), 3)],
        "within_15_percent": sum(abs(math.log(r)) <= math.log(1.15) for r in ratios),
        "cases": rows,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts: dict[str, Any] = {
        "time": times, "memory": memory, "compilers": compilers, "placements": placements,
    }  # fmt: skip
    for name in parts:
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--one", help="of --memory, in a process of its own")
    parser.add_argument("--placed", type=int, help="of --placements, on so many devices")
    parser.add_argument("--rounds", type=int, default=9, help="steps of each placement")
    parser.add_argument("--calibrations", type=int, help="of --time (2) and --placements (5)")
    parser.add_argument("--cases", type=int, help="of --time and --placements, only the first")
    args = parser.parse_args()
    os.environ["JAX_PLATFORMS"] = "cpu"
    from hjax.launch.huge_pages import use_huge_pages

    use_huge_pages()  # as the command does
    for cases in (TIMES, PLACED):
        for name in list(cases)[args.cases or len(cases) :]:
            del cases[name]
    if args.placed:
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            print(json.dumps(placed(args.placed, args.rounds, args.calibrations or 5)))
        return
    if args.one:
        print(json.dumps(one_memory(args.one)))
        return
    use = machine.CoreUse()
    result: dict[str, Any] = {"benchmark": "plan_truth", **machine.describe()}
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        for name, part in parts.items():
            if getattr(args, name):
                given = {"calibrations": args.calibrations} if args.calibrations else {}
                if name == "placements":
                    given["rounds"] = args.rounds
                result[name] = part(**given) if name in ("time", "placements") else part()
    if not any(getattr(args, name) for name in parts):
        parser.error("name at least one of " + ", ".join(f"--{name}" for name in parts))
    print(json.dumps(result | use.read()))


if __name__ == "__main__":
    main()
