"""How a model's forward runs: dtypes, kernels, layouts, rematerialisation."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from hjax.kernels.registry import (
    AUTO,
    REFERENCE,
    KernelSet,
    choose_kernel_set,
    make_kernel_set,
)
from hjax.kernels.verdict import ALL_FORMS, COLLECTIVE_MATMUL, EXPERT_RING
from hjax.models import collective_matmul, remat
from hjax.models.attention_strategies import AttentionBackend
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
        the compiler (which would split FSDP's embedding by width rather than by batch).
      kernel_set: name of a set of kernels, see ``hjax.kernels.registry``; the plain reference until
        ``for_layout`` chooses a platform's.
      attention: the config key ``model.attention``, by which ``for_layout`` chooses.
      run_layout: the layout whose devices run the forward, set by ``for_layout``; kernels that the
        compiler cannot partition are split over it.
      dropout: of the adapters' inputs in an update; None: off.
      move_weights: allow collective matmul over a tensor axis, see
        ``hjax.models.collective_matmul``; ``for_layout`` sets it where transfers overlap compute.
      move_tokens: the same of the ring of experts, see ``hjax.models.expert_ring``.
      forms: of kernels and collectives that may be taken, see ``hjax.kernels.verdict``.
    """

    dtype: Any = jnp.float32
    unroll_layers: bool = False
    remat: str = remat.NONE
    layout: Layout | None = None
    kernel_set: str = REFERENCE
    attention: str = AUTO
    run_layout: Layout | None = None
    dropout: Dropout | None = None
    move_weights: bool = False
    move_tokens: bool = False
    forms: frozenset[str] = ALL_FORMS

    def for_layer(self, layer: int | jax.Array) -> Compute:
        """The same with the dropout of a layer, counted from the first that is run."""
        if self.dropout is None:
            return self
        return dataclasses.replace(self, dropout=self.dropout.for_layer(layer))

    def for_layout(self, layout: Layout) -> Compute:
        """The same with the kernels for a layout's devices.

        Raises:
          ConfigError: an attention kernel that the platform lacks.
        """
        overlaps = layout.platform in collective_matmul.PLATFORMS
        return dataclasses.replace(
            self,
            kernel_set=choose_kernel_set(layout.platform, self.attention),
            run_layout=layout,
            move_weights=overlaps and COLLECTIVE_MATMUL in self.forms,
            move_tokens=overlaps and EXPERT_RING in self.forms,
        )

    @property
    def kernels(self) -> KernelSet:
        """The kernels that layers use."""
        return make_kernel_set(
            self.kernel_set, whole=self.unsplit, unrolled=self.unroll_layers, forms=self.forms
        )

    @property
    def form(self) -> AttentionBackend:
        """The backend of the attention strategies."""
        kernels, layout = self.kernels, self.run_layout or self.layout
        return AttentionBackend(kernels.attention, layout, kernels.packs_share)

    @property
    def context_layout(self) -> Layout | None:
        """The layout if it has context parallelism (splits the length), else None."""
        splits = self.layout is not None and self.layout.shard_count("length") > 1
        return self.layout if splits else None

    def weight_ring(self, config: ModelConfig, shape: tuple[int, ...]) -> WeightRing | None:
        """The ring for collective matmul in a pass over [batch, length, embed], or None."""
        rows, length, _ = shape
        if not self.move_weights:
            return None
        return make_weight_ring(self.layout, config, rows, length, self.dtype)

    @property
    def unsplit(self) -> bool:
        """Whether each device is known to hold the full length and a layer's full weights."""
        split = ("length", "embed", "heads", "kv_heads", "mlp")
        return self.layout is not None and all(self.layout.shard_count(name) == 1 for name in split)

    def constrain(self, x: jax.Array, *logical_axes: str | None) -> jax.Array:
        """Inside jit: constrain activations to the layout's sharding."""
        return x if self.layout is None else self.layout.constrain(x, *logical_axes)
