"""Networks without a language model: PPO on CartPole, OP-GRPO beside Flow-GRPO on the ring.

    python benchmarks/networks.py ppo --seeds 100 101 102 103 104
    python benchmarks/networks.py flow --seeds 100 101 102 103 104

A line per run; RESULTS.md has what they gave.
"""

import argparse
import pathlib
import tempfile
import time
from typing import Any

import hjax

FLOW = {"algorithm.clip": 0.05, "algorithm.kl_coef": 0.01, "actor.learning_rate": 1e-3}
BASE = {
    "algorithm.name": "FlowMatching",
    "steps": 300,
    "seed": 100,
    "actor.learning_rate": 1e-3,
    "actor.schedule": "cosine",
    "eval.every": 100,
}


def trained(config: Any, workdir: pathlib.Path | None = None) -> list[dict[str, float]]:
    """The metrics of a run's steps."""
    trainer = hjax.Trainer(config, workdir)
    try:
        return trainer.run()
    finally:
        trainer.close()


def made(keys: dict[str, Any]) -> Any:
    """A config of the defaults and these keys."""
    config = hjax.default_config()
    with config.unlocked():
        for key, value in keys.items():
            section, name = config, key
            while "." in name:
                first, _, name = name.partition(".")
                section = section[first]
            section[name] = value
    return config


def ppo(seed: int) -> None:
    """A run of ppo_cartpole.py: the return of its evaluations, and its seconds."""
    began = time.perf_counter()
    rows = trained(hjax.get_config("ppo_cartpole.py", {"seed": seed}))
    held_out = {int(r["step"]): r["eval/reward"] for r in rows if "eval/reward" in r}
    print(f"ppo_cartpole seed {seed}: {held_out}, {time.perf_counter() - began:.0f} s", flush=True)


def flow(seed: int, base: pathlib.Path) -> None:
    """Flow-GRPO and OP-GRPO from one base: held-out reward by network evaluations of sampling."""
    for name in ("FlowGRPO", "OPGRPO"):
        keys = {"algorithm.name": name, "steps": 120, "eval.every": 10, "seed": seed}
        rows = trained(made({**FLOW, **keys, "actor.path": str(base)}))
        points = [
            (int(r["flow/evaluations"]), round(r["eval/reward"], 3), round(r["actor/kl"], 3))
            for r in rows
            if "eval/reward" in r
        ]
        print(f"{name} seed {seed}: (evaluations, reward, KL) {points}", flush=True)


def main() -> None:
    """Run what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("ppo", "flow"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[100, 101, 102, 103, 104])
    args = parser.parse_args()
    if args.what == "ppo":
        for seed in args.seeds:
            ppo(seed)
        return
    with tempfile.TemporaryDirectory() as folder:
        base = pathlib.Path(folder, "base")
        trained(made(BASE), base)
        for seed in args.seeds:
            flow(seed, base)


if __name__ == "__main__":
    main()
