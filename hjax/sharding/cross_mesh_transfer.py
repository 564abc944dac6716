"""Weight sync between disjoint pools: cross-mesh transfer of parameters, in or across processes.

``hjax.sharding.transfer_plan`` says which region goes where. Every byte crosses once and arrives
fully sharded; the receiving pool then reshards with its own collectives. If one process sees both
pools, ``PoolTransition`` does everything. If each pool has its own processes, the senders call
``cut_regions_to_send``, the caller carries the regions, and the receivers use
``IncomingParameters``.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from hjax.errors import RunError
from hjax.sharded_values import ArrayRegions, Region, region_of, within
from hjax.sharding import transfer_plan
from hjax.sharding.parameter_manifest import check_manifest, manifest_of, named_leaves
from hjax.sharding.transfer_plan import RegionSend, TransferPlan, fully_sharded
from hjax.sharding.transition import BUCKET_BYTES, Transition


class PoolTransition:
    """Copies parameters to another pool's layout; the source is unchanged.

    Args:
      source: nested dict of NamedSharding on the sending pool's mesh.
      target: nested dict of NamedSharding on the receiving pool's mesh.
      shapes: nested dict of jax.ShapeDtypeStruct.
      dtypes: nested dict of the copy's dtypes, or None to keep them; cast before the transfer.
      bucket_bytes: as of ``Transition``, for resharding inside the receiving pool.
    """

    def __init__(
        self,
        source: Any,
        target: Any,
        shapes: Any,
        dtypes: Any = None,
        bucket_bytes: int = BUCKET_BYTES,
    ):
        copies = _with_dtypes(shapes, dtypes)
        self.receive_shardings = jax.tree.map(fully_sharded, target, copies)
        self.reshard = Transition(self.receive_shardings, target, copies, bucket_bytes=bucket_bytes)
        self.plan = transfer_plan.plan_tree_transfer(source, self.receive_shardings, copies)

    def __call__(self, params: Any) -> Any:
        """The parameters in the receiving pool's layout, as new arrays."""
        sends = self.plan.by_name.values()
        received = [
            self._transfer(x, sharding, sends_of_x)
            for x, sharding, sends_of_x in zip(
                jax.tree.leaves(params), jax.tree.leaves(self.receive_shardings), sends, strict=True
            )
        ]
        received = jax.tree.unflatten(jax.tree.structure(self.receive_shardings), received)
        return self.reshard.to_generate(self.reshard.start(received))

    def _transfer(
        self, x: jax.Array, receive_sharding: NamedSharding, sends: Sequence[RegionSend]
    ) -> jax.Array:
        dtype = self.plan.arrays[sends[0].name].dtype
        shards = _local_shards(sends[0].name, x, sends)
        cast = {number: shards[number].astype(dtype) for number in {s.sender for s in sends}}
        devices = receive_sharding.mesh.devices.flat
        parts: dict[int, list[tuple[Region, jax.Array]]] = {}
        for send in sends:
            cut = _slice_region(cast[send.sender], send.source_region, send.region)
            put = jax.device_put(cut, devices[send.receiver])
            parts.setdefault(send.receiver, []).append((send.region, put))
        arrays = [_assemble(parts[i], 0, x.ndim) for i in range(len(devices))]
        return jax.make_array_from_single_device_arrays(x.shape, receive_sharding, arrays)


