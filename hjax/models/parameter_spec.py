"""``ParameterSpec``, the single declaration of a parameter.

It has shape, logical axes, initial value, kind, and the tensors of a Hugging Face file that hold
the parameter. Layouts, weight decay, dtypes, counts, loading and export depend on the spec, never
on a parameter's name or shape.
"""

from __future__ import annotations

import dataclasses
import enum
import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx


class ParameterKind(enum.StrEnum):
    """The role of a parameter; a stacked ``layers`` axis does not matter (biases are vectors)."""

    MATRIX = "matrix"  # multiplies activations in a product
    EMBEDDING = "embedding"  # a row per token or position: input and output tables
    VECTOR = "vector"  # norm weights and biases
    HEAD = "head"  # one number per token
    ADAPTER = "adapter"  # a matrix's low-rank addition, see hjax.models.lora
    SCALE = "scale"  # of a matrix of one byte per element, see hjax.models.quantized

    @property
    def decayed(self) -> bool:
        """Whether weight decay applies to it."""
        return self not in (ParameterKind.VECTOR, ParameterKind.HEAD, ParameterKind.SCALE)

    @property
    def cast(self) -> bool:
        """Whether a forward casts it to the compute dtype, rather than reading float32."""
        return self not in (ParameterKind.VECTOR, ParameterKind.HEAD, ParameterKind.SCALE)

    @property
    def trained_with_adapters(self) -> bool:
        """Whether it is trained if the model has adapters; all others are frozen then."""
        return self in (ParameterKind.HEAD, ParameterKind.ADAPTER)


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """A tensor of a Hugging Face file that holds a parameter, or a part of one.

    Attributes:
      name: in the file; ``{layer}`` and ``{expert}`` stand for numbers from 0.
      form: the tensor's dimensions as logical axes of the parameter; axes joined in one dimension
        are in parentheses, major first: ``(heads head_dim) embed``. ``1`` is a dimension of size 1.
      pair: which half of the parameter's ``pair`` axis this is; None: ``form`` has that axis.
      part: (dimension, first, size) if several parameters are concatenated in one tensor: this one
        begins at ``first`` of a dimension of total ``size``.
      other: an alternative name, in older files.
      stacked: for experts, transformers' array of all experts of a layer; for their adapters, the
        array that they adapt.
    """

    name: str
    form: str
    pair: int | None = None
    part: tuple[int, int, int] | None = None
    other: str = ""
    stacked: str = ""

    def groups(self) -> list[list[str]]:
        """The axes joined in each dimension of the form."""
        found = re.findall(r"\(([^)]*)\)|(\S+)", self.form)
        return [(joined or one).split() if (joined or one) != "1" else [] for joined, one in found]


@dataclasses.dataclass(frozen=True)
class ParameterSpec:
    """The declaration of one array of a model.

    Attributes:
      axes: (logical axis, size) of each dimension.
      kind: its role.
      scale: standard deviation of the truncated normal that initial values are drawn from; 0: all
        are ``fill``.
      fill: see ``scale``.
      stored: the tensors that hold it; empty: no file has it, and it is ``fill``.
      optional: files may lack it; it is ``fill`` then.
      inputs: of a matrix, the axes that a product with it sums over.
      dtype: of its values; other dtypes than float32 are never cast to the compute dtype.
    """

    axes: tuple[tuple[str, int], ...]
    kind: ParameterKind
    scale: float = 0.0
    fill: float = 0.0
    stored: tuple[StoredTensor, ...] = ()
    optional: bool = False
    inputs: tuple[str, ...] = ()
    dtype: str = "float32"

    @property
    def quantized(self) -> bool:
        """Whether it has one byte per element, and a scale parameter."""
        return self.dtype != "float32"

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of its dimensions."""
        return tuple(size for _, size in self.axes)

    @property
    def names(self) -> tuple[str, ...]:
        """Logical names of its dimensions."""
        return tuple(name for name, _ in self.axes)

    @property
    def size(self) -> int:
        """Its number of elements."""
        return math.prod(self.shape)

    def create(self, key: jax.Array | None = None) -> nnx.Param:
        """The initial values, with this spec as metadata.

        Args:
          key: PRNG key; used if ``scale`` is not 0.
        """
        value = jnp.full(self.shape, self.fill, self.dtype)
        if self.scale:
            assert key is not None
            drawn = jax.random.truncated_normal(key, -2.0, 2.0, self.shape, jnp.float32)
            value = self.scale * drawn
        return nnx.Param(value, declared=self)


def matrix(scale: float, inputs: str, /, **axes: int) -> ParameterSpec:
    """The spec of a matrix drawn with standard deviation ``scale``.

    Args:
      scale: see above.
      inputs: the axes that a product with it sums over, such as ``heads head_dim``.
      axes: size by logical axis, in order.
    """
    return ParameterSpec(
        tuple(axes.items()), ParameterKind.MATRIX, scale, inputs=tuple(inputs.split())
    )


def table(scale: float, /, **axes: int) -> ParameterSpec:
    """The spec of an embedding drawn with standard deviation ``scale``; size by logical axis."""
    return ParameterSpec(tuple(axes.items()), ParameterKind.EMBEDDING, scale)


def vector(fill: float, /, **axes: int) -> ParameterSpec:
    """The spec of norm weights or biases, initially ``fill``; size by logical axis."""
    return ParameterSpec(tuple(axes.items()), ParameterKind.VECTOR, fill=fill)


def create_parameters(
    module: Any, declared: Mapping[str, ParameterSpec], draw: Callable[[], jax.Array]
) -> None:
    """Create a module's parameters as attributes; ``draw`` returns the next PRNG key."""
    for name, parameter in declared.items():
        setattr(module, name, parameter.create(draw() if parameter.scale else None))


