"""From one layout to another on the same devices: what generation needs before it starts.

Leaves that both layouts hold alike are handed over as they are; the others are resharded by one
compiled program, in which the change of PartitionSpec becomes an all-gather over the micro axes
(HybridFlow, arXiv 2409.19256, section 5.3).
"""

from __future__ import annotations

from typing import Any

import jax


class Transition:
    """Parameters from the train to the generate layout.

    Args:
      source: nested dict of NamedSharding, as training keeps the parameters.
      target: nested dict of NamedSharding, as generation reads them.
      shapes: nested dict of jax.ShapeDtypeStruct.
      dtypes: nested dict of the generation copy's dtypes, or None to keep the parameters'; cast
        before moving, so that a narrower one halves the bytes.
    """

    def __init__(self, source: Any, target: Any, shapes: Any, dtypes: Any = None):
        leaves, self._structure = jax.tree.flatten(shapes)
        casts = [leaf.dtype for leaf in leaves] if dtypes is None else jax.tree.leaves(dtypes)
        pairs = zip(leaves, casts, jax.tree.leaves(source), jax.tree.leaves(target), strict=True)
        self._moved = []
        shardings, kinds = [], []
        for index, (leaf, dtype, before, after) in enumerate(pairs):
            if leaf.dtype == dtype and before.is_equivalent_to(after, len(leaf.shape)):
                continue
            self._moved.append(index)
            shardings.append(after)
            kinds.append(dtype)
        self._program = jax.jit(
            lambda moved: [x.astype(dtype) for x, dtype in zip(moved, kinds, strict=True)],
            out_shardings=shardings,
        )

    @property
    def moves(self) -> bool:
        """Whether any parameter changes its shards or dtype."""
        return bool(self._moved)

    def __call__(self, params: Any) -> Any:
        """The parameters in the target layout; untouched leaves are the very same arrays."""
        if not self._moved:
            return params
        leaves = jax.tree.leaves(params)
        moved = self._program([leaves[i] for i in self._moved])
        for index, leaf in zip(self._moved, moved, strict=True):
            leaves[index] = leaf
        return jax.tree.unflatten(self._structure, leaves)
