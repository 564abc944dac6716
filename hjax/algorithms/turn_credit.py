"""Credit over the turns of episodes: pure functions of float32 arrays, jit-able.

Shapes: E episodes, L tokens after the prompt. `turn` int [E, L] is the turn of each token that the
policy drew, rising along the row, and -1 elsewhere (observations, padding).
"""

from collections.abc import Mapping
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np

from hjax.algorithms.advantages import gae
from hjax.algorithms.masks import constant_where, masked


def turns_of(batch: Mapping[str, Any]) -> np.ndarray:
    """The batch's ``turn``; a single response is one turn."""
    if "turn" in batch:
        return np.asarray(batch["turn"])
    return np.where(batch["response_mask"], 0, -1).astype(np.int32)


def first_tokens(turn: jax.Array) -> jax.Array:
    """bool [E, L]: the first drawn token of each turn.

    Example:
        >>> first_tokens(jnp.array([[0, 0, -1, 1, 3, 3, -1]])).astype(int)
        Array([[1, 0, 0, 1, 1, 0, 0]], dtype=int32)
    """
    chex.assert_rank(turn, 2)
    before = jnp.pad(jax.lax.cummax(turn, axis=1)[:, :-1], ((0, 0), (1, 0)), constant_values=-1)
    return turn > before


def turn_sums(rewards: jax.Array, turn: jax.Array) -> jax.Array:
    """float32 [E, L]: of each turn the sum of its tokens' rewards at its first token, else 0."""
    first, drawn = first_tokens(turn), turn >= 0

    def step(total, token):
        reward, starts, valid = token
        total = total + jnp.where(valid, reward, 0.0)
        return jnp.where(starts, 0.0, total), jnp.where(starts, total, 0.0)

    start = jnp.zeros(turn.shape[0], jnp.float32)
    tokens = (jnp.asarray(rewards, jnp.float32).T, first.T, drawn.T)
    return jax.lax.scan(step, start, tokens, reverse=True)[1].T


def spread_over_turns(values: jax.Array, turn: jax.Array) -> jax.Array:
    """float32 [E, L]: at each drawn token the value of its turn's first token, 0 elsewhere."""
    places = jnp.where(first_tokens(turn), jnp.arange(turn.shape[1]), 0)
    found = jnp.take_along_axis(values, jax.lax.cummax(places, axis=1), axis=1)
    return masked(found, turn >= 0)


def turn_returns(rewards: jax.Array, turn: jax.Array, gamma: float) -> jax.Array:
    r"""Discounted returns by turn, :math:`G_t = \sum_{k \ge t} \gamma^{k-t} r_k`.

    The discount counts turns, not tokens (Kevin, arXiv 2507.11948; AReaL's `turn_discount`).

    Args:
        rewards: float [E, L], per token; a turn's is their sum.
        turn: int [E, L].
        gamma: discount per turn.

    Returns:
        float32 [E, L], equal on all tokens of a turn, 0 elsewhere.

    Example:
        >>> turn_returns(jnp.array([[0.0, 1, 0, 4]]), jnp.array([[0, 0, -1, 1]]), 0.5)
        Array([[3., 3., 0., 4.]], dtype=float32)
    """
    sums, first = turn_sums(rewards, turn), first_tokens(turn)
    returns, _ = gae(sums, jnp.zeros_like(sums), first, gamma, 1.0)
    return spread_over_turns(returns, turn)


def turn_level_gae(
    rewards: jax.Array, values: jax.Array, turn: jax.Array, gamma: float, lam: float
) -> tuple[jax.Array, jax.Array]:
    r"""GAE in which a turn is one action (turn-PPO, arXiv 2512.17008).

    The value of a turn is that before its first token; all of its tokens have its advantage and
    its return.

    Args:
        rewards: float [E, L], per token; a turn's is their sum.
        values: float [E, L].
        turn: int [E, L].
        gamma, lam: per turn.

    Returns:
        (advantages, returns), float32 [E, L], 0 outside of turns.
    """
    first = first_tokens(turn)
    found = gae(turn_sums(rewards, turn), values, first, gamma, lam)
    advantages, returns = (spread_over_turns(x, turn) for x in found)
    return advantages, returns


