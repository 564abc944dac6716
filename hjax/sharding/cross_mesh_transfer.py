"""Parameters to a disjoint pool: between devices of one process, and from other processes.

What goes where is planned in ``hjax.sharding.transfer_plan``: every byte crosses once to the
landing layout, and the receiving pool shares it by explicit moves. Where one process sees both
pools, ``PoolTransition`` does it all. Where each pool has processes of its own, those of the one
``lend`` their parts, somebody carries them, and those of the other take them in
(``IncomingParameters``).
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from hjax.errors import RunError
from hjax.sharded_values import ArrayRegions, Region, region_of, within
from hjax.sharding.parameter_manifest import check, manifest_of, named_leaves
from hjax.sharding.transfer_plan import RegionSend, TransferPlan, regions, spread, tree_crossing
from hjax.sharding.transition import BUCKET_BYTES, Transition


class PoolTransition:
    """Copies parameters to another pool's layout; the source stays as it is.

    Args:
      source: nested dict of NamedSharding on the one pool's mesh.
      target: nested dict of NamedSharding on the other's.
      shapes: nested dict of jax.ShapeDtypeStruct.
      dtypes: nested dict of the copy's dtypes, or None to keep them; cast before they cross.
      bucket_bytes: as of ``Transition``, for the moves within the other pool.
    """

    def __init__(
        self,
        source: Any,
        target: Any,
        shapes: Any,
        dtypes: Any = None,
        bucket_bytes: int = BUCKET_BYTES,
    ):
        copies = _recast(shapes, dtypes)
        self.landing = jax.tree.map(spread, target, copies)
        self.within = Transition(self.landing, target, copies, bucket_bytes=bucket_bytes)
        self.crossing = tree_crossing(source, self.landing, copies)

    def __call__(self, params: Any) -> Any:
        """The parameters in the other pool's layout, all of them new arrays there."""
        sends = self.crossing.by_name.values()
        landed = [
            self._cross(x, landing, planned)
            for x, landing, planned in zip(
                jax.tree.leaves(params), jax.tree.leaves(self.landing), sends, strict=True
            )
        ]
        landed = jax.tree.unflatten(jax.tree.structure(self.landing), landed)
        return self.within.advance(self.within.start(landed))

    def _cross(
        self, x: jax.Array, landing: NamedSharding, sends: Sequence[RegionSend]
    ) -> jax.Array:
        dtype = self.crossing.cargo[sends[0].name].dtype
        shards = _shards(sends[0].name, x, sends)
        cast = {number: shards[number].astype(dtype) for number in {s.sender for s in sends}}
        devices = landing.mesh.devices.flat
        parts: dict[int, list[tuple[Region, jax.Array]]] = {}
        for send in sends:
            cut = _cut(cast[send.sender], send.held, send.region)
            put = jax.device_put(cut, devices[send.receiver])
            parts.setdefault(send.receiver, []).append((send.region, put))
        arrays = [_assemble(parts[i], 0, x.ndim) for i in range(len(devices))]
        return jax.make_array_from_single_device_arrays(x.shape, landing, arrays)


def lend(params: Any, crossing: TransferPlan, process: int) -> Any:
    """What a process of the sending pool gives of its parameters.

    Args:
      params: nested dict of jax.Array in the layout that the plan was made for; the other
        processes' devices may be out of reach.
      crossing: the plan, with ``source_processes``.
      process: the number of this one in it.

    Returns:
      nested dict of ``ArrayRegions`` in the plan's dtypes: the parts, in numpy, that this process
      sends, copied. Those of all processes (``hjax.sharded_values.merge``) make up the parameters.

    Raises:
      RunError: the parameters are not those of the plan.
    """
    arrays = named_leaves(params)
    expected = {
        name: jax.ShapeDtypeStruct(cargo.shape, arrays.get(name, cargo).dtype)  # cast on purpose
        for name, cargo in crossing.cargo.items()
    }
    check(manifest_of(params, 0), expected)
    given = []
    for name, x in arrays.items():
        sends = [send for send in crossing.by_name[name] if send.from_process == process]
        shards = _shards(name, x, sends)
        dtype = crossing.cargo[name].dtype
        # The same region goes to whoever wants it, and is lent once.
        own = {send.region: send for send in sends}
        parts = {
            region: np.asarray(shards[send.sender])[within(region, send.held)].astype(dtype)
            for region, send in own.items()
        }
        given.append(ArrayRegions(x.shape, dtype, tuple(parts.items())))
    return jax.tree.unflatten(jax.tree.structure(params), given)


