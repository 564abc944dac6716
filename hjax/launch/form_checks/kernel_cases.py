"""Cases of the kernels of one device: attention, grouped products, decoding.

Where a kernel's own device is not at hand it is interpreted.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hjax.errors import ConfigError
from hjax.kernels import (
    attention,
    blockwise,
    cudnn,
    decode,
    grouped_blocks,
    int8_cache,
    reference,
)
from hjax.kernels.attention import MaskSpec, ScoreOptions
from hjax.kernels.decode import CacheMask
from hjax.kernels.int8_cache import QuantizedCache
from hjax.launch.form_checks.comparison import (
    Case,
    Unsuited,
    compare_with_plain,
    dtypes_of_case,
    find_difference,
)


@dataclasses.dataclass(frozen=True)
class AttentionSizes:
    """Sizes of a case of attention: a prompt and ``count`` responses that share it, or one sequence
    of the prompt's length.

    Attributes:
      padded: how many tokens of padding stand before the first row and after the second.
      packs: starts of the sequences of a pack; empty: no pack.
    """

    prompt: int
    response: int = 0
    count: int = 0
    window: int = 0
    softcap: float = 0.0
    sinks: bool = False
    padded: int = 0
    packs: tuple[int, ...] = ()
    heads: int = 4
    kv_heads: int = 2
    dim: int = 64

    @property
    def length(self) -> int:
        """Tokens of a row."""
        return self.prompt + self.response * self.count

    @property
    def mask_spec(self) -> MaskSpec:
        """The static mask."""
        if self.packs:
            return MaskSpec(packed=True)
        return MaskSpec(self.prompt, self.response) if self.count else MaskSpec()

    def segments(self) -> np.ndarray:
        """int32 [2, length]: segment numbers, 0 at padding."""
        marks = np.ones((2, self.length), np.int32)
        if self.packs:
            marks[:] = np.searchsorted(self.packs, np.arange(self.length), side="right") + 1
        marks[0, : self.padded] = 0
        if not self.count and self.padded:
            marks[1, -self.padded :] = 0
        return marks


ATTENTION = {
    "one sequence of an odd length": AttentionSizes(397),
    "padding on either side": AttentionSizes(300, padded=70, kv_heads=1),
    "a window": AttentionSizes(300, window=100, padded=33),
    "a shared prompt": AttentionSizes(130, 93, 2, padded=40),
}
PACKS = {
    "a pack": AttentionSizes(300, packs=(90, 91, 205), padded=20),
    "capped scores and sinks": AttentionSizes(300, softcap=3.0, sinks=True, window=150, heads=6),
}
WIDE_HEADS = {"heads of 256": AttentionSizes(300, padded=70, dim=256)}


def attention_cases(
    kernel: Any, sizes: dict[str, AttentionSizes], dtypes: tuple[str, ...] = ()
) -> list[Case]:
    """Cases of an attention kernel, ``hjax.kernels.attention.Kernel``; without ``dtypes`` in those
    of ``dtypes_of_case``."""
    return [
        Case(f"{name}, {dtype}", functools.partial(_attention_difference, kernel, each, dtype))
        for number, (name, each) in enumerate(sizes.items())
        for dtype in dtypes or dtypes_of_case(number)
    ]


def _attention_difference(kernel: Any, sizes: AttentionSizes, dtype: str) -> str:
    draw = np.random.default_rng(sizes.length)
    shape = 2, sizes.length
    marks = sizes.segments()
    q, k, v, weight = (
        draw.normal(size=(*shape, heads, sizes.dim))
        for heads in (sizes.heads, sizes.kv_heads, sizes.kv_heads, sizes.heads)
    )
    weight *= (marks > 0)[:, :, None, None]
    scoring = ScoreOptions(window=sizes.window, softcap=sizes.softcap)
    sinks = jnp.asarray(draw.normal(size=sizes.heads), jnp.float32) if sizes.sinks else None
    segments, mask_spec = jnp.asarray(marks), sizes.mask_spec

    def form(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return attention.attend(kernel, q, k, v, segments, sinks, scoring, mask_spec)

    def plain(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return attention.reference(q, k, v, segments, sinks, scoring, mask_spec)

    names = ("queries", "keys", "values")
    return compare_with_plain(form, plain, (q, k, v), names, weight, dtype)


def by_cudnn(*arguments: Any, **options: Any) -> jax.Array:
    """cuDNN's attention on a GPU."""
    if jax.default_backend() != "gpu":
        raise Unsuited("it is for NVIDIA GPUs")
    try:
        return cudnn.attend(*arguments, **options)
    except ConfigError as error:
        raise Unsuited(str(error)) from error


