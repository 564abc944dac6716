"""Keys and values in int8: rounding and attention by numpy, rollouts by a forward that rounds.

That a sequence's tokens depend on nothing else is in the tables of ``test_rollout_engine``,
``test_rollout_forms`` and ``test_rollout_prefixes``.
"""

import dataclasses
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_kernels_decode as by_hand
from helpers import computed, read_rows, tiny_config, trainer_of

import hjax
from hjax.dryrun.description import describe
from hjax.errors import ConfigError
from hjax.kernels import cache_axis, decode, decode_gpu, decode_tpu, int8_cache
from hjax.kernels.attention import ScoreOptions
from hjax.kernels.int8_cache import QuantizedCache
from hjax.models.attention_strategies import Causal
from hjax.models.compute import Compute
from hjax.models.forward import token_positions
from hjax.models.model_config import LayerKind, ModelConfig
from hjax.models.parameters import decoder_network
from hjax.rollout.generator import Generator
from hjax.rollout.rollout_job import GenerationConfig
from hjax.sharding.layout import make_layouts


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
    numbers, scale = int8_cache.quantize(x)
    assert numbers.dtype == jnp.int8 and scale.shape == (50, 3, 1)
    exact = np.asarray(x, np.float64)
    found = np.asarray(numbers, np.float64) * np.asarray(scale, np.float64)
    step = np.abs(exact).max(-1, keepdims=True) / 127
    assert (np.abs(found - exact) <= step / 2 * (1 + 1e-5)).all()
    np.testing.assert_allclose(found, rounded(x), rtol=1e-6)
    assert (found[7] == 0).all() and np.abs(numbers).max() == 127


def kept(x, axis=cache_axis.ROWS):
    """Of the test's own making: [..., length, head_dim] as a cache has it."""
    step = np.abs(np.asarray(x, np.float32)).max(-1, keepdims=True) / np.float32(127)
    numbers = np.rint(rounded(x) / np.where(step, step, 1)).astype(np.int8)
    numbers = cache_axis.to_layout(jnp.asarray(numbers), axis)
    return QuantizedCache(numbers, jnp.asarray(step.swapaxes(-1, -2)))


NAMES = [name for name in by_hand.CASES if name not in by_hand.SLOW]


def case_of(name):
    """As of the float kernels, with lengths in tiles of int8; keys and values rounded."""
    shape, prompt, length, dtype, given = by_hand.CASES[name]
    given, sinks = dict(given), None
    if given.pop("sinks", False):
        sinks = jnp.asarray(np.random.default_rng(2).normal(size=shape[1] * shape[3]), jnp.float32)
    where = by_hand.places(shape[0], shape[2], prompt, length)
    seen = decode.CacheMask(*(jnp.asarray(x, jnp.int32) for x in where))
    arrays = by_hand.arrays(shape, prompt, length, jnp.int8)
    q, k, v, *cache = by_hand.arrays(shape, arrays[3].shape[3], arrays[5].shape[4], dtype)
    cut = [x[..., : y.shape[-2], :] for x, y in zip(cache, arrays[3:])]
    options = ScoreOptions(**given), sinks
    answer = by_hand.expected_of((q, rounded(k), rounded(v), *map(rounded, cut)), seen, options)
    return (q, k, v, *cut), seen, options, dtype, answer


