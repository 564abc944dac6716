"""Agents that are programs: each session runs one, and a verifier scores what it leaves.

A program runs in a sandbox whose network is the gateway alone, or with the rights of this process.
Its verifier's files are never in reach of it: they come beside what it has left, in another
sandbox, once all of its processes are dead.
"""

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

from hjax.errors import ConfigError, DataError, RunError
from hjax.sandbox.local_sandbox import ExecResult, LocalSandbox, Sandbox, SandboxLimits
from hjax.sandbox.sandbox_settings import THIS_MACHINE, SandboxSettings
from hjax.temporary_folders import TemporaryFolder
from hjax.user_code import load_object

# What a command's words may have in braces.
PLACES = ("session", "url", "key", "task")
# How long a verifier may take after the program has ended, and the files that it is given at most.
VERIFY_SECONDS = 120.0
_FILES, _BYTES = 10_000, 256 << 20
# By which the processes of a program are found, also those that have left its session.
_MARK = "HJAX_AGENT_SESSION"
# Of a program in the sandbox: where it begins, and how its words are run there.
_WORK = "work"
_SHELL = ("sh", "-c", f'mkdir {_WORK} && cd {_WORK} && HOME="$PWD" exec "$@" 2>&1', "sh")
_NO_LIMIT = 1 << 62
_OUTPUT = 1 << 16  # the end of what it has printed


@dataclasses.dataclass(frozen=True)
class ProgramSettings:
    """A program, and what is around it.

    Attributes:
      command: its words, see ``CommandAgent``; ``verifier``: scores what it leaves.
      sandbox: for what the verifier runs.
      confined: whether the program itself runs in this machine's sandbox.
      readable: files and folders that it can then read, beside the system's and its own words.
      hidden: columns of the row that the verifier is given, and the program is not.
      seconds: that it may take.
      memory_bytes: of all its processes, where it is confined; 0: no limit.
    """

    command: str
    verifier: str
    sandbox: SandboxSettings = THIS_MACHINE
    confined: bool = True
    readable: tuple[str, ...] = ()
    hidden: tuple[str, ...] = ()
    seconds: float = 1800.0
    memory_bytes: int = 0


