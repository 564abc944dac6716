"""Cost of the transition (reshard, weight sync): the paper's Table 2, analytic and measured.

Measured figures are counted on compiled programs. For more devices than can be simulated they are
computed from the layouts' reshard plan, for hjax's own method; other methods then have the paper's
formulas alone.
"""

import dataclasses
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from hjax.dryrun.gather_all_baseline import GatherAndCut
from hjax.dryrun.transition_groups import (
    Table2Case,
    case_layouts,
    holdings,
    stage_groups,
    table2,
    zero_sharding,
)
from hjax.errors import ConfigError
from hjax.machine import device_memory, free_bytes
from hjax.models.model_config import ModelConfig
from hjax.models.parameters import decoder_network
from hjax.sharding.layout import RoleLayouts, fit_layout
from hjax.sharding.live_memory import PeakWatch
from hjax.sharding.transfer_buckets import ReshardLeaf, plan_leaf
from hjax.sharding.transition import BUCKET_BYTES, Transition
from hjax.xla.collectives import received_bytes

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


def built_in(case: Table2Case) -> ModelConfig:
    """``BUILT_IN``, enlarged so that a case's sizes divide it."""
    heads = math.lcm(BUILT_IN.heads, case.tensor)
    return dataclasses.replace(
        BUILT_IN,
        layers=math.lcm(BUILT_IN.layers, case.pipe),
        heads=heads,
        kv_heads=heads,
        vocab_size=math.lcm(BUILT_IN.vocab_size, case.tensor),
        mlp_size=math.lcm(BUILT_IN.mlp_size, case.tensor),
    )


@dataclasses.dataclass(frozen=True, eq=False)
class TransitionCase:
    """A case on devices: the parameters that are resharded, with shardings and shapes.

    Attributes:
      source, target: by name, NamedSharding of the parameters split over all training shards.
      shapes: by name, jax.ShapeDtypeStruct.
      others: source, target and shapes of the remaining parameters, under these names.
      layouts: of both stages.
    """

    source: dict[str, Any]
    target: dict[str, Any]
    shapes: dict[str, Any]
    others: dict[str, dict[str, Any]]
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


def lay_out(
    case: Table2Case, method: str, devices: Sequence[jax.Device], leaves: Leaves
) -> TransitionCase:
    """Shardings of a model's parameters for a case.

    Raises:
      ConfigError: sizes that do not divide the parameters', by name.
    """
    layouts = _fitted(case_layouts(devices, case, method), leaves)
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

    def only(wanted: bool) -> dict[str, Any]:
        trees = {"source": before, "target": after, "shapes": shapes}
        return {
            key: {name: x for name, x in tree.items() if (name in counted) == wanted}
            for key, tree in trees.items()
        }

    return TransitionCase(**only(True), others=only(False), layouts=layouts)


def _fitted(layouts: RoleLayouts, leaves: Leaves) -> RoleLayouts:
    """Layouts checked and fitted to the sizes of the arrays' axes (``layout.fit_layout``)."""
    sizes = {name: n for axes, x in leaves.values() for name, n in zip(axes, x.shape)}
    sizes = {name: n for name, n in sizes.items() if layouts.train.rules[name]}
    return RoleLayouts(
        fit_layout(layouts.train, sizes, "--train"),
        fit_layout(layouts.generate, sizes, "--generate"),
    )


def _parts(sharding: Any, x: Any) -> int:
    """Number of different shards of an array."""
    return math.prod(x.shape) // math.prod(sharding.shard_shape(x.shape))


