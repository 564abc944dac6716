r"""Tokens whose covariance of log-prob and advantage is large: there entropy is lost fastest.

Cui et al. 2025, "The Entropy Mechanism of Reinforcement Learning for Reasoning Language Models"
(https://arxiv.org/abs/2505.22617), as in verl's `core_algos.py`. With means over the step's tokens

.. math:: cov_t = (A_t - \bar A)(\ell_t - \bar\ell)

Here :math:`\ell` is the log-prob as learning starts, which is known before a step is cut into
micro-batches; verl takes that of the trained policy, micro-batch by micro-batch. In the first
update of an unbroken step both are the same.
"""

import jax
import jax.numpy as jnp

from hjax.algorithms.masks import keep, masked_mean

COVARIANCES = ("none", "clip", "kl")


def covariances(advantages: jax.Array, logprobs: jax.Array, mask: jax.Array) -> jax.Array:
    """float32 [N, L] of tokens in the mask, 0 off it; arguments [N, L]."""
    advantages, logprobs = keep(advantages, mask), keep(logprobs, mask)
    made = (advantages - masked_mean(advantages, mask)) * (logprobs - masked_mean(logprobs, mask))
    return keep(made, mask)


def chosen_tokens(
    covariance: jax.Array,
    mask: jax.Array,
    kind: str,
    share: float,
    low: float,
    high: float,
    tokens: jax.Array,
) -> jax.Array:
    """Which tokens are treated otherwise: `share` of those in the mask, at least one.

    Args:
        covariance: float [N, L], of `covariances`.
        mask: bool [N, L].
        kind: "clip": of those with a covariance between low and high, drawn at random; "kl": those
            with the largest.
        share: of the tokens in the mask, above 0.
        low, high: of "clip".
        tokens: int [N, L], the responses, of which the draw is made: the same for the same batch.

    Returns:
        bool [N, L].
    """
    mask = jnp.asarray(mask, bool)
    count = jnp.maximum(jnp.floor(share * jnp.sum(mask) + 1e-6).astype(jnp.int32), 1)
    if kind == "clip":
        allowed = mask & (covariance > low) & (covariance < high)
        places = jnp.arange(1, mask.size + 1, dtype=jnp.uint32).reshape(mask.shape)
        drawn_of = jnp.sum(jnp.where(mask, tokens, 0).astype(jnp.uint32) * places)
        order = jax.random.uniform(jax.random.fold_in(jax.random.key(0), drawn_of), mask.shape)
    else:
        allowed, order = mask, -covariance
    ranked = jnp.argsort(jnp.where(allowed, order, jnp.inf).ravel(), stable=True)
    rank = jnp.zeros(mask.size, jnp.int32).at[ranked].set(jnp.arange(mask.size, dtype=jnp.int32))
    return allowed & (rank.reshape(mask.shape) < count)
