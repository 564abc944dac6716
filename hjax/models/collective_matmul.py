"""Layers over a tensor axis through which weights travel instead of activations.

Megatron's tensor parallelism (Shoeybi et al. 2019, arXiv 1909.08053) sums every layer's activations
over the devices twice each way, and nothing can run beside these sums: the next product needs them.
Here each device of the tensor axis has a part of the length of every row. Its part of the weights,
the same as Megatron's, goes round a ring: while a device multiplies its tokens with the part that
it has, the next one arrives. Attention stays split by heads: queries, keys and values go to the
device that has their heads as soon as they are made, and what attention makes goes back (Jacobs et
al. 2023, arXiv 2309.14509). Gradients of weights go round the other way.

Everything is sent by permutations, which a TPU's compiler always starts early and awaits late. What
is moved grows with the weights, not with the tokens, so this pays where a pass has many.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from hjax.kernels.attention import lengthened
from hjax.models.architecture import decoder_parameters
from hjax.models.cost_inputs import MeshSizes, ModelCounts, model_counts
from hjax.models.model_config import ModelConfig
from hjax.models.parameter_spec import ParameterSpec
from hjax.sharding.layout import Layout

Parts = dict[str, jax.Array]
Block = TypeVar("Block", bound=nnx.Module)
MAX_RING_DEVICES = 8  # devices in a ring, whose steps are written out one after another
PLATFORMS = ("tpu",)  # that send while they multiply


@dataclasses.dataclass(frozen=True)
class WeightRing:
    """The devices of a layout's tensor axis, in a ring.

    Attributes:
      layout: of training.
      declared: a layer's parameters, by name, each with a leading ``layers`` dimension.
      dtype: of compute.
      length: of the rows.
    """

    layout: Layout
    declared: Mapping[str, ParameterSpec]
    dtype: Any
    length: int

    @property
    def axes(self) -> tuple[str, ...]:
        """Over which weights are split, and between products the length."""
        return self.layout.axes("heads")

    def spread(self, x: jax.Array) -> jax.Array:
        """[batch, length, embed] with as many places more as make equal parts for the devices."""
        return self.hold(self._padded(x))

    def hold(self, x: jax.Array) -> jax.Array:
        """[batch, length, embed], each device with its part of the length."""
        return self.layout.constrain(x, "batch", "heads", None)

    def whole(self, x: jax.Array) -> jax.Array:
        """What was spread, [batch, length, embed]."""
        return self.layout.constrain(x, "batch")[:, : self.length]

    def to_heads(
        self, made: Callable[[Parts, jax.Array], Any], x: jax.Array, weights: Parts
    ) -> Any:
        """What ``made`` makes of each token for every head, split by heads, with the whole length.

        Args:
          made: (weights of some heads, [batch, places, embed]) -> tree of [batch, places, ...,
            heads, head_dim] with those heads.
          x: [batch, length, embed], spread.
          weights: by name.
        """

        def run(x: jax.Array, weights: Parts) -> Any:
            pieces = []
            for step, part in enumerate(self._around(weights)):
                pieces.append(self._sent(made(part, x), step))
            own = jax.lax.axis_index(self.axes)
            return jax.tree.map(lambda *of: _join_chunks(1, self._count, own, of), *pieces)

        example = jax.eval_shape(made, weights, x)
        heads = jax.tree.map(
            lambda y: self._spec("batch", *[None] * (y.ndim - 3), "heads", None), example
        )
        given = self._spec("batch", "heads"), self._specs(weights)
        every = self._map(run, given, heads)(x, weights)
        return jax.tree.map(lambda y: y[:, : self.length], every)

    def from_heads(
        self, made: Callable[[Parts, jax.Array], jax.Array], x: jax.Array, weights: Parts
    ) -> jax.Array:
        """The sum over heads of what ``made`` makes of them: [batch, length, embed], spread.

        Args:
          made: (weights of some heads, [batch, places, heads, head_dim] of them) -> [batch, places,
            embed].
          x: [batch, length, heads, head_dim], split by heads.
          weights: by name.
        """

        def run(x: jax.Array, weights: Parts) -> jax.Array:
            pieces = _split_chunks(1, self._count, jax.lax.axis_index(self.axes), x)
            out: Any = None
            for step, part in enumerate(self._around(weights)):
                here = made(part, self._sent(pieces[step], -step))
                out = here if out is None else out + here
            return out

        given = self._spec("batch", None, "heads"), self._specs(weights)
        return self._map(run, given, self._spec("batch", "heads"))(self._padded(x), weights)

    def within(
        self, made: Callable[[Parts, jax.Array], jax.Array], x: jax.Array, weights: Parts
    ) -> jax.Array:
        """The sum over parts of the weights of what ``made`` makes of tokens with them.

        Args:
          made: (some of the weights, [batch, places, embed]) -> [batch, places, embed].
          x: [batch, length, embed], spread; so is the result.
          weights: by name.
        """

        def run(x: jax.Array, weights: Parts) -> jax.Array:
            out: Any = None
            for part in self._around(weights):
                here = made(part, x)
                out = here if out is None else out + here
            return out

        places = self._spec("batch", "heads")
        return self._map(run, (places, self._specs(weights)), places)(x, weights)

    def _sent(self, tree: Any, by: int) -> Any:
        return ring_shift(tree, by, self.axes, self._count)

    def _padded(self, x: jax.Array) -> jax.Array:
        return lengthened(x, -x.shape[1] % self._count)

    @property
    def _count(self) -> int:
        return self.layout.shard_count("heads")

    def _around(self, weights: Parts) -> Any:
        """On each device its own part of the weights, then the next device's, and so on."""
        here = {name: self._whole(name, x) for name, x in weights.items()}
        travelling = [name for name in here if self._split(name)]
        once = [n for n in here if n not in travelling and n.endswith("_bias")]
        for step in range(self._count):
            yield here
            if step + 1 < self._count:
                here = here | self._sent({name: here[name] for name in travelling}, -1)
                here |= {name: jnp.zeros_like(here[name]) for name in once}

    def _whole(self, name: str, x: jax.Array) -> jax.Array:
        """A parameter as products read it, whole but for the tensor axis."""
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

    def _map(self, run: Any, given: Any, made: Any) -> Any:
        return jax.shard_map(
            run, mesh=self.layout.mesh, in_specs=given, out_specs=made, check_vma=False
        )


