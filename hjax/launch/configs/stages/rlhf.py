"""The complete RLHF pipeline on real weights: SFT, reward model and PPO on film reviews.

    HJAX_TEST_DATA=... python -m hjax.launch --config=rlhf.py --workdir=runs/rlhf
    python -m hjax.launch --config=rlhf.py:sorting --workdir=runs/small

Three stages: supervised training on review sentences, a reward model of positive and negative
reviews, and PPO that completes beginnings of reviews. `{workdir}/sft` is what the stage `sft`
trained. The weights are stories260K of llama2.c, the reviews rt-polarity; both are read from the
folder HJAX_TEST_DATA. `rlhf.py:sorting` is the same from scratch, on a built-in task.
"""

import json
import os
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

import hjax
from hjax.errors import ConfigError
from hjax.launch.configs import reward_model_config, sorting_config
from hjax.user_input import read_text

WEIGHTS, REVIEWS = "weights/stories260K-hf", "rt-polarity"
# In characters: length of the prompt, up to the end of a word; length of the longest review used.
PROMPT_LETTERS, MAX_LETTERS = 24, 160
# Every tenth review is held out for evaluation.
HELD_OUT = 10


def get_stages(kind: str = "reviews") -> dict[str, ConfigDict]:
    """The stages of `--config=rlhf.py`, or of `rlhf.py:sorting`."""
    if kind == "sorting":
        return _sorting()
    if kind != "reviews":
        raise ConfigError(f"rlhf.py:{kind}: there are reviews (the default) and sorting")
    weights = str(_folder() / WEIGHTS)
    stages = {"sft": _sft(), "reward_model": _reward_model(), "ppo": _ppo()}
    stages["sft"].actor.path = stages["reward_model"].actor.path = weights
    return stages


def prepare(workdir: Path, kind: str = "reviews") -> None:
    """Write the reviews in the stages' formats to `workdir/data`."""
    if kind != "reviews" or (workdir / "data").is_dir():
        return
    reviews = _folder() / REVIEWS / "rt-polarity.pos"
    if not reviews.is_file():
        raise ConfigError(
            f"--config=rlhf.py: there is no {reviews}; set HJAX_TEST_DATA to the folder that has "
            f"{REVIEWS} and {WEIGHTS}, or take --config=rlhf.py:sorting, which needs neither"
        )
    made = workdir / ".data"
    made.mkdir(exist_ok=True)
    texts = {label: _lines(reviews.with_suffix(end)) for label, end in ((1, ".pos"), (0, ".neg"))}
    both = zip(texts[1], texts[0])
    rows: list[dict[str, Any]] = [
        {"text": text, "label": 1 - i} for pair in both for i, text in enumerate(pair)
    ]
    splits = {
        "train": [row for i, row in enumerate(rows) if i // 2 % HELD_OUT],
        "eval": [row for i, row in enumerate(rows) if i // 2 % HELD_OUT == 0],
    }
    for split, chosen in splits.items():
        _write(made / f"labelled_{split}.jsonl", chosen)
        _write(made / f"begun_{split}.jsonl", [_split_review(row["text"]) for row in chosen])
    made.rename(workdir / "data")


def _sft() -> ConfigDict:
    config = _common("SFT", steps=300)
    config.data.path = "{workdir}/data/begun_train.jsonl"
    config.data.eval_path = "{workdir}/data/begun_eval.jsonl"
    config.rollout.max_response_length = 112
    config.warm_start.batch = 32
    config.actor.learning_rate = 1e-3
    config.eval.every = 0
    return config


def _reward_model() -> ConfigDict:
    config = _common("RewardModel", steps=450)
    config.data.path = "{workdir}/data/labelled_train.jsonl"
    config.data.eval_path = "{workdir}/data/labelled_eval.jsonl"
    config.rollout.max_response_length = 128
    config.warm_start.batch = 64
    config.actor.learning_rate = 1e-3
    config.actor.weight_decay = 0.01
    # Positive reviews score above 0, negative ones below.
    config.algorithm.label_coef = 0.5
    config.eval.every = 150
    return config


def _ppo() -> ConfigDict:
    config = _common("PPO", steps=60)
    config.actor.path = "{workdir}/sft"
    config.reward.path = "{workdir}/reward_model"
    config.data.path = "{workdir}/data/begun_train.jsonl"
    config.data.eval_path = "{workdir}/data/begun_eval.jsonl"
    config.data.eval_size = 64
    config.rollout.max_response_length = 72
    config.rollout.prompts = 16
    config.rollout.samples = 4
    config.algorithm.epochs = 2
    config.algorithm.minibatch = 32
    # The KL keeps the style of reviews; its coefficient adapts to the target (nats per token).
    # Responses that are cut off at the length limit are scored as they are.
    config.algorithm.kl_coef = 0.05
    config.algorithm.kl_target = 0.1
    config.algorithm.kl_horizon = 1000
    config.actor.learning_rate = 2e-4
    config.critic.learning_rate = 1e-3
    config.eval.every = 20
    return config


def _common(algorithm: str, steps: int) -> ConfigDict:
    config = hjax.default_config()
    config.algorithm.name = algorithm
    config.steps = steps
    config.data.eval_size = 0
    config.eval.prompts = 0
    config.actor.schedule = "cosine"
    config.actor.warmup_updates = 10
    config.checkpoint.every = 50
    return config


def _sorting() -> dict[str, ConfigDict]:
    sft = sorting_config("SFT", steps=30)
    sft.warm_start.steps = 0
    ppo = sorting_config("PPO", steps=150)
    ppo.warm_start.steps = 0
    ppo.algorithm.minibatch = 128
    ppo.algorithm.epochs = 2
    ppo.algorithm.kl_coef = 0.01
    ppo.critic.learning_rate = 1e-3
    ppo.actor.path = "{workdir}/sft"
    ppo.reward.path = "{workdir}/reward_model"
    reward_model = reward_model_config("RewardModel")
    reward_model.algorithm.centring = 0.01
    return {"sft": sft, "reward_model": reward_model, "ppo": ppo}


def _folder() -> Path:
    """HJAX_TEST_DATA if that is set, else the working directory."""
    return Path(os.environ.get("HJAX_TEST_DATA", "."))


def _lines(path: Path) -> list[str]:
    lines = (line.strip() for line in read_text(path).split("\n"))
    return [line for line in lines if PROMPT_LETTERS < len(line) <= MAX_LETTERS]


def _split_review(text: str) -> dict[str, str]:
    """Split a review into a prompt of some words and the response that continues it."""
    place = text.find(" ", PROMPT_LETTERS)
    place = len(text) // 2 if place < 0 else place
    return {"prompt": text[:place], "response": text[place:]}


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
