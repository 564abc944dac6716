"""Load balancing of experts: router statistics, the auxiliary loss, the metrics.

The loss is Switch Transformer's (Fedus et al. 2022, arXiv 2101.03961, eq. 4 to 6) for several
experts per token, over the tokens of all layers together, as in transformers
(``load_balancing_loss_func``): ``experts * sum_e f_e P_e``. f_e is how often a token chose expert e
on average, P_e the mean router probability of e. Gradients flow through P_e alone. A perfectly even
load gives ``experts_per_token``.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from hjax.batches import response_places

# Sums over a layer's tokens for each expert: the router's probability p, how often it was chosen,
# and -p log p.
PROBABILITY, CHOSEN, ENTROPY = range(3)
NUM_SUMS = 3


class RoutingStats(NamedTuple):
    """Router statistics of some tokens; those of micro-batches add up.

    Attributes:
      sums: float32 [layers, SUMS, experts], over tokens.
      tokens: float32 scalar, how many.
    """

    sums: jax.Array
    tokens: jax.Array


class RoutingTally:
    """Collects the routing statistics of forward passes while a function is traced."""

    def __init__(self) -> None:
        self.routed: RoutingStats | None = None

    def add(self, routed: RoutingStats) -> None:
        """Add the statistics of a forward pass."""
        self.routed = routed if self.routed is None else jax.tree.map(jnp.add, self.routed, routed)


def routing_sums(
    probabilities: jax.Array, chosen: jax.Array, tally_weights: jax.Array
) -> jax.Array:
    """Router statistics of a layer's tokens, float32 [NUM_SUMS, experts].

    Args:
      probabilities: float32 [batch, length, experts], of the router.
      chosen: int [batch, length, per_token], experts.
      tally_weights: float32 [batch, length], weight of each token; 0 at padding.
    """
    weights = tally_weights[..., None]
    entropy = jax.scipy.special.entr(jax.lax.stop_gradient(probabilities))
    experts = jnp.arange(probabilities.shape[-1])
    picked = jnp.sum(chosen[..., None] == experts, axis=-2, dtype=jnp.float32)
    return jnp.stack([jnp.sum(weights * x, axis=(0, 1)) for x in (probabilities, picked, entropy)])


def router_token_weights(batch: Mapping[str, Any]) -> dict[str, jax.Array]:
    """Which tokens of rows [prompt | response] count in the router statistics, as batch entries.

    Tokens count in rows that have a response and are not masked out, except each response's last
    token, from which nothing is predicted.

    Args:
      batch: ``prompt_mask`` bool [rows, prompt_length], ``response_mask`` bool [rows, length]
        and, where it has them, ``response_lengths`` int32 and ``row_mask`` bool [rows].

    Returns:
      ``counted_prompts`` and ``counted_responses``, float32 of the shapes of the two masks, 1 or 0;
      ``counted``, their sum, at least 1.
    """
    mask = response_places(batch)
    rows = jnp.any(mask, axis=1)
    if batch.get("row_mask") is not None:
        rows &= batch["row_mask"]
    followed = jnp.pad(mask[:, 1:], ((0, 0), (0, 1)))
    prompts, responses = (
        (rows[:, None] & x).astype(jnp.float32) for x in (batch["prompt_mask"], followed)
    )
    total = jnp.maximum(jnp.sum(prompts) + jnp.sum(responses), 1)
    return {"counted_prompts": prompts, "counted_responses": responses, "counted": total}


def balance_loss(routed: RoutingStats) -> jax.Array:
    """The load-balancing loss, float32 scalar; 0 without tokens."""
    layers, _, experts = routed.sums.shape
    means = jnp.sum(routed.sums, axis=0) / (layers * jnp.maximum(routed.tokens, 1))
    return experts * jnp.sum(jax.lax.stop_gradient(means[CHOSEN]) * means[PROBABILITY])


def balance_metrics(routed: RoutingStats) -> dict[str, jax.Array]:
    """Load-balancing metrics of an update's tokens, float32 scalars.

    ``router_entropy``: of the routers' probabilities, mean over tokens and layers, in nats.
    ``expert_load_max``: tokens of the expert of any layer that has most, over an even share.
    ``experts_unused``: share of all layers' experts that no token chose.
    """
    layers = routed.sums.shape[0]
    chosen = routed.sums[:, CHOSEN]
    even = jnp.maximum(jnp.mean(chosen, axis=1, keepdims=True), jnp.finfo(jnp.float32).tiny)
    return {
        "router_entropy": jnp.sum(routed.sums[:, ENTROPY])
        / (layers * jnp.maximum(routed.tokens, 1)),
        "expert_load_max": jnp.max(chosen / even),
        "experts_unused": jnp.mean(chosen == 0, dtype=jnp.float32),
    }
