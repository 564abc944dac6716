r"""The losses, as per-token terms that are summed with weights fixed for a whole optimizer step.

A worker computes `weights = loss.weights(batch)` once over all rows of an optimizer step, cuts
batch and weights alike into micro-batches, and adds up `sum(weights * token_loss)` and its
gradient. The loss is linear in its tokens, so micro-batches, packing and meshes give exactly the
loss of the whole step; a mean taken per micro-batch would not.

Protocol of every loss, a frozen and picklable dataclass handed to the worker:

- `needs`: the batch keys that the call reads. `row_mask` (bool [N], false for unscored or padding
  rows) is read by `weights` where the batch has it.
- `scalars` (none where absent): those of `needs` that are one number for all rows.
- `tempered` (True where absent): whether log-probs are taken at the rollout's temperature.
- `weights(batch) -> [N, L]`, of the loss; `stat_weights(batch) -> [N, L]`, the mean over tokens,
  with which the statistics are averaged in the same way.
- `loss(output [N, L], ..., batch) -> (token_loss [N, L], stats: dict of [N, L])`, float32, 0 off
  the mask. What the model computes on padding has no influence, not even as NaN.

A part that isn't built is refused by the constructor with one line. Arrays of shapes that do not
belong together are an AssertionError when the call is traced, before NumPy's rules would stretch
one over the other.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal

import chex
import jax
import jax.numpy as jnp

from hjax.algorithms.kl import check_kl_kind, kl_estimate
from hjax.algorithms.masks import keep, masked_variance
from hjax.errors import ConfigError

Batch = Mapping[str, Any]
Stats = dict[str, jax.Array]
Aggregation = Literal["token", "sequence", "constant"]

# exp(20) is far outside any clip range; beyond it float32 overflows (verl clamps there too).
_MAX_LOG_RATIO = 20.0

CORRECTIONS = ("none", "decoupled", "truncated")


def aggregation_weights(
    mask: jax.Array,
    how: Aggregation = "token",
    max_length: int | None = None,
    row_mask: jax.Array | None = None,
) -> jax.Array:
    r"""Weights w of one optimizer step, such that its loss is sum(w * token_loss).

    ============  ===========================================  ================================
    how           weight of a token of response i              used by
    ============  ===========================================  ================================
    "token"       1 / sum of all response tokens               PPO, DAPO
    "sequence"    1 / (tokens of i * non-empty responses)      GRPO
    "constant"    1 / (responses * max_length)                 Dr.GRPO
    ============  ===========================================  ================================

    Args:
        mask: bool [N, L], all rows of the step.
        how: see above.
        max_length: tokens, the constant of "constant" (the generation limit); else None.
        row_mask: bool [N]; a row that is false weighs nothing and leaves every count.

    Returns:
        float32 [N, L]; all zeros if no token is left.

    Raises:
        ConfigError: unknown `how`, or `max_length` missing or out of place.

    Example:
        >>> aggregation_weights(jnp.array([[1, 1], [1, 0]]), "sequence")
        Array([[0.25, 0.25],
               [0.5 , 0.  ]], dtype=float32)
    """
    _check_aggregation(how, max_length)
    mask = jnp.asarray(mask, bool)
    chex.assert_rank(mask, 2)
    rows = jnp.ones(mask.shape[0], bool) if row_mask is None else jnp.asarray(row_mask, bool)
    chex.assert_shape(rows, mask.shape[:1])
    mask = mask & rows[:, None]
    if how == "token":
        count = jnp.sum(mask)
    elif how == "sequence":
        lengths = jnp.sum(mask, axis=1, keepdims=True)
        count = lengths * jnp.sum(lengths > 0)
    else:
        assert max_length is not None
        # As floats: rows * max_length may pass 2^31.
        count = jnp.sum(rows).astype(jnp.float32) * max_length
    return mask / jnp.maximum(count, 1).astype(jnp.float32)


@dataclass(frozen=True, kw_only=True)
class _TokenLoss:
    """What all losses share: how their tokens are added up."""

    # Whether the log-probs handed to the loss are those of the rollout's temperature.
    tempered: ClassVar[bool] = True

    aggregation: Aggregation = "token"
    max_length: int | None = None

    def __post_init__(self) -> None:
        _check_aggregation(self.aggregation, self.max_length)

    def weights(self, batch: Batch) -> jax.Array:
        """Weights [N, L] of the token losses, for `batch` = the whole optimizer step."""
        mask, rows = batch["response_mask"], batch.get("row_mask")
        return aggregation_weights(mask, self.aggregation, self.max_length, rows)

    def stat_weights(self, batch: Batch) -> jax.Array:
        """Weights [N, L] that average the statistics over the tokens of the optimizer step."""
        return aggregation_weights(batch["response_mask"], row_mask=batch.get("row_mask"))


@dataclass(frozen=True, kw_only=True)
class PolicyLoss(_TokenLoss):
    r"""The policy-gradient family as one loss with switches.

    With the ratio :math:`\rho = e^{\ell - \ell_{old}}` and the advantage A of each token:

    .. math:: L = -\min(\rho A,\ \mathrm{clip}(\rho, 1-\epsilon_{low}, 1+\epsilon_{high}) A)
              + \beta\,\mathrm{KL}(\pi\|\pi_{ref}) - c\,H

    (Schulman et al. 2017, https://arxiv.org/abs/1707.06347.) docs/losses.md has the table of
    switches for each published algorithm.

    Attributes:
        clip_low: epsilon_low; None for no lower bound. 0 to 1.
        clip_high: epsilon_high; None for no upper bound. Larger than clip_low in DAPO.
        dual_clip: c > 1; where A < 0 the loss is at most -c A (Ye et al. 2020,
            https://arxiv.org/abs/1912.09729; usually 3). None: off.
        ratio: "token" as above. "sequence": the geometric mean of the response's token ratios,
            as GSPO-token (https://arxiv.org/abs/2507.18071): value of the mean, gradient through
            each token. "none": REINFORCE, L = -A * l, no old log-probs and no clipping.
        aggregation: how tokens are added up, see `aggregation_weights`.
        max_length: tokens, for aggregation "constant".
        kl_coef: beta, of the KL in the loss; 0: none.
        kl_adaptive: beta moves from step to step (`hjax.algorithms.kl.AdaptiveKL`): it is the
            batch's entry `kl_coef`, a float32 scalar, and the field above only its first value.
        kl_estimator: k2, k3, k1+ or k3+; k1 is refused, its gradient has mean zero.
        kl_input_clamp, kl_output_clamp: see `kl_estimate`; None: off.
        entropy_coef: c, of the entropy bonus.
        correction: what weighs the surrogate (neither the KL nor the entropy), with mu the
            behaviour log-prob (`policy_logprobs` of the batch where it has them, else `logprobs`)
            and l_old recomputed by the actor as learning starts. "none": nothing, ratios are taken
            against what the batch says. "decoupled": exp(l_old - mu), decoupled PPO (AReaL,
            https://arxiv.org/abs/2505.24298). "truncated": min(exp(l_old - mu), C), truncated
            importance sampling (Yao et al. 2025, "Your efficient RL framework secretly brings you
            off-policy RL training"). No gradient goes through it.
        correction_cap: C of "truncated".

    Example:
        >>> batch = {"old_logprobs": jnp.log(jnp.array([[0.5]])), "advantages": jnp.ones((1, 1)),
        ...          "response_mask": jnp.ones((1, 1), bool)}
        >>> PolicyLoss()(jnp.log(jnp.array([[0.75]])), None, batch)[0]   # ratio 1.5, cut at 1.2
        Array([[-1.2]], dtype=float32)
    """

    clip_low: float | None = 0.2
    clip_high: float | None = 0.2
    dual_clip: float | None = None
    ratio: Literal["token", "sequence", "none"] = "token"
    kl_coef: float = 0.0
    kl_adaptive: bool = False
    kl_estimator: str = "k3"
    kl_input_clamp: float | None = None
    kl_output_clamp: float | None = None
    entropy_coef: float = 0.0
    correction: Literal["none", "decoupled", "truncated"] = "none"
    correction_cap: float = 2.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.ratio not in ("token", "sequence", "none"):
            raise ConfigError(
                f"ratio={self.ratio!r} is not built: use 'token', 'sequence' or 'none'"
            )
        if self.clip_low is not None and not 0 <= self.clip_low <= 1:
            raise ConfigError(f"clip_low={self.clip_low} must lie in 0 to 1, or be None (no bound)")
        if self.clip_high is not None and not self.clip_high >= 0:
            raise ConfigError(f"clip_high={self.clip_high} must be 0 or more, or None (no bound)")
        if self.dual_clip is not None and not self.dual_clip > 1:
            raise ConfigError(f"dual_clip={self.dual_clip} must be above 1 (usually 3), or None")
        if self.ratio == "none":
            self._refuse_without_ratio("clip_low", "clip_high", "dual_clip")
        self._check_correction()
        for name in ("kl_coef", "entropy_coef"):
            value = getattr(self, name)
            if not isinstance(value, int | float):
                raise ConfigError(
                    f"{name}={value!r} must be a fixed number; a KL coefficient that moves is the "
                    "batch's entry kl_coef, with kl_adaptive=True"
                )
        if not self.kl_coef >= 0:
            raise ConfigError(f"kl_coef={self.kl_coef} must be 0 or more")
        if self.kl_adaptive and not self.kl_coef:
            raise ConfigError("kl_adaptive=True needs a first kl_coef above 0")
        check_kl_kind(self.kl_estimator)
        if self.kl_coef and self.kl_estimator == "k1":
            raise ConfigError(
                "kl_estimator='k1' does nothing as a loss, its gradient has mean zero: "
                "use k2, k3, k1+ or k3+, or put the KL in the reward"
            )

    def _check_correction(self) -> None:
        if self.correction not in CORRECTIONS:
            raise ConfigError(
                f"correction={self.correction!r} is not built: use {', '.join(CORRECTIONS)}"
            )
        if self.correction == "decoupled" and self.ratio == "none":
            raise ConfigError(
                "correction='decoupled' has no effect with ratio='none' (REINFORCE has no ratio to "
                "decouple): use correction='truncated'"
            )
        if not self.correction_cap > 0:
            raise ConfigError(f"correction_cap={self.correction_cap} must be above 0 (usually 2)")

    def _refuse_without_ratio(self, *names: str) -> None:
        defaults = {field.name: field.default for field in fields(self)}
        for name in names:
            value = getattr(self, name)
            if value is not None and value != defaults[name]:
                raise ConfigError(
                    f"{name}={value} has no effect with ratio='none' (REINFORCE has no ratio to "
                    f"clip): leave {name} out, or use ratio='token'"
                )

    @property
    def needs(self) -> tuple[str, ...]:
        """Keys that the call reads from the batch."""
        corrected = self.correction != "none"
        old = () if self.ratio == "none" and not corrected else ("old_logprobs",)
        sampler = ("logprobs",) if corrected else ()
        reference = ("ref_logprobs",) if self.kl_coef else ()
        return ("response_mask", "advantages", *old, *sampler, *reference, *self.scalars)

    @property
    def scalars(self) -> tuple[str, ...]:
        """Those of `needs` that are one number for all rows."""
        return ("kl_coef",) if self.kl_adaptive else ()

    @property
    def needs_entropy(self) -> bool:
        """Whether the entropy is part of the loss; a statistic it becomes whenever it is given."""
        return self.entropy_coef != 0

    def __call__(
        self, logprobs: jax.Array, entropy: jax.Array | None, batch: Batch
    ) -> tuple[jax.Array, Stats]:
        """Token losses and statistics.

        Args:
            logprobs: float [N, L], of the response tokens under the policy being trained.
            entropy: float [N, L], nats, of the distributions they were drawn from; or None.
            batch: the keys of `needs`: `response_mask` bool [N, L], those of `scalars` float32
                scalars, the others float [N, L].

        Returns:
            (token_loss, stats), all float32 [N, L]. Stats, without gradient: `clip_fraction` (1
            where the bound decides the loss), `dual_clip_fraction`, `approx_kl` (k3 of old
            against new policy, nats), `kl` (the estimator in the loss, nats), `entropy`,
            `correction` (the weight) and `correction_capped` (1 where the cap is the weight);
            those that apply.

        Raises:
            ConfigError: `entropy` is None though the loss has an entropy bonus.
        """
        mask = batch["response_mask"]
        per_token = [batch[key] for key in self.needs if key not in self.scalars]
        chex.assert_equal_shape([logprobs, *per_token, *([] if entropy is None else [entropy])])
        chex.assert_shape([batch[key] for key in self.scalars], ())
        advantages = keep(batch["advantages"], mask)
        logprobs = keep(logprobs, mask)
        stats: Stats = {}
        if self.ratio == "none":
            loss = -advantages * logprobs
        else:
            log_ratio = logprobs - keep(batch["old_logprobs"], mask)
            loss = self._clipped(log_ratio, advantages, mask, stats)
        if self.correction != "none":
            loss = loss * self._correction(batch, mask, stats)
        if self.kl_coef:
            kl = kl_estimate(
                logprobs,
                keep(batch["ref_logprobs"], mask),
                self.kl_estimator,
                input_clamp=self.kl_input_clamp,
                output_clamp=self.kl_output_clamp,
            )
            loss = loss + (batch["kl_coef"] if self.kl_adaptive else self.kl_coef) * kl
            stats["kl"] = kl
        if entropy is not None:
            stats["entropy"] = keep(entropy, mask)
            if self.needs_entropy:
                loss = loss - self.entropy_coef * stats["entropy"]
        elif self.needs_entropy:
            raise ConfigError(
                f"entropy_coef={self.entropy_coef} needs the entropy: compute it where "
                "needs_entropy is true"
            )
        return loss, jax.lax.stop_gradient(stats)

    def _correction(self, batch: Batch, mask: jax.Array, stats: Stats) -> jax.Array:
        """Probability under the policy that learning starts from, over that of the sampler."""
        behaviour = batch.get("policy_logprobs", batch["logprobs"])
        difference = keep(batch["old_logprobs"], mask) - keep(behaviour, mask)
        weight = jnp.exp(jnp.minimum(difference, _MAX_LOG_RATIO))
        if self.correction == "truncated":
            stats["correction_capped"] = keep(weight > self.correction_cap, mask)
            weight = jnp.minimum(weight, self.correction_cap)
        stats["correction"] = keep(weight, mask)
        return jax.lax.stop_gradient(weight)

    def _clipped(
        self, log_ratio: jax.Array, advantages: jax.Array, mask: jax.Array, stats: Stats
    ) -> jax.Array:
        """-min(ratio A, clipped ratio A); `log_ratio` and `advantages` are 0 off the mask."""
        capped = jnp.minimum(log_ratio, _MAX_LOG_RATIO)
        stats["approx_kl"] = jnp.expm1(capped) - capped
        if self.ratio == "sequence":
            lengths = jnp.sum(jnp.asarray(mask, bool), axis=1, keepdims=True)
            mean = jnp.sum(log_ratio, axis=1, keepdims=True) / jnp.maximum(lengths, 1)
            # Value of the sequence's ratio, gradient of the token's: for an advantage that is
            # constant over the response this sums to GSPO's gradient.
            straight = log_ratio - jax.lax.stop_gradient(log_ratio)
            capped = jnp.minimum(jax.lax.stop_gradient(mean), _MAX_LOG_RATIO) + straight
        ratio = jnp.exp(capped)
        low = None if self.clip_low is None else 1.0 - self.clip_low
        high = None if self.clip_high is None else 1.0 + self.clip_high
        unclipped, clipped = -ratio * advantages, -jnp.clip(ratio, low, high) * advantages
        loss = jnp.maximum(unclipped, clipped)
        stats["clip_fraction"] = keep(clipped > unclipped, mask)
        if self.dual_clip is not None:
            bound = -self.dual_clip * advantages
            bounded = (advantages < 0) & (loss > bound)
            loss = jnp.where(bounded, bound, loss)
            stats["dual_clip_fraction"] = keep(bounded, mask)
        return loss


@dataclass(frozen=True, kw_only=True)
class ValueLoss(_TokenLoss):
    r"""Squared error of the critic, with PPO's clipping around the old values.

    .. math:: L = \tfrac12 \max\left((V - R)^2,\
              (V_{old} + \mathrm{clip}(V - V_{old}, \pm\epsilon) - R)^2\right)

    The larger of the two, as in OpenAI's baselines (`ppo2`), TRL and verl, with their factor 1/2.

    Attributes:
        clip: epsilon, in the unit of the values; None for the plain squared error.
        aggregation, max_length: as in `PolicyLoss`.
        values_key, returns_key: batch keys of V_old and R (a cost critic has its own).
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
        """Keys that the call reads from the batch."""
        old = () if self.clip is None else (self.values_key,)
        return ("response_mask", self.returns_key, *old)

    def __call__(self, values: jax.Array, batch: Batch) -> tuple[jax.Array, Stats]:
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
        values, returns = keep(values, mask), keep(batch[self.returns_key], mask)
        stats: Stats = {"value": values}
        error = jnp.square(values - returns)
        if self.clip is not None:
            old = keep(batch[self.values_key], mask)
            clipped = old + jnp.clip(values - old, -self.clip, self.clip)
            clipped_error = jnp.square(clipped - returns)
            # Within the clip both errors are the same up to rounding, which is no clipping.
            outside = jnp.abs(values - old) > self.clip
            stats["clip_fraction"] = keep(outside & (clipped_error > error), mask)
            error = jnp.maximum(error, clipped_error)
        return 0.5 * error, jax.lax.stop_gradient(stats)


@dataclass(frozen=True, kw_only=True)
class SupervisedLoss(_TokenLoss):
    """Negative log-likelihood of the response tokens: warm start and SFT."""

    # The likelihood of the plain softmax, whatever temperature rollouts are drawn at.
    tempered: ClassVar[bool] = False

    @property
    def needs(self) -> tuple[str, ...]:
        """Keys that the call reads from the batch."""
        return ("response_mask",)

    @property
    def needs_entropy(self) -> bool:
        """False: the loss has no entropy term."""
        return False

    def __call__(
        self, logprobs: jax.Array, entropy: jax.Array | None, batch: Batch
    ) -> tuple[jax.Array, Stats]:
        """Token losses (nats) and statistics: `entropy`, if it is given.

        Args:
            logprobs: float [N, L], of the demonstration's tokens.
            entropy: float [N, L] or None.
            batch: `response_mask` bool [N, L].
        """
        mask = batch["response_mask"]
        chex.assert_equal_shape([logprobs, mask])
        stats = {} if entropy is None else {"entropy": keep(entropy, mask)}
        return -keep(logprobs, mask), jax.lax.stop_gradient(stats)


def explained_variance(values: jax.Array, returns: jax.Array, mask: jax.Array) -> jax.Array:
    """Share of the returns' variance that the values explain: 1 - Var(R - V) / Var(R).

    Args:
        values, returns: float [N, L].
        mask: bool [N, L].

    Returns:
        float32 scalar, at most 1; 0 (never NaN) where the returns don't vary.
    """
    chex.assert_equal_shape([values, returns, mask])
    variance = masked_variance(returns, mask)
    residual = masked_variance(keep(returns, mask) - keep(values, mask), mask)
    return jnp.where(variance > 0, 1.0 - residual / jnp.where(variance > 0, variance, 1.0), 0.0)


def _check_aggregation(how: str, max_length: int | None) -> None:
    if how not in ("token", "sequence", "constant"):
        raise ConfigError(
            f"aggregation={how!r} is not built: use 'token', 'sequence' or 'constant'"
        )
    if how == "constant" and (max_length is None or max_length < 1):
        raise ConfigError(
            f"aggregation='constant' divides by max_length={max_length}: set it to the longest "
            "response allowed, in tokens"
        )
    if how != "constant" and max_length is not None:
        raise ConfigError(
            f"max_length={max_length} has no effect with aggregation={how!r}: leave it out, or "
            "use aggregation='constant'"
        )
