"""The example in docs/models.md runs as it stands, and its tables are the code's."""

import ast
import pathlib
import re

from hjax.sharding.layout import GENERATE_RULES, TRAIN_RULES

PAGE = (pathlib.Path(__file__).parent.parent / "docs" / "models.md").read_text()


def test_the_example_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    [block] = re.findall(r"^```python\n(.*?)^```", PAGE, re.M | re.S)
    exec(compile(block, "models.md", "exec"), {"__name__": "example"})
    assert re.match(r"\[\d+.*(length|stop)\n", capsys.readouterr().out)
    assert {p.name for p in (tmp_path / "tiny").iterdir()} >= {"config.json", "model.safetensors"}


def test_the_rule_table_is_the_codes():
    section = PAGE.split("## Layouts")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (`.*?`) \| (.*?) \| (.*?) \|$", section, re.M)
    found = {}
    for names, train, generate in rows:
        for name in re.findall("`(.*?)`", names):
            found[name] = (
                tuple(re.findall("`(.*?)`", train)),
                tuple(re.findall("`(.*?)`", generate)),
            )
    assert found == {name: (TRAIN_RULES[name], GENERATE_RULES[name]) for name in TRAIN_RULES}


def bare(source):
    """A class without docstrings and annotations, as its code is written."""
    [found] = [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)]
    for node in ast.walk(found):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and ast.get_docstring(node):
            del node.body[0]
        if isinstance(node, ast.FunctionDef):
            node.returns = None
        if isinstance(node, ast.arg):
            node.annotation = None
    return ast.unparse(found)


def test_the_example_of_a_family_is_the_sources():
    root = pathlib.Path(__file__).parent.parent
    page = (root / "docs" / "families.md").read_text()
    [block] = re.findall(r"^```python\n(.*?)^```", page, re.M | re.S)
    assert bare(block) == bare((root / "hjax/models/families/olmo2.py").read_text())
