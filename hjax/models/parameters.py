"""Parameters as plain nested dicts: create them sharded, read their declarations.

A model is a pair: a static graph (what to compute) and a nested dict of float32 arrays. Workers
keep the dict, optimizers and checkpoints see nothing of flax.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from flax import nnx

from hjax.models.config import ModelConfig
from hjax.models.transformer import Decoder, ScalarDecoder
from hjax.sharding.arrays import place
from hjax.sharding.layout import Layout
from hjax.sharding.pipeline import Stack, plain

Params = dict[str, Any]


@dataclasses.dataclass(frozen=True, eq=False)
class Network:
    """A model without its numbers.

    Attributes:
      config: shapes of the decoder.
      graph: flax.nnx graph definition; ``bind`` puts parameters into it.
      declared: nested dict like the parameters, of ``Parameter``.
      axes: nested dict like the parameters, of logical axis names.
      kinds: nested dict like the parameters, of ``Kind``.
      shapes: nested dict like the parameters, of jax.ShapeDtypeStruct.
    """

    config: ModelConfig
    graph: Any
    declared: Params
    axes: Params
    kinds: Params
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

        Vectors (norm weights, heads) stay float32, so a copy in these dtypes gives bit for bit the
        forward of the parameters themselves.
        """
        return jax.tree.map(
            lambda kind: np.dtype(dtype if kind.cast else np.float32), self.kinds
        )

    def create(self, seed: int, layout: Layout) -> Params:
        """Initial parameters, each device making its own part; the same under every layout."""
        create = jax.jit(self._create, out_shardings=self.shardings(layout))
        return create(jax.random.key(seed))

    def place(self, params: Params, layout: Layout) -> Params:
        """Host arrays (or arrays elsewhere) laid out for ``layout``."""
        return jax.tree.map(place, params, self.shardings(layout))


@functools.lru_cache(maxsize=64)
def network_of(module: type, config: ModelConfig) -> Network:
    """The network of a flax.nnx module made as ``module(config, key)``.

    Its parameters are made by ``Parameter.create`` of ``hjax.models.declaration``.

    Raises:
      ConfigError: a model with experts.
    """
    def create(key: jax.Array) -> Params:
        return nnx.to_pure_dict(nnx.state(module(config, key)))

    graph, state = nnx.split(nnx.eval_shape(lambda: module(config, jax.random.key(0))))

    declared = nnx.to_pure_dict(
        jax.tree.map(
            lambda v: v.replace(v.get_metadata("declared")),
            state,
            is_leaf=lambda v: isinstance(v, nnx.Variable),
        )
    )
    axes = jax.tree.map(lambda p: p.names, declared)
    kinds = jax.tree.map(lambda p: p.kind, declared)
    shapes = nnx.to_pure_dict(state)
    return Network(config, graph, declared, axes, kinds, shapes, create, state)


def decoder_network(config: ModelConfig) -> Network:
    """The language model of these shapes."""
    return network_of(Decoder, config)


def scalar_network(config: ModelConfig) -> Network:
    """The decoder with a scalar head: critics, reward and cost models."""
    return network_of(ScalarDecoder, config)


def to_host(params: Params) -> Params:
    """numpy copies of (addressable) parameters."""
    return jax.tree.map(np.array, params)
