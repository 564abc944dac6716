"""The training service over HTTP: order, failures, sessions, saved states, two clients at once."""

import concurrent.futures
import json
import os
import pathlib
import shutil
import signal
import socket
import threading
import time
import urllib.parse

import jax
import numpy as np
import pytest
from helpers import save_model
from serving_double import HTTP, byte_tokenizer
from training_server import Client, command, datum, training_server

from hjax.serving.limits import ServerLimits
from hjax.training_service import tinker_app, tinker_samplers
from hjax.training_service.datum import Datum
from hjax.training_service.learner import Learner
from hjax.training_service.protobuf import bytes_field, last_fields
from hjax.training_service.shared_base import SharedBase
from hjax.training_service.state_store import StateName
from hjax.training_service.tinker_service import TinkerLimits

TEXT = [10, 11, 12, 13, 14]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tinker") / "model"
    save_model(path, tokenizer=byte_tokenizer(), vocab_size=260, max_length=64)
    return path


@pytest.fixture(scope="module")
def base(folder):
    shared = SharedBase(folder, slots=4)
    yield shared
    shared.close()


@pytest.fixture(scope="module")
def server(base, tmp_path_factory):
    with training_server(base, tmp_path_factory.mktemp("store")) as (url, service, loop):
        yield url, service, loop


@pytest.fixture
def client(server):
    made = Client(server[0])
    made.create()
    return made


def sft(tokens=TEXT, **more):
    return datum(tokens[:-1], target_tokens=np.array(tokens[1:]), **more)


def sampled(client, sampler, prompt=TEXT, seq=0, **fields):
    """What a sampler answers: (tokens of each response, log-probs of the prompt)."""
    made = client.post(
        "asample", sampling_session_id=sampler, seq_id=seq,
        prompt={"chunks": [{"type": "encoded_text", "tokens": prompt}]},
        sampling_params={"max_tokens": 4, "seed": 5} | fields.pop("sampling_params", {}), **fields,
    )  # fmt: skip
    assert len(made["sample_sequence_ids"]) == fields.get("num_samples", 1)
    found = client.result(made["request_id"])
    if isinstance(found, dict):
        return found["error"]
    from hjax.training_service.protobuf import read_fields

    sequences = [last_fields(value) for number, value in read_fields(found) if number == 1]
    tokens = [np.frombuffer(each[2], np.int32).tolist() for each in sequences]
    scores = last_fields(found).get(2)
    return tokens, None if scores is None else np.frombuffer(scores, np.float32)


def test_a_model_learns_and_is_sampled_as_the_learner_is(client, base):
    own, data = Learner(base, 2, seed=3), Datum(TEXT[:-1], {"target_tokens": TEXT[1:]})
    for _ in range(3):
        assert client.loss([sft(), sft()]) == own.forward_backward([data] * 2, "cross_entropy").loss
        found = client.step(learning_rate=0.05, grad_clip_norm=1)
        assert found == own.optim_step(learning_rate=0.05, grad_clip_norm=1.0)
    client.loss([sft()], forward=True)  # adds nothing
    assert client.step()["grad_norm"] == 0
    own.optim_step()
    sampler = client.ask("save_weights_for_sampler", sampling_session_seq_id=0)
    tokens, scores = sampled(client, sampler["sampling_session_id"], prompt_logprobs=True)
    np.testing.assert_array_equal(scores, np.float32(own.snapshot().compute_logprobs(TEXT)))
    assert tokens == [list(own.sample(TEXT, max_tokens=4, seed=5).sequences[0].tokens)]
    assert client.post("get_info", model_id=client.model)["lora_rank"] == 2


def test_parts_that_arrive_first_part_last_and_again(client):
    """The SDK sends the parts of one call in any order, and again where a connection broke."""
    parts = [[sft(TEXT[i : i + 3])] for i in range(3)]
    ids = [client.submit(parts[i], seq=i + 1) for i in (1, 2, 0, 1, 1)]
    client.seq = 3
    assert ids[0] == ids[3] == ids[4]
    whole = client.step()["grad_norm"]
    other = Client(client.url)
    other.create()
    other.loss([each for part in parts for each in part])
    assert whole == pytest.approx(other.step()["grad_norm"], rel=1e-5)
    assert client.result(ids[2]) == client.result(ids[2])  # a result is there twice


def test_a_number_that_is_left_out_holds_nothing_up(client):
    client.seq = 40
    assert client.loss([sft()]) > 0


LOSS = "loss_fn='stable_reinforce' is not supported: its formula is not published"


