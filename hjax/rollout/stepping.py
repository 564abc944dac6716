"""A pass of rows through the model while they are decoded: what goes in, and what they draw of it.

The engine's loop runs it of all rows, one under stages of a micro-batch at a time.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from hjax.kernels.decode import Seen, Slots
from hjax.models.attention import Attention
from hjax.models.compute import Compute
from hjax.models.decoding import Decode, DecodeSlots
from hjax.rollout import decode_state, lookup, vocabulary
from hjax.rollout.counts import Counts, counted
from hjax.rollout.decode_state import DecodeState
from hjax.rollout.options import Sampling
from hjax.rollout.row_sampling import RowSampling
from hjax.rollout.sampling import draw
from hjax.rollout.slots import Running
from hjax.sharding.layout import Layout


@dataclasses.dataclass(frozen=True)
class Drawing:
    """How rows draw a token.

    Attributes:
      sampling: of rows without options of their own.
      compute: whose kernels draw.
      layout: the generate layout.
    """

    sampling: Sampling
    compute: Compute
    layout: Layout

    def empty(self, rows: int, most: int, options: RowSampling | None) -> DecodeState:
        """Tables of so many columns, with nothing drawn."""
        return decode_state.start(rows, most, self.sampling if options is None else None)

    def token(
        self,
        drawn: DecodeState,
        logits: jax.Array,
        options: RowSampling | None,
        counts: Counts | None,
        keys: jax.Array,
        position: jax.Array,
        at: jax.Array,
        allowed: jax.Array | None,
    ) -> tuple[DecodeState, Counts | None]:
        """Each row's token at ``position``, in column ``at`` of the tables."""
        if options is None:
            rows = RowSampling.uniform(self.sampling, logits.shape[-1])
        else:  # of rows that have ended nobody asks for more
            rows = dataclasses.replace(options, top=jnp.where(drawn["done"], 0, options.top))
        new = draw(
            logits,
            jax.random.wrap_key_data(keys),
            position,
            rows,
            counts=counts,
            kernels=self.compute.kernels,
            layout=self.layout,
            allowed=allowed,
        )
        counts = counted(counts, new.token, ~drawn["done"], self.layout)
        return decode_state.entered(drawn, new, rows.ends(new.token), at), counts


