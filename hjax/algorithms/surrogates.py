r"""Surrogate objectives: ratio times advantage per token, clipped (PPO), gated (SAPO) or masked.

Pure functions of float [N, L] arrays that are 0 outside the mask. Each returns token losses and
statistics; `hjax.algorithms.policy_loss` selects one.
"""

import jax
import jax.numpy as jnp

from hjax.algorithms.aggregation import WithStats
from hjax.algorithms.masks import masked, masked_mean

# exp(20) is far outside any clip range; larger ones overflow float32 (verl clamps there too).
MAX_LOG_RATIO = 20.0
# verl's cap of DPPO's ratio.
DPPO_CAP = 20.0
# Smaller probabilities are float32 rounding error.
_MIN_PROBABILITY = 1e-7


def capped_ratio(log_ratio: jax.Array) -> jax.Array:
    """exp of log-ratios, capped at MAX_LOG_RATIO."""
    return jnp.exp(jnp.minimum(log_ratio, MAX_LOG_RATIO))


def log_ratio_at_level(log_ratio: jax.Array, mask: jax.Array, level: str) -> jax.Array:
    r"""Token-level or sequence-level log-ratio (importance ratio) of each token.

    Args:
        log_ratio: float [N, L], :math:`\ell - \ell_{old}`, 0 outside the mask.
        mask: bool [N, L].
        level: "token": unchanged. "sequence": the mean over the response's tokens, at each of them,
            with gradient through all of them (GSPO, https://arxiv.org/abs/2507.18071).
            "sequence_token": the same value, with gradient through each token alone (GSPO-token).
            "sequence_sum": the sum over the response's tokens (the probability ratio of the
            response, as in TRL's RLOO).

    Returns:
        float32 [N, L]. "sequence" and "sequence_token" have the same gradient where the advantage
        is constant over the response.
    """
    if level == "token":
        return log_ratio
    total = jnp.sum(log_ratio, axis=1, keepdims=True)
    if level == "sequence_sum":
        return jnp.broadcast_to(total, log_ratio.shape)
    mean = total / jnp.maximum(jnp.sum(jnp.asarray(mask, bool), axis=1, keepdims=True), 1)
    if level == "sequence":
        return jnp.broadcast_to(mean, log_ratio.shape)
    straight = log_ratio - jax.lax.stop_gradient(log_ratio)
    return jax.lax.stop_gradient(mean) + straight


def ppo_clip(
    log_ratio: jax.Array,
    advantages: jax.Array,
    mask: jax.Array,
    low: float | None,
    high: float | None,
    dual: float | None = None,
    cap: float | None = None,
) -> WithStats:
    r"""PPO's :math:`-\min(\rho A, \mathrm{clip}(\rho, 1-low, 1+high) A)`.

    Args:
        log_ratio: float [N, L], from `log_ratio_at_level`.
        advantages: float [N, L].
        mask: bool [N, L].
        low, high: how far the ratio may fall and rise; None: no bound.
        dual: c > 1; where A < 0 the loss is at most -c A (Ye et al. 2020). None: off.
        cap: largest ratio of the first term, for either sign of A (TRL's `delta`, two-sided
            clipping of https://arxiv.org/abs/2505.07291). None: off.
    """
    # The cap applies to the value alone, so a straight-through gradient is unchanged.
    ratio = capped_ratio(log_ratio)
    bound = jnp.clip(ratio, _one_less(low), None if high is None else 1.0 + high)
    ratio = ratio if cap is None else jnp.minimum(ratio, cap)
    unclipped, clipped = -ratio * advantages, -bound * advantages
    loss = jnp.maximum(unclipped, clipped)
    stats = {"clip_fraction": masked(clipped > unclipped, mask)}
    if dual is not None:
        largest = -dual * advantages
        over = (advantages < 0) & (loss > largest)
        loss = jnp.where(over, largest, loss)
        stats["dual_clip_fraction"] = masked(over, mask)
    return loss, stats


def cispo(
    log_ratio: jax.Array,
    advantages: jax.Array,
    logprobs: jax.Array,
    mask: jax.Array,
    low: float | None,
    high: float | None,
) -> WithStats:
    r"""CISPO's :math:`-\mathrm{sg}(\mathrm{clip}(\rho, 1-low, 1+high))\,A\,\ell`.

    MiniMax-M1 (https://arxiv.org/abs/2506.13585): the weight is clipped, and every token keeps a
    gradient. Bounds as in verl and NeMo-RL; TRL and ScaleRL state the upper bound itself (5.0 is
    high = 4).
    """
    ratio = capped_ratio(log_ratio)
    weight = jnp.clip(ratio, _one_less(low), None if high is None else 1.0 + high)
    stats = {"clip_fraction": masked(weight != ratio, mask)}
    return -jax.lax.stop_gradient(weight) * advantages * logprobs, stats


