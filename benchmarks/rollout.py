"""Tokens per second of generation: by slots, by one program for all rows, by other libraries.

Same weights and prompts, float32, this machine's CPU, in turns whose order rotates. hjax has a
simulated device per core, as its training command has (`--devices`). The model is W1's
(`step_hjax.py`) with weights from a seed, or that of `--model=DIR` (stories260K). Workloads:

- `fixed`: 64 prompts of 32 tokens, responses of 64 tokens.
- `tail`: 256 prompts of up to 32 tokens, responses that end by themselves (a draw does with about
  the chance of one in 51) and have at most 256 tokens. The others get 64 at a time, transformers
  also all.
  What ends a response are ten tokens of W1's; of another model those of the rarest that it draws
  which together come as often.
- `samples`: 8 prompts of 512 tokens (as far as the model has positions), 8 responses of 64 tokens
  to each.
- `turns`: 32 conversations of 4 turns at a time. Each begins with the same 64 tokens; a turn adds
  32 of the user's and an answer that ends by itself, of at most 64. `hjax` is the service that
  servers stand on, which keeps what earlier turns computed; each conversation goes on as soon as it
  may. The others answer the same turn of all together, from its first token on.

A rate counts the tokens that were drawn, up to each response's end. Contestants: `hjax`, what
`Generator.generate` does; `static`, all rows in one program until the last has ended;
`transformers`, its `generate` with torch; `tunix`, its sampler, where `--tunix_python` names an
interpreter that has it (`rollout_tunix.py`). Prints one JSON line: by workload the median rates,
and ratios of `hjax` to the others.

    python benchmarks/rollout.py [--only=tail] [--rounds=5] [--no_peer] [--model=DIR]
        [--tunix_python=ENV/bin/python]
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import pathlib
import statistics
import subprocess
import tempfile
import threading
import time
import types
from collections.abc import Callable, Iterator
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # torch's threads, between its turns

import jax
import machine
import numpy as np

from hjax.launch.jax_setup import prepare_devices
from hjax.models.compute import Compute
from hjax.models.export import export_weights
from hjax.models.model_config import ModelConfig
from hjax.models.parameters import decoder_network
from hjax.models.weights import load_params, read_config
from hjax.rollout.generator import Generator
from hjax.rollout.requests import Request, ResponseChunk
from hjax.rollout.rollout_job import GenerationConfig
from hjax.rollout.sampling_params import SamplingParams
from hjax.rollout.service import GenerationService
from hjax.sharding.layout import make_layouts

W1 = ModelConfig(512, 256, 688, 6, 8, 4, 32, 1024)
# Prompts, tokens of the longest, samples, tokens of a response at most, tokens that end one.
WORKLOADS: dict[str, dict[str, Any]] = {
    "fixed": {"prompts": 64, "length": 32, "samples": 1, "limit": 64, "ends": 0, "ragged": False},
    "tail": {"prompts": 256, "length": 32, "samples": 1, "limit": 256, "ends": 1, "ragged": True},
    "samples": {"prompts": 8, "length": 512, "samples": 8, "limit": 64, "ends": 0, "ragged": False},
}
BATCH = 64  # of transformers, of a long tail
TURNS: dict[str, int] = {"talks": 32, "turns": 4, "system": 64, "user": 32, "limit": 64}
SHARE = 10 / 512  # of the tokens that W1's model draws those that end a response


@dataclasses.dataclass(frozen=True)
class Model:
    """What generates.

    Attributes:
      config, params: of it.
      generator: hjax's.
      ends: tokens that end a response, where it is to end by itself.
    """

    config: ModelConfig
    params: Any
    generator: Generator
    ends: tuple[int, ...]

    def tokens(self, rng: np.random.Generator, shape: Any, ending: bool = True) -> np.ndarray:
        """Tokens of prompts; where responses end by themselves none that ends one."""
        every = np.arange(self.config.vocab_size)
        allowed = np.setdiff1d(every, self.ends) if ending else every
        return allowed[rng.integers(0, len(allowed), shape)]


def model_of(path: str | None) -> Model:
    """W1's with weights from a seed, or a directory's."""
    config = W1 if path is None else read_config(path)
    network, layout = decoder_network(config), make_layouts(jax.devices()).generate
    params = network.create(0, layout) if path is None else load_params(path, network, layout)
    generator = Generator(network, layout, Compute(unroll_layers=True))
    if path is None:
        return Model(config, params, generator, tuple(range(10)))
    prompts = np.full((BATCH, 1), 1, np.int32)
    rollout = generator.generate(
        params, prompts, prompts > 0, np.arange(BATCH, dtype=np.int32), GenerationConfig(128),
        seed=0,
    )  # fmt: skip
    times = np.bincount(np.asarray(rollout["responses"]).ravel(), minlength=config.vocab_size)
    rarest = np.argsort(times, kind="stable")
    enough = int(np.searchsorted(np.cumsum(times[rarest]), SHARE * times.sum())) + 1
    return Model(config, params, generator, tuple(rarest[:enough].tolist()))


def prompts_of(model: Model, sizes: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and mask, padded on the left."""
    rng = np.random.default_rng(0)
    longest = min(sizes["length"], model.config.max_length - sizes["limit"])
    shape = sizes["prompts"], longest
    shortest = longest // 4 if sizes["ragged"] else longest
    lengths = rng.integers(shortest, longest + 1, (shape[0], 1))
    mask = np.arange(shape[1]) >= shape[1] - lengths
    tokens = model.tokens(rng, shape, bool(sizes["ends"]))
    return np.where(mask, tokens, 0).astype(np.int32), mask


