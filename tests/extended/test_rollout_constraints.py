"""Responses that must match: brute force over small vocabularies, re, jsonschema are the truth."""

import builtins
import dataclasses
import functools
import itertools
import json
import random
import re
import threading

import jax
import jsonschema
import llguidance
import numpy as np
import pytest
import tokenizers
from scipy.stats import chi2
from serving_double import byte_tokenizer
from tokenizers import decoders, models

import hjax
from hjax.data.tokenizer import Tokenizer
from hjax.errors import ConfigError, DataError, RunError
from hjax.models.model_config import ModelConfig
from hjax.models.parameters import decoder_network
from hjax.rollout.constrained_decoding import ConstraintCompiler
from hjax.rollout.constraint import MAX_CHARACTERS, Constraint
from hjax.rollout.language_model import LanguageModel
from hjax.rollout.requests import Request
from hjax.rollout.sampling_params import SamplingParams
from hjax.rollout.service import GenerationService
from hjax.sharding.layout import make_layouts

SECONDS = 120
# Letters, pairs of them, a character in one and in two tokens, a letter as a byte too.
WORDS = ["<s>", "</s>", "a", "b", "ab", "ba", "<0xC3>", "<0xA9>", "é", "<0x61>", "▁", "▁a"]
BOS, EOS = 0, 1


def small_tokenizer(drops_space=True):
    backend = tokenizers.Tokenizer(models.BPE({word: i for i, word in enumerate(WORDS)}, []))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    steps += [decoders.Strip(" ", 1, 0)] if drops_space else []
    backend.decoder = decoders.Sequence(steps)
    backend.add_special_tokens(["<s>", "</s>"])
    return Tokenizer(backend, {"eos_token": "</s>"}, name="small")


def small_model(tokenizer, vocab, eos=(), seed=3):
    config = ModelConfig(
        vocab_size=vocab, hidden_size=16, mlp_size=24, layers=2, heads=4, kv_heads=2, head_dim=8,
        max_length=256,
    )  # fmt: skip
    params = decoder_network(config).create(seed, make_layouts(jax.devices()[:1]).generate)
    # As if trained: probabilities that differ.
    params = jax.tree.map(lambda x: 3 * x, params)
    return LanguageModel(config, params, tokenizer, eos_ids=eos)


@pytest.fixture(scope="module")
def model():
    return small_model(small_tokenizer(), len(WORDS), (EOS,))


@pytest.fixture(scope="module")
def byte_model():
    return small_model(byte_tokenizer(), 260, (257,))


@pytest.fixture(scope="module")
def stories(test_data):
    return hjax.load_model(test_data / "weights" / "stories260K-hf")


def answers(service, requests):
    """Tokens, log-probs and finish of each."""
    found = [[] for _ in requests]
    ended = [threading.Event() for _ in requests]

    def hear(i, piece):
        found[i].append(piece)
        if piece.finish:
            ended[i].set()

    for i, request in enumerate(requests):
        service.submit(request, functools.partial(hear, i))
    assert all(event.wait(SECONDS) for event in ended)
    return [
        (
            [token for piece in pieces for token in piece.tokens],
            [x for piece in pieces for x in piece.logprobs],
            pieces[-1].finish,
        )
        for pieces in found
    ]


def asked(model, requests, **settings):
    service = GenerationService(model, **settings)
    try:
        return answers(service, requests)
    finally:
        service.close(0)


def tokens_of(allowed):
    bits = np.unpackbits(allowed.astype("<u4").view(np.uint8), bitorder="little")
    return set(np.flatnonzero(bits).tolist())


# What text is made of


@pytest.mark.parametrize(
    "tokenizer",
    [Tokenizer.characters("ab é"), byte_tokenizer(), small_tokenizer(), small_tokenizer(False)],
    ids=["characters", "byte-level", "sentencepiece", "spaces kept"],
)
def test_a_text_is_its_tokens_bytes(tokenizer):
    table = tokenizer.token_bytes()
    source = random.Random(0)
    first = next(i for i, each in enumerate(table.tokens) if each)
    for _ in range(300):
        tokens = source.choices(range(len(table.tokens)), k=6)
        spelled = b"".join(table.tokens[token] for token in tokens)
        try:
            text = spelled.decode()
        except UnicodeDecodeError:
            continue
        assert tokenizer.decode_response([first], tokens) == text
        dropped = text.startswith(" ") and table.drops_space
        assert tokenizer.decode_response([], tokens) == text[dropped:]


