"""A first call of the reward functions, before anything is trained: what they make of some rows."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from hjax.algorithms import Algorithm
from hjax.errors import RunError
from hjax.rewards.function import RewardFunction, first_failure
from hjax.rewards.reward_results import RewardResult
from hjax.run.examples import shown_responses
from hjax.run.inputs import Inputs
from hjax.settings.config_checks import on_cluster

ROWS = 4
# Outcomes of a function that cannot be meant: whatever the answer, it would be so again.
_WRONG = ("exception", "wrong_type", "wrong_length")


@dataclasses.dataclass(frozen=True)
class RewardTrial:
    """What a reward function said of some rows.

    Attributes:
      role: reward or cost.
      name: of the function.
      answers: what was judged: `demonstrations`, `empty answers` or `repetitions of prompts`.
      responses: their texts, or token ids without a tokenizer.
      result: what it returned.
    """

    role: str
    name: str
    answers: str
    responses: Sequence[Any]
    result: RewardResult

    @property
    def failed(self) -> bool:
        """Whether the function raised, or returned what no reward is."""
        return any(self.result.outcomes[outcome] for outcome in _WRONG)

    def check(self, algorithm: type[Algorithm], config: ConfigDict) -> None:
        """Hold it against what learns from it.

        Args:
          algorithm: of the run.
          config: of the run.

        Raises:
          RunError: the function failed; with its traceback.
          ConfigError: the algorithm does not take rewards of these names.
        """
        if self.failed:
            what, details = first_failure(self.result)
            raise RunError(
                f"the {self.role} function {self.name} fails on {len(self.responses)} "
                f"{self.answers}, before training{what}",
                details=details,
            )
        if self.role == "reward":
            algorithm.check_rewards(config.algorithm, tuple(self.result.named))

    def record(self) -> dict[str, Any]:
        """For the dry run."""
        rewards = [None if np.isnan(x) else round(float(x), 4) for x in self.result.rewards]
        named = {
            name: [None if np.isnan(x) else round(float(x), 4) for x in values]
            for name, values in self.result.named.items()
        }
        outcomes = {name: count for name, count in self.result.outcomes.items() if count}
        shown = {"judged": self.answers, "answers": [str(x) for x in self.responses]}
        return {"function": self.name, **shown, "returned": rewards, **named, "outcomes": outcomes}


def first_calls(
    config: ConfigDict, inputs: Inputs, judges: Mapping[str, RewardFunction]
) -> list[RewardTrial]:
    """Call the functions of some roles once, on the first prompts with demonstrations. Where the
    data has none, with empty answers, and if that fails with the prompts themselves as answers.

    Args:
      config: of the run.
      inputs: of the run.
      judges: the functions, by role.
    """
    rows = inputs.train.select(range(min(ROWS, len(inputs.train))))
    texts = shown_responses(config, inputs.task, rows)
    tokenizer = inputs.tokenizer
    end = list(inputs.eos_ids[:1])
    asked = rows.rows(range(len(rows)))
    prompts = asked["prompt_text"] or asked["prompt_tokens"]

    def call(role: str, judge: RewardFunction, answers: str, said: Sequence[Any]) -> RewardTrial:
        tokens = [tokenizer.encode(text, add_special=False) for text in said] if tokenizer else said
        ended = [list(row) + end for row in tokens]
        result = judge(prompts, list(said), asked["columns"], asked["prompt_tokens"], ended)
        return RewardTrial(role, judge.name, answers, said, result)

    found = []
    for role, judge in judges.items():
        if texts:
            found.append(call(role, judge, "demonstrations", texts))
            continue
        first = call(role, judge, "empty answers", [type(prompt)() for prompt in prompts])
        # A mean over no token fails there and nowhere else.
        if first.failed:
            first = call(role, judge, "repetitions of prompts", prompts)
        found.append(first)
    return found


def try_rewards(
    config: ConfigDict,
    algorithm: type[Algorithm],
    inputs: Inputs,
    judges: Mapping[str, RewardFunction],
) -> None:
    """Call functions of the user's once, so that one that fails does so before the training.

    On a cluster they run elsewhere, with files and modules that are not here.
    """
    if algorithm.generates and not on_cluster(config):
        own = [role for role in ("reward", "cost") if config[role].function and role in judges]
        for call in first_calls(config, inputs, {role: judges[role] for role in own}):
            call.check(algorithm, config)
