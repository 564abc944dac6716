"""Moves as compiled programs: one per bucket of arrays, with explicit collectives.

Inside ``shard_map`` exactly the planned collectives run, so that bytes are those of the plan. An
array that is stacked over layers and larger than a bucket goes a few layers at a time, written in
place: what lies between is as large as a slice, not as the array.
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

from hjax.sharding.reshard_plan import ReshardMove, plan_moves, received, spec_of, split_of


def leaf_name(path: Sequence[Any]) -> str:
    """A leaf's keys in its tree, with dots between them."""
    return ".".join(str(getattr(key, "key", key)) for key in path)


@dataclasses.dataclass(frozen=True)
class ReshardLeaf:
    """One array on its way from a sharding to another; equal ones share a program.

    Attributes:
      name: in the tree.
      shape: of the whole array.
      dtype: before; ``cast`` the one after.
      source, target: shardings before and after.
      moves: what is done, or None where that is left to the compiler.
    """

    name: str = dataclasses.field(compare=False)
    shape: tuple[int, ...]
    dtype: Any
    cast: Any
    source: NamedSharding
    target: NamedSharding
    moves: tuple[ReshardMove, ...] | None

    @property
    def before(self) -> jax.ShapeDtypeStruct:
        """The abstract array at the start."""
        return jax.ShapeDtypeStruct(self.shape, self.dtype, sharding=self.source)

    @property
    def after(self) -> jax.ShapeDtypeStruct:
        """The abstract array at the end."""
        return jax.ShapeDtypeStruct(self.shape, self.cast, sharding=self.target)

    @property
    def unmoved(self) -> bool:
        """Whether both sides are alike, so that the very same array serves."""
        same = self.source.is_equivalent_to(self.target, len(self.shape))
        return same and self.dtype == self.cast

    @property
    def source_bytes(self) -> int:
        """Bytes that a device holds before."""
        return math.prod(self.source.shard_shape(self.shape)) * self.dtype.itemsize

    @property
    def target_bytes(self) -> int:
        """Bytes that a device holds after."""
        return math.prod(self.target.shard_shape(self.shape)) * self.cast.itemsize

    @property
    def received_bytes(self) -> int | None:
        """Bytes that a device receives as planned; None where the compiler decides."""
        return None if self.moves is None else received(self.moves) * self.cast.itemsize


def plan_leaf(
    name: str,
    shape: tuple[int, ...],
    dtype: Any,
    cast: Any,
    source: NamedSharding,
    target: NamedSharding,
) -> ReshardLeaf:
    """How an array gets from ``source`` to ``target``, cast first."""
    moves = None
    if source.mesh == target.mesh:
        sizes = dict(source.mesh.shape)
        before, after = (split_of(s.spec, len(shape), sizes) for s in (source, target))
        moves = plan_moves(shape, before, after, sizes)
    elif source.is_equivalent_to(target, len(shape)):
        moves = ()
    return ReshardLeaf(name, shape, jnp.dtype(dtype), jnp.dtype(cast), source, target, moves)


def fill_buckets(leaves: Sequence[ReshardLeaf], limit: int) -> list[list[ReshardLeaf]]:
    """Leaves by size, largest first, as many to a bucket as hold ``limit`` bytes afterwards.

    A leaf that is larger has a bucket of its own, and so has one that the compiler moves. The
    smallest come last: what they leave behind is added to nearly everything that has arrived.
    """
    buckets: list[list[ReshardLeaf]] = []
    room = 0
    for leaf in sorted(leaves, key=lambda leaf: -leaf.target_bytes):
        alone = leaf.moves is None
        if not buckets or alone or leaf.target_bytes > room or buckets[-1][0].moves is None:
            buckets.append([])
            room = limit
        buckets[-1].append(leaf)
        room -= leaf.target_bytes
    return buckets


@functools.lru_cache(maxsize=256)
def bucket_program(leaves: tuple[ReshardLeaf, ...], limit: int, name: str) -> BucketProgram:
    """The program of a bucket; that of an equal one where there was one.

    Args:
      leaves: the bucket.
      limit: bytes per device above which a stacked leaf goes in slices.
      name: by which a compilation is logged.
    """
    return BucketProgram(leaves, limit, name)


class BucketProgram:
    """Moves the arrays of a bucket; compiled once, when it is first needed."""

    def __init__(self, leaves: tuple[ReshardLeaf, ...], limit: int, name: str):
        self.leaves = leaves
        self._limit = limit
        self._name = name

    def __call__(self, arrays: list[jax.Array]) -> list[jax.Array]:
        """The arrays in their targets' shardings and dtypes."""
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
                return [x.astype(leaf.cast) for x, leaf in zip(arrays, self.leaves, strict=True)]
            return self._mapped(arrays)

        run.__name__ = self._name
        # Shardings are said, not left to the compiler, which may choose to return whole arrays.
        program = jax.jit(
            run,
            in_shardings=([leaf.source for leaf in self.leaves],),
            out_shardings=[leaf.target for leaf in self.leaves],
        )
        return program.trace([leaf.before for leaf in self.leaves])

    def _mapped(self, arrays: list[jax.Array]) -> list[jax.Array]:
        def moves(shards: list[jax.Array]) -> list[jax.Array]:
            pairs = zip(shards, self.leaves, strict=True)
            return [_moved(x, leaf, self._limit) for x, leaf in pairs]

        mapped = jax.shard_map(
            moves,
            mesh=self.leaves[0].source.mesh,
            in_specs=([_spec(leaf.source, leaf) for leaf in self.leaves],),
            out_specs=[_spec(leaf.target, leaf) for leaf in self.leaves],
            check_vma=False,
        )
        moved: list[jax.Array] = mapped(arrays)
        return moved


