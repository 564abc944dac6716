"""A program that can be compiled without running it, and what its text does not tell."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class AbstractProgram:
    """A program of abstract arguments.

    Attributes:
      name: what it does; of several that make up one call the call's, a dot and its own.
      trace: returns its jax.stages.Traced. Nothing is allocated.
      loop_trips: trips of its loops whose number the program does not tell; None: there are none.
      runs: times that a call runs it, at most.
      beside: abstract arrays that the call keeps while it runs and that are none of its arguments,
        by what they are.
      tokens: of responses that a run of it draws, at most; None: all of the call.
    """

    name: str
    trace: Callable[[], Any]
    loop_trips: int | None = None
    runs: int = 1
    beside: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    tokens: int | None = None

    @property
    def call(self) -> str:
        """The first part of the name."""
        return self.name.partition(".")[0]
