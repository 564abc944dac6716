"""Log-probs beside the drawn token's, and the prompt's: transformers' log_softmax is the truth."""

import threading

import jax
import numpy as np
import openai
import pytest
from references import AutoModelForCausalLM, torch
from serving_double import HTTP, byte_tokenizer, served, wait_until

import hjax
from hjax.models.model_config import ModelConfig
from hjax.models.parameters import decoder_network
from hjax.rollout.engine import Engine
from hjax.rollout.language_model import LanguageModel
from hjax.rollout.prompt_log_probs import PromptScorer
from hjax.rollout.requests import Request
from hjax.rollout.sampling_params import MOST_TOP, SamplingParams
from hjax.rollout.service import GenerationService
from hjax.serving.served_model import ServedModel
from hjax.sharding.layout import make_layouts

pytestmark = pytest.mark.extended  # one engine serves them all, and is made first

SECONDS = 120
TEXT = "Once upon a time, there was a little girl"
CONFIG = ModelConfig(
    vocab_size=260, hidden_size=16, mlp_size=24, layers=2, heads=4, kv_heads=2, head_dim=8,
    max_length=128,
)  # fmt: skip


@pytest.fixture(scope="module")
def stories(test_data):
    return hjax.load_model(test_data / "weights" / "stories260K-hf")


@pytest.fixture(scope="module")
def exact(test_data):
    """float32 [length, vocab], log-probs of what follows each token."""
    folder = test_data / "weights" / "stories260K-hf"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def of(tokens):
        with torch.no_grad():
            return torch.log_softmax(model(torch.tensor([tokens])).logits[0], -1).numpy()

    return of


@pytest.fixture(scope="module")
def service(stories):
    made = GenerationService(stories, slots=4)
    yield made
    made.close(0)


@pytest.fixture(scope="module")
def client(stories, service):
    # The end token as any other: responses have as many tokens as are asked for.
    about = stories.tokenizer, stories.config.vocab_size, ()
    with served(service, tokenizer=stories.tokenizer, model=ServedModel("s", service, *about)) as (
        url, _, _,
    ):  # fmt: skip
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as made:
            yield made


def complete(client, prompt=TEXT, **fields):
    return client.completions.create(
        model="s", prompt=prompt, extra_body={"return_token_ids": True}, **fields
    )


def check_places(told, rows, tokens, count):
    """What is told of places, of which ``rows`` are the exact log-probs."""
    assert len(told.token_logprobs) == len(told.top_logprobs) == len(told.tokens) == len(tokens)
    for own, top, row, token in zip(
        told.token_logprobs, told.top_logprobs, rows, tokens, strict=True
    ):
        assert own == pytest.approx(row[token], abs=1e-4)
        likeliest = np.sort(row)[::-1][:count]
        assert count <= len(top) + 2  # some have the same text, as parts of characters
        found = sorted(top.values(), reverse=True)
        np.testing.assert_allclose(found[: min(len(found), count)][:1], likeliest[:1], atol=1e-4)
        if len(found) >= count:
            np.testing.assert_allclose(found[:count], likeliest, atol=1e-4)
        assert own in top.values()
        # As lm-evaluation-harness asks whether a token is the greedy one.
        assert (own == max(top.values())) == (np.argmax(row) == token)


@pytest.mark.parametrize("given", ["text", "ids"])
@pytest.mark.extended
def test_an_echoed_prompt_and_its_answer_have_transformers_log_probs(client, exact, stories, given):
    ids = stories.tokenizer.encode(TEXT)
    [choice] = complete(
        client, TEXT if given == "text" else ids, max_tokens=6, temperature=0, echo=True, logprobs=5
    ).choices
    assert choice.prompt_token_ids == ids and len(choice.token_ids) == 6
    tokens = [*ids, *choice.token_ids]
    told, rows = choice.logprobs, exact(tokens)
    assert told.token_logprobs[0] is None and told.top_logprobs[0] is None
    offsets = told.text_offset
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        setattr(told, name, getattr(told, name)[1:])
    check_places(told, rows[:-1], tokens[1:], 5)
    assert choice.text.startswith(TEXT) and offsets == sorted(offsets)
    for text, begin in zip(told.tokens, offsets[1:], strict=True):
        if begin:  # the first word's space is not in the text
            assert choice.text[begin : begin + len(text)] == text


