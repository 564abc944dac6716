"""`python -m hjax.launch.serve`: a tiny model, served by a process of its own."""

import concurrent.futures
import contextlib
import json
import os
import pathlib
import re
import resource
import shlex
import signal
import socket
import subprocess
import sys
import time

import openai
import pytest
from helpers import save_model, trainer_of
from serving_double import EOS, HTTP, byte_tokenizer

import hjax
from hjax.launch import serve

KEY = {"HJAX_TEST_KEY": "sesame"}


@contextlib.contextmanager
def serving(model, *flags, environment=KEY, command=None, folder=None):
    """A server's process, and its URL once it says that it answers; ended at the end."""
    command = command or [
        sys.executable, "-m", "hjax.launch.serve", f"--model={model}", "--protocol=openai"
    ]  # fmt: skip
    process = subprocess.Popen(
        [*command, "--port=0", *flags],
        stdout=subprocess.PIPE, text=True, env=os.environ | environment, cwd=folder,
    )  # fmt: skip
    try:
        line = process.stdout.readline()
        start, _, url = line.rstrip("\n").rpartition(" on ")
        assert start == f"serving {model}" and url.startswith("http://127.0.0.1:")
        yield url, process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("serve") / "model"
    save_model(path, tokenizer=byte_tokenizer(), vocab_size=260, max_length=128)
    return path


@pytest.fixture(scope="module")
def url(model):
    with serving(model, "--api_key_env=HJAX_TEST_KEY") as (url, process):
        yield url
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        # The first line is the only one on stdout.
        assert process.communicate(timeout=30)[0] == "" and process.returncode == 0
        assert time.monotonic() - began < 15


@pytest.fixture(scope="module")
def client(url):
    with openai.OpenAI(base_url=f"{url}/v1", api_key="sesame", max_retries=0) as client:
        yield client


@pytest.mark.parametrize("prompt", ["1+2=", [49, 43, 50, 61]])
def test_greedy_completions_are_the_models(model, client, prompt):
    [expected] = hjax.load_model(model).generate([prompt], 8, temperature=0)
    found = client.completions.create(
        model=str(model), prompt=prompt, max_tokens=8, temperature=0, logprobs=1,
        extra_body={"return_token_ids": True},
    )  # fmt: skip
    [choice] = found.choices
    assert choice.token_ids == expected.tokens and choice.finish_reason == expected.finish_reason
    assert choice.logprobs.token_logprobs == pytest.approx(expected.logprobs, abs=1e-4)
    assert choice.text == expected.text
    assert found.usage.completion_tokens == len(expected.tokens)


