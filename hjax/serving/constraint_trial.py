"""Trials of constraints: each is compiled in a process of its own first, within limits.

A request's pattern, schema or grammar is untrusted. llguidance compiles most within milliseconds;
some take minutes and GiB, and deep ones overflow the stack and end the process.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import importlib.util
import json
import os
import pickle
import random
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from hjax.data.token_bytes import TokenBytes
from hjax.data.tokenizer import Tokenizer
from hjax.errors import ConfigError
from hjax.isolated_process import DeadlineExceeded, IsolatedProcess, ProcessDied, TaskFailed
from hjax.rollout.constrained_decoding import ConstraintCompiler
from hjax.rollout.constraint import Constraint
from hjax.rollout.sampling_params import SamplingParams
from hjax.serving.limits import ServerLimits
from hjax.serving.request_errors import RequestRefused
from hjax.serving.response_format import TextFormat

# Tokens that are matched.
_TOKENS = 32
# The stack is smaller than that of any thread of the server.
_STACK_BYTES = 2**22
# On a machine that does other things too, until the process is given up; and for a place in it.
_WALL_SECONDS, _WAIT_SECONDS = 30.0, 60.0
_KEPT = 64


@dataclasses.dataclass(frozen=True)
class TrialCost:
    """What one response's constraint took: processor time and memory."""

    seconds: float
    memory_bytes: int


class ConstraintTrial:
    """Tries constraints for a model's vocabulary, one at a time. Costs of the last ones are kept.

    Args:
      tokenizer: of the model.
      vocab: vocabulary size.
      limits: on the time and memory of a request's constraints.
    """

    def __init__(self, tokenizer: Tokenizer, vocab: int, limits: ServerLimits):
        self._tokenizer, self._vocab, self._limits = tokenizer, vocab, limits
        self._process: IsolatedProcess | None = None
        self._place = asyncio.Semaphore(1)
        self._known: collections.OrderedDict[Constraint, TrialCost] = collections.OrderedDict()

    async def check(self, format: TextFormat, responses: int) -> None:
        """Check the cost of a request's constraint.

        Raises:
          RequestRefused: an invalid constraint, one beyond the limits, or others are tried for too
            long.
        """
        if importlib.util.find_spec("llguidance") is None:
            return  # compiling says so
        cost = self._known.get(format.constraint) or await self._tried(format)
        self._known[format.constraint] = cost
        self._known.move_to_end(format.constraint)
        if len(self._known) > _KEPT:
            self._known.popitem(last=False)
        each = f" for each of {responses} responses" if responses > 1 else ""
        limits = self._limits
        if cost.seconds * responses > limits.constraint_seconds:
            took = f"takes {cost.seconds:.2g} s{each}"
            raise _beyond(format, f"{took}: at most {limits.constraint_seconds:g} s")
        if cost.memory_bytes * responses > limits.constraint_bytes:
            took = f"takes {cost.memory_bytes / 2**20:.0f} MiB{each}"
            raise _beyond(format, f"{took}: at most {limits.constraint_bytes >> 20} MiB")

    async def _tried(self, format: TextFormat) -> TrialCost:
        try:
            async with asyncio.timeout(_WAIT_SECONDS):
                await self._place.acquire()
        except TimeoutError:
            said = f"{format.field}: others' take too long to compile; come again"
            raise RequestRefused(said, 503, param=format.field, retry_after=10) from None
        try:
            return await asyncio.to_thread(self._try, format)
        finally:
            self._place.release()

    def _try(self, format: TextFormat) -> TrialCost:
        try:
            if self._process is None:
                found = self._tokenizer.token_bytes()
                setup = pickle.dumps((found, self._vocab, self._limits))
                self._process = IsolatedProcess(f"{__name__}:trial_handler", setup)
            request = pickle.dumps([(format.field, format.constraint), *format.parts])
            said = json.loads(self._process.call(request, _WALL_SECONDS))
        except ConfigError as error:
            raise RequestRefused(f"{format.field}: {error}", param=format.field) from None
        except DeadlineExceeded:
            raise _beyond(format, _end(-signal.SIGPROF, self._limits)) from None
        except (ProcessDied, TaskFailed) as error:
            raise _beyond(format, f"could not be compiled ({error})") from None
        if "beyond" in said:
            raise _beyond(format, said["beyond"])
        if "error" in said:
            raise RequestRefused(f"{said['field']}: {said['error']}", param=said["field"])
        return TrialCost(**said)


