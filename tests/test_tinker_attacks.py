"""Attacks on the training service: what is too long, too much or of no state is refused, and the
service answers others."""

import os
import subprocess

import httpx
import numpy as np
import pytest
from helpers import save_model
from serving_double import HTTP, byte_tokenizer
from training_server import Client, datum, training_server

from hjax.errors import ConfigError
from hjax.training_service.learner import Learner
from hjax.training_service.protobuf import bytes_field, int_field
from hjax.training_service.shared_base import SharedBase
from hjax.training_service.tinker_messages import read_data, read_forward_backward, read_tensor
from hjax.training_service.tinker_service import TinkerLimits

TEXT = [10, 11, 12, 13, 14]
# Bytes of results and requests that wait at a time, in these tests.
KEPT = 2**18


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tinker") / "model"
    save_model(folder, tokenizer=byte_tokenizer(), vocab_size=260, max_length=64)
    shared = SharedBase(folder, slots=4)
    yield shared
    shared.close()


@pytest.fixture(scope="module")
def server(base, tmp_path_factory):
    limits = TinkerLimits(sessions=20, futures_bytes=KEPT, samples=100)
    with training_server(base, tmp_path_factory.mktemp("store"), limits=limits) as found:
        yield found[0], found[1]


@pytest.fixture
def client(server):
    made = Client(server[0])
    made.create()
    yield made
    made.post(f"sessions/{made.session}/finish")


def sample(client, **more):
    fields = {
        "sampling_session_id": "nobody", "seq_id": 1, "prompt": {"chunks": [{"tokens": [1]}]},
        "sampling_params": {"max_tokens": 2},
    }  # fmt: skip
    return client.raw("asample", **(fields | more))


def test_long_ids_are_refused_and_answers_do_not_repeat_them(client, server):
    long = "a" * 20_000
    # Each response's id repeats the sampler's: 65,535 of these were an answer of 1.3 GB.
    for number in (1, 100, 65_535, 2**70):
        answer = sample(client, sampling_session_id=long, num_samples=number)
        assert answer.status_code == 400 and len(answer.content) < 500
    before = len(server[1].futures)
    for fields in ({"seq_id": 1}, {"seq_id": "one"}):
        assert client.raw("optim_step", model_id=long, **fields).status_code == 400
    assert client.raw("create_model", session_id=long, model_seq_id="x").status_code == 400
    assert len(server[1].futures) == before
    found = client.result(sample(client, num_samples=101).json()["request_id"])
    assert found["error"] == "num_samples=101: at most 100" and found["category"] == "user"


@pytest.mark.parametrize(
    "model_id", ["..", ".", "*", "a" * 250, "\0", "a/../b", "é" * 100, "a:" * 99]
)
def test_models_of_no_server_are_not_looked_for(client, server, model_id):
    assert client.raw("get_info", model_id=model_id).status_code == 404
    # It waited for ever: 4,096 of these, and the service was full until it was started again.
    answer = client.raw("optim_step", model_id=model_id, seq_id=1, adam_params={})
    found = client.result(answer.json()["request_id"])
    assert "this server has no such model" in found["error"]
    assert server[1].futures._pending == 0
    path = f"tinker://{model_id}/weights/x"
    for call in ("weights_info", "create_sampling_session"):
        names = {"tinker_path": path} if call == "weights_info" else {"model_path": path}
        if call != "weights_info":
            names |= {"session_id": client.session, "sampling_session_seq_id": 5}
        assert client.raw(call, **names).status_code == 400


def test_pages_are_of_whole_numbers(client):
    for text in ("9" * 5000, "٣", "-1", "1e3", ""):
        answer = client.get(f"training_runs?limit={text}")
        assert answer.status_code == 400 and "whole numbers" in answer.text


def test_results_and_requests_that_wait_take_no_more_than_they_may(client, server):
    futures = server[1].futures
    for number in range(100):  # each of 4 KiB and more
        answer = client.raw("optim_step", model_id="nobody", seq_id=number, adam_params={})
        assert answer.status_code == 200
    assert futures._kept_bytes <= KEPT and len(futures) < 64
    assert "is not here" in client.result("nobody:0")["error"]  # the oldest went
    assert "no such model" in client.result("nobody:99")["error"]
    futures.add("waits", client.session, KEPT)
    assert client.raw("optim_step", model_id=client.model, seq_id=1).status_code == 429
    client.post(f"sessions/{client.session}/finish")
    assert futures._pending == futures._pending_bytes == 0


def test_sessions_and_metadata_are_few_and_short(client):
    answer = client.raw("create_session", sdk_version="0.38.0", user_metadata={"a": "b" * 20_000})
    assert answer.status_code == 400 and "characters of JSON" in answer.text
    opened, answer = [], None
    while (answer := client.raw("create_session", sdk_version="0.38.0")).status_code == 200:
        opened.append(answer.json()["session_id"])
    assert answer.status_code == 429 and "20 sessions" in answer.text and len(opened) <= 19
    for session in opened:
        client.post(f"sessions/{session}/finish")
    assert client.post("create_session", sdk_version="0.38.0")["session_id"]


