"""Flow matching: its loss, and the deterministic and stochastic steps of sampling.

``sigma`` runs from 1 (noise) to 0 (data), x_sigma = (1 - sigma) x + sigma noise, and the velocity
is v = E[noise - x | x_sigma] (Lipman et al. 2023, arXiv 2210.02747). The stochastic steps have the
same marginals (Flow-GRPO, arXiv 2505.05470).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from hjax.errors import ConfigError


def sigma_grid(steps: int) -> np.ndarray:
    """The noise levels of sampling, float32 [steps + 1], equally spaced from 1 to 0."""
    if steps < 2:
        raise ConfigError(f"sampling in {steps} steps: 2 or more")
    return np.linspace(1, 0, steps + 1).astype(np.float32)


def check_sigmas(sigmas: np.ndarray) -> None:
    """Raise ConfigError for a grid that does not fall from at most 1 to at least 0."""
    sigmas = np.asarray(sigmas)
    inside = bool((sigmas[:-1] > 0).all() and sigmas[0] <= 1 and sigmas[-1] >= 0)
    if not inside or not bool((np.diff(sigmas) < 0).all()):
        raise ConfigError(
            f"noise levels {sigmas.tolist()}: they fall from at most 1 to 0, and all but the last "
            "are in (0, 1]"
        )


def deviations(sigmas: np.ndarray, noise: float) -> np.ndarray:
    """s = noise sqrt(sigma / (1 - sigma)) of each step, float32 [steps]; at sigma = 1 the second
    noise level stands in the denominator.

    Raises:
      ConfigError: noise that is not above 0, whose steps have no density, or such a grid.
    """
    if not noise > 0:
        raise ConfigError(
            f"noise={noise:g}: steps without noise have no log-probability to learn from; use a "
            "number above 0, such as 0.7 (evaluation samples without noise)"
        )
    check_sigmas(sigmas)
    first = np.asarray(sigmas[:-1], np.float64)
    below = np.where(first < 1, first, float(sigmas[1]))
    return (noise * np.sqrt(first / (1 - below))).astype(np.float32)


class FlowStep(NamedTuple):
    """The numbers of a step; arrays or scalars that broadcast over samples.

    Attributes:
      sigma: before it.
      change: of sigma, below 0.
      deviation: s of ``deviations``; 0: a deterministic step.
    """

    sigma: jax.Array
    change: jax.Array
    deviation: jax.Array

    def mean(self, x: jax.Array, velocity: jax.Array) -> jax.Array:
        """Where the step leads from x on average; x and the velocity alike."""
        drift = self.deviation**2 / (2 * self.sigma) * self.change
        return x * (1 + drift) + velocity * (self.change + drift * (1 - self.sigma))

    @property
    def spread(self) -> jax.Array:
        """Standard deviation around ``mean``, in each dimension."""
        return self.deviation * jnp.sqrt(-self.change)

    def log_density(self, after: jax.Array, mean: jax.Array) -> jax.Array:
        """Log-density of an arrival, the mean over dimensions (a tempered ratio), float32 [rows].

        Args:
          after, mean: [rows, ...].
        """
        normal = (after - mean) / self.spread
        each = -0.5 * normal**2 - jnp.log(self.spread) - 0.5 * np.log(2 * np.pi)
        return jnp.mean(each.reshape(each.shape[0], -1), axis=1)


def flow_steps(sigmas: np.ndarray, noise: float) -> FlowStep:
    """The steps of a grid as arrays [steps]; ``noise`` 0: deterministic ones."""
    check_sigmas(sigmas)
    every = deviations(sigmas, noise) if noise else np.zeros(len(sigmas) - 1, np.float32)
    return FlowStep(jnp.asarray(sigmas[:-1]), jnp.asarray(np.diff(sigmas)), jnp.asarray(every))
