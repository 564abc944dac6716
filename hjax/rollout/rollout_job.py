"""A rollout job: the sequences to generate, and the responses by sequence."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import numpy as np

from hjax.rollout.sampling_params import SamplingParams
from hjax.rollout.slot_state import DecodedTokens

EMPTY = -1  # no sequence or prompt: a free slot, a padding entry
# Called with a prompt's number and its responses, token ids.
OnPromptDone = Callable[[int, list[list[int]]], None]
# Given a sequence and its new tokens: how many belong to it if its text ends, else None.
StopCheck = Callable[[int, list[int]], int | None]


@dataclasses.dataclass(frozen=True)
class GenerationConfig:
    """How many responses are drawn to each prompt, how long they may be, and how.

    Attributes:
      max_new_tokens: length limit of a response, in tokens.
      samples: responses per prompt.
      sampling: how tokens are drawn, and which of them end a response.
      slots: rows that decode at a time; as they finish others follow; 0: all.
      lookup: draft tokens per pass (speculative decoding), see ``hjax.rollout.prompt_lookup``; the
        responses are the same.
      extra_samples: extra responses to each prompt (oversampling). Once ``samples`` have ended the
        others are dropped; the shortest are kept, in their order.
      pause_after: tokens after which responses pause, for ``Generator.resume``; None: they do not.
    """

    max_new_tokens: int
    samples: int = 1
    sampling: SamplingParams = SamplingParams()
    slots: int = 0
    lookup: int = 0
    extra_samples: int = 0
    pause_after: int | None = None


@dataclasses.dataclass(frozen=True)
class RolloutJob:
    """Sequences to generate: prompts, and samples of each.

    Attributes:
      prompts: int32 [prompts, length], padded on the left; ``mask``: bool like it.
      keys: uint32 [prompts * samples, n], PRNG key data of each sequence, prompt by prompt.
      config: how they are generated.
      resumed: responses that were paused; None: none.
    """

    prompts: np.ndarray
    mask: np.ndarray
    keys: np.ndarray
    config: GenerationConfig
    resumed: ResumedResponses | None = None

    @property
    def kept_samples(self) -> int:
        """Samples of a prompt that are kept."""
        return self.config.samples

    @property
    def samples(self) -> int:
        """Samples of a prompt that are begun, those that are dropped included."""
        return self.config.samples + self.config.extra_samples

    @property
    def limit(self) -> int:
        """Most tokens of a response."""
        return self.config.max_new_tokens

    @property
    def end(self) -> int:
        """Tokens of a response after which it ends or pauses."""
        pause = self.config.pause_after
        return self.limit if pause is None else min(pause, self.limit)

    @property
    def is_partial(self) -> bool:
        """Whether responses pause, or were paused."""
        return self.config.pause_after is not None or self.resumed is not None

    @property
    def rows(self) -> int:
        """Number of sequences."""
        return self.prompts.shape[0] * self.samples


@dataclasses.dataclass(frozen=True)
class ResumedResponses:
    """Responses that were paused.

    Attributes:
      start: tokens of those that have not ended, at least 1.
      ended: bool [sequences].
      tables: as in ``RolloutResponses``, of all sequences.
    """

    start: int
    ended: np.ndarray
    tables: Mapping[str, np.ndarray]


class RolloutResponses:
    """The responses of a rollout, by sequence.

    Args:
      job: what is generated.
      on_prompt_done: called with each prompt once enough of its responses have ended, and those
        that are kept; not with prompts that were complete before. None: no call.

    Attributes:
      drawn: int [sequences], tokens of each.
      ended: bool [sequences], which are whole; a paused response has not ended.
    """

    def __init__(self, job: RolloutJob, on_prompt_done: OnPromptDone | None = None):
        self._job, self._on_prompt_done = job, on_prompt_done
        shape = job.rows, job.limit
        self._tables: dict[str, np.ndarray] = {
            "responses": np.zeros(shape, np.int32), "response_mask": np.zeros(shape, bool)
        }  # fmt: skip
        self.ended = np.zeros(job.rows, bool)
        if job.resumed is not None:
            self._tables = {name: np.array(table) for name, table in job.resumed.tables.items()}
            self.ended = job.resumed.ended.copy()
        self.drawn = self._tables["response_mask"].sum(axis=1)
        self._awaited = ~self.complete

    @property
    def complete(self) -> np.ndarray:
        """bool [prompts]: as many responses have ended as are kept."""
        return self.ended.reshape(-1, self._job.samples).sum(axis=1) >= self._job.kept_samples

    def record(self, sequences: np.ndarray, drawn: DecodedTokens, ended: np.ndarray) -> None:
        """Record what a dispatch drew.

        Args:
          sequences: int [rows], each row's sequence; EMPTY: a slot without.
          drawn: its tables.
          ended: bool [rows], whether its last token was drawn.
        """
        made, there = self._tables, sequences != EMPTY
        row, at = np.nonzero(drawn.mask & there[:, None])
        where = sequences[row], self.drawn[sequences[row]] + at
        made["responses"][where] = drawn.tokens[row, at]
        made["response_mask"][where] = True
        for name, table in drawn.logprobs.items():
            whole = made["responses"].shape
            made.setdefault(name, np.zeros(whole, np.float32))[where] = table[row, at]
        for name, counted in (("guessed", drawn.guessed), ("guessed_right", drawn.right)):
            if counted is not None:
                total = made.setdefault(name, np.zeros(self.ended.shape, np.int32))
                np.add.at(total, sequences[there], counted[there])
        np.add.at(self.drawn, sequences[row], 1)
        self.ended[sequences[ended]] = True
        for prompt in np.flatnonzero(self._awaited & self.complete):
            self._awaited[prompt] = False
            if self._on_prompt_done is not None:
                rows = self._kept_sequences()[prompt]
                pairs = zip(made["responses"][rows], made["response_mask"][rows], strict=True)
                self._on_prompt_done(int(prompt), [row[mask].tolist() for row, mask in pairs])

    def _kept_sequences(self) -> np.ndarray:
        """int [prompts, kept]: the sequences that are kept, ascending.

        These are the shortest that have ended, and among equally long ones the first. So the choice
        depends neither on the tokens of a dispatch nor on the other sequences.
        """
        shape = self._job.prompts.shape[0], self._job.samples
        lengths = np.where(self.ended, self.drawn, np.iinfo(np.int64).max).reshape(shape)
        # Stable, so that of equals the first comes first.
        order = np.argsort(lengths, axis=1, kind="stable")
        numbers = np.sort(order[:, : self._job.kept_samples], axis=1)
        return numbers + shape[1] * np.arange(shape[0])[:, None]

    def tables(self) -> dict[str, np.ndarray]:
        """Of the kept sequences: ``responses`` int32 [sequences, limit] (0 after the end),
        ``response_mask`` bool, the log-probs by their names; with draft tokens ``guessed`` and
        ``guessed_right``, int32 [sequences], drafts and accepted ones."""
        rows = self._kept_sequences().ravel()
        return {name: table[rows] for name, table in self._tables.items()}
