"""What flow models are trained on: samples, conditions, and rewards of samples."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from hjax.user_code import load_subclass


class FlowProblem:
    """Data and rewards of a flow model; a class of your own is named ``path.py:Class``.

    Attributes:
      shape: of a sample.
      conditions: number of conditions, numbered from 0.
    """

    shape: tuple[int, ...] = ()
    conditions: int = 1

    def draw(self, key: jax.Array) -> jax.Array:
        """One sample of the data, float32; inside jit."""
        raise NotImplementedError(f"{type(self).__name__} must define draw(key)")

    def reward(self, samples: np.ndarray, conditions: np.ndarray) -> np.ndarray:
        """Rewards float [rows] of samples [rows, ...]; what is not finite is unscored."""
        raise NotImplementedError(f"{type(self).__name__} must define reward")

    def measures(self, samples: np.ndarray, conditions: np.ndarray) -> Mapping[str, float]:
        """Further metrics of an evaluation, by name."""
        return {}


class GaussianRing(FlowProblem):
    """Sixteen Gaussians of standard deviation 0.12 on a circle of radius 2. The data has no
    condition; condition c rewards a sample near mode 4 c with 1."""

    shape = (2,)
    conditions = 4
    modes, radius, deviation = 16, 2.0, 0.12
    allowed: tuple[int, ...] = (0,)  # modes that are right, counted from 4 c

    def centers(self) -> np.ndarray:
        """float64 [modes, 2]."""
        angles = 2 * np.pi * np.arange(self.modes) / self.modes
        return self.radius * np.stack([np.cos(angles), np.sin(angles)], axis=1)

    def draw(self, key: jax.Array) -> jax.Array:
        """A point of a mode drawn uniformly."""
        which, noise = jax.random.split(key)
        center = jnp.asarray(self.centers(), jnp.float32)[jax.random.randint(which, (), 0, 16)]
        return center + self.deviation * jax.random.normal(noise, (2,))

    def nearest(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(number of the nearest mode int [rows], distance to it float [rows])."""
        far = np.linalg.norm(samples[:, None] - self.centers(), axis=2)
        return far.argmin(axis=1), far.min(axis=1)

    def right(self, samples: np.ndarray, conditions: np.ndarray) -> np.ndarray:
        """bool [rows]: within 3 standard deviations of a mode that its condition allows."""
        mode, far = self.nearest(samples)
        turned = (mode - 4 * conditions) % self.modes
        return np.isin(turned, self.allowed) & (far < 3 * self.deviation)

    def reward(self, samples: np.ndarray, conditions: np.ndarray) -> np.ndarray:
        """1 where it is ``right``, else 0; NaN for a sample that is not finite."""
        finite = np.isfinite(samples).all(axis=1)
        safe = np.where(finite[:, None], samples, 0)
        return np.where(finite, self.right(safe, conditions), np.nan).astype(np.float32)

    def measures(self, samples: np.ndarray, conditions: np.ndarray) -> Mapping[str, float]:
        """``balance``: entropy of the allowed modes among right samples, over its largest value;
        ``spread``: root mean square distance of right samples to their mode, over the data's."""
        mode, far = self.nearest(samples)
        turned, right = (mode - 4 * conditions) % self.modes, self.right(samples, conditions)
        found: dict[str, float] = {}
        if right.any():
            found["spread"] = float(np.sqrt(np.mean(far[right] ** 2) / 2) / self.deviation)
        if len(self.allowed) > 1 and right.any():
            each = np.array([(turned[right] == mode).mean() for mode in self.allowed])
            entropy = -np.sum(each * np.log(np.where(each > 0, each, 1)))
            found["balance"] = float(entropy / np.log(len(self.allowed)))
        return found


class GaussianRingPairs(GaussianRing):
    """The ring where each condition allows a mode and the one opposite."""

    allowed = (0, 8)


_STROKES = (
    (
        "..####..",
        ".#....#.",
        ".#....#.",
        ".#....#.",
        ".#....#.",
        ".#....#.",
        "..####..",
        "........",
    ),
    (
        "...#....",
        "..##....",
        "...#....",
        "...#....",
        "...#....",
        "...#....",
        "..###...",
        "........",
    ),
    (
        ".#....#.",
        "..#..#..",
        "...##...",
        "...##...",
        "..#..#..",
        ".#....#.",
        "........",
        "........",
    ),
    (
        ".######.",
        "....#...",
        "....#...",
        "....#...",
        "....#...",
        "....#...",
        "....#...",
        "........",
    ),
)


class Glyphs(FlowProblem):
    """Pictures [8, 8] of four glyphs (a ring, a one, a cross, a T), shifted by up to one pixel,
    from -1 to 1 with noise of 0.1. Condition c rewards a picture that looks most like glyph c."""

    shape = (8, 8)
    conditions = 4

    def templates(self) -> np.ndarray:
        """float32 [glyphs, shifts, 8, 8]."""
        plain = np.array(
            [[[1.0 if c == "#" else -1.0 for c in row] for row in g] for g in _STROKES]
        )
        shifts = [(dy, dx) for dy in (-1, 0, 1) for dx in (-1, 0, 1)]
        each = [np.roll(plain, shift, axis=(1, 2)) for shift in shifts]
        return np.stack(each, axis=1).astype(np.float32)

    def draw(self, key: jax.Array) -> jax.Array:
        """A glyph, its shift and noise drawn uniformly."""
        which, noise = jax.random.split(key)
        every = jnp.asarray(self.templates()).reshape(-1, 8, 8)
        chosen = every[jax.random.randint(which, (), 0, len(every))]
        return chosen + 0.1 * jax.random.normal(noise, (8, 8))

    def nearest(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(number of the most similar glyph int [rows], mean squared error to it [rows])."""
        every = self.templates().reshape(-1, 64)
        flat = samples.reshape(len(samples), 64)
        errors = ((flat[:, None] - every) ** 2).mean(axis=2)
        return errors.argmin(axis=1) // 9, errors.min(axis=1)

    def reward(self, samples: np.ndarray, conditions: np.ndarray) -> np.ndarray:
        """1 for the condition's glyph with a mean squared error below 0.3, else 0; NaN for a
        sample that is not finite."""
        finite = np.isfinite(samples).all(axis=(1, 2))
        glyph, error = self.nearest(np.where(finite[:, None, None], samples, 0))
        right = (glyph == conditions) & (error < 0.3)
        return np.where(finite, right, np.nan).astype(np.float32)

    def measures(self, samples: np.ndarray, conditions: np.ndarray) -> Mapping[str, float]:
        """``diversity``: mean over conditions of the variance of a pixel between pictures."""
        kept = [samples[conditions == c] for c in range(self.conditions)]
        return {"diversity": float(np.mean([x.var(axis=0).mean() for x in kept if len(x)]))}


FLOW_PROBLEMS: dict[str, type[FlowProblem]] = {
    "ring": GaussianRing,
    "ring_pairs": GaussianRingPairs,
    "glyphs": Glyphs,
}


def find_problem(name: str) -> FlowProblem:
    """The problem that a config names: a shipped one, or ``path.py:Class``.

    Raises:
      ConfigError: there is none.
    """
    return load_subclass(
        name, "config.algorithm.problem", base=FlowProblem, shipped=FLOW_PROBLEMS
    )()