@pytest.mark.parametrize(
    "name", ["tokenizers/gpt2", "tokenizers/minimind", "weights/stories260K-hf"]
)
def test_bytes_of_real_vocabularies_are_those_that_llguidance_reads(name, test_data):
    tokenizer = Tokenizer.load(test_data / name)
    table = tokenizer.token_bytes().tokens
    theirs = llguidance.LLTokenizer((test_data / name / "tokenizer.json").read_text())
    # Of specials there is no text; a byte 0xFF, which it takes for the mark of one, is in no text.
    differ = [i for i, own in enumerate(table) if own and own != theirs.decode_bytes([i])]
    assert [table[i] for i in differ] == [b"\xff"]
    text = "Zwölf Boxkämpfer, 😀 日本語\n\ttab."
    tokens = tokenizer.encode(text, add_special=False)
    if not tokenizer.token_bytes().drops_space:  # which also changes spaces and unknown letters
        assert b"".join(table[token] for token in tokens) == text.encode()


@pytest.mark.parametrize(
    "decoder", [None, decoders.WordPiece(), decoders.Strip(" ", 1, 0), decoders.Replace(
        tokenizers.Regex("a+"), "b")],
)  # fmt: skip
def test_a_decoder_that_looks_further_than_a_token_is_refused(decoder):
    backend = tokenizers.Tokenizer(models.BPE({"a": 0}, []))
    if decoder is not None:
        backend.decoder = decoder
    with pytest.raises(DataError, match="tokenizer odd: its decoder .* does not say which bytes"):
        Tokenizer(backend, {}, name="odd").token_bytes()


# What may come next

PATTERNS = [
    "ab", "a{2,4}b?", "(ab|é)b?a?", "é{0,2}(a| b)", " ?a", " ab| b", "[^a]{1,2}", "(a|ab)(ba|é)",
    "", "^aé$", "(?:b é){1}", "[ab]{3}|é{4}", "(?i:A)b",
]  # fmt: skip


def texts(pattern):
    """All texts of up to five characters that match."""
    every = ("".join(t) for n in range(6) for t in itertools.product("abé ", repeat=n))
    return {text for text in every if re.fullmatch(pattern, text)}


def check_every_beginning(matchers, constraint, options, prompt, table, matching):
    """At each beginning of a response the tokens that go on to one of ``matching``, bytes."""
    ways = [()]
    while ways:
        tokens = ways.pop()
        matcher = matchers.matcher(constraint, options, prompt)
        finish = matcher.advance(tokens)
        begun = b"".join(table[token] for token in tokens)
        expected = {
            token
            for token, own in enumerate(table)
            if own and any(text.startswith(begun + own) for text in matching)
        }
        ends = set(options.stop) if begun in matching else set()
        assert tokens_of(matcher.bitmask) == expected | ends
        assert finish == ""
        ways += [(*tokens, token) for token in expected]


@pytest.mark.parametrize("prompt", [(BOS,), (BOS, 3)], ids=["no text before", "text before"])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_at_every_beginning_the_tokens_that_go_on_to_a_match(pattern, prompt):
    tokenizer = small_tokenizer()
    table = tokenizer.token_bytes().tokens
    matching = {text.encode() for text in texts(pattern)}
    if prompt == (BOS,):  # the first space is not in the text
        kept = {text for text in matching if not text.startswith(b" ")}
        matching = kept | {b" " + text for text in matching}
    check_every_beginning(
        ConstraintCompiler(tokenizer, len(WORDS)),
        Constraint(regex=pattern), SamplingParams(stop=(EOS,)), prompt, table, matching,
    )  # fmt: skip


