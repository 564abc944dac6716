"""A server's process among clients of all kinds, many of them bad: every good one gets its answer,
the same as alone, and nothing is left behind: no slot, no memory, no descriptor, no thread."""

import asyncio
import contextlib
import dataclasses
import json
import os
import pathlib
import random
import re
import signal
import socket
import struct
import subprocess
import sys
import time
import urllib.parse

import pytest
from helpers import save_model
from serving_double import EOS, TEMPLATE, byte_tokenizer

pytestmark = pytest.mark.skipif(
    not pathlib.Path("/proc/self/fd").is_dir(), reason="reads /proc of the server's process"
)
KEY = "sesame"
BODY, CONNECTIONS, IDLE = 200_000, 100, 1
FLAGS = ["--api_key_env=HJAX_TEST_KEY", f"--max_body_bytes={BODY}", "--max_queue=200",
         f"--max_connections={CONNECTIONS}", f"--header_seconds={IDLE}",
         f"--idle_seconds={IDLE}"]  # fmt: skip
# Seconds for one request: a program is compiled in some, on a machine that does other things too.
PATIENCE = 300
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
# By how much the server's memory may grow, however many requests come: by a program that is
# compiled late (one of XLA's takes 3 to 6 MB), and by a part of what it is.
PROGRAM_BYTES, GROWTH = 8 * 2**20, 0.05
WORDS = "Once upon a time there was a little girl named Lily who had big red ball and dog".split()


@dataclasses.dataclass(frozen=True)
class Model:
    """A model to serve.

    Attributes:
      path: its folder.
      context: tokens of a prompt and its response.
      words: of a prompt at most.
      end: the token that ends a response.
      slots: responses at a time; 0: as many as the server chooses.
    """

    path: pathlib.Path
    context: int
    words: int
    end: int
    slots: int = 0


@dataclasses.dataclass(frozen=True)
class Answer:
    """What does not depend on how it was asked: of each choice the text, the tokens, the reason of
    its end; and the log-probs of all, with some rounding."""

    choices: tuple
    logprobs: tuple

    def check(self, other, body):
        """That another is the same."""
        assert self.choices == other.choices, body
        assert self.logprobs == pytest.approx(other.logprobs, abs=1e-3), body


class Connection:
    """HTTP/1.1 as far as it is needed here, by hand: it is to be spoken wrongly too."""

    def __init__(self, reader, writer):
        self.reader, self.writer = reader, writer

    @classmethod
    async def to(cls, url, buffer=0):
        """A new one; with ``buffer`` so many bytes are received that nobody reads."""
        address = urllib.parse.urlsplit(url)
        made = socket.socket()
        if buffer:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
        made.setblocking(False)
        where = address.hostname, address.port
        await asyncio.get_running_loop().sock_connect(made, where)
        return cls(*await asyncio.open_connection(sock=made, limit=buffer or 2**20))

    async def head(self):
        """Status and headers of the next answer; those of 100-continue are passed over."""
        said = await self.reader.readuntil(b"\r\n\r\n")
        first, *lines = said.decode().split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in lines if line)
        status = int(first.split()[1])
        return await self.head() if status == 100 else (status, headers)

    async def parts(self, headers):
        """The body as it comes."""
        if "content-length" in headers:
            yield await self.reader.readexactly(int(headers["content-length"]))
            return
        assert headers["transfer-encoding"] == "chunked", headers
        while size := int(await self.reader.readuntil(b"\r\n"), 16):
            yield (await self.reader.readexactly(size + 2))[:-2]
        await self.reader.readexactly(2)

    async def answer(self):
        """Status, headers and body."""
        status, headers = await self.head()
        return status, headers, b"".join([part async for part in self.parts(headers)])

    async def send(self, data):
        self.writer.write(data)
        await self.writer.drain()

    def leave(self, reset=False):
        """Close it; with ``reset`` without a word, as when a machine is gone."""
        if reset:
            own = self.writer.get_extra_info("socket")
            own.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()

    async def ended(self):
        """Whether the server closes it; what it still says is read, and returned."""
        said = b""
        with contextlib.suppress(ConnectionResetError):
            while part := await self.reader.read(65536):
                said += part
        return said


