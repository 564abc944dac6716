"""Memory estimate (memory budget) of a role: what it keeps on a device and what its calls need.

Figures are bytes per device, from shapes alone: no devices, no compiler. The users are the memory
check before a run, ``model.remat=auto`` and ``rollout.slots=-1`` (``hjax.run.memory_check``), dry
runs, and the auto-mapping (``hjax.planning``). A run counts its parameters from their shardings
(``RoleMemory``), a search from a ``ModelCounts`` (``MemoryEstimate.from_counts``); all other
formulas are shared. Tests compare it with compilers' figures:
``tests/test_run_rematerialise.py``, ``tests/extended/test_mapping_measured.py``,
``tests/extended/test_dryrun_updating.py``.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import numpy as np

from hjax.kernels import cudnn
from hjax.kernels.attention import DENSE_LENGTH, tpu_padded_length
from hjax.kernels.int8_cache import INT8, element_bytes
from hjax.kernels.registry import CUDNN
from hjax.kernels.verdict import ALL_FORMS, COLLECTIVE_MATMUL, EXPERT_RING, SPLASH, TPU_DECODING
from hjax.models import collective_matmul
from hjax.models.cost_inputs import (
    FLOAT32,
    MASTERS,
    MeshSizes,
    ModelCounts,
    Numerics,
    Offload,
    Workload,
    model_counts,
)
from hjax.models.expert_dispatch import CAPACITY_FACTOR
from hjax.models.expert_ring import ring_is_supported
from hjax.models.forward import LOGIT_CHUNK_BYTES
from hjax.models.parameters import Network, decoder_network, scalar_network
from hjax.models.remat import NONE, PRODUCTS
from hjax.roles import ROLLOUT
from hjax.rollout.engine import STEPS
from hjax.rollout.prefix_sharing import MAX_PREFILL_TOKENS, SHARED_PROMPTS, SHORT_PROMPT
from hjax.sharding.layout import Layout
from hjax.workers.micro_batching import MicroBatches
from hjax.workers.packer import Packer
from hjax.workers.worker import WorkerContext

# Share of device memory that estimates may use; the rest is for what they do not count.
USABLE_FRACTION = 0.9
# Extra cache columns of the slots if further sequences are admitted.
EXTRA_COLUMNS = 4 * STEPS
# Bytes of weights in flight and of code while a TPU casts weights; its compiler counts both in the
# peak: 2 to 22 MiB in eleven programs of 75 to 260.
CAST_PEAK_BYTES = 10 << 20
# float32 arrays [vocab] that drawing a token makes per slot.
_DRAW_ARRAYS = 4


@dataclasses.dataclass(frozen=True)
class ProgramOptions:
    """How programs are compiled and what they compute in.

    Attributes:
      numerics: bytes per element.
      tpu: hjax's own programs, by a TPU's compiler.
      cudnn: attention of long sequences may be cuDNN's.
      logits: bytes of float32 logits that exist at a time.
      forms: of kernels and collectives that may be taken, see ``hjax.kernels.verdict``.
    """

    numerics: Numerics = MASTERS
    tpu: bool = False
    cudnn: bool = False
    logits: float = LOGIT_CHUNK_BYTES
    forms: frozenset[str] = ALL_FORMS

    def on_tpu(self, form: str) -> bool:
        """Whether programs are a TPU's and take a form."""
        return self.tpu and form in self.forms


@dataclasses.dataclass(frozen=True)
class ParameterShare:
    """A device's shard of a model's parameters.

    Attributes:
      weights: bytes, in the dtypes in which they are kept.
      learned: number of trainable parameters.
      wide, narrow: number of parameters kept in a wider dtype than the compute dtype, and in one
        byte.
    """

    weights: float
    learned: float
    wide: float
    narrow: float


@dataclasses.dataclass(frozen=True)
class MemoryPass:
    """A forward or backward pass (micro-batch) over a device's rows.

    Attributes:
      passes: micro-batches per batch.
      tokens: of the device; a prompt shared by several responses counts once.
      response_tokens: of the device.
      pairs: pairs of tokens whose attention scores are in memory: within a prompt, and of a
        response with its prompt and itself. 0 if sequences are longer than
        ``Numerics.score_matrix_length``: a kernel then keeps no scores in memory.
      row_tokens: tokens with the prompt repeated per response, if the attention kernel (cuDNN's)
        needs each sequence in a row of its own; else 0.
      block_padding: tokens that a TPU's kernel adds to fill its blocks.
    """

    passes: int
    tokens: float
    response_tokens: float
    pairs: float
    row_tokens: float = 0.0
    block_padding: float = 0.0


