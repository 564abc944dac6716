"""``Network``: a model's static graph and specs; its parameters are plain nested dicts of arrays.

Workers hold the dict; optimizers and checkpoints do not depend on flax.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental import layout as memory

from hjax.errors import ConfigError
from hjax.models.experts import fsdp_axes
from hjax.models.load_balancing import RoutingTally
from hjax.models.model_config import ModelConfig
from hjax.models.parameter_spec import ParameterSpec
from hjax.models.transformer import Decoder, ScalarDecoder
from hjax.sharding.global_arrays import place
from hjax.sharding.layout import Layout
from hjax.sharding.pipeline import Stack, run_all_layers
from hjax.trainable_split import TrainableSplit

Params = dict[str, Any]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Layered:
    """Parameters with separate arrays for each layer, for programs with unrolled layers: from
    stacked arrays these would copy every layer.

    Attributes:
      rest: parameters outside of layers.
      layers: a nested dict per layer.
    """

    rest: Params
    layers: tuple[Params, ...]


Weights = Params | Layered


@dataclasses.dataclass(frozen=True, eq=False)
class Network:
    """A model without parameter values.

    Attributes:
      module: the flax.nnx class.
      config: shapes of the decoder.
      graph: flax.nnx graph definition; ``bind`` inserts parameters.
      declared: nested dict like the parameters, of ``ParameterSpec``.
      axes: nested dict like the parameters, of logical axis names.
      kinds: nested dict like the parameters, of ``ParameterKind``.
      shapes: nested dict like the parameters, of jax.ShapeDtypeStruct.
      partition: into trainable (all, or adapters) and frozen parameters.
      frozen_dtype: dtype of quantized matrices after dequantization.
    """

    module: type
    config: ModelConfig
    graph: Any
    declared: Params
    axes: Params
    kinds: Params
    shapes: Params
    partition: TrainableSplit
    _create: Callable[[jax.Array], Params]
    _state: Any
    frozen_dtype: Any = np.dtype(np.float32)

    @property
    def dimensions(self) -> Mapping[str, int]:
        """Sizes by logical axis, which layouts must divide."""
        return self.config.dimensions

    @property
    def draws_noise(self) -> bool:
        """Whether updates draw random numbers: dropout of adapters."""
        return self.config.lora is not None and self.config.lora.dropout > 0

    def bind(
        self, params: Weights, stack: Stack = run_all_layers, tally: RoutingTally | None = None
    ) -> Any:
        """The module with these parameters; call it inside jit.

        Args:
          params: all parameters; stacked leaves may be sliced to some layers.
          stack: how a forward without a cache runs the layers.
          tally: collects routing statistics of forwards over prompts and responses.
        """
        state = jax.tree.map(lambda x: x, self._state)
        layers = None
        if isinstance(params, Layered):
            # Unused stacked copies are removed by the compiler.
            layers = params.layers
            stacked = jax.tree.map(lambda *parts: jnp.stack(parts), *layers)
            params = params.rest | {"layers": stacked}
        nnx.replace_by_pure_dict(state, params)
        module = nnx.merge(self.graph, state)
        decoder = getattr(module, "decoder", module)
        if layers is not None:
            decoder.unstacked = lambda: layers
        if stack is not run_all_layers:
            decoder.stack = stack
        if tally is not None:
            decoder.tally = tally
        return module

    def shardings(self, layout: Layout) -> Params:
        """NamedSharding of every parameter under a layout."""
        experts, width = self.config.experts, self.config.hidden_size
        return jax.tree.map(
            lambda axes: layout.sharding(
                *fsdp_axes(axes, experts=experts, width=width, layout=layout)
            ),
            self.axes,
            is_leaf=lambda x: isinstance(x, tuple),
        )

    def compute_dtypes(self, dtype: Any) -> Params:
        """The dtype to which a forward with compute ``dtype`` casts each parameter.

        Vectors (norm weights, heads) stay float32 and quantized matrices keep their dtype, so a
        copy in these dtypes gives bit for bit the same forward.
        """

        def read(parameter: ParameterSpec) -> np.dtype:
            cast = parameter.kind.cast and not parameter.quantized
            return np.dtype(dtype) if cast else jnp.dtype(parameter.dtype)

        return jax.tree.map(read, self.declared)

    def compute_shapes(self, dtype: Any) -> Params:
        """Shapes of the parameters, in ``compute_dtypes``."""
        return jax.tree.map(
            lambda x, read: jax.ShapeDtypeStruct(x.shape, read),
            self.shapes,
            self.compute_dtypes(dtype),
        )

    def with_frozen_dtype(self, dtype: Any) -> Network:
        """The same with frozen parameters stored in the dtypes of ``compute_dtypes``."""
        if self.partition.everything:
            return self
        learned, _ = self.partition.split(self.shapes)
        _, frozen = self.partition.split(self.compute_shapes(dtype))
        joined = self.partition.join(learned, frozen)
        return dataclasses.replace(self, shapes=joined, frozen_dtype=np.dtype(dtype))

    def with_shapes(self, shapes: Params) -> Network:
        """The same with parameters of other dtypes."""
        return dataclasses.replace(self, shapes=shapes)

    @functools.cached_property
    def base(self) -> Network:
        """The same model without adapters, in the same dtypes, dequantized."""
        if not self.config.quantized:
            return self.without_adapters
        plain = network_of(self.module, self.config.base)

        def read(kept: jax.ShapeDtypeStruct, parameter: ParameterSpec) -> jax.ShapeDtypeStruct:
            dtype = self.frozen_dtype if parameter.quantized else kept.dtype
            return jax.ShapeDtypeStruct(kept.shape, dtype)

        kept, declared = (_select(plain.shapes, tree) for tree in (self.shapes, self.declared))
        return plain.with_shapes(jax.tree.map(read, kept, declared))

    @functools.cached_property
    def without_adapters(self) -> Network:
        """The same model without adapters; frozen parameters stay as they are, also quantized."""
        if self.config.lora is None:
            return self
        plain = network_of(self.module, dataclasses.replace(self.config, lora=None))
        plain = plain.with_shapes(_select(plain.shapes, self.shapes))
        return dataclasses.replace(plain, frozen_dtype=self.frozen_dtype)

    def without_adapters_of(self, tree: Params) -> Params:
        """The part of a tree like the parameters that the model without adapters has."""
        return tree if self.config.lora is None else _select(self.without_adapters.declared, tree)

    def create(self, seed: int, layout: Layout) -> Params:
        """Initial parameters, sharded as they are drawn; equal under every layout."""

        if self.config.quantized:
            raise ConfigError(
                f"a base in {self.config.quantized} is read from a path, not drawn; give the path "
                "of its weights"
            )

        shardings, structure = jax.tree.flatten(self.shardings(layout))
        dtypes = tuple(x.dtype for x in jax.tree.leaves(self.shapes))
        drawn = _drawing(self._create, dtypes, tuple(shardings))(jax.random.key(seed))
        return jax.tree.unflatten(structure, drawn)

    def create_learned(self, seed: int, layout: Layout) -> Params:
        """The trainable part of ``create``; frozen parameters are not created."""
        shardings, _ = self.partition.split(self.shardings(layout))

        def create(key: jax.Array) -> Params:
            return self.partition.split(self._create(key))[0]

        return jax.jit(create, out_shardings=shardings)(jax.random.key(seed))

    def place(self, params: Params, layout: Layout) -> Params:
        """Host or device arrays, sharded for ``layout``."""
        return place_params(params, self.shardings(layout), self.shapes)


@functools.lru_cache(maxsize=64)
def network_of(module: type, config: ModelConfig) -> Network:
    """The network of a flax.nnx module ``module(config, key)``, whose parameters are created by
    ``ParameterSpec.create``."""

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
    partition = TrainableSplit(
        jax.tree.map(lambda kind: config.lora is None or kind.trained_with_adapters, kinds)
    )
    return Network(module, config, graph, declared, axes, kinds, shapes, partition, create, state)


@functools.lru_cache(maxsize=64)
def _drawing(
    create: Callable[[jax.Array], Params], dtypes: tuple[Any, ...], shardings: tuple[Any, ...]
) -> Callable[[jax.Array], list[jax.Array]]:
    """The program that draws a model's parameters, compiled once for all that are alike."""

    def draw(key: jax.Array) -> list[jax.Array]:
        leaves = jax.tree.leaves(create(key))
        return [x.astype(dtype) for x, dtype in zip(leaves, dtypes, strict=True)]

    return jax.jit(draw, out_shardings=list(shardings))