def test_samples_have_limits(client):
    sampler = client.post(
        "create_sampling_session", session_id=client.session, sampling_session_seq_id=0,
        base_model="tiny",
    )["sampling_session_id"]  # fmt: skip
    fields = {"sampling_session_id": sampler, "seq_id": 1}
    stops = {"max_tokens": 2, "stop": ["x"] * 129}
    found = client.result(sample(client, sampling_params=stops, **fields).json()["request_id"])
    assert found["error"] == "129 stop strings and tokens: at most 128"


def test_messages_of_many_small_parts_are_refused_before_they_are_made():
    for body in (
        bytes_field(3, b"") * 10_000,
        bytes_field(7, bytes_field(1, "a")) * 10_000,
        int_field(6, 1) * 10_000,
    ):
        with pytest.raises(ConfigError, match="more than 8192 fields"):
            read_forward_backward(body)
    with pytest.raises(ConfigError, match="model_id has 257 characters"):
        read_forward_backward(bytes_field(1, "a" * 257))
    with pytest.raises(ConfigError, match="more than 1024 fields"):
        read_data([bytes_field(1, bytes_field(1, b"")) * 2000])
    with pytest.raises(ConfigError, match="more than 16 fields"):
        read_data([bytes_field(2, int_field(1, 1) * 17)])


def zeros(*shape, starts):
    """A sparse array's message without values."""
    csr = bytes_field(2, np.array(starts, np.int64).tobytes())
    sizes = b"".join(int_field(4, size) for size in shape)
    return bytes_field(2, csr) + int_field(3, 2) + sizes


def test_sparse_arrays_are_counted_over_the_whole_request():
    half = zeros(2**12, 2**13, starts=[0] * (2**12 + 1))  # 32 KiB that say 2^25 values
    assert read_tensor(half).shape == (2**12, 2**13)
    parts = [bytes_field(2, bytes_field(1, name) + bytes_field(2, half)) for name in "abc"]
    for messages in ([b"".join(parts)], parts):
        with pytest.raises(ConfigError, match="at most 67108864 values over a request"):
            read_data(messages)
    for shape in ([0, 2**63], [2**66, 0], [2**64 - 1], [1] * 3, [0] * 10):
        with pytest.raises(ConfigError, match="at most"):
            read_tensor(zeros(*shape, starts=[0]))
    with pytest.raises(ConfigError, match="a list of more than 16"):
        read_tensor(bytes_field(4, b"\1" * 10**6))


@pytest.mark.parametrize(
    ("name", "value"),
    [("learning_rate", 1e39), ("learning_rate", 1e38), ("weight_decay", 1e308), ("eps", 1e308),
     ("eps", 0), ("eps", 1e-320), ("beta1", 1 - 1e-10), ("beta2", 1 - 1e-12)],
)  # fmt: skip
def test_settings_that_are_infinite_or_0_as_float32_are_refused(base, name, value):
    learner = Learner(base, 2)
    with pytest.raises(ConfigError, match=f"{name}=.*must be from"):
        learner.optim_step(**{name: value})


@pytest.mark.extended
@pytest.mark.skipif(os.geteuid() != 0 if hasattr(os, "geteuid") else True, reason="mounts")
def test_a_full_store_leaves_nothing_behind_and_the_service_goes_on(base, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", disk]).returncode:
        pytest.skip("no file system can be mounted here")
    try:
        with training_server(base, disk / "store") as (url, *_):
            client = Client(url)
            client.create()
            number, saved = 0, {}
            while "error" not in (saved := client.ask("save_weights", path=f"n{number}")):
                number += 1
            # Nearly always "No space left on device"; the libraries have other words too.
            assert number and f"n{number}: it could not be saved: " in saved["error"]
            assert saved["category"] == "server"
            names = sorted(path.name for path in next((disk / "store").iterdir()).rglob("n*"))
            assert [n for n in names if n[1:].isdecimal()] == [f"n{i}" for i in range(number)]
            assert not list((disk / "store").rglob(".partial*"))
            (disk / "rest").write_bytes(b"")
            with open(disk / "rest", "wb", buffering=0) as rest:
                while disk_room(disk):
                    rest.write(b"\0" * disk_room(disk))
            at = f"{url}/api/v1/training_runs/{client.model}/checkpoints/weights/n0"
            answer = httpx.put(f"{at}/ttl", json={"ttl_seconds": 4000})
            assert (
                answer.status_code == 500 and "No space left" in answer.json()["error"]["message"]
            )
            assert client.loss([datum(TEXT[:-1], target_tokens=np.array(TEXT[1:]))]) > 0
            assert HTTP.delete(at).status_code == 200
    finally:
        subprocess.run(["umount", "-l", disk], check=True)


def disk_room(path):
    found = os.statvfs(path)
    return found.f_bavail * found.f_frsize


def test_what_is_no_state_of_the_store_hides_no_other(client, server):
    client.ask("save_weights", path="good")
    kept = server[1].store._directory
    for name, content in {"x y/weights/a": "{}", "b/weights/a": "no", "c/weights/a": "{}"}.items():
        (kept / name).mkdir(parents=True)
        (kept / name / "state.json").write_text(content)
    os.mkfifo(kept / "b/weights/a/FIFO")
    found = client.get("checkpoints").json()["checkpoints"]
    assert [each["checkpoint_id"] for each in found] == ["weights/good"]
    server[1].store.remove_expired()
    for name in ("b", "c"):
        answer = client.raw("weights_info", tinker_path=f"tinker://{name}/weights/a")
        assert answer.status_code == 400
