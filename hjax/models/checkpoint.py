"""Checkpoints: each worker writes and reads its own arrays (orbax), the controller the rest.

``checkpoints/<step>/`` holds ``<role>.params`` and ``<role>.optimizer`` (trees of arrays, a folder
each), ``controller.json`` (everything else that decides the next step) and the checksums of these.
A checkpoint appears under its number once all of it is on the disk.
"""

import contextlib
import functools
import gc
import inspect
import json
import logging
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
from hjax.files import read_json, replace_file, saved_steps, to_json
from hjax.models.checksums import verify_checksums, write_checksums
from hjax.sharding.offload import HOST

CONTROLLER = "controller.json"
# How folders end that are not checkpoints, or no longer.
SAVING, REMOVING, DAMAGED = ".saving", ".removing", ".damaged"


class Checkpoints:
    """The checkpoints of a run, as the controller keeps them.

    Args:
      directory: ``checkpoints/`` of a workdir; made if need be.
      keep: newest checkpoints that stay.

    Raises:
      RunError: the directory cannot be made.
    """

    def __init__(self, directory: Path, keep: int = 2):
        self.directory = Path(directory).absolute()
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunError(f"{self.directory}: {error.strerror}; checkpoints go there") from error
        self.keep = keep
        for ending in (SAVING, REMOVING):  # by a run that was killed
            for left in self.directory.glob(f".*{ending}"):
                _remove(left)
        self._latest = max(self._complete(), default=None)
        self._completing: threading.Thread | None = None
        self._failed: tuple[int, BaseException] | None = None

    def latest(self) -> int | None:
        """Step of the newest checkpoint, the one being written included; None without any."""
        return self._latest

    def folder(self, step: int) -> Path:
        """Where a checkpoint is."""
        return self.directory / str(step)

    def save(
        self, step: int, write: Callable[[Path], Sequence[Any]], controller: Mapping[str, Any]
    ) -> None:
        """Save in the background.

        Args:
          step: above the latest saved one.
          write: has every worker write its state into a folder; returns futures that are done when
            it is on the disk. What a worker is called for next may change its arrays.
          controller: plain JSON.

        Raises:
          RunError: the step is not above the latest, or the checkpoint before could not be written.
        """
        self.wait()
        if self._latest is not None and step <= self._latest:
            raise RunError(f"checkpoint {step} is not after the latest one, {self._latest}")
        part = self.directory / f".{step}{SAVING}"
        _remove(part)  # a process that is no more may have left some
        try:
            part.mkdir()
            replace_file(part / CONTROLLER, json.dumps(to_json(controller)) + "\n")
            written = write(part)
        except BaseException as error:
            shutil.rmtree(part, ignore_errors=True)
            if isinstance(error, OSError):
                raise write_error(step, error) from error
            raise
        self._latest = step
        self._completing = threading.Thread(
            target=self._complete_when, args=(step, part, written), name=f"checkpoint {step}"
        )
        self._completing.start()

    def controller(self, step: int) -> Any:
        """The controller's part of a checkpoint.

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
        """Hold a checkpoint against its checksums and its name.

        Returns:
          whether it has checksums: those of earlier versions have none.

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
        """Set the newest checkpoints aside, back to one that is sound.

        Returns:
          a line on each of these.

        Raises:
          DataError: there are checkpoints, and none is sound.
        """
        self.wait()
        wrong: dict[int, DataError] = {}
        for step in reversed(self._complete()):
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
        said = []
        for step, cause in wrong.items():
            aside = self._aside(step)
            self.folder(step).rename(aside)
            reason = str(cause).partition("cannot be read (")[2].partition("); ")[0]
            said.append(f"checkpoint {step} is damaged ({reason}) and now {aside.name}")
        self._latest = max(self._complete(), default=None)
        return said

    def _aside(self, step: int) -> Path:
        """A name for a damaged checkpoint that no other has."""
        aside, number = self.directory / f"{step}{DAMAGED}", 1
        while aside.exists():
            number += 1
            aside = self.directory / f"{step}{DAMAGED}-{number}"
        return aside

    def check(self) -> None:
        """Whether what is being saved has failed; does not wait for it.

        Raises:
          RunError: it could not be written.
        """
        if self._failed is not None:
            (step, error), self._failed = self._failed, None
            raise write_error(step, error) from error

    def wait(self) -> None:
        """Until everything saved is on disk.

        Raises:
          RunError: it could not be written.
        """
        if self._completing is not None:
            self._completing.join()
            self._completing = None
        self.check()

    def close(self) -> None:
        """Finish writing."""
        self.wait()

    def _complete(self) -> list[int]:
        return saved_steps(self.directory)

    def _complete_when(self, step: int, part: Path, written: Sequence[Any]) -> None:
        errors = []
        for future in written:  # all of them: a worker that still writes must find its folder
            try:
                future.result()
            except BaseException as error:
                errors.append(error)
        try:
            if errors:
                raise errors[0]
            write_checksums(part, step)
            part.rename(self.folder(step))
            for old in self._complete()[: -self.keep]:
                # Half of a checkpoint must not have its name.
                removed = self.folder(old).rename(self.directory / f".{old}{REMOVING}")
                shutil.rmtree(removed)
        except BaseException as error:
            shutil.rmtree(part, ignore_errors=True)
            self._failed = step, error
            self._latest = max(self._complete(), default=None)


# Orbax's writers of one process tell each other's signals apart badly: one writes at a time.
_WRITING = threading.Lock()


def write_state(folder: Path, items: Mapping[str, Any]) -> Callable[[], None]:
    """Copy trees of arrays to the host; returns a function that writes each under its name.

    The arrays may change as soon as this returns; what the function returns from is on the disk.
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
    """Names of a role's trees in the folder of a checkpoint."""
    return sorted(path.name for path in folder.glob(f"{role}.*") if path.is_dir())


