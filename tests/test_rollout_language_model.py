"""The contract of ``hjax.load_model(...).generate``."""

import json

import jax
import numpy as np
import pytest

import hjax
from hjax.data.tokenizer import Tokenizer
from hjax.errors import ConfigError
from hjax.models.huggingface import save_weights
from hjax.models.model_config import ModelConfig
from hjax.models.parameters import decoder_network, to_host
from hjax.sharding.layout import make_layouts

ALPHABET = "abcdefghijklmnopqrstuvwxyz "


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """A tiny random model of characters: weights and tokenizer."""
    path = tmp_path_factory.mktemp("model")
    tokenizer = Tokenizer.characters(ALPHABET)
    config = ModelConfig(tokenizer.vocab_size, 32, 40, 1, 4, 2, 8, 48)
    layout = make_layouts(jax.devices()[:1]).train
    params = to_host(decoder_network(config).create(0, layout))
    params["embedding"] *= 10  # far from uniform
    save_weights(path, config, params, tokenizer)
    tokenizer.save(path)
    return path


@pytest.fixture(scope="module")
def model(directory):
    return hjax.load_model(directory)


def without_tokenizer(directory, path):
    path.mkdir()
    for name in ("config.json", "model.safetensors"):
        (path / name).write_bytes((directory / name).read_bytes())
    return path


def generate(model, prompts, **options):
    """Always four prompts and twelve tokens, so that all tests share a few programs."""
    prompts = list(prompts) + [[3]] * (4 - len(prompts))
    return model.generate(prompts, 12, **options)


def test_strings_and_their_ids_are_the_same_prompts(model):
    texts = ["hello", "a longer one"]
    ids = [model.tokenizer.encode(text) for text in texts]
    ours, theirs = generate(model, texts, seed=3), generate(model, ids, seed=3)
    assert [o.tokens for o in ours] == [o.tokens for o in theirs]
    for out in ours:
        assert out.text == model.tokenizer.decode(out.tokens)
        assert all(isinstance(t, int) for t in out.tokens)
        assert len(out.logprobs) == len(out.tokens)
        assert all(isinstance(x, float) and x <= 0 for x in out.logprobs)


@pytest.mark.parametrize("temperature, divide", [(1.0, 1.0), (0.5, 0.5), (0.0, 1.0)])
def test_logprobs_are_those_of_the_distribution_sampled(temperature, divide, model):
    prompt = model.tokenizer.encode("abc")
    out = generate(model, [prompt], temperature=temperature)[0]
    row = (prompt + out.tokens + [0] * 16)[:16]
    logits = np.asarray(model.logits([row])[0], np.float64) / divide
    logits = logits[len(prompt) - 1 :][: len(out.tokens)]
    table = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    picked = table[range(len(out.tokens)), out.tokens]
    np.testing.assert_allclose(out.logprobs, picked, atol=1e-5)
    if temperature == 0:
        assert out.tokens == logits.argmax(-1).tolist()


def test_a_prompts_draws_follow_from_seed_and_index(model):
    both = generate(model, ["abc", "xyz"], seed=1)
    assert generate(model, ["abc", "xyz"], seed=1) == both
    other = generate(model, ["something else", "xyz", "abc"], seed=1)
    assert other[1].tokens == both[1].tokens
    assert other[2].tokens != both[0].tokens  # the same prompt at another index
    assert generate(model, ["abc", "xyz"], seed=2)[1].tokens != both[1].tokens


def test_the_end_token_is_kept_and_stops(model):
    eos = model.tokenizer.eos_id
    outs = [out for seed in range(16) for out in generate(model, ["a"] * 4, seed=seed)]
    stopped = [o for o in outs if o.finish_reason == "stop"]
    assert stopped and len(stopped) < 64
    for out in outs:
        assert (eos in out.tokens) == (out.finish_reason == "stop")
        if out.finish_reason == "stop":
            assert out.tokens.index(eos) == len(out.tokens) - 1
            assert "<eos>" not in out.text
        else:
            assert out.finish_reason == "length" and len(out.tokens) == 12


def test_further_stop_tokens(model):
    free = generate(model, ["abc"], seed=4)[0]
    stop = free.tokens[2]
    out = generate(model, ["abc"], seed=4, stop=[stop])[0]
    assert out.tokens == free.tokens[: free.tokens.index(stop) + 1]
    assert out.finish_reason == "stop"


def test_without_a_tokenizer_text_is_none_and_the_end_is_config_jsons(model, directory, tmp_path):
    bare = hjax.load_model(without_tokenizer(directory, tmp_path / "bare"))
    assert bare.tokenizer is None
    ids = [model.tokenizer.encode("a")] * 4
    reasons = set()
    for seed in range(16):
        ours = generate(bare, ids, seed=seed)
        assert [o.tokens for o in ours] == [o.tokens for o in generate(model, ids, seed=seed)]
        assert {o.text for o in ours} == {None}
        reasons |= {o.finish_reason for o in ours}
    assert reasons == {"stop", "length"}
    with pytest.raises(ConfigError, match="prompt 0 is text, but this model has no tokenizer"):
        bare.generate(["text"])


