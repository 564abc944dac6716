"""`--protocol=jetstream`: the real google-jetstream, a real gRPC client."""

import asyncio
import concurrent.futures
import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
import time

import pytest
from helpers import save_model

import hjax
from hjax.data.tokenizer import Tokenizer

pytestmark = [
    pytest.mark.jetstream,
    pytest.mark.skipif(
        importlib.util.find_spec("jetstream") is None,
        reason="google-jetstream is not installed: pip install 'hjax[jetstream]' in an "
        "environment of its own",
    ),
]
KEY = {"HJAX_TEST_KEY": "sesame"}
BEARER = (("authorization", "Bearer sesame"),)
LENGTH = 128
TOKENIZER = Tokenizer.characters("0123456789+=abcdefgh")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("jetstream") / "model"
    save_model(path, tokenizer=TOKENIZER, vocab_size=23, max_length=LENGTH, layers=2)
    return path


@pytest.fixture(scope="module")
def answers(model):
    return greedy(model)


def greedy(model):
    """Greedy answers of the model itself, without its end token."""
    loaded = hjax.load_model(model)

    def of(prompt, count):
        [drawn] = loaded.generate([prompt], count, temperature=0)
        tokens = drawn.tokens
        return tokens[:-1] if drawn.finish_reason == "stop" else tokens

    return of


@contextlib.contextmanager
def serving(model, *flags):
    process = subprocess.Popen(
        [sys.executable, "-m", "hjax.launch.serve", f"--model={model}", "--protocol=jetstream",
         "--port=0", "--nowarm_up", *flags],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | KEY,
    )  # fmt: skip
    try:
        line = process.stdout.readline()
        start, _, url = line.rstrip("\n").rpartition(" on ")
        assert start == f"serving {model}" and url.startswith("grpc://127.0.0.1:"), (
            line + process.stderr.read()
        )
        yield url.removeprefix("grpc://"), process
    finally:
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def address(model):
    with serving(model, "--slots=4", "--api_key_env=HJAX_TEST_KEY") as (address, process):
        yield address
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=20)
        assert (process.returncode, out, err) == (0, "", "")


def request_of(prompt, max_tokens, **fields):
    from jetstream.core.proto import jetstream_pb2

    request = jetstream_pb2.DecodeRequest
    if isinstance(prompt, str):
        content = {"text_content": request.TextContent(text=prompt)}
    else:
        content = {"token_content": request.TokenContent(token_ids=prompt)}
    return request(max_tokens=max_tokens, **content, **fields)


def ask(address, prompt, max_tokens, metadata=BEARER, **fields):
    """Each response's token ids and text."""
    import grpc
    from jetstream.core.proto import jetstream_pb2_grpc

    with grpc.insecure_channel(address) as channel:
        stub = jetstream_pb2_grpc.OrchestratorStub(channel)
        request = request_of(prompt, max_tokens, **fields)
        for response in stub.Decode(request, metadata=metadata, timeout=300):
            [sample] = response.stream_content.samples
            yield list(sample.token_ids), sample.text


def whole(*arguments, **fields):
    found = list(ask(*arguments, **fields))
    return sum((tokens for tokens, _ in found), []), "".join(text for _, text in found)


def refusal(*arguments, **fields):
    import grpc

    with pytest.raises(grpc.RpcError) as raised:
        whole(*arguments, **fields)
    return raised.value.code().name, raised.value.details()


@pytest.mark.parametrize("prompt", ["1+2=", [1, 4, 13, 5], "a" * 60])
def test_greedy_tokens_are_the_models(address, answers, prompt):
    tokens, text = whole(address, prompt, 40)
    assert tokens == answers(prompt, 40)
    assert bool(text) == isinstance(prompt, str)


def test_an_answer_comes_in_pieces_as_long_as_there_is_room(address, answers):
    prompt = [3, 4]
    pieces = [tokens for tokens, _ in ask(address, prompt, LENGTH - 2)]
    assert sum(pieces, []) == answers(prompt, LENGTH - 2)
    assert max(map(len, pieces)) <= 8


def test_more_clients_than_slots_each_get_their_own(address, answers):
    prompts = [[3 + n, 4, 5 + n % 3] * (1 + n) for n in range(12)]
    counts = [5 + 3 * n for n in range(12)]
    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        found = list(pool.map(lambda p, n: whole(address, p, n)[0], prompts, counts))
    assert found == [answers(p, n) for p, n in zip(prompts, counts)]


def test_the_last_of_many_short_ones_never_ends_the_server(address, answers):
    assert all(whole(address, [5], 1)[0] == answers([5], 1) for _ in range(60))


@pytest.mark.parametrize(
    "prompt, count, why",
    [
        ([4] * 100, 29, "a prompt of 100 and max_tokens=29 exceed the 128 tokens"),
        ("?", 3, "the character '?'"),
        ([23], 3, "token 23 is outside the vocabulary, 0 to 22"),
        ([], 3, "the prompt is empty"),
        ([4], 0, "max_tokens=0"),
    ],
)
def test_what_cannot_be_answered_is_refused_and_others_are_answered(address, prompt, count, why):
    code, details = refusal(address, prompt, count)
    assert code == "INVALID_ARGUMENT" and why in details
    assert whole(address, [4], 2)[0] is not None


