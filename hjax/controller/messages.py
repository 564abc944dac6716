"""What the controller says to workers: plain messages, and how they are written down.

A worker is described, never handed over: its class, sizes, paths and settings, no devices. A call
names role, method and arguments. Both can be pickled, so they may travel to another process; what a
user's file defines travels as the file's path and a name.
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
from hjax.user_code import by_name


@dataclasses.dataclass(frozen=True)
class BuildWorker:
    """Make a role's worker.

    Attributes:
      role: its name.
      worker: its class.
      arguments, options: what the class is called with. One that has a method ``on(devices)`` is
        replaced by what that returns where the worker is made.
    """

    role: str
    worker: Callable[..., Any]
    arguments: tuple[Any, ...] = ()
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def label(self) -> str:
        """How errors and timelines call it."""
        return f"{self.role} (construction)"


@dataclasses.dataclass(frozen=True)
class Call:
    """Call a method of a role's worker.

    Attributes:
      role, method: whose, which.
      arguments, options: values, or futures of other calls' results.
      reads: the entries of dicts among them that the method reads; None: all.
    """

    role: str
    method: str
    arguments: tuple[Any, ...] = ()
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    reads: frozenset[str] | None = None

    @property
    def label(self) -> str:
        """How errors and timelines call it."""
        return f"{self.role}.{self.method}"


Message = BuildWorker | Call


@dataclasses.dataclass(frozen=True)
class ResultOf:
    """Stands in a message that was written down for the result of another call."""

    number: int


def select(value: Any, reads: frozenset[str] | None) -> Any:
    """Of a dict the entries that are read; anything else as it is."""
    if reads is None or not isinstance(value, Mapping):
        return value
    return {key: item for key, item in value.items() if key in reads}


class MiniBatch(MutableMapping[str, Any]):
    """Rows of a batch on the controller; each role that reads them is sent the batch once.

    Entries are cut out as they are read, and cannot be written into. One that is set, or the dict
    that ``|`` makes, travels as it is.

    Args:
      whole: the batch's arrays.
      rows: int [rows], their numbers; None: all.
      held: by role and entries the futures of what was sent, shared by the batch's mini-batches.
    """

    def __init__(self, whole: Mapping[str, np.ndarray], rows: np.ndarray | None, held: dict):
        self._whole, self._rows, self._held = whole, rows, held
        self._changed: dict[str, Any] | None = None

    def sent(self, role: str, reads: frozenset[str] | None, hold: Callable[..., Any]) -> Any:
        """What a role's message says: rows of what the role holds; ``hold`` makes it hold that."""
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
    """Arrays on devices as numpy arrays, and what users' files define by file and name."""

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
        return by_name(value)


def to_bytes(
    value: Any, kept: list[Any] | None = None, keeps: Callable[[Any], bool] = lambda _: False
) -> bytes:
    """A message or result, written down.

    Args:
      value: what is written.
      kept: takes what is not written down but goes along beside it.
      keeps: says what that is.
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


def from_bytes(data: bytes, kept: Sequence[Any] = ()) -> Any:
    """What ``to_bytes`` wrote, with what went along beside it."""
    return _Unpickler(io.BytesIO(data), kept).load()


def writable_error(error: BaseException) -> BaseException:
    """The error, or where it cannot be written down one that tells it in words."""
    try:
        told = from_bytes(to_bytes(error))
    except Exception:
        told = RunError(f"{type(error).__name__}: {error}")
    told.__notes__ = list(getattr(error, "__notes__", ()))
    return told
