"""Multi-stage runs: configs that run in sequence, later ones from the checkpoints of earlier ones.

Each stage is a complete run in a folder of the workdir. A finished stage is skipped, and a stopped
stage resumes. `{workdir}` in a stage's values is replaced by the workdir, so `{workdir}/sft` holds
what the stage `sft` trained.
"""

import contextlib
import dataclasses
import re
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
from hjax.temporary_folders import TemporaryFolder

WORKDIR = "{workdir}"
_OVERRIDE = re.compile(r"--?(?:no)?config\.([^=]+)(=?)", re.DOTALL)


@dataclasses.dataclass(frozen=True)
class Stages:
    """The stages of a config file, with the overrides of the command line.

    Attributes:
      name: of --config.
      module: of the file; its optional `prepare(workdir)` writes the data that the stages read.
      argument: passed to the file, from `--config=FILE.py:ARGUMENT`; empty: none.
      declared: config of each stage in the file.
      overrides: `--config.` arguments by stage.
    """

    name: str
    module: types.ModuleType
    argument: str
    declared: Mapping[str, Any]
    overrides: Mapping[str, Sequence[str]]

    def configs(self, workdir: Path) -> dict[str, ConfigDict]:
        """The complete configs of all stages.

        Raises:
          ConfigError: a config is invalid; the message names its stage.
        """
        configs = {}
        for stage, declared in self.declared.items():
            try:
                config = apply_overrides(declared, self.overrides[stage])
                configs[stage] = check_config(_with_workdir(flatten(config), workdir))
            except ConfigError as error:
                raise ConfigError(f"stage {stage}: {error}") from error
        return configs

    def prepare(self, workdir: Path) -> None:
        """Call the file's `prepare`; if it raises, new folders that are empty are removed."""
        if not hasattr(self.module, "prepare"):
            return
        new = [folder for folder in (workdir, *workdir.parents) if not folder.exists()]
        workdir.mkdir(parents=True, exist_ok=True)
        try:
            self.module.prepare(workdir, *filter(None, [self.argument]))
        except BaseException:
            for folder in new:
                with contextlib.suppress(OSError):  # a folder with files is kept
                    folder.rmdir()
            raise


def read_stages(name: str, arguments: Sequence[str]) -> tuple[Stages | None, list[str]]:
    """Read the stages of a config file, and split their overrides from the other arguments.

    Args:
      name: of the file.
      arguments: `--config.STAGE.a.b=VALUE` changes a stage, `--config.a.b=VALUE` all stages.

    Returns:
      (stages, other arguments); (None, all arguments) for a file with a single config.
    """
    found = get_stages(name)
    if found is None:
        return None, list(arguments)
    module, declared = found
    overrides: dict[str, list[str]] = {stage: [] for stage in declared}
    rest: list[str] = []
    pending: Sequence[str] = ()  # stages whose key's value is the next argument
    for argument in arguments:
        match = _OVERRIDE.match(argument)
        if match is None:
            for stage in pending:
                overrides[stage].append(argument)
            if not pending:
                rest.append(argument)
            pending = ()
            continue
        stage, dot, _ = match[1].partition(".")
        targets: Sequence[str] = tuple(declared)
        if dot and stage in declared:
            targets, argument = (stage,), argument.replace(f"config.{stage}.", "config.", 1)
        for target in targets:
            overrides[target].append(argument)
        pending = () if match[2] or argument.lstrip("-").startswith("no") else targets
    return Stages(name, module, name.partition(":")[2], declared, overrides), rest


def run_stages(
    stages: Stages,
    workdir: Path,
    run: Callable[[str, ConfigDict, Path], int],
    as_json: bool = False,
) -> int:
    """Run all stages in sequence; returns the exit status of the last one that ran.

    Args:
      stages: their configs.
      workdir: of all stages.
      run: takes a title, a config and a workdir; returns an exit status.
      as_json: print one line of JSON at the end.
    """
    from hjax.show.report import write_stages

    configs = stages.configs(workdir)
    for stage, config in configs.items():
        Workdir(workdir / stage).check(config)  # check all stages before the first runs
    stages.prepare(workdir)
    check_data(configs, workdir)
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


def check_data(configs: Mapping[str, ConfigDict], workdir: Path) -> None:
    """Read the data of all stages and tokenise their examples, before the first stage trains.

    A stage that starts from one yet to be trained is read with that one's tokenizer. Finished
    stages are not read, and neither are those whose data an earlier stage writes.

    Raises:
      ConfigError: what a stage would end with when it starts; the message names the stage.
    """
    from hjax.algorithms import get_algorithm
    from hjax.models.weights import is_workdir
    from hjax.run.inputs import check_inputs
    from hjax.run.run_metadata import write_model_files

    with TemporaryFolder("hjax-stages-") as folder:
        untrained = {stage for stage in configs if not is_workdir(workdir / stage)}
        moved = {f"{workdir}/{stage}": f"{folder}/{stage}" for stage in untrained}
        for stage, config in configs.items():
            values = {key: moved.get(value, value) for key, value in flatten(config).items()}
            data = f"{config.data.path},{config.data.eval_path}"
            written = any(f"{workdir}/{other}/" in data for other in configs)
            start = values["actor.path"]
            unknown = start in moved.values() and not is_workdir(start)
            if written or unknown or Workdir(workdir / stage).finished(config.steps):
                continue
            try:
                inputs = check_inputs(check_config(values))
            except ConfigError as error:
                raise ConfigError(f"stage {stage}: {error}") from error
            algorithm = get_algorithm(config.algorithm.name)
            if not algorithm.sequences:
                continue
            table = algorithm.role_table(config.algorithm)
            write_model_files(Path(folder, stage), inputs, table["actor"].scalar)
            Path(folder, stage, "checkpoints").mkdir()


def dry_run_stages(
    stages: Stages, workdir: Path | None, run: Callable[[str, ConfigDict], None]
) -> int:
    """Dry run of each stage whose starting checkpoints exist."""
    with TemporaryFolder("hjax-stages-") as folder:
        base = workdir if workdir is not None and workdir.is_dir() else folder
        stages.prepare(base)
        configs = stages.configs(base)
        check_data(configs, base)
        for stage, config in configs.items():
            needed = {other for other in stages.declared if _mentions(config, f"{base}/{other}")}
            missing = [other for other in needed if not (base / other / "checkpoints").is_dir()]
            if missing:
                print(f"{stage}: starts from {', '.join(missing)}, yet to be trained")
            else:
                run(f"{stages.name}  {stage}", config)
    return 0


def _mentions(config: ConfigDict, path: str) -> bool:
    return any(value == path for value in flatten(config).values())


def _with_workdir(values: Mapping[str, Any], workdir: Path) -> dict[str, Any]:
    """Values of dotted keys, with `{workdir}` replaced."""
    return {
        key: value.replace(WORKDIR, str(workdir)) if isinstance(value, str) else value
        for key, value in values.items()
    }
