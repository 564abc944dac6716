"""Attention by blocks and by splash against the plain form; that against brute force."""

import dataclasses
import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

from hjax.kernels import attention, blockwise, splash
from hjax.kernels.attention import MaskSpec, ScoreOptions
from hjax.kernels.kernel_sharding import KernelSharding

# prompt, response, responses; without responses one sequence of the prompt's length
ROWS = {"one sequence": (57, 0, 0), "shared prompt": (13, 11, 3), "long prompt": (40, 7, 5)}
WINDOWS = (0, 5, 20)
KERNELS = {
    "blockwise": functools.partial(blockwise.attend, block=8),
    "splash": functools.partial(splash.attend, interpret=True),
}
# Of the largest value; a bfloat16 has 8 bits, the plain form in it is as far from float32.
TOLERANCE = {jnp.float32: 3e-5, jnp.bfloat16: 2e-2}


def mask_spec_of(rows, window=0):
    prompt, response, count = ROWS[rows]
    length = prompt + response * count
    return MaskSpec(prompt, response, window) if count else MaskSpec(window=window), length


def seen_by_hand(prompt, response, count, window):
    """[length, length], from the sequences that a row stands for, token by token."""
    length = prompt + response * count
    seen = np.zeros((length, length), bool)
    for sample in range(max(count, 1)):
        first = prompt + sample * response
        sequence = [*range(prompt), *range(first, first + response)]
        for at, query in enumerate(sequence):
            begin = max(at - window + 1, 0) if window else 0
            seen[query, sequence[begin : at + 1]] = True
    return seen


@pytest.mark.parametrize("rows,window", [*itertools.product(ROWS, WINDOWS)])
def test_what_is_seen_is_what_each_sequence_would_see(rows, window):
    mask_spec, length = mask_spec_of(rows, window)
    expected = seen_by_hand(*ROWS[rows], window)
    np.testing.assert_array_equal(mask_spec.dense_mask(length), expected)
    place = np.arange(length)
    keys = jnp.arange(length)
    starts = mask_spec.response_start(keys)[:, None]
    on_device = mask_spec.is_visible(keys[:, None], starts, keys)
    np.testing.assert_array_equal(on_device, expected)
    low, high, own, after = mask_spec.visible_ranges(place)
    for i in range(length):
        ranges = np.zeros(length, bool)
        ranges[low[i] : high[i]] = True
        ranges[own[i] : after[i]] = True
        np.testing.assert_array_equal(ranges, expected[i])


