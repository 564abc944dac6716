"""The actor: the policy that generates and is trained."""

import contextlib
import functools
import time
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from hjax.errors import ConfigError
from hjax.models.forward import map_response_states, response_log_probs, response_states
from hjax.models.parameters import Network, Params
from hjax.sharding.pipeline import Stack
from hjax.sharding.protocols import control, protocol
from hjax.sharding.transfer_plan import TargetRegions
from hjax.sharding.transition import Transition
from hjax.workers.generating_worker import GeneratingWorker
from hjax.workers.language import LanguageWorker
from hjax.workers.micro_batching import Batch, Objective
from hjax.workers.optimizer import Prepare
from hjax.workers.parameter_worker import abstract, cast_copies, interpolate
from hjax.workers.trainable_worker import TrainableWorker, update_reads
from hjax.workers.worker import SCORED_KEYS, TOKEN_KEYS, WorkerContext
from hjax.xla.abstract_program import AbstractProgram


class Actor(LanguageWorker, GeneratingWorker):
    """Primitive calls of HybridFlow's Table 4 for the policy."""

    # Behaviour log-probs, compared with training's own on the same parameters.
    extra_keys = ("logprobs", "policy_logprobs")

    def __init__(self, context: WorkerContext):
        super().__init__(context)
        base, layouts = self.network.base, self.layouts
        dtypes = base.compute_dtypes(context.compute.dtype)
        self.transition = Transition(
            base.shardings(layouts.train),
            base.shardings(layouts.generate),
            base.shapes,
            dtypes,
            context.transition_bucket_bytes,
        )
        # In generation's dtypes, in which weights are published.
        self._published = base.compute_shapes(context.compute.dtype)
        self._copy = jax.jit(functools.partial(cast_copies, dtypes=dtypes))
        self._seconds = {"transition": 0.0}
        self.reference_adapters: Params = {}  # of an earlier step, with ``reference_sync``

    def token_loss(
        self, model: Any, batch: dict[str, jax.Array], share: int, loss: Any
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The policy loss and its statistics; adds ``token_prob_error``."""
        read = self.log_prob_reader(model, loss)
        if of := getattr(loss, "of_tokens", None):
            # The loss reads other tokens, which packs do not hold; the response's token comes last.
            states = response_states(model, batch, share, self.compute)
            tokens = jnp.concatenate([batch[of], batch["responses"][..., None]], axis=-1)
            found, entropy = read(states, tokens)
            token_loss, stats = loss(found[..., :-1], entropy, batch)
            logprobs = found[..., -1]
        else:
            logprobs, entropy = map_response_states(model, batch, share, self.compute, read)
            token_loss, stats = loss(logprobs, entropy, batch)
        behaviour = batch.get("policy_logprobs", batch.get("logprobs"))
        if behaviour is not None:
            error = jnp.exp(jnp.abs(jax.lax.stop_gradient(logprobs) - behaviour))
            stats["token_prob_error"] = jnp.where(batch["response_mask"], error, 0.0)
        return token_loss, stats

    @contextlib.contextmanager
    def generation_weights(self) -> Iterator[Any]:
        """Context manager: the weights in the generate layout (reshard to generation and back).

        Meanwhile the train layout's weights do not exist. Adapters are merged first; the adapters
        and their original matrices are kept. Training's weights come back even after an error.
        """
        start = time.perf_counter()
        before, self.params = self.params, {}
        try:
            held = self.transition.start(before if self.merge is None else self.merge(before))
        except BaseException:
            self.params = before
            raise
        if self.merge is None:
            before = {}
        try:
            params = self.transition.to_generate(held)
            params = self.generator.decoding_params(params, self.transition.generation_copies())
            self._seconds["transition"] += time.perf_counter() - start
            yield params
        finally:
            start = time.perf_counter()
            back = self.transition.to_train(held)
            self.params = back if self.merge is None else self.merge.unmerge(back, before)
            self._seconds["transition"] += time.perf_counter() - start

    @protocol("3D_PROTO", reads=SCORED_KEYS)
    def compute_log_prob(self, batch: Mapping[str, Any]) -> dict[str, jax.Array]:
        """``old_logprobs`` float32 [rows, length] of the responses under the current policy."""
        return {"old_logprobs": self.score(self._log_prob, batch)}

    @protocol("3D_PROTO", reads=SCORED_KEYS)
    def compute_ref_log_prob(self, batch: Mapping[str, Any]) -> dict[str, jax.Array]:
        """``ref_logprobs`` float32 [rows, length]: under the policy without its adapters, or with
        those of the last ``sync_reference``.

        Raises:
          ConfigError: it has no adapters.
        """
        if self.merge is None:
            raise ConfigError(
                f"{self.role}.compute_ref_log_prob needs adapters (actor.lora.rank above 0); "
                "without them use a reference role"
            )
        if not self.context.reference_sync:
            return {"ref_logprobs": self.score(self._log_prob, batch, base=True)}
        _, frozen = self.network.partition.split(self.params)
        params = self.network.partition.join(self.reference_adapters, frozen)
        return {"ref_logprobs": self.score(self._log_prob, batch, params=params)}

    @control
    def sync_reference(self, share: float) -> None:
        """Move the reference's adapters by a share of the way to the policy's; the first time they
        are copied."""
        learned, _ = self.network.partition.split(self.params)
        if share == 1 or not self.reference_adapters:
            copies = functools.partial(cast_copies, dtypes=jax.tree.map(lambda x: x.dtype, learned))
            self.reference_adapters = jax.jit(copies)(learned)
        else:
            self.reference_adapters = interpolate(self.reference_adapters, learned, share)

    def state(self) -> dict[str, Any]:
        """Parameters, optimizer state and, with ``reference_sync``, the reference's adapters."""
        kept = {"reference": self.reference_adapters} if self.context.reference_sync else {}
        return super().state() | kept

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a ``checkpointed`` state."""
        super().restore(state)
        self.reference_adapters = state.get("reference", {})

    def abstract_state(self) -> dict[str, Any]:
        """Shapes and shardings of ``state()``."""
        if not self.context.reference_sync:
            return super().abstract_state()
        split = self.network.partition.split
        learned = abstract(split(self.network.shapes)[0], split(self.shardings)[0])
        return super().abstract_state() | {"reference": learned}

    @protocol("3D_PROTO", reads=SCORED_KEYS)
    def compute_loss(self, batch: Mapping[str, Any]) -> dict[str, jax.Array]:
        """Negative log-likelihood of the response tokens, untempered, in nats: ``token_losses``
        float32 [rows, length], 0 elsewhere, and their mean ``loss``."""
        losses = -self.score(self._untempered_log_prob, batch)
        mask = batch["response_mask"]
        return {"token_losses": losses, "loss": jnp.sum(losses) / jnp.maximum(jnp.sum(mask), 1)}

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
            ``coefficient``, is added to the loss (PPO-ptx); or what the context's
            ``pretraining_loss`` reads, added so.
        """
        if pretrain is None:
            return self.update(batch)
        loss = self.context.pretraining_loss
        needs = (*TOKEN_KEYS, "coefficient", *(("row_mask", *loss.needs) if loss else ()))
        more = {key: pretrain[key] for key in dict.fromkeys(needs)}
        if self.context.packing:  # where batches choose these stay padded: two programs, not four
            more = self.batch_layout(more, grouped=False).with_packing(more)
        return self.update(batch, pretrain=more)

    def pretraining_objective(self, network: Network) -> tuple[Objective, Prepare] | None:
        """The loss on demonstrations, times their coefficient (PPO-ptx), or the algorithm's."""
        loss = self.context.pretraining_loss or self.context.supervised_loss
        if loss is None:
            return None
        supervised, weigh = self.objective(loss, False, network)  # they do not share prompts

        def prepare(batch: Batch) -> Batch:
            weighed = weigh(batch)
            return weighed | {"weights": batch["coefficient"] * weighed["weights"]}

        def objective(params: Params, batch: Batch, stack: Stack) -> Any:
            total, _ = supervised(params, batch, stack)
            # The metric is the loss itself, without the coefficient.
            return total, {"pretrain_loss": total / batch["coefficient"]}

        return objective, prepare

    @control
    def publish(self, target_regions: TargetRegions | None = None) -> Any:
        """The weights as generation reads them, for a rollout worker (weight sync).

        They are a copy, so updates may go on while it is sent. Until it has arrived it exists
        beside the actor's weights, in the train layout and generation's dtypes. For a rollout in
        other processes it is in host memory, each process holding what it sends.

        Args:
          target_regions: of a rollout in other processes.
        """
        params = self.without_adapters()
        if target_regions is not None:
            return self.weights_to_send(params, target_regions, self._published)
        if self.merge is None:  # they may wait in the host's memory
            params = jax.tree.map(jax.device_put, params, self.shardings)
        return self._copy(params)

    @control
    def take_seconds(self) -> dict[str, float]:
        """Seconds spent inside calls since the last time this was called, by activity."""
        taken, self._seconds = self._seconds, dict.fromkeys(self._seconds, 0.0)
        return taken

    def programs(self, rows: int, prompt_length: int) -> Iterator[AbstractProgram]:
        """Programs of transition, generation, log-probs and update, for ``rows`` sequences."""
        if self.merge is not None:
            yield AbstractProgram("transition_merge", self.merge.trace)
        yield from (AbstractProgram(name, run) for name, run in self.transition.programs())
        yield from GeneratingWorker.programs(self, rows, prompt_length)
        trace = functools.partial(self.trace_forward, self._log_prob, rows, prompt_length)
        yield AbstractProgram("compute_log_prob", trace)
        if self.merge is not None:
            base = not self.context.reference_sync
            yield AbstractProgram("compute_ref_log_prob", functools.partial(trace, base=base))
        yield from TrainableWorker.programs(self, rows, prompt_length)

    def resident_state(self, program: str) -> dict[str, Any]:
        """In the transition all buckets but the moving one; in generation the masters of a copy."""
        names = [name for name, _ in self.transition.programs()]
        if program in names:
            params = self.transition.live_during(names.index(program))
        elif program.startswith("generate"):
            params = self.transition.kept_arrays()
            copies = self.transition.generation_copies()
            params += self.generator.beside(self._generation_copy(), copies)
        else:
            found = super().resident_state(program)
            state = self.abstract_state()
            return found | ({"reference": state["reference"]} if "reference" in state else {})
        kept = {} if self.merge is None else {"adapters and their matrices": self.merge.resident()}
        return self.abstract_state() | {"params": params} | kept
