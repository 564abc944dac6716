"""Checkpoints: each worker saves and restores its own arrays (orbax), the controller the rest.

``checkpoints/<step>/`` holds ``<role>.params`` and ``<role>.optimizer`` (trees of arrays, a folder
each), ``controller.json`` (all other state that decides the next step) and their checksums. A
checkpoint is renamed to its step number once all of it is on disk.
"""

import contextlib
import functools
import gc
import inspect
import json
import logging
import re
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from hjax.errors import DataError, RunError
from hjax.files import CONTROLLER, read_json, replace_file, saved_steps, special_file, to_json
from hjax.models.checksums import verify_checksums, write_checksums
from hjax.sharding.offload import HOST

# Suffixes of folders that are not, or no longer, checkpoints.
SAVING, REMOVING, DAMAGED = ".saving", ".removing", ".damaged"


class Checkpoints:
    """The checkpoints of a run, managed by the controller.

    Args:
      directory: ``checkpoints/`` of a workdir; created if missing.
      keep: how many of the newest checkpoints stay.
      best: called with the steps that are saved once another one is; the checkpoint of the step
        that it returns stays too.

    Raises:
      RunError: the directory cannot be created.
    """

    def __init__(
        self,
        directory: Path,
        keep: int = 2,
        best: Callable[[Sequence[int]], int | None] = lambda steps: None,
    ):
        self.directory = Path(directory).absolute()
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            found = special_file(self.directory) or error.strerror
            raise RunError(f"{self.directory}: {found}; checkpoints go there") from error
        self.keep, self._best = keep, best
        for ending in (SAVING, REMOVING):  # left by a run that was killed
            for left in self.directory.glob(f".*{ending}"):
                _remove(left)
        self._latest = max(self._saved_steps(), default=None)
        self._completing: threading.Thread | None = None
        self._failed: tuple[int, BaseException] | None = None
        self.save_seconds = 0.0  # that the last save took, until it was on disk

    def latest(self) -> int | None:
        """Step of the newest checkpoint, the one being written included; None without any."""
        return self._latest

    def folder(self, step: int) -> Path:
        """The folder of a checkpoint."""
        return self.directory / str(step)

    def save(
        self, step: int, write: Callable[[Path], Sequence[Any]], controller: Mapping[str, Any]
    ) -> None:
        """Save a checkpoint in the background.

        Args:
          step: greater than the latest saved one.
          write: makes every worker write its state into a folder; returns futures that finish when
            the state is on disk. Workers may change their arrays once ``write`` has returned.
          controller: the controller's state, plain JSON.

        Raises:
          RunError: the step is not above the latest, or writing the previous checkpoint failed.
        """
        self.wait()
        if self._latest is not None and step <= self._latest:
            raise RunError(f"checkpoint {step} is not after the latest one, {self._latest}")
        began = time.monotonic()
        saving = self.directory / f".{step}{SAVING}"
        _remove(saving)  # a process that died may have left one
        try:
            saving.mkdir()
            replace_file(saving / CONTROLLER, json.dumps(to_json(controller)) + "\n")
            writes = write(saving)
        except BaseException as error:
            shutil.rmtree(saving, ignore_errors=True)
            if isinstance(error, OSError):
                raise write_error(step, error) from error
            raise
        self._latest = step
        self._completing = threading.Thread(
            target=self._finish_save, args=(step, saving, writes, began), name=f"checkpoint {step}"
        )
        self._completing.start()

    def controller(self, step: int) -> Any:
        """The controller's state in a checkpoint.

        Raises:
          DataError: it is damaged, or of another step.
        """
        folder = self.folder(step)
        try:
            content = read_json(folder / CONTROLLER)
        except (OSError, ValueError) as error:
            raise damaged_error(folder, error) from error
        if content is None:
            raise damaged_error(folder, FileNotFoundError(f"{CONTROLLER} is missing"))
        if not isinstance(content, dict) or content.get("step") != step:
            raise damaged_error(folder, DataError(f"its {CONTROLLER} is not of this step"))
        return content

    def verify(self, step: int) -> bool:
        """Verify a checkpoint's checksums and step number.

        Returns:
          whether it has checksums; checkpoints of earlier versions have none.

        Raises:
          DataError: it is damaged, or of another step.
        """
        folder = self.folder(step)
        try:
            summed = verify_checksums(folder)
        except (OSError, ValueError) as error:
            raise damaged_error(folder, error) from error
        self.controller(step)
        return summed

    def repair(self) -> list[str]:
        """Rename damaged checkpoints, newest first, until one passes ``verify``.

        Returns:
          a line on each renamed one.

        Raises:
          DataError: there are checkpoints, and all are damaged.
        """
        self.wait()
        wrong: dict[int, DataError] = {}
        for step in reversed(self._saved_steps()):
            try:
                self.verify(step)
                break
            except DataError as error:
                wrong[step] = error
        else:
            if wrong:
                raise DataError(
                    f"{self.directory}: none of the checkpoints {', '.join(map(str, wrong))} is "
                    "sound; use a new --workdir"
                )
        lines = []
        for step, cause in wrong.items():
            free_name = self._free_name(step)
            self.folder(step).rename(free_name)
            reason = str(cause).partition("cannot be read (")[2].partition("); ")[0]
            lines.append(f"checkpoint {step} is damaged ({reason}) and now {free_name.name}")
        self._latest = max(self._saved_steps(), default=None)
        return lines

    def _free_name(self, step: int) -> Path:
        """An unused path for a damaged checkpoint."""
        free_name, number = self.directory / f"{step}{DAMAGED}", 1
        while free_name.exists():
            number += 1
            free_name = self.directory / f"{step}{DAMAGED}-{number}"
        return free_name

    def check(self) -> None:
        """Raise the error of a background save that failed; does not wait.

        Raises:
          RunError: a checkpoint could not be written.
        """
        if self._failed is not None:
            (step, error), self._failed = self._failed, None
            raise write_error(step, error) from error

    def wait(self) -> None:
        """Wait until every save is on disk.

        Raises:
          RunError: a checkpoint could not be written.
        """
        if self._completing is not None:
            self._completing.join()
            self._completing = None
        self.check()

    def join(self, seconds: float) -> int | None:
        """Wait so long at most for the save in progress; returns the newest complete step."""
        if (completing := self._completing) is not None:
            completing.join(seconds)
        return max(self._saved_steps(), default=None)

    def close(self) -> None:
        """Finish writing."""
        self.wait()

    def _saved_steps(self) -> list[int]:
        return saved_steps(self.directory)

    def _finish_save(self, step: int, saving: Path, writes: Sequence[Any], began: float) -> None:
        errors = []
        for future in writes:  # wait for all: a worker that still writes needs the folder
            try:
                future.result()
            except BaseException as error:
                errors.append(error)
        try:
            if errors:
                raise errors[0]
            write_checksums(saving, step)
            saving.rename(self.folder(step))
            self.save_seconds = time.monotonic() - began
            saved = self._saved_steps()
            best = self._best(saved)
            for old in saved[: -self.keep]:
                if old == best:
                    continue
                # Rename first: a half-deleted checkpoint must not keep its number.
                _remove(self.folder(old).rename(self.directory / f".{old}{REMOVING}"))
        except BaseException as error:
            shutil.rmtree(saving, ignore_errors=True)
            self._failed = step, error
            self._latest = max(self._saved_steps(), default=None)


