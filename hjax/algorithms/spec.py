"""Static description of an algorithm, known before a run: its roles, config keys and losses."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from ml_collections import ConfigDict

from hjax.algorithms.aggregation import AGGREGATIONS
from hjax.algorithms.corrections import CORRECTIONS
from hjax.algorithms.difficulty import KEYS as DIFFICULTY_KEYS
from hjax.algorithms.kl import KL_KINDS
from hjax.config import Config, convert
from hjax.errors import ConfigError
from hjax.roles import Role, network_role, role_table
from hjax.rules import Key, above, at_least, between, finite, one_of


class AlgorithmSpec:
    """The part of ``Algorithm`` that needs no workers: class attributes and class methods."""

    roles: ClassVar[tuple[str, ...]] = ("actor", "reference", "reward")
    # Role name -> worker class (a subclass of hjax.workers.Worker) or hjax.Role: additional roles,
    # or another class for one of the roles above.
    workers: ClassVar[dict[str, Any]] = {}
    # Whether it learns from sequences of tokens (False: from arrays of its own making; there are no
    # prompts, no tokenizer and no language model, and `generates` is False).
    sequences: ClassVar[bool] = True
    # Whether a step generates rollouts (False: it reads responses from the dataset).
    generates: ClassVar[bool] = True
    # Kind of training data: "prompts", "demonstrations", preference "pairs", "verdicts" (unpaired
    # responses labelled right or wrong, as KTO reads them), or labelled "steps" (process rewards).
    source: ClassVar[str] = "prompts"
    # Whether it learns from episodes that the actor plays in an environment (docs/agents.md).
    plays_environments: ClassVar[bool] = False
    # Adjacent rows that stay in one micro-batch: 2 for a pair.
    unit: ClassVar[int] = 1
    # Minimum number of examples in a training batch.
    fewest_examples: ClassVar[int] = 1
    # Data that it needs besides prompts, and how a dataset provides it; for error messages.
    needed_data: ClassVar[str] = ""
    data_hint: ClassVar[str] = ""
    # Which of the keys below this algorithm reads; None: all of them.
    shared_keys: ClassVar[tuple[str, ...] | None] = None

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if not cls.sequences:
            cls.generates = False
            if cls.shared_keys is None:
                cls.shared_keys = ("max_skipped",)
            if cls.roles is AlgorithmSpec.roles:
                cls.roles = ()

    # Additional keys, and `defaults` that override those of the base classes.
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
        "kl_importance": Key(
            False,
            "multiply the KL in the loss by the ratio to the policy that drew: with k1 or k3 an "
            "unbiased estimate of the reverse KL and its gradient (docs/losses.md)",
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
        **DIFFICULTY_KEYS,
    }
    defaults: ClassVar[Mapping[str, Any]] = {}

    @classmethod
    def all_keys(cls) -> dict[str, Key]:
        """The keys of the class and its bases, each with the default of the most derived class;
        of the keys that all algorithms share only ``shared_keys``.

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

        A class may override it to add keys to the result of ``super()`` (without documentation or
        validation), or to change or delete keys. Its result is final.
        """
        return Config({name: key.default for name, key in cls.all_keys().items()})

    @classmethod
    def fewest_samples(cls, config: ConfigDict) -> int:
        """Minimum number of responses per prompt.

        Args:
          config: the section ``algorithm``, complete.
        """
        return 1

    @classmethod
    def check_samples(cls, config: ConfigDict, samples: int) -> None:
        """Raise ConfigError if it cannot learn from so many responses per prompt.

        Args:
          config: the section ``algorithm``, complete.
          samples: responses per prompt.
        """
        if cls.generates and samples < (least := cls.fewest_samples(config)):
            baseline = config.get("baseline", "none")
            other = "" if baseline == "none" else ", or algorithm.baseline to none"
            raise ConfigError(
                f"config.rollout.samples={samples}: {cls.__name__} compares a response with the "
                f"others to its prompt; set it to {least} or more{other}"
            )

    @classmethod
    def longest_prompt(cls, config: ConfigDict, prompt_length: int) -> int:
        """Tokens of the longest prompt that the actor reads.

        Args:
          config: the section ``algorithm``, complete.
          prompt_length: of the run's data.
        """
        return prompt_length

    @classmethod
    def pretraining_loss(cls, config: ConfigDict) -> Any:
        """The loss on ``pretraining_batch``, added to the actor's, if it is another than that on
        demonstrations; else None.

        Args:
          config: the section ``algorithm``, complete.
        """
        return None

    @classmethod
    def check_rewards(cls, config: ConfigDict, names: Sequence[str]) -> None:
        """Raise ConfigError if the algorithm cannot learn from rewards with these names.

        Args:
          config: the section ``algorithm``, complete.
          names: of the rewards that the function returns; empty: it returns one unnamed reward.
        """

    @classmethod
    def check(cls, config: ConfigDict) -> None:
        """Raise ConfigError for keys that are valid alone but contradict each other.

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
        cls.losses(config, 1)  # its constructor refuses switches without effect

    @classmethod
    def all_roles(cls) -> tuple[str, ...]:
        """Names of all roles that some configuration uses."""
        return tuple(dict.fromkeys((*cls.roles, *cls.workers)))

    @classmethod
    def needs_reference(cls, config: ConfigDict) -> bool:
        """Whether a configuration uses the reference; by default if ``kl_coef`` is not 0."""
        return bool(config.get("kl_coef", 1.0))

    @classmethod
    def needed_roles(cls, config: ConfigDict) -> tuple[str, ...]:
        """Names of the roles that a configuration uses."""
        kept = cls.needs_reference(config)
        return tuple(role for role in cls.all_roles() if kept or role != "reference")

    @classmethod
    def role_table(cls, config: ConfigDict) -> dict[str, Role]:
        """The ``Role`` of each role that a configuration uses, by name.

        Raises:
          ConfigError: a role that is neither built in nor in ``workers``.
        """
        names = cls.needed_roles(config)
        own = {name: worker for name, worker in cls.workers.items() if name in names}
        if not cls.sequences:
            own = {name: network_role(name, worker) for name, worker in own.items()}
        return role_table(names, own, cls.__name__)

    @classmethod
    def losses(cls, config: ConfigDict, max_response_length: int) -> dict[str, Any]:
        """The loss of each trained role, by role; picklable, because it is sent to the worker.

        Without ``sequences`` a role that has none here is trained by its worker's own.
        """
        if not cls.sequences:
            return {}
        raise NotImplementedError(f"{cls.__name__} must define losses")

    @classmethod
    def describe_step(cls, config: ConfigDict) -> dict[str, int]:
        """Batch arithmetic of a step without ``sequences``, for the dry run: numbers by name.

        Args:
          config: the section ``algorithm``, complete.
        """
        return {}

    @classmethod
    def updates_per_step(cls, config: ConfigDict) -> Mapping[str, int]:
        """Updates of each trained role in a step, of an algorithm without ``sequences``; by them
        learning rates fall.

        Args:
          config: the section ``algorithm``, complete.
        """
        raise ConfigError(
            f"a learning rate with a schedule or a warm-up share ends with the run's updates, and "
            f"{cls.__name__} does not say how many a step takes: define "
            "updates_per_step(config) -> {role: number}, or use schedule=constant"
        )
