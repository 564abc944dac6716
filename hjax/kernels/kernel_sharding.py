"""Over which devices a kernel's arrays are spread, for kernels that compilers cannot split."""

import dataclasses
import math

from jax.sharding import AbstractMesh, Mesh

Axes = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class KernelSharding:
    """Mesh axes by what they split; of a kernel those count that its arrays have.

    Attributes:
      mesh: None: all is on one device.
      rows, length: of activations and tokens.
      heads: of queries.
      kv_heads: of keys and values: as ``heads``, or none where they are too few.
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
        """Into how many parts these axes split."""
        return math.prod(self.mesh.shape[axis] for axis in axes) if self.mesh is not None else 1

    @property
    def tokens(self) -> Axes:
        """Over which tokens are split."""
        return self.rows + self.length
