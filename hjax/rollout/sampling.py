"""Drawing tokens: temperature, top-k, top-p, and log-probs of the distribution drawn from.

A draw is the argmax of logits plus Gumbel noise whose key is folded from (seed, step, sequence,
position), so a sequence's tokens do not depend on the slot, batch or device it runs on.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from hjax.errors import ConfigError
from hjax.kernels.sets import Kernels
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
        position = jnp.broadcast_to(position, keys.shape)
        keys = jax.vmap(jax.random.fold_in)(keys, position)
        noise = jax.vmap(lambda key: jax.random.gumbel(key, logits.shape[-1:], jnp.float32))(keys)
    axes = layout.axes("vocab") if layout is not None else ()
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
    plain = _log_softmax(logits, axes)
    if noise is None:
        token = _largest(logits, kernels, axes)
        [logprob] = _pick([plain], token, axes)
        return Draw(token, logprob, logprob, logprob)
    policy = plain
    if sampling.tempered:
        policy = _log_softmax(logits / sampling.temperature, axes)
    sampled = policy
    if sampling.truncates:
        sampled = _log_softmax(truncate(policy, sampling, axes), axes)
    token = _largest(sampled + noise, kernels, axes)
    return Draw(token, *_pick([sampled, policy, plain], token, axes))


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
    order = _ordered(logits)
    if sampling.top_k > 0:
        edge = _edge(order, jnp.ones_like(logits), jnp.float32(sampling.top_k), axes)
        logits = jnp.where(order >= edge, logits, -jnp.inf)
    if sampling.top_p < 1:
        weights = jnp.exp(logits - _over(jnp.max(logits, -1, keepdims=True), jax.lax.pmax, axes))
        enough = sampling.top_p * _over(jnp.sum(weights, -1, keepdims=True), jax.lax.psum, axes)
        logits = jnp.where(order >= _edge(order, weights, enough, axes), logits, -jnp.inf)
    return logits


def _ordered(x: jax.Array) -> jax.Array:
    """uint32 that are ordered as the float32 are."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))


def _edge(
    order: jax.Array, weights: jax.Array, enough: jax.Array, axes: tuple[str, ...]
) -> jax.Array:
    """uint32 [..., 1]: the largest number at or above which ``order`` has weights of ``enough``; 0
    where all together have less.

    Found bit by bit, from the highest on, without sorting; over several devices four bits at once,
    for each exchange of sums takes as long as many passes over the weights.
    """
    step = 4 if axes else 1
    candidates = jnp.arange(1, 1 << step, dtype=jnp.uint32)

    def refine(turn: jax.Array, edge: jax.Array) -> jax.Array:
        shift = (32 - step * (turn + 1)).astype(jnp.uint32)
        tried = edge | (candidates << shift)
        sums = jnp.stack(
            [
                jnp.sum(jnp.where(order >= tried[..., i : i + 1], weights, 0.0), axis=-1)
                for i in range(candidates.size)
            ],
            axis=-1,
        )
        held = _over(sums, jax.lax.psum, axes) >= enough
        return edge | (jnp.sum(held, axis=-1, keepdims=True).astype(jnp.uint32) << shift)

    start = jnp.zeros((*order.shape[:-1], 1), jnp.uint32)
    return jax.lax.fori_loop(0, 32 // step, refine, start)


def _over(x: jax.Array, collective: Any, axes: tuple[str, ...]) -> jax.Array:
    return collective(x, axes) if axes else x


def _log_softmax(logits: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    if not axes:
        return jax.nn.log_softmax(logits)
    shifted = logits - jax.lax.pmax(jnp.max(logits, -1, keepdims=True), axes)
    return shifted - jnp.log(jax.lax.psum(jnp.sum(jnp.exp(shifted), -1, keepdims=True), axes))


def _largest(logits: jax.Array, kernels: Kernels, axes: tuple[str, ...]) -> jax.Array:
    """int32 [rows], of equals the first."""
    token = kernels.largest(logits)
    if not axes:
        return token
    here = jnp.max(logits, axis=-1)
    ours = here == jax.lax.pmax(here, axes)
    # Some device has it; a number beyond the vocabulary would be none's.
    token = jnp.where(ours, token + _first(logits, axes), jnp.iinfo(jnp.int32).max)
    return jax.lax.pmin(token, axes)


def _pick(
    tables: list[jax.Array], token: jax.Array, axes: tuple[str, ...]
) -> list[jax.Array]:
    """Of each table [rows, vocab] the token's entry."""
    if not axes:
        return [jnp.take_along_axis(x, token[..., None], axis=-1)[..., 0] for x in tables]
    at = token - _first(tables[0], axes)
    own = jnp.arange(tables[0].shape[-1]) == at[..., None]
    found = jnp.stack([jnp.sum(jnp.where(own, x, 0.0), axis=-1) for x in tables])
    return list(jax.lax.psum(found, axes))


def _first(part: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Number of the first token of a device's part of the vocabulary."""
    return jax.lax.axis_index(axes) * part.shape[-1]
