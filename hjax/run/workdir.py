"""A run's working directory: its files, its lock, and how they survive a kill and a resume.

Rows are appended as whole lines and synced to disk, and other files are replaced atomically. So a
run that is killed at any moment leaves files that can be read and resumed.
"""

import contextlib
import copy
import json
import os
import shutil
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hjax.config import AUTO, Config, flatten
from hjax.config_aliases import WISHES, with_current_names
from hjax.errors import ConfigError, DataError, RunError, output_error
from hjax.files import (
    BEST,
    CALIBRATION,
    CONTROLLER,
    HISTOGRAMS,
    KERNELS,
    LEFT_OUT,
    LOCK,
    METRICS,
    MODEL,
    PROFILE,
    RUN_FOLDERS,
    SAMPLES,
    STARTS,
    TENSORBOARD,
    WARM_START,
    StrPath,
    drop_partial_line,
    enclosing_run,
    mount_points,
    open_regular,
    read_json,
    read_rows,
    remove_parts,
    replace_file,
    saved_steps,
    special_file,
    to_json,
)
from hjax.models.base_checkpoints import RECORD as BASES
from hjax.models.base_checkpoints import BaseCheckpoint, read_bases
from hjax.run.loggers import Logger, Loggers
from hjax.settings.keys import default_config

# Files of a run that --overwrite removes; `.lock` and `logs`, open in its processes, stay.
RUN_FILES = (
    "config.json", "plan.json", BASES, "timeline.json", "report.html", METRICS, WARM_START, SAMPLES,
    CALIBRATION, HISTOGRAMS, STARTS, BEST, PROFILE, LEFT_OUT, KERNELS, *RUN_FOLDERS,
)  # fmt: skip
# Suffix of folders that --overwrite is removing.
_REMOVING = ".removing"
# Config keys that may change on resume; a trailing dot means a section. Those of rewards,
# checkpoints and the sampler's error are here because error messages advise to change them.
CHANGEABLE = (
    "steps",
    "placement",
    "layout.",
    "model.unroll_layers",
    "cluster.",
    "display.",
    "sandbox.",
    "checkpoint.",
    "environment.processes",
    "environment.step_seconds",
    "environment.memory_gib",
    "agent.processes",
    "agent.seconds",
    "agent.memory_gib",
    "reward.max_unscored",
    "reward.timeout_seconds",
    "reward.runs_in",
    "rollout.warn_prob_error",
    "rollout.max_prob_error",
)
_BUCKETS = "data.length_buckets"  # of older runs

# Directories in which this process trains, by device and inode. The file lock alone does not
# exclude a second Trainer of this process, and closing any handle of the file would release it.
_LOCKED_DIRECTORIES: set[tuple[int, int]] = set()
_LOCKED_GUARD = threading.Lock()


