"""Clients that ask too much, send no end, do not read or go away: others are served meanwhile."""

import concurrent.futures
import contextlib
import json
import socket
import threading
import time

import httpx
import openai
import prometheus_client.parser
import pytest
from serving_double import (
    EOS,
    HTTP,
    Scripted,
    answers,
    byte_tokenizer,
    closed,
    connected,
    heard,
    served,
    wait_until,
)

from hjax.data.tokenizer import Tokenizer
from hjax.serving.limits import ServerLimits

LONG = 4000


def endless(request):
    """Draws until the length limit."""
    return b"words " * LONG


def posted(body: bytes, path: str = "/v1/completions") -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def asked(**fields) -> bytes:
    return json.dumps({"prompt": "a"} | fields).encode()


def figures(url: str) -> dict[str, float]:
    """Prometheus' own reading of /metrics: a sum over labels for each name."""
    found: dict[str, float] = {}
    text = HTTP.get(f"{url}/metrics").text
    for family in prometheus_client.parser.text_string_to_metric_families(text):
        for sample in family.samples:
            found[sample.name] = found.get(sample.name, 0) + sample.value
    return found


def test_bodies_that_are_too_large():
    service = Scripted(lambda request: [EOS])
    with served(service, ServerLimits(body_bytes=1000)) as (url, _, _):
        body = asked(prompt=[1] * 300)
        assert len(body) < 1000
        assert HTTP.post(f"{url}/v1/completions", content=body).status_code == 200
        for content in (asked(prompt=[1] * 400), iter([b" " * 600] * 2)):
            answer = HTTP.post(f"{url}/v1/completions", content=content)
            assert answer.status_code == 413
            assert "larger than 1000 bytes" in answer.json()["error"]["message"]
    assert len(service.requests) == 1


def test_a_body_that_does_not_come():
    limits = ServerLimits(body_seconds=0.2, header_seconds=0.2)
    with served(Scripted(endless), limits) as (url, _, _), connected(url) as connection:
        connection.sendall(posted(asked())[:-3])
        assert heard(connection, b"was not there after 0.2 s").startswith(b"HTTP/1.1 408 ")


def test_headers_that_do_not_come():
    sent = [b"", b"GET /health HT", b"GET /health HTTP/1.1\r\nHost: localhost\r\n"]
    with (
        served(Scripted(endless), ServerLimits(header_seconds=0.3)) as (url, _, _),
        contextlib.ExitStack() as stack,
        httpx.Client() as client,
    ):
        began = time.monotonic()
        late = [stack.enter_context(connected(url)) for _ in sent]
        for connection, part in zip(late, sent):
            connection.sendall(part)
        assert all(map(closed, late)) and 0.3 <= time.monotonic() - began < 10
        # A connection that is used keeps being so, and headers of a later request are as urgent.
        for _ in range(2):
            assert client.get(f"{url}/health").json() == {"status": "ok"}
            time.sleep(0.4)
        used = stack.enter_context(connected(url))
        used.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        heard(used, b'"ok"}')
        used.sendall(b"GET")
        assert closed(used)


def test_what_is_not_http():
    with served(Scripted(endless)) as (url, _, _), connected(url) as connection:
        connection.sendall(b"\x16\x03\x01 hello\r\n\r\n")
        said = heard(connection, b"}}")
        assert said.startswith(b"HTTP/1.1 400 ")
        assert json.loads(said.partition(b"\r\n\r\n")[2])["error"]["message"]
        # After a request it is said too, behind that one's answer.
        with connected(url) as used:
            used.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n\0\r\n\r\n")
            assert heard(used, b"}}").count(b"HTTP/1.1 ") == 2 and closed(used)


@pytest.mark.parametrize(
    "path, field", [("completions", "prompt"), ("chat/completions", "messages")]
)
def test_of_a_text_that_is_much_too_long_the_beginning_is_read(path, field, monkeypatch):
    lengths = []
    encode = Tokenizer.encode

    def noted(self, text, *args, **kwargs):
        lengths.append(len(text))
        return encode(self, text, *args, **kwargs)

    monkeypatch.setattr(Tokenizer, "encode", noted)
    text = "a" * 1_000_000
    asks = {"prompt": text, "messages": [{"role": "user", "content": text}]}
    service = Scripted(endless)
    with served(service, tokenizer=byte_tokenizer()) as (url, _, _):
        answer = HTTP.post(f"{url}/v1/{path}", json={field: asks[field]})
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["code"] == "context_length_exceeded"
    assert error["param"] == field and "room for 4096" in error["message"]
    assert not service.requests and max(lengths) == 16 * service.max_tokens


