"""AdamW with settings per call, as one compiled program; the arithmetic is torch's."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from hjax.errors import ConfigError, short_repr
from hjax.models.parameters import Params
from hjax.rules import Rule, below_one, between

# Larger settings, and those of several multiplied, would be infinite as float32.
_LARGEST = 1e15
# An eps that is 0 as float32 makes 0 / 0 of the first gradient that is 0.
_RULES: Mapping[str, Rule] = {
    "beta1": below_one(),
    "beta2": below_one(),
    "eps": between(1e-30, _LARGEST),
}


@dataclasses.dataclass(frozen=True)
class AdamParams:
    """Settings of one step of AdamW (Loshchilov & Hutter, arXiv 1711.05101). Defaults are the
    Tinker API's.

    Attributes:
      learning_rate: of this step.
      beta1, beta2: decay rates of the moments.
      eps: added to the root of the second moment.
      weight_decay: decoupled, on every trained array.
      grad_clip_norm: gradients are scaled down to this global norm; 0: not.

    Raises:
      ConfigError: a value out of its range.
    """

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            rule = _RULES.get(field.name, between(0, _LARGEST))
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not number or not rule.holds(value):
                raise ConfigError(f"{field.name}={short_repr(value)}: must be {rule.text}")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AdamState:
    """Moments of the gradients, nested dicts like the trained parameters, float32."""

    first: Params
    second: Params


def step_scalars(params: AdamParams, count: int) -> dict[str, float]:
    """What ``adamw_step`` reads of the settings, computed in double precision as torch does.

    Args:
      params: of the step.
      count: of the step, 1 for the first.
    """
    first = 1 - params.beta1**count
    second = 1 - params.beta2**count
    return {
        "keep_first": params.beta1,
        "take_first": 1 - params.beta1,
        "keep_second": params.beta2,
        "take_second": 1 - params.beta2,
        "size": params.learning_rate / first,
        "root_scale": 1 / math.sqrt(second),
        "eps": params.eps,
        "shrink": 1 - params.learning_rate * params.weight_decay,
        "clip": params.grad_clip_norm or math.inf,
    }


def adamw_step(
    learned: Params, state: AdamState, gradients: Params, scalars: dict[str, jax.Array]
) -> tuple[Params, AdamState, Params, dict[str, jax.Array]]:
    """One step; inside jit. Without finite gradients nothing changes.

    Args:
      learned: the trained parameters.
      state: their moments.
      gradients: sums, nested dict like ``learned``.
      scalars: of ``step_scalars``.

    Returns:
      parameters, moments, gradients of 0, and scalars: ``grad_norm`` before clipping, ``finite``.
    """
    norm = optax.tree.norm(gradients)
    finite = jnp.isfinite(norm)
    scale = jnp.minimum(scalars["clip"] / (norm + 1e-6), 1.0)

    def moved(x: jax.Array, m: jax.Array, v: jax.Array, g: jax.Array) -> tuple[Any, ...]:
        g = g * scale
        m_new = scalars["keep_first"] * m + scalars["take_first"] * g
        v_new = scalars["keep_second"] * v + scalars["take_second"] * g * g
        root = jnp.sqrt(v_new) * scalars["root_scale"] + scalars["eps"]
        x_new = x * scalars["shrink"] - scalars["size"] * m_new / root
        pairs = (x_new, x), (m_new, m), (v_new, v)
        return tuple(jnp.where(finite, new, old) for new, old in pairs)

    made = jax.tree.map(moved, learned, state.first, state.second, gradients)
    learned, first, second = jax.tree.transpose(
        jax.tree.structure(gradients), jax.tree.structure((0, 0, 0)), made
    )
    zeros = jax.tree.map(jnp.zeros_like, gradients)
    return learned, AdamState(first, second), zeros, {"grad_norm": norm, "finite": finite}
