"""Rows that a data set leaves out, counted by what is wrong with them."""

import contextlib
from collections.abc import Iterator

from hjax.errors import DataError

INVALID = ("error", "drop")
# The kind of a pair whose answers are equal. It teaches nothing, so a run leaves it out.
EQUAL_PAIR = "equal pair"
# Locations of a kind that a message lists.
_LISTED = 5


class InvalidRows:
    """Checks rows, and collects those that are left out.

    Args:
      policy: ``drop`` leaves rows with an error out, ``error`` only pairs whose answers are equal;
        with an empty one every such row is an error.

    Attributes:
      locations: of the rows left out, by kind.
    """

    def __init__(self, policy: str = ""):
        self.locations: dict[str, list[str]] = {}
        self._policy = policy
        self._first = ""  # error of a row that was left out

    @contextlib.contextmanager
    def checking(self, where: str, kind: str = "malformed row") -> Iterator[None]:
        """Check a row in the block, which ends at the first ``DataError``.

        Args:
          where: the row's location, `file:line` or `file: row n`.
          kind: of an error that has none.

        Raises:
          DataError: the block's, with the location, unless such rows are left out.
        """
        try:
            yield
        except DataError as error:
            kind = error.kind or kind
            if self._policy == "drop" or (self._policy and kind == EQUAL_PAIR):
                self.leave_out(where, kind)
                self._first = self._first or str(error)
                return
            advice = "; data.invalid=drop leaves such rows out" if self._policy else ""
            raise DataError(f"{where}: {error}{advice}", kind=kind) from None

    def leave_out(self, where: str, kind: str) -> None:
        """Count a row that is left out."""
        self.locations.setdefault(kind, []).append(where)

    def nothing_left(self, path: str) -> DataError:
        """The error of a file at ``path`` whose rows are all left out."""
        first = f"; the first one: {self._first}" if self._first else ""
        return DataError(f"{path}: every row is left out: {self}{first}")

    def __len__(self) -> int:
        return sum(map(len, self.locations.values()))

    def __str__(self) -> str:
        """The number of rows of each kind and the first locations, in one line."""
        found = []
        for kind, locations in self.locations.items():
            more = ", …" if len(locations) > _LISTED else ""
            found.append(f"{len(locations)} × {kind} ({', '.join(locations[:_LISTED])}{more})")
        return "; ".join(found)
