"""Attention of one token per row, the reference and the TPU's kernel, against plain numpy."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hjax.kernels import decode, decode_block_tpu, decode_gpu, decode_tpu
from hjax.kernels.attention import ScoreOptions
from hjax.kernels.cache_axis import COLUMNS, ROWS, TILE, TILES, to_layout
from hjax.kernels.decode import CacheMask

LAYERS = 2


def one_row(q, keys, values, scoring, sink):
    """Softmax over a list of keys, for one query [head_dim], in float64."""
    scale = q.shape[-1] ** -0.5 if scoring.scale is None else scoring.scale
    scores = keys @ q * scale
    if scoring.softcap:
        scores = scoring.softcap * np.tanh(scores / scoring.softcap)
    logits = np.append(scores, sink)
    weights = np.exp(logits - logits.max())
    weights /= weights.sum()
    return weights[:-1] @ values


def by_hand(q, k, v, prompt_k, prompt_v, own_k, own_v, begin, end, position, scoring, sinks):
    """Row for row: its keys in a list, the new one last, a window cut off at the front."""
    out = np.zeros(q.shape)
    for g, h, s, i in itertools.product(*map(range, q.shape[:4])):
        at = position[g, s]
        if at < 0:
            continue
        keys = [*prompt_k[g, h, begin[g] : end[g]], *own_k[g, h, s, :at], k[g, h, s]]
        values = [*prompt_v[g, h, begin[g] : end[g]], *own_v[g, h, s, :at], v[g, h, s]]
        seen = slice(-scoring.window, None) if scoring.window else slice(None)
        sink = -np.inf if sinks is None else sinks[h * q.shape[3] + i]
        out[g, h, s, i] = one_row(
            q[g, h, s, i], np.array(keys[seen]), np.array(values[seen]), scoring, sink
        )
    return out


def arrays(shape, prompt, length, dtype, seed=0):
    """Queries, the new token and the caches of all layers, whose lengths are the kernel's."""
    groups, kv_heads, samples, per_kv, dim = shape
    draw = np.random.default_rng(seed)

    def normal(*sizes):
        return jnp.asarray(draw.normal(size=sizes), dtype)

    prompt = decode.cache_capacity(decode.TPU_KERNEL, prompt, decode.PROMPT_BLOCK, dtype)
    length = decode.cache_capacity(decode.TPU_KERNEL, length, decode.OWN_BLOCK, dtype)
    token = groups, kv_heads, samples, dim
    shared, own = (LAYERS, groups, kv_heads), (LAYERS, groups, kv_heads, samples)
    return (
        normal(*shape),
        normal(*token),
        normal(*token),
        normal(*shared, prompt, dim),
        normal(*shared, prompt, dim),
        normal(*own, length, dim),
        normal(*own, length, dim),
    )


def places(groups, samples, prompt, length, seed=1):
    """Prompts padded on either side, one of them empty; rows anywhere, one of them without a
    sequence, one before its first token."""
    draw = np.random.default_rng(seed)
    ends = np.sort(draw.integers(0, prompt + 1, (groups, 2)), axis=1)
    ends[0] = prompt // 2
    position = draw.integers(0, length, (groups, samples))
    position[0, 0], position[-1, -1] = 0, -1
    return ends[:, 0], ends[:, 1], position


# groups, kv_heads, samples, per_kv, head_dim; prompt; length; dtype; options
CASES = {
    "plain": ((3, 2, 2, 3, 16), 9, 21, jnp.float32, {}),
    "odd sizes, bfloat16": ((3, 1, 3, 5, 64), 33, 70, jnp.bfloat16, {}),
    "everything": (
        (2, 2, 1, 4, 32), 40, 50, jnp.float32,
        {"scale": 0.3, "softcap": 2.0, "window": 7, "sinks": True},
    ),
    "window into the prompt": ((4, 1, 2, 1, 16), 30, 20, jnp.float32, {"window": 25}),
    "sinks": ((2, 2, 2, 2, 16), 8, 8, jnp.float32, {"sinks": True}),
    "several blocks, bfloat16": (
        (4, 1, 2, 2, 128), 600, 300, jnp.bfloat16, {"window": 200, "softcap": 30.0}
    ),
    "several blocks": ((8, 2, 1, 8, 128), 520, 257, jnp.float32, {"sinks": True}),
}  # fmt: skip
SLOW = ("several blocks, bfloat16", "several blocks")
EACH = [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in CASES]


