"""The row of the paper's Table 2 for one case: analytic, and counted on the compiled programs."""

from __future__ import annotations

import dataclasses
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from hjax.errors import ConfigError
from hjax.machine import device_memory, free_bytes
from hjax.models.config import ModelConfig
from hjax.models.parameters import decoder_network
from hjax.sharding.layout import RoleLayouts, check_shapes, without
from hjax.sharding.live_memory import PeakWatch
from hjax.sharding.transition import BUCKET_BYTES, Transition
from hjax.studies.gather_and_cut import GatherAndCut
from hjax.studies.transition_groups import (
    Table2Case,
    case_layouts,
    holdings,
    stage_groups,
    table2,
    zero_sharding,
)

# Divides for every p, t, p_g, t_g up to 16, and over 16 devices.
BUILT_IN = ModelConfig(
    vocab_size=256,
    hidden_size=64,
    mlp_size=256,
    layers=16,
    heads=16,
    kv_heads=16,
    head_dim=4,
    max_length=64,
    tie_embeddings=False,
)


@dataclasses.dataclass(frozen=True, eq=False)
class Setup:
    """A case on devices: what moves, and the trees that say how.

    Attributes:
      source, target: by name, NamedSharding of the parameters split over all training shards.
      shapes: by name, jax.ShapeDtypeStruct.
      others: the remaining parameters in the same three forms.
      layouts: of both stages.
    """

    source: dict[str, Any]
    target: dict[str, Any]
    shapes: dict[str, Any]
    others: tuple[dict[str, Any], dict[str, Any], dict[str, Any]]
    layouts: RoleLayouts

    @property
    def model_bytes(self) -> int:
        """M: bytes of the parameters that are split over all training shards."""
        return sum(math.prod(x.shape) * x.dtype.itemsize for x in self.shapes.values())


# Name to logical axes and jax.ShapeDtypeStruct.
Leaves = Mapping[str, tuple[tuple[str, ...], Any]]


def model_leaves(model: ModelConfig) -> dict[str, tuple[tuple[str, ...], Any]]:
    """A decoder's parameters by dotted name."""
    network = decoder_network(model)
    axes, shapes = (
        jax.tree.flatten_with_path(tree, is_leaf=lambda x: isinstance(x, tuple))[0]
        for tree in (network.axes, network.shapes)
    )
    names = [".".join(key.key for key in path) for path, _ in shapes]
    return dict(zip(names, zip((a for _, a in axes), (x for _, x in shapes)), strict=True))


def set_up(case: Table2Case, method: str, devices: Sequence[jax.Device], leaves: Leaves) -> Setup:
    """Lay parameters out for a case.

    Raises:
      ConfigError: sizes that do not divide the parameters', by name.
    """
    layouts = case_layouts(devices, case, method)
    sizes = {name: n for axes, x in leaves.values() for name, n in zip(axes, x.shape)}
    split = [name for name in sizes if layouts.train.rules[name]]
    sizes = {name: sizes[name] for name in split}
    layouts = RoleLayouts(
        without(layouts.train, check_shapes(layouts.train, sizes, "--train")),
        without(layouts.generate, check_shapes(layouts.generate, sizes, "--generate")),
    )
    shapes = {name: x for name, (_, x) in leaves.items()}
    before, after = (
        {name: layout.sharding(*axes) for name, (axes, _) in leaves.items()}
        for layout in (layouts.train, layouts.generate)
    )
    counted = {name for name, s in before.items() if _parts(s, shapes[name]) == case.shards}
    if method == "gather_all":
        mesh = layouts.train.mesh
        zero = {name: s for name in counted if (s := zero_sharding(shapes[name].shape, mesh))}
        before, counted = before | zero, set(zero)
    if not counted:
        raise ConfigError(f"no parameter of this model divides over {case.devices} devices")

    def only(tree: Mapping[str, Any], wanted: bool) -> dict[str, Any]:
        return {name: x for name, x in tree.items() if (name in counted) == wanted}

    return Setup(
        source=only(before, True),
        target=only(after, True),
        shapes=only(shapes, True),
        others=(only(before, False), only(after, False), only(shapes, False)),
        layouts=layouts,
    )


def _parts(sharding: Any, x: Any) -> int:
    """Into how many different shards an array is split."""
    return math.prod(x.shape) // math.prod(sharding.shard_shape(x.shape))


