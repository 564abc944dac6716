"""Beginnings that are known are found again, and what is drawn is what it would be without them."""

import dataclasses
import random
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hjax import machine
from hjax.errors import ConfigError
from hjax.kernels import decode
from hjax.kernels.attention import ScoreOptions
from hjax.models import append_attention
from hjax.models.append_attention import BLOCK
from hjax.models.model_config import LayerKind, ModelConfig
from hjax.models.parameters import decoder_network
from hjax.models.rotary import DynamicNTKScaling, Rope
from hjax.rollout import waiting_requests
from hjax.rollout.language_model import LanguageModel
from hjax.rollout.prefix_sharing import find_shared_prefixes
from hjax.rollout.radix_tree import RadixTree
from hjax.rollout.requests import Request
from hjax.rollout.sampling_params import SamplingParams
from hjax.rollout.service import GenerationService
from hjax.sharding.layout import make_layouts

PLAIN = ModelConfig(
    vocab_size=64, hidden_size=16, mlp_size=24, layers=2, heads=4, kv_heads=2, head_dim=8,
    max_length=512,
)  # fmt: skip
# Windows in every other layer, and capped scores.
ODD = dataclasses.replace(
    PLAIN,
    layer_kinds=(LayerKind(window=20, rope=0), LayerKind(window=None, rope=0)),
    attention_softcap=20.0,
)
SECONDS = 120


def test_room_for_shared_prefixes_is_filled_by_what_each_adds():
    # 32 blocks that two prompts share save 512 tokens, just enough to be read by themselves.
    draw, size = np.random.default_rng(0), 32 * BLOCK
    head, one, other = (draw.integers(0, 9, size).tolist() for _ in range(3))
    prompts = [head + more + [i] for i, more in enumerate((one, one, other, other))]
    for blocks, count in ((96, 3), (95, 2), (32, 1)):
        found, _ = find_shared_prefixes(prompts, blocks)
        assert [prefix.new for prefix in found] == [size] * count


# The tree


def test_a_tree_finds_the_longest_beginning_in_whole_blocks():
    tree = RadixTree(8, 2)
    path, new = tree.insert([1, 2, 3, 4, 5])
    assert len(path) == 2 and new == path
    tree.release(path)
    assert tree.match([1, 2, 3, 4, 5, 6]) == path
    assert tree.match([1, 2, 3, 9]) == path[:1]
    assert tree.match([1]) == tree.match([2, 1, 3, 4]) == []
    # The same block after other tokens is another one.
    other, new = tree.insert([7, 7, 3, 4])
    assert not set(other) & set(path) and new == other
    tree.release(other)
    longer, new = tree.insert([1, 2, 3, 4, 5, 6])
    assert longer[:2] == path and new == longer[2:]
    assert tree.used == 5


def test_what_is_longest_unused_makes_room_last_blocks_first():
    tree = RadixTree(4, 1)
    for tokens in ([1, 2], [3, 4]):
        tree.release(tree.insert(tokens)[0])
    tree.match([1, 2])
    tree.release(tree.insert([5])[0])  # in the place of 4
    assert [len(tree.match(x)) for x in ([1, 2], [3, 4], [5])] == [2, 1, 1]
    # What is held stays; a sequence is known as far as there is room.
    tree.acquire(tree.match([1, 2]))
    path, new = tree.insert([6, 7, 8])
    assert len(path) == len(new) == 2
    assert [len(tree.match(x)) for x in ([1, 2], [3], [5], [6, 7, 8])] == [2, 0, 0, 2]
    tree.release(path)
    tree.remove(new)
    assert tree.match([6]) == [] and tree.used == 2


