"""docs/algorithms says what the source says, and has a place for every algorithm and config."""

import functools
import inspect
import pathlib
import re
import shlex

import pytest
from algorithm_pages import configs, sections, source, written

import hjax.algorithms
from hjax.algorithms import ALGORITHMS, Algorithm
from hjax.errors import ConfigError
from hjax.settings.config_loading import config_names, load_config

FOLDER = pathlib.Path(__file__).parent.parent / "docs" / "algorithms"
PAGES = {path.name: path.read_text() for path in sorted(FOLDER.glob("*.md"))}


def test_pages_have_what_the_source_has():
    stale = [name for name, text in PAGES.items() if written(text, FOLDER) != text]
    assert not stale, "run: python docs/generate/algorithm_pages.py"


def test_every_algorithm_and_config_is_explained():
    exported = {
        name
        for name, thing in vars(hjax.algorithms).items()
        if inspect.isclass(thing) and issubclass(thing, Algorithm) and thing is not Algorithm
    }
    assert exported == set(ALGORITHMS) and exported <= set(hjax.algorithms.__all__)
    assert set(sections(FOLDER)) == exported
    index, others = PAGES["index.md"], "|".join(exported)
    assert {name for name in config_names() if f"`{name}`" not in index} == set()
    for name, files in configs().items():
        # A dataflow, formulas and how it differs: every section has one of each that is its own.
        page, _, _ = sections(FOLDER)[name].partition("#")
        section = re.split(rf"^#+ {name}$", PAGES[page], flags=re.M)[1]
        section = re.split(rf"^## (?:{others})$", section, flags=re.M)[0]
        assert "```text\n" in section, name
        assert f"<!-- curve {files[0][:-3]} -->" in section, name
        base = ALGORITHMS[name].__mro__[1]
        asked = re.findall(r"<!-- (sets|source|keys) ", section)
        assert ("sets" in asked) if base in ALGORITHMS.values() else ("source" in asked), name


def test_every_paper_that_a_file_names_is_in_the_index():
    folder = pathlib.Path(hjax.algorithms.__file__).parent
    named = {
        found
        for path in folder.glob("*.py")
        for found in re.findall(r"\b(\d{4}\.\d{5})\b", path.read_text())
    }
    listed = re.findall(
        r"^\|.*\[(\d{4}\.\d{5})\]\(https://arxiv\.org/abs/(\d{4}\.\d{5})\)", PAGES["index.md"], re.M
    )
    assert all(one == other for one, other in listed)
    assert named <= {one for one, _ in listed} and len(listed) == len(set(listed)) > 20


@pytest.mark.extended
def test_every_switch_of_another_formula_is_one():
    rows = re.findall(r"\| `(\w+\.py(?: --[^`]*)?)` \|$", PAGES["same_name.md"], re.M)
    assert len(rows) > 15
    unchanged = functools.cache(lambda name: load_config(name).to_dict())
    for row in rows:
        name, *flags = shlex.split(row)
        switched = load_config(name, flags)
        assert not flags or unchanged(name) != switched.to_dict(), row
        assert all(flag.startswith("--config.algorithm.") for flag in flags)


def test_source_is_what_stands_there_without_its_docstring():
    text = source("hjax.algorithms.sft:SFT.learn")
    assert text.splitlines() == [
        "def learn(self, batch: Any) -> Batch:",
        "    self.log(self.actor.update_actor(batch))",
        "    return batch",
    ]


@pytest.mark.parametrize(
    ("block", "says"),
    [
        ("<!-- source hjax.algorithms.ppo:PPO.lern -->", "has no attribute 'lern'|PPO.lern"),
        ("<!-- source hjax.algorithms.pppo:PPO -->", "pppo"),
        ("<!-- keys PPPO -->", "no such algorithm"),
        ("<!-- curve pppo -->", "no such config"),
    ],
)
def test_what_is_not_there_is_named(block, says):
    with pytest.raises(ConfigError, match=says):
        written(f"{block}\n<!-- end -->", FOLDER)


def test_an_algorithm_without_a_section_is_named(tmp_path):
    with pytest.raises(ConfigError, match="PPO has no section"):
        written("<!-- index -->\n<!-- end -->", tmp_path)
