"""The kernel's means to confine a process, by ctypes: Landlock, namespaces, capabilities, limits.

All of it is for processes that the launcher has forked, never for the process of a run.
"""

import contextlib
import ctypes
import os
import resource
import struct
from collections.abc import Callable, Sequence

from hjax.sandbox import system_call_filter

_libc = ctypes.CDLL(None, use_errno=True)
_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446
# Rights of Landlock: execute, read a file, read a directory; all up to each version of its ABI.
_READ_RIGHTS, _DEVICE_RIGHTS = 0b1101, 0b110
_FILE_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15}
_NEW_USER, _NEW_PID, _NEW_NET = 0x10000000, 0x20000000, 0x40000000
_NEW_MOUNT, _NEW_IPC = 0x00020000, 0x08000000
_NAMESPACES = _NEW_PID | _NEW_NET | _NEW_MOUNT | _NEW_IPC
_READ_ONLY, _NO_SUID, _NO_DEVICES, _REMOUNT = 1, 2, 4, 32
_BIND, _RECURSIVE, _PRIVATE, _DETACH = 4096, 16384, 1 << 18, 2
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
_SYSTEM = (
    "/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache", "/etc/localtime",
    "/etc/alternatives",
)  # fmt: skip
_INNER_USER = 1000
# Users without name from here on, one for each sandbox of a process that may change its user.
SANDBOX_USERS = 0x70000000


def _check(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def prctl(option: int, value: int, what: str) -> None:
    """``prctl`` with one argument."""
    _check(_libc.prctl(option, value, 0, 0, 0), what)


def no_new_privileges() -> None:
    """No program started from here gains rights (setuid files, file capabilities)."""
    prctl(38, 1, "no_new_privs")


def end_with_parent() -> None:
    """Be killed when the parent ends."""
    prctl(1, 9, "pdeathsig")


def adopt_orphans() -> None:
    """Orphaned descendants become children of this process."""
    prctl(36, 1, "child_subreaper")


def landlock_version() -> int:
    """The version of Landlock's ABI; 0: there is none."""
    return max(_libc.syscall(_LANDLOCK_CREATE, None, 0, 1), 0)


def restrict_files(readable: Sequence[str], writable: str, port: int = 0) -> None:
    """Landlock: these paths can be read and executed, one folder is writable, nothing else opens.

    TCP is refused from version 4 of the ABI, but for connections to ``port``; signals and abstract
    sockets of others from 6.
    """
    version = landlock_version()
    every = (1 << _FILE_RIGHTS.get(version, 16)) - 1
    attributes = struct.pack("QQQ", every, 3 if version >= 4 else 0, 3 if version >= 6 else 0)
    size = 8 if version < 4 else 16 if version < 6 else 24
    rules = _check(_libc.syscall(_LANDLOCK_CREATE, attributes, size, 0), "Landlock")
    for path, rights in [
        *((path, _READ_RIGHTS) for path in readable),
        *((path, _DEVICE_RIGHTS) for path in _DEVICES),
        (writable, every),
    ]:
        try:
            handle = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        rights &= every if os.path.isdir(path) else 0b111
        rule = struct.pack("=Qi", rights, handle)
        _check(_libc.syscall(_LANDLOCK_ADD, rules, 1, rule, 0), f"Landlock for {path}")
        os.close(handle)
    if port and version >= 4:
        rule = struct.pack("QQ", 2, port)  # connect
        _check(_libc.syscall(_LANDLOCK_ADD, rules, 2, rule, 0), f"Landlock for port {port}")
    _check(_libc.syscall(_LANDLOCK_RESTRICT, rules, 0), "Landlock")
    os.close(rules)


def system_paths() -> list[str]:
    """Paths of the system that programs need, of those that exist."""
    return [path for path in _SYSTEM if os.path.lexists(path)]


def enter_namespaces() -> None:
    """New network, pid, mount and ipc namespaces; in a user namespace where not allowed without.

    The next child is the first process of the pid namespace.
    """
    if _libc.unshare(_NAMESPACES) == 0:
        return
    user, group = os.getuid(), os.getgid()
    _check(_libc.unshare(_NEW_USER | _NAMESPACES), "namespaces")
    with open("/proc/self/setgroups", "w") as file:
        file.write("deny")
    for name, outer in (("uid_map", user), ("gid_map", group)):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(f"{_INNER_USER} {outer} 1")


def change_root(root: str, readable: Sequence[str], writable: str) -> None:
    """In a new mount namespace: see nothing but these paths, one folder of them writable.

    Args:
      root: an empty folder, on which a file system in memory is mounted.
      readable: paths; symbolic links are copied.
      writable: the folder; it keeps its path.
    """
    _mount(None, "/", None, _RECURSIVE | _PRIVATE)
    _mount("tmpfs", root, "tmpfs", _NO_SUID | _NO_DEVICES, "size=1m,mode=755")
    for path in sorted({*readable, *_DEVICES, writable}, key=len):
        inside = root + path
        if os.path.lexists(inside) or not os.path.lexists(path):
            continue
        os.makedirs(os.path.dirname(inside), mode=0o755, exist_ok=True)
        if os.path.islink(path):
            os.symlink(os.readlink(path), inside)
            continue
        if os.path.isdir(path):
            os.mkdir(inside)
        else:
            os.close(os.open(inside, os.O_CREAT))
        _mount(path, inside, None, _BIND | _RECURSIVE)
        flags = os.statvfs(inside).f_flag & 0x40F  # what is set on it must stay
        flags |= _NO_SUID | (0 if path in _DEVICES else _NO_DEVICES)
        flags |= 0 if path == writable or path in _DEVICES else _READ_ONLY
        _mount(None, inside, None, _BIND | _REMOUNT | flags)
    _mount(None, root, None, _REMOUNT | _READ_ONLY | _NO_SUID | _NO_DEVICES)
    os.chdir(root)
    _check(_libc.syscall(_PIVOT_ROOT[os.uname().machine], b".", b"."), "pivot_root")
    _check(_libc.umount2(b".", _DETACH), "umount")
    os.chdir("/")


def _mount(
    source: str | None, target: str, kind: str | None, flags: int, options: str | None = None
) -> None:
    texts = [None if t is None else os.fsencode(t) for t in (source, target, kind, options)]
    result = _libc.mount(texts[0], texts[1], texts[2], ctypes.c_ulong(flags), texts[3])
    _check(result, f"mount {target}")


def become_user(user: int) -> None:
    """Change to a user and group without files or processes; 0: stay."""
    if user:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)


