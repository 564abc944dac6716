"""Environments of other packages, played by hjax and by the packages themselves: equal rewards?

    python benchmarks/environment_packages.py [--environments=DIR] [--only=openenv,mcp] [--write]

For each package it makes a virtual environment, installs the package from PyPI (0.4 GB at most),
and plays the same actions twice: by the package's own client, and by hjax's adapter in processes as
a run has them. A line is equal if every reward and every end is. Lines of `evaluate` have the turns
of a model of random weights; their rewards are compared with those that the server noted, or that
the package gives for the same turns. `--write` replaces the dated table in RESULTS.md. Prints one
JSON line; exit status 1 if a line differs or a package cannot be installed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime
import json
import os
import pathlib
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any

import machine

MARK = "LINES "
# What pip installs for each; the first is the package itself.
PACKAGES = {
    "openenv": ("openenv==0.10.0",),
    "textarena": ("textarena==0.7.4", "numpy"),
    "mcp": ("mcp==2.3.0",),
    "verifiers": ("verifiers==0.4.0", "uv"),
}
RESULTS = pathlib.Path(__file__).resolve().parent / "RESULTS.md"
HEADING = "## Environments of other packages"
# An episode: a row of data, a seed and the actions.
Play = tuple[dict[str, Any], int, list[str]]
# What came of it: a reward for each turn, and whether it has ended; a fault where it was lost.
Played = tuple[list[float], bool | str]


def line(what: str, mine: Sequence[Any], theirs: Sequence[Any], began: float) -> dict[str, Any]:
    """A line of the table: episodes, or texts of calls, of hjax and of the package."""
    same = list(mine) == list(theirs) and len(theirs) > 0
    rewards = [each[0] for each in theirs if isinstance(each, tuple)]
    return {
        "what": what,
        "count": len(theirs),
        "turns": sum(map(len, rewards)),
        "reward": round(sum(map(sum, rewards)), 3),
        "error": "" if same else f"hjax {mine!r}, the package {theirs!r}"[:400],
        "seconds": round(time.perf_counter() - began, 1),
    }


def play(spec: str, plays: Sequence[Play], seconds: float = 60.0) -> list[Played]:
    """Episodes by hjax, all open at a time."""
    from hjax.environments.episode_pool import EpisodePool

    with EpisodePool(spec, processes=2, step_seconds=seconds) as pool:
        begun = [pool.reset(i, task, seed) for i, (task, seed, _) in enumerate(plays)]
        found: list[Played] = [([], future.result().fault or False) for future in begun]
        for turn in range(max(len(actions) for _, _, actions in plays)):
            asked = {
                i: pool.step(i, actions[turn])
                for i, (_, _, actions) in enumerate(plays)
                if not found[i][1] and turn < len(actions)
            }
            for i, future in asked.items():
                answer = future.result()
                found[i] = ([*found[i][0], answer.reward], answer.fault or answer.done)
        for i in range(len(plays)):
            pool.end(i)
    return found


def evaluate(
    spec: str, model: str, folder: pathlib.Path, rows: Sequence[dict[str, Any]], *flags: str
) -> list[dict[str, Any]]:
    """What `evaluate` writes of two episodes of each row."""
    data, output = folder / "rows.jsonl", folder / f"episodes{time.monotonic_ns()}.jsonl"
    data.write_text("".join(json.dumps(each) + "\n" for each in rows))
    command = [sys.executable, "-m", "hjax.launch.evaluate", f"--model={model}", f"--data={data}"]
    command += [f"--environment={spec}", "--samples=2", "--processes=2", "--turn_tokens=8"]
    done = subprocess.run([*command, f"--output={output}", *flags], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"evaluate: {(done.stdout + done.stderr).strip()[-300:]}")
    return [json.loads(text) for text in output.read_text().splitlines()]


# OpenEnv


def openenv_server(kind: str, port: int, log: str) -> None:
    """Serve an environment: `guess` a number, keep a `ledger`, or say `letters`."""
    import uvicorn
    from openenv.core import (  # type: ignore[import-not-found]
        Action,
        Environment,
        Observation,
        State,
    )
    from openenv.core.env_server import create_fastapi_app  # type: ignore[import-not-found]

    class Number(Action):  # type: ignore[misc]
        n: int

    class Entry(Action):  # type: ignore[misc]
        kind: str
        amount: int

    class Text(Action):  # type: ignore[misc]
        text: str

    class Seen(Observation):  # type: ignore[misc]
        text: str = ""

    class Book(Observation):  # type: ignore[misc]
        total: int = 0
        legal: list[str] = []

    class Base(Environment):  # type: ignore[misc]
        SUPPORTS_CONCURRENT_SESSIONS = True

        @property
        def state(self) -> Any:
            return State()

        def reset(self, seed: int | None = None, episode_id: Any = None, goal: int = 5) -> Any:
            self.seed, self.goal, self.total = seed, goal, 0
            self.rewards: list[float] = []
            return self.begin()

    class Guess(Base):
        def begin(self) -> Any:
            return Seen(text="0 to 9", metadata={"secret": (self.seed or 0) % 10})

        def step(self, action: Any, **more: Any) -> Any:
            secret = (self.seed or 0) % 10
            said = "yes" if action.n == secret else "higher" if action.n < secret else "lower"
            hit = said == "yes"
            return Seen(text=said, reward=float(hit), done=hit)

    class Ledger(Base):
        def begin(self) -> Any:
            return Book(legal=["add", "take"])

        def step(self, action: Any, **more: Any) -> Any:
            self.total += action.amount if action.kind == "add" else -action.amount
            reward = self.total / self.goal if self.total >= self.goal else None
            return Book(total=self.total, reward=reward, done=reward is not None)

    class Letters(Base):
        def begin(self) -> Any:
            return Seen(text="Say something.")

        def step(self, action: Any, **more: Any) -> Any:
            letters = sum(char.isascii() and char.isalpha() for char in action.text)
            self.rewards.append(letters / max(len(action.text), 1))
            done = len(self.rewards) == 3
            if done:
                with open(log, "a") as file:
                    file.write(json.dumps(self.rewards) + "\n")
            return Seen(text="More.", reward=self.rewards[-1], done=done)

    parts = {
        "guess": (Guess, Number, Seen, 16),
        "ledger": (Ledger, Entry, Book, 2),
        "letters": (Letters, Text, Seen, 64),
    }
    environment, action, seen, sessions = parts[kind]
    app = create_fastapi_app(environment, action, seen, max_concurrent_envs=sessions)
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="error")


@contextlib.contextmanager
def served(*command: str) -> Iterator[str]:
    """The address of a server of this file, which ends with the block."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [word.replace("PORT", str(port)) for word in command]
    with subprocess.Popen([sys.executable, __file__, *words]) as process:
        try:
            deadline = time.monotonic() + 120
            while process.poll() is None and time.monotonic() < deadline:
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                    break
                time.sleep(0.2)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.kill()