# Concurrent orbax writers in one process confuse each other's signals, so one writes at a time.
_WRITING = threading.Lock()


def write_state(folder: Path, items: Mapping[str, Any]) -> Callable[[], None]:
    """Copy trees of arrays to host memory; returns a function that writes each under its name.

    The arrays may change as soon as this returns. Once the function returns, all is on disk.
    """
    if not items:
        return lambda: None
    ocp = _orbax()
    copies = {name: jax.tree.map(_copy, tree) for name, tree in items.items()}
    jax.block_until_ready(copies)

    def write() -> None:
        together = _process_barriers(ocp)
        handler = ocp.StandardCheckpointHandler(**together)
        with _WRITING, _silent_io_failures(), ocp.Checkpointer(handler, **together) as writer:
            for name, tree in copies.items():
                writer.save(folder / name, args=ocp.args.StandardSave(tree))

    return write


def saved_items(folder: Path, role: str) -> list[str]:
    """The names of a role's trees in a checkpoint's folder."""
    return sorted(path.name for path in folder.glob(f"{role}.*") if path.is_dir())


def read_state(folder: Path, items: Mapping[str, Any]) -> dict[str, Any]:
    """Restore trees of arrays by name, with the shardings of ``items``.

    Args:
      folder: of a checkpoint.
      items: by name, trees of jax.ShapeDtypeStruct with shardings, or of arrays.

    Raises:
      DataError: the checkpoint is damaged or does not fit the run.
    """
    ocp = _orbax()
    with _one_line_errors(folder), ocp.StandardCheckpointer(**_process_barriers(ocp)) as reader:
        return {name: reader.restore(folder / name, tree) for name, tree in items.items()}


