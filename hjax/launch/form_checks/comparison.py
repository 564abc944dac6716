"""Cases of a form, and how its values and gradients are compared with the plain form's."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# Largest error allowed of a value, and of an array's norm, relative to the largest value and to the
# norm of the float32 result. Accelerators round float32 products to fewer bits.
_TOLERANCES = {"bfloat16": (0.03, 0.02), "float32": (1e-3, 3e-4)}
_ROUNDED_FLOAT32 = (0.02, 0.01)
_DTYPES = ("bfloat16", "float32")


class Unsuited(Exception):
    """The form does not support this device or case; the message says why."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One comparison of a form with the plain one.

    Attributes:
      name: what is special about it.
      run: returns how the form differs; empty if it does not. Raises ``Unsuited``.
    """

    name: str
    run: Callable[[], str]


def dtypes_of_case(number: int) -> tuple[str, ...]:
    """The dtypes of a form's case: both on accelerators; on a CPU, where kernels are interpreted,
    one or the other in turn, since they differ only in rounding."""
    return (_DTYPES[number % 2],) if jax.default_backend() == "cpu" else _DTYPES


def tolerances(dtype: Any) -> tuple[float, float]:
    """Of a value and of a norm, see ``_TOLERANCES``."""
    name = jnp.dtype(dtype).name
    if name == "float32" and jax.default_backend() != "cpu":
        return _ROUNDED_FLOAT32
    return _TOLERANCES[name]


def find_difference(
    found: Mapping[str, Any], expected: Mapping[str, Any], dtype: Any, factor: float = 1.0
) -> str:
    """The first array that differs by more than rounding; empty if none does.

    Args:
      found, expected: arrays by name. All values found must be finite; where the expected one is
        NaN any finite value is allowed.
      dtype: that ``found`` was computed in.
      factor: by which the tolerances are multiplied, for several layers.
    """
    of_value, of_norm = (factor * x for x in tolerances(dtype))
    for name, exact in expected.items():
        one, exact = np.asarray(found[name], np.float64), np.asarray(exact, np.float64)
        if not np.isfinite(one).all():
            return f"{name}: {np.count_nonzero(~np.isfinite(one))} values are not finite"
        off = np.where(np.isnan(exact), 0.0, one - exact)
        exact = np.nan_to_num(exact)
        largest = float(np.max(np.abs(off))) / max(float(np.max(np.abs(exact))), 1e-30)
        norm = float(np.linalg.norm(off)) / max(float(np.linalg.norm(exact)), 1e-30)
        if largest > of_value or norm > of_norm:
            return f"{name} are off by {largest:.2g} of the largest, {norm:.2g} of the norm"
    return ""


def values_and_gradients(
    function: Callable[..., jax.Array],
    arrays: Sequence[jax.Array],
    names: Sequence[str],
    weight: Any,
) -> dict[str, np.ndarray]:
    """Values of a function, and gradients of their weighted sum.

    Args:
      function: of the arrays.
      arrays: its arguments.
      names: of the arguments.
      weight: of each value; those with weight 0 are undefined, but must be finite.
    """

    def loss(*arrays: jax.Array) -> Any:
        out = function(*arrays)
        return jnp.sum(out.astype(jnp.float32) * weight), out

    numbers = tuple(range(len(arrays)))
    (_, out), grads = jax.jit(jax.value_and_grad(loss, numbers, has_aux=True))(*arrays)
    named = {f"gradients of {name}": grad for name, grad in zip(names, grads, strict=True)}
    return {k: np.asarray(x, np.float32) for k, x in {"values": out, **named}.items()}


def compare_with_plain(
    form: Callable[..., jax.Array],
    plain: Callable[..., jax.Array],
    arrays: Sequence[Any],
    names: Sequence[str],
    weight: np.ndarray,
    dtype: Any,
) -> str:
    """How a form's values and gradients differ from the plain form's in float32; both get the same
    arrays, rounded to ``dtype``. Other arguments as of ``values_and_gradients``."""
    rounded = [jnp.asarray(x, dtype) for x in arrays]
    found = values_and_gradients(form, rounded, names, weight)
    with jax.default_matmul_precision("highest"):
        wide = [x.astype(jnp.float32) for x in rounded]
        expected = values_and_gradients(plain, wide, names, weight)
    expected["values"] = np.where(np.broadcast_to(weight, expected["values"].shape) == 0, np.nan,
                                  expected["values"])  # fmt: skip
    return find_difference(found, expected, dtype)