def posted(path, body, key=KEY, more="", length=None):
    """A request's bytes."""
    length = len(body) if length is None else length
    head = (
        f"POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\n"
        f"Content-Length: {length}\r\n{more}\r\n"
    )
    return head.encode() + body


def encoded(body, stream=False):
    more = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    return json.dumps(body | {"return_token_ids": True} | more).encode()


def read_answer(path, body, stream):
    """Of an answer's body."""
    if not stream:
        whole = json.loads(body)
        said = "message" if path == CHATS else "text"
        found = [
            (c["index"], c[said]["content"] if path == CHATS else c[said], c["token_ids"],
             c["finish_reason"], c["logprobs"])
            for c in whole["choices"]
        ]  # fmt: skip
        usage = whole["usage"]
    else:
        events = body.decode().split("\n\n")
        assert events[-2:] == ["data: [DONE]", ""], events[-3:]
        chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
        assert not any("error" in chunk for chunk in chunks), chunks[-1]
        found = [
            (c["index"], (c["delta"].get("content") or "") if path == CHATS else c["text"],
             c["token_ids"], c["finish_reason"], c["logprobs"])
            for chunk in chunks for c in chunk["choices"]
        ]  # fmt: skip
        usage = chunks[-1]["usage"]
    choices, logprobs = [], []
    for index in sorted({each[0] for each in found}):
        own = [each for each in found if each[0] == index]
        text = "".join(each[1] for each in own)
        ids = tuple(token for each in own for token in each[2])
        assert [each[3] for each in own[:-1]] == [None] * (len(own) - 1)
        choices.append((text, ids, own[-1][3]))
        for *_, given in own:
            given = given or {}
            logprobs += given.get("token_logprobs", [])
            logprobs += [each["logprob"] for each in given.get("content", [])]
    # A stop string may end a response within a piece, of which the rest was drawn too.
    assert usage["completion_tokens"] == sum(len(ids) for _, ids, _ in choices)
    return Answer(tuple(choices), tuple(logprobs))


