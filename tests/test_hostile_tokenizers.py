"""Tokenizers that hang, crash or fill the memory are refused in one line; real ones run here."""

import json
import pickle
import time

import httpx
import pytest
import tokenizers
from serving_double import EOS, HTTP, Scripted, served

from hjax.data import limited_process
from hjax.data.limited_process import ComputationFailed, LimitedProcess
from hjax.data.tokenizer import Tokenizer
from hjax.errors import ConfigError, exit_status

PLAIN = {
    "version": "1.0",
    "added_tokens": [],
    "normalizer": None,
    "pre_tokenizer": None,
    "post_processor": None,
    "decoder": None,
    "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "é": 2, "ab": 3}, "merges": [["a", "b"]]},
}


def sequence(key, *steps):
    return {"type": "Sequence", key: list(steps)}


def nested(levels):
    part = {"type": "NFC"}
    for _ in range(levels):
        part = sequence("normalizers", part)
    return part


def replace(old, new, kind="String"):
    return {"type": "Replace", "pattern": {kind: old}, "content": new}


def split(pattern, kind="Regex", behavior="Isolated", invert=False):
    return {"type": "Split", "pattern": {kind: pattern}, "behavior": behavior, "invert": invert}


def byte_level(**fields):
    given = {"add_prefix_space": False, "trim_offsets": True, "use_regex": False, **fields}
    return {"type": "ByteLevel", **given}


def added(text, number=4):
    flags = dict.fromkeys(["single_word", "lstrip", "rstrip", "normalized"], False)
    return [{"id": number, "content": text, "special": True, **flags}]


def template(*single, ids=(0,)):
    pieces = [{"Sequence": {"id": each, "type_id": 0}} if each in "AB" else
              {"SpecialToken": {"id": each, "type_id": 0}} for each in single]  # fmt: skip
    pair = [{"Sequence": {"id": each, "type_id": 0}} for each in "AB"]
    tokens = {each: {"id": each, "ids": list(ids), "tokens": [each] * len(ids)} for each in single
              if each not in "AB"}  # fmt: skip
    return {"type": "TemplateProcessing", "single": pieces, "pair": pair, "special_tokens": tokens}


def bpe(vocabulary, merges=(), **fields):
    return {"type": "BPE", "vocab": vocabulary, "merges": list(merges), **fields}


