"""Kernel registry: sets of kernels, and which set a platform runs."""

import dataclasses
from collections.abc import Callable

import jax

from hjax.errors import ConfigError
from hjax.kernels import backward, blockwise, cpu, cudnn, grouped_blocks, reference
from hjax.kernels.attention import Kernel
from hjax.kernels.verdict import ALL_FORMS, MEGABLOX, SPLASH

Tables = tuple[jax.Array, jax.Array]

REFERENCE, BACKWARD, CPU, TPU = "reference", "backward", "cpu", "tpu"
# Attention: the platform's default, blockwise, or cuDNN's.
AUTO, BLOCKS, CUDNN = "auto", "blocks", "cudnn"


@dataclasses.dataclass(frozen=True)
class KernelSet:
    """The kernels of a layer; ``hjax.kernels.reference`` documents what each computes.

    A new set starts from ``KernelSet()`` and replaces the kernels that it has faster.
    """

    product: Callable[[str, jax.Array, jax.Array], jax.Array] = reference.product
    gated_mlp: Callable[[jax.Array, jax.Array, jax.Array], jax.Array] = reference.gated_mlp
    rms_norm: Callable[[jax.Array, jax.Array, float], jax.Array] = reference.rms_norm
    rotary_tables: Callable[[jax.Array, jax.Array], Tables] = reference.rotary_tables
    rotate: Callable[[jax.Array, jax.Array, jax.Array], jax.Array] = reference.rotate
    argmax: Callable[[jax.Array], jax.Array] = reference.argmax
    grouped: Callable[..., jax.Array] = reference.grouped_product
    row_multiple: Callable[[int, jax.Array, float], int] = reference.row_multiple  # for grouped
    attention: Kernel | None = None  # of long sequences; None: dense, as for short ones
    few_passes: bool = False  # a pass over memory costs more than a product
    packs_share: bool = True  # attention takes prompts that occur once in a pack


def choose_kernel_set(platform: str, attention: str = AUTO) -> str:
    """The name of the kernel set for a platform (``cpu``, ``tpu``, ``gpu``, ...).

    Args:
      attention: as of ``model.attention``.

    Raises:
      ConfigError: the platform does not have this attention.
    """
    if attention == CUDNN:
        if platform not in cudnn.PLATFORMS:
            raise ConfigError(
                f"model.attention={CUDNN}: it is for NVIDIA GPUs, and these devices are {platform}"
            )
        return CUDNN
    if attention == BLOCKS and platform == TPU:
        raise ConfigError(f"model.attention={BLOCKS}: TPUs have a kernel of their own; use {AUTO}")
    return platform if platform in (CPU, TPU) else BACKWARD


def make_kernel_set(
    name: str,
    whole: bool = False,
    unrolled: bool = False,
    forms: frozenset[str] = ALL_FORMS,
) -> KernelSet:
    """The kernels of a set.

    Args:
      name: ``reference``, ``backward`` (custom backward passes, blockwise attention and grouped
        products), ``tpu`` (``backward`` with TPU kernels), ``cudnn`` (with cuDNN's attention) or
        ``cpu`` (with forms that XLA's CPU compiler makes fast).
      whole: each device holds the whole length and a layer's whole weights.
      unrolled: layers run in a Python loop, not in a scan.
      forms: that may be taken, see ``hjax.kernels.verdict``.

    Raises:
      ConfigError: another name.
    """
    written_out = KernelSet(
        product=backward.product,
        gated_mlp=backward.gated_mlp,
        rms_norm=backward.rms_norm,
        grouped=grouped_blocks.product,
        attention=blockwise.attend,
    )
    if name == REFERENCE:
        return KernelSet()
    if name == BACKWARD:
        return written_out
    if name == CUDNN:
        return dataclasses.replace(written_out, attention=cudnn.attend, packs_share=False)
    if name == TPU:
        # Imported here only, because Pallas takes long to import.
        from hjax.kernels import grouped_tpu, splash

        found = dataclasses.replace(written_out, rotate=backward.rotate, few_passes=True)
        if MEGABLOX in forms:
            found = dataclasses.replace(
                found, grouped=grouped_tpu.product, row_multiple=grouped_tpu.row_multiple
            )
        if SPLASH in forms:  # its segments cannot say that a response sees its prompt
            found = dataclasses.replace(found, attention=splash.attend, packs_share=False)
        return found
    if name != CPU:
        raise ConfigError(f"kernels {name!r}: {REFERENCE}, {BACKWARD}, {TPU}, {CUDNN} or {CPU}")
    if whole:
        products = dataclasses.replace(written_out, product=cpu.product, gated_mlp=cpu.gated_mlp)
    else:
        product = cpu.product_flat if unrolled else backward.product
        products = dataclasses.replace(written_out, product=product)
    tables = cpu.rotary_tables if unrolled else reference.rotary_tables
    return dataclasses.replace(products, rotary_tables=tables, rotate=cpu.rotate, argmax=cpu.argmax)
