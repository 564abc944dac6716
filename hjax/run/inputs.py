"""Inputs of a run: tokenizer, datasets, examples, model config, reward and cost functions."""

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from hjax.algorithms import Algorithm, get_algorithm
from hjax.config import data_path
from hjax.data.dataset import Dataset, PromptSampler, interleave, pad_left, split_held_out
from hjax.data.invalid_rows import InvalidRows
from hjax.data.mixing import MixedSampler, Mixing, make_sampler
from hjax.data.read_options import ReadOptions, parse_mixture
from hjax.data.row_answers import has_answers
from hjax.data.sources import MIXTURE
from hjax.data.tasks import TASKS, Task, get_task
from hjax.data.tokenizer import Tokenizer
from hjax.data.tokenizer_files import holds_tokenizer
from hjax.environments.tool_environment import tool_definitions
from hjax.errors import ConfigError, DataError
from hjax.models.families import family_config
from hjax.models.model_config import ModelConfig
from hjax.models.rope_override import with_rope_scaling
from hjax.models.weights import model_directory, read_config, read_eos_ids
from hjax.rewards.function import load_function
from hjax.run.dataflow import absent_roles
from hjax.run.episode_rollout import environment_of, episode_return
from hjax.run.examples import (
    Annotations,
    Examples,
    LearnedExamples,
    load_examples,
    make_example_sources,
)
from hjax.run.multi_turn_rows import check_turns

# Most training prompts of a built-in task.
TASK_PROMPTS = 8192
# Most values of the column ``eval.by``.
MAX_GROUPS = 50
# Keys of the section ``model`` that a model from scratch takes unchanged.
_SIZES = ("hidden_size", "mlp_size", "layers", "heads", "kv_heads", "tie_embeddings")


@dataclasses.dataclass
class Inputs:
    """Everything that a run reads or generates before it uses any device."""

    tokenizer: Tokenizer | None
    task: Task | None
    train: Dataset
    held_out: Dataset | None
    model: ModelConfig  # of the actor from scratch
    prompt_length: int
    reward: Callable[..., Any] | None
    cost: Callable[..., Any] | None
    demonstrations: Examples  # tokens of a prompt and one response, or a pair of responses
    eos_ids: tuple[int, ...] = ()
    mixing: Mixing | None = None  # weights of the sources of the training prompts
    example_mixing: Mixing | None = None  # of the demonstrations
    remarks: tuple[str, ...] = ()  # messages about changes to the data, for the user
    annotations: Annotations = dataclasses.field(default_factory=dict)
    # Held-out examples, for algorithms that learn from examples, each of a row of ``held_out``.
    held_out_examples: LearnedExamples = LearnedExamples()
    labels: list[bool] | None = None  # of each demonstration, where verdicts are learned from
    drawn: Sequence[Sequence[bool]] = ()  # of each demonstrated episode, tokens of the policy
    # Locations of the rows that were left out, by what is wrong with them.
    left_out: dict[str, list[str]] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class NoSequences(Inputs):
    """The inputs of a run without sequences (``Algorithm.sequences``): none."""

    tokenizer: Tokenizer | None = None
    task: Task | None = None
    train: Any = ()
    held_out: Dataset | None = None
    model: Any = None
    prompt_length: int = 0
    reward: Callable[..., Any] | None = None
    cost: Callable[..., Any] | None = None
    demonstrations: Examples = dataclasses.field(default_factory=list)


def run_inputs(config: ConfigDict, algorithm: type[Algorithm]) -> Inputs:
    """What a run of an algorithm reads; raises as ``load_inputs``."""
    return load_inputs(config, algorithm.source) if algorithm.sequences else NoSequences()


