"""What an algorithm says of itself before there is a run: its roles, its keys, its losses."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from ml_collections import ConfigDict

from hjax.algorithms.aggregation import AGGREGATIONS
from hjax.algorithms.corrections import CORRECTIONS
from hjax.algorithms.kl import KL_KINDS
from hjax.config import Config, convert
from hjax.errors import ConfigError
from hjax.roles import Role, role_table
from hjax.rules import Key, above, at_least, between, finite, one_of


class AlgorithmSpec:
    """The part of ``Algorithm`` that needs no workers: class attributes and class methods."""

    roles: ClassVar[tuple[str, ...]] = ("actor", "reference", "reward")
    # Name -> worker class (a subclass of hjax.workers.Worker) or hjax.Role: roles of your own, or
    # your own class for one of the roles above.
    workers: ClassVar[dict[str, Any]] = {}
    # Whether steps are made of rollouts (False: of what the data has).
    generates: ClassVar[bool] = True
    # What is learned from: "prompts" that are answered, "demonstrations", preference "pairs", or
    # "verdicts" (responses that are each right or wrong), or labelled "steps".
    source: ClassVar[str] = "prompts"
    # Rows that no micro-batch cuts apart: 2 of a pair.
    unit: ClassVar[int] = 1
    # Examples of a batch that it learns from, at the fewest.
    fewest_examples: ClassVar[int] = 1
    # What it cannot learn without, beside prompts, and how data may have it.
    needed_data: ClassVar[str] = ""
    data_hint: ClassVar[str] = ""
    # Of the keys that all algorithms share those that are read; None: all of them.
    shared_keys: ClassVar[tuple[str, ...] | None] = None

    # Keys of its own, and other defaults for keys of its bases.
    keys: ClassVar[Mapping[str, Key]] = {
        "minibatch": Key(
            0,
            "sequences per optimizer update; 0: the step's whole batch. Divides prompts * samples",
            at_least(0),
        ),
        "epochs": Key(1, "passes over each step's batch", at_least(1)),
        "kl_coef": Key(
            0.05, "weight of the KL to the reference; 0 needs no reference", at_least(0)
        ),
        "kl_in": Key(
            "reward",
            'where the KL enters: "reward" (k1, subtracted per token) or "loss"',
            one_of("reward", "loss"),
        ),
        "kl_estimator": Key(
            "k3+",
            "estimator of the KL in the loss: k2, k3, k1+ or k3+ (docs/losses.md)",
            one_of(*KL_KINDS),
        ),
        "kl_target": Key(
            0.0,
            "mean KL per token that an adaptive kl_coef aims at, in nats; 0: kl_coef is fixed",
            at_least(0),
        ),
        "kl_horizon": Key(
            10000,
            "sequences over which an error of 20 % or more changes kl_coef by 20 %",
            at_least(1),
        ),
        "entropy_coef": Key(0.0, "weight of the entropy bonus", finite()),
        "entropy_target": Key(
            0.0,
            "mean entropy per token, in nats: below it entropy_coef grows by entropy_step a step, "
            "above it entropy_coef falls and there is no bonus; 0: entropy_coef is fixed",
            at_least(0),
        ),
        "entropy_step": Key(0.0001, "by which entropy_coef follows entropy_target", above(0)),
        "entropy_max": Key(0.005, "largest entropy_coef that entropy_target may set", above(0)),
        "aggregation": Key(
            "token",
            'how token losses are added up: "token", "sequence", "constant" or "sum" '
            "(docs/losses.md)",
            one_of(*AGGREGATIONS),
        ),
        "correction": Key(
            "none",
            "weight on the policy's loss for rollouts of other weights than learning starts from: "
            "none; decoupled (decoupled PPO), truncated (truncated importance sampling), icepop, "
            "sequence_mask or sequence_sum_mask, for which the actor scores the responses once "
            "more (docs/losses.md)",
            one_of(*CORRECTIONS),
        ),
        "correction_low": Key(
            0.0, "least weight of the correction; 0: its source's bound", at_least(0)
        ),
        "correction_cap": Key(
            0.0, "largest weight of the correction; 0: its source's bound", at_least(0)
        ),
        "reward_scale": Key(1.0, "rewards are multiplied by it before anything else", above(0)),
        "reward_clip": Key(0.0, "bound on the absolute scaled reward; 0: none", at_least(0)),
        "overlong_buffer": Key(
            0.0,
            "share of rollout.max_response_length, its end, in which a response's reward falls "
            "linearly by up to overlong_penalty (DAPO: 0.2); 0: none",
            between(0, 1),
        ),
        "overlong_penalty": Key(
            1.0, "what the longest response there may be loses, in rewards", above(0)
        ),
        "mask_truncated": Key(
            False, "responses that ran into the length limit leave the loss, not the baseline"
        ),
        "max_skipped": Key(
            5,
            "optimizer updates in a row that may be skipped for not being finite; then the run "
            "stops",
            at_least(0),
        ),
    }
    defaults: ClassVar[Mapping[str, Any]] = {}

    @classmethod
    def all_keys(cls) -> dict[str, Key]:
        """The keys of the class and its bases, each with the default of the class that is nearest;
        of those that all algorithms share only ``shared_keys``.

        Raises:
          ConfigError: ``defaults`` names a key that no base has, or a value of another type.
        """
        found: dict[str, Key] = {}
        for base in reversed(cls.__mro__):
            found |= vars(base).get("keys", {})
            for name, value in vars(base).get("defaults", {}).items():
                if name not in found:
                    raise ConfigError(
                        f"{base.__name__}.defaults: no key {name!r}; there are {', '.join(found)}"
                    )
                value = convert(f"algorithm.{name}", value, found[name].default)
                found[name] = dataclasses.replace(found[name], default=value)
        if cls.shared_keys is not None:
            for name in AlgorithmSpec.keys.keys() - set(cls.shared_keys):
                found.pop(name, None)
        return found

    @classmethod
    def default_config(cls) -> Config:
        """The algorithm's own keys, which live under ``config.algorithm``, at their defaults.

        A class may override it and add keys to what ``super()`` returns (they have no meaning and
        no rule then) or change or delete others; it has the last word.
        """
        return Config({name: key.default for name, key in cls.all_keys().items()})

    @classmethod
    def fewest_samples(cls, config: ConfigDict) -> int:
        """Responses per prompt that it needs at least.

        Args:
          config: the section ``algorithm``, complete.
        """
        return 1

    @classmethod
    def check_rewards(cls, config: ConfigDict, names: Sequence[str]) -> None:
        """Raise ConfigError where it cannot learn from rewards of such names.

        Args:
          config: the section ``algorithm``, complete.
          names: of the rewards that the function returns; empty: one without a name.
        """

    @classmethod
    def check(cls, config: ConfigDict) -> None:
        """Raise ConfigError where keys that are each in their range do not go together.

        Args:
          config: the section ``algorithm``, complete.
        """
        if config.get("kl_target", 0.0) and not config.get("kl_coef", 0.0):
            raise ConfigError(
                f"config.algorithm.kl_target={config.kl_target} moves config.algorithm.kl_coef, "
                "which is 0: give it a first value above 0, or set kl_target to 0"
            )
        if config.get("entropy_target", 0.0):
            if not 0 <= config.entropy_coef <= config.entropy_max:
                raise ConfigError(
                    f"config.algorithm.entropy_coef={config.entropy_coef} is where entropy_target "
                    f"begins: set it to 0 up to entropy_max={config.entropy_max}"
                )
        cls.losses(config, 1)  # which refuses switches that have no effect beside each other

    @classmethod
    def all_roles(cls) -> tuple[str, ...]:
        """The roles of any configuration, by name."""
        return tuple(dict.fromkeys((*cls.roles, *cls.workers)))

    @classmethod
    def needs_reference(cls, config: ConfigDict) -> bool:
        """Whether a configuration uses the reference: not with a KL of coefficient 0."""
        return bool(config.get("kl_coef", 1.0))

    @classmethod
    def needed_roles(cls, config: ConfigDict) -> tuple[str, ...]:
        """The roles that a configuration uses."""
        kept = cls.needs_reference(config)
        return tuple(role for role in cls.all_roles() if kept or role != "reference")

    @classmethod
    def role_table(cls, config: ConfigDict) -> dict[str, Role]:
        """What each role that a configuration uses is, by name.

        Raises:
          ConfigError: a role that is neither a standing one nor among ``workers``.
        """
        names = cls.needed_roles(config)
        own = {name: worker for name, worker in cls.workers.items() if name in names}
        return role_table(names, own, cls.__name__)

    @classmethod
    def losses(cls, config: ConfigDict, max_response_length: int) -> dict[str, Any]:
        """The loss of each trained role, picklable: it travels to the role's worker."""
        raise NotImplementedError(f"{cls.__name__} must define losses")
