"""A training service in a thread, and a client that speaks its wire by hand."""

import asyncio
import contextlib
import os
import subprocess
import sys
import threading

import httpx
import numpy as np
from serving_double import HTTP

from hjax.serving.address import address_of, bind
from hjax.serving.limits import ServerLimits
from hjax.serving.server import HttpServer
from hjax.training_service.protobuf import bytes_field, double_field, int_field, last_fields
from hjax.training_service.state_store import StateStore
from hjax.training_service.tinker_app import make_tinker_app
from hjax.training_service.tinker_service import TinkerLimits, TinkerService

DTYPES = {"float32": 1, "int64": 2, "int32": 3}


@contextlib.contextmanager
def training_server(
    base, store, *, limits=TinkerLimits(), http=ServerLimits(), key="", names=("tiny",)
):
    """URL and service of a server on a free port, and its loop; stopped at the end."""
    bound = bind("127.0.0.1", 0)
    up, made = threading.Event(), []

    async def serve():
        service = TinkerService(base, names, StateStore(store), limits)
        # The base outlives the server: other tests use it.
        app = make_tinker_app(service, http, key)
        server = HttpServer(app, service._queue.close, bound, http, up.set)
        made.extend([service, server, asyncio.get_running_loop()])
        await server.serve()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    try:
        assert up.wait(20)
        yield f"http://{address_of(bound)}", made[0], made[2]
    finally:
        made[2].call_soon_threadsafe(made[1].stop)
        thread.join(30)
        assert not thread.is_alive()


@contextlib.contextmanager
def command(folder, store, flags=()):
    """`python -m hjax.launch.serve --protocol=tinker`, and its URL."""
    process = subprocess.Popen(
        [
            sys.executable, "-m", "hjax.launch.serve", "--protocol=tinker", f"--model={folder}",
            f"--store={store}", "--name=tiny", "--port=0", *flags,
        ],
        stdout=subprocess.PIPE, text=True, env=os.environ,
    )  # fmt: skip
    try:
        line = process.stdout.readline()
        start, _, url = line.rstrip("\n").rpartition(" on ")
        assert start == f"serving {folder}"
        yield url, process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def tensor(values):
    """A dense tensor's message."""
    values = np.asarray(values)
    if values.dtype == np.float64:
        values = values.astype(np.float32)
    made = bytes_field(1, values.tobytes()) + int_field(3, DTYPES[str(values.dtype)])
    return made + b"".join(int_field(4, size) for size in values.shape)


def datum(tokens, **inputs):
    """A datum's message."""
    text = bytes_field(1, np.asarray(tokens, np.int32).tobytes())
    made = bytes_field(1, bytes_field(1, text))
    for name, values in inputs.items():
        made += bytes_field(2, bytes_field(1, name) + bytes_field(2, tensor(values)))
    return made


def forward_backward_body(model, seq, data, loss="cross_entropy"):
    """A request's message without settings of the loss."""
    body = bytes_field(1, model) + int_field(2, seq)
    return body + b"".join(bytes_field(3, each) for each in data) + bytes_field(4, loss)


class Client:
    """A session with one model.

    Args:
      url: of the server.
      key: that it asks for.
    """

    def __init__(self, url, key=""):
        self.url, self.headers = url, {"X-API-Key": key} if key else {}
        self.seq = 0
        self.session = self.post("create_session", sdk_version="0.38.0", tags=[])["session_id"]

    def raw(self, path, /, content=None, **fields):
        """The response to a POST."""
        more = {"content": content} if content is not None else {"json": fields}
        url = f"{self.url}/api/v1/{path}"
        return HTTP.post(url, headers=self.headers, timeout=60, **more)

    def post(self, path, /, **fields):
        answer = self.raw(path, **fields)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def get(self, path):
        return HTTP.get(f"{self.url}/api/v1/{path}", headers=self.headers)

    def result(self, request_id):
        """A future's result: fields of JSON, or bytes; asks again at 408."""
        while (answer := self.raw("retrieve_future", request_id=request_id)).status_code == 408:
            pass
        assert answer.status_code == 200, answer.text
        protobuf = answer.headers["content-type"] == "application/x-protobuf"
        return answer.content if protobuf else answer.json()

    def ask(self, path, /, **fields):
        """Submit a request of the model, and wait for its result."""
        self.seq += 1
        fields = {"model_id": self.model, "seq_id": self.seq} | fields
        return self.result(self.post(path, **fields)["request_id"])

    def create(self, number=0, **lora):
        """Make the model."""
        made = self.post(
            "create_model", session_id=self.session, model_seq_id=number, base_model="tiny",
            lora_config={"rank": 2, "seed": 3} | lora,
        )  # fmt: skip
        found = self.result(made["request_id"])
        self.model = found.get("model_id", "")
        return found

    def submit(self, data, loss="cross_entropy", seq=None, forward=False, config=()):
        """Submit data's messages; the future's id."""
        if seq is None:
            self.seq += 1
            seq = self.seq
        body = forward_backward_body(self.model, seq, data, loss)
        body += int_field(6, 1) if forward else b""
        for name, value in dict(config).items():
            body += bytes_field(7, bytes_field(1, name) + bytes_field(2, double_field(1, value)))
        answer = self.raw("forward_backward", content=body)
        assert answer.status_code == 200, answer.text
        return answer.json()["request_id"]

    def loss(self, data, *given, **more):
        """The sum of a loss; a failed request's error."""
        found = self.result(self.submit(data, *given, **more))
        if isinstance(found, dict):
            return found["error"]
        metric = last_fields(last_fields(found)[3])
        assert metric[1] == b"loss:sum"
        return metric[2]

    def step(self, **adam):
        return self.ask("optim_step", adam_params=adam)["metrics"]


def closed(url):
    """Whether nothing answers there."""
    with contextlib.suppress(httpx.TransportError):
        HTTP.get(f"{url}/api/v1/healthz")
        return False
    return True
