"""Checkpoints with orbax: one item per role and kind, written in the background.

``checkpoints/<step>/`` holds ``<role>.params`` and ``<role>.optimizer`` (trees of arrays) and
``controller`` (JSON: everything else that decides the next step).
"""

from __future__ import annotations

import contextlib
import gc
import inspect
import logging
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax

from hjax.errors import DataError, RunError

CONTROLLER = "controller"


class Checkpointer:
    """Saves and restores the state of a run.

    Args:
      directory: ``checkpoints/`` of a workdir.
      keep: newest checkpoints that stay.
    """

    def __init__(self, directory: Path, keep: int = 2):
        import orbax.checkpoint as ocp

        logging.getLogger("absl").setLevel(logging.ERROR)  # orbax reports every file it writes
        self._ocp = ocp
        self.directory = Path(directory).absolute()
        self._manager = ocp.CheckpointManager(
            self.directory,
            options=ocp.CheckpointManagerOptions(
                max_to_keep=keep, enable_async_checkpointing=True, create=True
            ),
        )
        # Splitting a replicated array's writing over its replicas would compile a slice for each.
        whole = ocp.type_handlers.ArrayHandler(use_replica_parallel=False)
        ocp.type_handlers.register_type_handler(jax.Array, whole, override=True)

    def latest(self) -> int | None:
        """Step of the newest complete checkpoint, or None."""
        return self._manager.latest_step()

    def save(self, step: int, states: Mapping[str, Any], controller: Mapping[str, Any]) -> None:
        """Save in the background; returns when the arrays may change again.

        Args:
          step: above the latest saved one.
          states: by role, trees of arrays by kind (``params``, ``optimizer``).
          controller: plain JSON.

        Raises:
          RunError: the step is not above the latest, which orbax would skip in silence.
        """
        latest = self.latest()
        if latest is not None and step <= latest:
            raise RunError(f"checkpoint {step} is not after the latest one, {latest}")
        args = self._ocp.args
        items: dict[str, Any] = {CONTROLLER: args.JsonSave(dict(controller))}
        for role, state in states.items():
            for kind, tree in state.items():
                # The next update donates these buffers while the writer may still read them.
                items[f"{role}.{kind}"] = args.StandardSave(jax.tree.map(_copy, tree))
        self._manager.save(step, args=args.Composite(**items))

    def restore(self, step: int, states: Mapping[str, Any]) -> tuple[dict[str, Any], Any]:
        """Read a checkpoint.

        Args:
          step: which one.
          states: by role and kind, trees of jax.ShapeDtypeStruct with shardings.

        Returns:
          the states in those shardings, and the controller's JSON.

        Raises:
          DataError: the checkpoint is damaged or does not fit the run.
        """
        args = self._ocp.args
        items: dict[str, Any] = {CONTROLLER: args.JsonRestore()}
        for role, state in states.items():
            for kind, tree in state.items():
                items[f"{role}.{kind}"] = args.StandardRestore(tree)
        path = self.directory / str(step)
        with _one_error(path):
            restored = self._manager.restore(step, args=args.Composite(**items))
        return (
            {
                role: {kind: restored[f"{role}.{kind}"] for kind in state}
                for role, state in states.items()
            },
            restored[CONTROLLER],
        )

    def wait(self) -> None:
        """Until everything saved is on disk."""
        self._manager.wait_until_finished()

    def close(self) -> None:
        """Finish writing and stop."""
        self._manager.close()


def _copy(x: Any) -> jax.Array:
    """An array of its own, made without a compiled program."""
    return jax.device_put(x, getattr(x, "sharding", None), may_alias=False)


def restore_params(directory: Path, role: str) -> Any:
    """A role's parameters of the newest checkpoint, as numpy arrays.

    Raises:
      DataError: no complete checkpoint there, or a damaged one.
    """
    import orbax.checkpoint as ocp

    logging.getLogger("absl").setLevel(logging.ERROR)
    directory = Path(directory).absolute()
    steps = sorted(int(p.name) for p in directory.iterdir() if p.name.isdigit())
    if not steps:
        raise DataError(f"{directory}: no complete checkpoint; train a step first")
    path = directory / str(steps[-1]) / f"{role}.params"
    with _one_error(path), ocp.StandardCheckpointer() as reader:
        tree = reader.metadata(path).item_metadata.tree
        # Without a sharding orbax wants the devices that saved; the reader may have others.
        here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        shapes = jax.tree.map(
            lambda m: jax.ShapeDtypeStruct(m.shape, m.dtype, sharding=here), tree
        )
        return jax.device_get(reader.restore(path, shapes))


@contextlib.contextmanager
def _one_error(path: Path) -> Iterator[None]:
    """Whatever orbax and tensorstore raise for damaged files becomes one line, and the only one.

    The first array that cannot be read ends the event loop in which all are; the others' reads then
    find it closed and would print so, each with a traceback, until the last has ended.
    """
    kept = sys.unraisablehook, sys.excepthook
    unraised: list[Any] = []
    uncaught: list[Any] = []
    sys.unraisablehook = unraised.append
    sys.excepthook = lambda *about: uncaught.append(about)
    try:
        yield
    except Exception as error:
        for _ in range(5):
            gc.collect()
            time.sleep(0.1)
        unraised, uncaught = [], []
        kept = _without_abandoned_reads(*kept)  # slow ones end later still
        raise damaged(path, error) from error
    finally:
        sys.unraisablehook, sys.excepthook = kept
        for unraisable in unraised:
            sys.unraisablehook(unraisable)
        for about in uncaught:
            sys.excepthook(*about)


def _without_abandoned_reads(unraisable: Any, uncaught: Any) -> tuple[Any, Any]:
    """The hooks, but silent about coroutines and event loops that were left."""
    closed = "Event loop is closed"

    def quiet_unraisable(about: Any) -> None:
        if not (inspect.iscoroutine(about.object) or closed in str(about.exc_value)):
            unraisable(about)

    def quiet_uncaught(kind: Any, error: Any, trace: Any) -> None:
        if closed not in str(error):
            uncaught(kind, error, trace)

    return quiet_unraisable, quiet_uncaught


def damaged(path: Path, error: Exception) -> DataError:
    """The one line for a checkpoint that cannot be read."""
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
    for beside in (" See full TensorStore details", " <bound method"):
        reason = reason.partition(beside)[0]
    reason = f"{type(error).__name__}: {reason[:200]}"
    return DataError(
        f"{path}: this checkpoint cannot be read ({reason}); delete that directory to go on from "
        "the one before it, or use a new --workdir"
    )
