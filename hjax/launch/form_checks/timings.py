"""Times of forms beside their alternatives, and the bandwidths of memory and links."""

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from hjax.kernels import attention, reference
from hjax.kernels.attention import DENSE_LENGTH
from hjax.kernels.decode import CacheMask, attend, write_token
from hjax.launch.form_checks import kernel_cases as kernels

_SECONDS = 0.2  # of the repetitions that are timed
_BYTES = 256 * 2**20  # of the array that bandwidths are measured with
# What is timed: a function of a state that returns the next one, and the first state.
Timed = tuple[Callable[[Any], Any], Any]


@dataclasses.dataclass(frozen=True)
class TimedSizes:
    """Sizes that forms are timed at; those of a run with ``--config``.

    Attributes:
      rows, prompt, response: of a batch, in tokens.
      heads, kv_heads, dim: of attention.
      hidden, mlp, experts: of grouped products; without experts none are timed.
    """

    rows: int = 4
    prompt: int = 512
    response: int = 1536
    heads: int = 16
    kv_heads: int = 8
    dim: int = 128
    hidden: int = 2048
    mlp: int = 768
    experts: int = 16

    @property
    def length(self) -> int:
        """Tokens of a row."""
        return self.prompt + self.response


def seconds_of(timed: Timed) -> float:
    """The shortest of several repetitions, compilation left out."""
    step, state = timed
    state = jax.block_until_ready(step(state))
    end = time.perf_counter() + _SECONDS
    taken: list[float] = []
    while len(taken) < 3 or time.perf_counter() < end:
        start = time.perf_counter()
        state = jax.block_until_ready(step(state))
        taken.append(time.perf_counter() - start)
    return min(taken)


def measure(sizes: TimedSizes) -> dict[str, dict[str, float | str]]:
    """Seconds by what is computed and by form; of a form that fails, its error's text."""
    found: dict[str, dict[str, float | str]] = {}
    for title, forms in _timed_forms(sizes).items():
        for name, make in forms.items():
            try:
                seconds: float | str = seconds_of(make())
            except Exception as error:  # a compiler or a library may raise anything
                seconds = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            found.setdefault(title, {})[name] = seconds
    return found


