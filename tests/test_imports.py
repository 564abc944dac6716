"""What importing hjax costs, and which room may import from which."""

import ast
import functools
import pathlib
import pkgutil
import re
import subprocess
import sys

import pytest

import hjax

PACKAGE = pathlib.Path(hjax.__file__).parent

# From the ground up; a room imports from those before it. data and rewards stand beside workers:
# they import none of these floors, and whoever needs them may import them.
FLOORS = [
    "xla",
    "kernels",
    "sharding",
    "models",
    "rollout",
    "serving",
    "workers",
    "controller",
    "algorithms",
    "settings",
    "show",
    "agents",
    "run",
    "planning",
    "dryrun",
    "training_service",
    "launch",
]
BESIDE = ["data", "environments", "rewards", "sandbox"]
# Files that stand beside the rooms, below them all.
GROUND = [
    "batches",
    "config",
    "config_aliases",
    "devices",
    "errors",
    "files",
    "isolated_process",
    "machine",
    "process_supervisor",
    "progress",
    "roles",
    "rules",
    "sharded_values",
    "trainable_split",
    "temporary_folders",
    "user_code",
    "user_input",
]


def in_new_process(code: str) -> str:
    """What the code prints in a fresh interpreter, where nothing is imported yet."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@functools.cache
def imports_of(file: pathlib.Path) -> set[str]:
    """Dotted names of the modules that a file imports anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module)
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def files_of(room: str) -> list[pathlib.Path]:
    return sorted((PACKAGE / room).rglob("*.py"))


def importers_of(name: str, files: list[pathlib.Path]) -> list[str]:
    """The files that import a module or something in it."""
    return [
        str(file.relative_to(PACKAGE))
        for file in files
        if any(module == name or module.startswith(name + ".") for module in imports_of(file))
    ]


def test_import_loads_nothing_heavy():
    loaded = in_new_process("import sys, hjax; print(*{m.partition('.')[0] for m in sys.modules})")
    heavy = {"jax", "flax", "ray", "orbax", "transformers", "torch", "pyarrow", "starlette"}
    assert heavy.isdisjoint(loaded.split())


@pytest.mark.extended
def test_no_module_starts_a_backend_nor_do_configs_nor_reading_off_what_an_algorithm_calls():
    """A planner would take a machine's devices, or find that they do not start."""
    modules = [
        module.name
        for module in pkgutil.walk_packages(hjax.__path__, "hjax.")
        if not module.name.endswith("__main__")
        and ".configs." not in module.name
        # These need an extra that has an environment of its own, see test_serving_jetstream.py.
        and not module.name.startswith("hjax.serving.jetstream_")
    ]
    started = in_new_process(
        # Without torch, as hjax is installed; where it stands, tensorboardX takes seconds for it.
        "import importlib, sys\nsys.modules['torch'] = None\n"
        f"for name in {modules}: importlib.import_module(name)\n"
        "import jax._src.xla_bridge as bridge\n"
        "print(bridge.backends_are_initialized())\n"
        "from hjax.settings.config_loading import load_config\n"
        "load_config('ppo.py')\n"
        "from hjax.algorithms import ALGORITHMS\n"
        "from hjax.run.dataflow import step_calls\n"
        "for each in ALGORITHMS.values():\n"
        "    keys = each.default_config()\n"
        "    if each.generates: step_calls(each, keys, 1, each.fewest_samples(keys))\n"
        "print(bridge.backends_are_initialized())"
    )
    assert started.split() == ["False", "False"]


@pytest.mark.extended
def test_the_front_door_starts_no_backend():
    started = in_new_process(
        "import hjax\nfor name in hjax.__all__: getattr(hjax, name)\n"
        "import jax._src.xla_bridge as bridge; print(bridge.backends_are_initialized())"
    )
    assert started == "False"


@pytest.mark.parametrize("name", ["Trainer", "get_config", "load_model", "protocol"])
def test_public_functions_and_classes(name):
    assert callable(getattr(hjax, name))
    assert name in dir(hjax)


def test_algorithms_are_reached_through_the_package():
    assert {"PPO", "GRPO", "ReMax", "SafeRLHF"} <= set(dir(hjax.algorithms))


