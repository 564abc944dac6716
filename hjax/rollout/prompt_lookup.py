"""Speculative decoding without a draft model: draft tokens by prompt lookup (n-gram matching).

If the last few tokens occurred before, the tokens that followed them then are proposed as drafts
(prompt lookup decoding; Saxena 2023), and the model scores all of them in one pass. A draft is
accepted if it is the token that is drawn at its position: each position is drawn as always, with
its own key. So the output equals that without drafts, token for token, and is exact in distribution
(for drafts without probabilities this is the rule of Leviathan et al., arXiv 2211.17192).
"""

import jax
import jax.numpy as jnp

MAX_NGRAM = 3  # tokens at a text's end that are searched for; the longest, then latest match wins


def draft_tokens(text: jax.Array, length: jax.Array, count: int) -> jax.Array:
    """int32 [rows, count]: draft tokens, which may follow each text.

    If fewer tokens follow the match they are repeated. Without a match the drafts are arbitrary.

    Args:
      text: int32 [rows, room], from column 0 on.
      length: int32 [rows], tokens of each, at least 1.
      count: number of drafts.
    """
    room = text.shape[1]
    at, end = jnp.arange(room), length[:, None] - 1
    same = jnp.ones(text.shape, bool)
    matched = jnp.zeros(text.shape, jnp.int32)
    for back in range(MAX_NGRAM):
        last = jnp.take_along_axis(text, jnp.maximum(end - back, 0), axis=1)
        same &= (jnp.pad(text, ((0, 0), (back, 0)))[:, :room] == last) & (at >= back)
        matched += same
    # Exclude the end itself; among equally long matches take the latest.
    found = jnp.argmax(jnp.where(at < end, matched * room + at, -1), axis=1)[:, None]
    follows = jnp.maximum(end - found, 1)
    index = found + 1 + jnp.arange(count) % follows
    return jnp.take_along_axis(text, jnp.minimum(index, room - 1), axis=1)
