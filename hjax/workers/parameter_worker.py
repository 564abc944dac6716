"""A worker with a model's parameters: loading, weight sync between roles, offload, checkpoints.

``AdapterMerge`` merges a worker's LoRA adapters into their matrices for generation and weight sync.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from hjax.errors import ConfigError
from hjax.models.lora import adapted_halves, layers_of
from hjax.models.lora_compute import merge_matrices
from hjax.models.parameters import Network, Params, decoder_network, place_params, scalar_network
from hjax.models.weights import load_params, read_config
from hjax.sharded_values import ArrayRegions
from hjax.sharding.cross_mesh_transfer import (
    IncomingParameters,
    PoolTransition,
    cut_regions_to_send,
)
from hjax.sharding.layout import Layout, RoleLayouts, check_shapes, replicate_axes, shard_bytes
from hjax.sharding.offload import to_device, to_host
from hjax.sharding.parameter_manifest import (
    ParameterManifest,
    check_manifest,
    manifest_of,
    named_leaves,
)
from hjax.sharding.protocols import control
from hjax.sharding.transfer_plan import TargetRegions, plan_transfer_to, receiver_regions
from hjax.workers.worker import Worker, WorkerContext

_PARTS = ("", "_a", "_b", "_m", "_scale")  # suffixes of a matrix's parameters; not all exist


class AdapterMerge:
    """Merges LoRA adapters into their matrices, each device its own shards. Quantized matrices
    become floats.

    Args:
      network: with adapters.
      layout: of the parameters, before and after.
    """

    def __init__(self, network: Network, layout: Layout):
        assert network.config.lora is not None
        specs, lora = layers_of(network.declared), network.config.lora
        self._matrices = [n for n, p in specs.items() if p.quantized or adapted_halves(lora, n, p)]
        beside = [f"{name}{part}" for name in self._matrices for part in _PARTS]
        self._reads = [name for name in beside if name in specs]
        shardings = layers_of(network.shardings(layout))
        self._shapes = {
            name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=shardings[name])
            for name, x in layers_of(network.shapes).items()
            if name in self._reads
        }

        merge = functools.partial(merge_matrices, network=network)
        placed = {name: shardings[name] for name in self._matrices}
        self._program = jax.jit(merge, out_shardings=placed)
        self._network = network

    def __call__(self, params: Params) -> Params:
        """The parameters without adapters; float matrices without adapters are the same arrays."""
        layers, base = layers_of(params), layers_of(self._network.base.shapes)
        matrices = self._program({name: layers[name] for name in self._reads})
        return _with_layers(params, {name: layers[name] for name in base} | matrices)

    def unmerge(self, plain: Params, params: Params) -> Params:
        """The parameters with adapters again, once ``__call__``'s result was brought back.

        Args:
          plain: the merged parameters, perhaps in other arrays.
          params: those before the merge, from which adapted and quantized matrices are taken.
        """
        own = {name: x for name, x in layers_of(params).items() if name in self._reads}
        return _with_layers(plain, {**layers_of(plain), **own})

    def trace(self) -> Any:
        """The program as a jax.stages.Traced of abstract arguments."""
        return self._program.trace(self._shapes)

    def resident(self) -> Any:
        """Abstract arrays that stay in memory beside the merged ones."""
        return self._shapes


def _with_layers(tree: Params, layers: Params) -> Params:
    """The tree with its layers replaced."""
    if "decoder" in tree:
        return {**tree, "decoder": _with_layers(tree["decoder"], layers)}
    return {**tree, "layers": layers}


class ParameterWorker(Worker):
    """A worker with a model. Shapes are known at once; weights come with ``initialize``."""

    scalar = False
    layouts: RoleLayouts
    # By kind of state the attribute that holds it.
    state_attributes: Mapping[str, str] = {"params": "params"}

    def __init__(self, context: WorkerContext):
        super().__init__(context)
        if context.layouts is None:
            raise ConfigError(f"{context.role}: a model needs devices and shapes")
        self.network = self.make_network()
        train, generate = context.layouts.train, context.layouts.generate
        dimensions = self.network.dimensions
        self.unsharded_axes = check_shapes(train, dimensions, f"layout.{self.role}.train")
        narrow = check_shapes(generate, dimensions, f"layout.{self.role}.generate")
        self.layouts = RoleLayouts(
            replicate_axes(train, self.unsharded_axes), replicate_axes(generate, narrow)
        )
        train = self.layouts.train
        self.shardings = self.network.shardings(train)
        self.merge = (
            None if self.network.partition.everything else AdapterMerge(self.network, train)
        )
        self.params: Params = {}  # until initialize, take_weights or restore
        self.version: int | None = None  # of the weights taken; None: they had none
        self.fetched_bytes = 0  # by this process, in the last take_weights
        self._phase = ""

    def make_network(self) -> Network:
        """The network, without values."""
        context = self.context
        if context.model is None:
            raise ConfigError(f"{context.role}: a model needs devices and shapes")
        network = (scalar_network if self.scalar else decoder_network)(context.model)
        # What is frozen can be read again, so it is kept as it is read.
        return network.with_frozen_dtype(context.compute.dtype) if context.path else network

    @control
    def initialize(self) -> None:
        """Read the weights from the role's path, or draw them from the seed."""
        if not self.context.path:
            self.params = self.network.create(self.context.seed, self.layouts.train)
        else:
            self.params = self._read()

    def _read(self) -> Params:
        """The parameters at the role's path; adapters that no file has are drawn."""
        path, model = self.context.path, self.context.model
        assert model is not None
        found = read_config(path)
        # The run may have scaled the rotary positions, on which no shape depends.
        if model.ropes:
            found = dataclasses.replace(found, ropes=model.ropes, max_length=model.max_length)
        if found != model.base:
            raise ConfigError(f"{path}: the model's shapes changed since the run was set up")
        base = self.context.base
        step = None if base is None else base.check(path)
        return load_params(path, self.network, self.layouts.train, self.context.seed, step)

    @control
    def target_regions(self) -> TargetRegions:
        """The array regions that ``take_weights`` needs per device, for another pool's
        ``weights``."""
        return receiver_regions(self.shardings, self.network.shapes)

    @control
    def weights(self, target_regions: TargetRegions | None = None) -> Any:
        """The parameters, for another worker's ``take_weights``; wait for that before an update.

        They are lent, not copied: an update overwrites them.

        Args:
          target_regions: of a worker in other processes. It gets ``ArrayRegions``, copies cut to
            its regions, if both models have the same arrays.
        """
        params = self.without_adapters()
        if target_regions is None or target_regions.regions.keys() != named_leaves(params).keys():
            return params
        return self.weights_to_send(params, target_regions, self.network.base.shapes)

    @control
    def learned_weights(self) -> Params:
        """The trainable parameters: all of them, or adapters and a scalar head."""
        return self.network.partition.split(self.params)[0]

    @control
    def base_weights(self) -> Params:
        """The base parameters, without adapters."""
        return self.network.without_adapters_of(self.params)

    def without_adapters(self) -> Params:
        """The parameters with adapters merged into their matrices."""
        if self.merge is None:
            return self.params
        # They may wait in the host's memory.
        return self.merge(jax.tree.map(jax.device_put, self.params, self.shardings))

    def weights_to_send(self, params: Params, target_regions: TargetRegions, shapes: Params) -> Any:
        """Regions that this process's part of another pool (``cut_regions_to_send``)."""
        held = self.shardings
        if self.merge is not None:
            held = self.network.base.shardings(self.layouts.train)
        plan = plan_transfer_to(target_regions, held, shapes)
        return cut_regions_to_send(params, plan, jax.process_index())

    @control
    def take_weights(self, params: Params, manifest: ParameterManifest | None = None) -> None:
        """Copy another worker's parameters of the same shapes, whatever their layout (reshard).

        From another pool's devices every byte crosses once (``PoolTransition``). From another
        pool's processes they come as ``ArrayRegions``, of which each process reads only what its
        devices need (``IncomingParameters``).

        Args:
          params: nested dict of jax.Array, numpy arrays or ``ArrayRegions``.
          manifest: what the sender says it sends; the version must be newer than the one in use.

        Raises:
          RunError: the parameters are not those of the manifest, or regions are not this model's.
        """
        if manifest is not None:
            check_manifest(manifest_of(params, manifest.version), manifest, newer_than=self.version)
        frozen = self._reshard(self.adapted(params))
        if self.merge is not None:
            drawn = self.network.create_learned(self.context.seed, self.layouts.train)
            frozen = self.network.partition.join(drawn, frozen)
        self.params = frozen
        self.version = None if manifest is None else manifest.version

    @control
    def interpolate_weights(self, params: Params, share: float) -> None:
        """Move the parameters by a share of the way to another worker's of the same shapes.

        Args:
          params: as for ``take_weights``.
          share: above 0; 1 takes them.
        """
        taken = self._reshard(self.adapted(params))
        self.params = taken if share == 1 else interpolate(to_device(self.params), taken, share)

    def adapted(self, params: Params) -> Params:
        """Another role's parameters converted to this model's tree; with adapters to its frozen
        part."""
        return params

    def _reshard(self, params: Params) -> Params:
        """Another role's parameters, in this role's train layout and dtypes."""
        shardings, shapes = self.shardings, self.network.shapes
        if self.merge is not None:
            shardings, shapes = (self.network.partition.split(x)[1] for x in (shardings, shapes))
        dtypes = jax.tree.map(lambda x: x.dtype, shapes)
        leaves = jax.tree.leaves(params)
        if any(isinstance(x, ArrayRegions) for x in leaves):
            # Small arrays come as they are.
            params = jax.tree.map(
                lambda x: ArrayRegions.of(x) if isinstance(x, np.ndarray) else x, params
            )
            bucket = self.context.transition_bucket_bytes
            arrival = IncomingParameters(
                shardings, _in_dtypes(shapes, params), dtypes, bucket_bytes=bucket
            )
            landed: Params = arrival(params)
            self.fetched_bytes = arrival.fetched_bytes
            return landed
        if not all(isinstance(x, jax.Array) for x in leaves):
            return place_params(params, shardings, shapes)
        devices = list(self.layouts.train.mesh.devices.flat)
        if all(x.sharding.device_set.isdisjoint(devices) for x in leaves):
            source = jax.tree.map(lambda x: x.sharding, params)
            moved: Params = PoolTransition(source, shardings, shapes, dtypes)(params)
            return moved

        copies = functools.partial(cast_copies, dtypes=dtypes)
        meshes = [x.sharding.mesh for x in leaves if isinstance(x.sharding, NamedSharding)]
        if len(meshes) == len(leaves) and all(list(m.devices.flat) == devices for m in meshes):
            return jax.jit(copies, out_shardings=shardings)(params)
        # Copied first: device_put between shuffled shards shares buffers whatever may_alias says.
        return jax.tree.map(jax.device_put, jax.jit(copies)(params), shardings)

    def offloaded_state(self, phase: str, called: bool) -> set[str]:
        """Kinds of state that are on the host in a phase; ``called``: during this role's own call.

        In an update phase, state that was fetched stays on the device until the phase ends.
        """
        return set() if called or self.context.offload != "all" else {"params"}

    @control
    def offloaded_bytes(self, phase: str, called: bool) -> int:
        """Bytes per device that a phase offloads to host memory, see ``offloaded_state``."""
        away = self.offloaded_state(phase, called)
        state = self.abstract_state()
        return sum(shard_bytes(state[kind]) for kind in away)

    def apply_offload(self, phase: str, called: bool) -> None:
        """Offload what the next call does not need, fetch what it needs; called by the host."""
        self._place("params", self.offloaded_state(phase, called), phase, called)
        self._phase = phase

    def _place(self, kind: str, away: set[str], phase: str, called: bool) -> None:
        name = self.state_attributes[kind]
        if kind not in away:
            setattr(self, name, to_device(getattr(self, name)))
        elif called or phase != "update" or self._phase != "update":
            setattr(self, name, to_host(getattr(self, name)))

    def state(self) -> dict[str, Any]:
        """Everything that determines what this worker does next, as trees of arrays."""
        return {"params": self.params}

    def checkpointed(self, state: dict[str, Any]) -> dict[str, Any]:
        """A checkpoint's state: trainable parameters, and frozen ones only if no file has them."""
        if self.merge is None:
            return state
        learned, frozen = self.network.partition.split(state["params"])
        return {**state, "params": learned} | ({} if self.context.path else {"base": frozen})

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a ``checkpointed`` state."""
        self.params = state["params"]
        if self.merge is not None:
            partition = self.network.partition
            frozen = state["base"] if "base" in state else partition.split(self._read())[1]
            self.params = partition.join(self.params, frozen)

    def abstract_state(self) -> dict[str, Any]:
        """``state()`` as jax.ShapeDtypeStruct with shardings, without the numbers."""
        return {"params": abstract(self.network.shapes, self.shardings)}


def _in_dtypes(shapes: Params, sent: Params) -> Params:
    """Abstract arrays of ``shapes`` in the dtypes of the arrays sent under the same names."""
    there = named_leaves(sent)
    dtypes = [there.get(name, x).dtype for name, x in named_leaves(shapes).items()]
    leaves, structure = jax.tree.flatten(shapes)
    cast = [jax.ShapeDtypeStruct(x.shape, dtype) for x, dtype in zip(leaves, dtypes, strict=True)]
    return jax.tree.unflatten(structure, cast)


def cast_copies(params: Params, dtypes: Params) -> Params:
    """New arrays in these dtypes; jit returns an argument that is only passed through."""
    return jax.tree.map(lambda x, dtype: jnp.copy(x).astype(dtype), params, dtypes)


@functools.partial(jax.jit, donate_argnums=0)
def interpolate(params: Params, others: Params, share: float) -> Params:
    """``params`` moved by a share of the way to ``others``, in their own dtypes."""
    return jax.tree.map(lambda x, y: (x + share * (y - x)).astype(x.dtype), params, others)


def abstract(shapes: Any, shardings: Any) -> Any:
    """Shapes with shardings attached."""
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings
    )
