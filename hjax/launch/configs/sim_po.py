"""SimPO: mean log-probs with a margin, no reference.

    python -m hjax.launch --config=sim_po.py

On the pairs of dpo.py; docs/algorithms has the formula.
"""

from ml_collections import ConfigDict

from hjax.launch.configs import Measure, pairs

# Without a reference the chosen ones are preferred from the start: by more, in the end.
LEARNS = (Measure("actor/margin", rise=0.5), Measure("eval/accuracy", rise=0.05))


def get_config() -> ConfigDict:
    """The config of `--config=sim_po.py`."""
    config = pairs("SimPO")
    config.warm_start.steps = 40
    return config
