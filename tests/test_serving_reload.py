"""`POST /admin/reload`: a server goes on with the weights that are where its own came from."""

import concurrent.futures
import dataclasses
import json
import pathlib
import shutil
import threading

import openai
import pytest
from helpers import save_model
from serving_double import HTTP, Scripted, byte_tokenizer, served

import hjax
from hjax.errors import ConfigError, RunError
from hjax.models.checkpoint import write_state
from hjax.models.weights import load_decoder
from hjax.rollout.service import GenerationService
from hjax.serving.reload import WeightReload

pytestmark = pytest.mark.extended  # one engine serves them all, and is made first

PROMPT = list(b"The beginning of a text.")
KEY = "sesame"


@dataclasses.dataclass(frozen=True)
class Saved:
    """A model of other weights than the others', and what it answers without a server."""

    path: pathlib.Path
    answer: list[int]

    def put(self, path):
        """In the place of whatever is there."""
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(self.path, path)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder, made, program = tmp_path_factory.mktemp("models"), [], None
    for seed in (1, 2):
        path = folder / f"{seed}"
        save_model(path, seed, byte_tokenizer(), vocab_size=260, max_length=128)
        program = program or hjax.load_model(path)
        program.params = hjax.load_model(path).params
        [answer] = program.generate([PROMPT], 8, temperature=0)
        made.append(Saved(path, answer.tokens))
    assert made[0].answer != made[1].answer
    return made


class Serving:
    def __init__(self, path):
        self.model = hjax.load_model(path)
        self.service = GenerationService(self.model, slots=2)
        reload = WeightReload(self.model, self.service)
        self._served = served(self.service, key=KEY, reload=reload)

    def __enter__(self):
        self.url, _, _ = self._served.__enter__()
        self._client = openai.OpenAI(base_url=f"{self.url}/v1", api_key=KEY, max_retries=0)
        return self

    def __exit__(self, *error):
        self._client.close()
        self._served.__exit__(*error)

    def answer(self):
        found = self._client.completions.create(
            model="bytes", prompt=PROMPT, max_tokens=8, temperature=0,
            extra_body={"return_token_ids": True},
        )  # fmt: skip
        return found.choices[0].token_ids

    def ask(self, body=None, key=KEY):
        headers = {"Authorization": f"Bearer {key}"}
        return HTTP.post(f"{self.url}/admin/reload", json=body, headers=headers)

    def figure(self, name):
        text = HTTP.get(f"{self.url}/metrics", headers={"Authorization": f"Bearer {KEY}"}).text
        [line] = [line for line in text.splitlines() if line.startswith(f"{name} ")]
        return float(line.split()[1])


@pytest.mark.extended
def test_a_directory_that_is_overwritten(models, tmp_path):
    path, (old, new) = tmp_path / "model", models
    old.put(path)
    with Serving(path) as server:
        assert server.answer() == old.answer
        new.put(path)
        assert server.answer() == old.answer
        assert server.ask(key="other").status_code == 401 and server.answer() == old.answer
        said = server.ask()
        assert said.status_code == 200 and said.json()["reloaded"] is True
        assert set(said.json()) == {"reloaded", "seconds"}
        assert server.answer() == new.answer and server.figure("hjax_reloads_total") == 1

        def wider():
            content = json.loads((path / "config.json").read_text())
            (path / "config.json").write_text(json.dumps(content | {"intermediate_size": 65}))

        for change, line in [
            (wider, "its mlp_size is 65 now and was 64"),
            (lambda: (path / "model.safetensors").write_bytes(b"x"), "not a readable safetensors"),
            (lambda: shutil.rmtree(path), "no model directory"),
        ]:
            old.put(path)
            change()
            refused = server.ask()
            message = refused.json()["error"]["message"]
            assert refused.status_code == 422 and line in message and "\n" not in message
            assert message.endswith("; the old weights go on") and server.answer() == new.answer
        assert server.figure("hjax_reloads_total") == 1


def test_a_workdirs_newest_checkpoint(models, tmp_path):
    workdir, (old, new) = tmp_path / "run", models
    shutil.copytree(old.path, workdir / "model")
    (workdir / "config.json").write_text(json.dumps({"actor": {"path": ""}}))

    def save(step, model):
        folder = workdir / "checkpoints" / f"{step}"
        write_state(folder, {"actor.params": load_decoder(model.path)[1]})()

    save(9, old)
    with Serving(workdir) as server:
        assert server.answer() == old.answer
        save(10, new)
        assert server.ask({}).json()["checkpoint"] == 10
        assert server.answer() == new.answer


def test_one_at_a_time_and_others_are_answered_while_it_reads(models, monkeypatch):
    [model, _] = models
    with Serving(model.path) as server, concurrent.futures.ThreadPoolExecutor() as pool:
        reading, go_on, given = threading.Event(), threading.Event(), []
        read, replace = server.model.reread_weights, server.service.replace

        def slowly():
            reading.set()
            assert go_on.wait(60)
            return read()

        monkeypatch.setattr(server.model, "reread_weights", slowly)
        first = pool.submit(server.ask, {"seconds": 60})
        assert reading.wait(60)
        second = server.ask()
        assert second.status_code == 409
        assert "being read already" in second.json()["error"]["message"]
        assert server.answer() == model.answer
        monkeypatch.setattr(server.service, "replace", lambda *a: given.append(a[1]) or replace(*a))
        go_on.set()
        assert first.result().status_code == 200 and given == [60]

        for body, line in [({"path": "/etc"}, "path: not supported"), ({"seconds": -1}, "-1")]:
            answer = server.ask(body)
            assert answer.status_code == 400 and line in answer.json()["error"]["message"]
        for error, status in [
            (RunError("running requests did not end within 60 s"), 503),
            (ConfigError("embedding differs"), 422),
            (MemoryError("no\nroom"), 500),
        ]:

            def fails(*_, raised=error):
                raise raised

            monkeypatch.setattr(server.service, "replace", fails)
            answer = server.ask()
            message = answer.json()["error"]["message"]
            assert answer.status_code == status and "\n" not in message
            assert " ".join(str(error).split()) in message
        assert server.figure("hjax_reloads_total") == 1


def test_without_the_flag_there_is_no_such_path():
    with served(Scripted(lambda request: [])) as (url, _, _):
        assert HTTP.post(f"{url}/admin/reload").status_code == 404