def _select(tree: Params, other: Params) -> Params:
    """The leaves of ``other`` that ``tree`` has too."""
    return {
        name: _select(part, other[name]) if isinstance(part, dict) else other[name]
        for name, part in tree.items()
    }


def unstack_layers(params: Params, shardings: Params, donated: Params | None = None) -> Layered:
    """Split stacked arrays into an array per layer, one parameter after another.

    Args:
      params: of a decoder.
      shardings: of each stacked parameter, which do not split layers.
      donated: bool like the parameters: delete the stacked array once it is split, so that at most
        one exists twice; None: delete none.
    """
    stacked = params["layers"]
    donate = jax.tree.map(lambda _: False, stacked) if donated is None else donated["layers"]

    def cut(x: jax.Array, sharding: Any, donate_one: bool) -> Any:
        parts = _split_layers(x.shape[0], sharding)(x)
        if donate_one:
            jax.block_until_ready(parts)
            x.delete()
        return parts

    parts = jax.tree.map(cut, stacked, shardings["layers"], donate)
    count = jax.tree.leaves(stacked)[0].shape[0]
    layers = (jax.tree.map(lambda _, each, i=i: each[i], stacked, parts) for i in range(count))
    return Layered({name: part for name, part in params.items() if name != "layers"}, tuple(layers))


