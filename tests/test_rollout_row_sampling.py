"""Options of each row of a batch: transformers' processors and warpers are the truth."""

import dataclasses
import functools

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
from references import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    torch,
)

from hjax.errors import ConfigError
from hjax.kernels.registry import make_kernel_set
from hjax.rollout import vocab_parallel
from hjax.rollout.row_sampling import RowSampling, SamplingSizes
from hjax.rollout.sampling import draw, sequence_keys
from hjax.rollout.sampling_params import SamplingParams
from hjax.rollout.token_counts import TokenCounts, count_token
from hjax.sharding.layout import make_layouts
from hjax.xla.collectives import received_bytes

LOG_PROBS = ("sampled", "policy", "untempered")


def expected(logits, options, prompt=(), response=()):
    """Probabilities [vocab] of the next token as transformers' generate makes them.

    Frequency and presence penalty, which it does not have, after the repetition penalty as vLLM
    has them: each in the words of OpenAI's documentation.
    """
    position = len(response)
    if position < len(options.forced):
        return np.eye(len(logits))[options.forced[position]]
    ids = torch.tensor([[*prompt, *response]], dtype=torch.int64)
    scores = torch.tensor(logits, dtype=torch.float64)[None]

    def through(*processors):
        return LogitsProcessorList(processors)(ids, scores)

    bias = {(token,): float(value) for token, value in options.logit_bias.items() if value > -100}
    if bias:
        scores = through(SequenceBiasLogitsProcessor(bias))
    if options.repetition_penalty != 1:
        scores = through(RepetitionPenaltyLogitsProcessor(options.repetition_penalty))
    times = torch.tensor(np.bincount(np.asarray(response, int), minlength=len(logits)))
    scores = scores - options.frequency_penalty * times - options.presence_penalty * (times > 0)
    if options.banned:
        scores = through(NoBadWordsLogitsProcessor([[token] for token in options.banned]))
    if options.stop and options.min_tokens:
        held = MinNewTokensLengthLogitsProcessor(len(prompt), options.min_tokens, [*options.stop])
        scores = through(held)
    if options.temperature == 0:
        return np.eye(len(logits))[int(scores.argmax())]
    if options.temperature != 1:
        scores = through(TemperatureLogitsWarper(float(options.temperature)))
    if options.top_k:
        scores = through(TopKLogitsWarper(options.top_k))
    if options.top_p < 1:
        scores = through(TopPLogitsWarper(options.top_p))
    if options.min_p:
        scores = through(MinPLogitsWarper(options.min_p))
    return torch.softmax(scores, -1).numpy()[0]


@functools.cache
def program():
    return jax.jit(draw)


