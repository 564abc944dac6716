"""Tokenised training examples: demonstrations, preference pairs, unpaired responses and steps.

Labels and margins of examples are annotations: values at positions of a response.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from ml_collections import ConfigDict

from hjax.algorithms import Algorithm
from hjax.config import data_path
from hjax.data.conversation import encode_example, response_end
from hjax.data.dataset import Dataset, pad_left, pad_right
from hjax.data.invalid_rows import InvalidRows
from hjax.data.labels import PAIR_LABELS
from hjax.data.mixing import Mixing, make_sampler
from hjax.data.row_answers import RowAnswers, answers_by_row, task_records
from hjax.data.tasks import EnvironmentTask, Task
from hjax.data.tokenizer import Tokenizer
from hjax.environments.episode import demonstrated_row, episode_seed
from hjax.errors import ConfigError, DataError

Examples = list[tuple[list[int], ...]]
# Annotations: array name -> per example -> per row -> values by position. A position is the number
# of response tokens before it.
Annotations = dict[str, list[tuple[dict[int, float], ...]]]


class LearnedExamples(NamedTuple):
    """Examples, what is known of them, and the rows of the data that they are of.

    Attributes:
      examples: tokens of a prompt and of its responses.
      annotations: of the examples.
      labels: of unpaired responses; else empty.
      drawn: of episodes, which tokens of each response are the policy's turns; else empty.
      rows: positions in the data; None where examples are not needed, so that rows without a usable
        one stay in it.
    """

    examples: Examples = []
    annotations: Annotations = {}
    labels: list[bool] = []
    drawn: Sequence[Sequence[bool]] = ()
    rows: list[int] | None = None


# Value of positions without an annotation.
MISSING = {"labels": np.nan, "margins": 0.0}
# The kind of a row whose answer is too long.
LONG_ANSWER = "answer above rollout.max_response_length"


def learns_from_examples(config: ConfigDict, source: str) -> bool:
    """Whether a run learns from examples of its data, and not from its own answers alone."""
    warm_start = config.warm_start.steps and not config.actor.path
    return bool(source != "prompts" or warm_start or config.algorithm.get("pretraining_coef"))


def load_examples(
    config: ConfigDict,
    task: Task | None,
    tokenizer: Tokenizer | None,
    data: Dataset,
    source: str,
    invalid: InvalidRows,
    notify: Callable[[str], None] = lambda remark: None,
) -> LearnedExamples:
    """Tokenise the data's examples: prompts with one response (a demonstration) or two (chosen and
    rejected), each with its end (``hjax.data.conversation``), and annotations of pairs and steps.
    Empty if the data has none.

    A row whose answer cannot be used or is too long is checked by ``invalid`` if the run learns
    from examples; otherwise it is skipped. `notify` is called once with each message about the chat
    template.

    Raises:
      ConfigError: the algorithm learns labels, and the data has none.
      DataError: a row's answer, or every row is left out.
    """
    if task is not None and task.environment and tokenizer is not None and source == "prompts":
        return _episode_examples(config, task, tokenizer, data)
    read = None if tokenizer is None else answers_by_row(source, task, data, config.seed)
    if tokenizer is None or read is None:
        return LearnedExamples()
    _check_pair_labels(config, source, task, data)
    needed = learns_from_examples(config, source)
    invalid = invalid if needed else InvalidRows("drop")
    say_once = functools.cache(notify)
    rows: list[int] = []
    found = LearnedExamples([], {name: [] for name in _ANNOTATED.get(source, ())}, [])
    chats = data.conversations or [None] * len(data)
    for i in range(len(data)):
        with invalid.checking(data.location(i), "unusable answer"):
            answers = read(i)
            if source == "steps":
                example, places = _encode_steps(config, tokenizer, data.prompt_tokens[i], answers)
                example[1].extend(response_end(tokenizer, is_chat=chats[i] is not None))
            else:
                example = encode_example(
                    tokenizer,
                    chats[i],
                    data.prompt_tokens[i],
                    answers.responses,
                    say_once,
                    data.prompt_text[i] if data.prompt_text else None,
                )
                places = _pair_annotations(example, answers) if source == "pairs" else {}
            if not _fits(config, example, data.location(i), invalid):
                continue
            found.examples.append(example)
            for name, values in places.items():
                found.annotations[name].append(values)
            if source == "verdicts":
                found.labels.extend(answers.labels)
            rows.append(i)
    if needed and not found.examples:
        raise invalid.nothing_left(data_path(config.data))
    return found._replace(rows=rows if needed else None)


def _episode_examples(
    config: ConfigDict, task: Task, tokenizer: Tokenizer, data: Dataset
) -> LearnedExamples:
    """Episodes that demonstrate a task's environment, as many as the warm start shows."""
    if not learns_from_examples(config, "prompts"):
        return LearnedExamples()
    assert isinstance(task, EnvironmentTask)
    count = min(len(data), config.warm_start.steps * config.warm_start.batch)
    if config.algorithm.get("pretraining_coef"):
        count = len(data)
    rng = np.random.default_rng([config.seed, 2])
    found: Examples = []
    drawn: list[list[bool]] = []
    for number, record in zip(range(count), task_records(data)):
        seed = episode_seed(config.seed, 0, number)
        actions = task.demonstration_actions(record, rng, seed)
        row = demonstrated_row(
            task.make_environment(), record, seed, actions, tokenizer
        )
        found.append((row.prompt, row.response))
        drawn.append(
            [
                own
                for t in row.turns
                for own in [True] * len(t.tokens) + [False] * len(t.observation)
            ]
        )
    limit, longest = config.rollout.max_response_length, max(len(each[1]) for each in found)
    if longest > limit:
        raise DataError(
            f"data.task={config.data.task}: an episode that demonstrates it has {longest} tokens "
            f"after its prompt, above rollout.max_response_length={limit}; raise that key"
        )
    return LearnedExamples(found, {}, [], drawn)


