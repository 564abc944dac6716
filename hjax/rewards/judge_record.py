"""What a judge has said, kept in a file, and how often it was asked."""

from __future__ import annotations

import contextlib
import hashlib
import json
import sqlite3
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hjax.errors import ConfigError


class Record:
    """Answers by request, and a count of requests; several processes may share one file.

    Args:
      path: of an SQLite file, which is made; None: in memory, for as long as the process lives.

    Raises:
      ConfigError: the file cannot be opened or is no such file.
    """

    def __init__(self, path: Path | None):
        self._path = path
        self._lock = threading.Lock()
        # In memory there is one connection; of a file each use has its own.
        self._kept = sqlite3.connect(":memory:", check_same_thread=False) if path is None else None
        try:
            if path is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
            with self._open() as database:
                database.execute("CREATE TABLE IF NOT EXISTS said (request TEXT PRIMARY KEY, text)")
                database.execute("CREATE TABLE IF NOT EXISTS spent (name TEXT PRIMARY KEY, calls)")
                database.execute("INSERT OR IGNORE INTO spent VALUES ('all', 0)")
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(f"Judge(cache={str(path)!r}): {error}") from error

    @contextlib.contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        if self._kept is not None:
            with self._lock, self._kept:
                yield self._kept
            return
        assert self._path is not None
        with contextlib.closing(sqlite3.connect(self._path, timeout=60)) as database, database:
            yield database

    @staticmethod
    def name_of(request: Mapping[str, Any]) -> str:
        """What a request is called here: the same for the same content."""
        return hashlib.sha256(json.dumps(request, sort_keys=True).encode()).hexdigest()

    def said(self, request: str) -> str | None:
        """The answer to a request, None where there is none yet."""
        with self._open() as database:
            row = database.execute("SELECT text FROM said WHERE request = ?", [request]).fetchone()
        return None if row is None else row[0]

    def keep(self, request: str, text: str) -> None:
        """Keep an answer."""
        with self._open() as database:
            database.execute("INSERT OR REPLACE INTO said VALUES (?, ?)", [request, text])

    def take(self, budget: int) -> bool:
        """Count a request that is about to be sent; False if there have been as many as allowed."""
        with self._open() as database:
            done = database.execute("UPDATE spent SET calls = calls + 1 WHERE calls < ?", [budget])
            return done.rowcount == 1

    @property
    def calls(self) -> int:
        """Requests that were sent."""
        with self._open() as database:
            return int(database.execute("SELECT calls FROM spent").fetchone()[0])
