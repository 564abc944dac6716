"""Requests made to cost much or to be read in two ways, and other sites' pages: each is refused
with its reason before anything is made of it, and the server answers others as before."""

import asyncio
import concurrent.futures
import contextlib
import json
import re
import socket
import time

import pytest
from serving_double import EOS, HTTP, Scripted, byte_tokenizer, closed, connected, heard, served

from hjax.data.tool_call_forms import TAGGED, read_calls
from hjax.rollout.requests import ResponseChunk
from hjax.serving.cross_site import CrossSiteCheck
from hjax.serving.limits import ServerLimits
from hjax.serving.request_errors import RequestRefused
from hjax.serving.request_models import parse_completion
from hjax.serving.served_model import ServedModel
from hjax.serving.streaming import RequestWatch, RunningRequest

BODY = b'{"prompt": "a"}'
LENGTH = b"Content-Length: %d" % len(BODY)
CHUNKED = b"Transfer-Encoding: chunked"
CHUNKS = b"f\r\n%s\r\n0\r\n\r\n" % BODY


@pytest.fixture(scope="module")
def url():
    service = Scripted(lambda request: [97, EOS])
    limits = ServerLimits(hosts=("models.example",), origins=("https://page.example",))
    with served(service, limits, tokenizer=byte_tokenizer(), reload=reload) as (url, _, _):
        yield url


def reload(seconds):
    return {"reloaded": True}


def sent(*headers, body=BODY, first=b"POST /v1/completions HTTP/1.1", host=b"Host: localhost"):
    return b"\r\n".join([first, *filter(None, [host]), *headers, b"", body])


def test_values_of_a_body_are_counted_before_they_are_made(url):
    """At most 65,536 arrays, objects and strings, 524,288 values; not those within strings."""
    many = {
        "prompts": b'{"prompt": [%s]}' % b",".join([b'"a"'] * 2_000_000),
        "empty prompts": b'{"prompt": [%s]}' % b",".join([b"[9]"] * 2_000_000),
        "messages": b'{"messages": [%s]}' % b",".join([b'{"role":"user"}'] * 30_000),
        "stops": b'{"prompt": "a", "stop": [%s]}' % b",".join([b'"a"'] * 65_600),
        "keys": b"{%s}" % b",".join(b'"%d": 0' % i for i in range(70_000)),
        "tools": b'{"tools": [%s]}' % b",".join([b"{}"] * 70_000),
        "numbers": b'{"prompt": [%s]}' % b",".join([b"7"] * 530_000),
        "escaped": b'{"prompt": [%s]}' % b",".join([rb'"\\"'] * 65_600),
        "cut": b'{"prompt": [%s' % b",".join([b'"a"'] * 65_600),
    }
    for name, body in many.items():
        began = time.monotonic()
        answer = HTTP.post(f"{url}/v1/completions", content=body)
        said = answer.json()["error"]["message"]
        assert answer.status_code == 413 and time.monotonic() - began < 5, (name, said)
        kind = "values: at most 524288" if name == "numbers" else "strings: at most 65536"
        assert re.match(rf"the body has \d+ .*{kind}$", said), (name, said)


@pytest.mark.parametrize("text", ['[{",' * 100_000, '"' * 70_000, "\\" * 70_001, '\\"[' * 70_000])
def test_what_stands_in_a_string_is_not_counted(url, text):
    answer = HTTP.post(f"{url}/v1/completions", json={"prompt": ["a"], "stop": ["b"], "user": text})
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    "body", ['{"prompt": "a", "prompt": "b"}', '{"prompt": "a", "logit_bias": {"97": 1, "97": 2}}']
)
def test_a_key_that_comes_twice_is_refused(url, body):
    answer = HTTP.post(f"{url}/v1/completions", content=body)
    assert answer.status_code == 400 and "a key comes twice" in answer.text


