"""What compilers are told beyond the program, in one table: by platform, each with what it gained.

Gains are of predictions from the compiled programs (docs/performance.md says how), not of runs.
"""

import dataclasses
from typing import Any

from hjax.devices import device_of_kind

# By whose SparseCores this compiler lets collectives be sent and summed (it does not on a v4; a
# v5e has none).
OFFLOADING = ("v5p", "v6e", "tpu7x")


@dataclasses.dataclass(frozen=True)
class CompilerFlag:
    """One of a compiler's options.

    Attributes:
      value: that it is given.
      gain: what was measured with and without it.
      unless_heads_split: only for layouts without a tensor axis.
      kinds: of ``hjax.devices``, which alone are given it; (): all.
    """

    value: Any
    gain: str
    unless_heads_split: bool = False
    kinds: tuple[str, ...] = ()


OPTIONS: dict[str, dict[str, CompilerFlag]] = {
    "tpu": {
        "xla_tpu_enable_windowed_einsum_for_all_gather": CompilerFlag(
            False,
            "products of gathered weights in one piece instead of a device's part at a time, which "
            "reads and writes the activations once per part; gradients are still made and summed "
            "part by part: an update of 64 rows of 8k tokens of Qwen2.5-1.5B on v5e:2x4, two "
            "micro-batches, 6.36 s -> 5.41 s, of what is received 14 % -> 12 % waited for. "
            "(Neither by parts: 5.30 s, but 39 % waited for, .14 s instead of .05.) Layouts that "
            "split heads keep the compiler's own way",
            unless_heads_split=True,
        ),
        "xla_tpu_enable_windowed_einsum_for_reduce_scatter": CompilerFlag(
            False,
            "gradients made in one piece too, where SparseCores sum them while others are made: "
            "Qwen3-4B, 128 rows of 2k tokens on v5p:2x2x2, 1.75 s -> 1.70 s",
            unless_heads_split=True,
            kinds=OFFLOADING,
        ),
        "xla_tpu_enable_sparse_core_collective_offload_all_gather": CompilerFlag(
            True,
            "weights arrive and gradients are summed beside other work, which the compiler waits "
            "for otherwise. With the five options that follow: Qwen3-4B as above, 1.84 s -> "
            "1.75 s; Qwen3-30B-A3B, 1024 rows of 2k tokens on v5p:4x4x4 over data 2 x fsdp 16 x "
            "expert 2, 2.36 s -> 1.81 s",
            kinds=OFFLOADING,
        ),
        "xla_tpu_enable_sparse_core_collective_offload_reduce_scatter": CompilerFlag(
            True, "as of gathers: the same 2.36 s -> 1.81 s", kinds=OFFLOADING
        ),
        "xla_tpu_enable_sparse_core_collective_offload_all_reduce": CompilerFlag(
            True, "sums over data: of Qwen3-30B-A3B's 1.88 s -> 1.87 s", kinds=OFFLOADING
        ),
        "xla_tpu_enable_async_collective_fusion_fuse_all_gather": CompilerFlag(
            False, "goes with gathers on SparseCores: the same 2.36 s -> 1.81 s", kinds=OFFLOADING
        ),
        "xla_tpu_enable_sparse_core_offload_queuing_in_lhs": CompilerFlag(
            True,
            "several may be under way, one after another: of Qwen3-30B-A3B's 1.93 s -> 1.88 s",
            kinds=OFFLOADING,
        ),
        "xla_tpu_enable_offloading_scatter_to_sparsecore": CompilerFlag(
            False,
            "small scatters (where an expert's rows begin) took SparseCores just before weights "
            "had to start: of Qwen3-30B-A3B's 1.87 s -> 1.81 s",
            kinds=OFFLOADING,
        ),
    },
}


def compiler_options(platform: str, kind: str, heads_split: bool) -> dict[str, Any] | None:
    """For ``jax.jit``; None: nothing.

    Args:
      platform: of the devices, as JAX names it.
      kind: of one, as JAX names it.
      heads_split: whether a tensor axis splits the program's layers.
    """
    device = device_of_kind(kind)
    found = {
        name: option.value
        for name, option in OPTIONS.get(platform, {}).items()
        if not (option.unless_heads_split and heads_split)
        and (not option.kinds or (device is not None and device.name in option.kinds))
    }
    return found or None
