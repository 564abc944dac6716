"""The reference: the frozen policy that the KL is measured against."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from hjax.models.forward import response_states, token_log_probs
from hjax.sharding.protocols import protocol
from hjax.workers.base import TOKEN_KEYS, ModelWorker


class Reference(ModelWorker):
    """Log-probs of the responses under a policy that does not change."""

    @protocol("3D_PROTO")
    def compute_ref_log_prob(self, batch: Mapping[str, Any]) -> dict[str, jax.Array]:
        """``ref_logprobs`` float32 [rows, length], at the actor's temperature, 0 on padding."""
        tokens = {key: batch[key] for key in TOKEN_KEYS}
        return {"ref_logprobs": self.forward(self._ref_log_prob, self.params, tokens)}

    def _ref_log_prob(self, model: Any, batch: Any, share: int) -> jax.Array:
        hidden = response_states(model, batch, share, self.compute)
        logprobs, _ = token_log_probs(
            model,
            hidden,
            batch["responses"],
            self.context.temperature,
            with_entropy=False,
            parts=self.compute.logit_parts,
        )
        return jnp.where(batch["response_mask"], logprobs, 0.0)

    def programs(self, rows: int, prompt_length: int) -> Iterator[tuple[str, Callable[[], Any]]]:
        """Log-probs of ``rows`` sequences."""
        trace = self.trace_forward
        yield "compute_ref_log_prob", lambda: trace(self._ref_log_prob, rows, prompt_length)
