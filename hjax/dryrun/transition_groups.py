"""Parallel groups of training and generation, and the closed formulas of the paper's Table 2.

HybridFlow (arXiv 2409.19256, sections 5.3 and 5.4) trains on p-t-d groups (pipeline, tensor, data)
and generates on p_g-t_g-d_g-d groups of the same devices, rank (D p + P) t + T. There are three
methods: ``hybridflow`` picks generation groups so that a device's generation shard contains its
training shard; ``vanilla`` (HybridFlow-V) groups consecutive ranks; ``gather_all``
(DeepSpeed-Chat) trains with ZeRO-3 over all devices and groups like vanilla.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from hjax.errors import ConfigError
from hjax.sharding.layout import GENERATE_RULES, MESH_AXES, Layout, RoleLayouts, make_layouts

METHODS = ("hybridflow", "vanilla", "gather_all")


@dataclasses.dataclass(frozen=True)
class Table2Case:
    """Sizes of the training and generation groups.

    Raises:
      ConfigError: a size below 1, or one of generation that does not divide training's.
    """

    pipe: int
    tensor: int
    data: int
    generate_pipe: int
    generate_tensor: int

    def __post_init__(self) -> None:
        for name, value in dataclasses.asdict(self).items():
            if value < 1:
                raise ConfigError(f"{name.replace('_', ' ')} of size {value}: 1 or more")
        for what, whole, size in (
            ("pipeline stages", self.pipe, self.generate_pipe),
            ("tensor parts", self.tensor, self.generate_tensor),
        ):
            if whole % size:
                allowed = ", ".join(str(n) for n in range(1, whole + 1) if whole % n == 0)
                raise ConfigError(
                    f"{size} {what} in generation do not divide training's {whole}; "
                    f"use one of {allowed}"
                )

    @property
    def devices(self) -> int:
        """p t d."""
        return self.pipe * self.tensor * self.data

    @property
    def shards(self) -> int:
        """Training shards of one copy of the model: p t."""
        return self.pipe * self.tensor

    @property
    def generate_shards(self) -> int:
        """Generation shards of one copy: p_g t_g."""
        return self.generate_pipe * self.generate_tensor

    @property
    def replicas(self) -> int:
        """d_g, the generation replicas that a training replica becomes."""
        return self.shards // self.generate_shards

    def layouts(self, devices: Sequence[jax.Device] | int) -> RoleLayouts:
        """HybridFlow's layouts on these devices, or on a number of devices (``make_layouts``)."""
        sizes = {"pipe": self.pipe, "tensor": self.tensor, "data": self.data}
        generate = {"pipe": self.generate_pipe, "tensor": self.generate_tensor}
        return make_layouts(devices, sizes, generate)

    def __str__(self) -> str:
        train = f"{self.pipe}-{self.tensor}-{self.data}"
        generate = f"{self.generate_pipe}-{self.generate_tensor}-{self.replicas}-{self.data}"
        return f"{train} → {generate}"


def table2(case: Table2Case, method: str) -> dict[str, float]:
    """The paper's Table 2, as fractions of the model's bytes M.

    Returns:
      ``communication`` (received per device), ``peak`` (parameter memory), ``redundancy`` (training
      weights held beside generation's).
    """
    shards = case.devices if method == "gather_all" else case.shards
    if method == "hybridflow":
        after = 1 / case.generate_shards
        return {"communication": after - 1 / shards, "peak": after, "redundancy": 0.0}
    return {"communication": 1 - 1 / shards, "peak": 1.0, "redundancy": 1 / shards}


def case_layouts(devices: Sequence[jax.Device], case: Table2Case, method: str) -> RoleLayouts:
    """Train and generate layouts of a method; ``vanilla`` generates on a mesh of its own.

    The train layout of ``gather_all`` also has the model-parallel groups; the shards that it holds
    in training are those of ``zero_sharding``.
    """
    devices = devices[: case.devices]
    if method == "hybridflow":
        return case.layouts(devices)
    same = {"generate_pipe": case.pipe, "generate_tensor": case.tensor}
    train = dataclasses.replace(case, **same).layouts(devices).train
    generate = {"pipe": case.generate_pipe, "tensor": case.generate_tensor}
    # Consecutive ranks: of q = P t + T tensor rank q mod t_g, pipe rank (q // t_g) mod p_g.
    ones = dict.fromkeys(MESH_AXES, 1)
    shape = ones | {"data": case.data, "pipe_micro": case.replicas} | generate
    order = ("data", "fsdp", "expert", "context", "tensor_micro", "pipe_micro", "pipe", "tensor")
    grid = train.mesh.devices.reshape([shape[a] for a in order])  # the same ranks
    mesh = Mesh(grid, order, axis_types=(AxisType.Auto,) * len(order))
    return RoleLayouts(train, Layout(mesh, GENERATE_RULES))


