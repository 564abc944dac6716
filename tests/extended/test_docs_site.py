"""The documentation site builds, leads everywhere, and its examples run."""

import html.parser
import importlib
import json
import os
import pathlib
import re
import subprocess
import sys
import types
import urllib.parse

import pytest
from dictionary_page import dictionary_markdown

import hjax
from hjax.algorithms import ALGORITHMS
from hjax.config import flatten
from hjax.launch.stages import read_stages
from hjax.settings.config_loading import STAGES

ROOT = pathlib.Path(__file__).parents[2]
DOCS = ROOT / "docs"
REPOSITORY = "https://github.com/an-owner/a-name"
PAGES = sorted(path for path in DOCS.rglob("*.md"))


class Page(html.parser.HTMLParser):
    """Where a page's links lead, and what can be linked to in it."""

    def __init__(self, path):
        super().__init__()
        self.links, self.anchors = set(), set()
        self.feed(path.read_text())

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        if "id" in attributes:
            self.anchors.add(attributes["id"])
        if tag == "a" and attributes.get("href"):
            self.links.add(attributes["href"])


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The built site: page by path. A warning of mkdocs is an error."""
    pytest.importorskip("mkdocs", reason="mkdocs is not installed: pip install -e '.[docs]'")
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "-d", str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1", "HJAX_REPOSITORY": REPOSITORY},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return {path: Page(path) for path in folder.rglob("*.html") if path.name != "404.html"}


def test_no_link_is_dead_and_every_page_is_two_clicks_away(site):
    leads, dead = {}, []
    for path, page in site.items():
        leads[path] = set()
        for link in page.links:
            parts = urllib.parse.urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = path.parent / urllib.parse.unquote(parts.path) if parts.path else path
            target = (target / "index.html" if target.is_dir() else target).resolve()
            anchor = urllib.parse.unquote(parts.fragment)
            if not target.exists() or (
                anchor and target in site and anchor not in site[target].anchors | {"__top"}
            ):
                dead.append(f"{path.parent.name}: {link}")
            leads[path].add(target)
    assert dead == []
    start = next(path for path in site if path.parent == min(p.parent for p in site))
    near = leads[start] | {start}
    near |= {page for each in list(near) for page in leads.get(each, ())}
    assert {str(path) for path in site} - {str(path) for path in near} == set()


def test_notebooks_have_a_badge_that_opens_them_in_colab(site):
    colab = "https://colab.research.google.com/github/an-owner/a-name/blob/main/notebooks/"
    found = [link for page in site.values() for link in page.links if link.startswith(colab)]
    notebooks = sorted(path.name for path in (ROOT / "notebooks").glob("*.ipynb"))
    assert sorted(link.removeprefix(colab) for link in found) == notebooks
    for name in notebooks:  # rendered, with their figures, not offered as files
        (page,) = [path for path in site if path.parts[-2] == name.removesuffix(".ipynb")]
        assert "data:image/png;base64," in page.read_text(), name


def test_every_public_name_has_its_place_in_the_reference(site):
    anchors = {anchor for page in site.values() for anchor in page.anchors}
    missing = []
    for name in ("hjax", "hjax.algorithms", "hjax.workers", "hjax.controller"):
        module = importlib.import_module(name)
        for public in module.__all__:
            value = getattr(module, public)
            home = getattr(value, "__module__", "")
            found = {f"{name}.{public}", f"{home}.{getattr(value, '__qualname__', public)}"}
            if not hasattr(value, "__qualname__") or isinstance(value, types.GenericAlias):
                continue  # a module, with a page of its own; a table, a version, an alias
            if not found & anchors:
                missing.append(f"{name}.{public}")
    assert missing == []


def test_the_dictionary_is_what_hjax_answers():
    assert (DOCS / "dictionary.md").read_text() == dictionary_markdown()


RUNNING = {"start.md", "debugging.md"}  # their examples train
# Those of other pages: tests/test_data_docs.py, test_models_docs.py, test_algorithms_extending.py,
# test_serving_tools.py; algorithms' are the source's own lines (tests/test_algorithm_docs.py).
OTHERS = ("auto_mapping.md", "logging.md", "rlhf.md")
EXAMPLES = [
    pytest.param(page, marks=pytest.mark.slow if page.name in RUNNING else ())
    for page in PAGES
    if (page.parent.name in ("tutorials", "guides") or page.name in OTHERS)
    and "```python" in page.read_text()
]


@pytest.mark.parametrize("page", EXAMPLES, ids=lambda page: page.name)
def test_examples_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "mlflow", types.ModuleType("mlflow"))  # imported by an example
    blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(), re.M | re.S)
    for number, block in enumerate(blocks):
        if block.startswith("# figure.py"):  # of runs: test_worked_examples.py
            continue
        exec(compile(block, f"{page.name} example {number}", "exec"), {"__name__": f"ex{number}"})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(DOCS)))
def test_keys_on_command_lines_are_there(page):
    """`--config.a.b=...` in any page is a key of the config that the line names."""
    lines = re.sub(r"\\\n\s*", "", page.read_text()).splitlines()
    for line in lines:
        if "-m hjax.launch" not in line or "--config.lr=" in line or "--config.a.b=" in line:
            continue
        named = re.search(r"--config=(\w+\.py)", line)
        own = re.search(r"--config\.algorithm\.name=\S+\.py:", line)
        shipped = named and (ROOT / "hjax/launch/configs" / named[1]).is_file()
        keys = flatten(hjax.get_config(named[1] if shipped else "grpo.py"))
        if named and (STAGES / named[1]).is_file():
            stages, _ = read_stages(named[1], [])
            of = {stage: flatten(config) for stage, config in stages.configs(ROOT).items()}
            keys |= {f"{stage}.{key}": x for stage, each in of.items() for key, x in each.items()}
        other = re.search(r"--config\.algorithm\.name=(\w+)(?:\s|$)", line)
        if other and other[1] in ALGORITHMS:
            keys |= {f"algorithm.{key}": None for key in ALGORITHMS[other[1]].all_keys()}
        for key in re.findall(r"--config\.([\w.]+)=", line):
            if key.startswith("algorithm.") and own:
                continue
            assert key in keys or key.startswith("data.task_options."), (line, key)


# What people type, and the page that answers it.
SOUGHT = {
    "batch size": "faq/",
    "out of memory": "guides/memory/",
    "multi-turn": "agents/",
    "reward model": "reward_models/",
    "KTO": "algorithms/own_and_unpaired/",
    "LoRA": "guides/lora/",
    "resume": "guides/resuming/",
    "data formats": "guides/data_formats/",
}


@pytest.mark.parametrize("words", SOUGHT)
def test_search_finds_the_right_page_first(site, words):
    """By the site's own index, scored as the page's search does (lunr, titles boosted)."""
    lunr = pytest.importorskip("lunr", reason="lunr is not installed: pip install lunr")
    start = min((path.parent for path in site), key=lambda folder: len(folder.parts))
    entries = json.loads((start / "search" / "search_index.json").read_text())["docs"]
    fields = [{"field_name": "title", "boost": 1000}, "text"]
    documents = [{name: entry[name] for name in ("location", "title", "text")} for entry in entries]
    index = lunr.lunr(ref="location", fields=fields, documents=documents)
    found = [hit["ref"].partition("#")[0] for hit in index.search(words.replace("-", " "))]
    assert found[:1] == [SOUGHT[words]], found[:8]