def bandwidths() -> dict[str, float]:
    """Bytes a second of a device's memory, and that each device sends to the next."""
    devices = jax.local_devices()
    x = jax.device_put(jnp.zeros(_BYTES // 4, jnp.float32), devices[0])
    add = jax.jit(lambda x: x + 1.0, donate_argnums=0)
    found = {"memory_bytes_per_second": 2.0 * _BYTES / seconds_of((add, x))}
    if len(devices) > 1:
        mesh, pairs = Mesh(devices, ("ring",)), [(i, i + 1) for i in range(len(devices) - 1)]
        split = PartitionSpec("ring")
        send = functools.partial(
            jax.lax.ppermute, axis_name="ring", perm=[*pairs, (len(devices) - 1, 0)]
        )
        step = jax.jit(jax.shard_map(send, mesh=mesh, in_specs=split, out_specs=split))
        x = jax.device_put(
            jnp.zeros((len(devices), _BYTES // 4), jnp.float32), NamedSharding(mesh, split)
        )
        found["link_bytes_per_second"] = _BYTES / seconds_of((step, x))
    return found


def _timed_forms(sizes: TimedSizes) -> dict[str, dict[str, Callable[[], Timed]]]:
    """What makes each form's function and state, by what is computed; forms of other platforms are
    left out."""
    platform = jax.default_backend()
    s, own = sizes, {"tpu": ("splash", kernels.by_splash), "gpu": ("cudnn", kernels.by_cudnn)}
    attentions: dict[str, Any] = {"by blocks": kernels.by_blocks}
    decoding: dict[str, Any] = {"by XLA": _decode_by_xla}
    products: dict[str, Any] = {
        "by blocks": kernels.grouped_by_blocks,
        "ragged_dot": reference.grouped_product,
    }
    if platform in own:
        attentions |= dict([own[platform]])
        decoding["kernel"] = {"tpu": _decode_on_tpu, "gpu": _decode_on_gpu}[platform]
    if platform == "tpu":
        products["megablox"] = kernels.by_megablox
    found: dict[str, dict[str, Callable[[], Timed]]] = {}

    def add(title: str, make: Callable[..., Timed], forms: dict[str, Any]) -> None:
        found[title] = {name: functools.partial(make, s, form) for name, form in forms.items()}

    heads = f"{s.heads} heads over {s.kv_heads} of {s.dim}"
    if s.length > DENSE_LENGTH:
        add(f"attention, {s.rows} rows of {s.length}, {heads}", _attention, attentions)
    add(f"a token's attention, {s.rows} rows of {s.length}, {heads}", _decoding, decoding)
    if s.experts:
        what = f"products of {s.experts} experts, {s.rows * s.length} rows, {s.hidden} x {s.mlp}"
        add(what, _products, products)
    return found


def _normal(number: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(number), shape, jnp.bfloat16)


def _attention(sizes: TimedSizes, kernel: Any) -> Timed:
    """A forward and backward pass; the next state is the gradients."""
    of_heads = sizes.heads, sizes.kv_heads, sizes.kv_heads
    state = [_normal(i, sizes.rows, sizes.length, n, sizes.dim) for i, n in enumerate(of_heads)]

    def loss(arrays: Any) -> jax.Array:
        return jnp.sum(attention.attend(kernel, *arrays).astype(jnp.float32))

    return jax.jit(jax.grad(loss)), state


def _products(sizes: TimedSizes, product: Any) -> Timed:
    """A forward and backward pass over groups of equal size."""
    each = sizes.rows * sizes.length // sizes.experts
    groups = jnp.full(sizes.experts, each, jnp.int32)
    rows = _normal(0, each * sizes.experts, sizes.hidden)
    weights = _normal(1, sizes.experts, sizes.hidden, sizes.mlp)

    def loss(arrays: Any) -> jax.Array:
        return jnp.sum(product(*arrays, groups).astype(jnp.float32))

    return jax.jit(jax.grad(loss)), (rows, weights)


def _decoding(sizes: TimedSizes, form: Callable[..., Timed]) -> Timed:
    """A token of rows whose caches are full but for it; a sample of each prompt."""
    s = sizes
    per_kv, block = s.heads // s.kv_heads, 512
    prompt, length = (-(-n // block) * block for n in (s.prompt, s.response))
    q = _normal(0, s.rows, s.kv_heads, 1, per_kv, s.dim)
    new = _normal(1, s.rows, s.kv_heads, 1, s.dim)
    shared = _normal(2, s.rows, s.kv_heads, prompt, s.dim)
    held = [_normal(i, s.rows, s.kv_heads, 1, length, s.dim) for i in (3, 4)]
    zeros = jnp.zeros(s.rows, jnp.int32)
    last = jnp.full((s.rows, 1), s.response - 1, jnp.int32)
    return form(q, new, shared, held, CacheMask(zeros, zeros + s.prompt, last))


def _decode_by_xla(q: Any, new: Any, shared: Any, held: Any, seen: CacheMask) -> Timed:
    def step(held: Any) -> Any:
        own_k, own_v = (write_token(x, new, seen.position) for x in held[:2])
        return [own_k, own_v, attend(q, shared, shared, own_k, own_v, seen)]

    return jax.jit(step, donate_argnums=0), [*held, q]


def _decode_on_gpu(q: Any, new: Any, shared: Any, held: Any, seen: CacheMask) -> Timed:
    def step(held: Any) -> Any:
        own_k, own_v = (write_token(x, new, seen.position) for x in held[:2])
        out = kernels.attend_by_gpu_kernel(q, [shared, shared, own_k, own_v], seen)
        return [own_k, own_v, out]

    return jax.jit(step, donate_argnums=0), [*held, q]


def _decode_on_tpu(q: Any, new: Any, shared: Any, held: Any, seen: CacheMask) -> Timed:
    from hjax.kernels import decode_tpu

    def step(held: Any) -> Any:
        layer = jnp.zeros((), jnp.int32)
        own_k, own_v = held[:2]
        out, own_k, own_v = decode_tpu.decode(
            q, new, new, shared[None], shared[None], own_k, own_v, layer=layer, seen=seen
        )
        return [own_k, own_v, out]

    return jax.jit(step, donate_argnums=0), [*(x[None] for x in held), q]