MEMORY = "or needs more than 0.3125 GiB of memory"
# What loading says of a file.
REFUSED = {
    "a letter that becomes 60^5": (
        {"normalizer": sequence("normalizers", *[replace("a", "a" * 60)] * 5)}, MEMORY),
    "a hundred long prefixes": (
        {"normalizer": sequence("normalizers", *[{"type": "Prepend", "prepend": "b" * 10**5}] * 100
                                )}, MEMORY),
    "no regular expression": ({"normalizer": replace("((", "b", "Regex")}, "unmatched parenthesis"),
    "nested too deeply": (
        '{"normalizer": ' + '{"type": "Sequence", "normalizers": [' * 10**5 + "]}" * 10**5 + "}",
        "too deeply nested"),
    "deep for the library": ({"normalizer": nested(100)}, "recursion limit exceeded"),
    "a size of 8 GiB": (
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "/////w=="}}, MEMORY),
    "a map that is none": (
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}}, "Cannot parse"),
    "pieces of no length": (
        {"pre_tokenizer": {"type": "FixedLength", "length": 0}}, "chunk size must be non-zero"),
    "a text without the text": ({"post_processor": template("B")}, "index out of bounds"),
    "an id that no token has": (
        {"post_processor": template("x", "A", ids=[4_000_000_000])}, "adds the ids [4000000000]"),
    "a prefix inside a character": (
        {"model": bpe({"a": 0, "é": 1, "aé": 2}, [["a", "é"]], continuing_subword_prefix="x")},
        "its process was ended by SIGABRT"),
    "a prefix longer than tokens": (
        {"model": bpe({"a": 0, "b": 1, "ab": 2}, [["a", "b"]], continuing_subword_prefix="x" * 5)},
        "out of range"),
    "the highest id": ({"model": bpe({"a": 2**32 - 1, "b": 1})}, "highest id is 4294967295"),
    "a negative id": ({"model": bpe({"a": -1})}, "invalid value: integer `-1`"),
    "an id that is no integer": ({"model": bpe({"a": 1.0})}, "invalid type: floating point"),
    "an id twice": ({"model": bpe({"a": 1, "b": 1})}, "1 of its tokens have the id of another"),
    "no tokens": ({"model": bpe({})}, "it has no token"),
    "parts of another kind": ({"decoder": {"type": ["Fuse"]}, "normalizer": [1]}, "did not match"),
}  # fmt: skip
# What encoding a text, or decoding tokens, says. They load.
FAILING = {
    "an accent that becomes 60^5": (
        {"normalizer": sequence("normalizers", replace("é", "b" * 60),
                                *[replace("b", "b" * 60)] * 4)}, "é", MEMORY),
    "a known factor, a long text": (
        {"normalizer": replace("é", "b" * 900)},
        "é" * 20_000, "18000000 characters of normalized text, at most 16777216"),
    "repetition of a repetition": (
        {"pre_tokenizer": split("(b+)+$")}, "b" * 31 + "a", "retry-limit-in-match over"),
    "repetition of alternatives": (
        {"normalizer": replace("(b|bb)+$", "a", "Regex")}, "b" * 50 + "a", "retry-limit-in-match"),
    "quadratic time": ({"pre_tokenizer": split("b+a")}, "b" * 10**6, "takes longer than 1 s"),
    "a quadratic word": (
        {"model": {"type": "WordPiece", "unk_token": "a", "continuing_subword_prefix": "##",
                   "max_input_chars_per_word": 10**9, "vocab": {"a": 0, "b": 1, "##b": 2}}},
        "b" * 10**5, "takes longer than 1 s"),
    "bytes of bytes of bytes": (
        {"pre_tokenizer": sequence("pretokenizers", *[byte_level()] * 40)}, "é" * 9, MEMORY),
    "tokens that become 60^6": (
        {"decoder": sequence("decoders", *[replace("a", "a" * 60)] * 6)}, [0], MEMORY),
    "a decoder that backtracks": (
        {"decoder": sequence("decoders", {"type": "Fuse"}, replace("(b+)+$", "", "Regex"))},
        [*[1] * 31, 0], "retry-limit-in-match over"),
    "a text that is not so long": (
        {"decoder": {"type": "Strip", "content": "a", "start": 10**15, "stop": 10**15}}, [0],
        "index out of bounds"),
    "many long tokens": (
        {"model": bpe({"a": 0, "b" * 10**6: 1})}, [1] * 17, "17000016 characters of text"),
    "the text ten thousand times": (
        {"post_processor": template(*"A" * 10_000)}, "b" * 1000, MEMORY),
}  # fmt: skip
# Ids of a text, where the library alone pads, cuts off, or loads for long.
HARMLESS = {
    "padding to a billion": {
        "padding": {"strategy": {"Fixed": 10**9}, "direction": "Right", "pad_to_multiple_of": None,
                    "pad_id": 0, "pad_type_id": 0, "pad_token": "a"}},
    "truncation that crashes": {
        "truncation": {"direction": "Right", "max_length": 1, "strategy": "LongestFirst",
                       "stride": 5}},
    "an empty added token": {"added_tokens": added("")},
    "an added token of a megabyte": {"added_tokens": added("x" * (2**20 + 1))},
    "an added token's id": {"added_tokens": added("x", 4_000_000_000)},
    "nested, and not too deeply": {"normalizer": nested(40)},
}  # fmt: skip


@pytest.fixture(autouse=True)
def little_memory(monkeypatch):
    monkeypatch.setattr(limited_process, "MEMORY_BYTES", 5 * 2**26)
    monkeypatch.setattr(limited_process, "SECONDS", 120.0)  # a busy machine fills it slowly


def written(folder, parts):
    folder.mkdir(exist_ok=True)
    text = parts if isinstance(parts, str) else json.dumps(PLAIN | parts)
    (folder / "tokenizer.json").write_text(text)
    return folder


def one_line(work, *says):
    """The error of a piece of work: one short line."""
    begun = time.monotonic()
    with pytest.raises(ConfigError) as caught:
        work()
    text = str(caught.value)
    assert "\n" not in text and len(text) < 900 and all(s in text for s in says), text
    assert time.monotonic() - begun < 120
    return caught.value


# Those that end at a limit of time or memory after seconds.
LATE = (
    "a hundred long prefixes", "quadratic time", "a quadratic word", "the text ten thousand times",
    "bytes of bytes of bytes", "an accent that becomes 60^5", "a known factor, a long text",
)  # fmt: skip


def marked(names):
    """Those that take seconds are extended."""
    return [pytest.param(n, marks=[pytest.mark.extended] * (n in LATE), id=n) for n in names]


