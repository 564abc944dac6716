"""One process's worth of GRPO steps on workload W1 by hjax; prints one line `W1JSON {...}` last.

W1: a decoder from scratch (vocabulary 512, hidden 256, MLP 688, 6 layers, 8 heads, 4 KV heads,
tied, float32); 8 prompts x 8 samples a step, prompts of 32 tokens, responses of exactly 64, no
tokenizer and so no end-of-sequence token; one epoch, temperature 1, AdamW 1e-5. The reward is the
share of even token ids. `benchmarks/step.py` runs this beside other frameworks.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import random
import resource
import statistics
import sys
import tempfile
import time
from typing import Any

import machine

VOCABULARY = 512
PROMPTS, SAMPLES = 8, 8
PROMPT_LENGTH, RESPONSE_LENGTH = 32, 64


def reward(prompts: Any, responses: Any, *, response_tokens: Any, **columns: Any) -> list[float]:
    """Share of even token ids in each response."""
    return [sum(token % 2 == 0 for token in tokens) / len(tokens) for tokens in response_tokens]


def prompt_tokens(seed: int, count: int) -> list[list[int]]:
    """The workload's prompts: ids 1 to 511 from Python's generator, the same for all frameworks."""
    draw = random.Random(seed)
    return [[draw.randrange(1, VOCABULARY) for _ in range(PROMPT_LENGTH)] for _ in range(count)]


def overrides(args: argparse.Namespace, data: pathlib.Path) -> list[str]:
    """The workload as changes to `grpo.py`."""
    changes = {
        "seed": args.seed,
        "steps": args.steps,
        "data.path": data,
        "data.eval_fraction": 0.0,
        "model.vocab_size": VOCABULARY,
        "model.hidden_size": 256,
        "model.mlp_size": 688,
        "model.layers": 6,
        "model.heads": 8,
        "model.kv_heads": 4,
        "model.tie_embeddings": True,
        "model.dtype": "float32",
        "model.unroll_layers": True,
        "actor.learning_rate": 1e-5,
        "actor.schedule": "constant",
        "actor.warmup_updates": 0,
        "actor.beta2": 0.999,
        "reward.function": f"{pathlib.Path(__file__).resolve()}:reward",
        "rollout.prompts": PROMPTS,
        "rollout.samples": SAMPLES,
        "rollout.max_response_length": RESPONSE_LENGTH,
        "rollout.temperature": 1.0,
        "warm_start.steps": 0,
        "eval.every": 0,
        "checkpoint.every": 0,
        "display.enabled": False,
        "display.tensorboard": False,
        "display.report": False,
        "algorithm.epochs": 1,
        "algorithm.minibatch": 0,
        "algorithm.kl_coef": args.beta,
    }
    return [f"--config.{key}={value}" for key, value in changes.items()] + args.override


def median(values: list[float]) -> float | None:
    return round(statistics.median(values), 4) if values else None


def run(args: argparse.Namespace, folder: pathlib.Path) -> dict[str, Any]:
    """Takes the steps; returns the figures under the names that all W1 scripts use."""
    data = folder / "prompts.jsonl"
    rows = prompt_tokens(args.seed, PROMPTS * args.steps)
    data.write_text("".join(json.dumps({"prompt_tokens": row}) + "\n" for row in rows))

    import jax

    import hjax
    from hjax.launch.jax_setup import prepare_jax

    if args.devices:
        jax.config.update("jax_num_cpu_devices", args.devices)
    config = hjax.get_config("grpo.py", overrides(args, data))
    prepare_jax(config)  # as the command does: a device per core, unless set above

    start = time.perf_counter()
    trainer = hjax.Trainer(config)
    trainer.prepare()
    setup_seconds = time.perf_counter() - start

    seconds: list[float] = []
    metrics: list[dict[str, float]] = []
    use = machine.CoreUse()
    for index in range(args.steps):
        if index == args.warmup:
            use = machine.CoreUse()
        start = time.perf_counter()
        metrics.append(trainer.step())
        seconds.append(time.perf_counter() - start)
    used = use.read()

    lengths = trainer.batch["response_mask"].sum(axis=1)
    timed = seconds[args.warmup :]
    generate = [m["time/generate"] for m in metrics[args.warmup :]]
    sequences = PROMPTS * SAMPLES
    step = statistics.median(timed)
    figures = {
        "framework": "hjax",
        "algo": "grpo",
        "seqs_per_step": sequences,
        "prompt": PROMPT_LENGTH,
        "resp": RESPONSE_LENGTH,
        "resp_len_min_max": [int(lengths.min()), int(lengths.max())],
        "beta": args.beta,
        "dtype": "float32",
        "step_s": round(step, 4),
        "step_s_min": round(min(timed), 4),
        "step_s_max": round(max(timed), 4),
        "setup_s": round(setup_seconds, 3),
        "first_step_s": round(seconds[0], 3),
        "generate_s": median(generate),
        "resp_tokens_per_s_step": round(sequences * RESPONSE_LENGTH / step, 1),
        "gen_tokens_per_s": round(sequences * RESPONSE_LENGTH / statistics.median(generate), 1),
        # From kilobytes, as Linux counts it.
        "peak_rss_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1),
        "compile_count": metrics[-1]["compile/count"],
        "compile_count_after_2": metrics[min(1, args.steps - 1)]["compile/count"],
        "token_prob_error": max(m["rollout/token_prob_error"] for m in metrics),
        "steps": args.steps,
        "warmup": args.warmup,
        **used,
        "load1": round(os.getloadavg()[0], 2),
        "steps_s": [round(x, 4) for x in seconds],
        "devices": jax.device_count(),
        "reward_curve": [round(m["reward/mean"], 4) for m in metrics],
        "versions": machine.versions("hjax", "jax", "jaxlib", "flax", "optax", "numpy"),
    }
    for phase in ("prepare", "transition", "update"):
        figures[f"{phase}_s"] = median(
            [m.get(f"time/{phase}", 0.0) for m in metrics[args.warmup :]]
        )
    reference = [role_seconds(trainer, "reference", m["step"]) for m in metrics[args.warmup :]]
    figures["ref_logprob_s"] = median(reference) if args.beta else None
    trainer.close()
    return figures


def role_seconds(trainer: Any, role: str, step: float) -> float:
    """Seconds that a role's calls took in a step."""
    return sum(s.end - s.start for s in trainer.timeline.spans(step) if s.role == role)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    flag = parser.add_argument
    flag("--steps", type=int, default=8, help="warm-up included")
    flag("--warmup", type=int, default=3, help="steps left out of the figures")
    flag("--beta", type=float, default=0.0, help="weight of the KL to a reference; 0: no reference")
    flag("--seed", type=int, default=0)
    flag("--devices", type=int, default=0, help="simulated CPU devices; 0: one per core")
    flag("--cache_dir", default="", help="compilation cache; empty: none")
    flag(
        "--override",
        action="append",
        default=[],
        metavar="--config.a.b=VALUE",
        help="further change to the config, may be repeated: --override=--config.a.b=VALUE",
    )
    args = parser.parse_args()
    if args.steps <= args.warmup:
        parser.error(f"--steps={args.steps} must be larger than --warmup={args.warmup}")
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    if args.cache_dir:
        os.environ["JAX_COMPILATION_CACHE_DIR"] = args.cache_dir
        os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    from hjax.launch.huge_pages import use_huge_pages

    use_huge_pages()  # as the command does
    with tempfile.TemporaryDirectory() as folder:
        figures = run(args, pathlib.Path(folder))
    print("W1JSON " + json.dumps(figures), flush=True)
    sys.exit(0)


if __name__ == "__main__":
    main()
