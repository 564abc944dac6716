"""PPO on real weights: a small language model learns to tell happier stories.

    HJAX_TEST_DATA=... python -m hjax.launch --config=stories.py
    python -m hjax.launch --config=stories.py --config.actor.path=DIR

The weights are any Hugging Face Llama directory that continues English children's stories, such as
the 260k-parameter model of llama2.c (stories260K). The prompts are story openings that hjax
ships; the reward function is in a file of its own, to copy and change.
"""

import os
from pathlib import Path

from ml_collections import ConfigDict

import hjax.rewards
from hjax.launch.configs import base

WEIGHTS = "stories260K-hf"


def get_config() -> ConfigDict:
    """The config of `--config=stories.py`."""
    config = base.get_config()
    config.algorithm.name = "PPO"
    config.steps = 80

    config.actor.path = _weights()
    config.data.path = str(Path(__file__).with_name("stories_openings.jsonl"))
    # A fifth of the openings is held out for evaluation.
    config.data.eval_fraction = 0.2
    rewards = Path(hjax.rewards.__file__).parent
    config.reward.function = f"{rewards / 'happy_stories.py'}:reward"

    # Long enough to express a feeling, short enough for a CPU.
    config.rollout.max_response_length = 48
    config.rollout.prompts = 16
    config.rollout.samples = 8
    config.algorithm.minibatch = 64
    config.algorithm.epochs = 2

    # The KL keeps what the pretrained weights know; its coefficient adapts to the target (nats per
    # token), so that it stays bounded.
    config.algorithm.kl_coef = 0.05
    config.algorithm.kl_target = 0.1
    config.algorithm.kl_horizon = 2000

    # Decays to 0, so that the greedy stories stabilise at the end.
    config.actor.learning_rate = 1.5e-4
    config.actor.schedule = "cosine"
    config.critic.learning_rate = 5e-4
    config.actor.warmup_updates = 5

    config.eval.every = 10
    config.eval.prompts = 0
    config.checkpoint.every = 20
    return config


def _weights() -> str:
    """In the folder HJAX_TEST_DATA if that is set, else in the working directory."""
    folder = os.environ.get("HJAX_TEST_DATA")
    return str(Path(folder, "weights", WEIGHTS)) if folder else WEIGHTS
