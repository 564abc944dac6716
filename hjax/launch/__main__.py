"""`python -m hjax.launch --config=NAME.py`: train, resume, or say what would be done."""

from __future__ import annotations

from hjax.launch.huge_pages import use_huge_pages

if __name__ == "__main__":
    use_huge_pages()  # may start this command anew, so before imports that take longer

import dataclasses
import os
import platform
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from absl import flags
from ml_collections import ConfigDict

import hjax
from hjax.errors import ConfigError, exit_status
from hjax.files import METRICS, json_line
from hjax.launch.command import parse_flags, take_config
from hjax.launch.machine import prepare_jax
from hjax.launch.stages import Stages, dry_run_stages, read_stages, run_stages
from hjax.machine import descendants, end_all
from hjax.run.workdir import Workdir
from hjax.settings.origins import origins
from hjax.settings.reading import check_config, config_names, find_config, load_config

HELP = """\
usage: python -m hjax.launch --config=NAME.py [--workdir=DIR] [--overwrite] [--dry_run]
                             [--json] [--debug=ROLE] [--config.a.b=VALUE ...]

Train a model as a config says. Running the same command again with the same workdir goes on
from the last checkpoint. Ctrl-C saves and stops; a second Ctrl-C stops at once.

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
  --dry_run             print batch arithmetic, settings, what the reward function says of some
                        answers, placement, parameters and memory, and stop
  --debug=ROLE          stop in a debugger at every call of a role, which runs in this process
  --json                print one line of JSON as the last line of the output
  --version             print the versions of hjax and of what it computes with
  --help                print this

exit status: 0 done; 1 failed while running; 2 wrong input, nothing written; 130 or 143 stopped
by Ctrl-C or SIGTERM, saved
"""


@dataclasses.dataclass
class TrainCommand:
    """The parsed command line."""

    name: str
    config: ConfigDict | None
    workdir: Path | None
    dry_run: bool
    json: bool
    debug: str = ""
    overwrite: bool = False
    stages: Stages | None = None
    whole: Path | None = None  # of a stage: the workdir of all


class Stopped(BaseException):
    """A signal came before there was a run to save."""


