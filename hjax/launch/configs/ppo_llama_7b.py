"""PPO on a 7B Llama, for 16 to 64 accelerators: an example of a real run.

    python -m hjax.launch.compile --config=ppo_llama_7b.py --topology=v5p:4x4x4
    python -m hjax.launch --config=ppo_llama_7b.py --config.actor.path=DIR \\
        --config.reward.path=DIR --config.data.path=FILE

The paths name a preset shape, which is enough to compile every program for other hardware and to
see whether it fits. To train, set directories with weights (a language model, and a reward model
with the same tokenizer or another) and prompts.
"""

from ml_collections import ConfigDict

from hjax.launch.configs import base

SHAPE = "llama-7b"


def get_config() -> ConfigDict:
    """The config of `--config=ppo_llama_7b.py`."""
    config = base.get_config()
    config.algorithm.name = "PPO"
    config.steps = 500

    # Critic and reference start from the actor's weights.
    config.actor.path = SHAPE
    config.reward.path = SHAPE
    config.data.path = "prompts.jsonl"

    config.model.dtype = "bfloat16"
    config.model.remat = "attention"

    # The sizes of the paper's experiments, at half its batch.
    config.rollout.prompts = 512
    config.rollout.samples = 1
    config.rollout.max_prompt_length = 1024
    config.rollout.max_response_length = 1024
    config.algorithm.minibatch = 128

    # Parameters, gradients and Adam's moments are sharded over all devices (FSDP), with tensor
    # parallelism in groups of 4 with fast links. Generation splits over 2 of the 4, so that the
    # weights and its share of the KV cache fit next to the training state.
    for role in ("actor", "critic", "reference", "reward"):
        config.layout[role].train.data = 1
        config.layout[role].train.fsdp = -1
        config.layout[role].train.tensor = 4
    config.layout.actor.generate.tensor = 2

    # Two rows per data-parallel shard on 64 devices.
    config.actor.micro_batch = 32
    config.critic.micro_batch = 32

    config.actor.learning_rate = 1e-6
    config.actor.warmup_updates = 10
    config.critic.learning_rate = 5e-6
    config.algorithm.kl_coef = 0.05

    config.eval.every = 50
    config.checkpoint.every = 50
    return config