def test_an_unknown_name_says_which_there_are():
    with pytest.raises(AttributeError, match="no attribute 'Trainr'.*Trainer"):
        hjax.Trainr  # noqa: B018


def test_type_checkers_see_the_same_names():
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    shown = {
        alias.asname: (node.module, alias.name)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    lazy = {
        name: (module, attribute) if attribute else tuple(module.rsplit(".", 1))
        for name, (module, attribute) in hjax._LAZY.items()
    }
    assert shown == lazy


@pytest.mark.parametrize("room", FLOORS + BESIDE)
def test_a_room_imports_only_from_below(room):
    above = FLOORS if room in BESIDE else FLOORS[FLOORS.index(room) + 1 :]
    wrong = {
        f"hjax.{other}": files
        for other in above
        if (files := importers_of(f"hjax.{other}", files_of(room)))
    }
    assert wrong == {}


def test_every_room_is_known():
    rooms = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").is_file()}
    assert rooms == {*FLOORS, *BESIDE}
    assert {path.stem for path in PACKAGE.glob("*.py")} == {"__init__", "__main__", *GROUND}


@pytest.mark.parametrize("name", GROUND)
def test_what_stands_below_imports_no_room(name):
    wrong = [
        room for room in FLOORS + BESIDE if importers_of(f"hjax.{room}", [PACKAGE / f"{name}.py"])
    ]
    assert wrong == []


def module_name(file: pathlib.Path) -> str:
    parts = file.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(["hjax", *(part for part in parts if part != "__init__")])


def test_no_files_import_each_other_in_a_circle():
    files = {module_name(file): file for file in PACKAGE.rglob("*.py")}
    files.pop("hjax")  # the front door names what stands behind it
    imports = {name: imports_of(file) & files.keys() - {name} for name, file in files.items()}
    # What a package's own file takes from its parts is not taken back by naming the package.
    while free := [name for name, taken in imports.items() if not taken & imports.keys()]:
        for name in free:
            del imports[name]
    circle = {name: sorted(taken & imports.keys()) for name, taken in imports.items()}
    assert circle == {}


def test_no_room_holds_more_than_a_fifth():
    lines = {
        room: sum(len(file.read_text().splitlines()) for file in files_of(room))
        for room in FLOORS + BESIDE
    }
    total = sum(lines.values())
    assert {room: n for room, n in lines.items() if n > total / 5} == {}


def test_the_picture_shows_who_imports_whom():
    """docs/images/package.svg is drawn by docs/generate/package_picture.py."""
    svg = (PACKAGE.parent / "docs" / "images" / "package.svg").read_text()
    rooms = {*FLOORS, *BESIDE}
    assert set(re.findall(r'class="name"[^>]*>(\w+)<', svg)) == rooms
    arrows = set(re.findall(r"<title>(\w+) imports (\w+)</title>", svg))
    followed = {name: {other for start, other in arrows if start == name} for name in rooms}
    for name in [*BESIDE[::-1], *FLOORS]:  # what a room imports comes before it
        followed[name] = followed[name].union(*(followed[other] for other in followed[name]))
    for name in rooms:
        imported = {x for x in rooms - {name} if importers_of(f"hjax.{x}", files_of(name))}
        assert {other for start, other in arrows if start == name} <= imported
        assert imported <= followed[name]


@pytest.mark.parametrize("unknown", ["ray", "jax.sharding", "hjax.workers"])
def test_algorithms_name_no_machine(unknown):
    assert importers_of(unknown, files_of("algorithms")) == []


def test_without_ray_its_extra_is_named(monkeypatch):
    import importlib.util

    from hjax.errors import ConfigError

    monkeypatch.setitem(sys.modules, "ray", None)
    file = PACKAGE / "controller" / "ray_calls.py"
    spec = importlib.util.spec_from_file_location("ray_calls_without_ray", file)
    with pytest.raises(ConfigError, match=r"pip install 'hjax\[cluster\]'") as caught:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
    assert "\n" not in str(caught.value)


def test_ray_is_imported_by_one_file_at_most():
    assert len(importers_of("ray", sorted(PACKAGE.rglob("*.py")))) <= 1