def sapo(
    log_ratio: jax.Array, advantages: jax.Array, positive: float, negative: float
) -> WithStats:
    r"""SAPO's soft gate :math:`-\frac4\tau\,\sigma(\tau(\rho - 1))\,A` instead of a clip.

    As in TRL; tau is `positive` where A > 0, else `negative`. On-policy its gradient is PPO's.
    """
    ratio = capped_ratio(log_ratio)
    tau = jnp.where(advantages > 0, positive, negative)
    return -4.0 / tau * jax.nn.sigmoid(tau * (ratio - 1.0)) * advantages, {}


def dppo(
    log_ratio: jax.Array,
    advantages: jax.Array,
    logprobs: jax.Array,
    mask: jax.Array,
    low: float,
    high: float,
    cap: float,
    by_kl: bool = False,
) -> WithStats:
    r"""DPPO: masks tokens whose probability moved too far (https://arxiv.org/abs/2602.04879).

    .. math:: L = -\mathrm{sg}(\min(\rho, cap))\,A\,\ell\,M, \qquad
              M = 1[p - p_{old} \le high] \text{ if } A > 0 \text{ else } 1[p - p_{old} \ge -low]

    As in verl (`core_algos.py`), where cap is 20; :math:`p = e^{\ell}`. The distance is the binary
    total variation; with `by_kl` the binary KL, :math:`p_{old} \log\frac{p_{old}}{p} + (1 -
    p_{old}) \log\frac{1 - p_{old}}{1 - p}`, of probabilities that rose (A > 0) or fell.
    """
    old, new = jnp.exp(logprobs - log_ratio), jnp.exp(logprobs)
    change = new - old
    if by_kl:
        rest = jnp.maximum(1.0 - old, _MIN_PROBABILITY), jnp.maximum(1.0 - new, _MIN_PROBABILITY)
        kl = -old * log_ratio + rest[0] * jnp.log(rest[0] / rest[1])
        change = jnp.sign(change) * kl
    kept = jnp.where(advantages > 0, change <= high, change >= -low)
    weight = jnp.minimum(capped_ratio(log_ratio), cap) * kept
    stats = {"clip_fraction": masked(~kept, mask)}
    return -jax.lax.stop_gradient(weight) * advantages * logprobs, stats


def _one_less(low: float | None) -> float | None:
    return None if low is None else 1.0 - low


COVARIANCES = ("none", "clip", "kl")


def token_covariances(advantages: jax.Array, logprobs: jax.Array, mask: jax.Array) -> jax.Array:
    r"""Covariance of log-prob and advantage per token, float32 [N, L], 0 outside the mask.

    Arguments are [N, L]. Entropy is lost fastest at tokens with a large covariance.

    Cui et al. 2025, "The Entropy Mechanism of Reinforcement Learning for Reasoning Language Models"
    (https://arxiv.org/abs/2505.22617), as in verl's `core_algos.py`. With means over the step's
    tokens

    .. math:: cov_t = (A_t - \bar A)(\ell_t - \bar\ell)

    Here :math:`\ell` is the log-prob before the first update, which is known before a step is split
    into micro-batches; verl takes that of the trained policy, per micro-batch. Both are equal in
    the first update of a step that is not split.
    """
    advantages, logprobs = masked(advantages, mask), masked(logprobs, mask)
    made = (advantages - masked_mean(advantages, mask)) * (logprobs - masked_mean(logprobs, mask))
    return masked(made, mask)


def select_by_covariance(
    covariance: jax.Array,
    mask: jax.Array,
    kind: str,
    share: float,
    low: float,
    high: float,
    tokens: jax.Array,
) -> jax.Array:
    """Tokens for clip-cov or kl-cov: `share` of those in the mask, at least one.

    Args:
        covariance: float [N, L], from `token_covariances`.
        mask: bool [N, L].
        kind: "clip": a random choice of tokens with a covariance between low and high; "kl": the
            tokens with the largest covariance.
        share: share of the tokens in the mask, above 0.
        low, high: for "clip".
        tokens: int [N, L], the responses; they seed the choice, so the same batch gives the same.

    Returns:
        bool [N, L].
    """
    mask = jnp.asarray(mask, bool)
    count = jnp.maximum(jnp.floor(share * jnp.sum(mask) + 1e-6).astype(jnp.int32), 1)
    if kind == "clip":
        allowed = mask & (covariance > low) & (covariance < high)
        places = jnp.arange(1, mask.size + 1, dtype=jnp.uint32).reshape(mask.shape)
        seed = jnp.sum(jnp.where(mask, tokens, 0).astype(jnp.uint32) * places)
        order = jax.random.uniform(jax.random.fold_in(jax.random.key(0), seed), mask.shape)
    else:
        allowed, order = mask, -covariance
    ranked = jnp.argsort(jnp.where(allowed, order, jnp.inf).ravel(), stable=True)
    rank = jnp.zeros(mask.size, jnp.int32).at[ranked].set(jnp.arange(mask.size, dtype=jnp.int32))
    return allowed & (rank.reshape(mask.shape) < count)
