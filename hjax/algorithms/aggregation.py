r"""Loss aggregation and normalisation: token weights that are fixed for a whole optimizer step.

A worker computes `weights = loss.weights(batch)` once over all rows of an optimizer step. It splits
batch and weights into micro-batches and accumulates `sum(weights * token_loss)` and its gradient.
So gradient accumulation, packing and any mesh give exactly the loss of the whole step; a mean per
micro-batch would weight tokens by batch size.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import chex
import jax
import jax.numpy as jnp

from hjax.errors import ConfigError

Batch = Mapping[str, Any]
Stats = dict[str, jax.Array]
WithStats = tuple[jax.Array, Stats]  # a result and what is logged of it
Aggregation = Literal["token", "sequence", "constant", "sum"]
AGGREGATIONS = ("token", "sequence", "constant", "sum")


def aggregation_weights(
    mask: jax.Array,
    aggregation: Aggregation = "token",
    max_length: int | None = None,
    row_mask: jax.Array | None = None,
    episode: jax.Array | None = None,
) -> jax.Array:
    r"""Token weights w of one optimizer step, whose loss is sum(w * token_loss).

    ============  ===========================================  ================================
    aggregation   weight of a token of response i              used by
    ============  ===========================================  ================================
    "token"       1 / sum of all response tokens               PPO, DAPO
    "sequence"    1 / (tokens of i * non-empty responses)      GRPO
    "constant"    1 / (responses * max_length)                 Dr.GRPO
    "sum"         1 / responses: tokens are summed             RLOO, REINFORCE
    ============  ===========================================  ================================

    Args:
        mask: bool [N, L], all rows of the step.
        aggregation: see above.
        max_length: tokens, the divisor of "constant" (the generation limit); else None.
        row_mask: bool [N]; false rows get weight 0 and are left out of every count.
        episode: int [N], of several rows of one response (an episode): what is said of a response
            then is of all its rows together; None: each row is one.

    Returns:
        float32 [N, L]; all zeros if no token is left.

    Raises:
        ConfigError: unknown `aggregation`, or `max_length` is missing or has no effect.

    Example:
        >>> aggregation_weights(jnp.array([[1, 1], [1, 0]]), "sequence")
        Array([[0.25, 0.25],
               [0.5 , 0.  ]], dtype=float32)
    """
    check_aggregation(aggregation, max_length)
    mask = jnp.asarray(mask, bool)
    chex.assert_rank(mask, 2)
    rows = jnp.ones(mask.shape[0], bool) if row_mask is None else jnp.asarray(row_mask, bool)
    chex.assert_shape(rows, mask.shape[:1])
    mask = mask & rows[:, None]
    lengths, first = jnp.sum(mask, axis=1), jnp.ones(rows.shape, bool)
    if episode is not None:
        same = episode[:, None] == episode[None, :]
        first = jnp.argmax(same, axis=1) == jnp.arange(len(rows))
        lengths, rows = jnp.sum(same * lengths, axis=1), jnp.any(same & rows, axis=1)
    if aggregation == "token":
        count = jnp.sum(mask)
    elif aggregation == "sequence":
        count = lengths[:, None] * jnp.sum(first & (lengths > 0))
    elif aggregation == "sum":
        count = jnp.sum(first & rows)
    else:
        assert max_length is not None
        # In floating point, because rows * max_length may exceed 2^31.
        count = jnp.sum(first & rows).astype(jnp.float32) * max_length
    return mask / jnp.maximum(count, 1).astype(jnp.float32)


@dataclass(frozen=True, kw_only=True)
class Loss:
    """Base of all losses."""

    # Whether the loss takes log-probs at the rollout's temperature.
    tempered: ClassVar[bool] = True

    @property
    def needs_entropy(self) -> bool:
        """Whether the entropy is part of the loss; False unless a class overrides it."""
        return False

    def weights(self, batch: Batch) -> jax.Array:
        """Weights [N, L] of the token losses, for `batch` = the whole optimizer step."""
        raise NotImplementedError(f"{type(self).__name__} must define weights")

    def stat_weights(self, batch: Batch) -> jax.Array:
        """Weights [N, L] that average the statistics; by default the loss weights."""
        return self.weights(batch)

    def prepared(self, batch: Batch) -> dict[str, jax.Array]:
        """Further entries that the loss reads, computed from the whole optimizer step."""
        return {}


@dataclass(frozen=True, kw_only=True)
class TokenLoss(Loss):
    """A loss that is a sum over tokens."""

    aggregation: Aggregation = "token"
    max_length: int | None = None

    def __post_init__(self) -> None:
        check_aggregation(self.aggregation, self.max_length)

    def weights(self, batch: Batch) -> jax.Array:
        """Weights [N, L] of the token losses, for `batch` = the whole optimizer step."""
        mask, rows = batch["response_mask"], batch.get("row_mask")
        return aggregation_weights(
            mask, self.aggregation, self.max_length, rows, batch.get("episode")
        )

    def stat_weights(self, batch: Batch) -> jax.Array:
        """Weights [N, L] that average the statistics over the tokens of the optimizer step."""
        return aggregation_weights(batch["response_mask"], row_mask=batch.get("row_mask"))


@dataclass(frozen=True, kw_only=True)
class SequenceLoss(Loss):
    """A loss of whole responses, or of units of several responses such as pairs.

    It is not a sum over tokens. Its value is stored at the first token of the unit's first row, so
    that the weighted sum over tokens is a weighted sum over units.
    """

    # Rows of a unit; no micro-batch splits a unit.
    unit: ClassVar[int] = 1

    def weights(self, batch: Batch) -> jax.Array:
        """float32 [N, L], 1 / units at the first token of each unit: the mean over the step."""
        units = valid_rows(batch).reshape(-1, self.unit).all(axis=1)
        return at_first_token(units / jnp.maximum(units.sum(), 1), batch["response_mask"])


def at_first_token(values: jax.Array, mask: jax.Array) -> jax.Array:
    """float32 [N, L] of the mask's shape: one value per unit of consecutive rows, stored at the
    first token of its first row, 0 elsewhere."""
    rows, length = mask.shape
    made = jnp.zeros((len(values), rows // len(values), length), jnp.float32)
    return made.at[:, 0, 0].set(values).reshape(mask.shape)


def valid_rows(batch: Batch) -> jax.Array:
    """bool [N]: the batch's `row_mask`; all true without one."""
    chex.assert_rank(batch["response_mask"], 2)
    rows = batch.get("row_mask")
    count = batch["response_mask"].shape[0]
    return jnp.ones(count, bool) if rows is None else jnp.asarray(rows, bool)