def test_prompts_are_counted_before_one_of_them_is_encoded(monkeypatch):
    tokenizer = byte_tokenizer()

    def refuse(*_, **__):
        raise AssertionError("it was encoded")

    monkeypatch.setattr(tokenizer, "encode", refuse)
    with served(Scripted(lambda request: [EOS]), tokenizer=tokenizer) as (url, _, _):
        for fields in ({"prompt": ["a"] * 129}, {"prompt": ["a"] * 65, "n": 2}):
            answer = HTTP.post(f"{url}/v1/completions", json=fields)
            assert answer.status_code == 400
            assert "at most 128 responses" in answer.json()["error"]["message"]


def test_large_bodies_wait_for_one_another_and_small_ones_do_not():
    """Sixteen are received at a time; what a seventeenth sends is not read meanwhile."""
    limits = ServerLimits(body_seconds=1.5, header_seconds=30)
    service = Scripted(lambda request: [97, EOS])
    large = b" " * 500_000 + BODY
    head = sent(b"Content-Length: %d" % len(large), body=b"")
    with served(service, limits, tokenizer=byte_tokenizer()) as (url, _, _):
        with contextlib.ExitStack() as stack:
            late, *slow = [stack.enter_context(connected(url)) for _ in range(17)]
            late.sendall(head)
            time.sleep(0.5)
            for connection in slow:
                connection.sendall(head + large[:100_000])
            time.sleep(0.3)
            late.sendall(large[:100_000])
            assert HTTP.post(f"{url}/v1/completions", content=BODY).status_code == 200
            said = heard(late, b"}}")
            assert said.startswith(b"HTTP/1.1 503 ") and b"16 large bodies" in said
            assert b"retry-after: 1" in said
            for connection in slow:
                assert heard(connection, b"}}").startswith(b"HTTP/1.1 408 ")
        assert HTTP.post(f"{url}/v1/completions", content=large).status_code == 200


@pytest.mark.parametrize(
    "fields",
    [{"model": "m" * 1_000_000}, {"u" * 1_000_000: 1}, {"stop_token_ids": ["x" * 1_000_000]},
     {"prompt": [[["x" * 1_000_000]]]}, {"temperature": "t" * 1_000_000}, {"n": 10**4000}],
)  # fmt: skip
def test_what_a_client_sends_is_not_sent_back_whole(url, fields):
    answer = HTTP.post(f"{url}/v1/completions", json={"prompt": "a"} | fields)
    error = answer.json()["error"]
    assert answer.status_code in (400, 404) and len(answer.content) < 2500, answer.status_code
    assert len(error["message"]) > 60 and [*error] == ["message", "type", "param", "code"]


@pytest.mark.parametrize(
    "path, fields, allowed",
    [("chat/completions", {"logprobs": True, "top_logprobs": 20, "n": 50}, False),
     ("chat/completions", {"logprobs": True, "top_logprobs": 20, "n": 49}, True),
     ("completions", {"logprobs": 5, "n": 128, "max_tokens": 4000}, True)],
)  # fmt: skip
def test_log_probs_of_an_answer_are_counted_before_they_are_drawn(url, path, fields, allowed):
    """4,194,304 at most. Of 4096 tokens the prompt has 20, so 49 responses have 4076 * 49 * 21."""
    chat = {"messages": [{"role": "user", "content": "a"}]}
    answer = HTTP.post(
        f"{url}/v1/{path}", json=(chat if "chat" in path else {"prompt": "a"}) | fields
    )
    if allowed:
        assert answer.status_code == 200, answer.text
        return
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == "logprobs", error
    assert "at most 4194304; give a smaller max_tokens or n" in error["message"]


