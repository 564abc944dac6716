"""Tasks of gymnasium: `gymnasium:NAME`, episodes of an environment with discrete or text spaces."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
from typing import Any, ClassVar

import numpy as np

from hjax.data.tasks.environment_task import EnvironmentTask
from hjax.data.tasks.package_task import PackageTask, import_package, make_class
from hjax.data.tasks.task import check_split, is_held_out
from hjax.errors import ConfigError, DataError, did_you_mean, one_line

FAMILY = "gymnasium"


@dataclasses.dataclass(frozen=True)
class GymnasiumTask(EnvironmentTask, PackageTask):
    """Episodes of an environment of gymnasium, see
    `hjax.environments.gymnasium_adapter.GymnasiumEnvironment`. `gymnasium:MODULE:NAME` imports the
    module, which registers the environment, in each process.

    A row is a seed, from which the initial state follows; seeds are not shared by the splits, but
    rows may show the same prompt, the first observation. Columns: `gymnasium`, `settings`, `seed`
    and `actions`. Turns: the environment's own limit, or 100. No one knows which actions are good:
    demonstrations are drawn at random.

    Options: those arguments of the environment that are numbers, text, True or False, or lists of
    these (`is_slippery` of FrozenLake-v1), and

      actions: names of the actions in their order, with commas between; empty: numbers.
      noise, partial: not used.
    """

    environment: ClassVar[str] = "hjax.environments.gymnasium_adapter:GymnasiumEnvironment"
    game: ClassVar[str] = ""

    actions: str = dataclasses.field(default="")

    size = 2**31

    def __post_init__(self) -> None:
        super().__post_init__()
        _example(self)

    @property
    def alphabet(self) -> str:
        found: str = _example(self).alphabet
        return found

    @property
    def max_turns(self) -> int:
        spec = _example(self).game.spec
        return (spec and spec.max_episode_steps) or 100

    @property
    def turn_length(self) -> int:
        return int(_example(self).turn_length)

    @property
    def observation_length(self) -> int:
        return int(_example(self).observation_length)

    @property
    def settings(self) -> dict[str, Any]:
        own = {field.name for field in dataclasses.fields(GymnasiumTask)}
        chosen = {key: getattr(self, key) for key in self.default_options() if key not in own}
        names = [name.strip() for name in self.actions.split(",")] if self.actions else []
        return {"gymnasium": self.game, "settings": chosen, "actions": names}

    def record(self, index: int) -> dict[str, Any]:
        row = {"seed": index, **self.settings}
        return {"prompt": _example(self).reset(row, 0).text, **row}

    def examples(self, split: str, seed: int, count: int) -> list[dict[str, Any]]:
        """Records of different seeds, in a random order; none is in both splits.

        Args:
          split: "train" or "eval".
          seed: determines the records and their order.
          count: number of records.
        """
        check_split(split)
        if count < 1:
            raise DataError(f"task {self.name}: {count} examples asked for; at least 1 is needed")
        rng, seeds = np.random.default_rng([seed, int(split == "eval")]), dict[int, None]()
        while len(seeds) < count:
            drawn = int(rng.integers(self.size))
            if is_held_out(str(drawn)) == (split == "eval"):
                seeds[drawn] = None
        return [self.record(index) for index in seeds]

    def expert_actions(self, environment: Any, rng: np.random.Generator) -> list[str]:
        return [environment.random_action(rng)]

    def random_action(self, environment: Any, rng: np.random.Generator) -> str:
        return str(environment.random_action(rng))


@functools.cache
def task_class(game: str) -> type[PackageTask]:
    """The class of the tasks of an environment's id.

    Raises:
      ConfigError: gymnasium is not installed, or has no such environment.
    """
    name = f"{FAMILY}:{game}"
    gymnasium = import_package("gymnasium", "gymnasium", name)
    try:
        if ":" in game:  # a module that registers environments
            importlib.import_module(game.partition(":")[0])
        spec = gymnasium.spec(game.rpartition(":")[2])
        found = spec.entry_point
        if isinstance(found, str):
            module, _, attribute = found.partition(":")
            found = getattr(importlib.import_module(module), attribute)
        arguments = inspect.signature(found).parameters
    except Exception as error:
        known = gymnasium.registry
        near = "" if game in known else did_you_mean(game, known)
        raise ConfigError(
            f"no task {name!r}: {near}{type(error).__name__}: {one_line(error)}"
        ) from error
    options = {key: argument.default for key, argument in arguments.items()} | spec.kwargs
    return make_class(GymnasiumTask, name, options, game=game)


@functools.lru_cache(maxsize=8)
def _example(task: GymnasiumTask) -> Any:
    """An environment of the task, for its spaces and first observations."""
    environment = task.make_environment()
    environment.reset({"seed": 0, **task.settings}, 0)
    return environment
