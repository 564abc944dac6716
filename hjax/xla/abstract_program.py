"""A program that can be compiled without running it, with facts that its text lacks."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class AbstractProgram:
    """A program of abstract arguments.

    Attributes:
      name: of the program; if a call runs several, ``CALL.PROGRAM``.
      trace: returns its jax.stages.Traced. Nothing is allocated.
      loop_trips: trips of loops whose count the program's text lacks; None: there are none.
      runs: times that a call runs it, at most.
      resident: abstract arrays that stay alive while it runs without being its arguments, by kind.
      tokens: response tokens that one run samples, at most; None: all of the call.
    """

    name: str
    trace: Callable[[], Any]
    loop_trips: int | None = None
    runs: int = 1
    resident: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    tokens: int | None = None

    @property
    def call(self) -> str:
        """The call's name, without that of the program."""
        return self.name.partition(".")[0]
