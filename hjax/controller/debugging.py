"""A pool in this process whose calls of one role stop in a debugger."""

from __future__ import annotations

import pdb
from collections.abc import Callable, Sequence
from types import CodeType
from typing import Any

import jax

from hjax.binding import binding
from hjax.controller.executors import ExecutorFactory, ThreadExecutor
from hjax.controller.host import Answer
from hjax.controller.messages import Call, Message
from hjax.controller.timeline import Timeline
from hjax.errors import RunError


class DebuggingExecutor(ThreadExecutor):
    """As ``ThreadExecutor``, but that a role's calls in a step stop at their method's first line.

    An error opens the debugger where it arose.

    Args:
      role: whose calls.
      name, devices, timeline: as of ``ThreadExecutor``.
    """

    def __init__(
        self, role: str, name: str, devices: Sequence[jax.Device], timeline: Timeline
    ):
        self._role = role
        super().__init__(name, devices, timeline)

    def _answer(self, message: Message) -> Answer:
        if not isinstance(message, Call) or message.role != self._role:
            return super()._answer(message)
        worker = self.host.workers.get(message.role)
        bound = binding(type(worker), message.method)
        if bound is None or not bound.phase:
            return super()._answer(message)
        debugger = pdb.Pdb(nosigint=True, readrc=False)
        code = getattr(worker, message.method).__code__
        debugger.set_break(code.co_filename, first_line(code))
        debugger.rcLines.append("continue")  # up to there
        answer: Callable[[Message], Answer] = super()._answer
        try:
            answered = debugger.runcall(answer, message)
            if answered is None:
                raise RunError(f"the debugger was left in {message.label}")
            return answered
        except RunError:
            raise
        except Exception as error:
            print(f"{message.label}: {type(error).__name__}: {error}")
            pdb.post_mortem(error.__traceback__)
            raise


def first_line(code: CodeType) -> int:
    """The first line of a function's body."""
    lines = sorted({line for _, _, line in code.co_lines() if line is not None})
    return next((line for line in lines if line > code.co_firstlineno), lines[0])


def debugging(
    role: str, others: ExecutorFactory, roles_of: Callable[[str], Any]
) -> ExecutorFactory:
    """Executors as ``others`` makes them, but for the pool of one role, which is in this process.

    Args:
      role: that is debugged.
      others: makes the others.
      roles_of: the roles of a pool, by its name.
    """

    def make(name: str, devices: Sequence[Any], timeline: Timeline) -> Any:
        if role not in roles_of(name):
            return others(name, devices, timeline)
        own = jax.devices()
        here = devices if all(isinstance(d, jax.Device) for d in devices) else own[: len(devices)]
        return DebuggingExecutor(role, name, here, timeline)

    return make
