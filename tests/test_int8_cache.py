"""Keys and values in int8: rounding and attention by plain numpy, rollouts by a forward that rounds,
and the same tokens whatever else is decoded, and wherever."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import test_kernels_decode as by_hand
from hjax.errors import ConfigError
from hjax.kernels import decode, decode_gpu, decode_tpu, int8_cache
from hjax.kernels.attention import Scoring
from hjax.kernels.int8_cache import Quantized
from hjax.models.attention import Causal
from hjax.models.config import LayerKind, ModelConfig
from hjax.models.forward import positions_of
from hjax.models.parameters import decoder_network
from hjax.models.transformer import Compute
from hjax.rollout.generator import Generator
from hjax.rollout.language_model import LanguageModel
from hjax.rollout.sampling import Sampling
from hjax.rollout.service import Request, Service
from hjax.sharding.layout import make_layouts, without


def rounded(x):
    """In numpy: the nearest of 255 whole multiples of the largest magnitude over 127; which of two
    that are as near is float32's to say."""
    x = np.asarray(x, np.float32)
    top = np.abs(x).max(-1, keepdims=True)
    numbers = np.rint(x * (np.float32(127) / np.where(top, top, 1)))
    return numbers.astype(np.float64) * top / 127


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_rounding_is_off_by_half_a_step_at_most(dtype):
    draw = np.random.default_rng(0)
    x = draw.normal(size=(50, 3, 16)) * 10.0 ** draw.integers(-8, 8, (50, 3, 1))
    x[7], x[8, 1, :5] = 0, 0
    x = jnp.asarray(x, dtype)
    numbers, scale = int8_cache.quantized(x)
    assert numbers.dtype == jnp.int8 and scale.shape == (50, 3, 1)
    exact = np.asarray(x, np.float64)
    found = np.asarray(numbers, np.float64) * np.asarray(scale, np.float64)
    step = np.abs(exact).max(-1, keepdims=True) / 127
    assert (np.abs(found - exact) <= step / 2 * (1 + 1e-5)).all()
    np.testing.assert_allclose(found, rounded(x), rtol=1e-6)
    assert (found[7] == 0).all() and np.abs(numbers).max() == 127


def kept(x, columns=False):
    """Of the test's own making: [..., length, head_dim] as a cache has it."""
    step = np.abs(np.asarray(x, np.float32)).max(-1, keepdims=True) / np.float32(127)
    numbers = np.rint(rounded(x) / np.where(step, step, 1)).astype(np.int8)
    numbers = numbers.swapaxes(-1, -2) if columns else numbers
    return Quantized(jnp.asarray(numbers), jnp.asarray(step.swapaxes(-1, -2)))


NAMES = [name for name in by_hand.CASES if name not in by_hand.SLOW]


def case_of(name):
    """As of the float kernels, with lengths in tiles of int8; keys and values rounded."""
    shape, prompt, length, dtype, given = by_hand.CASES[name]
    given, sinks = dict(given), None
    if given.pop("sinks", False):
        sinks = jnp.asarray(np.random.default_rng(2).normal(size=shape[1] * shape[3]), jnp.float32)
    where = by_hand.places(shape[0], shape[2], prompt, length)
    seen = decode.Seen(*(jnp.asarray(x, jnp.int32) for x in where))
    arrays = by_hand.arrays(shape, prompt, length, jnp.int8)
    q, k, v, *cache = by_hand.arrays(shape, arrays[3].shape[3], arrays[5].shape[4], dtype)
    cut = [x[..., : y.shape[-2], :] for x, y in zip(cache, arrays[3:])]
    options = Scoring(**given), sinks
    answer = by_hand.expected_of((q, rounded(k), rounded(v), *map(rounded, cut)), seen, options)
    return (q, k, v, *cut), seen, options, dtype, answer