def ring_shift(tree: Any, by: int, axes: tuple[str, ...], count: int) -> Any:
    """Of every device of a ring to the one so many further on."""
    if by % count == 0:
        return tree
    pairs = [(i, (i + by) % count) for i in range(count)]
    return jax.tree.map(lambda x: jax.lax.ppermute(x, axes, pairs), tree)


# Pieces of a dimension, one of each device: number ``step`` is that of the device ``step`` before.
# Their gradients are written out: by rule each would pass over the whole array.


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
    how: str,
    part: Callable[[Block, jax.Array, Any], Any],
    x: jax.Array,
    compute: Any,
    *names: str,
) -> Any:
    """``part(block, x, compute)``, whose weights travel where there is a ring.

    Args:
      block: an nnx module with one layer's parameters.
      how: ``to_heads``, ``from_heads`` or ``within``, the ring's method for ``x``.
      names: of the weights; those that it has.
    """
    if ring is None:
        return part(block, x, compute)
    every = [name + of for name in names for of in ("", "_scale", "_a", "_b", "_bias")]
    weights = {name: getattr(block, name)[...] for name in every if hasattr(block, name)}

    def made(weights: Parts, x: jax.Array) -> Any:
        graph, state = nnx.split(block)
        nnx.replace_by_pure_dict(state, {**nnx.to_pure_dict(state), **weights})
        return part(nnx.merge(graph, state), x, compute)

    return getattr(ring, how)(made, x, weights)


def make_weight_ring(
    layout: Layout | None, config: ModelConfig, rows: int, length: int, dtype: Any
) -> WeightRing | None:
    """The ring for passes of so many rows of so many places; None where activations are summed."""
    if layout is None or rows % layout.shard_count("batch"):
        return None
    tokens = rows * length / layout.shard_count("batch")
    if not weights_travel(model_counts(config), MeshSizes.of(layout), tokens):
        return None
    return WeightRing(layout, decoder_parameters(config)["layers"], dtype, length)


def weights_travel(model: ModelCounts, mesh: MeshSizes, tokens: float) -> bool:
    """Whether weights travel in passes of so many tokens of the devices along a tensor axis.

    Activations are summed where it is long; where keys and values do not divide over it; with
    stages, a split length, experts, adapters that need whole weights or draw what they drop; and
    where less is received so.
    """
    if not 1 < mesh.tensor <= MAX_RING_DEVICES or model.kv_heads % mesh.tensor:
        return False
    if mesh.pipe * mesh.context > 1 or model.experts or model.dora or model.dropout:
        return False
    return fewer_bytes_received(model, tokens, mesh.tensor)


def fewer_bytes_received(model: ModelCounts, tokens: float, devices: int) -> bool:
    """Whether a forward pass of so many tokens receives less with weights that travel.

    Elements of a layer, each times (devices - 1) / devices: its weights, and queries, keys, values
    and what attention makes of a device's tokens; or two sums of all tokens, of which a device
    receives everything twice.
    """
    exchanged = (2 * model.attention_width + model.cache_elements) * tokens / devices
    return model.layer_parameters + exchanged < 4 * model.hidden * tokens
