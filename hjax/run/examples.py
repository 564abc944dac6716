"""Tokenised training examples: demonstrations, preference pairs, unpaired responses and steps.

Labels and margins of examples are annotations: values at positions of a response.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from ml_collections import ConfigDict

from hjax.algorithms import Algorithm
from hjax.data.chat_rows import is_turn
from hjax.data.conversation import encode_example, response_end
from hjax.data.dataset import Dataset, PromptSampler, pad_left, pad_right
from hjax.data.labels import check_labelled_steps, pair_labels, pair_margins
from hjax.data.preference_pairs import RESPONSE_COLUMNS, SIDES, parse_response
from hjax.data.tasks import Task
from hjax.data.tokenizer import Tokenizer
from hjax.data.unpaired import task_records
from hjax.errors import ConfigError, DataError, short_repr

Examples = list[tuple[list[int], ...]]
# Annotations: array name -> per example -> per row -> values by position. A position is the number
# of response tokens before it.
Annotations = dict[str, list[tuple[dict[int, float], ...]]]


class LearnedExamples(NamedTuple):
    """Examples and their annotations."""

    examples: Examples = []
    annotations: Annotations = {}


# Value of positions without an annotation.
MISSING = {"labels": np.nan, "margins": 0.0}


def pair_annotations(
    config: ConfigDict, columns: Mapping[str, Sequence[Any]] | None, pairs: Examples
) -> Annotations:
    """Labels of pairs at the ends of both responses, and margins at the end of the chosen one.

    Args:
      config: of the run.
      columns: of its data; None for a built-in task, whose chosen responses are labelled good.
      pairs: tokens of prompt, chosen and rejected response.

    Raises:
      ConfigError: the algorithm learns labels, and the data has none.
      DataError: an invalid label or margin.
    """
    labels = [(True, False)] * len(pairs) if columns is None else pair_labels(columns)
    if labels is None and config.algorithm.get("label_coef"):
        raise ConfigError(
            f"config.algorithm.label_coef={config.algorithm.label_coef}: {config.data.path} has no "
            "columns `chosen_label` and `rejected_label` (1 good or safe, 0 not); add them, or set "
            "label_coef=0"
        )
    margins = pair_margins(columns or {}, len(pairs))
    annotations: Annotations = {"margins": [], "labels": [({}, {})] * len(pairs)}
    for (_, chosen, _), margin in zip(pairs, margins, strict=True):
        annotations["margins"].append(({len(chosen): margin}, {}))
    if labels is not None:
        annotations["labels"] = [
            tuple({len(x): float(label)} for x, label in zip(responses, known, strict=True))
            for (_, *responses), known in zip(pairs, labels, strict=True)
        ]
    return annotations


def step_examples(
    config: ConfigDict,
    tokenizer: Tokenizer,
    prompts: Sequence[tuple[list[int], str, bool]],
    rows: Sequence[tuple[list[str], list[bool]]],
) -> LearnedExamples:
    """Process supervision: prompt and response per row, with a label at the end of each step.

    Each step is tokenised by itself and followed by ``algorithm.separator``.

    Args:
      config: of the run.
      tokenizer: of the actor.
      prompts: tokens of each prompt, its name in errors, and whether it is a chat, whose turns
        end as the chat template ends them.
      rows: steps of each response, and which are right.

    Raises:
      DataError: a response that is too long.
    """
    separator = tokenizer.encode(config.algorithm.separator, add_special=False)
    limit = config.rollout.max_response_length
    examples: Examples = []
    annotations: Annotations = {"labels": []}
    for (prompt, shown, is_chat), (steps, labels) in zip(prompts, rows, strict=True):
        tokens: list[int] = []
        places: dict[int, float] = {}
        for step, label in zip(steps, labels, strict=True):
            tokens += tokenizer.encode(step, add_special=False) + separator
            places[len(tokens)] = float(label)
        tokens += response_end(tokenizer, is_chat)
        if len(tokens) > limit:
            raise DataError(
                f"the completions of {shown} have {len(tokens)} tokens, more than "
                f"rollout.max_response_length={limit}; raise it"
            )
        examples.append((prompt, tokens))
        annotations["labels"].append((places,))
    return LearnedExamples(examples, annotations)


def learns_from_examples(config: ConfigDict, source: str) -> bool:
    """Whether a run learns from examples of its data, and not from its own answers alone."""
    warm_start = config.warm_start.steps and not config.actor.path
    return bool(source != "prompts" or warm_start or config.algorithm.get("pretraining_coef"))


def load_examples(
    config: ConfigDict,
    task: Task | None,
    tokenizer: Tokenizer | None,
    train: Dataset,
    source: str,
    verdicts: tuple[list[Any], list[bool]] | None = None,
    notify: Callable[[str], None] = lambda remark: None,
) -> LearnedExamples:
    """Tokenise the data's examples: prompts with one response (a demonstration) or two (chosen and
    rejected), each with its end (``hjax.data.conversation``), and annotations of pairs and steps.
    Empty if the data has none.

    A response that is no text or too long is an error if the run learns from examples; otherwise
    its row is skipped. `notify` is called once with each message about the chat template.
    """
    needed = learns_from_examples(config, source)
    if tokenizer is None:
        return LearnedExamples()
    if source == "steps":
        return _steps(config, task, tokenizer, train)
    texts: Sequence[tuple[Any, ...]] | None
    if source == "verdicts":
        texts = None if verdicts is None else [(text,) for text in verdicts[0]]
    else:
        make = _pairs if source == "pairs" else _demonstrations
        texts = make(config, task, train)
    if texts is None:
        return LearnedExamples()
    limit = config.rollout.max_response_length
    chats = train.conversations or [None] * len(train)
    say_once = functools.cache(notify)
    found: Examples = []
    for i, (prompt, responses) in enumerate(zip(train.prompt_tokens, texts, strict=True)):
        if not all(isinstance(each, str) or is_turn(each) for each in responses):
            if needed:
                raise DataError(
                    f"the demonstration of {_row(train, i)} is {short_repr(responses[0])}; it must "
                    "be text, or a turn of the assistant's"
                )
            continue
        try:
            example = encode_example(tokenizer, chats[i], prompt, responses, say_once)
        except DataError as error:
            raise DataError(f"{_row(train, i)}: {error}") from None
        longest = max(map(len, example[1:]))
        if longest > limit and not needed:
            continue
        if longest > limit:
            what = "an answer" if source == "pairs" else "the demonstration"
            raise DataError(
                f"{what} of {_row(train, i)} has {longest} tokens, more than "
                f"rollout.max_response_length={limit}; raise it"
            )
        found.append(example)
    columns = None if task is not None else train.columns
    annotations = pair_annotations(config, columns, found) if source == "pairs" else {}
    return LearnedExamples(found, annotations)


def _steps(
    config: ConfigDict, task: Task | None, tokenizer: Tokenizer, train: Dataset
) -> LearnedExamples:
    """Process-supervision examples of a task or of the data's columns."""
    rows = []
    if task is not None:
        rng = np.random.default_rng([config.seed, 4])
        rows = [task.steps(record, rng) for record in task_records(train)]
    elif {"completions", "labels"} <= train.columns.keys():
        each = zip(train.columns["completions"], train.columns["labels"], strict=True)
        rows = [
            check_labelled_steps(completions, labels, _row(train, i))
            for i, (completions, labels) in enumerate(each)
        ]
    if not rows:
        return LearnedExamples()
    chats = train.conversations or [None] * len(train)
    prompts = [
        (prompt, _row(train, i), chats[i] is not None)
        for i, prompt in enumerate(train.prompt_tokens)
    ]
    return step_examples(config, tokenizer, prompts, rows)


