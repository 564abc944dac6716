"""Forward passes over prompts and responses: hidden states, log-probs, entropy, top-k log-probs.

Rows are [prompt | response] with the prompt padded on the left and the response on the right. Rows
of one prompt are consecutive, so that its forward runs once for all of them.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import chex
import jax
import jax.numpy as jnp

from hjax.kernels.attention import LENGTH_MULTIPLE
from hjax.kernels.kernel_sharding import KernelSharding
from hjax.kernels.log_prob_head import LogProbHead, token_scores, top_scores
from hjax.models.attention_strategies import Causal, SharedPrompt
from hjax.models.compute import Compute
from hjax.models.dropout import KEY as DROPOUT
from hjax.models.dropout import Dropout, token_keys
from hjax.models.sequence_packing import KEY, map_packed_states
from hjax.sharding.layout import Layout
from hjax.sharding.pipeline import run_all_layers

Batch = Mapping[str, jax.Array]
LOGIT_CHUNK_BYTES = 256 * 2**20


def token_positions(mask: jax.Array) -> jax.Array:
    """Positions, int32 [batch, length]: each real token's index in its sequence; 0 at padding.

    Args:
      mask: bool [batch, length], False at padding.
    """
    chex.assert_rank(mask, 2)
    chex.assert_type(mask, bool)
    return jnp.maximum(jnp.cumsum(mask, axis=-1, dtype=jnp.int32) - 1, 0)


def response_states(decoder: Any, batch: Batch, samples: int, compute: Compute) -> jax.Array:
    """Hidden states from which each response token is predicted.

    Args:
      decoder: a ``Decoder``.
      batch: ``prompts``, ``prompt_mask`` [rows, prompt_length]; ``responses`` [rows, length]; with
        dropout its rows' keys (``hjax.models.dropout``); if the decoder has a tally,
        ``counted_prompts`` and ``counted_responses``.
      samples: consecutive rows that share a prompt; divides the rows.

    Returns:
      [rows, length, embed]: entry t saw the prompt and the response's first t tokens.

    Raises:
      AssertionError: other shapes or dtypes, when traced.
    """
    return map_response_states(decoder, batch, samples, compute, lambda states, _: states)


def map_response_states(
    decoder: Any,
    batch: Batch,
    samples: int,
    compute: Compute,
    read: Callable[[jax.Array, jax.Array], Any],
) -> Any:
    """Apply ``read`` to the hidden states from which each response token is predicted.

    A batch with a packing is computed in packs (``hjax.models.sequence_packing``), and ``read`` is
    applied to states within packs, without padding.

    Args:
      decoder, batch, samples, compute: as of ``response_states``.
      read: (states [many, some, embed], their tokens int [many, some]) -> arrays
        [many, some, ...].

    Returns:
      its arrays as [rows, length, ...]; undefined on padding.
    """
    if KEY in batch:
        return map_packed_states(decoder, batch, compute, read)
    return read(_padded_states(decoder, batch, samples, compute), batch["responses"])


def _padded_states(decoder: Any, batch: Batch, samples: int, compute: Compute) -> jax.Array:
    prompts, mask, responses = batch["prompts"], batch["prompt_mask"], batch["responses"]
    _check_tokens(prompts, mask)
    chex.assert_shape(responses, (prompts.shape[0], None))
    chex.assert_type(responses, int)
    chex.assert_is_divisible(prompts.shape[0], samples)
    rows, length = responses.shape
    split, form = compute.context_layout, compute.form
    # With context parallelism only the kernels support a prompt that several responses share.
    long = form.uses_kernel(prompts.shape[1] + length)
    per_prompt = samples if split is None or (long and decoder.stack is run_all_layers) else 1
    groups = rows // per_prompt

    def first(x: jax.Array) -> jax.Array:
        return x.reshape(groups, per_prompt, x.shape[-1])[:, 0]

    # Gather a split length before padding or slicing it: pipeline stages, each in its own branch,
    # cannot exchange parts with neighbours.
    def unsplit(x: jax.Array) -> jax.Array:
        return x if split is None else compute.constrain(x, "batch", *[None] * (x.ndim - 1))

    prompts, mask = first(prompts), first(mask)
    ways = 1 if split is None else split.shard_count("length")
    multiple = ways * (LENGTH_MULTIPLE if long and ways > 1 else 1)
    padding = -(prompts.shape[1] + per_prompt * length) % multiple
    if padding:  # pad prompts on the left until the length divides evenly
        prompts, mask = (unsplit(jnp.pad(x, ((0, 0), (padding, 0)))) for x in (prompts, mask))
    prompt = prompts.shape[1]
    tokens = jnp.concatenate([prompts, responses.reshape(groups, per_prompt * length)], axis=1)
    after = jnp.sum(mask, axis=-1, dtype=jnp.int32)[:, None] + jnp.arange(length, dtype=jnp.int32)
    positions = jnp.concatenate([token_positions(mask), jnp.tile(after, (1, per_prompt))], axis=1)
    attention: SharedPrompt | Causal = SharedPrompt(mask, per_prompt, form)
    if split is not None and not long:
        # Causality alone hides what follows a response.
        mask = unsplit(jnp.concatenate([mask, jnp.ones((groups, length), bool)], axis=1))
        attention = Causal(mask, form=form)
    tokens, positions = unsplit(tokens), unsplit(positions)
    if DROPOUT in batch:
        keys = unsplit(token_keys(batch[DROPOUT], per_prompt, prompt, length))
        compute = dataclasses.replace(compute, dropout=Dropout.of(keys, positions))
    tally_weights = None
    if decoder.tally is not None:  # a shared prompt counts once for each of its responses
        weights, own = (unsplit(batch[key]) for key in ("counted_prompts", "counted_responses"))
        weights = jnp.sum(weights.reshape(groups, per_prompt, -1), axis=1)
        weights = unsplit(jnp.pad(weights, ((0, 0), (padding, 0))))
        tally_weights = unsplit(jnp.concatenate([weights, own.reshape(groups, -1)], axis=1))
    hidden = unsplit(decoder.hidden_states(tokens, positions, attention, compute, tally_weights))
    if split is not None and per_prompt == 1:
        states = unsplit(hidden[:, prompt - 1 : -1])
    else:
        states = _response_states(hidden, per_prompt, length)
    if split is None or length % ways:
        return states
    return compute.constrain(states, "batch", "length", None)


def _response_states(hidden: jax.Array, per_prompt: int, length: int) -> jax.Array:
    """States [rows, length, embed] from which response tokens are predicted, taken from rows
    [groups, prompt + responses * length, embed] of a prompt and its responses."""
    groups, places, width = hidden.shape
    prompt = places - per_prompt * length
    last = jnp.broadcast_to(hidden[:, None, prompt - 1 : prompt], (groups, per_prompt, 1, width))
    own = hidden[:, prompt:].reshape(groups, per_prompt, length, width)
    states = jnp.concatenate([last, own[:, :, :-1]], axis=2)
    return states.reshape(groups * per_prompt, length, width)


def sequence_states(model: Any, tokens: jax.Array, mask: jax.Array, compute: Compute) -> jax.Array:
    """Hidden states [batch, length, embed] of whole sequences.

    Args:
      model: a ``Decoder``.
      tokens: int [batch, length].
      mask: bool [batch, length], False at padding.

    Raises:
      AssertionError: other shapes or dtypes, when traced.
    """
    _check_tokens(tokens, mask)
    attention = Causal(mask, form=compute.form)
    return model.hidden_states(tokens, token_positions(mask), attention, compute)


def _check_tokens(tokens: jax.Array, mask: jax.Array) -> None:
    chex.assert_rank(tokens, 2)
    chex.assert_equal_shape((tokens, mask))
    chex.assert_type((tokens, mask), (int, bool))


def token_log_probs(
    decoder: Any,
    hidden: jax.Array,
    tokens: jax.Array,
    temperature: float = 1.0,
    with_entropy: bool = True,
    layout: Layout | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """Log-probs of tokens, and the entropy of the distribution each was drawn from.

    If all logits of a device would be large, they are computed in chunks, and recomputed in the
    backward pass (``hjax.kernels.log_prob_head``).

    Args:
      hidden: [rows, length, embed], from which token t is predicted.
      tokens: int [rows, length], or k tokens per position [rows, length, k].
      temperature: divides the logits.
      with_entropy: whether to compute the entropy.
      layout: over whose devices rows, length and vocabulary are split.

    Returns:
      float32 natural logs in the shape of the tokens, and float32 [rows, length] nats or None.

    Raises:
      AssertionError: other shapes or dtypes, when traced.
    """
    chex.assert_rank((hidden, tokens), (3, {2, 3}))
    chex.assert_equal(hidden.shape[:2], tokens.shape[:2])
    chex.assert_type(tokens, int)
    chunks = _logit_chunks(decoder, hidden, layout)
    if chunks > 1 and decoder.stack is run_all_layers:
        head = _head(decoder, temperature, layout)
        logprobs, entropy = token_scores(hidden, decoder.output_table, tokens, head)
        return logprobs, entropy if with_entropy else None

    def score(hidden: jax.Array, tokens: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        logits = decoder.logits(hidden)
        if temperature != 1:
            logits = logits / temperature
        total = jax.nn.logsumexp(logits, axis=-1)
        picked = _token_logits(logits, tokens, decoder.stack is run_all_layers)
        picked -= total if tokens.ndim == 2 else total[..., None]
        if not with_entropy:
            return picked, None
        return picked, total - jnp.sum(jnp.exp(logits - total[..., None]) * logits, axis=-1)

    if chunks <= 1:
        return score(hidden, tokens)
    return _map_chunks(score, (hidden, tokens), chunks)


def log_probs_and_top(
    decoder: Any, hidden: jax.Array, tokens: jax.Array, count: int, layout: Layout | None = None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """``token_log_probs`` and ``top_log_probs`` in one pass; not inside a pipeline stage.

    Args:
      hidden, tokens, layout: as of ``token_log_probs``.
      count: k, most probable tokens per position.

    Returns:
      float32 [rows, length] natural logs, and as ``top_log_probs``.
    """
    head = _head(decoder, 1.0, layout)
    hidden = jax.lax.stop_gradient(hidden)
    logprobs, _, top, of = top_scores(hidden, decoder.output_table, tokens, count, head)
    return logprobs, top, of


def top_log_probs(
    decoder: Any,
    hidden: jax.Array,
    count: int,
    temperature: float = 1.0,
    layout: Layout | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The top-k tokens of each position, as a teacher's targets in distillation; no gradients.

    Args:
      hidden, temperature, layout: as of ``token_log_probs``.
      count: k.

    Returns:
      float32 [rows, length, count] log-probs, descending, and int32 [rows, length, count] tokens.

    Raises:
      AssertionError: a count above the vocabulary's size, when traced.
    """
    hidden = jax.lax.stop_gradient(hidden)
    if decoder.stack is run_all_layers:
        none = jnp.zeros(hidden.shape[:2], jnp.int32)
        head = _head(decoder, temperature, layout)
        return top_scores(hidden, decoder.output_table, none, count, head)[2:]

    def score(hidden: jax.Array) -> tuple[jax.Array, jax.Array]:
        logits = jax.lax.stop_gradient(decoder.logits(hidden)) / temperature
        return jax.lax.top_k(jax.nn.log_softmax(logits), count)

    return _map_chunks(score, (hidden,), _logit_chunks(decoder, hidden, layout))