async def openenv_client(address: str, plays: Sequence[Play]) -> list[Played]:
    """Episodes by OpenEnv's own client, one after another."""
    from openenv.core import GenericEnvClient  # type: ignore[import-not-found]

    found: list[Played] = []
    for task, seed, actions in plays:
        rewards: list[float] = []
        done = False
        async with GenericEnvClient(base_url=address) as client:
            await client.reset(seed=seed, **{k: v for k, v in task.items() if k != "prompt"})
            for action in actions:
                if done:
                    break
                try:
                    result = await client.step(json.loads(action))
                except Exception as error:
                    if "Invalid message" not in str(error):
                        raise
                    rewards.append(0.0)  # an action that the server refuses
                else:
                    rewards.append(float(result.reward or 0.0))
                    done = result.done
        found.append((rewards, done))
    return found


def openenv_lines(model: str, folder: pathlib.Path) -> Iterator[dict[str, Any]]:
    """Three servers: numbers as actions; fields, refused actions, null rewards; a model's text."""
    log = folder / "letters.jsonl"

    def address(kind: str) -> Any:
        return served("--serve=openenv", f"--kind={kind}", "--port=PORT", f"--log={log}")

    def both(what: str, server: str, plays: list[Play]) -> dict[str, Any]:
        began = time.perf_counter()
        mine = play(f"openenv:{server}", plays)
        as_json = [
            (task, seed, [a if a.startswith("{") else json.dumps({"n": int(a)}) for a in actions])
            for task, seed, actions in plays
        ]
        return line(what, mine, asyncio.run(openenv_client(server, as_json)), began)

    with address("guess") as server:
        plays: list[Play] = [({"prompt": "Guess."}, s, [*"5283079164"]) for s in range(12)]
        yield both("guess a number, 12 sessions at a time", server, plays)
    with address("ledger") as server:
        turns = [
            '{"kind": "add", "amount": 3}',
            '{"kind": "add", "amount": "many"}',
            '{"kind": "add"}',
            '{"kind": "take", "amount": 1}',
            '{"kind": "add", "amount": 4}',
            '{"kind": "add", "amount": 9}',
        ]
        plays = [({"prompt": "Keep books.", "goal": goal}, 0, turns) for goal in (4, 11)]
        yield both("fields, a column for the reset, refused actions, null rewards", server, plays)
        began = time.perf_counter()
        first = play(f"openenv:{server}", [plays[0]] * 5)
        lost = sorted(str(end) for _, end in first if isinstance(end, str))
        after = play(f"openenv:{server}", plays)
        expected = [*["exception"] * 3, *asyncio.run(openenv_client(server, plays))]
        yield line("5 episodes where 2 sessions are, then 2", [*lost, *after], expected, began)
    with address("letters") as server:
        began = time.perf_counter()
        rows = [{"prompt": f"Say {i}."} for i in range(8)]
        played = evaluate(f"openenv:{server}", model, folder, rows)
        noted = sorted(json.loads(text) for text in log.read_text().splitlines())
        mine = sorted([turn["reward"] for turn in each["turns"]] for each in played)
        what = "evaluate, 16 episodes of a model; rewards that the server noted"
        yield line(what, [(each, True) for each in mine], [(each, True) for each in noted], began)


