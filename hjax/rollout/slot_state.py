"""What the engine's slots hold, and what goes in and out of them: see ``hjax.rollout.engine``."""

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
      length: columns, in which the tokens of all rows lie, or of each row its own.
      text: tokens of a row, prompt and response, where guesses are looked up in them.
      sampling_sizes: room for options of each sequence's own; None: all are drawn as a program
        says.
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
    """Sequences, a row of each array for a slot.

    Attributes:
      prompt_lengths: int32 [rows], of the prompt.
      drawn: int32 [rows], tokens drawn so far, of which the last is not in the cache.
      limit: int32 [rows], tokens that may be drawn; a row that has so many is done.
      most: int32 [rows], tokens that may be drawn in the end: more, where a response is left off
        at its limit. Some rotary positions depend on it.
      last: int32 [rows].
      done: bool [rows]; also of a slot without a sequence.
      keys: uint32 [rows, n], data of the PRNG keys.
      options: of each sequence's own, with the tokens it has so far; None: it has none.
      text: int32 [rows, room], prompt and response from column 0 on; None: nobody asks for it.
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
      cache: keys and values; the prompts' by group, each row's own.
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

    Numbers of groups and rows count within a data-parallel part, and arrays are in order of the
    parts, as many for each; a number beyond the state's is an entry that fills up and is dropped.

    Attributes:
      prompts: int32 [groups, prompt], padded on the left; ``mask``: bool like it. Without what is
        cached of them.
      groups: int32 [groups], where each goes.
      rows: int32 [groups * samples], where its samples go.
      keys: uint32 [groups * samples, 2], see ``SlotState``.
      limit: int32 [groups * samples], tokens that may be drawn, those that are there included.
      options: of each of these, where sequences have their own.
      cached: what is known of the prompts; None: nothing.
      text: int32 [groups * samples, room], the prompts as ``RunningSequences`` has them, where it
        has.
      token_bitmask: uint32 [groups * samples, words], which tokens may be drawn, as of
        ``vocab_parallel.only``, where sequences have options of their own; None: all.
      final_limit: int32 [groups * samples], as of ``RunningSequences``; None: the limits.
      resumed: what there is of the responses, of sequences without options of their own; None:
        nothing.
      packed_size: tokens of the prompts of a data-parallel part for which there is room, which are
        read one after another without their padding, see ``hjax.models.packed_prefill``; 0: padded.
        None of what had begun.
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
    token_bitmask: Any = None
    final_limit: Any = None
    resumed: ResumedRows | None = None
    packed_size: int = dataclasses.field(default=0, metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ResumedRows:
    """Responses that were left off.

    Attributes:
      tokens: int32 [groups * samples, width], padded on the right.
      count: int32 [groups * samples], tokens of each, 1 to width.
    """

    tokens: Any
    count: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CachedPrompts:
    """Beginnings of prompts whose keys and values are in blocks.

    Attributes:
      tokens: int32 [groups, n * BLOCK], of the whole prompts, padded on the left; ``mask``: bool
        like it.
      blocks: int32 [groups, n], numbers of each one's blocks, first ones first.
      count: int32 [groups], tokens that are in blocks.
    """

    tokens: Any
    mask: Any
    blocks: Any
    count: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PrefilledPrompts:
    """Prompts that were read.

    Attributes:
      k, v: of their tokens, which end in the last column: [groups, heads, prompt, head_dim], with a
        leading layer dimension or a tuple of one for each layer.
      tokens: int32 [groups], of each.
      logits: float32 [groups, vocab], of the token that follows; [groups * samples, vocab] of
        responses that had begun.
      counts: of the sequences' tokens so far, where they need them.
      response_kv: keys and values of what there is of the responses, from the first column on:
        [groups * samples, heads, width, head_dim], as ``k`` and ``v``; None: nothing is there.
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
      steps: that were taken.
      guessed, right: int [rows], tokens that were guessed, and how many of these were drawn; None:
        none are.
      top: the final_limit probable tokens of each place and their log-probs, int32 and float32
        [rows, steps, n], as ``sampling.Draw`` has them; on the devices until somebody asks. None
        where sequences have no options of their own.
    """

    tokens: np.ndarray
    mask: np.ndarray
    logprobs: dict[str, np.ndarray]
    done: np.ndarray
    steps: int
    guessed: np.ndarray | None = None
    right: np.ndarray | None = None
    top: tuple[jax.Array, jax.Array] | None = None

    @classmethod
    def of(cls, drawn: dict[str, Any]) -> DecodedTokens:
        """What a program gave, read from the devices."""
        top = drawn.get("top")
        host = jax.tree.map(to_numpy, {k: x for k, x in drawn.items() if k != "top"})
        same = {name: host[name] for name in ("tokens", "mask", "logprobs", "done")}
        more = {name: host.get(name) for name in ("guessed", "right")}
        return cls(**same, **more, steps=int(host.get("steps", 1)), top=top)
