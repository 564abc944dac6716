"""Prompts that are read without their padding are read as they are with it."""

import dataclasses
import random

import jax
import numpy as np
import pytest
from test_rollout_prefixes import PLAIN

from hjax.models.model_config import LayerKind
from hjax.models.parameters import decoder_network
from hjax.models.rotary import DynamicNTKScaling, Rope
from hjax.rollout.bucketing import ServiceBuckets
from hjax.rollout.generator import Generator
from hjax.rollout.prefix_cache import CachedPrefix, PrefixCache, cached_prompts
from hjax.rollout.sampling import sequence_keys
from hjax.rollout.sampling_params import SamplingParams
from hjax.rollout.slot_state import Admission, SlotSizes
from hjax.sharding.layout import make_layouts

ODD = dataclasses.replace(
    PLAIN,
    layer_kinds=(LayerKind(window=7, rope=0), LayerKind(window=None, rope=0)),
    attention_softcap=20.0,
    heads=2,
)
LENGTHS = np.array([3, 16, 1, 9, 16, 5, 12, 2])


def engine_of(config, parts=1, **settings):
    sizes = {"data": parts, "tensor": 1}
    layout = make_layouts(jax.devices()[:parts], sizes, {"tensor": 1}).generate
    network = decoder_network(config)
    generator = Generator(network, layout, **settings)
    return generator.engine_for(0), network.create(3, layout)


def entering(lengths, columns, **more):
    """Prompts of so many tokens."""
    count = len(lengths)
    mask = np.arange(columns) >= columns - np.array(lengths)[:, None]
    tokens = np.random.default_rng(0).integers(0, 64, mask.shape)
    where = np.arange(count, dtype=np.int32)
    keys = np.asarray(jax.random.key_data(sequence_keys(0, 0, where)))
    limit = np.full(count, 4, np.int32)
    prompts = np.where(mask, tokens, 0).astype(np.int32)
    return Admission(prompts, mask, where, where, keys, limit, **more)


def check_same(engine, params, asked, flat, blocks=None):
    """Read padded and without padding."""
    padded, _, drawn = engine.prefill(SamplingParams(), params, asked, blocks=blocks)
    without = dataclasses.replace(asked, packed_size=flat)
    found, _, same = engine.prefill(SamplingParams(), params, without, blocks=blocks)
    np.testing.assert_allclose(found.logits, padded.logits, atol=2e-6)
    np.testing.assert_array_equal(same.tokens, drawn.tokens)
    np.testing.assert_array_equal(found.tokens, padded.tokens)
    there = asked.mask if asked.cached is None else np.asarray(asked.cached.mask)
    for kept, expected in zip(jax.tree.leaves((found.k, found.v)),
                              jax.tree.leaves((padded.k, padded.v)), strict=True):  # fmt: skip
        kept, expected = (np.asarray(x, np.float32) for x in (kept, expected))
        axis = next(i for i in (-2, -1) if kept.shape[i] == there.shape[1])
        kept, expected = (np.moveaxis(np.moveaxis(x, -4, 0), axis, 1) for x in (kept, expected))
        step = 1 if kept.max() > 20 else 0  # int8, where a last bit may round otherwise
        np.testing.assert_allclose(kept[there], expected[there], atol=step or 2e-6)


@pytest.mark.parametrize("config", [PLAIN, ODD])
@pytest.mark.parametrize("parts, flat", [(1, LENGTHS.sum()), (1, 100), (2, 40)])
@pytest.mark.extended
def test_prompts_are_read_without_padding_as_with_it(config, parts, flat):
    engine, params = engine_of(config, parts)
    check_same(engine, params, entering(LENGTHS, 16), int(flat))


def test_keys_and_values_in_int8_too():
    engine, params = engine_of(PLAIN, cache_dtype="int8")
    check_same(engine, params, entering(LENGTHS, 16), 64)


@pytest.mark.extended
def test_what_is_known_of_them_stays_in_rows():
    engine, params = engine_of(ODD)
    prefixes, draw = PrefixCache(engine, 4096), np.random.default_rng(1)
    first = entering([80, 33, 50], 80)
    state = engine.empty(SlotSizes(3, 3, 1, 0, 128), 80)
    state, _ = engine.admit(SamplingParams(), params, state, first)
    texts = [row[mask].tolist() for row, mask in zip(first.prompts, first.mask, strict=True)]
    prefixes.store(state, [(0, row, text) for row, text in enumerate(texts)])
    new = [draw.integers(0, 64, n).tolist() for n in (5, 16, 1, 9)]
    known = [prefixes.match([*text, 0]) for text in texts] + [CachedPrefix()]
    whole = [[*text[: found.tokens], *more]
             for text, found, more in zip([*texts, []], known, new, strict=True)]  # fmt: skip
    assert [found.tokens for found in known] == [80, 32, 48, 0]
    asked = entering([len(more) for more in new], 16, cached=cached_prompts(whole, known, 512))
    asked.prompts[asked.mask] = np.concatenate(new)
    check_same(engine, params, asked, 32, prefixes.blocks)


@pytest.mark.parametrize("parts", [1, 2])
def test_any_prompts_find_room_that_is_compiled_beforehand(parts):
    engine, _ = engine_of(PLAIN, parts)
    shapes, draw = ServiceBuckets(engine, 16, 512, None), random.Random(0)
    each, wide, used = shapes.prefill_batches[-1], 0, 0
    for _ in range(500):
        known = draw.choice([0, 256, 512])
        most = min(known or 512, 512)
        longest = draw.randint(1, most)
        tokens = [[draw.randint(1, longest) for _ in range(draw.randint(0, each))]
                  for _ in range(parts)]  # fmt: skip
        new, flat = shapes.prefill_size(tokens, each, known)
        assert new in shapes.prompt_column_sizes and new <= shapes.max_prompt_columns(known)
        assert flat in shapes.packed_sizes(each, new, known)
        assert max(max(part, default=1) for part in tokens) <= new
        there = max(sum(part) + each - len(part) for part in tokens)
        assert there <= (flat or each * new)
        # Never more of them than with the padding of the longest one.
        plain = each * shapes.prompt_columns(max(max(part, default=1) for part in tokens))
        assert (flat or each * new) <= plain
        wide, used = wide + plain, used + (flat or each * new)
    assert used < 0.9 * wide


def test_they_are_padded_where_positions_depend_on_lengths():
    config = dataclasses.replace(PLAIN, ropes=(Rope(scaling=DynamicNTKScaling(2.0, 512)),))
    engine, _ = engine_of(config)
    assert not engine.packs_prompts
    assert ServiceBuckets(engine, 16, 512, None).packed_sizes(8, 32, 0) == [0]