# TextArena


def textarena_games(name: str, plays: Sequence[Play], players: int = 1) -> list[Played]:
    """Games by TextArena itself; the second player of two says `[defect]`."""
    import textarena

    found: list[Played] = []
    for task, seed, actions in plays:
        game = textarena.make(name, **task.get("settings", {}))
        game.reset(num_players=players, seed=seed)
        rewards: list[float] = []
        done = False
        for action in actions:
            if done:
                break
            game.get_observation()
            done, _ = game.step(action)
            while not done and game.state.current_player_id:
                game.get_observation()
                done, _ = game.step("[defect]")
            rewards.append(float(game.close()[0][0]) if done else 0.0)
        found.append((rewards, done))
    return found


DUEL = """
from hjax.environments.textarena_adapter import TextArenaEnvironment

class Duel(TextArenaEnvironment):
    target, players = "IteratedPrisonersDilemma-v0", 2

    def opponent(self, player, seen):
        return "[defect]"
"""


def textarena_lines(model: str, folder: pathlib.Path) -> Iterator[dict[str, Any]]:
    """Games of one player, one of two, and a policy's turns played again."""
    guesses = [f"[{n}]" for n in (10, 5, 15, 3, 99, 7, "x", 12, 1, 2, 4, 6, 8, 9, 11, 13)]
    games = {
        "GuessTheNumber-v0": guesses,
        "Blackjack-v0": ["[Hit]", "[Stand]"] * 20,
        "2048-v0-mega-easy": ["up", "left", "[right]", "down"] * 60,
        "Mastermind-v0": ["[1 2 3 4]", "[2 3 4 5]", "nothing", "[3 4 5 6]", "no", "no"],
        "FrozenLake-v0": ["right", "down", "right", "down", "down"] * 3,
        "Bandit-v0": ["red", "blue", "green"] * 10,
        "Sokoban-v0": ["up", "left", "down", "right"] * 20,
    }
    for name, actions in games.items():
        began = time.perf_counter()
        plays: list[Play] = [({"prompt": ""}, seed, actions) for seed in range(6)]
        yield line(name, play(f"textarena:{name}", plays), textarena_games(name, plays), began)
    began = time.perf_counter()
    (folder / "duel.py").write_text(DUEL)
    plays = [({"prompt": ""}, seed, ["We agree.", "[cooperate]"] * 60) for seed in range(3)]
    mine = play(f"{folder}/duel.py:Duel", plays)
    theirs = textarena_games("IteratedPrisonersDilemma-v0", plays, players=2)
    yield line("IteratedPrisonersDilemma-v0 beside a scripted player", mine, theirs, began)
    began = time.perf_counter()
    settings = {"max_number": 3, "max_turns": 4}
    rows = [{"prompt": "Guess.", "settings": settings, "seed": seed} for seed in range(6)]
    played = evaluate("textarena:GuessTheNumber-v0", model, folder, rows)
    again = [
        (rows[each["question"]], each["question"], [turn["action"] for turn in each["turns"]])
        for each in played
    ]
    mine = [([turn["reward"] for turn in each["turns"]], True) for each in played]
    theirs = textarena_games("GuessTheNumber-v0", again)
    yield line("evaluate, 12 games of a model, their turns played again", mine, theirs, began)