def test_generation_config_may_name_several_ends(directory, tmp_path):
    path = without_tokenizer(directory, tmp_path / "bare")
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 5, 9]}))
    several = hjax.load_model(path)
    outs = [out for seed in range(8) for out in generate(several, [[1, 4]], seed=seed)]
    ends = {o.tokens[-1] for o in outs if o.finish_reason == "stop"}
    assert len(ends) > 1 and ends <= {2, 5, 9}


def test_log_probs_of_the_shortest_inputs(model):
    assert model.log_probs([[5]]).shape == (1, 0)
    assert model.logits([[5]]).shape == (1, 1, len(ALPHABET) + 3)
    assert model.generate([]) == []


def test_a_prompt_may_fill_the_models_positions(model):
    [out] = model.generate([[5] * 45], max_new_tokens=3)
    assert len(out.tokens) <= 3


@pytest.mark.parametrize("devices", [{"tensor": 2}, {"copies": 2}, {"tensor": 2, "copies": 3}])
@pytest.mark.extended
def test_several_devices_draw_as_one(devices, model, directory):
    """Also where a call's rows do not divide over the copies."""
    several, prompts = hjax.load_model(directory, **devices), ["hello", "a longer one", "three"]
    ours, theirs = (generate(each, prompts, seed=3) for each in (several, model))
    assert [o.tokens for o in ours] == [o.tokens for o in theirs]
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)
    rows = [[3, 4, 5, 6]]
    np.testing.assert_allclose(several.logits(rows), model.logits(rows), atol=1e-5)
    np.testing.assert_allclose(several.log_probs(rows), model.log_probs(rows), atol=1e-5)


@pytest.mark.parametrize(
    "devices, line",
    [
        ({"tensor": 0}, "tensor=0: 1 to 8, the devices of this process"),
        ({"tensor": 9}, "tensor=9: 1 to 8, the devices of this process"),
        (
            {"tensor": 3},
            "tensor=3: heads of size 4 does not divide over tensor = 3; tensor may be 1, 2, 4",
        ),
        (
            {"tensor": 4},
            "tensor=4: vocab of size 30 does not divide over tensor = 4; tensor may be 1, 2, 3, 5",
        ),
        ({"copies": 9}, "copies=9: 1 to 8, by 1 each of the 8 devices of this process"),
        ({"tensor": 2, "copies": 5}, "copies=5: 1 to 4, by 2 each of the 8 devices"),
    ],
)
def test_devices_that_do_not_do_get_one_line(devices, line, directory):
    with pytest.raises(ConfigError) as caught:
        hjax.load_model(directory, **devices)
    assert str(caught.value).startswith(line) and "\n" not in str(caught.value)


ERRORS = [
    (lambda m: m.generate("abc"), "prompts is one string; give a list"),
    (
        lambda m: m.generate([[5] * 46], max_new_tokens=3),
        "46 and max_new_tokens=3 exceed.* 45 tok",
    ),
    (lambda m: m.generate(["a"], 64), "max_new_tokens=64 exceed .* 48 .*; lower max_new_tokens"),
    (lambda m: m.generate([[]]), "prompt 0 is empty"),
    (lambda m: m.generate([[3], [30]]), "prompt 1: token id 30 is outside the vocabulary, 0 to 29"),
    (lambda m: m.generate([[3, -1]]), "token id -1 is outside"),
    (lambda m: m.generate([3, 4]), "prompt 0 is 3; give a string, a list of token ids, or a list"),
    (lambda m: m.generate([{"role": "user"}]), "prompt 0 is one chat message; give a list of chat"),
    (lambda m: m.generate([[{"role": "user", "content": "a"}]]), "prompt 0: .* no chat template"),
    (lambda m: m.generate(["a"], max_tokens=3), "no argument 'max_tokens': max_new_tokens"),
    (lambda m: m.generate(["a"], seeed=3), r"'seeed': help\(model.generate\) lists"),
    (lambda m: m.generate(["a"], 3, stop=["a", ""]), "stop='': a string that ends"),
    (lambda m: m.log_probs("abc"), "tokens is one string; give a list of texts"),
    (lambda m: m.generate([[3.5]]), r"prompt 0 is \[3.5\]"),
    (lambda m: m.generate(["ABC"]), "'A'"),
    (lambda m: m.generate(["a"], 0), "max_new_tokens=0: a whole number of 1 or more"),
    (lambda m: m.generate(["a"], 2.5), "max_new_tokens=2.5"),
    (lambda m: m.generate(["a"], 8, seed=-1), "seed=-1: 0 to 4294967295"),
    (lambda m: m.generate(["a"], 8, temperature=-0.1), "temperature=-0.1"),
    (lambda m: m.generate(["a"], 8, top_p=0), "top_p=0"),
    (lambda m: m.logits([1, 2]), "row 0 is 1; give a string"),
    (lambda m: m.logits(np.array([1, 2])), r"tokens must be integers \[batch, length\]"),
    (lambda m: m.log_probs(np.array([[1.0, 2.0]])), "tokens must be integers"),
    (lambda m: m.log_probs([[1, 99]]), "token id 99 is outside the vocabulary, 0 to 29"),
]