@pytest.mark.parametrize("seed", range(3))
def test_a_tree_never_tells_of_what_it_has_given_away(seed):
    """Against a table of what each block holds."""
    draw = random.Random(seed)
    tree = RadixTree(6, 2)
    holds: dict[int, tuple] = {}
    for _ in range(400):
        tokens = tuple(draw.choices((1, 2), k=draw.randint(0, 9)))
        found = tree.match(tokens)
        for i, number in enumerate(found):
            assert holds[number] == tokens[: 2 * (i + 1)]
        path, new = tree.insert(tokens)
        assert path[: len(found)] == found and len(path) == min(len(tokens) // 2, 6)
        for i, number in enumerate(path):
            if number in new:
                holds[number] = tokens[: 2 * (i + 1)]
        tree.release(path)
        assert tree.used <= 6


# The kernel


@pytest.mark.parametrize("window, softcap, sinks", [(0, 0.0, False), (5, 4.0, True)])
@pytest.mark.parametrize("piece", [64, 8, 5])
def test_new_tokens_see_their_row_and_no_column_before_it(window, softcap, sinks, piece):
    rows, new, columns, kv_heads, per_kv, dim = 3, 6, 16, 2, 2, 8
    draw = np.random.default_rng(piece)
    q = draw.normal(size=(rows, new, kv_heads * per_kv, dim))
    k, v = draw.normal(size=(2, rows, kv_heads, columns, dim))
    begin = np.array([0, 7, 12])
    sink = draw.normal(size=kv_heads * per_kv)
    expected = np.zeros(q.shape)
    for r, i, h in np.ndindex(rows, new, kv_heads * per_kv):
        at = columns - new + i
        seen = [c for c in range(begin[r], at + 1) if not window or at - c < window]
        if not seen:
            continue
        scores = np.array([q[r, i, h] @ k[r, h // per_kv, c] for c in seen]) * dim**-0.5
        if softcap:
            scores = softcap * np.tanh(scores / softcap)
        weights = np.exp(scores)
        total = weights.sum() + (np.exp(sink[h]) if sinks else 0)
        expected[r, i, h] = weights @ v[r, h // per_kv, seen] / total
    single = [jnp.asarray(x, jnp.float32) for x in (q, k, v)]
    found = append_attention.chunked_attention(
        *single, jnp.asarray(begin), ScoreOptions(None, softcap, window),
        jnp.asarray(sink, jnp.float32) if sinks else None, piece,
    )  # fmt: skip
    real = np.arange(columns - new, columns) >= begin[:, None]
    np.testing.assert_allclose(found[real], expected[real], atol=2e-6)


def test_pieces_in_which_no_row_has_a_token_are_not_looked_at():
    q = jnp.ones((2, 3, 2, 8))
    k, v = np.ones((2, 2, 1, 21, 8), np.float32)
    k[:, :, :10], v[:, :, :10] = np.nan, np.nan
    begin = jnp.array([14, 11])
    found = append_attention.chunked_attention(q, jnp.asarray(k), jnp.asarray(v), begin, chunk=5)
    np.testing.assert_allclose(found, 1, rtol=1e-6)


# Requests


def language_model(config, form="", cache="auto"):
    layout = make_layouts(jax.devices()[:1]).generate
    params = decoder_network(config).create(1, layout)
    made = LanguageModel(config, params, cache_dtype=cache)
    if form:
        made._generator.cache_form = form  # before it makes its engine
    return made


@pytest.fixture(scope="module")
def model():
    return language_model(PLAIN)


def answers(service, requests):
    """Tokens and log-probs of requests that come at once, and what was known of their prompts."""
    heard = [[] for _ in requests]
    ends = [threading.Event() for _ in requests]

    def listen(i):
        def hear(piece):
            heard[i].append(piece)
            if piece.finish:
                ends[i].set()

        return hear

    tickets = [service.submit(request, listen(i)) for i, request in enumerate(requests)]
    for end in ends:
        assert end.wait(SECONDS), "no end"
    tokens = [[t for piece in pieces for t in piece.tokens] for pieces in heard]
    logprobs = [[x for piece in pieces for x in piece.logprobs] for pieces in heard]
    assert all(pieces[-1].finish in ("stop", "length") for pieces in heard), heard
    return tokens, logprobs, [ticket.cached_tokens for ticket in tickets]


def same(found, expected, near=1e-5):
    assert found[0] == expected[0]
    for some, others in zip(found[1], expected[1], strict=True):
        np.testing.assert_allclose(some, others, atol=near)


def turns(draw, system):
    """Conversations that begin alike, and what is said in each of their turns."""
    first = [system + tuple(draw.choices(range(64), k=draw.randint(1, 40))) for _ in range(6)]
    said = [[tuple(draw.choices(range(64), k=draw.randint(1, 20))) for _ in first] for _ in "ab"]
    return first, said


CASES = {
    "plain": (PLAIN, "", "auto"),
    "windows": (ODD, "", "auto"),
    "the kernel": (PLAIN, decode.TPU_INTERPRETED, "auto"),
    "filled columns": (PLAIN, decode.GPU_INTERPRETED, "auto"),
    "int8": (PLAIN, "", "int8"),
    "int8, the kernel": (PLAIN, decode.TPU_INTERPRETED, "int8"),
    "int8, windows, filled columns": (ODD, decode.GPU_INTERPRETED, "int8"),
}
SLOW = tuple(name for name in CASES if name != "plain")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n in SLOW)) for n in CASES]
)
@pytest.mark.extended
def test_a_conversation_is_answered_as_if_nothing_were_kept(name, monkeypatch):
    config, form, cache = CASES[name]
    model = language_model(config, form, cache)
    near = 1e-5 if cache == "auto" else 5e-3  # a sum in another order may round to the next step
    monkeypatch.setattr(waiting_requests, "PREFILL_CHUNK", 2 * BLOCK)
    keeps, forgets = (
        GenerationService(model, slots=4),
        GenerationService(model, slots=4, prefix_tokens=0),
    )
    draw = random.Random(1)
    prompts, said = turns(draw, tuple(draw.choices(range(64), k=5 * BLOCK)))
    before: list[int] = []
    try:
        for turn in range(3):
            requests = [
                Request(prompt, 20, SamplingParams(temperature=draw.choice([0, 1])), seed=i)
                for i, prompt in enumerate(prompts)
            ]
            found = answers(keeps, requests)
            same(found, answers(forgets, requests), near)
            if not turn:  # all but one begin with what another has read
                assert [n // (5 * BLOCK) for n in sorted(found[2])] == [0] + [1] * 5
            else:  # what was said before, but for the last token drawn
                assert np.all(np.array(found[2]) >= before)
            before = [(len(prompt) + 19) // BLOCK * BLOCK for prompt in prompts]
            if turn < 2:
                prompts = [
                    (*prompt, *tokens, *more)
                    for prompt, tokens, more in zip(prompts, found[0], said[turn], strict=True)
                ]
        stats = keeps.stats()
        assert stats["cached_tokens"] > stats["prompt_tokens"] / 2
        assert forgets.stats()["cached_tokens"] == forgets.stats()["kept_room"] == 0
    finally:
        keeps.close(0)
        forgets.close(0)


@pytest.mark.extended
def test_others_go_on_while_a_long_prompt_is_read(model, monkeypatch):
    monkeypatch.setattr(waiting_requests, "PREFILL_CHUNK", BLOCK)
    service = GenerationService(model, slots=2)
    order = []
    read, drawn = service._batcher.prefixes.prefill_chunk, model.engine.decode
    noted = lambda *a: order.append("read") or read(*a)  # noqa: E731
    monkeypatch.setattr(service._batcher.prefixes, "prefill_chunk", noted)
    monkeypatch.setattr(model.engine, "decode", lambda *a: order.append("decode") or drawn(*a))
    draw = random.Random(2)
    long = tuple(draw.choices(range(64), k=20 * BLOCK))
    try:
        found = answers(service, [Request((1, 2), 200), Request(long, 5)])
        assert order.count("read") == 19
        first = order.index("read")
        assert order[first : first + 38] == ["read", "decode"] * 19
        [alone] = model.generate([list(long)], 5, 1.0, 0)
        assert found[0][1] == alone.tokens
    finally:
        service.close(0)


@pytest.mark.slow
def test_little_room_means_more_reading_and_the_same_answers(model, monkeypatch):
    """Room for two prompts or so, of eight with long ones among them, and cancelled ones."""
    monkeypatch.setattr(waiting_requests, "PREFILL_CHUNK", 2 * BLOCK)
    draw = random.Random(4)
    requests = [
        Request(tuple(draw.choices(range(4), k=draw.choice([10, 60, 200]))), 12, seed=i)
        for i in range(8)
    ]
    little = GenerationService(model, slots=3, prefix_tokens=10 * BLOCK)
    none = GenerationService(model, slots=3, prefix_tokens=0)
    try:
        expected = answers(none, requests)
        for _ in range(3):
            gone = [little.submit(dataclasses.replace(r, seed=9), lambda _: None) for r in requests]
            for ticket in gone[::2]:
                ticket.cancel()
            same(answers(little, requests), expected)
        assert little.stats()["kept_tokens"] <= 10 * BLOCK
        [tree] = little._prefixes._trees
        while little.stats()["running"] or little.stats()["waiting"]:
            pass
        assert not any(block.ref_count for block in tree._blocks.values())
    finally:
        little.close(0)
        none.close(0)


@pytest.mark.extended
def test_positions_that_depend_on_the_length_are_not_kept():
    scaled = dataclasses.replace(PLAIN, ropes=(Rope(10000.0, DynamicNTKScaling(2.0, 64)),))
    model = language_model(scaled)
    with pytest.raises(ConfigError, match=r"prefix_tokens=99: .*depend on a sequence's length"):
        GenerationService(model, prefix_tokens=99)
    service = GenerationService(model)
    try:
        assert answers(service, [Request((1, 2, 3), 4)])[2] == [0]
        assert service.stats()["kept_room"] == 0
    finally:
        service.close(0)


@pytest.mark.extended
def test_what_is_kept_leaves_memory_free(model, monkeypatch):
    each = 2 * PLAIN.layers * PLAIN.kv_heads * PLAIN.head_dim * 4
    monkeypatch.setattr(machine, "free_bytes", lambda device: 4 * 100 * each)
    service = GenerationService(model)
    assert service.stats()["kept_room"] == 100 // BLOCK * BLOCK
    service.close(0)
    monkeypatch.setattr(machine, "free_bytes", lambda device: 0)
    service = GenerationService(model)
    try:
        assert service.stats()["kept_room"] == 0
        assert answers(service, [Request((1, 2, 3), 4)])[2] == [0]
    finally:
        service.close(0)
