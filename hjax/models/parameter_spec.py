"""A parameter, declared once.

Shape, logical axes, initial value, kind, and the tensors of a Hugging Face file that hold it. What
treats parameters differently (layouts, weight decay, dtypes, counts, loading and export) reads it
here, never from a parameter's name or shape.
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
    """What a parameter does.

    A leading ``layers`` axis changes nothing: the stacked biases of all layers are vectors.
    """

    MATRIX = "matrix"  # multiplies activations in a product
    EMBEDDING = "embedding"  # a row per token or position: input and output tables
    VECTOR = "vector"  # norm weights and biases
    HEAD = "head"  # one number per token
    ADAPTER = "adapter"  # a matrix's low-rank addition, see hjax.models.lora
    SCALE = "scale"  # of a matrix of one byte per element, see hjax.models.quantized

    @property
    def decayed(self) -> bool:
        """Whether weight decay pulls it towards 0."""
        return self not in (ParameterKind.VECTOR, ParameterKind.HEAD, ParameterKind.SCALE)

    @property
    def cast(self) -> bool:
        """Whether a forward reads it in its compute dtype, rather than in float32."""
        return self not in (ParameterKind.VECTOR, ParameterKind.HEAD, ParameterKind.SCALE)

    @property
    def beside_adapters(self) -> bool:
        """Whether it learns where a model has adapters; all others are frozen then."""
        return self in (ParameterKind.HEAD, ParameterKind.ADAPTER)


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """A tensor of a Hugging Face file that holds a parameter, or a part of one.

    Attributes:
      name: in the file; ``{layer}`` and ``{expert}`` stand for numbers from 0.
      form: the tensor's dimensions as logical axes of the parameter, those of one dimension in
        parentheses, major first: ``(heads head_dim) embed``. ``1`` is a dimension of size 1.
      pair: which half of the parameter's ``pair`` axis this is; None: ``form`` has that axis.
      part: (dimension, first, size) where several parameters lie in one tensor one after another:
        this one's begins at ``first`` of a dimension that has ``size`` in all.
      other: a name under which older files have it.
      stacked: of experts, the array of all of a layer that transformers has in memory; of their
        adapters, the one that they are of.
    """

    name: str
    form: str
    pair: int | None = None
    part: tuple[int, int, int] | None = None
    other: str = ""
    stacked: str = ""

    def groups(self) -> list[list[str]]:
        """The form, an entry per dimension: the axes joined in it."""
        found = re.findall(r"\(([^)]*)\)|(\S+)", self.form)
        return [(joined or one).split() if (joined or one) != "1" else [] for joined, one in found]


@dataclasses.dataclass(frozen=True)
class ParameterSpec:
    """One array of a model.

    Attributes:
      axes: size by logical axis, in the order of its dimensions.
      kind: what it does.
      scale: initial values are drawn from a truncated normal with this standard deviation; 0: all
        are ``fill``.
      fill: see ``scale``.
      stored: the tensors that hold it; empty: no file has it, and it is ``fill``.
      optional: files may lack it; it is ``fill`` then.
      inputs: of a matrix, the axes over which a product with it sums.
      dtype: in which it is made; another than float32 stays as it is in every compute dtype.
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
        """Whether it has one byte per element, and a scale beside it."""
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
        """The initial values, carrying this declaration.

        Args:
          key: PRNG key; read where ``scale`` is not 0.
        """
        value = jnp.full(self.shape, self.fill, self.dtype)
        if self.scale:
            assert key is not None
            drawn = jax.random.truncated_normal(key, -2.0, 2.0, self.shape, jnp.float32)
            value = self.scale * drawn
        return nnx.Param(value, declared=self)


def matrix(scale: float, inputs: str, /, **axes: int) -> ParameterSpec:
    """A matrix drawn with standard deviation ``scale``; size by logical axis.

    Args:
      scale: see above.
      inputs: the axes over which a product with it sums, such as ``heads head_dim``.
      axes: in their order.
    """
    return ParameterSpec(
        tuple(axes.items()), ParameterKind.MATRIX, scale, inputs=tuple(inputs.split())
    )


def table(scale: float, /, **axes: int) -> ParameterSpec:
    """An embedding drawn with standard deviation ``scale``; size by logical axis."""
    return ParameterSpec(tuple(axes.items()), ParameterKind.EMBEDDING, scale)


def vector(fill: float, /, **axes: int) -> ParameterSpec:
    """Norm weights and biases, all of them ``fill`` at first."""
    return ParameterSpec(tuple(axes.items()), ParameterKind.VECTOR, fill=fill)


def create_parameters(
    module: Any, declared: Mapping[str, ParameterSpec], draw: Callable[[], jax.Array]
) -> None:
    """Give a module its parameters as attributes; ``draw``: the next PRNG key."""
    for name, parameter in declared.items():
        setattr(module, name, parameter.create(draw() if parameter.scale else None))


@dataclasses.dataclass(frozen=True)
class TensorPart:
    """One tensor as a file holds it, and where its values lie in a parameter.

    Attributes:
      name, other, stacked: as of ``StoredTensor``, with numbers.
      shape: of the whole tensor.
      at: index into the parameter.
      part: as of ``StoredTensor``.
      inputs: of a matrix, the tensor's dimension over which a product sums; None of others.
    """

    name: str
    other: str
    shape: tuple[int, ...]
    at: tuple[Any, ...]
    part: tuple[int, int, int] | None
    inputs: int | None
    stacked: str
    _apart: tuple[int, ...]  # the part's dimensions, joined axes taken apart
    _order: tuple[int, ...]  # of those in the parameter

    @property
    def _own(self) -> tuple[slice, ...]:
        if self.part is None:
            return (slice(None),) * len(self.shape)
        dimension, first, _ = self.part
        sizes = self._joined
        return tuple(
            slice(first, first + sizes[i]) if i == dimension else slice(None)
            for i in range(len(self.shape))
        )

    @property
    def _joined(self) -> tuple[int, ...]:
        if self.part is None:
            return self.shape
        own = math.prod(self._apart) * self.part[2] // math.prod(self.shape)
        return tuple(own if i == self.part[0] else n for i, n in enumerate(self.shape))

    @property
    def turned(self) -> bool:
        """Whether a matrix is stored [inputs, outputs], not [outputs, inputs]."""
        return self.inputs == 0

    @property
    def formless(self) -> TensorPart:
        """The same under no name and in no place: equal for all layers."""
        return dataclasses.replace(self, name="", other="", stacked="", at=())

    def of(self, tensor: Any) -> Any:
        """The parameter's values ``at``, of a numpy array as a view where that can be."""
        return tensor[self._own].reshape(self._apart).transpose(self._order)

    def clear(self, tensor: np.ndarray) -> None:
        """Write zeros where ``into`` writes."""
        tensor[self._own] = 0

    def into(self, tensor: np.ndarray, values: np.ndarray) -> None:
        """Write what the parameter has ``at`` into the tensor; the inverse of ``of``."""
        back = np.argsort(self._order)
        tensor[self._own] = values.transpose(back).reshape(self._joined)


def parts(parameter: ParameterSpec) -> Iterator[TensorPart]:
    """Every tensor that holds a part of a parameter, in the order of its layers and experts."""
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
                _apart=apart,
                _order=order,
            )
