"""What is shipped: the wheel, the sdist, the declared dependencies, the README's two lines."""

import ast
import configparser
import email
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile

import pytest

import hjax

ROOT = pathlib.Path(__file__).parent.parent
PACKAGE = ROOT / "hjax"
# Import name -> name on the package index, where they differ.
DISTRIBUTIONS = {
    "absl": "absl-py",
    "huggingface_hub": "huggingface-hub",
    "jetstream": "google-jetstream",
    "ml_collections": "ml-collections",
    "orbax": "orbax-checkpoint",
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
    assert extras == {"test", "tpu", "cuda", "jetstream", "notebooks"}


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


def test_sdist_can_be_tested(distributions):
    with tarfile.open(distributions[1]) as archive:
        shipped = {name.partition("/")[2] for name in archive.getnames()}
    assert {"README.md", "LICENSE", "CHANGELOG.md", "setup.cfg", "pyproject.toml"} <= shipped
    assert {".ci/run", "tests/conftest.py", "tests/test_packaging.py", "docs/shows.md"} <= shipped


def test_every_import_is_declared():
    """A package that is there only because another one brings it may be gone tomorrow."""
    declared = names(setup_cfg()["options"]["install_requires"])
    extras = set().union(*map(names, setup_cfg()["options.extras_require"].values()))
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
            # Only an import inside a function may need an extra.
            allowed = declared if node in tree.body else declared | extras
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
            ["pip install -q -e .[test]", "pytest -q -n auto --dist worksteal -m not slow"],
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