def _logit_chunks(decoder: Any, hidden: jax.Array, layout: Layout | None) -> int:
    """How many chunks keep a device's logits within ``LOGIT_CHUNK_BYTES``."""
    split = ("batch", "length", "vocab")
    parts = 1 if layout is None else math.prod(layout.shard_count(name) for name in split)
    logits = math.prod(hidden.shape[:2]) * decoder.config.vocab_size
    return math.ceil(logits * 4 / parts / LOGIT_CHUNK_BYTES)


def _head(decoder: Any, temperature: float, layout: Layout | None) -> LogProbHead:
    sharding = KernelSharding() if layout is None else layout.kernel_sharding
    return LogProbHead(temperature, decoder.config.final_softcap, LOGIT_CHUNK_BYTES, sharding)


def _map_chunks(score: Callable[..., Any], arrays: tuple[jax.Array, ...], parts: int) -> Any:
    """``score`` of arrays [rows, length, ...] in at least ``parts`` chunks of the length, one after
    another with remat. Inside a pipeline stage each chunk gathers the output table."""
    rows, length = arrays[0].shape[:2]
    parts = next((n for n in range(parts, length + 1) if length % n == 0), length)

    def split(x: jax.Array) -> jax.Array:
        return jnp.moveaxis(x.reshape(rows, parts, length // parts, *x.shape[2:]), 1, 0)

    def join(x: jax.Array) -> jax.Array:
        return jnp.moveaxis(x, 0, 1).reshape(rows, length, *x.shape[3:])

    results = jax.lax.map(lambda part: jax.checkpoint(score)(*part), tuple(map(split, arrays)))
    return jax.tree.map(join, results)


def response_log_probs(
    decoder: Any, batch: Batch, samples: int, compute: Compute, temperature: float = 1.0
) -> jax.Array:
    """float32 [rows, length]: log-probs of the responses' tokens, 0 on padding.

    Arguments as of ``response_states`` and ``token_log_probs``; the batch has ``response_mask``.
    """

    def read(states: jax.Array, tokens: jax.Array) -> jax.Array:
        return token_log_probs(decoder, states, tokens, temperature, False, compute.layout)[0]

    logprobs = map_response_states(decoder, batch, samples, compute, read)
    return jnp.where(batch["response_mask"], logprobs, 0.0)


def _token_logits(logits: jax.Array, tokens: jax.Array, gather: bool) -> jax.Array:
    """Each token's logit; ``gather``: False in a pipeline stage, where XLA cannot split one."""
    if gather:
        several = tokens if tokens.ndim == 3 else tokens[..., None]
        return jnp.take_along_axis(logits, several, axis=-1).reshape(tokens.shape)
    chosen = jnp.arange(logits.shape[-1]) == tokens[..., None]
    several = logits if tokens.ndim == 2 else logits[..., None, :]
    return jnp.sum(jnp.where(chosen, several, 0.0), axis=-1)
