"""Base class of the built-in tasks, and their registry."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from hjax.data.tokenizer import Tokenizer
from hjax.errors import ConfigError, DataError, did_you_mean

# One prompt in eight is held out. A hash of its text decides, so that no seed or count ever puts a
# prompt into both splits.
_EVAL_ONE_IN = 8
# A task of at most this many indices is enumerated; prompts of a larger one are sampled.
_LIST_UP_TO = 2**17

TASKS: dict[str, type[Task]] = {}
# Packages with tasks of their own, and the module whose `task_class` makes theirs.
PACKAGES = {
    "gymnasium": "hjax.data.tasks.gymnasium_task",
    "reasoning_gym": "hjax.data.tasks.reasoning_gym_task",
}


def option(default: Any, low: float, high: float, excluded: bool = False) -> Any:
    """A dataclass field for a task option, with its default and range.

    Args:
      excluded: whether the range excludes ``high`` itself.
    """
    return dataclasses.field(default=default, metadata={"range": (low, high, excluded)})


def choice(default: Any, *others: Any) -> Any:
    """A dataclass field for a task option that is one of a few values, the default first."""
    return dataclasses.field(default=default, metadata={"choices": (default, *others)})


@dataclasses.dataclass(frozen=True)
class Task:
    """A family of prompts with a verifier and demonstrations.

    A subclass is a frozen dataclass. Its fields are the task's options, each made by `option` or
    `choice`. It defines `alphabet`, `size`, `record`, `demonstration` and `is_correct`.
    `EnvironmentTask` is the base of those that are played over several turns.

    Attributes:
      environment: the class that plays its episodes, as `module:Class`; empty: one response answers
        a prompt.
      partial: reward of a wrong response, as a share (0 up to below 1) of `closeness`; at 0 the
        verifier returns 1.0 or 0.0 only.
    """

    name: ClassVar[str] = ""
    has_cost: ClassVar[bool] = False
    environment: ClassVar[str] = ""

    partial: float = option(0.0, 0.0, 1.0, excluded=True)

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            problem = _option_problem(field, value := getattr(self, field.name))
            if problem:
                raise ConfigError(
                    f"task {self.name}: option {field.name} is {value!r}; it must be {problem}"
                )

    # Defined by subclasses.

    @property
    def alphabet(self) -> str:
        """Every character of prompts and answers, each once."""
        raise NotImplementedError

    @property
    def size(self) -> int:
        """Number of indices of `record` (several may give the same prompt)."""
        raise NotImplementedError

    @property
    def response_length(self) -> int | None:
        """Characters of the longest answer or demonstration, plus one for EOS; None if unknown."""
        return None

    @property
    def max_turns(self) -> int:
        """Turns after which an episode ends, unless a run says otherwise; 0: no environment."""
        return 0

    @property
    def turn_length(self) -> int:
        """Characters of an episode's longest sensible turn, plus one for EOS; 0: no environment."""
        return 0

    def record(self, index: int) -> dict[str, Any] | None:
        """The record at an index in [0, size): `prompt` and columns; None if there is none."""
        raise NotImplementedError

    def demonstration(self, record: dict[str, Any], rng: np.random.Generator) -> str:
        """A response for supervised training; by default the answer."""
        return record["answer"]

    def demonstration_actions(
        self, record: dict[str, Any], rng: np.random.Generator, seed: int
    ) -> list[str]:
        """The turns of a good episode, see `EnvironmentTask`.

        Raises:
          ConfigError: the task has no environment.
        """
        those = ", ".join(name for name, cls in TASKS.items() if cls.environment)
        raise ConfigError(
            f"task {self.name} has no environment: one response answers a prompt; {those} have one"
        )

    def mistake(self, record: dict[str, Any], rng: np.random.Generator) -> str:
        """A wrong response: by default a demonstration with one character changed.

        Raises:
          ConfigError: the task has no correct answers.
        """
        if "answer" not in record:
            raise ConfigError(
                f"data.task={self.name} has no right and wrong, so no preference pairs; use "
                "another task, or data.path with the columns `chosen` and `rejected`"
            )
        answer = self.demonstration(record, rng)
        for _ in range(20):
            place = int(rng.integers(len(answer)))
            letter = self.alphabet[int(rng.integers(len(self.alphabet)))]
            made = answer[:place] + letter + answer[place + 1 :]
            if not self.is_correct(made, record):
                return made
        return answer + answer[:1]

    def pair(self, record: dict[str, Any], rng: np.random.Generator) -> tuple[str, str]:
        """A preference pair (chosen, rejected): by default a demonstration and a mistake.

        Raises:
          ConfigError: the task has no correct answers.
        """
        return self.demonstration(record, rng), self.mistake(record, rng)

    def steps(
        self, record: dict[str, Any], rng: np.random.Generator
    ) -> tuple[list[str], list[bool]]:
        """A response in steps, and which steps are right (process supervision).

        By default one response of a pair, each character a step. Steps are wrong from the first
        character on that differs from the chosen response. Raises ConfigError as `pair` does.
        """
        right, wrong = self.pair(record, rng)
        steps = list(wrong if rng.random() < 0.5 else right)
        same = [a == b for a, b in zip(steps, right)] + [False] * (len(steps) - len(right))
        return steps, [all(same[: i + 1]) for i in range(len(steps))]

    def is_correct(self, response: str, record: dict[str, Any]) -> bool:
        """Whether a response (no surrounding blanks) answers the record."""
        return response == record["answer"]

    def closeness(self, response: str, record: dict[str, Any]) -> float:
        """Partial credit of a wrong response, 0 to 1: by default the share of right characters."""
        answer = record["answer"]
        same = sum(a == b for a, b in zip(response, answer))
        return same / max(len(response), len(answer))

    # Common to all tasks.

    def tokenizer(self) -> Tokenizer:
        """One token per character of the alphabet."""
        return Tokenizer.characters(self.alphabet)

    def largest_count(self, split: str) -> int | None:
        """Number of distinct prompts of a split; None where there are too many to enumerate."""
        check_split(split)
        return len(listed_records(self)[split]) if self.size <= _LIST_UP_TO else None

    def examples(self, split: str, seed: int, count: int) -> list[dict[str, Any]]:
        """Records in a seeded random order, without repeated prompts.

        Args:
          split: "train" or "eval"; no prompt is in both, for any seed and count.
          seed: determines the prompts and their order.
          count: number of records.

        Raises DataError, with the largest possible count, when there are fewer prompts.
        """
        check_split(split)
        if count < 1:
            raise DataError(f"task {self.name}: {count} examples asked for; at least 1 is needed")
        rng = np.random.default_rng([seed, int(split == "eval")])
        if self.size <= _LIST_UP_TO:
            listed = listed_records(self)[split]
            chosen = [dict(listed[i]) for i in rng.permutation(len(listed))[:count]]
        else:
            chosen = self._drawn(split, rng, count)
        if len(chosen) < count:
            raise DataError(
                f"task {self.name}: {count} {split} examples asked for, but only {len(chosen)} "
                f"different ones exist with its options; ask for at most {len(chosen)}, or enlarge "
                f"the task ({self._options_text()})"
            )
        return chosen

    def reward(
        self, prompts: Sequence[str], responses: Sequence[str], **columns: Sequence[Any]
    ) -> list[float]:
        """The verifier, as a reward function: 1.0 if correct, else `partial` times closeness."""
        return [
            1.0
            if self.is_correct(response, record)
            else float(self.partial * self.closeness(response, record))
            for response, record in self._rows(prompts, responses, columns)
        ]

    def correct(
        self, prompts: Sequence[str], responses: Sequence[str], **columns: Sequence[Any]
    ) -> list[bool] | None:
        """Which responses are correct; None for a task without correct answers."""
        return [self.is_correct(*row) for row in self._rows(prompts, responses, columns)]

    def cost(
        self, prompts: Sequence[str], responses: Sequence[str], **columns: Sequence[Any]
    ) -> list[float]:
        """Cost per response, for tasks with `has_cost`."""
        raise ConfigError(f"task {self.name} has no cost; set cost.function, or use {_costly()}")

    @classmethod
    def default_options(cls) -> dict[str, Any]:
        """Options and their defaults."""
        return {field.name: field.default for field in dataclasses.fields(cls)}

    def _rows(
        self, prompts: Sequence[str], responses: Sequence[str], columns: Mapping[str, Sequence[Any]]
    ) -> Iterator[tuple[str, dict[str, Any]]]:
        for i, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
            record = {key: values[i] for key, values in columns.items()}
            yield response.strip(), {**record, "prompt": prompt}

    def _drawn(self, split: str, rng: np.random.Generator, count: int) -> list[dict[str, Any]]:
        records: dict[str, dict[str, Any]] = {}
        # So many attempts that exhausting them means that there are no more prompts.
        for _ in range(100 * count + 10_000):
            record = self.record(_draw_below(self.size, rng))
            if record is not None and is_held_out(record["prompt"]) == (split == "eval"):
                records.setdefault(record["prompt"], record)
                if len(records) == count:
                    break
        return list(records.values())

    def _options_text(self) -> str:
        return ", ".join(f"{k}={getattr(self, k)!r}" for k in type(self).default_options())


