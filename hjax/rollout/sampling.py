"""Sampling: applies the sampling options, draws tokens, and gives their log-probs.

A draw is the argmax of logits plus Gumbel noise whose key is folded from (seed, step, sequence,
position), so a sequence's tokens do not depend on the slot, batch or device it runs on.

The options are those of all rows, for which a program is compiled, or arrays with each row's own.
Then one program draws for any mix of requests, and skips what no row needs.

Logits processors come in the order of transformers' ``generate``: biases, repetition penalty, bans;
then temperature, top-k, top-p, min-p. Frequency and presence penalty, which it lacks, follow the
repetition penalty as in vLLM. (vLLM applies min-p before top-p.)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from hjax.kernels.registry import KernelSet
from hjax.rollout import vocab_parallel
from hjax.rollout.row_sampling import RowSampling
from hjax.rollout.sampling_params import MOST_TOP, SamplingParams
from hjax.rollout.token_counts import TokenCounts
from hjax.sharding.layout import Layout

T = TypeVar("T")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SampledTokens:
    """One token per row, with its log-probs (float32 [rows]).

    Attributes:
      token: int32 [rows].
      sampled: under the distribution drawn from, all options applied. For a greedy row that is
        biases, bans and penalties only: untempered, not truncated. For a forced token it is 0.
      policy: tempered and nothing else: what training computes.
      untempered: of the plain softmax.
      top_tokens, top: the most probable tokens, int32 [rows, n], and their log-probs under the
        distribution drawn from, descending; padded with -inf. None: not requested.
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
    options: SamplingParams | RowSampling,
    counts: TokenCounts | None = None,
    kernels: KernelSet = KernelSet(),
    layout: Layout | None = None,
    bitmask: jax.Array | None = None,
) -> SampledTokens:
    """Draw each row's token at its ``position``.

    A row draws the same whether its options are its own or those of all rows, by the same noise and
    arithmetic (equal up to float32's rounding), whatever the other rows need. If one row requests
    ``top`` tokens they are computed for all.

    Args:
      logits: float32 [rows, vocab].
      keys: one per row, of ``sequence_keys``.
      position: int [] or [rows], the token's index in its response.
      options: of all rows, or of each its own.
      counts: of the tokens so far, if rows may have penalties.
      kernels: of the platform.
      layout: over whose axes rows and vocabulary are split. Each device then draws from its part of
        the vocabulary, and a few numbers per row are exchanged, never logits.
      bitmask: as in ``vocab_parallel.apply_bitmask``: other tokens are banned, except
        forced ones; a row that is read allows at least one. None: all are allowed.

    Raises:
      ValueError: counts without penalties, or penalties without counts.
    """
    vocab = logits.shape[-1]
    rows = RowSampling.uniform(options, vocab) if isinstance(options, SamplingParams) else options
    if (counts is None) != (rows.repetition_penalty is None):
        raise ValueError(
            "rows with penalties need TokenCounts, rows without them take none; "
            f"counts are {'missing' if counts is None else 'given'}"
        )
    logits, position = jnp.asarray(logits), jnp.broadcast_to(position, keys.shape)
    axes = vocab_parallel.vocab_axes(layout)
    needed = _needed(rows, position, bitmask)
    part = _VocabShard(kernels, axes)

    number = position if rows.static else position + rows.first_draw

    def noise() -> jax.Array:
        return gumbel(keys, number, logits.shape[-1])

    if layout is None or not axes:
        return part.draw(logits, noise, position, rows, counts, bitmask, needed)
    return _draw_sharded(part, layout, logits, noise, position, rows, counts, bitmask, needed)


def _draw_sharded(
    part: _VocabShard,
    layout: Layout,
    logits: jax.Array,
    noise: Callable[[], jax.Array],
    position: jax.Array,
    rows: RowSampling,
    counts: TokenCounts | None,
    bitmask: jax.Array | None,
    needed: dict[str, jax.Array],
) -> SampledTokens:
    """``_VocabShard.draw`` on every device, for its part of the vocabulary."""
    shared = rows.static and len(rows.temperature) == 1

    def constrained(noise: jax.Array) -> jax.Array:
        # Sharded like the logits, so that every device makes its own part.
        return layout.constrain(noise, "batch", "vocab")

    known = {name: wanted for name, wanted in needed.items() if isinstance(wanted, np.bool_)}
    traced = {name: wanted for name, wanted in needed.items() if name not in known}
    made = None
    if known.get("samples", True):
        silence = jnp.zeros(logits.shape, jnp.float32)
        made = _cond(needed["samples"], lambda: constrained(noise()), lambda: constrained(silence))
        made = constrained(made)

    def of_part(logits: jax.Array, made: Any, at: jax.Array, own: Any, *more: Any) -> SampledTokens:
        counts, bitmask, traced = more
        of_rows = rows if shared else own
        return part.draw(logits, lambda: made, at, of_rows, counts, bitmask, known | traced)

    split, whole = layout.spec(["batch", "vocab"]), layout.spec(["batch"])
    return jax.shard_map(
        of_part,
        mesh=layout.mesh,
        in_specs=(split, split, whole, whole, split, whole, jax.sharding.PartitionSpec()),
        out_specs=whole,
        check_vma=False,
    )(logits, made, position, None if shared else rows, counts, bitmask, traced)


