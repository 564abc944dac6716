"""Small faults set into hjax/, one at a time: which tests find them?

    python benchmarks/faults.py draw --commit=ab66174 --seed=44 --output=benchmarks/faults.json
    python benchmarks/faults.py probe --hits=hits.txt       # which tests execute the lines
    python benchmarks/faults.py run --hits=hits.txt --results=found.jsonl    # resumable

``draw`` reads the package as it stands at a commit and writes candidates, in an order that a seed
decides: of each folder of FOLDERS in turn, kinds of faults taking turns, so that the first 40 are
spread over folders and kinds. A fault is a file, a line of text, and the line that replaces it.

``probe`` and ``run`` take the first ``--count`` candidates whose line still stands (its text occurs
in hjax/ once; the file may be another one). ``probe`` copies the checkout, wraps each candidate's
expression in a call that notes the test under way (child processes inherit its name), and runs all
tests but the slow ones, or those of ``--marks`` and ``--tests``. ``run`` sets one fault at a time
into a copy. It runs, with ``-x``, the tests of the line in the files that execute the expression
(no fixture is shared by files, so other files cannot notice it), the whole line where a module
executes it when it is imported, and where that passes the other tests of those files. The last line
is JSON: how many were found by which part, and the share of all found that the test line finds. The
compilation cache is the suite's own.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import pathlib
import random
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parent.parent
FOLDERS = ("algorithms", "workers", "rollout", "sharding", "models", "run", "settings", "data")
# A pallas kernel for TPUs or GPUs is only interpreted here, and a launcher's text is not computed.
LEFT_OUT = re.compile(r"_tpu\.py$|_gpu\.py$")
PER_FOLDER = 25
COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
}


# --- drawing


def faults(tree: ast.AST) -> Iterator[tuple[str, ast.expr, ast.expr]]:
    """Kind, expression, and the expression that replaces it, for every fault of a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.BinOp):
            swaps = {
                ast.Add: ast.Sub,
                ast.Sub: ast.Add,
                ast.BitAnd: ast.BitOr,
                ast.BitOr: ast.BitAnd,
            }
            other = swaps.get(type(node.op))
            typing_union = isinstance(node.op, ast.BitOr) and not isinstance(
                node.right, ast.Compare
            )
            text = any(
                isinstance(x, (ast.JoinedStr, ast.List, ast.Tuple, ast.Dict))
                or (isinstance(x, ast.Constant) and isinstance(x.value, str))
                for x in ast.walk(node)
            )
            if other and not typing_union and not text:
                kind = "sign" if isinstance(node.op, (ast.Add, ast.Sub)) else "mask"
                yield kind, node, ast.BinOp(node.left, other(), node.right)
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            if not isinstance(node.operand, ast.Constant):
                yield "sign", node, node.operand
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.Invert, ast.Not)):
            yield "mask", node, node.operand
        elif isinstance(node, ast.Compare) and len(node.ops) == 1:
            if wider := COMPARISONS.get(type(node.ops[0])):
                yield "off by one", node, ast.Compare(node.left, [wider()], node.comparators)
        elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Slice):
            if not isinstance(node.ctx, ast.Load):
                continue
            lower = node.slice.lower
            if isinstance(lower, ast.Constant) and isinstance(lower.value, int):
                moved = ast.Slice(ast.Constant(lower.value + 1), node.slice.upper, node.slice.step)
                yield "off by one", node, ast.Subscript(node.value, moved, node.ctx)
            elif lower is None and node.slice.upper is not None:
                upper = ast.BinOp(node.slice.upper, ast.Sub(), ast.Constant(1))
                moved = ast.Slice(None, upper, node.slice.step)
                yield "off by one", node, ast.Subscript(node.value, moved, node.ctx)
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            if name.endswith("stop_gradient") and len(node.args) == 1:
                yield "stop gradient", node, node.args[0]
            for place, keyword in enumerate(node.keywords):
                axis = keyword.value
                if keyword.arg == "axis" and isinstance(axis, (ast.Constant, ast.UnaryOp)):
                    value = ast.literal_eval(axis)
                    if isinstance(value, int):
                        other_axis = ast.Constant(0 if value else -1)
                        keywords = list(node.keywords)
                        keywords[place] = ast.keyword("axis", other_axis)
                        yield "axis", node, ast.Call(node.func, node.args, keywords)
            if name.endswith(".where") and len(node.args) == 3:
                condition, left, right = node.args
                yield "mask", node, ast.Call(node.func, [condition, right, left], node.keywords)
            elif len(node.args) >= 2 and all(isinstance(a, ast.Name) for a in node.args[:2]):
                swapped = [node.args[1], node.args[0], *node.args[2:]]
                if name not in ("isinstance", "getattr", "zip"):
                    yield "arguments", node, ast.Call(node.func, swapped, node.keywords)


