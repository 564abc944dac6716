"""Prompts with their columns: from a built-in task or a file, in seeded order."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hjax.data.chat_rows import assistant_turns, is_chat, read_prompt, refuse_chat_columns
from hjax.data.conversation import Conversation
from hjax.data.invalid_rows import InvalidRows
from hjax.data.labels import pair_labelled_texts
from hjax.data.preference_pairs import split_off_prompt
from hjax.data.read_options import ReadOptions
from hjax.data.row_formats import format_of
from hjax.data.sources import read_sources
from hjax.data.tasks import Task
from hjax.data.template_coverage import TemplateCoverage
from hjax.data.tokenizer import Tokenizer
from hjax.errors import ConfigError, DataError, short_repr

# Argument names of a reward function, which no column may have.
_RESERVED = ("prompts", "responses")
# Columns that may hold a row's prompt, in order of preference.
_PROMPT_COLUMNS = ("prompt_tokens", "prompt", "question")
# The kind of a row whose prompt is too long.
LONG_PROMPT = "prompt above rollout.max_prompt_length"


@dataclasses.dataclass(frozen=True)
class Dataset:
    """Tokenised prompts and every column of the data they came from.

    Attributes:
      prompt_tokens: token ids per prompt, none empty.
      prompt_text: the text that was tokenised, per prompt (of a chat, the rendered template);
        None without a tokenizer.
      columns: column name to one value per prompt; values are whatever the file holds.
      conversations: per prompt the chat that was rendered, None where the prompt is text or token
        ids; None if no prompt is a chat.
      locations: of each prompt's row, `file:line` or `file: row n`; None where it is of no file.
    """

    prompt_tokens: list[list[int]]
    prompt_text: list[str] | None
    columns: dict[str, list[Any]]
    conversations: list[Conversation | None] | None = None
    locations: list[str] | None = None

    def __len__(self) -> int:
        return len(self.prompt_tokens)

    @property
    def longest_prompt(self) -> int:
        """Tokens of the longest prompt."""
        return max(map(len, self.prompt_tokens))

    def rows(self, indices: Iterable[int]) -> dict[str, Any]:
        """The attributes of the prompts at `indices`, by name."""
        indices = [int(i) for i in indices]
        text, locations = self.prompt_text, self.locations
        return {
            "prompt_tokens": [self.prompt_tokens[i] for i in indices],
            "prompt_text": None if text is None else [text[i] for i in indices],
            "columns": {key: [values[i] for i in indices] for key, values in self.columns.items()},
            "locations": None if locations is None else [locations[i] for i in indices],
        }

    def location(self, index: int) -> str:
        """Where the prompt at `index` stands, for errors: its row, or its text."""
        if self.locations is not None:
            return self.locations[index]
        return f"the prompt {self.prompt_text[index][:60]!r}" if self.prompt_text else "a prompt"

    def select(self, indices: Iterable[int]) -> Dataset:
        """A dataset of the prompts at `indices`, in that order."""
        indices, chats = [int(i) for i in indices], self.conversations
        chosen = None if chats is None else [chats[i] for i in indices]
        return Dataset(**self.rows(indices), conversations=chosen)

    @classmethod
    def from_task(
        cls, task: Task, split: str, seed: int, count: int, tokenizer: Tokenizer | None = None
    ) -> Dataset:
        """`count` prompts of a built-in task; `tokenizer` defaults to the task's characters."""
        tokenizer = tokenizer or task.tokenizer()
        records = task.examples(split, seed, count)
        return cls(
            prompt_tokens=[tokenizer.encode(r["prompt"]) for r in records],
            prompt_text=[r["prompt"] for r in records],
            columns={key: [r[key] for r in records] for key in records[0]},
        )

    @classmethod
    def from_file(
        cls,
        path: str | Path,
        tokenizer: Tokenizer | None = None,
        max_prompt_length: int = 0,
        *,
        vocab_size: int | None = None,
        format_prompt: Callable[[str], str | list[dict[str, Any]]] | None = None,
        options: ReadOptions | None = None,
        notify: Callable[[str], None] | None = None,
        invalid: InvalidRows | None = None,
        learns_pairs: bool = False,
        learns_demonstrations: bool = False,
        check_columns: Callable[[Collection[str]], None] | None = None,
    ) -> Dataset:
        """Reads .jsonl (one JSON object per line), .json, .csv, .parquet or .txt files (a prompt
        per line), also with .gz or .zst behind it (not .parquet).

        A row's prompt is its `prompt_tokens` if it has them, else its `prompt`, else its
        `question`: a string, a list of chat messages (rendered by the tokenizer's template), or a
        list of token ids. verl's files (`prompt`, `data_source`, `reward_model`, `extra_info`) and
        GSM8K's (`question`, `answer`) work unchanged. So do preference pairs whose prompt is the
        common prefix of `chosen` and `rejected` (hh-rlhf). A conversation in the column `messages`
        becomes one row per assistant turn (`hjax.data.chat_rows`). Every column is kept; a
        value that a row lacks is None.

        Args:
          path: a file, a glob pattern, a folder, a Hugging Face dataset (`owner/name:split`, which
            needs the `datasets` package), or several of these, separated by commas.
          tokenizer: for strings and chats; not needed where all prompts are token ids.
          max_prompt_length: tokens; ``options.overlong`` says what happens to longer prompts. 0: no
            limit.
          vocab_size: token ids must be below it; by default the tokenizer's.
          format_prompt: maps a prompt that is a string to the text or chat messages to tokenise.
          options: column names, chats, overlong prompts.
          notify: called with a message about prompts that were truncated.
          invalid: collects the rows that are left out; by default a bad row is an error.
          learns_pairs: make preference pairs of labelled texts (``hjax.data.labels``).
          learns_demonstrations: `messages` win over a row's prompt and its pair.
          check_columns: called with the columns' names, before prompts are looked for.

        Raises DataError, one line with the file and the line (jsonl) or row (parquet, from 1).
        """
        options = options or ReadOptions()
        invalid = InvalidRows() if invalid is None else invalid
        coverage = None if tokenizer is None else TemplateCoverage(tokenizer)
        learns = {"pairs": learns_pairs, "demonstrations": learns_demonstrations}
        reading: dict[str, Any] = {"options": options, "coverage": coverage, "invalid": invalid}
        rows = _rows_of(path, tokenizer, learns=learns, check_columns=check_columns, **reading)
        return cls._encoded(
            path, rows, tokenizer, max_prompt_length, vocab_size, format_prompt, notify, **reading
        )

    @classmethod
    def _encoded(
        cls,
        path: str | Path,
        rows: Sequence[tuple[str, dict[str, Any]]],
        tokenizer: Tokenizer | None,
        max_prompt_length: int,
        vocab_size: int | None,
        format_prompt: Callable[[str], str | list[dict[str, Any]]] | None,
        notify: Callable[[str], None] | None,
        options: ReadOptions,
        invalid: InvalidRows,
        coverage: TemplateCoverage | None,
    ) -> Dataset:
        """The rows of a file, their prompts tokenised; the arguments are those of ``from_file``."""
        if vocab_size is None and tokenizer is not None:
            vocab_size = tokenizer.vocab_size
        tokens: list[list[int]] = []
        texts: list[str] = []
        chats: list[Conversation | None] = []
        kept: list[tuple[str, dict[str, Any]]] = []
        longer = 0
        limit = max_prompt_length if options.overlong == "error" else 0
        for where, row in rows:
            with invalid.checking(where, "unusable prompt"):
                ids, text, chat = _encode_prompt(
                    row, tokenizer, format_prompt, options=options, coverage=coverage
                )
                _check_tokens(ids, vocab_size, limit)
                if 0 < max_prompt_length < len(ids):
                    if options.overlong == "filter":
                        invalid.leave_out(where, LONG_PROMPT)
                        continue
                    longer += 1
                    ids, text = ids[-max_prompt_length:], None
                if text is None and tokenizer is not None:
                    text = tokenizer.decode(ids)
                kept.append((where, row))
                tokens.append(ids)
                texts.append(text or "")
                chats.append(chat)
        if longer and notify is not None:
            notify(
                f"{path}: {longer} of {len(rows)} prompts have more than "
                f"rollout.max_prompt_length={max_prompt_length} tokens and lost their beginning"
            )
        if not kept:
            raise invalid.nothing_left(str(path))
        return cls(
            prompt_tokens=tokens,
            prompt_text=None if tokenizer is None else texts,
            columns=_columns(path, [row for _, row in kept]),
            conversations=chats if any(chats) else None,
            locations=[where for where, _ in kept],
        )


