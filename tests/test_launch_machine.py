"""What the command sets before JAX starts: memory that programs free is kept for their next run."""

import json
import os
import subprocess
import sys

import pytest

# Prints whether memory is kept, and the pages that the kernel mapped during ten runs of a program
# with a temporary array of 12 thousand of them.
PROGRAM = """
import json, resource
from hjax.launch.machine import keep_freed_memory
kept = keep_freed_memory() if KEEP else None
import jax, jax.numpy as jnp
x = jnp.ones((3500, 4))
run = jax.jit(lambda x: jnp.tanh(x @ x.T) @ x)
for _ in range(10):
    run(x).block_until_ready()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    run(x).block_until_ready()
print(json.dumps([kept, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before]))
"""
GLIBC = sys.platform == "linux" and "glibc" in os.confstr("CS_GNU_LIBC_VERSION").lower()


def kept_and_pages(keep: bool, **variables: str) -> list:
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("MALLOC", "GLIBC"))}
    code = PROGRAM.replace("KEEP", str(keep))
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**environment, "JAX_PLATFORMS": "cpu", **variables},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.skipif(not GLIBC, reason="memory is kept by glibc's malloc")
def test_a_programs_memory_is_mapped_once():
    _, without = kept_and_pages(keep=False)
    kept, pages = kept_and_pages(keep=True)
    assert kept is True
    assert without > 100_000
    assert pages < without / 3  # a few at most, where another allocation split the kept block


def test_a_users_own_settings_of_malloc_stay():
    assert kept_and_pages(keep=True, MALLOC_ARENA_MAX="4")[0] is False
