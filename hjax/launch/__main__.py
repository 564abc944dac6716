"""usage: python -m hjax.launch --config=NAME.py [--workdir=DIR] [--overwrite] [--dry_run]
                             [--repair] [--json] [--debug=ROLE] [--profile=STEPS]
                             [--grace_seconds=SECONDS] [--config.a.b=VALUE ...]

Train a model as a config says. Running the same command again with the same workdir goes on
from the last checkpoint. Ctrl-C saves and stops; another, after a second, stops at once.

  --config=NAME.py      a Python file with get_config(), or one of the shipped ones:
                        {configs}
                        or with get_stages(), runs one after another (docs/rlhf.md):
                        {stages}
  --config.a.b=VALUE    set a key of the config (docs/config.md lists all); often used:
                          --config.steps=100            training steps; 0 only evaluates
                          --config.seed=0               every random draw follows from it
                          --config.rollout.prompts=32   prompts per step
                          --config.rollout.samples=4    responses per prompt
                          --config.actor.path=DIR       weights to start from (Hugging Face)
                          --config.actor.learning_rate=1e-4
                          --config.data.path=FILE       your prompts; docs/data.md says which
                          --config.reward.function=FILE.py:NAME
                          --config.algorithm.name=FILE.py:CLASS
                          --config.placement=colocate|split|standalone|auto
                        of a run in stages --config.STAGE.a.b=VALUE changes one of them
  --workdir=DIR         where the run is kept; without it a new runs/<config>-<time>
  --overwrite           remove the run that --workdir has, and start anew
  --repair              if the last checkpoint is damaged, go on from the last that is not
  --profile=5-7         trace the devices in these steps, for TensorBoard's profile page and, by
                        program, for the report (docs/logging.md)
  --dry_run             print batch arithmetic, settings, what the reward function says of some
                        answers, placement, parameters and memory, and stop
  --grace_seconds=30    after SIGTERM the process has so long: a step that still generates or waits
                        for rewards, and cannot end and be saved by then, is left; without it the
                        step is always finished
  --debug=ROLE          stop in a debugger at every call of a role, which runs in this process
  --json                print one line of JSON as the last line of the output
  --version             print the versions of hjax and of what it computes with
  --help                print this

exit status: 0 done; 1 failed while running; 2 wrong input, nothing written; 130, 143 or 129 stopped
by Ctrl-C, SIGTERM or SIGHUP, saved
"""

from hjax.launch.signals import SIGNALS, Signals, prepare_process

if __name__ == "__main__":
    prepare_process("hjax.launch")  # may re-execute this command, so before slow imports

import dataclasses
import platform
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

import hjax
from hjax.errors import ConfigError, exit_status
from hjax.files import METRICS, json_line
from hjax.launch.command import define_flags, parse_flags, print_help, split_config_flag
from hjax.launch.jax_setup import prepare_jax
from hjax.launch.process_exit import run_and_exit
from hjax.launch.stages import Stages, dry_run_stages, read_stages, run_stages
from hjax.rules import deadline
from hjax.run.best_checkpoint import describe_best
from hjax.run.device_trace import parse_step_range
from hjax.run.workdir import Workdir, check_unlocked
from hjax.settings.config_loading import (
    check_config,
    config_names,
    find_config,
    load_config,
    setting_origins,
    settings_without_effect,
)
from hjax.user_input import user_path

_FLAGS = dict(workdir=str, dry_run=False, overwrite=False, debug="", json=False, repair=False,
              profile="", grace_seconds=float)  # fmt: skip


@dataclasses.dataclass
class TrainCommand:
    """The parsed command line."""

    name: str
    config: ConfigDict | None
    workdir: Path | None
    dry_run: bool = False
    json: bool = False
    debug: str = ""
    overwrite: bool = False
    repair: bool = False
    profile: str = ""
    grace_seconds: float | None = None
    stages: Stages | None = None
    stages_workdir: Path | None = None  # the workdir of all stages, where this is one stage


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if any(a in ("--help", "-help", "-h") for a in arguments):
        single = config_names()
        stages = sorted(set(config_names(stages=True)) - set(single))
        print_help(str(__doc__).format(configs=", ".join(single), stages=", ".join(stages)))
        return 0
    if any(a in ("--version", "-version") for a in arguments):
        print(versions())
        return 0
    signals = SIGNALS if SIGNALS.own else Signals()
    status = exit_status(lambda: _run_command(parse(arguments), signals))
    signals.ignore_further()
    return status