def cut_regions_to_send(params: Any, plan: TransferPlan, process: int) -> Any:
    """The regions of its parameters that a process of the sending pool sends.

    Args:
      params: nested dict of jax.Array in the layout that the plan was made for; shards of other
        processes need not be addressable.
      plan: made with ``source_processes``.
      process: the number of this process in it.

    Returns:
      nested dict of ``ArrayRegions`` in the plan's dtypes: copies, in numpy, of the regions that
      this process sends. Merged over all processes (``hjax.sharded_values.merge``) they are the
      parameters.

    Raises:
      RunError: the parameters are not those of the plan.
    """
    arrays = named_leaves(params)
    expected = {
        name: jax.ShapeDtypeStruct(array.shape, arrays.get(name, array).dtype)  # cast on purpose
        for name, array in plan.arrays.items()
    }
    check_manifest(manifest_of(params, 0), expected)
    regions = []
    for name, x in arrays.items():
        sends = [send for send in plan.by_name[name] if send.from_process == process]
        shards = _local_shards(name, x, sends)
        dtype = plan.arrays[name].dtype
        # A region that several receivers want is cut once.
        own = {send.region: send for send in sends}
        parts = {
            region: np.asarray(shards[s.sender])[within(region, s.source_region)].astype(dtype)
            for region, s in own.items()
        }
        regions.append(ArrayRegions(x.shape, dtype, tuple(parts.items())))
    return jax.tree.unflatten(jax.tree.structure(params), regions)


class IncomingParameters:
    """Receives parameters that another pool's processes send as regions.

    Every process of the receiving pool makes one and calls it with the same regions, in the same
    order. Each process reads only the regions that overlap those of its own devices. If one
    process fails before the pool's collectives start, all of them raise, so none waits forever.

    Args:
      target: nested dict of NamedSharding on the receiving pool's mesh.
      shapes: nested dict of jax.ShapeDtypeStruct, as the parameters are sent.
      dtypes: nested dict of the dtypes to keep them in, or None for those they are sent in; cast
        before resharding inside the pool.
      bucket_bytes: as of ``Transition``, for that resharding.

    Attributes:
      receive_shardings: nested dict of NamedSharding, in which the regions are assembled.
      reshard: the transition from there to the target.
      fetched_bytes: bytes that this process read through handles in the latest call. They equal
        ``TransferPlan.received`` if the sender used ``cut_regions_to_send``. A process fetches a
        region whole even if it needs only a part of it.
    """

    def __init__(
        self, target: Any, shapes: Any, dtypes: Any = None, bucket_bytes: int = BUCKET_BYTES
    ):
        self._shapes = shapes
        self._targets = _with_dtypes(shapes, dtypes)
        self.receive_shardings = jax.tree.map(fully_sharded, target, self._targets)
        self.reshard = Transition(
            self.receive_shardings, target, self._targets, bucket_bytes=bucket_bytes
        )
        self.fetched_bytes = 0

    def __call__(self, pieces: Any) -> Any:
        """The parameters in the target's layout.

        Args:
          pieces: nested dict of ``ArrayRegions``.

        Raises:
          RunError: they are not the expected parameters, or another process failed. No parameter
            has been replaced then.
        """
        self.fetched_bytes = 0
        failure: Exception | None = None
        received: Any = None
        try:
            check_manifest(manifest_of(pieces, 0), self._shapes)
            received = jax.tree.map(self._receive, pieces, self.receive_shardings, self._targets)
        except Exception as error:
            failure = error  # raised below, with the other processes: they would wait for this one
        _raise_on_all(jax.tree.leaves(self.receive_shardings)[0].mesh, failure)
        return self.reshard.to_generate(self.reshard.start(received))

    def _receive(self, x: Any, sharding: NamedSharding, target: jax.ShapeDtypeStruct) -> jax.Array:
        if not isinstance(x, ArrayRegions):
            raise RunError(
                f"a {type(x).__name__} {list(x.shape)} is among the received parameters; "
                "send all of them as hjax.sharded_values.ArrayRegions"
            )
        parts = tuple(
            (region, data if isinstance(data, np.ndarray) else _CountedHandle(self, data))
            for region, data in x.parts
        )
        whole = ArrayRegions(x.shape, x.dtype, parts)
        read: dict[Region, np.ndarray] = {}

        def values(index: tuple[slice, ...] | None) -> np.ndarray:
            region = region_of(index or (), x.shape)
            if region not in read:
                # A copy, because JAX may keep using memory that belongs to the sender.
                read[region] = whole.read(region).astype(target.dtype)
            return read[region]

        return jax.make_array_from_callback(x.shape, sharding, values, dtype=target.dtype)


