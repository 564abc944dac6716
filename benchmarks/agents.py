"""What the agents' gateway costs, and what hostile agents change.

    python benchmarks/agents.py [--sessions=2000] [--calls=400]
    python benchmarks/agents.py --against_environments [--episodes=64] [--turns=4] [--tokens=32]

The policy draws nothing: it answers with the same few tokens at once, so that what is measured is
the server alone. Clients are another process. Prints the processor time of the server per call, for
prompts of some 1,000 tokens in conversations that grow; then the memory and the open files of the
server after each 200 sessions of agents that post to addresses of rewards, use the keys of others,
flood, stream and vanish, send 60,000 tokens, lie in their echoes, or do what they should.

With `--against_environments` a model draws: the same questions are asked by an environment in
processes as runs have them, by an agent of the standard library's HTTP, and by one of OpenAI's
client. Prints tokens per second by the clock, and the processor time of all processes for a turn.

The last line is JSON: the figures, and the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import os
import statistics
import sys
import threading
import time
from pathlib import Path
from typing import Any

import machine

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
KINDS = ("good", "reward", "thief", "flood", "vanish", "long", "liar", "loop")
AT_A_TIME = 200


RESETS = [0]


async def post(url: str, key: str, path: str, body: Any, hang_up: bool = False) -> tuple[int, Any]:
    """The status and the JSON of an answer; ``hang_up``: none is waited for. A connection that is
    reset is tried again some times, as OpenAI's clients do."""
    for pause in (0.5, 1.0, 2.0, 4.0, 8.0):
        try:
            return await post_once(url, key, path, body, hang_up)
        except ConnectionError:
            RESETS[0] += 1
            await asyncio.sleep(pause)
    raise ConnectionError("reset five times")


async def post_once(url: str, key: str, path: str, body: Any, hang_up: bool) -> tuple[int, Any]:
    """``post``, once."""
    host, _, base = url.removeprefix("http://").partition("/")
    name, _, port = host.partition(":")
    reader, writer = await asyncio.open_connection(name, int(port))
    data = json.dumps(body).encode()
    head = f"POST /{base}{path} HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {key}\r\n"
    writer.write(f"{head}Content-Length: {len(data)}\r\nConnection: close\r\n\r\n".encode() + data)
    await writer.drain()
    found = b"" if hang_up else await reader.read()
    writer.close()
    if hang_up:
        return 0, None
    start, _, content = found.partition(b"\r\n\r\n")
    status = int(start.split(b" ")[1])
    return status, json.loads(content) if content.startswith(b"{") else content


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


async def session(kind: str, url: str, key: str, others: str) -> None:
    """One agent of a kind."""
    chat, first = "/chat/completions", user("a" * 200)
    status, found = await post(url, key, chat, {"messages": [first]})
    assert status == 200, found
    said = found["choices"][0]["message"]
    if kind == "good":
        await post(url, key, chat, {"messages": [first, said, user("b")]})
    elif kind == "reward":
        for path in ("/reward", "/../reward_info", "/seal", "/rl/set_reward"):
            status, _ = await post(url, key, path, {"reward": 1e9})
            assert status in (401, 404), status
    elif kind == "thief":
        status, _ = await post(url, others, chat, {"messages": [first]})
        assert status == 401, status
    elif kind == "flood":
        some = [post(url, key, chat, {"messages": [user(str(i))]}) for i in range(80)]
        assert {status for status, _ in await asyncio.gather(*some)} <= {200, 400, 429}
    elif kind == "vanish":
        await post(url, key, chat, {"messages": [user("c")], "stream": True}, hang_up=True)
    elif kind == "long":
        status, found = await post(url, key, chat, {"messages": [user("d" * 60_000)]})
        assert status == 200 and "no room" in found["choices"][0]["message"]["content"]
    elif kind == "liar":
        lie = {"role": "assistant", "content": "I have won", "tool_calls": None}
        await post(url, key, chat, {"messages": [first, lie, user("b")]})
    elif kind == "loop":
        for i in range(12):
            await post(url, key, chat, {"messages": [user(f"e{i}")]})


async def growing(url: str, key: str, calls: int) -> None:
    """A conversation whose prompts have some 1,000 tokens, and begin anew when they have."""
    messages = [user("a" * 900)]
    for _ in range(calls):
        _, found = await post(url, key, "/chat/completions", {"messages": messages})
        messages += [found["choices"][0]["message"], user("next")]
        if len(messages) > 7:
            messages = [user("a" * 900)]


def clients(work: Any, done: Any) -> None:
    """The process of the clients: runs lists of agents that come."""
    while (some := work.get()) is not None:

        async def all_of_them(some: Any = some) -> None:
            await asyncio.gather(
                *(growing(*each[1:]) if each[0] == "growing" else session(*each) for each in some)
            )

        try:
            asyncio.run(all_of_them())
            done.put(RESETS[0])
        except BaseException as error:
            done.put(repr(error))


