"""Drawing tokens where every row of a batch has its own options: what servers and engines need.

``draw`` of ``hjax.rollout.sampling`` compiles one ``Sampling`` into a program. Here the options are
arrays, so that one program draws for whatever requests stand together; work that none of them asks
for is skipped as the program runs.

Order, as ``generate`` of transformers applies its processors and warpers: biases, repetition
penalty, bans; then temperature, top-k, top-p, min-p. Frequency and presence penalty, which it does
not have, follow the repetition penalty as in vLLM. (vLLM takes min-p before top-p.)
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hjax.errors import ConfigError
from hjax.kernels.sets import Kernels
from hjax.rollout import vocabulary
from hjax.rollout.counts import Counts
from hjax.rollout.options import BIASES, MOST_TOP, Options
from hjax.rollout.sampling import Draw, gumbel
from hjax.sharding.layout import Layout


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What rows have room for; other sizes are other shapes, and so another program.

    Attributes:
      vocab: tokens of the model.
      biases: tokens of a row with a bias or a ban.
      stops: stop tokens of a row.
      forced: forced tokens of a row.
      penalties: whether rows may have penalties, for which ``Counts`` are kept.
    """

    vocab: int
    biases: int = BIASES
    stops: int = 16
    forced: int = 16
    penalties: bool = False


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RowSampling:
    """The ``Options`` of a batch's rows.

    Attributes:
      temperature, top_p, min_p: float32 [rows].
      top_k, min_tokens: int32 [rows].
      bias_tokens, bias: int32 and float32 [rows, biases]; -1 where there is none.
      stop: int32 [rows, stops], padded with -1.
      forced: int32 [rows, forced], padded with -1.
      top: int32 [rows], most probable tokens that are asked for.
      repetition_penalty, presence_penalty, frequency_penalty: float32 [rows]; None: no row may
        have one.
    """

    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    min_p: jax.Array
    bias_tokens: jax.Array
    bias: jax.Array
    stop: jax.Array
    min_tokens: jax.Array
    forced: jax.Array
    top: jax.Array
    repetition_penalty: jax.Array | None
    presence_penalty: jax.Array | None
    frequency_penalty: jax.Array | None

    @classmethod
    def of(cls, options: Sequence[Options | None], sizes: Sizes) -> RowSampling:
        """The rows' arrays, of numpy.

        Args:
          options: one per row; None: a row that nobody reads, which asks for no work.
          sizes: what there is room for.

        Raises:
          ConfigError: options with more tokens than there is room for, a token that the model does
            not have, no token left to draw, penalties where ``sizes`` has none.
        """
        rows = [_EMPTY if each is None else each for each in options]
        for each in rows:
            _check_fits(each, sizes)
        biases = [_biases(each) for each in rows]

        def column(name: str, dtype: Any) -> np.ndarray:
            return np.asarray([getattr(each, name) for each in rows], dtype)

        def penalty(name: str) -> Any:
            return column(name, np.float32) if sizes.penalties else None

        arrays: dict[str, Any] = {
            "temperature": column("temperature", np.float32),
            "top_k": column("top_k", np.int32),
            # Of 0, which a smaller one would be in float32, no token is enough.
            "top_p": np.maximum(column("top_p", np.float32), np.finfo(np.float32).tiny),
            "min_p": column("min_p", np.float32),
            "bias_tokens": _padded(biases, sizes.biases, -1, np.int32),
            "bias": _padded([each.values() for each in biases], sizes.biases, 0, np.float32),
            "stop": _padded([each.stop for each in rows], sizes.stops, -1, np.int32),
            "min_tokens": column("min_tokens", np.int32),
            "forced": _padded([each.forced for each in rows], sizes.forced, -1, np.int32),
            "top": column("top", np.int32),
            "repetition_penalty": penalty("repetition_penalty"),
            "presence_penalty": penalty("presence_penalty"),
            "frequency_penalty": penalty("frequency_penalty"),
        }
        return cls(**arrays)

    def take(self, index: jax.Array | np.ndarray) -> RowSampling:
        """The rows of these numbers, int [taken], in their order."""
        return jax.tree.map(lambda x: x[index], self)

    def put(self, index: jax.Array | np.ndarray, rows: RowSampling) -> RowSampling:
        """``rows`` at these numbers, int [put], the others as they are; a number beyond is none."""
        return jax.tree.map(
            lambda x, y: jnp.asarray(x).at[index].set(y, mode="drop"), self, rows
        )

    def ends(self, token: jax.Array) -> jax.Array:
        """bool [rows]: whether a row's ``token``, int32 [rows], is one of its stop tokens."""
        return jnp.any(token[:, None] == self.stop, axis=-1)

    @property
    def greedy(self) -> jax.Array:
        """bool [rows], as ``Sampling.greedy``; so are the next two."""
        return self.temperature == 0

    @property
    def tempered(self) -> jax.Array:
        return ~self.greedy & (self.temperature != 1)

    @property
    def truncates(self) -> jax.Array:
        return ~self.greedy & ((self.top_k > 0) | (self.top_p < 1) | (self.min_p > 0))

    def alters(self, position: jax.Array) -> jax.Array:
        """bool [rows]: whether biases, bans or penalties change the logits at ``position``."""
        altered = jnp.any(self.bias_tokens >= 0, axis=-1)
        altered |= jnp.any(self.held(position) >= 0, axis=-1)
        if self.repetition_penalty is not None:
            altered |= self.repetition_penalty != 1
            altered |= (self.presence_penalty != 0) | (self.frequency_penalty != 0)
        return altered

    def held(self, position: jax.Array) -> jax.Array:
        """int32 [rows, stops]: the stop tokens that are banned at ``position``, -1 for none."""
        return jnp.where((position < self.min_tokens)[:, None], self.stop, -1)

    def forced_at(self, position: jax.Array) -> jax.Array:
        """int32 [rows]: the token that must stand at ``position``, -1 where any may."""
        here = jnp.arange(self.forced.shape[1]) == position[:, None]
        return jnp.max(jnp.where(here, self.forced, -1), axis=-1, initial=-1)


