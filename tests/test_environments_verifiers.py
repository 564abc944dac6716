"""Tasks of verifiers, with a package of this test's own in its place, whose harnesses ask over
HTTP."""

import asyncio
import contextlib
import json
import sys
import types
import urllib.error
import urllib.request

import pytest

from hjax.environments.episode_server import load_environment
from hjax.environments.verifiers_adapter import assistant_message
from hjax.errors import ConfigError, DataError, RunError

LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


class Harness:
    """A program that asks the endpoint it was given, by its session."""

    def __init__(self, context, session):
        self.url, self.session = f"{context.client['base_url']}/chat/completions", session

    async def ask(self, messages, **body):
        return await asyncio.to_thread(self.post, {"messages": messages, **body})

    def post(self, body):
        headers = {"X-Session-ID": self.session, "Content-Type": "application/json"}
        request = urllib.request.Request(self.url, json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request) as answer:
            text = answer.read().decode()
        if not body.get("stream"):
            return json.loads(text)["choices"][0]["message"]
        events = [event.removeprefix("data: ") for event in text.split("\n\n") if event]
        assert events.pop() == "[DONE]"
        parts = [choice for event in events for choice in json.loads(event)["choices"]]
        assert [part["finish_reason"] is None for part in parts] == [True, False]
        return parts[0]["delta"]


async def right_word(harness):
    said = await harness.ask([{"role": "user", "content": "Say b."}], stream=True)
    return float(said["content"] == "b")


async def with_tool(harness):
    """A call and its result; then a summary in place of the history; then nothing of it again."""
    first = [{"role": "system", "content": "Look."}, {"role": "user", "content": "What is a?"}]
    said = await harness.ask(first, tools=[LOOK], stream=True)
    [call] = said["tool_calls"]
    call.pop("index")
    assert json.loads(call["function"]["arguments"]) == {"word": "a"}
    result = {"role": "tool", "tool_call_id": call["id"], "content": "first"}
    said = await harness.ask([*first, said, result], tools=[LOOK])
    summary = [{"role": "user", "content": f"You found {said['content']}."}]
    said = await harness.ask(summary, tools=[LOOK])
    rewritten = {"role": "assistant", "content": said["content"].upper()}
    said = await harness.ask([*summary, rewritten, {"role": "user", "content": "Sure?"}])
    return float(said["content"] == "yes") / 2


async def failing(harness):
    await harness.ask([{"role": "user", "content": "Go."}])
    raise ValueError("of the harness")


async def recorded_error(harness):
    await harness.ask([{"role": "user", "content": "Go."}])
    return types.SimpleNamespace(type="TaskError", message="of the task")


async def asks_nothing(harness):
    return 1.0


async def never_goes_on(harness):
    await harness.ask([{"role": "user", "content": "Go."}])
    await asyncio.sleep(60)


async def wants_two(harness):
    with pytest.raises(urllib.error.HTTPError) as refused:
        await harness.ask([{"role": "user", "content": "Go."}], n=2)
    lost = Harness(types.SimpleNamespace(client={"base_url": harness.url[:-17]}), "another")
    with pytest.raises(urllib.error.HTTPError) as unknown:
        await lost.ask([{"role": "user", "content": "Go."}])
    said = await harness.ask([{"role": "user", "content": str([refused.value.code])}])
    return float(unknown.value.code == 404) + float(said["content"] == "b")


TASKS = [right_word, with_tool, failing, recorded_error, asks_nothing, never_goes_on, wants_two]


class SingleAgentEnv:
    def __init__(self, config):
        if config["taskset"]["id"] != "words":
            raise ModuleNotFoundError(f"taskset {config['taskset']['id']!r} not found")
        assert config["agent"]["harness"] == {"id": "null"}
        self.taskset, self.count = TASKS, 0

    @contextlib.asynccontextmanager
    async def serving(self):
        yield

    def slots(self, task, number):
        return [task] * number

    async def run_slot(self, slot, context, on_trace):
        self.count += 1
        trace = types.SimpleNamespace(id=f"trace{self.count}", errors=[], metrics={"length": 2.0})
        on_trace(trace)
        found = await slot(Harness(context, trace.id))
        if isinstance(found, float):
            trace.reward, trace.rewards = found, {"exact": types.SimpleNamespace(value=found)}
            trace.rewards["unscored"] = trace.metrics["unscored"] = None
        else:
            trace.errors = [found]
        trace.stop_condition = "agent_completed"
        return types.SimpleNamespace(traces=[trace], errors=[])