# MCP


def mcp_server(port: int) -> None:
    """Serve tools: over HTTP, or without a port over stdin and stdout."""
    from mcp.server import MCPServer

    app = MCPServer("tools")

    @app.tool()
    def add(a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    @app.tool()
    def fail(why: str) -> str:
        raise ValueError(why)

    @app.tool()
    def rows(count: int) -> list[dict[str, int]]:
        return [{"row": i} for i in range(count)]

    app.run("streamable-http", port=port) if port else app.run()


async def mcp_client(server: Any, calls: Sequence[tuple[str, dict[str, Any]]]) -> list[str]:
    """Calls by mcp's own client."""
    from mcp import Client

    found = []
    async with Client(server) as client:
        for name, arguments in calls:
            answer = await client.call_tool(name, arguments)
            text = "\n".join(getattr(block, "text", "") for block in answer.content)
            if not answer.content:
                text = json.dumps(answer.structured_content)
            found.append(f"error: {text}" if answer.is_error else text)
    return found


def mcp_lines(model: str, folder: pathlib.Path) -> Iterator[dict[str, Any]]:
    """A server that is started, and one at a URL."""
    from mcp import StdioServerParameters

    from hjax.environments.mcp_tools import connect_tools

    calls: list[tuple[str, dict[str, Any]]] = [
        ("add", {"a": 2, "b": 40}), ("add", {"a": "x"}), ("fail", {"why": "no"}),
        ("rows", {"count": 2}), ("rows", {"count": 0}),
    ]  # fmt: skip
    arguments = [__file__, "--serve=mcp"]
    with served("--serve=mcp", "--port=PORT") as address:
        started: Any = StdioServerParameters(command=sys.executable, args=arguments)
        for what, about, server in (
            ("a server that is started", {"command": sys.executable, "args": arguments}, started),
            ("a server at a URL", {"url": f"{address}/mcp"}, f"{address}/mcp"),
        ):
            began = time.perf_counter()
            config = folder / "servers.json"
            config.write_text(json.dumps({"mcpServers": {"one": about}}))
            names = ("add", "fail", "rows")
            tools = {t.name: t for t in connect_tools(str(config), [("one", n) for n in names])}
            mine = [tools[name].call(given) for name, given in calls]
            for tool in tools.values():
                tool.close()
            yield line(f"{what}: calls", mine, asyncio.run(mcp_client(server, calls)), began)


# verifiers

TASKSET = """
import verifiers.v1 as vf

WORDS = {"a": "first", "b": "second", "c": "third"}

class WordData(vf.TaskData):
    answer: str

class WordTask(vf.Task[WordData]):
    @vf.reward(weight=0.75)
    async def exact(self, trace: vf.Trace) -> float:
        return float((trace.last_reply or "").strip() == self.data.answer)

    @vf.reward(weight=0.25)
    async def contained(self, trace: vf.Trace) -> float:
        return float(self.data.answer in (trace.last_reply or ""))

    @vf.metric
    async def length(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply or ""))

class Words(vf.Taskset[WordTask, vf.TasksetConfig]):
    def load(self):
        for i, (word, answer) in enumerate(WORDS.items()):
            said = {"prompt": f"What is {word}?", "system_prompt": "Be brief."}
            data = WordData(idx=i, answer=answer, **said)
            yield WordTask(data, self.config.task)

__all__ = ["Words"]
"""

# A server of tools is started by its module's name, so the module must run it.
TOOLSET = """
import verifiers.v1 as vf

class Adder(vf.Toolset[vf.ToolsetConfig]):
    @vf.tool
    def add(self, a: int, b: int) -> int:
        \"\"\"Adds.\"\"\"
        return a + b

if __name__ == "__main__":
    Adder.run()
"""
SUMS = """
import adder_toolset
import verifiers.v1 as vf

class SumData(vf.TaskData):
    answer: str

class SumTask(vf.Task[SumData]):
    @classmethod
    def toolsets(cls, config):
        return [adder_toolset.Adder(vf.ToolsetConfig())]

    @vf.reward
    async def exact(self, trace: vf.Trace) -> float:
        return float((trace.last_reply or "").strip() == self.data.answer)

class Sums(vf.Taskset[SumTask, vf.TasksetConfig]):
    def load(self):
        for i in range(2):
            data = SumData(idx=i, answer=str(40 + i), prompt=f"What is 40+{i}?")
            yield SumTask(data, self.config.task)

__all__ = ["Sums"]
"""


def scripted_endpoint(turns: Sequence[dict[str, Any]]) -> Any:
    """An endpoint that answers a streamed chat with these messages, one after another."""
    import http.server
    import threading

    left = list(turns)

    class Page(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            message = left.pop(0)
            about = {"id": "1", "object": "chat.completion.chunk", "created": 1, "model": "m"}
            end = "tool_calls" if "tool_calls" in message else "stop"
            choices = [{"index": 0, "delta": message}, {"index": 0, "delta": {}}]
            reasons = (None, end)
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.end_headers()
            for choice, reason in zip(choices, reasons, strict=True):
                event = about | {"choices": [choice | {"finish_reason": reason}]}
                self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
            self.wfile.write(b"data: [DONE]\n\n")

        def log_message(self, *what: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Page)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


async def verifiers_rewards(
    plays: Sequence[tuple[int, list[dict[str, Any]]]], name: str = "words_to_look_up"
) -> list[Played]:
    """Tasks by verifiers itself: its rewards for an endpoint that says the same."""
    import verifiers.v1 as vf
    from verifiers.v1.clients import EvalClientConfig, ModelContext

    taskset = {"id": name}
    agent = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}
    environment = vf.SingleAgentEnv(vf.SingleAgentEnvConfig(taskset=taskset, agent=agent))
    found: list[Played] = []
    async with environment.serving():
        tasks = list(environment.taskset)
        for index, turns in plays:
            server = scripted_endpoint(turns)
            url = f"http://127.0.0.1:{server.server_port}/v1"
            client = EvalClientConfig(base_url=url, api_key_var="NO_KEY")
            context = ModelContext("m", client, vf.SamplingConfig())
            episode = await environment.run_slot(environment.slots(tasks[index], 1)[0], context)
            server.shutdown()
            [trace] = episode.traces
            if trace.errors:
                raise RuntimeError(f"verifiers: {trace.errors[0].message}")
            found.append(([*[0.0] * (len(turns) - 1), trace.reward], True))
    return found


def verifiers_lines(model: str, folder: pathlib.Path) -> Iterator[dict[str, Any]]:
    """Single answers; a tool's calls; a model's answers, judged by verifiers again."""
    for module, text in (
        ("words_to_look_up", TASKSET), ("adder_toolset", TOOLSET), ("sums_to_work_out", SUMS)
    ):  # fmt: skip
        (folder / f"{module}.py").write_text(text)
    sys.path.append(str(folder))
    os.environ["PYTHONPATH"] = str(folder)
    os.environ["PATH"] = f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}"

    def said(text: str) -> dict[str, Any]:
        return {"role": "assistant", "content": text}

    spec = "verifiers:words_to_look_up"
    answers = [(0, "first"), (0, "the first"), (1, "no"), (2, "third")]
    began = time.perf_counter()
    plays: list[Play] = [({"prompt": "-", "index": i}, 0, [text]) for i, text in answers]
    mine = play(spec, plays, seconds=300)
    theirs = asyncio.run(verifiers_rewards([(i, [said(text)]) for i, text in answers]))
    yield line("4 answers, two weighted rewards", mine, theirs, began)
    yield verifiers_tools()
    began = time.perf_counter()
    rows = [{"prompt": "-", "index": i} for i in range(2)]
    played = evaluate(spec, model, folder, rows, "--chat", "--step_seconds=300")
    mine = [([turn["reward"] for turn in each["turns"]], True) for each in played]
    again = [(each["question"], [said(each["turns"][0]["action"])]) for each in played]
    theirs = asyncio.run(verifiers_rewards(again))
    yield line("evaluate, 4 answers of a model, judged again", mine, theirs, began)


