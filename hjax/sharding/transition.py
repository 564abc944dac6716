"""From one layout to another on the same devices: what generation needs before it starts.

Leaves that both layouts hold alike are handed over as they are; the others are resharded by one
compiled program, in which the change of PartitionSpec becomes an all-gather over the micro axes
(HybridFlow, arXiv 2409.19256, section 5.3).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


class Transition:
    """Parameters from the train to the generate layout.

    Args:
      source: nested dict of NamedSharding, as training keeps the parameters.
      target: nested dict of NamedSharding, as generation reads them.
      shapes: nested dict of jax.ShapeDtypeStruct.
      dtype: of the generation copy; cast before moving, so that a narrower one halves the bytes.
    """

    def __init__(self, source: Any, target: Any, shapes: Any, dtype: Any = jnp.float32):
        leaves, self._structure = jax.tree.flatten(shapes)
        pairs = zip(leaves, jax.tree.leaves(source), jax.tree.leaves(target), strict=True)
        self._moved = []
        shardings = []
        for index, (leaf, before, after) in enumerate(pairs):
            if leaf.dtype == dtype and before.is_equivalent_to(after, len(leaf.shape)):
                continue
            self._moved.append(index)
            shardings.append(after)
        self._program = jax.jit(
            lambda moved: [x.astype(dtype) for x in moved], out_shardings=shardings
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
