"""Rows of conversations as verl, SkyRL and TRL have them: read as they are, or refused by name."""

import json

import pytest

from hjax.data.tokenizer import Tokenizer
from hjax.environments.episode import episode_tasks
from hjax.errors import ConfigError
from hjax.rewards import math_answers
from hjax.rewards.code_tests import program_tests
from hjax.run.inputs import load_inputs
from hjax.run.multi_turn_rows import check_asked
from hjax.settings.config_loading import load_config

ASKED = [{"role": "user", "content": "12 times 3?"}]
# gsm8k_multiturn_w_interaction of verl, as its preprocessing writes it.
INTERACTION = {
    "data_source": "openai/gsm8k", "prompt": ASKED, "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "36"},
    "extra_info": {
        "split": "train", "index": 0,
        "interaction_kwargs": {"name": "gsm8k", "query": "12 times 3?", "ground_truth": "36"},
    },
}  # fmt: skip
# gsm8k_multiturn_w_tool.
TOOL = {
    "data_source": "openai/gsm8k", "agent_name": "tool_agent", "prompt": ASKED,
    "reward_model": {"style": "rule", "ground_truth": "36"},
    "extra_info": {
        "need_tools_kwargs": True,
        "tools_kwargs": {"score": {"create_kwargs": {"ground_truth": "36"}}},
        "interaction_kwargs": {"query": None, "ground_truth": None},
    },
}  # fmt: skip
# SkyRL's multiply.
SKYRL = {
    "data_source": "synthetic_multiply", "prompt": ASKED, "env_class": "multiply",
    "reward_spec": {"method": "rule", "ground_truth": 36},
    "extra_info": {"num_digits": 2, "split": "train"},
}  # fmt: skip
# TRL's, whose columns beside the prompt are arguments of the environment's `reset`.
TRL = {"prompt": ASKED, "environment": "wordle", "secret": "pear"}
GAME = {"environment.function": "hjax.environments.maze:Maze"}
SCORE = '''
class Score:
    """Scores an answer."""
    name = "score"
    def __init__(self, ground_truth):
        self.right = ground_truth
    def __call__(self, answer: str) -> float:
        return float(answer == self.right)

def reward(prompts, responses, **columns):
    return [0.0] * len(responses)
'''


@pytest.fixture
def read(tmp_path):
    """Reads rows as a run does; returns the training set's columns."""
    Tokenizer.characters("".join(map(chr, range(32, 127))) + "\n").save(tmp_path / "tokenizer")
    template = "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}"
    template += (
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% for c in m.tool_calls or [] %}"
        '<tool_call>{"name": "{{ c.function.name }}", "arguments": '
        "{{ c.function.arguments | tojson }}}</tool_call>{% endfor %}\n{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    (tmp_path / "tokenizer" / "chat_template.jinja").write_text(template)
    (tmp_path / "score.py").write_text(SCORE)

    def run(*rows, **changes):
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        keys = {
            "data.task": "", "data.path": str(path), "data.eval_size": 0, "eval.every": 0,
            "tokenizer.path": f"{tmp_path}/tokenizer", "rollout.max_prompt_length": 0,
            "warm_start.steps": 0, "reward.function": f"{tmp_path}/score.py:reward",
        }  # fmt: skip
        keys |= {key.replace("__", "."): value for key, value in changes.items()}
        tools = keys.pop("tools", "")
        if tools:
            keys["environment.tools"] = f"{tmp_path}/{tools}"
        return load_inputs(load_config("grpo.py", keys)).train

    return run


@pytest.mark.parametrize("row", [INTERACTION, TOOL, SKYRL, TRL])
def test_an_environment_has_the_row_as_it_is(row, read):
    data = read(row, **GAME, reward__function="")
    assert episode_tasks(data.columns, data.prompt_text) == [
        {**row, "prompt": data.prompt_text[0]}
    ] or episode_tasks(data.columns, data.prompt_text) == [row]


@pytest.mark.parametrize("row, tools, says", [
    (INTERACTION, "", "extra_info.interaction_kwargs is .*gsm8k.*: somebody is to answer each"),
    (INTERACTION, "score.py:Score", "extra_info.interaction_kwargs is"),
    ({"prompt": ASKED, "interaction_kwargs": {"name": "x"}}, "", "rows.jsonl:1: interaction_kw"),
    (TOOL, "", "extra_info.tools_kwargs is .* to be there; set config.environment.tools"),
    ({**TOOL, "extra_info": {"need_tools_kwargs": True}}, "", "extra_info.need_tools_kwargs is T"),
    ({**TOOL, "extra_info": None}, "", "agent_name is 'tool_agent': tools are to be there"),
])  # fmt: skip
def test_what_a_run_does_not_have_is_refused(row, tools, says, read):
    with pytest.raises(ConfigError, match=says):
        read(row, tools=tools)


def test_the_flags_of_a_command_are_named(read):
    data = read(TOOL, tools="score.py:Score")
    check_asked(data, True)
    flags = {"environment_key": "--environment", "tools_key": "--tools"}
    with pytest.raises(ConfigError, match="set --tools=FILE.py:NAME,..., or --environment=FILE.py"):
        check_asked(data, False, **flags)


def test_what_asks_for_nothing_more_is_read(read):
    read(TOOL, tools="score.py:Score")
    read({**TOOL, "agent_name": "single_turn_agent", "extra_info": {"need_tools_kwargs": False}})
    assert read(SKYRL).columns["env_class"] == ["multiply"]
    # In parquet files every row has the fields of all.
    null = {"tools_kwargs": None, "interaction_kwargs": {"name": None, "query": ""}}
    read({**INTERACTION, "agent_name": None, "extra_info": null})


def test_skyrls_right_answers_score():
    assert math_answers.reward(["q"], [r"\boxed{36}"], reward_spec=[SKYRL["reward_spec"]]) == [1]
    tests = json.dumps({"inputs": ["1\n"], "outputs": ["2\n"]})
    (found,) = program_tests({"reward_spec": [{"method": "rule", "ground_truth": tests}]})
    assert (found.inputs, found.outputs) == (("1\n",), ("2\n",))
