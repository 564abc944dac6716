"""Calibration: measure the devices' matrix products, memory and collectives, and hjax's overheads.

hjax's overheads (starting programs, layers and decode steps) are measured on small models, whose
steps consist mostly of them.
"""

from __future__ import annotations

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

import numpy as np

from hjax.controller import Future
from hjax.devices import Device
from hjax.machine import available_cores, device_memory
from hjax.models.cost_inputs import FLOAT32, MASTERS, MeshSizes, Workload, model_counts
from hjax.models.model_config import ModelConfig
from hjax.models.remat import NONE
from hjax.planning import rates
from hjax.planning.constants import Constants
from hjax.planning.cost import DeviceSet, forward_flops, update_seconds
from hjax.planning.generation_cost import decoding_cost, prefill_seconds
from hjax.planning.plan_types import DevicePool
from hjax.planning.profile import MeasuredOn, Profile

# Called with the number of finished parts, their total, and what is measured now (at the end: "").
Progress = Callable[[int, int, str], None]

# Tokens of a prompt, a response, and a response long enough for many attention scores; responses
# per prompt, which share one prefill.
PROMPT, RESPONSE, LONG_RESPONSE, SAMPLES = 32, 32, 96, 2
# Interleaved calls are repeated at least so many times, then until the standard errors of their
# median seconds are within this share, or until so many seconds have passed.
MIN_REPEATS, MEDIAN_ERROR, MAX_SECONDS = 3, 0.03, 5.0
# Numbers of busy simulated devices that are measured, beside all of them.
BUSY_COUNTS = (1, 2)


def calibrate(devices: Sequence[Any], progress: Progress | None = None) -> Profile:
    """Measure the devices of one host, all of them. Takes a minute at most on two quiet cores.

    Simulated devices are also measured with 1 and 2 of them busy: how much faster each then is in
    the same update, and how much of the cores' time they take. The update is also run with FSDP and
    with a tensor axis, to measure what these cost beside data parallelism.

    Args:
      devices: of this process.
      progress: called as each part begins and once at the end, see ``Progress``.
    """
    cpu = devices[0].platform == "cpu"
    dtypes = ("float32",) if cpu else ("bfloat16", "float32")
    size = 512 if cpu else 8192
    numbers = [n for n in BUSY_COUNTS if n < len(devices)] if cpu else []
    numbers.append(len(devices))
    rows = 12 * len(devices)
    meshes = [MeshSizes(data=n) for n in numbers] + _split_meshes(len(devices))
    # A part per dtype and mesh, and seven: updates in turn, all-reduces, copies, four small models.
    parts = _Parts(len(dtypes) + len(meshes) + 7, progress)
    flops = {}
    for dtype in dtypes:
        parts.begin(f"products in {dtype}")
        flops[dtype] = rates.matmul(devices, size, dtype)
    wide = _wide_calls(meshes, numbers[-1], rows, parts)
    run, updates = wide.run, wide.updates
    spread = {n: updates[mesh] for n, mesh in zip(numbers, meshes)}
    busy = {n: 3 * run.flops * len(devices) / n / spread[n].seconds for n in numbers}
    alone = ((n, busy[n] / busy[numbers[-1]], spread[n].cores) for n in numbers)
    parts.begin("all-reduces")
    latency, link = rates.all_reduce(devices, (1 << 20) if cpu else (1 << 26))
    parts.begin("copies in memory")
    bandwidth = rates.copy(devices, (1 << 22) if cpu else (1 << 28))
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
        alone=_monotonic_core_shares(alone) if cpu else (),
    )
    values = {"memory": 1.0, "link": 1.0, "link_latency": latency, "decode_row": 0.0}
    values |= _fit_small_constants(len(devices), flops[dtypes[0]], run, parts)
    parts.end()
    place = DeviceSet(
        DevicePool(device, 1, len(devices)), len(devices), Constants().with_values(values)
    )
    place = dataclasses.replace(place, numerics=FLOAT32 if cpu else MASTERS)
    values |= _fit_wide_constants(place, wide, rows)
    constants = Constants().with_values(values, measured=True)
    return Profile(device, constants, busy, MeasuredOn.here(devices))


