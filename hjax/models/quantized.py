"""Frozen matrices in one byte per element, with a scale per output channel (of experts, each one's
own); routers stay floats.

Beside adapters a layer's matrices do not learn, so they can be kept as int8 or fp8 (e4m3fn;
Micikevicius et al. 2022, arXiv 2209.05433), as QLoRA does with four bits (Dettmers et al. 2023,
arXiv 2305.14314): an output's weights are divided by their largest magnitude over the format's
largest number, and rounded to nearest even. That is done in numpy as weights are read, so a base is
the same on every device and layout, and at every start.
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
_CHUNK = 2**22  # elements that are float32 at a time


def quantized_parameters(
    layers: Mapping[str, ParameterSpec], form: str
) -> dict[str, ParameterSpec]:
    """A layer's parameters, its matrices in one byte per element.

    Args:
      layers: by name.
      form: one of ``FORMATS``.

    Returns:
      by name; ``<name>_scale``, float32, has the matrix's outputs: [layers, (experts,) (halves,)
      outputs...].
    """
    declared: dict[str, ParameterSpec] = {}
    for name, parameter in layers.items():
        declared[name] = parameter
        if parameter.kind is ParameterKind.MATRIX and parameter.names[-1] != "experts":
            declared[name] = dataclasses.replace(parameter, scale=0.0, dtype=_DTYPES[form])
            outputs = tuple(axis for axis in parameter.axes if axis[0] not in parameter.inputs)
            declared[f"{name}_scale"] = ParameterSpec(outputs, ParameterKind.SCALE, fill=1.0)
    return declared


def input_dimensions(parameter: ParameterSpec) -> tuple[int, ...]:
    """The dimensions over which products with a matrix sum."""
    return tuple(parameter.names.index(axis) for axis in parameter.inputs)


def quantize(
    values: np.ndarray, over: tuple[int, ...], dtype: str
) -> tuple[np.ndarray, np.ndarray]:
    """Numbers of one byte, and by what to multiply them.

    Args:
      values: of any float dtype, finite.
      over: the dimensions that share a scale.
      dtype: ``int8`` or ``float8_e4m3fn``.

    Returns:
      an array like ``values`` in that dtype, and float32 without the dimensions ``over``.
    """
    largest: Any = 0.0
    for rows in _rows(values):
        most = np.abs(values[rows].astype(np.float32)).max(axis=over, keepdims=True)
        if 0 in over:
            largest = np.maximum(largest, most)
        else:
            largest = most if rows.start == 0 else np.concatenate([largest, most])
    # Above zero also where a channel has nothing, or next to nothing.
    scale = np.maximum(largest / np.float32(_LARGEST[dtype]), np.finfo(np.float32).tiny)
    small = np.empty(values.shape, jnp.dtype(dtype))
    for rows in _rows(values):
        exact = values[rows].astype(np.float32) / (scale if 0 in over else scale[rows])
        small[rows] = np.rint(exact) if dtype == INT8 else exact
    return small, scale.squeeze(over)


def _rows(values: np.ndarray) -> Iterator[slice]:
    step = max(1, _CHUNK * len(values) // max(values.size, 1))
    return (slice(i, i + step) for i in range(0, len(values), step))


def quantize_params(params: Mapping[str, Any], declared: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters as they are declared, of those of a model without quantized matrices.

    Args:
      params: nested dict of numpy arrays.
      declared: nested dict of ``ParameterSpec``.
    """
    made: dict[str, Any] = {}
    for name, parameter in declared.items():
        if not isinstance(parameter, ParameterSpec):
            made[name] = quantize_params(params[name], parameter)
        elif parameter.quantized:
            over = input_dimensions(parameter)
            made[name], made[f"{name}_scale"] = quantize(params[name], over, parameter.dtype)
        elif parameter.kind is not ParameterKind.SCALE:
            made[name] = params[name]
    return made


def dequantize(weight: Any, scale: Any, parameter: ParameterSpec) -> Any:
    """float32, what the numbers of one byte stand for; numpy arrays or jax.Array.

    Args:
      weight, scale: of the parameter and its scale.
      parameter: the matrix's declaration.
    """
    xp = weight.__array_namespace__()
    return weight.astype(np.float32) * xp.expand_dims(scale, input_dimensions(parameter))
