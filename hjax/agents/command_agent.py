"""Agents that are programs: each session runs one, and a verifier scores what it leaves."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import inspect
import json
import os
import shlex
import shutil
import signal
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from hjax.errors import ConfigError, DataError
from hjax.sandbox.local_sandbox import ExecResult, Sandbox, SandboxLimits
from hjax.sandbox.sandbox_settings import SandboxSettings
from hjax.user_code import load_object

# What a command's words may have in braces.
PLACES = ("session", "url", "key", "task")
# How long a verifier may take after the program has ended, and the files that it is given at most.
VERIFY_SECONDS = 120.0
_FILES, _BYTES = 10_000, 256 << 20
# By which the processes of a program are found, also those that have left its session.
_MARK = "HJAX_AGENT_SESSION"


@dataclasses.dataclass(frozen=True)
class Workspace:
    """What a program has left, in a sandbox.

    Attributes:
      status: with which the program ended: its exit status, minus a signal's number, or None where
        its deadline ended it.
      output: the end of what it printed.
      sandbox, name: where its files are.
    """

    status: int | None
    output: str
    sandbox: Sandbox
    name: str

    def read(self, path: str) -> bytes:
        """A file that it has left; DataError: there is none."""
        return self.sandbox.read(self.name, path)

    def write(self, path: str, content: bytes) -> None:
        """Put a file beside what it has left: tests that the program must not see."""
        self.sandbox.write(self.name, path, content)

    def run(
        self, command: Sequence[str], stdin: bytes = b"", limits: SandboxLimits | None = None
    ) -> ExecResult:
        """Run a program among the files, in the sandbox."""
        return self.sandbox.exec(self.name, command, stdin=stdin, limits=limits)


def command_words(command: str, setting: str = "agent.command") -> list[str]:
    """The words of a command.

    Raises:
      ConfigError: quotes that do not close, or a program that is not told where to call.
    """
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise ConfigError(f"{setting}={command!r}: {error}") from error
    if "{session}" not in command and not ("{url}" in command and "{key}" in command):
        raise ConfigError(
            f"{setting}={command!r}: it must have {{session}}, the path of a JSON file with url, "
            "key, task and seed, or {url} and {key}"
        )
    if words and shutil.which(words[0]) is None:
        raise ConfigError(f"{setting}={command!r}: there is no program {words[0]}")
    return words


def load_verifier(spec: str, setting: str = "agent.verifier") -> Callable[..., Any]:
    """A verifier in a file, ``path.py:name``: a function of a task and a Workspace that returns a
    reward.

    Raises:
      ConfigError: no such file or name, or something else.
    """
    found = load_object(spec, setting) if spec else None
    if not callable(found) or inspect.iscoroutinefunction(found):
        raise ConfigError(
            f"{setting}={spec!r}: it must be path.py:name of a function of (task, workspace) that "
            "returns a reward; a program says none itself"
        )
    return found


class CommandAgent:
    """Runs a program for each session, in an empty folder, and has what it leaves verified.

    The program has this machine's files and network as this process has, and an environment of
    PATH, HOME and LANG. Once it has ended, or is late, all of its processes are killed; then its
    files are copied into a sandbox, where the verifier may run them.

    Args:
      command: its words; PLACES in braces are filled in.
      verifier: see ``load_verifier``.
      sandbox: for what the verifier runs.
      seconds: that the program may take.
    """

    def __init__(self, command: str, verifier: str, sandbox: SandboxSettings, seconds: float):
        self._words, self._verifier = command_words(command), load_verifier(verifier)
        self._sandbox, self._seconds = sandbox.make(), seconds

    async def __call__(self, task: Mapping[str, Any], url: str, key: str, seed: int) -> Any:
        """The reward of a session."""
        with tempfile.TemporaryDirectory(prefix="hjax-agent-") as outer:
            folder = Path(outer, "work")
            folder.mkdir()
            told = {"url": url, "key": key, "task": dict(task), "seed": seed}
            files = {"session": json.dumps(told, default=str), "task": json.dumps(told["task"])}
            places = {"url": url, "key": key}
            for name, text in files.items():
                places[name] = str(Path(outer, f"{name}.json"))
                Path(places[name]).write_text(text)
                os.chmod(places[name], 0o600)
            # Without a name, as the program may put a FIFO or a link in its place.
            with tempfile.TemporaryFile(dir=outer) as output:
                status = await self._run(folder, places, output)
                said = _end_of(output)
            return await asyncio.to_thread(self._verified, task, folder, status, said)

    async def _run(self, folder: Path, places: Mapping[str, str], output: IO[bytes]) -> int | None:
        """Run the program; its status, None where it was late."""
        words = [_filled(word, places) for word in self._words]
        mark = uuid.uuid4().hex
        environment = {
            "PATH": os.environ.get("PATH", os.defpath),
            "HOME": str(folder),
            "LANG": "C.UTF-8",
            _MARK: mark,
        }
        program = await asyncio.create_subprocess_exec(
            *words, cwd=folder, env=environment, start_new_session=True,
            stdin=asyncio.subprocess.DEVNULL, stdout=output, stderr=asyncio.subprocess.STDOUT,
        )  # fmt: skip
        try:
            return await asyncio.wait_for(program.wait(), self._seconds)
        except TimeoutError:
            return None
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(program.pid, signal.SIGKILL)
            await asyncio.to_thread(_kill_marked, mark)
            with contextlib.suppress(ProcessLookupError):
                await program.wait()

    def _verified(
        self, task: Mapping[str, Any], folder: Path, status: int | None, output: str
    ) -> Any:
        name = self._sandbox.create()
        try:
            for path, content in _files_of(folder):
                self._sandbox.write(name, path, content)
            return self._verifier(task, Workspace(status, output, self._sandbox, name))
        finally:
            self._sandbox.kill(name)


def _filled(word: str, places: Mapping[str, str]) -> str:
    for name in PLACES:
        word = word.replace(f"{{{name}}}", places[name])
    return word


def _end_of(file: IO[bytes], size: int = 1 << 16) -> str:
    file.seek(max(file.seek(0, os.SEEK_END) - size, 0))
    return file.read(size).decode(errors="replace")


def _files_of(folder: Path) -> Iterator[tuple[str, bytes]]:
    """The regular files below a folder; no link is followed.

    Raises:
      DataError: there are too many, or they are too large.
    """
    count = size = 0
    for where, _, names in os.walk(folder):
        for name in names:
            path = Path(where, name)
            if path.is_symlink() or not path.is_file():
                continue
            count, size = count + 1, size + path.stat().st_size
            if count > _FILES or size > _BYTES:
                raise DataError(f"the program has left more than {_FILES} files or {_BYTES} bytes")
            yield str(path.relative_to(folder)), path.read_bytes()


def _kill_marked(mark: str) -> None:
    """Kill every process of this user's with the mark in its environment, until there is none."""
    wanted = f"{_MARK}={mark}".encode()
    for _ in range(100):
        found = False
        for entry in os.scandir("/proc") if os.path.isdir("/proc") else ():
            with contextlib.suppress(OSError, ValueError):
                if entry.name.isdigit() and wanted in Path(entry.path, "environ").read_bytes():
                    os.kill(int(entry.name), signal.SIGKILL)
                    found = True
        if not found:
            return