@pytest.mark.parametrize(
    "schema, values",
    [
        ({"enum": ["ab", "é", "a", None]}, ["ab", "é", "a", None]),
        ({"type": "boolean"}, [True, False]),
        ({"type": "integer", "minimum": 7, "maximum": 11}, range(7, 12)),
        ({"type": "string", "pattern": "^[ab]{1,2}$"}, ["a", "b", "aa", "ab", "ba", "bb"]),
    ],
)
def test_at_every_beginning_the_bytes_that_go_on_to_json_that_the_schema_allows(schema, values):
    table = byte_tokenizer().token_bytes().tokens
    matching = {json.dumps(value, ensure_ascii=False).encode() for value in values}
    check_every_beginning(
        ConstraintCompiler(byte_tokenizer(), 260),
        Constraint.of_json(schema), SamplingParams(stop=(257,)), (65,), table, matching,
    )  # fmt: skip


@pytest.mark.parametrize("prompt", [(BOS,), (BOS, 3)], ids=["no text before", "text before"])
def test_at_every_beginning_the_tokens_that_go_on_by_a_grammar(prompt):
    tokenizer, each = small_tokenizer(), ("a", "ab", "é")
    grammar = 'start: x x?\nx: "a" /b?/ | "é"'
    matching = {(one + other).encode() for one in each for other in ("", *each)}
    if prompt == (BOS,):  # the first space is not in the text
        matching |= {b" " + text for text in matching}
    check_every_beginning(
        ConstraintCompiler(tokenizer, len(WORDS)), Constraint(grammar=grammar),
        SamplingParams(stop=(EOS,)), prompt,
        tokenizer.token_bytes().tokens, matching,
    )  # fmt: skip


def test_a_first_space_that_a_grammar_asks_for_is_one_of_the_text():
    matchers = ConstraintCompiler(small_tokenizer(), len(WORDS))
    space = WORDS.index("▁")

    def takes(tokens, prompt):
        matcher = matchers.matcher(Constraint(grammar='start: " "? "a"'), SamplingParams(), prompt)
        may = lambda t: t in tokens_of(matcher.bitmask)  # noqa: E731
        return all(may(t) and matcher.advance([t]) != "no" for t in tokens)

    a, with_space = WORDS.index("a"), WORDS.index("▁a")
    assert takes([with_space], (BOS, 3)) and takes([a], (BOS, 3))
    assert takes([space, with_space], (BOS,)) and takes([with_space], (BOS,))
    assert not takes([space, with_space], (BOS, 3))


CHOICE = ["a.b", "a|b", "(é)", "^b$", "a b", "\\d+", "[a-b]", "a\nb&&~#-{2}", "", "a.bc"]


def test_a_choice_is_word_for_word():
    matching = {text.encode() for text in CHOICE}
    check_every_beginning(
        ConstraintCompiler(byte_tokenizer(), 260), Constraint.of_choice(CHOICE),
        SamplingParams(stop=(257,)), (65,),
        byte_tokenizer().token_bytes().tokens, matching,
    )  # fmt: skip


def test_every_response_follows_its_grammar(byte_model):
    grammar = 'start: "a" start "b" | "(" start ")" | /[éü]{1,2}/ | %json {"enum": [1, "x"]}'
    texts = {
        byte_model.tokenizer.decode_response(request.prompt, tokens)
        for request in [Request((65,), 40, SamplingParams(stop=(257,)))]
        for tokens, _, finish in asked(
            byte_model,
            [dataclasses.replace(request, seed=i, constraint=Constraint(grammar=grammar))
             for i in range(24)],
        )
        if finish == "stop"
    }  # fmt: skip
    for text in texts:
        while (inner := text[1:-1]) and text[0] + text[-1] in ("ab", "()"):
            text = inner
        assert re.fullmatch('[éü]{1,2}|1|"x"', text)
    assert len(texts) > 4 and any(text[0] in "a(" for text in texts)


