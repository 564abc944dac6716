"""Huge pages, and such as stay, for the memory that programs on CPUs take anew in each run.

Imports nothing that takes long: a command calls this first, and may start anew.
"""

import os
import sys
from pathlib import Path

from hjax.machine import only_cpus

# Which memory gets huge pages: [always], [madvise]: what programs ask them for, or [never].
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
# Huge pages; and what is freed is kept for the next run instead of going back to the kernel. One
# arena for all threads: other threads' own have no room for large blocks, which are then mapped
# anew each time.
TUNABLES = (
    "glibc.malloc.hugetlb=1:glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold=1000000000000:"
    "glibc.malloc.arena_max=1"
)
# By these users set malloc's ways themselves.
_MALLOC_VARIABLES = ("GLIBC_TUNABLES", "MALLOC_ARENA_MAX", "MALLOC_MMAP_THRESHOLD_")


def use_huge_pages() -> None:
    """Start this process anew with glibc told to ask for huge pages and to keep them, where that is
    of use.

    A program on the CPU takes its temporary memory anew in each run, which the kernel then maps
    page by page: a fifth of a small model's step in pages of 4 KiB, little in those of 2 MiB. Where
    many simulated devices do so at a time they wait for each other, up to half of an update's time,
    unless the pages of the run before are still there: so the process keeps what it has had at its
    peak. glibc (2.35 on) reads the setting once, as a process starts; the command, its process id
    and its output stay the same. Nothing is done where it would change nothing (another C library,
    a kernel that gives huge pages to all or to none), where JAX may find an accelerator, and where
    the environment sets malloc's ways.
    """
    if huge_pages_wait():
        environment = {**os.environ, "GLIBC_TUNABLES": TUNABLES}
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)


def huge_pages_wait() -> bool:
    """Whether glibc could give this process huge pages, and has not been told to."""
    if not only_cpus() or any(name in os.environ for name in _MALLOC_VARIABLES):
        return False
    try:
        library, version = os.confstr("CS_GNU_LIBC_VERSION").split()  # type: ignore[union-attr]
        offered = "[madvise]" in _HUGE_PAGES.read_text()
    except (AttributeError, OSError, ValueError):
        return False  # no glibc, or no such kernel
    return offered and tuple(map(int, version.split(".")[:2])) >= (2, 35)
