"""usage: python -m hjax.launch.plan --models=ROLE=MODEL,... --cluster=HOSTSxDEVICES:DEVICE
                                  [--algorithm=ppo] [--prompt_length=1024]
                                  [--response_length=1024] [--batch=1024] [--strategy=auto]
                                  [--output=DIR] [--json]
       python -m hjax.launch.plan --config=NAME.py --cluster=... [--compile]
                                  [--config.a.b=VALUE ...] [--output=DIR] [--json]
       python -m hjax.launch.plan --calibrate [--json]
       python -m hjax.launch.plan --explain=WORKDIR [--json]

Choose placement (which models share devices), allocation (how many) and each model's layout for
training and generation, such that a step is fastest and everything fits. Nothing is run.

  --config=NAME.py      plan this run: its algorithm, models, batches and dtype, instead of the
                        flags from --algorithm to --even
  --compile             compile every program of the plan for the cluster's own devices (as
                        hjax.launch.compile does), and take the fastest plan that fits by the
                        compiler's account
  --algorithm=ppo       {algorithms}, or path.py:Class; its calls are read off its step
  --models=...          a model for each role, or one name for all: a published shape
                        (llama-7b, qwen2.5-7b, ...) or a directory with config.json; a reward or
                        cost left out is a function on the host (one name alone makes it a model,
                        and a line says so)
  --cluster=16x8:a100-80g   hosts x devices of {devices};
                        TPU slices as v5p:4x4x4 or 2xv5p:4x4x4; or a usual name, 8xh100 or
                        v5e-8; several kinds joined by +
  --prompt_length=1024, --response_length=1024   tokens
  --batch=1024          sequences of a step
  --samples=N           of them share a prompt; without it as many as in the algorithm's config
  --updates=8           optimizer updates that a step's sequences are cut into
  --strategy=auto       auto (every placement), colocate, split, standalone, or as other systems
                        place: deepspeed_chat, openrlhf, nemo_aligner, nemo_recompute
  --candidates=5        how many placements to show
  --numerics=masters    hjax's own: masters, 32-bit weights with a 16-bit generation copy, or
                        float32. mixed: the paper's 16-bit weights and 32-bit optimizer, and
                        decoding in waves where all sequences at once do not fit; hjax does neither
  --offload=reference=all,critic=optimizer   what of a role waits in the host's memory, of others
                        nothing; none: nothing at all. Without it: whatever is best
  --even                with --numerics=mixed too only layouts over which all batches divide
  --constants=a=1,b=2   replace constants of the cost model (docs/auto_mapping.md)
  --profile=FILE        rates and constants measured by --calibrate on devices of this kind
  --calibrate           measure this machine's devices and store a profile
  --explain=WORKDIR     predicted and measured seconds of each call of a run that has ended, and
                        which term of the cost model was wrong
  --output=DIR          write plan.json and, of the runners-up, plan_2.json to plan_5.json (for
                        --config.placement), plan.html, and config.py, a run of plan.json; it
                        runs as planned: python -m hjax.launch --config=DIR/config.py (a plan that
                        hjax compiles and does not run says so above the table)
  --json                print one line of JSON as the last line of the output
  --help                print this

exit status: 0 done; 1 failed; 2 wrong input, or the models do not fit
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hjax.devices import DEVICES
from hjax.errors import ConfigError
from hjax.files import json_line, replace_files
from hjax.launch.command import print_json, run_or_help
from hjax.launch.huge_pages import use_huge_pages
from hjax.launch.process_exit import run_and_exit
from hjax.launch.signals import is_main_module
from hjax.show.tables import wide_console

if TYPE_CHECKING:  # these import JAX, which --help does not need
    from hjax.launch.plan_flags import PlanCommand
    from hjax.planning.search import SearchResult


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    named = ", ".join(DEVICES)
    text = str(__doc__).format(devices=named, algorithms="ppo, grpo, remax, safe_rlhf")
    return run_or_help(arguments, lambda: text, _run)


def _run(arguments: Sequence[str]) -> int:
    workdirs = [a.partition("=")[2] for a in arguments if re.match(r"--?explain=", a)]
    if workdirs:
        return _explain(Path(workdirs[-1]), "--json" in arguments)
    from hjax.kernels.verdict import known_or_assumed
    from hjax.launch.plan_flags import parse
    from hjax.planning.result import describe_result
    from hjax.planning.strategies import search_runnable
    from hjax.show.plan_rows import print_plan

    request = parse(arguments)
    if request is None:
        return _calibrate("--json" in arguments)
    console = wide_console()
    found = search_runnable(request.problem, request.strategy, request.candidates)
    described: dict[str, Any] = describe_result(found, request.problem, request.strategy)
    if request.compile and request.config is not None:
        from hjax.dryrun.plan_programs import compile_plan
        from hjax.dryrun.topologies import prepare_environment

        prepare_environment()
        described = compile_plan(
            found,
            request.problem,
            strategy=request.strategy,
            config=request.config,
            name=request.config_name,
            console=console,
        )
    if request.remark:
        console.print(request.remark, markup=False)
    print_plan(described, console)
    for pool in request.problem.cluster.pools:
        platform = "tpu" if pool.shape else "cpu" if pool.shares_cores else "gpu"
        if said := known_or_assumed(platform, pool.device.name).remark:
            console.print(said, markup=False)
    if request.output is not None:
        if request.output.exists() and not request.output.is_dir():
            raise ConfigError(f"--output={request.output} is not a directory")
        written = _write(request, found, described)
        console.print(f"written: {', '.join(str(request.output / name) for name in written)}")
    print_json(request.json, described)
    return 0


def _explain(workdir: Path, as_json: bool) -> int:
    """Show predicted and measured times of a finished run."""
    from hjax.planning.profile_correction import read_record, summary
    from hjax.show.plan_rows import seconds_table

    found = read_record(workdir)
    console = wide_console()
    console.print(seconds_table(found))
    learned = "the profile has learned it" if found["taught"] else found["untaught"]
    console.print(f"{summary(found)}; constants were {found['constants']}, {learned}")
    print_json(as_json, found)
    return 0


def _write(request: PlanCommand, found: SearchResult, described: dict[str, Any]) -> list[str]:
    """Write the plan, its page, the runners-up and the run's config; returns the file names."""
    from hjax.planning.result import config_text, describe_candidate
    from hjax.show.plan_rows import plan_page

    assert request.output is not None
    files = {"plan.json": json_line(described) + "\n", "plan.html": plan_page(described)}
    chosen = [list(group) for group in described["placement"]]
    others = [c for c in found.candidates if [list(s.roles) for s in c.sets] != chosen]
    for number, candidate in enumerate(others, 2):
        record = describe_candidate(candidate, found.problem)
        files[f"plan_{number}.json"] = json_line(record) + "\n"
    if request.keys and not described["needs"]:
        title = f"{described['algorithm']} on {described['cluster']}, as planned."
        files["config.py"] = config_text(request.keys, title)
    replace_files(request.output, files)
    return list(files)


def _calibrate(as_json: bool) -> int:
    """Measure this process's devices, store the profile and show it."""
    from hjax.machine import compile_quickly, find_devices, pin_platform
    from hjax.planning.calibration import calibrate
    from hjax.planning.profile import profile_path, write_profile
    from hjax.show.progress_bar import PartsDisplay
    from hjax.show.tables import print_description

    pin_platform()
    compile_quickly()  # as a run does
    devices = find_devices()
    with PartsDisplay("calibrating") as progress:
        profile = calibrate(devices, progress)
    path = profile_path(devices)
    content = write_profile(profile, path)
    print_description(
        {
            "stored in": str(path),
            "device": {k: v for k, v in content["device"].items() if k not in ("flops", "source")},
            "FLOP/s": content["device"]["flops"],
            "constants": content["constants"],
            "FLOP/s per device by devices busy": {str(n): r for n, r in profile.busy.items()},
        },
        title=f"{len(devices)} x {devices[0].device_kind}",
    )
    print_json(as_json, content)
    return 0


if __name__ == "__main__":
    if "--calibrate" in sys.argv and is_main_module("hjax.launch.plan"):
        use_huge_pages()
    run_and_exit(main)