@pytest.mark.parametrize("name", marked(REFUSED))
def test_files_that_are_refused(name, tmp_path, capfd):
    parts, says = REFUSED[name]
    folder = written(tmp_path / "mine", parts)
    assert exit_status(lambda: Tokenizer.load(folder)) == 2
    said = capfd.readouterr().err
    assert said.startswith("hjax: error: tokenizer ") and "mine" in said and says in said, said
    assert said.count("\n") == 1 and len(said) < 900


@pytest.mark.parametrize("name", marked(FAILING))
def test_files_that_fail_at_a_text(name, tmp_path, monkeypatch):
    parts, given, says = FAILING[name]
    if "takes longer" in says:
        monkeypatch.setattr(limited_process, "SECONDS", 1.0)
    if " characters of " in says:
        monkeypatch.setattr(limited_process, "MEMORY_BYTES", 2**30)
    tokenizer = pickle.loads(pickle.dumps(Tokenizer.load(written(tmp_path / "mine", parts))))
    run = tokenizer.encode if isinstance(given, str) else tokenizer.decode
    error = one_line(lambda: run(given), "tokenizer mine: given ", says)
    assert isinstance(error, ComputationFailed)
    assert tokenizer.encode("a")[:1] == [0]  # the next text is none the worse
    tokenizer.save(tmp_path / "saved")
    saved = json.loads((tmp_path / "saved" / "tokenizer.json").read_text())
    assert all(saved[part] == content for part, content in parts.items() if part != "model")


@pytest.mark.parametrize("name", HARMLESS)
def test_files_that_only_look_hostile(name, tmp_path):
    tokenizer = Tokenizer.load(written(tmp_path, HARMLESS[name]))
    assert tokenizer.encode("abéa") == [3, 2, 0]
    assert tokenizer.decode([3, 2, 0]).replace(" ", "") == "abéa"


def test_tokens_beside_the_file_are_limited_too(tmp_path):
    flags = {"content": "x" * 2**21, "special": True}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "added_tokens_decoder": {"4": flags}}
    written(tmp_path, {})
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    one_line(lambda: Tokenizer.load(tmp_path), "added tokens have more than 1048576 characters")


def test_a_key_that_comes_twice(tmp_path):
    written(tmp_path, json.dumps(PLAIN)[:-1] + ', "normalizer": {"type": "NFC"}}')
    one_line(lambda: Tokenizer.load(tmp_path), "a key comes twice")


def test_a_decoder_that_may_grow_is_none_for_constraints(tmp_path):
    parts = {"decoder": sequence("decoders", *[replace("a", "a" * 60)] * 6)}
    tokenizer = Tokenizer.load(written(tmp_path, parts))
    one_line(tokenizer.token_bytes, "its decoder is not known to be harmless")


LETTERS, END = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?", r"\s*[\r\n]+|\s+(?!\S)|\s+"
CASED = (r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+%s"
         r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*%s"
         r"|%s| ?[^\s\p{L}\p{N}]+[\r\n/]*|")  # fmt: skip
SHORT = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
SENTENCE_PIECE = {
    "normalizer": sequence("normalizers", {"type": "Prepend", "prepend": "▁"}, replace(" ", "▁")),
    "decoder": sequence("decoders", replace("▁", " "), {"type": "ByteFallback"}, {"type": "Fuse"},
                        {"type": "Strip", "content": " ", "start": 1, "stop": 0}),
}  # fmt: skip


def bytes_after(*steps, normalizer=None):
    """Parts of a byte-level tokenizer with steps before the bytes."""
    return {
        "normalizer": normalizer,
        "pre_tokenizer": sequence("pretokenizers", *steps, byte_level()),
        "decoder": byte_level(add_prefix_space=True, use_regex=True),
    }


