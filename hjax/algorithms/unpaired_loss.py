r"""Losses of unpaired responses labelled right or wrong: KTO's, and that of PRIME's reward model.

A response's loss is stored at the first token of its row (`SequenceLoss`).
"""

from dataclasses import dataclass
from typing import ClassVar

import chex
import jax
import jax.numpy as jnp

from hjax.algorithms.aggregation import (
    Batch,
    SequenceLoss,
    WithStats,
    at_first_token,
    check_not_negative,
    valid_rows,
)
from hjax.algorithms.masks import masked
from hjax.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class RowLoss(SequenceLoss):
    """Base of both: one loss per row, averaged over the valid rows.

    Attributes:
        beta: implicit reward of a response per nat of its log-ratio to the reference.
    """

    beta: float

    def __post_init__(self) -> None:
        if not self.beta > 0:
            raise ConfigError(f"beta={self.beta} must be above 0")

    def prepared(self, batch: Batch) -> dict[str, jax.Array]:
        """`positive_share`, float32 scalar: share of right rows in the whole optimizer step."""
        kept, right = valid_rows(batch), _is_positive(batch)
        return {"positive_share": jnp.sum(kept & right) / jnp.maximum(jnp.sum(kept), 1)}

    def _rewards_by_label(self, value: jax.Array, batch: Batch) -> dict[str, jax.Array]:
        """`chosen_reward` and `rejected_reward`: means over the right and over the wrong rows."""
        right, share = _is_positive(batch), batch["positive_share"]
        return {
            "chosen_reward": jnp.where(right, value / jnp.maximum(share, 1e-9), 0.0),
            "rejected_reward": jnp.where(right, 0.0, value / jnp.maximum(1.0 - share, 1e-9)),
        }


@dataclass(frozen=True, kw_only=True)
class UnpairedLoss(RowLoss):
    r"""KTO (Ethayarajh et al. 2024, https://arxiv.org/abs/2402.01306), as in TRL.

    With the log-ratio :math:`h = \sum_t (\ell - \ell_{ref})` of a response, the KL baseline z and
    the logistic function s:

    .. math:: L = \lambda_D (1 - s(\beta (h - z))) \text{ if it is right, else }
              \lambda_U (1 - s(\beta (z - h)))

    Attributes:
        beta: above 0.
        desirable, undesirable: lambda of right and wrong responses, 0 or more.
    """

    scalars: ClassVar[tuple[str, ...]] = ("kl_baseline",)

    beta: float = 0.1
    desirable: float = 1.0
    undesirable: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_not_negative(self, "desirable", "undesirable")

    @property
    def needs(self) -> tuple[str, ...]:
        """Batch keys that the call reads."""
        return ("response_mask", "ref_logprobs", "positive", *self.scalars)

    def __call__(self, logprobs: jax.Array, entropy: jax.Array | None, batch: Batch) -> WithStats:
        """Losses and statistics of responses, each at the first token of its row.

        Args:
            logprobs: float [N, L], of the response tokens.
            entropy: not read.
            batch: `response_mask` bool [N, L], `ref_logprobs` float [N, L], `positive` float
                [N, L], 1 on the tokens of right responses; `kl_baseline` float scalar, z in nats
                per response; and the entries of `prepared`.

        Returns:
            (float32 [N, L], stats of that shape without gradient): `accuracy` (1 on the right side
            of the baseline), `chosen_reward` and `rejected_reward` (beta h of right and of wrong
            responses), `kl` (z).
        """
        mask = jnp.asarray(batch["response_mask"], bool)
        chex.assert_equal_shape([logprobs, mask, batch["ref_logprobs"], batch["positive"]])
        baseline, right = batch["kl_baseline"], _is_positive(batch)
        ratio = _log_ratio(logprobs, batch)
        side = jnp.where(right, 1.0, -1.0)
        weight = jnp.where(right, self.desirable, self.undesirable)
        loss = weight * (1.0 - jax.nn.sigmoid(side * self.beta * (ratio - baseline)))
        stats = {
            "accuracy": (side * (ratio - baseline) > 0).astype(jnp.float32),
            "kl": jnp.broadcast_to(baseline, ratio.shape),
            **self._rewards_by_label(self.beta * ratio, batch),
        }
        placed = {name: at_first_token(value, mask) for name, value in stats.items()}
        return at_first_token(loss, mask), jax.lax.stop_gradient(placed)


@dataclass(frozen=True, kw_only=True)
class ImplicitRewardLoss(RowLoss):
    r"""Cross-entropy on outcomes for PRIME's implicit reward model, a language model.

    .. math:: L = \mathrm{BCE}(s(\beta \sum_t (\ell_\phi - \ell_{ref})), y), \qquad y \in \{0, 1\}

    https://arxiv.org/abs/2502.01456, and `compute_ce_dpo_loss_rm` of verl's recipe. The reward of
    a token is :math:`\beta (\ell_\phi - \ell_{ref})`.

    Attributes:
        beta: above 0; .05 in the paper.
    """

    beta: float = 0.05

    @property
    def needs(self) -> tuple[str, ...]:
        """Batch keys that the call reads."""
        return ("response_mask", "ref_logprobs", "positive")

    def __call__(self, logprobs: jax.Array, entropy: jax.Array | None, batch: Batch) -> WithStats:
        """Losses and statistics of responses, each at the first token of its row.

        Args:
            logprobs: float [N, L], of the response tokens under the reward model.
            entropy: not read.
            batch: as for `UnpairedLoss`, without `kl_baseline`.

        Returns:
            (float32 [N, L], stats of that shape without gradient): `accuracy` (1 where the sign of
            the reward agrees with the outcome), `chosen_reward` and `rejected_reward`.
        """
        mask = jnp.asarray(batch["response_mask"], bool)
        chex.assert_equal_shape([logprobs, *(batch[key] for key in self.needs)])
        reward, right = self.beta * _log_ratio(logprobs, batch), _is_positive(batch)
        loss = -jax.nn.log_sigmoid(jnp.where(right, reward, -reward))
        accuracy = ((reward > 0) == right).astype(jnp.float32)
        stats = {"accuracy": accuracy, **self._rewards_by_label(reward, batch)}
        placed = {name: at_first_token(value, mask) for name, value in stats.items()}
        return at_first_token(loss, mask), jax.lax.stop_gradient(placed)


def _log_ratio(logprobs: jax.Array, batch: Batch) -> jax.Array:
    mask = batch["response_mask"]
    return jnp.sum(masked(logprobs, mask) - masked(batch["ref_logprobs"], mask), axis=1)


def _is_positive(batch: Batch) -> jax.Array:
    """bool [N]: rows whose tokens are marked `positive`."""
    return jnp.any(jnp.asarray(batch["positive"]) * jnp.asarray(batch["response_mask"]) > 0, axis=1)