def good_requests(draw, model, count):
    """Requests whose answers follow from them alone: path and body each."""

    def text(most=model.words):
        return " ".join(draw.choices(WORDS, k=draw.randint(1, most)))

    def options():
        made = {
            "seed": draw.randrange(2**32),
            "max_tokens": draw.choice([1, 7, 16, model.context // 8]),
            "temperature": draw.choice([0, 0.7, 1, 1]),
            "n": draw.choice([1, 1, 1, 2, 4]),
        }
        if draw.random() < 0.2:
            made |= {"top_p": 0.9, "top_k": 20}
        if draw.random() < 0.2:
            made |= {"presence_penalty": 0.5, "logit_bias": {str(model.end): -100}}
        if draw.random() < 0.3:
            made |= {"stop": draw.choice([["e"], [" the", "."], ["never said"]])}
        return made

    found = []
    while len(found) < count:
        if draw.random() < 0.6:
            prompt = draw.choice([text(), text(), [text(), text()], [5, 7, 9, 11]])
            found.append((COMPLETIONS, {"prompt": prompt} | options() | {"logprobs": 1}))
            continue
        # The turns of a conversation: each begins as the one before.
        turns = []
        for _ in range(3):
            turns.append({"role": "user", "content": text(4)})
            found.append((CHATS, {"messages": list(turns)} | options() | {"logprobs": True}))
            turns.append({"role": "assistant", "content": text(4)})
    return found[:count]


class Client:
    """One that asks for what it is told, well or badly.

    Args:
      url: of the server.
      model: that is served.
      good: requests, and their answers.
      draw: random numbers of its own.
    """

    def __init__(self, url, model, good, draw):
        self._url, self._model, self._good, self._draw = url, model, good, draw
        self._open = None
        endless = {"prompt": "a", "logit_bias": {str(model.end): -100}}
        self._endless = endless | {"max_tokens": model.context - 8, "n": 2}

    @contextlib.asynccontextmanager
    async def _connected(self, buffer=0, reset=False):
        connection = await Connection.to(self._url, buffer)
        try:
            yield connection
        finally:
            connection.leave(reset)

    # Good ones

    async def good(self, how="at once"):
        """Asked until the queue has room; over the connection of before where that is still there.

        ``how``: the body "at once" or "slowly", the answer read "by drops", or after "100".
        """
        path, body, expected = self._draw.choice(self._good)
        stream = self._draw.random() < 0.5
        data = encoded(body, stream)
        while True:
            status, headers, said = await self._asked(path, data, how)
            if status != 429:
                break
            assert int(headers["retry-after"]) >= 1
            await asyncio.sleep(0.2 + 0.3 * self._draw.random())
        assert status == 200, said
        read_answer(path, said, stream).check(expected, body)

    async def _asked(self, path, data, how):
        last = self._draw.random() < 0.3
        more = "Connection: close\r\n" if last else ""
        more += "Expect: 100-continue\r\n" if how == "100" else ""
        sent = posted(path, data, more=more)
        for _ in range(2):
            used, self._open = self._open, None
            connection = used or await Connection.to(self._url)
            try:
                if how == "slowly":
                    for at in range(0, len(sent), 1 + len(sent) // 5):
                        await connection.send(sent[at : at + 1 + len(sent) // 5])
                        await asyncio.sleep(0.03)
                else:
                    await connection.send(sent)
                status, headers = await connection.head()
                said = b""
                async for part in connection.parts(headers):
                    said += part
                    if how == "by drops":
                        await asyncio.sleep(0.02)
            except (ConnectionError, asyncio.IncompleteReadError):
                connection.leave()
                assert used, "a new connection was closed without an answer"
                continue  # it was idle for too long
            except BaseException:
                connection.leave()
                raise
            if last:
                connection.leave()
            else:
                self._open = connection
            return status, headers, said
        raise AssertionError("two connections were closed without an answer")

    async def new(self):
        """A request that nobody made before, of a seed, a text and maybe a pattern of its own."""
        [(path, body)] = good_requests(self._draw, self._model, 1)
        own = "".join(self._draw.choices("abcdefgh", k=4))
        if self._draw.random() < 0.2:
            body |= {"guided_regex": f"[{own}]{{1,3}}", "stop": []}
        status, _, said = await self._asked(path, encoded(body), "at once")
        assert status in (200, 429), said
        if status == 200 and "guided_regex" in body:
            answer = read_answer(path, said, False)
            assert all(re.fullmatch(f"[{own}]*", text) for text, _, _ in answer.choices), answer

    async def slow_writer(self):
        await self.good("slowly")

    async def slow_reader(self):
        await self.good("by drops")

    async def expects(self):
        await self.good("100")

    async def pipelined(self):
        """Two requests at once are two answers, in their order."""
        asked = [self._draw.choice(self._good) for _ in range(2)]
        async with self._connected() as connection:
            await connection.send(b"".join(posted(p, encoded(b)) for p, b, _ in asked))
            for path, body, expected in asked:
                status, _, said = await connection.answer()
                if status != 429:
                    read_answer(path, said, False).check(expected, body)

    # Those that go away

    async def cancels(self):
        """In the midst of a stream."""
        async with self._connected(reset=self._draw.random() < 0.5) as connection:
            await connection.send(posted(COMPLETIONS, encoded(self._endless, True)))
            status, headers = await connection.head()
            assert status in (200, 429)
            left = self._draw.randint(0, 6)
            async for _ in connection.parts(headers):
                left -= 1
                if left < 0:
                    return

    async def leaves(self):
        """Before the answer, or before it has asked; it may have said more than it should."""
        data = posted(COMPLETIONS, encoded(self._endless, self._draw.random() < 0.5))
        cut = self._draw.choice([len(data), len(data), len(data) - 9, 40, 1, 0])
        async with self._connected(reset=self._draw.random() < 0.5) as connection:
            await connection.send(data[:cut] + self._draw.choice([b"", b"", b"GET"]))
            await asyncio.sleep(self._draw.choice([0, 0, 0.01, 0.1]))

    async def never_reads(self):
        """Cut off, or sent into buffers; the next request on it is not answered."""
        body = self._endless | {"n": 16, "logprobs": 1}
        async with self._connected(buffer=2048) as connection:
            await connection.send(posted(COMPLETIONS, encoded(body, True)))
            await asyncio.sleep(IDLE + 1)

    # Those that ask wrongly

    async def _refused(self, data, *statuses, leave=False):
        """Sent as it is, and refused with one of these; 0: closed without a word will do."""
        async with self._connected() as connection:
            try:
                await connection.send(data)
                status, _, said = await connection.answer()
            except (ConnectionError, asyncio.IncompleteReadError):
                assert 0 in statuses
                return
            assert status in statuses, (data[:200], status, said)
            assert json.loads(said)["error"]["message"]

    async def oversize(self):
        large = b" " * (BODY + 1)
        chunks = b"%x\r\n%s\r\n" % (len(large), large)
        head = posted(COMPLETIONS, b"", length=0).replace(
            b"Content-Length: 0", b"Transfer-Encoding: chunked"
        )
        sent = [posted(COMPLETIONS, large), posted(COMPLETIONS, b"{", length=10**12), head + chunks]
        await self._refused(self._draw.choice(sent), 413)

    async def wrong_body(self):
        wrong = [b"", b"{", b"[]", b"\xff", b"[" * 50_000, b'{"prompt": NaN}', b'{"prompt": {}}',
                 b'{"prompt": "\xed\xa0\x80"}', b'{"prompt": "a", "\xed\xa0\x80": 1}',
                 b'{"prompt": "a", "seed": 1.5}', b'{"prompt": "a", "max_tokens": 100000}',
                 b'{"prompt": "a", "logit_bias": {"9999999": 1}}', b'{"prompt": "a", "n": 1000}',
                 b'{"prompt": "a", "temperature": 1e999}', b'{"prompt": "a", "x": {}}',
                 json.dumps({"prompt": "word " * 30_000}).encode()]  # fmt: skip
        await self._refused(posted(COMPLETIONS, self._draw.choice(wrong)), 400)

    async def costly_body(self):
        """Refused before it is made."""
        many = b'{"prompt": [%s]}' % b",".join([b"[]"] * 66_000)
        await self._refused(posted(COMPLETIONS, many), 413)
        regex = {"prompt": "a", "guided_json": {"x": "b" * 140_000}}
        await self._refused(posted(COMPLETIONS, json.dumps(regex).encode()), 400)

    async def wrong_http(self):
        good = posted(COMPLETIONS, b"{}")
        wrong = [b"\x16\x03\x01\x02\x00\r\n\r\n", b"GET\r\n\r\n", b"\x00" * 400 + b"\r\n\r\n",
                 good.replace(b"Content-Length: 2", b"Content-Length: -2"),
                 good.replace(b"Content-Length: 2", b"Content-Length: 2\r\nContent-Length: 3"),
                 good.replace(b"Content-Length: 2", b"Content-Length: 2\r\nbad header\r\n"),
                 good.replace(b"Content-Length: 2", b"Transfer-Encoding: chunked")[:-2] + b"zz\r\n",
                 good.replace(b"Host: x", b"Host: x\r\nX: " + b"y" * 100_000),
                 good.replace(b"Host: x", b"Host: x\r\nTransfer-Encoding: chunked"),
                 good.replace(b"Host: x", b"Host: x\r\n folded"),
                 good.replace(b"Host: x", b"Host: x\r\nHost: y")]  # fmt: skip
        await self._refused(self._draw.choice(wrong), 400, 431, 0)

    async def wrong_end(self):
        """An answer, and then no HTTP: said so, and closed."""
        async with self._connected() as connection:
            await connection.send(posted(COMPLETIONS, b"{}") + b"\x00\x01\r\n\r\n")
            for _ in range(2):
                status, _, said = await connection.answer()
                assert status == 400 and json.loads(said)["error"]["message"]
            assert await connection.ended() == b""

    async def wrong_key(self):
        await self._refused(posted(COMPLETIONS, b"{}", key="open"), 401)

    async def wrong_path(self):
        await self._refused(posted("/v1/models", b"{}"), 405)
        await self._refused(posted("/nowhere", b"{}"), 404)

    async def slow_headers(self):
        """That never end; drop by drop it takes no longer."""
        async with self._connected() as connection:
            began = time.monotonic()
            with contextlib.suppress(ConnectionError):
                for letter in b"GET /health HTTP/1.1\r\nHost":
                    await connection.send(bytes([letter]))
                    await asyncio.sleep(0.02)
                assert await connection.ended() == b""
            assert time.monotonic() - began < 20

    async def slow_body(self):
        """That never ends."""
        async with self._connected() as connection:
            await connection.send(posted(COMPLETIONS, b"{", length=50))
            await asyncio.sleep(1)

    def close(self):
        if self._open is not None:
            self._open.leave()


# How many of a hundred requests are of which kind.
MIX = {"good": 16, "new": 30, "slow_writer": 4, "slow_reader": 4, "expects": 2, "pipelined": 3,
       "cancels": 9, "leaves": 9, "never_reads": 1, "oversize": 2, "costly_body": 1,
       "wrong_body": 7, "wrong_http": 5, "wrong_end": 2, "wrong_key": 2, "wrong_path": 1,
       "slow_headers": 1, "slow_body": 1}  # fmt: skip


async def mixed(url, model, good, draw, count, clients):
    """So many requests in a drawn order, by so many clients at a time."""
    kinds = [*MIX, *draw.choices([*MIX], MIX.values(), k=count - len(MIX))]
    draw.shuffle(kinds)
    left = iter(kinds)

    async def client(seed):
        own = Client(url, model, good, random.Random(seed))
        try:
            for kind in left:
                async with asyncio.timeout(PATIENCE):
                    await getattr(own, kind)()
        finally:
            own.close()

    async with asyncio.TaskGroup() as group:
        for _ in range(clients):
            group.create_task(client(draw.random()))


class Process:
    """A server's, and what Linux and Prometheus know of it."""

    def __init__(self, process, url, log):
        self.url, self._log = url, log
        self._folder = pathlib.Path(f"/proc/{process.pid}")

    def holds(self):
        """Descriptors and threads."""
        status = (self._folder / "status").read_text()
        threads = re.search(r"^Threads:\s+(\d+)", status, re.MULTILINE)
        return len(os.listdir(self._folder / "fd")), int(threads[1])

    def memory(self):
        """Resident bytes."""
        status = (self._folder / "status").read_text()
        return 1024 * int(re.search(r"^VmRSS:\s+(\d+) kB", status, re.MULTILINE)[1])

    def programs(self):
        """That were compiled so far."""
        return self._log.read_text().count("Finished XLA compilation")

    async def figures(self):
        """Of /metrics: sums by name."""
        connection = await Connection.to(self.url)
        head = f"GET /metrics HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n\r\n"
        await connection.send(head.encode())
        status, _, text = await connection.answer()
        connection.leave()
        assert status == 200
        found = {}
        for name, value in re.findall(r"^(\w+)(?:\{.*\})? (\S+)$", text.decode(), re.MULTILINE):
            found[name] = found.get(name, 0) + float(value)
        return found

    async def quiet(self):
        """Once nothing runs or waits and every connection is closed: what it then holds."""
        late = time.monotonic() + 30
        before, since = None, time.monotonic()
        while True:
            figures = await self.figures()
            now = (figures["hjax_running"], figures["hjax_waiting"], *self.holds())
            if now != before:
                before, since = now, time.monotonic()
            # Connections that nobody uses are closed by then.
            if now[:2] == (0, 0) and time.monotonic() - since > IDLE + 0.5:
                return now[2:]
            assert time.monotonic() < late, now
            await asyncio.sleep(0.2)


async def alone(url, good):
    """The answers to requests that come one after another."""
    found = []
    for path, body in good:
        connection = await Connection.to(url)
        await connection.send(posted(path, encoded(body)))
        status, _, said = await connection.answer()
        connection.leave()
        assert status == 200, said
        found.append((path, body, read_answer(path, said, False)))
    return found


async def all_slots(server, model):
    """As many responses as there are slots run at once, and end."""
    slots = int((await server.figures())["hjax_slots"])
    body = {"prompt": "a", "logit_bias": {str(model.end): -100}, "max_tokens": model.context - 8}
    connections = [await Connection.to(server.url) for _ in range(slots)]
    for seed, connection in enumerate(connections):
        await connection.send(posted(COMPLETIONS, encoded(body | {"seed": seed}, True)))
    most = 0.0
    answers = [asyncio.create_task(each.answer()) for each in connections]
    while not all(each.done() for each in answers):
        most = max(most, (await server.figures())["hjax_running"])
    assert most == slots
    for answer in answers:
        status, _, said = answer.result()
        [(_, ids, finish)] = read_answer(COMPLETIONS, said, True).choices
        assert status == 200 and len(ids) == body["max_tokens"] and finish == "length"
    for connection in connections:
        connection.leave()


async def all_threads(url, clients=24):
    """The server has as many threads for requests as it ever takes: it makes them as it needs.
    Of larger bodies only some are parsed at a time."""
    long = posted(COMPLETIONS, json.dumps({"prompt": "word " * 12_000}).encode())
    connections = [await Connection.to(url) for _ in range(clients)]
    for connection in connections:
        await connection.send(long)
    for connection in connections:
        assert (await connection.answer())[0] == 400
        connection.leave()


async def crowd(url):
    """More connections than are taken: the others are told so, and those are closed in time."""
    connections = [await Connection.to(url) for _ in range(CONNECTIONS + 40)]
    said = await asyncio.gather(*[each.ended() for each in connections])
    assert sum(b" 503 " in each and b"retry-after: 1" in each for each in said) == 40
    assert said.count(b"") == CONNECTIONS


async def soak(server, process, model, count, clients):
    """All of it; ends with the server's end."""
    draw = random.Random(1)
    # The first of a pattern starts the process where patterns are tried.
    asked = [(COMPLETIONS, {"prompt": "a", "guided_regex": "[a-f]{3}", "seed": 1, "logprobs": 1})]
    asked += good_requests(draw, model, 30 if count > 1000 else 6)
    good = await alone(server.url, asked)
    await all_threads(server.url)
    await crowd(server.url)
    # The mix for a while, for the programs, caches and memory that it takes anyway.
    await mixed(server.url, model, good, draw, count // 2, clients)
    held, memory, programs = await server.quiet(), server.memory(), server.programs()
    began = time.monotonic()
    await mixed(server.url, model, good, draw, count, clients)
    seconds = time.monotonic() - began
    after, grown = await server.quiet(), server.memory() - memory
    programs = server.programs() - programs
    print(f"{count} requests in {seconds:.1f} s; {memory / 2**20:.0f} MiB, {grown / 2**20:+.1f} "
          f"({grown / memory:+.1%}) with {programs} more programs; {held} descriptors and threads, "
          f"{after}")  # fmt: skip
    assert after[0] <= held[0] and after[1] <= held[1]
    assert grown < GROWTH * memory + programs * PROGRAM_BYTES
    again = await alone(server.url, asked)
    for (_, body, expected), (_, _, answer) in zip(good, again):
        answer.check(expected, body)
    await all_slots(server, model)
    await ends(server, process, model)


async def ends(server, process, model):
    """SIGTERM: what runs is answered, and the process is gone in time."""
    body = {"prompt": "a", "logit_bias": {str(model.end): -100}, "max_tokens": model.context - 8}
    connection, idle = await Connection.to(server.url), await Connection.to(server.url)
    await connection.send(posted(COMPLETIONS, encoded(body, True)))
    status, headers = await connection.head()
    parts = connection.parts(headers)
    said = await anext(parts)
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    said += b"".join([part async for part in parts])
    [(_, ids, finish)] = read_answer(COMPLETIONS, said, True).choices
    assert len(ids) == body["max_tokens"] and finish == "length"
    assert await asyncio.to_thread(process.wait, 20) == 0
    assert time.monotonic() - began < 15
    connection.leave(), idle.leave()


def tiny(folder):
    """Random weights, a token per byte."""
    # Short texts and few slots: fewer programs to compile.
    template = "{% for m in messages %}{{ m.content }}|{% endfor %}"
    save_model(folder, tokenizer=byte_tokenizer(template), vocab_size=260, max_length=128)
    return Model(folder, 128, 4, EOS, slots=4)


def stories(folder, weights):
    """Trained ones, with a chat template."""
    folder.mkdir()
    for file in (weights / "stories260K-hf").iterdir():
        (folder / file.name).symlink_to(file)
    given = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").unlink()
    (folder / "tokenizer_config.json").write_text(json.dumps(given | {"chat_template": TEMPLATE}))
    return Model(folder, 512, 60, 2)


def run(model, folder, count, clients, *flags):
    """A server's process, its soak, and that it had nothing to complain of."""
    log = folder / "stderr"
    with open(log, "w") as errors:
        process = subprocess.Popen(
            # Fewer files than connections: it is to see to that.
            ["sh", "-c", 'ulimit -Sn 64; exec "$@"', "sh", sys.executable, "-m",
             "hjax.launch.serve", f"--model={model.path}", "--protocol=openai", "--port=0",
             f"--slots={model.slots}", *FLAGS, *flags],
            stdout=subprocess.PIPE, stderr=errors, text=True,
            env=os.environ | {"HJAX_TEST_KEY": KEY, "JAX_LOG_COMPILES": "1"},
        )  # fmt: skip
    try:
        url = process.stdout.readline().split()[-1]
        assert url.startswith("http://")
        server = Process(process, url, log)
        asyncio.run(soak(server, process, model, count, clients))
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    # JAX says what it compiles, as it was told to; uvicorn what is no HTTP; asyncio that it was
    # given several events for a client that has just gone away.
    usual = re.compile(
        r".*(ompil|tracing|to MLIR|persistent|Invalid HTTP request|socket.send)", re.I
    )
    assert [line for line in log.read_text().split("\n") if line and not usual.match(line)] == []


@pytest.mark.filterwarnings("ignore:unclosed <StreamWriter:ResourceWarning")  # clients that leave
def test_a_server_among_bad_clients(tmp_path):
    run(tiny(tmp_path / "model"), tmp_path, 60, 12)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_server_among_very_many_bad_clients(tmp_path, test_data):
    """All programs are compiled before, so that what grows would be the requests'."""
    model = stories(tmp_path / "model", test_data / "weights")
    run(model, tmp_path, 5000, 48, "--warm_up")