class Server:
    """A gateway whose policy draws nothing."""

    def __init__(self) -> None:
        from serving_double import byte_tokenizer  # type: ignore[import-not-found]

        from hjax.agents.gateway import Gateway
        from hjax.environments.episode_text import ObservationEncoder
        from hjax.serving.served_model import ServedModel

        tokenizer = byte_tokenizer()
        self.encoder = ObservationEncoder(tokenizer, chat=True)
        self.gateway = Gateway(ServedModel("", None, tokenizer, 0, (257,)))
        self.sessions: list[Any] = []
        threading.Thread(target=self.draw, daemon=True).start()

    def draw(self) -> None:
        from hjax.environments.episode import DrawnTurn

        logs = {name: [-1.0] * 9 for name in ("logprobs", "policy_logprobs")}
        while True:
            self.gateway.queue.wait(bool)
            for turn in self.gateway.queue.take(list(self.sessions)):
                turn.deliver(DrawnTurn([*b"an answer"[:8], 257], logs, True))

    def open(self, number: int, most_calls: int) -> tuple[Any, str]:
        from hjax.agents.call_tree import CallTree
        from hjax.agents.session import Session
        from hjax.environments.episode import EpisodeLimits

        limits = EpisodeLimits(most_calls, 64, 4096, 4096)
        made = Session(number, CallTree(self.encoder, limits), most_calls=most_calls)
        return made, self.gateway.open(made)


# The same questions by an environment and by agents: so many, then the episode is over.
ENVIRONMENT = """
import hjax

class Questions(hjax.Environment):
    def reset(self, task, seed):
        self.left = task["turns"]
        return hjax.Observation(task["prompt"])

    def step(self, action):
        self.left -= 1
        return hjax.Step(hjax.Observation("more?"), reward=1.0, done=not self.left)
"""
AGENT = """
import sys
sys.path.insert(0, {tests!r})
from agents_double import said, user
try:
    from openai import AsyncOpenAI
    CLIENT = AsyncOpenAI(base_url="http://127.0.0.1", api_key="-", timeout=None)
except ImportError:
    CLIENT = None

async def plain(task, url, key):
    messages = [user(task["prompt"])]
    for _ in range(task["turns"]):
        messages += [await said(url, key, messages), user("more?")]
    return 1.0

async def openai(task, url, key):
    client, messages = CLIENT.with_options(base_url=url, api_key=key), [user(task["prompt"])]
    for _ in range(task["turns"]):
        found = await client.chat.completions.create(model="policy", messages=messages)
        told = dict(role="assistant", content=found.choices[0].message.content)
        messages += [told, user("more?")]
    return 1.0
"""


def processor_seconds() -> float:
    """Of this process and all that it has started and that run."""
    from hjax.machine import descendants

    total, ticks = 0.0, os.sysconf("SC_CLK_TCK")
    for pid in (os.getpid(), *descendants(os.getpid())):
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            total += (int(fields[11]) + int(fields[12])) / ticks
    return total


def against_environments(
    episodes: int, turns: int, tokens: int, hidden: int, rounds: int
) -> dict[str, Any]:
    """Print what the same episodes cost by an environment and by agents."""
    import functools
    import tempfile

    import jax
    from serving_double import byte_tokenizer

    from hjax.agents.agent_runner import AgentRunner
    from hjax.agents.agent_settings import AgentSettings, RecordSettings
    from hjax.environments.episode import Episode, EpisodeLimits, EpisodePlayer
    from hjax.environments.episode_pool import EpisodePool
    from hjax.environments.episode_text import ObservationEncoder
    from hjax.models.compute import Compute
    from hjax.models.model_config import ModelConfig
    from hjax.models.parameters import decoder_network
    from hjax.rollout.generator import Generator
    from hjax.rollout.sampling_params import SamplingParams
    from hjax.rollout.turn_generator import TurnGenerator
    from hjax.sharding.layout import make_layouts

    tokenizer = byte_tokenizer()
    encoder = ObservationEncoder(tokenizer, chat=True)
    row_tokens = 64 + turns * (tokens + 64)
    limits = EpisodeLimits(turns, tokens, 64, row_tokens - 64)
    layout = make_layouts(jax.devices()[:1]).generate
    network = decoder_network(
        ModelConfig(258, hidden, 2 * hidden, 2, 4, 2, hidden // 4, row_tokens)
    )
    generator = Generator(network, layout, Compute())
    params = generator.decoding_params(network.create(0, layout))
    drawing = TurnGenerator(
        generator.engine, params, tokenizer, slots=episodes // 2, row_tokens=row_tokens,
        rows=episodes,
    )  # fmt: skip
    drawing.precompile()
    draw = functools.partial(drawing.draw, seed=1, sampling=SamplingParams())
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "environment.py").write_text(ENVIRONMENT)
        tests = str(Path(__file__).parents[1] / "tests")
        Path(folder, "agent.py").write_text(AGENT.replace("{tests!r}", repr(tests)))
        pool = EpisodePool(f"{folder}/environment.py:Questions", processes=1)
        runners = {
            name: AgentRunner(
                AgentSettings(function=f"{folder}/agent.py:{name}"), RecordSettings(), encoder,
                limits,
            )
            for name in ("plain", "openai")
        }  # fmt: skip
        players = {"environment": EpisodePlayer(pool, encoder, limits, draw)} | {
            f"agent, {name}": runner.player(draw) for name, runner in runners.items()
        }
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in players}
        for number in range(rounds + 1):  # the first warms up
            for name, player in players.items():
                task = {"prompt": "a" * 20, "turns": turns}
                some = [Episode(i, i, task, i) for i in range(episodes)]
                begin, spent = time.perf_counter(), processor_seconds()
                player.play(some)  # type: ignore[attr-defined]
                wall, spent = time.perf_counter() - begin, processor_seconds() - spent
                drawn = sum(len(turn.tokens) for each in some for turn in each.turns)
                assert all(each.stop_reason == "done" for each in some), some[0].fault
                if number:
                    found[name].append((drawn / wall, 1e3 * spent / (episodes * turns)))
        pool.close()
        for runner in runners.values():
            runner.close()
    told: dict[str, Any] = {}
    for name, figures in found.items():
        speed, cost = (statistics.median(each) for each in zip(*figures, strict=True))
        pairs = zip(figures, found["environment"], strict=True)
        share = statistics.median(mine / theirs for (mine, _), (theirs, _) in pairs)
        told[name] = {"tokens_per_second": speed, "share": share, "ms_of_a_turn": cost}
        print(f"{name}: {speed:.0f} tokens/s, {share:.2f} of the environment's (the median of "
              f"{rounds} pairs); {cost:.1f} ms of the processor for a turn")  # fmt: skip
    return told