@dataclasses.dataclass(frozen=True)
class DecodeBatch:
    """The sequences that one replica decodes at a time.

    Attributes:
      prompts: number of prompts.
      samples: responses per prompt.
      slots: sequences enter and leave slots of hjax's engine; else one program decodes them all.
      refills: further sequences follow in the slots.
    """

    prompts: int
    samples: int
    slots: bool = False
    refills: bool = False


@dataclasses.dataclass(frozen=True)
class MemoryEstimate:
    """Bytes per device of one role's model on a mesh.

    The models of a set take turns on its devices: the set needs the sum of what is resident and the
    largest transient part.

    Attributes:
      programs: how they are compiled.
      model, mesh: of the role.
      held: the device's parameters.
    """

    programs: ProgramOptions
    model: ModelCounts
    mesh: MeshSizes
    held: ParameterShare

    @classmethod
    def from_counts(
        cls, programs: ProgramOptions, model: ModelCounts, mesh: MeshSizes
    ) -> MemoryEstimate:
        """An estimate with all parameters sharded over pipe * tensor * fsdp, in ``Numerics``'
        dtypes.

        Frozen parameters beside adapters are kept in the compute dtype, or in one byte.
        """
        numerics = programs.numerics
        every = model.parameters_per_device(mesh, not numerics.hjax_programs) / mesh.fsdp
        small = model.one_byte_parameters / model.parameters
        frozen = min(numerics.weights, numerics.compute) * (1 - model.learned_share - small)
        learned = every * model.learned_share
        weights = every * (numerics.weights * model.learned_share + frozen + small)
        wide = learned if numerics.compute < numerics.weights else 0.0
        return cls(programs, model, mesh, ParameterShare(weights, learned, wide, every * small))

    def resident(self, trained: bool, offload: Offload = "none") -> float:
        """Weights and, of a trained model, optimizer state; less what is offloaded to the host."""
        kept = 0.0 if offload == "all" else self.held.weights
        optimizer = self.programs.numerics.optimizer if trained and offload == "none" else 0.0
        return kept + optimizer * self.held.learned

    def fetched_from_host(self, update: bool, offload: Offload) -> float:
        """Offloaded bytes that a stage's calls bring back to the device: with ``all`` the weights,
        in updates also the optimizer state."""
        back = self.held.weights if offload == "all" else 0.0
        optimizer = self.programs.numerics.optimizer if update and offload != "none" else 0.0
        return back + optimizer * self.held.learned

    def rows(self, rows: int, work: Workload, passes: int = 1) -> MemoryPass:
        """A pass over so many padded rows of a device."""
        numerics, split = self.programs.numerics, self.mesh.context
        share = work.rows_per_prompt(numerics.shared_prompt, rows)
        prompt, response = work.prompt_length, work.response_length
        tokens = rows * work.row_tokens(numerics.shared_prompt, rows) / split
        pairs = rows / share * prompt**2 + rows * response * work.length
        long = work.length > numerics.score_matrix_length
        apart = long and self.programs.cudnn and self.model.cudnn_supported and split == 1
        block_padding = 0.0
        if long and self.programs.on_tpu(SPLASH):
            row = prompt + share * response
            block_padding = tokens * (tpu_padded_length(row) / row - 1)
        return MemoryPass(
            passes=passes,
            tokens=tokens,
            response_tokens=rows * response / split,
            pairs=0.0 if long else pairs,
            row_tokens=rows * work.length if apart else 0.0,
            block_padding=block_padding,
        )

    def update(self, micro: MemoryPass, policy: str) -> float:
        """Bytes of an update beside resident state.

        These are gradients (twice if micro-batches accumulate them), a cast copy of wider weights
        (``_cast``), activations, and the larger of two phases that do not overlap: the head (hidden
        states and logits, twice), or the layer in the backward pass with the layers' gradients.

        The remat policy (``hjax.models.remat``) says what is kept per layer and token. The layer in
        the backward pass also has its gradients and everything recomputed. A pipeline stage holds
        the activations of min(pipe, passes) micro-batches.
        """
        model, mesh, numerics = self.model, self.mesh, self.programs.numerics
        gradients = numerics.gradients * self.held.learned
        of_layers = gradients * model.layers * model.layer_parameters / model.parameters
        summed = 0.0
        if micro.passes > 1 and numerics.adds_gradients:
            summed = of_layers if model.scalar and numerics.hjax_programs else gradients
        every, at_work, outside = self._layer_update(micro)
        if policy == NONE:
            kept = every
        else:
            kept = self._activations(micro.tokens, model.kept_activations(policy))
            at_work += every
        if policy in (NONE, PRODUCTS):
            kept += outside
        layers = model.layers / mesh.pipe * min(mesh.pipe, micro.passes)
        head = 4.0 * micro.response_tokens * model.hidden + 2 * self._logits(micro.response_tokens)
        beside = gradients + summed - of_layers + self._cast() + layers * kept
        return beside + self._gathered(micro.tokens) + max(head, of_layers + at_work)

    def _layer_update(self, micro: MemoryPass) -> tuple[float, float, float]:
        """Per layer: what its backward pass reads; what else exists meanwhile; and what experts
        keep of first products beyond ``ModelCounts.kept_activations``."""
        model, mesh, numerics = self.model, self.mesh, self.programs.numerics
        read, whole = model.kept_activations(NONE)
        read += 0 if numerics.hjax_programs else model.layer_recomputed
        every = self._activations(micro.tokens, (read, whole))
        if micro.pairs:  # exponentials in float32 and in the compute dtype; undivided outputs
            each = 4.0 + (numerics.compute if numerics.compute < 4 else 0.0)
            scores = each * micro.pairs * model.heads
            every += (scores + 4.0 * micro.response_tokens * model.attention_width) / mesh.tensor
        if micro.block_padding:
            heads = 2 * model.attention_width + model.cache_elements
            every += self._activations(micro.block_padding, (heads, 0))
        gradients = model.layer_gradients, model.layer_gradients_whole
        at_work = self._activations(micro.tokens, gradients) + self._scores(micro.pairs)
        if micro.row_tokens:
            apart = model.cudnn_extra(micro.tokens, micro.row_tokens)
            more, meanwhile = (n * numerics.compute / mesh.tensor for n in apart)
            every, at_work = every + more, max(at_work, meanwhile)
        outside = 0.0
        if model.experts and numerics.hjax_programs:
            experts, outside, piece = self._experts(micro.tokens)
            every, at_work = every + experts, at_work + piece
        return every, at_work, outside

    def _experts(self, tokens: float) -> tuple[float, float, float]:
        """Per layer, for experts: what is kept beyond the count for an MLP; what more is kept if
        first products are; and what exists while a piece of their tokens is computed."""
        model, mesh, size = self.model, self.mesh, self.programs.numerics.compute
        chosen, ways = tokens * size * model.experts_per_token, mesh.expert
        own = 3 * model.mlp / mesh.tensor
        if ways == 1:  # a row per token and expert, in and out
            return chosen * 5 * model.hidden, 0.0, 0.0
        # Tokens run in pieces sized for an even load; only first products are kept. Gathered
        # tokens and gathered expert matrices are kept too.
        every = 1 if self.programs.on_tpu(EXPERT_RING) and ring_is_supported(ways) else ways
        kept = tokens * size * model.hidden * every if every > 1 else 0.0
        if mesh.fsdp > 1:
            kept += size * model.layer_expert / ways / mesh.tensor
        piece = CAPACITY_FACTOR * every / ways * chosen * (2 * own + 4 * model.hidden)
        first = chosen * 2 * model.mlp / mesh.tensor
        kept += first - chosen * own
        return kept, (CAPACITY_FACTOR - 1) * first, piece

    def _cast(self) -> float:
        """Weights cast to the compute dtype in an update; of weights in one byte, and of DoRA's
        merged matrices, only those of the layer in use."""
        model, mesh, numerics = self.model, self.mesh, self.programs.numerics
        cast = numerics.compute * self.held.wide
        if not numerics.hjax_programs:
            return cast
        if not self.programs.tpu and mesh.fsdp * mesh.pipe == 1:
            # A TPU's compiler casts all layers before the loop; others only the layer in use.
            in_use = model.layer_parameters + model.head_parameters
            cast = min(cast, in_use * numerics.compute / mesh.tensor)
        cast += numerics.compute * self.held.narrow * mesh.pipe / model.layers
        return cast + (4 * model.layer_parameters / mesh.tensor if model.dora else 0.0)

    def forward(self, micro: MemoryPass) -> float:
        """Bytes of a forward pass beside the weights: the hidden states twice, a cast copy of the
        weights (all layers on a TPU, whose compiler casts before the loop over layers; else the
        layer in use), and the largest of one layer's attention, its MLP, and the logits. The peak
        may also be while the copy is made."""
        model, mesh, numerics = self.model, self.mesh, self.programs.numerics
        logits = self._forward_logits(micro.response_tokens * mesh.context)
        layer = self._layer_forward(micro.tokens, micro.pairs, micro.row_tokens)
        hidden = 2 * micro.tokens * model.hidden * numerics.compute
        cast = numerics.compute * self.held.wide
        made = CAST_PEAK_BYTES if cast and self.programs.tpu else 0.0
        if not self.programs.tpu:  # with FSDP _gathered counts the layers in use
            whole = mesh.fsdp == 1
            cast *= model.layer_parameters / model.parameters * mesh.pipe if whole else 0.0
        return cast + max(hidden + max(layer, logits) + self._gathered(micro.tokens), made)

    def _layer_forward(self, tokens: float, pairs: float, row_tokens: float = 0.0) -> float:
        """The larger of a layer's attention and its MLP, which do not overlap."""
        model = self.model
        mlp = 3 * model.mlp * max(1, model.experts_per_token)
        attention = tokens * (model.layer_activations - model.layer_activations_whole - mlp)
        if row_tokens:
            attention += model.cudnn_extra(tokens, row_tokens)[0]
        each = self.programs.numerics.compute / self.mesh.tensor
        return max(attention * each + self._scores(pairs), mlp * tokens * each)

    def _scores(self, pairs: float) -> float:
        """float32 attention scores of one layer and their softmax (or gradients): 8 * pairs *
        heads / tensor."""
        return 8.0 * pairs * self.model.heads / self.mesh.tensor

    def _logits(self, tokens: float) -> float:
        """float32 logits, at most ``ProgramOptions.logits`` bytes at a time; 0: a scalar head."""
        if self.model.scalar:
            return 0.0
        return min(self.programs.logits, 4.0 * tokens * self.model.vocab / self.mesh.tensor)

    def _forward_logits(self, tokens: float) -> float:
        """Logits of a forward pass. A TPU's compiler unrolls a loop of two iterations, so both
        pieces exist at once."""
        once = self._logits(tokens)
        whole = 4.0 * tokens * self.model.vocab / self.mesh.tensor
        return whole if self.programs.tpu and once < whole <= 2 * once else once

    def _activations(self, tokens: float, elements: tuple[float, float]) -> float:
        """Bytes of tokens * (split / tensor + whole) elements; ``elements``: (all, whole) per
        token. With the collective matmul none are whole."""
        every, whole = elements
        split = self.mesh.tensor if self._uses_collective_matmul(tokens) else 1
        each = (every - whole) / self.mesh.tensor + whole / split
        return tokens * each * self.programs.numerics.compute

    def _gathered(self, tokens: float) -> float:
        """Gathered weights: two layers under FSDP (in use, and prefetched); with the collective
        matmul the layer in use and its gradients."""
        travels = self._uses_collective_matmul(tokens)
        if self.mesh.fsdp == 1 and not travels:
            return 0.0
        layer = self.model.layer_parameters * self.programs.numerics.compute
        return 2 * layer / (1 if travels else self.mesh.tensor)

    def _uses_collective_matmul(self, tokens: float) -> bool:
        allowed = self.programs.on_tpu(COLLECTIVE_MATMUL)
        return allowed and collective_matmul.weights_travel(self.model, self.mesh, tokens)

    def generation(self, decoding: DecodeBatch, work: Workload) -> float:
        """Weights for generation, KV cache, and the larger of prefill and decoding. Before
        generation starts a bucket of the transition takes memory instead."""
        copy = self.generation_copy()
        bucket = min(self.programs.numerics.bucket, copy) if copy else 0.0
        held = self._slots if decoding.slots else self._static_batch
        return copy + max(bucket, held(decoding, work))

    def generation_copy(self) -> float:
        """Weights in the generate layout beyond what is resident: M / (p_g t_g), less the training
        shard if the copy replaces it. It does not where adapters are merged into a copy."""
        numerics = self.programs.numerics
        staged = not numerics.hjax_programs
        whole = numerics.compute * self.model.parameters_per_device(
            self._under_generate_layout.mesh, staged
        )
        if not numerics.in_place or self.model.frozen:
            return whole
        shard = self.model.parameters_per_device(self.mesh, staged) / self.mesh.fsdp
        return whole - numerics.compute * shard

    def cache(self, rows: float, tokens: float) -> float:
        """KV cache of so many tokens per row, in the generate layout."""
        model, mesh = self.model, self.mesh
        each = model.cache_elements * self.programs.numerics.cache * model.layers
        splits = model.cache_splits(mesh.generate_tensor) * mesh.generate_pipe
        return rows * tokens * each / splits

    def slot_cache(self, decoding: DecodeBatch, work: Workload) -> float:
        """KV cache of the slots: each prompt once, and its responses. If further sequences follow
        there are extra columns (not for a TPU's kernel)."""
        room = EXTRA_COLUMNS if decoding.refills and not self.programs.on_tpu(TPU_DECODING) else 0
        own = decoding.samples * (work.response_length + room)
        return self.cache(decoding.prompts, work.prompt_length + own)

    def slot_prefill(self, decoding: DecodeBatch, work: Workload) -> float:
        """Prefill of as many prompt tokens as are read at a time: activations of a layer, and keys
        and values before they are inserted into the cache."""
        most = max(MAX_PREFILL_TOKENS, work.prompt_length)
        tokens = min(most, decoding.prompts * work.prompt_length)
        return self._prefill(tokens, work) + self.cache(1, tokens)

    def _slots(self, decoding: DecodeBatch, work: Workload) -> float:
        """hjax's engine: the slots' KV cache, shared prefix blocks, and the larger of prefill and
        drawing a token for every slot."""
        held = self.slot_cache(decoding, work)
        if work.prompt_length > SHORT_PROMPT and self.mesh.generate_pipe == 1:
            held += self.cache(SHARED_PROMPTS + 1, work.prompt_length)
        rows = decoding.prompts * decoding.samples
        drawn = _DRAW_ARRAYS * 4.0 * rows * self.model.vocab / self.mesh.generate_tensor
        return held + max(self.slot_prefill(decoding, work), drawn)

    def _static_batch(self, decoding: DecodeBatch, work: Workload) -> float:
        """One program that reads all prompts, then draws all tokens; a shared prompt counts once
        per group."""
        numerics, prompt = self.programs.numerics, work.prompt_length
        rows = decoding.prompts * decoding.samples
        prompts = decoding.prompts if numerics.shared_prompt else rows
        cached = self.cache(prompts, prompt)
        most = numerics.forward_tokens // prompt if numerics.forward_tokens else prompts
        read = self._prefill(max(1, min(prompts, most)) * prompt, work)
        drawn = 2 * self._under_generate_layout._logits(rows)
        own = self.cache(rows, work.response_length)
        return max(cached + read, numerics.prompt_copies * cached + own + drawn)

    def _prefill(self, tokens: float, work: Workload) -> float:
        """A forward pass over so many prompt tokens: hidden states twice and one layer."""
        numerics, prompt = self.programs.numerics, work.prompt_length
        pairs = tokens * prompt if prompt <= numerics.score_matrix_length else 0.0
        hidden = 2 * tokens * self.model.hidden * numerics.compute
        return hidden + self._under_generate_layout._layer_forward(tokens, pairs)

    @property
    def _under_generate_layout(self) -> MemoryEstimate:
        """This estimate with the generate layout as its mesh."""
        expert = self.mesh.expert if self.programs.numerics.hjax_programs else 1
        mesh = self.mesh
        layout = MeshSizes(expert=expert, pipe=mesh.generate_pipe, tensor=mesh.generate_tensor)
        return dataclasses.replace(self, mesh=layout)