def by_splash(*arguments: Any, **options: Any) -> jax.Array:
    """JAX's splash attention, interpreted where there is no TPU."""
    from hjax.kernels import splash

    attend = functools.partial(splash.attend, interpret=jax.default_backend() != "tpu")
    return attend(*arguments, **options)


ROWS_OF_GROUPS = {
    "rows after the groups": ((3, 70, 55), 140),
    "empty groups, one with all": ((0, 200, 0), 200),
}


def grouped_cases(product: Any) -> list[Case]:
    """Cases of a product of groups of rows, ``hjax.kernels.reference.grouped_product``."""
    return [
        Case(f"{name}, {dtype}", functools.partial(_grouped_difference, product, *sizes, dtype))
        for number, (name, sizes) in enumerate(ROWS_OF_GROUPS.items())
        for dtype in dtypes_of_case(number)
    ]


def _grouped_difference(product: Any, sizes: tuple[int, ...], count: int, dtype: str) -> str:
    draw, used = np.random.default_rng(count), sum(sizes)
    rows, groups = draw.normal(size=(used, 64)), jnp.asarray(sizes, jnp.int32)
    weights, weight = draw.normal(size=(len(sizes), 64, 136)), draw.normal(size=(used, 136))

    def by(product: Any) -> Callable[..., jax.Array]:
        def run(rows: jax.Array, weights: jax.Array) -> jax.Array:
            # Rows after the groups, and their gradients, are undefined.
            rows = jnp.pad(rows, ((0, count - used), (0, 0)))
            return product(rows, weights, groups)[:used]

        return run

    plain, names = by(reference.grouped_product), ("rows", "weights")
    return compare_with_plain(by(product), plain, (rows, weights), names, weight, dtype)


def by_megablox(*arguments: Any) -> jax.Array:
    """JAX's megablox kernels, interpreted where there is no TPU."""
    from hjax.kernels import grouped_tpu

    product = functools.partial(grouped_tpu.product, interpret=jax.default_backend() != "tpu")
    return product(*arguments)


def grouped_by_blocks(*arguments: Any) -> jax.Array:
    """The products by blocks of rows."""
    return grouped_blocks.product(*arguments)


@dataclasses.dataclass(frozen=True)
class DecodeSizes:
    """Sizes of a case of decoding; ``int8``: keys and values in a byte."""

    groups: int = 3
    kv_heads: int = 2
    samples: int = 2
    per_kv: int = 3
    dim: int = 64
    prompt: int = 33
    length: int = 70
    window: int = 0
    softcap: float = 0.0
    sinks: bool = False
    int8: bool = False


DECODING = {
    "odd sizes": DecodeSizes(),
    "a window into the prompt, a row alone": DecodeSizes(samples=1, window=41, dim=128),
    "capped scores and sinks": DecodeSizes(softcap=2.0, sinks=True, per_kv=1),
    "an int8 cache": DecodeSizes(int8=True, dim=128),
    "several blocks": DecodeSizes(groups=4, prompt=600, length=300, kv_heads=1, window=200),
}
# A form's step: (q, new k, new v, caches of one layer, seen, scoring, sinks) -> output.
DecodeStep = Callable[..., jax.Array]


def decode_cases(step: DecodeStep) -> list[Case]:
    """Cases of one token per row over a prompt that samples share and the row's own cache."""
    return [
        Case(f"{name}, {dtype}", functools.partial(_decode_difference, step, sizes, dtype))
        for number, (name, sizes) in enumerate(DECODING.items())
        for dtype in dtypes_of_case(number)
    ]


def _decode_difference(step: DecodeStep, sizes: DecodeSizes, dtype: str) -> str:
    s, draw = sizes, np.random.default_rng(sizes.prompt)
    kept = "int8" if s.int8 else dtype
    prompt = decode.cache_capacity(decode.TPU_KERNEL, s.prompt, decode.PROMPT_BLOCK, kept)
    length = decode.cache_capacity(decode.TPU_KERNEL, s.length, decode.OWN_BLOCK, kept)
    rows, of_token = (s.groups, s.kv_heads, s.samples), (s.groups, s.kv_heads)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(draw.normal(size=shape), dtype)

    q, k, v = normal(*rows, s.per_kv, s.dim), normal(*rows, s.dim), normal(*rows, s.dim)
    caches = [normal(*of_token, prompt, s.dim) for _ in "kv"]
    caches += [normal(*rows, length, s.dim) for _ in "kv"]
    ends = np.sort(draw.integers(0, s.prompt + 1, (s.groups, 2)), axis=1)
    ends[0] = s.prompt // 2  # an empty prompt
    position = draw.integers(0, s.length, (s.groups, s.samples))
    position[0, 0], position[-1, -1] = 0, -1  # a first token, and a row without a sequence
    seen = CacheMask(*(jnp.asarray(x, jnp.int32) for x in (ends[:, 0], ends[:, 1], position)))
    scoring = ScoreOptions(window=s.window, softcap=s.softcap)
    heads = s.kv_heads * s.per_kv
    sinks = jnp.asarray(draw.normal(size=heads), jnp.float32) if s.sinks else None
    held: list[Any] = list(caches)
    if s.int8:
        held = [_quantized(x) for x in caches]
        caches = [x.dequantized(jnp.float32) for x in held]
    run = jax.jit(lambda q, k, v, held: step(q, k, v, held, seen, scoring, sinks))
    found = {"values": run(q, k, v, held)}
    wide = [x.astype(jnp.float32) for x in (q, k, v, *caches)]
    if s.int8:  # the new token's keys and values are rounded too
        new = (_quantized(x[..., None, :]).dequantized(jnp.float32) for x in wide[1:3])
        wide[1:3] = [x[..., 0, :] for x in new]
    with jax.default_matmul_precision("highest"):
        plain = jax.jit(lambda q, k, v, *held: decode_plainly(q, k, v, held, seen, scoring, sinks))
        expected = {"values": plain(*wide)}
    return find_difference(found, expected, dtype)


