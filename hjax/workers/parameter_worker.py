"""A worker with a model's parameters: where they come from, wait and go.

``AdapterMerge`` adds a worker's adapters (LoRA) to their matrices for whoever reads the model.
"""

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
from hjax.sharding.cross_mesh_transfer import IncomingParameters, PoolTransition, lend
from hjax.sharding.layout import Layout, RoleLayouts, check_shapes, shard_bytes, without
from hjax.sharding.offload import to_device, to_host
from hjax.sharding.parameter_manifest import ParameterManifest, check, manifest_of, named_leaves
from hjax.sharding.protocols import control
from hjax.sharding.transfer_plan import TargetRegions, crossing_to, landing_of
from hjax.workers.worker import Worker, WorkerContext

_PARTS = ("", "_a", "_b", "_m", "_scale")  # of a matrix, those that there are


class AdapterMerge:
    """Adds a model's adapters to their matrices, each device its own parts of them; quantized
    matrices become floats.

    Args:
      network: with adapters.
      layout: of the parameters, before and after.
    """

    def __init__(self, network: Network, layout: Layout):
        assert network.config.lora is not None
        declared, lora = layers_of(network.declared), network.config.lora
        self._matrices = [
            n for n, p in declared.items() if p.quantized or adapted_halves(lora, n, p)
        ]
        beside = [f"{name}{part}" for name in self._matrices for part in _PARTS]
        self._reads = [name for name in beside if name in declared]
        shardings = layers_of(network.shardings(layout))
        self._shapes = {
            name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=shardings[name])
            for name, x in layers_of(network.shapes).items()
            if name in self._reads
        }

        def merge(layers: dict[str, jax.Array]) -> dict[str, jax.Array]:
            return merge_matrices(layers, network)

        placed = {name: shardings[name] for name in self._matrices}
        self._program = jax.jit(merge, out_shardings=placed)
        self._network = network

    def __call__(self, params: Params) -> Params:
        """The parameters without adapters; float matrices that have none are the same arrays."""
        layers, base = layers_of(params), layers_of(self._network.base.shapes)
        matrices = self._program({name: layers[name] for name in self._reads})
        return _with_layers(params, {name: layers[name] for name in base} | matrices)

    def restored(self, plain: Params, params: Params) -> Params:
        """The parameters with adapters, of those that ``__call__`` made and were brought back.

        Args:
          plain: as made, perhaps other arrays of the same values.
          params: that were merged; matrices with adapters and quantized ones are taken from here.
        """
        layers = layers_of(params)
        own = {name: x for name, x in layers.items() if name in self._reads}
        return _with_layers(plain, {**layers_of(plain), **own})

    def trace(self) -> Any:
        """The program, a jax.stages.Traced of abstract arguments."""
        return self._program.trace(self._shapes)

    def kept(self) -> Any:
        """Abstract arrays that stand beside the merged ones."""
        return self._shapes


def _with_layers(tree: Params, layers: Params) -> Params:
    """The tree with these layers in place of its own."""
    if "decoder" in tree:
        return {**tree, "decoder": _with_layers(tree["decoder"], layers)}
    return {**tree, "layers": layers}


