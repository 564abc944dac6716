"""Token counts of a batch's rows, for repetition, presence and frequency penalties."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from hjax.rollout import vocab_parallel
from hjax.sharding.layout import Layout


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TokenCounts:
    """The tokens that rows have so far, for penalties.

    Attributes:
      prompt: bool [rows, vocab], whether the prompt has a token.
      response: int32 [rows, vocab], how often the response has it.
    """

    prompt: jax.Array
    response: jax.Array

    @classmethod
    def of(
        cls,
        prompts: jax.Array,
        prompt_mask: jax.Array,
        vocab: int,
        responses: jax.Array | None = None,
        response_mask: jax.Array | None = None,
        layout: Layout | None = None,
    ) -> TokenCounts:
        """The counts of new or resumed rows.

        Args:
          prompts: int32 [rows, prompt_length], padded on any side.
          prompt_mask: bool, like ``prompts``.
          vocab: vocabulary size.
          responses: int32 [rows, length], resumed responses; None: none.
          response_mask: bool, like ``responses``.
          layout: over whose axes rows and vocabulary are split.
        """

        def count(tokens: jax.Array, mask: jax.Array) -> jax.Array:
            zeros = jnp.zeros((tokens.shape[0], vocab), jnp.int32)
            return _count(zeros, jnp.where(mask, tokens, -1), layout)

        seen = count(prompts, prompt_mask) > 0
        if responses is None or response_mask is None:
            return cls(seen, jnp.zeros(seen.shape, jnp.int32))
        return cls(seen, count(responses, response_mask))

    def continued(
        self, tokens: jax.Array, mask: jax.Array, layout: Layout | None = None
    ) -> TokenCounts:
        """The counts of rows whose prompts are all tokens so far and further ones.

        Args:
          tokens, mask: the further ones, as ``prompts`` of ``of``; a row without any stays as it
            is.
          layout: as of ``of``.
        """
        more = TokenCounts.of(tokens, mask, self.prompt.shape[1], layout=layout)
        rows = mask.any(axis=1, keepdims=True)
        prompt = self.prompt | more.prompt | (rows & (self.response > 0))
        return TokenCounts(prompt, jnp.where(rows, 0, self.response))


def count_token(
    counts: TokenCounts | None, token: jax.Array, live: jax.Array, layout: Layout | None = None
) -> TokenCounts | None:
    """``counts`` after each row has drawn a token; of None, None.

    Args:
      counts: the tokens before.
      token: int32 [rows].
      live: bool [rows]; other rows stay as they are.
      layout: over whose axes rows and vocabulary are split.
    """
    if counts is None:
        return None

    token = jnp.where(live, token, -1)[:, None]
    return TokenCounts(counts.prompt, _count(counts.response, token, layout))


def _count(table: jax.Array, tokens: jax.Array, layout: Layout | None) -> jax.Array:
    """``table`` [rows, vocab] with one more for each of ``tokens`` [rows, n]; -1 is ignored."""
    axes, one = vocab_parallel.vocab_axes(layout), jnp.int32(1)
    if layout is None or not axes:
        return vocab_parallel.scatter_add(table, tokens, one)
    split = layout.spec(["batch", "vocab"])
    return jax.shard_map(
        lambda table, tokens: vocab_parallel.scatter_add(table, tokens, one, axes),
        mesh=layout.mesh,
        in_specs=(split, layout.spec(["batch"])),
        out_specs=split,
        check_vma=False,
    )(table, tokens)
