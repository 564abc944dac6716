"""Tokens per second of a policy update, by hjax and by transformers with torch.

Same weights, same tokens, same loss (PPO's clipped one), AdamW, float32, on this machine's CPU.
Models: that of workload W1 (`step_hjax.py`) and one of 98 million parameters. Lengths: `full`, all
responses as long as the longest; `long_tailed`, lognormal ones, of which the longest is some four
times the mean. hjax runs by default (`hjax`, `data.packing=auto`: of each batch the quicker of the
two that follow), on padded rows (`hjax_padded`), with a group's prompt once for all its responses,
and on packs (`hjax_packed`); torch on padded rows, each with its prompt, logits of responses alone.

Every contestant is a process of its own that waits while the others take their updates, one after
another in an order that rotates. Prints one JSON line: by workload the median seconds of an update,
tokens (of prompts and responses, padding not counted) per second, the share of padding, the loss of
the first update, and ratios of tokens per second. `other_cores`: what others used meanwhile.

    python benchmarks/train.py [--models=w1,100m] [--lengths=full,long_tailed] [--rounds=5]
        [--contestants=hjax,hjax_padded,hjax_packed,torch]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import machine
import numpy as np

CONTESTANTS = ("hjax", "hjax_padded", "hjax_packed", "torch")
# Shapes, prompts, samples, tokens of a prompt, of the longest response.
MODELS: dict[str, dict[str, Any]] = {
    "w1": {
        "shape": {"vocab_size": 512, "hidden_size": 256, "mlp_size": 688, "layers": 6,
                  "heads": 8, "kv_heads": 4, "head_dim": 32, "max_length": 1024},
        "groups": 8, "samples": 8, "prompt": 32, "full": 64, "long_tailed": 256,
    },
    "100m": {
        "shape": {"vocab_size": 16384, "hidden_size": 768, "mlp_size": 2048, "layers": 12,
                  "heads": 12, "kv_heads": 12, "head_dim": 64, "max_length": 1024},
        "groups": 4, "samples": 4, "prompt": 32, "full": 64, "long_tailed": 256,
    },
}  # fmt: skip
CLIP, RATE = 0.2, 1e-5


def make_batch(model: str, lengths: str) -> dict[str, np.ndarray]:
    """Prompts, responses, advantages and old log-probs [rows, length], from a seed."""
    sizes = MODELS[model]
    rng = np.random.default_rng(0)
    rows, length = sizes["groups"] * sizes["samples"], sizes[lengths]
    vocabulary = sizes["shape"]["vocab_size"]
    counts = np.full(rows, length)
    if lengths == "long_tailed":
        drawn = np.exp(rng.normal(np.log(length / 8), 0.9, rows))
        counts = np.clip(drawn.astype(int), 1, length)
        counts[rng.integers(rows)] = length
    mask = np.arange(length) < counts[:, None]
    prompts = rng.integers(1, vocabulary, (sizes["groups"], sizes["prompt"]), dtype=np.int32)
    prompts = np.repeat(prompts, sizes["samples"], axis=0)
    # About what a fresh model says, so that some ratios are clipped.
    old = rng.normal(-np.log(vocabulary), 0.2, mask.shape)
    return {
        "prompts": prompts,
        "prompt_mask": np.ones(prompts.shape, bool),
        "responses": rng.integers(1, vocabulary, mask.shape, dtype=np.int32) * mask,
        "response_mask": mask,
        "advantages": rng.normal(size=mask.shape).astype(np.float32),
        "old_logprobs": old.astype(np.float32),
        "prompt_id": np.arange(rows) // sizes["samples"],
    }


def write_weights(model: str, folder: str) -> None:
    """A model from scratch as a Hugging Face directory."""
    import jax

    from hjax.models.huggingface import save_weights
    from hjax.models.model_config import ModelConfig
    from hjax.models.parameters import decoder_network, to_host
    from hjax.sharding.layout import make_layouts

    config = ModelConfig(**MODELS[model]["shape"])
    layout = make_layouts(jax.devices()[:1]).train
    save_weights(folder, config, to_host(decoder_network(config).create(0, layout)), None)


def hjax_update(
    model: str, batch: dict[str, np.ndarray], folder: str, packing: int | None
) -> Any:
    """A function that takes one update and returns its loss; of no ``packing``, by choice."""
    import jax

    jax.config.update("jax_num_cpu_devices", machine.cores())

    from hjax.algorithms.losses import PolicyLoss
    from hjax.controller import ResourcePool, WorkerGroup
    from hjax.models.compute import Compute
    from hjax.models.weights import read_config
    from hjax.sharding.layout import make_layouts
    from hjax.workers import Actor, OptimizerConfig, WorkerContext

    sizes = MODELS[model]
    context = WorkerContext(
        role="actor",
        layouts=make_layouts(jax.devices()),
        model=read_config(folder),
        path=folder,
        samples=sizes["samples"],
        max_response_length=batch["responses"].shape[1],
        loss=PolicyLoss(clip_low=CLIP, clip_high=CLIP),
        optimizer=OptimizerConfig(RATE, weight_decay=0.01),
        packing=packing or 0,
        choose_packing=packing is None,
        compute=Compute(unroll_layers=True),
    )
    group = WorkerGroup(ResourcePool("all", jax.devices()), Actor, context, role="actor")
    group.initialize().result()

    def update() -> dict[str, float]:
        metrics = {key: float(x) for key, x in group.update_actor(batch).result().items()}
        jax.block_until_ready(group.worker.params)
        return metrics

    return update


def torch_update(model: str, batch: dict[str, np.ndarray], folder: str) -> Any:
    """A function that takes one update and returns its loss."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(machine.cores())
    policy = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="sdpa"
    )
    policy.train()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=RATE, weight_decay=0.01)
    given = {key: torch.tensor(x) for key, x in batch.items()}
    tokens = torch.cat([given["prompts"], given["responses"]], 1).long()
    seen = torch.cat([given["prompt_mask"], given["response_mask"]], 1).long()
    responses, mask = given["responses"].long(), given["response_mask"]
    length = responses.shape[1]

    def update() -> dict[str, float]:
        optimizer.zero_grad()
        out = policy(
            input_ids=tokens, attention_mask=seen, logits_to_keep=length + 1, use_cache=False
        )
        logits = out.logits[:, :-1].float()
        picked = logits.gather(-1, responses[..., None])[..., 0]
        logprobs = picked - torch.logsumexp(logits, -1)
        ratio = torch.exp(logprobs - given["old_logprobs"])
        gain, clipped = ratio, ratio.clamp(1 - CLIP, 1 + CLIP)
        terms = -torch.minimum(gain * given["advantages"], clipped * given["advantages"])
        loss = (terms * mask).sum() / mask.sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        return {"loss": loss.item()}

    return update