@dataclasses.dataclass(frozen=True)
class _WideCalls:
    """Seconds of calls on a wide model, in which compute dominates.

    Attributes:
      model: its shape.
      run: on all devices, over the data axis.
      updates: the same update on each mesh.
    """

    model: ModelConfig
    run: _Calls
    updates: Mapping[MeshSizes, _Taken]


def _wide_calls(meshes: Sequence[MeshSizes], devices: int, rows: int, parts: _Parts) -> _WideCalls:
    """Time log-probs, rollouts and updates over all devices, and updates over each mesh."""
    with contextlib.ExitStack() as stack:
        probes: list[_Probe] = []
        for mesh in meshes:
            parts.begin(f"updates over {_axes(mesh)}")
            weights = probes[0].actor.weights() if probes else None
            probe = _probe(stack, mesh, width=128, layers=2, rows=rows, weights=weights)
            probe.actor.update_actor(probe.batch).result()  # compiles
            probes.append(probe)
        whole = next(probe for probe in probes if probe.mesh == MeshSizes(data=devices))
        whole.actor.compute_log_prob(whole.batch).result()
        whole.actor.generate_sequences(whole.prompts).result()
        parts.begin("updates in turn")
        taken = _time_interleaved(
            [
                functools.partial(whole.actor.compute_log_prob, whole.batch),
                functools.partial(whole.actor.generate_sequences, whole.prompts),
            ]
            + [functools.partial(p.actor.update_actor, whole.batch) for p in probes]
        )
        updates = dict(zip(meshes, taken[2:]))
        forward, generate = (found.seconds for found in taken[:2])
        run = whole.account(forward, generate, updates[whole.mesh].seconds)
        return _WideCalls(whole.model, run, updates)


def _fit_wide_constants(place: DeviceSet, wide: _WideCalls, rows: int) -> dict[str, float]:
    """Fit ``decode``, ``gather`` and ``unsplit`` to a rollout and to updates with FSDP and with a
    tensor axis; the other constants are those of ``place``."""
    values = {"decode": _fit_decode(place, wide.model, rows, wide.run.generate)}
    seconds = {mesh: found.seconds for mesh, found in wide.updates.items()}
    for mesh in _split_meshes(place.devices):
        here = dataclasses.replace(place, constants=place.constants.with_values(values))
        values |= _fit_split_constant(here, wide.model, rows, wide.run.length, seconds, mesh)
    return values


class _Parts:
    """The parts of a calibration, counted as they begin."""

    def __init__(self, total: int, progress: Progress | None):
        self._begun, self._total, self._progress = 0, total, progress

    def begin(self, what: str) -> None:
        """Start the next part."""
        if self._progress is not None:
            self._progress(self._begun, self._total, what)
        self._begun += 1

    def end(self) -> None:
        """Report that all parts are done."""
        if self._progress is not None:
            self._progress(self._begun, self._total, "")


def _axes(mesh: MeshSizes) -> str:
    sizes = ", ".join(f"{axis} {n}" for axis, n in mesh.train_axes().items() if n > 1)
    return sizes or "one device"


def _split_meshes(devices: int) -> list[MeshSizes]:
    """A mesh with an FSDP and one with a tensor axis, of a size dividing devices and 8 heads."""
    size = math.gcd(devices, 8)
    data = devices // size
    return [MeshSizes(data=data, fsdp=size), MeshSizes(data=data, tensor=size)] if size > 1 else []


