"""Messages from the controller to workers, and their serialization (pickle).

A worker is described, not sent: its class, sizes, paths and settings, without devices. A call names
role, method and arguments. Both can be pickled for another process; objects of a user's file are
sent as its path and their name.
"""

import dataclasses
import io
import pickle
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import jax
import numpy as np

from hjax.errors import RunError
from hjax.sharded_values import ShardedRows
from hjax.user_code import reduce_by_name


@dataclasses.dataclass(frozen=True)
class BuildWorker:
    """Build a role's worker.

    Attributes:
      role: its name.
      worker: its class.
      arguments, options: of the class. One with a method ``on(devices)`` is replaced by what that
        returns where the worker is built.
    """

    role: str
    worker: Callable[..., Any]
    arguments: tuple[Any, ...] = ()
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def label(self) -> str:
        """Its name in errors and timelines."""
        return f"{self.role} (construction)"


@dataclasses.dataclass(frozen=True)
class Call:
    """Call a method of a role's worker.

    Attributes:
      role, method: the method and whose it is.
      arguments, options: values, or futures of other calls' results.
      reads: entries of dicts among them that the method reads; None: all.
    """

    role: str
    method: str
    arguments: tuple[Any, ...] = ()
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    reads: frozenset[str] | None = None

    @property
    def label(self) -> str:
        """Its name in errors and timelines."""
        return f"{self.role}.{self.method}"


Message = BuildWorker | Call


@dataclasses.dataclass(frozen=True)
class ResultOf:
    """Placeholder in a serialized message for the result of another call in the same pool."""

    number: int


def select(value: Any, reads: frozenset[str] | None) -> Any:
    """A dict's entries that are read; any other value unchanged."""
    if reads is None or not isinstance(value, Mapping):
        return value
    return {key: item for key, item in value.items() if key in reads}


class MiniBatch(MutableMapping[str, Any]):
    """Rows of a batch on the controller; the batch itself is sent once to each role that reads it.

    Entries are cut when they are read, and are read-only. A mini-batch with a changed entry, or the
    dict that ``|`` makes, is sent in full.

    Args:
      whole: the batch's arrays.
      rows: int [rows], row numbers; None: all.
      held: futures of what was sent, by role and entries; shared by the batch's mini-batches.
    """

    def __init__(self, whole: Mapping[str, np.ndarray], rows: np.ndarray | None, held: dict):
        self._whole, self._rows, self._held = whole, rows, held
        self._changed: dict[str, Any] | None = None

    def to_message(self, role: str, reads: frozenset[str] | None, hold: Callable[..., Any]) -> Any:
        """The value for a role's message: rows of the batch that the role holds; ``hold`` sends the
        batch."""
        if self._changed is not None:
            return select(self._changed, reads)
        if (role, reads) not in self._held:
            self._held[role, reads] = hold(select(self._whole, reads))
        return ShardedRows(self._held[role, reads], self._rows)

    def __getitem__(self, key: str) -> Any:
        if self._changed is not None:
            return self._changed[key]
        x = self._whole[key]
        cut = x[...] if self._rows is None or not x.ndim else x[self._rows]
        cut.flags.writeable = False
        return cut

    def __setitem__(self, key: str, value: Any) -> None:
        self._changed = {**self, key: value}

    def __delitem__(self, key: str) -> None:
        self._changed = {other: x for other, x in self.items() if other != key}

    def __iter__(self) -> Iterator[str]:
        return iter(self._whole if self._changed is None else self._changed)

    def __len__(self) -> int:
        return len(self._whole if self._changed is None else self._changed)

    def __or__(self, other: Mapping[str, Any]) -> dict[str, Any]:
        return {**self, **other}


class _Pickler(pickle.Pickler):
    """Pickles device arrays as numpy arrays, and objects of users' files by path and name."""

    def __init__(self, out: io.BytesIO, kept: list[Any] | None, keeps: Callable[[Any], bool]):
        super().__init__(out, protocol=pickle.HIGHEST_PROTOCOL)
        self._kept, self._keeps = kept, keeps

    def persistent_id(self, value: Any) -> int | None:
        if self._kept is None or not self._keeps(value):
            return None
        self._kept.append(value)
        return len(self._kept) - 1

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, jax.Array):
            return np.asarray(value).__reduce__()
        return reduce_by_name(value)


def serialize(
    value: Any, kept: list[Any] | None = None, keeps: Callable[[Any], bool] = lambda _: False
) -> bytes:
    """A message or result as bytes.

    Args:
      value: to serialize.
      kept: collects out-of-band values, which are not pickled but sent beside the bytes.
      keeps: whether a value is out-of-band.
    """
    out = io.BytesIO()
    _Pickler(out, kept, keeps).dump(value)
    return out.getvalue()


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: io.BytesIO, kept: Sequence[Any]):
        super().__init__(data)
        self._kept = kept

    def persistent_load(self, number: int) -> Any:
        return self._kept[number]


def deserialize(data: bytes, kept: Sequence[Any] = ()) -> Any:
    """The value that ``serialize`` wrote; ``kept``: its out-of-band values."""
    return _Unpickler(io.BytesIO(data), kept).load()


def picklable_error(error: BaseException) -> BaseException:
    """The error, or a RunError with its text if it cannot be pickled."""
    try:
        copy = deserialize(serialize(error))
    except Exception:
        copy = RunError(f"{type(error).__name__}: {error}")
    copy.__notes__ = list(getattr(error, "__notes__", ()))
    return copy
