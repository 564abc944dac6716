"""Client libraries against the agents' gateway: what each session was recorded as.

    python benchmarks/agent_clients.py [--only=langgraph,...] [--environments=DIR]

Each library stands in an environment of its own, which pip makes, and runs an agent with a tool.
The policy answers by a script: a call of the tool, then the answer. Prints for each the calls, the
rows, and whether the recorded ids are those that were drawn. `openenv` is OpenEnv's own recorder
(its capture server) in front of the gateway: whether it has recorded the same.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile
from typing import Any

import environment_packages

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "tests"))
BASH = '<tool_call>{"name": "bash", "arguments": {"command": "%s"}}</tool_call>'
CALL = '<tool_call>{"name": "add", "arguments": {"a": 3, "b": 4}}</tool_call>'
# By library: what pip installs, what the policy says, the rows that the rules give, and the agent.
CLIENTS: dict[str, tuple[tuple[str, ...], list[str], int, str]] = {
    "pydantic-ai-slim": (
        ("pydantic-ai-slim[openai]",),
        [CALL, "seven"],
        1,
        """
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
model = OpenAIChatModel("any", provider=OpenAIProvider(base_url=url, api_key=key))
agent = Agent(model, instructions="Be terse.")
@agent.tool_plain
def add(a: int, b: int) -> int:
    "Adds."
    return a + b
print(agent.run_sync("What is 3+4?").output)
""",
    ),
    "langgraph": (
        ("langgraph", "langchain-openai", "langchain"),
        [CALL, "seven"],
        1,
        """
from langchain.agents import create_agent
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
@tool
def add(a: int, b: int) -> int:
    "Adds."
    return a + b
agent = create_agent(ChatOpenAI(model="any", base_url=url, api_key=key), [add], system_prompt="Be.")
print(agent.invoke({"messages": [("user", "What is 3+4?")]})["messages"][-1].content)
""",
    ),
    "openai-agents": (
        ("openai-agents",),
        [CALL, "seven"],
        1,
        """
from agents import Agent, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI
set_tracing_disabled(True)
@function_tool
def add(a: int, b: int) -> int:
    "Adds."
    return a + b
model = OpenAIResponsesModel(model="any", openai_client=AsyncOpenAI(base_url=url, api_key=key))
agent = Agent(name="A", instructions="Be.", tools=[add], model=model)
print(Runner.run_sync(agent, "What is 3+4?").final_output)
""",
    ),
    "smolagents": (
        ("smolagents[openai]",),
        [CALL, '<tool_call>{"name": "final_answer", "arguments": {"answer": "seven"}}</tool_call>'],
        2,
        """
from smolagents import OpenAIServerModel, ToolCallingAgent, tool
@tool
def add(a: int, b: int) -> int:
    \"\"\"Adds.

    Args:
        a: one.
        b: other.
    \"\"\"
    return a + b
model = OpenAIServerModel("any", api_base=url, api_key=key)
print(ToolCallingAgent(tools=[add], model=model, max_steps=3).run("What is 3+4?"))
""",
    ),
    # Its second answer has no call: it is dropped, and asked for again.
    "mini-swe-agent": (
        ("mini-swe-agent==2.4.6",),
        [BASH % "echo 7", "I think so.", BASH % "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"],
        1,
        """
import os, tempfile
os.environ |= {"HOME": tempfile.mkdtemp(), "MSWEA_SILENT_STARTUP": "1"}
from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_model import LitellmModel
asked = {"api_base": url, "api_key": key}
model = LitellmModel(
    model_name="openai/any", model_kwargs=asked, cost_tracking="ignore_errors"
)
told = {"system_template": "You run programs.", "instance_template": "{{task}}"}
agent = DefaultAgent(model, LocalEnvironment(cwd=os.environ["HOME"]), **told)
print(agent.run("What is 3+4?"))
""",
    ),
}


# OpenEnv's capture server, and a client of it: prints what it has recorded.
CAPTURE = """
import json, socket, sys, urllib.request
from openenv.core.harness.capture import CaptureServer
url, key, first = sys.argv[1:]
with socket.create_server(("127.0.0.1", 0)) as probe:
    port = probe.getsockname()[1]
server = CaptureServer(llm_url=url, model="policy", api_key=key, port=port)
server.start()
session = server.registry.create()
tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]

