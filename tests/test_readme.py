"""The README leads to every page and names every room, and its examples run."""

import json
import pathlib
import re

import pytest
from helpers import TINY, command, read_rows

from hjax.launch.__main__ import main

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


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


@pytest.fixture
def files(tmp_path, monkeypatch):
    """In a folder with the README's Python files, those blocks whose first line names one."""
    monkeypatch.chdir(tmp_path)
    for block in blocks("python"):
        if name := re.match(r"# (\w+\.py)\n", block):
            (tmp_path / name[1]).write_text(block)
    return tmp_path


@pytest.mark.extended
def test_a_reward_and_an_algorithm_of_ones_own_as_they_stand(files):
    """With the README's own flags, in a run cut to size."""
    commands = [line for block in blocks("sh") for line in block.splitlines()]
    own = [line for line in commands if ".py:" in line]
    assert len(own) == 2 and {path.name for path in files.iterdir()} == {"brief.py", "mine.py"}
    less = {key: value for key, value in TINY.items() if key.count(".") == 1}
    less |= {"steps": 1, "algorithm.minibatch": 16, "rollout.max_response_length": 6}
    for line in own:
        module, config, *keys = line.removeprefix("python -m ").split()
        assert (module, config) == ("hjax.launch", "--config=ppo.py")
        assert main([config, *command(less), "--workdir=run", "--overwrite", *keys]) == 0
        [row] = read_rows(files / "run")
        if "brief" in line:
            for sample in read_rows(files / "run", "samples.jsonl"):
                expected = 1.0 / (1 + len(sample["response"]))
                assert sample["reward"] == pytest.approx(expected)
        else:
            written = json.loads((files / "run" / "config.json").read_text())
            assert written["algorithm"]["threshold"] == 0.2 and row["actor/loss"] is not None


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_trainer_in_python_as_it_stands(files, capsys):
    """The block's own model, after a run of the README's first lines, cut to one step."""
    short = {"steps": 1, "warm_start.steps": 1, "eval.every": 0, "display.enabled": False}
    assert main(["--config=ppo.py", "--workdir=runs/first", *command(short)]) == 0
    [block] = [block for block in blocks("python") if "Trainer(" in block]
    lines = block.rstrip().splitlines()
    made = {}
    exec("\n".join([*lines[:-1], f"text = {lines[-1]}"]), made)
    assert made["metrics"]["step"] == 1 and len(made["trainer"].batch["rewards"]) == 32 * 4
    assert made["trainer"].step_number == 101 and set(made["text"]) <= set("0123456789>")
    made["trainer"].close()
