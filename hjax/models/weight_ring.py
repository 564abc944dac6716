"""Layers over a tensor axis through which weights travel instead of activations.

Megatron's tensor parallelism (Shoeybi et al. 2019, arXiv 1909.08053) sums every layer's activations
over the devices twice each way, and nothing can run beside these sums: the next product needs them.
Here each device of the tensor axis keeps a part of the length of every row. Its part of the weights,
as Megatron has it, goes round a ring: while a device multiplies its tokens with the part it has, the
next one arrives. Attention stays split by heads: queries, keys and values go to the device that has
their heads as soon as they are made, and back to their tokens' device after it (Jacobs et al. 2023,
arXiv 2309.14509). Gradients of weights go the same way round, backwards.

Everything is sent by permutations, which a TPU's compiler always starts early and awaits late. What
is moved grows with the weights, not with the tokens, so this pays where a pass has many.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from hjax.models import arithmetic
from hjax.models.config import ModelConfig
from hjax.models.declaration import Parameter
from hjax.sharding.layout import Layout

Parts = dict[str, jax.Array]
LONGEST = 8  # devices in a ring, whose steps are written out one after another


@dataclasses.dataclass(frozen=True)
class WeightRing:
    """The devices of a layout's tensor axis, in a ring.

    Attributes:
      layout: of training.
      declared: a layer's parameters, by name, each with a leading ``layers`` dimension.
      dtype: of compute.
    """

    layout: Layout
    declared: Mapping[str, Parameter]
    dtype: Any

    @property
    def axes(self) -> tuple[str, ...]:
        """Over which weights are split, and between products the length."""
        return self.layout.axes("heads")

    def hold(self, x: jax.Array) -> jax.Array:
        """[batch, length, embed], each device with its part of the length."""
        return self.layout.constrain(x, "batch", "heads", None)

    def to_heads(
        self, made: Callable[[Parts, jax.Array], Any], x: jax.Array, weights: Parts
    ) -> Any:
        """What ``made`` makes of each token for every head, split by heads, with the whole length.

        Args:
          made: (weights of some heads, [batch, places, embed]) -> tree of [batch, places, ...,
            heads, head_dim] with those heads.
          x: [batch, length, embed], split over the length.
          weights: by name.
        """

        def run(x: jax.Array, weights: Parts) -> Any:
            pieces = []
            for step, part in enumerate(self._around(weights)):
                pieces.append(self._sent(made(part, x), step))
            own = jax.lax.axis_index(self.axes)
            return jax.tree.map(lambda *of: _joined(self._count, own, of), *pieces)

        example = jax.eval_shape(made, weights, x)
        heads = jax.tree.map(
            lambda y: self._spec("batch", *[None] * (y.ndim - 3), "heads", None), example
        )
        return self._map(run, (self._spec("batch", "heads"), self._specs(weights)), heads)(
            x, weights
        )

    def from_heads(
        self, made: Callable[[Parts, jax.Array], jax.Array], x: jax.Array, weights: Parts
    ) -> jax.Array:
        """The sum over heads of what ``made`` makes of them: [batch, length, embed], split over the
        length.

        Args:
          made: (weights of some heads, [batch, places, heads, head_dim] of them) -> [batch, places,
            embed].
          x: [batch, length, heads, head_dim], split by heads.
          weights: by name.
        """

        def run(x: jax.Array, weights: Parts) -> jax.Array:
            pieces = _apart(self._count, jax.lax.axis_index(self.axes), x)
            out: Any = None
            for step, part in enumerate(self._around(weights)):
                here = made(part, self._sent(pieces[step], -step))
                out = here if out is None else out + here
            return out

        given = self._spec("batch", None, "heads"), self._specs(weights)
        return self._map(run, given, self._spec("batch", "heads"))(x, weights)

    def within(
        self, made: Callable[[Parts, jax.Array], jax.Array], x: jax.Array, weights: Parts
    ) -> jax.Array:
        """The sum over parts of the weights of what ``made`` makes of tokens with them.

        Args:
          made: (some of the weights, [batch, places, embed]) -> [batch, places, embed].
          x: [batch, length, embed], split over the length; so is the result.
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

    @property
    def _count(self) -> int:
        return self.layout.ways("heads")

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

    def _sent(self, tree: Any, by: int) -> Any:
        """Of every device to the one so many further on."""
        if by % self._count == 0:
            return tree
        pairs = [(i, (i + by) % self._count) for i in range(self._count)]
        return jax.tree.map(lambda x: jax.lax.ppermute(x, self.axes, pairs), tree)

    def _whole(self, name: str, x: jax.Array) -> jax.Array:
        """A parameter as products read it, whole but for the tensor axis."""
        parameter = self.declared[name]
        if parameter.kind.cast and not parameter.quantized:
            x = x.astype(self.dtype)
        axes = self.layout.axes("embed")
        if axes and "embed" in parameter.names:
            x = jax.lax.all_gather(x, axes, axis=parameter.names.index("embed") - 1, tiled=True)
        return x

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


# A device's pieces of the length: number ``step`` is that of the device ``step`` before it.


def _place(own: jax.Array, step: int, count: int, length: int) -> jax.Array:
    return (own - step) % count * length


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _joined(count: int, own: jax.Array, pieces: tuple[jax.Array, ...]) -> jax.Array:
    """[batch, length, ...] of pieces of [batch, length / count, ...]."""
    batch, length, *rest = pieces[0].shape
    out = jnp.zeros((batch, length * count, *rest), pieces[0].dtype)
    for step, piece in enumerate(pieces):
        out = jax.lax.dynamic_update_slice_in_dim(
            out, piece, _place(own, step, count, length), axis=1
        )
    return out


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _apart(count: int, own: jax.Array, x: jax.Array) -> tuple[jax.Array, ...]:
    """The pieces of [batch, length, ...]."""
    length = x.shape[1] // count
    return tuple(
        jax.lax.dynamic_slice_in_dim(x, _place(own, step, count, length), length, axis=1)
        for step in range(count)
    )


# No sums: by rule each piece's gradient would pass over all of the length.
_joined.defvjp(
    lambda count, own, pieces: (_joined(count, own, pieces), own),
    lambda count, own, g: (None, _apart(count, own, g)),
)
_apart.defvjp(
    lambda count, own, x: (_apart(count, own, x), own),
    lambda count, own, g: (None, _joined(count, own, tuple(g))),
)


def ring_of(
    layout: Layout | None, config: ModelConfig, declared: Mapping[str, Parameter], dtype: Any,
    rows: int, length: int,
) -> WeightRing | None:
    """The ring of a layout for passes of so many rows of so many places; None where activations
    are summed: without a tensor axis, where it is long, where keys and values or the length do not
    divide over it, with stages, a split length, experts, or what needs a whole weight (DoRA), and
    where weights are more than what would be summed.
    """
    if layout is None or not 1 < (count := layout.ways("heads")) <= LONGEST:
        return None
    axes = layout.axes("heads")
    alike = layout.axes("kv_heads") == axes and layout.axes("mlp") == axes
    if not alike or length % count or layout.ways("length") > 1 or layout.ways("layers") > 1:
        return None
    if config.experts or (config.lora is not None and (config.lora.dora or config.lora.dropout)):
        return None
    # In elements that each device receives in a forward pass, over (count - 1) / count.
    tokens = rows * length / layout.ways("batch")
    summed = 2 * 2 * tokens * config.hidden_size
    weights = arithmetic.layer_parameters(config)
    exchanged = 2 * tokens * (config.heads + config.kv_heads) * config.head_dim / count
    return WeightRing(layout, declared, dtype) if weights + exchanged < summed else None
