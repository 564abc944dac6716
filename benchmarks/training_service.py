"""The training service beside the trainer's own update and OpenAI's server, in one process.

The model is W1's (`step_hjax.py`) with weights from a seed; 64 rows of a prompt of 32 tokens and a
response of 64, float32, on one CPU device. Prints one JSON line.

- `update`: `forward_backward` (PPO's loss) and `optim_step` by HTTP, adapters of rank 8, over the
  update of a run's actor on the same tokens with the same adapters (padded rows, prompts not
  shared).
- `forward_backward`: the first call alone over the same update, which has its optimizer step too.
- `sampling`: the tokens per second of 64 responses of 64 tokens of the same model by `asample`,
  over those of `/v1/completions`; both have 16 slots, and 64 requests are there at once.
  `sampling_adapters`: of a model with adapters, which are not merged.

Seconds are processor time of the process, clients included, so that what else the machine does
counts little; `wall` has ratios of elapsed time. Medians over rounds, contestants in turn.

    python benchmarks/training_service.py [--rounds=7] [--soak]

`--soak` instead: a server of its own, and in every round 20 sessions with 30 requests each (passes,
steps, samples), all of which are polled at once; ten sessions vanish then, their connections cut,
and ten fetch everything and finish. `in_flight` has the requests without a result when the last of
the 600 was submitted; `resident` (MiB), `descriptors` and `threads` are the server's once the
silent sessions have ended, after each round.
"""

from __future__ import annotations

import argparse
import asyncio
import concurrent.futures
import contextlib
import dataclasses
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import machine
import numpy as np
from train import CLIP, make_batch, write_weights

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "tests"))
RANK, RESPONSE, SLOTS = 8, 64, 16
# Of the soak: sessions at a time, steps of each, passes of a step, and seconds without a heartbeat
# after which a session ends.
SESSIONS, STEPS, PASSES, SILENT = 20, 6, 3, 30


def trainer_update(batch: dict[str, np.ndarray], folder: str) -> Callable[[], None]:
    """One update of a run's actor with adapters."""
    import jax

    from hjax.algorithms.losses import PolicyLoss
    from hjax.controller import ResourcePool, WorkerGroup
    from hjax.models.compute import Compute
    from hjax.models.lora import ALL, Lora, targets_of
    from hjax.models.weights import read_config
    from hjax.sharding.layout import make_layouts
    from hjax.workers import Actor, OptimizerConfig, WorkerContext

    lora = Lora(RANK, 32.0, targets_of((ALL,), False))
    context = WorkerContext(
        role="actor",
        layouts=make_layouts(jax.devices()[:1]),
        model=dataclasses.replace(read_config(folder), lora=lora),
        path=folder,
        samples=1,
        max_response_length=RESPONSE,
        loss=PolicyLoss(clip_low=CLIP, clip_high=CLIP),
        optimizer=OptimizerConfig(1e-5, weight_decay=0.01),
        packing=0,
        compute=Compute(unroll_layers=True),
    )
    group = WorkerGroup(ResourcePool("all", jax.devices()[:1]), Actor, context, role="actor")
    group.initialize().result()

    def update() -> None:
        group.update_actor(batch).result()
        jax.block_until_ready(group.worker.params)

    return update


def messages(batch: dict[str, np.ndarray]) -> list[bytes]:
    """The batch as the service's data: each token's target is the next one."""
    from training_server import datum  # type: ignore[import-not-found]

    made = []
    for prompt, response, old, advantages in zip(
        batch["prompts"], batch["responses"], batch["old_logprobs"], batch["advantages"]
    ):
        tokens = np.concatenate([prompt, response])
        before = np.zeros(len(prompt) - 1, np.float32)
        made.append(
            datum(
                tokens[:-1],
                target_tokens=tokens[1:],
                logprobs=np.concatenate([before, old]),
                advantages=np.concatenate([before, advantages]),
            )
        )
    return made


def completions(
    folder: str, prompts: list[list[int]]
) -> tuple[Callable[[], int], Callable[[], None]]:
    """What asks OpenAI's server for all responses and counts their tokens, and what stops it."""
    from serving_double import HTTP  # type: ignore[import-not-found]

    from hjax.rollout.language_model import load_model
    from hjax.rollout.service import GenerationService
    from hjax.serving.address import address_of, bind
    from hjax.serving.limits import ServerLimits
    from hjax.serving.served_model import ServedModel
    from hjax.serving.server import Server

    model = load_model(folder)
    service = GenerationService(model, SLOTS)
    served = ServedModel("w1", service, None, model.config.vocab_size, model.eos_ids)
    bound, up = bind("127.0.0.1", 0), threading.Event()
    made: list[Any] = []

    async def serve() -> None:
        made.extend([Server(served, bound, ServerLimits(), "", up.set), asyncio.get_running_loop()])
        await made[0].serve()

    threading.Thread(target=lambda: asyncio.run(serve()), daemon=True).start()
    assert up.wait(30)
    url = f"http://{address_of(bound)}/v1/completions"

    def ask(index: int) -> int:
        body = {"model": "w1", "prompt": prompts[index], "max_tokens": RESPONSE, "seed": index}
        answer = HTTP.post(url, json=body, timeout=300)
        assert answer.status_code == 200, answer.text
        return int(answer.json()["usage"]["completion_tokens"])

    def run() -> int:
        with concurrent.futures.ThreadPoolExecutor(len(prompts)) as pool:
            return sum(pool.map(ask, range(len(prompts))))

    return run, lambda: made[1].call_soon_threadsafe(made[0].stop)