def _spec(sharding: NamedSharding, leaf: ReshardLeaf) -> Any:
    return spec_of(split_of(sharding.spec, len(leaf.shape), dict(sharding.mesh.shape)))


def _moved(x: jax.Array, leaf: ReshardLeaf, limit: int) -> jax.Array:
    """A device's shard before -> its shard after; inside ``shard_map``."""
    assert leaf.moves is not None
    rows = _slice_rows(x, leaf, limit)
    if rows == x.shape[0] if x.ndim else True:
        return _apply(x.astype(leaf.cast), leaf)
    # Where dimension 0 is gathered too, every slice has its place in each of the gathered parts.
    parts = math.prod(jax.lax.axis_size(move.axes) for move in leaf.moves if move.dimension == 0)
    shape = leaf.target.shard_shape(leaf.shape)
    out = jnp.zeros((parts, shape[0] // parts, *shape[1:]), leaf.cast)

    def step(i: jax.Array, out: jax.Array) -> jax.Array:
        part = jax.lax.dynamic_slice_in_dim(x, i * rows, rows, 0)
        part = _apply(part.astype(leaf.cast), leaf)
        part = part.reshape(parts, rows, *shape[1:])
        return jax.lax.dynamic_update_slice_in_dim(out, part, i * rows, 1)

    return jax.lax.fori_loop(0, x.shape[0] // rows, step, out).reshape(shape)


def _slice_rows(x: jax.Array, leaf: ReshardLeaf, limit: int) -> int:
    """How many rows of a device's shard to move at a time: all, if that needs no loop."""
    assert leaf.moves is not None
    if x.ndim == 0:
        return 1
    rows = x.shape[0]
    first = [move for move in leaf.moves if 0 in (move.dimension, move.to)]
    local = all(move.kind == "slice" for move in leaf.moves)
    # A gather of rows alone is written where it belongs; nothing lies between.
    direct = all(move.kind == "all_gather" for move in first) and len(leaf.moves) == len(first)
    if local or direct or any(move.kind != "all_gather" for move in first):
        return rows
    per_row = leaf.target_bytes // rows
    fitting = [n for n in range(1, rows + 1) if rows % n == 0 and n * per_row <= limit]
    return max(fitting, default=1)


_BITS = {1: jnp.uint8, 2: jnp.uint16}


def _apply(x: jax.Array, leaf: ReshardLeaf) -> jax.Array:
    # Moved as whole numbers: a compiler may widen narrow floats that it sees travel (the CPU's
    # does, and the bytes double), and must not touch what it takes for bits.
    narrow = x.dtype.itemsize in _BITS and jnp.issubdtype(x.dtype, jnp.floating)
    if narrow:
        x = jax.lax.bitcast_convert_type(x, _BITS[x.dtype.itemsize])
    for move in leaf.moves or ():
        x = _MOVES[move.kind](x, move)
    return jax.lax.bitcast_convert_type(x, leaf.cast) if narrow else x


def _slice(x: jax.Array, move: ReshardMove) -> jax.Array:
    size = x.shape[move.dimension] // jax.lax.axis_size(move.axes)
    start = jax.lax.axis_index(move.axes) * size
    return jax.lax.dynamic_slice_in_dim(x, start, size, move.dimension)


def _all_gather(x: jax.Array, move: ReshardMove) -> jax.Array:
    if move.dimension == 0:
        return jax.lax.all_gather(x, move.axes, axis=0, tiled=True)
    # Gathered in front and then transposed: XLA would lay out the shards anew before and after.
    parts = jax.lax.all_gather(x, move.axes, axis=0, tiled=False)
    at = move.dimension
    shape = (*x.shape[:at], parts.shape[0] * x.shape[at], *x.shape[at + 1 :])
    return jnp.moveaxis(parts, 0, at).reshape(shape)


def _all_to_all(x: jax.Array, move: ReshardMove) -> jax.Array:
    return jax.lax.all_to_all(
        x, move.axes, split_axis=move.to, concat_axis=move.dimension, tiled=True
    )


def _permute(x: jax.Array, move: ReshardMove) -> jax.Array:
    """Part i of the dimension goes to the device that has it in the new order of axes."""
    sizes = [jax.lax.axis_size(axis) for axis in move.before]
    order = [move.before.index(axis) for axis in move.axes]
    pairs = []
    for source in range(math.prod(sizes)):
        # The device that is to hold this part: its coordinates count it in the new order.
        rest, coordinates = source, [0] * len(sizes)
        for i in reversed(order):
            rest, coordinates[i] = divmod(rest, sizes[i])
        target = 0
        for size, coordinate in zip(sizes, coordinates, strict=True):
            target = target * size + coordinate
        pairs.append((source, target))
    return jax.lax.ppermute(x, move.before, pairs)


_MOVES: dict[str, Callable[[jax.Array, ReshardMove], jax.Array]] = {
    "slice": _slice,
    "all_gather": _all_gather,
    "all_to_all": _all_to_all,
    "permute": _permute,
}