def hjax_contestants(model: Model, sizes: dict[str, Any]) -> dict[str, Callable[[int], int]]:
    """Functions of a seed that generate, and give how many tokens they drew."""
    tokens, mask = prompts_of(model, sizes)
    generator, ends = model.generator, model.ends if sizes["ends"] else ()
    sequence = np.arange(sizes["prompts"] * sizes["samples"], dtype=np.int32)
    static = Generator(generator.network, generator.layout, generator.compute)
    static._needs_slots = lambda *_: False  # type: ignore[method-assign]

    def run(which: Generator) -> Callable[[int], int]:
        def generate(seed: int) -> int:
            config = GenerationConfig(sizes["limit"], sizes["samples"], SamplingParams(stop=ends))
            rollout = which.generate(model.params, tokens, mask, sequence, config, seed=seed)
            return int(np.asarray(rollout["response_mask"]).sum())

        return generate

    return {"hjax": run(generator), "static": run(static)}


def transformers_contestants(
    ours: Model, path: str, sizes: dict[str, Any]
) -> dict[str, Callable[[int], int]]:
    """The same by transformers, of the directory ``path``."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(machine.cores())
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    tokens, mask = (torch.from_numpy(np.asarray(x, np.int64)) for x in prompts_of(ours, sizes))
    ends = list(ours.ends) if sizes["ends"] else []

    def run(batch: int) -> Callable[[int], int]:
        def generate(seed: int) -> int:
            torch.manual_seed(seed)
            count = 0
            for first in range(0, len(tokens), batch):
                part = slice(first, first + batch)
                with torch.no_grad():
                    out = model.generate(
                        tokens[part], attention_mask=mask[part], do_sample=True, top_k=0,
                        max_new_tokens=sizes["limit"], num_return_sequences=sizes["samples"],
                        eos_token_id=ends or None, pad_token_id=0,
                    )[:, tokens.shape[1] :]  # fmt: skip
                ended = torch.isin(out, torch.tensor(ends, dtype=out.dtype)).int()
                # With its end, if it has one.
                count += int((ended.cumsum(1) - ended == 0).sum())
            return count

        return generate

    if not ends:
        return {"transformers": run(len(tokens))}
    return {"transformers": run(BATCH), "transformers_at_once": run(len(tokens))}


class Tunix:
    """Its sampler, in a process of its own.

    Args:
      python: an interpreter that has it.
      path: of the model's directory.
    """

    def __init__(self, python: str, path: str):
        script = pathlib.Path(__file__).with_name("rollout_tunix.py")
        self._process = subprocess.Popen(
            [os.path.expanduser(python), str(script), path], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip

    def answers(
        self, tokens: np.ndarray, mask: np.ndarray, limit: int, ends: Any, seed: int
    ) -> list[list[int]]:
        """Responses to prompts int32 [batch, length], padded on the left, each up to its end."""
        prompts = [row[kept].tolist() for row, kept in zip(tokens, mask, strict=True)]
        asked = {"prompts": prompts, "length": tokens.shape[1], "limit": limit, "seed": seed}
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(json.dumps(asked | {"ends": list(ends)}) + "\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith("ROLLOUT "):
                found: list[list[int]] = json.loads(line.removeprefix("ROLLOUT "))
                return found
        raise RuntimeError(f"rollout_tunix.py ended with exit status {self._process.wait()}")

    def close(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait(60)


@contextlib.contextmanager
def tunix_of(python: str, path: str) -> Iterator[Tunix | None]:
    """Tunix's sampler of a model's directory; None where no interpreter is named."""
    if not python:
        yield None
        return
    with contextlib.closing(Tunix(python, path)) as tunix:
        yield tunix


def tunix_contestant(
    tunix: Tunix, model: Model, sizes: dict[str, Any]
) -> dict[str, Callable[[int], int]]:
    tokens, mask = (np.repeat(x, sizes["samples"], axis=0) for x in prompts_of(model, sizes))
    ends = model.ends if sizes["ends"] else ()

    def generate(seed: int) -> int:
        count = 0
        for first in range(0, len(tokens), BATCH):
            part = slice(first, first + BATCH)
            found = tunix.answers(
                tokens[part], mask[part], sizes["limit"], ends, seed * len(tokens) + first
            )
            count += sum(map(len, found))
        return count

    return {"tunix": generate}


def user_turns(model: Model) -> np.ndarray:
    """int [conversations, turns, tokens] of users; the first turn has what all begin with."""
    rng = np.random.default_rng(1)
    shape = TURNS["talks"], TURNS["turns"], TURNS["user"]
    return model.tokens(rng, shape)


def system_of(model: Model) -> list[int]:
    """What all conversations begin with."""
    tokens: list[int] = model.tokens(np.random.default_rng(2), TURNS["system"]).tolist()
    return tokens


def together(model: Model, answer: Callable[[np.ndarray, np.ndarray, int], list[list[int]]]) -> Any:
    """A function of a seed that has all conversations turn by turn.

    Args:
      model: whose tokens they are made of.
      answer: gives the answers to prompts int32 [conversations, length], padded on the left, with
        their mask and a seed, each up to its end.
    """

    def run(seed: int) -> int:
        talks = [system_of(model) for _ in range(TURNS["talks"])]
        count = 0
        for turn in range(TURNS["turns"]):
            for talk, users in zip(talks, user_turns(model), strict=True):
                talk += users[turn].tolist()
            # Few lengths, so that few programs are compiled.
            length = -(-max(map(len, talks)) // 64) * 64
            mask = np.arange(length) >= length - np.array([len(talk) for talk in talks])[:, None]
            tokens = np.zeros(mask.shape, np.int32)
            for row, talk in zip(tokens, talks, strict=True):
                row[length - len(talk) :] = talk
            found = answer(tokens, mask, seed * TURNS["turns"] + turn)
            for talk, new in zip(talks, found, strict=True):
                talk += new
                count += len(new)
        return count

    return run


def served_talks(model: Model, service: GenerationService) -> Callable[[int], int]:
    """A function of a seed that has the conversations by a service, each at its own pace."""

    def run(seed: int) -> int:
        users, options = user_turns(model), SamplingParams(stop=model.ends)
        talks = [system_of(model) for _ in users]
        left, drawn, failed = threading.Semaphore(0), [0] * len(users), []

        def go_on(number: int, turn: int) -> None:
            talks[number] += users[number, turn].tolist()
            asked = seed * len(users) * TURNS["turns"] + number * TURNS["turns"] + turn
            request = Request(tuple(talks[number]), TURNS["limit"], options, asked)

            def hear(piece: ResponseChunk) -> None:
                talks[number] += piece.tokens
                drawn[number] += len(piece.tokens)
                if piece.finish and piece.finish not in ("stop", "length"):
                    failed.append(piece.finish)
                if piece.finish and (failed or turn + 1 == TURNS["turns"]):
                    left.release()
                elif piece.finish:
                    go_on(number, turn + 1)

            service.submit(request, hear)

        for number in range(len(users)):
            go_on(number, 0)
        for _ in users:
            left.acquire()
        if failed:
            raise RuntimeError(failed[0])
        return sum(drawn)

    return run


def talking_contestants(
    ours: Model, path: str | None, tunix: Tunix | None
) -> dict[str, Callable[[int], int]]:
    """Of `turns`; ``path`` is the model's for transformers, None: without."""
    generator, params, ends = ours.generator, ours.params, ours.ends
    one = make_layouts(jax.devices()[:1]).generate
    serving = Generator(generator.network, one, generator.compute)
    model: Any = types.SimpleNamespace(
        config=ours.config, params=generator.network.place(params, one), tokenizer=None,
        engine_for=serving.engine_for,
    )  # fmt: skip
    static = Generator(generator.network, generator.layout, generator.compute)
    static._needs_slots = lambda *_: False  # type: ignore[method-assign]

    def by_program(tokens: np.ndarray, mask: np.ndarray, seed: int) -> list[list[int]]:
        rollout = static.generate(
            params, tokens, mask, np.arange(len(tokens), dtype=np.int32),
            GenerationConfig(TURNS["limit"], sampling=SamplingParams(stop=ends)), seed=seed,
        )  # fmt: skip
        kept = np.asarray(rollout["response_mask"])
        rows = zip(np.asarray(rollout["responses"]), kept, strict=True)
        return [row[mask].tolist() for row, mask in rows]

    service = GenerationService(model, slots=TURNS["talks"])
    service.warm_up()
    made = {"hjax": served_talks(ours, service), "static": together(ours, by_program)}
    if tunix is not None:

        def by_tunix(tokens: np.ndarray, mask: np.ndarray, seed: int) -> list[list[int]]:
            return tunix.answers(tokens, mask, TURNS["limit"], ends, seed)

        made["tunix"] = together(ours, by_tunix)
    if path is None:
        return made
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(machine.cores())
    peer = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()

    def by_transformers(tokens: np.ndarray, mask: np.ndarray, seed: int) -> list[list[int]]:
        torch.manual_seed(seed)
        ids, seen = (torch.from_numpy(np.asarray(x, np.int64)) for x in (tokens, mask))
        with torch.no_grad():
            out = peer.generate(
                ids, attention_mask=seen, do_sample=True, top_k=0, max_new_tokens=TURNS["limit"],
                eos_token_id=list(ends), pad_token_id=0,
            )[:, ids.shape[1] :].numpy()  # fmt: skip
        ended = np.isin(out, ends).astype(int)
        return [row[kept].tolist() for row, kept in zip(out, ended.cumsum(1) - ended == 0)]

    return made | {"transformers": together(ours, by_transformers)}