def test_texts_and_rows_of_any_lengths_are_scored(model):
    texts = ["abc", "a"]
    ids = [model.tokenizer.encode(text) for text in texts]
    alone = [np.asarray(model.log_probs(np.array([row])))[0] for row in ids]
    for given in (texts, ids):
        found = np.asarray(model.log_probs(given))
        assert found.shape == (2, 3)
        np.testing.assert_allclose(found[0], alone[0], atol=1e-5)
        np.testing.assert_allclose(found[1, :1], alone[1], atol=1e-5)
        assert np.isnan(found[1, 1:]).all()
    logits = np.asarray(model.logits(texts))
    assert np.isnan(logits[1, 2:]).all() and np.isfinite(logits[1, :2]).all()


def test_a_chat_is_what_its_template_makes_of_it(directory, tmp_path):
    for file in directory.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    template = "{% for m in messages %}{{ m.content }} {% endfor %}{% if add_generation_prompt %}x"
    (tmp_path / "chat_template.jinja").write_text(template + "{% endif %}")
    model = hjax.load_model(tmp_path)
    asked = [{"role": "user", "content": "ab"}]
    said = [*asked, {"role": "assistant", "content": "c"}]
    plain = [model.tokenizer.encode(text, add_special=False) for text in ("ab x", "ab c ")]
    found = [generate(model, prompts, seed=1)[:2] for prompts in ([asked, said], plain)]
    assert found[0] == found[1]
    np.testing.assert_allclose(model.log_probs([asked, said]), model.log_probs(plain), atol=1e-6)


@pytest.mark.extended
def test_strings_end_a_response(model):
    whole = generate(model, ["hello"], seed=5)[0]
    string = whole.text[3:5]  # two tokens of this tokenizer
    for stop in ([string], string[0], [string, "zzzzz"]):
        wanted = stop if isinstance(stop, str) else string
        found = generate(model, ["hello"], seed=5, stop=stop)[0]
        end, count = whole.text.index(wanted) + len(wanted), len(found.tokens)
        assert (found.text, found.finish_reason) == (whole.text[:end], "stop")
        assert found.tokens == whole.tokens[:count]
        assert found.logprobs == whole.logprobs[:count]
        assert model.tokenizer.decode(found.tokens) == found.text
        assert model.tokenizer.decode(found.tokens[:-1]) == found.text[:-1]
    pieces = list(model.stream("hello", 12, seed=5, stop=[string]))
    assert "".join(piece.text for piece in pieces) == whole.text[: whole.text.index(string) + 2]
    assert pieces[-1].finish_reason == "stop"


@pytest.mark.parametrize("call, line", ERRORS, ids=[line[:24] for _, line in ERRORS])
def test_bad_input_gets_one_line(call, line, model):
    with pytest.raises(ConfigError, match=line) as caught:
        call(model)
    assert "\n" not in str(caught.value)


@pytest.mark.extended
def test_a_response_in_pieces_is_the_one_that_generate_gives(model):
    """And a second turn reads what is new alone."""
    for temperature in (0.0, 0.7):
        drawn = (model.generate(["hello"], 20, temperature, seed, top_k=5) for seed in range(50))
        long = 11 if temperature else 0
        seed, whole = next((s, w) for s, [w] in enumerate(drawn) if len(w.tokens) > long)
        pieces = list(model.stream("hello", 20, temperature, seed, top_k=5))
        assert all(piece.finish_reason == "" for piece in pieces[:-1])
        assert pieces[-1].finish_reason == whole.finish_reason
        assert [t for p in pieces for t in p.tokens] == whole.tokens
        assert "".join(p.text for p in pieces) == whole.text
        logprobs = [x for p in pieces for x in p.logprobs]
        np.testing.assert_allclose(logprobs, whole.logprobs, atol=1e-5)
    assert len(pieces) > 1
    turn = [*model.tokenizer.encode("hello"), *whole.tokens, 5]
    before = model._stream_service.stats()
    list(model.stream(turn, 2))
    after = model._stream_service.stats()
    assert after["prompt_tokens"] - before["prompt_tokens"] == len(turn)
    assert after["cached_tokens"] - before["cached_tokens"] == (len(turn) - 2) // 16 * 16 > 0


def test_what_cannot_be_streamed_is_refused_at_once(model):
    with pytest.raises(ConfigError, match="max_new_tokens=0: a whole number of 1 or more"):
        list(model.stream("hello", 0))
    with pytest.raises(ConfigError, match="exceed the model's 48 positions"):
        list(model.stream("hello", 47))
    pieces = model.stream("hello", 40)
    next(pieces)
    pieces.close()  # who listens no more is not answered on
    assert list(model.stream("a", 1))[-1].finish_reason == "length"
