"""Collective matmul: layers over a tensor axis whose weights move in a ring, not activations.

Megatron's tensor parallelism (Shoeybi et al. 2019, arXiv 1909.08053) all-reduces every layer's
activations twice in each direction, and the next product must wait for them. Here each device of
the tensor axis holds a part of the length of every row (sequence parallelism). Its weight shard,
the same as Megatron's, moves round a ring: while a device multiplies its tokens with one shard, the
next arrives. Attention stays split by heads: an all-to-all takes queries, keys and values to the
device of their heads and the outputs back (Ulysses; Jacobs et al. 2023, arXiv 2309.14509).
Gradients of weights move the other way round.

All transfers are collective permutes, which the TPU compiler overlaps with compute. Traffic grows
with the weights, not with the tokens, so this is cheaper in passes with many tokens.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from hjax.kernels.attention import pad_length
from hjax.models.architecture import decoder_parameters
from hjax.models.cost_inputs import MeshSizes, ModelCounts, model_counts
from hjax.models.model_config import ModelConfig
from hjax.models.parameter_spec import ParameterSpec
from hjax.sharding.layout import Layout

Parts = dict[str, jax.Array]
Block = TypeVar("Block", bound=nnx.Module)
MAX_RING_DEVICES = 8  # the steps of a ring are unrolled
PLATFORMS = ("tpu",)  # that overlap transfers with matrix products


@dataclasses.dataclass(frozen=True)
class WeightRing:
    """Collective matmuls over a ring of the devices of a layout's tensor axis.

    Attributes:
      layout: the train layout.
      declared: a layer's parameters, by name, each with a leading ``layers`` axis.
      dtype: of compute.
      length: of the rows.
    """

    layout: Layout
    declared: Mapping[str, ParameterSpec]
    dtype: Any
    length: int

    @property
    def axes(self) -> tuple[str, ...]:
        """Mesh axes that split the weights and, between products, the length."""
        return self.layout.axes("heads")

    def split_length(self, x: jax.Array) -> jax.Array:
        """[batch, length, embed], padded and split over the length into equal parts."""
        return self.constrain_length(self._padded(x))

    def constrain_length(self, x: jax.Array) -> jax.Array:
        """[batch, length, embed] with the constraint that each device has a part of the length."""
        return self.layout.constrain(x, "batch", "heads", None)

    def gather_length(self, x: jax.Array) -> jax.Array:
        """The inverse of ``split_length``: [batch, length, embed] without padding."""
        return self.layout.constrain(x, "batch")[:, : self.length]

    def to_heads(self, f: Callable[[Parts, jax.Array], Any], x: jax.Array, weights: Parts) -> Any:
        """Project tokens to heads: from split over the length to split over heads (all-to-all).

        Args:
          f: (weights of some heads, [batch, places, embed]) -> tree of [batch, places, ...,
            heads, head_dim] with those heads.
          x: [batch, length, embed], of ``split_length``.
          weights: by name.
        """

        def run(x: jax.Array, weights: Parts) -> Any:
            pieces = []
            for step, shard in enumerate(self._rotating_weights(weights)):
                pieces.append(self._shift(f(shard, x), step))
            own = jax.lax.axis_index(self.axes)
            return jax.tree.map(lambda *of: _join_chunks(1, self._count, own, of), *pieces)

        example = jax.eval_shape(f, weights, x)
        heads = jax.tree.map(
            lambda y: self._spec("batch", *[None] * (y.ndim - 3), "heads", None), example
        )
        in_specs = self._spec("batch", "heads"), self._specs(weights)
        candidates = self._map(run, in_specs, heads)(x, weights)
        return jax.tree.map(lambda y: y[:, : self.length], candidates)

    def from_heads(
        self, function: Callable[[Parts, jax.Array], jax.Array], x: jax.Array, weights: Parts
    ) -> jax.Array:
        """Project heads back: from split over heads to [batch, length, embed] over the length.

        Args:
          function: (weights of some heads, [batch, places, heads, head_dim] of them) -> [batch,
            places, embed], whose sum over heads is returned.
          x: [batch, length, heads, head_dim], split by heads.
          weights: by name.
        """

        def run(x: jax.Array, weights: Parts) -> jax.Array:
            pieces = _split_chunks(1, self._count, jax.lax.axis_index(self.axes), x)
            out: Any = None
            for step, shard in enumerate(self._rotating_weights(weights)):
                here = function(shard, self._shift(pieces[step], -step))
                out = here if out is None else out + here
            return out

        in_specs = self._spec("batch", None, "heads"), self._specs(weights)
        return self._map(run, in_specs, self._spec("batch", "heads"))(self._padded(x), weights)

    def to_mlp(
        self, function: Callable[[Parts, jax.Array], jax.Array], x: jax.Array, weights: Parts
    ) -> jax.Array:
        """Apply an MLP whose output is a sum over shards of its weights.

        Args:
          function: (a shard of the weights, [batch, places, embed]) -> [batch, places, embed].
          x: [batch, length, embed], split over the length; so is the result.
          weights: by name.
        """

        def run(x: jax.Array, weights: Parts) -> jax.Array:
            out: Any = None
            for shard in self._rotating_weights(weights):
                here = function(shard, x)
                out = here if out is None else out + here
            return out

        places = self._spec("batch", "heads")
        return self._map(run, (places, self._specs(weights)), places)(x, weights)

    def _shift(self, tree: Any, by: int) -> Any:
        return ring_shift(tree, by, self.axes, self._count)

    def _padded(self, x: jax.Array) -> jax.Array:
        return pad_length(x, -x.shape[1] % self._count)

    @property
    def _count(self) -> int:
        return self.layout.shard_count("heads")

    def _rotating_weights(self, weights: Parts) -> Any:
        """Yield each device's own weight shard, then the next device's, and so on."""
        here = {name: self._gather_fsdp(name, x) for name, x in weights.items()}
        moving = [name for name in here if self._split(name)]
        added_once = [n for n in here if n not in moving and n.endswith("_bias")]
        for step in range(self._count):
            yield here
            if step + 1 < self._count:
                here = here | self._shift({name: here[name] for name in moving}, -1)
                here |= {name: jnp.zeros_like(here[name]) for name in added_once}

    def _gather_fsdp(self, name: str, x: jax.Array) -> jax.Array:
        """A parameter in compute dtype, all-gathered over FSDP's axes."""
        parameter = self.declared[name]
        if parameter.kind.cast and not parameter.quantized:
            x = x.astype(self.dtype)
        axes = self.layout.axes("embed")
        if not axes or "embed" not in parameter.names:
            return x
        return jax.lax.all_gather(x, axes, axis=parameter.names.index("embed") - 1, tiled=True)

    def _split(self, name: str) -> bool:
        return any(
            set(self.layout.axes(axis)) & set(self.axes) for axis in self.declared[name].names[1:]
        )

    def _specs(self, weights: Parts) -> dict[str, PartitionSpec]:
        return {name: self._spec(*self.declared[name].names[1:]) for name in weights}

    def _spec(self, *names: str | None) -> PartitionSpec:
        return self.layout.spec(names)

    def _map(self, run: Any, in_specs: Any, out_specs: Any) -> Any:
        return jax.shard_map(
            run, mesh=self.layout.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
        )