def _row(train: Dataset, row: int) -> str:
    """Name a row in errors by its prompt; row numbers changed when rows were held out."""
    return f"the prompt {train.prompt_text[row][:60]!r}" if train.prompt_text else "a prompt"


def _demonstrations(
    config: ConfigDict, task: Task | None, train: Dataset
) -> list[tuple[Any]] | None:
    """The demonstration of each row, unchecked; None if the data has none."""
    if task is None:
        columns = [train.columns[name] for name in RESPONSE_COLUMNS if name in train.columns]
        each = zip(*columns, strict=True)
        return [(next((x for x in row if x is not None), None),) for row in each] or None
    rng = np.random.default_rng([config.seed, 2])
    return [(task.demonstration(record, rng),) for record in task_records(train)]


def demonstration_texts(config: ConfigDict, task: Task | None, rows: Dataset) -> list[str] | None:
    """A demonstration of each row, as text; None unless every row has one."""
    found = _demonstrations(config, task, rows) if rows.prompt_text is not None else None
    if found is None or any(not isinstance(text, str) for (text,) in found):
        return None
    return [text for (text,) in found]


def _pairs(config: ConfigDict, task: Task | None, train: Dataset) -> list[tuple[str, str]] | None:
    """The chosen and the rejected text of each row; None if the data has no pairs."""
    if task is None:
        if any(side not in train.columns for side in SIDES):
            return None
        found = []
        for i, pair in enumerate(zip(*(train.columns[side] for side in SIDES), strict=True)):
            shown = _row(train, i)
            chosen, rejected = map(parse_response, pair, SIDES, (shown, shown))
            if chosen == rejected:
                raise DataError(f"chosen and rejected of {shown} are equal: the pair says nothing")
            found.append((chosen, rejected))
        return found
    rng = np.random.default_rng([config.seed, 3])
    return [task.pair(record, rng) for record in task_records(train)]


class Demonstrations:
    """Batches of examples of one fixed shape, in a resumable shuffled order.

    Args:
      examples: tokens of a prompt and of its responses; all have equally many responses.
      batch: sequences; the responses of an example are adjacent rows.
      prompt_length, response_length: tokens.
      seed: of the order.
      annotations: of the examples.
      labels: of unpaired responses; the batch has them as ``positive``.
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
    ):
        self._examples, self._annotations = examples, annotations or {}
        self._lengths = prompt_length, response_length
        self._labels = labels
        self.sampler = PromptSampler(len(examples), batch // (len(examples[0]) - 1), seed)

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
        )
        shown = [example[:2] for example in examples]  # the chosen response of a pair
        if inputs.labels is not None:  # only the right unpaired responses
            pairs = zip(shown, inputs.labels, strict=True)
            shown = [example for example, right in pairs if right]
        seed = config.seed + 2
        imitated = Demonstrations(shown, batch, **lengths, seed=seed) if shown else None
        found = ExampleSources(learned, imitated)
    if config.warm_start.steps and not config.actor.path and found.warm_start is None:
        raise ConfigError(
            f"warm_start.steps={config.warm_start.steps} needs demonstrations; this data has "
            "none: set it to 0, or give the data a `response` column"
        )
    return found
