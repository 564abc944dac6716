r"""Preference losses (DPO family): a chosen and a rejected response in adjacent rows.

A pair's loss is stored at the first token of its chosen row (`SequenceLoss`).
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import chex
import jax
import jax.numpy as jnp

from hjax.algorithms.aggregation import (
    Batch,
    SequenceLoss,
    WithStats,
    at_first_token,
    check_known,
    check_not_negative,
)
from hjax.algorithms.masks import masked
from hjax.errors import ConfigError

PAIR_LOSSES = ("sigmoid", "ipo", "ipo_sum", "hinge", "robust", "odds", "margin")
NLL_OVER = ("response", "batch")
# Losses that compare with the reference.
REFERENCE_KINDS = ("sigmoid", "ipo", "ipo_sum", "hinge", "robust")


@dataclass(frozen=True, kw_only=True)
class PairLoss(SequenceLoss):
    r"""The DPO family as one loss with switches.

    With the difference of the pair's log-ratios :math:`\Delta = (\ell_w - \ell_{ref,w}) - (\ell_l -
    \ell_{ref,l})`, sums over the responses' tokens, and means :math:`\bar\ell`:

    ============  ==============================================================================
    kind          loss of a pair
    ============  ==============================================================================
    "sigmoid"     -(1 - e) log s(b D) - e log s(-b D), e = `smoothing`: DPO, and with e cDPO
                  (https://arxiv.org/abs/2305.18290; the note by Mitchell 2023)
    "robust"      (-(1 - e) log s(b D) + e log s(-b D)) / (1 - 2 e): https://arxiv.org/abs/2403.00409
    "ipo"         (D' - 1 / (2 b))^2 with D' of means over tokens, as TRL has it "confirmed by the
                  authors" (https://arxiv.org/abs/2310.12036 writes sums)
    "ipo_sum"     the same of D, as that paper's text
    "hinge"       max(0, 1 - b D): SLiC, https://arxiv.org/abs/2305.10425
    "odds"        NLL of the chosen, per token of it, - b log s(log odds of both), odds of means:
                  ORPO, https://arxiv.org/abs/2403.07691
    "margin"      -log s(b (mean_w - mean_l) - `margin`): SimPO, https://arxiv.org/abs/2405.14734
    ============  ==============================================================================

    Attributes:
        kind: see above.
        beta: b, above 0.
        smoothing: e, assumed share of pairs with swapped labels, 0 to below .5.
        margin: for kind "margin", 0 or more.
        nll_coef: weight of the chosen responses' mean negative log-likelihood per token ("odds"
            contains it with weight 1).
        nll_over: tokens of that mean: "response", each chosen response's tokens; "batch", the
            chosen tokens of the whole step, so that long responses weigh more (TRL).

    Example:
        >>> batch = {"response_mask": jnp.ones((2, 1), bool), "ref_logprobs": jnp.zeros((2, 1))}
        >>> PairLoss(beta=1.0)(jnp.log(jnp.array([[0.75], [0.25]])), None, batch)[0][0, 0]
        Array(0.28768206, dtype=float32)
    """

    unit: ClassVar[int] = 2

    kind: Literal["sigmoid", "ipo", "ipo_sum", "hinge", "robust", "odds", "margin"] = "sigmoid"
    beta: float = 0.1
    smoothing: float = 0.0
    margin: float = 0.0
    nll_coef: float = 0.0
    nll_over: Literal["response", "batch"] = "response"

    def __post_init__(self) -> None:
        check_known("kind", self.kind, PAIR_LOSSES)
        if not self.beta > 0:
            raise ConfigError(f"beta={self.beta} must be above 0 (usually 0.1)")
        if not 0 <= self.smoothing < 0.5:
            raise ConfigError(f"smoothing={self.smoothing} must be 0 to below 0.5")
        if self.smoothing and self.kind not in ("sigmoid", "robust"):
            raise ConfigError(
                f"smoothing={self.smoothing} has no effect with kind={self.kind!r}: leave it out, "
                "or use 'sigmoid' or 'robust'"
            )
        if self.kind == "robust" and not self.smoothing:
            raise ConfigError("kind='robust' needs smoothing above 0: it is 'sigmoid' without")
        check_not_negative(self, "margin", "nll_coef")
        if self.margin and self.kind != "margin":
            raise ConfigError(f"margin={self.margin} has no effect with kind={self.kind!r}")
        if self.nll_over not in NLL_OVER:
            raise ConfigError(f"nll_over={self.nll_over!r}: use {' or '.join(NLL_OVER)}")
        if self.nll_over == "batch" and not (self.nll_coef or self.kind == "odds"):
            raise ConfigError(
                "nll_over='batch' has no effect without the likelihood of the chosen responses: "
                "leave it out, or set nll_coef"
            )

    @property
    def needs(self) -> tuple[str, ...]:
        """Batch keys that the call reads."""
        return ("response_mask", *(("ref_logprobs",) if self.kind in REFERENCE_KINDS else ()))

    def prepared(self, batch: Batch) -> dict[str, jax.Array]:
        """`chosen_tokens`, float32 scalar: mean length of a chosen response over the step."""
        mask = jnp.asarray(batch["response_mask"], bool)
        return {"chosen_tokens": jnp.sum(self.weights(batch)[::2, 0] * mask[::2].sum(axis=1))}

    def __call__(self, logprobs: jax.Array, entropy: jax.Array | None, batch: Batch) -> WithStats:
        """Losses and statistics of pairs, each at the first token of its chosen row.

        Args:
            logprobs: float [N, L], of the response tokens; row 2i is the chosen response of pair i,
                row 2i + 1 the rejected one.
            entropy: not read.
            batch: the keys of `needs`, and with `nll_over="batch"` those of `prepared`.

        Returns:
            (float32 [N, L], stats of that shape without gradient): `accuracy` (1 where the chosen
            response is preferred), `margin` (of the implicit rewards), `chosen_reward`,
            `rejected_reward` (beta times the log-ratio to the reference, or without a reference
            beta times the mean log-prob) and `chosen_logprob` (sum over the response, nats).
        """
        mask = jnp.asarray(batch["response_mask"], bool)
        chex.assert_equal_shape([logprobs, *(batch[key] for key in self.needs)])
        logprobs = masked(logprobs, mask)
        count = jnp.maximum(mask.sum(axis=1), 1)
        total = logprobs.sum(axis=1)
        mean = total / count
        if self.kind in REFERENCE_KINDS:
            ratio = total - masked(batch["ref_logprobs"], mask).sum(axis=1)
            score = ratio / count if self.kind == "ipo" else ratio
        else:
            score = mean
        chosen, rejected = score[::2], score[1::2]
        likelihood = mean[::2]
        if self.nll_over == "batch":
            likelihood = total[::2] / jnp.maximum(batch["chosen_tokens"], 1.0)
        loss = self._loss(chosen - rejected, mean, likelihood)
        if self.nll_coef:
            loss = loss - self.nll_coef * likelihood
        stats = {
            "accuracy": (chosen > rejected).astype(jnp.float32),
            "margin": self.beta * (chosen - rejected),
            "chosen_reward": self.beta * chosen,
            "rejected_reward": self.beta * rejected,
            "chosen_logprob": total[::2],
        }
        stats = {name: at_first_token(value, mask) for name, value in stats.items()}
        return at_first_token(loss, mask), jax.lax.stop_gradient(stats)

    def _loss(self, difference: jax.Array, mean: jax.Array, likelihood: jax.Array) -> jax.Array:
        """The loss of each pair, float [pairs].

        Args:
          difference: float [pairs], chosen minus rejected score; mean: float [N], mean log-prob of
            each row; likelihood: float [pairs], mean log-likelihood of the chosen responses.
        """
        logits, smoothing = self.beta * difference, self.smoothing
        if self.kind in ("ipo", "ipo_sum"):
            return jnp.square(difference - 1.0 / (2.0 * self.beta))
        if self.kind == "hinge":
            return jax.nn.relu(1.0 - logits)
        if self.kind == "margin":
            return -jax.nn.log_sigmoid(logits - self.margin)
        if self.kind == "odds":
            # log(p / (1 - p)) of the geometric mean probability, kept below 1 against rounding.
            odds = mean - jnp.log(-jnp.expm1(jnp.minimum(mean, -1e-6)))
            return -likelihood - self.beta * jax.nn.log_sigmoid(odds[::2] - odds[1::2])
        right, swapped = jax.nn.log_sigmoid(logits), jax.nn.log_sigmoid(-logits)
        if self.kind == "robust":
            return (-(1 - smoothing) * right + smoothing * swapped) / (1 - 2 * smoothing)
        return -(1 - smoothing) * right - smoothing * swapped