def read_state(folder: Path, items: Mapping[str, Any]) -> dict[str, Any]:
    """Read trees of arrays by name, in the shardings of ``items``.

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

    # Orbax reports every file it writes, and what it raises with a traceback as well.
    logging.getLogger("absl").setLevel(logging.CRITICAL)
    # Splitting a replicated array's writing over its replicas would compile a slice for each.
    whole = ocp.type_handlers.ArrayHandler(use_replica_parallel=False)
    ocp.type_handlers.register_type_handler(jax.Array, whole, override=True)
    return ocp


def _process_barriers(ocp: Any) -> dict[str, Any]:
    """How the processes of a world wait for each other while one of them writes or reads.

    Named, they meet at barriers of the world's coordinator. Orbax's default is a program on the
    devices, which a thread in the background may not start between those of a step.
    """
    if jax.process_count() == 1:
        return {}
    every = set(range(jax.process_count()))
    options = ocp.options.MultiprocessingOptions(primary_host=0, active_processes=every)
    return {"multiprocessing_options": options}


def _copy(x: Any) -> Any:
    """An array of its own in the host's memory, in the same shards, without a compiled program."""
    if not isinstance(x, jax.Array):
        return np.array(x)
    device: Any = next(iter(x.sharding.device_set))
    kinds = {memory.kind for memory in device.addressable_memories()}
    waiting = x.sharding.with_memory_kind(HOST) if HOST in kinds else x.sharding
    return jax.device_put(x, waiting, may_alias=False)


def newest_step(directory: Path) -> int:
    """Of a run's checkpoints the last one's; DataError where none is complete."""
    steps = saved_steps(Path(directory).absolute())
    if not steps:
        raise DataError(f"{directory}: no complete checkpoint; train a step first")
    return steps[-1]


def _remove(path: Path) -> None:
    """What stands there, a folder or a file, if anything."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def saved_parameter_names(directory: Path, role: str) -> set[str]:
    """The names at the top of a role's parameters in the newest checkpoint; reads no numbers.

    Raises:
      DataError: no complete checkpoint there, or a damaged one.
    """
    path = Path(directory).absolute() / str(newest_step(directory)) / f"{role}.params"
    with _one_line_errors(path), _orbax().StandardCheckpointer() as reader:
        return set(reader.metadata(path).item_metadata.tree)


def restore_params(
    directory: Path, role: str, kind: str = "params", step: int | None = None
) -> Any:
    """A role's parameters of a checkpoint, as numpy arrays; None: it has no such kind.

    Args:
      directory: of the run's checkpoints.
      role: whose.
      kind: which of its trees.
      step: of the checkpoint; None: the newest.

    Raises:
      DataError: no complete checkpoint there, or a damaged one.
    """
    ocp = _orbax()
    step = newest_step(directory) if step is None else step
    path = Path(directory).absolute() / str(step) / f"{role}.{kind}"
    if kind != "params" and not path.is_dir():
        return None
    try:
        verify_checksums(path.parent, [path.name])
    except (OSError, ValueError) as error:
        raise damaged_error(path.parent, error) from error
    with _one_line_errors(path), ocp.StandardCheckpointer() as reader:
        tree = reader.metadata(path).item_metadata.tree
        # Into the host's memory: the reader may have other devices than those that saved.
        return reader.restore(path, jax.tree.map(lambda m: np.empty(m.shape, m.dtype), tree))


@contextlib.contextmanager
def _one_line_errors(path: Path) -> Iterator[None]:
    """Whatever orbax and tensorstore raise for damaged files becomes one line, and the only one."""
    try:
        with _silent_io_failures():
            yield
    except Exception as error:
        raise damaged_error(path, error) from error


@contextlib.contextmanager
def _silent_io_failures() -> Iterator[None]:
    """Of a read or write that fails nothing is printed beside what is raised.

    The first array that cannot be read or written ends the event loop in which all are; the others
    then find it closed and would print so, each with a traceback, until the last has ended.
    """
    of_unraisable, of_uncaught = sys.unraisablehook, sys.excepthook
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
        # Slow ones end later still.
        of_unraisable, of_uncaught = _ignoring_abandoned_tasks(of_unraisable, of_uncaught)
        raise
    finally:
        sys.unraisablehook, sys.excepthook = of_unraisable, of_uncaught
        for unraisable in unraised:
            sys.unraisablehook(unraisable)
        for about in uncaught:
            sys.excepthook(*about)


def _ignoring_abandoned_tasks(unraisable: Any, uncaught: Any) -> tuple[Any, Any]:
    """The hooks, but silent about coroutines, tasks and event loops that were left."""
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


def write_error(step: int, error: BaseException) -> RunError:
    """The one line for a checkpoint that cannot be written."""
    return RunError(
        f"checkpoint {step} could not be written: {_reason(error)}; with that mended the same "
        "command goes on from the one before"
    )


def damaged_error(path: Path, error: Exception) -> DataError:
    """The one line for a checkpoint that cannot be read."""
    reason = _reason(error)
    if not isinstance(error, DataError):
        reason = f"{type(error).__name__}: {reason}"
    return DataError(
        f"{path}: this checkpoint cannot be read ({reason}); `python -m hjax.launch` with --repair "
        "goes on from the last sound one, or use a new --workdir"
    )


def _reason(error: BaseException) -> str:
    """What orbax, tensorstore or the system says, without its details."""
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
    for beside in (" See full TensorStore details", " <bound method"):
        reason = reason.partition(beside)[0]
    return reason[:200]
