"""How a model's forward runs: dtypes, kernels, layouts, what is kept."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from hjax.kernels import cudnn
from hjax.kernels.registry import (
    AUTO,
    BLOCKS,
    CUDNN,
    REFERENCE,
    TRIED,
    KernelSet,
    choose,
    kernels_of,
)
from hjax.models import collective_matmul, remat
from hjax.models.attention_strategies import AttentionForm
from hjax.models.collective_matmul import WeightRing, make_weight_ring
from hjax.models.dropout import Dropout
from hjax.models.model_config import ModelConfig
from hjax.sharding.layout import Layout


@dataclasses.dataclass(frozen=True)
class Compute:
    """How a forward runs; none of it changes the parameters.

    Attributes:
      dtype: of activations and matrix products; norms, softmax and logits are float32.
      unroll_layers: a Python loop instead of a scan: faster for shallow models on a CPU, but
        compile time grows with depth.
      remat: which of a layer's activations the backward pass computes again, see
        ``hjax.models.remat``.
      layout: the train layout over whose axes activations stay split, or None to leave them to
        the compiler (which would rather split the width of FSDP's embedding than the batch).
      kernel_set: name of the functions that layers are made of, see ``hjax.kernels.registry``; the
        plain reference until ``on`` chooses those of a platform.
      attention: as of ``model.attention``, by which ``on`` chooses.
      home: the layout whose devices run it, given by ``on``; kernels that a compiler cannot split
        are split over it.
      dropout: what adapters' inputs lose in an update; None: nothing.
      travel: weights may travel over a tensor axis, see ``hjax.models.collective_matmul``; ``on``
        chooses it for platforms that send while they multiply.
    """

    dtype: Any = jnp.float32
    unroll_layers: bool = False
    remat: str = remat.NONE
    layout: Layout | None = None
    kernel_set: str = REFERENCE
    attention: str = AUTO
    home: Layout | None = None
    dropout: Dropout | None = None
    travel: bool = False

    def in_layer(self, layer: int | jax.Array) -> Compute:
        """The same in a layer, counted from the first that is run."""
        if self.dropout is None:
            return self
        return dataclasses.replace(self, dropout=self.dropout.of_layer(layer))

    def on(self, layout: Layout) -> Compute:
        """The same with the kernels for a layout's devices.

        Raises:
          ConfigError: attention that they do not have.
        """
        platform, attention = layout.platform, self.attention
        if attention == TRIED:
            attention = CUDNN if cudnn.trusted(layout.mesh.devices.flat) else BLOCKS
        kernel_set = choose(platform, attention)
        travel = platform in collective_matmul.PLATFORMS
        return dataclasses.replace(self, kernel_set=kernel_set, home=layout, travel=travel)

    @property
    def kernels(self) -> KernelSet:
        """The functions that layers are made of."""
        return kernels_of(self.kernel_set, whole=self.whole, unrolled=self.unroll_layers)

    @property
    def form(self) -> AttentionForm:
        """How attention strategies attend."""
        kernels = self.kernels
        return AttentionForm(kernels.attention, self.home or self.layout, kernels.packs_share)

    @property
    def context(self) -> Layout | None:
        """The layout, if its ``context`` axis splits the length."""
        splits = self.layout is not None and self.layout.shard_count("length") > 1
        return self.layout if splits else None

    def ring(self, config: ModelConfig, shape: tuple[int, ...]) -> WeightRing | None:
        """Along which weights travel in a pass over activations of [batch, length, embed]."""
        rows, length, _ = shape
        return (
            make_weight_ring(self.layout, config, rows, length, self.dtype) if self.travel else None
        )

    @property
    def whole(self) -> bool:
        """Whether each device is known to hold the whole length and a layer's whole weights."""
        split = ("length", "embed", "heads", "kv_heads", "mlp")
        return self.layout is not None and all(self.layout.shard_count(name) == 1 for name in split)

    def hold(self, x: jax.Array, *logical_axes: str | None) -> jax.Array:
        """Inside jit: keep activations split as the layout says."""
        return x if self.layout is None else self.layout.constrain(x, *logical_axes)
