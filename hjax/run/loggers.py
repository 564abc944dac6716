"""Loggers besides the workdir: TensorBoard, Weights & Biases, and the users' own."""

import json
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from hjax.config import flatten
from hjax.errors import ConfigError
from hjax.files import read_json, replace_file, to_json
from hjax.user_code import load_object

Row = Mapping[str, Any]


class Logger:
    """Receives what a run logs; subclass it and override what you need.

    ``display.logger=FILE.py:Class`` selects a class, which is constructed without arguments.
    """

    def start(self, config: Mapping[str, Any], workdir: Path, step: int) -> None:
        """The run starts or resumes.

        Args:
          config: dotted key to value.
          workdir: the run's directory.
          step: the last logged step that is kept; 0: none.
        """

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """A step's metrics, without those that have no value."""

    def samples(self, step: int, rows: Sequence[Row]) -> None:
        """Sample responses of a step: rows as in samples.jsonl."""

    def histograms(self, step: int, found: Mapping[str, Row]) -> None:
        """Histograms of a step's values by name, as made by ``hjax.run.reporter.histogram``."""

    def close(self) -> None:
        """The run ends."""


class TensorBoard(Logger):
    """Event files under `tensorboard/`: scalars, samples as text, histograms, hyper-parameters."""

    def start(self, config: Mapping[str, Any], workdir: Path, step: int) -> None:
        from tensorboardX.summary import hparams

        from hjax.run.events import TensorBoardWriter

        self._writer = TensorBoardWriter(workdir / "tensorboard", step + 1)
        if step:
            return
        plain = (bool, int, float)
        settings = {k: v if isinstance(v, plain) else str(v) for k, v in config.items()}
        for summary in hparams(settings, {"reward/mean": 0.0, "eval/reward": 0.0}):
            self._writer.file_writer.add_summary(summary)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for key, value in metrics.items():
            self._writer.add_scalar(key, value, step)
        self._writer.flush()

    def samples(self, step: int, rows: Sequence[Row]) -> None:
        for row in rows:
            name = f"samples/{row['kind']}/{row['index']}"
            scored = [k for k in ("reward", "cost") if row.get(k) is not None]
            scores = ", ".join(f"{k} {row[k]:.4g}" for k in scored)
            # Four spaces make TensorBoard show it verbatim, not as Markdown.
            text = f"{row['prompt']}\n--- {scores}\n{row['response']}".replace("\n", "\n    ")
            self._writer.add_text(name, "    " + text, step)

    def histograms(self, step: int, found: Mapping[str, Row]) -> None:
        for name, said in found.items():
            counts = said["counts"]
            width = (said["high"] - said["low"]) / len(counts)
            self._writer.add_histogram_raw(
                f"{name}/histogram",
                min=said["low"],
                max=said["high"],
                num=sum(counts),
                sum=said["sum"],
                sum_squares=said["squares"],
                bucket_limits=[said["low"] + width * (i + 1) for i in range(len(counts))],
                bucket_counts=counts,
                global_step=step,
            )

    def close(self) -> None:
        self._writer.close()


class Wandb(Logger):
    """A Weights & Biases run; resuming continues the same one.

    ``WANDB_MODE=offline`` (wandb's own setting) keeps it from uploading.

    Args:
      project: of Weights & Biases.
    """

    def __init__(self, project: str):
        try:
            import wandb
        except ImportError as error:
            raise ConfigError(
                f"display.wandb={project!r} needs wandb: pip install 'hjax[wandb]', or set it to ''"
            ) from error
        self._wandb = wandb
        self._project = project

    def start(self, config: Mapping[str, Any], workdir: Path, step: int) -> None:
        """See ``Logger``.

        Raises:
          ConfigError: it does not start, such as without a key.
        """
        kept = workdir / "wandb.json"
        known = read_json(kept) if step else None
        name = known["id"] if known else uuid.uuid4().hex[:12]
        if not known:
            replace_file(kept, json.dumps({"id": name}) + "\n")
        try:
            self._run = self._wandb.init(
                project=self._project,
                id=name,
                name=workdir.resolve().name,
                dir=str(workdir),
                config=to_json(dict(config)),
                resume="allow",
                # Leaves stdout and stderr alone: the terminal belongs to the run's display.
                settings=self._wandb.Settings(console="off", silent=True),
            )
        except self._wandb.errors.Error as error:
            raise ConfigError(
                f"display.wandb={self._project}: {' '.join(str(error).split())} Log in with `wandb "
                "login`, or keep the run on this machine with WANDB_MODE=offline"
            ) from error
        # wandb's own step counter cannot go back to a checkpoint; this axis can.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({"step": step, **metrics})

    def samples(self, step: int, rows: Sequence[Row]) -> None:
        columns = ["prompt", "response", "reward"]
        data: list[Any] = [[row.get(column) for column in columns] for row in rows]
        table = self._wandb.Table(columns=list[str | int](columns), data=data)
        self._run.log({"step": step, f"samples/{rows[0]['kind']}": table})

    def histograms(self, step: int, found: Mapping[str, Row]) -> None:
        drawn: dict[str, Any] = {"step": step}
        for name, said in found.items():
            edges = np.linspace(said["low"], said["high"], len(said["counts"]) + 1)
            spread = np.asarray(said["counts"]), edges
            drawn[f"{name}/histogram"] = self._wandb.Histogram(np_histogram=spread)
        self._run.log(drawn)

    def close(self) -> None:
        self._run.finish()


def make_loggers(config: ConfigDict) -> list[Logger]:
    """The loggers that ``config.display`` selects, not started.

    Raises:
      ConfigError: ``display.logger`` names no ``Logger`` class, or wandb is selected and not
        installed.
    """
    made: list[Logger] = [TensorBoard()] if config.display.tensorboard else []
    if config.display.wandb:
        made.append(Wandb(config.display.wandb))
    if named := config.display.logger:
        made.append(_custom_logger(named))
    return made


def _custom_logger(named: str) -> Logger:
    found = load_object(named, "display.logger")
    made = found() if callable(found) else found
    if not isinstance(made, Logger):
        raise ConfigError(
            f"display.logger={named} gives a {type(made).__name__}; it must be a class that "
            "inherits hjax.run.loggers.Logger"
        )
    return made


class Loggers:
    """Forwards to all loggers of a run.

    Args:
      loggers: not started.
    """

    def __init__(self, loggers: Sequence[Logger]):
        self._loggers = loggers
        self._started: list[Logger] = []

    def start(self, config: Any, workdir: Path, step: int) -> None:
        """Start all loggers, after ``step`` on resume; closes started ones first."""
        self.close()
        for logger in self._loggers:
            logger.start(flatten(to_json(config)), workdir, step)
            self._started.append(logger)

    def log(self, row: Row) -> None:
        """Log a row of metrics.jsonl."""
        metrics = {
            key: float(value)
            for key, value in to_json(row).items()
            if key != "step" and isinstance(value, (int, float))
        }
        for logger in self._started:
            logger.log(int(row["step"]), metrics)

    def samples(self, rows: Sequence[Row]) -> None:
        """Log rows of samples.jsonl, all of one step and kind."""
        if rows:
            for logger in self._started:
                logger.samples(int(rows[0]["step"]), rows)

    def histograms(self, row: Row) -> None:
        """Log a row of histograms.jsonl."""
        found = {key: value for key, value in row.items() if key != "step"}
        for logger in self._started:
            logger.histograms(int(row["step"]), found)

    def close(self) -> None:
        """Close the started loggers."""
        while self._started:
            self._started.pop().close()