def _fit_split_constant(
    place: DeviceSet,
    model: ModelConfig,
    rows: int,
    length: float,
    seconds: Mapping[MeshSizes, float],
    mesh: MeshSizes,
) -> dict[str, float]:
    """Fit the constant for the extra seconds of an update on ``mesh`` over pure data parallelism:
    ``gather`` of FSDP (collectives wait for the slowest device) or ``unsplit`` of a tensor axis.
    The cost model is linear in both."""
    data = MeshSizes(data=place.devices)
    counted = model_counts(model, "actor")

    def extra(value: float) -> float:
        here = dataclasses.replace(place, constants=place.constants.with_values({name: value}))
        taken = [
            update_seconds(here, counted, m, rows, length, math.ceil(rows / m.replicas), NONE)
            for m in (mesh, data)
        ]
        return taken[0] - taken[1]

    name = "unsplit" if mesh.tensor > 1 else "gather"
    none, all_of_it = extra(0.0), extra(1.0)
    value = (seconds[mesh] - seconds[data] - none) / (all_of_it - none)
    return {name: min(1.0, max(0.0, value))}


def _fit_decode(place: DeviceSet, model: ModelConfig, rows: int, seconds: float) -> float:
    """Fit ``decode``, in which the cost model is linear, to the seconds of a rollout of ``rows``
    sequences, less start, prefill and the cost per layer and token."""
    counted = model_counts(model, "actor")
    mesh = MeshSizes(data=place.devices, generate_pipe=1, generate_tensor=1)
    work = Workload(PROMPT, RESPONSE, rows, SAMPLES)

    def taken(value: float) -> float:
        here = dataclasses.replace(place, constants=place.constants.with_values({"decode": value}))
        prompts = prefill_seconds(here, counted, mesh, rows, work)
        return prompts + decoding_cost(here, counted, mesh, rows, work).seconds(1)

    started = place.constants.dispatch + place.constants.rollout
    return max(0.0, (seconds - started - taken(0.0)) / (taken(1.0) - taken(0.0)))


def _host_memory() -> float:
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


@dataclasses.dataclass(frozen=True)
class _Taken:
    """Medians of a call: its seconds, and its share of the cores' time meanwhile."""

    seconds: float
    cores: float


def _time_interleaved(calls: Sequence[Callable[[], Future]]) -> list[_Taken]:
    """Time several compiled calls, interleaved so that other load on the machine affects all alike.

    The first round, in which memory is allocated, is not counted.
    """
    for call in calls:
        call().result()
    cores, begun = available_cores(), time.perf_counter()
    taken: list[list[tuple[float, float]]] = [[] for _ in calls]
    while not all(_median_is_known([seconds for seconds, _ in found]) for found in taken):
        if len(taken[0]) >= MIN_REPEATS and time.perf_counter() - begun > MAX_SECONDS:
            break
        for call, found in zip(calls, taken):
            start, used = time.perf_counter(), time.process_time()
            call().result()
            seconds = time.perf_counter() - start
            found.append((seconds, min(1.0, (time.process_time() - used) / seconds / cores)))
    return [
        _Taken(
            seconds=statistics.median(seconds for seconds, _ in found),
            cores=statistics.median(cores for _, cores in found),
        )
        for found in taken
    ]


def _median_is_known(taken: Sequence[float]) -> bool:
    """Whether the median is accurate enough: the standard error of a median of n numbers is about
    their interquartile range over sqrt(n)."""
    if len(taken) < MIN_REPEATS:
        return False
    low, middle, high = statistics.quantiles(taken, n=4)
    return high - low <= MEDIAN_ERROR * middle * math.sqrt(len(taken))


def _monotonic_core_shares(
    alone: Iterable[tuple[int, float, float]],
) -> tuple[tuple[int, float, float], ...]:
    """Make the cores' shares rise with the number of devices; a measured fall is noise."""
    found: list[tuple[int, float, float]] = []
    for devices, faster, cores in alone:
        found.append((devices, faster, max([cores, *(c for _, _, c in found)])))
    return tuple(found)