@dataclasses.dataclass(frozen=True)
class Pass:
    """One pass over the weights.

    Attributes:
      drawing: of tokens.
      guesses: tokens that are guessed at a time.
      by_kernel: whether the kernel reads the cache.
      own_prompts: whether rows have their prompts among their own tokens.
      length: columns of the cache.
    """

    drawing: Drawing
    guesses: int
    by_kernel: bool
    own_prompts: bool
    length: int

    def start(self, running: Running, most: int) -> DecodeState:
        """Tables of ``most`` columns."""
        rows, layout = running.done.shape[0], self.drawing.layout
        drawn = self.drawing.empty(rows, most, running.options) | {"done": running.done}
        if self.guesses:
            drawn |= dict.fromkeys(("guessed", "right"), jnp.zeros(rows, jnp.int32))
        return jax.tree.map(lambda x: layout.constrain(x, "batch"), drawn)

    def tokens(self, running: Running) -> jax.Array:
        """int32 [rows, 1 + guesses]: each row's last token, and those that are guessed after it."""
        last = running.last[:, None]
        if running.text is None:
            return last
        there = running.tokens + running.drawn
        return jnp.concatenate([last, lookup.guesses(running.text, there, self.guesses)], axis=1)

    def positions(self, running: Running) -> jax.Array:
        """int32 [rows, 1 + guesses], of ``tokens`` in their sequences."""
        first = running.tokens + running.drawn - 1
        return first[:, None] + jnp.arange(1 + self.guesses)

    def own(self, running: Running) -> jax.Array:
        """int32 [rows]: tokens of each that are among its own in the cache."""
        return running.drawn - 1 + (running.tokens if self.own_prompts else 0)

    def sees(self, slots: Slots, running: Running) -> Attention:
        """What ``tokens`` see."""
        layout, own = self.drawing.layout, self.own(running)
        if self.by_kernel:
            where = jnp.where(running.done, -1, own).reshape(slots.begin.shape[0], -1)
            return Decode(Seen(slots.begin, slots.end, where), layout, self.length / 2)
        if self.guesses:
            slots = dataclasses.replace(slots, start=jnp.zeros_like(own), column=own)
        return DecodeSlots(slots, layout)

    def logits(self, model: Any, hidden: jax.Array) -> jax.Array:
        """float32 [rows, 1 + guesses, vocab] of hidden states, or without guesses [rows, vocab]."""
        axes = ("batch", None, "vocab") if self.guesses else ("batch", "vocab")
        logits = model.logits(hidden if self.guesses else hidden[:, 0])
        return self.drawing.layout.constrain(logits, *axes)

    def took(
        self,
        running: Running,
        drawn: DecodeState,
        logits: jax.Array,
        tokens: jax.Array,
        before: jax.Array,
        column: jax.Array,
        allowed: jax.Array | None,
    ) -> tuple[Running, DecodeState]:
        """Rows with what they drew.

        Args:
          running, drawn: before.
          logits, tokens: of the pass.
          before: int32 [rows], tokens that were drawn when the tables were begun.
          column: int32 [], of the tables, where nothing is guessed.
          allowed: as of ``Engine.decode``.
        """
        if self.guesses:
            return self._several(running, drawn, logits, tokens, before, allowed)
        way = running.options, running.counts, running.keys, running.drawn
        drawn, counts = self.drawing.token(drawn, logits, *way, column, allowed)
        number = running.drawn + ~running.done
        done = drawn["done"] | (number >= running.limit)
        running = dataclasses.replace(
            running, drawn=number, last=drawn["last"], done=done, counts=counts
        )
        return running, drawn | {"done": done}

    def _several(
        self,
        running: Running,
        drawn: DecodeState,
        logits: jax.Array,
        tokens: jax.Array,
        before: jax.Array,
        allowed: jax.Array | None,
    ) -> tuple[Running, DecodeState]:
        """The token that follows, and those after it that were guessed."""
        ahead = self._ahead(allowed)

        def next_one(carry: Any) -> Any:
            """``going``: the rows whose guesses have been right so far."""
            t, going, running, drawn = carry
            of_token = jax.lax.dynamic_index_in_dim(logits, t, 1, keepdims=False)
            of_token = self.drawing.layout.constrain(of_token, "batch", "vocab")
            way = running.options, running.counts, running.keys, running.drawn
            column = running.drawn - before
            drawn, counts = self.drawing.token(
                drawn | {"done": ~going}, of_token, *way, column, allowed
            )
            token, number = drawn["last"], running.drawn + going
            length = running.tokens + running.drawn
            done = running.done | (going & (drawn["done"] | (number >= running.limit)))
            running = dataclasses.replace(
                running,
                drawn=number,
                last=jnp.where(going, token, running.last),
                done=done,
                counts=counts,
                text=with_token(running.text, length, token, going),
            )
            guess = jax.lax.dynamic_index_in_dim(
                tokens, jnp.minimum(t + 1, self.guesses), 1, keepdims=False
            )
            going = going & ~done & (token == guess)
            right = drawn["right"] + (going & (t < ahead))
            return t + 1, going, running, drawn | {"right": right}

        def more(carry: Any) -> jax.Array:
            return (carry[0] <= ahead) & jnp.any(carry[1])

        live = ~running.done
        drawn = drawn | {"guessed": drawn["guessed"] + ahead * live}
        first = jnp.int32(0), live, running, drawn
        _, _, running, drawn = jax.lax.while_loop(more, next_one, first)
        return running, drawn

    def _ahead(self, allowed: jax.Array | None) -> jax.Array:
        """int32 []: guesses that count, as what may be drawn is known of one token."""
        return jnp.where(vocabulary.bans(allowed), 0, self.guesses)

    def goes_on(
        self, running: Running, before: jax.Array, most: int, live: jax.Array | None = None
    ) -> jax.Array:
        """bool []: whether there is a row to be drawn, and room for one more pass.

        Each needs room for all that are guessed, in the tables and in the cache. ``live``, bool []:
        whether there is a row, if somebody has counted already.
        """
        going = ~jnp.all(running.done) if live is None else live
        if self.guesses:
            own = jnp.max(jnp.where(running.done, 0, self.own(running)))
            drawn = jnp.max(running.drawn - before)
            going &= (own + self.guesses < self.length) & (drawn + self.guesses < most)
        return going


def with_token(
    text: jax.Array | None, length: jax.Array, token: jax.Array, there: jax.Array | bool
) -> jax.Array | None:
    """Texts [rows, room] of so many tokens with one more, where it is there."""
    if text is None:
        return None
    here = (jnp.arange(text.shape[1]) == length[:, None]) & jnp.reshape(there, (-1, 1))
    return jnp.where(here, token[:, None], text)
