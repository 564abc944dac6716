"""Prompt encoding: texts, chats and ids from users as rows of token ids; stop conditions."""

import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hjax.data.response_text import ResponseText
from hjax.data.tokenizer import Tokenizer
from hjax.errors import ConfigError, DataError
from hjax.rollout.stop_strings import StopStrings


def encode_prompt(
    prompt: Any, label: str, tokenizer: Tokenizer | None, vocab_size: int
) -> list[int]:
    """The token ids of one text, chat or list of ids.

    Args:
      prompt: a string; chat messages (dicts with `role` and `content`), rendered by the tokenizer's
        template, with the header of the assistant's turn unless the last message is the
        assistant's; or token ids.
      label: its name in error messages: `prompt 3`.
      tokenizer: or None.
      vocab_size: ids are below it.

    Raises:
      ConfigError: none of these, no tokenizer for a text, nothing in it, or an id out of range.
    """
    chat = isinstance(prompt, list | tuple) and bool(prompt) and isinstance(prompt[0], dict)
    if isinstance(prompt, dict):
        raise ConfigError(f"{label} is one chat message; give a list of chats, each a list of them")
    if isinstance(prompt, str) or chat:
        if tokenizer is None:
            raise ConfigError(f"{label} is text, but this model has no tokenizer; give token ids")
        try:
            if chat:
                asks = prompt[-1].get("role") != "assistant"
                text = tokenizer.chat(list(prompt), add_generation_prompt=asks)
                tokens = tokenizer.encode(text, add_special=False)
            else:
                tokens = tokenizer.encode(prompt)
        except DataError as error:
            raise ConfigError(f"{label}: {error}") from None
    else:
        try:
            tokens = [operator.index(t) for t in prompt]
        except TypeError as error:
            raise ConfigError(
                f"{label} is {prompt!r}; give a string, a list of token ids, or a list of chat "
                "messages"
            ) from error
    if not tokens:
        raise ConfigError(f"{label} is empty; give at least one token")
    low, high = min(tokens), max(tokens)
    if low < 0 or high >= vocab_size:
        raise ConfigError(
            f"{label}: token id {low if low < 0 else high} is outside the vocabulary, "
            f"0 to {vocab_size - 1}"
        )
    return tokens


def encode_rows(
    values: Any, tokenizer: Tokenizer | None, vocab_size: int
) -> tuple[np.ndarray, np.ndarray]:
    """Texts, chats or rows of ids, of any lengths, as one padded array.

    Args:
      values: a list of what ``encode_prompt`` takes, or an integer array [batch, length].

    Returns:
      (token ids int32 [batch, length], 0 behind a row's end; lengths int [batch]).

    Raises:
      ConfigError: as ``encode_prompt``, or no list of rows.
    """
    if isinstance(values, str):
        raise ConfigError("tokens is one string; give a list of texts")
    array = None
    if hasattr(values, "__array__"):
        array = np.asarray(values)
        if array.ndim != 2 or not np.issubdtype(array.dtype, np.integer):
            raise ConfigError(
                f"tokens must be integers [batch, length], not {array.dtype} {list(array.shape)}"
            )
        values = array.tolist()
    rows = [encode_prompt(row, f"row {i}", tokenizer, vocab_size) for i, row in enumerate(values)]
    lengths = np.array([len(row) for row in rows], int)
    width = array.shape[1] if array is not None else max(map(len, rows), default=0)
    tokens = np.zeros((len(rows), width), np.int32)
    for i, row in enumerate(rows):
        tokens[i, : len(row)] = row
    return tokens, lengths


class StopConditions:
    """Stop strings and stop token ids of a response.

    Args:
      values: of either, or one string.
      tokenizer: for strings.
      min_tokens: tokens of a response before which no string ends it.

    Attributes:
      ids: the stop tokens, those of one-token strings included.
      strings: any of them ends a response, wherever it stands in the tokens.

    Raises:
      ConfigError: an empty string, or one without a tokenizer.
    """

    def __init__(
        self, values: Sequence[int | str] | str, tokenizer: Tokenizer | None, min_tokens: int = 0
    ):
        self.min_tokens = min_tokens
        values = [values] if isinstance(values, str) else list(values)
        self.strings = tuple(stop for stop in values if isinstance(stop, str))
        self.ids = tuple(stop for stop in values if not isinstance(stop, str))
        for text in self.strings:
            if not text:
                raise ConfigError("stop='': a string that ends a response must not be empty")
            if tokenizer is None:
                raise ConfigError(
                    f"stop={text!r} is text, but this model has no tokenizer; give token ids"
                )
            try:
                ids = tokenizer.encode(text, add_special=False)
            except DataError:
                continue  # the vocabulary cannot spell it
            if len(ids) == 1:
                self.ids += tuple(ids)

    def cut(self, tokenizer: Tokenizer | None, prompt: Sequence[int], tokens: list[int]) -> Any:
        """Cut a response at the first stop string.

        Returns:
          (tokens up to the one that completes it, text up to its end), or None: there is none.
        """
        if not self.strings or tokenizer is None:
            return None
        watch = StopWatcher(self, ResponseText(tokenizer, prompt))
        count = watch.take(tokens)
        return None if count is None else (tokens[:count], watch.text)


def stop_string_check(
    stops: StopConditions, tokenizer: Tokenizer, prompts: Sequence[list[int]], samples: int
) -> Callable[[int, list[int]], int | None]:
    """A stop check: finds stop strings in several responses as their tokens arrive.

    Args:
      stops: the strings.
      tokenizer: of the model.
      prompts: token ids.
      samples: responses to each prompt; number ``p * samples + s`` is sample s of prompt p.

    Returns:
      a function that takes a number and its next tokens, and returns how many of these belong to
      the response if it ends, else None.
    """
    watches: dict[int, StopWatcher] = {}

    def ends(number: int, tokens: list[int]) -> int | None:
        if number not in watches:
            text = ResponseText(tokenizer, prompts[number // samples])
            watches[number] = StopWatcher(stops, text)
        return watches[number].take(tokens)

    return ends


class StopWatcher:
    """The text of one response as it arrives, until a stop string ends it.

    Attributes:
      text: so far; once it has ended it ends with the stop string.
      ended: whether it has.
    """

    def __init__(self, stops: StopConditions, source: ResponseText):
        self._source, self._min_tokens = source, stops.min_tokens
        self._stop = StopStrings(stops.strings)
        self.text, self._count = "", 0

    @property
    def ended(self) -> bool:
        return self._stop.found is not None

    def take(self, tokens: Sequence[int]) -> int | None:
        """Add tokens; returns how many of them belong to the response if it ends, else None.
        ``text`` leaves out what may be the beginning of a stop string."""
        for count, token in enumerate(tokens, start=1):
            self._count += 1
            self._add(self._source.feed(token))
            if self.ended:
                return count
        return None

    def close(self) -> None:
        """No more tokens come."""
        if not self.ended:
            self._add(self._source.close())
            self.text += self._stop.close()

    def _add(self, more: str) -> None:
        if self._count > self._min_tokens:
            more = self._stop.feed(more) + (self._stop.found or "")
        self.text += more
