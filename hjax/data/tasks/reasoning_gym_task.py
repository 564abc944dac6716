"""Tasks of reasoning-gym: `reasoning_gym:NAME`, a question that one response answers."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from hjax.data.tasks.package_task import PackageTask, import_package, make_class
from hjax.data.tasks.task import listed_records
from hjax.errors import ConfigError, DataError, did_you_mean, one_line

FAMILY = "reasoning_gym"
# Most questions of a task: all are made to find its alphabet.
MOST = 2**17


@dataclasses.dataclass(frozen=True)
class ReasoningGymTask(PackageTask):
    """A procedural data set of reasoning-gym. The package's `score_answer` is the reward, from 0 to
    1, and a response is right where it is 1. Columns: `answer`, and `index` of the question.

    Options: those of the data set's config that are numbers, text, True or False, or lists of
    these; among them `size`, the number of questions (500), and `seed` (0). One question in eight
    is held out. The alphabet is that of the questions and answers.
    """

    dataset: ClassVar[str] = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.size <= MOST:
            raise ConfigError(f"task {self.name}: option size is {self.size}; from 1 to {MOST}")
        _dataset(self)

    @property
    def alphabet(self) -> str:
        texts = (record[key] for record in self._records() for key in ("prompt", "answer"))
        return "".join(sorted(set().union(*texts)))

    @property
    def response_length(self) -> int:
        return 1 + max(len(record["answer"]) for record in self._records())

    def record(self, index: int) -> dict[str, Any]:
        entry = _dataset(self)[index]
        answer = "" if entry["answer"] is None else str(entry["answer"])
        return {"prompt": entry["question"], "answer": answer, "index": index}

    def demonstration(self, record: dict[str, Any], rng: np.random.Generator) -> str:
        if not record["answer"]:
            raise DataError(
                f"task {self.name} has no answer to question {record['index']}, so no "
                "demonstrations; take another"
            )
        return super().demonstration(record, rng)

    def is_correct(self, response: str, record: dict[str, Any]) -> bool:
        return self.closeness(response, record) >= 1.0

    def closeness(self, response: str, record: dict[str, Any]) -> float:
        """The package's score; 0.0 for a response that it cannot read."""
        entry = _dataset(self)[int(record["index"])]
        try:
            return float(_dataset(self).score_answer(response, entry))
        except Exception:  # some scorers raise for a response of another form than they expect
            return 0.0

    def reward(
        self, prompts: Sequence[str], responses: Sequence[str], **columns: Sequence[Any]
    ) -> list[float]:
        return [self.closeness(*row) for row in self._rows(prompts, responses, columns)]

    def _records(self) -> list[dict[str, Any]]:
        return [record for records in listed_records(self).values() for record in records]


@functools.cache
def task_class(dataset: str) -> type[PackageTask]:
    """The class of a data set's tasks.

    Raises:
      ConfigError: reasoning-gym is not installed, or has no such data set.
    """
    name = f"{FAMILY}:{dataset}"
    configs = import_package("reasoning_gym.factory", "reasoning-gym", name).DATASETS
    if dataset not in configs:
        there = did_you_mean(dataset, configs) or f"there are {', '.join(sorted(configs))}"
        raise ConfigError(f"no task {name!r}: {there.removesuffix('; ')}")
    options = {
        field.name: field.default_factory() if callable(field.default_factory) else field.default
        for field in dataclasses.fields(configs[dataset][1])
    }
    return make_class(ReasoningGymTask, name, options | {"seed": 0}, dataset=dataset)


@functools.lru_cache(maxsize=8)
def _dataset(task: ReasoningGymTask) -> Any:
    package = import_package("reasoning_gym", "reasoning-gym", task.name)
    options = {key: getattr(task, key) for key in task.default_options() if key != "partial"}
    options = {key: list(v) if isinstance(v, tuple) else v for key, v in options.items()}
    try:
        return package.create_dataset(task.dataset, **options)
    except Exception as error:
        said = one_line(error) or "its config is refused"
        raise ConfigError(f"task {task.name} cannot be made of its options: {said}") from error
