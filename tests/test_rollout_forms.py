"""Every form of cache and attention gives the tokens and log-probs of the one that CPUs run."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hjax.kernels import decode
from hjax.kernels.attention import ScoreOptions
from hjax.models.attention_strategies import AttentionInputs
from hjax.models.compute import Compute
from hjax.models.decoding import Decode, KVCache
from hjax.models.model_config import ModelConfig
from hjax.models.parameters import decoder_network
from hjax.rollout.generator import Generator
from hjax.rollout.rollout_job import GenerationConfig
from hjax.rollout.sampling_params import SamplingParams
from hjax.sharding.layout import make_layouts, replicate_axes

CONFIG = ModelConfig(
    vocab_size=64,
    hidden_size=16,
    mlp_size=24,
    layers=2,
    heads=8,
    kv_heads=2,
    head_dim=8,
    max_length=64,
    tie_embeddings=True,
)
PROMPTS, LENGTH, NEW = 8, 7, 9


@pytest.fixture(scope="module")
def network():
    return decoder_network(CONFIG)


def layout_of(sizes):
    """The generate layout of so many devices, the key-value heads whole where they are fewer."""
    count = int(np.prod(list(sizes.values())))
    layout = make_layouts(jax.devices()[:count], sizes, {"tensor": -1}).generate
    return replicate_axes(layout, ["kv_heads"] if sizes.get("tensor", 1) > CONFIG.kv_heads else [])


def rollout_of(network, form, sizes, unroll=False, cut=None, cache="auto"):
    layout = layout_of(sizes)
    generator = Generator(network, layout, Compute(unroll_layers=unroll), form, cache)
    draw = np.random.default_rng(0)
    mask = np.arange(LENGTH) >= draw.integers(0, LENGTH, (PROMPTS, 1))
    prompts = np.where(mask, draw.integers(1, CONFIG.vocab_size, mask.shape), 0).astype(np.int32)
    sequence = np.arange(2 * PROMPTS, dtype=np.int32)
    params = network.create(1, layout)
    config = GenerationConfig(NEW, 2, SamplingParams(0.8, stop=(3, 5)), pause_after=cut)
    rollout = generator.generate(params, prompts, mask, sequence, config, seed=0)
    if cut:
        config = dataclasses.replace(config, pause_after=None)
        rollout = generator.resume(params, rollout, sequence, config, seed=0, start=cut)
    return {key: np.asarray(value) for key, value in rollout.items()}


@pytest.fixture(scope="module")
def expected(network):
    return rollout_of(network, decode.TILES, {"data": 1})


# form, mesh, unrolled layers, tokens after which it is left off and resumed
CASES = [
    (decode.ROWS, {"data": 1}, True, None),
    (decode.TPU_INTERPRETED, {"data": 2, "tensor": 4}, False, None),
    (decode.GPU_INTERPRETED, {"data": 2, "tensor": 4}, True, None),
    pytest.param(decode.GPU_INTERPRETED, {"data": 1}, False, 4, marks=pytest.mark.slow),
    pytest.param(decode.GPU_INTERPRETED, {"data": 8}, True, 4, marks=pytest.mark.slow),
    pytest.param(decode.TPU_INTERPRETED, {"data": 1}, False, 4, marks=pytest.mark.slow),
    pytest.param(decode.ROWS, {"data": 1}, False, 3, marks=pytest.mark.slow),
    pytest.param(decode.ROWS, {"data": 8}, True, 4, marks=pytest.mark.slow),
    pytest.param(decode.ROWS, {"data": 2, "tensor": 4}, True, None, marks=pytest.mark.slow),
    pytest.param(decode.TPU_INTERPRETED, {"data": 8}, True, 4, marks=pytest.mark.slow),
    pytest.param(
        decode.TPU_INTERPRETED, {"fsdp": 4, "tensor": 2}, False, 4, marks=pytest.mark.slow
    ),
    pytest.param(decode.TILES, {"fsdp": 2, "tensor": 4}, True, 4, marks=pytest.mark.slow),
]


@pytest.mark.parametrize("form, sizes, unroll, cut", CASES)
@pytest.mark.extended
def test_tokens_and_log_probs_do_not_depend_on_the_form(
    network, expected, form, sizes, unroll, cut
):
    found = rollout_of(network, form, sizes, unroll, cut)
    assert 0 < expected["truncated"].sum() < 2 * PROMPTS
    for key, value in expected.items():
        if value.dtype == np.float32:
            np.testing.assert_allclose(found[key], value, atol=1e-5)
        else:
            np.testing.assert_array_equal(found[key], value)


@pytest.fixture(scope="module")
def expected_in_int8(network):
    return rollout_of(network, decode.TILES, {"data": 1}, cache="int8")


# What is left off begins anew: a prompt and its response are read in one piece then.
INT8 = [
    (decode.ROWS, {"data": 2, "tensor": 4}, True, 4),
    (decode.TPU_INTERPRETED, {"data": 8}, True, 4),
    (decode.TILES, {"data": 1}, False, 3),
    (decode.GPU_INTERPRETED, {"data": 2, "tensor": 4}, True, 4),
    (decode.TPU_INTERPRETED, {"data": 2, "tensor": 4}, False, None),
]


@pytest.mark.parametrize(
    "form, sizes, unroll, cut",
    [INT8[0], *(pytest.param(*case, marks=pytest.mark.slow) for case in INT8[1:])],
)
@pytest.mark.extended
def test_nor_do_they_in_int8(network, expected, expected_in_int8, form, sizes, unroll, cut):
    found = rollout_of(network, form, sizes, unroll, cut, cache="int8")
    for key, value in expected_in_int8.items():
        if value.dtype == np.float32:
            # Sums in another order may round an element to the next of its 255 steps.
            np.testing.assert_allclose(found[key], value, atol=2e-3)
        else:
            np.testing.assert_array_equal(found[key], value)
    # Not those of a cache that rounds nothing.
    assert not np.allclose(expected["logprobs"], expected_in_int8["logprobs"], atol=1e-3)


@pytest.mark.parametrize("form", [decode.ROWS, decode.TPU_INTERPRETED, decode.GPU_INTERPRETED])
@pytest.mark.extended
def test_rows_have_positions_of_their_own_on_every_device(form):
    """As slots that are filled anew need it; some have no sequence."""
    groups, samples, heads, kv_heads, dim, length = 4, 2, 8, 2, 8, 20
    layout = layout_of({"data": 2, "tensor": 4})
    draw = np.random.default_rng(3)

    def normal(*sizes):
        return jnp.asarray(draw.normal(size=sizes), jnp.float32)

    prompt = [normal(2, groups, kv_heads, 12, dim) for _ in range(2)]
    position = jnp.asarray(draw.integers(-1, length, (groups, samples)), jnp.int32)
    position = position.at[1, 0].set(-1)
    begin = jnp.asarray([0, 3, 12, 5], jnp.int32)
    seen = decode.CacheMask(begin, jnp.asarray([12, 9, 12, 6], jnp.int32), position)
    q, k, v = (normal(groups * samples, 1, n, dim) for n in (heads, kv_heads, kv_heads))
    own = [normal(2, groups, kv_heads, samples, length, dim) for _ in range(2)]
    scoring, sinks = ScoreOptions(window=9, softcap=4.0), normal(heads)

    def attend(form, copies, layout):
        def put(empty, x, columns):
            x = jnp.repeat(x, copies, axis=2)
            x = x.swapaxes(4, 5) if columns else x
            return jax.lax.dynamic_update_slice(empty, x, (0,) * 6)

        @jax.jit
        def run():
            empty = KVCache.create(prompt, samples, length, form, copies)
            keys = put(empty.k, own[0], form == decode.TILES)
            cache = dataclasses.replace(empty, k=keys, v=put(empty.v, own[1], False))
            return Decode(seen, layout)(AttentionInputs(1, q, k, v, scoring, sinks), cache)[0]

        return np.asarray(run())

    expected = attend(decode.TILES, 1, None)
    copies = 1 if form == decode.ROWS else 2
    np.testing.assert_allclose(attend(form, copies, layout), expected, atol=1e-5)
    assert (expected[np.asarray(position).reshape(-1) < 0] == 0).all()