def zero_sharding(shape: tuple[int, ...], mesh: Any) -> NamedSharding | None:
    """ZeRO-3 sharding: a part of an array per device of the mesh; None if no dimension divides."""
    axes = tuple(a for a in mesh.axis_names if mesh.shape[a] > 1)
    for dimension, size in enumerate(shape):
        if size % mesh.size == 0:
            return NamedSharding(mesh, PartitionSpec(*[None] * dimension, axes or None))
    return None


def groups(layout: Layout, axes: Sequence[str]) -> list[list[int]]:
    """Groups of ranks that differ in these mesh axes only, sorted; ranks are of the train mesh."""
    mesh = layout.mesh
    last = [mesh.axis_names.index(a) for a in axes]
    first = [i for i in range(mesh.devices.ndim) if i not in last]
    size = int(np.prod([mesh.devices.shape[i] for i in last]))
    # Both kinds of mesh list the devices in the order of their ranks.
    ranks = np.arange(mesh.size).reshape(mesh.devices.shape)
    return sorted(sorted(row) for row in ranks.transpose(first + last).reshape(-1, size).tolist())


def stage_groups(layouts: RoleLayouts) -> dict[str, dict[str, list[list[int]]]]:
    """The groups of both stages, 0-based: ``train`` and ``generate``."""
    train, generate = layouts.train, layouts.generate
    return {
        "train": {
            "tensor": groups(train, ("tensor", "tensor_micro")),
            "pipe": groups(train, ("pipe", "pipe_micro")),
            "data": groups(train, ("data",)),
        },
        "generate": {
            "tensor": groups(generate, ("tensor",)),
            "pipe": groups(generate, ("pipe",)),
            "micro_data": groups(generate, ("pipe_micro", "tensor_micro")),
        },
    }


def holdings(sharding: Any, case: Table2Case) -> list[set[int]]:
    """The parts of the model, out of p t, that each rank holds; (P, T) trains part P t + T.

    Args:
      sharding: of an array [layers, heads] in a layout.
      case: the sizes.
    """
    shape = (case.pipe, case.tensor)
    held = sharding.devices_indices_map(shape)
    cells = np.arange(case.shards).reshape(shape)
    return [set(cells[held[device]].ravel().tolist()) for device in sharding.mesh.devices.ravel()]


def describe_groups(found: Mapping[str, list[list[int]]]) -> dict[str, str]:
    """Groups as short texts: ``[0 2] [1 3]``."""
    return {
        name: " ".join("[" + " ".join(map(str, group)) + "]" for group in listed)
        for name, listed in found.items()
    }


LEGEND = "█ its training shard  ▓ gathered for generation  ░ training shard kept beside  · not held"
MAX_PARTS_DRAWN = 32


def rank_marks(found: Mapping[str, Any], rank: int) -> tuple[str, str]:
    """Marks for what a rank holds before and after, one per training shard of the model."""
    before, after = (set(stage[rank]) for stage in found["holdings"])
    parts = range(found["train"][0] * found["train"][1])
    if found["method"] == "gather_all":
        before = set()  # it holds a part of every array, but no whole training shard

    def mark(part: int) -> str:
        if part in before:
            return "█" if part in after else "░"
        return "▓" if part in after else "·"

    return "".join("█" if i in before else "·" for i in parts), "".join(map(mark, parts))


def picture(found: Mapping[str, Any]) -> str:
    """A picture of the shards each rank holds, a line per rank of the first training replica.

    Args:
      found: what ``transition_cost.measure`` returns.
    """
    pipe, tensor, data = found["train"]
    parts = pipe * tensor
    if parts > MAX_PARTS_DRAWN:
        return f"(a model in {parts} shards is too wide to draw)"
    lines = [LEGEND, "rank  " + "before".ljust(max(parts, 6)) + "  after"]
    if found["method"] == "gather_all":
        lines.insert(1, f"before: each rank 1/{found['devices']} of every array (ZeRO-3), kept")
    for rank in range(parts):
        before, after = rank_marks(found, rank)
        lines.append(f"{rank:>4}  {before:<6}  {after}")
    if data > 1:
        lines.append(f"(and the same in {data - 1} more)")
    return "\n".join(lines)
