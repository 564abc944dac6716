"""Trainable models with a scalar head: the critic, and the trainer of reward models."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from hjax.models.forward import map_response_states
from hjax.models.parameters import Params
from hjax.sharded_values import ArrayRegions
from hjax.sharding.protocols import protocol
from hjax.workers.trainable_worker import TrainableWorker, update_reads
from hjax.workers.worker import SCORED_KEYS


class ScalarWorker(TrainableWorker):
    """A scalar for each response token, computed at the position before it."""

    scalar = True

    def token_loss(
        self, model: Any, batch: dict[str, jax.Array], share: int, loss: Any
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The loss of the head's values, and its statistics."""
        return loss(self._token_scores(model, batch, share), batch)

    def _values(self, model: Any, batch: Any, share: int) -> jax.Array:
        return jnp.where(batch["response_mask"], self._token_scores(model, batch, share), 0.0)

    def _token_scores(self, model: Any, batch: Mapping[str, jax.Array], share: int) -> jax.Array:
        def read(states: jax.Array, _: jax.Array) -> jax.Array:
            return self.apply_head(model, states)

        return map_response_states(model.decoder, dict(batch), share, self.compute, read)

    def apply_head(self, model: Any, states: jax.Array) -> jax.Array:
        """The head's values of hidden states."""
        return model.score(states)


class Critic(ScalarWorker):
    """The value model, with the primitive calls of HybridFlow's Table 4: a value per response
    token, before it is drawn."""

    score_methods = {"compute_values": "_values"}

    def adapted(self, params: Params) -> Params:
        """A language model's parameters with a value head of zeros; with adapters only the
        decoder."""
        # Missing parameters are reported by take_weights.
        kept = {key: params[key] for key in self.network.shapes["decoder"] if key in params}
        if self.merge is not None:
            return {"decoder": kept}
        head: Params = {
            k: np.zeros(x.shape, x.dtype) for k, x in self.network.shapes.items() if k != "decoder"
        }
        first = jax.tree.leaves(params)[0]
        placed = getattr(first, "sharding", None)
        if isinstance(placed, NamedSharding):
            # On the same mesh, so that all parameters cross between pools alike.
            head = jax.device_put(head, NamedSharding(placed.mesh, PartitionSpec()))
        elif isinstance(first, ArrayRegions):
            head = jax.tree.map(ArrayRegions.of, head)
        return {"decoder": kept, **head}

    @protocol("3D_PROTO", reads=SCORED_KEYS)
    def compute_values(self, batch: Mapping[str, Any]) -> dict[str, jax.Array]:
        """``values`` float32 [rows, length], 0 on padding."""
        return {"values": self.score(self._values, batch)}

    @protocol("3D_PROTO", phase="update", reads=update_reads)
    def update_critic(self, batch: Mapping[str, Any]) -> dict[str, jax.Array]:
        """One optimizer step on the squared error to the returns; metrics as scalars."""
        return self.update(batch)


class RewardTrainer(ScalarWorker):
    """Trains reward models, on preference pairs or labelled steps: a score after each response
    token."""

    positions_after = 1
    score_methods = {"compute_scores": "_values"}

    def apply_head(self, model: Any, states: jax.Array) -> jax.Array:
        """The head's values without its bias."""
        return model.unbiased(states)

    @protocol("3D_PROTO", phase="prepare", reads=SCORED_KEYS)
    def compute_scores(self, batch: Mapping[str, Any]) -> dict[str, jax.Array]:
        """``scores`` float32 [rows, length]: before each response token, 0 on padding."""
        return {"scores": self.score(self._values, batch)}

    @protocol("3D_PROTO", phase="update", reads=update_reads)
    def update_scores(self, batch: Mapping[str, Any]) -> dict[str, jax.Array]:
        """One optimizer step; metrics as scalars."""
        return self.update(batch)