def test_sessions_are_refused(address):
    assert "session_cache" in refusal(address, [4], 2, session_cache="a")[1]


@pytest.mark.parametrize("metadata", [(), (("authorization", "Bearer other"),)])
def test_without_the_key_nothing_is_answered(address, metadata):
    assert refusal(address, [4], 2, metadata=metadata)[0] == "UNAUTHENTICATED"


def test_health_needs_no_key(address):
    import grpc
    from jetstream.core.proto import jetstream_pb2, jetstream_pb2_grpc

    with grpc.insecure_channel(address) as channel:
        stub = jetstream_pb2_grpc.OrchestratorStub(channel)
        assert stub.HealthCheck(jetstream_pb2.HealthCheckRequest(), timeout=20).is_live


def test_a_client_that_goes_away_gives_its_slot_back(address, answers):
    for _ in range(8):
        stream = ask(address, [3, 4], LENGTH - 2)
        next(stream)
        stream.close()
    assert whole(address, [6, 7], 4)[0] == answers([6, 7], 4)


def test_sampling_by_seed_and_sigterm(model):
    """The n-th request is the n-th prompt of ``generate``; a port that is taken; the drain."""
    prompts = [[3, 4], [5, 6]]
    expected = hjax.load_model(model).generate(prompts, 9, temperature=1.0, seed=5)
    with serving(model, "--temperature=1", "--seed=5", "--slots=2") as (address, process):
        for prompt, drawn in zip(prompts, expected):
            tokens = drawn.tokens[:-1] if drawn.finish_reason == "stop" else drawn.tokens
            assert whole(address, prompt, 9)[0] == tokens
        again = [sys.executable, "-m", "hjax.launch.serve", f"--model={model}",
                 "--protocol=jetstream", f"--port={address.rpartition(':')[2]}"]  # fmt: skip
        taken = subprocess.run(again, capture_output=True, text=True, timeout=60)
        assert taken.returncode == 2 and "Address already in use" in taken.stderr
        assert taken.stderr.count("\n") == 1 and taken.stdout == ""
        stream = ask(address, [3, 4], LENGTH - 2)
        count = len(next(stream)[0])
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        count += sum(len(tokens) for tokens, _ in stream)
        assert count > 0 and process.wait(20) == 0 and time.monotonic() - began < 15
        assert refusal(address, [4], 2)[0] == "UNAVAILABLE"


def test_over_several_devices_many_clients_get_what_one_device_gives(tmp_path):
    save_model(tmp_path, tokenizer=TOKENIZER, vocab_size=24, max_length=LENGTH, layers=2)
    prompts = [[3 + n, 4, 5 + n % 3] * (1 + n) for n in range(12)]
    counts = [40 - 3 * n for n in range(12)]
    expected = greedy(tmp_path)
    with serving(tmp_path, "--slots=3", "--tensor=4") as (address, process):
        for _ in range(2):
            with concurrent.futures.ThreadPoolExecutor(12) as pool:
                found = list(pool.map(lambda p, n: whole(address, p, n)[0], prompts, counts))
            assert found == [expected(p, n) for p, n in zip(prompts, counts)]
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=20)
        assert (process.returncode, out, err) == (0, "", "")


def test_nothing_is_compiled_after_the_warm_up_and_a_prompt_that_goes_on_is_read_from_there(model):
    import jax

    from hjax.launch import serve
    from hjax.rollout.sampling_params import SamplingParams
    from hjax.serving.jetstream_server import Orchestrator

    flags = [f"--model={model}", "--protocol=jetstream", "--slots=2", "--context=96"]
    own = serve.parse(flags)
    loaded, service = serve._service(own, serve.ModelInfo.read(own.model))
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, *_, **__: compiled.append(name) if "backend_compile" in name else None
    )
    orchestrator = Orchestrator(
        loaded, service, SamplingParams(temperature=0.0), 0, compiled.append
    )

    async def answered(tokens, count):
        found = []
        async for each in orchestrator.Decode(request_of(tokens, count), None):
            found += each.stream_content.samples[0].token_ids
        return found

    said = asyncio.run(answered([4] * 40, 20))
    begun = service.stats()["cached_tokens"]
    assert asyncio.run(answered([4] * 40 + said, 5)) is not None
    assert service.stats()["cached_tokens"] - begun >= 32
    for length in (1, 20, 90, 17, 5):
        asyncio.run(answered([4] * length, 96 - length))
    assert compiled == []
    jax.jit(lambda x: x + 1)(1)  # what is compiled is heard of
    assert len(compiled) == 1
    service.close(0)


def test_importing_starts_no_backend():
    code = (
        "import hjax.serving.jetstream_server, jax._src.xla_bridge as bridge\n"
        "print(bridge.backends_are_initialized())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.stderr) == ("False\n", "")