def _rows_of(
    path: str | Path,
    tokenizer: Tokenizer | None,
    options: ReadOptions,
    invalid: InvalidRows,
    coverage: TemplateCoverage | None,
    learns: Mapping[str, bool],
    check_columns: Callable[[Collection[str]], None] | None,
) -> list[tuple[str, dict[str, Any]]]:
    """(location, row) pairs, each row with a prompt; arguments as in ``from_file``."""
    read = read_sources(path, invalid)
    for old, new in options.columns.items():
        if read and not any(old in row for _, row in read):
            raise DataError(
                f"{path}: config.data.columns takes {new!r} from a column {old!r}, which no "
                f"row has; the first one has {', '.join(map(str, read[0][1]))}"
            )
    found = []
    for where, row in read:
        with invalid.checking(where):
            found.append((where, options.read_columns(row)))
    found = assistant_turns(
        found,
        _PROMPT_COLUMNS,
        learns["demonstrations"],
        options=options,
        coverage=coverage,
        invalid=invalid,
    )
    if learns["pairs"]:
        found = pair_labelled_texts(found, invalid)
    if found and check_columns is not None:
        check_columns(dict.fromkeys(key for _, row in found for key in row))
    rows = []
    for where, row in found:
        with invalid.checking(where, "unusable pair"):
            rows.append((where, split_off_prompt(row, _PROMPT_COLUMNS, tokenizer, options.chat_of)))
    if not rows and not invalid:
        raise DataError(f"{path}: the dataset is empty; it must have at least one prompt")
    return rows


