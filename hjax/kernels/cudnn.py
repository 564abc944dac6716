"""Attention on NVIDIA GPUs: cuDNN's kernel, told what our rows look like.

A library's kernel (``jax.nn.dot_product_attention(implementation="cudnn")``), which knows causal
order, windows and a length for each row. Padding on the left is turned to the end and back; a
prompt shared by several responses stands before each of them, here alone: all else of a layer still
runs on one copy of it.

Before it is used without being asked for it is compared with the plain form on the devices at hand
(``trusted``): the library, its version and the GPU are not ours.
"""

import dataclasses
import functools
import logging
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hjax.errors import ConfigError
from hjax.kernels.attention import (
    Kernel,
    MaskSpec,
    PackedPrompts,
    ScoreOptions,
    cost_label,
    reference,
)
from hjax.kernels.kernel_sharding import Axes

HEAD_DIM = 256  # elements; on GPUs older than Hopper 128
PLATFORMS = ("gpu", "cuda")
DTYPES = (jnp.bfloat16, jnp.float16)
_TILE = 128  # places of a block of scores, for the account of products
ASKED = "model.attention=cudnn"


def refusal(dtype: Any, head_dim: int, softcap: float = 0.0, sinks: bool = False) -> str:
    """Why cuDNN's attention does not take such layers; empty: it does.

    Args:
      dtype: of queries, keys and values.
      head_dim: elements of each.
      softcap: of scores; 0: they are not capped.
      sinks: whether heads have them.
    """
    if jnp.dtype(dtype) not in [jnp.dtype(x) for x in DTYPES]:
        return f"it computes in bfloat16 or float16, not in {jnp.dtype(dtype).name}"
    if head_dim % 8 or head_dim > HEAD_DIM:
        return f"heads have a multiple of 8 elements, at most {HEAD_DIM}, not {head_dim}"
    if softcap:
        return "it does not cap scores"
    return "it has no sinks" if sinks else ""


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: jax.Array | None,
    sinks: jax.Array | None,
    scoring: ScoreOptions,
    sight: MaskSpec,
    axes: Axes = (),
    around: int = 1,
    gather: bool = False,
    implementation: str = "cudnn",
    shared: PackedPrompts | None = None,
) -> jax.Array:
    """``hjax.kernels.attention.attend`` of what one device holds.

    A row's tokens stand together: padding is before and behind them. Results on padding are 0.

    Args:
      around: devices over which the length is split: 1.
      implementation: of ``jax.nn.dot_product_attention``; ``xla`` for tests without a GPU, which
        takes the same masks, every dtype and size of heads, and holds scores [length, length].

    Raises:
      ConfigError: what cuDNN cannot compute, or does not find, when traced.
    """
    batch, length, heads, dim = q.shape
    # XLA's takes every dtype and size of heads.
    real = implementation == "cudnn"
    dtype, size = (q.dtype, dim) if real else (DTYPES[0], 8)
    reason = refusal(dtype, size, scoring.softcap, sinks is not None)
    if around > 1:
        reason = "it does not split a row's length over devices"
    if sight.packed or shared is not None:
        reason = "it has no mask of several sequences in a row"
    if reason:
        raise ConfigError(f"{ASKED}: {reason}")
    window = (sight.window - 1, 0) if 0 < sight.window < length else None
    run = functools.partial(_rows, scoring.factor(dim), window, implementation)
    count = (length - sight.prompt) // sight.response if sight.response else 1
    if count == 1:
        return run(q, k, v, segments)
    cut = functools.partial(_apart, sight.prompt, count)
    out = run(cut(q), cut(k), cut(v), None if segments is None else cut(segments))
    out = out.reshape(batch, count, -1, heads, dim)
    prompt, own = out[:, 0, : sight.prompt], out[:, :, sight.prompt :]
    return jnp.concatenate([prompt, own.reshape(batch, -1, heads, dim)], axis=1)


def _apart(prompt: int, count: int, x: jax.Array) -> jax.Array:
    """[batch, prompt + count * length, ...] -> [batch * count, prompt + length, ...]."""
    batch, total, *rest = x.shape
    first, own = jax.lax.split(x, [prompt, total - prompt], axis=1)
    first = jnp.broadcast_to(first[:, None], (batch, count, prompt, *rest))
    own = own.reshape(batch, count, -1, *rest)
    return jnp.concatenate([first, own], axis=2).reshape(batch * count, -1, *rest)


