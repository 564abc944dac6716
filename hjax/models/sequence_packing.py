"""Forward passes over packs: rows of several sequences, one after another, with little padding.

What goes where is a ``Packing``, made on the host (``hjax.workers.packs``). Tokens are gathered
into packs, hidden states are computed there, and what is read off them is gathered back into
[rows, length] of whole rows, so that nothing above sees packs. The last token of a response
predicts nothing and takes no place.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from hjax.models.attention_strategies import Packed
from hjax.models.compute import Compute
from hjax.models.dropout import KEY as DROPOUT
from hjax.models.dropout import Dropout, token_keys

KEY = "packing"  # a batch's entry


class Packing(NamedTuple):
    """Where the tokens of a batch stand in packs; int32 arrays.

    A cell is what one data-parallel part computes in one pass: some slots, each a row of the batch
    or empty, and the packs that their tokens stand in. Within a cell tokens are counted through its
    slots' rows [prompt | response], places through its packs. A number past the last: nothing.

    Attributes:
      order: [cells, slots], the batch's row in each slot; those of a part come one after another.
      source: [cells, packs, places], the token that stands in each place.
      positions: [cells, packs, places], of each token in its own sequence.
      segments: [cells, packs, places], numbers of the sequences in a pack from 1 on; 0: padding.
      prompts: [cells, packs, places], the number under which each token's prompt stands, once for
        several responses with numbers of their own; None: every sequence has its own prompt.
      states: [cells, packs, answers], the place whose hidden state predicts a response token.
      targets: [cells, packs, answers], that response token.
      back: [cells, slots, length], counted through ``answers``: where each response token's went.
      passes: how many of a part's cells, the first ones, have packs; None: all are computed.
    """

    order: Any
    source: Any
    positions: Any
    segments: Any
    prompts: Any
    states: Any
    targets: Any
    back: Any
    passes: Any = None


def to_slots(batch: Mapping[str, Any]) -> dict[str, Any]:
    """A batch of [rows, ...] with its rows in their slots; zeros in empty ones; inside jit.

    Numbers that hold for all rows, and a batch without packs, stay as they are.
    """
    packing = batch.get(KEY)
    if packing is None:
        return dict(batch)
    order = packing.order.reshape(-1)

    def slots(x: jax.Array) -> jax.Array:
        return x.at[order].get(mode="fill", fill_value=0) if x.ndim else x

    return {key: x if key == KEY else jax.tree.map(slots, x) for key, x in batch.items()}


def from_slots(made: Any, order: jax.Array, rows: int) -> Any:
    """Arrays of [slots, ...] in the order of the batch's rows; the way back of ``to_slots``."""

    def back(x: jax.Array) -> jax.Array:
        return jnp.zeros((rows, *x.shape[1:]), x.dtype).at[order.reshape(-1)].set(x, mode="drop")

    return jax.tree.map(back, made)


def map_packed_states(
    decoder: Any,
    batch: Mapping[str, Any],
    compute: Compute,
    read: Callable[[jax.Array, jax.Array], Any],
) -> Any:
    """What ``read`` makes of the states that predict response tokens, by row.

    Args:
      decoder: a ``Decoder``.
      batch: ``prompts`` [slots, prompt_length], ``responses`` [slots, length], its packing, and
        where the decoder has a tally ``counted_prompts`` and ``counted_responses``.
      compute: dtype, loop form and kernels.
      read: (states [packs, answers, embed], tokens int [packs, answers]) -> arrays
        [packs, answers, ...].

    Returns:
      its arrays as [slots, length, ...], 0 off the responses.
    """
    packing: Packing = batch[KEY]
    cells = packing.source.shape[0]
    rows = jnp.concatenate([batch["prompts"], batch["responses"]], axis=1)
    tokens = rows.reshape(cells, -1)

    def joined(x: jax.Array) -> jax.Array:
        """[cells, packs, ...] -> [cells * packs, ...]."""
        return x.reshape(-1, *x.shape[2:])

    places = joined(_gather_in_cells(tokens, packing.source))
    prompts = None if packing.prompts is None else joined(packing.prompts)
    positions = joined(packing.positions)
    if DROPOUT in batch:
        keys = token_keys(batch[DROPOUT], 1, batch["prompts"].shape[1], batch["responses"].shape[1])
        keys = joined(_gather_in_cells(keys.reshape(cells, -1, keys.shape[-1]), packing.source))
        compute = dataclasses.replace(compute, dropout=Dropout.of(keys, positions))
    attention = Packed(joined(packing.segments), positions, prompts, compute.form)
    counted = None
    if decoder.tally is not None:
        counted = joined(
            _packed_token_weights(packing, batch["counted_prompts"], batch["counted_responses"])
        )
    hidden = decoder.hidden_states(places, positions, attention, compute, counted)
    states = _gather_in_cells(hidden.reshape(cells, -1, hidden.shape[-1]), packing.states)
    made = read(joined(states), joined(_gather_in_cells(tokens, packing.targets)))

    def by_row(x: jax.Array) -> jax.Array:
        return joined(_gather_in_cells(x.reshape(cells, -1, *x.shape[2:]), packing.back))

    return jax.tree.map(by_row, made)


def _packed_token_weights(packing: Packing, prompts: jax.Array, responses: jax.Array) -> jax.Array:
    """float32 [cells, packs, places], as how many each token counts.

    A prompt counts for every response that reads it.

    Args:
      packing: of slots.
      prompts, responses: float32 [slots, ...], which of a slot's tokens count.
    """
    cells, packs, places = packing.source.shape
    slots = packing.back.shape[1]
    alone = jnp.concatenate([jnp.zeros_like(prompts), responses], axis=1)
    alone = _gather_in_cells(alone.reshape(cells, -1), packing.source)
    # Of each slot's prompt the last place, from which its first response token is predicted; the
    # prompt's places begin so many before it, and a running sum spreads the slot over them.
    length = jnp.sum(prompts, axis=1, dtype=jnp.int32).reshape(cells, slots)
    answers = packing.states.reshape(cells, -1)
    answer = packing.back[:, :, 0]

    def of_cell(answers: jax.Array, answer: jax.Array, length: jax.Array) -> jax.Array:
        last = answers.at[answer].get(mode="fill", fill_value=packs * places)
        step = jnp.where(length > 0, 1.0, 0.0)
        edges = jnp.zeros(packs * places + 1).at[last + 1 - length].add(step, mode="drop")
        return jnp.cumsum(edges.at[last + 1].add(-step, mode="drop"))[:-1]

    shared = jax.vmap(of_cell)(answers, answer, length)
    return alone + shared.reshape(cells, packs, places)


def _gather_in_cells(x: jax.Array, index: jax.Array) -> jax.Array:
    """Of each cell's entries [cells, entries, ...] those of [cells, ...]; 0 past the last."""

    def of_cell(x: jax.Array, index: jax.Array) -> jax.Array:
        return x.at[index].get(mode="fill", fill_value=0)

    return jax.vmap(of_cell)(x, index)
