"""The coefficient of the entropy bonus, where it follows a target."""

from __future__ import annotations

import math

from hjax.errors import ConfigError


class AdaptiveEntropy:
    r"""A coefficient that rises while the entropy is below a target, and falls while it is above.

    .. math:: c \leftarrow \mathrm{clip}(c \pm \mathrm{step}, 0, \mathrm{most})

    Skywork-OR1 (He et al. 2025, https://arxiv.org/abs/2505.22312): while the entropy is above the
    target the bonus is off, whatever c. TRL has the same.

    Args:
      coef: the first coefficient, loss per nat, 0 to most.
      target: nats per token, above 0.
      step: by which it moves after each step, above 0.
      most: its largest value.
    """

    def __init__(self, coef: float, target: float, step: float, most: float):
        for name, value in (("target", target), ("step", step), ("most", most)):
            if not value > 0:
                raise ConfigError(f"adaptive entropy: {name}={value} must be above 0")
        if not 0 <= coef <= most:
            raise ConfigError(f"adaptive entropy: coef={coef} must lie in 0 to most={most}")
        self.value, self.target, self.step, self.most = coef, target, step, most
        self.below = True  # the target, as far as is known

    @property
    def coef(self) -> float:
        """The coefficient to use now."""
        return self.value if self.below else 0.0

    def update(self, entropy: float) -> None:
        """Move by one step's mean entropy per token, in nats; one that is not finite says nothing.

        Args:
          entropy: of the policy, measured in the updates.
        """
        if not math.isfinite(entropy):
            return
        self.below = entropy <= self.target
        moved = self.value + (self.step if self.below else -self.step)
        self.value = min(max(moved, 0.0), self.most)

    def state(self) -> dict[str, float]:
        """What a checkpoint needs."""
        return {"value": self.value, "below": float(self.below)}

    def restore(self, state: dict[str, float]) -> None:
        """Continue from what ``state`` returned."""
        self.value, self.below = float(state["value"]), bool(state["below"])
