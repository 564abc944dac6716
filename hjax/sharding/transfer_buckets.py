"""Compiled reshard programs: one per transfer bucket, with explicit collectives.

Inside ``shard_map`` exactly the planned collectives run, so the bytes are those of the plan. An
array that is stacked over layers and larger than a bucket moves a few layers at a time and is
written in place, so temporaries are as large as a slice, not as the array.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from hjax.sharding.reshard_plan import ReshardMove, plan_moves, received_elements, spec_of, split_of


def leaf_name(path: Sequence[Any]) -> str:
    """A leaf's keys in its tree, with dots between them."""
    return ".".join(str(getattr(key, "key", key)) for key in path)


@dataclasses.dataclass(frozen=True)
class ReshardLeaf:
    """How one array is resharded; leaves that compare equal share a program.

    Attributes:
      name: in the tree.
      shape: of the whole array.
      dtype, target_dtype: before and after.
      source, target: shardings before and after.
      moves: the planned moves, or None if the compiler reshards it.
    """

    name: str = dataclasses.field(compare=False)
    shape: tuple[int, ...]
    dtype: Any
    target_dtype: Any
    source: NamedSharding
    target: NamedSharding
    moves: tuple[ReshardMove, ...] | None

    @property
    def source_array(self) -> jax.ShapeDtypeStruct:
        """The abstract array before."""
        return jax.ShapeDtypeStruct(self.shape, self.dtype, sharding=self.source)

    @property
    def target_array(self) -> jax.ShapeDtypeStruct:
        """The abstract array after."""
        return jax.ShapeDtypeStruct(self.shape, self.target_dtype, sharding=self.target)

    @property
    def unchanged(self) -> bool:
        """Whether sharding and dtype stay the same, so that both sides share the array."""
        same = self.source.is_equivalent_to(self.target, len(self.shape))
        return same and self.dtype == self.target_dtype

    @property
    def source_bytes(self) -> int:
        """Bytes that a device holds before."""
        return math.prod(self.source.shard_shape(self.shape)) * self.dtype.itemsize

    @property
    def target_bytes(self) -> int:
        """Bytes that a device holds after."""
        return math.prod(self.target.shard_shape(self.shape)) * self.target_dtype.itemsize

    @property
    def received_bytes(self) -> int | None:
        """Bytes that a device receives by the plan; None if the compiler reshards it."""
        if self.moves is None:
            return None
        return received_elements(self.moves) * self.target_dtype.itemsize


def plan_leaf(
    name: str,
    shape: tuple[int, ...],
    dtype: Any,
    target_dtype: Any,
    source: NamedSharding,
    target: NamedSharding,
) -> ReshardLeaf:
    """Plan the reshard of an array from ``source`` to ``target``; it is cast first."""
    moves = None
    if source.mesh == target.mesh:
        sizes = dict(source.mesh.shape)
        before, after = (split_of(s.spec, len(shape), sizes) for s in (source, target))
        moves = plan_moves(shape, before, after, sizes)
    elif source.is_equivalent_to(target, len(shape)):
        moves = ()
    dtype, target_dtype = jnp.dtype(dtype), jnp.dtype(target_dtype)
    return ReshardLeaf(name, shape, dtype, target_dtype, source, target, moves)


def fill_buckets(leaves: Sequence[ReshardLeaf], limit: int) -> list[list[ReshardLeaf]]:
    """Group leaves, largest first, into buckets of at most ``limit`` target bytes.

    A larger leaf has a bucket of its own, and so has one that the compiler reshards. The smallest
    leaves come last, because peak memory is near its highest when most targets exist.
    """
    buckets: list[list[ReshardLeaf]] = []
    bytes_left = 0
    for leaf in sorted(leaves, key=lambda leaf: -leaf.target_bytes):
        alone = leaf.moves is None
        if not buckets or alone or leaf.target_bytes > bytes_left or buckets[-1][0].moves is None:
            buckets.append([])
            bytes_left = limit
        buckets[-1].append(leaf)
        bytes_left -= leaf.target_bytes
    return buckets


@functools.lru_cache(maxsize=256)
def bucket_program(leaves: tuple[ReshardLeaf, ...], limit: int, name: str) -> BucketProgram:
    """The program of a bucket, cached for equal buckets.

    Args:
      leaves: the bucket.
      limit: bytes per device above which a stacked leaf moves in slices.
      name: under which a compilation is logged.
    """
    return BucketProgram(leaves, limit, name)


class BucketProgram:
    """Reshards the arrays of a bucket; compiled once, at first use."""

    def __init__(self, leaves: tuple[ReshardLeaf, ...], limit: int, name: str):
        self.leaves = leaves
        self._limit = limit
        self._name = name

    def __call__(self, arrays: list[jax.Array]) -> list[jax.Array]:
        """The arrays in their target shardings and dtypes."""
        if not self.leaves:
            return []
        moved: list[jax.Array] = self.compiled(arrays)
        return moved

    @functools.cached_property
    def compiled(self) -> Any:
        """The jax.stages.Compiled."""
        return self.trace().lower().compile()

    def trace(self) -> Any:
        """A jax.stages.Traced, of abstract arguments."""

        def run(arrays: list[jax.Array]) -> list[jax.Array]:
            if self.leaves[0].moves is None:
                pairs = zip(arrays, self.leaves, strict=True)
                return [x.astype(leaf.target_dtype) for x, leaf in pairs]
            return self._run_sharded(arrays)

        run.__name__ = self._name
        # Explicit output shardings: otherwise the compiler may return replicated arrays.
        return jax.jit(
            run,
            in_shardings=([leaf.source for leaf in self.leaves],),
            out_shardings=[leaf.target for leaf in self.leaves],
        ).trace([leaf.source_array for leaf in self.leaves])

    def _run_sharded(self, arrays: list[jax.Array]) -> list[jax.Array]:
        def reshard(shards: list[jax.Array]) -> list[jax.Array]:
            pairs = zip(shards, self.leaves, strict=True)
            return [_reshard_shard(x, leaf, self._limit) for x, leaf in pairs]

        mapped = jax.shard_map(
            reshard,
            mesh=self.leaves[0].source.mesh,
            in_specs=([_spec(leaf.source, leaf) for leaf in self.leaves],),
            out_specs=[_spec(leaf.target, leaf) for leaf in self.leaves],
            check_vma=False,
        )
        moved: list[jax.Array] = mapped(arrays)
        return moved