def test_an_engine_that_is_faster_than_its_client_leaves_the_others_their_turns():
    """All of an answer waits in memory; between its pieces another task has as many turns."""
    pieces, turns = 200, 0

    class Ready(Scripted):
        def submit(self, request, on_piece, matcher=None):
            for i in range(pieces):
                on_piece(ResponseChunk((97,), (-1.0,), finish="length" if i == pieces - 1 else ""))

    async def take():
        nonlocal turns
        served_model = ServedModel("ready", Ready(None), byte_tokenizer(), 260, (EOS,))
        parsed = parse_completion(
            {"prompt": "a", "max_tokens": pieces}, served_model, ServerLimits()
        )
        running = RunningRequest(served_model, parsed, RequestWatch(lambda _: None, print))
        await asyncio.sleep(0)  # the pieces arrive

        async def other():
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        task = asyncio.ensure_future(other())
        text = "".join([delta.text async for _, delta in running.deltas()])
        task.cancel()
        return text

    assert asyncio.run(take()) == "a" * pieces and turns >= pieces


@pytest.mark.parametrize(
    "text",
    ["<tool_call>" + " " * 50_000, "<tool_call>{" + "\n" * 50_000,
     " " * 50_000 + "<tool_call>",
     "<tool_call>" * 20_000, "</tool_call>" * 20_000, "<tool_call>" + "{" * 50_000],
)  # fmt: skip
def test_a_text_that_is_no_call_after_all_is_read_once(text):
    """Its length may not count twice: the text of an answer is a model's."""
    began = time.monotonic()
    assert read_calls(text, TAGGED, ("f",), {}) == ()
    assert time.monotonic() - began < 1


def test_a_functions_name_is_short(url):
    tool = {"type": "function", "function": {"name": "f" * 257}}
    chat = {"messages": [{"role": "user", "content": "a"}], "tools": [tool]}
    error = HTTP.post(f"{url}/v1/chat/completions", json=chat).json()["error"]
    assert error["param"] == "tools[0].function.name" and "256 characters" in error["message"]


