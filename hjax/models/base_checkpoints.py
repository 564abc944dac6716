"""Base checkpoints: which checkpoints of other runs a run's models were loaded from.

A path to a workdir means its newest checkpoint; ``WORKDIR/checkpoints/STEP`` is another one, and
``WORKDIR/checkpoints/best`` the best by the run's ``checkpoint.best``. Adapters are trained on the
frozen weights of one checkpoint, so a run records which one by path (``bases.json`` in its
workdir), and later loads read the same one.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hjax.errors import DataError
from hjax.files import BEST, StrPath, read_json, saved_steps
from hjax.models.checksums import read_checksums
from hjax.rules import whole_number

RECORD = "bases.json"
MODEL_DIRECTORY = "model"  # in a workdir: config.json and tokenizer of its actor
_ITEMS = ("actor.params", "actor.base")  # the items that are loaded from a checkpoint


def split_checkpoint(path: StrPath) -> tuple[Path, int | None]:
    """The workdir and the step of ``WORKDIR/checkpoints/STEP``; of another path itself and None.

    Raises:
      DataError: ``WORKDIR/checkpoints/best`` of a run that has no best checkpoint.
    """
    path = Path(path)
    workdir, name = path.parent.parent, path.name
    step = whole_number(name)
    if path.parent.name != "checkpoints" or (name != "best" and step is None):
        return path, None
    if not (workdir / MODEL_DIRECTORY / "config.json").is_file():
        return path, None  # a folder of another program's
    if name != "best":
        return workdir, step
    record = read_json(workdir / BEST)
    if not isinstance(record, dict) or not isinstance(record.get("step"), int):
        raise DataError(
            f"{path}: this run has no best checkpoint ({BEST}); set checkpoint.best to the metric "
            "that says which is, or name a step"
        )
    return workdir, record["step"]


def checkpoint_step(path: StrPath) -> int:
    """The step of the checkpoint that a workdir's path means, its newest if it names none.

    Raises:
      DataError: it is not there.
    """
    workdir, step = split_checkpoint(path)
    checkpoints = workdir / "checkpoints"
    saved = saved_steps(checkpoints) if checkpoints.is_dir() else []
    if not saved:
        raise DataError(f"{path}: no complete checkpoint there; train a step first")
    if step is not None and step not in saved:
        raise DataError(f"{path}: no such checkpoint; saved: {', '.join(map(str, saved))}")
    return saved[-1] if step is None else step


@dataclasses.dataclass(frozen=True)
class BaseCheckpoint:
    """A checkpoint of another run, identified by checksums.

    Attributes:
      step: its number.
      sums: checksums of the loaded items; empty: it has none (saved by an earlier version).
    """

    step: int
    sums: Mapping[str, Any]

    def check(self, workdir: StrPath) -> int:
        """Its step, once it is certain that the run still has the same checkpoint.

        Raises:
          DataError: the checkpoint is gone, or its checksums differ.
        """
        checkpoints = split_checkpoint(workdir)[0] / "checkpoints"
        saved = saved_steps(checkpoints) if checkpoints.is_dir() else []
        if self.step not in saved:
            wrong = f"is gone (saved: {', '.join(map(str, saved)) or 'none'})"
        elif self.sums and self.sums != _item_checksums(checkpoints / str(self.step)):
            wrong = "is another one now: its checksum differs"
        else:
            return self.step
        raise DataError(
            f"{workdir}: checkpoint {self.step}, the base of this run's adapters, {wrong}"
            "; put it back, or train again on an export of that run, which does not change "
            "(python -m hjax.launch.export)"
        )


def base_checkpoint(path: StrPath) -> BaseCheckpoint | None:
    """The checkpoint of a run that a path means, None if the run has none.

    Raises:
      DataError: it is not there, or its checksums are damaged.
    """
    workdir, step = split_checkpoint(path)
    if step is None and not saved_steps(workdir / "checkpoints"):
        return None
    step = checkpoint_step(path)
    return BaseCheckpoint(step, _item_checksums(workdir / "checkpoints" / str(step)))


def read_bases(workdir: StrPath) -> dict[str, BaseCheckpoint]:
    """The base checkpoints that a run recorded, by path; empty if it read none.

    Raises:
      DataError: the record is damaged.
    """
    file = Path(workdir) / RECORD
    content = read_json(file)
    try:
        return {path: BaseCheckpoint(**base) for path, base in (content or {}).items()}
    except (TypeError, AttributeError) as error:
        raise DataError(f"{file}: not a record of checkpoints; the file is damaged") from error


def recorded_step(workdir: StrPath, path: StrPath) -> int | None:
    """The step of the checkpoint at a path that a run's adapters were trained on; None: unrecorded.

    Raises:
      DataError: the checkpoint is gone, or its checksums differ.
    """
    base = read_bases(workdir).get(str(path))
    return None if base is None else base.check(path)


def _item_checksums(folder: Path) -> dict[str, Any]:
    try:
        saved = read_checksums(folder)
    except (OSError, ValueError) as error:
        from hjax.models.checkpoint import damaged_error  # imports JAX

        raise damaged_error(folder, error) from error
    return {item: saved[item] for item in _ITEMS if item in saved}