class IncomingParameters:
    """Takes parameters in that come in pieces from another pool's processes.

    Every process of the receiving pool makes one and calls it with the same pieces, in the same
    order; each reads those that overlap its own devices' landing regions and no others. If one of
    them fails before the pool's collectives begin, all of them raise, and none waits for another.

    Args:
      target: nested dict of NamedSharding on the receiving pool's mesh.
      shapes: nested dict of jax.ShapeDtypeStruct, as the pieces are to come.
      dtypes: nested dict of the dtypes to keep them in, or None for those they come in; cast
        before the moves within the pool.
      bucket_bytes: as of ``Transition``, for these moves.

    Attributes:
      landing: nested dict of NamedSharding, in which the pieces are put together.
      within: the moves from there to the target.
      fetched_bytes: that this process has read through handles in the latest call. They are those
        of the plan (``TransferPlan.received``) where the sender cut its parts by it (``lend``); of
        a part that several processes need in part, each fetches all.
    """

    def __init__(
        self, target: Any, shapes: Any, dtypes: Any = None, bucket_bytes: int = BUCKET_BYTES
    ):
        self._shapes = shapes
        self._kept = _recast(shapes, dtypes)
        self.landing = jax.tree.map(spread, target, self._kept)
        self.within = Transition(self.landing, target, self._kept, bucket_bytes=bucket_bytes)
        self.fetched_bytes = 0

    def __call__(self, pieces: Any) -> Any:
        """The parameters in the target's layout.

        Args:
          pieces: nested dict of ``ArrayRegions``.

        Raises:
          RunError: they are not the expected parameters, or another process failed. Nothing has
            been used then.
        """
        self.fetched_bytes = 0
        failure: Exception | None = None
        landed: Any = None
        try:
            check(manifest_of(pieces, 0), self._shapes)
            landed = jax.tree.map(self._land, pieces, self.landing, self._kept)
        except Exception as error:
            failure = error  # told to the other processes first: they would wait for this one
        _agree(jax.tree.leaves(self.landing)[0].mesh, failure)
        return self.within.advance(self.within.start(landed))

    def _land(self, x: Any, landing: NamedSharding, kept: jax.ShapeDtypeStruct) -> jax.Array:
        if not isinstance(x, ArrayRegions):
            raise RunError(
                f"a {type(x).__name__} {list(x.shape)} is among parameters that come in pieces; "
                "send all of them as hjax.sharded_values.ArrayRegions"
            )
        parts = tuple(
            (region, data if isinstance(data, np.ndarray) else _Fetched(self, data))
            for region, data in x.parts
        )
        whole = ArrayRegions(x.shape, x.dtype, parts)
        read: dict[Region, np.ndarray] = {}

        def numbers(index: tuple[slice, ...] | None) -> np.ndarray:
            region = region_of(index or (), x.shape)
            if region not in read:
                # A copy, because JAX may go on using memory that was only lent.
                read[region] = whole.read(region).astype(kept.dtype)
            return read[region]

        return jax.make_array_from_callback(x.shape, landing, numbers, dtype=kept.dtype)


class _Fetched:
    """A handle that is fetched once and counted."""

    def __init__(self, arrival: IncomingParameters, handle: Any):
        self._arrival, self._handle = arrival, handle
        self._numbers: np.ndarray | None = None

    def fetch(self) -> np.ndarray:
        if self._numbers is None:
            self._numbers = self._handle.fetch()
            self._arrival.fetched_bytes += self._numbers.nbytes
        return self._numbers


def _agree(mesh: Any, failure: Exception | None) -> None:
    """Raise in all processes of a mesh if one has failed.

    Raises:
      RunError: another process has; this one raises its own error.
    """
    split, whole = (NamedSharding(mesh, spec) for spec in (PartitionSpec(mesh.axis_names),
                                                           PartitionSpec()))  # fmt: skip
    if not split.is_fully_addressable:
        flag = np.full(1, failure is not None, np.int32)
        flags = jax.make_array_from_callback((mesh.size,), split, lambda _: flag, dtype=flag.dtype)
        told = jax.jit(_same, out_shardings=whole)(flags)
        failed = np.flatnonzero(np.asarray(told.addressable_data(0)))
        if failure is None and failed.size:
            processes = sorted({mesh.devices.flat[i].process_index for i in failed})
            raise RunError(
                f"process {', '.join(map(str, processes))} of the receiving pool could not take "
                "its part of the parameters, so none did; its own error says why"
            )
    if failure is not None:
        raise failure


def _same(x: jax.Array) -> jax.Array:
    return x


def _recast(shapes: Any, dtypes: Any) -> Any:
    """Abstract arrays in other dtypes; None: in their own."""
    if dtypes is None:
        return shapes
    return jax.tree.map(lambda x, dtype: jax.ShapeDtypeStruct(x.shape, dtype), shapes, dtypes)


def _shards(name: str, x: jax.Array, sends: Sequence[RegionSend]) -> dict[int, jax.Array]:
    """The shards at hand of an array that is to be sent, by the device's number in its mesh.

    Raises:
      RunError: a sender does not hold what the plan says it holds.
    """
    sharding: Any = x.sharding  # on a mesh, or ``regions`` says so
    held = regions(sharding, x.shape)
    number = {device: i for i, device in enumerate(sharding.mesh.devices.flat)}
    for send in sends:
        if send.sender >= len(held) or held[send.sender] != send.held:
            raise RunError(
                f"{name} is laid out as {sharding.spec} over {dict(sharding.mesh.shape)}, but "
                f"the plan has device {send.sender} hold {send.held}; make a plan of this layout"
            )
    shards = {number[shard.device]: shard.data for shard in x.addressable_shards}
    for send in sends:
        if send.sender not in shards:
            raise RunError(
                f"{name}: device {send.sender} of its mesh is to send {send.region}, but is no "
                "device of this process; plan with the processes of the mesh's devices"
            )
    return shards


def _cut(shard: jax.Array, held: Region, wanted: Region) -> jax.Array:
    starts = [w[0] - h[0] for w, h in zip(wanted, held, strict=True)]
    stops = [w[1] - h[0] for w, h in zip(wanted, held, strict=True)]
    return jax.lax.slice(shard, starts, stops)


def _assemble(pieces: Sequence[tuple[Region, jax.Array]], dimension: int, rank: int) -> jax.Array:
    """Pieces of a grid as one array."""
    if dimension == rank:
        return pieces[0][1]
    rows: dict[int, list[tuple[Region, jax.Array]]] = {}
    for region, array in pieces:
        rows.setdefault(region[dimension][0], []).append((region, array))
    parts = [_assemble(rows[start], dimension + 1, rank) for start in sorted(rows)]
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=dimension)