def _needed(rows: RowSampling, at: jax.Array, bitmask: jax.Array | None) -> dict[str, jax.Array]:
    """bool [] each: what some row needs; numpy's if that is known while tracing.

    Computed from all rows on all devices, so that all take part in the same exchanges.
    """
    alters = rows.changes_logits(at).any()
    return {
        "samples": (~rows.greedy).any(),
        "alters": alters if bitmask is None else alters | vocab_parallel.any_banned(bitmask),
        "tempered": rows.tempered.any(),
        "truncates": rows.truncates.any(),
        "top_k": (rows.truncates & (rows.top_k > 0)).any(),
        "top_p": (rows.truncates & (rows.top_p < 1)).any(),
        "min_p": (rows.truncates & (rows.min_p > 0)).any(),
        "top": (rows.top > 0).any(),
    }


def _cond(needed: Any, wanted: Callable[[], T], otherwise: Callable[[], T]) -> T:
    """``wanted()`` or ``otherwise()``: chosen at run time, or while tracing if it is known."""
    if isinstance(needed, np.bool_):
        return wanted() if needed else otherwise()
    return jax.lax.cond(needed, wanted, otherwise)


def no_top_tokens(shape: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    """Empty top tokens, in the shapes of ``SampledTokens``."""
    shape = (*shape, MOST_TOP)
    return jnp.zeros(shape, jnp.int32), jnp.full(shape, -jnp.inf, jnp.float32)


# Log-sum-exp of logits [rows, vocab] in two parts, each [rows, 1]: the largest logit, and the log
# of the sum of exponentials of the differences to it.
_Norm = tuple[jax.Array, jax.Array]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Truncated:
    """A distribution truncated by top-k, top-p or min-p.

    Attributes:
      edge: uint32 [rows, 1], threshold on ``vocab_parallel.sortable_bits`` of the logits; those at
        or above it are kept.
      norm: of the kept ones.
    """

    edge: jax.Array
    norm: _Norm

    @classmethod
    def all_of(cls, logits: jax.Array) -> _Truncated:
        """The whole distribution, of rows that are not truncated."""
        zeros = jnp.zeros((logits.shape[0], 1), jnp.float32)
        return cls(zeros.astype(jnp.uint32), (zeros, zeros))

    def of(self, logits: jax.Array, tempered: jax.Array) -> jax.Array:
        """Log-probs [rows, vocab]; ``tempered``: those before truncation."""
        kept = vocab_parallel.sortable_bits(logits) >= self.edge
        return jnp.where(kept, _normed(tempered, self.norm), -jnp.inf)


@dataclasses.dataclass(frozen=True)
class _VocabShard:
    """``draw`` on a shard of the vocabulary, which is split over ``axes``."""

    kernels: KernelSet
    axes: tuple[str, ...]

    def draw(
        self,
        logits: jax.Array,
        noise: Callable[[], jax.Array],
        position: jax.Array,
        rows: RowSampling,
        counts: TokenCounts | None,
        bitmask: jax.Array | None,
        needed: dict[str, jax.Array],
    ) -> SampledTokens:
        # Multiplied, not divided: XLA turns a division by a constant into this.
        scale = np.float32(1.0) / rows.temperatures
        policy = self.log_normalizer(logits * scale)
        plain = _cond(needed["tempered"], lambda: self.log_normalizer(logits), lambda: policy)
        forced = rows.forced_at(position)

        def drawn(altered: jax.Array, norm: _Norm) -> SampledTokens:
            # In each branch, so that it is not materialised for branches that are not taken.
            def tempered() -> jax.Array:
                return _normed(altered * scale, norm)

            cuts = needed["truncates"]
            whole = None if isinstance(cuts, np.bool_) else _Truncated.all_of(altered)
            cut = lambda: self.truncate(altered, tempered(), rows, needed)  # noqa: E731
            kept = _cond(cuts, cut, lambda: whole)

            def final() -> jax.Array:
                return tempered() if kept is None else kept.of(altered, tempered())

            def perturbed() -> jax.Array:
                return jnp.where(rows.greedy[:, None], altered, final() + noise())

            # A branch's result is materialised: argmax never computes it twice with other rounding.
            scores = _cond(needed["samples"], perturbed, lambda: altered)
            token = vocab_parallel.argmax(scores, self.kernels.argmax, self.axes)
            token = jnp.where(forced >= 0, forced, token)
            tables = [logits] if altered is logits else [logits, altered]
            picked = [x[:, None] for x in vocab_parallel.gather_token(tables, token, self.axes)]
            raw, own = picked[0], picked[-1]
            sampled = _normed(own * scale, norm)
            sampled = sampled if kept is None else _normed(sampled, kept.norm)
            static = isinstance(needed["top"], np.bool_)
            nothing = (None, None) if static else no_top_tokens(token.shape)
            top_tokens, top = _cond(
                needed["top"],
                lambda: vocab_parallel.top_tokens(final(), MOST_TOP, self.axes),
                lambda: nothing,
            )
            logprob = jnp.where(forced >= 0, 0.0, sampled[:, 0])
            by_policy, untempered = _normed(raw * scale, policy), _normed(raw, plain)
            return SampledTokens(token, logprob, by_policy[:, 0], untempered[:, 0], top_tokens, top)

        def drawn_altered() -> SampledTokens:
            altered = self.process_logits(logits, position, rows, counts, bitmask)
            return drawn(altered, self.log_normalizer(altered * scale))

        return _cond(needed["alters"], drawn_altered, lambda: drawn(logits, policy))

    def process_logits(
        self,
        logits: jax.Array,
        position: jax.Array,
        rows: RowSampling,
        counts: TokenCounts | None,
        bitmask: jax.Array | None,
    ) -> jax.Array:
        """The logits processors: biases, penalties, then the token bitmask and the bans of stop
        tokens, so that what is banned stays banned.

        A scatter comes last and materialises its result: logits that are compared with a threshold
        must not be computed twice with different rounding.
        """
        altered = vocab_parallel.scatter_add(logits, rows.bias_tokens, rows.bias, self.axes)
        if counts is not None:
            repetition, presence, frequency = (
                x[:, None]
                for x in (rows.repetition_penalty, rows.presence_penalty, rows.frequency_penalty)
                if x is not None
            )
            in_response = counts.response > 0
            weaker = jnp.where(altered < 0, altered * repetition, altered / repetition)
            altered = jnp.where(counts.prompt | in_response, weaker, altered)
            altered = altered - frequency * counts.response - presence * in_response
        if bitmask is not None:
            altered = vocab_parallel.apply_bitmask(altered, bitmask, self.axes)
        stops, bans = rows.banned_stops(position), jnp.float32(-jnp.inf)
        return vocab_parallel.scatter_add(altered, stops, bans, self.axes)

    def truncate(
        self,
        altered: jax.Array,
        tempered: jax.Array,
        rows: RowSampling,
        needed: dict[str, jax.Array],
    ) -> _Truncated:
        """Truncate the processed logits by top-k, top-p and min-p.

        Each keeps tokens at or above some logit, so the highest threshold decides. Only top-p
        depends on another one: it applies to what top-k leaves.
        """
        order = vocab_parallel.sortable_bits(altered)
        whole = _Truncated.all_of(tempered)
        truncates = rows.truncates[:, None]
        top_k, top_p, min_p = rows.top_k[:, None], rows.top_p[:, None], rows.min_p[:, None]

        def by_top_k() -> jax.Array:
            reached = vocab_parallel.top_k_threshold(order, top_k, self.axes)
            return jnp.where(top_k > 0, reached, whole.edge)

        edge = _cond(needed["top_k"], by_top_k, lambda: whole.edge)
        left = jnp.where(order >= edge, tempered, -jnp.inf)

        def by_top_p() -> jax.Array:
            reached = vocab_parallel.top_p_threshold(order, left, top_p, self.axes)
            return jnp.where(top_p < 1, reached, whole.edge)

        def by_min_p() -> jax.Array:
            top = vocab_parallel.reduce_over(
                jnp.max(altered, -1, keepdims=True), jax.lax.pmax, self.axes
            )
            return vocab_parallel.sortable_bits(top + rows.temperatures * jnp.log(min_p))

        edge = jnp.maximum(edge, _cond(needed["top_p"], by_top_p, lambda: whole.edge))
        edge = jnp.maximum(edge, _cond(needed["min_p"], by_min_p, lambda: whole.edge))
        edge = jnp.where(truncates, edge, whole.edge)
        shift, log_sum = self.log_normalizer(jnp.where(order >= edge, tempered, -jnp.inf))
        return _Truncated(
            edge,
            (
                jnp.where(truncates, shift, whole.norm[0]),
                jnp.where(truncates, log_sum, whole.norm[1]),
            ),
        )

    def log_normalizer(self, logits: jax.Array) -> _Norm:
        """What turns logits [rows, vocab] into log-probs, each [rows, 1]."""
        shift = vocab_parallel.reduce_over(
            jnp.max(logits, -1, keepdims=True), jax.lax.pmax, self.axes
        )
        total = jnp.sum(jnp.exp(logits - shift), -1, keepdims=True)
        return shift, jnp.log(vocab_parallel.reduce_over(total, jax.lax.psum, self.axes))


def _normed(logits: jax.Array, norm: _Norm) -> jax.Array:
    shift, log_sum = norm
    return logits - shift - log_sum