_EMPTY = Options(temperature=0.0)


def _check_fits(options: Options, sizes: Sizes) -> None:
    held = [
        ("tokens with a bias or ban", len({*options.logit_bias, *options.bad}), sizes.biases),
        ("stop tokens", len(options.stop), sizes.stops),
        ("forced tokens", len(options.forced), sizes.forced),
    ]
    for what, count, room in held:
        if count > room:
            raise ConfigError(f"{count} {what}: at most {room}")
    for name in ("logit_bias", "bad", "stop", "forced"):
        for token in getattr(options, name):
            if token >= sizes.vocab:
                raise ConfigError(f"{name} token {token}: the model's are 0 to {sizes.vocab - 1}")
    forbidden = options.banned.union(options.stop if options.min_tokens else ())
    if len(forbidden) >= sizes.vocab:
        raise ConfigError(f"all {sizes.vocab} tokens are banned: leave one to draw")
    if options.penalised and not sizes.penalties:
        raise ConfigError(
            "repetition_penalty, presence_penalty and frequency_penalty need rows that have them: "
            "Sizes(penalties=True), and Counts of the tokens so far"
        )


def _biases(options: Options) -> dict[int, float]:
    return {**options.logit_bias, **dict.fromkeys(options.banned, -math.inf)}


def _padded(
    rows: Sequence[Iterable[float]], width: int, empty: int, dtype: Any
) -> np.ndarray:
    table = np.full((len(rows), width), empty, dtype)
    for row, values in zip(table, map(list, rows)):
        row[: len(values)] = values
    return table


