"""What a calibration runs of hjax: GRPO as it is, and GRPO without its updates."""

from __future__ import annotations

from typing import Any

from hjax.algorithms import GRPO, Batch
from hjax.controller import join


class Scored(GRPO):
    """GRPO that never learns: its updates need not be compiled."""

    def learn(self, batch: Any) -> Batch:
        """Score the samples."""
        reference = self.reference.compute_ref_log_prob(batch)
        return self.compute_advantages(join(batch, reference, self.rewards(batch)))