def drop_capabilities() -> None:
    """Lose all capabilities, for programs that are started too."""
    if os.geteuid() == 0:
        with contextlib.suppress(OSError):
            prctl(28, 0b11, "securebits")  # root's programs gain none
        for capability in range(64):
            if _libc.prctl(24, capability, 0, 0, 0):  # not in the bounding set
                break
    header, nothing = struct.pack("Ii", 0x20080522, 0), bytes(24)
    _check(_libc.capset(header, nothing), "capset")


def set_limits(limits: dict[str, int]) -> None:
    """Limits of this process and of each that it starts.

    Args:
      limits: numbers by name of ``resource``'s constants without ``RLIMIT_``.
    """
    for name, value in {**limits, "CORE": 0, "MSGQUEUE": 0, "MEMLOCK": 0}.items():
        kind = getattr(resource, f"RLIMIT_{name}")
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        later = value + 1 if name == "CPU" and hard == resource.RLIM_INFINITY else value
        resource.setrlimit(kind, (value, later))


def probe(root: str) -> dict[str, int]:
    """Which layers work here, each tried in a process of its own.

    Args:
      root: an empty folder.

    Returns:
      ``landlock`` (the ABI's version), ``seccomp``, ``namespaces`` and ``users``, that is whether
      a program can have a user of its own (0 or 1).
    """

    def filters() -> None:
        no_new_privileges()
        system_call_filter.install(system_call_filter.filter_program(on_the_host=True))

    def spaces() -> None:
        enter_namespaces()
        if child := os.fork():
            raise SystemExit(os.waitpid(child, 0)[1] != 0)
        change_root(root, system_paths(), root)

    version = landlock_version()

    def landlock() -> None:
        no_new_privileges()
        restrict_files(system_paths(), root)

    return {
        "landlock": version if version and _works(landlock) else 0,
        "seccomp": int(system_call_filter.supported() and _works(filters)),
        "users": int(os.geteuid() == 0 and _works(lambda: become_user(SANDBOX_USERS))),
        "namespaces": int(os.uname().machine in _PIVOT_ROOT and _works(spaces)),
    }


def _works(attempt: Callable[[], None]) -> bool:
    child = os.fork()
    if not child:
        try:
            attempt()
        except SystemExit as error:
            os._exit(int(bool(error.code)))
        except BaseException:
            os._exit(1)
        os._exit(0)
    return os.waitpid(child, 0)[1] == 0