class ParameterWorker(Worker):
    """A worker with a model: knows its shapes at once, gets its numbers by ``initialize``."""

    scalar = False
    layouts: RoleLayouts
    # Kinds of state, and the attributes that hold them.
    kept: Mapping[str, str] = {"params": "params"}

    def __init__(self, context: WorkerContext):
        super().__init__(context)
        if context.layouts is None or context.model is None:
            raise ConfigError(f"{context.role}: a model needs devices and shapes")
        self.network: Network = (scalar_network if self.scalar else decoder_network)(context.model)
        if context.path:  # what is frozen can be read again, so it is kept as it is read
            self.network = self.network.with_frozen_dtype(context.compute.dtype)
        train, generate = context.layouts.train, context.layouts.generate
        self.kept_whole = check_shapes(train, context.model.dimensions, f"layout.{self.role}.train")
        narrow = check_shapes(generate, context.model.dimensions, f"layout.{self.role}.generate")
        self.layouts = RoleLayouts(without(train, self.kept_whole), without(generate, narrow))
        train = self.layouts.train
        self.shardings = self.network.shardings(train)
        self.merge = (
            None if self.network.partition.everything else AdapterMerge(self.network, train)
        )
        self.params: Params = {}  # until initialize, take_weights or restore
        self.version: int | None = None  # of the weights taken; None: they came without
        self.fetched_bytes = 0  # by this process, of the weights last taken in pieces
        self._phase = ""

    @control
    def initialize(self) -> None:
        """Read the weights from the role's path, or draw them from the seed."""
        if not self.context.path:
            self.params = self.network.create(self.context.seed, self.layouts.train)
            return
        self.params = self._read()

    def _read(self) -> Params:
        """The parameters at the role's path; adapters that are not there are drawn."""
        path, model = self.context.path, self.context.model
        assert model is not None
        if read_config(path) != model.base:
            raise ConfigError(f"{path}: its shapes changed since the run was set up")
        base = self.context.base
        step = None if base is None else base.check(path)
        return load_params(path, self.network, self.layouts.train, self.context.seed, step)

    @control
    def landing(self) -> TargetRegions:
        """How ``take_weights`` has parameters arrive, for the ``weights`` of another pool's."""
        return landing_of(self.shardings, self.network.shapes)

    @control
    def weights(self, landing: TargetRegions | None = None) -> Any:
        """The parameters, for another worker's ``take_weights``; wait for that before an update.

        They are lent, not copied: an update writes over them.

        Args:
          landing: of a worker in other processes: it is given ``ArrayRegions``, copies cut as it
            wants them, where its model has the same arrays as this one.
        """
        params = self.without_adapters()
        if landing is None or landing.regions.keys() != named_leaves(params).keys():
            return params
        return self.lent(params, landing, self.network.base.shapes)

    @control
    def learned_weights(self) -> Params:
        """The parameters that learn: all of them, or adapters and a scalar head."""
        return self.network.partition.split(self.params)[0]

    @control
    def base_weights(self) -> Params:
        """The parameters beside which adapters learn, without these."""
        return self.network.without_adapters_of(self.params)

    def without_adapters(self) -> Params:
        """The parameters of the model without adapters: these are added to their matrices."""
        if self.merge is None:
            return self.params
        # They may wait in the host's memory.
        return self.merge(jax.tree.map(jax.device_put, self.params, self.shardings))

    def lent(self, params: Params, landing: TargetRegions, shapes: Params) -> Any:
        """What this process sends to a landing, in the dtypes of ``shapes``, see ``lend``."""
        held = self.shardings
        if self.merge is not None:
            held = self.network.base.shardings(self.layouts.train)
        return lend(params, crossing_to(landing, held, shapes), jax.process_index())

    @control
    def take_weights(self, params: Params, manifest: ParameterManifest | None = None) -> None:
        """Take another worker's parameters of the same shapes, in copy, whatever their layout.

        From another pool's devices every byte crosses once (``PoolTransition``); from another
        pool's processes they come as ``ArrayRegions``, of which each process of this one's reads
        what its devices land (``IncomingParameters``).

        Args:
          params: nested dict of jax.Array, numpy arrays or ``ArrayRegions``.
          manifest: what the sender says that it gives; these weights are newer than those in use.

        Raises:
          RunError: the parameters are not those of the manifest, or, in pieces, not this model's.
        """
        if manifest is not None:
            check(manifest_of(params, manifest.version), manifest, after=self.version)
        frozen = self._brought(self.adapted(params))
        if self.merge is not None:
            drawn = self.network.create_learned(self.context.seed, self.layouts.train)
            frozen = self.network.partition.join(drawn, frozen)
        self.params = frozen
        self.version = None if manifest is None else manifest.version

    def adapted(self, params: Params) -> Params:
        """Another role's parameters as a tree of this one's, or where adapters learn of what is
        frozen beside them."""
        return params

    def _brought(self, params: Params) -> Params:
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

        def copies(params: Params) -> Params:
            return jax.tree.map(lambda x, dtype: jnp.copy(x).astype(dtype), params, dtypes)

        meshes = [x.sharding.mesh for x in leaves if isinstance(x.sharding, NamedSharding)]
        if len(meshes) == len(leaves) and all(list(m.devices.flat) == devices for m in meshes):
            # One program, over however many processes the pool has.
            return jax.jit(copies, out_shardings=shardings)(params)
        # Copied first: device_put between shuffled shards shares buffers whatever may_alias says.
        return jax.tree.map(jax.device_put, jax.jit(copies)(params), shardings)

    def away(self, phase: str, called: bool) -> set[str]:
        """Kinds of state that wait on the host in a phase, where it is or isn't this role's call.

        While updating, what was once needed stays until the phase ends.
        """
        return set() if called or self.context.offload != "all" else {"params"}

    @control
    def offloaded_bytes(self, phase: str, called: bool) -> int:
        """Bytes per device that wait in the host's memory in a phase, see ``away``."""
        away = self.away(phase, called)
        state = self.abstract_state()
        return sum(shard_bytes(state[kind]) for kind in away)

    def turn(self, phase: str, called: bool) -> None:
        """Put away what a call does not need, or fetch what it does; asked by its pool's host."""
        self._place("params", self.away(phase, called), phase, called)
        self._phase = phase

    def _place(self, kind: str, away: set[str], phase: str, called: bool) -> None:
        name = self.kept[kind]
        if kind not in away:
            setattr(self, name, to_device(getattr(self, name)))
        elif called or phase != "update" or self._phase != "update":
            setattr(self, name, to_host(getattr(self, name)))

    def state(self) -> dict[str, Any]:
        """Everything that decides what this worker does next, as trees of arrays."""
        return {"params": self.params}

    def stored(self, state: dict[str, Any]) -> dict[str, Any]:
        """Frozen parameters apart from those that learn, and only where no file has them."""
        if self.merge is None:
            return state
        learned, frozen = self.network.partition.split(state["params"])
        return {**state, "params": learned} | ({} if self.context.path else {"base": frozen})

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from what was ``stored``."""
        self.params = state["params"]
        if self.merge is not None:
            partition = self.network.partition
            frozen = state["base"] if "base" in state else partition.split(self._read())[1]
            self.params = partition.join(self.params, frozen)

    def abstract_state(self) -> dict[str, Any]:
        """``state()`` as jax.ShapeDtypeStruct with shardings, without the numbers."""
        return {"params": abstract(self.network.shapes, self.shardings)}


def _in_dtypes(shapes: Params, sent: Params) -> Params:
    """Abstract arrays in the dtypes in which those of the same names were sent."""
    there = named_leaves(sent)
    dtypes = [there.get(name, x).dtype for name, x in named_leaves(shapes).items()]
    leaves, structure = jax.tree.flatten(shapes)
    cast = [jax.ShapeDtypeStruct(x.shape, dtype) for x, dtype in zip(leaves, dtypes, strict=True)]
    return jax.tree.unflatten(structure, cast)


def abstract(shapes: Any, shardings: Any) -> Any:
    """Shapes with shardings attached."""
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings
    )
