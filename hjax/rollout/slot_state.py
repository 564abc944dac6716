"""Slot state: what the engine's slots hold, what enters and what is drawn; see
``hjax.rollout.engine``."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np

from hjax.kernels.decode import SlotMask
from hjax.models.decoding import KVCache
from hjax.rollout.row_sampling import RowSampling, SamplingSizes
from hjax.rollout.token_counts import TokenCounts
from hjax.sharding.global_arrays import to_numpy


@dataclasses.dataclass(frozen=True)
class SlotSizes:
    """What a state has room for.

    Attributes:
      rows: sequences at a time.
      groups: prompts at a time.
      samples: sequences that may share a prompt; 1: row i has prompt i.
      prompt: tokens of a padded prompt; 0: rows have their prompts among their own tokens.
      length: columns, for the tokens of all rows, or of each row its own.
      text: tokens of a row, prompt and response, in which prompt lookup searches.
      sampling_sizes: room for each sequence's own options; None: all have the program's.
      counted: whether the tokens of each are counted, for penalties.
    """

    rows: int
    groups: int
    samples: int
    prompt: int
    length: int
    text: int = 0
    sampling_sizes: SamplingSizes | None = None
    counted: bool = False


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RunningSequences:
    """Sequences in slots, a row of each array for a slot.

    Attributes:
      prompt_lengths: int32 [rows], tokens of the prompt.
      drawn: int32 [rows], tokens drawn so far; the last of them is not in the cache.
      limit: int32 [rows], tokens that may be drawn; a row that has so many is done.
      final_limit: int32 [rows], tokens that may be drawn over all parts of a partial rollout. Some
        rotary positions depend on it.
      last_token: int32 [rows].
      done: bool [rows]; also of a slot without a sequence.
      keys: uint32 [rows, n], data of the PRNG keys.
      options: each sequence's own, with ``counts`` of its tokens so far; None: it has none.
      text: int32 [rows, room], prompt and response from column 0 on; None: without prompt lookup.
    """

    prompt_lengths: jax.Array
    drawn: jax.Array
    limit: jax.Array
    final_limit: jax.Array
    last_token: jax.Array
    done: jax.Array
    keys: jax.Array
    options: RowSampling | None = None
    counts: TokenCounts | None = None
    text: jax.Array | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SlotState:
    """Slots and what they hold.

    Attributes:
      cache: the KV cache: prompts by group, and each row's own tokens.
      slots: where each row stands. Columns count from 0 at the beginning of the cache.
      rows: the sequences.
    """

    cache: KVCache
    slots: SlotMask
    rows: RunningSequences


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Admission:
    """Sequences that enter.

    Groups and rows are numbered within a data-parallel part. Arrays are ordered by part, equally
    many entries for each; an entry with a number beyond the state's is padding and is dropped.

    Attributes:
      prompts: int32 [groups, prompt], uncached, padded on the left; ``mask``: bool like it.
      groups: int32 [groups], where each goes.
      rows: int32 [groups * samples], where its samples go.
      keys: uint32 [groups * samples, 2], see ``RunningSequences``.
      limit: int32 [groups * samples], tokens that may be drawn, resumed ones included.
      options: of each of these, if sequences have their own.
      cached: the cached part of the prompts; None: nothing.
      text: int32 [groups * samples, room], the prompts as in ``RunningSequences``, if it has them.
      bitmask: uint32 [groups * samples, words], the tokens that may be drawn, as in
        ``vocab_parallel.apply_bitmask``, if sequences have options of their own; None: all.
      final_limit: int32 [groups * samples], as in ``RunningSequences``; None: the limits.
      resumed: resumed responses, of sequences without options of their own; None: nothing.
      packed_size: size of a packed prefill: tokens of a data-parallel part's prompts, read one
        after another without padding, see ``hjax.models.packed_prefill``; 0: padded.
    """

    prompts: Any
    mask: Any
    groups: Any
    rows: Any
    keys: Any
    limit: Any
    options: RowSampling | None = None
    cached: CachedPrompts | None = None
    text: Any = None
    bitmask: Any = None
    final_limit: Any = None
    resumed: ResumedRows | None = None
    packed_size: int = dataclasses.field(default=0, metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ContinuedRows:
    """Tokens that follow those that rows have in the cache: an entry for each row of the state.

    Attributes:
      tokens: int32 [rows, new], padded on the right.
      count: int32 [rows], tokens of each; 0: the row is not continued.
      cached: int32 [rows], tokens of each that are in the cache, from column 0 on, and stay.
      keys, limit, options: as in ``Admission``, of what is drawn next.
      packed_size: as in ``Admission``.
    """

    tokens: Any
    count: Any
    cached: Any
    keys: Any
    limit: Any
    options: RowSampling
    packed_size: int = dataclasses.field(default=0, metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ResumedRows:
    """Responses that were paused.

    Attributes:
      tokens: int32 [groups * samples, width], padded on the right.
      count: int32 [groups * samples], tokens of each, 1 to width.
    """

    tokens: Any
    count: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CachedPrompts:
    """Prompts whose first tokens have keys and values in blocks.

    Attributes:
      tokens: int32 [groups, n * BLOCK], whole prompts, padded on the left; ``mask``: bool like it.
      blocks: int32 [groups, n], numbers of each one's blocks, in order.
      count: int32 [groups], tokens that are in blocks.
    """

    tokens: Any
    mask: Any
    blocks: Any
    count: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PrefilledPrompts:
    """Prompts after prefill.

    Attributes:
      k, v: of their tokens, which end in the last column: [groups, heads, prompt, head_dim], with a
        leading layer dimension or a tuple of one for each layer.
      tokens: int32 [groups], of each.
      logits: float32 [groups, vocab], of the next token; [groups * samples, vocab] if resumed.
      counts: of the sequences' tokens so far, if they need them.
      response_kv: keys and values of resumed responses, from the first column on: [groups *
        samples, heads, width, head_dim], as ``k`` and ``v``; None: there are none.
    """

    k: Any
    v: Any
    tokens: jax.Array
    logits: jax.Array
    counts: TokenCounts | None = None
    response_kv: tuple[Any, Any] | None = None


@dataclasses.dataclass(frozen=True)
class DecodedTokens:
    """What a program drew, on the host.

    Attributes:
      tokens: int32 [rows, steps], 0 where nothing was drawn; ``mask``: bool like it.
      logprobs: by name, float32 like it, see ``hjax.rollout.decode_step``.
      done: bool [rows].
      steps: number of steps taken.
      guessed, right: int [rows], draft tokens, and accepted ones; None: no drafts.
      top: the most probable tokens of each position and their log-probs, int32 and float32 [rows,
        steps, n], as in ``sampling.SampledTokens``; on the devices until they are read. None if
        sequences have no options of their own.
    """

    tokens: np.ndarray
    mask: np.ndarray
    logprobs: dict[str, np.ndarray]
    done: np.ndarray
    steps: int
    guessed: np.ndarray | None = None
    right: np.ndarray | None = None
    top: tuple[jax.Array, jax.Array] | None = None

    def followed_by(self, rest: DecodedTokens) -> DecodedTokens:
        """These tokens and then ``rest``; without ``top``."""

        def joined(one: np.ndarray, other: np.ndarray) -> np.ndarray:
            return np.concatenate([one, other], axis=1)

        return dataclasses.replace(
            rest,
            tokens=joined(self.tokens, rest.tokens),
            mask=joined(self.mask, rest.mask),
            logprobs={name: joined(x, rest.logprobs[name]) for name, x in self.logprobs.items()},
            steps=self.steps + rest.steps,
            top=None,
        )

    @classmethod
    def of(cls, drawn: dict[str, Any]) -> DecodedTokens:
        """A program's result, read from the devices."""
        top = drawn.get("top")
        host = jax.tree.map(to_numpy, {k: x for k, x in drawn.items() if k != "top"})
        same = {name: host[name] for name in ("tokens", "mask", "logprobs", "done")}
        more = {name: host.get(name) for name in ("guessed", "right")}
        return cls(**same, **more, steps=int(host.get("steps", 1)), top=top)
