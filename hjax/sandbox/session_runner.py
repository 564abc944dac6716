"""Runs the cells of a ``PythonSession``; itself within the sandbox, by ``python -c``.

It has two processes. An interpreter executes cells. This one, the watcher, takes each cell from a
file, limits its time, collects what it prints and writes its result to a file; the names of these
files are known to the watcher alone. When the interpreter is lost the watcher ends too, and with it
all that was started.
"""

import ast
import contextlib
import json
import linecache
import os
import random
import select
import signal
import sys
import time
import traceback
import types
from typing import Any

PREFIX = ".cell-"  # of the names of files that hold cells and results
_BUSY_SECONDS, _IDLE_SECONDS = 0.01, 0.05
_TRACE_LINES = 16
_PIPE_BYTES = 1 << 16


def main() -> None:
    """Execute cells until the sandbox ends this process. Options are the first argument's JSON."""
    options = json.loads(sys.argv[1])
    cells_end, cells = os.pipe()
    output, output_end = os.pipe()
    results, results_end = os.pipe()
    interpreter = os.fork()
    if not interpreter:
        for descriptor in (cells, output, results):
            os.close(descriptor)
        random.seed(options["seed"])
        try:
            _interpret(cells_end, output_end, results_end, options["output_bytes"])
        finally:  # a cell has closed its pipes, or patched what is used here
            os._exit(1)
    for descriptor in (cells_end, output_end, results_end):
        os.close(descriptor)
    _Watcher(options, interpreter, cells, output, results).serve()


def _interpret(cells: int, output: int, results: int, limit: int) -> None:
    """In the interpreter: execute cells, lines of JSON, until there are no more."""
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    sys.path.append("")
    process, dumps = os.getpid(), json.dumps
    with open(cells, encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            for descriptor in (1, 2):  # whatever the cells before have done to them
                os.dup2(output, descriptor)
            sys.stdout, sys.stderr = (
                open(n, "w", 1, "utf-8", "backslashreplace", closefd=False) for n in (1, 2)
            )
            text = _execute(json.loads(line), f"<cell {number}>", module.__dict__, limit)
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(Exception):
                    stream.flush()
            if os.getpid() != process:  # the cell has forked
                os._exit(0)
            _write_all(results, dumps(text).encode() + b"\n")


def _execute(source: str, name: str, names: dict[str, Any], limit: int) -> str:
    """The last expression's value, or the end of the traceback; empty: neither."""
    try:
        linecache.cache[name] = len(source), None, (source + "\n").splitlines(True), name
        tree: Any = compile(source, name, "exec", ast.PyCF_ONLY_AST, dont_inherit=True)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, name, "exec", dont_inherit=True), names)
        if last is None:
            return ""
        expression = ast.Expression(last.value)
        value = eval(compile(expression, name, "eval", dont_inherit=True), names)
        return "" if value is None else repr(value)[:limit]
    except BaseException as error:
        try:
            return _traceback_end(error, name)[-limit:]
        except BaseException:  # of the exception's own methods
            return type(error).__name__


def _traceback_end(error: BaseException, name: str) -> str:
    """The last lines of a traceback, without frames of this file."""
    trace = error.__traceback__
    while trace and trace.tb_frame.f_code.co_filename != name:
        trace = trace.tb_next
    lines = "".join(traceback.format_exception(type(error), error, trace)).splitlines()
    return "\n".join(lines[-_TRACE_LINES:])