@dataclasses.dataclass(frozen=True)
class Workspace:
    """What a program has left, in a sandbox.

    Attributes:
      status: with which the program ended: its exit status, minus a signal's number, or None where
        its deadline ended it.
      ended_by: of a confined program, the limit that ended it, see ``ExecResult``; empty: none.
      output: the end of what it printed.
      sandbox, name: where its files are.
    """

    status: int | None
    output: str
    sandbox: Sandbox
    name: str
    ended_by: str = ""

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
    """The words of a command; those that are paths here are made absolute.

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
    first = shutil.which(words[0]) or words[0]
    rest = [os.path.abspath(word) if _is_path(word) else word for word in words[1:]]
    return [os.path.abspath(first), *rest]


def _is_path(word: str) -> bool:
    """Whether a word is meant as a path: of a file, or with a slash."""
    return os.path.isfile(word) or ("/" in word and os.path.exists(word))


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

    Its environment is PATH, HOME and LANG. Confined, it reaches its folder, the paths that it may
    read, and the gateway's port. Else it has this machine's files and network as this process has.
    Once it has ended, or is late, all of its processes are killed; then its files are copied into
    another sandbox, where the verifier may run them.

    Args:
      settings: of it; PLACES in braces among the command's words are filled in.
    """

    def __init__(self, settings: ProgramSettings):
        self._settings = settings
        self._words = command_words(settings.command)
        self._verifier = load_verifier(settings.verifier)
        self._sandbox, self._seconds = settings.sandbox.make(), settings.seconds
        self._own = self._confining() if settings.confined else None

    def _confining(self) -> LocalSandbox:
        """The sandbox of the program itself.

        Raises:
          ConfigError: another sandbox is configured, this machine has too little, or the verifier
            lies where the program can read it.
        """
        settings = self._settings
        other = "agent.confined=False runs it with your rights"
        if settings.sandbox.function:
            raise ConfigError(
                f"agent.confined=True: a program is confined by this machine's sandbox, and "
                f"sandbox.function={settings.sandbox.function} is another, which does not reach "
                f"the gateway; {other}"
            )
        verifier = os.path.realpath(settings.verifier.rpartition(":")[0])
        for path in (*settings.readable, *self._words):
            if os.path.exists(path) and _lies_in(verifier, os.path.realpath(path)):
                raise ConfigError(
                    f"agent.verifier={settings.verifier}: the program could read it, as it lies in "
                    f"{path} (agent.command, agent.readable); move it elsewhere"
                )
        readable = [path for path in (*self._words, *settings.readable) if os.path.exists(path)]
        linked = [os.path.realpath(path) for path in readable]
        try:
            made = LocalSandbox(
                _limits(settings),
                readable=[*readable, *linked],
                allow_network=settings.sandbox.allow_network,
            )
            name = made.create()
            try:
                made.exec(name, ["true"], port=9)  # whether a program can be given a port
            finally:
                made.kill(name)
        except (ConfigError, RunError) as error:
            raise ConfigError(f"agent.confined=True: {error}; {other}") from error
        return made

    async def __call__(self, task: Mapping[str, Any], url: str, key: str, seed: int) -> Any:
        """The reward of a session."""
        seen = {name: value for name, value in task.items() if name not in self._settings.hidden}
        told = {"url": url, "key": key, "task": seen, "seed": seed}
        files = {"session": told, "task": seen}
        texts = {name: json.dumps(value, default=str) for name, value in files.items()}
        if self._own is not None:
            return await self._confined(self._own, task, {"url": url, "key": key}, texts)
        with TemporaryFolder("hjax-agent-") as outer:
            folder = Path(outer, _WORK)
            folder.mkdir()
            places = {"url": url, "key": key}
            for name, text in texts.items():
                places[name] = str(Path(outer, f"{name}.json"))
                Path(places[name]).write_text(text)
                os.chmod(places[name], 0o600)
            # Without a name, as the program may put a FIFO or a link in its place.
            with tempfile.TemporaryFile(dir=outer) as output:
                status = await self._run(folder, places, output)
                said = _end_of(output)
            return await asyncio.to_thread(self._verified, task, folder, status, said)

    async def _confined(
        self, own: LocalSandbox, task: Mapping[str, Any], places: dict[str, str],
        texts: Mapping[str, str],
    ) -> Any:  # fmt: skip
        """The reward of a session whose program is confined."""
        name = own.create()
        try:
            for file, text in texts.items():
                own.write(name, f"{file}.json", text.encode())
                places[file] = str(own.folder(name) / f"{file}.json")
            words = [*_SHELL, *(_filled(word, places) for word in self._words)]
            port = int(places["url"].split("/")[2].rpartition(":")[2])
            path = {"PATH": os.environ.get("PATH", os.defpath)}
            done = await asyncio.to_thread(own.exec, name, words, environment=path, port=port)
            status = None if done.ended_by == "wall" else done.status
            output = done.stdout[-_OUTPUT:].decode(errors="replace")
            folder = own.folder(name) / _WORK
            return await asyncio.to_thread(
                self._verified, task, folder, status, output, done.ended_by
            )
        finally:  # elsewhere: to remove a folder may take long, and other sessions go on
            asyncio.get_running_loop().run_in_executor(None, own.kill, name)

    async def _run(self, folder: Path, places: Mapping[str, str], output: IO[bytes]) -> int | None:
        """Run the program with this process's rights; its status, None where it was late."""
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
        self,
        task: Mapping[str, Any],
        folder: Path,
        status: int | None,
        output: str,
        ended_by: str = "",
    ) -> Any:
        name = self._sandbox.create()
        try:
            for path, content in _files_of(folder):
                self._sandbox.write(name, path, content)
            left = Workspace(status, output, self._sandbox, name, ended_by)
            return self._verifier(task, left)
        finally:
            self._sandbox.kill(name)


def _filled(word: str, places: Mapping[str, str]) -> str:
    for name in PLACES:
        word = word.replace(f"{{{name}}}", places[name])
    return word


def _lies_in(path: str, folder: str) -> bool:
    return path == folder or path.startswith(f"{folder.rstrip('/')}/")


def _limits(settings: ProgramSettings) -> SandboxLimits:
    """Of a program that calls a model, and waits: hundreds of them are looked after at a time."""
    return SandboxLimits(
        cpu_seconds=settings.seconds * (os.cpu_count() or 1),
        wall_seconds=settings.seconds,
        memory_bytes=settings.memory_bytes or _NO_LIMIT,
        processes=256,
        disk_bytes=_BYTES,
        look_seconds=0.25,
    )


def _end_of(file: IO[bytes], size: int = _OUTPUT) -> str:
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