def test_more_connections_than_are_taken():
    with served(Scripted(endless), ServerLimits(connections=2)) as (url, _, _):
        first, second = connected(url), connected(url)
        first.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert heard(first, b'"ok"}').startswith(b"HTTP/1.1 200 ")
        with connected(url) as third:
            said = heard(third, b"}}")
            assert said.startswith(b"HTTP/1.1 503 ") and b"retry-after: 1" in said
        first.close(), second.close()
        wait_until(lambda: answers(url))


def test_a_queue_that_is_full():
    service = Scripted(lambda request: [97, EOS], slots=1, max_queue=2)
    service.gate.clear()
    with (
        served(service, tokenizer=byte_tokenizer()) as (url, _, _),
        concurrent.futures.ThreadPoolExecutor() as pool,
    ):
        ask = lambda **fields: HTTP.post(f"{url}/v1/completions", content=asked(**fields))  # noqa: E731
        waiting = [pool.submit(ask) for _ in range(2)]
        wait_until(lambda: figures(url)["hjax_waiting"] == 1)
        # Of three responses two have no place, and the third is taken back.
        answer = ask(n=3)
        assert answer.status_code == 429 and answer.headers["retry-after"] == "1"
        assert answer.json()["error"]["type"] == "rate_limit_error"
        wait_until(lambda: figures(url)["hjax_waiting"] == 1)
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=3)
        late = pool.submit(client.completions.create, model="bytes", prompt="a", n=2)
        refused = 'hjax_requests_total{path="/v1/completions",status="429"} 2.0'
        wait_until(lambda: refused in HTTP.get(f"{url}/metrics").text)
        service.gate.set()
        assert all(each.result().status_code == 200 for each in waiting)
        assert len(late.result().choices) == 2  # OpenAI's client comes again by itself
        client.close()


def test_keys():
    service = Scripted(lambda request: [EOS])
    with served(service, key="sécret") as (url, _, _):

        def status(path: str, key: str | None) -> int:
            headers = {} if key is None else {"Authorization": key.encode()}
            if path != "/v1/completions":
                return HTTP.get(url + path, headers=headers).status_code
            answer = HTTP.post(url + path, content=asked(prompt=[1]), headers=headers)
            if answer.status_code == 401:
                assert answer.json()["error"]["code"] == "invalid_api_key"
            return answer.status_code

        wrong = [None, "", "Bearer", "Bearer wrong", "Bearer sécret2", "Bearer sécre", "sécret",
                 "Basic sécret"]  # fmt: skip
        for path in ("/v1/models", "/metrics", "/nowhere", "/v1/completions"):
            assert {status(path, key) for key in wrong} == {401}
        assert not service.requests
        right = "Bearer sécret"
        assert [status(p, right) for p in ("/v1/models", "/nowhere")] == [200, 404]
        assert status("/v1/completions", right) == 200 and status("/health", None) == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_ends_its_responses(stream):
    service = Scripted(endless, piece=1, pause=0.01)
    with served(service, tokenizer=byte_tokenizer()) as (url, _, _):
        with connected(url) as connection:
            connection.sendall(posted(asked(stream=stream, n=3, max_tokens=LONG)))
            wait_until(lambda: service.drawn > 10)
            assert not service.cancelled
        wait_until(lambda: len(service.cancelled) == 3)
        wait_until(lambda: figures(url)["hjax_running"] == 0)
        assert service.drawn < 3 * LONG


@pytest.mark.extended
def test_a_client_that_does_not_read_is_cut_off_and_hinders_nobody():
    service = Scripted(endless, piece=1, pause=0.0005)
    limits = ServerLimits(idle_seconds=1.0)
    with served(service, limits, tokenizer=byte_tokenizer(), send_buffer=4096) as (url, _, _):
        with connected(url) as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            fields = {"stream": True, "n": 8, "max_tokens": LONG, "logprobs": 1}
            connection.sendall(posted(asked(**fields)))
            wait_until(lambda: service.drawn > 100)
            for _ in range(5):
                answer = HTTP.post(f"{url}/v1/completions", content=asked(max_tokens=3))
                assert answer.json()["choices"][0]["text"] == "wor"
            wait_until(lambda: len(service.cancelled) == 8)
            wait_until(lambda: figures(url)["hjax_running"] == 0)
        assert service.drawn < 8 * LONG


