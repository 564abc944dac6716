"""The 3D-HybridEngine: parameters from the train to the generate layout and back.

Both layouts live on one mesh (HybridFlow, arXiv 2409.19256, section 5.3), so a device's generation
shard contains its training shard: an all-gather over the micro axes makes the one, a local slice
of it gives the other back. Arrays go in buckets; each source is freed once its target stands, so
that there is never a second copy of the model.
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
    """A leaf's way there and back.

    Attributes:
      there: to the generate layout.
      back: to the train layout, where that is a local slice of what generation has; None where
        the source is kept instead (below).
    """

    there: ReshardLeaf
    back: ReshardLeaf | None

    @property
    def is_master(self) -> bool:
        """Whether the source is kept because generation has it in another dtype."""
        return self.there.dtype != self.there.cast

    @property
    def is_redundant(self) -> bool:
        """Whether the source is kept because the generation shard does not contain it."""
        return self.back is None and not self.is_master and not self.there.unmoved


class HeldParameters:
    """Parameters on their way: what stands of each, and the sources that were kept."""

    def __init__(self, leaves: list[jax.Array]):
        self.leaves = leaves
        self.kept: dict[int, jax.Array] = {}
        self.arrived: list[int] = []  # numbers of buckets


@dataclasses.dataclass(frozen=True)
class TransitionCost:
    """What a transition costs, in bytes per device, counted before it runs.

    Attributes:
      received: read off the compiled programs.
      planned: the same, of the planned moves; those left to the compiler are not in it.
      back: received on the way back, read off its compiled programs.
      source, target: parameters in the train and in the generate layout.
      peak: the most parameters at a time, there or back, without masters and temporaries.
      temporary: the compiler's, of the program that needs most.
      redundant: training shards kept beside generation's, in the same dtype.
      masters: training shards of those parameters that generation has in another dtype.
      buckets: programs that run one after another.
      by_compiler: parameters whose way is left to the compiler.
    """

    received: int
    planned: int
    back: int
    source: int
    target: int
    peak: int
    temporary: int
    redundant: int
    masters: int
    buckets: int
    by_compiler: tuple[str, ...]


class Transition:
    """Parameters between two layouts on the same devices.

    Leaves that both layouts hold alike are the very same arrays in both and never freed. Of the
    others, those that keep their dtype are replaced: the source is freed when the target stands.
    Those that are cast, or whose target does not contain the source, are copied: the source stays
    and the way back drops the copy. So the way back never moves a byte.

    Args:
      source: nested dict of NamedSharding, as training keeps the parameters.
      target: nested dict of NamedSharding, as generation reads them.
      shapes: nested dict of jax.ShapeDtypeStruct.
      dtypes: nested dict of the generation copy's dtypes, or None to keep the parameters'; cast
        before moving, so that a narrower one halves the bytes.
      bucket_bytes: of a device's target shards that are made in one program; at least one leaf.
        A larger leaf that is stacked over layers goes in slices of this size, at least one layer.
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
            returns = sliced and there.dtype == there.cast and not there.unmoved
            self.routes.append(LeafRoute(there, back if returns else None))
        place = {id(route.there): index for index, route in enumerate(self.routes)}
        self.buckets = [
            [place[id(leaf)] for leaf in bucket]
            for bucket in fill_buckets(
                [r.there for r in self.routes if not r.there.unmoved], bucket_bytes
            )
        ]
        self._there, self._back = [], []
        for bucket in self.buckets:
            routes = [self.routes[i] for i in bucket]
            leaves = tuple(route.there for route in routes)
            self._there.append(bucket_program(leaves, bucket_bytes, "transition"))
            leaves = tuple(route.back for route in routes if route.back is not None)
            self._back.append(bucket_program(leaves, bucket_bytes, "transition_back"))

    @property
    def moves(self) -> bool:
        """Whether any parameter changes its shards or dtype."""
        return bool(self.buckets)

    def leaf(self, index: int) -> ReshardLeaf:
        """The way there of a leaf of the tree."""
        return self.routes[index].there

    def start(self, params: Any) -> HeldParameters:
        """Take ``params``, in the train layout, to be moved; use them no longer."""
        leaves = jax.tree.leaves(params)
        for x, route in zip(leaves, self.routes, strict=True):
            if not x.sharding.is_equivalent_to(route.there.source, x.ndim):
                raise RunError(
                    f"{route.there.name} is laid out as {x.sharding}, not as training keeps it "
                    f"({route.there.source}); an update must not change a parameter's sharding"
                )
        return HeldParameters(leaves)

    def advance(self, held: HeldParameters, watch: Callable[[], object] | None = None) -> Any:
        """The parameters in the generate layout.

        Args:
          held: from ``start``. If this fails halfway, ``back`` still gives all of them back.
          watch: called when a bucket's sources and targets are both alive, to measure memory.
        """
        for number, (bucket, program) in enumerate(zip(self.buckets, self._there, strict=True)):
            sources = [held.leaves[i] for i in bucket]
            targets = jax.block_until_ready(program(sources))
            if watch is not None:
                watch()
            held.arrived.append(number)
            for index, source, target in zip(bucket, sources, targets, strict=True):
                held.leaves[index] = target
                if self.routes[index].back is None:
                    held.kept[index] = source
                else:
                    source.delete()
        return jax.tree.unflatten(self._structure, held.leaves)

    def back(self, held: HeldParameters, watch: Callable[[], object] | None = None) -> Any:
        """The parameters in the train layout again, bit for bit; generation's are freed."""
        while held.arrived:
            number = held.arrived[-1]
            bucket = self.buckets[number]
            sliced = [i for i in bucket if i not in held.kept]
            copies = [held.leaves[i] for i in bucket]
            sources = jax.block_until_ready(self._back[number]([held.leaves[i] for i in sliced]))
            if watch is not None:
                watch()
            for index, source in zip(sliced, sources, strict=True):
                held.leaves[index] = source
            for index in set(bucket) & set(held.kept):
                held.leaves[index] = held.kept.pop(index)
            for copy in copies:
                copy.delete()
            held.arrived.pop()
        return jax.tree.unflatten(self._structure, held.leaves)

    def programs(self) -> list[tuple[str, Callable[[], Any]]]:
        """(name, function that traces it) of each program of the way there, one per bucket."""
        count = len(self.buckets)
        names = ["transition"] if count == 1 else [f"transition_{i + 1}" for i in range(count)]
        return [(name, program.trace) for name, program in zip(names, self._there, strict=True)]

    def standing(self, number: int) -> list[jax.ShapeDtypeStruct]:
        """Abstract arrays that stand while a bucket is moved, its sources and targets left out."""
        arrays = [r.there.before for r in self.routes if r.there.unmoved]
        for other, bucket in enumerate(self.buckets):
            for route in (self.routes[i] for i in bucket):
                if other < number:
                    arrays.append(route.there.after)
                if other > number or (other < number and route.back is None):
                    arrays.append(route.there.before)
        return arrays

    def copies(self) -> Any:
        """bool like the parameters: those of generation's that the way back only drops, so that
        whoever borrows them may free them before."""
        copies = [r.back is None and not r.there.unmoved for r in self.routes]
        return jax.tree.unflatten(self._structure, copies)

    def kept(self) -> list[jax.ShapeDtypeStruct]:
        """Abstract arrays of training's that stay beside those which generation reads."""
        return [r.there.before for r in self.routes if r.back is None and not r.there.unmoved]

    def cost(self) -> TransitionCost:
        """Compile everything for abstract arrays and count; nothing is allocated."""
        there, back = ([p for p in way if p.leaves] for way in (self._there, self._back))
        leaves = [route.there for route in self.routes]
        return TransitionCost(
            received=sum(received_bytes(p.compiled.as_text()) for p in there),
            planned=sum(leaf.received_bytes or 0 for leaf in leaves),
            back=sum(received_bytes(p.compiled.as_text()) for p in back),
            source=sum(leaf.source_bytes for leaf in leaves),
            target=sum(leaf.target_bytes for leaf in leaves),
            peak=self.peak_bytes(),
            temporary=largest_temporary([*there, *back]),
            redundant=sum(r.there.source_bytes for r in self.routes if r.is_redundant),
            masters=sum(r.there.source_bytes for r in self.routes if r.is_master),
            buckets=len(self.buckets),
            by_compiler=tuple(leaf.name for leaf in leaves if leaf.moves is None),
        )

    def peak_bytes(self) -> int:
        """The most bytes of parameters a device holds on the way, masters left out."""
        alive = sum(r.there.source_bytes for r in self.routes if not r.is_master)
        peak = alive
        for bucket in self.buckets:
            routes = [self.routes[i] for i in bucket]
            alive += sum(r.there.target_bytes for r in routes)
            peak = max(peak, alive)
            alive -= sum(r.there.source_bytes for r in routes if r.back is not None)
        return peak


def largest_temporary(programs: Sequence[BucketProgram]) -> int:
    """Bytes per device of temporaries in the program that needs most."""
    analyses = [program.compiled.memory_analysis() for program in programs]
    return max((analysis.temp_size_in_bytes for analysis in analyses), default=0)
