"""The tool `python`: an interpreter in the sandbox that keeps an episode's variables."""

from hjax.sandbox.local_sandbox import Sandbox
from hjax.sandbox.python_session import PythonSession


class Python:
    """Runs Python code in an interpreter that keeps its variables between calls.

    It has the standard library, no network, and no files but its own.
    """

    name = "python"

    def __init__(self, seed: int, sandbox: Sandbox):
        self._session = PythonSession(sandbox, seed)

    def __call__(self, code: str) -> str:
        """Runs Python code, and shows what it prints and the value of its last line.

        Args:
          code: one line or several; variables are kept for the next call.
        """
        return self._session.run(code)

    def close(self) -> None:
        """End the interpreter."""
        self._session.close()