def bits_of(tokens, words):
    """uint32 [words] of which these bits are set."""
    return np.array([sum(1 << t % 32 for t in tokens if t // 32 == w) for w in range(words)],
                    np.uint32)  # fmt: skip


def keys_of(rows):
    return sequence_keys(jnp.uint32(7), jnp.uint32(2), jnp.arange(rows))


LOGITS = np.array([1.5, 0.3, -0.4, 0.9, -2.0, 0.0, 0.6, -1.0, 1.2, -0.2], np.float32)
PROMPT, RESPONSE = (0, 8, 8, 4), (3, 2, 3, 3, 7)
DRAWS = 20000
SIZES = SamplingSizes(vocab=LOGITS.size, penalties=True)

CASES = {
    "plain": SamplingParams(),
    "temperature": SamplingParams(temperature=0.7),
    "top-k": SamplingParams(top_k=4),
    "top-p": SamplingParams(top_p=0.8),
    "min-p": SamplingParams(min_p=0.3),
    "repetition": SamplingParams(repetition_penalty=1.5),
    "repetition-wanted": SamplingParams(repetition_penalty=0.6),
    "presence": SamplingParams(presence_penalty=1.1),
    "frequency": SamplingParams(frequency_penalty=0.7),
    "frequency-wanted": SamplingParams(frequency_penalty=-0.5),
    "bias": SamplingParams(logit_bias={4: 3.0, 0: -2.0, 9: -100}),
    "bad": SamplingParams(bad=(0, 3)),
    "min-tokens": SamplingParams(stop=(0, 6), min_tokens=6),
    "min-tokens-reached": SamplingParams(stop=(0, 6), min_tokens=5),
    "all": SamplingParams(
        temperature=1.3,
        top_k=7,
        top_p=0.9,
        min_p=0.1,
        repetition_penalty=1.2,
        presence_penalty=0.4,
        frequency_penalty=0.3,
        logit_bias={1: 1.5, 5: -1.0},
        bad=(6,),
        stop=(9,),
        min_tokens=10,
    ),
}


SIX = (1, 3, 4, 6, 7, 8)


@pytest.mark.parametrize(
    "options, allowed",
    [pytest.param(options, None, id=name) for name, options in CASES.items()]
    + [
        pytest.param(
            options, SIX, id=f"{name}, of six",
            marks=[] if name in ("top-p", "all") else pytest.mark.slow,
        )
        for name, options in CASES.items()
    ],
)  # fmt: skip
@pytest.mark.extended
def test_frequencies_and_log_probs_follow_the_distribution(options, allowed):
    rows = jax.tree.map(lambda x: np.repeat(x, DRAWS, 0), RowSampling.of([options], SIZES))
    prompt, response = np.asarray([PROMPT]), np.asarray([RESPONSE])
    counts = TokenCounts.of(prompt, prompt >= 0, LOGITS.size, response, response >= 0)
    counts = jax.tree.map(lambda x: jnp.repeat(x, DRAWS, axis=0), counts)
    logits = jnp.broadcast_to(LOGITS, (DRAWS, LOGITS.size))
    bits = {} if allowed is None else {"bitmask": np.tile(bits_of(allowed, 1), (DRAWS, 1))}
    drawn = program()(logits, keys_of(DRAWS), jnp.int32(len(RESPONSE)), rows, counts, **bits)

    others = [] if allowed is None else [t for t in range(LOGITS.size) if t not in allowed]
    banned = dataclasses.replace(options, bad=(*options.bad, *others))
    probability = expected(LOGITS, banned, PROMPT, RESPONSE)
    times = np.bincount(drawn.token, minlength=LOGITS.size)
    kept = probability > 0
    assert times[~kept].sum() == 0
    share = probability[kept] * DRAWS
    from scipy.stats import chi2

    limit = chi2.ppf(0.999, kept.sum() - 1)
    assert ((times[kept] - share) ** 2 / share).sum() < limit
    check_log_probs(drawn, logits, [options] * DRAWS, np.tile(probability, (DRAWS, 1)))


def check_log_probs(drawn, logits, options, probability):
    """What was drawn of ``probability`` reports itself; policy and untempered know no options."""
    logits = np.asarray(logits, np.float64)
    temperature = np.asarray([each.temperature or 1 for each in options])[:, None]
    at = np.arange(len(logits)), np.asarray(drawn.token)

    def softmax(x):
        x = np.exp(x - x.max(-1, keepdims=True))
        return x / x.sum(-1, keepdims=True)

    for name, truth in (
        ("sampled", probability),
        ("policy", softmax(logits / temperature)),
        ("untempered", softmax(logits)),
    ):
        np.testing.assert_allclose(np.exp(getattr(drawn, name)), truth[at], rtol=2e-5, err_msg=name)


def random_options(source, vocab):
    """Some options at random, most of them as they are by default."""

    def maybe(value, otherwise):
        return value if source.random() < 0.4 else otherwise

    def tokens(most):
        return tuple(source.choice(vocab, source.integers(1, most), replace=False).tolist())

    return SamplingParams(
        temperature=maybe(source.uniform(0.3, 2), 1.0),
        top_k=maybe(int(source.integers(1, vocab)), 0),
        top_p=maybe(source.uniform(0.2, 1), 1.0),
        min_p=maybe(source.uniform(0, 0.3), 0.0),
        repetition_penalty=maybe(source.uniform(0.5, 2), 1.0),
        presence_penalty=maybe(source.uniform(-2, 2), 0.0),
        frequency_penalty=maybe(source.uniform(-2, 2), 0.0),
        logit_bias=maybe({t: source.uniform(-5, 5) for t in tokens(6)}, {}),
        bad=maybe(tokens(5), ()),
        stop=maybe(tokens(5), ()),
        min_tokens=int(source.integers(0, 8)),
    )


def random_batch(seed, rows, vocab):
    """Logits, options, counts and positions of rows that have nothing in common; the truth."""
    source = np.random.default_rng(seed)
    logits = source.normal(size=(rows, vocab)).astype(np.float32) * 2
    options = [random_options(source, vocab) for _ in range(rows)]
    prompts = source.integers(0, vocab, (rows, 6))
    responses = source.integers(0, vocab, (rows, 9))
    prompt_lengths, positions = source.integers(1, 7, rows), source.integers(0, 10, rows)
    counts = TokenCounts.of(
        prompts,
        np.arange(6) < prompt_lengths[:, None],
        vocab,
        responses,
        np.arange(9) < positions[:, None],
    )
    truth = np.stack(
        [
            expected(logits[i], each, prompts[i, : prompt_lengths[i]], responses[i, : positions[i]])
            for i, each in enumerate(options)
        ]
    )
    return logits, options, counts, positions, truth


def check_random_batch(seed, rows, vocab):
    logits, options, counts, positions, truth = random_batch(seed, rows, vocab)
    sampling = RowSampling.of(options, SamplingSizes(vocab, penalties=True))
    drawn = program()(logits, keys_of(rows), positions, sampling, counts)
    check_log_probs(drawn, logits, options, truth)
    # The same noise on the true distribution draws the same tokens.
    noise = jax.vmap(lambda key: jax.random.gumbel(key, (vocab,)))(
        jax.vmap(jax.random.fold_in)(keys_of(rows), positions)
    )
    with np.errstate(divide="ignore"):
        np.testing.assert_array_equal(drawn.token, np.argmax(np.log(truth) + noise, axis=-1))


@pytest.mark.extended
def test_rows_that_have_nothing_in_common_draw_from_their_own_distributions():
    check_random_batch(0, 60, 30)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 6))