def parse(arguments: Sequence[str]) -> TrainCommand:
    """Read the command line and the config it names.

    Raises:
      ConfigError: a wrong flag, file, key or value.
    """
    name, rest = split_config_flag(arguments)
    args = define_flags(None, **_FLAGS)
    stages, rest = read_stages(name, rest)
    config = None
    if stages is None:
        config = check_config(load_config(name, rest, args))
    else:
        parse_flags(args, rest)
        if args.debug:
            raise ConfigError(f"--debug={args.debug}: debug one stage, by a config of its own")
        stages.configs(Path(args.workdir or "."))
    if args.workdir == "":
        raise ConfigError("--workdir= is empty; name a directory, or leave the flag out")
    workdir = user_path(args.workdir, "--workdir=") if args.workdir else None
    if args.repair and (workdir is None or args.dry_run or args.overwrite):
        raise ConfigError(
            "--repair is for a run to go on with: give --workdir, no --dry_run and no --overwrite"
        )
    if args.overwrite and workdir is None:
        raise ConfigError("--overwrite needs --workdir=DIR: without it a run goes to a new one")
    if args.overwrite and stages is not None:
        raise ConfigError(
            f"--overwrite: {name} runs in stages, each in a folder of {workdir}; remove those that "
            "are to run anew"
        )
    if args.grace_seconds is not None and not deadline().holds(args.grace_seconds):
        raise ConfigError(f"--grace_seconds={args.grace_seconds:g}: must be {deadline().text}")
    if args.profile:
        parse_step_range(args.profile)
        if args.dry_run or stages is not None or (config is not None and not config.steps):
            raise ConfigError(f"--profile={args.profile}: no step is taken; trace one run's steps")
    given: dict[str, Any] = {flag: args[flag].value for flag in _FLAGS if flag != "workdir"}
    return TrainCommand(name, config, workdir, stages=stages, **given)


def versions() -> str:
    """Versions of hjax, JAX, flax, NumPy and Python, in one line."""
    from importlib.metadata import version

    named = ", ".join(f"{name} {version(name)}" for name in ("jax", "jaxlib", "flax", "numpy"))
    return f"hjax {hjax.__version__} ({named}, Python {platform.python_version()})"


def _run_command(command: TrainCommand, signals: Signals) -> int:
    return _run(command, signals) if command.stages is None else _run_all(command, signals)


def _run_all(command: TrainCommand, signals: Signals) -> int:
    """Run the stages one after another, each as a run of its own."""
    assert command.stages is not None
    single = dataclasses.replace(command, stages=None, stages_workdir=Path())
    if command.dry_run:

        def describe(title: str, config: ConfigDict) -> None:
            # Without a workdir, which does not exist yet; `stages_workdir` marks it as a stage.
            _run(dataclasses.replace(single, name=title, config=config, workdir=None), signals)

        return dry_run_stages(command.stages, command.workdir, describe)

    def run(title: str, config: ConfigDict, workdir: Path) -> int:
        stage = dataclasses.replace(single, name=title, config=config, workdir=workdir)
        return _run(dataclasses.replace(stage, json=False, stages_workdir=workdir.parent), signals)

    workdir = command.workdir or _new_workdir(command.name)
    return run_stages(command.stages, workdir, run, command.json)


def _run(command: TrainCommand, signals: Signals) -> int:
    config = command.config
    assert config is not None
    if command.workdir is not None:
        workdir = Workdir(command.workdir, overwrite=command.overwrite)
        # Evaluation alone (steps=0) does not require an unchanged config.
        resumes = bool(config.steps) and workdir.check(config)
        forced = command.dry_run or command.repair
        if resumes and workdir.finished(config.steps) and not forced:
            _say_finished(workdir, config, command)
            return 0
        if config.steps and not command.dry_run:
            check_unlocked(workdir.path)

    if command.debug:
        config.display.enabled = False  # the debugger has the terminal
    remark = prepare_jax(config, simulates=command.dry_run or bool(command.debug))
    from hjax.controller import ThreadExecutor
    from hjax.planning.auto import plan_run
    from hjax.run.trainer import Trainer
    from hjax.show.live import Display

    if command.dry_run:
        plan = plan_run(config, command.workdir)
        return _dry_run(Trainer(config, plan=plan, executor=ThreadExecutor), command)
    if not config.steps:
        return _evaluate_only(command)
    path = command.workdir or _new_workdir(command.name)
    plan = plan_run(config, None if command.overwrite else path)
    display = Display(config, config.steps)
    trainer = Trainer(
        config,
        workdir=path,
        display=display,
        plan=plan,
        debug=command.debug,
        overwrite=command.overwrite,
        repair=command.repair,
        profile=parse_step_range(command.profile) if command.profile else None,
    )
    seconds = None
    stages = command.stages_workdir
    with signals.watching(trainer, display, command.grace_seconds, stages or path):
        try:
            display.start(f"{command.name}  {config.algorithm.name}  {path}")
            if remark:
                display.message(remark)
            if command.stages_workdir is None:  # a stage has no config file of its own
                for line in settings_without_effect(command.name, config):
                    display.message(line)
            trainer.run()
            seconds = None if signals.received else _compare_with_plan(trainer, path)
        finally:
            try:
                trainer.close()
            finally:
                display.close()
    if seconds and config.display.enabled:
        print(seconds)
    return _finish(path, command, signals.received)