def draw_rows(
    logits: jax.Array,
    keys: jax.Array,
    position: jax.Array,
    rows: RowSampling,
    counts: Counts | None = None,
    kernels: Kernels = Kernels(),
    layout: Layout | None = None,
    allowed: jax.Array | None = None,
) -> Draw:
    """Draw each row's token at its ``position``, as its options say.

    A row with a temperature, top-k and top-p alone draws what ``draw`` does with them, by the same
    noise and arithmetic (equal up to float32's rounding), whatever the other rows ask for.

    Of the log-probs, ``sampled`` is under the distribution drawn from, all options applied (of a
    greedy row biases, bans and penalties alone: untempered, nothing cut; of a forced token 0).
    ``policy`` is what training computes: temperature and nothing else; ``untempered`` that of the
    plain softmax. ``top`` are made if a row asks for them, and then of all rows.

    Args:
      logits: float32 [rows, vocab].
      keys: one per row, of ``sequence_keys``.
      position: int [] or [rows], the token's index in its response.
      rows: the options.
      counts: the tokens before, where ``rows`` may have penalties.
      kernels: of the platform.
      layout: as of ``draw``.
      allowed: as of ``vocabulary.only``: other tokens are banned, forced ones apart; at least one
        of a row is allowed if anybody reads it. None: all are.

    Raises:
      ValueError: counts without penalties, or penalties without counts.
    """
    if (counts is None) != (rows.repetition_penalty is None):
        raise ValueError(
            "rows with penalties are drawn with Counts, rows without them with none; "
            f"counts are {'missing' if counts is None else 'given'}"
        )
    logits, position = jnp.asarray(logits), jnp.broadcast_to(position, keys.shape)
    axes = vocabulary.axes_of(layout)
    # Asked of all rows on all devices: one that skips an exchange must not leave another waiting.
    asked = {
        "samples": jnp.any(~rows.greedy),
        "alters": jnp.any(rows.alters(position)) | vocabulary.bans(allowed),
        "tempered": jnp.any(rows.tempered),
        "truncates": jnp.any(rows.truncates),
        "top_k": jnp.any(rows.truncates & (rows.top_k > 0)),
        "top_p": jnp.any(rows.truncates & (rows.top_p < 1)),
        "top": jnp.any(rows.top > 0),
    }
    part = _Part(kernels, axes)

    def noise() -> jax.Array:
        return gumbel(keys, position, logits.shape[-1])

    if layout is None or not axes:
        return part.draw(logits, noise, position, rows, counts, allowed, asked)

    def constrained(noise: jax.Array) -> jax.Array:
        # Held as it is drawn from, so that every device makes its own part.
        return layout.constrain(noise, "batch", "vocab")

    made = jax.lax.cond(
        asked["samples"],
        lambda: constrained(noise()),
        lambda: constrained(jnp.zeros(logits.shape, jnp.float32)),
    )
    split, whole = layout.spec(["batch", "vocab"]), layout.spec(["batch"])
    return jax.shard_map(
        lambda logits, made, *more: part.draw(logits, lambda: made, *more),
        mesh=layout.mesh,
        in_specs=(split, split, whole, whole, split, whole, jax.sharding.PartitionSpec()),
        out_specs=whole,
        check_vma=False,
    )(logits, constrained(made), position, rows, counts, allowed, asked)