def test_many_more_rows_draw_from_their_own_distributions(seed):
    check_random_batch(seed, 500, 120)


SAMPLINGS = [
    SamplingParams(0.0),
    SamplingParams(),
    SamplingParams(temperature=0.6),
    SamplingParams(top_k=5),
    SamplingParams(top_k=5000),
    SamplingParams(top_p=0.05),
    SamplingParams(temperature=1.7, top_p=0.9),
    SamplingParams(min_p=0.2),
    SamplingParams(temperature=0.7, top_k=9, top_p=0.8),
    SamplingParams(stop=(7,), min_tokens=4),
    SamplingParams(logit_bias={9: 8.0, 300: -100}, top_k=20),
    SamplingParams(0.8, repetition_penalty=1.7, presence_penalty=1.0, frequency_penalty=-0.5),
]


@pytest.mark.parametrize(
    "kernels, samplings",
    [
        pytest.param("reference", SAMPLINGS, marks=pytest.mark.slow),
        pytest.param("cpu", SAMPLINGS[:-2], marks=pytest.mark.extended),
        ("cpu", SAMPLINGS[-2:]),
    ],
    ids=["reference", "few options", "all kinds of options"],
)
def test_a_row_of_a_mixed_batch_draws_what_a_program_of_its_sampling_does(kernels, samplings):
    kernels, vocab, each = make_kernel_set(kernels), 5000, 40
    logits = np.random.default_rng(2).normal(size=(each, vocab)).astype(np.float32) * 2
    logits[:3, [7, 300]] = 12.0  # equals
    keys, positions = keys_of(each), jnp.arange(each) % 7
    begun = np.random.default_rng(3).integers(0, 5000, (each, 6))
    counts = TokenCounts.of(begun[:, :3], begun[:, :3] >= 0, vocab, begun[:, 3:], begun[:, 3:] >= 0)
    wanted = [
        jax.jit(functools.partial(draw, options=sampling, kernels=kernels))(
            logits, keys, positions, counts=counts if sampling.penalised else None
        )
        for sampling in samplings
    ]

    many = len(samplings)
    mixed = [sampling for sampling in samplings for _ in range(each)]
    drawn = jax.jit(functools.partial(draw, kernels=kernels))(
        np.tile(logits, (many, 1)),
        jnp.tile(keys, many),
        jnp.tile(positions, many),
        RowSampling.of(mixed, SamplingSizes(vocab, penalties=True)),
        jax.tree.map(lambda x: jnp.tile(x, (many, 1)), counts),
    )
    names = ("token", *LOG_PROBS)
    whole = {name: np.concatenate([getattr(one, name) for one in wanted]) for name in names}
    np.testing.assert_array_equal(drawn.token, whole["token"])
    for name in LOG_PROBS:
        np.testing.assert_allclose(getattr(drawn, name), whole[name], atol=4e-6)


