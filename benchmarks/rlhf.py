"""Real RLHF on real weights: policies trained against a reward model that reads film reviews.

Prints one JSON line: the reward model's held-out accuracy beside a bag of words on the same split;
for each algorithm reward and KL at the start and at the end; for DPO, on preferences that the same
reward model made, both after each part of its training. DIR/report.html has samples, curves and the
chart of reward against KL. Runs are folders of DIR: what is finished there is kept.

    HJAX_TEST_DATA=... python benchmarks/rlhf.py --workdir=DIR --reward_model=DIR
        [--only=ppo,grpo,remax,dpo,safe_rlhf] [--steps=30]

`--reward_model` is the workdir of a reward model, such as that of rlhf.py's stage.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import machine
import numpy as np
import optax

import hjax
from hjax.controller import join
from hjax.files import METRICS, read_json, read_rows
from hjax.rewards import happy_stories
from hjax.run.inputs import load_inputs
from hjax.settings.config_loading import check_config
from hjax.show.report import write_stages

OPENINGS = pathlib.Path(hjax.__file__).parent / "launch" / "configs" / "stories_openings.jsonl"
ALGORITHMS = {"ppo": "PPO", "grpo": "GRPO", "remax": "ReMax", "safe_rlhf": "SafeRLHF"}
DPO_PARTS, SAD_TEXTS = 4, 1024


def words_baseline(good: list[list[str]], bad: list[list[str]], steps: int = 300) -> Any:
    """Logistic regression on the words of texts: the function that scores texts.

    Args:
      good, bad: the words of each text labelled 1 and 0.
      steps: of Adam on all texts, with an L2 penalty.
    """
    known = {word: i + 1 for i, word in enumerate(sorted({w for text in good + bad for w in text}))}

    def numbers(texts: list[list[str]]) -> np.ndarray:
        longest = max(map(len, texts))
        rows = [sorted({known.get(word, 0) for word in text}) for text in texts]
        return np.array([row + [0] * (longest - len(row)) for row in rows])

    def logits(weights: jax.Array, x: np.ndarray) -> jax.Array:
        return jnp.sum(jnp.where(x > 0, weights[x], 0.0), axis=1)

    sides = [(numbers(good), 1.0), (numbers(bad), 0.0)]

    def loss(weights: jax.Array) -> jax.Array:
        parts = [optax.sigmoid_binary_cross_entropy(logits(weights, x), y).mean() for x, y in sides]
        return sum(parts) / 2 + 2e-4 * jnp.sum(jnp.square(weights))

    optimizer = optax.adam(0.05)

    @jax.jit
    def update(weights: jax.Array, state: Any) -> Any:
        step, state = optimizer.update(jax.grad(loss)(weights), state)
        return optax.apply_updates(weights, step), state

    weights = jnp.zeros(len(known) + 1)
    state = optimizer.init(weights)
    for _ in range(steps):
        weights, state = update(weights, state)
    return lambda texts: np.asarray(logits(weights, numbers(texts)))


def judge(path: pathlib.Path) -> dict[str, Any]:
    """A reward model's last evaluation, and that of a bag of words on the same pairs."""
    config = check_config(read_json(path / "config.json"))
    inputs = load_inputs(config, "pairs")
    assert inputs.held_out is not None
    texts = {
        name: [[text.split() for text in data.columns[side]] for side in ("chosen", "rejected")]
        for name, data in (("train", inputs.train), ("eval", inputs.held_out))
    }
    score = words_baseline(texts["train"][0], texts["train"][1])
    good, bad = (score(side) for side in texts["eval"])
    rows = [row for row in read_rows(path / METRICS) if "eval/accuracy" in row]
    return {
        "held_out_pairs": len(good),
        "steps": rows[-1]["step"],
        "pairs": rows[-1]["eval/accuracy"],
        "texts": rows[-1].get("eval/label_accuracy"),
        "words_pairs": float(np.mean(good > bad)),
        "words_texts": float((np.mean(good > 0) + np.mean(bad <= 0)) / 2),
    }


