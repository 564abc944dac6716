"""The row of the paper's Table 2 for more devices than can be simulated: counted, not compiled.

Layouts on a mesh of numbers are enough for the moves, and the moves for their bytes; of the ways
that hjax does not take itself there are the paper's formulas alone.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np

from hjax.dryrun.transition_cost import model_leaves
from hjax.dryrun.transition_groups import Table2Case, table2
from hjax.errors import ConfigError
from hjax.models.config import ModelConfig
from hjax.sharding.buckets import Leaf, plan_leaf
from hjax.sharding.layout import RoleLayouts, fitted, make_layouts


def describe_counted(
    case: Table2Case, method: str, model: ModelConfig, name: str, dtype: str = "float32"
) -> dict[str, Any]:
    """What ``transition_cost.describe`` says, as far as it follows from layouts.

    Returns:
      ``measured`` is None where the method is not hjax's own; else its ``communication`` is that of
      the planned moves and ``peak`` what stands when all have arrived. There are no groups.

    Raises:
      ConfigError: sizes that do not divide the parameters', by name.
    """
    sizes = {"pipe": case.pipe, "tensor": case.tensor, "data": case.data}
    generate = {"pipe": case.generate_pipe, "tensor": case.generate_tensor}
    layouts = make_layouts(case.devices, sizes, generate)
    leaves = model_leaves(model)
    lengths = {axis: n for axes, x in leaves.values() for axis, n in zip(axes, x.shape)}
    lengths = {axis: n for axis, n in lengths.items() if layouts.train.rules[axis]}
    layouts = RoleLayouts(
        fitted(layouts.train, lengths, "--train"),
        fitted(layouts.generate, lengths, "--generate"),
    )
    cast = np.dtype(jax.dtypes.canonicalize_dtype(dtype))
    counted: list[Leaf] = []
    others: dict[str, int] = {}
    for leaf, (axes, x) in leaves.items():
        before, after = (way.sharding(*axes) for way in (layouts.train, layouts.generate))
        planned = plan_leaf(leaf, x.shape, np.dtype(x.dtype), cast, before, after)
        whole = math.prod(x.shape) * np.dtype(x.dtype).itemsize
        if whole == planned.source_bytes * case.shards:
            counted.append(planned)
        else:
            others[leaf] = whole
    if not counted:
        raise ConfigError(f"no parameter of this model divides over {case.shards} training shards")
    total = sum(leaf.source_bytes for leaf in counted) * case.shards
    measured = None
    if method == "hybridflow":
        measured = {
            "communication": sum(leaf.received_bytes or 0 for leaf in counted) / total,
            "peak": sum(leaf.target_bytes for leaf in counted) / total,
            "redundancy": 0.0,
        }
    narrow = cast.itemsize / np.dtype("float32").itemsize
    return {
        "model": name,
        "method": method,
        "dtype": dtype,
        "train": [case.pipe, case.tensor, case.data],
        "generate": [case.generate_pipe, case.generate_tensor],
        "devices": case.devices,
        "model_bytes": total,
        "analytic": {key: value * narrow for key, value in table2(case, method).items()},
        "measured": measured,
        "compiled": False,
        "executed": False,
        "unsharded": others,
    }
