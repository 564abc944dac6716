"""A seccomp filter of system calls, as a classic BPF program, for x86_64 and aarch64.

All is allowed but what is listed here, which fails with EPERM. The tables are the kernel's
(``asm/unistd_64.h`` and ``asm-generic/unistd.h``).
"""

import ctypes
import os
import platform
import struct

# Numbers by name, for x86_64 and aarch64; None: the architecture has none.
_ALWAYS_DENIED: dict[str, tuple[int | None, int | None]] = {
    # sockets of any kind, also pairs: a datagram pair can send to others' sockets
    "socket": (41, 198), "socketpair": (53, 199), "connect": (42, 203), "bind": (49, 200),
    "listen": (50, 201), "accept": (43, 202), "accept4": (288, 242),
    # other processes
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271),
    "process_madvise": (440, 440), "kcmp": (312, 272), "pidfd_open": (434, 434),
    "pidfd_getfd": (438, 438), "pidfd_send_signal": (424, 424), "migrate_pages": (256, 238),
    "move_pages": (279, 239),
    # namespaces, mounts, files by handle
    "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40), "umount2": (166, 39),
    "pivot_root": (155, 41), "chroot": (161, 51), "move_mount": (429, 429),
    "open_tree": (428, 428), "fsopen": (430, 430), "fsconfig": (431, 431), "fsmount": (432, 432),
    "fspick": (433, 433), "mount_setattr": (442, 442), "open_tree_attr": (467, 467),
    "open_by_handle_at": (304, 265), "name_to_handle_at": (303, 264), "fanotify_init": (300, 262),
    # parts of the kernel with many errors, and what only administrators need
    "bpf": (321, 280), "io_uring_setup": (425, 425), "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427), "keyctl": (250, 219), "add_key": (248, 217),
    "request_key": (249, 218), "perf_event_open": (298, 241), "userfaultfd": (323, 282),
    "kexec_load": (246, 104), "kexec_file_load": (320, 294), "init_module": (175, 105),
    "finit_module": (313, 273), "delete_module": (176, 106), "reboot": (169, 142),
    "swapon": (167, 224), "swapoff": (168, 225), "sethostname": (170, 161),
    "setdomainname": (171, 162), "acct": (163, 89), "settimeofday": (164, 170),
    "clock_settime": (227, 112), "clock_adjtime": (305, 266), "adjtimex": (159, 171),
    "iopl": (172, None), "ioperm": (173, None), "modify_ldt": (154, None), "quotactl": (179, 60),
    "quotactl_fd": (443, 443), "syslog": (103, 116), "vhangup": (153, 58),
    # memory and messages that outlive a process or that no limit counts
    "memfd_create": (319, 279), "memfd_secret": (447, 447), "shmget": (29, 194),
    "shmat": (30, 196), "shmctl": (31, 195), "msgget": (68, 186), "semget": (64, 190),
    "mq_open": (240, 180), "mq_unlink": (241, 181),
}  # fmt: skip
# Landlock does not know these: they change files that can only be named, or other processes.
_DENIED_ON_THE_HOST: dict[str, tuple[int | None, int | None]] = {
    "chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452),
    "chown": (92, None), "fchown": (93, 55), "lchown": (94, None), "fchownat": (260, 54),
    "setxattr": (188, 5), "lsetxattr": (189, 6), "fsetxattr": (190, 7), "removexattr": (197, 14),
    "lremovexattr": (198, 15), "fremovexattr": (199, 16), "utime": (132, None),
    "utimes": (235, None), "futimesat": (261, None), "utimensat": (280, 88), "truncate": (76, 45),
    "setxattrat": (463, 463), "removexattrat": (466, 466), "file_setattr": (469, 469),
    "setpriority": (141, 140), "ioprio_set": (251, 30),
}  # fmt: skip
# Their first argument names a process; allowed for the calling program's own.
_OWN_PROCESS_ONLY: dict[str, tuple[int | None, int | None]] = {
    "kill": (62, 129), "tkill": (200, 130), "tgkill": (234, 131), "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240), "prlimit64": (302, 261), "sched_setaffinity": (203, 122),
    "sched_setscheduler": (144, 119), "sched_setparam": (142, 118), "sched_setattr": (314, 274),
}  # fmt: skip
# Those of a program that may reach a port: streams of this family, made by the first.
_STREAMS = {"socket": 2, "socketpair": 1}  # IPv4; unix, as event loops need a pair
_CLONE, _CLONE3 = (56, 220), (435, 435)
_SECCOMP = (317, 277)
# CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET.
_NAMESPACE_FLAGS = 0x7E020000
_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}

