"""Measures what the devices at hand really do: products, memory, collectives, and hjax itself.

The last on a small model, whose steps are mostly what does not shrink with the model: starting
programs, layers and decode steps.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import math
import os
import re
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from hjax.devices import Device
from hjax.machine import device_memory
from hjax.models import arithmetic
from hjax.models.config import ModelConfig
from hjax.models.remat import NONE
from hjax.planning import counting, probes
from hjax.planning.constants import Constants
from hjax.planning.cost import Place, update_seconds
from hjax.planning.profile import MadeOn, Profile
from hjax.planning.records import FLOAT32, MASTERS, Mesh, Pool

# Called with the parts that are over, how many there are, and what is done now (at the end: "").
Progress = Callable[[int, int, str], None]

# Of the small runs: steps, those left out because they compile, tokens of a prompt, a response, and
# a response of the run with many attention scores; and updates that are timed.
STEPS, WARM_UP, PROMPT, RESPONSE, LONG_RESPONSE = 7, 2, 32, 32, 96
UPDATES = 5
# Numbers of simulated devices that are kept busy beside all of them.
BUSY = (1, 2)


def calibrate(devices: Sequence[Any], progress: Progress | None = None) -> Profile:
    """Measure the devices of one host, all of them. Takes a minute at most on two quiet cores.

    Simulated devices are also measured with 1 and 2 of them busy: how much faster each is then
    and how much of the cores' time they take, in the same update spread over so many. That update
    is also taken with FSDP and with a tensor axis, for what these cost beside data parallelism.

    Args:
      devices: of this process.
      progress: called as each part begins and once at the end, see ``Progress``.
    """
    cpu = devices[0].platform == "cpu"
    dtypes = ("float32",) if cpu else ("bfloat16", "float32")
    size = 512 if cpu else 8192
    counts = [n for n in BUSY if n < len(devices)] if cpu else []
    counts.append(len(devices))
    rows = 8 * len(devices)
    meshes = [Mesh(data=n) for n in counts] + _split_meshes(len(devices))
    all_of_them = len(counts) - 1
    # Beside a part per dtype and mesh: updates, all-reduces, copies, three small models.
    parts = _Parts(len(dtypes) + len(meshes) + 6, progress)
    flops = {}
    for dtype in dtypes:
        parts.begin(f"products in {dtype}")
        flops[dtype] = _matmul(devices, size, dtype)
    with contextlib.ExitStack() as ends:
        # One run whole; of the others only the update, which learns from the one's batch.
        parts.begin(f"a run over {_axes(meshes[all_of_them])}")
        whole = _start(ends, meshes[all_of_them], width=128, layers=2, rows=rows)
        batch = {name: _at_hand(x) for name, x in whole.batch.items()}
        wide = []
        for mesh in meshes:
            if mesh == meshes[all_of_them]:
                wide.append(whole)
                continue
            parts.begin(f"updates over {_axes(mesh)}")
            wide.append(_start(ends, mesh, width=128, layers=2, rows=rows, steps=0))
        parts.begin("updates of all runs in turn")
        taken = _updates(wide, batch)
        updates = dict(zip(counts, taken))
        run = _calls(wide[all_of_them])
        model = wide[0].roles.models["actor"]
    busy = {n: 3 * run.flops * len(devices) / n / updates[n][0] for n in counts}
    alone = ((n, busy[n] / busy[counts[-1]], updates[n][1]) for n in counts)
    parts.begin("all-reduces")
    latency, link = _all_reduce(devices, (1 << 20) if cpu else (1 << 26))
    parts.begin("copies in memory")
    bandwidth = _copy(devices, (1 << 22) if cpu else (1 << 28))
    device = Device(
        name=re.sub(r"\s+", "-", str(devices[0].device_kind).lower()),
        memory=device_memory(devices[0]) or _host_memory() / len(devices),
        flops=flops,
        bandwidth=bandwidth,
        link=link,
        network=link,
        per_host=len(devices),
        torus=0,
        source="measured by plan --calibrate",
        alone=_rising(alone) if cpu else (),
    )
    values = {"memory": 1.0, "link": 1.0}
    values |= {"link_latency": latency, "decode_row": 0.0}
    values |= _small_model(len(devices), flops[dtypes[0]], run, parts)
    parts.end()
    place = Place(Pool(device, 1, len(devices)), len(devices), Constants().with_values(values))
    place = dataclasses.replace(place, numerics=FLOAT32 if cpu else MASTERS)
    seconds = {mesh: s for mesh, (s, _) in zip(meshes, taken)}
    for mesh in _split_meshes(len(devices)):
        split = _split_cost(place, model, rows, run.length, seconds, mesh)
        values |= split
        place = dataclasses.replace(place, constants=place.constants.with_values(split))
    constants = Constants().with_values(values, measured=True)
    return Profile(device, constants, busy, MadeOn.here(devices))


class _Parts:
    """The parts of a calibration, counted as they begin."""

    def __init__(self, total: int, progress: Progress | None):
        self._begun, self._total, self._progress = 0, total, progress

    def begin(self, what: str) -> None:
        """The parts before are over."""
        if self._progress is not None:
            self._progress(self._begun, self._total, what)
        self._begun += 1

    def end(self) -> None:
        """All parts are over."""
        if self._progress is not None:
            self._progress(self._begun, self._total, "")


def _axes(mesh: Mesh) -> str:
    sizes = ", ".join(f"{axis} {n}" for axis, n in mesh.train_axes().items() if n > 1)
    return sizes or "one device"


def _at_hand(x: Any) -> Any:
    return np.asarray(x) if isinstance(x, jax.Array) else x


def _split_meshes(devices: int) -> list[Mesh]:
    """An FSDP and a tensor axis, of the largest size that divides the devices and 8 heads."""
    size = math.gcd(devices, 8)
    data = devices // size
    return [Mesh(data=data, fsdp=size), Mesh(data=data, tensor=size)] if size > 1 else []


def _split_cost(
    place: Place,
    model: ModelConfig,
    rows: int,
    length: int,
    seconds: Mapping[Mesh, float],
    mesh: Mesh,
) -> dict[str, float]:
    """The constant that explains how much longer an update takes split like ``mesh`` than over the
    data axis: ``gather`` of FSDP, whose collectives wait for the slowest device, ``unsplit`` of a
    tensor axis. The cost model is linear in either."""
    data = Mesh(data=place.devices)
    counts = counting.counts(model, "actor", scalar=False)

    def extra(value: float) -> float:
        constants = place.constants.with_values({name: value})
        here = dataclasses.replace(place, constants=constants)
        taken = [
            update_seconds(here, counts, m, rows, length, math.ceil(rows / m.replicas), NONE)
            for m in (mesh, data)
        ]
        return taken[0] - taken[1]

    name = "unsplit" if mesh.tensor > 1 else "gather"
    none, all_of_it = extra(0.0), extra(1.0)
    value = (seconds[mesh] - seconds[data] - none) / (all_of_it - none)
    return {name: min(1.0, max(0.0, value))}


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


def _spread(devices: Sequence[Any], shape: tuple[int, ...], dtype: str) -> tuple[jax.Array, Any]:
    """Random numbers, one [shape] per device (zeros would be multiplied faster)."""
    mesh = jax.sharding.Mesh(np.array(devices), ("d",))

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


def _rising(
    alone: Iterable[tuple[int, float, float]],
) -> tuple[tuple[int, float, float], ...]:
    """Shares of the cores that do not fall as devices are added: what they do is noise."""
    found: list[tuple[int, float, float]] = []
    for devices, faster, cores in alone:
        found.append((devices, faster, max([cores, *(c for _, _, c in found)])))
    return tuple(found)


def _small_model(devices: int, flops: float, wide: _Calls, parts: _Parts) -> dict[str, float]:
    """Constants of what hjax's calls cost, from GRPO runs of four models.

    Two tiny ones of 1 and 4 layers: a forward takes dispatch + layers * layer_pass, a rollout
    dispatch + rollout + layers * tokens * decode_layer. Two in which more is computed, mostly
    products in the one and attention scores in the other: a forward takes beside that
    FLOPs / (``flops`` * matmul) + scores * score, an update of the first 1 + 2 * backward
    forwards.
    """
    mesh = Mesh(data=devices)
    with contextlib.ExitStack() as ends:
        tiny = []
        for layers in (1, 4):
            parts.begin(f"a tiny model, layers: {layers}")
            rows = 2 * devices
            tiny.append(_start(ends, mesh, width=32, layers=layers, rows=rows, learns=False))
        parts.begin("longer responses")
        long = _start(
            ends, mesh, width=64, layers=2, rows=4 * devices, heads=8, response=LONG_RESPONSE,
            learns=False,
        )  # fmt: skip
        one, four, scored = (_calls(trainer) for trainer in (*tiny, long))
    layer_pass = max(0.0, four.forward - one.forward) / 3
    dispatch = max(0.0, one.forward - layer_pass)
    decode_layer = max(0.0, four.generate - one.generate) / 3 / RESPONSE
    rollout = max(0.0, one.generate - RESPONSE * decode_layer - dispatch)
    runs = (wide, scored)
    forwards = [max(run.forward - dispatch, 1e-9) for run in runs]
    computed = [max(f - 2 * layer_pass, 0.1 * f) for f in forwards]
    # Two equations: flops * (1 / rate) + scores * score = computed.
    (f1, f2), (s1, s2) = [run.flops for run in runs], [run.scores for run in runs]
    both = f1 * s2 - f2 * s1
    inverse = (computed[0] * s2 - computed[1] * s1) / both
    score = (f1 * computed[1] - f2 * computed[0]) / both
    if score <= 0 or inverse <= 0:  # within the noise: scores are part of the products' rate
        inverse, score = computed[0] / f1, 0.0
    return {
        "matmul": 1 / inverse / flops,
        "score": score,
        "backward": max(1.0, ((wide.update - dispatch) / forwards[0] - 1) / 2),
        "layer_pass": layer_pass,
        "dispatch": dispatch,
        "decode_step": 0.0,
        "decode_layer": decode_layer,
        "rollout": rollout,
    }


@dataclasses.dataclass(frozen=True)
class _Calls:
    """Median seconds of the calls of a small run; FLOPs and attention scores (over all layers) of a
    forward on each device; tokens of a sequence."""

    generate: float
    forward: float
    update: float
    flops: float
    scores: float
    length: int


def _start(
    ends: contextlib.ExitStack,
    mesh: Mesh,
    width: int,
    layers: int,
    rows: int,
    heads: int = 0,
    response: int = RESPONSE,
    steps: int | None = None,
    learns: bool = True,
) -> Any:
    """A GRPO run on ``rows`` sequences after its steps (None: all; 0: none, and it has no
    reference); heads of 16 unless said otherwise; without ``learns`` it has no updates.

    It is closed at the end of ``ends``, also after an error.
    """
    from hjax.run.trainer import Trainer
    from hjax.settings.checking import check_config

    heads = heads or width // 16
    changes = {
        "algorithm.name": "GRPO" if learns else f"{probes.__file__}:Scored",
        "algorithm.kl_coef": 0.01 if steps is None else 0.0, "data.task": "sorting", "steps": STEPS,
        "cluster.devices_per_process": mesh.devices, "placement": "colocate",
        "model.hidden_size": width, "model.mlp_size": 4 * width, "model.layers": layers,
        "model.heads": heads, "model.kv_heads": heads, "rollout.prompts": rows // 2,
        "rollout.samples": 2, "rollout.max_response_length": response,
        "rollout.max_prompt_length": PROMPT, "warm_start.steps": 0, "eval.every": 0,
        "checkpoint.every": 0,
        **{f"layout.actor.train.{axis}": size for axis, size in mesh.train_axes().items()},
    }  # fmt: skip
    trainer = Trainer(check_config(changes))
    ends.callback(trainer.close)
    trainer.prepare()
    if steps is None:
        trainer.run(STEPS)
    return trainer


def _calls(trainer: Any) -> _Calls:
    """What the calls of a run took."""
    taken = collections.defaultdict(list)
    for span in trainer.timeline.spans():
        if span.step > WARM_UP:
            taken[span.method].append(span.end - span.start)
    config, model = trainer.config, trainer.roles.models["actor"]
    length = trainer.inputs.prompt_length + config.rollout.max_response_length
    devices = config.cluster.devices_per_process
    rows = config.rollout.prompts * config.rollout.samples / devices
    flops = rows * arithmetic.forward_flops(model, length)
    scores = rows * model.heads * length**2 * model.layers
    calls = ("generate_sequences", "compute_ref_log_prob", "update_actor")
    generate, forward, update = (statistics.median(taken[name] or [0.0]) for name in calls)
    return _Calls(generate, forward, update, flops, scores, length)


def _updates(trainers: Sequence[Any], batch: Any) -> list[tuple[float, float]]:
    """(seconds, share of the cores' time) of an update of each run, medians; they take turns."""
    from hjax.controller import join
    from hjax.machine import available_cores

    cores = available_cores()
    taken: list[list[tuple[float, float]]] = [[] for _ in trainers]
    for trainer in trainers:  # a first one compiles
        join(trainer.roles.groups["actor"].update_actor(batch))
    for _ in range(UPDATES):
        for trainer, found in zip(trainers, taken):
            start, used = time.perf_counter(), time.process_time()
            join(trainer.roles.groups["actor"].update_actor(batch))
            seconds = time.perf_counter() - start
            share = (time.process_time() - used) / seconds / cores
            found.append((seconds, min(1.0, share)))
    return [tuple(statistics.median(column) for column in zip(*found)) for found in taken]
