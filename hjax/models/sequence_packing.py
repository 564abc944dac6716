"""Sequence packing: forward passes over packs, rows of several sequences with little padding.

``Packing`` is the assignment, made on the host (``hjax.workers.packs``). Tokens are gathered into
packs, hidden states are computed there, and results are gathered back into [rows, length], so that
callers do not see packs. The last token of a response predicts nothing and is left out.
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
    """The assignment of a batch's tokens to packs; int32 index arrays.

    A cell is what one data-parallel part computes in one pass: slots, each a row of the batch or
    empty, and the packs of their tokens. Token indices count through the rows [prompt | response]
    of a cell's slots, place indices through its packs. An index past the last means nothing.

    Attributes:
      order: [cells, slots], the batch's row in each slot; a part's cells are consecutive.
      source: [cells, packs, places], the token at each place.
      positions: [cells, packs, places], of each token in its own sequence.
      segments: [cells, packs, places], sequence numbers within a pack from 1 on; 0: padding.
      prompts: [cells, packs, places], the segment of each token's prompt where responses, with
        segments of their own, share one; None: every sequence has its own prompt.
      states: [cells, packs, answers], the place whose hidden state predicts a response token.
      targets: [cells, packs, answers], that response token.
      back: [cells, slots, length], the index in ``answers`` of each response token.
      passes: number of a part's cells that have packs, the first ones; None: all.
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
    """A batch of [rows, ...] as [slots, ...], with zeros in empty slots; inside jit.

    Scalars, and a batch without packing, are returned as they are.
    """
    packing = batch.get(KEY)
    if packing is None:
        return dict(batch)
    order = packing.order.reshape(-1)

    def slots(x: jax.Array) -> jax.Array:
        return x.at[order].get(mode="fill", fill_value=0) if x.ndim else x

    return {key: x if key == KEY else jax.tree.map(slots, x) for key, x in batch.items()}


def from_slots(results: Any, order: jax.Array, rows: int) -> Any:
    """Arrays of [slots, ...] as [rows, ...]; the inverse of ``to_slots``."""

    def back(x: jax.Array) -> jax.Array:
        return jnp.zeros((rows, *x.shape[1:]), x.dtype).at[order.reshape(-1)].set(x, mode="drop")

    return jax.tree.map(back, results)


def map_packed_states(
    decoder: Any,
    batch: Mapping[str, Any],
    compute: Compute,
    read: Callable[[jax.Array, jax.Array], Any],
) -> Any:
    """Apply ``read`` within packs to the hidden states that predict response tokens.

    Args:
      decoder: a ``Decoder``.
      batch: ``prompts`` [slots, prompt_length], ``responses`` [slots, length], its packing, and if
        the decoder has a tally ``counted_prompts`` and ``counted_responses``.
      compute: dtype, loop form and kernels.
      read: (states [packs, answers, embed], tokens int [packs, answers]) -> arrays
        [packs, answers, ...].

    Returns:
      its arrays as [slots, length, ...], 0 off the responses.
    """
    packing: Packing = batch[KEY]
    cells = packing.source.shape[0]
    tokens = jnp.concatenate([batch["prompts"], batch["responses"]], axis=1).reshape(cells, -1)

    def joined(x: jax.Array) -> jax.Array:
        """[cells, packs, ...] -> [cells * packs, ...]."""
        return x.reshape(-1, *x.shape[2:])

    tokens_in_packs = joined(_gather_in_cells(tokens, packing.source))
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
    hidden = decoder.hidden_states(tokens_in_packs, positions, attention, compute, counted)
    states = _gather_in_cells(hidden.reshape(cells, -1, hidden.shape[-1]), packing.states)
    results = read(joined(states), joined(_gather_in_cells(tokens, packing.targets)))

    def by_row(x: jax.Array) -> jax.Array:
        return joined(_gather_in_cells(x.reshape(cells, -1, *x.shape[2:]), packing.back))

    return jax.tree.map(by_row, results)


def _packed_token_weights(packing: Packing, prompts: jax.Array, responses: jax.Array) -> jax.Array:
    """Weight of each token in the router statistics, float32 [cells, packs, places].

    A shared prompt counts once for each of its responses.

    Args:
      packing: of slots.
      prompts, responses: float32 [slots, ...], which of a slot's tokens count.
    """
    cells, packs, tokens_in_packs = packing.source.shape
    slots = packing.back.shape[1]
    response_weights = jnp.concatenate([jnp.zeros_like(prompts), responses], axis=1)
    response_weights = _gather_in_cells(response_weights.reshape(cells, -1), packing.source)
    # The place that predicts a slot's first response token is the last of its prompt. Add 1 at the
    # prompt's first place and subtract it after the last; a cumulative sum covers the prompt.
    length = jnp.sum(prompts, axis=1, dtype=jnp.int32).reshape(cells, slots)
    answers = packing.states.reshape(cells, -1)
    answer = packing.back[:, :, 0]

    def of_cell(answers: jax.Array, answer: jax.Array, length: jax.Array) -> jax.Array:
        last = answers.at[answer].get(mode="fill", fill_value=packs * tokens_in_packs)
        step = jnp.where(length > 0, 1.0, 0.0)
        edges = jnp.zeros(packs * tokens_in_packs + 1).at[last + 1 - length].add(step, mode="drop")
        return jnp.cumsum(edges.at[last + 1].add(-step, mode="drop"))[:-1]

    prompt_weights = jax.vmap(of_cell)(answers, answer, length)
    return response_weights + prompt_weights.reshape(cells, packs, tokens_in_packs)


def _gather_in_cells(x: jax.Array, index: jax.Array) -> jax.Array:
    """Gather from each cell's entries [cells, entries, ...] at [cells, ...]; 0 past the last."""

    def of_cell(x: jax.Array, index: jax.Array) -> jax.Array:
        return x.at[index].get(mode="fill", fill_value=0)

    return jax.vmap(of_cell)(x, index)