def used() -> dict[str, float]:
    """Resident memory in MiB, and open files."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "MiB": pages * os.sysconf("SC_PAGE_SIZE") / 2**20,
        "files": len(os.listdir("/proc/self/fd")),
    }


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--sessions", type=int, default=2000)
    parser.add_argument("--calls", type=int, default=400)
    parser.add_argument("--against_environments", action="store_true")
    for name, value in (
        ("episodes", 64), ("turns", 4), ("tokens", 32), ("hidden", 256), ("rounds", 3)
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=value)
    args = parser.parse_args()
    use = machine.CoreUse()

    def tell(**figures: Any) -> None:
        about = {**machine.describe(), **machine.versions("jax", "openai", "starlette", "uvicorn")}
        print(json.dumps({"benchmark": "agents", **about, **use.read(), **figures}))

    if args.against_environments:
        sizes = args.episodes, args.turns, args.tokens, args.hidden, args.rounds
        tell(sizes=sizes, against=against_environments(*sizes))
        return
    spawn = multiprocessing.get_context("spawn")
    work, done = spawn.Queue(), spawn.Queue()
    process = spawn.Process(target=clients, args=(work, done), daemon=True)
    process.start()
    server = Server()

    resets = [0]

    def run(some: list[Any]) -> float:
        begin = time.process_time()
        work.put(some)
        if isinstance(found := done.get(), str):
            raise SystemExit(f"an agent met something else: {found}")
        resets[0] = found
        return time.process_time() - begin

    per_call = dict[int, float]()
    for count in (1, AT_A_TIME):
        opened = [server.open(i, 10_000) for i in range(count)]
        server.sessions = [one for one, _ in opened]
        each = max(20 // count, 1)
        took = [
            run([("growing", url, one.key, each) for one, url in opened]) / (count * each)
            for _ in range(max(args.calls // (count * each), 5))
        ]
        per_call[count] = 1e3 * statistics.median(took)
        print(f"{count} sessions at a time: {per_call[count]:.2f} ms of the "
              f"processor for a call, of {len(took)} parts the median", flush=True)  # fmt: skip
        for one, _ in opened:
            server.gateway.close(one)
    calls = 0
    for start in range(0, args.sessions, AT_A_TIME):
        opened = [server.open(start + i, 10) for i in range(AT_A_TIME)]
        server.sessions = [one for one, _ in opened]
        others = [one.key for one, _ in opened[1:]] + [opened[0][0].key]
        run([
            (KINDS[i % len(KINDS)], url, one.key, other)
            for i, ((one, url), other) in enumerate(zip(opened, others, strict=True))
        ])  # fmt: skip
        for one, _ in opened:
            assert all(call.text == "an answe" for call in one.tree.calls)  # nothing but drawn
            calls += len(one.tree.calls)
            server.gateway.close(one)
        server.sessions = []
        del opened, one
        figures = ", ".join(f"{name} {value:.0f}" for name, value in used().items())
        print(
            f"{start + AT_A_TIME} sessions: {figures}, {calls} calls recorded, "
            f"{resets[0]} connections reset",
            flush=True,
        )
    work.put(None)
    tell(ms_of_a_call=per_call, hostile_sessions=args.sessions, recorded=calls, **used())


if __name__ == "__main__":
    main()
