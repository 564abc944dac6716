"""hjax: HybridFlow in JAX, a research framework for RLHF on TPUs and GPUs.

Importing it loads nothing heavy and starts no JAX backend: each public name below is imported
when it is first used (PEP 562), so that `jax_num_cpu_devices` and its like can still be set.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

if TYPE_CHECKING:  # what type checkers and editors see of the table below
    from hjax import algorithms as algorithms
    from hjax import controller as controller
    from hjax import errors as errors
    from hjax import rules as rules
    from hjax import workers as workers
    from hjax.environments.environment import Environment as Environment
    from hjax.environments.environment import Observation as Observation
    from hjax.environments.environment import Step as Step
    from hjax.planning.auto import plan_run as plan
    from hjax.roles import Role as Role
    from hjax.rollout.language_model import load_model as load_model
    from hjax.rules import Key as Key
    from hjax.run.saved_worker import load_worker as load_worker
    from hjax.run.trainer import Trainer as Trainer
    from hjax.settings.config_loading import load_config as get_config
    from hjax.settings.keys import default_config as default_config
    from hjax.sharding.protocols import protocol as protocol
    from hjax.training_service.datum import Datum as Datum
    from hjax.training_service.learner import Learner as Learner

# Public name -> (module, attribute in it; "" is the module itself).
_LAZY = {
    "Datum": ("hjax.training_service.datum", "Datum"),
    "Environment": ("hjax.environments.environment", "Environment"),
    "Key": ("hjax.rules", "Key"),
    "Learner": ("hjax.training_service.learner", "Learner"),
    "Observation": ("hjax.environments.environment", "Observation"),
    "Role": ("hjax.roles", "Role"),
    "Step": ("hjax.environments.environment", "Step"),
    "Trainer": ("hjax.run.trainer", "Trainer"),
    "algorithms": ("hjax.algorithms", ""),
    "controller": ("hjax.controller", ""),
    "errors": ("hjax.errors", ""),
    "get_config": ("hjax.settings.config_loading", "load_config"),
    "default_config": ("hjax.settings.keys", "default_config"),
    "load_model": ("hjax.rollout.language_model", "load_model"),
    "load_worker": ("hjax.run.saved_worker", "load_worker"),
    "plan": ("hjax.planning.auto", "plan_run"),
    "protocol": ("hjax.sharding.protocols", "protocol"),
    "rules": ("hjax.rules", ""),
    "workers": ("hjax.workers", ""),
}

__all__ = [
    "Datum",
    "Environment",
    "Key",
    "Learner",
    "Observation",
    "Role",
    "Step",
    "Trainer",
    "__version__",
    "algorithms",
    "controller",
    "default_config",
    "errors",
    "get_config",
    "load_model",
    "load_worker",
    "plan",
    "protocol",
    "rules",
    "workers",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        from hjax.config_aliases import NAMES

        if name in NAMES:
            raise AttributeError(f"module 'hjax' has no attribute {name!r}: {NAMES[name]}")
        known = ", ".join(__all__)
        raise AttributeError(f"module 'hjax' has no attribute {name!r}; it has {known}")
    module_name, attribute = _LAZY[name]
    module = importlib.import_module(module_name)
    value = getattr(module, attribute) if attribute else module
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
