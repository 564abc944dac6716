"""The model that learns to judge: a scalar head, trained on pairs or on labelled steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from hjax.models.forward import read_responses
from hjax.sharding.protocols import protocol
from hjax.workers.base import SCORED_KEYS
from hjax.workers.trained import TrainedWorker, update_reads
from hjax.xla.program import Program


class Scorer(TrainedWorker):
    """Scores of responses, after each of their tokens."""

    scalar = True
    places_after = 1

    def token_loss(
        self, model: Any, batch: dict[str, jax.Array], share: int, loss: Any
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The loss of scores and its statistics."""
        return loss(self._read_scores(model, batch, share), batch)

    @protocol("3D_PROTO", phase="prepare", reads=SCORED_KEYS)
    def compute_scores(self, batch: Mapping[str, Any]) -> dict[str, jax.Array]:
        """``scores`` float32 [rows, length]: before each response token, 0 on padding."""
        return {"scores": self.score(self._scores, batch)}

    @protocol("3D_PROTO", phase="update", reads=update_reads)
    def update_scores(self, batch: Mapping[str, Any]) -> dict[str, jax.Array]:
        """One optimizer step of the loss; metrics as scalars."""
        return self.update(batch)

    def _scores(self, model: Any, batch: Any, share: int) -> jax.Array:
        return jnp.where(batch["response_mask"], self._read_scores(model, batch, share), 0.0)

    def _read_scores(self, model: Any, batch: Mapping[str, jax.Array], share: int) -> jax.Array:
        return read_responses(
            model.decoder, dict(batch), share, self.compute, lambda x, _: model.unbiased(x)
        )

    def programs(self, rows: int, prompt_length: int) -> Iterator[Program]:
        """Scores and update of ``rows`` sequences."""
        trace = self.trace_forward
        yield Program("compute_scores", lambda: trace(self._scores, rows, prompt_length))
        yield from super().programs(rows, prompt_length)
