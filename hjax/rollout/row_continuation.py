"""Continuing rows in their slots: tokens are appended to what a row has in the cache.

Between two turns of an episode its keys and values stay where they are, and the next turn begins
with one pass over what is new: the last token drawn and the observation. The layers compute packed
tokens, so rows of very different lengths waste nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from hjax.kernels import decode
from hjax.models.attention_strategies import Attention
from hjax.models.decoding import DecodeSlots, KVCache
from hjax.models.packed_prefill import PackedPrefill
from hjax.rollout.decode_step import DecodeStep
from hjax.rollout.slot_state import ContinuedRows, RunningSequences, SlotState


def continue_rows(engine: Any, running: RunningSequences, new: ContinuedRows) -> RunningSequences:
    """Sequences as they are before ``append_tokens``: those that are continued run again, with all
    of their tokens as the prompt.

    Args:
      engine: an ``Engine``.
    """
    there = new.count > 0
    mask = _mask(new)

    def chosen(new: jax.Array, old: jax.Array) -> jax.Array:
        return jnp.where(there.reshape(-1, *(1,) * (old.ndim - 1)), new, old)

    counts, text = running.counts, running.text
    if counts is not None:
        counts = counts.continued(new.tokens, mask, engine.layout)
    if text is not None:
        column = new.cached[:, None] + jnp.arange(new.tokens.shape[1])
        column = jnp.where(mask, column, text.shape[1])
        text = text.at[jnp.arange(text.shape[0])[:, None], column].set(new.tokens, mode="drop")
    return RunningSequences(
        prompt_lengths=chosen(new.cached + new.count, running.prompt_lengths),
        drawn=chosen(jnp.zeros_like(running.drawn), running.drawn),
        limit=chosen(new.limit, running.limit),
        final_limit=chosen(new.limit, running.final_limit),
        last_token=running.last_token,
        done=running.done & ~there,
        keys=chosen(new.keys, running.keys),
        options=jax.tree.map(chosen, new.options, running.options),
        counts=counts,
        text=text,
    )


def append_tokens(
    forward: DecodeStep,
    model: Callable[..., tuple[jax.Array, KVCache, Any]],
    logits: Callable[[jax.Array], jax.Array],
    state: SlotState,
    new: ContinuedRows,
) -> tuple[jax.Array, KVCache]:
    """One pass over the new tokens of the rows that are continued.

    What it writes beyond a row's tokens is overwritten before anything attends to it.

    Args:
      forward: of the state.
      model: tokens, positions, attention and cache to hidden states and the cache.
      logits: of hidden states.
      state: of ``continue_rows``.
      new: the tokens.

    Returns:
      float32 [rows, vocab], the logits of each row's next token, arbitrary where it is not
      continued; and the cache.
    """
    engine, running, mask = forward.engine, state.rows, _mask(new)
    first = jnp.where(new.count > 0, new.cached, forward.own_tokens(running))
    slots = dataclasses.replace(state.slots, start=jnp.zeros_like(first), column=first)
    attention: Attention = DecodeSlots(slots, engine.layout)
    tokens, positions = new.tokens, first[:, None] + jnp.arange(new.tokens.shape[1])
    packed = None
    if new.packed_size:
        attention = packed = PackedPrefill(attention, mask, new.packed_size, engine.parts)
        tokens, positions = packed.pack(tokens), packed.pack(positions)
    # A GPU's kernel is made for few new tokens of a row.
    form = state.cache.form
    plain = decode.ROWS if form in decode.GPU_KERNELS else form
    cache = dataclasses.replace(state.cache, form=plain)
    hidden, cache, _ = model(tokens, positions, attention, cache)
    if packed is not None:
        hidden = packed.last_tokens(hidden)[:, 0]
    else:
        last = jnp.maximum(new.count - 1, 0)[:, None, None]
        hidden = jnp.take_along_axis(hidden, last, axis=1)[:, 0]
    made = engine.layout.constrain(logits(hidden), "batch", "vocab")
    return made, dataclasses.replace(cache, form=form)


def _mask(new: ContinuedRows) -> jax.Array:
    """bool [rows, new]: which of ``new.tokens`` are there."""
    return jnp.arange(new.tokens.shape[1]) < new.count[:, None]