REFUSED = {
    "length beside chunks": (400, sent(LENGTH, CHUNKED, body=CHUNKS)),
    "chunks beside length": (400, sent(CHUNKED, b"Content-Length: 0", body=CHUNKS)),
    "two lengths": (400, sent(LENGTH, b"Content-Length: 3")),
    "a list of lengths": (400, sent(LENGTH + b", 3")),
    "a length with a plus": (400, sent(b"Content-Length: +15")),
    "a negative length": (400, sent(b"Content-Length: -15")),
    "a hexadecimal length": (400, sent(b"Content-Length: 0xf")),
    "a length with a space": (400, sent(b"Content-Length: 1 5")),
    "a length with an underscore": (400, sent(b"Content-Length: 1_5")),
    "a length of other digits": (400, sent("Content-Length: １５".encode())),
    "a length of 5000 digits": (400, sent(b"Content-Length: " + b"9" * 5000)),
    "an empty length": (400, sent(b"Content-Length: ")),
    "a space before the colon": (400, sent(b"Content-Length : 15")),
    "gzip and chunked": (501, sent(b"Transfer-Encoding: gzip, chunked", body=CHUNKS)),
    "chunked and gzip": (501, sent(b"Transfer-Encoding: chunked, gzip", body=CHUNKS)),
    "chunked twice": (501, sent(b"Transfer-Encoding: chunked, chunked", body=CHUNKS)),
    "two codings": (501, sent(CHUNKED, CHUNKED, body=CHUNKS)),
    "an unknown coding": (501, sent(b"Transfer-Encoding: xchunked", body=CHUNKS)),
    "identity": (501, sent(b"Transfer-Encoding: identity", body=CHUNKS)),
    "a control character": (400, sent(b"Transfer-Encoding: \x0bchunked", body=CHUNKS)),
    "a folded coding": (400, sent(b"Transfer-Encoding:\r\n chunked", body=CHUNKS)),
    "a folded header": (400, sent(LENGTH, b"X: a\r\n\tb")),
    "a bare line feed": (400, sent(LENGTH + b"\nX: y")),
    "line feeds alone": (400, sent(LENGTH).replace(b"\r\n", b"\n")),
    "a bare carriage return": (400, sent(LENGTH + b"\rX: y")),
    "a zero byte": (400, sent(LENGTH, b"X: a\0b")),
    "no colon": (400, sent(LENGTH, b"bad")),
    "two hosts": (400, sent(b"Host: localhost", LENGTH)),
    "no host": (400, sent(LENGTH, host=b"")),
    "an empty line first": (400, b"\r\n" + sent(LENGTH)),
    "HTTP/2.0": (505, sent(LENGTH, first=b"POST /v1/completions HTTP/2.0")),
    "HTTP/2's first words": (505, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"),
    "HTTP/0.9": (400, b"GET /health\r\n\r\n"),
    "a chunk's size with a plus": (400, sent(CHUNKED, body=b"+f\r\n%s\r\n0\r\n\r\n" % BODY)),
    "a chunk's size with 0x": (400, sent(CHUNKED, body=b"0xf\r\n%s\r\n0\r\n\r\n" % BODY)),
    "a chunk's size and a line feed": (400, sent(CHUNKED, body=b"f\n%s\r\n0\r\n\r\n" % BODY)),
    "a chunk's end": (400, sent(CHUNKED, body=b"f\r\n%sxx0\r\n\r\n" % BODY)),
    "a bad trailer": (400, sent(CHUNKED, body=b"f\r\n%s\r\n0\r\nbad\r\n\r\n" % BODY)),
    "an endless trailer": (431, sent(CHUNKED, body=CHUNKS[:-2] + b"X: " + b"y" * 400_000)),
    "large headers": (431, sent(LENGTH, b"X: " + b"y" * 20_000)),
    "many headers": (431, sent(LENGTH, *[b"a: b"] * 5000)),
    "many small chunks": (413, sent(CHUNKED, body=b"1\r\n \r\n" * 16_385 + CHUNKS)),
    "many extended chunks": (413, sent(CHUNKED, body=b"1;a=b\r\n \r\n" * 16_385 + CHUNKS)),
}  # fmt: skip


@pytest.mark.parametrize("attack", REFUSED)
def test_http_that_could_be_read_in_two_ways_closes_the_connection(url, attack):
    status, data = REFUSED[attack]
    with connected(url) as connection:
        try:
            connection.sendall(data + b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n")
        except ConnectionError:
            pass  # it is closed already; the answer is there
        said = b""
        while part := received(connection):
            said += part
    assert said.count(b"HTTP/1.1 ") == 1, said
    assert said.startswith(b"HTTP/1.1 %d " % status) and b"connection: close" in said, said
    assert json.loads(said.partition(b"\r\n\r\n")[2])["error"]["message"].startswith("HTTP: ")


def received(connection):
    try:
        return connection.recv(65536)
    except ConnectionResetError:
        return b""


ALLOWED = {
    "a length": sent(LENGTH),
    "the same length twice": sent(LENGTH, LENGTH),
    "chunks": sent(CHUNKED, body=CHUNKS),
    "chunks in capitals": sent(CHUNKED.upper(), body=CHUNKS),
    "a chunk with an extension": sent(CHUNKED, body=CHUNKS.replace(b"f\r", b"f;a=b\r")),
    "a trailer": sent(CHUNKED, body=CHUNKS[:-2] + b"Content-Length: 99\r\n\r\n"),
    "ten thousand chunks": sent(CHUNKED, body=b"1\r\n \r\n" * 10_000 + CHUNKS),
}


@pytest.mark.parametrize("way", ALLOWED)
def test_a_connection_goes_on_after_http_that_is_clear(url, way):
    with connected(url) as connection:
        connection.sendall(ALLOWED[way] + b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n")
        said = heard(connection, b'{"version"')
        assert said.count(b"HTTP/1.1 200 ") == 2, said


def test_http_10_needs_no_host(url):
    with connected(url) as connection:
        connection.sendall(b"GET /version HTTP/1.0\r\n\r\n")
        assert heard(connection, b'{"version"').startswith(b"HTTP/1.1 200 ") and closed(connection)


RELOAD, ASK, MODELS = ("POST", "/admin/reload"), ("POST", "/v1/completions"), ("GET", "/v1/models")
FORM = {"Content-Type": "application/x-www-form-urlencoded"}  # as curl -d sends it
TEXT = {"Content-Type": "text/plain"}  # as a page may send it without asking first


@pytest.mark.parametrize("request_line", [RELOAD, ASK, MODELS])
@pytest.mark.parametrize(
    "host",
    ["127.0.0.1", "127.0.0.1:{port}", "localhost:{port}", "LOCALHOST", "[::1]:9", "localhost.",
     "127.3.2.1", "a.localhost", "models.example:99", "Models.Example"],
)  # fmt: skip
def test_names_of_a_server(url, request_line, host):
    assert asked(url, request_line, {"Host": host.format(port=url.rpartition(":")[2])} | FORM) == ""


@pytest.mark.parametrize("request_line", [RELOAD, ASK, MODELS])
@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:{port}", "localhost.evil.example", "127.0.0.1.evil.example",
     "evil.example@localhost", "localhost:1@evil.example", "10.0.0.1", "0.0.0.0", "[::]", "[",
     "a b", "2130706433", "notmodels.example"],
)  # fmt: skip
def test_names_that_resolve_to_a_server_but_are_not_its_own(url, request_line, host):
    host = host.format(port=url.rpartition(":")[2])
    said = asked(url, request_line, {"Host": host, "Sec-Fetch-Site": "same-origin"} | TEXT)
    assert said.startswith(f"Host: {host} is no name of this server; start it with --allowed_hosts")
    assert "--api_key_env" in said
    assert HTTP.get(f"{url}/health", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize("request_line", [RELOAD, ASK])
@pytest.mark.parametrize(
    "headers",
    [{"Origin": "https://evil.example"}, {"Origin": "null"}, {"Origin": "https://page.example.evil"},
     {"Origin": "http://page.example"}, {"Origin": "http://localhost:1"}, {"Origin": ""},
     {"Origin": "file://"}, {"Origin": "http://[", "Sec-Fetch-Site": "same-site"},
     {"Sec-Fetch-Site": "cross-site"}, {"Sec-Fetch-Site": "same-site"},
     {"Origin": "https://evil.example", "Sec-Fetch-Site": "cross-site"}],
)  # fmt: skip
@pytest.mark.parametrize("kind", [TEXT, FORM, {"Content-Type": "application/json"}, {}])
def test_a_foreign_page_changes_nothing(url, request_line, headers, kind):
    said = asked(url, request_line, headers | kind)
    assert "is another site; start the server with --cors=ORIGIN or --api_key_env=NAME" in said
    assert asked(url, MODELS, headers) == ""  # whose answer the browser keeps from it


@pytest.mark.parametrize("request_line", [RELOAD, ASK])
@pytest.mark.parametrize(
    "headers",
    [{}, {"Origin": "https://page.example"}, {"Origin": "{url}"},
     {"Origin": "https://page.example", "Sec-Fetch-Site": "cross-site"},
     {"Origin": "https://behind.a.proxy", "Sec-Fetch-Site": "same-origin"},
     {"Sec-Fetch-Site": "none"}],
)  # fmt: skip
@pytest.mark.parametrize("kind", [TEXT, FORM, {"Content-Type": "application/json"}, {}])
def test_command_lines_libraries_and_own_pages_may_ask(url, request_line, headers, kind):
    headers = {name: value.format(url=url) for name, value in headers.items()}
    assert asked(url, request_line, headers | kind) == ""


def asked(url, request_line, headers):
    """The reason for which it is forbidden; "" if it is answered."""
    method, path = request_line
    content = b"{}" if path == "/admin/reload" else BODY
    content = content if method == "POST" else None
    answer = HTTP.request(method, url + path, content=content, headers=headers)
    if answer.status_code == 200:
        return ""
    error = answer.json()["error"]
    assert answer.status_code == 403, error
    assert (
        error["code"] in ("host_not_allowed", "origin_not_allowed") and "\n" not in error["message"]
    )
    return error["message"]


SCHEMA, GRAMMAR, REGEX = (f"guided_{kind}" for kind in ("json", "grammar", "regex"))
RULES = "\n".join(f'r{i}: "a" r{i + 1} | "b"' for i in range(4000))
FIELDS_400 = {f"p{i}": {"type": "string"} for i in range(400)}
PATTERNS = [{"type": "string", "pattern": f".*{i}.*"} for i in range(300)]
# A field, its value, what it is refused for, further fields.
COSTLY = {
    "text of 5 MB": (REGEX, "a" * 5_000_000, "5000000 characters: at most 131072", {}),
    "schema of 5 MB": (SCHEMA, {"enum": ["b" * 5_000_000]}, "characters: at most 131072", {}),
    "rules that nest 4000 deep": (GRAMMAR, f"start: r0\n{RULES}\nr4000: \"c\"", "too deeply", {}),
    "schemas that nest deep": (SCHEMA, {"x": json.loads('{"x":' * 500 + "1" + "}" * 500)},
                               "recursion limit", {}),
    "300 patterns at once": (SCHEMA, {"allOf": PATTERNS}, "takes more than (0.8 s|64 MiB)", {}),
    "a multiple of 1000003": (SCHEMA, {"type": "integer", "multipleOf": 1000003}, "takes more", {}),
    "patterns and not others": (GRAMMAR, "start: T\nT: /.*a.{12}/ & /.*b.{11}/ & ~/.*c.{13}.*/",
                                "takes more than (0.8 s|64 MiB)", {}),
    "a schema for each response": (SCHEMA, {"type": "object", "properties": FIELDS_400},
                                   "for each of 128 responses: at most", {"n": 128}),
    "parentheses": (REGEX, "(" * 20_000 + "a" + ")" * 20_000, "nested parentheses", {}),
}  # fmt: skip


@pytest.fixture(scope="module")
def constrained():
    """Its limits are low, as each costs as much time as it may."""
    pytest.importorskip("llguidance")
    service = Scripted(lambda request: [97, EOS])
    limits = ServerLimits(constraint_seconds=0.8, constraint_bytes=2**26)
    with served(service, limits, tokenizer=byte_tokenizer()) as (url, _, _):
        yield url


@pytest.mark.parametrize("name", COSTLY)
def test_constraints_that_cost_much_are_refused_by_name(constrained, name):
    field, value, why, more = COSTLY[name]
    began = time.monotonic()
    answer = HTTP.post(f"{constrained}/v1/completions", json={"prompt": "a", field: value} | more)
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == field, error
    assert re.search(why, error["message"]) and "\n" not in error["message"], error
    assert time.monotonic() - began < 20
    # The server is there, and takes others.
    answer = HTTP.post(f"{constrained}/v1/completions", json={"prompt": "a", REGEX: "a"})
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    "field, value",
    [(REGEX, "a{1,100000}"), (REGEX, "((a{1,100}){1,100}){1,100}"), (REGEX, ".*a?.{2000}|a"),
     (SCHEMA, {"type": "array", "minItems": 100_000}),
     (GRAMMAR, "start: s\ns: s s s | s s | /a/ |"),
     ("guided_choice", ["a", *(f"{i:05d}" for i in range(10_000))])],
)  # fmt: skip
def test_constraints_that_only_look_costly_are_taken(constrained, field, value):
    answer = HTTP.post(f"{constrained}/v1/completions", json={"prompt": "a", field: value})
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    "field, value",
    [(SCHEMA, {"$ref": "{address}/x.json"}), (SCHEMA, {"$schema": "{address}/x", "type": "string"}),
     (SCHEMA, {"$id": "{address}/x", "$ref": "y"}), (SCHEMA, {"$ref": "file:///etc/hostname"}),
     (GRAMMAR, 'start: %json {{"$ref": "{address}/x"}}'),
     (GRAMMAR, "%import /etc/hostname\nstart: X"),
     (SCHEMA, {"$ref": "#"}), (GRAMMAR, 'start: a\na: b*\nb: a* | ""')],
)  # fmt: skip
def test_nothing_that_a_constraint_names_is_fetched(constrained, field, value):
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
        if isinstance(value, dict):
            value = {key: each.format(address=address) for key, each in value.items()}
        else:
            value = value.format(address=address) if "{{" in value else value
        answer = HTTP.post(f"{constrained}/v1/completions", json={"prompt": "a", field: value})
        server.settimeout(0.05)
        with pytest.raises(TimeoutError):
            server.accept()
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == field, error