class _CountedHandle:
    """A handle that is fetched once; its bytes are counted."""

    def __init__(self, receiver: IncomingParameters, handle: Any):
        self._receiver, self._handle = receiver, handle
        self._values: np.ndarray | None = None

    def fetch(self) -> np.ndarray:
        if self._values is None:
            self._values = self._handle.fetch()
            self._receiver.fetched_bytes += self._values.nbytes
        return self._values


def _raise_on_all(mesh: Any, failure: Exception | None) -> None:
    """Raise in all processes of a mesh if one has failed (a collective).

    Raises:
      RunError: another process failed. The process that failed raises its own error.
    """
    split, whole = (NamedSharding(mesh, spec) for spec in (PartitionSpec(mesh.axis_names),
                                                           PartitionSpec()))  # fmt: skip
    if not split.is_fully_addressable:
        flag = np.full(1, failure is not None, np.int32)
        flags = jax.make_array_from_callback((mesh.size,), split, lambda _: flag, dtype=flag.dtype)
        flags_of_all = jax.jit(_identity, out_shardings=whole)(flags)
        failed = np.flatnonzero(np.asarray(flags_of_all.addressable_data(0)))
        if failure is None and failed.size:
            processes = sorted({mesh.devices.flat[i].process_index for i in failed})
            raise RunError(
                f"process {', '.join(map(str, processes))} of the receiving pool could not take "
                "its part of the parameters, so none did; its own error says why"
            )
    if failure is not None:
        raise failure


def _identity(x: jax.Array) -> jax.Array:
    return x


def _with_dtypes(shapes: Any, dtypes: Any) -> Any:
    """Abstract arrays in other dtypes; None keeps their own."""
    if dtypes is None:
        return shapes
    return jax.tree.map(lambda x, dtype: jax.ShapeDtypeStruct(x.shape, dtype), shapes, dtypes)


def _local_shards(name: str, x: jax.Array, sends: Sequence[RegionSend]) -> dict[int, jax.Array]:
    """This process's shards of an array to be sent, by the device's number in its mesh.

    Raises:
      RunError: a sender does not hold the region that the plan says.
    """
    sharding: Any = x.sharding  # ``device_regions`` refuses others
    held = transfer_plan.device_regions(sharding, x.shape)
    number = {device: i for i, device in enumerate(sharding.mesh.devices.flat)}
    for send in sends:
        if send.sender >= len(held) or held[send.sender] != send.source_region:
            raise RunError(
                f"{name} is laid out as {sharding.spec} over {dict(sharding.mesh.shape)}, but "
                f"the plan has device {send.sender} hold {send.source_region}; plan this layout"
            )
    shards = {number[shard.device]: shard.data for shard in x.addressable_shards}
    for send in sends:
        if send.sender not in shards:
            raise RunError(
                f"{name}: device {send.sender} of its mesh is to send {send.region}, but is no "
                "device of this process; plan with the processes of the mesh's devices"
            )
    return shards


def _slice_region(shard: jax.Array, held: Region, wanted: Region) -> jax.Array:
    starts = [w[0] - h[0] for w, h in zip(wanted, held, strict=True)]
    return jax.lax.slice(shard, starts, [w[1] - h[0] for w, h in zip(wanted, held, strict=True)])


def _assemble(pieces: Sequence[tuple[Region, jax.Array]], dimension: int, rank: int) -> jax.Array:
    """Concatenate regions that tile an array."""
    if dimension == rank:
        return pieces[0][1]
    rows: dict[int, list[tuple[Region, jax.Array]]] = {}
    for region, array in pieces:
        rows.setdefault(region[dimension][0], []).append((region, array))
    parts = [_assemble(rows[start], dimension + 1, rank) for start in sorted(rows)]
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=dimension)
