"""The log-prob head against the plain one: values, gradients, chunks, meshes, odd sizes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from hjax.kernels.kernel_sharding import KernelSharding
from hjax.kernels.log_prob_head import LogProbHead, token_scores, top_scores
from hjax.sharding.layout import make_layouts
from hjax.xla.collectives import collectives

ROWS, LENGTH, WIDTH, VOCAB = 8, 6, 16, 48


def reference(hidden, table, tokens, temperature=1.0, softcap=0.0):
    """``token_scores`` as its mathematics reads."""
    logits = jnp.einsum(
        "btd,vd->btv", hidden, table.astype(hidden.dtype), preferred_element_type=jnp.float32
    )
    if softcap:
        logits = softcap * jnp.tanh(logits / softcap)
    logprobs = jax.nn.log_softmax(logits / temperature, axis=-1)
    several = tokens if tokens.ndim == 3 else tokens[..., None]
    picked = jnp.take_along_axis(logprobs, several, axis=-1).reshape(tokens.shape)
    return picked, -jnp.sum(jnp.exp(logprobs) * logprobs, axis=-1)


def inputs(dtype=jnp.float32, vocab=VOCAB, length=LENGTH):
    rng = np.random.default_rng(0)
    hidden = jnp.asarray(rng.normal(size=(ROWS, length, WIDTH)), dtype)
    table = jnp.asarray(rng.normal(size=(vocab, WIDTH)), jnp.float32)
    tokens = jnp.asarray(rng.integers(0, vocab, (ROWS, length)), jnp.int32)
    weights = jnp.asarray(rng.normal(size=(2, ROWS, length)), jnp.float32)
    return hidden, table, tokens, weights


def several(arrays, count=3):
    """The same with so many tokens for each place, some of them twice."""
    hidden, table, tokens, weights = arrays
    tokens = (tokens[..., None] + jnp.arange(count) // 2 * 7) % table.shape[0]
    rng = np.random.default_rng(1)
    each = jnp.asarray(rng.normal(size=tokens.shape), jnp.float32)
    return hidden, table, tokens, (each, weights[1])


def both(function, hidden, table, tokens, weights):
    """Scores, and the gradients of a weighted sum of them."""

    def total(hidden, table):
        logprobs, entropy = function(hidden, table, tokens)
        total = jnp.sum(weights[0] * logprobs) + jnp.sum(weights[1] * entropy)
        return total, (logprobs, entropy)

    gradient = jax.value_and_grad(total, argnums=(0, 1), has_aux=True)
    (_, scores), gradients = jax.jit(gradient)(hidden, table)
    return [np.asarray(x, np.float32) for x in (*scores, *gradients)]


def assert_equal(found, expected, atol=1e-4, rtol=1e-4):
    for name, ours, theirs in zip(
        ("logprobs", "entropy", "hidden", "table"), found, expected, strict=True
    ):
        np.testing.assert_allclose(ours, theirs, atol=atol, rtol=rtol, err_msg=name)


# Columns of a chunk over 48 tokens: one chunk, several, a last one that overlaps, one column.
@pytest.mark.parametrize(
    "columns, options",
    [
        pytest.param(20, {}, marks=pytest.mark.extended),
        (20, {"softcap": 2.0, "temperature": 3}),
        pytest.param(VOCAB, {"softcap": 2.0, "temperature": 3}, marks=pytest.mark.extended),
        (16, {"temperature": 0.7}),
        (1, {"temperature": 0.7}),
    ],
)
def test_it_is_the_reference_whatever_the_chunks(columns, options):
    head = LogProbHead(chunk_bytes=columns * 4 * ROWS * LENGTH, **options)
    for arrays in (inputs(), several(inputs())):
        expected = both(lambda *a: reference(*a, **options), *arrays)
        assert_equal(both(lambda *a: token_scores(*a, head), *arrays), expected)


def most_probable(hidden, table, count, **options):
    """Log-probs and ids [rows, length, count], by the reference of every token, sorted."""
    every = jnp.broadcast_to(jnp.arange(table.shape[0]), (*hidden.shape[:2], table.shape[0]))
    logprobs = np.asarray(reference(hidden, table, every, **options)[0])
    ids = np.argsort(-logprobs, axis=-1, kind="stable")[..., :count]
    return np.take_along_axis(logprobs, ids, axis=-1), ids


@pytest.mark.parametrize("columns", [VOCAB, 20, 1])
@pytest.mark.parametrize("count", [1, 5, VOCAB])
@pytest.mark.extended
def test_the_most_probable_come_in_the_same_pass(columns, count):
    hidden, table, tokens, _ = several(inputs())
    options = {"softcap": 2.0, "temperature": 3}
    head = LogProbHead(chunk_bytes=columns * 4 * ROWS * LENGTH, **options)
    logprobs, entropy, top, ids = top_scores(hidden, table, tokens, count, head)
    expected = reference(hidden, table, tokens, **options)
    np.testing.assert_allclose(logprobs, expected[0], atol=1e-4)
    np.testing.assert_allclose(entropy, expected[1], atol=1e-4)
    values, numbers = most_probable(hidden, table, count, **options)
    np.testing.assert_allclose(top, values, atol=1e-4)
    np.testing.assert_array_equal(ids, numbers)


def test_of_equally_probable_tokens_the_lower_comes_first():
    table = jnp.ones((6, 1)) * jnp.array([[1.0], [2.0], [2.0], [1.0], [2.0], [0.0]])
    head = LogProbHead(chunk_bytes=4)  # a column at a time
    ids = top_scores(jnp.ones((1, 1, 1)), table, jnp.zeros((1, 1), int), 5, head)[3]
    assert ids.tolist() == [[[1, 2, 4, 0, 3]]]


@pytest.mark.extended
def test_it_distils_a_teacher():
    # The gradient of the cross entropy of a teacher's few tokens, renormalised, with the student.
    hidden, table, tokens, _ = inputs()
    _, _, top, ids = top_scores(hidden * 2, table, tokens, 4, LogProbHead(chunk_bytes=999))
    weights = jax.nn.softmax(top)

    def loss(score):
        return lambda hidden: -jnp.sum(weights * score(hidden, table, ids)[0])

    head = LogProbHead(chunk_bytes=999)
    ours = jax.grad(loss(lambda *a: token_scores(*a, head)))(hidden)
    np.testing.assert_allclose(ours, jax.grad(loss(reference))(hidden), atol=1e-4)


def test_by_hand():
    # Logits 0, ln 2 and ln 5: probabilities 1/8, 2/8, 5/8.
    table = jnp.log(jnp.array([[1.0], [2.0], [5.0]]))
    head = LogProbHead(chunk_bytes=8)
    logprobs, entropy = token_scores(jnp.ones((1, 1, 1)), table, jnp.array([[2]]), head)
    p = np.array([1, 2, 5]) / 8
    assert float(logprobs[0, 0]) == pytest.approx(np.log(5 / 8))
    assert float(entropy[0, 0]) == pytest.approx(-(p * np.log(p)).sum())


def test_in_bfloat16_it_is_as_near_as_its_products():
    arrays = inputs(jnp.bfloat16)
    head = LogProbHead(chunk_bytes=20 * 4 * ROWS * LENGTH)
    found = both(lambda *a: token_scores(*a, head), *arrays)
    exact = both(reference, arrays[0].astype(jnp.float32), *arrays[1:])
    assert_equal(found, exact, atol=0.12, rtol=0.03)


LAYOUTS = {
    "data": {"data": 8},
    "fsdp": {"data": 1, "fsdp": 8},
    "tensor": {"data": 2, "tensor": 4},
    "all": {"data": 1, "fsdp": 2, "tensor": 2, "context": 2},
    "data and fsdp": {"data": 2, "fsdp": 2, "tensor": 2},
}


def placed(layout, hidden, table, tokens, weights):
    rows = layout.axes("batch") or None
    return (
        jax.device_put(hidden, NamedSharding(layout.mesh, PartitionSpec(rows))),
        jax.device_put(table, layout.sharding("vocab", "embed")),
        jax.device_put(tokens, NamedSharding(layout.mesh, PartitionSpec(rows))),
        weights,
    )


@pytest.mark.parametrize(
    ("name", "length"),
    [
        *((name, LENGTH) for name in LAYOUTS),
        # Context 2 does not divide it.
        *(pytest.param(n, 5, marks=[pytest.mark.slow] * (n != "all")) for n in LAYOUTS),
    ],
)
@pytest.mark.extended
def test_it_is_the_reference_on_every_layout(name, length):
    layout = make_layouts(jax.devices(), LAYOUTS[name], None, name).train
    head = LogProbHead(0.7, chunk_bytes=1000, sharding=layout.kernel_sharding)
    for arrays in (inputs(length=length), several(inputs(length=length))):
        expected = both(lambda *a: reference(*a, temperature=0.7), *arrays)
        found = both(lambda *a: token_scores(*a, head), *placed(layout, *arrays))
        assert_equal(found, expected)
    hidden, table, tokens, _ = placed(layout, *arrays)
    found = jax.jit(lambda *a: top_scores(*a, 5, head))(hidden, table, tokens)
    values, numbers = most_probable(*arrays[:2], 5, temperature=0.7)
    np.testing.assert_allclose(found[2], values, atol=1e-4)
    np.testing.assert_array_equal(found[3], numbers)


def test_the_table_is_gathered_once_each_way_and_its_gradient_scattered_once():
    layout = make_layouts(jax.devices(), LAYOUTS["fsdp"], None, "fsdp").train
    hidden, table, tokens, weights = placed(layout, *inputs())
    head = LogProbHead(chunk_bytes=100, sharding=layout.kernel_sharding)  # many chunks

    def total(hidden, table):
        logprobs, entropy = token_scores(hidden, table, tokens, head)
        return jnp.sum(weights[0] * logprobs + weights[1] * entropy)

    compiled = jax.jit(jax.grad(total, argnums=(0, 1))).lower(hidden, table).compile()
    found = collectives(compiled.as_text())
    received = {
        kind: sum(c.total_bytes for c in found if c.kind == kind)
        for kind in ("all-gather", "reduce-scatter", "all-reduce")
    }
    ways = layout.shard_count("embed")
    once = table.size * 4 * (ways - 1) / ways  # of the table, float32, a device lacks so much
    count = -(-table.shape[0] // max(100 // (4 * hidden.shape[0] * hidden.shape[1] // ways), 1))
    assert count > 2
    overlap = 1 + 1 / table.shape[0] * count  # the last part begins earlier
    assert once <= received["reduce-scatter"] <= overlap * once
    # In both passes; what stands outside the loops, one gather serves both.
    assert once <= received["all-gather"] <= overlap * 2 * once
    assert received["all-reduce"] < 0.05 * once


def test_what_does_not_fit_is_refused_when_traced():
    hidden, table, tokens, _ = inputs()
    for wrong in ((hidden[..., :3], table, tokens), (hidden, table, tokens[:2]),
                  (hidden, table, tokens * 1.0)):  # fmt: skip
        with pytest.raises(AssertionError):
            jax.eval_shape(lambda *a: token_scores(*a, LogProbHead()), *wrong)
    for count in (0, VOCAB + 1):
        with pytest.raises(AssertionError, match=f"{count} most probable of {VOCAB}"):
            jax.eval_shape(
                lambda *a, n=count: top_scores(*a, n, LogProbHead()), hidden, table, tokens
            )
    layout = make_layouts(jax.devices(), {"data": 8}, None, "data").train
    odd = KernelSharding(layout.mesh, ("data",), embed=("tensor",))
    with pytest.raises(AssertionError, match="tensor.*splits the table's width"):
        head = LogProbHead(sharding=odd)
        jax.eval_shape(lambda *a: token_scores(*a, head), hidden, table, tokens)


@pytest.mark.parametrize("temperature", [0.01, 100.0])
@pytest.mark.parametrize("columns", [48, 20, 1])
def test_entropy_and_log_probs_are_right_where_logits_are_large(columns, temperature):
    hidden, table, tokens, _ = inputs()
    head = LogProbHead(temperature=temperature, chunk_bytes=4 * ROWS * LENGTH * columns)
    logprobs, entropy = token_scores(hidden, table, tokens, head)
    # Logits of float32, as the head has them; the rest in float64.
    logits = np.asarray(jnp.einsum("btd,vd->btv", hidden, table) / temperature, np.float64)
    above = logits - logits.max(-1, keepdims=True)
    exact = above - np.log(np.exp(above).sum(-1, keepdims=True))
    expected = -(np.exp(exact) * exact).sum(-1)
    assert np.abs(logits).max() > 500 or temperature > 1
    assert np.all(entropy > -1e-7) and np.all(entropy < np.log(VOCAB) + 1e-4)
    np.testing.assert_allclose(entropy, expected, atol=2e-5)
    picked = np.take_along_axis(exact, np.asarray(tokens)[..., None], -1)[..., 0]
    np.testing.assert_allclose(logprobs, picked, rtol=2e-6, atol=2e-5)
