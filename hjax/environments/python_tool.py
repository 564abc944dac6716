"""The tool `python`: an interpreter in the sandbox that keeps an episode's variables."""

import functools

from hjax.sandbox.local_sandbox import LocalSandbox, Sandbox
from hjax.sandbox.python_session import PythonSession


class Python:
    """Runs Python code in an interpreter that keeps its variables between calls.

    It has the standard library, no network, and no files but its own.
    """

    name = "python"

    def __init__(self, seed: int = 0):
        self._session = PythonSession(_sandbox(), seed)

    def __call__(self, code: str) -> str:
        """Runs Python code, and shows what it prints and the value of its last line.

        Args:
          code: one line or several; variables are kept for the next call.
        """
        return self._session.run(code)

    def close(self) -> None:
        """End the interpreter."""
        self._session.close()


@functools.cache
def _sandbox() -> Sandbox:
    """One for all episodes of a process; each interpreter has a folder and processes of its own."""
    return LocalSandbox()