def measure(case: Table2Case, method: str, setup: Setup, bucket_bytes: int) -> dict[str, Any]:
    """Compile a transition, run it there and back where it fits, and count.

    Returns:
      fractions of ``model_bytes`` per device: ``analytic`` and ``measured``; what they rest on.
      Where nothing is run (``executed`` is false) communication is that of the compiled programs
      all the same, peak and redundancy follow from shapes.
    """
    make: Any = Transition if method == "hybridflow" else GatherAndCut
    transition = make(setup.source, setup.target, setup.shapes, bucket_bytes=bucket_bytes)
    cost, total = transition.cost(), setup.model_bytes
    devices = list(setup.layouts.train.mesh.devices.ravel())
    executed = fits(devices, case.devices * (cost.peak + cost.temporary))
    peak, redundant = cost.peak, cost.redundant
    if executed:
        peak, redundant = run(transition, setup, devices, cost.target)
    found = stage_groups(setup.layouts)
    return {
        "method": method,
        "train": [case.pipe, case.tensor, case.data],
        "generate": [case.generate_pipe, case.generate_tensor],
        "devices": case.devices,
        "model_bytes": total,
        "groups": found["generate"],
        "train_groups": found["train"],
        "analytic": table2(case, method),
        "measured": {
            "communication": cost.received / total,
            "peak": peak / total,
            "redundancy": redundant / total,
        },
        "executed": executed,
        "back_bytes": cost.back,
        "bucket_bytes": largest_bucket(transition),
        "buckets": cost.buckets,
        "temporary_bytes": cost.temporary,
        "unsharded": {
            name: math.prod(x.shape) * x.dtype.itemsize for name, x in setup.others[2].items()
        },
        "holdings": [
            [sorted(parts) for parts in holdings(layout.sharding("layers", "heads"), case)]
            for layout in (setup.layouts.train, setup.layouts.generate)
        ],
    }


def describe(
    case: Table2Case, method: str, devices: Sequence[jax.Device], model: ModelConfig, name: str
) -> dict[str, Any]:
    """What ``python -m hjax.launch.transition --json`` prints, and who holds what."""
    setup = set_up(case, method, devices, model_leaves(model))
    bucket = max(1, min(BUCKET_BYTES, setup.model_bytes // case.generate_shards // 16))
    found = measure(case, method, setup, bucket)
    others = Transition(*setup.others, bucket_bytes=bucket).cost()
    return {"model": name, **found, "unsharded_received_bytes": others.received}


def run(
    transition: Any, setup: Setup, devices: Sequence[jax.Device], target: int
) -> tuple[int, int]:
    """Go there and back; returns bytes per device alive at most, and those beside generation's.

    Raises:
      RuntimeError: parameters that changed on the way.
    """
    watch = PeakWatch(devices)
    params = {name: _numbers(setup.shapes[name], s) for name, s in setup.source.items()}
    before = checksum(params)
    held = transition.start(params)
    there = transition.advance(held, watch)
    redundant = watch() - target
    if checksum(there) != before:
        raise RuntimeError("parameters changed on the way to the generate layout")
    del there
    params = transition.back(held, watch)
    if checksum(params) != before:
        raise RuntimeError("parameters changed on the way back")
    return watch.peak, redundant


def _numbers(shape: Any, sharding: Any) -> jax.Array:
    """A float32 array of this shape that counts its elements."""
    values = np.arange(math.prod(shape.shape), dtype=np.float32).reshape(shape.shape)
    return jax.device_put(values, sharding)


def checksum(params: Mapping[str, jax.Array]) -> dict[str, int]:
    """A number per array that depends on every bit and its place."""
    return {name: zlib.crc32(np.asarray(x).tobytes()) for name, x in params.items()}


def largest_bucket(transition: Any) -> int:
    """Bytes per device of the largest bucket's arrays when they have arrived."""
    leaves: Callable[[int], Any] = transition.leaf
    return max(
        (sum(leaves(i).target_bytes for i in bucket) for bucket in transition.buckets), default=0
    )


def fits(devices: Sequence[jax.Device], bytes_: int) -> bool:
    """Whether arrays of so many bytes on all devices together can well be held here."""
    if devices[0].platform != "cpu":
        return bytes_ / len(devices) < 0.8 * min(map(device_memory, devices))
    return bytes_ < (free_bytes(devices[0]) or 2**32) / 2
