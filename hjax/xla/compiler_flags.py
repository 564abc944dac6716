"""XLA compiler flags by platform, each with its predicted gain.

Gains are predicted from compiled programs (docs/performance.md says how), not measured in runs.
"""

import dataclasses
from typing import Any

from hjax.devices import device_of_kind

# TPUs whose SparseCores the compiler can offload collectives to (not a v4's; a v5e has none).
SPARSECORE_KINDS = ("v5p", "v6e", "tpu7x")


@dataclasses.dataclass(frozen=True)
class CompilerFlag:
    """A compiler flag.

    Attributes:
      value: that it is set to.
      gain: predicted with and without it.
      unless_heads_split: set only for layouts without a tensor axis.
      kinds: device kinds of ``hjax.devices`` that it is set for; (): all.
    """

    value: Any
    gain: str
    unless_heads_split: bool = False
    kinds: tuple[str, ...] = ()


COMPILER_FLAGS: dict[str, dict[str, CompilerFlag]] = {
    "tpu": {
        "xla_tpu_enable_windowed_einsum_for_all_gather": CompilerFlag(
            False,
            "products with all-gathered weights in one piece, not a device's part at a time, which "
            "reads and writes the activations once per part. Gradients are still computed and "
            "reduced part by part: an update of 64 rows of 8k tokens of Qwen2.5-1.5B on v5e:2x4, "
            "two micro-batches, 6.36 s -> 5.41 s; of what is received 14 % -> 12 % not overlapped. "
            "(Gradients in one piece too: 5.30 s, but 39 % not overlapped, .14 s instead of .05.) "
            "Layouts that split heads keep the compiler's default",
            unless_heads_split=True,
        ),
        "xla_tpu_enable_windowed_einsum_for_reduce_scatter": CompilerFlag(
            False,
            "gradients in one piece too, if SparseCores reduce them during other computation: "
            "Qwen3-4B, 128 rows of 2k tokens on v5p:2x2x2, 1.75 s -> 1.70 s",
            unless_heads_split=True,
            kinds=SPARSECORE_KINDS,
        ),
        "xla_tpu_enable_sparse_core_collective_offload_all_gather": CompilerFlag(
            True,
            "weights are gathered and gradients reduced asynchronously; otherwise the compiler "
            "waits for them. With the five flags that follow: Qwen3-4B as above, 1.84 s -> "
            "1.75 s; Qwen3-30B-A3B, 1024 rows of 2k tokens on v5p:4x4x4 over data 2 x fsdp 16 x "
            "expert 2, 2.36 s -> 1.81 s",
            kinds=SPARSECORE_KINDS,
        ),
        "xla_tpu_enable_sparse_core_collective_offload_reduce_scatter": CompilerFlag(
            True, "as for all-gathers: the same 2.36 s -> 1.81 s", kinds=SPARSECORE_KINDS
        ),
        "xla_tpu_enable_sparse_core_collective_offload_all_reduce": CompilerFlag(
            True, "sums over data: of Qwen3-30B-A3B's 1.88 s -> 1.87 s", kinds=SPARSECORE_KINDS
        ),
        "xla_tpu_enable_async_collective_fusion_fuse_all_gather": CompilerFlag(
            False, "with gathers on SparseCores: the same 2.36 s -> 1.81 s", kinds=SPARSECORE_KINDS
        ),
        "xla_tpu_enable_sparse_core_offload_queuing_in_lhs": CompilerFlag(
            True,
            "several offloads may be queued: of Qwen3-30B-A3B's 1.93 s -> 1.88 s",
            kinds=SPARSECORE_KINDS,
        ),
        "xla_tpu_enable_offloading_scatter_to_sparsecore": CompilerFlag(
            False,
            "small scatters (starts of experts' rows) occupied SparseCores just before weights had "
            "to be gathered: of Qwen3-30B-A3B's 1.87 s -> 1.81 s",
            kinds=SPARSECORE_KINDS,
        ),
    }
}


def compiler_options(
    platform: str, kind: str, heads_split: bool, sparsecore: bool = True
) -> dict[str, Any] | None:
    """``compiler_options`` for ``jax.jit``; None if there are none.

    Args:
      platform: of the devices, as JAX names it.
      kind: of one, as JAX names it.
      heads_split: whether a tensor axis splits the program's layers.
      sparsecore: whether collectives may run on SparseCores; else options that are set for kinds
        with SparseCores are left out.
    """
    device = device_of_kind(kind) if sparsecore else None
    return {
        name: option.value
        for name, option in COMPILER_FLAGS.get(platform, {}).items()
        if not (option.unless_heads_split and heads_split)
        and (not option.kinds or (device is not None and device.name in option.kinds))
    } or None