def test_what_options_forbid_is_not_allowed_and_ends_where_nothing_is_left():
    matchers = ConstraintCompiler(small_tokenizer(), len(WORDS))
    constraint = Constraint(regex="(ab){1,2}")

    def after(tokens, **options):
        matcher = matchers.matcher(constraint, SamplingParams(**options), (BOS, 3))
        return matcher.advance(tokens), tokens_of(matcher.bitmask)

    a, b, ab, byte = (WORDS.index(word) for word in ("a", "b", "ab", "<0x61>"))
    assert after((ab,), stop=(EOS,)) == ("", {a, ab, byte, EOS})
    assert after((ab,), stop=(EOS,), bad=(a, byte)) == ("", {ab, EOS})
    assert after((ab,), stop=(EOS,), min_tokens=2) == ("", {a, ab, byte})
    assert after((a, b), stop=(EOS,), min_tokens=2) == ("", {a, ab, byte, EOS})
    # An ordinary token that stops is one more end, and not a token of the text.
    assert after((ab,), stop=(b,)) == ("", {a, ab, byte, b})
    assert after((a,), stop=(EOS, 5)) == ("", {b, WORDS.index("ba")} - {5})
    for options in ({}, {"stop": (EOS,), "bad": (EOS,)}, {"stop": (EOS,), "min_tokens": 9}):
        assert after((ab, ab), **options) == ("stop", set())
    assert after((ab, ab), stop=(EOS,)) == ("", {EOS})
    finish, left = after((a,), stop=(EOS,), bad=(b, WORDS.index("ba")))
    assert finish.startswith("constraint: no token that may be drawn goes on") and not left


@pytest.mark.parametrize(
    "constraint, options, line",
    [
        (Constraint(regex="("), {}, r"regex=\(: unclosed group"),
        (Constraint(regex=r"(a)\1"), {}, "backreferences are not supported"),
        (Constraint(regex="a(?=b)"), {}, "look-around, including look-ahead"),
        (Constraint(regex=r"\bab"), {}, r"regex=\\bab: lookarounds not supported"),
        (Constraint(regex="[a&&b]"), {}, "constraint: no token may begin a response: nothing mat"),
        (Constraint(regex="x+"), {}, "its first tokens are not in the vocabulary"),
        (Constraint(regex="b"), {"bad": (3,)}, "forbidden by bad"),
        (Constraint(regex="ab"), {"forced": (2, 2)}, "forced token 2 at position 1: the constrai"),
        (Constraint(regex="ab"), {"forced": (2, EOS), "stop": (EOS,)}, "forced token 1 at positi"),
        (Constraint(json_schema='{"not": {}}'), {}, "json_schema=.*Unimplemented keys"),
        (Constraint(grammar='start: "a'), {}, r'grammar=start: "a: 1\(10\): lexer error'),
        (Constraint(grammar='start: "b"\n| x'), {}, 'grammar=start: "b" [|] x: at 1.*unknown name'),
        (Constraint(grammar='start: <|im_end|>'), {}, "a special token has no text; leave it out"),
        (Constraint(grammar='x: "a"'), {}, "no start rule found"),
        (Constraint(grammar='start: start'), {}, "no token may begin a response: nothing mat"),
        (Constraint(json_schema='{"type": "wrong"}'), {}, "Invalid type: wrong"),
        (Constraint(json_schema='{"enum": []}'), {}, "Unsatisfiable schema"),
        (Constraint(json_schema='{"$ref": "http://x.y/z"}'), {}, "not present in a registry"),
        (Constraint(json_schema='{"type": "string", "pattern": "("}'), {}, "unclosed group"),
        (Constraint.of_json({"oneOf": [{"type": "integer"}, {"type": "number"}]}), {}, "oneOf co"),
    ],
)  # fmt: skip
def test_what_cannot_be_met_is_refused_in_a_line(constraint, options, line):
    matchers = ConstraintCompiler(small_tokenizer(), len(WORDS))
    with pytest.raises(ConfigError, match=line) as caught:
        matchers.matcher(constraint, SamplingParams(**options), (3,))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "made, line",
    [
        (lambda: Constraint(), "give one of them"),
        (lambda: Constraint(regex="a", json_schema="{}"), "give one of them"),
        (lambda: Constraint(regex="a", grammar="a"), "give one of them"),
        (lambda: Constraint(grammar='start: "a"\n %llguidance {}'), "%llguidance is not supported"),
        (lambda: Constraint.of_choice("ab"), "choice='ab': a list of texts"),
        (lambda: Constraint.of_choice([]), "one at least"),
        (lambda: Constraint.of_choice(["a", 1]), "a list of texts"),
        (lambda: Constraint(regex=3), "regex=3: a string"),
        (lambda: Constraint(regex="\ud800"), "whole characters"),
        (lambda: Constraint(regex="a" * (MAX_CHARACTERS + 1)), f"at most {MAX_CHARACTERS}"),
        (lambda: Constraint.of_json({"enum": ["a" * MAX_CHARACTERS]}), f"at most {MAX_CHARACTERS}"),
        (lambda: Constraint(json_schema="{"), "json_schema: not JSON"),
        (lambda: Constraint(json_schema="[1]"), r"json_schema=\[1\]: an object"),
        (lambda: Constraint.of_json({"a": {1, 2}}), "json_schema: not JSON"),
        (lambda: Constraint.of_json({"x-guidance": {"lenient": True}}), "x-guidance is not supp"),
    ],
)  # fmt: skip
def test_what_is_no_constraint_is_refused(made, line):
    with pytest.raises(ConfigError, match=line):
        made()