def test_a_prompt_alone_can_be_scored(client, exact, stories):
    ids = stories.tokenizer.encode(TEXT)
    some = [ids, ids[:1], ids[:7]]
    found = complete(client, some, max_tokens=0, echo=True, logprobs=1, n=2)
    assert found.usage.completion_tokens == 0
    assert found.usage.prompt_tokens == sum(map(len, some))
    for i, choice in enumerate(found.choices):
        tokens = some[i // 2]
        told = choice.logprobs
        assert choice.token_ids == [] and choice.finish_reason == "length"
        expected = exact(tokens)[np.arange(len(tokens) - 1), tokens[1:]]
        np.testing.assert_allclose(told.token_logprobs[1:], expected, atol=1e-4)
    whole = complete(client, ids, max_tokens=0, echo=True).choices[0]
    assert whole.text == found.choices[0].text and whole.logprobs is None


def test_a_stream_has_the_prompts_log_probs_first(client):
    fields = {"max_tokens": 9, "seed": 3, "echo": True, "logprobs": 2, "n": 2}
    whole = complete(client, **fields).choices
    parts = [chunk.choices[0] for chunk in complete(client, stream=True, **fields)]
    for expected in whole:
        own = [part for part in parts if part.index == expected.index]
        assert "".join(part.text for part in own) == expected.text
        assert [t for part in own for t in part.token_ids] == expected.token_ids
        told = {
            name: [x for part in own for x in getattr(part.logprobs, name)]
            for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        }
        assert told["tokens"] == expected.logprobs.tokens
        assert told["text_offset"] == expected.logprobs.text_offset
        # Which rows are decoded beside each other differs: the last bits may.
        for name in ("token_logprobs", "top_logprobs"):
            for x, y in zip(told[name], getattr(expected.logprobs, name), strict=True):
                assert x == (None if y is None else pytest.approx(y, abs=1e-5)), name


@pytest.mark.parametrize(
    "options", [{"temperature": 0.7, "top_k": 3}, {"logit_bias": {"300": 6.0}, "top_p": 0.6}]
)
def test_they_are_of_the_distribution_that_is_sampled(client, exact, stories, options):
    body = {"return_token_ids": True} | {k: options[k] for k in ("top_k",) if k in options}
    rest = {k: x for k, x in options.items() if k != "top_k"}
    [choice] = client.completions.create(
        model="s", prompt=TEXT, max_tokens=5, seed=1, logprobs=5, extra_body=body, **rest
    ).choices
    ids = stories.tokenizer.encode(TEXT)
    rows = exact([*ids, *choice.token_ids])[len(ids) - 1 : -1]
    for row, token, own, top in zip(
        rows, choice.token_ids, choice.logprobs.token_logprobs, choice.logprobs.top_logprobs,
        strict=True,
    ):  # fmt: skip
        logits = np.array(row, np.float64)
        for biased, bias in options.get("logit_bias", {}).items():
            logits[int(biased)] += bias
        logits /= options.get("temperature", 1)
        order = np.argsort(-logits)
        weights = np.exp(logits[order] - logits.max())
        weights /= weights.sum()
        kept = options.get("top_k") or 1 + int(np.argmax(np.cumsum(weights) >= options["top_p"]))
        expected = dict(zip(order[:kept].tolist(), np.log(weights[:kept] / weights[:kept].sum())))
        assert own == pytest.approx(expected[token], abs=1e-4)
        values = sorted(expected.values(), reverse=True)[:5]
        assert len(top) <= len(values)
        np.testing.assert_allclose(sorted(top.values(), reverse=True)[0], values[0], atol=1e-4)
        assert set(np.round([*top.values()], 2)) <= set(np.round(values, 2))


def test_chats_tell_up_to_twenty():
    layout = make_layouts(jax.devices()[:1]).generate
    model = LanguageModel(CONFIG, decoder_network(CONFIG).create(1, layout), byte_tokenizer())
    with served(GenerationService(model, slots=2), tokenizer=byte_tokenizer()) as (url, _, _):
        body = {
            "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, "seed": 2,
            "logprobs": True, "return_token_ids": True,
        }  # fmt: skip
        answers = {}
        for count in (None, 0, 1, 20):
            more = {} if count is None else {"top_logprobs": count}
            answer = HTTP.post(f"{url}/v1/chat/completions", json=body | more).json()
            [answers[count]] = answer["choices"]
        prompt = answers[20]["prompt_token_ids"]
        tokens = answers[20]["token_ids"]
        rows = np.asarray(jax.nn.log_softmax(model.logits([[*prompt, *tokens]])[0]))
        for count, choice in answers.items():
            assert choice["token_ids"] == tokens  # asking changes nothing
            content = choice["logprobs"]["content"]
            for row, token, told in zip(rows[len(prompt) - 1 :], tokens, content):
                assert told["logprob"] == pytest.approx(row[token], abs=1e-5)
                top = [each["logprob"] for each in told["top_logprobs"]]
                np.testing.assert_allclose(top, np.sort(row)[::-1][: count or 0], atol=1e-5)
                for each, best in zip(told["top_logprobs"], np.argsort(-row, kind="stable")):
                    assert each["bytes"] is None or each["bytes"] == [best] or best >= 256


@pytest.mark.extended
def test_who_does_not_ask_is_told_nothing_and_no_program_is_made_for_who_does(stories, service):
    heard = {}

    def ask(name, **options):
        request = Request((1, 5, 9), 12, SamplingParams(**options), seed=4)
        heard[name] = []
        service.submit(request, heard[name].append)

    def ended(name):
        return heard[name] and heard[name][-1].finish

    programs = stories.engine._decode._cache_size
    ask("plain")
    while not ended("plain"):
        pass
    before = programs()
    ask("asks", top=3), ask("beside")
    while not (ended("asks") and ended("beside")):
        pass
    tokens = {name: [t for p in pieces for t in p.tokens] for name, pieces in heard.items()}
    assert tokens["asks"] == tokens["beside"] == tokens["plain"]
    assert all(not piece.top for name in ("plain", "beside") for piece in heard[name])
    assert all(len(top) == 3 for piece in heard["asks"] for top in piece.top)
    assert programs() <= before + 1  # a state of another size, or none


@pytest.mark.parametrize("sizes", [{"data": 2, "tensor": 2}])
def test_over_several_devices_scores_are_the_same(sizes, stories):
    layout = make_layouts(jax.devices()[:4], sizes, {"tensor": -1}).generate
    network = decoder_network(stories.config)
    alone = stories.engine
    engine = Engine(network, layout, alone.compute.for_layout(layout), alone.form)
    params = network.place(stories.params, layout)
    ids = tuple(stories.tokenizer.encode(TEXT))
    found, expected = (
        PromptScorer(engine)(params, ids, 32),
        PromptScorer(alone)(stories.params, ids, 64),
    )
    np.testing.assert_allclose(found.logprobs, expected.logprobs, atol=5e-5)
    assert [len(top) for top in found.top] == [MOST_TOP] * (len(ids) - 1)
    for ours, theirs in zip(found.top, expected.top, strict=True):
        np.testing.assert_allclose([x for _, x in ours], [x for _, x in theirs], atol=5e-5)


@pytest.mark.extended
def test_a_prompt_that_was_scored_is_scored_again_by_new_weights():
    layout = make_layouts(jax.devices()[:1]).generate
    model = LanguageModel(CONFIG, decoder_network(CONFIG).create(1, layout))
    other = decoder_network(CONFIG).create(2, layout)
    service, pieces = GenerationService(model, slots=1), []
    scored, replacing = threading.Event(), threading.Event()
    tickets = []

    def hear(piece):  # of one that runs: the engine waits here, between two of its pieces
        if tickets and tickets[0].scores is not None:
            scored.set()
            assert replacing.wait(SECONDS)

    try:
        service.submit(Request((1,), 120), hear)
        tickets.append(service.submit(Request((4, 5, 6, 7), 3, scored=True), pieces.append))
        assert scored.wait(SECONDS) and not pieces
        asks = threading.Thread(target=service.replace, args=(other,))
        asks.start()
        wait_until(lambda: service._replacement is not None, SECONDS)
        replacing.set()
        asks.join(SECONDS)
        wait_until(lambda: pieces and pieces[-1].finish, SECONDS)
    finally:
        replacing.set()
        service.close(0)
    expected = LanguageModel(CONFIG, other).log_probs([[4, 5, 6, 7]])[0]
    np.testing.assert_allclose(pieces[0].prompt.logprobs, expected, atol=1e-5)
    assert all(piece.prompt is None for piece in pieces[1:])
