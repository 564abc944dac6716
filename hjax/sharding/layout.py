"""Layouts: a factored device mesh plus a rule table from logical to mesh axes.

A role has one mesh and two rule tables. The train rules use compound axes, e.g.
``('tensor', 'tensor_micro')``, with the generation axis major. The generate rules split the batch
over the micro axes instead. So the 3D-HybridEngine (HybridFlow, arXiv 2409.19256, section 5) is a
change of PartitionSpec on one mesh: an all-gather over the micro axes, and a local slice back.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from hjax.errors import ConfigError
from hjax.kernels.kernel_sharding import KernelSharding
from hjax.sharding.device_mesh import place_devices
from hjax.sharding.reshard_plan import spec_of
from hjax.xla.compiler_flags import compiler_options

# Major to minor: the paper's rank (d * p + P) * t + T, with the micro axes consecutive ranks.
MESH_AXES = ("data", "fsdp", "expert", "context", "pipe", "pipe_micro", "tensor", "tensor_micro")

Rules = Mapping[str, tuple[str, ...]]

TRAIN_RULES: Rules = {
    "batch": ("data", "fsdp", "expert"),
    "length": ("context",),
    "layers": ("pipe", "pipe_micro"),
    "experts": ("expert",),
    "whole_experts": ("expert", "fsdp"),
    "pair": (),
    "embed": ("fsdp",),
    "heads": ("tensor", "tensor_micro"),
    "kv_heads": ("tensor", "tensor_micro"),
    "head_dim": (),
    "mlp": ("tensor", "tensor_micro"),
    "vocab": ("tensor", "tensor_micro"),
    "positions": (),
    "rank": (),
}
GENERATE_RULES: Rules = {
    **TRAIN_RULES,
    "batch": ("data", "fsdp", "expert", "context", "pipe_micro", "tensor_micro"),
    "length": (),
    "layers": ("pipe",),
    "whole_experts": ("expert",),
    "embed": (),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "mlp": ("tensor",),
    "vocab": ("tensor",),
}


@dataclasses.dataclass(frozen=True, eq=False)
class Layout:
    """A mesh, and rules that say over which mesh axes each logical axis is split.

    Attributes:
      sparsecore: whether collectives may run on SparseCores, where devices have them.
    """

    mesh: Mesh | AbstractMesh
    rules: Rules
    sparsecore: bool = True

    def axes(self, logical_axis: str) -> tuple[str, ...]:
        """The mesh axes larger than 1 that split a dimension of this logical name."""
        return tuple(a for a in self._axes(logical_axis) if self.mesh.shape[a] > 1)

    def spec(self, logical_axes: Sequence[str | None]) -> PartitionSpec:
        """PartitionSpec of an array whose dimensions have these logical names (None: not split)."""
        return spec_of(tuple(() if name is None else self.axes(name) for name in logical_axes))

    def _axes(self, name: str) -> tuple[str, ...]:
        if name not in self.rules:
            raise ConfigError(
                f"unknown logical axis {name!r}; the layout knows {', '.join(self.rules)}"
            )
        return self.rules[name]

    def sharding(self, *logical_axes: str | None) -> NamedSharding:
        """NamedSharding of an array whose dimensions have these logical names."""
        return NamedSharding(self.mesh, self.spec(logical_axes))

    def constrain(self, x: jax.Array, *logical_axes: str | None) -> jax.Array:
        """Inside jit: a sharding constraint by the rules. Without effect on one device.

        Inside a ``shard_map`` over some of the axes it constrains the others.
        """
        if self.mesh.size == 1:
            return x
        inside = jax.sharding.get_abstract_mesh()
        mesh = self.mesh if inside.empty else inside
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, self.spec(logical_axes)))

    def split_micro_batches(self, x: jax.Array, pieces: int) -> jax.Array:
        """Micro-batches: [rows, ...] -> [pieces, rows / pieces, ...], inside jit.

        Every device splits its own rows, so no row moves; ``merge_micro_batches`` restores their
        order. A scalar, which holds for all rows, is repeated for each piece.
        """
        if x.ndim == 0:
            return jnp.broadcast_to(x, (pieces,))
        shards = self.shard_count("batch")
        local = x.shape[0] // (shards * pieces)
        x = x.reshape(shards, pieces, local, *x.shape[1:]).swapaxes(0, 1)
        return self.constrain(x.reshape(pieces, shards * local, *x.shape[3:]), None, "batch")

    def merge_micro_batches(self, x: jax.Array) -> jax.Array:
        """Undo ``split_micro_batches``: [pieces, rows, ...] -> [pieces * rows, ...]."""
        shards = self.shard_count("batch")
        pieces, rows = x.shape[:2]
        x = x.reshape(pieces, shards, rows // shards, *x.shape[2:]).swapaxes(0, 1)
        return self.constrain(x.reshape(pieces * rows, *x.shape[3:]), "batch")

    def shard_count(self, logical_axis: str) -> int:
        """The number of parts into which the rules split a dimension of this logical name."""
        return math.prod(self.mesh.shape[a] for a in self._axes(logical_axis))

    @property
    def kernel_sharding(self) -> KernelSharding:
        """The mesh axes by which kernels in ``shard_map`` split their arrays."""
        names = ("length", "heads", "kv_heads", "vocab", "embed")
        axes = {name: self.axes(name) for name in names}
        return KernelSharding(self.mesh, rows=self.axes("batch"), **axes)

    @property
    def replicated(self) -> NamedSharding:
        """The sharding of an array that is replicated on every device."""
        return NamedSharding(self.mesh, PartitionSpec())

    @property
    def platform(self) -> str:
        """The platform of the devices, as JAX names it: ``cpu``, ``tpu``, ``gpu``, ..."""
        return self.mesh.devices.flat[0].platform

    @property
    def compiler_options(self) -> dict[str, Any] | None:
        """``compiler_options`` of ``jax.jit`` for programs in this layout."""
        device = self.mesh.devices.flat[0]
        return compiler_options(
            device.platform,
            device.device_kind,
            heads_split=self.shard_count("heads") > 1,
            sparsecore=self.sparsecore,
        )

    def describe(self) -> dict[str, int]:
        """Sizes of the mesh axes larger than 1."""
        return {a: n for a, n in self.mesh.shape.items() if n > 1}


@dataclasses.dataclass(frozen=True, eq=False)
class RoleLayouts:
    """The layouts of one role: one mesh under the train and the generate rules."""

    train: Layout
    generate: Layout


def resolve_sizes(sizes: Mapping[str, int], devices: int, what: str) -> dict[str, int]:
    """Fill in the axis whose size is -1 so that the product is ``devices``.

    Raises:
      ConfigError: an unknown axis, two axes of -1, or a product that does not give ``devices``.
    """
    sizes = dict(sizes)
    for axis, size in sizes.items():
        if axis not in MESH_AXES or axis.endswith("_micro"):
            allowed = ", ".join(a for a in MESH_AXES if not a.endswith("_micro"))
            raise ConfigError(f"{what}: unknown mesh axis {axis!r}; allowed: {allowed}")
        if size == 0 or size < -1:
            raise ConfigError(f"{what}.{axis}={size}: a size of 1 or more, or -1 for the rest")
    free = [axis for axis, size in sizes.items() if size == -1]
    if len(free) > 1:
        raise ConfigError(f"{what}: only one axis may be -1, not {' and '.join(free)}")
    fixed = math.prod(size for size in sizes.values() if size != -1)
    if free:
        if devices % fixed:
            others = {axis: size for axis, size in sizes.items() if size != -1}
            raise ConfigError(
                f"{what}: {_product(others)} does not divide {devices} devices; beside "
                f"{free[0]}=-1 the product may be {_divisors(devices)}"
            )
        sizes[free[0]] = devices // fixed
    elif fixed != devices:
        raise ConfigError(
            f"{what}: {_product(sizes)} = {fixed}, but there are {devices} devices; "
            f"set one axis to -1 to take what is left over"
        )
    return sizes


def _product(sizes: Mapping[str, int]) -> str:
    return " x ".join(f"{a}={n}" for a, n in sizes.items() if n != 1) or "1"


def _divisors(n: int) -> str:
    return ", ".join(str(i) for i in range(1, n + 1) if n % i == 0)


def make_layouts(
    devices: Sequence[jax.Device] | int,
    train: Mapping[str, int] | None = None,
    generate: Mapping[str, int] | None = None,
    what: str = "layout",
    sparsecore: bool = True,
) -> RoleLayouts:
    """The layouts of a role on ``devices``.

    Args:
      devices: ordered by their interconnect (``hjax.sharding.device_mesh``); simulated ones keep
        their order. A device's rank is its place in the mesh, and consecutive ranks form the micro
        data-parallel groups. A number instead gives abstract layouts, which can hold no array.
      train: sizes of the mesh axes for training; -1 takes what is left over.
      generate: sizes for generation; ``tensor`` and ``pipe`` must divide the training sizes. The
        quotients become the ``tensor_micro`` and ``pipe_micro`` axes, over which generation splits
        its batch, as it does over ``context``.
      what: names the setting in errors.
      sparsecore: as of ``Layout``.

    Raises:
      ConfigError: sizes that do not divide, named, with those that would.
    """
    count = devices if isinstance(devices, int) else len(devices)
    sizes = resolve_sizes(dict(train or {"data": -1}), count, f"{what}.train")
    wanted = dict(generate or {})
    shape = dict.fromkeys(MESH_AXES, 1) | sizes
    for axis in ("tensor", "pipe"):
        whole, size = sizes.get(axis, 1), wanted.pop(axis, 1)
        size = whole if size == -1 else size
        if size < 1 or whole % size:
            raise ConfigError(
                f"{what}.generate.{axis}={size} does not divide the training size {whole}; "
                f"it may be {_divisors(whole)}"
            )
        shape[axis], shape[f"{axis}_micro"] = size, whole // size
    for axis, size in wanted.items():
        if axis not in MESH_AXES or axis.endswith("_micro"):
            raise ConfigError(
                f"{what}.generate: unknown mesh axis {axis!r}; allowed: data, tensor, pipe"
            )
        if size not in (1, -1):
            raise ConfigError(
                f"{what}.generate.{axis}={size}: generation takes only tensor and pipe; "
                "data follows from them (leave it at -1)"
            )
    lengths = tuple(shape[a] for a in MESH_AXES)
    kinds = (AxisType.Auto,) * len(MESH_AXES)
    mesh: Mesh | AbstractMesh
    if isinstance(devices, int):
        mesh = AbstractMesh(lengths, MESH_AXES, axis_types=kinds)
    else:
        placed = place_devices(devices, dict(zip(MESH_AXES, lengths)))
        mesh = Mesh(placed, MESH_AXES, axis_types=kinds)
    train_layout, generate_layout = (
        Layout(mesh, rules, sparsecore) for rules in (TRAIN_RULES, GENERATE_RULES)
    )
    return RoleLayouts(train_layout, generate_layout)


def shard_bytes(tree: Any) -> int:
    """Bytes per device of a tree of jax.ShapeDtypeStruct with shardings."""
    return sum(
        leaf.dtype.itemsize * math.prod(leaf.sharding.shard_shape(leaf.shape))
        for leaf in jax.tree.leaves(tree)
    )


def check_shapes(layout: Layout, dimensions: Mapping[str, int], what: str) -> list[str]:
    """Refuse a layout that does not divide a model's dimensions.

    Args:
      layout: to be checked.
      dimensions: size by logical axis, e.g. ``{"heads": 8, "mlp": 688}``.
      what: names the role in errors.

    Returns:
      the logical axes that are too small to split and are replicated instead (fewer KV heads than
      the tensor axis has devices).

    Raises:
      ConfigError: a dimension that does not divide, with the sizes that would.
    """
    whole = []
    for name, size in dimensions.items():
        shards = layout.shard_count(name)
        if size % shards == 0:
            continue
        if name == "kv_heads" and shards % size == 0:
            whole.append(name)
            continue
        split = [a for a in layout.rules[name] if layout.mesh.shape[a] > 1]
        axes = " x ".join(dict.fromkeys(a.removesuffix("_micro") for a in split))
        raise ConfigError(
            f"{what}: {name} of size {size} does not divide over {axes} = {shards}; "
            f"{axes} may be {_divisors(size)}"
        )
    return whole


def fit_layout(layout: Layout, dimensions: Mapping[str, int], what: str) -> Layout:
    """The layout for a model: logical axes that are too small to split are replicated.

    Args:
      layout, dimensions, what: as of ``check_shapes``.

    Raises:
      ConfigError: a dimension that does not divide.
    """
    return replicate_axes(layout, check_shapes(layout, dimensions, what))


def replicate_axes(layout: Layout, whole: Sequence[str]) -> Layout:
    """The layout with these logical axes replicated on every device."""
    if not whole:
        return layout
    return dataclasses.replace(layout, rules={**layout.rules, **{name: () for name in whole}})
