"""math-verify in a process of its own, which can be ended when an expression takes for ever.

This file is that process as well: as a script it reads a line of JSON, `[right, answer]`, and
writes one, `true` or `false`, until its input ends. It imports nothing of hjax.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import threading
import time

# Time for the process to import what it needs, and for one comparison. math-verify itself stops
# after five seconds, except inside arithmetic of very large numbers.
_START_SECONDS, _SECONDS = 120.0, 12.0


class Comparisons:
    """Compares expressions, one at a time; the process starts with the first.

    One that takes too long ends the process, counts as different, and the next starts another.
    """

    def __init__(self, seconds: float = _SECONDS) -> None:
        self.seconds = seconds
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def same(self, right: str, answer: str) -> bool:
        """Whether two expressions (LaTeX or plain) have the same value, by math-verify."""
        with self._lock:
            process = self._started()
            assert process.stdin is not None
            process.stdin.write(json.dumps([right, answer]).encode() + b"\n")
            process.stdin.flush()
            said = self._line(process, self.seconds)
            if said is None:
                self._end(process)
            return said == "true"

    def close(self) -> None:
        """End the process, if there is one."""
        with self._lock:
            if self._process is not None:
                self._end(self._process)

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is not None:
            self._end(self._process)  # somebody ended it
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-P", __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
            if self._line(self._process, _START_SECONDS) is None:
                self._end(self._process)
                raise RuntimeError("math-verify does not start; `import math_verify` says why")
        return self._process

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        process.kill()
        process.communicate()
        self._process = None

    @staticmethod
    def _line(process: subprocess.Popen[bytes], seconds: float) -> str | None:
        """What the process says, a line; None if it ends, or says nothing for so long."""
        assert process.stdout is not None
        said, deadline = b"", time.monotonic() + seconds
        while not said.endswith(b"\n"):
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([process.stdout], [], [], left)[0]:
                return None
            part = os.read(process.stdout.fileno(), 4096)
            if not part:
                return None
            said += part
        return said.decode().strip()


def _serve() -> None:
    from math_verify import parse, verify

    print("ready", flush=True)
    for line in sys.stdin:
        right, answer = (parse(f"\\boxed{{{text}}}") for text in json.loads(line))
        print(json.dumps(bool(verify(right, answer))), flush=True)


if __name__ == "__main__":
    _serve()