def verifiers_tools() -> dict[str, Any]:
    """Conversations that call a tool of a task's own server."""
    began = time.perf_counter()
    plays: list[Play] = []
    theirs: list[tuple[int, list[dict[str, Any]]]] = []
    for index, answer in ((0, "40"), (1, "41"), (1, "40")):
        arguments = json.dumps({"a": 40, "b": index})
        text = f'<tool_call>{{"name": "adder_add", "arguments": {arguments}}}</tool_call>'
        plays.append(({"prompt": "-", "index": index}, 0, [text, answer]))
        function = {"name": "adder_add", "arguments": arguments}
        call = {"index": 0, "id": "call_1_0", "type": "function", "function": function}
        said = {"role": "assistant", "content": None, "tool_calls": [call]}
        theirs.append((index, [said, {"role": "assistant", "content": answer}]))
    mine = play("verifiers:sums_to_work_out", plays, seconds=300)
    rewards = asyncio.run(verifiers_rewards(theirs, "sums_to_work_out"))
    return line("3 conversations with a server of tools", mine, rewards, began)


LINES = {
    "openenv": openenv_lines,
    "textarena": textarena_lines,
    "mcp": mcp_lines,
    "verifiers": verifiers_lines,
}


def run_lines(kind: str, model: str, folder: pathlib.Path) -> None:
    """In the package's environment: play, and print what came of it."""
    lines, error = [], ""
    try:
        for each in LINES[kind](model, folder):
            print(json.dumps(each), file=sys.stderr)
            lines.append(each)
    except Exception as failure:  # of any package's own kind
        error = " ".join(f"{type(failure).__name__}: {failure}".split())[:300]
    package = PACKAGES[kind][0].partition("==")[0]
    about = {"version": machine.versions(package)[package], "lines": lines, "error": error}
    print(f"{MARK}{json.dumps(about)}", flush=True)


