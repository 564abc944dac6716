"""One decode step: forward pass, sampling, and the tables of generated tokens.

The engine's loop runs it over all rows; under pipeline stages over one micro-batch at a time.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from hjax.kernels.decode import CacheMask, SlotMask
from hjax.models.attention_strategies import Attention
from hjax.models.decoding import Decode, DecodeSlots
from hjax.rollout import prompt_lookup, vocab_parallel
from hjax.rollout.row_sampling import RowSampling
from hjax.rollout.sampling import SampledTokens, draw, no_top_tokens
from hjax.rollout.sampling_params import SamplingParams
from hjax.rollout.slot_state import RunningSequences
from hjax.rollout.token_counts import TokenCounts, count_token

DecodeState = dict[str, Any]


def empty_tables(rows: int, length: int, sampling: SamplingParams | None) -> DecodeState:
    """Empty tables of [rows, length], and which rows are done.

    Args:
      rows, length: of the tables.
      sampling: of all rows; None: each has options of its own.
    """
    return {
        "last": jnp.zeros((rows,), jnp.int32),
        "done": jnp.zeros((rows,), bool),
        "tokens": jnp.zeros((rows, length), jnp.int32),
        "mask": jnp.zeros((rows, length), bool),
        "logprobs": {name: jnp.zeros((rows, length), jnp.float32) for name in _reported(sampling)},
    } | ({"top": no_top_tokens((rows, length))} if sampling is None else {})


def record_tokens(
    state: DecodeState, drawn: SampledTokens, ends: jax.Array, at: int | jax.Array
) -> DecodeState:
    """Write what rows drew into column ``at`` of the tables; it may differ by row.

    Args:
      state: of ``empty_tables``.
      drawn: a token for every row; rows that are done drop it.
      ends: bool [rows], whether the token is a row's last.
      at: int32 [] or [rows].
    """
    done, at = state["done"], jnp.asarray(at, jnp.int32)

    def put(table: jax.Array, column: Any) -> jax.Array:
        further = (1,) * (table.ndim - 2)
        if at.ndim:
            here = (jnp.arange(table.shape[1]) == at[:, None]) & ~done[:, None]
            return jnp.where(here.reshape(*here.shape, *further), column[:, None], table)
        column = jnp.where(done.reshape(-1, *further), jnp.zeros_like(column), column)
        return jax.lax.dynamic_update_slice_in_dim(table, column[:, None], at, 1)

    return (
        state
        | {
            "last": jnp.where(done, 0, drawn.token),
            "done": done | ends,
            "tokens": put(state["tokens"], drawn.token),
            "mask": put(state["mask"], ~done),
            "logprobs": {
                name: put(table, getattr(drawn, _FIELDS[name]))
                for name, table in state["logprobs"].items()
            },
        }
        | (
            {"top": tuple(map(put, state["top"], (drawn.top_tokens, drawn.top)))}
            if "top" in state
            else {}
        )
    )


def response_tables(state: DecodeState) -> dict[str, jax.Array]:
    """The rollout's entries that were generated."""
    return {
        "responses": state["tokens"],
        "response_mask": state["mask"],
        "truncated": ~state["done"],
        **state["logprobs"],
    }


# Name in the batch -> field of ``SampledTokens``.
_FIELDS = {"logprobs": "sampled", "policy_logprobs": "policy", "untempered_logprobs": "untempered"}


def _reported(sampling: SamplingParams | None) -> list[str]:
    """Which log-probs a rollout carries."""
    if sampling is None:
        return ["logprobs", "policy_logprobs"]
    changed = sampling.truncates or sampling.changes_logits
    reported = (True, changed, changed or sampling.tempered)
    return [name for name, wanted in zip(_FIELDS, reported, strict=True) if wanted]