def _beyond(format: TextFormat, said: str) -> RequestRefused:
    what = f"{format.field}: to compile it {said}; make it shorter, or with fewer repetitions"
    return RequestRefused(what, param=format.field)


def trial_handler(setup: bytes) -> Callable[[bytes], bytes]:
    """Return the isolated process's request handler: named constraints in, JSON out. The first is
    tried; if it is invalid the others are asked which of them is."""
    found, vocab, limits = pickle.loads(setup)
    tokenizer: Any = _TokenBytesOnly(found)
    compiler = ConstraintCompiler(tokenizer, vocab)
    nothing = Constraint(regex="a*")
    compiler.matcher(nothing, SamplingParams(), [])  # loads llguidance
    least = _in_copy(lambda: _try_first(compiler, [("", nothing)]), limits)["memory_bytes"]

    def answer(request: bytes) -> bytes:
        said = _in_copy(lambda: _try_first(compiler, pickle.loads(request)), limits)
        if "memory_bytes" in said:
            said["memory_bytes"] = max(said["memory_bytes"] - least, 0)
        return json.dumps(said).encode()

    return answer


def _in_copy(work: Callable[[], Mapping[str, Any]], limits: ServerLimits) -> dict[str, Any]:
    """What ``work`` returns in a limited copy of this process, which has what is loaded here."""
    readable, writable = os.pipe()
    process = os.fork()
    if process == 0:
        _limit_process(limits)
        os.write(writable, json.dumps(work()).encode())
        os._exit(0)
    os.close(writable)
    with open(readable, "rb") as pipe:
        said = pipe.read()
    ended = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    return json.loads(said) if said else {"beyond": _end(ended, limits)}


class _TokenBytesOnly:
    """What a compiler asks of a tokenizer."""

    def __init__(self, found: TokenBytes):
        self._found = found

    def token_bytes(self) -> TokenBytes:
        return self._found

    def decode(self, tokens: Sequence[int]) -> str:
        return ""


def _limit_process(limits: ServerLimits) -> None:
    import resource

    with contextlib.suppress(OSError), open("/proc/self/statm") as file:  # Linux
        used = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + limits.constraint_bytes,) * 2)
    resource.setrlimit(resource.RLIMIT_STACK, (_STACK_BYTES,) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # where llguidance says that memory is out
    signal.setitimer(signal.ITIMER_PROF, limits.constraint_seconds)  # ends it


def _end(status: int, limits: ServerLimits) -> str:
    match -status:
        case signal.SIGPROF:
            return f"takes more than {limits.constraint_seconds:g} s"
        case signal.SIGABRT | signal.SIGKILL:
            return f"takes more than {limits.constraint_bytes >> 20} MiB"
        case signal.SIGSEGV | signal.SIGBUS:
            return "is nested too deeply"
    return f"fails (exit status {status})"


def _try_first(
    compiler: ConstraintCompiler, named: Sequence[tuple[str, Constraint]]
) -> Mapping[str, Any]:
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    memory = lambda: unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # noqa: E731
    began, had = time.process_time(), memory()
    field, constraint = named[0]
    try:
        _match_some(compiler, constraint)
        return {"seconds": time.process_time() - began, "memory_bytes": memory() - had}
    except ConfigError as error:
        said = {"field": field, "error": str(error)}
    except MemoryError:
        os.abort()  # as llguidance does
    for field, constraint in named[1:]:
        try:
            compiler.matcher(constraint, SamplingParams(), [])
        except ConfigError as error:
            return {"field": field, "error": str(error)}
    return said


def _match_some(compiler: ConstraintCompiler, constraint: Constraint) -> None:
    matcher, draw = compiler.matcher(constraint, SamplingParams(), []), random.Random(0)
    for _ in range(_TOKENS):
        allowed = np.flatnonzero(np.unpackbits(matcher.bitmask.view(np.uint8), bitorder="little"))
        if not len(allowed) or matcher.advance([int(draw.choice(allowed))]):
            return