def ring_shift(tree: Any, by: int, axes: tuple[str, ...], count: int) -> Any:
    """Collective permute: every device of a ring sends to the one ``by`` positions further on."""
    if by % count == 0:
        return tree
    pairs = [(i, (i + by) % count) for i in range(count)]
    return jax.tree.map(lambda x: jax.lax.ppermute(x, axes, pairs), tree)


# Chunks of a dimension, one per device; chunk ``step`` is from the device ``step`` places before.
# Custom gradients: automatic ones would pass over the whole array for each chunk.


def _chunk_start(own: jax.Array, step: int, count: int, size: int) -> jax.Array:
    return (own - step) % count * size


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _join_chunks(axis: int, count: int, own: jax.Array, pieces: tuple[jax.Array, ...]) -> jax.Array:
    shape = list(pieces[0].shape)
    size = shape[axis]
    shape[axis] *= count
    out = jax.lax.empty(tuple(shape), pieces[0].dtype)  # the pieces fill it
    for step, piece in enumerate(pieces):
        start = _chunk_start(own, step, count, size)
        out = jax.lax.dynamic_update_slice_in_dim(out, piece, start, axis)
    return out


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _split_chunks(axis: int, count: int, own: jax.Array, x: jax.Array) -> tuple[jax.Array, ...]:
    size = x.shape[axis] // count
    starts = [_chunk_start(own, step, count, size) for step in range(count)]
    return tuple(jax.lax.dynamic_slice_in_dim(x, start, size, axis) for start in starts)