@dataclasses.dataclass(frozen=True)
class Strings(Task):
    """A task whose prompts and answers have at most ``length`` characters."""

    length: int = option(5, 1, 64)

    @property
    def response_length(self) -> int:
        return self.length + 1


def register(cls: type[Task]) -> type[Task]:
    """Class decorator: registers a task under its `name`, for `get_task`."""
    TASKS[cls.name] = cls
    return cls


def get_task(name: str, **options: Any) -> Task:
    """Make a task by name; ConfigError lists what exists for an unknown name or option.

    Args:
      name: of `TASKS`, or that of another package's: `gymnasium:NAME`, `reasoning_gym:NAME`.
      options: of the task.
    """
    family, colon, rest = name.partition(":")
    if colon and family in PACKAGES:
        cls: type[Task] = importlib.import_module(PACKAGES[family]).task_class(rest)
    elif name in TASKS:
        cls = TASKS[name]
    else:
        names = [*sorted(TASKS), *(f"{package}:NAME" for package in PACKAGES)]
        there = f"{did_you_mean(name, TASKS)}there are {', '.join(names)}"
        raise ConfigError(f"no task {name!r}: {there}")
    known = cls.default_options()
    for option in options:
        if option not in known:
            has = f"{did_you_mean(option, known)}it has {', '.join(known)}"
            raise ConfigError(f"task {name} has no option {option!r}: {has}")
    return cls(**options)