def decoding_memory_orders(axes: Params, heads_split: bool) -> Params:
    """The memory order of stacked weights' dimensions that the TPU compiler wants for decoding.

    In the declared order every program would transpose some weights before its decode loop. A pair
    axis (gate and up, keys and values) and heads must be outside of the summed axis. If heads are
    split over devices, the summed axis is innermost in weights with ``head_dim``.

    Args:
      axes: nested dict of logical axis names.
      heads_split: whether heads are split over devices.

    Returns:
      nested dict like it, of tuples of dimensions, the one that varies most slowly first.
    """

    def order(names: tuple[str | None, ...]) -> tuple[int, ...]:
        plain = tuple(range(len(names)))
        if len(names) < 4 or "embed" not in names[:-1] or "experts" in names:
            return plain
        summed, donate_one = names.index("embed"), len(names) - 1
        outside = tuple(i for i in plain if i not in (summed, donate_one))
        swapped = heads_split and "head_dim" in names
        return (*outside, donate_one, summed) if swapped else (*outside, summed, donate_one)

    return jax.tree.map(order, axes, is_leaf=lambda x: isinstance(x, tuple))


def in_memory_orders(params: Params, orders: Params, donated: Params | None = None) -> Params:
    """Copy arrays into the given memory orders, one after another.

    Args:
      params: jax.Array, or jax.ShapeDtypeStruct with shardings.
      orders: as of ``decoding_memory_orders``; arrays in the right order are returned as they are.
      donated: as of ``unstack_layers``: arrays to delete once they are copied.
    """
    donate = jax.tree.map(lambda _: False, params) if donated is None else donated

    def lay(x: Any, order: tuple[int, ...], donate_one: bool) -> Any:
        if memory_order(x) == order:
            return x
        wanted = memory.Format(memory.Layout(order), x.sharding)
        if isinstance(x, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=wanted)
        laid = _relayout(wanted)(x)
        if donate_one:
            jax.block_until_ready(laid)
            x.delete()
        return laid

    return jax.tree.map(lay, params, orders, donate)


def memory_order(x: Any) -> tuple[int, ...]:
    """The memory order of an array's dimensions (major to minor); abstract arrays too."""
    found = x.format.layout
    return tuple(range(len(x.shape))) if found is None else tuple(found.major_to_minor)


@functools.lru_cache(maxsize=64)
def _relayout(wanted: memory.Format) -> Callable[[jax.Array], jax.Array]:
    return jax.jit(lambda x: x, out_shardings=wanted)


def unstack_layers_abstract(params: Params) -> Layered:
    """``unstack_layers`` of jax.ShapeDtypeStruct with shardings."""

    def one(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape[1:], x.dtype, sharding=_without_layers(x.sharding))

    count = jax.tree.leaves(params["layers"])[0].shape[0]
    rest = {name: part for name, part in params.items() if name != "layers"}
    return Layered(rest, (jax.tree.map(one, params["layers"]),) * count)


@functools.lru_cache(maxsize=64)
def _split_layers(layers: int, sharding: jax.sharding.NamedSharding) -> Callable[[jax.Array], Any]:
    def parts(x: jax.Array) -> list[jax.Array]:
        return [x[i] for i in range(layers)]

    return jax.jit(parts, out_shardings=_without_layers(sharding))


def _without_layers(sharding: Any) -> jax.sharding.NamedSharding:
    return jax.sharding.NamedSharding(sharding.mesh, jax.P(*sharding.spec[1:]))


def place_params(params: Params, shardings: Params, shapes: Params) -> Params:
    """Host or device arrays with these shardings, in the dtypes of ``shapes``."""
    return jax.tree.map(
        lambda x, sharding, like: place(x.astype(like.dtype), sharding), params, shardings, shapes
    )


def decoder_network(config: ModelConfig) -> Network:
    """The language model of these shapes."""
    return network_of(Decoder, config)


def scalar_network(config: ModelConfig) -> Network:
    """The decoder with a scalar head: critics, reward and cost models."""
    return network_of(ScalarDecoder, config)


def to_host(params: Params) -> Params:
    """numpy copies of (addressable) parameters."""
    return jax.tree.map(np.array, params)
