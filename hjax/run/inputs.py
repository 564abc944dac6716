"""What a run reads: tokenizer, prompts, demonstrations, reward and cost functions."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from hjax.data.conversations import RESPONSE_COLUMNS, SIDES, answer_text
from hjax.data.dataset import Dataset, PromptSampler, pad_left, pad_right, split_held_out
from hjax.data.labels import labelled_steps
from hjax.data.mixing import MixedSampler
from hjax.data.reading import Reading, weights_of
from hjax.data.tasks import TASKS, Task, get_task
from hjax.data.tokenizer import Tokenizer
from hjax.data.verdicts import read_verdicts, records_of
from hjax.errors import ConfigError, DataError
from hjax.models.config import ModelConfig
from hjax.models.families import with_sizes
from hjax.models.weights import model_directory, read_config, read_eos_ids
from hjax.rewards.function import load_function
from hjax.run.marks import FILL, Examples, Marks, pair_marks, step_examples

# How many training prompts of a built-in task are kept at most.
TASK_PROMPTS = 8192


@dataclasses.dataclass
class Inputs:
    """Everything read from disk or generated, before any device is touched."""

    tokenizer: Tokenizer | None
    task: Task | None
    train: Dataset
    held_out: Dataset | None
    model: ModelConfig
    prompt_length: int
    reward: Callable[..., Any] | None
    cost: Callable[..., Any] | None
    demonstrations: Examples  # a prompt and its response, or a pair of them
    eos_ids: tuple[int, ...] = ()
    remarks: tuple[str, ...] = ()  # what was done to the data, to be told
    marks: Marks = dataclasses.field(default_factory=dict)
    # Of the held-out rows, where models are evaluated on them.
    held_out_examples: Examples = dataclasses.field(default_factory=list)
    held_out_marks: Marks = dataclasses.field(default_factory=dict)
    labels: list[bool] | None = None  # of each demonstration, where verdicts are learned from


def load_inputs(config: ConfigDict, source: str = "prompts") -> Inputs:
    """Read what a config names.

    Args:
      config: the run's.
      source: what the algorithm learns from, see ``Algorithm.source``.

    Raises:
      ConfigError, DataError: whatever is missing or does not fit, in one line.
    """
    if not config.data.path and not config.data.task:
        raise ConfigError(
            "there is no data: set config.data.path=FILE, prompts of your own (docs/data.md), or "
            f"config.data.task, one of {', '.join(sorted(TASKS))}"
        )
    task = None if config.data.path else get_task(config.data.task, **config.data.task_options)
    tokenizer = _tokenizer(config, task)
    remarks: list[str] = []
    train, held_out = _datasets(config, task, tokenizer, remarks.append, source)
    longest = max(d.longest_prompt for d in (train, held_out) if d is not None)
    prompt_length = config.rollout.max_prompt_length or longest
    if longest > prompt_length:  # of a task
        raise DataError(
            f"data.task={config.data.task}: its prompts have up to {longest} tokens, above "
            f"rollout.max_prompt_length={prompt_length}; raise that key (0: the longest prompt)"
        )
    model = _model(config, tokenizer, prompt_length)
    if task is not None:  # a file's rows were checked one by one
        for dataset in (train, held_out):
            _check_tokens(f"data.task={config.data.task}", dataset, model.vocab_size)
    limit = prompt_length + config.rollout.max_response_length
    if limit > model.max_length:
        raise ConfigError(
            f"prompts of {prompt_length} and responses of {config.rollout.max_response_length} "
            f"tokens exceed the model's {model.max_length} positions; lower "
            "rollout.max_prompt_length or rollout.max_response_length"
        )
    verdicts = read_verdicts(config.seed, task, train) if source == "verdicts" else None
    examples, marks = _examples(config, task, tokenizer, train, source, verdicts)
    judged: tuple[Examples, Marks] = ([], {})
    if held_out is not None and source in ("pairs", "steps") and config.eval.every:
        judged = _examples(config, task, tokenizer, held_out, source)
    return Inputs(
        tokenizer,
        task,
        train,
        held_out,
        model,
        prompt_length,
        _function(config, "reward", task.reward if task else None),
        _function(config, "cost", task.cost if task and task.has_cost else None),
        examples,
        _eos_ids(config, tokenizer),
        tuple(remarks),
        marks,
        *judged,
        None if verdicts is None else verdicts[1],
    )


def _eos_ids(config: ConfigDict, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    if tokenizer is not None:
        return tuple(tokenizer.eos_ids)
    if config.actor.path:
        return tuple(read_eos_ids(model_directory(config.actor.path)))
    return ()


def _tokenizer(config: ConfigDict, task: Task | None) -> Tokenizer | None:
    if config.tokenizer.path:
        return Tokenizer.load(config.tokenizer.path)
    if config.actor.path:
        return load_tokenizer(config.actor.path)
    return task.tokenizer() if task else None


def load_tokenizer(path: str | Path) -> Tokenizer | None:
    """The tokenizer beside a model, None where there is none."""
    directory = model_directory(path)
    return Tokenizer.load(directory) if (directory / "tokenizer.json").is_file() else None


def _datasets(
    config: ConfigDict,
    task: Task | None,
    tokenizer: Tokenizer | None,
    tell: Callable[[str], None],
    source: str,
) -> tuple[Dataset, Dataset | None]:
    data, seed = config.data, config.seed
    if task is not None:
        if tokenizer is None:
            read_config(config.actor.path)  # says so where there is no model at all
            raise ConfigError(
                f"data.task={data.task} is text, but {config.actor.path} has no tokenizer.json; "
                "set tokenizer.path"
            )
        size = data.eval_size or 128
        counts = {
            split: min(wanted, largest if (largest := task.largest_count(split)) else wanted)
            for split, wanted in (("train", TASK_PROMPTS), ("eval", size))
        }
        train, held_out = (
            Dataset.from_task(task, split, seed, counts[split], tokenizer)
            for split in ("train", "eval")
        )
        return train, held_out
    limit = config.rollout.max_prompt_length
    if data.overlong != "error" and not limit:
        raise ConfigError(
            f"config.data.overlong={data.overlong} needs config.rollout.max_prompt_length above 0: "
            "with 0 no prompt is too long"
        )
    # Without a tokenizer or a size, text is refused first, by its line.
    sized = config.actor.path or config.model.vocab_size or tokenizer is not None
    vocabulary = _vocabulary(config, tokenizer) if sized else None
    if vocabulary is not None and tokenizer is not None:
        vocabulary = min(vocabulary, tokenizer.vocab_size)
    how: dict[str, Any] = {"vocab_size": vocabulary, "reading": Reading.of(data), "tell": tell}
    how |= {"labelled": source == "pairs", "demonstrated": source == "demonstrations"}
    train = Dataset.from_file(data.path, tokenizer, limit, **how)
    if data.eval_path:
        held_out = Dataset.from_file(data.eval_path, tokenizer, limit, **how)
    elif data.eval_fraction and config.eval.every:
        train, held_out = split_held_out(train, data.eval_fraction, seed)
    else:
        return train, None
    if data.eval_size and len(held_out) > data.eval_size:
        held_out = held_out.select(range(data.eval_size))
    return train, held_out


def prompt_order(config: ConfigDict, train: Dataset) -> PromptSampler | MixedSampler:
    """Which prompts each step takes.

    Raises:
      ConfigError: `data.weights` without the column `data_source`, or of other sources than it has.
    """
    per_step = config.rollout.prompts
    if not config.data.weights:
        return PromptSampler(len(train), per_step, config.seed)
    sources = train.columns.get("data_source")
    if sources is None:
        raise ConfigError(
            f"config.data.weights={config.data.weights!r} weighs the column data_source, which "
            f"this data has not; it has {', '.join(train.columns)} (config.data.columns renames)"
        )
    return MixedSampler(sources, weights_of(config.data.weights), per_step, config.seed)


def _vocabulary(config: ConfigDict, tokenizer: Tokenizer | None) -> int:
    """How many tokens the actor knows."""
    if config.actor.path:
        known = read_config(config.actor.path).vocab_size
        if tokenizer is not None:
            tokenizer.check_fits(known, config.actor.path)
        return known
    vocab = config.model.vocab_size
    if not vocab:
        if tokenizer is None:
            raise ConfigError(
                "model.vocab_size=0 takes the tokenizer's size, but there is no tokenizer; set "
                "model.vocab_size or tokenizer.path"
            )
        vocab = -(-tokenizer.vocab_size // 8) * 8
    if tokenizer is not None and vocab < tokenizer.vocab_size:
        raise ConfigError(
            f"model.vocab_size={vocab} is less than the tokenizer's {tokenizer.vocab_size}"
        )
    return vocab


def _model(config: ConfigDict, tokenizer: Tokenizer | None, prompt_length: int) -> ModelConfig:
    if config.actor.path:
        _vocabulary(config, tokenizer)
        return read_config(config.actor.path)
    shape, vocab = config.model, _vocabulary(config, tokenizer)
    if shape.hidden_size % shape.heads:
        raise ConfigError(
            f"model.heads={shape.heads} does not divide model.hidden_size={shape.hidden_size}"
        )
    sizes = ModelConfig(
        vocab_size=vocab,
        hidden_size=shape.hidden_size,
        mlp_size=shape.mlp_size,
        layers=shape.layers,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.hidden_size // shape.heads,
        max_length=shape.max_length or prompt_length + config.rollout.max_response_length,
        tie_embeddings=shape.tie_embeddings,
    )
    return with_sizes(shape.family, sizes) if shape.family else sizes


def _check_tokens(name: str, dataset: Dataset | None, vocab: int) -> None:
    for row, tokens in enumerate(dataset.prompt_tokens if dataset else ()):
        if tokens and not 0 <= min(tokens) <= max(tokens) < vocab:
            wrong = min(tokens) if min(tokens) < 0 else max(tokens)
            raise DataError(
                f"{name}: prompt {row} has token id {wrong}; the model's vocabulary is 0 to "
                f"{vocab - 1}"
            )


def _function(
    config: ConfigDict, role: str, default: Callable[..., Any] | None
) -> Callable[..., Any] | None:
    if config[role].path:
        return None
    name = config[role].function
    return load_function(name, key=f"{role}.function") if name else default


def _examples(
    config: ConfigDict,
    task: Task | None,
    tokenizer: Tokenizer | None,
    train: Dataset,
    source: str,
    verdicts: tuple[list[Any], list[bool]] | None = None,
) -> tuple[Examples, Marks]:
    """Tuples of a prompt's tokens and those of its responses, each with EOS: the demonstration, or
    where pairs are learned from the chosen and the rejected one; empty where the data has none.
    And what is known of pairs and of steps beside.

    A row whose response is no text or too long is an error where they are learned from, and left
    out where they only happen to be there.
    """
    warm_start = config.warm_start.steps and not config.actor.path
    needed = source != "prompts" or warm_start or config.algorithm.get("pretraining_coef")
    if tokenizer is None:
        return [], {}
    if source == "steps":
        return _steps(config, task, tokenizer, train)
    texts: Sequence[tuple[Any, ...]] | None
    if source == "verdicts":
        texts = None if verdicts is None else [(text,) for text in verdicts[0]]
    else:
        texts = _pairs(config, task, train) if source == "pairs" else _shown(config, task, train)
    if texts is None:
        return [], {}
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
    return found, pair_marks(config, columns, found) if source == "pairs" else {}


def _steps(
    config: ConfigDict, task: Task | None, tokenizer: Tokenizer, train: Dataset
) -> tuple[Examples, Marks]:
    """Responses in steps, as a task makes them or the data has them."""
    rows = []
    if task is not None:
        rng = np.random.default_rng([config.seed, 4])
        rows = [task.steps(record, rng) for record in records_of(train)]
    elif {"completions", "labels"} <= train.columns.keys():
        columns = train.columns["completions"], train.columns["labels"]
        each = enumerate(zip(*columns, strict=True))
        rows = [labelled_steps(*pair, _row(train, i)) for i, pair in each]
    if not rows:
        return [], {}
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
    return [(task.demonstration(record, rng),) for record in records_of(train)]


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
            chosen, rejected = map(answer_text, pair, SIDES, (shown, shown))
            if chosen == rejected:
                raise DataError(f"chosen and rejected of {shown} are equal: the pair says nothing")
            found.append((chosen, rejected))
        return found
    rng = np.random.default_rng([config.seed, 3])
    return [task.pair(record, rng) for record in records_of(train)]


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


def prompt_batch(rows: Mapping[str, Any], length: int, step: int) -> dict[str, Any]:
    """What ``generate_sequences`` takes, of a dataset's rows: prompts padded on the left."""
    prompts, mask = pad_left(rows["prompt_tokens"], length)
    batch = {
        "prompts": prompts,
        "prompt_mask": mask,
        "columns": rows["columns"],
        "step": step,
    }
    return batch if rows["prompt_text"] is None else batch | {"prompt_text": rows["prompt_text"]}