def load_inputs(config: ConfigDict, source: str = "prompts") -> Inputs:
    """Read everything that a config names.

    Args:
      config: of the run.
      source: what the algorithm learns from, see ``Algorithm.source``.

    Raises:
      ConfigError, DataError: something is missing or invalid, in one line.
    """
    path = data_path(config.data)
    if not path and not config.data.task:
        raise ConfigError(
            "there is no data: set config.data.path=FILE, prompts of your own (docs/data.md), or "
            f"config.data.task, one of {', '.join(sorted(TASKS))}"
        )
    task = None if path else get_task(config.data.task, **config.data.task_options)
    tokenizer = _tokenizer(config, task)
    remarks: list[str] = []
    invalid = InvalidRows(config.data.invalid)
    train, held_out = _datasets(config, task, tokenizer, remarks.append, invalid, source)
    longest = max(d.longest_prompt for d in (train, held_out) if d is not None)
    prompt_length = config.rollout.max_prompt_length or longest
    model = _model(config, tokenizer, read := _longest_read(config, prompt_length))
    if task is not None:  # a file's rows were checked one by one
        _check_task(config, longest, model.vocab_size, train, held_out)
    _check_positions(read, config.rollout.max_response_length, model)
    learned = load_examples(config, task, tokenizer, train, source, invalid, remarks.append)
    if learned.rows is not None:
        train = train.select(learned.rows)
    mixing = Mixing.from_config(config.data, train)
    judged = LearnedExamples()
    if held_out is not None and learned.examples and source != "prompts" and config.eval.every:
        judged = load_examples(config, task, tokenizer, held_out, source, invalid)
        _check_held_out(config, task, judged)
        held_out = held_out if judged.rows is None else held_out.select(judged.rows)
    remarks += [f"rows left out: {invalid}"] if invalid else []
    remarks += [mixing.describe()] if mixing is not None else []
    _check_groups(config.eval.by, held_out)
    remarks += check_turns(config, task, tokenizer, train, held_out) if source == "prompts" else []
    return Inputs(
        tokenizer=tokenizer,
        task=task,
        train=train,
        held_out=held_out,
        model=model,
        prompt_length=prompt_length,
        reward=_function(config, "reward", _reward_of(config, task)),
        cost=_function(config, "cost", task.cost if task and task.has_cost else None),
        mixing=mixing,
        example_mixing=None if learned.rows is None else mixing,
        demonstrations=learned.examples,
        eos_ids=_eos_ids(config, tokenizer),
        remarks=tuple(remarks),
        annotations=learned.annotations,
        held_out_examples=judged,
        labels=learned.labels if source == "verdicts" else None,
        drawn=learned.drawn,
        left_out=invalid.locations,
    )


def _longest_read(config: ConfigDict, prompt_length: int) -> int:
    """Tokens of the longest prompt that the actor reads."""
    return get_algorithm(config.algorithm.name).longest_prompt(config.algorithm, prompt_length)


def check_inputs(config: ConfigDict) -> Inputs:
    """The inputs of a run, checked with its algorithm as the run does before its first step.

    Raises:
      ConfigError, DataError: something is missing or invalid, in one line.
    """
    algorithm = get_algorithm(config.algorithm.name)
    inputs = run_inputs(config, algorithm)
    algorithm(  # which refuses data without what it learns from
        config.algorithm,
        absent_roles(algorithm, ()),
        samples=config.rollout.samples if algorithm.generates else 1,
        demonstrations=make_example_sources(config, algorithm, inputs).learned,
        max_response_length=config.rollout.max_response_length,
    )
    return inputs