def case_of(name):
    shape, prompt, length, dtype, given = CASES[name]
    given, sinks = dict(given), None
    if given.pop("sinks", False):
        draw = np.random.default_rng(2)
        sinks = jnp.asarray(draw.normal(size=shape[1] * shape[3]), jnp.float32)
    where = places(shape[0], shape[2], prompt, length)
    seen = CacheMask(*(jnp.asarray(x, jnp.int32) for x in where))
    return arrays(shape, prompt, length, dtype), seen, (ScoreOptions(**given), sinks), dtype


def wide(x):
    return np.asarray(x, np.float64)


def written(own, new, position):
    """The cache with each row's token, row for row."""
    out = wide(own)
    for g, s in itertools.product(*map(range, position.shape)):
        if position[g, s] >= 0:
            out[1, g, :, s, position[g, s]] = wide(new)[g, :, s]
    return out


def expected_of(given, seen, options):
    q, k, v, *cache = (wide(x) for x in given)
    where = (np.asarray(x) for x in (seen.begin, seen.end, seen.position))
    return by_hand(q, k, v, *(x[1] for x in cache), *where, *options)


@pytest.mark.parametrize("axis", [ROWS, COLUMNS, TILES], ids=["rows", "columns", "tiles"])
@pytest.mark.parametrize("name", EACH)
def test_the_reference_is_a_softmax_over_what_is_seen(name, axis):
    given, seen, options, dtype = case_of(name)

    @jax.jit
    def run(q, k, v, prompt_k, prompt_v, own_k, own_v):
        more = [(0, 0)] * 3 + [(0, -own_k.shape[-2] % TILE), (0, 0)]
        own_k, own_v = (jnp.pad(x[1], more) for x in (own_k, own_v))
        own_k = decode.write_token(to_layout(own_k, axis), k, seen.position, axis)
        own_v = decode.write_token(own_v, v, seen.position)
        return decode.attend(q, prompt_k[1], prompt_v[1], own_k, own_v, seen, *options, axis=axis)

    out = run(*given)
    limit = 2e-6 if dtype == jnp.float32 else 2e-2
    np.testing.assert_allclose(wide(out), expected_of(given, seen, options), atol=limit)


@pytest.mark.parametrize("name", EACH)
@pytest.mark.extended
def test_the_kernel_agrees_and_writes_one_token_per_row(name):
    given, seen, options, dtype = case_of(name)

    def run(*arrays):
        return decode_tpu.decode(*arrays, jnp.int32(1), seen, *options, interpret=True)

    out, own_k, own_v = jax.jit(run)(*given)
    limit = 2e-6 if dtype == jnp.float32 else 2e-2
    np.testing.assert_allclose(wide(out), expected_of(given, seen, options), atol=limit)
    position = np.asarray(seen.position)
    np.testing.assert_array_equal(wide(own_k), written(given[5], given[1], position))
    np.testing.assert_array_equal(wide(own_v), written(given[6], given[2], position))


@pytest.mark.extended
def test_one_position_for_all_rows_is_that_of_each():
    given, seen, options, _ = case_of("plain")
    position = jnp.int32(4)
    all_rows = CacheMask(seen.begin, seen.end, position)
    each = CacheMask(seen.begin, seen.end, jnp.full((3, 2), 4))
    for form in (decode.ROWS, decode.TPU_INTERPRETED):
        results = []
        for where in (all_rows, each):
            if form == decode.TPU_INTERPRETED:
                result = decode_tpu.decode(*given, 1, where, *options, interpret=True)
            else:
                q, k, v, prompt_k, prompt_v, own_k, own_v = (
                    x if i < 3 else x[1] for i, x in enumerate(given)
                )
                pairs = (own_k, k), (own_v, v)
                own = [decode.write_token(cache, x, where.position) for cache, x in pairs]
                result = decode.attend(q, prompt_k, prompt_v, *own, where, *options), *own
            results.append(result)
        for one, other in zip(*results, strict=True):
            np.testing.assert_array_equal(one, other)