def check_entries(batch: Batch, keys: Iterable[str], shape: tuple[int, ...]) -> None:
    """Raise AssertionError that names the first batch entry of another shape."""
    for key in keys:
        chex.assert_shape(batch[key], shape, custom_message=f"the batch's {key!r}")


def check_known(name: str, value: Any, allowed: Iterable[str]) -> None:
    """Raise ConfigError unless a loss's option has one of the `allowed` values."""
    if value not in allowed:
        raise ConfigError(f"{name}={value!r} is not built: use {', '.join(allowed)}")


def check_not_negative(loss: Any, *names: str) -> None:
    """Raise ConfigError if one of a loss's numbers of these names is below 0, or NaN."""
    for name in names:
        if not getattr(loss, name) >= 0:
            raise ConfigError(f"{name}={getattr(loss, name)} must be 0 or more")


def check_aggregation(aggregation: str, max_length: int | None) -> None:
    """Raise ConfigError unless `aggregation` is known and `max_length` goes with it."""
    check_known("aggregation", aggregation, AGGREGATIONS)
    if aggregation == "constant" and (max_length is None or max_length < 1):
        raise ConfigError(
            f"aggregation='constant' divides by max_length={max_length}: set it to the longest "
            "response allowed, in tokens"
        )
    if aggregation != "constant" and max_length is not None:
        raise ConfigError(
            f"max_length={max_length} has no effect with aggregation={aggregation!r}: leave it "
            "out, or use aggregation='constant'"
        )
