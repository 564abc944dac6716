"""FLOPs of a program, counted on its jaxpr before it is compiled.

XLA's ``cost_analysis`` counts a loop's body once and does not see inside some kernels. The jaxpr
has every product with its shape and every scan with its length. A product of an [m, k] by a [k, n]
matrix is 2 m n k operations.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from hjax.xla.hlo import expected_trips

# One operation per element of the result. Comparisons, selections and casts are not counted.
_PER_RESULT = frozenset(
    """abs acos acosh add add_any asin asinh atan atan2 atanh cbrt ceil clamp cos cosh digamma div
    erf erf_inv erfc exp exp2 expm1 floor integer_pow is_finite lgamma log log1p logistic max min
    mul neg nextafter pow rem round rsqrt sign sin sinh sqrt square sub tan tanh""".split()
)
# One operation per element of the operand.
_PER_OPERAND = frozenset(
    """argmax argmin cumlogsumexp cummax cummin cumprod cumsum reduce_max reduce_min reduce_prod
    reduce_sum reduce_window_max reduce_window_sum""".split()
)


@dataclasses.dataclass(frozen=True)
class Flops:
    """Operations of a program over all devices together.

    Attributes:
      products: of matrix products and convolutions, a multiplication and an addition each.
      elementwise: one per element of other floating-point arithmetic and of reductions.
      open_loops: while loops with an unknown number of trips, counted with ``loop_trips``.
    """

    products: float = 0.0
    elementwise: float = 0.0
    open_loops: int = 0

    @property
    def total(self) -> float:
        """Products and elementwise operations."""
        return self.products + self.elementwise

    def __add__(self, other: Flops) -> Flops:
        return Flops(
            self.products + other.products,
            self.elementwise + other.elementwise,
            self.open_loops + other.open_loops,
        )

    def times(self, count: float) -> Flops:
        """FLOPs of ``count`` runs."""
        return Flops(self.products * count, self.elementwise * count, self.open_loops)


def count_flops(jaxpr: Any, loop_trips: int | None = None, path: str = "") -> Flops:
    """Operations of a jaxpr, over all devices together.

    A scan counts times its length, a conditional its most expensive branch, ``shard_map`` its body
    once per device of its manual axes. Divided by the number of devices this is a device's share of
    evenly split work; work that devices repeat (whole KV heads, norms under tensor parallelism) is
    not included.

    Args:
      jaxpr: a (closed) jaxpr, such as ``jax.jit(f).trace(...).jaxpr``.
      loop_trips: trips of while loops whose count is in neither the jaxpr nor a scope
        (``hjax.xla.hlo.expected_trips``).
      path: of the scopes around it, which may give a kernel's cost.

    Raises:
      ValueError: a while loop with products in it, and no ``loop_trips``.
    """
    total = Flops()
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        total += _equation(equation, loop_trips, f"{path}/{equation.source_info.name_stack}")
    return total


def _equation(equation: Any, loop_trips: int | None, path: str) -> Flops:
    name, params = equation.primitive.name, equation.params
    if name in _SPECIAL:
        return _SPECIAL[name](equation, loop_trips, path)
    inner = _inner(params)
    if inner:
        return sum((count_flops(jaxpr, loop_trips, path) for jaxpr in inner), Flops())
    if name in _PER_RESULT and _floating(equation.outvars[0]):
        return Flops(elementwise=math.prod(equation.outvars[0].aval.shape))
    if name in _PER_OPERAND and _floating(equation.invars[0]):
        return Flops(elementwise=math.prod(equation.invars[0].aval.shape))
    return Flops()


def _inner(params: dict[str, Any]) -> list[Any]:
    """The jaxprs that an equation runs, as of jit, remat and custom_vjp.

    (The backward pass of a custom VJP is a function, not a jaxpr, until it is differentiated.)
    """
    return [value for value in params.values() if hasattr(getattr(value, "jaxpr", value), "eqns")]


def _floating(variable: Any) -> bool:
    return jnp.issubdtype(variable.aval.dtype, jnp.inexact)


def _dot(equation: Any, loop_trips: int | None, path: str) -> Flops:
    (contracting, _), _ = equation.params["dimension_numbers"]
    left, out = equation.invars[0].aval, equation.outvars[0].aval
    return Flops(2.0 * math.prod(out.shape) * math.prod(left.shape[i] for i in contracting))


def _convolution(equation: Any, loop_trips: int | None, path: str) -> Flops:
    kernel, out = equation.invars[1].aval, equation.outvars[0].aval
    outputs = kernel.shape[equation.params["dimension_numbers"].rhs_spec[0]]
    return Flops(2.0 * math.prod(out.shape) * math.prod(kernel.shape) / outputs)


def _ragged_dot(equation: Any, loop_trips: int | None, path: str) -> Flops:
    """Each row of the left operand is multiplied by the matrix of its own group only."""
    numbers = equation.params["ragged_dot_dimension_numbers"]
    (_, contracting), (_, batch) = numbers.dot_dimension_numbers
    left, right = equation.invars[0].aval, equation.invars[1].aval
    skipped = {*contracting, *batch, *numbers.rhs_group_dimensions}
    columns = math.prod(n for i, n in enumerate(right.shape) if i not in skipped)
    return Flops(2.0 * math.prod(left.shape) * columns)


def _scan(equation: Any, loop_trips: int | None, path: str) -> Flops:
    return count_flops(equation.params["jaxpr"], loop_trips, path).times(equation.params["length"])


def _while(equation: Any, loop_trips: int | None, path: str) -> Flops:
    body = count_flops(equation.params["body_jaxpr"], loop_trips, path)
    body += count_flops(equation.params["cond_jaxpr"], loop_trips, path)
    trips = expected_trips(path)
    if trips is not None:
        return body.times(trips)
    if loop_trips is None:
        if body.products:
            raise ValueError("a while loop has matrix products; give loop_trips, its trips")
        return dataclasses.replace(body, open_loops=body.open_loops + 1)
    return dataclasses.replace(body.times(loop_trips), open_loops=body.open_loops + 1)


def _cond(equation: Any, loop_trips: int | None, path: str) -> Flops:
    branches = (count_flops(branch, loop_trips, path) for branch in equation.params["branches"])
    return max(branches, key=lambda flops: flops.total, default=Flops())


def _shard_map(equation: Any, loop_trips: int | None, path: str) -> Flops:
    params = equation.params
    devices = math.prod(params["mesh"].shape[axis] for axis in params["newly_manual_axes"])
    return count_flops(params["jaxpr"], loop_trips, path).times(devices)


def _pallas(equation: Any, loop_trips: int | None, path: str) -> Flops:
    """The cost that a scope or the kernel gives; else that of its body at each grid point."""
    cost = scope_cost(path)
    if cost is not None:
        return Flops(cost[0])
    estimate = equation.params["cost_estimate"]
    if estimate is not None and estimate.flops:
        return Flops(float(estimate.flops), float(estimate.transcendentals))
    return count_flops(equation.params["jaxpr"], loop_trips, path).times(
        math.prod(equation.params["grid_mapping"].grid)
    )


_SPECIAL: dict[str, Callable[[Any, int | None, str], Flops]] = {
    "dot_general": _dot,
    "conv_general_dilated": _convolution,
    "ragged_dot_general": _ragged_dot,
    "scan": _scan,
    "while": _while,
    "cond": _cond,
    "shard_map": _shard_map,
    "pallas_call": _pallas,
}


def scope_cost(path: str) -> tuple[float, float] | None:
    """FLOPs of products, and bytes to and from memory, that a scope gives for a kernel in it.

    Args:
      path: of scopes and the kernel's name, such as an instruction's ``op_name``; a scope is
        ``cost:NAME=FLOPS,BYTES:...`` or ``part-cost:...`` (``hjax.kernels.attention.cost_label``),
        by part of a name.

    Returns:
      None if no scope names it.
    """
    number = r"[\d.]+e[+-]\d+"
    scopes = list(re.finditer(rf"cost:((?:\w+={number},{number}:?)+)", path))
    if not scopes:
        return None
    inside = path[scopes[-1].end() :]
    for name, flops, moved in re.findall(rf"(\w+)=({number}),({number})", scopes[-1][1]):
        if name in inside:
            return float(flops), float(moved)
    return None