def measure(
    case: Table2Case, method: str, setup: TransitionCase, bucket_bytes: int, dtype: str = "float32"
) -> dict[str, Any]:
    """Measure a transition: compile it, and run it there and back if it fits into memory.

    Args:
      case, method, setup: the parameters, and how they are resharded.
      bucket_bytes: of a bucket.
      dtype: of the generation copy (``hybridflow`` only); the masters stay in float32.

    Returns:
      ``analytic`` and ``measured`` fractions of ``model_bytes`` per device, and further details. If
      the transition is not run (``executed`` is false), communication still comes from the compiled
      programs, while peak and redundancy follow from shapes. With a narrower dtype ``analytic`` is
      the paper's figure times the dtype's share of the bytes.

    Raises:
      ConfigError: a dtype other than float32 for a method that does not cast.
    """
    narrow = np.dtype(jax.dtypes.canonicalize_dtype(dtype))
    transition = _transition(method, setup, bucket_bytes, dtype)
    cost, total = transition.cost(), setup.model_bytes
    devices = list(setup.layouts.train.mesh.devices.ravel())
    executed = fits(devices, case.devices * (cost.peak + cost.temporary))
    peak, redundant = cost.peak, cost.redundant
    if executed:
        peak, redundant = run_transition(transition, setup, devices, cost.target, narrow)
    # Masters are optimizer state, so they are not counted in generation's memory.
    peak, redundant = peak - executed * cost.masters, redundant - executed * cost.masters
    found = stage_groups(setup.layouts)
    return {
        **_row(case, method, dtype, total),
        "compiled": True,
        "masters_bytes": cost.masters,
        "groups": found["generate"],
        "train_groups": found["train"],
        "measured": {
            "communication": cost.received / total,
            "peak": peak / total,
            "redundancy": redundant / total,
        },
        "executed": executed,
        "back_bytes": cost.received_back,
        "bucket_bytes": largest_bucket(transition),
        "buckets": cost.buckets,
        "temporary_bytes": cost.temporary,
        "unsharded": {
            name: math.prod(x.shape) * x.dtype.itemsize
            for name, x in setup.others["shapes"].items()
        },
        "holdings": [
            [sorted(parts) for parts in holdings(layout.sharding("layers", "heads"), case)]
            for layout in (setup.layouts.train, setup.layouts.generate)
        ],
    }


def _transition(
    method: str, setup: TransitionCase, bucket_bytes: int, dtype: str
) -> Transition | GatherAndCut:
    if method == "hybridflow":
        dtypes = dict.fromkeys(setup.shapes, np.dtype(jax.dtypes.canonicalize_dtype(dtype)))
        return Transition(setup.source, setup.target, setup.shapes, dtypes, bucket_bytes)
    if dtype != "float32":
        raise ConfigError(f"--dtype={dtype} is of --method=hybridflow, the others keep float32")
    return GatherAndCut(setup.source, setup.target, setup.shapes, bucket_bytes)


def _row(case: Table2Case, method: str, dtype: str, model_bytes: int) -> dict[str, Any]:
    """The entries that all descriptions share."""
    share = np.dtype(jax.dtypes.canonicalize_dtype(dtype)).itemsize / np.dtype("float32").itemsize
    return {
        "method": method,
        "dtype": dtype,
        "train": [case.pipe, case.tensor, case.data],
        "generate": [case.generate_pipe, case.generate_tensor],
        "devices": case.devices,
        "model_bytes": model_bytes,
        "analytic": {key: value * share for key, value in table2(case, method).items()},
    }


