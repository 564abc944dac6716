"""Whole runs in which the policy calls tools."""

import itertools
import json

import pytest
import tool_tasks
from helpers import computed, read_rows, trainer_of

from hjax.controller import join
from hjax.errors import ConfigError

ONE = {"cluster.devices_per_process": 1}
TOOLS = '''
def double(of: int) -> int:
    """Doubles."""
    return 2 * of

def reward(prompts, responses, answer, **columns):
    assert len(prompts) == len(responses) == len(answer)
    return [float(said == str(right)) for said, right in zip(responses, answer)]
'''


def tool_keys(folder):
    """Keys of runs from a model that has learned conversations with a tool by heart, some of them
    with a call that cannot be read or a result that it does not use."""
    (folder / "tools.py").write_text(TOOLS)
    shown = {"type": "function", "function": {"name": "double"}}
    talks, rows = [], []
    for n, wrong in itertools.product(range(4), range(3)):
        turns = [tool_tasks.call("double", of=n), tool_tasks.result(2 * n)]
        if wrong == 1:
            turns[:0] = [
                tool_tasks.answer("<tool_call>{"),
                {"role": "user", "content": "error: the tool call could not be read; write it "
                 "as the tools say"},
            ]  # fmt: skip
        turns.append(tool_tasks.answer(2 * n + (wrong == 2)))
        talks.append({"messages": [{"role": "user", "content": f"{n}?"}, *turns], "tools": [shown]})
        rows.append({"prompt": f"{n}?", "answer": 2 * n})
    for name, lines in (("talks", talks), ("rows", rows)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    tool_tasks.make_tokenizer(folder / "tokenizer", talks)
    model = {
        "data.task": "",
        "tokenizer.path": f"{folder}/tokenizer",
        "model.max_length": 256,
        "rollout.max_response_length": 160,
    }
    learned = {**model, **ONE, "data.path": f"{folder}/talks.jsonl", "steps": 120,
               "eval.every": 0, "warm_start.batch": 12, "actor.learning_rate": 1e-2}  # fmt: skip
    with trainer_of("SFT", learned, folder / "sft") as trainer:
        trainer.run()
    return {
        **model,
        "data.path": f"{folder}/rows.jsonl",
        "data.eval_path": f"{folder}/rows.jsonl",
        "data.eval_size": 4,
        "actor.path": f"{folder}/sft",
        "warm_start.steps": 0,
        "environment.tools": f"{folder}/tools.py:double",
        "environment.max_turns": 4,
        "environment.turn_tokens": 40,
        "environment.processes": 2,
        "reward.function": f"{folder}/tools.py:reward",
        "rollout.max_prompt_length": 40,
    }


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    """As ``tool_keys``."""
    return tool_keys(tmp_path_factory.mktemp("tools"))


def test_calls_are_run_and_the_last_turn_is_rewarded(keys, tmp_path):
    with trainer_of("GRPO", {**keys, **ONE, "steps": 2, "eval.every": 1}, tmp_path / "run") as t:
        *_, last = t.run()
        batch = t.batch
    assert last["episode/tool_calls"] > 0.5 and "eval/reward" in last
    assert last["rollout/token_prob_error"] == pytest.approx(1, abs=1e-5)
    calls = errors = 0
    for row, (said, records, answer) in enumerate(
        zip(batch["response_text"], batch["turn_records"], batch["columns"]["answer"], strict=True)
    ):
        assert records[-1]["action"] == said
        assert batch["rewards"][row] == (said == str(answer))
        for turn in records:
            if turn["observation"].startswith("error: the tool call could not be read"):
                assert not turn["valid"]
                errors += 1
            elif turn["observation"]:
                call = json.loads(turn["action"][len("<tool_call>") : -len("</tool_call>")])
                assert turn["observation"] == str(2 * call["arguments"]["of"])
                calls += 1
    assert calls and errors
    assert any(sample.get("turns") for sample in read_rows(tmp_path / "run", "samples.jsonl"))


@pytest.mark.parametrize(("algorithm", "changes"), [
    ("GRPO", {**ONE, "actor.lora.rank": 2, "data.packing": 224}),
    ("PPO", {"cluster.devices_per_process": 2, "layout.actor.train.tensor": 2,
             "layout.actor.generate.tensor": 2, "actor.micro_batch": 4}),
    pytest.param("GRPO", {"cluster.processes": 2, "cluster.devices_per_process": 1},
                 marks=pytest.mark.slow),
])  # fmt: skip
def test_a_resumed_run_is_the_same(algorithm, changes, keys, tmp_path):
    keys = {**keys, **changes, "eval.every": 0, "checkpoint.every": 1}
    with trainer_of(algorithm, {**keys, "steps": 3}, tmp_path / "whole") as trainer:
        whole = [computed(row) for row in trainer.run()]
    assert (
        whole[0]["rollout/token_prob_error"] == pytest.approx(1, abs=1e-5)
        and whole[-1]["episode/tool_calls"] > 0
    )
    with trainer_of(algorithm, {**keys, "steps": 2}, tmp_path / "parts") as trainer:
        list(trainer.run())
    with trainer_of(algorithm, {**keys, "steps": 3}, tmp_path / "parts") as trainer:
        list(trainer.run())
    assert [computed(row) for row in read_rows(tmp_path / "parts")] == whole


@pytest.mark.parametrize(("changes", "says"), [
    ({"environment.function": "hjax.environments.maze:Maze"}, "are played by .*Maze already"),
    ({"data.task": "sorting", "data.path": ""}, "prompts of the built-in task sorting are no ch"),
    ({"reward.path": "x"}, "config.reward.path=x: a reward model reads single responses"),
    ({"environment.tools": "none.py:a"}, "environment.tools='none.py:a': there is no file none"),
    ({"reward.function": ""}, "reward.function"),
])  # fmt: skip
def test_what_does_not_go_together(changes, says, keys, tmp_path):
    with pytest.raises(ConfigError, match=says):
        with trainer_of("GRPO", {**keys, **ONE, **changes}, tmp_path / "run") as trainer:
            join(trainer.run())
