"""Sandbox for programs that a model writes: the protocol, and one on this machine's Linux kernel.

    sandbox = LocalSandbox()
    name = sandbox.create()
    sandbox.write(name, "hello.py", b"print(input())")
    done = sandbox.exec(name, [sys.executable, "-I", "hello.py"], stdin=b"hello")
    sandbox.kill(name)

A program's layers: a session, no new privileges, limits of CPU, memory, processes and files, an
empty environment, Landlock (files), seccomp (system calls) and namespaces (network, processes,
mounts, ipc). docs/security.md says what each protects.
"""

import atexit
import contextlib
import dataclasses
import functools
import itertools
import json
import os
import select
import socket
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from hjax.errors import ConfigError, RunError
from hjax.sandbox import kernel_layers, scratch_folder
from hjax.temporary_folders import TemporaryFolder

_PACKAGE_PARENT = str(Path(__file__).resolve().parents[2])
# Layers that can be switched off.
LAYERS = ("landlock", "seccomp", "namespaces")
_PROBE_SECONDS, _GRACE_SECONDS, _CLOSE_SECONDS = 60.0, 15.0, 5.0
_numbers = itertools.count()


@dataclasses.dataclass(frozen=True)
class SandboxLimits:
    """Limits of one program with all that it starts.

    Attributes:
      cpu_seconds: processor time.
      wall_seconds: time by the clock; more, as a busy machine gives a program less.
      memory_bytes: address space of each process, and resident memory of all.
      processes: processes and threads.
      file_bytes: of each file.
      disk_bytes: written by all, and in the folder.
      open_files: of each process.
      output_bytes: of stdout and of stderr.
      look_seconds: how often the limits of all processes together are looked at.
    """

    cpu_seconds: float = 10.0
    wall_seconds: float = 60.0
    memory_bytes: int = 1 << 30
    processes: int = 32
    file_bytes: int = 64 << 20
    disk_bytes: int = 256 << 20
    open_files: int = 256
    output_bytes: int = 16 << 20
    look_seconds: float = 0.03


@dataclasses.dataclass(frozen=True)
class ExecResult:
    """How a program ended.

    Attributes:
      status: its exit status; minus the signal's number if a signal ended it.
      stdout, stderr: its output, up to the limit.
      ended_by: the limit that ended it: ``cpu``, ``wall``, ``memory``, ``processes``, ``disk``,
        ``output``; ``killed`` by ``kill``; empty: it ended by itself.
      seconds: by the clock.
    """

    status: int
    stdout: bytes
    stderr: bytes
    ended_by: str
    seconds: float


class Sandbox(Protocol):
    """Where untrusted programs run. Calls may come from several threads."""

    def create(self) -> str:
        """Make a sandbox with an empty folder; returns its name."""
        ...

    def exec(
        self,
        name: str,
        command: Sequence[str],
        *,
        stdin: bytes = b"",
        environment: Mapping[str, str] | None = None,
        limits: SandboxLimits | None = None,
    ) -> ExecResult:
        """Run a program in the folder until it ends; nothing that it has started outlives it.

        Args:
          command: the program and its arguments.
          stdin: of the program.
          environment: variables beside PATH, HOME and LANG.
          limits: None: the sandbox's own.
        """
        ...

    def write(self, name: str, path: str, content: bytes) -> None:
        """Write a file in the folder, with the folders above it.

        Raises:
          DataError: the path leads out of the folder, or what programs have made is in its way.
        """
        ...

    def read(self, name: str, path: str, limit: int = 16 << 20) -> bytes:
        """Read a regular file in the folder, at most ``limit`` bytes.

        Raises:
          DataError: there is no such file, or its path leads out of the folder.
        """
        ...

    def kill(self, name: str) -> None:
        """End what runs there, and remove the folder."""
        ...


def python_command(sandbox: Sandbox) -> str:
    """The Python of a sandbox: on this machine this one, elsewhere ``python3``."""
    return sys.executable if isinstance(sandbox, LocalSandbox) else "python3"


