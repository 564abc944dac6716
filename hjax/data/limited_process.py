"""An isolated process with limits, in which untrusted files are run: chat templates, tokenizers."""

import importlib
import json
import pickle
from collections.abc import Callable, Mapping
from typing import Any

from hjax.errors import DataError
from hjax.isolated_process import DeadlineExceeded, IsolatedProcess, ProcessDied, TaskFailed

# Deadlines of its start and of one request, its memory, and the characters of a text it makes.
START_SECONDS, SECONDS = 60.0, 10.0
MEMORY_BYTES, CHARACTERS = 2**30, 16 * 2**20
_ENTRY = "hjax.data.limited_process:limited_handler"


class ComputationFailed(DataError):
    """An untrusted file exceeded a limit or crashed, whatever the text that it was given."""


class LimitedProcess:
    """A process that answers requests about one untrusted file.

    Args:
      entry: ``module:name`` of a function that is called there with ``setup``, and returns a
        function of a request (bytes) whose value is one of JSON.
      setup: for ``entry``.
      environment: variables to set there.
    """

    def __init__(self, entry: str, setup: bytes, environment: Mapping[str, str] | None = None):
        given = pickle.dumps((entry, setup, MEMORY_BYTES))
        self._process = IsolatedProcess(_ENTRY, given, environment, START_SECONDS)

    def ask(self, request: bytes) -> Any:
        """The answer to a request.

        Raises:
          ComputationFailed: it exceeds a limit, or the process fails.
          DataError: the function refuses the request.
          Both have no subject: the caller puts the file's name before them.
        """
        try:
            said = json.loads(self._process.call(request, SECONDS))
        except DeadlineExceeded:
            raise ComputationFailed(f"takes longer than {SECONDS:g} s") from None
        except ProcessDied as error:
            raise ComputationFailed(
                f"crashes ({error}), or needs more than {MEMORY_BYTES / 2**30:g} GiB of memory"
            ) from None
        except TaskFailed as error:
            raise ComputationFailed(f"fails ({_in_line(str(error))})") from None
        if "error" in said:
            kind = ComputationFailed if said["exhausted"] else DataError
            raise kind(f"refuses this: {_in_line(said['error'])}")
        return said["answer"]


def limited_handler(given: bytes) -> Callable[[bytes], bytes]:
    """Limit the memory of this process, and return its request handler."""
    import resource  # Windows has none

    entry, setup, memory_bytes = pickle.loads(given)
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    module, _, name = entry.partition(":")
    compute = getattr(importlib.import_module(module), name)(setup)

    def answer(request: bytes) -> bytes:
        try:
            return json.dumps({"answer": compute(request)}).encode()
        except Exception as error:  # of any library
            text, exhausted = str(error) or type(error).__name__, isinstance(error, MemoryError)
            return json.dumps({"error": text, "exhausted": exhausted}).encode()

    return answer


def _in_line(text: str) -> str:
    return " ".join(text.split())[:500]