def install(kind: str, folder: pathlib.Path) -> tuple[pathlib.Path, str]:
    """The interpreter of a package's environment, which sees this one's packages after its own, and
    why there is none."""
    place = folder / kind
    python = place / "bin" / "python"
    pip = [str(python), "-m", "pip", "install", "--quiet", *PACKAGES[kind]]
    for command in ([sys.executable, "-m", "venv", str(place)], pip):
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            texts = (done.stdout + done.stderr).strip().splitlines() or ["no reason given"]
            return python, texts[-1][:200]
    [packages] = place.glob("lib/python*/site-packages")
    others = [*(path for path in sys.path if path.endswith("site-packages")), str(machine.ROOT)]
    (packages / "hjax_and_its_packages.pth").write_text("\n".join(others) + "\n")
    return python, ""


def measure(kind: str, environments: pathlib.Path, model: str, folder: pathlib.Path) -> Any:
    """Version and lines of a package, or the error that kept it away."""
    python, missing = install(kind, environments)
    if missing:
        return {"version": None, "lines": [], "error": f"not installed: {missing}"}
    command = [str(python), __file__, f"--run={kind}", f"--model={model}", f"--folder={folder}"]
    own = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=1800, env=own)
    found = [text for text in done.stdout.splitlines() if text.startswith(MARK)]
    if not found:
        return {"version": None, "lines": [], "error": f"exit status {done.returncode}"}
    return json.loads(found[-1][len(MARK) :])


