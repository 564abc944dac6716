"""A language model that learns from outcomes what each token was worth (PRIME)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import jax

from hjax.models.forward import read_responses, response_log_probs, token_log_probs
from hjax.sharding.protocols import protocol
from hjax.workers.base import SCORED_KEYS
from hjax.workers.trained import TrainedWorker, update_reads
from hjax.xla.program import Program


class LearningModel(TrainedWorker):
    """A language model that learns and generates nothing."""

    def token_loss(
        self, model: Any, batch: dict[str, jax.Array], share: int, loss: Any
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The loss of the responses' log-probs, and its statistics."""
        temperature = self.context.temperature if getattr(loss, "tempered", True) else 1.0

        def read(states: jax.Array, tokens: jax.Array) -> Any:
            return token_log_probs(model, states, tokens, temperature, layout=self.compute.layout)

        logprobs, entropy = read_responses(model, batch, share, self.compute, read)
        return loss(logprobs, entropy, batch)


class ImplicitReward(LearningModel):
    """PRIME's reward model: log-ratios to the reference are its rewards of tokens."""

    @protocol("3D_PROTO", reads=SCORED_KEYS)
    def compute_process_reward(self, batch: Mapping[str, Any]) -> dict[str, jax.Array]:
        """``process_logprobs`` float32 [rows, length], at the actor's temperature, 0 on padding."""
        return {"process_logprobs": self.score(self._log_prob, batch)}

    def _log_prob(self, model: Any, batch: Any, share: int) -> jax.Array:
        return response_log_probs(model, batch, share, self.compute, self.context.temperature)

    @protocol("3D_PROTO", phase="update", reads=update_reads)
    def update_reward(self, batch: Mapping[str, Any]) -> dict[str, jax.Array]:
        """One optimizer step on the outcomes; metrics as scalars."""
        return self.update(batch)

    def programs(self, rows: int, prompt_length: int) -> Iterator[Program]:
        """Log-probs and update of ``rows`` sequences."""
        trace = self.trace_forward
        yield Program("compute_process_reward", lambda: trace(self._log_prob, rows, prompt_length))
        yield from super().programs(rows, prompt_length)