def test_without_tokenizer_or_llguidance_it_is_said(monkeypatch):
    with pytest.raises(ConfigError, match="this model has no tokenizer"):
        ConstraintCompiler(None, 9).matcher(Constraint(regex="a"), SamplingParams(), ())
    plain = builtins.__import__

    def without(name, *rest, **more):
        if name == "llguidance":
            raise ModuleNotFoundError(name=name)
        return plain(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ConfigError, match=r"pip install 'hjax\[constraints\]'"):
        ConstraintCompiler(small_tokenizer(), len(WORDS)).matcher(
            Constraint(regex="a"), SamplingParams(), ()
        )


HEAVY = [
    "(a{1,1000}){1,1000}", "((a{1,100}){1,100}){1,100}", "(.*a){50}", "(a|b)*a(a|b){30}",
    "|".join(f"word{i}x*" for i in range(5000)), "a" * MAX_CHARACTERS,
    "(" * 2000 + "a" + ")" * 2000,
    "(" * 60 + "a" + "{2})" * 60, r"(\w{1,500}\d{1,500}){9}", ".{0,1000000}b",
]  # fmt: skip


@pytest.mark.parametrize("pattern", HEAVY, ids=lambda pattern: pattern[:12])
@pytest.mark.timeout(20)
def test_a_heavy_pattern_holds_nobody_up(pattern):
    """Compiled, refused, or given up on the way: within limits, and the same each time."""
    matchers = ConstraintCompiler(small_tokenizer(), len(WORDS))

    def tried():
        try:
            matcher = matchers.matcher(Constraint(regex=pattern), SamplingParams(), (3,))
        except ConfigError as error:
            return str(error)
        source, drawn, finish = random.Random(0), [], ""
        while not finish and len(drawn) < 60:
            drawn.append(source.choice(sorted(tokens_of(matcher.bitmask))))
            finish = matcher.advance(drawn[-1:])
        assert finish in ("", "stop") or finish.startswith("constraint: it grew beyond what")
        return drawn, finish

    assert tried() == tried() == tried()


# What is drawn