def contestant(name: str, model: str, lengths: str, folder: str, packing: int) -> None:
    """Answers each line on stdin with an update, as a line of JSON."""
    if name != "torch":
        from hjax.launch.huge_pages import use_huge_pages

        use_huge_pages()  # as the command does, and a device per core
    batch = make_batch(model, lengths)
    update: Callable[[], dict[str, float]]
    if name == "torch":
        update = torch_update(model, batch, folder)
    else:
        of = {"hjax": None, "hjax_padded": 0, "hjax_packed": packing}
        update = hjax_update(model, batch, folder, of[name])
    for _ in sys.stdin:
        use, start = machine.CoreUse(), time.perf_counter()
        metrics = update()
        figures = {"seconds": time.perf_counter() - start, **metrics, **use.read()}
        print("UPDATE " + json.dumps(figures), flush=True)


class Process:
    """A contestant that waits."""

    def __init__(self, name: str, model: str, lengths: str, folder: str, packing: int):
        own = [f"--contestant={name}", f"--models={model}", f"--lengths={lengths}"]
        own += [f"--folder={folder}", f"--packing={packing}"]
        self._process = subprocess.Popen(
            [sys.executable, __file__, *own],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"JAX_PLATFORMS": "cpu"},
        )

    def update(self) -> dict[str, Any]:
        """One update's figures."""
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith("UPDATE "):
                return json.loads(line.removeprefix("UPDATE "))
        raise RuntimeError("a contestant ended before its update")

    def close(self) -> None:
        """Let it end."""
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait(60)