@pytest.mark.extended
def test_what_a_constraint_costs_others(constrained, monkeypatch):
    """Requests without one, and with one that is known, are answered while another is tried."""
    known, unknown = {"prompt": "a", REGEX: "[ab]"}, {"prompt": "a", REGEX: "[abc]"}
    url = f"{constrained}/v1/completions"
    assert HTTP.post(url, json=known).status_code == 200
    costly = {"prompt": "a", SCHEMA: {"type": "integer", "multipleOf": 1000033}}
    with concurrent.futures.ThreadPoolExecutor() as pool:
        late = [pool.submit(HTTP.post, url, json=costly | {"seed": seed}) for seed in range(2)]
        time.sleep(0.1)
        began = time.monotonic()
        for fields in (known, {"prompt": "a"}):
            assert HTTP.post(url, json=fields).status_code == 200
        quick, slow = time.monotonic() - began, pool.submit(HTTP.post, url, json=unknown)
        assert [each.result().status_code for each in late] == [400] * 2
        assert slow.result().status_code == 200
    assert quick < time.monotonic() - began


def test_a_server_with_a_key_asks_for_that_alone():
    """A proxy passes on names and origins of its own; no other site's page knows the key."""
    service = Scripted(lambda request: [97, EOS])
    headers = {"Host": "public.example", "Origin": "https://ui.example"}
    with served(service, key="k", tokenizer=byte_tokenizer(), reload=reload) as (url, _, _):
        for path in ("/v1/completions", "/admin/reload"):
            content = b"" if path == "/admin/reload" else BODY
            key = {"Authorization": "Bearer k"}
            assert HTTP.post(url + path, content=content, headers=headers | key).status_code == 200
            assert HTTP.post(url + path, content=content, headers=headers).status_code == 401