def test_what_is_not_filled_is_not_read():
    """Nothing but a NaN stands in blocks that no row has reached, and none comes through."""
    shape, prompt, length = (2, 1, 2, 2, 16), 1100, 400
    q, k, v, *cache = arrays(shape, prompt, length, jnp.float32)
    prompt_k, prompt_v, own_k, own_v = cache
    seen = CacheMask(jnp.array([0, 20]), jnp.array([500, 512]), jnp.array([[3, 130], [0, -1]]))
    prompt_k, prompt_v = (x.at[..., 512:, :].set(jnp.nan) for x in (prompt_k, prompt_v))
    own_k, own_v = (x.at[..., 256:, :].set(jnp.nan) for x in (own_k, own_v))
    out, own_k, _ = decode_tpu.decode(
        q, k, v, prompt_k, prompt_v, own_k, own_v, 0, seen, interpret=True
    )
    assert np.isfinite(out).all()
    assert np.isnan(own_k[..., 256:, :]).all() and np.isfinite(own_k[..., :256, :]).all()


def test_a_length_that_is_not_whole_blocks_is_refused():
    given, seen, options, _ = case_of("plain")
    short = (*given[:5], *(x[..., :-1, :] for x in given[5:]))
    with pytest.raises(AssertionError, match="a length of 23 is not 24"):
        decode_tpu.decode(*short, 0, seen, *options, interpret=True)


def test_the_estimate_is_what_is_read_on_average():
    """Two groups, prompts of 512, a row each of 1024 tokens: read are the prompts and, averaged
    over all positions, half the rows and half a block more."""
    shape = (2, 1, 1, 8, 128)
    sizes = shape, (1, 2, 1, 512, 128), (1, 2, 1, 1, 1024, 128)
    q, prompt_k, own_k = (jax.ShapeDtypeStruct(size, jnp.bfloat16) for size in sizes)
    estimate = decode_tpu._estimate(
        decode_block_tpu.DecodeBlockShape.of(q, prompt_k, own_k), 2, None
    )
    positions = np.arange(1024)
    read = 2 * 512 + 2 * np.mean((positions // 128 + 1) * 128)
    tiles, queries = 2 * 16, 2 * 2 * 8 * 128 * 4
    assert estimate.bytes_accessed == (read + tiles) * 128 * 2 * 2 + queries


# Of the GPU's kernel: groups, kv_heads, samples, per_kv, new tokens, head_dim, columns.
FILLED = {
    "one token": ((3, 2, 1, 6, 1, 16), 333, ScoreOptions()),
    "new tokens, windows": ((3, 2, 2, 3, 4, 8), 200, ScoreOptions(window=70, softcap=5.0)),
    "many queries": ((1, 1, 1, 24, 2, 32), 130, ScoreOptions(softcap=2.0)),
}


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("name", FILLED)
@pytest.mark.extended
def test_the_gpu_s_kernel_meets_the_columns_that_a_row_sees(name, dtype):
    """Beside them stands NaN, of which nothing comes through."""
    (groups, kv_heads, samples, per_kv, new, dim), length, scoring = FILLED[name]
    draw = np.random.default_rng(1)
    own = groups, kv_heads, samples, length, dim
    first = draw.integers(0, length // 2, (groups, samples))
    last = draw.integers(length // 2, length - new + 1, (groups, samples))
    first[0, 0], last[0, 0] = 0, length - new  # all
    first[-1, -1] = last[-1, -1] = 5  # the new ones alone
    column = np.arange(length)
    there = (column >= first[..., None]) & (column < last[..., None] + new)
    q, k, v = (
        jnp.asarray(draw.normal(size=s), dtype)
        for s in ((groups, kv_heads, samples, per_kv, new, dim), own, own)
    )
    scaled = (q * dim**-0.5).astype(dtype)
    hidden = [jnp.where(there[:, None, ..., None], x, jnp.nan) for x in (k, v)]
    top, total, out = decode_gpu.attend_own(
        scaled, *hidden, jnp.asarray(first), jnp.asarray(last), scoring, interpret=True
    )
    exact, k, v = (wide(x) for x in (scaled, k, v))
    for g, h, s, i, t in np.ndindex(*top.shape):
        at = last[g, s] + t
        low = max(first[g, s], at + 1 - scoring.window) if scoring.window else first[g, s]
        scores = k[g, h, s, low : at + 1] @ exact[g, h, s, i, t]
        if scoring.softcap:
            scores = scoring.softcap * np.tanh(scores / scoring.softcap)
        weights = np.exp(scores - scores.max())
        seen = v[g, h, s, low : at + 1]
        place = g, h, s, i, t
        limit = 2e-6 if dtype == jnp.float32 else 2e-2
        answer = weights @ seen / weights.sum()
        np.testing.assert_allclose(out[place] / total[place], answer, atol=limit)
        log_sum = np.log(weights.sum()) + scores.max()
        np.testing.assert_allclose(top[place] + np.log(total[place]), log_sum, atol=1e-5)
