"""Safe-RLHF's cost model: which of two answers is safer, and which answers are safe.

    python -m hjax.launch --config=cost_model.py

The task `harvest` has poisonous digits. With data of your own (`--config.data.path=FILE`) `chosen`
is the safer answer, and `chosen_label` and `rejected_label` are 1 for safe, 0 for unsafe answers. A
cost above 0 means unsafe, so with the workdir as cost.path of `safe_rlhf.py` use a limit around 0.
"""

from ml_collections import ConfigDict

from hjax.launch.configs import reward_model_config


def get_config() -> ConfigDict:
    """The config of `--config=cost_model.py`."""
    config = reward_model_config("CostModel", task="harvest", steps=100)
    config.data.task_options.length = 8
    # Eight digits and the end-of-sequence token.
    config.rollout.max_response_length = 9
    return config
