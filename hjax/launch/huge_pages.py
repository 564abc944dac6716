"""Huge pages for temporary memory on CPUs: re-executes the command with glibc tunables.

Has no slow imports: a command calls this first, and it may re-execute the command.
"""

import os
import sys
from pathlib import Path

from hjax.machine import only_cpus

# Which memory gets huge pages: [always], [madvise] (where a program requests them), or [never].
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
# Use huge pages, and keep freed memory instead of returning it to the kernel. One arena for all
# threads: large blocks do not fit into the arenas of other threads and would be mapped each time.
TUNABLES = (
    "glibc.malloc.hugetlb=1:glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold=1000000000000:"
    "glibc.malloc.arena_max=1"
)
# If one of these is set, the user has configured malloc.
_MALLOC_VARIABLES = ("GLIBC_TUNABLES", "MALLOC_ARENA_MAX", "MALLOC_MMAP_THRESHOLD_")


def use_huge_pages() -> None:
    """Re-execute this process with glibc tunables for huge pages, where that helps.

    A compiled program on the CPU allocates its temporary memory in each run, and the kernel maps it
    page by page. That takes a fifth of a small model's step with pages of 4 KiB, and little with
    pages of 2 MiB. Many simulated devices that map memory at the same time wait for each other, for
    up to half of an update, unless the pages of the previous run are still mapped; so the process
    keeps its peak memory. glibc (from 2.35) reads the tunables only when a process starts, hence
    the re-execution; the process id and the output stay the same. Nothing is done with another C
    library, with a kernel that gives huge pages to all or no memory, where JAX may find an
    accelerator, or where the environment configures malloc.
    """
    if huge_pages_available():
        environment = {**os.environ, "GLIBC_TUNABLES": TUNABLES}
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)


def huge_pages_available() -> bool:
    """Whether glibc could use huge pages in this process and is not configured to."""
    if not only_cpus() or any(name in os.environ for name in _MALLOC_VARIABLES):
        return False
    try:
        library, version = os.confstr("CS_GNU_LIBC_VERSION").split()  # type: ignore[union-attr]
        offered = "[madvise]" in _HUGE_PAGES.read_text()
    except (AttributeError, OSError, ValueError):
        return False  # no glibc, or no such kernel
    return offered and tuple(map(int, version.split(".")[:2])) >= (2, 35)
