"""The reference: the frozen policy that the KL is measured against."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import jax

from hjax.models.forward import response_log_probs
from hjax.sharding.protocols import protocol
from hjax.workers.base import SCORED_KEYS
from hjax.workers.model import ModelWorker
from hjax.xla.program import Program


class Reference(ModelWorker):
    """Log-probs of the responses under a policy that does not change."""

    @protocol("3D_PROTO", reads=SCORED_KEYS)
    def compute_ref_log_prob(self, batch: Mapping[str, Any]) -> dict[str, jax.Array]:
        """``ref_logprobs`` float32 [rows, length], at the actor's temperature, 0 on padding."""
        return {"ref_logprobs": self.score(self._ref_log_prob, batch)}

    def _ref_log_prob(self, model: Any, batch: Any, share: int) -> jax.Array:
        return response_log_probs(model, batch, share, self.compute, self.context.temperature)

    def programs(self, rows: int, prompt_length: int) -> Iterator[Program]:
        """Log-probs of ``rows`` sequences."""
        trace = self.trace_forward
        scores = self._ref_log_prob
        yield Program("compute_ref_log_prob", lambda: trace(scores, rows, prompt_length))
