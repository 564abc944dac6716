r"""The losses of the Tinker API: pure functions of log-probs, summed over the tokens of all data.

:math:`\ell` is the log-prob of a target token at temperature 1, :math:`q` the sampler's
(``logprobs``), :math:`A` the advantage and :math:`\rho = e^{\ell - q}`. A loss is a plain sum: it
has no mean over tokens or rows, so gradients of several calls add up. Tokens of weight or advantage
0 add exactly 0, also where their ratio would overflow.
"""

import dataclasses
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp

from hjax.algorithms.surrogates import capped_ratio
from hjax.errors import ConfigError, did_you_mean, short_repr

# Arrays by name: a datum's inputs, float32 [rows, length]; those of ``cross_entropy`` may be
# [rows, length, k].
Inputs = Mapping[str, jax.Array]
# Numbers by name: float32 scalars, so that other values compile nothing.
Settings = Mapping[str, jax.Array]

_PPO_RANGE = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}


def cross_entropy(logprobs: jax.Array, inputs: Inputs, settings: Settings) -> jax.Array:
    r""":math:`-w \ell`; ``weights`` are of any sign, and may be [rows, length, k]."""
    weights = inputs["weights"]
    return jnp.where(weights != 0, -weights * logprobs, 0.0)


def importance_sampling(logprobs: jax.Array, inputs: Inputs, settings: Settings) -> jax.Array:
    r""":math:`-\rho A`."""
    return -_ratio(logprobs, inputs) * inputs["advantages"]


def ppo(logprobs: jax.Array, inputs: Inputs, settings: Settings) -> jax.Array:
    r""":math:`-\min(\rho A, \mathrm{clip}(\rho, low, high) A)`.

    The thresholds are bounds of the ratio itself.
    """
    return _clipped(_ratio(logprobs, inputs), inputs, settings)


def cispo(logprobs: jax.Array, inputs: Inputs, settings: Settings) -> jax.Array:
    r""":math:`-\mathrm{sg}(\mathrm{clip}(\rho, low, high)) A \ell`, as in MiniMax-M1
    (arXiv 2506.13585)."""
    weight = _clip(_ratio(logprobs, inputs), settings)
    advantages = inputs["advantages"]
    own = jnp.where(advantages != 0, logprobs, 0.0)
    return -jax.lax.stop_gradient(weight) * advantages * own


def dro(logprobs: jax.Array, inputs: Inputs, settings: Settings) -> jax.Array:
    r""":math:`-(\ell A - \frac\beta2 (\ell - q)^2)` (arXiv 2405.19107).

    The square counts at every token, also where the advantage is 0.
    """
    square = (logprobs - inputs["logprobs"]) ** 2
    return -(logprobs * inputs["advantages"] - 0.5 * settings["beta"] * square)


def gspo(logprobs: jax.Array, inputs: Inputs, settings: Settings) -> jax.Array:
    r"""PPO's loss of a ratio per sequence (GSPO-token, arXiv 2507.18071).

    The ratio is the exponential of the mean of :math:`\ell - q` over ``sequence_ratio_mask``; its
    gradient at a token is through that token's own log-prob.
    """
    mask = inputs["sequence_ratio_mask"]
    own = jnp.where(mask, logprobs - inputs["logprobs"], 0.0)
    mean = jnp.sum(own, axis=1, keepdims=True) / jnp.maximum(
        jnp.sum(mask, axis=1, keepdims=True), 1
    )
    level = jax.lax.stop_gradient(mean - logprobs) + logprobs
    ratio = capped_ratio(jnp.where(inputs["advantages"] != 0, level, 0.0))
    return _clipped(ratio, inputs, settings)


def _ratio(logprobs: jax.Array, inputs: Inputs) -> jax.Array:
    """The probability ratio; 1 where the advantage is 0."""
    log_ratio = logprobs - inputs["logprobs"]
    return capped_ratio(jnp.where(inputs["advantages"] != 0, log_ratio, 0.0))


def _clip(ratio: jax.Array, settings: Settings) -> jax.Array:
    return jnp.clip(ratio, settings["clip_low_threshold"], settings["clip_high_threshold"])


def _clipped(ratio: jax.Array, inputs: Inputs, settings: Settings) -> jax.Array:
    advantages = inputs["advantages"]
    return -jnp.minimum(ratio * advantages, _clip(ratio, settings) * advantages)


@dataclasses.dataclass(frozen=True, eq=False)
class DatumLoss:
    """A loss, and what a datum must bring for it.

    Attributes:
      name: by which calls name it.
      function: (log-probs float32 [rows, length(, k)], inputs, settings) -> losses of that shape.
      needs: inputs that each datum must have, in the shape of its targets.
      defaults: settings with their defaults.
      optional: inputs with the value that stands for one that is missing.
      several: whether a position may have several targets, [N, k].
    """

    name: str
    function: Callable[[jax.Array, Inputs, Settings], jax.Array]
    needs: tuple[str, ...] = ("logprobs", "advantages")
    defaults: Mapping[str, float] = dataclasses.field(default_factory=dict)
    optional: Mapping[str, float] = dataclasses.field(default_factory=dict)
    several: bool = False

    def settings(self, given: Mapping[str, float] | None) -> dict[str, float]:
        """All settings, defaults included.

        Raises:
          ConfigError: an unknown name, or a value that is no finite number.
        """
        settings = dict(self.defaults)
        for name, value in (given or {}).items():
            if name not in settings:
                allowed = ", ".join(settings) or "none"
                raise ConfigError(
                    f"loss_fn_config: loss {self.name!r} has no setting {name!r}; "
                    f"{did_you_mean(name, settings)}it has {allowed}"
                )
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not number or not -1e30 < value < 1e30:
                raise ConfigError(
                    f"loss_fn_config: {name}={short_repr(value)}: must be a finite number"
                )
            settings[name] = float(value)
        return settings


LOSSES: Mapping[str, DatumLoss] = {
    loss.name: loss
    for loss in (
        DatumLoss(
            "cross_entropy",
            cross_entropy,
            needs=(),
            optional={"weights": 1.0},
            several=True,
        ),
        DatumLoss("importance_sampling", importance_sampling),
        DatumLoss("ppo", ppo, defaults=_PPO_RANGE),
        DatumLoss(
            "cispo",
            cispo,
            defaults={"clip_low_threshold": 0.0, "clip_high_threshold": 4.0},
        ),
        DatumLoss("dro", dro, defaults={"beta": 0.05}),
        DatumLoss(
            "gspo",
            gspo,
            needs=("logprobs", "advantages", "sequence_ratio_mask"),
            defaults=_PPO_RANGE,
        ),
    )
}

# Losses of the Tinker API that are not here, and why.
_NOT_SERVED = {
    "stable_reinforce": "its formula is not published; use loss_fn=importance_sampling or ppo",
    "custom": "losses traced on the client are not run here; forward_backward_custom without "
    "server-side losses works",
}


def find_loss(name: str) -> DatumLoss:
    """A loss by its name.

    Raises:
      ConfigError: there is no such loss.
    """
    if name in LOSSES:
        return LOSSES[name]
    why = _NOT_SERVED.get(name, f"{did_you_mean(name, LOSSES)}there are {', '.join(LOSSES)}")
    raise ConfigError(f"loss_fn={short_repr(name)} is not supported: {why}")
