"""Matrix products in a compiled program: how many operations an instruction makes."""

from __future__ import annotations

import json
import math
import re

from hjax.xla.flops import scope_cost
from hjax.xla.hlo import Computation, Instruction, array_shapes


def _ints(text: str) -> list[int]:
    return [int(n) for n in re.findall(r"-?\d+", text)]


def _listed(attributes: str, name: str) -> list[int]:
    found = re.search(rf"\b{name}=\{{([\d,]*)\}}", attributes)
    return _ints(found[1]) if found else []


def dot_flops(computation: Computation, dot: Instruction) -> float:
    """Of a ``dot``, two for each element of the result and each index summed over."""
    left = array_shapes(computation.instructions[dot.operands[0]].shape)[0]
    contracted = [left.sizes[i] for i in _listed(dot.attributes, "lhs_contracting_dims")]
    return 2.0 * array_shapes(dot.shape)[0].elements * math.prod(contracted)


def convolution_flops(computation: Computation, convolution: Instruction) -> float:
    """Multiplications and additions of a convolution, those with padding and holes left out.

    A TPU's matrix products are convolutions, whose windows slide over dimensions that they join.
    """
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", convolution.attributes)
    if labels is None:
        return 0.0
    left, right = (
        array_shapes(computation.instructions[name].shape)[0] for name in convolution.operands[:2]
    )
    out = array_shapes(convolution.shape)[0]
    lhs, rhs, result = labels.groups()
    batch, features = out.sizes[result.index("b")], out.sizes[result.index("f")]
    contracted = right.sizes[rhs.index("i")]
    window = _window(convolution.attributes)
    count = 2.0 * batch * features * contracted
    groups = convolution.number("batch_group_count") or 1
    for i in range(sum(label.isdigit() for label in result)):
        label = str(i)
        count *= _pairs(
            left.sizes[lhs.index(label)],
            right.sizes[rhs.index(label)],
            out.sizes[result.index(label)],
            window.get("stride", [])[i : i + 1] or [1],
            window.get("pad", [])[i : i + 1] or [0],
            window.get("lhs_dilate", [])[i : i + 1] or [1],
            window.get("rhs_dilate", [])[i : i + 1] or [1],
        )
    return count / groups if groups > 1 else count


def _window(attributes: str) -> dict[str, list[int]]:
    """A convolution's window by field, of ``pad`` what comes before."""
    found = re.search(r"window=\{([^}]*)\}", attributes)
    fields: dict[str, list[int]] = {}
    for name, value in re.findall(r"(\w+)=([-\dx_]+)", found[1] if found else ""):
        fields[name] = [int(part.split("_")[0]) for part in value.split("x")]
    return fields


def _pairs(
    size: int,
    taps: int,
    places: int,
    stride: list[int],
    before: list[int],
    spread: list[int],
    gaps: list[int],
) -> int:
    """(place, tap) pairs of one dimension that meet an element of the input."""
    count, reach = 0, (size - 1) * spread[0] + 1
    for tap in range(taps):
        for place in range(places):
            at = place * stride[0] + tap * gaps[0] - before[0]
            count += 0 <= at < reach and at % spread[0] == 0
    return count


def kernel_flops(computation: Computation, call: Instruction) -> tuple[float, bool]:
    """Products of a kernel, and whether that is known: a library's by its shapes, a written one's
    by what it, or a scope around it, says of it."""
    target = re.search(r'custom_call_target="([^"]*)"', call.attributes)
    name = target[1] if target else ""
    if "gemm" in name or "matmul" in name:
        left = array_shapes(computation.instructions[call.operands[0]].shape)[0]
        dims = re.search(r'"lhs_contracting_dimensions":\[([^\]]*)\]', call.attributes)
        contracted = [left.sizes[i] for i in _ints(dims[1])] if dims else []
        return 2.0 * array_shapes(call.shape)[0].elements * math.prod(contracted), bool(dims)
    told = scope_cost(call.attributes)
    if told is not None:
        return told[0], True
    if estimate := _estimate(call):
        return estimate.get("flops", 0.0), True
    written = name in ("tpu_custom_call", "mosaic_gpu") or "triton" in name or "cudnn" in name
    return 0.0, not written


def kernel_bytes(call: Instruction) -> float | None:
    """To and from main memory, of a written kernel that says so, or of which a scope says that it
    reads a part of its arguments: it may also write its results into them. None: nobody says."""
    if "part-cost:" in call.attributes and (told := scope_cost(call.attributes)):
        return told[1]
    return _estimate(call).get("bytes_accessed") or None


def _estimate(call: Instruction) -> dict[str, float]:
    """What a written kernel says of itself; empty: nothing."""
    found = re.search(r'"cost_estimate":(\{[^{}]*\})', call.attributes)
    told = json.loads(found[1]) if found else {}
    return {name: float(value) for name, value in told.items()}
