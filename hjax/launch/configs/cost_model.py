"""Safe-RLHF's cost model: which of two answers is safer, and which are safe at all.

    python -m hjax.launch --config=cost_model.py

The task `harvest` has poisonous digits. With data of your own (`--config.data.path=FILE`) `chosen`
is the safer answer, and `chosen_label` and `rejected_label` say which are safe (1) and which not
(0). A cost above 0 means unsafe, so the workdir as cost.path of `safe_rlhf.py` goes with a limit
around 0.
"""

from ml_collections import ConfigDict

from hjax.launch.configs import judging


def get_config() -> ConfigDict:
    """The config of `--config=cost_model.py`."""
    config = judging("CostModel", task="harvest", steps=100)
    config.data.task_options.length = 8
    # Eight digits and the end-of-sequence token.
    config.rollout.max_response_length = 9
    return config
