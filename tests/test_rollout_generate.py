"""Cached decoding: the same numbers as training's forward, tokens independent of the batch."""

import jax
import numpy as np
import pytest
from helpers import generated
from references import LlamaConfig, LlamaForCausalLM, torch

from hjax.models.compute import Compute
from hjax.models.forward import response_states, token_log_probs
from hjax.models.huggingface import load_weights
from hjax.models.parameters import decoder_network
from hjax.rollout.generator import Generator, bucket_length
from hjax.rollout.rollout_job import GenerationConfig
from hjax.rollout.sampling_params import SamplingParams
from hjax.sharding.layout import make_layouts

PROMPTS = [[5, 9, 2], [40, 3, 17, 22, 1], [7], [11, 12, 13, 14]]
LENGTH = 6  # of the padded prompts
NEW = 10


@pytest.fixture(scope="module")
def torch_model():
    torch.manual_seed(2)
    config = LlamaConfig(
        vocab_size=47,
        hidden_size=32,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            noise = torch.randn(p.shape)
            p.copy_(1 + 0.3 * noise if "norm" in name else 0.2 * noise)
    return model


@pytest.fixture(scope="module")
def network_and_params(torch_model, tmp_path_factory):
    path = tmp_path_factory.mktemp("weights")
    torch_model.save_pretrained(path)
    config, params = load_weights(path)
    return decoder_network(config), params


@pytest.fixture(scope="module")
def generators(network_and_params):
    """(generator, placed parameters) on one device and on eight."""
    network, params = network_and_params
    made = {}
    for count in (1, 8):
        layout = make_layouts(jax.devices()[:count]).generate
        made[count] = Generator(network, layout), network.place(params, layout)
    return made


def padded(prompts, length=LENGTH):
    tokens, mask = (
        np.zeros((len(prompts), length), np.int32),
        np.zeros((len(prompts), length), bool),
    )
    for i, prompt in enumerate(prompts):
        tokens[i, length - len(prompt) :] = prompt
        mask[i, length - len(prompt) :] = True
    return tokens, mask


def generate_in_parts(generators, cuts, prompts=PROMPTS, devices=1, **options):
    """The same as ``generate``, left off and resumed at each of ``cuts``."""
    generator, params = generators[devices]
    options = {"seed": 0, "samples": 1} | options
    sequence = np.arange(len(prompts) * options["samples"], dtype=np.int32)
    tokens = padded(prompts)
    first, *others = [*cuts, None]
    options |= {"max_new_tokens": NEW}
    rollout = generated(generator, params, *tokens, sequence, pause_after=first, **options)
    for start, end in zip(cuts, others, strict=True):
        more = {"call": "resume", "start": start, "pause_after": end}
        rollout = generated(generator, params, rollout, sequence, **more, **options)
    return {key: np.asarray(value) for key, value in rollout.items()}


@pytest.mark.parametrize("devices", [1, pytest.param(8, marks=pytest.mark.slow)])
@pytest.mark.extended
def test_parts_are_the_whole_with_the_same_parameters(generators, devices):
    prompts = [PROMPTS[i % 4] for i in range(8)]
    options = {"samples": 2, "sampling": SamplingParams(temperature=0.8, stop=(4, 31))}
    whole = generate(generators, prompts, devices, **options)
    parts = generate_in_parts(generators, (3, 4, 8), prompts, devices, **options)
    assert 0 < whole["truncated"].sum() < 16  # some end in an early part, some never
    assert whole.keys() == parts.keys()
    for key, expected in whole.items():
        if expected.dtype == np.float32:
            np.testing.assert_allclose(parts[key], expected, atol=1e-5)
        else:
            np.testing.assert_array_equal(parts[key], expected)


def generate(generators, prompts=PROMPTS, devices=1, sequence=None, length=LENGTH, **options):
    generator, params = generators[devices]
    options = {"seed": 0, "max_new_tokens": NEW, "samples": 1} | options
    rows = len(prompts) * options["samples"]
    sequence = np.arange(rows) if sequence is None else np.asarray(sequence)
    sequence = sequence.astype(np.int32)
    rollout = generated(generator, params, *padded(prompts, length), sequence, **options)
    return {key: np.asarray(value) for key, value in rollout.items()}


def test_greedy_tokens_equal_transformers_generate(torch_model, generators):
    ours = generate(generators, sampling=SamplingParams(temperature=0.0))
    for row, prompt in zip(ours["responses"], PROMPTS, strict=True):
        theirs = torch_model.generate(
            torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False, eos_token_id=None
        )
        assert row.tolist() == theirs[0, len(prompt) :].tolist()


@pytest.mark.parametrize(
    "options, theirs",
    [
        ({"repetition_penalty": 1.6}, {"repetition_penalty": 1.6}),
        ({"logit_bias": {8: 2.0, 31: -1.0}}, {"sequence_bias": {(8,): 2.0, (31,): -1.0}}),
        ({"logit_bias": {25: -100, 38: -100}}, {"bad_words_ids": [[25], [38]]}),
        ({"stop": range(47), "min_tokens": 3}, {"eos_token_id": 5, "min_new_tokens": 3}),
    ],
    ids=lambda each: next(iter(each)),
)
@pytest.mark.extended
def test_greedy_tokens_with_options_equal_transformers_generate(
    options, theirs, torch_model, generators
):
    if "stop" in options:  # the token that would be the second, were it allowed
        plain = generate(generators, sampling=SamplingParams(temperature=0.0))["responses"]
        options = options | {"stop": [int(plain[0, 1])]}
        theirs = theirs | {"eos_token_id": int(plain[0, 1]), "pad_token_id": 0}
    ours = generate(generators, sampling=SamplingParams(temperature=0.0, **options))
    plain = generate(generators, sampling=SamplingParams(temperature=0.0))["responses"]
    assert (ours["responses"] != plain).any()
    for row, kept, prompt in zip(ours["responses"], ours["response_mask"], PROMPTS, strict=True):
        asked = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None} | theirs
        found = torch_model.generate(torch.tensor([prompt]), **asked)
        assert row[kept].tolist() == found[0, len(prompt) :].tolist()