def table(results: dict[str, Any]) -> str:
    """The section of RESULTS.md."""
    about = machine.describe()
    lines = [
        HEADING,
        "",
        f"`benchmarks/environment_packages.py --write`, {datetime.date.today()}, at "
        f"{about['commit']}, {about['cores']} cores, {about['cpu']}, Python {about['python']}: the "
        "same actions played by hjax's adapter and by the package itself, each package in an "
        "environment of its own. Seconds are of both together.",
        "",
        "| package | version | what | episodes or calls | turns | reward | rewards and ends | s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for kind, found in results.items():
        if found["error"]:
            lines.append(f"| {kind} | – | – | – | – | – | {found['error']} | – |")
        for each in found["lines"]:
            result = each["error"].replace("|", "\\|") or "equal"
            turns, reward = (each["turns"], each["reward"]) if each["turns"] else ("–", "–")
            lines.append(
                f"| {kind} | {found['version']} | {each['what']} | {each['count']} | {turns} | "
                f"{reward} | {result} | {each['seconds']} |"
            )
    return "\n".join(lines) + "\n"


def write(section: str) -> None:
    """Put the section into RESULTS.md, in place of the one that is there."""
    text = RESULTS.read_text()
    before, found, after = text.partition(f"{HEADING}\n")
    _, following, rest = after.partition("\n## ") if found else ("", "", "")
    RESULTS.write_text(before.rstrip("\n") + "\n\n" + section + following + rest)


def main() -> None:
    """Play all, and print the line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--environments", help="folder to keep the environments in; a passing one")
    parser.add_argument("--only", default=",".join(PACKAGES), help="packages, with commas between")
    parser.add_argument("--write", action="store_true", help="the table of RESULTS.md")
    for own in ("run", "serve", "kind", "port", "log", "model", "folder"):  # in the environment
        parser.add_argument(f"--{own}", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve == "openenv":
        return openenv_server(args.kind, int(args.port), args.log)
    if args.serve == "mcp":
        return mcp_server(int(args.port or 0))
    if args.run:
        return run_lines(args.run, args.model, pathlib.Path(args.folder))
    from clients import make_model

    results = {}
    with tempfile.TemporaryDirectory() as made:
        folder = pathlib.Path(made)
        environments = pathlib.Path(args.environments or folder / "environments").resolve()
        model = make_model(folder)
        for kind in args.only.split(","):
            results[kind] = measure(kind, environments, model, folder)
    if args.write:
        write(table(results))
    failed = [f for f in results.values() if f["error"] or any(c["error"] for c in f["lines"])]
    print(json.dumps({"benchmark": "packages", "packages": results, **machine.describe()}))
    raise SystemExit(bool(failed))


if __name__ == "__main__":
    main()