@pytest.mark.extended
def test_a_seed_draws_the_same_again_streamed_or_beside_others(model, client):
    def draw(**fields):
        return client.completions.create(model=str(model), prompt="a", max_tokens=12, **fields)

    first = [choice.text for choice in draw(seed=5, n=3).choices]
    assert len(set(first)) == 3
    with concurrent.futures.ThreadPoolExecutor() as pool:
        others = [pool.submit(draw, seed=seed) for seed in (5, 6)]
        drawn = [[choice.text for choice in other.result().choices] for other in others]
    assert drawn[0] == first[:1] and drawn[1] != drawn[0]
    streamed = ["", "", ""]
    for chunk in draw(seed=5, n=3, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert streamed == first


@pytest.mark.extended
def test_chats_are_the_templates_prompts(model, client):
    messages = [{"role": "user", "content": "1+2="}]
    text = "<|im_start|>user\n1+2=<|im_end|>\n<|im_start|>assistant\n"
    fields = {"model": str(model), "max_tokens": 8, "temperature": 0}
    chat = client.chat.completions.create(messages=messages, **fields)
    # A tokenizer that adds nothing in front: the chat's text is a prompt like any other.
    plain = client.completions.create(prompt=text, **fields)
    assert chat.choices[0].message.content == plain.choices[0].text
    assert chat.usage.prompt_tokens == plain.usage.prompt_tokens
    assert chat.usage.completion_tokens == plain.usage.completion_tokens
    # What the chat has read the plain prompt finds, in whole blocks.
    cached = plain.usage.prompt_tokens_details.cached_tokens
    assert cached == (plain.usage.prompt_tokens - 1) // 16 * 16 > 0


@pytest.mark.extended
def test_options_reach_the_draws(model, client):
    def draw(**fields):
        return (
            client.completions.create(
                model=str(model), prompt="a", max_tokens=10, temperature=0, **fields
            )
            .choices[0]
            .text
        )

    usual = draw()
    assert draw(logit_bias={str(ord("Q")): 100}) == "Q" * 10
    assert usual[0] not in draw(logit_bias={str(ord(usual[0])): -100})
    assert draw(stop=usual[4:6]) == usual[: usual.index(usual[4:6])]


def test_without_the_key_nothing_is_answered(url):
    assert HTTP.get(f"{url}/v1/models").status_code == 401
    assert HTTP.get(f"{url}/health").status_code == 200


def test_what_does_not_fit_the_model_is_refused(url, model):
    body = {"prompt": "a" * 100, "max_tokens": 29}
    headers = {"Authorization": "Bearer sesame"}
    answer = HTTP.post(f"{url}/v1/completions", json=body, headers=headers)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"


def test_openais_protocol_is_what_is_served_unless_one_asks_for_another():
    assert serve.parse(["--model=x"]).protocol == "openai"


def test_help(capsys):
    assert serve.main(["--help"]) == 0
    assert "--protocol=openai" in capsys.readouterr().out


@pytest.mark.parametrize(
    "flags, why",
    [
        (["--protocol=openai"], "--model is missing"),
        (
            ["--model={model}", "--protocol=openai", "--temperature=1"],
            "--temperature: not with --protocol=openai; requests set it",
        ),
        (
            ["--model={model}", "--protocol=jetstream", "--idle_seconds=5"],
            "--idle_seconds: not with --protocol=jetstream; only openai and tinker have it",
        ),
        (["--model={model}", "--protocol=jetstream", "--top_p=2"], "--top_p=2.0: above 0"),
        (["--model={model}", "--protocol=grpc"], "--protocol"),
        (
            ["--model={model}", "--protocol=jetstream", "--admin"],
            "--admin: not with --protocol=jetstream; only openai has it",
        ),
        (["--model={model}", "--protocol=openai", "--tensor=0"], "--tensor=0: must be 1 or more"),
        (
            ["--model={model}", "--protocol=openai", "--port=0", "--tensor=3"],
            "tensor=3: heads of size 4 does not divide",
        ),
        (["--model={model}", "--protocol=openai", "--port=65536"], "--port=65536: must be"),
        (["--model={model}", "--protocol=jetstream", "--name=m"], "--name: .* only openai and"),
        (["--model={model}", "--protocol=openai", "--cors=a.example"], "--cors=a.example: must be"),
        (["--model={model}", "--protocol=openai", "--cors=http://a/"], "without a path"),
        (["--model={model}", "--protocol=openai", "--cors=*,http://a"], "--cors=.*: must be"),
        (["--model={model}", "--protocol=openai", "--allowed_hosts=a:80"], "without a port"),
        (["--model={model}", "--protocol=openai", "--allowed_hosts=a,*"], "--allowed_hosts=.*: "),
        (["--model={model}", "--protocol=jetstream", "--allowed_hosts=a"], ".* only openai and"),
        (["--model={model}", "--protocol=openai", "--max_queue=0"], "--max_queue=0: must be"),
        (["--model={model}", "--protocol=openai", "--idle_seconds=0"], "--idle_seconds=0.0: must"),
        (["--model={model}", "--protocol=openai", "--api_key_env=HJAX_NONE"], "HJAX_NONE"),
        (
            ["--model={model}", "--protocol=openai", "--host=192.0.2.1"],
            "--host=192.0.2.1 .* another port",
        ),
        (["--model=/nowhere", "--protocol=openai"], "/nowhere"),
        (["--model={model}", "--protocol=openai", "--prot=1"], "prot"),
        (["--model={model}", "--protocol=openai", "--store=a"], "--store: .* only tinker has it"),
        (["--model={model}", "--protocol=tinker", "--lookup=2"], "--lookup: .* does not have it"),
        (["--model={model}", "--fsdp=2"], "--fsdp: not with --protocol=openai; only tinker has it"),
        (["--model={model}", "--protocol=tinker", "--data=9"], "data=9: 1 to 8, the devices of"),
    ],
)
def test_wrong_input_is_one_line(flags, why, model, capsys):
    assert serve.main([flag.format(model=model) for flag in flags]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    assert err.startswith("hjax: error: ")
    assert re.search(why, err)


def test_a_key_that_the_sdk_would_refuse(model, capsys, monkeypatch):
    monkeypatch.setenv("HJAX_TEST_KEY", "sesame")
    flags = [f"--model={model}", "--protocol=tinker", "--api_key_env=HJAX_TEST_KEY"]
    assert serve.main(flags) == 2
    assert "the key must begin with tml-" in capsys.readouterr().err


@pytest.mark.parametrize("hard", [resource.RLIM_INFINITY, 5000, 1299])
def test_as_many_files_as_connections_need_may_be_open(model, capsys, monkeypatch, hard):
    found = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (64, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: found.append(limits))
    # 1024 may wait to be taken, 256 are for other things. Then the address is wrong.
    flags = [f"--model={model}", "--protocol=openai", "--max_connections=20", "--host=192.0.2.1"]
    assert serve.main(flags) == 2
    wrong = "--max_connections=20: 1300 open files" if hard == 1299 else "--host"
    assert wrong in capsys.readouterr().err
    assert found == ([] if hard == 1299 else [(1300, hard)])


def test_a_port_that_is_taken_is_one_line(model, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert serve.main([f"--model={model}", "--protocol=openai", f"--port={port}"]) == 2
    assert f"--port={port}: Address already in use" in capsys.readouterr().err


def test_without_the_extra_it_is_named(model, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    monkeypatch.delitem(sys.modules, "hjax.serving.server", raising=False)
    assert serve.main([f"--model={model}", "--protocol=openai"]) == 2
    assert "uvicorn is not installed" in (err := capsys.readouterr().err)
    assert "pip install 'hjax[serve]'" in err


@pytest.mark.extended
def test_without_jetstream_its_extra_is_named(model, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "jetstream", None)
    monkeypatch.delitem(sys.modules, "hjax.serving.jetstream_server", raising=False)
    assert serve.main([f"--model={model}", "--protocol=jetstream"]) == 2
    err = capsys.readouterr().err
    assert re.match(r".*(grpc|jetstream(.core)?) is not installed", err)
    assert "pip install 'hjax[jetstream]'" in err and err.count("\n") == 1


@pytest.mark.slow
def test_trained_weights_tell_their_story(test_data):
    folder = test_data / "weights" / "stories260K-hf"
    golden = json.loads((folder / "goldens.json").read_text())
    first, *tokens = golden["greedy_from_bos"]
    fields = {"prompt": [first], "max_tokens": len(tokens), "temperature": 0}
    with serving(folder) as (url, _):
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client:

            def tell(**more):
                return client.completions.create(model=str(folder), **fields, **more)

            told = tell(extra_body={"return_token_ids": True}).choices[0]
            assert told.token_ids == tokens
            assert told.text.strip() == golden["greedy_text"]
            streamed = "".join(chunk.choices[0].text for chunk in tell(stream=True))
            assert streamed == told.text
            stopped = tell(stop=["her mom", "sad and"]).choices[0]
            assert stopped.text.strip() == golden["greedy_text"].partition(" sad and")[0]
            assert stopped.finish_reason == "stop"


@pytest.mark.extended
def test_a_server_is_called_by_its_own_names_and_those_that_it_is_given(model):
    flags = ["--host=localhost", "--allowed_hosts=models.example"]
    with serving(model, *flags, environment={}) as (url, _):
        hosts = ["models.example", "localhost:1", "127.0.0.1", "evil.example"]
        found = [HTTP.get(f"{url}/version", headers={"Host": host}).status_code for host in hosts]
    assert found == [200, 200, 200, 403]


@pytest.mark.slow
def test_the_readmes_line_serves_a_run(tmp_path):
    """As it stands there but for the port, and a public client asks what the run's model knows."""
    readme = pathlib.Path(__file__).parent.parent / "README.md"
    [line] = [x for x in readme.read_text().splitlines() if "--protocol=openai" in x]
    python, *command = shlex.split(line, comments=True)
    assert python == "python" and "--model=runs/first" in command
    with trainer_of("GRPO", {"steps": 1}, tmp_path / "runs" / "first") as trainer:
        trainer.run()
    with serving("runs/first", command=[sys.executable, *command], folder=tmp_path) as (url, _):
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            [name] = [each.id for each in client.models.list()]
            found = client.completions.create(model=name, prompt="31>", max_tokens=4, temperature=0)
    [expected] = hjax.load_model(tmp_path / "runs" / "first").generate(["31>"], 4, temperature=0)
    assert found.choices[0].text == expected.text


@pytest.mark.extended
def test_sigterm_lets_the_running_end(tmp_path):
    save_model(tmp_path, tokenizer=byte_tokenizer(), vocab_size=260, max_length=32)
    with serving(tmp_path, "--warm_up") as (url, process):
        endless = {"prompt": "a", "max_tokens": 30, "logit_bias": {str(EOS): -100}, "n": 4}
        with HTTP.stream(
            "POST", f"{url}/v1/completions", timeout=60,
            json=endless | {"stream": True},
        ) as answer:  # fmt: skip
            lines = answer.iter_lines()
            said = next(lines)
            began = time.monotonic()
            process.send_signal(signal.SIGTERM)
            said += "".join(lines)
        assert process.wait(20) == 0 and time.monotonic() - began < 15
    assert said.count('"finish_reason": "length"') == 4
    assert said.endswith("[DONE]")


STUCK = """
import threading
from hjax.serving.address import bind
from hjax.serving.limits import ServerLimits
from hjax.serving.served_model import ServedModel
from hjax.serving.server import Server, run
from serving_double import HTTP, EOS, Scripted

class Stuck(Scripted):
    def close(self, seconds):
        threading.Event().wait()

limits = ServerLimits(drain_seconds=0.1)
served = ServedModel("stuck", Stuck(lambda request: [EOS]), None, 260, (EOS,))
started = lambda: print("serving", flush=True)
raise SystemExit(run(Server(served, bind("127.0.0.1", 0), limits, started=started), limits))
"""


@pytest.mark.slow
def test_an_engine_that_does_not_end_is_left(tmp_path):
    tests = str(pathlib.Path(__file__).parent)
    path = os.pathsep.join([tests, *filter(None, [os.environ.get("PYTHONPATH")])])
    process = subprocess.Popen(
        [sys.executable, "-c", STUCK], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=os.environ | {"PYTHONPATH": path},
    )  # fmt: skip
    with process:
        assert process.stdout.readline() == "serving\n"
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 1 and 4 < time.monotonic() - began < 6
        assert "the engine did not end in time" in process.stderr.read()


@pytest.mark.slow
def test_ctrl_c_is_130(model):
    with serving(model, environment={}) as (_, process):
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 130
