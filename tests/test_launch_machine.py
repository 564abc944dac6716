"""What the command sets before JAX starts: huge pages for large blocks, a quick compiler."""

import importlib.metadata
import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import types

import conftest
import jax
import pytest

import hjax.machine
from hjax.launch import huge_pages, jax_setup

# Prints the tunables it runs with, the pages that the kernel mapped during ten runs of a program
# with a temporary array of 12 thousand small ones, its arguments and its XLA_FLAGS.
PROGRAM = """
import json, os, resource, sys
from hjax.launch.huge_pages import use_huge_pages
from hjax.launch.jax_setup import compile_quickly
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
# Variables that decide, and those that only_cpus and huge_pages_available read.
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
@pytest.mark.extended
def test_a_programs_memory_is_mapped_in_huge_pages(tmp_path):
    tunables, without, _, _ = run_program(tmp_path, "small")
    assert tunables is None
    assert without > 100_000
    tunables, pages, args, _ = run_program(tmp_path, "huge", "an argument with spaces")
    assert tunables == huge_pages.TUNABLES
    assert args[1:] == ["huge", "an argument with spaces"]
    assert pages < without / 10


# GRPO that writes down how many pages the kernel mapped during each update.
COUNTED = """
import pathlib, resource
import hjax

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

class Counted(hjax.algorithms.GRPO):
    def minibatches(self, batch):
        for minibatch in super().minibatches(batch):
            before = faults()
            yield minibatch
            self.logged[-1][1].result()
            with pathlib.Path(__file__).with_name("faults.txt").open("a") as file:
                file.write(f"{faults() - before}\\n")