def samples(client: Any, prompts: list[list[int]], number: int, **model: str) -> Callable[[], int]:
    """What asks the training service for the same number of responses and counts their tokens."""
    sampler = client.post(
        "create_sampling_session", session_id=client.session, sampling_session_seq_id=number,
        **model,
    )["sampling_session_id"]  # fmt: skip
    counter = iter(range(10**9))

    def ask(index: int) -> int:
        chunk = {"type": "encoded_text", "tokens": prompts[index]}
        made = client.post(
            "asample", sampling_session_id=sampler, seq_id=next(counter), num_samples=1,
            prompt={"chunks": [chunk]},
            sampling_params={"max_tokens": RESPONSE, "seed": index, "stop": []},
        )  # fmt: skip
        client.result(made["request_id"])
        return RESPONSE  # nothing stops a response

    def run() -> int:
        with concurrent.futures.ThreadPoolExecutor(len(prompts)) as pool:
            return sum(pool.map(ask, range(len(prompts))))

    return run


def compare(calls: dict[str, Callable[[], Any]], rounds: int) -> dict[str, dict[str, float]]:
    """Median seconds of each call, of the process and elapsed, after two that do not count."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
    names = list(calls)
    for each in range(rounds + 2):
        for name in names[each % len(names) :] + names[: each % len(names)]:
            start = time.process_time(), time.perf_counter()
            calls[name]()
            if each >= 2:
                spent = time.process_time() - start[0], time.perf_counter() - start[1]
                found[name].append(spent)
    return {
        name: {
            "processor": statistics.median(x for x, _ in times),
            "elapsed": statistics.median(x for _, x in times),
        }
        for name, times in found.items()
    }


@contextlib.contextmanager
def served(folder: str) -> Iterator[tuple[str, int]]:
    """URL and process id of a server of its own."""
    process = subprocess.Popen(
        [
            sys.executable, "-m", "hjax.launch.serve", "--protocol=tinker", f"--model={folder}",
            "--name=tiny", "--port=0", f"--session_seconds={SILENT}",
        ],
        stdout=subprocess.PIPE, text=True, env=os.environ,
    )  # fmt: skip
    assert process.stdout is not None
    try:
        yield process.stdout.readline().rstrip("\n").rpartition(" on ")[2], process.pid
    finally:
        process.terminate()
        process.wait()
        process.stdout.close()


class Visitor:
    """A session whose requests are all in flight at once: passes of data, steps, samples."""

    def __init__(self, url: str, data: list[bytes], prompt: list[int]):
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        self._http = httpx.AsyncClient(base_url=f"{url}/api/v1/", limits=limits, timeout=300)
        self._data, self._prompt = data, prompt
        self.session, self._model, self._number = "", "", 0
        self.polls: list[asyncio.Task[None]] = []
        self._beating: asyncio.Task[None]

    async def _post(self, path: str, **fields: Any) -> Any:
        answer = await self._http.post(path, json=fields)
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def _result(self, request_id: str) -> httpx.Response:
        while True:
            answer = await self._http.post("retrieve_future", json={"request_id": request_id})
            if answer.status_code != 408:
                assert answer.status_code == 200 and b'"error"' not in answer.content, answer.text
                return answer

    async def open(self, seed: int) -> None:
        """Open the session, and make its model."""
        made = await self._post("create_session", sdk_version="0.38.0", tags=[])
        self.session = made["session_id"]
        self._beating = asyncio.create_task(self._beat())
        made = await self._post(
            "create_model", session_id=self.session, model_seq_id=0, base_model="tiny",
            lora_config={"rank": RANK, "seed": seed},
        )  # fmt: skip
        self._model = (await self._result(made["request_id"])).json()["model_id"]

    async def submit(self) -> None:
        """Submit all requests, and wait for each in a task."""
        from training_server import forward_backward_body

        sampler = f"{self.session}:sample:0"
        made = await self._ask("save_weights_for_sampler", sampling_session_seq_id=0)
        await self._result(made)
        for step in range(STEPS):
            for _ in range(PASSES):
                self._number += 1
                body = forward_backward_body(self._model, self._number, self._data, "ppo")
                answer = await self._http.post("forward_backward", content=body)
                self._poll(answer.json()["request_id"])
            self._poll(await self._ask("optim_step", adam_params={"learning_rate": 1e-5}))
            asked = await self._post(
                "asample", sampling_session_id=sampler, seq_id=step, num_samples=1,
                prompt={"chunks": [{"type": "encoded_text", "tokens": self._prompt}]},
                sampling_params={"max_tokens": RESPONSE, "seed": step, "stop": []},
            )  # fmt: skip
            self._poll(asked["request_id"])

    async def _ask(self, path: str, **fields: Any) -> str:
        self._number += 1
        made = await self._post(path, model_id=self._model, seq_id=self._number, **fields)
        return str(made["request_id"])

    def _poll(self, request_id: str) -> None:
        async def wait() -> None:
            await self._result(request_id)

        self.polls.append(asyncio.create_task(wait()))

    async def end(self, vanishes: bool) -> None:
        """Cut all connections, or fetch all results and finish the session."""
        if vanishes:
            self._beating.cancel()
            for poll in self.polls:
                poll.cancel()
            await asyncio.gather(self._beating, *self.polls, return_exceptions=True)
        else:
            await asyncio.gather(*self.polls)
            self._beating.cancel()
            await self._post(f"sessions/{self.session}/finish", reason={"type": "success"})
        await self._http.aclose()

    async def _beat(self) -> None:
        while True:
            await self._post("session_heartbeat", session_id=self.session)
            await asyncio.sleep(SILENT / 4)


async def soak_round(url: str, data: list[bytes], prompt: list[int]) -> int:
    """One round; returns the requests that were in flight once all had been submitted."""
    visitors = [Visitor(url, data, prompt) for _ in range(SESSIONS)]
    await asyncio.gather(*(each.open(seed) for seed, each in enumerate(visitors)))
    await asyncio.gather(*(each.submit() for each in visitors))
    pending = sum(not poll.done() for each in visitors for poll in each.polls)
    await asyncio.gather(*(each.end(number % 2 == 0) for number, each in enumerate(visitors)))
    async with httpx.AsyncClient(base_url=f"{url}/api/v1/", timeout=60) as http:
        for each in visitors:
            while (await http.get(f"sessions/{each.session}")).status_code == 200:
                await asyncio.sleep(1)
    await asyncio.sleep(3)  # what ran then has ended
    return pending


def soak(rounds: int) -> dict[str, Any]:
    """In flight, and what the server's process has after each round."""
    found: dict[str, Any] = {"in_flight": [], "resident": [], "descriptors": [], "threads": []}
    with tempfile.TemporaryDirectory() as folder:
        write_weights("w1", folder)
        batch = make_batch("w1", "full")
        data, prompt = messages(batch)[:1], [int(x) for x in batch["prompts"][0]]
        with served(folder) as (url, pid):
            for _ in range(rounds):
                found["in_flight"].append(asyncio.run(soak_round(url, data, prompt)))
                process = pathlib.Path(f"/proc/{pid}")
                text = (process / "status").read_text()
                lines = (line.split(":", 1) for line in text.splitlines())
                status = {name: value.split() for name, value in lines}
                found["resident"].append(int(status["VmRSS"][0]) // 1024)
                found["threads"].append(int(status["Threads"][0]))
                found["descriptors"].append(len(list((process / "fd").iterdir())))
    return found


def main() -> None:
    """Measures, and prints the line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--soak", action="store_true")
    args = parser.parse_args()
    line = soak(args.rounds) if args.soak else speed(args.rounds)
    print(json.dumps({**line, **machine.describe()}))


def speed(rounds: int) -> dict[str, Any]:
    """The ratios, and the seconds that they are of."""
    from training_server import Client, training_server

    from hjax.training_service.shared_base import SharedBase

    with tempfile.TemporaryDirectory() as folder:
        write_weights("w1", folder)
        batch = make_batch("w1", "full")
        prompts = [[int(x) for x in prompt] for prompt in batch["prompts"]]
        base = SharedBase(folder, slots=SLOTS)
        with training_server(base, pathlib.Path(folder) / "store") as (url, _, _):
            client = Client(url)
            client.create(rank=RANK)
            data = messages(batch)
            spent: list[tuple[float, float]] = []

            def service_update() -> None:
                start = time.process_time(), time.perf_counter()
                client.loss(data, "ppo")
                spent.append((time.process_time() - start[0], time.perf_counter() - start[1]))
                client.step(learning_rate=1e-5)

            update = trainer_update(batch, folder)
            updates = compare({"service": service_update, "trainer": update}, rounds)
            ask, stop = completions(folder, prompts)
            path = client.ask("save_weights_for_sampler", path="start")["path"]
            calls = {
                "asample": samples(client, prompts, 1, base_model="tiny"),
                "asample_adapters": samples(client, prompts, 2, model_path=path),
                "completions": ask,
            }
            drawn = compare(calls, rounds)
            stop()
        base.close()
    first = [statistics.median(each) for each in zip(*spent[2:])]
    ratios = {}
    for at, kind in enumerate(("processor", "elapsed")):
        trainer = updates["trainer"][kind]
        ratios[kind] = {
            "update": round(updates["service"][kind] / trainer, 3),
            "forward_backward": round(first[at] / trainer, 3),
            "sampling": round(drawn["completions"][kind] / drawn["asample"][kind], 3),
            "sampling_adapters": round(
                drawn["completions"][kind] / drawn["asample_adapters"][kind], 3
            ),
        }
    return {"ratios": ratios["processor"], "wall": ratios["elapsed"], **updates, **drawn}


if __name__ == "__main__":
    main()
