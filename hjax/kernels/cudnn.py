"""Attention on NVIDIA GPUs by cuDNN's kernel.

``jax.nn.dot_product_attention(implementation="cudnn")`` knows causal masks, windows and a length
for each row. Left padding is shifted to the end and back. A prompt shared by several responses is
repeated before each of them, here only: the rest of a layer runs on one copy.

``model.attention=auto`` does not take it where ``python -m hjax.launch.check`` found it wrong: the
library's version and the GPU vary.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from hjax.errors import ConfigError
from hjax.kernels.attention import MaskSpec, PackedPrompts, ScoreOptions, cost_label
from hjax.kernels.kernel_sharding import Axes

HEAD_DIM = 256  # elements
WIDE_HEAD_DIM = 128  # GPUs older than Hopper take no wider heads
PLATFORMS = ("gpu", "cuda")
DTYPES = (jnp.bfloat16, jnp.float16)
_TILE = 128  # size of a block of scores, for the cost estimate
CONFIG_KEY = "model.attention=cudnn"


def unsupported_reason(dtype: Any, head_dim: int, softcap: float = 0.0, sinks: bool = False) -> str:
    """Why cuDNN's attention does not support such layers; empty if it does.

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
    mask_spec: MaskSpec,
    axes: Axes = (),
    length_shards: int = 1,
    gather: bool = False,
    implementation: str = "cudnn",
    shared: PackedPrompts | None = None,
) -> jax.Array:
    """``hjax.kernels.attention.attend`` on one device's shard.

    A row's tokens are contiguous, with padding before and after them. Results on padding are 0.

    Args:
      length_shards: devices over which the length is split: 1.
      implementation: of ``jax.nn.dot_product_attention``. ``xla``, for tests without a GPU, takes
        the same masks, every dtype and head size, and holds scores [length, length].

    Raises:
      ConfigError: cuDNN does not support the layer, or is not found; when traced.
    """
    batch, length, heads, dim = q.shape
    real = implementation == "cudnn"
    dtype, size = (q.dtype, dim) if real else (DTYPES[0], 8)  # XLA takes every dtype and size
    reason = unsupported_reason(dtype, size, scoring.softcap, sinks is not None)
    if length_shards > 1:
        reason = "it does not split a row's length over devices"
    if mask_spec.packed or shared is not None:
        reason = "it has no mask of several sequences in a row"
    if reason:
        raise ConfigError(f"{CONFIG_KEY}: {reason}")
    window = (mask_spec.window - 1, 0) if 0 < mask_spec.window < length else None
    run = functools.partial(_attend_rows, scoring.query_scale(dim), window, implementation)
    count = (length - mask_spec.prompt) // mask_spec.response if mask_spec.response else 1
    if count == 1:
        return run(q, k, v, segments)
    cut = functools.partial(_repeat_prompt, mask_spec.prompt, count)
    out = run(cut(q), cut(k), cut(v), None if segments is None else cut(segments))
    out = out.reshape(batch, count, -1, heads, dim)
    prompt, own = out[:, 0, : mask_spec.prompt], out[:, :, mask_spec.prompt :]
    return jnp.concatenate([prompt, own.reshape(batch, -1, heads, dim)], axis=1)


def _repeat_prompt(prompt: int, count: int, x: jax.Array) -> jax.Array:
    """[batch, prompt + count * length, ...] -> [batch * count, prompt + length, ...]."""
    batch, total, *rest = x.shape
    first, own = jax.lax.split(x, [prompt, total - prompt], axis=1)
    first = jnp.broadcast_to(first[:, None], (batch, count, prompt, *rest))
    own = own.reshape(batch, count, -1, *rest)
    return jnp.concatenate([first, own], axis=2).reshape(batch * count, -1, *rest)


def _attend_rows(
    scale: float,
    window: tuple[int, int] | None,
    implementation: Any,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: jax.Array | None,
) -> jax.Array:
    """Attention of rows that are one sequence each; ``segments`` is 0 at padding."""
    batch, length, heads, dim = q.shape
    lengths = first = count = None
    if segments is not None:
        real = segments != 0
        first = jnp.argmax(real, axis=1).astype(jnp.int32)
        count = jnp.sum(real, axis=1, dtype=jnp.int32)
        q, k, v = (_shift_rows(x, 1, first, count) for x in (q, k, v))
        lengths = jnp.maximum(count, 1)  # an empty row: a softmax over one zero
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
            raise ConfigError(
                f"{CONFIG_KEY}: {' '.join(str(error).split())}; model.attention=blocks does without"
            ) from error
    return out if segments is None else _shift_rows(out, -1, first, count)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _shift_rows(x: jax.Array, direction: int, first: jax.Array, count: jax.Array) -> jax.Array:
    """Shift each row's tokens of x [batch, length, ...] to its start (direction 1), or from there
    back (-1); 0 elsewhere. Gradients are shifted the other way, by the same gather.

    Args:
      first: int32 [batch], index of the first token.
      count: int32 [batch], number of tokens.
    """
    place = jnp.arange(x.shape[1], dtype=jnp.int32)
    start = 0 * first if direction > 0 else first
    own = (place >= start[:, None]) & (place < (start + count)[:, None])
    source = (place + direction * first[:, None]) % x.shape[1]
    more = (1,) * (x.ndim - 2)
    taken = jnp.take_along_axis(x, source.reshape(*source.shape, *more), 1, mode="clip")
    return jnp.where(own.reshape(*own.shape, *more), taken, 0)


_shift_rows.defvjp(
    lambda x, direction, first, count: (_shift_rows(x, direction, first, count), (first, count)),
    lambda direction, span, d_out: (_shift_rows(d_out, -direction, span[0], span[1]), None, None),
)


@functools.lru_cache(maxsize=64)
def _costs(rows: int, length: int, dim: int, window: int) -> str:
    """Cost label of the kernels, which have no cost estimate: products of the blocks that are not
    fully masked (2 forward, 5 backward); queries, outputs and gradients, read and written once."""
    short = -length % _TILE
    pairs = len(MaskSpec(window=window).block_pairs(length + short, _TILE))
    product = 2.0 * rows * pairs * _TILE**2 * dim
    moved = 2.0 * rows * length * dim
    return cost_label(
        (("attention_fwd", 2 * product, 4 * moved), ("attention_bwd", 5 * product, 8 * moved))
    )