def _quantized(x: jax.Array) -> QuantizedCache:
    numbers, scale = int8_cache.quantize(x)
    return QuantizedCache(numbers, scale.swapaxes(-1, -2))


def _written(held: Any, new: jax.Array, position: jax.Array) -> Any:
    """A row's own keys or values with its new token, quantized if ``held`` is."""
    if not isinstance(held, QuantizedCache):
        return decode.write_token(held, new, position)
    made = _quantized(new[..., None, :])
    numbers = decode.write_token(held.numbers, made.numbers[..., 0, :], position)
    scale = decode.write_token(held.scale.swapaxes(-1, -2), made.scale[..., 0, :], position)
    return QuantizedCache(numbers, scale.swapaxes(-1, -2))


def decode_plainly(
    q: jax.Array, k: jax.Array, v: jax.Array, held: Any, seen: CacheMask, scoring: Any, sinks: Any
) -> jax.Array:
    """A step by XLA's products over the cache."""
    prompt_k, prompt_v, own_k, own_v = held
    own_k, own_v = (_written(x, new, seen.position) for x, new in ((own_k, k), (own_v, v)))
    return decode.attend(q, prompt_k, prompt_v, own_k, own_v, seen, scoring, sinks)


def decode_by_tpu_kernel(
    q: jax.Array, k: jax.Array, v: jax.Array, held: Any, seen: CacheMask, scoring: Any, sinks: Any
) -> jax.Array:
    """A step by ``decode_tpu``, interpreted where there is no TPU, as layer 1 of two."""
    from hjax.kernels import decode_tpu

    prompt_k, prompt_v, own_k, own_v = jax.tree.map(
        lambda x: jnp.stack([jnp.zeros_like(x), x]), list(held)
    )
    out, _, _ = decode_tpu.decode(
        q, k, v, prompt_k, prompt_v, own_k, own_v, layer=jnp.asarray(1, jnp.int32), seen=seen,
        scoring=scoring, sinks=sinks, interpret=jax.default_backend() != "tpu",
    )  # fmt: skip
    return out


def decode_by_gpu_kernel(
    q: jax.Array, k: jax.Array, v: jax.Array, held: Any, seen: CacheMask, scoring: Any, sinks: Any
) -> jax.Array:
    """A step whose own tokens ``decode_gpu`` attends to, interpreted where there is no GPU."""
    prompt_k, prompt_v, own_k, own_v = held
    own_k, own_v = (_written(x, new, seen.position) for x, new in ((own_k, k), (own_v, v)))
    return attend_by_gpu_kernel(q, [prompt_k, prompt_v, own_k, own_v], seen, scoring, sinks)


def attend_by_gpu_kernel(
    q: jax.Array, held: Any, seen: CacheMask, scoring: Any = ScoreOptions(), sinks: Any = None
) -> jax.Array:
    """The same, with the new token in ``held`` already."""
    from hjax.kernels import decode_gpu

    prompt_k, prompt_v, own_k, own_v = held
    last = jnp.maximum(seen.position, 0)
    scaled = (q * scoring.query_scale(q.shape[-1]))[..., None, :].astype(q.dtype)
    partial = decode_gpu.attend_own(
        scaled, own_k, own_v, jnp.zeros_like(last), last, scoring,
        interpret=jax.default_backend() != "gpu",
    )  # fmt: skip
    return decode.attend(
        q, prompt_k, prompt_v, own_k, own_v, seen, scoring, sinks, own_partial=partial
    )


def by_blocks(*arguments: Any, **options: Any) -> jax.Array:
    """Attention by blocks of queries and keys."""
    return blockwise.attend(*arguments, **options)
