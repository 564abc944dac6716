"""What is to be drawn, and what was, by sequence: what goes in and out of a schedule."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping

import numpy as np

from hjax.rollout.slots import Drawn

NOBODY = -1  # in tables of who has which slot
# Given a sequence and its new tokens: how many of these belong to it where its text ends, or None.
Ends = Callable[[int, list[int]], int | None]


@dataclasses.dataclass(frozen=True)
class Work:
    """Sequences to be drawn: prompts and so many samples of each.

    Attributes:
      prompts: int32 [prompts, length], padded on the left; ``mask``: bool like it.
      keys: uint32 [prompts * samples, n], data of each sequence's PRNG key; those of a prompt are
        consecutive.
      samples: of a prompt.
      limit: tokens of a response at most.
      surplus: how many of a prompt's samples are given up when the others have ended.
      until: tokens of a response after which it is left off; None: none is before its limit.
      begun: what there is of the responses; None: nothing.
    """

    prompts: np.ndarray
    mask: np.ndarray
    keys: np.ndarray
    samples: int
    limit: int
    surplus: int = 0
    until: int | None = None
    begun: Begun | None = None

    @property
    def end(self) -> int:
        """Tokens of a response after which it ends or is left off."""
        return self.limit if self.until is None else min(self.until, self.limit)

    @property
    def in_parts(self) -> bool:
        """Whether responses are left off, or were."""
        return self.until is not None or self.begun is not None

    @property
    def kept(self) -> int:
        """Samples of a prompt that are drawn to their end."""
        return self.samples - self.surplus

    @property
    def rows(self) -> int:
        """Sequences."""
        return self.prompts.shape[0] * self.samples


@dataclasses.dataclass(frozen=True)
class Begun:
    """Responses that were left off.

    Attributes:
      start: tokens of those that have not ended, at least 1.
      ended: bool [sequences].
      tables: as ``tables`` gives them, of all sequences.
    """

    start: int
    ended: np.ndarray
    tables: Mapping[str, np.ndarray]

    @property
    def responses(self) -> np.ndarray:
        """int32 [sequences, limit]."""
        return self.tables["responses"]

    @property
    def lengths(self) -> np.ndarray:
        """int [sequences], tokens of each."""
        return np.sum(self.tables["response_mask"], axis=1)


@dataclasses.dataclass(frozen=True)
class Told:
    """What a dispatch drew.

    Attributes:
      sequences: int [rows], which row is whose; NOBODY: a slot without.
      before: int [rows], tokens that each had.
      ended: bool [rows], whose last token it drew; what is left off has not ended.
      drawn: the tables.
    """

    sequences: np.ndarray
    before: np.ndarray
    ended: np.ndarray
    drawn: Drawn


def announced(
    work: Work, told: Iterable[Told], on_ended: Callable[[int, list[list[int]]], None]
) -> Iterator[Told]:
    """The same; ``on_ended`` is called with each prompt of whose responses enough have ended, and
    those that are kept; not with those of which enough had ended before."""
    tokens: list[list[int]] = [[] for _ in range(work.rows)]
    ended = np.zeros(work.rows, bool)
    if (begun := work.begun) is not None:
        lengths = begun.lengths
        tokens = [row[:length].tolist() for row, length in zip(begun.responses, lengths)]
        ended = begun.ended.copy()
    waited = ended.reshape(-1, work.samples).sum(axis=1) < work.kept
    for each in told:
        for row in np.flatnonzero((each.sequences != NOBODY) & each.drawn.mask.any(axis=1)):
            sequence = int(each.sequences[row])
            tokens[sequence] += each.drawn.tokens[row][each.drawn.mask[row]].tolist()
            ended[sequence] = each.ended[row]
        whole = waited & (ended.reshape(-1, work.samples).sum(axis=1) >= work.kept)
        for prompt in np.flatnonzero(whole):
            first = int(prompt) * work.samples
            own = slice(first, first + work.samples)
            lengths = np.array([len(response) for response in tokens[own]])
            numbers = kept(lengths[None], ended[None, own], work.kept)[0]
            on_ended(int(prompt), [tokens[first + i] for i in numbers])
        waited &= ~whole
        yield each


def kept(lengths: np.ndarray, ended: np.ndarray, count: int) -> np.ndarray:
    """int [prompts, count]: numbers of each prompt's samples that are kept, rising.

    The shortest of those that have ended, of equally long ones the first: so they do not depend on
    how many tokens a dispatch draws, nor on who else is there.

    Args:
      lengths: int [prompts, samples], tokens of each response.
      ended: bool like it.
      count: how many are kept.
    """
    # Stable, so that of equals the first comes first.
    order = np.argsort(np.where(ended, lengths, np.iinfo(np.int64).max), axis=1, kind="stable")
    return np.sort(order[:, :count], axis=1)


def tables(work: Work, told: Iterable[Told]) -> dict[str, np.ndarray]:
    """What a schedule drew, by sequence.

    Returns:
      of those that are kept ``responses`` int32 [sequences, limit] (0 after the end),
      ``response_mask`` bool, the log-probs by their names, and where tokens were guessed
      ``guessed`` and ``guessed_right``, int32 [sequences], how many and how many of them were
      drawn.
    """
    shape = work.rows, work.limit
    made: dict[str, np.ndarray] = {
        "responses": np.zeros(shape, np.int32), "response_mask": np.zeros(shape, bool)
    }  # fmt: skip
    ended = np.zeros(work.rows, bool)
    if work.begun is not None:
        made = {name: np.array(table) for name, table in work.begun.tables.items()}
        ended = work.begun.ended.copy()
    for each in told:
        drawn = each.drawn
        ended[each.sequences[each.ended]] = True
        row, at = np.nonzero(drawn.mask & (each.sequences != NOBODY)[:, None])
        where = each.sequences[row], each.before[row] + at
        made["responses"][where] = drawn.tokens[row, at]
        made["response_mask"][where] = True
        for name, table in drawn.logprobs.items():
            made.setdefault(name, np.zeros(shape, np.float32))[where] = table[row, at]
        there = each.sequences != NOBODY
        for name, counted in (("guessed", drawn.guessed), ("guessed_right", drawn.right)):
            if counted is not None:
                total = made.setdefault(name, np.zeros(shape[0], np.int32))
                np.add.at(total, each.sequences[there], counted[there])
    if work.surplus:
        shape = work.prompts.shape[0], work.samples
        lengths = made["response_mask"].sum(axis=1).reshape(shape)
        numbers = kept(lengths, ended.reshape(shape), work.kept)
        rows = (numbers + work.samples * np.arange(shape[0])[:, None]).ravel()
        made = {name: table[rows] for name, table in made.items()}
    return made
