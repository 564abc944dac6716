"""Tools of MCP servers, against a server of this test's own."""

import dataclasses
import json
import pathlib
import subprocess
import sys
import time

import pytest

from hjax.data.tool_call_forms import TAGGED
from hjax.environments.episode_pool import EpisodePool
from hjax.environments.mcp_tools import connect_tools
from hjax.environments.tool_environment import TOOL_ENVIRONMENT
from hjax.environments.tools import EpisodeTools, load_tools
from hjax.errors import ConfigError, RunError

pytest.importorskip("mcp", reason="the extra mcp")

DOUBLE = str(pathlib.Path(__file__).parent / "mcp_double.py")


@pytest.fixture
def config(tmp_path):
    def write(**servers):
        file = tmp_path / "servers.json"
        file.write_text(json.dumps({"mcpServers": servers}))
        return str(file)

    return write


def own(*arguments, **more):
    return {"command": sys.executable, "args": [DOUBLE, *arguments], **more}


def called(tools, name, /, **arguments):
    [tool] = [tool for tool in tools if tool.name == name]
    return tool.call(arguments)


def test_the_wanted_tools_in_their_order(config, monkeypatch):
    monkeypatch.setenv("HJAX_TEST_SECRET", "kept")
    file = config(one=own(env={"SHOWN": "1"}, disabled=True), other={"command": "no-such-program"})
    names = ["picture", "double", "variable", "nothing", "fail"]
    tools = connect_tools(file, [("one", name) for name in names])
    assert [tool.name for tool in tools] == names
    assert tools[1].description == "Twice a number." and tools[0].description == ""
    assert tools[1].parameters["properties"] == {"a": {"type": "integer"}}
    assert called(tools, "double", a=21) == "42"
    assert called(tools, "variable", name="SHOWN") == "1"
    assert called(tools, "variable", name="HJAX_TEST_SECRET") == "none"
    assert called(tools, "picture") == "[image/png]\nof a file\né"
    assert called(tools, "nothing") == '{"rows": [1, "é"]}'
    # What the policy did wrong is an answer.
    assert called(tools, "fail") == "error: no such page"
    assert called(tools, "double", a="x") == "error: a must be an integer"
    for tool in tools[:-1]:
        tool.close()
        tool.close()
    assert called(tools, "fail") == "error: no such page"
    tools[-1].close()
    with pytest.raises(RunError, match="^the MCP server one has ended"):
        called(tools, "double", a=1)


def test_a_server_that_ends(config):
    tools = connect_tools(config(one=own()), [("one", "leave"), ("one", "double")])
    for name in ("leave", "double"):
        with pytest.raises(RunError, match="^the MCP server one has ended: MCPError: .*closed"):
            called(tools, name, a=1)
    for tool in tools:
        tool.close()


def test_a_server_that_answers_garbage(config):
    """It is the server's fault, not an answer; lines between answers are passed over."""
    tools = connect_tools(config(one=own()), [("one", n) for n in ("garble", "noise", "double")])
    with pytest.raises(RunError, match="^the MCP server one has ended: ValidationError"):
        called(tools, "garble")
    assert called(tools, "noise") == "heard" and called(tools, "double", a=2) == "4"
    for tool in tools:
        tool.close()


def test_a_lost_server_costs_its_episode_only(config):
    """Those after it have a new one."""
    spec = f"{config(one=own())}:one/double,one/leave,one/garble"
    options = {"tools": spec, "form": dataclasses.asdict(TAGGED)}
    found = []
    with EpisodePool(TOOL_ENVIRONMENT, options, processes=1) as pool:
        for number in range(5):  # open at the same time
            pool.reset(number, {"prompt": "p"}, number).result(60)
        for number, name in enumerate(["double", "leave", "double", "garble", "double"]):
            arguments = {"a": number} if name == "double" else {}
            call = json.dumps({"name": name, "arguments": arguments})
            found.append(pool.step(number, f"<tool_call>{call}</tool_call>").result(60))
    assert [each.fault for each in found] == ["", "exception", "", "exception", ""]
    assert all("the MCP server one has ended" in found[number].text for number in (1, 3))
    said = [found[number].messages[-1]["content"] for number in (0, 2, 4)]
    assert said == ["0", "4", "8"]


