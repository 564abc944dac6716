"""Examples that are learned from: demonstrations, pairs, verdicts and labelled steps, as tokens;
with what is known of them beside (labels and margins, by place in a response)."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from ml_collections import ConfigDict

from hjax.algorithms import Algorithm
from hjax.data.dataset import Dataset, PromptSampler, pad_left, pad_right
from hjax.data.labels import check_labelled_steps, pair_labels, pair_margins
from hjax.data.preference_pairs import RESPONSE_COLUMNS, SIDES, parse_response
from hjax.data.tasks import Task
from hjax.data.tokenizer import Tokenizer
from hjax.data.unpaired import task_records
from hjax.errors import ConfigError, DataError

Examples = list[tuple[list[int], ...]]
# By the name of its array, for each example and each of its rows, values by place: the number of
# response tokens before it.
Marks = dict[str, list[tuple[dict[int, float], ...]]]


class LearnedExamples(NamedTuple):
    """Examples, and what is known of them beside."""

    examples: Examples = []
    marks: Marks = {}


# What stands where nothing is known.
FILL = {"labels": np.nan, "margins": 0.0}


def pair_marks(
    config: ConfigDict, columns: Mapping[str, Sequence[Any]] | None, pairs: Examples
) -> Marks:
    """Labels of pairs at their responses' ends, and their margins at those of the chosen ones.

    Args:
      config: of the run.
      columns: of its data; None: a built-in task's, whose chosen responses are good and others bad.
      pairs: tokens of prompt, chosen and rejected response.

    Raises:
      ConfigError: labels are to be learned, and the data has none.
      DataError: a label or a margin that is none.
    """
    labels = [(True, False)] * len(pairs) if columns is None else pair_labels(columns)
    if labels is None and config.algorithm.get("label_coef"):
        raise ConfigError(
            f"config.algorithm.label_coef={config.algorithm.label_coef}: {config.data.path} has no "
            "columns `chosen_label` and `rejected_label` (1 good or safe, 0 not); add them, or set "
            "label_coef=0"
        )
    margins = pair_margins(columns or {}, len(pairs))
    each = zip(pairs, margins, strict=True)
    marks: Marks = {"margins": [({len(chosen): margin}, {}) for (_, chosen, _), margin in each]}
    marks["labels"] = [({}, {})] * len(pairs)
    if labels is not None:
        marks["labels"] = [
            tuple({len(x): float(label)} for x, label in zip(responses, known, strict=True))
            for (_, *responses), known in zip(pairs, labels, strict=True)
        ]
    return marks


def step_examples(
    config: ConfigDict,
    tokenizer: Tokenizer,
    prompts: Sequence[tuple[list[int], str]],
    rows: Sequence[tuple[list[str], list[bool]]],
) -> LearnedExamples:
    """A prompt and its response for each row, and a label at the end of each step.

    Steps are tokenised one by one, with ``algorithm.separator`` after each.

    Args:
      config: of the run.
      tokenizer: of the actor.
      prompts: tokens, and how each is called in errors.
      rows: of each its steps and which are right.

    Raises:
      DataError: a response that is too long.
    """
    separator = tokenizer.encode(config.algorithm.separator, add_special=False)
    end = [tokenizer.eos_id] if tokenizer.eos_id is not None else []
    limit = config.rollout.max_response_length
    examples: Examples = []
    marks: Marks = {"labels": []}
    for (prompt, shown), (steps, labels) in zip(prompts, rows, strict=True):
        tokens: list[int] = []
        places: dict[int, float] = {}
        for step, label in zip(steps, labels, strict=True):
            tokens += tokenizer.encode(step, add_special=False) + separator
            places[len(tokens)] = float(label)
        tokens += end
        if len(tokens) > limit:
            raise DataError(
                f"the completions of {shown} have {len(tokens)} tokens, more than "
                f"rollout.max_response_length={limit}; raise it"
            )
        examples.append((prompt, tokens))
        marks["labels"].append((places,))
    return LearnedExamples(examples, marks)


def examples_of(
    config: ConfigDict,
    task: Task | None,
    tokenizer: Tokenizer | None,
    train: Dataset,
    source: str,
    verdicts: tuple[list[Any], list[bool]] | None = None,
) -> LearnedExamples:
    """Tuples of a prompt's tokens and those of its responses, each with EOS: the demonstration, or
    where pairs are learned from the chosen and the rejected one; empty where the data has none.
    And what is known of pairs and of steps beside.

    A row whose response is no text or too long is an error where they are learned from, and left
    out where they only happen to be there.
    """
    warm_start = config.warm_start.steps and not config.actor.path
    needed = source != "prompts" or warm_start or config.algorithm.get("pretraining_coef")
    if tokenizer is None:
        return LearnedExamples()
    if source == "steps":
        return _steps(config, task, tokenizer, train)
    texts: Sequence[tuple[Any, ...]] | None
    if source == "verdicts":
        texts = None if verdicts is None else [(text,) for text in verdicts[0]]
    else:
        texts = _pairs(config, task, train) if source == "pairs" else _shown(config, task, train)
    if texts is None:
        return LearnedExamples()
    end = [tokenizer.eos_id] if tokenizer.eos_id is not None else []
    limit = config.rollout.max_response_length
    found: Examples = []
    for i, (prompt, responses) in enumerate(zip(train.prompt_tokens, texts, strict=True)):
        if any(not isinstance(text, str) for text in responses):
            if needed:
                raise DataError(
                    f"the demonstration of {_row(train, i)} is {responses[0]!r}; it must be text"
                )
            continue
        tokens = [tokenizer.encode(text, add_special=False) + end for text in responses]
        longest = max(map(len, tokens))
        if longest > limit and not needed:
            continue
        if longest > limit:
            what = "an answer" if source == "pairs" else "the demonstration"
            raise DataError(
                f"{what} of {_row(train, i)} has {longest} tokens, more than "
                f"rollout.max_response_length={limit}; raise it"
            )
        found.append((prompt, *tokens))
    columns = None if task is not None else train.columns
    return LearnedExamples(found, pair_marks(config, columns, found) if source == "pairs" else {})


def _steps(
    config: ConfigDict, task: Task | None, tokenizer: Tokenizer, train: Dataset
) -> LearnedExamples:
    """Responses in steps, as a task makes them or the data has them."""
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
    prompts = [(prompt, _row(train, i)) for i, prompt in enumerate(train.prompt_tokens)]
    return step_examples(config, tokenizer, prompts, rows)


def _row(train: Dataset, row: int) -> str:
    """Rows are those that were not held out, so their numbers would not be the file's."""
    return f"the prompt {train.prompt_text[row][:60]!r}" if train.prompt_text else "a prompt"


