"""The launcher of sandboxed programs: a small process without JAX, and a supervisor per program.

It reads requests from a socket: JSON, with descriptors for the program's stdin, stdout and stderr
and for the connection to its supervisor. For each it forks a supervisor. That starts the program,
watches its limits, kills all that the program has started, and sends the outcome as JSON. When the
other end of its connection is closed, it kills at once.

The program's process is confined in this order: session, namespaces, limits, user, capabilities,
Landlock, seccomp. If any step fails the program does not start.
"""

import contextlib
import json
import os
import resource
import select
import signal
import socket
import sys
import time
import traceback
from typing import Any

from hjax.machine import descendants
from hjax.process_supervisor import kill_descendants
from hjax.sandbox import kernel_layers, port_forwarder, system_call_filter

_ENTRY_LIMIT = 20_000
_FAILED_TO_START = 125
_PAGE = resource.getpagesize()
_TICKS = os.sysconf("SC_CLK_TCK")


def main(requests: int) -> None:
    """Serve requests until the other end of this socket is closed."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # supervisors are not waited for
    connection = socket.socket(fileno=requests)
    while True:
        content, handles, _, _ = socket.recv_fds(connection, 1 << 20, 4)
        if not content:
            os._exit(0)
        if os.fork() == 0:
            connection.close()
            try:
                _answer(json.loads(content), handles)
            except Exception:
                traceback.print_exc()
            finally:
                os._exit(1)
        for handle in handles:
            os.close(handle)


def _answer(request: dict[str, Any], handles: list[int]) -> None:
    control = socket.socket(fileno=handles[-1])
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if request.get("probe"):
        outcome: dict[str, Any] = kernel_layers.probe(request["root"])
    else:
        os.setsid()
        outcome = _Supervisor(request, control).run(handles[:3])
    with contextlib.suppress(OSError):
        control.sendall(json.dumps(outcome).encode())
    os._exit(0)


class _Supervisor:
    """Starts a program and ends it. ``request`` is what ``LocalSandbox.exec`` sends."""

    def __init__(self, request: dict[str, Any], control: socket.socket):
        self._request, self._control = request, control
        self._layers, self._limits = request["layers"], request["limits"]
        self._errors, self._reported = os.pipe()
        # A port that the program may reach, and by which its listening socket comes out.
        self._port = request["port"]
        self._outside, self._inside = socket.socketpair()

    def run(self, streams: list[int]) -> dict[str, Any]:
        """The outcome: ``status`` as of ``waitpid``, ``ended_by``, ``seconds``, ``error``."""
        kernel_layers.adopt_orphans()
        begun = time.monotonic()
        first = os.fork()
        if not first:
            self._control.close()
            self._outside.close()
            self._begin(streams)
        os.close(self._reported)
        self._inside.close()
        if self._port and self._layers["namespaces"]:
            handles = socket.recv_fds(self._outside, 1, 1)[1]
            if handles:  # else it has not started, and says why
                port_forwarder.forward_connections(socket.socket(fileno=handles[0]), self._port)
        nothing = os.open(os.devnull, os.O_RDWR)
        for stream in streams:  # else the output would never end
            os.close(stream)
        for stream in (0, 1):
            os.dup2(nothing, stream)
        status, ended_by = self._watch(first, begun)
        seconds = time.monotonic() - begun
        kill_descendants()
        with contextlib.suppress(ChildProcessError):
            while True:
                os.waitpid(-1, 0)
        error, _, seen = os.read(self._errors, 8000).decode(errors="replace").partition("status=")
        if seen:  # by the first process of the namespaces
            status = int(seen)
        elif self._layers["namespaces"]:
            status = status or signal.SIGKILL
        if not ended_by and os.WIFSIGNALED(status):
            used = resource.getrusage(resource.RUSAGE_CHILDREN)
            late = used.ru_utime + used.ru_stime >= 0.9 * self._limits["cpu_seconds"]
            if late or os.WTERMSIG(status) == signal.SIGXCPU:
                ended_by = "cpu"
        return {"status": status, "ended_by": ended_by, "seconds": seconds, "error": error}

    def _watch(self, first: int, begun: float) -> tuple[int, str]:
        """Status and reason when the program has ended, or must be ended."""
        watched: list[Any] = [self._control, os.pidfd_open(first)]
        polls = 0
        while True:
            readable = select.select(watched, [], [], self._limits["look_seconds"])[0]
            if self._control in readable:
                return signal.SIGKILL, "killed"
            if readable:
                return os.waitpid(first, 0)[1], ""
            if time.monotonic() - begun > self._limits["wall_seconds"]:
                return signal.SIGKILL, "wall"
            if reason := self._exceeded(polls):
                return signal.SIGKILL, reason
            polls += 1

    def _exceeded(self, polls: int) -> str:
        """The limit that all processes together exceed; empty: none."""
        pids = descendants(os.getpid())
        if len(pids) > self._limits["processes"] + 2:
            return "processes"
        memory = cpu = written = 0.0
        for pid in pids:
            with contextlib.suppress(OSError, IndexError, ValueError):
                with open(f"/proc/{pid}/statm") as file:
                    memory += int(file.read().split()[1]) * _PAGE
                with open(f"/proc/{pid}/stat") as file:
                    cpu += sum(map(int, file.read().rpartition(")")[2].split()[11:15])) / _TICKS
                with open(f"/proc/{pid}/io") as file:
                    written += int(file.read().partition("write_bytes: ")[2].split()[0])
        if memory > self._limits["memory_bytes"]:
            return "memory"
        if cpu > self._limits["cpu_seconds"] + 0.5:
            return "cpu"
        limit = self._limits["disk_bytes"]
        if written > limit or (polls % 8 == 0 and _folder_exceeds(self._request["folder"], limit)):
            return "disk"
        return ""

    def _begin(self, streams: list[int]) -> None:
        """In the child: become the program, or the first process of its namespaces."""
        try:
            kernel_layers.end_with_parent()
            for position, stream in enumerate(streams):
                os.dup2(stream, position)
            with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
                file.write("1000")
            if self._layers["namespaces"]:
                kernel_layers.enter_namespaces()
                if self._port:
                    with port_forwarder.listen_in_namespace(self._port) as listener:
                        socket.send_fds(self._inside, [b"l"], [listener.fileno()])
                self._inside.close()
                if inner := os.fork():
                    self._wait_outside(inner)
                kernel_layers.end_with_parent()
                request = self._request
                kernel_layers.change_root(request["root"], request["readable"], request["folder"])
                if inner := os.fork():
                    self._be_first_process(inner)
            self._become_program()
        except BaseException as error:
            os.write(self._reported, f"{type(error).__name__}: {error}".encode()[:4000])
            os._exit(_FAILED_TO_START)

    def _wait_outside(self, inner: int) -> None:
        os.close(self._reported)
        for stream in (0, 1, 2):
            os.close(stream)
        os.waitpid(inner, 0)
        os._exit(0)

    def _be_first_process(self, program: int) -> None:
        """Reap all until the program has ended; the end of this process then ends all others."""
        kernel_layers.prctl(4, 0, "dumpable")
        os.closerange(0, 3)
        while True:
            pid, status = os.waitpid(-1, 0)
            if pid == program:
                os.write(self._reported, f"status={status}".encode())
                os._exit(0)

    def _become_program(self) -> None:
        os.setsid()
        request = self._request
        kernel_layers.set_limits(request["rlimits"])
        kernel_layers.become_user(request["user"])
        kernel_layers.no_new_privileges()
        os.chdir(request["folder"])
        if self._layers["landlock"]:
            kernel_layers.restrict_files(request["readable"], request["folder"], self._port)
        kernel_layers.drop_capabilities()
        for number in range(1, signal.NSIG):
            with contextlib.suppress(OSError, ValueError):
                signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        os.set_inheritable(self._reported, False)
        os.closerange(3, self._reported)
        os.closerange(self._reported + 1, 1 << 10)
        if self._layers["seccomp"]:
            on_the_host = not self._layers["namespaces"]
            program = system_call_filter.filter_program(on_the_host, connects=bool(self._port))
            system_call_filter.install(program)
        command = request["command"]
        try:
            os.execvpe(command[0], command, request["environment"])
        except OSError as error:  # as a shell does
            os.write(2, f"{command[0]}: {error.strerror}\n".encode())
            os._exit(127)


def _folder_exceeds(folder: str, limit: int) -> bool:
    """Whether a folder's files have more bytes, or are more than ``_ENTRY_LIMIT``."""
    size, entries, folders = 0, 0, [folder]
    while folders:
        with contextlib.suppress(OSError), os.scandir(folders.pop()) as listed:
            for entry in listed:
                entries += 1
                with contextlib.suppress(OSError):
                    size += entry.stat(follow_symlinks=False).st_blocks * 512
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)
                if size > limit or entries > _ENTRY_LIMIT:
                    return True
    return False


if __name__ == "__main__":
    main(int(sys.argv[1]))
