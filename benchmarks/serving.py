"""Latencies of `python -m hjax.launch.serve` at 1, 8 and 64 clients, beside a plain loop.

The server is a process of its own with its defaults, float32, on this machine's CPU; its clients
are this process, on the same cores. Each client sends a request, reads the stream to its end, and
sends the next. The model is W1's (`step_hjax.py`) with weights from a seed and a token for each of
512 characters, or the folder that `--model` names. Prompts have 16 to 64 tokens, no two of them
begin alike, responses have 64, or fewer where the model ends them.

- `first_token_ms`: from the connection's opening to the first event with a token.
- `token_ms`: between two events with tokens, by the tokens of the second: the server sends what it
  has drawn since, up to 8 of them. `event_ms` is that time itself.
- `tokens_per_second`: of all clients together.
- `programs`: that the server compiled while it was measured, after `--warm_up`.

The loop answers the same requests one after another, first come first served, by
`LanguageModel.generate`; it has no stream, a response's first token comes with its last. What N
clients would wait for it follows from the seconds that each request took: a client's next request
comes when its last was answered, behind those of all others. `same` is the share of responses that
have the same tokens by both. Prints one JSON line.

    python benchmarks/serving.py [--model=DIR] [--slots=0] [--requests=24,64,256]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
import urllib.parse
from collections.abc import Iterator, Sequence
from typing import Any

import machine
import numpy as np

CLIENTS = (1, 8, 64)
SHORTEST, LONGEST, RESPONSE = 16, 64, 64
# Tokens below are special in many a vocabulary.
FIRST = 4


@dataclasses.dataclass(frozen=True)
class Reply:
    """What a client saw of a response.

    Attributes:
      tokens: of it.
      seconds: until each event that had tokens, from the request's beginning.
      counts: tokens of each event.
    """

    tokens: tuple[int, ...]
    seconds: tuple[float, ...]
    counts: tuple[int, ...]


class Server:
    """A server's process.

    Attributes:
      url: of it.
    """

    def __init__(self, url: str, log: pathlib.Path):
        self.url = url
        self._log = log

    @classmethod
    @contextlib.contextmanager
    def started(cls, model: str, flags: Sequence[str], folder: pathlib.Path) -> Iterator[Server]:
        """One on a free port, which ends with the block."""
        log = folder / "server"
        with open(log, "w") as errors:
            process = subprocess.Popen(
                [sys.executable, "-m", "hjax.launch.serve", f"--model={model}", "--port=0",
                 "--protocol=openai", *flags],
                stdout=subprocess.PIPE, stderr=errors, text=True,
                env=os.environ | {"JAX_LOG_COMPILES": "1"},
            )  # fmt: skip
        assert process.stdout is not None
        with process:
            line = process.stdout.readline()
            if not line:
                raise SystemExit(f"the server did not start:\n{log.read_text()}")
            try:
                yield cls(line.split()[-1], log)
            finally:
                process.send_signal(signal.SIGTERM)

    def programs(self) -> int:
        """That it has compiled so far."""
        return self._log.read_text().count("Finished XLA compilation")


def make_model(folder: pathlib.Path) -> str:
    """W1's model with a tokenizer that has no end token, as a folder."""
    import jax
    import tokenizers
    from rollout import W1
    from tokenizers import decoders, models, pre_tokenizers

    from hjax.data.tokenizer import Tokenizer
    from hjax.models.export import export_weights
    from hjax.models.parameters import decoder_network
    from hjax.sharding.layout import make_layouts

    letters = {chr(0x100 + i): i for i in range(W1.vocab_size)}
    backend = tokenizers.Tokenizer(models.WordLevel(letters, unk_token=chr(0x100)))
    backend.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    tokenizer = Tokenizer(backend, {"add_bos_token": False}, name="letters")
    params = decoder_network(W1).create(0, make_layouts(jax.devices()[:1]).generate)
    return str(export_weights(folder / "model", W1, params, tokenizer=tokenizer))


