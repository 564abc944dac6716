"""Speculation without a draft model: what a text said before, it may say again.

The tokens that followed the last few ones where these stood before are guessed to follow again
(prompt lookup decoding; Saxena 2023), and the model looks at all of them in one pass. A guess
counts if it is the token that is drawn there: each position is drawn as it always is, with its own
key, so what comes out is what comes out without guesses, token for token, and exact in distribution
(for guesses without probabilities this is the rule of Leviathan et al., arXiv 2211.17192).
"""

import jax
import jax.numpy as jnp

LONGEST = 3  # tokens at a text's end that are looked for; the longest match counts, then the latest


def guesses(text: jax.Array, length: jax.Array, count: int) -> jax.Array:
    """int32 [rows, count]: tokens that may follow.

    Where a match is so near the end that it has fewer tokens after it, these are repeated. Without
    a match anything is guessed.

    Args:
      text: int32 [rows, room], from column 0 on.
      length: int32 [rows], tokens of each, at least 1.
      count: how many.
    """
    room = text.shape[1]
    at, end = jnp.arange(room), length[:, None] - 1
    same = jnp.ones(text.shape, bool)
    matched = jnp.zeros(text.shape, jnp.int32)
    for back in range(LONGEST):
        last = jnp.take_along_axis(text, jnp.maximum(end - back, 0), axis=1)
        shifted = jnp.pad(text, ((0, 0), (back, 0)))[:, :room]
        same &= (shifted == last) & (at >= back)
        matched += same
    # Not the end itself; of equally long matches the latest.
    score = jnp.where(at < end, matched * room + at, -1)
    found = jnp.argmax(score, axis=1)[:, None]
    follows = jnp.maximum(end - found, 1)
    index = found + 1 + jnp.arange(count) % follows
    return jnp.take_along_axis(text, jnp.minimum(index, room - 1), axis=1)
