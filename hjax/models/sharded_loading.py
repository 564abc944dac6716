"""Sharded loading: write tensors of a file, one at a time, into a parameter's device shards."""

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
    """The slice of a tensor's values that is in a region (shard), and its start index there."""

    region_slice: tuple[slice, ...]
    missing_dims: tuple[int, ...]  # dimensions of the parameter that the values lack
    start: tuple[int, ...]


def slice_in_region(at: tuple[Any, ...], region: Region) -> TensorSlice | None:
    """The slice of a parameter's values ``at`` that is in a region; None: they do not overlap."""
    region_slice, begins = [], []
    for index, (start, stop) in zip(at, region, strict=True):
        if isinstance(index, slice):
            region_slice.append(slice(start, stop))
            begins.append(0)
        elif start <= index < stop:
            begins.append(index - start)
        else:
            return None
    missing_dims = tuple(i for i, index in enumerate(at) if not isinstance(index, slice))
    return TensorSlice(tuple(region_slice), missing_dims, tuple(begins))


@functools.partial(jax.jit, donate_argnums=0, static_argnums=(3, 4))
def _write(
    x: jax.Array,
    piece: jax.Array,
    start: tuple[int, ...],
    missing_dims: tuple[int, ...],
    part: TensorPart | None,
) -> jax.Array:
    """Write values into ``x`` at ``start``, in place.

    Args:
      x: a device's shard of a parameter.
      piece: the values; if ``part`` is given, its tensor in stored dimensions.
      start, missing_dims: of the ``TensorSlice``.
      part: see ``piece``.
    """
    values = piece if part is None else part.read(piece)
    values = jnp.expand_dims(values, missing_dims)
    return jax.lax.dynamic_update_slice(x, values.astype(x.dtype), start)


class ParameterShards:
    """A parameter's shards on this process's devices, while tensors are written into them."""

    def __init__(self, parameter: ParameterSpec, sharding: Any, dtype: Any):
        self._shape, self._sharding = parameter.shape, sharding
        where = sharding.addressable_devices_indices_map(parameter.shape)
        self._regions = {d: region_of(index, parameter.shape) for d, index in where.items()}
        self._arrays = {
            device: jnp.full(extent(region), parameter.fill, dtype, device=device)
            for device, region in self._regions.items()
        }

    def slices(self, at: tuple[Any, ...]) -> dict[jax.Device, TensorSlice]:
        """The slices of the parameter's values ``at``, by device that holds some of them."""
        slices = {device: slice_in_region(at, region) for device, region in self._regions.items()}
        return {device: piece for device, piece in slices.items() if piece is not None}

    def write(
        self,
        values: np.ndarray,
        slices: Mapping[jax.Device, TensorSlice],
        part: TensorPart | None = None,
        tensor: np.ndarray | None = None,
    ) -> None:
        """Write values of the parameter into its shards.

        Args:
          values: without the dimensions that ``at`` indexes by a number.
          slices: of the values, by device.
          part, tensor: the tensor that the values are a view of, if any.
        """
        for device, target in slices.items():
            # Transpose a complete tensor on the device; on the host it would need a copy.
            own = values[target.region_slice]
            complete = tensor is not None and own.size == tensor.size
            piece = jax.device_put(tensor if complete else own, device, may_alias=False)
            stored_part = part.without_location if complete and part is not None else None
            old, start, missing = self._arrays[device], target.start, target.missing_dims
            written = _write(old, piece, start, missing, stored_part)
            self._arrays[device] = jax.block_until_ready(written)

    def array(self) -> jax.Array:
        """The parameter as one sharded array."""
        arrays = list(self._arrays.values())
        return jax.make_array_from_single_device_arrays(self._shape, self._sharding, arrays)