def _check_pair_labels(config: ConfigDict, source: str, task: Task | None, data: Dataset) -> None:
    if source != "pairs" or task is not None:
        return
    if config.algorithm.get("label_coef") and not set(PAIR_LABELS) <= data.columns.keys():
        raise ConfigError(
            f"config.algorithm.label_coef={config.algorithm.label_coef}: "
            f"{data_path(config.data)} has no columns `chosen_label` and `rejected_label` (1 good "
            "or safe, 0 not); add them, or set label_coef=0"
        )


# Annotations by what is learned from.
_ANNOTATED = {"pairs": ("margins", "labels"), "steps": ("labels",)}


def _fits(
    config: ConfigDict, example: tuple[list[int], ...], where: str, invalid: InvalidRows
) -> bool:
    """Whether an example's answers are short enough; if not, its row is left out or an error."""
    longest, limit = max(map(len, example[1:])), config.rollout.max_response_length
    if longest <= limit:
        return True
    if config.data.overlong != "filter":
        raise DataError(
            f"an answer has {longest} tokens, above rollout.max_response_length={limit}; raise "
            "that key, or data.overlong=filter leaves such rows out",
            kind=LONG_ANSWER,
        )
    invalid.leave_out(where, LONG_ANSWER)
    return False


def _pair_annotations(
    example: tuple[list[int], ...], answers: RowAnswers
) -> dict[str, tuple[dict[int, float], ...]]:
    """Labels of a pair at the ends of both responses, the margin at the end of the chosen one."""
    ends = [len(response) for response in example[1:]]
    labels: tuple[dict[int, float], ...] = ({}, {})
    if answers.labels:
        labels = tuple({end: float(x)} for end, x in zip(ends, answers.labels, strict=True))
    return {"margins": ({ends[0]: answers.margin}, {}), "labels": labels}


def _encode_steps(
    config: ConfigDict, tokenizer: Tokenizer, prompt: list[int], answers: RowAnswers
) -> tuple[tuple[list[int], ...], dict[str, tuple[dict[int, float], ...]]]:
    """Process supervision: prompt and response, with a label at the end of each step.

    Each step is tokenised by itself and followed by ``algorithm.separator``. The response's end is
    not in it.
    """
    separator = tokenizer.encode(config.algorithm.separator, add_special=False)
    tokens: list[int] = []
    places: dict[int, float] = {}
    for step, label in zip(answers.responses, answers.labels, strict=True):
        tokens += tokenizer.encode(str(step), add_special=False) + separator
        places[len(tokens)] = float(label)
    return (prompt, tokens), {"labels": (places,)}


