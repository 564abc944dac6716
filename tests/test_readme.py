"""The README leads to every page and names every room."""

import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def section(title):
    return README.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def test_every_page_of_docs_is_linked():
    pages = {f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")}
    pages |= {"docs/algorithms/index.md"}  # which leads to those beside it
    rows = re.findall(r"^\| \[\w+\]\((docs/[^)#]+)\) \| (.+) \|$", section("Read on"), re.MULTILINE)
    assert {page for page, _ in rows} == pages and len(rows) == len(pages)
    assert all(10 < len(has) < 100 for _, has in rows)  # half a line


def test_every_room_is_named():
    rooms = {path.parent.name for path in (ROOT / "hjax").glob("*/__init__.py")}
    named = re.findall(r"`hjax/(\w+)`", section("Where things are"))
    assert set(named) == rooms and len(named) == len(rooms)


PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


def anchors(page):
    """What a heading is called in a link, as GitHub does it."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\((?!https?:)([^)\s]+)\)", page.read_text()):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(target), link


def test_what_shows_it_is_there():
    shown = (ROOT / "docs" / "shows.md").read_text()
    files = set(re.findall(r"`((?:tests|benchmarks|notebooks)/[\w/.]+\.\w+)", shown))
    assert len(files) > 20 and [file for file in files if not (ROOT / file).is_file()] == []