@pytest.mark.parametrize(
    "data, loss, why",
    [
        ([sft()], "stable_reinforce", LOSS),
        ([sft()], "custom", "losses traced on the client are not run here"),
        ([datum(TEXT, target_tokens=np.array([1]))], "cross_entropy", "for 5 tokens"),
        ([bytes_field(1, bytes_field(2, b""))], "cross_entropy", "images are not supported"),
        ([b"\x0a\xff"], "cross_entropy", "no protobuf message"),
        ([], "cross_entropy", "data is empty"),
        ([datum([900], target_tokens=np.array([1]))], "cross_entropy", "id 900 is outside"),
    ],
)
def test_what_may_not_be_is_a_failed_future(data, loss, why, client):
    found = client.result(client.submit(data, loss))
    assert why in found["error"] and found["category"] == "user"
    assert client.step()["grad_norm"] == 0


@pytest.mark.parametrize(
    "path, fields, why",
    [
        ("optim_step", {"optimizer_params": {"type": "dimuon"}}, "optimizer 'dimuon'"),
        ("optim_step", {"adam_params": {"beta1": 1}}, "beta1=1.0: must be from 0 to below 1"),
        ("optim_step", {"adam_params": {"lr": 1}}, "adam_params.lr: not supported here"),
        ("save_weights", {"path": "../up"}, "name '../up': letters, digits"),
        ("save_weights", {"path": "a", "ttl_seconds": 5}, "ttl_seconds=5: 3600 to"),
        ("load_weights", {"path": "tinker://a/b", "optimizer": True}, "tinker://MODEL/weights"),
        ("load_weights", {"path": "tinker://a/weights/b", "optimizer": True}, "no such saved"),
    ],
)
def test_other_requests_fail_so_too(path, fields, why, client):
    assert why in client.ask(path, **fields)["error"]
    assert client.loss([sft()]) > 0  # the model goes on


@pytest.mark.parametrize(
    "fields, why",
    [
        ({"lora_config": {"rank": 0}}, "rank=0: 1 to 256"),
        ({"lora_config": {"rank": 2, "train_mlp": False, "train_attn": False}}, "both false"),
        ({"base_model": "other/model"}, "this server has tiny; start it with --name=NAME"),
        ({"optimizer_config": {"type": "dimuon"}}, "optimizer 'dimuon' is not supported"),
        ({"session_id": "gone"}, "session 'gone' is not open"),
        ({"lora_config": {"rank": "two"}}, "lora_config.rank"),
    ],
)
def test_models_that_cannot_be_made(fields, why, server):
    client = Client(server[0])
    wanted = {"session_id": client.session, "model_seq_id": 0, "base_model": "tiny"} | fields
    found = client.result(client.post("create_model", **wanted)["request_id"])
    assert why in found["error"]


@pytest.mark.parametrize(
    "fields, why",
    [
        ({"prompt_alt_tokens_k": 2}, "prompt_alt_tokens_k is not supported"),
        ({"topk_prompt_logprobs": 50}, "topk_prompt_logprobs=50: at most 20"),
        ({"prompt_logprobs_last_n": 5, "prompt_logprobs": True}, "from 1 to the prompt's 5"),
        ({"sampling_params": {"stop": [1.5]}}, "stop: a string, or a list"),
        ({"sampling_params": {"temperature": -1}}, "temperature=-1"),
        ({"sampling_params": {"max_tokens": 100}}, "exceed the 64 tokens"),
        ({"prompt": {"chunks": [{"type": "image", "data": "", "format": "png"}]}}, "'image'"),
        ({"num_samples": 0}, "num_samples=0: 1 or more"),
        ({"nonsense": 1}, "nonsense: not supported"),
    ],
)
def test_samples_that_cannot_be_drawn(fields, why, server):
    client = Client(server[0])
    made = client.post(
        "create_sampling_session", session_id=client.session, sampling_session_seq_id=0,
        base_model="tiny",
    )  # fmt: skip
    wanted = {
        "sampling_session_id": made["sampling_session_id"], "seq_id": 0, "sampling_params": {},
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": TEXT}]},
    } | fields  # fmt: skip
    answer = client.post("asample", **wanted)
    assert answer["sample_sequence_ids"]
    assert why in client.result(answer["request_id"])["error"]


