"""Parameters as plain nested dicts: create them sharded, read their axes, count them.

A model is a pair: a static graph (what to compute) and a nested dict of float32 arrays. Workers
keep the dict, optimizers and checkpoints see nothing of flax.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from flax import nnx

from hjax.errors import ConfigError
from hjax.models.config import ModelConfig
from hjax.models.transformer import Decoder, ScalarDecoder
from hjax.sharding.layout import Layout
from hjax.sharding.pipeline import Stack, plain

Params = dict[str, Any]


@dataclasses.dataclass(frozen=True, eq=False)
class Network:
    """A model without its numbers.

    Attributes:
      config: shapes of the decoder.
      graph: flax.nnx graph definition; ``bind`` puts parameters into it.
      axes: nested dict like the parameters, of logical axis names.
      shapes: nested dict like the parameters, of jax.ShapeDtypeStruct.
    """

    config: ModelConfig
    graph: Any
    axes: Params
    shapes: Params
    _create: Callable[[jax.Array], Params]
    _state: Any

    def bind(self, params: Params, stack: Stack = plain) -> Any:
        """The module with these parameters; call it inside jit.

        Args:
          params: all of them, or with stacked leaves cut to some layers.
          stack: how a forward without a cache runs the layers.
        """
        state = jax.tree.map(lambda x: x, self._state)
        nnx.replace_by_pure_dict(state, params)
        module = nnx.merge(self.graph, state)
        if stack is not plain:
            getattr(module, "decoder", module).stack = stack
        return module

    def shardings(self, layout: Layout) -> Params:
        """NamedSharding of every parameter under a layout."""
        return jax.tree.map(
            lambda axes: layout.sharding(*axes), self.axes, is_leaf=lambda x: isinstance(x, tuple)
        )

    def read_dtypes(self, dtype: Any) -> Params:
        """Dtype in which a forward of compute ``dtype`` reads every parameter.

        Matrices are cast; vectors (norm weights, heads) stay float32, so a copy in these dtypes
        gives bit for bit the forward of the parameters themselves.
        """
        return jax.tree.map(
            lambda axes: np.dtype(dtype if len({*axes} - {"layers"}) > 1 else np.float32),
            self.axes,
            is_leaf=lambda x: isinstance(x, tuple),
        )

    def create(self, seed: int, layout: Layout) -> Params:
        """Initial parameters, each device making its own part; the same under every layout."""
        create = jax.jit(self._create, out_shardings=self.shardings(layout))
        return create(jax.random.key(seed))

    def place(self, params: Params, layout: Layout) -> Params:
        """Host arrays (or arrays elsewhere) laid out for ``layout``."""
        return jax.tree.map(jax.device_put, params, self.shardings(layout))

    @property
    def parameters(self) -> int:
        """Number of parameters."""
        return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(self.shapes))


@functools.lru_cache(maxsize=64)
def _network(kind: type, config: ModelConfig) -> Network:
    if config.experts:
        raise ConfigError(
            f"a model with {config.experts} experts can be planned for, not run yet"
        )

    def create(key: jax.Array) -> Params:
        return nnx.to_pure_dict(nnx.state(kind(config, key)))

    module = nnx.eval_shape(lambda: kind(config, jax.random.key(0)))
    graph, state = nnx.split(module)
    axes = nnx.to_pure_dict(
        jax.tree.map(
            lambda v: v.replace(v.get_metadata("logical_axes")),
            state,
            is_leaf=lambda v: isinstance(v, nnx.Variable),
        )
    )
    return Network(config, graph, axes, nnx.to_pure_dict(state), create, state)


def decoder_network(config: ModelConfig) -> Network:
    """The language model of these shapes."""
    return _network(Decoder, config)


def scalar_network(config: ModelConfig) -> Network:
    """The decoder with a scalar head: critics, reward and cost models."""
    return _network(ScalarDecoder, config)


def to_host(params: Params) -> Params:
    """numpy copies of (addressable) parameters."""
    return jax.tree.map(np.array, params)
