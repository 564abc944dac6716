"""How a kernel's arrays are sharded, for ``shard_map`` of kernels that XLA cannot partition."""

import dataclasses
import math

from jax.sharding import AbstractMesh, Mesh

Axes = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class KernelSharding:
    """Mesh axes by the dimension that they split; a kernel uses those that its arrays have.

    Attributes:
      mesh: None: one device.
      rows, length: of activations and tokens.
      heads: of queries.
      kv_heads: of keys and values: as ``heads``, or none if there are too few.
      vocab, embed: of the output table; axes of ``embed`` are among those of ``rows`` and
        ``length``, as in FSDP.
    """

    mesh: Mesh | AbstractMesh | None = None
    rows: Axes = ()
    length: Axes = ()
    heads: Axes = ()
    kv_heads: Axes = ()
    vocab: Axes = ()
    embed: Axes = ()

    def shard_count(self, axes: Axes) -> int:
        """The number of parts into which these axes split a dimension."""
        return math.prod(self.mesh.shape[axis] for axis in axes) if self.mesh is not None else 1

    @property
    def tokens(self) -> Axes:
        """The axes over which tokens are split."""
        return self.rows + self.length
