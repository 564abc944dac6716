"""The 3D-HybridEngine: reshard parameters from the train to the generate layout and back.

Both layouts live on one mesh (HybridFlow, arXiv 2409.19256, section 5.3), so a device's generation
shard contains its training shard. An all-gather over the micro axes makes the generation shard; a
local slice gives the training shard back. Parameters move in buckets, and each source is freed
once its target exists, so there is never a second copy of the model.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax

from hjax.errors import RunError
from hjax.sharding.transfer_buckets import (
    BucketProgram,
    ReshardLeaf,
    bucket_program,
    fill_buckets,
    leaf_name,
    plan_leaf,
)
from hjax.xla.collectives import received_bytes

BUCKET_BYTES = 16 * 2**20


@dataclasses.dataclass(frozen=True, eq=False)
class LeafRoute:
    """How one parameter is resharded to generation and back.

    Attributes:
      to_generate: to the generate layout.
      to_train: to the train layout, if that is a local slice of the generation shard; None if the
        source is kept instead (below).
    """

    to_generate: ReshardLeaf
    to_train: ReshardLeaf | None

    @property
    def is_master(self) -> bool:
        """Whether the source is kept as a master, because generation uses another dtype."""
        return self.to_generate.dtype != self.to_generate.target_dtype

    @property
    def is_redundant(self) -> bool:
        """Whether the source is kept because the generation shard does not contain it."""
        return self.to_train is None and not self.is_master and not self.to_generate.unchanged


class HeldParameters:
    """State of a transition: the current array of each parameter, and the sources that are kept."""

    def __init__(self, leaves: list[jax.Array]):
        self.leaves = leaves
        self.kept: dict[int, jax.Array] = {}
        self.arrived: list[int] = []  # numbers of buckets


@dataclasses.dataclass(frozen=True)
class TransitionCost:
    """What a transition costs, in bytes per device, counted before it runs.

    Attributes:
      received: bytes received, read off the compiled programs.
      planned: the same by the planned moves, without those left to the compiler.
      received_back: bytes received on the way back, read off its compiled programs.
      source, target: bytes of the parameters in the train and in the generate layout.
      peak: peak bytes of parameters, in either direction, without masters and temporaries.
      temporary: the compiler's temporaries, of the program that needs most.
      redundant: training shards kept beside generation's, in the same dtype.
      masters: training shards of the parameters that generation has in another dtype.
      buckets: number of programs, which run one after another.
      by_compiler: parameters that the compiler reshards.
    """

    received: int
    planned: int
    received_back: int
    source: int
    target: int
    peak: int
    temporary: int
    redundant: int
    masters: int
    buckets: int
    by_compiler: tuple[str, ...]


class Transition:
    """Reshards parameters between two layouts on the same devices.

    Leaves with the same sharding and dtype in both layouts are shared, never copied or freed. A
    leaf whose target contains its source in the same dtype is replaced: the source is freed once
    the target exists. Other leaves are copied: the source stays and the way back drops the copy.
    So the way back never moves a byte.

    Args:
      source: nested dict of NamedSharding, as training keeps the parameters.
      target: nested dict of NamedSharding, as generation reads them.
      shapes: nested dict of jax.ShapeDtypeStruct.
      dtypes: nested dict of the generation copy's dtypes, or None to keep the parameters'; cast
        before moving, so that bfloat16 halves the bytes.
      bucket_bytes: of target shards that one program makes on a device; at least one leaf. A larger
        leaf that is stacked over layers moves in slices of this size, at least one layer each.
    """

    def __init__(
        self,
        source: Any,
        target: Any,
        shapes: Any,
        dtypes: Any = None,
        bucket_bytes: int = BUCKET_BYTES,
    ):
        paths, self._structure = jax.tree.flatten_with_path(shapes)
        casts = [x.dtype for _, x in paths] if dtypes is None else jax.tree.leaves(dtypes)
        befores, afters = jax.tree.leaves(source), jax.tree.leaves(target)
        self.routes: list[LeafRoute] = []
        for (path, x), cast, before, after in zip(paths, casts, befores, afters, strict=True):
            name = leaf_name(path)
            there = plan_leaf(name, x.shape, x.dtype, cast, before, after)
            back = plan_leaf(name, x.shape, cast, x.dtype, after, before)
            sliced = back.moves is not None and all(m.kind == "slice" for m in back.moves)
            returns = sliced and there.dtype == there.target_dtype and not there.unchanged
            self.routes.append(LeafRoute(there, back if returns else None))
        place = {id(route.to_generate): index for index, route in enumerate(self.routes)}
        self.buckets = [
            [place[id(leaf)] for leaf in bucket]
            for bucket in fill_buckets(
                [r.to_generate for r in self.routes if not r.to_generate.unchanged], bucket_bytes
            )
        ]
        self._programs, self._programs_back = [], []
        for bucket in self.buckets:
            routes = [self.routes[i] for i in bucket]
            leaves = tuple(route.to_generate for route in routes)
            self._programs.append(bucket_program(leaves, bucket_bytes, "transition"))
            leaves = tuple(route.to_train for route in routes if route.to_train is not None)
            self._programs_back.append(bucket_program(leaves, bucket_bytes, "transition_back"))

    @property
    def moves(self) -> bool:
        """Whether any parameter changes its shards or dtype."""
        return bool(self.buckets)

    def leaf(self, index: int) -> ReshardLeaf:
        """How a leaf of the tree is resharded to the generate layout."""
        return self.routes[index].to_generate

    def start(self, params: Any) -> HeldParameters:
        """Take ``params``, in the train layout; the caller must not use them any more."""
        leaves = jax.tree.leaves(params)
        for x, route in zip(leaves, self.routes, strict=True):
            leaf = route.to_generate
            if not x.sharding.is_equivalent_to(leaf.source, x.ndim):
                raise RunError(
                    f"{leaf.name} is laid out as {x.sharding}, not as training keeps it "
                    f"({leaf.source}); an update must not change a parameter's sharding"
                )
        return HeldParameters(leaves)

    def to_generate(self, state: HeldParameters, watch: Callable[[], object] | None = None) -> Any:
        """The parameters in the generate layout.

        Args:
          state: from ``start``. If this fails halfway, ``to_train`` still restores all of them.
          watch: called when a bucket's sources and targets are both alive, to measure memory.
        """
        for number, (bucket, program) in enumerate(zip(self.buckets, self._programs, strict=True)):
            sources = [state.leaves[i] for i in bucket]
            targets = jax.block_until_ready(program(sources))
            if watch is not None:
                watch()
            state.arrived.append(number)
            for index, source, target in zip(bucket, sources, targets, strict=True):
                state.leaves[index] = target
                if self.routes[index].to_train is None:
                    state.kept[index] = source
                else:
                    source.delete()
        return jax.tree.unflatten(self._structure, state.leaves)

    def to_train(self, state: HeldParameters, watch: Callable[[], object] | None = None) -> Any:
        """The parameters in the train layout again, bit for bit; generation's are freed."""
        while state.arrived:
            number = state.arrived[-1]
            bucket = self.buckets[number]
            sliced = [i for i in bucket if i not in state.kept]
            copies = [state.leaves[i] for i in bucket]
            targets = [state.leaves[i] for i in sliced]
            sources = jax.block_until_ready(self._programs_back[number](targets))
            if watch is not None:
                watch()
            for index, source in zip(sliced, sources, strict=True):
                state.leaves[index] = source
            for index in set(bucket) & set(state.kept):
                state.leaves[index] = state.kept.pop(index)
            for copy in copies:
                copy.delete()
            state.arrived.pop()
        return jax.tree.unflatten(self._structure, state.leaves)

    def programs(self) -> list[tuple[str, Callable[[], Any]]]:
        """(name, function that traces it) of each program to the generate layout, one a bucket."""
        count = len(self.buckets)
        names = ["transition"] if count == 1 else [f"transition_{i + 1}" for i in range(count)]
        return [(name, program.trace) for name, program in zip(names, self._programs, strict=True)]

    def live_during(self, number: int) -> list[jax.ShapeDtypeStruct]:
        """Abstract arrays that are alive while a bucket moves, without its sources and targets."""
        arrays = [r.to_generate.source_array for r in self.routes if r.to_generate.unchanged]
        for other, bucket in enumerate(self.buckets):
            for route in (self.routes[i] for i in bucket):
                if other < number:
                    arrays.append(route.to_generate.target_array)
                if other > number or (other < number and route.to_train is None):
                    arrays.append(route.to_generate.source_array)
        return arrays

    def generation_copies(self) -> Any:
        """bool like the parameters: whether generation's array is a copy that ``to_train`` drops.
        Who uses such an array may free it earlier."""
        copies = [r.to_train is None and not r.to_generate.unchanged for r in self.routes]
        return jax.tree.unflatten(self._structure, copies)

    def kept_arrays(self) -> list[jax.ShapeDtypeStruct]:
        """Abstract training arrays that stay alive beside those that generation reads."""
        copies = zip(self.routes, jax.tree.leaves(self.generation_copies()), strict=True)
        return [route.to_generate.source_array for route, is_copy in copies if is_copy]

    def cost(self) -> TransitionCost:
        """Compile everything for abstract arrays and count; nothing is allocated."""
        programs, back = ([p for p in x if p.leaves] for x in (self._programs, self._programs_back))
        leaves = [route.to_generate for route in self.routes]
        return TransitionCost(
            received=sum(received_bytes(p.compiled.as_text()) for p in programs),
            planned=sum(leaf.received_bytes or 0 for leaf in leaves),
            received_back=sum(received_bytes(p.compiled.as_text()) for p in back),
            source=sum(leaf.source_bytes for leaf in leaves),
            target=sum(leaf.target_bytes for leaf in leaves),
            peak=self.peak_bytes(),
            temporary=largest_temporary([*programs, *back]),
            redundant=sum(r.to_generate.source_bytes for r in self.routes if r.is_redundant),
            masters=sum(r.to_generate.source_bytes for r in self.routes if r.is_master),
            buckets=len(self.buckets),
            by_compiler=tuple(leaf.name for leaf in leaves if leaf.moves is None),
        )

    def peak_bytes(self) -> int:
        """Peak bytes of parameters on a device during the transition, without masters."""
        alive = sum(r.to_generate.source_bytes for r in self.routes if not r.is_master)
        peak = alive
        for bucket in self.buckets:
            routes = [self.routes[i] for i in bucket]
            alive += sum(r.to_generate.target_bytes for r in routes)
            peak = max(peak, alive)
            alive -= sum(r.to_generate.source_bytes for r in routes if r.to_train is not None)
        return peak


def largest_temporary(programs: Sequence[BucketProgram]) -> int:
    """Bytes per device of temporaries, of the program that needs most."""
    analyses = [program.compiled.memory_analysis() for program in programs]
    return max((analysis.temp_size_in_bytes for analysis in analyses), default=0)
