r"""Policy-gradient losses (PPO, GRPO, GSPO, CISPO, ...) as one class with orthogonal switches."""

from dataclasses import dataclass, fields
from typing import Literal

import chex
import jax
import jax.numpy as jnp

from hjax.algorithms.aggregation import (
    Batch,
    Stats,
    TokenLoss,
    WithStats,
    check_entries,
    check_known,
    check_not_negative,
)
from hjax.algorithms.corrections import correction_bounds, correction_weights
from hjax.algorithms.kl import check_kl_kind, kl_estimate
from hjax.algorithms.masks import masked
from hjax.algorithms.surrogates import (
    COVARIANCES,
    DPPO_CAP,
    MAX_LOG_RATIO,
    cispo,
    dppo,
    log_ratio_at_level,
    ppo_clip,
    sapo,
    select_by_covariance,
    token_covariances,
)
from hjax.errors import ConfigError

RATIOS = ("token", "sequence", "sequence_token", "sequence_sum", "none")
SURROGATES = ("clip", "cispo", "sapo", "dppo", "dppo_kl")


@dataclass(frozen=True, kw_only=True)
class PolicyLoss(TokenLoss):
    r"""Surrogate objective, KL penalty, entropy bonus and likelihood of right answers.

    With the ratio :math:`\rho = e^{\ell - \ell_{old}}` and the advantage A of each token, and the
    defaults:

    .. math:: L = -\min(\rho A,\ \mathrm{clip}(\rho, 1-\epsilon_{low}, 1+\epsilon_{high}) A)
              + \beta\,\mathrm{KL}(\pi\|\pi_{ref}) - c\,H

    (Schulman et al. 2017, https://arxiv.org/abs/1707.06347.) docs/losses.md has the table of
    switches for each published algorithm.

    Attributes:
        ratio: level of the probability ratio: "token", or the response: "sequence" (GSPO),
            "sequence_token" (GSPO-token), "sequence_sum" (TRL's RLOO), see `log_ratio_at_level`.
            "none": REINFORCE, L = -A * l, without old log-probs and clipping.
        surrogate: "clip" as above, or "cispo", "sapo", "dppo", "dppo_kl", see
            `hjax.algorithms.surrogates`.
        clip_low: epsilon_low; None for no lower bound. 0 to 1.
        clip_high: epsilon_high; None for no upper bound. Larger than clip_low in DAPO.
        dual_clip: c > 1; where A < 0 the loss is at most -c A (Ye et al. 2020,
            https://arxiv.org/abs/1912.09729; usually 3). None: off.
        ratio_cap: largest weight of "dppo" and "dppo_kl" (None: 20); for "clip" the largest ratio
            before the clip, for either sign of A (TRL's `delta`; None: none).
        covariance: treatment of tokens with a large covariance of log-prob and advantage, see
            `hjax.algorithms.surrogates`: "clip" masks a random few of them (clip-cov); "kl" adds
            `covariance_coef` times \|l - l_old\| to the largest (kl-cov); "none".
        covariance_share: share of the step's tokens that are treated.
        covariance_low, covariance_high: range of covariances that "clip" samples from.
        covariance_coef: penalty of "kl" per nat.
        tau_positive, tau_negative: tau of "sapo", by the advantage's sign.
        aggregation: normalisation over tokens, see `aggregation_weights`.
        max_length: tokens, for aggregation "constant".
        kl_coef: beta of the KL in the loss; 0: none.
        kl_adaptive: beta changes from step to step (`hjax.algorithms.kl.AdaptiveKL`): it is the
            batch entry `kl_coef`, a float32 scalar, and the field above only its initial value.
        kl_estimator: k2, k3, k1+ or k3+; k1 is refused because its gradient has mean zero.
        kl_importance: the KL is multiplied by the ratio of the policy to the one that drew (without
            a ratio, to itself): with k1 and k3 value and gradient are then those of the reverse KL
            in expectation, off-policy too (DeepSeek-AI 2025, arXiv 2512.02556, section 3.1).
        kl_input_clamp, kl_output_clamp: see `kl_estimate`; None: off.
        entropy_coef: c of the entropy bonus.
        entropy_adaptive: c changes from step to step (`hjax.algorithms.kl.AdaptiveEntropy`): it
            is the batch entry `entropy_coef`, a float32 scalar.
        correction: importance weighting of the surrogate (not of KL and entropy), see
            `hjax.algorithms.corrections`; "none": no weights, and l_old is what the batch has.
            Else mu is the behaviour log-prob (the batch's `policy_logprobs` where it has them, else
            `logprobs`), and the actor recomputes l_old before the first update.
        correction_low, correction_cap: bounds of the importance weight; None: its source's.
        positive_nll: weight of the mean negative log-likelihood per token of right answers: tokens
            where the batch's `positive` (float [N, L]) is 1 (VAPO,
            https://arxiv.org/abs/2504.05118); 0: none.

    Example:
        >>> batch = {"old_logprobs": jnp.log(jnp.array([[0.5]])), "advantages": jnp.ones((1, 1)),
        ...          "response_mask": jnp.ones((1, 1), bool)}
        >>> PolicyLoss()(jnp.log(jnp.array([[0.75]])), None, batch)[0]   # ratio 1.5, clipped to 1.2
        Array([[-1.2]], dtype=float32)
    """

    ratio: Literal["token", "sequence", "sequence_token", "sequence_sum", "none"] = "token"
    surrogate: Literal["clip", "cispo", "sapo", "dppo", "dppo_kl"] = "clip"
    clip_low: float | None = 0.2
    clip_high: float | None = 0.2
    dual_clip: float | None = None
    ratio_cap: float | None = None
    covariance: str = "none"
    covariance_share: float = 0.0002
    covariance_low: float = 1.0
    covariance_high: float = 5.0
    covariance_coef: float = 1.0
    tau_positive: float = 1.0
    tau_negative: float = 1.05
    kl_coef: float = 0.0
    kl_adaptive: bool = False
    kl_estimator: str = "k3+"
    kl_importance: bool = False
    kl_input_clamp: float | None = None
    kl_output_clamp: float | None = None
    entropy_coef: float = 0.0
    entropy_adaptive: bool = False
    correction: str = "none"
    correction_low: float | None = None
    correction_cap: float | None = None
    positive_nll: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_known("ratio", self.ratio, RATIOS)
        check_known("surrogate", self.surrogate, SURROGATES)
        check_known("covariance", self.covariance, COVARIANCES)
        if self.clip_low is not None and not 0 <= self.clip_low <= 1:
            raise ConfigError(f"clip_low={self.clip_low} must lie in 0 to 1, or be None (no bound)")
        if self.clip_high is not None and not self.clip_high >= 0:
            raise ConfigError(f"clip_high={self.clip_high} must be 0 or more, or None (no bound)")
        if self.dual_clip is not None and not self.dual_clip > 1:
            raise ConfigError(f"dual_clip={self.dual_clip} must be above 1 (usually 3), or None")
        self._check_together()
        correction_bounds(self.correction, self.correction_low, self.correction_cap)
        if self.correction == "decoupled" and self.ratio == "none":
            raise ConfigError(
                "correction='decoupled' has no effect with ratio='none' (REINFORCE has no ratio to "
                "decouple): use correction='truncated'"
            )
        for name in ("kl_coef", "entropy_coef", "positive_nll"):
            value = getattr(self, name)
            if not isinstance(value, int | float):
                raise ConfigError(
                    f"{name}={value!r} must be a fixed number; an adaptive KL coefficient is the "
                    "batch entry kl_coef, with kl_adaptive=True"
                )
        check_not_negative(self, "kl_coef", "positive_nll")
        if self.kl_adaptive and not self.kl_coef:
            raise ConfigError("kl_adaptive=True needs a first kl_coef above 0")
        check_kl_kind(self.kl_estimator)
        if self.kl_importance and self.kl_coef and self.kl_estimator not in ("k1", "k3"):
            raise ConfigError(
                f"kl_importance=True with kl_estimator={self.kl_estimator!r}: weighted by the "
                "ratio k1 and k3 are unbiased; use one of these"
            )
        if self.kl_coef and self.kl_estimator == "k1" and not self.kl_importance:
            raise ConfigError(
                "kl_estimator='k1' has no effect as a loss, because its gradient has mean zero: "
                "use k2, k3, k1+ or k3+, kl_importance=True, or put the KL in the reward"
            )

    def _check_together(self) -> None:
        """Refuse switches that have no effect with others, and values out of their range."""
        surrogate, covariance = self.surrogate, self.covariance
        clips, uncapped = ("clip_low", "clip_high"), ("cispo", "sapo")
        gates, bounds = ("tau_positive", "tau_negative"), ("covariance_low", "covariance_high")
        ratio_only = ("surrogate", *clips, "dual_clip", "ratio_cap", "covariance")
        by_surrogate, by_covariance = f"surrogate={surrogate!r}", f"covariance={covariance!r}"
        for without_effect, names, reason in (
            (self.ratio == "none", ratio_only, "ratio='none' (REINFORCE has no ratio to clip)"),
            (surrogate == "sapo", clips, f"{by_surrogate} (its gate is no clip)"),
            (surrogate != "sapo", gates, f"{by_surrogate} (sapo has a gate)"),
            (surrogate in uncapped, ("ratio_cap",), f"{by_surrogate} (clip and dppo have a cap)"),
            (covariance != "clip", bounds, f"{by_covariance} (clip has bounds)"),
            (covariance != "kl", ("covariance_coef",), f"{by_covariance} (kl has a coefficient)"),
            (covariance == "none", ("covariance_share",), by_covariance),
            (surrogate != "clip", ("dual_clip",), f"{by_surrogate}: use 'clip'"),
        ):
            if without_effect:
                self._refuse(names, f"with {reason}")
        if surrogate in ("cispo", "dppo", "dppo_kl") and self.ratio != "token":
            raise ConfigError(
                f"{by_surrogate} weighs each token by its own ratio, not by ratio={self.ratio!r}: "
                "use ratio='token', or surrogate='clip'"
            )
        for name in gates:
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name}={getattr(self, name)} must be above 0")
        if surrogate in ("dppo", "dppo_kl") and None in (self.clip_low, self.clip_high):
            raise ConfigError(
                f"{by_surrogate} needs clip_low and clip_high, how far a token's probability may go"
            )
        if self.ratio_cap is not None and not self.ratio_cap > 0:
            raise ConfigError(f"ratio_cap={self.ratio_cap} must be above 0, or None")
        if not 0 < self.covariance_share <= 1:
            raise ConfigError(
                f"covariance_share={self.covariance_share} must be above 0 and at most 1"
            )
        if not self.covariance_low < self.covariance_high:
            raise ConfigError(
                f"covariance_low={self.covariance_low} must be below "
                f"covariance_high={self.covariance_high}"
            )

    def _refuse(self, names: tuple[str, ...], reason: str) -> None:
        defaults = {field.name: field.default for field in fields(self)}
        for name in names:
            value = getattr(self, name)
            if value is not None and value != defaults[name]:
                raise ConfigError(f"{name}={value} has no effect {reason}: leave {name} out")

    @property
    def needs(self) -> tuple[str, ...]:
        """Batch keys that the call reads."""
        corrected = self.correction != "none"
        old = () if self.ratio == "none" and not corrected else ("old_logprobs",)
        sampler = ("logprobs",) if corrected else ()
        reference = ("ref_logprobs",) if self.kl_coef else ()
        positive = ("positive",) if self.positive_nll else ()
        read = (*old, *sampler, *reference, *positive, *self.scalars)
        return ("response_mask", "advantages", *read)

    @property
    def scalars(self) -> tuple[str, ...]:
        """Those of `needs` that are one number for all rows."""
        entropy = ("entropy_coef",) if self.entropy_adaptive else ()
        return (*(("kl_coef",) if self.kl_adaptive else ()), *entropy)

    @property
    def needs_entropy(self) -> bool:
        """Whether the entropy is part of the loss; it is a statistic whenever it is passed."""
        return self.entropy_adaptive or self.entropy_coef != 0

    def prepared(self, batch: Batch) -> dict[str, jax.Array]:
        """With `covariance` the entry `covariant` bool [N, L], the selected tokens (depends on the
        batch's `responses` too); with `positive_nll` the entry `nll_weights` float32 [N, L].

        The likelihood averages over the tokens of right answers, the other terms over all tokens:
        `nll_weights` is the ratio of the two weights.
        """
        made: dict[str, jax.Array] = {}
        weights = self.weights(batch)
        if self.covariance != "none":
            made["covariant"] = select_by_covariance(
                token_covariances(batch["advantages"], batch["old_logprobs"], weights > 0),
                weights > 0,
                self.covariance,
                self.covariance_share,
                self.covariance_low,
                self.covariance_high,
                batch["responses"],
            )
        if not self.positive_nll:
            return made
        positive = masked(batch["positive"], weights > 0)
        share = self.positive_nll * positive / jnp.maximum(jnp.sum(positive), 1.0)
        nll = jnp.where(weights > 0, share / jnp.maximum(weights, 1e-30), 0.0)
        return made | {"nll_weights": nll}

    def __call__(self, logprobs: jax.Array, entropy: jax.Array | None, batch: Batch) -> WithStats:
        """Token losses and statistics.

        Args:
            logprobs: float [N, L], of the response tokens under the policy being trained.
            entropy: float [N, L], nats, of the policy's next-token distributions; or None.
            batch: the keys of `needs`: `response_mask` bool [N, L], those of `scalars` float32
                scalars, the others float [N, L]; and those of `prepared`.

        Returns:
            (token_loss, stats), all float32 [N, L]. Stats, without gradient: `clip_fraction` (1
            where a bound decides the loss), `dual_clip_fraction`, `approx_kl` (k3 of old
            against new policy, nats), `kl` (the estimator in the loss, nats), `entropy`,
            `covariant` (1 where a covariance is too large), `correction` (the weight) and
            `correction_capped` (1 where a bound is the weight); those that apply.

        Raises:
            ConfigError: `entropy` is None though the loss has an entropy bonus.
        """
        mask = batch["response_mask"]
        # Those of a subclass may have any shape.
        own = PolicyLoss.needs.fget(self)  # type: ignore[attr-defined]
        check_entries(batch, [key for key in own if key not in self.scalars], mask.shape)
        check_entries(batch, self.scalars, ())
        chex.assert_shape([logprobs, *([] if entropy is None else [entropy])], mask.shape)
        advantages = masked(batch["advantages"], mask)
        logprobs = masked(logprobs, mask)
        stats: Stats = {}
        if self.ratio == "none":
            loss = -advantages * logprobs
        else:
            loss, stats = self._of_ratio(advantages, logprobs, batch)
        if self.correction != "none":
            weights, made = self._correction(batch, mask)
            loss, stats = loss * weights, stats | made
        if self.kl_coef:
            kl = self._kl(logprobs, batch)
            loss = loss + (batch["kl_coef"] if self.kl_adaptive else self.kl_coef) * kl
            stats["kl"] = kl
        if self.positive_nll:
            loss = loss - batch["nll_weights"] * logprobs
        if entropy is not None:
            stats["entropy"] = masked(entropy, mask)
            if self.needs_entropy:
                coef = batch["entropy_coef"] if self.entropy_adaptive else self.entropy_coef
                loss = loss - coef * stats["entropy"]
        elif self.needs_entropy:
            raise ConfigError(
                f"entropy_coef={self.entropy_coef} needs the entropy: compute it where "
                "needs_entropy is true"
            )
        return loss, jax.lax.stop_gradient(stats)

    def _kl(self, logprobs: jax.Array, batch: Batch) -> jax.Array:
        """The KL to the reference at each token; arguments are 0 outside the mask."""
        mask = batch["response_mask"]
        kl = kl_estimate(
            logprobs,
            masked(batch["ref_logprobs"], mask),
            self.kl_estimator,
            input_clamp=self.kl_input_clamp,
            output_clamp=self.kl_output_clamp,
        )
        if not self.kl_importance:
            return kl
        old = masked(batch["old_logprobs"], mask) if self.ratio != "none" else logprobs
        log_ratio = logprobs - jax.lax.stop_gradient(old)
        return kl * jnp.exp(jnp.minimum(log_ratio, MAX_LOG_RATIO))

    def _of_ratio(self, advantages: jax.Array, logprobs: jax.Array, batch: Batch) -> WithStats:
        """The loss of the ratio to the old policy, with the covariance's clip or penalty."""
        mask = batch["response_mask"]
        log_ratio = logprobs - masked(batch["old_logprobs"], mask)
        capped = jnp.minimum(log_ratio, MAX_LOG_RATIO)
        loss, stats = self._surrogate(log_ratio, advantages, logprobs, mask)
        stats = {"approx_kl": jnp.expm1(capped) - capped} | stats
        if self.covariance != "none":
            covariant = stats["covariant"] = masked(batch["covariant"], mask)
            if self.covariance == "clip":
                loss = loss * (1.0 - covariant)
            else:
                loss = loss + self.covariance_coef * covariant * jnp.abs(log_ratio)
        return loss, stats

    def _surrogate(
        self, log_ratio: jax.Array, advantages: jax.Array, logprobs: jax.Array, mask: jax.Array
    ) -> WithStats:
        """The surrogate at each token; arguments are 0 outside the mask."""
        level = log_ratio_at_level(log_ratio, mask, self.ratio)
        low, high = self.clip_low, self.clip_high
        if self.surrogate == "cispo":
            return cispo(level, advantages, logprobs, mask, low=low, high=high)
        if self.surrogate == "sapo":
            return sapo(level, advantages, self.tau_positive, self.tau_negative)
        if self.surrogate in ("dppo", "dppo_kl"):
            assert low is not None and high is not None
            cap, by_kl = self.ratio_cap or DPPO_CAP, self.surrogate == "dppo_kl"
            return dppo(level, advantages, logprobs, mask, low=low, high=high, cap=cap, by_kl=by_kl)
        return ppo_clip(
            level, advantages, mask, low=low, high=high, dual=self.dual_clip, cap=self.ratio_cap
        )

    def _correction(self, batch: Batch, mask: jax.Array) -> WithStats:
        """Importance weights of the actor before the first update over the sampler."""
        sampler = batch.get("policy_logprobs", batch["logprobs"])
        low, high = correction_bounds(self.correction, self.correction_low, self.correction_cap)
        return correction_weights(
            batch["old_logprobs"], sampler, mask, kind=self.correction, low=low, high=high
        )
