"""No long functions, no wide classes, no tuples unpacked by position; a name is one thing."""

import ast
import functools
import pathlib
import re
from collections.abc import Iterator

import pytest

import hjax

PACKAGE = pathlib.Path(hjax.__file__).parent
LINES = 60  # of a function, its docstring included
METHODS = 20  # public ones that a class defines itself

Function = ast.FunctionDef | ast.AsyncFunctionDef


@functools.cache
def nodes_of(tree: ast.AST) -> list[ast.AST]:
    """A node and all below it, listed once for all checks."""
    return list(ast.walk(tree))


def long_functions(tree: ast.Module) -> Iterator[str]:
    """Functions of more than ``LINES`` lines."""
    for node in nodes_of(tree):
        if isinstance(node, Function):
            lines = node.end_lineno - node.lineno + 1
            if lines > LINES:
                yield f"{node.lineno}: {node.name} has {lines} lines"


def wide_classes(tree: ast.Module) -> Iterator[str]:
    """Classes with more than ``METHODS`` public methods and properties of their own."""
    for node in nodes_of(tree):
        if isinstance(node, ast.ClassDef):
            names = {n.name for n in node.body if isinstance(n, Function)}
            public = [name for name in names if not name.startswith("_")]
            if len(public) > METHODS:
                yield f"{node.lineno}: {node.name} has {len(public)} public methods"


def unpacked_tuples(tree: ast.Module) -> Iterator[str]:
    """Calls that unpack a tuple written in the same function: `f(*(a, b), c)`, or `given = a, b`
    and `f(*given)`. Their arguments had better have names."""
    found = set()
    for function in nodes_of(tree):
        if not isinstance(function, Function):
            continue
        nodes = nodes_of(function)
        made = {
            target.id
            for node in nodes
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        for call in (node for node in nodes if isinstance(node, ast.Call)):
            for argument in call.args:
                value = argument.value if isinstance(argument, ast.Starred) else None
                if isinstance(value, ast.Tuple) or isinstance(value, ast.Name) and value.id in made:
                    found.add((call.lineno, f"{call.lineno}: {ast.unparse(argument)}"))
    yield from (text for _, text in sorted(found))


CHECKS = {"long": long_functions, "wide": wide_classes, "unpacked": unpacked_tuples}


parsed = functools.cache(lambda file: ast.parse(file.read_text()))


def found_by_room(check: str) -> dict[str, list[str]]:
    """What a check finds, by room; a file beside the rooms is one of its own."""
    found: dict[str, list[str]] = {}
    for file in sorted(PACKAGE.rglob("*.py")):
        place = file.relative_to(PACKAGE)
        room = place.parts[0].removesuffix(".py")
        texts = [f"{place}:{text}" for text in CHECKS[check](parsed(file))]
        found.setdefault(room, []).extend(texts)
    return {room: texts for room, texts in found.items() if texts}


@pytest.mark.parametrize("check", CHECKS)
def test_rooms_keep_to_it(check):
    assert found_by_room(check) == {}


def named_in_package() -> dict[str, list[str]]:
    """Files by stem and public classes by name, each with the places that have it."""
    found: dict[str, list[str]] = {}
    for file in sorted(PACKAGE.rglob("*.py")):
        place = str(file.relative_to(PACKAGE))
        found.setdefault(file.name, []).append(place)
        for node in parsed(file).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found.setdefault(node.name, []).append(place)
    return found


def test_a_name_stands_for_one_thing():
    """A command may be named like what it calls, and a config like its algorithm."""
    twice = {
        name: [place for place in places if not place.startswith("launch/")]
        for name, places in named_in_package().items()
        if name not in ("__init__.py", "base.py") and len(places) > 1
    }
    assert {name: places for name, places in twice.items() if len(places) > 1} == {}


def test_old_names_do_not_come_back():
    old = (pathlib.Path(__file__).parent / "old_names.txt").read_text().split("\n")
    names = [name for name in old if name and not name.startswith("#")]
    stand = named_in_package()
    assert [name for name in names if name in stand or (PACKAGE / name).exists()] == []


def test_docs_name_files_that_exist():
    root = PACKAGE.parent
    pages = [root / "README.md", root / "CONTRIBUTING.md", *(root / "docs").rglob("*.md")]
    named = {
        (page.name, name)
        for page in pages
        for name in re.findall(r"`((?:hjax|tests|benchmarks|docs)/[\w/]+\.\w+)`", page.read_text())
    }
    assert len(named) > 100
    assert [(page, name) for page, name in sorted(named) if not (root / name).exists()] == []


BODY = "\n".join(f"    x = {i}" for i in range(60))


@pytest.mark.parametrize(
    ("check", "wrong", "right"),
    [
        ("long", f"def f():\n    '''Of\n    lines.'''\n{BODY[:-22]}", f"def f():\n{BODY[:-11]}"),
        (
            "wide",
            "class A:\n" + "\n".join(f"    def f{i}(self): pass" for i in range(21)),
            "class A:\n" + "\n".join(f"    def {'_' * (i % 2)}f{i}(self): pass" for i in range(40)),
        ),
        ("unpacked", "def f(a, b):\n    g(*(a, b), 1)", "def f(*given):\n    g(*given, a=(1, 2))"),
        ("unpacked", "def f(a):\n    x = a, 1\n    return g(*x)", "def f(a):\n    g(a, b=1)"),
    ],
)
def test_what_is_found(check, wrong, right):
    assert len(list(CHECKS[check](ast.parse(wrong)))) == 1
    assert list(CHECKS[check](ast.parse(right))) == []
