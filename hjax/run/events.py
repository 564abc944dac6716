"""TensorBoard event files, written synchronously so that a full disk raises an error.

tensorboardX's own writer uses a thread, which dies silently when it cannot write. It names files by
the second, so it may open an earlier writer's file after a quick restart or a clock change.
"""

import contextlib
import os
from pathlib import Path
from typing import Any

from tensorboardX import SummaryWriter
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.writer import FileWriter


class TensorBoardWriter(SummaryWriter):
    """A SummaryWriter whose calls raise OSError if they cannot write.

    Args:
      directory: of the run's event files; created if missing.
      purge_step: events of earlier files from this step on are discarded.
    """

    file_writer: Any
    all_writers: Any

    def __init__(self, directory: Path, purge_step: int):
        super().__init__(str(directory), purge_step=purge_step)

    def _get_file_writer(self) -> FileWriter:
        if self.file_writer is None:
            self.file_writer = _File(Path(self.logdir))
            self.all_writers = {self.logdir: self.file_writer}
            start = SessionLog(status=SessionLog.START)
            self.file_writer.add_event(Event(session_log=start), self.purge_step)
        return self.file_writer

    def close(self) -> None:
        """Close the file; write errors have been raised before."""
        with contextlib.suppress(OSError):
            super().close()


class _File(FileWriter):
    def __init__(self, directory: Path):
        self.event_writer: Any = _Events(directory)
        self._default_metadata: dict[str, Any] = {}


class _Events:
    """tensorboardX's EventFileWriter without its thread."""

    def __init__(self, directory: Path):
        directory.mkdir(parents=True, exist_ok=True)
        number = sum(1 for _ in directory.iterdir())
        self._directory = directory
        self._writer = EventsWriter(str(directory / "events"), f".{os.getpid()}.{number}")

    def get_logdir(self) -> str:
        return str(self._directory)

    def add_event(self, event: Event) -> None:
        self._writer.write_event(event)

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