def test_calls_that_only_read_run_at_once(config):
    """Of tools whose server says so: each of two waits for the other."""
    command = [sys.executable, DOUBLE, "http"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            url = f"http://127.0.0.1:{int(server.stdout.readline())}/mcp"
            about = {"url": url, "headers": {"Authorization": "Bearer key"}}
            tools = load_tools(f"{config(web=about)}:web/meet,web/double")
            assert [tool.at_once for tool in tools] == [True, False]
            episode = EpisodeTools(tools, seed=0)
            calls = [("meet", {}), ("meet", {}), ("double", {"a": 3})]
            assert episode.call_all(calls) == [("met", True), ("met", True), ("6", True)]
            tools[0].shared.close()
        finally:
            server.kill()


@pytest.mark.extended
def test_a_call_that_takes_too_long(config):
    tools = connect_tools(config(one=own()), [("one", "hang")], seconds=4.0)
    begun = time.monotonic()
    assert called(tools, "hang").startswith("error: ") and time.monotonic() - begun < 8
    tools[0].close()


def test_servers_that_do_not_begin(config):
    for about, says in [
        ({"command": "no-such-program"}, "FileNotFoundError"),
        ({"command": sys.executable, "args": ["-c", "pass"]}, "closed"),
        ({"url": "http://127.0.0.1:9/mcp"}, "ConnectError"),
    ]:
        with pytest.raises(RunError, match=f"^the MCP server one does not begin: .*{says}"):
            connect_tools(config(one=about), [("one", "double")])
    begun = time.monotonic()
    with pytest.raises(RunError, match="does not begin: TimeoutError"):
        connect_tools(config(one=own("silent")), [("one", "double")], seconds=1.5)
    assert time.monotonic() - begun < 12


def test_tools_at_a_url(config):
    command = [sys.executable, DOUBLE, "http"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        url = f"http://127.0.0.1:{int(server.stdout.readline())}/mcp"
        with pytest.raises(RunError, match="does not begin"):
            connect_tools(config(web={"url": url}), [("web", "double")])
        about = {"type": "http", "url": url, "headers": {"Authorization": "Bearer key"}}
        tools = connect_tools(config(web=about), [("web", "double"), ("web", "leave")])
        assert [called(tools, "double", a=a) for a in (4, None)] == [
            "8",
            "error: a must be an integer",
        ]
        for name in ("leave", "double"):
            with pytest.raises(RunError, match="^the MCP server web has ended"):
                called(tools, name, a=1)
        for tool in tools:
            tool.close()
    finally:
        server.kill()
        server.wait()
        server.stdout.close()


def test_bad_files_and_names(config, tmp_path):
    def refused(says, wanted=(("one", "double"),), text=None, **servers):
        file = config(**servers)
        if text is not None:
            pathlib.Path(file).write_text(text)
        with pytest.raises(ConfigError, match=says):
            connect_tools(file, wanted)

    refused("servers.json has no server 'one'; did you mean on.* it has on", on=own())
    refused(
        "server one has no tool 'duble'; did you mean double.* it has",
        [("one", "duble")],
        one=own(),
    )
    twice = [("one", "double"), ("two", "double")]
    refused("two tools are called 'double'", twice, one=own(), two=own())
    refused("servers.json: not valid JSON", text="{")
    refused('must be {"mcpServers": {NAME: SERVER}}', text='{"servers": {}}')
    refused("one is {}; it must be an object with `command` or with `url`", one={})
    refused("one is .* `command` or with `url`", one={"command": "a", "url": "b"})
    refused(
        "one: args is '-m x'; it must be a list of strings", one={"command": "a", "args": "-m x"}
    )
    refused(
        "one: env is {'A': 1}; it must be strings by name", one={"command": "a", "env": {"A": 1}}
    )
    refused("one: url is 3; it must be a string", one={"url": 3})
    assert connect_tools(config(one=own()), []) == []
    with pytest.raises(ConfigError, match="none.json: No such file"):
        connect_tools(str(tmp_path / "none.json"), [])