@pytest.mark.parametrize("form", ["rows", "columns", "kernel"])
@pytest.mark.parametrize("name", NAMES)
def test_attention_is_that_over_what_was_rounded(name, form):
    (q, k, v, *cache), seen, options, dtype, answer = case_of(name)

    @jax.jit
    def run(q, k, v, prompt_k, prompt_v, own_k, own_v):
        if form == "kernel":
            given = q, k, v, prompt_k, prompt_v, own_k, own_v
            return decode_tpu.decode(*given, jnp.int32(1), seen, *options, interpret=True)
        prompt_k, prompt_v, own_k, own_v = jax.tree.map(
            lambda x: x[1], (prompt_k, prompt_v, own_k, own_v)
        )

        def written(own, new, columns):
            new = int8_cache.like(own, new)
            return int8_cache.each(
                lambda axis, _, held, x: decode.write(held, x, seen.position, axis == -1),
                own, new, columns=columns,
            )  # fmt: skip

        own_k = written(own_k, k, form == "columns")
        own_v = written(own_v, v, False)
        keys = "xksdu" if form == "columns" else "xksud"
        out = decode.attend(q, prompt_k, prompt_v, own_k, own_v, seen, *options, keys)
        return out, own_k, own_v

    prompt_k, prompt_v, own_k, own_v = cache
    held = kept(prompt_k), kept(prompt_v), kept(own_k, form == "columns"), kept(own_v)
    out, made_k, made_v = run(q, k, v, *held)
    limit = 1e-5 if dtype == jnp.float32 else 2e-2
    np.testing.assert_allclose(by_hand.wide(out), answer, atol=limit)
    # What is written is the token alone, beside what stood there.
    position = np.asarray(seen.position)
    for made, own, new in ((made_k, own_k, k), (made_v, own_v, v)):
        numbers, scale = by_hand.wide(made.numbers), by_hand.wide(made.scale)
        if form != "kernel" and made is made_k and form == "columns":
            numbers = numbers.swapaxes(-1, -2)
        found = numbers * scale.swapaxes(-1, -2)
        expected = by_hand.written(rounded(own), rounded(new), position)
        expected = expected if form == "kernel" else expected[1]
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", by_hand.FILLED)
def test_the_gpu_s_kernel_reads_what_was_rounded(name):
    """Beside what it sees stands NaN in the scales, of which nothing comes through."""
    (groups, kv_heads, samples, per_kv, new, dim), length, scoring = by_hand.FILLED[name]
    draw = np.random.default_rng(1)
    first = draw.integers(0, length // 2, (groups, samples))
    last = draw.integers(length // 2, length - new + 1, (groups, samples))
    column = np.arange(length)
    there = (column >= first[..., None]) & (column < last[..., None] + new)
    q = jnp.asarray(draw.normal(size=(groups, kv_heads, samples, per_kv, new, dim)), jnp.float32)
    k, v = draw.normal(size=(2, groups, kv_heads, samples, length, dim)).astype(np.float32)
    held = [kept(x) for x in (k, v)]
    hidden = [
        dataclasses.replace(x, scale=jnp.where(there[:, None, :, None], x.scale, jnp.nan))
        for x in held
    ]
    spans = jnp.asarray(first), jnp.asarray(last)
    top, total, out = decode_gpu.filled(q, *hidden, *spans, scoring, interpret=True)
    k, v, exact = rounded(k), rounded(v), by_hand.wide(q)
    for g, h, s, i, t in np.ndindex(*top.shape):
        at = last[g, s] + t
        low = max(first[g, s], at + 1 - scoring.window) if scoring.window else first[g, s]
        scores = k[g, h, s, low : at + 1] @ exact[g, h, s, i, t]
        if scoring.softcap:
            scores = scoring.softcap * np.tanh(scores / scoring.softcap)
        weights = np.exp(scores - scores.max())
        answer = weights @ v[g, h, s, low : at + 1] / weights.sum()
        place = g, h, s, i, t
        np.testing.assert_allclose(out[place] / total[place], answer, atol=1e-5)