class Workdir:
    """A run's working directory. Nothing is written before `open`.

    Args:
      path: the directory; `open` creates it.
      loggers: receive the rows too.
      overwrite: discard an existing run: `open` removes its files.
    """

    def __init__(self, path: StrPath, loggers: Sequence[Logger] = (), overwrite: bool = False):
        self.path = Path(path)
        self._overwrite = overwrite
        self._loggers = Loggers(loggers)
        self._unlock: weakref.finalize | None = None
        self._fresh = False  # whether the run is new and may still be discarded
        self._existing: frozenset[str] | None = None  # files before `open`; None: no directory
        self.earlier_steps: int | None = None  # `steps` of the run that is resumed, as it was

    @property
    def checkpoints(self) -> Path:
        """Where checkpoints go, one directory per step."""
        return self.path / "checkpoints"

    def check(self, config: Mapping[str, Any]) -> bool:
        """Whether the directory holds a run to resume; writes nothing.

        A run with another config that never took a step does not count: `open` replaces it.

        Raises:
          ConfigError: a key differs that may not change on resume, named with both values; a file
            has the kind of another (a link, a FIFO); or there are checkpoints without a run.
        """
        self._check_files()
        old = self._read_config()
        if old is None:
            self._check_no_other_files()
        if self._overwrite or old is None:
            return False
        try:
            self._check_unchanged(old, to_json(config))
        except ConfigError:
            if self.has_steps():
                raise
            return False
        return True

    def with_recorded_packing(self, config: Config) -> Config:
        """The config, with ``data.packing=auto`` replaced by that of the run to resume. Raises
        ConfigError as ``check`` does."""
        if config.data.packing == AUTO and self.check(config):
            config = copy.deepcopy(config)
            config.data.packing = _recorded(self._read_config() or {})["data.packing"]
        return config

    def recorded_bases(self, config: Mapping[str, Any]) -> dict[str, BaseCheckpoint]:
        """By path, the base checkpoints of other runs that the run to resume started from.

        Empty if that run has no checkpoint of its own yet, because it then starts again.

        Raises:
          ConfigError: as ``check`` does.
          DataError: the record is damaged.
        """
        goes_on = self.check(config) and self._has_checkpoints()
        return read_bases(self.path) if goes_on else {}

    def _check_no_other_files(self) -> None:
        """Raise ConfigError if a directory without a run's config.json has files or folders that a
        run would replace; --overwrite may remove them if there is a checkpoint of a run."""
        if self._has_checkpoints() and all(
            (self.checkpoints / str(step) / CONTROLLER).exists()
            for step in saved_steps(self.checkpoints)
        ):
            if self._overwrite:
                return
            raise ConfigError(
                f"{self.path} holds checkpoints without the config.json of their run; give "
                "another --workdir, or --overwrite to remove them"
            )
        for name in sorted({*RUN_FILES} - {"plan.json"}):
            path = self.path / name
            if any(path.iterdir()) if path.is_dir() else path.exists():
                raise ConfigError(
                    f"--workdir={self.path}: its {name} is not of a run, and a run would replace "
                    "it; move it, or give another --workdir"
                )

    def _has_checkpoints(self) -> bool:
        return self.checkpoints.is_dir() and bool(saved_steps(self.checkpoints))

    def has_steps(self) -> bool:
        """Whether the directory holds a run that took a step."""
        saved = saved_steps(self.checkpoints) if self.checkpoints.is_dir() else []
        return self.last_step() > 0 or any(saved)

    def recorded_plan(self, config: Mapping[str, Any]) -> Path | None:
        """The plan.json that `placement=auto` made for the run, which a resume keeps; None without
        one, or if placement, layout or cluster keys have changed."""
        old, new, plan = self._read_config(), to_json(config), self.path / "plan.json"
        keys = ("placement", "layout", "cluster")
        same = old is not None and all(old.get(key) == new[key] for key in keys)
        return plan if same and new["placement"] == "auto" and plan.is_file() else None

    def open(self, config: Mapping[str, Any]) -> bool:
        """Start a run in the directory, or resume the one that it holds.

        Args:
          config: the complete config (a ConfigDict or nested dicts).

        Returns:
          whether a run is resumed.

        Raises:
          ConfigError: a key differs that may not change on resume (named with both values),
            another process is training here, or the path cannot be a directory.
          RunError: the disk is full; files of a new run are removed.
        """
        resumed = self.check(config)
        new = to_json(config)
        before = frozenset(os.listdir(self.path)) if self.path.is_dir() else None
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock()
            remove_parts(self.path)
            remove_parts(self.path / MODEL)
            for left in self.path.glob(f".*{_REMOVING}"):
                shutil.rmtree(left, ignore_errors=True)
            if not resumed and before and ("config.json" in before or self._has_checkpoints()):
                self._clear()
                before = frozenset(os.listdir(self.path))
            if (old := self._read_config()) != new:
                self.write_json("config.json", new)
            self.earlier_steps = old["steps"] if resumed and old else None
            for name in (METRICS, WARM_START, SAMPLES, CALIBRATION, HISTOGRAMS, STARTS):
                drop_partial_line(self.path / name)
        except (OSError, RunError) as error:
            self._fresh, self._existing = not resumed, before
            self.discard()
            cause = error if isinstance(error, OSError) else error.__cause__
            assert isinstance(cause, OSError)  # as of ``writing``
            raise output_error(f"--workdir={cause.filename or self.path}", cause) from error
        except DataError:
            self.close()
            raise
        self._fresh, self._existing = not resumed, before
        return resumed

    def mark_started(self) -> None:
        """Mark the run as started: ``discard`` no longer removes anything."""
        self._fresh = False

    def discard(self) -> None:
        """Close, and remove the files of a new run whose start failed."""
        self.close()
        if not self._fresh:
            return
        self._clear({*RUN_FILES, LOCK} - (self._existing or set()))
        if self._existing is None:
            with contextlib.suppress(OSError):  # it holds other files now
                self.path.rmdir()

    def _check_files(self) -> None:
        """Raise ConfigError if a name of a run's files is taken by something else, or by what
        --overwrite would have to remove and may not: a link or a mounted file system. So is one for
        a directory within another run, which would be removed with its checkpoints."""
        if within := enclosing_run(self.path):
            raise ConfigError(
                f"--workdir={self.path} is within {within[0]}/ of the run {within[1]}, which may "
                "be removed; give another --workdir"
            )
        for name in (*RUN_FILES, LOCK):
            path = self.path / name
            where = f"--workdir={self.path}: its {name}"
            if found := special_file(path):
                raise ConfigError(f"{where} is {found}; remove it, or give another --workdir")
            if path.exists() and path.is_dir() != (name in RUN_FOLDERS):
                kinds = ("a folder", "a file") if path.is_dir() else ("a file", "a folder")
                raise ConfigError(f"{where} is {kinds[0]}, not {kinds[1]}; remove it")
            mounted = mount_points(path) if self._overwrite and path.exists() else ()
            if self._overwrite and (path.is_symlink() or mounted):
                kind = "a mount point" if str(path.resolve()) in mounted else "above a mount point"
                kind = f"a link to {path.resolve()}" if path.is_symlink() else kind
                raise ConfigError(
                    f"{where} is {kind}, which --overwrite does not remove; remove it and what it "
                    "holds, or give another --workdir"
                )

    def _clear(self, names: Iterable[str] = RUN_FILES) -> None:
        """Remove a run's files; other files stay. Should this be interrupted: folders go at once,
        checkpoints before all else, so that nothing is resumed; config.json goes last: until then
        the rest is known to be a run's."""
        for name in sorted(names, key=lambda name: (name == "config.json", name != "checkpoints")):
            path = self.path / name
            if path.is_dir():
                removed = path.rename(path.with_name(f".{name}{_REMOVING}"))
                try:
                    shutil.rmtree(removed)
                except OSError as error:  # which names the file alone
                    raise OSError(error.errno, error.strerror, str(removed)) from error
            elif path.exists():
                path.unlink()

    def append(self, name: str, rows: Iterable[Mapping[str, Any]]) -> None:
        """Append rows to a `.jsonl` file and sync it to disk. Non-finite values become null.

        Rows of metrics.jsonl, samples.jsonl and histograms.jsonl go to the loggers too.

        Raises:
          RunError: the file cannot be written.
        """
        rows = [to_json(row) for row in rows]
        if not rows:
            return
        text = "".join(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n" for row in rows)
        with self.writing(name), open(self.path / name, "ab", opener=open_regular) as file:
            file.write(text.encode("utf-8", errors="replace"))
            file.flush()
            os.fsync(file.fileno())
        with self.writing(TENSORBOARD):
            for row in rows if name == METRICS else ():
                self._loggers.log(row)
            for row in rows if name == HISTOGRAMS else ():
                self._loggers.histograms(row)
            if name == SAMPLES:
                self._loggers.samples(rows)

    def rows(self, name: str) -> list[dict[str, Any]]:
        """The rows of a `.jsonl` file; none if it is absent. A partial last line is ignored.

        Raises:
          DataError: a line before the last that is not JSON.
        """
        return read_rows(self.path / name)

    def truncate(self, name: str, step: int) -> None:
        """Drop the rows of a file whose `step` is above this one (atomic)."""
        path = self.path / name
        rows = read_rows(path)
        kept = [row for row in rows if row["step"] <= step]
        if len(kept) < len(rows):
            lines = [json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n" for row in kept]
            with self.writing(name):
                replace_file(path, "".join(lines))

    def truncate_after(self, step: int) -> None:
        """Drop rows after the restored checkpoint, and start the loggers after it."""
        for name in (METRICS, SAMPLES, CALIBRATION, HISTOGRAMS):
            self.truncate(name, step)
        with self.writing(TENSORBOARD):
            self._loggers.start(self._read_config(), self.path, step)

    def write_json(self, name: str, value: Any) -> None:
        """Write or replace a JSON file (plan.json, timeline.json) atomically.

        Raises:
          RunError: the file cannot be written.
        """
        indent = None if name == "timeline.json" else 2
        text = json.dumps(to_json(value), indent=indent, ensure_ascii=False, allow_nan=False)
        with self.writing(name):
            replace_file(self.path / name, text + "\n")

    def read_json(self, name: str) -> Any:
        """The content of a JSON file; None if it is absent.

        Raises:
          DataError: the file is not JSON.
        """
        return read_json(self.path / name)

    def last_step(self) -> int:
        """The step of the last row of metrics.jsonl, 0 if there is none."""
        rows = self.rows(METRICS)
        return int(rows[-1]["step"]) if rows else 0

    def finished(self, steps: int | None = None) -> bool:
        """Whether the run has finished: its last row and checkpoint are written.

        Args:
          steps: of the run; None: `steps` of its config.json.
        """
        if steps is None:
            config = self._read_config()
            if config is None:
                return False
            steps = config.get("steps")
            if not isinstance(steps, int):
                raise DataError(f"{self.path / 'config.json'}: it has no number of steps")
        if self.last_step() < steps or not self.checkpoints.is_dir():
            return False
        return max(saved_steps(self.checkpoints), default=0) >= steps

    def missing_steps(self, step: int) -> list[int]:
        """Steps up to this one that have no row in metrics.jsonl."""
        return sorted(set(range(1, step + 1)) - {row.get("step") for row in self.rows(METRICS)})

    def close(self) -> None:
        """Close the loggers and release the lock."""
        try:
            self._loggers.close()
        finally:
            if self._unlock is not None:
                self._unlock()
                self._unlock = None

    def _read_config(self) -> dict[str, Any] | None:
        file = self.path / "config.json"
        try:
            found = read_json(file)
        except NotADirectoryError as error:
            raise ConfigError(f"--workdir={self.path}: not a directory") from error
        is_run = isinstance(found, dict) and isinstance(found.get("algorithm"), dict)
        if found is not None and not is_run:
            raise DataError(f"{file}: not the config of a run; use another --workdir")
        return found and with_current_names(found)

    def _check_unchanged(self, old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
        before, now = _recorded(old), flatten(new)
        if (buckets := before.pop(_BUCKETS, 0)) not in (0, 1):
            found = f"{self.path} holds a run with config.{_BUCKETS}={buckets}"
            raise ConfigError(f"{found}: {WISHES[_BUCKETS]}; give another --workdir")
        if now.get("data.packing") == AUTO:
            now["data.packing"] = before["data.packing"]  # as of `with_recorded_packing`
        for key in sorted(before.keys() | now.keys()):
            changeable = any(key.startswith(c) if c.endswith(".") else key == c for c in CHANGEABLE)
            if changeable or (key in before and key in now and before[key] == now[key]):
                continue
            was = repr(before[key]) if key in before else "absent"
            requested = repr(now[key]) if key in now else "absent"
            *most, last = (name.rstrip(".") for name in CHANGEABLE)
            raise ConfigError(
                f"{self.path} holds a run with config.{key}={was}, now {requested}; on resume only "
                f"{', '.join(most)} and {last} may change: give the old value, or another --workdir"
            )

    @contextlib.contextmanager
    def writing(self, name: str) -> Iterator[None]:
        """Turn an OSError of the block into a RunError that names the file or folder."""
        try:
            yield
        except OSError as error:
            reason = error.strerror or error
            raise RunError(f"{self.path / name} could not be written: {reason}") from error

    def _lock(self) -> None:
        if self._unlock is not None:
            return
        stat = os.stat(self.path)
        key = stat.st_dev, stat.st_ino
        with _LOCKED_GUARD:
            if key in _LOCKED_DIRECTORIES:
                raise ConfigError(
                    f"--workdir={self.path}: another Trainer of this process is training here; "
                    "close() it first, or give another --workdir"
                )
            handle = os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                import fcntl

                # A record lock ends with this process, whatever its children do.
                fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError) as error:
                os.close(handle)
                raise ConfigError(
                    f"--workdir={self.path}: another process is training here; wait for it, or "
                    "give another --workdir"
                ) from error
            except (ImportError, OSError):  # not a POSIX system, a file system without locks
                pass
            _LOCKED_DIRECTORIES.add(key)
            self._unlock = weakref.finalize(self, _release, handle, key)


def check_unlocked(path: StrPath) -> None:
    """Raise ConfigError if a run trains in a directory; for a command, before its slow start."""
    workdir = Workdir(path)
    if (workdir.path / LOCK).is_file():
        with contextlib.suppress(OSError):  # `open` names it
            workdir._lock()
        workdir.close()


def _recorded(old: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json by dotted key. Keys that are newer than the run get their defaults, except that
    packing was off. `data.packing` is text today and was a number once."""
    recorded = flatten(to_json(default_config())) | {"data.packing": "0"} | flatten(old)
    return recorded | {"data.packing": str(recorded["data.packing"])}


def _release(handle: int, key: tuple[int, int]) -> None:
    """Release a directory's lock."""
    with _LOCKED_GUARD:
        _LOCKED_DIRECTORIES.discard(key)
        os.close(handle)