def without_effect(tree: ast.AST) -> set[int]:
    """Ids of expressions that are types or messages of errors: a fault there computes nothing."""
    left: set[int] = set()
    for node in ast.walk(tree):
        parts: list[ast.AST | None] = []
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            parts = [node.returns]
        elif isinstance(node, (ast.arg, ast.AnnAssign)):
            parts = [node.annotation]
        elif isinstance(node, ast.Raise):
            parts = [node.exc]
        elif isinstance(node, (ast.JoinedStr, ast.Assert)):
            parts = [node]
        for part in parts:
            if part is not None:
                left |= {id(inner) for inner in ast.walk(part)}
    return left


def candidates(text: str) -> Iterator[dict[str, Any]]:
    """The faults of a module that change one line whose text is in it once."""
    lines = text.splitlines()
    tree = ast.parse(text)
    left = without_effect(tree)
    for kind, node, other in faults(tree):
        if id(node) in left or node.lineno != node.end_lineno:
            continue
        line = lines[node.lineno - 1]
        if lines.count(line) > 1 or not line.isascii():
            continue
        new = f"{line[: node.col_offset]}({ast.unparse(other)}){line[node.end_col_offset :]}"
        try:
            ast.parse("\n".join([*lines[: node.lineno - 1], new, *lines[node.lineno :]]))
        except SyntaxError:
            continue
        place = [node.col_offset, node.end_col_offset]
        yield {"kind": kind, "line": line, "fault": new, "columns": place}


def draw(commit: str, seed: int) -> list[dict[str, Any]]:
    """PER_FOLDER candidates of each folder, folders and kinds taking turns."""
    generator = random.Random(seed)

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True
        ).stdout

    by_folder: dict[str, list[dict[str, Any]]] = {}
    for folder in FOLDERS:
        by_kind: dict[str, list[dict[str, Any]]] = {}
        for path in git("ls-tree", "-r", "--name-only", commit, f"hjax/{folder}/").split():
            if path.endswith(".py") and not LEFT_OUT.search(path):
                for fault in candidates(git("show", f"{commit}:{path}")):
                    by_kind.setdefault(fault["kind"], []).append({"file": path} | fault)
        for found in by_kind.values():
            generator.shuffle(found)
        kinds = sorted(by_kind)
        generator.shuffle(kinds)
        drawn: list[dict[str, Any]] = []
        while len(drawn) < PER_FOLDER and any(by_kind.values()):
            drawn += [by_kind[kind].pop() for kind in kinds if by_kind[kind]]
        by_folder[folder] = drawn[:PER_FOLDER]
    turns = range(PER_FOLDER)
    return [by_folder[f][turn] for turn in turns for f in FOLDERS if turn < len(by_folder[f])]


# --- setting


def standing(count: int) -> list[dict[str, Any]]:
    """The first ``count`` candidates whose line stands in hjax/ once and has no earlier candidate,
    with their files of today."""
    texts = {p: p.read_text() for p in sorted((ROOT / "hjax").rglob("*.py"))}
    found: list[dict[str, Any]] = []
    lines: set[str] = set()
    for number, fault in enumerate(json.loads((ROOT / "benchmarks/faults.json").read_text())):
        places = [p for p, text in texts.items() if fault["line"] in text.splitlines()]
        once = len(places) == 1 and texts[places[0]].splitlines().count(fault["line"]) == 1
        if once and fault["line"] not in lines:
            lines.add(fault["line"])
            file = str(places[0].relative_to(ROOT))
            found.append(fault | {"number": number, "file": file})
        if len(found) == count:
            break
    return found


def copy_of_checkout(folder: pathlib.Path) -> pathlib.Path:
    """Tracked files and untracked ones that git does not ignore, in a new folder."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    for name in filter(None, listed.split("\0")):
        source, target = ROOT / name, folder / name
        if source.exists() or source.is_symlink():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target, follow_symlinks=False)
    return folder


def replace_line(checkout: pathlib.Path, file: str, line: str, new: str) -> None:
    path = checkout / file
    lines = path.read_text().splitlines()
    lines[lines.index(line)] = new
    path.write_text("\n".join(lines) + "\n")


PROBE = """
import os

noted = set()


def hit(number, value):
    row = f"{{number}}\\t{{os.environ.get('PYTEST_CURRENT_TEST', '').rpartition(' (')[0]}}\\n"
    if row not in noted:
        noted.add(row)
        with open({path!r}, "a") as file:
            file.write(row)
    return value
"""


def pytest_in(checkout: pathlib.Path, *arguments: str, log: pathlib.Path) -> tuple[int, str]:
    """Exit status of pytest in a copy, and the first test that failed."""
    with open(log, "w") as file:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments],
            cwd=checkout,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=os.environ | {"PYTHONPATH": str(checkout)},
        )
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", log.read_text(errors="replace"), re.MULTILINE)
    return done.returncode, failed.group(1) if failed else ""


def marks_of_line() -> str:
    """What the README's test line gives to -m."""
    text = (ROOT / "README.md").read_text()
    arguments = shlex.split(text.split("<!-- the test line -->")[1].split("```")[1])
    return arguments[arguments.index("-m", arguments.index("pytest")) + 1]


