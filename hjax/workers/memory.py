"""The one estimate of what a role keeps of a device's memory and what its calls need beside it.

In bytes per device, from shapes: no devices, no compiler. It answers for the check before a run,
``model.remat=auto`` and ``rollout.slots=-1`` (``hjax.run.memory_check``), dry runs and the
auto-mapping (``hjax.planning``). A run counts its parameters from their shardings (``RoleMemory``),
a search from a record (``MemoryEstimate.counted``); all else is one formula for both. Held to what
compilers say by ``tests/test_run_rematerialise.py``, ``tests/extended/test_mapping_measured.py``
and ``tests/extended/test_dryrun_updating.py``.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import numpy as np

from hjax.kernels import cudnn
from hjax.kernels.attention import WHOLE, tpu_places
from hjax.kernels.int8_cache import INT8, element_bytes
from hjax.kernels.registry import CUDNN, TRIED
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
from hjax.rollout.prefix_sharing import READING, SHARED, SHORT
from hjax.sharding.layout import Layout
from hjax.workers.micro_batching import MicroBatches
from hjax.workers.packer import Packer
from hjax.workers.worker import WorkerContext

# Of a device's memory; the rest is for what an estimate does not see.
USABLE = 0.9
# Columns that a state of slots has more where other sequences follow.
MORE_COLUMNS = 4 * STEPS
# Bytes, while a TPU casts weights, of those on their way to the chip and of code, both of which its
# compiler's peak counts: 2 to 22 MiB in eleven programs of 75 to 260.
ON_THE_WAY = 10 << 20
# float32 arrays of the vocabulary's size that a slot's draw makes.
_DRAWN = 4


@dataclasses.dataclass(frozen=True)
class ProgramOptions:
    """How programs are compiled and what they compute in.

    Attributes:
      numerics: bytes per element.
      tpu: hjax's own, by a TPU's compiler.
      cudnn: attention of long sequences may be cuDNN's.
      logits: bytes of float32 logits at a time.
    """

    numerics: Numerics = MASTERS
    tpu: bool = False
    cudnn: bool = False
    logits: float = LOGIT_CHUNK_BYTES


@dataclasses.dataclass(frozen=True)
class ParameterShare:
    """A device's part of a model's parameters.

    Attributes:
      weights: bytes, as they are kept.
      learned: how many updates change.
      wide, narrow: how many are kept in a wider dtype than they are computed in, and in a byte.
    """

    weights: float
    learned: float
    wide: float
    narrow: float


@dataclasses.dataclass(frozen=True)
class MemoryPass:
    """One of the passes in which a device's rows go through a model.

    Attributes:
      passes: how many there are.
      tokens: of the device, a prompt that several responses share once.
      answered: those of responses.
      pairs: of tokens whose attention scores stand in memory: a prompt's with one another, a
        response's with its prompt and its own. 0 of sequences that are longer than
        ``Numerics.score_matrix_length``, whose scores a kernel keeps from memory.
      places: tokens with a prompt for each response, where attention's kernel wants each sequence
        in a row of its own, as cuDNN's does; 0: it does not.
      filled: places more by which a TPU's kernel fills blocks up.
    """

    passes: int
    tokens: float
    answered: float
    pairs: float
    places: float = 0.0
    filled: float = 0.0


@dataclasses.dataclass(frozen=True)
class DecodeBatch:
    """What a replica decodes at a time.

    Attributes:
      prompts: whose responses.
      samples: of each.
      slots: whether they enter and leave slots of hjax's engine, not all of them one program.
      refills: whether others follow.
    """

    prompts: int
    samples: int
    slots: bool = False
    refills: bool = False


@dataclasses.dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of a device for one role's model under a mesh.

    The models of a set take turns: it needs the sum of what is resident and the largest of what
    comes and goes.

    Attributes:
      programs: how they are compiled.
      model, mesh: of the role.
      held: the device's part of its parameters.
    """

    programs: ProgramOptions
    model: ModelCounts
    mesh: MeshSizes
    held: ParameterShare

    @classmethod
    def counted(
        cls, programs: ProgramOptions, model: ModelCounts, mesh: MeshSizes
    ) -> MemoryEstimate:
        """With all parameters over pipe * tensor * fsdp, and ``Numerics``' bytes of each: what is
        frozen beside adapters is kept as it is computed with, or in one byte."""
        numerics = programs.numerics
        every = model.parameters_per_device(mesh, not numerics.hjax_programs) / mesh.fsdp
        small = model.one_byte_parameters / model.parameters
        frozen = min(numerics.weights, numerics.compute) * (1 - model.learned_share - small)
        learned = every * model.learned_share
        weights = every * (numerics.weights * model.learned_share + frozen + small)
        wide = learned if numerics.compute < numerics.weights else 0.0
        return cls(programs, model, mesh, ParameterShare(weights, learned, wide, every * small))

    # What stays.

    def resident(self, trained: bool, offload: Offload = "none") -> float:
        """Weights, and of a trained model the optimizer's state, less what waits in the host's
        memory."""
        kept = 0.0 if offload == "all" else self.held.weights
        optimizer = self.programs.numerics.optimizer if trained and offload == "none" else 0.0
        return kept + optimizer * self.held.learned

    def fetched(self, update: bool, offload: Offload) -> float:
        """What comes back from the host for calls of a stage: with ``all`` the weights, in updates
        also the optimizer's state."""
        back = self.held.weights if offload == "all" else 0.0
        optimizer = self.programs.numerics.optimizer if update and offload != "none" else 0.0
        return back + optimizer * self.held.learned

    # Updates and scores.

    def rows(self, rows: int, work: Workload, passes: int = 1) -> MemoryPass:
        """A pass over so many padded rows of a device."""
        numerics, split = self.programs.numerics, self.mesh.context
        share = work.rows_per_prompt(numerics.shared_prompt, rows)
        prompt, response = work.prompt_length, work.response_length
        tokens = rows * work.row_tokens(numerics.shared_prompt, rows) / split
        pairs = rows / share * prompt**2 + rows * response * work.length
        long = work.length > numerics.score_matrix_length
        apart = long and self.programs.cudnn and self.model.cudnn_supported and split == 1
        filled = 0.0
        if long and self.programs.tpu:
            row = prompt + share * response
            filled = tokens * (tpu_places(row) / row - 1)
        return MemoryPass(
            passes=passes,
            tokens=tokens,
            answered=rows * response / split,
            pairs=0.0 if long else pairs,
            places=rows * work.length if apart else 0.0,
            filled=filled,
        )

    def update(self, one: MemoryPass, policy: str) -> float:
        """An update beside its state: gradients (and their sum so far, of several passes), a cast
        copy of the weights where they are wider (where none are gathered and it is no TPU, of the
        layer in use and the head), activations, and the larger of the head (states and logits,
        twice) and the layer that the backward pass is at, with the layers' gradients, for the one
        is done when the other begins.

        Kept per layer and token is what a policy of ``hjax.models.remat`` keeps. The layer that the
        backward pass is at has its gradients besides, and all that was not kept of it. A stage of a
        pipeline holds the activations of min(pipe, passes) passes.
        """
        model, mesh, numerics = self.model, self.mesh, self.programs.numerics
        gradients = numerics.gradients * self.held.learned
        of_layers = gradients * model.layers * model.layer_parameters / model.parameters
        summed = 0.0
        if one.passes > 1 and numerics.adds_gradients:
            summed = of_layers if model.scalar and numerics.hjax_programs else gradients
        every, at_work, outside = self._layer_update(one)
        if policy == NONE:
            kept = every
        else:
            kept = self._activations(one.tokens, model.kept_activations(policy))
            at_work += every
        if policy in (NONE, PRODUCTS):
            kept += outside
        layers = model.layers / mesh.pipe * min(mesh.pipe, one.passes)
        head = 4.0 * one.answered * model.hidden + 2 * self._logits(one.answered)
        beside = gradients + summed - of_layers + self._cast() + layers * kept
        return beside + self._gathered(one.tokens) + max(head, of_layers + at_work)

    def _layer_update(self, one: MemoryPass) -> tuple[float, float, float]:
        """Of a layer all that its backward pass reads; what stands besides while it runs; and what
        experts keep of first products beyond what ``ModelCounts.kept_activations`` counts."""
        model, mesh, numerics = self.model, self.mesh, self.programs.numerics
        read, whole = model.kept_activations(NONE)
        recomputed = 0 if numerics.hjax_programs else model.layer_recomputed
        every = self._activations(one.tokens, (read + recomputed, whole))
        if one.pairs:  # exponentials, in float32 and as they were multiplied; undivided outputs
            each = 4.0 + (numerics.compute if numerics.compute < 4 else 0.0)
            scores = each * one.pairs * model.heads
            every += (scores + 4.0 * one.answered * model.attention_width) / mesh.tensor
        if one.filled:
            heads = 2 * model.attention_width + model.cache_elements
            every += self._activations(one.filled, (heads, 0))
        gradients = model.layer_gradients, model.layer_gradients_whole
        at_work = self._activations(one.tokens, gradients) + self._scores(one.pairs)
        if one.places:
            apart = model.cudnn_extra(one.tokens, one.places)
            more, meanwhile = (n * numerics.compute / mesh.tensor for n in apart)
            every, at_work = every + more, max(at_work, meanwhile)
        outside = 0.0
        if model.experts and numerics.hjax_programs:
            experts, outside, piece = self._experts(one.tokens)
            every, at_work = every + experts, at_work + piece
        return every, at_work, outside

    def _experts(self, tokens: float) -> tuple[float, float, float]:
        """What a layer's experts keep beside what is counted of an MLP; beside what is counted of
        its first products, where these are kept; and what stands while a piece of their tokens is
        at work."""
        model, mesh, size = self.model, self.mesh, self.programs.numerics.compute
        chosen, ways = tokens * size * model.experts_per_token, mesh.expert
        own = 3 * model.mlp / mesh.tensor
        if ways == 1:  # a row of each token for each of its experts: what comes in and goes out
            return chosen * 5 * model.hidden, 0.0, 0.0
        # In pieces of what an even load gives, of which no more than the first products is kept.
        # Kept are tokens, of all devices along the axis where they are gathered, and matrices where
        # they are.
        every = 1 if self.programs.tpu and ring_is_supported(ways) else ways
        kept = tokens * size * model.hidden * every if every > 1 else 0.0
        if mesh.fsdp > 1:
            kept += size * model.layer_expert / ways / mesh.tensor
        piece = CAPACITY_FACTOR * every / ways * chosen * (2 * own + 4 * model.hidden)
        first = chosen * 2 * model.mlp / mesh.tensor
        kept += first - chosen * own
        return kept, (CAPACITY_FACTOR - 1) * first, piece

    def _cast(self) -> float:
        """Weights in the compute dtype, where an update has them so: of those in a byte, and of the
        sum with DoRA's adapters, those of the layer in use."""
        model, mesh, numerics = self.model, self.mesh, self.programs.numerics
        cast = numerics.compute * self.held.wide
        if not numerics.hjax_programs:
            return cast
        if not self.programs.tpu and mesh.fsdp * mesh.pipe == 1:
            # A TPU's compiler casts all before the loop over layers; others the one in use.
            in_use = model.layer_parameters + model.head_parameters
            cast = min(cast, in_use * numerics.compute / mesh.tensor)
        cast += numerics.compute * self.held.narrow * mesh.pipe / model.layers
        return cast + (4 * model.layer_parameters / mesh.tensor if model.dora else 0.0)

    def forward(self, one: MemoryPass) -> float:
        """The hidden states twice, a cast copy of the weights (on a TPU, whose compiler makes it
        before the loop over layers, of all; else of the layer in use), and the most of one layer's
        attention (scores where they are kept), its MLP, and the logits; or the copy while it is
        made."""
        model, mesh, numerics = self.model, self.mesh, self.programs.numerics
        answered = one.answered * mesh.context
        layer = self._layer_forward(one.tokens, one.pairs, one.places)
        hidden = 2 * one.tokens * model.hidden * numerics.compute
        cast = numerics.compute * self.held.wide
        made = ON_THE_WAY if cast and self.programs.tpu else 0.0
        if not self.programs.tpu:  # of layers that are gathered two are counted already
            whole = mesh.fsdp == 1
            cast *= model.layer_parameters / model.parameters * mesh.pipe if whole else 0.0
        within = hidden + max(layer, self._forward_logits(answered)) + self._gathered(one.tokens)
        return cast + max(within, made)

    def _layer_forward(self, tokens: float, pairs: float, places: float = 0.0) -> float:
        """The larger of a layer's attention and its MLP, of which only one is there at a time."""
        model = self.model
        mlp = 3 * model.mlp * max(1, model.experts_per_token)
        attention = tokens * (model.layer_activations - model.layer_activations_whole - mlp)
        if places:
            attention += model.cudnn_extra(tokens, places)[0]
        each = self.programs.numerics.compute / self.mesh.tensor
        return max(attention * each + self._scores(pairs), mlp * tokens * each)

    def _scores(self, pairs: float) -> float:
        """float32 attention scores of one layer and their softmax, or gradients: 8 * pairs * heads
        / tensor."""
        return 8.0 * pairs * self.model.heads / self.mesh.tensor

    def _logits(self, tokens: float) -> float:
        """float32 logits, at most ``ProgramOptions.logits`` at a time; none of a scalar head."""
        if self.model.scalar:
            return 0.0
        return min(self.programs.logits, 4.0 * tokens * self.model.vocab / self.mesh.tensor)

    def _forward_logits(self, tokens: float) -> float:
        """Those of a forward. A TPU's compiler writes out a loop of two turns, and has both pieces
        at once."""
        once = self._logits(tokens)
        whole = 4.0 * tokens * self.model.vocab / self.mesh.tensor
        return whole if self.programs.tpu and once < whole <= 2 * once else once

    def _activations(self, tokens: float, elements: tuple[float, float]) -> float:
        """tokens * (split / tensor + whole) elements, of (all, whole) per token. Where weights
        travel along the tensor axis nothing is whole."""
        every, whole = elements
        split = self.mesh.tensor if self._travels(tokens) else 1
        each = (every - whole) / self.mesh.tensor + whole / split
        return tokens * each * self.programs.numerics.compute

    def _gathered(self, tokens: float) -> float:
        """Two layers gathered whole by FSDP, the one in use and the next; of weights that travel
        the one in use and its gradients."""
        travels = self._travels(tokens)
        if self.mesh.fsdp == 1 and not travels:
            return 0.0
        layer = self.model.layer_parameters * self.programs.numerics.compute
        return 2 * layer / (1 if travels else self.mesh.tensor)

    def _travels(self, tokens: float) -> bool:
        return self.programs.tpu and collective_matmul.weights_travel(self.model, self.mesh, tokens)

    # Generation.

    def generation(self, at_a_time: DecodeBatch, work: Workload) -> float:
        """The generation copy, and the larger of reading prompts and drawing tokens, beside keys
        and values. Before it a bucket of the transition."""
        copy = self.generation_copy()
        bucket = min(self.programs.numerics.bucket, copy) if copy else 0.0
        held = self._slots if at_a_time.slots else self._at_once
        return copy + max(bucket, held(at_a_time, work))

    def generation_copy(self) -> float:
        """Weights in the generation layout beside what is resident: M / (p_g t_g), less the
        training shard where it takes the shard's place, as it cannot where adapters are added to a
        copy."""
        numerics = self.programs.numerics
        staged = not numerics.hjax_programs
        whole = numerics.compute * self.model.parameters_per_device(self._generating.mesh, staged)
        if not numerics.in_place or self.model.frozen:
            return whole
        shard = self.model.parameters_per_device(self.mesh, staged) / self.mesh.fsdp
        return whole - numerics.compute * shard

    def cache(self, rows: float, tokens: float) -> float:
        """Keys and values of so many tokens of each row, under the generate layout."""
        model, mesh = self.model, self.mesh
        each = model.cache_elements * self.programs.numerics.cache * model.layers
        splits = model.cache_splits(mesh.generate_tensor) * mesh.generate_pipe
        return rows * tokens * each / splits

    def slot_cache(self, at_a_time: DecodeBatch, work: Workload) -> float:
        """Keys and values of slots: of each prompt once, and of its responses, with some columns
        more where others follow (a TPU's kernel needs none)."""
        room = MORE_COLUMNS if at_a_time.refills and not self.programs.tpu else 0
        own = at_a_time.samples * (work.response_length + room)
        return self.cache(at_a_time.prompts, work.prompt_length + own)

    def slot_reading(self, at_a_time: DecodeBatch, work: Workload) -> float:
        """Of reading as many tokens of prompts as are read at a time: a layer's part, and their
        keys and values before they are put beside the others."""
        tokens = min(max(READING, work.prompt_length), at_a_time.prompts * work.prompt_length)
        return self._reading(tokens, work) + self.cache(1, tokens)

    def _slots(self, at_a_time: DecodeBatch, work: Workload) -> float:
        """Of hjax's engine: the slots' keys and values, blocks of prompts' beginnings that are
        shared, and the larger of reading prompts and drawing a token of every slot."""
        held = self.slot_cache(at_a_time, work)
        if work.prompt_length > SHORT and self.mesh.generate_pipe == 1:
            held += self.cache(SHARED + 1, work.prompt_length)
        rows = at_a_time.prompts * at_a_time.samples
        drawn = _DRAWN * 4.0 * rows * self.model.vocab / self.mesh.generate_tensor
        return held + max(self.slot_reading(at_a_time, work), drawn)

    def _at_once(self, at_a_time: DecodeBatch, work: Workload) -> float:
        """Of one program that reads all prompts, then draws all tokens; of a shared prompt there
        is one per group."""
        numerics, prompt = self.programs.numerics, work.prompt_length
        rows = at_a_time.prompts * at_a_time.samples
        prompts = at_a_time.prompts if numerics.shared_prompt else rows
        cached = self.cache(prompts, prompt)
        most = numerics.forward_tokens // prompt if numerics.forward_tokens else prompts
        read = self._reading(max(1, min(prompts, most)) * prompt, work)
        drawn = 2 * self._generating._logits(rows)
        own = self.cache(rows, work.response_length)
        return max(cached + read, numerics.prompt_copies * cached + own + drawn)

    def _reading(self, tokens: float, work: Workload) -> float:
        """Of a forward over so many tokens of prompts: hidden states twice and a layer's part."""
        numerics, prompt = self.programs.numerics, work.prompt_length
        pairs = tokens * prompt if prompt <= numerics.score_matrix_length else 0.0
        hidden = 2 * tokens * self.model.hidden * numerics.compute
        return hidden + self._generating._layer_forward(tokens, pairs)

    @property
    def _generating(self) -> MemoryEstimate:
        """The same under the generate layout, which splits what hjax's does."""
        expert = self.mesh.expert if self.programs.numerics.hjax_programs else 1
        mesh = self.mesh
        layout = MeshSizes(expert=expert, pipe=mesh.generate_pipe, tensor=mesh.generate_tensor)
        return dataclasses.replace(self, mesh=layout)


