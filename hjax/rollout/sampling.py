"""Drawing tokens: temperature, top-k, top-p, and log-probs of the distribution drawn from.

A draw is the argmax of logits plus Gumbel noise whose key is folded from (seed, step, sequence,
position), so a sequence's tokens do not depend on the slot, batch or device it runs on.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp

from hjax.errors import ConfigError
from hjax.kernels.sets import Kernels


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How tokens are drawn.

    Attributes:
      temperature: logits are divided by it; 0 is greedy.
      top_k: keep only the k most likely tokens; 0 keeps all.
      top_p: keep the smallest set of most likely tokens whose probability reaches it; 1 keeps all.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise ConfigError(f"temperature={self.temperature}: 0 (greedy) or more, and finite")
        if self.top_k < 0:
            raise ConfigError(f"top_k={self.top_k}: 0 (all tokens) or more")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p={self.top_p}: above 0, at most 1")

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken."""
        return self.temperature == 0

    @property
    def truncates(self) -> bool:
        """Whether top-k or top-p cut the distribution."""
        return not self.greedy and (self.top_k > 0 or self.top_p < 1)

    @property
    def tempered(self) -> bool:
        """Whether the temperature changes the distribution."""
        return not self.greedy and self.temperature != 1


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Draw:
    """One token per row, with its log-probs (float32 [rows]).

    Attributes:
      token: int32 [rows].
      sampled: under the distribution drawn from (greedy: untempered).
      policy: tempered but not truncated: what training computes.
      untempered: of the plain softmax.
    """

    token: jax.Array
    sampled: jax.Array
    policy: jax.Array
    untempered: jax.Array


def sequence_keys(seed: jax.Array, step: jax.Array, sequence: jax.Array) -> jax.Array:
    """A PRNG key per row, folded from the step and the row's sequence number (int [rows])."""
    key = jax.random.fold_in(jax.random.key(seed), step)
    return jax.vmap(jax.random.fold_in, (None, 0))(key, sequence)


def draw(
    logits: jax.Array,
    keys: jax.Array,
    position: jax.Array,
    sampling: Sampling,
    kernels: Kernels = Kernels(),
) -> Draw:
    """Draw the token at ``position``.

    Args:
      logits: float32 [rows, vocab].
      keys: one per row, of ``sequence_keys``.
      position: int [] or [rows], the token's index in its response.
      sampling: how it is drawn.
      kernels: of the platform.
    """
    plain = jax.nn.log_softmax(logits)
    if sampling.greedy:
        token = kernels.largest(logits)
        logprob = _pick(plain, token)
        return Draw(token, logprob, logprob, logprob)
    policy = plain
    if sampling.tempered:
        policy = jax.nn.log_softmax(logits / sampling.temperature)
    sampled = policy
    if sampling.truncates:
        sampled = jax.nn.log_softmax(truncate(policy, sampling))
    position = jnp.broadcast_to(position, keys.shape)
    keys = jax.vmap(jax.random.fold_in)(keys, position)
    noise = jax.vmap(lambda key: jax.random.gumbel(key, logits.shape[-1:], jnp.float32))(keys)
    token = kernels.largest(sampled + noise)
    return Draw(token, _pick(sampled, token), _pick(policy, token), _pick(plain, token))


def truncate(logits: jax.Array, sampling: Sampling) -> jax.Array:
    """``logits`` [..., vocab] with the tokens that top-k or top-p leave out at -inf.

    Top-k first, top-p on what it leaves, as in transformers; ties with the last kept logit stay.
    """
    ordered = jnp.sort(logits, axis=-1, descending=True)
    edge = jnp.full(logits.shape[:-1] + (1,), -jnp.inf)
    if sampling.top_k > 0:
        k = min(sampling.top_k, logits.shape[-1])
        edge = ordered[..., k - 1 : k]
        ordered = jnp.where(ordered >= edge, ordered, -jnp.inf)
    if sampling.top_p < 1:
        probability = jax.nn.softmax(ordered, axis=-1)
        before = jnp.cumsum(probability, axis=-1) - probability
        kept = jnp.where(before < sampling.top_p, ordered, jnp.inf)
        edge = jnp.maximum(edge, jnp.min(kept, axis=-1, keepdims=True))
    return jnp.where(logits >= edge, logits, -jnp.inf)


def _pick(table: jax.Array, token: jax.Array) -> jax.Array:
    return jnp.take_along_axis(table, token[..., None], axis=-1)[..., 0]