@pytest.mark.extended
def test_stops_and_prompts_that_fill_the_model(server, base):
    client = Client(server[0])
    made = client.post(
        "create_sampling_session", session_id=client.session, sampling_session_seq_id=0,
        base_model="tiny",
    )  # fmt: skip
    sampler = made["sampling_session_id"]
    greedy = {"temperature": 0, "max_tokens": 8}
    [[usual], _] = sampled(client, sampler, seq=0, sampling_params=greedy | {"stop": []})
    assert len(usual) == 8
    # The token that stops is part of the answer, and so are those of a stop string.
    at = usual.index(usual[3])
    stop = {"stop": [usual[3]]}
    assert sampled(client, sampler, seq=1, sampling_params=greedy | stop)[0] == [usual[: at + 1]]
    text = base.tokenizer.decode(usual[2:4])
    if text.isprintable() and "\ufffd" not in text:
        [[cut], _] = sampled(client, sampler, seq=2, sampling_params=greedy | {"stop": text})
        assert text in base.tokenizer.decode(cut)
    # Room for no token: its own log-probs all the same, as compute_logprobs asks for them.
    whole = (TEXT * 13)[:64]
    tokens, scores = sampled(
        client, sampler, prompt=whole, seq=3, prompt_logprobs=True,
        sampling_params={"max_tokens": 1},
    )  # fmt: skip
    assert tokens == [[]] and len(scores) == 64
    both, _ = sampled(client, sampler, seq=4, num_samples=2, sampling_params={"stop": []})
    assert len(both) == 2 and both[0] != both[1]


@pytest.mark.extended
def test_two_clients_at_once_are_as_each_alone(server):
    def train(number):
        client = Client(server[0])
        client.create(seed=number)
        found = []
        for step in range(4):
            tokens = [(7 * number + step + i) % 260 for i in range(5 + number)]
            sampler = client.ask("save_weights_for_sampler", sampling_session_seq_id=step)
            found += sampled(client, sampler["sampling_session_id"], seq=step)[0]
            found += [client.loss([sft(tokens)]), client.step(learning_rate=0.02)]
        return found

    alone = [train(number) for number in range(2)]
    with concurrent.futures.ThreadPoolExecutor() as pool:
        assert list(pool.map(train, range(2))) == alone


@pytest.mark.extended
def test_a_snapshot_stays_while_the_model_learns(client, monkeypatch):
    def sampler(number):
        found = client.ask("save_weights_for_sampler", sampling_session_seq_id=number)
        return found["sampling_session_id"]

    monkeypatch.setattr(tinker_samplers, "SNAPSHOTS", 2)
    samplers, before = [sampler(0)], []
    for number in range(1, 4):
        before += [sampled(client, samplers[-1], seq=0, prompt_logprobs=True)[1]]
        client.loss([sft()])
        client.step(learning_rate=0.1)
        samplers.append(sampler(number))
    after = sampled(client, samplers[2], seq=1, prompt_logprobs=True)[1]
    np.testing.assert_array_equal(after, before[2])
    assert np.abs(before[0][1:] - before[2][1:]).max() > 0.01
    assert "snapshot is gone: 2 of a session" in sampled(client, samplers[0], seq=1)


def test_saved_states_answer_alike_after_a_new_start(base, tmp_path):
    with training_server(base, tmp_path) as (url, _, _):
        client = Client(url)
        client.create()
        client.loss([sft()])
        client.step(learning_rate=0.05)
        path = client.ask("save_weights", path="one")["path"]
        assert "exists; overwrite=True" in client.ask("save_weights", path="one")["error"]
        named = client.ask("save_weights_for_sampler", path="final")["path"]
        loss, model = client.loss([sft()], forward=True), client.model
        assert client.get(f"training_runs/{model}").json()["last_checkpoint"]["tinker_path"] == path
        states = tmp_path / model.replace(":", "%3A")
        (states / "weights" / ".partial1.x").mkdir()
        # Killed while one was overwritten: before the new one had its name, and after.
        (states / "weights" / "one").rename(states / "weights" / ".replaced.one")
        final = states / "sampler_weights" / "final"
        shutil.copytree(final, final.with_name(".replaced.final"))
    with training_server(base, tmp_path) as (url, _, _):
        assert {path.name for path in states.glob("*/*")} == {"one", "final"}
        again = Client(url)
        again.model = model
        # The model is lost, and that is said at once.
        for found in (again.loss([sft()]), again.ask("optim_step", adam_params={})["error"]):
            assert f"is not loaded: .* its last saved state is {path}".split(" .* ")[1] in found
        found = again.result(
            again.post(
                "load_weights", session_id=again.session, model_seq_id=0, path=path, optimizer=True
            )["request_id"]
        )
        again.model = found["model_id"]
        assert again.loss([sft()], forward=True) == loss
        sampler = again.post(
            "create_sampling_session", session_id=again.session, sampling_session_seq_id=0,
            model_path=named,
        )["sampling_session_id"]  # fmt: skip
        scores = sampled(again, sampler, prompt_logprobs=True)[1]
        assert -scores[1:].sum() == pytest.approx(loss, rel=1e-5)
        assert again.get(f"samplers/{sampler}").json()["model_path"] == named
        kinds = [each["checkpoint_type"] for each in again.get("checkpoints").json()["checkpoints"]]
        assert kinds == ["training", "sampler"]
        run = f"{again.url}/api/v1/training_runs/{model}/checkpoints"
        assert HTTP.put(f"{run}/weights/one/ttl", json={"ttl_seconds": 3600}).status_code == 200
        [one, _] = HTTP.get(run).json()["checkpoints"]
        assert one["expires_at"] is not None
        assert HTTP.delete(f"{run}/weights/one").status_code == 200
        assert HTTP.delete(f"{run}/weights/one").status_code == 400
        info = again.post("weights_info", tinker_path=named)
        assert info["lora_rank"] == 2 and info["train_unembed"] is False


