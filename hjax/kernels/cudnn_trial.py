"""Whether cuDNN's attention computes on the devices at hand what the plain form does.

Asked before it is used without being asked for: the library, its version and the GPU are not ours.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hjax.kernels import cudnn
from hjax.kernels.attention import Kernel, Scoring, Sight, reference

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
        reason = disagreement(cudnn.attend, device)
    except Exception as error:  # whatever a library that is not as it should be does
        reason = f"it failed: {' '.join(str(error).split())}"
    if reason:
        _logger.warning(
            "cuDNN's attention is not used on %s: %s. Attention is computed by blocks, which is "
            "slower; %s uses it all the same",
            device.device_kind, reason, cudnn.ASKED,
        )  # fmt: skip
    return not reason


def disagreement(kernel: Kernel, device: Any) -> str:
    """In which case a kernel computes something else than the plain form; empty: in none.

    Args:
      kernel: as ``cudnn.attend``, of bfloat16.
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
    scoring, segments = Scoring(window=window), jnp.asarray(marks)
    sight = Sight(prompt, response) if count else Sight()
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
