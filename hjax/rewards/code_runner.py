"""Runs a program on the inputs of its tests; itself within the sandbox. It knows no outputs.

It reads ``job.json`` and ``solution.py`` in the current folder, and forks a process for each test.
What that returns or prints goes to the stdout that this script was started with, as a line of JSON
each; a program that writes there too can only claim other outputs for itself.
"""

import json
import os
import resource
import select
import signal
import sys
import time
from typing import Any

# Names that published tasks use without importing them.
_PRELUDE = """
import bisect, collections, copy, datetime, functools, heapq, io, itertools, json, math, operator
import random, re, string, sys, statistics
from bisect import *
from collections import *
from functools import *
from heapq import *
from itertools import *
from math import *
from typing import *
"""


def main() -> None:
    """Run all tests."""
    with open("job.json") as file:
        job = json.load(file)
    with open("solution.py", encoding="utf-8") as file:
        source = file.read()
    results = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    try:
        code = compile(source, "solution.py", "exec", dont_inherit=True)
    except BaseException:
        _report(results, {"kind": "syntax"})
        return
    names: dict = {}
    if job["function"]:
        exec(_PRELUDE, names)
    for number, given in enumerate(job["inputs"]):
        started = time.monotonic()
        kind, output = _run_test(job, code, given, names)
        _report(results, {"test": number, "kind": kind, "output": output})
        if kind == "timeout" and time.monotonic() - started > job["wall_seconds"] + 1:
            return  # it cannot be ended from here; the sandbox will


def _report(results: int, line: dict) -> None:
    content = json.dumps(line).encode() + b"\n"
    while content:
        content = content[os.write(results, content) :]


def _run_test(job: dict, code: object, given: object, names: dict) -> tuple:
    """The kind of outcome, and the output as text: ``ok`` or ``error``, ``timeout``, ``crash``."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(reading)
        try:
            _become_test(job, code, given, writing, dict(names))
        finally:
            os._exit(1)
    os.close(writing)
    deadline = time.monotonic() + job["wall_seconds"] + 2
    parts = bytearray()
    while (left := deadline - time.monotonic()) > 0 and len(parts) <= job["output_bytes"]:
        if not select.select([reading], [], [], left)[0]:
            break
        part = os.read(reading, 1 << 16)
        if not part:
            break
        parts += part
    os.close(reading)
    status = None
    while status is None and time.monotonic() < deadline:
        pid, found = os.waitpid(child, os.WNOHANG)
        if pid:
            status = found
        else:
            time.sleep(0.001)
    if status is None:
        return "timeout", ""
    text = parts.decode("utf-8", "replace")
    if len(parts) > job["output_bytes"]:
        return "output", ""
    if os.WIFSIGNALED(status):
        late = os.WTERMSIG(status) in (signal.SIGALRM, signal.SIGXCPU)
        return ("timeout" if late else "crash"), ""
    exit_status = os.WEXITSTATUS(status)
    return {0: "ok", 3: "memory"}.get(exit_status, "error"), text


def _become_test(job: dict, code: Any, given: Any, writing: int, names: dict[str, Any]) -> None:
    seconds = job["cpu_seconds"]
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    signal.setitimer(signal.ITIMER_REAL, job["wall_seconds"])
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    names["__name__"] = "__main__"
    status = 0
    try:
        if not job["function"]:
            with open("stdin.txt", "w", encoding="utf-8", newline="") as file:
                file.write(given)
            os.dup2(os.open("stdin.txt", os.O_RDONLY), 0)
            os.dup2(writing, 1)
            sys.stdin = open(0, encoding="utf-8", errors="replace", closefd=False)
            sys.stdout = open(1, "w", encoding="utf-8", errors="replace", closefd=False)
            exec(code, names)
        else:
            names["__name__"] = "solution"
            exec(code, names)
            holder: Any = names.get(job["function"])
            if holder is None and "Solution" in names:
                holder = getattr(names["Solution"](), job["function"])
            text = json.dumps(holder(*given))
            os.write(writing, b"") if not text else _write_all(writing, text.encode())
    except SystemExit as error:
        status = 0 if error.code in (None, 0) and not job["function"] else 1
    except MemoryError:
        status = 3
    except BaseException:
        status = 1
    if not job["function"]:
        try:
            sys.stdout.flush()
        except BaseException:
            status = status or 1
    os._exit(status)


def _write_all(descriptor: int, content: bytes) -> None:
    while content:
        content = content[os.write(descriptor, content) :]


if __name__ == "__main__":
    main()