def orders(names: list[str], rounds: int) -> Iterator[list[str]]:
    """Who comes when, round by round."""
    for turn in range(rounds):
        first = turn % len(names)
        yield names[first:] + names[:first]


def workload(model: str, lengths: str, args: argparse.Namespace) -> dict[str, Any]:
    """Figures of all contestants on one workload."""
    sizes, batch = MODELS[model], make_batch(model, lengths)
    tokens = int(batch["prompt_mask"].sum() + batch["response_mask"].sum())
    packing = args.packing or -(-(sizes["prompt"] + sizes[lengths]) // 32) * 32
    with tempfile.TemporaryDirectory() as folder:
        write_weights(model, folder)
        names = args.contestants.split(",")
        found = {name: Process(name, model, lengths, folder, packing) for name in names}
        firsts: dict[str, dict[str, Any]] = {}
        rows: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
        for name, process in found.items():  # loading and compiling
            print(f"{model}, {lengths}: {name} starts", file=sys.stderr)
            firsts[name] = process.update()
        for order in orders(names, args.rounds):
            for name in order:
                rows[name].append(found[name].update())
                print(f"{name}: {rows[name][-1]['seconds']:.2f} s", file=sys.stderr)
        for process in found.values():
            process.close()
    losses = {name: first["loss"] for name, first in firsts.items()}
    if max(losses.values()) - min(losses.values()) > 1e-4:
        raise SystemExit(f"{model}, {lengths}: first losses differ: {losses}")
    result: dict[str, Any] = {
        "rows": len(batch["responses"]),
        "tokens": tokens,
        "rows_padded_by": round(batch["response_mask"].size / batch["response_mask"].sum(), 3),
        "pack": packing,
        "loss": round(next(iter(losses.values())), 6),
    }
    speed = {}
    for name, taken in rows.items():
        seconds = statistics.median(row["seconds"] for row in taken)
        speed[name] = tokens / seconds
        result[name] = {
            "seconds": round(seconds, 4),
            "seconds_per_round": [round(row["seconds"], 4) for row in taken],
            "tokens_per_second": round(speed[name], 1),
            "other_cores": statistics.median(row["other_cores"] or 0.0 for row in taken),
            "padding": round(taken[0]["padding"], 4) if "padding" in taken[0] else None,
        }
    for base, ratios in (("torch", "times_torch"), ("hjax_padded", "times_padded")):
        others = [name for name in names if name.startswith("hjax") and name != base]
        if base in speed:
            result[ratios] = {name: round(speed[name] / speed[base], 3) for name in others}
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    flag = parser.add_argument
    flag("--models", default=",".join(MODELS), help="of " + ", ".join(MODELS))
    flag("--lengths", default="full,long_tailed", help="of full, long_tailed")
    flag("--rounds", type=int, default=5, help="updates of each, after one to warm up")
    flag("--packing", type=int, default=0, help="tokens of a pack; 0: the longest sequence")
    flag("--contestants", default=",".join(CONTESTANTS), help="of " + ", ".join(CONTESTANTS))
    flag("--contestant", default="", help=argparse.SUPPRESS)
    flag("--folder", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.contestant:
        contestant(args.contestant, args.models, args.lengths, args.folder, args.packing)
        return
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    results = {
        f"{model}, {lengths}": workload(model, lengths, args)
        for model in args.models.split(",")
        for lengths in args.lengths.split(",")
    }
    names = ("hjax", "jax", "jaxlib", "numpy", "torch", "transformers")
    print(
        json.dumps(
            {
                "benchmark": "train",
                **machine.describe(),
                "versions": machine.versions(*names),
                "rounds": args.rounds,
                "workloads": results,
            }
        )
    )


if __name__ == "__main__":
    main()
