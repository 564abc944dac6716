"""Sets of kernels, and which of them a platform runs."""

import dataclasses
from collections.abc import Callable

import jax

from hjax.errors import ConfigError
from hjax.kernels import backward, blockwise, cpu, cudnn, grouped_blocks, reference
from hjax.kernels.attention import Kernel

Tables = tuple[jax.Array, jax.Array]

REFERENCE, BACKWARD, CPU, TPU = "reference", "backward", "cpu", "tpu"
# Of attention: the platform's, hjax's own by blocks, or cuDNN's. Once it is known that ``auto`` may
# be cuDNN's: that, where it is found to compute what it should.
AUTO, BLOCKS, CUDNN = "auto", "blocks", "cudnn"
TRIED = "cudnn, tried"


@dataclasses.dataclass(frozen=True)
class KernelSet:
    """The functions that a layer is made of; ``hjax.kernels.reference`` says what each computes.

    A new set starts from ``KernelSet()`` and replaces what it has better.
    """

    product: Callable[[str, jax.Array, jax.Array], jax.Array] = reference.product
    gated_mlp: Callable[[jax.Array, jax.Array, jax.Array], jax.Array] = reference.gated_mlp
    rms_norm: Callable[[jax.Array, jax.Array, float], jax.Array] = reference.rms_norm
    rotary_tables: Callable[[jax.Array, jax.Array], Tables] = reference.rotary_tables
    rotate: Callable[[jax.Array, jax.Array, jax.Array], jax.Array] = reference.rotate
    largest: Callable[[jax.Array], jax.Array] = reference.largest
    grouped: Callable[..., jax.Array] = reference.grouped
    multiple: Callable[[int, jax.Array, float], int] = reference.multiple  # of ``grouped``'s rows
    attention: Kernel | None = None  # of long sequences; None: as of short ones, in one piece
    few_passes: bool = False  # what passes through memory once more costs more than a product
    packs_share: bool = True  # whether it knows prompts that stand once in a pack


def choose(platform: str, attention: str = AUTO) -> str:
    """The name of the set that devices of a platform (``cpu``, ``tpu``, ``gpu``, ...) run.

    Args:
      attention: as of ``model.attention``.

    Raises:
      ConfigError: attention that the platform does not have.
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


def kernels_of(name: str, whole: bool = False, unrolled: bool = False) -> KernelSet:
    """The functions of a set.

    Args:
      name: ``reference``, ``backward`` (written-out backward passes, long attention and grouped
        products by blocks), ``tpu`` (those with a TPU's kernels), ``cudnn`` (those with cuDNN's
        attention) or ``cpu`` (those, and what XLA's CPU compiler needs to be told another way).
      whole: each device is known to hold the whole length and a layer's whole weights.
      unrolled: layers run in a Python loop, not in a scan.

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
        # Pallas takes long to import, and only here it runs.
        from hjax.kernels import grouped_tpu, splash

        return dataclasses.replace(
            written_out,
            rotate=backward.rotate,
            few_passes=True,
            grouped=grouped_tpu.product,
            multiple=grouped_tpu.multiple,
            attention=splash.attend,
            packs_share=False,  # its segments are equal or not: not a response's and its prompt's
        )
    if name != CPU:
        raise ConfigError(f"kernels {name!r}: {REFERENCE}, {BACKWARD}, {TPU}, {CUDNN} or {CPU}")
    if whole:
        products = dataclasses.replace(written_out, product=cpu.product, gated_mlp=cpu.gated_mlp)
    else:
        product = cpu.product_joined if unrolled else backward.product
        products = dataclasses.replace(written_out, product=product)
    tables = cpu.rotary_tables if unrolled else reference.rotary_tables
    return dataclasses.replace(
        products, rotary_tables=tables, rotate=cpu.rotate, largest=cpu.largest
    )
