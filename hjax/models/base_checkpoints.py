"""Base checkpoints: which checkpoints of other runs a run's models were loaded from.

A path to a workdir means its newest checkpoint. Adapters are trained on the frozen weights of one
checkpoint, so a run records which one by path (``bases.json`` in its workdir), and later loads read
the same one.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hjax.errors import DataError
from hjax.files import StrPath, read_json, saved_steps
from hjax.models.checkpoint import damaged_error
from hjax.models.checksums import read_checksums

RECORD = "bases.json"
_ITEMS = ("actor.params", "actor.base")  # the items that are loaded from a checkpoint


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
        checkpoints = Path(workdir) / "checkpoints"
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


def newest_base(workdir: StrPath) -> BaseCheckpoint | None:
    """The newest checkpoint of a run, None if it has none.

    Raises:
      DataError: its checksums are damaged.
    """
    checkpoints = Path(workdir) / "checkpoints"
    if not (steps := saved_steps(checkpoints)):
        return None
    return BaseCheckpoint(steps[-1], _item_checksums(checkpoints / str(steps[-1])))


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
        raise damaged_error(folder, error) from error
    return {item: saved[item] for item in _ITEMS if item in saved}