def sequences(model, prompt, constraint, options):
    """All responses that a matching one can be, with their exact probability.

    At each position the model's logits over what ``texts`` say may come, in float64.
    """
    table = model.tokenizer.token_bytes().tokens
    matching = {text.encode() for text in texts(constraint.regex)}
    found, ways = {}, [((), 1.0)]
    while ways:
        tokens, share = ways.pop()
        begun = b"".join(table[token] for token in tokens)
        may = {
            token
            for token, own in enumerate(table)
            if own and any(text.startswith(begun + own) for text in matching)
        } - options.banned
        if begun in matching:
            may |= {EOS}
        logits = np.asarray(model.logits([[*prompt, *tokens]])[0, -1], np.float64)
        left = np.full(len(logits), -np.inf)
        left[[*may]] = logits[[*may]] / options.temperature
        if options.top_k:
            left[left < np.sort(left)[-options.top_k]] = -np.inf
        weights = np.exp(left - left.max())
        if options.top_p < 1:
            order = np.argsort(-weights)
            enough = np.cumsum(weights[order]) >= options.top_p * weights.sum()
            weights[order[np.argmax(enough) + 1 :]] = 0
        weights /= weights.sum()
        for token in np.flatnonzero(weights):
            way = (*tokens, int(token)), share * weights[token]
            if token == EOS:
                found[way[0]] = way[1]
            else:
                ways.append(way)
    return found


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, marks=pytest.mark.slow),
        pytest.param({"temperature": 0.6}, marks=pytest.mark.slow),
        pytest.param({"top_k": 2}, marks=pytest.mark.slow),
        {"temperature": 1.7, "top_p": 0.8, "bad": (4,)},
    ],
    ids=["plain", "temperature", "top-k", "top-p and a ban"],
)
def test_draws_follow_the_exact_renormalised_probabilities(settings, model):
    constraint, prompt = Constraint(regex="(ab|é)b?a?"), (BOS, 3)
    options = SamplingParams(stop=(EOS,), **settings)
    expected = sequences(model, prompt, constraint, options)
    assert sum(expected.values()) == pytest.approx(1)
    draws = 1000
    requests = [Request(prompt, 20, options, 11, i, constraint) for i in range(draws)]
    found = asked(model, requests, slots=64, max_queue=draws, prefix_tokens=0)
    times = dict.fromkeys(expected, 0)
    for tokens, logprobs, finish in found:
        assert finish == "stop"
        times[tuple(tokens)] += 1
        assert sum(logprobs) == pytest.approx(np.log(expected[tuple(tokens)]), abs=1e-4)
    share = {way: p * draws for way, p in expected.items()}
    common = [way for way in share if share[way] >= 5]
    rare = sum(share[way] for way in share if way not in common)
    statistic = sum((times[way] - share[way]) ** 2 / share[way] for way in common)
    if rare:
        seen = sum(times[way] for way in share if way not in common)
        statistic += (seen - rare) ** 2 / rare
    assert len(common) > 5 and statistic < chi2.ppf(0.999, len(common) - (not rare))


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "é", None]}, "maxItems": 3},
        "inner": {"$ref": "#/$defs/inner"},
    },
    "required": ["name", "age", "inner"],
    "additionalProperties": False,
    "$defs": {"inner": {"type": "object", "properties": {"x": {"type": "number"}},
                        "required": ["x"], "additionalProperties": False}},
}  # fmt: skip
MATCHED = [
    r"(19|20)[0-9]{2}-[01][0-9]-[0-3][0-9]",
    r"[A-Z][a-z]{2,8}( [a-z]{1,6}){0,4}\.",
    "(日本|语|é😀){1,4}",
    r' ?"(\\"|[^"\\\n]){0,12}"',
]


def check_regex(model, pattern, prompts, each):
    options = SamplingParams(stop=model.eos_ids)
    requests = [
        Request(tuple(prompt), 150, options, seed, 0, Constraint(regex=pattern))
        for prompt in prompts
        for seed in range(each)
    ]
    texts = set()
    for request, (tokens, _, finish) in zip(requests, asked(model, requests), strict=True):
        text = model.tokenizer.decode_response(request.prompt, tokens)
        assert finish == "stop" and re.fullmatch(pattern, text), (finish, text)
        texts.add(text)
    return texts


@pytest.mark.parametrize("pattern", MATCHED)
def test_every_response_of_bytes_matches(pattern, byte_model):
    assert len(check_regex(byte_model, pattern, [[65], [66, 67]], 20)) > 5


@pytest.mark.parametrize(
    "pattern", [pytest.param(each, marks=pytest.mark.slow) for each in MATCHED[:3]] + MATCHED[3:]
)
def test_every_response_of_trained_weights_matches(pattern, stories):
    prompts = [stories.tokenizer.encode("Once upon a time"), stories.tokenizer.encode("")]
    check_regex(stories, pattern, prompts, 6)


def check_json(model, schema, count):
    constraint, whole = Constraint.of_json(schema), 0
    requests = [
        Request((66, 65), 220, SamplingParams(stop=model.eos_ids), seed, 0, constraint)
        for seed in range(count)
    ]
    for tokens, _, finish in asked(model, requests):
        text = model.tokenizer.decode_response((66, 65), tokens)
        if finish == "stop":
            jsonschema.validate(json.loads(text), schema)
            whole += 1
        else:
            assert finish == "length" and len(tokens) == 220
    return whole