def no_tops(shape: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    """The most probable tokens of so many places of which there are none, as of ``Draw``."""
    shape = (*shape, MOST_TOP)
    return jnp.zeros(shape, jnp.int32), jnp.full(shape, -jnp.inf, jnp.float32)


# What a softmax's logits [rows, vocab] are lessened by, each [rows, 1]: the largest of them, then
# the logarithm of the sum of what exp makes of the rest.
_Norm = tuple[jax.Array, jax.Array]


@dataclasses.dataclass(frozen=True)
class _Part:
    """``draw_rows`` of a part of the vocabulary, the whole being split over ``axes``."""

    kernels: Kernels
    axes: tuple[str, ...]

    def draw(
        self,
        logits: jax.Array,
        noise: Callable[[], jax.Array],
        position: jax.Array,
        rows: RowSampling,
        counts: Counts | None,
        allowed: jax.Array | None,
        asked: dict[str, jax.Array],
    ) -> Draw:
        # Not divided by the temperature: XLA makes this of ``draw``'s division by a constant.
        scale = 1.0 / _temperature(rows)
        policy = self.norm(logits * scale)
        plain = jax.lax.cond(asked["tempered"], lambda: self.norm(logits), lambda: policy)
        forced = rows.forced_at(position)

        def drawn(altered: jax.Array, norm: _Norm) -> Draw:
            # Computed in each branch, so that it is not written for branches that are not taken.
            def tempered() -> jax.Array:
                return _normed(altered * scale, norm)

            edge, cut = jax.lax.cond(
                asked["truncates"],
                lambda: self.cut(altered, tempered(), rows, asked),
                lambda: _uncut(altered),
            )

            def perturbed() -> jax.Array:
                kept = vocabulary.ordered(altered) >= edge
                final = jnp.where(kept, _normed(tempered(), cut), -jnp.inf)
                return jnp.where(rows.greedy[:, None], altered, final + noise())

            # What a branch gives lies in memory: looking for the largest never computes it twice,
            # in two orders of rounding.
            scores = jax.lax.cond(asked["samples"], perturbed, lambda: altered)
            token = vocabulary.largest(scores, self.kernels.largest, self.axes)
            token = jnp.where(forced >= 0, forced, token)
            own, raw = vocabulary.pick([altered, logits], token, self.axes)
            own, raw = own[:, None], raw[:, None]
            sampled = _normed(_normed(own * scale, norm), cut)[:, 0]

            def likeliest() -> tuple[jax.Array, jax.Array]:
                kept = vocabulary.ordered(altered) >= edge
                final = jnp.where(kept, _normed(tempered(), cut), -jnp.inf)
                return vocabulary.likeliest(final, MOST_TOP, self.axes)

            tops = jax.lax.cond(asked["top"], likeliest, lambda: no_tops(token.shape))
            return Draw(
                token,
                jnp.where(forced >= 0, 0.0, sampled),
                _normed(raw * scale, policy)[:, 0],
                _normed(raw, plain)[:, 0],
                *tops,
            )

        def drawn_altered() -> Draw:
            altered = self.alter(logits, position, rows, counts, allowed)
            return drawn(altered, self.norm(altered * scale))

        return jax.lax.cond(asked["alters"], drawn_altered, lambda: drawn(logits, policy))

    def alter(
        self,
        logits: jax.Array,
        position: jax.Array,
        rows: RowSampling,
        counts: Counts | None,
        allowed: jax.Array | None,
    ) -> jax.Array:
        """Biases, penalties, then what is not allowed and the stop tokens' bans: whatever is banned
        stays so.

        A scatter comes last, whose result lies in memory: what is compared with an edge must not be
        computed twice, in two orders of rounding.
        """
        altered = vocabulary.add(logits, rows.bias_tokens, rows.bias, self.axes)
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
        if allowed is not None:
            altered = vocabulary.only(altered, allowed, self.axes)
        return vocabulary.add(altered, rows.held(position), jnp.float32(-jnp.inf), self.axes)

    def cut(
        self,
        altered: jax.Array,
        tempered: jax.Array,
        rows: RowSampling,
        asked: dict[str, jax.Array],
    ) -> tuple[jax.Array, _Norm]:
        """The edge, uint32 [rows, 1], at or above which the altered logits are kept, and the norm
        of those.

        Top-k, top-p and min-p each keep tokens at or above some logit, so the highest edge counts;
        only top-p depends on what another has left out, top-k before it.
        """
        order = vocabulary.ordered(altered)
        everything, unnormed = _uncut(tempered)
        truncates = rows.truncates[:, None]
        top_k, top_p, min_p = rows.top_k[:, None], rows.top_p[:, None], rows.min_p[:, None]

        def by_top_k() -> jax.Array:
            return jnp.where(top_k > 0, vocabulary.top_k_edge(order, top_k, self.axes), everything)

        edge = jax.lax.cond(asked["top_k"], by_top_k, lambda: everything)
        left = jnp.where(order >= edge, tempered, -jnp.inf)

        def by_top_p() -> jax.Array:
            reached = vocabulary.top_p_edge(order, left, top_p, self.axes)
            return jnp.where(top_p < 1, reached, everything)

        edge = jnp.maximum(edge, jax.lax.cond(asked["top_p"], by_top_p, lambda: everything))
        top = vocabulary.over(jnp.max(altered, -1, keepdims=True), jax.lax.pmax, self.axes)
        below = _temperature(rows) * jnp.log(min_p)
        edge = jnp.maximum(edge, vocabulary.ordered(top + below))
        edge = jnp.where(truncates, edge, everything)
        shift, log_sum = self.norm(jnp.where(order >= edge, tempered, -jnp.inf))
        return edge, (
            jnp.where(truncates, shift, unnormed[0]),
            jnp.where(truncates, log_sum, unnormed[1]),
        )

    def norm(self, logits: jax.Array) -> _Norm:
        """What turns logits [rows, vocab] into log-probs, each [rows, 1]."""
        shift = vocabulary.over(jnp.max(logits, -1, keepdims=True), jax.lax.pmax, self.axes)
        total = jnp.sum(jnp.exp(logits - shift), -1, keepdims=True)
        return shift, jnp.log(vocabulary.over(total, jax.lax.psum, self.axes))


def _temperature(rows: RowSampling) -> jax.Array:
    """float32 [rows, 1]: 1 of greedy rows, whose log-probs are untempered."""
    return jnp.where(rows.greedy, 1.0, rows.temperature)[:, None]


def _normed(logits: jax.Array, norm: _Norm) -> jax.Array:
    shift, log_sum = norm
    return logits - shift - log_sum


def _uncut(logits: jax.Array) -> tuple[jax.Array, _Norm]:
    """The edge and norm of rows of which all is kept."""
    zeros = jnp.zeros((logits.shape[0], 1), jnp.float32)
    return zeros.astype(jnp.uint32), (zeros, zeros)
