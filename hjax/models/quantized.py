"""Weight quantization of frozen matrices: one byte per element, a scale per output channel.

With adapters a layer's matrices are frozen, so they can be stored as int8 or fp8 (e4m3fn;
Micikevicius et al. 2022, arXiv 2209.05433), as QLoRA does with four bits (Dettmers et al. 2023,
arXiv 2305.14314). The scale is an output's (each expert's own) largest magnitude over the format's
largest number; values are rounded to nearest even. Routers stay floats. Quantization is done in
numpy while weights are loaded: the base is the same on every device and layout, at every start.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from hjax.models.parameter_spec import ParameterKind, ParameterSpec

FLOAT, INT8, FP8 = "float", "int8", "fp8"
FORMATS = (INT8, FP8)
_DTYPES = {INT8: "int8", FP8: "float8_e4m3fn"}
_LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0}
_CHUNK = 2**22  # elements that are converted to float32 at a time


def quantized_parameters(specs: Mapping[str, ParameterSpec], form: str) -> dict[str, ParameterSpec]:
    """The specs of a layer's parameters with its matrices quantized.

    Args:
      specs: by name.
      form: one of ``FORMATS``.

    Returns:
      by name; ``<name>_scale`` is float32 [layers, (experts,) (halves,) outputs...].
    """
    declared: dict[str, ParameterSpec] = {}
    for name, parameter in specs.items():
        declared[name] = parameter
        if parameter.kind is ParameterKind.MATRIX and parameter.names[-1] != "experts":
            declared[name] = dataclasses.replace(parameter, scale=0.0, dtype=_DTYPES[form])
            outputs = tuple(axis for axis in parameter.axes if axis[0] not in parameter.inputs)
            declared[f"{name}_scale"] = ParameterSpec(outputs, ParameterKind.SCALE, fill=1.0)
    return declared


def input_dimensions(parameter: ParameterSpec) -> tuple[int, ...]:
    """The dimensions that products with a matrix sum over."""
    return tuple(parameter.names.index(axis) for axis in parameter.inputs)


def quantize(array: np.ndarray, dims: tuple[int, ...], dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """Quantize an array.

    Args:
      array: of any float dtype, finite.
      dims: the dimensions that share a scale.
      dtype: ``int8`` or ``float8_e4m3fn``.

    Returns:
      an array like ``array`` in that dtype, and float32 scales without ``dims``.
    """
    largest: Any = 0.0
    for rows in _rows(array):
        chunk_max = np.abs(array[rows].astype(np.float32)).max(axis=dims, keepdims=True)
        if 0 in dims:
            largest = np.maximum(largest, chunk_max)
        else:
            largest = chunk_max if rows.start == 0 else np.concatenate([largest, chunk_max])
    # Above 0 even if a channel is all zeros.
    scale = np.maximum(largest / np.float32(_LARGEST[dtype]), np.finfo(np.float32).tiny)
    rounded = np.empty(array.shape, jnp.dtype(dtype))
    for rows in _rows(array):
        exact = array[rows].astype(np.float32) / (scale if 0 in dims else scale[rows])
        rounded[rows] = np.rint(exact) if dtype == INT8 else exact
    return rounded, scale.squeeze(dims)


def _rows(values: np.ndarray) -> Iterator[slice]:
    step = max(1, _CHUNK * len(values) // max(values.size, 1))
    return (slice(i, i + step) for i in range(0, len(values), step))


def quantize_params(params: Mapping[str, Any], declared: Mapping[str, Any]) -> dict[str, Any]:
    """Quantize the parameters that are declared as quantized.

    Args:
      params: nested dict of numpy arrays.
      declared: nested dict of ``ParameterSpec``.
    """
    made: dict[str, Any] = {}
    for name, parameter in declared.items():
        if not isinstance(parameter, ParameterSpec):
            made[name] = quantize_params(params[name], parameter)
        elif parameter.quantized:
            scale_dims = input_dimensions(parameter)
            made[name], made[f"{name}_scale"] = quantize(params[name], scale_dims, parameter.dtype)
        elif parameter.kind is not ParameterKind.SCALE:
            made[name] = params[name]
    return made


def dequantize(weight: Any, scale: Any, parameter: ParameterSpec) -> Any:
    """Dequantize to float32; numpy arrays or jax.Array.

    Args:
      weight, scale: values of the matrix and its scale.
      parameter: the matrix's spec.
    """
    xp = weight.__array_namespace__()
    return weight.astype(np.float32) * xp.expand_dims(scale, input_dimensions(parameter))
