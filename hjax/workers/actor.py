"""The actor: the policy that generates and is trained."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hjax.models.forward import response_log_probs, response_states, token_log_probs
from hjax.models.parameters import Params
from hjax.rollout.generator import Generator, bucket_length
from hjax.rollout.sampling import Sampling
from hjax.sharding.arrays import place, to_numpy
from hjax.sharding.pipeline import Stack
from hjax.sharding.protocols import PROMPT_ID, control, protocol
from hjax.sharding.transition import Transition
from hjax.workers.base import SCORED_KEYS, TOKEN_KEYS, TrainedWorker, WorkerContext, update_reads
from hjax.workers.optimizer import Prepare
from hjax.workers.passes import Batch, Objective

# What generation reads: token ids and what comes back once per row.
PROMPT_KEYS = ("prompts", "prompt_mask", "step", "columns", "prompt_text")


class Actor(TrainedWorker):
    """Primitive calls of HybridFlow's Table 4 for the policy."""

    # Behaviour log-probs, to compare with training's own on the same parameters.
    extra_keys = ("logprobs", "policy_logprobs")

    def __init__(self, context: WorkerContext):
        super().__init__(context)
        self.generator = Generator(self.network, self.layouts.generate, context.compute)
        self.transition = Transition(
            self.shardings,
            self.network.shardings(self.layouts.generate),
            self.network.shapes,
            self.network.read_dtypes(context.compute.dtype),
            context.transition_bucket_bytes,
        )
        self._seconds = {"transition": 0.0}
        self._asked = 0  # prompts so far, by which their rows know each other

    def token_loss(
        self, model: Any, batch: dict[str, jax.Array], share: int, loss: Any
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The policy loss and its statistics; adds ``token_prob_error``."""
        temperature = self.context.temperature if getattr(loss, "tempered", True) else 1.0
        logprobs, entropy = token_log_probs(
            model,
            response_states(model, batch, share, self.compute),
            batch["responses"],
            temperature,
            parts=self.compute.logit_parts,
        )
        token_loss, stats = loss(logprobs, entropy, batch)
        behaviour = batch.get("policy_logprobs", batch.get("logprobs"))
        if behaviour is not None:
            error = jnp.exp(jnp.abs(jax.lax.stop_gradient(logprobs) - behaviour))
            stats["token_prob_error"] = jnp.where(batch["response_mask"], error, 0.0)
        return token_loss, stats

    @protocol("3D_ALL_MICRO_DP", phase="generate", reads=PROMPT_KEYS)
    def generate_sequences(
        self, prompts: Mapping[str, Any], greedy: bool = False, samples: int | None = None
    ) -> dict[str, Any]:
        """Answer prompts.

        Args:
          prompts: ``prompts`` int32 [prompts, prompt_length] padded on the left, ``prompt_mask``,
            ``step``; ``columns`` and ``prompt_text`` come back once per row.
          greedy: one response per prompt, the most likely tokens.
          samples: responses per prompt, if not the configured number.

        Returns:
          the batch: rows = prompts x samples, see docs/design.md.
        """
        context = self.context
        count = 1 if greedy else (samples or context.samples)
        asked = prompts["prompts"].shape[0]
        rows = asked * count
        # Of this call alone: the same prompt in another call is another.
        ids = np.arange(self._asked, self._asked + asked, dtype=np.int64)
        self._asked += asked
        sequence = place(
            np.arange(rows, dtype=np.int32), self.layouts.generate.sharding("batch")
        )
        with self.gathered() as params:
            rollout: dict[str, Any] = self.generator.generate(
                params,
                prompts["prompts"],
                prompts["prompt_mask"],
                sequence,
                seed=context.seed,
                step=prompts.get("step", 0),
                samples=count,
                max_new_tokens=context.max_response_length,
                sampling=Sampling(temperature=0.0) if greedy else context.sampling,
                stop=context.stop,
            )
            # This waits for the responses: the cache is gone before training's parameters return.
            rollout = trim(rollout)
        rollout[PROMPT_ID] = np.repeat(ids, count)
        rollout["columns"] = {
            name: [value for value in values for _ in range(count)]
            for name, values in prompts.get("columns", {}).items()
        }
        if context.tokenizer is not None:
            texts = prompts.get("prompt_text")
            rollout |= self._decode(rollout, texts and [t for t in texts for _ in range(count)])
        return rollout

    @contextlib.contextmanager
    def gathered(self) -> Iterator[Params]:
        """Lend out the parameters as generation reads them; in between there are no others.

        Training's are back afterwards, also when something failed.
        """
        held = self.transition.start(self.params)
        self.params = {}
        start = time.perf_counter()
        try:
            params = self.transition.advance(held)
            self._seconds["transition"] += time.perf_counter() - start
            yield params
        finally:
            start = time.perf_counter()
            self.params = self.transition.back(held)
            self._seconds["transition"] += time.perf_counter() - start

    def _decode(
        self, rollout: Mapping[str, Any], prompt_text: list[str] | None
    ) -> dict[str, list[str]]:
        tokenizer = self.context.tokenizer
        prompts = ragged(rollout["prompts"], rollout["prompt_mask"])
        responses = ragged(rollout["responses"], rollout["response_mask"])
        return {
            "prompt_text": prompt_text or [tokenizer.decode(prompt) for prompt in prompts],
            "response_text": [
                tokenizer.decode_response(prompt, response)
                for prompt, response in zip(prompts, responses, strict=True)
            ],
        }

    @protocol("3D_PROTO", reads=SCORED_KEYS)
    def compute_log_prob(self, batch: Mapping[str, Any]) -> dict[str, jax.Array]:
        """``old_logprobs`` float32 [rows, length] of the responses under the policy as it is."""
        return {"old_logprobs": self.score(self._log_prob, batch)}

    def _log_prob(self, model: Any, batch: Any, share: int) -> jax.Array:
        return response_log_probs(model, batch, share, self.compute, self.context.temperature)

    @protocol("3D_PROTO", reads=SCORED_KEYS)
    def compute_loss(self, batch: Mapping[str, Any]) -> dict[str, jax.Array]:
        """``loss``: mean negative log-likelihood per response token, untempered, in nats."""
        logprobs = self.score(self._untempered_log_prob, batch)
        mask = batch["response_mask"]
        return {"loss": -jnp.sum(logprobs) / jnp.maximum(jnp.sum(mask), 1)}

    def _untempered_log_prob(self, model: Any, batch: Any, share: int) -> jax.Array:
        return response_log_probs(model, batch, share, self.compute)

    @protocol("3D_PROTO", phase="update", reads=update_reads)
    def update_actor(
        self, batch: Mapping[str, Any], pretrain: Mapping[str, Any] | None = None
    ) -> dict[str, jax.Array]:
        """One optimizer step of the stage's loss; metrics as scalars.

        Args:
          batch: what the loss needs.
          pretrain: demonstrations whose mean negative log-likelihood, times their entry
            ``coefficient``, is added to the loss (PPO-ptx).
        """
        if pretrain is None:
            return self.update(batch)
        keys = (*TOKEN_KEYS, "coefficient")
        return self.update(batch, pretrain={key: pretrain[key] for key in keys})

    def pretraining(self) -> tuple[Objective, Prepare] | None:
        """The supervised loss of demonstrations, with their coefficient."""
        loss = self.context.supervised_loss
        if loss is None:
            return None
        supervised, weigh = self.objective(loss, grouped=False)  # they do not share prompts

        def prepare(batch: Batch) -> Batch:
            weighed = weigh(batch)
            return weighed | {"weights": batch["coefficient"] * weighed["weights"]}

        def objective(params: Params, batch: Batch, stack: Stack) -> Any:
            total, _ = supervised(params, batch, stack)
            # The coefficient taken out again: what is shown is the loss itself.
            return total, {"pretrain_loss": total / batch["coefficient"]}

        return objective, prepare

    @control
    def take_seconds(self) -> dict[str, float]:
        """Seconds spent inside calls since last asked, by what for."""
        taken, self._seconds = self._seconds, dict.fromkeys(self._seconds, 0.0)
        return taken

    def programs(self, rows: int, prompt_length: int) -> Iterator[tuple[str, Callable[[], Any]]]:
        """Transition, generation, log-probs and update of ``rows`` sequences."""
        yield from self.transition.programs()
        samples, sampling = self.context.samples, self.context.sampling
        yield "generate", lambda: self._trace_generate(rows, prompt_length, samples, sampling)
        greedy = Sampling(temperature=0.0)
        yield "generate_greedy", lambda: self._trace_generate(rows, prompt_length, 1, greedy)
        trace = self.trace_forward
        yield "compute_log_prob", lambda: trace(self._log_prob, rows, prompt_length)
        yield from super().programs(rows, prompt_length)

    def _trace_generate(
        self, rows: int, prompt_length: int, samples: int, sampling: Sampling
    ) -> Any:
        return self.generator.trace(
            self._generation_copy(),
            rows // self.context.samples,
            prompt_length,
            samples=samples,
            max_new_tokens=self.context.max_response_length,
            sampling=sampling,
            stop=self.context.stop,
        )

    def _generation_copy(self) -> Params:
        """What generation reads, as jax.ShapeDtypeStruct with shardings."""
        return jax.tree.map(
            lambda x, dtype, s: jax.ShapeDtypeStruct(x.shape, dtype, sharding=s),
            self.network.shapes,
            self.network.read_dtypes(self.context.compute.dtype),
            self.network.shardings(self.layouts.generate),
        )

    def beside(self, program: str) -> dict[str, Any]:
        """During the transition what is on neither side of a bucket; then masters of a copy."""
        names = [name for name, _ in self.transition.programs()]
        if program in names:
            params = self.transition.standing(names.index(program))
        elif program.startswith("generate"):
            params = self.transition.kept()
        else:
            return super().beside(program)
        return self.abstract_state() | {"params": params}


def trim(rollout: Mapping[str, jax.Array]) -> dict[str, Any]:
    """Cut the response arrays to the bucket of the longest response."""
    limit = rollout["responses"].shape[1]
    longest = int(to_numpy(rollout["response_mask"]).sum(axis=1).max(initial=1))
    length = bucket_length(longest, limit)
    prompt = ("prompts", "prompt_mask")
    return {
        key: x[:, :length] if length < limit and x.ndim == 2 and key not in prompt else x
        for key, x in rollout.items()
    }


def ragged(tokens: Any, mask: Any) -> list[list[int]]:
    """Rows of token ids without their padding."""
    tokens, mask = to_numpy(tokens), to_numpy(mask)
    return [row[keep].tolist() for row, keep in zip(tokens, mask, strict=True)]