def asked(messages):
    body = json.dumps({"model": "any", "messages": messages, "tools": tools}).encode()
    head = {"Authorization": f"Bearer {session.session_id}", "Content-Type": "application/json"}
    place = f"http://127.0.0.1:{port}/v1/chat/completions"
    with urllib.request.urlopen(urllib.request.Request(place, body, head)) as answer:
        return json.load(answer)["choices"][0]["message"]

messages = [{"role": "user", "content": first}]
said = asked(messages)
call = said["tool_calls"][0]["id"]
messages += [said, {"role": "tool", "tool_call_id": call, "content": "7"}]
messages += [asked(messages), {"role": "user", "content": "Sure?"}]
asked(messages)
print(json.dumps([
    [node.prompt_ids, node.sampled_ids, node.sampled_logprobs, node.parent_id is not None]
    for node in session.graph.nodes()
]))
"""


def captured(policy: Any, python: pathlib.Path) -> str:
    """Whether OpenEnv's recorder has recorded what the gateway has, in a line."""
    from hjax.environments.episode import EpisodeLimits

    limits = EpisodeLimits(turns=9, turn_tokens=0, prompt_tokens=32768, response_tokens=4096)
    with policy.session(limits=limits) as (session, url):
        policy.texts = [CALL, "seven", "yes"]
        command = [str(python), "-c", CAPTURE, url, session.key, "What is 3+4?"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600)
        own = [
            [list(call.place.prompt), call.drawn.tokens, call.drawn.logprobs["logprobs"],
             call.place.parent is not None]
            for call in session.tree.calls
        ]  # fmt: skip
    if done.returncode:
        return f"failed: {done.stderr.strip().splitlines()[-1:]}"
    theirs = json.loads(done.stdout.strip().splitlines()[-1])
    tokens = sum(len(call[1]) for call in own)
    verdict = "as expected" if theirs == own and len(own) == 3 else "NOT as expected"
    return f"{len(own)} calls, {tokens} tokens drawn, ids, log-probs and links equal: {verdict}"


def played(policy: Any, python: pathlib.Path, name: str) -> str:
    """What a library's agent was recorded as, in a line."""
    from hjax.agents.call_tree import AGENT
    from hjax.environments.episode import EpisodeLimits

    _, texts, rows, program = CLIENTS[name]
    limits = EpisodeLimits(turns=9, turn_tokens=0, prompt_tokens=32768, response_tokens=4096)
    with policy.session(limits=limits) as (session, url):
        policy.texts = list(texts)
        with tempfile.NamedTemporaryFile("w", suffix=".py") as file:
            file.write(f"import sys\nurl, key = sys.argv[1:]\n{program}")
            file.flush()
            command = [str(python), file.name, url, session.key]
            done = subprocess.run(command, capture_output=True, text=True, timeout=600)
        tree = session.tree
        labels = tree.labels()
        found = tree.rows([label == AGENT for label in labels])
        drawn = [call.drawn.tokens for call in tree.calls]
        same = drawn == [[*text.encode(), 257] for text in texts]
    last = (done.stdout or done.stderr).strip().splitlines()[-1:] or ["nothing said"]
    verdict = "as expected" if same and len(found) == rows else "NOT as expected"
    return (
        f"{len(tree.calls)} calls ({', '.join(labels)}), {len(found)} rows, ids of the policy "
        f"{'equal' if same else 'NOT equal'}: {verdict}; it says {last[0][:80]!r}"
    )


def main() -> None:
    """Run it."""
    from test_agents_gateway import Policy  # type: ignore[import-not-found]

    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default=",".join([*CLIENTS, "openenv"]))
    parser.add_argument("--environments", default="")
    args = parser.parse_args()
    policy = Policy()
    with tempfile.TemporaryDirectory() as folder:
        place = pathlib.Path(args.environments or folder)
        for name in args.only.split(","):
            if name in CLIENTS:
                environment_packages.PACKAGES[name] = CLIENTS[name][0]
            python, missing = environment_packages.install(name, place)
            if not missing and name in CLIENTS:
                missing = played(policy, python, name)
            print(f"{name}: {missing or captured(policy, python)}", flush=True)


if __name__ == "__main__":
    main()
