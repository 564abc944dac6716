"""The critic: a value for every response token, before it is drawn."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from hjax.models.forward import read_responses
from hjax.models.parameters import Params
from hjax.pieces import Pieces
from hjax.sharding.protocols import protocol
from hjax.workers.base import SCORED_KEYS
from hjax.workers.trained import TrainedWorker, update_reads
from hjax.xla.program import Program


class Critic(TrainedWorker):
    """Primitive calls of HybridFlow's Table 4 for the value model."""

    scalar = True

    def adapted(self, params: Params) -> Params:
        """A language model's parameters, with a value head of zeros; under adapters without."""
        # What is missing is named where the parameters are taken.
        kept = {key: params[key] for key in self.network.shapes["decoder"] if key in params}
        if self.merge is not None:
            return {"decoder": kept}
        head: Params = {
            k: np.zeros(x.shape, x.dtype) for k, x in self.network.shapes.items() if k != "decoder"
        }
        first = jax.tree.leaves(params)[0]
        placed = getattr(first, "sharding", None)
        if isinstance(placed, NamedSharding):
            # Where the others are, so that all of them cross between pools alike.
            head = jax.device_put(head, NamedSharding(placed.mesh, PartitionSpec()))
        elif isinstance(first, Pieces):
            head = jax.tree.map(Pieces.of, head)
        return {"decoder": kept, **head}

    def token_loss(
        self, model: Any, batch: dict[str, jax.Array], share: int, loss: Any
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The value loss and its statistics."""
        values = _values(model, batch, share, self.compute)
        return loss(values, batch)

    @protocol("3D_PROTO", reads=SCORED_KEYS)
    def compute_values(self, batch: Mapping[str, Any]) -> dict[str, jax.Array]:
        """``values`` float32 [rows, length], 0 on padding."""
        return {"values": self.score(self._values, batch)}

    def _values(self, model: Any, batch: Any, share: int) -> jax.Array:
        scores = _values(model, batch, share, self.compute)
        return jnp.where(batch["response_mask"], scores, 0.0)

    @protocol("3D_PROTO", phase="update", reads=update_reads)
    def update_critic(self, batch: Mapping[str, Any]) -> dict[str, jax.Array]:
        """One optimizer step on the squared error to the returns; metrics as scalars."""
        return self.update(batch)

    def programs(self, rows: int, prompt_length: int) -> Iterator[Program]:
        """Values and update of ``rows`` sequences."""
        trace = self.trace_forward
        yield Program("compute_values", lambda: trace(self._values, rows, prompt_length))
        yield from super().programs(rows, prompt_length)


def _values(model: Any, batch: Mapping[str, jax.Array], share: int, compute: Any) -> jax.Array:
    return read_responses(
        model.decoder, dict(batch), share, compute, lambda states, _: model.score(states)
    )
