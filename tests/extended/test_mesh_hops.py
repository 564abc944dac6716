"""The table of hops in benchmarks/RESULTS.md, and the command that writes the tables."""

import pathlib
import shutil

import paper_tables as tables
import pytest
from mesh_hops import hops_table, rings

from hjax.sharding.device_mesh import AXIS_WEIGHTS

ROOT = pathlib.Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "RESULTS.md"


def test_the_page_s_table_is_what_the_command_makes():
    assert dict(tables.sections(RESULTS.read_text()))["hops"] == hops_table()


def test_what_the_page_says_of_data_axes_that_gain_nothing_or_lose():
    """A mesh is weighed as a whole: fsdp's ways count four times as much as data's."""
    listed, placed = rings("v6e:8x8", {"data": 2, "fsdp": 8, "tensor": 4}, 2)
    assert [x["data"].hops for x in (listed, placed)] == [4, 4]
    listed, placed = rings("v5p:8x8x8", {"data": 8, "fsdp": 8, "tensor": 8}, 2)
    assert [x["data"].hops for x in (listed, placed)] == [1, 2.5]
    assert [x["fsdp"].hops for x in (listed, placed)] == [5, 1]
    weighed = sum(AXIS_WEIGHTS[axis] * placed[axis].hops for axis in ("data", "fsdp"))
    exchanged = AXIS_WEIGHTS["data"] * placed["fsdp"].hops
    exchanged += AXIS_WEIGHTS["fsdp"] * placed["data"].hops
    assert (weighed, exchanged) == (6.5, 11)
    page = RESULTS.read_text()
    assert "2.50 + 4 × 1.00 = 6.5" in page and "1.00 + 4 × 2.50 = 11.0" in page


@pytest.mark.parametrize("flag", ["--write", "--write=benchmarks/RESULTS.md"])
def test_the_command_writes_a_table_between_its_marks_and_nothing_else(
    flag, tmp_path, monkeypatch, capsys
):
    (tmp_path / "docs").mkdir()
    (tmp_path / "benchmarks").mkdir()
    for page in tables.PAGES:
        shutil.copy(ROOT / page, tmp_path / page)
    text = (tmp_path / "benchmarks/RESULTS.md").read_text()
    stale = text.replace("| v5e:8x8 | data 8 × tensor 8 | data | 5.50", "| v5e:8x8 | gone | 9.99")
    assert stale != text
    (tmp_path / "benchmarks/RESULTS.md").write_text(stale)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(tables.TABLES, "devices", lambda: "| another |")
    assert tables.main(["hops", "devices", flag]) == 0
    assert (tmp_path / "benchmarks/RESULTS.md").read_text() == text
    other = dict(tables.sections((tmp_path / "docs/auto_mapping.md").read_text()))
    assert (other["devices"] == "| another |") == (flag == "--write")
    assert "| v5e:8x8 | data 8 × tensor 8 | data | 5.50, 1.75 | 8, 2 |" in capsys.readouterr().out


def test_every_table_of_the_pages_has_its_name_in_the_command():
    found = [name for page in tables.PAGES
             for name, _ in tables.sections((ROOT / page).read_text())]  # fmt: skip
    assert sorted(found) == sorted(tables.TABLES)


def test_a_flag_that_is_not_known_is_refused(capsys):
    assert tables.main(["hops", "--wirte"]) == 2
    assert "no flag is named --wirte" in capsys.readouterr().err