def _shown(config: ConfigDict, task: Task | None, train: Dataset) -> list[tuple[Any]] | None:
    """The demonstration of each row, as it stands; None: there are none."""
    if task is None:
        for name in RESPONSE_COLUMNS:
            if name in train.columns:
                return [(text,) for text in train.columns[name]]
        return None
    rng = np.random.default_rng([config.seed, 2])
    return [(task.demonstration(record, rng),) for record in task_records(train)]


def shown_responses(config: ConfigDict, task: Task | None, rows: Dataset) -> list[str] | None:
    """A demonstration of each row, as text; None: the data has none for all of them."""
    found = _shown(config, task, rows) if rows.prompt_text is not None else None
    if found is None or any(not isinstance(text, str) for (text,) in found):
        return None
    return [text for (text,) in found]


def _pairs(config: ConfigDict, task: Task | None, train: Dataset) -> list[tuple[str, str]] | None:
    """The chosen and the rejected text of each row; None: there are none."""
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
      examples: a prompt's tokens, and those of as many responses in each.
      batch: sequences; the responses of an example are rows next to each other.
      prompt_length, response_length: tokens.
      seed: of the order.
      marks: what is known of the examples beside.
      labels: of examples with a response each, which stand in the batch as ``positive`` then.
    """

    def __init__(
        self,
        examples: Sequence[tuple[list[int], ...]],
        batch: int,
        prompt_length: int,
        response_length: int,
        seed: int,
        marks: Marks | None = None,
        labels: Sequence[bool] | None = None,
    ):
        self._examples, self._marks = examples, marks or {}
        self._lengths = prompt_length, response_length
        self._labels = labels
        self.sampler = PromptSampler(len(examples), batch // (len(examples[0]) - 1), seed)

    def __call__(self) -> dict[str, np.ndarray]:
        """The next ``batch_of``."""
        return self.batch_of(self.sampler.next())

    def __len__(self) -> int:
        return len(self._examples)

    def batch_of(self, indices: Sequence[int] | np.ndarray) -> dict[str, np.ndarray]:
        """Some examples: ``prompts``, ``prompt_mask``, ``responses``, ``response_mask``, and by
        name what is known of places, float32 [rows, response length + 1].

        Of labelled examples also ``positive`` float32 [rows, length], 1 on tokens of right ones.
        """
        chosen = [self._examples[i] for i in indices]
        rows = [(prompt, response) for prompt, *responses in chosen for response in responses]
        prompts, prompt_mask = pad_left([p for p, _ in rows], self._lengths[0])
        responses, response_mask = pad_right([r for _, r in rows], self._lengths[1])
        known = {}
        for name, marks in self._marks.items():
            places = [of_row for i in indices for of_row in marks[i]]
            known[name] = np.full((len(rows), self._lengths[1] + 1), FILL[name], np.float32)
            for row, values in enumerate(places):
                known[name][row, list(values)] = list(values.values())
        batch = {
            "prompts": prompts,
            "prompt_mask": prompt_mask,
            "responses": responses,
            "response_mask": response_mask,
            **known,
        }
        if self._labels is None:
            return batch
        right = np.array([self._labels[i] for i in indices], np.float32)
        return batch | {"positive": response_mask * right[:, None]}


class ExampleSources(NamedTuple):
    """What a run learns from beside rollouts; None: it does not.

    Attributes:
      learned: by the algorithm.
      warm_start: that the warm start imitates.
    """

    learned: Demonstrations | None = None
    warm_start: Demonstrations | None = None


def demonstrated(config: ConfigDict, algorithm: type[Algorithm], inputs: Any) -> ExampleSources:
    """Of what a run reads (``hjax.run.inputs.Inputs``).

    Raises:
      ConfigError: a warm start without any.
    """
    lengths = {
        "prompt_length": inputs.prompt_length,
        "response_length": config.rollout.max_response_length,
    }
    found = ExampleSources()
    if examples := inputs.demonstrations:
        batch = config.warm_start.batch
        # Of demonstrations that are answered as many as of prompts.
        answered = algorithm.generates and algorithm.source != "prompts"
        learned = Demonstrations(
            examples,
            config.rollout.prompts if answered else batch,
            **lengths,
            seed=config.seed + 1,
            marks=inputs.marks,
            labels=inputs.labels,
        )
        shown = [example[:2] for example in examples]  # of a pair the chosen one
        if inputs.labels is not None:  # of verdicts the right ones
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
