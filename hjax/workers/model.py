"""A worker with a model: its weights, wherever they come from, and forward passes over batches."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from hjax.errors import ConfigError
from hjax.kernels import cudnn
from hjax.kernels.attention import WHOLE
from hjax.models.packed import KEY as PACKING
from hjax.models.parameters import Network, Params, decoder_network, placed, scalar_network
from hjax.models.weights import load_params, read_config
from hjax.pieces import Pieces
from hjax.sharding.across import Arrival, PoolTransition, lend
from hjax.sharding.crossing import Landing, crossing_to, landing_of
from hjax.sharding.layout import RoleLayouts, check_shapes, shard_bytes, without
from hjax.sharding.manifest import Manifest, check, manifest_of, named_leaves
from hjax.sharding.offload import to_device, to_host
from hjax.sharding.pipeline import Stack
from hjax.sharding.protocols import PROMPT_ID, control
from hjax.workers.adapters import Merge
from hjax.workers.base import TOKEN_KEYS, Worker, WorkerContext
from hjax.workers.packer import LaidOut, Packer, Padded, pack_places
from hjax.workers.passes import Passes, rows_of
from hjax.xla.program import Program


class ModelWorker(Worker):
    """A worker with a model: knows its shapes at once, gets its numbers by ``initialize``."""

    scalar = False
    # Places after the longest response's tokens.
    places_after = 0
    layouts: RoleLayouts
    # Kinds of state, and the attributes that hold them.
    kept: Mapping[str, str] = {"params": "params"}

    def __init__(self, context: WorkerContext):
        super().__init__(context)
        if context.layouts is None or context.model is None:
            raise ConfigError(f"{context.role}: a model needs devices and shapes")
        self.network: Network = (scalar_network if self.scalar else decoder_network)(context.model)
        if context.path:  # what is frozen can be read again, so it is kept as it is read
            self.network = self.network.frozen_in(context.compute.dtype)
        train, generate = context.layouts.train, context.layouts.generate
        self.kept_whole = check_shapes(train, context.model.dimensions, f"layout.{self.role}.train")
        narrow = check_shapes(generate, context.model.dimensions, f"layout.{self.role}.generate")
        self.layouts = RoleLayouts(without(train, self.kept_whole), without(generate, narrow))
        self.shardings = self.network.shardings(self.layouts.train)
        train = self.layouts.train
        # Stages of a pipeline take branches of their own, in which only a split length is held.
        held = train if train.ways("layers") == 1 or train.ways("length") > 1 else None
        self.compute = dataclasses.replace(context.compute.on(train), layout=held)
        self.merge = None if self.network.partition.everything else Merge(self.network, train)
        self.passes = self._passes(self.network)
        packs = context.packing or context.chooses and self._may_choose()
        # cuDNN's attention has no mask of several sequences, but short ones are attended to whole.
        longest = WHOLE if self.compute.kernels.attention is cudnn.attend else 0
        sizes = context.micro_batch, longest
        self.packer = Packer(context.packing, train, *sizes) if packs else None
        self.params: Params = {}  # until initialize, take_weights or restore
        self.version: int | None = None  # of the weights taken; None: they came without
        self.fetched_bytes = 0  # by this process, of the weights last taken in pieces
        self._phase = ""
        self._forwards: dict[tuple, Any] = {}

    def _may_choose(self) -> bool:
        """Whether batches may choose packs: a split length and stages have none, and the loss that
        balances experts is each pass's own."""
        train = self.layouts.train
        whole = train.ways("layers") == train.ways("length") == 1
        return whole and not self.context.router_loss

    def _passes(self, network: Network) -> Passes:
        context, partition = self.context, network.partition
        rows = context.micro_batch, context.samples
        return Passes(self.layouts.train, network.axes, *rows, partition, context.unit)

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
    def landing(self) -> Landing:
        """How ``take_weights`` has parameters arrive, for the ``weights`` of another pool's."""
        return landing_of(self.shardings, self.network.shapes)

    @control
    def weights(self, landing: Landing | None = None) -> Any:
        """The parameters, for another worker's ``take_weights``; wait for that before an update.

        They are lent, not copied: an update writes over them.

        Args:
          landing: of a worker in other processes: it is given ``Pieces``, copies cut as it wants
            them, where its model has the same arrays as this one.
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
        return self.network.bare_of(self.params)

    def without_adapters(self) -> Params:
        """The parameters of the model without adapters: these are added to their matrices."""
        if self.merge is None:
            return self.params
        # They may wait in the host's memory.
        return self.merge(jax.tree.map(jax.device_put, self.params, self.shardings))

    def lent(self, params: Params, landing: Landing, shapes: Params) -> Any:
        """What this process sends to a landing, in the dtypes of ``shapes``, see ``lend``."""
        held = self.shardings
        if self.merge is not None:
            held = self.network.base.shardings(self.layouts.train)
        return lend(params, crossing_to(landing, held, shapes), jax.process_index())

    @control
    def take_weights(self, params: Params, manifest: Manifest | None = None) -> None:
        """Take another worker's parameters of the same shapes, in copy, whatever their layout.

        From another pool's devices every byte crosses once (``PoolTransition``); from another
        pool's processes they come as ``Pieces``, of which each process of this one's reads what
        its devices land (``Arrival``).

        Args:
          params: nested dict of jax.Array, numpy arrays or ``Pieces``.
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
        if any(isinstance(x, Pieces) for x in leaves):
            # Small arrays come as they are.
            params = jax.tree.map(
                lambda x: Pieces.of(x) if isinstance(x, np.ndarray) else x, params
            )
            bucket = self.context.transition_bucket_bytes
            arrival = Arrival(shardings, _in_dtypes(shapes, params), dtypes, bucket_bytes=bucket)
            landed: Params = arrival(params)
            self.fetched_bytes = arrival.fetched_bytes
            return landed
        if not all(isinstance(x, jax.Array) for x in leaves):
            return placed(params, shardings, shapes)
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

    def programs(self, rows: int, prompt_length: int) -> Iterator[Program]:
        """The programs that calls on ``rows`` sequences run.

        A call's name is that of the protocol method, or ``generate``, ``transition``, ``update``.
        """
        return iter(())

    def beside(self, program: str) -> dict[str, Any]:
        """The part of ``abstract_state()`` that stays while a program runs but is no argument."""
        return {}

    def trace_forward(
        self, compute: Callable[..., Any], rows: int, prompt_length: int, base: bool = False
    ) -> Any:
        """What ``forward`` compiles of ``compute`` for the tokens of ``rows`` sequences."""
        params = abstract(self.network.shapes, self.shardings)
        params = self.network.bare_of(params) if base else params
        batch = self.token_shapes(rows, prompt_length)
        return self._forward(compute, True, base).trace(params, batch)

    def laid_out(self, batch: Mapping[str, Any], grouped: bool, unit: int = 1) -> LaidOut:
        """How a batch of prompts and responses is computed.

        Args:
          batch: arrays, masks among them; masks on devices are waited for where packs are made.
          grouped: rows come in groups of one prompt (``self.grouped``).
          unit: consecutive rows that are never cut apart.
        """
        if self.packer is None:
            return LaidOut()
        rows, width = batch["response_mask"].shape
        padded = self._padded(rows, (batch["prompt_mask"].shape[1], width), grouped)
        return self.packer(batch, self._in_packs(padded, grouped, unit), padded, unit)

    def _padded(self, rows: int, widths: tuple[int, int], grouped: bool) -> Padded:
        """What is computed of so many padded rows."""
        passes = self.passes.pieces_of(rows)
        return Padded(rows, widths, self.share(rows // passes) if grouped else 1, passes)

    def _in_packs(self, padded: Padded, grouped: bool, unit: int = 1) -> int:
        """Consecutive rows whose prompt stands in a pack once."""
        samples = self.context.samples
        places = self.context.packing or pack_places(padded, unit)
        shares = grouped and samples % unit == 0 and self.compute.form.shares(places)
        return samples if shares else 1

    def forward(
        self,
        compute: Callable[..., Any],
        params: Any,
        batch: Any,
        grouped: bool = False,
        base: bool = False,
    ) -> Any:
        """Run ``compute(model, batch, share)`` compiled; ``share``: rows per copy of a prompt.

        Its arrays have a row per row of the batch, which a pipeline cuts into micro-batches.
        Programs are kept by the function's code: whatever varies between calls goes in ``batch``.

        Args:
          compute: the function.
          params: of the model.
          batch: dict of arrays.
          grouped: rows come in groups of one prompt (``self.grouped``).
          base: the parameters are those of the model without its adapters.
        """
        return self._forward(compute, grouped, base)(params, batch)

    def score(
        self, compute: Callable[..., Any], batch: Mapping[str, Any], base: bool = False
    ) -> Any:
        """``forward`` over a batch's prompts and responses, with the parameters as they are.

        Args:
          compute, batch: as there.
          base: with the model's adapters left off.
        """
        grouped = self.grouped(batch)
        tokens = {key: batch[key] for key in TOKEN_KEYS}
        tokens = self.laid_out(tokens, grouped).beside(tokens)
        params = self.network.bare_of(self.params) if base else self.params
        return self.forward(compute, params, tokens, grouped, base)

    def _forward(self, compute: Callable[..., Any], grouped: bool, base: bool = False) -> Any:
        key = (getattr(compute, "__code__", compute), grouped, base)
        if key not in self._forwards:
            network = self.network.bare if base else self.network
            passes = self._passes(network) if base else self.passes

            def part(params: Params, batch: Any, stack: Stack) -> Any:
                share = self.share(rows_of(batch)) if grouped else 1
                return compute(network.bind(params, stack), batch, share)

            def run(params: Params, batch: Any) -> Any:
                return passes.forward(part, params, batch)

            run.__name__ = f"{self.role}_{compute.__name__.strip('_')}"
            options = self.layouts.train.compiler_options
            self._forwards[key] = jax.jit(run, compiler_options=options)
        return self._forwards[key]

    def share(self, rows: int) -> int:
        """Rows per copy of a prompt, such that no copy straddles two devices' parts."""
        return math.gcd(self.context.samples, rows // self.layouts.train.ways("batch"))

    def grouped(self, batch: Mapping[str, Any]) -> bool:
        """Whether the rows come in groups of ``samples`` that answer one prompt each.

        The batch says so (``prompt_id``, on the host). A greedy batch has one row per prompt,
        demonstrations say nothing, filtered batches have any order: their prompts must not be taken
        for copies of one another.
        """
        samples = self.context.samples
        if samples == 1:
            return True
        ids = batch.get(PROMPT_ID)
        if ids is None or len(ids) % samples:
            return False
        groups = np.asarray(ids).reshape(-1, samples)
        return bool((groups == groups[:, :1]).all())

    def token_shapes(self, rows: int, prompt_length: int) -> dict[str, Any]:
        """Abstract prompts and responses of a step, placed for training; full, where packed; where
        batches choose, padded."""
        length = self.context.max_response_length + self.places_after
        split = self.layouts.train.sharding("batch")
        sizes = {"prompts": prompt_length, "prompt_mask": prompt_length}
        shapes: dict[str, Any] = {
            key: jax.ShapeDtypeStruct(
                (rows, sizes.get(key, length)),
                jnp.bool_ if key.endswith("mask") else jnp.int32,
                sharding=split,
            )
            for key in TOKEN_KEYS
        }
        if self.context.packing:
            assert self.packer is not None
            padded, unit = self._padded(rows, (prompt_length, length), True), self.context.unit
            share = self._in_packs(padded, True, unit)
            shapes[PACKING] = self.packer.abstract(rows, padded.widths, share, unit)
        return shapes


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