def subprograms(jaxpr):
    """A jaxpr and those inside of its equations, but for what stands under a condition."""
    yield jaxpr
    for equation in jaxpr.eqns:
        if equation.primitive.name != "cond":
            for inner in jax.extend.core.jaxprs_in_params(equation.params):
                yield from subprograms(inner)


def test_work_that_no_row_asks_for_stands_under_a_condition():
    rows = RowSampling.of([SamplingParams()], SIZES)
    counts = TokenCounts.of(np.zeros((1, 1), int), np.ones((1, 1), bool), LOGITS.size)
    traced = jax.make_jaxpr(draw)(LOGITS[None], keys_of(1), jnp.int32(0), rows, counts)
    parts = subprograms(traced.jaxpr)
    always = {equation.primitive.name for part in parts for equation in part.eqns}
    assert "cond" in always
    # Noise, edges, biases and penalties.
    assert always.isdisjoint({"random_bits", "threefry2x32", "while", "scan", "scatter-add"})


SPLIT = {
    "greedy": [SamplingParams(temperature=0.0)],
    "plain": [SamplingParams(), SamplingParams(temperature=0.7)],
    "truncating": [SamplingParams(top_k=9, top_p=0.8), SamplingParams(min_p=0.2), SamplingParams()],
    "constrained": [
        SamplingParams(),
        SamplingParams(temperature=0.0),
        SamplingParams(top_p=0.9, bad=(40,)),
    ],
    "altering": [
        SamplingParams(logit_bias={0: 3.0, 1023: -100, 1024: 40.0}, stop=(7,), min_tokens=9),
        SamplingParams(temperature=0.0, presence_penalty=2.0, frequency_penalty=1.0, bad=(4000, 2)),
        SamplingParams(forced=(1, 2, 3, 4, 4095)),
        SamplingParams(temperature=1.4, top_p=0.9, repetition_penalty=1.5),
    ],
}