@pytest.mark.parametrize("form", ["rows", "columns", "tiles", "kernel"])
@pytest.mark.parametrize("name", NAMES)
def test_attention_is_that_over_what_was_rounded(name, form):
    (q, k, v, *cache), seen, options, dtype, answer = case_of(name)
    axis = {"columns": cache_axis.COLUMNS, "tiles": cache_axis.TILES}.get(form, cache_axis.ROWS)
    if form == "tiles":
        more = [(0, 0)] * 4 + [(0, -cache[3].shape[-2] % cache_axis.TILE), (0, 0)]
        cache[2:] = [jnp.pad(x, more) for x in cache[2:]]

    @jax.jit
    def run(q, k, v, prompt_k, prompt_v, own_k, own_v):
        if form == "kernel":
            given = q, k, v, prompt_k, prompt_v, own_k, own_v
            return decode_tpu.decode(*given, jnp.int32(1), seen, *options, interpret=True)
        prompt_k, prompt_v, own_k, own_v = jax.tree.map(
            lambda x: x[1], (prompt_k, prompt_v, own_k, own_v)
        )

        def written(own, new, axis):
            new = int8_cache.quantize_like(own, new)
            return int8_cache.map_arrays(
                lambda axis, _, held, x: decode.write_token(held, x, seen.position, axis),
                own, new, axis=axis,
            )  # fmt: skip

        own_k = written(own_k, k, axis)
        own_v = written(own_v, v, cache_axis.ROWS)
        out = decode.attend(q, prompt_k, prompt_v, own_k, own_v, seen, *options, axis=axis)
        return out, own_k, own_v

    prompt_k, prompt_v, own_k, own_v = cache
    held = kept(prompt_k), kept(prompt_v), kept(own_k, axis), kept(own_v)
    out, made_k, made_v = run(q, k, v, *held)
    limit = 1e-5 if dtype == jnp.float32 else 2e-2
    np.testing.assert_allclose(by_hand.wide(out), answer, atol=limit)
    # What is written is the token alone, beside what stood there.
    position = np.asarray(seen.position)
    for made, own, new in ((made_k, own_k, k), (made_v, own_v, v)):
        numbers, scale = by_hand.wide(made.numbers), by_hand.wide(made.scale)
        if made is made_k:
            numbers = cache_axis.to_rows(numbers, axis)
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
    top, total, out = decode_gpu.attend_own(q, *hidden, *spans, scoring, interpret=True)
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


# Rollouts


@dataclasses.dataclass(frozen=True)
class Rounds:
    """Attention over whole sequences, with each key and value rounded: none is kept."""

    mask: jax.Array

    def __call__(self, heads, cache):
        def near(x):
            top = jnp.abs(x).max(-1, keepdims=True)
            return jnp.round(x / top * 127) * top / 127

        return Causal(self.mask)(heads._replace(k=near(heads.k), v=near(heads.v)), cache)


CONFIG = ModelConfig(
    64, 32, 48, 2, heads=4, kv_heads=2, head_dim=16, max_length=128,
    layer_kinds=(LayerKind(window=9, rope=0), LayerKind(window=None, rope=0)),
)  # fmt: skip


@pytest.mark.parametrize(
    "slots, sizes",
    [
        (0, {}),
        pytest.param(4, {}, marks=pytest.mark.slow),
        pytest.param(0, {"pipe": 2}, marks=pytest.mark.slow),
    ],
    ids=["one program", "slots", "stages"],
)
def test_log_probs_are_those_of_a_forward_that_rounds(slots, sizes):
    devices = jax.devices()[: int(np.prod(list(sizes.values()) or [1]))]
    layout = make_layouts(devices, sizes, sizes).generate
    kinds = CONFIG.layer_kinds * len(devices)
    network = decoder_network(dataclasses.replace(CONFIG, layers=len(kinds), layer_kinds=kinds))
    params = jax.tree.map(lambda x: 2 * x, network.create(3, layout))
    draw = np.random.default_rng(0)
    mask = np.arange(12) >= draw.integers(0, 12, (4, 1))
    prompts = np.where(mask, draw.integers(0, 64, mask.shape), 0).astype(np.int32)
    drawn = {}
    for cache in ("auto", "int8"):
        generator = Generator(network, layout, cache_dtype=cache)
        drawn[cache] = generator.generate(
            params, prompts, mask, np.arange(8, dtype=np.int32),
            GenerationConfig(40, samples=2, slots=slots), seed=0,
        )  # fmt: skip

    def log_probs(rollout, attention):
        """Of the responses, of the model as it stands, in one piece."""
        rollout = {key: jnp.asarray(np.asarray(x)) for key, x in rollout.items()}
        tokens = jnp.concatenate([rollout["prompts"], rollout["responses"]], axis=1)
        there = jnp.concatenate([rollout["prompt_mask"], rollout["response_mask"]], axis=1)
        model = network.bind(jax.tree.map(lambda x: jnp.asarray(np.asarray(x)), params))
        rotary = model.rotary(jnp.sum(there, axis=-1), tables=tokens.shape[1])
        run = tokens, token_positions(there), attention(there)
        hidden, _, _ = model(*run, compute=Compute(), rotary=rotary)
        scores = jax.nn.log_softmax(model.logits(hidden[:, 11:-1]))
        found = jnp.take_along_axis(scores, rollout["responses"][..., None], axis=-1)
        return np.asarray(found[..., 0])

    found = np.asarray(drawn["int8"]["logprobs"])
    plain, rounds = (log_probs(drawn["int8"], way) for way in (Causal, Rounds))
    np.testing.assert_allclose(found, rounds, atol=2e-3)
    assert np.abs(found - rounds).mean() < 5e-5
    error = np.abs(found - plain).mean()
    assert error > 1e-3  # what int8 costs, of which nothing is hidden
    exact = np.asarray(drawn["auto"]["logprobs"])
    np.testing.assert_allclose(exact, log_probs(drawn["auto"], Causal), atol=5e-5)