def probe(hits: pathlib.Path, count: int, workers: str, marks: str, tests: list[str]) -> None:
    """Runs tests with every standing fault's expression noted; what ``hits`` has already stays."""
    with tempfile.TemporaryDirectory() as scratch:
        checkout = copy_of_checkout(pathlib.Path(scratch) / "checkout")
        (checkout / "hjax/faults_probe.py").write_text(PROBE.format(path=str(hits.resolve())))
        for fault in standing(count):
            first, last = fault["columns"]
            line = fault["line"]
            call = '__import__("hjax.faults_probe", fromlist=["hit"]).hit'
            noted = f"{line[:first]}{call}({fault['number']}, {line[first:last]}){line[last:]}"
            replace_line(checkout, fault["file"], line, noted)
        log = hits.with_suffix(".log")
        pytest_in(checkout, "-n", workers, "--dist", "worksteal", "-m", marks, *tests, log=log)


def files_by_fault(hits: pathlib.Path) -> dict[int, list[str]]:
    """The test files that execute each fault's expression, those that do so most often first; an
    empty name stands for the import of a module."""
    counted: dict[int, dict[str, int]] = {}
    for row in hits.read_text().splitlines():
        number, _, test = row.partition("\t")
        file = test.partition("::")[0]
        files = counted.setdefault(int(number), {})
        files[file] = files.get(file, 0) + 1
    return {number: sorted(files, key=lambda f: -files[f]) for number, files in counted.items()}


def run(hits: pathlib.Path, results: pathlib.Path, count: int, workers: str) -> dict[str, Any]:
    """Each fault against the test line, then against the other tests that execute it."""
    known = (
        [json.loads(row) for row in results.read_text().splitlines()] if results.exists() else []
    )
    done = {row["number"]: row for row in known}
    files = files_by_fault(hits)
    line = marks_of_line()
    for fault in standing(count):
        if fault["number"] in done:
            continue
        began = time.monotonic()
        near = files.get(fault["number"], [])
        with tempfile.TemporaryDirectory() as scratch:
            checkout = copy_of_checkout(pathlib.Path(scratch) / "checkout")
            replace_line(checkout, fault["file"], fault["line"], fault["fault"])
            log = pathlib.Path(scratch) / "log"
            by, test = "nothing", ""
            named = [file for file in near if file]
            parts: list[tuple[str, str, list[str]]] = []
            if named:
                parts.append(("line", line, named))
            if "" in near:
                parts.append(("line", line, []))
            if named:
                parts.append(("other", f"not slow and not ({line})", named))
            for part, marks, chosen in parts:
                arguments = ("-x", "-n", workers, "--dist", "worksteal", "-m", marks, *chosen)
                status, test = pytest_in(checkout, *arguments, log=log)
                if status not in (0, 5):  # 5: no test was chosen
                    by = part
                    break
        row = fault | {"found_by": by, "test": test, "seconds": round(time.monotonic() - began)}
        done[fault["number"]] = row
        with open(results, "a") as file:
            file.write(json.dumps(row) + "\n")
        print(f"{fault['number']:3} {by:8} {fault['file']} {fault['kind']} {test}", flush=True)
    found = [sum(row["found_by"] == part for row in done.values()) for part in ("line", "other")]
    share = found[0] / sum(found) if sum(found) else None
    return {"faults": len(done), "line": found[0], "other": found[1], "share": share}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("command", choices=("draw", "probe", "run"))
    parser.add_argument("--commit", default="HEAD", help="of draw")
    parser.add_argument("--seed", type=int, default=0, help="of draw")
    parser.add_argument("--output", type=pathlib.Path, help="of draw: the candidates")
    parser.add_argument("--hits", type=pathlib.Path, help="of probe and run: who executes what")
    parser.add_argument("--results", type=pathlib.Path, help="of run: a line per fault")
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--workers", default="auto", help="processes, as pytest's -n")
    parser.add_argument("--marks", default="not slow", help="of probe: which tests, as pytest's -m")
    parser.add_argument("--tests", nargs="*", default=[], help="of probe: these files alone")
    flags = parser.parse_args()
    if flags.command == "draw":
        rows = [json.dumps(row) for row in draw(flags.commit, flags.seed)]
        flags.output.write_text("[\n" + ",\n".join(rows) + "\n]\n")
    elif flags.command == "probe":
        probe(flags.hits, flags.count, flags.workers, flags.marks, flags.tests)
    else:
        print(json.dumps(run(flags.hits, flags.results, flags.count, flags.workers)))


if __name__ == "__main__":
    main()
