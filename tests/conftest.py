"""The suite's machine: 8 simulated CPU devices, float32, one compilation cache for all tests.

Set here, before any test module is imported, because a JAX backend that has started keeps its
devices. Compiled programs are kept between sessions in `~/.cache/hjax/tests/jax-<version>`
(XDG_CACHE_HOME and JAX_COMPILATION_CACHE_DIR are respected; delete it at any time), so that a
second run of the suite is mostly spared compiling. Child processes of tests inherit the platform
and the cache, not the number of devices.
"""

import contextlib
import dataclasses
import fcntl
import gc
import importlib
import importlib.metadata
import io
import os
import pathlib
import re
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

DEVICES = 8
CACHE_ROOT = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache")

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault(
    "JAX_COMPILATION_CACHE_DIR",
    str(CACHE_ROOT / "hjax" / "tests" / f"jax-{importlib.metadata.version('jax')}"),
)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")
# Where in the source an operation was traced says nothing here; walking the stack for it costs a
# tenth of a test.
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")
# A device count left in XLA_FLAGS would reach the child processes, whose tests expect defaults.
os.environ["XLA_FLAGS"] = re.sub(
    r"--xla_force_host_platform_device_count=\d+", "", os.environ.get("XLA_FLAGS", "")
).strip()

# What the benchmarks and the generators of pages compute is tested too; they are no packages.
ROOT = pathlib.Path(__file__).parent.parent
sys.path += [str(ROOT / "benchmarks"), str(ROOT / "docs" / "generate")]

# Under `nohup`, and in the background of a shell, signals are ignored that tests send.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)

import jax  # noqa: E402  (reads the variables above)
from jax._src import xla_bridge  # noqa: E402

jax.config.update("jax_num_cpu_devices", DEVICES)
jax.config.update("jax_enable_x64", False)


# Everyday tests compile much and compute little: half of their time would go into optimising, and
# where each core has a worker, pieces compiled side by side only cost more.
QUICK = (
    "--xla_backend_optimization_level=0",
    "--xla_cpu_use_fusion_emitters=false",
    "--xla_cpu_parallel_codegen_split_count=1",
)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Let XLA compile quickly, here and in children, unless a slow test is among those to run.

    Slow ones train, and need what LLVM does for the speed of programs.
    """
    # What was imported stays; collecting garbage need not look through it every time.
    gc.freeze()
    gc.set_threshold(200_000, 50, 50)
    if xla_bridge.backends_are_initialized():
        raise pytest.UsageError(
            "importing one of the test modules starts a JAX backend, which then keeps its devices "
            "and compiler flags; make arrays and layouts in fixtures or tests instead"
        )
    if any(item.get_closest_marker("slow") for item in session.items):
        return
    flags = os.environ["XLA_FLAGS"].split()
    names = [flag.partition("=")[0] for flag in QUICK]
    wanted = [f for f, name in zip(QUICK, names) if not any(x.startswith(name) for x in flags)]
    os.environ["XLA_FLAGS"] = " ".join(flags + known_flags(wanted))


@pytest.fixture(scope="session", autouse=True)
def backend() -> None:
    """The suite's devices, with threads enough; child processes have fewer, and own numbers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PJRT_NPROC", os.environ.get("PJRT_NPROC", str(4 * DEVICES)))
        jax.devices()


# Linux lets a process have 65,530 pieces of memory (vm.max_map_count), and a compiled program takes
# several. Beyond, XLA cannot protect the pages of a new one, and the process dies later.
PIECES = 16_000


@pytest.fixture(scope="module", autouse=True)
def few_programs() -> Iterator[None]:
    """Programs of earlier modules are given up before there are too many in a process."""
    yield
    held = pathlib.Path("/proc/self/maps")
    if held.is_file() and held.read_bytes().count(b"\n") > PIECES:
        jax.clear_caches()
        gc.collect()


def pytest_collection(session: pytest.Session) -> None:
    """Of the README's line every other worker begins to import the test files at their end.

    Each finds the other's half compiled (by pytest, which takes longer than importing); the order
    of collection stays. A file that does not import is left to the collection, which says so.
    """
    worker, asked = os.environ.get("PYTEST_XDIST_WORKER", "gw0"), session.config.option.markexpr
    if int(worker.removeprefix("gw")) % 2 and "not extended" in asked:
        for file in sorted(EXTENDED.parent.glob("test_*.py"), reverse=True):
            with contextlib.suppress(Exception, pytest.skip.Exception):
                importlib.import_module(file.stem)


def pytest_ignore_collect(collection_path: pathlib.Path, config: pytest.Config) -> bool | None:
    """What has none of the tests that are asked for is not even imported: the folder `extended`,
    or where that is asked for files without that mark."""
    asked = config.option.markexpr
    if "not extended" in asked:
        left_out = collection_path.name == "extended"
    elif asked.startswith("extended") and collection_path.parent.name == "tests":
        of_tests = collection_path.name.startswith("test_")
        left_out = of_tests and b"mark.extended" not in collection_path.read_bytes()
    else:
        left_out = False
    return True if left_out else None