class _Watcher:
    """Hands cells to the interpreter and ends with it.

    Args:
      options: what ``PythonSession`` passes.
      interpreter: the process.
      cells, output, results: descriptors: to write cells to, to read what they print, and their
        values.
    """

    def __init__(
        self, options: dict[str, Any], interpreter: int, cells: int, output: int, results: int
    ):
        self._options, self._interpreter = options, interpreter
        self._cells, self._output, self._results = cells, output, results
        self._open = [output, results]
        self._folder, self._next = os.getcwd(), options["next"]
        self._answer = ""  # the name of the file for the result; empty: no cell is running
        self._printed, self._omitted = bytearray(), 0

    def serve(self) -> None:
        """Until the interpreter is lost."""
        _remove_files()
        self._answer = self._options["ready"]
        self._report(b'""')
        begun, processor_begun, pause = time.monotonic(), self._processor_seconds(), 0.001
        result = bytearray()
        while True:
            if not self._answer and self._take_cell():
                begun, processor_begun = time.monotonic(), self._processor_seconds()
                pause = 0.001
            pause = min(2 * pause, _BUSY_SECONDS if self._answer else _IDLE_SECONDS)
            readable = select.select(self._open, [], [], pause)[0]
            if self._output in readable:
                self._collect_output()
            if self._results in readable:
                part = os.read(self._results, _PIPE_BYTES)
                result += part
                if result.endswith(b"\n") and self._answer:
                    self._report(bytes(result))
                    result.clear()
                elif not part or len(result) > 16 * self._options["output_bytes"]:
                    time.sleep(_IDLE_SECONDS)  # an ending process closes its pipes first
                    self._end(self._how_it_died() or "it broke its pipe")
            wall = time.monotonic() - begun if self._answer else 0.0
            if self._processor_seconds() - processor_begun > self._options["cell_seconds"]:
                self._end(f"more than {self._options['cell_seconds']:g} s of processor time")
            if wall > self._options["wall_seconds"]:
                self._end(f"more than {self._options['wall_seconds']:g} s")
            if died := self._how_it_died():
                self._end(died)

    def _take_cell(self) -> bool:
        """Hand the next cell to the interpreter, if it is there."""
        try:
            with open(self._next, encoding="utf-8") as file:
                cell = json.load(file)
        except (OSError, ValueError):  # not yet, or half of it
            return False
        _remove_files()
        self._next, self._answer = cell["next"], cell["answer"]
        with contextlib.suppress(BrokenPipeError):
            _write_all(self._cells, json.dumps(cell["code"]).encode() + b"\n")
        return True

    def _collect_output(self) -> None:
        part = os.read(self._output, _PIPE_BYTES)
        room = self._options["output_bytes"] - len(self._printed)
        self._printed += part[:room]
        self._omitted += len(part) - len(part[:room])
        if not part:  # nobody can print any more
            self._open.remove(self._output)

    def _report(self, result: bytes, lost: str = "") -> None:
        for _ in range(8):  # what was printed before the result; threads may print for ever
            if self._output in select.select(self._open, [], [], 0)[0]:
                self._collect_output()
        try:
            value = json.loads(result)
        except ValueError:
            value = ""
        content = {"printed": self._printed.decode("utf-8", "replace"), "omitted": self._omitted}
        with contextlib.suppress(OSError):
            os.chmod(self._folder, 0o700)  # cells may have closed it
        with open(f"{self._answer}.part", "w", encoding="utf-8") as file:
            json.dump({**content, "value": value, "lost": lost}, file)
        os.replace(f"{self._answer}.part", self._answer)  # it is there at once and whole
        self._answer, self._printed, self._omitted = "", bytearray(), 0

    def _end(self, reason: str) -> None:
        if self._answer:
            self._report(b'""', reason)
        else:
            os.write(1, reason.encode())
        with contextlib.suppress(OSError):  # also where a sandbox leaves orphans running
            os.kill(self._interpreter, signal.SIGKILL)
        os._exit(0)

    def _processor_seconds(self) -> float:
        """Of the interpreter, by the clock that Linux has for each process."""
        try:
            return time.clock_gettime((~self._interpreter << 3) | 2)
        except OSError:  # it has ended
            return 0.0

    def _how_it_died(self) -> str:
        pid, status = os.waitpid(self._interpreter, os.WNOHANG)
        code = os.waitstatus_to_exitcode(status)
        return "" if not pid else f"signal {-code}" if code < 0 else f"exit status {code}"


def _remove_files() -> None:
    """Those of earlier cells, so that a cell sees only what cells have made."""
    for name in os.listdir("."):
        if name.startswith(PREFIX) and not os.path.isdir(name):
            os.unlink(name)


def _write_all(descriptor: int, content: bytes) -> None:
    while content:
        content = content[os.write(descriptor, content) :]


if __name__ == "__main__":
    main()