@dataclasses.dataclass(frozen=True)
class TensorPart:
    """One tensor of a file, and which part of a parameter it holds.

    Attributes:
      name, other, stacked: as of ``StoredTensor``, with layer and expert numbers.
      shape: of the whole tensor.
      at: index into the parameter.
      part: as of ``StoredTensor``.
      inputs: of a matrix, the tensor's dimension that a product sums over; None of others.
    """

    name: str
    other: str
    shape: tuple[int, ...]
    at: tuple[Any, ...]
    part: tuple[int, int, int] | None
    inputs: int | None
    stacked: str
    _split_shape: tuple[int, ...]  # the part's shape with joined axes split
    _order: tuple[int, ...]  # permutation from these to the parameter's dimensions

    @property
    def _region(self) -> tuple[slice, ...]:
        if self.part is None:
            return (slice(None),) * len(self.shape)
        dimension, first, _ = self.part
        sizes = self._joined_shape
        return tuple(
            slice(first, first + sizes[i]) if i == dimension else slice(None)
            for i in range(len(self.shape))
        )

    @property
    def _joined_shape(self) -> tuple[int, ...]:
        if self.part is None:
            return self.shape
        own = math.prod(self._split_shape) * self.part[2] // math.prod(self.shape)
        return tuple(own if i == self.part[0] else n for i, n in enumerate(self.shape))

    @property
    def inputs_first(self) -> bool:
        """Whether a matrix is stored [inputs, outputs], not [outputs, inputs]."""
        return self.inputs == 0

    @property
    def without_location(self) -> TensorPart:
        """The same without name and index, equal for all layers."""
        return dataclasses.replace(self, name="", other="", stacked="", at=())

    def read(self, tensor: Any) -> Any:
        """The parameter's values ``at`` from the tensor, a view of a numpy array if possible."""
        return tensor[self._region].reshape(self._split_shape).transpose(self._order)

    def clear(self, tensor: np.ndarray) -> None:
        """Write zeros where ``into`` writes."""
        tensor[self._region] = 0

    def write(self, tensor: np.ndarray, values: np.ndarray) -> np.ndarray:
        """Write the parameter's values ``at`` into the tensor, the inverse of ``read``; returns
        them as they stand there, infinite where its dtype has no such number."""
        turned = values.transpose(np.argsort(self._order)).reshape(self._joined_shape)
        with np.errstate(over="ignore"):
            tensor[self._region] = turned
        return tensor[self._region]


def parts(parameter: ParameterSpec) -> Iterator[TensorPart]:
    """Every tensor that holds a part of a parameter, ordered by layer and expert."""
    sizes = dict(parameter.axes)
    for stored in parameter.stored:
        counted = [a for a in ("layers", "experts") if f"{{{a[:-1]}}}" in stored.name]
        left = [a for a in parameter.names if a not in counted]
        if stored.pair is not None:
            left.remove("pair")
        groups = stored.groups()
        flat = [axis for group in groups for axis in group]
        if sorted(flat) != sorted(left):
            raise AssertionError(f"{stored.name}: {stored.form!r} of a parameter of {left}")
        shape = [math.prod(sizes[axis] for axis in group) for group in groups]
        if stored.part is not None:
            shape[stored.part[0]] = stored.part[2]
        apart = tuple(sizes[axis] for axis in flat)
        order = tuple(flat.index(axis) for axis in left)
        summed = (i for i, group in enumerate(groups) if set(group) & set(parameter.inputs))
        inputs = next(summed, None)
        for number in np.ndindex(*(sizes[axis] for axis in counted)):
            numbers = dict(zip((axis[:-1] for axis in counted), number))
            at = tuple(
                numbers[axis[:-1]] if axis in counted
                else stored.pair if axis == "pair" and stored.pair is not None
                else slice(None)
                for axis in parameter.names
            )  # fmt: skip
            name, other, stacked = (
                text.format(**numbers) for text in (stored.name, stored.other, stored.stacked)
            )
            yield TensorPart(
                name=name,
                other=other,
                shape=tuple(shape),
                at=at,
                part=stored.part,
                inputs=inputs,
                stacked=stacked,
                _split_shape=apart,
                _order=order,
            )
