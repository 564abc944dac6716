"""Which checkpoints of other runs a run's models were read from.

A path that is a workdir means its newest checkpoint. What learns beside frozen weights learns on
those of one checkpoint, so a run keeps by path which one it was (``bases.json`` in its workdir),
and whoever reads the weights again reads those.
"""

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hjax.errors import DataError
from hjax.files import read_json, saved_steps
from hjax.models.checkpoint import damaged_error
from hjax.models.checksums import read_checksums

RECORD = "bases.json"
_ITEMS = ("actor.params", "actor.base")  # what is read of a checkpoint


@dataclasses.dataclass(frozen=True)
class BaseCheckpoint:
    """A checkpoint of another run.

    Attributes:
      step: its number.
      sums: checksums of what is read of it, by item; empty: it has none (an earlier hjax's).
    """

    step: int
    sums: Mapping[str, Any]

    def check(self, workdir: str | os.PathLike) -> int:
        """Its step, where that run still has it.

        Raises:
          DataError: it is gone, or is another one now.
        """
        checkpoints = Path(workdir) / "checkpoints"
        there = saved_steps(checkpoints) if checkpoints.is_dir() else []
        if self.step not in there:
            wrong = f"is gone (there: {', '.join(map(str, there)) or 'none'})"
        elif self.sums and self.sums != _item_checksums(checkpoints / str(self.step)):
            wrong = "is another one now: its checksum differs"
        else:
            return self.step
        raise DataError(
            f"{workdir}: checkpoint {self.step}, beside which this run's adapters learned, {wrong}"
            "; put it back, or train anew on an export of that run, which stays as it is "
            "(python -m hjax.launch.export)"
        )


def newest_base(workdir: str | os.PathLike) -> BaseCheckpoint | None:
    """The newest checkpoint of a run; None: it has none.

    Raises:
      DataError: its checksums are damaged.
    """
    checkpoints = Path(workdir) / "checkpoints"
    if not (steps := saved_steps(checkpoints)):
        return None
    return BaseCheckpoint(steps[-1], _item_checksums(checkpoints / str(steps[-1])))


def read_bases(workdir: str | os.PathLike) -> dict[str, BaseCheckpoint]:
    """By path, what a run recorded; empty where it read no other run's (or an earlier hjax did).

    Raises:
      DataError: the record is damaged.
    """
    file = Path(workdir) / RECORD
    content = read_json(file)
    try:
        return {path: BaseCheckpoint(**base) for path, base in (content or {}).items()}
    except (TypeError, AttributeError) as error:
        raise DataError(f"{file}: not a record of checkpoints; the file is damaged") from error


def recorded_step(workdir: str | os.PathLike, path: str | os.PathLike) -> int | None:
    """Which checkpoint at a path a run's adapters stand on; None: no record of any.

    Raises:
      DataError: it is gone, or is another one now.
    """
    base = read_bases(workdir).get(str(path))
    return None if base is None else base.check(path)


def _item_checksums(folder: Path) -> dict[str, Any]:
    try:
        saved = read_checksums(folder)
    except (OSError, ValueError) as error:
        raise damaged_error(folder, error) from error
    return {item: saved[item] for item in _ITEMS if item in saved}