def _columns(path: str | Path, rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Transpose rows to columns; a missing value is None."""
    names = dict.fromkeys(key for row in rows for key in row)
    for name in _RESERVED:
        if name in names:
            raise DataError(
                f"{path}: a column is called {name!r}, which reward functions are given as an "
                "argument; rename the column"
            )
    return {name: [row.get(name) for row in rows] for name in names}


def split_held_out(
    dataset: Dataset, fraction: float, seed: int, sources: Sequence[Any] | None = None
) -> tuple[Dataset, Dataset]:
    """Split off a seeded random held-out set: (train, held out), each at least one prompt.

    Args:
      dataset: its rows keep their order.
      fraction: the held-out share, above 0 and below 1.
      seed: of the choice.
      sources: of the rows; the share is held out of each source.

    Raises:
      DataError: a source of a single row.
    """
    if not 0 < fraction < 1:
        raise ConfigError(f"held-out share {fraction}: it must lie above 0 and below 1")
    if not len(dataset):
        raise DataError("a dataset of 0 prompts cannot be split; give data.eval_path instead")
    names = np.array([""] * len(dataset) if sources is None else list(map(str, sources)))
    random, held_out = np.random.default_rng(seed), np.zeros(len(dataset), bool)
    for name in dict.fromkeys(names.tolist()):
        rows = np.flatnonzero(names == name)
        if len(rows) < 2:
            raise DataError(
                f"a dataset{f' {name}' if name else ''} of {len(rows)} prompt cannot be split; "
                "give data.eval_path instead"
            )
        held = min(max(round(fraction * len(rows)), 1), len(rows) - 1)
        held_out[rows[random.permutation(len(rows))[:held]]] = True
    return dataset.select(np.flatnonzero(~held_out)), dataset.select(np.flatnonzero(held_out))


def interleave(sources: Sequence[Any]) -> list[int]:
    """The rows' numbers, one of each source in turn as long as it has some."""
    taken: dict[Any, int] = {}
    turns = []
    for row, source in enumerate(sources):
        turns.append((taken.get(source, 0), row))
        taken[source] = taken.get(source, 0) + 1
    return [row for _, row in sorted(turns)]


class PromptSampler:
    """Draws each step's prompts: an endless sequence of epochs, each in a new shuffled order.

    The order depends only on (seed, position), so `state` is a few integers and a restored sampler
    continues exactly. A step at the end of an epoch takes the rest from the next one; with
    `per_step` above `size` a step holds some prompts more than once.
    """

    def __init__(self, size: int, per_step: int, seed: int):
        if size < 1 or per_step < 1:
            raise ConfigError(f"{per_step} prompts per step of {size}: both must be at least 1")
        self.size, self.per_step, self.seed = size, per_step, seed
        self.position = 0  # prompts taken since the start
        self._epoch, self._order = -1, np.empty(0, np.int64)

    def next(self, count: int | None = None) -> np.ndarray:
        """Indices of the next step's prompts, int64 [per_step]; or of the next ``count``."""
        taken: list[np.ndarray] = []
        missing = self.per_step if count is None else count
        while missing:
            epoch, offset = divmod(self.position, self.size)
            part = self._epoch_order(epoch)[offset : offset + missing]
            taken.append(part)
            missing -= len(part)
            self.position += len(part)
        return np.concatenate(taken)

    def restart(self) -> None:
        """Begin from the start."""
        self.position = 0

    def state(self) -> dict[str, int]:
        """The sampler's position for a checkpoint: plain ints."""
        return {"position": self.position, "size": self.size, "seed": self.seed}

    def restore(self, state: Mapping[str, int]) -> None:
        """Continue from a `state`; ConfigError if its data size or seed differs."""
        found = check_sampler_state(state, ("size", "seed", "position"))
        for key, mine in (("size", self.size), ("seed", self.seed)):
            if found[key] != mine:
                raise ConfigError(
                    f"the checkpoint's prompt order has {key} {found[key]}, this run's data "
                    f"{key} {mine}; resume with the same data and seed, or use a new workdir"
                )
        self.position = found["position"]

    def _epoch_order(self, epoch: int) -> np.ndarray:
        if epoch != self._epoch:
            self._epoch = epoch
            self._order = np.random.default_rng([self.seed, epoch]).permutation(self.size)
        return self._order


def check_sampler_state(state: Any, keys: Sequence[str]) -> dict[str, int]:
    """Integers of a checkpoint's sampler state; DataError unless each is 0 or more."""
    if not isinstance(state, Mapping):
        raise DataError(f"the checkpoint's prompt order is {state!r}, not an object")
    for key in keys:
        value = state.get(key)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise DataError(
                f"the checkpoint's prompt order has {key} {value!r}; it is a whole number of 0 or "
                "more"
            )
    return {key: state[key] for key in keys}


def pad_left(
    rows: Sequence[Sequence[int]], length: int, pad: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Left-pad rows of token ids: tokens int32 [n, length] and mask bool [n, length]."""
    return _padded(rows, length, pad, left=True)


def pad_right(
    rows: Sequence[Sequence[int]], length: int, pad: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Right-pad rows of token ids: tokens int32 [n, length] and mask bool [n, length]."""
    return _padded(rows, length, pad, left=False)


def _padded(
    rows: Sequence[Sequence[int]], length: int, pad: int, left: bool
) -> tuple[np.ndarray, np.ndarray]:
    tokens = np.full((len(rows), length), pad, np.int32)
    mask = np.zeros((len(rows), length), bool)
    for i, row in enumerate(rows):
        if len(row) > length:
            raise DataError(f"row {i} has {len(row)} tokens and does not fit a length of {length}")
        place = slice(length - len(row), length) if left else slice(0, len(row))
        tokens[i, place] = row
        mask[i, place] = True
    return tokens, mask


def _encode_prompt(
    row: dict[str, Any],
    tokenizer: Tokenizer | None,
    format_prompt: Callable[[str], str | list[dict[str, Any]]] | None,
    options: ReadOptions,
    coverage: TemplateCoverage | None,
) -> tuple[list[int], str | None, Conversation | None]:
    """A row's prompt as token ids, its text (None where the row holds ids), and the chat if it is
    one."""
    prompt = next((row[name] for name in _PROMPT_COLUMNS if row.get(name) is not None), None)
    if prompt is None:
        form = format_of(row)
        how = f"data.format={form} reads it" if form else "data.columns=NAME=prompt takes another"
        raise DataError(
            "there is no prompt; a row needs 'prompt' or 'question' (text, chat messages "
            "or token ids) or 'prompt_tokens', and this one has "
            f"{', '.join(map(str, row)) or 'nothing'}; in a run {how}",
            kind="no prompt",
        )
    if isinstance(prompt, list) and prompt and all(_is_id(item) for item in prompt):
        refuse_chat_columns({}, options, "token ids")
        return prompt, None, None
    if not isinstance(prompt, str) and not is_chat(prompt):
        raise DataError(
            f"the prompt is {short_repr(prompt)}; it must be text, a list of chat messages or a "
            "list of token ids"
        )
    if tokenizer is None:
        raise DataError(
            "the prompt is text, and there is no tokenizer; set tokenizer.path of a run, or give "
            "token ids as prompt_tokens"
        )
    if isinstance(prompt, str):
        prompt = (format_prompt or options.messages)(prompt)
    if isinstance(prompt, str):
        refuse_chat_columns(row, options, "text")
        return tokenizer.encode(prompt), prompt, None
    chat = read_prompt(row, prompt, options, coverage, name="prompt")
    text = chat.render(tokenizer, add_generation_prompt=True)  # has its special tokens
    return tokenizer.encode(text, add_special=False), text, chat


def _check_tokens(tokens: list[int], vocab_size: int | None, max_prompt_length: int) -> None:
    if not tokens:
        raise DataError("the prompt is empty; it needs at least one token", kind="empty prompt")
    bad = next((t for t in tokens if t < 0 or (vocab_size is not None and t >= vocab_size)), None)
    if bad is not None:
        top = "" if vocab_size is None else f" to {vocab_size - 1}"
        raise DataError(f"token id {bad} is outside the vocabulary (ids from 0{top})")
    if 0 < max_prompt_length < len(tokens):
        raise DataError(
            f"the prompt has {len(tokens)} tokens, above rollout.max_prompt_length="
            f"{max_prompt_length}; raise that key (0: the longest prompt) or shorten the prompt",
            kind=LONG_PROMPT,
        )


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
