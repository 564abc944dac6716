"""Training on an environment that misbehaves: are faults counted, does the run go on, does it leak?

A tiny run of GRPO plays the built-in maze. About every fourth group of episodes has a fault, one of
`FAULTS`: its environment hangs, answers late, stops itself, crashes, exits, writes garbage to its
output or to every descriptor, answers things of wrong types, raises, eats memory, forks, or
misbehaves in reset or close. Within a group a fault depends on what the policy did, so some of its
episodes are sound. Environments write down every fault as they commit it, apart from the run; those
that end their process do so twice, as an episode is lost with its second process.

Every 25 steps, after a checkpoint, a line goes to the log: what the run's metrics have counted so
far, and the memory, threads, descriptors and descendants of the process that trains, now and the
most after any of the 25 steps. The last line is a summary: each
fault with the ways in which its episodes ended, those that ended otherwise than `FAULTS` says
(`wrong`, 0 is right), faults committed beside faults counted, and by how much memory and the others
grew from step 50 to the end. The summary is printed too.

    python benchmarks/episode_faults.py [--steps=500] [--log=benchmarks/episode_faults.jsonl]
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import io
import json
import os
import pathlib
import random
import signal
import sys
import tempfile
import time
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hjax.environments.environment import Observation, Step
from hjax.environments.maze import Maze

# How an episode with each fault ends; None: it plays on to its own end.
FAULTS: dict[str, str | None] = {
    "hang": "timeout",
    "late answer": "timeout",
    "stopped by a signal": "timeout",
    "crash": "killed",
    "os._exit": "killed",
    "garbage to every descriptor": "killed",
    "sys.exit": "exception",
    "raise": "exception",
    "step returns None": "exception",
    "metric of a wrong type": "exception",
    "observation of 2 MiB": "exception",
    "eats memory": "exception",
    "raise in reset": "exception",
    "reset returns text": "exception",
    "os._exit in reset": "killed",
    "hang in reset": "timeout",
    "garbage to its output": None,
    "fork of a child that stays": None,
    "fork that returns twice": None,
    "raise in close": None,
    "os._exit in close": None,
    "hang in close": None,
}
IN_RESET = [name for name in FAULTS if "reset" in name]
IN_CLOSE = [name for name in FAULTS if "close" in name]
# Of groups of episodes, the share that has a fault.
SHARE = 0.25
STEP_SECONDS, MEMORY_GIB = 0.5, 0.25
FAULT_TURN = 2  # so that others of the process have something to play again
COMMITTED = "HJAX_COMMITTED_FAULTS"  # environment variable: the file that they are written to
FLAT_FROM, EVERY = 50, 25
FLAT = "rss_mib", "threads", "descriptors", "descendants"


def fault_of_seed(seed: int) -> str | None:
    """The fault of a group of episodes; None: it has none."""
    drawn = random.Random(seed)
    return drawn.choice(list(FAULTS)) if drawn.random() < SHARE else None


def acts_up(action: str) -> bool:
    """Whether an episode of a group with a fault has it, by what the policy said."""
    return zlib.crc32(action.encode()) % 2 == 0


class FaultyMaze(Maze):
    """A maze whose environment misbehaves in some episodes."""

    def reset(self, task: Mapping[str, Any], seed: int) -> Observation:
        self.turn, self.fault, self.has_it = 0, fault_of_seed(seed), False
        first = super().reset(task, seed)
        if self.fault in IN_RESET:
            return commit(self.fault) or first
        return first

    def step(self, action: str) -> Step:
        self.turn += 1
        if self.turn == FAULT_TURN:
            self.has_it = acts_up(action)
            if self.has_it and self.fault and self.fault not in IN_CLOSE:
                answer = commit(self.fault)
                if answer is not None or self.fault == "step returns None":
                    return answer
        return super().step(action)

    def close(self) -> None:
        if self.has_it and self.fault in IN_CLOSE:
            commit(self.fault)


def commit(fault: str) -> Any:
    """Write down a fault and commit it; returns a wrong answer, or None."""
    with open(os.environ[COMMITTED], "a") as file:
        file.write(f"{fault}\n")
    if fault.startswith("hang"):
        time.sleep(1000)
    elif fault.startswith("os._exit"):
        os._exit(3)
    elif fault.startswith("raise"):
        raise ValueError(fault)
    elif fault == "late answer":
        time.sleep(1.2 * STEP_SECONDS)
    elif fault == "stopped by a signal":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    elif fault == "sys.exit":
        sys.exit(3)
    elif fault.startswith("garbage"):
        for number in [1] if fault.endswith("output") else range(1, 20):
            with contextlib.suppress(OSError):
                os.write(number, b"\xff\x00garbage" * 400)
    elif fault.startswith("fork"):
        if os.fork() == 0 and fault.endswith("stays"):
            time.sleep(1000)
    elif fault == "eats memory":
        eaten = []
        while True:
            eaten.append(bytearray(1 << 24))
    elif fault == "metric of a wrong type":
        return Step(Observation(""), metrics={"x": object()})  # type: ignore[dict-item]
    elif fault == "observation of 2 MiB":
        return Step(Observation("." * (1 << 21)))
    elif fault == "reset returns text":
        return "a maze"
    return None


# The run


def resources() -> dict[str, float]:
    """Memory, threads, descriptors and descendants of this process."""
    from hjax.machine import descendants

    status = pathlib.Path("/proc/self/status").read_text()
    fields = dict(line.split(":", 1) for line in status.splitlines())
    return {
        "rss_mib": round(int(fields["VmRSS"].split()[0]) / 1024, 1),
        "threads": int(fields["Threads"]),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "descendants": len(descendants(os.getpid())),
    }


class Characters(io.TextIOBase):
    """A stream that counts what is written to it, and drops it."""

    count = 0

    def write(self, text: str) -> int:
        self.count += len(text)
        return len(text)


class Tally:
    """Counts of a run's episodes.

    Attributes:
      episodes: all of them.
      metrics: by stop reason, by the metrics ``episode/stop_<reason>``.
      ended: by fault (empty: none), by stop reason.
      wrong: episodes that ended in another way than their fault's.
    """

    def __init__(self) -> None:
        self.episodes = self.wrong = 0
        self.metrics: collections.Counter[str] = collections.Counter()
        self.ended: dict[str, collections.Counter[str]] = collections.defaultdict(
            collections.Counter
        )

    def add(
        self,
        seeds: Sequence[int],
        said: Sequence[str | None],
        reasons: Sequence[str],
        metrics: Mapping[str, float],
    ) -> None:
        """Add a step.

        Args:
          seeds: of each episode.
          said: what its policy said in the turn in which faults are committed; None: it had none.
          reasons: why each one stopped.
          metrics: of the step.
        """
        self.episodes += len(seeds)
        for name, share in metrics.items():
            if name.startswith("episode/stop_") and (count := round(share * len(seeds))):
                self.metrics[name.removeprefix("episode/stop_")] += count
        for seed, action, reason in zip(seeds, said, reasons, strict=True):
            fault = fault_of_seed(seed)
            if fault not in IN_RESET and (action is None or not acts_up(action)):
                fault = None
            self.ended[fault or ""][reason] += 1
            expected = FAULTS[fault] if fault else None
            self.wrong += (reason in ("timeout", "killed", "exception") or bool(expected)) and (
                reason != expected
            )


def fault_turn(turns: np.ndarray, tokens: np.ndarray, tokenizer: Any) -> str | None:
    """What the policy said in the turn in which faults are committed; None: it had none.

    Args:
      turns: int32 [length], of an episode's row, the number of each token's turn.
      tokens: int32 [length], its tokens.
      tokenizer: of the policy.
    """
    drawn = tokens[turns == FAULT_TURN - 1].tolist()
    return tokenizer.decode_response([], drawn) if drawn else None


def growth(lines: Sequence[Mapping[str, Any]], name: str) -> dict[str, float]:
    """Of a resource from step ``FLAT_FROM`` on: least, most, and by how much the last third of the
    measurements is above the first, on average."""
    values = [line[name] for line in lines if line["step"] >= FLAT_FROM]
    third = max(len(values) // 3, 1)
    grown = sum(values[-third:]) / third - sum(values[:third]) / third
    return {"least": min(values), "most": max(values), "grown": round(grown, 2)}


def config_of(steps: int, seed: int) -> Any:
    """The tiny run."""
    import hjax

    return hjax.get_config(
        "base.py",
        {
            "steps": steps,
            "seed": seed,
            "model.hidden_size": 32,
            "model.layers": 1,
            "model.heads": 4,
            "model.kv_heads": 4,
            "model.mlp_size": 64,
            "data.task": "maze",
            "data.task_options.side": 3,
            "data.task_options.distance": 2,
            "warm_start.steps": 0,
            "environment.function": f"{pathlib.Path(__file__).resolve()}:FaultyMaze",
            "environment.max_turns": 4,
            "environment.processes": 2,
            "environment.step_seconds": STEP_SECONDS,
            "environment.memory_gib": MEMORY_GIB,
            "reward.max_unscored": 1.0,
            "rollout.prompts": 4,
            "rollout.samples": 2,
            "cluster.devices_per_process": 1,
            "eval.every": 0,
            "checkpoint.every": 25,
            "display.enabled": False,
            "display.tensorboard": False,
            "display.report": False,
        },
    )


def train(steps: int, seed: int, folder: pathlib.Path, log: Any) -> dict[str, Any]:
    """Train, with a line to the log every so many steps; returns the summary."""
    import machine

    import hjax
    from hjax.environments.episode import episode_seed

    committed = folder / "committed"
    committed.touch()
    os.environ[COMMITTED] = str(committed)
    tally, lines, start = Tally(), list[dict[str, Any]](), time.perf_counter()
    most: dict[str, float] = {}
    use = machine.CoreUse()
    with contextlib.closing(hjax.Trainer(config_of(steps, seed), workdir=folder / "run")) as run:
        for step in range(1, steps + 1):
            metrics, batch = run.step(), run.batch
            groups = batch["group"].tolist()
            seeds = [episode_seed(seed, step, group) for group in groups]
            rows = zip(batch["turn"], batch["responses"], strict=True)
            said = [fault_turn(*row, run.inputs.tokenizer) for row in rows]
            tally.add(seeds, said, batch["stop_reason"], metrics)
            now = resources()
            most = {name: max(value, most.get(name, 0)) for name, value in now.items()}
            if step % EVERY == 0:
                lines.append({"step": step, "seconds": round(time.perf_counter() - start, 1)})
                lines[-1] |= now | {"most": most, "episodes": tally.episodes}
                lines[-1] |= {"stopped": dict(tally.metrics)}
                print(json.dumps(lines[-1]), file=log, flush=True)
                most = {}
    written = collections.Counter(committed.read_text().splitlines())
    return {
        "benchmark": "episode_faults",
        "steps": steps,
        "seconds": round(time.perf_counter() - start, 1),
        "episodes": tally.episodes,
        "wrong": tally.wrong,
        "stopped": dict(tally.metrics),
        "committed": {name: written[name] for name in FAULTS},
        "ended": {name: dict(tally.ended[name]) for name in ("", *FAULTS)},
        "flat": {name: growth(lines, name) for name in FLAT},
        **use.read(),
        **machine.describe(),
        **machine.versions("jax", "jaxlib"),
    }


def main() -> None:
    """Train, and print the summary."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log", default=str(pathlib.Path(__file__).with_suffix(".jsonl")))
    args = parser.parse_args()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    with tempfile.TemporaryDirectory() as folder, open(args.log, "w") as log:
        with contextlib.redirect_stdout(Characters()) as printed:
            line = train(args.steps, args.seed, pathlib.Path(folder), log)
        line["printed_characters"] = printed.count
        print(json.dumps(line), file=log)
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
