"""Trial calls of the reward functions on a few rows, before anything is trained."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from hjax.agents.agent_settings import agent_of
from hjax.algorithms import Algorithm
from hjax.data.row_answers import demonstration_texts
from hjax.environments.episode_server import load_environment, takes_sandbox
from hjax.environments.tools import load_tools
from hjax.errors import RunError
from hjax.rewards.function import RewardFunction, first_failure
from hjax.rewards.reward_results import RewardResult
from hjax.run.episode_rollout import RETURN_COLUMN, environment_of
from hjax.run.inputs import Inputs
from hjax.sandbox.sandbox_settings import SandboxSettings
from hjax.settings.config_checks import on_cluster

TRIAL_ROWS = 4
# Outcomes that mean a broken function, whatever the response.
_BROKEN_OUTCOMES = ("exception", "wrong_type", "wrong_length")
# In the message of a function that asks for a column which is not there.
_MISSING_COLUMN = ("KeyError: ", " required positional argument", " required keyword-only argument")


@dataclasses.dataclass(frozen=True)
class RewardTrial:
    """A reward function's result on a few rows.

    Attributes:
      role: reward or cost.
      name: of the function.
      answers: kind of responses: `demonstrations`, `empty answers` or `repetitions of prompts`.
      responses: texts, or token ids without a tokenizer.
      result: what the function returned.
      columns: of the data, that the function gets.
    """

    role: str
    name: str
    answers: str
    responses: Sequence[Any]
    result: RewardResult
    columns: Sequence[str] = ()

    @property
    def failed(self) -> bool:
        """Whether the function raised, or returned something that is no reward."""
        return any(self.result.outcomes[outcome] for outcome in _BROKEN_OUTCOMES)

    def check(self, algorithm: type[Algorithm], config: ConfigDict) -> None:
        """Check the result against the algorithm.

        Args:
          algorithm: of the run.
          config: of the run.

        Raises:
          RunError: the function failed; with its traceback.
          ConfigError: the algorithm does not accept rewards of these names.
        """
        if self.failed:
            what, details = first_failure(self.result)
            missing = any(sign in what for sign in _MISSING_COLUMN)
            columns = f"; the data's columns are {', '.join(self.columns)}" if missing else ""
            raise RunError(
                f"the {self.role} function {self.name} fails on {len(self.responses)} "
                f"{self.answers}, before training{what}{columns}",
                details=details,
            )
        if self.role == "reward":
            algorithm.check_rewards(config.algorithm, tuple(self.result.named))

    def record(self) -> dict[str, Any]:
        """The result as JSON, for the dry run."""
        rewards = [None if np.isnan(x) else round(float(x), 4) for x in self.result.rewards]
        named = {
            name: [None if np.isnan(x) else round(float(x), 4) for x in values]
            for name, values in self.result.named.items()
        }
        outcomes = {name: count for name, count in self.result.outcomes.items() if count}
        shown = {"judged": self.answers, "answers": [str(x) for x in self.responses]}
        return {"function": self.name, **shown, "returned": rewards, **named, "outcomes": outcomes}


def sandbox_remark(
    config: ConfigDict, functions: Mapping[str, RewardFunction], environment: str = ""
) -> str:
    """The sandbox of a reward function, a tool or an environment that runs programs, in one line;
    empty: none does, or it is on a cluster's other machines.

    Raises:
      ConfigError: programs cannot be run there.
    """
    uses = [each.sandbox for each in functions.values() if hasattr(each.function, "use_sandbox")]
    settings = SandboxSettings.of_config(config.sandbox)
    if config.environment.tools:  # which are called in processes beside this one
        tools = load_tools(config.environment.tools)
        if any(tool.uses_sandbox for tool in tools):
            return settings.describe()
    elif environment and not agent_of(config.agent):
        if takes_sandbox(load_environment(environment)):
            return settings.describe()
    return uses[0].describe() if uses and not on_cluster(config) else ""


def trial_calls(
    config: ConfigDict, inputs: Inputs, functions: Mapping[str, RewardFunction]
) -> list[RewardTrial]:
    """Call reward functions once, on the demonstrations of the first prompts.

    Without demonstrations the responses are empty, or, if that fails, the prompts themselves.

    Args:
      config: of the run.
      inputs: of the run.
      functions: reward and cost functions, by role.
    """
    rows = inputs.train.select(range(min(TRIAL_ROWS, len(inputs.train))))
    plays = bool(environment_of(config, inputs.task)) and not config.environment.tools
    texts = None if plays else demonstration_texts(inputs.task, rows, config.seed)
    tokenizer = inputs.tokenizer
    end = list(inputs.eos_ids[:1])
    data = rows.rows(range(len(rows)))
    prompts = data["prompt_text"] or data["prompt_tokens"]
    columns = data["columns"] | ({RETURN_COLUMN: [0.0] * len(rows)} if plays else {})

    def call(role: str, answers: str, responses: Sequence[Any]) -> RewardTrial:
        encoded = [tokenizer.encode(x, add_special=False) if tokenizer else x for x in responses]
        tokens, function = [list(row) + end for row in encoded], functions[role]
        result = function(prompts, list(responses), columns, data["prompt_tokens"], tokens)
        return RewardTrial(role, function.name, answers, responses, result, list(columns))

    found = []
    for role in functions:
        if texts:
            found.append(call(role, "demonstrations", texts))
            continue
        trial = call(role, "empty answers", [type(prompt)() for prompt in prompts])
        # An empty response may fail where no other does, such as a mean over its tokens.
        found.append(call(role, "repetitions of prompts", prompts) if trial.failed else trial)
    return found


def try_rewards(
    config: ConfigDict,
    algorithm: type[Algorithm],
    inputs: Inputs,
    functions: Mapping[str, RewardFunction],
) -> None:
    """Try the user's reward functions, so that a broken one fails before training.

    It is skipped on a cluster, where they run with files and modules that this host may lack.
    """
    if algorithm.generates and not on_cluster(config):
        own = [role for role in ("reward", "cost") if config[role].function and role in functions]
        for call in trial_calls(config, inputs, {role: functions[role] for role in own}):
            call.check(algorithm, config)