def describe(
    case: Table2Case,
    method: str,
    devices: Sequence[jax.Device],
    model: ModelConfig,
    name: str,
    dtype: str = "float32",
) -> dict[str, Any]:
    """What ``python -m hjax.launch.transition --json`` prints, and the shards that ranks hold."""
    setup = lay_out(case, method, devices, model_leaves(model))
    bucket = max(1, min(BUCKET_BYTES, setup.model_bytes // case.generate_shards // 16))
    found = measure(case, method, setup, bucket, dtype)
    others = Transition(**setup.others, bucket_bytes=bucket).cost()
    if method != "hybridflow":
        found["resharded"] = resharded(setup)
    return {"model": name, **found, "unsharded_received_bytes": others.received}


def resharded(setup: TransitionCase) -> dict[str, float]:
    """Baseline: reshard the same arrays by a compiled identity program with ``out_shardings``.

    Returns:
      fractions of ``model_bytes`` per device: ``communication``, received by the compiled program;
      ``redundancy``, the part of a device's training shards that its generation shards do not
      contain, the largest over devices, computed from shard indices.
    """
    arrays = {
        name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=setup.source[name])
        for name, x in setup.shapes.items()
    }

    def same(tree: Any) -> Any:
        return tree

    compiled = jax.jit(same, out_shardings=setup.target).lower(arrays).compile()
    outside: dict[Any, int] = {}
    for name, x in setup.shapes.items():
        before, after = (
            s.devices_indices_map(x.shape) for s in (setup.source[name], setup.target[name])
        )
        for device, held in before.items():
            ranges = [
                [part.indices(n)[:2] for part, n in zip(index, x.shape, strict=True)]
                for index in (held, after[device])
            ]
            own = math.prod(stop - start for start, stop in ranges[0])
            common = math.prod(
                max(0, min(a[1], b[1]) - max(a[0], b[0])) for a, b in zip(*ranges, strict=True)
            )
            outside[device] = outside.get(device, 0) + (own - common) * x.dtype.itemsize
    total = setup.model_bytes
    return {
        "communication": received_bytes(compiled.as_text() or "") / total,
        "redundancy": max(outside.values(), default=0) / total,
    }


def run_transition(
    transition: Any,
    setup: TransitionCase,
    devices: Sequence[jax.Device],
    target: int,
    dtype: np.dtype | None = None,
) -> tuple[int, int]:
    """Run a transition there and back; returns peak bytes per device, and redundant ones.

    Raises:
      RuntimeError: parameters whose values changed.
    """
    watch = PeakWatch(devices)
    params = {name: _numbered_array(setup.shapes[name], s) for name, s in setup.source.items()}
    before = checksum(params)
    narrow = before
    if dtype is not None:
        narrow = checksum({name: np.asarray(x).astype(dtype) for name, x in params.items()})
    held = transition.start(params)
    there = transition.to_generate(held, watch)
    redundant = watch() - target
    if checksum(there) != narrow:
        raise RuntimeError("parameters changed on the way to the generate layout")
    del there
    params = transition.to_train(held, watch)
    if checksum(params) != before:
        raise RuntimeError("parameters changed on the way back")
    return watch.peak, redundant


def _numbered_array(shape: Any, sharding: Any) -> jax.Array:
    """A float32 array of this shape with the values 0, 1, 2, ..."""
    values = np.arange(math.prod(shape.shape), dtype=np.float32).reshape(shape.shape)
    return jax.device_put(values, sharding)


def checksum(params: Mapping[str, Any]) -> dict[str, int]:
    """A checksum per array, of every bit and its place."""
    return {name: zlib.crc32(np.asarray(x).tobytes()) for name, x in params.items()}


def largest_bucket(transition: Any) -> int:
    """Bytes per device of the largest bucket's arrays in the generate layout."""
    leaves: Callable[[int], Any] = transition.leaf
    return max(
        (sum(leaves(i).target_bytes for i in bucket) for bucket in transition.buckets), default=0
    )


def fits(devices: Sequence[jax.Device], bytes_: int) -> bool:
    """Whether arrays of so many bytes over all devices fit into memory with a margin."""
    if devices[0].platform != "cpu":
        return bytes_ / len(devices) < 0.8 * min(map(device_memory, devices))
    return bytes_ < (free_bytes(devices[0]) or 2**32) / 2


def describe_counted(
    case: Table2Case, method: str, model: ModelConfig, name: str, dtype: str = "float32"
) -> dict[str, Any]:
    """``describe`` from layouts alone, for more devices than can be simulated.

    Returns:
      ``measured`` is None if the method is not hjax's own. Otherwise ``communication`` is that of
      the reshard plan, and ``peak`` the bytes in the generate layout. There are no groups.

    Raises:
      ConfigError: sizes that do not divide the parameters', by name.
    """
    leaves = model_leaves(model)
    layouts = _fitted(case.layouts(case.devices), leaves)
    cast = np.dtype(jax.dtypes.canonicalize_dtype(dtype))
    counted: list[ReshardLeaf] = []
    others: dict[str, int] = {}
    for leaf, (axes, x) in leaves.items():
        both = (layouts.train, layouts.generate)
        before, after = (layout.sharding(*axes) for layout in both)
        planned = plan_leaf(leaf, x.shape, np.dtype(x.dtype), cast, before, after)
        whole = math.prod(x.shape) * np.dtype(x.dtype).itemsize
        if whole == planned.source_bytes * case.shards:
            counted.append(planned)
        else:
            others[leaf] = whole
    if not counted:
        raise ConfigError(f"no parameter of this model divides over {case.shards} training shards")
    total = sum(leaf.source_bytes for leaf in counted) * case.shards
    measured = None
    if method == "hybridflow":
        measured = {
            "communication": sum(leaf.received_bytes or 0 for leaf in counted) / total,
            "peak": sum(leaf.target_bytes for leaf in counted) / total,
            "redundancy": 0.0,
        }
    return {
        "model": name,
        **_row(case, method, dtype, total),
        "measured": measured,
        "compiled": False,
        "executed": False,
        "unsharded": others,
    }