def test_silent_sessions_end(base, tmp_path):
    limits = TinkerLimits(session_seconds=0.0)
    with training_server(base, tmp_path, limits=limits) as (url, service, loop):
        client = Client(url)
        client.create()
        client.loss([sft()])
        path = client.ask("save_weights", path="one")["path"]
        loop.call_soon_threadsafe(service.sweep)
        assert client.raw("session_heartbeat", session_id=client.session).status_code == 410
        found = client.loss([sft()])
        assert "sent no heartbeat for 0 s" in found and path in found
        assert len(service.futures) == 1 and not service.models
        other = Client(url)
        other.create()
        other.post(f"sessions/{other.session}/finish", reason={"type": "success"})
        assert "its session was finished; it has no saved state" in other.loss([sft()])


def test_samples_of_a_session_that_has_ended_are_not_begun(server, base, monkeypatch):
    client, others = Client(server[0]), Client(server[0])
    samplers = [
        each.post(
            "create_sampling_session", session_id=each.session, sampling_session_seq_id=0,
            base_model="tiny",
        )["sampling_session_id"]
        for each in (client, others)
    ]  # fmt: skip
    drawing, held, began = base.programs(None).sampler(), threading.Event(), []

    def submit(request, *given, to=drawing._service.submit):
        began.append(request.prompt)
        assert held.wait(30)
        return to(request, *given)

    monkeypatch.setattr(drawing._service, "submit", submit)
    for seq in range(20):
        client.post(
            "asample", sampling_session_id=samplers[0], seq_id=seq, num_samples=2,
            prompt={"chunks": [{"type": "encoded_text", "tokens": TEXT}]}, sampling_params={},
        )  # fmt: skip
    client.post(f"sessions/{client.session}/finish", reason={"type": "success"})
    held.set()
    [[tokens], _] = sampled(others, samplers[1], prompt=TEXT[:2], sampling_params={"stop": []})
    assert len(tokens) == 4
    # The first was being begun.
    assert began == [tuple(TEXT)] * 2 + [tuple(TEXT[:2])]


def test_polls_are_long_and_say_when_to_ask_again(client, server, monkeypatch):
    monkeypatch.setattr(tinker_app, "POLL_SECONDS", 0.2)
    server[2].call_soon_threadsafe(server[1].futures.add, "waits", client.session)
    began = time.monotonic()
    answer = client.raw("retrieve_future", request_id="waits")
    assert answer.status_code == 408 and answer.json()["queue_state"] == "active"
    assert time.monotonic() - began > 0.2
    found = client.post("retrieve_future", request_id="never")
    assert "the result of never is not here" in found["error"]


def test_a_poll_whose_connection_is_cut_loses_nothing(client, server):
    address = urllib.parse.urlsplit(server[0])
    asked = client.submit([sft()])
    body = json.dumps({"request_id": asked})
    head = f"POST /api/v1/retrieve_future HTTP/1.1\r\nHost: {address.netloc}\r\n"
    for received in (0, 10):  # before the answer, and in the midst of it
        with socket.create_connection((address.hostname, address.port)) as connection:
            connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
            assert len(connection.recv(received)) == received
    first = client.result(asked)
    assert isinstance(first, bytes) and client.result(asked) == first
    # Asked once more, it is not computed again.
    assert client.submit([sft()], seq=client.seq) == asked and client.result(asked) == first