@dataclasses.dataclass(frozen=True)
class RoleMemory:
    """The memory of a run's role, its parameters counted from their shapes and shardings.

    Attributes:
      memory: the estimate.
      context: of the role.
      network: its frozen parameters in the dtype that they are kept in.
      layout: the train layout, as the worker has it.
    """

    memory: MemoryEstimate
    context: WorkerContext
    network: Network
    layout: Layout

    @classmethod
    def described(
        cls, context: WorkerContext, scalar: bool, layout: Layout, tpu: bool
    ) -> RoleMemory:
        """Of a role that is not built. ``scalar``: it has a scalar head; ``tpu``: on TPUs."""
        assert context.model is not None
        network = (scalar_network if scalar else decoder_network)(context.model)
        if context.path:
            network = network.with_frozen_dtype(np.dtype(context.compute.dtype))
        by_cudnn = context.compute.attention in (CUDNN, TRIED)
        return cls._of(context, scalar, network, layout, tpu, by_cudnn)

    @classmethod
    def built(cls, worker: Any) -> RoleMemory:
        """Of a worker with a model."""
        network, layout, compute = worker.network, worker.layouts.train, worker.compute
        by_cudnn = compute.kernels.attention is cudnn.attend
        tpu = compute.move_weights
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
        in_place = usual.in_place and context.role != ROLLOUT  # whose versions stand together
        held = held_by(network, layout, dtype)
        chosen = context.optimizer if held.learned else None
        state = chosen.state_bytes(network, layout) if chosen else 0
        numerics = dataclasses.replace(
            usual,
            compute=dtype.itemsize,
            cache=cache,
            in_place=in_place,
            optimizer=state / max(held.learned, 1),
        )
        programs = ProgramOptions(numerics, tpu, by_cudnn)
        mesh = MeshSizes.of(layout, generates=True)
        memory = MemoryEstimate(programs, model_counts(config, context.role, scalar), mesh, held)
        return cls(memory, context, network, layout)

    def with_state(self, rows: int, prompt: int, policy: str) -> float:
        """Bytes of an update of so many rows of all devices, with its state; ``prompt``: tokens."""
        one = self.update_pass(rows, self.context.samples, prompt)
        return self.memory.resident(trained=True) + self.memory.update(one, policy)

    def update_pass(self, rows: int, samples: int, prompt: int) -> MemoryPass:
        """One of the passes of an update.

        Args:
          rows: of all devices.
          samples: of a prompt.
          prompt: tokens of each row's.
        """
        context, layout = self.context, self.layout
        work = Workload(prompt, context.max_response_length, rows, samples)
        if context.packing:
            return self._in_packs(work)
        passes = MicroBatches(layout, self.network.axes, context.micro_batch, samples).pieces_of(
            rows
        )
        each = max(rows // layout.ways("batch") // passes, 1)
        return self.memory.rows(each, work, passes)

    def _in_packs(self, work: Workload) -> MemoryPass:
        """Of packs of sequences as long as they can be, each with its prompt where a kernel might
        want that."""
        context = self.context
        packer = Packer(context.packing, self.layout, context.micro_batch)
        shares = context.packing <= WHOLE and work.samples % context.unit == 0
        share, widths = work.samples if shares else 1, (work.prompt_length, work.response_length)
        packs = packer.abstract(work.sequences, widths, share, context.unit)
        count, _, length = packs.source.shape
        tokens = math.prod(packs.source.shape[1:])
        return MemoryPass(
            passes=count // self.layout.ways("batch"),
            tokens=tokens,
            answered=math.prod(packs.states.shape[1:]),
            pairs=tokens * length if length <= WHOLE else 0.0,
        )


def held_by(network: Network, layout: Layout, dtype: np.dtype) -> ParameterShare:
    """A device's part of a network's parameters, which are computed with in ``dtype``."""
    shapes, shardings, split = network.shapes, network.shardings(layout), network.partition.split

    def counted(shapes: Any, placed: Any) -> list[tuple[int, int]]:
        """(bytes of an element, elements of a device) of each."""
        pairs = zip(jax.tree.leaves(shapes), jax.tree.leaves(placed), strict=True)
        return [(x.dtype.itemsize, math.prod(s.shard_shape(x.shape))) for x, s in pairs]

    every, size = counted(shapes, shardings), dtype.itemsize
    learned = counted(split(shapes)[0], split(shardings)[0])
    return ParameterShare(
        weights=sum(each * n for each, n in every),
        learned=sum(n for _, n in learned),
        wide=sum(n for each, n in every if each > size),
        narrow=sum(n for each, n in every if each < size),
    )