def policy_keys(actor: str, reward: pathlib.Path, steps: int) -> dict[str, Any]:
    """What the runs of all policies have in common."""
    return {
        "steps": steps,
        "actor.path": actor,
        "reward.path": str(reward),
        "data.path": str(OPENINGS),
        "data.eval_fraction": 0.2,
        "model.unroll_layers": True,
        "rollout.max_response_length": 48,
        "rollout.prompts": 16,
        "rollout.samples": 4,
        "algorithm.kl_coef": 0.1,
        "actor.learning_rate": 2e-4,
        "actor.warmup_updates": 3,
        "critic.learning_rate": 1e-3,
        "eval.every": max(steps // 3, 1),
        "eval.prompts": 32,
        "checkpoint.every": 5,
        "display.enabled": False,
        "display.tensorboard": False,
    }


def trained(keys: Mapping[str, Any], workdir: pathlib.Path) -> list[dict[str, Any]]:
    """The rows of a run, which is taken to its end."""
    trainer = hjax.Trainer(check_config(keys), workdir)
    try:
        trainer.run()
    finally:
        trainer.close()
    return read_rows(workdir / METRICS)


def ends(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Means over the first and the last three steps, and the largest KL."""

    def mean(key: str, part: slice) -> float | None:
        values = [row[key] for row in rows[part] if row.get(key) is not None]
        return round(float(np.mean(values)), 4) if values else None

    found: dict[str, Any] = {"steps": len(rows)}
    for key in ("reward/mean", "kl/reference", "cost/mean"):
        if mean(key, slice(None)) is not None:
            found[key] = [mean(key, slice(0, 3)), mean(key, slice(-3, None))]
    evals = [round(row["eval/reward"], 4) for row in rows if "eval/reward" in row]
    kl = [row["kl/reference"] for row in rows if row.get("kl/reference") is not None]
    return found | {"eval/reward": [evals[0], evals[-1]], "largest_kl": round(max(kl), 4)}


def answered(keys: Mapping[str, Any], batches: int) -> list[dict[str, Any]]:
    """Batches that a policy answers, with rewards and the reference's log-probs; no update."""
    config = check_config({**keys, "algorithm.name": "GRPO"})
    trainer = hjax.Trainer(config)
    try:
        trainer.prepare()
        algorithm, found = trainer.algorithm, []
        for number in range(batches):
            order = trainer._order(number + 1, lambda: 0)
            batch = algorithm.collect(algorithm.choose(order, trainer.prompts.per_step))
            reference = algorithm.reference.compute_ref_log_prob(batch)
            found.append(join(batch, reference, algorithm.reward.compute_reward(batch)))
        return found
    finally:
        trainer.close()


def dpo(keys: Mapping[str, Any], folder: pathlib.Path, steps: int) -> list[dict[str, Any]]:
    """DPO on pairs of the policy's own answers; reward and KL of what it answers, part by part."""
    pairs, start = folder / "pairs.jsonl", keys["actor.path"]
    folder.mkdir(exist_ok=True)
    if not pairs.is_file():
        lines = []
        for batch in answered({**keys, "rollout.samples": 2, "rollout.prompts": 32}, 16):
            texts, rewards = batch["response_text"], np.asarray(batch["rewards"])
            for i in range(0, len(texts), 2):
                best = i + int(rewards[i] < rewards[i + 1])
                sides = {"chosen": texts[best], "rejected": texts[2 * i + 1 - best]}
                if sides["chosen"] != sides["rejected"]:
                    lines.append(json.dumps({"prompt": batch["prompt_text"][i], **sides}))
        pairs.write_text("\n".join(lines) + "\n")
    # Texts that are tokenised again may be a token longer than they were drawn.
    own = {k: v for k, v in keys.items() if not k.startswith(("reward.", "algorithm."))} | {
        "algorithm.name": "DPO",
        "data.path": str(pairs),
        "data.eval_fraction": 0.1,
        "warm_start.batch": 64,
        "rollout.max_response_length": 64,
        "actor.learning_rate": 1e-4,
        "eval.every": max(steps // 2, 1),
        "steps": steps,
    }
    trainer = hjax.Trainer(check_config(own), folder / "run")
    points = []
    try:
        for part in range(DPO_PARTS):
            trainer.run(max((part + 1) * steps // DPO_PARTS - trainer.step_number, 0))
            made = folder / f"after-{trainer.step_number}"
            if not made.is_dir():
                trainer.export(made)
            [batch] = answered({**keys, "actor.path": str(made), "reference.path": start}, 1)
            mask = np.asarray(batch["response_mask"], bool)
            gap = np.asarray(batch["logprobs"]) - np.asarray(batch["ref_logprobs"])
            point = {"step": trainer.step_number, "kl/reference": float(gap[mask].mean())}
            points.append(point | {"reward/mean": float(np.mean(batch["rewards"]))})
    finally:
        trainer.close()
    (folder / METRICS).write_text("".join(json.dumps(point) + "\n" for point in points))
    about = {"algorithm": {"name": "DPO"}, "steps": steps, "data": {"path": "its own answers"}}
    (folder / "config.json").write_text(json.dumps(about))
    return points


def cost_model(actor: str, folder: pathlib.Path, steps: int) -> list[dict[str, Any]]:
    """A model of which stories are sad, learned from the actor's, labelled by their words."""
    data = folder.with_name("sad.jsonl")
    if not data.is_file():
        model = hjax.load_model(actor)
        openings = [json.loads(line)["prompt"] for line in OPENINGS.read_text().splitlines()]
        prompts = (openings * (SAD_TEXTS // len(openings) + 1))[:SAD_TEXTS]
        stories = model.generate(prompts, max_new_tokens=48, temperature=1.0, seed=0)
        lines = []
        for prompt, story in zip(prompts, stories, strict=True):
            sad = set(re.findall(r"[a-z']+", (story.text or "").lower())) & happy_stories._SAD
            lines.append(json.dumps({"text": prompt + (story.text or ""), "label": int(not sad)}))
        data.write_text("\n".join(lines) + "\n")
    keys = {
        "algorithm.name": "CostModel",
        "actor.path": actor,
        "data.path": str(data),
        "data.eval_size": 0,
        "eval.prompts": 0,
        "eval.every": max(steps // 2, 1),
        "model.unroll_layers": True,
        "rollout.max_response_length": 96,
        "warm_start.batch": 64,
        "actor.learning_rate": 1e-3,
        "actor.schedule": "cosine",
        "steps": steps,
        "display.enabled": False,
        "display.tensorboard": False,
    }
    return trained(keys, folder)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workdir", type=pathlib.Path, required=True)
    parser.add_argument("--reward_model", type=pathlib.Path, required=True)
    parser.add_argument("--only", default="ppo,grpo,remax,dpo,safe_rlhf", help="comma-separated")
    parser.add_argument("--steps", type=int, default=30, help="of each algorithm")
    args = parser.parse_args()
    args.workdir.mkdir(parents=True, exist_ok=True)
    use = machine.CoreUse()
    actor = str(pathlib.Path(os.environ["HJAX_TEST_DATA"], "weights", "stories260K-hf"))
    keys = policy_keys(actor, args.reward_model, args.steps)
    result: dict[str, Any] = {"reward_model": judge(args.reward_model)}
    print(json.dumps(result), flush=True)
    done: list[str] = []
    for name in args.only.split(","):
        if name == "dpo":
            result[name] = dpo(keys, args.workdir / "dpo", 2 * args.steps)
        else:
            own: dict[str, Any] = {"algorithm.name": ALGORITHMS[name]}
            if name == "safe_rlhf":
                sad = args.workdir / "cost_model"
                result["cost_model"] = cost_model(actor, sad, args.steps)[-1]["eval/label_accuracy"]
                done.append("cost_model")
                own |= {"cost.path": str(sad), "algorithm.cost_limit": -0.5}
                own |= {"algorithm.multiplier_learning_rate": 0.1}
            result[name] = ends(trained({**keys, **own}, args.workdir / name))
        done.append(name)
        print(json.dumps({name: result[name]}), flush=True)
        write_stages(args.workdir, done)
    print(json.dumps({"benchmark": "rlhf", **machine.describe(), **use.read(), **result}))


if __name__ == "__main__":
    main()