def test_all_pages_may_ask_but_not_reload():
    service = Scripted(lambda request: [97, EOS])
    limits = ServerLimits(origins=("*",), hosts=("*",))
    with served(service, limits, tokenizer=byte_tokenizer(), reload=reload) as (url, _, _):
        headers = {"Host": "any.example", "Origin": "https://any.page"}
        assert asked(url, ASK, headers) == ""
        assert "https://any.page is another site" in asked(url, RELOAD, headers)
        assert asked(url, RELOAD, {"Host": "any.example"}) == ""


@pytest.mark.parametrize(
    "address, host, admin",
    [("0.0.0.0", "public.example", False), ("0.0.0.0", "10.1.2.3:80", True),
     ("0.0.0.0", "localhost", True), ("::", "[fd00::1]", True), ("::", "10.1.2.3", True),
     ("10.1.2.3", "10.1.2.3", True), ("10.1.2.3", "10.1.2.4", False),
     ("fe80::1%eth0", "[fe80::1]", True)],
)  # fmt: skip
def test_a_server_on_other_addresses_is_called_by_any_name_but_not_to_reload(address, host, admin):
    check = CrossSiteCheck(address, ServerLimits()).check
    scope = {"type": "http", "method": "POST", "headers": [(b"host", host.encode())]}
    check(scope | {"path": "/v1/completions"})
    if admin:
        return check(scope | {"path": "/admin/reload"})
    with pytest.raises(RequestRefused, match="no name of this server"):
        check(scope | {"path": "/admin/reload"})