@pytest.fixture(autouse=True)
def package(monkeypatch):
    made, clients = types.ModuleType("verifiers.v1"), types.ModuleType("verifiers.v1.clients")
    made.SingleAgentEnv, made.SingleAgentEnvConfig, made.SamplingConfig = SingleAgentEnv, dict, dict
    clients.EvalClientConfig = dict
    clients.ModelContext = lambda model, client, sampling: types.SimpleNamespace(client=client)
    monkeypatch.setitem(sys.modules, "verifiers", types.ModuleType("verifiers"))
    monkeypatch.setitem(sys.modules, "verifiers.v1", made)
    monkeypatch.setitem(sys.modules, "verifiers.v1.clients", clients)
    runners = {}
    monkeypatch.setattr("hjax.environments.verifiers_adapter._HARNESSES", runners)
    yield
    for runner in runners.values():
        runner.close()


def begun(task, seconds=10.0):
    environment = load_environment("verifiers:words")()
    environment.step_seconds = seconds
    return environment, environment.reset({"prompt": "-", "index": TASKS.index(task)}, 0)


def test_one_turn():
    for said, reward in (("b", 1.0), ("c", 0.0)):
        environment, first = begun(right_word)
        assert first.messages == ({"role": "user", "content": "Say b."},) and first.tools == ()
        step = environment.step(said)
        assert (step.reward, step.done, step.valid) == (reward, True, True)
        assert step.metrics == {"reward_exact": reward, "length": 2.0}
        environment.close()


def test_a_tool_then_a_summary_then_a_rewritten_turn():
    environment, first = begun(with_tool)
    assert [m["role"] for m in first.messages] == ["system", "user"]
    assert [tool["function"]["name"] for tool in first.tools] == ["look"]
    step = environment.step(
        'I look. <tool_call>{"name": "look", "arguments": {"word": "a"}}</tool_call>'
    )
    echo, result = step.observation.messages
    assert echo["role"] == "assistant" and echo["content"] == "I look." and not step.fresh
    assert echo["tool_calls"][0]["function"]["arguments"] == {"word": "a"}
    assert result["content"] == "first" and result["tool_call_id"] == echo["tool_calls"][0]["id"]
    step = environment.step('<tool_call>{"name": "find"')  # cut: it is text
    assert step.fresh and not step.valid and len(step.observation.tools) == 1
    assert [m["content"] for m in step.observation.messages] == [
        'You found <tool_call>{"name": "find".'
    ]
    step = environment.step("sure")
    assert step.fresh and [m["content"] for m in step.observation.messages][1:] == ["SURE", "Sure?"]
    step = environment.step("yes")
    assert (step.reward, step.done) == (0.5, True)
    environment.close()


def test_faults():
    for task, says in [
        (failing, "verifiers:words fails: ValueError: of the harness"),
        (recorded_error, "verifiers:words fails: TaskError: of the task"),
    ]:
        environment, _ = begun(task)
        with pytest.raises(RunError, match=says):
            environment.step("x")
        environment.close()
    with pytest.raises(RunError, match="verifiers:words has asked nothing in task 4"):
        begun(asks_nothing)
    environment, _ = begun(never_goes_on, seconds=1.0)
    with pytest.raises(RunError, match="has not gone on in 0.9 s"):
        environment.step("x")
    environment.close()


def test_an_episode_that_is_stopped_leaves_the_others(package):
    first, _ = begun(right_word)
    second, _ = begun(right_word)
    first.close()
    assert second.step("b").reward == 1.0
    second.close()


def test_requests_that_are_refused():
    environment, first = begun(wants_two)
    assert first.text == "[400]"
    assert environment.step("b").reward == 2.0
    environment.close()


def test_rows_and_names():
    for index in (None, -1, "0", True, 1.0):
        with pytest.raises(DataError, match="it must be the place of a task in its taskset"):
            load_environment("verifiers:words")().reset({"index": index}, 0)
    with pytest.raises(DataError, match="index is 99, and the taskset has fewer tasks"):
        load_environment("verifiers:words")().reset({"index": 99}, 0)
    with pytest.raises(ConfigError, match="='verifiers:other': .*taskset: Module.*'other' not"):
        load_environment("verifiers:other")


def test_turns_as_messages():
    call = '<tool_call>{"name": "look", "arguments": {"é": [1]}}</tool_call>'
    made = assistant_message(f"{call}\n{call}", ["look"], "t")
    assert made["content"] is None and [c["id"] for c in made["tool_calls"]] == ["t_0", "t_1"]
    assert made["tool_calls"][0]["function"] == {"name": "look", "arguments": '{"é": [1]}'}
    for text in (call, f"{call} and more", call[:-4], "plain"):
        names = [] if text == call else ["look"]
        assert assistant_message(text, names, "t") == {"role": "assistant", "content": text}
    assert "tool_calls" not in assistant_message(call, ["other"], "t")
