"""A Python interpreter that keeps its variables from cell to cell, in any ``Sandbox``.

    session = PythonSession(LocalSandbox())
    session.run("x = 2")            # nothing
    session.run("print(x); x + 1")  # 2 and 3, in two lines
    session.close()

``session_runner`` runs there, by one ``exec`` for the whole session. Cells go in and results come
out as files, so only the five calls of the protocol are needed.
"""

import concurrent.futures
import contextlib
import dataclasses
import json
import secrets
import threading
import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hjax.errors import ConfigError, DataError, RunError
from hjax.sandbox import session_runner
from hjax.sandbox.local_sandbox import ExecResult, Sandbox, SandboxLimits, python_command

# Python puts the folder first on the path, where a cell may have written another `json.py`.
_RUNNER = "import sys; sys.path[:] = filter(None, sys.path)\n"
_RUNNER += Path(session_runner.__file__).read_text()
_START_SECONDS, _GRACE_SECONDS = 60.0, 10.0
_SESSION_SECONDS = 30 * 86400.0


class PythonSession:
    """A Python interpreter in a sandbox of its own.

    The hash seed and ``random`` are set from ``seed``, so that the same cells give the same texts.
    Addresses of objects, the clock and other generators of random numbers differ.

    Args:
      sandbox: where it runs.
      seed: any integer.
      cell_seconds: processor time of a cell; by the clock it may take four times as long. An
        interpreter without a cell waits as long as it must.
      output_bytes: of what a cell prints; also the most characters of its value or traceback.
      limits: of memory, processes and files; those of time are this class's.
      command: that starts Python there; empty: this one here, elsewhere ``python3``.

    Raises:
      ConfigError: ``cell_seconds`` or ``output_bytes`` is not positive.
    """

    def __init__(
        self,
        sandbox: Sandbox,
        seed: int = 0,
        cell_seconds: float = 10.0,
        output_bytes: int = 1 << 14,
        *,
        limits: SandboxLimits | None = None,
        command: Sequence[str] = (),
    ):
        for name, value in (("cell_seconds", cell_seconds), ("output_bytes", output_bytes)):
            if not value > 0:
                raise ConfigError(f"PythonSession: {name}={value!r} must be positive")
        self._sandbox = sandbox
        self._command = tuple(command) or (python_command(sandbox), "-s")
        self._wall_seconds, self._output_bytes = 4 * cell_seconds, output_bytes
        self._options = {
            "seed": seed,
            "cell_seconds": cell_seconds,
            "wall_seconds": self._wall_seconds,
            "output_bytes": output_bytes,
        }
        # Numeric libraries with a thread for each core would exceed the limit of processes.
        self._environment = {
            "PYTHONHASHSEED": str(seed % 2**32),
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
        }
        self._limits = dataclasses.replace(
            limits or SandboxLimits(),
            cpu_seconds=1000 * cell_seconds,
            wall_seconds=_SESSION_SECONDS,
        )
        self._lock = threading.Lock()
        self._next = ""  # name of the file for the next cell
        self._names: list[str] = []  # of the sandbox, for the finalizer
        self._program: concurrent.futures.Future[ExecResult] | None = None
        self._finalizer = weakref.finalize(self, _kill, sandbox, self._names)

    def run(self, code: str) -> str:
        """Execute a cell.

        Args:
          code: statements of Python.

        Returns:
          What it printed, then the ``repr`` of its last expression's value unless that is None, or
          the last lines of the traceback. If the interpreter is lost (the cell takes too long or
          too much memory, or ends it), the text says so, and the next cell has a new one.

        Raises:
          ConfigError: the session is closed.
          RunError: the sandbox failed, or has no such Python.
        """
        with self._lock:
            if not self._finalizer.alive:
                raise ConfigError("this PythonSession is closed; make another")
            parts = [self._lose()] if self._program and self._program.done() else []
            program = self._program or self._start()
            answer, following = _file_name(), _file_name()
            cell = {"code": code, "answer": answer, "next": following}
            with contextlib.suppress(DataError):  # of what the cells have done to the folder
                self._sandbox.write(self._names[0], self._next, json.dumps(cell).encode())
            self._next = following
            found = self._wait_for(program, answer, self._wall_seconds + _GRACE_SECONDS)
            if found is None:
                parts.append(self._lose())
            else:
                parts += [found["printed"], found["value"]]
                if found["omitted"]:
                    parts.insert(-1, f"[{found['omitted']} bytes more were printed]")
                if found["lost"]:
                    parts.append(self._lose(found["lost"]))
            return _joined(parts)

    def close(self) -> None:
        """End the interpreter and remove its files."""
        self._finalizer()

    def _start(self) -> concurrent.futures.Future[ExecResult]:
        if not self._names:
            self._names.append(self._sandbox.create())
        ready, self._next = _file_name(), _file_name()
        options = {**self._options, "ready": ready, "next": self._next}
        program = self._program = concurrent.futures.Future()

        def execute() -> None:
            try:
                done = self._sandbox.exec(
                    self._names[0],
                    [*self._command, "-c", _RUNNER, json.dumps(options)],
                    environment=self._environment,
                    limits=self._limits,
                )
            except BaseException as error:
                program.set_exception(error)
            else:
                program.set_result(done)

        # No thread of a pool: those are waited for when the interpreter ends.
        threading.Thread(target=execute, name="hjax-python-session", daemon=True).start()
        if self._wait_for(program, ready, _START_SECONDS) is None:
            told = f"no answer in {_START_SECONDS:g} s"
            if program.done():
                done = program.result()
                told = f"{_how_it_ended(done)}: {done.stderr.decode('utf-8', 'replace')[-500:]}"
            self._lose(told)
            raise RunError(f"sandbox: Python ({' '.join(self._command)}) did not start: {told}")
        return program

    def _wait_for(
        self, program: concurrent.futures.Future[ExecResult], path: str, seconds: float
    ) -> dict[str, Any] | None:
        """What the runner has written to a file; None: it has ended without, or is late."""
        begun = time.monotonic()
        while True:
            ended = program.done()  # asked first, as a runner writes before it ends
            with contextlib.suppress(DataError, ValueError, RecursionError, TypeError, KeyError):
                content = self._sandbox.read(self._names[0], path, 32 * self._output_bytes + 4096)
                found = json.loads(content)
                texts = {name: str(found[name]) for name in ("printed", "value", "lost")}
                return {**texts, "omitted": int(found["omitted"])}
            elapsed = time.monotonic() - begun
            if ended or elapsed > seconds:
                return None
            time.sleep(min(max(0.1 * elapsed, 0.001), 1.0))

    def _lose(self, reason: str = "") -> str:
        """Give up the interpreter, so that the next cell has a new one; says what is lost."""
        program, self._program = self._program, None
        assert program is not None
        if reason:
            concurrent.futures.wait([program], _GRACE_SECONDS)
        lost = "its variables are lost"
        answers = program.done()  # asked before it is killed, which ends it too
        if not answers or program.result().ended_by == "disk":
            _kill(self._sandbox, self._names)
            lost = "its variables and files are lost"
        if not reason:
            reason = _how_it_ended(program.result()) if answers else "it does not answer"
        return f"[the interpreter was ended ({reason}); {lost}]"


def _kill(sandbox: Sandbox, names: list[str]) -> None:
    while names:
        sandbox.kill(names.pop())


def _file_name() -> str:
    return session_runner.PREFIX + secrets.token_hex(8)


def _how_it_ended(done: ExecResult) -> str:
    if done.ended_by:
        return f"its limit: {done.ended_by}"
    if done.stdout:  # the runner's reason
        return done.stdout.decode("utf-8", "replace")[:100]
    return f"exit status {done.status}" if done.status >= 0 else f"signal {-done.status}"


def _joined(parts: list[str]) -> str:
    """Texts one below the other."""
    text = ""
    for part in filter(None, parts):
        text += ("\n" if text and not text.endswith("\n") else "") + part
    return text.encode("utf-8", "replace").decode()