@functools.cache
def _orbax() -> Any:
    import orbax.checkpoint as ocp

    # Orbax logs every file it writes, and every error it raises with a traceback.
    logging.getLogger("absl").setLevel(logging.CRITICAL)
    # Splitting a replicated array's write over its replicas would compile a slice for each.
    whole = ocp.type_handlers.ArrayHandler(use_replica_parallel=False)
    ocp.type_handlers.register_type_handler(jax.Array, whole, override=True)
    return ocp


def _process_barriers(ocp: Any) -> dict[str, Any]:
    """Orbax options by which processes wait for each other at barriers of the JAX coordinator.

    Orbax's default barrier is a device program, which a background thread may not start between the
    programs of a step.
    """
    if jax.process_count() == 1:
        return {}
    every = set(range(jax.process_count()))
    options = ocp.options.MultiprocessingOptions(primary_host=0, active_processes=every)
    return {"multiprocessing_options": options}


def _copy(x: Any) -> Any:
    """A copy in host memory with the same sharding, made without compiling a program."""
    if not isinstance(x, jax.Array):
        return np.array(x)
    device: Any = next(iter(x.sharding.device_set))
    kinds = {memory.kind for memory in device.addressable_memories()}
    sharding = x.sharding.with_memory_kind(HOST) if HOST in kinds else x.sharding
    return jax.device_put(x, sharding, may_alias=False)


