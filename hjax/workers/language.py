"""Language models that score responses: reference, implicit process reward model, teacher."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from hjax.models.forward import map_response_states, token_log_probs, top_log_probs
from hjax.sharding.protocols import protocol
from hjax.workers.model import ModelWorker
from hjax.workers.trainable_worker import TrainableWorker, update_reads
from hjax.workers.worker import SCORED_KEYS, WorkerContext


class Reference(ModelWorker):
    """The reference policy: log-probs of responses under frozen weights, for the KL."""

    score_methods = {"compute_ref_log_prob": "_log_prob"}

    @protocol("3D_PROTO", reads=SCORED_KEYS)
    def compute_ref_log_prob(self, batch: Mapping[str, Any]) -> dict[str, jax.Array]:
        """``ref_logprobs`` float32 [rows, length], at the actor's temperature, 0 on padding."""
        return {"ref_logprobs": self.score(self._log_prob, batch)}


class LanguageWorker(TrainableWorker):
    """A trainable language model."""

    def token_loss(
        self, model: Any, batch: dict[str, jax.Array], share: int, loss: Any
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The loss of the responses' log-probs, and its statistics."""
        read = self.log_prob_reader(model, loss)
        logprobs, entropy = map_response_states(model, batch, share, self.compute, read)
        return loss(logprobs, entropy, batch)

    def log_prob_reader(self, model: Any, loss: Any) -> Callable[[jax.Array, jax.Array], Any]:
        """A function of hidden states and tokens: log-probs and entropy as the loss needs them."""
        temperature = self.context.temperature if getattr(loss, "tempered", True) else 1.0

        def read(states: jax.Array, tokens: jax.Array) -> Any:
            return token_log_probs(model, states, tokens, temperature, layout=self.compute.layout)

        return read


class ImplicitReward(LanguageWorker):
    """PRIME's implicit process reward model: its log-ratios to the reference are token rewards, and
    it is trained on outcomes."""

    score_methods = {"compute_process_reward": "_log_prob"}

    @protocol("3D_PROTO", reads=SCORED_KEYS)
    def compute_process_reward(self, batch: Mapping[str, Any]) -> dict[str, jax.Array]:
        """``process_logprobs`` float32 [rows, length], at the actor's temperature, 0 on padding."""
        return {"process_logprobs": self.score(self._log_prob, batch)}

    @protocol("3D_PROTO", phase="update", reads=update_reads)
    def update_reward(self, batch: Mapping[str, Any]) -> dict[str, jax.Array]:
        """One optimizer step on the outcomes; metrics as scalars."""
        return self.update(batch)


class Teacher(ModelWorker):
    """The teacher of a distillation: scores a student's responses with frozen weights."""

    score_methods = {"compute_top_log_probs": "_top"}

    def __init__(self, context: WorkerContext):
        super().__init__(context)
        assert context.model is not None
        vocab_size = context.model.vocab_size
        self.top = min(context.options.algorithm.top_k or vocab_size, vocab_size)

    @protocol("3D_PROTO", reads=SCORED_KEYS)
    def compute_top_log_probs(self, batch: Mapping[str, Any]) -> dict[str, jax.Array]:
        """``teacher_tokens`` int32 [rows, length, k], the most probable tokens at each response
        token's position, and ``teacher_logprobs`` float32 of the same shape, at the actor's
        temperature; 0 on padding."""
        logprobs, tokens = self.score(self._top, batch)
        return {"teacher_logprobs": logprobs, "teacher_tokens": tokens}

    def _top(self, model: Any, batch: Any, share: int) -> tuple[jax.Array, jax.Array]:
        def read(states: jax.Array, _: jax.Array) -> Any:
            temperature, layout = self.context.temperature, self.compute.layout
            return top_log_probs(model, states, self.top, temperature, layout)

        logprobs, tokens = map_response_states(model, batch, share, self.compute, read)
        mask = batch["response_mask"][..., None]
        return jnp.where(mask, logprobs, 0.0), jnp.where(mask, tokens, 0)


class LearningTeacher(Teacher, LanguageWorker):
    """A teacher that is itself trained on demonstrations during the distillation."""

    @protocol("3D_PROTO", phase="update", reads=update_reads)
    def update_teacher(self, batch: Mapping[str, Any]) -> dict[str, jax.Array]:
        """One optimizer step on demonstrations; metrics as scalars."""
        return self.update(batch)
