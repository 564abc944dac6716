r"""Weights for rollouts of other weights, or of a sampler with other numbers, than learning's.

With :math:`\mu` the log-prob of the distribution that sampled and :math:`\ell_{old}` the actor's
own as learning starts, per token :math:`w = e^{\ell_{old} - \mu}`, then cut in one of several ways.
No gradient goes through a weight; the KL and the entropy are not weighed.
"""

import jax
import jax.numpy as jnp

from hjax.algorithms.aggregation import Stats
from hjax.algorithms.masks import keep
from hjax.algorithms.surrogates import capped_ratio
from hjax.errors import ConfigError

# Name -> bounds (low, high) that its source gives; None: there is none.
CORRECTIONS: dict[str, tuple[float | None, float | None]] = {
    "none": (None, None),
    "decoupled": (None, None),
    "truncated": (0.0, 2.0),
    "icepop": (0.5, 5.0),
    "sequence_mask": (0.999, 1.002),
    "sequence_sum_mask": (None, 3.0),
}


def bounds_of(kind: str, low: float | None, high: float | None) -> tuple[float, float]:
    """The bounds of a correction: those given, else its source's, else none.

    Raises:
        ConfigError: an unknown kind, a bound that it does not have, or bounds that leave nothing.
    """
    if kind not in CORRECTIONS:
        raise ConfigError(f"correction={kind!r} is not built: use {', '.join(CORRECTIONS)}")
    own_low, own_high = CORRECTIONS[kind]
    for name, given, own in (("low", low, own_low), ("cap", high, own_high)):
        if given is not None and own is None:
            raise ConfigError(
                f"correction_{name}={given} has no effect with correction={kind!r}: leave it out"
            )
        if given is not None and not given > 0:
            raise ConfigError(f"correction_{name}={given} must be above 0 (usually {own})")
    least = low if low is not None else own_low if own_low is not None else 0.0
    most = high if high is not None else own_high if own_high is not None else float("inf")
    if not least < most:
        raise ConfigError(f"correction_low={least} must be below correction_cap={most}")
    return least, most


def correction_weights(
    old: jax.Array, sampler: jax.Array, mask: jax.Array, kind: str, low: float, high: float
) -> tuple[jax.Array, Stats]:
    r"""Weights of the surrogate.

    =================  =========================================================================
    kind               weight of a token
    =================  =========================================================================
    "decoupled"        w: decoupled PPO (AReaL, https://arxiv.org/abs/2505.24298)
    "truncated"        min(w, high): truncated importance sampling (Yao et al. 2025); with a low
                       one max(low, min(w, high)), as in OpenRLHF
    "icepop"           w where low <= w <= high, else 0 (IcePop, as in NeMo-RL and OpenRLHF)
    "sequence_mask"    w where the geometric mean of the response's w lies in low to high, else
                       the whole response has 0 (NeMo-RL)
    "sequence_sum_mask"  the product of the response's w where that is at most high, else 0: longer
                       responses are left out more often (TRL)
    =================  =========================================================================

    Args:
        old, sampler: float [N, L], log-probs.
        mask: bool [N, L].
        kind: see above.
        low, high: of `bounds_of`.

    Returns:
        (float32 [N, L] without gradient; statistics `correction`, and `correction_capped`, 1
        where a bound decides the weight).
    """
    difference = keep(old, mask) - keep(sampler, mask)
    weight = capped_ratio(difference)
    stats: Stats = {}
    if kind == "truncated":
        stats["correction_capped"] = keep((weight > high) | (weight < low), mask)
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
        stats["correction_capped"] = keep(~kept, mask)
        weight = jnp.where(kept, weight, 0.0)
    stats["correction"] = keep(weight, mask)
    return jax.lax.stop_gradient(weight), stats