@pytest.mark.parametrize("rows,window,block", [*itertools.product(ROWS, WINDOWS, (4, 16))])
def test_blocks_are_those_of_which_something_is_seen(rows, window, block):
    mask_spec, length = mask_spec_of(rows, window)
    length -= length % block
    table = mask_spec.dense_mask(length).reshape(length // block, block, length // block, block)
    found = {tuple(pair) for pair in mask_spec.block_pairs(length, block).tolist()}
    some = {tuple(pair) for pair in np.argwhere(table.any((1, 3))).tolist()}
    # A window that ends inside a block of queries may leave a block of keys that none sees.
    assert some <= found and (window or some == found)


@pytest.mark.parametrize("rows,window", [*itertools.product(ROWS, WINDOWS)])
def test_the_tpus_mask_says_the_same(rows, window):
    mask_spec, length = mask_spec_of(rows, window)
    mask = splash.SplashMask(mask_spec, length)
    found = mask[slice(0, length), slice(0, length)]
    np.testing.assert_array_equal(found, mask_spec.dense_mask(length))


def inputs(rows, dtype, heads=6, kv_heads=2, dim=8, batch=2):
    mask_spec, length = mask_spec_of(rows)
    rng = np.random.default_rng(len(rows))

    def draw(*shape):
        return jnp.asarray(rng.standard_normal(shape), dtype)

    q = draw(batch, length, heads, dim)
    k, v = (draw(batch, length, kv_heads, dim) for _ in range(2))
    sinks = jnp.asarray(rng.standard_normal(heads), jnp.float32)
    marks = np.ones((batch, length), np.int32)
    marks[0, :4] = 0  # padding on the left
    weight = rng.standard_normal(q.shape) * (marks == 1)[..., None, None]
    return mask_spec, (q, k, v, sinks), jnp.asarray(marks), jnp.asarray(weight, jnp.float32)


def values_and_gradients(attend, arrays, weight, sinks):
    q, k, v, sink = arrays

    def loss(q, k, v, sink):
        out = attend(q, k, v, sink if sinks else None)
        return jnp.sum(out.astype(jnp.float32) * weight), out

    (_, out), grads = jax.jit(jax.value_and_grad(loss, (0, 1, 2, 3), has_aux=True))(q, k, v, sink)
    return [jnp.where(weight != 0, out, 0), *(grads if sinks else grads[:3])]


# window, softcap, scale, sinks, padding, dtype
CASES = {
    "plain": ("one sequence", ScoreOptions(), False, False, jnp.float32),
    "padding": ("one sequence", ScoreOptions(), False, True, jnp.float32),
    "shared prompt": ("shared prompt", ScoreOptions(), False, True, jnp.float32),
    "all at once": ("shared prompt", ScoreOptions(0.3, 3.0, 20), True, True, jnp.float32),
    "all at once, bfloat16": (
        "shared prompt",
        ScoreOptions(0.3, 3.0, 20),
        True,
        True,
        jnp.bfloat16,
    ),
    "narrow window": ("long prompt", ScoreOptions(window=5), False, True, jnp.float32),
    "softcap": ("long prompt", ScoreOptions(softcap=2.0), False, False, jnp.float32),
    "sinks": ("one sequence", ScoreOptions(), True, True, jnp.float32),
}
QUICK = "shared prompt"
SLOW = {("splash", case) for case in CASES if case != QUICK}


@pytest.mark.parametrize(
    "kernel,case",
    [
        pytest.param(*pair, marks=[pytest.mark.slow] if pair in SLOW else [])
        for pair in itertools.product(KERNELS, CASES)
    ],
)
def test_values_and_gradients_are_the_references(kernel, case):
    rows, scoring, sinks, padding, dtype = CASES[case]
    dim = 8 if kernel == "blockwise" else 64
    mask_spec, arrays, marks, weight = inputs(rows, dtype, dim=dim)
    marks = marks if padding else None

    def plain(q, k, v, sink):
        return attention.reference(q, k, v, marks, sink, scoring, mask_spec)

    def fast(q, k, v, sink):
        return attention.attend(KERNELS[kernel], q, k, v, marks, sink, scoring, mask_spec)

    truth = [x.astype(jnp.float32) for x in arrays]
    expected = values_and_gradients(plain, truth, weight, sinks)
    found = values_and_gradients(fast, arrays, weight, sinks)
    assert [x.dtype for x in found[:4]] == [dtype] * 4
    for one, other in zip(expected, found, strict=True):
        error = float(jnp.abs(one - other.astype(jnp.float32)).max())
        assert error <= TOLERANCE[dtype] * float(jnp.abs(one).max())


def pack_by_hand(sequences, length):
    """Segments, prompts and positions of [(prompt, responses), ...], and what each place sees."""
    marks = np.zeros((3, length), np.int32)
    seen, place, number = np.zeros((length, length), int), 0, 0
    for prompt, responses in sequences:
        number += 1
        own, of_prompt = list(range(place, place + prompt)), number
        runs = [(own, own, number)]
        place += prompt
        for response in responses:
            number += 1
            after = list(range(place, place + response))
            runs.append((after, own + after, number))
            place += response
        for places, whole, segment in runs:
            for at in places:
                position = whole.index(at)
                marks[:, at] = segment, of_prompt, position
                # By how far back: 1 for itself.
                for other in whole[: position + 1]:
                    seen[at, other] = 1 + position - whole.index(other)
    return marks, seen


PACKS = {
    "own prompts": [[(11, ()), (7, ()), (20, ()), (1, ())], [(30, ()), (16, ())]],
    "shared": [[(5, (4, 6, 3)), (9, ()), (3, (1, 8))], [(2, (9, 9)), (4, (1,))]],
}


@pytest.mark.parametrize(
    "kernel, packs, window",
    [
        ("blockwise", "own prompts", 0),
        ("blockwise", "own prompts", 6),
        ("blockwise", "shared", 0),
        ("blockwise", "shared", 6),
        ("splash", "own prompts", 6),
    ],
)
@pytest.mark.extended
def test_packs_see_their_own_sequence(kernel, packs, window):
    """Forms against softmax over what is listed by hand; blocks of other sequences are skipped."""
    length = 57
    marks, seen = zip(*(pack_by_hand(pack, length) for pack in PACKS[packs]))
    segments, prompts, positions = (jnp.asarray(x) for x in np.stack(marks, 1))
    seen = np.stack(seen)
    visible = (seen > 0) & (seen <= (window or length))
    shared = attention.PackedPrompts(prompts, positions) if packs == "shared" else None
    dim = 8 if kernel == "blockwise" else 64
    _, (q, k, v, sinks), _, weight = inputs("one sequence", jnp.float32, dim=dim)
    weight = jnp.where((segments > 0)[..., None, None], weight, 0)
    scoring = ScoreOptions(softcap=3.0, window=window)

    def by_hand(q, k, v, sink):
        kv_heads, heads = k.shape[2], q.shape[2]
        k, v = (jnp.repeat(x, heads // kv_heads, axis=2) for x in (k, v))
        scores = 3.0 * jnp.tanh(jnp.einsum("bthd,bshd->bhts", q, k) / math.sqrt(dim) / 3.0)
        raised = jnp.exp(scores) * visible[:, None]
        total = raised.sum(-1, keepdims=True) + jnp.exp(sink)[None, :, None, None]
        return jnp.einsum("bhts,bshd->bthd", raised / total, v)

    def plain(q, k, v, sink):
        out = attention.reference(q, k, v, segments, sink, scoring, shared=shared)
        return out

    def fast(q, k, v, sink):
        mask_spec = MaskSpec(packed=True)
        return attention.attend(
            KERNELS[kernel], q, k, v, segments, sink, scoring, mask_spec, shared=shared
        )

    expected = values_and_gradients(by_hand, (q, k, v, sinks), weight, True)
    for form in (plain, fast):
        found = values_and_gradients(form, (q, k, v, sinks), weight, True)
        for one, other in zip(expected, found, strict=True):
            error = float(jnp.abs(one - other).max())
            assert error <= 3e-5 * float(jnp.abs(one).max())


# rows x length x heads over 8 devices; keys and values by as many heads, or whole
MESHES = {
    "heads": ((2, 1, 4), True),
    "whole keys": ((2, 1, 4), False),
    "length": ((2, 4, 1), True),
    "everything": ((2, 2, 2), True),
    "everything, whole keys": ((1, 2, 4), False),
}
EVERYDAY = {("blockwise", "everything"), ("blockwise", "everything, whole keys")}


@pytest.mark.parametrize(
    "kernel,split",
    [
        pytest.param(*pair, marks=[] if pair in EVERYDAY else [pytest.mark.slow])
        for pair in itertools.product(("blockwise", "splash"), MESHES)
    ],
)
@pytest.mark.extended
def test_split_over_devices_it_is_the_same(kernel, split):
    sizes, by_head = MESHES[split]
    count = math.prod(sizes)
    mesh = Mesh(
        np.asarray(jax.devices()[:count]).reshape(sizes), ("b", "c", "t"),
        axis_types=(AxisType.Auto,) * 3,
    )  # fmt: skip
    kv_heads = 4 if by_head else 2
    mask_spec, arrays, marks, weight = inputs(
        "shared prompt", jnp.float32, heads=8, kv_heads=kv_heads, dim=64, batch=4
    )
    over = KernelSharding(mesh, ("b",), ("c",), ("t",), ("t",) if by_head else ())
    scoring = ScoreOptions(softcap=3.0, window=20)

    def plain(q, k, v, sink):
        return attention.reference(q, k, v, marks, sink, scoring, mask_spec)

    def fast(q, k, v, sink):
        return attention.attend(KERNELS[kernel], q, k, v, marks, sink, scoring, mask_spec, over)

    expected = values_and_gradients(plain, arrays, weight, True)
    for one, other in zip(expected, values_and_gradients(fast, arrays, weight, True), strict=True):
        np.testing.assert_allclose(other, one, rtol=2e-4, atol=3e-5)


def test_rows_that_do_not_divide_stay_whole():
    mesh = Mesh(np.asarray(jax.devices()[:4]).reshape(2, 2), ("a", "b"))
    sharding = KernelSharding(mesh, ("a", "b"))
    assert [attention._row_axes(sharding, rows) for rows in (8, 6, 3)] == [("a", "b"), ("a",), ()]


def shapes_in(jaxpr):
    """Of every array that a program makes."""
    for equation in jaxpr.eqns:
        yield from (getattr(variable.aval, "shape", ()) for variable in equation.outvars)
        for value in equation.params.values():
            for found in value if isinstance(value, (list, tuple)) else [value]:
                found = getattr(found, "jaxpr", found)
                if hasattr(found, "eqns"):
                    yield from shapes_in(found)


def largest_square(jaxpr, length):
    """The most dimensions of ``length`` or more that an array of a program has."""
    return max(sum(size >= length for size in shape) for shape in shapes_in(jaxpr))


def test_no_array_has_two_length_dimensions():
    length = 2048
    q = jax.ShapeDtypeStruct((1, length, 4, 16), jnp.float32)
    k = jax.ShapeDtypeStruct((1, length, 2, 16), jnp.float32)

    def loss(q, k, v, kernel):
        if kernel is None:
            return attention.reference(q, k, v).sum()
        return attention.attend(kernel, q, k, v).sum()

    found = []
    for kernel in (None, blockwise.attend):
        gradient = jax.grad(functools.partial(loss, kernel=kernel))
        found.append(largest_square(jax.make_jaxpr(gradient)(q, k, k), length))
    assert found == [2, 1]


def test_the_tpus_blocks_divide_a_row_or_pad_it_by_little():
    lengths = (512, 640, 768, 1152, 1500, 6400, 6656, 12800, 500)
    found = [(b, splash._key_block_size(b, n)) for n in lengths for b in [attention.tpu_block(n)]]
    square = [(n, n) for n in (512, 640, 384, 384, 512)]
    assert found == [*square, (640, 256), (512, 512), (512, 512), (512, 512)]
    # 25 blocks of 256 keys: a block of 640 queries sees them up to its end.
    pairs = MaskSpec().block_pairs(6400, 640, 256)
    assert len(pairs) == sum(-(-640 * (i + 1) // 256) for i in range(10))


def test_recomputed_layers_keep_no_masks():
    mask_spec, block = MaskSpec(), 16
    x = jnp.ones((1, 256, 2, 8))
    pairs = len(mask_spec.block_pairs(256, block))

    def layer(x, weight):
        q = x * weight
        return blockwise.attend(q, q, q, None, None, ScoreOptions(), mask_spec, block=block), None

    def loss(weights):
        policy = jax.checkpoint_policies.save_only_these_names(attention.CHECKPOINT_NAME)
        layers = jax.checkpoint(layer, policy=policy, prevent_cse=False)
        return jax.lax.scan(layers, x, weights)[0].sum()

    shapes = shapes_in(jax.make_jaxpr(jax.grad(loss))(jnp.ones(3)).jaxpr)
    assert max(map(math.prod, shapes)) < pairs * block**2


def test_a_row_with_too_many_responses_is_computed_by_blocks():
    takes = splash.SplashMask.fits
    assert takes(MaskSpec(8, 1), 2**15) and not takes(MaskSpec(8, 1), 2**16)
    assert takes(MaskSpec(), 2**22) and takes(MaskSpec(512, 1024), 2**20)

    def program(kernel):
        q = jax.ShapeDtypeStruct((1, 2**16, 2, 64), jnp.float32)
        run = functools.partial(attention.attend, kernel, mask_spec=MaskSpec(8, 1))
        return str(jax.make_jaxpr(run)(q, q, q))

    found = program(splash.attend)
    assert "pallas_call" not in found and found == program(blockwise.attend)


def test_wrong_shapes_are_refused():
    q, k = jnp.zeros((1, 4, 3, 8)), jnp.zeros((1, 4, 2, 8))
    with pytest.raises(AssertionError):
        attention.attend(blockwise.attend, q, k, k)  # 3 heads over 2
    with pytest.raises(AssertionError):
        attention.attend(blockwise.attend, k, k, k, segments=jnp.zeros((1, 5), jnp.int32))
    with pytest.raises(AssertionError):
        attention.attend(blockwise.attend, k, k, k, sinks=jnp.zeros(3))
    assert (
        dataclasses.replace(ScoreOptions(), scale=2.0).query_scale(4)
        == 2.0
        == ScoreOptions().query_scale(4) * 4
    )