class LocalSandbox:
    """Sandboxes on this machine, without a container.

    Args:
      limits: of a program, where ``exec`` is given none.
      without: layers to leave out, of LAYERS.
      readable: further files and folders that programs can read.
      allow_network: run programs also where neither namespaces nor seccomp keep them from the
        network.

    Raises:
      ConfigError: an unknown layer, or the layers do not keep programs from files or the network.
    """

    def __init__(
        self,
        limits: SandboxLimits | None = None,
        without: Sequence[str] = (),
        readable: Sequence[str] = (),
        allow_network: bool = False,
    ):
        if unknown := [name for name in without if name not in LAYERS]:
            raise ConfigError(f"without={unknown[0]!r}: it must be one of {', '.join(LAYERS)}")
        self.limits = limits or SandboxLimits()
        found = probed_layers()
        self.layers = {name: 0 if name in without else found[name] for name in LAYERS}
        self._users, self._allow_network = found["users"], allow_network
        self._readable = _readable_paths(readable)
        self._folders: dict[str, tuple[TemporaryFolder, int]] = {}
        self._running: dict[str, set[socket.socket]] = {}
        self._lock = threading.Lock()
        # One for all of them: a run makes a sandbox for each response.
        weakref.finalize(self, _remove_folders, self._folders)
        if not self.layers["landlock"] and not self.layers["namespaces"]:
            raise ConfigError(
                f"no sandbox here: {describe_layers(self.layers)} do not keep programs from this "
                "machine's files; it needs Landlock (Linux 5.13) or namespaces, or a Sandbox of "
                "your own on another machine"
            )
        if not self.layers["seccomp"] and not self.layers["namespaces"] and not allow_network:
            raise ConfigError(
                f"no sandbox here: {describe_layers(self.layers)} do not keep programs from the "
                "network; it needs seccomp or namespaces, or sandbox.allow_network=true, which "
                "lets programs reach it"
            )
        self._own_users = bool(self._users) and (
            bool(self.layers["namespaces"])
            or _reachable([*self._readable, os.path.join(tempfile.gettempdir(), "hjax-sandbox")])
        )
        if os.geteuid() == 0 and not self._own_users:
            raise ConfigError(
                "no sandbox here: the kernel counts no processes of root, so programs need users "
                f"of their own, who cannot read {sys.base_prefix} without namespaces; start as "
                "another user than root, or with a Python that every user can read"
            )

    def create(self) -> str:
        """See ``Sandbox``."""
        made = TemporaryFolder("hjax-sandbox-")
        outer = made.path
        name, folder = outer.name, outer / "work"
        (outer / "root").mkdir()
        folder.mkdir(mode=0o700)
        user = 0
        if self._own_users:
            user = (
                kernel_layers.SANDBOX_USERS + (os.getpid() % (1 << 22)) * 256 + next(_numbers) % 256
            )
            os.chown(folder, user, user)
            outer.chmod(0o711)
        with self._lock:
            self._folders[name] = made, user
            self._running[name] = set()
        return name

    def exec(
        self,
        name: str,
        command: Sequence[str],
        *,
        stdin: bytes = b"",
        environment: Mapping[str, str] | None = None,
        limits: SandboxLimits | None = None,
        port: int = 0,
    ) -> ExecResult:
        """See ``Sandbox``; programs are looked up in /usr/local/bin, /usr/bin and /bin.

        Args:
          port: of 127.0.0.1, that the program may connect to by TCP; 0: none. In namespaces it
            reaches nothing else; without them Landlock keeps it from other ports alone, so this
            needs ``allow_network``.

        Raises:
          RunError: the program could not be started, or the launcher has died.
        """
        limits = limits or self.limits
        if port and not self.layers["namespaces"] and not self._allow_network:
            raise ConfigError(
                "no sandbox here for a program that is to reach one port alone: it needs "
                "namespaces, or sandbox.allow_network=true, which lets programs reach others"
            )
        request = self._request(name, command, environment or {}, limits) | {"port": port}
        os.chmod(request["folder"], 0o700)  # its programs may have closed it
        control, theirs = socket.socketpair()
        out, out_end = os.pipe()
        err, err_end = os.pipe()
        try:
            with tempfile.TemporaryFile() as given:
                given.write(stdin)
                given.flush()
                reading = os.open(f"/proc/self/fd/{given.fileno()}", os.O_RDONLY)
                try:
                    _launcher.send(request, [reading, out_end, err_end, theirs.fileno()])
                finally:
                    os.close(reading)
                    os.close(out_end)
                    os.close(err_end)
                    theirs.close()
            with self._lock:
                if name in self._running:
                    self._running[name].add(control)
                else:  # killed meanwhile
                    control.shutdown(socket.SHUT_WR)
            return _collect(control, {"stdout": out, "stderr": err}, limits)
        finally:
            with self._lock:
                self._running.get(name, set()).discard(control)
            control.close()
            os.close(out)
            os.close(err)

    def write(self, name: str, path: str, content: bytes) -> None:
        """See ``Sandbox``; no link is followed."""
        folder, user = self._folder(name)
        scratch_folder.write_within(folder, path, content, user)

    def read(self, name: str, path: str, limit: int = 16 << 20) -> bytes:
        """See ``Sandbox``; no link is followed."""
        return scratch_folder.read_within(self._folder(name)[0], path, limit)

    def kill(self, name: str) -> None:
        """End what runs there, and remove the folder; nothing if there is no such sandbox."""
        with self._lock:
            made = self._folders.pop(name, (None, 0))[0]
            for control in self._running.pop(name, set()):
                with contextlib.suppress(OSError):
                    control.shutdown(socket.SHUT_WR)
        if made is not None:
            made.remove()

    def folder(self, name: str) -> Path:
        """Where its files are; programs that run there can change them meanwhile."""
        return self._folder(name)[0]

    def _folder(self, name: str) -> tuple[Path, int]:
        try:
            made, user = self._folders[name]
        except KeyError:
            raise ConfigError(f"sandbox {name!r} does not exist; create() makes one") from None
        return made.path / "work", user

    def _request(
        self,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        limits: SandboxLimits,
    ) -> dict[str, Any]:
        """What the launcher is sent."""
        folder, user = self._folder(name)
        return {
            "command": list(command),
            "folder": str(folder),
            "root": str(folder.parent / "root"),
            "readable": self._readable,
            "user": user,
            "layers": self.layers,
            "limits": dataclasses.asdict(limits),
            "rlimits": self._rlimits(limits, user),
            "environment": {
                "PATH": "/usr/local/bin:/usr/bin:/bin",
                "HOME": str(folder),
                "LANG": "C.UTF-8",
                **environment,
            },
        }

    def _rlimits(self, limits: SandboxLimits, user: int) -> dict[str, int]:
        own_namespace = self.layers["namespaces"] and os.geteuid() and _kernel() >= (5, 14)
        # Counted for the user: others' processes count too where the program has none of its own.
        others = 0 if user or own_namespace else _tasks_of(os.geteuid())
        return {
            "CPU": max(int(-(-limits.cpu_seconds // 1)), 1),
            "AS": limits.memory_bytes,
            "FSIZE": limits.file_bytes,
            "NOFILE": limits.open_files,
            "NPROC": limits.processes + others,
        }


def _remove_folders(folders: dict[str, tuple[TemporaryFolder, int]]) -> None:
    """Remove the folders of sandboxes that nobody has ended."""
    for made, _ in list(folders.values()):
        made.remove()


def _collect(control: socket.socket, pipes: dict[str, int], limits: SandboxLimits) -> ExecResult:
    """Read a program's output, within limits, and its supervisor's outcome."""
    outputs = {name: bytearray() for name in pipes}
    names = {pipe: name for name, pipe in pipes.items()}
    open_pipes, too_much, outcome = set(names), False, b""
    deadline = time.monotonic() + limits.wall_seconds + _GRACE_SECONDS
    while True:
        left = max(deadline - time.monotonic(), 0)
        watched: list[Any] = [control, *open_pipes]
        readable = select.select(watched, [], [], left)[0]
        if not readable:
            raise RunError(
                "sandbox: its supervisor does not answer; is this machine out of memory?"
            )
        for pipe in open_pipes.intersection(readable):
            part = os.read(pipe, 1 << 16)
            room = limits.output_bytes - len(outputs[names[pipe]])
            outputs[names[pipe]] += part[:room]
            if not part:
                open_pipes.discard(pipe)
            elif len(part) > room and not too_much:
                too_much = True
                control.shutdown(socket.SHUT_WR)
        if control in readable and not open_pipes.intersection(readable):
            outcome = control.recv(1 << 16)
            break
    if not outcome:
        raise RunError("sandbox: the supervisor of a program has died")
    found: dict[str, Any] = json.loads(outcome)
    if found["error"]:
        raise RunError(f"sandbox: the program was not started: {found['error']}")
    ended_by = "output" if too_much else found["ended_by"]
    status = os.waitstatus_to_exitcode(found["status"])
    stdout, stderr = bytes(outputs["stdout"]), bytes(outputs["stderr"])
    return ExecResult(status, stdout, stderr, ended_by, found["seconds"])


class _Launcher:
    """The launcher process, started by the first request and again if it has ended."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._requests: socket.socket | None = None

    def send(self, request: dict[str, Any], handles: list[int]) -> None:
        content = json.dumps(request).encode()
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._start()
            assert self._requests is not None
            socket.send_fds(self._requests, [content], handles)

    def close(self) -> None:
        """End the launcher with all that runs; a later request starts another."""
        with self._lock:
            if self._process is None or self._requests is None:
                return
            self._requests.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_CLOSE_SECONDS)
            self._process.kill()
            self._process.wait()
            self._process = self._requests = None

    def _start(self) -> None:
        if self._requests is not None:
            self._requests.close()
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        code = f"import sys; sys.path.insert(0, {_PACKAGE_PARENT!r}); "
        code += f"from hjax.sandbox.sandbox_launcher import main; main({theirs.fileno()})"
        kept = {k: v for k, v in os.environ.items() if k == "LD_LIBRARY_PATH"}
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", code],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            env=kept,
            pass_fds=(theirs.fileno(),),
            start_new_session=True,
            cwd="/",
        )
        theirs.close()


_launcher = _Launcher()
atexit.register(_launcher.close)


@functools.cache
def probed_layers() -> dict[str, int]:
    """Layers that work on this machine, tried once: ``landlock`` (its ABI's version, 0: none), and
    ``seccomp``, ``namespaces`` and ``users`` (0 or 1)."""
    if not sys.platform.startswith("linux"):
        return dict.fromkeys((*LAYERS, "users"), 0)
    control, theirs = socket.socketpair()
    with control, theirs, TemporaryFolder("hjax-sandbox-") as root:
        _launcher.send({"probe": True, "root": str(root)}, [theirs.fileno()])
        theirs.close()
        control.settimeout(_PROBE_SECONDS)
        found: dict[str, int] = json.loads(control.recv(1 << 16) or b"{}")
    return found or dict.fromkeys((*LAYERS, "users"), 0)


def describe_layers(layers: Mapping[str, int]) -> str:
    """Layers in words."""
    version = f"Landlock {layers['landlock']}" if layers["landlock"] else ""
    spaces = "namespaces" if layers["namespaces"] else ""
    found = [version, "seccomp" if layers["seccomp"] else "", spaces, "limits"]
    return ", ".join(filter(None, found))


def sandbox_layers(allow_network: bool = False) -> str:
    """The sandbox of this machine in one line, for a run's head."""
    found = probed_layers()
    line = f"sandbox: {describe_layers(found)}"
    try:
        LocalSandbox(allow_network=allow_network)
    except ConfigError:
        return f"{line}; too little to run programs of a model"
    isolated = found["seccomp"] or found["namespaces"]
    return line if isolated else f"{line}; programs may reach the network (sandbox.allow_network)"


def _readable_paths(further: Sequence[str]) -> list[str]:
    """Paths of the system, of this interpreter and its libraries."""
    interpreter = {sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix}
    executable = os.path.realpath(sys.executable)
    found = [
        *kernel_layers.system_paths(),
        *sorted(interpreter),
        executable,
        *map(os.path.abspath, further),
    ]
    kept: list[str] = []
    for path in found:
        if path != "/" and not any(path == k or path.startswith(f"{k}/") for k in kept):
            kept.append(path)
    return kept


def _reachable(paths: Sequence[str | Path]) -> bool:
    """Whether every user can pass through the folders above these paths."""
    return all(p.stat().st_mode & 0o001 for path in paths for p in Path(path).resolve().parents)


def _tasks_of(user: int) -> int:
    """Processes and threads of a user of this machine."""
    count = 0
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if os.stat(f"/proc/{pid}").st_uid == user:
                count += len(os.listdir(f"/proc/{pid}/task"))
    return count


def _kernel() -> tuple[int, int]:
    major, minor = os.uname().release.split(".")[:2]
    return int(major), int("".join(itertools.takewhile(str.isdigit, minor)))