@pytest.mark.extended
def test_penalties_are_in_the_log_probs_sampled_and_not_in_the_policys(generators):
    sampling = SamplingParams(
        0.8, repetition_penalty=1.5, frequency_penalty=0.5, presence_penalty=0.2
    )
    penalised = generate(generators, samples=2, sampling=sampling)
    assert (penalised["logprobs"] != penalised["policy_logprobs"]).any()
    generator, params = generators[1]
    model = generator.network.bind(params)
    for row in range(8):
        tokens = [*PROMPTS[row // 2], *penalised["responses"][row].tolist()]
        begin = len(PROMPTS[row // 2])
        rows = np.asarray([tokens])
        hidden = response_states(
            model,
            {
                "prompts": rows[:, :begin],
                "prompt_mask": np.ones((1, begin), bool),
                "responses": rows[:, begin:],
                "response_mask": np.ones((1, NEW), bool),
            },
            1,
            Compute(),
        )
        logits = np.asarray(model.logits(hidden), np.float64)[0]
        for at, plain in enumerate(logits):
            said = tokens[begin : begin + at]
            altered = plain.copy()
            for token in set(tokens[: begin + at]):
                altered[token] = plain[token] * (1.5 if plain[token] < 0 else 1 / 1.5)
            for token in set(said):
                altered[token] -= 0.5 * said.count(token) + 0.2
            for name, whole in (("logprobs", altered / 0.8), ("policy_logprobs", plain / 0.8)):
                whole = whole - whole.max()
                expected = whole[tokens[begin + at]] - np.log(np.exp(whole).sum())
                np.testing.assert_allclose(penalised[name][row, at], expected, atol=1e-5)


@pytest.mark.parametrize(
    "compute",
    [Compute(), pytest.param(Compute(unroll_layers=True), marks=pytest.mark.extended)],
    ids=["scanned", "unrolled"],
)
def test_reported_log_probs_are_those_of_training(compute, network_and_params):
    network, params = network_and_params
    layout = make_layouts(jax.devices()[:1]).generate
    made = {1: (Generator(network, layout, compute), network.place(params, layout))}
    sampling = SamplingParams(temperature=0.8, top_k=20, top_p=0.9, stop=(4, 8, 15))
    batch = generate(made, samples=3, sampling=sampling)

    @jax.jit
    def training(params):
        model = network.bind(params)
        hidden = response_states(model, batch, 3, Compute())
        return [token_log_probs(model, hidden, batch["responses"], t)[0] for t in (0.8, 1.0)]

    mask = batch["response_mask"]
    assert not mask.all()
    keys = ("policy_logprobs", "untempered_logprobs")
    for key, exact in zip(keys, training(params), strict=True):
        error = np.exp(np.abs(np.asarray(exact) - batch[key]))[mask]
        assert error.mean() < 1 + 2e-6 and error.max() < 1 + 2e-5
        assert not batch[key][~mask].any()
    # Truncating renormalises over fewer tokens, so no kept token gets less likely.
    assert (batch["logprobs"][mask] >= batch["policy_logprobs"][mask] - 1e-6).all()
    assert (batch["logprobs"][mask] > batch["policy_logprobs"][mask] + 1e-3).any()


@pytest.mark.parametrize(
    "sampling, keys",
    [
        (SamplingParams(), ()),
        (SamplingParams(temperature=0.0), ()),
        (SamplingParams(temperature=0.5), ("untempered_logprobs",)),
        (SamplingParams(top_k=3), ("policy_logprobs", "untempered_logprobs")),
        (SamplingParams(logit_bias={1: 2.0}), ("policy_logprobs", "untempered_logprobs")),
        (SamplingParams(min_p=0.1), ("policy_logprobs", "untempered_logprobs")),
        (SamplingParams(stop=(1,)), ()),
    ],
    ids=str,
)
def test_further_log_probs_are_kept_only_where_they_differ(sampling, keys, generators):
    generator, params = generators[1]
    config = GenerationConfig(NEW, sampling=sampling)
    out = generator.trace(params, 4, LENGTH, config).out_info
    always = {"prompts", "prompt_mask", "responses", "response_mask", "logprobs", "truncated"}
    assert set(out) == always.union(keys)


def test_tokens_do_not_depend_on_the_batch(generators):
    whole = generate(generators, samples=2)
    expected = whole["responses"].reshape(4, 2, NEW)

    reordered = generate(generators, PROMPTS[::-1], samples=2, sequence=[6, 7, 4, 5, 2, 3, 0, 1])
    np.testing.assert_array_equal(reordered["responses"].reshape(4, 2, NEW)[::-1], expected)

    alone = generate(generators, PROMPTS[2:3], sequence=[5])
    np.testing.assert_array_equal(alone["responses"][0], expected[2, 1])

    eight = generate(generators, [p for p in PROMPTS for _ in range(2)], devices=8)
    np.testing.assert_array_equal(eight["responses"].reshape(4, 2, NEW), expected)
    np.testing.assert_allclose(eight["logprobs"], whole["logprobs"], atol=1e-5)


@pytest.mark.extended
def test_tokens_do_not_depend_on_padding_nor_on_who_shares_a_prompt(generators):
    expected = generate(generators, samples=2)["responses"].reshape(4, 2, NEW)

    padding = generate(generators, samples=2, length=LENGTH + 5)
    np.testing.assert_array_equal(padding["responses"].reshape(4, 2, NEW), expected)

    apart = generate(generators, [p for p in PROMPTS for _ in range(2)])
    np.testing.assert_array_equal(apart["responses"].reshape(4, 2, NEW), expected)


def test_seed_step_and_sequence_each_change_the_draws(generators):
    base = generate(generators, [[5, 9, 2]] * 4)["responses"]
    assert len({tuple(row) for row in base}) == 4
    np.testing.assert_array_equal(generate(generators, [[5, 9, 2]] * 4)["responses"], base)
    for change in ({"seed": 1}, {"step": 1}, {"sequence": [4, 5, 6, 7]}):
        other = generate(generators, [[5, 9, 2]] * 4, **change)["responses"]
        assert (other != base).any(axis=1).all()


def test_a_response_ends_with_its_stop_token(generators):
    free = generate(generators, samples=2)["responses"]
    stop = tuple({int(free[0, 3]), int(free[5, NEW - 1])})
    ended = generate(generators, samples=2, sampling=SamplingParams(stop=stop))
    for row, tokens in enumerate(free.tolist()):
        end = next((t + 1 for t, token in enumerate(tokens) if token in stop), NEW)
        assert ended["responses"][row].tolist() == tokens[:end] + [0] * (NEW - end)
        assert ended["response_mask"][row].tolist() == [True] * end + [False] * (NEW - end)
        assert ended["truncated"][row] == (tokens[end - 1] not in stop)
        assert not ended["logprobs"][row, end:].any()
    # An end token in the very last place is an end, not a truncation.
    assert free[5, -1] in stop and ended["truncated"].any() and not ended["truncated"].all()


def test_prompts_come_back_once_per_row(generators):
    out = generate(generators, samples=2)
    tokens, mask = padded(PROMPTS)
    np.testing.assert_array_equal(out["prompts"], np.repeat(tokens, 2, axis=0))
    np.testing.assert_array_equal(out["prompt_mask"], np.repeat(mask, 2, axis=0))


def test_one_program_serves_all_seeds_steps_and_parameters(generators):
    generator, params = generators[1]
    generate(generators)
    program = generator._program(
        next(s for s in generator._programs if s.samples == 1 and s.sampling == SamplingParams())
    )
    before = program._cache_size()
    generator_params = jax.tree.map(lambda x: x * 1.01, params)
    generate({1: (generator, generator_params)}, seed=5, step=9)
    assert program._cache_size() == before


@pytest.mark.parametrize(
    "length, limit, bucket",
    [(1, 512, 64), (64, 512, 64), (65, 512, 128), (500, 510, 510), (0, 9, 9)],
)
def test_lengths_come_in_few_buckets(length, limit, bucket):
    assert bucket_length(length, limit) == bucket