def test_another_dtype_is_refused_by_name():
    layout = make_layouts(jax.devices()[:1]).generate
    with pytest.raises(ConfigError, match="cache_dtype='fp8'; allowed: auto, int8"):
        Generator(decoder_network(CONFIG), layout, cache_dtype="fp8")
    with pytest.raises(ConfigError, match="rollout.cache_dtype='fp8'"):
        tiny_config("GRPO", {"rollout.cache_dtype": "fp8"})


RUN = {"rollout.cache_dtype": "int8", "steps": 3, "checkpoint.every": 1, "model.layers": 2}
RUN |= {"checkpoint.keep": 3}


def test_a_run_says_what_it_keeps_and_resumes(tmp_path):
    """Bit for bit, and the dry run by hand: 2 layers, 4 heads of 8 numbers and a scale, twice."""
    with trainer_of("GRPO", RUN, workdir=tmp_path / "whole") as trainer:
        told = describe(trainer)["cache"]
        rows = trainer.run()
    assert told["actor"] == {"dtype": "int8", "bytes_per_token": 2 * 2 * 4 * (8 + 4)}
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    for step in ("2", "3"):
        shutil.rmtree(tmp_path / "cut" / "checkpoints" / step, ignore_errors=True)
    with trainer_of("GRPO", RUN, workdir=tmp_path / "cut") as trainer:
        assert [row["step"] for row in trainer.run()] == [2, 3]
    again = read_rows(tmp_path / "cut")
    assert [computed(row) for row in again] == [computed(row) for row in rows]
    for row in rows:
        # The sampler's log-probs are those of its own forward, learning's of one without rounding.
        assert 1 + 1e-5 < row["rollout/token_prob_error"] < 1.05
    assert sum(row["actor/grad_norm"] for row in rows) > 0


def test_another_cache_goes_on_with_no_run(tmp_path):
    with trainer_of("GRPO", RUN | {"steps": 2}, workdir=tmp_path) as trainer:
        trainer.run(2)
    keys = RUN | {"steps": 3, "rollout.cache_dtype": "auto"}
    with pytest.raises(ConfigError, match="rollout.cache_dtype"):
        hjax.Trainer(tiny_config("GRPO", keys), workdir=tmp_path)


# Beside what else a rollout may be asked for.
TOGETHER = {
    "slots": {"rollout.slots": 8},
    "guesses": {"rollout.speculative_tokens": 2},
    "surplus": {"rollout.extra_samples": 2, "rollout.slots": 8},
    "stages": {"model.layers": 2, "layout.actor.train.pipe": 2, "layout.actor.generate.pipe": 2},
    "tensor": {"layout.actor.train.tensor": 4, "layout.actor.generate.tensor": 2},
    "correction": {"algorithm.correction": "truncated"},
    "adapters, bfloat16": {"actor.lora.rank": 2, "model.dtype": "bfloat16"},
    "apart, in parts": {
        "placement": "disaggregate", "rollout.max_staleness": 1, "rollout.partial_tokens": 2,
        "rollout.deterministic": True, "algorithm.correction": "truncated",
    },
}  # fmt: skip


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) for n in TOGETHER])
def test_runs_go_with_everything_else(name):
    """Their rows are those of the same run without what changes nothing, or they go their steps."""
    same = name in ("slots", "guesses", "tensor")
    keys = {"rollout.cache_dtype": "int8", "steps": 2, "rollout.max_response_length": 6}
    keys |= TOGETHER[name]
    plain = {k: v for k, v in keys.items() if k.startswith(("rollout.c", "rollout.m", "st", "mo"))}
    found = []
    for asked in (keys, plain) if same else (keys,):
        with trainer_of("GRPO", asked) as trainer:
            found.append([computed(row) for row in trainer.run()])
    for row in found[0]:
        assert 1 < row["rollout/token_prob_error"] < 1.1 and np.isfinite(row["actor/loss"])
    if same:
        for one, other in zip(*found, strict=True):
            one.pop("rollout/guesses_right", None)
            assert one == pytest.approx(other, rel=5e-3, abs=1e-3)
