"""The actor: the policy that generates and is trained."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hjax.errors import ConfigError
from hjax.models.forward import response_states, token_log_probs
from hjax.models.parameters import Params
from hjax.rollout.generator import Generator, bucket_length
from hjax.rollout.sampling import Sampling
from hjax.sharding.pipeline import Stack
from hjax.sharding.protocols import protocol
from hjax.sharding.transition import Transition
from hjax.workers.base import TOKEN_KEYS, TrainedWorker, WorkerContext
from hjax.workers.optimizer import Prepare, Updater
from hjax.workers.passes import Batch, Objective


class Actor(TrainedWorker):
    """Primitive calls of HybridFlow's Table 4 for the policy."""

    # Behaviour log-probs, to compare with training's own on the same parameters.
    extra_keys = ("logprobs", "policy_logprobs", "pretrain")

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
        self._warm_start: tuple[Updater, Any] | None = None
        self._seconds = {"transition": 0.0}

    def token_loss(
        self, model: Any, batch: dict[str, jax.Array], share: int, loss: Any
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The policy loss and its statistics; adds ``token_prob_error``."""
        temperature = self.context.temperature if getattr(loss, "tempered", True) else 1.0
        logprobs, entropy = self._log_probs(model, batch, share, temperature)
        token_loss, stats = loss(logprobs, entropy, batch)
        behaviour = batch.get("policy_logprobs", batch.get("logprobs"))
        if behaviour is not None:
            error = jnp.exp(jnp.abs(jax.lax.stop_gradient(logprobs) - behaviour))
            stats["token_prob_error"] = jnp.where(batch["response_mask"], error, 0.0)
        return token_loss, stats

    @protocol("3D_ALL_MICRO_DP", phase="generate")
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
        rows = prompts["prompts"].shape[0] * count
        sequence = jax.device_put(
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

    @protocol("3D_PROTO")
    def compute_log_prob(self, batch: Mapping[str, Any]) -> dict[str, jax.Array]:
        """``old_logprobs`` float32 [rows, length] of the responses under the policy as it is."""
        tokens = {key: batch[key] for key in TOKEN_KEYS}
        return {"old_logprobs": self.forward(self._log_prob, self.params, tokens)}

    def _log_prob(self, model: Any, batch: Any, share: int) -> jax.Array:
        logprobs, _ = self._log_probs(
            model, batch, share, self.context.temperature, with_entropy=False
        )
        return jnp.where(batch["response_mask"], logprobs, 0.0)

    @protocol("3D_PROTO")
    def compute_loss(self, batch: Mapping[str, Any]) -> dict[str, jax.Array]:
        """``loss``: mean negative log-likelihood per response token, untempered, in nats."""
        tokens = {key: batch[key] for key in TOKEN_KEYS}

        def pretraining_loss(model: Any, batch: Any, share: int) -> jax.Array:
            return self._negative_log_likelihood(model, batch, share)

        losses = self.forward(pretraining_loss, self.params, tokens)
        return {"loss": jnp.sum(losses * _mean_weights(tokens))}

    @protocol("3D_PROTO", phase="update")
    def update_actor(
        self, batch: Mapping[str, Any], pretrain: Mapping[str, Any] | None = None
    ) -> dict[str, jax.Array]:
        """One optimizer step of the algorithm's loss; metrics as scalars.

        Args:
          batch: what the loss needs.
          pretrain: demonstrations whose mean negative log-likelihood, times their entry
            ``coefficient``, is added to the loss (PPO-ptx).
        """
        if pretrain is not None:
            pretrain = {key: pretrain[key] for key in (*TOKEN_KEYS, "coefficient")}
        return self.update({**batch, "pretrain": pretrain})

    def pretraining(self) -> tuple[Objective, Prepare]:
        """Mean negative log-likelihood per response token of demonstrations, with coefficient."""

        def prepare(batch: Batch) -> Batch:
            mean = _mean_weights(batch)
            tokens = {key: batch[key] for key in TOKEN_KEYS}
            return tokens | {"weights": batch["coefficient"] * mean, "stat_weights": mean}

        def objective(params: Params, batch: Batch, stack: Stack) -> Any:
            model = self.network.bind(params, stack)
            share = 1  # demonstrations do not share prompts
            losses = self._negative_log_likelihood(model, batch, share)
            stats = {"pretrain_loss": jnp.sum(batch["stat_weights"] * losses)}
            return jnp.sum(batch["weights"] * losses), stats

        return objective, prepare

    def _log_probs(
        self,
        model: Any,
        batch: Mapping[str, jax.Array],
        share: int,
        temperature: float,
        with_entropy: bool = True,
    ) -> tuple[jax.Array, jax.Array | None]:
        hidden = response_states(model, batch, share, self.compute)
        parts = self.compute.logit_parts
        return token_log_probs(
            model, hidden, batch["responses"], temperature, with_entropy, parts
        )

    def _negative_log_likelihood(
        self, model: Any, batch: Mapping[str, jax.Array], share: int
    ) -> jax.Array:
        """Minus each response token's untempered log-prob, in nats; 0 on padding."""
        logprobs, _ = self._log_probs(model, batch, share, 1.0, with_entropy=False)
        return jnp.where(batch["response_mask"], -logprobs, 0.0)

    @protocol("3D_PROTO", phase="update")
    def update_warm_start(self, batch: Mapping[str, Any]) -> dict[str, jax.Array]:
        """One supervised step on demonstrations, with an optimizer of its own."""
        if self._warm_start is None:
            settings = self.context.warm_start
            if settings is None:
                raise ConfigError(f"{self.role}: this run was set up without a warm start")
            # Demonstrations do not share prompts.
            updater = self.make_updater(self.context.warm_start_loss, settings, grouped=False)
            self._warm_start = (updater, updater.init(self.params))
        updater, state = self._warm_start
        tokens = {key: batch[key] for key in TOKEN_KEYS}
        self.params, state, metrics = updater(self.params, state, tokens)
        self._warm_start = (updater, state)
        return metrics

    def finish_warm_start(self) -> None:
        """Drop the warm start's optimizer; training starts with a fresh one."""
        self._warm_start = None
        self.start_optimizer()

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


def _mean_weights(batch: Mapping[str, jax.Array]) -> jax.Array:
    """[rows, length] whose weighted sum is the mean over all response tokens."""
    mask = batch["response_mask"]
    return mask / jnp.maximum(jnp.sum(mask), 1)


def trim(rollout: Mapping[str, jax.Array]) -> dict[str, Any]:
    """Cut the response arrays to the bucket of the longest response."""
    limit = rollout["responses"].shape[1]
    longest = int(np.asarray(rollout["response_mask"]).sum(axis=1).max(initial=1))
    length = bucket_length(longest, limit)
    prompt = ("prompts", "prompt_mask")
    return {
        key: x[:, :length] if length < limit and x.ndim == 2 and key not in prompt else x
        for key, x in rollout.items()
    }


def ragged(tokens: Any, mask: Any) -> list[list[int]]:
    """Rows of token ids without their padding."""
    tokens, mask = np.asarray(tokens), np.asarray(mask)
    return [row[keep].tolist() for row, keep in zip(tokens, mask, strict=True)]