def test_limits_keys_and_versions(base, tmp_path):
    limits, http = TinkerLimits(futures=1, models=1), ServerLimits(body_bytes=2000)
    with training_server(base, tmp_path, limits=limits, http=http, key="tml-a") as (
        url,
        service,
        _,
    ):
        with pytest.raises(AssertionError, match="X-API-Key"):
            Client(url)
        assert HTTP.get(f"{url}/api/v1/healthz").json() == {"status": "ok"}
        client = Client(url, key="tml-a")
        client.create()
        assert "1 models are open, as many as may" in client.create(1)["error"]
        client.model = f"{client.session}:train:0"
        assert client.raw("forward_backward", content=b"x" * 2001).status_code == 413
        service.futures._pending += 1
        assert client.raw("optim_step", model_id=client.model, seq_id=9).status_code == 429
        service.futures._pending -= 1
        answer = client.raw("client/config", sdk_version="0.25.1")
        assert answer.status_code == 400 and "tinker==0.38" in answer.text
        assert client.post("client/config", sdk_version="0.38.0")["proto_compress_fwdbwd"] is False
        answer = HTTP.post(
            f"{url}/api/v1/forward_backward", content=b"x",
            headers={"X-API-Key": "tml-a", "Content-Encoding": "zstd"},
        )  # fmt: skip
        assert answer.status_code == 415
        assert client.raw("unload_model").status_code == 404
        assert client.raw("create_session", content=b"[").status_code == 400


@pytest.mark.parametrize(
    "path",
    [
        "tinker://a/weights",
        "a/b/c",
        "tinker://a/other/c",
        "tinker:///weights/a",
        "tinker://a/weights/.a",
    ],
)
def test_names_that_are_none(path):
    with pytest.raises(ValueError, match="wanted|no id|letters"):
        StateName.parse(path)


@pytest.mark.extended
@pytest.mark.parametrize(
    "flags", [(), ("--data=2", "--fsdp=2", "--tensor=2", "--generate_tensor=1")], ids=len
)
def test_killed_and_started_again(flags, folder, tmp_path):
    def scores(client, path):
        sampler = client.post(
            "create_sampling_session", session_id=client.session, sampling_session_seq_id=9,
            model_path=path,
        )["sampling_session_id"]  # fmt: skip
        return sampled(client, sampler, prompt_logprobs=True)[1]

    with command(folder, tmp_path, flags) as (url, process):
        client = Client(url)
        client.create()
        client.loss([sft()])
        client.step(learning_rate=0.05)
        state = client.ask("save_weights", path="one")["path"]
        named = client.ask("save_weights_for_sampler", path="final")["path"]
        client.loss([sft()])
        step, before = client.step(learning_rate=0.05), scores(client, named)
        loss = client.loss([sft()], forward=True)
        os.kill(process.pid, signal.SIGKILL)
    with command(folder, tmp_path, flags) as (url, process):
        again = Client(url)
        again.model = client.model  # lost, which every call and poll says at once
        said = again.result(f"{client.model}:1")["error"]
        assert "is not here" in said and said.endswith(f"last saved state is {state}")
        for said in (again.loss([sft()]), again.ask("optim_step", adam_params={})["error"]):
            assert "is not loaded" in said and said.endswith(f"last saved state is {state}")
        found = again.post(
            "load_weights", session_id=again.session, model_seq_id=0, path=state, optimizer=True
        )
        again.model = again.result(found["request_id"])["model_id"]
        again.loss([sft()])
        assert again.step(learning_rate=0.05) == step
        assert again.loss([sft()], forward=True) == loss
        np.testing.assert_array_equal(scores(again, named), before)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0


@pytest.mark.extended
def test_many_futures_of_sessions_that_vanish_leave_nothing(base, tmp_path):
    """Ten sessions, half of which are never finished; files, threads and results are as before."""

    def files():
        return len(list(pathlib.Path("/proc/self/fd").iterdir()))

    limits = TinkerLimits(session_seconds=0.0)
    with training_server(base, tmp_path, limits=limits) as (url, service, loop):

        def run(number):
            client = Client(url)
            client.create()
            ids = [client.submit([sft()]) for _ in range(50)]
            if number % 2:
                for each in ids:
                    client.result(each)
                client.post(f"sessions/{client.session}/finish")

        run(1)
        threads = len(threading.enumerate())
        before, arrays = files(), len(jax.live_arrays())
        with concurrent.futures.ThreadPoolExecutor(10) as pool:
            list(pool.map(run, range(10)))
        loop.call_soon_threadsafe(service.sweep)
        deadline = time.monotonic() + 30
        while len(service.futures) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert len(service.futures) == 0 and not service.models
        time.sleep(1)  # a request that ran ends
        assert len(jax.live_arrays()) <= arrays + 5
        assert files() <= before + 40 and len(threading.enumerate()) <= threads + 10
