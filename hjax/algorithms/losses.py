r"""Losses: value loss, supervised loss, and the protocol that every loss implements.

A loss is a frozen, picklable dataclass that is sent to the worker. It computes per-token terms,
which are summed with weights that are fixed for a whole optimizer step. Its protocol:

- `needs`: the batch keys that the call reads. `weights` also reads `row_mask` (bool [N], false for
  unscored or padding rows) where the batch has it.
- `scalars` (optional): those of `needs` that are one number for all rows.
- `per_row` (optional): those of `needs` that are one number per row, [N].
- `of_tokens` (optional): the entry of `needs` with token ids, int [N, L, k]; the loss takes their
  log-probs [N, L, k] instead of those of the responses.
- `shapes(vocabulary)` (optional): trailing shape (after N and L) and dtype of the `needs` that are
  not float [N, L].
- `tempered` (default True): whether log-probs are taken at the rollout's temperature.
- `weights(batch) -> [N, L]` for the loss; `stat_weights(batch) -> [N, L]` for the statistics, by
  default their mean over tokens (`hjax.algorithms.aggregation`).
- `prepared(batch) -> dict` (optional): further entries that the call reads, computed from the
  whole optimizer step before it is split into micro-batches.
- `loss(output [N, L], ..., batch) -> (token_loss [N, L], stats: dict of [N, L])`, float32, 0
  outside the mask. Model outputs on padding have no influence, not even as NaN.

Constructors refuse unknown options with one line. Wrong shapes raise AssertionError at trace time,
where they would otherwise broadcast silently.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import chex
import jax
import jax.numpy as jnp

from hjax.algorithms.aggregation import (
    Batch,
    Loss,
    Stats,
    TokenLoss,
    WithStats,
    aggregation_weights,
)
from hjax.algorithms.masks import constant_where, masked, masked_variance
from hjax.algorithms.policy_loss import PolicyLoss
from hjax.errors import ConfigError

__all__ = ["PolicyLoss", "SupervisedLoss", "ValueLoss", "aggregation_weights", "explained_variance"]


@dataclass(frozen=True, kw_only=True)
class ValueLoss(TokenLoss):
    r"""Squared error of the critic, with PPO's clipping around the old values.

    .. math:: L = \tfrac12 \max\left((V - R)^2,\
              (V_{old} + \mathrm{clip}(V - V_{old}, \pm\epsilon) - R)^2\right)

    As in OpenAI's baselines (`ppo2`), TRL and verl, with their factor 1/2.

    Attributes:
        clip: epsilon, in the unit of the values; None for the plain squared error.
        aggregation, max_length: as in `PolicyLoss`.
        values_key, returns_key: batch keys of V_old and R (a cost critic has other keys).
    """

    clip: float | None = 0.2
    values_key: str = "values"
    returns_key: str = "returns"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.clip is not None and not self.clip > 0:
            raise ConfigError(f"value clip={self.clip} must be above 0, or None for no clipping")

    @property
    def needs(self) -> tuple[str, ...]:
        """Batch keys that the call reads."""
        old = () if self.clip is None else (self.values_key,)
        return ("response_mask", self.returns_key, *old)

    def __call__(self, values: jax.Array, batch: Batch) -> WithStats:
        """Token losses and statistics.

        Args:
            values: float [N, L], of the critic being trained.
            batch: the keys of `needs`: `response_mask` bool [N, L], the others float [N, L].

        Returns:
            (token_loss, stats), all float32 [N, L]. Stats, without gradient: `value`, and with
            clipping `clip_fraction` (1 where the clipped error is the larger one).
        """
        mask = batch["response_mask"]
        chex.assert_equal_shape([values, *(batch[key] for key in self.needs)])
        values, returns = masked(values, mask), masked(batch[self.returns_key], mask)
        stats: Stats = {"value": values}
        error = jnp.square(values - returns)
        if self.clip is not None:
            old = masked(batch[self.values_key], mask)
            clipped = old + jnp.clip(values - old, -self.clip, self.clip)
            clipped_error = jnp.square(clipped - returns)
            # Within the clip both errors are equal up to rounding, which does not count as clipped.
            outside = jnp.abs(values - old) > self.clip
            stats["clip_fraction"] = masked(outside & (clipped_error > error), mask)
            error = jnp.maximum(error, clipped_error)
        return 0.5 * error, jax.lax.stop_gradient(stats)


@dataclass(frozen=True, kw_only=True)
class SupervisedLoss(TokenLoss):
    """Negative log-likelihood of the response tokens, for SFT and the warm start."""

    # At temperature 1, whatever the rollout's temperature is.
    tempered: ClassVar[bool] = False

    @property
    def needs(self) -> tuple[str, ...]:
        """Batch keys that the call reads."""
        return ("response_mask",)

    def __call__(self, logprobs: jax.Array, entropy: jax.Array | None, batch: Batch) -> WithStats:
        """Token losses (nats) and statistics: `entropy`, if it is passed.

        Args:
            logprobs: float [N, L], of the demonstration's tokens.
            entropy: float [N, L] or None.
            batch: `response_mask` bool [N, L].
        """
        mask = batch["response_mask"]
        chex.assert_equal_shape([logprobs, mask])
        stats = {} if entropy is None else {"entropy": masked(entropy, mask)}
        return -masked(logprobs, mask), jax.lax.stop_gradient(stats)


def explained_variance(values: jax.Array, returns: jax.Array, mask: jax.Array) -> jax.Array:
    """Share of the returns' variance that the values explain: 1 - Var(R - V) / Var(R).

    Args:
        values, returns: float [N, L].
        mask: bool [N, L].

    Returns:
        float32 scalar, at most 1; 0 (never NaN) where the returns are constant.
    """
    chex.assert_equal_shape([values, returns, mask])
    mask = jnp.asarray(mask, bool)
    variance = masked_variance(returns, mask)
    residual = masked_variance(masked(returns, mask) - masked(values, mask), mask)
    vary = ~constant_where(returns, mask)
    return jnp.where(vary, 1.0 - residual / jnp.where(vary, variance, 1.0), 0.0)


def check_protocol(loss: Any, whose: str) -> None:
    """Check that an object has what the protocol asks of a loss, before anything is compiled.

    Args:
      loss: what an algorithm's ``losses`` has for a role with a model that hjax builds.
      whose: the algorithm and the role, for the message.

    Raises:
      ConfigError: it lacks something, or holds a loss whose ``prepared`` it does not pass on.
    """
    lacks = [name for name in ("needs", "weights", "stat_weights") if not hasattr(loss, name)]
    lacks += [] if callable(loss) else ["__call__"]
    held = [each for each in getattr(loss, "__dict__", {}).values() if isinstance(each, Loss)]
    if any(type(each).prepared is not Loss.prepared for each in held):
        lacks += [] if hasattr(loss, "prepared") else ["prepared"]
    if lacks:
        raise ConfigError(
            f"{whose}: the loss {type(loss).__name__} lacks {', '.join(lacks)}; inherit from "
            "the loss that it changes, or from hjax.algorithms.aggregation.TokenLoss "
            "(docs/losses.md has the protocol)"
        )
