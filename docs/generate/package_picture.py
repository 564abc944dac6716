"""The picture of the package in docs/design.md: its folders, their size, and who imports whom.

python docs/generate/package_picture.py > docs/images/package.svg
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections import defaultdict
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import NamedTuple

PACKAGE = Path(__file__).resolve().parents[2] / "hjax"

# By band, from the top down: what it is, and its folders by column with what each is.
BANDS: tuple[tuple[str, Mapping[int, tuple[str, str, str]]], ...] = (
    (
        "Commands",
        {
            0: ("training_service", "models trained by calls,", "the Tinker API"),
            2: ("launch", "the commands, their flags,", "the shipped configs"),
        },
    ),
    (
        "Before a run",
        {
            2: ("dryrun", "compiles a step and counts", "it, without running it"),
            3: ("planning", "searches for placement", "and layouts"),
        },
    ),
    (
        "A run",
        {
            0: ("agents", "programs whose calls the", "policy answers, their rows"),
            1: ("settings", "config keys: declared,", "read, checked"),
            2: ("show", "live display, report,", "charts, tables"),
            3: ("run", "the Trainer: placement,", "metrics, the workdir"),
        },
    ),
    (
        "The dataflow",
        {
            0: ("controller", "device pools, calls,", "futures, Ray"),
            1: ("algorithms", "the dataflow of a step,", "advantages, losses"),
            2: ("serving", "OpenAI's API over HTTP,", "JetStream's over gRPC"),
            3: ("environments", "what agents play, and", "its processes"),
        },
    ),
    (
        "Models",
        {
            0: ("models", "the decoder, model files,", "adapters, checkpoints"),
            1: ("rollout", "generation: slots, caches,", "sampling"),
            2: ("workers", "the model of a role:", "scores and updates"),
            3: ("rewards", "reward functions,", "graders, judges"),
        },
    ),
    (
        "Devices",
        {
            0: ("xla", "what a compiled program", "does and costs"),
            1: ("sharding", "layouts, transitions,", "pipeline, offload"),
            2: ("kernels", "attention, products and", "caches by platform"),
            3: ("data", "prompts, tasks, chat", "templates, tokenizers"),
            4: ("sandbox", "confines programs that", "a model writes"),
        },
    ),
)
# They have no place in the order: they import none of it, whoever needs them may import them.
BESIDE = ("rewards", "environments", "data", "sandbox")

WIDTH, HEIGHT = 192, 84  # of a box
LEFT, TOP = 140, 16  # where the boxes begin
COLUMN, BAND = 244, 138  # from one box to the next
LANE = 11  # between arrows side by side
LINES_OF_BAR = 7000  # that fill a box's bar

STYLE = """\
.page { fill: #ffffff } .box { fill: #f3f6fb; stroke: #c3cedd } .beside { fill: #f4f4f4 }
.bar { fill: #2f6fed } .track { fill: #dde4ee } .arrow { fill: none; stroke: #66758c }
.head { fill: #66758c } .name { font-weight: 600; font-size: 15px; fill: #1c2330 }
text { font: 12px system-ui, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; fill: #556070 }
.band { font-size: 13px; font-weight: 600 } .lines { text-anchor: end }
@media (prefers-color-scheme: dark) {
  .page { fill: #11151c } .box { fill: #1b2230; stroke: #3a475c } .beside { fill: #1e1f22 }
  .bar { fill: #7aa7ff } .track { fill: #2d3748 } .arrow { stroke: #93a1b5 }
  .head { fill: #93a1b5 } .name { fill: #e6eaf1 } text { fill: #a3afc0 }
}"""


class Place(NamedTuple):
    """Where a folder's box stands: its band and column, from 0."""

    band: int
    column: int

    @property
    def x(self) -> float:
        """Of the box's left side."""
        return LEFT + self.column * COLUMN

    @property
    def y(self) -> float:
        """Of the box's upper side."""
        return TOP + self.band * BAND


PLACES = {
    name: Place(band, column)
    for band, (_, boxes) in enumerate(BANDS)
    for column, (name, *_) in boxes.items()
}


def code_lines(file: Path) -> int:
    """Lines of code of a Python file, without docstrings, comments and blanks."""
    text = file.read_text()
    docs = {
        line
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    skipped = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE}
    skipped |= {tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    lines = {
        line
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type not in skipped
        for line in range(token.start[0], token.end[0] + 1)
    }
    return len(lines - docs)


def folder_lines(package: Path) -> dict[str, int]:
    """By folder its lines of code."""
    return {
        folder.name: sum(code_lines(file) for file in folder.rglob("*.py"))
        for folder in package.iterdir()
        if (folder / "__init__.py").is_file()
    }


def folder_imports(package: Path, folders: set[str]) -> dict[str, set[str]]:
    """By folder the others that a file of it imports, anywhere in the file."""
    imports: dict[str, set[str]] = {name: set() for name in folders}
    for name in folders:
        for file in (package / name).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.Import):
                    modules = [alias.name for alias in node.names]
                elif isinstance(node, ast.ImportFrom) and node.module:
                    modules = [f"{node.module}.{alias.name}" for alias in node.names]
                else:
                    continue
                parts = [module.split(".") for module in modules]
                imports[name] |= {x[1] for x in parts if x[0] == "hjax" and len(x) > 1}
        imports[name] &= folders - {name}
    return imports


def least_imports(imports: Mapping[str, set[str]]) -> set[tuple[str, str]]:
    """Those from which all others follow: there is no way from the one to the other beside them."""

    def reached(name: str) -> set[str]:
        return imports[name].union(*(reached(other) for other in imports[name]))

    return {
        (name, other)
        for name, others in imports.items()
        for other in others
        if not any(other in reached(between) for between in others)
    }


def _lanes(band: int) -> list[float]:
    """Where an arrow may pass through a band: between boxes, and where there is none."""
    taken = BANDS[band][1]
    free = [LEFT + i * COLUMN + WIDTH / 2 for i in range(4) if i not in taken]
    return free + [LEFT + i * COLUMN - (COLUMN - WIDTH) / 2 for i in range(5)]


def _paths(arrows: set[tuple[str, str]]) -> dict[tuple[str, str], str]:
    """By arrow the d of its SVG path."""
    points: dict[tuple[str, str], list[tuple[float, float]]] = {}
    passing: dict[tuple[int, float], list[tuple[str, str]]] = defaultdict(list)
    leaving: dict[str, list[tuple[str, str]]] = defaultdict(list)
    arriving: dict[str, list[tuple[str, str]]] = defaultdict(list)
    paths = {}
    for arrow in sorted(arrows):
        start, end = (PLACES[name] for name in arrow)
        if start.band == end.band:
            right = end.column > start.column
            x0, x1 = (start.x + WIDTH, end.x - 5) if right else (start.x, end.x + WIDTH + 5)
            paths[arrow] = f"M{x0:g} {start.y + HEIGHT / 2:g}H{x1:g}"
            continue
        leaving[arrow[0]].append(arrow)
        arriving[arrow[1]].append(arrow)
        lanes = []
        for band in range(start.band + 1, end.band):
            along = (band - start.band) / (end.band - start.band)
            wanted = start.x + (end.x - start.x) * along + WIDTH / 2
            lane = min(_lanes(band), key=lambda x: abs(x - wanted))
            passing[band, lane].append(arrow)
            lanes.append((lane, band))
        points[arrow] = [(lane, float(band)) for lane, band in lanes]

    def spread(arrow: tuple[str, str], beside: list[tuple[str, str]], end: int) -> float:
        ordered = sorted(beside, key=lambda other: (PLACES[other[end]].x, other))
        return (ordered.index(arrow) - (len(ordered) - 1) / 2) * LANE

    for arrow, lanes_of in points.items():
        start, end = (PLACES[name] for name in arrow)
        x = start.x + WIDTH / 2 + spread(arrow, leaving[arrow[0]], 1) * 2.5
        y = start.y + HEIGHT
        path = f"M{x:g} {y:g}"
        last = end.x + WIDTH / 2 + spread(arrow, arriving[arrow[1]], 0) * 2.5
        stops = [
            (lane + spread(arrow, passing[int(band), lane], 1), TOP + band * BAND)
            for lane, band in lanes_of
        ]
        for x1, y1 in [*stops, (last, end.y - 5)]:
            half = (y + y1) / 2
            path += f"C{x:g} {half:g} {x1:g} {half:g} {x1:g} {y1:g}"
            x, y = x1, y1
            if (x1, y1) in stops:
                y += HEIGHT
                path += f"V{y:g}"
        paths[arrow] = path
    return paths


def package_svg(package: Path = PACKAGE) -> str:
    """The picture, as SVG."""
    lines = folder_lines(package)
    if set(lines) != set(PLACES):
        raise ValueError(f"folders without a place, or gone: {sorted(set(lines) ^ set(PLACES))}")
    paths = _paths(least_imports(folder_imports(package, set(lines))))
    width, height = LEFT + 4 * COLUMN + WIDTH + 30, TOP + len(BANDS) * BAND + 14
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}">',
        "<title>The package hjax: its folders and their imports</title>",
        f"<style>\n{STYLE}\n</style>",
        '<defs><marker id="head" viewBox="0 0 8 8" refX="4" refY="4" markerWidth="7" '
        'markerHeight="7" orient="auto"><path class="head" d="M0 0L8 4L0 8z"/></marker></defs>',
        f'<rect class="page" width="{width}" height="{height}" rx="6"/>',
    ]
    for (name, other), path in sorted(paths.items()):
        parts.append(
            f'<path class="arrow" marker-end="url(#head)" d="{path}">'
            f"<title>{name} imports {other}</title></path>"
        )
    for band, (title, boxes) in enumerate(BANDS):
        y = TOP + band * BAND
        parts.append(f'<text class="band" x="14" y="{y + HEIGHT / 2 + 5:g}">{escape(title)}</text>')
        for name, *about in boxes.values():
            parts += _box(name, about, lines[name])
    below = sorted(path.stem for path in package.glob("*.py") if path.stem != "__init__")
    y = TOP + len(BANDS) * BAND - 18
    parts.append(
        f'<text x="14" y="{y}">Below them all, single files: {escape(", ".join(below))}.</text>'
    )
    return "\n".join([*parts, "</svg>"]) + "\n"


def _box(name: str, about: list[str], lines: int) -> list[str]:
    place = PLACES[name]
    x, y, inner = place.x, place.y, WIDTH - 24
    kind = "box beside" if name in BESIDE else "box"
    bar = min(lines / LINES_OF_BAR, 1) * inner
    return [
        f'<rect class="{kind}" x="{x}" y="{y}" width="{WIDTH}" height="{HEIGHT}" rx="5"/>',
        f'<text class="name" x="{x + 12}" y="{y + 23}">{name}</text>',
        f'<text class="lines" x="{x + WIDTH - 12}" y="{y + 22}">{lines / 1000:.1f}k lines</text>',
        *(
            f'<text x="{x + 12}" y="{y + 42 + 15 * i}">{escape(text)}</text>'
            for i, text in enumerate(about)
        ),
        f'<rect class="track" x="{x + 12}" y="{y + 68}" width="{inner}" height="5" rx="2"/>',
        f'<rect class="bar" x="{x + 12}" y="{y + 68}" width="{bar:.0f}" height="5" rx="2"/>',
    ]


if __name__ == "__main__":
    print(package_svg(), end="")