class Signals:
    """Ctrl-C and SIGTERM: the first asks the trainer to save and return, the second kills."""

    def __init__(self) -> None:
        self.received = 0
        self.trainer: Any = None
        self.display: Any = None

    def install(self) -> None:
        """From here on signals are handled."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._handle)

    def watch(self, trainer: Any, display: Any) -> None:
        """There is something to save now."""
        self.trainer, self.display = trainer, display
        trainer.stop_requested = self.received  # mostly 0

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.received:
            if sys.stdout.isatty():
                os.write(sys.stdout.fileno(), b"\x1b[?25h\n")  # the live view hid the cursor
            if "ray" in sys.modules:
                end_all(descendants(os.getpid()))  # Ray's own end only minutes later, or never
            os._exit(128 + number)
        self.received = number
        if self.trainer is None:
            raise Stopped
        self.trainer.stop_requested = number
        # A thread, because the signal may have come while this one was printing.
        text = "stopping after this step, and saving; once more to stop at once"
        threading.Thread(target=self.display.message, args=(text,), daemon=True).start()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if any(a in ("--help", "-help", "-h") for a in arguments):
        single = config_names()
        stages = sorted(set(config_names(stages=True)) - set(single))
        print(HELP.format(configs=", ".join(single), stages=", ".join(stages)), end="")
        return 0
    if any(a in ("--version", "-version") for a in arguments):
        print(versions())
        return 0
    signals = Signals()
    signals.install()
    try:
        return exit_status(lambda: _stoppable(parse(arguments), signals))
    except Stopped:
        name = signal.Signals(signals.received).name
        print(f"hjax: stopped by {name} before the run began", file=sys.stderr)
        return 128 + signals.received


def parse(arguments: Sequence[str]) -> TrainCommand:
    """Read the command line and the config it names.

    Raises:
      ConfigError: a wrong flag, file, key or value.
    """
    name, rest = take_config(arguments)
    own = flags.FlagValues()
    flags.DEFINE_string("workdir", None, "where the run is kept", flag_values=own)
    flags.DEFINE_bool("dry_run", False, "only say what would be done", flag_values=own)
    flags.DEFINE_bool("overwrite", False, "start anew", flag_values=own)
    flags.DEFINE_string("debug", "", "role whose calls stop in a debugger", flag_values=own)
    flags.DEFINE_bool("json", False, "one line of JSON", flag_values=own)
    stages, rest = read_stages(name, rest)
    config = None
    if stages is None:
        config = check_config(load_config(name, rest, own))
    else:
        parse_flags(own, rest)
        if own.debug:
            raise ConfigError(f"--debug={own.debug}: debug one stage, by a config of its own")
        stages.configs(Path(own.workdir or "."))
    if own.workdir == "":
        raise ConfigError("--workdir= is empty; name a directory, or leave the flag out")
    workdir = Path(own.workdir).expanduser() if own.workdir else None
    if own.overwrite and workdir is None:
        raise ConfigError("--overwrite needs --workdir=DIR: without it a run goes to a new one")
    if own.overwrite and stages is not None:
        raise ConfigError(
            f"--overwrite: {name} runs in stages, each in a folder of {workdir}; remove those that "
            "are to run anew"
        )
    return TrainCommand(
        name, config, workdir, own.dry_run, own.json, own.debug, own.overwrite, stages
    )


def versions() -> str:
    """Of hjax and of what it computes with, in one line."""
    from importlib.metadata import version

    named = ", ".join(f"{name} {version(name)}" for name in ("jax", "jaxlib", "flax", "numpy"))
    return f"hjax {hjax.__version__} ({named}, Python {platform.python_version()})"


def _stoppable(command: TrainCommand, signals: Signals) -> int:
    try:
        return _run(command, signals) if command.stages is None else _run_all(command, signals)
    except SystemError as error:  # what Ray makes of Stopped
        if signals.received and signals.trainer is None:
            raise Stopped from error
        raise


def _run_all(command: TrainCommand, signals: Signals) -> int:
    """Run the stages one after another, each as a run of its own."""
    assert command.stages is not None
    if command.dry_run:

        def describe(title: str, config: ConfigDict) -> None:
            # Its workdir is not there yet; that it is a stage, `whole` says.
            _run(TrainCommand(title, config, None, True, command.json, whole=Path()), signals)

        return dry_run_stages(command.stages, command.workdir, describe)

    def run(title: str, config: ConfigDict, workdir: Path) -> int:
        signals.trainer = None
        if signals.received:
            raise Stopped
        stage = TrainCommand(title, config, workdir, False, False, whole=workdir.parent)
        return _run(stage, signals)

    workdir = command.workdir or _new_workdir(command.name)
    return run_stages(command.stages, workdir, run, command.json)


def _run(command: TrainCommand, signals: Signals) -> int:
    config = command.config
    assert config is not None
    if command.workdir is not None:
        workdir = Workdir(command.workdir, overwrite=command.overwrite)
        # Of one that was only evaluated so far nothing needs to be the same.
        resumes = bool(config.steps) and workdir.check(config)
        if resumes and workdir.finished(config.steps) and not command.dry_run:
            _say_finished(workdir, config, command)
            return 0

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
        return _measure(command)
    path = command.workdir or _new_workdir(command.name)
    plan = plan_run(config, None if command.overwrite else path)
    display = Display(config, config.steps)
    how: dict[str, Any] = {"debug": command.debug, "overwrite": command.overwrite}
    trainer = Trainer(config, workdir=path, display=display, plan=plan, **how)
    signals.watch(trainer, display)
    try:
        display.start(f"{command.name}  {config.algorithm.name}  {path}")
        if remark:
            display.message(remark)
        trainer.run()
        seconds = None if signals.received else _compare_seconds(trainer, path)
    finally:
        try:
            trainer.close()
        finally:
            display.close()
    if seconds and config.display.enabled:
        print(seconds)
    return _finish(path, command, signals.received)


def _measure(command: TrainCommand) -> int:
    """Answer the held-out prompts, and stop."""
    from hjax.launch.measure import measure
    from hjax.show.format import number
    from hjax.show.live import Display

    config = command.config
    assert config is not None
    display = Display(config, 0)
    display.start(f"{command.name}  {config.algorithm.name}  evaluation only")
    try:
        found = measure(config, command.workdir, display)
    finally:
        display.close()
    if command.json:
        print(json_line({"steps": 0, "metrics": found}))
    else:
        print("   ".join(f"{name.removeprefix('eval/')} {number(x)}" for name, x in found.items()))
    return 0


def _compare_seconds(trainer: Any, workdir: Path) -> str:
    """Have the plan learn from the run; returns a line on how near it was, empty without a
    profile."""
    from hjax.planning.after_run import learn_from
    from hjax.planning.learning import summary

    try:
        found = learn_from(trainer, workdir)
    except ConfigError as error:
        return f"plan: not compared with the run: {error}"
    explain = f"python -m hjax.launch.plan --explain={workdir}"
    return f"plan: {summary(found)}; see {explain}" if found else ""


def _finish(path: Path, command: TrainCommand, received: int) -> int:
    rows = Workdir(path).rows(METRICS)
    last = rows[-1] if rows else {}
    step = last.get("step", 0)
    if received:
        name = signal.Signals(received).name
        total = command.config.steps if command.config is not None else 0
        done = f"after step {step} of {total}, saved" if step else "before step 1"
        print(
            f"hjax: stopped by {name} {done}; go on with the same command and "
            f"--workdir={command.whole or path}",
            file=sys.stderr,
        )
    elif command.config is not None and command.config.display.enabled:
        report = path / "report.html"
        print(f"done: {step} steps in {path}" + (f", see {report}" if report.exists() else ""))
    if command.json:
        summary = {"workdir": path, "steps": step, "stopped": bool(received), "metrics": last}
        print(json_line(summary))
    return 128 + received if received else 0


def _say_finished(workdir: Workdir, config: ConfigDict, command: TrainCommand) -> None:
    print(
        f"{workdir.path} is finished: {workdir.last_step()} of {config.steps} steps; give a "
        "larger --config.steps to go on"
    )
    if command.json:
        rows = workdir.rows(METRICS)
        summary = {"workdir": workdir.path, "steps": workdir.last_step(), "stopped": False}
        print(json_line({**summary, "metrics": rows[-1] if rows else {}}))


def _dry_run(trainer: Any, command: TrainCommand) -> int:
    from hjax.dryrun.description import describe

    try:
        description = describe(trainer)
    finally:
        trainer.close()
    if command.whole is None:  # a stage's come from a file of several
        description["settings"] = origins(command.name, trainer.config)
    if not command.json:
        from hjax.show.tables import print_description, print_memory

        memory = description.pop("memory")
        print_description(description, title=f"dry run of {command.name}")
        print_memory(memory, description["device_memory_bytes"])
    else:
        print(json_line(description))
    return 0


def _new_workdir(name: str) -> Path:
    """A new `runs/<config>-<time>`."""
    base = (
        Path("runs")
        / f"{find_config(name.partition(':')[0]).stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    )
    path, number = base, 1
    while path.exists():
        number += 1
        path = base.with_name(f"{base.name}-{number}")
    return path


if __name__ == "__main__":
    sys.exit(main())
