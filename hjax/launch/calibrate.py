"""Measures what the devices at hand really do: products, memory, collectives, and hjax itself.

The last on a small model, whose steps are mostly what does not shrink with the model: starting
programs, layers and decode steps.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
import os
import re
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from hjax.launch.profile import Profile, device_memory
from hjax.models import arithmetic
from hjax.sharding.mapping.constants import Constants
from hjax.sharding.mapping.records import Device

# Of the small runs: steps, those left out because they compile, tokens of a response.
STEPS, WARM_UP, RESPONSE = 9, 3, 32


def calibrate(devices: Sequence[Any]) -> Profile:
    """Measure the devices of one host, all of them. Takes a minute.

    Simulated devices are also measured with 1, 2 and 4 of them busy: how much faster each is then,
    in updates of a small model, since one device alone multiplies on all cores but does little
    else on them.
    """
    cpu = devices[0].platform == "cpu"
    dtypes = ("float32",) if cpu else ("bfloat16", "float32")
    size = 512 if cpu else 8192
    counts = [n for n in (1, 2, 4, 8) if n < len(devices)] if cpu else []
    counts.append(len(devices))
    flops = {d: _matmul(devices, size, d) for d in dtypes}
    wide = {n: _run(devices[:n], width=128, layers=2, rows=8) for n in counts}
    busy = {n: 3 * run.flops / run.update for n, run in wide.items()}
    latency, link = _all_reduce(devices, (1 << 20) if cpu else (1 << 26))
    device = Device(
        name=re.sub(r"\s+", "-", str(devices[0].device_kind).lower()),
        memory=device_memory(devices[0]) or _host_memory() / len(devices),
        flops=flops,
        bandwidth=_copy(devices, (1 << 22) if cpu else (1 << 28)),
        link=link,
        network=link,
        per_host=len(devices),
        torus=0,
        source="measured by plan --calibrate",
        alone=tuple((n, rate / busy[len(devices)]) for n, rate in busy.items()) if cpu else (),
    )
    values = {"memory": 1.0, "link": 1.0}
    values |= {"link_latency": latency, "decode_row": 0.0}
    values |= _small_model(devices, flops[dtypes[0]], wide[len(devices)])
    return Profile(device, Constants().with_values(values, measured=True), busy)


def _host_memory() -> float:
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def _seconds(run: Callable[[], Any], repeats: int = 5) -> float:
    """Median seconds of a call that is waited for; the first, which compiles, is left out."""
    jax.block_until_ready(run())
    taken = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(run())
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def _spread(devices: Sequence[Any], shape: tuple[int, ...], dtype: str) -> tuple[jax.Array, Mesh]:
    """Random numbers, one [shape] per device (zeros would be multiplied faster)."""
    mesh = Mesh(np.array(devices), ("d",))

    def fill() -> jax.Array:
        some = jax.random.normal(jax.random.key(0), (1 << 14,), dtype)
        return jnp.resize(some, (len(devices), *shape))

    make = jax.jit(
        fill,
        out_shardings=NamedSharding(mesh, PartitionSpec("d")),
    )
    return make(), mesh


def _matmul(devices: Sequence[Any], size: int, dtype: str, times: int = 4) -> float:
    """FLOP/s per device of square products."""
    x, _ = _spread(devices, (size, size), dtype)

    @jax.jit
    def run(x: Any) -> Any:
        y = x
        for _ in range(times):
            y = jnp.einsum("dij,djk->dik", y, x) * (size**-0.5)
        return y

    return times * 2.0 * size**3 / _seconds(lambda: run(x))


def _copy(devices: Sequence[Any], elements: int) -> float:
    """Bytes/s per device read and written by an elementwise pass."""
    x, _ = _spread(devices, (elements,), "float32")
    run = jax.jit(lambda x: x * 1.5 + 1.0)
    return 8.0 * elements / _seconds(lambda: run(x))


def _all_reduce(devices: Sequence[Any], elements: int, times: int = 8) -> tuple[float, float]:
    """(latency of a ring per doubling of its devices, bytes/s of a ring), of all-reduces inside a
    program: 2 (n - 1) / n * bytes / bandwidth + 2 * latency * log2 n."""
    count = len(devices)
    if count == 1:
        return 1e-6, 1e12
    small, large = (_all_reduce_seconds(devices, n, times) for n in (16, elements))
    latency = small / 2 / math.ceil(math.log2(count))
    return latency, 2 * 4.0 * elements * (count - 1) / count / max(large - small, 1e-9)


def _all_reduce_seconds(devices: Sequence[Any], elements: int, times: int) -> float:
    """Seconds of one more all-reduce of float32 [elements] in a program."""
    x, mesh = _spread(devices, (elements,), "float32")
    taken = []
    for repeats in (1, 1 + times):

        @jax.jit
        @functools.partial(
            jax.shard_map,
            mesh=mesh,
            in_specs=PartitionSpec("d"),
            out_specs=PartitionSpec("d"),
            check_vma=False,
        )
        def run(x: Any, repeats: int = repeats) -> Any:
            for _ in range(repeats):
                x = jax.lax.psum(x, "d") * 0.5
            return x

        taken.append(_seconds(lambda run=run: run(x), 15))  # type: ignore[misc]
    return max(taken[1] - taken[0], 0.0) / times


def _small_model(devices: Sequence[Any], flops: float, wide: _Run) -> dict[str, float]:
    """Constants of what hjax's calls cost, from GRPO runs of three models.

    Two tiny ones of 1 and 4 layers: a forward takes dispatch + layers * layer_pass, a rollout
    dispatch + rollout + layers * tokens * decode_layer. One in which products weigh more: a forward
    takes beside that its FLOPs / (``flops`` * matmul), an update 1 + 2 * backward forwards.
    """
    one, four = (_run(devices, width=32, layers=n, rows=2) for n in (1, 4))
    layer_pass = max(0.0, four.forward - one.forward) / 3
    dispatch = max(0.0, one.forward - layer_pass)
    decode_layer = max(0.0, four.generate - one.generate) / 3 / RESPONSE
    rollout = max(0.0, one.generate - RESPONSE * decode_layer - dispatch)
    forward = max(wide.forward - dispatch, 1e-9)
    products = max(forward - 2 * layer_pass, 0.1 * forward)
    return {
        "matmul": min(1.0, wide.flops / products / flops),
        "backward": max(1.0, ((wide.update - dispatch) / forward - 1) / 2),
        "layer_pass": layer_pass,
        "dispatch": dispatch,
        "decode_step": 0.0,
        "decode_layer": decode_layer,
        "rollout": rollout,
    }


@dataclasses.dataclass(frozen=True)
class _Run:
    """Median seconds of the calls of a small run; ``flops`` of a forward on each device."""

    generate: float
    forward: float
    update: float
    flops: float


def _run(devices: Sequence[Any], width: int, layers: int, rows: int) -> _Run:
    """GRPO on ``rows`` sequences per device, heads of 16."""
    from hjax.launch.config_check import check_config
    from hjax.launch.trainer import Trainer

    changes = {
        "algorithm.name": "GRPO", "algorithm.kl_coef": 0.01, "data.task": "sorting", "steps": STEPS,
        "cluster.devices_per_process": len(devices), "placement": "colocate",
        "model.hidden_size": width, "model.mlp_size": 4 * width, "model.layers": layers,
        "model.heads": width // 16, "model.kv_heads": width // 16,
        "rollout.prompts": rows // 2 * len(devices), "rollout.samples": 2,
        "rollout.max_response_length": RESPONSE, "rollout.max_prompt_length": 32,
        "warm_start.steps": 0, "eval.every": 0, "checkpoint.every": 0,
    }  # fmt: skip
    trainer = Trainer(check_config(changes))
    try:
        trainer.run()
        taken = collections.defaultdict(list)
        for span in trainer.timeline.spans():
            if span.step > WARM_UP:
                taken[span.method].append(span.end - span.start)
        length = trainer.inputs.prompt_length + RESPONSE
        flops = rows * arithmetic.forward_flops(trainer.roles.models["actor"], length)
    finally:
        trainer.close()
    calls = ("generate_sequences", "compute_ref_log_prob", "update_actor")
    generate, forward, update = (statistics.median(taken[name]) for name in calls)
    return _Run(generate, forward, update, flops)
