"""What a decode loop carries beside the cache: the tokens drawn so far."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from hjax.rollout.options import Sampling
from hjax.rollout.sampling import Draw, no_tops

DecodeState = dict[str, Any]


def start(rows: int, length: int, sampling: Sampling | None) -> DecodeState:
    """Nothing drawn yet: tables of [rows, length] and the rows that are done.

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
    } | ({"top": no_tops((rows, length))} if sampling is None else {})


def entered(state: DecodeState, drawn: Draw, ends: jax.Array, at: int | jax.Array) -> DecodeState:
    """What rows drew, in column ``at`` of the tables, or of each row its own.

    Args:
      state: of ``start``.
      drawn: a token for every row; that of one that is done is left out.
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

    return state | {
        "last": jnp.where(done, 0, drawn.token),
        "done": done | ends,
        "tokens": put(state["tokens"], drawn.token),
        "mask": put(state["mask"], ~done),
        "logprobs": {
            name: put(table, getattr(drawn, _FIELDS[name]))
            for name, table in state["logprobs"].items()
        },
    } | (
        {"top": tuple(map(put, state["top"], (drawn.top_tokens, drawn.top)))}
        if "top" in state
        else {}
    )


def responses(state: DecodeState) -> dict[str, jax.Array]:
    """The rollout's entries that were drawn."""
    return {
        "responses": state["tokens"],
        "response_mask": state["mask"],
        "truncated": ~state["done"],
        **state["logprobs"],
    }


# Name in the batch -> field of ``Draw``.
_FIELDS = {
    "logprobs": "sampled",
    "policy_logprobs": "policy",
    "untempered_logprobs": "untempered",
}


def _reported(sampling: Sampling | None) -> list[str]:
    """Which log-probs a rollout carries."""
    if sampling is None:
        return ["logprobs", "policy_logprobs"]
    changed = sampling.truncates or sampling.alters
    asked = (True, changed, changed or sampling.tempered)
    return [name for name, wanted in zip(_FIELDS, asked, strict=True) if wanted]