"""
UPDATES = {
    "steps": 5, "warm_start.steps": 0, "eval.every": 0, "checkpoint.every": 0,
    "display.enabled": False, "display.tensorboard": False, "display.report": False,
    "model.hidden_size": 256, "model.mlp_size": 688, "model.layers": 4, "rollout.samples": 8,
    "algorithm.kl_coef": 0.0, "algorithm.minibatch": 0, "algorithm.epochs": 1,
}  # fmt: skip


@pytest.mark.skipif(not offered(), reason="huge pages are not for programs to ask for here")
@pytest.mark.extended
def test_an_updates_memory_is_not_mapped_anew(tmp_path):
    (tmp_path / "counted.py").write_text(COUNTED)
    keys = UPDATES | {"algorithm.name": f"{tmp_path}/counted.py:Counted"}
    command = [sys.executable, "-m", "hjax.launch", "--config=grpo.py", f"--workdir={tmp_path}/run"]
    environment = {k: v for k, v in os.environ.items() if not k.startswith(DECIDING)}
    done = subprocess.run(
        [*command, *(f"--config.{key}={value}" for key, value in keys.items())],
        env={**environment, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr
    faults = [int(line) for line in (tmp_path / "faults.txt").read_text().split()]
    # The dataflow is read off once before the steps, without an update.
    assert len(faults) >= 5
    assert max(faults[-3:]) < 200  # 759 and more with an arena for each thread; now 0 to 51


@pytest.mark.extended
def test_a_users_own_settings_stay(tmp_path):
    own = {"MALLOC_ARENA_MAX": "4", "XLA_FLAGS": "--xla_backend_optimization_level=2"}
    tunables, _, _, flags = run_program(tmp_path, "huge", **own)
    assert tunables is None
    assert flags == own["XLA_FLAGS"]


@pytest.mark.extended
def test_other_flags_are_kept_beside_the_level(tmp_path):
    own = "--xla_force_host_platform_device_count=2"
    flags = run_program(tmp_path, "small", XLA_FLAGS=own)[3]
    assert flags.split() == [own, "--xla_backend_optimization_level=1"]


@pytest.mark.skipif(
    not pathlib.Path("/proc/self/task").is_dir(), reason="Linux lists threads there"
)
@pytest.mark.parametrize(
    ("devices", "own", "expected"),
    [(64, {}, 256), (64, {"PJRT_NPROC": "65"}, 65), (1, {}, hjax.machine.available_cores())],
)
@pytest.mark.extended
def test_simulated_devices_have_threads_to_wait_in(devices, own, expected):
    program = (
        "import pathlib, sys; from hjax.machine import simulated_devices\n"
        "simulated_devices(int(sys.argv[1]))\n"
        "names = [p.read_text() for p in pathlib.Path('/proc/self/task').glob('*/comm')]\n"
        "print(sum('XLAEigen' in name for name in names))"
    )
    environment = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "PJRT_NPROC")}
    done = subprocess.run(
        [sys.executable, "-c", program, str(devices)],
        env=environment | own, capture_output=True, text=True, timeout=240, check=True,
    )  # fmt: skip
    assert int(done.stdout) == expected


NVIDIA, GOOGLE, OTHER = "dev/nvidia0", "sys/bus/pci/devices/0000:00:05.0/vendor", "dev/null"


@pytest.fixture
def machine_with(monkeypatch, tmp_path):
    """A machine where JAX has these plugins and Linux shows this file."""

    def make(plugins, file=OTHER, named=None):
        (tmp_path / file).parent.mkdir(parents=True)
        (tmp_path / file).write_text("0x1ae0\n" if file == GOOGLE else "")
        modules = {"libtpu": object()} if "libtpu" in plugins else {}
        points = [types.SimpleNamespace(name=name) for name in plugins if name != "libtpu"]
        monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: points)
        monkeypatch.setattr(importlib.util, "find_spec", modules.get)
        monkeypatch.setattr(hjax.machine, "Path", lambda path: tmp_path / path.lstrip("/"))
        monkeypatch.delenv("TPU_LIBRARY_PATH", raising=False)
        monkeypatch.delenv("JAX_PLATFORMS")
        if named is not None:
            monkeypatch.setenv("JAX_PLATFORMS", named)

    return make


@pytest.mark.parametrize(
    ("named", "plugins", "file", "expected"),
    [
        ("cpu", ["xla_cuda13"], NVIDIA, True),
        ("cpu,cuda", [], NVIDIA, True),
        ("tpu,cpu", [], OTHER, False),
        ("", ["xla_cuda13"], NVIDIA, False),
        ("", ["xla_cuda13", "libtpu"], GOOGLE, False),
        # Compilers alone; hardware that JAX has no plugin for.
        ("", ["xla_cuda13", "libtpu"], OTHER, True),
        ("", [], NVIDIA, True),
        (None, [], OTHER, True),
        # Who knows where that one finds its hardware.
        ("", ["xla_cuda13", "another"], OTHER, False),
    ],
)
def test_whether_only_cpus_are_there(machine_with, named, plugins, file, expected):
    machine_with(plugins, file, named)
    assert huge_pages.only_cpus() is expected


def test_where_there_may_be_an_accelerator_the_compiler_is_left_alone(machine_with, monkeypatch):
    machine_with(["libtpu"], GOOGLE)
    monkeypatch.setenv("XLA_FLAGS", "")
    jax_setup.compile_quickly()
    assert os.environ["XLA_FLAGS"] == ""


@pytest.mark.parametrize("file, platforms", [(OTHER, "cpu"), (NVIDIA, None)])
def test_jax_does_not_look_for_what_is_not_there(machine_with, monkeypatch, file, platforms):
    machine_with(["xla_cuda13", "libtpu"], file)
    options = types.SimpleNamespace(jax_platforms=None)
    options.update = lambda name, value: setattr(options, name, value)
    monkeypatch.setattr(jax, "config", options)
    hjax.machine.pin_platform()
    assert options.jax_platforms == platforms
    options.jax_platforms = "cuda"  # a user's own word stays
    hjax.machine.pin_platform()
    assert options.jax_platforms == "cuda"


@pytest.mark.extended
def test_the_suite_asks_the_compiler_for_its_flags(monkeypatch, tmp_path):
    """By a process that dies of a flag it does not know; the answer is kept."""
    monkeypatch.setattr(conftest, "CACHE_ROOT", tmp_path)
    flag = "--xla_backend_optimization_level=0"
    assert conftest.known_flags([flag, "--xla_no_such_flag=1"]) == [flag]
    assert conftest.known_flags([flag]) == [flag]
    kept = {file.name: file.read_text() for file in tmp_path.rglob("--*")}
    assert kept == {flag: flag, f"{flag} --xla_no_such_flag=1": flag}
    monkeypatch.setattr(conftest.subprocess, "run", None)
    assert conftest.known_flags([flag, "--xla_no_such_flag=1"]) == [flag]


def test_a_broken_installation_is_no_answer(monkeypatch, tmp_path):
    monkeypatch.setattr(conftest, "CACHE_ROOT", tmp_path)
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(pytest.UsageError, match=r"asking jaxlib for \['--xla_f=1'\] failed"):
        conftest.known_flags(["--xla_f=1"])
    assert not list(tmp_path.rglob("--*"))


def test_of_a_process_that_ends_meanwhile_there_are_no_children(monkeypatch):
    def ended(path):
        raise FileNotFoundError(path)

    monkeypatch.setattr(os, "scandir", ended)
    assert hjax.machine.children(os.getpid()) == []
