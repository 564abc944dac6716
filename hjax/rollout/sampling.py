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
from hjax.rollout import vocabulary
from hjax.sharding.layout import Layout


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
      top_tokens, top: the most probable tokens, int32 [rows, n], and their log-probs under the
        distribution drawn from, falling; -inf where there are no more. None: nobody asks.
    """

    token: jax.Array
    sampled: jax.Array
    policy: jax.Array
    untempered: jax.Array
    top_tokens: jax.Array | None = None
    top: jax.Array | None = None


def sequence_keys(seed: jax.Array, step: jax.Array, sequence: jax.Array) -> jax.Array:
    """A PRNG key per row, folded from the step and the row's sequence number (int [rows])."""
    key = jax.random.fold_in(jax.random.key(seed), step)
    return jax.vmap(jax.random.fold_in, (None, 0))(key, sequence)


def gumbel(keys: jax.Array, position: jax.Array, vocab: int) -> jax.Array:
    """The noise, float32 [rows, vocab], of the draw at ``position`` (int [] or [rows])."""
    position = jnp.broadcast_to(position, keys.shape)
    keys = jax.vmap(jax.random.fold_in)(keys, position)
    return jax.vmap(lambda key: jax.random.gumbel(key, (vocab,), jnp.float32))(keys)


def draw(
    logits: jax.Array,
    keys: jax.Array,
    position: jax.Array,
    sampling: Sampling,
    kernels: Kernels = Kernels(),
    layout: Layout | None = None,
) -> Draw:
    """Draw the token at ``position``.

    Args:
      logits: float32 [rows, vocab].
      keys: one per row, of ``sequence_keys``.
      position: int [] or [rows], the token's index in its response.
      sampling: how it is drawn.
      kernels: of the platform.
      layout: over whose axes rows and vocabulary are split. Each device then draws from its part
        of the vocabulary, and a few numbers per row are exchanged, never logits.
    """
    noise = None
    if not sampling.greedy:
        noise = gumbel(keys, position, logits.shape[-1])
    axes = vocabulary.axes_of(layout)
    if layout is None or not axes:
        return _draw(logits, noise, sampling, kernels, ())
    split, rows = layout.spec(["batch", "vocab"]), layout.spec(["batch"])
    over = jax.shard_map(
        lambda logits, noise: _draw(logits, noise, sampling, kernels, axes),
        mesh=layout.mesh,
        in_specs=(split, split),
        out_specs=rows,
        check_vma=False,
    )
    # Held as it is drawn from, so that every device makes its own part.
    return over(logits, None if noise is None else layout.constrain(noise, "batch", "vocab"))


def _draw(
    logits: jax.Array,
    noise: jax.Array | None,
    sampling: Sampling,
    kernels: Kernels,
    axes: tuple[str, ...],
) -> Draw:
    """``draw`` of a part of the vocabulary, the whole being split over ``axes``."""
    plain = vocabulary.log_softmax(logits, axes)
    if noise is None:
        token = vocabulary.largest(logits, kernels.largest, axes)
        [logprob] = vocabulary.pick([plain], token, axes)
        return Draw(token, logprob, logprob, logprob)
    policy = plain
    if sampling.tempered:
        policy = vocabulary.log_softmax(logits / sampling.temperature, axes)
    sampled = policy
    if sampling.truncates:
        sampled = vocabulary.log_softmax(truncate(policy, sampling, axes), axes)
    token = vocabulary.largest(sampled + noise, kernels.largest, axes)
    return Draw(token, *vocabulary.pick([sampled, policy, plain], token, axes))


def truncate(
    logits: jax.Array, sampling: Sampling, axes: tuple[str, ...] = ()
) -> jax.Array:
    """``logits`` [..., vocab] with the tokens that top-k or top-p leave out at -inf.

    Top-k first, top-p on what it leaves, as in transformers; ties with the last kept logit stay.

    Args:
      logits: float32.
      sampling: says what is left out.
      axes: of a mesh, over which the vocabulary is split; inside ``shard_map``.
    """
    order = vocabulary.ordered(logits)
    if sampling.top_k > 0:
        edge = vocabulary.top_k_edge(order, sampling.top_k, axes)
        logits = jnp.where(order >= edge, logits, -jnp.inf)
    if sampling.top_p < 1:
        edge = vocabulary.top_p_edge(order, logits, sampling.top_p, axes)
        logits = jnp.where(order >= edge, logits, -jnp.inf)
    return logits
