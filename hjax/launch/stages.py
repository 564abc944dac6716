"""A run in stages: configs one after another, which may start from what earlier ones made.

Each stage is a run of its own in a folder of the workdir, with everything a run has; a stage that
is finished is left as it is, and one that was stopped goes on. `{workdir}` in a stage's values
stands for the workdir, so `{workdir}/sft` is what the stage `sft` trained.
"""

import contextlib
import dataclasses
import re
import tempfile
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from hjax.config import flatten
from hjax.errors import ConfigError
from hjax.files import METRICS, json_line
from hjax.run.workdir import Workdir
from hjax.settings.config_loading import apply_overrides, check_config, get_stages

WORKDIR = "{workdir}"
_OVERRIDE = re.compile(r"--?(?:no)?config\.([^=]+)(=?)", re.DOTALL)


@dataclasses.dataclass(frozen=True)
class Stages:
    """A file's stages as a command line asks for them.

    Attributes:
      name: as it was given.
      module: of the file; its `prepare(workdir)`, if it has one, writes what the stages read.
      argument: what stands after the file's name and a colon, handed to it; empty: nothing.
      given: by stage what the file says.
      overrides: by stage the arguments that change it.
    """

    name: str
    module: types.ModuleType
    argument: str
    given: Mapping[str, Any]
    overrides: Mapping[str, Sequence[str]]

    def configs(self, workdir: Path) -> dict[str, ConfigDict]:
        """The complete configs of all stages.

        Raises:
          ConfigError: whatever is wrong with one of them, with the stage's name.
        """
        made = {}
        for stage, given in self.given.items():
            try:
                config = apply_overrides(given, self.overrides[stage])
                made[stage] = check_config(_placed(flatten(config), workdir))
            except ConfigError as error:
                raise ConfigError(f"stage {stage}: {error}") from error
        return made

    def prepare(self, workdir: Path) -> None:
        """Have the file write what its stages read; if it refuses, no folder is left behind."""
        if not hasattr(self.module, "prepare"):
            return
        new = [folder for folder in (workdir, *workdir.parents) if not folder.exists()]
        workdir.mkdir(parents=True, exist_ok=True)
        try:
            self.module.prepare(workdir, *filter(None, [self.argument]))
        except BaseException:
            for folder in new:
                with contextlib.suppress(OSError):  # what it wrote stays
                    folder.rmdir()
            raise


def read_stages(name: str, arguments: Sequence[str]) -> tuple[Stages | None, list[str]]:
    """The stages that a `--config` names, and the arguments that change none of them.

    Args:
      name: of the file.
      arguments: `--config.STAGE.a.b=VALUE` changes a stage, `--config.a.b=VALUE` all of them; what
        else there is comes back.

    Returns:
      None and all arguments where the file has one config.
    """
    found = get_stages(name)
    if found is None:
        return None, list(arguments)
    module, given = found
    overrides: dict[str, list[str]] = {stage: [] for stage in given}
    rest: list[str] = []
    waiting: Sequence[str] = ()  # stages whose key's value is the next argument
    for argument in arguments:
        match = _OVERRIDE.match(argument)
        if match is None:
            for stage in waiting:
                overrides[stage].append(argument)
            if not waiting:
                rest.append(argument)
            waiting = ()
            continue
        stage, dot, _ = match[1].partition(".")
        named = bool(dot) and stage in given
        for each in (stage,) if named else tuple(given):
            cut = argument.replace(f"config.{stage}.", "config.", 1) if named else argument
            overrides[each].append(cut)
        waiting = () if match[2] or argument.lstrip("-").startswith("no") else tuple(given)
        waiting = (stage,) if waiting and named else waiting
    return Stages(name, module, name.partition(":")[2], given, overrides), rest


def run_stages(
    stages: Stages,
    workdir: Path,
    run: Callable[[str, ConfigDict, Path], int],
    as_json: bool = False,
) -> int:
    """Run all stages, one after another; returns the exit status of the last that ran.

    Args:
      stages: see there.
      workdir: of all of them.
      run: takes a title, a config and a workdir; gives an exit status.
      as_json: print one line of JSON at the end.
    """
    from hjax.show.report import write_stages

    configs = stages.configs(workdir)
    for stage, config in configs.items():
        Workdir(workdir / stage).check(config)  # all of them, before one runs
    stages.prepare(workdir)
    status = 0
    for number, (stage, config) in enumerate(configs.items(), 1):
        title = f"{stages.name}  stage {number} of {len(configs)}: {stage}"
        status = run(title, config, workdir / stage)
        write_stages(workdir, list(configs))
        if status:
            break
    if not status:
        print(f"done: {len(configs)} stages in {workdir}, see {workdir / 'report.html'}")
    if as_json:
        rows = {stage: Workdir(workdir / stage).rows(METRICS) for stage in configs}
        last = {stage: row[-1] if row else {} for stage, row in rows.items()}
        print(json_line({"workdir": workdir, "stopped": bool(status), "stages": last}))
    return status


def dry_run_stages(
    stages: Stages, workdir: Path | None, run: Callable[[str, ConfigDict], None]
) -> int:
    """Say what each stage would do, where what it starts from is there."""
    with tempfile.TemporaryDirectory() as folder:
        base = workdir if workdir is not None and workdir.is_dir() else Path(folder)
        stages.prepare(base)
        for stage, config in stages.configs(base).items():
            begins = {other for other in stages.given if _names(config, f"{base}/{other}")}
            missing = [other for other in begins if not (base / other / "checkpoints").is_dir()]
            if missing:
                print(f"{stage}: starts from {', '.join(missing)}, yet to be trained")
            else:
                run(f"{stages.name}  {stage}", config)
    return 0


def _names(config: ConfigDict, path: str) -> bool:
    return any(value == path for value in flatten(config).values())


def _placed(values: Mapping[str, Any], workdir: Path) -> dict[str, Any]:
    """Dotted keys, their texts with the workdir in them."""
    return {
        key: value.replace(WORKDIR, str(workdir)) if isinstance(value, str) else value
        for key, value in values.items()
    }
