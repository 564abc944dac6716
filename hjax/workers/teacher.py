"""A teacher: a language model that says which tokens it would have drawn."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from hjax.models.forward import read_responses, top_log_probs
from hjax.sharding.protocols import protocol
from hjax.workers.base import SCORED_KEYS, WorkerContext
from hjax.workers.model import ModelWorker
from hjax.workers.process_reward import LearningModel
from hjax.workers.trained import update_reads
from hjax.xla.program import Program


class Teacher(ModelWorker):
    """Scores the responses of a student; its weights stay as they are."""

    def __init__(self, context: WorkerContext):
        super().__init__(context)
        assert context.model is not None
        asked = context.options.algorithm.top_k
        self.top = min(asked or context.model.vocab_size, context.model.vocab_size)

    @protocol("3D_PROTO", reads=SCORED_KEYS)
    def compute_top_log_probs(self, batch: Mapping[str, Any]) -> dict[str, jax.Array]:
        """``teacher_tokens`` int32 [rows, length, k], the most probable tokens in the place of each
        response token, and ``teacher_logprobs`` float32 of the same shape, at the actor's
        temperature; 0 on padding."""
        logprobs, tokens = self.score(self._top, batch)
        return {"teacher_logprobs": logprobs, "teacher_tokens": tokens}

    def _top(self, model: Any, batch: Any, share: int) -> tuple[jax.Array, jax.Array]:
        def read(states: jax.Array, _: jax.Array) -> Any:
            temperature, layout = self.context.temperature, self.compute.layout
            return top_log_probs(model, states, self.top, temperature, layout)

        logprobs, tokens = read_responses(model, batch, share, self.compute, read)
        mask = batch["response_mask"][..., None]
        return jnp.where(mask, logprobs, 0.0), jnp.where(mask, tokens, 0)

    def programs(self, rows: int, prompt_length: int) -> Iterator[Program]:
        """Scores of ``rows`` sequences."""
        trace = self.trace_forward
        yield Program("compute_top_log_probs", lambda: trace(self._top, rows, prompt_length))
        yield from super().programs(rows, prompt_length)


class LearningTeacher(Teacher, LearningModel):
    """A teacher that is taught itself, by demonstrations, as it teaches."""

    @protocol("3D_PROTO", phase="update", reads=update_reads)
    def update_teacher(self, batch: Mapping[str, Any]) -> dict[str, jax.Array]:
        """One optimizer step on demonstrations; metrics as scalars."""
        return self.update(batch)
