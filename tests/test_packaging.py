"""What is shipped: the wheel, the sdist, the declared dependencies, the README's two lines."""

import ast
import configparser
import email
import importlib.metadata
import json
import os
import pathlib
import re
import shutil
import socket
import subprocess
import sys
import tarfile
import time
import urllib.request
import zipfile

import pytest
from packaging.requirements import Requirement

import hjax

ROOT = pathlib.Path(__file__).parent.parent
PACKAGE = ROOT / "hjax"
MINUTES = 60
# Import name -> name on the package index, where they differ.
DISTRIBUTIONS = {
    "absl": "absl-py",
    "grpc": "grpcio",
    "huggingface_hub": "huggingface-hub",
    "jetstream": "google-jetstream",
    "math_verify": "math-verify",
    "ml_collections": "ml-collections",
    "orbax": "orbax-checkpoint",
    "prometheus_client": "prometheus-client",
}


def setup_cfg() -> configparser.ConfigParser:
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg")
    return parser


def names(requirements: str) -> set[str]:
    """Bare lower-case names of a list of requirements, one per line."""
    lines = [line for line in requirements.split("\n") if line and not line.startswith("#")]
    return {re.split(r"[\[<>=!~;\s]", line)[0].lower() for line in lines}


@pytest.fixture(scope="session")
def distributions(tmp_path_factory) -> tuple[pathlib.Path, pathlib.Path]:
    """A wheel and an sdist, built from a copy as a fresh clone has it, links included."""
    clone = tmp_path_factory.mktemp("build") / "clone"
    clone.mkdir()
    for entry in ROOT.iterdir():
        ignored = entry.name in (".git", ".venv", "build", "dist", "runs")
        if entry.is_symlink():
            (clone / entry.name).symlink_to(os.readlink(entry))
        elif entry.is_file():
            shutil.copy(entry, clone)
        elif not ignored and not entry.name.endswith(".egg-info"):
            skipped = shutil.ignore_patterns("__pycache__", "runs")
            shutil.copytree(entry, clone / entry.name, symlinks=True, ignore=skipped)
    build = (
        "import sys; from setuptools import build_meta as b; out = sys.argv[1]\n"
        "print('built', b.build_wheel(out), b.build_sdist(out))"
    )
    done = subprocess.run(
        [sys.executable, "-c", build, str(clone.parent)],
        cwd=clone, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    wheel, sdist = done.stdout.split()[-2:]
    return clone.parent / wheel, clone.parent / sdist


def test_wheel_holds_hjax_alone_and_whole(distributions):
    shipped = set(zipfile.ZipFile(distributions[0]).namelist())
    assert {name.split("/")[0] for name in shipped} == {
        "hjax",
        f"hjax-{hjax.__version__}.dist-info",
    }
    ours = {
        str(file.relative_to(ROOT))
        for file in PACKAGE.rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }
    assert ours - shipped == set()


def test_metadata_has_the_version_of_the_package(distributions):
    archive = zipfile.ZipFile(distributions[0])
    metadata = email.message_from_bytes(archive.read(f"hjax-{hjax.__version__}.dist-info/METADATA"))
    assert metadata["Version"] == hjax.__version__
    assert metadata["Requires-Python"] == ">=3.11"
    extras = set(metadata.get_all("Provides-Extra"))
    known = {"test", "tpu", "cuda", "math", "constraints", "jetstream", "notebooks", "serve"}
    known |= {"rewards", "wandb", "browser", "cluster", "datasets", "docs", "tokenizers"}
    known |= {"environments", "mcp", "tensorboard", "tinker", "verifiers"}
    assert extras == known


@pytest.mark.extended
def test_wheel_works_from_elsewhere(distributions, tmp_path):
    """Unpacked into a folder of packages, with another folder as the working directory."""
    zipfile.ZipFile(distributions[0]).extractall(tmp_path / "packages")
    (tmp_path / "elsewhere").mkdir()
    code = (
        "import hjax; c = hjax.get_config('ppo.py');"
        "print(hjax.__file__, hjax.__version__, c.algorithm.name)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path / "elsewhere", env={**os.environ, "PYTHONPATH": str(tmp_path / "packages")},
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    file, version, algorithm = done.stdout.split()
    assert pathlib.Path(file) == tmp_path / "packages" / "hjax" / "__init__.py"
    assert (version, algorithm) == (hjax.__version__, "PPO")


def interpreter(version: str) -> str | None:
    """A Python of this version, on the path or among pyenv's."""
    if sys.version_info[:2] == tuple(map(int, version.split("."))):
        return sys.executable
    pyenv = pathlib.Path(os.environ.get("PYENV_ROOT", pathlib.Path.home() / ".pyenv"))
    found = [shutil.which(f"python{version}"), *pyenv.glob(f"versions/{version}.*/bin/python3")]
    for each in filter(None, found):
        if not subprocess.run(
            [each, "-c", "import ensurepip, venv"], capture_output=True
        ).returncode:
            return str(each)
    return None


@pytest.fixture(params=["3.11", "3.13"])
def hjax_command(request, distributions, tmp_path):
    """Starts `hjax` of a new environment, outside of the clone."""
    python = interpreter(request.param)
    if python is None:
        pytest.skip(f"no Python {request.param} here")
    subprocess.run([python, "-m", "venv", tmp_path / "venv"], check=True, timeout=2 * MINUTES)
    programs = tmp_path / "venv" / "bin"
    hidden = ("PYTHONPATH", "XLA_FLAGS", "VIRTUAL_ENV")
    environment = {k: v for k, v in os.environ.items() if k not in hidden}
    # pip would take a clone on PYTHONPATH for an installed hjax.
    install = [programs / "pip", "install", "-q", f"{distributions[0]}[serve]"]
    subprocess.run(install, check=True, timeout=15 * MINUTES, env=environment)
    (tmp_path / "elsewhere").mkdir()

    def start(*arguments: str) -> subprocess.Popen:
        return subprocess.Popen(
            [programs / "hjax", *arguments],
            cwd=tmp_path / "elsewhere",
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    return start


def printed(process: subprocess.Popen) -> str:
    text, _ = process.communicate(timeout=10 * MINUTES)
    assert process.returncode == 0, text
    return text


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_wheel_in_a_clean_environment_trains_checks_and_serves(hjax_command, tmp_path):
    keys = ["--config.steps=3", "--config.eval.every=3", "--config.warm_start.steps=20"]
    text = printed(hjax_command("train", "--config=ppo.py", *keys, "--workdir=run"))
    run = tmp_path / "elsewhere" / "run"
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3] and "eval/accuracy" in rows[-1], text
    assert "right" in printed(hjax_command("check"))

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = hjax_command("serve", "--protocol=openai", "--model=run", f"--port={port}")
    try:
        body = json.dumps({"prompt": "312>", "max_tokens": 4, "temperature": 0}).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/v1/completions", body, {"Content-Type": "application/json"}
        )
        for _ in range(240):
            assert server.poll() is None, server.stdout.read()
            try:
                with urllib.request.urlopen(request, timeout=2 * MINUTES) as answer:
                    found = json.load(answer)
                break
            except OSError:
                time.sleep(1)
        assert found["choices"][0]["text"] and found["usage"]["completion_tokens"] > 0
    finally:
        server.terminate()
        assert server.wait(timeout=MINUTES) == 0


def test_sdist_can_be_tested(distributions):
    with tarfile.open(distributions[1]) as archive:
        shipped = {name.partition("/")[2] for name in archive.getnames()}
    assert {"README.md", "LICENSE", "CHANGELOG.md", "setup.cfg", "pyproject.toml"} <= shipped
    assert {".ci/run", "tests/conftest.py", "tests/test_packaging.py", "docs/shows.md"} <= shipped


def test_every_import_is_declared():
    """A package that is there only because another one brings it may be gone tomorrow."""
    declared = names(setup_cfg()["options"]["install_requires"])
    extras = {room: names(lines) for room, lines in setup_cfg()["options.extras_require"].items()}
    every = set().union(*extras.values())
    undeclared = {}
    for file in PACKAGE.rglob("*.py"):
        tree = ast.parse(file.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                modules = [node.module]
            else:
                continue
            # Only an import inside a function may need an extra, or a room that extras are for.
            serving = extras["serve"] | extras["jetstream"]
            optional = file.parent.name in ("serving", "training_service", "agents")
            own = serving if optional else set()
            allowed = declared | (own if node in tree.body else every)
            for top in {module.split(".")[0] for module in modules}:
                known = top in sys.stdlib_module_names or top in ("hjax", "__future__")
                if not known and DISTRIBUTIONS.get(top, top).lower() not in allowed:
                    undeclared[top] = str(file.relative_to(ROOT))
    assert undeclared == {}


def readme_line(marker: str) -> str:
    """The one line in the fenced block after `<!-- marker -->`."""
    text = (ROOT / "README.md").read_text()
    match = re.search(rf"^<!-- {marker} -->\n```sh\n(.*)\n```$", text, re.MULTILINE)
    assert match, f"README.md has no one-line block after <!-- {marker} -->"
    return match[1]


def paste(line: str, shell: str, folder: pathlib.Path, venv: str | None, broken: bool = False):
    """Runs a README line with stand-ins for python; returns the commands it would have run."""
    bin_folder = folder / "bin"
    bin_folder.mkdir(exist_ok=True)
    (bin_folder / "python3").write_text(
        '#!/bin/sh\necho "python3 $*" >> log\n'
        + ("exit 1\n" if broken else "mkdir -p $3/bin; echo VIRTUAL_ENV=$3 > $3/bin/activate\n")
    )
    (bin_folder / "python").write_text('#!/bin/sh\necho "python $*" >> log\n')
    for name in ("python", "python3"):
        (bin_folder / name).chmod(0o755)
    environment = {"PATH": f"{bin_folder}:/usr/bin:/bin"}
    if venv is not None:
        environment["VIRTUAL_ENV"] = venv
    # -u, because a line may be pasted where unset variables are errors
    subprocess.run([shell, "-uc", line], cwd=folder, env=environment, timeout=20)
    return (folder / "log").read_text().splitlines()


@pytest.mark.parametrize("shell", ["bash", "zsh"])
@pytest.mark.parametrize(
    "marker, commands",
    [
        ("the run line", ["pip install -q -e .", "hjax.launch --config=ppo.py"]),
        (
            "the test line",
            [
                "pip install -q -e .[test]",
                "pytest -q -n auto --dist worksteal -m not slow and not extended",
            ],
        ),
    ],
)
def test_readme_line(marker, commands, shell, tmp_path):
    if not shutil.which(shell):
        pytest.skip(f"{shell} is not installed")
    line = readme_line(marker)
    work = [f"python -m {command}" for command in commands]
    assert paste(line, shell, tmp_path, venv=None) == ["python3 -m venv .venv", *work]


def test_readme_line_in_an_active_environment_makes_no_other(tmp_path):
    calls = paste(readme_line("the run line"), "bash", tmp_path, venv="/somewhere")
    assert not any("venv" in call for call in calls)


def test_readme_line_stops_where_no_environment_can_be_made(tmp_path):
    calls = paste(readme_line("the run line"), "bash", tmp_path, venv=None, broken=True)
    assert calls == ["python3 -m venv .venv"]


def test_ci_runs_the_test_line_of_the_readme():
    script = (ROOT / ".ci" / "run").read_text()
    (program,) = re.findall(r"awk '(.*?)' README.md", script, re.DOTALL)
    found = subprocess.run(
        ["awk", program, str(ROOT / "README.md")], capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == readme_line("the test line")


def test_the_readmes_run_is_continued_by_its_own_next_line():
    """On resume no key but the number of steps may differ."""
    text = (ROOT / "README.md").read_text()
    lines = [x for x in text.splitlines() if "--workdir=" in x and "--overwrite" not in x]
    begun, *later = [line.partition("#")[0].split() for line in lines]
    assert later
    for line in later:
        assert set(line) ^ set(begun) == {
            flag for flag in (*line, *begun) if flag.startswith("--config.steps=")
        }


# Stand-ins for .ci/run: a Python of some version that makes environments, whose own python notes
# what it is asked for, and one that does not run, like pyenv's of a version not switched on.
PYTHON = """#!/bin/sh
case "$1 $2" in
  "-m venv")
    mkdir -p $3/bin
    echo "export VIRTUAL_ENV=$3 OLD=\\$PATH PATH=$3/bin:\\$PATH; deactivate() {{ PATH=\\$OLD; }}" \\
      > $3/bin/activate
    printf '#!/bin/sh\\necho "{version} $*" >> {log}\\nexit {status}\\n' > $3/bin/python
    chmod +x $3/bin/python ;;
  "-c import sys"*) echo {version} ;;
esac
"""
SHIM = "#!/bin/sh\necho not switched on >&2\nexit 127\n"


def run_ci(folder: pathlib.Path, pythons: dict[str, str | None], status: int = 0, **variables):
    """Runs .ci/run with these versions of Python by name (None: one that does not run).

    Returns its exit status, its output, the commands of the environments' pythons, and which of
    them have their requirements installed beforehand.
    """
    commands = folder / "bin"
    commands.mkdir()
    log = folder / "log"
    for name, version in pythons.items():
        text = PYTHON.format(version=version, log=log, status=status) if version else SHIM
        (commands / name).write_text(text)
        (commands / name).chmod(0o755)
    done = subprocess.run(
        ["bash", str(ROOT / ".ci" / "run")],
        env={"PATH": f"{commands}:/usr/bin:/bin", "HJAX_TEST_DATA": "here", **variables},
        capture_output=True,
        text=True,
        timeout=60,
    )
    calls = log.read_text().splitlines()
    before = [call for call in calls if " install -q -r " in call]  # beside the first one's
    return done.returncode, done.stdout, [call for call in calls if call not in before], before


def selection() -> list[str]:
    lines = (ROOT / ".ci" / "selection").read_text().splitlines()
    return [line for line in lines if not line.startswith("#")]


def test_ci_takes_the_newest_python_that_runs(tmp_path):
    pythons = {"python3": "3.11.7", "python3.13": None, "python3.12": "3.12.1"}
    status, output, calls, before = run_ci(tmp_path, pythons)
    assert status == 0
    assert [(call.split()[0], pathlib.Path(call).stem) for call in before] == [
        ("3.12.1", "newest"), ("3.11.7", "jetstream")
    ]  # fmt: skip
    assert "the test line on Python 3.11.7, python3\n" in output
    assert f"the test line on Python 3.12.1, {tmp_path}/bin/python3.12\n" in output
    tests = "-m pytest -q -n auto --dist worksteal"
    assert calls[:7] == [
        "3.11.7 -m pip install -q -e .[test]", f"3.11.7 {tests} -m not slow and not extended",
        f"3.11.7 {tests} -m extended and not slow",
        "3.12.1 -m pip install -q -e .[test]", f"3.12.1 {tests} -m not slow and not extended",
        f"3.12.1 {tests} -m not slow " + " ".join(selection()),
        "3.11.7 -m pip install -q -e .[jetstream] pytest-timeout pytest-xdist",
    ]  # fmt: skip
    assert sorted(calls[7:]) == [  # side by side
        "3.11.7 -m mypy",
        "3.11.7 -m pytest -q -n 0 -m jetstream tests/extended/test_serving_jetstream.py",
        "3.11.7 -m ruff check",
    ]


def test_ci_says_where_there_is_no_newer_python(tmp_path):
    (tmp_path / "a").mkdir()
    pythons = {"python3": "3.11.7", "python3.13": None, "python3.12": None}
    status, output, calls, before = run_ci(tmp_path / "a", pythons)
    assert status == 0 and len(calls) == 7 and len(before) == 1
    assert "not run on a newer Python: none of python3.13 python3.12 runs here" in output
    (tmp_path / "b").mkdir()
    pythons = {"python3": "3.11.7", "python3.13": "3.13.0"}
    status, output, calls, _ = run_ci(tmp_path / "b", pythons, PYTHON="python3.13")
    assert "the test line on Python 3.13.0, python3.13\n" in output and len(calls) == 7
    assert "not run on a newer Python: python3.13 is as new as" in output


def test_ci_fails_where_something_failed_but_runs_it_all(tmp_path):
    pythons = {"python3": "3.11.7", "python3.13": "3.13.0"}
    status, output, calls, _ = run_ci(tmp_path, pythons, status=1)
    # The tests of an installation that failed are not run, the other steps are.
    assert status == 1
    assert [call.split()[2] for call in calls] == [
        "pip", "pytest", "pip", "pytest", "pip", "ruff", "mypy"
    ]  # fmt: skip
    assert "not run: the tests of JetStream: its extra does not install here" in output


def test_cis_selection_is_of_extended_tests():
    for named in selection():
        file, _, test = named.partition("::")
        assert file.startswith("tests/extended/") and f"def {test}" in (ROOT / file).read_text()


def test_the_test_line_has_every_room_and_every_command():
    texts = "\n".join(file.read_text() for file in (ROOT / "tests").glob("test_*.py"))
    rooms = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert {room for room in rooms if f"hjax.{room}" not in texts} == set()
    commands = {
        path.stem
        for path in (PACKAGE / "launch").glob("[a-z]*.py")
        if "\ndef main(" in path.read_text()
    }
    named = r"hjax\.launch\.({0})\b|from hjax\.launch import .*\b({0})\b"
    assert {each for each in commands if not re.search(named.format(each), texts)} == set()


def test_what_the_test_extra_names_is_installed():
    """Tests of what is missing are skipped, so it must not go missing unnoticed."""
    extra = setup_cfg()["options.extras_require"]["test"]
    for line in extra.strip().splitlines():
        requirement = Requirement(line)
        if requirement.marker is None or requirement.marker.evaluate():
            assert importlib.metadata.version(requirement.name) in requirement.specifier


def test_no_test_needs_torch_to_be_read():
    """The test extra does not bring it on every Python; tests/references.py skips without it."""
    wanted = re.compile(r"^(import torch|from torch|from safetensors.torch|from [a-z.]*modeling_)")
    found = {
        file.name
        for file in (ROOT / "tests").glob("*.py")
        if not file.name.startswith("make_")  # those make what tests read
        and any(map(wanted.match, file.read_text().splitlines()))
    }
    assert found == set()