def _remove(path: Path) -> None:
    """Delete a folder or file, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def saved_parameter_names(folder: Path, role: str) -> set[str]:
    """Top-level names of a role's parameters in a checkpoint's folder; reads metadata only.

    Raises:
      DataError: it is damaged.
    """
    path = folder.absolute() / f"{role}.params"
    with _one_line_errors(path), _orbax().StandardCheckpointer() as reader:
        return set(reader.metadata(path).item_metadata.tree)


def restore_params(folder: Path, role: str, kind: str = "params") -> Any:
    """Restore a role's parameters as numpy arrays; None if the checkpoint has no such kind.

    Args:
      folder: of the checkpoint.
      role: the worker's role.
      kind: which of its trees.

    Raises:
      DataError: it is damaged.
    """
    ocp = _orbax()
    path = folder.absolute() / f"{role}.{kind}"
    if kind != "params" and not path.is_dir():
        return None
    try:
        verify_checksums(path.parent, [path.name])
    except (OSError, ValueError) as error:
        raise damaged_error(path.parent, error) from error
    with _one_line_errors(path), ocp.StandardCheckpointer() as reader:
        tree = reader.metadata(path).item_metadata.tree
        # Into host memory: this process may have other devices than those that saved.
        return reader.restore(path, jax.tree.map(lambda m: np.empty(m.shape, m.dtype), tree))


@contextlib.contextmanager
def _one_line_errors(path: Path) -> Iterator[None]:
    """Turn any orbax or tensorstore error for damaged files into a one-line ``DataError``."""
    try:
        with _silent_io_failures():
            yield
    except Exception as error:
        raise damaged_error(path, error) from error


@contextlib.contextmanager
def _silent_io_failures() -> Iterator[None]:
    """Keep a failed read or write from printing anything besides the exception.

    The first array that fails ends the event loop that all share. The others then find it closed,
    and each would print a traceback.
    """
    old_unraisable, old_uncaught = sys.unraisablehook, sys.excepthook
    unraised: list[Any] = []
    uncaught: list[Any] = []
    sys.unraisablehook = unraised.append
    sys.excepthook = lambda *about: uncaught.append(about)
    try:
        yield
    except Exception:
        for _ in range(5):
            gc.collect()
            time.sleep(0.1)
        unraised, uncaught = [], []
        # Slow ones end after this block.
        old_unraisable, old_uncaught = _ignoring_abandoned_tasks(old_unraisable, old_uncaught)
        raise
    finally:
        sys.unraisablehook, sys.excepthook = old_unraisable, old_uncaught
        for unraisable in unraised:
            sys.unraisablehook(unraisable)
        for about in uncaught:
            sys.excepthook(*about)


def _ignoring_abandoned_tasks(unraisable: Any, uncaught: Any) -> tuple[Any, Any]:
    """The exception hooks, but silent about abandoned coroutines, tasks and event loops."""
    closed = "Event loop is closed"
    logging.getLogger("asyncio").addFilter(_not_abandoned_task)

    def quiet_unraisable(about: Any) -> None:
        if not (inspect.iscoroutine(about.object) or closed in str(about.exc_value)):
            unraisable(about)

    def quiet_uncaught(kind: Any, error: Any, trace: Any) -> None:
        if closed not in str(error):
            uncaught(kind, error, trace)

    return quiet_unraisable, quiet_uncaught


def _not_abandoned_task(record: logging.LogRecord) -> bool:
    return "exception was never retrieved" not in record.getMessage()


# As tensorstore writes what the system has answered.
_SYSTEM_ERROR = re.compile(r"OS error \d+: (?:E[A-Z]+ )?([^\]]+)")


def write_error(step: int, error: BaseException) -> RunError:
    """The one-line error for a checkpoint that cannot be written."""
    return RunError(
        f"checkpoint {step} could not be written: {write_failure(error)}; once that is fixed, the "
        "same command resumes from the previous checkpoint"
    )


def write_failure(error: BaseException) -> str:
    """Why arrays could not be written: the system's words, if an error has them."""
    cause: BaseException | None = error
    while cause is not None:
        if of_system := _SYSTEM_ERROR.search(str(cause)):
            return of_system[1]
        if cause is not error and isinstance(cause, OSError) and cause.strerror:
            return cause.strerror
        cause = cause.__cause__ or cause.__context__
    return _reason(error)


def damaged_error(path: Path, error: Exception) -> DataError:
    """The one-line error for a checkpoint that cannot be read, or that its run has removed."""
    folder = path if path.name.isdecimal() else path.parent
    if not folder.exists() and folder.parent.is_dir() and saved_steps(folder.parent):
        return DataError(
            f"{folder}: this checkpoint was removed while it was read, as its run trains and has "
            "newer ones; try again, or give that run a larger checkpoint.keep"
        )
    reason = _reason(error)
    if not isinstance(error, DataError):
        reason = f"{type(error).__name__}: {reason}"
    return DataError(
        f"{path}: this checkpoint cannot be read ({reason}); `python -m hjax.launch` with --repair "
        "goes on from the last sound one, or use a new --workdir"
    )


def _reason(error: BaseException) -> str:
    """The first line of an orbax, tensorstore or system error, without details."""
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
    for details in (" See full TensorStore details", " <bound method"):
        reason = reason.partition(details)[0]
    return reason[:200]