def _rows(
    scale: float,
    window: tuple[int, int] | None,
    implementation: Any,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: jax.Array | None,
) -> jax.Array:
    """Each row one sequence; ``segments``: 0 at padding."""
    batch, length, heads, dim = q.shape
    lengths = first = count = None
    if segments is not None:
        real = segments != 0
        first = jnp.argmax(real, axis=1).astype(jnp.int32)
        count = jnp.sum(real, axis=1, dtype=jnp.int32)
        q, k, v = (_moved(x, 1, first, count) for x in (q, k, v))
        lengths = jnp.maximum(count, 1)  # of no token: a softmax over one that is 0
    reach = 0 if window is None else window[0] + 1
    with jax.named_scope(_costs(batch * heads, length, dim, reach)):
        try:
            out = jax.nn.dot_product_attention(
                q,
                k,
                v,
                scale=scale,
                is_causal=True,
                query_seq_lengths=lengths,
                key_value_seq_lengths=lengths,
                local_window_size=window,
                implementation=implementation,
            )
        except (NotImplementedError, RuntimeError) as error:  # of this GPU, or no cuDNN
            raise ConfigError(f"{ASKED}: {' '.join(str(error).split())}") from error
    return out if segments is None else _moved(out, -1, first, count)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _moved(x: jax.Array, way: int, first: jax.Array, count: jax.Array) -> jax.Array:
    """Each row's tokens of x [batch, length, ...] to its beginning (way 1), or from there back to
    where they stood (-1); elsewhere 0. Gradients go the other way, by the same gather.

    Args:
      first: int32 [batch], place of the first token.
      count: int32 [batch], how many there are.
    """
    place = jnp.arange(x.shape[1], dtype=jnp.int32)
    start = 0 * first if way > 0 else first
    own = (place >= start[:, None]) & (place < (start + count)[:, None])
    source = (place + way * first[:, None]) % x.shape[1]
    more = (1,) * (x.ndim - 2)
    taken = jnp.take_along_axis(x, source.reshape(*source.shape, *more), 1, mode="clip")
    return jnp.where(own.reshape(*own.shape, *more), taken, 0)


_moved.defvjp(
    lambda x, way, first, count: (_moved(x, way, first, count), (first, count)),
    lambda way, span, d_out: (_moved(d_out, -way, span[0], span[1]), None, None),
)


@functools.lru_cache(maxsize=64)
def _costs(rows: int, length: int, dim: int, window: int) -> str:
    """What the kernels do, which they do not say: products of blocks of which something is seen (2
    forward, 5 backward), queries, outputs and what comes back of them, read and written once."""
    short = -length % _TILE
    pairs = len(MaskSpec(window=window).blocks(length + short, _TILE))
    product = 2.0 * rows * pairs * _TILE**2 * dim
    moved = 2.0 * rows * length * dim
    return cost_label(
        (("attention_fwd", 2 * product, 4 * moved), ("attention_bwd", 5 * product, 8 * moved))
    )


_logger = logging.getLogger(__name__)
# What is compared: places of a prompt, of a response, and how many; tokens of a window.
_CASES = ((640, 0, 0, 0), (200, 220, 2, 0), (640, 0, 0, 100))
# Of the largest value, from the plain form in float32: what bfloat16's rounding leaves of it.
_FAR = 0.03


def trusted(devices: Iterable[Any]) -> bool:
    """Whether these devices may have it without being told to.

    The first one that is here is asked once: values and gradients of small cases against the plain
    form. Devices that are not here, of which programs are only compiled, may.
    """
    here = jax.local_devices()
    device = next((device for device in devices if device in here), None)
    return device is None or _agrees(device)


@functools.cache
def _agrees(device: Any) -> bool:
    try:
        reason = disagreement(attend, device)
    except Exception as error:  # whatever a library that is not as it should be does
        reason = f"it failed: {' '.join(str(error).split())}"
    if reason:
        _logger.warning(
            "cuDNN's attention is not used on %s: %s. Attention is computed by blocks, which is "
            "slower; %s uses it all the same",
            device.device_kind, reason, ASKED,
        )  # fmt: skip
    return not reason


def disagreement(kernel: Kernel, device: Any) -> str:
    """In which case a kernel computes something else than the plain form; empty: in none.

    Args:
      kernel: as ``attend``, of bfloat16.
      device: that computes.
    """
    with jax.default_device(device):
        for case in _CASES:
            if reason := _off(kernel, *case):
                return reason
    return ""


def _off(kernel: Kernel, prompt: int, response: int, count: int, window: int) -> str:
    """What of a case is off; empty: nothing."""
    length = prompt + response * count
    # Rows that begin late, that end early, and a whole one.
    marks = np.ones((3, length), np.int32)
    marks[0, :70] = 0
    if not count:
        marks[1, -90:] = 0
    draw = np.random.default_rng(length)
    q, k, v, weight = (draw.normal(size=(3, length, heads, 64)) for heads in (4, 2, 2, 4))
    weight *= marks[:, :, None, None]
    scoring, segments = ScoreOptions(window=window), jnp.asarray(marks)
    sight = MaskSpec(prompt, response) if count else MaskSpec()
    placed = dataclasses.replace(sight, window=window)

    def run(of: Callable[..., jax.Array], dtype: Any, *rest: Any) -> list[np.ndarray]:
        def loss(*arrays: jax.Array) -> Any:
            out = of(*arrays, segments, None, scoring, *rest).astype(jnp.float32) * weight
            return jnp.sum(out), out

        # The same numbers, whatever they are computed in.
        arrays = [jnp.asarray(x, jnp.bfloat16).astype(dtype) for x in (q, k, v)]
        (_, out), grads = jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))(*arrays)
        return [np.asarray(x, np.float32) for x in (out, *grads)]

    found, expected = run(kernel, jnp.bfloat16, placed), run(reference, jnp.float32, sight)
    names = ("values", "gradients of queries", "of keys", "of values")
    for name, one, exact in zip(names, found, expected, strict=True):
        off = np.max(np.abs(one - exact)) / np.max(np.abs(exact))
        if not off < _FAR:  # also nan
            what = f"a window of {window}" if window else f"{count or 'no'} responses"
            return f"{name} of rows with {what} are off by {off:.2g} of the largest"
    return ""
