"""Bad rows of a data file: named by their row, counted by kind, and left out where that is said."""

import json

import pytest

from hjax.data.tokenizer import Tokenizer
from hjax.errors import DataError
from hjax.run.inputs import load_inputs
from hjax.settings.config_checks import check_config

LETTERS = Tokenizer.characters("abcdefgh:> ")
GOOD = {"prompt": "ab", "response": "c"}
GOOD_PAIR = {"prompt": "ab", "chosen": "c", "rejected": "d"}


def lines(tmp_path, *rows):
    """A file with a good row before and after the others."""
    path = tmp_path / "rows.jsonl"
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows))
    return path


def inputs(path, source="demonstrations", **changes):
    LETTERS.save(path.parent / "letters")
    keys = {
        "data.path": str(path),
        "tokenizer.path": str(path.parent / "letters"),
        "data.task": "",
        "eval.every": 0,
        "warm_start.steps": 0,
        "rollout.max_prompt_length": 6,
        "rollout.max_response_length": 4,
    }
    return load_inputs(check_config(keys | changes), source)


BAD_ROWS = [
    ('{"prompt": ', "unreadable line", "not valid JSON"),
    ("[1]", "unreadable line", r"a JSON object is needed, found \[1\]"),
    ('{"prompt": "a", "note": "\\ud83d b"}', "text with half a character", "half of a surrogate"),
    ("{}", "no prompt", "there is no prompt"),
    ({"prompt": None, "response": "c"}, "no prompt", "there is no prompt"),
    ({"prompt": 3, "response": "c"}, "unusable prompt", "the prompt is 3"),
    ({"prompt_tokens": [], "response": "c"}, "unusable prompt", r"the prompt is \[\]"),
    ({"prompt": "axe", "response": "c"}, "unusable prompt", "the character 'x'"),
    (
        {"prompt": "abcdefgh", "response": "c"},
        "prompt above rollout.max_prompt_length",
        "the prompt has 9 tokens, above rollout.max_prompt_length=6",
    ),
    ({"messages": "hi"}, "unusable messages", "messages must be a list"),
    ({"messages": [{"role": "assistant", "content": "a"}]}, "unusable messages", "begin with"),
]


@pytest.mark.parametrize(("bad", "kind", "message"), BAD_ROWS)
def test_a_bad_row_is_named_or_left_out_and_counted(bad, kind, message, tmp_path):
    path = lines(tmp_path, GOOD, bad, GOOD, bad)
    with pytest.raises(DataError, match=rf"rows.jsonl:2: .*{message}.*data.invalid=drop") as caught:
        inputs(path)
    assert "\n" not in str(caught.value)
    found = inputs(path, **{"data.invalid": "drop"})
    assert found.left_out == {kind: [f"{path}:2", f"{path}:4"]}
    assert found.remarks == (f"rows left out: 2 × {kind} ({path}:2, {path}:4)",)
    assert found.train.locations == [f"{path}:1", f"{path}:3"]
    assert len(found.demonstrations) == 2
    with pytest.raises(DataError, match=f"every row is left out: 1 × {kind}"):
        inputs(lines(tmp_path, bad), **{"data.invalid": "drop"})


def test_a_parquets_row_and_a_texts_line(tmp_path):
    import pyarrow.parquet

    table = pyarrow.table({"prompt": ["a", None, "b"], "response": ["c", "c", "c"]})
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    found = inputs(tmp_path / "rows.parquet", **{"data.invalid": "drop"})
    assert found.left_out == {"no prompt": [f"{tmp_path / 'rows.parquet'}: row 2"]}
    (tmp_path / "rows.txt").write_bytes(b"ab\n\xff\xfe\nb\n")
    found = inputs(tmp_path / "rows.txt", "prompts", **{"data.invalid": "drop"})
    assert found.left_out == {"unreadable line": [f"{tmp_path / 'rows.txt'}:2"]}


def test_locations_follow_the_rows(tmp_path):
    path = lines(tmp_path, *({"prompt": letter} for letter in "abcdefgh"))
    keys = {"data.eval_fraction": 0.5, "eval.every": 1}
    found = inputs(path, "prompts", **keys)
    for part in (found.train, found.held_out):
        numbers = [int(where.rpartition(":")[2]) for where in part.locations]
        assert part.prompt_text == ["abcdefgh"[number - 1] for number in numbers]
        assert part.select([2, 0]).locations == [part.locations[2], part.locations[0]]


def test_many_rows_are_counted_and_some_listed(tmp_path):
    path = lines(tmp_path, GOOD, *["{}"] * 7, *["["] * 2)
    found = inputs(path, **{"data.invalid": "drop"})
    listed = ", ".join(f"{path}:{i}" for i in range(2, 7))
    unreadable = f"2 × unreadable line ({path}:9, {path}:10)"
    assert found.remarks == (f"rows left out: {unreadable}; 7 × no prompt ({listed}, …)",)
