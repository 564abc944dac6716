"""What compilers are told beyond the program, in one table: by platform, each with what it gained.

Gains are of predictions from the compiled programs (docs/performance.md says how), not of runs.
"""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Option:
    """One of a compiler's options.

    Attributes:
      value: that it is given.
      gain: what was measured with and without it.
      unless_heads_split: only for layouts without a tensor axis.
    """

    value: Any
    gain: str
    unless_heads_split: bool = False


OPTIONS: dict[str, dict[str, Option]] = {
    "tpu": {
        "xla_tpu_enable_windowed_einsum_for_all_gather": Option(
            False,
            "products of gathered weights in one piece instead of a device's part at a time, which "
            "reads and writes the activations once per part; gradients are still made and summed "
            "part by part: an update of 64 rows of 8k tokens of Qwen2.5-1.5B on v5e:2x4, two "
            "micro-batches, 6.36 s -> 5.41 s, of what is received 14 % -> 12 % waited for. "
            "(Neither by parts: 5.30 s, but 39 % waited for, .14 s instead of .05.) Layouts that "
            "split heads keep the compiler's own way",
            unless_heads_split=True,
        ),
    },
}


def compiler_options(platform: str, heads_split: bool) -> dict[str, Any] | None:
    """For ``jax.jit``; None: nothing.

    Args:
      platform: of the devices, as JAX names it.
      heads_split: whether a tensor axis splits the program's layers.
    """
    found = {
        name: option.value
        for name, option in OPTIONS.get(platform, {}).items()
        if not (option.unless_heads_split and heads_split)
    }
    return found or None
