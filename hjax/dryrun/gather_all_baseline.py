"""Baseline resharding: all-gather the whole model, then slice it (DeepSpeed-Chat, HybridFlow-V).

The 3D-HybridEngine is compared with it. As in the paper's Table 2, every device gathers the whole
model and keeps its generation shard beside its training shard.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from hjax.sharding.transfer_buckets import ReshardLeaf, bucket_program, fill_buckets, plan_leaf
from hjax.sharding.transition import BUCKET_BYTES, HeldParameters, TransitionCost, largest_temporary
from hjax.xla.collectives import received_bytes


class GatherAndCut:
    """Reshard parameters to the generate layout by gathering the whole model on every device.

    It has the methods of ``Transition``. Train shards are freed once the whole model is gathered,
    and later sliced out of it again. So at most the whole model and a bucket are alive.

    Args:
      source: nested dict of NamedSharding, as training keeps the parameters.
      target: the same for generation; its mesh may order the devices' axes otherwise.
      shapes: nested dict of jax.ShapeDtypeStruct.
      bucket_bytes: of whole parameters that are gathered in one program; at least one leaf.
    """

    def __init__(self, source: Any, target: Any, shapes: Any, bucket_bytes: int = BUCKET_BYTES):
        leaves, self._structure = jax.tree.flatten(shapes)
        self._gathers, self._keeps, self._cuts = [], [], []
        pairs = zip(jax.tree.leaves(source), jax.tree.leaves(target), strict=True)
        for number, (x, (before, after)) in enumerate(zip(leaves, pairs, strict=True)):
            whole, there = (NamedSharding(s.mesh, PartitionSpec()) for s in (before, after))
            plan = functools.partial(plan_leaf, str(number), x.shape, x.dtype, x.dtype)
            self._gathers.append(plan(source=before, target=whole))
            self._keeps.append(plan(source=whole, target=before))
            self._cuts.append(plan(source=there, target=after))
        self.buckets = [
            [int(leaf.name) for leaf in bucket]
            for bucket in fill_buckets(self._gathers, bucket_bytes)
        ]
        self._programs = [
            [
                bucket_program(tuple(leaves[i] for i in bucket), bucket_bytes, name)
                for bucket in self.buckets
            ]
            for leaves, name in (
                (self._gathers, "gather_whole"),
                (self._keeps, "cut_train"),
                (self._cuts, "cut_generate"),
            )
        ]

    def leaf(self, index: int) -> ReshardLeaf:
        """How a leaf of the tree is gathered."""
        return self._gathers[index]

    def start(self, params: Any) -> HeldParameters:
        """Take over ``params`` in the train layout; the caller must not use them any more."""
        return HeldParameters(jax.tree.leaves(params))

    def to_generate(self, state: HeldParameters, watch: Callable[[], object] | None = None) -> Any:
        """Reshard to the generate layout; ``watch`` is called at the peaks of memory."""
        gathers, keeps, cuts = self._programs
        for bucket, gather in zip(self.buckets, gathers, strict=True):
            _replace(state.leaves, bucket, gather, watch)
        generated: dict[int, jax.Array] = {}
        # The smallest first: each frees memory for the next.
        for bucket, keep, cut in zip(self.buckets[::-1], keeps[::-1], cuts[::-1], strict=True):
            shards = jax.block_until_ready(cut([state.leaves[i] for i in bucket]))
            generated |= dict(zip(bucket, shards, strict=True))
            _replace(state.leaves, bucket, keep, watch)
        state.kept = generated
        return jax.tree.unflatten(self._structure, [generated[i] for i in range(len(state.leaves))])

    def to_train(self, state: HeldParameters, watch: Callable[[], object] | None = None) -> Any:
        """Free the generation shards and return the training parameters, which were kept."""
        if watch is not None:
            watch()
        for copy in state.kept.values():
            copy.delete()
        state.kept = {}
        return jax.tree.unflatten(self._structure, state.leaves)

    def cost(self) -> TransitionCost:
        """Compile everything for abstract arrays and count; nothing is allocated."""
        programs = [program for group in self._programs for program in group]
        source = sum(leaf.source_bytes for leaf in self._gathers)
        return TransitionCost(
            received=sum(received_bytes(p.compiled.as_text()) for p in programs),
            planned=sum(leaf.received_bytes or 0 for leaf in self._gathers),
            received_back=0,
            source=source,
            target=sum(leaf.target_bytes for leaf in self._cuts),
            peak=self.peak_bytes(),
            temporary=largest_temporary(programs),
            redundant=source,
            masters=0,
            buckets=len(self.buckets),
            by_compiler=(),
        )

    def peak_bytes(self) -> int:
        """Peak bytes of parameters that a device holds while resharding."""
        alive = peak = sum(leaf.source_bytes for leaf in self._gathers)
        for bucket in self.buckets:
            alive += sum(self._gathers[i].target_bytes for i in bucket)
            peak = max(peak, alive)
            alive -= sum(self._gathers[i].source_bytes for i in bucket)
        for bucket in self.buckets[::-1]:
            alive += sum(self._keeps[i].target_bytes + self._cuts[i].target_bytes for i in bucket)
            peak = max(peak, alive)
            alive -= sum(self._gathers[i].target_bytes for i in bucket)
        return peak


def _replace(
    leaves: list[jax.Array],
    bucket: list[int],
    program: Callable[..., Any],
    watch: Callable[[], object] | None,
) -> None:
    """Run a program on a bucket's leaves and replace them by its results."""
    old = [leaves[i] for i in bucket]
    new = jax.block_until_ready(program(old))
    if watch is not None:
        watch()
    for index, before, after in zip(bucket, old, new, strict=True):
        leaves[index] = after
        before.delete()
