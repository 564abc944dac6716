"""Continuing rows in their slots: tokens are appended to what a row has in the cache.

Between two turns of an episode its keys and values stay where they are, and the next turn begins
with one pass over what is new: the last token drawn and the observation. The layers compute packed
tokens, so rows of very different lengths waste nothing.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from hjax.kernels import decode
from hjax.models.attention_strategies import Attention
from hjax.models.decoding import DecodeSlots
from hjax.models.packed_prefill import PackedPrefill
from hjax.models.parameters import Weights
from hjax.rollout.decode_step import DecodeState, DecodeStep
from hjax.rollout.sampling_params import SamplingParams
from hjax.rollout.slot_state import ContinuedRows, RunningSequences, SlotState
from hjax.sharding.global_arrays import place_all


class RowContinuation:
    """The programs of one engine that continue rows.

    Sampling is a program of its own, as it does not depend on how many tokens are appended.

    Args:
      engine: an ``Engine``; to call them, with ``row_columns`` and without kernel and drafts.
      sharding: of its states.
    """

    def __init__(self, engine: Any, sharding: SlotState):
        self._engine, split = engine, engine.layout.sharding("batch")
        shardings = sharding, split, split
        self._append = jax.jit(self._appended, donate_argnums=1, out_shardings=shardings)
        self._draw = jax.jit(
            self._drawn,
            static_argnums=0,
            donate_argnums=1,
            out_shardings=(split, engine.layout.replicated),
        )

    def __call__(
        self,
        sampling: SamplingParams,
        params: Weights,
        state: SlotState,
        new: ContinuedRows,
        bitmask: jax.Array | None,
    ) -> tuple[SlotState, DecodeState]:
        """Append tokens to rows, and draw the next token of each.

        Args:
          sampling: of states without options of their own.
          params: in the generate layout.
          state: donated.
          new: the tokens.
          bitmask: as in ``Engine.decode``.

        Returns:
          the state, and tables of a column.
        """
        split = self._engine.layout.sharding("batch")
        new = place_all(new, split)
        state, logits, continued = self._append(params, state, new)
        running, drawn = self._draw(sampling, state.rows, logits, continued, bitmask)
        return dataclasses.replace(state, rows=running), drawn

    # Programs

    def _appended(
        self, params: Weights, state: SlotState, new: ContinuedRows
    ) -> tuple[SlotState, jax.Array, jax.Array]:
        """The state; float32 [rows, vocab], logits of each row's next token, arbitrary where it is
        not continued; and bool [rows], where it is.

        What is written beyond a row's tokens is overwritten before anything attends to it.
        """
        engine = self._engine
        length = jax.tree.leaves(state.cache.v)[0].shape[-2]
        running, mask = self._continued(state.rows, new), _mask(new)
        own = DecodeStep(engine, SamplingParams(), length, True).own_tokens(running)
        first = jnp.where(new.count > 0, new.cached, own)
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
        model = engine.network.bind(params)
        hidden, cache, _ = model(
            tokens,
            positions,
            attention,
            dataclasses.replace(state.cache, form=plain),
            compute=engine.compute,
            layers=model.unstack() if engine.compute.unroll_layers else None,
            rotary=model.rotary(running.prompt_lengths + running.limit, tables=length),
        )
        if packed is not None:
            hidden = packed.last_tokens(hidden)[:, 0]
        else:
            last = jnp.maximum(new.count - 1, 0)[:, None, None]
            hidden = jnp.take_along_axis(hidden, last, axis=1)[:, 0]
        state = SlotState(dataclasses.replace(cache, form=form), state.slots, running)
        logits = engine.layout.constrain(model.logits(hidden), "batch", "vocab")
        return state, logits, new.count > 0

    def _continued(self, running: RunningSequences, new: ContinuedRows) -> RunningSequences:
        """Sequences as they are before they draw: those that are continued run again, with all of
        their tokens as the prompt."""
        there = new.count > 0

        def chosen(new: jax.Array, old: jax.Array) -> jax.Array:
            return jnp.where(there.reshape(-1, *(1,) * (old.ndim - 1)), new, old)

        counts = running.counts
        if counts is not None:
            counts = counts.continued(new.tokens, _mask(new), self._engine.layout)
        return dataclasses.replace(
            running,
            prompt_lengths=chosen(new.cached + new.count, running.prompt_lengths),
            drawn=chosen(jnp.zeros_like(running.drawn), running.drawn),
            limit=chosen(new.limit, running.limit),
            final_limit=chosen(new.limit, running.final_limit),
            done=running.done & ~there,
            keys=chosen(new.keys, running.keys),
            options=jax.tree.map(chosen, new.options, running.options),
            counts=counts,
        )

    def _drawn(
        self,
        sampling: SamplingParams,
        running: RunningSequences,
        logits: jax.Array,
        continued: jax.Array,
        bitmask: jax.Array | None,
    ) -> tuple[RunningSequences, DecodeState]:
        """Sequences and tables once those that are continued have their first tokens; others draw
        nothing."""
        forward = DecodeStep(self._engine, sampling)
        drawn = forward.empty_tables(running, 1) | {"done": ~continued}
        drawn, counts = forward.sample(drawn, logits, running, 0, bitmask)
        last = jnp.where(continued, drawn["last"], running.last_token)
        done = jnp.where(continued, drawn["done"] | (running.limit <= 1), running.done)
        running = dataclasses.replace(
            running, drawn=running.drawn + continued, last_token=last, done=done, counts=counts
        )
        return running, drawn | {"done": done}


def _mask(new: ContinuedRows) -> jax.Array:
    """bool [rows, new]: which of ``new.tokens`` are there."""
    return jnp.arange(new.tokens.shape[1]) < new.count[:, None]