def _fit_small_constants(count: int, flops: float, wide: _Calls, parts: _Parts) -> dict[str, float]:
    """Fit the constants of hjax's overheads to calls on four models.

    Two tiny models have 1 and 4 layers: a forward takes dispatch + layers * layer_pass, a rollout
    dispatch + rollout + layers * tokens * decode_layer. Two larger ones compute mostly matrix
    products and mostly attention scores: a forward also takes FLOPs / (``flops`` * matmul) + scores
    * score, and an update of the first 1 + 2 * backward forwards. An update of the deeper tiny
    model gives the further seconds per layer, layer_update.
    """
    mesh = MeshSizes(data=count)
    with contextlib.ExitStack() as stack:
        tiny = []
        for layers in (1, 4):
            parts.begin(f"a tiny model, layers: {layers}")
            probe = _probe(stack, mesh, width=32, layers=layers, rows=2 * count)
            probe.actor.generate_sequences(probe.prompts).result()  # compiles
            probe.actor.compute_log_prob(probe.batch).result()
            tiny.append(probe)
        deep = tiny[-1]
        deep.actor.update_actor(deep.batch).result()
        parts.begin("longer responses")
        long = _probe(
            stack, mesh, width=64, layers=2, rows=4 * count, heads=8, response=LONG_RESPONSE
        )
        long.actor.compute_log_prob(long.batch).result()
        parts.begin("calls on small models in turn")
        probes = (*tiny, long)
        taken = _time_interleaved(
            [functools.partial(p.actor.compute_log_prob, p.batch) for p in probes]
            + [functools.partial(p.actor.generate_sequences, p.prompts) for p in tiny]
            + [functools.partial(deep.actor.update_actor, deep.batch)]
        )
        seconds = [found.seconds for found in taken]
        one = tiny[0].account(seconds[0], seconds[3])
        four = deep.account(seconds[1], generate=seconds[4], update=seconds[5])
        scored = long.account(seconds[2])
    layer_pass = max(0.0, four.forward - one.forward) / 3
    dispatch = max(0.0, one.forward - layer_pass)
    decode_layer = max(0.0, four.generate - one.generate) / 3 / RESPONSE
    rollout = max(0.0, one.generate - RESPONSE * decode_layer - dispatch)
    backward, layer_update = _fit_backward(wide, four, dispatch)
    runs = (wide, scored)
    forwards = [max(run.forward - dispatch, 1e-9) for run in runs]
    computed = [max(f - 2 * layer_pass, 0.1 * f) for f in forwards]
    # Two equations: flops * (1 / rate) + scores * score = computed.
    equations = [[run.flops, run.scores] for run in runs]
    inverse, score = map(float, np.linalg.solve(equations, computed))
    if score <= 0 or inverse <= 0:  # within the noise: scores are part of the products' rate
        inverse, score = computed[0] / wide.flops, 0.0
    return {
        "matmul": 1 / inverse / flops,
        "score": score,
        "backward": backward,
        "layer_pass": layer_pass,
        "layer_update": layer_update,
        "dispatch": dispatch,
        "decode_step": 0.0,
        "decode_layer": decode_layer,
        "rollout": rollout,
    }


def _fit_backward(wide: _Calls, deep: _Calls, dispatch: float) -> tuple[float, float]:
    """Fit ``backward`` and ``layer_update`` to a wide model of two layers and a tiny one of four:
    an update takes ``dispatch`` + (1 + 2 * backward) forwards + layers * layer_update."""
    forwards, updates = (
        [max(x - dispatch, 1e-9) for x in pair]
        for pair in ((wide.forward, deep.forward), (wide.update, deep.update))
    )
    # update = times * forward + layers * each, of 2 and 4 layers.
    left = forwards[0] - forwards[1] / 2
    times = (updates[0] - updates[1] / 2) / left if left > 0 else updates[0] / forwards[0]
    times = max(3.0, times)
    return (times - 1) / 2, max(0.0, updates[1] - times * forwards[1]) / 4


@dataclasses.dataclass(frozen=True)
class _Calls:
    """Seconds of the calls on a small model, 0 where one was not made; FLOPs and attention scores
    (over all layers) of a forward on each device; tokens of a sequence that a pass computes."""

    forward: float
    generate: float
    update: float
    flops: float
    scores: float
    length: float