def _evaluate_only(command: TrainCommand) -> int:
    """Evaluate on the held-out prompts, and stop: nothing is trained or written.

    The actor is the newest checkpoint in the workdir, or else the config's.

    Raises:
      ConfigError: there are no held-out prompts.
    """
    from hjax.planning.auto import plan_run
    from hjax.run.trainer import Trainer
    from hjax.show.format import number
    from hjax.show.live import Display

    config = command.config
    assert config is not None
    display = Display(config, 0)
    display.start(f"{command.name}  {config.algorithm.name}  evaluation only")
    try:
        if command.workdir is not None and Workdir(command.workdir).has_steps():
            config = ConfigDict(config).copy_and_resolve_references()
            config.actor.path = str(command.workdir)
        trainer = Trainer(config, display=display, plan=plan_run(config, None))
        try:
            found = trainer.evaluate()
        finally:
            trainer.close()
        if not found:
            raise ConfigError(
                "config.steps=0 only evaluates, and there are no held-out prompts; set "
                "data.eval_path, or data.eval_fraction and eval.every above 0"
            )
    finally:
        display.close()
    if command.json:
        print(json_line({"steps": 0, "metrics": found}))
    else:
        print("   ".join(f"{name.removeprefix('eval/')} {number(x)}" for name, x in found.items()))
    return 0


def _compare_with_plan(trainer: Any, workdir: Path) -> str:
    """Correct the profile by the run's measured times; returns one line that compares them with the
    plan, empty without a profile."""
    from hjax.planning.profile_correction import correct_profile, summary

    try:
        found = correct_profile(trainer, workdir)
    except ConfigError as error:
        return f"plan: not compared with the run: {error}"
    explain = f"python -m hjax.launch.plan --explain={workdir}"
    return f"plan: {summary(found)}; see {explain}" if found else ""


def _finish(path: Path, command: TrainCommand, received: int) -> int:
    last = (Workdir(path).rows(METRICS) or [{}])[-1]
    step = last.get("step", 0)
    if received:
        name = signal.Signals(received).name
        total = command.config.steps if command.config is not None else 0
        done = f"after step {step} of {total}, saved" if step else "before step 1"
        print(
            f"hjax: stopped by {name} {done}; go on with the same command and "
            f"--workdir={command.stages_workdir or path}",
            file=sys.stderr,
        )
    elif command.config is not None and command.config.display.enabled:
        report = path / "report.html"
        print(f"done: {step} steps in {path}" + (f", see {report}" if report.exists() else ""))
        if best := describe_best(path):
            print(best)
    _print_summary(command, path, step, last, bool(received))
    return 128 + received if received else 0


def _print_summary(
    command: TrainCommand, path: Path, steps: int, last: Any, stopped: bool = False
) -> None:
    if command.json:
        print(json_line({"workdir": path, "steps": steps, "stopped": stopped, "metrics": last}))


def _say_finished(workdir: Workdir, config: ConfigDict, command: TrainCommand) -> None:
    if config.display.report:  # missing if the run was killed before it, or it was removed
        from hjax.show.report import write_report

        with workdir.writing("report.html"):
            write_report(workdir.path)
    print(
        f"{workdir.path} is finished: {workdir.last_step()} of {config.steps} steps; give a "
        "larger --config.steps to go on"
    )
    last = (workdir.rows(METRICS) or [{}])[-1]
    _print_summary(command, workdir.path, workdir.last_step(), last)


def _dry_run(trainer: Any, command: TrainCommand) -> int:
    from hjax.dryrun.description import describe

    try:
        description = describe(trainer)
    finally:
        trainer.close()
    if command.stages_workdir is None:  # a stage has no config file of its own
        description["settings"] = setting_origins(command.name, trainer.config)
    if not command.json:
        from hjax.show.memory_table import print_memory
        from hjax.show.tables import print_description

        memory, warnings = description.pop("memory"), description.pop("warnings", [])
        print_description(description, title=f"dry run of {command.name}")
        if memory:
            print_memory(memory, description["device_memory_bytes"])
        for line in warnings:
            print(line)
    else:
        print(json_line(description))
    return 0


def _new_workdir(name: str) -> Path:
    """A new `runs/<config>-<time>`."""
    config = find_config(name.partition(":")[0]).stem
    base = path = Path("runs", f"{config}-{time.strftime('%Y%m%d-%H%M%S')}")
    number = 1
    while path.exists():
        number += 1
        path = base.with_name(f"{base.name}-{number}")
    return path


if __name__ == "__main__":
    run_and_exit(main)