# Fixtures that take long and that several tests share.
LONG = {"calibrated", "sweep", "quickstart"}


EXTENDED = pathlib.Path(__file__).parent / "extended"


def pytest_itemcollected(item: pytest.Item) -> None:
    """What is in the folder `extended` is not in the README's test line: long tables, predictions,
    Ray, resumed and interrupted runs. A single test elsewhere is marked `extended` by hand."""
    if EXTENDED in item.path.parents:
        item.add_marker(pytest.mark.extended)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that share a long preparation come first, so that one process runs them: later in the
    suite others would steal some of them, and prepare the same again or wait for it."""
    items.sort(key=lambda item: LONG.isdisjoint(getattr(item, "fixturenames", ())))


def known_flags(flags: list[str]) -> list[str]:
    """Those of XLA's flags, ``--name=value``, that this jaxlib takes.

    An unknown one ends a process. So one of its own is asked, once per version (a name that still
    stands in the library's text tells nothing): for all of them, and for one at a time where that
    fails. The answer is kept beside the compiled programs.

    Raises:
      pytest.UsageError: that process failed for another reason.
    """
    if not flags:
        return []
    folder = CACHE_ROOT / "hjax" / "tests" / f"flags-jaxlib-{importlib.metadata.version('jaxlib')}"
    folder.mkdir(parents=True, exist_ok=True)
    answer = folder / " ".join(flags)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # several workers may ask at once
        if not answer.is_file():
            known = flags if xla_takes(flags) else [flag for flag in flags if xla_takes([flag])]
            answer.write_text(" ".join(known))
    return answer.read_text().split()


def xla_takes(flags: list[str]) -> bool:
    """Whether a process starts with these flags."""
    done = subprocess.run(
        [sys.executable, "-c", "import jax; jax.devices()"],
        env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": " ".join(flags)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    if done.returncode and "Unknown flag" not in done.stderr:
        raise pytest.UsageError(f"asking jaxlib for {flags} failed:\n{done.stderr}")
    return not done.returncode


@pytest.fixture(scope="session")
def test_data() -> pathlib.Path:
    """The folder of outside data and weights that HJAX_TEST_DATA names; without it, a skip."""
    named = os.environ.get("HJAX_TEST_DATA")
    if not named:
        pytest.skip("HJAX_TEST_DATA is not set: it names the folder of outside data and weights")
    folder = pathlib.Path(named).resolve()
    if not folder.is_dir():
        pytest.fail(f"HJAX_TEST_DATA={named} is not a folder; name one, or unset it to skip")
    return folder


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model that answers in the task's letters, so that some answers score more than others."""
    from helpers import trainer_of

    folder = tmp_path_factory.mktemp("base") / "model"
    with trainer_of("GRPO", {"model.layers": 2, "warm_start.steps": 30}) as trainer:
        trainer.export(folder)
    return str(folder)


@pytest.fixture(scope="session")
def calibrated(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A cache (XDG_CACHE_HOME) with a profile for the suite's devices, for plans and runs.

    Two of them are measured, once for all workers and with fewer repeats than a user's;
    ``two.json`` is that profile, ``shown.txt`` what `plan --calibrate --json` printed. The one for
    all of them has the same rates: no test asks how exact it is.
    """
    from hjax.launch import plan
    from hjax.planning import calibration as calibrate
    from hjax.planning import profile

    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "calibrated"
    folder.mkdir(exist_ok=True)
    shown, devices = io.StringIO(), jax.devices()
    with open(folder / "lock", "w") as lock, pytest.MonkeyPatch.context() as patch:
        fcntl.flock(lock, fcntl.LOCK_EX)  # until it is closed
        if not (folder / "shown.txt").exists():
            patch.setenv("XDG_CACHE_HOME", str(folder))
            patch.setattr(calibrate, "LONG_RESPONSE", calibrate.RESPONSE)
            patch.setattr(calibrate, "MAX_SECONDS", 0.0)
            patch.setattr(jax, "devices", lambda *platform: devices[:2])
            with contextlib.redirect_stdout(shown):
                assert plan.main(["--calibrate", "--json"]) == 0
            stored = profile.profile_path(devices[:2]).rename(folder / "two.json")
            measured = profile.read_profile(stored)
            of_all = dataclasses.replace(measured.device, per_host=len(devices), alone=())
            made_on = dataclasses.replace(measured.made_on, devices=len(devices))
            whole = dataclasses.replace(measured, device=of_all, busy={}, made_on=made_on)
            profile.write_profile(whole, profile.profile_path(devices))
            (folder / "shown.txt").write_text(shown.getvalue())
    return folder