def test_many_clients():
    service = Scripted(lambda request: [*request.prompt, EOS], pause=0.002)
    with (
        served(service, tokenizer=byte_tokenizer()) as (url, _, _),
        httpx.Client(limits=httpx.Limits(max_connections=None)) as client,
        concurrent.futures.ThreadPoolExecutor(50) as pool,
    ):

        def said(i: int) -> str:
            body = asked(prompt=f"client {i}", stream=bool(i % 2))
            answer = client.post(f"{url}/v1/completions", content=body, timeout=60)
            if i % 2 == 0:
                return answer.json()["choices"][0]["text"]
            events = answer.text.split("\n\n")[:-2]
            chunks = [json.loads(event.removeprefix("data: ")) for event in events]
            return "".join(chunk["choices"][0]["text"] for chunk in chunks)

        found = list(pool.map(said, range(200)))
        assert found == [f"client {i}" for i in range(200)]


def test_figures_for_prometheus():
    service = Scripted(lambda request: [97, 98, EOS], slots=5)
    with served(service, tokenizer=byte_tokenizer()) as (url, _, _):
        for _ in range(2):
            HTTP.post(f"{url}/v1/completions", content=asked(prompt="abcd"))
        HTTP.post(f"{url}/v1/completions", content=b"x")
        found = figures(url)
        assert found["hjax_requests_total"] == 3
        assert found["hjax_first_token_seconds_count"] == 2
        assert found["hjax_prompt_tokens_total"] == 8 and found["hjax_generated_tokens_total"] == 6
        assert (found["hjax_slots"], found["hjax_waiting"]) == (5, 0)
        # A row ends just after its answer has gone out.
        wait_until(lambda: figures(url)["hjax_running"] == 0)
        text = HTTP.get(f"{url}/metrics").text
        assert 'hjax_requests_total{path="/v1/completions",status="400"} 1.0' in text


def test_a_server_that_is_stopped_answers_what_runs_and_refuses_what_comes():
    service = Scripted(lambda request: [97] * 20 + [EOS], pause=0.05)
    with (
        served(service, tokenizer=byte_tokenizer()) as (url, server, loop),
        httpx.Client() as client,
    ):
        with client.stream("POST", f"{url}/v1/completions", content=asked(stream=True)) as answer:
            lines = answer.iter_lines()
            next(lines)
            with connected(url) as idle, concurrent.futures.ThreadPoolExecutor() as pool:
                body = pool.submit(HTTP.post, f"{url}/v1/completions", content=slowly(loop, server))
                rest = "".join(lines)
                assert closed(idle)
            assert '"finish_reason": "length"' in rest and rest.endswith("[DONE]")
            late = body.result()
            assert late.status_code == 503 and late.headers["retry-after"] == "10"
        wait_until(lambda: not answers(url))


def slowly(loop, server):
    """A body between whose halves the server is stopped."""
    text = asked()
    yield text[:5]
    # The one that is answered and this one: before its head is read a connection is an idle one.
    wait_until(lambda: len(server._uvicorn.server_state.tasks) == 2)
    loop.call_soon_threadsafe(server.stop)
    time.sleep(0.2)
    yield text[5:]


class Stuck(Scripted):
    """An engine that does not hear of its end: it compiles."""

    free = threading.Event()

    def close(self, seconds):
        self.free.wait(20)


@pytest.mark.parametrize("engine", [Scripted, Stuck])
def test_what_runs_too_long_is_told_so_when_the_server_stops(engine):
    service = engine(endless, piece=1, pause=0.01)
    limits = ServerLimits(drain_seconds=0.3)
    with served(service, limits, tokenizer=byte_tokenizer()) as (url, server, loop):
        with concurrent.futures.ThreadPoolExecutor() as pool:
            ask = [
                pool.submit(
                    HTTP.post,
                    f"{url}/v1/completions",
                    content=asked(stream=stream, max_tokens=LONG),
                )
                for stream in (False, True)
            ]
            wait_until(lambda: service.stats()["running"] == 2)
            loop.call_soon_threadsafe(server.stop)
            whole, stream = (each.result() for each in ask)
            Stuck.free.set()
    assert whole.status_code == 503 and "being stopped" in whole.json()["error"]["message"]
    events = stream.text.split("\n\n")
    assert "being stopped" in json.loads(events[-3].removeprefix("data: "))["error"]["message"]
