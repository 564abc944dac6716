"""Bad rows of a data file: named by their row, counted by kind, and left out where that is said."""

import json

import pytest

from hjax.data.tokenizer import Tokenizer
from hjax.errors import ConfigError, DataError
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
    with pytest.raises(
        DataError, match=f"every row is left out: 1 × {kind}.*first one: .*{message}"
    ):
        inputs(lines(tmp_path, bad), **{"data.invalid": "drop"})


MESSAGE = {"role": "assistant", "content": "c"}
BAD_ANSWERS = [
    ("demonstrations", {"prompt": "ab", "response": 3}, "unusable answer", "response is 3"),
    ("demonstrations", {"prompt": "ab", "response": None}, "unusable answer", "response is None"),
    ("demonstrations", {"prompt": "ab", "response": " "}, "empty answer", "teaches nothing"),
    (
        "demonstrations",
        {"prompt": "ab", "response": "abcdefgh"},
        "answer above rollout.max_response_length",
        "an answer has 9 tokens, above rollout.max_response_length=4; .* data.overlong=filter",
    ),
    ("demonstrations", {"prompt": "ab", "response": "x"}, "unusable answer", "the character 'x'"),
    ("pairs", {"prompt": "ab", "chosen": "c", "rejected": ""}, "empty answer", "is empty"),
    ("pairs", {"prompt": "ab", "chosen": "c", "rejected": 3}, "unusable answer", "rejected is 3"),
    ("pairs", GOOD_PAIR | {"margin": -1}, "unusable answer", "the margin is -1"),
    ("pairs", GOOD_PAIR | {"chosen": [MESSAGE]}, "unusable pair", "are text and chat messages"),
    ("verdicts", GOOD | {"label": 3}, "unusable answer", "the label is 3"),
    ("steps", {"prompt": "ab", "completions": [], "labels": []}, "unusable answer", "completions"),
]
GOOD_ROWS = {
    "demonstrations": GOOD,
    "pairs": GOOD_PAIR | {"margin": 1},
    "verdicts": GOOD | {"label": 1},
    "steps": {"prompt": "ab", "completions": ["c"], "labels": [True]},
}


@pytest.mark.parametrize(("source", "bad", "kind", "message"), BAD_ANSWERS)
def test_a_bad_answer_is_named_or_left_out_with_its_prompt(source, bad, kind, message, tmp_path):
    good = GOOD_ROWS[source]
    path = lines(tmp_path, good, bad, good | {"prompt": "b"})
    # The algorithm is what the separator of steps belongs to.
    name = {"steps": "ProcessRewardModel"}.get(source, "PPO")
    keys = {"algorithm.name": name, "algorithm.separator": " "} if source == "steps" else {}
    with pytest.raises(DataError, match=rf"rows.jsonl:2: .*{message}.*data.invalid=drop"):
        inputs(path, source, **keys)
    found = inputs(path, source, **keys, **{"data.invalid": "drop"})
    assert found.left_out == {kind: [f"{path}:2"]}
    assert found.train.prompt_text == ["ab", "b"] and len(found.demonstrations) == 2
    assert [prompt for prompt, *_ in found.demonstrations] == found.train.prompt_tokens


def test_answers_that_are_not_learned_leave_their_prompts(tmp_path):
    path = lines(tmp_path, GOOD, {"prompt": "a", "response": 3}, {"prompt": "b"})
    found = inputs(path, "prompts")
    assert len(found.train) == 3 and not found.left_out


@pytest.mark.parametrize("overlong", ["error", "filter", "truncate_left"])
def test_what_becomes_of_long_answers(overlong, tmp_path):
    path = lines(tmp_path, GOOD, {"prompt": "a", "response": "abcdefgh"})
    keys = {"data.overlong": overlong}
    if overlong == "filter":
        found = inputs(path, **keys, **{"rollout.max_prompt_length": 0})
        assert found.left_out == {"answer above rollout.max_response_length": [f"{path}:2"]}
        assert found.train.prompt_text == ["ab"] and len(found.demonstrations) == 1
        return
    with pytest.raises(DataError, match="rows.jsonl:2: an answer has 9 tokens"):
        inputs(path, **keys)


def test_equal_pairs_are_left_out_and_counted_by_default(tmp_path):
    equal = {"prompt": "ab", "chosen": "c", "rejected": "c"}
    path = lines(tmp_path, GOOD_PAIR, equal, {"chosen": "ab c", "rejected": "ab c"})
    for policy in ("error", "drop"):
        found = inputs(path, "pairs", **{"data.invalid": policy})
        assert found.left_out == {"equal pair": [f"{path}:3", f"{path}:2"]}
        assert found.train.prompt_text == ["ab"] and len(found.demonstrations) == 1


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


STAGES = """
def get_stages():
    common = {common!r}
    return {{
        "sft": {{**common, "data.path": {good!r}, "algorithm.name": "SFT"}},
        "pairs": {{
            **common, "data.path": {second!r}, "algorithm.name": "DPO",
            "actor.path": "{{workdir}}/sft", "tokenizer.path": "",
        }},
    }}
"""


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"prompt": "ab", "chosen": "c", "rejected": 3}, "second.jsonl:2: rejected is 3"),
        ({"prompt": "ab", "chosen": "axe", "rejected": "c"}, "second.jsonl:2: .*character 'x'"),
        (None, "second.jsonl: DPO needs preference pairs; this file has prompt, response: give it"),
        (GOOD_PAIR, ""),
    ],
)
def test_every_stage_is_read_before_the_first_one_trains(bad, message, tmp_path):
    from hjax.launch.stages import dry_run_stages, read_stages, run_stages

    LETTERS.save(tmp_path / "letters")
    second = tmp_path / "second.jsonl"
    rows = [GOOD, GOOD] if bad is None else [GOOD_PAIR, bad]
    second.write_text("".join(json.dumps(row) + "\n" for row in rows))
    common = {
        "tokenizer.path": str(tmp_path / "letters"), "data.task": "", "eval.every": 0,
        "warm_start.steps": 0, "steps": 1, "rollout.max_prompt_length": 6,
        "rollout.max_response_length": 4, "model.hidden_size": 8, "model.heads": 1,
        "model.kv_heads": 1, "model.layers": 1, "model.mlp_size": 8, "model.max_length": 0,
    }  # fmt: skip
    file = tmp_path / "two.py"
    good = str(lines(tmp_path, GOOD))
    file.write_text(STAGES.format(common=common, good=good, second=str(second)))
    stages, _ = read_stages(str(file), [])
    ran = []

    def run(title, config, workdir):
        workdir.mkdir(parents=True)
        ran.append(workdir.name)
        return 0

    if not message:
        run_stages(stages, tmp_path / "run", run)
        assert ran == ["sft", "pairs"]
        return
    for start in (
        lambda: run_stages(stages, tmp_path / "run", run),
        lambda: dry_run_stages(stages, None, lambda title, config: ran.append(title)),
    ):
        with pytest.raises(ConfigError, match=f"stage pairs: .*{message}"):
            start()
    assert not ran and not list((tmp_path / "run").glob("*/*"))