def _option_problem(field: dataclasses.Field[Any], value: Any) -> str:
    """What an option must be, if its value is not; else empty."""
    choices = field.metadata.get("choices")
    if choices is not None:
        sound = type(value) is type(choices[0]) and value in choices
        return "" if sound else " or ".join(map(repr, choices))
    if "range" not in field.metadata:
        kinds = (int, float) if isinstance(field.default, float) else type(field.default)
        sound = isinstance(value, kinds) and isinstance(value, bool) == isinstance(
            field.default, bool
        )
        return "" if sound else f"of the kind of {field.default!r}"
    low, high, excluded = field.metadata["range"]
    whole = isinstance(field.default, int)
    sound = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
    if sound and low <= value <= high and not (excluded and value == high):
        return ""
    kind = "an integer" if whole else "a number"
    return f"{kind} from {low} {f'up to below {high}' if excluded else f'to {high}'}"


def split_options(text: str) -> tuple[str, str]:
    """The name of a task and the text of its options in `NAME:OPTION=VALUE,...`."""
    if text.partition(":")[0] in PACKAGES:  # the name has colons too
        name, _, options = text.rpartition(":")
        return (name, options) if "=" in options else (text, "")
    name, _, options = text.partition(":")
    return name, options


def digits_of(index: int, base: int, length: int) -> list[int]:
    """The `length` digits of `index` in `base`, most significant first."""
    digits = []
    for _ in range(length):
        index, digit = divmod(index, base)
        digits.append(digit)
    return digits[::-1]


@functools.lru_cache(maxsize=8)
def listed_records(task: Task) -> dict[str, list[dict[str, Any]]]:
    """Every record of a task by split, in the order of their indices."""
    splits: dict[str, dict[str, dict[str, Any]]] = {"train": {}, "eval": {}}
    for index in range(task.size):
        record = task.record(index)
        if record is not None:
            split = "eval" if is_held_out(record["prompt"]) else "train"
            splits[split].setdefault(record["prompt"], record)
    return {split: list(records.values()) for split, records in splits.items()}


def _draw_below(size: int, rng: np.random.Generator) -> int:
    """A uniform integer in [0, size); numpy's own generators stop at 64 bits."""
    return int.from_bytes(rng.bytes(size.bit_length() // 8 + 8), "little") % size


def is_held_out(prompt: str) -> bool:
    """Whether a prompt is held out."""
    digest = hashlib.blake2b(prompt.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % _EVAL_ONE_IN == 0


def check_split(split: str) -> None:
    """DataError unless it is one of the two."""
    if split not in ("train", "eval"):
        raise DataError(f"no split {split!r}; there are train and eval")


def _costly() -> str:
    return ", ".join(name for name, cls in TASKS.items() if cls.has_cost)