def _eos_ids(config: ConfigDict, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    if tokenizer is not None:
        return tuple(tokenizer.eos_ids)
    if config.actor.path:
        return tuple(read_eos_ids(model_directory(config.actor.path)))
    return ()


def _tokenizer(config: ConfigDict, task: Task | None) -> Tokenizer | None:
    if config.tokenizer.path:
        model = model_directory(config.actor.path) if config.actor.path else None
        return Tokenizer.load(config.tokenizer.path, model)
    if config.actor.path:
        return load_tokenizer(config.actor.path)
    return task.tokenizer() if task else None


def load_tokenizer(path: str | Path) -> Tokenizer | None:
    """The tokenizer in a model's directory; None if it has none."""
    directory = model_directory(path)
    return Tokenizer.load(directory) if holds_tokenizer(directory) else None


def _datasets(
    config: ConfigDict,
    task: Task | None,
    tokenizer: Tokenizer | None,
    notify: Callable[[str], None],
    invalid: InvalidRows,
    source: str,
) -> tuple[Dataset, Dataset | None]:
    data, seed = config.data, config.seed
    if task is not None:
        if tokenizer is None:
            read_config(config.actor.path)  # raises if there is no model at all
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
    answers = data.overlong == "filter" and source != "prompts"  # these have a limit always
    if data.overlong != "error" and not limit and not answers:
        raise ConfigError(
            f"config.data.overlong={data.overlong} needs config.rollout.max_prompt_length above 0: "
            "with 0 no prompt is too long"
        )
    # Without tokenizer and size, reading the data reports the first text prompt instead.
    sized = config.actor.path or config.model.vocab_size or tokenizer is not None
    vocabulary = _vocabulary(config, tokenizer) if sized else None
    if vocabulary is not None and tokenizer is not None:
        vocabulary = min(vocabulary, tokenizer.vocab_size)
    options: dict[str, Any] = {
        "vocab_size": vocabulary,
        "options": _read_options(config, tokenizer),
    }
    options |= {"notify": notify, "invalid": invalid, "learns_pairs": source == "pairs"}
    options["learns_demonstrations"] = source == "demonstrations"
    path = parse_mixture(data.mixture)[0] if data.mixture else data.path
    check = functools.partial(_check_columns, config, source, path)
    train = Dataset.from_file(path, tokenizer, limit, check_columns=check, **options)
    if data.eval_path:
        held_out = Dataset.from_file(data.eval_path, tokenizer, limit, **options)
    elif data.eval_fraction and config.eval.every:
        sources = train.columns.get(MIXTURE) if data.mixture else None
        train, held_out = split_held_out(train, data.eval_fraction, seed, sources)
    else:
        return train, None
    if MIXTURE in held_out.columns:  # so that the first rows are of every set
        held_out = held_out.select(interleave(held_out.columns[MIXTURE]))
    if data.eval_size and len(held_out) > data.eval_size:
        held_out = held_out.select(range(data.eval_size))
    return train, held_out


def _check_columns(
    config: ConfigDict, source: str, path: str | Path, columns: Collection[str]
) -> None:
    """Check that the file to learn from has the columns that the algorithm learns from."""
    algorithm = get_algorithm(config.algorithm.name)
    if source == "prompts" or not algorithm.needed_data or has_answers(source, columns):
        return
    hint = f": {algorithm.data_hint}" if algorithm.data_hint else ""
    raise DataError(
        f"{path}: {algorithm.__name__} needs {algorithm.needed_data}; this file has "
        f"{', '.join(columns)}{hint}"
    )


def _read_options(config: ConfigDict, tokenizer: Tokenizer | None) -> ReadOptions:
    """How the data is read: prompts of a run with tools are chats that show them."""
    options = ReadOptions.from_config(config.data)
    if not config.environment.tools:
        return options
    tools = tool_definitions(config.environment.tools, tokenizer)
    return dataclasses.replace(options, chat=True, tools=tools)


class NoPrompts:
    """The sampler of a run without sequences."""

    def next(self) -> Any:
        """Nothing."""

    def state(self) -> Any:
        """Nothing."""

    def restore(self, state: Any) -> None:
        """Nothing."""


def make_prompt_sampler(
    config: ConfigDict, inputs: Inputs
) -> PromptSampler | MixedSampler | NoPrompts:
    """The sampler of each step's prompts."""
    if isinstance(inputs, NoSequences):
        return NoPrompts()
    return make_sampler(len(inputs.train), config.rollout.prompts, config.seed, inputs.mixing)


def _vocabulary(config: ConfigDict, tokenizer: Tokenizer | None) -> int:
    """The actor's vocabulary size."""
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
        return with_rope_scaling(read_config(config.actor.path), config.model.rope_scaling)
    shape, vocab = config.model, _vocabulary(config, tokenizer)
    if shape.hidden_size % shape.heads:
        raise ConfigError(
            f"model.heads={shape.heads} does not divide model.hidden_size={shape.hidden_size}"
        )
    sizes = ModelConfig(
        vocab_size=vocab,
        head_dim=shape.hidden_size // shape.heads,
        max_length=shape.max_length or prompt_length + config.rollout.max_response_length,
        **{name: shape[name] for name in _SIZES},
    )
    model = family_config(shape.family, sizes) if shape.family else sizes
    return with_rope_scaling(model, shape.rope_scaling)


def _check_positions(prompt_length: int, response_length: int, model: ModelConfig) -> None:
    if prompt_length + response_length > model.max_length:
        raise ConfigError(
            f"prompts of {prompt_length} and responses of {response_length} tokens exceed the "
            f"model's {model.max_length} positions; lower rollout.max_prompt_length or "
            "rollout.max_response_length"
        )


def _check_task(config: ConfigDict, longest: int, vocab: int, *datasets: Dataset | None) -> None:
    """Check a built-in task's prompts: their lengths, of which the ``longest``, and token ids."""
    name, limit = f"data.task={config.data.task}", config.rollout.max_prompt_length
    if 0 < limit < longest:
        raise DataError(
            f"{name}: its prompts have up to {longest} tokens, above "
            f"rollout.max_prompt_length={limit}; raise that key (0: the longest prompt)"
        )
    prompts = [p for d in datasets if d is not None for p in enumerate(d.prompt_tokens)]
    for row, tokens in prompts:
        if tokens and not 0 <= min(tokens) <= max(tokens) < vocab:
            wrong = min(tokens) if min(tokens) < 0 else max(tokens)
            raise DataError(
                f"{name}: prompt {row} has token id {wrong}; the model's vocabulary is 0 to "
                f"{vocab - 1}"
            )


def _check_held_out(config: ConfigDict, task: Task | None, found: LearnedExamples) -> None:
    """Check that held-out data of a run that learns from examples can be evaluated by something."""
    rewarded = config.reward.path or config.reward.function or _reward_of(config, task)
    if not found.examples and not rewarded:
        raise DataError(
            f"data.eval_path={config.data.eval_path}: nothing to evaluate by: it lacks the columns "
            "that data.path is learned from, and there is no reward; add them, set "
            "reward.function, or set eval.every=0"
        )


def _check_groups(column: str, held_out: Dataset | None) -> None:
    """Check that ``eval.by`` is a column of few values."""
    if not column or held_out is None:
        return
    if column not in held_out.columns:
        raise ConfigError(
            f"config.eval.by={column}: no column of the held-out data, which has "
            f"{', '.join(held_out.columns)}"
        )
    values = len(set(map(str, held_out.columns[column])))
    if values > MAX_GROUPS:
        raise ConfigError(
            f"config.eval.by={column}: {values} values, of at most {MAX_GROUPS} of which each has "
            "metrics of its own; name a column of few values"
        )


def _reward_of(config: ConfigDict, task: Task | None) -> Callable[..., Any] | None:
    """What scores responses where the config names nothing: an environment, or the verifier."""
    if environment_of(config, task) and not config.environment.tools:
        return episode_return
    return task.reward if task else None


def _function(
    config: ConfigDict, role: str, default: Callable[..., Any] | None
) -> Callable[..., Any] | None:
    if config[role].path:
        return None
    name = config[role].function
    return load_function(name, key=f"{role}.function") if name else default


def prompt_batch(rows: Mapping[str, Any], length: int, step: int) -> dict[str, Any]:
    """The batch for ``generate_sequences`` of a dataset's rows: prompts, left-padded."""
    prompts, mask = pad_left(rows["prompt_tokens"], length)
    batch = {
        "prompts": prompts,
        "prompt_mask": mask,
        "columns": rows["columns"],
        "step": step,
    }
    return batch if rows["prompt_text"] is None else batch | {"prompt_text": rows["prompt_text"]}
