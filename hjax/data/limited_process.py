"""An isolated process with limits, in which untrusted files are run: chat templates, tokenizers."""

import json
from collections.abc import Callable, Mapping
from typing import Any

from hjax.errors import DataError
from hjax.isolated_process import DeadlineExceeded, IsolatedProcess, ProcessDied, TaskFailed

# Deadlines of its start and of one request, and the most characters of a text that it makes.
START_SECONDS, SECONDS, CHARACTERS = 60.0, 10.0, 16 * 2**20


class ComputationFailed(DataError):
    """An untrusted file exceeded a limit or crashed, whatever the text that it was given."""


class LimitedProcess:
    """A process that answers requests about one untrusted file.

    Args:
      entry: ``module:name`` of a function that is called there with ``setup``. It calls
        ``limit_memory``, and returns ``json_answers`` of a function.
      setup: for ``entry``.
      memory_bytes: the limit that it sets, for messages.
      environment: variables to set there.
    """

    def __init__(
        self,
        entry: str,
        setup: bytes,
        memory_bytes: int,
        environment: Mapping[str, str] | None = None,
    ):
        self._process = IsolatedProcess(entry, setup, environment, START_SECONDS)
        self._memory = f"{memory_bytes / 2**30:g} GiB"

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
                f"crashes ({error}), or needs more than {self._memory} of memory"
            ) from None
        except TaskFailed as error:
            raise ComputationFailed(f"fails ({_in_line(str(error))})") from None
        if "error" in said:
            kind = ComputationFailed if said["exhausted"] else DataError
            raise kind(f"refuses this: {_in_line(said['error'])}")
        return said["answer"]


def limit_memory(memory_bytes: int) -> None:
    """Limit the memory of this process."""
    import resource  # Windows has none

    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))


def json_answers(compute: Callable[[bytes], Any]) -> Callable[[bytes], bytes]:
    """The process's request handler: the JSON of what ``compute`` returns, or why it does not."""

    def answer(request: bytes) -> bytes:
        try:
            return json.dumps({"answer": compute(request)}).encode()
        except Exception as error:  # of any library
            text, exhausted = str(error) or type(error).__name__, isinstance(error, MemoryError)
            return json.dumps({"error": text, "exhausted": exhausted}).encode()

    return answer


def _in_line(text: str) -> str:
    return " ".join(text.split())[:500]
