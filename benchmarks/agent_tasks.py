"""Agents that small models learn behind: runs, their data and agents. tool_tasks.py has the rest.

    python -m hjax.launch --config=benchmarks/agent_tasks.py:calculator_agent --workdir=DIR

trains a model from scratch on demonstrations (the stage `sft`), most of which make a mistake, and
then by GRPO on sessions (`grpo`). The tasks:

- `calculator_agent`: two steps of arithmetic by the tool `calc`, in a loop of OpenAI's client.
- `calculator_tool`: the same questions, demonstrations and tool as an environment: what to compare
  with.
- `planner_agent`: two agents on one model. A planner is asked for two steps of arithmetic, and says
  the first; a worker works it out with `calc`; the planner is told, says the second, and then the
  answer.

The client is the package `openai`.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tool_tasks
from ml_collections import ConfigDict
from tool_tasks import MISTAKES, answer, call, result

from hjax.errors import ConfigError

AGENTS = (
    tool_tasks.TOOLS
    + '''

from openai import AsyncOpenAI

# Of all sessions: a client takes some 30 ms of the processor to make.
CLIENT = AsyncOpenAI(base_url="http://127.0.0.1", api_key="-", timeout=None)
CALC = [{"type": "function", "function": {"name": "calc"}}]
_SIGNED = re.compile(r"(-?\\d+)([-+*])(\\d+)")


def signed(e):
    """Computes one step, of numbers that may be below 0."""
    found = _SIGNED.fullmatch(e)
    if found is None:
        raise ValueError("not an expression")
    value = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}
    return value[found[2]](int(found[1]), int(found[3]))


async def worked_out(client, messages, tool=calc):
    """The answer of a conversation in which the tool may be called."""
    for _ in range(4):
        found = await client.chat.completions.create(
            model="policy", messages=messages, tools=CALC
        )
        said = found.choices[0].message
        messages = [*messages, said.model_dump(exclude_none=True)]
        if not said.tool_calls:
            return (said.content or "").strip()
        for one in said.tool_calls:
            try:
                value = tool(**json.loads(one.function.arguments))
            except Exception as error:
                value = f"error: {type(error).__name__}: {error}"
            message = {"role": "tool", "tool_call_id": one.id, "content": str(value)}
            messages = [*messages, message]
    return ""


async def calculator_agent(task, base_url, api_key):
    """Has the question worked out."""
    client = CLIENT.with_options(base_url=base_url, api_key=api_key)
    said = await worked_out(client, [{"role": "user", "content": task["prompt"]}])
    return float(said == str(task["answer"]))


async def planner_agent(task, base_url, api_key):
    """Asks a planner for steps, and a worker to do each."""
    client = CLIENT.with_options(base_url=base_url, api_key=api_key)
    plan = [{"role": "system", "content": "plan"}, {"role": "user", "content": task["prompt"]}]
    for _ in range(3):
        found = await client.chat.completions.create(model="policy", messages=plan)
        said = (found.choices[0].message.content or "").strip()
        if said.startswith("="):
            return float(said[1:] == str(task["answer"]))
        work = [{"role": "system", "content": "work"}, {"role": "user", "content": said}]
        told = await worked_out(client, work, signed)
        plan = [
            *plan, {"role": "assistant", "content": said}, {"role": "user", "content": told or "?"}
        ]
    return 0.0
'''
)
TASKS = ("calculator_tool", "calculator_agent", "planner_agent")


def get_stages(name: str = "calculator_agent") -> dict[str, ConfigDict]:
    """The stages of `--config=agent_tasks.py:TASK`."""
    if name not in TASKS:
        raise ConfigError(f"agent_tasks.py:{name}: there are {', '.join(TASKS)}")
    stages = tool_tasks.get_stages("calculator")
    # To copy the numbers of two steps takes longer to learn than names do.
    stages["sft"].steps = 3000 if name == "planner_agent" else 1000
    stages["grpo"].steps = 2 * tool_tasks.GRPO_STEPS
    if name == "calculator_tool":
        return stages
    plain, grpo = tool_tasks.base.get_config(), stages["grpo"]
    for section, keys in (
        ("environment", ("tools", "max_turns", "turn_tokens")),
        ("reward", ("function",)),
    ):
        for key in keys:
            grpo[section][key] = plain[section][key]
    grpo.agent.function = f"{{workdir}}/data/agents.py:{name}"
    grpo.agent.max_calls, grpo.agent.call_tokens = 4, 28
    if name == "planner_agent":
        grpo.agent.max_calls = 16
        # The planner has no tools, and the worker has.
        grpo.agent.train_call = "all"
        grpo.steps = tool_tasks.GRPO_STEPS
    return stages


def prepare(workdir: Path, name: str = "calculator_agent") -> None:
    """Write the data of a task to `workdir/data`."""
    if (workdir / "data").is_dir():
        return
    made = workdir / ".data"
    tool_tasks.make(made, "calculator", plain=False)
    (made / "agents.py").write_text(AGENTS)
    if name == "planner_agent":
        demonstrations = list(conversations(1000, 3))
        (made / "demonstrations.jsonl").write_text(
            "".join(json.dumps(row) + "\n" for row in demonstrations)
        )
        for file in (made / "tokenizer").iterdir():
            file.unlink()
        (made / "tokenizer").rmdir()
        tool_tasks.make_tokenizer(made / "tokenizer", demonstrations)
    made.rename(workdir / "data")


def conversations(count: int, seed: int) -> Iterator[dict[str, Any]]:
    """Demonstrations of planners and workers."""
    rng = random.Random(seed)
    told = [{"type": "function", "function": {"name": "calc"}}]
    for _ in range(count):
        a, b, c = rng.randint(10, 99), rng.randint(10, 99), rng.randint(2, 9)
        inner, outer = rng.choice("+-"), rng.choice("*+-")
        begun = f"{a}{'*' if rng.random() < MISTAKES else inner}{b}"
        said = [system("plan"), user(f"({a}{inner}{b}){outer}{c}")]
        for step in (begun, f"{eval(begun)}{outer}{c}"):
            value = eval(step)
            said += [answer(step), user(str(value))]
            work = [system("work"), user(step), call("calc", e=step), result(value), answer(value)]
            yield {"messages": work, "tools": told}
        yield {"messages": [*said[:-1], user(str(value)), answer(f"={value}")], "tools": None}


def system(text: str) -> dict[str, str]:
    return {"role": "system", "content": text}


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def data_digest(name: str) -> str:
    """Of a task's data, to tell whether a run would have the same."""
    made: list[Any] = [tool_tasks.data_digest("calculator")]
    if name != "calculator_tool":
        made.append(AGENTS)
    if name == "planner_agent":
        made.append(list(conversations(200, 3)))
    return hashlib.sha256(json.dumps(made).encode()).hexdigest()[:16]
