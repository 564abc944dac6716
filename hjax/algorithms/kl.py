"""KL estimators (k1, k2, k3), fixed and adaptive KL coefficients, adaptive entropy coefficient."""

import math

import chex
import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from hjax.algorithms.masks import bounded
from hjax.errors import ConfigError

KL_KINDS = ("k1", "k2", "k3", "k1+", "k3+")


def kl_estimate(
    logprobs: jax.Array,
    ref_logprobs: jax.Array,
    kind: str = "k1",
    *,
    input_clamp: float | None = None,
    output_clamp: float | None = None,
) -> jax.Array:
    r"""Per-token estimate of KL(policy || reference) from one sampled token.

    With :math:`d = \log\pi - \log\pi_{ref}` at that token:

    .. math:: k_1 = d, \qquad k_2 = d^2/2, \qquad k_3 = e^{-d} - 1 + d

    (Schulman 2020, http://joschu.net/blog/kl-approx.html.) k1 and k3 are unbiased values, k3 is
    never negative, k2 is biased and of low variance. As a loss differentiated through
    `logprobs`, on-policy, k1's gradient has mean zero, k2's is that of the reverse KL, and k3's
    that of a forward KL. "k1+" and "k3+" have the value of k1 and k3 and the gradient of k2
    (straight-through, as in verl's `core_algos.py`).

    Args:
        logprobs: float, any shape, natural logarithms under the policy.
        ref_logprobs: the same under the reference.
        kind: one of k1, k2, k3, k1+, k3+.
        input_clamp: bound on |d|; outside it the gradient is 0. NeMo-RL's default is 20.
        output_clamp: bound on the absolute estimate. NeMo-RL's default is 10.

    Returns:
        float32, nats per token.

    Raises:
        ConfigError: unknown `kind`.
        AssertionError: different shapes, or integers (token ids, say), at trace time.

    Example:
        >>> kl_estimate(jnp.log(0.5), jnp.log(0.25), "k3")      # 1/2 - 1 + log 2
        Array(0.19314718, dtype=float32)
    """
    check_kl_kind(kind)
    chex.assert_type([logprobs, ref_logprobs], float)
    chex.assert_equal_shape([jnp.asarray(logprobs), jnp.asarray(ref_logprobs)])
    difference = jnp.asarray(logprobs, jnp.float32) - jnp.asarray(ref_logprobs, jnp.float32)
    difference = bounded(difference, input_clamp)
    squared = bounded(0.5 * jnp.square(difference), output_clamp)
    if kind == "k2":
        return squared
    if kind.startswith("k1"):
        estimate = bounded(difference, output_clamp)
    else:
        # expm1 avoids the cancellation of exp(-d) - 1 + d near d = 0.
        estimate = bounded(jnp.expm1(-difference) + difference, output_clamp)
    if kind.endswith("+"):
        # x - stop_gradient(x) is exactly 0, so the value does not change.
        return jax.lax.stop_gradient(estimate) + (squared - jax.lax.stop_gradient(squared))
    return estimate


def check_kl_kind(kind: str) -> None:
    """Raise ConfigError unless `kind` names an estimator."""
    if kind not in KL_KINDS:
        raise ConfigError(f"KL estimator {kind!r} is unknown: use one of {', '.join(KL_KINDS)}")


class FixedKL:
    """A fixed KL coefficient, for the KL in the reward or the loss.

    Args:
        coef: reward (or loss) per nat, 0 or more.
    """

    def __init__(self, coef: float):
        self.coef = _coefficient(coef)

    def update(self, kl_mean: float, sequences: int) -> None:
        """Ignores a step's mean KL over `sequences` sequences: the coefficient is fixed."""

    def state(self) -> dict[str, float]:
        """What a checkpoint needs: `{"coef": float}`."""
        return {"coef": self.coef}

    def restore(self, state: dict[str, float]) -> None:
        """Restore the coefficient from a `state()`."""
        self.coef = _coefficient(state["coef"])