# The parts of published tokenizers.
PUBLISHED = {
    "gpt2": {"pre_tokenizer": byte_level(use_regex=True), "decoder": byte_level()},
    "llama 3": bytes_after(split(
        LETTERS + r"\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + END)) | {
        "post_processor": sequence("processors", byte_level(), template("<s>", "A"))},
    "qwen 2": bytes_after(split(
        LETTERS + r"\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + END), normalizer={"type": "NFC"}),
    "qwen 3.5": bytes_after(split(
        LETTERS + r"[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|" + END),
        normalizer={"type": "NFC"}),
    "gpt-oss": bytes_after(split(
        CASED % (SHORT, SHORT, r"\p{N}{1,3}") + END, behavior="Removed", invert=True)),
    "mistral nemo": bytes_after(split(CASED % ("", "", r"\p{N}") + END)),
    "deepseek v3": bytes_after(
        split(r"\p{N}{1,3}"), split("[一-龥぀-ゟ゠-ヿ]+"),
        split("[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?"
              "[\\p{L}\\p{M}]+| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+"),
        normalizer=sequence("normalizers")),
    "smollm 2": bytes_after({"type": "Digits", "individual_digits": True}),
    "llama 2": SENTENCE_PIECE,
    "gemma 3": {"normalizer": replace(" ", "▁"), "pre_tokenizer": split(
        " ", "String", "MergedWithPrevious"), "decoder": SENTENCE_PIECE["decoder"]},
    "command r7b": bytes_after(split(r"\d{1,3}(?=(?:\d{3})*\b)"), split(
        CASED % (SHORT, SHORT, r"\p{N}{1,3}") + END)),
}  # fmt: skip
FILES = ["tokenizers/gpt2", "tokenizers/minimind", "weights/stories260K-hf"]
TEXT = "The cat's 1234 hats,\n\n  ünï 漢字かな  🙂 didn't\tEND... x=[1,2]; DON'T   "


@pytest.fixture
def no_process(monkeypatch):
    """Fails a test whose tokenizer needs a process."""

    def ask(self, request):
        pytest.fail(f"isolated: {request[:80]!r}")

    monkeypatch.setattr(LimitedProcess, "ask", ask)


def same_as_the_library(folder, length):
    plain = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer = Tokenizer.load(folder)
    for text in (TEXT, (TEXT * (length // len(TEXT) + 1))[:length], " " * length, "1" * length, ""):
        ids = tokenizer.encode(text, add_special=False)
        assert ids == plain.encode(text, add_special_tokens=False).ids
        assert tokenizer.decode(ids) == plain.decode(ids)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_tokenizers_run_here(name, tmp_path, no_process):
    names = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    pieces = ["<s>", *(f"<0x{i:02X}>" for i in range(256)), *names, "▁", "Th", "at", "▁c"]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    merges = [["T", "h"], ["a", "t"], ["▁", "c"]]
    model = bpe(vocabulary, merges, byte_fallback="▁" in str(PUBLISHED[name]))
    same_as_the_library(written(tmp_path, {"model": model} | PUBLISHED[name]), 3000)


@pytest.mark.parametrize("name", FILES)
def test_real_tokenizers_run_here(name, test_data, no_process):
    same_as_the_library(test_data / name, 100_000)


@pytest.mark.parametrize("pattern", [
    "(a+)+$", "a*a*b", "a+b", "(a|aa)+", "a{1,99}", "a?a?a?", "a++b", r"(a)\1", "(?x) a",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\s*[\r\n]+",
])  # fmt: skip
def test_other_regular_expressions_run_apart(pattern, tmp_path):
    tokenizer = Tokenizer.load(written(tmp_path, {"pre_tokenizer": split(pattern)}))
    assert not tokenizer._backend._most_characters
    assert sorted(tokenizer.encode("aab")) in ([0, 3], [0, 0, 1])


def answer(url, **fields):
    return HTTP.post(f"{url}/v1/completions", json={"prompt": "a", "max_tokens": 3, **fields})


def test_a_server_outlives_its_tokenizer(tmp_path):
    """A text that fills the memory, one that ends in a panic, and a token that fills it."""
    parts = {
        "normalizer": FAILING["an accent that becomes 60^5"][0]["normalizer"],
        "pre_tokenizer": split("(b+)+$"),
        "decoder": sequence("decoders", replace("é", "b" * 60), *[replace("b", "b" * 60)] * 4),
    }
    tokenizer = Tokenizer.load(written(tmp_path, parts))
    service = Scripted(lambda request: [0 if len(request.prompt) == 1 else 2, EOS])
    with served(service, tokenizer=tokenizer) as (url, _, _):
        for fields in ({"prompt": "é"}, {"prompt": "b" * 31 + "a"}, {"prompt": "aa"}):
            found = answer(url, **fields, max_tokens=64)
            error = found.json()["error"]
            assert found.status_code == 500 and error["type"] == "server_error"
            assert "tokenizer " in error["message"] and "\n" not in error["message"]
        with HTTP.stream("POST", f"{url}/v1/completions", json={
            "prompt": "aa", "max_tokens": 64, "stream": True}) as stream:  # fmt: skip
            events = "".join(stream.iter_text())
        assert "server_error" in events and events.endswith("data: [DONE]\n\n")
        assert answer(url).json()["choices"][0]["text"] == "a"
        counts = httpx.get(f"{url}/metrics").text
        assert 'hjax_requests_total{path="/v1/completions",status="500"} 3.0' in counts
        assert 'status="499"' not in counts
        assert httpx.get(f"{url}/health").status_code == 200