def bilevel_gae(
    rewards: jax.Array,
    values: jax.Array,
    turn: jax.Array,
    *,
    gamma: float,
    lam: float,
    turn_gamma: float,
    turn_lam: float,
) -> tuple[jax.Array, jax.Array]:
    r"""GAE over turns, and within each turn over its tokens (VAGEN; RAGEN's `bi_level_gae`).

    .. math:: A_k = r_k + \gamma_h V(s_{k+1}) - V(s_k) + \gamma_h \lambda_h A_{k+1}

    over turns, V before a turn's first token; the last token of turn k has A_k, and each before it
    :math:`A_t = \gamma V_{t+1} - V_t + \gamma\lambda A_{t+1}`.

    Args:
        rewards: float [E, L], per token; a turn's is their sum.
        values: float [E, L].
        turn: int [E, L].
        gamma, lam: per token within a turn.
        turn_gamma, turn_lam: per turn.

    Returns:
        (advantages, returns), float32 [E, L], 0 outside of turns.
    """
    drawn = turn >= 0
    of_turn, _ = turn_level_gae(rewards, values, turn, turn_gamma, turn_lam)
    values = masked(values, drawn)

    def step(carry, token):
        later_advantage, later_value, later_turn = carry
        value, number, level, valid = token
        last = number != later_turn
        inside = gamma * later_value - value + gamma * lam * later_advantage
        advantage = jnp.where(last, level, inside)
        new = advantage, value, number
        kept = jax.tree.map(lambda a, b: jnp.where(valid, a, b), new, carry)
        return kept, jnp.where(valid, advantage, 0.0)

    zeros = jnp.zeros(turn.shape[0], jnp.float32)
    start = zeros, zeros, jnp.full(turn.shape[0], -1, turn.dtype)
    tokens = (values.T, turn.T, of_turn.T, drawn.T)
    advantages = jax.lax.scan(step, start, tokens, reverse=True)[1].T
    return advantages, masked(advantages + values, drawn)


def group_turn_advantages(
    returns: jax.Array,
    turn: jax.Array,
    scored: jax.Array,
    samples: int,
    *,
    normalise: bool = True,
    epsilon: float = 1e-6,
) -> jax.Array:
    """Returns by turn, compared with those of all turns of the group (AReaL; Kevin).

    Args:
        returns: float [E, L], equal on all tokens of a turn (`turn_returns`).
        turn: int [E, L].
        scored: bool [E]; other episodes leave mean and deviation and get 0.
        samples: episodes of a group, adjacent rows.
        normalise: divide by the standard deviation (over n - 1) plus epsilon; equal returns are
            divided by 1.
        epsilon: see there.

    Returns:
        float32 [E, L], 0 outside of turns, and in groups with fewer than two scored episodes.
    """
    chex.assert_equal_shape([returns, turn])
    counted = first_tokens(turn) & scored[:, None]

    def of_group(x: jax.Array) -> jax.Array:
        return x.reshape(-1, samples * x.shape[1])

    own, there = of_group(returns), of_group(counted)
    count = jnp.maximum(jnp.sum(there, axis=1, keepdims=True), 1)
    mean = jnp.sum(masked(own, there), axis=1, keepdims=True) / count
    above = own - mean
    if normalise:
        squares = jnp.sum(masked(above**2, there), axis=1, keepdims=True)
        deviation = jnp.sqrt(squares / jnp.maximum(count - 1, 1)) + epsilon
        equal = constant_where(own, there, axis=1)[:, None]
        above = jnp.where(equal, 0.0, above / deviation)
    enough = jnp.sum(scored.reshape(-1, samples), axis=1) >= 2
    kept = (turn >= 0) & (scored & jnp.repeat(enough, samples))[:, None]
    return masked(above.reshape(returns.shape), kept)