def _spec(sharding: NamedSharding, leaf: ReshardLeaf) -> Any:
    return spec_of(split_of(sharding.spec, len(leaf.shape), dict(sharding.mesh.shape)))


def _reshard_shard(x: jax.Array, leaf: ReshardLeaf, limit: int) -> jax.Array:
    """A device's source shard -> its target shard; inside ``shard_map``."""
    assert leaf.moves is not None
    rows = _slice_rows(x, leaf, limit)
    if rows == x.shape[0] if x.ndim else True:
        return _apply_moves(x.astype(leaf.target_dtype), leaf)
    # If dimension 0 is gathered too, every slice is written into each of the gathered parts.
    parts = math.prod(jax.lax.axis_size(move.axes) for move in leaf.moves if move.dimension == 0)
    shape = leaf.target.shard_shape(leaf.shape)
    out = jnp.zeros((parts, shape[0] // parts, *shape[1:]), leaf.target_dtype)

    def step(i: jax.Array, out: jax.Array) -> jax.Array:
        part = jax.lax.dynamic_slice_in_dim(x, i * rows, rows, 0)
        part = _apply_moves(part.astype(leaf.target_dtype), leaf)
        part = part.reshape(parts, rows, *shape[1:])
        return jax.lax.dynamic_update_slice_in_dim(out, part, i * rows, 1)

    return jax.lax.fori_loop(0, x.shape[0] // rows, step, out).reshape(shape)


def _slice_rows(x: jax.Array, leaf: ReshardLeaf, limit: int) -> int:
    """Rows of a device's shard to move at a time; all of them if that needs no loop."""
    assert leaf.moves is not None
    if x.ndim == 0:
        return 1
    rows = x.shape[0]
    first = [move for move in leaf.moves if 0 in (move.dimension, move.to)]
    local = all(move.kind == "slice" for move in leaf.moves)
    # An all-gather of rows alone is written in place and needs no temporary.
    direct = all(move.kind == "all_gather" for move in first) and len(leaf.moves) == len(first)
    if local or direct or any(move.kind != "all_gather" for move in first):
        return rows
    per_row = leaf.target_bytes // rows
    return max([n for n in range(1, rows + 1) if rows % n == 0 and n * per_row <= limit], default=1)


_BITS = {1: jnp.uint8, 2: jnp.uint16}


def _apply_moves(x: jax.Array, leaf: ReshardLeaf) -> jax.Array:
    # Narrow floats move as unsigned integers: a compiler may send them in a wider dtype (the CPU's
    # does, which doubles the bytes), but leaves integers alone.
    narrow = x.dtype.itemsize in _BITS and jnp.issubdtype(x.dtype, jnp.floating)
    if narrow:
        x = jax.lax.bitcast_convert_type(x, _BITS[x.dtype.itemsize])
    for move in leaf.moves or ():
        x = _MOVES[move.kind](x, move)
    return jax.lax.bitcast_convert_type(x, leaf.target_dtype) if narrow else x


def _slice(x: jax.Array, move: ReshardMove) -> jax.Array:
    size = x.shape[move.dimension] // jax.lax.axis_size(move.axes)
    start = jax.lax.axis_index(move.axes) * size
    return jax.lax.dynamic_slice_in_dim(x, start, size, move.dimension)


def _all_gather(x: jax.Array, move: ReshardMove) -> jax.Array:
    if move.dimension == 0:
        return jax.lax.all_gather(x, move.axes, axis=0, tiled=True)
    # Gathered along a new first dimension, then transposed: otherwise XLA copies the shards into
    # another layout both before and after.
    parts = jax.lax.all_gather(x, move.axes, axis=0, tiled=False)
    at = move.dimension
    shape = (*x.shape[:at], parts.shape[0] * x.shape[at], *x.shape[at + 1 :])
    return jnp.moveaxis(parts, 0, at).reshape(shape)


def _all_to_all(x: jax.Array, move: ReshardMove) -> jax.Array:
    return jax.lax.all_to_all(
        x, move.axes, split_axis=move.to, concat_axis=move.dimension, tiled=True
    )


def _permute(x: jax.Array, move: ReshardMove) -> jax.Array:
    """Send part i of the dimension to the device that holds it under the new order of axes."""
    sizes = [jax.lax.axis_size(axis) for axis in move.old_axes]
    order = [move.old_axes.index(axis) for axis in move.axes]
    pairs = []
    for source in range(math.prod(sizes)):
        # The target device: its coordinates number the part in the new order of axes.
        rest, coordinates = source, [0] * len(sizes)
        for i in reversed(order):
            rest, coordinates[i] = divmod(rest, sizes[i])
        target = 0
        for size, coordinate in zip(sizes, coordinates, strict=True):
            target = target * size + coordinate
        pairs.append((source, target))
    return jax.lax.ppermute(x, move.old_axes, pairs)


_MOVES: dict[str, Callable[[jax.Array, ReshardMove], jax.Array]] = {
    "slice": _slice,
    "all_gather": _all_gather,
    "all_to_all": _all_to_all,
    "permute": _permute,
}