_join_chunks.defvjp(
    lambda axis, count, own, pieces: (_join_chunks(axis, count, own, pieces), own),
    lambda axis, count, own, g: (None, _split_chunks(axis, count, own, g)),
)
_split_chunks.defvjp(
    lambda axis, count, own, x: (_split_chunks(axis, count, own, x), own),
    lambda axis, count, own, g: (None, _join_chunks(axis, count, own, tuple(g))),
)


def run_on_ring(
    ring: WeightRing | None,
    block: Block,
    method: str,
    function: Callable[[Block, jax.Array, Any], Any],
    x: jax.Array,
    compute: Any,
    *names: str,
) -> Any:
    """``function(block, x, compute)``, run as a collective matmul if there is a ring.

    Args:
      block: an nnx module with one layer's parameters.
      method: ``to_heads``, ``from_heads`` or ``to_mlp``, the ring's method for ``x``.
      names: of the weights; those that the block lacks are ignored.
    """
    if ring is None:
        return function(block, x, compute)
    candidates = [name + of for name in names for of in ("", "_scale", "_a", "_b", "_bias")]
    weights = {name: getattr(block, name)[...] for name in candidates if hasattr(block, name)}

    def with_weights(weights: Parts, x: jax.Array) -> Any:
        graph, state = nnx.split(block)
        nnx.replace_by_pure_dict(state, {**nnx.to_pure_dict(state), **weights})
        return function(nnx.merge(graph, state), x, compute)

    return getattr(ring, method)(with_weights, x, weights)


def make_weight_ring(
    layout: Layout | None, config: ModelConfig, rows: int, length: int, dtype: Any
) -> WeightRing | None:
    """The ring for a pass over [rows, length]; None where activations are all-reduced instead."""
    if layout is None or rows % layout.shard_count("batch"):
        return None
    tokens = rows * length / layout.shard_count("batch")
    if not weights_travel(model_counts(config), MeshSizes.of(layout), tokens):
        return None
    return WeightRing(layout, decoder_parameters(config)["layers"], dtype, length)


def weights_travel(model: ModelCounts, mesh: MeshSizes, tokens: float) -> bool:
    """Whether a pass of so many tokens per tensor group moves weights instead of activations.

    Not if the tensor axis is longer than ``MAX_RING_DEVICES``, if KV heads do not divide over it,
    with pipeline stages, context parallelism, experts, DoRA or adapter dropout, or if all-reduces
    of activations receive fewer bytes.
    """
    if not 1 < mesh.tensor <= MAX_RING_DEVICES or model.kv_heads % mesh.tensor:
        return False
    if mesh.pipe * mesh.context > 1 or model.experts or model.dora or model.dropout:
        return False
    return fewer_bytes_received(model, tokens, mesh.tensor)


def fewer_bytes_received(model: ModelCounts, tokens: float, devices: int) -> bool:
    """Whether a forward pass of so many tokens receives fewer bytes if weights move.

    Compares elements received per layer, each times (devices - 1) / devices: the weights plus the
    queries, keys, values and attention outputs of a device's tokens; or two all-reduces over all
    tokens, in which a device receives everything twice.
    """
    exchanged = (2 * model.attention_width + model.cache_elements) * tokens / devices
    return model.layer_parameters + exchanged < 4 * model.hidden * tokens
