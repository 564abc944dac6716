"""The cases of every form, by its name."""

from collections.abc import Callable

from hjax.kernels.verdict import (
    COLLECTIVE_MATMUL,
    CUDNN_ATTENTION,
    CUDNN_WIDE_HEADS,
    EXPERT_RING,
    GPU_DECODING,
    MEGABLOX,
    SPARSECORE,
    SPLASH,
    TPU_DECODING,
)
from hjax.launch.form_checks import exchange_cases as exchange
from hjax.launch.form_checks import kernel_cases as kernels
from hjax.launch.form_checks.comparison import Case

# Forms that every platform computes through XLA alone, and that nothing can stand in for.
BLOCKS, GROUPED_BLOCKS = "attention by blocks", "experts' products by blocks"
XLA_DECODING, TRANSITION = "decode by XLA", "transition between layouts"

_MASKS = kernels.ATTENTION | kernels.PACKS
CASES: dict[str, Callable[[], list[Case]]] = {
    BLOCKS: lambda: kernels.attention_cases(kernels.by_blocks, _MASKS),
    GROUPED_BLOCKS: lambda: kernels.grouped_cases(kernels.grouped_by_blocks),
    XLA_DECODING: lambda: kernels.decode_cases(kernels.decode_plainly),
    TRANSITION: exchange.transition_cases,
    SPLASH: lambda: kernels.attention_cases(kernels.by_splash, _MASKS),
    MEGABLOX: lambda: kernels.grouped_cases(kernels.by_megablox),
    SPARSECORE: exchange.sparsecore_cases,
    TPU_DECODING: lambda: kernels.decode_cases(kernels.decode_by_tpu_kernel),
    COLLECTIVE_MATMUL: exchange.collective_matmul_cases,
    EXPERT_RING: exchange.expert_ring_cases,
    CUDNN_ATTENTION: lambda: kernels.attention_cases(
        kernels.by_cudnn, kernels.ATTENTION, ("bfloat16",)
    ),
    CUDNN_WIDE_HEADS: lambda: kernels.attention_cases(
        kernels.by_cudnn, kernels.WIDE_HEADS, ("bfloat16",)
    ),
    GPU_DECODING: lambda: kernels.decode_cases(kernels.decode_by_gpu_kernel),
}