@dataclasses.dataclass(frozen=True)
class _Probe:
    """An actor on its devices, with the batches for its calls.

    Attributes:
      mesh: of its training layout.
      actor: its worker group.
      model: its shape.
      prompts: as ``generate_sequences`` takes them.
      batch: full sequences to score and to learn from, as numpy arrays.
    """

    mesh: MeshSizes
    actor: Any
    model: ModelConfig
    prompts: dict[str, Any]
    batch: dict[str, np.ndarray]

    def account(self, forward: float, generate: float = 0.0, update: float = 0.0) -> _Calls:
        """Its calls, given their seconds."""
        rows, response = self.batch["responses"].shape
        length = Workload(PROMPT, response, rows, SAMPLES).row_tokens(FLOAT32.shared_prompt)
        flops = forward_flops(model_counts(self.model, "actor"), rows, length) / self.mesh.devices
        scores = rows / self.mesh.devices * self.model.heads * length**2 * self.model.layers
        return _Calls(forward, generate, update, flops, scores, length)


def _probe(
    stack: contextlib.ExitStack,
    mesh: MeshSizes,
    width: int,
    layers: int,
    rows: int,
    heads: int = 0,
    response: int = RESPONSE,
    weights: Any = None,
) -> _Probe:
    """Set up a GRPO run on ``rows`` sequences whose actor is called directly, without steps.

    By default heads have size 16. ``weights`` of another probe avoid compiling an initialisation.
    The run is closed at the exit of ``stack``, also after an error.
    """
    from hjax.run.inputs import prompt_batch
    from hjax.run.trainer import Trainer
    from hjax.settings.config_checks import check_config

    heads = heads or width // 16
    changes = {
        "algorithm.name": "GRPO", "algorithm.kl_coef": 0.0, "data.task": "sorting",
        "cluster.devices_per_process": mesh.devices, "placement": "colocate",
        "model.hidden_size": width, "model.mlp_size": 4 * width, "model.layers": layers,
        "model.heads": heads, "model.kv_heads": heads, "rollout.prompts": rows // SAMPLES,
        "rollout.samples": SAMPLES, "rollout.max_response_length": response,
        "rollout.max_prompt_length": PROMPT, "warm_start.steps": 0, "eval.every": 0,
        "checkpoint.every": 0,
        **{f"layout.actor.train.{axis}": size for axis, size in mesh.train_axes().items()},
    }  # fmt: skip
    trainer = Trainer(check_config(changes))
    stack.callback(trainer.close)
    actor = trainer.roles.groups["actor"]
    (actor.initialize() if weights is None else actor.take_weights(weights)).result()
    drawn = trainer.inputs.train.rows(trainer.prompts.next())
    prompts = prompt_batch(drawn, trainer.inputs.prompt_length, 1)
    model = trainer.roles.models["actor"]
    return _Probe(mesh, actor, model, prompts, _full_batch(prompts, response, model.vocab_size))


def _full_batch(prompts: Mapping[str, Any], response: int, vocabulary: int) -> dict[str, Any]:
    """A step's batch with all that log-probs and updates read. Each prompt has ``SAMPLES`` random
    responses of full length, so shapes do not depend on sampling."""
    rows, rng = SAMPLES * len(prompts["prompts"]), np.random.default_rng(0)
    floats = [rng.normal(size=(rows, response)).astype(np.float32) for _ in range(2)]
    return {
        "prompts": np.repeat(prompts["prompts"], SAMPLES, axis=0),
        "prompt_mask": np.repeat(prompts["prompt_mask"], SAMPLES, axis=0),
        "prompt_id": np.repeat(np.arange(rows // SAMPLES), SAMPLES),
        "responses": rng.integers(0, vocabulary, (rows, response), dtype=np.int32),
        "response_mask": np.ones((rows, response), bool),
        "row_mask": np.ones(rows, bool),
        "advantages": floats[0],
        "old_logprobs": -np.abs(floats[1]),
    }