@dataclasses.dataclass(frozen=True)
class RoleMemory:
    """Memory of a role in a run; its parameters are counted from their shapes and shardings.

    Attributes:
      memory: the estimate.
      context: of the role.
      network: its frozen parameters in the dtype in which they are kept.
      layout: the train layout, as the worker has it.
    """

    memory: MemoryEstimate
    context: WorkerContext
    network: Network
    layout: Layout

    @classmethod
    def from_context(
        cls, context: WorkerContext, scalar: bool, layout: Layout, tpu: bool
    ) -> RoleMemory:
        """Memory of a role without a worker. ``scalar``: with a scalar head; ``tpu``: on TPUs."""
        assert context.model is not None
        network = (scalar_network if scalar else decoder_network)(context.model)
        if context.path:
            network = network.with_frozen_dtype(np.dtype(context.compute.dtype))
        by_cudnn = context.compute.attention == CUDNN
        return cls._of(context, scalar, network, layout, tpu, by_cudnn)

    @classmethod
    def from_worker(cls, worker: Any) -> RoleMemory:
        """The memory of a built worker with a model."""
        network, layout, compute = worker.network, worker.layouts.train, worker.compute
        by_cudnn = compute.kernels.attention is cudnn.attend
        tpu = layout.platform in collective_matmul.PLATFORMS
        return cls._of(worker.context, worker.scalar, network, layout, tpu, by_cudnn)

    @classmethod
    def _of(
        cls,
        context: WorkerContext,
        scalar: bool,
        network: Network,
        layout: Layout,
        tpu: bool,
        by_cudnn: bool,
    ) -> RoleMemory:
        dtype, config = np.dtype(context.compute.dtype), network.config
        cache = element_bytes(None if context.cache_dtype == INT8 else dtype, config.head_dim)
        usual = FLOAT32 if dtype.itemsize == FLOAT32.compute else MASTERS
        in_place = usual.in_place and context.role != ROLLOUT  # it holds two versions
        held = parameter_share(network, layout, dtype)
        chosen = context.optimizer if held.learned else None
        copies = int(context.reference_sync)
        state = chosen.state_bytes(network, layout, copies) if chosen else 0
        numerics = dataclasses.replace(
            usual,
            compute=dtype.itemsize,
            cache=cache,
            in_place=in_place,
            optimizer=state / max(held.learned, 1),
        )
        programs = ProgramOptions(numerics, tpu, by_cudnn, forms=context.compute.forms)
        mesh = MeshSizes.of(layout, generates=True)
        memory = MemoryEstimate(programs, model_counts(config, context.role, scalar), mesh, held)
        return cls(memory, context, network, layout)

    def update_bytes(self, rows: int, prompt: int, policy: str) -> float:
        """Bytes of an update of so many rows over all devices, with its state; ``prompt``:
        tokens."""
        micro = self.update_pass(rows, self.context.samples, prompt)
        return self.memory.resident(trained=True) + self.memory.update(micro, policy)

    def update_pass(self, rows: int, samples: int, prompt: int) -> MemoryPass:
        """One micro-batch of an update.

        Args:
          rows: over all devices.
          samples: responses per prompt.
          prompt: tokens of each row's prompt.
        """
        context, layout = self.context, self.layout
        work = Workload(prompt, context.max_response_length, rows, samples)
        if context.packing:
            return self._packed_pass(work)
        passes = MicroBatches(layout, self.network.axes, context.micro_batch, samples).count_for(
            rows
        )
        return self.memory.rows(max(rows // layout.shard_count("batch") // passes, 1), work, passes)

    def _packed_pass(self, work: Workload) -> MemoryPass:
        """A pass over packs of sequences of the greatest length, each with its own prompt if a
        kernel might want that."""
        context = self.context
        packer = Packer(context.packing, self.layout, context.micro_batch)
        shares = context.packing <= DENSE_LENGTH and work.samples % context.unit == 0
        share, widths = work.samples if shares else 1, (work.prompt_length, work.response_length)
        packs = packer.abstract(work.sequences, widths, share, context.unit)
        count, _, length = packs.source.shape
        tokens = math.prod(packs.source.shape[1:])
        return MemoryPass(
            passes=count // self.layout.shard_count("batch"),
            tokens=tokens,
            response_tokens=math.prod(packs.states.shape[1:]),
            pairs=tokens * length if length <= DENSE_LENGTH else 0.0,
        )


def parameter_share(network: Network, layout: Layout, dtype: np.dtype) -> ParameterShare:
    """A device's shard of a network's parameters; ``dtype``: compute dtype."""
    shapes, shardings, split = network.shapes, network.shardings(layout), network.partition.split

    def sizes(shapes: Any, placed: Any) -> list[tuple[int, int]]:
        """(bytes of an element, elements of a device) of each."""
        pairs = zip(jax.tree.leaves(shapes), jax.tree.leaves(placed), strict=True)
        return [(x.dtype.itemsize, math.prod(s.shard_shape(x.shape))) for x, s in pairs]

    every, size = sizes(shapes, shardings), dtype.itemsize
    return ParameterShare(
        weights=sum(each * n for each, n in every),
        learned=sum(n for _, n in sizes(split(shapes)[0], split(shardings)[0])),
        wide=sum(n for each, n in every if each > size),
        narrow=sum(n for each, n in every if each < size),
    )
