"""Answers in a format that the request says, by OpenAI's client and the service that draws them."""

import json
import re
from typing import Literal

import jax
import jsonschema
import openai
import pydantic
import pytest
from serving_double import EOS, HTTP, byte_tokenizer, served

from hjax.models.model_config import ModelConfig
from hjax.models.parameters import decoder_network
from hjax.rollout.language_model import LanguageModel
from hjax.rollout.service import GenerationService
from hjax.sharding.layout import make_layouts

pytestmark = pytest.mark.extended  # one engine serves them all, and is made first

CONFIG = ModelConfig(
    vocab_size=260, hidden_size=16, mlp_size=24, layers=2, heads=4, kv_heads=2, head_dim=8,
    max_length=512,
)  # fmt: skip
USER = [{"role": "user", "content": "Grüße"}]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 9}, "age": {"type": "integer",
                   "minimum": 0, "maximum": 99}, "sure": {"type": "boolean"}},
    "required": ["name", "age", "sure"],
    "additionalProperties": False,
}  # fmt: skip
FORMAT = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}


@pytest.fixture(scope="module")
def url():
    layout = make_layouts(jax.devices()[:1]).generate
    params = decoder_network(CONFIG).create(1, layout)
    model = LanguageModel(CONFIG, params, byte_tokenizer(), eos_ids=(EOS,))
    with served(GenerationService(model, slots=4), tokenizer=byte_tokenizer()) as (url, _, _):
        yield url


@pytest.fixture(scope="module")
def client(url):
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


def chat(client, **fields):
    return client.chat.completions.create(model="bytes", messages=USER, **fields)


def complete(client, regex, **fields):
    body = {"structured_outputs": {"regex": regex}}
    return client.completions.create(model="bytes", prompt="ab", extra_body=body, **fields)


@pytest.mark.extended
def test_every_answer_is_what_the_schema_allows(client):
    found = chat(client, response_format=FORMAT, n=6, seed=1)
    answers = [choice.message.content for choice in found.choices]
    for choice, text in zip(found.choices, answers, strict=True):
        jsonschema.validate(json.loads(text), SCHEMA)
        assert choice.finish_reason == "stop"
    assert len(set(answers)) > 1


@pytest.mark.extended
def test_a_stream_is_the_same_answer_in_parts(client):
    whole = chat(client, response_format=FORMAT, n=2, seed=7)
    texts = ["", ""]
    for chunk in chat(client, response_format=FORMAT, n=2, seed=7, stream=True):
        [part] = chunk.choices
        texts[part.index] += part.delta.content or ""
    assert texts == [choice.message.content for choice in whole.choices]


class Person(pydantic.BaseModel):
    kind: Literal["child", "adult"]
    age: int
    inner: list[bool]


@pytest.mark.extended
def test_openais_client_parses_what_it_asked_for(client):
    for seed in range(4):
        found = client.chat.completions.parse(
            model="bytes", messages=USER, response_format=Person, seed=seed, max_tokens=400,
            logit_bias={str(ord(digit)): -5 for digit in "0123456789"},
        )  # fmt: skip
        assert isinstance(found.choices[0].message.parsed, Person)


@pytest.mark.extended
def test_any_object_of_json(client):
    found = chat(
        client, response_format={"type": "json_object"}, seed=3, n=4, max_tokens=300,
        logit_bias={str(ord(c)): 4 for c in '"}:'},
    )  # fmt: skip
    whole = [choice for choice in found.choices if choice.finish_reason == "stop"]
    assert whole
    for choice in whole:
        assert isinstance(json.loads(choice.message.content), dict)


@pytest.mark.parametrize("field", [{"regex": "[a-c]{3}é"}, {"json": {"enum": ["é", "ö"]}},
                                   {"json": '{"enum": ["é", "ö"]}'},
                                   {"choice": ['"é"', '"ö"']},
                                   {"grammar": 'start: "\\"" ("é" | "ö") "\\""'}])  # fmt: skip
def test_vllms_field_in_both_forms(client, field):
    body = {"structured_outputs": field}
    texts = [choice.message.content for choice in chat(client, extra_body=body, n=3).choices]
    found = client.completions.create(model="bytes", prompt=["x", "y"], n=2, extra_body=body)
    texts += [choice.text for choice in found.choices]
    for text in texts:
        assert re.fullmatch("[a-c]{3}é", text) if "regex" in field else json.loads(text) in "éö"


def test_stop_strings_and_lengths_cut_what_matches(client):
    found = complete(client, "a{4}b{30}", stop="bb", max_tokens=40).choices[0]
    assert (found.text, found.finish_reason) == ("aaaa", "stop")
    found = complete(client, "a{4}b{30}", max_tokens=6).choices[0]
    assert (found.text, found.finish_reason) == ("aaaabb", "length")
    # Nothing may follow but the end: it is no worse than one that came to it.
    found = complete(client, "a{4}", max_tokens=4).choices[0]
    assert (found.text, found.finish_reason) == ("aaaa", "stop")


def test_log_probs_are_those_of_what_was_left(client):
    found = complete(client, "a{4}", max_tokens=9, logprobs=1).choices[0]
    assert found.logprobs.token_logprobs == pytest.approx([0.0] * 5, abs=1e-6)  # with the end


def test_a_seed_draws_the_same_beside_others(client):
    alone = complete(client, "[a-z]{9}", seed=5).choices[0].text
    with_others = [
        chunk.choices[0].text
        for chunk in complete(client, "[a-z]{9}", seed=5, n=1, stream=True)
    ]
    plain = client.completions.create(model="bytes", prompt="ab", seed=5, max_tokens=8)
    assert "".join(with_others) == alone
    again = client.completions.create(model="bytes", prompt="ab", seed=5, max_tokens=8)
    assert plain.choices[0].text == again.choices[0].text


@pytest.mark.parametrize("stream", [False, True])
def test_a_pattern_that_outgrows_its_matcher_ends_its_request_alone(url, client, stream):
    body = {"prompt": "ab", "max_tokens": 200, "stream": stream, "logit_bias": {"98": -60},
            "structured_outputs": {"regex": "((a{1,100}){1,100}){1,100}b"}}  # fmt: skip
    answer = HTTP.post(f"{url}/v1/completions", json=body)
    assert "a response cannot go on: it grew beyond what a matcher holds" in answer.text
    assert answer.status_code == (200 if stream else 400)
    assert complete(client, "a{4}").choices[0].text == "aaaa"


def test_a_model_without_tokenizer_has_no_formats():
    layout = make_layouts(jax.devices()[:1]).generate
    model = LanguageModel(CONFIG, decoder_network(CONFIG).create(1, layout))
    with served(GenerationService(model, slots=1)) as (url, _, _):
        body = {"prompt": [1], "structured_outputs": {"regex": "a"}}
        answer = HTTP.post(f"{url}/v1/completions", json=body)
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == "structured_outputs.regex"
    assert "no tokenizer" in error["message"]
