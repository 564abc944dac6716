"""`hjax.launch.evaluate --agent=...`: a model behind an agent is scored without training."""

import json
import pathlib

import pytest
from helpers import models_loaded_once, read_rows, save_model
from serving_double import byte_tokenizer

from hjax.launch import evaluate

AGENT = f"{pathlib.Path(__file__).parent}/agents_double.py:two_questions"


@pytest.mark.extended
def test_a_model_is_scored_behind_an_agent(tmp_path, capsys):
    save_model(tmp_path / "model", tokenizer=byte_tokenizer(), vocab_size=258, max_length=256)
    rows = "".join(json.dumps({"prompt": f"{n}?"}) + "\n" for n in range(3))
    (tmp_path / "rows.jsonl").write_text(rows)
    flags = [
        f"--model={tmp_path}/model", f"--data={tmp_path}/rows.jsonl", f"--agent={AGENT}",
        "--samples=2", "--json",
    ]  # fmt: skip
    with models_loaded_once():
        assert evaluate.main([*flags, f"--output={tmp_path}/out.jsonl"]) == 0
        first = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert evaluate.main([*flags, f"--output={tmp_path}/again.jsonl"]) == 0
        again = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert first["questions"] == 3 and first["episodes"]["stop_done"] == 1
    assert first["episodes"]["calls"] == 2 and first["agent"] == AGENT
    written = read_rows(tmp_path, "out.jsonl")
    assert [row["reward"] for row in written] == [
        float(sum(len(turn["action"]) for turn in row["turns"]) % 2) for row in written
    ]
    said = [[turn["action"] for turn in row["turns"]] for row in written]
    assert said == [
        [turn["action"] for turn in r["turns"]] for r in read_rows(tmp_path, "again.jsonl")
    ]
    assert said[0] != said[1] and first["tokens"] == again["tokens"] > 0


def test_flags_that_do_not_go_together_are_refused(tmp_path, capsys):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a"}\n')
    base = [f"--model={tmp_path}", f"--data={tmp_path}/rows.jsonl"]
    for flags, said in (
        (["--agent=a.py:b", "--tools=c.py:d"], "already; keep one"),
        (["--agent=a.py:b", "--reward=math"], "rewards its episodes itself"),
        (["--reward=math", "--verifier=a.py:b"], "of --agent leaves"),
        (["--agent=a.py:b", "--readable=/a"], "for a program of --agent"),
        (["--agent=a.py:b", "--confined=false"], "for a program of --agent"),
    ):
        assert evaluate.main([*base, *flags]) == 2
        assert said in capsys.readouterr().err
