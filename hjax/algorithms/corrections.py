r"""Importance-sampling correction of off-policy rollouts: stale weights, or sampler numerics.

With the behaviour log-prob :math:`\mu` (of the distribution that sampled) and the actor's
log-prob :math:`\ell_{old}` before the first update, the importance weight of a token is
:math:`w = e^{\ell_{old} - \mu}`, truncated or masked by one of several methods. No gradient flows
through the weights; they apply to neither the KL nor the entropy.
"""

import jax
import jax.numpy as jnp

from hjax.algorithms.aggregation import Stats, WithStats, check_known
from hjax.algorithms.masks import masked
from hjax.algorithms.surrogates import capped_ratio
from hjax.errors import ConfigError

# Method -> bounds (low, high) of its paper or code; None: no such bound.
CORRECTIONS: dict[str, tuple[float | None, float | None]] = {
    "none": (None, None),
    "decoupled": (None, None),
    "truncated": (0.0, 2.0),
    "icepop": (0.5, 5.0),
    "sequence_mask": (0.999, 1.002),
    "sequence_sum_mask": (None, 3.0),
}


def correction_bounds(kind: str, low: float | None, high: float | None) -> tuple[float, float]:
    """The bounds of a correction: the arguments, else the defaults of its source, else none.

    Raises:
        ConfigError: an unknown kind, a bound that the kind does not have, or an empty range.
    """
    check_known("correction", kind, CORRECTIONS)
    default_low, default_high = CORRECTIONS[kind]
    for name, value, default in (("low", low, default_low), ("cap", high, default_high)):
        if value is not None and default is None:
            raise ConfigError(
                f"correction_{name}={value} has no effect with correction={kind!r}: leave it out"
            )
        if value is not None and not value > 0:
            raise ConfigError(f"correction_{name}={value} must be above 0 (usually {default})")
    low = low if low is not None else default_low if default_low is not None else 0.0
    high = high if high is not None else default_high if default_high is not None else float("inf")
    if not low < high:
        raise ConfigError(f"correction_low={low} must be below correction_cap={high}")
    return low, high


def correction_weights(
    old: jax.Array, sampler: jax.Array, mask: jax.Array, kind: str, low: float, high: float
) -> WithStats:
    r"""Importance weights of the surrogate.

    =================  =========================================================================
    kind               weight of a token
    =================  =========================================================================
    "decoupled"        w: decoupled PPO (AReaL, https://arxiv.org/abs/2505.24298)
    "truncated"        min(w, high): truncated importance sampling, TIS (Yao et al. 2025); with
                       `low` max(low, min(w, high)), as in OpenRLHF
    "icepop"           w where low <= w <= high, else 0 (IcePop, as in NeMo-RL and OpenRLHF)
    "sequence_mask"    w where the geometric mean of the response's w lies in low to high, else
                       0 for the whole response (NeMo-RL)
    "sequence_sum_mask"  the product of the response's w where it is at most high, else 0: longer
                       responses are masked more often (TRL)
    =================  =========================================================================

    Args:
        old, sampler: float [N, L], log-probs.
        mask: bool [N, L].
        kind: see above.
        low, high: from `correction_bounds`.

    Returns:
        (float32 [N, L] without gradient; statistics `correction`, and `correction_capped`, 1
        where a bound determines the weight).
    """
    difference = masked(old, mask) - masked(sampler, mask)
    weight = capped_ratio(difference)
    stats: Stats = {}
    if kind == "truncated":
        stats["correction_capped"] = masked((weight > high) | (weight < low), mask)
        weight = jnp.clip(weight, low, high)
    elif kind != "decoupled":
        if kind == "sequence_sum_mask":
            product = capped_ratio(jnp.sum(difference, axis=1, keepdims=True))
            weight = jnp.broadcast_to(product, weight.shape)
        measured = weight
        if kind == "sequence_mask":
            tokens = jnp.sum(jnp.asarray(mask, bool), axis=1, keepdims=True)
            mean = jnp.sum(difference, axis=1, keepdims=True) / jnp.maximum(tokens, 1)
            measured = jnp.broadcast_to(capped_ratio(mean), weight.shape)
        kept = (measured >= low) & (measured <= high)
        stats["correction_capped"] = masked(~kept, mask)
        weight = jnp.where(kept, weight, 0.0)
    stats["correction"] = masked(weight, mask)
    return jax.lax.stop_gradient(weight), stats