class AdaptiveKL(FixedKL):
    r"""Adaptive KL coefficient, controlled towards a target (Ziegler et al. 2019, section 2.2).

    .. math:: \beta \leftarrow \beta\,\left(1 + \mathrm{clip}\left(\frac{KL}{KL_{target}} - 1,
              \pm 0.2\right) \frac{n}{horizon}\right)

    https://arxiv.org/abs/1909.08593, with n / horizon instead of the rate 0.1, as in its code and
    in TRL.

    Args:
        coef: the initial coefficient, above 0.
        target: target KL, in the unit of `update`'s argument: nats per token, or nats per sequence
            as in the paper.
        horizon: number of sequences over which an error of the full 20 % changes the coefficient
            by 20 %; a step of more sequences counts as one horizon.
        clip: bound on the relative error.
    """

    def __init__(self, coef: float, target: float, horizon: float = 10000.0, clip: float = 0.2):
        super().__init__(coef)
        for name, value in (("coef", coef), ("target", target), ("horizon", horizon)):
            if not value > 0:
                raise ConfigError(f"adaptive KL: {name}={value} must be above 0")
        self.target, self.horizon, self.clip = float(target), float(horizon), float(clip)

    def update(self, kl_mean: float, sequences: int) -> None:
        """Update the coefficient from one step's mean KL over `sequences` sequences.

        A non-finite KL leaves it unchanged: the optimizer update of such a step is skipped too.
        """
        error = float(kl_mean) / self.target - 1.0
        if not math.isfinite(error):
            return
        error = min(max(error, -self.clip), self.clip)
        # Bounded: a step of several horizons could otherwise make the coefficient negative.
        self.coef *= 1.0 + error * min(sequences / self.horizon, 1.0)


def _coefficient(value: float) -> float:
    value = float(value)
    if not (math.isfinite(value) and value >= 0):
        raise ConfigError(f"the KL coefficient {value} must be a finite number, 0 or more")
    return value


class AdaptiveEntropy:
    r"""Adaptive entropy coefficient: rises while the entropy is below a target, else falls.

    .. math:: c \leftarrow \mathrm{clip}(c \pm \mathrm{step}, 0, \mathrm{max})

    Skywork-OR1 (He et al. 2025, https://arxiv.org/abs/2505.22312): while the entropy is above the
    target there is no bonus, whatever c is. TRL has the same.

    Args:
      coef: the initial coefficient, loss per nat, 0 to max_coef.
      target: target entropy, nats per token, above 0.
      step: change per training step, above 0.
      max_coef: largest value of the coefficient.
    """

    def __init__(self, coef: float, target: float, step: float, max_coef: float):
        for name, value in (("target", target), ("step", step), ("max_coef", max_coef)):
            if not value > 0:
                raise ConfigError(f"adaptive entropy: {name}={value} must be above 0")
        if not 0 <= coef <= max_coef:
            raise ConfigError(f"adaptive entropy: coef={coef} must lie in 0 to max_coef={max_coef}")
        self.value, self.target, self.step, self.max_coef = coef, target, step, max_coef
        self.below_target = True  # until an entropy has been measured

    @property
    def coef(self) -> float:
        """The coefficient to use now."""
        return self.value if self.below_target else 0.0

    def update(self, entropy: float) -> None:
        """Update the coefficient from one step's mean entropy; a non-finite one is ignored.

        Args:
          entropy: the policy's, nats per token, measured in the updates.
        """
        if not math.isfinite(entropy):
            return
        self.below_target = entropy <= self.target
        moved = self.value + (self.step if self.below_target else -self.step)
        self.value = min(max(moved, 0.0), self.max_coef)

    def state(self) -> dict[str, float]:
        """What a checkpoint needs."""
        return {"value": self.value, "below": float(self.below_target)}

    def restore(self, state: dict[str, float]) -> None:
        """Continue from what ``state`` returned."""
        self.value, self.below_target = float(state["value"]), bool(state["below"])


def make_kl_controller(config: ConfigDict) -> FixedKL:
    """The controller of the KL coefficient; adaptive where ``kl_target`` is set.

    Args:
      config: the section ``algorithm``.
    """
    if not config.get("kl_target"):
        return FixedKL(config.get("kl_coef", 0.0))
    return AdaptiveKL(config.kl_coef, config.kl_target, config.kl_horizon)


def make_entropy_controller(config: ConfigDict) -> AdaptiveEntropy | None:
    """The controller of an adaptive entropy coefficient; None: the coefficient is fixed.

    Args:
      config: the section ``algorithm``.
    """
    if not config.get("entropy_target"):
        return None
    return AdaptiveEntropy(
        config.entropy_coef, config.entropy_target, config.entropy_step, config.entropy_max
    )