class Demonstrations:
    """Batches of examples of one fixed shape, in a resumable shuffled order.

    Args:
      examples: tokens of a prompt and of its responses; all have equally many responses.
      batch: sequences; the responses of an example are adjacent rows.
      prompt_length, response_length: tokens.
      seed: of the order.
      annotations: of the examples.
      labels: of unpaired responses; the batch has them as ``positive``.
      drawn: of episodes, which tokens of each response are the policy's turns; empty: all are.
      mixing: of the examples; None: all are equally frequent.
    """

    def __init__(
        self,
        examples: Sequence[tuple[list[int], ...]],
        batch: int,
        prompt_length: int,
        response_length: int,
        seed: int,
        annotations: Annotations | None = None,
        labels: Sequence[bool] | None = None,
        drawn: Sequence[Sequence[bool]] = (),
        mixing: Mixing | None = None,
    ):
        self._drawn = drawn
        self._examples, self._annotations = examples, annotations or {}
        self._lengths = prompt_length, response_length
        self._labels = labels
        per_step = batch // (len(examples[0]) - 1)
        self.sampler = make_sampler(len(examples), per_step, seed, mixing)

    def __call__(self) -> dict[str, np.ndarray]:
        """The next ``batch_of``."""
        return self.batch_of(self.sampler.next())

    def __len__(self) -> int:
        return len(self._examples)

    def batch_of(self, indices: Sequence[int] | np.ndarray) -> dict[str, np.ndarray]:
        """The examples at ``indices``: ``prompts``, ``prompt_mask``, ``responses``,
        ``response_mask``, and each annotation by name, float32 [rows, response length + 1].

        With labels also ``positive``, float32 [rows, length], 1 on tokens of right responses.
        """
        chosen = [self._examples[i] for i in indices]
        rows = [(prompt, response) for prompt, *responses in chosen for response in responses]
        prompts, prompt_mask = pad_left([p for p, _ in rows], self._lengths[0])
        responses, response_mask = pad_right([r for _, r in rows], self._lengths[1])
        arrays = {}
        for name, annotations in self._annotations.items():
            by_row = [values for i in indices for values in annotations[i]]
            arrays[name] = np.full((len(rows), self._lengths[1] + 1), MISSING[name], np.float32)
            for row, values in enumerate(by_row):
                arrays[name][row, list(values)] = list(values.values())
        batch = {
            "prompts": prompts,
            "prompt_mask": prompt_mask,
            "responses": responses,
            "response_mask": response_mask,
            **arrays,
        }
        if self._drawn:
            batch["response_lengths"] = response_mask.sum(axis=1, dtype=np.int32)
            batch["response_mask"] = np.zeros_like(response_mask)
            for row, i in enumerate(indices):
                batch["response_mask"][row, : len(self._drawn[i])] = self._drawn[i]
        if self._labels is None:
            return batch
        right = np.array([self._labels[i] for i in indices], np.float32)
        return batch | {"positive": response_mask * right[:, None]}


class ExampleSources(NamedTuple):
    """What a run learns from besides rollouts.

    Attributes:
      learned: examples of the algorithm; None if it uses none.
      warm_start: demonstrations of the supervised warm start; None if there are none.
    """

    learned: Demonstrations | None = None
    warm_start: Demonstrations | None = None


def make_example_sources(
    config: ConfigDict, algorithm: type[Algorithm], inputs: Any
) -> ExampleSources:
    """The example sources of a run's inputs (``hjax.run.inputs.Inputs``).

    Raises:
      ConfigError: a warm start without demonstrations.
    """
    lengths = {
        "prompt_length": inputs.prompt_length,
        "response_length": config.rollout.max_response_length,
    }
    found = ExampleSources()
    if examples := inputs.demonstrations:
        batch = config.warm_start.batch
        # On-policy algorithms generate a response to each demonstration's prompt.
        answered = algorithm.generates and algorithm.source != "prompts"
        learned = Demonstrations(
            examples,
            config.rollout.prompts if answered else batch,
            **lengths,
            seed=config.seed + 1,
            annotations=inputs.annotations,
            labels=inputs.labels,
            drawn=inputs.drawn,
            mixing=inputs.example_mixing,
        )
        # Of unpaired responses only the right ones are imitated.
        right = [i for i in range(len(examples)) if inputs.labels is None or inputs.labels[i]]
        imitated = None
        if right:
            mixing = inputs.example_mixing
            imitated = Demonstrations(
                [examples[i][:2] for i in right],  # of a pair the chosen response
                batch,
                **lengths,
                seed=config.seed + 2,
                drawn=inputs.drawn,
                mixing=None if mixing is None else mixing.select(right),
            )
        found = ExampleSources(learned, imitated)
    if config.warm_start.steps and not config.actor.path and found.warm_start is None:
        raise ConfigError(
            f"warm_start.steps={config.warm_start.steps} needs demonstrations; this data has "
            "none: set it to 0, or give the data a `response` column"
        )
    return found
