"""What the command sets before JAX starts: huge pages for large blocks, a quick compiler."""

import importlib.metadata
import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import conftest
import pytest

from hjax.launch import huge_pages, machine

# Prints the tunables it runs with, the pages that the kernel mapped during ten runs of a program
# with a temporary array of 12 thousand small ones, its arguments and its XLA_FLAGS.
PROGRAM = """
import json, os, resource, sys
from hjax.launch.huge_pages import use_huge_pages
from hjax.launch.machine import compile_quickly
if sys.argv[1] == "huge":
    use_huge_pages()
compile_quickly()
import jax, jax.numpy as jnp
x = jnp.ones((3500, 4))
run = jax.jit(lambda x: jnp.tanh(x @ x.T) @ x)
for _ in range(10):
    run(x).block_until_ready()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    run(x).block_until_ready()
pages = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
print(json.dumps([os.environ.get("GLIBC_TUNABLES"), pages, sys.argv, os.environ["XLA_FLAGS"]]))
"""
# Variables that decide, and those that only_cpus and huge_pages_wait read.
DECIDING = ("MALLOC", "GLIBC", "XLA_FLAGS", "JAX_PLATFORMS")


def offered() -> bool:
    """Whether this kernel gives huge pages to who asks, and this C library knows how to ask."""
    try:
        version = os.confstr("CS_GNU_LIBC_VERSION").split()[1]
        pages = pathlib.Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
    except (AttributeError, IndexError, OSError, ValueError):
        return False
    return "[madvise]" in pages and float(version) >= 2.35


def run_program(folder: pathlib.Path, *args: str, **variables: str) -> list:
    """What PROGRAM prints, run as a file with these arguments and variables."""
    file = folder / "program.py"
    file.write_text(PROGRAM)
    environment = {k: v for k, v in os.environ.items() if not k.startswith(DECIDING)}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(file), *args],
        env={**environment, "JAX_PLATFORMS": "cpu", **variables},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.skipif(not offered(), reason="huge pages are not for programs to ask for here")
def test_a_programs_memory_is_mapped_in_huge_pages(tmp_path):
    tunables, without, _, _ = run_program(tmp_path, "small")
    assert tunables is None
    assert without > 100_000
    tunables, pages, args, _ = run_program(tmp_path, "huge", "an argument with spaces")
    assert tunables == "glibc.malloc.hugetlb=1"
    assert args[1:] == ["huge", "an argument with spaces"]
    assert pages < without / 10


def test_a_users_own_settings_stay(tmp_path):
    own = {"MALLOC_ARENA_MAX": "4", "XLA_FLAGS": "--xla_backend_optimization_level=2"}
    tunables, _, _, flags = run_program(tmp_path, "huge", **own)
    assert tunables is None
    assert flags == own["XLA_FLAGS"]


def test_other_flags_are_kept_beside_the_level(tmp_path):
    own = "--xla_force_host_platform_device_count=2"
    flags = run_program(tmp_path, "small", XLA_FLAGS=own)[3]
    assert flags.split() == [own, "--xla_backend_optimization_level=1"]


@pytest.mark.parametrize(
    ("named", "plugins", "expected"),
    [
        ("cpu", ["cuda"], True),
        ("cpu,cuda", [], True),
        ("tpu,cpu", [], False),
        ("", ["cuda"], False),
        ("", [], True),
    ],
)
def test_whether_only_cpus_are_there(monkeypatch, named, plugins, expected):
    monkeypatch.setenv("JAX_PLATFORMS", named)
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: plugins)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert huge_pages.only_cpus() is expected


def test_an_installed_accelerator_plugin_leaves_the_compiler_alone(monkeypatch):
    found = {"libtpu": object()}
    monkeypatch.delenv("JAX_PLATFORMS")
    monkeypatch.setenv("XLA_FLAGS", "")
    monkeypatch.setattr(importlib.util, "find_spec", found.get)
    machine.compile_quickly()
    assert os.environ["XLA_FLAGS"] == ""


def test_the_suite_asks_the_compiler_for_its_flags(monkeypatch, tmp_path):
    """By a process that dies of a flag it does not know; the answer is kept."""
    monkeypatch.setattr(conftest, "CACHE_ROOT", tmp_path)
    assert conftest.xla_knows("--xla_backend_optimization_level=0")
    assert not conftest.xla_knows("--xla_no_such_flag=1")
    kept = {file.name: file.read_text() for file in tmp_path.rglob("*") if file.is_file()}
    assert kept == {"xla_backend_optimization_level=0": "known", "xla_no_such_flag=1": "unknown"}
    monkeypatch.setattr(conftest.subprocess, "run", None)
    assert not conftest.xla_knows("--xla_no_such_flag=1")


def test_a_broken_installation_is_no_answer(monkeypatch, tmp_path):
    monkeypatch.setattr(conftest, "CACHE_ROOT", tmp_path)
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(pytest.UsageError, match="asking jaxlib for --xla_f=1 failed"):
        conftest.xla_knows("--xla_f=1")
    assert not list(tmp_path.iterdir())
