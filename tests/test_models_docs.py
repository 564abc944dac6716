"""The example in docs/models.md runs as it stands, and its tables are the code's."""

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
