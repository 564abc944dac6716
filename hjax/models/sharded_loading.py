"""A parameter on its devices while its tensors are written into it, one after another."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hjax.models.parameter_spec import ParameterSpec, TensorPart
from hjax.sharded_values import Region, extent, region_of


@dataclasses.dataclass(frozen=True)
class TensorSlice:
    """Of a part what lies in a region of its parameter, and where it begins there."""

    of: tuple[slice, ...]
    lacks: tuple[int, ...]  # dimensions of the parameter that the part's values do not have
    start: tuple[int, ...]


def slice_in_region(at: tuple[Any, ...], region: Region) -> TensorSlice | None:
    """Of the values of a parameter ``at`` what lies in a region of it; None: nothing does."""
    of, begins = [], []
    for index, (start, stop) in zip(at, region, strict=True):
        if isinstance(index, slice):
            of.append(slice(start, stop))
            begins.append(0)
        elif start <= index < stop:
            begins.append(index - start)
        else:
            return None
    lacks = tuple(i for i, index in enumerate(at) if not isinstance(index, slice))
    return TensorSlice(tuple(of), lacks, tuple(begins))


@functools.partial(jax.jit, donate_argnums=0, static_argnums=(3, 4))
def _write(
    x: jax.Array,
    piece: jax.Array,
    start: tuple[int, ...],
    lacks: tuple[int, ...],
    part: TensorPart | None,
) -> jax.Array:
    """``x`` with a piece at ``start``, in the same memory.

    Args:
      x: a device's part of a parameter.
      piece: values without some of the parameter's dimensions; where ``part`` is given its tensor
        as it is stored.
      start, lacks: of the ``TensorSlice``.
      part: see ``piece``.
    """
    values = piece if part is None else part.of(piece)
    values = jnp.expand_dims(values, lacks)
    return jax.lax.dynamic_update_slice(x, values.astype(x.dtype), start)


class ParameterShards:
    """The parts that this process's devices have of a parameter, while tensors are written into
    them."""

    def __init__(self, parameter: ParameterSpec, sharding: Any, dtype: Any):
        self._shape, self._sharding = parameter.shape, sharding
        where = sharding.addressable_devices_indices_map(parameter.shape)
        self._regions = {d: region_of(index, parameter.shape) for d, index in where.items()}
        self._arrays = {
            device: jnp.full(extent(region), parameter.fill, dtype, device=device)
            for device, region in self._regions.items()
        }

    def cuts(self, at: tuple[Any, ...]) -> dict[jax.Device, TensorSlice]:
        """By device that has some of the parameter's values ``at``, which of them."""
        cuts = {device: slice_in_region(at, region) for device, region in self._regions.items()}
        return {device: cut for device, cut in cuts.items() if cut is not None}

    def write(
        self,
        values: np.ndarray,
        cuts: Mapping[jax.Device, TensorSlice],
        part: TensorPart | None = None,
        tensor: np.ndarray | None = None,
    ) -> None:
        """Write values of the parameter where they belong.

        Args:
          values: without dimensions of which they are at one index.
          cuts: of them.
          part, tensor: those that the values are a view of, if they are one.
        """
        for device, cut in cuts.items():
            # A whole tensor is turned there: here that would take as much memory again.
            own = values[cut.of]
            whole = tensor is not None and own.size == tensor.size
            piece = jax.device_put(tensor if whole else own, device, may_alias=False)
            how = part.formless if whole and part is not None else None
            written = _write(self._arrays[device], piece, cut.start, cut.lacks, how)
            self._arrays[device] = jax.block_until_ready(written)

    def whole(self) -> jax.Array:
        """The parameter, laid out."""
        arrays = list(self._arrays.values())
        return jax.make_array_from_single_device_arrays(self._shape, self._sharding, arrays)