def make_requests(vocab: int, count: int, seed: int) -> list[dict[str, Any]]:
    """Bodies of requests; no two prompts begin alike."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(SHORTEST, LONGEST + 1, count)
    return [
        {
            "prompt": rng.integers(FIRST, vocab, length).tolist(),
            "max_tokens": RESPONSE,
            "seed": int(rng.integers(2**32)),
            "stream": True,
            "return_token_ids": True,
        }
        for length in lengths
    ]


async def ask(url: str, body: dict[str, Any]) -> Reply:
    """A request, and its stream to the end."""
    address = urllib.parse.urlsplit(url)
    sent = json.dumps(body).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        f"Content-Length: {len(sent)}\r\n\r\n"
    )
    began = time.perf_counter()
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    writer.write(head.encode() + sent)
    if b" 200 " not in (status := await reader.readline()):
        raise RuntimeError(f"{status.decode().strip()}: {(await reader.read()).decode()}")
    tokens: list[int] = []
    seconds, counts = [], []
    async for line in reader:
        # Lines between events are chunks' lengths, which nobody needs here.
        if not line.startswith(b"data: {"):
            continue
        event = json.loads(line.removeprefix(b"data: "))
        if new := event["choices"][0]["token_ids"]:
            seconds.append(time.perf_counter() - began)
            counts.append(len(new))
            tokens += new
    writer.close()
    return Reply(tuple(tokens), tuple(seconds), tuple(counts))


async def ask_all(
    url: str, requests: Sequence[dict[str, Any]], clients: int
) -> tuple[list[Reply], float]:
    """All of them by so many clients, each of which takes the next; and the seconds."""
    replies: dict[int, Reply] = {}
    left = iter(enumerate(requests))

    async def client() -> None:
        for at, body in left:
            replies[at] = await ask(url, body)

    began = time.perf_counter()
    await asyncio.gather(*[client() for _ in range(clients)])
    return [replies[at] for at in range(len(requests))], time.perf_counter() - began


def percentiles(seconds: Sequence[float]) -> dict[str, float]:
    """p50 and p99 in ms."""
    p50, p99 = np.percentile(np.asarray(seconds) * 1000, [50, 99])
    return {"p50": round(float(p50), 2), "p99": round(float(p99), 2)}


def figures(replies: Sequence[Reply], seconds: float) -> dict[str, Any]:
    """Of what clients saw."""
    gaps = [
        (after - before, count)
        for reply in replies
        for before, after, count in zip(
            reply.seconds, reply.seconds[1:], reply.counts[1:], strict=False
        )
    ]
    return {
        "requests": len(replies),
        "first_token_ms": percentiles([reply.seconds[0] for reply in replies]),
        "token_ms": percentiles([gap / count for gap, count in gaps]),
        "event_ms": percentiles([gap for gap, _ in gaps]),
        "tokens_per_second": round(sum(len(r.tokens) for r in replies) / seconds, 1),
    }


def measure_server(
    server: Server, vocab: int, counts: dict[int, int]
) -> tuple[dict[int, Any], dict[int, list[Reply]]]:
    """Figures and replies by number of clients."""
    found, heard = {}, {}
    for clients, count in counts.items():
        before = server.programs()
        requests = make_requests(vocab, count, clients)
        replies, seconds = asyncio.run(ask_all(server.url, requests, clients))
        programs = server.programs() - before
        found[clients] = figures(replies, seconds) | {"programs": programs}
        heard[clients] = replies
    return found, heard


def measure_loop(
    model: Any, counts: dict[int, int], heard: dict[int, list[Reply]], most: int
) -> tuple[dict[int, Any], float]:
    """Figures of the loop by number of clients, and the share of the same responses."""
    vocab = model.config.vocab_size

    def answer(body: dict[str, Any]) -> tuple[int, ...]:
        [reply] = model.generate([body["prompt"]], body["max_tokens"], seed=body["seed"])
        return tuple(reply.tokens)

    [body] = make_requests(vocab, 1, 0)
    for length in range(SHORTEST, LONGEST + 1):  # compile
        answer(body | {"prompt": [FIRST] * length})
    found, same = {}, []
    for clients, count in counts.items():
        ends, tokens = [0.0], 0
        requests = make_requests(vocab, count, clients)[:most]
        for body, reply in zip(requests, heard[clients], strict=False):
            began = time.perf_counter()
            drawn = answer(body)
            ends.append(ends[-1] + time.perf_counter() - began)
            tokens += len(drawn)
            same.append(drawn == reply.tokens)
        # Of N clients one waits for the N answers since its last.
        alone = np.diff(ends)
        waits = [float(np.resize(alone[at:], clients).sum()) for at in range(len(alone))]
        found[clients] = {
            "requests": len(requests),
            "first_token_ms": percentiles(waits),
            "tokens_per_second": round(tokens / ends[-1], 1),
        }
    return found, float(np.mean(same))


def main() -> None:
    """Measure, and print the line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", help="a folder to serve instead of W1's")
    parser.add_argument("--slots", type=int, default=0, help="of the server; 0: it chooses")
    parser.add_argument("--requests", default="24,64,256", help="for 1, 8 and 64 clients")
    parser.add_argument("--loop_requests", type=int, default=32, help="of each for the loop")
    args = parser.parse_args()
    counts = dict(zip(CLIENTS, map(int, args.requests.split(",")), strict=True))
    use = machine.CoreUse()
    import hjax

    with tempfile.TemporaryDirectory() as folder:
        path = args.model or make_model(pathlib.Path(folder))
        model = hjax.load_model(path)
        vocab = model.config.vocab_size
        flags = [f"--slots={args.slots}", "--warm_up"]
        with Server.started(path, flags, pathlib.Path(folder)) as server:
            served, heard = measure_server(server, vocab, counts)
        loop, same = measure_loop(model, counts, heard, args.loop_requests)
    line = {
        "benchmark": "serving",
        "model": args.model or "W1",
        "slots": args.slots,
        "server": served,
        "loop": loop,
        "ratios": {
            clients: round(
                served[clients]["tokens_per_second"] / loop[clients]["tokens_per_second"], 2
            )
            for clients in counts
        },
        "same": round(same, 3),
        **use.read(),
        **machine.describe(),
        **machine.versions("jax", "jaxlib", "uvicorn"),
    }
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