@dataclasses.dataclass(frozen=True)
class DecodeStep:
    """One pass over the weights, and what rows draw from it.

    Attributes:
      engine: an ``Engine``.
      sampling: of rows without options of their own.
      length: columns of the cache.
      prompts_in_rows: whether rows have their prompts among their own tokens.
    """

    engine: Any
    sampling: SamplingParams
    length: int = 0
    prompts_in_rows: bool = False

    def sample(
        self,
        drawn: DecodeState,
        logits: jax.Array,
        rows: RunningSequences,
        column: jax.Array | int,
        bitmask: jax.Array | None,
    ) -> tuple[DecodeState, TokenCounts | None]:
        """Sample each row's next token into ``column`` of the tables (one for all, or one per row);
        returns the tables and updated token counts."""
        options, engine = rows.options, self.engine
        if options is None:
            options = RowSampling.uniform(self.sampling, logits.shape[-1])
        else:  # finished rows need no top log-probs
            options = dataclasses.replace(options, top=jnp.where(drawn["done"], 0, options.top))
        new = draw(
            logits,
            jax.random.wrap_key_data(rows.keys),
            rows.drawn,
            options,
            counts=rows.counts,
            kernels=engine.compute.kernels,
            layout=engine.layout,
            bitmask=bitmask,
        )
        counts = count_token(rows.counts, new.token, ~drawn["done"], engine.layout)
        return record_tokens(drawn, new, options.ends(new.token), column), counts

    def empty_tables(self, running: RunningSequences, most: int) -> DecodeState:
        """Empty tables of ``most`` columns."""
        rows, sampling = running.done.shape[0], None if running.options else self.sampling
        drawn = empty_tables(rows, most, sampling) | {"done": running.done}
        if self.engine.draft_tokens:
            drawn |= dict.fromkeys(("guessed", "right"), jnp.zeros(rows, jnp.int32))
        return jax.tree.map(lambda x: self.engine.layout.constrain(x, "batch"), drawn)

    def inputs(self, running: RunningSequences) -> jax.Array:
        """int32 [rows, 1 + drafts]: each row's last token and the draft tokens after it."""
        last = running.last_token[:, None]
        if running.text is None:
            return last
        there = running.prompt_lengths + running.drawn
        guesses = prompt_lookup.draft_tokens(running.text, there, self.engine.draft_tokens)
        return jnp.concatenate([last, guesses], axis=1)

    def positions(self, running: RunningSequences) -> jax.Array:
        """int32 [rows, 1 + drafts]: the position of each of ``inputs`` in its sequence."""
        first = running.prompt_lengths + running.drawn - 1
        return first[:, None] + jnp.arange(1 + self.engine.draft_tokens)

    def own_tokens(self, running: RunningSequences) -> jax.Array:
        """int32 [rows]: number of tokens that each row has in its own part of the cache."""
        return running.drawn - 1 + (running.prompt_lengths if self.prompts_in_rows else 0)

    def attention(self, slots: SlotMask, running: RunningSequences) -> Attention:
        """What ``inputs`` attend to."""
        layout, own = self.engine.layout, self.own_tokens(running)
        if self.engine.uses_kernel:
            where = jnp.where(running.done, -1, own).reshape(slots.begin.shape[0], -1)
            return Decode(CacheMask(slots.begin, slots.end, where), layout, self.length / 2)
        if self.engine.row_columns:
            slots = dataclasses.replace(slots, start=jnp.zeros_like(own), column=own)
        return DecodeSlots(slots, layout)

    def logits(self, model: Any, hidden: jax.Array) -> jax.Array:
        """float32 [rows, 1 + drafts, vocab] of hidden states; without drafts [rows, vocab]."""
        axes = ("batch", None, "vocab") if self.engine.draft_tokens else ("batch", "vocab")
        logits = model.logits(hidden if self.engine.draft_tokens else hidden[:, 0])
        return self.engine.layout.constrain(logits, *axes)

    def advance(
        self,
        running: RunningSequences,
        drawn: DecodeState,
        logits: jax.Array,
        tokens: jax.Array,
        before: jax.Array,
        column: jax.Array,
        bitmask: jax.Array | None,
    ) -> tuple[RunningSequences, DecodeState]:
        """Rows and tables after a pass: each row has its next token, or several by accepted drafts.

        Args:
          running, drawn: before.
          logits, tokens: of the pass.
          before: int32 [rows], tokens that were drawn when the tables were empty.
          column: int32 [], of the tables, without drafts.
          bitmask: as in ``Engine.decode``.
        """
        if self.engine.draft_tokens:
            return self._advance_drafts(running, drawn, logits, tokens, before, bitmask)
        drawn, counts = self.sample(drawn, logits, running, column, bitmask)
        number = running.drawn + ~running.done
        done = drawn["done"] | (number >= running.limit)
        running = dataclasses.replace(
            running, drawn=number, last_token=drawn["last"], done=done, counts=counts
        )
        return running, drawn | {"done": done}

    def _advance_drafts(
        self,
        running: RunningSequences,
        drawn: DecodeState,
        logits: jax.Array,
        tokens: jax.Array,
        before: jax.Array,
        bitmask: jax.Array | None,
    ) -> tuple[RunningSequences, DecodeState]:
        """Draw the next token, then verify drafts: one is accepted if it equals the token drawn."""
        # A bitmask is known for one token only.
        ahead = jnp.where(vocab_parallel.any_banned(bitmask), 0, self.engine.draft_tokens)

        def next_one(carry: Any) -> Any:
            """``going``: the rows whose drafts were all accepted so far."""
            t, going, running, drawn = carry
            of_token = jax.lax.dynamic_index_in_dim(logits, t, 1, keepdims=False)
            of_token = self.engine.layout.constrain(of_token, "batch", "vocab")
            column, drawn = running.drawn - before, drawn | {"done": ~going}
            drawn, counts = self.sample(drawn, of_token, running, column, bitmask)
            token, number = drawn["last"], running.drawn + going
            length = running.prompt_lengths + running.drawn
            done = running.done | (going & (drawn["done"] | (number >= running.limit)))
            running = dataclasses.replace(
                running,
                drawn=number,
                last_token=jnp.where(going, token, running.last_token),
                done=done,
                counts=counts,
                text=append_token(running.text, length, token, going),
            )
            guess = jax.lax.dynamic_index_in_dim(
                tokens, jnp.minimum(t + 1, self.engine.draft_tokens), 1, keepdims=False
            )
            going = going & ~done & (token == guess)
            return t + 1, going, running, drawn | {"right": drawn["right"] + (going & (t < ahead))}

        def more(carry: Any) -> jax.Array:
            return (carry[0] <= ahead) & jnp.any(carry[1])

        live = ~running.done
        drawn = drawn | {"guessed": drawn["guessed"] + ahead * live}
        first = jnp.int32(0), live, running, drawn
        _, _, running, drawn = jax.lax.while_loop(more, next_one, first)
        return running, drawn

    def can_continue(
        self, running: RunningSequences, before: jax.Array, most: int, live: jax.Array | None = None
    ) -> jax.Array:
        """bool []: whether a row is still running, with room for one more pass.

        With drafts, the tables and the cache need room for all of them. ``live``, bool []: whether
        a row is running, if the caller knows already.
        """
        going = ~jnp.all(running.done) if live is None else live
        drafts = self.engine.draft_tokens
        if self.engine.row_columns and not self.engine.uses_kernel:
            own = jnp.max(jnp.where(running.done, 0, self.own_tokens(running)))
            going &= own + drafts < self.length
        if drafts:
            going &= jnp.max(running.drawn - before) + drafts < most
        return going


def append_token(
    text: jax.Array | None, length: jax.Array, token: jax.Array, there: jax.Array | bool
) -> jax.Array | None:
    """Texts [rows, room] of ``length`` tokens with one more appended, where ``there`` is true."""
    if text is None:
        return None
    here = (jnp.arange(text.shape[1]) == length[:, None]) & jnp.reshape(there, (-1, 1))
    return jnp.where(here, token[:, None], text)
