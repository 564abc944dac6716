"""A worker that runs its model: forward passes over batches, padded or in packs."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hjax.batches import LENGTHS
from hjax.kernels import cudnn
from hjax.kernels.attention import DENSE_LENGTH
from hjax.models.forward import response_log_probs
from hjax.models.parameters import Network, Params
from hjax.models.sequence_packing import KEY as PACKING
from hjax.sharding.pipeline import Stack
from hjax.sharding.protocols import PROMPT_ID
from hjax.workers.micro_batching import MicroBatches, rows_of
from hjax.workers.packer import BatchLayout, Packer, PaddedBatch, chosen_capacity
from hjax.workers.parameter_worker import ParameterWorker, abstract
from hjax.workers.worker import TOKEN_KEYS, WorkerContext
from hjax.xla.abstract_program import AbstractProgram


class ModelWorker(ParameterWorker):
    """A worker that runs its model over batches, in micro-batches of padded rows or packs."""

    # Positions after the longest response.
    positions_after = 0
    # By protocol method the method that computes it, for what ``score`` runs.
    score_methods: Mapping[str, str] = {}

    def __init__(self, context: WorkerContext):
        super().__init__(context)
        train = self.layouts.train
        # Pipeline stages set shardings themselves, except that of a split length.
        whole = train.shard_count("layers") == 1 or train.shard_count("length") > 1
        held = train if whole else None
        self.compute = dataclasses.replace(context.compute.for_layout(train), layout=held)
        self.micro_batches = self._batching(self.network)
        packs = context.packing or context.choose_packing and self._can_choose_packing()
        # cuDNN's attention cannot mask packs; short ones use the attention without kernel.
        longest = DENSE_LENGTH if self.compute.kernels.attention is cudnn.attend else 0
        self.packer = None
        if packs:
            micro_batch = context.micro_batch
            self.packer = Packer(context.packing, train, micro_batch=micro_batch, longest=longest)
        self._forwards: dict[tuple, Any] = {}

    def _can_choose_packing(self) -> bool:
        """Whether batches may choose packs. They may not with a split length, with pipeline stages,
        or with a load-balancing loss, which depends on the micro-batches."""
        train = self.layouts.train
        whole = train.shard_count("layers") == train.shard_count("length") == 1
        return whole and not self.context.router_loss

    def _batching(self, network: Network) -> MicroBatches:
        context = self.context
        return MicroBatches(
            self.layouts.train,
            network.axes,
            micro_batch=context.micro_batch,
            samples=context.samples,
            partition=network.partition,
            unit=context.unit,
        )

    def programs(self, rows: int, prompt_length: int) -> Iterator[AbstractProgram]:
        """The programs that calls on ``rows`` sequences run; here those of ``score_methods``.

        A program is named like the protocol method, or ``generate``, ``transition``, ``update``.
        """
        for name, compute in self.score_methods.items():
            trace = functools.partial(self.trace_forward, getattr(self, compute))
            yield AbstractProgram(name, functools.partial(trace, rows, prompt_length))

    def resident_state(self, program: str) -> dict[str, Any]:
        """The part of ``abstract_state()`` that stays in memory while a program runs but is no
        argument."""
        return {}

    def trace_forward(
        self, compute: Callable[..., Any], rows: int, prompt_length: int, base: bool = False
    ) -> Any:
        """The program that ``forward`` compiles for ``compute`` and ``rows`` sequences, traced."""
        params = abstract(self.network.shapes, self.shardings)
        params = self.network.without_adapters_of(params) if base else params
        batch = self.token_shapes(rows, prompt_length)
        return self._forward(compute, True, base).trace(params, batch)

    def batch_layout(self, batch: Mapping[str, Any], grouped: bool, unit: int = 1) -> BatchLayout:
        """Whether and how a batch of prompts and responses is packed.

        Args:
          batch: arrays, masks and maybe lengths; those on devices are waited for if packs are
            made.
          grouped: rows come in groups of one prompt (``self.grouped``).
          unit: consecutive rows that are never split.
        """
        if self.packer is None:
            return BatchLayout()
        rows, width = batch["response_mask"].shape
        padded = self._padded(rows, (batch["prompt_mask"].shape[1], width), grouped)
        return self.packer(batch, self._rows_per_prompt(padded, grouped, unit), padded, unit)

    def _padded(self, rows: int, widths: tuple[int, int], grouped: bool) -> PaddedBatch:
        """Sizes of a batch of so many padded rows."""
        passes = self.micro_batches.count_for(rows)
        return PaddedBatch(rows, widths, self.share(rows // passes) if grouped else 1, passes)

    def _rows_per_prompt(self, padded: PaddedBatch, grouped: bool, unit: int = 1) -> int:
        """Consecutive rows that share their prompt in a pack; 1: none do."""
        samples = self.context.samples
        places = self.context.packing or chosen_capacity(padded, unit)
        supported = self.compute.form.supports_shared_prompts(places)
        return samples if grouped and samples % unit == 0 and supported else 1

    def forward(
        self,
        compute: Callable[..., Any],
        params: Any,
        batch: Any,
        grouped: bool = False,
        base: bool = False,
    ) -> Any:
        """Run ``compute(model, batch, share)`` compiled; ``share``: rows per copy of a prompt.

        Its arrays have a row per row of the batch, which a pipeline cuts into micro-batches.
        Programs are cached by the function's code, so anything that varies between calls must be in
        ``batch``.

        Args:
          compute: the function.
          params: of the model.
          batch: dict of arrays.
          grouped: rows come in groups of one prompt (``self.grouped``).
          base: ``params`` are those of the model without its adapters.
        """
        return self._forward(compute, grouped, base)(params, batch)

    def score(
        self,
        compute: Callable[..., Any],
        batch: Mapping[str, Any],
        base: bool = False,
        params: Params | None = None,
    ) -> Any:
        """``forward`` over a batch's prompts and responses.

        Args:
          compute, batch: as there.
          base: without the model's adapters.
          params: None: the current parameters.
        """
        grouped = self.grouped(batch)
        tokens = {key: batch[key] for key in TOKEN_KEYS}
        layout = self.batch_layout({**tokens, LENGTHS: batch.get(LENGTHS)}, grouped)
        tokens = layout.with_packing(tokens)
        params = self.params if params is None else params
        params = self.network.without_adapters_of(params) if base else params
        return self.forward(compute, params, tokens, grouped, base)

    def _log_prob(self, model: Any, batch: Any, share: int) -> jax.Array:
        """Log-probs of the responses under a language model, at the rollouts' temperature."""
        return response_log_probs(model, batch, share, self.compute, self.context.temperature)

    def _forward(self, compute: Callable[..., Any], grouped: bool, base: bool = False) -> Any:
        key = (getattr(compute, "__code__", compute), grouped, base)
        if key not in self._forwards:
            network = self.network.without_adapters if base else self.network
            passes = self._batching(network) if base else self.micro_batches

            def part(params: Params, batch: Any, stack: Stack) -> Any:
                share = self.share(rows_of(batch)) if grouped else 1
                return compute(network.bind(params, stack), batch, share)

            def run(params: Params, batch: Any) -> Any:
                return passes.forward(part, params, batch)

            run.__name__ = f"{self.role}_{compute.__name__.strip('_')}"
            self._forwards[key] = jax.jit(run, compiler_options=self.layouts.train.compiler_options)
        return self._forwards[key]

    def share(self, rows: int) -> int:
        """Rows per copy of a prompt, such that no group straddles two devices' shards."""
        return math.gcd(self.context.samples, rows // self.layouts.train.shard_count("batch"))

    def grouped(self, batch: Mapping[str, Any]) -> bool:
        """Whether the rows come in groups of ``samples`` that answer one prompt each.

        The batch tells by ``prompt_id`` (on the host). Rows of greedy batches, demonstrations and
        filtered batches do not, and their prompts must not be taken for copies of one another.
        """
        samples = self.context.samples
        if samples == 1:
            return True
        ids = batch.get(PROMPT_ID)
        if ids is None or len(ids) % samples:
            return False
        groups = np.asarray(ids).reshape(-1, samples)
        return bool((groups == groups[:, :1]).all())

    def token_shapes(self, rows: int, prompt_length: int) -> dict[str, Any]:
        """Abstract prompts and responses of a step in the train layout: full packs if ``packing``
        is set, else padded rows."""
        length = self.context.max_response_length + self.positions_after
        split = self.layouts.train.sharding("batch")
        sizes = {"prompts": prompt_length, "prompt_mask": prompt_length}
        shapes: dict[str, Any] = {
            key: jax.ShapeDtypeStruct(
                (rows, sizes.get(key, length)),
                jnp.bool_ if key.endswith("mask") else jnp.int32,
                sharding=split,
            )
            for key in TOKEN_KEYS
        }
        if self.context.packing:
            assert self.packer is not None
            padded, unit = self._padded(rows, (prompt_length, length), True), self.context.unit
            share = self._rows_per_prompt(padded, True, unit)
            shapes[PACKING] = self.packer.abstract(rows, padded.widths, share, unit)
        return shapes