@pytest.mark.parametrize("asked", SPLIT)
@pytest.mark.extended
def test_parts_of_the_vocabulary_draw_the_same_tokens_for_a_few_numbers_per_row(asked):
    rows, vocab = 16, 4096
    source = np.random.default_rng(4)
    logits = source.normal(size=(rows, vocab)).astype(np.float32) * 2
    logits[3, 70] = logits[3, 4000] = 50.0  # equals, on two devices
    keys, position = keys_of(rows), np.arange(rows) % 6
    sampling = RowSampling.of(
        [SPLIT[asked][i % len(SPLIT[asked])] for i in range(rows)],
        SamplingSizes(vocab, penalties=True),
    )
    tokens = [source.integers(0, vocab, (rows, length)) for length in (7, 5)]
    masks = [source.random(each.shape) < 0.8 for each in tokens]
    known = tokens[0], masks[0], vocab, tokens[1], masks[1]
    counts = TokenCounts.of(*known)
    bits = source.integers(0, 2**32, (rows, vocab // 32), dtype=np.uint32)
    bits[:, 0] |= 4  # token 2 at least
    bits[5] = 2**32 - 1
    bits = {"bitmask": bits} if asked == "constrained" else {}
    whole = program()(logits, keys, position, sampling, counts, **bits)
    if bits:
        tokens_at = np.arange(rows), np.asarray(whole.token)
        words = bits["bitmask"][tokens_at[0], tokens_at[1] // 32]
        assert np.all(words >> (tokens_at[1] % 32) & 1)

    layout = make_layouts(jax.devices(), {"data": 2, "tensor": 4}, {"tensor": -1}).generate
    placed = jax.device_put(logits, layout.sharding("batch", "vocab"))
    parted = jax.jit(lambda: TokenCounts.of(*known, layout=layout))()
    jax.tree.map(np.testing.assert_array_equal, parted, counts)
    parted = jax.device_put(parted, layout.sharding("batch", "vocab"))
    sampling = jax.device_put(sampling, layout.sharding("batch"))
    split = jax.jit(functools.partial(draw, layout=layout))
    parts = split(placed, keys, position, sampling, parted, **bits)
    np.testing.assert_array_equal(parts.token, whole.token)
    for name in LOG_PROBS:
        np.testing.assert_allclose(getattr(parts, name), getattr(whole, name), atol=4e-6)
    text = split.lower(placed, keys, position, sampling, parted, **bits).compile().as_text()
    each = received_bytes(text) / (rows / 2)
    # Some ten numbers of 4 bytes for a draw, five more for what alters or truncates; to cut the
    # tail 15 at a time, 8 times, for top-k and top-p.
    assert each <= 2 * 4 * (10 + 5 + 2 * 8 * 15)
    assert f",{vocab}]" not in text  # neither logits nor noise is whole anywhere
    if asked == "greedy":
        assert parts.token[3] == 70


@pytest.mark.extended
def test_the_smallest_and_largest_of_options_leave_a_distribution():
    asked = [
        SamplingParams(temperature=1e-5),
        SamplingParams(temperature=1e5, bad=(2,)),
        SamplingParams(top_p=1e-300),
        SamplingParams(min_p=1e-300, logit_bias={0: -100}),
        SamplingParams(repetition_penalty=1e5, presence_penalty=2, frequency_penalty=2, bad=(0, 1)),
    ]
    rows = len(asked)
    counts = TokenCounts.of(np.tile([0, 2], (rows, 1)), np.ones((rows, 2), bool), 4)
    sampling = RowSampling.of(asked, SamplingSizes(4, penalties=True))
    logits = np.tile(np.array([-30.0, 1.0, 30.0, 7.0], np.float32), (rows, 1))
    drawn = program()(logits, keys_of(rows), jnp.int32(0), sampling, counts)
    assert all(np.isfinite(getattr(drawn, name)).all() for name in LOG_PROBS)
    assert (drawn.token[0], drawn.token[2], drawn.sampled[2]) == (2, 2, 0.0)
    np.testing.assert_allclose(drawn.sampled[1], np.log(1 / 3), rtol=1e-3)


def test_top_p_counts_what_top_k_has_left():
    # Of .5, .3 and .2 top-k leaves 5/8 and 3/8, so that the first token alone has .6.
    logits = np.tile(np.log(np.array([0.5, 0.3, 0.2, 1e-9], np.float32)), (2, 1))
    rows = RowSampling.of(
        [SamplingParams(top_k=2, top_p=0.6), SamplingParams(top_p=0.6)], SamplingSizes(4)
    )
    drawn = [program()(logits, keys_of(2), jnp.int32(at), rows) for at in range(20)]
    assert {(int(each.token[0]), float(each.sampled[0])) for each in drawn} == {(0, 0.0)}
    assert {int(each.token[1]) for each in drawn} == {0, 1}


def test_greedy_takes_the_likeliest_token_of_the_altered_logits_and_reports_it_untempered():
    logits = np.array([[0.0, 1.0, 3.0]] * 3, np.float32)
    asked = [
        SamplingParams(temperature=0.0, top_k=1),
        SamplingParams(temperature=0.0, logit_bias={2: -2.5}),
        SamplingParams(temperature=0.0, bad=(2,)),
    ]
    drawn = draw(logits, keys_of(3), jnp.int32(0), RowSampling.of(asked, SamplingSizes(3)))
    assert drawn.token.tolist() == [2, 1, 1]
    plain = 3 - np.log(1 + np.e + np.e**3)
    sampled = [plain, 1 - np.log(1 + np.e + np.e**0.5), 1 - np.log(1 + np.e)]
    np.testing.assert_allclose(drawn.sampled, sampled, rtol=1e-6)
    for of_the_model in (drawn.policy, drawn.untempered):
        np.testing.assert_allclose(of_the_model, [plain, plain - 2, plain - 2], rtol=1e-6)


def test_forced_tokens_come_first_then_stop_tokens_wait_until_they_may():
    # Token 3 would end at once, were it allowed to.
    logits = np.tile(np.array([0.0, 1.0, -1.0, 9.0], np.float32), (2, 1))
    asked = SamplingParams(temperature=0.0, forced=(2, 0), stop=(3,), min_tokens=4), None
    rows = RowSampling.of(asked, SamplingSizes(4))
    drawn = [program()(logits, keys_of(2), jnp.int32(at), rows) for at in range(6)]
    tokens = jnp.stack([each.token for each in drawn])
    assert tokens[:, 0].tolist() == [2, 0, 1, 1, 3, 3]
    assert tokens[:, 1].tolist() == [3] * 6  # a row that nobody reads
    assert [float(each.sampled[0]) for each in drawn[:2]] == [0.0, 0.0]
    plain = logits[0] - np.log(np.exp(logits[0]).sum())
    np.testing.assert_allclose([each.policy[0] for each in drawn[:2]], plain[[2, 0]], rtol=1e-6)
    assert jax.vmap(rows.ends)(tokens).tolist() == [[False, False]] * 4 + [[True, False]] * 2


def test_counts_follow_what_live_rows_draw():
    counts = TokenCounts.of(
        np.array([[0, 5, 5], [1, 2, 3]]), np.array([[False, True, True], [True, True, False]]), 6
    )
    assert counts.prompt.astype(int).tolist() == [[0, 0, 0, 0, 0, 1], [0, 1, 1, 0, 0, 0]]
    layout = make_layouts(jax.devices()[:4], {"data": 2, "tensor": 2}, {"tensor": -1}).generate
    for where in (None, layout):
        after, count = counts, jax.jit(functools.partial(count_token, layout=where))
        for tokens, live in (([4, 2], [True, True]), ([4, 0], [True, False]), ([0, 2], [1, 1])):
            after = count(after, jnp.array(tokens), jnp.array(live, bool))
        assert after.response.tolist() == [[1, 0, 0, 0, 2, 0], [0, 0, 2, 0, 0, 0]]
        assert after.prompt.tolist() == counts.prompt.tolist()
    assert count_token(None, jnp.array([1]), jnp.array([True])) is None


def test_only_penalties_need_the_tokens_so_far():
    assert not SamplingParams(
        temperature=0.3, logit_bias={1: 2.0}, bad=(3,), min_tokens=2
    ).penalised
    for name in ("repetition_penalty", "presence_penalty", "frequency_penalty"):
        assert SamplingParams(**{name: 0.5}).penalised
    rows = RowSampling.of([SamplingParams()], SIZES)
    with pytest.raises(ValueError, match="counts are missing"):
        draw(LOGITS[None], keys_of(1), jnp.int32(0), rows)
    counts = TokenCounts.of(np.zeros((1, 1), int), np.ones((1, 1), bool), LOGITS.size)
    with pytest.raises(ValueError, match="counts are given"):
        draw(
            LOGITS[None],
            keys_of(1),
            jnp.int32(0),
            RowSampling.of([SamplingParams()], SamplingSizes(LOGITS.size)),
            counts,
        )


@pytest.mark.parametrize(
    "asked, line",
    [
        ({"temperature": -1.0}, "temperature=-1.0: 0 .greedy., or"),
        ({"temperature": "hot"}, "temperature='hot': a number"),
        ({"top_k": -1}, "top_k=-1: 0 .all tokens. or more"),
        ({"top_k": 2.5}, "top_k=2.5: a whole number"),
        ({"top_k": True}, "top_k=True: a whole number"),
        ({"top_p": 0.0}, "top_p=0.0: above 0 and at most 1"),
        ({"top_p": None}, "top_p=None: a number"),
        ({"min_p": 1.5}, "min_p=1.5: 0 .all tokens. to 1"),
        ({"min_p": float("nan")}, "min_p=nan"),
        ({"temperature": 1e-40}, "temperature=1e-40: 0 .greedy., or 1e-05 to 100000"),
        ({"temperature": 1e39}, "temperature=1e.39"),
        ({"repetition_penalty": 0.0}, "repetition_penalty=0.0: 1e-05 to 100000, 1 for none"),
        ({"repetition_penalty": float("inf")}, "repetition_penalty=inf"),
        ({"presence_penalty": 2.5}, "presence_penalty=2.5: -2 to 2"),
        ({"frequency_penalty": -3}, "frequency_penalty=-3: -2 to 2"),
        ({"logit_bias": {5: 101.0}}, "logit_bias of token 5=101.0: -100 to 100"),
        ({"logit_bias": {5: float("nan")}}, "logit_bias of token 5=nan"),
        ({"logit_bias": {"5": 1.0}}, "logit_bias token='5': a whole number"),
        ({"logit_bias": dict.fromkeys(range(301), 1.0)}, "logit_bias of 301 tokens: at most 300"),
        ({"bad": (-1,)}, "bad token=-1: a whole number, 0 to"),
        ({"stop": (2**31,)}, "stop token=2147483648: a whole number, 0 to 2147483647"),
        ({"forced": (1.0,)}, "forced token=1.0: a whole number"),
        ({"min_tokens": -1}, "min_tokens=-1: a whole number"),
        ({"forced": (3, 4), "bad": (4,)}, "forced token 4 is banned by bad or logit_bias"),
        ({"forced": (4,), "logit_bias": {4: -100}}, "forced token 4 is banned"),
        ({"forced": (1, 2), "stop": (2,), "min_tokens": 3}, "forced token 2 at position 1 is a s"),
        ({"forced": (2, 1), "stop": (2,)}, "forced token 2 is a stop token: what is forced after"),
    ],
)
def test_impossible_options_are_refused(asked, line):
    with pytest.raises(ConfigError, match=line):
        SamplingParams(**asked)


@pytest.mark.parametrize(
    "asked, line",
    [
        ({"logit_bias": dict.fromkeys(range(3), 1.0), "bad": (3,)}, "4 tokens with a bias or ban"),
        ({"stop": (1, 2, 3)}, "3 stop tokens: at most 2"),
        ({"forced": (1, 2, 3)}, "3 forced tokens: at most 2"),
        ({"logit_bias": {10: 1.0}}, "logit_bias token 10: the model's are 0 to 9"),
        ({"bad": (11,)}, "bad token 11"),
        ({"stop": (12,)}, "stop token 12"),
        ({"forced": (13,)}, "forced token 13"),
        ({"presence_penalty": 1.0}, "need rows that have them: SamplingSizes.penalties=True."),
    ],
)
def test_options_that_rows_have_no_room_for_are_refused(asked, line):
    with pytest.raises(ConfigError, match=line):
        RowSampling.of(
            [None, SamplingParams(**asked)], SamplingSizes(vocab=10, biases=3, stops=2, forced=2)
        )


def test_a_token_is_left_to_draw():
    one_left = SamplingParams(bad=(0, 1), stop=(2,))
    RowSampling.of([one_left], SamplingSizes(vocab=3))
    with pytest.raises(ConfigError, match="all 3 tokens are banned: leave one to draw"):
        RowSampling.of([dataclasses.replace(one_left, min_tokens=1)], SamplingSizes(vocab=3))


@pytest.mark.parametrize("vocab", [8, 200, 264])
@pytest.mark.extended
def test_bits_of_a_part_that_begins_within_a_word(vocab):
    source, rows = np.random.default_rng(1), 4
    allowed = source.random((rows, vocab)) < 0.5
    packed = np.packbits(np.pad(allowed, ((0, 0), (0, -vocab % 32))), -1, "little").view("<u4")
    logits = source.normal(size=(rows, vocab)).astype(np.float32)
    expected = np.where(allowed, logits, -np.inf)
    whole = vocab_parallel.apply_bitmask(logits, jnp.asarray(packed))
    np.testing.assert_array_equal(whole, expected)
    layout = make_layouts(jax.devices(), {"data": 2, "tensor": 4}, {"tensor": -1}).generate
    split = layout.spec(["batch", "vocab"])
    parts = jax.shard_map(
        functools.partial(vocab_parallel.apply_bitmask, axes=vocab_parallel.vocab_axes(layout)),
        mesh=layout.mesh,
        in_specs=(split, layout.spec(["batch"])),
        out_specs=split,
    )(logits, packed)
    np.testing.assert_array_equal(parts, expected)


@pytest.mark.parametrize("vocab", [8, 200])
def test_the_likeliest_of_a_vocabulary_in_parts_or_whole(vocab):
    source, rows, count = np.random.default_rng(1), 4, 20
    # Few values, so that there are equals within parts and between them.
    logits = source.integers(-3, 4, (rows, vocab)).astype(np.float32)
    logits[0, 5:] = -np.inf
    order = np.argsort(-logits, axis=-1, kind="stable")[:, :count]
    layout = make_layouts(jax.devices(), {"data": 2, "tensor": 4}, {"tensor": -1}).generate
    split, by_row = layout.spec(["batch", "vocab"]), layout.spec(["batch"])
    parts = jax.shard_map(
        lambda table: vocab_parallel.top_tokens(table, count, vocab_parallel.vocab_axes(layout)),
        mesh=layout.mesh, in_specs=(split,), out_specs=by_row, check_vma=False,
    )  # fmt: skip
    for tokens, values in (vocab_parallel.top_tokens(jnp.asarray(logits), count), parts(logits)):
        assert tokens.shape == values.shape == (rows, count)
        np.testing.assert_array_equal(tokens[:, : order.shape[1]], order)
        np.testing.assert_array_equal(
            values[:, : order.shape[1]], np.take_along_axis(logits, order, -1)
        )
        assert np.all(np.asarray(values)[:, order.shape[1] :] == -np.inf)