_LOAD, _JUMP_EQUAL, _JUMP_AT_LEAST, _JUMP_ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_AND = 0x54
_ALLOW, _ERROR, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_EPERM, _ENOSYS = 1, 38
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT, _SECOND_ARGUMENT = 0, 4, 16, 24  # in seccomp_data


def supported() -> bool:
    """Whether there is a table for this machine's architecture."""
    return platform.machine() in _ARCHITECTURES


def filter_program(on_the_host: bool, machine: str = "", connects: bool = False) -> bytes:
    """The filter as BPF instructions.

    Args:
      on_the_host: the program sees the host's files and processes, for want of namespaces: also
        deny what changes files by name, and signals and settings of other processes.
      machine: the architecture; empty: this machine's.
      connects: the program may connect by TCP over IPv4; whereto, another layer says.
    """
    column, audit_architecture = _ARCHITECTURES[machine or platform.machine()]
    denied = dict(_ALWAYS_DENIED, **(_DENIED_ON_THE_HOST if on_the_host else {}))
    streams = {denied.pop(name)[column]: kind for name, kind in _STREAMS.items() if connects}
    if connects:
        del denied["connect"]
    steps = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_JUMP_EQUAL, 1, 0, audit_architecture),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
        (_JUMP_AT_LEAST, 0, 1, 0x40000000),  # x32's calls
        (_RETURN, 0, 0, _ERROR | _ENOSYS),
        (_JUMP_EQUAL, 0, 1, _CLONE3[column]),  # its flags are in memory; libraries then use clone
        (_RETURN, 0, 0, _ERROR | _ENOSYS),
        (_JUMP_EQUAL, 0, 4, _CLONE[column]),
        (_LOAD, 0, 0, _FIRST_ARGUMENT),
        (_JUMP_ANY_BIT, 0, 1, _NAMESPACE_FLAGS),
        (_RETURN, 0, 0, _ERROR | _EPERM),
        (_RETURN, 0, 0, _ALLOW),
    ]
    for number, family in streams.items():
        steps += [
            (_JUMP_EQUAL, 0, 7, number or 0),
            (_LOAD, 0, 0, _FIRST_ARGUMENT),
            (_JUMP_EQUAL, 0, 3, family),
            (_LOAD, 0, 0, _SECOND_ARGUMENT),
            (_AND, 0, 0, 0xF),  # without its flags
            (_JUMP_EQUAL, 1, 0, 1),  # SOCK_STREAM
            (_RETURN, 0, 0, _ERROR | _EPERM),
            (_RETURN, 0, 0, _ALLOW),
        ]
    for numbers in denied.values():
        if (number := numbers[column]) is not None:
            steps += [(_JUMP_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ERROR | _EPERM)]
    if on_the_host:
        for numbers in _OWN_PROCESS_ONLY.values():
            steps += [
                (_JUMP_EQUAL, 0, 5, numbers[column] or 0),
                (_LOAD, 0, 0, _FIRST_ARGUMENT),
                (_JUMP_EQUAL, 2, 0, 0),
                (_JUMP_EQUAL, 1, 0, os.getpid()),
                (_RETURN, 0, 0, _ERROR | _EPERM),
                (_RETURN, 0, 0, _ALLOW),
            ]
    steps.append((_RETURN, 0, 0, _ALLOW))
    return b"".join(struct.pack("HBBI", *step) for step in steps)


def install(program: bytes) -> None:
    """Filter this process's system calls, and those of all it starts. No new privileges first.

    Raises:
      OSError: the kernel has no seccomp filters, or forbids them.
    """

    class FilterProgram(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("steps", ctypes.c_void_p)]

    buffer = ctypes.create_string_buffer(program)
    passed = FilterProgram(len(program) // 8, ctypes.addressof(buffer))
    libc = ctypes.CDLL(None, use_errno=True)
    number = _SECCOMP[_ARCHITECTURES[platform.machine()][0]]
    if libc.syscall(number, 1, 0, ctypes.byref(passed)):  # SECCOMP_SET_MODE_FILTER
        raise OSError(ctypes.get_errno(), "seccomp")