def test_every_response_is_json_that_the_schema_allows(byte_model):
    assert check_json(byte_model, SCHEMA, 24) > 0


@pytest.mark.slow
def test_every_response_of_trained_weights_is_json(stories):
    assert check_json(stories, SCHEMA, 24) > 12
    any_name = {"type": "object", "additionalProperties": {"type": "integer"}, "maxProperties": 2}
    assert check_json(stories, any_name, 24) > 0


@pytest.mark.parametrize("count", [4, pytest.param(60, marks=pytest.mark.slow)])
def test_constrained_rows_and_others_stand_together_and_change_nothing(count, byte_model):
    source = random.Random(4)
    kinds = [None, None, *(Constraint(regex=p) for p in MATCHED), Constraint.of_json(SCHEMA)]
    requests = [
        Request(
            tuple(source.choices(range(256), k=source.randint(1, 40))),
            source.randint(1, 60),
            SamplingParams(
                temperature=source.choice([0, 0.7, 1.0]), top_p=source.choice([1.0, 0.9]),
                presence_penalty=source.choice([0, 0.5]), stop=source.choice([(), (257,)]),
                min_tokens=source.choice([0, 4]),
            ),
            seed=source.randrange(2**32), choice=source.choice([0, 3]),
            constraint=source.choice(kinds),
        )
        for _ in range(count)
    ]  # fmt: skip
    together = asked(byte_model, requests, slots=5)
    alone = asked(byte_model, requests, slots=1)
    if count > 4:
        guessing = asked(byte_model, requests, slots=5, lookup=3)
        assert [(one[0], one[2]) for one in guessing] == [(one[0], one[2]) for one in alone]
    plain = [dataclasses.replace(each, constraint=None) for each in requests]
    plain = asked(byte_model, plain, slots=1)
    for request, one, other, free in zip(requests, together, alone, plain, strict=True):
        assert (one[0], one[2]) == (other[0], other[2])
        np.testing.assert_allclose(one[1], other[1], rtol=1e-5, atol=1e-5)
        if request.constraint is None:
            assert (one[0], one[2]) == (free[0], free[2])


def test_no_program_is_compiled_for_a_constraint(byte_model):
    service = GenerationService(byte_model, slots=2)
    try:
        counts = []
        for pattern in (None, "[a-c]{9}", "[0-9]{9}", "é{9}"):
            constraint = None if pattern is None else Constraint(regex=pattern)
            answers(service, [Request((65,), 9, SamplingParams(), 0, 0, constraint)])
            programs = byte_model.engine._decode, byte_model.engine._first
            counts.append([program._cache_size() for program in programs])
        assert counts == counts[:1] * 4
    finally:
        service.close(0)


def test_generate_takes_a_constraint_and_draws_as_before_without(byte_model):
    prompts = ["ab", "c", "def"]
    pattern = "[a-f]{3,6}(é|ü)"
    found = byte_model.generate(prompts, 20, seed=5, constraint=Constraint(regex=pattern))
    assert all(re.fullmatch(pattern, each.text) for each in found)
    assert [each.finish_reason for each in found] == ["stop"] * 3
    assert [len(each.logprobs) for each in found] == [len(each.tokens) for each in found]
    anything = byte_model.generate(prompts, 8, seed=5, constraint=Constraint(regex="(?s).*"))
    short = byte_model.generate(prompts, 2, seed=5, constraint=Constraint(regex="a{3}"))
    assert [(each.text, each.finish_reason) for each in short] == [("aa", "length")] * 3
    assert all(each.finish_reason in ("stop", "length") for each in anything)
    with pytest.raises(ConfigError, match="unclosed group"):
        byte_model.generate(prompts, 8, constraint=Constraint(regex="("))


def test_a_text_that_cannot_go_on_is_an_error(byte_model):
    model = small_model(Tokenizer.characters("ab"), 5, (2,))
    with pytest.raises(RunError, match="response 0: constraint: no token that may be drawn"):
        model.generate(["ab"], 8, constraint=Constraint(regex="ax"))