def measure(
    contestants: dict[str, Callable[[int], int]], rounds: int, warm: bool = False
) -> dict[str, Any]:
    """Median tokens per second of each, and ratios; ``warm``: after all rounds once, unmeasured."""
    names = list(contestants)
    first = {}
    for name in names:  # compile
        start = time.perf_counter()
        contestants[name](0)
        first[name] = time.perf_counter() - start
        for turn in range(rounds if warm else 0):  # sizes follow from what is drawn
            contestants[name](1 + turn)
    rates: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds):
        order = names[turn % len(names) :] + names[: turn % len(names)]
        for name in order[:: -1 if turn % 2 else 1]:  # none always follows the same one
            start = time.perf_counter()
            tokens = contestants[name](1 + turn)
            rates[name].append(tokens / (time.perf_counter() - start))
    medians = {name: statistics.median(found) for name, found in rates.items()}
    return {
        "tokens_per_second": {name: round(rate, 1) for name, rate in medians.items()},
        "ratios": {
            name: round(medians["hjax"] / rate, 2)
            for name, rate in medians.items()
            if name != "hjax"
        },
        "first_call_seconds": {name: round(seconds, 1) for name, seconds in first.items()},
    }


def main() -> None:
    """Measure, and print the line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", choices=(*WORKLOADS, "turns"), help="one workload")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each contestant")
    parser.add_argument("--no_peer", action="store_true", help="without transformers")
    parser.add_argument("--model", help="a Hugging Face directory, instead of W1's model")
    parser.add_argument("--tunix_python", default="", help="interpreter of Tunix's environment")
    parser.add_argument("--devices", type=int, default=machine.cores(), help="that hjax simulates")
    args = parser.parse_args()
    prepare_devices(args.devices)
    use = machine.CoreUse()
    model = model_of(args.model)
    figures = {}
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        path = args.model or str(export_weights(f"{folder}/model", W1, model.params))
        tunix = stack.enter_context(tunix_of(args.tunix_python, path))
        for name in [args.only] if args.only else (*WORKLOADS, "turns"):
            if name == "turns":
                peer = None if args.no_peer else path
                talking = talking_contestants(model, peer, tunix)
                figures[name] = measure(talking, args.rounds, warm=True)
                continue
            contestants = hjax_contestants(model, WORKLOADS[name])
            if not args.no_peer:
                contestants |= transformers_contestants(model, path, WORKLOADS[name])
            if tunix is not None:
                contestants |= tunix_contestant(tunix, model, WORKLOADS[name])
            figures[name] = measure(contestants, args.rounds)
    line = {
        "benchmark": "rollout",
        "model": args.model or "W1",
        **figures,
        "rounds": args.rounds,
        "devices": args.devices,
        **use.read(),
        **machine.describe(),
        **machine.versions("jax", "jaxlib", "torch", "transformers"),
    }
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
