"""What a device holds while a model is updated, estimated from shapes: for ``model.remat=auto``.

Per device, in bytes. Of what stands in a program beside parameters and optimizer state only what is
large: gradients, weights in the compute dtype, layers that are gathered, activations by policy, the
log-prob head's pieces. Held to what compilers say by ``tests/test_run_rematerialise.py`` and
``tests/extended/test_dryrun_updating.py``.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from hjax.kernels import cudnn
from hjax.kernels.attention import WHOLE
from hjax.models import arithmetic, remat, weight_ring
from hjax.models.expert_pieces import ROOM
from hjax.models.expert_ring import goes_round
from hjax.models.forward import LOGIT_CHUNK_BYTES
from hjax.models.parameters import Network
from hjax.sharding.layout import Layout
from hjax.workers.optimizer import OptimizerConfig
from hjax.workers.packer import Packer
from hjax.workers.passes import Passes


@dataclasses.dataclass(frozen=True)
class Updates:
    """The updates of a model.

    Attributes:
      network: the model, its frozen parameters in the dtype that they are kept in.
      scalar: it has a scalar head.
      layout: the train layout.
      dtype: of compute.
      rows: of all devices, of an update.
      samples: of a prompt.
      prompt, response: tokens of each row.
      micro_batch, packing, unit: as of ``WorkerContext``.
      travel: as of ``Compute``.
      apart: attention's kernel wants each sequence in a row of its own, as cuDNN's does.
      optimizer: of a trained role.
    """

    network: Network
    scalar: bool
    layout: Layout
    dtype: np.dtype
    rows: int
    samples: int
    prompt: int
    response: int
    micro_batch: int = 0
    packing: int = 0
    travel: bool = False
    unit: int = 1
    apart: bool = False
    optimizer: OptimizerConfig | None = None

    def with_state(self, policy: str) -> float:
        """Bytes of an update: parameters, the optimizer's state, and its temporaries."""
        return self.kept(trained=True) + self.temporaries(policy)

    def kept(self, trained: bool) -> float:
        """Bytes of the parameters, where ``trained`` with what the optimizer keeps."""
        weights = sum(x.dtype.itemsize * n for x, n in self._parts(lambda tree: tree))
        if not trained or self.optimizer is None:
            return weights
        return weights + self.optimizer.state_bytes(self.network, self.layout)

    def temporaries(self, policy: str) -> float:
        """Bytes of an update beside its state, under a policy of ``hjax.models.remat``."""
        layout, config, size = self.layout, self.network.config, self.dtype.itemsize
        pieces, tokens, answered, pairs = self._in_packs() if self.packing else self._in_rows()
        split = layout.ways("heads")
        travels = self.travel and weight_ring.travels(layout, config, tokens)

        def of(elements: tuple[int, int]) -> float:
            every, whole = elements
            return tokens * size * ((every - whole) / split + whole / (split if travels else 1))

        stages = layout.ways("layers")
        layers = config.layers / stages * (min(stages, pieces) if stages > 1 else 1)
        kept = of(arithmetic.kept_elements(config, policy))
        one = of(arithmetic.kept_elements(config, remat.NONE))
        at_work = of(arithmetic.gradient_elements(config))
        if pairs:  # scores in one piece: read again with what they gave, undivided; and gradients
            width = config.heads * config.head_dim
            each = 4 + (size if size < 4 else 0)
            scores = (each * pairs * config.heads + 4 * answered * width) / split
            kept, one = kept + (scores if policy == remat.NONE else 0), one + scores
            at_work += 8 * pairs * config.heads / split
        if self.apart and not pairs:
            length = self.prompt + self.response
            given = tokens, answered / self.response * length
            widths = config.heads * config.head_dim, arithmetic.cache_elements(config)
            more, meanwhile = (n * size / split for n in arithmetic.apart_elements(*given, *widths))
            kept, one = kept + (more if policy == remat.NONE else 0), one + more
            at_work = max(at_work, meanwhile)
        if config.experts:
            experts, gates, piece = self._experts(tokens)
            one += experts
            if policy in (remat.NONE, remat.PRODUCTS):
                kept += gates + (experts if policy == remat.NONE else 0)
            at_work += piece
        at_work += 0 if policy == remat.NONE else one
        gradients = 4.0 * sum(n for _, n in self._parts(self._learning))
        of_layers = gradients * config.layers * arithmetic.layer_parameters(config)
        of_layers /= arithmetic.parameters(config, self.scalar)
        # The head's backward pass is done when that of the layers begins.
        activations = layers * kept + max(self._head(answered) - of_layers, at_work)
        gradients *= 2 if pieces > 1 else 1
        # What is frozen beside adapters may be kept in the compute dtype.
        wide = (n for x, n in self._parts(lambda tree: tree) if x.dtype.itemsize > size)
        cast: float = size * sum(wide)
        if not self.travel and layout.ways("embed") * stages == 1:
            # A TPU's compiler casts all before the loop over layers; others the one in use.
            head = config.hidden_size * (1 if self.scalar else config.vocab_size)
            cast = min(cast, size * (arithmetic.layer_parameters(config) + head) / split)
        # What is kept in a byte is cast in the layer that multiplies with it.
        narrow = (n for x, n in self._parts(lambda tree: tree) if x.dtype.itemsize < size)
        cast += size * sum(narrow) * stages / config.layers
        if (lora := self.network.config.lora) is not None and lora.dora:
            # Of the matrix in use the sum with its adapter, for the norms.
            cast += 4 * arithmetic.layer_parameters(config) / split
        return gradients + cast + activations + self._gathered(travels)

    def _experts(self, tokens: float) -> tuple[float, float, float]:
        """What a layer's experts keep beside what is counted of an MLP; beside what is counted of
        its first products, where these are kept; and what stands while a piece of their tokens is
        at work."""
        layout, config, size = self.layout, self.network.config, self.dtype.itemsize
        chosen, ways = tokens * size * config.experts_per_token, layout.ways("experts")
        own = 3 * config.mlp_size / layout.ways("mlp")
        if ways == 1:  # a row of each token for each of its experts: what comes in and goes out
            return chosen * 5 * config.hidden_size, 0.0, 0.0
        # In pieces of what an even load gives, of which no more than the first products is kept.
        # Kept are tokens, of all devices along the axis where they are gathered, and matrices where
        # they are.
        every = 1 if self.travel and goes_round(ways) else ways
        kept = tokens * size * config.hidden_size * every if every > 1 else 0.0
        if layout.ways("embed") > 1:
            kept += size * arithmetic.expert_parameters(config) / ways / layout.ways("mlp")
        piece = ROOM * every / ways * chosen * (2 * own + 4 * config.hidden_size)
        first = chosen * 2 * config.mlp_size / layout.ways("mlp")
        kept += first - chosen * own
        return kept, (ROOM - 1) * first, piece

    def _in_rows(self) -> tuple[int, float, float, float]:
        """Passes; of one on a device tokens, those answered, and pairs of tokens whose scores
        stand in memory, as they do of short sequences."""
        layout = self.layout
        passes = Passes(layout, self.network.axes, self.micro_batch, self.samples)
        pieces = passes.pieces_of(self.rows)
        rows = max(self.rows // layout.ways("batch") // pieces, 1)
        share = math.gcd(rows, self.samples)
        parts = layout.ways("length")
        tokens = (rows // share * self.prompt + rows * self.response) / parts
        answered, length = rows * self.response / parts, self.prompt + self.response
        pairs = rows // share * self.prompt**2 + rows * self.response * length
        return pieces, tokens, answered, pairs if length <= WHOLE else 0

    def _in_packs(self) -> tuple[int, float, float, float]:
        """The same of packs of sequences as long as they can be, each with its prompt where a
        kernel might want that."""
        packer = Packer(self.packing, self.layout, self.micro_batch)
        shares = self.packing <= WHOLE and self.samples % self.unit == 0
        widths = self.prompt, self.response
        packs = packer.abstract(self.rows, widths, self.samples if shares else 1, self.unit)
        pieces = packs.source.shape[0] // self.layout.ways("batch")
        places, answers = math.prod(packs.source.shape[1:]), math.prod(packs.states.shape[1:])
        length = packs.source.shape[2]
        return pieces, places, answers, places * length if length <= WHOLE else 0

    def _learning(self, tree: Any) -> Any:
        return self.network.partition.split(tree)[0]

    def _parts(self, of: Callable[[Any], Any]) -> list[tuple[Any, int]]:
        """Parameters, and how many elements of each a device has."""
        shapes = jax.tree.leaves(of(self.network.shapes))
        placed = jax.tree.leaves(of(self.network.shardings(self.layout)))
        return [(x, math.prod(s.shard_shape(x.shape))) for x, s in zip(shapes, placed, strict=True)]

    def _gathered(self, travels: bool) -> float:
        """Of FSDP the layer in use and the next, whole; of weights that travel the layer in use and
        its gradients."""
        layout = self.layout
        if layout.ways("embed") == 1 and not travels:
            return 0.0
        layer = arithmetic.layer_parameters(self.network.config)
        return 2 * layer * self.dtype.itemsize / (1 if travels else layout.ways("heads"))

    def _head(self, answered: float) -> float:
        """A piece of logits and the next, or its gradients; the states' float32 gradient."""
        config, layout = self.network.config, self.layout
        states = 4 * answered * config.hidden_size
        if self.scalar:
            return states
        logits = 4 * answered * config.vocab_size / layout.ways("vocab")
        return states + 2 * min(logits, LOGIT_CHUNK_BYTES)


def updates_of(worker: Any, rows: int, prompt: int) -> Updates:
    """Those of a trained worker, of ``rows`` sequences with prompts of so many tokens."""
    context = worker.context
    return Updates(
        network=worker.network,
        scalar=worker.scalar,
        layout=worker.layouts.train,
        dtype=np.dtype(context.compute.dtype),
        rows=rows,
        samples=context.samples,
        prompt=prompt,
        response=context.max_response_length,
        micro_batch=context.micro_batch,
        packing=context.packing,
        travel=worker.compute.travel,
        unit=context.unit,
        apart=worker.compute.kernels.attention is cudnn.attend,
        optimizer=context.optimizer,
    )
